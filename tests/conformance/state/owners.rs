//! Which pods are read for a claim, depending on the owner of the claim.

use std::sync::Arc;
use std::time::Duration;

use drayman::api::resource::{PodSchedulingContext, ResourceClaim};
use drayman::core::claims::{Answer, Command, ControllerState, Event, Moment};
use serde_json::{Value, json};

use super::{answer, apply, object, started};

/// A claim of our class with this name and these owners.
fn claim(name: &str, version: &str, owners: &Value) -> Arc<ResourceClaim> {
    object(json!({
        "metadata": { "namespace": "default", "name": name, "uid": name, "resourceVersion": version,
            "ownerReferences": owners },
        "spec": { "resourceClassName": "class" },
    }))
}

fn owner(api_version: &str, kind: &str, name: &str) -> Value {
    json!([{ "apiVersion": api_version, "kind": kind, "name": name, "uid": name, "controller": true }])
}

/// The context of a pod of this name.
fn context(name: &str) -> Arc<PodSchedulingContext> {
    object(json!({
        "metadata": { "namespace": "default", "name": name, "uid": format!("context-{name}"), "resourceVersion": "3",
            "ownerReferences": owner("v1", "Pod", name) },
        "spec": { "potentialNodes": ["a"] },
    }))
}

/// The names of the pods that are read, in order.
fn read(commands: &[Command]) -> Vec<String> {
    let reads = commands.iter().filter_map(|command| match command {
        Command::ReadPod { key, .. } => Some(key.name.clone()),
        _ => None,
    });
    reads.collect()
}

/// Answers each read with a pod that names these claims.
fn name_claims(
    state: &mut ControllerState,
    commands: &[Command],
    claims: &[&str],
    now: Moment,
) -> Vec<Command> {
    let mut next = Vec::new();
    for command in commands {
        let Command::ReadPod { id, key } = command else {
            continue;
        };
        let entry = |claim: &&str| json!({ "name": claim, "source": { "resourceClaimName": claim } });
        let pod = object(json!({
            "metadata": { "namespace": "default", "name": key.name, "uid": key.name },
            "spec": { "resourceClaims": claims.iter().map(entry).collect::<Vec<_>>() },
        }));
        next.extend(answer(state, *id, Answer::PodRead(Ok(Some(pod))), now));
    }
    next
}

#[test]
fn a_claim_not_owned_by_a_pod_is_looked_up_in_every_pod() {
    let now = Moment::default();
    let owners = [
        owner("batch/v1", "Job", "job"),
        owner("example.com/v1", "Pod", "no-pod-of-ours"),
        owner("v1", "Pod", "launcher"),
        json!([]),
    ];
    for owner in owners {
        let (mut state, _) = started(Vec::new(), vec![context("pod")], now);
        let commands = apply(&mut state, Event::Claim(claim("one", "5", &owner)), now);
        assert_eq!(read(&commands), ["pod"], "{owner}");
        let commands = name_claims(&mut state, &commands, &["one"], now);
        assert!(
            matches!(commands.as_slice(), [Command::CallDriver { .. }]),
            "{owner}: {commands:?}"
        );
    }
}

#[test]
fn a_template_claim_is_reserved_for_its_pod_for_ten_seconds() {
    let now = Moment::default();
    let (mut state, commands) = started(Vec::new(), vec![context("other"), context("pod")], now);
    assert_eq!(read(&commands), Vec::<String>::new());
    let made_for = |version: &str| claim("owner-device", version, &owner("v1", "Pod", "owner"));
    let commands = apply(&mut state, Event::Claim(made_for("5")), now);
    assert_eq!(read(&commands), ["owner"], "its own pod is read");
    // That pod is not scheduled, and the claim changes occasionally.
    let commands = name_claims(&mut state, &commands, &[], now);
    assert_eq!(read(&commands), Vec::<String>::new());
    let soon = now.after(Duration::from_millis(9900));
    assert_eq!(apply(&mut state, Event::Claim(made_for("6")), soon), []);
    assert_eq!(state.next_deadline(), Some(now.after(Duration::from_secs(10))));
    let later = now.after(Duration::from_secs(10));
    let commands = state.decide(later);
    assert_eq!(read(&commands), ["other", "pod"]);
    // One pod names the claim; neither pod is read again.
    let (others, ours) = commands.split_at(1);
    assert_eq!(name_claims(&mut state, others, &["another-driver-s"], later), []);
    let commands = name_claims(&mut state, ours, &["owner-device"], later);
    assert!(
        matches!(commands.as_slice(), [Command::CallDriver { .. }]),
        "{commands:?}"
    );
    let much_later = later.after(Duration::from_secs(250));
    assert_eq!(apply(&mut state, Event::Claim(made_for("7")), much_later), []);
    let commands = apply(&mut state, Event::Context(context("third")), much_later);
    assert_eq!(read(&commands), ["third"]);
}

#[test]
fn a_claim_that_its_pod_has_taken_costs_other_pods_nothing() {
    let now = Moment::default();
    let (mut state, _) = started(Vec::new(), vec![context("other")], now);
    let made_for = claim("owner-device", "5", &owner("v1", "Pod", "owner"));
    apply(&mut state, Event::Claim(made_for.clone()), now);
    let mut allocated = (*made_for).clone();
    allocated.metadata.resource_version = Some("6".to_owned());
    allocated.status.driver_name = Some(super::DRIVER.to_owned());
    allocated.status.allocation = Some(drayman::api::resource::AllocationResult::new(super::DRIVER, "{}"));
    apply(&mut state, Event::Claim(Arc::new(allocated)), now);
    assert_eq!(state.decide(now.after(Duration::from_secs(3600))), []);
    assert_eq!(state.next_deadline(), None);
}

#[test]
fn a_claim_with_a_new_owner_is_looked_up_again() {
    let now = Moment::default();
    let (mut state, _) = started(Vec::new(), vec![context("pod"), context("second")], now);
    let generated = |version: &str, owners: &Value| {
        let mut claim = (*claim("made", version, owners)).clone();
        let annotation = (
            "resource.kubernetes.io/pod-claim-name".to_owned(),
            "device".to_owned(),
        );
        claim.metadata.annotations = Some([annotation].into());
        Event::Claim(Arc::new(claim))
    };
    let first = generated("5", &owner("v1", "Pod", "owner"));
    assert_eq!(read(&apply(&mut state, first, now)), ["owner"]);
    // Adopted by a pod with a context: that pod is read.
    let second = generated("6", &owner("v1", "Pod", "second"));
    assert_eq!(read(&apply(&mut state, second, now)), ["second"]);
    // Adopted by an operator: any pod may name it.
    let third = generated("7", &owner("example.com/v1", "Operator", "operator"));
    assert_eq!(read(&apply(&mut state, third, now)), ["pod"]);
}
