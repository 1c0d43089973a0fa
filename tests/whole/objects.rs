//! What people apply.

pub(crate) const CLASS: &str = "
apiVersion: drayman.dev/v1alpha1
kind: DeviceClassParameters
metadata: {name: test}
spec: {kind: test}
---
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClass
metadata: {name: test}
driverName: drayman.dev
parametersRef: {apiGroup: drayman.dev, kind: DeviceClassParameters, name: test}
---
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClaimTemplate
metadata: {name: test, namespace: default}
spec: {spec: {resourceClassName: test}}
";

/// The second device of a pod of two claims, that which leaves through both doors, and a pod of another driver.
pub(crate) const MORE: &str = "
apiVersion: drayman.dev/v1alpha1
kind: DeviceClassParameters
metadata: {name: other}
spec: {kind: other}
---
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClass
metadata: {name: other}
driverName: drayman.dev
parametersRef: {apiGroup: drayman.dev, kind: DeviceClassParameters, name: other}
---
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClaimTemplate
metadata: {name: other, namespace: default}
spec: {spec: {resourceClassName: other}}
---
apiVersion: drayman.dev/v1alpha1
kind: DeviceClassParameters
metadata: {name: camera}
spec: {kind: camera}
---
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClass
metadata: {name: camera}
driverName: drayman.dev
parametersRef: {apiGroup: drayman.dev, kind: DeviceClassParameters, name: camera}
---
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClaimTemplate
metadata: {name: camera, namespace: default}
spec: {spec: {resourceClassName: camera}}
---
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClass
metadata: {name: foreign}
driverName: foreign.example.com
---
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClaimTemplate
metadata: {name: foreign, namespace: default}
spec: {spec: {resourceClassName: foreign}}
---
apiVersion: v1
kind: Pod
metadata: {name: foreign, namespace: default}
spec:
  resourceClaims: [{name: foreign, source: {resourceClaimTemplateName: foreign}}]
  containers: [{name: main, image: none, resources: {claims: [{name: foreign}]}}]
";

pub(crate) fn claiming(name: &str) -> String {
    claiming_from("test", name)
}

/// A pod that claims what [`plugging`] has as an extended resource.
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
