package recipe

import (
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
)

// CNIPlugins is where Debian puts the CNI plugins.
const CNIPlugins = "/usr/lib/cni"

// fromDebian is what a node needs beside Kubernetes and containerd, by the file that shows that it is there.
var fromDebian = []struct{ needs, from string }{
	{"runc", "runc"},
	{CNIPlugins + "/bridge", "containernetworking-plugins"},
	{"iptables", "iptables"},
	{"conntrack", "conntrack"},
	{"ip", "iproute2"},
	{"nsenter", "util-linux"},
	{"busybox", "busybox-static"},
}

// installPackages installs what is missing, if it may.
func installPackages(ctx context.Context, root string) error {
	if len(missingPackages()) == 0 {
		return nil
	}
	unlock, err := lock(ctx, root, "packages")
	if err != nil {
		return err
	}
	defer unlock()
	packages := missingPackages()
	if len(packages) == 0 {
		return nil
	}
	install := "apt-get update && apt-get install --yes --no-install-recommends " + strings.Join(packages, " ")
	if _, err := exec.LookPath("apt-get"); err != nil {
		return fmt.Errorf("a test node needs programs that this machine lacks; on Debian they are in: %s", strings.Join(packages, " "))
	}
	if os.Geteuid() != 0 {
		return fmt.Errorf("a test node needs programs that this machine lacks; as root: %s", install)
	}
	fmt.Fprintln(os.Stderr, "installing for the tests:", strings.Join(packages, " "))
	// Not ended with the caller: dpkg that was killed leaves work for people.
	command := exec.Command("sh", "-c", install)
	command.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
	if output, err := command.CombinedOutput(); err != nil {
		os.Stderr.Write(output)
		return fmt.Errorf("%s: %w", install, err)
	}
	if missing := missingPackages(); len(missing) > 0 {
		return errors.New("installed, but still not found in PATH: " + strings.Join(missing, " "))
	}
	return nil
}

func missingPackages() []string {
	var missing []string
	for _, program := range fromDebian {
		path, err := exec.LookPath(program.needs)
		if err != nil || program.needs == "busybox" && !static(path) {
			missing = append(missing, program.from)
		}
	}
	return missing
}

// static says whether a program runs without any library: busybox is put alone into the test image.
func static(path string) bool {
	program, err := elf.Open(path)
	if err != nil {
		return false
	}
	defer program.Close()
	for _, segment := range program.Progs {
		if segment.Type == elf.PT_INTERP {
			return false
		}
	}
	return true
}
