//! A real Prometheus scrapes a companion in structured mode, and runs the queries of the dashboard and of the alerts.

use super::fixture::{devices_of, make_pod_with_claim, one_device, start_with};
use super::slices::PROBED;
use crate::harness::STRUCTURED_VERSION;
use crate::monitoring::{Prometheus, assert_found, free_port, write_rules};

/// Expected values after a pod with a claim, and with an unhealthy device.
const EXPECTED: &[&str] = &[
    "drayman_node_ready == 1",
    "drayman_node_slices == 1",
    r#"sum(drayman_node_slice_writes_total{result="Done"}) >= 2"#,
    r#"sum(drayman_node_slice_writes_total{result!~"Done|Conflict|Throttled"}) == 0"#,
    r#"drayman_node_operations_total{operation="prepare",result="done"} == 1"#,
    r#"drayman_node_devices{kind="test",health="healthy",owner="claim"} == 1"#,
    r#"drayman_events_total{reason="DeviceUnhealthy"} == 1"#,
    r#"sum(grpc_server_handling_seconds_count{grpc_method="NodePrepareResources",grpc_service="k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"}) == 1"#,
];

#[tokio::test]
async fn every_query_finds_series_without_a_controller() -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let rules = write_rules(directory.path(), STRUCTURED_VERSION)?;
    let port = free_port()?;
    let metrics = format!("--metrics-bind-address=127.0.0.1:{port}");
    let (setup, companion) = start_with(PROBED, &[(1, 5), (1, 7)], &[&metrics]).await?;
    let prometheus = Prometheus::start(&setup, directory.path(), &[("drayman-node-x8k2p", port)])?;
    prometheus.until("drayman_node_slice_devices == 2").await?;
    make_pod_with_claim(&setup, "pod", &one_device()).await?;
    let held = devices_of(&setup, "pod").await?;
    let free = i32::from(held.contains("drayman-test-0"));
    // Numbers without a driver: the device cannot be opened.
    let path = format!("/dev/drayman-test-{free}");
    setup.cluster.node(0).remove(&path)?;
    setup.cluster.node(0).make_device(&path, 240, 250)?;
    prometheus
        .until(r#"drayman_node_devices{kind="test",health="unhealthy",owner="nobody"} == 1"#)
        .await?;
    // From 1.36 on, it is published with a taint, and kubelet watches the health of devices.
    let (published, omitted, streams) = if setup.cluster.minor() < 36 {
        (1, 1, 0)
    } else {
        (2, 0, 1)
    };
    for expected in [
        format!("drayman_node_slice_devices == {published}"),
        format!(r#"drayman_node_slice_omissions{{cause="unhealthy"}} == {omitted}"#),
        format!(r#"sum(grpc_server_started_total{{grpc_method="NodeWatchResources"}}) == {streams}"#),
    ] {
        prometheus.until(&expected).await?;
    }
    for expected in EXPECTED {
        prometheus.until(expected).await?;
    }
    assert_found(&prometheus, &rules, |titles| {
        !titles.to_lowercase().contains("classic mode")
    })?;
    drop(prometheus);
    setup.end([companion]).await
}
