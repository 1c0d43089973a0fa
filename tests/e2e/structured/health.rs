//! The health of a device in the status of the pod that has it.

use std::time::Instant;

use k8s_openapi::api::core::v1::{Pod, ResourceHealth};
use kube::api::Api;

use super::fixture::{CONFIGURATION, devices_of, make_pod_with_claim, names, one_device, start};

/// The health of the devices of a pod.
fn health(pod: Option<&Pod>) -> Vec<ResourceHealth> {
    let statuses = pod.and_then(|pod| pod.status.as_ref()?.container_statuses.as_ref());
    let resources = statuses
        .into_iter()
        .flatten()
        .flat_map(|status| status.allocated_resources_status.iter().flatten());
    resources
        .flat_map(|resource| resource.resources.iter().flatten().cloned())
        .collect()
}

#[tokio::test]
async fn the_status_of_a_pod_has_the_health_of_its_device() -> anyhow::Result<()> {
    let (setup, companion) = start(CONFIGURATION, &[(1, 5)]).await?;
    if setup
        .cluster
        .is_before(36, "the health of devices is off by default")
    {
        companion.end().await?;
        return setup.cluster.stop().await;
    }
    make_pod_with_claim(&setup, "pod", &one_device()).await?;
    assert_eq!(devices_of(&setup, "pod").await?, names(&[0]));
    let pods = Api::<Pod>::namespaced(setup.cluster.client(), "default");
    let node = setup.cluster.node(0);
    let path = "/dev/drayman-test-0";
    let until = async |expected: &str| {
        let began = Instant::now();
        let is_shown = |pod: Option<&Pod>| {
            let health = health(pod);
            health.len() == 1 && health[0].health.as_deref() == Some(expected)
        };
        setup.wait(pods.clone(), "pod", expected, is_shown).await?;
        println!("{expected} after {:?}", began.elapsed());
        anyhow::Ok(())
    };
    until("Healthy").await?;
    node.remove(path)?;
    until("Unhealthy").await?;
    node.make_device(path, 1, 5)?;
    until("Healthy").await?;
    setup.end([companion]).await
}
