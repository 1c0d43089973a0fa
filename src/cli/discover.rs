//! `drayman node discover`: shows which devices a configuration finds on this machine, without a cluster.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::ExitCode;

use schemars::JsonSchema;
use serde::Serialize;

use super::error::Error;
use super::output::{OutputFlags, Printable, Style, row, table, write};
use super::runtime::block_on;
use super::value;
use crate::api::crd::Device;
use crate::core::prepare::container_edits::ContainerEdits;
use crate::node::config::{NodeConfiguration, PRESETS, Preset};
use crate::node::discovery::{Candidate, HostPaths, Survey, proposal, survey};

/// The variable of `--config`, which a companion's pod has.
const CONFIG_VARIABLE: &str = "DRAYMAN_CONFIG";

/// Print the devices of this machine that a configuration finds, and why others are excluded
///
/// Needs no cluster and changes nothing. Without --config and --preset it tries every preset. Run it as root; otherwise
/// some devices are missing.
///
/// The exit code is 0 if each kind has a device, 1 if one has none, and 2 if the configuration is invalid.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Arguments {
    /// File of device kinds, as for the companion (docs/operator/devices.md).
    #[arg(
        long,
        value_name = "FILE",
        env = CONFIG_VARIABLE,
        help_heading = "Node"
    )]
    config: Option<PathBuf>,

    /// Try a preset instead of a file; may be given several times.
    #[arg(long = "preset", value_name = "NAME", env = "DRAYMAN_PRESET", value_parser = preset, help_heading = "Node")]
    presets: Vec<String>,

    /// Print a configuration for the devices of this machine instead: presets, USB devices, and PCI devices bound to vfio-pci
    #[arg(
        long,
        env = "DRAYMAN_PROPOSE",
        conflicts_with = "presets",
        help_heading = "Node"
    )]
    propose: bool,

    #[command(flatten)]
    output: OutputFlags,

    #[command(flatten)]
    host: HostFlags,
}

/// Paths of the host's files.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Directories")]
pub(super) struct HostFlags {
    /// Path of the host's /dev for this process. In a pod, mount it at another path than /dev.
    #[arg(
        long,
        value_name = "DIRECTORY",
        env = "DRAYMAN_DEV_ROOT",
        default_value = "/dev",
        value_parser = value::absolute_path
    )]
    pub(super) dev_root: PathBuf,

    /// Path of the host's /sys for this process.
    #[arg(
        long,
        value_name = "DIRECTORY",
        env = "DRAYMAN_SYSFS_ROOT",
        default_value = "/sys",
        value_parser = value::absolute_path
    )]
    pub(super) sysfs_root: PathBuf,

    /// Mounts of the host's process 1, to detect block devices in use. In a pod without hostPID, mount this file of the host.
    #[arg(
        long,
        value_name = "FILE",
        env = "DRAYMAN_MOUNTINFO",
        default_value = "/proc/1/mountinfo",
        value_parser = value::absolute_path
    )]
    pub(super) mountinfo: PathBuf,
}

impl HostFlags {
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

fn preset(text: &str) -> Result<String, String> {
    let names: Vec<&str> = PRESETS.iter().map(|preset| preset.name).collect();
    match Preset::named(text) {
        Some(_) => Ok(text.to_owned()),
        None => Err(format!("must be one of {}", names.join(", "))),
    }
}

/// The devices that a configuration finds on a machine.
#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct Discovered {
    devices: Vec<DiscoveredDevice>,
    /// Everything that a kind may describe, with the reason if it is no device.
    candidates: Vec<Candidate>,
    /// Notes about the presets.
    #[serde(skip)]
    notes: String,
}

#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
struct DiscoveredDevice {
    #[serde(flatten)]
    device: Device,
    /// The container edits for the device.
    #[serde(skip_serializing_if = "Option::is_none")]
    container: Option<ContainerEdits>,
}

/// Runs discovery once and prints the result.
pub(super) fn run(arguments: Arguments) -> Result<ExitCode, Error> {
    if std::env::var_os("DRAYMAN_OUTPUT").is_some() {
        eprintln!("note: DRAYMAN_OUTPUT has no effect; use -o");
    }
    // --propose and --preset override DRAYMAN_CONFIG, but not the flag. clap's conflicts do not tell the two apart.
    let of_variable = std::env::var_os(CONFIG_VARIABLE).map(PathBuf::from);
    if (arguments.propose || !arguments.presets.is_empty())
        && arguments.config.is_some()
        && arguments.config != of_variable
    {
        let problem = "--config cannot be used with --preset or --propose, which need no file";
        return Err(Error::Configuration(problem.to_owned()));
    }
    if arguments.propose {
        return propose(arguments.host.paths());
    }
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
        _ => NodeConfiguration::of_presets(&presets).map_err(Error::Configuration)?,
    };
    let kinds: Vec<String> = configuration.kinds.iter().map(|kind| kind.name.clone()).collect();
    let paths = arguments.host.paths();
    block_on(async {
        let survey = survey(configuration, paths).await;
        let found: BTreeSet<&str> = survey.devices.iter().map(|device| device.kind.as_str()).collect();
        let without: Vec<&str> = kinds
            .iter()
            .map(String::as_str)
            .filter(|kind| !found.contains(kind))
            .collect();
        let is_complete = without.is_empty() || everything && !found.is_empty();
        let complaint = format!("error: no device of kind {} on this machine", without.join(", "));
        arguments.output.print(&Discovered::new(survey, &presets))?;
        if is_complete {
            return Ok(ExitCode::SUCCESS);
        }
        eprintln!("{complaint}");
        Ok(ExitCode::FAILURE)
    })
}

fn propose(paths: HostPaths) -> Result<ExitCode, Error> {
    let proposed = block_on(async { Ok(proposal(paths).await.map_err(anyhow::Error::msg)?) })?;
    let Some(configuration) = proposed else {
        eprintln!("error: no device found; run this as root, with the host's /dev and /sys");
        return Ok(ExitCode::FAILURE);
    };
    write(&format!(
        "# Keep the kinds that pods may claim, and check the file with `drayman config check`. In values of the chart, the kinds are\n\
         # deviceKinds. Kubernetes 1.31 to 1.33 has no claims: there, each kind needs mode: extended-resource and a resourceName.\n{configuration}"
    ))?;
    Ok(ExitCode::SUCCESS)
}

impl Discovered {
    fn new(mut survey: Survey, presets: &[&Preset]) -> Self {
        let found: BTreeSet<&str> = survey.devices.iter().map(|device| device.kind.as_str()).collect();
        let of_found = presets.iter().filter(|preset| found.contains(preset.name));
        let notes =
            of_found.map(|preset| format!("{}: {}. {}.\n", preset.name, preset.summary, preset.caveat));
        Self {
            notes: notes.collect(),
            devices: survey
                .devices
                .into_iter()
                .map(|device| DiscoveredDevice {
                    container: survey.container_edits_of.remove(&device.name),
                    device,
                })
                .collect(),
            candidates: survey.candidates,
        }
    }
}

impl Printable for Discovered {
    const KIND: &'static str = "DiscoveredDevices";

    fn text(&self, style: Style) -> String {
        let rows = self.candidates.iter().map(|candidate| {
            let name = candidate.device.as_deref();
            let found = self
                .devices
                .iter()
                .find(|found| Some(found.device.name.as_str()) == name);
            let what = found.map_or_else(|| candidate.why.clone(), describe);
            row([&candidate.kind, &candidate.candidate, name.unwrap_or("-"), &what])
        });
        let header = ["KIND", "CANDIDATE", "DEVICE", "WHAT A CONTAINER GETS, OR WHY NOT"];
        let before_notes = if self.notes.is_empty() { "" } else { "\n" };
        table(style, header, rows.collect()) + before_notes + &self.notes
    }

    fn names(&self) -> Vec<String> {
        self.devices
            .iter()
            .map(|found| found.device.name.clone())
            .collect()
    }
}

/// Describes a device's container edits in one line.
fn describe(found: &DiscoveredDevice) -> String {
    let container_edits = found.container.as_ref();
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
    let shares = found.device.shares;
    parts.extend(shares.map(|shares| format!("shared by up to {shares}")));
    let cause = found.device.unhealthy.as_ref();
    parts.extend(cause.map(|cause| format!("UNHEALTHY: {cause}")));
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_names_cannot_control_the_terminal() {
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
        let text = Discovered::new(survey, &[]).text(Style::default());
        assert_eq!(text.lines().count(), 2, "{text:?}");
        assert!(!text.contains('\u{1b}'), "{text:?}");
    }
}
