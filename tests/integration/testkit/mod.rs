//! The conformance kit for vendors: our drivers and those of the examples conform, and a driver that breaks a rule is detected.
#![expect(
    clippy::panic,
    clippy::case_sensitive_file_extension_comparisons,
    reason = "a failing helper fails the test; the tests choose the file names"
)]

#[path = "../../../examples/network_attached.rs"]
#[expect(dead_code, reason = "the example's program is not run here")]
mod network_attached;
#[path = "../../../examples/sensors.rs"]
#[expect(dead_code, reason = "the example's program is not run here")]
mod sensors;

mod defects;
mod driver;
mod node_defects;
mod node_driver;
mod own_drivers;

use drayman::testkit::{Broken, BrokenRule, ConformanceReport, Rule};

/// Checks that the findings of the kit include the rule, and that the finding is complete.
fn expect_finding(rule: Rule, outcome: Result<ConformanceReport, Broken>) -> Vec<BrokenRule> {
    let findings = match outcome {
        Ok(report) => panic!("{rule} is broken, but the kit reports\n{report}"),
        Err(Broken::Rules(findings)) => findings,
        Err(error) => panic!("{rule}: {error}"),
    };
    for finding in &findings {
        println!("{finding}");
    }
    let found: Vec<Rule> = findings.iter().map(|finding| finding.rule).collect();
    let finding = findings.iter().find(|finding| finding.rule == rule);
    assert!(finding.is_some(), "{rule} is broken, but the kit found {found:?}");
    let finding = finding.expect("checked");
    assert!(!finding.expected.is_empty() && !finding.found.is_empty() && !finding.tried.is_empty());
    findings
}
