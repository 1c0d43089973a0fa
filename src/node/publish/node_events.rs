//! Events about the Node, for cluster operators. Kubelet writes the event of a pod whose Prepare is refused, with the message of a
//! [`ServiceError`](crate::node::service::ServiceError), mostly a [`Refusal`](crate::core::prepare::plan::Refusal), or in structured mode of a
//! [`ClaimError`](crate::node::kubelet::dra::structured::ClaimError).

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ObjectMeta, PostParams};
use tracing::{info, warn};

use super::calls::call;
use crate::core::discovery::device_events::DeviceEvent;
use crate::core::names::{DriverName, beginning};
use crate::node::metrics::Metrics;

/// Bytes of a note before the ellipsis (`events.k8s.io/v1` allows 1,024 in total).
const NOTE_MAX: usize = 1000;
/// Bytes of the node name in an event name: an object name has 253, of which the timestamp takes 18.
const NAME_MAX: usize = 235;
/// Maximum characters of a reporting instance (`events.k8s.io/v1`).
const INSTANCE_MAX: usize = 128;

/// Namespace of events about cluster-scoped objects, where `kubectl describe node` searches.
pub(in crate::node) const NAMESPACE: &str = "default";

/// Writes events about this node.
pub(super) struct NodeEvents<'a> {
    pub(super) client: &'a kube::Client,
    pub(super) driver_name: &'a DriverName,
    pub(super) node_name: &'a str,
    /// Counts the events.
    pub(super) metrics: &'a Metrics,
}

impl NodeEvents<'_> {
    /// Writes events. A failed write is logged and not retried, since the event itself is in the log.
    pub(super) async fn write(&self, node_uid: Option<&str>, events: &[DeviceEvent]) {
        let api: Api<Event> = Api::namespaced(self.client.clone(), NAMESPACE);
        for event in events {
            info!(reason = event.reason, "{}", event.note);
            self.metrics.event(event.reason);
            let object = NodeEvent {
                driver_name: self.driver_name,
                node_name: self.node_name,
                node_uid: node_uid.map(str::to_owned),
                action: "CheckDevices",
                reason: event.reason,
                warning: event.warning,
                note: &event.note,
            };
            let object = object.at(Timestamp::now());
            if let Err(error) = call(api.create(&PostParams::default(), &object)).await {
                warn!(reason = event.reason, "the event is not written: {error}");
            }
        }
    }
}

/// An event about a node.
pub(in crate::node) struct NodeEvent<'a> {
    pub(in crate::node) driver_name: &'a DriverName,
    pub(in crate::node) node_name: &'a str,
    /// Uid of the Node object, if known.
    pub(in crate::node) node_uid: Option<String>,
    /// The companion's action, in CamelCase.
    pub(in crate::node) action: &'static str,
    /// The reason, in CamelCase.
    pub(in crate::node) reason: &'static str,
    /// Whether the type is `Warning` instead of `Normal`.
    pub(in crate::node) warning: bool,
    /// The message, truncated to the limit of an event.
    pub(in crate::node) note: &'a str,
}

impl NodeEvent<'_> {
    /// The Event object with this timestamp.
    pub(in crate::node) fn at(self, now: Timestamp) -> Event {
        Event {
            metadata: ObjectMeta {
                namespace: Some(NAMESPACE.to_owned()),
                // Named as in client-go. A DNS label must not end with a hyphen or be empty.
                name: Some(format!(
                    "{}.{:x}",
                    beginning(self.node_name, NAME_MAX).trim_end_matches(['-', '.']),
                    now.as_nanosecond()
                )),
                ..ObjectMeta::default()
            },
            action: Some(self.action.to_owned()),
            event_time: Some(MicroTime(now)),
            note: Some(if self.note.len() > NOTE_MAX {
                format!("{}…", beginning(self.note, NOTE_MAX))
            } else {
                self.note.to_owned()
            }),
            reason: Some(self.reason.to_owned()),
            regarding: Some(ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("Node".to_owned()),
                name: Some(self.node_name.to_owned()),
                uid: self.node_uid,
                ..ObjectReference::default()
            }),
            reporting_controller: Some(self.driver_name.to_string()),
            reporting_instance: Some(self.node_name.chars().take(INSTANCE_MAX).collect()),
            type_: Some(if self.warning { "Warning" } else { "Normal" }.to_owned()),
            ..Event::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_about_the_node_and_fits_what_the_server_takes() {
        let (driver_name, note) = (DriverName::parse("drayman.dev").unwrap(), "ü".repeat(800));
        let event_of = |node_name| NodeEvent {
            driver_name: &driver_name,
            node_name,
            node_uid: Some("n-1".into()),
            action: "CheckDevices",
            reason: "DeviceUnhealthy",
            warning: true,
            note: &note,
        };
        let event = event_of("node-a").at(Timestamp::UNIX_EPOCH);
        let note = event.note.unwrap();
        assert!(note.len() <= 1024 && note.ends_with("ü…"), "{}", note.len());
        assert_eq!(event.type_.as_deref(), Some("Warning"));
        let regarding = event.regarding.unwrap();
        assert_eq!(
            (regarding.kind.as_deref(), regarding.uid.as_deref()),
            (Some("Node"), Some("n-1"))
        );
        assert_eq!(event.metadata.namespace.as_deref(), Some("default"));
        let long = "n".repeat(253);
        let event = event_of(&long).at(Timestamp::MAX);
        assert!(event.metadata.name.unwrap().len() <= 253);
        assert_eq!(event.reporting_instance.unwrap().len(), 128);
        assert_eq!(event.regarding.unwrap().name.as_deref(), Some(&*long));
        let hyphen = format!("{}-.{}", "n".repeat(NAME_MAX - 2), "n".repeat(18));
        let name = event_of(&hyphen).at(Timestamp::MAX).metadata.name.unwrap();
        assert!(!name.contains("-.") && !name.contains(".."), "{name}");
    }
}
