//! The file that describes the kinds of devices of a node, `NodeConfiguration`.
//!
//! Read into raw types first, which only know the shape, and then into types that cannot hold nonsense. Every refusal
//! names the file, the place in it, the value and what to write instead.

mod door;
mod error;
mod pattern;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde::Deserialize;
use serde_saphyr::{MergeKeyPolicy, Spanned};

use crate::api::crd::{GROUP, VERSION};
use crate::core::node::naming::is_dns_label;
use door::RawDoors;
pub use door::{KindDoors, KindMode};
pub use error::{ConfigError, Place};
pub use pattern::PathPattern;
use pattern::PatternError;

/// The size of the file, at most, in bytes.
const SIZE_MAX: u64 = 256 * 1024;
/// Kinds in the file, at most.
const KINDS_MAX: usize = 64;
/// Paths of one kind, at most.
const PATHS_MAX: usize = 64;
/// How much of a wrong value is repeated in an error, in characters.
const SHOWN_MAX: usize = 80;

/// The kinds of devices of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeConfiguration {
    /// The kinds, in the order of the file: a device that two kinds describe belongs to the first.
    pub kinds: Vec<DeviceKind>,
}

/// One kind of device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceKind {
    /// A DNS label, unique in the file.
    pub name: String,
    /// Through which doors its devices leave the node, and how.
    pub doors: KindDoors,
    /// Which devices belong to it.
    pub paths: Vec<PathPattern>,
    /// What a container may do with a device: a non-empty subset of `rwm` in that order.
    pub permissions: String,
}

/// What is wrong, before the file's name is added.
type Refused = (Place, String);

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
    kinds: Spanned<Vec<RawKind>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RawKind {
    name: Spanned<String>,
    #[serde(default)]
    mode: Option<Spanned<String>>,
    #[serde(default)]
    resource_name: Option<Spanned<String>>,
    #[serde(default)]
    extended_resource_devices: Option<Spanned<Vec<Spanned<String>>>>,
    #[serde(default)]
    shares: Option<Spanned<u32>>,
    #[serde(default)]
    cdi_devices: Option<Spanned<bool>>,
    #[serde(default)]
    pre_start_check: Option<Spanned<bool>>,
    paths: Spanned<Vec<Spanned<String>>>,
    #[serde(default)]
    permissions: Option<Spanned<String>>,
}

impl NodeConfiguration {
    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let unreadable = |source| ConfigError::Read {
            path: path.to_owned(),
            source,
        };
        let content = |(place, problem)| ConfigError::Content {
            path: path.to_owned(),
            place,
            problem,
        };
        let mut text = Vec::new();
        File::open(path)
            .and_then(|file| file.take(SIZE_MAX + 1).read_to_end(&mut text))
            .map_err(unreadable)?;
        if text.len() as u64 > SIZE_MAX {
            return Err(content((
                Place::START,
                format!("the file has more than {SIZE_MAX} bytes"),
            )));
        }
        let text = String::from_utf8(text).map_err(|error| content(not_utf8(&error)))?;
        Self::parse(&text).map_err(content)
    }

    fn parse(text: &str) -> Result<Self, Refused> {
        if text.trim().is_empty() {
            return Err((
                Place::START,
                format!("the file is empty; it must begin with apiVersion: {GROUP}/{VERSION}"),
            ));
        }
        // First what every version has, so that a newer file is refused for its version and not for its fields.
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
    type Error = Refused;

    fn try_from(raw: RawConfiguration) -> Result<Self, Refused> {
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
        let mut kinds = Vec::new();
        for (index, raw) in raw.kinds.value.into_iter().enumerate() {
            let field = format!("kinds[{index}]");
            if let Some(line) = names.insert(raw.name.value.clone(), raw.name.referenced.line()) {
                return Err(at(
                    &raw.name,
                    format!(
                        "{field}.name {} stands on line {line} already; give each kind its own name",
                        shown(&raw.name)
                    ),
                ));
            }
            if let Some(resource) = &raw.resource_name
                && let Some(line) = resources.insert(resource.value.clone(), resource.referenced.line())
            {
                return Err(at(
                    resource,
                    format!(
                        "{field}.resourceName {} stands on line {line} already; put all paths of a resource into one kind",
                        shown(resource)
                    ),
                ));
            }
            kinds.push(raw.check(&field)?);
        }
        Ok(Self { kinds })
    }
}

impl RawKind {
    fn check(self, field: &str) -> Result<DeviceKind, Refused> {
        if !is_dns_label(&self.name.value) {
            return Err(at(
                &self.name,
                format!(
                    "{field}.name {} must be 1 to 63 of a-z, 0-9 and -, with a letter or digit at both ends",
                    shown(&self.name)
                ),
            ));
        }
        let doors = RawDoors {
            name: &self.name,
            mode: self.mode.as_ref(),
            resource_name: self.resource_name.as_ref(),
            extended_resource_devices: self.extended_resource_devices.as_ref(),
            shares: self.shares.as_ref(),
            cdi_devices: self.cdi_devices.as_ref(),
            pre_start_check: self.pre_start_check.as_ref(),
        }
        .check(field)?;
        let permissions = self
            .permissions
            .as_ref()
            .map_or_else(|| Ok("rw".to_owned()), |raw| check_permissions(field, raw))?;
        if self.paths.value.is_empty() || self.paths.value.len() > PATHS_MAX {
            return Err(at(
                &self.paths,
                format!(
                    "{field}.paths has {} entries; 1 to {PATHS_MAX} are allowed",
                    self.paths.value.len()
                ),
            ));
        }
        let path = |(index, raw): (usize, &Spanned<String>)| {
            PathPattern::parse(&raw.value).map_err(|error: PatternError| {
                at(raw, format!("{field}.paths[{index}] {} {error}", shown(raw)))
            })
        };
        let paths = self
            .paths
            .value
            .iter()
            .enumerate()
            .map(path)
            .collect::<Result<_, _>>()?;
        Ok(DeviceKind {
            name: self.name.value,
            doors,
            paths,
            permissions,
        })
    }
}

fn check_permissions(field: &str, raw: &Spanned<String>) -> Result<String, Refused> {
    let ordered: String = "rwm"
        .chars()
        .filter(|&character| raw.value.contains(character))
        .collect();
    // Equal lengths mean that no character stood twice and none was another.
    if ordered.is_empty() || ordered.len() != raw.value.len() {
        return Err(at(
            raw,
            format!(
                "{field}.permissions {} must be one or more of r, w and m, each once, for instance rw",
                shown(raw)
            ),
        ));
    }
    Ok(ordered)
}

fn from_yaml<'de, T: Deserialize<'de>>(text: &'de str) -> Result<T, Refused> {
    let options = serde_saphyr::options! {
        // No anchors and no aliases: nothing here needs them, and they are how a small file becomes a huge one.
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
        let place = error.location().map_or(Place::START, Place::of);
        let problem: String = error
            .without_snippet()
            .to_string()
            .chars()
            .filter(|c| !c.is_control())
            .take(300)
            .collect();
        (place, problem)
    })
}

fn at<T>(raw: &Spanned<T>, problem: String) -> Refused {
    (Place::of(raw.referenced), problem)
}

fn shown(raw: &Spanned<String>) -> String {
    let mut text: String = raw.value.chars().take(SHOWN_MAX).collect();
    if text.len() < raw.value.len() {
        text.push('…');
    }
    format!("{text:?}")
}

fn not_utf8(error: &std::string::FromUtf8Error) -> Refused {
    let good = error
        .as_bytes()
        .get(..error.utf8_error().valid_up_to())
        .unwrap_or_default();
    let mut lines = good.split(|&byte| byte == b'\n');
    let column = lines.next_back().map_or(0, <[u8]>::len) as u64 + 1;
    (
        Place {
            line: lines.count() as u64 + 1,
            column,
        },
        "the file is not UTF-8 from here on; save it as UTF-8".to_owned(),
    )
}

#[cfg(test)]
mod tests;
