//! Flags shared by several subcommands.

use std::path::PathBuf;

use super::value;

/// Default driver name of the built-in driver.
const DRIVER_NAME: &str = "drayman.dev";

/// How the API server is found.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Cluster")]
pub(super) struct ClusterFlags {
    /// Kubeconfig file. Default: the service account of the pod
    #[arg(long, value_name = "FILE", env = "DRAYMAN_KUBECONFIG")]
    pub(super) kubeconfig: Option<PathBuf>,

    #[command(flatten)]
    pub(super) driver: DriverNameFlag,
}

/// Which driver.
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

/// Where kubelet's files are.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct KubeletRootFlag {
    /// Kubelet's root directory (its --root-dir), with the sockets and the checkpoint in plugins and plugins_registry.
    #[arg(
        id = "kubelet_root_dir",
        long = "kubelet-root-dir",
        visible_alias = "kubelet-root",
        value_name = "DIRECTORY",
        env = "DRAYMAN_KUBELET_ROOT_DIR",
        default_value = "/var/lib/kubelet",
        value_parser = value::absolute_path
    )]
    pub(super) root_dir: PathBuf,
}

/// Where kubelet takes device plugins.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct DevicePluginDirFlag {
    /// Kubelet's device plugin directory; independent of its root directory
    #[arg(
        id = "device_plugin_dir",
        long = "device-plugin-dir",
        value_name = "DIRECTORY",
        env = "DRAYMAN_DEVICE_PLUGIN_DIR",
        default_value = "/var/lib/kubelet/device-plugins",
        value_parser = value::absolute_path
    )]
    pub(super) directory: PathBuf,
}

/// Where CDI files are.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct CdiRootFlag {
    /// Directory for CDI files; the container runtime must read it (cdi_spec_dirs)
    #[arg(
        id = "cdi_root",
        long = "cdi-root",
        visible_alias = "cdi-dir",
        value_name = "DIRECTORY",
        env = "DRAYMAN_CDI_ROOT",
        default_value = "/var/run/cdi",
        value_parser = value::absolute_path
    )]
    pub(super) root: PathBuf,
}

/// Where the container runtime answers.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct RuntimeSocketFlag {
    /// CRI socket of the container runtime, for checks whether containers still have a device. Default: the usual paths of
    /// containerd, CRI-O and k3s
    #[arg(
        id = "container_runtime_socket",
        long = "container-runtime-socket",
        value_name = "PATH",
        env = "DRAYMAN_CONTAINER_RUNTIME_SOCKET",
        value_parser = value::absolute_path
    )]
    pub(super) path: Option<PathBuf>,
}
