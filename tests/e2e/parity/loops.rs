//! The test cluster's control loops beside the real ones: scheduler, claim controller, garbage collector and namespaces. Nodes exist only
//! in the API, and the test acts as the driver. The sequences of states of claims, contexts and pods are compared.

pub(crate) mod fixture;
mod states;

use std::time::Duration;

use anyhow::Context as _;
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};

use self::fixture::{Fixture, TIMEOUT, both, send};
use crate::parity::server::JSON;

#[test]
fn a_template_claim_passes_the_same_states_as_a_named_one() {
    both("loops-template", async |fixture| {
        fixture.pod("one", &[("device", None)]).await?;
        fixture.until_selected("loop-a").await?;
        fixture.allocate("device", "loop-a").await?;
        fixture.until_bound().await?;
        let done = json!({ "status": { "phase": "Succeeded" } });
        fixture.patch("pods", "pod/status", &done).await?;
        fixture.until_deleting(1).await?;
        fixture.clear("device").await?;
        // For a bound pod, deallocation is requested regardless of the pod's phase.
        fixture.until_selected("loop-a").await?;
        fixture.remove_finalizer("device").await?;
        fixture.until_none("resourceclaims").await?;
        fixture.delete("pods", "pod").await?;
        fixture.until_none("pods").await?;
        fixture.until_none("podschedulingcontexts").await
    });
}

/// Allocates both claims of the pod, and deletes it once it is bound.
async fn live_with_two(fixture: &Fixture, node: &str) -> anyhow::Result<()> {
    fixture.allocate("first", node).await?;
    fixture.allocate("second", node).await?;
    fixture.until_bound().await?;
    fixture.delete("pods", "pod").await?;
    fixture.until_deleting(2).await?;
    fixture.deallocate("first").await?;
    fixture.deallocate("second").await?;
    fixture.until_none("resourceclaims").await
}

#[test]
fn two_claims_are_evaluated_before_a_node_is_selected() {
    both("loops-two", async |fixture| {
        fixture.pod("two", &[("first", None), ("second", None)]).await?;
        fixture.until_offered(&["loop-b", "loop-c"]).await?;
        fixture
            .set_unsuitable(&[("first", &["loop-c"]), ("second", &[])])
            .await?;
        fixture.until_selected("loop-b").await?;
        live_with_two(fixture, "loop-b").await
    });
}

#[test]
fn a_claim_that_prevents_scheduling_is_deallocated() {
    both("loops-deallocate", async |fixture| {
        let claim =
            json!({ "metadata": { "name": "own" }, "spec": { "resourceClassName": fixture.namespace } });
        fixture.create("resourceclaims", &claim).await?;
        fixture.allocate("own", "loop-b").await?;
        fixture.pod("one", &[("own", Some("own"))]).await?;
        let asked = |found: &[Value]| found[0]["status"]["deallocationRequested"] == true;
        fixture.until("it is asked for", "resourceclaims", asked).await?;
        fixture.deallocate("own").await?;
        fixture.until_selected("loop-a").await?;
        fixture.allocate("own", "loop-a").await?;
        fixture.until_bound().await?;
        fixture.delete("pods", "pod").await?;
        // The claim was reserved for this pod only, and is not owned by it.
        fixture
            .until("it is asked for again", "resourceclaims", asked)
            .await?;
        fixture.deallocate("own").await?;
        fixture.delete("resourceclaims", "own").await?;
        fixture.until_none("resourceclaims").await
    });
}

#[test]
fn a_selected_node_that_becomes_unsuitable_is_waited_for() {
    both("loops-unsuitable", async |fixture| {
        fixture.pod("one", &[("first", None), ("second", None)]).await?;
        fixture.until_offered(&["loop-a"]).await?;
        fixture.set_unsuitable(&[("first", &[]), ("second", &[])]).await?;
        fixture.until_selected("loop-a").await?;
        fixture
            .set_unsuitable(&[("first", &["loop-a"]), ("second", &["loop-a"])])
            .await?;
        let is_unschedulable = |found: &[Value]| {
            let conditions = found.first().map(|pod| pod["status"]["conditions"].to_string());
            conditions.is_some_and(|conditions| conditions.contains("Unschedulable"))
        };
        fixture
            .until("the pod is unschedulable", "pods", is_unschedulable)
            .await?;
        fixture.set_unsuitable(&[("first", &[]), ("second", &[])]).await?;
        live_with_two(fixture, "loop-a").await
    });
}

#[test]
fn claims_of_a_pod_deleted_while_waiting_are_deleted() {
    both("loops-owner", async |fixture| {
        fixture.pod("one", &[("device", None)]).await?;
        fixture.until_selected("loop-a").await?;
        fixture.delete("pods", "pod").await?;
        fixture.until_none("resourceclaims").await?;
        fixture.until_none("podschedulingcontexts").await
    });
}

#[test]
fn a_namespace_is_removed_when_the_driver_releases_claims() {
    both("loops-namespace", async |fixture| {
        fixture.pod("one", &[("device", None)]).await?;
        fixture.until_selected("loop-a").await?;
        fixture.allocate("device", "loop-a").await?;
        fixture.until_bound().await?;
        let path = format!("/api/v1/namespaces/{}", fixture.namespace);
        send(&fixture.client, "DELETE", &path, JSON, &Value::Null).await?;
        // The real pod needs a kubelet to terminate, which does not exist here.
        let is_going = |pod: &Value| pod["metadata"]["deletionTimestamp"].is_string();
        let going = |found: &[Value]| found.iter().all(is_going);
        fixture.until("the pod is being deleted", "pods", going).await?;
        if !fixture.list("pods").await?.is_empty() {
            fixture.delete("pods", "pod").await?;
        }
        fixture.until_deleting(1).await?;
        fixture.deallocate("device").await?;
        fixture.until_none("resourceclaims").await?;
        let waiting = async {
            let get = async || send(&fixture.client, "GET", &path, JSON, &Value::Null).await;
            while get().await.is_ok() {
                sleep(Duration::from_millis(50)).await;
            }
        };
        timeout(TIMEOUT, waiting)
            .await
            .context("the namespace is not deleted in time")
    });
}
