//! Which claim a pod entry refers to. The test acts as the scheduler and, for other claim names, as the claim controller.

use serde_json::json;

use drayman::api::resource::Pod;

use crate::call::{Request, count};
use crate::objects::{ClaimSource, patch_status};

use crate::fixture::{Fixture, names, with_fixture};

/// Metadata of a claim that a pod owns.
fn owned_by(pod: &Pod, name: &str) -> serde_json::Value {
    json!({ "metadata": { "name": name, "ownerReferences": [{
        "apiVersion": "v1", "kind": "Pod", "name": pod.metadata.name, "uid": pod.metadata.uid, "controller": true,
    }] } })
}

/// A pod whose template does not exist, so that the claim controller does not create its claim.
async fn pod_without_template(fixture: &Fixture, name: &str) -> anyhow::Result<Pod> {
    fixture
        .pod(name, &[("device", ClaimSource::Template("not-there"))])
        .await
}

#[test]
fn a_template_claim_is_found_by_the_status_of_its_pod() -> anyhow::Result<()> {
    with_fixture("generated-name", async |fixture| {
        if fixture.cluster.is_before(28, "a pod's status names no claims") {
            return Ok(());
        }
        let controller = fixture.start().await?;
        fixture.template("template", &fixture.name).await?;
        let pod = fixture
            .pod("pod", &[("device", ClaimSource::Template("template"))])
            .await?;
        // The context is created before the claim controller creates the claim or records its name.
        fixture.context(&pod, "node", &names(["node"])).await?;
        let name = fixture.wait_for_generated("pod").await?;
        let claim = fixture.wait_until_allocated(&name).await?;
        assert_eq!(claim.status.reserved_for[0].name, "pod");
        assert!(name.starts_with("pod-device"), "{name}");
        fixture.fence().await?;
        let reads = fixture.requests(&controller).await?;
        assert_eq!(
            reads.iter().filter(|request| *request == "get pods 200").count(),
            1,
            "{reads:?}"
        );
        // The pod ends, and the claim controller deletes its claim.
        fixture.remove_pod("pod").await?;
        fixture.wait_until_gone(&name).await?;
        fixture.driver.wait_for_counts((1, 1)).await?;
        controller.stop().await
    })
}

#[test]
fn a_claim_is_found_by_the_name_that_kubernetes_1_27_gives_it() -> anyhow::Result<()> {
    with_fixture("old-name", async |fixture| {
        let controller = fixture.start().await?;
        let pod = pod_without_template(fixture, "pod").await?;
        fixture.create_claim(owned_by(&pod, "pod-device")).await?;
        fixture.context(&pod, "node", &names(["node"])).await?;
        fixture.wait_until_allocated("pod-device").await?;
        controller.stop().await
    })
}

#[test]
fn an_entry_that_needs_no_claim_is_passed_over() -> anyhow::Result<()> {
    with_fixture("no-claim-needed", async |fixture| {
        if fixture.cluster.is_before(28, "a pod's status names no claims") {
            return Ok(());
        }
        let controller = fixture.start().await?;
        fixture.claim("one").await?;
        let entries = [
            ("unneeded", ClaimSource::Template("not-there")),
            ("one", ClaimSource::Claim("one")),
        ];
        let pod = fixture.pod("pod", &entries).await?;
        let unneeded = json!({ "resourceClaimStatuses": [{ "name": "unneeded" }] });
        patch_status(&fixture.pods(), "pod", unneeded).await?;
        fixture.context(&pod, "node", &names(["node"])).await?;
        fixture.wait_until_allocated("one").await?;
        controller.stop().await
    })
}

#[test]
fn a_pod_with_a_missing_claim_waits_with_all_its_claims() -> anyhow::Result<()> {
    with_fixture("not-there-yet", async |fixture| {
        let controller = fixture.start().await?;
        fixture.claim("one").await?;
        let pod = fixture.pod_naming("pod", &["one", "two"]).await?;
        fixture.context(&pod, "node", &names(["node"])).await?;
        let generated = pod_without_template(fixture, "generated").await?;
        fixture.context(&generated, "node", &names(["node"])).await?;
        fixture.fence().await?;
        assert_eq!(
            fixture.driver.call_summaries(),
            Vec::<String>::new(),
            "no claim is allocated before all claims of the pod exist"
        );
        assert_eq!(fixture.events("pod").await?, []);
        fixture.claim("two").await?;
        fixture
            .create_claim(owned_by(&generated, "generated-device"))
            .await?;
        for name in ["one", "two", "generated-device"] {
            fixture.wait_until_allocated(name).await?;
        }
        let together = count(
            &fixture.driver.calls(),
            |request| matches!(request, Request::Allocate { claims, .. } if claims.len() == 2),
        );
        assert_eq!(together, 1);
        controller.stop().await
    })
}

#[test]
fn a_claim_owned_by_another_is_refused_and_reported() -> anyhow::Result<()> {
    with_fixture("not-owned", async |fixture| {
        let controller = fixture.start().await?;
        let other = fixture.pod("other", &[]).await?;
        let pod = pod_without_template(fixture, "pod").await?;
        fixture.create_claim(owned_by(&other, "pod-device")).await?;
        let unowned = pod_without_template(fixture, "unowned").await?;
        fixture.claim("unowned-device").await?;
        for pod in [&pod, &unowned] {
            fixture.context(pod, "node", &names(["node"])).await?;
        }
        for name in ["pod", "unowned"] {
            fixture
                .wait_for_event(name, "ClaimNotOwned", "was not made for this pod")
                .await?;
        }
        fixture.fence().await?;
        assert_eq!(fixture.driver.call_summaries(), Vec::<String>::new());
        // A pod may name a claim of any owner.
        let user = fixture
            .pod("user", &[("device", ClaimSource::Claim("pod-device"))])
            .await?;
        fixture.context(&user, "node", &names(["node"])).await?;
        fixture.wait_until_allocated("pod-device").await?;
        controller.stop().await
    })
}
