//! Names that become part of files, CDI ids, device plugin ids and environment variables: claim uids, driver names, device names
//! ([`device_name`] derives them from the identities in `node::discovery::sources`) and extended resources. Each is validated early and
//! with a reason, by the rules of kubelet, the API server and CDI.

use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use uuid::Uuid;

/// The uid of a ResourceClaim: a UUID in the form that the API server writes, lower case with hyphens.
///
/// Other spellings are rejected, so that a claim has one name on this node and a uid cannot escape a directory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ClaimUid(String);

/// The text is not a valid claim uid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("claim uid {0:?} is not a UUID in the form of the API server (lower case, with hyphens)")]
pub struct ClaimUidError(String);

/// Maximum length, in characters, of a rejected text quoted in an error.
const SHOWN_MAX: usize = 64;

impl ClaimUid {
    /// Parses and validates a uid.
    pub fn parse(text: &str) -> Result<Self, ClaimUidError> {
        match Uuid::try_parse(text) {
            Ok(uuid) if uuid.hyphenated().to_string() == text => Ok(Self(text.to_owned())),
            _ => Err(ClaimUidError(text.chars().take(SHOWN_MAX).collect())),
        }
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ClaimUid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<String> for ClaimUid {
    type Error = ClaimUidError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        Self::parse(&text)
    }
}

impl From<ClaimUid> for String {
    fn from(uid: ClaimUid) -> Self {
        uid.0
    }
}

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
    #[error("{0:?} is not a valid driver name: CDI requires a leading letter")]
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

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The CDI kind of the devices that claims get. A classic claim is one CDI device, named after its uid. In structured mode, each device
    /// of a claim is one, see [`ClaimDevice`].
    pub fn cdi_kind(&self) -> String {
        format!("{}/claim", self.0)
    }

    /// The CDI id of a claim's device. It contains the claim's uid, so it is never reused.
    pub fn cdi_id(&self, uid: &ClaimUid) -> String {
        format!("{}/claim={uid}", self.0)
    }

    pub fn cdi_id_of_claim_device(&self, device: &ClaimDevice) -> String {
        format!("{}/claim={device}", self.0)
    }

    /// Extracts the claim from a CDI id: the inverse of [`Self::cdi_id`] and [`Self::cdi_id_of_claim_device`]. Returns `None` for a foreign
    /// id.
    pub fn claim_of_cdi_id(&self, id: &str) -> Option<ClaimUid> {
        let (kind, name) = id.split_once('=')?;
        if kind != self.cdi_kind() {
            return None;
        }
        match ClaimDevice::parse(name) {
            Some(device) => Some(device.uid),
            None => ClaimUid::parse(name).ok(),
        }
    }

    /// Extracts the device of a claim from a CDI id: the inverse of [`Self::cdi_id_of_claim_device`].
    pub fn claim_device_of_cdi_id(&self, id: &str) -> Option<ClaimDevice> {
        let (kind, name) = id.split_once('=')?;
        (kind == self.cdi_kind())
            .then(|| ClaimDevice::parse(name))
            .flatten()
    }

    pub fn cdi_file(&self, uid: &ClaimUid) -> String {
        format!("{}{uid}.json", self.cdi_file_prefix())
    }

    /// The prefix of all claim CDI files. It contains an underscore, which a driver name cannot, so it never matches another driver's
    /// files.
    pub fn cdi_file_prefix(&self) -> String {
        format!("{}-claim_", self.0)
    }

    /// The directory of the device metadata, beside the CDI files. Readers of CDI files ignore directories.
    pub fn metadata_directory(&self) -> String {
        format!("{}-metadata", self.0)
    }

    /// The CDI kind of devices that the device plugin API passes by CDI name.
    pub fn cdi_device_kind(&self) -> String {
        format!("{}/device", self.0)
    }

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

    pub fn cdi_device_file_prefix(&self) -> String {
        format!("{}-device_", self.0)
    }
}

/// One device of a claim in structured mode, as named in CDI: `<uid>-<device>`, or `admin-<uid>-<device>` with admin access. The name shows
/// with which claim a container got a device, even after the checkpoint was lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimDevice {
    pub uid: ClaimUid,
    /// The device, whose name is a DNS label.
    pub device: String,
    /// Whether the claim has admin access, and so does not hold the device.
    pub admin_access: bool,
}

impl ClaimDevice {
    /// Parses a CDI device name.
    pub fn parse(name: &str) -> Option<Self> {
        let (admin_access, name) = match name.strip_prefix(ADMIN_PREFIX) {
            Some(name) => (true, name),
            None => (false, name),
        };
        let (uid, device) = name.split_at_checked(UID_LENGTH)?;
        let device = device.strip_prefix('-').filter(|device| is_dns_label(device))?;
        Some(Self {
            uid: ClaimUid::parse(uid).ok()?,
            device: device.to_owned(),
            admin_access,
        })
    }
}

impl fmt::Display for ClaimDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let prefix = if self.admin_access { ADMIN_PREFIX } else { "" };
        write!(f, "{prefix}{}-{}", self.uid, self.device)
    }
}

impl fmt::Display for DriverName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Prefix of the CDI names of devices with admin access. No uid begins with it.
const ADMIN_PREFIX: &str = "admin-";
const UID_LENGTH: usize = 36;
/// Maximum length of a DNS label, of the name part of a qualified name, and of a driver name, in bytes.
const LABEL_MAX: usize = 63;
/// Length of the hash suffix of a name that lost characters.
const HASH_LENGTH: usize = 8;
/// The prefix of every environment variable that drayman sets.
pub const ENVIRONMENT_PREFIX: &str = "DRAYMAN_DEVICE_";

/// Whether a text is a DNS label (RFC 1123): 1 to 63 characters of `a-z`, `0-9` and `-`, with no `-` at either end.
pub fn is_dns_label(text: &str) -> bool {
    text.len() <= LABEL_MAX && is_label_of_any_length(text)
}

/// Whether a text is a DNS subdomain of at most `max` characters. Like `IsDNS1123Subdomain` of `k8s.io/apimachinery`, this limits only the
/// total length, not each label.
pub fn is_dns_subdomain(text: &str, max: usize) -> bool {
    text.len() <= max && text.split('.').all(is_label_of_any_length)
}

/// The longest prefix of whole characters within this number of bytes.
pub(crate) fn beginning(text: &str, bytes: usize) -> &str {
    let mut ends = (0..=bytes.min(text.len())).rev();
    let end = ends.find(|end| text.is_char_boundary(*end));
    text.get(..end.unwrap_or_default()).unwrap_or_default()
}

/// Truncates a text to this number of bytes, at a character boundary and with an ellipsis.
pub(crate) fn truncated(text: String, bytes: usize) -> String {
    const ELLIPSIS: &str = "…";
    if text.len() <= bytes {
        return text;
    }
    let end = bytes.saturating_sub(ELLIPSIS.len());
    format!("{}{ELLIPSIS}", beginning(&text, end))
}

fn is_label_of_any_length(text: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    text.bytes().all(|byte| inner(byte) || byte == b'-')
        && text.bytes().next().is_some_and(inner)
        && text.bytes().next_back().is_some_and(inner)
}

/// Derives a device name from its identity: the path relative to `/dev`, the ids or the port of a USB device, the address of a PCI function,
/// or the first path, the kind, or kind and pattern of a group.
///
/// The result is a DNS label and is stable across restarts. An identity that is a DNS label is the name. Any other loses characters, so
/// a hash of the whole identity is appended to keep names distinct.
pub fn device_name(identity: &str) -> String {
    if is_dns_label(identity) {
        return identity.to_owned();
    }
    let mut slug = String::new();
    for character in identity.chars() {
        match character.to_ascii_lowercase() {
            kept @ ('a'..='z' | '0'..='9') => slug.push(kept),
            _ if slug.is_empty() || slug.ends_with('-') => {}
            _ => slug.push('-'),
        }
    }
    slug.truncate(LABEL_MAX - 1 - HASH_LENGTH);
    let slug = slug.trim_end_matches('-');
    let slug = if slug.is_empty() { "device" } else { slug };
    format!("{slug}-{}", short_hash(identity))
}

/// 64-bit FNV-1a, folded to 40 bits: 8 characters of base 32. The function is fixed because names must be stable across releases, which the
/// standard library's hashers do not promise.
pub(in crate::core) fn short_hash(text: &str) -> String {
    const ALPHABET: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let folded = hash ^ (hash >> 40);
    (0..HASH_LENGTH)
        .filter_map(|position| ALPHABET.get(((folded >> (5 * position)) & 31) as usize))
        .map(|&byte| char::from(byte))
        .collect()
}

/// The device plugin ids of a device: its name, or one id per share if several containers may hold it at once.
pub fn plugin_ids(device: &str, shares: u32) -> Vec<String> {
    if shares <= 1 {
        vec![device.to_owned()]
    } else {
        (0..shares).map(|share| format!("{device}.{share}")).collect()
    }
}

/// The device of a device plugin id: the inverse of [`plugin_ids`]. Device names contain no dot.
pub fn device_of_plugin_id(id: &str) -> &str {
    id.split_once('.').map_or(id, |(device, _)| device)
}

/// The environment variable with a device's path in the container. Each device has its own, so that several claims in one container never
/// overwrite each other's variables.
pub fn environment_name(device: &str) -> String {
    let mut name = ENVIRONMENT_PREFIX.to_owned();
    name.extend(device.chars().map(|character| match character {
        'a'..='z' | '0'..='9' => character.to_ascii_uppercase(),
        _ => '_',
    }));
    name
}

/// The device of an environment variable: the inverse of [`environment_name`] for every DNS label.
pub fn device_of_environment_name(name: &str) -> Option<String> {
    let device = name
        .strip_prefix(ENVIRONMENT_PREFIX)?
        .replace('_', "-")
        .to_ascii_lowercase();
    (is_dns_label(&device) && environment_name(&device) == name).then_some(device)
}

/// Maximum length of a DNS subdomain, in bytes.
const MAX_SUBDOMAIN: usize = 253;
/// Prefix of an extended resource in a quota; the prefixed name must be valid, too.
const QUOTA_PREFIX: &str = "requests.";
/// The domain of Kubernetes' native resources.
const NATIVE: &str = "kubernetes.io/";

/// Why a name is invalid.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum NameError {
    /// Not a valid extended resource name.
    #[error("{name:?} is not the name of an extended resource, such as example.com/serial-port: {problem}")]
    ExtendedResource {
        /// The rejected name.
        name: String,
        /// The violated rule.
        problem: &'static str,
    },
    /// Not a valid driver name.
    #[error("{name:?} is not the name of a driver, such as devices.example.com: {problem}")]
    Driver {
        /// The rejected name.
        name: String,
        /// The violated rule.
        problem: &'static str,
    },
}

impl NameError {
    /// CamelCase reason for logs, conditions and metrics.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::ExtendedResource { .. } => "InvalidResourceName",
            Self::Driver { .. } => "InvalidDriverName",
        }
    }
}

/// Checks the name of an extended resource by the rules of kubelet and the API server (`IsExtendedResourceName` in pkg/apis/core/v1/helper
/// of Kubernetes 1.30).
pub fn check_extended_resource(name: &str) -> Result<(), NameError> {
    extended_resource_problem(name).map_or(Ok(()), |problem| {
        Err(NameError::ExtendedResource {
            name: name.to_owned(),
            problem,
        })
    })
}

/// Checks the name of a DRA driver: a DNS subdomain of at most 63 characters (`driverName` in resource.k8s.io/v1alpha2).
pub fn check_driver(name: &str) -> Result<(), NameError> {
    let problem = if name.len() > LABEL_MAX {
        Some("it is longer than 63 characters")
    } else {
        subdomain_problem(name)
    };
    problem.map_or(Ok(()), |problem| {
        Err(NameError::Driver {
            name: name.to_owned(),
            problem,
        })
    })
}

fn extended_resource_problem(name: &str) -> Option<&'static str> {
    let Some((domain, rest)) = name.split_once('/') else {
        return Some("it has no domain before a slash");
    };
    if name.contains(NATIVE) {
        return Some("the domain kubernetes.io belongs to Kubernetes");
    }
    if name.starts_with(QUOTA_PREFIX) {
        return Some("it begins with \"requests.\", like a quota");
    }
    if domain.len() + QUOTA_PREFIX.len() > MAX_SUBDOMAIN {
        return Some("the part before the slash is longer than 244 characters");
    }
    if let Some(problem) = subdomain_problem(domain) {
        return Some(problem);
    }
    let edge = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = rest.as_bytes();
    if bytes.len() > LABEL_MAX {
        Some("the part after the slash is longer than 63 characters")
    } else if !edge(bytes.first()) || !edge(bytes.last()) {
        Some("the part after the slash must begin and end with a letter or digit")
    } else if !bytes
        .iter()
        .all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(byte))
    {
        Some("the part after the slash may contain only letters, digits and -_.")
    } else {
        None
    }
}

/// Returns the violated rule of DNS subdomains (RFC 1123, as Kubernetes applies it), if any.
fn subdomain_problem(domain: &str) -> Option<&'static str> {
    let edge =
        |byte: Option<&u8>| byte.is_some_and(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
    if domain.len() > MAX_SUBDOMAIN {
        return Some("the domain is longer than 253 characters");
    }
    domain.split('.').find_map(|label| {
        let bytes = label.as_bytes();
        if !edge(bytes.first()) || !edge(bytes.last()) {
            Some("each part of the domain must begin and end with a lowercase letter or digit")
        } else if !bytes.iter().all(|byte| edge(Some(byte)) || *byte == b'-') {
            Some("the domain may contain only lowercase letters, digits, - and .")
        } else {
            None
        }
    })
}

#[cfg(test)]
mod claim_uid_tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_form_of_the_api_server_is_accepted() {
        let text = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a10";
        assert_eq!(ClaimUid::parse(text).unwrap().as_str(), text);
    }

    #[test]
    fn every_other_spelling_of_a_uuid_is_refused() {
        for text in [
            "7D0A2F5E-0C5B-4F0E-9A53-6C3B1F1F2A10",
            "7d0a2f5e0c5b4f0e9a536c3b1f1f2a10",
            "{7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a10}",
            "urn:uuid:7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a10",
            "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a10 ",
            "",
        ] {
            assert!(ClaimUid::parse(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn an_error_repeats_only_the_beginning_of_a_long_text() {
        let error = ClaimUid::parse(&"x".repeat(1_000_000)).unwrap_err();
        assert!(error.to_string().len() < 200);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 10_000, ..ProptestConfig::default() })]

        #[test]
        fn no_accepted_uid_leaves_a_directory(text in r"(\.\./|[a-f0-9/.\\\x00-]){0,40}") {
            if let Ok(uid) = ClaimUid::parse(&text) {
                prop_assert!(uid.as_str().bytes().all(|b| b.is_ascii_hexdigit() || b == b'-'));
                prop_assert_eq!(uid.as_str().len(), 36);
            }
        }
    }
}

#[cfg(test)]
mod driver_name_tests {
    use super::*;

    #[test]
    fn a_name_that_is_safe_in_paths_and_cdi_is_accepted() {
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
    fn the_cdi_id_of_a_claims_device_leads_back_to_it() {
        let driver = DriverName::parse("drayman.dev").unwrap();
        let uid = ClaimUid::parse("7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a10").unwrap();
        for admin_access in [false, true] {
            let device = ClaimDevice {
                uid: uid.clone(),
                device: "tty-usb0".into(),
                admin_access,
            };
            let id = driver.cdi_id_of_claim_device(&device);
            assert_eq!(driver.claim_of_cdi_id(&id), Some(uid.clone()));
            assert_eq!(driver.claim_device_of_cdi_id(&id), Some(device));
        }
        assert_eq!(driver.claim_of_cdi_id(&driver.cdi_id(&uid)), Some(uid.clone()));
        for name in [
            format!("{uid}-"),
            format!("{uid}-A"),
            format!("{uid}x"),
            format!("admin-{uid}"),
            "é".repeat(18),
        ] {
            assert_eq!(
                driver.claim_of_cdi_id(&format!("drayman.dev/claim={name}")),
                None,
                "{name}"
            );
        }
    }

    #[test]
    fn unsafe_names_are_refused() {
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

#[cfg(test)]
mod naming_tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_path_that_is_a_label_is_the_device_name() {
        for path in ["kvm", "drayman-test-0", "0"] {
            assert_eq!(device_name(path), path);
        }
    }

    #[test]
    fn names_are_the_same_in_all_releases() {
        let paths = [
            "ttyUSB0",
            "serial/by-id/usb-FTDI_FT232R_A50285BI-if00-port0",
            "---",
            "",
        ];
        let names: Vec<String> = paths.iter().map(|path| device_name(path)).collect();
        assert_eq!(
            names,
            [
                "ttyusb0-rrlmlslx",
                "serial-by-id-usb-ftdi-ft232r-a50285bi-if00-port0-a3h4hjui",
                "device-cutkmp7c",
                "device-znutocs4"
            ]
        );
    }

    #[test]
    fn paths_that_look_alike_have_different_names() {
        let paths = ["a/b", "a-b", "a_b", "A-b", "a.b", "a--b", "a-b-"];
        let names: BTreeMap<String, &str> = paths.iter().map(|path| (device_name(path), *path)).collect();
        assert_eq!(names.len(), paths.len(), "{names:?}");
    }

    #[test]
    fn the_ids_of_a_shared_device_lead_back_to_it() {
        assert_eq!(plugin_ids("kvm", 1), ["kvm"]);
        assert_eq!(plugin_ids("kvm", 3), ["kvm.0", "kvm.1", "kvm.2"]);
        for id in ["kvm", "kvm.0", "kvm.17"] {
            assert_eq!(device_of_plugin_id(id), "kvm");
        }
    }

    #[test]
    fn the_variable_of_a_device_leads_back_to_it() {
        assert_eq!(environment_name("tty-usb0"), "DRAYMAN_DEVICE_TTY_USB0");
        assert_eq!(
            device_of_environment_name("DRAYMAN_DEVICE_TTY_USB0").as_deref(),
            Some("tty-usb0")
        );
        for foreign in [
            "PATH",
            "DRAYMAN_DEVICE_",
            "DRAYMAN_DEVICE_a",
            "DRAYMAN_DEVICE__A",
            "DRAYMAN_DEVICE_A-B",
        ] {
            assert_eq!(device_of_environment_name(foreign), None, "{foreign}");
        }
    }

    proptest! {
        #[test]
        fn every_identity_has_a_name_that_is_a_label(identity in ".{0,200}") {
            prop_assert!(is_dns_label(&device_name(&identity)), "{}", device_name(&identity));
        }

        #[test]
        fn variables_and_devices_match_one_to_one(device in "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?") {
            let name = environment_name(&device);
            prop_assert!(name.bytes().all(|b| b.is_ascii_uppercase() || b.is_ascii_digit() || b == b'_'));
            prop_assert_eq!(device_of_environment_name(&name), Some(device));
        }
    }
}

#[cfg(test)]
mod name_tests {
    use super::*;

    #[test]
    fn extended_resource_names_valid_for_kubelet_are_accepted() {
        let longest = format!(
            "{}.{}.{}.{}/{}",
            "a".repeat(63),
            "b".repeat(63),
            "c".repeat(63),
            "d".repeat(52),
            "N".repeat(63)
        );
        for name in [
            "example.com/serial-port",
            "a/B",
            "drayman.dev/x_y.z",
            "1.2/3",
            longest.as_str(),
        ] {
            assert_eq!(check_extended_resource(name), Ok(()), "{name}");
        }
        assert_eq!(longest.split('/').next().unwrap().len(), 244);
    }

    #[test]
    fn an_extended_resource_name_must_be_valid_for_kubelet() {
        let too_long = format!(
            "{}.{}.{}.{}/x",
            "a".repeat(63),
            "b".repeat(63),
            "c".repeat(63),
            "d".repeat(53)
        );
        let long_name = format!("a/{}", "x".repeat(64));
        for (name, problem) in [
            ("", "no domain"),
            ("cpu", "no domain"),
            ("kubernetes.io/x", "belongs to Kubernetes"),
            ("foo.kubernetes.io/x", "belongs to Kubernetes"),
            ("requests.example.com/x", "like a quota"),
            ("/x", "each part of the domain"),
            ("Example.com/x", "each part of the domain"),
            ("exAmple.com/x", "lowercase letters"),
            ("a..b/x", "each part of the domain"),
            ("../../etc/x", "each part of the domain"),
            ("a/", "begin and end"),
            ("a/-x", "begin and end"),
            ("a/b/c", "only"),
            ("a/b c", "only"),
            ("a/b\0c", "only"),
            (&too_long, "244"),
            (&long_name, "63"),
        ] {
            let refused = check_extended_resource(name).unwrap_err();
            assert!(refused.to_string().contains(problem), "{name}: {refused}");
            assert_eq!(refused.reason(), "InvalidResourceName");
        }
    }

    #[test]
    fn a_driver_has_the_name_of_a_short_domain() {
        assert_eq!(check_driver("drayman.dev"), Ok(()));
        assert_eq!(check_driver(&"a".repeat(63)), Ok(()));
        for name in [
            "",
            ".",
            "..",
            "a/b",
            "../x",
            "A",
            "a_b",
            "-a",
            "a-",
            "a..b",
            "é",
            &"a".repeat(64),
        ] {
            assert_eq!(
                check_driver(name).unwrap_err().reason(),
                "InvalidDriverName",
                "{name}"
            );
        }
    }
}
