//! Claims of either API, decoded without the fields that the companion does not read, and the watch of those allocated on this node.

use std::fmt::Debug;
use std::sync::Arc;

use futures::TryStreamExt as _;
use k8s_openapi::api::resource::v1;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::NamespaceResourceScope;
use kube::runtime::watcher::{Config, Event};
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::api::claim::StructuredClaimStatus;
use crate::api::resource::{
    LABEL_OF_ANY_NODE, NODE_LABEL, POD_CLAIM_NAME_ANNOTATION, ResourceClaim, ResourceClaimStatus,
    label_of_node, partial_resource,
};
use crate::core::prepare::checkpoint::ClusterFacts;
use crate::core::prepare::claims_api::ClaimsApi;
use crate::core::prepare::containers::AllocatedClaims;
use crate::node::context::NodeContext;
use crate::node::reload::ConfiguredResources;
use crate::node::watch::watch_objects;

/// Number of claims in a page of a list. A page is in memory as a whole, twice, and users can store some megabytes in each claim.
pub(super) const PAGE: u32 = 8;

/// A claim of either API.
pub(super) trait ClaimObject:
    Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + Debug + Send + Sync + 'static
{
    type Status: DeserializeOwned + Default;

    fn from_parts(metadata: ObjectMeta, status: Self::Status) -> Self;
}

impl ClaimObject for ResourceClaim {
    type Status = ResourceClaimStatus;

    fn from_parts(metadata: ObjectMeta, status: Self::Status) -> Self {
        Self {
            metadata,
            status,
            ..Self::default()
        }
    }
}

impl ClaimObject for v1::ResourceClaim {
    type Status = StructuredClaimStatus;

    fn from_parts(metadata: ObjectMeta, StructuredClaimStatus(status): Self::Status) -> Self {
        Self {
            metadata,
            status: Some(status),
            ..Self::default()
        }
    }
}

/// A claim with its status and the metadata that the companion reads. Users can store megabytes in the other fields, which take up to
/// twenty times the size when decoded.
#[derive(Clone, Debug)]
pub(super) struct DecodedClaim<K>(pub(super) K);

#[derive(Deserialize)]
struct Parts<S> {
    metadata: MetadataParts,
    status: Option<S>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct MetadataParts {
    name: Option<String>,
    namespace: Option<String>,
    uid: Option<String>,
    resource_version: Option<String>,
    annotations: Option<Annotations>,
}

#[derive(Deserialize)]
struct Annotations {
    #[serde(rename = "resource.kubernetes.io/pod-claim-name")]
    pod_claim_name: Option<String>,
}

impl<'de, K: ClaimObject> Deserialize<'de> for DecodedClaim<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Parts { metadata, status } = Parts::<K::Status>::deserialize(deserializer)?;
        let name = metadata
            .annotations
            .and_then(|annotations| annotations.pod_claim_name);
        let metadata = ObjectMeta {
            name: metadata.name,
            namespace: metadata.namespace,
            uid: metadata.uid,
            resource_version: metadata.resource_version,
            annotations: name.map(|name| [(POD_CLAIM_NAME_ANNOTATION.to_owned(), name)].into()),
            ..ObjectMeta::default()
        };
        Ok(Self(K::from_parts(metadata, status.unwrap_or_default())))
    }
}

partial_resource!([K: ClaimObject] DecodedClaim<K>, K, self => self.0.meta(), self.0.meta_mut());

/// Watches the claims allocated on this node, for kinds that are served through both DRA and the device plugin API.
///
/// The controller labels each claim with the node's name together with the finalizer, thus before it allocates. The watch selects this label,
/// so a node receives its own claims and not those of the whole cluster.
pub(super) struct ClaimWatch {
    pub(super) context: NodeContext,
    pub(super) cluster: watch::Receiver<ClusterFacts>,
    pub(super) resources: watch::Receiver<Arc<ConfiguredResources>>,
    pub(super) sender: watch::Sender<Arc<AllocatedClaims>>,
}

impl ClaimWatch {
    /// Watches the claims, once a kind is offered both as claims and as an extended resource, until the shutdown.
    pub(super) async fn run(mut self, shutdown: CancellationToken) {
        let has_both = |all: &Arc<ConfiguredResources>| all.values().any(|resource| resource.also_by_claims);
        tokio::select! {
            () = shutdown.cancelled() => return,
            both = self.resources.wait_for(has_both) => if both.is_err() { return },
        }
        loop {
            tokio::select! {
                () = shutdown.cancelled() => return,
                known = self.cluster.wait_for(|facts| facts.claims.is_some()) => if known.is_err() { return },
            }
            let serves = self.cluster.borrow_and_update().serves(ClaimsApi::Classic);
            if !serves {
                // There are no classic claims. Allocations of structured mode become known at Prepare.
                self.sender.send_replace(Arc::new(AllocatedClaims::none()));
            }
            let mut cluster = self.cluster.clone();
            tokio::select! {
                () = shutdown.cancelled() => return,
                changed = cluster.wait_for(|facts| facts.serves(ClaimsApi::Classic) != serves) => if changed.is_err() { return },
                () = self.follow(), if serves => {}
            }
        }
    }

    async fn follow(&self) {
        let driver = self.context.driver_name.as_str();
        let api = Api::<DecodedClaim<ResourceClaim>>::all(self.context.client.clone());
        let key = format!("{driver}/{NODE_LABEL}");
        let node_name = &self.context.node_name;
        let here = label_of_node(node_name);
        let selector = format!("{key} in ({here},{LABEL_OF_ANY_NODE})");
        let config = Config::default().labels(&selector).page_size(PAGE);
        let mut events = Box::pin(watch_objects(api, config));
        let mut allocated_claims = self.sender.borrow().as_ref().clone();
        let mut listed = AllocatedClaims::default();
        let mut complained = false;
        loop {
            let event = match events.try_next().await {
                Ok(Some(event)) => event,
                Ok(None) => return,
                Err(error) => {
                    if !complained {
                        complained = true;
                        warn!(
                            reason = "ClaimsUnwatched",
                            "the claims of this node cannot be watched, so that an allocation is noticed only at prepare: {error}"
                        );
                    }
                    continue;
                }
            };
            complained = false;
            match event {
                Event::Init => {
                    listed = AllocatedClaims::none();
                    continue;
                }
                Event::InitApply(DecodedClaim(claim)) => {
                    listed.set(&claim, driver, node_name);
                    continue;
                }
                Event::InitDone => {
                    allocated_claims = std::mem::take(&mut listed);
                    let claims = allocated_claims.count();
                    info!(claims, "the claims of this node are known");
                }
                Event::Apply(DecodedClaim(claim)) => allocated_claims.set(&claim, driver, node_name),
                Event::Delete(DecodedClaim(claim)) => {
                    allocated_claims.remove(claim.metadata.uid.as_deref().unwrap_or_default());
                }
            }
            self.sender.send_if_modified(|sent| {
                let changed = **sent != allocated_claims;
                if changed {
                    *sent = Arc::new(allocated_claims.clone());
                }
                changed
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_the_fields_that_are_read_are_decoded() {
        let metadata = json!({
            "name": "c", "namespace": "n", "uid": "u", "resourceVersion": "1",
            "annotations": { POD_CLAIM_NAME_ANNOTATION: "device", "note": "x" },
            "labels": { "a": "b" }, "finalizers": ["a"],
            "ownerReferences": [{ "apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "p" }],
        });
        let kept = ObjectMeta {
            name: Some("c".into()),
            namespace: Some("n".into()),
            uid: Some("u".into()),
            resource_version: Some("1".into()),
            annotations: Some([(POD_CLAIM_NAME_ANNOTATION.to_owned(), "device".to_owned())].into()),
            ..ObjectMeta::default()
        };
        let text = json!({
            "metadata": metadata, "spec": { "resourceClassName": "test" },
            "status": { "driverName": "drayman.dev" },
        });
        let claim: DecodedClaim<ResourceClaim> = serde_json::from_str(&text.to_string()).unwrap();
        assert_eq!(claim.0.metadata, kept);
        assert_eq!(claim.0.status.driver_name.as_deref(), Some("drayman.dev"));

        let text = json!({ "metadata": metadata, "spec": {}, "status": { "reservedFor": [] } });
        let claim: DecodedClaim<v1::ResourceClaim> = serde_json::from_str(&text.to_string()).unwrap();
        assert_eq!(claim.0.metadata, kept);
        assert_eq!(claim.0.status.unwrap().reserved_for, Some(Vec::new()));
    }
}
