//! `drayman controller`: runs a controller with the built-in driver.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::error::Error;
use super::logging::LoggingFlags;
use super::observe::{ObserveFlags, Observer};
use super::runtime::{block_on, choose_tls_provider, shutdown_on_signal};
use super::{client, flags, logging, value};
use crate::controller::{
    Controller, ControllerError, LeaderElection, LeaseConnection, Metrics, PredecessorsError,
};
use crate::host::HostDriver;

/// Run the controller, which allocates ResourceClaims
///
/// Watches ResourceClaims, ResourceClasses and PodSchedulingContexts of resource.k8s.io/v1alpha2 and serves the classes
/// with its driver name. Several controllers of one driver name require --leader-elect; one of them leads.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    cluster: flags::ClusterFlags,

    #[command(flatten)]
    driver: DriverFlags,

    #[command(flatten)]
    leader: LeaderElectionFlags,

    #[command(flatten)]
    observe: ObserveFlags,

    #[command(flatten)]
    logging: LoggingFlags,
}

#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Driver")]
struct DriverFlags {
    /// Timeout of one driver call, from 100ms to 10m. A call that times out is retried
    #[arg(
        long,
        value_name = "DURATION",
        env = "DRAYMAN_DRIVER_CALL_TIMEOUT",
        default_value = "30s",
        value_parser = value::time_limit
    )]
    driver_call_timeout: Duration,
}

/// Leader election flags with the names and defaults of Kubernetes components.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Leader election")]
#[expect(
    clippy::struct_field_names,
    reason = "the flags are named after the fields, and begin as those of Kubernetes do"
)]
struct LeaderElectionFlags {
    /// Lead only while holding a Lease. Required for more than one controller
    #[arg(long, env = "DRAYMAN_LEADER_ELECT")]
    leader_elect: bool,

    /// Time until another replica takes an unrenewed lease: at least the renew deadline plus 5s, the limit for a request of
    /// the old leader
    #[arg(
        long,
        value_name = "DURATION",
        env = "DRAYMAN_LEADER_ELECT_LEASE_DURATION",
        default_value = "15s",
        value_parser = value::time_limit
    )]
    leader_elect_lease_duration: Duration,

    /// Time that the leader continues without a renewal
    #[arg(
        long,
        value_name = "DURATION",
        env = "DRAYMAN_LEADER_ELECT_RENEW_DEADLINE",
        default_value = "10s",
        value_parser = value::time_limit
    )]
    leader_elect_renew_deadline: Duration,

    /// Interval of attempts to take or renew the lease
    #[arg(
        long,
        value_name = "DURATION",
        env = "DRAYMAN_LEADER_ELECT_RETRY_PERIOD",
        default_value = "2s",
        value_parser = value::time_limit
    )]
    leader_elect_retry_period: Duration,

    /// Namespace of the Lease
    #[arg(
        long,
        value_name = "NAMESPACE",
        env = "DRAYMAN_LEADER_ELECT_RESOURCE_NAMESPACE",
        default_value = "kube-system",
        value_parser = value::namespace
    )]
    leader_elect_resource_namespace: String,

    /// Directory with the identities of earlier processes of this controller; a restarted process takes over their lease and
    /// waits only 5s. It must outlive the process (for example an emptyDir), be on a local disk, and be used by one
    /// controller at a time, which a lock ensures. Without it, the lease of an earlier process must expire.
    #[arg(long, value_name = "DIRECTORY", env = "DRAYMAN_LEADER_ELECT_STATE_DIR")]
    leader_elect_state_dir: Option<PathBuf>,
}

impl LeaderElectionFlags {
    /// Returns the leader election, unless disabled. The lease has the driver's name.
    fn election(
        &self,
        driver_name: &str,
        instance: Option<&str>,
        connection: LeaseConnection,
    ) -> Result<Option<LeaderElection>, Error> {
        if !self.leader_elect {
            return Ok(None);
        }
        let instance = instance.unwrap_or("drayman");
        let election = LeaderElection {
            lease_duration: self.leader_elect_lease_duration,
            renew_deadline: self.leader_elect_renew_deadline,
            retry_period: self.leader_elect_retry_period,
            connection: Some(connection),
            ..LeaderElection::new(&self.leader_elect_resource_namespace, driver_name, instance)
        };
        let Some(directory) = &self.leader_elect_state_dir else {
            return Ok(Some(election));
        };
        let election = election.following(directory).map_err(|error| match error {
            // Another process holds the lock and may release it, so a restart can help.
            PredecessorsError::Locked(_) => {
                Error::Runtime(anyhow::anyhow!("--leader-elect-state-dir: {error}"))
            }
            PredecessorsError::Io { .. } => {
                Error::Configuration(format!("--leader-elect-state-dir: {error}"))
            }
        })?;
        Ok(Some(election))
    }
}

/// Runs until a signal requests shutdown.
pub(super) fn run(arguments: &Arguments) -> Result<(), Error> {
    choose_tls_provider();
    // One thread: a single task makes all decisions; everything else waits for the API server.
    block_on(async {
        // First, so that every signal is handled.
        let shutdown = shutdown_on_signal()?;
        let Arguments {
            cluster,
            driver,
            leader,
            observe,
            logging,
        } = arguments;
        let configuration = client::configuration(cluster.kubeconfig.as_deref()).await?;
        logging::start(*logging)?;
        tracing::info!(
            version = env!("CARGO_PKG_VERSION"),
            driver_name = cluster.driver.name,
            kubeconfig = cluster.kubeconfig.as_ref().map(tracing::field::debug),
            server = %configuration.cluster_url,
            driver_call_timeout = ?driver.driver_call_timeout,
            leader_elect = leader.leader_elect,
            leader_elect_lease_duration = ?leader.leader_elect_lease_duration,
            leader_elect_renew_deadline = ?leader.leader_elect_renew_deadline,
            leader_elect_retry_period = ?leader.leader_elect_retry_period,
            leader_elect_resource_namespace = leader.leader_elect_resource_namespace,
            leader_elect_state_dir = leader.leader_elect_state_dir.as_ref().map(tracing::field::debug),
            metrics_bind_address = %observe.metrics_bind_address,
            health_probe_bind_address = %observe.health_probe_bind_address,
            metrics_cert_dir = observe.metrics_cert_dir.as_ref().map(tracing::field::debug),
            logging_format = ?logging.logging_format,
            v = logging.verbosity,
            "drayman controller starts"
        );
        let (leading, leads) = watch::channel(false);
        let (metrics, counted) = watch::channel(Metrics::default());
        let observer = Observer::of_controller(cluster.driver.name.clone(), counted.clone(), leads);
        let requests = observer.requests();
        let client = client::build_counted(configuration.clone(), "controller", &requests)?;
        let of_lease = requests.clone();
        let connection = LeaseConnection::new(move || {
            client::build_counted(configuration.clone(), "controller", &of_lease)
        });
        let ready = Arc::new(move || {
            if !requests.granted() {
                return Err("the API server has granted no request yet".to_owned());
            }
            match &counted.borrow().not_ready {
                Some(error) => Err(format!("the driver is not ready: {error}")),
                None => Ok(()),
            }
        });
        observer
            .serve(observe.clone(), ready, client.clone(), &shutdown)
            .await?;
        serve(
            client,
            cluster.driver.name.clone(),
            driver.driver_call_timeout,
            (leader, connection),
            (leading, metrics),
            shutdown,
        )
        .await?;
        tracing::info!("drayman controller has ended");
        Ok(())
    })
}

async fn serve(
    client: Client,
    driver_name: String,
    call_timeout: Duration,
    (leader, connection): (&LeaderElectionFlags, LeaseConnection),
    (leading, metrics): (watch::Sender<bool>, watch::Sender<Metrics>),
    shutdown: CancellationToken,
) -> Result<(), Error> {
    let driver = HostDriver::start(client.clone(), driver_name.clone(), shutdown.clone());
    // In a pod, this is the pod's name. It distinguishes replicas in events.
    let instance = std::env::var("HOSTNAME").ok().filter(|name| !name.is_empty());
    let election = leader.election(&driver_name, instance.as_deref(), connection)?;
    let controller = Controller::builder(driver)
        .call_timeout(call_timeout)
        .leader_election(election)
        .instance(instance)
        .leading(leading)
        .metrics(metrics)
        .build(client)
        .map_err(refused)?;
    controller.run(shutdown).await.map_err(refused)
}

/// Classifies start errors. A name that the API server rejects stays invalid until the user changes it. All other
/// errors may be temporary: the API server does not respond or does not serve the API yet.
fn refused(error: ControllerError) -> Error {
    match error {
        ControllerError::DriverName(_) | ControllerError::LeaderElection(_) => {
            Error::Configuration(error.to_string())
        }
        ControllerError::NotServed
        | ControllerError::Unreachable(_)
        | ControllerError::Silent(_)
        | ControllerError::LeaseThread(_)
        | ControllerError::LeaseConnection(_)
        | ControllerError::LeaseLost
        | ControllerError::Observe(_) => Error::Runtime(error.into()),
    }
}
