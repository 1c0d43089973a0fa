// Package node is the first process of a test node. It sets up the node's namespaces so that they look like a machine that is only a
// Kubernetes node, and runs containerd, kubelet and kube-proxy there.
package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"drayman.dev/tests/cluster/image"
	"drayman.dev/tests/cluster/process"
	"drayman.dev/tests/cluster/protocol"
)

// Config is the supervisor's configuration for a node.
type Config struct {
	Name      string
	Directory string
	Logs      string
	Address   string
	Gateway   string
	// Pods is the subnet of the node's pods. It is only reachable through the node's own interfaces, so clusters may share it.
	Pods  string
	Minor int
	// Kubernetes is the program that contains kubelet and kube-proxy; Containerd is a directory of programs.
	Kubernetes, Containerd string
	// Cgroup is the parent of all cgroups of pods.
	Cgroup string
	// Kubelet and Proxy are kubeconfigs; CA, Certificate and Key are for kubelet's own server.
	Kubelet, Proxy       string
	CA, Certificate, Key string
	// Flags are additional flags for kubelet and proxy.
	Flags map[string][]string
}

type machine struct {
	Config
	processes *process.Group
	running   map[string]*process.Process
}

// Components are the programs of a node, by the names of their logs.
var Components = []string{"containerd", "kubelet", "proxy"}

const containerdSocket = "/run/containerd/containerd.sock"

// Main serves the supervisor's requests until its pipe is closed.
func Main(text string) error {
	m := &machine{running: map[string]*process.Process{}}
	if err := json.Unmarshal([]byte(text), &m.Config); err != nil {
		return err
	}
	if err := m.mounts(); err != nil {
		return err
	}
	if err := syscall.Sethostname([]byte(m.Name)); err != nil {
		return err
	}
	m.processes = process.NewGroup()
	if err := m.processes.OnThread(ownProc); err != nil {
		return err
	}
	os.Setenv("PATH", m.Containerd+":"+os.Getenv("PATH"))
	answers := protocol.NewWriter(os.Stdout)
	return protocol.Requests(os.Stdin, func(request protocol.Request) {
		answer, err := m.serve(request)
		if err != nil {
			answer.Error = err.Error()
		}
		answers.Write(answer)
	})
}

func (m *machine) serve(request protocol.Request) (protocol.Answer, error) {
	switch request.Do {
	case "prepare":
		return protocol.Answer{}, m.prepare()
	case "upgrade":
		m.Kubernetes, m.Minor = request.Kubernetes, request.Minor
		return protocol.Answer{}, m.configure(m.kubeletFile())
	case "start":
		return m.start(request.Process)
	case "stop":
		return protocol.Answer{}, m.stop(request.Process, syscall.Signal(request.Signal))
	case "pid":
		answer := protocol.Answer{}
		if running := m.running[request.Process]; running != nil && !running.Ended() {
			answer.PID = running.PID
		}
		return answer, nil
	}
	return protocol.Answer{}, fmt.Errorf("unknown request %q", request.Do)
}

// prepare sets up everything that kubelet requires.
func (m *machine) prepare() error {
	for _, command := range [][]string{
		{"ip", "link", "set", "lo", "up"},
		{"ip", "address", "add", m.Address, "peer", m.Gateway, "dev", "eth0"},
		{"ip", "link", "set", "eth0", "up"},
		{"ip", "route", "add", "default", "via", m.Gateway},
	} {
		if _, err := m.processes.Run(command...); err != nil {
			return err
		}
	}
	if err := m.processes.OnThread(forwardPackets); err != nil {
		return err
	}
	files := m.kubeletFile()
	files["containerd.toml"], files["cni/10-test.conflist"] = containerdConfig, networkConfig
	if err := m.configure(files); err != nil {
		return err
	}
	if _, err := m.start("containerd"); err != nil {
		return err
	}
	archive := filepath.Join(m.Directory, "image.tar")
	if _, err := m.processes.Run("/proc/self/exe", "image", archive); err != nil {
		return err
	}
	if err := m.answers(containerdSocket, "containerd"); err != nil {
		return err
	}
	if _, err := m.processes.Run("ctr", "-n", "k8s.io", "images", "import", archive); err != nil {
		return err
	}
	return os.Remove(archive)
}

func (m *machine) start(name string) (protocol.Answer, error) {
	arguments := m.arguments(name)
	if arguments == nil {
		return protocol.Answer{}, fmt.Errorf("a node has no %q", name)
	}
	if running := m.running[name]; running != nil && !running.Ended() {
		return protocol.Answer{}, fmt.Errorf("%s runs already", name)
	}
	started, err := m.processes.Start(process.Spec{
		Name: name, Arguments: append(arguments, m.Flags[name]...), Directory: m.Directory,
		Log: filepath.Join(m.Logs, m.Name+"-"+name+".log"),
	})
	if err != nil {
		return protocol.Answer{}, err
	}
	m.running[name] = started
	return protocol.Answer{PID: started.PID}, nil
}

func (m *machine) stop(name string, signal syscall.Signal) error {
	running := m.running[name]
	if running == nil || running.Ended() {
		return fmt.Errorf("%q does not run", name)
	}
	delete(m.running, name)
	if signal == 0 {
		signal = syscall.SIGTERM
	}
	return m.processes.End(running, signal, 20*time.Second)
}

// answers waits until a program accepts connections, by polling.
func (m *machine) answers(socket, name string) error {
	deadline := time.Now().Add(30 * time.Second)
	for {
		connection, err := net.Dial("unix", socket)
		if err == nil {
			return connection.Close()
		}
		if running := m.running[name]; running.Ended() {
			return fmt.Errorf("%s %s; see its log", name, running.Describe())
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s does not answer: %w", name, err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// forwardPackets lets pods reach other networks. The setting is per network namespace.
func forwardPackets() error {
	err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0o644)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("forwarding of packets: %w", err)
	}
	return nil
}

// arguments returns the command line of a component.
func (m *machine) arguments(name string) []string {
	switch name {
	case "containerd":
		return []string{filepath.Join(m.Containerd, "containerd"), "--config=" + m.file("containerd.toml")}
	case "kubelet":
		return []string{m.Kubernetes, "kubelet", "--config=" + m.file("kubelet.yaml"), "--kubeconfig=" + m.Kubelet,
			"--hostname-override=" + m.Name, "--node-ip=" + m.Address, "--root-dir=/var/lib/kubelet", "--v=2"}
	case "proxy":
		return []string{m.Kubernetes, "proxy", "--kubeconfig=" + m.Proxy, "--hostname-override=" + m.Name,
			"--proxy-mode=iptables", "--cluster-cidr=" + m.Pods, "--conntrack-max-per-core=0"}
	}
	return nil
}

func (m *machine) file(name string) string { return filepath.Join(m.Directory, name) }

func (m *machine) kubeletFile() map[string]string {
	return map[string]string{"kubelet.yaml": kubeletConfig + kubeletConfigOf(m.Minor)}
}

// configure writes configuration files of the components.
func (m *machine) configure(files map[string]string) error {
	if err := os.MkdirAll(m.file("cni"), 0o755); err != nil {
		return err
	}
	replace := strings.NewReplacer("$DIRECTORY", m.Directory, "$PODS", m.Pods, "$SOCKET", containerdSocket, "$IMAGE", image.Name,
		"$CGROUP", m.Cgroup, "$CA", m.CA, "$CERTIFICATE", m.Certificate, "$KEY", m.Key)
	for name, content := range files {
		if err := os.WriteFile(m.file(name), []byte(replace.Replace(content)), 0o600); err != nil {
			return err
		}
	}
	return nil
}
