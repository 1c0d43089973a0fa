//! When and how often the controller processes an object, and the cost of failures.

use std::time::{Duration, Instant};

use drayman::driver::DriverError;
use serde_json::json;

use crate::call::{Call, Request, count};
use crate::fake_driver::Action;
use crate::fixture::{assert_within, finalizers, names, rules_without, with_fixture};
use crate::harness::Entry;
use crate::objects::{ClaimSource, patch, touched};

fn broken() -> DriverError {
    DriverError::retry("Broken", "the device does not respond")
}

#[test]
fn three_kinds_are_watched_and_pods_are_read_one_by_one() -> anyhow::Result<()> {
    with_fixture("three-kinds", async |fixture| {
        let controller = fixture.start().await?;
        fixture.waiting_pod("pod", &["one"], "", &names(["node"])).await?;
        fixture.wait_until_evaluated("pod").await?;
        fixture.fence().await?;
        let user = controller.user.clone();
        // The audit log has watches when they end.
        controller.stop().await?;
        let entries = fixture.cluster.audit().of_user(&user).await?;
        let mut kinds: Vec<String> = entries
            .iter()
            .map(|entry| format!("{} {}", entry.verb, entry.resource))
            .collect();
        kinds.sort();
        kinds.dedup();
        assert_eq!(
            kinds,
            [
                "get ",
                "get pods",
                "list podschedulingcontexts",
                "list resourceclaims",
                "list resourceclasses",
                "patch podschedulingcontexts",
                "patch resourceclaims",
                "watch podschedulingcontexts",
                "watch resourceclaims",
                "watch resourceclasses",
            ]
        );
        let watched = entries
            .iter()
            .filter(|entry| ["list", "watch"].contains(&entry.verb.as_str()));
        for entry in watched {
            assert_eq!(entry.namespace, "", "cluster-wide: {}", entry.uri);
        }
        let reads = entries
            .iter()
            .filter(|entry| entry.resource == "pods" && entry.name == "pod")
            .count();
        assert_eq!(reads, 1, "a pod is read once for its context");
        Ok(())
    })
}

#[test]
fn nothing_is_asked_before_all_three_kinds_are_listed() -> anyhow::Result<()> {
    for resource in ["resourceclaims", "resourceclasses", "podschedulingcontexts"] {
        with_fixture(&format!("barrier-{resource}"), async |fixture| {
            fixture.immediate("one").await?;
            let rules = rules_without(resource, "list");
            let controller = fixture.start_with(&rules).await?;
            // By the second refusal everything else is listed.
            fixture
                .wait_for_entries(&controller, "refuses the list twice", |entries| {
                    let refused = |entry: &&Entry| entry.verb == "list" && entry.code == 403;
                    entries.iter().filter(refused).count() >= 2
                })
                .await?;
            assert_eq!(
                fixture.driver.call_summaries(),
                Vec::<String>::new(),
                "{resource}"
            );
            assert_eq!(fixture.driver.observed(), [], "{resource}");
            fixture.allow(&controller).await?;
            fixture.wait_until_allocated("one").await?;
            assert!(
                !fixture.driver.observed().is_empty(),
                "it observes existing claims before the first call"
            );
            controller.stop().await
        })?;
    }
    Ok(())
}

#[test]
fn nothing_is_asked_before_the_driver_is_ready() -> anyhow::Result<()> {
    with_fixture("not-ready", async |fixture| {
        fixture.driver.set_unready();
        fixture.immediate("one").await?;
        fixture
            .waiting_pod("pod", &["two"], "node", &names(["node"]))
            .await?;
        let controller = fixture.start().await?;
        fixture
            .driver
            .wait_for("observe existing claims", |_| {
                !fixture.driver.observed().is_empty()
            })
            .await?;
        // No finalizer was stored, so nothing keeps the claim.
        fixture.delete_claim("one").await?;
        fixture.wait_until_gone("one").await?;
        assert_eq!(fixture.driver.call_summaries(), Vec::<String>::new());
        assert_eq!(fixture.requests(&controller).await?, Vec::<String>::new());
        fixture.driver.set_ready();
        fixture.wait_until_allocated("two").await?;
        controller.stop().await
    })
}

#[test]
fn the_start_first_rolls_back_partial_work_and_then_serves() -> anyhow::Result<()> {
    with_fixture("start", async |fixture| {
        fixture.immediate("immediate").await?;
        fixture
            .waiting_pod("pod", &["delayed"], "node", &names(["node"]))
            .await?;
        let half_done = json!({ "name": "half-done", "finalizers": [fixture.finalizer()] });
        fixture.create_claim(json!({ "metadata": half_done })).await?;
        let controller = fixture.start().await?;
        fixture.wait_until_allocated("immediate").await?;
        fixture.wait_until_allocated("delayed").await?;
        fixture.fence().await?;
        let mut summaries = fixture.driver.call_summaries();
        summaries.sort();
        assert_eq!(
            summaries,
            [
                "allocate delayed",
                "allocate immediate",
                "deallocate half-done",
                "evaluate delayed"
            ]
        );
        controller.stop().await
    })
}

#[test]
fn calls_overlap_for_different_claims_but_never_for_one() -> anyhow::Result<()> {
    with_fixture("overlap", async |fixture| {
        fixture.driver.on(Request::is_allocate, Action::Wait);
        let controller = fixture.start().await?;
        fixture.immediate("one").await?;
        fixture.waiting_pod("pod", &["two"], "node", &[]).await?;
        fixture.wait_for_calls("allocate", 2..=2).await?;
        // Changes that could trigger another call while the allocation is running.
        for name in ["one", "two"] {
            fixture.patch_claim(name, touched()).await?;
            fixture.delete_claim(name).await?;
        }
        fixture.select_node("pod", "other").await?;
        fixture.fence().await?;
        assert_eq!(
            fixture
                .driver
                .calls()
                .iter()
                .filter(|call| call.ended.is_none())
                .count(),
            2
        );
        assert_eq!(count(&fixture.driver.calls(), Request::is_deallocate), 0);
        fixture.driver.resume_calls();
        fixture.wait_until_gone("one").await?;
        fixture.wait_until_gone("two").await?;
        for name in ["one", "two"] {
            assert_sequential(&fixture.driver.calls(), name);
        }
        assert_eq!(fixture.driver.counts(), (2, 2), "unused allocations are released");
        controller.stop().await
    })
}

fn assert_sequential(calls: &[Call], claim: &str) {
    let calls: Vec<&Call> = calls.iter().filter(|call| call.request.is_about(claim)).collect();
    for (before, after) in calls.iter().zip(calls.iter().skip(1)) {
        assert!(
            before.ended.is_some_and(|ended| ended <= after.began),
            "{calls:#?}"
        );
    }
}

#[test]
fn every_change_is_processed_and_only_relevant_ones_call() -> anyhow::Result<()> {
    with_fixture("at-once", async |fixture| {
        let controller = fixture.start().await?;
        fixture
            .waiting_pod("pod", &["one"], "", &names(["a", "b"]))
            .await?;
        fixture.wait_until_evaluated("pod").await?;
        fixture.patch_claim("one", touched()).await?;
        patch(&fixture.contexts(), "pod", touched()).await?;
        fixture.fence().await?;
        assert_eq!(fixture.driver.call_summaries(), ["evaluate one"]);
        assert_eq!(
            fixture.requests(&controller).await?,
            ["get pods 200", "patch podschedulingcontexts/status 200"]
        );

        let changed = Instant::now();
        fixture
            .reschedule("pod", json!({ "potentialNodes": ["a", "b", "c"] }))
            .await?;
        fixture
            .driver
            .wait_for_last_calls(&["evaluate one", "evaluate one"])
            .await?;
        fixture.select_node("pod", "c").await?;
        fixture.wait_until_allocated("one").await?;
        assert_within(changed, 30);
        controller.stop().await
    })
}

#[test]
fn failures_are_retried_with_a_delay_that_a_change_ends() -> anyhow::Result<()> {
    with_fixture("backoff", async |fixture| {
        fixture.driver.on(Request::is_allocate, Action::Fail(broken()));
        let controller = fixture.start().await?;
        fixture.immediate("one").await?;
        let calls = fixture.wait_for_calls("allocate", 9..).await?;
        let starts: Vec<Instant> = calls
            .iter()
            .filter(|call| call.request.is_allocate())
            .map(|call| call.began)
            .collect();
        for (number, pair) in starts.windows(2).enumerate() {
            let least = Duration::from_millis(100) * (1 << number);
            assert!(
                pair[1] - pair[0] >= least,
                "delay {number} is {:?}",
                pair[1] - pair[0]
            );
        }
        // The next attempt is due in 25.6 s; a deletion does not wait for it.
        let deleted = Instant::now();
        fixture.delete_claim("one").await?;
        fixture.wait_until_gone("one").await?;
        assert_within(deleted, 22);

        // Nor does a pod with a new selected node.
        fixture.driver.rule(|request| match request {
            Request::Evaluate { nodes, .. } if nodes.iter().any(|node| node == "bad") => {
                Action::Fail(broken())
            }
            _ => Action::Proceed,
        });
        fixture.waiting_pod("pod", &["two"], "bad", &[]).await?;
        fixture.wait_for_calls("evaluate", 9..).await?;
        let rescheduled = Instant::now();
        fixture.select_node("pod", "good").await?;
        fixture.wait_until_allocated("two").await?;
        assert_within(rescheduled, 22);

        // Nor does a claim whose class is fixed.
        fixture.driver.rule(|request| match request {
            Request::Class(class) if class.parameters_ref.is_none() => Action::Fail(broken()),
            _ => Action::Proceed,
        });
        fixture.immediate("three").await?;
        fixture.waiting_pod("waits", &["four"], "node", &[]).await?;
        let before = fixture.driver.calls().len();
        fixture
            .driver
            .wait_for("read the class eighteen times", move |calls| {
                calls.len() >= before + 18
            })
            .await?;
        let fixed = Instant::now();
        fixture
            .patch_class(
                &fixture.name,
                json!({ "parametersRef": { "kind": "ConfigMap", "name": "new" } }),
            )
            .await?;
        fixture.wait_until_allocated("three").await?;
        fixture.wait_until_allocated("four").await?;
        assert_within(fixed, 22);
        controller.stop().await
    })
}

#[test]
fn each_object_has_its_own_delay_and_loses_it_when_deleted() -> anyhow::Result<()> {
    with_fixture("own-delay", async |fixture| {
        fixture.driver.on(Request::is_allocate, Action::Fail(broken()));
        let controller = fixture.start().await?;
        fixture.immediate("one").await?;
        fixture.wait_for_calls("allocate", 9..).await?;
        // The next attempt is due in 25.6 s. Another object has its own delay and reaches its fourth attempt after 700 ms.
        let started = Instant::now();
        fixture.immediate("beside").await?;
        fixture.wait_for_calls("allocate beside", 4..).await?;
        assert_within(started, 22);
        fixture.delete_claim("beside").await?;
        fixture.delete_claim("one").await?;
        fixture.wait_until_gone("one").await?;
        // Deletion resets the delay: a new claim of the same name starts with the shortest delay.
        let attempts = |request: &Request| request.is_allocate() && request.is_about("one");
        let before = count(&fixture.driver.calls(), attempts);
        let recreated = Instant::now();
        fixture.immediate("one").await?;
        fixture.wait_for_calls("allocate one", before + 4..).await?;
        assert_within(recreated, 22);
        fixture.delete_claim("one").await?;
        fixture.wait_until_gone("one").await?;
        controller.stop().await
    })
}

#[test]
fn an_error_is_reported_once_as_a_warning_by_the_driver() -> anyhow::Result<()> {
    with_fixture("reported-once", async |fixture| {
        fixture.driver.on(Request::is_evaluate, Action::Fail(broken()));
        let controller = fixture.start().await?;
        let pod = fixture.waiting_pod("pod", &["one"], "", &names(["node"])).await?;
        fixture.wait_for_calls("evaluate", 4..).await?;
        let event = fixture
            .wait_for_event("pod", "Broken", "the device does not respond")
            .await?;
        assert_eq!(event.type_.as_deref(), Some("Warning"));
        assert_eq!(event.reporting_component, Some(fixture.driver_name()));
        assert_eq!(event.involved_object.kind.as_deref(), Some("Pod"));
        assert_eq!(event.involved_object.uid, pod.metadata.uid);
        // A changed message is reported once.
        fixture.driver.on(
            Request::is_evaluate,
            Action::Fail(DriverError::retry("Broken", "the device is broken")),
        );
        fixture.wait_for_event("pod", "Broken", "is broken").await?;
        let before = fixture.driver.calls().len();
        fixture
            .driver
            .wait_for("evaluate twice more", move |calls| calls.len() >= before + 2)
            .await?;
        fixture.driver.clear_rule();
        fixture.wait_until_evaluated("pod").await?;
        assert_eq!(fixture.events("pod").await?.len(), 2);
        controller.stop().await
    })
}

#[test]
fn a_busy_second_writer_costs_no_failed_write() -> anyhow::Result<()> {
    with_fixture("second-writer", async |fixture| {
        let controller = fixture.start().await?;
        let claims: Vec<String> = (0..8).map(|number| format!("claim-{number}")).collect();
        for name in &claims {
            fixture.waiting_pod(name, &[name], "", &[]).await?;
        }
        let unrelated_writes = async {
            for round in 0_u32.. {
                let labels = json!({ "metadata": { "labels": { "round": round.to_string() } } });
                for name in &claims {
                    fixture.patch_claim(name, labels.clone()).await?;
                    patch(&fixture.contexts(), name, labels.clone()).await?;
                }
            }
            anyhow::Ok(())
        };
        let scheduled = async {
            for name in &claims {
                fixture
                    .reschedule(name, json!({ "potentialNodes": ["node"] }))
                    .await?;
                fixture.wait_until_evaluated(name).await?;
                fixture.select_node(name, "node").await?;
            }
            for name in &claims {
                fixture.wait_until_allocated(name).await?;
            }
            anyhow::Ok(())
        };
        tokio::select! {
            result = unrelated_writes => result?,
            result = scheduled => result?,
        }
        fixture.assert_none_failed(&controller).await?;
        assert_eq!(fixture.driver.counts(), (8, 0));
        controller.stop().await
    })
}

#[test]
fn a_claim_recreated_under_its_name_is_another_claim() -> anyhow::Result<()> {
    with_fixture("recreated", async |fixture| {
        fixture.driver.on(Request::is_allocate, Action::Wait);
        let controller = fixture.start().await?;
        let first = fixture.immediate("one").await?;
        fixture.wait_for_calls("allocate", 1..=1).await?;
        // A user removes the finalizer.
        fixture
            .patch_claim("one", json!({ "metadata": { "finalizers": null } }))
            .await?;
        fixture.delete_claim("one").await?;
        fixture.wait_until_gone("one").await?;
        let second = fixture.immediate("one").await?;
        fixture.driver.resume_calls();
        let claim = fixture.wait_until_allocated("one").await?;
        assert_eq!(claim.metadata.uid, second.metadata.uid);
        assert_eq!(finalizers(&claim), [fixture.finalizer()]);
        let calls = fixture.wait_for_calls("deallocate", 1..).await?;
        for call in calls.iter().filter(|call| call.request.is_deallocate()) {
            assert!(
                matches!(&call.request, Request::Deallocate { claim, .. } if claim.metadata.uid == first.metadata.uid)
            );
        }
        fixture.fence().await?;
        assert_eq!(fixture.driver.counts(), (2, 1));
        controller.stop().await
    })
}

#[test]
fn a_claim_being_deallocated_gets_no_new_pod() -> anyhow::Result<()> {
    with_fixture("no-new-user", async |fixture| {
        let controller = fixture.start().await?;
        for name in ["deleted", "released"] {
            fixture
                .waiting_pod(&format!("first-{name}"), &[name], "node", &names(["node"]))
                .await?;
            fixture.wait_until_allocated(name).await?;
        }
        fixture.driver.on(Request::is_deallocate, Action::Wait);
        for name in ["deleted", "released"] {
            fixture.remove_pod(&format!("first-{name}")).await?;
            fixture.request_deallocation(name).await?;
            fixture
                .wait_for_claim(name, "unused", |claim| claim.status.reserved_for.is_empty())
                .await?;
        }
        fixture.delete_claim("deleted").await?;
        fixture.wait_for_calls("deallocate", 2..=2).await?;
        let before = fixture.driver.call_summaries();
        for name in ["deleted", "released"] {
            let pod = fixture.pod(name, &[("device", ClaimSource::Claim(name))]).await?;
            fixture.context(&pod, "node", &names(["node"])).await?;
        }
        fixture.fence().await?;
        assert_eq!(
            fixture.driver.call_summaries(),
            before,
            "no node is evaluated either"
        );
        for name in ["deleted", "released"] {
            let claim = fixture.claims().get(name).await?;
            assert_eq!(claim.status.reserved_for, [], "{name}");
        }
        fixture.driver.resume_calls();
        fixture.wait_until_gone("deleted").await?;
        let versions = fixture.versions("released").await?;
        let gone = fixture.versions("deleted").await?;
        for claim in versions.iter().chain(&gone) {
            let going = claim.status.deallocation_requested || claim.metadata.deletion_timestamp.is_some();
            assert!(!going || claim.status.reserved_for.is_empty(), "{claim:?}");
        }
        controller.stop().await
    })
}

#[test]
fn an_unused_claim_costs_no_request_and_can_be_deleted() -> anyhow::Result<()> {
    with_fixture("rests", async |fixture| {
        let controller = fixture.start().await?;
        fixture.claim("one").await?;
        fixture.fence().await?;
        fixture.delete_claim("one").await?;
        fixture.wait_until_gone("one").await?;
        assert_eq!(fixture.driver.call_summaries(), Vec::<String>::new());
        assert_eq!(fixture.requests(&controller).await?, Vec::<String>::new());
        controller.stop().await
    })
}
