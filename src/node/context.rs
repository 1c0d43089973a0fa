//! Shared context of the tasks that call the API server.

use std::fmt;
use std::sync::Arc;

use crate::core::names::DriverName;
use crate::node::metrics::Metrics;

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
        }
    }
}
