//! Manifests and patches.

pub(crate) const OBJECTS: &str = r"
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClass
metadata: { name: CLASS, labels: { of: CLASS } }
driverName: kubectl.example.com
---
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClaim
metadata: { name: claim, labels: { color: red } }
spec: { resourceClassName: CLASS }
---
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClaimTemplate
metadata: { name: template }
spec: { spec: { resourceClassName: CLASS, allocationMode: Immediate } }
---
apiVersion: v1
kind: ConfigMap
metadata: { name: map, annotations: { why: because } }
data: { a: b }
";

pub(crate) const CHANGED: &str = r"
apiVersion: v1
kind: ConfigMap
metadata: { name: map }
data: { a: c, d: e }
";

pub(crate) const UNKNOWN: &str = r"
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClaim
metadata: { name: unknown }
spec: { resourceClassName: CLASS, color: red }
";

/// The pods do not run. The node has no heartbeats, which the controller notices after 40 seconds.
pub(crate) const SHOWN: &str = r#"
apiVersion: v1
kind: Node
metadata: { name: CLASS, labels: { of: CLASS, node-role.kubernetes.io/edge: "" } }
---
apiVersion: v1
kind: Pod
metadata: { name: bound, labels: { of: CLASS } }
spec:
  nodeName: CLASS
  containers: [{ name: main, image: none }, { name: second, image: none }]
---
apiVersion: v1
kind: Pod
metadata: { name: waiting, labels: { of: CLASS } }
spec:
  schedulerName: nobody
  containers: [{ name: main, image: none }]
---
apiVersion: coordination.k8s.io/v1
kind: Lease
metadata: { name: held }
spec: { holderIdentity: somebody }
---
apiVersion: v1
kind: Event
metadata: { name: happened }
involvedObject: { apiVersion: v1, kind: Pod, name: bound, namespace: kubectl-shows, fieldPath: "spec.containers{main}" }
reason: Happened
message: something has happened
type: Normal
count: 3
firstTimestamp: 2020-01-01T00:00:00Z
lastTimestamp: 2020-01-02T00:00:00Z
source: { component: tests, host: here }
"#;

pub(crate) const NODE_STATUS: &str = r#"{"status":{
    "conditions":[{"type":"Ready","status":"True","reason":"R","message":"m"}],
    "addresses":[{"type":"InternalIP","address":"10.0.0.1"}],
    "nodeInfo":{"kubeletVersion":"v1.2.3","osImage":"an image","kernelVersion":"9","containerRuntimeVersion":"stage://0",
        "architecture":"","bootID":"","kubeProxyVersion":"","machineID":"","operatingSystem":"","systemUUID":""}}}"#;

pub(crate) const POD_STATUS: &str = r#"{"status":{"phase":"Running","podIP":"10.0.0.2","podIPs":[{"ip":"10.0.0.2"}],
    "conditions":[{"type":"Ready","status":"True"}],
    "containerStatuses":[
        {"name":"main","image":"none","imageID":"","ready":true,"restartCount":0,"state":{"running":{"startedAt":"2020-01-01T00:00:00Z"}}},
        {"name":"second","image":"none","imageID":"","ready":false,"restartCount":0,"state":{"waiting":{"reason":"CrashLoopBackOff"}}}]}}"#;

/// The kinds used in `examples/`, and an inventory of the companion.
pub(crate) const OURS: &str = r"
apiVersion: drayman.dev/v1alpha1
kind: NodeInventory
metadata: { name: CLASS.drayman.dev, labels: { of: CLASS } }
spec:
  driverName: drayman.dev
  nodeName: CLASS
  nodeUid: 7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a03
  devices: [{ name: test-0, kind: test, mode: claims }, { name: test-1, kind: test, mode: claims }]
---
apiVersion: drayman.dev/v1alpha1
kind: DeviceClassParameters
metadata: { name: CLASS, labels: { of: CLASS } }
spec: { kind: test }
---
apiVersion: drayman.dev/v1alpha1
kind: DeviceClaimParameters
metadata: { name: two, labels: { of: CLASS } }
spec: { requests: [{ name: a, count: 2 }] }
---
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClaim
metadata: { name: claim, labels: { of: CLASS } }
spec: { resourceClassName: CLASS }
---
apiVersion: v1
kind: Pod
metadata: { name: waiting, labels: { of: CLASS } }
spec:
  schedulerName: nobody
  containers: [{ name: main, image: none }]
";

pub(crate) const NOT_OURS: &str = r"
apiVersion: drayman.dev/v1alpha1
kind: DeviceClaimParameters
metadata: { name: unknown }
spec: { requests: [{ name: a, colour: red }] }
";

pub(crate) const INVENTORY_STATUS: &str = r#"{"status":{"devices":2,"unhealthy":0,"conditions":[
    {"type":"Ready","status":"True","reason":"Serving","message":"","lastTransitionTime":"2020-01-01T00:00:00Z"}]}}"#;

/// A pod with most fields that `kubectl describe` prints, and a plain pending pod.
pub(crate) const DESCRIBED: &str = r#"
apiVersion: v1
kind: Pod
metadata: { name: described-whole, labels: { of: CLASS, b: c }, annotations: { why: because } }
spec:
  schedulerName: nobody
  nodeName: CLASS
  nodeSelector: { disk: fast }
  tolerations: [{ key: mine, operator: Exists, effect: NoSchedule }]
  resourceClaims: [{ name: device, source: { resourceClaimName: claim } }]
  volumes:
  - { name: empty, emptyDir: {} }
  - { name: host, hostPath: { path: /var/lib/x } }
  - { name: map, configMap: { name: map } }
  initContainers:
  - { name: before, image: none, command: [sh, -c], args: ["true"] }
  containers:
  - name: main
    image: none
    command: [sleep]
    args: ["3600"]
    ports: [{ containerPort: 80 }, { containerPort: 53, protocol: UDP, name: names }]
    env:
    - { name: A, value: b }
    - { name: NAME, valueFrom: { fieldRef: { fieldPath: metadata.name } } }
    - { name: FROM, valueFrom: { configMapKeyRef: { name: map, key: a } } }
    envFrom: [{ configMapRef: { name: map } }]
    volumeMounts: [{ name: empty, mountPath: /empty }, { name: host, mountPath: /host, readOnly: true }]
    resources: { limits: { example.com/device: 1 }, claims: [{ name: device }] }
    livenessProbe: { httpGet: { port: 80 } }
    readinessProbe: { exec: { command: ["true"] }, periodSeconds: 5 }
  - name: second
    image: none
    resources: { limits: { cpu: 1500m, memory: 64Mi }, requests: { cpu: 100m } }
---
apiVersion: v1
kind: Pod
metadata: { name: described-waiting, labels: { of: CLASS } }
spec:
  schedulerName: nobody
  containers: [{ name: main, image: none }]
"#;

/// Events of that pod. kubectl selects events by uid too.
pub(crate) const HAPPENED: &str = r#"
apiVersion: v1
kind: Event
metadata: { name: described }
involvedObject: { apiVersion: v1, kind: Pod, name: described-whole, namespace: kubectl-describes, uid: POD_UID, fieldPath: "spec.containers{main}" }
reason: Happened
message: something has happened
type: Normal
count: 3
firstTimestamp: 2020-01-01T00:00:00Z
lastTimestamp: 2020-01-02T00:00:00Z
source: { component: tests, host: here }
---
apiVersion: v1
kind: Event
metadata: { name: of-another }
involvedObject: { apiVersion: v1, kind: Pod, name: described-whole, namespace: kubectl-describes, uid: 7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a03 }
reason: Elsewhere
message: this was another pod of that name
type: Warning
count: 1
firstTimestamp: 2020-01-01T00:00:00Z
lastTimestamp: 2020-01-01T00:00:00Z
source: { component: tests }
"#;

pub(crate) const DESCRIBED_STATUS: &str = r#"{"status":{"phase":"Running","podIP":"10.0.0.2","podIPs":[{"ip":"10.0.0.2"}],"hostIP":"10.0.0.1",
    "startTime":"2020-01-01T00:00:00Z",
    "conditions":[{"type":"Initialized","status":"True"},{"type":"Ready","status":"False"}],
    "initContainerStatuses":[{"name":"before","image":"none","imageID":"id","ready":true,"restartCount":0,
        "state":{"terminated":{"exitCode":0,"reason":"Completed","startedAt":"2020-01-01T00:00:00Z","finishedAt":"2020-01-01T00:00:01Z"}}}],
    "containerStatuses":[
        {"name":"main","image":"none","imageID":"","containerID":"stage://1","ready":true,"restartCount":2,
         "state":{"running":{"startedAt":"2020-01-01T00:00:00Z"}},
         "lastState":{"terminated":{"exitCode":137,"reason":"Error","startedAt":"2020-01-01T00:00:00Z","finishedAt":"2020-01-01T00:00:01Z"}}},
        {"name":"second","image":"none","imageID":"","ready":false,"restartCount":0,"state":{"waiting":{"reason":"CrashLoopBackOff"}}}]}}"#;

pub(crate) const NAMESPACE: &str = "apiVersion: v1
kind: Namespace
metadata: { name: NAMESPACE }
";
