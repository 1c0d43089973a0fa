//! Scenarios in structured mode: the companions publish ResourceSlices, and the scheduler allocates.

use super::narrator::devices_of;
use super::scenarios::{Scenario, plug};
use super::{DEVICES, DRIVER, Demo, Halt};
use crate::testcluster::api::object::{list, text};

const CLASS: &str = r#"apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata:
  name: test
spec:
  selectors:
  - cel:
      expression: device.driver == "drayman.dev" && device.attributes["drayman.dev"].kind == "test"
"#;
const TEMPLATE: &str = "apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata:
  name: test
spec:
  spec:
    devices:
      requests:
      - name: device
        exactly:
          deviceClassName: test
";

/// Returns a pod with one device.
fn pod(name: &str) -> String {
    format!(
        "apiVersion: v1
kind: Pod
metadata:
  name: {name}
spec:
  resourceClaims:
  - name: device
    resourceClaimTemplateName: test
  containers:
  - name: main
    image: localhost/busybox:1
    resources:
      claims:
      - name: device
  terminationGracePeriodSeconds: 0
"
    )
}

impl Demo {
    /// Waits until kubelet can call each companion, and each companion has published its devices.
    pub(super) async fn expect_slices(&mut self) -> Result<(), Halt> {
        let what = "kubelet has registered each companion, and each has published its devices";
        self.expect(what, |demo| {
            demo.kubelets
                .iter()
                .all(|(node, kubelet)| kubelet.has_plugin(DRIVER) && demo.published(node).len() == DEVICES)
        })
        .await
    }

    /// Returns the devices in a node's ResourceSlices, and whether each has a taint.
    fn published(&self, node: &str) -> Vec<(String, bool)> {
        let slices = self.client.list("resourceslices");
        let of_node = slices
            .iter()
            .filter(|slice| text(slice, "/spec/nodeName") == node);
        of_node
            .flat_map(|slice| list(slice, "/spec/devices"))
            .map(|device| {
                let is_tainted = !list(device, "/taints").is_empty();
                (text(device, "/name").to_owned(), is_tainted)
            })
            .collect()
    }

    fn tainted(&self, node: &str) -> usize {
        let devices = self.published(node);
        devices.iter().filter(|(_, is_tainted)| *is_tainted).count()
    }
}

pub(super) async fn play(demo: &mut Demo, scenario: &Scenario) -> Result<(), Halt> {
    demo.apply("a DeviceClass for the devices of kind test", CLASS)?;
    demo.apply("a ResourceClaimTemplate for one device of the class", TEMPLATE)?;
    match scenario.name {
        "structured" => structured(demo).await,
        "scheduled" => scheduled(demo).await,
        _ => tainted(demo).await,
    }
}

async fn structured(demo: &mut Demo) -> Result<(), Halt> {
    demo.stage.apply(&pod("first"))?;
    demo.expect("pod first runs", |demo| demo.runs("first")).await?;
    demo.tell_outfit("first");
    demo.expect("its container has one device, which can be opened", |demo| {
        demo.opens("first") == 1
    })
    .await?;
    demo.clear(&["first".to_owned()]).await
}

async fn scheduled(demo: &mut Demo) -> Result<(), Halt> {
    let count = demo.devices.len() * DEVICES;
    let holders: Vec<String> = (1..=count).map(|number| format!("holder-{number}")).collect();
    for holder in &holders {
        demo.stage.apply(&pod(holder))?;
    }
    let all = holders.clone();
    demo.expect("one pod per device runs", move |demo| {
        all.iter().all(|pod| demo.runs(pod))
    })
    .await?;
    demo.stage.apply(&pod("late"))?;
    demo.expect("one more pod waits, and an event says why", |demo| {
        demo.client.list("events").iter().any(|event| {
            text(event, "/involvedObject/name") == "late"
                && text(event, "/message").contains("cannot allocate all claims")
        })
    })
    .await?;
    let freed = demo.claim_of("holder-3").map(|claim| devices_of(&claim));
    demo.delete("holder-3");
    demo.expect("it runs once another pod is gone", |demo| demo.runs("late"))
        .await?;
    demo.tell_outfit("late");
    let same = freed.is_some() && demo.claim_of("late").map(|claim| devices_of(&claim)) == freed;
    demo.check("it has the device of that pod", same)?;
    let rest: Vec<String> = holders
        .into_iter()
        .filter(|holder| holder != "holder-3")
        .chain(["late".to_owned()])
        .collect();
    demo.clear(&rest).await
}

async fn tainted(demo: &mut Demo) -> Result<(), Halt> {
    demo.stage.apply(&pod("plugged"))?;
    demo.expect("pod plugged runs", |demo| demo.runs("plugged"))
        .await?;
    let node = demo.node_of("plugged");
    let path = demo
        .outfit("plugged")
        .and_then(|outfit| outfit.devices.first().map(|(_, host, _)| host.clone()))
        .unwrap_or_default();
    plug(demo, &node, &path, false)?;
    let of_node = node.clone();
    demo.expect(
        "the device has a taint, and its CDI file is gone, so that no container starts with another device",
        move |demo| demo.tainted(&of_node) == 1 && demo.cdi_files() == 0,
    )
    .await?;
    plug(demo, &node, &path, true)?;
    let of_node = node.clone();
    demo.expect("the taint is gone, and the CDI file is back", move |demo| {
        demo.tainted(&of_node) == 0 && demo.cdi_files() == 1
    })
    .await?;
    demo.clear(&["plugged".to_owned()]).await
}
