//! Conformance test of a [`Driver`]: its settings and the order of the checks.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt as _, stream};

use super::exercises;
use super::instance::{Instance, Make};
use super::measure::{Capacity, basics};
use super::process::{Blow, BlowKind, Fate, When, numbered};
use super::report::{Broken, Report};
use super::rule::Rule;
use super::scene::{Done, Place, Scene, Setup, Stop};
use super::story;
use crate::controller::is_driver_name;
use crate::driver::Driver;

/// Default limit for a call.
const LIMIT: Duration = Duration::from_secs(10);
/// Default limit for one step of a scenario.
const PATIENCE: Duration = Duration::from_secs(60);
/// Default maximum number of concurrent claims.
const MOST: usize = 16;
/// Number of concurrent scenarios; they mostly wait.
const AT_ONCE: usize = 8;

/// Conformance test of a [`Driver`]. Created by [`conformance`](super::conformance()).
pub struct Conformance<D> {
    kit: Kit<D>,
    wakes: bool,
    only: Option<BTreeSet<Rule>>,
}

/// Input of the checks.
pub(super) struct Kit<D> {
    make: Make<D>,
    pub(super) setup: Setup,
    limit: Duration,
    pub(super) patience: Duration,
    most: usize,
}

impl<D> fmt::Debug for Conformance<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Conformance")
            .field("nodes", &self.kit.setup.nodes)
            .field("limit", &self.kit.limit)
            .finish_non_exhaustive()
    }
}

impl<D: Driver> Kit<D> {
    pub(super) fn limit(&self) -> Duration {
        self.limit
    }

    /// Starts an instance without any observation.
    pub(super) async fn instance<'a>(&self, scene: &'a Scene) -> Done<Instance<'a, D>> {
        self.fated(scene, Fate::new(None)).await
    }

    /// Starts an instance with a fault plan.
    pub(super) async fn fated<'a>(&self, scene: &'a Scene, fate: Fate) -> Done<Instance<'a, D>> {
        Instance::start(&self.make, scene, fate, self.limit, self.most).await
    }

    /// Starts an instance that has observed an empty list of claims.
    pub(super) async fn started<'a>(&self, scene: &'a Scene) -> Done<Instance<'a, D>> {
        let instance = self.instance(scene).await?;
        instance.begin(Vec::new()).await?;
        Ok(instance)
    }

    fn scene(&self, exercise: &str) -> Done<Scene> {
        Scene::open(&self.setup, exercise)
    }
}

/// Checks by driver calls alone, in execution order.
#[derive(Clone, Copy, Debug)]
enum Exercise {
    Full,
    Rush,
    Again,
    Recorded,
    Restart,
    Batch,
    Dropped,
    Woken,
}

impl Exercise {
    const ALL: [Self; 8] = [
        Self::Full,
        Self::Rush,
        Self::Again,
        Self::Recorded,
        Self::Restart,
        Self::Batch,
        Self::Dropped,
        Self::Woken,
    ];

    fn about(self) -> &'static str {
        match self {
            Self::Full => "all that fits is allocated",
            Self::Rush => "calls at the same time",
            Self::Again => "the same again",
            Self::Recorded => "what claims record",
            Self::Restart => "a restart",
            Self::Batch => "claims of one pod",
            Self::Dropped => "a call that is dropped",
            Self::Woken => "who waits is woken",
        }
    }

    /// The rules that the check covers.
    fn rules(self) -> &'static [Rule] {
        match self {
            Self::Full => &[
                Rule::FullIsAVerdict,
                Rule::NeverMoreThanThereIs,
                Rule::ReadableErrors,
                Rule::UnrecordedIsFreeAgain,
            ],
            Self::Rush => &[Rule::NeverMoreThanThereIs],
            Self::Again => &[
                Rule::AllocateAgainIsTheSame,
                Rule::DeallocateNothingDoesNothing,
                Rule::UnrecordedIsFreeAgain,
            ],
            Self::Recorded => &[Rule::RecordedIsHeld, Rule::ObservedIsFree, Rule::NoFalseFinding],
            Self::Restart => &[Rule::BooksFromClaims, Rule::LostAllocationIsGivenBack],
            Self::Batch => &[Rule::OneResultPerClaim, Rule::BatchCanBeUndone],
            Self::Dropped => &[Rule::DroppedCallCanBeUndone],
            Self::Woken => &[Rule::FreedWakes],
        }
    }
}

/// Rules that also apply to a driver without a capacity limit.
const WITHOUT_LIMIT: [Rule; 3] = [
    Rule::AllocateAgainIsTheSame,
    Rule::DeallocateNothingDoesNothing,
    Rule::NoFalseFinding,
];

impl<D: Driver> Conformance<D> {
    pub(super) fn new(make: impl Fn(Place) -> D + Send + Sync + 'static) -> Self {
        let nodes = ["node-a", "node-b"].map(str::to_owned).into();
        Self {
            kit: Kit {
                make: Arc::new(make),
                setup: Setup {
                    nodes,
                    ..Setup::default()
                },
                limit: LIMIT,
                patience: PATIENCE,
                most: MOST,
            },
            wakes: true,
            only: None,
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
        self.kit.setup.objects += "\n---\n";
        self.kit.setup.objects += yaml;
        self
    }

    /// Sets the nodes of the cluster; default: `node-a` and `node-b`. At least one claim must fit on one of them. Full
    /// coverage needs at least two nodes.
    #[must_use]
    pub fn nodes(mut self, names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.kit.setup.nodes = names.into_iter().map(Into::into).collect();
        self
    }

    /// Sets the maximum number of concurrent claims; default: 16. A driver with this capacity or more counts as
    /// unlimited, and the rules about exhausted capacity are not checked.
    #[must_use]
    pub fn at_most(mut self, claims: usize) -> Self {
        self.kit.most = claims;
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
    pub fn patience(mut self, patience: Duration) -> Self {
        self.kit.patience = patience;
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
        self.only = Some(rules.into_iter().collect());
        self
    }

    /// Runs all checks and returns a report, or the broken rules. Must be called within a tokio runtime.
    pub async fn run(mut self) -> Result<Report, Broken> {
        let mut report = Report::default();
        self.kit.setup.driver_name = self.name(&mut report).await?;
        let scene = self.kit.scene("the basics")?;
        let capacity = basics(&self.kit, &scene, &mut report).await?;
        drop(scene);
        let mut findings = Vec::new();
        for exercise in Exercise::ALL {
            if !self.wanted(exercise.rules(), capacity.places, &mut report) {
                continue;
            }
            let done = match self.kit.scene(exercise.about()) {
                Ok(scene) => self.exercise(exercise, &scene, &capacity).await,
                Err(stop) => Err(stop),
            };
            match done {
                Ok(()) => {
                    for rule in exercise.rules() {
                        if capacity.places.is_some() || WITHOUT_LIMIT.contains(rule) {
                            report.tried(*rule);
                        }
                    }
                }
                Err(Stop::Rule(finding)) => findings.push(*finding),
                Err(stop) => return Err(stop.into()),
            }
        }
        match self.stories(&capacity, &mut report).await {
            Ok(()) => {}
            Err(Stop::Rule(finding)) => findings.push(*finding),
            Err(stop) => return Err(stop.into()),
        }
        report.settle();
        if findings.is_empty() {
            Ok(report)
        } else {
            Err(Broken::Rules(findings))
        }
    }

    /// Returns the driver's name, which the other checks need.
    async fn name(&self, report: &mut Report) -> Done<String> {
        let nothing = Setup {
            nodes: self.kit.setup.nodes.clone(),
            driver_name: "unknown.example.com".to_owned(),
            ..Setup::default()
        };
        let scene = Scene::open(&nothing, "the name")?;
        let name = self.kit.instance(&scene).await?.driver.name().to_owned();
        let again = self.kit.instance(&scene).await?.driver.name().to_owned();
        if !is_driver_name(&name) || name != again {
            let expected = "one lower-case DNS subdomain of at most 63 characters for all instances";
            let found = format!("{name:?} and {again:?}");
            return Err(scene.broken(Rule::StableName, "", expected, found));
        }
        report.tried(Rule::StableName);
        Ok(name)
    }

    /// Returns whether to check the rules; otherwise reports why not.
    fn wanted(&self, rules: &[Rule], places: Option<usize>, report: &mut Report) -> bool {
        let asked = |rule: &Rule| self.only.as_ref().is_none_or(|only| only.contains(rule));
        for rule in rules {
            if !asked(rule) {
                report.skipped(*rule, "the test asks for other rules only");
            } else if places.is_none() && !WITHOUT_LIMIT.contains(rule) {
                let why = format!(
                    "{} claims fit at the same time, and more are not tried",
                    self.kit.most
                );
                report.skipped(*rule, why);
            } else if *rule == Rule::FreedWakes && !self.wakes {
                report.skipped(*rule, "the driver does not tell when something becomes free");
                return false;
            }
        }
        rules.iter().any(asked)
    }

    async fn exercise(&self, exercise: Exercise, scene: &Scene, capacity: &Capacity) -> Done<()> {
        let kit = &self.kit;
        match exercise {
            Exercise::Full => exercises::full(kit, scene, capacity).await,
            Exercise::Rush => exercises::rush(kit, scene, capacity).await,
            Exercise::Again => exercises::again(kit, scene, capacity).await,
            Exercise::Recorded => exercises::recorded(kit, scene, capacity).await,
            Exercise::Restart => exercises::restart(kit, scene, capacity).await,
            Exercise::Batch => exercises::batch(kit, scene, capacity).await,
            Exercise::Dropped => exercises::dropped(kit, scene, capacity).await,
            Exercise::Woken => exercises::woken(kit, scene, capacity).await,
        }
    }

    /// Runs the real controller with the driver on the test cluster, with a fault at each step.
    async fn stories(&self, capacity: &Capacity, report: &mut Report) -> Done<()> {
        let kinds = [
            (BlowKind::Crash, Rule::SurvivesCrash),
            (BlowKind::Slow, Rule::SurvivesSlowCall),
            (BlowKind::Fail, Rule::SurvivesFailedCall),
        ];
        let asked = |rule: Rule| self.only.as_ref().is_none_or(|only| only.contains(&rule));
        if !asked(Rule::ServesPods) && !kinds.iter().any(|(_, rule)| asked(*rule)) {
            for (_, rule) in kinds {
                report.skipped(rule, "the test asks for other rules only");
            }
            report.skipped(Rule::ServesPods, "the test asks for other rules only");
            return Ok(());
        }
        let steps = self.story(capacity, None).await?;
        report.tried(Rule::ServesPods);
        for (kind, rule) in kinds {
            if !asked(rule) {
                report.skipped(rule, "the test asks for other rules only");
                continue;
            }
            // Observations cannot hang or fail.
            let struck = |name: &String| kind == BlowKind::Crash || !name.starts_with(story::TOLD);
            let steps = numbered(&steps).into_iter();
            let blows = steps
                .filter(|(_, _, name)| struck(name))
                .flat_map(|(sort, step, _)| {
                    [When::Before, When::After].map(|when| Blow {
                        step,
                        sort,
                        kind,
                        when,
                    })
                });
            let mut played = stream::iter(blows)
                .map(|blow| self.story(capacity, Some(blow)))
                .buffer_unordered(AT_ONCE);
            while let Some(done) = played.next().await {
                done?;
                report.tried(rule);
            }
        }
        Ok(())
    }

    async fn story(&self, capacity: &Capacity, blow: Option<Blow>) -> Done<Vec<String>> {
        let about = blow.map_or_else(
            || "pods on the stage".to_owned(),
            |blow| format!("pods on the stage, {}", blow.describe()),
        );
        let scene = self.kit.scene(&about)?;
        story::play(&self.kit, &scene, capacity, blow).await
    }
}
