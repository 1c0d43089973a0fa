//! Answers in a form in which those of two servers can be compared.

use std::collections::BTreeMap;

use serde_json::Value;

/// Replaces what differs between any two runs: uids and versions by numbers in the order in which they come, times by a word.
/// The version of a list is a word too: other tests write to the same server meanwhile.
/// Who manages which field is left out unless it is `managed`.
pub(crate) fn same_form(transcript: Vec<Value>, managed: bool) -> Vec<Value> {
    let mut names = Names {
        managed,
        ..Names::default()
    };
    transcript
        .into_iter()
        .map(|mut answer| {
            names.collect(&answer);
            names.rewrite(&mut answer, "");
            answer
        })
        .collect()
}

#[derive(Default)]
struct Names {
    managed: bool,
    uids: BTreeMap<String, String>,
    versions: BTreeMap<String, String>,
}

impl Names {
    fn collect(&mut self, value: &Value) {
        match value {
            Value::Object(map) => {
                let is_list = map.contains_key("items");
                for (key, value) in map {
                    if is_list && key == "metadata" {
                        continue;
                    }
                    if let (Some(text), "uid" | "shareID") = (value.as_str(), key.as_str())
                        && text.len() == 36
                    {
                        let next = format!("uid-{}", self.uids.len());
                        self.uids.entry(text.to_owned()).or_insert(next);
                    }
                    if let (Some(text), "resourceVersion") = (value.as_str(), key.as_str()) {
                        let next = format!("version-{}", self.versions.len());
                        self.versions.entry(text.to_owned()).or_insert(next);
                    }
                    self.collect(value);
                }
            }
            Value::Array(list) => list.iter().for_each(|value| self.collect(value)),
            _ => {}
        }
    }

    fn rewrite(&self, value: &mut Value, under: &str) {
        match value {
            Value::Object(map) => {
                if !self.managed {
                    map.remove("managedFields");
                }
                // The real server gives the types of a template's metadata and of lists their empty fields.
                map.retain(|key, value| !(key == "creationTimestamp" && value.is_null()));
                if map.contains_key("items")
                    && let Some(version) = map
                        .get_mut("metadata")
                        .and_then(|list| list.get_mut("resourceVersion"))
                {
                    *version = "of the list".into();
                }
                for (key, value) in map.iter_mut() {
                    self.rewrite(value, key);
                }
            }
            Value::Array(list) => {
                for value in list.iter_mut() {
                    self.rewrite(value, under);
                }
                if under == "managedFields" {
                    // By their times otherwise, which are blank here.
                    list.sort_by_key(|entry| {
                        ["operation", "manager", "subresource"].map(|key| entry[key].to_string())
                    });
                }
                if under == "causes" {
                    list.sort_by_key(Value::to_string);
                    // Some rules are applied twice by the real server, and tell it twice.
                    list.dedup();
                }
            }
            Value::String(text) => {
                if under == "resourceVersion" {
                    if let Some(name) = self.versions.get(text) {
                        text.clone_from(name);
                    }
                } else if text.parse::<jiff::Timestamp>().is_ok() {
                    "a time".clone_into(text);
                } else {
                    hide_value(text);
                    for (uid, name) in &self.uids {
                        if text.contains(uid.as_str()) {
                            *text = text.replace(uid.as_str(), name);
                        }
                    }
                }
            }
            _ => {}
        }
    }
}

/// The real server shows the value of an immutable field as Go prints it, with addresses in it.
fn hide_value(text: &mut String) {
    const END: &str = ": field is immutable";
    const BEGIN: &str = "Invalid value: ";
    if let (Some(begin), Some(end)) = (text.find(BEGIN), text.rfind(END))
        && begin < end
    {
        text.replace_range(begin + BEGIN.len()..end, "...");
    }
}
