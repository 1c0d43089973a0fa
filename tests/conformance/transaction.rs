//! Allocation transactions: all claims of a pod are allocated, or none. The test acts as the scheduler.

use drayman::driver::DriverError;
use serde_json::json;

use crate::call::{Request, count};
use crate::fake_driver::Action;
use crate::fixture::{finalizers, is_allocated, names, rules_without, unsuitable_nodes, with_fixture};
use crate::harness::rule;
use crate::objects::{ClaimSource, patch, touched};

#[test]
fn one_status_write_follows_all_finalizers_and_one_call() -> anyhow::Result<()> {
    with_fixture("one-write", async |fixture| {
        let controller = fixture.start().await?;
        let pod = fixture
            .waiting_pod("pod", &["one", "two"], "node", &names(["node", "other"]))
            .await?;
        for name in ["one", "two"] {
            let claim = fixture.wait_until_allocated(name).await?;
            assert_eq!(claim.status.driver_name, Some(fixture.driver_name()));
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
            let seen: Vec<_> = fixture
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
        fixture.fence().await?;
        let calls = fixture.driver.calls();
        assert_eq!(
            fixture.driver.call_summaries(),
            ["evaluate one two", "allocate one two"]
        );
        let allocate = calls.iter().find_map(|call| match &call.request {
            Request::Allocate { claims, node } => Some((claims, node)),
            _ => None,
        });
        let Some((claims, Some(node))) = allocate else {
            anyhow::bail!("{calls:?}")
        };
        assert_eq!(node, "node");
        for requested in claims {
            assert_eq!(
                finalizers(&requested.claim),
                [fixture.finalizer()],
                "the finalizer is stored before the driver call"
            );
        }
        // The context needs no more answers, and nothing is evaluated again.
        assert_eq!(fixture.contexts().get("pod").await?.status.resource_claims, []);
        let mut requests = fixture.requests(&controller).await?;
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
        controller.stop().await
    })
}

#[test]
fn allocated_claims_are_not_evaluated_again() -> anyhow::Result<()> {
    with_fixture("some-allocated", async |fixture| {
        let controller = fixture.start().await?;
        fixture.immediate("immediate").await?;
        fixture.wait_until_allocated("immediate").await?;
        fixture.waiting_pod("other", &["allocated"], "node", &[]).await?;
        fixture.wait_until_allocated("allocated").await?;
        fixture.immediate("also-immediate").await?;
        fixture.claim("one").await?;
        let claims = ["allocated", "immediate", "also-immediate", "one"];
        let pod = fixture.pod_naming("pod", &claims).await?;
        fixture.context(&pod, "node", &names(["node"])).await?;
        fixture.wait_until_allocated("one").await?;
        let summaries = fixture.driver.call_summaries();
        assert_eq!(summaries[summaries.len() - 2..], ["evaluate one", "allocate one"]);
        // A completed pod is not read repeatedly.
        fixture.fence().await?;
        let requests = fixture.requests(&controller).await?;
        assert_eq!(
            requests
                .iter()
                .filter(|request| *request == "get pods 200")
                .count(),
            2,
            "{requests:?}"
        );
        controller.stop().await
    })
}

#[test]
fn without_every_finalizer_nothing_is_allocated() -> anyhow::Result<()> {
    with_fixture("half-secured", async |fixture| {
        let mut rules = rules_without("resourceclaims", "patch");
        let mut only_one = rule(&["resource.k8s.io"], &["resourceclaims"], &["patch"]);
        only_one.resource_names = Some(vec!["one".to_owned()]);
        rules.push(only_one);
        let controller = fixture.start_with(&rules).await?;
        fixture.waiting_pod("pod", &["one", "two"], "node", &[]).await?;
        fixture
            .wait_for_event("pod", "AllocationNotRecorded", "forbidden")
            .await?;
        assert_eq!(
            finalizers(&fixture.claims().get("one").await?),
            [fixture.finalizer()]
        );
        assert_eq!(count(&fixture.driver.calls(), Request::is_allocate), 0);
        fixture.allow(&controller).await?;
        for name in ["one", "two"] {
            fixture.wait_until_allocated(name).await?;
        }
        assert_eq!(fixture.driver.counts(), (2, 0));
        controller.stop().await
    })
}

#[test]
fn if_one_claim_fails_none_is_recorded_and_the_node_is_bad() -> anyhow::Result<()> {
    with_fixture("one-fails", async |fixture| {
        fixture.driver.rule(|request| match request {
            Request::Allocate { node, .. } if node.as_deref() == Some("bad") => Action::FailOne(
                "two",
                DriverError::retry("Broken", "the device of this node is broken"),
            ),
            _ => Action::Proceed,
        });
        let controller = fixture.start().await?;
        fixture
            .waiting_pod("pod", &["one", "two"], "bad", &names(["bad", "good"]))
            .await?;
        let context = fixture
            .wait_for_context("pod", "evaluated with the bad node", |context| {
                unsuitable_nodes(context)
                    .values()
                    .any(|nodes| nodes.contains(&"bad".to_owned()))
            })
            .await?;
        assert_eq!(
            unsuitable_nodes(&context).len(),
            2,
            "an entry for each unallocated claim"
        );
        for name in ["one", "two"] {
            let versions = fixture.versions(name).await?;
            assert!(!versions.iter().any(is_allocated), "nothing is recorded");
        }
        fixture.select_node("pod", "good").await?;
        for name in ["one", "two"] {
            fixture.wait_until_allocated(name).await?;
        }
        let (allocated, released) = fixture.driver.counts();
        assert_eq!(allocated, released + 2, "unused allocations are released");
        controller.stop().await
    })
}

#[test]
fn an_answer_for_too_few_claims_is_refused() -> anyhow::Result<()> {
    with_fixture("too-few", async |fixture| {
        fixture.driver.on(Request::is_allocate, Action::AnswerForNone);
        let controller = fixture.start().await?;
        fixture
            .waiting_pod("pod", &["one", "two"], "", &names(["node"]))
            .await?;
        fixture
            .wait_for_context("pod", "evaluated", |context| {
                context.status.resource_claims.len() == 2
            })
            .await?;
        fixture.select_node("pod", "node").await?;
        fixture.wait_for_calls("deallocate", 2..).await?;
        fixture
            .wait_for_event("pod", "NoSuitableDevice", "the driver answered for 0 of 2 claims")
            .await?;
        fixture.driver.clear_rule();
        for name in ["one", "two"] {
            fixture.wait_until_allocated(name).await?;
        }
        controller.stop().await
    })
}

#[test]
fn an_unrecordable_allocation_is_returned_and_retried() -> anyhow::Result<()> {
    with_fixture("unrecorded", async |fixture| {
        let rules = rules_without("resourceclaims/status", "patch");
        let controller = fixture.start_with(&rules).await?;
        fixture.waiting_pod("pod", &["one"], "node", &[]).await?;
        fixture
            .wait_for_event("pod", "AllocationNotRecorded", "forbidden")
            .await?;
        let calls = fixture.wait_for_calls("deallocate", 1..).await?;
        let released = calls.iter().find_map(|call| match &call.request {
            Request::Deallocate { allocation, .. } => Some(allocation.is_some()),
            _ => None,
        });
        assert_eq!(
            released,
            Some(true),
            "the driver receives the unrecorded allocation"
        );
        assert_eq!(
            finalizers(&fixture.claims().get("one").await?),
            [fixture.finalizer()]
        );
        fixture.allow(&controller).await?;
        fixture.wait_until_allocated("one").await?;
        let (allocated, released) = fixture.driver.counts();
        assert_eq!(allocated, released + 1);
        controller.stop().await
    })
}

#[test]
fn a_claim_named_twice_by_a_pod_is_evaluated_once() -> anyhow::Result<()> {
    with_fixture("named-twice", async |fixture| {
        let controller = fixture.start().await?;
        fixture.claim("one").await?;
        let pod = fixture
            .pod(
                "pod",
                &[
                    ("first", ClaimSource::Claim("one")),
                    ("second", ClaimSource::Claim("one")),
                ],
            )
            .await?;
        fixture.context(&pod, "", &names(["node"])).await?;
        let context = fixture
            .wait_for_context("pod", "evaluated", |context| {
                context.status.resource_claims.len() == 2
            })
            .await?;
        assert_eq!(
            unsuitable_nodes(&context).into_keys().collect::<Vec<_>>(),
            ["first", "second"]
        );
        fixture.select_node("pod", "node").await?;
        fixture.wait_until_allocated("one").await?;
        fixture.fence().await?;
        assert_eq!(count(&fixture.driver.calls(), Request::is_allocate), 1);
        fixture.assert_none_failed(&controller).await?;
        controller.stop().await
    })
}

#[test]
fn a_foreign_allocation_stays_and_ours_is_deallocated() -> anyhow::Result<()> {
    with_fixture("other-allocation", async |fixture| {
        fixture.driver.on(Request::is_allocate, Action::Wait);
        let controller = fixture.start().await?;
        fixture.waiting_pod("pod", &["one"], "node", &[]).await?;
        fixture.wait_for_calls("allocate", 1..=1).await?;
        let theirs = json!({ "driverName": "other.example.com", "allocation": { "shareable": true } });
        fixture.patch_claim_status("one", theirs).await?;
        fixture.driver.resume_calls();
        fixture.wait_for_calls("deallocate", 1..).await?;
        fixture.fence().await?;
        let claim = fixture.claims().get("one").await?;
        assert_eq!(claim.status.driver_name.as_deref(), Some("other.example.com"));
        assert_eq!(fixture.driver.counts(), (1, 1));
        controller.stop().await
    })
}

#[test]
fn an_allocation_is_rolled_back_when_its_pod_leaves_the_node() -> anyhow::Result<()> {
    with_fixture("elsewhere", async |fixture| {
        fixture.driver.on(Request::is_allocate, Action::Wait);
        let controller = fixture.start().await?;
        fixture.waiting_pod("pod", &["one"], "node", &[]).await?;
        fixture.wait_for_calls("allocate", 1..=1).await?;
        fixture.select_node("pod", "other").await?;
        fixture.fence().await?;
        fixture.driver.resume_calls();
        let claim = fixture.wait_until_allocated("one").await?;
        let handle = claim
            .status
            .allocation
            .as_ref()
            .and_then(|allocation| allocation.resource_handles.first());
        assert_eq!(handle.and_then(|handle| handle.data.as_deref()), Some("other"));
        assert_eq!(fixture.driver.counts(), (2, 1));
        // A new selected node does not move a recorded allocation.
        fixture.select_node("pod", "third").await?;
        patch(&fixture.contexts(), "pod", touched()).await?;
        fixture.fence().await?;
        assert_eq!(fixture.driver.counts(), (2, 1));

        fixture.driver.hold_calls();
        fixture.waiting_pod("gone", &["two"], "node", &[]).await?;
        fixture.wait_for_calls("allocate two", 1..).await?;
        fixture.remove_pod("gone").await?;
        fixture
            .wait_for(fixture.contexts(), "gone", "gone", |context: Option<&_>| {
                context.is_none()
            })
            .await?;
        fixture.fence().await?;
        fixture.driver.resume_calls();
        fixture.wait_for_calls("deallocate two", 1..).await?;
        fixture.fence().await?;
        assert!(!is_allocated(&fixture.claims().get("two").await?));
        assert_eq!(fixture.driver.counts(), (3, 2));
        controller.stop().await
    })
}
