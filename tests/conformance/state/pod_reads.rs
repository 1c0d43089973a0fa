//! Pods are read when their template claim appears, and not again for their context.

use std::sync::Arc;
use std::time::Duration;

use drayman::api::resource::{Pod, ResourceClaim};
use drayman::core::claims::{Answer, CallId, Command, ControllerState, Event, Moment};
use serde_json::{Value, json};

use super::{DRIVER, answer, apply, context, object, only, started};

/// The claim generated for the pod.
fn claim(version: &str) -> Arc<ResourceClaim> {
    changed(version, |_| {})
}

/// The same claim after `change`.
fn changed(version: &str, change: impl FnOnce(&mut Value)) -> Arc<ResourceClaim> {
    let mut claim = json!({
        "metadata": { "namespace": "default", "name": "pod-device-x7k2p", "uid": "claim", "resourceVersion": version,
            "annotations": { "resource.kubernetes.io/pod-claim-name": "device" },
            "ownerReferences": [{ "apiVersion": "v1", "kind": "Pod", "name": "pod", "uid": "pod", "controller": true }] },
        "spec": { "resourceClassName": "class" },
    });
    change(&mut claim);
    object(claim)
}

/// The pod with these template entries, before its status names a claim.
fn pod(uid: &str, entries: &[&str]) -> Arc<Pod> {
    let entry = |name: &&str| json!({ "name": name, "source": { "resourceClaimTemplateName": "template" } });
    object(json!({
        "metadata": { "namespace": "default", "name": "pod", "uid": uid },
        "spec": { "resourceClaims": entries.iter().map(entry).collect::<Vec<_>>() },
    }))
}

fn ready() -> (ControllerState, Moment) {
    let now = Moment::default();
    let (state, commands) = started(Vec::new(), Vec::new(), now);
    assert_eq!(commands, []);
    (state, now)
}

#[track_caller]
fn only_read(commands: &[Command]) -> CallId {
    let read = match commands {
        [Command::ReadPod { id, key }] if key.name == "pod" => Some(*id),
        _ => None,
    };
    assert!(read.is_some(), "{commands:?}");
    read.expect("one read")
}

#[test]
fn a_pod_read_for_its_claim_is_not_read_for_its_context() {
    let (mut state, now) = ready();
    let commands = apply(&mut state, Event::Claim(claim("2")), now);
    let read = Answer::PodRead(Ok(Some(pod("pod", &["device"]))));
    assert_eq!(answer(&mut state, only_read(&commands), read, now), []);
    // A change of the claim does not trigger a read of the pod.
    let labelled = changed("3", |claim| claim["metadata"]["labels"] = json!({ "a": "b" }));
    assert_eq!(apply(&mut state, Event::Claim(labelled), now), []);
    only(
        &apply(&mut state, Event::Context(context("4", &json!({}))), now),
        "evaluate",
    );
}

#[test]
fn a_context_waits_for_the_read_of_its_pod() {
    let (mut state, now) = ready();
    let commands = apply(&mut state, Event::Claim(claim("2")), now);
    let id = only_read(&commands);
    assert_eq!(
        apply(&mut state, Event::Context(context("4", &json!({}))), now),
        []
    );
    let read = Answer::PodRead(Ok(Some(pod("pod", &["device"]))));
    only(&answer(&mut state, id, read, now), "evaluate");
}

#[test]
fn a_pod_that_was_read_long_before_its_context_is_read_again() {
    let (mut state, now) = ready();
    let commands = apply(&mut state, Event::Claim(claim("2")), now);
    let read = Answer::PodRead(Ok(Some(pod("pod", &["device"]))));
    answer(&mut state, only_read(&commands), read, now);
    let later = now.after(Duration::from_secs(11));
    let commands = apply(&mut state, Event::Context(context("4", &json!({}))), later);
    only_read(&commands);
}

#[test]
fn a_pod_read_before_all_its_claims_is_read_again() {
    for at_once in [true, false] {
        let (mut state, now) = ready();
        let commands = apply(&mut state, Event::Claim(claim("2")), now);
        let id = only_read(&commands);
        let read = Answer::PodRead(Ok(Some(pod("pod", &["device", "another"]))));
        let context = Event::Context(context("4", &json!({})));
        let commands = if at_once {
            assert_eq!(answer(&mut state, id, read, now), []);
            apply(&mut state, context, now)
        } else {
            assert_eq!(apply(&mut state, context, now), []);
            answer(&mut state, id, read, now)
        };
        // Now the status of the pod shows that the other entry needs no claim.
        let mut complete = (*pod("pod", &["device", "another"])).clone();
        complete.status = serde_json::from_value(json!({ "resourceClaimStatuses": [
            { "name": "device", "resourceClaimName": "pod-device-x7k2p" }, { "name": "another" },
        ] }))
        .expect("a status");
        let read = Answer::PodRead(Ok(Some(Arc::new(complete))));
        only(&answer(&mut state, only_read(&commands), read, now), "evaluate");
    }
}

#[test]
fn a_failed_early_read_is_left_to_the_context() {
    let other = Answer::PodRead(Ok(Some(pod("another", &["device"]))));
    for bad in [
        Answer::PodRead(Err("refused".to_owned())),
        Answer::PodRead(Ok(None)),
        other,
    ] {
        let (mut state, now) = ready();
        let commands = apply(&mut state, Event::Claim(claim("2")), now);
        assert_eq!(answer(&mut state, only_read(&commands), bad, now), []);
        only_read(&apply(&mut state, Event::Context(context("4", &json!({}))), now));
    }
}

#[test]
fn no_pod_is_read_for_claims_that_need_no_allocation() {
    let (mut state, now) = ready();
    let foreign = changed("2", |claim| claim["spec"]["resourceClassName"] = json!("another"));
    assert_eq!(apply(&mut state, Event::Claim(foreign), now), []);
    let owned_by_no_pod = changed("2", |claim| {
        claim["metadata"]["uid"] = json!("other");
        claim["metadata"]["name"] = json!("other");
        claim["metadata"]["ownerReferences"][0]["kind"] = json!("Job");
    });
    assert_eq!(apply(&mut state, Event::Claim(owned_by_no_pod), now), []);
    // A deallocated claim is unallocated too, but its pod has ended.
    let held = |version: &str, allocation: Value| {
        changed(version, |claim| {
            claim["metadata"]["uid"] = json!("held");
            claim["metadata"]["name"] = json!("held");
            claim["metadata"]["finalizers"] = json!([format!("{DRIVER}/deletion-protection")]);
            claim["status"] = allocation;
        })
    };
    let allocated = held("5", json!({ "driverName": DRIVER, "allocation": {} }));
    apply(&mut state, Event::Claim(allocated), now);
    let commands = apply(&mut state, Event::Claim(held("6", json!({}))), now);
    assert!(
        !commands
            .iter()
            .any(|command| matches!(command, Command::ReadPod { .. })),
        "{commands:?}"
    );
}

#[test]
fn a_pod_read_for_a_deleted_claim_is_forgotten() {
    let (mut state, now) = ready();
    let commands = apply(&mut state, Event::Claim(claim("2")), now);
    let read = Answer::PodRead(Ok(Some(pod("pod", &["device"]))));
    answer(&mut state, only_read(&commands), read, now);
    let gone = Event::ClaimGone {
        key: drayman::core::claims::ObjectKey::new("default", "pod-device-x7k2p"),
        uid: "claim".to_owned(),
    };
    assert_eq!(apply(&mut state, gone, now), []);
    assert_eq!(
        apply(&mut state, Event::Context(context("4", &json!({}))), now),
        []
    );
    let commands = apply(&mut state, Event::Claim(claim("7")), now);
    only_read(&commands);
}
