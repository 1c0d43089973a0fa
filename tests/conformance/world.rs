//! What a real control plane cannot be made to show in a test's time: long waits, news that were missed, objects that its own
//! checks refuse. The pure core, with a clock of the test's.

mod early;
mod late;
mod owners;
mod refused;

use std::sync::Arc;
use std::time::Duration;

use drayman::api::resource::{Pod, PodSchedulingContext, ResourceClaim, ResourceClass};
use drayman::core::claims::{
    Answer, CallId, Command, ControllerState, DriverRequest, Event, Moment, ObjectKey, Outcome, Report,
    Settings,
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

/// A world that has listed these and whose driver is ready, and what it does first.
fn world(
    claims: Vec<Arc<ResourceClaim>>,
    contexts: Vec<Arc<PodSchedulingContext>>,
    now: Moment,
) -> (ControllerState, Vec<Command>) {
    let mut world = ControllerState::new(Settings::new(DRIVER));
    world.apply(Event::Classes(vec![class()]), now);
    world.apply(Event::Claims(claims), now);
    world.apply(Event::Contexts(contexts), now);
    let commands = world.decide(now);
    assert!(matches!(
        commands.as_slice(),
        [Command::Observe(Observation::All(_)), Command::AwaitDriver]
    ));
    world.apply(Event::DriverReady, now);
    let commands = world.decide(now);
    (world, commands)
}

fn answer(world: &mut ControllerState, id: CallId, answer: Answer, now: Moment) -> Vec<Command> {
    world.apply(Event::Answer { id, answer }, now);
    world.decide(now)
}

#[test]
fn a_waiting_pod_costs_nothing_for_five_minutes() {
    let mut now = Moment::default();
    let (mut world, commands) = world(vec![claim(&[])], vec![context("3", &json!({}))], now);
    let [Command::ReadPod { id, .. }] = commands.as_slice() else {
        panic!("{commands:?}")
    };
    let commands = answer(
        &mut world,
        *id,
        Answer::PodRead(Ok(Some(pod(&json!({ "resourceClaimName": "claim" }))))),
        now,
    );
    let [
        Command::CallDriver {
            id,
            request: DriverRequest::UnsuitableNodes { .. },
        },
    ] = commands.as_slice()
    else {
        panic!("{commands:?}")
    };
    let full = UnsuitableNodes::from(["a", "b"].map(|node| (node.to_owned(), "full".to_owned())));
    let commands = answer(&mut world, *id, Answer::Evaluated(Ok(vec![full.clone()])), now);
    let [Command::Report(_), Command::WriteContext { id, entries, .. }] = commands.as_slice() else {
        panic!("{commands:?}")
    };
    assert_eq!(entries[0].unsuitable_nodes, ["a", "b"]);
    let written = context(
        "4",
        &json!({ "resourceClaims": [{ "name": "device", "unsuitableNodes": ["a", "b"] }] }),
    );
    let commands = answer(
        &mut world,
        *id,
        Answer::ContextWritten(Outcome::Done(written)),
        now,
    );
    assert_eq!(commands, []);
    for _ in 0..3 {
        let next = world.next_deadline().expect("the slow recheck");
        let wait = next.since_start().saturating_sub(now.since_start());
        assert!(
            wait >= Duration::from_secs(300) && wait <= Duration::from_secs(420),
            "{wait:?}"
        );
        now = next;
        let commands = world.decide(now);
        let [
            Command::CallDriver {
                id,
                request: DriverRequest::UnsuitableNodes { .. },
            },
        ] = commands.as_slice()
        else {
            panic!("{commands:?}")
        };
        assert_eq!(
            answer(&mut world, *id, Answer::Evaluated(Ok(vec![full.clone()])), now),
            [],
            "an unchanged answer"
        );
    }
    assert_eq!(world.statistics().caught_by_recheck, 0);
}

#[test]
fn reasons_of_waiting_pods_and_wake_up_times_are_counted() {
    let start = Moment::default();
    let (mut world, commands) = world(vec![claim(&[])], vec![context("3", &json!({}))], start);
    let [Command::ReadPod { id, .. }] = commands.as_slice() else {
        panic!("{commands:?}")
    };
    let queue = |world: &ControllerState, name| world.statistics().queues[name];
    assert_eq!(queue(&world, "context").under_way, 1);
    let read = Answer::PodRead(Ok(Some(pod(&json!({ "resourceClaimName": "claim" })))));
    let commands = answer(&mut world, *id, read, start.after(Duration::from_secs(2)));
    let [Command::CallDriver { id, .. }] = commands.as_slice() else {
        panic!("{commands:?}")
    };
    assert_eq!(queue(&world, "context").worked.sum(), Duration::from_secs(2));
    let waiting = |world: &ControllerState| -> Vec<(&'static str, u64)> {
        let all = world.statistics().waiting;
        all.into_iter().filter(|(_, count)| *count > 0).collect()
    };
    let full = |nodes: &[&str]| {
        let unsuitable_nodes = nodes.iter().map(|node| ((*node).to_owned(), "full".to_owned()));
        Answer::Evaluated(Ok(vec![unsuitable_nodes.collect()]))
    };
    assert_eq!(waiting(&world), []);
    let commands = answer(&mut world, *id, full(&["a", "b"]), start);
    let [Command::Report(_), Command::WriteContext { id, .. }] = commands.as_slice() else {
        panic!("{commands:?}")
    };
    assert_eq!(waiting(&world), [("NoSuitableDevice", 1)]);
    assert_eq!(world.statistics().reports["NoSuitableDevice"], 1);
    let entry =
        |nodes: &[&str]| json!({ "resourceClaims": [{ "name": "device", "unsuitableNodes": nodes }] });
    let written = Answer::ContextWritten(Outcome::Done(context("4", &entry(&["a", "b"]))));
    answer(&mut world, *id, written, start);

    // Something becomes free, and the scheduler is told of the node three seconds later.
    let now = start.after(Duration::from_secs(60));
    let change = CapacityChange::new(CapacityCause::Freed).for_pods(1);
    world.apply(Event::Capacity(change), now);
    let commands = world.decide(now);
    let [Command::CallDriver { id, .. }] = commands.as_slice() else {
        panic!("{commands:?}")
    };
    let commands = answer(&mut world, *id, full(&["b"]), now);
    let [Command::WriteContext { id, .. }] = commands.as_slice() else {
        panic!("{commands:?}")
    };
    assert_eq!(waiting(&world), [("SomeNodesUnsuitable", 1)]);
    assert_eq!(
        world.statistics().wake_ups.count(),
        0,
        "nobody has heard of it yet"
    );
    let written = Answer::ContextWritten(Outcome::Done(context("5", &entry(&["b"]))));
    answer(&mut world, *id, written, now.after(Duration::from_secs(3)));
    let woken = world.statistics().wake_ups;
    assert_eq!((woken.count(), woken.sum()), (1, Duration::from_secs(3)));

    // The pod is gone, and waits for nothing any more.
    let (key, uid) = (ObjectKey::new("default", "pod"), "context".to_owned());
    world.apply(Event::ContextGone { key, uid }, now);
    assert_eq!(waiting(&world), []);
    let counted = world.statistics();
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
    let (mut world, commands) = world(vec![claim(&[])], vec![context("3", &json!({}))], now);
    let [Command::ReadPod { id, .. }] = commands.as_slice() else {
        panic!("{commands:?}")
    };
    let read = Answer::PodRead(Ok(Some(pod(&json!({ "resourceClaimName": "claim" })))));
    let commands = answer(&mut world, *id, read, now);
    let [Command::CallDriver { id, .. }] = commands.as_slice() else {
        panic!("{commands:?}")
    };
    let commands = answer(
        &mut world,
        *id,
        Answer::Evaluated(Ok(vec![UnsuitableNodes::new()])),
        now,
    );
    let [Command::WriteContext { id, .. }] = commands.as_slice() else {
        panic!("{commands:?}")
    };
    let answered = json!({ "resourceClaims": [{ "name": "device" }] });
    let written = Answer::ContextWritten(Outcome::Done(context("5", &answered)));
    assert_eq!(answer(&mut world, *id, written, now), []);
    // The watch is behind: what it shows is older than the answer that was stored, which is not written again.
    world.apply(Event::Context(context("4", &json!({}))), now);
    assert_eq!(world.decide(now), []);

    // The same for a claim: its finalizer is stored once.
    let mut selected = (*context("6", &answered)).clone();
    selected.spec.selected_node = "a".to_owned();
    world.apply(Event::Context(Arc::new(selected)), now);
    let mut commands = world.decide(now);
    // It is asked about the node first if it likes to be sure.
    if let [
        Command::CallDriver {
            id,
            request: DriverRequest::UnsuitableNodes { .. },
        },
    ] = commands.as_slice()
    {
        commands = answer(
            &mut world,
            *id,
            Answer::Evaluated(Ok(vec![UnsuitableNodes::new()])),
            now,
        );
    }
    let [Command::WriteClaim { id, .. }] = commands.as_slice() else {
        panic!("{commands:?}")
    };
    let mut secured = (*claim(&[&format!("{DRIVER}/deletion-protection")])).clone();
    secured.metadata.resource_version = Some("8".to_owned());
    let written = Answer::ClaimWritten(Outcome::Done(Arc::new(secured)));
    let commands = answer(&mut world, *id, written, now);
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
    world.apply(Event::Claim(Arc::new(older)), now);
    assert_eq!(world.decide(now), []);
}

#[test]
fn a_context_that_is_not_about_us_is_never_looked_at_again() {
    let now = Moment::default();
    let (world, commands) = world(Vec::new(), vec![context("3", &json!({}))], now);
    assert_eq!((commands, world.next_deadline()), (Vec::new(), None));
}

#[test]
fn an_entry_of_a_pod_without_any_source_is_waited_for() {
    let now = Moment::default();
    let (mut world, commands) = world(vec![claim(&[])], vec![context("3", &json!({}))], now);
    let [Command::ReadPod { id, .. }] = commands.as_slice() else {
        panic!("{commands:?}")
    };
    let commands = answer(&mut world, *id, Answer::PodRead(Ok(Some(pod(&json!({}))))), now);
    assert_eq!((commands, world.next_deadline()), (Vec::new(), None));
}

#[test]
fn a_claim_whose_deletion_was_missed_is_gone_with_the_next_list() {
    let now = Moment::default();
    let finalizer = format!("{DRIVER}/deletion-protection");
    let (mut world, commands) = world(vec![claim(&[&finalizer])], Vec::new(), now);
    assert!(
        matches!(commands.as_slice(), [Command::CallDriver { .. }]),
        "what was left half done is given back"
    );
    let [Command::CallDriver { id, .. }] = commands.as_slice() else {
        panic!("{commands:?}")
    };
    world.apply(Event::Claims(Vec::new()), now);
    let gone = Command::Observe(Observation::Gone {
        uid: "claim".to_owned(),
    });
    assert_eq!(world.decide(now), [gone]);
    // Nothing of it is left: neither the answer that is still to come nor time leads to anything.
    assert_eq!(answer(&mut world, *id, Answer::Deallocated(Ok(())), now), []);
    assert_eq!(world.next_deadline(), None);
}

#[test]
fn a_driver_silent_for_a_minute_is_named_once() {
    let start = Moment::default();
    let other_class: Arc<ResourceClass> = object(
        json!({ "metadata": { "name": "theirs", "uid": "theirs", "resourceVersion": "1" }, "driverName": "other.example.com" }),
    );
    let other_claim = object(json!({
        "metadata": { "namespace": "default", "name": "other", "uid": "other", "resourceVersion": "2" },
        "spec": { "resourceClassName": "theirs" },
    }));
    let ours = json!({ "resourceClaims": [{ "name": "device" }] });
    let (mut world, _) = world(vec![claim(&[]), other_claim], Vec::new(), start);
    world.apply(Event::Class(other_class), start);
    world.apply(Event::Context(context("3", &ours)), start);
    let commands = world.decide(start);
    let [Command::ReadPod { id, .. }] = commands.as_slice() else {
        panic!("{commands:?}")
    };
    let pod = object(json!({
        "metadata": { "namespace": "default", "name": "pod", "uid": "pod" },
        "spec": { "resourceClaims": [
            { "name": "device", "source": { "resourceClaimName": "claim" } },
            { "name": "more", "source": { "resourceClaimName": "other" } },
        ] },
    }));
    let commands = answer(&mut world, *id, Answer::PodRead(Ok(Some(pod))), start);
    let [Command::CallDriver { id, .. }] = commands.as_slice() else {
        panic!("{commands:?}")
    };
    let judged = Answer::Evaluated(Ok(vec![UnsuitableNodes::new()]));
    assert_eq!(
        answer(&mut world, *id, judged, start),
        [],
        "our own answer stands"
    );
    assert_eq!(
        world.next_deadline(),
        Some(start.after(Settings::OTHER_DRIVER_WAIT))
    );

    // It answers in time, and then it is asked to allocate and does not.
    let now = start.after(Duration::from_secs(59));
    let answered =
        json!({ "resourceClaims": [{ "name": "device" }, { "name": "more", "unsuitableNodes": ["b"] }] });
    world.apply(Event::Context(context("4", &answered)), now);
    assert_eq!(world.decide(now), []);
    assert_eq!(world.decide(now.after(Duration::from_secs(3600))), []);
    let now = now.after(Duration::from_secs(3600));
    let allocated = json!({
        "metadata": { "namespace": "default", "name": "claim", "uid": "claim", "resourceVersion": "5" },
        "spec": { "resourceClassName": "class" },
        "status": { "driverName": DRIVER, "allocation": {} },
    });
    world.apply(Event::Claim(object(allocated)), now);
    let mut chosen = (*context("5", &answered)).clone();
    chosen.spec.selected_node = "a".to_owned();
    world.apply(Event::Context(Arc::new(chosen)), now);
    world.decide(now);
    let reports = |commands: Vec<Command>| -> Vec<String> {
        let reports = commands.into_iter().filter_map(|command| match command {
            Command::Report(report) => Some(report.message),
            _ => None,
        });
        reports.collect()
    };
    assert_eq!(
        reports(world.decide(now.after(Duration::from_secs(59)))),
        Vec::<String>::new()
    );
    let told = reports(world.decide(now.after(Duration::from_secs(60))));
    let [text] = told.as_slice() else {
        panic!("{told:?}")
    };
    assert!(
        text.contains("\"other.example.com\"") && text.contains("\"theirs\""),
        "{text}"
    );
    // Nothing more of it, whatever happens.
    world.apply(Event::Context(context("6", &ours)), now);
    world.decide(now.after(Duration::from_secs(100)));
    assert_eq!(
        reports(world.decide(now.after(Duration::from_secs(300)))),
        Vec::<String>::new()
    );
}

#[test]
fn a_report_that_was_not_written_is_made_again() {
    let start = Moment::default();
    let minute = start.after(Duration::from_secs(60));
    let reports = |commands: Vec<Command>| -> Vec<Report> {
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
    let (mut world, commands) = world(claims, vec![context("3", &json!({}))], start);
    let of_claim = commands.iter().find_map(|command| match command {
        Command::Report(report) => Some(report.clone()),
        _ => None,
    });
    let of_claim = of_claim.expect("its class does not exist");
    let read = commands.iter().find_map(|command| match command {
        Command::ReadPod { id, .. } => Some(*id),
        _ => None,
    });
    world.apply(Event::ClassGone("class".to_owned()), start);
    let pod = Answer::PodRead(Ok(Some(pod(&json!({ "resourceClaimName": "claim" })))));
    let told = reports(answer(&mut world, read.expect("the pod is read"), pod, start));
    let [of_pod] = told.as_slice() else {
        panic!("{told:?}")
    };
    assert_eq!(reports(world.decide(minute)), [], "what was told is not repeated");

    let mut unwritten = vec![of_claim, of_pod.clone()];
    for report in &unwritten {
        world.apply(Event::ReportFailed(report.clone()), minute);
    }
    assert_eq!(reports(world.decide(minute)), [], "there is no room yet");
    let mut again = reports(world.decide(minute.after(Duration::from_secs(60))));
    for all in [&mut unwritten, &mut again] {
        all.sort_by(|left, right| left.regarding.cmp(&right.regarding));
    }
    assert_eq!(again, unwritten);
    // A text that was replaced meanwhile, or is about another object of that name, changes nothing.
    let mut old = of_pod.clone();
    old.message = "older".to_owned();
    world.apply(Event::ReportFailed(old), minute);
    let far = minute.after(Duration::from_secs(180));
    assert_eq!(reports(world.decide(far)), []);
}
