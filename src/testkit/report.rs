//! Results of a conformance test.

use std::collections::BTreeMap;
use std::fmt;

use super::rule::Rule;

/// Maximum number of calls shown in a finding: the last ones.
const MAX_CALLS_SHOWN: usize = 24;

/// A rule that the driver has broken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BrokenRule {
    /// The broken rule.
    pub rule: Rule,
    /// The check and its step.
    pub tried: String,
    /// Expected behaviour according to the contract.
    pub expected: String,
    /// Observed behaviour.
    pub found: String,
    /// All calls so far, in order, with their results.
    pub calls: Vec<String>,
}

impl fmt::Display for BrokenRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {}", self.rule, self.rule.sentence())?;
        writeln!(f, "  tried:    {}", self.tried)?;
        writeln!(f, "  expected: {}", self.expected)?;
        writeln!(f, "  found:    {}", self.found)?;
        let skipped = self.calls.len().saturating_sub(MAX_CALLS_SHOWN);
        if !self.calls.is_empty() {
            writeln!(f, "  called:")?;
        }
        if skipped > 0 {
            writeln!(f, "    ({skipped} calls before)")?;
        }
        for call in self.calls.iter().skip(skipped) {
            writeln!(f, "    {call}")?;
        }
        Ok(())
    }
}

/// Result of a driver that has broken no rule.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConformanceReport {
    /// Checked rules, with the number of checks.
    pub kept: BTreeMap<Rule, usize>,
    /// Rules that could not be checked, with the reason.
    pub not_tried: BTreeMap<Rule, String>,
}

impl ConformanceReport {
    pub(super) fn tried(&mut self, rule: Rule) {
        *self.kept.entry(rule).or_default() += 1;
    }

    pub(super) fn skipped(&mut self, rule: Rule, why: impl Into<String>) {
        self.not_tried.entry(rule).or_insert_with(|| why.into());
    }

    /// Removes checked rules from `not_tried`.
    pub(super) fn settle(&mut self) {
        let kept = &self.kept;
        self.not_tried.retain(|rule, _| !kept.contains_key(rule));
    }
}

impl fmt::Display for ConformanceReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (rule, times) in &self.kept {
            writeln!(f, "kept       {rule} ({times}): {}", rule.sentence())?;
        }
        for (rule, why) in &self.not_tried {
            writeln!(f, "not tried  {rule}: {why}")?;
        }
        Ok(())
    }
}

/// Why a driver does not conform, or why the kit cannot tell.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// The driver breaks rules.
    #[error("{}", show(.0))]
    Rules(Vec<BrokenRule>),
    /// The settings of the test are invalid, or the machine prevents it.
    #[error("the test cannot be run: {0}")]
    Setup(String),
}

impl Broken {
    /// A CamelCase reason from a small fixed set.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Rules(_) => "RuleBroken",
            Self::Setup(_) => "InvalidSetup",
        }
    }

    /// The broken rules; empty for an invalid setup.
    pub fn findings(&self) -> &[BrokenRule] {
        match self {
            Self::Rules(findings) => findings,
            Self::Setup(_) => &[],
        }
    }
}

fn show(findings: &[BrokenRule]) -> String {
    let rules = match findings {
        [_] => "a rule is broken".to_owned(),
        several => format!("{} rules are broken", several.len()),
    };
    let all: Vec<String> = findings.iter().map(BrokenRule::to_string).collect();
    format!("{rules}\n\n{}", all.join("\n"))
}

/// Same as `Display`, because `unwrap` prints this.
impl fmt::Debug for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_says_rule_expectation_and_the_last_calls() {
        let finding = BrokenRule {
            rule: Rule::RecordedIsHeld,
            tried: "deallocate".into(),
            expected: "0 fit".into(),
            found: "1 fits".into(),
            calls: (0..30).map(|number| format!("call {number}")).collect(),
        };
        let shown = format!("{:?}", Broken::Rules(vec![finding]));
        for part in ["RecordedIsHeld", "0 fit", "1 fits", "(6 calls before)", "call 29"] {
            assert!(shown.contains(part), "{part} in {shown}");
        }
        assert!(!shown.contains("call 5\n"), "{shown}");
    }
}
