package node

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// mounts creates the mount namespace that kubelet, containerd and the programs under test share. It contains the machine's files, except
// that the usual directories of a node are empty tmpfs and /dev is a copy. All changes there disappear with the namespace, and nodes do not
// share them.
//
// /proc stays the machine's, because programs under test join this namespace but stay in the machine's PID namespace.
func (m *machine) mounts() error {
	syscall.Umask(0)
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("keeping mounts private: %w", err)
	}
	for path, own := range map[string][]string{
		// Existing folders of the machine are visible, except for these, which start empty.
		"/var/lib": {"kubelet", "containerd", "cni"},
		"/run":     {"containerd", "cdi", "netns", "runc"},
	} {
		if err := m.shadow(path, own, bindEntry); err != nil {
			return fmt.Errorf("%s of the node: %w", path, err)
		}
	}
	if err := m.shadow("/dev", nil, deviceEntry); err != nil {
		return fmt.Errorf("/dev of the node: %w", err)
	}
	if err := syscall.Mount("tmpfs", "/var/log", "tmpfs", 0, "mode=755"); err != nil {
		return fmt.Errorf("/var/log of the node: %w", err)
	}
	for _, path := range []string{"/var/lib/kubelet", "/run/cdi"} {
		if err := os.MkdirAll(path, 0o755); err != nil {
			return err
		}
	}
	// Shared, because kubelet mounts volumes there that the container runtime must see.
	if err := syscall.Mount("tmpfs", "/var/lib/kubelet", "tmpfs", 0, "mode=755"); err != nil {
		return fmt.Errorf("/var/lib/kubelet of the node: %w", err)
	}
	if err := syscall.Mount("", "/var/lib/kubelet", "", syscall.MS_SHARED, ""); err != nil {
		return err
	}
	syscall.Umask(0o022)
	return nil
}

// ownProc gives the calling thread a mount namespace below the shared one, with the /proc of the node's PID namespace: runc and kubelet
// look up their process ids there.
func ownProc() error {
	if err := syscall.Unshare(syscall.CLONE_NEWNS); err != nil {
		return err
	}
	if err := syscall.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return fmt.Errorf("/proc of the node: %w", err)
	}
	return nil
}

// shadow mounts a tmpfs over a directory and recreates every entry by entry, except those in own.
func (m *machine) shadow(path string, own []string, entry func(from, to string, info os.FileInfo) error) error {
	before, err := os.Stat(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	place := filepath.Join(m.Directory, "shadow")
	if err := os.MkdirAll(place, 0o700); err != nil {
		return err
	}
	if err := syscall.Mount("tmpfs", place, "tmpfs", 0, fmt.Sprintf("mode=%o", before.Mode().Perm())); err != nil {
		return err
	}
	if err := copyEntries(path, place, own, entry); err != nil {
		return err
	}
	return syscall.Mount(place, path, "", syscall.MS_MOVE, "")
}

func copyEntries(from, to string, except []string, entry func(from, to string, info os.FileInfo) error) error {
	entries, err := os.ReadDir(from)
	if err != nil {
		return err
	}
next:
	for _, found := range entries {
		for _, name := range except {
			if found.Name() == name {
				continue next
			}
		}
		info, err := found.Info()
		if errors.Is(err, os.ErrNotExist) {
			continue // removed meanwhile
		}
		if err != nil {
			return err
		}
		err = entry(filepath.Join(from, found.Name()), filepath.Join(to, found.Name()), info)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

// bindEntry bind-mounts an entry at another path, including mounts below it.
func bindEntry(from, to string, info os.FileInfo) error {
	switch {
	case info.Mode()&os.ModeSymlink != 0:
		target, err := os.Readlink(from)
		if err != nil {
			return err
		}
		return os.Symlink(target, to)
	case info.IsDir():
		if err := os.Mkdir(to, 0o755); err != nil {
			return err
		}
	default:
		if err := os.WriteFile(to, nil, 0o600); err != nil {
			return err
		}
	}
	return syscall.Mount(from, to, "", syscall.MS_BIND|syscall.MS_REC, "")
}

// deviceEntry copies a device node or a directory of device nodes; mounts below /dev are bind-mounted.
func deviceEntry(from, to string, info os.FileInfo) error {
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return fmt.Errorf("%s has no status", from)
	}
	switch {
	case info.Mode()&os.ModeDevice != 0:
		if err := syscall.Mknod(to, stat.Mode, int(stat.Rdev)); err != nil {
			return err
		}
		return os.Lchown(to, int(stat.Uid), int(stat.Gid))
	case info.IsDir():
		var parent syscall.Stat_t
		if err := syscall.Stat(filepath.Dir(from), &parent); err != nil {
			return err
		}
		if parent.Dev != stat.Dev {
			return bindEntry(from, to, info)
		}
		if err := os.Mkdir(to, info.Mode().Perm()); err != nil {
			return err
		}
		return copyEntries(from, to, nil, deviceEntry)
	default:
		return bindEntry(from, to, info)
	}
}
