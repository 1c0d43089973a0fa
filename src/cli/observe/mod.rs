//! Metrics and probes of a running component.
//!
//! Both are off unless an address is given. The server runs on the component's own thread, so a component that hangs
//! fails its liveness probe.

mod controller;
mod encode;
mod node;
mod process;
#[cfg_attr(
    not(test),
    expect(
        dead_code,
        reason = "only docs/reference/metrics.md has these fields; it is generated from them"
    )
)]
mod reasons;
mod requests;
mod server;
#[cfg_attr(
    not(test),
    expect(
        dead_code,
        reason = "only docs/reference/metrics.md has these fields; it is generated from them"
    )
)]
mod table;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::registry::Registry;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

pub(super) use requests::Requests;
pub(super) use server::{ObserveFlags, Readiness};

use super::error::Error;
use crate::node::publish::inventory::RegistrationStatus;

/// A component's metrics and request counts.
#[derive(Debug)]
pub(super) struct Observer {
    registry: Registry,
    requests: Requests,
}

/// Build information.
#[derive(Debug)]
struct Program {
    component: &'static str,
}

impl Collector for Program {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let labels = [self.component, env!("CARGO_PKG_VERSION"), std::env::consts::ARCH];
        encode::series(&mut encoder, &table::BUILD, |values| values.gauge(&labels, 1.0))
    }
}

impl Observer {
    /// Creates the observer of a controller, which reads statistics at each scrape.
    pub(super) fn of_controller(
        driver_name: String,
        metrics: watch::Receiver<crate::controller::Metrics>,
        leads: watch::Receiver<bool>,
    ) -> Self {
        let mut observer = Self::new("controller");
        let metrics = controller::ControllerMetrics {
            driver_name,
            metrics,
            leads,
        };
        observer.registry.register_collector(Box::new(metrics));
        observer
    }

    /// Creates the observer of a companion, which reads statistics at each scrape.
    pub(super) fn of_node(
        metrics: Arc<crate::node::metrics::Metrics>,
        registration_status: watch::Receiver<RegistrationStatus>,
    ) -> Self {
        let mut observer = Self::new("node");
        let metrics = node::NodeMetrics {
            metrics,
            registration_status,
        };
        observer.registry.register_collector(Box::new(metrics));
        observer
    }

    fn new(component: &'static str) -> Self {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(Program { component }));
        registry.register_collector(Box::new(process::ProcessMetrics::of_this_one()));
        let requests = Requests::register(&mut registry);
        Self { registry, requests }
    }

    /// Returns the client layer that counts requests.
    pub(super) fn requests(&self) -> Requests {
        self.requests.clone()
    }

    /// Serves the configured addresses until the token is cancelled. Returns as soon as the addresses are bound. Metrics over
    /// HTTPS are served to accounts that may read them, which `client` asks the API server.
    pub(super) async fn serve(
        self,
        flags: ObserveFlags,
        ready: Readiness,
        client: kube::Client,
        shutdown: &CancellationToken,
    ) -> Result<(), Error> {
        server::serve(Arc::new(self.registry), flags, ready, client, shutdown).await
    }
}
