//! Our drivers and those of the examples conform.

use std::fmt::Write as _;
use std::sync::Arc;

use drayman::api::crd::definitions;
use drayman::host::HostDriver;
use drayman::node::config::NodeConfiguration;
use drayman::node::discovery::{HostDevices, HostPaths};
use drayman::testkit::{ConformanceReport, Environment, Rule, conformance, node_conformance};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::testkit::network_attached::NetworkAttached;
use crate::testkit::sensors::Sensors;

fn print(report: &ConformanceReport) {
    println!("{report}");
    assert!(report.not_tried.is_empty(), "{report}");
    assert_eq!(report.kept.len(), Rule::DRIVER.len());
}

/// Two nodes with two devices each.
fn host_objects() -> String {
    let mut yaml = String::new();
    for definition in definitions() {
        let _ = writeln!(yaml, "---\n{}", serde_json::to_string(&definition).expect("JSON"));
    }
    for node in ["node-a", "node-b"] {
        let _ = writeln!(
            yaml,
            r#"---
apiVersion: drayman.dev/v1alpha1
kind: NodeInventory
metadata: {{ name: {node}.drayman.dev }}
spec:
  driverName: drayman.dev
  nodeName: {node}
  nodeUid: uid-of-{node}
  devices: [{{ name: one, kind: test }}, {{ name: two, kind: test }}]
status:
  conditions:
  - {{ type: Ready, status: "True", reason: Serving, message: "", lastTransitionTime: "2026-01-01T00:00:00Z" }}"#
        );
    }
    yaml + r"
---
apiVersion: drayman.dev/v1alpha1
kind: DeviceClassParameters
metadata: { name: test }
spec: { kind: test }
---
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClass
metadata: { name: test }
driverName: drayman.dev
parametersRef: { apiGroup: drayman.dev, kind: DeviceClassParameters, name: test }
"
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_built_in_driver_conforms() {
    let make = |environment: Environment| {
        HostDriver::start(environment.client(), "drayman.dev", CancellationToken::new())
    };
    let report = conformance(make).objects(&host_objects()).run().await.unwrap();
    print(&report);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_example_of_network_attached_devices_conforms() {
    let report = conformance(|environment| NetworkAttached::new(environment.client()))
        .objects(
            r#"
apiVersion: v1
kind: ConfigMap
metadata: { name: dongles, namespace: default }
data: { nodes: "node-a node-b", devices: "3" }
---
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClass
metadata: { name: dongle }
driverName: network.example.com
parametersRef: { kind: ConfigMap, namespace: default, name: dongles }
"#,
        )
        .run()
        .await
        .unwrap();
    print(&report);
}

/// Prints a report of a node driver and checks that every rule was tested.
fn print_node(report: &ConformanceReport) {
    println!("{report}");
    assert!(report.not_tried.is_empty(), "{report}");
    assert_eq!(report.kept.len(), Rule::NODE_DRIVER.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_built_in_discovery_conforms() {
    let report = node_conformance(|environment| async move {
        let file = environment.directory().join("node.yaml");
        let yaml = "apiVersion: drayman.dev/v1alpha1\nkind: NodeConfiguration\nkinds:\n- name: test\n  paths: [/dev/zero, /dev/full]\n";
        std::fs::write(&file, yaml).expect("a file");
        let configuration = Arc::new(NodeConfiguration::read(&file).expect("a configuration"));
        // The configuration does not change.
        let followed = watch::channel(configuration).1;
        HostDevices::start(followed, HostPaths::default(), CancellationToken::new()).await
    })
    // The driver changes no device state.
    .left_over(|_| Vec::new())
    .run()
    .await
    .unwrap();
    print_node(&report);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_example_of_a_vendors_sensors_conforms() {
    let report = node_conformance(|environment| async move {
        let directory = environment.directory().to_owned();
        for (serial, path) in [("a1", "/dev/zero"), ("b2", "/dev/full")] {
            std::fs::write(directory.join(serial), path).expect("a file");
        }
        Sensors { directory }
    })
    .left_over(|directory| {
        let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        names.filter(|name| name.ends_with(".claim")).collect()
    })
    .run()
    .await
    .unwrap();
    print_node(&report);
}
