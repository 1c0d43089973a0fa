//! Defaults and validation of `resource.k8s.io/v1` (`pkg/apis/resource/v1` and `pkg/apis/resource/validation` at
//! release-1.37).

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::field_error::FieldError;
use super::kinds::ResourceKind;
use super::object::{self, list, text};
use super::rules::{
    IMMUTABLE, SUBDOMAIN, consumers, immutable_spec, is_qualified, is_subdomain, node_selector,
};

/// Maximum number of devices of a slice (`ResourceSliceMaxDevices`).
const DEVICES_MAX: usize = 128;
/// Maximum number of devices of a slice with taints, counters or list attributes
/// (`ResourceSliceMaxDevicesWithAdvancedFeatures`).
const ADVANCED_DEVICES_MAX: usize = 64;
/// Maximum number of attributes and capacities of a device (`ResourceSliceMaxAttributesAndCapacitiesPerDevice`).
const ATTRIBUTES_MAX: usize = 32;
/// Maximum length of a string or version attribute (`DeviceAttributeMaxValueLength`).
const VALUE_MAX: usize = 64;
/// Maximum length of an attribute's name without its domain (`DeviceMaxIDLength`).
const IDENTIFIER_MAX: usize = 32;
/// Maximum number of taints of a device (`DeviceTaintsMaxLength`).
const TAINTS_MAX: usize = 16;
/// Maximum length of a driver's name, and of an attribute's domain (`DriverNameMaxLength`).
const DRIVER_MAX: usize = 63;
/// Maximum length of a pool's name (`PoolNameMaxLength`).
const POOL_MAX: usize = 253;
/// Maximum number of requests, constraints, selectors, configurations and results of a claim.
const REQUESTS_MAX: usize = 32;
/// Maximum number of alternatives of a request (`FirstAvailableDeviceRequestMaxSize`).
const ALTERNATIVES_MAX: usize = 8;
/// Maximum number of consumers of a claim (`ResourceClaimReservedForMaxSize`).
pub(crate) const RESERVED_FOR_MAX: usize = 256;
/// Maximum length of a CEL expression and of opaque parameters in bytes.
const TEXT_MAX: usize = 10 << 10;
/// Finalizer of allocated claims, set by the scheduler and removed by the claim controller.
pub(crate) const FINALIZER: &str = "resource.kubernetes.io/delete-protection";
/// Label of namespaces whose claims may have `adminAccess` (`DRAAdminNamespaceLabelKey`).
const ADMIN_LABEL: &str = "resource.kubernetes.io/admin-access";

const LABEL: &str = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')";
const IDENTIFIER: &str = "a valid C identifier must start with alphabetic character or '_', followed by a string of alphanumeric characters or '_' (e.g. 'my_name',  or 'MY_NAME',  or 'MyName', regex used for validation is '[A-Za-z_][A-Za-z0-9_]*')";
const LABEL_KEY: &str = "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')";
const LABEL_VALUE: &str = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')";
const REQUEST_REFERENCE: &str =
    "must be the name of a request in the claim or the name of a request and a subrequest separated by '/'";

/// Fills in the defaults, and drops lists and maps that Go omits if empty.
pub(crate) fn default(object: &mut Value) {
    for part in ["spec", "status"] {
        if let Some(part) = object.get_mut(part) {
            omit_empty(part);
        }
    }
    // Go always writes this structure.
    if let Some(spec) = object.get_mut("spec").filter(|spec| spec.get("spec").is_some())
        && spec.get("metadata").is_none()
    {
        spec["metadata"] = json!({});
    }
    for pointer in ["/spec/devices/requests", "/spec/spec/devices/requests"] {
        let requests = object.pointer_mut(pointer).and_then(Value::as_array_mut);
        for request in requests.into_iter().flatten() {
            if let Some(exactly) = request.get_mut("exactly") {
                default_request(exactly);
            }
            let alternatives = request.get_mut("firstAvailable").and_then(Value::as_array_mut);
            alternatives.into_iter().flatten().for_each(default_request);
        }
    }
}

fn default_request(request: &mut Value) {
    if text(request, "/allocationMode").is_empty() {
        request["allocationMode"] = "ExactCount".into();
    }
    let count = request.get("count").and_then(Value::as_i64).unwrap_or(0);
    if request["allocationMode"] == "ExactCount" && count == 0 {
        request["count"] = 1.into();
    }
    let tolerations = request.get_mut("tolerations").and_then(Value::as_array_mut);
    for toleration in tolerations.into_iter().flatten() {
        if text(toleration, "/operator").is_empty() {
            toleration["operator"] = "Equal".into();
        }
    }
}

fn omit_empty(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.retain(|key, value| match value {
                Value::Array(list) => !list.is_empty(),
                Value::Object(inner) => {
                    !inner.is_empty()
                        || !matches!(key.as_str(), "attributes" | "capacity" | "consumedCapacity")
                }
                _ => true,
            });
            for (key, value) in map {
                // These are the user's own.
                if !matches!(key.as_str(), "parameters" | "data") {
                    omit_empty(value);
                }
            }
        }
        Value::Array(list) => list.iter_mut().for_each(omit_empty),
        _ => {}
    }
}

/// Sets the time of new taints.
pub(crate) fn stamp_taints(kind: &ResourceKind, object: &mut Value, now: &str) {
    if !kind.is_structured() || kind.kind != "ResourceSlice" {
        return;
    }
    let devices = object.pointer_mut("/spec/devices").and_then(Value::as_array_mut);
    for device in devices.into_iter().flatten() {
        let taints = device.get_mut("taints").and_then(Value::as_array_mut);
        for taint in taints.into_iter().flatten() {
            if text(taint, "/timeAdded").is_empty() {
                taint["timeAdded"] = now.into();
            }
        }
    }
}

/// Removes the status of devices that are no longer allocated to the claim.
pub(crate) fn drop_deallocated(kind: &ResourceKind, before: &Value, after: &mut Value) {
    if !kind.is_structured() || kind.kind != "ResourceClaim" {
        return;
    }
    let old = allocated(before);
    let new = allocated(after);
    let gone: BTreeSet<SharedDeviceId> = old.difference(&new).cloned().collect();
    let Some(status) = after.get_mut("status").and_then(Value::as_object_mut) else {
        return;
    };
    if let Some(devices) = status.get_mut("devices").and_then(Value::as_array_mut) {
        devices.retain(|device| !gone.contains(&device_id(device)));
        if devices.is_empty() {
            status.remove("devices");
        }
    }
}

/// Driver, pool, device and share.
type SharedDeviceId = [String; 4];

fn device_id(device: &Value) -> SharedDeviceId {
    ["/driver", "/pool", "/device", "/shareID"].map(|field| text(device, field).to_owned())
}

fn allocated(claim: &Value) -> BTreeSet<SharedDeviceId> {
    list(claim, "/status/allocation/devices/results")
        .iter()
        .map(device_id)
        .collect()
}

/// Returns why a claim may not have admin access: its namespace lacks the label.
pub(crate) fn admin_access(
    kind: &ResourceKind,
    before: Option<&Value>,
    after: &Value,
    namespace: &Value,
) -> Vec<FieldError> {
    const RESULTS: &str = "/status/allocation/devices/results";
    let labels = namespace.pointer("/metadata/labels");
    let is_allowed = labels.and_then(|labels| labels.get(ADMIN_LABEL)) == Some(&json!("true"));
    if !kind.is_structured() || is_allowed {
        return Vec::new();
    }
    let first = |values: &[Value], pointer: &str| {
        values
            .iter()
            .position(|value| value.pointer(pointer) == Some(&Value::Bool(true)))
    };
    // The path in the message is the claim's, even for a template.
    let requests = |pointer: &str| {
        let index = first(list(after, pointer), "/exactly/adminAccess")?;
        Some(format!("spec.devices.requests[{index}].adminAccess"))
    };
    // The spec is immutable.
    let field = match (kind.kind.as_str(), before) {
        ("ResourceClaim", None) => requests("/spec/devices/requests"),
        ("ResourceClaimTemplate", None) => requests("/spec/spec/devices/requests"),
        ("ResourceClaim", Some(before)) if first(list(before, RESULTS), "/adminAccess").is_none() => {
            first(list(after, RESULTS), "/adminAccess")
                .map(|index| format!("status.allocation.devices.results[{index}].adminAccess"))
        }
        _ => None,
    };
    let detail = format!(
        "admin access to devices requires the `{ADMIN_LABEL}: true` label on the containing namespace"
    );
    field
        .map(|field| FieldError::forbidden(field, &detail))
        .into_iter()
        .collect()
}

/// Validates a new object, or an update of `before`.
pub(crate) fn validate(
    kind: &ResourceKind,
    subresource: &str,
    before: Option<&Value>,
    after: &Value,
) -> Vec<FieldError> {
    let devices = |pointer: &str| after.pointer(pointer).unwrap_or(&Value::Null);
    match (kind.kind.as_str(), subresource, before) {
        ("DeviceClass", ..) => class(after),
        ("ResourceSlice", ..) => slice(before, after),
        ("ResourceClaim", "status", Some(before)) => claim_status(before, after),
        ("ResourceClaim", _, None) => claim_devices(devices("/spec/devices"), "spec.devices"),
        ("ResourceClaimTemplate", _, None) => {
            claim_devices(devices("/spec/spec/devices"), "spec.spec.devices")
        }
        _ => immutable_spec(before, after),
    }
}

// === names ===

fn driver(name: &str, field: &str) -> Vec<FieldError> {
    let mut errors = Vec::new();
    if name.is_empty() {
        return vec![FieldError::required(field, "")];
    }
    if name.len() > DRIVER_MAX {
        errors.push(FieldError::too_many_characters(field, DRIVER_MAX));
    }
    if !is_subdomain(&name.to_lowercase()) {
        errors.push(FieldError::invalid(field, name, SUBDOMAIN));
    }
    errors
}

fn pool_name(name: &str, field: &str) -> Vec<FieldError> {
    if name.is_empty() {
        return vec![FieldError::required(field, "")];
    }
    let mut errors = Vec::new();
    if name.len() > POOL_MAX {
        errors.push(FieldError::too_many_characters(field, POOL_MAX));
    }
    for part in name.split('/').filter(|part| !is_subdomain(part)) {
        errors.push(FieldError::invalid(field, part, SUBDOMAIN));
    }
    errors
}

/// Validates a DNS label: the name of a device or of a request.
fn label(name: &str, field: &str) -> Vec<FieldError> {
    let mut errors = Vec::new();
    if name.len() > DRIVER_MAX {
        let detail = format!("must be no more than {DRIVER_MAX} bytes");
        errors.push(FieldError::invalid(field, name, &detail));
    }
    if name.contains('.') || !is_subdomain(name) {
        errors.push(FieldError::invalid(field, name, LABEL));
    }
    errors
}

/// Validates the name of an attribute or capacity.
fn qualified_name(name: &str, field: &str) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let (domain, identifier) = match name.split_once('/') {
        Some((domain, identifier)) => (Some(domain), identifier),
        None => (None, name),
    };
    match domain {
        Some("") => errors.push(FieldError::invalid(field, "", "the domain must not be empty")),
        Some(domain) => errors.extend(driver(domain, field)),
        None => {}
    }
    let inner = |c: char| c.is_ascii_alphanumeric() || c == '_';
    if domain.is_some() && identifier.is_empty() {
        errors.push(FieldError::invalid(field, "", "the name must not be empty"));
        return errors;
    }
    if identifier.len() > IDENTIFIER_MAX {
        errors.push(FieldError::too_many_characters(field, IDENTIFIER_MAX));
    }
    if identifier.is_empty()
        || identifier.starts_with(|c: char| c.is_ascii_digit())
        || !identifier.chars().all(inner)
    {
        errors.push(FieldError::invalid(field, identifier, IDENTIFIER));
    }
    errors
}

/// Validates the length of a list; a list that is too long is not validated further.
fn length(values: &[Value], limit: usize, field: &str) -> Result<(), Vec<FieldError>> {
    if values.len() > limit {
        return Err(vec![FieldError::too_many(field, values.len(), limit)]);
    }
    Ok(())
}

/// Validates the elements of a list.
fn each<Errors: IntoIterator<Item = FieldError>>(
    values: &[Value],
    limit: usize,
    field: &str,
    validate: impl Fn(&Value, &str) -> Errors,
) -> Vec<FieldError> {
    if let Err(errors) = length(values, limit, field) {
        return errors;
    }
    let elements = values.iter().enumerate();
    elements
        .flat_map(|(index, value)| validate(value, &format!("{field}[{index}]")))
        .collect()
}

/// Validates the elements of a list whose names are unique.
fn named(
    values: &[Value],
    limit: usize,
    field: &str,
    validate: impl Fn(&Value, &str) -> Vec<FieldError>,
) -> Vec<FieldError> {
    let mut errors = each(values, limit, field, validate);
    if values.len() > limit {
        return errors;
    }
    let mut names = BTreeSet::new();
    for (index, value) in values.iter().enumerate() {
        let name = text(value, "/name");
        if !names.insert(name) {
            errors.push(FieldError::duplicate(format!("{field}[{index}]"), name));
        }
    }
    errors
}

// === slices ===

fn slice(before: Option<&Value>, after: &Value) -> Vec<FieldError> {
    let mut errors = driver(text(after, "/spec/driver"), "spec.driver");
    errors.extend(pool_name(text(after, "/spec/pool/name"), "spec.pool.name"));
    let number = |pointer: &str| after.pointer(pointer).and_then(Value::as_i64).unwrap_or(0);
    let count = number("/spec/pool/resourceSliceCount");
    if count <= 0 {
        let field = "spec.pool.resourceSliceCount";
        errors.push(FieldError::invalid(field, count, "must be greater than zero"));
    }
    let generation = number("/spec/pool/generation");
    if generation < 0 {
        errors.push(FieldError::invalid(
            "spec.pool.generation",
            generation,
            "must be greater than or equal to zero",
        ));
    }
    if let Some(before) = before {
        for field in ["pool/name", "driver", "nodeName"] {
            let pointer = format!("/spec/{field}");
            if before.pointer(&pointer) != after.pointer(&pointer) {
                let value = after.pointer(&pointer).unwrap_or(&Value::Null);
                let field = format!("spec.{}", field.replace('/', "."));
                errors.push(FieldError::invalid(field, value, IMMUTABLE));
            }
        }
    }
    let places = ["nodeName", "nodeSelector", "allNodes", "perDeviceNodeSelection"];
    let detail =
        "exactly one of `nodeName`, `nodeSelector`, `allNodes`, `perDeviceNodeSelection` is required";
    errors.extend(place(&after["spec"], "spec", &places, detail));
    if let Some(selector) = after.pointer("/spec/nodeSelector") {
        let terms = list(selector, "/nodeSelectorTerms");
        errors.extend(node_selector(Some(selector), "spec.nodeSelector"));
        if terms.len() != 1 {
            let field = "spec.nodeSelector.nodeSelectorTerms";
            let detail = "must have exactly one node selector term";
            errors.push(FieldError::invalid(field, terms, detail));
        }
    }
    let devices = list(after, "/spec/devices");
    let counters = !list(after, "/spec/sharedCounters").is_empty();
    if counters && !devices.is_empty() {
        let detail = "only one of `sharedCounters` or `devices` is allowed";
        errors.push(FieldError::invalid("spec", "", detail));
    }
    let is_advanced = devices
        .iter()
        .any(|device| !list(device, "/taints").is_empty() || !list(device, "/consumesCounters").is_empty());
    let limit = if is_advanced {
        ADVANCED_DEVICES_MAX
    } else {
        DEVICES_MAX
    };
    let per_device = after.pointer("/spec/perDeviceNodeSelection") == Some(&Value::Bool(true));
    errors.extend(named(devices, limit, "spec.devices", |one, field| {
        device(one, field, per_device)
    }));
    errors
}

/// Validates that exactly one of these fields selects the nodes.
fn place(object: &Value, field: &str, places: &[&str], detail: &str) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let mut set = Vec::new();
    for place in places {
        let at = format!("{field}.{place}");
        match object.get(*place) {
            None => {}
            Some(Value::Bool(false)) => {
                let detail = "must be either unset or set to true";
                errors.push(FieldError::invalid(at, false, detail));
            }
            Some(Value::String(name)) if name.is_empty() => {
                let detail = "must be either unset or set to a non-empty string";
                errors.push(FieldError::invalid(at, "", detail));
            }
            Some(Value::String(name)) if !is_subdomain(name) => {
                errors.push(FieldError::invalid(at, name, SUBDOMAIN));
                set.push(format!("`{place}`"));
            }
            Some(_) => set.push(format!("`{place}`")),
        }
    }
    match set.len() {
        0 => errors.push(FieldError::required(field, detail)),
        1 => {}
        _ => {
            let value = format!("{{{}}}", set.join(", "));
            let detail = format!("{detail}, but multiple fields are set");
            errors.push(FieldError::invalid(field, value, &detail));
        }
    }
    errors
}

fn device(device: &Value, field: &str, per_device: bool) -> Vec<FieldError> {
    let mut errors = label(text(device, "/name"), &format!("{field}.name"));
    let map = |key: &str| device.get(key).and_then(Value::as_object);
    let count = ["attributes", "capacity"]
        .into_iter()
        .filter_map(map)
        .map(serde_json::Map::len)
        .sum::<usize>();
    if count > ATTRIBUTES_MAX {
        let detail =
            format!("the total number of attributes and capacities must not exceed {ATTRIBUTES_MAX}");
        errors.push(FieldError::invalid(field, count, &detail));
    }
    for (name, value) in map("attributes").into_iter().flatten() {
        errors.extend(qualified_name(name, &format!("{field}.attributes")));
        errors.extend(attribute(value, &format!("{field}.attributes[{name}]")));
    }
    let is_shared = device.get("allowMultipleAllocations") == Some(&Value::Bool(true));
    for (name, capacity) in map("capacity").into_iter().flatten() {
        errors.extend(qualified_name(name, &format!("{field}.capacity")));
        if !is_shared && capacity.get("requestPolicy").is_some() {
            let at = format!("{field}.capacity[{name}].requestPolicy");
            errors.push(FieldError::forbidden(at, "allowMultipleAllocations must be true"));
        }
    }
    let taints = list(device, "/taints");
    errors.extend(each(taints, TAINTS_MAX, &format!("{field}.taints"), taint));
    let places = ["nodeName", "nodeSelector", "allNodes"];
    if per_device {
        let detail = "exactly one of `nodeName`, `nodeSelector`, or `allNodes` is required when `perDeviceNodeSelection` is set to true in the ResourceSlice spec";
        errors.extend(place(device, field, &places, detail));
    } else if places.iter().any(|place| device.get(*place).is_some()) {
        let detail = "`nodeName`, `nodeSelector` and `allNodes` can only be set if `perDeviceNodeSelection` is set to true in the ResourceSlice spec";
        errors.push(FieldError::invalid(field, &Value::Null, detail));
    }
    errors
}

fn attribute(value: &Value, field: &str) -> Vec<FieldError> {
    let mut errors = Vec::new();
    for key in ["string", "version"] {
        let at = format!("{field}.{key}");
        let Some(value) = value.get(key).and_then(Value::as_str) else {
            continue;
        };
        if key == "version" && semver::Version::parse(value).is_err() {
            let detail = "must be a string compatible with semver.org spec 2.0.0";
            errors.push(FieldError::invalid(&at, value, detail));
        }
        if value.len() > VALUE_MAX {
            errors.push(FieldError::too_many_characters(at, VALUE_MAX));
        }
    }
    if value.as_object().map_or(0, serde_json::Map::len) != 1 {
        errors.push(FieldError::invalid(
            field,
            value,
            "exactly one value must be specified",
        ));
    }
    errors
}

fn taint(taint: &Value, field: &str) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let key = text(taint, "/key");
    if key.is_empty() || !is_qualified(key) {
        errors.push(FieldError::invalid(format!("{field}.key"), key, LABEL_KEY));
    }
    errors.extend(label_value(taint, field));
    errors.extend(effect(taint, field, true));
    errors
}

/// Validates the value of a taint or a toleration, which is empty or has the form of a label's value.
fn label_value(object: &Value, field: &str) -> Option<FieldError> {
    let value = text(object, "/value");
    let is_invalid = !value.is_empty() && (value.contains('/') || !is_qualified(value));
    is_invalid.then(|| FieldError::invalid(format!("{field}.value"), value, LABEL_VALUE))
}

fn effect(object: &Value, field: &str, required: bool) -> Vec<FieldError> {
    const EFFECTS: [&str; 3] = ["NoExecute", "NoSchedule", "None"];
    let field = format!("{field}.effect");
    match text(object, "/effect") {
        "" if required => vec![FieldError::required(field, "")],
        "" => Vec::new(),
        effect if EFFECTS.contains(&effect) => Vec::new(),
        effect => vec![FieldError::not_supported(field, effect, &EFFECTS)],
    }
}

// === classes and claims ===

fn class(class: &Value) -> Vec<FieldError> {
    let mut errors = selectors(list(class, "/spec/selectors"), "spec.selectors");
    errors.extend(configurations(
        list(class, "/spec/config"),
        "spec.config",
        REQUESTS_MAX,
    ));
    errors
}

fn selectors(selectors: &[Value], field: &str) -> Vec<FieldError> {
    each(selectors, REQUESTS_MAX, field, |selector, at| {
        let at = format!("{at}.cel");
        match selector.get("cel") {
            None => Some(FieldError::required(at, "")),
            Some(cel) => {
                let is_long = text(cel, "/expression").len() > TEXT_MAX;
                is_long.then(|| FieldError::too_many_characters(format!("{at}.expression"), TEXT_MAX))
            }
        }
    })
}

fn configurations(configurations: &[Value], field: &str, limit: usize) -> Vec<FieldError> {
    each(configurations, limit, field, |configuration, at| {
        let at = format!("{at}.opaque");
        let Some(opaque) = configuration.get("opaque") else {
            return vec![FieldError::required(at, "")];
        };
        let mut errors = driver(text(opaque, "/driver"), &format!("{at}.driver"));
        let at = format!("{at}.parameters");
        match opaque.get("parameters") {
            None | Some(Value::Null) => errors.push(FieldError::required(at, "")),
            Some(parameters) if object::json_size(parameters) > TEXT_MAX => {
                errors.push(FieldError::too_many_characters(at, TEXT_MAX));
            }
            Some(parameters) if !parameters.is_object() => {
                errors.push(FieldError::invalid(at, parameters, "must be a valid JSON object"));
            }
            Some(_) => {}
        }
        errors
    })
}

/// Validates the devices that a claim requests.
fn claim_devices(devices: &Value, field: &str) -> Vec<FieldError> {
    let names = request_names(devices);
    let mut errors = named(
        list(devices, "/requests"),
        REQUESTS_MAX,
        &format!("{field}.requests"),
        request,
    );
    errors.extend(each(
        list(devices, "/constraints"),
        REQUESTS_MAX,
        &format!("{field}.constraints"),
        |one, at| constraint(one, &names, at),
    ));
    let at = format!("{field}.config");
    errors.extend(configurations(list(devices, "/config"), &at, REQUESTS_MAX));
    for (index, one) in list(devices, "/config").iter().enumerate() {
        errors.extend(references(one, &names, &format!("{at}[{index}].requests")));
    }
    errors
}

/// Returns the names of requests, and of their alternatives as `request/alternative`.
fn request_names(devices: &Value) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for request in list(devices, "/requests") {
        let name = text(request, "/name");
        names.insert(name.to_owned());
        let alternatives = list(request, "/firstAvailable").iter();
        names.extend(alternatives.map(|alternative| format!("{name}/{}", text(alternative, "/name"))));
    }
    names
}

fn references(object: &Value, names: &BTreeSet<String>, field: &str) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let mut seen = BTreeSet::new();
    for (index, name) in object::texts(object, "/requests").into_iter().enumerate() {
        let at = format!("{field}[{index}]");
        if !names.contains(name) {
            errors.push(FieldError::invalid(&at, name, REQUEST_REFERENCE));
        }
        if !seen.insert(name) {
            errors.push(FieldError::duplicate(at, name));
        }
    }
    errors
}

fn constraint(constraint: &Value, names: &BTreeSet<String>, field: &str) -> Vec<FieldError> {
    const KEYS: [&str; 2] = ["matchAttribute", "distinctAttribute"];
    let mut errors = references(constraint, names, &format!("{field}.requests"));
    let set: Vec<&str> = KEYS
        .into_iter()
        .filter(|key| constraint.get(*key).is_some())
        .collect();
    let detail =
        "exactly one of \"matchAttribute\" or \"distinctAttribute\" is required, but multiple fields are set";
    match set.as_slice() {
        [] => errors.push(FieldError::required(field, detail)),
        [key] => {
            let name = text(constraint, &format!("/{key}"));
            let at = format!("{field}.{key}");
            errors.extend(qualified_name(name, &at));
            if !name.contains('/') {
                let detail = "a fully qualified name must be a domain and a name separated by a slash";
                errors.push(FieldError::invalid(at, name, detail));
            }
        }
        _ => errors.push(FieldError::invalid(field, "", detail)),
    }
    errors
}

fn request(request: &Value, field: &str) -> Vec<FieldError> {
    let mut errors = label(text(request, "/name"), &format!("{field}.name"));
    let alternatives = list(request, "/firstAvailable");
    let detail = "exactly one of `exactly` or `firstAvailable` is required";
    match (request.get("exactly"), alternatives) {
        (None, []) => errors.push(FieldError::required(field, detail)),
        (Some(exactly), []) => errors.extend(device_request(exactly, &format!("{field}.exactly"))),
        (None, alternatives) => {
            let at = format!("{field}.firstAvailable");
            errors.extend(named(alternatives, ALTERNATIVES_MAX, &at, |one, at| {
                let mut errors = label(text(one, "/name"), &format!("{at}.name"));
                errors.extend(device_request(one, at));
                errors
            }));
        }
        (Some(_), _) => {
            let detail = format!("{detail}, but multiple fields are set");
            errors.push(FieldError::invalid(field, &Value::Null, &detail));
        }
    }
    errors
}

fn device_request(request: &Value, field: &str) -> Vec<FieldError> {
    const MODES: [&str; 2] = ["All", "ExactCount"];
    let mut errors = Vec::new();
    let class = text(request, "/deviceClassName");
    let at = format!("{field}.deviceClassName");
    if class.is_empty() {
        errors.push(FieldError::required(at, ""));
    } else if !is_subdomain(class) {
        errors.push(FieldError::invalid(at, class, SUBDOMAIN));
    }
    errors.extend(selectors(
        list(request, "/selectors"),
        &format!("{field}.selectors"),
    ));
    let count = request.get("count").and_then(Value::as_i64).unwrap_or(0);
    let at = format!("{field}.count");
    match text(request, "/allocationMode") {
        "All" if count != 0 => errors.push(FieldError::invalid(
            at,
            count,
            "must not be specified when allocationMode is 'All'",
        )),
        "ExactCount" if count <= 0 => {
            errors.push(FieldError::invalid(at, count, "must be greater than zero"));
        }
        "All" | "ExactCount" => {}
        mode => errors.push(FieldError::not_supported(
            format!("{field}.allocationMode"),
            mode,
            &MODES,
        )),
    }
    for (index, toleration) in list(request, "/tolerations").iter().enumerate() {
        errors.extend(self::toleration(
            toleration,
            &format!("{field}.tolerations[{index}]"),
        ));
    }
    errors
}

fn toleration(toleration: &Value, field: &str) -> Vec<FieldError> {
    const OPERATORS: [&str; 2] = ["Equal", "Exists"];
    let mut errors = Vec::new();
    let key = text(toleration, "/key");
    if !key.is_empty() && !is_qualified(key) {
        errors.push(FieldError::invalid(format!("{field}.key"), key, LABEL_KEY));
    }
    let value = text(toleration, "/value");
    match text(toleration, "/operator") {
        "Exists" if !value.is_empty() => errors.push(FieldError::invalid(
            format!("{field}.value"),
            value,
            "must be empty for operator `Exists`",
        )),
        "Exists" => {}
        "Equal" => errors.extend(label_value(toleration, field)),
        operator => errors.push(FieldError::not_supported(
            format!("{field}.operator"),
            operator,
            &OPERATORS,
        )),
    }
    errors.extend(effect(toleration, field, false));
    errors
}

/// Mirrors `validateResourceClaimStatusUpdate`.
fn claim_status(before: &Value, after: &Value) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let field = "status.reservedFor";
    let reserved = list(after, "/status/reservedFor");
    match length(reserved, RESERVED_FOR_MAX, field) {
        Err(long) => errors.extend(long),
        Ok(()) => errors.extend(consumers(reserved, "")),
    }
    let ours = allocated(after);
    for (index, device) in list(after, "/status/devices").iter().enumerate() {
        if !ours.contains(&device_id(device)) {
            let value = device_id(device)[..3].join("/");
            let detail = "must be an allocated device in the claim";
            errors.push(FieldError::invalid(
                format!("status.devices[{index}]"),
                value,
                detail,
            ));
        }
    }
    let (old, new) = (
        before.pointer("/status/allocation"),
        after.pointer("/status/allocation"),
    );
    let known = list(before, "/status/reservedFor");
    if !reserved.is_empty() && new.is_none() {
        let detail = "may not be specified when `allocated` is not set";
        errors.push(FieldError::forbidden(field, detail));
    } else if object::is_deleting(after) && reserved.iter().any(|consumer| !known.contains(consumer)) {
        let detail =
            "new entries may not be added while `deallocationRequested` or `deletionTimestamp` are set";
        errors.push(FieldError::forbidden(field, detail));
    }
    match (old, new) {
        (Some(old), Some(new)) if old != new => {
            errors.push(FieldError::invalid("status.allocation", new, IMMUTABLE));
        }
        (None, Some(new)) => {
            let names = request_names(after.pointer("/spec/devices").unwrap_or(&Value::Null));
            errors.extend(allocation(new, &names));
        }
        _ => {}
    }
    errors
}

fn allocation(allocation: &Value, names: &BTreeSet<String>) -> Vec<FieldError> {
    let results = list(allocation, "/devices/results");
    let field = "status.allocation.devices";
    let at = format!("{field}.results");
    if let Err(errors) = length(results, REQUESTS_MAX, &at) {
        return errors;
    }
    let mut errors = Vec::new();
    for (index, result) in results.iter().enumerate() {
        let at = format!("{at}[{index}]");
        let request = text(result, "/request");
        if !names.contains(request) {
            errors.push(FieldError::invalid(
                format!("{at}.request"),
                request,
                REQUEST_REFERENCE,
            ));
        }
        errors.extend(driver(text(result, "/driver"), &format!("{at}.driver")));
        errors.extend(pool_name(text(result, "/pool"), &format!("{at}.pool")));
        errors.extend(label(text(result, "/device"), &format!("{at}.device")));
    }
    let configured = list(allocation, "/devices/config");
    errors.extend(configurations(
        configured,
        &format!("{field}.config"),
        2 * REQUESTS_MAX,
    ));
    errors.extend(node_selector(
        allocation.get("nodeSelector"),
        "status.allocation.nodeSelector",
    ));
    errors
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::selector::ObjectSelector;
    use super::super::{ApiServer, ClusterMode, ListQuery, ResourcePath};
    use super::*;
    use crate::testcluster::client::ApiClient;
    use crate::testcluster::clock_and_rng::ClockAndRng;

    fn cluster() -> ApiClient {
        let source = ClockAndRng::new(Box::new(|| jiff::Timestamp::UNIX_EPOCH), 1);
        let server = ApiServer::with_mode(Arc::new(source), ClusterMode::Structured);
        ApiClient::new(&server, "test")
    }

    fn device(number: usize) -> Value {
        json!({ "name": format!("camera-{number}"), "attributes": { "x.dev/kind": { "string": "camera" } } })
    }

    fn slice(devices: Vec<Value>) -> Value {
        json!({
            "metadata": { "name": "node-a.x.dev-00" },
            "spec": {
                "driver": "x.dev", "nodeName": "node-a", "devices": devices,
                "pool": { "name": "node-a", "generation": 1, "resourceSliceCount": 1 },
            },
        })
    }

    fn claim(request: Value) -> Value {
        let mut request = request;
        request["name"] = "camera".into();
        json!({ "metadata": { "name": "c" }, "spec": { "devices": { "requests": [request] } } })
    }

    /// Returns the fields and messages of a rejected slice.
    fn errors_of(devices: Vec<Value>) -> Vec<String> {
        let refusal = cluster()
            .create("resourceslices", "", slice(devices))
            .unwrap_err();
        assert_eq!(refusal.code, 422, "{refusal:?}");
        let details = refusal.details.unwrap();
        let cause = |cause: &Value| format!("{}: {}", text(cause, "/field"), text(cause, "/message"));
        list(&details, "/causes").iter().map(cause).collect()
    }

    #[test]
    fn only_v1_of_the_resource_group_is_served() {
        let server = cluster().server;
        assert!(
            server
                .kind(super::super::kinds::RESOURCE, "v1alpha2", "resourceclaims")
                .is_none()
        );
        for plural in [
            "resourceclaims",
            "resourceclaimtemplates",
            "resourceslices",
            "deviceclasses",
        ] {
            assert!(
                server.kind(super::super::kinds::RESOURCE, "v1", plural).is_some(),
                "{plural}"
            );
        }
        for plural in ["resourceclasses", "podschedulingcontexts"] {
            assert!(server.kind_of(plural).is_none(), "{plural}");
        }
    }

    #[test]
    fn a_request_is_for_one_device_by_default() {
        let client = cluster();
        let toleration = json!({ "key": "a" });
        let exactly = json!({ "exactly": { "deviceClassName": "cameras", "tolerations": [toleration] } });
        let created = client
            .create("resourceclaims", "default", claim(exactly))
            .unwrap();
        let request = &created["spec"]["devices"]["requests"][0]["exactly"];
        assert_eq!(
            (&request["allocationMode"], &request["count"]),
            (&json!("ExactCount"), &json!(1))
        );
        assert_eq!(request["tolerations"][0]["operator"], "Equal");
        let all = json!({ "name": "a", "deviceClassName": "cameras", "allocationMode": "All" });
        let one = json!({ "name": "b", "deviceClassName": "cameras" });
        let mut either = claim(json!({ "firstAvailable": [all, one] }));
        either["metadata"]["name"] = "either".into();
        let created = client.create("resourceclaims", "default", either).unwrap();
        let alternatives = list(&created, "/spec/devices/requests/0/firstAvailable");
        assert_eq!(alternatives[0].get("count"), None);
        assert_eq!(alternatives[1]["count"], 1);
    }

    #[test]
    fn invalid_requests_are_rejected() {
        let class = json!({ "deviceClassName": "cameras" });
        for (request, field) in [
            (json!({}), "spec.devices.requests[0]"),
            (
                json!({ "exactly": {} }),
                "spec.devices.requests[0].exactly.deviceClassName",
            ),
            (
                json!({ "exactly": class, "firstAvailable": [{ "name": "a", "deviceClassName": "b" }] }),
                "spec.devices.requests[0]",
            ),
            (
                json!({ "exactly": { "deviceClassName": "c", "allocationMode": "Some" } }),
                "spec.devices.requests[0].exactly.allocationMode",
            ),
            (
                json!({ "exactly": { "deviceClassName": "c", "allocationMode": "All", "count": 2 } }),
                "spec.devices.requests[0].exactly.count",
            ),
            (
                json!({ "exactly": { "deviceClassName": "c", "selectors": [{}] } }),
                "spec.devices.requests[0].exactly.selectors[0].cel",
            ),
            (
                json!({ "firstAvailable": [{ "name": "a", "deviceClassName": "b" }, { "name": "a", "deviceClassName": "b" }] }),
                "spec.devices.requests[0].firstAvailable[1]",
            ),
        ] {
            let refusal = cluster()
                .create("resourceclaims", "default", claim(request.clone()))
                .unwrap_err();
            assert_eq!(refusal.code, 422, "{request}");
            assert_eq!(refusal.details.unwrap()["causes"][0]["field"], field, "{request}");
        }
    }

    #[test]
    fn constraints_name_requests_and_one_attribute() {
        let exactly = json!({ "exactly": { "deviceClassName": "cameras" } });
        for (constraint, field) in [
            (
                json!({ "matchAttribute": "x.dev/a", "requests": ["lens"] }),
                "requests[0]",
            ),
            (json!({ "matchAttribute": "a" }), "matchAttribute"),
            (json!({ "requests": ["camera"] }), ""),
            (
                json!({ "matchAttribute": "x.dev/a", "distinctAttribute": "x.dev/b" }),
                "",
            ),
        ] {
            let mut claim = claim(exactly.clone());
            claim["spec"]["devices"]["constraints"] = json!([constraint]);
            let refusal = cluster().create("resourceclaims", "default", claim).unwrap_err();
            let expected = format!("spec.devices.constraints[0].{field}");
            let found = refusal.details.unwrap()["causes"][0]["field"].clone();
            assert_eq!(found, expected.trim_end_matches('.'), "{constraint}");
        }
    }

    #[test]
    fn the_spec_of_a_claim_is_immutable() {
        let client = cluster();
        let exactly = json!({ "exactly": { "deviceClassName": "cameras" } });
        let created = client
            .create("resourceclaims", "default", claim(exactly))
            .unwrap();
        let patch = json!({ "spec": { "devices": { "requests": null } } });
        let refusal = client.merge("resourceclaims", &created, "", patch).unwrap_err();
        assert!(refusal.message.contains("field is immutable"), "{refusal:?}");
    }

    #[test]
    fn the_number_of_devices_of_a_slice_is_limited() {
        let client = cluster();
        let mut full: Vec<Value> = (0..DEVICES_MAX).map(device).collect();
        client.create("resourceslices", "", slice(full.clone())).unwrap();
        full.push(device(DEVICES_MAX));
        assert_eq!(
            errors_of(full.clone()),
            ["spec.devices: Too many: 129: must have at most 128 items"]
        );
        full.truncate(ADVANCED_DEVICES_MAX + 1);
        full[0]["taints"] = json!([{ "key": "a", "effect": "NoSchedule" }]);
        assert_eq!(
            errors_of(full),
            ["spec.devices: Too many: 65: must have at most 64 items"]
        );
    }

    #[test]
    fn the_values_of_a_device_are_limited() {
        let mut many = device(0);
        for number in 0..ATTRIBUTES_MAX {
            many["attributes"][format!("a{number}")] = json!({ "int": number });
        }
        assert_eq!(
            errors_of(vec![many]),
            [
                "spec.devices[0]: Invalid value: 33: the total number of attributes and capacities must not exceed 32"
            ]
        );
        for (attributes, says) in [
            (
                json!({ "a": { "string": "x".repeat(65) } }),
                "Too long: may not be more than 64 bytes",
            ),
            (json!({ "a": {} }), "exactly one value must be specified"),
            (
                json!({ "a": { "int": 1, "bool": true } }),
                "exactly one value must be specified",
            ),
            (json!({ "a": { "version": "1.2" } }), "semver.org"),
            (json!({ "by-id": { "int": 1 } }), "a valid C identifier"),
            (json!({ "/a": { "int": 1 } }), "the domain must not be empty"),
            (
                json!({ ("a".repeat(33)): { "int": 1 } }),
                "may not be more than 32 bytes",
            ),
        ] {
            let errors = errors_of(vec![json!({ "name": "a", "attributes": attributes })]);
            assert!(errors[0].contains(says), "{says}: {errors:?}");
        }
    }

    #[test]
    fn names_in_slices_are_checked() {
        for (device, says) in [
            (
                json!({ "name": "a.b" }),
                "spec.devices[0].name: Invalid value: \"a.b\": a lowercase RFC 1123 label",
            ),
            (json!({ "name": "" }), "spec.devices[0].name: "),
            (
                json!({ "name": "a", "nodeName": "b" }),
                "can only be set if `perDeviceNodeSelection`",
            ),
            (
                json!({ "name": "a", "taints": [{ "key": "" , "effect": "NoSchedule" }] }),
                "spec.devices[0].taints[0].key",
            ),
            (
                json!({ "name": "a", "taints": [{ "key": "b", "effect": "Never" }] }),
                "spec.devices[0].taints[0].effect",
            ),
            (
                json!({ "name": "a", "capacity": { "shares": { "value": "2", "requestPolicy": { "default": "1" } } } }),
                "allowMultipleAllocations must be true",
            ),
        ] {
            let errors = errors_of(vec![device]);
            assert!(errors[0].contains(says), "{says}: {errors:?}");
        }
        assert_eq!(
            errors_of(vec![device(1), device(1)]),
            ["spec.devices[1]: Duplicate value: \"camera-1\""]
        );
    }

    #[test]
    fn driver_pool_and_node_of_a_slice_are_immutable() {
        let client = cluster();
        let created = client
            .create("resourceslices", "", slice(vec![device(0)]))
            .unwrap();
        assert_eq!(created["metadata"]["generation"], 1);
        for (patch, field) in [
            (json!({ "driver": "y.dev" }), "spec.driver"),
            (json!({ "nodeName": "node-b" }), "spec.nodeName"),
            (json!({ "pool": { "name": "node-b" } }), "spec.pool.name"),
            (json!({ "nodeName": null, "allNodes": true }), "spec.nodeName"),
        ] {
            let refusal = client
                .merge("resourceslices", &created, "", json!({ "spec": patch }))
                .unwrap_err();
            assert_eq!(refusal.details.unwrap()["causes"][0]["field"], field);
        }
        let none = client
            .merge(
                "resourceslices",
                &created,
                "",
                json!({ "spec": { "devices": [] } }),
            )
            .unwrap();
        assert_eq!(none["spec"].get("devices"), None);
        assert_eq!(none["metadata"]["generation"], 2);
    }

    #[test]
    fn exactly_one_field_selects_the_nodes_of_a_slice() {
        for (spec, says) in [
            (json!({ "nodeName": null }), "is required"),
            (json!({ "allNodes": true }), "but multiple fields are set"),
            (
                json!({ "nodeName": "" }),
                "must be either unset or set to a non-empty string",
            ),
        ] {
            let mut slice = slice(Vec::new());
            for (key, value) in spec.as_object().unwrap() {
                slice["spec"][key] = value.clone();
            }
            let refusal = cluster().create("resourceslices", "", slice).unwrap_err();
            assert!(refusal.message.contains(says), "{says}: {refusal:?}");
        }
    }

    #[test]
    fn the_server_sets_the_time_of_a_taint() {
        let client = cluster();
        let mut tainted = device(0);
        tainted["taints"] = json!([
            { "key": "a", "effect": "NoSchedule" },
            { "key": "b", "effect": "None", "timeAdded": "2026-01-01T00:00:00Z" },
        ]);
        let created = client.create("resourceslices", "", slice(vec![tainted])).unwrap();
        let taints = list(&created, "/spec/devices/0/taints");
        assert_eq!(taints[0]["timeAdded"], "1970-01-01T00:00:00Z");
        assert_eq!(taints[1]["timeAdded"], "2026-01-01T00:00:00Z");
    }

    #[test]
    fn slices_are_selected_by_driver_and_node() {
        let client = cluster();
        for (name, driver, node) in [
            ("a", "x.dev", "node-a"),
            ("b", "y.dev", "node-a"),
            ("c", "x.dev", "node-b"),
        ] {
            let mut slice = slice(Vec::new());
            slice["metadata"]["name"] = name.into();
            slice["spec"]["driver"] = driver.into();
            slice["spec"]["nodeName"] = node.into();
            client.create("resourceslices", "", slice).unwrap();
        }
        let kind = client.server.kind_of("resourceslices").unwrap();
        let names = |fields: &str| {
            let query = ListQuery {
                selector: ObjectSelector::read(&kind, "", fields).unwrap(),
                ..ListQuery::default()
            };
            let target = ResourcePath::new(kind.clone(), "", "", "");
            let (_, items) = client.server.list(&target, &query).unwrap();
            items
                .iter()
                .map(|item| object::name(item))
                .collect::<Vec<_>>()
                .join(" ")
        };
        assert_eq!(names("spec.driver=x.dev"), "a c");
        assert_eq!(names("spec.driver=x.dev,spec.nodeName=node-a"), "a");
        assert!(ObjectSelector::read(&kind, "", "spec.pool.generation=1").is_err());
    }

    #[test]
    fn admin_access_needs_a_labelled_namespace() {
        let client = cluster();
        let exactly = json!({ "exactly": { "deviceClassName": "cameras", "adminAccess": true } });
        let refusal = client
            .create("resourceclaims", "default", claim(exactly.clone()))
            .unwrap_err();
        assert_eq!(
            refusal.details.unwrap()["causes"][0]["field"],
            "spec.devices.requests[0].adminAccess"
        );
        let namespace = client.get("namespaces", "", "default").unwrap();
        let label = json!({ "metadata": { "labels": { (ADMIN_LABEL): "true" } } });
        client.merge("namespaces", &namespace, "", label).unwrap();
        client
            .create("resourceclaims", "default", claim(exactly))
            .unwrap();
    }

    #[test]
    fn an_allocation_is_immutable_until_it_is_cleared() {
        let client = cluster();
        let exactly = json!({ "exactly": { "deviceClassName": "cameras" } });
        let created = client
            .create("resourceclaims", "default", claim(exactly))
            .unwrap();
        let result = |request: &str, device: &str| {
            json!({ "devices": { "results": [
                { "request": request, "driver": "x.dev", "pool": "node-a", "device": device }] } })
        };
        let write =
            |status: Value| client.merge("resourceclaims", &created, "status", json!({ "status": status }));
        let refusal = write(json!({ "allocation": result("lens", "camera-1") })).unwrap_err();
        assert!(refusal.message.contains("results[0].request"), "{refusal:?}");
        let ours = json!({ "driver": "x.dev", "pool": "node-a", "device": "camera-1" });
        write(json!({ "devices": [ours] })).unwrap_err();
        let consumer = json!({ "resource": "pods", "name": "p", "uid": "u" });
        write(json!({ "reservedFor": [consumer] })).unwrap_err();
        let allocated = json!({
            "allocation": result("camera", "camera-1"), "reservedFor": [consumer], "devices": [ours],
        });
        write(allocated).unwrap();
        write(json!({ "allocation": result("camera", "camera-2") })).unwrap_err();
        let cleared = write(json!({ "allocation": null, "reservedFor": null })).unwrap();
        assert_eq!(cleared["status"], json!({}));
    }

    #[test]
    fn a_pod_names_its_claims_directly() {
        let client = cluster();
        let entries =
            json!([{ "name": "a", "resourceClaimName": "x", "source": { "resourceClaimName": "y" } }]);
        let pod = json!({
            "metadata": { "name": "p" },
            "spec": { "resourceClaims": entries, "containers": [{ "name": "c", "image": "i" }] },
        });
        let created = client.create("pods", "default", pod).unwrap();
        assert_eq!(
            created["spec"]["resourceClaims"],
            json!([{ "name": "a", "resourceClaimName": "x" }])
        );
    }

    #[test]
    fn versions_are_semantic() {
        for version in ["1.2.3", "0.0.0", "1.2.3-rc.1+build.007", "1.2.3+a-b", "1.2.3--"] {
            assert!(
                attribute(&json!({ "version": version }), "a").is_empty(),
                "{version}"
            );
        }
        for version in [
            "1.2", "1.2.3.4", "01.2.3", "1.2.x", "1.2.3-", "1.2.3-01", "1.2.3+", "v1.2.3", "",
        ] {
            assert_eq!(
                attribute(&json!({ "version": version }), "a").len(),
                1,
                "{version}"
            );
        }
    }
}
