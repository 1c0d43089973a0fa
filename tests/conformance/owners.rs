//! Claims that somebody owns. A pod may name any claim of its namespace: whose it is matters for claims from templates only.

use drayman::api::resource::{Pod, ResourceClaim};
use k8s_openapi::api::batch::v1::Job;
use kube::api::{Api, PostParams};
use serde_json::json;

use crate::harness::IMAGE;
use crate::objects::From;
use crate::stage::{Stage, on_stage};

/// The name of the claim that was made for a pod with the one entry `device`.
async fn generated_for(stage: &Stage, pod: &str) -> anyhow::Result<String> {
    if stage.cluster.minor() < 28 {
        let name = format!("{pod}-device");
        stage
            .until(stage.claims(), &name, "made", |claim: Option<&ResourceClaim>| {
                claim.is_some()
            })
            .await?;
        return Ok(name);
    }
    let name = |pod: Option<&Pod>| {
        let status = pod?.status.resource_claim_statuses.first()?;
        status.resource_claim_name.clone()
    };
    let named = move |pod: Option<&Pod>| name(pod).is_some();
    let pod = stage.until(stage.pods(), pod, "given a claim", named).await?;
    name(pod.as_ref()).ok_or_else(|| anyhow::anyhow!("the pod has a claim"))
}

#[test]
fn a_claim_that_a_job_owns_serves_any_pod_that_names_it() -> anyhow::Result<()> {
    on_stage("owned-by-job", async |stage| {
        stage.node("a").await?;
        let controller = stage.start().await?;
        // It makes no pods, and as long as it is there nobody collects what it owns.
        let container = json!({ "name": "main", "image": IMAGE });
        let job: Job = serde_json::from_value(json!({ "metadata": { "name": "operator" }, "spec": {
            "suspend": true,
            "template": { "spec": { "restartPolicy": "Never", "containers": [container] } } } }))?;
        let jobs = Api::<Job>::namespaced(stage.cluster.client(), &stage.name);
        let job = jobs.create(&PostParams::default(), &job).await?;
        let owner = json!({ "apiVersion": "batch/v1", "kind": "Job", "name": "operator", "uid": job.metadata.uid,
            "controller": true, "blockOwnerDeletion": true });
        for (claim, pod) in [("one", "first"), ("two", "second")] {
            stage
                .create_claim(json!({ "metadata": { "name": claim, "ownerReferences": [owner] } }))
                .await?;
            stage
                .scheduled_pod(pod, &[("device", From::Claim(claim))])
                .await?;
            stage.until_bound(pod).await?;
        }
        assert_eq!(stage.driver.counts(), (2, 0));
        controller.end().await
    })
}

#[test]
fn a_claim_owned_but_unused_serves_the_pod_that_names_it() -> anyhow::Result<()> {
    on_stage("owned-by-pod", async |stage| {
        stage.node("a").await?;
        let controller = stage.start().await?;
        // One that makes claims for others, as a launcher does.
        let launcher = stage.scheduled_pod("launcher", &[]).await?;
        stage.until_bound("launcher").await?;
        let owner = json!({ "apiVersion": "v1", "kind": "Pod", "name": "launcher", "uid": launcher.metadata.uid,
            "controller": true });
        stage
            .create_claim(json!({ "metadata": { "name": "one", "ownerReferences": [owner] } }))
            .await?;
        stage
            .scheduled_pod("worker", &[("device", From::Claim("one"))])
            .await?;
        stage.until_bound("worker").await?;
        controller.end().await
    })
}

#[test]
fn a_claim_of_an_unscheduled_pod_serves_another_pod() -> anyhow::Result<()> {
    on_stage("made-for-another", async |stage| {
        stage.node("a").await?;
        let controller = stage.start().await?;
        stage.template("template", &stage.name).await?;
        // Nobody schedules this one.
        stage
            .pod("owner", &[("device", From::Template("template"))])
            .await?;
        let claim = generated_for(stage, "owner").await?;
        stage
            .scheduled_pod("user", &[("device", From::Claim(&claim))])
            .await?;
        stage.until_bound("user").await?;
        let claim = stage.claims().get(&claim).await?;
        let users: Vec<&str> = claim
            .status
            .reserved_for
            .iter()
            .map(|user| user.name.as_str())
            .collect();
        assert_eq!(users, ["user"]);
        let entries = stage.entries(&controller).await?;
        let reads = entries
            .iter()
            .filter(|entry| entry.resource == "pods" && entry.name == "user");
        assert_eq!(reads.count(), 1, "it is read once");
        controller.end().await
    })
}
