//! Checks the feature gate of classic DRA: from the components' metrics, or from symptoms where metrics are
//! unavailable.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};

use super::doctor::{DoctorFinding, some};
use super::explain::{ClaimIndex, find};
use super::{inventories_of, qualified_name};
use crate::api::crd::{Mode, NodeInventory};
use crate::api::resource::{Pod, PodSchedulingContext, ResourceClaim};
use crate::core::claims::Resolved;

/// Feature gate of the API server, controller manager, scheduler and kubelet.
pub const GATE: &str = "DynamicResourceAllocation";

const CHECK: &str = "gates";
/// Delay after which a missing claim of a template counts as a symptom. Claims are created at once; this allows for a
/// busy cluster.
const CLAIM_LATE: SignedDuration = SignedDuration::from_secs(60);

/// A component's answer about the gate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GateState {
    /// The gate is on.
    On,
    /// The gate is off.
    Off,
    /// The component does not report the gate.
    Silent,
    /// The component could not be queried, for this reason.
    NotAsked(String),
}

impl GateState {
    /// Parses a component's metrics for a gate: `kubernetes_feature_enabled` of `k8s.io/component-base`, served by every component
    /// since Kubernetes 1.27.
    pub fn of_metrics(text: &str, gate: &str) -> Self {
        let name = format!("name=\"{gate}\"");
        let mut lines = text
            .lines()
            .filter(|line| line.starts_with("kubernetes_feature_enabled{") && line.contains(&name));
        match lines.find_map(|line| line.rsplit_once(' ')) {
            Some((_, "1")) => Self::On,
            Some(_) => Self::Off,
            None => Self::Silent,
        }
    }
}

/// Returns whether the driver's devices need claims. They do not if all of them are extended resources only. Without
/// any listed device, claims are assumed to be needed.
pub fn needs_claims(driver: &str, inventories: &[NodeInventory]) -> bool {
    let ours = inventories_of(driver, inventories);
    let mut devices = ours.flat_map(|object| &object.spec.devices).peekable();
    devices.peek().is_none() || devices.any(|device| device.mode != Mode::ExtendedResource)
}

/// Checks the API server's answer.
pub fn api_server(answer: &GateState) -> DoctorFinding {
    match answer {
        GateState::On => DoctorFinding::fine(CHECK, format!("kube-apiserver has {GATE} on")),
        GateState::Off => DoctorFinding::problem(
            CHECK,
            format!("kube-apiserver has {GATE} off, so that it drops the claims that pods name"),
            format!("start kube-apiserver with --feature-gates={GATE}=true"),
        ),
        GateState::Silent => DoctorFinding::note(CHECK, format!("kube-apiserver does not report {GATE}")),
        GateState::NotAsked(why) => DoctorFinding::note(
            CHECK,
            format!(
                "the state of {GATE} in kube-apiserver is unknown (it needs the verb get on the path /metrics): {why}"
            ),
        ),
    }
}

/// Checks the answers of the kubelets on the driver's nodes, by node.
pub fn kubelets(answers: &BTreeMap<String, GateState>) -> Vec<DoctorFinding> {
    let on_nodes = |matches: fn(&GateState) -> bool| {
        let found = answers.iter().filter(|(_, answer)| matches(answer));
        let found: Vec<&str> = found.map(|(node, _)| node.as_str()).collect();
        (!found.is_empty()).then(|| some(&found))
    };
    let off = on_nodes(|answer| *answer == GateState::Off).map(|nodes| {
        DoctorFinding::problem(
            CHECK,
            format!("kubelet has {GATE} off on {nodes}, so that pods with claims get no device there"),
            format!(
                "set featureGates: {{{GATE}: true}} in kubelet's configuration there, and restart kubelet"
            ),
        )
    });
    let on = on_nodes(|answer| *answer == GateState::On)
        .map(|nodes| DoctorFinding::fine(CHECK, format!("kubelet has {GATE} on on {nodes}")));
    let silent = on_nodes(|answer| *answer == GateState::Silent)
        .map(|nodes| DoctorFinding::note(CHECK, format!("kubelet does not report {GATE} on {nodes}")));
    let why = answers.values().find_map(|answer| match answer {
        GateState::NotAsked(why) => Some(why),
        _ => None,
    });
    let not_asked = on_nodes(|answer| matches!(answer, GateState::NotAsked(_))).zip(why);
    let not_asked = not_asked.map(|(nodes, why)| {
        let message = format!(
            "the state of {GATE} in kubelet is unknown (it needs the verb get on nodes/proxy) on {nodes}: {why}; \
             `drayman doctor --this-node` there reads its configuration"
        );
        DoctorFinding::note(CHECK, message)
    });
    [off, on, silent, not_asked].into_iter().flatten().collect()
}

/// Checks the scheduler and the controller manager by the state of pods with claims; the API server does not proxy
/// their metrics.
pub fn by_symptoms(
    pods: &[Pod],
    claims: &[ResourceClaim],
    contexts: &[PodSchedulingContext],
    now: Timestamp,
) -> Vec<DoctorFinding> {
    let claims = ClaimIndex::new(claims);
    let (mut unreserved, mut unmade) = (Vec::new(), Vec::new());
    let (mut reserved, mut made) = (false, false);
    for pod in pods.iter().filter(|pod| lives(pod)) {
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        for entry in &pod.spec.resource_claims {
            match find(pod, entry, &claims) {
                Resolved::Claim(claim) => {
                    made |= entry.source.resource_claim_template_name.is_some();
                    let is_reserved = claim.status.reserved_for.iter().any(|user| user.uid == uid);
                    reserved |= is_reserved;
                    if pod.spec.node_name.is_some() && !is_reserved {
                        unreserved.push(qualified_name(pod));
                    }
                }
                Resolved::Awaited
                    if entry.source.resource_claim_template_name.is_some() && is_late(pod, now) =>
                {
                    unmade.push(qualified_name(pod));
                }
                Resolved::Awaited | Resolved::NotNeeded | Resolved::NotOwned(_) => {}
            }
        }
    }
    let scheduler = if !unreserved.is_empty() {
        DoctorFinding::warning(
            CHECK,
            format!(
                "{} bound to a node although a claim is not reserved, as when kube-scheduler has {GATE} off",
                some(&unreserved)
            ),
            format!(
                "start kube-scheduler with --feature-gates={GATE}=true, unless the pod sets spec.nodeName"
            ),
        )
    } else if reserved || !contexts.is_empty() {
        DoctorFinding::fine(
            CHECK,
            format!("kube-scheduler allocates for pods, so it has {GATE} on"),
        )
    } else {
        DoctorFinding::note(
            CHECK,
            format!(
                "the state of {GATE} in kube-scheduler is unknown, and no pod shows it: with it off, a pod with a claim is bound at once \
                 and does not start"
            ),
        )
    };
    let manager = if !unmade.is_empty() {
        DoctorFinding::warning(
            CHECK,
            format!(
                "no claim was created from the template of {}, as when kube-controller-manager has {GATE} off",
                some(&unmade)
            ),
            format!(
                "check that the template exists; otherwise start kube-controller-manager with --feature-gates={GATE}=true"
            ),
        )
    } else if made {
        DoctorFinding::fine(
            CHECK,
            format!("kube-controller-manager makes claims from templates, so it has {GATE} on"),
        )
    } else {
        DoctorFinding::note(
            CHECK,
            format!(
                "the state of {GATE} in kube-controller-manager is unknown, and no pod shows it: with it off, a pod with a template has \
                 no claim"
            ),
        )
    };
    vec![scheduler, manager]
}

/// Checks the gates in kubelet's configuration file: this gate, and `AllAlpha`, which includes it up to Kubernetes 1.31.
pub fn configuration(file: &str, gate: Option<bool>, all_alpha: Option<bool>) -> DoctorFinding {
    match gate {
        Some(true) => DoctorFinding::fine(CHECK, format!("kubelet has {GATE} on, by {file}")),
        Some(false) => DoctorFinding::problem(
            CHECK,
            format!("kubelet has {GATE} off, by {file}: pods with claims get no device here"),
            format!("set featureGates: {{{GATE}: true}} there and restart kubelet"),
        ),
        None if all_alpha == Some(true) => DoctorFinding::fine(
            CHECK,
            format!(
                "kubelet has {GATE} on, by AllAlpha in {file} up to Kubernetes 1.31, and by default from 1.34 on"
            ),
        ),
        None => DoctorFinding::note(
            CHECK,
            format!(
                "{file} does not set {GATE}: it is on by default from Kubernetes 1.34 on; before, pods with claims get no device here unless \
                 kubelet's flag --feature-gates enables it"
            ),
        ),
    }
}

fn lives(pod: &Pod) -> bool {
    let ended = matches!(pod.status.phase.as_deref(), Some("Succeeded" | "Failed"));
    !ended && pod.metadata.deletion_timestamp.is_none()
}

fn is_late(pod: &Pod, now: Timestamp) -> bool {
    let created = pod.metadata.creation_timestamp.as_ref();
    created.is_some_and(|created| now.duration_since(created.0) > CLAIM_LATE)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::cli::diagnose::doctor::{Level, worst};
    use crate::core::allocation::tests::fixture::{DRIVER, inventory};

    #[test]
    fn metrics_have_the_state_of_the_gate() {
        let line = |value: &str| {
            format!(
                "# TYPE kubernetes_feature_enabled gauge\nkubernetes_feature_enabled{{name=\"DynamicResourceAllocationX\",stage=\"ALPHA\"}} 0\n\
                 kubernetes_feature_enabled{{name=\"DynamicResourceAllocation\",stage=\"ALPHA\"}} {value}\nother 1\n"
            )
        };
        assert_eq!(GateState::of_metrics(&line("1"), GATE), GateState::On);
        assert_eq!(GateState::of_metrics(&line("0"), GATE), GateState::Off);
        assert_eq!(GateState::of_metrics("up 1\n", GATE), GateState::Silent);
    }

    #[test]
    fn a_disabled_gate_is_a_problem_and_an_unknown_one_is_not() {
        let kubelet = |answer: GateState| worst(&kubelets(&BTreeMap::from([("a".to_owned(), answer)])));
        let refused = GateState::NotAsked("no right".into());
        for (answer, level) in [
            (GateState::On, Level::Fine),
            (GateState::Off, Level::Problem),
            (GateState::Silent, Level::Note),
            (refused.clone(), Level::Note),
        ] {
            assert_eq!(api_server(&answer).level, level, "{answer:?}");
            assert_eq!(kubelet(answer), level);
        }
        assert!(api_server(&refused).message.contains("no right"));
        assert!(kubelets(&BTreeMap::new()).is_empty());
        let many: BTreeMap<String, GateState> =
            (0..5).map(|node| (format!("n{node}"), GateState::Off)).collect();
        assert!(kubelets(&many)[0].message.contains("n0, n1, n2 and 2 more"));
    }

    #[test]
    fn extended_resources_alone_need_no_claims() {
        let mut object = inventory("node-a", "1", &["a", "b"]);
        assert!(needs_claims(DRIVER, std::slice::from_ref(&object)));
        for device in &mut object.spec.devices {
            device.mode = Mode::ExtendedResource;
        }
        let all = [object];
        assert!(!needs_claims(DRIVER, &all));
        assert!(needs_claims("other", &all), "nothing is known of it");
    }

    fn pod(node: Option<&str>, created: i64) -> Pod {
        let created = Timestamp::from_second(created).unwrap().to_string();
        serde_json::from_value(json!({
            "metadata": { "name": "p", "namespace": "d", "uid": "u", "creationTimestamp": created },
            "spec": { "nodeName": node, "resourceClaims": [{ "name": "c", "source": { "resourceClaimTemplateName": "t" } }] },
            "status": { "resourceClaimStatuses": [{ "name": "c", "resourceClaimName": "p-c" }] },
        }))
        .unwrap()
    }

    fn claim(users: &Value) -> ResourceClaim {
        serde_json::from_value(json!({
            "metadata": { "name": "p-c", "namespace": "d", "ownerReferences": [
                { "apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u", "controller": true }] },
            "spec": { "resourceClassName": "x" },
            "status": { "reservedFor": users },
        }))
        .unwrap()
    }

    #[test]
    fn pods_reveal_the_gates_of_components_without_an_api() {
        let now = Timestamp::from_second(1000).unwrap();
        let levels = |pods: &[Pod], claims: &[ResourceClaim]| {
            let findings = by_symptoms(pods, claims, &[], now);
            findings.iter().map(|finding| finding.level).collect::<Vec<_>>()
        };
        let nobody = claim(&json!([]));
        let us = claim(&json!([{ "resource": "pods", "name": "p", "uid": "u" }]));
        assert_eq!(levels(&[], &[]), [Level::Note, Level::Note]);
        let bound = pod(Some("n"), 990);
        assert_eq!(
            levels(std::slice::from_ref(&bound), std::slice::from_ref(&nobody)),
            [Level::Warning, Level::Fine]
        );
        assert_eq!(levels(&[bound], &[us]), [Level::Fine, Level::Fine]);
        let waits = pod(None, 990);
        assert_eq!(levels(&[waits], &[nobody]), [Level::Note, Level::Fine]);
        assert_eq!(levels(&[pod(None, 990)], &[]), [Level::Note, Level::Note]);
        assert_eq!(levels(&[pod(None, 900)], &[]), [Level::Note, Level::Warning]);
    }

    #[test]
    fn kubelets_file_enables_the_gate_or_leaves_it_open() {
        let level = |gate, all| configuration("f", gate, all).level;
        assert_eq!(level(Some(true), None), Level::Fine);
        assert_eq!(level(None, Some(true)), Level::Fine);
        assert_eq!(level(None, Some(false)), Level::Note);
        assert_eq!(level(Some(false), Some(true)), Level::Problem);
        assert_eq!(level(None, None), Level::Note);
        let open = configuration("f", None, None).message;
        assert!(open.contains("on by default from Kubernetes 1.34 on"), "{open}");
    }
}
