//! `drayman node`: flags and the file of device kinds -> the node's companion.

use std::path::PathBuf;

use super::{Error, client, group, logging, shutdown, value};

/// Run the node companion, which hands this node's devices to containers
///
/// One on every node, as root. It finds the devices that the configuration file describes, publishes them as a
/// NodeInventory, and serves kubelet through the DRA and the device plugin API.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    cluster: group::Cluster,

    #[command(flatten)]
    node: Node,

    #[command(flatten)]
    directories: Directories,

    #[command(flatten)]
    logging: group::Logging,
}

#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Node")]
struct Node {
    /// Name of the Node object of this machine. In a pod, set NODE_NAME from the field spec.nodeName.
    #[arg(long, value_name = "NAME", env = "NODE_NAME", hide_env_values = true, value_parser = value::node_name)]
    node_name: String,

    /// YAML file that describes the kinds of devices of this node (docs/node.md).
    #[arg(long, value_name = "FILE", env = "DRAYMAN_CONFIG", hide_env_values = true)]
    config: PathBuf,
}

/// Where kubelet and the container runtime expect files. With another kubelet root directory the first two move along;
/// the device plugin directory does not.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Directories")]
struct Directories {
    /// Where kubelet looks for registration sockets
    #[arg(
        long,
        value_name = "DIRECTORY",
        env = "DRAYMAN_KUBELET_REGISTRAR_DIRECTORY_PATH",
        hide_env_values = true,
        default_value = "/var/lib/kubelet/plugins_registry",
        value_parser = value::absolute_path
    )]
    kubelet_registrar_directory_path: PathBuf,

    /// Where the DRA socket and the checkpoint are kept, in a directory of the driver's name
    #[arg(
        long,
        value_name = "DIRECTORY",
        env = "DRAYMAN_KUBELET_PLUGINS_DIRECTORY_PATH",
        hide_env_values = true,
        default_value = "/var/lib/kubelet/plugins",
        value_parser = value::absolute_path
    )]
    kubelet_plugins_directory_path: PathBuf,

    /// Where kubelet's socket for device plugins is; it does not move with kubelet's root directory
    #[arg(
        long,
        value_name = "DIRECTORY",
        env = "DRAYMAN_KUBELET_DEVICE_PLUGINS_DIRECTORY_PATH",
        hide_env_values = true,
        default_value = "/var/lib/kubelet/device-plugins",
        value_parser = value::absolute_path
    )]
    kubelet_device_plugins_directory_path: PathBuf,

    /// Where CDI files are written; one of the directories that the container runtime reads (cdi_spec_dirs)
    #[arg(
        long,
        value_name = "DIRECTORY",
        env = "DRAYMAN_CDI_ROOT",
        hide_env_values = true,
        default_value = "/var/run/cdi",
        value_parser = value::absolute_path
    )]
    cdi_root: PathBuf,
}

/// Runs until a signal asks for the end.
pub(super) fn run(arguments: Arguments) -> Result<(), Error> {
    super::choose_tls_provider();
    // One thread: the companion waits nearly always, and each thread would cost memory on every node.
    super::block_on(async {
        // First of all, so that no signal finds the program without an answer.
        let shutdown = shutdown::on_signal()?;
        let Arguments {
            cluster,
            node,
            directories,
            logging,
        } = arguments;
        let configuration = client::configuration(cluster.kubeconfig.as_deref()).await?;
        logging::start(logging)?;
        tracing::info!(
            version = env!("CARGO_PKG_VERSION"),
            driver_name = cluster.driver_name,
            node_name = node.node_name,
            config = %node.config.display(),
            kubeconfig = cluster.kubeconfig.as_ref().map(tracing::field::debug),
            server = %configuration.cluster_url,
            kubelet_registrar_directory_path = %directories.kubelet_registrar_directory_path.display(),
            kubelet_plugins_directory_path = %directories.kubelet_plugins_directory_path.display(),
            kubelet_device_plugins_directory_path = %directories.kubelet_device_plugins_directory_path.display(),
            cdi_root = %directories.cdi_root.display(),
            logging_format = ?logging.logging_format,
            v = logging.verbosity,
            "drayman node starts"
        );
        let client = client::build(configuration, "node")?;
        shutdown.cancelled().await;
        drop(client);
        tracing::info!("drayman node has ended");
        Ok(())
    })
}
