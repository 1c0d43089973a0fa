//! Proposes a configuration for the devices of this machine: the presets that find something, then USB devices and PCI
//! functions bound to vfio-pci that no preset finds.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io;

use super::device::HostPaths;
use super::search::{Survey, survey};
use super::sysfs::{SysRoot, nodes_of};
use crate::api::crd::{GROUP, VERSION};
use crate::core::discovery::pci::VFIO_DRIVER;
use crate::node::config::{KINDS_MAX, NodeConfiguration, PRESETS};

/// Subsystems whose device nodes a container needs, instead of the USB device node itself, by precedence.
const SUBSYSTEMS: [&str; 3] = ["tty", "video4linux", "hidraw"];
/// Maximum length of a kind's name that is made from the model of a device.
const NAME_MAX: usize = 40;

/// A kind of the proposal.
struct ProposedKind {
    name: String,
    /// Text of the comment above it.
    comment: String,
    /// The entry, without its indentation.
    yaml: String,
}

/// Returns the configuration as YAML with comments, or none if the machine has no device for it.
///
/// # Errors
///
/// If `/sys` cannot be read, or a kind does not pass the checks of the configuration; the error is the failed check.
pub async fn proposal(paths: HostPaths) -> Result<Option<String>, String> {
    let mut kinds: Vec<ProposedKind> = PRESETS
        .iter()
        .map(|preset| {
            let mut comment = format!("{}. {}.", sentence(preset.summary), sentence(preset.caveat));
            if let Some(shares) = preset.shares {
                let _ = write!(
                    comment,
                    " Up to {shares} claims share a device; for claims on Kubernetes 1.34 and 1.35, add shares: 1."
                );
            }
            ProposedKind {
                name: preset.name.to_owned(),
                comment,
                yaml: format!("preset: {}\n", preset.name),
            }
        })
        .collect();
    let mut names: BTreeSet<String> = kinds.iter().map(|kind| kind.name.clone()).collect();
    kinds.extend(on_buses(&paths, &mut names).map_err(|error| format!("/sys cannot be read: {error}"))?);
    kinds.truncate(KINDS_MAX);
    let all = file(&kinds.iter().map(|kind| (kind, Vec::new())).collect::<Vec<_>>());
    let configuration = NodeConfiguration::parse(&all).map_err(|(_, problem)| problem)?;
    let found = survey(configuration, paths).await;
    let kinds: Vec<_> = kinds
        .iter()
        .map(|kind| (kind, devices_of(&found, &kind.name)))
        .filter(|(_, devices)| !devices.is_empty())
        .collect();
    Ok((!kinds.is_empty()).then(|| file(&kinds)))
}

fn sentence(text: &str) -> String {
    let (first, rest) = text.split_at_checked(1).unwrap_or(("", text));
    first.to_ascii_uppercase() + rest
}

fn devices_of(found: &Survey, kind: &str) -> Vec<String> {
    let devices = found.devices.iter().filter(|device| device.kind == kind);
    devices.map(|device| device.name.clone()).collect()
}

/// Returns a kind for each model of USB devices, and of PCI functions that vfio-pci drives.
fn on_buses(paths: &HostPaths, names: &mut BTreeSet<String>) -> io::Result<Vec<ProposedKind>> {
    let Some(sys) = SysRoot::new(&paths.sys) else {
        return Ok(Vec::new());
    };
    let mut kinds: BTreeMap<(&str, u16, u16), ProposedKind> = BTreeMap::new();
    for usb in sys.usb_devices()?.into_iter().filter(|usb| !usb.facts.is_hub()) {
        let (vendor, product) = (usb.facts.vendor, usb.facts.product);
        let nodes = nodes_of(&usb.directory)?;
        let subsystem = SUBSYSTEMS
            .into_iter()
            .find(|subsystem| nodes.iter().any(|node| node.subsystem == *subsystem));
        let model = [&usb.facts.manufacturer, &usb.facts.model];
        let model: Vec<&str> = model.into_iter().flatten().map(String::as_str).collect();
        kinds.entry(("usb", vendor, product)).or_insert_with(|| {
            let mut yaml =
                format!("usb:\n  match: [{{vendor: \"{vendor:04x}\", product: \"{product:04x}\"}}]\n");
            if let Some(subsystem) = subsystem {
                let _ = writeln!(yaml, "  nodes: [{subsystem}]");
            }
            kind(
                &model.join(" "),
                &format!("usb-{vendor:04x}-{product:04x}"),
                &yaml,
                names,
            )
        });
    }
    for pci in sys.pci_devices()? {
        let (vendor, device) = (pci.facts.vendor, pci.facts.device);
        if pci.facts.driver.as_deref() == Some(VFIO_DRIVER) {
            kinds.entry(("vfio", vendor, device)).or_insert_with(|| {
                let yaml = format!("pci:\n  match: [{{vendor: \"{vendor:04x}\", device: \"{device:04x}\", driver: {VFIO_DRIVER}}}]\n");
                kind("", &format!("pci-{vendor:04x}-{device:04x}"), &yaml, names)
            });
        }
    }
    Ok(kinds.into_values().collect())
}

/// Names a kind after the model, or else as `plain`.
fn kind(model: &str, plain: &str, yaml: &str, names: &mut BTreeSet<String>) -> ProposedKind {
    let words = model
        .split(|c: char| !c.is_ascii_alphanumeric())
        .filter(|word| !word.is_empty());
    let label: String = words.collect::<Vec<_>>().join("-").to_ascii_lowercase();
    let label = label.get(..NAME_MAX).unwrap_or(&label).trim_matches('-');
    let mut name = match label {
        "" => plain.to_owned(),
        label if names.contains(label) => plain.to_owned(),
        label => label.to_owned(),
    };
    // The model of another device may read like the plain name of this one.
    while !names.insert(name.clone()) {
        name.push_str("-2");
    }
    // The device chose this text. YAML also ends a line, and thus the comment, at characters beyond ASCII.
    let printable = |c: char| if c == ' ' || c.is_ascii_graphic() { c } else { '?' };
    let model: String = model.chars().map(printable).collect();
    ProposedKind {
        comment: if model.is_empty() {
            plain.to_owned()
        } else {
            format!("{model} ({plain})")
        },
        // Quoted, because a model may read as a number.
        yaml: format!("name: \"{name}\"\n{yaml}"),
        name,
    }
}

/// Writes a configuration file; each kind has the names of its devices in a comment.
fn file(kinds: &[(&ProposedKind, Vec<String>)]) -> String {
    let mut text = format!("apiVersion: {GROUP}/{VERSION}\nkind: NodeConfiguration\nkinds:\n");
    for (kind, devices) in kinds {
        let _ = writeln!(text, "# {}", kind.comment);
        if !devices.is_empty() {
            let _ = writeln!(text, "# Devices: {}", devices.join(", "));
        }
        for (index, line) in kind.yaml.lines().enumerate() {
            let indentation = if index == 0 { "- " } else { "  " };
            let _ = writeln!(text, "{indentation}{line}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_named_after_models_once() {
        let mut names = BTreeSet::from(["kvm".to_owned()]);
        let mut name = |model: &str| kind(model, "usb-1-2", "", &mut names).name;
        assert_eq!(name("FTDI FT232R_USB\u{1b}[2J UART"), "ftdi-ft232r-usb-2j-uart");
        assert_eq!(name("kvm"), "usb-1-2");
        assert_eq!(name("Kamera Überwachung"), "kamera-berwachung");
        assert_eq!(name(" -- "), "usb-1-2-2");
        assert!(name(&"a b".repeat(100)).len() <= NAME_MAX);
    }

    #[test]
    fn the_text_of_a_device_stays_in_its_comment() {
        let model = "A\u{2028}b\u{2029}c\u{85}d\ne";
        let kind = kind(model, "usb-1-2", "", &mut BTreeSet::new());
        assert_eq!(kind.comment, "A?b?c?d?e (usb-1-2)");
    }

    #[test]
    fn a_model_that_reads_as_another_type_is_a_text() {
        for model in ["1234", "1e3", "true", "null"] {
            let yaml = "usb:\n  match: [{vendor: \"0403\"}]\n";
            let kind = kind(model, "usb-1-2", yaml, &mut BTreeSet::new());
            let text = file(&[(&kind, Vec::new())]);
            assert!(text.contains(&format!("- name: \"{model}\"\n")), "{text}");
            assert_eq!(NodeConfiguration::parse(&text).unwrap().kinds[0].name, model);
        }
    }
}
