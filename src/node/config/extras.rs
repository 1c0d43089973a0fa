//! Container paths, mounts, environment, dangerous paths and health probes of a kind. Only the operator can set them.

use std::collections::{BTreeMap, BTreeSet};

use schemars::JsonSchema;
use serde::Deserialize;
use serde_saphyr::Spanned;

use super::error::{ContentError, at, at_most, shown};
use super::pattern::PathPattern;
use super::schema::{MountPath, PATH_MAX, SysfsFile, VALUE_MAX};
use super::source::Source;
use crate::api::crd::TaintEffect;
use crate::core::names::ENVIRONMENT_PREFIX;
use crate::core::prepare::container_edits::Mount;

/// Maximum number of entries in a list or map.
pub(super) const ENTRIES_MAX: usize = 32;
/// Default number of consecutive good results that make a device healthy again.
const RECOVER_AFTER: u32 = 3;
/// Largest such number: a device is not healthy for as many probes.
const RECOVER_AFTER_MAX: u32 = 100;

/// Health probe of a kind's devices. It never runs a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// How to open each device node, if at all.
    pub open: Option<ProbeOpen>,
    /// The device's sysfs files to read.
    pub sysfs: Vec<ProbeSysfs>,
    /// Number of consecutive good results that make a device healthy again.
    pub recover_after: u32,
    /// The effect of the taint of an unhealthy device.
    pub taint_effect: TaintEffect,
}

impl Default for Probe {
    fn default() -> Self {
        Self {
            open: None,
            sysfs: Vec::new(),
            recover_after: RECOVER_AFTER,
            taint_effect: TaintEffect::default(),
        }
    }
}

impl Probe {
    /// Whether the kind configures any probe besides the device's presence.
    pub fn is_asked_for(&self) -> bool {
        self.open.is_some() || !self.sysfs.is_empty()
    }
}

/// The mode in which a probe opens a device node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeOpen {
    /// Read only.
    Read,
    /// Write only.
    Write,
    /// Read and write.
    ReadWrite,
}

/// A sysfs file and its expected values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeSysfs {
    /// Path relative to the device's sysfs directory.
    pub file: String,
    /// The values of a healthy device.
    pub values: BTreeSet<String>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct RawMount {
    /// Path on the host.
    #[schemars(with = "MountPath")]
    host_path: Spanned<String>,
    /// Path in the container; default: the host path.
    #[serde(default)]
    #[schemars(with = "MountPath")]
    container_path: Option<Spanned<String>>,
    /// Mount read-only; default: true.
    #[serde(default)]
    #[schemars(with = "bool")]
    read_only: Option<bool>,
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct RawHealth {
    /// Open each node in this mode; requires a privileged companion.
    #[schemars(with = "String", extend("enum" = ["read", "write", "readWrite"]))]
    open: Option<Spanned<String>>,
    /// Files of the device in sysfs to check.
    #[schemars(with = "Vec<RawSysfs>", length(max = ENTRIES_MAX))]
    sysfs: Option<Spanned<Vec<RawSysfs>>>,
    /// Consecutive successes until the device is healthy again.
    #[schemars(with = "u32", range(min = 1, max = RECOVER_AFTER_MAX))]
    recover_after: Option<Spanned<u32>>,
    /// Effect of the taint of an unhealthy device, from Kubernetes 1.36 on: NoExecute evicts the pods that have it; default: NoSchedule.
    #[schemars(with = "String", extend("enum" = ["NoSchedule", "NoExecute"]))]
    taint_effect: Option<Spanned<String>>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(extend("oneOf" = [{ "required": ["equals"] }, { "required": ["in"] }]))]
struct RawSysfs {
    /// Path below the device's directory.
    #[schemars(with = "SysfsFile")]
    file: Spanned<String>,
    /// The value of a healthy device.
    #[serde(default)]
    #[schemars(with = "String")]
    equals: Option<String>,
    /// The values of a healthy device.
    #[serde(default, rename = "in")]
    #[schemars(with = "Vec<String>", length(min = 1))]
    one_of: Option<Vec<String>>,
}

/// Validates the field `containerPaths`.
pub(super) fn container_paths(
    field: &str,
    source: &Source,
    raw: &Spanned<BTreeMap<String, Spanned<String>>>,
) -> Result<BTreeMap<String, String>, ContentError> {
    let field = format!("{field}.containerPaths");
    at_most(ENTRIES_MAX, &field, raw, raw.value.len())?;
    let entries = source.entries();
    let mut all = BTreeMap::new();
    for (entry, path) in &raw.value {
        if !entries.contains(&entry.as_str()) {
            let problem = format!(
                "{field} names {entry:?}, which is not one of {}",
                entries.join(", ")
            );
            return Err(at(path, problem));
        }
        let bare = ["{device}", "{key}", "{n}"]
            .iter()
            .fold(path.value.clone(), |text, placeholder| {
                text.replace(placeholder, "0")
            });
        if let Some(problem) = path_problem(&bare) {
            return Err(at(path, format!("{field} {} {problem}", shown(path))));
        }
        if !bare.starts_with("/dev/") || bare.contains(['{', '}']) {
            let problem = format!(
                "{field} {} must be below /dev/, with no other placeholder than {{device}}, {{key}} and {{n}}",
                shown(path)
            );
            return Err(at(path, problem));
        }
        all.insert(entry.clone(), path.value.clone());
    }
    Ok(all)
}

/// Validates the field `mounts`.
pub(super) fn mounts(field: &str, raw: &Spanned<Vec<RawMount>>) -> Result<Vec<Mount>, ContentError> {
    at_most(ENTRIES_MAX, &format!("{field}.mounts"), raw, raw.value.len())?;
    let mut seen = BTreeSet::new();
    let mut mounts = Vec::new();
    for (index, raw) in raw.value.iter().enumerate() {
        let field = format!("{field}.mounts[{index}]");
        let container = raw.container_path.as_ref().unwrap_or(&raw.host_path);
        for (name, path) in [("hostPath", &raw.host_path), ("containerPath", container)] {
            if let Some(problem) = path_problem(&path.value) {
                return Err(at(path, format!("{field}.{name} {} {problem}", shown(path))));
            }
        }
        if !seen.insert(&container.value) {
            let problem = format!(
                "{field}.containerPath {} is listed twice; remove one",
                shown(container)
            );
            return Err(at(container, problem));
        }
        mounts.push(Mount {
            host_path: raw.host_path.value.clone(),
            container_path: container.value.clone(),
            read_only: raw.read_only.unwrap_or(true),
        });
    }
    Ok(mounts)
}

/// Validates the field `environment`.
pub(super) fn environment(
    field: &str,
    raw: &Spanned<BTreeMap<String, Spanned<String>>>,
) -> Result<BTreeMap<String, String>, ContentError> {
    let field = format!("{field}.environment");
    at_most(ENTRIES_MAX, &field, raw, raw.value.len())?;
    let mut all = BTreeMap::new();
    for (name, value) in &raw.value {
        let shape = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
        let begins = |byte: u8| byte.is_ascii_alphabetic() || byte == b'_';
        let problem =
            if !(name.bytes().all(shape) && name.bytes().next().is_some_and(begins)) || name.len() > 128 {
                "must have 1 to 128 letters, digits and _, and must not begin with a digit"
            } else if name.starts_with(ENVIRONMENT_PREFIX) {
                "has the reserved prefix DRAYMAN_DEVICE_; choose another name"
            } else if value.value.len() > VALUE_MAX || value.value.chars().any(char::is_control) {
                "has a value of more than 4096 bytes, or with a control character"
            } else {
                all.insert(name.clone(), value.value.clone());
                continue;
            };
        let name: String = name.chars().take(80).collect();
        return Err(at(value, format!("{field}: {name:?} {problem}")));
    }
    Ok(all)
}

/// Validates the field `dangerousPaths`.
pub(super) fn dangerous_paths(
    field: &str,
    raw: &Spanned<Vec<Spanned<String>>>,
) -> Result<BTreeSet<String>, ContentError> {
    let field = format!("{field}.dangerousPaths");
    at_most(ENTRIES_MAX, &field, raw, raw.value.len())?;
    let mut all = BTreeSet::new();
    for (index, raw) in raw.value.iter().enumerate() {
        let refuse = |problem: String| at(raw, format!("{field}[{index}] {} {problem}", shown(raw)));
        let pattern = PathPattern::parse(&raw.value).map_err(|error| refuse(error.to_string()))?;
        if !pattern.is_literal() {
            return Err(refuse(
                "must be the exact path of one device, without a wildcard".to_owned(),
            ));
        }
        all.insert(pattern.relative().to_owned());
    }
    Ok(all)
}

/// Validates the field `health`.
pub(super) fn health(field: &str, raw: &RawHealth) -> Result<Probe, ContentError> {
    let field = format!("{field}.health");
    let open = match &raw.open {
        None => None,
        Some(raw) => Some(match raw.value.as_str() {
            "read" => ProbeOpen::Read,
            "write" => ProbeOpen::Write,
            "readWrite" => ProbeOpen::ReadWrite,
            _ => {
                let problem = format!("{field}.open {} must be read, write or readWrite", shown(raw));
                return Err(at(raw, problem));
            }
        }),
    };
    let mut sysfs = Vec::new();
    if let Some(raw) = &raw.sysfs {
        at_most(ENTRIES_MAX, &format!("{field}.sysfs"), raw, raw.value.len())?;
        for (index, raw) in raw.value.iter().enumerate() {
            let field = format!("{field}.sysfs[{index}]");
            let file = &raw.file.value;
            let outside = file.split('/').any(|part| matches!(part, "" | "." | ".."));
            if outside || file.len() > PATH_MAX || file.chars().any(char::is_control) {
                let problem = format!(
                    "{field}.file {} must be a path below the device's directory in sysfs, for instance power/runtime_status",
                    shown(&raw.file)
                );
                return Err(at(&raw.file, problem));
            }
            let values: BTreeSet<String> = match (&raw.equals, &raw.one_of) {
                (Some(value), None) => BTreeSet::from([value.clone()]),
                (None, Some(values)) if !values.is_empty() => values.iter().cloned().collect(),
                _ => {
                    let problem = format!("{field} needs either equals, or in with at least one value");
                    return Err(at(&raw.file, problem));
                }
            };
            sysfs.push(ProbeSysfs {
                file: file.clone(),
                values,
            });
        }
    }
    let recover_after = match &raw.recover_after {
        None => RECOVER_AFTER,
        Some(raw) if (1..=RECOVER_AFTER_MAX).contains(&raw.value) => raw.value,
        Some(raw) => {
            let problem = format!(
                "{field}.recoverAfter {} must be 1 to {RECOVER_AFTER_MAX}",
                raw.value
            );
            return Err(at(raw, problem));
        }
    };
    let taint_effect = match &raw.taint_effect {
        None => TaintEffect::default(),
        Some(raw) => match raw.value.as_str() {
            "NoSchedule" => TaintEffect::NoSchedule,
            "NoExecute" => TaintEffect::NoExecute,
            _ => {
                let problem = format!(
                    "{field}.taintEffect {} must be NoSchedule or NoExecute",
                    shown(raw)
                );
                return Err(at(raw, problem));
            }
        },
    };
    Ok(Probe {
        open,
        sysfs,
        recover_after,
        taint_effect,
    })
}

/// The problem with an absolute path; `None` if it is valid.
fn path_problem(path: &str) -> Option<&'static str> {
    let below = path.strip_prefix('/');
    if below.is_none_or(|below| below.split('/').any(|part| matches!(part, "" | "." | ".."))) {
        Some("must be absolute, without an empty part, \".\" or \"..\"")
    } else if path.len() > PATH_MAX || path.chars().any(char::is_control) || path.contains([':', ',']) {
        Some("must have at most 256 bytes, no control character, no colon and no comma")
    } else {
        None
    }
}
