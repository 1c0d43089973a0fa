//! How the node is put right: after a start, after a step that failed, and when a device has changed.

use std::collections::{BTreeMap, BTreeSet};

use super::claim_uid::ClaimUid;
use super::driver_name::DriverName;
use super::injection::Injection;
use super::inventory::Devices;
use super::kubelet_state::{KubeletClaim, KubeletView};
use super::ledger::{Change, Entry, Explanation, HeldDevice, Ledger, Progress};
use super::plan::{held_device, restore};
use super::release::plan_free;
use super::rendering::entry_of_cdi_spec;
use super::step::Step;
use crate::api::cdi;
use crate::api::proto::pod_resources_v1::PodResources;

/// The entries of a checkpoint that was lost, from what else there is: our CDI files, and the claims that kubelet lists.
///
/// A claim that left a trace is never dropped. If no trace tells which devices it has, its entry has none
/// ([`Entry::is_unaccounted`]), and nothing is prepared until somebody explains it. `files` are the claims that have a CDI
/// file of ours, with its content if that can be read. Whatever is found counts as of this boot, which is the careful guess.
pub fn rebuild(
    driver: &DriverName,
    boot_id: &str,
    files: &BTreeMap<ClaimUid, Option<cdi::Spec>>,
    kubelet: &KubeletView,
) -> BTreeMap<ClaimUid, Entry> {
    let listed = match kubelet {
        KubeletView::Lists(claims) => claims.iter().filter(|(_, claim)| claim.ours).collect(),
        KubeletView::Unknown(_) => BTreeMap::new(),
    };
    let uids: BTreeSet<&ClaimUid> = files.keys().chain(listed.keys().copied()).collect();
    uids.into_iter()
        .map(|uid| {
            let spec = files.get(uid).and_then(Option::as_ref);
            let told = spec.and_then(|spec| entry_of_cdi_spec(driver, uid, boot_id, spec));
            let mut entry = told.unwrap_or_else(|| of_list(boot_id, listed.get(uid).copied()));
            if let Some(claim) = listed.get(uid) {
                entry.namespace.clone_from(&claim.namespace);
                entry.name.clone_from(&claim.name);
            }
            (uid.clone(), entry)
        })
        .collect()
}

/// What a start finds where the checkpoint should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Start {
    /// The entries of a checkpoint.
    Checkpoint(BTreeMap<ClaimUid, Entry>),
    /// None that can be used.
    Nothing,
}

impl Start {
    /// The claims whose CDI files are to be read: those of which the checkpoint says nothing. `files` are the claims that have one.
    ///
    /// No order of our own writes leaves a file that the checkpoint does not have: then it is an older one.
    pub fn unexplained(&self, files: &BTreeSet<ClaimUid>) -> BTreeSet<ClaimUid> {
        match self {
            Self::Checkpoint(entries) => files
                .iter()
                .filter(|uid| !entries.contains_key(uid))
                .cloned()
                .collect(),
            Self::Nothing => files.clone(),
        }
    }

    /// The entries to begin with. `files` is what the files of [`Start::unexplained`] say, and `kubelet` is asked for its list only if
    /// there is no checkpoint.
    pub fn entries(
        self,
        driver: &DriverName,
        boot_id: &str,
        files: &BTreeMap<ClaimUid, Option<cdi::Spec>>,
        kubelet: impl FnOnce() -> KubeletView,
    ) -> BTreeMap<ClaimUid, Entry> {
        match self {
            Self::Checkpoint(mut entries) => {
                let nothing = KubeletView::Lists(BTreeMap::new());
                entries.extend(rebuild(driver, boot_id, files, &nothing));
                entries
            }
            Self::Nothing => rebuild(driver, boot_id, files, &kubelet()),
        }
    }
}

/// The claims of this driver that containers have, as kubelet's PodResources API shows them, with namespace and name. Which devices
/// they have is not shown. Kubelet shows nothing of claims unless its feature gate `KubeletPodResourcesDynamicResources` is on (off by
/// default up to 1.33).
pub fn running_claims(driver: &DriverName, pods: &[PodResources]) -> BTreeMap<ClaimUid, (String, String)> {
    let resources = pods
        .iter()
        .flat_map(|pod| &pod.containers)
        .flat_map(|container| &container.dynamic_resources);
    let mut running = BTreeMap::new();
    for resource in resources {
        let ids = resource
            .claim_resources
            .iter()
            .flat_map(|claim| &claim.cdi_devices);
        for uid in ids.filter_map(|id| driver.claim_of_cdi_id(&id.name)) {
            let name = (resource.claim_namespace.clone(), resource.claim_name.clone());
            running.insert(uid, name);
        }
    }
    running
}

/// What a ledger that was rebuilt lacks of the claims that containers have: names, and claims that left no other trace. Those are in
/// it then without devices, so that nothing is prepared until somebody explains them. `None` if nothing is lacking.
pub fn with_running(ledger: &Ledger, running: &BTreeMap<ClaimUid, (String, String)>) -> Option<Ledger> {
    let mut entries = ledger.entries().clone();
    for (uid, (namespace, name)) in running {
        let entry = entries
            .entry(uid.clone())
            .or_insert_with(|| of_list(ledger.boot_id(), None));
        if entry.name.is_empty() {
            entry.namespace.clone_from(namespace);
            entry.name.clone_from(name);
        }
    }
    (entries != *ledger.entries()).then(|| Ledger::new(ledger.boot_id(), entries))
}

fn of_list(boot_id: &str, listed: Option<&KubeletClaim>) -> Entry {
    let device = |name: &String| HeldDevice {
        device: name.clone(),
        ..HeldDevice::default()
    };
    let devices = listed
        .and_then(|claim| claim.devices.as_ref())
        .into_iter()
        .flatten();
    Entry {
        namespace: String::new(),
        name: String::new(),
        boot_id: boot_id.to_owned(),
        devices: devices.map(device).collect(),
        progress: Progress::Done {
            injection: Injection::default(),
        },
    }
}

/// Plans what follows when it has become known which devices a claim has.
pub fn plan_explained(ledger: &Ledger, inventory: &Devices, uid: &ClaimUid, devices: &[String]) -> Vec<Step> {
    let Some(entry) = ledger.entry(uid).filter(|entry| entry.is_unaccounted()) else {
        return Vec::new();
    };
    let known = Explanation {
        namespace: entry.namespace.clone(),
        name: entry.name.clone(),
        devices: devices.iter().map(|name| held_device(inventory, name)).collect(),
    };
    let mut steps = vec![Step::Save(vec![Change::Explain(uid.clone(), known)])];
    steps.extend(restore(uid));
    steps
}

/// Plans, claim by claim, what is cleared away at a start, and now and then: the rest of attempts that were never answered, and files
/// that belong to nothing. A plan of which a step fails is left there: what the driver has not undone stays in the ledger, so that it is
/// tried again. The caller makes the ledger durable afterwards.
///
/// `files` are the claims that have a CDI file of ours. Clearing a "started" entry is safe: no container has been given
/// anything of it, and kubelet, which got no answer, asks again or has forgotten it.
pub fn plan_clearing(ledger: &Ledger, files: &BTreeSet<ClaimUid>) -> Vec<Vec<Step>> {
    let unknown = files.iter().filter(|uid| ledger.entry(uid).is_none());
    let unfinished = ledger.entries().iter().filter(|(_, entry)| !entry.is_done());
    unknown
        .map(|uid| vec![Step::RemoveCdi(uid.clone())])
        .chain(unfinished.map(|(uid, _)| plan_free(uid)))
        .collect()
}

/// Plans, claim by claim, how the CDI files come back at a start: `/var/run/cdi` is empty after a boot. What has changed by it is
/// stored once for all of them, by a [`Step::Save`] that the caller adds.
///
/// That is done also for what was prepared in an earlier boot, although nothing of it runs: a kubelet of 1.27 does not ask
/// again for a claim that its own checkpoint has.
pub fn plan_restoring(ledger: &Ledger) -> Vec<(ClaimUid, Vec<Step>)> {
    let done = ledger
        .entries()
        .iter()
        .filter(|(_, entry)| entry.is_done() && !entry.is_unaccounted());
    done.map(|(uid, _)| {
        let steps = vec![Step::Inject(uid.clone()), Step::WriteCdi(uid.clone())];
        (uid.clone(), steps)
    })
    .collect()
}

/// Plans how the CDI file of one claim comes back after that has failed. `None` if there is nothing to bring back: the claim has
/// gone, or what it has is not known, or no container has it.
pub fn plan_restoring_one(ledger: &Ledger, uid: &ClaimUid) -> Option<Vec<Step>> {
    let entry = ledger.entry(uid)?;
    (ledger.may_be_in_use(entry) && !entry.is_unaccounted()).then(|| restore(uid))
}

/// Plans, claim by claim, what follows from a change of the inventory: the CDI file of a claim must never lead to a node
/// that has become another device's.
pub fn plan_refresh(ledger: &Ledger, before: &Devices, after: &Devices) -> Vec<(ClaimUid, Vec<Step>)> {
    let changed = |name: &str| before.get(name) != after.get(name);
    let touched = ledger
        .entries()
        .iter()
        .filter(|(_, entry)| entry.is_done() && entry.devices.iter().any(|held| changed(&held.device)));
    touched.map(|(uid, _)| (uid.clone(), restore(uid))).collect()
}

/// Plans what is undone after a step for a claim has failed. The caller reports the failure itself. If a step of this plan fails, the
/// rest of it is left: the ledger forgets a claim only after the driver has undone what it did for it. It is tried again by the next
/// request for the claim or the device, by the next look for forgotten claims, or by the next start.
///
/// A claim that containers may be using keeps its devices; only its file goes, so that no further container is started
/// with a device that is no longer what was allocated. Every other claim is as if it had never come.
pub fn plan_undo(ledger: &Ledger, uid: &ClaimUid) -> Vec<Step> {
    let mut steps = vec![Step::RemoveCdi(uid.clone())];
    if ledger
        .entry(uid)
        .is_some_and(|entry| !ledger.may_be_in_use(entry))
    {
        steps.push(Step::Release(uid.clone()));
        steps.push(Step::Save(vec![Change::Remove(uid.clone())]));
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::super::kubelet_state::KubeletClaims;
    use super::super::rendering::cdi_spec;
    use super::*;
    use crate::api::proto::pod_resources_v1::{
        CdiDevice, ClaimResource, ContainerResources, DynamicResource,
    };
    use crate::core::prepare::injection::DeviceNode;

    const BOOT: &str = "boot";

    fn uid(last: char) -> ClaimUid {
        ClaimUid::parse(&format!("7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0{last}")).unwrap()
    }

    fn driver() -> DriverName {
        DriverName::parse("drayman.dev").unwrap()
    }

    fn spec(last: char, device: &str) -> cdi::Spec {
        let path = format!("/dev/{device}");
        let node = DeviceNode {
            host_path: path.clone(),
            container_path: path,
            permissions: "rw".into(),
        };
        cdi_spec(&driver(), &uid(last), &Injection::of_device_node(device, node))
    }

    fn listed(ours: bool, devices: Option<&[&str]>) -> KubeletClaim {
        KubeletClaim {
            namespace: "default".into(),
            name: "camera".into(),
            ours,
            devices: devices.map(|devices| devices.iter().map(|name| (*name).to_owned()).collect()),
        }
    }

    fn devices(entry: &Entry) -> Vec<&str> {
        entry.devices.iter().map(|held| held.device.as_str()).collect()
    }

    #[test]
    fn every_trace_of_a_claim_becomes_an_entry() {
        let files = BTreeMap::from([
            (uid('1'), Some(spec('1', "x"))),
            (uid('2'), None),
            (uid('3'), None),
            // The content is another claim's.
            (uid('4'), Some(spec('1', "x"))),
        ]);
        let kubelet = KubeletView::Lists(KubeletClaims::from([
            (uid('1'), listed(true, None)),
            (uid('2'), listed(true, Some(&["y"]))),
            (uid('5'), listed(true, Some(&["z"]))),
            (uid('6'), listed(true, None)),
            (uid('7'), listed(false, None)),
        ]));
        let entries = rebuild(&driver(), BOOT, &files, &kubelet);
        let found: Vec<(String, Vec<&str>, &str)> = entries
            .iter()
            .map(|(uid, entry)| (uid.to_string(), devices(entry), entry.name.as_str()))
            .collect();
        let expected = [
            ('1', vec!["x"], "camera"),
            ('2', vec!["y"], "camera"),
            ('3', vec![], ""),
            ('4', vec![], ""),
            ('5', vec!["z"], "camera"),
            ('6', vec![], "camera"),
        ]
        .map(|(last, devices, name)| (uid(last).to_string(), devices, name));
        assert_eq!(found, expected);
        let ledger = Ledger::new(BOOT, entries);
        assert!(ledger.entries().values().all(|entry| ledger.may_be_in_use(entry)));
    }

    #[test]
    fn no_trace_is_an_empty_ledger() {
        for kubelet in [
            KubeletView::Unknown("none".into()),
            KubeletView::Lists(KubeletClaims::from([(uid('7'), listed(false, None))])),
        ] {
            assert_eq!(
                rebuild(&driver(), BOOT, &BTreeMap::new(), &kubelet),
                BTreeMap::new()
            );
        }
    }

    #[test]
    fn a_claim_that_only_a_running_pod_tells_of_is_in_the_ledger_with_devices_unknown() {
        let resource = |id: &str| DynamicResource {
            claim_name: "camera".into(),
            claim_namespace: "default".into(),
            claim_resources: vec![ClaimResource {
                cdi_devices: vec![CdiDevice { name: id.into() }],
            }],
            ..DynamicResource::default()
        };
        let ours = |last| driver().cdi_id(&uid(last));
        let container = ContainerResources {
            dynamic_resources: vec![
                resource(&ours('1')),
                resource(&ours('2')),
                resource("other.dev/claim=7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a03"),
                resource("drayman.dev/claim=../../x"),
                resource("drayman.dev/device=camera-0"),
            ],
            ..ContainerResources::default()
        };
        let pod = PodResources {
            containers: vec![container],
            ..PodResources::default()
        };
        let running = running_claims(&driver(), &[pod]);
        assert!(running.keys().eq([&uid('1'), &uid('2')]), "{running:?}");

        let files = BTreeMap::from([(uid('1'), Some(spec('1', "x")))]);
        let entries = rebuild(&driver(), BOOT, &files, &KubeletView::Unknown("none".into()));
        let ledger = with_running(&Ledger::new(BOOT, entries), &running).unwrap();
        let entry = |last| ledger.entry(&uid(last)).unwrap();
        assert_eq!(
            (devices(entry('1')), entry('1').name.as_str()),
            (vec!["x"], "camera")
        );
        assert_eq!(entry('2').name, "camera");
        assert!(entry('2').is_unaccounted() && ledger.may_be_in_use(entry('2')));
        assert_eq!(with_running(&ledger, &running), None, "nothing is lacking now");
    }

    #[test]
    fn the_file_of_a_claim_of_unknown_devices_is_neither_removed_nor_written() {
        let files = BTreeMap::from([(uid('1'), None)]);
        let ledger = Ledger::new(
            BOOT,
            rebuild(&driver(), BOOT, &files, &KubeletView::Unknown("none".into())),
        );
        assert_eq!(plan_restoring(&ledger), []);
        assert_eq!(plan_restoring_one(&ledger, &uid('1')), None);
        assert_eq!(plan_restoring_one(&ledger, &uid('2')), None, "it has gone");
        assert_eq!(
            plan_clearing(&ledger, &files.into_keys().collect()),
            Vec::<Vec<Step>>::new()
        );
    }

    #[test]
    fn a_claim_that_is_explained_gets_its_file_and_one_that_is_known_does_not_change() {
        let files = BTreeMap::from([(uid('1'), None), (uid('2'), Some(spec('2', "y")))]);
        let ledger = Ledger::new(
            BOOT,
            rebuild(&driver(), BOOT, &files, &KubeletView::Unknown("none".into())),
        );
        let none = Devices::new();
        let steps = plan_explained(&ledger, &none, &uid('1'), &["x".into()]);
        assert!(
            matches!(&steps[0], Step::Save(changes) if matches!(changes[..], [Change::Explain(..)])),
            "{steps:?}"
        );
        assert_eq!(steps[1..], restore(&uid('1')));
        assert_eq!(plan_explained(&ledger, &none, &uid('2'), &["x".into()]), []);
        assert_eq!(plan_explained(&ledger, &none, &uid('3'), &["x".into()]), []);
    }
}
