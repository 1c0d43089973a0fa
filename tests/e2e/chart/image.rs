//! The image: `hack/image` builds it reproducibly from a static program.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read as _, Seek as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use serde_json::Value;

use crate::chart::helm::repository;
use crate::harness;

/// The image name in the tests, as in the chart's default values.
pub(crate) const NAME: &str = concat!("localhost/drayman:", env!("CARGO_PKG_VERSION"));

pub(crate) fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// Runs `hack/image` with a fixed SOURCE_DATE_EPOCH.
fn make(output: &Path, arguments: &[&str]) -> Output {
    Command::new(repository("hack/image"))
        .arg("--output")
        .arg(output)
        .args(arguments)
        .env("CARGO_TARGET_DIR", harness::target())
        .env("SOURCE_DATE_EPOCH", "1700000000")
        .output()
        .expect("hack/image starts")
}

/// The archive with the program of this build. It is built once in a test run and shared by its processes.
pub(crate) fn archive() -> &'static Path {
    static ARCHIVE: OnceLock<PathBuf> = OnceLock::new();
    ARCHIVE.get_or_init(|| {
        let output = harness::target().join("image-of-tests");
        std::fs::create_dir_all(&output).expect("a directory");
        // The lock is released when the file is closed.
        let mut made_for = std::fs::File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(output.join("made-for"))
            .expect("a file");
        rustix::fs::flock(&made_for, rustix::fs::FlockOperation::LockExclusive).expect("a lock");
        let mut made = String::new();
        made_for.read_to_string(&mut made).expect("UTF-8");
        let run = std::env::var("NEXTEST_RUN_ID").unwrap_or_default();
        if run.is_empty() || made != run {
            let made = make(&output, &["--profile", "dev"]);
            assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
            made_for.set_len(0).expect("a file");
            made_for.rewind().expect("a file");
            made_for.write_all(run.as_bytes()).expect("a file");
        }
        output.join(format!(
            "drayman-{}-{}.tar",
            env!("CARGO_PKG_VERSION"),
            architecture()
        ))
    })
}

fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program)
        .args(arguments)
        .env("LC_ALL", "C")
        .output()
        .expect("a program of every Linux");
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).expect("UTF-8")
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).expect("a file")).expect("JSON")
}

/// An unpacked archive. All files have the current time.
fn unpack(archive: &Path) -> tempfile::TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    let (from, to) = (
        archive.to_str().expect("UTF-8"),
        directory.path().to_str().expect("UTF-8"),
    );
    run(
        "tar",
        &["--extract", "--touch", "--file", from, "--directory", to],
    );
    directory
}

/// The blob of a descriptor; its digest and size must match.
fn blob(layout: &Path, descriptor: &Value) -> PathBuf {
    let digest = descriptor["digest"].as_str().expect("a digest");
    let digest = digest.strip_prefix("sha256:").expect("sha256");
    let path = layout.join("blobs/sha256").join(digest);
    assert_eq!(
        std::fs::metadata(&path).expect("a blob").len(),
        descriptor["size"].as_u64().expect("a size")
    );
    assert!(run("sha256sum", &[path.to_str().expect("UTF-8")]).starts_with(digest));
    path
}

/// The program from the archive, and the directory that contains it until it is dropped.
pub(crate) fn program() -> (tempfile::TempDir, PathBuf) {
    let layout = unpack(archive());
    let index = json(&layout.path().join("index.json"));
    let manifest = json(&blob(layout.path(), &index["manifests"][0]));
    let root = unpack(&blob(layout.path(), &manifest["layers"][0]));
    let program = root.path().join("drayman");
    (root, program)
}

#[test]
fn an_image_is_the_program_and_its_licence_and_nothing_else() {
    let unpacked = unpack(archive());
    let layout = unpacked.path();
    let index = json(&layout.join("index.json"));
    let named = &index["manifests"][0];
    assert_eq!(named["annotations"]["io.containerd.image.name"], NAME);
    assert_eq!(named["platform"]["architecture"], architecture());
    let manifest = json(&blob(layout, named));
    let config = json(&blob(layout, &manifest["config"]));
    assert_eq!(config["config"]["User"], "65532:65532", "not root by default");
    assert_eq!(config["config"]["Entrypoint"], serde_json::json!(["/drayman"]));
    assert_eq!(config["config"]["Env"], serde_json::json!(["MALLOC_ARENA_MAX=1"]));
    assert_eq!(config["created"], "2023-11-14T22:13:20Z");
    assert_eq!(manifest["layers"].as_array().map(Vec::len), Some(1));
    let layer = blob(layout, &manifest["layers"][0]);
    assert_eq!(config["rootfs"]["diff_ids"][0], manifest["layers"][0]["digest"]);
    let listed = run(
        "tar",
        &[
            "--list",
            "--verbose",
            "--numeric-owner",
            "--file",
            layer.to_str().expect("UTF-8"),
        ],
    );
    let files: BTreeSet<(String, String, String)> = listed
        .lines()
        .map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            (
                fields[0].to_owned(),
                fields[1].to_owned(),
                fields[fields.len() - 1].to_owned(),
            )
        })
        .collect();
    let file = |mode: &str, name: &str| (mode.to_owned(), "0/0".to_owned(), name.to_owned());
    assert_eq!(
        files,
        [file("-rwxr-xr-x", "drayman"), file("-rw-r--r--", "LICENSE")].into()
    );
    // The layout has no other blobs.
    let blobs = std::fs::read_dir(layout.join("blobs/sha256"))
        .expect("blobs")
        .count();
    assert_eq!(blobs, 3);
}

#[test]
fn the_same_program_makes_the_same_image() {
    let (_root, program) = program();
    run("chmod", &["700", program.to_str().expect("UTF-8")]);
    let again = tempfile::tempdir().expect("a directory");
    let script = "umask 077; exec \"$0\" \"$@\"";
    let made = Command::new("bash")
        .args(["-c", script])
        .arg(repository("hack/image"))
        .args(["--profile", "dev", "--program"])
        .arg(&program)
        .arg("--output")
        .arg(again.path())
        .env("SOURCE_DATE_EPOCH", "1700000000")
        .env("TZ", "Asia/Tokyo")
        .output()
        .expect("hack/image starts");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let first = archive();
    let second = again.path().join(first.file_name().expect("a name"));
    assert!(std::fs::read(first).expect("first") == std::fs::read(&second).expect("second"));
    assert_eq!(
        std::fs::read(first.with_extension("spdx.json").as_path()).ok(),
        std::fs::read(second.with_extension("spdx.json").as_path()).ok()
    );
    let message = String::from_utf8(made.stdout).expect("UTF-8");
    let index = json(&unpack(first).path().join("index.json"));
    assert_eq!(
        message.trim(),
        index["manifests"][0]["digest"],
        "the digest by which a registry knows it"
    );
}

#[test]
fn the_whole_recipe_run_again_makes_the_same_image() {
    let again = tempfile::tempdir().expect("a directory");
    let made = make(again.path(), &["--profile", "dev"]);
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let second = again.path().join(archive().file_name().expect("a name"));
    assert!(std::fs::read(archive()).expect("first") == std::fs::read(second).expect("second"));
}

/// The tests have no container engine, so this compares the Containerfile with the script.
#[test]
fn the_containerfile_and_the_script_build_the_same_image() {
    let file = std::fs::read_to_string(repository("Containerfile")).expect("a file");
    let last = file.split("\nFROM ").last().expect("the last stage");
    let lines: Vec<&str> = last.lines().collect();
    assert_eq!(
        lines,
        [
            "scratch",
            "COPY --from=build /image/ /",
            "USER 65532:65532",
            "ENV MALLOC_ARENA_MAX=1",
            "ENTRYPOINT [\"/drayman\"]"
        ]
    );
    for content in [
        "hack/image ${TARGETARCH:+--architecture \"$TARGETARCH\"}",
        "/release/drayman /image/drayman",
        "-m 644 -D LICENSE /image/LICENSE",
    ] {
        assert!(file.contains(content), "{content}");
    }
    assert!(
        file.contains(NAME),
        "the name that the chart's default values give"
    );
}

/// Panic messages contain paths of source files. A program made by `cargo build` contains the local ones, which `hack/image` must detect.
/// It checks the program that it builds in the same way.
#[test]
fn a_release_must_not_contain_the_path_of_its_build() {
    let (_root, program) = program();
    let path = |path: &Path| path.to_str().expect("UTF-8").to_owned();
    let output = tempfile::tempdir().expect("a directory");
    let made = make(output.path(), &["--program", &path(&program)]);
    assert!(!made.status.success() && made.stdout.is_empty());
    let message = String::from_utf8(made.stderr).expect("UTF-8");
    assert!(
        message.contains("another machine would make another image"),
        "{message}"
    );
    assert_eq!(std::fs::read_dir(output.path()).expect("a directory").count(), 0);

    // The same program, as if built in another directory.
    let cargo = std::env::var("CARGO_HOME")
        .unwrap_or_else(|_| format!("{}/.cargo", std::env::var("HOME").expect("HOME")));
    let rust = run("rustc", &["--print", "sysroot"]);
    for own in [
        &path(harness::target()),
        env!("CARGO_MANIFEST_DIR"),
        &cargo,
        rust.trim(),
    ] {
        let other = format!("s|{own}|{}|g", "x".repeat(own.len()));
        run("sed", &["--in-place", &other, &path(&program)]);
    }
    let made = make(output.path(), &["--program", &path(&program)]);
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
}

#[test]
fn another_architecture_names_its_missing_tools() {
    let output = tempfile::tempdir().expect("a directory");
    let (other, variable, named) = if architecture() == "amd64" {
        (
            "arm64",
            "CC_aarch64_unknown_linux_gnu",
            [
                "gcc-aarch64-linux-gnu libc6-dev-arm64-cross",
                "rustup target add aarch64-unknown-linux-gnu",
                "libstd-rust-dev:arm64",
            ],
        )
    } else {
        (
            "amd64",
            "CC_x86_64_unknown_linux_gnu",
            [
                "gcc-x86-64-linux-gnu libc6-dev-amd64-cross",
                "rustup target add x86_64-unknown-linux-gnu",
                "libstd-rust-dev:amd64",
            ],
        )
    };
    let missing = output.path().join("no-compiler");
    // A Rust toolchain without any target library.
    let rustc = output.path().join("rustc");
    std::fs::write(&rustc, "#!/bin/sh\necho /nowhere\n").expect("written");
    run("chmod", &["+x", rustc.to_str().expect("UTF-8")]);
    let made = Command::new(repository("hack/image"))
        .args(["--architecture", other])
        .env("PATH", crate::shell::path_with(&[&rustc]))
        .env("CARGO_TARGET_DIR", output.path())
        .env(variable, &missing)
        .output()
        .expect("hack/image starts");
    let message = String::from_utf8(made.stderr).expect("UTF-8");
    assert!(!made.status.success(), "{message}");
    for name in named {
        assert!(message.contains(name), "{message}");
    }
}

#[test]
fn the_bill_of_materials_has_each_crate_with_its_checksum() {
    let list = json(&archive().with_extension("spdx.json"));
    assert_eq!(list["spdxVersion"], "SPDX-2.3");
    let lock = std::fs::read_to_string(repository("Cargo.lock")).expect("Cargo.lock");
    let mut locked = BTreeMap::new();
    for entry in lock.split("[[package]]").skip(1) {
        let field = |name: &str| {
            entry
                .lines()
                .find_map(|line| line.strip_prefix(&format!("{name} = \"")))
                .map(|rest| rest.trim_end_matches('"').to_owned())
        };
        locked.insert(
            (
                field("name").unwrap_or_default(),
                field("version").unwrap_or_default(),
            ),
            field("checksum"),
        );
    }
    let packages = list["packages"].as_array().expect("packages");
    let mut names = BTreeSet::new();
    for package in packages {
        let text = |field: &str| package[field].as_str().expect("a text").to_owned();
        let (name, version) = (text("name"), text("versionInfo"));
        assert!(names.insert(text("SPDXID")), "{name} {version} is listed twice");
        assert_ne!(text("licenseDeclared"), "NOASSERTION", "{name}");
        let sum = package["checksums"][0]["checksumValue"]
            .as_str()
            .map(str::to_owned);
        assert!(sum.is_some(), "{name} {version} has no checksum");
        if name != "drayman" {
            assert_eq!(sum, locked[&(name.clone(), version.clone())], "{name} {version}");
        }
    }
    for linked in [
        "SPDXRef-drayman-",
        "SPDXRef-kube-5",
        "SPDXRef-tonic-",
        "SPDXRef-tokio-",
    ] {
        assert!(names.iter().any(|name| name.starts_with(linked)), "{linked}");
    }
    // Build and test dependencies are not included.
    for tool in ["SPDXRef-protox-", "SPDXRef-proptest-"] {
        assert!(!names.iter().any(|name| name.starts_with(tool)), "{tool}");
    }
    let relations = list["relationships"].as_array().expect("relationships");
    assert_eq!(
        relations.len(),
        packages.len(),
        "the document describes one, which depends on all others"
    );
    println!("{} crates", packages.len() - 1);
}

#[test]
fn a_program_that_could_not_run_in_the_image_is_refused() {
    let output = tempfile::tempdir().expect("a directory");
    let refused = |arguments: &[&str]| {
        let made = make(output.path(), arguments);
        assert!(!made.status.success(), "{arguments:?}");
        assert!(made.stdout.is_empty());
        String::from_utf8(made.stderr).expect("UTF-8")
    };
    // Every Linux has a shell, and Debian's shells are not static.
    assert!(refused(&["--program", "/bin/bash"]).contains("is not static"));
    assert!(refused(&["--program", "/etc/passwd"]).contains("is not a program"));
    let other = if architecture() == "amd64" {
        "arm64"
    } else {
        "amd64"
    };
    assert!(refused(&["--program", "/bin/bash", "--architecture", other]).contains("is not for"));
    assert!(
        refused(&["--architecture", "m68k", "--program", "/bin/bash"])
            .contains("there is for amd64 and arm64")
    );
    assert!(refused(&["--profile", "fast"]).contains("--profile release|dev"));
}
