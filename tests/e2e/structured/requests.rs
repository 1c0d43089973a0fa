//! Requests and constraints of claims: the scheduler allocates, and each container gets its own devices.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::fixture::{
    allocated, delete, devices_in, devices_of, make_claim, make_class, make_pod_of, make_pod_with_claim,
    names, one_device, start, waits,
};
use crate::setup::Setup;

/// Two kinds; a device of `shared` serves two claims.
const CONFIGURATION: &str = "\
apiVersion: drayman.dev/v1alpha1
kind: NodeConfiguration
kinds:
- name: test
  paths: [\"/dev/drayman-test-*\"]
- name: shared
  paths: [/dev/drayman-shared]
  shares: 2
";

/// Two devices with one major number, and two with another, which is never opened.
const DEVICES: [(u32, u32); 4] = [(1, 5), (1, 7), (240, 1), (240, 2)];

fn exactly(name: &str, fields: &Value) -> Value {
    let mut exactly = json!({ "deviceClassName": "test" });
    if let (Some(all), Some(fields)) = (exactly.as_object_mut(), fields.as_object()) {
        all.extend(fields.clone());
    }
    json!({ "name": name, "exactly": exactly })
}

fn claim(requests: &[Value], constraints: &[Value]) -> Value {
    json!({ "devices": { "requests": requests, "constraints": constraints } })
}

#[tokio::test]
async fn the_scheduler_decides_and_each_container_gets_its_own() -> anyhow::Result<()> {
    let (setup, companion) = start(CONFIGURATION, &DEVICES).await?;
    two_containers(&setup).await?;
    first_available(&setup).await?;
    all(&setup).await?;
    match_attribute(&setup).await?;
    admin_access(&setup).await?;
    setup.end([companion]).await
}

/// Two requests of one claim in two containers.
async fn two_containers(setup: &Setup) -> anyhow::Result<()> {
    let requests = [
        exactly("left", &json!({})),
        exactly("right", &json!({ "count": 2 })),
    ];
    make_claim(setup, "pod", &claim(&requests, &[])).await?;
    let containers: [(&str, &[&str]); 4] = [
        ("left", &["left"]),
        ("right", &["right"]),
        ("both", &["left", "right"]),
        ("whole", &[]),
    ];
    make_pod_of(setup, "pod", &containers).await?;
    let left = devices_in(setup, "pod", "left").await?;
    let right = devices_in(setup, "pod", "right").await?;
    assert_eq!((left.len(), right.len()), (1, 2));
    assert!(left.is_disjoint(&right), "{left:?} {right:?}");
    let (_, all) = allocated(setup, "pod").await?;
    assert_eq!(&left | &right, all);
    for container in ["both", "whole"] {
        assert_eq!(devices_in(setup, "pod", container).await?, all, "{container}");
    }
    delete(setup, "pod").await
}

/// Alternatives of which the first is not available. Containers reference the request, not the alternative.
async fn first_available(setup: &Setup) -> anyhow::Result<()> {
    make_class(setup, "missing", "missing").await?;
    let request = json!({ "name": "any", "firstAvailable": [
        { "name": "best", "deviceClassName": "missing" },
        { "name": "other", "deviceClassName": "test" },
    ] });
    make_claim(setup, "pod", &claim(&[request], &[])).await?;
    make_pod_of(setup, "pod", &[("main", &["any"])]).await?;
    assert_eq!(devices_of(setup, "pod").await?.len(), 1);
    delete(setup, "pod").await
}

async fn all(setup: &Setup) -> anyhow::Result<()> {
    let request = exactly("all", &json!({ "allocationMode": "All" }));
    make_pod_with_claim(setup, "pod", &claim(&[request], &[])).await?;
    assert_eq!(devices_of(setup, "pod").await?, names(&[0, 1, 2, 3]));
    delete(setup, "pod").await
}

/// Two values of an attribute exist; the claim gets a pair with the same value.
async fn match_attribute(setup: &Setup) -> anyhow::Result<()> {
    make_pod_with_claim(setup, "holder", &one_device()).await?;
    let held = devices_of(setup, "holder").await?;
    let pair = exactly("pair", &json!({ "count": 2 }));
    let same = json!({ "matchAttribute": "drayman.dev/major" });
    let spec = claim(&[pair], &[same]);
    make_pod_with_claim(setup, "pair", &spec).await?;
    let pair = devices_of(setup, "pair").await?;
    let expected = if held.is_subset(&names(&[0, 1])) {
        names(&[2, 3])
    } else {
        names(&[0, 1])
    };
    assert_eq!(pair, expected, "beside {held:?}");
    make_pod_with_claim(setup, "another", &spec).await?;
    waits(setup, "another", "cannot allocate all claims").await?;
    delete(setup, "holder").await?;
    assert_eq!(devices_of(setup, "another").await?.len(), 2);
    for pod in ["pair", "another"] {
        delete(setup, pod).await?;
    }
    Ok(())
}

/// A claim with admin access gets all devices in addition to their holders, and holds none.
async fn admin_access(setup: &Setup) -> anyhow::Result<()> {
    make_pod_with_claim(setup, "holder", &one_device()).await?;
    let held = devices_of(setup, "holder").await?;
    let request = exactly("all", &json!({ "adminAccess": true, "allocationMode": "All" }));
    let spec = claim(&[request], &[]);
    let Err(refused) = make_claim(setup, "admin", &spec).await else {
        anyhow::bail!("a namespace without the label has admin access");
    };
    assert!(format!("{refused:#}").contains("admin access"), "{refused:#}");
    let label = [
        "label",
        "namespace",
        "default",
        "resource.kubernetes.io/admin-access=true",
    ];
    setup.cluster.kubectl(&label).await?;
    make_pod_with_claim(setup, "admin", &spec).await?;
    assert_eq!(devices_of(setup, "admin").await?, names(&[0, 1, 2, 3]));
    // The claim with admin access holds nothing.
    make_pod_with_claim(setup, "beside", &one_device()).await?;
    assert!(devices_of(setup, "beside").await?.is_disjoint(&held));
    delete(setup, "admin").await?;
    assert_eq!(devices_of(setup, "holder").await?, held);
    for pod in ["holder", "beside"] {
        delete(setup, pod).await?;
    }
    Ok(())
}

#[tokio::test]
async fn two_claims_share_a_device_and_a_third_waits() -> anyhow::Result<()> {
    let (setup, companion) = start(CONFIGURATION, &DEVICES).await?;
    if setup
        .cluster
        .is_before(36, "consumable capacity is off by default")
    {
        companion.end().await?;
        return setup.cluster.stop().await;
    }
    make_class(&setup, "shared", "shared").await?;
    setup.cluster.node(0).make_device("/dev/drayman-shared", 1, 9)?;
    let request = |name: &str| json!({ "name": name, "exactly": { "deviceClassName": "shared" } });
    let shared = BTreeSet::from(["drayman-shared".to_owned()]);
    for pod in ["first", "second"] {
        make_pod_with_claim(&setup, pod, &claim(&[request("share")], &[])).await?;
        assert_eq!(devices_of(&setup, pod).await?, shared, "{pod}");
    }
    make_pod_with_claim(&setup, "third", &claim(&[request("share")], &[])).await?;
    waits(&setup, "third", "cannot allocate all claims").await?;
    delete(&setup, "first").await?;
    assert_eq!(devices_of(&setup, "third").await?, shared);
    assert_eq!(devices_of(&setup, "second").await?, shared);

    // Two requests of one claim get devices with different major numbers.
    let two = [exactly("one", &json!({})), exactly("other", &json!({}))];
    let distinct = json!({ "distinctAttribute": "drayman.dev/major" });
    make_pod_with_claim(&setup, "distinct", &claim(&two, &[distinct])).await?;
    let devices = devices_of(&setup, "distinct").await?;
    assert_eq!(devices.intersection(&names(&[0, 1])).count(), 1, "{devices:?}");
    assert_eq!(devices.intersection(&names(&[2, 3])).count(), 1, "{devices:?}");
    for pod in ["second", "third", "distinct"] {
        delete(&setup, pod).await?;
    }
    setup.end([companion]).await
}
