//! Normalizes the answers of two servers for comparison.

use std::collections::BTreeMap;

use serde_json::Value;

/// Replaces values that differ between any two runs: uids and resource versions by numbers in order of appearance, times and the version of
/// a list by a word, because other tests write to the same server. Removes `managedFields` unless `managed`.
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
                // The real server includes null creation timestamps in templates and lists.
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
                    // The server sorts them by time, which is blank here.
                    list.sort_by_key(|entry| {
                        ["operation", "manager", "subresource"].map(|key| entry[key].to_string())
                    });
                }
                if under == "causes" {
                    list.sort_by_key(Value::to_string);
                    // The real server applies some rules twice and reports both.
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

/// The real server prints the value of an immutable field as Go does, with addresses.
fn hide_value(text: &mut String) {
    const END: &str = ": field is immutable";
    const BEGIN: &str = "Invalid value: ";
    if let (Some(begin), Some(end)) = (text.find(BEGIN), text.rfind(END))
        && begin < end
    {
        text.replace_range(begin + BEGIN.len()..end, "...");
    }
}
