//! Publishes the NodeInventory of this node and driver, and events about the Node. In structured mode, only events.
//!
//! The spec is written by server-side apply and the status by a merge patch, each only if it differs from the stored one. Server-side
//! apply keeps devices and fields that others have added, so these are removed by a merge patch of the devices. An idle
//! node writes nothing. Kubelet is served regardless of whether the API server is reachable.

mod object;
mod stored;

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::BoxStream;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, Patch, PatchParams};
use kube::runtime::{WatchStreamExt, watcher};
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::calls::{PublishError, RETRY, call, spread};
use super::cluster::ClusterReader;
use crate::api::crd::Devices;
use crate::core::discovery::device_events::{DeviceEvent, device_events};
use crate::core::prepare::checkpoint::ClusterFacts;
use crate::core::prepare::claims_api::ClaimsApi;
use crate::core::prepare::kubelet_apis::ApisDown;
use crate::node::context::NodeContext;
use crate::node::service::Quarantine;
pub use object::RegistrationStatus;
use object::{inventory, object_name, status};
use stored::{DeviceCounts, Stored, StoredDevices};

/// Field manager of server-side apply.
const FIELD_MANAGER: &str = "drayman-node";
/// Deadline of the final "not ready" status on a clean stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);
/// Minimum interval between reads of the Node object, so that repeated requests cannot flood the API server.
const DOUBT_PAUSE: Duration = Duration::from_secs(10);
/// Minimum interval between repairs of an inventory. Limits the writes while another writer keeps changing it.
const REPAIR_PAUSE: Duration = Duration::from_secs(60);

/// The task that reads the facts of the cluster, and publishes the inventory (classic mode) and the events about the Node.
#[derive(Debug)]
pub struct InventoryPublisher {
    /// The node, its driver and their client.
    pub context: NodeContext,
    /// The devices of the node.
    pub devices: watch::Receiver<Arc<Devices>>,
    /// Publishes facts learned from the API server.
    pub cluster: watch::Sender<ClusterFacts>,
    /// The API by which claims were prepared before the start.
    pub prepared_by: Option<ClaimsApi>,
    /// The registration status with kubelet.
    pub registration_status: watch::Receiver<RegistrationStatus>,
    /// The claims in quarantine, whose devices are withheld.
    pub quarantine: watch::Receiver<Quarantine>,
    /// Notified when the Node object may have been replaced.
    pub node_in_doubt: Arc<Notify>,
    /// Events besides those about devices; `None` if there is no source of them.
    pub notices: Option<mpsc::Receiver<DeviceEvent>>,
}

/// API for inventories, decoding only the required fields.
type Inventories = Api<Stored<DeviceCounts>>;

/// The last known state of the server. Devices are shared, not copied: there may be a thousand.
#[derive(Debug, Default)]
struct Seen {
    /// The last applied devices, with the uid of their Node.
    applied: Option<(Option<String>, Arc<Devices>)>,
    /// The last response of the server.
    stored: Option<Stored<DeviceCounts>>,
    /// Attributes dropped from the last inventory.
    dropped: Vec<String>,
    /// Devices left out of the last inventory.
    left_out: Vec<String>,
    /// The devices in the last reported events.
    reported: Option<Arc<Devices>>,
    /// The APIs in the last reported events.
    down: ApisDown,
}

impl InventoryPublisher {
    /// Writes until the token is cancelled, then writes that the companion is not ready.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let api: Inventories = Api::all(self.context.client.clone());
        let name = object_name(&self.context.node_name, &self.context.driver_name);
        let mut seen = Seen::default();
        let mut node: Option<Node> = None;
        let mut pause = RETRY.0;
        let mut inventory_watch = None;
        let mut asked = Instant::now();
        let (context, facts) = (self.context.clone(), self.cluster.clone());
        let mut cluster = ClusterReader::new(context, facts, self.prepared_by);
        loop {
            if node.is_none() {
                asked = Instant::now();
            }
            let written = tokio::select! {
                () = shutdown.cancelled() => break,
                written = self.write(&api, &name, &mut node, &mut seen, &mut cluster) => written,
            };
            let retry = match written {
                Ok(()) => {
                    pause = RETRY.0;
                    None
                }
                Err(error) => {
                    warn!(
                        inventory = name,
                        "the Node cannot be read, or its devices cannot be published; kubelet is served regardless: {error}"
                    );
                    let retry = spread(pause, &self.context.node_name);
                    pause = (pause * 2).min(RETRY.1);
                    Some(retry)
                }
            };
            if cluster.is_structured() {
                inventory_watch = None;
            } else {
                inventory_watch.get_or_insert_with(|| InventoryWatch::new(api.clone(), &name));
            }
            // While a write is repeated, the answer to the last one may be missing.
            let known = seen.stored.as_ref().filter(|_| retry.is_none());
            tokio::select! {
                () = shutdown.cancelled() => break,
                () = sleep(retry.unwrap_or_default()), if retry.is_some() => {}
                Ok(()) = self.devices.changed(), if retry.is_none() => {}
                Ok(()) = self.registration_status.changed(), if retry.is_none() => cluster.kubelet_changed(),
                // An event needs the Node: without it, the event waits in the queue.
                Some(notice) = next_notice(self.notices.as_mut()), if node.is_some() => {
                    if let Some(node) = &node {
                        self.context.write_events(node.metadata.uid.as_deref(), &[notice]).await;
                    }
                }
                Ok(()) = self.quarantine.changed(), if retry.is_none() => {}
                () = in_doubt(&self.node_in_doubt, asked) => node = None,
                // Also while a write is repeated: the inventory cannot be written once the cluster is in structured mode.
                () = sleep_until(cluster.due), if node.is_some() => {
                    if let Err(error) = cluster.read_claims_api().await {
                        debug!("the API server does not say which API for claims it serves; the last answer stays in force: {error}");
                    }
                }
                change = next_change(inventory_watch.as_mut(), known) => match change {
                    ForeignChange::Overwritten => {
                        info!(inventory = name, "another writer changed the inventory; writing our fields again");
                        seen.applied = None;
                    }
                    ForeignChange::Deleted => {
                        info!(inventory = name, "the inventory was deleted; writing it again");
                        // The Node may have been deleted too: its replacement has the same name and another uid.
                        let (reported, down) = (seen.reported.take(), std::mem::take(&mut seen.down));
                        (node, seen) = (None, Seen { reported, down, ..Seen::default() });
                    }
                }
            }
        }
        if !cluster.is_structured() {
            self.say_stopped(&api, &name, seen).await;
        }
    }

    /// Writes the inventory and events, as far as they have changed.
    async fn write(
        &mut self,
        api: &Inventories,
        name: &str,
        node: &mut Option<Node>,
        seen: &mut Seen,
        cluster: &mut ClusterReader,
    ) -> Result<(), PublishError> {
        if node.is_none() {
            *node = Some(cluster.read().await?);
        }
        let Some(node) = node else { return Ok(()) };
        // Read before the devices, and published after them, so that those of a claim are withheld first.
        let quarantine = self.quarantine.borrow_and_update().clone();
        let devices = self.devices.borrow_and_update().clone();
        let mut written = Ok(());
        if cluster.is_structured() {
            // The events that a previous process has written are unknown.
            let reported = seen.reported.take().unwrap_or_default();
            *seen = Seen {
                reported: Some(reported),
                down: std::mem::take(&mut seen.down),
                ..Seen::default()
            };
        } else {
            written = self.write_inventory(api, name, node, &devices, seen).await;
        }
        // Read after the write of the inventory, which takes a while.
        let registration_status = self.registration_status.borrow_and_update().clone();
        // The status has the quarantine: it follows the devices.
        if !cluster.is_structured() && written.is_ok() {
            written = self
                .write_status(api, name, &registration_status, &quarantine, seen)
                .await;
        }
        // Events are written even if the inventory is not.
        let mut events = std::mem::take(&mut cluster.unwritten);
        events.extend(registration_status.down.events_since(&seen.down));
        seen.down = registration_status.down;
        // `None` until the events of a previous process are known.
        if let Some(reported) = &mut seen.reported {
            events.extend(device_events(reported, &devices));
            *reported = devices;
        }
        self.context
            .write_events(node.metadata.uid.as_deref(), &events)
            .await;
        written
    }

    async fn write_inventory(
        &self,
        api: &Inventories,
        name: &str,
        node: &Node,
        devices: &Arc<Devices>,
        seen: &mut Seen,
    ) -> Result<(), PublishError> {
        if seen.reported.is_none() {
            // Events of a previous process are not repeated.
            let whole: Api<Stored<StoredDevices>> = Api::all(self.context.client.clone());
            let stored = call(whole.get_opt(name)).await?;
            let StoredDevices(earlier) = stored.map(|stored| stored.devices).unwrap_or_default();
            seen.reported = Some(Arc::new(earlier));
        }
        let current = (node.metadata.uid.clone(), devices.clone());
        if seen.applied.as_ref() == Some(&current) {
            return Ok(());
        }
        let parameters = PatchParams::apply(FIELD_MANAGER).force();
        let (inventory, dropped, left_out) = inventory(name, &self.context.driver_name, node, devices);
        if !left_out.is_empty() && left_out != seen.left_out {
            warn!(
                devices = ?left_out,
                "an inventory has no room for so many devices; these are left out until claims release devices that are gone"
            );
        }
        seen.left_out = left_out;
        if !dropped.is_empty() && dropped != seen.dropped {
            warn!(attributes = ?dropped, "an inventory has no room for all attributes of so many devices; these are left out");
        }
        seen.dropped = dropped;
        let applied = call(api.patch(name, &parameters, &Patch::Apply(&inventory))).await;
        let mut stored = applied.map_err(|error| error.of_write("NodeInventory", &inventory))?;
        let ours = &inventory.spec.devices;
        if stored.devices != DeviceCounts::of(ours) {
            info!(
                inventory = name,
                "the inventory has devices or fields of devices that another writer added; they are removed"
            );
            let patch = Patch::Merge(serde_json::json!({ "spec": { "devices": ours } }));
            let replaced = call(api.patch(name, &PatchParams::default(), &patch)).await;
            stored = replaced.map_err(|error| error.of_write("NodeInventory", &inventory))?;
        }
        seen.stored = Some(stored);
        info!(
            inventory = name,
            devices = inventory.spec.devices.len(),
            "the inventory is written"
        );
        seen.applied = Some(current);
        Ok(())
    }

    async fn write_status(
        &self,
        api: &Inventories,
        name: &str,
        registration_status: &RegistrationStatus,
        quarantine: &Quarantine,
        seen: &mut Seen,
    ) -> Result<(), PublishError> {
        let Some(stored) = &seen.stored else {
            return Ok(());
        };
        let now = Timestamp::now();
        let status = status(stored, registration_status, quarantine, now);
        if stored.status.as_ref() == Some(&status) {
            return Ok(());
        }
        let patch = Patch::Merge(serde_json::json!({ "status": status }));
        let stored = call(api.patch_status(name, &PatchParams::default(), &patch)).await?;
        seen.stored = Some(stored);
        Ok(())
    }

    async fn say_stopped(&self, api: &Inventories, name: &str, mut seen: Seen) {
        let registration_status = RegistrationStatus {
            reason: "Stopped".to_owned(),
            message: "the companion was stopped; running containers keep their devices".to_owned(),
            ..RegistrationStatus::default()
        };
        let quarantine = self.quarantine.borrow().clone();
        match timeout(
            STOP_TIMEOUT,
            self.write_status(api, name, &registration_status, &quarantine, &mut seen),
        )
        .await
        {
            Ok(Ok(())) => debug!(
                inventory = name,
                "the inventory says that the companion has stopped"
            ),
            Ok(Err(error)) => warn!(
                inventory = name,
                "the inventory still says that the companion runs: {error}"
            ),
            Err(_) => warn!(
                inventory = name,
                "the inventory still says that the companion runs: no answer"
            ),
        }
    }
}

/// The next event; `None` if there are no more.
async fn next_notice(notices: Option<&mut mpsc::Receiver<DeviceEvent>>) -> Option<DeviceEvent> {
    match notices {
        Some(notices) => notices.recv().await,
        None => None,
    }
}

/// Waits until the Node object is in doubt and may be read again.
async fn in_doubt(doubt: &Notify, asked: Instant) {
    // In this order, because a doubt is lost if another event ends the wait after `notified`.
    sleep_until(asked + DOUBT_PAUSE).await;
    doubt.notified().await;
}

/// A change of the inventory by another writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ForeignChange {
    Deleted,
    Overwritten,
}

/// Reports changes of the inventory by others.
struct InventoryWatch {
    events: BoxStream<'static, Result<Option<Stored<DeviceCounts>>, watcher::Error>>,
    complained: bool,
    /// The last observed inventory, until it is reported as overwritten.
    last: Option<Stored<DeviceCounts>>,
    /// When the inventory may be reported as overwritten again.
    due: Instant,
}

/// Waits for the next change; forever if nothing is watched. `known` is the answer to our last write.
async fn next_change(
    watch: Option<&mut InventoryWatch>,
    known: Option<&Stored<DeviceCounts>>,
) -> ForeignChange {
    match watch {
        Some(watch) => watch.next_change(known).await,
        None => std::future::pending().await,
    }
}

impl InventoryWatch {
    /// Watches only our own object, so an idle node receives no events.
    fn new(api: Inventories, name: &str) -> Self {
        Self {
            events: watcher::watch_object(api, name).default_backoff().boxed(),
            complained: false,
            last: None,
            due: Instant::now(),
        }
    }

    async fn next_change(&mut self, known: Option<&Stored<DeviceCounts>>) -> ForeignChange {
        loop {
            let last = self.last.as_ref();
            let is_overwritten = known.zip(last).is_some_and(|(known, last)| replaces(last, known));
            let event = tokio::select! {
                biased;
                event = self.events.next() => event,
                () = sleep_until(self.due), if is_overwritten => {
                    self.last = None;
                    self.due = Instant::now() + REPAIR_PAUSE;
                    return ForeignChange::Overwritten;
                }
            };
            match event {
                Some(Ok(None)) => {
                    self.last = None;
                    return ForeignChange::Deleted;
                }
                Some(Ok(stored)) => {
                    self.complained = false;
                    self.last = stored;
                }
                Some(Err(error)) if self.complained => {
                    debug!("the inventory still cannot be watched: {error}");
                }
                Some(Err(error)) => {
                    self.complained = true;
                    warn!(
                        "the inventory cannot be watched; until it can, it is not restored after deletions and changes by others: {error}"
                    );
                }
                None => std::future::pending::<()>().await,
            }
        }
    }
}

/// Whether `last` is newer than `known` and has another spec or status. Changes of metadata do not count.
fn replaces(last: &Stored<DeviceCounts>, known: &Stored<DeviceCounts>) -> bool {
    // Versions of one kind of object are ordered numbers (KEP-5504).
    let version = |stored: &Stored<DeviceCounts>| {
        let version = stored.metadata.resource_version.as_ref()?;
        version.parse::<u128>().ok()
    };
    let is_newer = matches!((version(last), version(known)), (Some(last), Some(known)) if last > known);
    let differs = last.metadata.generation != known.metadata.generation || last.status != known.status;
    is_newer && differs
}

#[cfg(test)]
mod tests;
