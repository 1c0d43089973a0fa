// Package supervisor runs one test cluster: it starts the control plane and the nodes and answers requests. When its standard input ends
// (because the test has ended or died) or a signal arrives, it removes everything it created.
package supervisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"drayman.dev/tests/cluster/image"
	inside "drayman.dev/tests/cluster/node"
	"drayman.dev/tests/cluster/process"
	"drayman.dev/tests/cluster/progress"
	"drayman.dev/tests/cluster/protocol"
	"drayman.dev/tests/cluster/recipe"
)

// Options are the options of `cluster up`.
type Options struct {
	Target          string
	Version         string
	Nodes           int
	ServiceAccounts bool
	AuditBodies     bool
	// Flags are additional flags by component.
	Flags map[string][]string
	// Requests enables the protocol on standard input and output; otherwise the output is for users.
	Requests bool
	// Hook is a shell command that runs beside the cluster. The cluster ends with it.
	Hook string
}

type supervisor struct {
	options   Options
	root      bool
	directory string
	lock      *os.File
	slot      *slot
	ca        *authority
	api       *api
	processes *process.Group
	nodes     []*node

	mutex sync.Mutex
	// version and programs are those of the components that are started next.
	version    recipe.Version
	programs   recipe.Programs
	components map[string][]string
	running    map[string]*process.Process
	// removing is set once the removal starts; then nothing is started any more.
	removing bool
}

const startTimeout = 2 * time.Minute

// Up runs a cluster, and returns once it has ended and nothing is left.
func Up(options Options) error {
	// When the test has died, standard output is closed; writes must return an error instead of killing this process.
	signal.Ignore(syscall.SIGPIPE)
	ended, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	go func() { cancel(fmt.Errorf("%w by signal: %s", errAsked, <-signals)) }()

	s := &supervisor{
		options: options, root: os.Geteuid() == 0,
		components: map[string][]string{}, running: map[string]*process.Process{},
	}
	requests := make(chan protocol.Request, 16)
	if options.Requests {
		go func() {
			err := protocol.Requests(os.Stdin, func(request protocol.Request) { requests <- request })
			cancel(errors.Join(errAsked, err))
		}()
	}
	if err := s.check(); err != nil {
		return err
	}
	var err error
	end := s.progress("building Kubernetes " + s.version.String())
	s.programs, err = recipe.Build(ended, options.Target, s.version, options.Nodes > 0)
	end()
	if err != nil {
		if ended.Err() != nil {
			return nil
		}
		return err
	}
	if err := s.claim(); err != nil {
		return errors.Join(err, os.RemoveAll(s.directory))
	}
	err = s.run(ended, requests)
	if errors.Is(err, errAsked) {
		err = nil
	}
	end = s.progress("removing the cluster")
	defer end()
	return errors.Join(err, s.remove())
}

// errAsked is the cause of an ordinary shutdown.
var errAsked = errors.New("asked to end")

// progress shows the progress of a long operation to users.
func (s *supervisor) progress(name string) (end func()) {
	if s.options.Requests {
		return func() {}
	}
	return progress.Show(name)
}

func (s *supervisor) check() error {
	var err error
	if s.version, err = recipe.ParseVersion(s.options.Version); err != nil {
		return err
	}
	if s.options.Nodes > maxNodes {
		return fmt.Errorf("a test cluster has at most %d nodes, not %d", maxNodes, s.options.Nodes)
	}
	if s.options.Nodes > 0 && !s.root {
		return errors.New("a test node needs root (namespaces, mounts, containers): run this as root, or ask for a control plane without nodes")
	}
	return nil
}

// claim acquires the cluster's own resources: a directory, ports and addresses.
func (s *supervisor) claim() error {
	// One at a time, so that no other supervisor takes a directory that is not locked yet for an abandoned one.
	all, err := os.Open(os.TempDir())
	if err != nil {
		return err
	}
	defer all.Close()
	if err := syscall.Flock(int(all.Fd()), syscall.LOCK_EX); err != nil {
		return err
	}
	removeAbandoned()
	if s.directory, err = os.MkdirTemp("", directoryPrefix); err != nil {
		return err
	}
	if s.lock, err = os.Open(s.directory); err != nil {
		return err
	}
	// Held until this process dies: an unlocked directory has no supervisor and is removed by others.
	if err := syscall.Flock(int(s.lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return err
	}
	for _, name := range []string{"log", "kubeconfig"} {
		if err := os.Mkdir(s.path(name), 0o700); err != nil {
			return err
		}
	}
	s.slot, err = takeSlot()
	return err
}

// run starts everything and serves requests until it is asked to end.
func (s *supervisor) run(ended context.Context, requests <-chan protocol.Request) error {
	s.processes = process.NewGroup()
	starting, cancel := context.WithTimeout(ended, startTimeout)
	defer cancel()
	end := s.progress("starting Kubernetes " + s.version.String())
	err := s.startAll(starting)
	end()
	if err != nil {
		if ended.Err() != nil {
			return context.Cause(ended)
		}
		return err
	}
	answers := protocol.NewWriter(os.Stdout)
	if s.options.Requests {
		if err := answers.Write(s.describe()); err != nil {
			return nil
		}
	} else {
		s.greet()
	}
	hook, err := s.startHook()
	if err != nil {
		return err
	}
	for {
		select {
		case <-ended.Done():
			return context.Cause(ended)
		case <-hook:
			return nil
		case request := <-requests:
			// In its own goroutine, because restarting a kubelet takes long.
			go func() { answers.Write(s.answer(ended, request)) }()
		}
	}
}

func (s *supervisor) startAll(ctx context.Context) error {
	if err := s.credentials(); err != nil {
		return err
	}
	// Nodes are prepared while the control plane starts. Both are awaited in any case, because anything created during the removal would be
	// left behind.
	s.makeNodes()
	prepared := make(chan error, 1)
	go func() { prepared <- s.eachNode(func(n *node) error { return n.prepare(s) }) }()
	err := s.startControlPlane(ctx)
	if err != nil {
		s.endNodes()
	}
	if err := errors.Join(err, <-prepared); err != nil {
		return err
	}
	return s.joinNodes(ctx)
}

func (s *supervisor) describe() protocol.Cluster {
	cluster := protocol.Cluster{
		Version: s.version.String(), Directory: s.directory, Server: s.server(), Kubeconfig: s.kubeconfig("admin"),
		Kubectl: s.programs.Kubectl, Audit: s.path("audit.log"), Image: image.Name,
		Logs: map[string]string{}, Nodes: []protocol.Node{},
	}
	for name := range s.components {
		cluster.Logs[name] = s.log(name)
	}
	for _, node := range s.nodes {
		cluster.Nodes = append(cluster.Nodes, node.describe(s))
		for _, name := range append([]string{"init"}, inside.Components...) {
			cluster.Logs[node.name+"-"+name] = s.log(node.name + "-" + name)
		}
	}
	return cluster
}

// greet tells users how to use the cluster.
func (s *supervisor) greet() {
	fmt.Printf("Kubernetes %s is ready.\n\n", s.version)
	fmt.Printf("    export KUBECONFIG=%s PATH=%s:$PATH\n", s.kubeconfig("admin"), filepath.Dir(s.programs.Kubectl))
	fmt.Printf("    kubectl get nodes\n\n")
	for _, node := range s.nodes {
		fmt.Printf("node %s    in its mount namespace: nsenter --mount=/proc/%d/ns/mnt\n", node.name, node.init.Load().PID)
	}
	if len(s.nodes) > 0 {
		fmt.Printf("image        %s (imagePullPolicy: Never)\n", image.Name)
	}
	fmt.Printf("logs         %s\n\nCtrl-C ends it and leaves nothing behind.\n", s.path("log"))
}

// startHook runs the caller's command with the cluster's description in its environment. The channel is closed at its end.
func (s *supervisor) startHook() (<-chan struct{}, error) {
	if s.options.Hook == "" {
		return nil, nil
	}
	description, err := json.Marshal(s.describe())
	if err != nil {
		return nil, err
	}
	hook, err := s.processes.Start(process.Spec{
		Name: "hook", Arguments: []string{"/bin/sh", "-c", s.options.Hook}, Output: os.Stdout, Errors: os.Stderr,
		Environment: []string{
			"KUBECONFIG=" + s.kubeconfig("admin"), "CLUSTER=" + string(description), marker + "=" + s.directory,
			"PATH=" + filepath.Dir(s.programs.Kubectl) + ":" + os.Getenv("PATH"), "KUBECACHEDIR=" + s.path("kubectl-cache"),
		},
	})
	if err != nil {
		return nil, err
	}
	return hook.Done, nil
}

func (s *supervisor) path(name string) string { return filepath.Join(s.directory, name) }

func (s *supervisor) log(name string) string { return filepath.Join(s.directory, "log", name+".log") }

// fileName converts a user name into a file name.
func fileName(user string) string {
	return strings.Map(func(r rune) rune {
		if r == '-' || r == '.' || r >= '0' && r <= '9' || r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' {
			return r
		}
		return '_'
	}, user) + ".yaml"
}

// tail returns the last lines of a file.
func tail(path string, lines int) string {
	file, err := os.Open(path)
	if err != nil {
		return err.Error()
	}
	defer file.Close()
	if info, err := file.Stat(); err == nil && info.Size() > 1<<16 {
		file.Seek(-1<<16, io.SeekEnd)
	}
	content, _ := io.ReadAll(file)
	all := strings.Split(strings.TrimSpace(string(content)), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}
