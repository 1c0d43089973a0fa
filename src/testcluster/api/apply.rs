//! Server-side apply and field ownership.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::field_error::FieldError;
use super::fields::{FieldPath, FieldSet, element_of, flatten, flatten_all, from_json, remove, to_json};
use super::kinds::ResourceKind;
use super::last_applied;
use super::lists::{Asker, ListKind, has_atomic_elements, is_atomic_structure, list_kind};
use super::object;
use super::status_error::StatusError;

/// Field manager of a write.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Manager<'a> {
    pub(crate) name: &'a str,
    /// `status` or empty.
    pub(crate) subresource: &'a str,
    /// Time of the write.
    pub(crate) now: &'a str,
}

/// An entry of `managedFields`.
#[derive(Clone, Debug)]
struct ManagedFieldsEntry {
    manager: String,
    operation: String,
    subresource: String,
    /// Empty until the manager changes a field.
    time: String,
    fields: FieldSet,
}

impl ManagedFieldsEntry {
    fn is_of(&self, manager: &Manager<'_>, operation: &str) -> bool {
        self.manager == manager.name && self.operation == operation && self.subresource == manager.subresource
    }
}

fn entries_of(object: &Value) -> Vec<ManagedFieldsEntry> {
    let text = |entry: &Value, pointer: &str| object::text(entry, pointer).to_owned();
    object::list(object, "/metadata/managedFields")
        .iter()
        .map(|entry| ManagedFieldsEntry {
            manager: text(entry, "/manager"),
            operation: text(entry, "/operation"),
            subresource: text(entry, "/subresource"),
            time: text(entry, "/time"),
            fields: entry.get("fieldsV1").map(from_json).unwrap_or_default(),
        })
        .collect()
}

fn write_entries(kind: &ResourceKind, object: &mut Value, mut entries: Vec<ManagedFieldsEntry>) {
    // Same order as `sortEncodedManagedFields`.
    entries.sort_by_cached_key(|entry| {
        [&entry.operation, &entry.time, &entry.manager, &entry.subresource].map(String::clone)
    });
    let entries: Vec<Value> = entries
        .into_iter()
        .filter(|entry| !entry.fields.is_empty())
        .map(|entry| {
            let mut written = json!({
                "manager": entry.manager,
                "operation": entry.operation,
                "apiVersion": kind.api_version(),
                "fieldsType": "FieldsV1",
                "fieldsV1": to_json(&entry.fields),
            });
            if !entry.time.is_empty() {
                written["time"] = entry.time.into();
            }
            if !entry.subresource.is_empty() {
                written["subresource"] = entry.subresource.into();
            }
            written
        })
        .collect();
    let value = (!entries.is_empty()).then_some(Value::Array(entries));
    object::set_metadata(object, "managedFields", value);
}

fn entry_of<'a>(
    entries: &'a mut Vec<ManagedFieldsEntry>,
    manager: &Manager<'_>,
    operation: &str,
) -> Option<&'a mut ManagedFieldsEntry> {
    if !entries.iter().any(|entry| entry.is_of(manager, operation)) {
        entries.push(ManagedFieldsEntry {
            manager: manager.name.to_owned(),
            operation: operation.to_owned(),
            subresource: manager.subresource.to_owned(),
            time: String::new(),
            fields: FieldSet::new(),
        });
    }
    entries.iter_mut().find(|entry| entry.is_of(manager, operation))
}

/// Records in `after` that the manager of a write other than apply now owns the fields it changed.
pub(crate) fn track_update(kind: &ResourceKind, before: &Value, after: &mut Value, manager: &Manager<'_>) {
    let mut entries = entries_of(before);
    let (old, new) = (flatten_all(kind, before), flatten_all(kind, after));
    let changed: FieldSet = new
        .iter()
        .filter(|(path, value)| old.get(*path) != Some(value))
        .map(|(path, _)| path.clone())
        .filter(|path| !is_reset(kind, manager, path))
        .collect();
    for entry in &mut entries {
        entry
            .fields
            .retain(|path| new.contains_key(path) && !changed.contains(path));
    }
    if !changed.is_empty()
        && let Some(entry) = entry_of(&mut entries, manager, "Update")
    {
        entry.fields.extend(changed);
        manager.now.clone_into(&mut entry.time);
    }
    write_entries(kind, after, entries);
}

/// Returns whether the endpoint ignores the field (`GetResetFields`) or the server sets it.
fn is_reset(kind: &ResourceKind, manager: &Manager<'_>, path: &[String]) -> bool {
    let first = path.first().map_or("", String::as_str);
    match manager.subresource {
        "" if first == "f:status" => kind.status,
        "" => {
            kind.is("", "namespaces")
                && path.get(..2) == Some(&["f:spec".to_owned(), "f:finalizers".to_owned()])
        }
        "status" => first != "f:status",
        _ => false,
    }
}

/// Applies a configuration to an object.
pub(crate) fn apply(
    kind: &ResourceKind,
    live: &Value,
    configuration: &Value,
    manager: &Manager<'_>,
    force: bool,
) -> Result<Value, StatusError> {
    let applied = merged(kind, live, configuration, manager, force);
    if manager.name != last_applied::MANAGER {
        return applied.map_err(refused);
    }
    let applied = applied.or_else(|mut conflicts| {
        let own = last_applied::fields(kind, live);
        conflicts.retain(|(path, _)| !own.contains(path));
        if conflicts.is_empty() {
            merged(kind, live, configuration, manager, true)
        } else {
            Err(conflicts)
        }
    });
    let mut applied = applied.map_err(refused)?;
    last_applied::renew(&mut applied, configuration);
    Ok(applied)
}

/// Merges the configuration into the object, or returns the fields that conflict with other managers.
fn merged(
    kind: &ResourceKind,
    live: &Value,
    configuration: &Value,
    manager: &Manager<'_>,
    force: bool,
) -> Result<Value, Vec<(FieldPath, FieldError)>> {
    let mut configuration = configuration.clone();
    // Status and the rest of the object have separate endpoints.
    if let Some(map) = configuration.as_object_mut() {
        match (manager.subresource, kind.status) {
            ("status", _) => {
                map.retain(|key, _| matches!(key.as_str(), "apiVersion" | "kind" | "metadata" | "status"));
            }
            (_, true) => {
                map.remove("status");
            }
            _ => {}
        }
    }
    let wanted = flatten(kind, &configuration);
    let mut merged = live.clone();
    if let Some(map) = configuration.as_object() {
        merge(kind, &mut Vec::new(), &mut merged, map);
    }
    let mut entries = entries_of(live);
    let mine = |entry: &ManagedFieldsEntry| entry.is_of(manager, "Apply");
    let old = flatten(kind, live);
    let differs: BTreeMap<&FieldPath, &Value> = wanted
        .iter()
        // A field that another manager owns can be absent: an empty list is stored as none.
        .filter(|(path, value)| old.get(*path) != Some(value))
        .collect();
    let mut conflicts = Vec::new();
    for entry in entries.iter_mut().filter(|entry| !mine(entry)) {
        for path in differs.keys().filter(|path| entry.fields.contains(**path)) {
            let mut by = format!("{:?}", entry.manager);
            if !entry.subresource.is_empty() {
                by = format!("{by} with subresource {:?}", entry.subresource);
            }
            if entry.operation == "Update" {
                by = format!("{by} using {}", kind.api_version());
            }
            let conflict = FieldError {
                cause: "FieldManagerConflict",
                field: dotted(path),
                message: format!("conflict with {by}"),
            };
            conflicts.push(((*path).clone(), conflict));
        }
        if force {
            entry.fields.retain(|path| !differs.contains_key(path));
        }
    }
    if !force && !conflicts.is_empty() {
        return Err(conflicts);
    }
    // Removes fields that this manager has dropped and no other manager owns.
    let gone: Vec<FieldPath> = entries
        .iter()
        .filter(|entry| mine(entry))
        .flat_map(|entry| entry.fields.iter())
        .filter(|path| !wanted.contains_key(*path))
        // Keeps parents of fields that another manager owns.
        .filter(|path| {
            let below = |entry: &ManagedFieldsEntry| {
                let mut next = entry.fields.range((*path).clone()..);
                next.next().is_some_and(|next| next.starts_with(path))
            };
            !entries.iter().any(|entry| !mine(entry) && below(entry))
        })
        .cloned()
        .collect();
    for path in &gone {
        remove(&mut merged, path);
    }
    let changed = flatten_all(kind, &merged) != flatten_all(kind, live);
    if let Some(entry) = entry_of(&mut entries, manager, "Apply") {
        entry.fields = wanted.into_keys().collect();
        if changed {
            manager.now.clone_into(&mut entry.time);
        }
    }
    write_entries(kind, &mut merged, entries);
    Ok(merged)
}

fn refused(conflicts: Vec<(FieldPath, FieldError)>) -> StatusError {
    let conflicts: Vec<FieldError> = conflicts.into_iter().map(|(_, conflict)| conflict).collect();
    let message = if let [one] = conflicts.as_slice() {
        format!("Apply failed with 1 conflict: {}: {}", one.message, one.field)
    } else {
        // Groups conflicts by manager, as `getConflictMessage` does.
        let mut lines: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for conflict in &conflicts {
            let line = format!("- {}", conflict.field);
            lines.entry(&conflict.message).or_default().push(line);
        }
        let lines = lines.into_iter().map(|(with, fields)| {
            let with = with.replacen("conflict ", "conflicts ", 1);
            format!("{with}:\n{}", fields.join("\n"))
        });
        let lines: Vec<String> = lines.collect();
        format!(
            "Apply failed with {} conflicts: {}",
            conflicts.len(),
            lines.join("\n")
        )
    };
    StatusError::apply_conflict(&conflicts, message)
}

/// Formats a path, for example `.status.resourceClaims[name="c"].unsuitableNodes`.
fn dotted(path: &[String]) -> String {
    path.iter()
        .map(|element| match element.split_once(':') {
            Some(("f", name)) => format!(".{name}"),
            Some(("k", keys)) => {
                let keys: Map<String, Value> = serde_json::from_str(keys).unwrap_or_default();
                let keys: Vec<String> = keys.iter().map(|(key, value)| format!("{key}={value}")).collect();
                format!("[{}]", keys.join(","))
            }
            _ => format!("[{}]", element.trim_start_matches("v:")),
        })
        .collect()
}

fn merge(
    kind: &ResourceKind,
    path: &mut Vec<String>,
    target: &mut Value,
    configuration: &Map<String, Value>,
) {
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    let Some(target) = target.as_object_mut() else {
        return;
    };
    for (key, value) in configuration {
        path.push(key.clone());
        let known = target.entry(key.clone()).or_insert(Value::Null);
        match value {
            Value::Object(inner) if !is_atomic_structure(kind, path) => merge(kind, path, known, inner),
            Value::Array(elements) => match list_kind(kind, path, Asker::Apply) {
                ListKind::Atomic => *known = value.clone(),
                ListKind::Set => {
                    let mut set = known.as_array().cloned().unwrap_or_default();
                    set.extend(
                        elements
                            .iter()
                            .filter(|element| !set.contains(element))
                            .cloned()
                            .collect::<Vec<_>>(),
                    );
                    *known = Value::Array(set);
                }
                ListKind::Map(keys) => {
                    let mut list = known.as_array().cloned().unwrap_or_default();
                    for element in elements {
                        let id = element_of(&keys, element);
                        let position = list.iter().position(|each| element_of(&keys, each) == id);
                        match (
                            position.and_then(|index| list.get_mut(index)),
                            element.as_object(),
                        ) {
                            (Some(known), Some(inner)) if !has_atomic_elements(path) => {
                                merge(kind, path, known, inner);
                            }
                            (Some(known), _) => known.clone_from(element),
                            _ => list.push(element.clone()),
                        }
                    }
                    *known = Value::Array(list);
                }
            },
            value => *known = value.clone(),
        }
        path.pop();
    }
}

#[cfg(test)]
mod tests {
    use super::super::kinds::classic_kind;
    use super::*;

    fn applied(live: &Value, manager: &str, entries: &Value, force: bool) -> Result<Value, StatusError> {
        let context = classic_kind("PodSchedulingContext");
        let configuration = json!({ "metadata": { "name": "p" }, "status": { "resourceClaims": entries } });
        let manager = Manager {
            name: manager,
            subresource: "status",
            now: "2026-01-01T00:00:00Z",
        };
        apply(&context, live, &configuration, &manager, force)
    }

    #[test]
    fn each_field_manager_replaces_only_its_own_entries() {
        let live = json!({ "metadata": { "name": "p" } });
        let live = applied(
            &live,
            "a",
            &json!([{ "name": "x" }, { "name": "y", "unsuitableNodes": ["n"] }]),
            true,
        )
        .unwrap();
        let live = applied(&live, "b", &json!([{ "name": "z" }]), true).unwrap();
        let live = applied(
            &live,
            "a",
            &json!([{ "name": "y", "unsuitableNodes": ["m"] }]),
            true,
        )
        .unwrap();
        assert_eq!(
            live["status"]["resourceClaims"],
            json!([{ "name": "y", "unsuitableNodes": ["m"] }, { "name": "z" }])
        );
    }

    #[test]
    fn a_field_of_another_manager_is_a_conflict_unless_forced() {
        let live = json!({ "metadata": { "name": "p" } });
        let live = applied(
            &live,
            "a",
            &json!([{ "name": "y", "unsuitableNodes": ["n"] }]),
            false,
        )
        .unwrap();
        let other = json!([{ "name": "y", "unsuitableNodes": ["m"] }]);
        let refusal = applied(&live, "b", &other, false).unwrap_err();
        assert_eq!(
            (refusal.code, refusal.message.as_str()),
            (
                409,
                "Apply failed with 1 conflict: conflict with \"a\" with subresource \"status\": .status.resourceClaims[name=\"y\"].unsuitableNodes"
            )
        );
        let live = applied(&live, "b", &other, true).unwrap();
        assert_eq!(live["status"]["resourceClaims"], other);
    }

    #[test]
    fn an_empty_list_of_another_manager_is_a_conflict_too() {
        let live = json!({ "metadata": { "name": "p" } });
        let mut live = applied(
            &live,
            "a",
            &json!([{ "name": "y", "unsuitableNodes": [] }]),
            false,
        )
        .unwrap();
        live["status"]["resourceClaims"] = json!([{ "name": "y" }]);
        let other = json!([{ "name": "y", "unsuitableNodes": ["m"] }]);
        assert_eq!(applied(&live, "b", &other, false).unwrap_err().code, 409);
    }

    #[test]
    fn the_same_again_changes_nothing() {
        let live = applied(&json!({ "metadata": {} }), "a", &json!([{ "name": "y" }]), true).unwrap();
        assert_eq!(
            applied(&live, "a", &json!([{ "name": "y" }]), true).unwrap(),
            live
        );
    }
}
