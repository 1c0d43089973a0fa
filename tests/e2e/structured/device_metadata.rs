//! Containers read the metadata of their devices (KEP-5304).

use std::collections::BTreeMap;

use anyhow::Context as _;
use k8s_openapi::api::resource::v1::ResourceSlice;
use serde_json::{Value, json};

use super::fixture::{
    CONFIGURATION, Slices, allocated, delete, devices_of, make, make_pod_with_claim, offered, one_device,
    start,
};
use crate::harness::IMAGE;
use crate::setup::Setup;

const DIRECTORY: &str = "/var/run/kubernetes.io/dra-device-attributes";

/// The objects in the metadata file of a request, by apiVersion.
async fn metadata(setup: &Setup, pod: &str, claim: &str) -> anyhow::Result<BTreeMap<String, Value>> {
    let path = format!("{DIRECTORY}/{claim}/device/drayman.dev-metadata.json");
    let text = setup.cluster.kubectl(&["exec", pod, "--", "cat", &path]).await?;
    let objects = serde_json::Deserializer::from_str(&text).into_iter::<Value>();
    let mut found = BTreeMap::new();
    for object in objects {
        let object = object?;
        let version = object["apiVersion"].as_str().context("a version")?.to_owned();
        found.insert(version, object);
    }
    Ok(found)
}

#[tokio::test]
async fn containers_read_the_metadata_of_their_devices() -> anyhow::Result<()> {
    let (setup, companion) = start(CONFIGURATION, &[(1, 5)]).await?;
    make_pod_with_claim(&setup, "direct", &one_device()).await?;
    let device = devices_of(&setup, "direct").await?;
    let (uid, _) = allocated(&setup, "direct").await?;
    let found = metadata(&setup, "direct", "resourceclaims/direct").await?;
    let versions: Vec<&str> = found.keys().map(String::as_str).collect();
    assert_eq!(
        versions,
        [
            "metadata.resource.k8s.io/v1alpha1",
            "metadata.resource.k8s.io/v1beta1"
        ]
    );
    for object in found.values() {
        assert_eq!(object["kind"], "DeviceMetadata");
        assert_eq!(
            object["metadata"],
            json!({ "namespace": "default", "name": "direct", "uid": uid, "generation": 1 })
        );
        let described = &object["requests"][0]["devices"][0];
        assert_eq!(object["requests"][0]["name"], "device");
        assert_eq!(
            Some(&described["name"]),
            device.first().map(|name| json!(name)).as_ref()
        );
        assert_eq!(described["pool"], setup.cluster.node(0).name());
        assert_eq!(
            described["attributes"]["drayman.dev/kind"],
            json!({ "string": "test" })
        );
    }
    let write = format!("echo x > {DIRECTORY}/resourceclaims/direct/device/drayman.dev-metadata.json");
    let written = setup
        .cluster
        .kubectl(&["exec", "direct", "--", "sh", "-c", &write])
        .await;
    assert!(format!("{:#}", written.expect_err("it is read-only")).contains("Read-only"));

    of_a_template(&setup).await?;
    delete(&setup, "direct").await?;
    let left = setup.cluster.node(0).list("/run/cdi/drayman.dev-metadata")?;
    assert_eq!(left, Vec::<String>::new());
    setup.end([companion]).await
}

/// The path depends on the claim's name in the pod, and the metadata contains a string that is too long for a slice.
async fn of_a_template(setup: &Setup) -> anyhow::Result<()> {
    let path = format!("/dev/drayman-test-{}", "x".repeat(64));
    setup.cluster.node(0).make_device(&path, 1, 7)?;
    setup
        .apply(&json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate", "metadata": { "name": "test" },
            "spec": { "spec": one_device() },
        }))
        .await?;
    make(
        setup,
        json!({
            "metadata": { "name": "template" },
            "spec": {
                "resourceClaims": [{ "name": "usb", "resourceClaimTemplateName": "test" }],
                "containers": [{ "name": "main", "image": IMAGE, "imagePullPolicy": "Never",
                    "resources": { "claims": [{ "name": "usb" }] } }],
                "dnsPolicy": "Default",
                "terminationGracePeriodSeconds": 1,
            },
        }),
    )
    .await?;
    setup.until_running("template").await?;
    let found = metadata(setup, "template", "resourceclaimtemplates/usb").await?;
    let object = &found["metadata.resource.k8s.io/v1beta1"];
    assert_eq!(object["podClaimName"], "usb");
    let described = &object["requests"][0]["devices"][0];
    assert_eq!(
        described["attributes"]["drayman.dev/path"],
        json!({ "string": path })
    );
    let has_both =
        |slices: &BTreeMap<String, ResourceSlice>| offered(slices).is_some_and(|all| all.len() == 2);
    let mut slices = Slices::watch(setup);
    let devices = offered(slices.until("complete", has_both).await?).context("a pool")?;
    let name = described["name"].as_str().context("a name")?;
    let published = devices[name].attributes.as_ref().context("attributes")?;
    assert!(
        !published.keys().any(|attribute| attribute.ends_with("path")),
        "{published:?}"
    );
    setup
        .cluster
        .kubectl(&["delete", "pod", "template"])
        .await
        .map(drop)
}
