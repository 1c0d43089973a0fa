//! Flags shared by several subcommands.

use std::path::PathBuf;

use super::value;

/// Default driver name of the built-in driver.
const DRIVER_NAME: &str = "drayman.dev";

/// The API server and the driver name.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Cluster")]
pub(super) struct ClusterFlags {
    /// Kubeconfig file. Default: the service account of the pod
    #[arg(long, value_name = "FILE", env = "DRAYMAN_KUBECONFIG")]
    pub(super) kubeconfig: Option<PathBuf>,

    #[command(flatten)]
    pub(super) driver: DriverNameFlag,
}

/// The driver name.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct DriverNameFlag {
    /// Driver name, which its DeviceClasses or ResourceClasses name: a lower-case DNS subdomain of at most 63 characters, the same
    /// for the controller and all companions
    #[arg(
        id = "driver_name",
        long = "driver-name",
        value_name = "NAME",
        env = "DRAYMAN_DRIVER_NAME",
        default_value = DRIVER_NAME,
        value_parser = value::driver_name
    )]
    pub(super) name: String,
}

/// Root directories of the files that a companion writes.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct RootFlags {
    /// Kubelet's root directory (its --root-dir), with the sockets and the checkpoint in plugins and plugins_registry.
    #[arg(
        long,
        visible_alias = "kubelet-root",
        value_name = "DIRECTORY",
        env = "DRAYMAN_KUBELET_ROOT_DIR",
        default_value = "/var/lib/kubelet",
        value_parser = value::absolute_path
    )]
    pub(super) kubelet_root_dir: PathBuf,

    /// Directory for CDI files; the container runtime must read it (cdi_spec_dirs)
    #[arg(
        long,
        visible_alias = "cdi-dir",
        value_name = "DIRECTORY",
        env = "DRAYMAN_CDI_ROOT",
        default_value = "/var/run/cdi",
        value_parser = value::absolute_path
    )]
    pub(super) cdi_root: PathBuf,
}

/// Where the container runtime and kubelet's device plugin manager listen.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct SocketFlags {
    /// CRI socket of the container runtime, for checks whether containers still have a device. Default: the usual paths of
    /// containerd, CRI-O and k3s
    #[arg(
        long,
        value_name = "PATH",
        env = "DRAYMAN_CONTAINER_RUNTIME_SOCKET",
        value_parser = value::absolute_path
    )]
    pub(super) container_runtime_socket: Option<PathBuf>,

    /// Kubelet's device plugin directory; independent of its root directory
    #[arg(
        long,
        value_name = "DIRECTORY",
        env = "DRAYMAN_DEVICE_PLUGIN_DIR",
        default_value = "/var/lib/kubelet/device-plugins",
        value_parser = value::absolute_path
    )]
    pub(super) device_plugin_dir: PathBuf,
}
