//! The checkpoint of kubelet's device manager: `kubelet_internal_checkpoint` in the device plugin directory.
//!
//! Kubelet replaces it at each grant and at each device list of a plugin, and keeps ended pods until then. It contains init containers and
//! pods that were deleted by force, which the PodResources API omits. Upstream: `PodDevicesEntry` in
//! `pkg/kubelet/cm/devicemanager/checkpoint`, unchanged from 1.20 to 1.37.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::ByteString;
use prost::Message as _;
use serde::Deserialize;

use super::kubelet_state::shortened;
use super::prepared_claims::add_numbers;
use crate::api::crd::DeviceNumber;
use crate::api::proto::device_plugin_v1beta1::ContainerAllocateResponse;
use crate::core::names::{DriverName, device_of_plugin_id, environment_name};

/// File name in the device plugin directory.
pub const FILE: &str = "kubelet_internal_checkpoint";

/// The devices of one extended resource that a container of a pod was granted.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct PodDevicesEntry {
    /// Uid of the pod.
    #[serde(rename = "PodUID")]
    pub pod_uid: String,
    /// Name of the extended resource.
    pub resource_name: String,
    /// Device plugin ids by NUMA node; -1 for devices without one.
    #[serde(rename = "DeviceIDs", default)]
    pub device_ids: Option<BTreeMap<String, Vec<String>>>,
    /// The serialized response of the device plugin. Kubelet keeps it to restart the container.
    #[serde(rename = "AllocResp", default)]
    answer: Option<ByteString>,
}

/// The text is not a checkpoint of the device manager.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("kubelet's {FILE} does not have the format of kubelet 1.20 to 1.37: {0}")]
pub struct DeviceManagerError(String);

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Document {
    data: CheckpointData,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct CheckpointData {
    #[serde(default)]
    pod_device_entries: Option<Vec<PodDevicesEntry>>,
}

/// Parses the checkpoint.
pub fn parse(text: &[u8]) -> Result<Vec<PodDevicesEntry>, DeviceManagerError> {
    let document: Document =
        serde_json::from_slice(text).map_err(|error| DeviceManagerError(shortened(&error)))?;
    Ok(document.data.pod_device_entries.unwrap_or_default())
}

/// The numbers of the devices that this driver granted, by name of the extended resource and of the device. Includes resources that it no
/// longer serves. A device has no numbers if its driver does not report them.
pub type Granted = BTreeMap<String, BTreeMap<String, Vec<DeviceNumber>>>;

/// Finds the grants of this driver to pods that may still have running containers. Resource names and ids are not proof of origin; a
/// response is ours if it contains the variable or the CDI device that this driver adds for each device.
pub fn granted_by(
    driver: &DriverName,
    grants: &[PodDevicesEntry],
    may_run: impl Fn(&str) -> bool,
) -> Granted {
    let mut granted = Granted::new();
    for grant in grants.iter().filter(|grant| may_run(&grant.pod_uid)) {
        let answer = grant.answer.as_ref().map(|bytes| bytes.0.as_slice());
        let Some(Ok(answer)) = answer.map(ContainerAllocateResponse::decode) else {
            continue;
        };
        let ids = grant.device_ids.iter().flat_map(BTreeMap::values).flatten();
        for device in ids.map(|id| device_of_plugin_id(id)) {
            let cdi_id = driver.cdi_device_id(device);
            if !answer.envs.contains_key(&environment_name(device))
                && !answer.cdi_devices.iter().any(|given| given.name == cdi_id)
            {
                continue;
            }
            let annotation = answer.annotations.get(&driver.numbers_annotation(device));
            let devices = granted.entry(grant.resource_name.clone()).or_default();
            add_numbers(
                devices.entry(device.to_owned()).or_default(),
                &annotation.map(|text| numbers(text)).unwrap_or_default(),
            );
        }
    }
    granted
}

/// The value of the annotation that carries device numbers.
pub fn numbers_value(numbers: &[DeviceNumber]) -> String {
    let numbers: Vec<String> = numbers.iter().map(ToString::to_string).collect();
    numbers.join(",")
}

fn numbers(text: &str) -> Vec<DeviceNumber> {
    text.split(',').filter_map(|number| number.parse().ok()).collect()
}

/// The devices of these extended resources that are recorded for pods that may still have running containers.
pub fn recorded(
    grants: &[PodDevicesEntry],
    resources: &BTreeSet<String>,
    may_run: impl Fn(&str) -> bool,
) -> BTreeSet<String> {
    let ours = grants
        .iter()
        .filter(|grant| resources.contains(&grant.resource_name) && may_run(&grant.pod_uid));
    ours.flat_map(|grant| &grant.device_ids)
        .flat_map(BTreeMap::values)
        .flatten()
        .map(|id| device_of_plugin_id(id).to_owned())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::proto::device_plugin_v1beta1::{CdiDevice, DeviceSpec};

    /// As kubelet 1.30 writes it, shortened.
    const WRITTEN: &str = r#"{"Data":{"PodDeviceEntries":[
        {"PodUID":"u-1","ContainerName":"main","ResourceName":"x.dev/a","DeviceIDs":{"-1":["a0","a1.3"],"1":["a2"]},"AllocResp":"Eg=="},
        {"PodUID":"u-2","ContainerName":"main","ResourceName":"x.dev/a","DeviceIDs":{"-1":["a9"]},"AllocResp":""},
        {"PodUID":"u-1","ContainerName":"main","ResourceName":"x.dev/other","DeviceIDs":null,"AllocResp":null}],
        "RegisteredDevices":{"x.dev/a":["a0"]}},"Checksum":1764214563}"#;

    #[test]
    fn records_of_ended_pods_do_not_count() {
        let grants = parse(WRITTEN.as_bytes()).unwrap();
        let resources = BTreeSet::from(["x.dev/a".to_owned()]);
        let held = recorded(&grants, &resources, |uid| uid == "u-1");
        assert!(held.iter().eq(["a0", "a1", "a2"]), "{held:?}");
    }

    #[test]
    fn a_grant_is_ours_by_its_answer_and_not_by_its_name() {
        let answer = |variable: Option<&str>, cdi: Option<&str>| {
            let answer = ContainerAllocateResponse {
                envs: variable
                    .map(|name| (name.to_owned(), "/dev/x".to_owned()))
                    .into_iter()
                    .collect(),
                cdi_devices: cdi
                    .map(|name| CdiDevice { name: name.into() })
                    .into_iter()
                    .collect(),
                ..ContainerAllocateResponse::default()
            };
            serde_json::to_value(ByteString(answer.encode_to_vec())).unwrap()
        };
        let grant = |resource: &str, id: &str, answer: serde_json::Value| {
            serde_json::json!({"PodUID": "u-1", "ContainerName": "main", "ResourceName": resource,
                "DeviceIDs": {"-1": [id]}, "AllocResp": answer})
        };
        let text = serde_json::json!({"Data": {"PodDeviceEntries": [
            grant("x.dev/a", "cam-0", answer(Some("DRAYMAN_DEVICE_CAM_0"), None)),
            grant("x.dev/a", "cam-1.7", answer(None, Some("drayman.dev/device=cam-1"))),
            grant("x.dev/b", "cam-0", answer(Some("OTHER"), None)),
            grant("x.dev/c", "cam-1", answer(None, Some("other.dev/device=cam-1"))),
            grant("x.dev/d", "cam-1", serde_json::json!("/w==")),
            grant("x.dev/e", "cam-1", serde_json::Value::Null),
        ]}});
        let grants = parse(text.to_string().as_bytes()).unwrap();
        let ours = granted_by(&DriverName::parse("drayman.dev").unwrap(), &grants, |_| true);
        let devices: Vec<(&str, Vec<&str>)> = ours
            .iter()
            .map(|(resource, devices)| (resource.as_str(), devices.keys().map(String::as_str).collect()))
            .collect();
        assert_eq!(devices, [("x.dev/a", vec!["cam-0", "cam-1"])]);
    }

    #[test]
    fn a_grant_has_device_numbers() {
        let paths = |name: &str, path: &str| (name.to_owned(), path.to_owned());
        let answer = ContainerAllocateResponse {
            envs: [
                paths("DRAYMAN_DEVICE_CAM", "/dev/cam"),
                paths("DRAYMAN_DEVICE_MIC", "/dev/mic"),
            ]
            .into(),
            annotations: [("drayman.dev/cam".to_owned(), "c81:0,c81:1".to_owned())].into(),
            devices: vec![DeviceSpec {
                container_path: "/dev/mic".into(),
                host_path: "/dev/mic".into(),
                permissions: "rw".into(),
            }],
            ..ContainerAllocateResponse::default()
        };
        let text = serde_json::json!({"Data": {"PodDeviceEntries": [
            {"PodUID": "u-1", "ContainerName": "main", "ResourceName": "x.dev/a",
                "DeviceIDs": {"-1": ["cam", "mic"]}, "AllocResp": ByteString(answer.encode_to_vec())},
        ]}});
        let grants = parse(text.to_string().as_bytes()).unwrap();
        let driver = DriverName::parse("drayman.dev").unwrap();
        let devices = &granted_by(&driver, &grants, |_| true)["x.dev/a"];
        assert_eq!(numbers_value(&devices["cam"]), "c81:0,c81:1");
        assert_eq!(devices["mic"], [], "a driver need not report numbers");
        assert!(granted_by(&driver, &grants, |uid| uid != "u-1").is_empty());
    }

    #[test]
    fn a_device_manager_file_without_grants_is_empty() {
        for text in [
            r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":1}"#,
            r#"{"Data":{}}"#,
        ] {
            assert_eq!(parse(text.as_bytes()), Ok(Vec::new()));
        }
        for text in ["", "{", "[]", r#"{"Data":{"PodDeviceEntries":{}}}"#] {
            assert!(parse(text.as_bytes()).is_err(), "{text}");
        }
    }

    #[test]
    fn an_error_shortens_quoted_text() {
        let text = format!(r#"{{"Data":"{}"}}"#, "x".repeat(100_000));
        let error = parse(text.as_bytes()).unwrap_err().to_string();
        assert!(error.len() < 400, "{} bytes", error.len());
    }
}
