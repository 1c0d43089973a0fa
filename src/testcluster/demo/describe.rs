//! Describes changes of API objects as lines of output.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::api::handle::DeviceHandle;
use crate::testcluster::api::StoreChange;
use crate::testcluster::api::object::{self, is_deleting, list, text};

/// Description of one event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Line {
    /// The acting component.
    pub(super) who: String,
    /// The event.
    pub(super) what: String,
}

fn line(who: impl Into<String>, what: impl Into<String>) -> Line {
    Line {
        who: who.into(),
        what: what.into(),
    }
}

/// Describes a change.
pub(super) fn describe(change: &StoreChange) -> Vec<Line> {
    let nothing = Value::Null;
    let before = change.before.as_deref().unwrap_or(&nothing);
    let after = change.after.as_deref().unwrap_or(&nothing);
    let storage = change.key.storage.as_str();
    match storage.split('.').next().unwrap_or_default() {
        "pods" => pod(&change.key.name, before, after),
        "resourceclaims" => claim(&change.key.name, before, after),
        "podschedulingcontexts" => context(&change.key.name, before, after),
        "nodeinventories" => inventory(before, after),
        "resourceslices" => slice(before, after),
        "events" if before.is_null() => event(after),
        _ => Vec::new(),
    }
}

fn pod(name: &str, before: &Value, after: &Value) -> Vec<Line> {
    if after.is_null() {
        return vec![line("cluster", format!("pod {name} is gone"))];
    }
    let mut lines = Vec::new();
    if before.is_null() {
        lines.push(line("user", format!("creates pod {name}")));
    }
    let node = text(after, "/spec/nodeName");
    if text(before, "/spec/nodeName") != node {
        lines.push(line("scheduler", format!("binds pod {name} to {node}")));
    }
    if text(before, "/status/phase") != "Running" && text(after, "/status/phase") == "Running" {
        lines.push(line(
            format!("kubelet {node}"),
            format!("starts the containers of pod {name}"),
        ));
    }
    lines
}

/// Returns the devices of an allocation and their node.
pub(super) fn devices_of(claim: &Value) -> (Vec<String>, String) {
    let results = list(claim, "/status/allocation/devices/results");
    if let Some(first) = results.first() {
        let devices = results.iter().map(|result| text(result, "/device").to_owned());
        return (devices.collect(), text(first, "/pool").to_owned());
    }
    let handles = list(claim, "/status/allocation/resourceHandles");
    let mut handles = handles
        .iter()
        .filter_map(|handle| DeviceHandle::parse(text(handle, "/data")).ok());
    handles.next().map_or_else(Default::default, |handle| {
        (
            handle.devices.into_iter().map(|device| device.device).collect(),
            handle.node_name,
        )
    })
}

fn claim(name: &str, before: &Value, after: &Value) -> Vec<Line> {
    let is_structured = [before, after]
        .iter()
        .any(|claim| text(claim, "/apiVersion") == "resource.k8s.io/v1");
    if is_structured && after.is_null() {
        return vec![line("cluster", format!("claim {name} is gone"))];
    }
    if after.is_null() {
        let held = devices_of(before).0.join(" and ");
        let free = if held.is_empty() {
            String::new()
        } else {
            format!("; {held} is free")
        };
        return vec![line(
            "controller",
            format!("removes the finalizer; claim {name} is gone{free}"),
        )];
    }
    let mut lines = Vec::new();
    if before.is_null() {
        let owner = list(after, "/metadata/ownerReferences")
            .first()
            .map(|owner| text(owner, "/name"))
            .unwrap_or_default();
        lines.push(match owner {
            "" => line("user", format!("creates claim {name}")),
            owner => line(
                "claim controller",
                format!("creates claim {name} for pod {owner} from its template"),
            ),
        });
    }
    let finalizers = |claim: &Value| list(claim, "/metadata/finalizers").len();
    if finalizers(after) > finalizers(before) && !is_structured {
        lines.push(line("controller", format!("adds its finalizer to claim {name}")));
    }
    let allocated = |claim: &Value| claim.pointer("/status/allocation").is_some();
    if allocated(after) && !allocated(before) {
        let consumer = list(after, "/status/reservedFor")
            .first()
            .map(|consumer| text(consumer, "/name"))
            .unwrap_or_default();
        let (devices, node) = devices_of(after);
        let devices = devices.join(" and ");
        let what = format!("allocates {devices} on {node} to claim {name}, reserved for pod {consumer}");
        let who = if is_structured { "scheduler" } else { "controller" };
        lines.push(line(who, what));
    }
    if is_structured && allocated(before) && !allocated(after) {
        let (devices, node) = devices_of(before);
        let devices = devices.join(" and ");
        lines.push(line(
            "claim controller",
            format!("deallocates claim {name}: {devices} on {node} is free"),
        ));
        return lines;
    }
    if allocated(before) && !allocated(after) {
        lines.push(line("controller", format!("deallocates claim {name}")));
    }
    let reserved = |claim: &Value| list(claim, "/status/reservedFor").len();
    if reserved(after) < reserved(before) {
        lines.push(line(
            "claim controller",
            format!("removes the ended pod from claim {name}"),
        ));
    }
    if !is_deleting(before) && is_deleting(after) {
        lines.push(line(
            "claim controller",
            format!("deletes claim {name}, which was created for that pod"),
        ));
    }
    lines
}

fn context(name: &str, before: &Value, after: &Value) -> Vec<Line> {
    let mut lines = Vec::new();
    if after.is_null() {
        return lines;
    }
    let potential = object::texts(after, "/spec/potentialNodes");
    if object::texts(before, "/spec/potentialNodes") != potential {
        lines.push(line(
            "scheduler",
            format!("asks whether pod {name} could run on {}", potential.join(", ")),
        ));
    }
    let selected = text(after, "/spec/selectedNode");
    if text(before, "/spec/selectedNode") != selected && !selected.is_empty() {
        lines.push(line("scheduler", format!("selects {selected} for pod {name}")));
    }
    if list(before, "/status/resourceClaims") != list(after, "/status/resourceClaims") {
        for entry in list(after, "/status/resourceClaims") {
            let unsuitable = object::texts(entry, "/unsuitableNodes");
            let what = match unsuitable.as_slice() {
                [] => "every node is suitable".to_owned(),
                nodes => format!("not on {}", nodes.join(", ")),
            };
            lines.push(line(
                "controller",
                format!("answers for {} of pod {name}: {what}", text(entry, "/name")),
            ));
        }
    }
    lines
}

fn inventory(before: &Value, after: &Value) -> Vec<Line> {
    let is_unhealthy = |device: &Value| !text(device, "/unhealthy").is_empty();
    let words = [
        "has found",
        "no longer has",
        "reports unhealthy:",
        "reports healthy again:",
    ];
    let mut lines = devices_changed(before, after, is_unhealthy, words);
    let was_unhealthy = |name: &Value| {
        let mut devices = list(before, "/spec/devices").iter();
        devices.any(|device| device["name"] == *name && is_unhealthy(device))
    };
    let mut devices = list(after, "/spec/devices").iter();
    let new = devices.find(|device| is_unhealthy(device) && !was_unhealthy(&device["name"]));
    let line = lines.iter_mut().find(|line| line.what.starts_with(words[2]));
    if let (Some(device), Some(line)) = (new, line) {
        line.what += ", because ";
        line.what += text(device, "/unhealthy");
    }
    lines
}

fn slice(before: &Value, after: &Value) -> Vec<Line> {
    let is_tainted = |device: &Value| !list(device, "/taints").is_empty();
    let words = ["publishes", "withdraws", "taints", "removes the taint of"];
    devices_changed(before, after, is_tainted, words)
}

/// Describes how the devices of a node change. The words are for devices that appear, that disappear, and that get and lose a mark.
fn devices_changed(
    before: &Value,
    after: &Value,
    is_marked: impl Fn(&Value) -> bool,
    words: [&str; 4],
) -> Vec<Line> {
    let names = |object: &Value, only_marked: bool| -> BTreeSet<String> {
        list(object, "/spec/devices")
            .iter()
            .filter(|device| !only_marked || is_marked(device))
            .map(|device| text(device, "/name").to_owned())
            .collect()
    };
    let node = [after, before]
        .map(|object| text(object, "/spec/nodeName"))
        .into_iter()
        .find(|node| !node.is_empty());
    let who = format!("companion {}", node.unwrap_or_default());
    let (old, new) = (names(before, false), names(after, false));
    let (was_marked, is_marked) = (names(before, true), names(after, true));
    let changes: [Vec<String>; 4] = [
        new.difference(&old).cloned().collect(),
        old.difference(&new).cloned().collect(),
        is_marked.difference(&was_marked).cloned().collect(),
        was_marked
            .difference(&is_marked)
            .filter(|name| new.contains(*name))
            .cloned()
            .collect(),
    ];
    words
        .into_iter()
        .zip(changes)
        .filter(|(_, names)| !names.is_empty())
        .map(|(word, names)| line(who.clone(), format!("{word} {}", names.join(", "))))
        .collect()
}

fn event(event: &Value) -> Vec<Line> {
    if text(event, "/type") != "Warning" {
        return Vec::new();
    }
    let who = match text(event, "/reportingComponent") {
        "kube-scheduler" => "scheduler",
        "kubelet" => "kubelet",
        "ResourceClaimController" => "claim controller",
        // Only the companion writes events about Nodes.
        _ if text(event, "/involvedObject/kind") == "Node" => "companion",
        _ => "controller",
    };
    let about = format!(
        "{} {}",
        text(event, "/involvedObject/kind").to_lowercase(),
        text(event, "/involvedObject/name")
    );
    vec![line(
        who,
        format!("sends an event about {about}: {}", text(event, "/message")),
    )]
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::*;
    use crate::testcluster::api::StorageKey;

    fn listed(storage: &str, before: Option<Value>, after: Option<Value>) -> Vec<String> {
        let key = StorageKey {
            storage: storage.to_owned(),
            namespace: "default".to_owned(),
            name: "x".to_owned(),
        };
        let change = StoreChange {
            version: 1,
            key,
            before: before.map(Arc::new),
            after: after.map(Arc::new),
        };
        describe(&change)
            .into_iter()
            .map(|line| format!("{}: {}", line.who, line.what))
            .collect()
    }

    #[test]
    fn an_allocation_is_described_with_devices_node_and_pod() {
        let handle = json!({
            "version": 1, "claimUid": "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0a", "nodeName": "node-a", "nodeUid": "n-1",
            "devices": [{ "request": "r", "device": "a" }, { "request": "r", "device": "b" }],
        });
        let allocated = json!({ "status": {
            "allocation": {
                "resourceHandles": [{ "data": handle.to_string() }],
            },
            "reservedFor": [{ "name": "p" }],
        } });
        assert_eq!(
            listed("resourceclaims.resource.k8s.io", Some(json!({})), Some(allocated)),
            ["controller: allocates a and b on node-a to claim x, reserved for pod p"]
        );
    }

    #[test]
    fn an_allocation_by_the_scheduler_is_described() {
        let result = json!({ "request": "r", "driver": "drayman.dev", "pool": "node-a", "device": "a" });
        let pending = json!({ "apiVersion": "resource.k8s.io/v1" });
        let mut allocated = pending.clone();
        allocated["status"] = json!({
            "allocation": { "devices": { "results": [result] } }, "reservedFor": [{ "name": "p" }],
        });
        let (storage, before) = ("resourceclaims.resource.k8s.io", Some(pending.clone()));
        assert_eq!(
            listed(storage, before, Some(allocated.clone())),
            ["scheduler: allocates a on node-a to claim x, reserved for pod p"]
        );
        assert_eq!(
            listed(storage, Some(allocated), Some(pending)),
            ["claim controller: deallocates claim x: a on node-a is free"]
        );
    }

    #[test]
    fn changes_of_a_slice_are_described() {
        let slice = |devices: Value| json!({ "spec": { "nodeName": "node-a", "devices": devices } });
        let storage = "resourceslices.resource.k8s.io";
        let before = slice(json!([{ "name": "a" }, { "name": "b" }]));
        let after = slice(json!([{ "name": "a", "taints": [{}] }, { "name": "c" }]));
        assert_eq!(
            listed(storage, Some(before), Some(after)),
            [
                "companion node-a: publishes c",
                "companion node-a: withdraws b",
                "companion node-a: taints a",
            ]
        );
    }

    #[test]
    fn irrelevant_changes_are_not_described() {
        assert_eq!(
            listed("leases.coordination.k8s.io", None, Some(json!({}))),
            [""; 0]
        );
        let pod = json!({ "spec": { "nodeName": "n" } });
        assert_eq!(listed("pods", Some(pod.clone()), Some(pod)), [""; 0]);
    }
}
