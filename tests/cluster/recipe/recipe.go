// Package recipe builds the programs that a test cluster consists of: Kubernetes of a given version and containerd
// from their Go modules, and installs from Debian what is not written in Go or is needed as it is packaged.
//
// What is built lies in <target>/cluster/<version> together with a stamp. The stamp is the hash of everything that
// decides about the result and is written last, so that neither an interrupted build nor a changed recipe is ever
// taken for a finished one.
package recipe

import (
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// DefaultVersion is the Kubernetes that tests use unless they ask for another, StructuredVersion that of the tests of
// structured mode. Their go.mod and go.sum are part of the recipe; those of other versions are worked out when they are
// built.
const (
	DefaultVersion    = "1.30.14"
	StructuredVersion = "1.37.2"
)

const containerdVersion = "1.7.27"

//go:embed recipe.go modules.go debian.go kubernetes containerd
var sources embed.FS

// Programs says where the built programs are.
type Programs struct {
	// Kubernetes is every component of Kubernetes in one program.
	Kubernetes string
	// Kubectl is the same program under the name by which it is kubectl.
	Kubectl string
	// Containerd is the directory of containerd, its shim and ctr; empty when no node is wanted.
	Containerd string
}

// Version is a Kubernetes version of the form 1.30.14.
type Version struct{ Minor, Patch int }

var versionForm = regexp.MustCompile(`^1\.(\d{1,3})\.(\d{1,3})$`)

// ParseVersion refuses everything but 1.<minor>.<patch>: the text becomes part of a path.
func ParseVersion(text string) (Version, error) {
	parts := versionForm.FindStringSubmatch(text)
	if parts == nil {
		return Version{}, fmt.Errorf("%q is not a Kubernetes version; one looks like %s", text, DefaultVersion)
	}
	minor, _ := strconv.Atoi(parts[1])
	patch, _ := strconv.Atoi(parts[2])
	return Version{minor, patch}, nil
}

func (v Version) String() string { return fmt.Sprintf("1.%d.%d", v.Minor, v.Patch) }

// Build makes sure that the programs for a version exist below target, and for nodes also containerd and what Debian
// has. It is safe to call it from several processes at once: one builds, the others wait.
func Build(ctx context.Context, target string, version Version, nodes bool) (Programs, error) {
	target, err := filepath.Abs(target)
	if err != nil {
		return Programs{}, err
	}
	root := filepath.Join(target, "cluster")
	directory := filepath.Join(root, version.String())
	programs := Programs{
		Kubernetes: filepath.Join(directory, "kubernetes"),
		Kubectl:    filepath.Join(directory, "kubectl"),
	}
	if err := once(ctx, root, version.String(), "kubernetes", func(source string) error {
		return buildKubernetes(ctx, source, directory, version)
	}); err != nil {
		return Programs{}, fmt.Errorf("building Kubernetes %s: %w", version, err)
	}
	if !nodes {
		return programs, nil
	}
	name := "containerd-" + containerdVersion
	programs.Containerd = filepath.Join(root, name)
	if err := once(ctx, root, name, "containerd", func(source string) error {
		return buildContainerd(ctx, source, programs.Containerd)
	}); err != nil {
		return Programs{}, fmt.Errorf("building containerd %s: %w", containerdVersion, err)
	}
	return programs, installPackages(ctx, root)
}

// once runs build unless its result is already there. source is an empty directory that is removed afterwards.
func once(ctx context.Context, root, name, part string, build func(source string) error) error {
	directory := filepath.Join(root, name)
	stamp := filepath.Join(directory, "stamp")
	hash, err := recipeHash(name, part)
	if err != nil {
		return err
	}
	if upToDate(stamp, hash) {
		return nil
	}
	if err := checkGo(); err != nil {
		return err
	}
	unlock, err := lock(ctx, root, name)
	if err != nil {
		return err
	}
	defer unlock()
	if upToDate(stamp, hash) {
		return nil
	}
	fmt.Fprintf(os.Stderr, "building %s for the tests in %s (some minutes, once)\n", name, directory)
	if err := os.RemoveAll(directory); err != nil {
		return err
	}
	source := filepath.Join(directory, "src")
	if err := os.MkdirAll(source, 0o755); err != nil {
		return err
	}
	if err := build(source); err != nil {
		return err
	}
	if err := os.RemoveAll(source); err != nil {
		return err
	}
	unfinished := stamp + ".new"
	if err := os.WriteFile(unfinished, []byte(hash), 0o644); err != nil {
		return err
	}
	return os.Rename(unfinished, stamp)
}

func upToDate(stamp, hash string) bool {
	found, err := os.ReadFile(stamp)
	return err == nil && string(found) == hash
}

// recipeHash is of the sources that decide about one part of the cache.
func recipeHash(name, part string) (string, error) {
	paths, err := recipeFiles(name, part)
	if err != nil {
		return "", err
	}
	hash := sha256.New()
	fmt.Fprintln(hash, name)
	for _, path := range paths {
		content, err := sources.ReadFile(path)
		if err != nil {
			return "", err
		}
		fmt.Fprintln(hash, path, len(content))
		hash.Write(content)
	}
	return hex.EncodeToString(hash.Sum(nil)), nil
}

// recipeFiles lists the sources of the recipe itself and those of the part that is built, but not of other parts or of
// other versions of Kubernetes.
func recipeFiles(name, part string) ([]string, error) {
	var paths []string
	err := fs.WalkDir(sources, ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		switch filepath.Dir(path) {
		case ".", part, part + "/" + name:
			paths = append(paths, path)
		}
		return nil
	})
	return paths, err
}

// lock keeps other processes out of one part of the cache; the kernel gives it back when the process dies.
func lock(ctx context.Context, root, name string) (func(), error) {
	if err := os.MkdirAll(root, 0o755); err != nil {
		return nil, err
	}
	file, err := os.OpenFile(filepath.Join(root, name+".lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	start, said := time.Now(), false
	for {
		err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			break
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) {
			file.Close()
			return nil, err
		}
		// A lock held for a moment only is nothing to report.
		if !said && time.Since(start) > time.Second {
			fmt.Fprintf(os.Stderr, "another process prepares %s, waiting for it\n", name)
			said = true
		}
		select {
		case <-ctx.Done():
			file.Close()
			return nil, ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
	return func() { file.Close() }, nil
}

var goForm = regexp.MustCompile(`^go1\.(\d+)`)

func checkGo() error {
	const fix = "Go 1.22 or newer (1.26 for Kubernetes 1.36 and later) is needed to build Kubernetes for the tests: install it from your distribution or from the Go project, and put it into PATH"
	output, err := exec.Command("go", "env", "GOVERSION").Output()
	if err != nil {
		return errors.New(fix)
	}
	parts := goForm.FindStringSubmatch(string(output))
	if parts == nil {
		return nil // a development build of Go: newer than any release
	}
	if minor, _ := strconv.Atoi(parts[1]); minor < 22 {
		return fmt.Errorf("%s (found %s)", fix, strings.TrimSpace(string(output)))
	}
	return nil
}
