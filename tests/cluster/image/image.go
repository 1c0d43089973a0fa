// Package image builds the container image of the tests: a static busybox and nothing else.
package image

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
)

// Name is the image's name on the nodes. The domain prevents the container runtime from pulling it.
const Name = "localhost/busybox:1"

// Without a handler, the first process of a container ignores SIGTERM, and each deletion of a pod would last the whole grace period.
const command = "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done"

type object = map[string]any

// Write writes an archive in the OCI layout for `ctr images import`.
func Write(path string) error {
	layer, err := layer()
	if err != nil {
		return err
	}
	config, err := json.Marshal(object{
		"architecture": runtime.GOARCH, "os": "linux",
		"config": object{"Cmd": []string{"/bin/sh", "-c", command}, "Env": []string{"PATH=/bin"}},
		"rootfs": object{"type": "layers", "diff_ids": []string{digest(layer)}},
	})
	if err != nil {
		return err
	}
	manifest, err := json.Marshal(object{
		"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
		"config": descriptor("config.v1+json", config),
		"layers": []object{descriptor("layer.v1.tar", layer)},
	})
	if err != nil {
		return err
	}
	named := descriptor("manifest.v1+json", manifest)
	named["annotations"] = object{"io.containerd.image.name": Name}
	index, err := json.Marshal(object{"schemaVersion": 2, "manifests": []object{named}})
	if err != nil {
		return err
	}
	var archive bytes.Buffer
	writer := tar.NewWriter(&archive)
	add(writer, "oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`), 0o644)
	add(writer, "index.json", index, 0o644)
	for _, blob := range [][]byte{config, manifest, layer} {
		add(writer, "blobs/sha256/"+strings.TrimPrefix(digest(blob), "sha256:"), blob, 0o644)
	}
	if err := writer.Close(); err != nil {
		return err
	}
	return os.WriteFile(path, archive.Bytes(), 0o644)
}

// layer returns the file system of the image.
func layer() ([]byte, error) {
	program, err := exec.LookPath("busybox")
	if err != nil {
		return nil, err
	}
	busybox, err := os.ReadFile(program)
	if err != nil {
		return nil, err
	}
	applets, err := exec.Command(program, "--list").Output()
	if err != nil {
		return nil, fmt.Errorf("%s --list: %w", program, err)
	}
	var files bytes.Buffer
	writer := tar.NewWriter(&files)
	for _, directory := range []string{"bin", "dev", "etc", "proc", "sys", "tmp"} {
		writer.WriteHeader(&tar.Header{Name: directory + "/", Mode: 0o755, Typeflag: tar.TypeDir})
	}
	add(writer, "bin/busybox", busybox, 0o755)
	for _, applet := range strings.Fields(string(applets)) {
		if applet != "busybox" {
			writer.WriteHeader(&tar.Header{Name: "bin/" + applet, Mode: 0o755, Typeflag: tar.TypeSymlink, Linkname: "busybox"})
		}
	}
	return files.Bytes(), writer.Close()
}

// add leaves errors to Close: it only writes to memory, and a failed writer keeps its error.
func add(writer *tar.Writer, name string, content []byte, mode int64) {
	writer.WriteHeader(&tar.Header{Name: name, Size: int64(len(content)), Mode: mode, Typeflag: tar.TypeReg})
	io.Copy(writer, bytes.NewReader(content))
}

func descriptor(kind string, blob []byte) object {
	return object{"mediaType": "application/vnd.oci.image." + kind, "digest": digest(blob), "size": len(blob)}
}

func digest(blob []byte) string {
	sum := sha256.Sum256(blob)
	return "sha256:" + hex.EncodeToString(sum[:])
}
