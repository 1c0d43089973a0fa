package supervisor

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	inside "drayman.dev/tests/cluster/node"
	"drayman.dev/tests/cluster/process"
	"drayman.dev/tests/cluster/protocol"
)

// node is the supervisor's side of a node: its first process, which holds its namespaces, and the connection to it. When that process dies,
// the kernel kills everything in the PID namespace (including containers), and removes mounts, interfaces and firewall rules with the other
// namespaces.
type node struct {
	number    int
	name      string
	directory string
	init      atomic.Pointer[process.Process]

	mutex   sync.Mutex // one request at a time
	to      *os.File
	answers *bufio.Reader
}

const nodeNamespaces = syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | syscall.CLONE_NEWNET | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC

func (s *supervisor) makeNodes() {
	for number := range s.options.Nodes {
		name := fmt.Sprintf("node-%d", number)
		s.nodes = append(s.nodes, &node{number: number, name: name, directory: s.path(name)})
	}
}

// endNodes makes pending requests to nodes return.
func (s *supervisor) endNodes() {
	for _, node := range s.nodes {
		if init := node.init.Load(); init != nil {
			s.processes.End(init, syscall.SIGKILL, 10*time.Second)
		}
	}
}

// joinNodes starts kubelets and waits until every node is ready.
func (s *supervisor) joinNodes(ctx context.Context) error {
	return s.eachNode(func(n *node) error {
		since := time.Now()
		for _, name := range []string{"kubelet", "proxy"} {
			if _, err := n.ask(protocol.Request{Do: "start", Process: name}); err != nil {
				return err
			}
		}
		return n.ready(ctx, s, since)
	})
}

func (s *supervisor) eachNode(f func(*node) error) error {
	results := make(chan error)
	for _, node := range s.nodes {
		go func() {
			err := f(node)
			if err != nil {
				err = fmt.Errorf("%s: %w", node.name, err)
			}
			results <- err
		}()
	}
	var problems []error
	for range s.nodes {
		problems = append(problems, <-results)
	}
	return errors.Join(problems...)
}

// prepare creates the node's namespaces and link, and starts its container runtime.
func (n *node) prepare(s *supervisor) error {
	if err := os.MkdirAll(n.directory, 0o700); err != nil {
		return err
	}
	config, err := n.config(s)
	if err != nil {
		return err
	}
	input, to, err := os.Pipe()
	if err != nil {
		return err
	}
	from, output, err := os.Pipe()
	if err != nil {
		return err
	}
	n.to, n.answers = to, bufio.NewReader(from)
	init, err := s.processes.Start(process.Spec{
		Name: n.name, Arguments: []string{"/proc/self/exe", "node", config}, Log: s.log(n.name + "-init"),
		Input: input, Output: output, Namespaces: nodeNamespaces,
	})
	input.Close()
	output.Close()
	if err != nil {
		return fmt.Errorf("namespaces for a node: %w (in a container this needs a privileged one)", err)
	}
	n.init.Store(init)
	link, here, there := s.slot.link(n.number), s.slot.address(0).String(), s.slot.address(1+n.number).String()
	for _, command := range [][]string{
		{"ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", fmt.Sprint(init.PID)},
		// Every link has the same address on the machine's side, the address of the API server for nodes.
		{"ip", "address", "add", here, "peer", there, "dev", link},
		{"ip", "link", "set", link, "up"},
	} {
		if _, err := s.processes.Run(command...); err != nil {
			return err
		}
	}
	_, err = n.ask(protocol.Request{Do: "prepare"})
	return err
}

// config returns the configuration of the node's first process.
func (n *node) config(s *supervisor) (string, error) {
	kubeconfig := func(user string, groups []string) (string, error) {
		path := filepath.Join(n.directory, fileName(user))
		return path, s.ca.kubeconfig(path, s.nodeServer(), user, groups)
	}
	kubelet, err := kubeconfig("system:node:"+n.name, []string{"system:nodes"})
	if err != nil {
		return "", err
	}
	proxy, err := kubeconfig("system:kube-proxy", nil)
	if err != nil {
		return "", err
	}
	address := net.IP(s.slot.address(1 + n.number).AsSlice())
	if err := s.ca.issueFiles(n.name, "system:node:"+n.name, []string{"system:nodes"}, []net.IP{address}, []string{n.name}); err != nil {
		return "", err
	}
	cgroup := filepath.Join("/", filepath.Base(s.directory), n.name)
	if err := makeCgroups(cgroup); err != nil {
		return "", err
	}
	config, err := json.Marshal(inside.Config{
		Name: n.name, Directory: n.directory, Logs: s.path("log"), Address: address.String(), Gateway: s.slot.address(0).String(),
		Pods: fmt.Sprintf("10.88.%d.0/24", n.number), Minor: s.version.Minor,
		Kubernetes: s.programs.Kubernetes, Containerd: s.programs.Containerd, Cgroup: cgroup,
		Kubelet: kubelet, Proxy: proxy, CA: s.ca.path("ca.crt"), Certificate: s.ca.path(n.name + ".crt"), Key: s.ca.path(n.name + ".key"),
		Flags: s.options.Flags,
	})
	return string(config), err
}

// ask sends a request to the node's first process and waits for the answer.
func (n *node) ask(request protocol.Request) (protocol.Answer, error) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	var answer protocol.Answer
	if err := protocol.NewWriter(n.to).Write(request); err != nil {
		return answer, fmt.Errorf("the node is gone: %w", err)
	}
	line, err := n.answers.ReadBytes('\n')
	if errors.Is(err, io.EOF) {
		return answer, errors.New("the node ended; its log says why")
	}
	if err != nil {
		return answer, err
	}
	if err := json.Unmarshal(line, &answer); err != nil {
		return answer, err
	}
	if answer.Error != "" {
		return answer, errors.New(answer.Error)
	}
	return answer, nil
}

// serve forwards a request. A kubelet counts as started once the API server reports its node as ready.
func (n *node) serve(ctx context.Context, s *supervisor, request protocol.Request) (protocol.Answer, error) {
	since := time.Now()
	answer, err := n.ask(request)
	if err != nil || request.Do != "start" || request.Process != "kubelet" {
		return answer, err
	}
	return answer, n.ready(ctx, s, since)
}

// ready waits until the node became ready after since and kubelet knows its pods (kubelet reports ready slightly earlier, and rejects exec
// until then). On a timeout, the error contains the end of kubelet's log.
func (n *node) ready(ctx context.Context, s *supervisor, since time.Time) error {
	waiting, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	err := s.api.nodeReady(waiting, n.name, since)
	if err == nil {
		err = s.api.kubeletKnowsItsPods(waiting, n.name)
	}
	if err != nil {
		return fmt.Errorf("%w; kubelet's log says:\n%s", err, tail(s.log(n.name+"-kubelet"), 15))
	}
	return nil
}

func (n *node) describe(s *supervisor) protocol.Node {
	return protocol.Node{
		Name: n.name, Init: n.init.Load().PID, Link: s.slot.link(n.number), Address: s.slot.address(1 + n.number).String(), Gateway: s.slot.address(0).String(),
		Ctr: filepath.Join(s.programs.Containerd, "ctr"),
	}
}

// remove stops the node and removes everything that outlives its namespaces.
func (n *node) remove(s *supervisor) error {
	init := n.init.Load()
	if init == nil {
		return nil
	}
	// Test programs that joined the node's mount namespace are not in its PID namespace.
	err := killInNamespace(init.PID)
	err = errors.Join(err, s.processes.End(init, syscall.SIGKILL, 10*time.Second))
	// The kernel removes the link with the namespace, but with some delay. A missing link is no error.
	s.processes.Run("ip", "link", "delete", s.slot.link(n.number))
	return err
}

func makeCgroups(path string) error {
	roots, err := cgroupRoots()
	if err != nil {
		return err
	}
	if len(roots) == 0 {
		return errors.New("no cgroup file system is mounted, and a node needs one")
	}
	for _, root := range roots {
		if err := os.MkdirAll(filepath.Join(root, path), 0o755); err != nil {
			return fmt.Errorf("a cgroup for the node: %w", err)
		}
	}
	return nil
}
