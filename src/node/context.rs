//! Shared context of the tasks that call the API server.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::core::names::DriverName;
use crate::node::metrics::Metrics;
use crate::node::rate_limit::RateLimit;

/// Events of one reason that a node writes at once, and the interval of further ones: client-go's limits for the Events about an object. A
/// device with a loose contact changes each second.
const EVENT_BURST: u32 = 25;
const EVENT_INTERVAL: Duration = Duration::from_secs(300);

/// A client of the API server, and the identity of this companion there.
#[derive(Clone)]
pub struct NodeContext {
    /// API server client.
    pub client: kube::Client,
    /// The driver name.
    pub driver_name: DriverName,
    /// Name of the Node object.
    pub node_name: String,
    /// Counts slices, writes and events.
    pub metrics: Arc<Metrics>,
    /// Limits the Events of each reason.
    pub events: EventLimit,
}

/// The limit of a node's Events of each reason.
#[derive(Clone, Debug, Default)]
pub struct EventLimit(Arc<Mutex<BTreeMap<&'static str, RateLimit>>>);

impl EventLimit {
    /// Whether an Event of this reason may be written now. If so, it counts.
    pub(in crate::node) fn take(&self, reason: &'static str) -> bool {
        let mut limits = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let limit = limits
            .entry(reason)
            .or_insert_with(|| RateLimit::new(EVENT_BURST, EVENT_INTERVAL));
        let is_due = limit.due() <= Instant::now();
        if is_due {
            limit.take();
        }
        is_due
    }
}

impl fmt::Debug for NodeContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeContext")
            .field("driver_name", &self.driver_name)
            .field("node_name", &self.node_name)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
impl NodeContext {
    /// The driver `drayman.dev` on node `node-a`.
    pub(in crate::node) fn for_tests(client: kube::Client) -> Self {
        Self {
            client,
            driver_name: DriverName::parse("drayman.dev").unwrap(),
            node_name: "node-a".into(),
            metrics: Arc::default(),
            events: EventLimit::default(),
        }
    }
}
