use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use proptest::prelude::*;

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

fn pool() -> Pool {
    Pool {
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
struct Server {
    stored: BTreeMap<String, ResourceSlice>,
    version: u64,
    drops_taints: bool,
    /// Changes that the watch has not delivered yet; `false` for deletions.
    events: Vec<(bool, ResourceSlice)>,
    writes: usize,
    conflicts: usize,
    /// Contents of the pool whenever it was complete.
    complete: Vec<Vec<String>>,
}

impl Server {
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
            for taint in device.taints.iter_mut().flatten() {
                let now = Timestamp::from_second(self.version.try_into().unwrap()).unwrap();
                taint.time_added.get_or_insert(Time(now));
            }
        }
        self.stored
            .insert(slice.metadata.name.clone().unwrap(), slice.clone());
        self.events.push((true, slice.clone()));
        self.record();
        slice
    }

    fn delete(&mut self, name: &str) {
        if let Some(slice) = self.stored.remove(name) {
            self.version += 1;
            self.events.push((false, slice));
            self.record();
        }
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
            assert_eq!(different.len(), names.len(), "a device is in two slices");
            self.complete.push(names);
        }
    }

    fn deliver(&mut self, slices: &mut Slices) {
        for (exists, slice) in self.events.drain(..) {
            if exists {
                slices.applied(slice);
            } else {
                slices.deleted(&slice);
            }
        }
    }

    /// Writes until nothing is left to write; returns the number of writes.
    fn settle(&mut self, slices: &mut Slices) -> usize {
        let before = self.writes;
        while let Some(write) = slices.next() {
            assert!(self.writes - before < 200, "no end of writes: {write:?}");
            match self.execute(&write) {
                Ok(stored) => {
                    slices.written(&write, stored);
                }
                // The runtime reads the object after a conflict.
                Err(Conflict) => match self.stored.get(write.name()) {
                    Some(slice) => slices.applied(slice.clone()),
                    None => slices.absent(write.name()),
                },
            }
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

fn started(features: Features, count: usize) -> (Server, Slices) {
    let mut server = Server::default();
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
    let mut foreign = server.stored["node-a.drayman.dev-00"].clone();
    foreign.metadata.name = Some("elsewhere".into());
    foreign.metadata.uid = Some("f".into());
    foreign.spec.pool.name = "another".into();
    server.store(foreign);
    server.deliver(&mut slices);
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
fn a_webhooks_change_is_not_fought() {
    let (mut server, mut slices) = started(TAINTS, 2);
    slices.set_devices(devices(3));
    let write = slices.next().unwrap();
    let Write::Replace(desired) = &write else {
        panic!("{write:?}")
    };
    let mut changed = (**desired).clone();
    changed.spec.devices.as_mut().unwrap()[0].attributes = None;
    let stored = server.store(changed);
    assert_eq!(
        slices.written(&write, Some(stored)),
        BTreeSet::from([Altered::Otherwise])
    );
    assert_eq!(slices.next(), None);
    slices.set_devices(devices(2));
    assert!(slices.next().is_some());
}

#[test]
fn a_webhook_that_removes_owners_is_not_fought() {
    let (mut server, mut slices) = started(TAINTS, 2);
    slices.set_devices(devices(3));
    let write = slices.next().unwrap();
    let Write::Replace(desired) = &write else {
        panic!("{write:?}")
    };
    let mut changed = (**desired).clone();
    changed.metadata.owner_references = None;
    let stored = server.store(changed);
    assert_eq!(
        slices.written(&write, Some(stored)),
        BTreeSet::from([Altered::Otherwise])
    );
    assert_eq!(slices.next(), None);
    slices.set_node_uid("n-2".into());
    assert!(slices.next().is_some());
}

#[test]
fn a_taint_keeps_its_time() {
    let (mut server, mut slices) = started(TAINTS, 2);
    let mut changed = (*devices(2)).clone();
    changed.extend([device("d0000", false)]);
    slices.set_devices(Arc::new(changed.clone()));
    server.settle(&mut slices);
    let taint = |server: &Server| {
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
            Pool {
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
    Unplug(u8),
    Break(u8),
    /// Most devices are gone.
    Few,
    Write,
    /// The write is executed, and its answer is lost.
    Lost,
    Deliver,
    Relist,
    Wipe,
    DeleteOne(u8),
    Edit(u8),
    Restart,
    NewNode,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => any::<u8>().prop_map(Step::Plug),
        4 => any::<u8>().prop_map(Step::Unplug),
        2 => any::<u8>().prop_map(Step::Break),
        1 => Just(Step::Few),
        16 => Just(Step::Write),
        2 => Just(Step::Lost),
        6 => Just(Step::Deliver),
        1 => Just(Step::Relist),
        1 => Just(Step::Wipe),
        2 => any::<u8>().prop_map(Step::DeleteOne),
        2 => any::<u8>().prop_map(Step::Edit),
        1 => Just(Step::Restart),
        1 => Just(Step::NewNode),
    ]
}

proptest! {
    #[test]
    fn slices_converge_after_any_history(
        steps in prop::collection::vec(step(), 0..120),
        taints in any::<bool>(),
        drops_taints in any::<bool>(),
    ) {
        let features = if taints { TAINTS } else { NO_TAINTS };
        let mut server = Server { drops_taints, ..Server::default() };
        let mut wanted = (*devices(150)).clone();
        let mut uid = 1;
        let mut lost: Option<String> = None;
        let mut slices = Slices::new(pool(), features);
        slices.set_devices(Arc::new(wanted.clone()));
        slices.listed([]);
        let pick = |server: &Server, index: u8| {
            let names: Vec<String> = server.stored.keys().cloned().collect();
            names.get(usize::from(index) % names.len().max(1)).cloned()
        };
        for step in steps {
            match step {
                Step::Plug(index) => wanted.extend([device(&format!("d{index:04}"), true)]),
                Step::Unplug(index) => { wanted.remove(&format!("d{index:04}")); }
                Step::Break(index) => wanted.extend([device(&format!("d{index:04}"), false)]),
                Step::Few => wanted.retain(|name, _| name.ends_with('7')),
                // The runtime reads a slice whose write had no answer before it writes again.
                Step::Write | Step::Lost if lost.is_some() => {
                    let name = lost.take().unwrap();
                    match server.stored.get(&name) {
                        Some(slice) => slices.applied(slice.clone()),
                        None => slices.absent(&name),
                    }
                }
                Step::Write => if let Some(write) = slices.next() {
                    match server.execute(&write) {
                        Ok(stored) => { slices.written(&write, stored); }
                        Err(Conflict) => match server.stored.get(write.name()) {
                            Some(slice) => slices.applied(slice.clone()),
                            None => slices.absent(write.name()),
                        },
                    }
                },
                Step::Lost => if let Some(write) = slices.next() {
                    drop(server.execute(&write));
                    lost = Some(write.name().to_owned());
                },
                Step::Deliver => server.deliver(&mut slices),
                Step::Relist => {
                    slices.listed(server.stored.values().cloned());
                    server.events.clear();
                }
                Step::Wipe => for name in server.stored.keys().cloned().collect::<Vec<_>>() { server.delete(&name); },
                Step::DeleteOne(index) => if let Some(name) = pick(&server, index) { server.delete(&name); },
                Step::Edit(index) => if let Some(name) = pick(&server, index) {
                    let mut slice = server.stored[&name].clone();
                    slice.spec.pool.generation += i64::from(index % 3);
                    slice.spec.pool.resource_slice_count = i64::from(index % 5) + 1;
                    if let Some(devices) = &mut slice.spec.devices { devices.truncate(usize::from(index)); }
                    server.store(slice);
                },
                Step::Restart => {
                    slices = Slices::new(Pool { node_uid: format!("n-{uid}"), ..pool() }, features);
                    slices.listed(server.stored.values().cloned());
                    server.events.clear();
                    lost = None;
                }
                Step::NewNode => {
                    uid += 1;
                    slices.set_node_uid(format!("n-{uid}"));
                }
            }
            slices.set_devices(Arc::new(wanted.clone()));
        }
        server.deliver(&mut slices);
        server.settle(&mut slices);
        server.deliver(&mut slices);
        prop_assert_eq!(slices.next(), None, "at rest nothing is written");
        let published: Vec<String> = slices.devices.iter().map(|device| device.name.clone()).collect();
        prop_assert_eq!(server.names(), published, "each device is published once");
        prop_assert!(!server.drops_taints || slices.devices.iter().all(|device| wanted[&device.name].unhealthy.is_none()) || !taints);
        let generations: BTreeSet<i64> = server.stored.values().map(|slice| slice.spec.pool.generation).collect();
        prop_assert_eq!(generations.len(), 1);
        for slice in server.stored.values() {
            prop_assert_eq!(usize::try_from(slice.spec.pool.resource_slice_count).unwrap(), server.stored.len());
            prop_assert_eq!(&slice.metadata.owner_references.as_ref().unwrap()[0].uid, &format!("n-{uid}"));
        }
    }
}
