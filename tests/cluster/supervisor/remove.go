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
	// marker is the environment variable of programs beside a cluster (the programs under test, kubectl). Its value is the cluster's
	// directory. It is inherited, so it identifies grandchildren too.
	marker = "DRAYMAN_TEST_CLUSTER"
)

// remove kills all processes and removes all files. There is no graceful shutdown, because all data is discarded.
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

// removeAbandoned removes leftovers of clusters whose supervisor was killed. The kernel has killed their processes; directories and cgroups
// remain.
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

// killMarked kills every process with the cluster's marker, and returns once none is left.
func killMarked(directory string) error {
	mark := []byte(marker + "=" + directory + "\x00")
	return killAll(func(process string) bool {
		// Environments of other users' processes and of ended processes are not readable, and do not matter.
		environment, err := os.ReadFile(process + "/environ")
		return err == nil && bytes.Contains(append(environment, 0), mark)
	})
}

// killInNamespace kills every process in the mount namespace of another process, except that one.
func killInNamespace(pid int) error {
	namespace, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", pid))
	if err != nil {
		return nil // already ended
	}
	return killAll(func(process string) bool {
		found, err := os.Readlink(process + "/ns/mnt")
		return err == nil && found == namespace && process != fmt.Sprintf("/proc/%d", pid)
	})
}

// killAll kills the processes selected by their directory in /proc until none is left.
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

// cgroupRoots returns the directories for new cgroups: one on cgroup v2, one per controller on v1.
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

// removeCgroups removes a cgroup and its children. The kernel needs a moment after the end of their processes.
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

// removeTree removes directories only, deepest first: files of a cgroup cannot be removed.
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
