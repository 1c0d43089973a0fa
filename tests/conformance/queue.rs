//! When the controller looks at something, how often, and what a failure costs.

use std::time::{Duration, Instant};

use drayman::driver::DriverError;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use crate::call::{Call, What, count};
use crate::harness::Entry;
use crate::objects::From;
use crate::script::Act;
use crate::stage::{finalizers, is_allocated, names, on_stage, rules_without};

fn broken() -> DriverError {
    DriverError::retry("Broken", "the device box does not answer")
}

#[test]
fn three_kinds_are_watched_and_pods_are_read_one_by_one() -> anyhow::Result<()> {
    on_stage("three-kinds", async |stage| {
        let controller = stage.start().await?;
        stage.claim("one").await?;
        let pod = stage.pod("pod", &[("device", From::Claim("one"))]).await?;
        stage.context(&pod, "", &names(["node"])).await?;
        stage
            .until_context("pod", "judged", |context| {
                !context.status.resource_claims.is_empty()
            })
            .await?;
        stage.fence().await?;
        let user = controller.user.clone();
        // The watches are logged when they end.
        controller.end().await?;
        let entries = stage.cluster.audit().of_user(&user).await?;
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
        on_stage(&format!("barrier-{resource}"), async |stage| {
            stage.immediate("one").await?;
            let rules = rules_without(resource, "list");
            let controller = stage
                .start_as("", &stage.driver, &rules, |builder| builder)
                .await?;
            // By the second refusal everything else has been listed long ago.
            stage
                .until_entries(&controller, "refuses the list twice", |entries| {
                    let refused = |entry: &&Entry| entry.verb == "list" && entry.code == 403;
                    entries.iter().filter(refused).count() >= 2
                })
                .await?;
            assert_eq!(stage.driver.story(), Vec::<String>::new(), "{resource}");
            assert_eq!(stage.driver.observed(), [], "{resource}");
            stage.allow(&controller).await?;
            stage.until_claim("one", "allocated", is_allocated).await?;
            assert!(
                !stage.driver.observed().is_empty(),
                "it is told what there is before it is asked"
            );
            controller.end().await
        })?;
    }
    Ok(())
}

#[test]
fn nothing_is_asked_before_the_driver_is_ready() -> anyhow::Result<()> {
    on_stage("not-ready", async |stage| {
        stage.driver.start_unready();
        stage.immediate("one").await?;
        stage.claim("two").await?;
        let pod = stage.pod("pod", &[("device", From::Claim("two"))]).await?;
        stage.context(&pod, "node", &names(["node"])).await?;
        let controller = stage.start().await?;
        stage
            .driver
            .until("be told what there is", |_| !stage.driver.observed().is_empty())
            .await?;
        // Nothing of ours keeps a claim: no finalizer was stored.
        stage.delete_claim("one").await?;
        stage.until_gone("one").await?;
        assert_eq!(stage.driver.story(), Vec::<String>::new());
        assert_eq!(stage.requests(&controller).await?, Vec::<String>::new());
        stage.driver.get_ready();
        stage.until_claim("two", "allocated", is_allocated).await?;
        controller.end().await
    })
}

#[test]
fn the_start_first_rolls_back_partial_work_and_then_serves() -> anyhow::Result<()> {
    on_stage("start", async |stage| {
        stage.immediate("immediate").await?;
        stage.claim("delayed").await?;
        let pod = stage.pod("pod", &[("device", From::Claim("delayed"))]).await?;
        stage.context(&pod, "node", &names(["node"])).await?;
        let half_done = json!({ "name": "half-done", "finalizers": [stage.finalizer()] });
        stage.create_claim(json!({ "metadata": half_done })).await?;
        let controller = stage.start().await?;
        stage.until_claim("immediate", "allocated", is_allocated).await?;
        stage.until_claim("delayed", "allocated", is_allocated).await?;
        stage.fence().await?;
        let mut story = stage.driver.story();
        story.sort();
        assert_eq!(
            story,
            [
                "allocate delayed",
                "allocate immediate",
                "deallocate half-done",
                "judge delayed"
            ]
        );
        controller.end().await
    })
}

#[test]
fn calls_overlap_for_different_claims_but_never_for_one() -> anyhow::Result<()> {
    on_stage("overlap", async |stage| {
        stage
            .driver
            .rule(|what| if what.is_allocate() { Act::Wait } else { Act::Go });
        let controller = stage.start().await?;
        stage.immediate("one").await?;
        stage.claim("two").await?;
        let pod = stage.pod("pod", &[("device", From::Claim("two"))]).await?;
        stage.context(&pod, "node", &[]).await?;
        stage
            .driver
            .until("allocate both", |calls| count(calls, What::is_allocate) == 2)
            .await?;
        // Everything that could make the controller act once more, while it is allocating.
        for name in ["one", "two"] {
            stage
                .patch_claim(name, json!({ "metadata": { "labels": { "touched": "yes" } } }))
                .await?;
            stage.delete_claim(name).await?;
        }
        stage
            .reschedule("pod", json!({ "selectedNode": "other" }))
            .await?;
        stage.fence().await?;
        assert_eq!(
            stage
                .driver
                .calls()
                .iter()
                .filter(|call| call.ended.is_none())
                .count(),
            2
        );
        assert_eq!(count(&stage.driver.calls(), What::is_deallocate), 0);
        stage.driver.open();
        stage.until_gone("one").await?;
        stage.until_gone("two").await?;
        for name in ["one", "two"] {
            assert_one_after_the_other(&stage.driver.calls(), name);
        }
        assert_eq!(
            stage.driver.counts(),
            (2, 2),
            "what was allocated in vain is given back"
        );
        controller.end().await
    })
}

fn assert_one_after_the_other(calls: &[Call], claim: &str) {
    let calls: Vec<&Call> = calls.iter().filter(|call| call.what.is_about(claim)).collect();
    for (before, after) in calls.iter().zip(calls.iter().skip(1)) {
        assert!(
            before.ended.is_some_and(|ended| ended <= after.began),
            "{calls:#?}"
        );
    }
}

#[test]
fn every_change_is_processed_and_only_relevant_ones_call() -> anyhow::Result<()> {
    on_stage("at-once", async |stage| {
        let controller = stage.start().await?;
        stage.claim("one").await?;
        let pod = stage.pod("pod", &[("device", From::Claim("one"))]).await?;
        stage.context(&pod, "", &names(["a", "b"])).await?;
        stage
            .until_context("pod", "judged", |context| {
                !context.status.resource_claims.is_empty()
            })
            .await?;
        stage
            .patch_claim("one", json!({ "metadata": { "labels": { "touched": "yes" } } }))
            .await?;
        let labels = Patch::Merge(json!({ "metadata": { "labels": { "touched": "yes" } } }));
        stage
            .contexts()
            .patch("pod", &PatchParams::default(), &labels)
            .await?;
        stage.fence().await?;
        assert_eq!(stage.driver.story(), ["judge one"]);
        assert_eq!(
            stage.requests(&controller).await?,
            ["get pods 200", "patch podschedulingcontexts/status 200"]
        );

        let changed = Instant::now();
        stage
            .reschedule("pod", json!({ "potentialNodes": ["a", "b", "c"] }))
            .await?;
        stage.driver.until_story(&["judge one", "judge one"]).await?;
        stage.reschedule("pod", json!({ "selectedNode": "c" })).await?;
        stage.until_claim("one", "allocated", is_allocated).await?;
        assert!(
            changed.elapsed() < Duration::from_secs(30),
            "{:?}",
            changed.elapsed()
        );
        controller.end().await
    })
}

#[test]
fn failures_are_retried_with_a_delay_that_a_change_ends() -> anyhow::Result<()> {
    on_stage("backoff", async |stage| {
        stage.driver.rule(|what| {
            if what.is_allocate() {
                Act::Fail(broken())
            } else {
                Act::Go
            }
        });
        let controller = stage.start().await?;
        stage.immediate("one").await?;
        let calls = stage
            .driver
            .until("allocate eight times", |calls| {
                count(calls, What::is_allocate) >= 8
            })
            .await?;
        let moments: Vec<Instant> = calls
            .iter()
            .filter(|call| call.what.is_allocate())
            .map(|call| call.began)
            .collect();
        for (number, pair) in moments.windows(2).enumerate() {
            let least = Duration::from_millis(100) * (1 << number);
            assert!(
                pair[1] - pair[0] >= least,
                "delay {number} is {:?}",
                pair[1] - pair[0]
            );
        }
        // The next attempt is 12.8 s away; a deletion does not wait for it.
        let deleted = Instant::now();
        stage.delete_claim("one").await?;
        stage.until_gone("one").await?;
        assert!(
            deleted.elapsed() < Duration::from_secs(10),
            "{:?}",
            deleted.elapsed()
        );

        // Neither does a pod that the scheduler sends elsewhere.
        stage.driver.rule(|what| match what {
            What::Judge { nodes, .. } if nodes.iter().any(|node| node == "bad") => Act::Fail(broken()),
            _ => Act::Go,
        });
        stage.claim("two").await?;
        let pod = stage.pod("pod", &[("device", From::Claim("two"))]).await?;
        stage.context(&pod, "bad", &[]).await?;
        stage
            .driver
            .until("judge eight times", |calls| count(calls, What::is_judge) >= 8)
            .await?;
        let moved = Instant::now();
        stage.reschedule("pod", json!({ "selectedNode": "good" })).await?;
        stage.until_claim("two", "allocated", is_allocated).await?;
        assert!(moved.elapsed() < Duration::from_secs(10), "{:?}", moved.elapsed());

        // Nor a claim whose class is mended.
        stage.driver.rule(|what| match what {
            What::Class(class) if class.parameters_ref.is_none() => Act::Fail(broken()),
            _ => Act::Go,
        });
        stage.immediate("three").await?;
        stage.claim("four").await?;
        let pod = stage.pod("waits", &[("device", From::Claim("four"))]).await?;
        stage.context(&pod, "node", &[]).await?;
        let before = stage.driver.calls().len();
        stage
            .driver
            .until("read the class sixteen times", move |calls| {
                calls.len() >= before + 16
            })
            .await?;
        let mended = Instant::now();
        stage
            .patch_class(
                &stage.name,
                json!({ "parametersRef": { "kind": "ConfigMap", "name": "new" } }),
            )
            .await?;
        stage.until_claim("three", "allocated", is_allocated).await?;
        stage.until_claim("four", "allocated", is_allocated).await?;
        assert!(
            mended.elapsed() < Duration::from_secs(10),
            "{:?}",
            mended.elapsed()
        );
        controller.end().await
    })
}

#[test]
fn each_object_has_its_own_delay_and_loses_it_when_deleted() -> anyhow::Result<()> {
    on_stage("own-delay", async |stage| {
        stage.driver.rule(|what| {
            if what.is_allocate() {
                Act::Fail(broken())
            } else {
                Act::Go
            }
        });
        let controller = stage.start().await?;
        stage.immediate("one").await?;
        stage
            .driver
            .until("allocate eight times", |calls| {
                count(calls, What::is_allocate) >= 8
            })
            .await?;
        // Its next attempt is 12.8 s away. Another object has a delay of its own, and is at its fourth attempt after 700 ms.
        let attempts = |name: &'static str| {
            move |calls: &[Call]| count(calls, |what| what.is_allocate() && what.is_about(name))
        };
        let beside = Instant::now();
        stage.immediate("beside").await?;
        let fourth = |calls: &[Call]| attempts("beside")(calls) >= 4;
        stage.driver.until("allocate beside four times", fourth).await?;
        assert!(
            beside.elapsed() < Duration::from_secs(10),
            "{:?}",
            beside.elapsed()
        );
        stage.delete_claim("beside").await?;
        stage.delete_claim("one").await?;
        stage.until_gone("one").await?;
        // It forgets the failures: a claim by the same name begins with the shortest delay.
        let before = attempts("one")(&stage.driver.calls());
        let again = Instant::now();
        stage.immediate("one").await?;
        let fourth = move |calls: &[Call]| attempts("one")(calls) >= before + 4;
        stage
            .driver
            .until("allocate the new one four times", fourth)
            .await?;
        assert!(again.elapsed() < Duration::from_secs(10), "{:?}", again.elapsed());
        stage.delete_claim("one").await?;
        stage.until_gone("one").await?;
        controller.end().await
    })
}

#[test]
fn an_error_is_told_once_as_a_warning_in_the_driver_s_name() -> anyhow::Result<()> {
    on_stage("told-once", async |stage| {
        stage.driver.rule(|what| {
            if what.is_judge() {
                Act::Fail(broken())
            } else {
                Act::Go
            }
        });
        let controller = stage.start().await?;
        stage.claim("one").await?;
        let pod = stage.pod("pod", &[("device", From::Claim("one"))]).await?;
        stage.context(&pod, "", &names(["node"])).await?;
        stage
            .driver
            .until("judge four times", |calls| count(calls, What::is_judge) >= 4)
            .await?;
        let event = stage
            .event("pod", "Broken", "the device box does not answer")
            .await?;
        assert_eq!(event.type_.as_deref(), Some("Warning"));
        assert_eq!(event.reporting_component, Some(stage.driver_name()));
        assert_eq!(event.involved_object.kind.as_deref(), Some("Pod"));
        assert_eq!(event.involved_object.uid, pod.metadata.uid);
        // Another text is told, once again.
        stage.driver.rule(|what| {
            if what.is_judge() {
                Act::Fail(DriverError::retry("Broken", "the device box is on fire"))
            } else {
                Act::Go
            }
        });
        stage.event("pod", "Broken", "on fire").await?;
        let before = stage.driver.calls().len();
        stage
            .driver
            .until("judge twice more", move |calls| calls.len() >= before + 2)
            .await?;
        stage.driver.behave();
        stage
            .until_context("pod", "judged", |context| {
                !context.status.resource_claims.is_empty()
            })
            .await?;
        assert_eq!(stage.events("pod").await?.len(), 2);
        controller.end().await
    })
}

#[test]
fn a_second_writer_that_never_rests_costs_no_failed_write() -> anyhow::Result<()> {
    on_stage("second-writer", async |stage| {
        let controller = stage.start().await?;
        let claims: Vec<String> = (0..8).map(|number| format!("claim-{number}")).collect();
        for name in &claims {
            stage.claim(name).await?;
            let pod = stage.pod(name, &[("device", From::Claim(name))]).await?;
            stage.context(&pod, "", &[]).await?;
        }
        let restless = async {
            for round in 0_u32.. {
                let labels = json!({ "metadata": { "labels": { "round": round.to_string() } } });
                for name in &claims {
                    stage.patch_claim(name, labels.clone()).await?;
                    let patch = Patch::Merge(labels.clone());
                    stage
                        .contexts()
                        .patch(name, &PatchParams::default(), &patch)
                        .await?;
                }
            }
            anyhow::Ok(())
        };
        let scheduled = async {
            for name in &claims {
                stage
                    .reschedule(name, json!({ "potentialNodes": ["node"] }))
                    .await?;
                stage
                    .until_context(name, "judged", |context| {
                        !context.status.resource_claims.is_empty()
                    })
                    .await?;
                stage.reschedule(name, json!({ "selectedNode": "node" })).await?;
            }
            for name in &claims {
                stage.until_claim(name, "allocated", is_allocated).await?;
            }
            anyhow::Ok(())
        };
        tokio::select! {
            result = restless => result?,
            result = scheduled => result?,
        }
        let failed: Vec<_> = stage
            .entries(&controller)
            .await?
            .into_iter()
            .filter(|entry| entry.code >= 400)
            .collect();
        assert_eq!(failed, []);
        assert_eq!(stage.driver.counts(), (8, 0));
        controller.end().await
    })
}

#[test]
fn a_claim_recreated_under_its_name_is_another_claim() -> anyhow::Result<()> {
    on_stage("recreated", async |stage| {
        stage
            .driver
            .rule(|what| if what.is_allocate() { Act::Wait } else { Act::Go });
        let controller = stage.start().await?;
        let first = stage.immediate("one").await?;
        stage
            .driver
            .until("allocate", |calls| count(calls, What::is_allocate) == 1)
            .await?;
        // Somebody takes the finalizer away by force.
        stage
            .patch_claim("one", json!({ "metadata": { "finalizers": null } }))
            .await?;
        stage.delete_claim("one").await?;
        stage.until_gone("one").await?;
        let second = stage.immediate("one").await?;
        stage.driver.open();
        let claim = stage.until_claim("one", "allocated", is_allocated).await?;
        assert_eq!(claim.metadata.uid, second.metadata.uid);
        assert_eq!(finalizers(&claim), [stage.finalizer()]);
        let calls = stage
            .driver
            .until("give back the first", |calls| {
                count(calls, What::is_deallocate) >= 1
            })
            .await?;
        for call in calls.iter().filter(|call| call.what.is_deallocate()) {
            assert!(
                matches!(&call.what, What::Deallocate { claim, .. } if claim.metadata.uid == first.metadata.uid)
            );
        }
        stage.fence().await?;
        assert_eq!(stage.driver.counts(), (2, 1));
        controller.end().await
    })
}

#[test]
fn a_claim_that_is_given_back_gets_no_new_user() -> anyhow::Result<()> {
    on_stage("no-new-user", async |stage| {
        let controller = stage.start().await?;
        for name in ["deleted", "released"] {
            stage.claim(name).await?;
            let user = stage
                .pod(&format!("first-{name}"), &[("device", From::Claim(name))])
                .await?;
            stage.context(&user, "node", &names(["node"])).await?;
            stage.until_claim(name, "allocated", is_allocated).await?;
        }
        stage
            .driver
            .rule(|what| if what.is_deallocate() { Act::Wait } else { Act::Go });
        for name in ["deleted", "released"] {
            stage.remove_pod(&format!("first-{name}")).await?;
            stage.give_up(name).await?;
            stage
                .until_claim(name, "unused", |claim| claim.status.reserved_for.is_empty())
                .await?;
        }
        stage.delete_claim("deleted").await?;
        stage
            .driver
            .until("give back both", |calls| count(calls, What::is_deallocate) == 2)
            .await?;
        let before = stage.driver.story();
        for name in ["deleted", "released"] {
            let pod = stage.pod(name, &[("device", From::Claim(name))]).await?;
            stage.context(&pod, "node", &names(["node"])).await?;
        }
        stage.fence().await?;
        assert_eq!(stage.driver.story(), before, "no node is looked for either");
        for name in ["deleted", "released"] {
            let claim = stage.claims().get(name).await?;
            assert_eq!(claim.status.reserved_for, [], "{name}");
        }
        stage.driver.open();
        stage.until_gone("deleted").await?;
        let versions = stage.versions("released").await?;
        let gone = stage.versions("deleted").await?;
        for claim in versions.iter().chain(&gone) {
            let going = claim.status.deallocation_requested || claim.metadata.deletion_timestamp.is_some();
            assert!(!going || claim.status.reserved_for.is_empty(), "{claim:?}");
        }
        controller.end().await
    })
}

#[test]
fn a_claim_that_no_pod_needs_rests_and_goes_when_it_is_deleted() -> anyhow::Result<()> {
    on_stage("rests", async |stage| {
        let controller = stage.start().await?;
        stage.claim("one").await?;
        stage.fence().await?;
        stage.delete_claim("one").await?;
        stage.until_gone("one").await?;
        assert_eq!(stage.driver.story(), Vec::<String>::new());
        assert_eq!(stage.requests(&controller).await?, Vec::<String>::new());
        controller.end().await
    })
}
