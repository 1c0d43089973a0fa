//! Publishes the devices of this node, and events about the Node: ResourceSlices in structured mode, otherwise the NodeInventory.

pub(super) mod calls;
mod cluster;
pub mod inventory;
mod node_events;
mod slices;

use tokio_util::sync::CancellationToken;

use inventory::InventoryPublisher;
use slices::SlicePublisher;

/// Publishes devices and events until the token is cancelled.
pub async fn run(publisher: InventoryPublisher, shutdown: CancellationToken) {
    let slices = SlicePublisher::beside(&publisher);
    tokio::join!(publisher.run(shutdown.clone()), slices.run(shutdown));
}
