//! Checks the claims of kubelet's Prepare and Unprepare requests, and plans how to serve them.
//!
//! A plan is a list of [`PlanStep`]s that the runtime performs in order, one plan at a time. A repeated request therefore finds the work
//! done, and an Unprepare follows its Prepare. The process may be killed before, during and after every step; [`super::recovery`] then
//! restores a consistent state. A [`Refusal`] says why a request has no plan; kubelet shows its reason and text in the pod's Event
//! `FailedPrepareDynamicResources`. If a plan fails, `node::service::ServiceError` says why.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::resource::v1::{DeviceRequestAllocationResult, ResourceClaim};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::container_edits::{ContainerEdits, PathConflict};
use super::containers::Containers;
use super::device_metadata::{DeviceMetadata, base_request};
use super::prepared_claims::{
    ClaimChange, ClaimDetails, Entry, HeldDevice, PreparedClaims, Progress, Structured,
};
use crate::api::crd::{Device, Devices, Mode};
use crate::api::handle::{DeviceHandle, HandleError};
use crate::api::resource::POD_CLAIM_NAME_ANNOTATION;
use crate::core::names::{ClaimUid, ClaimUidError, DriverName, is_dns_label, is_dns_subdomain};

/// Plans a Prepare, after which kubelet may be given the claim's CDI id.
///
/// Repeating it for the same claim yields the same id. A claim whose devices are unavailable is refused without any step or change.
/// `containers` are the holders through the device plugin API; they matter for devices that both APIs offer.
pub fn plan_prepare(
    prepared_claims: &PreparedClaims,
    containers: &Containers,
    inventory: &Devices,
    node: &NodeIdentity,
    claim: &ClaimToPrepare,
) -> Result<(ClaimUid, Vec<PlanStep>), Refusal> {
    let uid = ClaimUid::parse(&claim.uid)?;
    check_name("namespace", &claim.namespace, is_dns_label)?;
    check_name("name", &claim.name, |name| is_dns_subdomain(name, 253))?;
    let allocated = allocated_devices(&claim.allocation, &uid, node)?;

    let own = prepared_claims.entry(&uid);
    if let Some(entry) = own.filter(|entry| prepared_claims.may_be_in_use(entry)) {
        return prepared_before(prepared_claims, inventory, claim, (&uid, entry), &allocated)
            .map(|steps| (uid, steps));
    }
    if let Some((other, entry)) = prepared_claims.with_unknown_devices(Some(&uid)) {
        return Err(Refusal::unknown_devices(other, entry));
    }

    let mut evicted = BTreeSet::new();
    let mut devices = Vec::new();
    for allocated in allocated {
        let device = offered(inventory, &allocated.device, Mode::Claims)?;
        if !allocated.has_admin_access() {
            check_containers(containers, device)?;
            evicted.extend(make_room(prepared_claims, &uid, device, allocated.shares())?);
            check_health(device)?;
        }
        devices.push(described(inventory, &allocated));
    }

    // As at Unprepare, the files go first; then the driver reverts its work.
    let cleared: Vec<ClaimUid> = evicted.iter().cloned().chain(own.map(|_| uid.clone())).collect();
    let mut steps: Vec<PlanStep> = cleared.iter().cloned().map(PlanStep::RemoveCdi).collect();
    steps.extend(cleared.into_iter().map(PlanStep::Unprepare));
    let mut changes: Vec<ClaimChange> = evicted.into_iter().map(ClaimChange::Remove).collect();
    changes.push(ClaimChange::Start(
        uid.clone(),
        Entry {
            namespace: claim.namespace.clone(),
            name: claim.name.clone(),
            boot_id: prepared_claims.boot_id().to_owned(),
            devices,
            progress: Progress::Started {
                container_edits: None,
            },
        },
    ));
    steps.push(PlanStep::Save(changes));
    steps.push(PlanStep::Prepare(uid.clone()));
    steps.push(PlanStep::WriteCdi(uid.clone()));
    steps.push(PlanStep::Save(vec![ClaimChange::Finish(uid.clone())]));
    Ok((uid, steps))
}

/// The allocated devices, each once.
fn allocated_devices(
    allocation: &Allocation,
    uid: &ClaimUid,
    node: &NodeIdentity,
) -> Result<Vec<HeldDevice>, Refusal> {
    match allocation {
        Allocation::Handle(data) => {
            let handle = DeviceHandle::parse(data)?;
            check_handle(&handle, uid, node)?;
            let names = distinct(handle.devices.iter().map(|device| device.device.as_str()))?;
            Ok(names.into_iter().map(HeldDevice::named).collect())
        }
        Allocation::StructuredParameters => Err(Refusal::StructuredParameters),
        Allocation::Results(results) => of_results(results, &node.name),
    }
}

/// The devices of the scheduler's results. A device may occur several times if each result has a share of it, or admin access to it.
pub fn of_results(results: &[DeviceResult], node_name: &str) -> Result<Vec<HeldDevice>, Refusal> {
    if results.is_empty() {
        return Err(Refusal::NoDevice);
    }
    let mut devices: Vec<HeldDevice> = Vec::new();
    for result in results {
        if result.pool != node_name {
            return Err(Refusal::OtherPool {
                device: shown(&result.device),
                pool: shown(&result.pool),
                node: node_name.to_owned(),
            });
        }
        let known = devices.iter_mut().find(|known| known.device == result.device);
        let Some(known) = known else {
            devices.push(HeldDevice {
                device: result.device.clone(),
                structured: Some(Structured {
                    share_ids: result.share_id.iter().cloned().collect(),
                    admin_access: result.admin_access,
                    container_edits: ContainerEdits::default(),
                    metadata: DeviceMetadata::new(
                        &result.pool,
                        &result.request,
                        result.pod_claim_name.as_deref(),
                    ),
                }),
                ..HeldDevice::default()
            });
            continue;
        };
        let Some(structured) = &mut known.structured else {
            continue;
        };
        let is_repeated = result
            .share_id
            .as_ref()
            .is_none_or(|id| structured.share_ids.contains(id) || structured.share_ids.is_empty());
        let both_hold = !result.admin_access && !structured.admin_access;
        if is_repeated && both_hold {
            return Err(Refusal::Twice(shown(&result.device)));
        }
        structured.share_ids.extend(result.share_id.clone());
        structured.admin_access &= result.admin_access;
        structured.metadata.add_request(&result.request);
    }
    Ok(devices)
}

/// The devices that a plan newly takes, without those with admin access.
pub fn taken(steps: &[PlanStep]) -> impl Iterator<Item = &str> + Clone {
    let changes = steps.iter().flat_map(|step| match step {
        PlanStep::Save(changes) => changes.as_slice(),
        _ => &[],
    });
    let taken = changes.flat_map(|change| match change {
        ClaimChange::Start(_, entry) => entry.devices.as_slice(),
        _ => &[],
    });
    taken
        .filter(|held| !held.has_admin_access())
        .map(|held| held.device.as_str())
}

/// The first device that a plan newly takes and that both APIs offer.
pub fn takes_from_both(steps: &[PlanStep], inventory: &Devices) -> Option<String> {
    taken(steps)
        .find(|name| {
            inventory
                .get(*name)
                .is_some_and(|device| device.mode == Mode::Both)
        })
        .map(str::to_owned)
}

/// Refuses a device that a container has, or may have.
fn check_containers(containers: &Containers, device: &Device) -> Result<(), Refusal> {
    if device.mode != Mode::Both {
        return Ok(());
    }
    if !containers.known() {
        return Err(Refusal::ContainersUnknown {
            device: device.name.clone(),
            problem: "it has not answered since the companion was started".to_owned(),
        });
    }
    match containers.holder_of(device) {
        Some(holder) => Err(Refusal::InContainer {
            device: device.name.clone(),
            holder,
        }),
        None => Ok(()),
    }
}

/// Refuses a device whose shares are all in use. Otherwise returns the claims to evict so that one more can have it, and no more than that:
/// remains of failed attempts, then of pods that ran before the boot.
fn make_room(
    prepared_claims: &PreparedClaims,
    uid: &ClaimUid,
    device: &Device,
    needed: usize,
) -> Result<Vec<ClaimUid>, Refusal> {
    let shares = device.shares.unwrap_or(1).max(1);
    let others = prepared_claims
        .holders_of(device)
        .filter(|(holder, _)| *holder != uid);
    let (in_use, mut left): (Vec<_>, Vec<_>) =
        others.partition(|(_, entry)| prepared_claims.may_be_in_use(entry));
    let limit = usize::try_from(shares).unwrap_or(usize::MAX);
    let held = |holders: &[(&ClaimUid, &Entry)]| -> usize {
        let shares = holders
            .iter()
            .map(|(_, entry)| PreparedClaims::shares_held(entry, device));
        shares.sum()
    };
    if needed > limit {
        return Err(Refusal::TooFewShares {
            device: device.name.clone(),
            shares,
            needed,
        });
    }
    let used = held(&in_use);
    match in_use.first() {
        Some((holder, entry)) if used + needed > limit => {
            let (device, holder) = (device.name.clone(), entry.describe(holder));
            Err(if shares == 1 {
                Refusal::Held { device, holder }
            } else {
                Refusal::AllShares {
                    device,
                    shares,
                    holder,
                }
            })
        }
        _ => {
            // Kubelet 1.27 does not prepare a claim of an earlier boot again, so it goes last.
            left.sort_by_key(|(_, entry)| entry.is_done());
            let mut excess = (used + held(&left) + needed).saturating_sub(limit);
            let mut evicted = Vec::new();
            for (holder, entry) in left {
                if excess == 0 {
                    break;
                }
                excess = excess.saturating_sub(PreparedClaims::shares_held(entry, device));
                evicted.push(holder.clone());
            }
            Ok(evicted)
        }
    }
}

/// Plans for a claim that containers may use already. The driver computes the container edits again, so that a vanished or replaced device
/// is detected now; the claim keeps it in any case.
///
/// An entry that was rebuilt after the checkpoint was lost lacks names or even devices; kubelet's request supplies them.
fn prepared_before(
    prepared_claims: &PreparedClaims,
    inventory: &Devices,
    claim: &ClaimToPrepare,
    (uid, entry): (&ClaimUid, &Entry),
    allocated: &[HeldDevice],
) -> Result<Vec<PlanStep>, Refusal> {
    let names = |devices: &[HeldDevice]| -> BTreeSet<String> {
        devices.iter().map(|held| held.device.clone()).collect()
    };
    let lacks_shares = entry
        .devices
        .iter()
        .any(|held| allocated.iter().any(|allocated| held.has_lost_shares(allocated)));
    let complete = !entry.name.is_empty() && !entry.devices.is_empty() && !lacks_shares;
    let (held, now) = (names(&entry.devices), names(allocated));
    if (!entry.has_unknown_devices() && held != now)
        || (complete && !same_allocation(&entry.devices, allocated))
    {
        return Err(Refusal::Changed {
            held: list(held.iter().map(String::as_str)),
            named: list(now.iter().map(String::as_str)),
        });
    }
    let lacks_metadata = entry.devices.iter().any(|held| {
        let structured = held.structured.as_ref();
        structured.is_some_and(|structured| structured.metadata.is_unknown())
    });
    let mut steps = Vec::new();
    if !complete {
        for allocated in allocated.iter().filter(|device| !device.has_admin_access()) {
            // Only the name of a missing device is known.
            let unknown = || Device {
                name: allocated.device.clone(),
                ..Device::default()
            };
            make_room(
                prepared_claims,
                uid,
                &inventory.get(&allocated.device).cloned().unwrap_or_else(unknown),
                allocated.shares(),
            )?;
        }
    }
    if !complete || lacks_metadata {
        let known = ClaimDetails {
            namespace: claim.namespace.clone(),
            name: claim.name.clone(),
            devices: allocated
                .iter()
                .map(|device| described(inventory, device))
                .collect(),
        };
        steps.push(PlanStep::Save(vec![ClaimChange::Explain(uid.clone(), known)]));
    }
    steps.extend(restore(uid));
    Ok(steps)
}

/// Whether a claim has the same shares and the same access to each device as before.
fn same_allocation(held: &[HeldDevice], allocated: &[HeldDevice]) -> bool {
    let details = |devices: &[HeldDevice]| -> BTreeMap<String, Option<(BTreeSet<String>, bool)>> {
        let details = devices.iter().map(|held| {
            let structured = held.structured.as_ref();
            let details = structured.map(|structured| {
                let shares = structured.share_ids.iter().cloned().collect();
                (shares, structured.admin_access)
            });
            (held.device.clone(), details)
        });
        details.collect()
    };
    details(held) == details(allocated)
}

/// The record of an allocated device, with its kind, numbers and attributes. These are empty if the device is missing.
pub(super) fn described(inventory: &Devices, allocated: &HeldDevice) -> HeldDevice {
    let device = inventory.get(&allocated.device);
    let mut structured = allocated.structured.clone();
    if let (Some(structured), Some(device)) = (&mut structured, device) {
        structured.metadata.describe(device);
    }
    let mut held = HeldDevice {
        structured,
        ..HeldDevice::named(&allocated.device)
    };
    if let Some(device) = device {
        held.numbers = device.device_numbers.to_vec();
        held.describe(device);
    }
    held
}

/// Plans an Unprepare. For an unknown claim, at most a file is removed.
///
/// The file goes first: if the process is killed in between, the claim's record shows that work is left. The driver is called only for a
/// recorded claim, and the record is removed only after the driver has succeeded.
pub fn plan_unprepare(
    prepared_claims: &PreparedClaims,
    claim: &ClaimToUnprepare,
) -> Result<Vec<PlanStep>, Refusal> {
    let uid = ClaimUid::parse(&claim.uid)?;
    let mut steps = vec![PlanStep::RemoveCdi(uid.clone())];
    if prepared_claims.entry(&uid).is_some() {
        steps.push(PlanStep::Unprepare(uid.clone()));
        steps.push(PlanStep::Save(vec![ClaimChange::Remove(uid)]));
    }
    Ok(steps)
}

/// The steps that update a claim's CDI file to the present state of its devices. The device numbers are recorded before a container can get
/// them from the file.
pub(super) fn restore(uid: &ClaimUid) -> Vec<PlanStep> {
    vec![
        PlanStep::Prepare(uid.clone()),
        PlanStep::Save(Vec::new()),
        PlanStep::WriteCdi(uid.clone()),
    ]
}

/// A claim in kubelet's Prepare request, unvalidated.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClaimToPrepare {
    /// Namespace of the claim.
    pub namespace: String,
    /// Name of the claim.
    pub name: String,
    /// Uid of the claim: a UUID if the request is valid.
    pub uid: String,
    /// The allocated devices.
    pub allocation: Allocation,
}

/// The devices that were allocated to a claim, unvalidated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Allocation {
    /// Classic mode: the resource handle that the controller wrote.
    Handle(String),
    /// Kubernetes 1.30: the scheduler allocated the claim with a ResourceClass that has `structuredParameters`.
    StructuredParameters,
    /// Structured mode: the scheduler's results for this driver (`status.allocation.devices.results`), at least one.
    Results(Vec<DeviceResult>),
}

impl Default for Allocation {
    fn default() -> Self {
        Self::Results(Vec::new())
    }
}

/// A device that the scheduler allocated to a request of a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceResult {
    /// The request: its name, or `name/subrequest`.
    pub request: String,
    /// Name of the pool: the node's name, for a device of this driver.
    pub pool: String,
    /// Name of the device.
    pub device: String,
    /// Id of the claim's share, if the device has shares.
    pub share_id: Option<String>,
    /// Whether the claim may use the device beside its holder.
    pub admin_access: bool,
    /// The name of the claim in its pod, if the claim was made from a template.
    pub pod_claim_name: Option<String>,
}

/// Maximum number of results of a claim (`AllocationResultsMaxSize`).
const RESULTS_MAX: usize = 32;

/// Why a claim gives this driver no devices. The message is for the pod's event.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum ResultsError {
    #[error(
        "the claim was deleted, and another of this name has uid {found:?}: delete the pod so that its replacement uses it"
    )]
    Replaced {
        /// The uid of the other claim, truncated.
        found: String,
    },
    #[error(
        "the claim is not allocated (any more): delete the pod so that its replacement is scheduled again"
    )]
    NotAllocated,
    #[error(
        "the claim is reserved for no pod (any more): delete the pod so that its replacement is scheduled again"
    )]
    NotReserved,
    #[error("the claim's allocation has no device of driver {0}")]
    NoDevice(DriverName),
    #[error("the claim's allocation has {0} results; at most {RESULTS_MAX} are possible")]
    TooManyResults(usize),
    #[error("the claim's allocation names a request {0:?}, which is not a valid name")]
    Request(String),
    #[error(
        "the claim or its DeviceClass has opaque parameters for driver {0}, which takes none: remove `config` from the claim or the class, and \
         configure the kind of device instead"
    )]
    Parameters(DriverName),
}

impl ResultsError {
    /// CamelCase, from a small fixed set: a metric label.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::TooManyResults(_) | Self::Request(_) => "InvalidClaim",
            Self::Replaced { .. } => "ClaimGone",
            Self::NotAllocated | Self::NotReserved | Self::NoDevice(_) => "NotAllocated",
            Self::Parameters(_) => "InvalidParameters",
        }
    }
}

/// The results of a driver in the allocation of the claim with this uid.
pub fn results_of_claim(
    claim: ResourceClaim,
    uid: &str,
    driver: &DriverName,
) -> Result<Vec<DeviceResult>, ResultsError> {
    let found = claim.metadata.uid.as_deref().unwrap_or_default();
    if found != uid {
        return Err(ResultsError::Replaced { found: shown(found) });
    }
    let status = claim.status.unwrap_or_default();
    let devices = status
        .allocation
        .ok_or(ResultsError::NotAllocated)?
        .devices
        .unwrap_or_default();
    if status.reserved_for.is_none_or(|consumers| consumers.is_empty()) {
        return Err(ResultsError::NotReserved);
    }
    let results = devices.results.unwrap_or_default();
    if results.len() > RESULTS_MAX {
        return Err(ResultsError::TooManyResults(results.len()));
    }
    let mut configurations = devices.config.into_iter().flatten();
    if configurations.any(|config| {
        config
            .opaque
            .is_some_and(|opaque| opaque.driver == driver.as_str())
    }) {
        return Err(ResultsError::Parameters(driver.clone()));
    }
    let ours = results_of_driver(&results, driver, pod_claim_name(&claim.metadata));
    if ours.is_empty() {
        return Err(ResultsError::NoDevice(driver.clone()));
    }
    match ours.iter().find(|result| base_request(&result.request).is_none()) {
        Some(result) => Err(ResultsError::Request(shown(&result.request))),
        None => Ok(ours),
    }
}

/// The name of a claim in its pod, if the claim was made from a template.
pub fn pod_claim_name(claim: &ObjectMeta) -> Option<&str> {
    let annotations = claim.annotations.as_ref()?;
    annotations.get(POD_CLAIM_NAME_ANNOTATION).map(String::as_str)
}

/// The results of this driver.
pub fn results_of_driver(
    results: &[DeviceRequestAllocationResult],
    driver: &DriverName,
    pod_claim_name: Option<&str>,
) -> Vec<DeviceResult> {
    let ours = results.iter().filter(|result| result.driver == driver.as_str());
    let device = |result: &DeviceRequestAllocationResult| DeviceResult {
        request: result.request.clone(),
        pool: result.pool.clone(),
        device: result.device.clone(),
        share_id: result.share_id.clone(),
        admin_access: result.admin_access.unwrap_or_default(),
        pod_claim_name: pod_claim_name.map(str::to_owned),
    };
    ours.map(device).collect()
}

/// A claim in kubelet's Unprepare request, unvalidated. The claim may no longer exist in the API.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClaimToUnprepare {
    /// Namespace of the claim.
    pub namespace: String,
    /// Name of the claim.
    pub name: String,
    /// Uid of the claim: a UUID if the request is valid.
    pub uid: String,
}

/// The identity of this node, which a resource handle must match.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeIdentity {
    /// Name of the Node object.
    pub name: String,
    /// Uid of the Node object; `None` until the API server has reported it once.
    pub uid: Option<String>,
}

/// Why the node refuses a request. Each message is for the user who reads the pod's events.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum Refusal {
    #[error(transparent)]
    ClaimUid(#[from] ClaimUidError),
    #[error("{field} {value:?} of the claim is not a valid Kubernetes name")]
    ClaimName {
        /// `namespace` or `name`.
        field: &'static str,
        /// The invalid value, truncated.
        value: String,
    },
    #[error("{0}; only drayman's controller may write it")]
    Handle(#[from] HandleError),
    #[error(
        "the claim was allocated by structured parameters, which this driver does not support: use a ResourceClass without structuredParameters"
    )]
    StructuredParameters,
    #[error(
        "the resource handle is of claim uid {found:?}, not of {expected}: it was not written for this claim"
    )]
    OtherClaim { expected: String, found: String },
    #[error(
        "the devices were allocated on node {found:?}, this is node {expected:?}: delete the pod so that its replacement is scheduled again"
    )]
    OtherNode { expected: String, found: String },
    #[error(
        "the devices were allocated on an earlier node of this name (uid {found:?}, this one has {expected:?}): delete the pod and its claim so that their replacements are allocated again"
    )]
    EarlierNode { expected: String, found: String },
    #[error(
        "device {device:?} is of pool {pool:?}, this node's pool is {node:?}: the claim was allocated for another node; delete the pod so that its replacement is scheduled again"
    )]
    OtherPool {
        device: String,
        pool: String,
        node: String,
    },
    #[error("the uid of node {0:?} is not yet known; the companion keeps asking the API server")]
    NodeUnknown(String),
    #[error("the allocation names no device")]
    NoDevice,
    #[error("device {0:?} is named twice")]
    Twice(String),
    #[error(
        "device {0:?} is not on this node (any more): plug it in again, or delete the pod so that another is allocated"
    )]
    Gone(String),
    #[error(
        "device {device:?} is of kind {kind:?}, which this node's configuration gives to {given_to}, not to {asked_by}"
    )]
    WrongMode {
        device: String,
        kind: String,
        given_to: &'static str,
        asked_by: &'static str,
    },
    #[error("device {device:?} is unhealthy: {reason}")]
    Unhealthy { device: String, reason: String },
    #[error("device {device:?} is held by {holder} until it is unprepared")]
    Held { device: String, holder: String },
    #[error(
        "device {device:?} has {shares} shares, which are all held: by {holder} and others, until one is unprepared"
    )]
    AllShares {
        device: String,
        shares: u32,
        holder: String,
    },
    #[error(
        "device {device:?} has {shares} shares, and {needed} were allocated to the claim: the configuration has changed since; delete the pod so that its replacement is allocated again"
    )]
    TooFewShares {
        device: String,
        shares: u32,
        needed: usize,
    },
    #[error("device {device:?} is still in use by {holder}, until that container ends")]
    StillUsed { device: String, holder: String },
    #[error("device {device:?} may still be in use by a container: {problem}; kubelet asks again")]
    RuntimeUnavailable { device: String, problem: String },
    #[error(
        "device {device:?} is in use by {holder}, which got it as an extended resource; the claim can be prepared once that container has ended"
    )]
    InContainer { device: String, holder: String },
    #[error(
        "device {device:?} may be in use as an extended resource: kubelet's pod resources API gives no answer ({problem})"
    )]
    ContainersUnknown { device: String, problem: String },
    #[error("device {device:?} is allocated to {holder}, which does not use it yet")]
    Allocated { device: String, holder: String },
    #[error(
        "the checkpoint of this node was lost, and the devices of {holder} are not known yet: the API server is asked; if it does not know them and no container uses the claim, run `drayman node release {uid}` on the node"
    )]
    UnknownDevices { holder: String, uid: String },
    #[error(
        "the claim is prepared with {held}, but its allocation now names {named}: it must be unprepared first"
    )]
    Changed { held: String, named: String },
    #[error(transparent)]
    SamePath(#[from] PathConflict),
    #[error("this node has no extended resource {0:?}")]
    NoResource(String),
    #[error("device {device:?} does not belong to the extended resource {resource:?}")]
    OtherResource { device: String, resource: String },
}

impl Refusal {
    /// The error for a claim whose devices are unknown.
    pub(super) fn unknown_devices(uid: &ClaimUid, entry: &Entry) -> Self {
        Self::UnknownDevices {
            holder: entry.describe(uid),
            uid: uid.to_string(),
        }
    }

    /// CamelCase, from a small fixed set: a metric label and log field, and the beginning of the message in the event of the pod.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::ClaimUid(_) | Self::ClaimName { .. } => "InvalidClaim",
            Self::Handle(_)
            | Self::StructuredParameters
            | Self::OtherClaim { .. }
            | Self::NoDevice
            | Self::Twice(_) => "InvalidHandle",
            Self::OtherNode { .. } | Self::OtherPool { .. } | Self::EarlierNode { .. } => "WrongNode",
            Self::NodeUnknown(_) => "NodeUnknown",
            Self::Gone(_) => "DeviceGone",
            Self::WrongMode { .. } => "WrongMode",
            Self::Unhealthy { .. } => "DeviceUnhealthy",
            Self::Held { .. }
            | Self::AllShares { .. }
            | Self::StillUsed { .. }
            | Self::InContainer { .. }
            | Self::Allocated { .. } => "DeviceHeld",
            Self::RuntimeUnavailable { .. } => "ContainerRuntimeUnavailable",
            Self::ContainersUnknown { .. } => "PodResourcesUnavailable",
            Self::UnknownDevices { .. } => "HoldingsUnknown",
            Self::Changed { .. } | Self::TooFewShares { .. } => "AllocationChanged",
            Self::SamePath(_) => "ContainerPathTaken",
            Self::NoResource(_) | Self::OtherResource { .. } => "InvalidResource",
        }
    }

    /// Whether the request itself is invalid, so that it can never succeed on this node.
    pub fn is_invalid_request(&self) -> bool {
        matches!(
            self,
            Self::ClaimUid(_)
                | Self::ClaimName { .. }
                | Self::Handle(_)
                | Self::StructuredParameters
                | Self::OtherClaim { .. }
                | Self::OtherNode { .. }
                | Self::OtherPool { .. }
                | Self::NoDevice
                | Self::Twice(_)
                | Self::NoResource(_)
                | Self::OtherResource { .. }
        )
    }
}

/// Maximum length, in characters, of foreign text quoted in an error.
const SHOWN_MAX: usize = 64;

fn check_name(field: &'static str, value: &str, rule: impl Fn(&str) -> bool) -> Result<(), Refusal> {
    if rule(value) {
        Ok(())
    } else {
        Err(Refusal::ClaimName {
            field,
            value: shown(value),
        })
    }
}

fn check_handle(handle: &DeviceHandle, uid: &ClaimUid, node: &NodeIdentity) -> Result<(), Refusal> {
    if handle.claim_uid != uid.as_str() {
        return Err(Refusal::OtherClaim {
            expected: uid.to_string(),
            found: shown(&handle.claim_uid),
        });
    }
    if handle.node_name != node.name {
        return Err(Refusal::OtherNode {
            expected: node.name.clone(),
            found: shown(&handle.node_name),
        });
    }
    let node_uid = node
        .uid
        .as_ref()
        .ok_or_else(|| Refusal::NodeUnknown(node.name.clone()))?;
    if handle.node_uid != *node_uid {
        return Err(Refusal::EarlierNode {
            expected: node_uid.clone(),
            found: shown(&handle.node_uid),
        });
    }
    if handle.devices.is_empty() {
        Err(Refusal::NoDevice)
    } else {
        Ok(())
    }
}

pub(super) fn distinct<'a>(names: impl Iterator<Item = &'a str>) -> Result<Vec<&'a str>, Refusal> {
    let mut seen = BTreeSet::new();
    names
        .map(|name| {
            if seen.insert(name) {
                Ok(name)
            } else {
                Err(Refusal::Twice(shown(name)))
            }
        })
        .collect()
}

/// Looks up a device and checks that its mode permits the requested API. `asked_by` is the mode that permits this API alone.
pub(super) fn offered<'a>(inventory: &'a Devices, name: &str, asked_by: Mode) -> Result<&'a Device, Refusal> {
    let device = inventory.get(name).ok_or_else(|| Refusal::Gone(shown(name)))?;
    let may_leave = match asked_by {
        Mode::Claims => device.mode.serves_claims(),
        Mode::ExtendedResource => device.mode.serves_extended_resource(),
        Mode::Both | Mode::Unknown => false,
    };
    if !may_leave {
        return Err(Refusal::WrongMode {
            device: name.to_owned(),
            kind: device.kind.clone(),
            given_to: api(device.mode),
            asked_by: api(asked_by),
        });
    }
    Ok(device)
}

/// Refuses a device that is unhealthy.
pub(super) fn check_health(device: &Device) -> Result<(), Refusal> {
    match &device.unhealthy {
        Some(reason) => Err(Refusal::Unhealthy {
            device: device.name.clone(),
            reason: reason.clone(),
        }),
        None => Ok(()),
    }
}

fn api(mode: Mode) -> &'static str {
    match mode {
        Mode::Claims => "resource claims",
        Mode::ExtendedResource => "an extended resource",
        Mode::Both => "resource claims and an extended resource",
        Mode::Unknown => "an API that this release does not know",
    }
}

/// Truncates foreign text for an error message: handles are untrusted input of any length.
fn shown(text: &str) -> String {
    text.chars().take(SHOWN_MAX).collect()
}

fn list<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    names.into_iter().map(shown).collect::<Vec<_>>().join(", ")
}

/// One idempotent action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlanStep {
    /// Applies these changes together and stores the checkpoint durably. Without changes, stores the present state. Writes nothing if the
    /// checkpoint is up to date.
    Save(Vec<ClaimChange>),
    /// Calls the node's driver for the claim's container edits, which also checks that the devices exist, and records them.
    Prepare(ClaimUid),
    /// Updates the claim's CDI file from its record. Writes nothing if it is up to date.
    WriteCdi(ClaimUid),
    /// Removes the claim's CDI file, if it exists.
    RemoveCdi(ClaimUid),
    /// Calls the node's driver to revert its work for the claim, even if it may have done none.
    Unprepare(ClaimUid),
}

/// Storage for the checkpoint and the CDI files. Each call either completes durably, so that the result outlives this process, or fails.
pub trait Storage {
    /// Why storing failed.
    type Error;

    /// Stores the prepared claims in the checkpoint.
    fn save(&self, prepared_claims: &PreparedClaims) -> Result<(), Self::Error>;

    /// Stores the container edits of a claim, which the driver has made.
    fn write_cdi(&self, uid: &ClaimUid, entry: &Entry) -> Result<(), Self::Error>;

    /// Removes the file of [`Storage::write_cdi`], if it exists.
    fn remove_cdi(&self, uid: &ClaimUid) -> Result<(), Self::Error>;
}

impl PlanStep {
    /// Performs the step, unless it is one for the driver. Returns the new prepared claims if the step changes them. If storing fails,
    /// nothing changes.
    pub fn perform<S: Storage>(
        &self,
        prepared_claims: &PreparedClaims,
        storage: &S,
    ) -> Result<Option<PreparedClaims>, S::Error> {
        match self {
            Self::Save(changes) if changes.is_empty() => storage.save(prepared_claims)?,
            Self::Save(changes) => {
                let mut next = prepared_claims.clone();
                for change in changes {
                    next.apply(change);
                }
                storage.save(&next)?;
                return Ok(Some(next));
            }
            Self::WriteCdi(uid) => {
                let entry = prepared_claims.entry(uid);
                if let Some(entry) = entry.filter(|entry| entry.container_edits().is_some()) {
                    storage.write_cdi(uid, entry)?;
                }
            }
            Self::RemoveCdi(uid) => storage.remove_cdi(uid)?,
            Self::Prepare(_) | Self::Unprepare(_) => {}
        }
        Ok(None)
    }
}

/// Pause before the first retry; it doubles with each failure.
const FIRST: Duration = Duration::from_secs(1);
/// Maximum pause.
const MAX_PAUSE: Duration = Duration::from_secs(60);

/// The missing files.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Missing {
    /// The CDI file of a claim.
    OfClaim(ClaimUid),
    /// CDI files of devices that the device plugin API passes by name.
    OfDevices,
}

/// The missing files, each with the time of its next retry. Times are since any fixed moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Retries(BTreeMap<Missing, ScheduledRetry>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ScheduledRetry {
    pause: Duration,
    due: Duration,
}

impl Retries {
    /// Schedules a retry after a failed write.
    pub fn failed(&mut self, missing: Missing, now: Duration) {
        let before = self.0.get(&missing);
        let pause = before.map_or(FIRST, |retry| retry.pause.saturating_mul(2).min(MAX_PAUSE));
        let due = now.saturating_add(pause);
        self.0.insert(missing, ScheduledRetry { pause, due });
    }

    /// Makes the retries of all claims due.
    pub fn expedite(&mut self, now: Duration) {
        for (missing, retry) in &mut self.0 {
            if matches!(missing, Missing::OfClaim(_)) {
                retry.due = retry.due.min(now);
            }
        }
    }

    /// Removes a file that was written or is no longer needed. Returns whether it was missing.
    pub fn done(&mut self, missing: &Missing) -> bool {
        self.0.remove(missing).is_some()
    }

    /// Whether a retry is scheduled.
    pub fn has(&self, missing: &Missing) -> bool {
        self.0.contains_key(missing)
    }

    /// The files whose retry is due; the one that has been due for the longest time comes first.
    pub fn due(&self, now: Duration) -> Vec<Missing> {
        let mut due: Vec<_> = self.0.iter().filter(|(_, retry)| retry.due <= now).collect();
        due.sort_by_key(|(_, retry)| retry.due);
        due.into_iter().map(|(missing, _)| missing.clone()).collect()
    }

    /// The time of the next retry.
    pub fn next(&self) -> Option<Duration> {
        self.0.values().map(|retry| retry.due).min()
    }
}

#[cfg(test)]
mod tests;
