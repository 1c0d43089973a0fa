//go:build containerd

// The container runtime that the tests run. The module exists because `go install` refuses containerd (its go.mod has
// exclude directives): what is named here becomes a dependency, and the recipe builds it by its import path.
package tools

import (
	_ "github.com/containerd/containerd/cmd/containerd"
	_ "github.com/containerd/containerd/cmd/containerd-shim-runc-v2"
	_ "github.com/containerd/containerd/cmd/ctr"
)
