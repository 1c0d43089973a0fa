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

// Prometheus makes sure that prometheus and promtool exist and returns the directory in which they are. Only the tests of what
// is seen from outside need them.
//
// What is not in PATH is taken from Debian's package, which is unpacked below target and not installed: an installation would
// start a service.
func Prometheus(ctx context.Context, target string) (string, error) {
	if found, err := exec.LookPath("prometheus"); err == nil {
		directory := filepath.Dir(found)
		if executable(filepath.Join(directory, "promtool")) {
			return directory, nil
		}
	}
	target, err := filepath.Abs(target)
	if err != nil {
		return "", err
	}
	root := filepath.Join(target, "cluster")
	unlock, err := lock(ctx, root, "prometheus")
	if err != nil {
		return "", err
	}
	defer unlock()
	directory := filepath.Join(root, "prometheus")
	programs := filepath.Join(directory, "usr", "bin")
	if executable(filepath.Join(programs, "prometheus")) && executable(filepath.Join(programs, "promtool")) {
		return programs, nil
	}
	const fix = "the tests of metrics need prometheus and promtool, which this machine lacks"
	for _, needed := range []string{"apt-get", "dpkg-deb"} {
		if _, err := exec.LookPath(needed); err != nil {
			return "", errors.New(fix + ": install them, and put them into PATH (Debian has them in the package prometheus)")
		}
	}
	unfinished := directory + ".new"
	if err := os.RemoveAll(unfinished); err != nil {
		return "", err
	}
	if err := os.MkdirAll(unfinished, 0o755); err != nil {
		return "", err
	}
	fmt.Fprintln(os.Stderr, "installing for the tests: prometheus, below", directory)
	if err := download(unfinished); err != nil {
		return "", fmt.Errorf("%s: %w", fix, err)
	}
	packages, err := filepath.Glob(filepath.Join(unfinished, "prometheus_*.deb"))
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
	return programs, os.Rename(unfinished, directory)
}

// download puts the package into a directory. Without a list of packages, or with one that is too old, a new list is needed,
// which only root may fetch.
func download(directory string) error {
	once := func() error {
		command := exec.Command("apt-get", "download", "prometheus")
		command.Dir = directory
		output, err := command.CombinedOutput()
		if err != nil {
			return fmt.Errorf("apt-get download prometheus: %w: %s", err, strings.TrimSpace(string(output)))
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

func executable(path string) bool {
	found, err := os.Stat(path)
	return err == nil && found.Mode().IsRegular() && found.Mode()&0o111 != 0
}
