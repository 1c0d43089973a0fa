//! Conformance test of a [`Driver`]: its settings and the order of the checks.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures::future::{FutureExt as _, ready};

use super::checks;
use super::fixture::{CheckResult, Environment, Fixture, Setup};
use super::instance::Kit;
use super::lifecycle;
use super::measure::{Capacity, basics};
use super::process::{FaultKind, StepFault, numbered};
use super::report::{Broken, ConformanceReport};
use super::rule::Rule;
use super::run::{self, BrokenRules, Selection};
use crate::core::names::check_driver;
use crate::driver::Driver;

/// Default limit for a call.
const LIMIT: Duration = Duration::from_secs(10);
/// Default limit for one step of a scenario.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Default maximum number of concurrent claims.
const MAX_CLAIMS: usize = 16;
/// Number of concurrent scenarios; they mostly wait.
const MAX_CONCURRENT: usize = 8;

/// Conformance test of a [`Driver`]. Created by [`conformance`](super::conformance()).
pub struct Conformance<D> {
    kit: Kit<D>,
    setup: Setup,
    wakes: bool,
    only: Selection,
}

impl<D> fmt::Debug for Conformance<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Conformance")
            .field("nodes", &self.setup.nodes)
            .field("limit", &self.kit.limit)
            .finish_non_exhaustive()
    }
}

/// Checks by driver calls alone, in execution order.
#[derive(Clone, Copy, Debug)]
enum Check {
    Full,
    Rush,
    Again,
    Recorded,
    Restart,
    SeveralClaims,
    Dropped,
    Woken,
}

impl Check {
    const ALL: [Self; 8] = [
        Self::Full,
        Self::Rush,
        Self::Again,
        Self::Recorded,
        Self::Restart,
        Self::SeveralClaims,
        Self::Dropped,
        Self::Woken,
    ];

    fn about(self) -> &'static str {
        match self {
            Self::Full => "exhausted capacity",
            Self::Rush => "concurrent calls",
            Self::Again => "repeated calls",
            Self::Recorded => "recorded allocations",
            Self::Restart => "a restart",
            Self::SeveralClaims => "several claims of one pod",
            Self::Dropped => "dropped calls",
            Self::Woken => "wake-up of waiting pods",
        }
    }

    /// The rules that the check covers.
    fn rules(self) -> &'static [Rule] {
        match self {
            Self::Full => &[
                Rule::FullIsUnsuitable,
                Rule::CapacityIsKept,
                Rule::ReadableErrors,
                Rule::UnrecordedIsReleased,
            ],
            Self::Rush => &[Rule::CapacityIsKept],
            Self::Again => &[
                Rule::AllocateIsIdempotent,
                Rule::DeallocateIsIdempotent,
                Rule::UnrecordedIsReleased,
            ],
            Self::Recorded => &[
                Rule::RecordedIsHeld,
                Rule::ObservedIsReleased,
                Rule::NoFalseFinding,
            ],
            Self::Restart => &[Rule::StateFromClaims, Rule::LostAllocationIsReleased],
            Self::SeveralClaims => &[Rule::OneAllocationPerClaim, Rule::FailedAllocateIsReleased],
            Self::Dropped => &[Rule::DroppedAllocateIsReleased],
            Self::Woken => &[Rule::FreedWakes],
        }
    }
}

/// Rules that also apply to a driver without a capacity limit.
const WITHOUT_LIMIT: [Rule; 3] = [
    Rule::AllocateIsIdempotent,
    Rule::DeallocateIsIdempotent,
    Rule::NoFalseFinding,
];

impl<D: Driver> Conformance<D> {
    pub(super) fn new(make: impl Fn(Environment) -> D + Send + Sync + 'static) -> Self {
        let nodes = ["node-a", "node-b"].map(str::to_owned).into();
        Self {
            kit: Kit {
                make: Arc::new(move |environment| ready(make(environment)).boxed()),
                limit: LIMIT,
                timeout: TIMEOUT,
            },
            setup: Setup {
                nodes,
                max_claims: MAX_CLAIMS,
                ..Setup::default()
            },
            wakes: true,
            only: Selection::default(),
        }
    }

    /// Adds objects that the driver needs, as YAML: a ResourceClass of the driver with the objects of its
    /// `parametersRef`, CRDs, and a ResourceClaimTemplate in namespace `default` for the test's claims. May be called
    /// repeatedly.
    ///
    /// Without a class of the driver, the kit creates one without parameters; without a template, claims have no
    /// parameters.
    #[must_use]
    pub fn objects(mut self, yaml: &str) -> Self {
        self.setup.objects += "\n---\n";
        self.setup.objects += yaml;
        self
    }

    /// Sets the nodes of the cluster; default: `node-a` and `node-b`. At least one claim must fit on one of them. Full
    /// coverage needs at least two nodes.
    #[must_use]
    pub fn nodes(mut self, names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.setup.nodes = names.into_iter().map(Into::into).collect();
        self
    }

    /// Sets the maximum number of concurrent claims; default: 16. A driver with this capacity or more counts as
    /// unlimited, and the rules about exhausted capacity are not checked.
    #[must_use]
    pub fn at_most(mut self, claims: usize) -> Self {
        self.setup.max_claims = claims;
        self
    }

    /// Sets the limit for a call; default: 10 s.
    #[must_use]
    pub fn call_limit(mut self, limit: Duration) -> Self {
        self.kit.limit = limit;
        self
    }

    /// Sets the limit for the controller and the driver together to serve a waiting pod; default: 60 s, because test
    /// machines are busy.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.kit.timeout = timeout;
        self
    }

    /// Declares that the driver cannot report freed capacity: it keeps the default [`Driver::capacity_changes`], and
    /// pods wait for minutes.
    #[must_use]
    pub fn without_waking(mut self) -> Self {
        self.wakes = false;
        self
    }

    /// Checks only these rules, for instance to debug a finding.
    #[must_use]
    pub fn only(mut self, rules: impl IntoIterator<Item = Rule>) -> Self {
        self.only = Selection::only(rules);
        self
    }

    /// Runs all checks and returns a report, or the broken rules. Must be called within a tokio runtime.
    pub async fn run(mut self) -> Result<ConformanceReport, Broken> {
        let mut report = ConformanceReport::default();
        self.setup.driver_name = self.name(&mut report).await?;
        let fixture = self.fixture("the basics")?;
        let capacity = basics(&self.kit, &fixture, &mut report).await?;
        drop(fixture);
        let mut findings = BrokenRules::default();
        for check in Check::ALL {
            if !self.is_requested(check.rules(), capacity.places, &mut report) {
                continue;
            }
            let done = match self.fixture(check.about()) {
                Ok(fixture) => self.check(check, &fixture, &capacity).await,
                Err(stop) => Err(stop),
            };
            if done.is_ok() {
                let limited = |rule: &&Rule| capacity.places.is_some() || WITHOUT_LIMIT.contains(rule);
                check
                    .rules()
                    .iter()
                    .filter(limited)
                    .for_each(|rule| report.tried(*rule));
            }
            findings.add(done)?;
        }
        findings.add(self.lifecycles(&capacity, &mut report).await)?;
        findings.conclude(report)
    }

    /// Returns the driver's name, which the other checks need.
    async fn name(&self, report: &mut ConformanceReport) -> CheckResult<String> {
        let nothing = Setup {
            nodes: self.setup.nodes.clone(),
            driver_name: "unknown.example.com".to_owned(),
            ..Setup::default()
        };
        let fixture = Fixture::open(&nothing, "the name")?;
        let name = self.kit.instance(&fixture).await?.driver.name().to_owned();
        let again = self.kit.instance(&fixture).await?.driver.name().to_owned();
        if check_driver(&name).is_err() || name != again {
            let expected = "one lower-case DNS subdomain of at most 63 characters for all instances";
            let found = format!("{name:?} and {again:?}");
            return Err(fixture.broken(Rule::StableName, "", expected, found));
        }
        report.tried(Rule::StableName);
        Ok(name)
    }

    /// Returns whether to check the rules; otherwise reports why not.
    fn is_requested(&self, rules: &[Rule], places: Option<usize>, report: &mut ConformanceReport) -> bool {
        let any = self.only.any(rules, report);
        for rule in rules.iter().filter(|rule| self.only.contains(**rule)) {
            if places.is_none() && !WITHOUT_LIMIT.contains(rule) {
                let most = self.setup.max_claims;
                report.skipped(
                    *rule,
                    format!("at least {most} claims fit at the same time, which counts as unlimited"),
                );
            } else if *rule == Rule::FreedWakes && !self.wakes {
                report.skipped(
                    *rule,
                    "the test declares that the driver reports no capacity changes",
                );
                return false;
            }
        }
        any
    }

    fn fixture(&self, check: &str) -> CheckResult<Fixture> {
        Fixture::open(&self.setup, check)
    }

    async fn check(&self, check: Check, fixture: &Fixture, capacity: &Capacity) -> CheckResult<()> {
        let kit = &self.kit;
        match check {
            Check::Full => checks::full(kit, fixture, capacity).await,
            Check::Rush => checks::rush(kit, fixture, capacity).await,
            Check::Again => checks::again(kit, fixture, capacity).await,
            Check::Recorded => checks::recorded(kit, fixture, capacity).await,
            Check::Restart => checks::restart(kit, fixture, capacity).await,
            Check::SeveralClaims => checks::several_claims(kit, fixture, capacity).await,
            Check::Dropped => checks::dropped(kit, fixture, capacity).await,
            Check::Woken => checks::woken(kit, fixture, capacity).await,
        }
    }

    /// Runs the real controller with the driver on the test cluster, with a fault at each step.
    async fn lifecycles(&self, capacity: &Capacity, report: &mut ConformanceReport) -> CheckResult<()> {
        let kinds = [
            (FaultKind::Crash, Rule::SurvivesCrash),
            (FaultKind::Slow, Rule::SurvivesSlowCall),
            (FaultKind::Fail, Rule::SurvivesFailedCall),
        ];
        // Observations cannot hang or fail.
        let steps = |kind, steps: &[String]| {
            let numbered = numbered(steps).into_iter();
            let injected = numbered
                .filter(|(_, _, name)| kind == FaultKind::Crash || !name.starts_with(lifecycle::OBSERVE));
            injected.map(|(sort, step, _)| (sort, step)).collect()
        };
        let run = |fault, rule| self.lifecycle(capacity, fault, rule);
        run::lifecycles(&self.only, kinds, MAX_CONCURRENT, steps, run, report).await
    }

    async fn lifecycle(
        &self,
        capacity: &Capacity,
        fault: Option<StepFault>,
        rule: Rule,
    ) -> CheckResult<Vec<String>> {
        let about = fault.map_or_else(
            || "pods".to_owned(),
            |fault| format!("pods, {}", fault.describe()),
        );
        let fixture = self.fixture(&about)?;
        lifecycle::run(&self.kit, &fixture, capacity, fault, rule).await
    }
}
