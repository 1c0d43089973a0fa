//! Conformance test of a [`NodeDriver`].

use std::collections::BTreeSet;
use std::fmt;
use std::future::Future;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use serde_json::json;
use tokio::sync::Semaphore;

use super::fixture::{CheckFailure, CheckResult, Environment, Fixture, OWN, Setup};
use super::instance::Kit;
use super::node_checks as checks;
use super::node_instance::{DRIVER, LeftOver};
use super::node_lifecycle;
use super::process::{FaultKind, Sort, StepFault, numbered};
use super::report::{Broken, ConformanceReport};
use super::rule::Rule;
use super::run::{self, BrokenRules, Selection};
use crate::api::crd::definitions;
use crate::node::driver::{Device, NodeDriver};
use crate::testcluster::api::ClusterMode;

/// Default limit for a call, equal to the companion's.
const LIMIT: Duration = Duration::from_secs(10);
/// Default limit for one step of a scenario.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Number of concurrent scenarios per test.
const MAX_CONCURRENT: usize = 4;
/// Limits concurrent scenarios across all tests of this process. Each has a companion, and the number of inotify
/// instances per user is limited (`fs.inotify.max_user_instances`, 128 by default).
static RUNNING: Semaphore = Semaphore::const_new(MAX_CONCURRENT);

/// Conformance test of a [`NodeDriver`]. Created by [`node_conformance`](super::node_conformance()).
pub struct NodeConformance<D> {
    kit: Kit<D>,
    left_over: Option<LeftOver>,
    only: Selection,
    modes: Vec<ClusterMode>,
}

impl<D> fmt::Debug for NodeConformance<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeConformance")
            .field("limit", &self.kit.limit)
            .finish_non_exhaustive()
    }
}

#[derive(Clone, Copy, Debug)]
enum NodeCheck {
    ContainerEdits,
    Claims,
    Unfinished,
    Dropped,
}

impl NodeCheck {
    const ALL: [Self; 4] = [
        Self::ContainerEdits,
        Self::Claims,
        Self::Unfinished,
        Self::Dropped,
    ];

    fn about(self) -> &'static str {
        match self {
            Self::ContainerEdits => "container edits",
            Self::Claims => "prepare and unprepare",
            Self::Unfinished => "a failed prepare",
            Self::Dropped => "a dropped prepare",
        }
    }

    fn rules(self) -> &'static [Rule] {
        match self {
            Self::ContainerEdits => &[
                Rule::UsableContainerEdits,
                Rule::ContainerEditsAreStable,
                Rule::UnknownDeviceIsRefused,
            ],
            Self::Claims => &[
                Rule::PrepareIsIdempotent,
                Rule::UnprepareIsIdempotent,
                Rule::UnprepareIsForOneClaim,
                Rule::NothingIsLeft,
                Rule::NoPanic,
                Rule::ReturnsInTime,
            ],
            Self::Unfinished => &[
                Rule::FailedPrepareCanBeRolledBack,
                Rule::UnknownDeviceIsRefused,
                Rule::NothingIsLeft,
            ],
            Self::Dropped => &[Rule::DroppedPrepareCanBeRolledBack, Rule::NothingIsLeft],
        }
    }
}

impl<D: NodeDriver> NodeConformance<D> {
    pub(super) fn new<F>(make: impl Fn(Environment) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = D> + Send + 'static,
    {
        Self {
            kit: Kit {
                make: Arc::new(move |environment| make(environment).boxed()),
                limit: LIMIT,
                timeout: TIMEOUT,
            },
            left_over: None,
            only: Selection::default(),
            modes: vec![ClusterMode::Classic, ClusterMode::Structured],
        }
    }

    /// Sets a function that lists leftovers of claims: given [`Environment::directory`], it returns the prepared items, and
    /// nothing without a prepared claim. Without it, the kit cannot check [`Rule::NothingIsLeft`].
    #[must_use]
    pub fn left_over(mut self, list: impl Fn(&Path) -> Vec<String> + Send + Sync + 'static) -> Self {
        self.left_over = Some(Arc::new(list));
        self
    }

    /// Sets the limit for a call; default: 10 s, as in the companion.
    #[must_use]
    pub fn call_limit(mut self, limit: Duration) -> Self {
        self.kit.limit = limit;
        self
    }

    /// Sets the limit for the companion and the driver together to serve a waiting pod; default: 60 s.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.kit.timeout = timeout;
        self
    }

    /// Runs pods in this mode only; default: both modes, one after the other.
    #[must_use]
    pub fn mode(mut self, mode: ClusterMode) -> Self {
        self.modes = vec![mode];
        self
    }

    /// Checks only these rules.
    #[must_use]
    pub fn only(mut self, rules: impl IntoIterator<Item = Rule>) -> Self {
        self.only = Selection::only(rules);
        self
    }

    /// Runs all checks and returns a report, or the broken rules. Must be called within a tokio runtime.
    pub async fn run(self) -> Result<ConformanceReport, Broken> {
        let mut report = ConformanceReport::default();
        // No rule about calls alone depends on the mode.
        let without_pods = setup(ClusterMode::Classic, "none")?;
        let fixture = Fixture::open(&without_pods, "the list of devices")?;
        let devices = checks::devices(&self.kit, &fixture).await?;
        drop(fixture);
        for rule in [
            Rule::FirstListComes,
            Rule::ServableDevices,
            Rule::StableDevices,
            Rule::NoPanic,
            Rule::ReturnsInTime,
        ] {
            report.tried(rule);
        }
        let Some(kind) = devices.first().map(|device| device.kind.clone()) else {
            let problem = "no healthy device is available to claims: add at least one to the test";
            return Err(Broken::Setup(problem.to_owned()));
        };
        let mut findings = BrokenRules::default();
        for check in NodeCheck::ALL {
            if !self.only.any(check.rules(), &mut report) {
                continue;
            }
            let fixture = Fixture::open(&without_pods, check.about())?;
            let done = self.check(check, &fixture, &devices).await;
            if done.is_ok() {
                for rule in check.rules() {
                    if *rule == Rule::NothingIsLeft && self.left_over.is_none() {
                        report.skipped(*rule, "the test does not list leftovers (left_over)");
                    } else {
                        report.tried(*rule);
                    }
                }
            }
            findings.add(done)?;
        }
        for mode in &self.modes {
            findings.add(self.lifecycles(*mode, &kind, &mut report).await)?;
        }
        findings.conclude(report)
    }

    async fn check(&self, check: NodeCheck, fixture: &Fixture, devices: &[Device]) -> CheckResult<()> {
        let (kit, left_over) = (&self.kit, self.left_over.as_ref());
        match check {
            NodeCheck::ContainerEdits => checks::container_edits_of(kit, fixture, devices).await,
            NodeCheck::Claims => checks::claims(kit, left_over, fixture, devices).await,
            NodeCheck::Unfinished => checks::unfinished(kit, left_over, fixture, devices).await,
            NodeCheck::Dropped => checks::dropped(kit, left_over, fixture, devices).await,
        }
    }

    /// Runs the real companion with the driver on the test cluster, with a fault at each step.
    async fn lifecycles(
        &self,
        mode: ClusterMode,
        kind: &str,
        report: &mut ConformanceReport,
    ) -> CheckResult<()> {
        let kinds = [
            (FaultKind::Crash, Rule::NodeSurvivesCrash),
            (FaultKind::Slow, Rule::NodeSurvivesSlowCall),
            (FaultKind::Fail, Rule::NodeSurvivesFailedCall),
        ];
        let steps = |fault, steps: &[String]| {
            let selected = if fault == FaultKind::Slow {
                first_of_each(steps)
            } else {
                numbered(steps)
            };
            selected.into_iter().map(|(sort, step, _)| (sort, step)).collect()
        };
        let run = |fault, rule| self.lifecycle(mode, kind, fault, rule);
        run::lifecycles(&self.only, kinds, MAX_CONCURRENT, steps, run, report).await
    }

    async fn lifecycle(
        &self,
        mode: ClusterMode,
        kind: &str,
        fault: Option<StepFault>,
        rule: Rule,
    ) -> CheckResult<Vec<String>> {
        let mut about = match mode {
            ClusterMode::Classic => "pods on a node in classic mode".to_owned(),
            ClusterMode::Structured => "pods on a node in structured mode".to_owned(),
        };
        if let Some(fault) = fault {
            about = format!("{about}, {}", fault.describe());
        }
        // The semaphore is never closed.
        let _playing = RUNNING.acquire().await;
        let fixture = Fixture::open(&setup(mode, kind)?, &about)?;
        node_lifecycle::run(&self.kit, self.left_over.as_ref(), &fixture, fault, rule).await
    }
}

/// Returns the first call of each driver method with its call number. The companion waits ten seconds for a hanging
/// call, so testing all calls would take too long.
fn first_of_each(steps: &[String]) -> Vec<(Sort, usize, &String)> {
    let mut seen = BTreeSet::new();
    let is_first = |(_, _, step): &(Sort, usize, &String)| {
        let method = step.split_once('(').map(|(method, _)| method);
        method.is_some_and(|method| seen.insert(method.to_owned()))
    };
    numbered(steps).into_iter().filter(is_first).collect()
}

/// Returns a class for the driver's devices of a kind, with the objects that the class refers to.
fn setup(mode: ClusterMode, kind: &str) -> CheckResult<Setup> {
    let mut objects = Vec::new();
    match mode {
        ClusterMode::Classic => {
            for definition in definitions() {
                let definition = serde_json::to_value(definition);
                objects.push(definition.map_err(|error| CheckFailure::Setup(error.to_string()))?);
            }
            objects.push(json!({
                "apiVersion": "drayman.dev/v1alpha1", "kind": "DeviceClassParameters", "metadata": { "name": OWN },
                "spec": { "kind": kind },
            }));
            objects.push(json!({
                "apiVersion": "resource.k8s.io/v1alpha2", "kind": "ResourceClass", "metadata": { "name": OWN },
                "driverName": DRIVER,
                "parametersRef": { "apiGroup": "drayman.dev", "kind": "DeviceClassParameters", "name": OWN },
            }));
        }
        ClusterMode::Structured => {
            let expression = format!(
                r#"device.driver == "{DRIVER}" && device.attributes["drayman.dev"].kind == "{kind}""#
            );
            objects.push(json!({
                "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": { "name": OWN },
                "spec": { "selectors": [{ "cel": { "expression": expression } }] },
            }));
        }
    }
    let documents: Vec<String> = objects.iter().map(ToString::to_string).collect();
    Ok(Setup {
        mode,
        objects: documents.join("\n---\n"),
        // The kubelet creates the only node.
        nodes: Vec::new(),
        driver_name: DRIVER.to_owned(),
        max_claims: 0,
    })
}

#[cfg(test)]
mod tests {
    use super::first_of_each;

    #[test]
    fn one_call_of_each_method_hangs_and_no_write() {
        let steps = [
            "POST /apis",
            "container_edits(a)",
            "prepare(a)",
            "container_edits(b)",
            "unprepare(a)",
            "prepare(b)",
        ];
        let steps = steps.map(str::to_owned);
        let firsts = first_of_each(&steps);
        let numbers: Vec<usize> = firsts.into_iter().map(|(_, number, _)| number).collect();
        assert_eq!(numbers, [0, 1, 3]);
    }
}
