//! The user commands that answer questions about a cluster, in structured mode on a real control plane.

use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{Api, PostParams};
use serde_json::{Value, json};

use super::fixture::{
    Slices, allocated, make_claim, make_class, make_pod, make_pod_with_claim, offered, one_device, waits,
};
use crate::commands::{json as ask, run};
use crate::harness::Cluster;
use crate::setup::{DRIVER, Setup};

/// The first minor version with device taints and consumable capacity by default.
const ON_SINCE: u32 = 36;
/// The first minor version with DeviceTaintRules by default.
const RULES_SINCE: u32 = 37;

/// A cluster with two nodes that exist only in the API; the first has a slice.
async fn start() -> anyhow::Result<Setup> {
    let cluster = Cluster::structured()
        // Nodes that exist only in the API have no heartbeats.
        .flag("controller-manager", "--node-monitor-grace-period=24h")
        .start()
        .await?;
    let setup = Setup::structured(cluster).await?;
    for node in ["node-a", "node-b"] {
        setup.make_fake_node(node).await?;
    }
    make_class(&setup, "test", "test").await?;
    Ok(setup)
}

fn device(name: &str, kind: &str) -> Value {
    json!({ "name": name, "attributes": { "drayman.dev/kind": { "string": kind } } })
}

/// Creates a slice of a node.
async fn make_slice(setup: &Setup, name: &str, pool: &Value, devices: &[Value]) -> anyhow::Result<()> {
    let slice: ResourceSlice = serde_json::from_value(json!({
        "metadata": { "name": name },
        "spec": { "driver": DRIVER, "nodeName": "node-a", "pool": pool, "devices": devices },
    }))?;
    let api = Api::all(setup.cluster.client());
    api.create(&PostParams::default(), &slice).await?;
    Ok(())
}

fn pool(name: &str, generation: i64, count: i64) -> Value {
    json!({ "name": name, "generation": generation, "resourceSliceCount": count })
}

#[tokio::test]
async fn the_commands_show_devices_holders_and_waiting_pods() -> anyhow::Result<()> {
    let setup = start().await?;
    if setup
        .cluster
        .is_before(ON_SINCE, "device taints are off by default")
    {
        return setup.cluster.stop().await;
    }
    let mut tainted = device("test-1", "test");
    tainted["attributes"]["drayman.dev/unhealthy"] = json!({ "string": "it does not open" });
    tainted["taints"] = json!([{ "key": "drayman.dev/unhealthy", "effect": "NoSchedule" }]);
    let mut devices = vec![device("test-0", "test"), tainted];
    let with_rules = setup.cluster.minor() >= RULES_SINCE;
    if with_rules {
        let taint = json!({ "key": "example.com/repair", "effect": "NoSchedule" });
        setup
            .apply(&json!({
                "apiVersion": "resource.k8s.io/v1", "kind": "DeviceTaintRule", "metadata": { "name": "repair" },
                "spec": { "deviceSelector": { "driver": DRIVER, "pool": "node-a", "device": "test-2" }, "taint": taint },
            }))
            .await?;
        devices.push(device("test-2", "test"));
    }
    make_slice(&setup, "node-a-1", &pool("node-a", 1, 1), &devices).await?;
    make_pod_with_claim(&setup, "first", &one_device()).await?;
    setup.until_bound("first").await?;
    allocated(&setup, "first").await?;
    make_pod_with_claim(&setup, "second", &one_device()).await?;
    waits(&setup, "second", "cannot allocate all claims").await?;

    let (code, table, _) = run(&setup, &["devices"]).await?;
    println!("{table}");
    assert_eq!(code, Some(0));
    let lines: Vec<Vec<&str>> = table
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(lines[0], ["NODE", "DEVICE", "KIND", "STATE", "HELD", "BY"]);
    assert_eq!(lines[1], ["node-a", "test-0", "test", "Held", "default/first"]);
    assert_eq!(lines[2][..4], ["node-a", "test-1", "test", "Unhealthy"]);
    if with_rules {
        assert_eq!(lines[3][..4], ["node-a", "test-2", "test", "Tainted"]);
    }
    let (code, text, _) = run(&setup, &["who", "node-a/test-0"]).await?;
    println!("{text}");
    assert_eq!(code, Some(0));
    assert!(
        text.contains("ResourceClaim default/first (request device), used by first"),
        "{text}"
    );

    let (_, text, _) = run(&setup, &["explain", "pod/second"]).await?;
    println!("{text}");
    let explained = ask(&setup, &["explain", "pod/second"]).await?;
    let claim = &explained["claims"][0];
    assert_eq!(claim["step"], "WaitsForDevice");
    // All gates are on.
    assert_eq!(claim["because"], "none of 2 nodes can serve it now");
    let because = if with_rules {
        "request device: 0 of 3 matching devices free, 1 needed (1 held, 2 tainted)"
    } else {
        "request device: 0 of 2 matching devices free, 1 needed (1 held, 1 tainted)"
    };
    let mut nodes = claim["nodes"].as_array().cloned().unwrap_or_default();
    nodes.sort_by_key(|node| node["node"].to_string());
    assert_eq!(
        nodes,
        [
            json!({ "node": "node-a", "reason": because }),
            json!({ "node": "node-b", "reason": "no ResourceSlice is for this node: no driver runs here" }),
        ]
    );
    let reasons: Vec<&str> = claim["devices"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|device| device["reason"].as_str())
        .collect();
    assert_eq!(reasons[0], "held by default/first");
    assert!(reasons[1].contains("drayman.dev/unhealthy"), "{reasons:?}");
    setup.cluster.stop().await
}

/// The doctor's messages of a level.
async fn doctor(setup: &Setup, level: &str) -> anyhow::Result<Vec<String>> {
    let findings = ask(setup, &["doctor"]).await?;
    let findings = findings["items"].as_array().into_iter().flatten();
    let of_level = findings.filter(|finding| finding["level"] == level);
    Ok(of_level
        .map(|finding| finding["message"].as_str().unwrap_or_default().to_owned())
        .collect())
}

fn has(messages: &[String], text: &str) {
    assert!(
        messages.iter().any(|message| message.contains(text)),
        "{text}: {messages:?}"
    );
}

#[tokio::test]
async fn the_doctor_names_classes_and_slices_that_do_not_fit() -> anyhow::Result<()> {
    let setup = start().await?;
    make_class(&setup, "nothing", "nothing").await?;
    let devices = [device("test-0", "test"), device("other-0", "other")];
    make_slice(&setup, "node-a-1", &pool("node-a", 2, 1), &devices).await?;
    assert_eq!(doctor(&setup, "Problem").await?, Vec::<String>::new());
    let warnings = doctor(&setup, "Warning").await?;
    has(&warnings, "DeviceClass nothing matches no device");
    has(
        &warnings,
        "no DeviceClass selects the devices of kind \"other\" in pool node-a",
    );

    // A stale slice, and a slice of a second driver with the same name.
    make_slice(&setup, "node-a-0", &pool("node-a", 1, 1), &[]).await?;
    make_slice(&setup, "another", &pool("another", 1, 2), &[]).await?;
    has(
        &doctor(&setup, "Warning").await?,
        "pool node-a is at generation 2, and older slices remain: node-a-0",
    );
    let problems = doctor(&setup, "Problem").await?;
    has(
        &problems,
        "slices of node node-a are in more than one pool: another, node-a",
    );
    has(&problems, "pool another is");
    setup.cluster.stop().await
}

/// Two kinds, each of which requires a gate.
const CONFIGURATION: &str = "\
apiVersion: drayman.dev/v1alpha1
kind: NodeConfiguration
kinds:
- name: test
  paths: [\"/dev/drayman-test-*\"]
  health: {open: read, recoverAfter: 1}
- name: shared
  paths: [/dev/drayman-shared]
  shares: 2
";

/// The gates are off by default before 1.36. They are not locked on 1.37.
#[tokio::test]
async fn the_commands_name_the_gates_that_are_off() -> anyhow::Result<()> {
    const OFF: &str =
        "--feature-gates=DRAConsumableCapacity=false,DRADeviceTaints=false,DRADeviceTaintRules=false";
    let mut builder = Cluster::structured().nodes(1);
    if builder.minor() >= ON_SINCE {
        for component in ["apiserver", "scheduler", "controller-manager"] {
            builder = builder.flag(component, OFF);
        }
    }
    let setup = Setup::structured(builder.start().await?).await?;
    let node = setup.cluster.node(0);
    node.make_device("/dev/drayman-test-0", 1, 5)?;
    // Numbers without a driver: the device cannot be opened.
    node.make_device("/dev/drayman-test-1", 240, 250)?;
    node.make_device("/dev/drayman-shared", 1, 7)?;
    make_class(&setup, "test", "test").await?;
    make_class(&setup, "shared", "shared").await?;
    let mut slices = Slices::watch(&setup);
    let companion = setup.companion(0, CONFIGURATION)?;
    let offers_one =
        |slices: &_| offered(slices).is_some_and(|devices| devices.keys().eq(["drayman-test-0"]));
    slices
        .until("without the devices that need a gate", offers_one)
        .await?;

    let (_, text, _) = run(&setup, &["doctor"]).await?;
    println!("{text}");
    let is_early = setup.cluster.minor() < ON_SINCE;
    let messages = doctor(&setup, if is_early { "Note" } else { "Warning" }).await?;
    for gate in ["DRADeviceTaints", "DRAConsumableCapacity"] {
        if is_early {
            has(
                &messages,
                &format!("{gate} is used from Kubernetes 1.{ON_SINCE} on"),
            );
        } else {
            has(&messages, &format!("kube-apiserver has {gate} off"));
        }
    }
    let devices = json!({ "requests": [{ "name": "device", "exactly": { "deviceClassName": "shared" } }] });
    make_claim(&setup, "pod", &json!({ "devices": devices })).await?;
    make_pod(&setup, "pod").await?;
    waits(&setup, "pod", "cannot allocate all claims").await?;
    let explained = ask(&setup, &["explain", "pod/pod"]).await?;
    let claim = &explained["claims"][0];
    let because = claim["because"].as_str().unwrap_or_default();
    println!("{because}");
    let cause = if is_early {
        format!("DRAConsumableCapacity is used from Kubernetes 1.{ON_SINCE} on")
    } else {
        "the gate DRAConsumableCapacity is off".to_owned()
    };
    assert!(
        because.contains(&format!("{cause}: companions leave out devices with shares")),
        "{because}"
    );
    assert_eq!(
        claim["nodes"][0]["reason"],
        "request device: no device matches DeviceClass shared"
    );
    setup.end([companion]).await
}
