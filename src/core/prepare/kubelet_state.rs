//! Kubelet's checkpoint of claims: `dra_manager_state` in its root directory.
//!
//! Kubelet replaces it by rename after each Prepare and Unprepare (`pkg/kubelet/cm/dra/state`), in one format up to 1.30 and in another since
//! 1.31. It lists the claims that kubelet considers prepared, and since 1.31 also those that it is going to prepare. From 1.28 on it contains
//! the devices of a claim, in resource handles or by name. Any other format is an error here: an unreadable list must never count as an
//! empty one.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::prepared_claims::{HeldDevice, Structured};
use crate::api::handle::DeviceHandle;
use crate::core::names::{ClaimDevice, ClaimUid, ClaimUidError, DriverName};

/// File name below kubelet's root directory.
pub const FILE: &str = "dra_manager_state";
/// The version of the file up to 1.30.
const VERSION: &str = "v1";
/// The version of the file's data since 1.31.
const API_VERSION: &str = "checkpoint.dra.kubelet.k8s.io/v1";
/// Maximum length of a quoted parser error, in characters: a parser may cite the whole input.
const SHOWN_MAX: usize = 200;

/// The claims that kubelet lists, of all drivers.
pub type KubeletClaims = BTreeMap<ClaimUid, KubeletClaim>;

/// A claim as kubelet lists it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KubeletClaim {
    /// Namespace of the claim.
    pub namespace: String,
    /// Name of the claim.
    pub name: String,
    /// Whether kubelet calls this driver for it.
    pub ours: bool,
    /// Whether this driver has prepared it, as far as kubelet knows. If not, no container has it.
    pub prepared: bool,
    /// The devices of this driver; `None` if kubelet has none (1.27 stores none, and later releases none before the claim is prepared) or the
    /// resource handle is unreadable.
    pub devices: Option<Vec<HeldDevice>>,
}

impl KubeletClaim {
    /// Adds a device of structured mode, unless it is known.
    pub(super) fn add(&mut self, device: Option<ClaimDevice>) {
        let Some(device) = device else {
            return;
        };
        let devices = self.devices.get_or_insert_default();
        if devices.iter().all(|known| known.device != device.device) {
            devices.push(HeldDevice {
                device: device.device,
                structured: Some(Structured {
                    admin_access: device.admin_access,
                    ..Structured::default()
                }),
                ..HeldDevice::default()
            });
        }
    }
}

/// The available knowledge of kubelet's list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KubeletView {
    /// The parsed list.
    Lists(KubeletClaims),
    /// The list cannot be read, for this reason.
    Unknown(String),
}

impl KubeletView {
    /// Whether kubelet lists a claim; `None` if unknown.
    pub fn lists(&self, uid: &ClaimUid) -> Option<bool> {
        match self {
            Self::Lists(claims) => Some(claims.contains_key(uid)),
            Self::Unknown(_) => None,
        }
    }

    /// Looks up a claim in the list.
    pub fn claim(&self, uid: &ClaimUid) -> Option<&KubeletClaim> {
        match self {
            Self::Lists(claims) => claims.get(uid),
            Self::Unknown(_) => None,
        }
    }
}

/// Why the file is not a supported list.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KubeletStateError {
    /// The format is not that of a known release.
    #[error("kubelet's {FILE} does not have the format of kubelet 1.27 to 1.37: {0}")]
    Shape(String),
    /// The version is not supported.
    #[error("kubelet's {FILE} has version {0:?}; {VERSION:?} and {API_VERSION:?} are supported")]
    Version(String),
    /// A listed claim has an invalid uid.
    #[error("kubelet's {FILE} lists a claim without a valid uid: {0}")]
    ClaimUid(#[from] ClaimUidError),
}

/// The file of either format. Each has a checksum, which is not verified: kubelet itself does not start with a wrong one.
#[derive(Deserialize)]
#[serde(untagged)]
enum File {
    /// Since 1.31.
    Data(DataFile),
    /// Up to 1.30.
    Entries(EntriesFile),
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DataFile {
    /// [`ClaimsData`], as JSON.
    data: String,
    #[serde(rename = "Checksum")]
    _checksum: u32,
}

#[derive(Deserialize)]
struct ClaimsData {
    #[serde(rename = "apiVersion")]
    api_version: String,
    #[serde(rename = "ClaimInfoStateList")]
    claims: Option<Vec<DataEntry>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DataEntry {
    #[serde(rename = "ClaimUID")]
    claim_uid: String,
    claim_name: String,
    namespace: String,
    /// The devices of each driver with results in the claim.
    driver_state: Option<BTreeMap<String, DriverState>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DriverState {
    /// `null` before the driver has prepared the claim.
    devices: Option<Vec<DataDevice>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DataDevice {
    #[serde(rename = "CDIDeviceIDs")]
    cdi_device_ids: Option<Vec<String>>,
}

#[derive(Deserialize)]
struct EntriesFile {
    version: String,
    #[serde(default)]
    entries: Vec<FileEntry>,
    #[serde(rename = "checksum")]
    _checksum: u64,
}

/// Go serializes a struct without tags under its field names.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct FileEntry {
    #[serde(default)]
    driver_name: String,
    #[serde(rename = "ClaimUID")]
    claim_uid: String,
    claim_name: String,
    namespace: String,
    #[serde(default)]
    resource_handles: Option<Vec<Handle>>,
    #[serde(default, rename = "CDIDevices")]
    cdi_devices: Option<BTreeMap<String, Option<Vec<String>>>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Handle {
    #[serde(default)]
    driver_name: String,
    #[serde(default)]
    data: String,
}

/// Truncates a parser error about one of kubelet's files.
pub(super) fn shortened(error: &serde_json::Error) -> String {
    error.to_string().chars().take(SHOWN_MAX).collect()
}

/// Parses kubelet's list.
pub fn parse(text: &[u8], driver: &DriverName) -> Result<KubeletClaims, KubeletStateError> {
    match serde_json::from_slice(text).map_err(|error| KubeletStateError::Shape(shortened(&error)))? {
        File::Data(file) => parse_data(&file.data, driver),
        File::Entries(file) => parse_entries(file, driver),
    }
}

/// Parses the data that kubelet writes since 1.31.
fn parse_data(text: &str, driver: &DriverName) -> Result<KubeletClaims, KubeletStateError> {
    let data: ClaimsData =
        serde_json::from_str(text).map_err(|error| KubeletStateError::Shape(shortened(&error)))?;
    if data.api_version != API_VERSION {
        return Err(KubeletStateError::Version(
            data.api_version.chars().take(SHOWN_MAX).collect(),
        ));
    }
    let mut claims = BTreeMap::new();
    for entry in data.claims.unwrap_or_default() {
        let mut drivers = entry.driver_state.unwrap_or_default();
        let ours = drivers.remove(driver.as_str());
        let mut claim = KubeletClaim {
            namespace: entry.namespace,
            name: entry.claim_name,
            ours: ours.is_some(),
            prepared: false,
            devices: None,
        };
        let devices = ours.and_then(|state| state.devices);
        claim.prepared = devices.is_some();
        let devices = devices.unwrap_or_default();
        for id in devices
            .iter()
            .filter_map(|device| device.cdi_device_ids.as_ref())
            .flatten()
        {
            claim.add(driver.claim_device_of_cdi_id(id));
        }
        claims.insert(ClaimUid::parse(&entry.claim_uid)?, claim);
    }
    Ok(claims)
}

/// Parses the entries that kubelet writes up to 1.30.
fn parse_entries(file: EntriesFile, driver: &DriverName) -> Result<KubeletClaims, KubeletStateError> {
    if file.version != VERSION {
        return Err(KubeletStateError::Version(
            file.version.chars().take(16).collect(),
        ));
    }
    let mut claims = BTreeMap::new();
    for entry in file.entries {
        let uid = ClaimUid::parse(&entry.claim_uid)?;
        let handles = entry.resource_handles.unwrap_or_default();
        // Like kubelet: a handle without a driver name belongs to the claim's driver.
        let of = |handle: &&Handle| {
            let name = if handle.driver_name.is_empty() {
                &entry.driver_name
            } else {
                &handle.driver_name
            };
            name == driver.as_str()
        };
        let handle = handles.iter().find(of);
        let has_ids = entry
            .cdi_devices
            .iter()
            .any(|ids| ids.contains_key(driver.as_str()));
        let devices = handle
            .and_then(|handle| DeviceHandle::parse(&handle.data).ok())
            .filter(|handle| handle.claim_uid == uid.as_str())
            .map(|handle| {
                let devices = handle.devices.into_iter();
                devices.map(|device| HeldDevice::named(device.device)).collect()
            });
        claims.insert(
            uid,
            KubeletClaim {
                namespace: entry.namespace,
                name: entry.claim_name,
                ours: has_ids || handle.is_some(),
                prepared: true,
                devices,
            },
        );
    }
    Ok(claims)
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a10";

    fn driver() -> DriverName {
        DriverName::parse("drayman.dev").unwrap()
    }

    /// As kubelet 1.30.14 wrote it, with other names.
    fn written(handles: &str) -> String {
        format!(
            r#"{{"version":"v1","entries":[{{"DriverName":"drayman.dev","ClassName":"test","ClaimUID":"{UID}","ClaimName":"pod-device-x","Namespace":"default","PodUIDs":{{"5b6e":{{}}}}{handles},"CDIDevices":{{"drayman.dev":["drayman.dev/claim={UID}"]}}}}],"checksum":3735928559}}"#
        )
    }

    fn handle() -> String {
        format!(
            r#"{{\"version\":1,\"claimUid\":\"{UID}\",\"nodeName\":\"node-a\",\"nodeUid\":\"n-1\",\"devices\":[{{\"request\":\"device\",\"device\":\"kvm\"}}]}}"#
        )
    }

    #[test]
    fn a_listed_claim_has_its_names_and_the_devices_of_its_handle() {
        let text = written(&format!(
            r#","ResourceHandles":[{{"driverName":"drayman.dev","data":"{}"}}]"#,
            handle()
        ));
        let claims = parse(text.as_bytes(), &driver()).unwrap();
        let claim = &claims[&ClaimUid::parse(UID).unwrap()];
        assert_eq!(
            (claim.namespace.as_str(), claim.name.as_str()),
            ("default", "pod-device-x")
        );
        assert!(claim.ours);
        assert_eq!(claim.devices.as_deref(), Some(&[HeldDevice::named("kvm")][..]));
    }

    #[test]
    fn claims_of_kubelet_1_27_are_listed_without_handles() {
        for handles in ["", r#","ResourceHandles":null"#, r#","ResourceHandles":[{}]"#] {
            let claims = parse(written(handles).as_bytes(), &driver()).unwrap();
            let claim = &claims[&ClaimUid::parse(UID).unwrap()];
            assert!(claim.ours && claim.devices.is_none(), "{handles}");
        }
    }

    #[test]
    fn claims_of_other_drivers_are_listed_but_not_ours() {
        let text = written("").replace("drayman.dev", "other.dev");
        let claims = parse(text.as_bytes(), &driver()).unwrap();
        assert!(!claims[&ClaimUid::parse(UID).unwrap()].ours);
    }

    /// As kubelet 1.37.2 writes it, with other names.
    fn data(drivers: &str) -> String {
        let data = format!(
            r#"{{"kind":"DRACheckpoint","apiVersion":"checkpoint.dra.kubelet.k8s.io/v1","ClaimInfoStateList":[{{"ClaimUID":"{UID}","ClaimName":"pod-device-x","Namespace":"default","PodUIDs":{{"5b6e":{{}}}},"DriverState":{drivers}}}]}}"#
        );
        serde_json::json!({"Data": data, "Checksum": 7}).to_string()
    }

    #[test]
    fn a_claim_of_structured_mode_has_its_devices() {
        let device = format!(
            r#"{{"PoolName":"node-a","DeviceName":"kvm","ShareID":null,"RequestNames":["device"],"CDIDeviceIDs":["drayman.dev/claim=admin-{UID}-kvm"]}}"#
        );
        for (drivers, ours, devices) in [
            (
                format!(r#"{{"drayman.dev":{{"Devices":[{device},{device}]}}}}"#),
                true,
                Some(("kvm".to_owned(), true)),
            ),
            (r#"{"drayman.dev":{"Devices":null}}"#.to_owned(), true, None),
            (
                format!(r#"{{"gpu.example.com":{{"Devices":[{device}]}}}}"#),
                false,
                None,
            ),
            ("null".to_owned(), false, None),
        ] {
            let claims = parse(data(&drivers).as_bytes(), &driver()).unwrap();
            let claim = &claims[&ClaimUid::parse(UID).unwrap()];
            assert_eq!(claim.prepared, devices.is_some());
            let named = claim.devices.as_ref().map(|devices| {
                assert_eq!(devices.len(), 1);
                (devices[0].device.clone(), devices[0].has_admin_access())
            });
            assert_eq!((claim.ours, named), (ours, devices), "{drivers}");
            assert_eq!(claim.name, "pod-device-x");
        }
    }

    #[test]
    fn an_empty_list_is_a_list() {
        let empty = r#"{"Data":"{\"kind\":\"DRACheckpoint\",\"apiVersion\":\"checkpoint.dra.kubelet.k8s.io/v1\",\"ClaimInfoStateList\":null}","Checksum":1}"#;
        assert_eq!(parse(empty.as_bytes(), &driver()), Ok(KubeletClaims::new()));
        assert_eq!(
            parse(br#"{"version":"v1","checksum":1}"#, &driver()),
            Ok(KubeletClaims::new())
        );
    }

    #[test]
    fn an_unreadable_list_is_an_error() {
        for text in [
            "",
            "null",
            "{}",
            r#"{"Data":"{}","Checksum":1}"#,
            r#"{"version":"v2","checksum":1}"#,
            r#"{"version":"v1","entries":[{}],"checksum":1}"#,
            r#"{"version":"v1","entries":[{"ClaimUID":"../x","ClaimName":"a","Namespace":"b"}],"checksum":1}"#,
        ] {
            assert!(parse(text.as_bytes(), &driver()).is_err(), "{text}");
        }
    }
}
