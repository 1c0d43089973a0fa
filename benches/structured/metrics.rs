//! Durations in the metrics of kubelet and companion.

use std::time::Duration;

use http::Request;

use crate::setup::Setup;

/// Histogram of the driver's gRPC calls by method, without kubelet's own part.
pub(crate) const CALL: &str = "dra_grpc_operations_duration_seconds";
/// Histogram of kubelet's operations for all claims of a pod, including the calls.
pub(crate) const OPERATION: &str = "dra_operations_duration_seconds";

/// Count and sum of a histogram.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Durations {
    pub(crate) count: u32,
    pub(crate) sum: Duration,
}

impl Durations {
    pub(crate) fn since(self, earlier: Self) -> Self {
        Self {
            count: self.count - earlier.count,
            sum: self.sum.saturating_sub(earlier.sum),
        }
    }

    pub(crate) fn mean(self) -> Duration {
        self.sum / self.count.max(1)
    }
}

/// The text of a metrics page.
#[derive(Debug)]
pub(crate) struct Metrics(pub(crate) String);

impl Metrics {
    /// Metrics of the first node's kubelet.
    pub(crate) async fn of_kubelet(setup: &Setup) -> anyhow::Result<Self> {
        let path = format!("/api/v1/nodes/{}/proxy/metrics", setup.cluster.node(0).name());
        let request = Request::get(path).body(Vec::new())?;
        Ok(Self(setup.cluster.client().request_text(request).await?))
    }

    /// Metrics of a companion at this address.
    pub(crate) async fn of_companion(address: &str) -> anyhow::Result<Self> {
        let server = kube::Config::new(format!("http://{address}").parse()?);
        let client = kube::Client::try_from(server)?;
        let request = Request::get("/metrics").body(Vec::new())?;
        Ok(Self(client.request_text(request).await?))
    }

    /// Count and sum of a histogram over all series with this text in their labels.
    pub(crate) fn durations(&self, histogram: &str, label: &str) -> Durations {
        let total = |part: &str| -> f64 {
            let series = format!("{histogram}_{part}{{");
            let lines = self
                .0
                .lines()
                .filter(|line| line.starts_with(&series) && line.contains(label));
            let values = lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
            values.sum()
        };
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "Prometheus counts in floating point"
        )]
        let count = total("count") as u32;
        Durations {
            count,
            sum: Duration::from_secs_f64(total("sum")),
        }
    }
}
