//! Requirements of structured mode for a cluster, without our programs: slices are created by hand.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{Api, PostParams};
use serde_json::json;

use super::fixture::{self, Slices, make_class, make_pod_with_claim, one_device};
use crate::harness::Cluster;
use crate::setup::{DRIVER, Setup, is_bound};

/// Creates a slice with one device of the kind `test`.
async fn make_slice(setup: &Setup, node: &str) -> anyhow::Result<()> {
    let slice: ResourceSlice = serde_json::from_value(json!({
        "metadata": { "name": format!("{node}-by-hand") },
        "spec": {
            "driver": DRIVER, "nodeName": node, "pool": { "name": node, "generation": 1, "resourceSliceCount": 1 },
            "devices": [{ "name": "by-hand", "attributes": { "kind": { "string": "test" } } }],
        },
    }))?;
    Api::all(setup.cluster.client())
        .create(&PostParams::default(), &slice)
        .await?;
    Ok(())
}

#[tokio::test]
async fn the_scheduler_allocates_from_a_slice_made_by_hand() -> anyhow::Result<()> {
    let cluster = Cluster::structured()
        // Nodes that exist only in the API have no heartbeats.
        .flag("controller-manager", "--node-monitor-grace-period=24h")
        .share("structured", async |_| Ok(()))
        .await?;
    let setup = Setup::structured(cluster).await?;
    setup.make_fake_node("node-a").await?;
    make_slice(&setup, "node-a").await?;
    make_class(&setup, "test", "test").await?;
    make_pod_with_claim(&setup, "first", &one_device()).await?;
    setup.wait(setup.pods(), "first", "bound", is_bound()).await?;
    let (_, devices) = fixture::allocated(&setup, "first").await?;
    assert_eq!(devices, BTreeSet::from(["by-hand".to_owned()]));
    make_pod_with_claim(&setup, "second", &one_device()).await?;
    fixture::waits(&setup, "second", "cannot allocate all claims").await?;
    setup.cluster.stop().await
}

#[tokio::test]
async fn a_kubelet_waits_for_the_driver_of_an_allocated_claim() -> anyhow::Result<()> {
    let setup = Setup::structured(Cluster::structured().nodes(1).start().await?).await?;
    let node = setup.cluster.node(0).name();
    make_class(&setup, "test", "test").await?;
    // A starting kubelet deletes the slices of its node.
    let kept = async {
        let mut slices = Slices::watch(&setup);
        loop {
            slices.until("gone", BTreeMap::is_empty).await?;
            make_slice(&setup, node).await?;
            slices.until("there", |slices| !slices.is_empty()).await?;
        }
    };
    let waits = async {
        make_pod_with_claim(&setup, "pod", &one_device()).await?;
        setup
            .wait_for_event("pod", "FailedPrepareDynamicResources", "is not registered")
            .await?;
        fixture::allocated(&setup, "pod").await
    };
    let (_, devices) = tokio::select! {
        waited = waits => waited?,
        ended = kept => { let never: anyhow::Result<()> = ended; never?; anyhow::bail!("it follows the slices for ever") }
    };
    assert_eq!(devices, BTreeSet::from(["by-hand".to_owned()]));
    setup.cluster.stop().await
}
