//! ResourceSlices (`resource.k8s.io/v1`) of a node: desired devices and observed slices in, one write at a time out.
//!
//! A scheduler considers the slices of a pool's highest generation, and allocates from them only if their number is
//! the `spec.pool.resourceSliceCount` of each, and no device is in two of them. The rules:
//!
//! * A slice has a fixed name, so a repeated create cannot make a second one.
//! * A device stays in its slice. A device that comes, goes or changes is one write, and the pool is complete before and after it. Slices
//!   that change independently need no new generation: each write alone is a valid change of the pool.
//! * Only a different number of slices, or a device that moves to another slice, needs a new generation in all slices. From its first write
//!   to its last, the pool is incomplete. So each change that needs no new generation is stored before, and then the writes that are most
//!   likely to be rejected: while one of these is, the stored generation stays complete.
//! * A rejected write does not hold up the changes that need no new generation. A rejected deletion holds up only a new generation that
//!   needs the slice's name.
//! * Stale input is safe: each replacement and deletion names the version it is for, and a conflict is resolved by reading the object.

mod render;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::resource::v1::{Device, ResourcePool, ResourceSlice, ResourceSliceSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};

use crate::api::crd::Devices;
use crate::core::names::short_hash;
pub use render::{Features, Omission, Omitted, SHARES};
use render::{has_shares, render};

/// Slices of a node, at most. A name has two digits. The 1,024 devices that discovery finds at most fill 16 slices.
const SLICES_MAX: usize = 100;
/// Length of an object name, at most.
const NAME_MAX: usize = 253;

/// Identity of a node's pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodePool {
    pub driver: String,
    /// Name of the Node, and of the pool.
    pub node_name: String,
    /// Uid of the Node, which owns the slices.
    pub node_uid: String,
}

/// A request to the API server.
#[derive(Clone, Debug, PartialEq)]
pub enum Write {
    Create(Box<ResourceSlice>),
    /// Replaces the slice with this resource version.
    Replace(Box<ResourceSlice>),
    /// Deletes the slice with this uid and resource version.
    Delete {
        name: String,
        uid: String,
        resource_version: String,
    },
}

impl Write {
    pub fn name(&self) -> &str {
        match self {
            Self::Create(slice) | Self::Replace(slice) => slice.metadata.name.as_deref().unwrap_or_default(),
            Self::Delete { name, .. } => name,
        }
    }
}

/// A difference between a slice as written and as stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Altered {
    /// The API server dropped taints: the gate DRADeviceTaints is off.
    TaintsDropped,
    /// The API server dropped shares: the gate DRAConsumableCapacity is off.
    SharesDropped,
    /// Something else changed the slice, such as an admission webhook. The stored form is kept.
    Otherwise,
}

/// A slice that the API server stored in a form that differs from the desired one.
#[derive(Debug)]
struct Accepted {
    desired: ResourceSlice,
    stored: ResourceSlice,
}

/// The slices of one pool.
#[derive(Debug)]
pub struct Slices {
    pool: NodePool,
    /// The features that were set.
    offered: Features,
    /// The features that were set, without those that the API server dropped.
    features: Features,
    source: Arc<Devices>,
    devices: Vec<Device>,
    omitted: Vec<Omitted>,
    /// All slices of this driver and node, by name; `None` until they were listed.
    observed: Option<BTreeMap<String, ResourceSlice>>,
    /// Highest generation that was observed. It survives the deletion of all slices.
    generation: i64,
    accepted: BTreeMap<String, Accepted>,
    /// Writes that the API server rejected, by the name of the slice.
    rejected: BTreeMap<String, Write>,
}

/// The order of writes: one of the lowest rank is next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    /// An obsolete slice, or a slice of this generation with wrong content. These writes do not depend on each other, and once the last
    /// slice is written, the pool is complete.
    Independent,
    /// A rejected write. Those of the following ranks wait for it.
    Rejected,
    /// A new slice or a slice of an earlier generation, whose last write was rejected.
    RejectedBefore,
    New,
    EarlierGeneration,
    /// A rejected deletion, or that of a slice which schedulers ignore or the stored generation still needs.
    LastDeletion,
}

impl Slices {
    /// A pool without devices whose slices were not listed yet.
    pub fn new(pool: NodePool, features: Features) -> Self {
        Self {
            pool,
            offered: features,
            features,
            source: Arc::default(),
            devices: Vec::new(),
            omitted: Vec::new(),
            observed: None,
            generation: 0,
            accepted: BTreeMap::new(),
            rejected: BTreeMap::new(),
        }
    }

    pub fn set_devices(&mut self, devices: Arc<Devices>) {
        self.source = devices;
        self.render();
    }

    /// Sets the uid of the Node, which differs after the Node was deleted and created again.
    pub fn set_node_uid(&mut self, uid: String) {
        self.pool.node_uid = uid;
    }

    /// Sets the features, for instance after an upgrade of the API server. Unless they differ, dropped features stay dropped.
    pub fn set_features(&mut self, features: Features) {
        if features != self.offered {
            self.offered = features;
            self.features = features;
            self.accepted.clear();
            self.render();
        }
    }

    /// A slice for a dry run, which tells whether the API server still drops features. It has one device for each dropped feature; `None`
    /// if no device needs one. A real write would offer an unhealthy device without its taint until the next write.
    pub fn probe(&self) -> Option<ResourceSlice> {
        if self.features == self.offered {
            return None;
        }
        let (devices, _) = render(&self.source, self.offered);
        let first = |why: Omission| {
            let omitted = self.omitted.iter().find(|omitted| omitted.why == why)?;
            devices.iter().find(|device| device.name == omitted.device)
        };
        let devices: Vec<&Device> = Omission::ALL.into_iter().filter_map(first).collect();
        // No slice has the last name.
        (!devices.is_empty()).then(|| self.slice(&self.name(SLICES_MAX - 1), 1, 1, devices))
    }

    /// Observes the answer to a dry run of [`Self::probe`]. Features that it has are published again. Returns whether
    /// there are any.
    pub fn probed(&mut self, answer: &ResourceSlice) -> bool {
        let keeps = |has: fn(&Device) -> bool| devices_of(answer).iter().any(has);
        let features = Features {
            taints: self.features.taints || keeps(has_taints),
            shares: self.features.shares || keeps(has_shares),
        };
        let is_news = features != self.features;
        if is_news {
            self.features = features;
            self.render();
        }
        is_news
    }

    /// Whether a written slice is stored with the pool of the write.
    pub fn has_pool_of(&self, write: &Write) -> bool {
        let (Write::Create(written) | Write::Replace(written)) = write else {
            return true;
        };
        self.stored().any(|stored| {
            stored.metadata.name == written.metadata.name && stored.spec.pool == written.spec.pool
        })
    }

    /// Devices that are not published, and why.
    pub fn omitted(&self) -> &[Omitted] {
        &self.omitted
    }

    pub fn stored(&self) -> impl Iterator<Item = &ResourceSlice> {
        let observed = self.observed.iter().flat_map(BTreeMap::values);
        observed.filter(|slice| slice.spec.pool.name == self.pool.node_name)
    }

    /// Whether a slice belongs to this driver and node.
    pub fn owns(&self, slice: &ResourceSlice) -> bool {
        slice.spec.driver == self.pool.driver && slice.spec.node_name.as_ref() == Some(&self.pool.node_name)
    }

    fn render(&mut self) {
        (self.devices, self.omitted) = render(&self.source, self.features);
    }

    /// Replaces the observed slices by a complete list. Returns the names of known slices that it lacks: the list may be older than our last
    /// write, so each of them must be read before the next one.
    pub fn listed(&mut self, slices: impl IntoIterator<Item = ResourceSlice>) -> Vec<String> {
        let known = self.observed.take().unwrap_or_default();
        let mut observed = BTreeMap::new();
        for slice in slices {
            let name = slice.metadata.name.clone().unwrap_or_default();
            let slice = match known.get(&name) {
                Some(known) if is_older(&slice, known) => known.clone(),
                _ => slice,
            };
            observed.insert(name, slice);
        }
        let missing = known.into_keys().filter(|name| !observed.contains_key(name));
        let missing = missing.collect();
        self.observed = Some(BTreeMap::new());
        for slice in observed.into_values() {
            self.applied(slice);
        }
        missing
    }

    /// Observes a slice, from a watch or from an answer. Older versions are ignored.
    pub fn applied(&mut self, mut slice: ResourceSlice) {
        if !self.owns(&slice) {
            return;
        }
        let Some(observed) = &mut self.observed else {
            return;
        };
        let name = slice.metadata.name.clone().unwrap_or_default();
        if observed.get(&name).is_some_and(|known| is_older(&slice, known)) {
            return;
        }
        slice.metadata.managed_fields = None;
        if slice.spec.pool.name == self.pool.node_name {
            // Nothing follows the last generation; a foreign slice with it is deleted.
            let generation = slice.spec.pool.generation;
            if generation < i64::MAX {
                self.generation = self.generation.max(generation);
            }
        }
        observed.insert(name, slice);
    }

    /// Observes the deletion of a slice. The deletion of an earlier slice of the same name is ignored.
    pub fn deleted(&mut self, slice: &ResourceSlice) {
        let name = slice.metadata.name.as_deref().unwrap_or_default();
        let Some(observed) = &mut self.observed else {
            return;
        };
        if observed
            .get(name)
            .is_some_and(|known| known.metadata.uid == slice.metadata.uid)
        {
            observed.remove(name);
        }
    }

    /// Observes that no slice has this name.
    pub fn absent(&mut self, name: &str) {
        if let Some(observed) = &mut self.observed {
            observed.remove(name);
        }
    }

    /// Observes the successful answer to a write; returns how the stored slice differs from the written one. `stored` is the slice after
    /// the write: for a deletion, one that finalizers of others keep.
    pub fn written(&mut self, write: &Write, stored: Option<ResourceSlice>) -> BTreeSet<Altered> {
        let mut altered = BTreeSet::new();
        self.rejected.remove(write.name());
        match (write, stored) {
            (Write::Delete { .. }, Some(stored)) => self.applied(stored),
            (Write::Delete { name, uid, .. }, None) => {
                let known = self.observed.as_ref().and_then(|observed| observed.get(name));
                if known.is_some_and(|known| known.metadata.uid.as_ref() == Some(uid)) {
                    self.absent(name);
                }
            }
            (Write::Create(desired) | Write::Replace(desired), Some(stored)) => {
                altered = self.compare(desired, &stored);
                self.applied(stored);
            }
            (Write::Create(_) | Write::Replace(_), None) => {}
        }
        altered
    }

    /// Observes that the API server rejects a write. If it rejected that before, the other rejected writes may be tried again, too:
    /// otherwise the first of them would always be the one that is tried.
    pub fn rejected(&mut self, write: &Write) {
        if self.is_rejected(write) {
            self.rejected.clear();
        }
        self.rejected.insert(write.name().to_owned(), write.clone());
    }

    /// Whether the API server rejected this content of the slice, or its deletion.
    pub fn is_rejected(&self, write: &Write) -> bool {
        match (self.rejected.get(write.name()), write) {
            (
                Some(Write::Create(rejected) | Write::Replace(rejected)),
                Write::Create(slice) | Write::Replace(slice),
            ) => same_content(rejected, slice),
            (Some(Write::Delete { uid: rejected, .. }), Write::Delete { uid, .. }) => rejected == uid,
            _ => false,
        }
    }

    fn compare(&mut self, desired: &ResourceSlice, stored: &ResourceSlice) -> BTreeSet<Altered> {
        let mut altered = BTreeSet::new();
        let name = desired.metadata.name.clone().unwrap_or_default();
        if same_content(desired, stored) && desired.spec.pool == stored.spec.pool {
            self.accepted.remove(&name);
            return altered;
        }
        let lost = |has: fn(&Device) -> bool| {
            let mut pairs = devices_of(desired).iter().zip(devices_of(stored));
            pairs.any(|(desired, stored)| desired.name == stored.name && has(desired) && !has(stored))
        };
        if lost(has_taints) {
            self.features.taints = false;
            altered.insert(Altered::TaintsDropped);
        }
        if lost(has_shares) {
            self.features.shares = false;
            altered.insert(Altered::SharesDropped);
        }
        if altered.is_empty() {
            altered.insert(Altered::Otherwise);
            let (desired, stored) = (desired.clone(), stored.clone());
            self.accepted.insert(name, Accepted { desired, stored });
        } else {
            self.render();
        }
        altered
    }

    /// The next write; `None` if the stored slices are as desired, or are not known.
    pub fn next(&self) -> Option<Write> {
        let observed = self.observed.as_ref()?;
        let layout: BTreeMap<String, Vec<&Device>> = self
            .layout(observed)
            .into_iter()
            .enumerate()
            .map(|(index, devices)| (self.name(index), devices))
            .collect();
        let is_desired = |slice: &ResourceSlice| {
            let name = slice.metadata.name.as_ref();
            let pool = &slice.spec.pool;
            pool.name == self.pool.node_name
                && pool.generation < i64::MAX
                && name.is_some_and(|name| layout.contains_key(name))
        };
        let count = i64::try_from(layout.len()).unwrap_or(i64::MAX);
        let current: Vec<&ResourceSlice> = self
            .stored()
            .filter(|slice| slice.spec.pool.generation == self.generation)
            .collect();
        let resized = current
            .iter()
            .any(|slice| slice.spec.pool.resource_slice_count != count || !is_desired(slice));
        let is_complete = current.len() == layout.len();
        let generation = if resized || (is_complete && has_moved(&current, &layout)) {
            self.generation.saturating_add(1)
        } else {
            self.generation.max(1)
        };

        // Whether schedulers use the stored generation.
        let is_usable = current.iter().any(|slice| is_desired(slice))
            && current
                .iter()
                .all(|slice| i64::try_from(current.len()) == Ok(slice.spec.pool.resource_slice_count));

        let is_obsolete = |slice: &&ResourceSlice| !is_desired(slice);
        // A slice with finalizers stays until they are removed.
        let is_deletable = |slice: &&ResourceSlice| slice.metadata.deletion_timestamp.is_none();
        let is_older = |slice: &ResourceSlice| {
            let pool = &slice.spec.pool;
            pool.name == self.pool.node_name && pool.generation < self.generation
        };
        let deletion = |slice: &ResourceSlice| {
            let write = delete(slice);
            let is_needed = is_usable && current.contains(&slice);
            let is_last = is_older(slice) || is_needed || self.is_rejected(&write);
            let rank = if is_last {
                Rank::LastDeletion
            } else {
                Rank::Independent
            };
            (rank, write)
        };
        let obsolete = || observed.values().filter(is_obsolete).filter(is_deletable);
        let mut next: Option<(Rank, Write)> = obsolete().map(deletion).min_by_key(|(rank, _)| *rank);
        for (name, devices) in &layout {
            let slice = self.slice(name, generation, count, devices.clone());
            let (rank, write) = match observed.get(name) {
                // In the way until it is deleted.
                Some(stored) if is_obsolete(&stored) && is_deletable(&stored) => {
                    (Rank::Independent, delete(stored))
                }
                Some(stored) if stored.spec.pool == slice.spec.pool && self.is_current(stored, &slice) => {
                    continue;
                }
                Some(stored) if stored.spec.pool.generation == generation => {
                    (Rank::Independent, replace(slice, stored))
                }
                Some(stored) => (Rank::EarlierGeneration, replace(slice, stored)),
                None => (Rank::New, Write::Create(Box::new(slice))),
            };
            let rank = match rank {
                _ if self.is_rejected(&write) => Rank::Rejected,
                Rank::New | Rank::EarlierGeneration if self.rejected.contains_key(name) => {
                    Rank::RejectedBefore
                }
                rank => rank,
            };
            if next.as_ref().is_none_or(|(best, _)| rank < *best) {
                next = Some((rank, write));
            }
        }
        let (_, write) = next?;
        let is_held = self.is_rejected(&write);
        // Slices that schedulers ignore do not wait for a rejected write.
        let older = obsolete().filter(|slice| is_held && is_older(slice));
        let older = older.map(delete).find(|deletion| !self.is_rejected(deletion));
        if older.is_some() || !is_usable || generation <= self.generation {
            return older.or(Some(write));
        }
        // Before a new generation, and while a rejected write holds it up, the devices of the stored one change in their slices.
        let due = current.iter().copied();
        let due = due.filter(|stored| is_held || is_desired(stored));
        let update = self.next_update(&current, due, &layout);
        update.or(Some(write))
    }

    /// The next update of the stored generation, in one of the slices that are due.
    fn next_update<'a>(
        &self,
        current: &[&ResourceSlice],
        mut due: impl Iterator<Item = &'a ResourceSlice>,
        layout: &BTreeMap<String, Vec<&Device>>,
    ) -> Option<Write> {
        let published: BTreeSet<&str> = current
            .iter()
            .flat_map(|slice| devices_of(slice))
            .map(|device| device.name.as_str())
            .collect();
        due.find_map(|stored| {
            let desired = stored.metadata.name.as_ref().and_then(|name| layout.get(name));
            let desired = desired.into_iter().flatten().copied();
            let new = desired.filter(|device| !published.contains(device.name.as_str()));
            self.update(stored, new.collect())
        })
    }

    /// Brings the devices of a stored slice up to date, and adds new ones if there is room; `None` if it is up to date, or if its last write
    /// was rejected.
    fn update(&self, stored: &ResourceSlice, new: Vec<&Device>) -> Option<Write> {
        let name = stored.metadata.name.as_deref()?;
        let pool = &stored.spec.pool;
        let names: BTreeSet<&str> = devices_of(stored)
            .iter()
            .map(|device| device.name.as_str())
            .collect();
        let devices = self.devices.iter();
        let mut devices: Vec<&Device> = devices
            .filter(|device| names.contains(device.name.as_str()))
            .collect();
        let room = self.offered.devices_per_slice();
        if devices.len() + new.len() <= room {
            devices.extend(new);
            devices.sort_unstable_by(|one, other| one.name.cmp(&other.name));
        } else if devices.len() > room {
            // A slice from before taints were possible: with one, it has less room.
            devices.retain(|device| !has_taints(device));
        }
        let slice = self.slice(name, pool.generation, pool.resource_slice_count, devices);
        let is_due = !self.rejected.contains_key(name) && !self.is_current(stored, &slice);
        is_due.then(|| replace(slice, stored))
    }

    /// Distributes the devices. A device stays in the slice that has it; others fill the first slices with room. One empty slice at the
    /// end stays, so that a single device that comes and goes does not change the number of slices each time. The devices are distributed
    /// anew only if most slices are no longer needed. A dropped feature does not change the layout, since it may return.
    fn layout<'a>(&'a self, observed: &BTreeMap<String, ResourceSlice>) -> Vec<Vec<&'a Device>> {
        let room = self.offered.devices_per_slice();
        let mut stored: Vec<&[Device]> = Vec::new();
        for index in 0..SLICES_MAX {
            let slice = observed.get(&self.name(index));
            if let Some(slice) = slice.filter(|slice| slice.spec.pool.name == self.pool.node_name) {
                stored.resize(index, &[]);
                stored.push(devices_of(slice));
            }
        }
        let needed = self.devices.len().div_ceil(room).max(1);
        if stored.len() > 2 * needed + 1 {
            stored.clear();
        }
        let mut rest: BTreeMap<&str, &Device> = self
            .devices
            .iter()
            .map(|device| (device.name.as_str(), device))
            .collect();
        let mut slices: Vec<Vec<&Device>> = Vec::new();
        for devices in stored {
            let mut kept = Vec::new();
            for device in devices {
                if kept.len() < room {
                    kept.extend(rest.remove(device.name.as_str()));
                }
            }
            slices.push(kept);
        }
        let mut free = 0;
        for device in rest.into_values() {
            while slices.get(free).is_some_and(|slice| slice.len() >= room) {
                free += 1;
            }
            match slices.get_mut(free) {
                Some(slice) => slice.push(device),
                None => slices.push(vec![device]),
            }
        }
        let used = slices
            .iter()
            .rposition(|slice| !slice.is_empty())
            .map_or(0, |last| last + 1);
        slices.truncate(used + 1);
        if slices.is_empty() {
            slices.push(Vec::new());
        }
        for slice in &mut slices {
            slice.sort_unstable_by(|one, other| one.name.cmp(&other.name));
        }
        slices
    }

    fn name(&self, index: usize) -> String {
        let NodePool {
            driver, node_name, ..
        } = &self.pool;
        let name = format!("{node_name}.{driver}-{index:02}");
        if name.len() <= NAME_MAX {
            return name;
        }
        // Only node names of more than 185 characters. They are ASCII.
        let hash = short_hash(node_name);
        let kept = NAME_MAX.saturating_sub(hash.len() + driver.len() + "-.-00".len());
        let start = node_name.get(..kept).unwrap_or_default();
        let start = start.trim_end_matches(['-', '.']);
        format!("{start}-{hash}.{driver}-{index:02}")
    }

    fn is_current(&self, stored: &ResourceSlice, desired: &ResourceSlice) -> bool {
        let accepted = desired
            .metadata
            .name
            .as_ref()
            .and_then(|name| self.accepted.get(name));
        same_content(stored, desired)
            || accepted.is_some_and(|accepted| {
                same_content(&accepted.desired, desired) && same_content(&accepted.stored, stored)
            })
    }

    fn owner(&self) -> OwnerReference {
        OwnerReference {
            api_version: "v1".to_owned(),
            kind: "Node".to_owned(),
            name: self.pool.node_name.clone(),
            uid: self.pool.node_uid.clone(),
            controller: Some(true),
            ..OwnerReference::default()
        }
    }

    fn slice(&self, name: &str, generation: i64, count: i64, devices: Vec<&Device>) -> ResourceSlice {
        ResourceSlice {
            metadata: ObjectMeta {
                name: Some(name.to_owned()),
                owner_references: Some(vec![self.owner()]),
                ..ObjectMeta::default()
            },
            spec: ResourceSliceSpec {
                driver: self.pool.driver.clone(),
                node_name: Some(self.pool.node_name.clone()),
                pool: ResourcePool {
                    name: self.pool.node_name.clone(),
                    generation,
                    resource_slice_count: count,
                },
                devices: (!devices.is_empty()).then(|| devices.into_iter().cloned().collect()),
                ..ResourceSliceSpec::default()
            },
        }
    }
}

/// Replaces a stored slice. Labels and annotations of others stay.
fn replace(mut slice: ResourceSlice, stored: &ResourceSlice) -> Write {
    keep_taint_times(
        slice.spec.devices.as_deref_mut().unwrap_or_default(),
        devices_of(stored),
    );
    slice.metadata = ObjectMeta {
        owner_references: slice.metadata.owner_references,
        ..stored.metadata.clone()
    };
    Write::Replace(Box::new(slice))
}

fn delete(slice: &ResourceSlice) -> Write {
    let metadata = slice.metadata.clone();
    Write::Delete {
        name: metadata.name.unwrap_or_default(),
        uid: metadata.uid.unwrap_or_default(),
        resource_version: metadata.resource_version.unwrap_or_default(),
    }
}

fn devices_of(slice: &ResourceSlice) -> &[Device] {
    slice.spec.devices.as_deref().unwrap_or_default()
}

/// Whether a stored device is desired in another slice, and not in the one that has it.
fn has_moved(stored: &[&ResourceSlice], desired: &BTreeMap<String, Vec<&Device>>) -> bool {
    let homes: BTreeMap<&str, &str> = desired
        .iter()
        .flat_map(|(slice, devices)| {
            devices
                .iter()
                .map(move |device| (device.name.as_str(), slice.as_str()))
        })
        .collect();
    stored.iter().any(|slice| {
        let name = slice.metadata.name.as_deref();
        let moves = |device: &Device| {
            homes
                .get(device.name.as_str())
                .is_some_and(|home| Some(*home) != name)
        };
        devices_of(slice).iter().any(moves)
    })
}

/// Whether two slices are equal, except for their version and pool.
fn same_content(one: &ResourceSlice, other: &ResourceSlice) -> bool {
    let (a, b) = (&one.spec, &other.spec);
    one.metadata.owner_references == other.metadata.owner_references
        && (&a.driver, &a.node_name, &a.all_nodes, &a.node_selector)
            == (&b.driver, &b.node_name, &b.all_nodes, &b.node_selector)
        && (&a.per_device_node_selection, &a.shared_counters)
            == (&b.per_device_node_selection, &b.shared_counters)
        && same_devices(devices_of(one), devices_of(other))
}

fn has_taints(device: &Device) -> bool {
    device.taints.as_ref().is_some_and(|taints| !taints.is_empty())
}

/// Whether two lists of devices are equal. The time of a taint is set by the API server and not compared.
fn same_devices(one: &[Device], other: &[Device]) -> bool {
    let timeless = |device: &Device| {
        let mut device = device.clone();
        device.taints = device.taints.filter(|taints| !taints.is_empty());
        for taint in device.taints.iter_mut().flatten() {
            taint.time_added = None;
        }
        device
    };
    let same = |(one, other): (&Device, &Device)| one == other || timeless(one) == timeless(other);
    one.len() == other.len() && one.iter().zip(other).all(same)
}

/// Copies the times of taints that stay.
fn keep_taint_times(devices: &mut [Device], stored: &[Device]) {
    for device in devices.iter_mut().filter(|device| has_taints(device)) {
        let Some(stored) = stored.iter().find(|stored| stored.name == device.name) else {
            continue;
        };
        for taint in device.taints.iter_mut().flatten() {
            let same = stored.taints.iter().flatten().find(|stored| {
                stored.key == taint.key && stored.effect == taint.effect && stored.value == taint.value
            });
            taint.time_added = same.and_then(|stored| stored.time_added.clone());
        }
    }
}

/// Whether `slice` is an older version of `known`. Versions of one kind of object are ordered numbers (KEP-5504); unless both are, the slice
/// counts as newer, which costs at most a conflict.
fn is_older(slice: &ResourceSlice, known: &ResourceSlice) -> bool {
    let version = |slice: &ResourceSlice| slice.metadata.resource_version.as_ref()?.parse::<u128>().ok();
    matches!((version(slice), version(known)), (Some(slice), Some(known)) if slice < known)
}

#[cfg(test)]
mod tests;
