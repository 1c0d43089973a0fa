use serde_json::{Value, json};

use super::super::*;

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
fn a_claim_without_results_for_the_driver_is_refused() {
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
fn an_invalid_request_name_is_refused() {
    for request in ["", "../..", "a/b/c", "a/", "A", "a/.."] {
        let mut claim = claim();
        claim["status"]["allocation"]["devices"]["results"][0]["request"] = request.into();
        assert_eq!(reason(claim), "InvalidClaim", "{request}");
    }
}

#[test]
fn a_claim_of_a_template_has_its_name_in_the_pod() {
    let mut claim = claim();
    claim["metadata"]["annotations"] = json!({ POD_CLAIM_NAME_ANNOTATION: "usb" });
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
