//! The APIs that offer a kind's devices.

use serde_saphyr::Spanned;

use super::error::{ContentError, at, shown};
use crate::api::crd::{GROUP, Mode};
use crate::core::names::{check_extended_resource, is_dns_label};
use crate::core::prepare::device_plugin::ExtendedResource;

/// Maximum number of names in `extendedResourceDevices`.
pub(super) const NAMES_MAX: usize = 1024;

/// The values of `mode`.
pub(super) const MODES: [&str; 4] = ["claims", "extended-resource", "split", "both"];

/// The APIs that offer a kind's devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KindApis {
    /// The assignment of devices to APIs.
    pub mode: KindMode,
    /// Whether containers get devices of the extended resource by CDI name.
    pub cdi_devices: bool,
    /// Whether devices of the extended resource are checked before each start of a container.
    pub pre_start_check: bool,
}

/// The assignment of a kind's devices to APIs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KindMode {
    /// ResourceClaims only.
    Claims,
    /// The device plugin API only.
    ExtendedResource {
        /// Resource name, unique in the file.
        resource_name: String,
    },
    /// The listed devices through the device plugin API, the others through ResourceClaims.
    Split {
        /// Resource name, unique in the file.
        resource_name: String,
        /// Names of the devices for the device plugin API.
        extended_resource_devices: Vec<String>,
    },
    /// Both APIs; a device goes to the first request.
    Both {
        /// Resource name, unique in the file.
        resource_name: String,
    },
}

impl Default for KindApis {
    fn default() -> Self {
        Self {
            mode: KindMode::Claims,
            cdi_devices: false,
            pre_start_check: false,
        }
    }
}

impl KindApis {
    /// The mode of a device of the kind, by device name.
    pub fn mode_of(&self, device: &str) -> Mode {
        match &self.mode {
            KindMode::Claims => Mode::Claims,
            KindMode::ExtendedResource { .. } => Mode::ExtendedResource,
            KindMode::Both { .. } => Mode::Both,
            KindMode::Split {
                extended_resource_devices,
                ..
            } => {
                if extended_resource_devices.iter().any(|name| name == device) {
                    Mode::ExtendedResource
                } else {
                    Mode::Claims
                }
            }
        }
    }

    /// The extended resource of the kind, with its name; `None` if it has none.
    pub fn extended_resource(&self, kind: &str) -> Option<(String, ExtendedResource)> {
        let (resource_name, also_by_claims) = match &self.mode {
            KindMode::Claims => return None,
            KindMode::ExtendedResource { resource_name } | KindMode::Split { resource_name, .. } => {
                (resource_name, false)
            }
            KindMode::Both { resource_name } => (resource_name, true),
        };
        let resource = ExtendedResource {
            kind: kind.to_owned(),
            also_by_claims,
            cdi_devices: self.cdi_devices,
            pre_start_check: self.pre_start_check,
        };
        Some((resource_name.clone(), resource))
    }
}

/// The raw fields about APIs.
pub(super) struct RawApis<'a> {
    pub(super) name: &'a Spanned<String>,
    pub(super) mode: Option<&'a Spanned<String>>,
    pub(super) resource_name: Option<&'a Spanned<String>>,
    pub(super) extended_resource_devices: Option<&'a Spanned<Vec<Spanned<String>>>>,
    pub(super) shares: Option<&'a Spanned<u32>>,
    pub(super) cdi_devices: Option<&'a Spanned<bool>>,
    pub(super) pre_start_check: Option<&'a Spanned<bool>>,
}

impl RawApis<'_> {
    /// `shares` is the effective value, which may come from the preset.
    pub(super) fn check(&self, field: &str, shares: Option<u32>) -> Result<KindApis, ContentError> {
        let mode = self.check_mode(field)?;
        for (name, raw) in [
            ("cdiDevices", self.cdi_devices),
            ("preStartCheck", self.pre_start_check),
        ] {
            if let (KindMode::Claims, Some(raw)) = (&mode, raw) {
                return Err(at(
                    raw,
                    format!("{field}.{name} is for extended resources only; remove it or set another mode"),
                ));
            }
        }
        if matches!(mode, KindMode::Both { .. }) && shares.is_some_and(|shares| shares > 1) {
            let problem = format!(
                "{field}.shares must be 1 with mode both, which is for exclusive devices; write shares: 1 or choose another mode"
            );
            return Err(match (self.shares, self.mode) {
                (Some(raw), _) => at(raw, problem),
                (None, mode) => at(mode.unwrap_or(self.name), problem),
            });
        }
        Ok(KindApis {
            mode,
            cdi_devices: self.cdi_devices.is_some_and(|raw| raw.value),
            pre_start_check: self.pre_start_check.is_some_and(|raw| raw.value),
        })
    }

    fn check_mode(&self, field: &str) -> Result<KindMode, ContentError> {
        let mode = self.mode.map_or("claims", |mode| mode.value.as_str());
        if !MODES.contains(&mode) {
            let raw = self.mode.unwrap_or(self.name);
            return Err(at(
                raw,
                format!(
                    "{field}.mode {} must be claims, extended-resource, split or both",
                    shown(raw)
                ),
            ));
        }
        if let (Some(names), true) = (self.extended_resource_devices, mode != "split") {
            return Err(at(
                names,
                format!(
                    "{field}.extendedResourceDevices is for mode split only; remove it or set mode: split"
                ),
            ));
        }
        let resource_name = match (mode, self.resource_name) {
            ("claims", None) => return Ok(KindMode::Claims),
            ("claims", Some(resource)) => {
                return Err(at(
                    resource,
                    format!(
                        "{field}.resourceName is for mode extended-resource, split and both only; remove it or set mode: extended-resource"
                    ),
                ));
            }
            (_, Some(resource)) => {
                check_extended_resource(&resource.value)
                    .map_err(|error| at(resource, format!("{field}.resourceName: {error}")))?;
                resource.value.clone()
            }
            (_, None) => {
                return Err(at(
                    self.mode.unwrap_or(self.name),
                    format!(
                        "{field}.resourceName is missing; mode {mode} needs one, for instance {GROUP}/{}",
                        self.name.value
                    ),
                ));
            }
        };
        Ok(match mode {
            "both" => KindMode::Both { resource_name },
            "split" => KindMode::Split {
                resource_name,
                extended_resource_devices: self.check_names(field)?,
            },
            _ => KindMode::ExtendedResource { resource_name },
        })
    }

    fn check_names(&self, field: &str) -> Result<Vec<String>, ContentError> {
        let Some(names) = self.extended_resource_devices else {
            return Err(at(
                self.mode.unwrap_or(self.name),
                format!(
                    "{field}.extendedResourceDevices is missing; mode split needs the names of the devices that go to the extended resource, as `drayman devices` lists them"
                ),
            ));
        };
        if names.value.is_empty() || names.value.len() > NAMES_MAX {
            return Err(at(
                names,
                format!(
                    "{field}.extendedResourceDevices has {} entries; 1 to {NAMES_MAX} are allowed",
                    names.value.len()
                ),
            ));
        }
        let name = |(index, raw): (usize, &Spanned<String>)| {
            if is_dns_label(&raw.value) {
                Ok(raw.value.clone())
            } else {
                Err(at(
                    raw,
                    format!(
                        "{field}.extendedResourceDevices[{index}] {} is not the name of a device: 1 to 63 of a-z, 0-9 and -, with a letter or digit at both ends",
                        shown(raw)
                    ),
                ))
            }
        };
        names.value.iter().enumerate().map(name).collect()
    }
}
