//! `drayman node`: runs the node companion from flags and a device configuration.

mod records;

pub(super) use self::records::{HoldingList, Released};

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::builder::PossibleValue;

use crate::node::config::NodeConfiguration;
use crate::node::kubelet::KubeletApiError;
use crate::node::kubelet::device_plugin::PluginRegistration;
use crate::node::kubelet::transport::SocketError;
use crate::node::publish::inventory::RegistrationStatus;
use crate::node::run::{NodeError, NodeOptions};

use super::error::Error;
use super::logging::LoggingFlags;
use super::observe::{ObserveFlags, Observer};
use super::runtime::{block_on, choose_tls_provider, shutdown_on_signal};
use super::{client, discover, flags, logging, value};

/// Run the node companion, which publishes this node's devices and injects them into containers
///
/// Run one per node, as root. It discovers the devices of the configuration, publishes them as ResourceSlices (classic mode: a
/// NodeInventory), and serves kubelet's DRA and device plugin APIs.
#[derive(Clone, Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(super) struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,

    #[command(flatten)]
    cluster: flags::ClusterFlags,

    #[command(flatten)]
    node: NodeFlags,

    #[command(flatten)]
    directories: Directories,

    #[command(flatten)]
    host: discover::HostFlags,

    #[command(flatten)]
    observe: ObserveFlags,

    #[command(flatten)]
    logging: LoggingFlags,
}

/// Other commands for the node.
#[derive(Clone, Debug, clap::Subcommand)]
enum Command {
    Discover(discover::Arguments),
    Holdings(records::HoldingsArguments),
    Release(records::ReleaseArguments),
}

#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Node")]
struct NodeFlags {
    /// Name of this machine's Node object. In a pod, set NODE_NAME from the field spec.nodeName.
    #[arg(long, value_name = "NAME", env = "NODE_NAME", required = true, value_parser = value::node_name)]
    node_name: Option<String>,

    /// YAML file with the kinds of devices (docs/operator/devices.md).
    #[arg(long, value_name = "FILE", env = "DRAYMAN_CONFIG", required = true)]
    config: Option<PathBuf>,

    /// Time that a prepared claim may be missing from kubelet's list. After that, it is freed if the API server does not have
    /// it either, and quarantined otherwise
    #[arg(
        long,
        value_name = "DURATION",
        env = "DRAYMAN_ORPHAN_GRACE_PERIOD",
        default_value = "2m",
        value_parser = value::time_limit
    )]
    orphan_grace_period: Duration,
}

/// Directories and sockets of kubelet and the container runtime.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Directories")]
struct Directories {
    #[command(flatten)]
    roots: flags::RootFlags,

    #[command(flatten)]
    sockets: flags::SocketFlags,

    /// Registration of extended resources: by a call to kubelet's socket, or by its plugin watcher (plugins_registry)
    #[arg(
        long,
        value_name = "HOW",
        env = "DRAYMAN_DEVICE_PLUGIN_REGISTRATION",
        default_value = "kubelet-socket"
    )]
    device_plugin_registration: PluginRegistration,
}

impl clap::ValueEnum for PluginRegistration {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::KubeletSocket, Self::PluginWatcher]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let (name, help) = match self {
            Self::KubeletSocket => ("kubelet-socket", "Call kubelet.sock"),
            Self::PluginWatcher => ("plugin-watcher", "Create a socket for kubelet's plugin watcher"),
        };
        Some(PossibleValue::new(name).help(help))
    }
}

/// Runs until a signal requests shutdown.
pub(super) fn run(arguments: Arguments) -> Result<ExitCode, Error> {
    let Arguments {
        command,
        cluster,
        node,
        directories,
        host,
        observe,
        logging,
    } = arguments;
    match command {
        Some(Command::Discover(arguments)) => return discover::run(arguments),
        Some(Command::Holdings(arguments)) => {
            return records::holdings(&arguments).map_err(Error::unanswered);
        }
        Some(Command::Release(arguments)) => return records::release(&arguments).map_err(Error::unanswered),
        None => {}
    }
    // clap requires both flags unless there is a subcommand; this check satisfies the types.
    let (Some(node_name), Some(config)) = (node.node_name, node.config) else {
        return Err(Error::Configuration(
            "--node-name and --config are required".to_owned(),
        ));
    };
    choose_tls_provider();
    // One thread: the companion is mostly idle, and each thread costs memory on every node.
    block_on(async {
        // First, so that every signal is handled.
        let shutdown = shutdown_on_signal()?;
        // The companion reads the file itself; this check only reports errors early.
        NodeConfiguration::read(&config)
            .map_err(NodeError::from)
            .map_err(refused)?;
        let configuration = client::configuration(cluster.kubeconfig.as_deref()).await?;
        logging::start(logging)?;
        tracing::info!(
            version = env!("CARGO_PKG_VERSION"),
            driver_name = cluster.driver.name,
            node_name,
            config = %config.display(),
            kubeconfig = cluster.kubeconfig.as_ref().map(tracing::field::debug),
            server = %configuration.cluster_url,
            kubelet_root_dir = %directories.roots.kubelet_root_dir.display(),
            device_plugin_dir = %directories.sockets.device_plugin_dir.display(),
            device_plugin_registration = ?directories.device_plugin_registration,
            cdi_root = %directories.roots.cdi_root.display(),
            container_runtime_socket = directories.sockets.container_runtime_socket.as_ref().map(tracing::field::debug),
            dev_root = %host.dev_root.display(),
            sysfs_root = %host.sysfs_root.display(),
            orphan_grace_period = ?node.orphan_grace_period,
            mountinfo = %host.mountinfo.display(),
            metrics_bind_address = %observe.metrics_bind_address,
            health_probe_bind_address = %observe.health_probe_bind_address,
            metrics_cert_dir = observe.metrics_cert_dir.as_ref().map(tracing::field::debug),
            logging_format = ?logging.logging_format,
            v = logging.verbosity,
            "drayman node starts"
        );
        let (metrics, registration) = (
            Arc::default(),
            tokio::sync::watch::Sender::new(RegistrationStatus::starting()),
        );
        let observer = Observer::of_node(Arc::clone(&metrics), registration.subscribe());
        let client = client::build_counted(configuration, "node", &observer.requests())?;
        let of_metrics = client.clone();
        let options = NodeOptions {
            driver_name: cluster.driver.name,
            kubelet_root: directories.roots.kubelet_root_dir,
            device_plugin_dir: directories.sockets.device_plugin_dir,
            plugin_registration: directories.device_plugin_registration,
            cdi_dir: directories.roots.cdi_root,
            host: host.paths(),
            orphan_grace: node.orphan_grace_period,
            runtime_socket: directories.sockets.container_runtime_socket,
            registration_status: registration.clone(),
            metrics,
            ..NodeOptions::new(node_name, config, client)
        };
        let registration = registration.subscribe();
        let ready = Arc::new(move || {
            let registration = registration.borrow();
            let why = || format!("{}: {}", registration.reason, registration.message);
            registration.ready.then_some(()).ok_or_else(why)
        });
        observer.serve(observe, ready, of_metrics, &shutdown).await?;
        crate::node::run::run(options, shutdown).await.map_err(refused)?;
        tracing::info!("drayman node has ended");
        Ok(ExitCode::SUCCESS)
    })
}

/// Classifies start errors. Invalid flags and files stay invalid after a restart. All other errors, such as a held
/// lock, may be temporary.
fn refused(error: NodeError) -> Error {
    match error {
        NodeError::DriverName(_)
        | NodeError::Config(_)
        | NodeError::KubeletApi(KubeletApiError::Socket(
            SocketError::PathTooLong { .. } | SocketError::NotAbsolute { .. },
        )) => Error::Configuration(error.to_string()),
        NodeError::Store(_)
        | NodeError::KubeletApi(_)
        | NodeError::BootId(_)
        | NodeError::CutOff(_)
        | NodeError::Broken(_) => Error::Runtime(error.into()),
    }
}
