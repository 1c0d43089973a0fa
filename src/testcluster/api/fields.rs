//! Field sets as in `managedFields` (`sigs.k8s.io/structured-merge-diff`, `fieldsV1`).
//!
//! A path is a list of elements: `f:name` is a field, `k:{"name":"x"}` an entry of a list map, `v:"x"` a member of a
//! set.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::kinds::ResourceKind;
use super::lists::{Asker, ListKind, has_atomic_elements, is_atomic_structure, list_kind};

pub(crate) type FieldPath = Vec<String>;
pub(crate) type FieldSet = BTreeSet<FieldPath>;

/// Fields without an owner.
const UNOWNED: &[&[&str]] = &[
    &["f:apiVersion"],
    &["f:kind"],
    &["f:metadata", "f:name"],
    &["f:metadata", "f:namespace"],
    &["f:metadata", "f:creationTimestamp"],
    &["f:metadata", "f:uid"],
    &["f:metadata", "f:generation"],
    &["f:metadata", "f:managedFields"],
    &["f:metadata", "f:resourceVersion"],
    &["f:metadata", "f:deletionTimestamp"],
    &["f:metadata", "f:deletionGracePeriodSeconds"],
];

/// Structures that Go serializes in every object, so no manager adds them.
const ALWAYS: &[&str] = &[
    "metadata",
    "spec",
    "status",
    "spec.devices",
    "spec.pool",
    "spec.spec.devices",
    "spec.containers",
    "spec.metadata",
    "spec.names",
    "spec.spec",
    "status.daemonEndpoints",
    "status.nodeInfo",
    "involvedObject",
    "regarding",
    "source",
];

/// Returns the fields of an object that can be owned, with their values. List entries are included in addition to their
/// fields, without a value.
pub(crate) fn flatten(kind: &ResourceKind, object: &Value) -> BTreeMap<FieldPath, Value> {
    fields_of(kind, object, false)
}

/// Like [`flatten`], but includes the enclosing structures, maps and lists without values; the manager that adds them
/// owns them.
pub(crate) fn flatten_all(kind: &ResourceKind, object: &Value) -> BTreeMap<FieldPath, Value> {
    fields_of(kind, object, true)
}

fn fields_of(kind: &ResourceKind, object: &Value, whole: bool) -> BTreeMap<FieldPath, Value> {
    let mut fields = BTreeMap::new();
    if let Some(map) = object.as_object() {
        let walk = Walk { kind, whole };
        walk.descend(&mut Vec::new(), &mut Vec::new(), map, &mut fields);
    }
    fields.retain(|path, _| {
        !UNOWNED
            .iter()
            .any(|unowned| path.iter().zip(*unowned).filter(|(a, b)| a == b).count() == unowned.len())
    });
    fields
}

struct Walk<'a> {
    kind: &'a ResourceKind,
    /// Whether enclosing structures, maps and lists count as fields.
    whole: bool,
}

impl Walk<'_> {
    fn descend(
        &self,
        path: &mut FieldPath,
        names: &mut Vec<String>,
        map: &Map<String, Value>,
        fields: &mut BTreeMap<FieldPath, Value>,
    ) {
        for (key, value) in map {
            path.push(format!("f:{key}"));
            names.push(key.clone());
            match value {
                Value::Null => {}
                Value::Object(inner)
                    if (self.whole || !inner.is_empty()) && !is_atomic_structure(self.kind, names) =>
                {
                    self.enter(path, names, fields);
                    self.descend(path, names, inner, fields);
                }
                Value::Array(elements) => match list_kind(self.kind, names, Asker::Apply) {
                    ListKind::Atomic => {
                        fields.insert(path.clone(), value.clone());
                    }
                    ListKind::Set => {
                        self.enter(path, names, fields);
                        for element in elements {
                            path.push(format!("v:{element}"));
                            fields.insert(path.clone(), Value::Null);
                            path.pop();
                        }
                    }
                    ListKind::Map(keys) => {
                        self.enter(path, names, fields);
                        for element in elements {
                            path.push(element_of(&keys, element));
                            match element.as_object() {
                                Some(inner) if !has_atomic_elements(names) => {
                                    fields.insert(path.clone(), Value::Null);
                                    self.descend(path, names, inner, fields);
                                }
                                _ => {
                                    fields.insert(path.clone(), element.clone());
                                }
                            }
                            path.pop();
                        }
                    }
                },
                value => {
                    fields.insert(path.clone(), value.clone());
                }
            }
            names.pop();
            path.pop();
        }
    }

    /// Records an enclosing structure, map or list.
    fn enter(&self, path: &[String], names: &[String], fields: &mut BTreeMap<FieldPath, Value>) {
        let dotted = names.join(".");
        let always =
            dotted == "metadata" || self.kind.definition.is_none() && ALWAYS.contains(&dotted.as_str());
        if self.whole && !always {
            fields.insert(path.to_vec(), Value::Null);
        }
    }
}

/// Returns the path element of a list map's entry.
pub(crate) fn element_of(keys: &[String], element: &Value) -> String {
    let id: Map<String, Value> = keys
        .iter()
        .filter_map(|key| Some((key.clone(), element.get(key)?.clone())))
        .collect();
    format!("k:{}", Value::Object(id))
}

/// Removes the field at a path, if present.
pub(crate) fn remove(object: &mut Value, path: &[String]) {
    let Some((last, parents)) = path.split_last() else {
        return;
    };
    let mut at = object;
    for element in parents {
        let next = match element.split_once(':') {
            Some(("f", name)) => at.get_mut(name),
            _ => position(at, element).and_then(|index| at.get_mut(index)),
        };
        let Some(next) = next else { return };
        at = next;
    }
    match last.split_once(':') {
        Some(("f", name)) => {
            if let Some(map) = at.as_object_mut() {
                map.remove(name);
            }
        }
        _ => {
            if let (Some(index), Some(list)) = (position(at, last), at.as_array_mut()) {
                list.remove(index);
            }
        }
    }
}

/// Returns the index of a list element given by its path element.
fn position(list: &Value, element: &str) -> Option<usize> {
    let (sort, id) = element.split_once(':')?;
    let id: Value = serde_json::from_str(id).ok()?;
    list.as_array()?
        .iter()
        .position(|each| match (sort, id.as_object()) {
            ("k", Some(keys)) => keys.iter().all(|(key, value)| each.get(key) == Some(value)),
            _ => *each == id,
        })
}

/// Serializes a set as `fieldsV1`.
pub(crate) fn to_json(set: &FieldSet) -> Value {
    #[derive(Default)]
    struct FieldTree {
        own: bool,
        below: BTreeMap<String, Self>,
    }
    fn written(node: FieldTree) -> Value {
        // A leaf is an empty object without the dot.
        let dot = (node.own && !node.below.is_empty()).then(|| (".".to_owned(), Value::Object(Map::new())));
        let below = node
            .below
            .into_iter()
            .map(|(element, node)| (element, written(node)));
        Value::Object(dot.into_iter().chain(below).collect())
    }
    let mut root = FieldTree::default();
    for path in set {
        let at = path.iter().fold(&mut root, |at, element| {
            at.below.entry(element.clone()).or_default()
        });
        at.own = true;
    }
    written(root)
}

/// Parses `fieldsV1`.
pub(crate) fn from_json(fields: &Value) -> FieldSet {
    fn walk(value: &Value, path: &mut FieldPath, set: &mut FieldSet) {
        let Some(map) = value.as_object() else { return };
        if map.is_empty() {
            set.insert(path.clone());
        }
        for (key, inner) in map {
            if key == "." {
                set.insert(path.clone());
            } else {
                path.push(key.clone());
                walk(inner, path, set);
                path.pop();
            }
        }
    }
    let mut set = FieldSet::new();
    if fields.as_object().is_some_and(|map| !map.is_empty()) {
        walk(fields, &mut Vec::new(), &mut set);
    }
    set
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::kinds::classic_kind;
    use super::*;

    #[test]
    fn a_set_of_fields_reads_back_as_it_was_written() {
        let object = json!({
            "apiVersion": "x", "metadata": { "name": "p", "labels": { "a": "b" }, "finalizers": ["x/y"] },
            "spec": { "potentialNodes": ["a", "b"] },
            "status": { "resourceClaims": [{ "name": "c", "unsuitableNodes": ["n"] }, { "name": "d" }] },
        });
        let set: FieldSet = flatten(&classic_kind("PodSchedulingContext"), &object)
            .into_keys()
            .collect();
        let written = to_json(&set);
        assert_eq!(
            written,
            json!({
                "f:metadata": { "f:labels": { "f:a": {} }, "f:finalizers": { "v:\"x/y\"": {} } },
                "f:spec": { "f:potentialNodes": {} },
                "f:status": { "f:resourceClaims": {
                    "k:{\"name\":\"c\"}": { ".": {}, "f:name": {}, "f:unsuitableNodes": {} },
                    "k:{\"name\":\"d\"}": { ".": {}, "f:name": {} },
                } },
            })
        );
        assert_eq!(from_json(&written), set);
    }

    #[test]
    fn a_shared_field_belongs_to_each_manager_that_adds_it() {
        let object = json!({
            "metadata": { "name": "p", "labels": { "a": "b" } }, "spec": { "selectedNode": "a" },
            "status": { "resourceClaims": [] },
        });
        let context = classic_kind("PodSchedulingContext");
        let set: FieldSet = flatten_all(&context, &object).into_keys().collect();
        assert_eq!(
            to_json(&set),
            json!({
                "f:metadata": { "f:labels": { ".": {}, "f:a": {} } },
                "f:spec": { "f:selectedNode": {} },
                "f:status": { "f:resourceClaims": {} },
            })
        );
    }

    #[test]
    fn an_entry_of_a_list_is_removed_by_its_key() {
        let mut object = json!({ "status": { "resourceClaims": [{ "name": "c" }, { "name": "d" }] } });
        let path = ["f:status", "f:resourceClaims", "k:{\"name\":\"c\"}"].map(str::to_owned);
        remove(&mut object, &path);
        remove(&mut object, &path);
        assert_eq!(
            object,
            json!({ "status": { "resourceClaims": [{ "name": "d" }] } })
        );
    }
}
