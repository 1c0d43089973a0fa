//! The list of fault scenarios cites existing tests, and each fault has its own test.

use std::collections::BTreeMap;

use crate::names::{coverage, tests};
use crate::page::repository;

/// The rows F1 to F44.
const SCENARIO_COUNT: usize = 44;

/// The tests of a row such as `program: `name`, `name`; program: `name``, as `program name`.
fn tests_of_row(line: &str) -> Result<Vec<String>, String> {
    let cells: Vec<&str> = line.trim().trim_matches('|').split(" | ").collect();
    let [_, cell] = cells.as_slice() else {
        return Err("it does not have two columns".to_owned());
    };
    let (mut program, mut named) = ("", Vec::new());
    for (number, part) in cell.split('`').enumerate() {
        if number % 2 == 1 {
            named.push(format!("{program} {part}"));
        } else if let Some((before, _)) = part.rsplit_once(':') {
            program = before.rsplit([' ', ';']).next().unwrap_or_default();
        }
    }
    match named.iter().find(|test| test.starts_with(' ')) {
        Some(test) => Err(format!("{test} is in no program")),
        None if named.is_empty() || cell.contains("not tried") => Err("something is not tested".to_owned()),
        None => Ok(named),
    }
}

/// Whether a program has a test; `unit` stands for all of `src`.
fn exists(test: &str) -> bool {
    let (program, name) = test.split_once(' ').unwrap_or_default();
    tests().iter().any(|test| {
        let path = test.path();
        let first = path.split("::").next().unwrap_or_default();
        let is_unit = ["", ".rs"]
            .iter()
            .any(|end| repository(format!("src/{first}{end}")).exists());
        let program = program.replace('/', "::");
        test.is(name) && (is_unit && program == "unit" || path.starts_with(&format!("{program}::")))
    })
}

#[test]
fn every_scenario_has_a_test_of_its_own() {
    let table = coverage("faults").text;
    let (mut wrong, mut scenarios) = (Vec::new(), BTreeMap::new());
    for number in 1..=SCENARIO_COUNT {
        let mut rows = table
            .lines()
            .filter(|line| line.starts_with(&format!("| F{number} ")));
        match rows
            .next()
            .ok_or_else(|| "it has no row".to_owned())
            .and_then(tests_of_row)
        {
            Ok(named) => drop(scenarios.insert(number, named)),
            Err(problem) => wrong.push(format!("F{number}: {problem}")),
        }
        assert!(rows.next().is_none(), "F{number} has two rows");
    }
    for (number, named) in &scenarios {
        wrong.extend(
            named
                .iter()
                .filter(|test| !exists(test))
                .map(|test| format!("F{number}: there is no {test}")),
        );
        let others: Vec<&String> = scenarios
            .iter()
            .filter(|(other, _)| *other != number)
            .flat_map(|(_, named)| named)
            .collect();
        if named.iter().all(|test| others.contains(&test)) {
            wrong.push(format!("F{number} has no test of its own"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn a_row_without_a_test_is_wrong() {
    let named = tests_of_row("| F1 a: b | unit: `m::one`, `two`; at once: cli: `three` |");
    assert_eq!(named.unwrap(), ["unit m::one", "unit two", "cli three"]);
    for row in [
        "| F1 a | |",
        "| F1 a | unit: nothing |",
        "| F1 a | `one` |",
        "| F1 a | unit: `one`; the rest: not tried |",
    ] {
        assert!(tests_of_row(row).is_err(), "{row}");
    }
}
