mod results;
mod retries;

use std::collections::BTreeMap;
use std::time::Duration;

use super::super::container_edits::ContainerEdits;
use super::super::containers::ResourceSnapshot;
use super::*;
use crate::api::handle::{HandleDevice, VERSION};

const A: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0a";
const B: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0b";
const C: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0c";

fn node() -> NodeIdentity {
    NodeIdentity {
        name: "node-a".into(),
        uid: Some("n-1".into()),
    }
}

fn inventory() -> Devices {
    let device = |name: &str, mode, unhealthy: Option<&str>| {
        let unhealthy = unhealthy.map(str::to_owned);
        (
            name.to_owned(),
            Device {
                name: name.into(),
                kind: "test".into(),
                mode,
                unhealthy,
                ..Device::default()
            },
        )
    };
    Devices::from([
        device("x", Mode::Claims, None),
        device("y", Mode::Claims, None),
        device("sick", Mode::Claims, Some("it smokes")),
        device("plug", Mode::ExtendedResource, None),
        device("both", Mode::Both, None),
        (
            "shared".to_owned(),
            Device {
                shares: Some(2),
                ..device("shared", Mode::Claims, None).1
            },
        ),
    ])
}

fn handle(uid: &str, devices: &[&str]) -> DeviceHandle {
    let device = |name: &&str| HandleDevice {
        request: "device".into(),
        device: (*name).into(),
    };
    DeviceHandle {
        version: VERSION,
        claim_uid: uid.into(),
        node_name: "node-a".into(),
        node_uid: "n-1".into(),
        devices: devices.iter().map(device).collect(),
    }
}

fn claim(uid: &str, handle: &DeviceHandle) -> ClaimToPrepare {
    let (namespace, name) = ("default".into(), "camera".into());
    ClaimToPrepare {
        namespace,
        name,
        uid: uid.into(),
        allocation: Allocation::Handle(handle.to_data().unwrap()),
    }
}

fn plan(prepared_claims: &PreparedClaims, uid: &str, devices: &[&str]) -> Result<Vec<PlanStep>, Refusal> {
    plan_beside(prepared_claims, &Containers::default(), uid, devices)
}

fn plan_beside(
    prepared_claims: &PreparedClaims,
    containers: &Containers,
    uid: &str,
    devices: &[&str],
) -> Result<Vec<PlanStep>, Refusal> {
    let claim = claim(uid, &handle(uid, devices));
    plan_prepare(prepared_claims, containers, &inventory(), &node(), &claim).map(|(_, steps)| steps)
}

fn held(uid: &str, devices: &[&str], boot_id: &str, progress: Progress) -> PreparedClaims {
    let device = |name: &&str| HeldDevice {
        device: (*name).into(),
        kind: "test".into(),
        ..HeldDevice::default()
    };
    let entry = Entry {
        namespace: "default".into(),
        name: "camera".into(),
        boot_id: boot_id.into(),
        devices: devices.iter().map(device).collect(),
        progress,
    };
    PreparedClaims::new("boot", BTreeMap::from([(ClaimUid::parse(uid).unwrap(), entry)]))
}

fn done() -> Progress {
    Progress::Done {
        container_edits: ContainerEdits::default(),
    }
}

#[test]
fn the_checkpoint_is_written_before_the_driver_call_and_answer() {
    let uid = ClaimUid::parse(A).unwrap();
    let steps = plan(&PreparedClaims::new("boot", BTreeMap::new()), A, &["x"]).unwrap();
    assert!(
        matches!(&steps[0], PlanStep::Save(changes) if matches!(changes[..], [ClaimChange::Start(..)])),
        "{steps:?}"
    );
    assert_eq!(steps[1], PlanStep::Prepare(uid.clone()));
    assert_eq!(steps[2], PlanStep::WriteCdi(uid.clone()));
    assert_eq!(steps[3], PlanStep::Save(vec![ClaimChange::Finish(uid)]));
}

#[test]
fn the_same_claim_again_only_refreshes_its_file() {
    let steps = plan(&held(A, &["y", "x"], "boot", done()), A, &["x", "y"]).unwrap();
    assert_eq!(steps, restore(&ClaimUid::parse(A).unwrap()));
    assert!(
        matches!(
            &steps[..],
            [PlanStep::Prepare(_), PlanStep::Save(_), PlanStep::WriteCdi(_)]
        ),
        "new device numbers are recorded before a container can get them: {steps:?}"
    );
}

#[test]
fn a_device_of_another_claim_is_refused_with_its_name() {
    let refusal = plan(&held(A, &["x"], "boot", done()), B, &["y", "x"]).unwrap_err();
    assert_eq!(
        refusal.to_string(),
        format!("device \"x\" is held by claim default/camera (uid {A}) until it is unprepared")
    );
    assert_eq!(
        (refusal.reason(), refusal.is_invalid_request()),
        ("DeviceHeld", false)
    );
}

#[test]
fn leftovers_of_failed_attempts_and_earlier_boots_give_way() {
    let started = Progress::Started {
        container_edits: None,
    };
    for prepared_claims in [
        held(A, &["x"], "boot", started),
        held(A, &["x"], "before", done()),
    ] {
        let steps = plan(&prepared_claims, B, &["x"]).unwrap();
        assert_eq!(steps[0], PlanStep::RemoveCdi(ClaimUid::parse(A).unwrap()));
        assert_eq!(steps[1], PlanStep::Unprepare(ClaimUid::parse(A).unwrap()));
        assert!(
            matches!(&steps[2], PlanStep::Save(changes) if matches!(changes[..], [ClaimChange::Remove(_), ClaimChange::Start(..)]))
        );
    }
}

#[test]
fn a_claim_that_was_allocated_anew_without_unprepare_is_refused() {
    let refusal = plan(&held(A, &["x"], "boot", done()), A, &["y"]).unwrap_err();
    assert_eq!(
        refusal,
        Refusal::Changed {
            held: "x".into(),
            named: "y".into()
        }
    );
}

#[test]
fn a_claim_of_unknown_devices_is_explained_by_its_own_prepare() {
    let steps = plan(&held(A, &[], "boot", done()), A, &["x"]).unwrap();
    let PlanStep::Save(changes) = &steps[0] else {
        panic!("{steps:?}")
    };
    let [ClaimChange::Explain(uid, known)] = &changes[..] else {
        panic!("{changes:?}")
    };
    assert_eq!((uid.as_str(), known.name.as_str()), (A, "camera"));
    assert_eq!(
        (known.devices[0].device.as_str(), known.devices[0].kind.as_str()),
        ("x", "test")
    );
    assert_eq!(steps[1..], restore(&ClaimUid::parse(A).unwrap()));
}

#[test]
fn unknown_devices_block_every_other_prepare() {
    let refusal = plan(&held(A, &[], "boot", done()), B, &["x"]).unwrap_err();
    assert_eq!(
        (refusal.reason(), refusal.is_invalid_request()),
        ("HoldingsUnknown", false)
    );
    assert!(
        refusal.to_string().contains(&format!("drayman node release {A}")),
        "{refusal}"
    );
    // No container of an earlier boot runs.
    plan(&held(A, &[], "before", done()), B, &["x"]).unwrap();
}

#[test]
fn unknown_devices_do_not_include_those_of_other_claims() {
    let mut prepared_claims = held(A, &[], "boot", done());
    let other = held(B, &["x"], "boot", done())
        .entry(&ClaimUid::parse(B).unwrap())
        .cloned();
    prepared_claims.apply(&ClaimChange::Start(ClaimUid::parse(B).unwrap(), other.unwrap()));
    assert_eq!(
        plan(&prepared_claims, A, &["x"]).unwrap_err().reason(),
        "DeviceHeld"
    );
}

#[test]
fn unavailable_devices_are_refused_with_a_reason() {
    let empty = PreparedClaims::new("boot", BTreeMap::new());
    for (devices, reason) in [
        (&["x", "x"][..], "InvalidHandle"),
        (&[], "InvalidHandle"),
        (&["nowhere"], "DeviceGone"),
        (&["../x"], "DeviceGone"),
        (&["sick"], "DeviceUnhealthy"),
        (&["plug"], "WrongMode"),
    ] {
        assert_eq!(
            plan(&empty, A, devices).unwrap_err().reason(),
            reason,
            "{devices:?}"
        );
    }
}

#[test]
fn a_handle_of_another_claim_or_node_is_refused() {
    let empty = PreparedClaims::new("boot", BTreeMap::new());
    let good = handle(A, &["x"]);
    let foreign = [
        (
            DeviceHandle {
                claim_uid: B.into(),
                ..good.clone()
            },
            "InvalidHandle",
        ),
        (
            DeviceHandle {
                node_name: "node-b".into(),
                ..good.clone()
            },
            "WrongNode",
        ),
        (
            DeviceHandle {
                node_uid: "n-0".into(),
                ..good.clone()
            },
            "WrongNode",
        ),
    ];
    for (handle, reason) in foreign {
        let refusal = plan_prepare(
            &empty,
            &Containers::default(),
            &inventory(),
            &node(),
            &claim(A, &handle),
        )
        .unwrap_err();
        assert_eq!(refusal.reason(), reason, "{refusal}");
    }
    let unknown = NodeIdentity { uid: None, ..node() };
    let refusal = plan_prepare(
        &empty,
        &Containers::default(),
        &inventory(),
        &unknown,
        &claim(A, &good),
    )
    .unwrap_err();
    assert_eq!(refusal.reason(), "NodeUnknown");
}

#[test]
fn hostile_names_and_uids_are_refused_before_planning() {
    let empty = PreparedClaims::new("boot", BTreeMap::new());
    let good = claim(A, &handle(A, &["x"]));
    for bad in [
        ClaimToPrepare {
            uid: "../../etc".into(),
            ..good.clone()
        },
        ClaimToPrepare {
            uid: String::new(),
            ..good.clone()
        },
        ClaimToPrepare {
            namespace: "a/b".into(),
            ..good.clone()
        },
        ClaimToPrepare {
            name: "x".repeat(1 << 20),
            ..good.clone()
        },
        ClaimToPrepare {
            allocation: Allocation::Handle("not ours".into()),
            ..good.clone()
        },
        ClaimToPrepare {
            allocation: Allocation::Handle("x".repeat(1 << 20)),
            ..good.clone()
        },
        ClaimToPrepare {
            allocation: Allocation::StructuredParameters,
            ..good
        },
    ] {
        let refusal = plan_prepare(&empty, &Containers::default(), &inventory(), &node(), &bad).unwrap_err();
        assert!(
            refusal.is_invalid_request() && refusal.to_string().len() < 300,
            "{refusal}"
        );
    }
}

#[test]
fn unprepare_removes_the_file_first_and_accepts_unknown_claims() {
    let claim = ClaimToUnprepare {
        uid: A.into(),
        ..ClaimToUnprepare::default()
    };
    let uid = ClaimUid::parse(A).unwrap();
    let empty = PreparedClaims::new("boot", BTreeMap::new());
    assert_eq!(
        plan_unprepare(&empty, &claim),
        Ok(vec![PlanStep::RemoveCdi(uid.clone())])
    );
    assert_eq!(
        plan_unprepare(&held(A, &["x"], "boot", done()), &claim),
        Ok(vec![
            PlanStep::RemoveCdi(uid.clone()),
            PlanStep::Unprepare(uid.clone()),
            PlanStep::Save(vec![ClaimChange::Remove(uid)])
        ])
    );
}

#[test]
fn a_shared_device_is_given_to_as_many_claims_as_it_has_shares() {
    let mut entries = held(A, &["shared"], "boot", done()).entries().clone();
    plan(&PreparedClaims::new("boot", entries.clone()), B, &["shared"]).unwrap();
    entries.extend(held(B, &["shared"], "boot", done()).entries().clone());
    let both = PreparedClaims::new("boot", entries.clone());
    let refusal = plan(&both, C, &["shared"]).unwrap_err();
    assert_eq!(refusal.reason(), "DeviceHeld");
    assert!(refusal.to_string().contains("2 shares"), "{refusal}");
    assert_eq!(
        plan(&both, B, &["shared"]).unwrap(),
        restore(&ClaimUid::parse(B).unwrap())
    );
    // Stale claims are evicted only if their share is needed.
    entries.extend(held(B, &["shared"], "before", done()).entries().clone());
    let steps = plan(&PreparedClaims::new("boot", entries.clone()), C, &["shared"]).unwrap();
    assert_eq!(steps[0], PlanStep::RemoveCdi(ClaimUid::parse(B).unwrap()));
    entries.remove(&ClaimUid::parse(A).unwrap());
    let steps = plan(&PreparedClaims::new("boot", entries.clone()), C, &["shared"]).unwrap();
    assert!(matches!(&steps[0], PlanStep::Save(_)), "{steps:?}");
    // No more are evicted than needed, and a failed attempt before a claim of an earlier boot.
    let started = Progress::Started {
        container_edits: None,
    };
    for (of_a, of_b, evicted) in [(done(), started.clone(), B), (started, done(), A)] {
        entries.extend(held(A, &["shared"], "before", of_a).entries().clone());
        entries.extend(held(B, &["shared"], "before", of_b).entries().clone());
        let steps = plan(&PreparedClaims::new("boot", entries.clone()), C, &["shared"]).unwrap();
        let removed: Vec<&str> = steps
            .iter()
            .filter_map(|step| match step {
                PlanStep::RemoveCdi(uid) => Some(uid.as_str()),
                _ => None,
            })
            .collect();
        assert_eq!(removed, [evicted]);
    }
}

#[test]
fn devices_of_containers_count_for_mode_both() {
    let empty = PreparedClaims::new("boot", BTreeMap::new());
    let mut containers = Containers::default();
    let reason = |containers: &Containers| {
        plan_beside(&empty, containers, A, &["both"]).map_err(|refusal| refusal.reason())
    };
    assert_eq!(reason(&containers), Err("PodResourcesUnavailable"));
    containers.seen(&ResourceSnapshot::default(), Duration::ZERO);
    let steps = reason(&containers).unwrap();
    assert_eq!(takes_from_both(&steps, &inventory()).as_deref(), Some("both"));
    assert_eq!(
        takes_from_both(&plan(&empty, A, &["x"]).unwrap(), &inventory()),
        None
    );
    containers.allocated([("both", &[][..]), ("x", &[][..])], Duration::ZERO);
    assert_eq!(reason(&containers), Err("DeviceHeld"));
    plan_beside(&empty, &containers, A, &["x"]).expect("its kind has one API");
}

/// A result of the scheduler: `device`, `device#share` or `device!` for admin access.
fn result(text: &str) -> DeviceResult {
    let (device, admin_access) = match text.strip_suffix('!') {
        Some(device) => (device, true),
        None => (text, false),
    };
    let (device, share_id) = match device.split_once('#') {
        Some((device, share)) => (device, Some(share.to_owned())),
        None => (device, None),
    };
    DeviceResult {
        request: "device".into(),
        pool: "node-a".into(),
        device: device.into(),
        share_id,
        admin_access,
        pod_claim_name: None,
    }
}

fn structured_claim(uid: &str, results: &[&str]) -> ClaimToPrepare {
    ClaimToPrepare {
        namespace: "default".into(),
        name: "camera".into(),
        uid: uid.into(),
        allocation: Allocation::Results(results.iter().map(|text| result(text)).collect()),
    }
}

fn plan_structured(
    prepared_claims: &PreparedClaims,
    uid: &str,
    results: &[&str],
) -> Result<Vec<PlanStep>, Refusal> {
    let claim = structured_claim(uid, results);
    let containers = Containers::default();
    plan_prepare(prepared_claims, &containers, &inventory(), &node(), &claim).map(|(_, steps)| steps)
}

/// The prepared claims after each of these claims was prepared in order.
fn prepared(claims: &[(&str, &[&str])]) -> PreparedClaims {
    let mut prepared_claims = PreparedClaims::new("boot", BTreeMap::new());
    for (uid, results) in claims {
        for step in plan_structured(&prepared_claims, uid, results).unwrap() {
            match step {
                PlanStep::Save(changes) => changes.iter().for_each(|change| prepared_claims.apply(change)),
                PlanStep::Prepare(uid) => {
                    prepared_claims.set_container_edits(&uid, ContainerEdits::default(), &inventory());
                }
                _ => {}
            }
        }
    }
    prepared_claims
}

#[test]
fn the_schedulers_results_are_planned_like_a_handle() {
    let steps = plan_structured(&PreparedClaims::new("boot", BTreeMap::new()), A, &["x", "y"]).unwrap();
    assert_eq!(taken(&steps).collect::<Vec<_>>(), ["x", "y"]);
    assert_eq!(steps.len(), 4);
}

#[test]
fn a_second_holder_is_refused_with_the_name_of_the_first() {
    let prepared_claims = prepared(&[(A, &["x"])]);
    let refusal = plan_structured(&prepared_claims, B, &["x"]).unwrap_err();
    assert_eq!(refusal.reason(), "DeviceHeld");
    assert!(refusal.to_string().contains("default/camera"), "{refusal}");
    assert!(plan_structured(&prepared_claims, A, &["x"]).is_ok(), "repeated");
}

#[test]
fn admin_access_neither_holds_nor_needs_a_free_device() {
    let beside_holder = prepared(&[(A, &["x"]), (B, &["x!"])]);
    assert_eq!(beside_holder.holder("x").unwrap().0.as_str(), A);
    let before_holder = prepared(&[(A, &["x!"]), (B, &["x"])]);
    assert_eq!(before_holder.holder("x").unwrap().0.as_str(), B);
    let steps = plan_structured(&beside_holder, C, &["x!", "sick!"]).unwrap();
    assert_eq!(taken(&steps).count(), 0);
}

#[test]
fn a_device_with_and_without_admin_access_is_held() {
    for results in [&["x!", "x"], &["x", "x!"]] {
        let both = prepared(&[(A, results)]);
        assert_eq!(both.holder("x").unwrap().0.as_str(), A);
    }
}

#[test]
fn shares_are_counted_by_their_ids() {
    let one = prepared(&[(A, &["shared#1"])]);
    assert!(plan_structured(&one, B, &["shared#2"]).is_ok());
    assert_eq!(
        plan_structured(&one, B, &["shared#2", "shared#3"])
            .unwrap_err()
            .reason(),
        "DeviceHeld"
    );
    let both = prepared(&[(A, &["shared#1", "shared#2"])]);
    assert_eq!(
        plan_structured(&both, B, &["shared#3"]).unwrap_err().reason(),
        "DeviceHeld"
    );
}

#[test]
fn a_device_twice_without_share_ids_is_refused() {
    let none = PreparedClaims::new("boot", BTreeMap::new());
    for results in [
        &["x", "x"][..],
        &["shared#1", "shared"],
        &["shared#1", "shared#1"],
    ] {
        let refusal = plan_structured(&none, A, results).unwrap_err();
        assert!(matches!(refusal, Refusal::Twice(_)), "{results:?}: {refusal}");
    }
    assert_eq!(plan_structured(&none, A, &[]).unwrap_err(), Refusal::NoDevice);
}

#[test]
fn a_pool_of_another_node_is_refused() {
    let mut claim = structured_claim(A, &["x"]);
    if let Allocation::Results(results) = &mut claim.allocation {
        results[0].pool = "node-b".into();
    }
    let none = PreparedClaims::new("boot", BTreeMap::new());
    let refusal = plan_prepare(&none, &Containers::default(), &inventory(), &node(), &claim).unwrap_err();
    assert_eq!(
        (refusal.reason(), refusal.is_invalid_request()),
        ("WrongNode", true)
    );
}

#[test]
fn a_prepared_claim_with_another_allocation_is_refused() {
    let prepared_claims = prepared(&[(A, &["shared#1"])]);
    for results in [&["x"][..], &["shared#2"], &["shared!"]] {
        let refusal = plan_structured(&prepared_claims, A, results).unwrap_err();
        assert_eq!(refusal.reason(), "AllocationChanged", "{results:?}");
    }
}

#[test]
fn more_shares_than_the_device_has_are_refused() {
    let none = PreparedClaims::new("boot", BTreeMap::new());
    for results in [&["shared#1", "shared#2", "shared#3"][..], &["x#1", "x#2"]] {
        let refusal = plan_structured(&none, A, results).unwrap_err();
        assert!(matches!(refusal, Refusal::TooFewShares { .. }), "{refusal}");
    }
}

#[test]
fn share_ids_lost_with_the_checkpoint_are_recorded_again() {
    let mut prepared_claims = prepared(&[(A, &["shared#1", "shared#2"])]);
    let uid = ClaimUid::parse(A).unwrap();
    let mut entry = prepared_claims.entry(&uid).unwrap().clone();
    for held in &mut entry.devices {
        held.structured.as_mut().unwrap().share_ids.clear();
    }
    prepared_claims.apply(&ClaimChange::Start(uid.clone(), entry));
    let steps = plan_structured(&prepared_claims, A, &["shared#1", "shared#2"]).unwrap();
    let PlanStep::Save(changes) = &steps[0] else {
        panic!("{steps:?}");
    };
    prepared_claims.apply(&changes[0]);
    let entry = prepared_claims.entry(&uid).unwrap();
    assert_eq!(entry.devices[0].shares(), 2);
    let refusal = plan_structured(&prepared_claims, B, &["shared#3"]).unwrap_err();
    assert_eq!(refusal.reason(), "DeviceHeld");
}
