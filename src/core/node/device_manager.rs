//! What kubelet's device manager has recorded: `kubelet_internal_checkpoint` in the directory of device plugins.
//!
//! It is replaced at each grant, keeps pods that have ended until the next one, and has what the PodResources API leaves out: init
//! containers, and pods that were deleted by force. Upstream: `PodDevicesEntry` in `pkg/kubelet/cm/devicemanager/checkpoint`, the
//! same from 1.20 to 1.36.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use super::kubelet_state::shortened;
use super::naming::device_of_plugin_id;

/// The name of the file in the directory of device plugins.
pub const FILE: &str = "kubelet_internal_checkpoint";

/// The devices of one extended resource that a container of a pod was granted.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Grant {
    /// Uid of the pod.
    #[serde(rename = "PodUID")]
    pub pod_uid: String,
    /// Name of the extended resource.
    pub resource_name: String,
    /// Ids of the device plugin API by NUMA node, -1 for devices that have none.
    #[serde(rename = "DeviceIDs", default)]
    pub device_ids: Option<BTreeMap<String, Vec<String>>>,
}

/// Why a text is not a record of the device manager.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("kubelet's {FILE} is not as kubelet 1.20 to 1.36 writes it: {0}")]
pub struct DeviceManagerError(String);

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Document {
    data: Data,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Data {
    #[serde(default)]
    pod_device_entries: Option<Vec<Grant>>,
}

/// Reads kubelet's record.
pub fn parse(text: &[u8]) -> Result<Vec<Grant>, DeviceManagerError> {
    let document: Document =
        serde_json::from_slice(text).map_err(|error| DeviceManagerError(shortened(&error)))?;
    Ok(document.data.pod_device_entries.unwrap_or_default())
}

/// The devices of these extended resources that are recorded for pods of which something may still run.
pub fn recorded(
    grants: &[Grant],
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

    /// As kubelet 1.30 writes it, shortened.
    const WRITTEN: &str = r#"{"Data":{"PodDeviceEntries":[
        {"PodUID":"u-1","ContainerName":"main","ResourceName":"x.dev/a","DeviceIDs":{"-1":["a0","a1.3"],"1":["a2"]},"AllocResp":"Eg=="},
        {"PodUID":"u-2","ContainerName":"main","ResourceName":"x.dev/a","DeviceIDs":{"-1":["a9"]},"AllocResp":""},
        {"PodUID":"u-1","ContainerName":"main","ResourceName":"x.dev/other","DeviceIDs":null,"AllocResp":null}],
        "RegisteredDevices":{"x.dev/a":["a0"]}},"Checksum":1764214563}"#;

    #[test]
    fn what_is_recorded_for_a_pod_that_has_ended_does_not_count() {
        let grants = parse(WRITTEN.as_bytes()).unwrap();
        let resources = BTreeSet::from(["x.dev/a".to_owned()]);
        let held = recorded(&grants, &resources, |uid| uid == "u-1");
        assert!(held.iter().eq(["a0", "a1", "a2"]), "{held:?}");
    }

    #[test]
    fn a_record_without_grants_is_empty_and_what_is_no_record_is_an_error() {
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
    fn an_error_is_short_however_long_the_text_is_that_it_cites() {
        let text = format!(r#"{{"Data":"{}"}}"#, "x".repeat(100_000));
        let error = parse(text.as_bytes()).unwrap_err().to_string();
        assert!(error.len() < 400, "{} bytes", error.len());
    }
}
