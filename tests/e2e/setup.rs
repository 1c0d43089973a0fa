//! Test environment: a cluster with drayman's CRDs, the programs, and the objects of users.

#[path = "setup/objects.rs"]
mod objects;
#[path = "setup/program.rs"]
mod program;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use drayman::api::crd::{
    Device, DeviceClassParameters, DeviceClassParametersSpec, Mode, NodeInventory, NodeInventorySpec,
    NodeInventoryStatus, definitions,
};
use drayman::api::resource::{Pod, PodSchedulingContext, ResourceClaim, ResourceClass};
use k8s_openapi::api::core::v1::{Event, Node};
use k8s_openapi::api::rbac::v1::PolicyRule;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::conditions::is_crd_established;
use kube::runtime::wait::{Condition, await_condition};
use serde_json::{Value, json};
use tokio::time::timeout;

#[allow(
    unused_imports,
    reason = "shared with other targets, each of which uses another part"
)]
pub(crate) use objects::{
    claim_name, has_finalizer, is_allocated, is_bound, is_gone, is_running, pod_from, pod_with_claim,
    pod_with_limit,
};
pub(crate) use program::Program;

use crate::harness::{Cluster, TIMEOUT};

/// The driver name of the built-in driver.
pub(crate) const DRIVER: &str = "drayman.dev";
/// The controller's finalizer on claims.
pub(crate) const FINALIZER: &str = "drayman.dev/deletion-protection";
/// Log message of the companion after its registration.
pub(crate) const REGISTERED: &str = "kubelet has registered the driver";
/// The program of this build.
pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_drayman");

/// A cluster with drayman's CRDs and a class `test`.
#[allow(missing_debug_implementations, reason = "a kube::Client has none")]
pub(crate) struct Setup {
    pub(crate) cluster: Cluster,
    controller: PathBuf,
    node: PathBuf,
}

/// The rules of a role in `hack/rbac.yaml`.
fn rules_of(kind: &str, name: &str) -> anyhow::Result<Vec<PolicyRule>> {
    let text = include_str!("../../hack/rbac.yaml");
    let documents: Vec<Value> = serde_saphyr::from_multiple(text)?;
    let role = documents
        .into_iter()
        .find(|document| document["kind"] == kind && document["metadata"]["name"] == name)
        .with_context(|| format!("{kind} {name} is not in hack/rbac.yaml"))?;
    Ok(serde_json::from_value(role["rules"].clone())?)
}

/// Rights of the controller.
pub(crate) fn controller_rules() -> anyhow::Result<Vec<PolicyRule>> {
    rules_of("ClusterRole", "drayman-controller")
}

/// Rights of a controller with leader election: also those on the lease.
pub(crate) fn replica_rules() -> anyhow::Result<Vec<PolicyRule>> {
    let mut rules = controller_rules()?;
    rules.extend(rules_of("Role", "drayman-controller")?);
    Ok(rules)
}

/// Rights of the companion. Its Role in the namespace `default` is granted in all namespaces here; the tests of the chart cover the
/// namespace.
pub(crate) fn node_rules() -> anyhow::Result<Vec<PolicyRule>> {
    let mut rules = rules_of("ClusterRole", "drayman-node")?;
    rules.extend(rules_of("Role", "drayman-node")?);
    Ok(rules)
}

/// Rights of the companion in structured mode.
pub(crate) fn structured_node_rules() -> anyhow::Result<Vec<PolicyRule>> {
    let mut rules = rules_of("ClusterRole", "drayman-node-structured")?;
    rules.extend(rules_of("Role", "drayman-node")?);
    Ok(rules)
}

async fn make_crds(cluster: &Cluster) -> anyhow::Result<()> {
    let definitions_api = Api::<CustomResourceDefinition>::all(cluster.client());
    for definition in definitions() {
        let name = definition
            .metadata
            .name
            .clone()
            .context("a definition has a name")?;
        definitions_api
            .create(&PostParams::default(), &definition)
            .await
            .with_context(|| name.clone())?;
        let established = await_condition(definitions_api.clone(), &name, is_crd_established());
        timeout(TIMEOUT, established).await??;
    }
    Ok(())
}

impl Setup {
    /// Starts a cluster with this many real nodes.
    pub(crate) async fn start(nodes: usize) -> anyhow::Result<Self> {
        let mut builder = Cluster::builder().nodes(nodes);
        if nodes == 0 {
            // Fake nodes have no heartbeats, and tests can take long on a slow machine.
            builder = builder.flag("controller-manager", "--node-monitor-grace-period=1h");
        }
        Self::prepare(builder.start().await?).await
    }

    /// Prepares a cluster.
    pub(crate) async fn prepare(cluster: Cluster) -> anyhow::Result<Self> {
        let setup = Self::without_class(cluster).await?;
        setup.make_class("test").await?;
        Ok(setup)
    }

    /// Prepares a cluster that may not serve classes of classic DRA.
    pub(crate) async fn without_class(cluster: Cluster) -> anyhow::Result<Self> {
        let setup = Self::with_crds(cluster).await?;
        let parameters = DeviceClassParameters::new(
            "test",
            DeviceClassParametersSpec {
                kind: "test".to_owned(),
                ..DeviceClassParametersSpec::default()
            },
        );
        Api::all(setup.cluster.client())
            .create(&PostParams::default(), &parameters)
            .await?;
        Ok(setup)
    }

    /// Prepares a cluster with CRDs and users only.
    pub(crate) async fn with_crds(cluster: Cluster) -> anyhow::Result<Self> {
        make_crds(&cluster).await?;
        Self::with_users(cluster, &node_rules()?).await
    }

    /// Prepares a cluster that changes its mode: with CRDs, and rights for both modes.
    pub(crate) async fn of_both_modes(cluster: Cluster) -> anyhow::Result<Self> {
        make_crds(&cluster).await?;
        let rules = [node_rules()?, structured_node_rules()?].concat();
        Self::with_users(cluster, &rules).await
    }

    /// Prepares a cluster of structured mode, which requires no CRDs.
    pub(crate) async fn structured(cluster: Cluster) -> anyhow::Result<Self> {
        Self::with_users(cluster, &structured_node_rules()?).await
    }

    async fn with_users(cluster: Cluster, node_rules: &[PolicyRule]) -> anyhow::Result<Self> {
        let controller = cluster.user("drayman-controller", &controller_rules()?).await?;
        let node = cluster.user("drayman-node", node_rules).await?;
        Ok(Self {
            cluster,
            controller,
            node,
        })
    }

    /// The kubeconfig of the companion.
    pub(crate) fn node_kubeconfig(&self) -> &Path {
        &self.node
    }

    /// Creates a class with the DeviceClassParameters `test`.
    pub(crate) async fn make_class(&self, name: &str) -> anyhow::Result<()> {
        self.apply(&json!({
            "apiVersion": "resource.k8s.io/v1alpha2", "kind": "ResourceClass", "metadata": { "name": name },
            "driverName": DRIVER,
            "parametersRef": { "apiGroup": DRIVER, "kind": "DeviceClassParameters", "name": "test" },
        }))
        .await
    }

    /// Creates a template named `test` for claims of the class `test`, with these parameters, if any.
    pub(crate) async fn make_template(&self, parameters: Option<&str>) -> anyhow::Result<()> {
        let reference = parameters
            .map(|name| json!({ "apiGroup": DRIVER, "kind": "DeviceClaimParameters", "name": name }));
        self.apply(&json!({
            "apiVersion": "resource.k8s.io/v1alpha2", "kind": "ResourceClaimTemplate", "metadata": { "name": "test" },
            "spec": { "spec": { "resourceClassName": "test", "parametersRef": reference } },
        }))
        .await
    }

    /// Creates parameters, a class of this driver and a template for a kind, all with the name of the kind.
    pub(crate) async fn make_kind(&self, kind: &str, driver: &str) -> anyhow::Result<()> {
        for object in [
            json!({
                "apiVersion": "drayman.dev/v1alpha1", "kind": "DeviceClassParameters", "metadata": { "name": kind },
                "spec": { "kind": kind },
            }),
            json!({
                "apiVersion": "resource.k8s.io/v1alpha2", "kind": "ResourceClass", "metadata": { "name": kind },
                "driverName": driver,
                "parametersRef": { "apiGroup": DRIVER, "kind": "DeviceClassParameters", "name": kind },
            }),
            json!({
                "apiVersion": "resource.k8s.io/v1alpha2", "kind": "ResourceClaimTemplate", "metadata": { "name": kind },
                "spec": { "spec": { "resourceClassName": kind } },
            }),
        ] {
            self.apply(&object).await?;
        }
        Ok(())
    }

    /// Applies an object with kubectl.
    pub(crate) async fn apply(&self, object: &Value) -> anyhow::Result<()> {
        let name = object["metadata"]["name"].as_str().unwrap_or("object");
        let kind = object["kind"].as_str().unwrap_or("kind");
        let path = self.cluster.directory().join(format!("{kind}-{name}.json"));
        std::fs::write(&path, object.to_string())?;
        let path = path.to_str().context("the path is UTF-8")?;
        self.cluster
            .kubectl(&["apply", "--filename", path])
            .await
            .map(drop)
    }

    /// Claims of the namespace `default`.
    pub(crate) fn claims(&self) -> Api<ResourceClaim> {
        Api::namespaced(self.cluster.client(), "default")
    }

    pub(crate) fn classes(&self) -> Api<ResourceClass> {
        Api::all(self.cluster.client())
    }

    /// Pods of the namespace `default`.
    pub(crate) fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.cluster.client(), "default")
    }

    /// Contexts of the namespace `default`.
    pub(crate) fn contexts(&self) -> Api<PodSchedulingContext> {
        Api::namespaced(self.cluster.client(), "default")
    }

    /// Creates a pod with one claim from the template `test`.
    pub(crate) async fn make_pod(&self, name: &str) -> anyhow::Result<Pod> {
        Ok(self
            .pods()
            .create(&PostParams::default(), &pod_with_claim(name)?)
            .await?)
    }

    /// Creates a pod that requests one extended resource in its limits.
    pub(crate) async fn make_limit_pod(&self, name: &str, resource: &str) -> anyhow::Result<()> {
        let pod = pod_with_limit(name, resource)?;
        self.pods().create(&PostParams::default(), &pod).await?;
        Ok(())
    }

    /// Deletes a pod without a grace period, as kubelet does once the containers have ended.
    pub(crate) async fn remove_pod(&self, name: &str) -> anyhow::Result<()> {
        self.pods()
            .delete(name, &DeleteParams::default().grace_period(0))
            .await
            .map(drop)?;
        Ok(())
    }

    /// Waits for a condition; the error contains the condition and the current object.
    pub(crate) async fn wait<K>(
        &self,
        api: Api<K>,
        name: &str,
        what: &str,
        condition: impl Condition<K>,
    ) -> anyhow::Result<Option<K>>
    where
        K: kube::Resource<DynamicType = ()>
            + Clone
            + std::fmt::Debug
            + serde::de::DeserializeOwned
            + Send
            + 'static,
    {
        if let Ok(found) = timeout(TIMEOUT, await_condition(api.clone(), name, condition)).await {
            return Ok(found?);
        }
        let now = api.get_opt(name).await;
        bail!("{} {name} is not {what}, but {now:?}", K::kind(&()))
    }

    pub(crate) async fn until_bound(&self, pod: &str) -> anyhow::Result<Pod> {
        let pod = self.wait(self.pods(), pod, "bound", is_bound()).await?;
        pod.context("a bound pod exists")
    }

    pub(crate) async fn until_running(&self, pod: &str) -> anyhow::Result<()> {
        let running = self.wait(self.pods(), pod, "running", is_running());
        running.await.map(drop)
    }

    pub(crate) async fn until_pod_gone(&self, pod: &str) -> anyhow::Result<()> {
        self.wait(self.pods(), pod, "gone", is_gone()).await.map(drop)
    }

    pub(crate) async fn until_allocated(&self, claim: &str) -> anyhow::Result<ResourceClaim> {
        let met = |claim: Option<&ResourceClaim>| claim.is_some_and(is_allocated);
        let claim = self.wait(self.claims(), claim, "allocated", met).await?;
        claim.context("an allocated claim exists")
    }

    pub(crate) async fn until_claim_gone(&self, claim: &str) -> anyhow::Result<()> {
        self.wait(self.claims(), claim, "gone", is_gone()).await.map(drop)
    }

    /// Waits until the allocatable count of an extended resource on the first node is `count`.
    pub(crate) async fn until_allocatable(&self, resource: &str, count: &str) -> anyhow::Result<()> {
        let (resource, count) = (resource.to_owned(), count.to_owned());
        let met = move |node: Option<&Node>| {
            let allocatable = node.and_then(|node| node.status.as_ref()?.allocatable.as_ref());
            let quantity = allocatable.and_then(|all| all.get(&resource));
            quantity.is_some_and(|quantity| quantity.0 == count)
        };
        let (nodes, node) = (Api::all(self.cluster.client()), self.cluster.node(0));
        self.wait(nodes, node.name(), "offering devices", met)
            .await
            .map(drop)
    }

    /// Waits until a driver's inventory of the first node is ready and its status meets a condition.
    pub(crate) async fn until_inventory(
        &self,
        driver: &str,
        met: impl Fn(&NodeInventoryStatus) -> bool,
    ) -> anyhow::Result<()> {
        let name = format!("{}.{driver}", self.cluster.node(0).name());
        let is_ready = move |inventory: Option<&NodeInventory>| {
            let status = inventory.and_then(|inventory| inventory.status.as_ref());
            status.is_some_and(|status| {
                let mut conditions = status.conditions.iter();
                met(status) && conditions.any(|one| one.type_ == "Ready" && one.status == "True")
            })
        };
        let inventories = Api::all(self.cluster.client());
        self.wait(inventories, &name, "ready", is_ready).await.map(drop)
    }

    /// The claim created for a pod, once it meets a condition.
    pub(crate) async fn claim_of(
        &self,
        pod: &str,
        what: &str,
        condition: fn(&ResourceClaim) -> bool,
    ) -> anyhow::Result<ResourceClaim> {
        let name = if self.cluster.minor() < 28 {
            // Before 1.28, the name follows from a rule and is not in the status.
            let pod = self.pods().get(pod).await?;
            let entry = pod.spec.resource_claims.first().context("the pod has a claim")?;
            let name = pod.metadata.name.as_deref().unwrap_or_default();
            format!("{name}-{}", entry.name)
        } else {
            let pod = self
                .wait(self.pods(), pod, "given a claim", |pod: Option<&Pod>| {
                    claim_name(pod).is_some()
                })
                .await?;
            claim_name(pod.as_ref()).context("the pod has a claim")?
        };
        let met = move |claim: Option<&ResourceClaim>| claim.is_some_and(condition);
        self.wait(self.claims(), &name, what, met)
            .await?
            .context("the claim exists")
    }

    /// Uid and name of a pod's allocated claim.
    pub(crate) async fn claim_ids(&self, pod: &str) -> anyhow::Result<(String, String)> {
        let metadata = self.claim_of(pod, "allocated", is_allocated).await?.metadata;
        let (uid, name) = (metadata.uid.context("a uid")?, metadata.name.context("a name")?);
        Ok((uid, name))
    }

    /// Waits for an Event of an object with this reason and a message that contains `text`.
    pub(crate) async fn wait_for_event(&self, name: &str, reason: &str, text: &str) -> anyhow::Result<Event> {
        use futures::TryStreamExt as _;
        use kube::runtime::{WatchStreamExt as _, watcher};

        let api = Api::<Event>::namespaced(self.cluster.client(), "default");
        let about = watcher::Config::default().fields(&format!("involvedObject.name={name}"));
        let (reason, text) = (reason.to_owned(), text.to_owned());
        let found = async {
            let mut seen = Vec::new();
            let mut events = std::pin::pin!(watcher(api, about).applied_objects());
            while let Some(event) = events.try_next().await? {
                let message = event.message.clone().unwrap_or_default();
                if event.reason.as_deref() == Some(&reason) && message.contains(&text) {
                    return Ok(event);
                }
                seen.push(message);
            }
            bail!("the watch of events ended after {seen:?}")
        };
        if let Ok(found) = timeout(TIMEOUT, found).await {
            return found;
        }
        let all: Vec<String> = Api::<Event>::namespaced(self.cluster.client(), "default")
            .list(&ListParams::default())
            .await?
            .items
            .into_iter()
            .map(|event| {
                format!(
                    "{:?}: {:?} {:?}",
                    event.involved_object.name, event.reason, event.message
                )
            })
            .collect();
        bail!("no such event on {name}, but\n{}", all.join("\n"))
    }

    /// Starts the controller.
    pub(crate) fn controller(&self) -> anyhow::Result<Program> {
        self.controller_with(&[])
    }

    /// Starts the controller with more flags.
    pub(crate) fn controller_with(&self, flags: &[&str]) -> anyhow::Result<Program> {
        let mut command = self.cluster.command(PROGRAM);
        command
            .args(["controller", "--v=4", "--kubeconfig"])
            .arg(&self.controller)
            .args(flags);
        self.program("controller", command)
    }

    /// Starts a controller with leader election as its own user, so that the audit log distinguishes the replicas.
    pub(crate) async fn replica(&self, name: &str) -> anyhow::Result<Program> {
        self.replica_of(PROGRAM.as_ref(), name).await
    }

    /// As [`Setup::replica`], with the program of another build.
    pub(crate) async fn replica_of(&self, program: &Path, name: &str) -> anyhow::Result<Program> {
        let flags = [
            // A busy machine delays a renewal by seconds.
            "--leader-elect-lease-duration=12s",
            "--leader-elect-renew-deadline=7s",
            "--leader-elect-retry-period=500ms",
        ];
        self.start_replica(program, name, &flags).await
    }

    /// As [`Setup::replica`], with other flags for the lease.
    pub(crate) async fn replica_with(&self, name: &str, flags: &[&str]) -> anyhow::Result<Program> {
        self.start_replica(PROGRAM.as_ref(), name, flags).await
    }

    async fn start_replica(&self, program: &Path, name: &str, flags: &[&str]) -> anyhow::Result<Program> {
        let kubeconfig = self.cluster.user(name, &replica_rules()?).await?;
        let mut command = self.cluster.command(program);
        command.args(["controller", "--v=4", "--leader-elect"]);
        command.args(flags).arg("--kubeconfig").arg(kubeconfig);
        self.program(name, command)
    }

    /// Starts the companion on a real node with these kinds.
    pub(crate) fn companion(&self, number: usize, configuration: &str) -> anyhow::Result<Program> {
        self.companion_with(number, configuration, &[])
    }

    /// As [`Setup::companion`], with more flags.
    pub(crate) fn companion_with(
        &self,
        number: usize,
        configuration: &str,
        flags: &[&str],
    ) -> anyhow::Result<Program> {
        self.companion_of(PROGRAM.as_ref(), number, configuration, flags)
    }

    /// As [`Setup::companion`], with the program of another build.
    pub(crate) fn companion_of(
        &self,
        program: &Path,
        number: usize,
        configuration: &str,
        flags: &[&str],
    ) -> anyhow::Result<Program> {
        let node = self.cluster.node(number);
        let file = self.cluster.directory().join(format!("node-{number}.yaml"));
        std::fs::write(&file, configuration)?;
        let mut command = node.command(program);
        command
            .args(["node", "--v=4", "--node-name", node.name(), "--kubeconfig"])
            .arg(&self.node);
        command.arg("--config").arg(&file).args(flags);
        self.program(&format!("companion-{number}"), command)
    }

    /// Ends the programs in this order, and then the cluster: the last line of a successful test.
    pub(crate) async fn end(self, programs: impl IntoIterator<Item = Program>) -> anyhow::Result<()> {
        for program in programs {
            program.end().await?;
        }
        self.cluster.stop().await
    }

    /// Replaces the configuration file of a node's companion.
    pub(crate) fn rewrite_configuration(&self, number: usize, configuration: &str) -> anyhow::Result<()> {
        let file = self.cluster.directory().join(format!("node-{number}.yaml"));
        std::fs::write(file, configuration).map_err(Into::into)
    }

    /// Starts a program with its own log.
    pub(crate) fn program(&self, name: &str, command: tokio::process::Command) -> anyhow::Result<Program> {
        // Each start has its own log.
        let log = (0..1000)
            .map(|start| self.cluster.directory().join(format!("{name}-{start}.log")))
            .find(|log| !log.exists())
            .context("a free name")?;
        Program::start(name, command, log)
    }

    /// Creates a node that exists only in the API. The scheduler binds pods to it, but nothing runs there.
    pub(crate) async fn make_fake_node(&self, name: &str) -> anyhow::Result<Node> {
        let api = Api::<Node>::all(self.cluster.client());
        let node: Node = serde_json::from_value(json!({ "metadata": { "name": name } }))?;
        api.create(&PostParams::default(), &node).await?;
        let resources = json!({ "cpu": "64", "memory": "64Gi", "pods": "1000" });
        let status = json!({ "status": {
            "capacity": resources, "allocatable": resources,
            "conditions": [{ "type": "Ready", "status": "True", "reason": "Pretended", "message": "",
                "lastHeartbeatTime": "2026-01-01T00:00:00Z", "lastTransitionTime": "2026-01-01T00:00:00Z" }],
        } });
        Ok(api
            .patch_status(name, &PatchParams::default(), &Patch::Merge(status))
            .await?)
    }

    /// Creates a fake node with its inventory: `count` devices of the kind `test`.
    pub(crate) async fn make_fake_devices(&self, node: &str, count: usize) -> anyhow::Result<()> {
        let uid = self
            .make_fake_node(node)
            .await?
            .metadata
            .uid
            .context("a node has a uid")?;
        self.write_inventory(node, &uid, count).await
    }

    /// Replaces the inventory of a fake node.
    pub(crate) async fn write_inventory(&self, node: &str, uid: &str, count: usize) -> anyhow::Result<()> {
        let device = |number| Device {
            name: format!("drayman-test-{number}"),
            kind: "test".to_owned(),
            mode: Mode::Claims,
            ..Device::default()
        };
        let mut inventory = NodeInventory::new(
            &format!("{node}.{DRIVER}"),
            NodeInventorySpec {
                driver_name: DRIVER.to_owned(),
                node_name: node.to_owned(),
                node_uid: uid.to_owned(),
                devices: (0..count).map(device).collect(),
            },
        );
        let api = Api::<NodeInventory>::all(self.cluster.client());
        let name = inventory.metadata.name.clone().unwrap_or_default();
        let apply = PatchParams::apply("the-test").force();
        inventory.status = None;
        api.patch(&name, &apply, &Patch::Apply(&inventory)).await?;
        let now = jiff::Timestamp::now();
        let status = json!({ "status": { "devices": count, "unhealthy": 0, "conditions": [{
            "type": "Ready", "status": "True", "reason": "Serving", "message": "", "lastTransitionTime": now }] } });
        api.patch_status(&name, &PatchParams::default(), &Patch::Merge(status))
            .await?;
        Ok(())
    }
}
