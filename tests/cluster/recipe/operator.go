package recipe

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// The release of the Prometheus operator whose CRDs validate the chart's objects, from the time of Kubernetes 1.30. The sum comes from Go's
// checksum database.
const (
	operatorModule  = "github.com/prometheus-operator/prometheus-operator"
	operatorVersion = "v0.76.2"
	operatorSum     = "h1:B+UcRc7py+zpow2H+q2V8sPF3jmsQNreJujBt36wZ+Q="
)

// PrometheusOperatorDefinitions returns the directory of the operator's CustomResourceDefinitions, from its Go module.
func PrometheusOperatorDefinitions(ctx context.Context) (string, error) {
	// Outside of any module, whose requirements would count otherwise.
	elsewhere, err := os.MkdirTemp("", "drayman-operator-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(elsewhere)
	command := exec.CommandContext(ctx, "go", "mod", "download", "-json", operatorModule+"@"+operatorVersion)
	// The sum is compared below, so Go's database is not required.
	command.Dir, command.Env = elsewhere, append(goEnvironment("mod"), "GOSUMDB=off")
	output, err := command.Output()
	var module struct{ Error, Dir, Sum string }
	if unreadable := json.Unmarshal(bytes.TrimSpace(output), &module); unreadable != nil {
		return "", fmt.Errorf("go mod download %s: %w", operatorModule, errors.Join(err, unreadable))
	}
	if module.Error != "" || err != nil {
		return "", fmt.Errorf("go mod download %s: %s (%w)", operatorModule, module.Error, err)
	}
	if module.Sum != operatorSum {
		return "", fmt.Errorf("%s %s is not what it was: its sum is %s, and %s is expected", operatorModule, operatorVersion, module.Sum, operatorSum)
	}
	return filepath.Join(module.Dir, "example", "prometheus-operator-crd"), nil
}
