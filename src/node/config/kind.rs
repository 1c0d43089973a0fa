//! One kind of the file, with all its fields and their schema.

use std::collections::{BTreeMap, BTreeSet};

use schemars::generate::SchemaSettings;
use schemars::transform::RecursiveTransform;
use schemars::{JsonSchema, Schema};
use serde::Deserialize;
use serde_json::Value;
use serde_saphyr::Spanned;

use super::error::{ContentError, Position, at, shown};
use super::extras::{self, Probe};
use super::kubelet_apis::{KindApis, MODES, NAMES_MAX, RawApis};
use super::preset::{PRESETS, Preset};
use super::schema;
use super::source::{self, Source};

use crate::core::names::is_dns_label;
use crate::core::prepare::container_edits::Mount;

/// Maximum number of holders of a device.
const SHARES_MAX: u32 = 1024;

/// One kind of device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceKind {
    /// A DNS label, unique in the file.
    pub name: String,
    /// The APIs that offer its devices: claims, an extended resource, or both.
    pub apis: KindApis,
    /// The source of its devices.
    pub source: Source,
    /// Access to the device nodes in a container: a non-empty subset of `rwm`, in that order.
    pub permissions: String,
    /// How many holders may share a device; one if unset.
    pub shares: Option<u32>,
    /// Paths of device nodes in the container, by entry of the source; a node without an entry keeps its path. May contain the
    /// placeholders `{device}`, `{key}` and `{n}`.
    pub container_paths: BTreeMap<String, String>,
    /// Additional mounts in the container.
    pub mounts: Vec<Mount>,
    /// Additional environment variables in the container.
    pub environment: BTreeMap<String, String>,
    /// Paths below `/dev` of dangerous devices that the operator explicitly allows.
    pub dangerous_paths: BTreeSet<String>,
    /// Health probe of its devices.
    pub probe: Probe,
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
#[schemars(extend(
    "oneOf" = [
        { "required": ["preset"] }, { "required": ["paths"] }, { "required": ["groups"] }, { "required": ["usb"] }, { "required": ["pci"] },
    ],
    "anyOf" = [{ "required": ["name"] }, { "required": ["preset"] }],
    "if" = { "required": ["mode"], "properties": { "mode": { "enum": MODES[1..] } } },
    "then" = { "required": ["resourceName"] },
    "else" = { "not": { "anyOf": [
        { "required": ["resourceName"] }, { "required": ["cdiDevices"] }, { "required": ["preStartCheck"] },
    ] } },
    "allOf" = rules_of_modes()
))]
pub(super) struct RawKind {
    /// Unique name that classes refer to; default: the preset's name.
    #[schemars(with = "schema::DnsLabel")]
    pub(super) name: Option<Spanned<String>>,
    /// Name of a predefined kind.
    #[schemars(with = "String", extend("enum" = presets()))]
    pub(super) preset: Option<Spanned<String>>,
    /// claims: through ResourceClaims; extended-resource: through resources.limits; split: a fixed division; both: each device through the
    /// API that requests it first.
    #[schemars(with = "String", extend("enum" = MODES))]
    mode: Option<Spanned<String>>,
    /// Unique name of the extended resource; for every mode but claims.
    #[schemars(with = "schema::ResourceName")]
    pub(super) resource_name: Option<Spanned<String>>,
    /// For mode split: names of the devices of the extended resource.
    #[schemars(with = "Vec<schema::DnsLabel>", length(min = 1, max = NAMES_MAX))]
    extended_resource_devices: Option<Spanned<Vec<Spanned<String>>>>,
    /// Give containers with the extended resource CDI names instead of device nodes.
    #[schemars(with = "bool")]
    cdi_devices: Option<Spanned<bool>>,
    /// Check a device of the extended resource before each start of its container.
    #[schemars(with = "bool")]
    pre_start_check: Option<Spanned<bool>>,
    /// Shell patterns below /dev/; each matching node is a device.
    #[schemars(with = "Vec<schema::Pattern>", length(min = 1, max = source::ENTRIES_MAX))]
    paths: Option<Spanned<Vec<Spanned<String>>>>,
    /// Patterns of nodes that form one device.
    #[schemars(with = "Vec<source::RawGroup>", length(min = 1, max = source::ENTRIES_MAX))]
    groups: Option<Spanned<Vec<source::RawGroup>>>,
    /// USB devices.
    #[schemars(with = "source::RawUsb")]
    usb: Option<Spanned<source::RawUsb>>,
    /// PCI devices.
    #[schemars(with = "source::RawPci")]
    pci: Option<Spanned<source::RawPci>>,
    /// Container access: r read, w write, m mknod.
    #[schemars(with = "schema::Permissions")]
    pub(super) permissions: Option<Spanned<String>>,
    /// Maximum number of holders of a device.
    #[schemars(with = "u32", range(min = 1, max = SHARES_MAX))]
    shares: Option<Spanned<u32>>,
    /// Container paths by pattern or subsystem.
    #[schemars(with = "BTreeMap<String, schema::ContainerPath>", extend("maxProperties" = extras::ENTRIES_MAX))]
    pub(super) container_paths: Option<Spanned<BTreeMap<String, Spanned<String>>>>,
    /// Additional mounts.
    #[schemars(with = "Vec<extras::RawMount>", length(max = extras::ENTRIES_MAX))]
    pub(super) mounts: Option<Spanned<Vec<extras::RawMount>>>,
    /// Additional environment variables.
    #[schemars(
        with = "BTreeMap<String, schema::VariableValue>",
        extend("maxProperties" = extras::ENTRIES_MAX, "propertyNames" = schema::variable_name())
    )]
    environment: Option<Spanned<BTreeMap<String, Spanned<String>>>>,
    /// Exact paths of dangerous devices to offer anyway.
    #[schemars(with = "Vec<schema::DevicePath>", length(max = extras::ENTRIES_MAX))]
    dangerous_paths: Option<Spanned<Vec<Spanned<String>>>>,
    /// Health probe.
    #[schemars(with = "extras::RawHealth")]
    health: Option<extras::RawHealth>,
}

impl RawKind {
    pub(super) fn check(&self, field: &str, whole: Position) -> Result<DeviceKind, ContentError> {
        let preset = self
            .preset
            .as_ref()
            .map(|raw| check_preset(field, raw))
            .transpose()?;
        let Some(name) = self.name.as_ref().or(self.preset.as_ref()) else {
            return Err((
                whole,
                format!("{field}.name is missing; a kind needs a name, for instance camera"),
            ));
        };
        if !is_dns_label(&name.value) {
            return Err(at(
                name,
                format!(
                    "{field}.name {} must be 1 to 63 of a-z, 0-9 and -, with a letter or digit at both ends",
                    shown(name)
                ),
            ));
        }
        let permissions = self.permissions.as_ref().map_or_else(
            || Ok(preset.map_or("rw", |preset| preset.permissions).to_owned()),
            |raw| check_permissions(field, raw),
        )?;
        let source = self.source(field, whole, preset)?;
        let shares = match &self.shares {
            None => preset.and_then(|preset| preset.shares),
            Some(raw) if (1..=SHARES_MAX).contains(&raw.value) => Some(raw.value),
            Some(raw) => {
                let problem = format!("{field}.shares {} must be 1 to {SHARES_MAX}", raw.value);
                return Err(at(raw, problem));
            }
        };
        let apis = RawApis {
            name,
            mode: self.mode.as_ref(),
            resource_name: self.resource_name.as_ref(),
            extended_resource_devices: self.extended_resource_devices.as_ref(),
            shares: self.shares.as_ref(),
            cdi_devices: self.cdi_devices.as_ref(),
            pre_start_check: self.pre_start_check.as_ref(),
        }
        .check(field, shares)?;
        let container_paths = self.container_paths.as_ref().map_or_else(
            || Ok(BTreeMap::new()),
            |raw| extras::container_paths(field, &source, raw),
        )?;
        Ok(DeviceKind {
            name: name.value.clone(),
            apis,
            container_paths,
            source,
            permissions,
            shares,
            mounts: self
                .mounts
                .as_ref()
                .map_or_else(|| Ok(Vec::new()), |raw| extras::mounts(field, raw))?,
            environment: self
                .environment
                .as_ref()
                .map_or_else(|| Ok(BTreeMap::new()), |raw| extras::environment(field, raw))?,
            dangerous_paths: self
                .dangerous_paths
                .as_ref()
                .map_or_else(|| Ok(BTreeSet::new()), |raw| extras::dangerous_paths(field, raw))?,
            probe: self
                .health
                .as_ref()
                .map_or_else(|| Ok(Probe::default()), |raw| extras::health(field, raw))?,
        })
    }

    /// The kind's only source of devices.
    fn source(&self, field: &str, whole: Position, preset: Option<&Preset>) -> Result<Source, ContentError> {
        let sources = [
            ("preset", preset.map(|preset| Ok(preset.source()))),
            ("paths", self.paths.as_ref().map(|raw| source::paths(field, raw))),
            (
                "groups",
                self.groups.as_ref().map(|raw| source::groups(field, raw)),
            ),
            ("usb", self.usb.as_ref().map(|raw| source::usb(field, &raw.value))),
            ("pci", self.pci.as_ref().map(|raw| source::pci(field, &raw.value))),
        ];
        let (names, mut sources): (Vec<&str>, Vec<_>) = sources
            .into_iter()
            .filter_map(|(name, source)| Some((name, source?)))
            .unzip();
        match (names.as_slice(), sources.pop()) {
            ([_], Some(source)) => source,
            ([], _) => Err((
                whole,
                format!("{field} has no source of devices; give paths, groups, usb, pci or preset"),
            )),
            (several, _) => Err((
                whole,
                format!(
                    "{field} has {}; only one of them is allowed, so put the others into their own kinds",
                    several.join(" and ")
                ),
            )),
        }
    }
}

fn check_preset(field: &str, raw: &Spanned<String>) -> Result<&'static Preset, ContentError> {
    Preset::named(&raw.value).ok_or_else(|| {
        let names: Vec<&str> = PRESETS.iter().map(|preset| preset.name).collect();
        at(
            raw,
            format!(
                "{field}.preset {} must be one of {}",
                shown(raw),
                names.join(", ")
            ),
        )
    })
}

fn check_permissions(field: &str, raw: &Spanned<String>) -> Result<String, ContentError> {
    let ordered: String = "rwm"
        .chars()
        .filter(|&character| raw.value.contains(character))
        .collect();
    // Equal lengths mean that there is no duplicate and no other character.
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

/// Returns the schema of an entry of `kinds`, in the JSON Schema draft that Helm reads.
pub fn kind_schema() -> Schema {
    let mut settings = SchemaSettings::draft07();
    settings.inline_subschemas = true;
    settings.meta_schema = None;
    // `default` is null for each optional field, and `format` names a type of Rust.
    let clean = RecursiveTransform(|schema: &mut Schema| {
        for keyword in ["default", "format", "title"] {
            schema.remove(keyword);
        }
    });
    let generator = settings.with_transform(clean).into_generator();
    generator.into_root_schema_for::<RawKind>()
}

fn presets() -> Vec<&'static str> {
    PRESETS.iter().map(|preset| preset.name).collect()
}

/// Presets that are shared unless the kind says otherwise.
fn shared_presets() -> Vec<&'static str> {
    let shared = PRESETS.iter().filter(|preset| preset.shares.is_some());
    shared.map(|preset| preset.name).collect()
}

/// Rules on the fields about APIs together.
fn rules_of_modes() -> Value {
    let is_mode =
        |mode: &str| serde_json::json!({ "required": ["mode"], "properties": { "mode": { "const": mode } } });
    serde_json::json!([
        {
            "if": is_mode("split"),
            "then": { "required": ["extendedResourceDevices"] },
            "else": { "not": { "required": ["extendedResourceDevices"] } },
        },
        {
            "if": is_mode("both"),
            "then": {
                "properties": { "shares": { "const": 1 } },
                "if": { "required": ["preset"], "properties": { "preset": { "enum": shared_presets() } } },
                "then": { "required": ["shares"] },
            },
        },
    ])
}
