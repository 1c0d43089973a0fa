//! Claims with owners. A pod may name any claim of its namespace; the owner matters for template claims only.

use k8s_openapi::api::batch::v1::Job;
use kube::api::{Api, PostParams};
use serde_json::json;

use crate::fixture::with_fixture;
use crate::harness::IMAGE;
use crate::objects::ClaimSource;

#[test]
fn a_claim_that_a_job_owns_serves_any_pod_that_names_it() -> anyhow::Result<()> {
    with_fixture("owned-by-job", async |fixture| {
        fixture.node("a").await?;
        let controller = fixture.start().await?;
        // The suspended job creates no pods, and its existence protects its dependents from garbage collection.
        let container = json!({ "name": "main", "image": IMAGE });
        let job: Job = serde_json::from_value(json!({ "metadata": { "name": "operator" }, "spec": {
            "suspend": true,
            "template": { "spec": { "restartPolicy": "Never", "containers": [container] } } } }))?;
        let jobs = Api::<Job>::namespaced(fixture.cluster.client(), &fixture.name);
        let job = jobs.create(&PostParams::default(), &job).await?;
        let owner = json!({ "apiVersion": "batch/v1", "kind": "Job", "name": "operator", "uid": job.metadata.uid,
            "controller": true, "blockOwnerDeletion": true });
        for (claim, pod) in [("one", "first"), ("two", "second")] {
            fixture
                .create_claim(json!({ "metadata": { "name": claim, "ownerReferences": [owner] } }))
                .await?;
            fixture
                .scheduled_pod(pod, &[("device", ClaimSource::Claim(claim))])
                .await?;
            fixture.wait_until_bound(pod).await?;
        }
        assert_eq!(fixture.driver.counts(), (2, 0));
        controller.stop().await
    })
}

#[test]
fn a_claim_owned_but_unused_serves_the_pod_that_names_it() -> anyhow::Result<()> {
    with_fixture("owned-by-pod", async |fixture| {
        fixture.node("a").await?;
        let controller = fixture.start().await?;
        // A pod that creates claims for other pods, such as a launcher.
        let launcher = fixture.scheduled_pod("launcher", &[]).await?;
        fixture.wait_until_bound("launcher").await?;
        let owner = json!({ "apiVersion": "v1", "kind": "Pod", "name": "launcher", "uid": launcher.metadata.uid,
            "controller": true });
        fixture
            .create_claim(json!({ "metadata": { "name": "one", "ownerReferences": [owner] } }))
            .await?;
        fixture
            .scheduled_pod("worker", &[("device", ClaimSource::Claim("one"))])
            .await?;
        fixture.wait_until_bound("worker").await?;
        controller.stop().await
    })
}

#[test]
fn a_claim_of_an_unscheduled_pod_serves_another_pod() -> anyhow::Result<()> {
    with_fixture("made-for-another", async |fixture| {
        fixture.node("a").await?;
        let controller = fixture.start().await?;
        fixture.template("template", &fixture.name).await?;
        // This pod is not scheduled.
        fixture
            .pod("owner", &[("device", ClaimSource::Template("template"))])
            .await?;
        let claim = fixture.wait_for_generated("owner").await?;
        fixture
            .scheduled_pod("user", &[("device", ClaimSource::Claim(&claim))])
            .await?;
        fixture.wait_until_bound("user").await?;
        let claim = fixture.claims().get(&claim).await?;
        let users: Vec<&str> = claim
            .status
            .reserved_for
            .iter()
            .map(|user| user.name.as_str())
            .collect();
        assert_eq!(users, ["user"]);
        let entries = fixture.audit_entries(&controller).await?;
        let reads = entries
            .iter()
            .filter(|entry| entry.resource == "pods" && entry.name == "user");
        assert_eq!(reads.count(), 1, "it is read once");
        controller.stop().await
    })
}
