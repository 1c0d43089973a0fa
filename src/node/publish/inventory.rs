//! Publishes the NodeInventory of this node and driver.
//!
//! The spec is written by server-side apply and the status by a merge patch, each only if it differs from the stored one. An idle
//! node writes nothing. Kubelet is served regardless of whether the API server is reachable.

mod object;
mod stored;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::runtime::{WatchStreamExt, watcher};
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::api::crd::NodeInventory;
use crate::api::resource;
use crate::core::discovery::events::{DeviceEvent, device_events};
use crate::core::prepare::checkpoint::ClusterFacts;
use crate::core::prepare::claims_api::ClaimsApi;
use crate::core::prepare::inventory::Devices;
use crate::core::prepare::kubelet_apis::ApisDown;
use crate::core::prepare::names::DriverName;
use crate::node::metrics::Figures;
use crate::node::publish::events::{self, NodeEvent};
use crate::node::service::Quarantine;
use object::{inventory, object_name, status};
use stored::{Counted, Stored, Told};

/// Field manager of server-side apply.
const FIELD_MANAGER: &str = "drayman-node";
/// Deadline of a call.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Deadline of the final "not ready" status on a clean stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);
/// First and longest delay after a failed call.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// Minimum interval between reads of the Node object, so that repeated requests cannot flood the API server.
const DOUBT_PAUSE: Duration = Duration::from_secs(10);

/// The registration status with kubelet, for the companion's readiness and the inventory's condition `Ready`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// Whether all endpoints are served and kubelet has rejected none of them.
    pub ready: bool,
    /// Whether claims are served, or this cluster has no claims API. Devices may then be allocated to claims, even if other APIs
    /// are down.
    pub claims_ready: bool,
    /// Reason in CamelCase.
    pub reason: String,
    /// Message for the user.
    pub message: String,
    /// Kubelet APIs that are down, for events.
    pub down: ApisDown,
}

impl Standing {
    /// The status before any endpoint is served.
    pub fn starting() -> Self {
        Self {
            reason: "Starting".to_owned(),
            ..Self::default()
        }
    }
}

/// Why a call to the API server failed.
#[derive(Debug, thiserror::Error)]
enum PublishError {
    #[error("the Node object {0:?} does not exist: is --node-name right?")]
    NoNode(String),
    #[error("the Node object {0:?} has no uid")]
    NoUid(String),
    #[error("the API server does not answer within {} s", CALL_TIMEOUT.as_secs())]
    Timeout,
    #[error(
        "the API server takes no inventory of {bytes} bytes ({said}): let the configuration describe fewer devices of this node, or raise \
         --max-request-bytes of etcd, which is 1.5 MiB by default"
    )]
    TooLarge { bytes: usize, said: String },
    #[error(transparent)]
    Api(#[from] kube::Error),
}

impl PublishError {
    /// Converts the error of a write of this object: a rejection for its size names that size.
    fn of_write(self, inventory: &NodeInventory) -> Self {
        match self {
            // etcd's rejection arrives as an internal error.
            Self::Api(kube::Error::Api(status))
                if status.code == 413 || status.message.contains("request is too large") =>
            {
                Self::TooLarge {
                    bytes: serde_json::to_vec(inventory).map_or(0, |json| json.len()),
                    said: status.message.clone(),
                }
            }
            other => other,
        }
    }
}

/// The task that writes the inventory.
#[derive(Debug)]
pub struct Publisher {
    /// API server client.
    pub client: PublisherClient,
    /// The driver name.
    pub driver_name: DriverName,
    /// Name of the Node object.
    pub node_name: String,
    /// The devices of the node.
    pub devices: watch::Receiver<Arc<Devices>>,
    /// Publishes facts learned from the API server.
    pub cluster: watch::Sender<ClusterFacts>,
    /// The registration status with kubelet.
    pub standing: watch::Receiver<Standing>,
    /// The claims in quarantine, whose devices are withheld.
    pub(in crate::node) quarantine: watch::Receiver<Quarantine>,
    /// Notified when the Node object may have been replaced.
    pub node_in_doubt: Arc<Notify>,
    /// Events besides those about devices; `None` if there is no source of them.
    pub notices: Option<mpsc::Receiver<DeviceEvent>>,
    /// Counts the events.
    pub figures: Arc<Figures>,
}

/// A [`kube::Client`] with a `Debug` implementation.
#[derive(Clone)]
pub struct PublisherClient(pub kube::Client);

impl std::fmt::Debug for PublisherClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PublisherClient")
    }
}

/// API for inventories, decoding only the required fields.
type Inventories = Api<Stored<Counted>>;

/// The last known state of the server. Devices are shared, not copied: there may be a thousand.
#[derive(Debug, Default)]
struct Seen {
    /// The last applied devices, with the uid of their Node.
    applied: Option<(Option<String>, Arc<Devices>)>,
    /// The last response of the server.
    stored: Option<Stored<Counted>>,
    /// Attributes dropped from the last inventory.
    dropped: Vec<String>,
    /// The devices in the last reported events.
    told: Option<Arc<Devices>>,
}

/// State of the cluster's claims API, and reported state of the node's APIs.
#[derive(Debug)]
struct Apis {
    claims: ClaimsApi,
    /// When to query the claims API again.
    due: Instant,
    /// Events not written yet.
    untold: Vec<DeviceEvent>,
    /// The APIs in the last reported events.
    down: ApisDown,
}

impl Publisher {
    /// Writes until the token is cancelled, then writes that the companion is not ready.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let api: Inventories = Api::all(self.client.0.clone());
        let name = object_name(&self.node_name, &self.driver_name);
        let mut seen = Seen::default();
        let mut node: Option<Node> = None;
        let mut pause = RETRY.0;
        let mut deleted = deletions(api.clone(), &name);
        let mut asked = Instant::now();
        let mut apis = Apis {
            claims: ClaimsApi::new(self.cluster.borrow().serves_claims),
            due: asked,
            untold: Vec::new(),
            down: ApisDown::default(),
        };
        loop {
            if node.is_none() {
                asked = Instant::now();
            }
            let written = tokio::select! {
                () = shutdown.cancelled() => break,
                written = self.write(&api, &name, &mut node, &mut seen, &mut apis) => written,
            };
            let retry = match written {
                Ok(()) => {
                    pause = RETRY.0;
                    None
                }
                Err(error) => {
                    warn!(
                        inventory = name,
                        "the inventory is not written, kubelet is served all the same: {error}"
                    );
                    let retry = spread(pause, &self.node_name);
                    pause = (pause * 2).min(RETRY.1);
                    Some(retry)
                }
            };
            tokio::select! {
                () = shutdown.cancelled() => break,
                () = sleep(retry.unwrap_or_default()), if retry.is_some() => {}
                Ok(()) = self.devices.changed(), if retry.is_none() => {}
                Ok(()) = self.standing.changed(), if retry.is_none() => {}
                // An event needs the Node: without it, the event waits in the queue.
                Some(notice) = next_notice(self.notices.as_mut()), if node.is_some() => {
                    if let Some(node) = &node {
                        self.tell(node, &[notice]).await;
                    }
                }
                Ok(()) = self.quarantine.changed(), if retry.is_none() => {}
                () = in_doubt(&self.node_in_doubt, asked) => node = None,
                () = sleep_until(apis.due), if node.is_some() && retry.is_none() => {
                    if let Err(error) = self.ask_for_claims(&mut apis).await {
                        debug!("whether the cluster serves claims is not known anew: {error}");
                    }
                }
                () = deleted.next_deletion() => {
                    info!(inventory = name, "the inventory was deleted; it is written again");
                    // The Node may have been deleted too: its replacement has the same name and another uid.
                    let told = seen.told.take();
                    (node, seen) = (None, Seen { told, ..Seen::default() });
                }
            }
        }
        self.say_stopped(&api, &name, &seen).await;
    }

    async fn write(
        &mut self,
        api: &Inventories,
        name: &str,
        node: &mut Option<Node>,
        seen: &mut Seen,
        apis: &mut Apis,
    ) -> Result<(), PublishError> {
        if node.is_none() {
            *node = Some(self.ask_cluster(apis).await?);
        }
        let Some(node) = node else { return Ok(()) };
        let devices = self.devices.borrow_and_update().clone();
        if seen.told.is_none() {
            // Events of a previous process are not repeated.
            let whole: Api<Stored<Told>> = Api::all(self.client.0.clone());
            let stored = call(whole.get_opt(name)).await?;
            let Told(earlier) = stored.map(|stored| stored.devices).unwrap_or_default();
            seen.told = Some(Arc::new(earlier));
        }
        let wanted = (node.metadata.uid.clone(), devices.clone());
        if seen.applied.as_ref() != Some(&wanted) {
            let parameters = PatchParams::apply(FIELD_MANAGER).force();
            let (inventory, dropped) = inventory(name, &self.driver_name, node, &devices);
            if !dropped.is_empty() && dropped != seen.dropped {
                warn!(attributes = ?dropped, "an inventory has no room for all attributes of so many devices; these are left out");
            }
            seen.dropped = dropped;
            let applied = call(api.patch(name, &parameters, &Patch::Apply(&inventory))).await;
            let stored = applied.map_err(|error| error.of_write(&inventory))?;
            seen.stored = Some(stored);
            info!(
                inventory = name,
                devices = devices.len(),
                "the inventory is written"
            );
            seen.applied = Some(wanted);
        }
        let standing = self.standing.borrow_and_update().clone();
        self.quarantine.mark_unchanged();
        self.write_status(api, name, &standing, seen).await?;
        let mut events = std::mem::take(&mut apis.untold);
        events.extend(standing.down.events_since(&apis.down));
        events.extend(device_events(seen.told.as_ref().unwrap_or(&devices), &devices));
        apis.down = standing.down;
        self.tell(node, &events).await;
        seen.told = Some(devices);
        Ok(())
    }

    /// Writes events about the node. A failed write is logged and not retried, since the event itself is in the log.
    async fn tell(&self, node: &Node, events: &[DeviceEvent]) {
        let api: Api<Event> = Api::namespaced(self.client.0.clone(), events::NAMESPACE);
        for told in events {
            info!(reason = told.reason, "{}", told.note);
            self.figures.told(told.reason);
            let event = NodeEvent {
                driver_name: &self.driver_name,
                node_name: &self.node_name,
                node_uid: node.metadata.uid.clone(),
                action: "CheckDevices",
                reason: told.reason,
                warning: told.warning,
                note: &told.note,
            };
            let event = event.at(Timestamp::now());
            if let Err(error) = call(api.create(&PostParams::default(), &event)).await {
                warn!(reason = told.reason, "the event is not written: {error}");
            }
        }
    }

    async fn write_status(
        &self,
        api: &Inventories,
        name: &str,
        standing: &Standing,
        seen: &mut Seen,
    ) -> Result<(), PublishError> {
        let Some(stored) = &seen.stored else {
            return Ok(());
        };
        let now = Timestamp::now();
        let wanted = status(stored, standing, &self.quarantine.borrow(), now);
        if stored.status.as_ref() == Some(&wanted) {
            return Ok(());
        }
        let patch = Patch::Merge(serde_json::json!({ "status": wanted }));
        let stored = call(api.patch_status(name, &PatchParams::default(), &patch)).await?;
        seen.stored = Some(stored);
        Ok(())
    }

    /// Reads the Node object and whether the cluster serves our claims API.
    async fn ask_cluster(&self, apis: &mut Apis) -> Result<Node, PublishError> {
        let nodes: Api<Node> = Api::all(self.client.0.clone());
        let node = call(nodes.get_opt(&self.node_name))
            .await?
            .ok_or_else(|| PublishError::NoNode(self.node_name.clone()))?;
        let uid = node
            .metadata
            .uid
            .clone()
            .ok_or_else(|| PublishError::NoUid(self.node_name.clone()))?;
        let serves_claims = self.answer_for_claims(apis).await?;
        self.learn(|facts| {
            facts.node_uid = Some(uid);
            facts.serves_claims = serves_claims;
        });
        Ok(node)
    }

    /// Queries again whether the cluster serves claims: the API may have been enabled or disabled, and API servers may differ.
    async fn ask_for_claims(&self, apis: &mut Apis) -> Result<(), PublishError> {
        let serves_claims = self.answer_for_claims(apis).await?;
        self.learn(|facts| facts.serves_claims = serves_claims);
        Ok(())
    }

    async fn answer_for_claims(&self, apis: &mut Apis) -> Result<Option<bool>, PublishError> {
        let answer = self.serves_claims().await;
        if let Ok(served) = answer {
            apis.untold.extend(apis.claims.answered(served));
        }
        apis.due = Instant::now() + spread(apis.claims.pause(), &self.node_name);
        answer.map(|_| apis.claims.served())
    }

    fn learn(&self, change: impl FnOnce(&mut ClusterFacts)) {
        self.cluster.send_if_modified(|known| {
            let before = known.clone();
            change(known);
            *known != before
        });
    }

    async fn serves_claims(&self) -> Result<bool, PublishError> {
        let group = format!("{}/{}", resource::GROUP, resource::VERSION);
        match call(self.client.0.list_api_group_resources(&group)).await {
            Ok(list) => Ok(list
                .resources
                .iter()
                .any(|resource| resource.name == "resourceclaims")),
            Err(PublishError::Api(kube::Error::Api(status))) if status.code == 404 => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn say_stopped(&self, api: &Inventories, name: &str, seen: &Seen) {
        let mut seen = Seen {
            stored: seen.stored.clone(),
            ..Seen::default()
        };
        let standing = Standing {
            reason: "Stopped".to_owned(),
            message: "the companion was stopped; running containers keep their devices".to_owned(),
            ..Standing::default()
        };
        match timeout(STOP_TIMEOUT, self.write_status(api, name, &standing, &mut seen)).await {
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
    doubt.notified().await;
    sleep_until(asked + DOUBT_PAUSE).await;
}

/// Reports deletions of the inventory.
struct Deletions<S> {
    events: S,
    complained: bool,
}

/// Watches only our own object, so an idle node receives no events.
fn deletions(
    api: Inventories,
    name: &str,
) -> Deletions<impl Stream<Item = Result<Option<Stored<Counted>>, watcher::Error>> + Unpin + use<>> {
    Deletions {
        events: Box::pin(watcher::watch_object(api, name).default_backoff()),
        complained: false,
    }
}

impl<S: Stream<Item = Result<Option<Stored<Counted>>, watcher::Error>> + Unpin> Deletions<S> {
    async fn next_deletion(&mut self) {
        while let Some(event) = self.events.next().await {
            match event {
                Ok(None) => return,
                Ok(Some(_)) => self.complained = false,
                Err(error) if self.complained => debug!("the inventory still cannot be watched: {error}"),
                Err(error) => {
                    self.complained = true;
                    warn!(
                        "the inventory cannot be watched, so that it would not be noticed if somebody deletes it: {error}"
                    );
                }
            }
        }
        std::future::pending::<()>().await;
    }
}

async fn call<T>(call: impl Future<Output = Result<T, kube::Error>>) -> Result<T, PublishError> {
    timeout(CALL_TIMEOUT, call)
        .await
        .map_err(|_| PublishError::Timeout)?
        .map_err(PublishError::from)
}

/// Adds up to half of the delay, depending on the node name, so that not all nodes reach a recovered API server in the same second.
fn spread(pause: Duration, node_name: &str) -> Duration {
    pause + pause.mul_f64(f64::from(crc32fast::hash(node_name.as_bytes())) / f64::from(u32::MAX) / 2.0)
}

#[cfg(test)]
mod tests;
