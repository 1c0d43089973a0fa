//! Lists in the documentation match the code: log keys, event reasons and refusal reasons. Sources are parsed as tokens, so comments and
//! strings do not count.

mod scan;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The section of a page between its markers.
fn list(page: &str, name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs").join(page);
    let text = std::fs::read_to_string(path).expect("a page of the documentation");
    let begin = text.find(&format!("<!-- {name}")).expect("the list begins");
    let end = text
        .find(&format!("<!-- end of {name} -->"))
        .expect("the list ends");
    text.get(begin..end).expect("a list").to_owned()
}

/// Words in the first column of a table.
fn words(list: &str) -> BTreeSet<String> {
    list.lines()
        .filter_map(|line| line.strip_prefix("| ")?.split(" | ").next())
        .flat_map(|column| column.split(", "))
        .filter_map(|word| word.strip_prefix('`')?.strip_suffix('`'))
        .map(str::to_owned)
        .collect()
}

fn differences(documented: &BTreeSet<String>, found: &BTreeMap<String, BTreeSet<String>>) -> Vec<String> {
    let undocumented = found
        .iter()
        .filter(|(word, _)| !documented.contains(*word))
        .map(|(word, places)| format!("{word} is not documented: {places:?}"));
    let unused = documented
        .iter()
        .filter(|word| !found.contains_key(*word))
        .map(|word| format!("{word} is documented, but not in the code"));
    undocumented.chain(unused).collect()
}

#[test]
fn the_keys_of_the_log_are_those_of_the_documentation() {
    let found = scan::log_keys();
    assert!(found.len() > 10, "{found:?}");
    let wrong = differences(&words(&list("reference/metrics.md", "keys")), &found);
    assert!(wrong.is_empty(), "{wrong:#?}");
    // Such a key would conflict with the message of the line.
    assert!(!found.contains_key("message"), "{:?}", found.get("message"));
}

#[test]
fn the_reasons_of_events_are_those_of_the_documentation() {
    let found = scan::event_reasons();
    assert!(found.len() > 10, "{found:?}");
    let wrong = differences(&words(&list("reference/metrics.md", "events")), &found);
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn reasons_of_refused_claims_are_documented() {
    let found = scan::refusal_reasons();
    assert!(found.len() > 10, "{found:?}");
    let wrong = differences(&words(&list("reference/metrics.md", "refusals")), &found);
    assert!(wrong.is_empty(), "{wrong:#?}");
}
