//! The state task: it owns the node's state, and serves the requests of [`NodeService`](crate::node::service::NodeService).
//!
//! Requests are served one at a time. If a caller disconnects, its request stays in the queue; when kubelet retries, the second request
//! finds the work done. File access runs on a separate thread.

mod claims;
mod driver_client;
mod kubelet_query;
mod plugin;
mod publisher;
mod resources;
mod runtime_check;
pub mod storage;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, sleep_until};
use tracing::{info, warn};

use crate::api::crd::Device;
use crate::core::prepare::checkpoint::ClusterFacts;
use crate::core::prepare::containers::{AllocatedClaims, WithdrawnDevices};
use crate::core::prepare::inventory::Devices;
use crate::core::prepare::orphans::Orphans;
use crate::core::prepare::plan::{ExtendedResource, NodeIdentity, Step};
use crate::core::prepare::prepared_claims::PreparedClaims;
use crate::core::prepare::recovery::Retries;
use crate::node::container_runtime::ContainerRuntime;
use crate::node::driver::NodeDriver;
use crate::node::kubelet::pod_resources::Grants;
use crate::node::metrics::Metrics;
use crate::node::service::{Backend, Request};
use crate::node::state::storage::{Opened, Paths, Store};

use driver_client::DriverClient;
use kubelet_query::{KubeletQuery, Waiting};
use publisher::{Publisher, Versioned};
use resources::ExtendedResources;
use runtime_check::RuntimeCheck;

/// Interval between queries of kubelet's containers until the first answer, and while a claim waits for a container's device. Otherwise,
/// kubelet is queried only when a claim needs a device.
const QUERY_INTERVAL: Duration = Duration::from_secs(2);

/// Options to start the state task.
#[derive(Debug)]
pub struct NodeStateOptions<D> {
    /// The driver name, from which CDI ids derive, and the paths of the driver's and kubelet's files.
    pub paths: Paths,
    /// How long a claim may be missing from kubelet's list before it is checked.
    pub orphan_grace: Duration,
    /// Name of the Node object.
    pub node_name: String,
    /// The extended resources, by name, updated on each change.
    pub resources: watch::Receiver<Arc<BTreeMap<String, ExtendedResource>>>,
    /// The node driver, which finds and prepares the devices.
    pub driver: Arc<D>,
    /// The state found on the node.
    pub opened: Opened,
    /// The container runtime, if it can report the devices of its containers.
    pub runtime: Option<Arc<dyn ContainerRuntime>>,
    /// Facts from the API server.
    pub cluster: watch::Receiver<ClusterFacts>,
    /// Notified when the known Node object may be outdated.
    pub node_in_doubt: Arc<Notify>,
    /// Kubelet's view of its containers, for kinds with mode `both`.
    pub grants: Option<Arc<dyn Grants>>,
    /// The devices of this node that are allocated to claims, from the API server, for kinds with mode `both`.
    pub allocated: watch::Receiver<Arc<AllocatedClaims>>,
    /// Extended resources of earlier processes whose devices containers hold, from kubelet's checkpoint. `None` if kubelet cannot be
    /// queried for its containers; then no device is withheld for containers of withdrawn resources.
    pub withdrawn: Option<WithdrawnDevices>,
    /// The metrics.
    pub metrics: Arc<Metrics>,
    /// The requests.
    pub backend: Backend,
    /// Publishes the inventory.
    pub inventory: watch::Sender<Arc<Devices>>,
}

/// Values that other tasks update.
struct Inputs {
    cluster: watch::Receiver<ClusterFacts>,
    /// The devices that the driver finds.
    found: watch::Receiver<Arc<Devices>>,
    /// The configured extended resources.
    configured: watch::Receiver<Arc<BTreeMap<String, ExtendedResource>>>,
    /// The devices allocated to claims.
    allocated: watch::Receiver<Arc<AllocatedClaims>>,
    /// Notified when the known Node object may be outdated.
    node_in_doubt: Arc<Notify>,
}

/// The state task, before it runs: the prepared claims and their storage, the extended resources, and what is published about both.
pub struct NodeState<D> {
    /// The requests, and the values that a service reads without one.
    backend: Backend,
    inputs: Inputs,
    driver: DriverClient<D>,
    node: NodeIdentity,
    paths: Paths,
    store: Arc<Store>,
    /// Shared with the thread that accesses files, and never changed during such an access.
    prepared_claims: Versioned<Arc<PreparedClaims>>,
    /// The CDI files that could not be written.
    retries: Retries,
    orphans: Versioned<Orphans>,
    runtime: RuntimeCheck,
    /// The found devices that have been fully processed.
    devices: Arc<Devices>,
    resources: ExtendedResources,
    query: KubeletQuery,
    publisher: Publisher,
    started: Instant,
    metrics: Arc<Metrics>,
}

impl<D> std::fmt::Debug for NodeState<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeState")
            .field("prepared_claims", &self.prepared_claims)
            .field("node", &self.node)
            .finish_non_exhaustive()
    }
}

impl<D: NodeDriver> NodeState<D> {
    /// Recovers from the state of the last process. Requests wait until the task runs.
    pub async fn start(options: NodeStateOptions<D>) -> Self {
        let Opened {
            store,
            prepared_claims,
            cluster,
            files,
            rebuilt: _,
            complete: _,
        } = options.opened;
        let mut orphans = Orphans::new(options.orphan_grace);
        if options.runtime.is_some() {
            orphans = orphans.with_runtime();
        }
        let driver = DriverClient(options.driver);
        let inputs = Inputs {
            cluster: options.cluster,
            found: driver.devices().await,
            configured: options.resources,
            allocated: options.allocated,
            node_in_doubt: options.node_in_doubt,
        };
        let allocated = inputs.allocated.borrow().as_ref().clone();
        let withdrawn = options.withdrawn.filter(|_| options.grants.is_some());
        let mut state = Self {
            backend: options.backend,
            inputs,
            driver,
            node: NodeIdentity {
                name: options.node_name,
                uid: cluster.node_uid,
            },
            runtime: RuntimeCheck::new(options.runtime, options.paths.driver.clone()),
            paths: options.paths,
            store: Arc::new(store),
            prepared_claims: Versioned::new(Arc::new(prepared_claims)),
            retries: Retries::default(),
            orphans: Versioned::new(orphans),
            devices: Arc::default(),
            resources: ExtendedResources::new(allocated, withdrawn),
            query: KubeletQuery::new(options.grants),
            publisher: Publisher::new(options.inventory, options.metrics.clone()),
            started: Instant::now(),
            metrics: options.metrics,
        };
        state.configure();
        state.recover(&files).await;
        state.devices = state.inputs.found.borrow_and_update().clone();
        // No request is served yet, so no caller waits for this.
        state.query_and_wait().await;
        state.rebuild_inventory();
        state.refresh_named_devices().await;
        state.publish();
        state
    }

    /// Serves requests until the last service is dropped.
    pub async fn run(mut self) {
        loop {
            let retry = self.retries.next().map(|due| self.started + due);
            let withdrawn_due = self.query.withdrawn_due();
            tokio::select! {
                // Updates are processed before any request that depends on them. Both kinds are rare.
                biased;
                Ok(()) = self.inputs.cluster.changed() => self.learn().await,
                Ok(()) = self.inputs.configured.changed() => {
                    self.configure();
                    self.query_after_change().await;
                    self.rebuild_inventory();
                    self.refresh_named_devices().await;
                }
                Ok(()) = self.inputs.found.changed() => self.refresh().await,
                Ok(()) = self.inputs.allocated.changed(), if self.has_both() => self.update_allocated(),
                finished = self.query.finished(), if self.query.is_running() => self.take_up(finished).await,
                request = self.backend.requests.recv() => match request {
                    Some(request) => self.serve(request).await,
                    None => return,
                },
                () = sleep_until(retry.unwrap_or(self.started)), if retry.is_some() => self.retry().await,
                () = sleep_until(withdrawn_due), if self.resources.has_withdrawn() && !self.query.is_running() => self.query_kubelet(),
                () = sleep(QUERY_INTERVAL), if self.must_query_again() => self.query_kubelet(),
            }
            self.rebuild_inventory();
            self.publish();
        }
    }

    async fn serve(&mut self, request: Request) {
        // If the caller is gone, the work is still done; only the response is dropped.
        match request {
            Request::Prepare(claims, containers, answer) => {
                let withdrawn = BTreeSet::new();
                if claims.iter().any(|claim| self.needs_query(claim)) {
                    self.wait_for_query(Waiting::Prepare {
                        claims,
                        withdrawn,
                        answer,
                    });
                } else {
                    self.prepare_all(&claims, &withdrawn, None, containers.as_ref(), answer)
                        .await;
                }
            }
            Request::Unprepare(claims, answer) => {
                let _ = answer.send(self.unprepare_all(claims).await);
            }
            Request::Allocate(resource, containers, answer) => {
                let result = self.allocate(&resource, &containers).await;
                self.count("allocate", result.as_ref().err());
                match &result {
                    Ok(_) => info!(resource, devices = ?containers, "allocate done"),
                    Err(failure) => {
                        warn!(resource, devices = ?containers, reason = failure.reason(), "allocate refused: {failure}");
                    }
                }
                let _ = answer.send(result);
            }
            Request::CheckStart(resource, devices, answer) => {
                let result = self.check_start(&resource, &devices).await;
                self.count("start", result.as_ref().err());
                if let Err(failure) = &result {
                    warn!(
                        resource,
                        ?devices,
                        reason = failure.reason(),
                        "start refused: {failure}"
                    );
                }
                let _ = answer.send(result);
            }
            Request::Holdings(answer) => {
                let _ = answer.send(self.holdings());
            }
            Request::InContainers(answer) => {
                if self.has_both() {
                    self.wait_for_query(Waiting::InContainers(answer));
                } else {
                    let _ = answer.send(BTreeMap::new());
                }
            }
            Request::Release(uid, force, answer) => {
                let _ = answer.send(self.release(&uid, force).await);
            }
            Request::FindOrphans(now, answer) => {
                let _ = answer.send(self.find_orphans(now).await);
            }
            Request::DecideOrphans(now, answers, answer) => {
                let _ = answer.send(self.decide_orphans(now, &answers).await);
            }
        }
    }

    async fn learn(&mut self) {
        let facts = self.inputs.cluster.borrow_and_update().clone();
        self.node.uid.clone_from(&facts.node_uid);
        self.store.set_cluster(facts);
        if let Err(failure) = self.perform(&[Step::Save(Vec::new())]).await {
            warn!(
                reason = failure.reason(),
                "the facts of the API server are not stored yet: {failure}"
            );
        }
    }

    /// A device as found, or as last known if a claim holds it.
    fn device(&self, name: &str) -> Option<&Device> {
        self.devices
            .get(name)
            .or_else(|| self.publisher.inventory().get(name))
    }

    /// Rebuilds the inventory, if an input may have changed. Returns whether it was rebuilt.
    fn rebuild_inventory(&mut self) -> bool {
        self.publisher.rebuild_inventory(publisher::Inputs {
            found: &self.devices,
            prepared_claims: &self.prepared_claims,
            orphans: &self.orphans,
            resources: &self.resources,
        })
    }

    /// Publishes changes. Returns whether an input may have changed.
    fn publish(&mut self) -> bool {
        let inputs = publisher::Inputs {
            found: &self.devices,
            prepared_claims: &self.prepared_claims,
            orphans: &self.orphans,
            resources: &self.resources,
        };
        self.publisher.publish(inputs, &self.backend.prepared)
    }
}

#[cfg(test)]
mod tests;
