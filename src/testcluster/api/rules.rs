//! Validation of built-in kinds (`pkg/apis/resource/validation` at release-1.30) and of object metadata.

use std::collections::BTreeSet;

use serde_json::Value;

use super::field_error::FieldError;
use super::object::{self, list, text};
use crate::api::resource::{
    GROUP, NODE_LIST_MAX, RESERVED_FOR_MAX, RESOURCE_HANDLE_MAX, RESOURCE_HANDLES_MAX,
};
use crate::core::names::is_dns_subdomain;

/// Maximum size of an object's annotations in bytes (`TotalAnnotationSizeLimitB`).
const ANNOTATIONS_MAX: usize = 256 << 10;
/// Maximum size of a ConfigMap's values in bytes (`MaxSecretSize`).
const CONFIG_MAP_MAX: usize = 1 << 20;

pub(super) const SUBDOMAIN: &str = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')";

/// Returns whether a name is a DNS subdomain (RFC 1123), as required for most kinds.
pub(super) fn is_subdomain(name: &str) -> bool {
    is_dns_subdomain(name, 253)
}

/// Returns whether a finalizer is a qualified name.
pub(super) fn is_qualified(name: &str) -> bool {
    let part = |part: &str| {
        let ends = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
        let inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        part.len() <= 63 && part.chars().all(inner) && ends(part.chars().next()) && ends(part.chars().last())
    };
    match name.split_once('/') {
        Some((prefix, name)) => is_subdomain(prefix) && part(name),
        None => part(name),
    }
}

/// Returns the total bytes of a map's values and of its keys.
fn bytes(object: &Value, pointer: &str) -> (usize, usize) {
    let map = object.pointer(pointer).and_then(Value::as_object);
    map.into_iter()
        .flatten()
        .fold((0, 0), |(values, names), (name, value)| {
            (values + value.as_str().map_or(0, str::len), names + name.len())
        })
}

/// Validates the metadata of an object.
pub(crate) fn metadata(object: &Value) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let (values, names) = bytes(object, "/metadata/annotations");
    if values + names > ANNOTATIONS_MAX {
        errors.push(FieldError::too_many_bytes(
            "metadata.annotations",
            ANNOTATIONS_MAX,
        ));
    }
    let name = object::name(object);
    if name.is_empty() {
        errors.push(FieldError::required(
            "metadata.name",
            "name or generateName is required",
        ));
    } else if !is_subdomain(name) {
        errors.push(FieldError::invalid("metadata.name", name, SUBDOMAIN));
    }
    for finalizer in object::texts(object, "/metadata/finalizers") {
        if !is_qualified(finalizer) {
            let detail = if finalizer.contains('/') {
                format!("prefix part {SUBDOMAIN}")
            } else {
                "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')".to_owned()
            };
            errors.push(FieldError::invalid("metadata.finalizers", finalizer, &detail));
        }
    }
    errors.extend(owners(list(object, "/metadata/ownerReferences")));
    errors
}

/// Mirrors `ValidateOwnerReferences`, whose messages contain no index.
fn owners(owners: &[Value]) -> Vec<FieldError> {
    const FIELD: &str = "metadata.ownerReferences";
    let mut errors = Vec::new();
    let mut controller = None;
    for owner in owners {
        let version = text(owner, "/apiVersion");
        let wrong_version = version.is_empty() || version.matches('/').count() > 1 || version.ends_with('/');
        for (key, word, wrong) in [
            ("apiVersion", "version", wrong_version),
            ("kind", "kind", text(owner, "/kind").is_empty()),
            ("name", "name", text(owner, "/name").is_empty()),
            ("uid", "uid", text(owner, "/uid").is_empty()),
        ] {
            if wrong {
                let value = text(owner, &format!("/{key}"));
                let detail = format!("{word} must not be empty");
                errors.push(FieldError::invalid(format!("{FIELD}.{key}"), value, &detail));
            }
        }
        if (version, text(owner, "/kind")) == ("v1", "Event") {
            let detail = "/v1, Kind=Event is disallowed from being an owner";
            errors.push(FieldError::invalid(FIELD, owner, detail));
        }
        if owner.get("controller") == Some(&Value::Bool(true)) {
            let this = format!("{}/{}", text(owner, "/kind"), text(owner, "/name"));
            match &controller {
                None => controller = Some(this),
                Some(first) => {
                    let detail = format!(
                        "Only one reference can have Controller set to true. Found \"true\" in references for {first} and {this}"
                    );
                    errors.push(FieldError::invalid(FIELD, owners, &detail));
                }
            }
        }
    }
    errors
}

/// Validates a metadata update.
pub(crate) fn metadata_update(before: &Value, after: &Value) -> Vec<FieldError> {
    let mut errors = Vec::new();
    if object::is_deleting(before) {
        let known: BTreeSet<&str> = object::texts(before, "/metadata/finalizers")
            .into_iter()
            .collect();
        let new: BTreeSet<&str> = object::texts(after, "/metadata/finalizers").into_iter().collect();
        let extra: Vec<String> = new.difference(&known).map(|name| format!("{name:?}")).collect();
        if !extra.is_empty() {
            let detail = format!(
                "no new finalizers can be added if the object is being deleted, found new finalizers []string{{{}}}",
                extra.join(", ")
            );
            errors.push(FieldError::forbidden("metadata.finalizers", &detail));
        }
    }
    for key in [
        "name",
        "namespace",
        "uid",
        "creationTimestamp",
        "deletionTimestamp",
    ] {
        let pointer = format!("/metadata/{key}");
        if text(before, &pointer) != text(after, &pointer) {
            let value = text(after, &pointer);
            errors.push(FieldError::invalid(format!("metadata.{key}"), value, IMMUTABLE));
        }
    }
    errors
}

pub(super) const IMMUTABLE: &str = "field is immutable";

/// Validates a new object, or an update of `before`. [`structured`](super::structured) validates `resource.k8s.io/v1`.
pub(crate) fn object(
    group: &str,
    kind: &str,
    subresource: &str,
    before: Option<&Value>,
    after: &Value,
) -> Vec<FieldError> {
    if (group, kind) == ("", "ConfigMap") {
        let size = bytes(after, "/data").0 + bytes(after, "/binaryData").0;
        // The real server names no field: `[]`.
        let error = (size > CONFIG_MAP_MAX).then(|| FieldError::too_many_bytes("[]", CONFIG_MAP_MAX));
        return error.into_iter().collect();
    }
    if group != GROUP {
        return Vec::new();
    }
    classic(kind, subresource, before, after)
}

/// Validates an update of an object of `resource.k8s.io/v1alpha2` through the main resource or `status`: the errors in one line. For the
/// simulation, which has a store of its own.
pub fn check_update(kind: &str, subresource: &str, before: &Value, after: &Value) -> Result<(), String> {
    let mut errors = metadata_update(before, after);
    errors.extend(metadata(after));
    errors.extend(classic(kind, subresource, Some(before), after));
    if errors.is_empty() {
        return Ok(());
    }
    let errors = errors
        .iter()
        .map(|error| format!("{}: {}", error.field, error.message));
    Err(errors.collect::<Vec<String>>().join(", "))
}

/// Validates an object of `resource.k8s.io/v1alpha2`.
fn classic(kind: &str, subresource: &str, before: Option<&Value>, after: &Value) -> Vec<FieldError> {
    match (kind, subresource) {
        ("ResourceClass", _) => class(after),
        ("ResourceClaim", "status") => before.map_or_else(Vec::new, |before| claim_status(before, after)),
        ("ResourceClaim", _) => {
            let mut errors = immutable_spec(before, after);
            errors.extend(claim_spec(after.get("spec").unwrap_or(&Value::Null), "spec"));
            errors
        }
        ("ResourceClaimTemplate", _) => {
            let mut errors = immutable_spec(before, after);
            errors.extend(claim_spec(
                after.pointer("/spec/spec").unwrap_or(&Value::Null),
                "spec.spec",
            ));
            errors
        }
        ("PodSchedulingContext", "status") => context_status(after),
        ("PodSchedulingContext", _) => nodes(list(after, "/spec/potentialNodes"), "spec.potentialNodes"),
        _ => Vec::new(),
    }
}

/// Rejects changes to a pod's spec, except container images and tolerations.
pub(crate) fn pod_update(before: &Value, after: &Value) -> Vec<FieldError> {
    let fixed = |pod: &Value| {
        let mut spec = pod.get("spec").cloned().unwrap_or_default();
        if let Some(map) = spec.as_object_mut() {
            map.remove("tolerations");
            map.remove("activeDeadlineSeconds");
        }
        for containers in ["containers", "initContainers"] {
            let containers = spec.get_mut(containers).and_then(Value::as_array_mut);
            for container in containers.into_iter().flatten().filter_map(Value::as_object_mut) {
                container.remove("image");
            }
        }
        spec
    };
    if fixed(before) == fixed(after) {
        return Vec::new();
    }
    let detail = "pod updates may not change fields other than `spec.containers[*].image`,`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)";
    vec![FieldError::forbidden("spec", detail)]
}

pub(super) fn immutable_spec(before: Option<&Value>, after: &Value) -> Vec<FieldError> {
    let changed = before.is_some_and(|before| before.get("spec") != after.get("spec"));
    let value = after.get("spec").unwrap_or(&Value::Null);
    if changed {
        vec![FieldError::invalid("spec", value, IMMUTABLE)]
    } else {
        Vec::new()
    }
}

fn driver_name(name: &str, field: &str) -> Vec<FieldError> {
    let mut errors = Vec::new();
    if name.is_empty() {
        errors.push(FieldError::required(field, ""));
    }
    if name.len() > 63 {
        errors.push(FieldError::too_long(field, 63));
    }
    if !is_subdomain(&name.to_lowercase()) {
        errors.push(FieldError::invalid(field, name.to_lowercase(), SUBDOMAIN));
    }
    errors
}

fn parameters(reference: Option<&Value>, field: &str) -> Vec<FieldError> {
    let Some(reference) = reference else {
        return Vec::new();
    };
    ["kind", "name"]
        .iter()
        .filter(|key| text(reference, &format!("/{key}")).is_empty())
        .map(|key| FieldError::required(format!("{field}.{key}"), ""))
        .collect()
}

pub(super) fn node_selector(selector: Option<&Value>, field: &str) -> Option<FieldError> {
    let is_empty = selector.is_some_and(|selector| list(selector, "/nodeSelectorTerms").is_empty());
    let detail = "must have at least one node selector term";
    is_empty.then(|| FieldError::required(format!("{field}.nodeSelectorTerms"), detail))
}

fn class(class: &Value) -> Vec<FieldError> {
    let mut errors = driver_name(text(class, "/driverName"), "driverName");
    errors.extend(parameters(class.get("parametersRef"), "parametersRef"));
    errors.extend(node_selector(class.get("suitableNodes"), "suitableNodes"));
    errors
}

fn claim_spec(spec: &Value, field: &str) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let class = text(spec, "/resourceClassName");
    if !is_subdomain(class) {
        let field = format!("{field}.resourceClassName");
        errors.push(FieldError::invalid(field, class, SUBDOMAIN));
    }
    errors.extend(parameters(
        spec.get("parametersRef"),
        &format!("{field}.parametersRef"),
    ));
    let modes = ["Immediate", "WaitForFirstConsumer"];
    let mode = text(spec, "/allocationMode");
    if !modes.contains(&mode) {
        errors.push(FieldError::not_supported(
            format!("{field}.allocationMode"),
            mode,
            &modes,
        ));
    }
    errors
}

/// Mirrors `ValidateClaimStatusUpdate`.
fn claim_status(before: &Value, after: &Value) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let allocation = after.pointer("/status/allocation");
    let name = text(after, "/status/driverName");
    if !name.is_empty() {
        errors.extend(driver_name(name, "status.driverName"));
    } else if allocation.is_some() {
        errors.push(FieldError::required(
            "status.driverName",
            "must be specified when `allocation` is set",
        ));
    }
    if let Some(allocation) = allocation {
        errors.extend(allocation_result(allocation));
    }
    let reserved = list(after, "/status/reservedFor");
    errors.extend(consumers(reserved, ".uid"));
    if reserved.len() > RESERVED_FOR_MAX {
        errors.push(FieldError::too_long("status.reservedFor", RESERVED_FOR_MAX));
    }
    let requested =
        |claim: &Value| claim.pointer("/status/deallocationRequested") == Some(&Value::Bool(true));
    if !reserved.is_empty() {
        let field = "status.reservedFor";
        match allocation {
            None => errors.push(FieldError::forbidden(
                field,
                "may not be specified when `allocated` is not set",
            )),
            Some(allocation) => {
                if reserved.len() > 1 && allocation.get("shareable") != Some(&Value::Bool(true)) {
                    errors.push(FieldError::forbidden(field, "may not be reserved more than once"));
                }
                let known = list(before, "/status/reservedFor");
                let going = object::is_deleting(after) || requested(after);
                if going && reserved.iter().any(|consumer| !known.contains(consumer)) {
                    let detail = "new entries may not be added while `deallocationRequested` or `deletionTimestamp` are set";
                    errors.push(FieldError::forbidden(field, detail));
                }
            }
        }
    }
    if let (Some(old), Some(new)) = (before.pointer("/status/allocation"), allocation)
        && old != new
    {
        errors.push(FieldError::invalid("status.allocation", new, IMMUTABLE));
    }
    let field = "status.deallocationRequested";
    if !requested(before) && requested(after) && !reserved.is_empty() {
        errors.push(FieldError::forbidden(
            field,
            "deallocation cannot be requested while `reservedFor` is set",
        ));
    }
    if requested(after) && allocation.is_none() {
        errors.push(FieldError::forbidden(
            "status",
            "`allocation` must be set when `deallocationRequested` is set",
        ));
    }
    if requested(before) && !requested(after) && allocation.is_some() {
        errors.push(FieldError::forbidden(
            field,
            "may not be cleared when `allocation` is set",
        ));
    }
    errors
}

fn allocation_result(allocation: &Value) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let handles = list(allocation, "/resourceHandles");
    for (index, handle) in handles.iter().enumerate() {
        let at = format!("status.allocation.resourceHandles[{index}]");
        errors.extend(driver_name(
            text(handle, "/driverName"),
            &format!("{at}.driverName"),
        ));
        if text(handle, "/data").len() > RESOURCE_HANDLE_MAX {
            errors.push(FieldError::too_long(format!("{at}.data"), RESOURCE_HANDLE_MAX));
        }
    }
    if handles.len() > RESOURCE_HANDLES_MAX {
        errors.push(FieldError::too_long(
            "status.allocation.resourceHandles",
            RESOURCE_HANDLES_MAX,
        ));
    }
    errors.extend(node_selector(
        allocation.get("availableOnNodes"),
        "status.allocation.availableOnNodes",
    ));
    errors
}

/// Validates `status.reservedFor` except its length.
/// A duplicate is reported at the field `duplicate` of the entry.
pub(super) fn consumers(consumers: &[Value], duplicate: &str) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let mut uids = BTreeSet::new();
    for (index, consumer) in consumers.iter().enumerate() {
        let at = format!("status.reservedFor[{index}]");
        let uid = text(consumer, "/uid");
        if !uids.insert(uid) {
            errors.push(FieldError::duplicate(format!("{at}{duplicate}"), uid));
            continue;
        }
        for key in ["resource", "name", "uid"] {
            if text(consumer, &format!("/{key}")).is_empty() {
                errors.push(FieldError::required(format!("{at}.{key}"), ""));
            }
        }
    }
    errors
}

/// Validates a list of nodes: unique names, limited length.
fn nodes(nodes: &[Value], field: &str) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let mut seen = BTreeSet::new();
    for (index, node) in nodes.iter().enumerate() {
        let name = node.as_str().unwrap_or_default();
        let at = format!("{field}[{index}]");
        if !seen.insert(name) {
            errors.push(FieldError::duplicate(at, node));
        } else if !is_subdomain(name) {
            errors.push(FieldError::invalid(at, node, SUBDOMAIN));
        }
    }
    if nodes.len() > NODE_LIST_MAX {
        errors.push(FieldError::too_long(field, NODE_LIST_MAX));
    }
    errors
}

/// The path in messages is `status.claims`, although the field is `resourceClaims`.
fn context_status(context: &Value) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let mut names = BTreeSet::new();
    for (index, entry) in list(context, "/status/resourceClaims").iter().enumerate() {
        let at = format!("status.claims[{index}]");
        errors.extend(nodes(
            list(entry, "/unsuitableNodes"),
            &format!("{at}.unsuitableNodes"),
        ));
        let name = text(entry, "/name");
        if !names.insert(name) {
            errors.push(FieldError::duplicate(at, name));
        }
    }
    errors
}
