//! Kubernetes is upgraded under a running companion: first the control plane, then kubelet. The default is an upgrade from classic to
//! structured mode. To upgrade from another version: `DRAYMAN_TEST_KUBERNETES=1.36.3 cargo test --test e2e cluster_upgrade`.

use std::collections::{BTreeMap, BTreeSet};

use drayman::api::crd::NodeInventory;
use kube::api::{Api, DeleteParams};

use crate::harness::{Cluster, STRUCTURED_VERSION};
use crate::pods::{CONFIGURATION, MINORS, PLUGGED, look_inside, make_devices};
use crate::setup::{DRIVER, Setup};
use crate::structured::fixture::{
    Slices, delete, devices_of, make_class, make_pod_with_claim, names, one_device,
};

#[tokio::test]
async fn an_upgrade_of_kubernetes_reaches_a_running_companion() -> anyhow::Result<()> {
    let mut setup = Setup::of_both_modes(Cluster::builder().nodes(1).start().await?).await?;
    let node = setup.cluster.node(0);
    make_devices(node, "drayman-test-", &MINORS[..2])?;
    make_devices(node, "drayman-plugged-", &MINORS[2..])?;
    let companion = setup.companion(0, CONFIGURATION)?;
    setup.until_allocatable(PLUGGED, "2").await?;
    setup.make_limit_pod("plugged", PLUGGED).await?;
    let plugged = look_inside(&setup, "plugged").await?;
    let had_structured_mode = setup.cluster.has_structured_mode();
    if had_structured_mode {
        make_class(&setup, "test", "test").await?;
        make_pod_with_claim(&setup, "before", &one_device()).await?;
        assert_eq!(devices_of(&setup, "before").await?.len(), 1);
    } else {
        setup.until_inventory(DRIVER, |_| true).await?;
    }

    setup.cluster.upgrade_control_plane(STRUCTURED_VERSION).await?;
    if had_structured_mode {
        make_pod_with_claim(&setup, "between", &one_device()).await?;
        let (before, between) = (
            devices_of(&setup, "before").await?,
            devices_of(&setup, "between").await?,
        );
        assert!(before.is_disjoint(&between), "{before:?} {between:?}");
        delete(&setup, "between").await?;
    } else {
        make_class(&setup, "test", "test").await?;
        // Otherwise the companion would query the API for claims only after some minutes.
        let name = format!("{}.drayman.dev", setup.cluster.node(0).name());
        Api::<NodeInventory>::all(setup.cluster.client())
            .delete(&name, &DeleteParams::default())
            .await?;
    }
    let all = names(&[0, 1]);
    let mut slices = Slices::watch(&setup);
    let node = setup.cluster.node(0);
    if had_structured_mode {
        slices.until_offered(&all).await?;
    } else {
        setup
            .wait_for_event(node.name(), "ClaimsServed", "resource.k8s.io/v1 now")
            .await?;
        // This kubelet would start pods without the devices of their claims.
        setup.wait_for_event(node.name(), "KubeletTooOld", "1.34").await?;
        slices.until("there", |slices| !slices.is_empty()).await?;
        slices.until_offered(&BTreeSet::new()).await?;
    }
    node.stop("kubelet", 15).await?;
    // A later kubelet does not start with the claim list of 1.27 to 1.30.
    let claim_list = "/var/lib/kubelet/dra_manager_state";
    if !had_structured_mode && node.path(claim_list).exists() {
        node.remove(claim_list)?;
    }
    let followed = async {
        // A restart of kubelet deletes the slices.
        slices.until("deleted", BTreeMap::is_empty).await?;
        slices.until_offered(&all).await
    };
    let (started, followed) = tokio::join!(node.start("kubelet"), followed);
    started?;
    followed?;

    make_pod_with_claim(&setup, "after", &one_device()).await?;
    let after = devices_of(&setup, "after").await?;
    assert!(after.len() == 1 && after.is_subset(&all), "{after:?}");
    if had_structured_mode {
        let before = devices_of(&setup, "before").await?;
        assert!(before.is_disjoint(&after), "{before:?} {after:?}");
        // The claim that the earlier kubelet prepared is unprepared by the new one.
        delete(&setup, "before").await?;
        make_pod_with_claim(&setup, "last", &one_device()).await?;
        assert_eq!(devices_of(&setup, "last").await?, before);
    }
    assert_eq!(look_inside(&setup, "plugged").await?, plugged);
    setup.until_allocatable(PLUGGED, "2").await?;
    setup.make_limit_pod("more", PLUGGED).await?;
    let more = look_inside(&setup, "more").await?;
    assert_ne!(more.only_device(), plugged.only_device());
    setup.end([companion]).await
}
