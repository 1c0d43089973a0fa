//! A write whose answer was lost is stored later, after another write of the same was refused.

use std::sync::Arc;
use std::time::Duration;

use drayman::api::resource::{AllocationResult, ResourceClaim};
use drayman::core::claims::{
    Answer, CallId, ClaimWrite, Command, ControllerState, DriverRequest, Event, Moment, Outcome,
};
use serde_json::json;

use super::{DRIVER, answer, object, world};

/// For how long an allocation may be on its way when nobody waits for its answer any more.
const SETTLING: Duration = Duration::from_secs(60);

fn claim(version: &str, allocation: Option<&AllocationResult>) -> Arc<ResourceClaim> {
    object(json!({
        "metadata": { "namespace": "default", "name": "claim", "uid": "claim", "resourceVersion": version,
            "finalizers": [format!("{DRIVER}/deletion-protection")],
            "labels": { format!("{DRIVER}/node"): "Any" } },
        "spec": { "resourceClassName": "class", "allocationMode": "Immediate" },
        "status": { "driverName": allocation.map(|_| DRIVER), "allocation": allocation },
    }))
}

#[track_caller]
fn only(commands: &[Command], what: &str) -> CallId {
    let id = match commands {
        [Command::ReadClaim { id, .. }] if what == "read" => Some(*id),
        [
            Command::WriteClaim {
                id,
                write: ClaimWrite::Allocate { .. },
                ..
            },
        ] if what == "record" => Some(*id),
        [Command::CallDriver { id, request }] => {
            let name = match request {
                DriverRequest::Allocate { .. } => "allocate",
                DriverRequest::Deallocate { .. } => "deallocate",
                DriverRequest::UnsuitableNodes { .. } => "judge",
            };
            (name == what).then_some(*id)
        }
        _ => None,
    };
    assert!(id.is_some(), "not {what} alone: {commands:?}");
    id.expect("checked")
}

/// The first write of the allocation had no clear answer, and the second one was refused; each time the claim was read without an
/// allocation. Answers with the world, with when the first one was given up, and with what was allocated.
fn refused_after_an_unclear_write() -> (ControllerState, Moment, AllocationResult) {
    let mut now = Moment::default();
    let (mut world, commands) = world(Vec::new(), Vec::new(), now);
    assert_eq!(commands, []);
    world.apply(Event::Claim(claim("2", None)), now);
    let mut commands = world.decide(now);
    // A claim that has the finalizer is shown to the driver.
    commands.retain(|command| !matches!(command, Command::Observe(_)));
    let allocation = AllocationResult::new(DRIVER, "{}");
    let allocated = Answer::Allocated(Ok(vec![allocation.clone()]));
    let commands = answer(&mut world, only(&commands, "allocate"), allocated, now);
    let first = only(&commands, "record");
    now = now.after(Duration::from_secs(5));
    let given_up = now;
    let unclear = Answer::ClaimWritten(Outcome::Unknown("no answer".to_owned()));
    let commands = answer(&mut world, first, unclear, now);
    let read = only(&commands, "read");
    let commands = answer(
        &mut world,
        read,
        Answer::ClaimRead(Ok(Some(claim("2", None)))),
        now,
    );
    assert_eq!(commands, [], "a short delay");
    now = world.next_deadline().expect("the next attempt");
    let second = only(&world.decide(now), "record");
    let refused = Answer::ClaimWritten(Outcome::Refused("by a webhook".to_owned()));
    let mut commands = answer(&mut world, second, refused, now);
    if commands.is_empty() {
        now = world.next_deadline().expect("the read");
        commands = world.decide(now);
    }
    let read = only(&commands, "read");
    let commands = answer(
        &mut world,
        read,
        Answer::ClaimRead(Ok(Some(claim("2", None)))),
        now,
    );
    assert_eq!(
        commands,
        [],
        "the first write may still be stored: nothing is given back yet"
    );
    assert!(now < given_up.after(SETTLING));
    (world, given_up, allocation)
}

#[test]
fn an_unrecorded_allocation_is_returned_after_a_read() {
    let (mut world, given_up, _) = refused_after_an_unclear_write();
    let end = given_up.after(SETTLING);
    assert_eq!(world.next_deadline(), Some(end));
    let read = only(&world.decide(end), "read");
    // A server that does not answer does not make it free.
    let commands = answer(&mut world, read, Answer::ClaimRead(Err("busy".to_owned())), end);
    assert_eq!(commands, []);
    let now = world.next_deadline().expect("the next read");
    let read = only(&world.decide(now), "read");
    let mut commands = answer(
        &mut world,
        read,
        Answer::ClaimRead(Ok(Some(claim("2", None)))),
        now,
    );
    if commands.is_empty() {
        commands = world.decide(world.next_deadline().expect("a short delay"));
    }
    only(&commands, "deallocate");
}

#[test]
fn a_claim_recorded_by_the_first_write_keeps_its_devices() {
    for by_watch in [true, false] {
        let (mut world, given_up, allocation) = refused_after_an_unclear_write();
        let recorded = claim("3", Some(&allocation));
        let mut commands = Vec::new();
        if by_watch {
            world.apply(Event::Claim(recorded), given_up.after(Duration::from_secs(1)));
            commands.extend(world.decide(given_up.after(Duration::from_secs(1))));
        } else {
            let end = given_up.after(SETTLING);
            let read = only(&world.decide(end), "read");
            commands.extend(answer(
                &mut world,
                read,
                Answer::ClaimRead(Ok(Some(recorded))),
                end,
            ));
        }
        commands.extend(world.decide(given_up.after(Duration::from_secs(3600))));
        let calls = commands
            .iter()
            .filter(|command| matches!(command, Command::CallDriver { .. }));
        assert_eq!(calls.count(), 0, "{commands:?}");
        assert!(!world.is_busy());
    }
}
