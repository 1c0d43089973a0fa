//! Names derived from a device's identity: its inventory name and its environment variable.

/// Maximum length of a DNS label.
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

fn is_label_of_any_length(text: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    text.bytes().all(|byte| inner(byte) || byte == b'-')
        && text.bytes().next().is_some_and(inner)
        && text.bytes().next_back().is_some_and(inner)
}

/// Derives a device name from its identity, for instance its path relative to `/dev`.
///
/// The result is a DNS label and is stable across restarts. An identity that is a DNS label is its own name. Any other loses characters, so
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
fn short_hash(text: &str) -> String {
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_path_that_is_a_label_is_its_own_name() {
        for path in ["kvm", "drayman-test-0", "0"] {
            assert_eq!(device_name(path), path);
        }
    }

    #[test]
    fn names_stay_the_same_over_releases() {
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
