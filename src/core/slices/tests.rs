use std::collections::VecDeque;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use proptest::prelude::*;

use super::render::{DEVICES_MAX, DEVICES_WITH_TAINTS_MAX};
use super::*;
use crate::api::crd;

const NODE: &str = "node-a";
const DRIVER: &str = "drayman.dev";
const TAINTS: Features = Features {
    taints: true,
    shares: true,
};
const NO_TAINTS: Features = Features {
    taints: false,
    shares: false,
};

fn pool() -> NodePool {
    NodePool {
        driver: DRIVER.into(),
        node_name: NODE.into(),
        node_uid: "n-1".into(),
    }
}

fn device(name: &str, healthy: bool) -> (String, crd::Device) {
    let device = crd::Device {
        name: name.to_owned(),
        kind: "ports".into(),
        unhealthy: (!healthy).then(|| "unplugged".to_owned()),
        ..crd::Device::default()
    };
    (name.to_owned(), device)
}

fn devices(count: usize) -> Arc<Devices> {
    Arc::new(
        (0..count)
            .map(|index| device(&format!("d{index:04}"), true))
            .collect(),
    )
}

/// The write is for another version of the slice.
#[derive(Debug)]
struct Conflict;

/// The part of an API server that stores slices.
#[derive(Default)]
struct StoredSlices {
    stored: BTreeMap<String, ResourceSlice>,
    version: u64,
    drops_taints: bool,
    drops_shares: bool,
    /// Changes that the watch has not delivered yet; `false` for deletions.
    events: VecDeque<(bool, ResourceSlice)>,
    /// The same for a second publisher.
    events_of_second: VecDeque<(bool, ResourceSlice)>,
    /// Another client, or a write that was executed late, may have put a device into two slices.
    has_foreign_content: bool,
    writes: usize,
    conflicts: usize,
    /// Contents of the pool whenever it was complete.
    complete: Vec<Vec<String>>,
}

impl StoredSlices {
    /// Executes a write as the API server does.
    fn execute(&mut self, write: &Write) -> Result<Option<ResourceSlice>, Conflict> {
        self.writes += 1;
        let version = |slice: &ResourceSlice| slice.metadata.resource_version.clone();
        let name = write.name().to_owned();
        let known = self.stored.get(&name).cloned();
        let answer = match (write, known) {
            (Write::Create(slice), None) => {
                let mut slice = (**slice).clone();
                slice.metadata.uid = Some(format!("u-{}", self.version + 1));
                Ok(Some(self.store(slice)))
            }
            (Write::Replace(slice), Some(known)) if version(slice) == version(&known) => {
                Ok(Some(self.store((**slice).clone())))
            }
            (
                Write::Delete {
                    uid,
                    resource_version,
                    ..
                },
                Some(known),
            ) if known.metadata.uid.as_ref() == Some(uid)
                && version(&known).as_ref() == Some(resource_version) =>
            {
                self.delete(&name);
                Ok(None)
            }
            (Write::Delete { .. }, None) => Ok(None),
            _ => Err(Conflict),
        };
        self.conflicts += usize::from(answer.is_err());
        answer
    }

    fn store(&mut self, mut slice: ResourceSlice) -> ResourceSlice {
        self.version += 1;
        slice.metadata.resource_version = Some(self.version.to_string());
        let limit = if devices_of(&slice).iter().any(has_taints) {
            DEVICES_WITH_TAINTS_MAX
        } else {
            DEVICES_MAX
        };
        assert!(
            devices_of(&slice).len() <= limit,
            "{} devices in {:?}",
            devices_of(&slice).len(),
            slice.metadata.name
        );
        for device in slice.spec.devices.iter_mut().flatten() {
            if self.drops_taints {
                device.taints = None;
            }
            if self.drops_shares {
                device.allow_multiple_allocations = None;
                device.capacity = None;
            }
            for taint in device.taints.iter_mut().flatten() {
                let now = Timestamp::from_second(self.version.try_into().unwrap()).unwrap();
                taint.time_added.get_or_insert(Time(now));
            }
        }
        self.stored
            .insert(slice.metadata.name.clone().unwrap(), slice.clone());
        self.tell(true, &slice);
        self.record();
        slice
    }

    fn delete(&mut self, name: &str) {
        if let Some(slice) = self.stored.remove(name) {
            self.version += 1;
            self.tell(false, &slice);
            self.record();
        }
    }

    fn tell(&mut self, exists: bool, slice: &ResourceSlice) {
        self.events.push_back((exists, slice.clone()));
        self.events_of_second.push_back((exists, slice.clone()));
    }

    /// Notes the devices of the pool if a scheduler takes it for complete.
    fn record(&mut self) {
        let newest = self.stored.values().map(|slice| slice.spec.pool.generation).max();
        let current: Vec<&ResourceSlice> = self
            .stored
            .values()
            .filter(|slice| Some(slice.spec.pool.generation) == newest)
            .collect();
        if current
            .iter()
            .any(|slice| slice.spec.pool.resource_slice_count == i64::try_from(current.len()).unwrap())
        {
            let devices = current.iter().flat_map(|slice| devices_of(slice));
            let names: Vec<String> = devices.map(|device| device.name.clone()).collect();
            let different: BTreeSet<&String> = names.iter().collect();
            let is_consistent = different.len() == names.len();
            assert!(
                is_consistent || self.has_foreign_content,
                "a device is in two slices"
            );
            self.complete.push(names);
        }
    }

    fn deliver(&mut self, slices: &mut Slices) {
        for event in std::mem::take(&mut self.events) {
            observe(slices, event);
        }
    }

    /// Executes a write and tells the publisher its answer. After a conflict the runtime reads the object.
    fn write(&mut self, slices: &mut Slices, write: &Write) {
        match self.execute(write) {
            Ok(stored) => {
                slices.written(write, stored);
            }
            Err(Conflict) => self.read(slices, write.name()),
        }
    }

    fn read(&self, slices: &mut Slices, name: &str) {
        match self.stored.get(name) {
            Some(slice) => slices.applied(slice.clone()),
            None => slices.absent(name),
        }
    }

    /// Writes until nothing is left to write; returns the number of writes.
    fn settle(&mut self, slices: &mut Slices) -> usize {
        let before = self.writes;
        while let Some(write) = slices.next() {
            assert!(self.writes - before < 200, "no end of writes: {write:?}");
            self.write(slices, &write);
        }
        self.writes - before
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self
            .stored
            .values()
            .flat_map(devices_of)
            .map(|device| device.name.clone())
            .collect();
        names.sort();
        names
    }
}

fn observe(slices: &mut Slices, (exists, slice): (bool, ResourceSlice)) {
    if exists {
        slices.applied(slice);
    } else {
        slices.deleted(&slice);
    }
}

fn started(features: Features, count: usize) -> (StoredSlices, Slices) {
    let mut server = StoredSlices::default();
    let mut slices = Slices::new(pool(), features);
    slices.listed([]);
    slices.set_devices(devices(count));
    server.settle(&mut slices);
    server.deliver(&mut slices);
    assert_eq!(slices.next(), None);
    (server, slices)
}

#[test]
fn nothing_is_written_before_the_slices_are_listed() {
    let mut slices = Slices::new(pool(), TAINTS);
    slices.set_devices(devices(1));
    assert_eq!(slices.next(), None);
}

#[test]
fn a_node_without_devices_publishes_an_empty_slice() {
    let (server, _) = started(TAINTS, 0);
    let slice = &server.stored["node-a.drayman.dev-00"];
    assert_eq!(
        (
            server.writes,
            slice.spec.pool.generation,
            slice.spec.pool.resource_slice_count
        ),
        (1, 1, 1)
    );
    assert_eq!(slice.metadata.owner_references.as_ref().unwrap()[0].uid, "n-1");
}

#[test]
fn slices_have_as_many_devices_as_the_api_allows() {
    assert_eq!(started(NO_TAINTS, 1024).0.writes, 8);
    assert_eq!(started(TAINTS, 1024).0.writes, 16);
}

#[test]
fn one_device_more_or_less_is_one_write() {
    let (mut server, mut slices) = started(TAINTS, 200);
    let mut changed = (*devices(200)).clone();
    changed.remove("d0003");
    slices.set_devices(Arc::new(changed));
    assert_eq!(server.settle(&mut slices), 1);
    slices.set_devices(devices(200));
    assert_eq!(server.settle(&mut slices), 1);
    // 192 devices fill three slices; the last slice stays, empty.
    slices.set_devices(devices(192));
    assert_eq!(server.settle(&mut slices), 1);
    slices.set_devices(devices(193));
    assert_eq!(server.settle(&mut slices), 1);
    assert_eq!(slices.generation, 1);
}

#[test]
fn changes_of_two_slices_are_two_writes_of_a_complete_pool() {
    let (mut server, mut slices) = started(TAINTS, 200);
    let mut changed = (*devices(200)).clone();
    changed.remove("d0003");
    changed.extend([device("d0100", false)]);
    slices.set_devices(Arc::new(changed));
    let before = server.complete.len();
    assert_eq!(server.settle(&mut slices), 2);
    assert_eq!(
        (slices.generation, server.complete.len()),
        (1, before + 2),
        "the pool is complete after each write"
    );
}

#[test]
fn a_rejected_write_precedes_only_those_of_a_new_generation() {
    let (mut server, mut slices) = started(TAINTS, 200);
    let mut changed = (*devices(200)).clone();
    changed.extend(["d0003", "d0070", "d0130"].map(|name| device(name, false)));
    changed.remove("d0071");
    slices.set_devices(Arc::new(changed.clone()));
    let first = slices.next().unwrap();
    assert_eq!(first.name(), "node-a.drayman.dev-00");
    slices.rejected(&first);
    let second = slices.next().unwrap();
    assert_eq!(second.name(), "node-a.drayman.dev-01");
    let before = server.complete.len();
    server.write(&mut slices, &second);
    assert_eq!(
        (server.complete.len(), server.names().len()),
        (before + 1, 199),
        "the pool is complete after the other write"
    );

    let third = slices.next().unwrap();
    assert_eq!(third.name(), "node-a.drayman.dev-02");
    slices.rejected(&third);
    assert!(slices.is_rejected(&third));
    assert_eq!(slices.next().as_ref(), Some(&first));
    assert!(slices.is_rejected(&first), "it waits for its turn");
    slices.rejected(&first);
    assert_eq!(slices.next().as_ref(), Some(&third), "both are tried again");
    server.write(&mut slices, &third);

    // 61 more devices fill two slices, and are another one.
    changed.extend((0..61).map(|index| device(&format!("e{index:04}"), true)));
    slices.set_devices(Arc::new(changed.clone()));
    for name in ["node-a.drayman.dev-01", "node-a.drayman.dev-03"] {
        let update = slices.next().unwrap();
        assert_eq!(update.name(), name);
        server.write(&mut slices, &update);
    }
    assert_eq!(slices.generation, 1);
    let write = slices.next().unwrap();
    assert!(matches!(&write, Write::Replace(slice) if slice.spec.pool.generation == 2));
    assert_eq!(write.name(), "node-a.drayman.dev-00");
    assert!(slices.is_rejected(&write));

    changed.extend([device("d0004", false)]);
    slices.set_devices(Arc::new(changed));
    let write = slices.next().unwrap();
    assert_eq!(write.name(), "node-a.drayman.dev-00");
    assert!(!slices.is_rejected(&write), "its content changed");
}

#[test]
fn a_new_generation_waits_for_a_rejected_slice() {
    let (mut server, mut slices) = started(TAINTS, 200);
    let mut changed = (*devices(200)).clone();
    changed.extend([device("d0130", false)]);
    slices.set_devices(Arc::new(changed.clone()));
    let write = slices.next().unwrap();
    slices.rejected(&write);
    // 61 more devices fill a slice, and are another one.
    changed.extend((*devices(261)).clone().split_off("d0200"));
    slices.set_devices(Arc::new(changed.clone()));
    let update = slices.next().unwrap();
    assert_eq!(update.name(), "node-a.drayman.dev-03");
    server.write(&mut slices, &update);
    let write = slices.next().unwrap();
    assert_eq!(write.name(), "node-a.drayman.dev-02");
    assert!(slices.is_rejected(&write));

    changed.extend([device("d0003", false)]);
    changed.remove("d0070");
    slices.set_devices(Arc::new(changed));
    let before = server.complete.len();
    for name in ["node-a.drayman.dev-00", "node-a.drayman.dev-01"] {
        let update = slices.next().unwrap();
        assert_eq!(update.name(), name, "the stored generation still changes");
        server.write(&mut slices, &update);
    }
    assert_eq!((slices.generation, server.complete.len()), (1, before + 2));
    assert_eq!(slices.next().as_ref(), Some(&write));
    server.write(&mut slices, &write);
    server.settle(&mut slices);
    assert_eq!((slices.generation, server.names().len()), (2, 260));
}

#[test]
fn a_new_generation_begins_with_its_new_slices() {
    let (mut server, mut slices) = started(TAINTS, 256);
    slices.set_devices(devices(257));
    let write = slices.next().unwrap();
    assert!(matches!(write, Write::Create(_)), "{write:?}");
    slices.rejected(&write);
    assert_eq!(slices.next().as_ref(), Some(&write));
    let mut stored = server.stored.values();
    assert!(stored.all(|slice| slice.spec.pool.generation == 1));
    server.write(&mut slices, &write);
    assert_eq!(server.settle(&mut slices), 4);
    assert_eq!((slices.generation, server.names().len()), (2, 257));
}

#[test]
fn a_rejected_device_leaves_the_stored_generation_complete() {
    let (mut server, mut slices) = started(TAINTS, 100);
    let mut changed = (*devices(100)).clone();
    changed.extend((0..41).map(|index| device(&format!("e{index:04}"), true)));
    slices.set_devices(Arc::new(changed));
    // It has room in the second slice; the last devices need a third one.
    for _ in 0..20 {
        let write = slices.next().unwrap();
        let (Write::Create(slice) | Write::Replace(slice)) = &write else {
            panic!("{write:?}");
        };
        if devices_of(slice).iter().any(|device| device.name == "e0000") {
            slices.rejected(&write);
        } else {
            server.write(&mut slices, &write);
        }
        let stored = server.stored.values().map(|slice| &slice.spec.pool);
        let generation = stored.clone().map(|pool| pool.generation).max();
        let complete: Vec<_> = stored
            .filter(|pool| Some(pool.generation) == generation)
            .collect();
        let expected = usize::try_from(complete[0].resource_slice_count).unwrap();
        assert_eq!(complete.len(), expected, "{write:?}");
    }
}

#[test]
fn surplus_slices_stay_while_a_new_generation_is_rejected() {
    let (mut server, mut slices) = started(TAINTS, 320);
    let mut changed = (*devices(320)).clone();
    changed.extend([device("d0003", false)]);
    slices.set_devices(Arc::new(changed.clone()));
    let write = slices.next().unwrap();
    slices.rejected(&write);
    // Two slices have no device, and one of them stays.
    changed.retain(|name, _| name.as_str() < "d0128");
    slices.set_devices(Arc::new(changed));
    let before = server.complete.len();
    for _ in 0..3 {
        let update = slices.next().unwrap();
        server.write(&mut slices, &update);
    }
    assert_eq!((server.stored.len(), server.names().len()), (5, 128));
    assert_eq!(server.complete.len(), before + 3);
    let write = slices.next().unwrap();
    assert_eq!(write.name(), "node-a.drayman.dev-00");
    assert!(slices.is_rejected(&write));
    server.write(&mut slices, &write);
    server.settle(&mut slices);
    assert_eq!((slices.generation, server.stored.len()), (2, 3));
}

/// Somebody else creates the slice `elsewhere` of another pool for this driver and node.
fn store_foreign_slice(server: &mut StoredSlices, slices: &mut Slices) {
    let mut foreign = server.stored["node-a.drayman.dev-00"].clone();
    foreign.metadata.name = Some("elsewhere".into());
    foreign.metadata.uid = Some("f".into());
    foreign.spec.pool.name = "another".into();
    server.store(foreign);
    server.deliver(slices);
}

#[test]
fn a_rejected_deletion_holds_up_no_change() {
    let (mut server, mut slices) = started(TAINTS, 65);
    store_foreign_slice(&mut server, &mut slices);
    let deletion = slices.next().unwrap();
    assert_eq!(deletion.name(), "elsewhere");
    slices.rejected(&deletion);
    let mut changed = (*devices(65)).clone();
    changed.extend([device("d0003", false)]);
    slices.set_devices(Arc::new(changed.clone()));
    let other = slices.next().unwrap();
    assert_eq!(other.name(), "node-a.drayman.dev-00");
    server.write(&mut slices, &other);
    assert_eq!(slices.next().as_ref(), Some(&deletion));

    // 64 more devices fill a slice, and are another one.
    changed.extend((*devices(129)).clone().split_off("d0065"));
    slices.set_devices(Arc::new(changed));
    for _ in 0..4 {
        let write = slices.next().unwrap();
        assert_ne!(write, deletion);
        server.write(&mut slices, &write);
    }
    assert_eq!(slices.generation, 2);
    assert_eq!(slices.next(), Some(deletion));
}

#[test]
fn older_slices_are_deleted_while_another_write_is_rejected() {
    let (mut server, mut slices) = started(TAINTS, 200);
    store_foreign_slice(&mut server, &mut slices);
    let deletion = slices.next().unwrap();
    slices.rejected(&deletion);
    slices.set_devices(devices(60));
    while let Some(write) = slices.next().filter(|write| *write != deletion) {
        server.write(&mut slices, &write);
    }
    let names: Vec<&String> = server.stored.keys().collect();
    assert_eq!(names, ["elsewhere", "node-a.drayman.dev-00"]);
}

#[test]
fn a_name_in_another_pool_is_free_only_after_its_deletion() {
    let (mut server, mut slices) = started(TAINTS, 65);
    let mut foreign = server.stored["node-a.drayman.dev-01"].clone();
    foreign.spec.pool.name = "another".into();
    server.store(foreign);
    server.deliver(&mut slices);
    let deletion = slices.next().unwrap();
    assert!(matches!(deletion, Write::Delete { .. }), "{deletion:?}");
    slices.rejected(&deletion);
    assert_eq!(slices.next(), Some(deletion), "a slice cannot change its pool");
}

#[test]
fn devices_that_move_are_a_new_generation() {
    let (mut server, mut slices) = started(NO_TAINTS, 130);
    let mut fewer = (*devices(130)).clone();
    fewer.retain(|name, _| name.as_str() < "d0080" || name.as_str() >= "d0128");
    slices.set_devices(Arc::new(fewer.clone()));
    assert_eq!(server.settle(&mut slices), 1);
    // The first slice has 80 devices, of which 64 stay.
    slices.set_features(TAINTS);
    let before = server.complete.len();
    assert_eq!(server.settle(&mut slices), 2);
    assert_eq!((slices.generation, server.complete.len()), (2, before + 1));
    assert_eq!(server.names().len(), fewer.len());
}

#[test]
fn another_number_of_slices_is_a_new_generation() {
    let (mut server, mut slices) = started(TAINTS, 64);
    let before = server.complete.len();
    slices.set_devices(devices(65));
    assert_eq!(server.settle(&mut slices), 2);
    assert_eq!((slices.generation, server.complete.len()), (2, before + 1));
}

#[test]
fn slices_that_are_no_longer_needed_are_deleted() {
    let (mut server, mut slices) = started(TAINTS, 1024);
    let last = (*devices(1024)).clone().split_off("d1020");
    slices.set_devices(Arc::new(last));
    server.settle(&mut slices);
    assert_eq!((server.stored.len(), server.names().len()), (1, 4));
    assert_eq!(slices.next(), None);
}

#[test]
fn a_missing_first_slice_does_not_move_devices() {
    let (mut server, mut slices) = started(TAINTS, 192);
    let mut changed = (*devices(192)).clone();
    changed.remove("d0150");
    slices.set_devices(Arc::new(changed.clone()));
    server.settle(&mut slices);
    server.delete("node-a.drayman.dev-00");
    changed.extend([device("a-new-one", true)]);
    slices.set_devices(Arc::new(changed));
    server.deliver(&mut slices);
    assert_eq!(server.settle(&mut slices), 2);
    assert_eq!(slices.generation, 1);
}

#[test]
fn a_slice_with_a_finalizer_is_not_in_the_way() {
    let (mut server, mut slices) = started(TAINTS, 1);
    let mut stray = server.stored["node-a.drayman.dev-00"].clone();
    stray.metadata.name = Some("elsewhere".into());
    stray.metadata.uid = Some("s".into());
    let stray = server.store(stray);
    server.deliver(&mut slices);
    let write = slices.next().unwrap();
    assert!(matches!(&write, Write::Delete { name, .. } if name == "elsewhere"));
    let mut kept = stray;
    kept.metadata.deletion_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
    let kept = server.store(kept);
    slices.written(&write, Some(kept));
    assert_eq!(server.settle(&mut slices), 1);
    assert_eq!(slices.generation, 2, "the stray slice is of a lower generation");
}

#[test]
fn a_slice_whose_deletion_is_rejected_is_not_in_the_way() {
    let (mut server, mut slices) = started(TAINTS, 1);
    let mut stray = server.stored["node-a.drayman.dev-00"].clone();
    stray.metadata.name = Some("elsewhere".into());
    stray.metadata.uid = Some("s".into());
    server.store(stray);
    server.deliver(&mut slices);
    let deletion = slices.next().unwrap();
    assert_eq!(deletion.name(), "elsewhere");
    slices.rejected(&deletion);
    let write = slices.next().unwrap();
    assert_eq!(write.name(), "node-a.drayman.dev-00");
    server.write(&mut slices, &write);
    assert_eq!(slices.generation, 2, "the stray slice is of a lower generation");
    assert_eq!(slices.next(), Some(deletion));
}

#[test]
fn a_slice_of_another_node_is_not_ours() {
    let (_, mut slices) = started(TAINTS, 1);
    let mut foreign = slices.stored().next().unwrap().clone();
    foreign.spec.node_name = Some("node-b".into());
    foreign.metadata.name = Some("node-a.drayman.dev-07".into());
    assert!(!slices.owns(&foreign));
    slices.applied(foreign);
    assert_eq!(slices.next(), None);
}

#[test]
fn a_restart_writes_nothing() {
    let (mut server, mut slices) = started(TAINTS, 100);
    let mut changed = (*devices(100)).clone();
    changed.remove("d0003");
    slices.set_devices(Arc::new(changed.clone()));
    server.settle(&mut slices);
    let mut next = Slices::new(pool(), TAINTS);
    next.set_devices(Arc::new(changed));
    next.listed(server.stored.values().cloned());
    assert_eq!(next.next(), None);
}

#[test]
fn wiped_slices_come_back_with_one_write_each() {
    let (mut server, mut slices) = started(TAINTS, 100);
    for name in server.stored.keys().cloned().collect::<Vec<_>>() {
        server.delete(&name);
    }
    server.deliver(&mut slices);
    assert_eq!(server.settle(&mut slices), 2);
    server.delete("node-a.drayman.dev-01");
    server.deliver(&mut slices);
    assert_eq!(server.settle(&mut slices), 1);
    assert_eq!(server.names().len(), 100);
}

#[test]
fn a_late_deletion_of_an_earlier_slice_is_ignored() {
    let (mut server, mut slices) = started(TAINTS, 1);
    let earlier = server.stored["node-a.drayman.dev-00"].clone();
    server.delete("node-a.drayman.dev-00");
    slices.absent("node-a.drayman.dev-00");
    server.settle(&mut slices);
    slices.deleted(&earlier);
    assert_eq!(slices.next(), None);
}

#[test]
fn foreign_slices_of_this_node_are_deleted_first() {
    let (mut server, mut slices) = started(TAINTS, 1);
    store_foreign_slice(&mut server, &mut slices);
    assert!(matches!(slices.next(), Some(Write::Delete { name, .. }) if name == "elsewhere"));
    assert_eq!(server.settle(&mut slices), 1);
}

#[test]
fn a_foreign_edit_is_repaired_by_one_write() {
    let (mut server, mut slices) = started(TAINTS, 3);
    let mut edited = server.stored["node-a.drayman.dev-00"].clone();
    edited.spec.devices.as_mut().unwrap().swap(0, 2);
    edited.metadata.owner_references = None;
    edited.metadata.labels = Some(BTreeMap::from([("team".to_owned(), "a".to_owned())]));
    server.store(edited);
    server.deliver(&mut slices);
    assert_eq!(server.settle(&mut slices), 1);
    let repaired = &server.stored["node-a.drayman.dev-00"];
    assert_eq!(devices_of(repaired)[0].name, "d0000");
    assert_eq!(repaired.metadata.labels.as_ref().unwrap()["team"], "a");
}

#[test]
fn dropped_taints_withdraw_unhealthy_devices() {
    let (mut server, mut slices) = started(TAINTS, 3);
    server.drops_taints = true;
    let mut changed = (*devices(3)).clone();
    changed.extend([device("d0001", false)]);
    slices.set_devices(Arc::new(changed));
    let write = slices.next().unwrap();
    let stored = server.execute(&write).unwrap();
    assert_eq!(
        slices.written(&write, stored),
        BTreeSet::from([Altered::TaintsDropped])
    );
    assert!(!slices.features.taints);
    server.settle(&mut slices);
    assert_eq!(server.names(), ["d0000", "d0002"]);
    assert_eq!(slices.omitted()[0].why, Omission::Unhealthy);
}

#[test]
fn dropped_taints_do_not_change_the_layout() {
    let (mut server, mut slices) = started(TAINTS, 128);
    server.drops_taints = true;
    let mut changed = (*devices(128)).clone();
    changed.extend([device("d0001", false)]);
    slices.set_devices(Arc::new(changed.clone()));
    server.settle(&mut slices);
    changed.extend([device("d0200", true), device("d0201", true)]);
    slices.set_devices(Arc::new(changed));
    server.settle(&mut slices);
    let mut stored = server.stored.values();
    assert!(stored.all(|slice| devices_of(slice).len() <= DEVICES_WITH_TAINTS_MAX));
}

#[test]
fn features_return_once_a_dry_run_keeps_them() {
    let (mut server, mut slices) = started(TAINTS, 3);
    assert_eq!(slices.probe(), None);
    (server.drops_taints, server.drops_shares) = (true, true);
    let mut changed = (*devices(3)).clone();
    changed.extend([device("d0001", false)]);
    changed.get_mut("d0002").unwrap().shares = Some(2);
    slices.set_devices(Arc::new(changed));
    server.settle(&mut slices);
    assert_eq!(server.names(), ["d0000"]);
    let probe = slices.probe().unwrap();
    let mut dropped = probe.clone();
    for device in dropped.spec.devices.iter_mut().flatten() {
        device.taints = None;
        device.allow_multiple_allocations = None;
    }
    slices.probed(&dropped);
    assert_eq!(slices.next(), None, "a gate that is still off causes no write");
    (server.drops_taints, server.drops_shares) = (false, false);
    slices.probed(&probe);
    assert_eq!(server.settle(&mut slices), 1);
    assert_eq!(server.names(), ["d0000", "d0001", "d0002"]);
    assert_eq!(slices.probe(), None);
}

#[test]
fn a_list_without_a_known_slice_names_it() {
    let (mut server, mut slices) = started(TAINTS, 64);
    let before: Vec<ResourceSlice> = server.stored.values().cloned().collect();
    slices.set_devices(devices(65));
    server.settle(&mut slices);
    let missing = slices.listed(before);
    assert_eq!(missing, ["node-a.drayman.dev-01"]);
    server.read(&mut slices, &missing[0]);
    assert_eq!(slices.next(), None);
}

#[test]
fn a_webhooks_change_is_not_fought() {
    type Case = (fn(&mut ResourceSlice), fn(&mut Slices));
    let removes_attributes =
        |slice: &mut ResourceSlice| slice.spec.devices.as_mut().unwrap()[0].attributes = None;
    let removes_owners = |slice: &mut ResourceSlice| slice.metadata.owner_references = None;
    let fewer_devices = |slices: &mut Slices| slices.set_devices(devices(2));
    let another_node = |slices: &mut Slices| slices.set_node_uid("n-2".into());
    let cases: [Case; 2] = [
        (removes_attributes, fewer_devices),
        (removes_owners, another_node),
    ];
    for (webhook, change) in cases {
        let (mut server, mut slices) = started(TAINTS, 2);
        slices.set_devices(devices(3));
        let write = slices.next().unwrap();
        let Write::Replace(desired) = &write else {
            panic!("{write:?}")
        };
        let mut changed = (**desired).clone();
        webhook(&mut changed);
        let stored = server.store(changed);
        assert_eq!(
            slices.written(&write, Some(stored)),
            BTreeSet::from([Altered::Otherwise])
        );
        assert_eq!(slices.next(), None);
        change(&mut slices);
        assert!(slices.next().is_some());
    }
}

#[test]
fn a_taint_keeps_its_time() {
    let (mut server, mut slices) = started(TAINTS, 2);
    let mut changed = (*devices(2)).clone();
    changed.extend([device("d0000", false)]);
    slices.set_devices(Arc::new(changed.clone()));
    server.settle(&mut slices);
    let taint = |server: &StoredSlices| {
        let slice = &server.stored["node-a.drayman.dev-00"];
        devices_of(slice)[0].taints.as_ref().unwrap()[0]
            .time_added
            .clone()
            .unwrap()
    };
    let first = taint(&server);
    changed.remove("d0001");
    slices.set_devices(Arc::new(changed));
    assert_eq!(server.settle(&mut slices), 1);
    assert_eq!(taint(&server), first);
}

#[test]
fn a_recreated_node_owns_its_slices() {
    let (mut server, mut slices) = started(TAINTS, 1);
    slices.set_node_uid("n-2".into());
    assert_eq!(server.settle(&mut slices), 1);
    let owner = server.stored["node-a.drayman.dev-00"]
        .metadata
        .owner_references
        .as_ref()
        .unwrap();
    assert_eq!(owner[0].uid, "n-2");
}

#[test]
fn names_fit_and_differ_for_long_node_names() {
    let name = |node: String| {
        Slices::new(
            NodePool {
                node_name: node,
                ..pool()
            },
            TAINTS,
        )
        .name(7)
    };
    let long = name("n".repeat(253));
    assert_eq!(long.len(), NAME_MAX);
    assert_ne!(long, name(format!("{}m", "n".repeat(252))));
    assert_eq!(name("n".repeat(200)).len(), 200 + ".drayman.dev-07".len());
    let dotted = name(format!("{}.{}", "n".repeat(229), "m".repeat(23)));
    assert!(dotted.len() <= NAME_MAX && !dotted.contains(".-"), "{dotted}");
}

/// A step of a random history.
#[derive(Clone, Debug)]
enum Step {
    Plug(u8),
    Share(u8),
    Unplug(u8),
    Break(u8),
    /// Most devices are gone.
    Few,
    Write,
    /// The API server rejects the write.
    Refuse,
    /// The write is executed, and its answer is lost.
    Lost,
    /// The write has no answer, and is executed later.
    Late,
    /// The late write is executed.
    Arrive,
    Deliver,
    /// The watch delivers one event.
    DeliverOne,
    Relist,
    Wipe,
    DeleteOne(u8),
    Edit(u8),
    /// A user creates a slice for this node.
    Stray(u8),
    Restart,
    /// A rolling update: a second publisher begins beside the first.
    Second,
    WriteSecond,
    DeliverSecond,
    /// The first publisher ends.
    Replace,
    NewNode,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => any::<u8>().prop_map(Step::Plug),
        1 => any::<u8>().prop_map(Step::Share),
        4 => any::<u8>().prop_map(Step::Unplug),
        2 => any::<u8>().prop_map(Step::Break),
        1 => Just(Step::Few),
        16 => Just(Step::Write),
        3 => Just(Step::Refuse),
        2 => Just(Step::Lost),
        2 => Just(Step::Late),
        2 => Just(Step::Arrive),
        5 => Just(Step::Deliver),
        4 => Just(Step::DeliverOne),
        1 => Just(Step::Relist),
        1 => Just(Step::Wipe),
        2 => any::<u8>().prop_map(Step::DeleteOne),
        2 => any::<u8>().prop_map(Step::Edit),
        1 => any::<u8>().prop_map(Step::Stray),
        1 => Just(Step::Restart),
        1 => Just(Step::Second),
        3 => Just(Step::WriteSecond),
        1 => Just(Step::DeliverSecond),
        1 => Just(Step::Replace),
        1 => Just(Step::NewNode),
    ]
}

/// A node with its publishers, and an API server.
struct History {
    server: StoredSlices,
    features: Features,
    devices: Devices,
    node_uid: u32,
    slices: Slices,
    second: Option<Slices>,
    /// A slice whose last write had no answer.
    lost: Option<String>,
    /// A write without an answer that is not executed yet.
    late: Option<Write>,
}

impl History {
    fn begin(server: StoredSlices, features: Features) -> Self {
        let mut history = Self {
            server,
            features,
            devices: (*devices(150)).clone(),
            node_uid: 1,
            slices: Slices::new(pool(), features),
            second: None,
            lost: None,
            late: None,
        };
        history.slices = history.publisher();
        history
    }

    /// A publisher that has just listed the slices.
    fn publisher(&self) -> Slices {
        let node_uid = format!("n-{}", self.node_uid);
        let mut slices = Slices::new(NodePool { node_uid, ..pool() }, self.features);
        slices.set_devices(Arc::new(self.devices.clone()));
        slices.listed(self.server.stored.values().cloned());
        slices
    }

    fn pick(&self, index: u8) -> Option<ResourceSlice> {
        let count = self.server.stored.len().max(1);
        self.server
            .stored
            .values()
            .nth(usize::from(index) % count)
            .cloned()
    }

    fn arrive(&mut self) {
        if let Some(write) = self.late.take() {
            self.server.has_foreign_content = true;
            drop(self.server.execute(&write));
        }
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Plug(index) => self.devices.extend([device(&format!("d{index:04}"), true)]),
            Step::Share(index) => {
                let (name, mut device) = device(&format!("d{index:04}"), true);
                device.shares = Some(2);
                self.devices.insert(name, device);
            }
            Step::Unplug(index) => {
                self.devices.remove(&format!("d{index:04}"));
            }
            Step::Break(index) => self.devices.extend([device(&format!("d{index:04}"), false)]),
            Step::Few => self.devices.retain(|name, _| name.ends_with('7')),
            Step::Wipe => {
                for name in self.server.stored.keys().cloned().collect::<Vec<_>>() {
                    self.server.delete(&name);
                }
            }
            Step::DeleteOne(index) => {
                if let Some(slice) = self.pick(*index) {
                    self.server.delete(&slice.metadata.name.unwrap());
                }
            }
            Step::Edit(index) => {
                if let Some(slice) = self.pick(*index) {
                    self.edit(slice, *index);
                }
            }
            Step::Stray(index) => {
                let Some(mut slice) = self.pick(*index) else {
                    return;
                };
                slice.metadata.name = Some(format!("stray-{index}"));
                slice.metadata.uid = Some(format!("u-{}", self.server.version + 1));
                if index % 2 == 0 {
                    slice.spec.pool.name = "another".into();
                }
                slice.spec.pool.generation = [0, 1, 9, i64::MAX][usize::from(index / 2 % 4)];
                self.server.has_foreign_content = true;
                self.server.store(slice);
            }
            Step::NewNode => self.node_uid += 1,
            _ => self.publish(step),
        }
        let devices = Arc::new(self.devices.clone());
        for slices in [Some(&mut self.slices), self.second.as_mut()]
            .into_iter()
            .flatten()
        {
            slices.set_devices(devices.clone());
            slices.set_node_uid(format!("n-{}", self.node_uid));
        }
    }

    /// A step of a publisher.
    fn publish(&mut self, step: &Step) {
        match step {
            // The runtime reads a slice whose write had no answer before it writes again.
            Step::Write | Step::Refuse | Step::Lost | Step::Late if self.lost.is_some() => {
                let name = self.lost.take().unwrap();
                self.server.read(&mut self.slices, &name);
            }
            Step::Write => {
                if let Some(write) = self.slices.next() {
                    self.server.write(&mut self.slices, &write);
                }
            }
            Step::Refuse => {
                if let Some(write) = self.slices.next() {
                    self.slices.rejected(&write);
                }
            }
            Step::Lost => {
                if let Some(write) = self.slices.next() {
                    drop(self.server.execute(&write));
                    self.lost = Some(write.name().to_owned());
                }
            }
            Step::Late => {
                self.arrive();
                self.late = self.slices.next();
                self.lost = self.late.as_ref().map(|write| write.name().to_owned());
            }
            Step::Arrive => self.arrive(),
            Step::Deliver => {
                self.server.deliver(&mut self.slices);
                let is_alone = self.second.is_none() && self.late.is_none();
                if is_alone && self.lost.is_none() && self.slices.next().is_none() {
                    self.server.has_foreign_content = false;
                }
            }
            Step::DeliverOne => {
                if let Some(event) = self.server.events.pop_front() {
                    observe(&mut self.slices, event);
                }
            }
            Step::Relist => {
                self.slices.listed(self.server.stored.values().cloned());
                self.server.events.clear();
            }
            Step::Restart => {
                self.slices = self.publisher();
                self.server.events.clear();
                self.lost = None;
            }
            Step::Second => {
                self.second = Some(self.publisher());
                self.server.events_of_second.clear();
                self.server.has_foreign_content = true;
            }
            Step::WriteSecond => {
                if let Some(second) = &mut self.second
                    && let Some(write) = second.next()
                {
                    self.server.write(second, &write);
                }
            }
            Step::DeliverSecond => {
                for event in std::mem::take(&mut self.server.events_of_second) {
                    if let Some(second) = &mut self.second {
                        observe(second, event);
                    }
                }
            }
            Step::Replace => {
                if let Some(second) = self.second.take() {
                    self.slices = second;
                    self.server.events = std::mem::take(&mut self.server.events_of_second);
                    self.lost = None;
                }
            }
            _ => {}
        }
    }

    /// A user edits a slice.
    fn edit(&mut self, mut slice: ResourceSlice, index: u8) {
        let pool = &mut slice.spec.pool;
        pool.generation = pool.generation.saturating_add(i64::from(index % 3));
        pool.resource_slice_count = i64::from(index % 5) + 1;
        let devices = slice.spec.devices.get_or_insert_default();
        match index % 4 {
            0 => devices.truncate(usize::from(index)),
            1 => devices.iter_mut().for_each(|device| device.attributes = None),
            2 => {
                let (_, mut device) = device("nonsense", true);
                device.kind = "nonsense".into();
                devices.extend(render(&Devices::from([("nonsense".into(), device)]), TAINTS).0);
                devices.truncate(DEVICES_WITH_TAINTS_MAX);
                // The API server refuses two devices of one name.
                let mut names = BTreeSet::new();
                devices.retain(|device| names.insert(device.name.clone()));
            }
            _ => pool.generation = i64::MAX,
        }
        self.server.has_foreign_content = true;
        self.server.store(slice);
    }
}

proptest! {
    #[test]
    fn slices_converge_after_any_history(
        steps in prop::collection::vec(step(), 0..120),
        taints in any::<bool>(),
        drops_taints in any::<bool>(),
        drops_shares in any::<bool>(),
    ) {
        let features = if taints { TAINTS } else { NO_TAINTS };
        let server = StoredSlices { drops_taints, drops_shares, ..StoredSlices::default() };
        let mut history = History::begin(server, features);
        for step in steps {
            history.step(&step);
        }
        history.arrive();
        let History { mut server, mut slices, second, devices: expected, node_uid, .. } = history;
        server.deliver(&mut slices);
        server.settle(&mut slices);
        server.deliver(&mut slices);
        prop_assert_eq!(slices.next(), None, "at rest nothing is written");
        let published: Vec<String> = slices.devices.iter().map(|device| device.name.clone()).collect();
        prop_assert_eq!(&server.names(), &published, "each device is published once");
        prop_assert!(!server.drops_taints || slices.devices.iter().all(|device| expected[&device.name].unhealthy.is_none()) || !taints);
        prop_assert!(!server.drops_shares || slices.devices.iter().all(|device| expected[&device.name].shares.is_none()));
        let omitted = |device: &crd::Device| slices.omitted().iter().any(|omitted| omitted.device == device.name);
        prop_assert!(expected.values().all(|device| published.contains(&device.name) || omitted(device)), "no device is lost");
        let generations: BTreeSet<i64> = server.stored.values().map(|slice| slice.spec.pool.generation).collect();
        prop_assert_eq!(generations.len(), 1);
        for slice in server.stored.values() {
            prop_assert_eq!(usize::try_from(slice.spec.pool.resource_slice_count).unwrap(), server.stored.len());
            prop_assert_eq!(&slice.metadata.owner_references.as_ref().unwrap()[0].uid, &format!("n-{node_uid}"));
        }
        // A second publisher that has the same devices agrees.
        if let Some(mut second) = second {
            second.listed(server.stored.values().cloned());
            server.settle(&mut second);
            slices.listed(server.stored.values().cloned());
            prop_assert_eq!(slices.next(), None, "two publishers do not fight");
        }
    }
}
