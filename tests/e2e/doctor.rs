//! `drayman doctor` on a real control plane: problems are reported with their fix.

use std::process::Stdio;

use anyhow::Context as _;
use drayman::api::crd::DeviceClassParameters;
use drayman::api::resource::ResourceClaim;
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use serde_json::Value;

use crate::commands::{drayman, json, run};
use crate::harness::Cluster;
use crate::setup::{DRIVER, Setup, controller_rules};

/// Messages of the problems under this heading.
async fn problems(setup: &Setup, check: &str, arguments: &[&str]) -> anyhow::Result<Vec<String>> {
    let findings = json(setup, &[&["doctor"], arguments].concat()).await?;
    let findings = findings["items"].as_array().into_iter().flatten();
    Ok(findings
        .filter(|finding| finding["level"] == "Problem" && finding["check"] == check)
        .filter_map(|finding| finding["message"].as_str().map(str::to_owned))
        .collect())
}

#[tokio::test]
async fn the_doctor_reports_problems_until_they_are_fixed() -> anyhow::Result<()> {
    let setup = Setup::start(0).await?;
    setup.make_fake_node("node-a").await?;
    let (code, text, _) = run(&setup, &["doctor"]).await?;
    println!("{text}");
    assert_eq!(code, Some(1));
    assert!(text.contains("no node offers devices"), "{text}");
    assert!(text.contains("no Lease"), "{text}");

    let api = Api::<k8s_openapi::api::core::v1::Node>::all(setup.cluster.client());
    let uid = api.get("node-a").await?.metadata.uid.unwrap_or_default();
    setup.write_inventory("node-a", &uid, 2).await?;
    let leader = setup.replica("leader").await?;
    leader.logged("leading").await?;
    let (code, text, _) = run(&setup, &["doctor"]).await?;
    println!("{text}");
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("0 warnings, 0 problems"), "{text}");

    // A node that was recreated, and a class with dangling parameters.
    setup
        .write_inventory("node-a", "another-uid", 2)
        .await
        .expect("the field can be changed");
    let parameters = Api::<DeviceClassParameters>::all(setup.cluster.client());
    parameters.delete("test", &DeleteParams::default()).await?;
    let findings = json(&setup, &["doctor"]).await?;
    let messages: Vec<&str> = findings["items"]
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

    // For a user without rights, the missing right is named.
    let nobody = setup.cluster.user("nobody", &[]).await?;
    let output = drayman(&setup.cluster, &nobody, &["doctor"]).await?;
    let text = String::from_utf8(output.stdout)?;
    assert!(text.contains("cannot list resource \"leases\""), "{text}");
    let output = drayman(&setup.cluster, &nobody, &["devices"]).await?;
    assert_eq!(output.status.code(), Some(3));
    let error = String::from_utf8(output.stderr)?;
    assert!(
        error.contains("cannot list resource \"nodeinventories\""),
        "{error}"
    );
    setup.cluster.stop().await
}

#[tokio::test]
async fn a_right_that_a_component_lacks_is_named_by_verb_and_resource() -> anyhow::Result<()> {
    let setup = Setup::start(0).await?;
    let users = ["--controller-user=drayman-controller", "--node-user=drayman-node"];
    assert_eq!(problems(&setup, "rights", &users).await?, Vec::<String>::new());
    let (_, text, _) = run(&setup, &[&["doctor"], &users[..]].concat()).await?;
    assert!(
        text.contains("drayman-node has all permissions that the companion needs"),
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
    setup.cluster.user("drayman-controller", &rules).await?;
    // The API server learns of it through its own watch.
    let deadline = std::time::Instant::now() + crate::harness::TIMEOUT;
    let missing = loop {
        let missing = problems(&setup, "rights", &users).await?;
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
    let (code, text, _) = run(&setup, &[&["doctor"], &users[..]].concat()).await?;
    assert_eq!(code, Some(1));
    assert!(
        text.contains("add the verb patch on resourceclaims/status of the API group \"resource.k8s.io\""),
        "{text}"
    );

    // If that is forbidden, the missing right is named.
    let nobody = setup.cluster.user("nobody", &[]).await?;
    let output = drayman(&setup.cluster, &nobody, &[&["doctor"], &users[..]].concat()).await?;
    let text = String::from_utf8(output.stdout)?;
    assert!(text.contains("cannot list resource \"pods\""), "{text}");
    setup.cluster.stop().await
}

#[tokio::test]
async fn another_driver_of_the_same_name_is_found() -> anyhow::Result<()> {
    let setup = Setup::start(0).await?;
    let check = "driver name";
    assert_eq!(problems(&setup, check, &[]).await?, Vec::<String>::new());

    let now = jiff::Timestamp::now();
    for (namespace, holder) in [("default", "here"), ("kube-system", "there")] {
        let lease: Lease = serde_json::from_value(serde_json::json!({
            "metadata": { "name": DRIVER },
            "spec": { "holderIdentity": holder, "leaseDurationSeconds": 3600, "renewTime": format!("{now:.6}") },
        }))?;
        Api::<Lease>::namespaced(setup.cluster.client(), namespace)
            .create(&PostParams::default(), &lease)
            .await?;
        setup
            .apply(&serde_json::json!({
                "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
                "metadata": { "name": format!("release-controller.{namespace}"), "labels": {
                    "app.kubernetes.io/component": "controller", "drayman.dev/driver-name": DRIVER } },
                "rules": [],
            }))
            .await?;
    }
    // Our driver would never write this handle.
    let claim: ResourceClaim = serde_json::from_value(serde_json::json!({
        "metadata": { "name": "foreign" }, "spec": { "resourceClassName": "test", "allocationMode": "Immediate" } }))?;
    setup.claims().create(&PostParams::default(), &claim).await?;
    let status = serde_json::json!({ "status": { "driverName": DRIVER, "allocation": {
        "resourceHandles": [{ "driverName": DRIVER, "data": "device=7" }] } } });
    setup
        .claims()
        .patch_status("foreign", &PatchParams::default(), &Patch::Merge(status))
        .await?;

    let found = problems(&setup, check, &[]).await?;
    println!("{found:#?}");
    assert_eq!(found.len(), 3);
    for (message, parts) in found.iter().zip([
        ["here in namespace default", "there in namespace kube-system"],
        ["release-controller.default", "release-controller.kube-system"],
        ["ResourceClaim default/foreign", "this release cannot read"],
    ]) {
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    }
    setup.cluster.stop().await
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
    assert_eq!(output.status.code(), Some(3));
    assert!(error.contains("cannot list nodeinventories"), "{error}");
    assert!(error.contains("drayman doctor"), "{error}");
    cluster.stop().await
}

/// Findings about feature gates, with their level.
async fn gates(setup: &Setup) -> anyhow::Result<Vec<(String, String)>> {
    let findings = json(setup, &["doctor"]).await?;
    let findings = findings["items"].as_array().into_iter().flatten();
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    Ok(findings
        .filter(|finding| finding["check"] == "gates")
        .map(|finding| (text(&finding["level"]), text(&finding["message"])))
        .collect())
}

fn assert_finding(findings: &[(String, String)], level: &str, words: &str) {
    let found = findings
        .iter()
        .any(|(is, message)| is == level && message.contains(words));
    assert!(found, "{level}: {words} is not in {findings:#?}");
}

#[tokio::test]
async fn a_gate_that_is_off_in_the_api_server_is_found() -> anyhow::Result<()> {
    let off = "--feature-gates=DynamicResourceAllocation=false";
    let setup = Setup::prepare(Cluster::builder().flag("apiserver", off).start().await?).await?;
    let findings = gates(&setup).await?;
    println!("{findings:#?}");
    assert_finding(
        &findings,
        "Problem",
        "kube-apiserver has DynamicResourceAllocation off",
    );
    setup.cluster.stop().await
}

#[tokio::test]
async fn the_doctor_reports_the_gates_or_why_it_cannot() -> anyhow::Result<()> {
    let setup = Setup::start(1).await?;
    let configuration = "apiVersion: drayman.dev/v1alpha1\nkind: NodeConfiguration\nkinds:\n\
                         - name: test\n  paths: [\"/dev/drayman-test-*\"]\n";
    setup.cluster.node(0).make_device("/dev/drayman-test-0", 1, 5)?;
    let _companion = setup.companion(0, configuration)?;
    let deadline = std::time::Instant::now() + crate::harness::TIMEOUT;
    let on_node = "kubelet has DynamicResourceAllocation on on node-0";
    let findings = loop {
        let findings = gates(&setup).await?;
        if findings.iter().any(|(_, message)| message == on_node) || std::time::Instant::now() > deadline {
            break findings;
        }
    };
    println!("{findings:#?}");
    assert_finding(
        &findings,
        "Fine",
        "kube-apiserver has DynamicResourceAllocation on",
    );
    assert_finding(&findings, "Fine", on_node);
    assert_finding(&findings, "Note", "in kube-scheduler is unknown");
    assert_finding(&findings, "Note", "in kube-controller-manager is unknown");

    // A pod that waits for its allocation proves both.
    setup.make_template(None).await?;
    setup.make_pod("waits").await?;
    setup
        .wait(setup.contexts(), "waits", "made", |found: Option<&_>| {
            found.is_some()
        })
        .await?;
    setup.claim_of("waits", "made", |_| true).await?;
    let findings = gates(&setup).await?;
    assert_finding(&findings, "Fine", "kube-scheduler allocates for pods");
    assert_finding(&findings, "Fine", "kube-controller-manager makes claims");

    // If that is forbidden, the missing right is named.
    let read = ["get", "list"];
    let rules = [crate::harness::rule(
        &["", "resource.k8s.io", DRIVER, "apiextensions.k8s.io"],
        &["nodes", "nodeinventories", "customresourcedefinitions"],
        &read,
    )];
    let reader = setup.cluster.user("reader", &rules).await?;
    let output = drayman(&setup.cluster, &reader, &["doctor"]).await?;
    let text = String::from_utf8(output.stdout)?;
    for words in [
        "cannot get path \"/metrics\"",
        "cannot get resource \"nodes/proxy\"",
        "cannot list resource \"pods\"",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    setup.cluster.stop().await
}

#[tokio::test]
async fn a_disabled_gate_is_found_in_scheduler_and_kubelet() -> anyhow::Result<()> {
    let off = "--feature-gates=DynamicResourceAllocation=false";
    let cluster = Cluster::builder()
        .nodes(1)
        .flag("scheduler", off)
        .flag("kubelet", off);
    let setup = Setup::prepare(cluster.start().await?).await?;
    let api = Api::<k8s_openapi::api::core::v1::Node>::all(setup.cluster.client());
    let uid = api.get("node-0").await?.metadata.uid.unwrap_or_default();
    setup.write_inventory("node-0", &uid, 1).await?;
    setup.make_template(None).await?;
    setup.make_pod("early").await?;
    setup.until_bound("early").await?;
    setup.claim_of("early", "made", |_| true).await?;
    let findings = gates(&setup).await?;
    println!("{findings:#?}");
    assert_finding(
        &findings,
        "Problem",
        "kubelet has DynamicResourceAllocation off on node-0",
    );
    assert_finding(
        &findings,
        "Warning",
        "default/early bound to a node although a claim is not reserved",
    );
    setup.cluster.stop().await
}

/// A cluster without classic DRA is fine as long as all devices are extended resources.
#[tokio::test]
async fn extended_resources_need_no_claims_api_and_no_controller() -> anyhow::Result<()> {
    let mut cluster = Cluster::builder().flag("apiserver", "--runtime-config=resource.k8s.io/v1alpha2=false");
    for component in ["apiserver", "controller-manager", "scheduler"] {
        cluster = cluster.flag(component, "--feature-gates=DynamicResourceAllocation=false");
    }
    let setup = Setup::without_class(cluster.start().await?).await?;
    let node = setup.make_fake_node("node-a").await?;
    let uid = node.metadata.uid.unwrap_or_default();
    setup.write_inventory("node-a", &uid, 1).await?;
    let (code, text, _) = run(&setup, &["doctor"]).await?;
    assert_eq!(code, Some(1), "there are devices for claims: {text}");

    let inventories = Api::<drayman::api::crd::NodeInventory>::all(setup.cluster.client());
    let mut inventory = inventories.get("node-a.drayman.dev").await?;
    for device in &mut inventory.spec.devices {
        device.mode = drayman::api::crd::Mode::ExtendedResource;
    }
    inventories
        .replace("node-a.drayman.dev", &PostParams::default(), &inventory)
        .await?;
    let (code, text, _) = run(&setup, &["doctor"]).await?;
    println!("{text}");
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("all are extended resources"), "{text}");
    assert!(text.contains("0 warnings, 0 problems"), "{text}");
    setup.cluster.stop().await
}

/// Output of `drayman doctor --this-node` on the first node.
async fn of_node(cluster: &Cluster) -> anyhow::Result<(Option<i32>, Vec<Value>)> {
    let node = cluster.node(0);
    let mut command = node.command(env!("CARGO_BIN_EXE_drayman"));
    command.args(["doctor", "--this-node", "--output=json", "--kubelet-config"]);
    command.arg(node.configuration("kubelet.yaml"));
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = command.output().await?;
    let answer: Value = serde_json::from_slice(&output.stdout)
        .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
    let findings = answer["items"].as_array().cloned().unwrap_or_default();
    Ok((output.status.code(), findings))
}

/// Messages of one level.
fn of_level<'a>(findings: &'a [Value], level: &str) -> Vec<&'a str> {
    let found = findings.iter().filter(|finding| finding["level"] == level);
    found.filter_map(|finding| finding["message"].as_str()).collect()
}

#[tokio::test]
async fn a_real_node_is_in_order_until_its_containerd_has_no_cdi() -> anyhow::Result<()> {
    let cluster = Cluster::builder().nodes(1).start().await?;
    let configuration = cluster.node(0).configuration("containerd.toml");
    let (code, findings) = of_node(&cluster).await?;
    println!("{findings:#?}");
    assert_eq!(of_level(&findings, "Problem"), Vec::<&str>::new());
    assert_eq!(code, Some(0));
    let fine = of_level(&findings, "Fine");
    for part in [
        "serves device plugins",
        "lies on a shared mount, /var/lib/kubelet",
        "reads CDI files",
        "reads CDI files in /var/run/cdi",
    ] {
        assert!(
            fine.iter().any(|message| message.contains(part)),
            "{part}: {fine:?}"
        );
    }

    let with = std::fs::read_to_string(&configuration)?;
    let without = with.replace("enable_cdi = true", "");
    assert_ne!(with, without);
    std::fs::write(&configuration, without)?;
    cluster.node(0).stop("containerd", 15).await?;
    cluster.node(0).start("containerd").await?;
    // Until containerd listens, the finding is a warning.
    let answered = async {
        loop {
            let (code, findings) = of_node(&cluster).await?;
            if of_level(&findings, "Warning").is_empty() {
                return anyhow::Ok((code, findings));
            }
            tokio::time::sleep(std::time::Duration::from_millis(200)).await;
        }
    };
    let (code, findings) = tokio::time::timeout(std::time::Duration::from_secs(60), answered).await??;
    println!("{findings:#?}");
    assert_eq!(code, Some(1));
    let problems = of_level(&findings, "Problem");
    assert!(
        matches!(&problems[..], [problem] if problem.ends_with("does not read CDI files")),
        "{problems:?}"
    );
    cluster.stop().await
}
