package recipe

import (
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
)

const helmVersion = "3.18.6"

//go:embed helm.go helm
var helmSources embed.FS

// BuildHelm makes sure that Helm exists below target and returns the program. Only the tests of the chart need it.
//
// The directory is named after the version and the recipe, so that a change of either is another build and none of
// Kubernetes.
func BuildHelm(ctx context.Context, target string) (string, error) {
	target, err := filepath.Abs(target)
	if err != nil {
		return "", err
	}
	hash := sha256.New()
	files := map[string]string{"helm/module.txt": "go.mod", "helm/sums.txt": "go.sum", "helm/tools.go": "tools.go"}
	content := map[string][]byte{}
	for _, from := range []string{"helm.go", "helm/module.txt", "helm/sums.txt", "helm/tools.go"} {
		found, err := helmSources.ReadFile(from)
		if err != nil {
			return "", err
		}
		hash.Write(found)
		content[from] = found
	}
	root := filepath.Join(target, "cluster")
	name := "helm-" + helmVersion + "-" + hex.EncodeToString(hash.Sum(nil))[:8]
	program := filepath.Join(root, name, "helm")
	if err := once(ctx, root, name, "helm", func(source string) error {
		for from, to := range files {
			if err := os.WriteFile(filepath.Join(source, to), content[from], 0o644); err != nil {
				return err
			}
		}
		const module = "helm.sh/helm/v3"
		return goTool(ctx, source, "readonly", "build", "-trimpath",
			"-ldflags", "-s -w -X "+module+"/internal/version.version=v"+helmVersion, "-o", program, module+"/cmd/helm")
	}); err != nil {
		return "", fmt.Errorf("building Helm %s: %w", helmVersion, err)
	}
	return program, nil
}
