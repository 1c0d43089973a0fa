//! Label and field selectors of lists and watches.

use serde_json::Value;

use super::kinds::ResourceKind;
use super::object;
use super::status_error::StatusError;

/// Label and field selector of a list or watch.
#[derive(Clone, Debug, Default)]
pub(crate) struct ObjectSelector {
    labels: Vec<LabelRequirement>,
    fields: Vec<(String, String, bool)>,
}

#[derive(Clone, Debug)]
struct LabelRequirement {
    key: String,
    test: LabelTest,
}

#[derive(Clone, Debug)]
enum LabelTest {
    Exists,
    Missing,
    In(Vec<String>),
    NotIn(Vec<String>),
}

/// Selectable fields per kind in addition to name and namespace.
const FIELDS: &[(&str, &str)] = &[
    (
        "pods",
        "spec.nodeName spec.restartPolicy spec.schedulerName spec.serviceAccountName status.phase \
         status.nominatedNodeName",
    ),
    ("namespaces", "status.phase"),
    ("resourceslices", "spec.driver spec.nodeName spec.pool.name"),
    ("nodes", "spec.unschedulable"),
    (
        "events",
        "involvedObject.kind involvedObject.namespace involvedObject.name involvedObject.uid \
         involvedObject.apiVersion involvedObject.resourceVersion involvedObject.fieldPath reason \
         reportingComponent source type",
    ),
];

impl ObjectSelector {
    /// Parses both selector parameters.
    pub(crate) fn read(kind: &ResourceKind, labels: &str, fields: &str) -> Result<Self, StatusError> {
        Ok(Self {
            labels: read_labels(labels)?,
            fields: read_fields(kind, fields)?,
        })
    }

    /// Returns whether everything matches.
    pub(crate) fn is_empty(&self) -> bool {
        self.labels.is_empty() && self.fields.is_empty()
    }

    /// Returns whether an object in its stored form matches.
    pub(crate) fn matches(&self, stored: &Value) -> bool {
        let labels = self.labels.iter().all(|requirement| {
            let value = stored
                .pointer("/metadata/labels")
                .and_then(|labels| labels.get(&requirement.key))
                .and_then(Value::as_str);
            match (&requirement.test, value) {
                (LabelTest::Exists, value) => value.is_some(),
                (LabelTest::Missing, value) => value.is_none(),
                (LabelTest::In(values), Some(value)) => values.iter().any(|each| each == value),
                (LabelTest::In(_), None) => false,
                (LabelTest::NotIn(values), Some(value)) => values.iter().all(|each| each != value),
                (LabelTest::NotIn(_), None) => true,
            }
        });
        labels
            && self.fields.iter().all(|(pointer, wanted, equal)| {
                let value = match stored.pointer(pointer) {
                    Some(Value::Bool(value)) => value.to_string(),
                    // A missing boolean is false.
                    None if pointer == "/spec/unschedulable" => "false".to_owned(),
                    _ => object::text(stored, pointer).to_owned(),
                };
                (value == *wanted) == *equal
            })
    }
}

fn read_fields(kind: &ResourceKind, text: &str) -> Result<Vec<(String, String, bool)>, StatusError> {
    let mut fields = Vec::new();
    for term in text.split(',').map(str::trim).filter(|term| !term.is_empty()) {
        let (field, value, equal) = term
            .split_once("!=")
            .map(|(field, value)| (field, value, false))
            .or_else(|| term.split_once("==").map(|(field, value)| (field, value, true)))
            .or_else(|| term.split_once('=').map(|(field, value)| (field, value, true)))
            .ok_or_else(|| {
                StatusError::bad_request(format!(
                    "invalid field selector: {text:?}: can't understand {term:?}"
                ))
            })?;
        let is_built_in = kind.definition.is_none();
        let is_supported = match field {
            "metadata.name" => true,
            "metadata.namespace" => kind.namespaced || is_built_in,
            _ => FIELDS.iter().any(|(plural, fields)| {
                is_built_in && *plural == kind.plural && fields.split(' ').any(|name| name == field)
            }),
        };
        if !is_supported {
            return Err(StatusError::bad_request(format!(
                "field label not supported: {field}"
            )));
        }
        let pointer = match field {
            "source" => "/source/component".to_owned(),
            _ => format!("/{}", field.replace('.', "/")),
        };
        fields.push((pointer, value.to_owned(), equal));
    }
    Ok(fields)
}

fn read_labels(text: &str) -> Result<Vec<LabelRequirement>, StatusError> {
    let mut requirements = Vec::new();
    for term in terms(text) {
        let term = term.trim();
        if term.is_empty() {
            continue;
        }
        let wrong = || StatusError::bad_request(format!("unable to parse requirement: {term:?}"));
        let set = |list: &str| -> Result<Vec<String>, StatusError> {
            let list = list.trim();
            let inner = list
                .strip_prefix('(')
                .and_then(|list| list.strip_suffix(')'))
                .ok_or_else(wrong)?;
            Ok(inner.split(',').map(|value| value.trim().to_owned()).collect())
        };
        let one = |value: &str| vec![value.trim().to_owned()];
        let (key, test) = if let Some(key) = term.strip_prefix('!') {
            (key, LabelTest::Missing)
        } else if let Some((key, list)) = term.split_once(" notin ") {
            (key, LabelTest::NotIn(set(list)?))
        } else if let Some((key, list)) = term.split_once(" in ") {
            (key, LabelTest::In(set(list)?))
        } else if let Some((key, value)) = term.split_once("!=") {
            (key, LabelTest::NotIn(one(value)))
        } else if let Some((key, value)) = term.split_once("==") {
            (key, LabelTest::In(one(value)))
        } else if let Some((key, value)) = term.split_once('=') {
            (key, LabelTest::In(one(value)))
        } else {
            (term, LabelTest::Exists)
        };
        let key = key.trim();
        let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '/');
        if key.is_empty() || !key.chars().all(legal) {
            return Err(wrong());
        }
        requirements.push(LabelRequirement {
            key: key.to_owned(),
            test,
        });
    }
    Ok(requirements)
}

/// Splits at commas outside parentheses.
fn terms(text: &str) -> Vec<&str> {
    let (mut terms, mut depth, mut start) = (Vec::new(), 0_i32, 0);
    for (index, character) in text.char_indices() {
        match character {
            '(' => depth += 1,
            ')' => depth -= 1,
            ',' if depth == 0 => {
                terms.extend(text.get(start..index));
                start = index + 1;
            }
            _ => {}
        }
    }
    terms.extend(text.get(start..));
    terms
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::kinds::classic_kind;
    use super::*;

    #[test]
    fn labels_are_selected_in_the_syntax_of_kubectl() {
        let object = json!({ "metadata": { "labels": { "app": "web", "x/tier": "a" } } });
        for (text, matches) in [
            ("", true),
            ("app=web", true),
            ("app==web,x/tier in (a, b)", true),
            ("app!=web", false),
            ("app in (db),app", false),
            ("app notin (db)", true),
            ("other notin (db)", true),
            ("!other,app", true),
            ("!app", false),
            ("other", false),
        ] {
            let selector = ObjectSelector::read(&classic_kind("Pod"), text, "").unwrap();
            assert_eq!(selector.matches(&object), matches, "{text}");
        }
        for text in ["a in b", "=x", "a b c"] {
            assert_eq!(
                ObjectSelector::read(&classic_kind("Pod"), text, "")
                    .unwrap_err()
                    .code,
                400,
                "{text}"
            );
        }
    }

    #[test]
    fn only_the_fields_that_a_kind_has_can_be_selected_by() {
        let object = json!({ "metadata": { "name": "p" }, "spec": { "nodeName": "n" } });
        let select = |text: &str| ObjectSelector::read(&classic_kind("Pod"), "", text);
        assert!(
            select("metadata.name=p,spec.nodeName!=m")
                .unwrap()
                .matches(&object)
        );
        assert!(!select("spec.nodeName=").unwrap().matches(&object));
        assert_eq!(select("spec.color=red").unwrap_err().code, 400);
        assert_eq!(select("nonsense").unwrap_err().code, 400);
    }
}
