//! Reads the allocation of a claim from the API server, for Prepare in structured mode.

use k8s_openapi::api::resource::v1::{DeviceRequestAllocationResult, ResourceClaim};
use kube::Api;

use crate::core::prepare::names::{DriverName, is_dns_label, is_dns_subdomain};
use crate::node::service::DeviceResult;

/// Maximum number of results of a claim (`AllocationResultsMaxSize`).
const RESULTS_MAX: usize = 32;
/// Maximum length, in characters, of foreign text quoted in an error.
const SHOWN_MAX: usize = 64;

/// Reads claims.
#[derive(Clone)]
pub struct ClaimReader {
    client: kube::Client,
    driver: DriverName,
}

/// Why the allocation of a claim is not known. The message is for the pod's event.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// The namespace or the name is invalid.
    #[error("namespace {namespace:?} or name {name:?} of the claim is not a valid Kubernetes name")]
    Name {
        /// The namespace, truncated.
        namespace: String,
        /// The name, truncated.
        name: String,
    },
    /// The API server cannot be asked, or it refuses.
    #[error("the API server does not show the claim; kubelet asks again: {0}")]
    Unreadable(kube::Error),
    /// The API server does not answer.
    #[error("the API server does not show the claim in time; kubelet asks again")]
    Timeout,
    /// The claim does not exist.
    #[error("the claim does not exist (any more): delete the pod, or create the claim again")]
    Gone,
    /// Another claim has the name.
    #[error(
        "the claim was deleted, and another of this name has uid {found:?}: delete the pod so that its replacement uses it"
    )]
    Replaced {
        /// The uid of the other claim, truncated.
        found: String,
    },
    /// The claim is not allocated.
    #[error(
        "the claim is not allocated (any more): delete the pod so that its replacement is scheduled again"
    )]
    NotAllocated,
    /// The claim is reserved for no pod.
    #[error(
        "the claim is reserved for no pod (any more): delete the pod so that its replacement is scheduled again"
    )]
    NotReserved,
    /// The allocation has no device of this driver.
    #[error("the claim's allocation has no device of driver {0}")]
    NoDevice(DriverName),
    /// The allocation has more results than the API permits.
    #[error("the claim's allocation has {0} results; at most {RESULTS_MAX} are possible")]
    TooManyResults(usize),
    /// The claim or its class has parameters for this driver.
    #[error(
        "the claim or its DeviceClass has opaque parameters for driver {0}, which takes none: remove `config` from the claim or the class, and \
         configure the kind of device instead"
    )]
    Parameters(DriverName),
}

impl ClaimError {
    /// CamelCase, from a small fixed set: a metric label.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Name { .. } | Self::TooManyResults(_) => "InvalidClaim",
            Self::Unreadable(_) | Self::Timeout => "ClaimUnreadable",
            Self::Gone | Self::Replaced { .. } => "ClaimGone",
            Self::NotAllocated | Self::NotReserved | Self::NoDevice(_) => "NotAllocated",
            Self::Parameters(_) => "InvalidParameters",
        }
    }
}

impl std::fmt::Debug for ClaimReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClaimReader")
            .field("driver", &self.driver)
            .finish_non_exhaustive()
    }
}

impl ClaimReader {
    /// A reader of the allocations of a driver.
    pub fn new(client: kube::Client, driver: DriverName) -> Self {
        Self { client, driver }
    }

    /// The driver's results in the allocation of a claim: one read of the claim, without a deadline.
    pub async fn read(
        &self,
        namespace: &str,
        name: &str,
        uid: &str,
    ) -> Result<Vec<DeviceResult>, ClaimError> {
        if !is_dns_label(namespace) || !is_dns_subdomain(name, 253) {
            return Err(ClaimError::Name {
                namespace: shown(namespace),
                name: shown(name),
            });
        }
        let api = Api::<ResourceClaim>::namespaced(self.client.clone(), namespace);
        match api.get_opt(name).await {
            Ok(Some(claim)) => results(claim, uid, &self.driver),
            Ok(None) => Err(ClaimError::Gone),
            Err(error) => Err(ClaimError::Unreadable(error)),
        }
    }
}

/// The results of a driver in the allocation of a claim.
fn results(claim: ResourceClaim, uid: &str, driver: &DriverName) -> Result<Vec<DeviceResult>, ClaimError> {
    let found = claim.metadata.uid.unwrap_or_default();
    if found != uid {
        return Err(ClaimError::Replaced { found: shown(&found) });
    }
    let status = claim.status.unwrap_or_default();
    let devices = status
        .allocation
        .ok_or(ClaimError::NotAllocated)?
        .devices
        .unwrap_or_default();
    if status.reserved_for.is_none_or(|consumers| consumers.is_empty()) {
        return Err(ClaimError::NotReserved);
    }
    let results = devices.results.unwrap_or_default();
    if results.len() > RESULTS_MAX {
        return Err(ClaimError::TooManyResults(results.len()));
    }
    let mut configurations = devices.config.into_iter().flatten();
    if configurations.any(|config| {
        config
            .opaque
            .is_some_and(|opaque| opaque.driver == driver.as_str())
    }) {
        return Err(ClaimError::Parameters(driver.clone()));
    }
    let ours = of_driver(&results, driver);
    if ours.is_empty() {
        return Err(ClaimError::NoDevice(driver.clone()));
    }
    Ok(ours)
}

/// The results of this driver.
pub(in crate::node) fn of_driver(
    results: &[DeviceRequestAllocationResult],
    driver: &DriverName,
) -> Vec<DeviceResult> {
    let ours = results.iter().filter(|result| result.driver == driver.as_str());
    let device = |result: &DeviceRequestAllocationResult| {
        // A container names the request, not the subrequest that the scheduler chose.
        let request = result.request.split('/').next().unwrap_or_default();
        DeviceResult {
            request: request.to_owned(),
            pool: result.pool.clone(),
            device: result.device.clone(),
            share_id: result.share_id.clone(),
            admin_access: result.admin_access.unwrap_or_default(),
        }
    };
    ours.map(device).collect()
}

fn shown(text: &str) -> String {
    text.chars().take(SHOWN_MAX).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const UID: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a10";

    fn claim() -> Value {
        json!({
            "metadata": {"namespace": "default", "name": "camera", "uid": UID},
            "spec": {},
            "status": {
                "allocation": {"devices": {"results": [
                    {"request": "front/wide", "driver": "drayman.dev", "pool": "node-a", "device": "video0"},
                    {"request": "gpu", "driver": "gpu.example.com", "pool": "x", "device": "gpu-0"},
                    {"request": "bus", "driver": "drayman.dev", "pool": "node-a", "device": "i2c-1", "shareID": "s-1",
                     "adminAccess": true},
                ]}},
                "reservedFor": [{"resource": "pods", "name": "p", "uid": "p-1"}],
            },
        })
    }

    fn read(claim: Value) -> Result<Vec<DeviceResult>, ClaimError> {
        results(
            serde_json::from_value(claim).unwrap(),
            UID,
            &DriverName::parse("drayman.dev").unwrap(),
        )
    }

    fn reason(claim: Value) -> &'static str {
        read(claim).unwrap_err().reason()
    }

    #[test]
    fn only_the_results_of_the_driver_are_read() {
        let results = read(claim()).unwrap();
        assert_eq!(results.len(), 2);
        let [front, bus] = [&results[0], &results[1]];
        assert_eq!(
            (front.request.as_str(), front.device.as_str()),
            ("front", "video0")
        );
        assert_eq!((bus.share_id.as_deref(), bus.admin_access), (Some("s-1"), true));
    }

    #[test]
    fn a_claim_that_gives_nothing_is_refused() {
        let without = |path: &str| {
            let mut claim = claim();
            let (parent, key) = path.rsplit_once('/').unwrap();
            claim
                .pointer_mut(parent)
                .unwrap()
                .as_object_mut()
                .unwrap()
                .remove(key);
            claim
        };
        assert_eq!(reason(without("/status/allocation")), "NotAllocated");
        assert_eq!(reason(without("/status/reservedFor")), "NotAllocated");
        assert_eq!(
            reason(without("/status/allocation/devices/results")),
            "NotAllocated"
        );
        let mut other = claim();
        other["metadata"]["uid"] = "other".into();
        assert_eq!(reason(other), "ClaimGone");
        let mut foreign = claim();
        for result in foreign["status"]["allocation"]["devices"]["results"]
            .as_array_mut()
            .unwrap()
        {
            result["driver"] = "gpu.example.com".into();
        }
        assert_eq!(reason(foreign), "NotAllocated");
    }

    #[test]
    fn parameters_for_the_driver_are_refused() {
        let with = |driver: &str| {
            let mut claim = claim();
            claim["status"]["allocation"]["devices"]["config"] = json!([
                {"source": "FromClaim", "opaque": {"driver": driver, "parameters": {"path": "/etc"}}}
            ]);
            claim
        };
        assert_eq!(reason(with("drayman.dev")), "InvalidParameters");
        assert!(read(with("gpu.example.com")).is_ok());
    }

    #[test]
    fn more_results_than_the_api_permits_are_refused() {
        let mut claim = claim();
        let result = claim["status"]["allocation"]["devices"]["results"][0].clone();
        claim["status"]["allocation"]["devices"]["results"] = vec![result; RESULTS_MAX + 1].into();
        assert_eq!(reason(claim), "InvalidClaim");
    }
}
