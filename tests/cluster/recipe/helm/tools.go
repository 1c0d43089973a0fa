//go:build helm

// The Helm with which the tests install the chart.
package tools

import _ "helm.sh/helm/v3/cmd/helm"
