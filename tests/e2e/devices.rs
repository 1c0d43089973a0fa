//! Kinds of the configuration on real nodes: devices with several device nodes, health, and configuration reloads.

use std::time::Instant;

use drayman::api::crd::NodeInventory;
use k8s_openapi::api::core::v1::Node as KubernetesNode;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::api::Api;
use serde_json::{Value, json};

use crate::harness::{IMAGE, Node};
use crate::pods::{look_inside, read_device, wait_for_inventory};
use crate::setup::{DRIVER, Setup, is_allocated};

/// A device with two device nodes, one of them optional, and a shared control node.
const GROUPS: &str = "\
apiVersion: drayman.dev/v1alpha1
kind: NodeConfiguration
kinds:
- name: test
  groups:
  - required: [\"/dev/drayman-test-{key}-data\"]
    optional: [\"/dev/drayman-test-{key}-meta\"]
    shared: [/dev/drayman-control]
  containerPaths:
    /dev/drayman-test-{key}-data: /dev/drayman-data-{key}
  environment:
    TEST_MODE: fast
  mounts:
  - {hostPath: /etc/hostname, containerPath: /etc/of-the-node}
";

/// A kind whose devices are probed by opening them.
const PROBED: &str = "\
apiVersion: drayman.dev/v1alpha1
kind: NodeConfiguration
kinds:
- name: test
  paths: [\"/dev/drayman-test-*\"]
  health: {open: read, recoverAfter: 1}
";

#[tokio::test]
async fn grouped_nodes_are_one_device_up_to_the_container() -> anyhow::Result<()> {
    let setup = Setup::start(1).await?;
    let node = setup.cluster.node(0);
    for (name, minor) in [
        ("drayman-test-a-data", 5),
        ("drayman-test-a-meta", 7),
        ("drayman-test-b-data", 8),
        ("drayman-control", 9),
    ] {
        node.make_device(format!("/dev/{name}"), 1, minor)?;
    }
    setup.make_template(None).await?;
    let controller = setup.controller()?;
    let companion = setup.companion(0, GROUPS)?;
    wait_for_inventory(&setup, 2).await?;

    let mut seen = Vec::new();
    for pod in ["first", "second"] {
        setup.make_pod(pod).await?;
        let inside = look_inside(&setup, pod).await?;
        let present: Vec<&str> = inside.present.iter().map(String::as_str).collect();
        let granted: Vec<&str> = inside.granted.values().map(String::as_str).collect();
        let expected = if granted == ["/dev/drayman-data-a,/dev/drayman-test-a-meta"] {
            vec!["drayman-control", "drayman-data-a", "drayman-test-a-meta"]
        } else {
            assert_eq!(granted, ["/dev/drayman-data-b"]);
            vec!["drayman-control", "drayman-data-b"]
        };
        assert_eq!(present, expected, "{pod}");
        seen.push(granted.join(" "));
        for name in &present {
            read_device(&setup, pod, &format!("/dev/{name}")).await?;
        }
        let environment = setup.cluster.kubectl(&["exec", pod, "--", "env"]).await?;
        assert!(environment.contains("TEST_MODE=fast"), "{environment}");
        setup
            .cluster
            .kubectl(&["exec", pod, "--", "cat", "/etc/of-the-node"])
            .await?;
    }
    assert_ne!(
        seen[0], seen[1],
        "each pod has its own device, and both have the shared node"
    );
    setup.end([companion, controller]).await
}

/// Two kinds with one control node: read-only for one, writable for the other.
const SHARING: &str = "\
apiVersion: drayman.dev/v1alpha1
kind: NodeConfiguration
kinds:
- name: reader
  groups: [{required: [/dev/drayman-read], shared: [/dev/drayman-control]}]
  permissions: r
- name: writer
  groups: [{required: [/dev/drayman-write], shared: [/dev/drayman-control]}]
";

#[tokio::test]
async fn a_node_of_two_claims_has_the_union_of_permissions() -> anyhow::Result<()> {
    let setup = Setup::start(1).await?;
    let node = setup.cluster.node(0);
    // Containers may always use the standard memory devices, but not KVM.
    for (name, major, minor) in [("read", 1, 5), ("write", 1, 8), ("control", 10, 232)] {
        node.make_device(format!("/dev/drayman-{name}"), major, minor)?;
    }
    let controller = setup.controller()?;
    let companion = setup.companion(0, SHARING)?;
    wait_for_inventory(&setup, 2).await?;
    for kind in ["reader", "writer"] {
        setup.make_kind(kind, DRIVER).await?;
    }
    for (pod, kinds, writes) in [
        ("alone", &["reader"][..], false),
        ("one-way", &["reader", "writer"], true),
        ("the-other", &["writer", "reader"], true),
    ] {
        let of = |kind: &&str| json!({ "name": kind, "source": { "resourceClaimTemplateName": kind } });
        let claims: Vec<Value> = kinds.iter().map(of).collect();
        let used: Vec<Value> = kinds.iter().map(|kind| json!({ "name": kind })).collect();
        setup
            .apply(&json!({
                "apiVersion": "v1", "kind": "Pod", "metadata": { "name": pod },
                "spec": {
                    "terminationGracePeriodSeconds": 1,
                    "resourceClaims": claims,
                    "containers": [{ "name": "main", "image": IMAGE, "resources": { "claims": used } }],
                },
            }))
            .await?;
        look_inside(&setup, pod).await?;
        for (opened, expected) in [("3<", true), ("3>", writes)] {
            let open = format!("exec {opened}/dev/drayman-control");
            let done = setup
                .cluster
                .kubectl(&["exec", pod, "--", "sh", "-c", &open])
                .await;
            assert_eq!(done.is_ok(), expected, "{pod} {opened}: {done:?}");
        }
        setup.cluster.kubectl(&["delete", "pod", pod]).await?;
    }
    setup.end([companion, controller]).await
}

/// Replaces a device node by one with other numbers.
fn replace(node: Node<'_>, name: &str, major: u32, minor: u32) -> anyhow::Result<()> {
    let path = format!("/dev/{name}");
    node.remove(&path)?;
    node.make_device(&path, major, minor)
}

#[tokio::test]
async fn an_unhealthy_device_stays_with_its_pod_and_is_reported() -> anyhow::Result<()> {
    let setup = Setup::start(1).await?;
    let node = setup.cluster.node(0);
    node.make_device("/dev/drayman-test-0", 1, 5)?;
    // Numbers without a driver: the device cannot be opened.
    node.make_device("/dev/drayman-test-1", 240, 250)?;
    setup.make_template(None).await?;
    let controller = setup.controller()?;
    let companion = setup.companion(0, PROBED)?;
    wait_for_inventory(&setup, 2).await?;
    setup
        .wait_for_event(
            node.name(),
            "DeviceUnhealthy",
            "/dev/drayman-test-1 cannot be opened",
        )
        .await?;

    setup.make_pod("first").await?;
    assert_eq!(
        look_inside(&setup, "first").await?.only_device(),
        "/dev/drayman-test-0"
    );
    setup.make_pod("second").await?;
    setup
        .wait_for_event("second", "NoSuitableDevice", "1 unhealthy")
        .await?;

    // A device in use becomes unhealthy: its pod keeps it, and no other pod gets it.
    replace(node, "drayman-test-0", 240, 251)?;
    setup
        .wait_for_event(
            node.name(),
            "DeviceUnhealthy",
            "/dev/drayman-test-0 cannot be opened",
        )
        .await?;
    setup.until_running("first").await?;
    setup.claim_of("first", "allocated", is_allocated).await?;

    let began = Instant::now();
    replace(node, "drayman-test-1", 1, 7)?;
    assert_eq!(
        look_inside(&setup, "second").await?.only_device(),
        "/dev/drayman-test-1"
    );
    println!(
        "from the repair of the device to the pod that reads from it: {:?}",
        began.elapsed()
    );
    setup
        .wait_for_event(node.name(), "DeviceRecovered", "drayman-test-1")
        .await?;
    for pod in ["first", "second"] {
        let (_, name) = setup.claim_ids(pod).await?;
        setup.cluster.kubectl(&["delete", "pod", pod]).await?;
        setup.until_claim_gone(&name).await?;
    }
    setup.end([companion, controller]).await
}

/// Configuration with two resources; `resource` is the name of the first.
fn plugged(resource: &str) -> String {
    format!(
        "apiVersion: drayman.dev/v1alpha1\nkind: NodeConfiguration\nkinds:\n\
         - {{name: plugged, mode: extended-resource, resourceName: drayman.dev/{resource}, paths: [\"/dev/drayman-plugged-*\"]}}\n"
    )
}

#[tokio::test]
async fn a_renamed_resource_is_zero_and_the_new_one_counts() -> anyhow::Result<()> {
    let setup = Setup::start(1).await?;
    let node = setup.cluster.node(0);
    for (number, minor) in [5, 7].into_iter().enumerate() {
        node.make_device(format!("/dev/drayman-plugged-{number}"), 1, minor)?;
    }
    let companion = setup.companion(0, &plugged("before"))?;
    let count = |resource: &'static str, wanted: &'static str| {
        let name = setup.cluster.node(0).name().to_owned();
        let api = Api::<KubernetesNode>::all(setup.cluster.client());
        let met = move |node: Option<&KubernetesNode>| {
            let status = node.and_then(|node| node.status.as_ref());
            let of = |all: Option<&std::collections::BTreeMap<String, _>>| {
                all.and_then(|all| all.get(resource))
                    .map_or("0", |quantity: &Quantity| quantity.0.as_str())
                    .to_owned()
            };
            status.is_some_and(|status| {
                of(status.allocatable.as_ref()) == wanted && of(status.capacity.as_ref()) == wanted
            })
        };
        let setup = &setup;
        async move { setup.wait(api, &name, resource, met).await.map(drop) }
    };
    count("drayman.dev/before", "2").await?;
    let began = Instant::now();
    node.remove("/dev/drayman-plugged-1")?;
    count("drayman.dev/before", "1").await?;
    println!("from unplugging to the count on the Node: {:?}", began.elapsed());
    let began = Instant::now();
    node.make_device("/dev/drayman-plugged-1", 1, 7)?;
    count("drayman.dev/before", "2").await?;
    println!("from plugging in to the count on the Node: {:?}", began.elapsed());
    let began = Instant::now();
    setup.rewrite_configuration(0, &plugged("after"))?;
    count("drayman.dev/after", "2").await?;
    count("drayman.dev/before", "0").await?;
    println!(
        "from the new file to the new count on the Node: {:?}",
        began.elapsed()
    );
    // An invalid file changes nothing and is reported.
    setup.rewrite_configuration(0, "kinds: 7\n")?;
    setup
        .wait_for_event(
            setup.cluster.node(0).name(),
            "ConfigurationInvalid",
            "stays in force",
        )
        .await?;
    let inventory = format!("{}.drayman.dev", setup.cluster.node(0).name());
    let devices = Api::<NodeInventory>::all(setup.cluster.client())
        .get(&inventory)
        .await?
        .spec
        .devices;
    assert_eq!(devices.len(), 2);
    setup.end([companion]).await
}
