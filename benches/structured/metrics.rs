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

    /// Upper bound and cumulative count of each bucket of a histogram, over all series with this text in their labels.
    fn buckets(&self, histogram: &str, label: &str) -> Vec<(String, u64)> {
        let series = format!("{histogram}_bucket{{");
        let lines = self
            .0
            .lines()
            .filter(|line| line.starts_with(&series) && line.contains(label));
        let mut buckets: Vec<(String, u64)> = Vec::new();
        for line in lines {
            let bound = line.split("le=\"").nth(1).and_then(|rest| rest.split('"').next());
            let count = line.rsplit(' ').next().and_then(|count| count.parse().ok());
            let (Some(bound), Some(count)) = (bound, count) else {
                continue;
            };
            match buckets.iter_mut().find(|(known, _)| known == bound) {
                Some((_, sum)) => *sum += count,
                None => buckets.push((bound.to_owned(), count)),
            }
        }
        buckets
    }

    /// The bucket bound at this percentile of the calls since `earlier`, in seconds with two decimal places.
    pub(crate) fn quantile_since(
        &self,
        earlier: &Self,
        histogram: &str,
        label: &str,
        percent: u64,
    ) -> Option<String> {
        let before = earlier.buckets(histogram, label);
        let counts: Vec<(String, u64)> = self
            .buckets(histogram, label)
            .into_iter()
            .map(|(bound, count)| {
                let had = before.iter().find(|(known, _)| *known == bound);
                let count = count - had.map_or(0, |(_, count)| *count);
                (bound, count)
            })
            .collect();
        let all = counts.last()?.1;
        let rank = (all * percent).div_ceil(100);
        let bucket = counts.into_iter().find(|(_, count)| *count >= rank);
        let bound: f64 = bucket?.0.parse().ok()?;
        Some(format!("{bound:.2}"))
    }
}
