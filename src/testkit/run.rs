//! Shared by both conformance tests: the selected rules, their findings, and lifecycles with a fault at each step.

use std::collections::BTreeSet;
use std::future::Future;

use futures::{StreamExt as _, stream};

use super::fixture::{CheckFailure, CheckResult};
use super::process::{FaultKind, Sort, StepFault, When};
use super::report::{Broken, BrokenRule, ConformanceReport};
use super::rule::Rule;

/// The rules to check; all of them by default.
#[derive(Debug, Default)]
pub(super) struct Selection(Option<BTreeSet<Rule>>);

impl Selection {
    pub(super) fn only(rules: impl IntoIterator<Item = Rule>) -> Self {
        Self(Some(rules.into_iter().collect()))
    }

    pub(super) fn contains(&self, rule: Rule) -> bool {
        self.0.as_ref().is_none_or(|only| only.contains(&rule))
    }

    /// Returns whether any of the rules is selected; reports the others as skipped.
    pub(super) fn any(&self, rules: &[Rule], report: &mut ConformanceReport) -> bool {
        let (selected, others): (Vec<Rule>, Vec<Rule>) = rules.iter().partition(|rule| self.contains(**rule));
        for rule in others {
            report.skipped(rule, "the test selects other rules");
        }
        !selected.is_empty()
    }
}

/// The findings of the checks so far.
#[derive(Debug, Default)]
pub(super) struct BrokenRules(Vec<BrokenRule>);

impl BrokenRules {
    /// Keeps a broken rule; fails if the test cannot go on.
    pub(super) fn add(&mut self, done: CheckResult<()>) -> Result<(), Broken> {
        match done {
            Ok(()) => {}
            Err(CheckFailure::Rule(finding)) => self.0.push(*finding),
            Err(stop) => return Err(stop.into()),
        }
        Ok(())
    }

    pub(super) fn conclude(self, mut report: ConformanceReport) -> Result<ConformanceReport, Broken> {
        report.settle();
        if self.0.is_empty() {
            Ok(report)
        } else {
            Err(Broken::Rules(self.0))
        }
    }
}

/// Runs a lifecycle for a rule without a fault, which returns its steps, and then with a fault before and after each step that `steps`
/// selects.
pub(super) async fn lifecycles<F: Future<Output = CheckResult<Vec<String>>>>(
    selection: &Selection,
    kinds: [(FaultKind, Rule); 3],
    concurrent: usize,
    steps: impl Fn(FaultKind, &[String]) -> Vec<(Sort, usize)>,
    lifecycle: impl Fn(Option<StepFault>, Rule) -> F,
    report: &mut ConformanceReport,
) -> CheckResult<()> {
    let all: Vec<Rule> = [Rule::ServesPods]
        .into_iter()
        .chain(kinds.map(|(_, rule)| rule))
        .collect();
    if !selection.any(&all, report) {
        return Ok(());
    }
    let done = lifecycle(None, Rule::ServesPods).await?;
    report.tried(Rule::ServesPods);
    for (kind, rule) in kinds.into_iter().filter(|(_, rule)| selection.contains(*rule)) {
        let faults = steps(kind, &done).into_iter().flat_map(|(sort, step)| {
            [When::Before, When::After].map(|when| StepFault {
                step,
                sort,
                kind,
                when,
            })
        });
        let mut runs = stream::iter(faults)
            .map(|fault| lifecycle(Some(fault), rule))
            .buffer_unordered(concurrent);
        while let Some(done) = runs.next().await {
            done?;
            report.tried(rule);
        }
    }
    Ok(())
}
