//! The annotation in which `kubectl apply` keeps the last applied configuration. The real server considers it when
//! kubectl switches to server-side apply (`lastAppliedManager` and `lastAppliedUpdater` of `util/managedfields`).

use serde_json::Value;

use super::fields::{FieldSet, flatten};
use super::kinds::ResourceKind;
use super::object::text;

/// Field manager for which the annotation applies; all others ignore it.
pub(crate) const MANAGER: &str = "kubectl";
const ANNOTATION: &str = "/metadata/annotations/kubectl.kubernetes.io~1last-applied-configuration";

/// Returns the fields that kubectl applied last and that have not changed since: kubectl may take them over from
/// itself.
pub(crate) fn fields(kind: &ResourceKind, live: &Value) -> FieldSet {
    let Ok(last) = serde_json::from_str::<Value>(text(live, ANNOTATION)) else {
        return FieldSet::new();
    };
    if text(&last, "/apiVersion") != kind.api_version() {
        return FieldSet::new();
    }
    let now = flatten(kind, live);
    let then = flatten(kind, &last).into_iter();
    then.filter(|(path, value)| now.get(path) == Some(value))
        .map(|(path, _)| path)
        .collect()
}

/// Updates the annotation, if present, as kubectl would write it.
pub(crate) fn renew(object: &mut Value, configuration: &Value) {
    let mut applied = configuration.clone();
    if let Some(Value::Object(annotations)) = applied.pointer_mut("/metadata/annotations") {
        annotations.remove("kubectl.kubernetes.io/last-applied-configuration");
        if annotations.is_empty()
            && let Some(Value::Object(metadata)) = applied.get_mut("metadata")
        {
            metadata.remove("annotations");
        }
    }
    // Escapes like Go's JSON encoder.
    let written = applied
        .to_string()
        .replace('&', "\\u0026")
        .replace('<', "\\u003c")
        .replace('>', "\\u003e");
    if let Some(Value::String(last)) = object.pointer_mut(ANNOTATION)
        && !last.is_empty()
    {
        *last = format!("{written}\n");
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::kinds::classic_kind;
    use super::*;

    fn annotated(data: &Value, last: &Value) -> Value {
        let name = "kubectl.kubernetes.io/last-applied-configuration";
        json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "a", "annotations": { name: last.to_string() } }, "data": data })
    }

    #[test]
    fn a_field_changed_after_the_last_apply_is_not_taken_over() {
        let kind = classic_kind("ConfigMap");
        let last = json!({ "apiVersion": "v1", "data": { "same": "1", "changed": "1", "gone": "1" } });
        let live = annotated(&json!({ "same": "1", "changed": "2" }), &last);
        let own: Vec<_> = fields(&kind, &live).into_iter().collect();
        assert_eq!(own, [["f:data", "f:same"]]);
        for other in [
            json!({ "apiVersion": "v2", "data": { "same": "1" } }),
            json!("none"),
        ] {
            assert!(fields(&kind, &annotated(&json!({ "same": "1" }), &other)).is_empty());
        }
    }

    #[test]
    fn the_annotation_is_renewed_where_there_is_one() {
        let configuration = json!({ "data": { "a": "<b>" } });
        let mut with = annotated(&json!({}), &json!({}));
        renew(&mut with, &configuration);
        assert_eq!(
            text(&with, ANNOTATION),
            "{\"data\":{\"a\":\"\\u003cb\\u003e\"}}\n"
        );
        let mut without = json!({ "metadata": { "name": "a" } });
        renew(&mut without, &configuration);
        assert_eq!(without, json!({ "metadata": { "name": "a" } }));
    }
}
