//! Claims of an earlier process, another release or a user, and the events about them.

use anyhow::Context as _;
use drayman::api::crd::definitions;
use drayman::api::handle::DeviceHandle;
use drayman::api::resource::ResourceClaim;
use k8s_openapi::api::core::v1::{Event, Node};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, CustomResourceValidation, JSONSchemaProps,
};
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use serde_json::{Value, json};

use crate::harness::Entry;
use crate::setup::{DRIVER, FINALIZER, Setup, is_allocated, pod_from};

/// The user name of the controller.
pub(crate) const CONTROLLER: &str = "drayman-controller";

impl Setup {
    /// Creates a claim of the class `test` in this allocation mode, with or without our finalizer.
    pub(crate) async fn make_claim(
        &self,
        name: &str,
        mode: &str,
        with_finalizer: bool,
    ) -> anyhow::Result<String> {
        let finalizers = if with_finalizer {
            json!([FINALIZER])
        } else {
            json!([])
        };
        let claim: ResourceClaim = serde_json::from_value(json!({
            "metadata": { "name": name, "finalizers": finalizers },
            "spec": { "resourceClassName": "test", "allocationMode": mode },
        }))?;
        let stored = self.claims().create(&PostParams::default(), &claim).await?;
        stored.metadata.uid.context("a claim has a uid")
    }

    /// Creates a claim with our finalizer and an allocation on a node with our driver name. `handle` receives the claim's uid.
    pub(crate) async fn record(
        &self,
        name: &str,
        node: &str,
        handle: impl FnOnce(&str) -> String,
    ) -> anyhow::Result<()> {
        let uid = self.make_claim(name, "WaitForFirstConsumer", true).await?;
        let handles = json!([{ "driverName": DRIVER, "data": handle(&uid) }]);
        self.write_allocation(name, Some(node), &handles).await
    }

    /// Writes an allocation with our driver name into a claim.
    pub(crate) async fn write_allocation(
        &self,
        claim: &str,
        node: Option<&str>,
        handles: &Value,
    ) -> anyhow::Result<()> {
        let only = |node| {
            json!({ "nodeSelectorTerms": [{ "matchFields": [
                { "key": "metadata.name", "operator": "In", "values": [node] }] }] })
        };
        let allocation = json!({ "resourceHandles": handles, "availableOnNodes": node.map(only) });
        let patch = json!({ "status": { "driverName": DRIVER, "allocation": allocation } });
        self.claims()
            .patch_status(claim, &PatchParams::default(), &Patch::Merge(patch))
            .await
            .map(drop)?;
        Ok(())
    }

    /// The uid of a node.
    pub(crate) async fn node_uid(&self, node: &str) -> anyhow::Result<String> {
        let node = Api::<Node>::all(self.cluster.client()).get(node).await?;
        node.metadata.uid.context("a node has a uid")
    }

    /// Creates a pod that uses an existing claim.
    pub(crate) async fn make_pod_with(&self, name: &str, claim: &str) -> anyhow::Result<()> {
        let pod = pod_from(json!({ "metadata": { "name": name }, "spec": {
            "resourceClaims": [{ "name": "device", "source": { "resourceClaimName": claim } }],
            "containers": [{ "name": "main", "image": crate::harness::IMAGE, "imagePullPolicy": "Never",
                "resources": { "claims": [{ "name": "device" }] } }],
            "dnsPolicy": "Default", "terminationGracePeriodSeconds": 1 } }))?;
        self.pods().create(&PostParams::default(), &pod).await?;
        Ok(())
    }

    /// Creates a pod with a claim from the template `test`, waits until it is bound, and returns its devices as `node/device`.
    pub(crate) async fn serve(&self, name: &str) -> anyhow::Result<Vec<String>> {
        self.make_pod(name).await?;
        self.served(name).await
    }

    /// Waits until a pod is bound, and returns the devices of its claim as `node/device`.
    pub(crate) async fn served(&self, pod: &str) -> anyhow::Result<Vec<String>> {
        self.until_bound(pod).await?;
        devices(&self.claim_of(pod, "allocated", is_allocated).await?)
    }

    /// Deletes a claim and waits until it is gone.
    pub(crate) async fn delete_claim(&self, name: &str) -> anyhow::Result<()> {
        let _ = self.claims().delete(name, &DeleteParams::default()).await?;
        self.until_claim_gone(name).await
    }

    /// Number of events with this reason, including repetitions.
    pub(crate) async fn event_count(&self, name: &str, reason: &str) -> anyhow::Result<usize> {
        let events = self.events_of(name, reason).await?;
        Ok(events
            .iter()
            .map(|event| usize::try_from(event.count.unwrap_or(1).max(1)).unwrap_or(1))
            .sum())
    }

    /// Messages of the events with this reason.
    pub(crate) async fn event_messages(&self, name: &str, reason: &str) -> anyhow::Result<Vec<String>> {
        let events = self.events_of(name, reason).await?;
        Ok(events.into_iter().filter_map(|event| event.message).collect())
    }

    async fn events_of(&self, name: &str, reason: &str) -> anyhow::Result<Vec<Event>> {
        let events = Api::<Event>::namespaced(self.cluster.client(), "default")
            .list(&ListParams::default().fields(&format!("involvedObject.name={name}")))
            .await?;
        let mut events = events.items;
        events.retain(|event| event.reason.as_deref() == Some(reason));
        Ok(events)
    }

    /// The controller's writes to claims and contexts so far.
    pub(crate) async fn controller_writes(&self) -> anyhow::Result<Vec<Entry>> {
        let entries = self.cluster.audit().of_user(CONTROLLER).await?;
        Ok(entries
            .into_iter()
            .filter(|entry| entry.is_write() && entry.group == "resource.k8s.io")
            .collect())
    }
}

/// The handle of an allocated claim.
pub(crate) fn handle(claim: &ResourceClaim) -> anyhow::Result<DeviceHandle> {
    let allocation = claim.status.allocation.iter();
    let mut handles = allocation.flat_map(|one| &one.resource_handles);
    let data = handles.find_map(|handle| handle.data.as_deref());
    Ok(DeviceHandle::parse(data.unwrap_or_default())?)
}

/// The devices of a claim as `node/device`.
pub(crate) fn devices(claim: &ResourceClaim) -> anyhow::Result<Vec<String>> {
    let handle = handle(claim)?;
    let node = handle.node_name;
    Ok(handle
        .devices
        .into_iter()
        .map(|device| format!("{node}/{}", device.device))
        .collect())
}

/// A handle as written by release 0.1. This text never changes: claims with it outlive the process that wrote it.
pub(crate) fn first_handle(claim_uid: &str, node: &str, node_uid: &str, device: &str) -> String {
    format!(
        r#"{{"version":1,"claimUid":"{claim_uid}","nodeName":"{node}","nodeUid":"{node_uid}","devices":[{{"request":"device","device":"{device}"}}]}}"#
    )
}

/// Replaces our CRDs by versions that accept any field, as a later release accepts its own fields.
pub(crate) async fn open_schemas(setup: &Setup) -> anyhow::Result<()> {
    let api = Api::<CustomResourceDefinition>::all(setup.cluster.client());
    let open: JSONSchemaProps =
        serde_json::from_value(json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true }))?;
    for definition in definitions() {
        let name = definition.metadata.name.clone().unwrap_or_default();
        let mut versions = definition.spec.versions;
        for version in &mut versions {
            version.schema = Some(CustomResourceValidation {
                open_api_v3_schema: Some(open.clone()),
            });
        }
        let patch = Patch::Merge(json!({ "spec": { "versions": versions } }));
        api.patch(&name, &PatchParams::default(), &patch).await?;
    }
    Ok(())
}

/// Our kinds as dynamic objects.
pub(crate) fn kind(setup: &Setup, kind: &str, namespaced: bool) -> Api<DynamicObject> {
    let plural = if kind == "NodeInventory" {
        "nodeinventories".to_owned()
    } else {
        kind.to_lowercase()
    };
    let resource =
        ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(DRIVER, "v1alpha1", kind), &plural);
    let client = setup.cluster.client();
    if namespaced {
        Api::namespaced_with(client, "default", &resource)
    } else {
        Api::all_with(client, &resource)
    }
}

/// Writes an object until the CRD's new schema accepts it.
pub(crate) async fn write(
    api: &Api<DynamicObject>,
    name: &str,
    object: &Value,
    kept: &str,
) -> anyhow::Result<()> {
    for _ in 0..200 {
        let parameters = PatchParams::apply("another-release").force();
        let stored = api.patch(name, &parameters, &Patch::Apply(object)).await?;
        if stored.data.pointer(kept).is_some() {
            return Ok(());
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    anyhow::bail!("{name} is stored without {kept}")
}
