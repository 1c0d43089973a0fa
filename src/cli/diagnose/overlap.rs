//! Checks whether two drivers share one name: both would allocate the same claims and devices.

use std::collections::BTreeMap;

use super::doctor::Finding;

/// Installations of drayman that serve one driver name.
#[derive(Clone, Copy, Debug)]
pub struct Sharers<'a> {
    /// Holders of unexpired Leases with the driver's name, by the Lease's namespace.
    pub leaders: &'a BTreeMap<String, String>,
    /// ClusterRoles that a release has created for its controller with this driver name.
    pub roles: &'a [String],
    /// Unreadable claims allocated under the driver's name, with the reason.
    pub unreadable: &'a BTreeMap<String, String>,
}

/// Reports other installations that use the name `driver`.
pub fn judge(driver: &str, sharers: Sharers<'_>) -> Vec<Finding> {
    let check = "driver name";
    let fix = "give all but one of them another driver name (driverName of the chart, --driver-name) and classes of their own";
    let mut findings = Vec::new();
    if sharers.leaders.len() > 1 {
        let leaders: Vec<String> = sharers
            .leaders
            .iter()
            .map(|(namespace, holder)| format!("{holder} in namespace {namespace}"))
            .collect();
        findings.push(Finding::problem(
            check,
            format!(
                "several controllers of driver {driver} lead at once: {}",
                leaders.join(", ")
            ),
            fix,
        ));
    }
    if sharers.roles.len() > 1 {
        findings.push(Finding::problem(
            check,
            format!(
                "several releases serve driver {driver}, by their ClusterRoles {}",
                sharers.roles.join(", ")
            ),
            fix,
        ));
    }
    for (claim, reason) in sharers.unreadable {
        findings.push(Finding::problem(
            check,
            format!(
                "ResourceClaim {claim} was allocated in the name of driver {driver} by something that is not this drayman: {reason}"
            ),
            "another driver of this name, or a newer drayman, runs here: give one of them another name, or update this one",
        ));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::diagnose::doctor::Level;

    #[test]
    fn two_who_serve_one_name_are_both_named() {
        let leaders = BTreeMap::from([
            ("one".to_owned(), "pod-a".to_owned()),
            ("other".to_owned(), "pod-b".to_owned()),
        ]);
        let unreadable = BTreeMap::from([(
            "shop/gpu".to_owned(),
            "the resource handle has no data".to_owned(),
        )]);
        let roles = ["a-controller.one".to_owned(), "b-controller.other".to_owned()];
        let findings = judge(
            "drayman.dev",
            Sharers {
                leaders: &leaders,
                roles: &roles,
                unreadable: &unreadable,
            },
        );
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
    fn one_installation_is_nothing_to_speak_of() {
        let leaders = BTreeMap::from([("one".to_owned(), "pod-a".to_owned())]);
        let sharers = Sharers {
            leaders: &leaders,
            roles: &["drayman-controller.one".to_owned()],
            unreadable: &BTreeMap::new(),
        };
        assert_eq!(judge("drayman.dev", sharers), []);
    }
}
