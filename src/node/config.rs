//! `NodeConfiguration`: the file that describes a node's kinds of devices.
//!
//! The file is parsed into raw types that check only its shape, then converted to types that exclude invalid values. Every error
//! names the file, the position, the value and the remedy.

mod access_conflicts;
mod container_paths;
mod error;
mod extras;
mod kind;
mod kubelet_apis;
mod pattern;
mod preset;
mod schema;
mod source;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;
use serde_saphyr::{MergeKeyPolicy, Spanned};

use crate::api::crd::{GROUP, VERSION};
pub use error::{ConfigError, Position};
use error::{ContentError, at, shown};
pub use extras::{Probe, ProbeOpen, ProbeSysfs};
use kind::RawKind;
pub use kind::{DeviceKind, kind_schema};
pub use kubelet_apis::{KindApis, KindMode};
pub use pattern::PathPattern;
pub use preset::{PRESETS, Preset};
pub use schema::{NODE_BUS, NODE_VFIO};
pub use source::{NodeGroup, PciSource, Source, UsbSource, VFIO_CONTAINER};

/// Largest file, in bytes.
const SIZE_MAX: u64 = 256 * 1024;
/// Maximum number of kinds in a file.
pub(in crate::node) const KINDS_MAX: usize = 64;

/// The kinds of devices of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeConfiguration {
    /// The kinds in file order. A device that matches several kinds belongs to the first.
    pub kinds: Vec<Arc<DeviceKind>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawVersion {
    api_version: Spanned<String>,
    kind: Spanned<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RawConfiguration {
    #[serde(rename = "apiVersion")]
    _api_version: String,
    #[serde(rename = "kind")]
    _kind: String,
    kinds: Spanned<Vec<Spanned<RawKind>>>,
}

impl NodeConfiguration {
    /// Reads and validates a file.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let unreadable = |source| ConfigError::Read {
            path: path.to_owned(),
            source,
        };
        let content = |(position, problem)| ConfigError::Content {
            path: path.to_owned(),
            position,
            problem,
        };
        let mut text = Vec::new();
        File::open(path)
            .and_then(|file| file.take(SIZE_MAX + 1).read_to_end(&mut text))
            .map_err(unreadable)?;
        if text.len() as u64 > SIZE_MAX {
            return Err(content((
                Position::START,
                format!("the file has more than {SIZE_MAX} bytes"),
            )));
        }
        let text = String::from_utf8(text).map_err(|error| content(not_utf8(&error)))?;
        Self::parse(&text).map_err(content)
    }

    /// A configuration of these presets, each offered through ResourceClaims. The error names a preset that is given twice.
    pub fn of_presets(presets: &[&Preset]) -> Result<Self, String> {
        let mut text = format!("apiVersion: {GROUP}/{VERSION}\nkind: NodeConfiguration\nkinds:\n");
        for preset in presets {
            let _ = writeln!(text, "- preset: {}", preset.name);
        }
        Self::parse(&text).map_err(|(_, problem)| problem)
    }

    /// Parses and validates the text of a file.
    pub(in crate::node) fn parse(text: &str) -> Result<Self, ContentError> {
        if text.trim().is_empty() {
            return Err((
                Position::START,
                format!("the file is empty; it must begin with apiVersion: {GROUP}/{VERSION}"),
            ));
        }
        // Check the fields common to all versions first, so that a newer file is rejected for its version and not for its fields.
        let version: RawVersion = from_yaml(text)?;
        let expected = format!("{GROUP}/{VERSION}");
        if version.api_version.value != expected {
            return Err(at(
                &version.api_version,
                format!(
                    "apiVersion {} is not known to this release; write {expected}",
                    shown(&version.api_version)
                ),
            ));
        }
        if version.kind.value != "NodeConfiguration" {
            return Err(at(
                &version.kind,
                format!("kind {} must be NodeConfiguration", shown(&version.kind)),
            ));
        }
        Self::try_from(from_yaml::<RawConfiguration>(text)?)
    }
}

impl TryFrom<RawConfiguration> for NodeConfiguration {
    type Error = ContentError;

    fn try_from(raw: RawConfiguration) -> Result<Self, ContentError> {
        if raw.kinds.value.len() > KINDS_MAX {
            return Err(at(
                &raw.kinds,
                format!(
                    "kinds has {} entries; at most {KINDS_MAX} are allowed",
                    raw.kinds.value.len()
                ),
            ));
        }
        let mut names = BTreeMap::new();
        let mut resources = BTreeMap::new();
        let mut kinds: Vec<Arc<DeviceKind>> = Vec::new();
        for (index, raw) in raw.kinds.value.iter().enumerate() {
            let field = format!("kinds[{index}]");
            let whole = Position::of(raw.referenced);
            let raw = &raw.value;
            // A preset names its kind unless the file does.
            if let Some(name) = raw.name.as_ref().or(raw.preset.as_ref())
                && let Some(line) = names.insert(name.value.clone(), name.referenced.line())
            {
                return Err(at(
                    name,
                    format!(
                        "{field}.name {} is already used on line {line}; names must be unique",
                        shown(name)
                    ),
                ));
            }
            if let Some(resource) = &raw.resource_name
                && let Some(line) = resources.insert(resource.value.clone(), resource.referenced.line())
            {
                return Err(at(
                    resource,
                    format!(
                        "{field}.resourceName {} is already used on line {line}; names must be unique, so put all paths of a resource into one kind",
                        shown(resource)
                    ),
                ));
            }
            let kind = raw.check(&field, whole)?;
            container_paths::check(&kind, raw, &field, whole)?;
            access_conflicts::check(&kinds, &kind, raw, &field, whole)?;
            kinds.push(Arc::new(kind));
        }
        Ok(Self { kinds })
    }
}

fn from_yaml<'de, T: Deserialize<'de>>(text: &'de str) -> Result<T, ContentError> {
    let options = serde_saphyr::options! {
        // Neither anchors nor aliases: nothing needs them, and they let a small file expand to a huge one.
        budget: serde_saphyr::budget! {
            max_aliases: 0,
            max_anchors: 0,
            max_depth: 16,
            max_nodes: 20_000,
            max_events: 50_000,
        },
        merge_keys: MergeKeyPolicy::Error,
        with_snippet: false,
    };
    serde_saphyr::from_str_with_options(text, options).map_err(|error| {
        let position = error.location().map_or(Position::START, Position::of);
        let problem: String = error
            .without_snippet()
            .to_string()
            .chars()
            .filter(|c| !c.is_control())
            .take(300)
            .collect();
        (position, problem)
    })
}

fn not_utf8(error: &std::string::FromUtf8Error) -> ContentError {
    let good = error
        .as_bytes()
        .get(..error.utf8_error().valid_up_to())
        .unwrap_or_default();
    let mut lines = good.split(|&byte| byte == b'\n');
    let column = lines.next_back().map_or(0, <[u8]>::len) as u64 + 1;
    (
        Position {
            line: lines.count() as u64 + 1,
            column,
        },
        "the file is not UTF-8 from here on; save it as UTF-8".to_owned(),
    )
}

#[cfg(test)]
mod tests;
