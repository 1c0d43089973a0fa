//! The checklist of docs/security.md is whole, and each of its points has a test or a reason why there is none.

use crate::names::{is_test_name, tests};
use crate::page::{page, parse};

/// S1 to S24.
const POINTS: usize = 24;

#[test]
fn each_point_of_the_checklist_has_a_test_or_a_reason() {
    let page = page("docs/security.md");
    let tests = tests();
    let mut seen = Vec::new();
    for line in page.text.lines().filter(|line| line.starts_with("| S")) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [number, what, how, shown] = cells.as_slice() else {
            panic!("four cells: {line}");
        };
        seen.push((*number).to_owned());
        assert!(!what.is_empty() && !how.is_empty(), "{line}");
        let mut cell = parse("docs/security.md", shown);
        cell.path.clone_from(&page.path);
        let named: Vec<_> = cell
            .spans
            .iter()
            .filter(|span| is_test_name(&cell, span))
            .collect();
        for span in &named {
            assert!(
                tests.iter().any(|test| test.is(&span.text)),
                "{number}: no test {}",
                span.text
            );
        }
        let reason = shown
            .split_once("no test:")
            .map_or("", |(_, reason)| reason.trim());
        assert!(
            !named.is_empty() || reason.len() > 20,
            "{number} has neither a test nor a reason: {shown}"
        );
    }
    let expected: Vec<String> = (1..=POINTS).map(|number| format!("S{number}")).collect();
    assert_eq!(seen, expected);
}

/// What a page says of the lints and of the profile, in the words of Cargo.toml.
#[test]
fn the_rules_that_the_compiler_enforces_are_in_force() {
    let manifest = std::fs::read_to_string(crate::page::repository("Cargo.toml")).expect("the manifest");
    for line in [
        "unsafe_code = \"forbid\"",
        "unwrap_used = \"warn\"",
        "panic = \"warn\"",
        "panic = \"abort\"",
    ] {
        assert!(manifest.lines().any(|found| found == line), "{line}");
    }
    let makefile = std::fs::read_to_string(crate::page::repository("Makefile")).expect("the Makefile");
    assert!(makefile.contains("cargo clippy --locked --all-targets -- -D warnings"));
}
