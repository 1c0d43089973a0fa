//! Creates and changes the objects of users and of the scheduler.

use std::fmt::Debug;

use drayman::api::resource::{
    Pod, PodSchedulingContext, ResourceClaim, ResourceClaimTemplate, ResourceClass,
};
use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::fixture::Fixture;
use crate::harness::IMAGE;

/// A scheduler that does not exist: the test schedules pods that name it.
const TEST_SCHEDULER: &str = "the-test";

/// The source of a claim of a pod.
#[derive(Clone, Copy)]
pub(crate) enum ClaimSource<'a> {
    Claim(&'a str),
    Template(&'a str),
}

impl Fixture {
    pub(crate) fn claims(&self) -> Api<ResourceClaim> {
        Api::namespaced(self.cluster.client(), &self.name)
    }

    pub(crate) fn classes(&self) -> Api<ResourceClass> {
        Api::all(self.cluster.client())
    }

    pub(crate) fn contexts(&self) -> Api<PodSchedulingContext> {
        Api::namespaced(self.cluster.client(), &self.name)
    }

    pub(crate) fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.cluster.client(), &self.name)
    }

    /// Creates a class of the driver; `fields` override the defaults.
    pub(crate) async fn make_class(&self, name: &str, fields: Value) -> anyhow::Result<ResourceClass> {
        let mut class = json!({ "metadata": { "name": name }, "driverName": self.driver_name() });
        merge(&mut class, fields);
        let class = serde_json::from_value(class)?;
        Ok(self.classes().create(&PostParams::default(), &class).await?)
    }

    pub(crate) async fn patch_class(&self, name: &str, fields: Value) -> anyhow::Result<()> {
        patch(&self.classes(), name, fields).await.map(drop)
    }

    /// Creates a claim of the class with delayed allocation.
    pub(crate) async fn claim(&self, name: &str) -> anyhow::Result<ResourceClaim> {
        self.claim_of(name, json!({ "resourceClassName": self.name }))
            .await
    }

    /// Creates a claim of the class with immediate allocation.
    pub(crate) async fn immediate(&self, name: &str) -> anyhow::Result<ResourceClaim> {
        let spec = json!({ "resourceClassName": self.name, "allocationMode": "Immediate" });
        self.claim_of(name, spec).await
    }

    pub(crate) async fn claim_of(&self, name: &str, spec: Value) -> anyhow::Result<ResourceClaim> {
        self.create_claim(json!({ "metadata": { "name": name }, "spec": spec }))
            .await
    }

    /// Creates a claim of the class; `claim` overrides the defaults.
    pub(crate) async fn create_claim(&self, claim: Value) -> anyhow::Result<ResourceClaim> {
        let mut object = json!({ "spec": { "resourceClassName": self.name } });
        merge(&mut object, claim);
        Ok(self
            .claims()
            .create(&PostParams::default(), &serde_json::from_value(object)?)
            .await?)
    }

    pub(crate) async fn template(&self, name: &str, class: &str) -> anyhow::Result<()> {
        let api = Api::<ResourceClaimTemplate>::namespaced(self.cluster.client(), &self.name);
        let template =
            json!({ "metadata": { "name": name }, "spec": { "spec": { "resourceClassName": class } } });
        api.create(&PostParams::default(), &serde_json::from_value(template)?)
            .await?;
        Ok(())
    }

    /// Creates a pod that the test schedules.
    pub(crate) async fn pod(&self, name: &str, claims: &[(&str, ClaimSource<'_>)]) -> anyhow::Result<Pod> {
        self.pod_with(name, claims, json!({ "schedulerName": TEST_SCHEDULER }))
            .await
    }

    /// Creates a pod that the test schedules, with an entry for each of these claims, named as its claim.
    pub(crate) async fn pod_naming(&self, name: &str, claims: &[&str]) -> anyhow::Result<Pod> {
        let entries: Vec<_> = claims
            .iter()
            .map(|claim| (*claim, ClaimSource::Claim(claim)))
            .collect();
        self.pod(name, &entries).await
    }

    /// Creates these claims, a pod that names them, and its context.
    pub(crate) async fn waiting_pod(
        &self,
        name: &str,
        claims: &[&str],
        selected: &str,
        potential: &[String],
    ) -> anyhow::Result<Pod> {
        for claim in claims {
            self.claim(claim).await?;
        }
        let pod = self.pod_naming(name, claims).await?;
        self.context(&pod, selected, potential).await?;
        Ok(pod)
    }

    /// Creates a pod that the scheduler places on a node of the fixture.
    pub(crate) async fn scheduled_pod(
        &self,
        name: &str,
        claims: &[(&str, ClaimSource<'_>)],
    ) -> anyhow::Result<Pod> {
        self.pod_with(name, claims, json!({ "nodeSelector": { "fixture": self.name } }))
            .await
    }

    /// Creates a pod with these fields in its spec.
    pub(crate) async fn pod_with(
        &self,
        name: &str,
        claims: &[(&str, ClaimSource<'_>)],
        fields: Value,
    ) -> anyhow::Result<Pod> {
        let source = |from: ClaimSource<'_>| match from {
            ClaimSource::Claim(name) => json!({ "resourceClaimName": name }),
            ClaimSource::Template(name) => json!({ "resourceClaimTemplateName": name }),
        };
        let claims: Vec<Value> = claims
            .iter()
            .map(|(entry, from)| json!({ "name": entry, "source": source(*from) }))
            .collect();
        let mut pod = json!({ "metadata": { "name": name }, "spec": {
            "resourceClaims": claims,
            "containers": [{ "name": "main", "image": IMAGE }],
            "terminationGracePeriodSeconds": 1,
        } });
        merge(&mut pod["spec"], fields);
        Ok(self
            .pods()
            .create(&PostParams::default(), &serde_json::from_value(pod)?)
            .await?)
    }

    /// Deletes a pod immediately, as a kubelet does after the containers ended.
    pub(crate) async fn remove_pod(&self, name: &str) -> anyhow::Result<()> {
        self.pods()
            .delete(name, &DeleteParams::default().grace_period(0))
            .await
            .map(drop)?;
        Ok(())
    }

    /// Requests the deallocation of an unused claim, which the claim controller does itself since 1.28.
    pub(crate) async fn request_deallocation(&self, claim: &str) -> anyhow::Result<()> {
        if self.cluster.minor() < 28 {
            let unused = |claim: &ResourceClaim| claim.status.reserved_for.is_empty();
            self.wait_for_claim(claim, "unused", unused).await?;
            self.patch_claim_status(claim, json!({ "deallocationRequested": true }))
                .await?;
        }
        Ok(())
    }

    /// Creates the context of a pod, as the scheduler does.
    pub(crate) async fn context(
        &self,
        pod: &Pod,
        selected: &str,
        potential: &[String],
    ) -> anyhow::Result<PodSchedulingContext> {
        let metadata = json!({ "ownerReferences": [{
            "apiVersion": "v1", "kind": "Pod", "name": pod.metadata.name, "uid": pod.metadata.uid,
            "controller": true, "blockOwnerDeletion": true,
        }] });
        self.context_with(pod, metadata, selected, potential).await
    }

    /// Creates a context with the name of a pod and other metadata.
    pub(crate) async fn context_with(
        &self,
        pod: &Pod,
        metadata: Value,
        selected: &str,
        potential: &[String],
    ) -> anyhow::Result<PodSchedulingContext> {
        let mut context = json!({
            "metadata": { "name": pod.metadata.name },
            "spec": { "selectedNode": selected, "potentialNodes": potential },
        });
        merge(&mut context["metadata"], metadata);
        let context = serde_json::from_value(context)?;
        Ok(self.contexts().create(&PostParams::default(), &context).await?)
    }

    /// Patches the spec of a context as the scheduler.
    pub(crate) async fn reschedule(&self, pod: &str, spec: Value) -> anyhow::Result<()> {
        patch(&self.contexts(), pod, json!({ "spec": spec }))
            .await
            .map(drop)
    }

    /// Selects a node for a pod as the scheduler.
    pub(crate) async fn select_node(&self, pod: &str, node: &str) -> anyhow::Result<()> {
        self.reschedule(pod, json!({ "selectedNode": node })).await
    }

    /// Creates a fake node with the label of the fixture. The scheduler binds pods to it, but no kubelet runs.
    pub(crate) async fn node(&self, name: &str) -> anyhow::Result<String> {
        let name = format!("{}-{name}", self.name);
        let api = Api::<Node>::all(self.cluster.client());
        let node = json!({ "metadata": { "name": name, "labels": { "fixture": self.name } } });
        api.create(&PostParams::default(), &serde_json::from_value(node)?)
            .await?;
        let resources = json!({ "cpu": "64", "memory": "64Gi", "pods": "1000" });
        let status = json!({
            "capacity": resources, "allocatable": resources,
            "conditions": [{ "type": "Ready", "status": "True", "reason": "Pretended", "message": "",
                "lastHeartbeatTime": "2026-01-01T00:00:00Z", "lastTransitionTime": "2026-01-01T00:00:00Z" }],
        });
        patch_status(&api, &name, status).await?;
        // While the node has the not-ready taint, the scheduler ignores it.
        let untainted = |node: Option<&Node>| {
            let spec = node.and_then(|node| node.spec.as_ref());
            spec.is_some_and(|spec| spec.taints.as_ref().is_none_or(Vec::is_empty))
        };
        self.wait_for(api, &name, "without a taint", untainted).await?;
        Ok(name)
    }
}

/// A change of an object that no component needs to act on.
pub(crate) fn touched() -> Value {
    json!({ "metadata": { "labels": { "touched": "yes" } } })
}

/// Patches an object as a user.
pub(crate) async fn patch<K>(api: &Api<K>, name: &str, fields: Value) -> anyhow::Result<K>
where
    K: Clone + Debug + DeserializeOwned,
{
    let patch = Patch::Merge(fields);
    Ok(api.patch(name, &PatchParams::default(), &patch).await?)
}

/// Patches the status of an object as a user.
pub(crate) async fn patch_status<K>(api: &Api<K>, name: &str, status: Value) -> kube::Result<K>
where
    K: DeserializeOwned,
{
    let patch = Patch::Merge(json!({ "status": status }));
    api.patch_status(name, &PatchParams::default(), &patch).await
}

fn merge(into: &mut Value, from: Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, from) => *into = from,
    }
}
