//! The test cluster's control loops beside the real ones: scheduler, claim controller, garbage collector and namespaces. Nodes exist only
//! in the API, and the test acts as the driver. The sequences of states of claims, contexts and pods are compared.

pub(crate) mod ground;
mod states;

use std::time::Duration;

use anyhow::Context as _;
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};

use self::ground::{PATIENCE, both, send};
use crate::parity::ground::JSON;

#[test]
fn a_template_claim_passes_the_same_states_as_a_named_one() {
    both("loops-template", async |ground| {
        ground.pod("one", &[("device", None)]).await?;
        ground.until_selected("loop-a").await?;
        ground.allocate("device", "loop-a").await?;
        ground.until_bound().await?;
        let done = json!({ "status": { "phase": "Succeeded" } });
        ground.patch("pods", "pod/status", &done).await?;
        ground.until_deleting(1).await?;
        ground.clear("device").await?;
        // For a bound pod, deallocation is requested regardless of the pod's phase.
        let asked = |found: &[Value]| {
            found
                .iter()
                .any(|context| context["spec"]["selectedNode"] == "loop-a")
        };
        let what = "the claim is asked for again";
        ground.until(what, "podschedulingcontexts", asked).await?;
        ground.let_go("device").await?;
        ground.until_none("resourceclaims").await?;
        ground.delete("pods", "pod").await?;
        ground.until_none("pods").await?;
        ground.until_none("podschedulingcontexts").await
    });
}

#[test]
fn two_claims_are_evaluated_before_a_node_is_selected() {
    both("loops-two", async |ground| {
        ground.pod("two", &[("first", None), ("second", None)]).await?;
        let offered = |found: &[Value]| {
            let nodes = found.first().map(|context| &context["spec"]["potentialNodes"]);
            nodes == Some(&json!(["loop-b", "loop-c"]))
        };
        ground
            .until("both nodes are offered", "podschedulingcontexts", offered)
            .await?;
        ground.judge(&[("first", &["loop-c"]), ("second", &[])]).await?;
        ground.until_selected("loop-b").await?;
        ground.allocate("first", "loop-b").await?;
        ground.allocate("second", "loop-b").await?;
        ground.until_bound().await?;
        ground.delete("pods", "pod").await?;
        ground.until_deleting(2).await?;
        ground.deallocate("first").await?;
        ground.deallocate("second").await?;
        ground.until_none("resourceclaims").await
    });
}

#[test]
fn a_claim_that_keeps_its_pod_from_every_node_is_asked_for() {
    both("loops-deallocate", async |ground| {
        let claim =
            json!({ "metadata": { "name": "own" }, "spec": { "resourceClassName": ground.namespace } });
        ground.create("resourceclaims", &claim).await?;
        ground.allocate("own", "loop-b").await?;
        ground.pod("one", &[("own", Some("own"))]).await?;
        let asked = |found: &[Value]| {
            found
                .iter()
                .any(|claim| claim["status"]["deallocationRequested"] == true)
        };
        ground.until("it is asked for", "resourceclaims", asked).await?;
        ground.deallocate("own").await?;
        ground.until_selected("loop-a").await?;
        ground.allocate("own", "loop-a").await?;
        ground.until_bound().await?;
        ground.delete("pods", "pod").await?;
        // The claim was reserved for this pod only, and is not owned by it.
        let asked = |found: &[Value]| {
            found
                .iter()
                .all(|claim| claim["status"]["deallocationRequested"] == true)
        };
        ground
            .until("it is asked for again", "resourceclaims", asked)
            .await?;
        ground.deallocate("own").await?;
        ground.delete("resourceclaims", "own").await?;
        ground.until_none("resourceclaims").await
    });
}

#[test]
fn a_selected_node_that_becomes_unsuitable_is_waited_for() {
    both("loops-unsuitable", async |ground| {
        ground.pod("one", &[("first", None), ("second", None)]).await?;
        let offered = |found: &[Value]| {
            let nodes = found.first().map(|context| &context["spec"]["potentialNodes"]);
            nodes == Some(&json!(["loop-a"]))
        };
        ground
            .until("the node is offered", "podschedulingcontexts", offered)
            .await?;
        ground.judge(&[("first", &[]), ("second", &[])]).await?;
        ground.until_selected("loop-a").await?;
        ground
            .judge(&[("first", &["loop-a"]), ("second", &["loop-a"])])
            .await?;
        let told = |found: &[Value]| {
            let conditions = found.first().map(|pod| pod["status"]["conditions"].to_string());
            conditions.is_some_and(|conditions| conditions.contains("Unschedulable"))
        };
        ground.until("the pod is unschedulable", "pods", told).await?;
        ground.judge(&[("first", &[]), ("second", &[])]).await?;
        ground.allocate("first", "loop-a").await?;
        ground.allocate("second", "loop-a").await?;
        ground.until_bound().await?;
        ground.delete("pods", "pod").await?;
        ground.until_deleting(2).await?;
        ground.deallocate("first").await?;
        ground.deallocate("second").await?;
        ground.until_none("resourceclaims").await
    });
}

#[test]
fn what_a_pod_that_is_deleted_while_it_waits_owns_goes_with_it() {
    both("loops-owner", async |ground| {
        ground.pod("one", &[("device", None)]).await?;
        ground.until_selected("loop-a").await?;
        ground.delete("pods", "pod").await?;
        ground.until_none("resourceclaims").await?;
        ground.until_none("podschedulingcontexts").await
    });
}

#[test]
fn a_namespace_is_removed_when_the_driver_releases_claims() {
    both("loops-namespace", async |ground| {
        ground.pod("one", &[("device", None)]).await?;
        ground.until_selected("loop-a").await?;
        ground.allocate("device", "loop-a").await?;
        ground.until_bound().await?;
        let path = format!("/api/v1/namespaces/{}", ground.namespace);
        send(&ground.client, "DELETE", &path, JSON, &Value::Null).await?;
        // The real pod needs a kubelet to terminate, which does not exist here.
        let going = |found: &[Value]| {
            found
                .iter()
                .all(|pod| pod["metadata"]["deletionTimestamp"].is_string())
        };
        ground.until("the pod is being deleted", "pods", going).await?;
        if !ground.list("pods").await?.is_empty() {
            ground.delete("pods", "pod").await?;
        }
        ground.until_deleting(1).await?;
        ground.deallocate("device").await?;
        ground.until_none("resourceclaims").await?;
        let waiting = async {
            while send(&ground.client, "GET", &path, JSON, &Value::Null)
                .await
                .is_ok()
            {
                sleep(Duration::from_millis(50)).await;
            }
        };
        timeout(PATIENCE, waiting)
            .await
            .context("the namespace is never gone")
    });
}
