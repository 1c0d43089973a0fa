package supervisor

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"
)

// api is a minimal Kubernetes client for the supervisor.
type api struct {
	server string
	client *http.Client
}

func newAPI(server string, ca *authority) (*api, error) {
	certificate, key, err := ca.issue("drayman-test-supervisor", []string{"system:masters"}, nil, nil)
	if err != nil {
		return nil, err
	}
	pair, err := tls.X509KeyPair(certificate, key)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	roots.AddCert(ca.certificate)
	return &api{server, &http.Client{Transport: &http.Transport{
		TLSClientConfig: &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{pair}},
	}}}, nil
}

func (a *api) get(ctx context.Context, path string) (*http.Response, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, a.server+path, nil)
	if err != nil {
		return nil, err
	}
	response, err := a.client.Do(request)
	if err != nil {
		return nil, err
	}
	if response.StatusCode != http.StatusOK {
		defer response.Body.Close()
		text, _ := io.ReadAll(io.LimitReader(response.Body, 4096))
		return nil, fmt.Errorf("GET %s: %s: %s", path, response.Status, text)
	}
	return response, nil
}

// ready waits for /readyz by polling. It stops if ended reports an error, which means that the server does not start.
func (a *api) ready(ctx context.Context, ended func() error) error {
	for {
		attempt, cancel := context.WithTimeout(ctx, 2*time.Second)
		response, err := a.get(attempt, "/readyz")
		cancel()
		if err == nil {
			response.Body.Close()
			return nil
		}
		if err := ended(); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the API server did not become ready: %w", err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

type nodeEvent struct {
	Type   string
	Object struct {
		Status struct {
			Conditions []struct {
				Type, Status      string
				LastHeartbeatTime time.Time
			}
		}
	}
}

// nodeReady watches until the node has reported itself ready after since.
func (a *api) nodeReady(ctx context.Context, name string, since time.Time) error {
	since = since.Truncate(time.Second) // heartbeats have a resolution of seconds
	query := url.Values{"watch": {"true"}, "fieldSelector": {"metadata.name=" + name}}
	for {
		response, err := a.get(ctx, "/api/v1/nodes?"+query.Encode())
		if err != nil {
			return err
		}
		ready, err := readNodeEvents(response.Body, since)
		response.Body.Close()
		if ready {
			return nil
		}
		if ctx.Err() != nil {
			return fmt.Errorf("node %s did not become ready in time", name)
		}
		if err != nil && !errors.Is(err, io.EOF) {
			return fmt.Errorf("watching node %s: %w", name, err)
		}
	}
}

func readNodeEvents(body io.Reader, since time.Time) (bool, error) {
	events := json.NewDecoder(body)
	for {
		var event nodeEvent
		if err := events.Decode(&event); err != nil {
			return false, err
		}
		for _, condition := range event.Object.Status.Conditions {
			if condition.Type == "Ready" && condition.Status == "True" && !condition.LastHeartbeatTime.Before(since) {
				return true, nil
			}
		}
	}
}

type podList struct {
	Items []struct {
		Metadata struct{ UID string }
		Status   struct{ Phase string }
	}
}

func (a *api) pods(ctx context.Context, path string) (podList, error) {
	var list podList
	response, err := a.get(ctx, path)
	if err != nil {
		return list, err
	}
	defer response.Body.Close()
	return list, json.NewDecoder(response.Body).Decode(&list)
}

// kubeletKnowsItsPods waits until kubelet lists every unfinished pod bound to the node. It polls, because kubelet's list cannot be watched.
func (a *api) kubeletKnowsItsPods(ctx context.Context, node string) error {
	bound, err := a.pods(ctx, "/api/v1/pods?fieldSelector="+url.QueryEscape("spec.nodeName="+node))
	if err != nil {
		return err
	}
	for {
		known, err := a.pods(ctx, "/api/v1/nodes/"+node+"/proxy/pods")
		if err == nil && contains(known, bound) {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("the kubelet of %s does not know its pods", node), err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func contains(known, bound podList) bool {
	uids := map[string]bool{}
	for _, pod := range known.Items {
		uids[pod.Metadata.UID] = true
	}
	for _, pod := range bound.Items {
		if over := pod.Status.Phase == "Succeeded" || pod.Status.Phase == "Failed"; !over && !uids[pod.Metadata.UID] {
			return false
		}
	}
	return true
}
