// Package protocol is what the processes of a test cluster say to each other: one JSON object per line, requests on
// standard input and answers on standard output. The Rust harness speaks it to the supervisor, and the supervisor to
// the first process of each node.
package protocol

import (
	"bufio"
	"encoding/json"
	"io"
	"sync"
)

// Request asks for one thing. Which fields count depends on the operation.
type Request struct {
	ID int `json:"id"`
	// Do is "user", "start", "stop" or "pid"; between supervisor and node also "network".
	Do string `json:"do"`
	// User and Groups are who the certificate of a new kubeconfig names.
	User   string   `json:"user,omitempty"`
	Groups []string `json:"groups,omitempty"`
	// Node is the number of a node; absent: the process belongs to the control plane.
	Node *int `json:"node,omitempty"`
	// Process is the name of a component, as in the names of the logs.
	Process string `json:"process,omitempty"`
	// Signal ends the process; SIGTERM unless given.
	Signal int `json:"signal,omitempty"`
}

// Answer is what a request came to.
type Answer struct {
	ID    int    `json:"id"`
	Error string `json:"error,omitempty"`
	// Path is the kubeconfig of a new user.
	Path string `json:"path,omitempty"`
	// PID is the number of a process as its own PID namespace knows it.
	PID int `json:"pid,omitempty"`
}

// Cluster is the first line that the supervisor prints: the cluster is ready.
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

// Node is one node of a ready cluster.
type Node struct {
	Name string `json:"name"`
	// Init is the first process of the node's namespaces, in the numbers of the machine.
	Init    int    `json:"init"`
	Address string `json:"address"`
	// Gateway is the machine's address on that link, the same for all nodes.
	Gateway string `json:"gateway"`
	// Link is the network interface on the machine's side.
	Link string `json:"link"`
	// Ctr is the command line client of containerd.
	Ctr string `json:"ctr"`
}

// Writer prints lines, whole ones also when several goroutines answer.
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

// Requests reads requests until the other side is gone.
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
