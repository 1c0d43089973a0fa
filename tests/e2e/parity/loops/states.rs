//! The states of a namespace's objects that must be equal in both clusters.

use std::collections::BTreeMap;
use std::sync::Mutex;

use anyhow::bail;
use futures::{AsyncBufReadExt as _, TryStreamExt as _};
use http::Request;
use serde_json::{Value, json};

/// The sequence of states by object.
pub(super) type States = BTreeMap<String, Vec<String>>;

/// Normalizes states without a defined order: for a deleted pod's claim, the claim controller requests deallocation and the garbage
/// collector deletes it, in either order.
pub(super) fn ordered(mut states: States) -> States {
    for of in states.values_mut() {
        of.retain(|state| {
            let state: Value = serde_json::from_str(state).unwrap_or_default();
            let owned = state["owners"]
                .as_array()
                .is_some_and(|owners| !owners.is_empty());
            !(owned && state["allocated"] == true && state["deleting"] != state["deallocationRequested"])
        });
    }
    states
}

pub(super) fn shown(states: &States) -> String {
    let one =
        |(object, states): (&String, &Vec<String>)| format!("{object}\n    {}\n", states.join("\n    "));
    states.iter().map(one).collect()
}

/// The name of an object in both clusters: claims from templates have random names.
pub(super) fn label(object: &Value) -> &str {
    let annotation = &object["metadata"]["annotations"]["resource.kubernetes.io/pod-claim-name"];
    annotation
        .as_str()
        .or_else(|| object["metadata"]["name"].as_str())
        .unwrap_or_default()
}

/// The namespace of the objects that end the watches of a namespace.
pub(super) fn marker_namespace(namespace: &str) -> String {
    format!("{namespace}-marker")
}

/// Collects the states of a namespace's objects until an object is in the namespace of its markers.
pub(super) async fn watch(
    client: &kube::Client,
    path: &str,
    plural: &str,
    namespace: &str,
    states: &Mutex<States>,
) -> anyhow::Result<()> {
    let request = Request::get(path).body(Vec::new())?;
    let mut lines = client.request_stream(request).await?.lines();
    while let Some(line) = lines.try_next().await? {
        let event: Value = serde_json::from_str(&line)?;
        let object = &event["object"];
        let of = object["metadata"]["namespace"].as_str().unwrap_or_default();
        if of == marker_namespace(namespace) {
            return Ok(());
        }
        if of != namespace {
            continue;
        }
        let state = if event["type"] == "DELETED" {
            "gone".to_owned()
        } else {
            state(plural, object)
        };
        let mut states = states.lock().expect("no panic");
        let of = states.entry(format!("{plural}/{}", label(object))).or_default();
        if of.last() != Some(&state) {
            of.push(state);
        }
    }
    bail!("the watch of {plural} ended early")
}

/// The relevant fields of an object.
fn state(plural: &str, object: &Value) -> String {
    let deleting = object["metadata"]["deletionTimestamp"].is_string();
    let names = |list: &Value| -> Vec<String> {
        let list = list.as_array().cloned().unwrap_or_default();
        let name = |each: &Value| {
            each["name"]
                .as_str()
                .or(each.as_str())
                .unwrap_or_default()
                .to_owned()
        };
        // Kubernetes sorts the claim names of a pod randomly.
        let mut names: Vec<String> = list.iter().map(name).collect();
        names.sort();
        names
    };
    let state = match plural {
        "resourceclaims" => json!({
            "owners": names(&object["metadata"]["ownerReferences"]),
            "finalizers": names(&object["metadata"]["finalizers"]),
            "allocated": object["status"]["allocation"].is_object(),
            "reserved": names(&object["status"]["reservedFor"]),
            "deallocationRequested": object["status"]["deallocationRequested"] == true,
            "deleting": deleting,
        }),
        "podschedulingcontexts" => json!({
            "owners": names(&object["metadata"]["ownerReferences"]),
            "potential": object["spec"]["potentialNodes"],
            "selected": object["spec"]["selectedNode"],
            "evaluated": object["status"]["resourceClaims"],
            "deleting": deleting,
        }),
        _ => json!({
            "node": object["spec"]["nodeName"],
            "phase": object["status"]["phase"],
            "claims": names(&object["status"]["resourceClaimStatuses"]),
            "deleting": deleting,
        }),
    };
    state.to_string()
}
