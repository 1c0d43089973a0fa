//! The extended resources and the holders of their devices: containers, which are queried from kubelet, claims that have one of them
//! allocated, and containers of withdrawn resources.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tracing::{debug, info, warn};

use crate::api::crd::{Device, DeviceNumber, Devices};
use crate::core::prepare::containers::{
    AllocatedClaims, Conflicting, Containers, ResourceSnapshot, WithdrawnDevices,
};
use crate::core::prepare::device_plugin::ExtendedResource;
use crate::core::prepare::inventory::{HandedOut, PluginDevice};
use crate::core::prepare::plan::ClaimToPrepare;
use crate::core::prepare::prepared_claims::{PreparedClaims, are_among, share_a_node};
use crate::node::service::{ListedContainers, ServedResource, ServiceError};

/// Pauses between queries for containers that hold devices of withdrawn resources: until kubelet has answered, and from then on until these
/// containers have ended.
const WITHDRAWN_PAUSES: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(5)];

/// A value with a count of its possible changes.
#[derive(Debug, Default)]
pub(super) struct Versioned<T> {
    value: T,
    version: u64,
}

impl<T> Versioned<T> {
    pub(super) fn new(value: T) -> Self {
        Self { value, version: 0 }
    }

    /// Mutable access; counts as a change.
    pub(super) fn change(&mut self) -> &mut T {
        self.version = self.version.wrapping_add(1);
        &mut self.value
    }

    pub(super) fn version(&self) -> u64 {
        self.version
    }
}

impl<T> Deref for Versioned<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

/// Source of the devices that containers hold: kubelet, or a fake in tests.
pub trait Grants: std::fmt::Debug + Send + Sync + 'static {
    /// The devices held now under these extended resources, by resource, from one consistent read. The error is a message for the
    /// user.
    fn query(
        &self,
        resources: BTreeSet<String>,
    ) -> BoxFuture<'_, Result<BTreeMap<String, ResourceSnapshot>, String>>;
}

/// Kubelet's view of each resource, or why it is unavailable.
pub(super) type ResourceSnapshots = Result<BTreeMap<String, ResourceSnapshot>, String>;

/// Devices that a resource has lost, with their earlier device numbers.
type Lost = BTreeMap<String, Vec<DeviceNumber>>;

/// An extended resource, and the published list of its devices.
#[derive(Debug)]
pub(super) struct Resource {
    pub(super) config: ExtendedResource,
    pub(super) devices: watch::Sender<Vec<PluginDevice>>,
}

impl Resource {
    fn serves(&self, device: &Device) -> bool {
        self.config.kind == device.kind && device.mode.serves_extended_resource()
    }
}

/// The extended resources of this node and the holders of their devices.
#[derive(Debug)]
pub(super) struct ExtendedResources {
    resources: Versioned<BTreeMap<String, Resource>>,
    /// The devices that containers hold.
    pub(super) containers: Versioned<Containers>,
    /// The devices that both a claim and a container were given.
    pub(super) conflicting: Versioned<Conflicting>,
    /// The devices allocated to claims, according to the API server.
    pub(super) allocated: Versioned<AllocatedClaims>,
    /// Withdrawn resources, and lost devices, that containers still hold. Always empty if kubelet cannot be queried for them.
    pub(super) withdrawn: Versioned<WithdrawnDevices>,
    /// Whether kubelet can be queried for the containers of withdrawn resources.
    tracks_withdrawn: bool,
    /// Recent grants of this process that kubelet may not show yet, by resource.
    granted: BTreeMap<String, Containers>,
}

impl ExtendedResources {
    pub(super) fn new(allocated: AllocatedClaims, withdrawn: Option<WithdrawnDevices>) -> Self {
        Self {
            resources: Versioned::default(),
            containers: Versioned::default(),
            conflicting: Versioned::default(),
            allocated: Versioned::new(allocated),
            tracks_withdrawn: withdrawn.is_some(),
            withdrawn: Versioned::new(withdrawn.unwrap_or_default()),
            granted: BTreeMap::new(),
        }
    }

    /// Applies a change of the configuration and returns the resources to serve. A removed or redefined resource first publishes an empty
    /// device list, so that kubelet learns of it before the device plugin endpoint closes.
    pub(super) fn configure(
        &mut self,
        configured: &BTreeMap<String, ExtendedResource>,
        inventory: &Devices,
    ) -> BTreeMap<String, ServedResource> {
        let gone = self
            .resources
            .iter()
            .filter(|(name, resource)| configured.get(*name) != Some(&resource.config));
        let gone: Vec<(String, Lost)> = gone
            .map(|(name, resource)| {
                let devices = inventory.values().filter(|device| resource.serves(device));
                (name.clone(), devices.map(lost).collect())
            })
            .collect();
        for (name, devices) in gone {
            let has_devices = !devices.is_empty();
            self.withdraw(&name, devices, has_devices);
        }
        let resources = self.resources.change();
        resources.retain(|name, resource| {
            let stays = configured.get(name) == Some(&resource.config);
            if !stays {
                resource.devices.send_replace(Vec::new());
            }
            stays
        });
        for (name, resource) in configured {
            resources.entry(name.clone()).or_insert_with(|| {
                if let Some(granted) = self.granted.get(name).filter(|_| resource.also_by_claims) {
                    self.containers.change().add_granted(granted);
                }
                Resource {
                    config: resource.clone(),
                    devices: watch::channel(Vec::new()).0,
                }
            });
        }
        if !self.has_both() {
            // Kubelet is no longer asked for containers with devices of mode `both`: they count as containers of withdrawn resources.
            *self.containers.change() = Containers::default();
            self.conflicting.change().settle(&self.containers);
        }
        let served = |(name, resource): (&String, &Resource)| {
            let served = ServedResource {
                resource: resource.config.clone(),
                devices: resource.devices.subscribe(),
            };
            (name.clone(), served)
        };
        self.resources.iter().map(served).collect()
    }

    /// Records, before `found` replaces the devices, which resources lose devices. A device that is missing or has other device nodes is
    /// also lost: containers still have the earlier nodes, which may belong to another device now.
    pub(super) fn lose_devices(&mut self, devices: &Devices, found: &Devices) {
        let mut all: Vec<(String, Lost, bool)> = Vec::new();
        for (name, resource) in self.resources.iter() {
            let gone: Vec<&Device> = devices
                .values()
                .filter(|before| {
                    resource.serves(before)
                        && found.get(&before.name).is_none_or(|after| {
                            !resource.serves(after)
                                || !are_among(&before.device_numbers, &after.device_numbers)
                        })
                })
                .collect();
            if gone.is_empty() {
                continue;
            }
            let is_there = |before: &&Device| {
                found.contains_key(&before.name)
                    || found
                        .values()
                        .any(|after| share_a_node(&before.device_numbers, &after.device_numbers))
            };
            let is_there = gone.iter().any(is_there);
            all.push((name.clone(), gone.into_iter().map(lost).collect(), is_there));
        }
        for (name, lost, is_there) in all {
            self.withdraw(&name, lost, is_there);
        }
    }

    fn withdraw(&mut self, name: &str, devices: Lost, is_there: bool) {
        if self.tracks_withdrawn {
            let granted = self.granted.get(name).cloned().unwrap_or_default();
            self.withdrawn.change().withdraw(name, devices, granted);
        } else if is_there {
            warn!(
                resource = name,
                reason = "PodResourcesUnavailable",
                "the resource is withdrawn or has lost devices, and kubelet's pod-resources directory is missing, so it is unknown whether containers still have them"
            );
        }
    }

    /// Drops the withdrawn resources that kubelet need not be queried for.
    pub(super) fn settle_withdrawn(&mut self, devices: &Devices) {
        if self.withdrawn.is_empty() {
            return;
        }
        let resources = &self.resources;
        self.withdrawn.change().settle(|name, device, numbers| {
            let resource = resources.get(name);
            let device = devices.get(device);
            resource.zip(device).is_some_and(|(resource, device)| {
                resource.serves(device) && are_among(numbers, &device.device_numbers)
            })
        });
    }

    /// Marks the devices that containers of withdrawn resources hold as unhealthy.
    pub(super) fn withhold_withdrawn(&self, devices: &mut Devices) {
        self.withdrawn.withhold(devices, |name, device| {
            self.resources
                .get(name)
                .is_some_and(|resource| resource.serves(device))
        });
    }

    pub(super) fn has_withdrawn(&self) -> bool {
        !self.withdrawn.is_empty()
    }

    /// Whether containers hold, or may hold, a device as one that this resource has lost.
    pub(super) fn has_lost(&self, resource: &str, device: &str) -> bool {
        self.withdrawn.has(resource, device)
    }

    /// The device numbers that the container with such a device got: those of the last grant, if this process made it.
    pub(super) fn lost_numbers(&self, resource: &str, device: &str) -> Vec<DeviceNumber> {
        let granted = self.granted.get(resource);
        match granted.and_then(|granted| granted.numbers(device)) {
            Some(numbers) => numbers.to_vec(),
            None => self.withdrawn.numbers(resource, device),
        }
    }

    /// Describes a container that holds a device under another name.
    pub(super) fn holder_by_another_name(&self, device: &Device) -> Option<String> {
        self.containers
            .holder_by_another_name(device)
            .or_else(|| self.withdrawn.holder_by_another_name(device))
    }

    /// Whether kubelet has shown the holders of each withdrawn resource.
    pub(super) fn knows_withdrawn(&self) -> bool {
        self.withdrawn.is_known()
    }

    pub(super) fn version(&self) -> u64 {
        self.resources.version()
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Resource> {
        self.resources.values()
    }

    pub(super) fn get(&self, name: &str) -> Option<&ExtendedResource> {
        self.resources.get(name).map(|resource| &resource.config)
    }

    /// The devices in use or allocated, through either API.
    pub(super) fn handed_out<'a>(&'a self, prepared_claims: &'a PreparedClaims) -> HandedOut<'a> {
        HandedOut {
            prepared_claims,
            allocated_claims: &self.allocated,
            containers: &self.containers,
        }
    }

    /// The resources with devices of mode `both`.
    fn names_of_both(&self) -> BTreeSet<String> {
        let both = self
            .resources
            .iter()
            .filter(|(_, resource)| resource.config.also_by_claims);
        both.map(|(name, _)| name.clone()).collect()
    }

    /// Whether a device is in a resource that is not offered to claims.
    pub(super) fn is_in_unshared_resource(&self, device: &Device) -> bool {
        self.all()
            .any(|resource| !resource.config.also_by_claims && resource.serves(device))
    }

    pub(super) fn has_both(&self) -> bool {
        self.all().any(|resource| resource.config.also_by_claims)
    }

    /// The resources to query kubelet for: those that are also offered to claims, and the withdrawn ones.
    pub(super) fn names_to_query(&self) -> BTreeSet<String> {
        let mut names = self.names_of_both();
        names.extend(self.withdrawn.names());
        names
    }

    /// Records an answered Allocate, with the numbers of each device.
    pub(super) fn allocate<'a>(
        &mut self,
        name: &str,
        devices: impl IntoIterator<Item = (&'a str, &'a [DeviceNumber])> + Clone,
        now: Duration,
    ) {
        let granted = self.granted.entry(name.to_owned()).or_default();
        granted.allocated(devices.clone(), now);
        if self.get(name).is_some_and(|resource| resource.also_by_claims) {
            self.containers.change().allocated(devices, now);
        }
    }

    /// Updates the holders from the answer to a query.
    ///
    /// `Err` says why the holders of `both` devices remain unknown. `is_asked` tells whether a request waits for them.
    pub(super) fn update(
        &mut self,
        view: &ResourceSnapshots,
        devices: &Devices,
        is_asked: bool,
        now: Duration,
    ) -> Result<(), QueryGap> {
        let of_both = match view {
            Ok(shown) => self.update_both(shown, is_asked, now),
            Err(problem) => Err(QueryGap::Failed(problem.clone())),
        };
        let was_known = self.knows_withdrawn();
        if let Ok(shown) = view {
            for name in self.withdrawn.names() {
                if let Some(shown) = shown.get(&name) {
                    self.withdrawn.change().seen(&name, shown, now);
                }
            }
        }
        self.settle_withdrawn(devices);
        if self.knows_withdrawn() && !was_known && self.has_withdrawn() {
            info!(
                resource = ?self.withdrawn.names(),
                "containers have devices under names that are no longer configured; these are withheld until the containers have ended"
            );
        }
        self.record_conflicts();
        of_both
    }

    fn update_both(
        &mut self,
        shown: &BTreeMap<String, ResourceSnapshot>,
        is_asked: bool,
        now: Duration,
    ) -> Result<(), QueryGap> {
        let names = self.names_of_both();
        if names.is_empty() && !is_asked {
            // The query covered no resource with mode `both`, so there is no news about such devices.
            return Ok(());
        }
        let mut all = ResourceSnapshot::default();
        for name in &names {
            let Some(shown) = shown.get(name) else {
                return Err(QueryGap::Added(name.clone()));
            };
            if let Some(problem) = &shown.pods_unseen {
                return Err(QueryGap::Failed(problem.clone()));
            }
            all.add(shown.clone());
        }
        if !names.is_empty() && !self.containers.known() {
            info!(
                devices = ?all.listed.keys().chain(&all.recorded).collect::<BTreeSet<_>>(),
                "kubelet has shown which devices its containers hold"
            );
        }
        self.containers.change().seen(&all, now);
        self.conflicting.change().settle(&self.containers);
        Ok(())
    }

    /// Replaces the allocated claims. Returns whether a container holds one of their devices.
    pub(super) fn set_allocated(&mut self, allocated: &Arc<AllocatedClaims>) -> bool {
        *self.allocated.change() = allocated.as_ref().clone();
        self.allocated_in_containers().next().is_some()
    }

    fn allocated_in_containers(&self) -> impl Iterator<Item = &str> {
        self.allocated
            .devices()
            .filter(|device| self.containers.hold(device))
    }

    /// Records the devices that both a claim has allocated and a container holds.
    fn record_conflicts(&mut self) {
        let news = self
            .allocated_in_containers()
            .filter(|device| !self.conflicting.devices().contains(*device));
        let news: Vec<String> = news.map(str::to_owned).collect();
        for device in news {
            self.record_conflict(&device);
        }
    }

    /// Records that a claim has, or needs, a device that a container holds.
    pub(super) fn record_conflict(&mut self, device: &str) {
        self.conflicting.change().claimed(device, &self.containers);
        if let Some(holder) = self.containers.holder(device) {
            warn!(
                device,
                holder,
                reason = "DeviceHeld",
                "a claim was allocated a device that a container has; the device is withheld from other claims until the container has ended"
            );
        }
    }
}

/// Why a query did not show the holders of `both` devices.
#[derive(Clone, Debug)]
pub(super) enum QueryGap {
    /// Kubelet does not show its containers, for this reason.
    Failed(String),
    /// This resource was added during the query; another query must follow.
    Added(String),
}

impl std::fmt::Display for QueryGap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Failed(problem) => f.write_str(problem),
            Self::Added(resource) => write!(f, "it was not asked for {resource} yet"),
        }
    }
}

fn lost(device: &Device) -> (String, Vec<DeviceNumber>) {
    (device.name.clone(), device.device_numbers.to_vec())
}

/// The response channel of a Prepare.
pub(super) type PrepareAnswer = oneshot::Sender<Vec<Result<Vec<String>, ServiceError>>>;

/// A request that waits for a query.
#[derive(Debug)]
pub(super) enum WaitingRequest {
    /// Claims for devices that containers could hold, and those of them that kubelet has unprepared in the meantime.
    Prepare {
        claims: Vec<ClaimToPrepare>,
        withdrawn: BTreeSet<String>,
        /// The containers listed before.
        containers: Option<ListedContainers>,
        answer: PrepareAnswer,
    },
    /// An administrative request for the devices that containers hold.
    InContainers(oneshot::Sender<BTreeMap<String, String>>),
}

#[derive(Debug)]
struct RunningQuery {
    task: JoinHandle<ResourceSnapshots>,
    /// Whether another query must follow.
    again: bool,
    /// Requests that arrived after this query had begun.
    next: Vec<WaitingRequest>,
}

/// A finished query.
#[derive(Debug)]
pub(super) struct FinishedQuery {
    pub(super) view: ResourceSnapshots,
    /// The requests that waited for it.
    pub(super) waiting: Vec<WaitingRequest>,
    /// Whether another query must follow.
    pub(super) again: bool,
}

/// Queries of kubelet's containers, outside the state task, and the requests that wait for them.
///
/// Kubelet may take seconds to answer, or never answer. Each query is therefore a separate task, one at a time, for all resources together.
/// Requests that need its result wait apart from those that do not.
#[derive(Debug)]
pub(super) struct KubeletQuery {
    /// Kubelet's view of its containers; `None` if it cannot be queried.
    grants: Option<Arc<dyn Grants>>,
    running: Option<RunningQuery>,
    waiting: Vec<WaitingRequest>,
    /// The time of the next query for withdrawn resources.
    pub(super) withdrawn_due: Instant,
    /// When the last query ended.
    pub(super) ended: Instant,
    /// Whether the failure of the last query has been logged.
    pub(super) has_warned: bool,
}

impl KubeletQuery {
    pub(super) fn new(grants: Option<Arc<dyn Grants>>) -> Self {
        Self {
            grants,
            running: None,
            waiting: Vec::new(),
            withdrawn_due: Instant::now(),
            ended: Instant::now(),
            has_warned: false,
        }
    }

    /// Whether kubelet can be queried.
    pub(super) fn is_possible(&self) -> bool {
        self.grants.is_some()
    }

    pub(super) fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// Schedules the next query for withdrawn resources.
    pub(super) fn schedule_withdrawn(&mut self, is_known: bool) {
        let [unknown, known] = WITHDRAWN_PAUSES;
        self.withdrawn_due = Instant::now() + if is_known { known } else { unknown };
    }

    /// Starts a query for these resources, or schedules another one after the query in progress.
    pub(super) fn start(&mut self, names: BTreeSet<String>) {
        let Some(grants) = self.grants.clone() else {
            return;
        };
        if let Some(query) = &mut self.running {
            query.again = true;
            return;
        }
        if names.is_empty() && self.waiting.is_empty() {
            return;
        }
        self.running = Some(RunningQuery {
            task: tokio::spawn(async move { grants.query(names).await }),
            again: false,
            next: Vec::new(),
        });
    }

    /// Queues a request for the next query to begin. Returns whether the caller must start one.
    pub(super) fn wait(&mut self, request: WaitingRequest) -> bool {
        if let Some(query) = &mut self.running {
            query.next.push(request);
            return false;
        }
        self.waiting.push(request);
        true
    }

    /// Waits for the query to end; forever if there is none. Cancel safe.
    pub(super) async fn finished(&mut self) -> FinishedQuery {
        let Some(query) = &mut self.running else {
            return std::future::pending().await;
        };
        let view = (&mut query.task)
            .await
            .unwrap_or_else(|error| Err(error.to_string()));
        let (again, next) = (query.again, std::mem::take(&mut query.next));
        self.running = None;
        self.ended = Instant::now();
        FinishedQuery {
            view,
            waiting: std::mem::replace(&mut self.waiting, next),
            again: again || !self.waiting.is_empty(),
        }
    }

    /// Marks a waiting claim as withdrawn, because kubelet has called Unprepare for it.
    pub(super) fn withdraw(&mut self, uid: &str) {
        let next = self.running.iter_mut().flat_map(|query| &mut query.next);
        for waiting in self.waiting.iter_mut().chain(next) {
            if let WaitingRequest::Prepare {
                claims, withdrawn, ..
            } = waiting
                && claims.iter().any(|claim| claim.uid == uid)
            {
                withdrawn.insert(uid.to_owned());
            }
        }
    }

    /// Logs once why kubelet does not show its containers, and the effects.
    pub(super) fn report(&mut self, problem: Option<&str>, has_both: bool, has_withdrawn: bool) {
        let Some(problem) = problem else {
            self.has_warned = false;
            return;
        };
        if self.has_warned {
            debug!("kubelet still does not show its containers: {problem}");
            return;
        }
        self.has_warned = true;
        let mut effects = Vec::new();
        if has_both {
            effects.push("devices of mode both are not given to new claims or containers");
        }
        if has_withdrawn {
            effects.push("devices of withdrawn extended resources are withheld");
        }
        warn!(
            reason = "PodResourcesUnavailable",
            "kubelet does not show which devices its containers hold ({}): {problem}",
            effects.join(", and ")
        );
    }
}
