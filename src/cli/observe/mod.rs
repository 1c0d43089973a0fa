//! Metrics and probes of a running component.
//!
//! Both are off unless an address is given. The server runs on the component's own thread, so a component that hangs
//! fails its liveness probe.

mod controller;
mod node;
#[cfg(test)]
mod page;
mod process;
#[cfg_attr(
    not(test),
    expect(
        dead_code,
        reason = "what only docs/reference/metrics.md has, which is made from it"
    )
)]
mod reasons;
mod requests;
mod server;
#[cfg_attr(
    not(test),
    expect(
        dead_code,
        reason = "what only docs/reference/metrics.md has, which is made from it"
    )
)]
mod table;
mod write;

use std::net::{Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::registry::Registry;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

pub(super) use requests::Requests;

use super::Error;
use crate::node::publish::inventory::RegistrationStatus;

/// Where metrics and probes are served.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Observability")]
pub(super) struct Flags {
    /// Address of /metrics: an IP address and port, or ":8080" for all addresses; 0 disables it
    #[arg(
        long,
        value_name = "ADDRESS",
        env = "DRAYMAN_METRICS_BIND_ADDRESS",
        hide_env_values = true,
        default_value = "0",
        value_parser = bind_address
    )]
    pub(super) metrics_bind_address: Bind,

    /// Address of /livez, /readyz and /healthz: an IP address and port, or ":8081" for all addresses; 0 disables them
    #[arg(
        long,
        value_name = "ADDRESS",
        env = "DRAYMAN_HEALTH_PROBE_BIND_ADDRESS",
        hide_env_values = true,
        default_value = "0",
        value_parser = bind_address
    )]
    pub(super) health_probe_bind_address: Bind,

    /// Directory with tls.crt and tls.key. Serves /metrics over HTTPS, to bearer tokens whose account may get the path /metrics
    /// (TokenReview and SubjectAccessReview)
    #[arg(
        long,
        value_name = "DIRECTORY",
        env = "DRAYMAN_METRICS_CERT_DIR",
        hide_env_values = true
    )]
    pub(super) metrics_cert_dir: Option<PathBuf>,
}

/// Listen address, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bind {
    Nowhere,
    At(SocketAddr),
}

impl std::fmt::Display for Bind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Nowhere => f.write_str("0"),
            Self::At(address) => address.fmt(f),
        }
    }
}

/// Parses an address in Kubernetes syntax: `0`, `:8080`, `127.0.0.1:8080`, `[::1]:8080`.
fn bind_address(text: &str) -> Result<Bind, String> {
    if text == "0" {
        return Ok(Bind::Nowhere);
    }
    let wrong =
        || "must be 0, or a port with or without an address, such as :8080 or 127.0.0.1:8080".to_owned();
    let address = match text.strip_prefix(':') {
        // IPv4 and IPv6, as far as the machine supports them.
        Some(port) => SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port.parse().map_err(|_| wrong())?),
        None => text.parse().map_err(|_| wrong())?,
    };
    if address.port() == 0 {
        return Err(wrong());
    }
    Ok(Bind::At(address))
}

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
        write::series(&mut encoder, &table::BUILD, |values| values.gauge(&labels, 1.0))
    }
}

/// Returns whether a component is ready, or why not.
pub(super) type Readiness = Arc<dyn Fn() -> Result<(), String> + Send + Sync>;

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
        registry.register_collector(Box::new(process::Process::of_this_one()));
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
        flags: Flags,
        ready: Readiness,
        client: kube::Client,
        shutdown: &CancellationToken,
    ) -> Result<(), Error> {
        server::serve(Arc::new(self.registry), flags, ready, client, shutdown).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_written_as_for_the_components_of_kubernetes() {
        assert_eq!(bind_address("0"), Ok(Bind::Nowhere));
        assert_eq!(bind_address(":8080"), Ok(Bind::At("[::]:8080".parse().unwrap())));
        assert_eq!(
            bind_address("127.0.0.1:1"),
            Ok(Bind::At("127.0.0.1:1".parse().unwrap()))
        );
        assert_eq!(
            bind_address("[::1]:8080"),
            Ok(Bind::At("[::1]:8080".parse().unwrap()))
        );
        for wrong in [
            "",
            ":",
            "8080",
            ":0",
            "127.0.0.1:0",
            ":65536",
            "localhost:80",
            ":http",
        ] {
            let refusal = bind_address(wrong).expect_err(wrong);
            assert!(refusal.contains(":8080"), "{wrong:?}: {refusal}");
        }
    }
}
