//! Requests and constraints of claims: the scheduler allocates, and each container gets its own devices.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::fixture::{
    allocated, delete, devices_in, devices_of, make_claim, make_class, make_pod_of, make_pod_with_claim,
    names, one_device, start, waits,
};
use crate::stage::Stage;

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
    let (stage, companion) = start(CONFIGURATION, &DEVICES).await?;
    two_containers(&stage).await?;
    first_available(&stage).await?;
    all(&stage).await?;
    match_attribute(&stage).await?;
    admin_access(&stage).await?;
    companion.end().await?;
    stage.cluster.stop().await
}

/// Two requests of one claim in two containers.
async fn two_containers(stage: &Stage) -> anyhow::Result<()> {
    let requests = [
        exactly("left", &json!({})),
        exactly("right", &json!({ "count": 2 })),
    ];
    make_claim(stage, "pod", &claim(&requests, &[])).await?;
    let containers: [(&str, &[&str]); 4] = [
        ("left", &["left"]),
        ("right", &["right"]),
        ("both", &["left", "right"]),
        ("whole", &[]),
    ];
    make_pod_of(stage, "pod", &containers).await?;
    let left = devices_in(stage, "pod", "left").await?;
    let right = devices_in(stage, "pod", "right").await?;
    assert_eq!((left.len(), right.len()), (1, 2));
    assert!(left.is_disjoint(&right), "{left:?} {right:?}");
    let (_, all) = allocated(stage, "pod").await?;
    assert_eq!(&left | &right, all);
    for container in ["both", "whole"] {
        assert_eq!(devices_in(stage, "pod", container).await?, all, "{container}");
    }
    delete(stage, "pod").await
}

/// Alternatives of which the first is not available. Containers reference the request, not the alternative.
async fn first_available(stage: &Stage) -> anyhow::Result<()> {
    make_class(stage, "missing", "missing").await?;
    let request = json!({ "name": "any", "firstAvailable": [
        { "name": "best", "deviceClassName": "missing" },
        { "name": "other", "deviceClassName": "test" },
    ] });
    make_claim(stage, "pod", &claim(&[request], &[])).await?;
    make_pod_of(stage, "pod", &[("main", &["any"])]).await?;
    assert_eq!(devices_of(stage, "pod").await?.len(), 1);
    delete(stage, "pod").await
}

async fn all(stage: &Stage) -> anyhow::Result<()> {
    let request = exactly("all", &json!({ "allocationMode": "All" }));
    make_pod_with_claim(stage, "pod", &claim(&[request], &[])).await?;
    assert_eq!(devices_of(stage, "pod").await?, names(&[0, 1, 2, 3]));
    delete(stage, "pod").await
}

/// Two values of an attribute exist; the claim gets a pair with the same value.
async fn match_attribute(stage: &Stage) -> anyhow::Result<()> {
    make_pod_with_claim(stage, "holder", &one_device()).await?;
    let held = devices_of(stage, "holder").await?;
    let pair = exactly("pair", &json!({ "count": 2 }));
    let same = json!({ "matchAttribute": "drayman.dev/major" });
    let spec = claim(&[pair], &[same]);
    make_pod_with_claim(stage, "pair", &spec).await?;
    let pair = devices_of(stage, "pair").await?;
    let expected = if held.is_subset(&names(&[0, 1])) {
        names(&[2, 3])
    } else {
        names(&[0, 1])
    };
    assert_eq!(pair, expected, "beside {held:?}");
    make_pod_with_claim(stage, "another", &spec).await?;
    waits(stage, "another", "cannot allocate all claims").await?;
    delete(stage, "holder").await?;
    assert_eq!(devices_of(stage, "another").await?.len(), 2);
    for pod in ["pair", "another"] {
        delete(stage, pod).await?;
    }
    Ok(())
}

/// A claim with admin access gets all devices in addition to their holders, and holds none.
async fn admin_access(stage: &Stage) -> anyhow::Result<()> {
    make_pod_with_claim(stage, "holder", &one_device()).await?;
    let held = devices_of(stage, "holder").await?;
    let request = exactly("all", &json!({ "adminAccess": true, "allocationMode": "All" }));
    let spec = claim(&[request], &[]);
    let Err(refused) = make_claim(stage, "admin", &spec).await else {
        anyhow::bail!("a namespace without the label has admin access");
    };
    assert!(format!("{refused:#}").contains("admin access"), "{refused:#}");
    let label = [
        "label",
        "namespace",
        "default",
        "resource.kubernetes.io/admin-access=true",
    ];
    stage.cluster.kubectl(&label).await?;
    make_pod_with_claim(stage, "admin", &spec).await?;
    assert_eq!(devices_of(stage, "admin").await?, names(&[0, 1, 2, 3]));
    // The claim with admin access holds nothing.
    make_pod_with_claim(stage, "beside", &one_device()).await?;
    assert!(devices_of(stage, "beside").await?.is_disjoint(&held));
    delete(stage, "admin").await?;
    assert_eq!(devices_of(stage, "holder").await?, held);
    for pod in ["holder", "beside"] {
        delete(stage, pod).await?;
    }
    Ok(())
}

#[tokio::test]
async fn two_claims_share_a_device_and_a_third_waits() -> anyhow::Result<()> {
    let (stage, companion) = start(CONFIGURATION, &DEVICES).await?;
    if stage
        .cluster
        .is_before(36, "consumable capacity is off by default")
    {
        companion.end().await?;
        return stage.cluster.stop().await;
    }
    make_class(&stage, "shared", "shared").await?;
    stage.cluster.node(0).make_device("/dev/drayman-shared", 1, 9)?;
    let request = |name: &str| json!({ "name": name, "exactly": { "deviceClassName": "shared" } });
    let shared = BTreeSet::from(["drayman-shared".to_owned()]);
    for pod in ["first", "second"] {
        make_pod_with_claim(&stage, pod, &claim(&[request("share")], &[])).await?;
        assert_eq!(devices_of(&stage, pod).await?, shared, "{pod}");
    }
    make_pod_with_claim(&stage, "third", &claim(&[request("share")], &[])).await?;
    waits(&stage, "third", "cannot allocate all claims").await?;
    delete(&stage, "first").await?;
    assert_eq!(devices_of(&stage, "third").await?, shared);
    assert_eq!(devices_of(&stage, "second").await?, shared);

    // Two requests of one claim get devices with different major numbers.
    let two = [exactly("one", &json!({})), exactly("other", &json!({}))];
    let distinct = json!({ "distinctAttribute": "drayman.dev/major" });
    make_pod_with_claim(&stage, "distinct", &claim(&two, &[distinct])).await?;
    let devices = devices_of(&stage, "distinct").await?;
    assert_eq!(devices.intersection(&names(&[0, 1])).count(), 1, "{devices:?}");
    assert_eq!(devices.intersection(&names(&[2, 3])).count(), 1, "{devices:?}");
    for pod in ["second", "third", "distinct"] {
        delete(&stage, pod).await?;
    }
    companion.end().await?;
    stage.cluster.stop().await
}
