//! Restores a consistent state after a start, a failed step or a device change; lists prepared claims and releases them manually.

use std::collections::{BTreeMap, BTreeSet};

use super::container_edits::ContainerEdits;
use super::kubelet_state::{KubeletClaim, KubeletClaims, KubeletView};
use super::plan::{PlanStep, described, restore};
use super::prepared_claims::{ClaimChange, ClaimDetails, Entry, HeldDevice, PreparedClaims, Progress};
use crate::api::cdi;
use crate::api::crd::Devices;
use crate::api::proto::node_records::Holding;
use crate::api::proto::pod_resources_v1::PodResources;
use crate::core::names::{ClaimUid, ClaimUidError, DriverName};

/// Rebuilds the entries of a lost checkpoint from the other sources: CDI files of this driver, and the claims that kubelet lists.
///
/// A claim found in any source is never dropped. If no source names its devices, its entry has none ([`Entry::has_unknown_devices`]), and
/// no claim is prepared until the devices are known. A claim without a file that kubelet has not seen prepared is only started: no
/// container has it, and its devices may be those of another claim. `files` are the claims with a CDI file of this driver, with its content
/// if readable. All other entries count as prepared in this boot, which is the safe assumption.
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
            let of_file = spec.and_then(|spec| Entry::of_cdi_spec(driver, uid, boot_id, spec));
            let mut entry = of_file.unwrap_or_else(|| of_list(boot_id, listed.get(uid).copied()));
            if let Some(claim) = listed.get(uid) {
                if !files.contains_key(uid) && !claim.prepared {
                    entry.progress = Progress::Started {
                        container_edits: None,
                    };
                }
                entry.namespace.clone_from(&claim.namespace);
                entry.name.clone_from(&claim.name);
            }
            (uid.clone(), entry)
        })
        .collect()
}

/// The claims whose CDI files must be read at a start because the checkpoint lacks them, or because there is no usable one. `files` are the
/// claims that have a CDI file.
///
/// No order of this driver's writes leaves a file without a checkpoint entry, so the checkpoint must be an older one.
pub fn unexplained(
    checkpoint: Option<&BTreeMap<ClaimUid, Entry>>,
    files: &BTreeSet<ClaimUid>,
) -> BTreeSet<ClaimUid> {
    let lacks = |uid: &&ClaimUid| checkpoint.is_none_or(|entries| !entries.contains_key(*uid));
    files.iter().filter(lacks).cloned().collect()
}

/// The entries to start with. `files` is the content of the files of [`unexplained`] claims; `kubelet` reads kubelet's list, and is called
/// only without a usable checkpoint.
pub fn initial_entries(
    checkpoint: Option<BTreeMap<ClaimUid, Entry>>,
    driver: &DriverName,
    boot_id: &str,
    files: &BTreeMap<ClaimUid, Option<cdi::Spec>>,
    kubelet: impl FnOnce() -> KubeletView,
) -> BTreeMap<ClaimUid, Entry> {
    match checkpoint {
        Some(mut entries) => {
            let nothing = KubeletView::Lists(BTreeMap::new());
            entries.extend(rebuild(driver, boot_id, files, &nothing));
            entries
        }
        None => rebuild(driver, boot_id, files, &kubelet()),
    }
}

/// The claims of this driver that containers use according to kubelet's PodResources API. The CDI ids show the devices in structured mode
/// only. Kubelet shows claims only with the feature gate `KubeletPodResourcesDynamicResources` (off by default up to 1.33).
pub fn running_claims(driver: &DriverName, pods: &[PodResources]) -> KubeletClaims {
    let resources = pods
        .iter()
        .flat_map(|pod| &pod.containers)
        .flat_map(|container| &container.dynamic_resources);
    let mut running = KubeletClaims::new();
    for resource in resources {
        let ids = resource
            .claim_resources
            .iter()
            .flat_map(|claim| &claim.cdi_devices);
        for id in ids {
            let Some(uid) = driver.claim_of_cdi_id(&id.name) else {
                continue;
            };
            let claim = running.entry(uid).or_insert_with(|| KubeletClaim {
                namespace: resource.claim_namespace.clone(),
                name: resource.claim_name.clone(),
                ours: true,
                prepared: true,
                devices: None,
            });
            claim.add(driver.claim_device_of_cdi_id(&id.name));
        }
    }
    running
}

/// Completes rebuilt records with the claims that containers use: adds missing names, and adds claims that no other source has. If the
/// devices of the latter are unknown, no claim is prepared until they are known. Returns `None` if nothing is missing.
pub fn with_running(prepared_claims: &PreparedClaims, running: &KubeletClaims) -> Option<PreparedClaims> {
    let mut entries = prepared_claims.entries().clone();
    for (uid, claim) in running {
        let entry = entries
            .entry(uid.clone())
            .or_insert_with(|| of_list(prepared_claims.boot_id(), Some(claim)));
        if entry.name.is_empty() {
            entry.namespace.clone_from(&claim.namespace);
            entry.name.clone_from(&claim.name);
        }
    }
    (entries != *prepared_claims.entries()).then(|| PreparedClaims::new(prepared_claims.boot_id(), entries))
}

fn of_list(boot_id: &str, listed: Option<&KubeletClaim>) -> Entry {
    let devices = listed.and_then(|claim| claim.devices.clone());
    Entry {
        namespace: String::new(),
        name: String::new(),
        boot_id: boot_id.to_owned(),
        devices: devices.unwrap_or_default(),
        progress: Progress::Done {
            container_edits: ContainerEdits::default(),
        },
    }
}

/// Plans the update of a claim whose devices have become known.
pub fn plan_explained(
    prepared_claims: &PreparedClaims,
    inventory: &Devices,
    uid: &ClaimUid,
    devices: &[HeldDevice],
) -> Vec<PlanStep> {
    let Some(entry) = prepared_claims
        .entry(uid)
        .filter(|entry| entry.has_unknown_devices())
    else {
        return Vec::new();
    };
    let known = ClaimDetails {
        namespace: entry.namespace.clone(),
        name: entry.name.clone(),
        devices: devices
            .iter()
            .map(|device| described(inventory, device))
            .collect(),
    };
    let mut steps = vec![PlanStep::Save(vec![ClaimChange::Explain(uid.clone(), known)])];
    steps.extend(restore(uid));
    steps
}

/// Plans, claim by claim, the cleanup at a start and at intervals: unfinished attempts, and files without an entry. A plan stops at a
/// failed step; if the driver failed to revert its work, the claim's record stays, so that the plan is retried. The caller makes the result
/// durable afterwards.
///
/// `files` are the claims with a CDI file of this driver. Cleaning up a started entry is safe: no container has been given any part of it,
/// and kubelet, which got no answer, calls again or has forgotten it.
pub fn plan_clearing(prepared_claims: &PreparedClaims, files: &BTreeSet<ClaimUid>) -> Vec<Vec<PlanStep>> {
    let unknown = files.iter().filter(|uid| prepared_claims.entry(uid).is_none());
    let unfinished = prepared_claims
        .entries()
        .iter()
        .filter(|(_, entry)| !entry.is_done());
    unknown
        .map(|uid| vec![PlanStep::RemoveCdi(uid.clone())])
        .chain(unfinished.map(|(uid, _)| plan_free(uid)))
        .collect()
}

/// Plans, claim by claim, the restoration of CDI files at a start: `/var/run/cdi` is empty after a boot. The caller adds a single
/// [`PlanStep::Save`] that stores the changes for all claims.
///
/// Claims prepared in an earlier boot are included although none of their containers runs: kubelet 1.27 does not call Prepare again for a
/// claim in its own checkpoint.
pub fn plan_restoring(prepared_claims: &PreparedClaims) -> Vec<(ClaimUid, Vec<PlanStep>)> {
    let done = prepared_claims
        .entries()
        .iter()
        .filter(|(_, entry)| entry.is_done() && !entry.has_unknown_devices());
    let steps = |uid: &ClaimUid| vec![PlanStep::Prepare(uid.clone()), PlanStep::WriteCdi(uid.clone())];
    done.map(|(uid, _)| (uid.clone(), steps(uid))).collect()
}

/// Plans a retry of restoring one claim's CDI file. Returns `None` if there is nothing to restore: the claim is gone or not prepared, or its
/// devices are unknown.
pub fn plan_restoring_one(prepared_claims: &PreparedClaims, uid: &ClaimUid) -> Option<Vec<PlanStep>> {
    let entry = prepared_claims.entry(uid)?;
    (entry.is_done() && !entry.has_unknown_devices()).then(|| restore(uid))
}

/// Plans, claim by claim, the response to changed devices: a claim's CDI file must never refer to a node that now belongs to another
/// device. `before` and `after` are the inventories. The driver may still know a held device that was not found, such as one that the
/// configuration no longer describes, so it is asked each time.
pub fn plan_refresh(
    prepared_claims: &PreparedClaims,
    before: &Devices,
    after: &Devices,
    found: &Devices,
) -> Vec<(ClaimUid, Vec<PlanStep>)> {
    let changed = |name: &str| before.get(name) != after.get(name) || !found.contains_key(name);
    let touched = prepared_claims
        .entries()
        .iter()
        .filter(|(_, entry)| entry.is_done() && entry.devices.iter().any(|held| changed(&held.device)));
    touched.map(|(uid, _)| (uid.clone(), restore(uid))).collect()
}

/// Plans the rollback after a step for a claim has failed. The caller reports the failure itself. If a step of this plan fails, the rest is
/// skipped: a claim's record is removed only after the driver has reverted its work. The next request for the claim or the device, the next
/// check for orphans or the next start retries it.
///
/// A prepared claim keeps its devices; only its file is removed, so that no further container starts with a device that is no longer the
/// allocated one. That includes a claim of an earlier boot, which kubelet 1.27 does not prepare again. Every other claim is rolled back
/// completely.
pub fn plan_roll_back(prepared_claims: &PreparedClaims, uid: &ClaimUid) -> Vec<PlanStep> {
    let mut steps = vec![PlanStep::RemoveCdi(uid.clone())];
    if prepared_claims.entry(uid).is_some_and(|entry| !entry.is_done()) {
        steps.push(PlanStep::Unprepare(uid.clone()));
        steps.push(PlanStep::Save(vec![ClaimChange::Remove(uid.clone())]));
    }
    steps
}

/// Why a claim is not released manually.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum ReleaseRefusal {
    #[error(transparent)]
    ClaimUid(#[from] ClaimUidError),
    #[error("the claim of uid {0} holds no devices on this node")]
    NotHeld(ClaimUid),
    #[error(
        "kubelet lists {0} as prepared: delete its pod, and kubelet unprepares it. If kubelet cannot and no container uses the claim, use --force"
    )]
    Listed(String),
    #[error("it is unknown whether kubelet still uses {claim} ({why}). If no container uses it, use --force")]
    KubeletUnknown { claim: String, why: String },
}

/// Plans a manual release. Without `force`, only a claim that kubelet does not list is released.
pub fn plan_release(
    prepared_claims: &PreparedClaims,
    kubelet: &KubeletView,
    uid: &str,
    force: bool,
) -> Result<(ClaimUid, Vec<PlanStep>), ReleaseRefusal> {
    let uid = ClaimUid::parse(uid)?;
    let entry = prepared_claims
        .entry(&uid)
        .ok_or_else(|| ReleaseRefusal::NotHeld(uid.clone()))?;
    if !force {
        match kubelet {
            KubeletView::Lists(listed) if listed.contains_key(&uid) => {
                return Err(ReleaseRefusal::Listed(entry.describe(&uid)));
            }
            KubeletView::Lists(_) => {}
            KubeletView::Unknown(why) => {
                return Err(ReleaseRefusal::KubeletUnknown {
                    claim: entry.describe(&uid),
                    why: why.clone(),
                });
            }
        }
    }
    let steps = plan_free(&uid);
    Ok((uid, steps))
}

/// The steps that release a claim. The file goes first: if the process is killed in between, the claim is still recorded.
pub fn plan_free(uid: &ClaimUid) -> Vec<PlanStep> {
    vec![
        PlanStep::RemoveCdi(uid.clone()),
        PlanStep::Unprepare(uid.clone()),
        PlanStep::Save(vec![ClaimChange::Remove(uid.clone())]),
    ]
}

/// All prepared claims, in order of their uids. Namespace and name are empty if they were lost with the checkpoint, and so are the devices if
/// they are unknown.
pub fn holdings(prepared_claims: &PreparedClaims, quarantine: &BTreeMap<ClaimUid, String>) -> Vec<Holding> {
    let holding = |(uid, entry): (&ClaimUid, &Entry)| Holding {
        claim_uid: uid.to_string(),
        claim_namespace: entry.namespace.clone(),
        claim_name: entry.name.clone(),
        devices: entry.devices.iter().map(|held| held.device.clone()).collect(),
        state: match (entry.is_done(), prepared_claims.may_be_in_use(entry)) {
            // Prepare has begun and has not been answered yet.
            (false, _) => "Preparing",
            (true, true) => "Prepared",
            // None of its containers runs, unless kubelet prepares it again.
            (true, false) => "EarlierBoot",
        }
        .to_owned(),
        quarantine: quarantine.get(uid).cloned().unwrap_or_default(),
    };
    prepared_claims.entries().iter().map(holding).collect()
}

#[cfg(test)]
mod tests {
    use super::super::container_edits::cdi_spec;
    use super::super::kubelet_state::KubeletClaims;
    use super::*;
    use crate::api::proto::pod_resources_v1::{
        CdiDevice, ClaimResource, ContainerResources, DynamicResource,
    };
    use crate::core::prepare::container_edits::DeviceNode;

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
        cdi_spec(
            &driver(),
            &uid(last),
            &ContainerEdits::of_device_node(device, node),
        )
    }

    fn listed(ours: bool, devices: Option<&[&str]>) -> KubeletClaim {
        KubeletClaim {
            namespace: "default".into(),
            name: "camera".into(),
            ours,
            prepared: true,
            devices: devices.map(|devices| devices.iter().map(|name| HeldDevice::named(*name)).collect()),
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
            // The content belongs to another claim.
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
        let prepared_claims = PreparedClaims::new(BOOT, entries);
        assert!(
            prepared_claims
                .entries()
                .values()
                .all(|entry| prepared_claims.may_be_in_use(entry))
        );
    }

    #[test]
    fn a_claim_that_kubelet_has_not_seen_prepared_holds_nothing() {
        let unprepared = || KubeletClaim {
            prepared: false,
            ..listed(true, None)
        };
        // The first has a file: kubelet may not have stored the answer yet.
        let files = BTreeMap::from([(uid('1'), Some(spec('1', "x"))), (uid('2'), None)]);
        let kubelet = KubeletView::Lists(KubeletClaims::from([
            (uid('1'), unprepared()),
            (uid('2'), unprepared()),
            (uid('3'), unprepared()),
        ]));
        let entries = rebuild(&driver(), BOOT, &files, &kubelet);
        let done: Vec<bool> = entries.values().map(Entry::is_done).collect();
        assert_eq!(done, [true, true, false]);
        let prepared_claims = PreparedClaims::new(BOOT, entries);
        assert_eq!(
            prepared_claims.with_unknown_devices(Some(&uid('2'))),
            None,
            "no claim waits for the third"
        );
        assert_eq!(
            plan_clearing(&prepared_claims, &files.into_keys().collect()),
            [plan_free(&uid('3'))],
            "the driver reverts unfinished work"
        );
    }

    #[test]
    fn recovery_without_traces_finds_no_claims() {
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
    fn a_claim_known_only_by_a_running_pod_has_unknown_devices() {
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
        let prepared_claims = with_running(&PreparedClaims::new(BOOT, entries), &running).unwrap();
        let entry = |last| prepared_claims.entry(&uid(last)).unwrap();
        assert_eq!(
            (devices(entry('1')), entry('1').name.as_str()),
            (vec!["x"], "camera")
        );
        assert_eq!(entry('2').name, "camera");
        assert!(entry('2').has_unknown_devices() && prepared_claims.may_be_in_use(entry('2')));
        assert_eq!(
            with_running(&prepared_claims, &running),
            None,
            "nothing is lacking now"
        );
    }

    #[test]
    fn a_claim_of_an_earlier_boot_waits_for_its_device() {
        let mut entries = rebuild(
            &driver(),
            "the last boot",
            &BTreeMap::from([(uid('1'), Some(spec('1', "x")))]),
            &KubeletView::Unknown("none".into()),
        );
        let prepared_claims = PreparedClaims::new(BOOT, entries.clone());
        assert_eq!(
            plan_roll_back(&prepared_claims, &uid('1')),
            [PlanStep::RemoveCdi(uid('1'))]
        );
        assert_eq!(
            plan_restoring_one(&prepared_claims, &uid('1')),
            Some(restore(&uid('1')))
        );
        entries.get_mut(&uid('1')).unwrap().progress = Progress::Started {
            container_edits: None,
        };
        let prepared_claims = PreparedClaims::new(BOOT, entries);
        assert_eq!(plan_roll_back(&prepared_claims, &uid('1')), plan_free(&uid('1')));
        assert_eq!(plan_restoring_one(&prepared_claims, &uid('1')), None);
    }

    #[test]
    fn the_file_of_a_claim_of_unknown_devices_is_left_alone() {
        let files = BTreeMap::from([(uid('1'), None)]);
        let prepared_claims = PreparedClaims::new(
            BOOT,
            rebuild(&driver(), BOOT, &files, &KubeletView::Unknown("none".into())),
        );
        assert_eq!(plan_restoring(&prepared_claims), []);
        assert_eq!(plan_restoring_one(&prepared_claims, &uid('1')), None);
        assert_eq!(
            plan_restoring_one(&prepared_claims, &uid('2')),
            None,
            "it has gone"
        );
        assert_eq!(
            plan_clearing(&prepared_claims, &files.into_keys().collect()),
            Vec::<Vec<PlanStep>>::new()
        );
    }

    #[test]
    fn recovery_writes_files_of_explained_claims_only() {
        let files = BTreeMap::from([(uid('1'), None), (uid('2'), Some(spec('2', "y")))]);
        let prepared_claims = PreparedClaims::new(
            BOOT,
            rebuild(&driver(), BOOT, &files, &KubeletView::Unknown("none".into())),
        );
        let none = Devices::new();
        let steps = plan_explained(&prepared_claims, &none, &uid('1'), &[HeldDevice::named("x")]);
        assert!(
            matches!(&steps[0], PlanStep::Save(changes) if matches!(changes[..], [ClaimChange::Explain(..)])),
            "{steps:?}"
        );
        assert_eq!(steps[1..], restore(&uid('1')));
        assert_eq!(
            plan_explained(&prepared_claims, &none, &uid('2'), &[HeldDevice::named("x")]),
            []
        );
        assert_eq!(
            plan_explained(&prepared_claims, &none, &uid('3'), &[HeldDevice::named("x")]),
            []
        );
    }
}

#[cfg(test)]
mod release_tests {
    use std::collections::BTreeMap;

    use super::super::container_edits::ContainerEdits;
    use super::super::kubelet_state::{KubeletClaim, KubeletClaims};
    use super::super::prepared_claims::{HeldDevice, Progress};
    use super::*;

    const UID: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a10";

    fn uid() -> ClaimUid {
        ClaimUid::parse(UID).unwrap()
    }

    fn prepared_claims(boot_id: &str) -> PreparedClaims {
        let entry = Entry {
            namespace: "default".into(),
            name: "camera".into(),
            boot_id: boot_id.into(),
            devices: vec![HeldDevice {
                device: "kvm".into(),
                kind: "test".into(),
                ..HeldDevice::default()
            }],
            progress: Progress::Done {
                container_edits: ContainerEdits::default(),
            },
        };
        PreparedClaims::new("boot", BTreeMap::from([(uid(), entry)]))
    }

    #[test]
    fn an_unlisted_claim_is_released_with_its_file_first() {
        let (_, steps) = plan_release(
            &prepared_claims("boot"),
            &KubeletView::Lists(KubeletClaims::new()),
            UID,
            false,
        )
        .unwrap();
        assert_eq!(
            steps,
            [
                PlanStep::RemoveCdi(uid()),
                PlanStep::Unprepare(uid()),
                PlanStep::Save(vec![ClaimChange::Remove(uid())])
            ]
        );
    }

    #[test]
    fn possibly_listed_claims_are_released_only_by_force() {
        let listed = KubeletView::Lists(KubeletClaims::from([(uid(), KubeletClaim::default())]));
        for kubelet in [listed, KubeletView::Unknown("no such file".into())] {
            let refusal = plan_release(&prepared_claims("boot"), &kubelet, UID, false).unwrap_err();
            assert!(refusal.to_string().contains("--force"), "{refusal}");
            plan_release(&prepared_claims("boot"), &kubelet, UID, true).unwrap();
        }
    }

    #[test]
    fn releasing_an_unknown_or_invalid_uid_is_refused() {
        let kubelet = KubeletView::Lists(KubeletClaims::new());
        let other = UID.replace('7', "8");
        for uid in [other.as_str(), "../../etc"] {
            let refusal = plan_release(&prepared_claims("boot"), &kubelet, uid, true).unwrap_err();
            assert!(refusal.to_string().contains(uid), "{refusal}");
        }
    }

    #[test]
    fn holdings_have_a_holder_and_the_reason_of_a_quarantine() {
        let quarantine = BTreeMap::from([(uid(), "forgotten".to_owned())]);
        let shown = &holdings(&prepared_claims("boot"), &quarantine)[0];
        assert_eq!(
            (shown.devices.as_slice(), shown.state.as_str()),
            (&["kvm".to_owned()][..], "Prepared")
        );
        assert_eq!(shown.quarantine, "forgotten");
        let earlier = &holdings(&prepared_claims("before"), &BTreeMap::new())[0];
        assert_eq!(
            (earlier.state.as_str(), earlier.quarantine.as_str()),
            ("EarlierBoot", "")
        );
    }
}
