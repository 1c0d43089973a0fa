//! Conformance test of a [`NodeDriver`].

use std::collections::BTreeSet;
use std::fmt;
use std::future::Future;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::{FutureExt as _, StreamExt as _, stream};
use serde_json::json;
use tokio::sync::Semaphore;

use super::node_exercises as exercises;
use super::node_instance::{LeftOver, Make, NodeInstance};
use super::node_story;
use super::process::{Blow, BlowKind, Fate, Sort, When, numbered};
use super::report::{Broken, Report};
use super::rule::Rule;
use super::scene::{Done, Place, Scene, Setup, Stop};
use crate::api::crd::definitions;
use crate::node::driver::{Device, NodeDriver};

/// Default limit for a call, equal to the companion's.
const LIMIT: Duration = Duration::from_secs(10);
/// Default limit for one step of a scenario.
const PATIENCE: Duration = Duration::from_secs(60);
/// Number of concurrent scenarios per test.
const AT_ONCE: usize = 4;
/// Limits concurrent scenarios across all tests of this process. Each has a companion, and the number of inotify
/// instances per user is limited (`fs.inotify.max_user_instances`, 128 by default).
static PLAYING: Semaphore = Semaphore::const_new(AT_ONCE);
/// Driver name on the test cluster.
pub(super) const DRIVER: &str = "conformance.example.com";

/// Conformance test of a [`NodeDriver`]. Created by [`node_conformance`](super::node_conformance()).
pub struct NodeConformance<D> {
    kit: NodeKit<D>,
    only: Option<BTreeSet<Rule>>,
}

/// Input of the checks.
pub(super) struct NodeKit<D> {
    make: Make<D>,
    limit: Duration,
    pub(super) patience: Duration,
    pub(super) left_over: Option<LeftOver>,
}

impl<D> fmt::Debug for NodeConformance<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeConformance")
            .field("limit", &self.kit.limit)
            .finish_non_exhaustive()
    }
}

impl<D: NodeDriver> NodeKit<D> {
    pub(super) async fn instance<'a>(&self, scene: &'a Scene) -> Done<NodeInstance<'a, D>> {
        self.fated(scene, Fate::new(None)).await
    }

    pub(super) async fn fated<'a>(&self, scene: &'a Scene, fate: Fate) -> Done<NodeInstance<'a, D>> {
        NodeInstance::start(&self.make, scene, fate, self.limit).await
    }

    /// Starts an instance and waits for its first device list, as the companion does.
    pub(super) async fn listening<'a>(&self, scene: &'a Scene) -> Done<NodeInstance<'a, D>> {
        let instance = self.instance(scene).await?;
        instance.devices().await?;
        Ok(instance)
    }
}

#[derive(Clone, Copy, Debug)]
enum Exercise {
    Injections,
    Claims,
    Unfinished,
    Dropped,
}

impl Exercise {
    const ALL: [Self; 4] = [Self::Injections, Self::Claims, Self::Unfinished, Self::Dropped];

    fn about(self) -> &'static str {
        match self {
            Self::Injections => "what a container gets",
            Self::Claims => "claims are prepared and undone",
            Self::Unfinished => "a prepare that fails",
            Self::Dropped => "a prepare that is dropped",
        }
    }

    fn rules(self) -> &'static [Rule] {
        match self {
            Self::Injections => &[
                Rule::UsableInjection,
                Rule::InjectionRepeats,
                Rule::UnknownDeviceIsRefused,
            ],
            Self::Claims => &[
                Rule::PrepareAgainIsTheSame,
                Rule::UnprepareAgainIsFine,
                Rule::UnprepareIsForOneClaim,
                Rule::NothingIsLeft,
                Rule::NoPanic,
                Rule::ReturnsInTime,
            ],
            Self::Unfinished => &[
                Rule::FailedPrepareCanBeUndone,
                Rule::UnknownDeviceIsRefused,
                Rule::NothingIsLeft,
            ],
            Self::Dropped => &[Rule::DroppedPrepareCanBeUndone, Rule::NothingIsLeft],
        }
    }
}

impl<D: NodeDriver> NodeConformance<D> {
    pub(super) fn new<F>(make: impl Fn(Place) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = D> + Send + 'static,
    {
        Self {
            kit: NodeKit {
                make: Arc::new(move |place| make(place).boxed()),
                limit: LIMIT,
                patience: PATIENCE,
                left_over: None,
            },
            only: None,
        }
    }

    /// Sets a function that lists leftovers of claims: given [`Place::directory`], it returns the prepared items, and
    /// nothing without a prepared claim. Without it, the kit cannot check [`Rule::NothingIsLeft`].
    #[must_use]
    pub fn left_over(mut self, look: impl Fn(&Path) -> Vec<String> + Send + Sync + 'static) -> Self {
        self.kit.left_over = Some(Arc::new(look));
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
    pub fn patience(mut self, patience: Duration) -> Self {
        self.kit.patience = patience;
        self
    }

    /// Checks only these rules.
    #[must_use]
    pub fn only(mut self, rules: impl IntoIterator<Item = Rule>) -> Self {
        self.only = Some(rules.into_iter().collect());
        self
    }

    /// Runs all checks and returns a report, or the broken rules. Must be called within a tokio runtime.
    pub async fn run(self) -> Result<Report, Broken> {
        let mut report = Report::default();
        let scene = Scene::open(&setup("none")?, "the list of devices")?;
        let devices = exercises::devices(&self.kit, &scene).await?;
        drop(scene);
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
            let problem = "no device is well and may be had by a claim: give the test at least one";
            return Err(Broken::Setup(problem.to_owned()));
        };
        let mut findings = Vec::new();
        for exercise in Exercise::ALL {
            if !exercise.rules().iter().any(|rule| self.asked(*rule)) {
                for rule in exercise.rules() {
                    report.skipped(*rule, "the test asks for other rules only");
                }
                continue;
            }
            let scene = Scene::open(&setup("none")?, exercise.about())?;
            match self.exercise(exercise, &scene, &devices).await {
                Ok(()) => {
                    for rule in exercise.rules() {
                        if *rule == Rule::NothingIsLeft && self.kit.left_over.is_none() {
                            report
                                .skipped(*rule, "the test does not say how to see what is left (left_over)");
                        } else {
                            report.tried(*rule);
                        }
                    }
                }
                Err(Stop::Rule(finding)) => findings.push(*finding),
                Err(stop) => return Err(stop.into()),
            }
        }
        match self.stories(&kind, &mut report).await {
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

    fn asked(&self, rule: Rule) -> bool {
        self.only.as_ref().is_none_or(|only| only.contains(&rule))
    }

    async fn exercise(&self, exercise: Exercise, scene: &Scene, devices: &[Device]) -> Done<()> {
        match exercise {
            Exercise::Injections => exercises::container_edits_of(&self.kit, scene, devices).await,
            Exercise::Claims => exercises::claims(&self.kit, scene, devices).await,
            Exercise::Unfinished => exercises::unfinished(&self.kit, scene, devices).await,
            Exercise::Dropped => exercises::dropped(&self.kit, scene, devices).await,
        }
    }

    /// Runs the real companion with the driver on the test cluster, with a fault at each step.
    async fn stories(&self, kind: &str, report: &mut Report) -> Done<()> {
        let kinds = [
            (BlowKind::Crash, Rule::NodeSurvivesCrash),
            (BlowKind::Slow, Rule::NodeSurvivesSlowCall),
            (BlowKind::Fail, Rule::NodeSurvivesFailedCall),
        ];
        if !self.asked(Rule::ServesPods) && !kinds.iter().any(|(_, rule)| self.asked(*rule)) {
            for rule in kinds.iter().map(|(_, rule)| *rule).chain([Rule::ServesPods]) {
                report.skipped(rule, "the test asks for other rules only");
            }
            return Ok(());
        }
        let steps = self.story(kind, None).await?;
        report.tried(Rule::ServesPods);
        for (blow, rule) in kinds {
            if !self.asked(rule) {
                report.skipped(rule, "the test asks for other rules only");
                continue;
            }
            let places = if blow == BlowKind::Slow {
                first_of_each(&steps)
            } else {
                numbered(&steps)
            };
            let blows = places.into_iter().flat_map(|(sort, step, _)| {
                [When::Before, When::After].map(|when| Blow {
                    step,
                    sort,
                    kind: blow,
                    when,
                })
            });
            let mut played = stream::iter(blows)
                .map(|blow| self.story(kind, Some(blow)))
                .buffer_unordered(AT_ONCE);
            while let Some(done) = played.next().await {
                done?;
                report.tried(rule);
            }
        }
        Ok(())
    }

    async fn story(&self, kind: &str, blow: Option<Blow>) -> Done<Vec<String>> {
        let about = blow.map_or_else(
            || "pods on a node of the stage".to_owned(),
            |blow| format!("pods on a node of the stage, {}", blow.describe()),
        );
        // The semaphore is never closed.
        let _playing = PLAYING.acquire().await;
        let scene = Scene::open(&setup(kind)?, &about)?;
        node_story::play(&self.kit, &scene, blow).await
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

/// Returns our CRDs and a class for the driver's devices of a kind.
fn setup(kind: &str) -> Done<Setup> {
    let mut objects = Vec::new();
    for definition in definitions() {
        let definition = serde_json::to_value(definition).map_err(|error| Stop::Setup(error.to_string()))?;
        objects.push(definition);
    }
    objects.push(json!({
        "apiVersion": "drayman.dev/v1alpha1", "kind": "DeviceClassParameters", "metadata": { "name": "conformance" },
        "spec": { "kind": kind },
    }));
    objects.push(json!({
        "apiVersion": "resource.k8s.io/v1alpha2", "kind": "ResourceClass", "metadata": { "name": "conformance" },
        "driverName": DRIVER,
        "parametersRef": { "apiGroup": "drayman.dev", "kind": "DeviceClassParameters", "name": "conformance" },
    }));
    let documents: Vec<String> = objects.iter().map(ToString::to_string).collect();
    Ok(Setup {
        objects: documents.join("\n---\n"),
        // The kubelet creates the only node.
        nodes: Vec::new(),
        driver_name: DRIVER.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::first_of_each;

    #[test]
    fn one_call_of_each_method_hangs_and_no_write() {
        let steps = [
            "POST /apis",
            "injection(a)",
            "prepare(a)",
            "injection(b)",
            "unprepare(a)",
            "prepare(b)",
        ];
        let steps = steps.map(str::to_owned);
        let firsts = first_of_each(&steps);
        let numbers: Vec<usize> = firsts.into_iter().map(|(_, number, _)| number).collect();
        assert_eq!(numbers, [0, 1, 3]);
    }
}
