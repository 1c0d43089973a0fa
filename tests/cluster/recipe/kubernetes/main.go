//go:build kubernetes

// The Kubernetes that the tests run: every component in one program, chosen by the first argument or by the name
// under which the program is called (so a link named kubectl is kubectl). One program instead of seven because they
// share nearly all of their code, and linking is half of the build.
//
// This file belongs to a module of its own, which the recipe writes for one Kubernetes version; the build tag keeps
// it out of the module it lies in.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	manager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"

	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
)

func main() {
	component := filepath.Base(os.Args[0])
	if component != "kubectl" {
		if len(os.Args) < 2 {
			usage("a component is missing")
		}
		component = os.Args[1]
		os.Args = os.Args[1:]
	}
	os.Args[0] = component
	var command *cobra.Command
	switch component {
	case "etcd":
		etcdmain.Main(os.Args)
		return
	case "apiserver":
		command = apiserver.NewAPIServerCommand()
	case "controller-manager":
		command = manager.NewControllerManagerCommand()
	case "scheduler":
		command = scheduler.NewSchedulerCommand()
	case "kubelet":
		command = newKubelet(kubelet.NewKubeletCommand)
	case "proxy":
		command = proxy.NewProxyCommand()
	case "kubectl":
		command = kubectl.NewDefaultKubectlCommand()
	default:
		usage(fmt.Sprintf("unknown component %q", component))
	}
	os.Exit(cli.Run(command))
}

// newKubelet hides that kubelet's constructor takes a context from 1.32 on.
func newKubelet(constructor any) *cobra.Command {
	switch f := constructor.(type) {
	case func() *cobra.Command:
		return f()
	case func(context.Context) *cobra.Command:
		return f(context.Background())
	}
	panic(fmt.Sprintf("kubelet's constructor has an unknown type: %T", constructor))
}

func usage(problem string) {
	fmt.Fprintln(os.Stderr, problem+"; usage: kubernetes etcd|apiserver|controller-manager|scheduler|kubelet|proxy|kubectl [flags]")
	os.Exit(2)
}
