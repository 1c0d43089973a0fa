//! Writes that the server persistently refuses or fails to store, for example because of an admission policy or webhook.

use std::sync::Arc;
use std::time::Duration;

use drayman::api::resource::ResourceClaim;
use drayman::core::claims::{Answer, ClaimWrite, Command, DriverRequest, Event, Moment, Outcome};
use serde_json::{Value, json};

use super::{DRIVER, object, started};

const TEN_MINUTES: Duration = Duration::from_secs(600);

fn claim(metadata: &Value, status: &Value) -> Arc<ResourceClaim> {
    let mut metadata = metadata.clone();
    for (key, value) in [
        ("namespace", "default"),
        ("name", "claim"),
        ("uid", "claim"),
        ("resourceVersion", "2"),
    ] {
        metadata[key] = json!(value);
    }
    object(json!({
        "metadata": metadata,
        "spec": { "resourceClassName": "class", "allocationMode": "Immediate" },
        "status": status,
    }))
}

fn pending_claim() -> Arc<ResourceClaim> {
    claim(&json!({}), &json!({}))
}

fn deleted_claim() -> Arc<ResourceClaim> {
    let finalizer = format!("{DRIVER}/deletion-protection");
    claim(
        &json!({ "finalizers": [finalizer], "deletionTimestamp": "2026-01-01T00:00:00Z" }),
        &json!({ "driverName": DRIVER, "allocation": {} }),
    )
}

/// For ten minutes, answers each write with this outcome, each read with the claim, and each driver call with success. Returns the number
/// of writes and the reports as reason and message.
fn ten_minutes(
    claim: &Arc<ResourceClaim>,
    outcome: &Outcome<Arc<ResourceClaim>>,
) -> (usize, Vec<(&'static str, String)>) {
    let mut now = Moment::default();
    let (mut state, commands) = started(Vec::new(), Vec::new(), now);
    assert_eq!(commands, []);
    state.apply(Event::Claim(claim.clone()), now);
    let (mut writes, mut reports) = (0, Vec::new());
    while now.since_start() < TEN_MINUTES {
        let commands = state.decide(now);
        if commands.is_empty() {
            let Some(next) = state.next_deadline() else { break };
            now = next;
        }
        for command in commands {
            let (id, answer) = match command {
                Command::WriteClaim { id, write, .. } => {
                    let expected = matches!(
                        write,
                        ClaimWrite::AddFinalizer { .. } | ClaimWrite::RemoveFinalizer { .. }
                    );
                    assert!(expected, "{write:?}");
                    writes += 1;
                    (id, Answer::ClaimWritten(outcome.clone()))
                }
                Command::ReadClaim { id, .. } => (id, Answer::ClaimRead(Ok(Some(claim.clone())))),
                Command::CallDriver { id, request } => {
                    assert!(matches!(request, DriverRequest::Deallocate { .. }), "{request:?}");
                    (id, Answer::Deallocated(Ok(())))
                }
                Command::Report(report) => {
                    reports.push((report.reason, report.message));
                    continue;
                }
                Command::Observe(_) => continue,
                other => {
                    reports.push(("an unexpected command", format!("{other:?}")));
                    continue;
                }
            };
            state.apply(Event::Answer { id, answer }, now);
        }
    }
    (writes, reports)
}

#[test]
fn a_write_never_accepted_is_retried_rarely_and_reported_once() {
    let (policy, webhook, busy) = ("by a policy", "failed calling webhook", "too many requests");
    for (outcome, cause) in [
        (Outcome::Refused(policy.to_owned()), policy),
        (Outcome::Unknown(webhook.to_owned()), webhook),
        (Outcome::Busy(busy.to_owned()), busy),
    ] {
        for (claim, reason) in [
            (pending_claim(), "AllocationNotRecorded"),
            (deleted_claim(), "ReleaseRefused"),
        ] {
            let (writes, reports) = ten_minutes(&claim, &outcome);
            assert!(
                (5..40).contains(&writes),
                "{reason}, {cause}: {writes} writes in ten minutes"
            );
            assert_eq!(reports.len(), 1, "{reason}, {cause}: {reports:?}");
            assert!(
                reports[0].0 == reason && reports[0].1.ends_with(cause),
                "{cause}: {reports:?}"
            );
        }
    }
}
