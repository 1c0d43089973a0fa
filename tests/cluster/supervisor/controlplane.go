package supervisor

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"drayman.dev/tests/cluster/process"
	"drayman.dev/tests/cluster/recipe"
)

const (
	serviceRange = "10.96.0.0/16"
	apiService   = "10.96.0.1"
)

// classic returns the flags that enable claims of classic mode, if the minor version has them. Later versions get none: 1.31 to 1.33 then
// serve no claims, and from 1.34 on `resource.k8s.io/v1` is served by default.
func classic(version recipe.Version) (runtimeConfig, gates []string) {
	if version.Minor > 30 {
		return nil, nil
	}
	return []string{"--runtime-config=resource.k8s.io/v1alpha2=true"}, []string{"--feature-gates=DynamicResourceAllocation=true"}
}

// controllers returns the controllers to run. Up to 1.36, the cloud controllers would report a missing cloud provider; 1.37 does not know
// them any more.
func controllers(version recipe.Version) string {
	if version.Minor > 36 {
		return "*"
	}
	return "*,-cloud-node-lifecycle"
}

// credentials writes the files with credentials and configuration for the control plane.
func (s *supervisor) credentials() error {
	ca, err := newAuthority(s.path("pki"))
	if err != nil {
		return err
	}
	s.ca = ca
	addresses := []net.IP{net.IPv4(127, 0, 0, 1), net.ParseIP(apiService), s.slot.address(0).AsSlice()}
	names := []string{"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"}
	// Without files, controller manager and scheduler would generate RSA keys at each start.
	for _, component := range []string{"apiserver", "controller-manager", "scheduler"} {
		if err := ca.issueFiles(component, "kube-"+component, nil, addresses, names); err != nil {
			return err
		}
	}
	if err := ca.issueFiles("kubelet-client", "kube-apiserver", []string{"system:masters"}, nil, nil); err != nil {
		return err
	}
	if err := ca.serviceAccountKeys(); err != nil {
		return err
	}
	for user, groups := range map[string][]string{
		"admin": {"system:masters"}, "system:kube-controller-manager": nil, "system:kube-scheduler": nil,
	} {
		if err := ca.kubeconfig(s.kubeconfig(user), s.server(), user, groups); err != nil {
			return err
		}
	}
	if err := os.WriteFile(s.path("audit-policy.yaml"), []byte(auditPolicy(s.options.AuditBodies)), 0o600); err != nil {
		return err
	}
	return os.WriteFile(s.path("scheduler.yaml"), []byte(fmt.Sprintf(`apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
leaderElection: {leaderElect: false}
clientConnection: {kubeconfig: %q, qps: 1000, burst: 1000}
`, s.kubeconfig("system:kube-scheduler"))), 0o600)
}

// auditPolicy records every request once, when it completes. Bodies are recorded for the kinds that the tests inspect.
func auditPolicy(bodies bool) string {
	policy := "apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived, ResponseStarted]\nrules:\n"
	if bodies {
		policy += `- level: RequestResponse
  resources: [{group: resource.k8s.io}, {group: drayman.dev}, {group: "", resources: [pods, pods/*]}]
`
	}
	return policy + "- level: Metadata\n"
}

func (s *supervisor) server() string { return fmt.Sprintf("https://127.0.0.1:%d", s.slot.port(0)) }

// nodeServer is the URL of the API server for nodes and pods, over the link to the machine.
func (s *supervisor) nodeServer() string {
	return fmt.Sprintf("https://%s:%d", s.slot.address(0), s.slot.port(0))
}

// defineComponents sets the command lines of the control plane for the version. The caller holds the mutex, except before requests are
// served.
func (s *supervisor) defineComponents() {
	etcd := fmt.Sprintf("http://127.0.0.1:%d", s.slot.port(1))
	peer := fmt.Sprintf("http://127.0.0.1:%d", s.slot.port(2))
	runtimeConfig, gates := classic(s.version)
	bind := "127.0.0.1"
	if s.options.Nodes > 0 {
		bind = "0.0.0.0" // nodes connect over their links
	}
	pki := s.ca.path
	s.define("etcd", "--data-dir="+s.path("etcd"), "--listen-client-urls="+etcd, "--advertise-client-urls="+etcd,
		"--listen-peer-urls="+peer, "--initial-advertise-peer-urls="+peer, "--initial-cluster=default="+peer,
		"--unsafe-no-fsync", "--log-level=warn")
	admission := []string{"--enable-admission-plugins=NodeRestriction"}
	if !s.options.ServiceAccounts {
		// Pods can then be created immediately, without waiting for a service account.
		admission = append(admission, "--disable-admission-plugins=ServiceAccount")
	}
	s.define("apiserver", append([]string{"--etcd-servers=" + etcd, "--bind-address=" + bind,
		fmt.Sprintf("--secure-port=%d", s.slot.port(0)),
		// Explicit, because a machine without a network has no default address.
		"--advertise-address=" + s.slot.address(0).String(),
		"--cert-dir=" + s.path("pki"), "--tls-cert-file=" + pki("apiserver.crt"), "--tls-private-key-file=" + pki("apiserver.key"),
		"--client-ca-file=" + pki("ca.crt"),
		// No client has this name; without the flag, the other components log errors continuously.
		"--requestheader-client-ca-file=" + pki("ca.crt"), "--requestheader-allowed-names=front-proxy",
		"--service-account-key-file=" + pki("sa.pub"), "--service-account-signing-key-file=" + pki("sa.key"),
		"--service-account-issuer=https://kubernetes.default.svc",
		"--kubelet-client-certificate=" + pki("kubelet-client.crt"), "--kubelet-client-key=" + pki("kubelet-client.key"),
		"--kubelet-preferred-address-types=InternalIP",
		"--authorization-mode=Node,RBAC", "--service-cluster-ip-range=" + serviceRange, "--allow-privileged=true",
		"--audit-log-path=" + s.path("audit.log"), "--audit-log-maxsize=10000",
		"--audit-policy-file=" + s.path("audit-policy.yaml")}, slices.Concat(admission, runtimeConfig, gates)...)...)
	manager := s.kubeconfig("system:kube-controller-manager")
	s.define("controller-manager", append([]string{"--kubeconfig=" + manager, "--authentication-kubeconfig=" + manager,
		"--authorization-kubeconfig=" + manager, "--service-account-private-key-file=" + pki("sa.key"),
		"--root-ca-file=" + pki("ca.crt"), "--leader-elect=false", fmt.Sprintf("--secure-port=%d", s.slot.port(3)),
		"--tls-cert-file=" + pki("controller-manager.crt"), "--tls-private-key-file=" + pki("controller-manager.key"),
		// Each controller has its own account, as in a real cluster, so that the audit log distinguishes them.
		"--use-service-account-credentials=true", "--kube-api-qps=500", "--kube-api-burst=1000",
		"--controllers=" + controllers(s.version),
		// The controller manager creates this directory, by default in /usr.
		"--flex-volume-plugin-dir=" + s.path("flex-volume")}, gates...)...)
	scheduler := s.kubeconfig("system:kube-scheduler")
	s.define("scheduler", append([]string{"--config=" + s.path("scheduler.yaml"), fmt.Sprintf("--secure-port=%d", s.slot.port(4)),
		"--tls-cert-file=" + pki("scheduler.crt"), "--tls-private-key-file=" + pki("scheduler.key"),
		"--authentication-kubeconfig=" + scheduler, "--authorization-kubeconfig=" + scheduler}, gates...)...)
}

// startControlPlane returns once the API server is ready; it has started the other components by then.
func (s *supervisor) startControlPlane(ctx context.Context) error {
	data := s.path("etcd")
	if err := os.MkdirAll(data, 0o700); err != nil {
		return err
	}
	if s.root {
		if err := s.processes.OnThread(func() error { return privateTmpfs(data) }); err != nil {
			return err
		}
	}
	s.defineComponents()
	for _, name := range []string{"etcd", "apiserver"} {
		if err := s.start(name); err != nil {
			return err
		}
	}
	client, err := newAPI(s.server(), s.ca)
	if err != nil {
		return err
	}
	s.api = client
	if err := s.api.ready(ctx, s.failure); err != nil {
		return err
	}
	for _, name := range []string{"controller-manager", "scheduler"} {
		if err := s.start(name); err != nil {
			return err
		}
	}
	return nil
}

// define sets the command line of a component. Flags of the caller of `cluster up` come last and take precedence.
func (s *supervisor) define(name string, flags ...string) {
	s.components[name] = append(append([]string{s.programs.Kubernetes, name}, flags...), s.options.Flags[name]...)
}

// start starts a defined component that is not running.
func (s *supervisor) start(name string) error {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	arguments := s.components[name]
	if arguments == nil {
		return fmt.Errorf("the control plane has no %q", name)
	}
	if s.removing {
		return errAsked
	}
	if running := s.running[name]; running != nil && !running.Ended() {
		return fmt.Errorf("%s runs already", name)
	}
	started, err := s.processes.Start(process.Spec{Name: name, Arguments: arguments, Log: s.log(name), Directory: s.directory})
	if err != nil {
		return err
	}
	s.running[name] = started
	return nil
}

// failure returns an error if a component has ended unexpectedly.
func (s *supervisor) failure() error {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	for name, component := range s.running {
		if component.Ended() {
			return fmt.Errorf("%s %s; its log says:\n%s", name, component.Describe(), tail(s.log(name), 15))
		}
	}
	return nil
}

func (s *supervisor) kubeconfig(user string) string {
	return filepath.Join(s.directory, "kubeconfig", fileName(user))
}

// privateTmpfs gives the calling thread, and all its children, a mount namespace with a tmpfs at path.
func privateTmpfs(path string) error {
	if err := syscall.Unshare(syscall.CLONE_NEWNS); err != nil {
		return fmt.Errorf("a mount namespace: %w", err)
	}
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("keeping mounts private: %w", err)
	}
	return syscall.Mount("tmpfs", path, "tmpfs", 0, "mode=700")
}
