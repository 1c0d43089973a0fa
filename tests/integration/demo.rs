//! Tests of `drayman demo`.

use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};

/// Serializes demos: each opens pseudo-terminals, and the number of an unplugged one must stay free.
static DEMO_LOCK: Mutex<()> = Mutex::new(());

fn demo(arguments: &[&str]) -> Output {
    let _lock = DEMO_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
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
        matches!(counts.as_slice(), [9, expected, held] if expected == held && *held > 30),
        "{summary}"
    );
    assert!(!shown.contains('\u{1b}'), "colour without a terminal");
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
fn the_demonstration_begins_with_structured_mode() {
    let output = demo(&["--scenario", "basic", "--scenario", "structured"]);
    let shown = stdout(&output);

    assert!(output.status.success(), "{shown}");
    let at = |heading: &str| {
        shown
            .find(heading)
            .unwrap_or_else(|| panic!("{heading}: {shown}"))
    };
    assert!(at("== structured: ") < at("== classic mode"), "{shown}");
    assert!(shown.contains("scheduler         allocates"), "{shown}");
}

#[test]
fn the_scenarios_are_listed_and_no_other_is_played() {
    let listed = stdout(&demo(&["--list"]));
    assert_eq!(listed.lines().count(), 10, "{listed}");
    assert!(listed.lines().any(|line| line.starts_with("real ")), "{listed}");
    assert_eq!(demo(&["--scenario", "none"]).status.code(), Some(2));
}

/// The path of a socket has at most 107 bytes, so no companion can serve in this directory.
#[test]
fn a_demonstration_with_a_broken_cluster_fails_with_a_reason() {
    let base = tempfile::tempdir().expect("a directory");
    let deep = base.path().join("d".repeat(120));
    std::fs::create_dir(&deep).expect("a directory");
    let begin = std::time::Instant::now();
    let output = Command::new(env!("CARGO_BIN_EXE_drayman"))
        .args(["demo", "--keep"])
        .env("TMPDIR", &deep)
        .output()
        .expect("the program runs");
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    println!("{:?}: {stderr}", begin.elapsed());

    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert_eq!(stderr.matches("path").count(), 1, "reported once: {stderr}");
}

#[test]
fn the_devices_of_this_machine_can_join() {
    let output = demo(&["--scenario", "basic", "--real-devices"]);
    let shown = stdout(&output);

    assert!(output.status.success(), "{shown}");
    assert!(shown.contains("== basic") && shown.contains("== real"), "{shown}");
    assert!(
        stdout(&demo(&["--scenario", "real"])).contains("on this-machine")
            || !shown.contains("on this-machine")
    );
    // The devices depend on the machine; the demo reports if there are none.
    let served = shown.contains("runs on this-machine with a device of this machine");
    assert!(
        served || shown.contains("no healthy device of a ready-made kind"),
        "{shown}"
    );
}
