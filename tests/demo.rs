//! `drayman demo` as a new user runs it: everything that it expects comes true.
#![cfg(feature = "sim")]

use std::process::{Command, Output};

fn demo(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_drayman"))
        .arg("demo")
        .args(arguments)
        .output()
        .expect("the program runs")
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn every_expectation_of_the_demonstration_holds() {
    let output = demo(&[]);
    let shown = stdout(&output);

    assert!(
        output.status.success(),
        "{shown}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let summary = shown.lines().last().unwrap_or_default();
    let counts: Vec<usize> = summary
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|number| number.parse().ok())
        .take(3)
        .collect();
    assert!(
        matches!(counts.as_slice(), [6, expected, held] if expected == held && *held > 20),
        "{summary}"
    );
    assert!(!shown.contains('\u{1b}'), "colour although this is no terminal");
}

#[test]
fn one_scenario_can_be_played_alone() {
    let output = demo(&["--scenario", "several"]);
    let shown = stdout(&output);

    assert!(output.status.success(), "{shown}");
    assert!(
        shown.contains("== several") && !shown.contains("== basic"),
        "{shown}"
    );
}

#[test]
fn the_scenarios_are_listed_and_no_other_is_played() {
    let listed = stdout(&demo(&["--list"]));
    assert_eq!(listed.lines().count(), 6, "{listed}");
    assert_eq!(demo(&["--scenario", "none"]).status.code(), Some(2));
}

#[test]
fn the_devices_of_this_machine_can_join() {
    let output = demo(&["--scenario", "basic", "--real-devices"]);
    let shown = stdout(&output);

    assert!(output.status.success(), "{shown}");
    assert!(shown.contains("== real"), "{shown}");
    // What there is differs from machine to machine; that there is nothing is said.
    let served = shown.contains("runs on this-machine with a device of this machine");
    assert!(
        served || shown.contains("no device of a ready-made kind"),
        "{shown}"
    );
}
