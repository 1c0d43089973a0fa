//! A driver that answers from memory, to measure the library, the scheduler and the API server.

use drayman::api::resource::{AllocationResult, Pod, ResourceClaim, ResourceClass};
use drayman::controller::Controller;
use drayman::driver::{ClaimRequest, Deallocation, Driver, Result, UnsuitableNodes};
use kube::config::{Config, KubeConfigOptions, Kubeconfig};
use tokio_util::sync::CancellationToken;

/// The argument that runs this program as the driver's controller.
pub(crate) const COMMAND: &str = "memory-driver";
pub(crate) const DRIVER: &str = "memory.example.com";

/// A driver with unlimited devices on all nodes.
struct MemoryDriver;

impl Driver for MemoryDriver {
    type ClassParameters = ();
    type ClaimParameters = ();

    fn name(&self) -> &'static str {
        DRIVER
    }

    async fn class_parameters(&self, _: &ResourceClass) -> Result<()> {
        Ok(())
    }

    async fn claim_parameters(&self, _: &ResourceClaim, _: &ResourceClass, (): &()) -> Result<()> {
        Ok(())
    }

    async fn unsuitable_nodes(
        &self,
        _: &Pod,
        claims: &[ClaimRequest<Self>],
        _: &[String],
    ) -> Result<Vec<UnsuitableNodes>> {
        Ok(vec![UnsuitableNodes::new(); claims.len()])
    }

    async fn allocate(
        &self,
        claims: &[ClaimRequest<Self>],
        _: Option<&str>,
    ) -> Result<Vec<AllocationResult>> {
        Ok(vec![AllocationResult::default(); claims.len()])
    }

    async fn deallocate(&self, _: Deallocation<'_>) -> Result<()> {
        Ok(())
    }
}

/// Runs the controller until SIGTERM, with one thread as `drayman controller`.
pub(crate) fn run(kubeconfig: &str) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        // No other provider is installed in this process.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let file = Kubeconfig::read_from(kubeconfig)?;
        let mut config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?;
        config.default_retry = false;
        let shutdown = CancellationToken::new();
        let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
        let ended = shutdown.clone();
        tokio::spawn(async move {
            terminate.recv().await;
            ended.cancel();
        });
        let controller = Controller::builder(MemoryDriver).build(kube::Client::try_from(config)?)?;
        controller.run(shutdown).await?;
        Ok(())
    })
}
