package node

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// mounts makes the mount namespace that kubelet, containerd and the programs under test share: the machine's files,
// except that a node's usual places are empty memory and /dev is a copy. Whatever is written or made there is gone
// with the namespace, and two nodes never meet.
//
// /proc stays the machine's, because programs under test join this namespace but stay in the machine's PID namespace.
func (m *machine) mounts() error {
	syscall.Umask(0)
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("keeping mounts private: %w", err)
	}
	for path, own := range map[string][]string{
		// A folder that exists on the machine is visible, except for these, which start empty.
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
	// Shared, because kubelet mounts volumes there which the container runtime must see.
	if err := syscall.Mount("tmpfs", "/var/lib/kubelet", "tmpfs", 0, "mode=755"); err != nil {
		return fmt.Errorf("/var/lib/kubelet of the node: %w", err)
	}
	if err := syscall.Mount("", "/var/lib/kubelet", "", syscall.MS_SHARED, ""); err != nil {
		return err
	}
	syscall.Umask(0o022)
	return nil
}

// ownProc gives the calling thread a mount namespace below the shared one, with the /proc of the node's PID namespace:
// runc and kubelet look up the numbers of their processes there.
func ownProc() error {
	if err := syscall.Unshare(syscall.CLONE_NEWNS); err != nil {
		return err
	}
	if err := syscall.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return fmt.Errorf("/proc of the node: %w", err)
	}
	return nil
}

// shadow puts memory over a directory in which every entry is made anew by entry, except those in own.
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
			continue // the machine lives on while we look
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

// bindEntry makes an entry visible at another place, with whatever is mounted below it.
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

// deviceEntry makes a device node like another, and folders of such; what is mounted below /dev is bound.
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
