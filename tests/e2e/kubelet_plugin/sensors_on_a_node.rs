//! The vendor example of the documentation on a real node.

use drayman::api::resource::ResourceClaim;
use kube::api::PostParams;
use serde_json::json;

use crate::harness::IMAGE;
use crate::kubelet_plugin::helper::{
    devices_inside, pod_with_limit, wait_for_allocatable, wait_for_inventory,
};
use crate::sensors;
use crate::setup::{Setup, controller_rules, is_allocated, is_gone, is_running, node_rules, pod_from};

const DRIVER: &str = "sensors.example.com";
const RESOURCE: &str = "sensors.example.com/sensor";
/// Set in the process in which the next function is the program under test.
const AS_PROGRAM: &str = "DRAYMAN_TEST_RUN_SENSORS";

/// The other test also uses this to start the example on a node, so that nothing else must be built.
#[test]
fn the_sensors_example_asks_for_the_name_of_its_node() {
    let ended = sensors::main();
    if std::env::var_os(AS_PROGRAM).is_some() {
        ended.expect("the example ends cleanly");
    } else if std::env::var_os("NODE_NAME").is_none() {
        let error = ended.expect_err("it cannot run without").to_string();
        assert!(error.contains("NODE_NAME"), "{error}");
    }
}

#[tokio::test]
async fn a_pod_gets_vendor_devices_by_claim_and_by_limit() -> anyhow::Result<()> {
    let setup = Setup::start(1).await?;
    let node = setup.cluster.node(0);
    let directory = setup.cluster.directory().join("sensors");
    std::fs::create_dir(&directory)?;
    for (number, (serial, minor)) in [("a1", 5), ("b2", 7)].into_iter().enumerate() {
        let path = format!("/dev/vendor-{number}");
        node.make_device(&path, 1, minor)?;
        std::fs::write(directory.join(serial), path)?;
    }
    setup
        .apply(
            &json!({ "apiVersion": "drayman.dev/v1alpha1", "kind": "DeviceClassParameters",
            "metadata": { "name": "sensor" }, "spec": { "kind": "sensor" } }),
        )
        .await?;
    setup
        .apply(&json!({ "apiVersion": "resource.k8s.io/v1alpha2", "kind": "ResourceClass", "metadata": { "name": "sensor" },
            "driverName": DRIVER,
            "parametersRef": { "apiGroup": "drayman.dev", "kind": "DeviceClassParameters", "name": "sensor" } }))
        .await?;
    setup
        .apply(
            &json!({ "apiVersion": "resource.k8s.io/v1alpha2", "kind": "ResourceClaimTemplate",
            "metadata": { "name": "sensor" }, "spec": { "spec": { "resourceClassName": "sensor" } } }),
        )
        .await?;
    let user = setup
        .cluster
        .user("sensors-controller", &controller_rules()?)
        .await?;
    let mut command = setup.cluster.command(env!("CARGO_BIN_EXE_drayman"));
    command
        .args(["controller", "--driver-name", DRIVER, "--kubeconfig"])
        .arg(user);
    let controller = setup.program("sensors-controller", command)?;
    let user = setup.cluster.user("sensors-node", &node_rules()?).await?;
    let mut command = node.command(std::env::current_exe()?);
    command
        .args(["--exact", "--nocapture"])
        .arg("kubelet_plugin::sensors_on_a_node::the_sensors_example_asks_for_the_name_of_its_node")
        .env(AS_PROGRAM, "1")
        .env("NODE_NAME", node.name())
        .env("KUBECONFIG", user)
        .env("SENSORS_DIR", &directory);
    let companion = setup.program("sensors", command)?;
    wait_for_inventory(&setup, DRIVER, 2, 0).await?;

    let pod = pod_from(json!({
        "metadata": { "name": "claims" },
        "spec": {
            "resourceClaims": [{ "name": "sensor", "source": { "resourceClaimTemplateName": "sensor" } }],
            "containers": [{ "name": "main", "image": IMAGE, "imagePullPolicy": "Never",
                "resources": { "claims": [{ "name": "sensor" }] } }],
            "dnsPolicy": "Default", "terminationGracePeriodSeconds": 1,
        },
    }))?;
    setup.pods().create(&PostParams::default(), &pod).await?;
    setup
        .wait(setup.pods(), "claims", "running", is_running())
        .await?;
    assert_eq!(devices_inside(&setup, "claims", "sensor-").await?, ["sensor-a1"]);
    let claim: ResourceClaim = setup.claim_of("claims", "allocated", is_allocated).await?;
    assert_eq!(
        claim.metadata.uid,
        Some(std::fs::read_to_string(directory.join("a1.claim"))?),
        "prepared by the driver"
    );

    // The other API has only the other sensor.
    wait_for_allocatable(&setup, RESOURCE, "1").await?;
    setup
        .pods()
        .create(&PostParams::default(), &pod_with_limit("plugged", RESOURCE)?)
        .await?;
    setup
        .wait(setup.pods(), "plugged", "running", is_running())
        .await?;
    assert_eq!(devices_inside(&setup, "plugged", "sensor-").await?, ["sensor-b2"]);
    let bytes = ["exec", "plugged", "--", "head", "-c", "4", "/dev/sensor-b2"];
    assert_eq!(
        setup.cluster.kubectl(&bytes).await?.len(),
        4,
        "and it can be read"
    );

    setup.cluster.kubectl(&["delete", "pod", "claims"]).await?;
    let name = claim.metadata.name.clone().unwrap_or_default();
    setup.wait(setup.claims(), &name, "gone", is_gone()).await?;
    assert!(!directory.join("a1.claim").exists(), "unprepared by the driver");
    companion.end().await?;
    controller.end().await?;
    setup.cluster.stop().await
}
