//! What the kit says in the end.

use std::collections::BTreeMap;
use std::fmt;

use super::rule::Rule;

/// Calls that a finding shows, at most: the last ones.
const SHOWN: usize = 24;

/// A rule that a driver has broken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The rule.
    pub rule: Rule,
    /// What was tried: the exercise, and where in it.
    pub tried: String,
    /// What the contract promises.
    pub expected: String,
    /// What came instead.
    pub found: String,
    /// What was called up to then, in order, with the answers.
    pub calls: Vec<String>,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {}", self.rule, self.rule.sentence())?;
        writeln!(f, "  tried:    {}", self.tried)?;
        writeln!(f, "  expected: {}", self.expected)?;
        writeln!(f, "  found:    {}", self.found)?;
        let skipped = self.calls.len().saturating_sub(SHOWN);
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

/// How a driver that has broken no rule did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The rules that were tried, with the number of times.
    pub kept: BTreeMap<Rule, usize>,
    /// The rules that could not be tried, and why.
    pub not_tried: BTreeMap<Rule, String>,
}

impl Report {
    pub(super) fn tried(&mut self, rule: Rule) {
        *self.kept.entry(rule).or_default() += 1;
    }

    pub(super) fn skipped(&mut self, rule: Rule, why: impl Into<String>) {
        self.not_tried.entry(rule).or_insert_with(|| why.into());
    }

    /// A rule that was tried somewhere was tried.
    pub(super) fn settle(&mut self) {
        let kept = &self.kept;
        self.not_tried.retain(|rule, _| !kept.contains_key(rule));
    }
}

impl fmt::Display for Report {
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

/// Why a driver does not conform, or the kit cannot say.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// Rules are broken.
    #[error("{}", show(.0))]
    Rules(Vec<Finding>),
    /// The kit was told something that makes no sense.
    #[error("the test cannot be run: {0}")]
    Setup(String),
}

impl Broken {
    /// CamelCase, from a small fixed set.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Rules(_) => "RuleBroken",
            Self::Setup(_) => "InvalidSetup",
        }
    }

    /// What was found.
    pub fn findings(&self) -> &[Finding] {
        match self {
            Self::Rules(findings) => findings,
            Self::Setup(_) => &[],
        }
    }
}

fn show(findings: &[Finding]) -> String {
    let rules = match findings {
        [_] => "a rule is broken".to_owned(),
        several => format!("{} rules are broken", several.len()),
    };
    let all: Vec<String> = findings.iter().map(Finding::to_string).collect();
    format!("{rules}\n\n{}", all.join("\n"))
}

/// As it is shown: `unwrap` prints this.
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
        let finding = Finding {
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
