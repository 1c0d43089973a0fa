//! Permissions that the controller and the companion need.

use std::fmt;

use super::doctor::DoctorFinding;

/// Component that needs a permission.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Component {
    /// The controller.
    Controller,
    /// The node companion.
    Node,
}

impl fmt::Display for Component {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Controller => "controller",
            Self::Node => "companion",
        })
    }
}

/// A rule of a role: the API group (empty for the core group), the resources (a subresource follows a slash) and the verbs.
type PolicyRule = (&'static str, &'static [&'static str], &'static [&'static str]);

/// The controller's cluster-wide permissions.
const CONTROLLER: [PolicyRule; 6] = [
    (
        "resource.k8s.io",
        &["resourceclasses", "podschedulingcontexts"],
        &["get", "list", "watch"],
    ),
    (
        "resource.k8s.io",
        &["resourceclaims"],
        &["get", "list", "watch", "patch"],
    ),
    (
        "resource.k8s.io",
        &["resourceclaims/status", "podschedulingcontexts/status"],
        &["patch"],
    ),
    ("", &["pods"], &["get"]),
    ("events.k8s.io", &["events"], &["create"]),
    (
        "drayman.dev",
        &[
            "nodeinventories",
            "deviceclassparameters",
            "deviceclaimparameters",
        ],
        &["list", "watch"],
    ),
];

/// A companion's cluster-wide permissions.
const NODE: [PolicyRule; 4] = [
    ("", &["nodes"], &["get"]),
    ("resource.k8s.io", &["resourceclaims"], &["get", "list"]),
    (
        "drayman.dev",
        &["nodeinventories"],
        &["get", "list", "watch", "create", "patch"],
    ),
    ("drayman.dev", &["nodeinventories/status"], &["patch"]),
];

/// A companion's cluster-wide permissions in structured mode.
const STRUCTURED_NODE: [PolicyRule; 3] = [
    ("", &["nodes"], &["get"]),
    ("resource.k8s.io", &["resourceclaims"], &["get", "list"]),
    (
        "resource.k8s.io",
        &["resourceslices"],
        &["get", "list", "watch", "create", "update", "delete"],
    ),
];

/// Additional permissions of a companion for devices of mode `both`.
const NODE_OF_BOTH: PolicyRule = ("resource.k8s.io", &["resourceclaims"], &["watch"]);
/// A companion's permissions in the namespace of Node events.
const NODE_EVENTS: PolicyRule = ("events.k8s.io", &["events"], &["create"]);
/// Namespace of events about cluster-scoped objects.
const EVENTS_NAMESPACE: &str = "default";

/// A controller's permissions in the Lease's namespace, with leader election.
const LEASES: PolicyRule = ("coordination.k8s.io", &["leases"], &["create"]);
/// A controller's permissions on the Lease itself.
const LEASE: PolicyRule = ("coordination.k8s.io", &["leases"], &["get", "update"]);
/// A controller's permissions on Leases in other namespaces: another release may use the same driver name.
const LEASES_ELSEWHERE: PolicyRule = ("coordination.k8s.io", &["leases"], &["list"]);

/// Permissions of a component whose metrics are for authenticated scrapers only.
const REVIEWS: [PolicyRule; 2] = [
    ("authentication.k8s.io", &["tokenreviews"], &["create"]),
    ("authorization.k8s.io", &["subjectaccessreviews"], &["create"]),
];

/// Name of a controller's Lease.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LeaseName {
    /// Namespace of the Lease.
    pub namespace: String,
    /// Name of the Lease, equal to the driver's name.
    pub name: String,
}

/// Permission for one verb on one resource.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Right {
    /// The verb.
    pub verb: &'static str,
    /// The resource; a subresource follows a slash.
    pub resource: &'static str,
    /// The API group; empty for the core group.
    pub group: &'static str,
    /// Namespace; empty means all.
    pub namespace: String,
    /// Name of the object; empty means all.
    pub name: String,
}

impl fmt::Display for Right {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.verb, self.resource)?;
        if !self.group.is_empty() {
            write!(f, ".{}", self.group)?;
        }
        if !self.name.is_empty() {
            write!(f, " {}", self.name)?;
        }
        if !self.namespace.is_empty() {
            write!(f, " in namespace {}", self.namespace)?;
        }
        Ok(())
    }
}

/// Returns the permissions that a component needs. `lease` is the controller's Lease, if it elects a leader;
/// `mode_both` says whether devices of that mode exist.
pub fn needed(component: Component, lease: Option<&LeaseName>, mode_both: bool) -> Vec<Right> {
    let mut rights = match component {
        Component::Controller => everywhere(&CONTROLLER),
        Component::Node => everywhere(&NODE),
    };
    if component == Component::Node {
        if mode_both {
            rights.extend(everywhere(&[NODE_OF_BOTH]));
        }
        rights.extend(each(&NODE_EVENTS, EVENTS_NAMESPACE, ""));
    }
    if let Some(LeaseName { namespace, name }) = lease {
        rights.extend(each(&LEASES, namespace, ""));
        rights.extend(each(&LEASE, namespace, name));
        rights.extend(each(&LEASES_ELSEWHERE, "", name));
    }
    rights
}

/// Returns the permissions that a companion needs in structured mode. No controller runs in that mode.
pub fn needed_in_structured_mode() -> Vec<Right> {
    let mut rights = everywhere(&STRUCTURED_NODE);
    rights.extend(each(&NODE_EVENTS, EVENTS_NAMESPACE, ""));
    rights
}

/// Returns the permissions for reviews of the tokens and rights of scrapers.
pub fn needed_for_reviews() -> Vec<Right> {
    everywhere(&REVIEWS)
}

fn everywhere(rules: &[PolicyRule]) -> Vec<Right> {
    rules.iter().flat_map(|rule| each(rule, "", "")).collect()
}

fn each(rule: &PolicyRule, namespace: &str, name: &str) -> Vec<Right> {
    let (group, resources, verbs) = *rule;
    let of = |resource: &'static str| {
        verbs.iter().map(move |verb| Right {
            verb,
            resource,
            group,
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        })
    };
    resources.iter().copied().flat_map(of).collect()
}

/// Reports the permissions that a component's account lacks.
pub fn findings(component: Component, account: &str, missing: &[Right]) -> Vec<DoctorFinding> {
    let check = "rights";
    if missing.is_empty() {
        return vec![DoctorFinding::fine(
            check,
            format!("{account} has all permissions that the {component} needs"),
        )];
    }
    missing
        .iter()
        .map(|right| {
            DoctorFinding::problem(
                check,
                format!("{account} may not {right}, which the {component} needs"),
                format!(
                    "add the verb {} on {} of the API group {:?} to a role of this account; the chart's roles have it (rbac.create)",
                    right.verb, right.resource, right.group
                ),
            )
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::diagnose::doctor::Level;

    fn lease(namespace: &str) -> LeaseName {
        LeaseName {
            namespace: namespace.to_owned(),
            name: "drayman.dev".to_owned(),
        }
    }

    #[test]
    fn a_missing_right_is_named_by_verb_and_resource() {
        let all = needed(Component::Controller, Some(&lease("drayman")), false);
        let missing: Vec<Right> = all
            .into_iter()
            .filter(|right| right.resource == "resourceclaims/status" || right.verb == "update")
            .collect();
        let findings = findings(Component::Controller, "system:serviceaccount:a:b", &missing);
        let messages: Vec<&str> = findings.iter().map(|finding| finding.message.as_str()).collect();
        assert_eq!(
            messages,
            [
                "system:serviceaccount:a:b may not patch resourceclaims/status.resource.k8s.io, which the controller needs",
                "system:serviceaccount:a:b may not update leases.coordination.k8s.io drayman.dev in namespace drayman, which the controller needs",
            ]
        );
        assert!(findings.iter().all(|finding| finding.level == Level::Problem));
    }

    #[test]
    fn only_leader_election_needs_leases() {
        let leases = |rights: &[Right]| {
            rights
                .iter()
                .filter(|right| right.resource == "leases")
                .map(|right| format!("{} {} in {}", right.verb, right.name, right.namespace))
                .collect::<Vec<_>>()
        };
        assert_eq!(
            leases(&needed(Component::Controller, None, false)),
            Vec::<String>::new()
        );
        assert_eq!(
            leases(&needed(Component::Controller, Some(&lease("a")), false)),
            [
                "create  in a",
                "get drayman.dev in a",
                "update drayman.dev in a",
                "list drayman.dev in "
            ]
        );
        assert_eq!(findings(Component::Node, "x", &[])[0].level, Level::Fine);
    }

    #[test]
    fn companions_watch_claims_for_mode_both_only() {
        let rights = |mode_both| -> Vec<String> {
            let all = needed(Component::Node, None, mode_both);
            all.iter().map(ToString::to_string).collect()
        };
        let watch = "watch resourceclaims.resource.k8s.io".to_owned();
        assert!(rights(true).contains(&watch));
        assert!(!rights(false).contains(&watch));
        assert!(rights(false).contains(&"create events.events.k8s.io in namespace default".to_owned()));
    }
}
