//! JSON schema of a kind. The chart's schema is generated from it, so the chart rejects the same configuration as the companion, except for
//! rules that depend on other fields or on the host.
#![expect(dead_code, reason = "types of the schema, whose values the parser checks")]

use schemars::JsonSchema;
use serde_json::Value;

use super::pattern::LENGTH_MAX;
use crate::core::names::ENVIRONMENT_PREFIX;

/// Largest path, in bytes.
pub(super) const PATH_MAX: usize = 256;
/// Largest value of a variable, in bytes.
pub(super) const VALUE_MAX: usize = 4096;
/// The node of a USB device itself, `/dev/bus/usb/BBB/DDD`.
pub const NODE_BUS: &str = "bus";
/// The VFIO group of a PCI device, `/dev/vfio/<group>`, together with `/dev/vfio/vfio`.
pub const NODE_VFIO: &str = "vfio";

/// A DNS label.
#[derive(JsonSchema)]
#[schemars(inline)]
pub(super) struct DnsLabel(
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
