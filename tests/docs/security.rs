//! The checklist in docs/operator/security.md is complete, and each point has a test or a reason for none.

use crate::names::{coverage, is_test_name, tests};
use crate::page::{Page, page, parse};

/// S1 to S24.
const POINTS: usize = 24;

#[test]
fn each_point_of_the_checklist_has_a_test_or_a_reason() {
    let rows = |page: &Page| -> Vec<Vec<String>> {
        let lines = page.text.lines().filter(|line| line.starts_with("| S"));
        let cells = |line: &str| {
            line.trim_matches('|')
                .split('|')
                .map(|cell| cell.trim().to_owned())
                .collect()
        };
        lines.map(cells).collect()
    };
    let expected: Vec<String> = (1..=POINTS).map(|number| format!("S{number}")).collect();
    let checklist = rows(&page("docs/operator/security.md"));
    let numbers: Vec<&String> = checklist.iter().map(|row| &row[0]).collect();
    assert_eq!(numbers, expected.iter().collect::<Vec<_>>());
    for row in checklist {
        assert!(
            row.len() == 2 && row.iter().all(|cell| !cell.is_empty()),
            "{row:?}"
        );
    }
    let list = coverage("security");
    let tests = tests();
    let mut seen = Vec::new();
    for row in rows(&list) {
        let [number, shown] = row.as_slice() else {
            panic!("two cells: {row:?}");
        };
        seen.push(number.clone());
        let mut cell = parse("", shown);
        cell.path.clone_from(&list.path);
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
    assert_eq!(seen, expected);
}

/// Lints and profile settings that the page states, as in Cargo.toml.
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
