//! The conformance kit for vendors: our own drivers and those of the examples conform, and a driver that breaks a rule is found out.
#![expect(
    clippy::panic,
    clippy::case_sensitive_file_extension_comparisons,
    reason = "a helper of a test fails the test; the names of files are the tests' own"
)]

#[path = "../../../examples/network_attached.rs"]
#[expect(dead_code, reason = "the example's program is not run here")]
mod network_attached;
#[path = "../../../examples/sensors.rs"]
#[expect(dead_code, reason = "the example's program is not run here")]
mod sensors;

mod defects;
mod node_defects;
mod ours;
mod rack;
mod shelf;

use drayman::testkit::{Broken, Finding, Report, Rule};

/// The findings of the kit on a driver that breaks a rule: the rule is among them, and what is said of it is complete.
fn found_out(rule: Rule, outcome: Result<Report, Broken>) -> Vec<Finding> {
    let findings = match outcome {
        Ok(report) => panic!("{rule} is broken, and the kit says\n{report}"),
        Err(Broken::Rules(findings)) => findings,
        Err(error) => panic!("{rule}: {error}"),
    };
    for finding in &findings {
        println!("{finding}");
    }
    let found: Vec<Rule> = findings.iter().map(|finding| finding.rule).collect();
    let finding = findings.iter().find(|finding| finding.rule == rule);
    assert!(finding.is_some(), "{rule} is broken, and found were {found:?}");
    let finding = finding.expect("it was found");
    assert!(!finding.expected.is_empty() && !finding.found.is_empty() && !finding.tried.is_empty());
    findings
}
