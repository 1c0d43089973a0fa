//! Events about the Node, for cluster operators. Kubelet writes the event of a pod whose Prepare is refused, with the message of a
//! [`ServiceError`](crate::node::service::ServiceError), mostly a [`Refusal`](crate::core::prepare::plan::Refusal), or in structured mode of a
//! [`ClaimError`](crate::node::kubelet::dra::structured::ClaimError).

use futures::future::join_all;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ObjectMeta, PostParams};
use tracing::{info, warn};

use super::calls::{PublishError, call};
use crate::core::discovery::device_events::DeviceEvent;
use crate::core::names::{DriverName, beginning};
use crate::node::context::NodeContext;

/// Bytes of a note before the ellipsis (`events.k8s.io/v1` allows 1,024 in total).
const MAX_NOTE_BYTES: usize = 1000;
/// Bytes of the node name in an event name: an object name has 253, of which the timestamp takes 18.
const NAME_MAX: usize = 235;
/// Maximum characters of a reporting instance (`events.k8s.io/v1`).
const INSTANCE_MAX: usize = 128;

/// Namespace of events about cluster-scoped objects, where `kubectl describe node` searches.
const NAMESPACE: &str = "default";

impl NodeContext {
    /// Writes events about the Node, as far as their limit allows, all at the same time: without answers, they take one deadline. A failed
    /// write is logged and not retried, since the event itself is in the log.
    pub(super) async fn write_events(&self, node_uid: Option<&str>, events: &[DeviceEvent]) {
        let mut writes = Vec::new();
        for event in events {
            info!(reason = event.reason, "{}", event.note);
            if !self.events.take(event.reason) {
                continue;
            }
            self.metrics.event(event.reason);
            writes.push(async move {
                if let Err(error) = self.create_event(node_uid, "CheckDevices", event).await {
                    warn!(reason = event.reason, "the event is not written: {error}");
                }
            });
        }
        join_all(writes).await;
    }

    /// Creates an event about the Node, with its uid, if known. `action` is what the companion does, in CamelCase.
    pub(in crate::node) async fn create_event(
        &self,
        node_uid: Option<&str>,
        action: &str,
        event: &DeviceEvent,
    ) -> Result<(), PublishError> {
        let api: Api<Event> = Api::namespaced(self.client.clone(), NAMESPACE);
        let now = Timestamp::now();
        let object = object(&self.driver_name, &self.node_name, node_uid, action, event, now);
        call(api.create(&PostParams::default(), &object)).await?;
        Ok(())
    }
}

/// The Event object with this timestamp. The note is truncated to the limit of an event.
fn object(
    driver_name: &DriverName,
    node_name: &str,
    node_uid: Option<&str>,
    action: &str,
    event: &DeviceEvent,
    now: Timestamp,
) -> Event {
    Event {
        metadata: ObjectMeta {
            namespace: Some(NAMESPACE.to_owned()),
            // Named as in client-go. A DNS label must not end with a hyphen or be empty.
            name: Some(format!(
                "{}.{:x}",
                beginning(node_name, NAME_MAX).trim_end_matches(['-', '.']),
                now.as_nanosecond()
            )),
            ..ObjectMeta::default()
        },
        action: Some(action.to_owned()),
        event_time: Some(MicroTime(now)),
        note: Some(if event.note.len() > MAX_NOTE_BYTES {
            format!("{}…", beginning(&event.note, MAX_NOTE_BYTES))
        } else {
            event.note.clone()
        }),
        reason: Some(event.reason.to_owned()),
        regarding: Some(ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Node".to_owned()),
            name: Some(node_name.to_owned()),
            uid: node_uid.map(str::to_owned),
            ..ObjectReference::default()
        }),
        reporting_controller: Some(driver_name.to_string()),
        reporting_instance: Some(node_name.chars().take(INSTANCE_MAX).collect()),
        type_: Some(if event.warning { "Warning" } else { "Normal" }.to_owned()),
        ..Event::default()
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use kube::client::Body;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_device_that_changes_all_the_time_writes_few_events() {
        let written = Arc::<AtomicUsize>::default();
        let counted = written.clone();
        let serve = move |_: http::Request<Body>| {
            counted.fetch_add(1, Ordering::Relaxed);
            async { Ok::<_, Infallible>(http::Response::new(Body::from(b"{}".to_vec()))) }
        };
        let context = NodeContext::for_tests(kube::Client::new(tower::service_fn(serve), "default"));
        let event = DeviceEvent {
            reason: "DeviceUnhealthy",
            warning: true,
            note: "device a of kind k is not allocated: it is gone".to_owned(),
        };
        for expected in [25, 26] {
            for _ in 0..100 {
                context.write_events(None, std::slice::from_ref(&event)).await;
            }
            assert_eq!(written.load(Ordering::Relaxed), expected);
            tokio::time::advance(Duration::from_secs(300)).await;
        }
        let of_another_reason = DeviceEvent {
            reason: "KubeletTooOld",
            ..event
        };
        context.write_events(None, &[of_another_reason]).await;
        assert_eq!(written.load(Ordering::Relaxed), 27);
    }

    #[test]
    fn an_event_names_the_node_and_fits_the_servers_limits() {
        let driver_name = DriverName::parse("drayman.dev").unwrap();
        let event = DeviceEvent {
            reason: "DeviceUnhealthy",
            warning: true,
            note: "ü".repeat(800),
        };
        let event_of =
            |node_name, now| object(&driver_name, node_name, Some("n-1"), "CheckDevices", &event, now);
        let event = event_of("node-a", Timestamp::UNIX_EPOCH);
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
        let event = event_of(&long, Timestamp::MAX);
        assert!(event.metadata.name.unwrap().len() <= 253);
        assert_eq!(event.reporting_instance.unwrap().len(), 128);
        assert_eq!(event.regarding.unwrap().name.as_deref(), Some(&*long));
        let hyphen = format!("{}-.{}", "n".repeat(NAME_MAX - 2), "n".repeat(18));
        let name = event_of(&hyphen, Timestamp::MAX).metadata.name.unwrap();
        assert!(!name.contains("-.") && !name.contains(".."), "{name}");
    }
}
