// Command cluster runs real Kubernetes for the tests of drayman: control planes, and nodes with real containers. See
// README.md.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"

	"drayman.dev/tests/cluster/image"
	"drayman.dev/tests/cluster/node"
	"drayman.dev/tests/cluster/progress"
	"drayman.dev/tests/cluster/protocol"
	"drayman.dev/tests/cluster/recipe"
	"drayman.dev/tests/cluster/supervisor"
)

const usage = `usage: cluster build|helm|prometheus|prometheus-operator|registry|up|join|pin [flags]

  build   builds Kubernetes and, with --nodes, containerd into the cache
  helm    builds Helm into the cache and prints where it is
  prometheus  finds Prometheus and promtool, or unpacks them into the cache, and prints in which directory they are
  prometheus-operator  fetches the definitions of the Prometheus operator and prints in which directory they are
  registry  finds docker-registry, or unpacks it into the cache, and prints in which directory it is; installs skopeo
  up      starts a cluster (after building what is missing) and keeps it until Ctrl-C; -h lists its flags
  join    runs a program in the mount namespace of a node: join node-0 PROGRAM...; for hooks of up
  pin     writes the requirements of --version into the recipe, in the folder given
`

// The first thread runs main only. Other processes join its namespaces by our process id. A thread of a node takes its own mount namespace
// for the node's children (node, ownProc); if that were the first thread, others would join it and see a /proc without their own processes.
func init() {
	runtime.LockOSThread()
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "cluster:", err)
		os.Exit(1)
	}
}

func run(arguments []string) error {
	if len(arguments) == 0 {
		fmt.Fprint(os.Stderr, usage)
		return errors.New("a command is missing")
	}
	command, rest := arguments[0], arguments[1:]
	switch command {
	case "build":
		return build(rest)
	case "helm":
		return helm(rest)
	case "prometheus":
		return prometheus(rest)
	case "prometheus-operator":
		return prometheusOperator(rest)
	case "registry":
		return registry(rest)
	case "up":
		return up(rest)
	case "join":
		return join(rest)
	case "pin":
		return pin(rest)
	case "image", "node": // internal
		if len(rest) != 1 {
			return fmt.Errorf("%s takes one argument", command)
		}
		if command == "image" {
			return image.Write(rest[0])
		}
		return node.Main(rest[0])
	}
	fmt.Fprint(os.Stderr, usage)
	return fmt.Errorf("unknown command %q", command)
}

// common declares the common flags.
func common(flags *flag.FlagSet) (target, version *string, nodes *int) {
	return flags.String("target", "target", "cargo's target directory; the cache is in its folder cluster"),
		flags.String("version", recipe.DefaultVersion, "version of Kubernetes, 1.27 to 1.37"),
		flags.Int("nodes", 0, "number of nodes; any needs root")
}

func build(arguments []string) error {
	flags := flag.NewFlagSet("cluster build", flag.ExitOnError)
	target, text, nodes := common(flags)
	flags.Parse(arguments)
	version, err := recipe.ParseVersion(*text)
	if err != nil {
		return err
	}
	end := progress.Show("building Kubernetes " + version.String())
	programs, err := recipe.Build(context.Background(), *target, version, *nodes > 0)
	end()
	if err == nil {
		fmt.Println(programs.Kubernetes)
	}
	return err
}

func helm(arguments []string) error {
	flags := flag.NewFlagSet("cluster helm", flag.ExitOnError)
	target, _, _ := common(flags)
	flags.Parse(arguments)
	end := progress.Show("building Helm")
	program, err := recipe.BuildHelm(context.Background(), *target)
	end()
	if err == nil {
		fmt.Println(program)
	}
	return err
}

func prometheus(arguments []string) error {
	flags := flag.NewFlagSet("cluster prometheus", flag.ExitOnError)
	target, _, _ := common(flags)
	flags.Parse(arguments)
	end := progress.Show("fetching Prometheus")
	directory, err := recipe.Prometheus(context.Background(), *target)
	end()
	if err == nil {
		fmt.Println(directory)
	}
	return err
}

func registry(arguments []string) error {
	flags := flag.NewFlagSet("cluster registry", flag.ExitOnError)
	target, _, _ := common(flags)
	flags.Parse(arguments)
	directory, err := recipe.Registry(context.Background(), *target)
	if err == nil {
		fmt.Println(directory)
	}
	return err
}

func prometheusOperator(arguments []string) error {
	flags := flag.NewFlagSet("cluster prometheus-operator", flag.ExitOnError)
	common(flags)
	flags.Parse(arguments)
	end := progress.Show("fetching the definitions of the Prometheus operator")
	directory, err := recipe.PrometheusOperatorDefinitions(context.Background())
	end()
	if err == nil {
		fmt.Println(directory)
	}
	return err
}

func pin(arguments []string) error {
	flags := flag.NewFlagSet("cluster pin", flag.ExitOnError)
	text := flags.String("version", recipe.DefaultVersion, "version of Kubernetes")
	flags.Parse(arguments)
	version, err := recipe.ParseVersion(*text)
	if err != nil {
		return err
	}
	if flags.NArg() != 1 {
		return errors.New("pin takes the folder of the recipe, tests/cluster/recipe")
	}
	return recipe.Pin(context.Background(), flags.Arg(0), version)
}

// join replaces this process by the program, so that signals reach the program.
func join(arguments []string) error {
	if len(arguments) < 2 {
		return errors.New("join takes the name of a node and a program")
	}
	var cluster protocol.Cluster
	if err := json.Unmarshal([]byte(os.Getenv("CLUSTER")), &cluster); err != nil {
		return fmt.Errorf("CLUSTER does not describe a cluster (it does for hooks of up): %w", err)
	}
	for _, node := range cluster.Nodes {
		if node.Name != arguments[0] {
			continue
		}
		nsenter, err := exec.LookPath("nsenter")
		if err != nil {
			return err
		}
		namespace := fmt.Sprintf("--mount=/proc/%d/ns/mnt", node.Init)
		return syscall.Exec(nsenter, append([]string{nsenter, namespace, "--"}, arguments[1:]...), os.Environ())
	}
	return fmt.Errorf("the cluster has no node %q", arguments[0])
}

func up(arguments []string) error {
	options := supervisor.Options{Flags: map[string][]string{}}
	flags := flag.NewFlagSet("cluster up", flag.ExitOnError)
	target, version, nodes := common(flags)
	flags.BoolVar(&options.ServiceAccounts, "service-accounts", false, "turn ServiceAccount admission on: pods get tokens, and wait for their account")
	flags.BoolVar(&options.AuditBodies, "audit-bodies", false, "record the bodies of requests about claims, pods and drayman's own resources")
	flags.BoolVar(&options.Requests, "requests", false, "read requests from standard input, as JSON lines, and end with it")
	flags.StringVar(&options.Hook, "hook", "", "shell command to run when the cluster is ready; it ends with it. Gets KUBECONFIG and CLUSTER (JSON)")
	flags.Func("flag", "add a flag to a component, as in --flag apiserver=--v=4 (repeatable)", func(text string) error {
		component, added, found := strings.Cut(text, "=")
		if !found {
			return fmt.Errorf("%q is not of the form COMPONENT=FLAG", text)
		}
		options.Flags[component] = append(options.Flags[component], added)
		return nil
	})
	flags.Parse(arguments)
	options.Target, options.Version, options.Nodes = *target, *version, *nodes
	return supervisor.Up(options)
}
