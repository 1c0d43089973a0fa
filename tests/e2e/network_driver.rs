//! Runs `examples/network_attached.rs`, the starting point for vendors, as its own process.

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::{Context as _, ensure};
use drayman::api::resource::ResourceClaim;
use kube::api::{ListParams, PostParams};
use serde_json::{Value, json};

use crate::harness::rule;
use crate::setup::{DRIVER, Program, Setup, controller_rules, is_allocated, pod_from};

const USER: &str = "network-attached";

/// Builds the example with the cargo that runs the tests, and returns its path.
async fn build() -> anyhow::Result<PathBuf> {
    let mut cargo = tokio::process::Command::new(env!("CARGO"));
    // The runner describes this package in the environment. The build script of ring reads some of that, so ring and all that depends on it
    // would be compiled again, now and with the next build.
    let of_package = |name: &String| {
        name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_") || name == "OUT_DIR"
    };
    for (name, _) in std::env::vars().filter(|(name, _)| of_package(name)) {
        cargo.env_remove(name);
    }
    let status = cargo
        .args(["build", "--locked", "--quiet", "--example", "network_attached"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .status()
        .await?;
    ensure!(status.success(), "the example is not built: {status}");
    // target/debug/deps/<this test>
    let tests = std::env::current_exe()?;
    let profile = tests.ancestors().nth(2).context("a target directory")?;
    Ok(profile.join("examples/network_attached"))
}

/// Starts the driver as a user with the rights of every controller and the right to get ConfigMaps.
async fn start(setup: &Setup, program: &PathBuf) -> anyhow::Result<Program> {
    let ours = |group: &String| group == DRIVER;
    let mut rules = controller_rules()?;
    rules.retain(|rule| !rule.api_groups.iter().flatten().any(ours));
    rules.push(rule(&[""], &["configmaps"], &["get"]));
    let kubeconfig = setup.cluster.user(USER, &rules).await?;
    let mut command = setup.cluster.command(program);
    command.env("KUBECONFIG", kubeconfig);
    setup.program(USER, command)
}

fn pool(devices: &str) -> Value {
    json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "dongles", "namespace": "default" },
        "data": { "nodes": "node-a node-b", "devices": devices } })
}

async fn make_pod(setup: &Setup, name: &str) -> anyhow::Result<()> {
    let pod = pod_from(json!({ "metadata": { "name": name }, "spec": {
        "resourceClaims": [{ "name": "device", "source": { "resourceClaimTemplateName": "dongle" } }],
        "containers": [{ "name": "main", "image": "unused", "resources": { "claims": [{ "name": "device" }] } }] } }))?;
    setup.pods().create(&PostParams::default(), &pod).await?;
    Ok(())
}

/// The nodes that can use a claim.
fn nodes(claim: &ResourceClaim) -> Vec<String> {
    let allocation = claim.status.allocation.iter();
    let selectors = allocation.filter_map(|allocation| allocation.available_on_nodes.as_ref());
    let terms = selectors.flat_map(|selector| &selector.node_selector_terms);
    let fields = terms.flat_map(|term| term.match_fields.iter().flatten());
    fields
        .flat_map(|field| field.values.iter().flatten().cloned())
        .collect()
}

async fn allocated(setup: &Setup) -> anyhow::Result<Vec<ResourceClaim>> {
    let claims = setup.claims().list(&ListParams::default()).await?;
    Ok(claims.into_iter().filter(is_allocated).collect())
}

#[tokio::test]
async fn the_network_example_serves_nodes_and_survives_a_crash() -> anyhow::Result<()> {
    let program = build().await?;
    let setup = Setup::start(0).await?;
    for node in ["node-a", "node-b", "node-c"] {
        setup.make_fake_node(node).await?;
    }
    let reference = json!({ "kind": "ConfigMap", "namespace": "default", "name": "dongles" });
    setup
        .apply(&json!({ "apiVersion": "resource.k8s.io/v1alpha2", "kind": "ResourceClass",
            "metadata": { "name": "dongle" }, "driverName": "network.example.com", "parametersRef": reference }))
        .await?;
    setup
        .apply(
            &json!({ "apiVersion": "resource.k8s.io/v1alpha2", "kind": "ResourceClaimTemplate",
            "metadata": { "name": "dongle" }, "spec": { "spec": { "resourceClassName": "dongle" } } }),
        )
        .await?;
    setup.apply(&pool("three")).await?;

    // An invalid parameter is reported on the pod; the pod is served once the parameter is fixed.
    let mut driver = start(&setup, &program).await?;
    make_pod(&setup, "wrong").await?;
    setup
        .wait_for_event("wrong", "ParametersInvalid", "must be a whole number")
        .await?;
    setup.remove_pod("wrong").await?;
    setup.apply(&pool("3")).await?;

    let first = ["pod-0", "pod-1", "pod-2"];
    for name in first {
        make_pod(&setup, name).await?;
    }
    for name in first {
        let pod = setup.until_bound(name).await?;
        let node = pod.spec.node_name.unwrap_or_default();
        assert!(
            ["node-a", "node-b"].contains(&node.as_str()),
            "{name} is on {node}, which cannot reach the pool"
        );
    }
    let before = allocated(&setup).await?;
    assert_eq!(before.len(), 3);
    for claim in &before {
        assert_eq!(nodes(claim), ["node-a", "node-b"], "a set of nodes, not one");
        let allocation = claim.status.allocation.as_ref().context("it is allocated")?;
        assert_eq!(
            allocation.resource_handles[0].data.as_deref(),
            Some("default/dongles")
        );
    }
    make_pod(&setup, "late").await?;
    setup
        .wait_for_event("late", "NoSuitableDevice", "3 of 3 held")
        .await?;

    // After a crash, the driver's state comes from the claims, and nothing is written.
    driver.kill().await?;
    let writes = writes(&setup).await?;
    let mut driver = start(&setup, &program).await?;
    make_pod(&setup, "later").await?;
    setup
        .wait_for_event("later", "NoSuitableDevice", "3 of 3 held")
        .await?;
    let versions = |claims: &[ResourceClaim]| -> BTreeSet<Option<String>> {
        claims
            .iter()
            .map(|claim| claim.metadata.resource_version.clone())
            .collect()
    };
    assert_eq!(versions(&allocated(&setup).await?), versions(&before));
    let after = self::writes(&setup).await?;
    assert!(
        after
            .iter()
            .skip(writes.len())
            .all(|write| write.contains("podschedulingcontexts")),
        "no claim is written: {after:?}"
    );

    // Two pods are deleted, one of them while no driver runs; waiting pods get both devices.
    driver.kill().await?;
    let claim = setup.claim_of("pod-0", "allocated", is_allocated).await?;
    setup.remove_pod("pod-0").await?;
    let driver = start(&setup, &program).await?;
    let gone = claim.metadata.name.unwrap_or_default();
    setup.until_claim_gone(&gone).await?;
    setup.remove_pod("pod-1").await?;
    for name in ["late", "later"] {
        setup.until_bound(name).await?;
    }
    assert_eq!(
        allocated(&setup).await?.len(),
        3,
        "never more claims than devices"
    );
    let status = driver.end().await?;
    assert!(status.success());
    setup.cluster.stop().await
}

/// The driver's writes so far, without events.
async fn writes(setup: &Setup) -> anyhow::Result<Vec<String>> {
    let entries = setup.cluster.audit().of_user(USER).await?;
    let writes = entries
        .iter()
        .filter(|entry| entry.is_write() && entry.resource != "events");
    Ok(writes
        .map(|entry| format!("{} {}/{}", entry.verb, entry.resource, entry.subresource))
        .collect())
}
