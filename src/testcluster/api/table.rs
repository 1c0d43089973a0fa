//! Tables for `kubectl get` (`pkg/printers/internalversion` at release-1.30 and, for `resource.k8s.io/v1`, at
//! release-1.37).

use std::borrow::Borrow;
use std::collections::BTreeSet;

use jiff::Timestamp;
use serde_json::{Map, Value, json};

use super::kinds::{RESOURCE, ResourceKind};
use super::object::{self, list, text};
use super::structured;

/// Formats objects as a table.
pub(crate) fn table(
    kind: &ResourceKind,
    metadata: Value,
    objects: &[impl Borrow<Value>],
    now: Timestamp,
) -> Value {
    let columns = columns(kind);
    let definitions: Vec<Value> = columns
        .iter()
        .map(|(name, sort, priority)| {
            let format = if *name == "Name" { "name" } else { "" };
            json!({ "name": name, "type": sort, "format": format, "description": "", "priority": priority })
        })
        .collect();
    let rows: Vec<Value> = objects
        .iter()
        .map(|object| {
            let object = object.borrow();
            let partial = json!({
                "kind": "PartialObjectMetadata",
                "apiVersion": "meta.k8s.io/v1",
                "metadata": object.get("metadata"),
            });
            json!({ "cells": cells(kind, object, now), "object": partial })
        })
        .collect();
    json!({
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": metadata,
        "columnDefinitions": definitions,
        "rows": rows,
    })
}

fn columns(kind: &ResourceKind) -> Vec<(&str, &str, i64)> {
    let mut columns = vec![("Name", "string", 0)];
    if let Some(definition) = &kind.definition {
        for column in &definition.columns {
            let priority = column.get("priority").and_then(Value::as_i64).unwrap_or(0);
            columns.push((text(column, "/name"), text(column, "/type"), priority));
        }
        if definition.columns.is_empty() {
            columns.push(("Age", "date", 0));
        }
    } else {
        let more: &[(&str, &str, i64)] = match (kind.group.as_str(), kind.kind.as_str()) {
            ("", "Pod") => &[
                ("Ready", "string", 0),
                ("Status", "string", 0),
                ("Restarts", "string", 0),
                ("Age", "string", 0),
                ("IP", "string", 1),
                ("Node", "string", 1),
                ("Nominated Node", "string", 1),
                ("Readiness Gates", "string", 1),
            ],
            ("", "Node") => &[
                ("Status", "string", 0),
                ("Roles", "string", 0),
                ("Age", "string", 0),
                ("Version", "string", 0),
                ("Internal-IP", "string", 1),
                ("External-IP", "string", 1),
                ("OS-Image", "string", 1),
                ("Kernel-Version", "string", 1),
                ("Container-Runtime", "string", 1),
            ],
            ("", "ConfigMap") => &[("Data", "string", 0), ("Age", "string", 0)],
            ("coordination.k8s.io", "Lease") => &[("Holder", "string", 0), ("Age", "string", 0)],
            ("", "Namespace") => &[("Status", "string", 0), ("Age", "string", 0)],
            (RESOURCE, "ResourceSlice") => &[
                ("Node", "string", 0),
                ("Driver", "string", 0),
                ("Pool", "string", 0),
                ("Age", "string", 0),
            ],
            (RESOURCE, "ResourceClaim") if kind.is_structured() => {
                &[("State", "string", 0), ("Age", "string", 0)]
            }
            (RESOURCE, "ResourceClaimTemplate") if kind.is_structured() => &[("Age", "string", 0)],
            (RESOURCE, "ResourceClass") => &[("DriverName", "string", 0), ("Age", "string", 0)],
            (RESOURCE, "ResourceClaim") => &[
                ("ResourceClassName", "string", 0),
                ("AllocationMode", "string", 0),
                ("State", "string", 0),
                ("Age", "string", 0),
            ],
            (RESOURCE, "ResourceClaimTemplate") => &[
                ("ResourceClassName", "string", 0),
                ("AllocationMode", "string", 0),
                ("Age", "string", 0),
            ],
            (RESOURCE, "PodSchedulingContext") => &[("SelectedNode", "string", 0), ("Age", "string", 0)],
            (_, "Event") => {
                columns.clear();
                &[
                    ("Last Seen", "string", 0),
                    ("Type", "string", 0),
                    ("Reason", "string", 0),
                    ("Object", "string", 0),
                    ("Subobject", "string", 1),
                    ("Source", "string", 1),
                    ("Message", "string", 0),
                    ("First Seen", "string", 1),
                    ("Count", "string", 1),
                    ("Name", "string", 1),
                ]
            }
            (_, "CustomResourceDefinition") => &[("Created At", "date", 0)],
            _ => &[("Age", "string", 0)],
        };
        columns.extend_from_slice(more);
    }
    columns
}

fn cells(kind: &ResourceKind, object: &Value, now: Timestamp) -> Vec<Value> {
    let name = json!(object::name(object));
    let age = json!(age(text(object, "/metadata/creationTimestamp"), now));
    let at = |pointer: &str| json!(text(object, pointer));
    if let Some(definition) = &kind.definition {
        let mut cells = vec![name];
        for column in &definition.columns {
            cells.push(match text(column, "/type") {
                "date" => json!(self::age(
                    first(object, text(column, "/jsonPath"))
                        .as_str()
                        .unwrap_or_default(),
                    now
                )),
                _ => first(object, text(column, "/jsonPath")),
            });
        }
        if definition.columns.is_empty() {
            cells.push(age);
        }
        return cells;
    }
    match (kind.group.as_str(), kind.kind.as_str()) {
        ("", "Pod") => pod(object, name, age),
        ("", "Node") => node(object, name, age),
        ("", "ConfigMap") => {
            let count = |field| object.get(field).and_then(Value::as_object).map_or(0, Map::len);
            vec![name, json!(count("data") + count("binaryData")), age]
        }
        ("coordination.k8s.io", "Lease") => vec![name, at("/spec/holderIdentity"), age],
        ("", "Namespace") => vec![name, at("/status/phase"), age],
        (RESOURCE, "ResourceSlice") => vec![
            name,
            at("/spec/nodeName"),
            at("/spec/driver"),
            at("/spec/pool/name"),
            age,
        ],
        (RESOURCE, "ResourceClaim") if kind.is_structured() => {
            vec![name, json!(structured::claim_state(object)), age]
        }
        (RESOURCE, "ResourceClaimTemplate") if kind.is_structured() => vec![name, age],
        (RESOURCE, "ResourceClass") => vec![name, at("/driverName"), age],
        (RESOURCE, "ResourceClaim") => {
            vec![
                name,
                at("/spec/resourceClassName"),
                at("/spec/allocationMode"),
                json!(claim_state(object)),
                age,
            ]
        }
        (RESOURCE, "ResourceClaimTemplate") => {
            vec![
                name,
                at("/spec/spec/resourceClassName"),
                at("/spec/spec/allocationMode"),
                age,
            ]
        }
        (RESOURCE, "PodSchedulingContext") => vec![name, at("/spec/selectedNode"), age],
        (_, "Event") => event(kind, object, now),
        (_, "CustomResourceDefinition") => vec![name, at("/metadata/creationTimestamp")],
        _ => vec![name, age],
    }
}

fn pod(pod: &Value, name: Value, age: Value) -> Vec<Value> {
    let containers = list(pod, "/spec/containers").len();
    let statuses = list(pod, "/status/containerStatuses");
    let ready = statuses
        .iter()
        .filter(|status| status.get("ready") == Some(&Value::Bool(true)))
        .count();
    let waiting = statuses
        .iter()
        .map(|status| text(status, "/state/waiting/reason"))
        .find(|reason| !reason.is_empty());
    let status = match (object::is_deleting(pod), waiting) {
        (true, _) => "Terminating",
        (false, Some(reason)) => reason,
        (false, None) => match text(pod, "/status/reason") {
            "" => text(pod, "/status/phase"),
            reason => reason,
        },
    };
    let or_none = |pointer: &str| match text(pod, pointer) {
        "" => json!("<none>"),
        value => json!(value),
    };
    vec![
        name,
        json!(format!("{ready}/{containers}")),
        json!(status),
        json!("0"),
        age,
        or_none("/status/podIP"),
        or_none("/spec/nodeName"),
        or_none("/status/nominatedNodeName"),
        json!("<none>"),
    ]
}

fn node(node: &Value, name: Value, age: Value) -> Vec<Value> {
    let mut status = match condition(node, "Ready") {
        "" => "Unknown",
        "True" => "Ready",
        _ => "NotReady",
    }
    .to_owned();
    if node.pointer("/spec/unschedulable") == Some(&Value::Bool(true)) {
        status += ",SchedulingDisabled";
    }
    let labels = node.pointer("/metadata/labels").and_then(Value::as_object);
    let role = |(label, value): (&String, &Value)| match label.strip_prefix("node-role.kubernetes.io/") {
        Some(role) if !role.is_empty() => Some(role.to_owned()),
        _ if label == "kubernetes.io/role" => value.as_str().map(str::to_owned),
        _ => None,
    };
    let roles: BTreeSet<String> = labels.into_iter().flatten().filter_map(role).collect();
    let roles: Vec<String> = roles.into_iter().collect();
    let or = |value: &str, instead: &str| json!(if value.is_empty() { instead } else { value });
    let address = |sort: &str| {
        let mut addresses = list(node, "/status/addresses").iter();
        let found = addresses.find(|address| address["type"] == sort);
        or(found.map_or("", |address| text(address, "/address")), "<none>")
    };
    let info = |field: &str| text(node, &format!("/status/nodeInfo/{field}"));
    vec![
        name,
        json!(status),
        or(&roles.join(","), "<none>"),
        age,
        json!(info("kubeletVersion")),
        address("InternalIP"),
        address("ExternalIP"),
        or(info("osImage"), "<unknown>"),
        or(info("kernelVersion"), "<unknown>"),
        or(info("containerRuntimeVersion"), "<unknown>"),
    ]
}

fn event(kind: &ResourceKind, event: &Value, now: Timestamp) -> Vec<Value> {
    let [about, message, first, last, count, source, component] = match kind.group.as_str() {
        "" => [
            "/involvedObject",
            "/message",
            "/firstTimestamp",
            "/lastTimestamp",
            "/count",
            "/source",
            "/reportingComponent",
        ],
        _ => [
            "/regarding",
            "/note",
            "/deprecatedFirstTimestamp",
            "/deprecatedLastTimestamp",
            "/deprecatedCount",
            "/deprecatedSource",
            "/reportingController",
        ],
    };
    let or = |text: &str, instead: &str| if text.is_empty() { instead } else { text }.to_owned();
    let first = or(text(event, first), text(event, "/eventTime"));
    let mut last = or(text(event, last), &first);
    let mut count = event.pointer(count).and_then(Value::as_i64).unwrap_or(0).max(1);
    if let Some(series) = event.get("series").filter(|series| series.is_object()) {
        text(series, "/lastObservedTime").clone_into(&mut last);
        count = series["count"].as_i64().unwrap_or(count);
    }
    let of = |field: &str| text(event, &format!("{about}/{field}"));
    let target = match of("name") {
        "" => of("kind").to_lowercase(),
        name => format!("{}/{name}", of("kind").to_lowercase()),
    };
    let component = or(
        text(event, &format!("{source}/component")),
        text(event, component),
    );
    let host = or(
        text(event, &format!("{source}/host")),
        text(event, "/reportingInstance"),
    );
    let source = if host.is_empty() {
        component
    } else {
        format!("{component}, {host}")
    };
    vec![
        json!(age(&last, now)),
        json!(text(event, "/type")),
        json!(text(event, "/reason")),
        json!(target),
        json!(of("fieldPath")),
        json!(source),
        json!(text(event, message).trim()),
        json!(age(&first, now)),
        json!(count),
        json!(object::name(event)),
    ]
}

fn condition<'a>(object: &'a Value, sort: &str) -> &'a str {
    let found = list(object, "/status/conditions")
        .iter()
        .find(|condition| condition["type"] == sort);
    found
        .map(|condition| text(condition, "/status"))
        .unwrap_or_default()
}

/// Mirrors `resourceClaimState` of the real server.
fn claim_state(claim: &Value) -> String {
    let deleting = object::is_deleting(claim);
    let mut states = Vec::new();
    if deleting {
        states.push("deleted");
    }
    match claim.pointer("/status/allocation") {
        None if !deleting => states.push("pending"),
        None => {}
        Some(_) => {
            states.push("allocated");
            let requested = claim.pointer("/status/deallocationRequested") == Some(&Value::Bool(true));
            if !list(claim, "/status/reservedFor").is_empty() {
                states.push("reserved");
            } else if deleting || requested {
                states.push("deallocating");
            }
        }
    }
    states.join(",")
}

/// Evaluates the JSON path of a printer column; joins several values with commas.
fn first(object: &Value, path: &str) -> Value {
    let mut at = vec![object];
    for part in split_path(path) {
        at = at
            .into_iter()
            .flat_map(|value| match part.as_str() {
                "*" => value
                    .as_array()
                    .map(|list| list.iter().collect())
                    .unwrap_or_default(),
                filter if filter.starts_with("?(@.") => {
                    let inner = filter.trim_start_matches("?(@.").trim_end_matches(')');
                    let (field, wanted) = inner.split_once("==").unwrap_or((inner, ""));
                    let wanted = wanted.trim_matches(['\'', '"', ' ']);
                    value
                        .as_array()
                        .map(|list| {
                            list.iter()
                                .filter(|each| text(each, &format!("/{field}")) == wanted)
                                .collect()
                        })
                        .unwrap_or_default()
                }
                name => value.get(name).into_iter().collect::<Vec<_>>(),
            })
            .collect();
    }
    match at.as_slice() {
        [] => json!(""),
        [one] => (*one).clone(),
        several => json!(
            several
                .iter()
                .map(|value| value.as_str().unwrap_or_default())
                .collect::<Vec<_>>()
                .join(",")
        ),
    }
}

fn split_path(path: &str) -> Vec<String> {
    let (mut parts, mut part, mut depth) = (Vec::new(), String::new(), 0);
    for character in path.chars() {
        match character {
            '.' if depth == 0 => parts.push(std::mem::take(&mut part)),
            '[' if depth == 0 => {
                depth += 1;
                parts.push(std::mem::take(&mut part));
            }
            ']' if depth == 1 => depth -= 1,
            character => part.push(character),
        }
    }
    parts.push(part);
    parts.retain(|part| !part.is_empty());
    parts
}

/// Formats an age like kubectl (`HumanDuration` in apimachinery's `duration.go`).
fn age(since: &str, now: Timestamp) -> String {
    const MINUTE: i64 = 60;
    const HOUR: i64 = 60 * MINUTE;
    const DAY: i64 = 24 * HOUR;
    const YEAR: i64 = 365 * DAY;
    let Ok(since) = since.parse::<Timestamp>() else {
        return "<unknown>".to_owned();
    };
    let seconds = now.duration_since(since).as_secs().max(0);
    let both = |large: i64, first: &str, small: i64, second: &str| {
        let (count, rest) = (seconds / large, seconds % large / small);
        if rest == 0 {
            format!("{count}{first}")
        } else {
            format!("{count}{first}{rest}{second}")
        }
    };
    if seconds < 2 * MINUTE {
        format!("{seconds}s")
    } else if seconds < 10 * MINUTE {
        both(MINUTE, "m", 1, "s")
    } else if seconds < 3 * HOUR {
        format!("{}m", seconds / MINUTE)
    } else if seconds < 8 * HOUR {
        both(HOUR, "h", MINUTE, "m")
    } else if seconds < 2 * DAY {
        format!("{}h", seconds / HOUR)
    } else if seconds < 8 * DAY {
        both(DAY, "d", HOUR, "h")
    } else if seconds < 2 * YEAR {
        format!("{}d", seconds / DAY)
    } else if seconds < 8 * YEAR {
        both(YEAR, "y", DAY, "d")
    } else {
        format!("{}y", seconds / YEAR)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_printer_column_finds_its_value() {
        let object = json!({
            "spec": { "requests": [{ "name": "a" }, { "name": "b" }] },
            "status": { "conditions": [{ "type": "Other", "status": "x" }, { "type": "Ready", "status": "True" }] },
        });
        assert_eq!(first(&object, ".spec.requests[*].name"), json!("a,b"));
        assert_eq!(
            first(&object, ".status.conditions[?(@.type=='Ready')].status"),
            json!("True")
        );
        assert_eq!(first(&object, ".nothing"), json!(""));
    }

    #[test]
    fn ages_are_shown_as_kubectl_shows_them() {
        let now: Timestamp = "2026-01-10T00:00:00Z".parse().unwrap();
        for (since, shown) in [
            ("2026-01-09T23:59:59Z", "1s"),
            ("2026-01-09T23:57:30Z", "2m30s"),
            ("2026-01-09T23:30:00Z", "30m"),
            ("2026-01-09T20:30:00Z", "3h30m"),
            ("2026-01-09T12:00:00Z", "12h"),
            ("2026-01-05T23:00:00Z", "4d1h"),
            ("2020-01-01T00:00:00Z", "6y11d"),
            ("2026-01-01T00:00:00Z", "9d"),
            ("", "<unknown>"),
        ] {
            assert_eq!(age(since, now), shown);
        }
    }
}
