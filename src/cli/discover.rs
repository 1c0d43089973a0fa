//! `drayman node discover`: shows which devices a configuration finds on this machine, without a cluster.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;

use anyhow::Context as _;
use serde::Serialize;

use super::{Error, value};
use crate::api::crd::Device;
use crate::core::prepare::container_edits::ContainerEdits;
use crate::node::config::{NodeConfiguration, PRESETS, Preset};
use crate::node::discovery::{Candidate, HostPaths, Survey, survey};

/// Print the devices of this machine that a configuration finds, and why others are excluded
///
/// Needs no cluster and changes nothing. Without --config and --preset it tries every preset. Run it as root; otherwise
/// some devices are missing.
///
/// The exit code is 0 if each kind has a device, 1 if one has none, and 2 if the configuration is invalid.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Arguments {
    /// File of device kinds, as for the companion (docs/node.md).
    #[arg(
        long,
        value_name = "FILE",
        env = "DRAYMAN_CONFIG",
        hide_env_values = true,
        help_heading = "Node"
    )]
    config: Option<PathBuf>,

    /// Try a preset instead of a file; may be given several times.
    #[arg(long = "preset", value_name = "NAME", env = "DRAYMAN_PRESET", hide_env_values = true, value_parser = preset, help_heading = "Node")]
    presets: Vec<String>,

    /// Output format.
    #[arg(
        short,
        long,
        value_name = "FORMAT",
        env = "DRAYMAN_OUTPUT",
        hide_env_values = true,
        value_enum,
        default_value_t = Format::Table,
        help_heading = "Output"
    )]
    output: Format,

    #[command(flatten)]
    host: Host,
}

/// Where the host's own files are.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Directories")]
pub(super) struct Host {
    /// Path of the host's /dev for this process. In a pod, mount it at another path than /dev.
    #[arg(
        long,
        value_name = "DIRECTORY",
        env = "DRAYMAN_DEV_ROOT",
        hide_env_values = true,
        default_value = "/dev",
        value_parser = value::absolute_path
    )]
    pub(super) dev_root: PathBuf,

    /// Path of the host's /sys for this process.
    #[arg(
        long,
        value_name = "DIRECTORY",
        env = "DRAYMAN_SYSFS_ROOT",
        hide_env_values = true,
        default_value = "/sys",
        value_parser = value::absolute_path
    )]
    pub(super) sysfs_root: PathBuf,

    /// Mounts of the host's process 1, to detect block devices in use. In a pod without hostPID, mount this file of the host.
    #[arg(
        long,
        value_name = "FILE",
        env = "DRAYMAN_MOUNTINFO",
        hide_env_values = true,
        default_value = "/proc/1/mountinfo",
        value_parser = value::absolute_path
    )]
    pub(super) mountinfo: PathBuf,
}

impl Host {
    /// Returns the host paths; swap areas use the kernel's default location.
    pub(super) fn paths(self) -> HostPaths {
        HostPaths {
            dev: self.dev_root,
            sys: self.sysfs_root,
            mountinfo: self.mountinfo,
            ..HostPaths::default()
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    Table,
    Json,
    Yaml,
}

fn preset(text: &str) -> Result<String, String> {
    let names: Vec<&str> = PRESETS.iter().map(|preset| preset.name).collect();
    match Preset::named(text) {
        Some(_) => Ok(text.to_owned()),
        None => Err(format!("must be one of {}", names.join(", "))),
    }
}

/// The JSON output.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Output<'a> {
    devices: Vec<Found<'a>>,
    candidates: &'a [Candidate],
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Found<'a> {
    #[serde(flatten)]
    device: &'a Device,
    /// The container edits for the device.
    #[serde(skip_serializing_if = "Option::is_none")]
    container: Option<&'a ContainerEdits>,
}

/// Runs discovery once and prints the result.
pub(super) fn run(arguments: Arguments) -> Result<(), Error> {
    let presets: Vec<&'static Preset> = match (arguments.presets.as_slice(), &arguments.config) {
        ([], Some(_)) => Vec::new(),
        ([], None) => PRESETS.iter().collect(),
        (names, _) => names.iter().filter_map(|name| Preset::named(name)).collect(),
    };
    let everything = arguments.presets.is_empty() && arguments.config.is_none();
    let configuration = match &arguments.config {
        Some(file) if presets.is_empty() => {
            NodeConfiguration::read(file).map_err(|error| Error::Configuration(error.to_string()))?
        }
        _ => NodeConfiguration::of_presets(&presets),
    };
    let kinds: Vec<String> = configuration.kinds.iter().map(|kind| kind.name.clone()).collect();
    let paths = arguments.host.paths();
    super::block_on(async {
        let survey = survey(configuration, paths).await;
        let text = match arguments.output {
            Format::Table => table(&survey, &presets),
            Format::Json => {
                let json = serde_json::to_string_pretty(&output(&survey));
                json.context("cannot write the devices as JSON")? + "\n"
            }
            Format::Yaml => {
                serde_saphyr::to_string(&output(&survey)).context("cannot write the devices as YAML")?
            }
        };
        let mut stdout = std::io::stdout().lock();
        stdout
            .write_all(text.as_bytes())
            .and_then(|()| stdout.flush())
            .context("cannot write to stdout")?;
        let found: BTreeSet<&str> = survey.devices.iter().map(|device| device.kind.as_str()).collect();
        let without: Vec<&str> = kinds
            .iter()
            .map(String::as_str)
            .filter(|kind| !found.contains(kind))
            .collect();
        if without.is_empty() || everything && !found.is_empty() {
            Ok(())
        } else {
            Err(anyhow::anyhow!("no device of kind {} on this machine", without.join(", ")).into())
        }
    })
}

fn output(survey: &Survey) -> Output<'_> {
    let found = |device| Found {
        device,
        container: survey.container_edits_of.get(&device.name),
    };
    Output {
        devices: survey.devices.iter().map(found).collect(),
        candidates: &survey.candidates,
    }
}

/// Formats one line per candidate and the notes of the presets.
fn table(survey: &Survey, presets: &[&Preset]) -> String {
    let mut rows =
        vec![["KIND", "CANDIDATE", "DEVICE", "WHAT A CONTAINER GETS, OR WHY NOT"].map(str::to_owned)];
    for candidate in &survey.candidates {
        let device = candidate.device.as_deref();
        let what = device.map_or_else(|| candidate.why.clone(), |device| describe(survey, device));
        let name = device.unwrap_or("-").to_owned();
        rows.push(
            [candidate.kind.clone(), candidate.candidate.clone(), name, what].map(|cell| printable(&cell)),
        );
    }
    let width = |column: usize| {
        rows.iter()
            .filter_map(|row| row.get(column))
            .map(|cell| cell.chars().count())
            .max()
    };
    let widths: Vec<usize> = (0..3).filter_map(width).collect();
    let mut text = String::new();
    for row in &rows {
        for (cell, width) in row.iter().zip(&widths) {
            // Writing to a `String` cannot fail.
            let _ = write!(text, "{cell:width$}  ");
        }
        let _ = writeln!(text, "{}", row.last().map(String::as_str).unwrap_or_default());
    }
    let found: BTreeSet<&str> = survey.devices.iter().map(|device| device.kind.as_str()).collect();
    let notes = presets.iter().filter(|preset| found.contains(preset.name));
    for (index, preset) in notes.enumerate() {
        let before = if index == 0 { "\n" } else { "" };
        let _ = writeln!(
            text,
            "{before}{}: {}. {}.",
            preset.name, preset.summary, preset.caveat
        );
    }
    text
}

/// Describes a device's container edits in one line.
fn describe(survey: &Survey, device: &str) -> String {
    let container_edits = survey.container_edits_of.get(device);
    let mut parts: Vec<String> = container_edits
        .iter()
        .flat_map(|container_edits| &container_edits.device_nodes)
        .map(|node| {
            if node.host_path == node.container_path {
                format!("{} ({})", node.container_path, node.permissions)
            } else {
                format!(
                    "{} ({}) from {}",
                    node.container_path, node.permissions, node.host_path
                )
            }
        })
        .collect();
    let mounts = container_edits
        .iter()
        .flat_map(|container_edits| &container_edits.mounts);
    parts.extend(mounts.map(|mount| format!("mount {}", mount.container_path)));
    if let Some(found) = survey.devices.iter().find(|found| found.name == device) {
        parts.extend(found.shares.map(|shares| format!("shared by up to {shares}")));
        parts.extend(
            found
                .unhealthy
                .as_ref()
                .map(|cause| format!("UNHEALTHY: {cause}")),
        );
    }
    parts.join(", ")
}

/// Removes control characters: device names come from hardware and must not control the terminal.
fn printable(text: &str) -> String {
    text.chars().filter(|character| !character.is_control()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_device_calls_itself_cannot_drive_the_terminal() {
        let candidate = Candidate {
            kind: "k".into(),
            candidate: "USB \u{1b}[2Jdevice".into(),
            device: None,
            why: "it is\n a hub".into(),
            problem: false,
        };
        let survey = Survey {
            candidates: vec![candidate],
            ..Survey::default()
        };
        let table = table(&survey, &[]);
        assert_eq!(table.lines().count(), 2, "{table:?}");
        assert!(!table.contains('\u{1b}'), "{table:?}");
    }
}
