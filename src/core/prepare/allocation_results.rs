//! The results of the scheduler in a claim of structured mode, as read from the API server at Prepare.

use k8s_openapi::api::resource::v1::{DeviceRequestAllocationResult, ResourceClaim};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::device_metadata::base_request;
use super::names::DriverName;
use super::plan::DeviceResult;

/// Maximum number of results of a claim (`AllocationResultsMaxSize`).
const RESULTS_MAX: usize = 32;
/// Annotation of a claim made from a template: its name in the pod (`PodResourceClaimAnnotation`).
const POD_CLAIM_NAME: &str = "resource.kubernetes.io/pod-claim-name";
/// Maximum length, in characters, of foreign text quoted in an error.
const SHOWN_MAX: usize = 64;

/// Why a claim gives this driver no devices. The message is for the pod's event.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResultsError {
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
    /// The API server would reject the name of a request.
    #[error("the claim's allocation names a request {0:?}, which is not a valid name")]
    Request(String),
    /// The claim or its class has parameters for this driver.
    #[error(
        "the claim or its DeviceClass has opaque parameters for driver {0}, which takes none: remove `config` from the claim or the class, and \
         configure the kind of device instead"
    )]
    Parameters(DriverName),
}

impl ResultsError {
    /// CamelCase, from a small fixed set: a metric label.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::TooManyResults(_) | Self::Request(_) => "InvalidClaim",
            Self::Replaced { .. } => "ClaimGone",
            Self::NotAllocated | Self::NotReserved | Self::NoDevice(_) => "NotAllocated",
            Self::Parameters(_) => "InvalidParameters",
        }
    }
}

/// The results of a driver in the allocation of the claim with this uid.
pub fn results_of_claim(
    claim: ResourceClaim,
    uid: &str,
    driver: &DriverName,
) -> Result<Vec<DeviceResult>, ResultsError> {
    let found = claim.metadata.uid.as_deref().unwrap_or_default();
    if found != uid {
        return Err(ResultsError::Replaced { found: shown(found) });
    }
    let status = claim.status.unwrap_or_default();
    let devices = status
        .allocation
        .ok_or(ResultsError::NotAllocated)?
        .devices
        .unwrap_or_default();
    if status.reserved_for.is_none_or(|consumers| consumers.is_empty()) {
        return Err(ResultsError::NotReserved);
    }
    let results = devices.results.unwrap_or_default();
    if results.len() > RESULTS_MAX {
        return Err(ResultsError::TooManyResults(results.len()));
    }
    let mut configurations = devices.config.into_iter().flatten();
    if configurations.any(|config| {
        config
            .opaque
            .is_some_and(|opaque| opaque.driver == driver.as_str())
    }) {
        return Err(ResultsError::Parameters(driver.clone()));
    }
    let ours = results_of_driver(&results, driver, pod_claim_name(&claim.metadata));
    if ours.is_empty() {
        return Err(ResultsError::NoDevice(driver.clone()));
    }
    match ours.iter().find(|result| base_request(&result.request).is_none()) {
        Some(result) => Err(ResultsError::Request(shown(&result.request))),
        None => Ok(ours),
    }
}

/// The name of a claim in its pod, if the claim was made from a template.
pub fn pod_claim_name(claim: &ObjectMeta) -> Option<&str> {
    let annotations = claim.annotations.as_ref()?;
    annotations.get(POD_CLAIM_NAME).map(String::as_str)
}

/// The results of this driver.
pub fn results_of_driver(
    results: &[DeviceRequestAllocationResult],
    driver: &DriverName,
    pod_claim_name: Option<&str>,
) -> Vec<DeviceResult> {
    let ours = results.iter().filter(|result| result.driver == driver.as_str());
    let device = |result: &DeviceRequestAllocationResult| DeviceResult {
        request: result.request.clone(),
        pool: result.pool.clone(),
        device: result.device.clone(),
        share_id: result.share_id.clone(),
        admin_access: result.admin_access.unwrap_or_default(),
        pod_claim_name: pod_claim_name.map(str::to_owned),
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

    fn read(claim: Value) -> Result<Vec<DeviceResult>, ResultsError> {
        results_of_claim(
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
            ("front/wide", "video0")
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
        let with = |driver: &str, parameters: &Value| {
            let mut claim = claim();
            claim["status"]["allocation"]["devices"]["config"] = json!([
                {"source": "FromClass", "requests": ["bus"]},
                {"source": "FromClaim", "opaque": {"driver": driver, "parameters": parameters}}
            ]);
            claim
        };
        for parameters in [
            json!({}),
            json!({"path": "/etc"}),
            json!({"apiVersion": "drayman.dev/v9", "kind": "DeviceConfiguration"}),
            json!({"apiVersion": "drayman.dev/v1alpha1", "kind": "DeviceConfiguration", "oneFieldTooMany": 1}),
            json!({"nonsense": "x".repeat(10 * 1024)}),
        ] {
            let error = read(with("drayman.dev", &parameters)).unwrap_err();
            assert_eq!(error.reason(), "InvalidParameters");
            assert!(error.to_string().len() < 300, "{error}");
            assert!(read(with("gpu.example.com", &parameters)).is_ok());
        }
    }

    #[test]
    fn a_request_that_is_no_name_is_refused() {
        for request in ["", "../..", "a/b/c", "a/", "A", "a/.."] {
            let mut claim = claim();
            claim["status"]["allocation"]["devices"]["results"][0]["request"] = request.into();
            assert_eq!(reason(claim), "InvalidClaim", "{request}");
        }
    }

    #[test]
    fn a_claim_of_a_template_has_its_name_in_the_pod() {
        let mut claim = claim();
        claim["metadata"]["annotations"] = json!({ POD_CLAIM_NAME: "usb" });
        let results = read(claim).unwrap();
        assert_eq!(results[0].pod_claim_name.as_deref(), Some("usb"));
    }

    #[test]
    fn more_results_than_the_api_permits_are_refused() {
        let mut claim = claim();
        let result = claim["status"]["allocation"]["devices"]["results"][0].clone();
        claim["status"]["allocation"]["devices"]["results"] = vec![result; RESULTS_MAX + 1].into();
        assert_eq!(reason(claim), "InvalidClaim");
    }
}
