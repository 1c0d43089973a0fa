//! The one task that owns the node's ledger, and the handle by which doors ask it.
//!
//! Requests are served one after the other. A caller that goes away leaves its request in the queue; when kubelet asks
//! again, the second request finds the work of the first done. File work runs on a thread of its own.

mod handle;
mod records;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, mpsc, watch};
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tracing::{error, info, warn};

use super::companion::CompanionError;
use super::driver::NodeDriver;
use super::store::{Opened, Places, Store};
use crate::core::node::allocate::check_allocate;
use crate::core::node::checkpoint::ClusterFacts;
use crate::core::node::claim_uid::ClaimUid;
use crate::core::node::driver_name::DriverName;
use crate::core::node::injection::Injection;
use crate::core::node::inventory::{Devices, inventory, plugin_devices, withhold};
use crate::core::node::ledger::Ledger;
use crate::core::node::orphans::Orphans;
use crate::core::node::prepare::{plan_prepare, plan_unprepare};
use crate::core::node::recovery::{plan_clearing, plan_refresh, plan_restoring, plan_undo};
use crate::core::node::refusal::Refusal;
use crate::core::node::request::{ClaimToPrepare, ClaimToUnprepare, NodeIdentity, PluginDevice};
use crate::core::node::step::Step;

pub use handle::OwnerHandle;
use handle::{Failure, Request};
pub(in crate::node) use records::Quarantine;
pub use records::{RecordsHandle, ReleaseError};

/// Requests that wait, at most; further callers wait to get in.
const QUEUE: usize = 64;
/// How much of a name is logged, in characters: Kubernetes' own are no longer.
const SHOWN_MAX: usize = 253;
/// How long the driver may take for one device. Kubelet gives up after 45 s and asks again.
const INJECTION_TIMEOUT: Duration = Duration::from_secs(10);

/// An extended resource and the kind that it is made of.
struct Resource {
    kind: String,
    devices: watch::Sender<Vec<PluginDevice>>,
}

/// What the owner needs to begin.
#[derive(Debug)]
pub struct OwnerOptions<D> {
    /// The driver, from whose name CDI ids are made, and where its records and kubelet's are.
    pub places: Places,
    /// How long a claim may be missing from kubelet's list before it is looked into.
    pub orphan_grace: Duration,
    /// The name of the Node object.
    pub node_name: String,
    /// The kind that each extended resource is made of, by the resource's name.
    pub resources: BTreeMap<String, String>,
    /// What finds the devices.
    pub driver: Arc<D>,
    /// What was found on the node.
    pub opened: Opened,
    /// What the API server tells.
    pub cluster: watch::Receiver<ClusterFacts>,
    /// Told when the Node object may be another one than we know.
    pub node_in_doubt: Arc<Notify>,
}

/// The owner, before it runs.
pub struct Owner<D> {
    driver_name: DriverName,
    places: Places,
    orphans: Orphans,
    /// How many claims hold something.
    held: watch::Sender<usize>,
    /// Told when a claim is to be looked into.
    look_due: Arc<Notify>,
    driver: Arc<D>,
    store: Arc<Store>,
    /// Shared with the thread that works on files, and never changed while it does.
    ledger: Arc<Ledger>,
    node: NodeIdentity,
    cluster: watch::Receiver<ClusterFacts>,
    node_in_doubt: Arc<Notify>,
    found: watch::Receiver<Arc<Devices>>,
    /// What is published: what was found, and what is gone but held.
    inventory: watch::Sender<Arc<Devices>>,
    resources: BTreeMap<String, Resource>,
    requests: mpsc::Receiver<Request>,
}

impl<D> std::fmt::Debug for Owner<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Owner")
            .field("ledger", &self.ledger)
            .field("node", &self.node)
            .finish_non_exhaustive()
    }
}

impl<D: NodeDriver> Owner<D> {
    /// Puts the node right from what the last process left, and returns the owner, the handle for doors and the inventory.
    pub async fn start(options: OwnerOptions<D>) -> (Self, OwnerHandle, watch::Receiver<Arc<Devices>>) {
        let Opened {
            store,
            ledger,
            cluster,
            files,
            rebuilt: _,
        } = options.opened;
        let (sender, requests) = mpsc::channel(QUEUE);
        let (inventory, published) = watch::channel(Arc::default());
        let mut resources = BTreeMap::new();
        let mut offered = BTreeMap::new();
        for (name, kind) in options.resources {
            let (devices, receiver) = watch::channel(Vec::new());
            offered.insert(name.clone(), receiver);
            resources.insert(name, Resource { kind, devices });
        }
        let (held, holds) = watch::channel(0);
        let look_due = Arc::new(Notify::new());
        let mut owner = Self {
            driver_name: options.places.driver.clone(),
            places: options.places,
            orphans: Orphans::new(options.orphan_grace),
            held,
            look_due: look_due.clone(),
            found: options.driver.devices(),
            driver: options.driver,
            store: Arc::new(store),
            ledger: Arc::new(ledger),
            node: NodeIdentity {
                name: options.node_name,
                uid: cluster.node_uid,
            },
            cluster: options.cluster,
            node_in_doubt: options.node_in_doubt,
            inventory,
            resources,
            requests,
        };
        owner.recover(&files).await;
        owner.found.mark_unchanged();
        owner.publish();
        (
            owner,
            OwnerHandle {
                requests: sender,
                resources: offered,
                held: holds,
                look_due,
            },
            published,
        )
    }

    /// Serves until the last handle is dropped.
    pub async fn run(mut self) {
        loop {
            tokio::select! {
                // What is known is taken up before anybody is answered from it. Both are rare.
                biased;
                Ok(()) = self.cluster.changed() => self.learn().await,
                Ok(()) = self.found.changed() => self.refresh().await,
                request = self.requests.recv() => match request {
                    Some(request) => self.serve(request).await,
                    None => return,
                },
            }
            self.publish();
        }
    }

    async fn serve(&mut self, request: Request) {
        // A caller that is gone is no reason not to do the work; there is only nobody to tell.
        match request {
            Request::Prepare(claims, answer) => {
                let mut answers = Vec::with_capacity(claims.len());
                for claim in claims {
                    let result = self.prepare(&claim).await;
                    report(
                        "prepare",
                        &claim.namespace,
                        &claim.name,
                        &claim.uid,
                        result.as_ref().err(),
                    );
                    answers.push(result.map_err(CompanionError::from));
                }
                let _ = answer.send(answers);
            }
            Request::Unprepare(claims, answer) => {
                let mut answers = Vec::with_capacity(claims.len());
                for claim in claims {
                    let result = self.unprepare(&claim).await;
                    report(
                        "unprepare",
                        &claim.namespace,
                        &claim.name,
                        &claim.uid,
                        result.as_ref().err(),
                    );
                    answers.push(result.map_err(CompanionError::from));
                }
                let _ = answer.send(answers);
            }
            Request::Allocate(resource, containers, answer) => {
                let result = self.allocate(&resource, &containers).await;
                match &result {
                    Ok(_) => info!(resource, devices = ?containers, "allocate done"),
                    Err(failure) => {
                        warn!(resource, devices = ?containers, reason = failure.reason(), "allocate refused: {failure}");
                    }
                }
                let _ = answer.send(result.map_err(CompanionError::from));
            }
            Request::Records(request) => self.records(request).await,
        }
    }

    async fn prepare(&mut self, claim: &ClaimToPrepare) -> Result<Vec<String>, Failure> {
        let planned = plan_prepare(&self.ledger, &self.inventory.borrow(), &self.node, claim);
        match &planned {
            // One of the two is out of date, and it may be we.
            Err(Refusal::EarlierNode { .. }) => self.node_in_doubt.notify_one(),
            // Either the holder is about to end, or kubelet has lost it.
            Err(Refusal::Held { device, .. }) => {
                let holder = self.ledger.holder(device).map(|(uid, _)| uid.clone());
                if holder.is_some_and(|uid| self.orphans.contest(&uid)) {
                    self.look_due.notify_one();
                }
            }
            _ => {}
        }
        let (uid, steps) = planned?;
        self.orphans.forget(&uid);
        if let Err(failure) = self.carry_out(&steps).await {
            self.undo(&uid).await;
            return Err(failure);
        }
        Ok(vec![self.driver_name.cdi_id(&uid)])
    }

    async fn unprepare(&mut self, claim: &ClaimToUnprepare) -> Result<(), Failure> {
        let steps = plan_unprepare(&self.ledger, claim)?;
        self.carry_out(&steps).await
    }

    async fn allocate(
        &mut self,
        resource: &str,
        containers: &[Vec<String>],
    ) -> Result<Vec<Injection>, Failure> {
        let Some(Resource { kind, .. }) = self.resources.get(resource) else {
            return Err(Refusal::NoResource(resource.to_owned()).into());
        };
        let devices = self.inventory.borrow().clone();
        check_allocate(&self.ledger, &devices, resource, kind, containers)?;
        let mut injections = Vec::with_capacity(containers.len());
        for container in containers {
            injections.push(self.inject(container.clone()).await?);
        }
        Ok(injections)
    }

    async fn carry_out(&mut self, steps: &[Step]) -> Result<(), Failure> {
        for step in steps {
            if let Step::Inject(uid) = step {
                let held = self
                    .ledger
                    .entry(uid)
                    .map(|entry| entry.devices.clone())
                    .unwrap_or_default();
                let injection = self
                    .inject(held.into_iter().map(|held| held.device).collect())
                    .await?;
                Arc::make_mut(&mut self.ledger).set_injection(uid, injection);
                continue;
            }
            let (step, ledger, store) = (step.clone(), self.ledger.clone(), self.store.clone());
            let performed = spawn_blocking(move || step.perform(&ledger, &*store)).await;
            if let Some(changed) = performed.map_err(|_| Failure::Stopping)?? {
                self.ledger = Arc::new(changed);
            }
        }
        Ok(())
    }

    async fn inject(&self, devices: Vec<String>) -> Result<Injection, Failure> {
        let mut injection = Injection::default();
        for device in devices {
            match timeout(INJECTION_TIMEOUT, self.driver.injection(&device)).await {
                Ok(made) => injection.extend(made?),
                Err(_) => return Err(Failure::Slow { device }),
            }
        }
        Ok(injection)
    }

    async fn undo(&mut self, uid: &ClaimUid) {
        for step in plan_undo(&self.ledger, uid) {
            if let Err(failure) = self.carry_out(&[step]).await {
                warn!(claim_uid = %uid, reason = failure.reason(), "cannot be undone now, and is later: {failure}");
            }
        }
    }

    async fn recover(&mut self, files: &BTreeSet<ClaimUid>) {
        for step in plan_clearing(&self.ledger, files) {
            if let Err(failure) = self.carry_out(&[step]).await {
                error!(
                    reason = failure.reason(),
                    "what an earlier process left cannot be cleared away now: {failure}"
                );
            }
        }
        let plans = plan_restoring(&self.ledger);
        self.carry_out_each(plans).await;
        if let Err(failure) = self.carry_out(&[Step::Save(Vec::new())]).await {
            error!(
                reason = failure.reason(),
                "what was restored cannot be stored now: {failure}"
            );
        }
        info!(claims = self.ledger.entries().len(), "the ledger is complete");
    }

    /// The devices are not what they were: files must not lead to a node that has become another's.
    async fn refresh(&mut self) {
        let before = self.inventory.borrow().clone();
        self.found.mark_unchanged();
        let after = self.devices();
        let plans = plan_refresh(&self.ledger, &before, &after);
        self.carry_out_each(plans).await;
    }

    async fn carry_out_each(&mut self, plans: Vec<(ClaimUid, Vec<Step>)>) {
        for (uid, steps) in plans {
            if let Err(failure) = self.carry_out(&steps).await {
                let reason = failure.reason();
                warn!(claim_uid = %uid, reason, "containers of this claim cannot be started now: {failure}");
                self.undo(&uid).await;
            }
        }
    }

    async fn learn(&mut self) {
        let facts = self.cluster.borrow_and_update().clone();
        self.node.uid.clone_from(&facts.node_uid);
        self.store.set_cluster(facts);
        if let Err(failure) = self.carry_out(&[Step::Save(Vec::new())]).await {
            warn!(
                reason = failure.reason(),
                "what the API server told is not stored yet: {failure}"
            );
        }
    }

    /// The devices as they are to be published.
    fn devices(&self) -> Devices {
        let mut all = inventory(&self.found.borrow(), &self.inventory.borrow(), &self.ledger);
        withhold(&mut all, &self.ledger, &self.orphans.quarantine());
        all
    }

    fn publish(&self) {
        let count = self.ledger.entries().len();
        self.held
            .send_if_modified(|held| std::mem::replace(held, count) != count);
        let all = self.devices();
        for resource in self.resources.values() {
            let devices = plugin_devices(&all, &self.ledger, &resource.kind);
            resource.devices.send_if_modified(|published| {
                let changed = *published != devices;
                *published = devices;
                changed
            });
        }
        self.inventory.send_if_modified(|published| {
            let changed = **published != all;
            if changed {
                *published = Arc::new(all);
            }
            changed
        });
    }
}

fn report(what: &str, namespace: &str, name: &str, uid: &str, failure: Option<&Failure>) {
    // Not checked yet if it was refused, and as long as the caller likes.
    let [namespace, name, uid] =
        [namespace, name, uid].map(|text| text.chars().take(SHOWN_MAX).collect::<String>());
    match failure {
        None => info!(namespace, name, uid, "{what} done"),
        Some(failure) => warn!(
            namespace,
            name,
            uid,
            reason = failure.reason(),
            "{what} refused: {failure}"
        ),
    }
}

#[cfg(test)]
mod stage;
#[cfg(test)]
mod tests;
