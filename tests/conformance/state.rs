//! Unit tests of the pure core with a virtual clock, for cases that a real control plane cannot produce on demand: long waits, missed watch
//! events, objects that its validation rejects.

mod late_writes;
mod owners;
mod pod_reads;
mod refused_writes;

use std::sync::Arc;
use std::time::Duration;

use drayman::api::resource::{
    AllocationResult, Pod, PodSchedulingContext, ResourceClaim, ResourceClaimConsumerReference, ResourceClass,
};
use drayman::core::claims::{
    Answer, CallId, ClaimWrite, Command, ControllerState, DriverRequest, Event, EventReport, Moment,
    ObjectKey, Outcome, Settings,
};
use drayman::driver::{CapacityCause, CapacityChange, Observation, UnsuitableNodes};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

const DRIVER: &str = "driver.example.com";

fn object<T: DeserializeOwned>(value: Value) -> Arc<T> {
    Arc::new(serde_json::from_value(value).expect("a well-formed object"))
}

fn class() -> Arc<ResourceClass> {
    object(
        json!({ "metadata": { "name": "class", "uid": "class", "resourceVersion": "1" }, "driverName": DRIVER }),
    )
}

fn claim(finalizers: &[&str]) -> Arc<ResourceClaim> {
    let metadata = json!({ "namespace": "default", "name": "claim", "uid": "claim", "resourceVersion": "2",
        "finalizers": finalizers });
    object(json!({ "metadata": metadata, "spec": { "resourceClassName": "class" } }))
}

fn context(version: &str, status: &Value) -> Arc<PodSchedulingContext> {
    object(json!({
        "metadata": { "namespace": "default", "name": "pod", "uid": "context", "resourceVersion": version,
            "ownerReferences": [{ "apiVersion": "v1", "kind": "Pod", "name": "pod", "uid": "pod", "controller": true }] },
        "spec": { "potentialNodes": ["a", "b"] },
        "status": status,
    }))
}

fn pod(source: &Value) -> Arc<Pod> {
    object(json!({
        "metadata": { "namespace": "default", "name": "pod", "uid": "pod" },
        "spec": { "resourceClaims": [{ "name": "device", "source": source }] },
    }))
}

/// A started [`ControllerState`] that has listed these objects and whose driver is ready, and its first commands.
fn started(
    claims: Vec<Arc<ResourceClaim>>,
    contexts: Vec<Arc<PodSchedulingContext>>,
    now: Moment,
) -> (ControllerState, Vec<Command>) {
    let mut state = ControllerState::new(Settings::new(DRIVER));
    state.apply(Event::Classes(vec![class()]), now);
    state.apply(Event::Claims(claims), now);
    state.apply(Event::Contexts(contexts), now);
    let commands = state.decide(now);
    assert!(matches!(
        commands.as_slice(),
        [Command::Observe(Observation::All(_)), Command::AwaitDriver]
    ));
    state.apply(Event::DriverReady, now);
    let commands = state.decide(now);
    (state, commands)
}

/// The id of the only command, which has this name.
#[track_caller]
fn only(commands: &[Command], expected: &str) -> CallId {
    let found = match commands {
        [Command::ReadPod { id, .. }] => Some(("read pod", *id)),
        [Command::ReadClaim { id, .. }] => Some(("read claim", *id)),
        [Command::WriteContext { id, .. }] => Some(("write context", *id)),
        [Command::WriteClaim { id, write, .. }] => {
            let name = match write {
                ClaimWrite::AddFinalizer { .. } => "add finalizer",
                ClaimWrite::Allocate { .. } => "record",
                ClaimWrite::ClearAllocation { .. } => "clear",
                ClaimWrite::RollBackAllocation { .. } => "roll back",
                ClaimWrite::RemoveFinalizer { .. } => "remove finalizer",
            };
            Some((name, *id))
        }
        [Command::CallDriver { id, request }] => {
            let name = match request {
                DriverRequest::Allocate { .. } => "allocate",
                DriverRequest::Deallocate { .. } => "deallocate",
                DriverRequest::UnsuitableNodes { .. } => "evaluate",
            };
            Some((name, *id))
        }
        _ => None,
    };
    assert!(
        found.is_some_and(|(name, _)| name == expected),
        "expected {expected} only: {commands:?}"
    );
    found.expect("checked").1
}

fn answer(state: &mut ControllerState, id: CallId, answer: Answer, now: Moment) -> Vec<Command> {
    apply(state, Event::Answer { id, answer }, now)
}

fn apply(state: &mut ControllerState, event: Event, now: Moment) -> Vec<Command> {
    state.apply(event, now);
    state.decide(now)
}

#[test]
fn a_waiting_pod_costs_nothing_for_five_minutes() {
    let mut now = Moment::default();
    let (mut state, commands) = started(vec![claim(&[])], vec![context("3", &json!({}))], now);
    let id = only(&commands, "read pod");
    let commands = answer(
        &mut state,
        id,
        Answer::PodRead(Ok(Some(pod(&json!({ "resourceClaimName": "claim" }))))),
        now,
    );
    let id = only(&commands, "evaluate");
    let full = UnsuitableNodes::from(["a", "b"].map(|node| (node.to_owned(), "full".to_owned())));
    let commands = answer(&mut state, id, Answer::Evaluated(Ok(vec![full.clone()])), now);
    let [Command::Report(_), Command::WriteContext { id, entries, .. }] = commands.as_slice() else {
        panic!("{commands:?}")
    };
    assert_eq!(entries[0].unsuitable_nodes, ["a", "b"]);
    let written = context(
        "4",
        &json!({ "resourceClaims": [{ "name": "device", "unsuitableNodes": ["a", "b"] }] }),
    );
    let commands = answer(
        &mut state,
        *id,
        Answer::ContextWritten(Outcome::Done(written)),
        now,
    );
    assert_eq!(commands, []);
    for _ in 0..3 {
        let next = state.next_deadline().expect("the slow recheck");
        let wait = next.since_start().saturating_sub(now.since_start());
        assert!(
            wait >= Duration::from_secs(300) && wait <= Duration::from_secs(420),
            "{wait:?}"
        );
        now = next;
        let commands = state.decide(now);
        let id = only(&commands, "evaluate");
        assert_eq!(
            answer(&mut state, id, Answer::Evaluated(Ok(vec![full.clone()])), now),
            [],
            "an unchanged answer"
        );
    }
    assert_eq!(state.statistics().caught_by_recheck, 0);
}

#[test]
fn reasons_of_waiting_pods_and_wake_up_times_are_counted() {
    let start = Moment::default();
    let (mut state, commands) = started(vec![claim(&[])], vec![context("3", &json!({}))], start);
    let id = only(&commands, "read pod");
    let queue = |state: &ControllerState, name| state.statistics().queues[name];
    assert_eq!(queue(&state, "context").under_way, 1);
    let read = Answer::PodRead(Ok(Some(pod(&json!({ "resourceClaimName": "claim" })))));
    let commands = answer(&mut state, id, read, start.after(Duration::from_secs(2)));
    let id = only(&commands, "evaluate");
    assert_eq!(queue(&state, "context").worked.sum(), Duration::from_secs(2));
    let waiting = |state: &ControllerState| -> Vec<(&'static str, u64)> {
        let all = state.statistics().waiting;
        all.into_iter().filter(|(_, count)| *count > 0).collect()
    };
    let full = |nodes: &[&str]| {
        let unsuitable_nodes = nodes.iter().map(|node| ((*node).to_owned(), "full".to_owned()));
        Answer::Evaluated(Ok(vec![unsuitable_nodes.collect()]))
    };
    assert_eq!(waiting(&state), []);
    let commands = answer(&mut state, id, full(&["a", "b"]), start);
    let [Command::Report(_), Command::WriteContext { id, .. }] = commands.as_slice() else {
        panic!("{commands:?}")
    };
    assert_eq!(waiting(&state), [("NoSuitableDevice", 1)]);
    assert_eq!(state.statistics().reports["NoSuitableDevice"], 1);
    let entry =
        |nodes: &[&str]| json!({ "resourceClaims": [{ "name": "device", "unsuitableNodes": nodes }] });
    let written = Answer::ContextWritten(Outcome::Done(context("4", &entry(&["a", "b"]))));
    answer(&mut state, *id, written, start);

    // A device becomes free; the scheduler receives the node three seconds later.
    let now = start.after(Duration::from_secs(60));
    let change = CapacityChange::new(CapacityCause::Freed).for_pods(1);
    state.apply(Event::Capacity(change), now);
    let id = only(&state.decide(now), "evaluate");
    let commands = answer(&mut state, id, full(&["b"]), now);
    let id = only(&commands, "write context");
    assert_eq!(waiting(&state), [("SomeNodesUnsuitable", 1)]);
    assert_eq!(
        state.statistics().wake_ups.count(),
        0,
        "the answer is not written yet"
    );
    let written = Answer::ContextWritten(Outcome::Done(context("5", &entry(&["b"]))));
    answer(&mut state, id, written, now.after(Duration::from_secs(3)));
    let woken = state.statistics().wake_ups;
    assert_eq!((woken.count(), woken.sum()), (1, Duration::from_secs(3)));

    // A deleted pod no longer counts as waiting.
    let (key, uid) = (ObjectKey::new("default", "pod"), "context".to_owned());
    state.apply(Event::ContextGone { key, uid }, now);
    assert_eq!(waiting(&state), []);
    let counted = state.statistics();
    assert_eq!(counted.calls[&("UnsuitableNodes", "Done")], 2);
    assert_eq!(
        (
            counted.queues["context"].under_way,
            counted.queues["context"].depth
        ),
        (0, 0)
    );
}

#[test]
fn own_writes_stand_until_the_watch_shows_them() {
    let now = Moment::default();
    let (mut state, commands) = started(vec![claim(&[])], vec![context("3", &json!({}))], now);
    let id = only(&commands, "read pod");
    let read = Answer::PodRead(Ok(Some(pod(&json!({ "resourceClaimName": "claim" })))));
    let id = only(&answer(&mut state, id, read, now), "evaluate");
    let commands = answer(
        &mut state,
        id,
        Answer::Evaluated(Ok(vec![UnsuitableNodes::new()])),
        now,
    );
    let id = only(&commands, "write context");
    let answered = json!({ "resourceClaims": [{ "name": "device" }] });
    let written = Answer::ContextWritten(Outcome::Done(context("5", &answered)));
    assert_eq!(answer(&mut state, id, written, now), []);
    // The watch lags: its version is older than the stored answer, which is not written again.
    state.apply(Event::Context(context("4", &json!({}))), now);
    assert_eq!(state.decide(now), []);

    // Likewise, the finalizer of a claim is stored once.
    let mut selected = (*context("6", &answered)).clone();
    selected.spec.selected_node = "a".to_owned();
    state.apply(Event::Context(Arc::new(selected)), now);
    let mut commands = state.decide(now);
    // The core may evaluate the node first.
    if let [
        Command::CallDriver {
            id,
            request: DriverRequest::UnsuitableNodes { .. },
        },
    ] = commands.as_slice()
    {
        commands = answer(
            &mut state,
            *id,
            Answer::Evaluated(Ok(vec![UnsuitableNodes::new()])),
            now,
        );
    }
    let id = only(&commands, "add finalizer");
    let mut secured = (*claim(&[&format!("{DRIVER}/deletion-protection")])).clone();
    secured.metadata.resource_version = Some("8".to_owned());
    let written = Answer::ClaimWritten(Outcome::Done(Arc::new(secured)));
    let commands = answer(&mut state, id, written, now);
    let [
        Command::Observe(_),
        Command::CallDriver {
            request: DriverRequest::Allocate { .. },
            ..
        },
    ] = commands.as_slice()
    else {
        panic!("{commands:?}")
    };
    let mut older = (*claim(&[])).clone();
    older.metadata.resource_version = Some("7".to_owned());
    state.apply(Event::Claim(Arc::new(older)), now);
    assert_eq!(state.decide(now), []);
}

#[test]
fn a_context_of_other_drivers_is_never_evaluated_again() {
    let now = Moment::default();
    let (state, commands) = started(Vec::new(), vec![context("3", &json!({}))], now);
    assert_eq!((commands, state.next_deadline()), (Vec::new(), None));
}

#[test]
fn an_entry_of_a_pod_without_any_source_is_waited_for() {
    let now = Moment::default();
    let (mut state, commands) = started(vec![claim(&[])], vec![context("3", &json!({}))], now);
    let id = only(&commands, "read pod");
    let commands = answer(&mut state, id, Answer::PodRead(Ok(Some(pod(&json!({}))))), now);
    assert_eq!((commands, state.next_deadline()), (Vec::new(), None));
}

#[test]
fn a_claim_whose_deletion_was_missed_is_gone_with_the_next_list() {
    let now = Moment::default();
    let finalizer = format!("{DRIVER}/deletion-protection");
    let (mut state, commands) = started(vec![claim(&[&finalizer])], Vec::new(), now);
    // Partial work is rolled back.
    let id = only(&commands, "deallocate");
    state.apply(Event::Claims(Vec::new()), now);
    let gone = Command::Observe(Observation::Gone {
        uid: "claim".to_owned(),
    });
    assert_eq!(state.decide(now), [gone]);
    // No state is left: neither the pending answer nor time has an effect.
    assert_eq!(answer(&mut state, id, Answer::Deallocated(Ok(())), now), []);
    assert_eq!(state.next_deadline(), None);
}

/// A state whose driver evaluates the nodes of a pod with a second claim, of another driver; and the id of that call.
fn evaluating_with_another_driver(
    context: Arc<PodSchedulingContext>,
    now: Moment,
) -> (ControllerState, CallId) {
    let other_class = object(
        json!({ "metadata": { "name": "theirs", "uid": "theirs", "resourceVersion": "1" }, "driverName": "other.example.com" }),
    );
    let other_claim = object(json!({
        "metadata": { "namespace": "default", "name": "other", "uid": "other", "resourceVersion": "2" },
        "spec": { "resourceClassName": "theirs" },
    }));
    let (mut state, _) = started(vec![claim(&[]), other_claim], Vec::new(), now);
    state.apply(Event::Class(other_class), now);
    state.apply(Event::Context(context), now);
    let id = only(&state.decide(now), "read pod");
    let pod = object(json!({
        "metadata": { "namespace": "default", "name": "pod", "uid": "pod" },
        "spec": { "resourceClaims": [
            { "name": "device", "source": { "resourceClaimName": "claim" } },
            { "name": "more", "source": { "resourceClaimName": "other" } },
        ] },
    }));
    let commands = answer(&mut state, id, Answer::PodRead(Ok(Some(pod))), now);
    (state, only(&commands, "evaluate"))
}

#[test]
fn a_driver_silent_for_a_minute_is_named_once() {
    let start = Moment::default();
    let ours = json!({ "resourceClaims": [{ "name": "device" }] });
    let (mut state, id) = evaluating_with_another_driver(context("3", &ours), start);
    let evaluated = Answer::Evaluated(Ok(vec![UnsuitableNodes::new()]));
    assert_eq!(
        answer(&mut state, id, evaluated, start),
        [],
        "our own answer stands"
    );
    assert_eq!(
        state.next_deadline(),
        Some(start.after(Settings::OTHER_DRIVER_WAIT))
    );

    // The other driver answers in time; later it does not allocate on the selected node.
    let now = start.after(Duration::from_secs(59));
    let answered =
        json!({ "resourceClaims": [{ "name": "device" }, { "name": "more", "unsuitableNodes": ["b"] }] });
    state.apply(Event::Context(context("4", &answered)), now);
    assert_eq!(state.decide(now), []);
    assert_eq!(state.decide(now.after(Duration::from_secs(3600))), []);
    let now = now.after(Duration::from_secs(3600));
    let allocated = json!({
        "metadata": { "namespace": "default", "name": "claim", "uid": "claim", "resourceVersion": "5" },
        "spec": { "resourceClassName": "class" },
        "status": { "driverName": DRIVER, "allocation": {} },
    });
    state.apply(Event::Claim(object(allocated)), now);
    let mut chosen = (*context("5", &answered)).clone();
    chosen.spec.selected_node = "a".to_owned();
    state.apply(Event::Context(Arc::new(chosen)), now);
    state.decide(now);
    let reports = |commands: Vec<Command>| -> Vec<String> {
        let reports = commands.into_iter().filter_map(|command| match command {
            Command::Report(report) => Some(report.message),
            _ => None,
        });
        reports.collect()
    };
    assert_eq!(
        reports(state.decide(now.after(Duration::from_secs(59)))),
        Vec::<String>::new()
    );
    let reported = reports(state.decide(now.after(Duration::from_secs(60))));
    let [text] = reported.as_slice() else {
        panic!("{reported:?}")
    };
    assert!(
        text.contains("\"other.example.com\"") && text.contains("\"theirs\""),
        "{text}"
    );
    // It is not reported again.
    state.apply(Event::Context(context("6", &ours)), now);
    state.decide(now.after(Duration::from_secs(100)));
    assert_eq!(
        reports(state.decide(now.after(Duration::from_secs(300)))),
        Vec::<String>::new()
    );
}

#[test]
fn a_driver_is_not_silent_while_ours_refuses_the_node() {
    let now = Moment::default();
    let entries = json!({ "resourceClaims": [
        { "name": "device", "unsuitableNodes": ["a"] }, { "name": "more", "unsuitableNodes": ["b"] },
    ] });
    let mut selected = (*context("3", &entries)).clone();
    selected.spec.selected_node = "a".to_owned();
    let (mut state, id) = evaluating_with_another_driver(Arc::new(selected), now);
    let full = UnsuitableNodes::from([("a".to_owned(), "full".to_owned())]);
    assert_eq!(
        answer(&mut state, id, Answer::Evaluated(Ok(vec![full])), now),
        [],
        "both answers stand"
    );
    assert_eq!(state.decide(now.after(Settings::OTHER_DRIVER_WAIT)), []);
}

#[test]
fn a_pod_with_too_many_claims_is_reported_once() {
    let now = Moment::default();
    for (count, is_served) in [(128, true), (129, false)] {
        let (mut state, commands) = started(vec![claim(&[])], vec![context("3", &json!({}))], now);
        let id = only(&commands, "read pod");
        let entry = |number: usize| json!({ "name": format!("device-{number}"), "source": { "resourceClaimName": "claim" } });
        let pod = object(json!({
            "metadata": { "namespace": "default", "name": "pod", "uid": "pod" },
            "spec": { "resourceClaims": (0..count).map(entry).collect::<Vec<_>>() },
        }));
        let commands = answer(&mut state, id, Answer::PodRead(Ok(Some(pod))), now);
        if is_served {
            assert!(
                matches!(commands.as_slice(), [Command::CallDriver { .. }]),
                "{commands:?}"
            );
            continue;
        }
        let [Command::Report(report)] = commands.as_slice() else {
            panic!("{commands:?}")
        };
        assert_eq!(report.reason, "TooManyClaims");
        assert!(report.message.contains("129 claims"), "{}", report.message);
        // Changes trigger neither work nor another report, unless the report was lost.
        state.apply(Event::Context(context("4", &json!({}))), now);
        assert_eq!(state.decide(now), []);
        state.apply(Event::ReportFailed(report.clone()), now);
        assert_eq!(state.decide(now.after(Duration::from_secs(60))), commands);
    }
}

#[test]
fn a_claim_in_use_keeps_its_finalizer_after_a_deallocation() {
    let now = Moment::default();
    let finalizer = format!("{DRIVER}/deletion-protection");
    let (mut state, commands) = started(vec![claim(&[&finalizer])], Vec::new(), now);
    let id = only(&commands, "deallocate");
    // Meanwhile, a late write of a previous leader is stored, and the claim is deleted.
    let mut used = (*claim(&[&finalizer])).clone();
    used.metadata.resource_version = Some("5".to_owned());
    let deleted = json!("2026-01-01T00:00:00Z");
    used.metadata.deletion_timestamp = serde_json::from_value(deleted).expect("a time");
    used.status.driver_name = Some(DRIVER.to_owned());
    used.status.allocation = Some(AllocationResult::new(DRIVER, "{}"));
    used.status.reserved_for = vec![ResourceClaimConsumerReference::pod("pod", "pod")];
    state.apply(Event::Claim(Arc::new(used.clone())), now);
    let mut commands = state.decide(now);
    commands.extend(answer(&mut state, id, Answer::Deallocated(Ok(())), now));
    assert!(
        matches!(commands.as_slice(), [Command::Observe(_)]),
        "{commands:?}"
    );
    // It is released when the pod has ended.
    used.metadata.resource_version = Some("6".to_owned());
    used.status.reserved_for.clear();
    state.apply(Event::Claim(Arc::new(used)), now);
    let id = only(&state.decide(now), "deallocate");
    let commands = answer(&mut state, id, Answer::Deallocated(Ok(())), now);
    assert!(
        matches!(commands.as_slice(), [Command::WriteClaim { .. }]),
        "{commands:?}"
    );
}

#[test]
fn an_allocation_recorded_after_clearing_keeps_the_finalizer() {
    let now = Moment::default();
    let allocated = |version: &str, requested: bool| {
        let mut claim = (*claim(&[&format!("{DRIVER}/deletion-protection")])).clone();
        claim.metadata.resource_version = Some(version.to_owned());
        claim.status.driver_name = Some(DRIVER.to_owned());
        claim.status.allocation = Some(AllocationResult::new(DRIVER, "{}"));
        claim.status.deallocation_requested = requested;
        Arc::new(claim)
    };
    for is_recorded in [false, true] {
        let (mut state, commands) = started(vec![allocated("2", true)], Vec::new(), now);
        let id = only(&commands, "deallocate");
        let commands = answer(&mut state, id, Answer::Deallocated(Ok(())), now);
        let id = only(&commands, "clear");
        // A late write of a previous leader is stored after the clearing, and seen before its answer.
        if is_recorded {
            state.apply(Event::Claim(allocated("4", false)), now);
        }
        let mut cleared = (*claim(&[&format!("{DRIVER}/deletion-protection")])).clone();
        cleared.metadata.resource_version = Some("3".to_owned());
        let done = Answer::ClaimWritten(Outcome::Done(Arc::new(cleared)));
        let commands = answer(&mut state, id, done, now);
        let removes = |command: &Command| {
            let Command::WriteClaim { write, .. } = command else {
                return false;
            };
            matches!(write, ClaimWrite::RemoveFinalizer { .. })
        };
        assert_eq!(commands.iter().any(removes), !is_recorded, "{commands:?}");
    }
}

#[test]
fn a_report_that_was_not_written_is_made_again() {
    let start = Moment::default();
    let minute = start.after(Duration::from_secs(60));
    let reports = |commands: Vec<Command>| -> Vec<EventReport> {
        let reports = commands.into_iter().filter_map(|command| match command {
            Command::Report(report) => Some(report),
            _ => None,
        });
        reports.collect()
    };
    let immediate = object::<ResourceClaim>(json!({
        "metadata": { "namespace": "default", "name": "immediate", "uid": "immediate", "resourceVersion": "2" },
        "spec": { "resourceClassName": "missing", "allocationMode": "Immediate" },
    }));
    let claims = vec![claim(&[]), immediate];
    let (mut state, commands) = started(claims, vec![context("3", &json!({}))], start);
    let of_claim = commands.iter().find_map(|command| match command {
        Command::Report(report) => Some(report.clone()),
        _ => None,
    });
    let of_claim = of_claim.expect("its class does not exist");
    let read = commands.iter().find_map(|command| match command {
        Command::ReadPod { id, .. } => Some(*id),
        _ => None,
    });
    state.apply(Event::ClassGone("class".to_owned()), start);
    let pod = Answer::PodRead(Ok(Some(pod(&json!({ "resourceClaimName": "claim" })))));
    let reported = reports(answer(&mut state, read.expect("the pod is read"), pod, start));
    let [of_pod] = reported.as_slice() else {
        panic!("{reported:?}")
    };
    assert_eq!(reports(state.decide(minute)), [], "a report is not repeated");

    let mut unwritten = vec![of_claim, of_pod.clone()];
    for report in &unwritten {
        state.apply(Event::ReportFailed(report.clone()), minute);
    }
    assert_eq!(
        reports(state.decide(minute)),
        [],
        "the report was dropped, but its retry is not due"
    );
    let mut again = reports(state.decide(minute.after(Duration::from_secs(60))));
    for all in [&mut unwritten, &mut again] {
        all.sort_by(|left, right| left.regarding.cmp(&right.regarding));
    }
    assert_eq!(again, unwritten);
    // An outdated message, or a report about another object of that name, changes nothing.
    let mut old = of_pod.clone();
    old.message = "older".to_owned();
    state.apply(Event::ReportFailed(old), minute);
    let far = minute.after(Duration::from_secs(180));
    assert_eq!(reports(state.decide(far)), []);
}
