# Functions for reproducible archives. hack/image and hack/release source this file in the root of the repository.
# shellcheck shell=bash

version=$(sed -nE 's/^version = "(.*)"/\1/p' Cargo.toml | head -n 1)
target=${CARGO_TARGET_DIR:-target}
[[ $target == /* ]] || target=$PWD/$target
# The time of the sources, so that archives do not depend on the build time.
: "${SOURCE_DATE_EPOCH:=$(git log -1 --format=%ct 2>/dev/null || echo 0)}"
created=$(date --utc --date "@$SOURCE_DATE_EPOCH" +%Y-%m-%dT%H:%M:%SZ)
# Annotations of an image.
labels=$(printf '"org.opencontainers.image.title":"drayman","org.opencontainers.image.version":"%s","org.opencontainers.image.licenses":"Apache-2.0","org.opencontainers.image.created":"%s"' "$version" "$created")

# DIRECTORY FILE: creates a tar archive of a directory that depends only on names, contents and modes.
pack() {
    tar --create --file "$2" --directory "$1" --sort=name --format=ustar --owner=0 --group=0 --numeric-owner \
        --mtime="@$SOURCE_DATE_EPOCH" --no-recursion --files-from <(cd "$1" && find . -mindepth 1 -printf '%P\n' | sort)
}

digest() { sha256sum "$1" | cut -d ' ' -f 1; }

# LAYOUT TYPE FILE: adds a file to an OCI layout under its digest, and prints its descriptor without the closing brace.
blob() {
    local sum
    sum=$(digest "$3")
    mkdir -p "$1/blobs/sha256"
    cp "$3" "$1/blobs/sha256/$sum"
    printf '{"mediaType":"application/vnd.oci.image.%s","digest":"sha256:%s","size":%d' "$2" "$sum" "$(stat --format %s "$3")"
}

# LAYOUT DESCRIPTOR NAME: completes an OCI layout with one image or index, whose descriptor lacks the closing brace.
layout() {
    printf '{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[%s,"annotations":{"io.containerd.image.name":"%s","org.opencontainers.image.ref.name":"%s"}}]}' \
        "$2" "$3" "${3##*:}" >"$1/index.json"
    printf '{"imageLayoutVersion":"1.0.0"}' >"$1/oci-layout"
}
