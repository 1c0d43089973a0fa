//! The objects of users and of the scheduler, as a test makes and changes them.

use drayman::api::resource::{
    Pod, PodSchedulingContext, ResourceClaim, ResourceClaimTemplate, ResourceClass,
};
use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::harness::IMAGE;
use crate::stage::Stage;

/// The name of a scheduler that does not exist: pods that name it are scheduled by the test.
const TEST_SCHEDULER: &str = "the-test";

/// Where a pod's claim comes from.
#[derive(Clone, Copy)]
pub(crate) enum From<'a> {
    Claim(&'a str),
    Template(&'a str),
}

impl Stage {
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

    /// Makes a class of the stage's driver; `fields` wins.
    pub(crate) async fn make_class(&self, name: &str, fields: Value) -> anyhow::Result<ResourceClass> {
        let mut class = json!({ "metadata": { "name": name }, "driverName": self.driver_name() });
        merge(&mut class, fields);
        let class = serde_json::from_value(class)?;
        Ok(self.classes().create(&PostParams::default(), &class).await?)
    }

    /// Changes a class.
    pub(crate) async fn patch_class(&self, name: &str, fields: Value) -> anyhow::Result<()> {
        let patch = Patch::Merge(fields);
        self.classes()
            .patch(name, &PatchParams::default(), &patch)
            .await
            .map(drop)?;
        Ok(())
    }

    /// Makes a claim of the stage's class that waits for a pod.
    pub(crate) async fn claim(&self, name: &str) -> anyhow::Result<ResourceClaim> {
        self.claim_of(name, json!({ "resourceClassName": self.name }))
            .await
    }

    /// Makes a claim of the stage's class that is to be allocated at once.
    pub(crate) async fn immediate(&self, name: &str) -> anyhow::Result<ResourceClaim> {
        let spec = json!({ "resourceClassName": self.name, "allocationMode": "Immediate" });
        self.claim_of(name, spec).await
    }

    /// Makes a claim.
    pub(crate) async fn claim_of(&self, name: &str, spec: Value) -> anyhow::Result<ResourceClaim> {
        self.create_claim(json!({ "metadata": { "name": name }, "spec": spec }))
            .await
    }

    /// Makes a claim of the stage's class unless it says otherwise.
    pub(crate) async fn create_claim(&self, claim: Value) -> anyhow::Result<ResourceClaim> {
        let mut whole = json!({ "spec": { "resourceClassName": self.name } });
        merge(&mut whole, claim);
        Ok(self
            .claims()
            .create(&PostParams::default(), &serde_json::from_value(whole)?)
            .await?)
    }

    /// Makes a template of claims of a class.
    pub(crate) async fn template(&self, name: &str, class: &str) -> anyhow::Result<()> {
        let api = Api::<ResourceClaimTemplate>::namespaced(self.cluster.client(), &self.name);
        let template =
            json!({ "metadata": { "name": name }, "spec": { "spec": { "resourceClassName": class } } });
        api.create(&PostParams::default(), &serde_json::from_value(template)?)
            .await?;
        Ok(())
    }

    /// Makes a pod that the test schedules itself.
    pub(crate) async fn pod(&self, name: &str, claims: &[(&str, From<'_>)]) -> anyhow::Result<Pod> {
        self.pod_with(name, claims, json!({ "schedulerName": TEST_SCHEDULER }))
            .await
    }

    /// Makes a pod that the scheduler places on one of the stage's nodes.
    pub(crate) async fn scheduled_pod(&self, name: &str, claims: &[(&str, From<'_>)]) -> anyhow::Result<Pod> {
        self.pod_with(name, claims, json!({ "nodeSelector": { "stage": self.name } }))
            .await
    }

    /// Makes a pod with these fields in its spec.
    pub(crate) async fn pod_with(
        &self,
        name: &str,
        claims: &[(&str, From<'_>)],
        fields: Value,
    ) -> anyhow::Result<Pod> {
        let source = |from: From<'_>| match from {
            From::Claim(name) => json!({ "resourceClaimName": name }),
            From::Template(name) => json!({ "resourceClaimTemplateName": name }),
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

    /// Deletes a pod at once, as a kubelet does at the end.
    pub(crate) async fn remove_pod(&self, name: &str) -> anyhow::Result<()> {
        self.pods()
            .delete(name, &DeleteParams::default().grace_period(0))
            .await
            .map(drop)?;
        Ok(())
    }

    /// Asks for the deallocation of a claim that nobody uses any more, as the claim controller does since 1.28.
    pub(crate) async fn give_up(&self, claim: &str) -> anyhow::Result<()> {
        if self.cluster.minor() < 28 {
            let unused = |claim: &ResourceClaim| claim.status.reserved_for.is_empty();
            self.until_claim(claim, "unused", unused).await?;
            self.patch_claim_status(claim, json!({ "deallocationRequested": true }))
                .await?;
        }
        Ok(())
    }

    /// Makes the context of a pod, as the scheduler does.
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

    /// Makes a context by the name of a pod with other metadata.
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

    /// Changes what the scheduler says.
    pub(crate) async fn reschedule(&self, pod: &str, spec: Value) -> anyhow::Result<()> {
        let patch = Patch::Merge(json!({ "spec": spec }));
        self.contexts()
            .patch(pod, &PatchParams::default(), &patch)
            .await
            .map(drop)?;
        Ok(())
    }

    /// Makes a node that exists in the API only, with the stage's label. The scheduler binds pods to it; nothing runs there.
    pub(crate) async fn node(&self, name: &str) -> anyhow::Result<String> {
        let name = format!("{}-{name}", self.name);
        let api = Api::<Node>::all(self.cluster.client());
        let node = json!({ "metadata": { "name": name, "labels": { "stage": self.name } } });
        api.create(&PostParams::default(), &serde_json::from_value(node)?)
            .await?;
        let resources = json!({ "cpu": "64", "memory": "64Gi", "pods": "1000" });
        let status = json!({ "status": {
            "capacity": resources, "allocatable": resources,
            "conditions": [{ "type": "Ready", "status": "True", "reason": "Pretended", "message": "",
                "lastHeartbeatTime": "2026-01-01T00:00:00Z", "lastTransitionTime": "2026-01-01T00:00:00Z" }],
        } });
        api.patch_status(&name, &PatchParams::default(), &Patch::Merge(status))
            .await?;
        Ok(name)
    }
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
