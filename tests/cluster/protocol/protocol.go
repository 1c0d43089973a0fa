// Package protocol defines the messages between the processes of a test cluster: one JSON object per line, requests on standard input and
// answers on standard output. The Rust harness uses it to talk to the supervisor, and the supervisor to the first process of each node.
package protocol

import (
	"bufio"
	"encoding/json"
	"io"
	"sync"
)

// Request is one operation. The operation determines which fields are used.
type Request struct {
	ID int `json:"id"`
	// Do is "user", "start", "stop", "pid" or "upgrade"; between supervisor and node also "prepare".
	Do string `json:"do"`
	// User and Groups are the names in the certificate of a new kubeconfig.
	User   string   `json:"user,omitempty"`
	Groups []string `json:"groups,omitempty"`
	// Node is the index of a node; absent for processes of the control plane.
	Node *int `json:"node,omitempty"`
	// Process is the name of a component, as in the names of the logs.
	Process string `json:"process,omitempty"`
	// Signal ends the process; SIGTERM by default.
	Signal int `json:"signal,omitempty"`
	// Version is that of the components that are started after an upgrade.
	Version string `json:"version,omitempty"`
	// Kubernetes and Minor are for nodes: the program of that version, and its minor version.
	Kubernetes string `json:"kubernetes,omitempty"`
	Minor      int    `json:"minor,omitempty"`
}

// Answer is the result of a request.
type Answer struct {
	ID    int    `json:"id"`
	Error string `json:"error,omitempty"`
	// Path is the kubeconfig of a new user.
	Path string `json:"path,omitempty"`
	// PID is the id of a process in its own PID namespace.
	PID int `json:"pid,omitempty"`
}

// Cluster is the supervisor's first line, once the cluster is ready.
type Cluster struct {
	Version    string            `json:"version"`
	Directory  string            `json:"directory"`
	Server     string            `json:"server"`
	Kubeconfig string            `json:"kubeconfig"`
	Kubectl    string            `json:"kubectl"`
	Audit      string            `json:"audit"`
	Image      string            `json:"image"`
	Logs       map[string]string `json:"logs"`
	Nodes      []Node            `json:"nodes"`
}

// Node describes a node of a ready cluster.
type Node struct {
	Name string `json:"name"`
	// Init is the process id of the node's first process on the machine.
	Init    int    `json:"init"`
	Address string `json:"address"`
	// Gateway is the machine's address on the link, equal for all nodes.
	Gateway string `json:"gateway"`
	// Link is the network interface on the machine.
	Link string `json:"link"`
	// Ctr is the path of containerd's command line client.
	Ctr string `json:"ctr"`
}

// Writer writes complete lines, even with several goroutines.
type Writer struct {
	mutex   sync.Mutex
	encoder *json.Encoder
}

// NewWriter writes to w.
func NewWriter(w io.Writer) *Writer { return &Writer{encoder: json.NewEncoder(w)} }

// Write writes one line.
func (w *Writer) Write(message any) error {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	return w.encoder.Encode(message)
}

// Requests calls each for every request until the input ends.
func Requests(from io.Reader, each func(Request)) error {
	lines := bufio.NewScanner(from)
	for lines.Scan() {
		var request Request
		if err := json.Unmarshal(lines.Bytes(), &request); err != nil {
			return err
		}
		each(request)
	}
	return lines.Err()
}
