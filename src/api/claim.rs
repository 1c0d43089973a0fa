//! Claims of `resource.k8s.io/v1`, decoded without the parameters of drivers and the reports of drivers about devices. Users store 10 KiB in
//! each of many: decoded they take many times that, and they can be nested deeper than serde_json reads.

use k8s_openapi::api::core::v1::NodeSelector;
use k8s_openapi::api::resource::v1;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;

use super::resource::partial_resource;

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
}
