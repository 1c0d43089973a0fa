//! Rendered privileges: roles, service accounts, security contexts and the admission policy.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::chart::helm::{
    chart, object, objects, one_kind, pod_spec, render, repository, variants_and_modes,
};

/// A role's rules in canonical form, with one verb and one resource each.
pub(crate) fn allowed(role: &Value) -> BTreeSet<String> {
    let mut allowed = BTreeSet::new();
    let list = |value: &Value| -> Vec<String> {
        value
            .as_array()
            .into_iter()
            .flatten()
            .map(|text| text.as_str().expect("a text").to_owned())
            .collect()
    };
    for rule in role["rules"].as_array().expect("rules") {
        for group in list(&rule["apiGroups"]) {
            for resource in list(&rule["resources"]) {
                for verb in list(&rule["verbs"]) {
                    allowed.insert(format!(
                        "{verb} {resource}.{group} {:?}",
                        list(&rule["resourceNames"])
                    ));
                }
            }
        }
    }
    assert!(!allowed.is_empty());
    allowed
}

#[test]
fn the_roles_are_those_with_which_the_programs_are_tested() {
    // The programs are tested with mode `both`, which requires one more right.
    let installed = of_mode_both();
    let tested = objects(&std::fs::read_to_string(repository("hack/rbac.yaml")).expect("hack/rbac.yaml"));
    for (kind, ours, theirs) in [
        ("ClusterRole", "drayman-controller.drayman", "drayman-controller"),
        ("ClusterRole", "drayman-node.drayman", "drayman-node"),
        ("Role", "drayman-controller", "drayman-controller"),
        ("Role", "drayman-node.drayman", "drayman-node"),
    ] {
        assert_eq!(
            allowed(object(&installed, kind, ours)),
            allowed(object(&tested, kind, theirs)),
            "{kind} {ours}"
        );
    }
}

/// Renders the chart with a kind of mode `both`.
fn of_mode_both() -> Vec<Value> {
    let more = [
        "--set=deviceKinds[0].mode=both",
        "--set=deviceKinds[0].resourceName=example.com/camera",
    ];
    one_kind(&more)
}

#[test]
fn the_companion_watches_claims_for_mode_both_only() {
    let watch = "watch resourceclaims.resource.k8s.io []";
    for (rendered, expected) in [(one_kind(&[]), false), (of_mode_both(), true)] {
        let role = object(&rendered, "ClusterRole", "drayman-node.drayman");
        assert_eq!(allowed(role).contains(watch), expected);
    }
}

#[test]
fn the_companion_writes_events_in_the_namespace_of_nodes_only() {
    let rendered = one_kind(&[]);
    let everywhere = allowed(object(&rendered, "ClusterRole", "drayman-node.drayman"));
    assert!(
        everywhere.iter().all(|right| !right.contains("events")),
        "{everywhere:?}"
    );
    for kind in ["Role", "RoleBinding"] {
        let object = object(&rendered, kind, "drayman-node.drayman");
        assert_eq!(object["metadata"]["namespace"], "default", "{kind}");
    }
}

/// `drayman doctor` checks these rights.
#[test]
fn the_doctor_knows_the_rights_of_the_roles() {
    use drayman::cli::diagnose::rights::{Component, LeaseName, needed};
    let installed = of_mode_both();
    let lease = LeaseName {
        namespace: "drayman".to_owned(),
        name: "drayman.dev".to_owned(),
    };
    let known = |component, lease: Option<&LeaseName>, namespace: &str| -> BTreeSet<String> {
        needed(component, lease, true)
            .into_iter()
            .filter(|right| right.namespace == namespace)
            .map(|right| {
                let names = Some(&right.name).filter(|name| !name.is_empty());
                let names = Vec::from_iter(names);
                format!("{} {}.{} {names:?}", right.verb, right.resource, right.group)
            })
            .collect()
    };
    for (kind, name, known) in [
        (
            "ClusterRole",
            "drayman-controller.drayman",
            known(Component::Controller, Some(&lease), ""),
        ),
        (
            "ClusterRole",
            "drayman-node.drayman",
            known(Component::Node, None, ""),
        ),
        (
            "Role",
            "drayman-node.drayman",
            known(Component::Node, None, "default"),
        ),
        (
            "Role",
            "drayman-controller",
            known(Component::Controller, Some(&lease), "drayman"),
        ),
    ] {
        assert_eq!(known, allowed(object(&installed, kind, name)), "{kind} {name}");
    }
}

#[test]
fn no_role_has_wildcards_secrets_or_users_own_objects() {
    for (variant, mode) in &variants_and_modes() {
        let rendered = render(Some(variant), mode);
        let roles = rendered
            .iter()
            .filter(|object| object["kind"] == "ClusterRole" || object["kind"] == "Role");
        for role in roles {
            let name = &role["metadata"]["name"];
            assert!(!role["rules"].to_string().contains('*'), "{name} of {variant:?}");
            let of_users = role["metadata"]["labels"].as_object().is_some_and(|labels| {
                labels
                    .keys()
                    .any(|label| label.starts_with("rbac.authorization.k8s.io/aggregate-to-"))
            });
            for right in allowed(role) {
                assert!(!right.contains(" secrets."), "{name} of {variant:?}: {right}");
                let writes = right.starts_with("create ") || right.starts_with("delete");
                let harmless = right.contains("leases.")
                    || right.contains("events.")
                    || right.contains("nodeinventories.")
                    || right.contains("resourceslices.")
                    // Reviews do not change anything.
                    || right.contains("tokenreviews.")
                    || right.contains("subjectaccessreviews.")
                    // Only our own CRDs, by name.
                    || right.contains("customresourcedefinitions.apiextensions.k8s.io [\"device");
                assert!(of_users || !writes || harmless, "{name} of {variant:?}: {right}");
                // Any user with the verb bind or escalate can get every right.
                for verb in ["bind ", "escalate ", "impersonate "] {
                    assert!(!right.starts_with(verb), "{name} of {variant:?}: {right}");
                }
            }
        }
    }
}

/// Every service account is in that group too, so any compromised container can read as much.
#[test]
fn authenticated_users_read_only_classes_and_parameters() {
    let to_everybody = |rendered: &[Value]| -> Vec<String> {
        let bindings = rendered.iter().filter(|object| {
            ["ClusterRoleBinding", "RoleBinding"].contains(&object["kind"].as_str().unwrap_or_default())
                && object["subjects"].to_string().contains("\"Group\"")
        });
        bindings
            .map(|binding| {
                assert_eq!(binding["subjects"][0]["name"], "system:authenticated");
                binding["roleRef"]["name"].as_str().expect("a name").to_owned()
            })
            .collect()
    };
    let usual = one_kind(&[]);
    let [role] = to_everybody(&usual).try_into().expect("one binding");
    let expected: BTreeSet<String> = [
        "resourceclasses.resource.k8s.io",
        "deviceclassparameters.drayman.dev",
    ]
    .iter()
    .flat_map(|resource| ["get", "list", "watch"].map(|verb| format!("{verb} {resource} []")))
    .collect();
    assert_eq!(allowed(object(&usual, "ClusterRole", &role)), expected);
    // Inventories contain serial numbers, so reading them is opt-in.
    let open = one_kind(&["--set=rbac.readInventoriesByAuthenticated=true"]);
    let more = allowed(object(&open, "ClusterRole", &role));
    let more: Vec<&String> = more.difference(&expected).collect();
    assert_eq!(
        more,
        ["get", "list", "watch"]
            .map(|verb| format!("{verb} nodeinventories.drayman.dev []"))
            .iter()
            .collect::<Vec<_>>()
    );
    for switch in ["rbac.readByAuthenticated", "rbac.create"] {
        let more = [
            format!("--set={switch}=false"),
            "--set=crds.upgrade=false".to_owned(),
        ];
        let without = one_kind(&more.each_ref().map(String::as_str));
        assert_eq!(to_everybody(&without), Vec::<String>::new(), "{switch}");
        assert!(
            without
                .iter()
                .all(|object| object["metadata"]["name"] != role.as_str()),
            "{switch}"
        );
    }
}

#[test]
fn each_component_has_its_own_account_and_role() {
    let installed = one_kind(&[]);
    for component in ["controller", "node"] {
        let binding = object(
            &installed,
            "ClusterRoleBinding",
            &format!("drayman-{component}.drayman"),
        );
        assert_eq!(
            binding["subjects"],
            json!([{ "kind": "ServiceAccount", "name": format!("drayman-{component}"), "namespace": "drayman" }])
        );
        object(&installed, "ServiceAccount", &format!("drayman-{component}"));
    }
}

#[test]
fn no_pod_has_more_privileges_than_it_needs() {
    for (variant, mode) in &variants_and_modes() {
        for owner in render(Some(variant), mode) {
            let Some(spec) = pod_spec(&owner) else { continue };
            let what = format!("{} {} of {variant:?}", owner["kind"], owner["metadata"]["name"]);
            for shared in ["hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"] {
                assert!(spec[shared].is_null(), "{what}: {shared}");
            }
            let pod = &spec["securityContext"];
            assert_eq!(
                pod["seccompProfile"],
                json!({ "type": "RuntimeDefault" }),
                "{what}"
            );
            for container in spec["containers"].as_array().expect("containers") {
                let security = &container["securityContext"];
                assert_eq!(security["readOnlyRootFilesystem"], true, "{what}");
                if *variant == chart("ci/everything-values.yaml") && owner["kind"] == "DaemonSet" {
                    // The one variant that sets it.
                    assert_eq!(security["privileged"], true);
                    continue;
                }
                assert_eq!(security["capabilities"], json!({ "drop": ["ALL"] }), "{what}");
                assert_eq!(security["allowPrivilegeEscalation"], false, "{what}");
                assert!(security["privileged"].is_null(), "{what}");
            }
            let volumes = spec["volumes"].as_array().cloned().unwrap_or_default();
            if owner["kind"] == "DaemonSet" {
                assert_eq!(pod["runAsUser"], 0, "{what}");
            } else {
                assert_eq!(pod["runAsNonRoot"], true, "{what}");
                // No host paths, no secret except the metrics certificate, and no volume that outlives the pod.
                let own = volumes
                    .iter()
                    .all(|volume| volume["emptyDir"].is_object() || volume["name"] == "metrics-certificate");
                assert!(own, "{what}: {volumes:?}");
            }
        }
    }
}

#[test]
fn an_admission_policy_is_made_where_tokens_name_their_node() {
    let has = |arguments: &[&str]| {
        render(None, arguments)
            .iter()
            .any(|object| object["kind"] == "ValidatingAdmissionPolicy")
    };
    assert!(has(&["--kube-version", "1.30.0"]));
    assert!(!has(&["--kube-version", "1.29.9"]));
    assert!(!has(&["--set=admissionPolicy.enabled=never"]));
    assert!(!has(&["--set=node.enabled=false"]));
}
