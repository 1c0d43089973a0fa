// Package process starts, watches and stops the programs of a cluster. It also works as the first process of a PID namespace, where it
// reaps orphaned processes.
package process

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"
	"unsafe"
)

// Group owns every child of this program. A program has only one, because it reaps all children.
type Group struct {
	mutex    sync.Mutex
	children map[int]*Process
	orders   chan func()
	started  chan struct{}
}

// Process is one run of a program.
type Process struct {
	Name string
	PID  int
	// Done is closed once the process has ended and was reaped; Status is set by then.
	Done   chan struct{}
	Status syscall.WaitStatus
}

// Spec describes a process to start.
type Spec struct {
	Name      string
	Arguments []string
	// Environment is added to the environment of this process.
	Environment []string
	// Log is appended with standard output and error. If empty, they go to the standard error of this process.
	Log string
	// Input becomes standard input; nil means /dev/null.
	Input *os.File
	// Output and Errors replace the log.
	Output, Errors *os.File
	// Namespaces are CLONE_NEW flags.
	Namespaces uintptr
	// Directory is the working directory; empty means the current one.
	Directory string
}

// NewGroup starts the thread that starts all children. It never ends, for two reasons: the kernel ties the parent-death signal to the
// thread that forked, and namespaces belong to threads.
func NewGroup() *Group {
	group := &Group{children: map[int]*Process{}, orders: make(chan func()), started: make(chan struct{}, 1)}
	go func() {
		runtime.LockOSThread()
		for order := range group.orders {
			order()
		}
	}()
	go group.collect()
	return group
}

// OnThread runs f on the thread that starts children, for instance to give them a namespace.
func (g *Group) OnThread(f func() error) error {
	done := make(chan error)
	g.orders <- func() { done <- f() }
	return <-done
}

// Start starts a program that is killed when this process dies.
func (g *Group) Start(spec Spec) (*Process, error) {
	files, closeFiles, err := spec.files()
	if err != nil {
		return nil, err
	}
	defer closeFiles()
	process := &Process{Name: spec.Name, Done: make(chan struct{})}
	err = g.OnThread(func() error {
		// The lock is held during the fork, so that a child that ends at once is not reaped before it is registered.
		g.mutex.Lock()
		defer g.mutex.Unlock()
		child, err := os.StartProcess(spec.Arguments[0], spec.Arguments, &os.ProcAttr{
			Dir: spec.Directory, Env: append(os.Environ(), spec.Environment...), Files: files,
			Sys: &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Cloneflags: spec.Namespaces},
		})
		if err != nil {
			return fmt.Errorf("starting %s: %w", spec.Name, err)
		}
		process.PID = child.Pid
		g.children[child.Pid] = process
		return child.Release()
	})
	if err != nil {
		return nil, err
	}
	select {
	case g.started <- struct{}{}:
	default:
	}
	return process, nil
}

// files opens the standard streams of the program, and returns a function that closes them after the fork.
func (s *Spec) files() ([]*os.File, func(), error) {
	files := []*os.File{s.Input, s.Output, s.Errors}
	opened := []*os.File{}
	closeAll := func() {
		for _, file := range opened {
			file.Close()
		}
	}
	for i, file := range files {
		if file != nil {
			continue
		}
		name, mode := s.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY
		if i == 0 {
			name, mode = os.DevNull, os.O_RDONLY
		} else if name == "" {
			files[i] = os.Stderr
			continue
		}
		file, err := os.OpenFile(name, mode, 0o644)
		if err != nil {
			closeAll()
			return nil, nil, err
		}
		opened, files[i] = append(opened, file), file
	}
	return files, closeAll, nil
}

// Run runs a short program and returns its output, which is also part of an error.
func (g *Group) Run(arguments ...string) (string, error) {
	program, err := exec.LookPath(arguments[0])
	if err != nil {
		return "", err
	}
	reader, writer, err := os.Pipe()
	if err != nil {
		return "", err
	}
	defer reader.Close()
	process, err := g.Start(Spec{
		Name: arguments[0], Arguments: append([]string{program}, arguments[1:]...), Output: writer, Errors: writer,
	})
	writer.Close()
	if err != nil {
		return "", err
	}
	output, _ := io.ReadAll(reader)
	<-process.Done
	text := strings.TrimSpace(string(output))
	if !process.Status.Exited() || process.Status.ExitStatus() != 0 {
		return text, fmt.Errorf("%s %s: %s", strings.Join(arguments, " "), process.Describe(), text)
	}
	return text, nil
}

// End sends a signal and waits until the process is reaped. After the timeout, the process is killed.
func (g *Group) End(process *Process, signal syscall.Signal, timeout time.Duration) error {
	if err := g.signal(process, signal); err != nil {
		return nil // already ended
	}
	select {
	case <-process.Done:
		return nil
	case <-time.After(timeout):
	}
	g.signal(process, syscall.SIGKILL)
	select {
	case <-process.Done:
		return nil
	case <-time.After(10 * time.Second):
		return fmt.Errorf("%s (process %d) does not end, not even when killed", process.Name, process.PID)
	}
}

// signal cannot hit another process: a process id is reused only after collect has removed the process from the list.
func (g *Group) signal(process *Process, signal syscall.Signal) error {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	if g.children[process.PID] != process {
		return os.ErrProcessDone
	}
	return syscall.Kill(process.PID, signal)
}

// collect waits for every child, including orphans whose parent has ended.
func (g *Group) collect() {
	for {
		pid, err := nextEnded()
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil { // no children
			<-g.started
			continue
		}
		g.mutex.Lock()
		var status syscall.WaitStatus
		syscall.Wait4(pid, &status, 0, nil)
		process := g.children[pid]
		delete(g.children, pid)
		g.mutex.Unlock()
		if process != nil {
			process.Status = status
			close(process.Done)
		}
	}
}

// nextEnded waits for a child that has ended without reaping it, so that its process id stays in use until the caller holds the lock for
// lookups.
func nextEnded() (int, error) {
	const everyChild, exited, leaveUncollected = 0, 4, 0x01000000
	var info [128]byte
	_, _, code := syscall.Syscall6(syscall.SYS_WAITID, everyChild, 0, uintptr(unsafe.Pointer(&info)), exited|leaveUncollected, 0, 0)
	if code != 0 {
		return 0, code
	}
	const pid = 16 // the offset of si_pid on 64-bit Linux
	return int(binary.NativeEndian.Uint32(info[pid:])), nil
}

// Ended reports whether the process has ended.
func (p *Process) Ended() bool {
	select {
	case <-p.Done:
		return true
	default:
		return false
	}
}

// Describe describes how the process ended.
func (p *Process) Describe() string {
	switch {
	case !p.Ended():
		return "runs"
	case p.Status.Signaled():
		return "was killed by " + p.Status.Signal().String()
	default:
		return fmt.Sprintf("ended with status %d", p.Status.ExitStatus())
	}
}
