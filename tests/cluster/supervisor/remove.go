package supervisor

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const (
	directoryPrefix = "drayman-cluster-"
	// marker is an environment variable that marks what tests run beside a cluster (the programs under test, kubectl)
	// as belonging to it: the value is the cluster's directory. It is inherited, so it finds grandchildren too.
	marker = "DRAYMAN_TEST_CLUSTER"
)

// remove ends everything and takes everything away. Nothing is asked to end by itself: all data is thrown away.
func (s *supervisor) remove() error {
	s.mutex.Lock()
	s.removing = true
	s.mutex.Unlock()
	problems := []error{killMarked(s.directory)}
	for _, node := range s.nodes {
		problems = append(problems, node.remove(s))
	}
	s.mutex.Lock()
	for _, component := range s.running {
		problems = append(problems, s.processes.End(component, syscall.SIGKILL, 10*time.Second))
	}
	s.mutex.Unlock()
	problems = append(problems, removeCgroups(filepath.Base(s.directory)), os.RemoveAll(s.directory))
	if err := errors.Join(problems...); err != nil {
		return fmt.Errorf("taking the cluster away: %w", err)
	}
	return nil
}

// removeAbandoned takes away what is left of clusters whose supervisor was killed. Their processes died with it, by
// the kernel's hand; directories and cgroups do not.
func removeAbandoned() {
	directories, _ := filepath.Glob(filepath.Join(os.TempDir(), directoryPrefix+"*"))
	for _, directory := range directories {
		lock, err := os.Open(directory)
		if err != nil {
			continue
		}
		if syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil {
			killMarked(directory)
			removeCgroups(filepath.Base(directory))
			os.RemoveAll(directory)
		}
		lock.Close()
	}
}

// killMarked kills every process that carries the mark of a cluster, and comes back when none is left.
func killMarked(directory string) error {
	mark := []byte(marker + "=" + directory + "\x00")
	return killAll(func(process string) bool {
		// Environments of other users and of processes that just ended cannot be read, and are not ours.
		environment, err := os.ReadFile(process + "/environ")
		return err == nil && bytes.Contains(append(environment, 0), mark)
	})
}

// killInNamespace kills every process in the mount namespace of another, but not that one.
func killInNamespace(pid int) error {
	namespace, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", pid))
	if err != nil {
		return nil // it has ended
	}
	return killAll(func(process string) bool {
		found, err := os.Readlink(process + "/ns/mnt")
		return err == nil && found == namespace && process != fmt.Sprintf("/proc/%d", pid)
	})
}

// killAll kills the processes that are chosen by their directory in /proc until there are none.
func killAll(chosen func(process string) bool) error {
	for range 500 {
		found := false
		processes, err := filepath.Glob("/proc/[0-9]*")
		if err != nil {
			return err
		}
		for _, process := range processes {
			pid, err := strconv.Atoi(filepath.Base(process))
			if err != nil || pid == os.Getpid() || !chosen(process) {
				continue
			}
			found = true
			syscall.Kill(pid, syscall.SIGKILL)
		}
		if !found {
			return nil
		}
		time.Sleep(10 * time.Millisecond)
	}
	return errors.New("a process of the tests does not end, not even when killed")
}

// cgroupRoots are the directories in which cgroups can be made: one on cgroup v2, one per controller on v1.
func cgroupRoots() ([]string, error) {
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return nil, err
	}
	var roots []string
	for _, line := range strings.Split(string(mounts), "\n") {
		if fields := strings.Fields(line); len(fields) > 2 && strings.HasPrefix(fields[2], "cgroup") {
			roots = append(roots, fields[1])
		}
	}
	return roots, nil
}

// removeCgroups removes a cgroup and those below it. The kernel takes a moment to let go of processes that ended.
func removeCgroups(name string) error {
	roots, err := cgroupRoots()
	if err != nil {
		return err
	}
	var problems []error
	for _, root := range roots {
		top := filepath.Join(root, name)
		var err error
		for range 200 {
			if err = removeTree(top); err == nil {
				break
			}
			time.Sleep(10 * time.Millisecond)
		}
		problems = append(problems, err)
	}
	return errors.Join(problems...)
}

// removeTree removes directories only, deepest first: the files in a cgroup are not files.
func removeTree(top string) error {
	var directories []string
	err := filepath.WalkDir(top, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && entry.IsDir() {
			directories = append(directories, path)
		}
		return nil
	})
	for i := len(directories) - 1; i >= 0; i-- {
		if removed := syscall.Rmdir(directories[i]); removed != nil && !errors.Is(removed, syscall.ENOENT) {
			err = fmt.Errorf("removing cgroup %s: %w", directories[i], removed)
		}
	}
	return err
}
