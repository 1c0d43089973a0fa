//! Which claim an entry of a pod is. The test is the scheduler, and where the claim controller would give other names, that too.

use kube::api::{Patch, PatchParams};
use serde_json::json;

use drayman::api::resource::Pod;

use crate::call::{What, count};
use crate::objects::From;

use crate::stage::{Stage, is_allocated, names, on_stage};

/// What a claim needs to be a pod's own.
fn owned_by(pod: &Pod, name: &str) -> serde_json::Value {
    json!({ "metadata": { "name": name, "ownerReferences": [{
        "apiVersion": "v1", "kind": "Pod", "name": pod.metadata.name, "uid": pod.metadata.uid, "controller": true,
    }] } })
}

/// A pod whose template does not exist, so that nobody makes a claim for it but the test.
async fn pod_without_template(stage: &Stage, name: &str) -> anyhow::Result<Pod> {
    stage.pod(name, &[("device", From::Template("not-there"))]).await
}

#[test]
fn a_template_claim_is_found_by_the_status_of_its_pod() -> anyhow::Result<()> {
    on_stage("generated-name", async |stage| {
        if stage.cluster.is_before(28, "a pod's status names no claims") {
            return Ok(());
        }
        let controller = stage.start().await?;
        stage.template("template", &stage.name).await?;
        let pod = stage
            .pod("pod", &[("device", From::Template("template"))])
            .await?;
        // At once, before the claim controller has made the claim or entered its name: it is found nevertheless.
        stage.context(&pod, "node", &names(["node"])).await?;
        let named = |pod: Option<&Pod>| {
            let statuses = pod
                .map(|pod| pod.status.resource_claim_statuses.as_slice())
                .unwrap_or_default();
            statuses.iter().any(|status| status.resource_claim_name.is_some())
        };
        let pod = stage.until(stage.pods(), "pod", "given a claim", named).await?;
        let name = pod.and_then(|pod| pod.status.resource_claim_statuses[0].resource_claim_name.clone());
        let name = name.unwrap_or_default();
        let claim = stage.until_claim(&name, "allocated", is_allocated).await?;
        assert_eq!(claim.status.reserved_for[0].name, "pod");
        assert!(name.starts_with("pod-device"), "{name}");
        stage.fence().await?;
        let reads = stage.requests(&controller).await?;
        assert_eq!(
            reads.iter().filter(|request| *request == "get pods 200").count(),
            1,
            "{reads:?}"
        );
        // The pod ends: the claim controller deletes its claim.
        stage.remove_pod("pod").await?;
        stage.until_gone(&name).await?;
        stage.driver.until_counts((1, 1)).await?;
        controller.end().await
    })
}

#[test]
fn a_claim_is_found_by_the_name_that_kubernetes_1_27_gives_it() -> anyhow::Result<()> {
    on_stage("old-name", async |stage| {
        let controller = stage.start().await?;
        let pod = pod_without_template(stage, "pod").await?;
        stage.create_claim(owned_by(&pod, "pod-device")).await?;
        stage.context(&pod, "node", &names(["node"])).await?;
        stage.until_claim("pod-device", "allocated", is_allocated).await?;
        controller.end().await
    })
}

#[test]
fn an_entry_that_needs_no_claim_is_passed_over() -> anyhow::Result<()> {
    on_stage("no-claim-needed", async |stage| {
        if stage.cluster.is_before(28, "a pod's status names no claims") {
            return Ok(());
        }
        let controller = stage.start().await?;
        stage.claim("one").await?;
        let entries = [
            ("unneeded", From::Template("not-there")),
            ("one", From::Claim("one")),
        ];
        let pod = stage.pod("pod", &entries).await?;
        let unneeded =
            Patch::Merge(json!({ "status": { "resourceClaimStatuses": [{ "name": "unneeded" }] } }));
        stage
            .pods()
            .patch_status("pod", &PatchParams::default(), &unneeded)
            .await?;
        stage.context(&pod, "node", &names(["node"])).await?;
        stage.until_claim("one", "allocated", is_allocated).await?;
        controller.end().await
    })
}

#[test]
fn a_pod_with_a_missing_claim_waits_with_all_its_claims() -> anyhow::Result<()> {
    on_stage("not-there-yet", async |stage| {
        let controller = stage.start().await?;
        stage.claim("one").await?;
        let pod = stage
            .pod("pod", &[("one", From::Claim("one")), ("two", From::Claim("two"))])
            .await?;
        stage.context(&pod, "node", &names(["node"])).await?;
        let generated = pod_without_template(stage, "generated").await?;
        stage.context(&generated, "node", &names(["node"])).await?;
        stage.fence().await?;
        assert_eq!(
            stage.driver.story(),
            Vec::<String>::new(),
            "no claim is allocated that the others may not fit to"
        );
        assert_eq!(stage.events("pod").await?, []);
        stage.claim("two").await?;
        stage
            .create_claim(owned_by(&generated, "generated-device"))
            .await?;
        for name in ["one", "two", "generated-device"] {
            stage.until_claim(name, "allocated", is_allocated).await?;
        }
        let together = count(
            &stage.driver.calls(),
            |what| matches!(what, What::Allocate { claims, .. } if claims.len() == 2),
        );
        assert_eq!(together, 1);
        controller.end().await
    })
}

#[test]
fn a_claim_owned_by_another_is_refused_and_reported() -> anyhow::Result<()> {
    on_stage("not-owned", async |stage| {
        let controller = stage.start().await?;
        let other = stage.pod("other", &[]).await?;
        let pod = pod_without_template(stage, "pod").await?;
        stage.create_claim(owned_by(&other, "pod-device")).await?;
        let unowned = pod_without_template(stage, "unowned").await?;
        stage.claim("unowned-device").await?;
        for pod in [&pod, &unowned] {
            stage.context(pod, "node", &names(["node"])).await?;
        }
        for name in ["pod", "unowned"] {
            stage
                .event(name, "ClaimNotOwned", "was not made for this pod")
                .await?;
        }
        stage.fence().await?;
        assert_eq!(stage.driver.story(), Vec::<String>::new());
        // A claim that a pod names itself may be anybody's.
        let user = stage
            .pod("user", &[("device", From::Claim("pod-device"))])
            .await?;
        stage.context(&user, "node", &names(["node"])).await?;
        stage.until_claim("pod-device", "allocated", is_allocated).await?;
        controller.end().await
    })
}
