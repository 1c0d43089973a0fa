//! The vendor example of the documentation on a real node.

use kube::api::PostParams;
use serde_json::json;

use crate::harness::IMAGE;
use crate::kubelet_plugin::helper::{devices_inside, wait_for_inventory};
use crate::setup::{PROGRAM, Setup, controller_rules, node_rules, pod_from};

const DRIVER: &str = "sensors.example.com";
const RESOURCE: &str = "sensors.example.com/sensor";
/// Set in the process in which [`ENTRY`] is the program under test.
const AS_PROGRAM: &str = "DRAYMAN_TEST_RUN_SENSORS";
const ENTRY: &str = "examples::run::the_vendors_companion_asks_for_the_name_of_its_node";

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
    setup.make_kind("sensor", DRIVER).await?;
    let user = setup
        .cluster
        .user("sensors-controller", &controller_rules()?)
        .await?;
    let mut command = setup.cluster.command(PROGRAM);
    command
        .args(["controller", "--driver-name", DRIVER, "--kubeconfig"])
        .arg(user);
    let controller = setup.program("sensors-controller", command)?;
    let user = setup.cluster.user("sensors-node", &node_rules()?).await?;
    let mut command = node.command(std::env::current_exe()?);
    command
        .args(["--exact", "--nocapture"])
        .arg(ENTRY)
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
    setup.until_running("claims").await?;
    assert_eq!(devices_inside(&setup, "claims", "sensor-").await?, ["sensor-a1"]);
    let (uid, name) = setup.claim_ids("claims").await?;
    assert_eq!(
        uid,
        std::fs::read_to_string(directory.join("a1.claim"))?,
        "prepared by the driver"
    );

    // The other API has only the other sensor.
    setup.until_allocatable(RESOURCE, "1").await?;
    setup.make_limit_pod("plugged", RESOURCE).await?;
    setup.until_running("plugged").await?;
    assert_eq!(devices_inside(&setup, "plugged", "sensor-").await?, ["sensor-b2"]);
    let bytes = ["exec", "plugged", "--", "head", "-c", "4", "/dev/sensor-b2"];
    assert_eq!(
        setup.cluster.kubectl(&bytes).await?.len(),
        4,
        "and it can be read"
    );

    setup.cluster.kubectl(&["delete", "pod", "claims"]).await?;
    setup.until_claim_gone(&name).await?;
    assert!(!directory.join("a1.claim").exists(), "unprepared by the driver");
    setup.end([companion, controller]).await
}
