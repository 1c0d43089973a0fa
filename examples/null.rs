//! The smallest driver: one device, `/dev/null`, of the kind `null`.
//!
//! Run it on a node as root with `NODE_NAME` set: `cargo run --example null`. It uses the same kubeconfig as kubectl.

use drayman::node::Node;
use drayman::node::driver::{ContainerEdits, Device, DeviceNode, NodeDriver, NodeDriverError};
use futures::{Stream, StreamExt as _, stream};
use tokio_util::sync::CancellationToken;

struct Null;

impl NodeDriver for Null {
    fn devices(&self) -> impl Stream<Item = Vec<Device>> + Send + 'static {
        let device = Device {
            name: "null-0".to_owned(),
            kind: "null".to_owned(),
            ..Device::default()
        };
        stream::iter([vec![device]]).chain(stream::pending())
    }

    async fn container_edits(&self, device: &str) -> Result<ContainerEdits, NodeDriverError> {
        if device != "null-0" {
            let (device, problem) = (device.to_owned(), "it is not listed".to_owned());
            return Err(NodeDriverError::Gone { device, problem });
        }
        let mut edits = ContainerEdits::default();
        edits.device_nodes.push(DeviceNode {
            host_path: "/dev/null".to_owned(),
            container_path: format!("/dev/{device}"),
            permissions: "rw".to_owned(),
        });
        Ok(edits)
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let node_name = std::env::var("NODE_NAME")?;
    rustls::crypto::ring::default_provider().install_default().ok();
    let client = kube::Client::try_default().await?;
    let node = Node::builder(Null, node_name, client).driver_name("null.example.com");
    Ok(node.run(CancellationToken::new()).await?)
}
