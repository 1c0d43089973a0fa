//! What the two components may do, and must be able to do.

use std::fmt;

use super::doctor::Finding;

/// Who needs a right.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Component {
    /// The controller.
    Controller,
    /// The companion of a node.
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

/// Verbs on resources of one API group, as in a rule of a role.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// The API group; empty for the core group.
    pub group: &'static str,
    /// Resources, with their subresource behind a slash.
    pub resources: &'static [&'static str],
    /// Verbs.
    pub verbs: &'static [&'static str],
}

const fn rule(
    group: &'static str,
    resources: &'static [&'static str],
    verbs: &'static [&'static str],
) -> Rule {
    Rule {
        group,
        resources,
        verbs,
    }
}

/// What the controller needs in the whole cluster.
const CONTROLLER: [Rule; 7] = [
    rule("resource.k8s.io", &["resourceclasses"], &["get", "list", "watch"]),
    rule(
        "resource.k8s.io",
        &["resourceclaims"],
        &["get", "list", "watch", "patch"],
    ),
    rule(
        "resource.k8s.io",
        &["podschedulingcontexts"],
        &["get", "list", "watch"],
    ),
    rule(
        "resource.k8s.io",
        &["resourceclaims/status", "podschedulingcontexts/status"],
        &["patch"],
    ),
    rule("", &["pods"], &["get"]),
    rule("events.k8s.io", &["events"], &["create"]),
    rule(
        "drayman.dev",
        &[
            "nodeinventories",
            "deviceclassparameters",
            "deviceclaimparameters",
        ],
        &["list", "watch"],
    ),
];

/// What a companion needs in the whole cluster.
const NODE: [Rule; 5] = [
    rule("", &["nodes"], &["get"]),
    rule("resource.k8s.io", &["resourceclaims"], &["get", "list", "watch"]),
    rule("events.k8s.io", &["events"], &["create"]),
    rule(
        "drayman.dev",
        &["nodeinventories"],
        &["get", "list", "watch", "create", "patch"],
    ),
    rule("drayman.dev", &["nodeinventories/status"], &["patch"]),
];

/// What a controller that elects a leader needs in the namespace of the Lease.
const LEASE: [Rule; 1] = [rule(
    "coordination.k8s.io",
    &["leases"],
    &["get", "create", "update"],
)];

/// One verb on one resource.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Right {
    /// The verb.
    pub verb: &'static str,
    /// The resource, with its subresource behind a slash.
    pub resource: &'static str,
    /// The API group; empty for the core group.
    pub group: &'static str,
    /// In which namespace; in all of them if empty.
    pub namespace: String,
}

impl fmt::Display for Right {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.verb, self.resource)?;
        if !self.group.is_empty() {
            write!(f, ".{}", self.group)?;
        }
        if !self.namespace.is_empty() {
            write!(f, " in namespace {}", self.namespace)?;
        }
        Ok(())
    }
}

/// What a component must be able to do; `lease` is the namespace of the Lease, if it elects a leader.
pub fn needed(component: Component, lease: Option<&str>) -> Vec<Right> {
    let rules: &[Rule] = match component {
        Component::Controller => &CONTROLLER,
        Component::Node => &NODE,
    };
    let in_namespace = lease.map_or(&[][..], |_| &LEASE);
    let everywhere = rules.iter().map(|rule| (rule, String::new()));
    let there = in_namespace
        .iter()
        .map(|rule| (rule, lease.unwrap_or_default().to_owned()));
    everywhere.chain(there).flat_map(each).collect()
}

fn each((rule, namespace): (&Rule, String)) -> Vec<Right> {
    let of = |resource: &'static str, namespace: &str| {
        rule.verbs
            .iter()
            .map(|verb| Right {
                verb,
                resource,
                group: rule.group,
                namespace: namespace.to_owned(),
            })
            .collect::<Vec<_>>()
    };
    rule.resources
        .iter()
        .flat_map(|resource| of(resource, &namespace))
        .collect()
}

/// Judges what an account that a component runs as may not do, of what it needs.
pub fn judge(component: Component, account: &str, missing: &[Right]) -> Vec<Finding> {
    let check = "rights";
    if missing.is_empty() {
        return vec![Finding::fine(
            check,
            format!("{account} may do what the {component} needs"),
        )];
    }
    missing
        .iter()
        .map(|right| {
            Finding::problem(
                check,
                format!("{account} may not {right}, which the {component} needs"),
                format!(
                    "add the verb {} on {} of the API group {:?} to a role of this account; the chart's have it (rbac.create)",
                    right.verb, right.resource, right.group
                ),
            )
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::inspect::doctor::Level;

    #[test]
    fn a_right_that_is_missing_is_named_by_verb_and_resource() {
        let all = needed(Component::Controller, Some("drayman"));
        let missing: Vec<Right> = all
            .into_iter()
            .filter(|right| right.resource == "resourceclaims/status" || right.verb == "update")
            .collect();
        let findings = judge(Component::Controller, "system:serviceaccount:a:b", &missing);
        let messages: Vec<&str> = findings.iter().map(|finding| finding.message.as_str()).collect();
        assert_eq!(
            messages,
            [
                "system:serviceaccount:a:b may not patch resourceclaims/status.resource.k8s.io, which the controller needs",
                "system:serviceaccount:a:b may not update leases.coordination.k8s.io in namespace drayman, which the controller needs",
            ]
        );
        assert!(findings.iter().all(|finding| finding.level == Level::Problem));
    }

    #[test]
    fn only_who_elects_a_leader_needs_leases_and_only_there() {
        let leases = |rights: &[Right]| {
            rights
                .iter()
                .filter(|right| right.resource == "leases")
                .map(|right| right.namespace.clone())
                .collect::<Vec<_>>()
        };
        assert_eq!(leases(&needed(Component::Controller, None)), Vec::<String>::new());
        assert_eq!(leases(&needed(Component::Controller, Some("a"))), ["a", "a", "a"]);
        assert!(needed(Component::Node, None).len() > 8);
        assert_eq!(judge(Component::Node, "x", &[])[0].level, Level::Fine);
    }
}
