//! Sources of devices: paths, groups of paths, USB and PCI.

use schemars::JsonSchema;
use serde::Deserialize;
use serde_saphyr::Spanned;

use super::error::{ContentError, at, at_most, shown};
use super::pattern::{PathPattern, PatternError};
use super::schema::{Id, NODE_BUS, NODE_VFIO, PatternOfGroup, PciAddress, PciClass, PciNode, Plain, UsbNode};
use crate::core::discovery::pci::PciMatch;
use crate::core::discovery::usb::{UsbIdentity, UsbMatch};

/// Maximum number of entries in a list.
pub(super) const ENTRIES_MAX: usize = 64;
/// Path of the VFIO container below `/dev`. Every user of a VFIO group also opens it.
pub const VFIO_CONTAINER: &str = "vfio/vfio";

/// The source of a kind's devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// One device per device node that matches a pattern.
    Paths(Vec<PathPattern>),
    /// One device per group of device nodes.
    Groups(Vec<NodeGroup>),
    /// USB devices with their device nodes.
    Usb(UsbSource),
    /// PCI devices with their device nodes.
    Pci(PciSource),
}

/// Device nodes that together form a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeGroup {
    /// Required nodes; the first one identifies the device.
    pub required: Vec<PathPattern>,
    /// Nodes that are included if present.
    pub optional: Vec<PathPattern>,
    /// Nodes that are included with every device of the kind but belong to none.
    pub shared: Vec<PathPattern>,
}

/// Selects USB devices and their nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsbSource {
    /// A device must match at least one of these.
    pub matching: Vec<UsbMatch>,
    /// Required device nodes: [`NODE_BUS`] or subsystems.
    pub nodes: Vec<String>,
    /// Device nodes that are included if present.
    pub optional_nodes: Vec<String>,
    /// Whether hubs match too.
    pub hubs: bool,
    /// The property that identifies a device.
    pub identity: UsbIdentity,
}

/// Selects PCI devices and their nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PciSource {
    /// A function must match at least one of these.
    pub matching: Vec<PciMatch>,
    /// Required device nodes: [`NODE_VFIO`] or subsystems.
    pub nodes: Vec<String>,
    /// Device nodes that are included if present.
    pub optional_nodes: Vec<String>,
}

impl Source {
    /// The patterns or nodes that `containerPaths` may refer to.
    pub fn entries(&self) -> Vec<&str> {
        match self {
            Self::Paths(paths) => paths.iter().map(PathPattern::text).collect(),
            Self::Groups(groups) => {
                let all = groups
                    .iter()
                    .flat_map(|group| group.required.iter().chain(&group.optional).chain(&group.shared));
                all.map(PathPattern::text).collect()
            }
            Self::Usb(usb) => strings(&usb.nodes, &usb.optional_nodes),
            Self::Pci(pci) => strings(&pci.nodes, &pci.optional_nodes),
        }
    }
}

fn strings<'a>(first: &'a [String], second: &'a [String]) -> Vec<&'a str> {
    first.iter().chain(second).map(String::as_str).collect()
}

#[derive(Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(extend(
    "if" = { "properties": { "required": { "contains": { "pattern": r"\{key\}" } } } },
    "then" = { "properties": { "required": { "items": [{ "pattern": r"\{key\}" }] } } },
    "else" = { "properties": {
        "optional": { "items": { "not": { "pattern": r"\{key\}" } } },
        "shared": { "items": { "not": { "pattern": r"\{key\}" } } },
    } }
))]
pub(super) struct RawGroup {
    /// Nodes that must exist.
    #[schemars(with = "Vec<PatternOfGroup>", length(min = 1, max = ENTRIES_MAX))]
    required: Spanned<Vec<Spanned<String>>>,
    /// Nodes that are added if they exist.
    #[serde(default)]
    #[schemars(with = "Vec<PatternOfGroup>", length(max = ENTRIES_MAX))]
    optional: Option<Spanned<Vec<Spanned<String>>>>,
    /// Nodes that are added to each device and belong to none.
    #[serde(default)]
    #[schemars(with = "Vec<PatternOfGroup>", length(max = ENTRIES_MAX))]
    shared: Option<Spanned<Vec<Spanned<String>>>>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct RawUsb {
    /// A device must match one entry.
    #[serde(rename = "match")]
    #[schemars(with = "Vec<RawUsbMatch>", length(min = 1, max = ENTRIES_MAX))]
    matching: Spanned<Vec<Spanned<RawUsbMatch>>>,
    /// Nodes that must exist; default: bus.
    #[serde(default)]
    #[schemars(with = "Vec<UsbNode>", length(min = 1, max = ENTRIES_MAX), extend("uniqueItems" = true))]
    nodes: Option<Spanned<Vec<Spanned<String>>>>,
    /// Nodes that are added if they exist.
    #[serde(default)]
    #[schemars(with = "Vec<UsbNode>", length(max = ENTRIES_MAX), extend("uniqueItems" = true))]
    optional_nodes: Option<Spanned<Vec<Spanned<String>>>>,
    /// Whether to include hubs.
    #[serde(default)]
    hubs: bool,
    /// Identity of a device.
    #[serde(default)]
    #[schemars(with = "String", extend("enum" = ["serial", "port"]))]
    identity: Option<Spanned<String>>,
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
#[schemars(extend("minProperties" = 1))]
struct RawUsbMatch {
    /// The vendor: four hexadecimal digits.
    #[schemars(with = "Id")]
    vendor: Option<Spanned<String>>,
    /// The product: four hexadecimal digits.
    #[schemars(with = "Id")]
    product: Option<Spanned<String>>,
    /// The serial number.
    #[schemars(with = "Plain")]
    serial: Option<Spanned<String>>,
    /// The port.
    #[schemars(with = "Plain")]
    port: Option<Spanned<String>>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct RawPci {
    /// A function must match one entry.
    #[serde(rename = "match")]
    #[schemars(with = "Vec<RawPciMatch>", length(min = 1, max = ENTRIES_MAX))]
    matching: Spanned<Vec<Spanned<RawPciMatch>>>,
    /// Nodes that must exist; default: vfio.
    #[serde(default)]
    #[schemars(with = "Vec<PciNode>", length(min = 1, max = ENTRIES_MAX), extend("uniqueItems" = true))]
    nodes: Option<Spanned<Vec<Spanned<String>>>>,
    /// Nodes that are added if they exist.
    #[serde(default)]
    #[schemars(with = "Vec<PciNode>", length(max = ENTRIES_MAX), extend("uniqueItems" = true))]
    optional_nodes: Option<Spanned<Vec<Spanned<String>>>>,
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
#[schemars(extend("minProperties" = 1))]
struct RawPciMatch {
    /// The vendor: four hexadecimal digits.
    #[schemars(with = "Id")]
    vendor: Option<Spanned<String>>,
    /// The device: four hexadecimal digits.
    #[schemars(with = "Id")]
    device: Option<Spanned<String>>,
    /// The class: two, four or six hexadecimal digits in lower case.
    #[schemars(with = "PciClass")]
    class: Option<Spanned<String>>,
    /// The kernel driver.
    #[schemars(with = "Plain")]
    driver: Option<Spanned<String>>,
    /// The address, such as 0000:65:00.0.
    #[schemars(with = "PciAddress")]
    address: Option<Spanned<String>>,
}

/// Validates the field `paths`.
pub(super) fn paths(field: &str, raw: &Spanned<Vec<Spanned<String>>>) -> Result<Source, ContentError> {
    Ok(Source::Paths(patterns(
        &format!("{field}.paths"),
        raw,
        PathPattern::parse,
    )?))
}

fn patterns(
    field: &str,
    raw: &Spanned<Vec<Spanned<String>>>,
    parse: impl Fn(&str) -> Result<PathPattern, PatternError>,
) -> Result<Vec<PathPattern>, ContentError> {
    count(field, raw)?;
    let pattern = |(index, raw): (usize, &Spanned<String>)| {
        parse(&raw.value).map_err(|error| at(raw, format!("{field}[{index}] {} {error}", shown(raw))))
    };
    raw.value.iter().enumerate().map(pattern).collect()
}

/// Rejects an empty list or one with too many entries.
fn count<T>(field: &str, raw: &Spanned<Vec<T>>) -> Result<(), ContentError> {
    if raw.value.is_empty() {
        return Err(at(
            raw,
            format!("{field} has 0 entries; 1 to {ENTRIES_MAX} are allowed"),
        ));
    }
    at_most(ENTRIES_MAX, field, raw, raw.value.len())
}

/// Validates the field `groups`.
pub(super) fn groups(field: &str, raw: &Spanned<Vec<RawGroup>>) -> Result<Source, ContentError> {
    count(&format!("{field}.groups"), raw)?;
    let mut groups = Vec::new();
    for (index, raw) in raw.value.iter().enumerate() {
        let field = format!("{field}.groups[{index}]");
        let required = patterns(
            &format!("{field}.required"),
            &raw.required,
            PathPattern::parse_of_group,
        )?;
        let keyed = required.iter().any(PathPattern::has_key);
        let others = |name: &str, raws: Option<&Spanned<Vec<Spanned<String>>>>| {
            let Some(raws) = raws else { return Ok(Vec::new()) };
            let field = format!("{field}.{name}");
            at_most(ENTRIES_MAX, &field, raws, raws.value.len())?;
            let pattern = |(index, raw): (usize, &Spanned<String>)| {
                let field = format!("{field}[{index}]");
                let pattern = PathPattern::parse_of_group(&raw.value)
                    .map_err(|error| at(raw, format!("{field} {} {error}", shown(raw))))?;
                if pattern.has_key() && !keyed {
                    let problem = format!(
                        "{field} {} has {{key}}, but no pattern in required has it; add it there",
                        shown(raw)
                    );
                    return Err(at(raw, problem));
                }
                Ok(pattern)
            };
            raws.value
                .iter()
                .enumerate()
                .map(pattern)
                .collect::<Result<Vec<_>, ContentError>>()
        };
        let first = required.first().is_some_and(PathPattern::has_key);
        if keyed && !first {
            let problem = format!(
                "{field}.required[0] must contain {{key}} if another pattern does: the first pattern identifies the device"
            );
            return Err(at(&raw.required, problem));
        }
        groups.push(NodeGroup {
            optional: others("optional", raw.optional.as_ref())?,
            shared: others("shared", raw.shared.as_ref())?,
            required,
        });
    }
    Ok(Source::Groups(groups))
}

/// Validates the field `usb`.
pub(super) fn usb(field: &str, raw: &RawUsb) -> Result<Source, ContentError> {
    let field = format!("{field}.usb");
    count(&format!("{field}.match"), &raw.matching)?;
    let mut matching = Vec::new();
    for (index, one) in raw.matching.value.iter().enumerate() {
        let field = format!("{field}.match[{index}]");
        let RawUsbMatch {
            vendor,
            product,
            serial,
            port,
        } = &one.value;
        if vendor.is_none() && product.is_none() && serial.is_none() && port.is_none() {
            let problem = format!("{field} is empty; give vendor, product, serial or port");
            return Err(at(one, problem));
        }
        matching.push(UsbMatch {
            vendor: id(&format!("{field}.vendor"), vendor.as_ref())?,
            product: id(&format!("{field}.product"), product.as_ref())?,
            serial: plain(&format!("{field}.serial"), serial.as_ref())?,
            port: plain(&format!("{field}.port"), port.as_ref())?,
        });
    }
    let identity = match &raw.identity {
        None => UsbIdentity::Serial,
        Some(raw) if raw.value == "serial" => UsbIdentity::Serial,
        Some(raw) if raw.value == "port" => UsbIdentity::Port,
        Some(raw) => {
            let problem = format!("{field}.identity {} must be serial or port", shown(raw));
            return Err(at(raw, problem));
        }
    };
    let (nodes, optional_nodes) = nodes(
        &field,
        raw.nodes.as_ref(),
        raw.optional_nodes.as_ref(),
        NODE_BUS,
        NODE_VFIO,
    )?;
    Ok(Source::Usb(UsbSource {
        matching,
        nodes,
        optional_nodes,
        hubs: raw.hubs,
        identity,
    }))
}

/// Validates the field `pci`.
pub(super) fn pci(field: &str, raw: &RawPci) -> Result<Source, ContentError> {
    let field = format!("{field}.pci");
    count(&format!("{field}.match"), &raw.matching)?;
    let mut matching = Vec::new();
    for (index, one) in raw.matching.value.iter().enumerate() {
        let field = format!("{field}.match[{index}]");
        let RawPciMatch {
            vendor,
            device,
            class,
            driver,
            address,
        } = &one.value;
        if vendor.is_none() && device.is_none() && class.is_none() && driver.is_none() && address.is_none() {
            let problem = format!("{field} is empty; give vendor, device, class, driver or address");
            return Err(at(one, problem));
        }
        if let Some(class) = class
            && !(matches!(class.value.len(), 2 | 4 | 6) && is_hexadecimal(&class.value))
        {
            let problem = format!(
                "{field}.class {} must be two, four or six hexadecimal digits in lower case, for instance \"03\"",
                shown(class)
            );
            return Err(at(class, problem));
        }
        if let Some(address) = address
            && !is_address(&address.value)
        {
            let problem = format!("{field}.address {} must be like 0000:65:00.0", shown(address));
            return Err(at(address, problem));
        }
        matching.push(PciMatch {
            vendor: id(&format!("{field}.vendor"), vendor.as_ref())?,
            device: id(&format!("{field}.device"), device.as_ref())?,
            class: class.as_ref().map(|class| class.value.clone()),
            driver: plain(&format!("{field}.driver"), driver.as_ref())?,
            address: address.as_ref().map(|address| address.value.clone()),
        });
    }
    let (nodes, optional_nodes) = nodes(
        &field,
        raw.nodes.as_ref(),
        raw.optional_nodes.as_ref(),
        NODE_VFIO,
        NODE_BUS,
    )?;
    Ok(Source::Pci(PciSource {
        matching,
        nodes,
        optional_nodes,
    }))
}

type NodeList = Spanned<Vec<Spanned<String>>>;

/// Validates the fields `nodes` and `optionalNodes`.
fn nodes(
    field: &str,
    required: Option<&NodeList>,
    optional: Option<&NodeList>,
    default: &str,
    foreign: &str,
) -> Result<(Vec<String>, Vec<String>), ContentError> {
    let mut seen: Vec<String> = Vec::new();
    let mut read = |name: &str, raw: &NodeList| {
        at_most(ENTRIES_MAX, &format!("{field}.{name}"), raw, raw.value.len())?;
        let mut all = Vec::new();
        for (index, raw) in raw.value.iter().enumerate() {
            let subsystem = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
            let text = &raw.value;
            let problem =
                if text == foreign || text.is_empty() || text.len() > 63 || !text.bytes().all(subsystem) {
                    format!("must be {default} or a subsystem of the kernel, for instance tty")
                } else if seen.contains(text) {
                    "is listed twice; remove one".to_owned()
                } else {
                    seen.push(text.clone());
                    all.push(text.clone());
                    continue;
                };
            return Err(at(
                raw,
                format!("{field}.{name}[{index}] {} {problem}", shown(raw)),
            ));
        }
        Ok(all)
    };
    let required = match required {
        None => vec![default.to_owned()],
        Some(raw) => {
            count(&format!("{field}.nodes"), raw)?;
            read("nodes", raw)?
        }
    };
    let optional = optional.map_or_else(|| Ok(Vec::new()), |raw| read("optionalNodes", raw))?;
    Ok((required, optional))
}

fn is_hexadecimal(text: &str) -> bool {
    text.bytes()
        .all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

/// Whether the text is a PCI address such as `0000:65:00.0`: domain, bus, device and function.
fn is_address(text: &str) -> bool {
    let bytes = text.as_bytes();
    let digits = text.replace([':', '.'], "");
    bytes.len() >= 12
        && bytes.len() <= 16
        && bytes.iter().rev().position(|byte| *byte == b'.') == Some(1)
        && text.split(':').count() == 3
        && is_hexadecimal(&digits)
}

/// Parses a vendor, product or device id.
fn id(field: &str, raw: Option<&Spanned<String>>) -> Result<Option<u16>, ContentError> {
    let Some(raw) = raw else { return Ok(None) };
    let number = (raw.value.len() == 4 && raw.value.bytes().all(|byte| byte.is_ascii_hexdigit()))
        .then(|| u16::from_str_radix(&raw.value, 16).ok())
        .flatten();
    match number {
        Some(number) => Ok(Some(number)),
        None => Err(at(
            raw,
            format!(
                "{field} {} must be four hexadecimal digits in quotes, for instance \"0403\"",
                shown(raw)
            ),
        )),
    }
}

/// Validates a text that is compared as a whole.
fn plain(field: &str, raw: Option<&Spanned<String>>) -> Result<Option<String>, ContentError> {
    let Some(raw) = raw else { return Ok(None) };
    if raw.value.is_empty() || raw.value.len() > 255 || raw.value.chars().any(char::is_control) {
        let problem = format!(
            "{field} {} must have 1 to 255 bytes and no control character",
            shown(raw)
        );
        return Err(at(raw, problem));
    }
    Ok(Some(raw.value.clone()))
}
