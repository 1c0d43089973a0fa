//! `drayman controller`: flags -> a controller of the built-in driver.

use std::time::Duration;

use kube::Client;
use tokio_util::sync::CancellationToken;

use super::{Error, client, group, logging, shutdown, value};
use crate::controller::{Controller, ControllerError};
use crate::host::HostDriver;

/// Run the controller, which allocates ResourceClaims
///
/// One per cluster and driver name. It watches ResourceClaims, ResourceClasses and PodSchedulingContexts of
/// resource.k8s.io/v1alpha2 and serves the classes whose driverName is its own.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    cluster: group::Cluster,

    #[command(flatten)]
    driver: Driver,

    #[command(flatten)]
    logging: group::Logging,
}

#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Driver")]
struct Driver {
    /// Longest time that one call of the driver may take, from 100ms to 10m. A call that takes longer counts as failed
    /// and is tried again.
    #[arg(
        long,
        value_name = "DURATION",
        env = "DRAYMAN_DRIVER_CALL_TIMEOUT",
        hide_env_values = true,
        default_value = "30s",
        value_parser = value::time_limit
    )]
    driver_call_timeout: Duration,
}

/// Runs until a signal asks for the end.
pub(super) fn run(arguments: &Arguments) -> Result<(), Error> {
    super::choose_tls_provider();
    // One thread: decisions are made by one task, and what remains is waiting for the API server.
    super::block_on(async {
        // First of all, so that no signal finds the program without an answer.
        let shutdown = shutdown::on_signal()?;
        let Arguments {
            cluster,
            driver,
            logging,
        } = arguments;
        let configuration = client::configuration(cluster.kubeconfig.as_deref()).await?;
        logging::start(*logging)?;
        tracing::info!(
            version = env!("CARGO_PKG_VERSION"),
            driver_name = cluster.driver_name,
            kubeconfig = cluster.kubeconfig.as_ref().map(tracing::field::debug),
            server = %configuration.cluster_url,
            driver_call_timeout = ?driver.driver_call_timeout,
            logging_format = ?logging.logging_format,
            v = logging.verbosity,
            "drayman controller starts"
        );
        let client = client::build(configuration, "controller")?;
        serve(
            client,
            cluster.driver_name.clone(),
            driver.driver_call_timeout,
            shutdown,
        )
        .await?;
        tracing::info!("drayman controller has ended");
        Ok(())
    })
}

/// Runs a controller of the built-in driver.
async fn serve(
    client: Client,
    driver_name: String,
    call_timeout: Duration,
    shutdown: CancellationToken,
) -> Result<(), Error> {
    let driver = HostDriver::start(client.clone(), driver_name, shutdown.clone());
    // In a pod, the name of the pod; it tells replicas apart in the events that they write.
    let instance = std::env::var("HOSTNAME").ok().filter(|name| !name.is_empty());
    let controller = Controller::builder(driver)
        .call_timeout(call_timeout)
        .instance(instance)
        .build(client)
        .map_err(refused)?;
    controller.run(shutdown).await.map_err(refused)
}

/// A name that the API server refuses stays wrong until somebody changes it. All else may be cured by time: an API server
/// that does not answer, and one that does not serve the API yet.
fn refused(error: ControllerError) -> Error {
    match error {
        ControllerError::DriverName(_) => Error::Configuration(error.to_string()),
        ControllerError::NotServed | ControllerError::Unreachable(_) | ControllerError::Silent(_) => {
            Error::Runtime(error.into())
        }
    }
}
