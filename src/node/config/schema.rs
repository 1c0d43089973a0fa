//! JSON schema of a kind. The chart's schema is generated from it, so the chart rejects the same configuration as the companion, except for
//! rules that depend on other fields or on the host.
#![expect(dead_code, reason = "types of the schema, whose values the parser checks")]

use schemars::generate::SchemaSettings;
use schemars::transform::RecursiveTransform;
use schemars::{JsonSchema, Schema};
use serde_json::Value;

use super::PRESETS;
use super::extras::{PATH_MAX, VALUE_MAX};
use super::kind::RawKind;
use super::pattern::LENGTH_MAX;
use super::source::{NODE_BUS, NODE_VFIO};
use crate::core::prepare::names::ENVIRONMENT_PREFIX;

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

pub(super) fn presets() -> Vec<&'static str> {
    PRESETS.iter().map(|preset| preset.name).collect()
}

/// Presets that are shared unless the kind says otherwise.
fn shared_presets() -> Vec<&'static str> {
    let shared = PRESETS.iter().filter(|preset| preset.shares.is_some());
    shared.map(|preset| preset.name).collect()
}

/// Rules on the fields about APIs together.
pub(super) fn rules_of_modes() -> Value {
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

/// A DNS label.
#[derive(JsonSchema)]
#[schemars(inline)]
pub(super) struct Label(
    #[schemars(length(max = 63), regex(pattern = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"))] String,
);

/// Name of an extended resource.
#[derive(JsonSchema)]
#[schemars(inline)]
pub(super) struct ResourceName(
    #[schemars(
        length(max = 308),
        regex(
            pattern = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
        ),
        extend("not" = { "pattern": r"kubernetes\.io/|^requests\.|^[^/]{245}" })
    )]
    String,
);

/// Any shell pattern below `/dev`.
const PATTERN: &str = r"^/dev(/([^/\[\x00-\x1f\x7f-\x9f]|\[![^/\x00-\x1f\x7f-\x9f][^/\]\x00-\x1f\x7f-\x9f]*\]|\[[^!/\x00-\x1f\x7f-\x9f][^/\]\x00-\x1f\x7f-\x9f]*\])+)+$";

/// Shell pattern below /dev/.
#[derive(JsonSchema)]
#[schemars(inline)]
pub(super) struct Pattern(
    #[schemars(
        length(max = LENGTH_MAX),
        regex(pattern = PATTERN),
        extend("not" = { "pattern": r"/\.\.?(/|$)|\*\*|\{key\}" })
    )]
    String,
);

/// Shell pattern below /dev/, which may contain {key}.
#[derive(JsonSchema)]
#[schemars(inline)]
pub(super) struct PatternOfGroup(
    #[schemars(
        length(max = LENGTH_MAX),
        regex(pattern = PATTERN),
        extend("not" = { "pattern": r"/\.\.?(/|$)|\*\*|\{key\}.*\{key\}|\{key\}[^/]*[*?\[]|[*?\[][^/]*\{key\}" })
    )]
    String,
);

/// Path of one device node.
#[derive(JsonSchema)]
#[schemars(inline)]
pub(super) struct DevicePath(
    #[schemars(
        length(max = LENGTH_MAX),
        regex(pattern = r"^/dev(/[^/*?\[\x00-\x1f\x7f-\x9f]+)+$"),
        extend("not" = { "pattern": r"/\.\.?(/|$)|\{key\}" })
    )]
    String,
);

/// Path of a device node in the container, with the placeholders {device}, {key} and {n}.
#[derive(JsonSchema)]
#[schemars(inline)]
pub(super) struct ContainerPath(
    #[schemars(
        length(max = PATH_MAX),
        regex(pattern = r"^/dev(/([^/{}:,\x00-\x1f\x7f-\x9f]|\{(device|key|n)\})+)+$"),
        extend("not" = { "pattern": r"/\.\.?(/|$)" })
    )]
    String,
);

/// Absolute path.
#[derive(JsonSchema)]
#[schemars(inline)]
pub(super) struct MountPath(
    #[schemars(
        length(max = PATH_MAX),
        regex(pattern = r"^(/[^/:,\x00-\x1f\x7f-\x9f]+)+$"),
        extend("not" = { "pattern": r"/\.\.?(/|$)" })
    )]
    String,
);

/// Relative path.
#[derive(JsonSchema)]
#[schemars(inline)]
pub(super) struct SysfsFile(
    #[schemars(
        length(max = PATH_MAX),
        regex(pattern = r"^[^/\x00-\x1f\x7f-\x9f]+(/[^/\x00-\x1f\x7f-\x9f]+)*$"),
        extend("not" = { "pattern": r"(^|/)\.\.?(/|$)" })
    )]
    String,
);

/// Value of an environment variable.
#[derive(JsonSchema)]
#[schemars(inline)]
pub(super) struct VariableValue(
    #[schemars(length(max = VALUE_MAX), regex(pattern = r"^[^\x00-\x1f\x7f-\x9f]*$"))] String,
);

/// The schema of a variable's name.
pub(super) fn variable_name() -> Value {
    serde_json::json!({
        "pattern": "^[A-Za-z_][A-Za-z0-9_]{0,127}$",
        "not": { "pattern": format!("^{ENVIRONMENT_PREFIX}") },
    })
}

/// Subset of rwm.
#[derive(JsonSchema)]
#[schemars(inline)]
pub(super) struct Permissions(
    #[schemars(
        regex(pattern = r"^[rwm]{1,3}$"),
        extend("not" = { "pattern": "r.*r|w.*w|m.*m" })
    )]
    String,
);

/// Four hexadecimal digits.
#[derive(JsonSchema)]
#[schemars(inline)]
pub(super) struct Id(#[schemars(regex(pattern = r"^[0-9A-Fa-f]{4}$"))] String);

/// Text that is compared as a whole.
#[derive(JsonSchema)]
#[schemars(inline)]
pub(super) struct Plain(
    #[schemars(length(min = 1, max = 255), regex(pattern = r"^[^\x00-\x1f\x7f-\x9f]*$"))] String,
);

/// Two, four or six hexadecimal digits in lower case.
#[derive(JsonSchema)]
#[schemars(inline)]
pub(super) struct PciClass(#[schemars(regex(pattern = r"^([0-9a-f]{2}){1,3}$"))] String);

/// PCI address, such as 0000:65:00.0.
#[derive(JsonSchema)]
#[schemars(inline)]
pub(super) struct PciAddress(
    #[schemars(regex(pattern = r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$"))] String,
);

/// bus, or a subsystem of the kernel.
#[derive(JsonSchema)]
#[schemars(inline)]
pub(super) struct UsbNode(
    #[schemars(regex(pattern = r"^[A-Za-z0-9_-]{1,63}$"), extend("not" = { "const": NODE_VFIO }))] String,
);

/// vfio, or a subsystem of the kernel.
#[derive(JsonSchema)]
#[schemars(inline)]
pub(super) struct PciNode(
    #[schemars(regex(pattern = r"^[A-Za-z0-9_-]{1,63}$"), extend("not" = { "const": NODE_BUS }))] String,
);
