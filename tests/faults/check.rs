//! Invariants that can be checked from outside: in stored objects and in the devices of containers.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use drayman::api::handle::DeviceHandle;
use drayman::testcluster::api::{ApiServer, ClusterMode, ObjectChange};
use drayman::testcluster::kubelet::Kubelet;
use serde_json::Value;

pub(crate) const DRIVER: &str = "drayman.dev";
const FINALIZER: &str = "drayman.dev/deletion-protection";
const NODE_LABEL: &str = "drayman.dev/node";
/// Class of another driver, and name of the pod entry with a claim of that class.
pub(crate) const FOREIGN: &str = "foreign";

/// Namespace and name.
type Key = (String, String);

/// Checks every change once, in order.
pub(crate) struct Checker {
    server: ApiServer,
    /// `None` if there is no node.
    kubelet: Option<Kubelet>,
    version: u64,
    objects: BTreeMap<(String, Key), Value>,
    /// All nodes ever named by the scheduler, by uid of the context.
    offered: BTreeMap<String, BTreeSet<String>>,
    pub(crate) violations: Vec<String>,
}

pub(crate) fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    object
        .pointer(pointer)
        .and_then(Value::as_str)
        .unwrap_or_default()
}

pub(crate) fn list<'a>(object: &'a Value, pointer: &str) -> &'a [Value] {
    object
        .pointer(pointer)
        .and_then(Value::as_array)
        .map_or(&[], Vec::as_slice)
}

fn key(object: &Value) -> Key {
    let part = |pointer| text(object, pointer).to_owned();
    (part("/metadata/namespace"), part("/metadata/name"))
}

fn has_finalizer(claim: &Value) -> bool {
    list(claim, "/metadata/finalizers")
        .iter()
        .any(|name| name == FINALIZER)
}

pub(crate) fn is_allocated(claim: &Value) -> bool {
    claim
        .pointer("/status/allocation")
        .is_some_and(|found| !found.is_null())
}

/// The device handle of our claim.
pub(crate) fn handle(claim: &Value) -> Option<DeviceHandle> {
    let handles = list(claim, "/status/allocation/resourceHandles");
    let ours = handles.iter().find(|handle| handle["driverName"] == DRIVER)?;
    DeviceHandle::parse(text(ours, "/data")).ok()
}

impl Checker {
    pub(crate) fn new(server: &ApiServer, kubelet: Option<&Kubelet>) -> Self {
        Self {
            server: server.clone(),
            kubelet: kubelet.cloned(),
            version: 1,
            objects: BTreeMap::new(),
            offered: BTreeMap::new(),
            violations: Vec::new(),
        }
    }

    pub(crate) fn violate(&mut self, text: String) {
        if !self.violations.contains(&text) {
            self.violations.push(text);
        }
    }

    fn of_kind<'a>(&'a self, plural: &'a str) -> impl Iterator<Item = &'a Value> {
        let of_kind = move |((kind, _), _): &(&(String, Key), &Value)| kind == plural;
        self.objects.iter().filter(of_kind).map(|(_, object)| object)
    }

    /// Checks all new changes.
    pub(crate) fn catch_up(&mut self) {
        for change in self.server.history(self.version) {
            // Changes have consecutive versions. Changes that the server has already compacted were missed.
            assert_eq!(change.version, self.version + 1, "changes were missed");
            self.version = change.version;
            match change.plural.as_str() {
                // In structured mode, the scheduler writes claims.
                "resourceclaims" if self.server.mode() == ClusterMode::Classic => self.claim(&change),
                "podschedulingcontexts" => self.context(&change),
                _ => {}
            }
            let Some(object) = change.after.as_ref().or(change.before.as_ref()) else {
                continue;
            };
            let place = (change.plural.clone(), key(object));
            match change.after {
                Some(after) => self.objects.insert(place, after),
                None => self.objects.remove(&place),
            };
            self.no_device_twice();
        }
        self.no_device_in_two_pods();
    }

    /// Asserts that all stored changes were checked.
    pub(crate) fn check_all_seen(&mut self) {
        for plural in [
            "resourceclaims",
            "podschedulingcontexts",
            "pods",
            "nodeinventories",
        ] {
            for object in self.server.objects(plural) {
                let version: u64 = text(&object, "/metadata/resourceVersion").parse().unwrap();
                assert!(version <= self.version, "version {version} was not checked");
            }
        }
    }

    /// Checks I6 and I13 for a changed context.
    fn context(&mut self, change: &ObjectChange) {
        let Some(after) = &change.after else { return };
        let name = text(after, "/metadata/name").to_owned();
        let named = list(after, "/spec/potentialNodes")
            .iter()
            .filter_map(Value::as_str);
        let selected = text(after, "/spec/selectedNode");
        let named = named
            .chain((!selected.is_empty()).then_some(selected))
            .map(str::to_owned);
        let offered = self
            .offered
            .entry(text(after, "/metadata/uid").to_owned())
            .or_default();
        offered.extend(named);
        let offered = offered.clone();
        for entry in list(after, "/status/resourceClaims") {
            if entry["name"] == FOREIGN {
                self.violate(format!(
                    "I6: context {name} has an entry of ours for a claim of another driver"
                ));
            }
            let unsuitable = list(entry, "/unsuitableNodes");
            if unsuitable.len() > 128 {
                self.violate(format!(
                    "I13: context {name} has {} unsuitable nodes",
                    unsuitable.len()
                ));
            }
            let unasked = unsuitable
                .iter()
                .filter_map(Value::as_str)
                .find(|node| !offered.contains(*node));
            if let Some(node) = unasked {
                self.violate(format!(
                    "I13: context {name} lists {node}, which was never a potential node"
                ));
            }
        }
    }

    /// I6: the other driver does not exist, so every write to its claims is ours.
    fn foreign(&mut self, claim: &Value) {
        let labelled = claim
            .pointer("/metadata/labels")
            .is_some_and(|labels| labels.get(NODE_LABEL).is_some());
        if has_finalizer(claim)
            || is_allocated(claim)
            || labelled
            || !text(claim, "/status/driverName").is_empty()
        {
            self.violate(format!("I6: a claim of another driver is changed: {claim}"));
        }
    }

    /// Checks I1: no device is in two allocations.
    fn no_device_twice(&mut self) {
        let mut holders: BTreeMap<(String, String), Vec<String>> = BTreeMap::new();
        for claim in self.of_kind("resourceclaims") {
            let Some(handle) = handle(claim) else { continue };
            for device in handle.devices {
                let place = (handle.node_uid.clone(), device.device);
                holders
                    .entry(place)
                    .or_default()
                    .push(text(claim, "/metadata/name").to_owned());
            }
        }
        if let Some((place, claims)) = holders.into_iter().find(|(_, claims)| claims.len() > 1) {
            self.violate(format!("I1: {place:?} is in {claims:?}"));
        }
    }

    /// I1 and I14 in the containers.
    fn no_device_in_two_pods(&mut self) {
        let mut holders: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        let container_configs = self.kubelet.iter().flat_map(Kubelet::container_configs);
        for ((_, pod), containers) in container_configs {
            for (_, host, _) in containers.into_values().flat_map(|config| config.devices) {
                holders.entry(host).or_default().insert(pod.clone());
            }
        }
        if let Some((device, pods)) = holders.into_iter().find(|(_, pods)| pods.len() > 1) {
            self.violate(format!("I1: {device} is in the containers of {pods:?}"));
        }
    }

    fn claim(&mut self, change: &ObjectChange) {
        let nothing = Value::Null;
        let before = change.before.as_ref().unwrap_or(&nothing);
        let after = change.after.as_ref().unwrap_or(&nothing);
        let name = text(if after.is_null() { before } else { after }, "/metadata/name").to_owned();
        if text(after, "/spec/resourceClassName") == FOREIGN {
            self.foreign(after);
            return;
        }
        let reserved = |claim: &Value| list(claim, "/status/reservedFor").to_vec();
        if is_allocated(after) && !is_allocated(before) {
            self.allocated(&name, before, after);
        }
        if is_allocated(before) && !is_allocated(after) && !after.is_null() {
            // A rollback removes allocation and reservation together; then the pod has no node.
            let users: Vec<_> = reserved(before);
            let bound = users.iter().find(|user| {
                let pod = self.pod(before, text(user, "/name"));
                pod.is_some_and(|pod| {
                    pod["metadata"]["uid"] == user["uid"] && !text(pod, "/spec/nodeName").is_empty()
                })
            });
            if bound.is_some() || users.len() > 1 {
                self.violate(format!(
                    "I5: {name} is cleared while it is reserved for {users:?}"
                ));
            }
        }
        if has_finalizer(before) && !has_finalizer(after) && is_allocated(before) {
            let deleting = !text(before, "/metadata/deletionTimestamp").is_empty();
            if !deleting || !reserved(before).is_empty() {
                self.violate(format!("I4: our finalizer leaves {name}, which is allocated"));
            }
        }
        for user in reserved(after) {
            let pod = self.pod(after, text(&user, "/name"));
            let is_new = !reserved(before).contains(&user);
            if is_new && pod.is_none_or(|pod| pod["metadata"]["uid"] != user["uid"]) {
                self.violate(format!(
                    "I16: {name} is reserved for {user}, which does not exist"
                ));
            }
        }
    }

    fn pod(&self, claim: &Value, name: &str) -> Option<&Value> {
        let key = (text(claim, "/metadata/namespace").to_owned(), name.to_owned());
        self.objects.get(&("pods".to_owned(), key))
    }

    /// Checks I2, I3 and I7 for a new allocation.
    fn allocated(&mut self, name: &str, before: &Value, after: &Value) {
        if !has_finalizer(before) {
            self.violate(format!("I3: {name} is allocated without our finalizer"));
        }
        let Some(handle) = handle(after) else {
            self.violate(format!("{name} is allocated with a handle that cannot be read"));
            return;
        };
        let known: BTreeSet<String> = self
            .of_kind("nodeinventories")
            .filter(|inventory| text(inventory, "/spec/nodeName") == handle.node_name)
            .flat_map(|inventory| list(inventory, "/spec/devices"))
            .map(|device| text(device, "/name").to_owned())
            .collect();
        if let Some(device) = handle
            .devices
            .iter()
            .find(|device| !known.contains(&device.device))
        {
            self.violate(format!(
                "I2: {name} gets {}, which is not on the node",
                device.device
            ));
        }
        for user in list(after, "/status/reservedFor") {
            let key = (
                text(after, "/metadata/namespace").to_owned(),
                text(user, "/name").to_owned(),
            );
            let context = self.objects.get(&("podschedulingcontexts".to_owned(), key));
            let selected = context.map(|context| text(context, "/spec/selectedNode").to_owned());
            if selected.as_ref().is_some_and(|node| *node != handle.node_name) {
                self.violate(format!(
                    "I7: {name} is allocated on {}, not on {selected:?}",
                    handle.node_name
                ));
            }
        }
    }
}

/// I14: every CDI file of a claim has a checkpoint entry at any time, because the entry is written first and removed last.
pub(crate) fn files_without_entry(cdi: &Path, checkpoint: &Path) -> Vec<String> {
    let entries = entries(checkpoint);
    let mut files = claim_files(cdi);
    files.retain(|uid| !entries.contains_key(uid));
    files.into_iter().collect()
}

/// I14: once kubelet has its answer, a prepared claim has its CDI file.
pub(crate) fn entries_without_file(cdi: &Path, checkpoint: &Path) -> Vec<String> {
    let files = claim_files(cdi);
    let mut entries = entries(checkpoint);
    entries.retain(|uid, prepared| *prepared && !files.contains(uid));
    entries.into_keys().collect()
}

fn claim_files(cdi: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(cdi).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let uid = |name: String| {
        let (_, uid) = name.strip_suffix(".json")?.split_once("-claim_")?;
        Some(uid.to_owned())
    };
    names.filter_map(uid).collect()
}

/// The claims in the checkpoint, and whether each is prepared.
fn entries(checkpoint: &Path) -> BTreeMap<String, bool> {
    let checkpoint = std::fs::read(checkpoint).unwrap_or_default();
    let checkpoint: Value = serde_json::from_slice(&checkpoint).unwrap_or_default();
    let entries = checkpoint.pointer("/data/entries").and_then(Value::as_object);
    entries
        .into_iter()
        .flatten()
        .map(|(uid, entry)| (uid.clone(), text(entry, "/state") == "done"))
        .collect()
}
