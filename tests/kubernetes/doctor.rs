//! `drayman doctor` on a real control plane: what is wrong is named with its fix.

use drayman::api::crd::DeviceClassParameters;
use drayman::api::resource::ResourceClaim;
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};

use crate::harness::Cluster;
use crate::stage::{DRIVER, Stage, controller_rules};
use crate::tool::{answer, drayman, json};

/// What the doctor calls a problem under this heading.
async fn problems(stage: &Stage, check: &str, arguments: &[&str]) -> anyhow::Result<Vec<String>> {
    let findings = json(stage, &[&["doctor"], arguments].concat()).await?;
    let findings = findings.as_array().into_iter().flatten();
    Ok(findings
        .filter(|finding| finding["level"] == "Problem" && finding["check"] == check)
        .filter_map(|finding| finding["message"].as_str().map(str::to_owned))
        .collect())
}

#[tokio::test]
async fn the_doctor_names_what_is_wrong_and_is_content_when_it_is_mended() -> anyhow::Result<()> {
    let stage = Stage::start(0).await?;
    stage.pretend_node("node-a").await?;
    let (code, text, _) = answer(&stage, &["doctor"]).await?;
    println!("{text}");
    assert_eq!(code, Some(1));
    assert!(text.contains("no node offers devices"), "{text}");
    assert!(text.contains("no Lease"), "{text}");

    let api = Api::<k8s_openapi::api::core::v1::Node>::all(stage.cluster.client());
    let uid = api.get("node-a").await?.metadata.uid.unwrap_or_default();
    stage.write_inventory("node-a", &uid, 2).await?;
    let leader = stage.replica("leader").await?;
    leader.logged("leading").await?;
    let (code, text, _) = answer(&stage, &["doctor"]).await?;
    println!("{text}");
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("0 warnings, 0 problems"), "{text}");

    // A node that was made again, and a class that names nothing.
    stage
        .write_inventory("node-a", "another-uid", 2)
        .await
        .expect("the field can be changed");
    let parameters = Api::<DeviceClassParameters>::all(stage.cluster.client());
    parameters.delete("test", &DeleteParams::default()).await?;
    let findings = json(&stage, &["doctor"]).await?;
    let messages: Vec<&str> = findings
        .as_array()
        .into_iter()
        .flatten()
        .filter(|finding| finding["level"] == "Problem")
        .filter_map(|finding| finding["message"].as_str())
        .collect();
    assert_eq!(messages.len(), 2, "{messages:?}");
    assert!(
        messages[0].contains("there is no DeviceClassParameters test"),
        "{messages:?}"
    );
    assert!(messages[1].contains("earlier node"), "{messages:?}");

    // Who may read nothing is told which right is missing.
    let nobody = stage.cluster.user("nobody", &[]).await?;
    let output = drayman(&stage.cluster, &nobody, &["doctor"]).await?;
    let text = String::from_utf8(output.stdout)?;
    assert!(text.contains("cannot list resource \"leases\""), "{text}");
    let output = drayman(&stage.cluster, &nobody, &["devices"]).await?;
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8(output.stderr)?;
    assert!(
        error.contains("cannot list resource \"nodeinventories\""),
        "{error}"
    );
    stage.cluster.stop().await
}

#[tokio::test]
async fn a_right_that_a_component_lacks_is_named_by_verb_and_resource() -> anyhow::Result<()> {
    let stage = Stage::start(0).await?;
    let users = ["--controller-user=drayman-controller", "--node-user=drayman-node"];
    assert_eq!(problems(&stage, "rights", &users).await?, Vec::<String>::new());
    let (_, text, _) = answer(&stage, &[&["doctor"], &users[..]].concat()).await?;
    assert!(
        text.contains("drayman-node may do what the companion needs"),
        "{text}"
    );

    let mut rules = controller_rules()?;
    for rule in &mut rules {
        if let Some(resources) = &mut rule.resources {
            resources.retain(|resource| resource != "resourceclaims/status");
        }
        rule.verbs.retain(|verb| verb != "create");
    }
    rules.retain(|rule| !rule.verbs.is_empty());
    stage.cluster.user("drayman-controller", &rules).await?;
    // The API server hears of it by its own watch.
    let deadline = std::time::Instant::now() + crate::harness::PATIENCE;
    let missing = loop {
        let missing = problems(&stage, "rights", &users).await?;
        if missing.len() > 1 || std::time::Instant::now() > deadline {
            break missing;
        }
    };
    assert_eq!(
        missing,
        [
            "drayman-controller may not create events.events.k8s.io, which the controller needs",
            "drayman-controller may not patch resourceclaims/status.resource.k8s.io, which the controller needs",
        ]
    );
    let (code, text, _) = answer(&stage, &[&["doctor"], &users[..]].concat()).await?;
    assert_eq!(code, Some(1));
    assert!(
        text.contains("add the verb patch on resourceclaims/status of the API group \"resource.k8s.io\""),
        "{text}"
    );

    // Who may not ask that is told so.
    let nobody = stage.cluster.user("nobody", &[]).await?;
    let output = drayman(&stage.cluster, &nobody, &[&["doctor"], &users[..]].concat()).await?;
    let text = String::from_utf8(output.stdout)?;
    assert!(text.contains("cannot list resource \"pods\""), "{text}");
    stage.cluster.stop().await
}

#[tokio::test]
async fn another_driver_of_the_same_name_is_found_by_its_lease_its_role_and_its_claims() -> anyhow::Result<()>
{
    let stage = Stage::start(0).await?;
    let check = "driver name";
    assert_eq!(problems(&stage, check, &[]).await?, Vec::<String>::new());

    let now = jiff::Timestamp::now();
    for (namespace, holder) in [("default", "here"), ("kube-system", "there")] {
        let lease: Lease = serde_json::from_value(serde_json::json!({
            "metadata": { "name": DRIVER },
            "spec": { "holderIdentity": holder, "leaseDurationSeconds": 3600, "renewTime": format!("{now:.6}") },
        }))?;
        Api::<Lease>::namespaced(stage.cluster.client(), namespace)
            .create(&PostParams::default(), &lease)
            .await?;
        stage
            .apply(&serde_json::json!({
                "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
                "metadata": { "name": format!("release-controller.{namespace}"), "labels": {
                    "app.kubernetes.io/component": "controller", "drayman.dev/driver-name": DRIVER } },
                "rules": [],
            }))
            .await?;
    }
    // Nobody of ours would write such a handle.
    let claim: ResourceClaim = serde_json::from_value(serde_json::json!({
        "metadata": { "name": "foreign" }, "spec": { "resourceClassName": "test", "allocationMode": "Immediate" } }))?;
    stage.claims().create(&PostParams::default(), &claim).await?;
    let status = serde_json::json!({ "status": { "driverName": DRIVER, "allocation": {
        "resourceHandles": [{ "driverName": DRIVER, "data": "device=7" }] } } });
    stage
        .claims()
        .patch_status("foreign", &PatchParams::default(), &Patch::Merge(status))
        .await?;

    let found = problems(&stage, check, &[]).await?;
    println!("{found:#?}");
    assert_eq!(found.len(), 3);
    for (message, parts) in found.iter().zip([
        ["here in namespace default", "there in namespace kube-system"],
        ["release-controller.default", "release-controller.kube-system"],
        ["ResourceClaim default/foreign", "not this drayman"],
    ]) {
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    }
    stage.cluster.stop().await
}

#[tokio::test]
async fn kinds_that_are_not_defined_are_named_with_the_fix() -> anyhow::Result<()> {
    let cluster = Cluster::builder().start().await?;
    let output = drayman(&cluster, cluster.kubeconfig(), &["doctor"]).await?;
    let text = String::from_utf8(output.stdout)?;
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text.contains("CustomResourceDefinition nodeinventories.drayman.dev is missing"),
        "{text}"
    );
    assert!(text.contains("drayman crds | kubectl apply"), "{text}");
    let output = drayman(&cluster, cluster.kubeconfig(), &["devices"]).await?;
    let error = String::from_utf8(output.stderr)?;
    assert_eq!(output.status.code(), Some(1));
    assert!(error.contains("cannot list nodeinventories"), "{error}");
    assert!(error.contains("drayman doctor"), "{error}");
    cluster.stop().await
}
