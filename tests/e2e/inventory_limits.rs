//! The largest inventory that a companion publishes, against the limits of etcd and the API server.

use std::sync::Mutex;

use drayman::api::crd::{
    ATTRIBUTE_NAME_MAX, ATTRIBUTES_MAX, AttributeValue, DEVICES_MAX, NodeInventory, TEXT_MAX,
};
use drayman::node::Node;
use drayman::node::driver::{ContainerEdits, Device, NodeDriver, NodeDriverError};
use drayman::node::kubelet::KubeletPaths;
use futures::Stream;
use kube::api::Api;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tokio_util::sync::CancellationToken;

use crate::setup::Setup;

/// A driver that lists the devices of the test.
struct Listed(Mutex<Option<mpsc::UnboundedReceiver<Vec<Device>>>>);

impl NodeDriver for Listed {
    fn devices(&self) -> impl Stream<Item = Vec<Device>> + Send + 'static {
        let lists = self.0.lock().ok().and_then(|mut lists| lists.take());
        UnboundedReceiverStream::new(lists.unwrap_or_else(|| mpsc::unbounded_channel().1))
    }

    async fn container_edits(&self, device: &str) -> Result<ContainerEdits, NodeDriverError> {
        Err(NodeDriverError::Ended(device.to_owned()))
    }
}

/// The maximum number of devices per node, with names of maximum length and this many attributes.
fn devices(attributes: usize, value: &str, unhealthy: &str) -> Vec<Device> {
    let attribute = |index: usize| {
        let name = format!("example.com/{index:a>width$}", width = ATTRIBUTE_NAME_MAX - 12);
        (name, AttributeValue::string(value))
    };
    let device = |index: usize| Device {
        name: format!("{index:d>63}"),
        kind: "k".repeat(63),
        attributes: (0..attributes).map(attribute).collect(),
        unhealthy: Some(unhealthy.to_owned()),
        shares: Some(1024),
        ..Device::default()
    };
    (0..DEVICES_MAX).map(device).collect()
}

#[tokio::test]
async fn the_largest_lists_of_devices_are_published() -> anyhow::Result<()> {
    let setup = Setup::start(0).await?;
    let node = format!("{}.example", "n".repeat(233));
    setup.make_fake_node(&node).await?;
    let root = setup.cluster.directory().join("kubelet");
    std::fs::create_dir(&root)?;
    let kubelet = KubeletPaths {
        device_plugin_dir: root.join("device-plugins"),
        root_dir: root.clone(),
    };
    let (lists, listed) = mpsc::unbounded_channel();
    let companion = Node::builder(Listed(Mutex::new(Some(listed))), &node, setup.cluster.client())
        .kubelet(kubelet)
        .cdi_dir(root.join("cdi"));
    let shutdown = CancellationToken::new();
    let companion = tokio::spawn(companion.run(shutdown.clone()));
    let long = |text: &str| text.repeat(TEXT_MAX);
    for (what, devices, kept) in [
        ("2 attributes of ASCII", devices(2, &long("v"), &long("u")), 2),
        (
            "1 of 32 attributes of umlauts",
            devices(ATTRIBUTES_MAX, &long("\u{fc}"), ""),
            1,
        ),
        ("no attributes, reasons of markup", devices(0, "", &long("<")), 0),
    ] {
        let first = devices[0].clone();
        lists.send(devices)?;
        let met = move |inventory: Option<&NodeInventory>| {
            inventory.is_some_and(|inventory| {
                let published = inventory.spec.devices.first();
                inventory.spec.devices.len() == DEVICES_MAX
                    && published.is_some_and(|device| {
                        let reason = device.unhealthy.as_deref().unwrap_or_default();
                        let same = reason.chars().next()
                            == first.unhealthy.as_deref().and_then(|all| all.chars().next());
                        device.attributes.len() == kept && same
                    })
            })
        };
        let inventories = Api::<NodeInventory>::all(setup.cluster.client());
        let name = format!("{node}.drayman.dev");
        let stored = setup.wait(inventories, &name, what, met).await?;
        println!("{what}: {} bytes", serde_json::to_vec(&stored)?.len());
    }
    shutdown.cancel();
    companion.await??;
    setup.cluster.stop().await
}
