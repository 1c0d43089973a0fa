//! Events about the node: what has become of its devices.

use k8s_openapi::api::core::v1::{Node, ObjectReference};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use kube::api::ObjectMeta;

use crate::core::node::discovery::events::DeviceEvent;
use crate::core::node::driver_name::DriverName;

/// Characters of a note, at most (`events.k8s.io/v1`: 1,024 bytes).
const NOTE_MAX: usize = 1000;

/// The namespace of events about objects that have none: where `kubectl describe node` looks.
pub(super) const NAMESPACE: &str = "default";

/// An event about this node.
pub(super) fn event(driver_name: &DriverName, node: &Node, change: &DeviceEvent, now: Timestamp) -> Event {
    let node_name = node.name_any();
    let mut text = change.note.clone();
    if text.len() > NOTE_MAX {
        let end = (0..=NOTE_MAX)
            .rev()
            .find(|end| text.is_char_boundary(*end))
            .unwrap_or_default();
        text.truncate(end);
        text.push('…');
    }
    Event {
        metadata: ObjectMeta {
            namespace: Some(NAMESPACE.to_owned()),
            // As client-go names them; 17 characters are left for the time.
            name: Some(format!(
                "{}.{:x}",
                node_name.get(..236).unwrap_or(&node_name),
                now.as_nanosecond()
            )),
            ..ObjectMeta::default()
        },
        action: Some("CheckDevices".to_owned()),
        event_time: Some(MicroTime(now)),
        note: Some(text),
        reason: Some(change.reason.to_owned()),
        regarding: Some(ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Node".to_owned()),
            uid: node.uid(),
            name: Some(node_name.clone()),
            ..ObjectReference::default()
        }),
        reporting_controller: Some(driver_name.to_string()),
        reporting_instance: Some(node_name.chars().take(128).collect()),
        type_: Some(if change.warning { "Warning" } else { "Normal" }.to_owned()),
        ..Event::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_about_the_node_and_fits_what_the_server_takes() {
        let node: Node =
            serde_json::from_value(serde_json::json!({"metadata": {"name": "node-a", "uid": "n-1"}}))
                .unwrap();
        let told = DeviceEvent {
            reason: "DeviceUnhealthy",
            warning: true,
            note: "ü".repeat(800),
        };
        let event = event(
            &DriverName::parse("drayman.dev").unwrap(),
            &node,
            &told,
            Timestamp::UNIX_EPOCH,
        );
        assert!(event.note.unwrap().len() <= 1024);
        assert_eq!(event.type_.as_deref(), Some("Warning"));
        let regarding = event.regarding.unwrap();
        assert_eq!(
            (regarding.kind.as_deref(), regarding.uid.as_deref()),
            (Some("Node"), Some("n-1"))
        );
        assert_eq!(event.metadata.namespace.as_deref(), Some("default"));
    }
}
