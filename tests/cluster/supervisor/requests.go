package supervisor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"drayman.dev/tests/cluster/protocol"
	"drayman.dev/tests/cluster/recipe"
)

// answer handles a request.
func (s *supervisor) answer(ctx context.Context, request protocol.Request) protocol.Answer {
	answer, err := s.serve(ctx, request)
	answer.ID = request.ID
	if err != nil {
		answer.Error = err.Error()
	}
	return answer
}

func (s *supervisor) serve(ctx context.Context, request protocol.Request) (protocol.Answer, error) {
	switch {
	case request.Do == "user":
		path, err := s.addUser(request.User, request.Groups)
		return protocol.Answer{Path: path}, err
	case request.Do == "upgrade":
		return protocol.Answer{}, s.upgrade(ctx, request.Version)
	case request.Node != nil:
		if *request.Node < 0 || *request.Node >= len(s.nodes) {
			return protocol.Answer{}, fmt.Errorf("there is no node %d", *request.Node)
		}
		return s.nodes[*request.Node].serve(ctx, s, request)
	case request.Do == "start":
		if err := s.start(request.Process); err != nil {
			return protocol.Answer{}, err
		}
		return protocol.Answer{PID: s.pid(request.Process)}, s.api.ready(ctx, s.failure)
	case request.Do == "stop":
		return protocol.Answer{}, s.stop(request.Process, syscall.Signal(request.Signal))
	case request.Do == "pid":
		return protocol.Answer{PID: s.pid(request.Process)}, nil
	}
	return protocol.Answer{}, fmt.Errorf("unknown request %q", request.Do)
}

// addUser issues a certificate. The caller grants rights through RBAC.
func (s *supervisor) addUser(user string, groups []string) (string, error) {
	if user == "" {
		return "", errors.New("a user needs a name")
	}
	path := filepath.Join(s.directory, "kubeconfig", "user-"+fileName(user))
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	return path, s.ca.kubeconfig(path, s.server(), user, groups)
}

// upgrade sets the version of the components that are started from now on.
func (s *supervisor) upgrade(ctx context.Context, text string) error {
	version, err := recipe.ParseVersion(text)
	if err != nil {
		return err
	}
	programs, err := recipe.Build(ctx, s.options.Target, version, len(s.nodes) > 0)
	if err != nil {
		return err
	}
	s.mutex.Lock()
	s.version, s.programs = version, programs
	s.defineComponents()
	s.mutex.Unlock()
	return s.eachNode(func(n *node) error {
		_, err := n.ask(protocol.Request{Do: "upgrade", Kubernetes: programs.Kubernetes, Minor: version.Minor})
		return err
	})
}

func (s *supervisor) stop(name string, signal syscall.Signal) error {
	s.mutex.Lock()
	running := s.running[name]
	// Removed first, because the end of a listed process is a failure.
	delete(s.running, name)
	s.mutex.Unlock()
	if running == nil {
		return fmt.Errorf("%q does not run", name)
	}
	if signal == 0 {
		signal = syscall.SIGTERM
	}
	return s.processes.End(running, signal, 20*time.Second)
}

func (s *supervisor) pid(name string) int {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if running := s.running[name]; running != nil && !running.Ended() {
		return running.PID
	}
	return 0
}
