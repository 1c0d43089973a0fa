//! Device metadata (KEP-5304): attributes of a claim's devices for its containers, in one file for each request.
//!
//! Paths and format are those of `k8s.io/dynamic-resource-allocation/api/metadata`. The path in the container contains the names of the claim
//! and of its requests, which users choose: they are DNS names, below a directory that users cannot choose. The path on the node contains
//! neither.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::container_edits::Mount;
use crate::api::crd::{Device, DeviceAttributes};
use crate::core::discovery::attributes::metadata_attributes;
use crate::core::names::{ClaimDevice, DriverName, is_dns_label, is_dns_subdomain};

/// The versions of the format, the newest first. They do not differ.
const VERSIONS: [&str; 2] = [
    "metadata.resource.k8s.io/v1beta1",
    "metadata.resource.k8s.io/v1alpha1",
];
/// The directory in the container.
const DIRECTORY: &str = "/var/run/kubernetes.io/dra-device-attributes";

/// The metadata of an allocated device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceMetadata {
    /// The pool of the device.
    pool: String,
    /// The requests that the device serves, each as in the allocation: `request` or `request/subrequest`.
    requests: Vec<String>,
    /// The name of the claim in its pod, if the claim was made from a template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pod_claim_name: Option<String>,
    /// The attributes when the claim was prepared.
    attributes: DeviceAttributes,
}

impl DeviceMetadata {
    /// The metadata of a device without its attributes.
    pub fn new(pool: &str, request: &str, pod_claim_name: Option<&str>) -> Self {
        Self {
            pool: pool.to_owned(),
            requests: vec![request.to_owned()],
            // No pod can name another one.
            pod_claim_name: pod_claim_name
                .filter(|name| is_dns_label(name))
                .map(str::to_owned),
            attributes: DeviceAttributes::default(),
        }
    }

    /// Adds a request that the device serves.
    pub fn add_request(&mut self, request: &str) {
        if !self.requests.iter().any(|known| known == request) {
            self.requests.push(request.to_owned());
        }
    }

    /// Sets the present attributes of the device.
    pub fn describe(&mut self, device: &Device) {
        self.attributes = metadata_attributes(device);
    }

    /// Whether nothing is known, as after the checkpoint was lost.
    pub fn is_unknown(&self) -> bool {
        self.requests.is_empty()
    }
}

/// The metadata of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetadataFile {
    /// Name of the file in the claim's directory.
    pub name: String,
    /// Content of the file.
    pub content: String,
    /// The CDI device with which a container gets the file.
    pub(super) cdi_device: String,
    /// Path in the container.
    container_path: String,
}

impl MetadataFile {
    /// Mounts the file from this directory of the node.
    pub(super) fn mount(&self, directory: &Path) -> Mount {
        Mount {
            host_path: directory.join(&self.name).display().to_string(),
            container_path: self.container_path.clone(),
            read_only: true,
        }
    }
}

/// The base name of a request, which containers name; `None` if the API server would reject the request.
pub fn base_request(request: &str) -> Option<&str> {
    let (base, subrequest) = match request.split_once('/') {
        Some((base, subrequest)) => (base, Some(subrequest)),
        None => (request, None),
    };
    (is_dns_label(base) && subrequest.is_none_or(is_dns_label)).then_some(base)
}

/// A claim, as its metadata names it.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct ClaimMetadata<'a> {
    pub(super) name: &'a str,
    pub(super) namespace: &'a str,
    pub(super) uid: &'a str,
    pub(super) generation: u32,
}

/// The metadata files of a claim, one for each request. None if its requests or its name are unknown.
pub(super) fn metadata_files<'a>(
    driver: &DriverName,
    claim: ClaimMetadata<'_>,
    devices: impl IntoIterator<Item = (ClaimDevice, &'a DeviceMetadata)>,
) -> Vec<MetadataFile> {
    let mut requests: BTreeMap<&str, Vec<(&str, ClaimDevice, &DeviceMetadata)>> = BTreeMap::new();
    for (device, metadata) in devices {
        for request in &metadata.requests {
            if let Some(base) = base_request(request) {
                let devices = requests.entry(base).or_default();
                devices.push((request, device.clone(), metadata));
            }
        }
    }
    if !is_dns_subdomain(claim.name, 253) {
        return Vec::new();
    }
    let files = requests
        .into_iter()
        .enumerate()
        .filter_map(|(number, (base, devices))| {
            let (request, first, metadata) = devices.first()?;
            let directory = match &metadata.pod_claim_name {
                Some(name) => format!("resourceclaimtemplates/{name}"),
                None => format!("resourceclaims/{}", claim.name),
            };
            let described = devices.iter().map(|(_, device, metadata)| DescribedDevice {
                driver: driver.as_str(),
                pool: &metadata.pool,
                name: &device.device,
                attributes: &metadata.attributes,
            });
            let object = MetadataObject {
                api_version: "",
                kind: "DeviceMetadata",
                metadata: claim,
                pod_claim_name: metadata.pod_claim_name.as_deref(),
                requests: [DescribedRequest {
                    name: request,
                    devices: described.collect(),
                }],
            };
            Some(MetadataFile {
                name: format!("{number}.json"),
                content: content(object)?,
                cdi_device: first.to_string(),
                container_path: format!("{DIRECTORY}/{directory}/{base}/{driver}-metadata.json"),
            })
        });
    files.collect()
}

/// The same object in each version, one per line.
fn content(mut object: MetadataObject<'_>) -> Option<String> {
    let mut content = String::new();
    for api_version in VERSIONS {
        object.api_version = api_version;
        content.push_str(&serde_json::to_string(&object).ok()?);
        content.push('\n');
    }
    Some(content)
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct MetadataObject<'a> {
    /// One of [`VERSIONS`]; set by [`content`].
    api_version: &'a str,
    kind: &'a str,
    metadata: ClaimMetadata<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pod_claim_name: Option<&'a str>,
    requests: [DescribedRequest<'a>; 1],
}

#[derive(Serialize)]
struct DescribedRequest<'a> {
    name: &'a str,
    devices: Vec<DescribedDevice<'a>>,
}

#[derive(Serialize)]
struct DescribedDevice<'a> {
    driver: &'a str,
    pool: &'a str,
    name: &'a str,
    attributes: &'a DeviceAttributes,
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::container_edits::ContainerEdits;
    use super::super::prepared_claims::{Entry, HeldDevice, Progress, Structured};
    use super::*;
    use crate::api::crd::AttributeValue;
    use crate::core::names::ClaimUid;

    const UID: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a10";

    fn held(name: &str, requests: &[&str], pod_claim_name: Option<&str>) -> HeldDevice {
        let mut metadata = DeviceMetadata::new("node-a", requests[0], pod_claim_name);
        for request in requests {
            metadata.add_request(request);
        }
        let link = AttributeValue::string("/dev/serial/by-id/".to_owned() + &"x".repeat(80));
        metadata.describe(&Device {
            kind: "serial".into(),
            attributes: [
                ("drayman.dev/link".to_owned(), link),
                (
                    "resource.kubernetes.io/pciBusID".to_owned(),
                    AttributeValue::string("0000:65:00.0"),
                ),
            ]
            .into_iter()
            .collect(),
            ..Device::default()
        });
        HeldDevice {
            structured: Some(Structured {
                metadata,
                ..Structured::default()
            }),
            ..HeldDevice::named(name)
        }
    }

    fn files(name: &str, devices: Vec<HeldDevice>) -> Vec<MetadataFile> {
        let entry = Entry {
            namespace: "default".into(),
            name: name.into(),
            boot_id: "boot".into(),
            devices,
            progress: Progress::Done {
                container_edits: ContainerEdits::default(),
            },
        };
        let driver = DriverName::parse("drayman.dev").unwrap();
        entry.metadata_files(&driver, &ClaimUid::parse(UID).unwrap())
    }

    #[test]
    fn a_file_describes_the_devices_of_its_request() {
        let devices = vec![
            held("a", &["left"], None),
            held("b", &["right/wide"], None),
            held("c", &["right/wide", "left"], None),
        ];
        let files = files("camera", devices);
        let places: Vec<_> = files
            .iter()
            .map(|file| {
                let mount = file.mount(Path::new("/x"));
                assert!(mount.read_only);
                (file.name.as_str(), mount.container_path, file.cdi_device.clone())
            })
            .collect();
        let path =
            |request: &str| format!("{DIRECTORY}/resourceclaims/camera/{request}/drayman.dev-metadata.json");
        assert_eq!(
            places,
            [
                ("0.json", path("left"), format!("{UID}-a")),
                ("1.json", path("right"), format!("{UID}-b")),
            ]
        );
        let objects: Vec<Value> = files[1]
            .content
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        let attributes = json!({
            "drayman.dev/kind": { "string": "serial" },
            "drayman.dev/link": { "string": format!("/dev/serial/by-id/{}", "x".repeat(80)) },
            // KubeVirt reads this one.
            "resource.kubernetes.io/pciBusID": { "string": "0000:65:00.0" },
        });
        let device = |name: &str| json!({ "driver": "drayman.dev", "pool": "node-a", "name": name, "attributes": attributes });
        let expected = |version: &str| {
            json!({
                "kind": "DeviceMetadata", "apiVersion": format!("metadata.resource.k8s.io/{version}"),
                "metadata": { "name": "camera", "namespace": "default", "uid": UID, "generation": 1 },
                "requests": [{ "name": "right/wide", "devices": [device("b"), device("c")] }],
            })
        };
        assert_eq!(objects, [expected("v1beta1"), expected("v1alpha1")]);
    }

    #[test]
    fn a_claim_of_a_template_is_named_as_in_its_pod() {
        let path = |pod_claim_name| {
            let files = files("pod-usb-x7x2p", vec![held("a", &["r"], Some(pod_claim_name))]);
            let named = files[0].content.contains(r#""podClaimName":"usb""#);
            (files[0].container_path.clone(), named)
        };
        let of_template = format!("{DIRECTORY}/resourceclaimtemplates/usb/r/drayman.dev-metadata.json");
        assert_eq!(path("usb"), (of_template, true));
        let of_claim = format!("{DIRECTORY}/resourceclaims/pod-usb-x7x2p/r/drayman.dev-metadata.json");
        for invalid in ["../../../etc", "", "a.b", "A"] {
            assert_eq!(path(invalid), (of_claim.clone(), false), "{invalid}");
        }
    }

    #[test]
    fn only_dns_names_become_paths() {
        for request in ["..", "../x", "a/../b", "", "/", "a/b/c"] {
            assert_eq!(base_request(request), None, "{request}");
            assert_eq!(files("camera", vec![held("a", &[request], None)]), []);
        }
        for name in ["", "..", "a/b", "a..b"] {
            assert_eq!(files(name, vec![held("a", &["r"], None)]), [], "{name}");
        }
    }
}
