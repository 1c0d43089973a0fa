//! Claims decoded without the fields that are not read: [`StructuredClaim`] for the commands, [`DecodedClaim`] for the companion.
//!
//! The parameters of drivers and their reports about devices are skipped. Users can store many parameters of 10 KiB each. Decoded,
//! they take many times that, and they can be nested deeper than serde_json reads.

use std::fmt::Debug;

use k8s_openapi::api::core::v1::NodeSelector;
use k8s_openapi::api::resource::v1;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use kube::core::NamespaceResourceScope;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};

use super::resource::{POD_CLAIM_NAME_ANNOTATION, ResourceClaim, ResourceClaimStatus, partial_resource};

/// A claim; its metadata is complete.
#[derive(Clone, Debug, Deserialize)]
#[serde(from = "ClaimParts")]
pub(crate) struct StructuredClaim(pub(crate) v1::ResourceClaim);

partial_resource!([] StructuredClaim, v1::ResourceClaim, self => &self.0.metadata, &mut self.0.metadata);

/// The status of a claim.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(from = "StatusParts")]
pub(crate) struct StructuredClaimStatus(pub(crate) v1::ResourceClaimStatus);

#[derive(Deserialize)]
struct ClaimParts {
    #[serde(default)]
    metadata: ObjectMeta,
    #[serde(default)]
    spec: SpecParts,
    status: Option<StructuredClaimStatus>,
}

#[derive(Default, Deserialize)]
struct SpecParts {
    devices: Option<RequestParts>,
}

#[derive(Deserialize)]
struct RequestParts {
    requests: Option<Vec<v1::DeviceRequest>>,
    constraints: Option<Vec<v1::DeviceConstraint>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct StatusParts {
    allocation: Option<AllocationParts>,
    reserved_for: Option<Vec<v1::ResourceClaimConsumerReference>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct AllocationParts {
    devices: Option<ResultParts>,
    node_selector: Option<NodeSelector>,
}

#[derive(Deserialize)]
struct ResultParts {
    results: Option<Vec<v1::DeviceRequestAllocationResult>>,
    config: Option<Vec<ConfigParts>>,
}

#[derive(Deserialize)]
struct ConfigParts {
    opaque: Option<OpaqueParts>,
}

/// The parameters themselves are skipped.
#[derive(Deserialize)]
struct OpaqueParts {
    driver: String,
}

impl From<ClaimParts> for StructuredClaim {
    fn from(parts: ClaimParts) -> Self {
        let devices = parts.spec.devices.map(|devices| v1::DeviceClaim {
            requests: devices.requests,
            constraints: devices.constraints,
            config: None,
        });
        Self(v1::ResourceClaim {
            metadata: parts.metadata,
            spec: v1::ResourceClaimSpec { devices },
            status: parts.status.map(|StructuredClaimStatus(status)| status),
        })
    }
}

impl From<StatusParts> for StructuredClaimStatus {
    fn from(parts: StatusParts) -> Self {
        let allocation = parts.allocation.map(|allocation| v1::AllocationResult {
            devices: allocation.devices.map(Into::into),
            node_selector: allocation.node_selector,
            ..v1::AllocationResult::default()
        });
        Self(v1::ResourceClaimStatus {
            allocation,
            reserved_for: parts.reserved_for,
            devices: None,
        })
    }
}

impl From<ResultParts> for v1::DeviceAllocationResult {
    fn from(parts: ResultParts) -> Self {
        let config = |ConfigParts { opaque }| v1::DeviceAllocationConfiguration {
            opaque: opaque.map(|opaque| v1::OpaqueDeviceConfiguration {
                driver: opaque.driver,
                ..v1::OpaqueDeviceConfiguration::default()
            }),
            ..v1::DeviceAllocationConfiguration::default()
        };
        Self {
            results: parts.results,
            config: parts.config.map(|all| all.into_iter().map(config).collect()),
        }
    }
}

/// A claim of either API.
pub(crate) trait ClaimObject:
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

/// A claim of either API with its status and the metadata that the companion reads. Users can store megabytes in the other fields, which take
/// up to twenty times the size when decoded.
#[derive(Clone, Debug)]
pub(crate) struct DecodedClaim<K>(pub(crate) K);

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

    /// A claim with this member in place of its parameters.
    fn claim(parameters: &str) -> String {
        let result = json!({ "request": "r", "driver": "drayman.dev", "pool": "node-a", "device": "d" });
        let spec = json!({ "devices": {
            "requests": [{ "name": "r", "exactly": { "deviceClassName": "c" } }],
            "constraints": [{ "matchAttribute": "a/b" }],
            "config": [{ "opaque": { "driver": "other.example", "parameters": 0 } }],
        } });
        let opaque = json!({ "driver": "other.example", "parameters": 0 });
        let status = json!({
            "allocation": {
                "devices": { "results": [result], "config": [{ "source": "FromClaim", "opaque": opaque }] },
                "nodeSelector": { "nodeSelectorTerms": [] },
            },
            "reservedFor": [{ "resource": "pods", "name": "p", "uid": "p" }],
            "devices": [{ "driver": "drayman.dev", "pool": "node-a", "device": "d", "data": 0 }],
        });
        let whole =
            json!({ "metadata": { "name": "c", "labels": { "a": "b" } }, "spec": spec, "status": status });
        let text = whole.to_string().replace("\"parameters\":0", parameters);
        assert_eq!(text.matches(parameters).count(), 2);
        text
    }

    #[test]
    fn parameters_are_skipped_and_the_rest_is_decoded() {
        let mut expected: v1::ResourceClaim = serde_json::from_str(&claim("\"parameters\":null")).unwrap();
        expected.spec.devices.as_mut().unwrap().config = None;
        let status = expected.status.as_mut().unwrap();
        status.devices = None;
        for config in status
            .allocation
            .iter_mut()
            .flat_map(|allocation| &mut allocation.devices)
            .flat_map(|devices| devices.config.iter_mut().flatten())
        {
            config.source = String::new();
        }
        let deep = format!("\"parameters\":{}1{}", "[".repeat(5_000), "]".repeat(5_000));
        let text = claim(&deep);
        assert!(serde_json::from_str::<v1::ResourceClaim>(&text).is_err());
        let StructuredClaim(claim) = serde_json::from_str(&text).unwrap();
        assert_eq!(claim, expected);
    }

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
