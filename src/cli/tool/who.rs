//! `drayman who DEVICE`: shows the holders of a device and its attributes.

use std::fmt::Write as _;
use std::process::ExitCode;

use clap::builder::NonEmptyStringValueParser;
use clap_complete::ArgValueCompleter;
use schemars::JsonSchema;
use serde::Serialize;

use super::candidates;
use super::devices::{api, read_all, state};
use super::kubectl_flags::KubectlFlags;
use super::read::Namespaces;
use crate::cli::diagnose::devices::{DeviceRow, DeviceState, DeviceTable};
use crate::cli::error::Error;
use crate::cli::output::{OutputFlags, Printable, Style, one_line};
use crate::cli::value;

/// Show the holder of a device
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The device, as DEVICE or NODE/DEVICE
    #[arg(value_name = "DEVICE", value_parser = NonEmptyStringValueParser::new(), add = ArgValueCompleter::new(candidates::devices))]
    device: String,

    /// Namespace whose claims are read if you cannot read all namespaces. Default: the kubeconfig context's
    #[arg(short, long, value_name = "NAME", value_parser = value::namespace)]
    namespace: Option<String>,

    #[command(flatten)]
    cluster: KubectlFlags,

    #[command(flatten)]
    output: OutputFlags,
}

/// Prints the device; several rows if devices on several nodes share the name.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    let (node, device) = split(&arguments.device);
    let namespace = arguments.namespace.clone();
    let namespaces = |context| Namespaces::AllOr(namespace.unwrap_or(context));
    let (all, _) = read_all(&arguments.cluster, namespaces)?;
    let all = all.devices;
    let rows: Vec<_> = all
        .iter()
        .filter(|row| arguments.device == row.device || (node == Some(&row.node) && row.device == device))
        .cloned()
        .collect();
    if rows.is_empty() {
        let driver = &arguments.cluster.driver.name;
        eprintln!("error: {}", no_such(driver, &all, &arguments.device));
        return Ok(ExitCode::FAILURE);
    }
    arguments.output.print(&Details { items: rows })?;
    Ok(ExitCode::SUCCESS)
}

/// Devices, each with its holders and attributes.
#[derive(Clone, Debug, Serialize, JsonSchema)]
struct Details {
    items: Vec<DeviceRow>,
}

impl Printable for Details {
    const KIND: &'static str = DeviceTable::KIND;

    fn text(&self, _: Style) -> String {
        let texts: Vec<_> = self.items.iter().map(text).collect();
        texts.join("\n")
    }

    fn names(&self) -> Vec<String> {
        self.items.iter().map(DeviceRow::name).collect()
    }
}

/// Splits the argument into an optional node and a device. A path is reduced to its last component, which is often the
/// device's name.
fn split(asked: &str) -> (Option<&str>, &str) {
    match asked.rsplit_once('/') {
        Some((node, device)) if !asked.starts_with('/') => (Some(node), device),
        Some((_, device)) => (None, device),
        None => (None, asked),
    }
}

/// Minimum similarity of a suggested name; 1 means equal.
const ALIKE: f64 = 0.8;
/// Maximum number of suggested names.
const OFFERED: usize = 3;

/// Formats the message for an unknown device: nodes that have a device of that name, or similar names.
fn no_such(driver: &str, all: &[DeviceRow], asked: &str) -> String {
    let (node, device) = split(asked);
    let mut message = format!("driver {driver} has no device {}", one_line(asked));
    if all.is_empty() {
        return message + ", and no other: `drayman doctor` shows the cause";
    }
    let here = || all.iter().filter(|row| node.is_none_or(|node| node == row.node));
    let elsewhere = || all.iter().filter(|row| row.device == device);
    // Compares nodes and devices separately: node names are similar in most clusters and would dominate.
    let mut like: Vec<(f64, &DeviceRow)> = if elsewhere().next().is_some() {
        let likeness = |row: &DeviceRow| strsim::jaro_winkler(&row.node, node.unwrap_or_default());
        elsewhere().map(|row| (likeness(row), row)).collect()
    } else {
        here()
            .map(|row| (strsim::jaro_winkler(&row.device, device), row))
            .filter(|(likeness, _)| *likeness >= ALIKE)
            .collect()
    };
    // The sort is stable: equal candidates keep the order of `drayman devices`.
    like.sort_by(|(one, _), (other, _)| other.total_cmp(one));
    let mut names = Vec::new();
    for (_, row) in like {
        let name = match node {
            Some(_) => format!("{}/{}", row.node, row.device),
            None => row.device.clone(),
        };
        if names.len() < OFFERED && !names.contains(&name) {
            names.push(name);
        }
    }
    if let Some(node) = node.filter(|_| here().next().is_none()) {
        let _ = write!(message, ": it has none on node {}", one_line(node));
    }
    match names.as_slice() {
        [] => message + "; `drayman devices` lists all",
        names => message + "; did you mean " + &one_line(&names.join(" or ")) + "?",
    }
}

fn text(row: &DeviceRow) -> String {
    let mut lines = vec![
        format!("Device:   {}", one_line(&row.name())),
        format!("Kind:     {}", one_line(&row.kind)),
        format!("State:    {}", state(row.state)),
    ];
    if let Some(cause) = &row.cause {
        lines.push(format!("Why:      {}", one_line(cause)));
    }
    lines.push(format!("API:      {}", api(row)));
    if row.shares > 1 {
        lines.push(format!(
            "Shares:   {} of {} held by claims",
            row.holders.len(),
            row.shares
        ));
    }
    if row.holders.is_empty() {
        let holder = if row.state == DeviceState::Unknown {
            "unknown"
        } else if row.may_be_in_a_container() {
            "no claim; possibly a container, which only its node knows"
        } else {
            "none"
        };
        lines.push(format!("Held by:  {holder}"));
    }
    for holder in &row.holders {
        let pods = if holder.pods.is_empty() {
            "used by no pod".to_owned()
        } else {
            format!("used by {}", one_line(&holder.pods.join(", ")))
        };
        lines.push(format!(
            "Held by:  ResourceClaim {} (request {}), {pods}",
            holder.claim,
            one_line(&holder.request)
        ));
    }
    for (name, value) in &row.attributes {
        lines.push(format!("          {}={}", one_line(name), one_line(value)));
    }
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::crd::Mode;
    use crate::cli::diagnose::devices::devices;
    use crate::core::allocation::tests::fixture::{DRIVER, inventory};

    #[test]
    fn an_unknown_name_gets_similar_suggestions() {
        let mut table = devices(
            DRIVER,
            &[inventory("node-a", "1", &["camera-1", "camera-2", "radio"])],
            &[],
        );
        let others = devices(DRIVER, &[inventory("node-b", "1", &["camera-1", "disk"])], &[]);
        table.devices.extend(others.devices);
        for (asked, expected) in [
            ("camra-1", "; did you mean camera-1 or camera-2?"),
            ("zzz", "; `drayman devices` lists all"),
            ("/dev/radio", "; did you mean radio?"),
            ("/dev/", "; `drayman devices` lists all"),
            ("node-a/disk", "; did you mean node-b/disk?"),
            ("node-b/camera-2", "; did you mean node-a/camera-2?"),
            ("node-a/rado", "; did you mean node-a/radio?"),
            (
                "nod-b/camera-1",
                ": it has none on node nod-b; did you mean node-b/camera-1 or node-a/camera-1?",
            ),
            (
                "node-z/zzz",
                ": it has none on node node-z; `drayman devices` lists all",
            ),
        ] {
            assert_eq!(
                no_such("a.example", &table.devices, asked),
                format!("driver a.example has no device {asked}{expected}")
            );
        }
        assert_eq!(
            no_such("a.example", &[], "radio"),
            "driver a.example has no device radio, and no other: `drayman doctor` shows the cause"
        );
    }

    #[test]
    fn a_name_of_a_claim_cannot_control_the_terminal() {
        let mut table = devices(DRIVER, &[inventory("node-a", "1", &["a"])], &[]);
        table.devices[0].node = "node\u{1b}[2J".to_owned();
        let text = text(&table.devices[0]);
        assert!(!text.contains('\u{1b}'), "{text:?}");
    }

    #[test]
    fn a_device_without_possible_holder_prints_none() {
        let said = |mode: Mode, shares: Option<u32>| {
            let mut inventory = inventory("node-a", "1", &["a"]);
            for device in &mut inventory.spec.devices {
                (device.mode, device.shares) = (mode, shares);
            }
            let table = devices(DRIVER, &[inventory], &[]);
            table.devices.iter().map(text).collect::<String>()
        };
        let by_claim = said(Mode::Claims, Some(4));
        assert!(by_claim.contains("Held by:  none\n"), "{by_claim}");
        assert!(
            by_claim.contains("Shares:   0 of 4 held by claims\n"),
            "{by_claim}"
        );
        for mode in [Mode::ExtendedResource, Mode::Both, Mode::Unknown] {
            let text = said(mode, None);
            assert!(
                text.contains("Held by:  no claim; possibly a container, which only its node knows"),
                "{text}"
            );
            assert!(
                !text.contains("Held by:  none") && !text.contains("Free"),
                "{text}"
            );
        }
    }
}
