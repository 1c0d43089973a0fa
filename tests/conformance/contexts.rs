//! How the controller processes PodSchedulingContexts. The test acts as the scheduler.

use drayman::api::resource::PodSchedulingContext;
use drayman::driver::DriverError;
use kube::api::{DeleteParams, PostParams};
use serde_json::json;

use crate::call::{Call, Request, count};
use crate::fake_driver::Action;
use crate::fixture::{Fixture, names, unsuitable_nodes, with_fixture};
use crate::objects::{ClaimSource, patch, patch_status};

/// Creates a claim and a pod of this name.
async fn pod(fixture: &Fixture, name: &str) -> anyhow::Result<drayman::api::resource::Pod> {
    fixture.claim(name).await?;
    fixture.pod(name, &[("device", ClaimSource::Claim(name))]).await
}

#[test]
fn an_empty_or_foreign_context_is_left_alone() -> anyhow::Result<()> {
    with_fixture("left-alone", async |fixture| {
        let controller = fixture.start().await?;
        let empty = pod(fixture, "empty").await?;
        fixture.context(&empty, "", &[]).await?;
        let going = pod(fixture, "going").await?;
        let finalizer = json!({ "finalizers": ["example.com/keep"] });
        fixture.context_with(&going, finalizer, "", &[]).await?;
        fixture
            .contexts()
            .delete("going", &DeleteParams::default())
            .await?;
        fixture.select_node("going", "node").await?;
        let orphan = pod(fixture, "orphan").await?;
        fixture
            .context_with(&orphan, json!({}), "node", &names(["node"]))
            .await?;
        fixture.fence().await?;
        assert_eq!(
            fixture.requests(&controller).await?,
            Vec::<String>::new(),
            "not even the pod is read"
        );

        // Owned by an earlier pod of the same name.
        fixture.claim("stranger").await?;
        fixture
            .pod("stranger", &[("device", ClaimSource::Claim("stranger"))])
            .await?;
        fixture.context_with(&orphan, json!({ "name": "stranger", "ownerReferences": [{
            "apiVersion": "v1", "kind": "Pod", "name": "orphan", "uid": orphan.metadata.uid, "controller": true,
        }] }), "node", &names(["node"])).await?;
        fixture.fence().await?;
        assert_eq!(fixture.requests(&controller).await?, ["get pods 200"]);
        assert_eq!(fixture.driver.call_summaries(), Vec::<String>::new());
        assert_eq!(fixture.events("stranger").await?, []);
        controller.stop().await
    })
}

#[test]
fn an_ending_ended_or_missing_pod_is_not_served() -> anyhow::Result<()> {
    with_fixture("not-served", async |fixture| {
        let controller = fixture.start().await?;
        fixture.claim("going").await?;
        let going = fixture
            .pod_with(
                "going",
                &[("device", ClaimSource::Claim("going"))],
                json!({ "schedulerName": "the-test" }),
            )
            .await?;
        let keep = json!({ "metadata": { "finalizers": ["example.com/keep"] } });
        patch(&fixture.pods(), "going", keep).await?;
        fixture.pods().delete("going", &DeleteParams::default()).await?;
        fixture.context(&going, "node", &names(["node"])).await?;
        let over = pod(fixture, "over").await?;
        let failed = json!({ "phase": "Failed" });
        patch_status(&fixture.pods(), "over", failed).await?;
        fixture.context(&over, "node", &names(["node"])).await?;
        // Until the garbage collector notices the missing owner, the context refers to a pod that does not exist.
        let gone = pod(fixture, "gone").await?;
        fixture.remove_pod("gone").await?;
        let finalizer = json!({ "finalizers": ["example.com/keep"], "ownerReferences": [{
            "apiVersion": "v1", "kind": "Pod", "name": "gone", "uid": gone.metadata.uid, "controller": true }] });
        fixture
            .context_with(&gone, finalizer, "node", &names(["node"]))
            .await?;
        fixture.fence().await?;
        assert_eq!(fixture.driver.call_summaries(), Vec::<String>::new());
        let requests = fixture.requests(&controller).await?;
        assert!(
            requests.len() <= 3,
            "each pod is read once at most, found or not: {requests:?}"
        );
        assert!(
            requests.iter().all(|request| request.starts_with("get pods")),
            "{requests:?}"
        );
        for name in ["going", "over", "gone"] {
            assert_eq!(fixture.events(name).await?, []);
        }
        let free = json!({ "metadata": { "finalizers": null } });
        patch(&fixture.pods(), "going", free).await?;
        controller.stop().await
    })
}

#[test]
fn potential_and_selected_nodes_are_evaluated_before_allocation() -> anyhow::Result<()> {
    with_fixture("nodes", async |fixture| {
        fixture.driver.nodes([("good", 1), ("fine", 1)]);
        let controller = fixture.start().await?;
        let one = pod(fixture, "one").await?;
        fixture
            .context(&one, "bad", &names(["good", "fine", "worse"]))
            .await?;
        let context = fixture.wait_until_evaluated("one").await?;
        assert_eq!(
            unsuitable_nodes(&context)["device"],
            ["bad", "worse"],
            "the selected node is evaluated although it is not a potential node"
        );
        let calls = fixture.driver.calls();
        let evaluated_nodes = |calls: &[Call]| -> Vec<Vec<String>> {
            let nodes = calls.iter().filter_map(|call| match &call.request {
                Request::Evaluate { nodes, pod, .. } if pod == "one" => Some(nodes.clone()),
                _ => None,
            });
            nodes.collect()
        };
        let sorted = |nodes: &[String]| {
            let mut nodes = nodes.to_vec();
            nodes.sort();
            nodes
        };
        let evaluated = evaluated_nodes(&calls);
        assert_eq!(evaluated.len(), 1);
        assert_eq!(evaluated[0][0], "bad", "the selected node comes first");
        assert_eq!(sorted(&evaluated[0]), ["bad", "fine", "good", "worse"]);
        assert_eq!(count(&calls, Request::is_allocate), 0);
        // Nodes found unsuitable are evaluated again and stay in the answer although the scheduler no longer lists them.
        fixture
            .reschedule(
                "one",
                json!({ "selectedNode": "", "potentialNodes": ["fine", "new"] }),
            )
            .await?;
        let context = fixture
            .wait_for_context("one", "evaluated again", |context| {
                unsuitable_nodes(context)["device"].contains(&"new".to_owned())
            })
            .await?;
        assert_eq!(
            sorted(&unsuitable_nodes(&context)["device"]),
            ["bad", "new", "worse"]
        );
        let evaluated = evaluated_nodes(&fixture.driver.calls());
        assert_eq!(sorted(&evaluated[1]), ["bad", "fine", "new", "worse"]);
        // A node that is unsuitable for one of two claims is unsuitable for the pod.
        fixture.driver.on(
            Request::is_evaluate,
            Action::Unsuitable(vec![("three", vec!["good".to_owned()])]),
        );
        fixture
            .waiting_pod("both", &["two", "three"], "good", &names(["good", "fine"]))
            .await?;
        let context = fixture
            .wait_for_context("both", "evaluated", |context| {
                context.status.resource_claims.len() == 2
            })
            .await?;
        assert_eq!(unsuitable_nodes(&context)["three"], ["good"]);
        assert_eq!(
            unsuitable_nodes(&context)["two"],
            Vec::<String>::new(),
            "an entry for each claim, even if empty"
        );
        fixture.fence().await?;
        assert_eq!(count(&fixture.driver.calls(), Request::is_allocate), 0);
        controller.stop().await
    })
}

#[test]
fn a_node_that_another_driver_refuses_is_not_allocated_on() -> anyhow::Result<()> {
    with_fixture("other-refuses", async |fixture| {
        let controller = fixture.start().await?;
        fixture.claim("ours").await?;
        fixture
            .make_class("refusing", json!({ "driverName": "other.example.com" }))
            .await?;
        fixture
            .claim_of("theirs", json!({ "resourceClassName": "refusing" }))
            .await?;
        let pod = fixture.pod_naming("pod", &["ours", "theirs"]).await?;
        fixture.context(&pod, "", &names(["good", "bad"])).await?;
        let evaluated = |context: &PodSchedulingContext| unsuitable_nodes(context).contains_key("ours");
        let context = fixture.wait_for_context("pod", "evaluated", evaluated).await?;
        let answer = async |context: &PodSchedulingContext, nodes: &[&str]| {
            let mut context = context.clone();
            context
                .status
                .resource_claims
                .retain(|entry| entry.name != "theirs");
            let entry = json!({ "name": "theirs", "unsuitableNodes": nodes });
            context
                .status
                .resource_claims
                .push(serde_json::from_value(entry)?);
            fixture
                .contexts()
                .replace_status("pod", &PostParams::default(), &context)
                .await?;
            anyhow::Ok(())
        };
        answer(&context, &["bad"]).await?;
        fixture.select_node("pod", "bad").await?;
        fixture.fence().await?;
        assert_eq!(count(&fixture.driver.calls(), Request::is_allocate), 0);
        // The other driver withdraws its refusal.
        answer(&fixture.contexts().get("pod").await?, &[]).await?;
        fixture.wait_until_allocated("ours").await?;
        controller.stop().await
    })
}

#[test]
fn a_selected_node_alone_is_evaluated_and_allocated() -> anyhow::Result<()> {
    with_fixture("selected-alone", async |fixture| {
        fixture.driver.nodes([("good", 1)]);
        let controller = fixture.start().await?;
        let one = pod(fixture, "one").await?;
        fixture.context(&one, "good", &[]).await?;
        fixture.wait_until_allocated("one").await?;
        let two = pod(fixture, "two").await?;
        fixture.context(&two, "good", &[]).await?;
        fixture
            .wait_for_event("two", "NoSuitableDevice", "good: full")
            .await?;
        assert_eq!(
            fixture.driver.call_summaries(),
            ["evaluate one", "allocate one", "evaluate two"]
        );
        // It is served as soon as the first pod ends.
        fixture.remove_pod("one").await?;
        fixture.request_deallocation("one").await?;
        fixture.wait_until_allocated("two").await?;
        controller.stop().await
    })
}

#[test]
fn a_driver_that_cannot_evaluate_is_asked_again() -> anyhow::Result<()> {
    with_fixture("cannot-evaluate", async |fixture| {
        let broken = DriverError::retry("Broken", "the inventory is not there");
        fixture.driver.on(Request::is_evaluate, Action::Fail(broken));
        let controller = fixture.start().await?;
        let one = pod(fixture, "one").await?;
        fixture.context(&one, "node", &names(["node"])).await?;
        fixture
            .wait_for_event("one", "Broken", "the inventory is not there")
            .await?;
        fixture.wait_for_calls("evaluate", 3..).await?;
        assert_eq!(fixture.requests(&controller).await?, ["get pods 200"]);
        fixture.driver.on(Request::is_evaluate, Action::AnswerForNone);
        fixture
            .wait_for_event("one", "DriverMisbehaved", "the driver answered for 0 of 1 claims")
            .await?;
        assert_eq!(count(&fixture.driver.calls(), Request::is_allocate), 0);
        fixture.driver.clear_rule();
        fixture.wait_until_allocated("one").await?;
        controller.stop().await
    })
}

#[test]
fn entries_of_other_drivers_stay_and_answers_are_written_once() -> anyhow::Result<()> {
    with_fixture("other-entries", async |fixture| {
        fixture.driver.nodes([("good", 1)]);
        let controller = fixture.start().await?;
        fixture.claim("ours").await?;
        fixture
            .make_class("others-class", json!({ "driverName": "other.example.com" }))
            .await?;
        fixture
            .claim_of("theirs", json!({ "resourceClassName": "others-class" }))
            .await?;
        let pod = fixture.pod_naming("pod", &["ours", "theirs"]).await?;
        fixture.context(&pod, "", &names(["good", "bad"])).await?;
        // The other driver replaces the full status, as the Go library does.
        let mut context = fixture.wait_until_evaluated("pod").await?;
        context.status.resource_claims.push(serde_json::from_value(
            json!({ "name": "theirs", "unsuitableNodes": ["good"] }),
        )?);
        fixture
            .contexts()
            .replace_status("pod", &PostParams::default(), &context)
            .await?;
        fixture
            .reschedule("pod", json!({ "potentialNodes": ["good", "bad", "worse"] }))
            .await?;
        let context = fixture
            .wait_for_context("pod", "evaluated again", |context| {
                unsuitable_nodes(context)
                    .get("ours")
                    .is_some_and(|nodes| nodes.len() == 2)
            })
            .await?;
        assert_eq!(unsuitable_nodes(&context)["theirs"], ["good"]);
        // The same nodes in another order do not cause a write.
        fixture.driver.on(
            Request::is_evaluate,
            Action::Unsuitable(vec![("ours", names(["worse", "bad"]).to_vec())]),
        );
        fixture
            .reschedule("pod", json!({ "potentialNodes": ["worse", "bad", "good"] }))
            .await?;
        fixture.wait_for_calls("evaluate", 3..=3).await?;
        fixture.fence().await?;
        let requests = fixture.requests(&controller).await?;
        let writes = requests
            .iter()
            .filter(|request| request.starts_with("patch"))
            .count();
        assert_eq!(writes, 2, "{requests:?}");
        assert_eq!(
            count(&fixture.driver.calls(), |request| request.is_about("theirs")),
            0
        );
        controller.stop().await
    })
}

#[test]
fn an_unwritten_answer_is_written_later_without_a_new_call() -> anyhow::Result<()> {
    with_fixture("cannot-write", async |fixture| {
        fixture.driver.nodes([("good", 1)]);
        let rules = crate::fixture::rules_without("podschedulingcontexts/status", "patch");
        let controller = fixture.start_with(&rules).await?;
        let one = pod(fixture, "one").await?;
        fixture.context(&one, "", &names(["good", "bad"])).await?;
        fixture
            .wait_for_entries(&controller, "refuses the answer twice", |entries| {
                entries.iter().filter(|entry| entry.code == 403).count() >= 2
            })
            .await?;
        fixture.allow(&controller).await?;
        let context = fixture.wait_until_evaluated("one").await?;
        assert_eq!(unsuitable_nodes(&context)["device"], ["bad"]);
        assert_eq!(fixture.driver.call_summaries(), ["evaluate one"]);
        controller.stop().await
    })
}

#[test]
fn a_pod_deleted_while_waiting_leaves_nothing_behind() -> anyhow::Result<()> {
    with_fixture("goes-waiting", async |fixture| {
        fixture.driver.nodes([("good", 0)]);
        let controller = fixture.start().await?;
        let one = pod(fixture, "one").await?;
        fixture.context(&one, "", &names(["good"])).await?;
        fixture.wait_for_event("one", "NoSuitableDevice", "full").await?;
        // The event and the answer are written concurrently.
        let answered = |context: &_| !unsuitable_nodes(context).is_empty();
        fixture.wait_for_context("one", "evaluated", answered).await?;
        fixture.remove_pod("one").await?;
        fixture
            .wait_for(fixture.contexts(), "one", "gone", |context: Option<&_>| {
                context.is_none()
            })
            .await?;
        // The controller has processed the deletion. Later capacity changes do not evaluate the pod.
        fixture.fence().await?;
        fixture.driver.nodes([("good", 1)]);
        fixture
            .driver
            .report_capacity(drayman::driver::CapacityCause::Inventory);
        fixture.fence().await?;
        assert_eq!(fixture.driver.call_summaries(), ["evaluate one"]);
        fixture.delete_claim("one").await?;
        fixture.wait_until_gone("one").await?;
        assert_eq!(
            fixture.requests(&controller).await?,
            ["get pods 200", "patch podschedulingcontexts/status 200"]
        );
        controller.stop().await
    })
}

#[test]
fn a_claim_that_is_being_deleted_is_not_allocated_for_a_pod() -> anyhow::Result<()> {
    with_fixture("deleting", async |fixture| {
        let controller = fixture.start().await?;
        let keep = json!({ "name": "one", "finalizers": ["example.com/keep"] });
        fixture.create_claim(json!({ "metadata": keep })).await?;
        fixture.claim("two").await?;
        let pod = fixture.pod_naming("pod", &["one", "two"]).await?;
        fixture.delete_claim("one").await?;
        fixture.context(&pod, "node", &names(["node"])).await?;
        fixture.fence().await?;
        assert_eq!(
            fixture.driver.call_summaries(),
            Vec::<String>::new(),
            "nor the other claim of the pod"
        );
        let requests = fixture.requests(&controller).await?;
        assert!(
            requests.iter().all(|request| request == "get pods 200"),
            "{requests:?}"
        );
        fixture
            .patch_claim("one", json!({ "metadata": { "finalizers": null } }))
            .await?;
        fixture.wait_until_gone("one").await?;
        fixture.claim("one").await?;
        for name in ["one", "two"] {
            fixture.wait_until_allocated(name).await?;
        }
        controller.stop().await
    })
}
