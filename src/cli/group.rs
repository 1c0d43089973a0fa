//! Flags shared by several subcommands.

use std::path::PathBuf;

use super::{logging, value};

/// Default driver name of the built-in driver.
const DRIVER_NAME: &str = "drayman.dev";

/// How the API server is found.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Cluster")]
pub(super) struct Cluster {
    /// Kubeconfig file. Default: the service account of the pod
    #[arg(long, value_name = "FILE", env = "DRAYMAN_KUBECONFIG", hide_env_values = true)]
    pub(super) kubeconfig: Option<PathBuf>,

    #[command(flatten)]
    pub(super) driver: DriverName,
}

/// Which driver.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct DriverName {
    /// Driver name, the driverName of its ResourceClasses: a lower-case DNS subdomain of at most 63 characters, the same for
    /// the controller and all companions
    #[arg(
        id = "driver_name",
        long = "driver-name",
        value_name = "NAME",
        env = "DRAYMAN_DRIVER_NAME",
        hide_env_values = true,
        default_value = DRIVER_NAME,
        value_parser = value::driver_name
    )]
    pub(super) name: String,
}

/// Where kubelet's files are.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct KubeletRoot {
    /// Kubelet's root directory (its --root-dir), with the sockets and the checkpoint in plugins and plugins_registry.
    #[arg(
        id = "kubelet_root_dir",
        long = "kubelet-root-dir",
        visible_alias = "kubelet-root",
        value_name = "DIRECTORY",
        env = "DRAYMAN_KUBELET_ROOT_DIR",
        hide_env_values = true,
        default_value = "/var/lib/kubelet",
        value_parser = value::absolute_path
    )]
    pub(super) root_dir: PathBuf,
}

/// Where kubelet takes device plugins.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct DevicePluginDir {
    /// Kubelet's device plugin directory; independent of its root directory
    #[arg(
        id = "device_plugin_dir",
        long = "device-plugin-dir",
        value_name = "DIRECTORY",
        env = "DRAYMAN_DEVICE_PLUGIN_DIR",
        hide_env_values = true,
        default_value = "/var/lib/kubelet/device-plugins",
        value_parser = value::absolute_path
    )]
    pub(super) directory: PathBuf,
}

/// Where CDI files are.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct CdiRoot {
    /// Directory for CDI files; the container runtime must read it (cdi_spec_dirs)
    #[arg(
        id = "cdi_root",
        long = "cdi-root",
        visible_alias = "cdi-dir",
        value_name = "DIRECTORY",
        env = "DRAYMAN_CDI_ROOT",
        hide_env_values = true,
        default_value = "/var/run/cdi",
        value_parser = value::absolute_path
    )]
    pub(super) root: PathBuf,
}

/// Where the container runtime answers.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct RuntimeSocket {
    /// CRI socket of the container runtime, for checks whether containers still have a device. Default: the usual paths of
    /// containerd, CRI-O and k3s
    #[arg(
        id = "container_runtime_socket",
        long = "container-runtime-socket",
        value_name = "PATH",
        env = "DRAYMAN_CONTAINER_RUNTIME_SOCKET",
        hide_env_values = true,
        value_parser = value::absolute_path
    )]
    pub(super) path: Option<PathBuf>,
}

/// Log level and format. Logs go to stderr.
#[derive(Clone, Copy, Debug, clap::Args)]
#[command(next_help_heading = "Logging")]
pub(super) struct Logging {
    /// Log format: text for people, json for programs (one object per line with ts, level, msg, target and the fields of the
    /// event).
    #[arg(
        long,
        value_name = "FORMAT",
        env = "DRAYMAN_LOGGING_FORMAT",
        hide_env_values = true,
        value_enum,
        default_value_t = logging::Format::Text
    )]
    pub(super) logging_format: logging::Format,

    /// Log level: 0 info, with the configuration at start; 2 also info of libraries; 4 each decision; 6 each API request; 8
    /// every step; 9 also every step of libraries.
    #[arg(
        short = 'v',
        long = "v",
        value_name = "LEVEL",
        env = "DRAYMAN_V",
        hide_env_values = true,
        default_value_t = 0,
        value_parser = clap::value_parser!(u8).range(0..=9)
    )]
    pub(super) verbosity: u8,
}
