//! The resource handle: the controller writes it into a claim's allocation, and the companion reads it in Prepare.
//!
//! The API server stores it as an opaque string of at most 16 KiB. It names the allocated devices: if one is missing when the pod starts,
//! Prepare fails; no other device replaces it.

use serde::{Deserialize, Serialize};

use crate::api::resource::RESOURCE_HANDLE_MAX;

/// The handle version of this release. Companions reject newer versions.
pub const VERSION: u32 = 1;

/// The devices allocated to a claim, and their node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceHandle {
    /// The handle's version, [`VERSION`]; incremented when the meaning of a field changes, not when a field is added.
    pub version: u32,
    /// The uid of the claim that holds the devices.
    pub claim_uid: String,
    /// The node of the devices.
    pub node_name: String,
    /// The uid of the Node object, which distinguishes the node from a later one with the same name.
    pub node_uid: String,
    /// The allocated devices.
    pub devices: Vec<HandleDevice>,
}

/// One allocated device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HandleDevice {
    /// The name of the claim's request that the device satisfies.
    pub request: String,
    /// The device's name in the node's inventory.
    pub device: String,
}

/// Why a string is not a valid handle.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandleError {
    /// It exceeds the size limit.
    #[error("the resource handle has {0} bytes; at most {RESOURCE_HANDLE_MAX} are allowed")]
    TooLong(usize),
    /// It is not JSON, or lacks a field of a handle.
    #[error("the resource handle cannot be read: {0}")]
    Malformed(String),
    /// A newer release wrote it.
    #[error(
        "the resource handle has version {0}, this release reads up to {VERSION}: upgrade drayman on this node"
    )]
    Newer(u32),
}

impl DeviceHandle {
    /// Parses a handle.
    pub fn parse(data: &str) -> Result<Self, HandleError> {
        /// The one field that all versions have.
        #[derive(Deserialize)]
        struct HandleVersion {
            version: u32,
        }

        if data.len() > RESOURCE_HANDLE_MAX {
            return Err(HandleError::TooLong(data.len()));
        }
        let malformed = |error: serde_json::Error| HandleError::Malformed(error.to_string());
        let HandleVersion { version } = serde_json::from_str(data).map_err(malformed)?;
        if version > VERSION {
            return Err(HandleError::Newer(version));
        }
        serde_json::from_str(data).map_err(malformed)
    }

    /// Returns the string for the claim's allocation.
    pub fn to_data(&self) -> Result<String, HandleError> {
        let data = serde_json::to_string(self).map_err(|error| HandleError::Malformed(error.to_string()))?;
        if data.len() > RESOURCE_HANDLE_MAX {
            Err(HandleError::TooLong(data.len()))
        } else {
            Ok(data)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handle() -> DeviceHandle {
        DeviceHandle {
            version: VERSION,
            claim_uid: "7d0a".into(),
            node_name: "node-a".into(),
            node_uid: "11".into(),
            devices: vec![HandleDevice {
                request: "device".into(),
                device: "kvm".into(),
            }],
        }
    }

    #[test]
    fn a_handle_reads_back_as_it_was_written() {
        let data = handle().to_data().unwrap();
        assert_eq!(DeviceHandle::parse(&data), Ok(handle()));
    }

    #[test]
    fn a_newer_handle_is_refused_by_its_version() {
        assert_eq!(
            DeviceHandle::parse(r#"{"version":2,"what":"ever"}"#),
            Err(HandleError::Newer(2))
        );
    }

    #[test]
    fn a_field_added_within_a_version_is_ignored() {
        let mut value = serde_json::to_value(handle()).unwrap();
        value["note"] = "added later".into();
        assert_eq!(DeviceHandle::parse(&value.to_string()), Ok(handle()));
    }

    #[test]
    fn hostile_handles_are_refused_by_name() {
        assert!(matches!(
            DeviceHandle::parse(&"x".repeat(20_000)),
            Err(HandleError::TooLong(20_000))
        ));
        for data in [
            "",
            "{}",
            "[]",
            "null",
            r#"{"version":-1}"#,
            r#"{"version":1}"#,
            "\u{0}",
        ] {
            assert!(
                matches!(DeviceHandle::parse(data), Err(HandleError::Malformed(_))),
                "{data:?}"
            );
        }
    }
}
