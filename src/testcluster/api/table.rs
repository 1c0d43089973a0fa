//! Tables for `kubectl get` (`pkg/printers/internalversion` at release-1.30 and, for `resource.k8s.io/v1`, at
//! release-1.37).

use std::borrow::Borrow;
use std::collections::BTreeSet;

use jiff::Timestamp;
use serde_json::{Map, Value, json};

use super::kinds::{COORDINATION, RESOURCE, ResourceKind};
use super::object::{self, list, text};

/// A cell with its column's name, type and priority: 1 for columns that only `-o wide` shows.
type Cell<'a> = (&'a str, &'a str, i64, Value);

/// Formats objects as a table.
pub(crate) fn table(
    kind: &ResourceKind,
    metadata: Value,
    objects: &[impl Borrow<Value>],
    now: Timestamp,
) -> Value {
    let definitions: Vec<Value> = cells(kind, &Value::Null, now)
        .into_iter()
        .map(|(name, sort, priority, _)| {
            let format = if name == "Name" { "name" } else { "" };
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
            let cells = cells(kind, object, now).into_iter().map(|(.., cell)| cell);
            json!({ "cells": cells.collect::<Vec<_>>(), "object": partial })
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

fn shown(name: &str, value: impl Into<Value>) -> Cell<'_> {
    (name, "string", 0, value.into())
}

fn wide(name: &str, value: impl Into<Value>) -> Cell<'_> {
    (name, "string", 1, value.into())
}

fn or<'a>(text: &'a str, instead: &'a str) -> &'a str {
    if text.is_empty() { instead } else { text }
}

/// Returns the row of an object.
fn cells<'a>(kind: &'a ResourceKind, object: &Value, now: Timestamp) -> Vec<Cell<'a>> {
    let name = shown("Name", object::name(object));
    let age_of = |since: &str| age(since, now);
    let created = text(object, "/metadata/creationTimestamp");
    let age = shown("Age", age_of(created));
    let at = |name: &'static str, pointer: &str| shown(name, text(object, pointer));
    if let Some(definition) = &kind.definition {
        let mut cells = vec![name];
        for column in &definition.columns {
            let sort = text(column, "/type");
            let found = first(object, text(column, "/jsonPath"));
            let cell = match sort {
                "date" => age_of(found.as_str().unwrap_or_default()).into(),
                _ => found,
            };
            let priority = column.get("priority").and_then(Value::as_i64).unwrap_or(0);
            cells.push((text(column, "/name"), sort, priority, cell));
        }
        if definition.columns.is_empty() {
            cells.push(("Age", "date", 0, age_of(created).into()));
        }
        return cells;
    }
    let state = || shown("State", claim_state(kind, object));
    match (kind.group.as_str(), kind.kind.as_str()) {
        ("", "Pod") => pod(object, name, age),
        ("", "Node") => node(object, name, age),
        ("", "ConfigMap") => {
            let count = |field| object.get(field).and_then(Value::as_object).map_or(0, Map::len);
            vec![name, shown("Data", count("data") + count("binaryData")), age]
        }
        (COORDINATION, "Lease") => vec![name, at("Holder", "/spec/holderIdentity"), age],
        ("", "Namespace") => vec![name, at("Status", "/status/phase"), age],
        (RESOURCE, "ResourceSlice") => vec![
            name,
            at("Node", "/spec/nodeName"),
            at("Driver", "/spec/driver"),
            at("Pool", "/spec/pool/name"),
            age,
        ],
        (RESOURCE, "ResourceClaim") if kind.is_structured() => vec![name, state(), age],
        (RESOURCE, "ResourceClaimTemplate") if kind.is_structured() => vec![name, age],
        (RESOURCE, "ResourceClass") => vec![name, at("DriverName", "/driverName"), age],
        (RESOURCE, "ResourceClaim") => vec![
            name,
            at("ResourceClassName", "/spec/resourceClassName"),
            at("AllocationMode", "/spec/allocationMode"),
            state(),
            age,
        ],
        (RESOURCE, "ResourceClaimTemplate") => vec![
            name,
            at("ResourceClassName", "/spec/spec/resourceClassName"),
            at("AllocationMode", "/spec/spec/allocationMode"),
            age,
        ],
        (RESOURCE, "PodSchedulingContext") => vec![name, at("SelectedNode", "/spec/selectedNode"), age],
        (_, "Event") => event(kind, object, now),
        (_, "CustomResourceDefinition") => vec![name, ("Created At", "date", 0, created.into())],
        _ => vec![name, age],
    }
}

fn pod<'a>(pod: &Value, name: Cell<'a>, age: Cell<'a>) -> Vec<Cell<'a>> {
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
        (false, None) => or(text(pod, "/status/reason"), text(pod, "/status/phase")),
    };
    let or_none = |pointer: &str| or(text(pod, pointer), "<none>");
    vec![
        name,
        shown("Ready", format!("{ready}/{containers}")),
        shown("Status", status),
        shown("Restarts", "0"),
        age,
        wide("IP", or_none("/status/podIP")),
        wide("Node", or_none("/spec/nodeName")),
        wide("Nominated Node", or_none("/status/nominatedNodeName")),
        wide("Readiness Gates", "<none>"),
    ]
}

fn node<'a>(node: &Value, name: Cell<'a>, age: Cell<'a>) -> Vec<Cell<'a>> {
    let ready = list(node, "/status/conditions")
        .iter()
        .find(|condition| condition["type"] == "Ready");
    let mut status = match ready.map_or("", |condition| text(condition, "/status")) {
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
    let address = |sort: &str| {
        let mut addresses = list(node, "/status/addresses").iter();
        let found = addresses.find(|address| address["type"] == sort);
        or(found.map_or("", |address| text(address, "/address")), "<none>")
    };
    let info = |field: &str| text(node, &format!("/status/nodeInfo/{field}"));
    vec![
        name,
        shown("Status", status),
        shown("Roles", or(&roles.join(","), "<none>")),
        age,
        shown("Version", info("kubeletVersion")),
        wide("Internal-IP", address("InternalIP")),
        wide("External-IP", address("ExternalIP")),
        wide("OS-Image", or(info("osImage"), "<unknown>")),
        wide("Kernel-Version", or(info("kernelVersion"), "<unknown>")),
        wide(
            "Container-Runtime",
            or(info("containerRuntimeVersion"), "<unknown>"),
        ),
    ]
}

fn event(kind: &ResourceKind, event: &Value, now: Timestamp) -> Vec<Cell<'static>> {
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
    let first = or(text(event, first), text(event, "/eventTime"));
    let mut last = or(text(event, last), first);
    let mut count = event.pointer(count).and_then(Value::as_i64).unwrap_or(0).max(1);
    if let Some(series) = event.get("series").filter(|series| series.is_object()) {
        last = text(series, "/lastObservedTime");
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
        component.to_owned()
    } else {
        format!("{component}, {host}")
    };
    vec![
        shown("Last Seen", age(last, now)),
        shown("Type", text(event, "/type")),
        shown("Reason", text(event, "/reason")),
        shown("Object", target),
        wide("Subobject", of("fieldPath")),
        wide("Source", source),
        shown("Message", text(event, message).trim()),
        wide("First Seen", age(first, now)),
        wide("Count", count),
        wide("Name", object::name(event)),
    ]
}

/// Mirrors `resourceClaimState` of the real server. In structured mode, no claim is shown as `deallocating`.
fn claim_state(kind: &ResourceKind, claim: &Value) -> String {
    let deleted = object::is_deleting(claim);
    let allocated = claim.pointer("/status/allocation").is_some();
    let reserved = !list(claim, "/status/reservedFor").is_empty();
    let requested = claim.pointer("/status/deallocationRequested") == Some(&Value::Bool(true));
    let ends = kind.is_classic() && (deleted || requested);
    let states = [
        ("deleted", deleted),
        ("pending", !allocated && !deleted),
        ("allocated", allocated),
        ("reserved", allocated && reserved),
        ("deallocating", allocated && !reserved && ends),
    ];
    let states = states.into_iter().filter(|(_, holds)| *holds);
    states.map(|(state, _)| state).collect::<Vec<_>>().join(",")
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
    use super::super::kinds::{ClusterMode, built_in};
    use super::*;

    #[test]
    fn a_claim_is_deallocating_in_classic_mode_only() {
        let state = |mode, claim: &Value| {
            let mut kinds = built_in(mode).into_iter();
            claim_state(&kinds.find(|kind| kind.kind == "ResourceClaim").unwrap(), claim)
        };
        let deleted = json!({ "deletionTimestamp": "2026-01-01T00:00:00Z" });
        for (claim, classic, structured) in [
            (json!({}), "pending", "pending"),
            (json!({ "metadata": deleted }), "deleted", "deleted"),
            (
                json!({ "status": { "allocation": {} } }),
                "allocated",
                "allocated",
            ),
            (
                json!({ "status": { "allocation": {}, "reservedFor": [{}] } }),
                "allocated,reserved",
                "allocated,reserved",
            ),
            (
                json!({ "status": { "allocation": {}, "deallocationRequested": true } }),
                "allocated,deallocating",
                "allocated",
            ),
            (
                json!({ "metadata": deleted, "status": { "allocation": {}, "reservedFor": [{}] } }),
                "deleted,allocated,reserved",
                "deleted,allocated,reserved",
            ),
            (
                json!({ "metadata": deleted, "status": { "allocation": {} } }),
                "deleted,allocated,deallocating",
                "deleted,allocated",
            ),
        ] {
            assert_eq!(state(ClusterMode::Classic, &claim), classic);
            assert_eq!(state(ClusterMode::Structured, &claim), structured);
        }
    }

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
