//! Two kinds in one class, distinguished by attributes, on a real control plane.

use drayman::api::crd::NodeInventory;
use kube::api::{Api, Patch, PatchParams};
use serde_json::{Value, json};

use crate::setup::{DRIVER, Setup};
use crate::stored_claims::devices;

/// Sets the attributes of a fake node's devices: vendor and NUMA node.
async fn describe(setup: &Setup, node: &str, known: &[(&str, i64)]) -> anyhow::Result<()> {
    let device = |(number, (vendor, numa)): (usize, &(&str, i64))| {
        json!({ "name": format!("drayman-test-{number}"), "kind": "test", "mode": "claims", "attributes": {
            "drayman.dev/vendor": { "string": vendor }, "drayman.dev/numaNode": { "int": numa } } })
    };
    let devices: Vec<Value> = known.iter().enumerate().map(device).collect();
    let patch = json!({ "spec": { "devices": devices } });
    Api::<NodeInventory>::all(setup.cluster.client())
        .patch(
            &format!("{node}.{DRIVER}"),
            &PatchParams::default(),
            &Patch::Merge(patch),
        )
        .await?;
    Ok(())
}

/// Creates a pod whose claim has these parameters.
async fn make_pod(setup: &Setup, name: &str, spec: Value) -> anyhow::Result<()> {
    setup
        .apply(
            &json!({ "apiVersion": "drayman.dev/v1alpha1", "kind": "DeviceClaimParameters",
            "metadata": { "name": name }, "spec": spec }),
        )
        .await?;
    // Templates are immutable and are copied into the claim.
    let template = json!({
        "apiVersion": "resource.k8s.io/v1alpha2", "kind": "ResourceClaim", "metadata": { "name": name },
        "spec": { "resourceClassName": "test",
            "parametersRef": { "apiGroup": DRIVER, "kind": "DeviceClaimParameters", "name": name } },
    });
    setup.apply(&template).await?;
    setup
        .apply(&json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name }, "spec": {
            "resourceClaims": [{ "name": "device", "source": { "resourceClaimName": name } }],
            "containers": [{ "name": "main", "image": "unused", "resources": { "claims": [{ "name": "device" }] } }] } }))
        .await
}

async fn allocated(setup: &Setup, name: &str) -> anyhow::Result<Vec<String>> {
    setup.until_bound(name).await?;
    devices(&setup.until_allocated(name).await?)
}

fn vendor(name: &str, count: u32, vendor: &str) -> Value {
    let expression = format!("device.attributes[\"drayman.dev\"].vendor == \"{vendor}\"");
    json!({ "name": name, "count": count, "selectors": [{ "cel": { "expression": expression } }] })
}

#[tokio::test]
async fn devices_of_one_kind_are_distinguished_by_attributes() -> anyhow::Result<()> {
    let setup = Setup::start(0).await?;
    setup.make_fake_devices("node-a", 6).await?;
    let known = [
        ("0403", 0),
        ("10de", 0),
        ("0403", 1),
        ("10de", 1),
        ("10de", 1),
        ("0403", 1),
    ];
    describe(&setup, "node-a", &known).await?;
    let controller = setup.controller()?;

    make_pod(
        &setup,
        "chosen",
        json!({ "requests": [vendor("one", 1, "10de")] }),
    )
    .await?;
    assert_eq!(allocated(&setup, "chosen").await?, ["node-a/drayman-test-1"]);

    let equal = json!([{ "matchAttribute": "drayman.dev/numaNode" }]);
    let both = json!([vendor("gpu", 2, "10de"), vendor("serial", 1, "0403")]);
    make_pod(
        &setup,
        "together",
        json!({ "requests": both, "constraints": equal }),
    )
    .await?;
    let together = allocated(&setup, "together").await?;
    assert_eq!(
        together,
        [
            "node-a/drayman-test-3",
            "node-a/drayman-test-4",
            "node-a/drayman-test-2"
        ]
    );

    // The two remaining devices have this vendor and different NUMA nodes.
    make_pod(
        &setup,
        "apart",
        json!({ "requests": [vendor("pair", 2, "0403")], "constraints": equal }),
    )
    .await?;
    let message = "4 of 6 held, no 2 of the remaining devices have the same drayman.dev/numaNode";
    setup.wait_for_event("apart", "NoSuitableDevice", message).await?;
    make_pod(&setup, "other", json!({ "requests": [vendor("one", 1, "10de")] })).await?;
    let message = "4 of 6 held, 2 of 6 do not match selector 1 of request one";
    setup.wait_for_event("other", "NoSuitableDevice", message).await?;

    // Rejected with the object and the selector; others are not blocked.
    let chain = format!("device{} == 1", ".b".repeat(5000 / 2));
    for (name, expression, message) in [
        ("syntax", "device.driver ==", "selector 1 of request bad"),
        ("hostile", chain.as_str(), "at most 160 are allowed"),
    ] {
        let request = json!({ "name": "bad", "selectors": [{ "cel": { "expression": expression } }] });
        make_pod(&setup, name, json!({ "requests": [request] })).await?;
        let event = setup.wait_for_event(name, "SelectorInvalid", message).await?;
        let object = format!("DeviceClaimParameters default/{name}");
        let message = event.message.unwrap_or_default();
        assert!(message.contains(&object), "{message}");
    }

    // An attribute changes, and the waiting pod gets the device.
    let known = [
        ("0403", 0),
        ("10de", 0),
        ("0403", 1),
        ("10de", 1),
        ("10de", 1),
        ("10de", 1),
    ];
    describe(&setup, "node-a", &known).await?;
    assert_eq!(allocated(&setup, "other").await?, ["node-a/drayman-test-5"]);

    let all = json!({ "name": "all", "allocationMode": "All", "selectors": [{ "cel": {
        "expression": "device.attributes[\"drayman.dev\"].numaNode == 0" } }] });
    make_pod(&setup, "all", json!({ "requests": [all] })).await?;
    let message = "request all is for all 2 that match, and 1 of them are held or unhealthy";
    setup.wait_for_event("all", "NoSuitableDevice", message).await?;
    setup.remove_pod("chosen").await?;
    setup
        .claims()
        .delete("chosen", &kube::api::DeleteParams::default())
        .await?;
    assert_eq!(
        allocated(&setup, "all").await?,
        ["node-a/drayman-test-0", "node-a/drayman-test-1"]
    );

    setup.end([controller]).await
}
