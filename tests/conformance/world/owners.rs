//! Which contexts' pods are read for a claim, by whom the claim belongs to.

use std::sync::Arc;
use std::time::Duration;

use drayman::api::resource::{PodSchedulingContext, ResourceClaim};
use drayman::core::claims::{Answer, Command, ControllerState, Event, Moment};
use serde_json::{Value, json};

use super::{answer, object, world};

/// A claim of ours by this name, owned by these.
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

/// The context of a pod by this name, which names a claim or not.
fn context(name: &str) -> Arc<PodSchedulingContext> {
    object(json!({
        "metadata": { "namespace": "default", "name": name, "uid": format!("context-{name}"), "resourceVersion": "3",
            "ownerReferences": owner("v1", "Pod", name) },
        "spec": { "potentialNodes": ["a"] },
    }))
}

fn see(world: &mut ControllerState, event: Event, now: Moment) -> Vec<Command> {
    world.apply(event, now);
    world.decide(now)
}

/// The pods that are read, in order.
fn read(commands: &[Command]) -> Vec<String> {
    let reads = commands.iter().filter_map(|command| match command {
        Command::ReadPod { key, .. } => Some(key.name.clone()),
        _ => None,
    });
    reads.collect()
}

/// Answers the reads of pods that name these claims.
fn name_claims(
    world: &mut ControllerState,
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
        next.extend(answer(world, *id, Answer::PodRead(Ok(Some(pod))), now));
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
        let (mut world, _) = world(Vec::new(), vec![context("pod")], now);
        let commands = see(&mut world, Event::Claim(claim("one", "5", &owner)), now);
        assert_eq!(read(&commands), ["pod"], "{owner}");
        let commands = name_claims(&mut world, &commands, &["one"], now);
        assert!(
            matches!(commands.as_slice(), [Command::CallDriver { .. }]),
            "{owner}: {commands:?}"
        );
    }
}

#[test]
fn a_template_claim_is_reserved_for_its_pod_for_ten_seconds() {
    let now = Moment::default();
    let (mut world, commands) = world(Vec::new(), vec![context("other"), context("pod")], now);
    assert_eq!(read(&commands), Vec::<String>::new());
    let made_for = |version: &str| claim("owner-device", version, &owner("v1", "Pod", "owner"));
    let commands = see(&mut world, Event::Claim(made_for("5")), now);
    assert_eq!(read(&commands), ["owner"], "it announces its own pod");
    // Nobody schedules that one, and the claim changes now and then.
    let commands = name_claims(&mut world, &commands, &[], now);
    assert_eq!(read(&commands), Vec::<String>::new());
    let soon = now.after(Duration::from_millis(9900));
    assert_eq!(see(&mut world, Event::Claim(made_for("6")), soon), []);
    assert_eq!(world.next_deadline(), Some(now.after(Duration::from_secs(10))));
    let later = now.after(Duration::from_secs(10));
    let commands = world.decide(later);
    assert_eq!(read(&commands), ["other", "pod"]);
    // One of them names it, and neither is read again.
    let (others, ours) = commands.split_at(1);
    assert_eq!(name_claims(&mut world, others, &["another-driver-s"], later), []);
    let commands = name_claims(&mut world, ours, &["owner-device"], later);
    assert!(
        matches!(commands.as_slice(), [Command::CallDriver { .. }]),
        "{commands:?}"
    );
    let much_later = later.after(Duration::from_secs(250));
    assert_eq!(see(&mut world, Event::Claim(made_for("7")), much_later), []);
    let commands = see(&mut world, Event::Context(context("third")), much_later);
    assert_eq!(read(&commands), ["third"]);
}

#[test]
fn a_claim_that_its_pod_has_taken_costs_other_pods_nothing() {
    let now = Moment::default();
    let (mut world, _) = world(Vec::new(), vec![context("other")], now);
    let made_for = claim("owner-device", "5", &owner("v1", "Pod", "owner"));
    see(&mut world, Event::Claim(made_for.clone()), now);
    let mut allocated = (*made_for).clone();
    allocated.metadata.resource_version = Some("6".to_owned());
    allocated.status.driver_name = Some(super::DRIVER.to_owned());
    allocated.status.allocation = Some(drayman::api::resource::AllocationResult::new(super::DRIVER, "{}"));
    see(&mut world, Event::Claim(Arc::new(allocated)), now);
    assert_eq!(world.decide(now.after(Duration::from_secs(3600))), []);
    assert_eq!(world.next_deadline(), None);
}

#[test]
fn a_claim_that_is_given_to_another_owner_is_looked_for_anew() {
    let now = Moment::default();
    let (mut world, _) = world(Vec::new(), vec![context("pod"), context("second")], now);
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
    assert_eq!(read(&see(&mut world, first, now)), ["owner"]);
    // Adopted by a pod that is on its way: its context is looked at.
    let second = generated("6", &owner("v1", "Pod", "second"));
    assert_eq!(read(&see(&mut world, second, now)), ["second"]);
    // And by an operator: any pod may name it.
    let third = generated("7", &owner("example.com/v1", "Operator", "operator"));
    assert_eq!(read(&see(&mut world, third, now)), ["pod"]);
}
