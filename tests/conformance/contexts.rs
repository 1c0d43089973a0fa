//! What the controller makes of a PodSchedulingContext. The test is the scheduler.

use drayman::api::resource::PodSchedulingContext;
use drayman::driver::DriverError;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use serde_json::json;

use crate::call::{Call, What, count};
use crate::objects::From;
use crate::script::Act;
use crate::stage::{Stage, is_allocated, names, on_stage, verdicts};

/// A pod with one claim, both by this name.
async fn pod(stage: &Stage, name: &str) -> anyhow::Result<drayman::api::resource::Pod> {
    stage.claim(name).await?;
    stage.pod(name, &[("device", From::Claim(name))]).await
}

#[test]
fn an_empty_or_foreign_context_is_left_alone() -> anyhow::Result<()> {
    on_stage("left-alone", async |stage| {
        let controller = stage.start().await?;
        let empty = pod(stage, "empty").await?;
        stage.context(&empty, "", &[]).await?;
        let going = pod(stage, "going").await?;
        let finalizer = json!({ "finalizers": ["example.com/keep"] });
        stage.context_with(&going, finalizer, "", &[]).await?;
        stage.contexts().delete("going", &DeleteParams::default()).await?;
        stage
            .reschedule("going", json!({ "selectedNode": "node" }))
            .await?;
        let orphan = pod(stage, "orphan").await?;
        stage
            .context_with(&orphan, json!({}), "node", &names(["node"]))
            .await?;
        stage.fence().await?;
        assert_eq!(
            stage.requests(&controller).await?,
            Vec::<String>::new(),
            "not even the pod is read"
        );

        // Owned by another pod than the one that is there now.
        stage.claim("stranger").await?;
        stage
            .pod("stranger", &[("device", From::Claim("stranger"))])
            .await?;
        stage.context_with(&orphan, json!({ "name": "stranger", "ownerReferences": [{
            "apiVersion": "v1", "kind": "Pod", "name": "orphan", "uid": orphan.metadata.uid, "controller": true,
        }] }), "node", &names(["node"])).await?;
        stage.fence().await?;
        assert_eq!(stage.requests(&controller).await?, ["get pods 200"]);
        assert_eq!(stage.driver.story(), Vec::<String>::new());
        assert_eq!(stage.events("stranger").await?, []);
        controller.end().await
    })
}

#[test]
fn a_pod_that_ends_has_ended_or_is_not_there_is_not_served() -> anyhow::Result<()> {
    on_stage("not-served", async |stage| {
        let controller = stage.start().await?;
        stage.claim("going").await?;
        let going = stage
            .pod_with(
                "going",
                &[("device", From::Claim("going"))],
                json!({ "schedulerName": "the-test" }),
            )
            .await?;
        let keep = Patch::Merge(json!({ "metadata": { "finalizers": ["example.com/keep"] } }));
        stage
            .pods()
            .patch("going", &PatchParams::default(), &keep)
            .await?;
        stage.pods().delete("going", &DeleteParams::default()).await?;
        stage.context(&going, "node", &names(["node"])).await?;
        let over = pod(stage, "over").await?;
        let failed = Patch::Merge(json!({ "status": { "phase": "Failed" } }));
        stage
            .pods()
            .patch_status("over", &PatchParams::default(), &failed)
            .await?;
        stage.context(&over, "node", &names(["node"])).await?;
        // The collector needs a moment to find that the owner is gone; until then the context names a pod that does not exist.
        let gone = pod(stage, "gone").await?;
        stage.remove_pod("gone").await?;
        let finalizer = json!({ "finalizers": ["example.com/keep"], "ownerReferences": [{
            "apiVersion": "v1", "kind": "Pod", "name": "gone", "uid": gone.metadata.uid, "controller": true }] });
        stage
            .context_with(&gone, finalizer, "node", &names(["node"]))
            .await?;
        stage.fence().await?;
        assert_eq!(stage.driver.story(), Vec::<String>::new());
        let requests = stage.requests(&controller).await?;
        assert!(
            requests.len() <= 3,
            "each pod is read once at most, found or not: {requests:?}"
        );
        assert!(
            requests.iter().all(|request| request.starts_with("get pods")),
            "{requests:?}"
        );
        for name in ["going", "over", "gone"] {
            assert_eq!(stage.events(name).await?, []);
        }
        let free = Patch::Merge(json!({ "metadata": { "finalizers": null } }));
        stage
            .pods()
            .patch("going", &PatchParams::default(), &free)
            .await?;
        controller.end().await
    })
}

#[test]
fn potential_and_selected_nodes_are_evaluated_before_allocation() -> anyhow::Result<()> {
    on_stage("nodes", async |stage| {
        stage.driver.nodes([("good", 1), ("fine", 1)]);
        let controller = stage.start().await?;
        let one = pod(stage, "one").await?;
        stage
            .context(&one, "bad", &names(["good", "fine", "worse"]))
            .await?;
        let context = stage
            .until_context("one", "judged", |context| {
                !context.status.resource_claims.is_empty()
            })
            .await?;
        assert_eq!(
            verdicts(&context)["device"],
            ["bad", "worse"],
            "the selected node is judged though it is not potential"
        );
        let calls = stage.driver.calls();
        let asked_about = |calls: &[Call]| -> Vec<Vec<String>> {
            let nodes = calls.iter().filter_map(|call| match &call.what {
                What::Judge { nodes, pod, .. } if pod == "one" => Some(nodes.clone()),
                _ => None,
            });
            nodes.collect()
        };
        let sorted = |nodes: &[String]| {
            let mut nodes = nodes.to_vec();
            nodes.sort();
            nodes
        };
        let asked = asked_about(&calls);
        assert_eq!(asked.len(), 1);
        assert_eq!(asked[0][0], "bad", "the selected node comes first");
        assert_eq!(sorted(&asked[0]), ["bad", "fine", "good", "worse"]);
        assert_eq!(count(&calls, What::is_allocate), 0);
        // The scheduler lists no longer what was found bad. It is asked about all the same, and stays in the answer.
        stage
            .reschedule(
                "one",
                json!({ "selectedNode": "", "potentialNodes": ["fine", "new"] }),
            )
            .await?;
        let context = stage
            .until_context("one", "judged anew", |context| {
                verdicts(context)["device"].contains(&"new".to_owned())
            })
            .await?;
        assert_eq!(sorted(&verdicts(&context)["device"]), ["bad", "new", "worse"]);
        let asked = asked_about(&stage.driver.calls());
        assert_eq!(sorted(&asked[1]), ["bad", "fine", "new", "worse"]);
        // Unsuitable for one of two claims is unsuitable for the pod.
        stage.driver.rule(|what| match what {
            What::Judge { .. } => Act::Unsuitable(vec![("three", vec!["good".to_owned()])]),
            _ => Act::Go,
        });
        stage.claim("two").await?;
        stage.claim("three").await?;
        let both = stage
            .pod(
                "both",
                &[("two", From::Claim("two")), ("three", From::Claim("three"))],
            )
            .await?;
        stage.context(&both, "good", &names(["good", "fine"])).await?;
        let context = stage
            .until_context("both", "judged", |context| {
                context.status.resource_claims.len() == 2
            })
            .await?;
        assert_eq!(verdicts(&context)["three"], ["good"]);
        assert_eq!(
            verdicts(&context)["two"],
            Vec::<String>::new(),
            "an entry for each claim, even an empty one"
        );
        stage.fence().await?;
        assert_eq!(count(&stage.driver.calls(), What::is_allocate), 0);
        controller.end().await
    })
}

#[test]
fn a_node_that_another_driver_refuses_is_not_allocated_on() -> anyhow::Result<()> {
    on_stage("other-refuses", async |stage| {
        let controller = stage.start().await?;
        stage.claim("ours").await?;
        stage
            .make_class("refusing", json!({ "driverName": "somebody.example.com" }))
            .await?;
        stage
            .claim_of("theirs", json!({ "resourceClassName": "refusing" }))
            .await?;
        let pod = stage
            .pod(
                "pod",
                &[("ours", From::Claim("ours")), ("theirs", From::Claim("theirs"))],
            )
            .await?;
        stage.context(&pod, "", &names(["good", "bad"])).await?;
        let judged = |context: &PodSchedulingContext| verdicts(context).contains_key("ours");
        let context = stage.until_context("pod", "judged", judged).await?;
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
            stage
                .contexts()
                .replace_status("pod", &PostParams::default(), &context)
                .await?;
            anyhow::Ok(())
        };
        answer(&context, &["bad"]).await?;
        stage.reschedule("pod", json!({ "selectedNode": "bad" })).await?;
        stage.fence().await?;
        assert_eq!(count(&stage.driver.calls(), What::is_allocate), 0);
        // The other driver takes it back.
        answer(&stage.contexts().get("pod").await?, &[]).await?;
        stage.until_claim("ours", "allocated", is_allocated).await?;
        controller.end().await
    })
}

#[test]
fn a_selected_node_alone_is_evaluated_and_allocated() -> anyhow::Result<()> {
    on_stage("selected-alone", async |stage| {
        stage.driver.nodes([("good", 1)]);
        let controller = stage.start().await?;
        let one = pod(stage, "one").await?;
        stage.context(&one, "good", &[]).await?;
        stage.until_claim("one", "allocated", is_allocated).await?;
        let two = pod(stage, "two").await?;
        stage.context(&two, "good", &[]).await?;
        stage.event("two", "NoSuitableDevice", "good: full").await?;
        assert_eq!(stage.driver.story(), ["judge one", "allocate one", "judge two"]);
        // It is served as soon as the first has gone.
        stage.remove_pod("one").await?;
        stage.give_up("one").await?;
        stage.until_claim("two", "allocated", is_allocated).await?;
        controller.end().await
    })
}

#[test]
fn a_driver_that_cannot_evaluate_is_asked_again() -> anyhow::Result<()> {
    on_stage("cannot-judge", async |stage| {
        let broken = DriverError::retry("Broken", "the inventory is not there");
        stage.driver.rule(move |what| {
            if what.is_judge() {
                Act::Fail(broken.clone())
            } else {
                Act::Go
            }
        });
        let controller = stage.start().await?;
        let one = pod(stage, "one").await?;
        stage.context(&one, "node", &names(["node"])).await?;
        stage.event("one", "Broken", "the inventory is not there").await?;
        stage
            .driver
            .until("judge thrice", |calls| count(calls, What::is_judge) >= 3)
            .await?;
        assert_eq!(stage.requests(&controller).await?, ["get pods 200"]);
        stage
            .driver
            .rule(|what| if what.is_judge() { Act::Short } else { Act::Go });
        stage
            .event("one", "DriverMisbehaved", "the driver answered for 0 of 1 claims")
            .await?;
        assert_eq!(count(&stage.driver.calls(), What::is_allocate), 0);
        stage.driver.behave();
        stage.until_claim("one", "allocated", is_allocated).await?;
        controller.end().await
    })
}

#[test]
fn entries_of_other_drivers_stay_and_answers_are_written_once() -> anyhow::Result<()> {
    on_stage("other-entries", async |stage| {
        stage.driver.nodes([("good", 1)]);
        let controller = stage.start().await?;
        stage.claim("ours").await?;
        stage
            .make_class("others-class", json!({ "driverName": "somebody.example.com" }))
            .await?;
        stage
            .claim_of("theirs", json!({ "resourceClassName": "others-class" }))
            .await?;
        let pod = stage
            .pod(
                "pod",
                &[("ours", From::Claim("ours")), ("theirs", From::Claim("theirs"))],
            )
            .await?;
        stage.context(&pod, "", &names(["good", "bad"])).await?;
        // The other driver as the Go library does it: a full update of the status.
        let mut context = stage
            .until_context("pod", "judged", |context| {
                !context.status.resource_claims.is_empty()
            })
            .await?;
        context.status.resource_claims.push(serde_json::from_value(
            json!({ "name": "theirs", "unsuitableNodes": ["good"] }),
        )?);
        stage
            .contexts()
            .replace_status("pod", &PostParams::default(), &context)
            .await?;
        stage
            .reschedule("pod", json!({ "potentialNodes": ["good", "bad", "worse"] }))
            .await?;
        let context = stage
            .until_context("pod", "judged again", |context| {
                verdicts(context)
                    .get("ours")
                    .is_some_and(|nodes| nodes.len() == 2)
            })
            .await?;
        assert_eq!(verdicts(&context)["theirs"], ["good"]);
        // The same answer again, whatever its order, is no write.
        stage.driver.rule(|what| match what {
            What::Judge { .. } => Act::Unsuitable(vec![("ours", names(["worse", "bad"]).to_vec())]),
            _ => Act::Go,
        });
        stage
            .reschedule("pod", json!({ "potentialNodes": ["worse", "bad", "good"] }))
            .await?;
        stage
            .driver
            .until("judge thrice", |calls| count(calls, What::is_judge) == 3)
            .await?;
        stage.fence().await?;
        let requests = stage.requests(&controller).await?;
        let writes = requests
            .iter()
            .filter(|request| request.starts_with("patch"))
            .count();
        assert_eq!(writes, 2, "{requests:?}");
        assert_eq!(count(&stage.driver.calls(), |what| what.is_about("theirs")), 0);
        controller.end().await
    })
}

#[test]
fn an_unwritten_answer_is_written_later_without_a_new_call() -> anyhow::Result<()> {
    on_stage("cannot-write", async |stage| {
        stage.driver.nodes([("good", 1)]);
        let rules = crate::stage::rules_without("podschedulingcontexts/status", "patch");
        let controller = stage
            .start_as("", &stage.driver, &rules, |builder| builder)
            .await?;
        let one = pod(stage, "one").await?;
        stage.context(&one, "", &names(["good", "bad"])).await?;
        stage
            .until_entries(&controller, "refuses the answer twice", |entries| {
                entries.iter().filter(|entry| entry.code == 403).count() >= 2
            })
            .await?;
        stage.allow(&controller).await?;
        let context = stage
            .until_context("one", "judged", |context| {
                !context.status.resource_claims.is_empty()
            })
            .await?;
        assert_eq!(verdicts(&context)["device"], ["bad"]);
        assert_eq!(stage.driver.story(), ["judge one"]);
        controller.end().await
    })
}

#[test]
fn a_pod_that_goes_while_it_waits_leaves_nothing_behind() -> anyhow::Result<()> {
    on_stage("goes-waiting", async |stage| {
        stage.driver.nodes([("good", 0)]);
        let controller = stage.start().await?;
        let one = pod(stage, "one").await?;
        stage.context(&one, "", &names(["good"])).await?;
        stage.event("one", "NoSuitableDevice", "full").await?;
        // The event and the answer are written side by side.
        let answered = |context: &_| !verdicts(context).is_empty();
        stage.until_context("one", "judged", answered).await?;
        stage.remove_pod("one").await?;
        stage
            .until(stage.contexts(), "one", "gone", |context: Option<&_>| {
                context.is_none()
            })
            .await?;
        // The controller has seen it, too. Whatever becomes possible now, it is no longer asked about.
        stage.fence().await?;
        stage.driver.nodes([("good", 1)]);
        stage.driver.announce(drayman::driver::CapacityCause::Inventory);
        stage.fence().await?;
        assert_eq!(stage.driver.story(), ["judge one"]);
        stage.delete_claim("one").await?;
        stage.until_gone("one").await?;
        assert_eq!(
            stage.requests(&controller).await?,
            ["get pods 200", "patch podschedulingcontexts/status 200"]
        );
        controller.end().await
    })
}

#[test]
fn a_claim_that_is_being_deleted_is_not_allocated_for_a_pod() -> anyhow::Result<()> {
    on_stage("deleting", async |stage| {
        let controller = stage.start().await?;
        let keep = json!({ "name": "one", "finalizers": ["example.com/keep"] });
        stage.create_claim(json!({ "metadata": keep })).await?;
        stage.claim("two").await?;
        let pod = stage
            .pod("pod", &[("one", From::Claim("one")), ("two", From::Claim("two"))])
            .await?;
        stage.delete_claim("one").await?;
        stage.context(&pod, "node", &names(["node"])).await?;
        stage.fence().await?;
        assert_eq!(
            stage.driver.story(),
            Vec::<String>::new(),
            "nor the other claim of the pod"
        );
        let requests = stage.requests(&controller).await?;
        assert!(
            requests.iter().all(|request| request == "get pods 200"),
            "{requests:?}"
        );
        stage
            .patch_claim("one", json!({ "metadata": { "finalizers": null } }))
            .await?;
        stage.until_gone("one").await?;
        stage.claim("one").await?;
        for name in ["one", "two"] {
            stage.until_claim(name, "allocated", is_allocated).await?;
        }
        controller.end().await
    })
}
