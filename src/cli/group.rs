//! Flags shared by several subcommands.

use std::path::PathBuf;

use super::{logging, value};

/// Default driver name of the built-in driver.
const DRIVER_NAME: &str = "drayman.dev";

/// How the API server is found.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Cluster")]
pub(super) struct Cluster {
    /// Kubeconfig file with the API server and the credentials. Without it, the service account of the pod that this
    /// runs in is used.
    #[arg(long, value_name = "FILE", env = "DRAYMAN_KUBECONFIG", hide_env_values = true)]
    pub(super) kubeconfig: Option<PathBuf>,

    #[command(flatten)]
    pub(super) driver: DriverName,
}

/// Which driver.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct DriverName {
    /// Name of the driver: the driverName of its ResourceClasses. A lower-case DNS subdomain of at most 63 characters,
    /// the same for the controller and on every node.
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
    /// Root directory of kubelet (its --root-dir). The sockets and the checkpoint are in plugins and plugins_registry below it.
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
    /// Directory of kubelet's socket for device plugins, which does not move with kubelet's root directory
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
    /// Directory in which CDI files are written: one of those that the container runtime reads (cdi_spec_dirs)
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
    /// The CRI socket of the container runtime, which shows which containers still have a device; by default looked for
    /// where containerd, CRI-O and k3s have it
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

/// What is logged, and in which form. Logs go to stderr.
#[derive(Clone, Copy, Debug, clap::Args)]
#[command(next_help_heading = "Logging")]
pub(super) struct Logging {
    /// Form of the log: text for people, json for machines (one object per line, with the keys ts, level, msg, target
    /// and the fields of the event).
    #[arg(
        long,
        value_name = "FORMAT",
        env = "DRAYMAN_LOGGING_FORMAT",
        hide_env_values = true,
        value_enum,
        default_value_t = logging::Format::Text
    )]
    pub(super) logging_format: logging::Format,

    /// How much is logged: 0 what an operator needs, with the configuration at the start; 2 what the libraries tell as
    /// well; 4 each decision; 6 each request to the API server; 8 every step; 9 every step of the libraries too.
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
