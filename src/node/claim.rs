//! Claims of either API, decoded without the fields that the companion does not read.

use std::fmt::Debug;

use k8s_openapi::api::resource::v1;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use kube::core::NamespaceResourceScope;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};

use crate::api::resource::{POD_CLAIM_NAME_ANNOTATION, ResourceClaim, ResourceClaimStatus, partial_resource};

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
    type Status = v1::ResourceClaimStatus;

    fn from_parts(metadata: ObjectMeta, status: Self::Status) -> Self {
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
