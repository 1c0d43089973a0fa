package recipe

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
)

const kubernetesModule = "drayman.dev/tests/cluster/kubernetes"

// buildKubernetes writes the module in source and builds it into directory.
func buildKubernetes(ctx context.Context, source, directory string, version Version) error {
	if err := copyOut("kubernetes/main.go", filepath.Join(source, "main.go")); err != nil {
		return err
	}
	if err := requirements(ctx, source, version); err != nil {
		return err
	}
	// Without these the components call themselves v0.0.0-master, and API discovery and feature gates go by it.
	flags := []string{"-s", "-w"}
	for _, in := range []string{"k8s.io/component-base/version", "k8s.io/client-go/pkg/version"} {
		for _, value := range []string{
			"gitVersion=v" + version.String(), "gitMajor=1", "gitMinor=" + strconv.Itoa(version.Minor),
			"gitTreeState=clean", "gitCommit=drayman-tests",
		} {
			flags = append(flags, "-X "+in+"."+value)
		}
	}
	// providerless leaves the clients of the public clouds out, which kubelet and apiserver up to 1.30 carry.
	program := filepath.Join(directory, "kubernetes")
	if err := goTool(ctx, source, "readonly", "build", "-trimpath", "-tags", "kubernetes,providerless",
		"-ldflags", strings.Join(flags, " "), "-o", program, "."); err != nil {
		return err
	}
	return os.Symlink("kubernetes", filepath.Join(directory, "kubectl"))
}

func buildContainerd(ctx context.Context, source, directory string) error {
	for from, to := range map[string]string{"module.txt": "go.mod", "sums.txt": "go.sum", "tools.go": "tools.go"} {
		if err := copyOut("containerd/"+from, filepath.Join(source, to)); err != nil {
			return err
		}
	}
	const module = "github.com/containerd/containerd"
	return goTool(ctx, source, "readonly", "build", "-trimpath",
		"-ldflags", "-s -w -X "+module+"/version.Version="+containerdVersion, "-o", directory+"/",
		module+"/cmd/containerd", module+"/cmd/containerd-shim-runc-v2", module+"/cmd/ctr")
}

// Pin works out go.mod and go.sum for a version and writes them where the recipe keeps them, below directory.
func Pin(ctx context.Context, directory string, version Version) error {
	source, err := os.MkdirTemp("", "drayman-pin-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(source)
	if err := copyOut("kubernetes/main.go", filepath.Join(source, "main.go")); err != nil {
		return err
	}
	if err := workOut(ctx, source, version); err != nil {
		return err
	}
	kept := filepath.Join(directory, "kubernetes", version.String())
	if err := os.MkdirAll(kept, 0o755); err != nil {
		return err
	}
	for from, to := range map[string]string{"go.mod": "module.txt", "go.sum": "sums.txt"} {
		content, err := os.ReadFile(filepath.Join(source, from))
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(kept, to), content, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// requirements writes go.mod and go.sum: those kept with the recipe where there are any, so that a build of the
// default version trusts nothing but checksums; else worked out with the module proxy.
func requirements(ctx context.Context, source string, version Version) error {
	kept := "kubernetes/" + version.String()
	if _, err := fs.Stat(sources, kept+"/module.txt"); err == nil {
		if err := copyOut(kept+"/module.txt", filepath.Join(source, "go.mod")); err != nil {
			return err
		}
		return copyOut(kept+"/sums.txt", filepath.Join(source, "go.sum"))
	}
	return workOut(ctx, source, version)
}

// workOut asks the module proxy for what a version needs.
func workOut(ctx context.Context, source string, version Version) error {
	var module strings.Builder
	fmt.Fprintf(&module, "module %s\n\ngo 1.22\n\nrequire k8s.io/kubernetes v%s\n\nreplace (\n", kubernetesModule, version)
	for _, name := range staging(version.Minor) {
		found := stagingVersion(ctx, source, name, version)
		fmt.Fprintf(&module, "\tk8s.io/%s => k8s.io/%s %s\n", name, name, found)
	}
	module.WriteString(")\n")
	if err := os.WriteFile(filepath.Join(source, "go.mod"), []byte(module.String()), 0o644); err != nil {
		return err
	}
	return goTool(ctx, source, "mod", "mod", "tidy")
}

// staging lists the modules that k8s.io/kubernetes expects beside itself: its go.mod names them as v0.0.0.
func staging(minor int) []string {
	names := strings.Fields(`api apiextensions-apiserver apimachinery apiserver cli-runtime client-go cloud-provider
		cluster-bootstrap code-generator component-base component-helpers controller-manager cri-api
		csi-translation-lib dynamic-resource-allocation kms kube-aggregator kube-controller-manager kube-proxy
		kube-scheduler kubectl kubelet metrics mount-utils pod-security-admission sample-apiserver
		sample-cli-plugin sample-controller`)
	if minor >= 28 {
		names = append(names, "endpointslice")
	}
	if minor <= 30 {
		names = append(names, "legacy-cloud-providers")
	}
	if minor >= 31 {
		names = append(names, "cri-client")
	}
	if minor >= 32 {
		names = append(names, "externaljwt")
	}
	if minor >= 36 {
		names = append(names, "cri-streaming", "streaming")
	}
	return names
}

// stagingVersion is the module's release of the same patch, or of a near one: not every patch of every staging module
// was published, and those of one minor fit each other. Some modules cannot be had at all (the samples of 1.27); none of
// them is part of the program, so the name is all that go.mod needs, and go says so should that ever change.
func stagingVersion(ctx context.Context, source, name string, version Version) string {
	for _, patch := range []int{version.Patch, 4, 1, 0} {
		candidate := fmt.Sprintf("v0.%d.%d", version.Minor, patch)
		command := exec.CommandContext(ctx, "go", "mod", "download", "k8s.io/"+name+"@"+candidate)
		command.Dir, command.Env = source, goEnvironment("mod")
		if command.Run() == nil {
			return candidate
		}
	}
	return fmt.Sprintf("v0.%d.%d", version.Minor, version.Patch)
}

// goTool runs go, with its compilers in a process group of their own that ends when the caller wants no more.
func goTool(ctx context.Context, directory, mod string, arguments ...string) error {
	// The kernel kills go when the thread that started it ends, which is ours and lasts as long as go.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	command := exec.CommandContext(ctx, "go", arguments...)
	command.Dir, command.Env = directory, goEnvironment(mod)
	command.Stdout, command.Stderr = os.Stderr, os.Stderr
	command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	command.Cancel = func() error { return syscall.Kill(-command.Process.Pid, syscall.SIGKILL) }
	if err := command.Run(); err != nil {
		return fmt.Errorf("go %s: %w", arguments[0], err)
	}
	return nil
}

// goEnvironment pins what the caller's environment could change about the result. The compiler collects no garbage below the limit of each
// process: that is a quarter of its time. go keeps all processors busy with packages, so each compiler works alone and without debug
// information: another eighth.
func goEnvironment(mod string) []string {
	return append(os.Environ(), "GOFLAGS=-mod="+mod+" -buildvcs=false -gcflags=all=-dwarf=false "+
		"-p="+strconv.Itoa(runtime.NumCPU()), "GOWORK=off", "GOTOOLCHAIN=local", "CGO_ENABLED=0",
		"GOGC=off", "GOMEMLIMIT=2GiB", "GOMAXPROCS=1")
}

func copyOut(from, to string) error {
	content, err := sources.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, content, 0o644)
}
