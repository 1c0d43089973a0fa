//! The scheduler's filters of nodes that come before the one for claims.

use k8s_openapi::api::core::v1::{Node, Taint, Toleration};
use k8s_openapi::api::resource::v1::{DeviceTaint, DeviceToleration};

use crate::cli::objects::PartialPod;
use crate::core::scheduler::{node_matches, untolerated};

/// Returns why the scheduler does not consider a node for the pod's claims, by the pod's node selector, required node affinity and tolerations.
/// Filters that depend on other pods and on volumes are not evaluated.
pub(super) fn rejection(pod: &PartialPod, node: &Node) -> Option<String> {
    let spec = pod.spec.as_ref()?;
    let labels = node.metadata.labels.as_ref();
    let mut selected = spec.node_selector.iter().flatten();
    let affinity = spec
        .affinity
        .as_ref()
        .and_then(|affinity| affinity.node_affinity.as_ref());
    let required = affinity.and_then(|affinity| {
        affinity
            .required_during_scheduling_ignored_during_execution
            .as_ref()
    });
    if !selected.all(|(name, value)| labels.and_then(|labels| labels.get(name)) == Some(value))
        || required.is_some_and(|required| node_matches(required, node) != Ok(true))
    {
        return Some("the pod's node selector or node affinity excludes it".to_owned());
    }
    let node = node.spec.as_ref()?;
    let cordoned = (node.unschedulable == Some(true)).then(|| Taint {
        key: "node.kubernetes.io/unschedulable".to_owned(),
        effect: "NoSchedule".to_owned(),
        ..Taint::default()
    });
    let taints = node.taints.iter().flatten().chain(&cordoned);
    let taints: Vec<DeviceTaint> = taints.map(as_of_device).collect();
    let tolerations = spec.tolerations.iter().flatten();
    let tolerations: Vec<DeviceToleration> = tolerations.map(for_devices).collect();
    let taint = untolerated(taints.iter(), &tolerations)?;
    let value = taint.value.iter().map(|value| format!("={value}"));
    Some(format!(
        "it has the taint {}{}:{}, which the pod does not tolerate",
        taint.key,
        value.collect::<String>(),
        taint.effect
    ))
}

fn as_of_device(taint: &Taint) -> DeviceTaint {
    DeviceTaint {
        key: taint.key.clone(),
        value: taint.value.clone(),
        effect: taint.effect.clone(),
        time_added: None,
    }
}

fn for_devices(toleration: &Toleration) -> DeviceToleration {
    // Comparisons of numbers, which need a feature gate, are not evaluated.
    let operator = toleration
        .operator
        .clone()
        .map(|operator| match operator.as_str() {
            "Lt" | "Gt" => "Exists".to_owned(),
            _ => operator,
        });
    DeviceToleration {
        key: toleration.key.clone(),
        operator,
        value: toleration.value.clone(),
        effect: toleration.effect.clone(),
        toleration_seconds: None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn is_rejected(spec: &Value) -> bool {
        let taints = json!([
            { "key": "for", "value": "cameras", "effect": "NoSchedule" },
            { "key": "busy", "effect": "PreferNoSchedule" },
        ]);
        let node: Node = serde_json::from_value(json!({
            "metadata": { "name": "node-a", "labels": { "zone": "one" } }, "spec": { "taints": taints },
        }))
        .unwrap();
        let pod: PartialPod = serde_json::from_value(json!({ "metadata": {}, "spec": spec })).unwrap();
        rejection(&pod, &node).is_some()
    }

    #[test]
    fn a_taint_needs_a_toleration() {
        for (toleration, is_tolerated) in [
            (json!({ "operator": "Exists" }), true),
            (json!({ "key": "for", "value": "cameras" }), true),
            (
                json!({ "key": "for", "operator": "Exists", "effect": "NoSchedule" }),
                true,
            ),
            (
                json!({ "key": "for", "operator": "Exists", "effect": "NoExecute" }),
                false,
            ),
            (json!({ "key": "for", "value": "radios" }), false),
            (json!({ "key": "busy", "operator": "Exists" }), false),
        ] {
            let rejected = is_rejected(&json!({ "tolerations": [toleration] }));
            assert_eq!(rejected, !is_tolerated, "{toleration}");
        }
        assert!(is_rejected(&json!({})));
        let cordoned: Node =
            serde_json::from_value(json!({ "metadata": {}, "spec": { "unschedulable": true } })).unwrap();
        let pod: PartialPod = serde_json::from_value(json!({ "metadata": {}, "spec": {} })).unwrap();
        let reason =
            "it has the taint node.kubernetes.io/unschedulable:NoSchedule, which the pod does not tolerate";
        assert_eq!(rejection(&pod, &cordoned).as_deref(), Some(reason));
    }

    #[test]
    fn a_selector_and_an_affinity_must_match() {
        let tolerant = |mut spec: Value| {
            spec["tolerations"] = json!([{ "operator": "Exists" }]);
            is_rejected(&spec)
        };
        let in_zone = |zone: &str| {
            let expression = json!({ "key": "zone", "operator": "In", "values": [zone] });
            let required = json!({ "nodeSelectorTerms": [{ "matchExpressions": [expression] }] });
            let affinity = json!({ "requiredDuringSchedulingIgnoredDuringExecution": required });
            json!({ "affinity": { "nodeAffinity": affinity } })
        };
        for (zone, is_other) in [("one", false), ("two", true)] {
            assert_eq!(tolerant(json!({ "nodeSelector": { "zone": zone } })), is_other);
            assert_eq!(tolerant(in_zone(zone)), is_other);
        }
    }
}
