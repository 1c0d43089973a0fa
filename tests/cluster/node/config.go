package node

import "drayman.dev/tests/cluster/recipe"

// Paths outside of $DIRECTORY are those of a real node; each node has its own in its mount namespace.

const containerdConfig = `version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
# Plugins that the tests do not need, or that write elsewhere (opt).
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.nri.v1.nri", "io.containerd.internal.v1.tracing", "io.containerd.tracing.processor.v1.otlp",
  "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.blockfile", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs"]
[grpc]
  address = "$SOCKET"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "$IMAGE"
  # A machine without CAP_SYS_RESOURCE cannot lower oom_score_adj, and runc fails with "can't get final child's PID".
  restrict_oom_score_adj = true
  enable_cdi = true
  # Not /etc/cdi, which may contain CDI files of the machine.
  cdi_spec_dirs = ["/var/run/cdi"]
  # Registries of a test: a file registries/<host>/hosts.toml counts at once.
  [plugins."io.containerd.grpc.v1.cri".registry]
    config_path = "$DIRECTORY/registries"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "` + recipe.CNIPlugins + `"
    conf_dir = "$DIRECTORY/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
`

const networkConfig = `{"cniVersion": "1.0.0", "name": "test", "plugins": [
  {"type": "bridge", "bridge": "pods0", "isGateway": true, "isDefaultGateway": true, "ipMasq": true,
   "ipam": {"type": "host-local", "ranges": [[{"subnet": "$PODS"}]]}},
  {"type": "loopback"}]}
`

const kubeletConfig = `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: false}, webhook: {enabled: false}, x509: {clientCAFile: "$CA"}}
authorization: {mode: AlwaysAllow}
tlsCertFile: "$CERTIFICATE"
tlsPrivateKeyFile: "$KEY"
cgroupDriver: cgroupfs
# All cgroups of pods below one, which the supervisor removes.
cgroupRoot: "$CGROUP"
enforceNodeAllocatable: []
failSwapOn: false
containerRuntimeEndpoint: "unix://$SOCKET"
volumePluginDir: /var/lib/kubelet/volume-plugins
# The disk of the machine is not the matter of the tests.
imageGCHighThresholdPercent: 100
evictionHard: {"memory.available": "10Mi"}
# Devices of device plugins show in the node's status as soon as may be.
nodeStatusUpdateFrequency: 1s
`

// kubeletConfigOf returns additional settings for the kubelet of a minor version.
func kubeletConfigOf(minor int) string {
	switch {
	case minor <= 30:
		return "featureGates: {DynamicResourceAllocation: true, KubeletPodResourcesGet: true, KubeletPodResourcesDynamicResources: true}\n"
	case minor <= 33:
		return "featureGates: {KubeletPodResourcesGet: true, KubeletPodResourcesDynamicResources: true}\nfailCgroupV1: false\n"
	default: // All of these are on by default.
		return "failCgroupV1: false\n"
	}
}
