//! What of a cluster still depends on classic Dynamic Resource Allocation, which Kubernetes 1.32 no longer has.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::qualified_name;
use crate::api::resource::{Pod, ResourceClaim, ResourceClaimTemplate, ResourceClass};

/// One object that depends on classic Dynamic Resource Allocation.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Dependent {
    /// The kind of the object.
    pub kind: &'static str,
    /// `namespace/name`, or the name of a cluster-scoped object.
    pub name: String,
    /// The driver that serves it, as far as that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// How it stands: what is to be stopped, moved or deleted.
    pub standing: String,
}

/// The objects of a cluster that the question is about.
#[derive(Clone, Copy, Debug, Default)]
pub struct Objects<'a> {
    /// All classes.
    pub classes: &'a [ResourceClass],
    /// All claims.
    pub claims: &'a [ResourceClaim],
    /// All templates of claims.
    pub templates: &'a [ResourceClaimTemplate],
    /// All pods.
    pub pods: &'a [Pod],
}

/// What depends on classic Dynamic Resource Allocation: pods first, since they have to go first, then their claims, the
/// templates, the classes. Classes with structured parameters, and what is of them, are left out.
pub fn dependents(objects: Objects<'_>) -> Vec<Dependent> {
    let name = |class: &ResourceClass| class.metadata.name.clone().unwrap_or_default();
    let structured: BTreeSet<String> = objects
        .classes
        .iter()
        .filter(|class| class.structured_parameters == Some(true))
        .map(name)
        .collect();
    let drivers: BTreeMap<String, String> = objects
        .classes
        .iter()
        .map(|class| (name(class), class.driver_name.clone()))
        .collect();
    let classic_claim = |claim: &&ResourceClaim| !structured.contains(&claim.spec.resource_class_name);
    let claims: Vec<_> = objects.claims.iter().filter(classic_claim).collect();
    // What keeps a pod out of the list: it has ended, or all that it names is structured.
    let structured_claims: BTreeSet<String> = objects
        .claims
        .iter()
        .filter(|claim| structured.contains(&claim.spec.resource_class_name))
        .map(qualified_name)
        .collect();
    let structured_templates: BTreeSet<String> = objects
        .templates
        .iter()
        .filter(|template| structured.contains(&template.spec.spec.resource_class_name))
        .map(qualified_name)
        .collect();
    let mut dependents = Vec::new();
    for pod in objects.pods {
        let phase = pod.status.phase.as_deref().unwrap_or("Pending");
        if matches!(phase, "Succeeded" | "Failed") {
            continue;
        }
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let within = |name: &String| format!("{namespace}/{name}");
        let classic = pod.spec.resource_claims.iter().filter(|entry| {
            let claim = entry.source.resource_claim_name.as_ref().map(within);
            let template = entry.source.resource_claim_template_name.as_ref().map(within);
            !claim.is_some_and(|claim| structured_claims.contains(&claim))
                && !template.is_some_and(|template| structured_templates.contains(&template))
        });
        let number = classic.count();
        if number > 0 {
            let node = pod.spec.node_name.as_deref().unwrap_or("no node yet");
            dependents.push(Dependent {
                kind: "Pod",
                name: qualified_name(pod),
                driver: None,
                standing: format!("{phase} on {node}, with {number} of its claims"),
            });
        }
    }
    for claim in claims {
        let reserved = claim.status.reserved_for.len();
        let standing = match (&claim.status.allocation, reserved) {
            (Some(_), 0) => "allocated, used by no pod".to_owned(),
            (Some(_), 1) => "allocated, used by 1 pod".to_owned(),
            (Some(_), pods) => format!("allocated, used by {pods} pods"),
            (None, _) => "not allocated".to_owned(),
        };
        let driver = claim.status.driver_name.clone();
        dependents.push(Dependent {
            kind: "ResourceClaim",
            name: qualified_name(claim),
            driver: driver.or_else(|| drivers.get(&claim.spec.resource_class_name).cloned()),
            standing,
        });
    }
    for template in objects.templates {
        let class = &template.spec.spec.resource_class_name;
        if !structured.contains(class) {
            dependents.push(Dependent {
                kind: "ResourceClaimTemplate",
                name: qualified_name(template),
                driver: drivers.get(class).cloned(),
                standing: format!("of class {class}"),
            });
        }
    }
    for class in objects.classes {
        if class.structured_parameters != Some(true) {
            dependents.push(Dependent {
                kind: "ResourceClass",
                name: name(class),
                driver: Some(class.driver_name.clone()),
                standing: "not structured".to_owned(),
            });
        }
    }
    dependents
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read<T: serde::de::DeserializeOwned>(value: Value) -> T {
        serde_json::from_value(value).unwrap()
    }

    fn kinds(dependents: &[Dependent]) -> Vec<(&str, &str)> {
        dependents
            .iter()
            .map(|dependent| (dependent.kind, dependent.name.as_str()))
            .collect()
    }

    #[test]
    fn pods_claims_templates_and_classes_are_listed_in_the_order_in_which_they_must_go() {
        let class = read(json!({ "metadata": { "name": "radio" }, "driverName": "drayman.dev" }));
        let claim = read(json!({
            "metadata": { "namespace": "shop", "name": "one" }, "spec": { "resourceClassName": "radio" },
            "status": { "allocation": {}, "driverName": "drayman.dev" },
        }));
        let template = read(json!({
            "metadata": { "namespace": "shop", "name": "each" },
            "spec": { "spec": { "resourceClassName": "radio" } },
        }));
        let pod = read(json!({
            "metadata": { "namespace": "shop", "name": "till" },
            "spec": { "resourceClaims": [{ "name": "r", "source": { "resourceClaimTemplateName": "each" } }] },
            "status": { "phase": "Running" },
        }));
        let found = dependents(Objects {
            classes: &[class],
            claims: &[claim],
            templates: &[template],
            pods: &[pod],
        });
        assert_eq!(
            kinds(&found),
            [
                ("Pod", "shop/till"),
                ("ResourceClaim", "shop/one"),
                ("ResourceClaimTemplate", "shop/each"),
                ("ResourceClass", "radio"),
            ]
        );
        assert_eq!(found[1].standing, "allocated, used by no pod");
        assert_eq!(found[2].driver.as_deref(), Some("drayman.dev"));
    }

    #[test]
    fn what_is_structured_or_has_ended_is_left_out() {
        let class = read(json!({
            "metadata": { "name": "gpu" }, "driverName": "gpu.example", "structuredParameters": true,
        }));
        let claim = read(json!({
            "metadata": { "namespace": "shop", "name": "one" }, "spec": { "resourceClassName": "gpu" },
        }));
        let pods = [
            read(json!({
                "metadata": { "namespace": "shop", "name": "a" },
                "spec": { "resourceClaims": [{ "name": "r", "source": { "resourceClaimName": "one" } }] },
            })),
            read(json!({
                "metadata": { "namespace": "shop", "name": "b" },
                "spec": { "resourceClaims": [{ "name": "r", "source": { "resourceClaimName": "other" } }] },
                "status": { "phase": "Succeeded" },
            })),
        ];
        let objects = Objects {
            classes: &[class],
            claims: &[claim],
            templates: &[],
            pods: &pods,
        };
        assert_eq!(dependents(objects), []);
    }

    #[test]
    fn a_claim_whose_class_is_gone_still_counts() {
        let claim = read(json!({
            "metadata": { "namespace": "shop", "name": "one" }, "spec": { "resourceClassName": "gone" },
        }));
        let objects = Objects {
            claims: &[claim],
            ..Objects::default()
        };
        assert_eq!(kinds(&dependents(objects)), [("ResourceClaim", "shop/one")]);
    }
}
