//! Lists objects that still depend on classic DRA, which Kubernetes 1.32 removed.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::resource::v1;
use schemars::JsonSchema;
use serde::Serialize;

use super::qualified_name;
use super::structured::devices::pods;
use crate::api::resource::{Pod, ResourceClaim, ResourceClaimTemplate, ResourceClass, finalizer_of};
use crate::core::scheduler::allocated_devices::results;

/// An object that depends on classic DRA.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Dependent {
    /// Kind of the object.
    pub kind: &'static str,
    /// `namespace/name`, or the name of a cluster-scoped object.
    pub name: String,
    /// Driver that serves the object, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// State of the object; implies whether to stop, move or delete it.
    pub status: String,
}

/// Lists the objects that depend on classic DRA in deletion order: pods, their claims, templates, classes. Omits
/// classes with structured parameters and the objects that use them.
pub fn dependents(
    classes: &[ResourceClass],
    claims: &[ResourceClaim],
    templates: &[ResourceClaimTemplate],
    pods: &[Pod],
) -> Vec<Dependent> {
    let name = |class: &ResourceClass| class.metadata.name.clone().unwrap_or_default();
    let is_structured = |class: &&ResourceClass| class.structured_parameters == Some(true);
    let structured: BTreeSet<String> = classes.iter().filter(is_structured).map(name).collect();
    let drivers: BTreeMap<String, String> = classes
        .iter()
        .map(|class| (name(class), class.driver_name.clone()))
        .collect();
    let (structured_claims, claims): (Vec<_>, Vec<_>) = claims
        .iter()
        .partition(|claim| structured.contains(&claim.spec.resource_class_name));
    let (structured_templates, templates): (Vec<_>, Vec<_>) = templates
        .iter()
        .partition(|template| structured.contains(&template.spec.spec.resource_class_name));
    // A pod is omitted if it has ended or if all its claims and templates are structured.
    let structured_claims: BTreeSet<String> = structured_claims.into_iter().map(qualified_name).collect();
    let structured_templates: BTreeSet<String> =
        structured_templates.into_iter().map(qualified_name).collect();
    let mut dependents = Vec::new();
    for pod in pods {
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
                status: format!("{phase} on {node}, with {number} of its claims"),
            });
        }
    }
    for claim in claims {
        let driver = claim.status.driver_name.clone();
        dependents.push(Dependent {
            kind: "ResourceClaim",
            name: qualified_name(claim),
            driver: driver.or_else(|| drivers.get(&claim.spec.resource_class_name).cloned()),
            status: status(claim),
        });
    }
    for template in templates {
        let class = &template.spec.spec.resource_class_name;
        dependents.push(Dependent {
            kind: "ResourceClaimTemplate",
            name: qualified_name(template),
            driver: drivers.get(class).cloned(),
            status: format!("of class {class}"),
        });
    }
    for class in classes.iter().filter(|class| !is_structured(class)) {
        dependents.push(Dependent {
            kind: "ResourceClass",
            name: name(class),
            driver: Some(class.driver_name.clone()),
            status: "not structured".to_owned(),
        });
    }
    dependents
}

/// Lists claims that hold devices of `driver` or have its finalizer. Only a controller with that name can deallocate
/// them, so they must be gone before the driver is removed.
pub fn held_by(driver: &str, claims: &[ResourceClaim]) -> Vec<Dependent> {
    let finalizer = finalizer_of(driver);
    let holds = |claim: &&ResourceClaim| {
        let mut finalizers = claim.metadata.finalizers.iter().flatten();
        claim.status.allocation_of(driver).is_some() || finalizers.any(|name| *name == finalizer)
    };
    let held = claims.iter().filter(holds);
    held.map(|claim| of_driver(driver, claim, status(claim)))
        .collect()
}

/// Lists claims of structured mode with devices of `driver`: without its companions, kubelet cannot end their pods.
pub fn allocated_from(driver: &str, claims: &[v1::ResourceClaim]) -> Vec<Dependent> {
    let has_device = |claim: &&v1::ResourceClaim| results(claim).any(|result| result.driver == driver);
    let held = claims.iter().filter(has_device);
    held.map(|claim| of_driver(driver, claim, allocated(&pods(claim))))
        .collect()
}

fn of_driver<K: kube::Resource>(driver: &str, claim: &K, status: String) -> Dependent {
    Dependent {
        kind: "ResourceClaim",
        name: qualified_name(claim),
        driver: Some(driver.to_owned()),
        status,
    }
}

fn status(claim: &ResourceClaim) -> String {
    let users = claim.status.reserved_for.iter();
    match &claim.status.allocation {
        Some(_) => allocated(&users.map(|user| user.name.clone()).collect::<Vec<_>>()),
        None => "not allocated".to_owned(),
    }
}

fn allocated(pods: &[String]) -> String {
    match pods {
        [] => "allocated, used by no pod".to_owned(),
        [one] => format!("allocated, used by pod {one}"),
        pods => format!("allocated, used by pods {}", pods.join(", ")),
    }
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
    fn leftovers_are_listed_in_the_order_of_their_removal() {
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
        let found = dependents(&[class], &[claim], &[template], &[pod]);
        assert_eq!(
            kinds(&found),
            [
                ("Pod", "shop/till"),
                ("ResourceClaim", "shop/one"),
                ("ResourceClaimTemplate", "shop/each"),
                ("ResourceClass", "radio"),
            ]
        );
        assert_eq!(found[1].status, "allocated, used by no pod");
        assert_eq!(found[2].driver.as_deref(), Some("drayman.dev"));
    }

    #[test]
    fn structured_objects_and_ended_pods_are_left_out() {
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
        assert_eq!(dependents(&[class], &[claim], &[], &pods), []);
    }

    #[test]
    fn a_claim_whose_class_is_gone_still_counts() {
        let claim = read(json!({
            "metadata": { "namespace": "shop", "name": "one" }, "spec": { "resourceClassName": "gone" },
        }));
        let found = dependents(&[], &[claim], &[], &[]);
        assert_eq!(kinds(&found), [("ResourceClaim", "shop/one")]);
    }

    #[test]
    fn only_claims_of_the_driver_block_its_removal() {
        let claim = |name: &str, finalizers: Value, status: Value| -> ResourceClaim {
            read(json!({
                "metadata": { "namespace": "shop", "name": name, "finalizers": finalizers },
                "spec": { "resourceClassName": "radio" }, "status": status,
            }))
        };
        let users = json!([{ "resource": "pods", "name": "a", "uid": "1" }, { "resource": "pods", "name": "b", "uid": "2" }]);
        let claims = [
            claim(
                "used",
                json!(["drayman.dev/deletion-protection"]),
                json!({ "allocation": {}, "driverName": "drayman.dev", "reservedFor": users }),
            ),
            claim("begun", json!(["drayman.dev/deletion-protection"]), json!({})),
            claim(
                "no-finalizer",
                json!([]),
                json!({ "allocation": {}, "driverName": "drayman.dev" }),
            ),
            claim("waits", json!([]), json!({})),
            claim(
                "of-another",
                json!(["gpu.example/deletion-protection"]),
                json!({ "allocation": {}, "driverName": "gpu.example" }),
            ),
        ];
        let held = held_by("drayman.dev", &claims);
        assert_eq!(
            held.iter()
                .map(|held| (held.name.as_str(), held.status.as_str()))
                .collect::<Vec<_>>(),
            [
                ("shop/used", "allocated, used by pods a, b"),
                ("shop/begun", "not allocated"),
                ("shop/no-finalizer", "allocated, used by no pod"),
            ]
        );
    }
}
