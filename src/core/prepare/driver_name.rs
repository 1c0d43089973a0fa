//! Validation of the driver name, which becomes a directory, a CDI vendor and an object name.

use std::fmt;

use super::claim_uid::ClaimUid;
use super::name::{NameError, check_driver};

/// The name of a driver: a lower-case DNS subdomain of at most 63 characters that begins with a letter.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DriverName(String);

/// Why a text is not a valid driver name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DriverNameError {
    /// Kubernetes rejects it.
    #[error(transparent)]
    Kubernetes(#[from] NameError),
    /// The container runtime rejects it as a CDI vendor.
    #[error("{0:?} cannot be the name of a driver: CDI asks for a letter at the beginning")]
    Vendor(String),
}

impl DriverName {
    /// Parses and validates a name.
    pub fn parse(text: &str) -> Result<Self, DriverNameError> {
        check_driver(text)?;
        if text.starts_with(|first: char| first.is_ascii_lowercase()) {
            Ok(Self(text.to_owned()))
        } else {
            Err(DriverNameError::Vendor(text.to_owned()))
        }
    }

    /// The name as a string slice.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The CDI kind of the devices that claims get.
    pub fn cdi_kind(&self) -> String {
        format!("{}/claim", self.0)
    }

    /// The CDI id of a claim's device. It contains the claim's uid, so it is never reused.
    pub fn cdi_id(&self, uid: &ClaimUid) -> String {
        format!("{}/claim={uid}", self.0)
    }

    /// Extracts the claim from a CDI id: the inverse of [`Self::cdi_id`]. Returns `None` for a foreign id.
    pub fn claim_of_cdi_id(&self, id: &str) -> Option<ClaimUid> {
        let (kind, uid) = id.split_once('=')?;
        (kind == self.cdi_kind())
            .then(|| ClaimUid::parse(uid).ok())
            .flatten()
    }

    /// The name of a claim's CDI file.
    pub fn cdi_file(&self, uid: &ClaimUid) -> String {
        format!("{}{uid}.json", self.cdi_file_prefix())
    }

    /// The prefix of all claim CDI files. It contains an underscore, which a driver name cannot, so it never matches another driver's
    /// files.
    pub fn cdi_file_prefix(&self) -> String {
        format!("{}-claim_", self.0)
    }

    /// The CDI kind of devices that the device plugin API passes by CDI name.
    pub fn cdi_device_kind(&self) -> String {
        format!("{}/device", self.0)
    }

    /// The CDI id of such a device.
    pub fn cdi_device_id(&self, device: &str) -> String {
        format!("{}/device={device}", self.0)
    }

    /// The annotation of an Allocate response that carries the device numbers of a device, whose name is a DNS label. Kubelet keeps the
    /// response as long as the pod exists.
    pub fn numbers_annotation(&self, device: &str) -> String {
        format!("{}/{device}", self.0)
    }

    /// The name of the CDI file of such a device, whose name is a DNS label.
    pub fn cdi_device_file(&self, device: &str) -> String {
        format!("{}{device}.json", self.cdi_device_file_prefix())
    }

    /// The prefix of all device CDI files.
    pub fn cdi_device_file_prefix(&self) -> String {
        format!("{}-device_", self.0)
    }
}

impl fmt::Display for DriverName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_safe_in_paths_and_cdi_is_taken() {
        let driver = DriverName::parse("drayman.dev").unwrap();
        let uid = ClaimUid::parse("7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a10").unwrap();
        assert_eq!(
            driver.cdi_id(&uid),
            "drayman.dev/claim=7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a10"
        );
        assert_eq!(
            driver.cdi_file(&uid),
            "drayman.dev-claim_7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a10.json"
        );
    }

    #[test]
    fn names_that_are_not_are_refused() {
        for name in [
            "",
            "..",
            "../x",
            "a/b",
            "Drayman.dev",
            "a_b",
            "1x.dev",
            "a..b",
            "a.",
            &"a".repeat(64),
            "a\0",
        ] {
            assert!(DriverName::parse(name).is_err(), "{name:?}");
        }
    }
}
