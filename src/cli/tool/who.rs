//! `drayman who DEVICE`: who holds a device, and what is known about it.

use std::process::ExitCode;

use super::Cluster;
use super::devices::{Namespace, door, read_all, state};
use super::output::{Output, one_line};
use crate::cli::Error;
use crate::core::inspect::devices::{DeviceRow, DeviceState};

/// Say who holds a device
#[derive(Clone, Debug, clap::Args)]
pub(in crate::cli) struct Arguments {
    /// The device, as DEVICE or NODE/DEVICE
    #[arg(value_name = "DEVICE")]
    device: String,

    #[command(flatten)]
    namespace: Namespace,

    #[command(flatten)]
    cluster: Cluster,

    #[command(flatten)]
    output: Output,
}

/// Prints what is known about the device; more than one if several nodes have one of that name.
pub(in crate::cli) fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    let (node, device) = match arguments.device.split_once('/') {
        Some((node, device)) => (Some(node), device),
        None => (None, arguments.device.as_str()),
    };
    let mut rows = read_all(&arguments.cluster, &arguments.namespace)?.devices;
    rows.retain(|row| row.device == device && node.is_none_or(|node| node == row.node));
    if rows.is_empty() {
        eprintln!(
            "error: driver {} has no device {}: `drayman devices` lists all",
            arguments.cluster.driver.name, arguments.device
        );
        return Ok(ExitCode::FAILURE);
    }
    arguments.output.print(&rows, |rows, _| {
        let texts: Vec<_> = rows.iter().map(text).collect();
        texts.join("\n")
    })?;
    Ok(ExitCode::SUCCESS)
}

fn text(row: &DeviceRow) -> String {
    let mut lines = vec![
        format!("Device:   {}/{}", row.node, row.device),
        format!("Kind:     {}", row.kind),
        format!("State:    {}", state(row.state)),
    ];
    if let Some(cause) = &row.cause {
        lines.push(format!("Why:      {}", one_line(cause)));
    }
    lines.push(format!("Door:     {}", door(row)));
    if row.shares > 1 {
        lines.push(format!(
            "Shares:   {} of {} held by claims",
            row.holders.len(),
            row.shares
        ));
    }
    if row.holders.is_empty() {
        let nobody = if row.state == DeviceState::Unknown {
            "not known"
        } else if row.may_be_in_a_container() {
            "not by a claim; a container may have it, which its node alone knows"
        } else {
            "nobody"
        };
        lines.push(format!("Held by:  {nobody}"));
    }
    for holder in &row.holders {
        let pods = if holder.pods.is_empty() {
            "used by no pod".to_owned()
        } else {
            format!("used by {}", holder.pods.join(", "))
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
    use crate::core::devices::fixture::{DRIVER, inventory};
    use crate::core::inspect::devices::devices;

    #[test]
    fn nobody_is_said_of_a_device_only_if_nobody_can_have_it() {
        let said = |mode: Mode, shares: Option<u32>| {
            let mut inventory = inventory("node-a", "1", &["a"]);
            for device in &mut inventory.spec.devices {
                (device.mode, device.shares) = (mode, shares);
            }
            let table = devices(DRIVER, &[inventory], &[]);
            table.devices.iter().map(text).collect::<String>()
        };
        let by_claim = said(Mode::Claims, Some(4));
        assert!(by_claim.contains("Held by:  nobody\n"), "{by_claim}");
        assert!(
            by_claim.contains("Shares:   0 of 4 held by claims\n"),
            "{by_claim}"
        );
        for mode in [Mode::ExtendedResource, Mode::Both, Mode::Unknown] {
            let text = said(mode, None);
            assert!(
                text.contains("Held by:  not by a claim; a container may have it"),
                "{text}"
            );
            assert!(!text.contains("nobody") && !text.contains("Free"), "{text}");
        }
    }
}
