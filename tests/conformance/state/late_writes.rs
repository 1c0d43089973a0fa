//! A write with a lost answer is stored late, after a second write of the same allocation was refused.

use std::sync::Arc;
use std::time::Duration;

use drayman::api::resource::{AllocationResult, ResourceClaim};
use drayman::core::claims::{Answer, Command, ControllerState, Event, Moment, Outcome};
use serde_json::json;

use super::{DRIVER, answer, object, only, started};

/// How long a write without an answer may still be stored.
const LATE_WRITE_WINDOW: Duration = Duration::from_secs(60);

fn claim(version: &str, allocation: Option<&AllocationResult>) -> Arc<ResourceClaim> {
    object(json!({
        "metadata": { "namespace": "default", "name": "claim", "uid": "claim", "resourceVersion": version,
            "finalizers": [format!("{DRIVER}/deletion-protection")],
            "labels": { format!("{DRIVER}/node"): "Any" } },
        "spec": { "resourceClassName": "class", "allocationMode": "Immediate" },
        "status": { "driverName": allocation.map(|_| DRIVER), "allocation": allocation },
    }))
}

/// The first write of the allocation had no clear result, the second one was refused, and both reads returned the claim without an
/// allocation. Returns the state, the time at which the first write timed out, and the allocation.
fn refused_after_an_unclear_write() -> (ControllerState, Moment, AllocationResult) {
    let mut now = Moment::default();
    let (mut state, commands) = started(Vec::new(), Vec::new(), now);
    assert_eq!(commands, []);
    state.apply(Event::Claim(claim("2", None)), now);
    let mut commands = state.decide(now);
    // Claims with the finalizer are passed to the driver.
    commands.retain(|command| !matches!(command, Command::Observe(_)));
    let allocation = AllocationResult::new(DRIVER, "{}");
    let allocated = Answer::Allocated(Ok(vec![allocation.clone()]));
    let commands = answer(&mut state, only(&commands, "allocate"), allocated, now);
    let first = only(&commands, "record");
    now = now.after(Duration::from_secs(5));
    let timed_out = now;
    let unclear = Answer::ClaimWritten(Outcome::Unknown("no answer".to_owned()));
    let commands = answer(&mut state, first, unclear, now);
    let read = only(&commands, "read claim");
    let commands = answer(
        &mut state,
        read,
        Answer::ClaimRead(Ok(Some(claim("2", None)))),
        now,
    );
    assert_eq!(commands, [], "a short delay");
    now = state.next_deadline().expect("the next attempt");
    let second = only(&state.decide(now), "record");
    let refused = Answer::ClaimWritten(Outcome::Refused("by a webhook".to_owned()));
    let mut commands = answer(&mut state, second, refused, now);
    if commands.is_empty() {
        now = state.next_deadline().expect("the read");
        commands = state.decide(now);
    }
    let read = only(&commands, "read claim");
    let commands = answer(
        &mut state,
        read,
        Answer::ClaimRead(Ok(Some(claim("2", None)))),
        now,
    );
    assert_eq!(
        commands,
        [],
        "the first write may still be stored: nothing is released yet"
    );
    assert!(now < timed_out.after(LATE_WRITE_WINDOW));
    (state, timed_out, allocation)
}

#[test]
fn an_unrecorded_allocation_is_returned_after_a_read() {
    let (mut state, timed_out, _) = refused_after_an_unclear_write();
    let end = timed_out.after(LATE_WRITE_WINDOW);
    assert_eq!(state.next_deadline(), Some(end));
    let read = only(&state.decide(end), "read claim");
    // A failed read does not free the allocation.
    let commands = answer(&mut state, read, Answer::ClaimRead(Err("busy".to_owned())), end);
    assert_eq!(commands, []);
    let now = state.next_deadline().expect("the next read");
    let read = only(&state.decide(now), "read claim");
    let mut commands = answer(
        &mut state,
        read,
        Answer::ClaimRead(Ok(Some(claim("2", None)))),
        now,
    );
    if commands.is_empty() {
        commands = state.decide(state.next_deadline().expect("a short delay"));
    }
    only(&commands, "deallocate");
}

#[test]
fn a_claim_recorded_by_the_first_write_keeps_its_devices() {
    for by_watch in [true, false] {
        let (mut state, timed_out, allocation) = refused_after_an_unclear_write();
        let recorded = claim("3", Some(&allocation));
        let mut commands = Vec::new();
        if by_watch {
            state.apply(Event::Claim(recorded), timed_out.after(Duration::from_secs(1)));
            commands.extend(state.decide(timed_out.after(Duration::from_secs(1))));
        } else {
            let end = timed_out.after(LATE_WRITE_WINDOW);
            let read = only(&state.decide(end), "read claim");
            commands.extend(answer(
                &mut state,
                read,
                Answer::ClaimRead(Ok(Some(recorded))),
                end,
            ));
        }
        commands.extend(state.decide(timed_out.after(Duration::from_secs(3600))));
        let calls = commands
            .iter()
            .filter(|command| matches!(command, Command::CallDriver { .. }));
        assert_eq!(calls.count(), 0, "{commands:?}");
        assert!(!state.is_busy());
    }
}
