package recipe

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Prometheus installs prometheus and promtool if missing, and returns their directory. Only the tests of metrics need them.
func Prometheus(ctx context.Context, target string) (string, error) {
	return unpacked(ctx, target, "prometheus", "prometheus", "promtool")
}

// Registry installs docker-registry if missing and returns its directory. It also installs skopeo, which pushes images, in PATH. Only the
// tests of a release need them.
func Registry(ctx context.Context, target string) (string, error) {
	directory, err := unpacked(ctx, target, "docker-registry", "docker-registry")
	if err != nil {
		return "", err
	}
	return directory, installSkopeo(ctx, filepath.Join(target, "cluster"))
}

// unpacked finds the programs of a Debian package. If they are not in PATH, it unpacks the package below target. It does not install it,
// because that would start a service.
func unpacked(ctx context.Context, target, name string, programs ...string) (string, error) {
	if found, err := exec.LookPath(programs[0]); err == nil && hasAll(filepath.Dir(found), programs) {
		return filepath.Dir(found), nil
	}
	target, err := filepath.Abs(target)
	if err != nil {
		return "", err
	}
	root := filepath.Join(target, "cluster")
	unlock, err := lock(ctx, root, name)
	if err != nil {
		return "", err
	}
	defer unlock()
	directory := filepath.Join(root, name)
	inside := filepath.Join("usr", "bin")
	if hasAll(filepath.Join(directory, inside), programs) {
		return filepath.Join(directory, inside), nil
	}
	fix := "some tests need " + strings.Join(programs, " and ") + ", which this machine lacks"
	for _, needed := range []string{"apt-get", "dpkg-deb"} {
		if _, err := exec.LookPath(needed); err != nil {
			return "", errors.New(fix + ": install them, and put them into PATH (Debian has them in the package " + name + ")")
		}
	}
	unfinished := directory + ".new"
	if err := os.RemoveAll(unfinished); err != nil {
		return "", err
	}
	if err := os.MkdirAll(unfinished, 0o755); err != nil {
		return "", err
	}
	fmt.Fprintf(os.Stderr, "installing for the tests: %s, below %s\n", name, directory)
	if err := download(unfinished, name); err != nil {
		return "", fmt.Errorf("%s: %w", fix, err)
	}
	packages, err := filepath.Glob(filepath.Join(unfinished, name+"_*.deb"))
	if err != nil || len(packages) != 1 {
		return "", fmt.Errorf("%s: apt-get has downloaded %q", fix, packages)
	}
	if output, err := exec.Command("dpkg-deb", "--extract", packages[0], unfinished).CombinedOutput(); err != nil {
		return "", fmt.Errorf("%s: dpkg-deb: %w: %s", fix, err, strings.TrimSpace(string(output)))
	}
	if err := os.Remove(packages[0]); err != nil {
		return "", err
	}
	if err := os.RemoveAll(directory); err != nil {
		return "", err
	}
	return filepath.Join(directory, inside), os.Rename(unfinished, directory)
}

// installSkopeo installs skopeo if it is missing. Unlike the registry, it is not a service.
func installSkopeo(ctx context.Context, root string) error {
	missing := func() bool { _, err := exec.LookPath("skopeo"); return err != nil }
	unlock, err := lock(ctx, root, "packages")
	if err != nil {
		return err
	}
	defer unlock()
	if !missing() {
		return nil
	}
	const install = "apt-get update && apt-get install --yes --no-install-recommends skopeo"
	if os.Geteuid() != 0 {
		return errors.New("the tests of a release need skopeo; as root: " + install)
	}
	fmt.Fprintln(os.Stderr, "installing for the tests: skopeo")
	command := exec.Command("sh", "-c", install)
	command.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
	if output, err := command.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", install, err, strings.TrimSpace(string(output)))
	}
	if missing() {
		return errors.New("skopeo is installed, but not found in PATH")
	}
	return nil
}

// download downloads a package into a directory. If the package lists are missing or outdated, it updates them, which requires root.
func download(directory, name string) error {
	once := func() error {
		command := exec.Command("apt-get", "download", name)
		command.Dir = directory
		output, err := command.CombinedOutput()
		if err != nil {
			return fmt.Errorf("apt-get download %s: %w: %s", name, err, strings.TrimSpace(string(output)))
		}
		return nil
	}
	first := once()
	if first == nil || os.Geteuid() != 0 {
		return first
	}
	if output, err := exec.Command("apt-get", "update").CombinedOutput(); err != nil {
		return fmt.Errorf("apt-get update: %w: %s", err, strings.TrimSpace(string(output)))
	}
	return once()
}

func hasAll(directory string, programs []string) bool {
	for _, program := range programs {
		found, err := os.Stat(filepath.Join(directory, program))
		if err != nil || !found.Mode().IsRegular() || found.Mode()&0o111 == 0 {
			return false
		}
	}
	return true
}
