//! Manifests of users.

/// A class for the devices of a kind, its parameters and a claim template, all with the name of the kind.
pub(crate) fn class(kind: &str) -> String {
    format!(
        "
apiVersion: drayman.dev/v1alpha1
kind: DeviceClassParameters
metadata: {{name: {kind}}}
spec: {{kind: {kind}}}
---
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClass
metadata: {{name: {kind}}}
driverName: drayman.dev
parametersRef: {{apiGroup: drayman.dev, kind: DeviceClassParameters, name: {kind}}}
---
{}",
        template(kind)
    )
}

fn template(class: &str) -> String {
    format!(
        "
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClaimTemplate
metadata: {{name: {class}, namespace: default}}
spec: {{spec: {{resourceClassName: {class}}}}}
"
    )
}

/// A pod with a claim of another driver, and its class.
pub(crate) fn of_another_driver() -> String {
    let class = "apiVersion: resource.k8s.io/v1alpha2\nkind: ResourceClass\nmetadata: {name: foreign}\n\
                 driverName: foreign.example.com\n";
    let (template, pod) = (template("foreign"), claiming_from("foreign", "foreign"));
    format!("{class}---\n{template}---\n{pod}")
}

pub(crate) fn claiming(name: &str) -> String {
    claiming_from("test", name)
}

/// A pod that claims the device of [`plugging`].
pub(crate) fn viewing(name: &str) -> String {
    claiming_from("camera", name)
}

fn claiming_from(template: &str, name: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: default}}\nspec:\n  resourceClaims:\n  \
         - {{name: device, source: {{resourceClaimTemplateName: {template}}}}}\n  containers:\n  \
         - {{name: main, image: none, resources: {{claims: [{{name: device}}]}}}}\n"
    )
}

pub(crate) fn claiming_two(name: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: default}}\nspec:\n  resourceClaims:\n  \
         - {{name: device, source: {{resourceClaimTemplateName: test}}}}\n  \
         - {{name: other, source: {{resourceClaimTemplateName: other}}}}\n  containers:\n  \
         - {{name: main, image: none, resources: {{claims: [{{name: device}}, {{name: other}}]}}}}\n"
    )
}

pub(crate) fn plugging(name: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: default}}\nspec:\n  containers:\n  \
         - {{name: main, image: none, resources: {{limits: {{example.com/camera: 1}}}}}}\n"
    )
}

/// A DeviceClass for the devices of a kind and a claim template, both with the name of the kind.
pub(crate) fn structured_class(kind: &str) -> String {
    format!(
        "
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {{name: {kind}}}
spec:
  selectors:
  - cel: {{expression: 'device.driver == \"drayman.dev\" && device.attributes[\"drayman.dev\"].kind == \"{kind}\"'}}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {{name: {kind}, namespace: default}}
spec: {{spec: {{devices: {{requests: [{{name: device, exactly: {{deviceClassName: {kind}}}}}]}}}}}}
"
    )
}

pub(crate) fn v1_claiming(name: &str) -> String {
    v1_pod(name, &[("device", "test")])
}

pub(crate) fn v1_claiming_two(name: &str) -> String {
    v1_pod(name, &[("device", "test"), ("other", "other")])
}

fn v1_pod(name: &str, claims: &[(&str, &str)]) -> String {
    let of = claims
        .iter()
        .map(|(entry, template)| serde_json::json!({"name": entry, "resourceClaimTemplateName": template}));
    let used = claims.iter().map(|(entry, _)| serde_json::json!({"name": entry}));
    serde_json::json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "resourceClaims": of.collect::<Vec<_>>(),
            "containers": [{"name": "main", "image": "none", "resources": {"claims": used.collect::<Vec<_>>()}}],
        },
    })
    .to_string()
}
