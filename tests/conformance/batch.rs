//! The claims of a pod are allocated together, all or none. The test is the scheduler.

use drayman::driver::DriverError;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use crate::call::{What, count};
use crate::harness::rule;
use crate::objects::From;
use crate::script::Act;
use crate::stage::{Stage, finalizers, is_allocated, names, on_stage, rules, rules_without, verdicts};

/// A pod `pod` that names these claims, which are made, and its context.
async fn pod_with(
    stage: &Stage,
    claims: &[&str],
    selected: &str,
    potential: &[String],
) -> anyhow::Result<()> {
    for name in claims {
        stage.claim(name).await?;
    }
    let entries: Vec<(&str, From<'_>)> = claims.iter().map(|name| (*name, From::Claim(name))).collect();
    let pod = stage.pod("pod", &entries).await?;
    stage.context(&pod, selected, potential).await.map(drop)
}

#[test]
fn one_status_write_follows_all_finalizers_and_one_call() -> anyhow::Result<()> {
    on_stage("one-write", async |stage| {
        let controller = stage.start().await?;
        pod_with(stage, &["one", "two"], "node", &names(["node", "other"])).await?;
        let pod = stage.pods().get("pod").await?;
        for name in ["one", "two"] {
            let claim = stage.until_claim(name, "allocated", is_allocated).await?;
            assert_eq!(claim.status.driver_name, Some(stage.driver_name()));
            let [user] = claim.status.reserved_for.as_slice() else {
                anyhow::bail!("{claim:?}")
            };
            assert_eq!(
                (
                    user.api_group.as_deref(),
                    user.resource.as_str(),
                    user.name.as_str(),
                    Some(&user.uid)
                ),
                (None, "pods", "pod", pod.metadata.uid.as_ref())
            );
            let seen: Vec<_> = stage
                .versions(name)
                .await?
                .iter()
                .map(|claim| {
                    (
                        finalizers(claim).len(),
                        is_allocated(claim),
                        claim.status.reserved_for.len(),
                    )
                })
                .collect();
            assert_eq!(seen, [(0, false, 0), (1, false, 0), (1, true, 1)]);
        }
        stage.fence().await?;
        let calls = stage.driver.calls();
        assert_eq!(stage.driver.story(), ["judge one two", "allocate one two"]);
        let asked = calls.iter().find_map(|call| match &call.what {
            What::Allocate { claims, node } => Some((claims, node)),
            _ => None,
        });
        let Some((claims, Some(node))) = asked else {
            anyhow::bail!("{calls:?}")
        };
        assert_eq!(node, "node");
        for asked in claims {
            assert_eq!(
                finalizers(&asked.claim),
                [stage.finalizer()],
                "secured before the driver is asked"
            );
        }
        // The context needs no answer any more, and nothing is looked at again.
        assert_eq!(stage.contexts().get("pod").await?.status.resource_claims, []);
        let mut requests = stage.requests(&controller).await?;
        requests.sort();
        assert_eq!(
            requests,
            [
                "get pods 200",
                "patch resourceclaims 200",
                "patch resourceclaims 200",
                "patch resourceclaims/status 200",
                "patch resourceclaims/status 200",
            ]
        );
        controller.end().await
    })
}

#[test]
fn what_is_allocated_already_is_not_asked_about_again() -> anyhow::Result<()> {
    on_stage("some-allocated", async |stage| {
        let controller = stage.start().await?;
        stage.immediate("immediate").await?;
        stage.until_claim("immediate", "allocated", is_allocated).await?;
        stage.claim("allocated").await?;
        let other = stage
            .pod("other", &[("device", From::Claim("allocated"))])
            .await?;
        stage.context(&other, "node", &[]).await?;
        stage.until_claim("allocated", "allocated", is_allocated).await?;
        stage.immediate("also-immediate").await?;
        stage.claim("one").await?;
        let entries = ["allocated", "immediate", "also-immediate", "one"];
        let entries: Vec<(&str, From<'_>)> = entries.iter().map(|name| (*name, From::Claim(name))).collect();
        let pod = stage.pod("pod", &entries).await?;
        stage.context(&pod, "node", &names(["node"])).await?;
        stage.until_claim("one", "allocated", is_allocated).await?;
        let story = stage.driver.story();
        assert_eq!(story[story.len() - 2..], ["judge one", "allocate one"]);
        // A pod of which nothing is left to do is not read again and again.
        stage.fence().await?;
        let requests = stage.requests(&controller).await?;
        assert_eq!(
            requests
                .iter()
                .filter(|request| *request == "get pods 200")
                .count(),
            2,
            "{requests:?}"
        );
        controller.end().await
    })
}

#[test]
fn without_every_finalizer_nothing_is_allocated() -> anyhow::Result<()> {
    on_stage("half-secured", async |stage| {
        let mut rules = rules_without("resourceclaims", "patch");
        let mut only_one = rule(&["resource.k8s.io"], &["resourceclaims"], &["patch"]);
        only_one.resource_names = Some(vec!["one".to_owned()]);
        rules.push(only_one);
        let controller = stage
            .start_as("", &stage.driver, &rules, |builder| builder)
            .await?;
        pod_with(stage, &["one", "two"], "node", &[]).await?;
        stage.event("pod", "AllocationNotRecorded", "forbidden").await?;
        assert_eq!(finalizers(&stage.claims().get("one").await?), [stage.finalizer()]);
        assert_eq!(count(&stage.driver.calls(), What::is_allocate), 0);
        stage.allow(&controller).await?;
        for name in ["one", "two"] {
            stage.until_claim(name, "allocated", is_allocated).await?;
        }
        assert_eq!(stage.driver.counts(), (2, 0));
        controller.end().await
    })
}

#[test]
fn if_one_claim_fails_none_is_recorded_and_the_node_is_bad() -> anyhow::Result<()> {
    on_stage("one-fails", async |stage| {
        stage.driver.rule(|what| match what {
            What::Allocate { node, .. } if node.as_deref() == Some("bad") => Act::FailOne(
                "two",
                DriverError::retry("Broken", "the box of this node is on fire"),
            ),
            _ => Act::Go,
        });
        let controller = stage.start().await?;
        pod_with(stage, &["one", "two"], "bad", &names(["bad", "good"])).await?;
        let context = stage
            .until_context("pod", "told of the bad node", |context| {
                verdicts(context)
                    .values()
                    .any(|nodes| nodes.contains(&"bad".to_owned()))
            })
            .await?;
        assert_eq!(
            verdicts(&context).len(),
            2,
            "an entry for each claim that is left"
        );
        for name in ["one", "two"] {
            let versions = stage.versions(name).await?;
            assert!(!versions.iter().any(is_allocated), "nothing is recorded");
        }
        stage.reschedule("pod", json!({ "selectedNode": "good" })).await?;
        for name in ["one", "two"] {
            stage.until_claim(name, "allocated", is_allocated).await?;
        }
        let (allocated, given_back) = stage.driver.counts();
        assert_eq!(
            allocated,
            given_back + 2,
            "what was allocated in vain is given back"
        );
        controller.end().await
    })
}

#[test]
fn an_answer_for_too_few_claims_is_refused() -> anyhow::Result<()> {
    on_stage("too-few", async |stage| {
        stage
            .driver
            .rule(|what| if what.is_allocate() { Act::Short } else { Act::Go });
        let controller = stage.start().await?;
        pod_with(stage, &["one", "two"], "", &names(["node"])).await?;
        stage
            .until_context("pod", "judged", |context| {
                context.status.resource_claims.len() == 2
            })
            .await?;
        stage.reschedule("pod", json!({ "selectedNode": "node" })).await?;
        stage
            .driver
            .until("give back both", |calls| count(calls, What::is_deallocate) >= 2)
            .await?;
        stage
            .event("pod", "NoSuitableDevice", "the driver answered for 0 of 2 claims")
            .await?;
        stage.driver.behave();
        for name in ["one", "two"] {
            stage.until_claim(name, "allocated", is_allocated).await?;
        }
        controller.end().await
    })
}

#[test]
fn an_unrecordable_allocation_is_returned_and_retried() -> anyhow::Result<()> {
    on_stage("unrecorded", async |stage| {
        let rules = rules_without("resourceclaims/status", "patch");
        let controller = stage
            .start_as("", &stage.driver, &rules, |builder| builder)
            .await?;
        pod_with(stage, &["one"], "node", &[]).await?;
        stage.event("pod", "AllocationNotRecorded", "forbidden").await?;
        let calls = stage
            .driver
            .until("give it back", |calls| count(calls, What::is_deallocate) >= 1)
            .await?;
        let given_back = calls.iter().find_map(|call| match &call.what {
            What::Deallocate { allocation, .. } => Some(allocation.is_some()),
            _ => None,
        });
        assert_eq!(given_back, Some(true), "the driver gets what was never recorded");
        assert_eq!(finalizers(&stage.claims().get("one").await?), [stage.finalizer()]);
        stage.allow(&controller).await?;
        stage.until_claim("one", "allocated", is_allocated).await?;
        let (allocated, given_back) = stage.driver.counts();
        assert_eq!(allocated, given_back + 1);
        controller.end().await
    })
}

#[test]
fn a_claim_that_a_pod_names_twice_is_asked_about_once() -> anyhow::Result<()> {
    on_stage("named-twice", async |stage| {
        let controller = stage.start().await?;
        stage.claim("one").await?;
        let pod = stage
            .pod(
                "pod",
                &[("first", From::Claim("one")), ("second", From::Claim("one"))],
            )
            .await?;
        stage.context(&pod, "", &names(["node"])).await?;
        let context = stage
            .until_context("pod", "judged", |context| {
                context.status.resource_claims.len() == 2
            })
            .await?;
        assert_eq!(
            verdicts(&context).into_keys().collect::<Vec<_>>(),
            ["first", "second"]
        );
        stage.reschedule("pod", json!({ "selectedNode": "node" })).await?;
        stage.until_claim("one", "allocated", is_allocated).await?;
        stage.fence().await?;
        assert_eq!(count(&stage.driver.calls(), What::is_allocate), 1);
        let failed: Vec<_> = stage
            .entries(&controller)
            .await?
            .into_iter()
            .filter(|entry| entry.code >= 400)
            .collect();
        assert_eq!(failed, []);
        controller.end().await
    })
}

#[test]
fn an_allocation_by_somebody_else_stands_and_ours_is_given_back() -> anyhow::Result<()> {
    on_stage("somebody-else", async |stage| {
        stage
            .driver
            .rule(|what| if what.is_allocate() { Act::Wait } else { Act::Go });
        let controller = stage.start().await?;
        pod_with(stage, &["one"], "node", &[]).await?;
        stage
            .driver
            .until("allocate", |calls| count(calls, What::is_allocate) == 1)
            .await?;
        let theirs = json!({ "driverName": "somebody.example.com", "allocation": { "shareable": true } });
        stage.patch_claim_status("one", theirs).await?;
        stage.driver.open();
        stage
            .driver
            .until("give ours back", |calls| count(calls, What::is_deallocate) >= 1)
            .await?;
        stage.fence().await?;
        let claim = stage.claims().get("one").await?;
        assert_eq!(claim.status.driver_name.as_deref(), Some("somebody.example.com"));
        assert_eq!(stage.driver.counts(), (1, 1));
        controller.end().await
    })
}

#[test]
fn an_allocation_is_rolled_back_when_its_pod_leaves_the_node() -> anyhow::Result<()> {
    on_stage("elsewhere", async |stage| {
        stage
            .driver
            .rule(|what| if what.is_allocate() { Act::Wait } else { Act::Go });
        let controller = stage
            .start_as("", &stage.driver, &rules(), |builder| builder)
            .await?;
        pod_with(stage, &["one"], "node", &[]).await?;
        stage
            .driver
            .until("allocate", |calls| count(calls, What::is_allocate) == 1)
            .await?;
        stage
            .reschedule("pod", json!({ "selectedNode": "other" }))
            .await?;
        stage.fence().await?;
        stage.driver.open();
        let claim = stage.until_claim("one", "allocated", is_allocated).await?;
        let handle = claim
            .status
            .allocation
            .as_ref()
            .and_then(|allocation| allocation.resource_handles.first());
        assert_eq!(handle.and_then(|handle| handle.data.as_deref()), Some("other"));
        assert_eq!(stage.driver.counts(), (2, 1));
        // An allocation that stands is never moved by what the scheduler selects.
        stage
            .reschedule("pod", json!({ "selectedNode": "third" }))
            .await?;
        let touch = Patch::Merge(json!({ "metadata": { "labels": { "touched": "yes" } } }));
        stage
            .contexts()
            .patch("pod", &PatchParams::default(), &touch)
            .await?;
        stage.fence().await?;
        assert_eq!(stage.driver.counts(), (2, 1));

        stage.driver.close();
        stage.claim("two").await?;
        let pod = stage.pod("gone", &[("device", From::Claim("two"))]).await?;
        stage.context(&pod, "node", &[]).await?;
        stage
            .driver
            .until("allocate two", |calls| {
                calls
                    .iter()
                    .any(|call| call.what.is_allocate() && call.what.is_about("two"))
            })
            .await?;
        stage.remove_pod("gone").await?;
        stage
            .until(stage.contexts(), "gone", "gone", |context: Option<&_>| {
                context.is_none()
            })
            .await?;
        stage.fence().await?;
        stage.driver.open();
        stage
            .driver
            .until("give two back", |calls| {
                calls
                    .iter()
                    .any(|call| call.what.is_deallocate() && call.what.is_about("two"))
            })
            .await?;
        stage.fence().await?;
        assert!(!is_allocated(&stage.claims().get("two").await?));
        assert_eq!(stage.driver.counts(), (3, 2));
        controller.end().await
    })
}
