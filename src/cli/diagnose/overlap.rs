//! Checks whether two drivers share one name: both would allocate the same claims and devices.

use std::collections::{BTreeMap, BTreeSet};

use super::doctor::{DoctorFinding, some};
use super::leftovers::held_by;
use crate::api::crd::NodeInventory;
use crate::api::resource::ResourceClaim;
use crate::core::allocation::inventory::unready;

/// Name of the check.
const CHECK: &str = "driver name";
/// Fix for two installations of one driver name.
const FIX: &str = "give all but one of them another driver name (driverName of the chart, --driver-name) and classes of their own";

/// Reports other installations that use the name `driver`.
///
/// * `leaders`: holders of unexpired Leases with the driver's name, by the Lease's namespace.
/// * `roles`: ClusterRoles that a release has created for its controller with this driver name.
/// * `unreadable`: unreadable claims allocated under the driver's name, with the reason.
pub fn findings(
    driver: &str,
    leaders: &BTreeMap<String, String>,
    roles: &[String],
    unreadable: &BTreeMap<String, String>,
) -> Vec<DoctorFinding> {
    let mut findings = Vec::new();
    if leaders.len() > 1 {
        let leaders: Vec<String> = leaders
            .iter()
            .map(|(namespace, holder)| format!("{holder} in namespace {namespace}"))
            .collect();
        findings.push(DoctorFinding::problem(
            CHECK,
            format!(
                "several controllers of driver {driver} lead at once: {}",
                leaders.join(", ")
            ),
            FIX,
        ));
    }
    if roles.len() > 1 {
        findings.push(DoctorFinding::problem(
            CHECK,
            format!(
                "several releases serve driver {driver}, by their ClusterRoles {}",
                roles.join(", ")
            ),
            FIX,
        ));
    }
    for (claim, reason) in unreadable {
        findings.push(DoctorFinding::problem(
            CHECK,
            format!(
                "ResourceClaim {claim} has an allocation of driver {driver} that this release cannot read: {reason}"
            ),
            "another driver of this name, or a newer drayman, runs here: give one of them another name, or update this one",
        ));
    }
    findings
}

/// Reports companions of `driver` of several releases.
pub fn companions(driver: &str, releases: &BTreeSet<String>) -> Option<DoctorFinding> {
    (releases.len() > 1).then(|| {
        DoctorFinding::problem(
            CHECK,
            format!(
                "companions of driver {driver} belong to several releases: {}",
                some(releases)
            ),
            FIX,
        )
    })
}

/// The same as [`unserved`] in classic mode, for drivers with inventories: a companion that stops sets its inventory to not ready.
pub fn unserved_inventories(inventories: &[NodeInventory], claims: &[ResourceClaim]) -> Vec<DoctorFinding> {
    let is_ready = |inventory: &&NodeInventory| unready(inventory).is_none();
    let driver = |inventory: &'_ NodeInventory| inventory.spec.driver_name.clone();
    let listed: BTreeSet<String> = inventories.iter().map(driver).collect();
    let served: BTreeSet<String> = inventories.iter().filter(is_ready).map(driver).collect();
    let held = listed.iter().filter_map(|driver| {
        let claims = held_by(driver, claims);
        let names: BTreeSet<String> = claims.into_iter().map(|claim| claim.name).collect();
        (!names.is_empty()).then_some((driver.as_str(), names))
    });
    unserved(&held.collect(), &served.iter().map(String::as_str).collect())
}

/// Reports claims with devices of drivers that no node serves, for example after a change of the driver's name. `held` maps drivers to
/// claims. A warning, because a driver of another vendor may just be restarting.
pub fn unserved(held: &BTreeMap<&str, BTreeSet<String>>, served: &BTreeSet<&str>) -> Vec<DoctorFinding> {
    let unserved = held.iter().filter(|(driver, _)| !served.contains(*driver));
    unserved
        .map(|(driver, claims)| {
            DoctorFinding::warning(
                CHECK,
                format!(
                    "no node serves driver {driver}, but these claims have its devices: {}; their pods can neither start nor terminate",
                    some(claims)
                ),
                "start its node plugins; if a release of drayman had this driver name before, set driverName back until these claims are deleted",
            )
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::diagnose::doctor::Level;

    #[test]
    fn two_installations_of_one_name_are_both_named() {
        let leaders = BTreeMap::from([
            ("one".to_owned(), "pod-a".to_owned()),
            ("other".to_owned(), "pod-b".to_owned()),
        ]);
        let unreadable = BTreeMap::from([(
            "shop/gpu".to_owned(),
            "the resource handle has no data".to_owned(),
        )]);
        let roles = ["a-controller.one".to_owned(), "b-controller.other".to_owned()];
        let findings = findings("drayman.dev", &leaders, &roles, &unreadable);
        assert!(findings.iter().all(|finding| finding.level == Level::Problem));
        for (finding, parts) in findings.iter().zip([
            ["pod-a in namespace one", "pod-b in namespace other"],
            ["a-controller.one", "b-controller.other"],
            ["shop/gpu", "has no data"],
        ]) {
            assert!(
                parts.iter().all(|part| finding.message.contains(part)),
                "{finding:?}"
            );
        }
        assert_eq!(findings.len(), 3);
    }

    #[test]
    fn one_installation_has_no_finding() {
        let leaders = BTreeMap::from([("one".to_owned(), "pod-a".to_owned())]);
        let roles = ["drayman-controller.one".to_owned()];
        assert_eq!(findings("drayman.dev", &leaders, &roles, &BTreeMap::new()), []);
    }

    #[test]
    fn companions_of_two_releases_are_named() {
        let one = BTreeSet::from(["a/drayman".to_owned()]);
        assert_eq!(companions("drayman.dev", &one), None);
        let two = BTreeSet::from(["a/drayman".to_owned(), "b/drayman".to_owned()]);
        let finding = companions("drayman.dev", &two).unwrap();
        assert_eq!(finding.level, Level::Problem);
        assert!(
            two.iter().all(|release| finding.message.contains(release)),
            "{finding:?}"
        );
    }

    #[test]
    fn claims_of_a_driver_that_nothing_serves_are_named() {
        let held = BTreeMap::from([
            ("old.example.com", BTreeSet::from(["shop/till".to_owned()])),
            ("drayman.dev", BTreeSet::from(["shop/other".to_owned()])),
        ]);
        let [finding] = unserved(&held, &BTreeSet::from(["drayman.dev"]))
            .try_into()
            .unwrap();
        for part in ["old.example.com", "shop/till"] {
            assert!(finding.message.contains(part), "{finding:?}");
        }
        assert_eq!(finding.level, Level::Warning);
        assert!(finding.fix.unwrap().contains("set driverName back"));
    }

    #[test]
    fn a_stopped_companion_serves_no_driver() {
        let claim: ResourceClaim = serde_json::from_value(serde_json::json!({
            "metadata": { "namespace": "shop", "name": "till", "finalizers": ["old.example.com/deletion-protection"] },
            "spec": { "resourceClassName": "test" },
        }))
        .unwrap();
        let inventory = |status: &str| -> NodeInventory {
            serde_json::from_value(serde_json::json!({
                "apiVersion": "drayman.dev/v1alpha1", "kind": "NodeInventory",
                "metadata": { "name": "node-a.old.example.com" },
                "spec": { "driverName": "old.example.com", "nodeName": "node-a", "nodeUid": "a", "devices": [] },
                "status": { "conditions": [{
                    "type": "Ready", "status": status, "reason": "Stopped", "message": "",
                    "lastTransitionTime": "2024-01-01T00:00:00Z",
                }] },
            }))
            .unwrap()
        };
        let count =
            |status: &str, claims: &[ResourceClaim]| unserved_inventories(&[inventory(status)], claims).len();
        let claims = [claim];
        assert_eq!(count("False", &claims), 1);
        assert_eq!(count("True", &claims), 0);
        assert_eq!(count("False", &[]), 0);
    }
}
