//! Scenario of pods with the real controller and the driver under test on the test cluster. A fault hits one step of
//! the controller; the final state must be as without it.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::Instant as Moment;
use tokio_util::sync::CancellationToken;

use super::conformance::Kit;
use super::instance::Instance;
use super::measure::Capacity;
use super::process::{Blow, BlowKind, Fate};
use super::rule::Rule;
use super::scene::{Done, NAMESPACE, Scene, Stop};
use super::wrapped::Wrapped;
use crate::controller::Controller;
use crate::driver::Driver;
use crate::testcluster::api::object::{self, list, text};
use crate::testcluster::hand::Hand;

/// Name prefix of steps that only send an observation.
pub(super) const TOLD: &str = "observe";
/// Limit for a driver call and for a request.
const CALL: Duration = Duration::from_millis(500);

struct Story<'a, D> {
    kit: &'a Kit<D>,
    scene: &'a Scene,
    rule: Rule,
    instance: Option<Instance<'a, D>>,
    fate: Fate,
    /// Why the controller has ended unexpectedly.
    ended: Arc<Mutex<Option<String>>>,
    /// Steps of earlier processes.
    past: Vec<String>,
}

/// Runs the scenario and returns the controller's steps.
pub(super) async fn play<D: Driver>(
    kit: &Kit<D>,
    scene: &Scene,
    capacity: &Capacity,
    blow: Option<Blow>,
) -> Done<Vec<String>> {
    let rule = match blow.map(|blow| blow.kind) {
        None => Rule::ServesPods,
        Some(BlowKind::Crash) => Rule::SurvivesCrash,
        Some(BlowKind::Slow) => Rule::SurvivesSlowCall,
        Some(BlowKind::Fail) => Rule::SurvivesFailedCall,
    };
    let mut story = Story {
        kit,
        scene,
        rule,
        instance: None,
        fate: Fate::new(blow),
        ended: Arc::default(),
        past: Vec::new(),
    };
    story.begin().await?;
    let pair = capacity.together >= 2 && capacity.places.is_none_or(|places| places >= 3);
    story.create("one", 1)?;
    story.bound("one").await?;
    if pair {
        story.create("pair", 2)?;
        story.bound("pair").await?;
    }
    story.delete("one");
    story
        .settled("the claim of pod one is gone", usize::from(pair) * 2)
        .await?;
    story.create("later", 1)?;
    story.bound("later").await?;
    for pod in ["pair", "later"] {
        story.delete(pod);
    }
    story
        .settled("all pods are deleted; their claims are gone", 0)
        .await?;
    story.check_history(capacity)?;
    story.check_books(capacity).await?;
    story.remember();
    if let Some(instance) = story.instance.take() {
        instance.kill().await;
    }
    Ok(story.past)
}

impl<D: Driver> Story<'_, D> {
    /// Starts the controller with the driver.
    async fn begin(&mut self) -> Done<()> {
        let instance = self.kit.fated(self.scene, self.fate.clone()).await?;
        let wrapped = Wrapped {
            driver: instance.driver.clone(),
            fate: self.fate.clone(),
        };
        let controller = Controller::builder(wrapped)
            .call_timeout(CALL)
            .request_timeout(CALL)
            .build(instance.client())
            .map_err(|error| Stop::Setup(error.to_string()))?;
        let ended = self.ended.clone();
        instance.spawn(async move {
            // Never cancelled: the process is killed.
            let result = controller.run(CancellationToken::new()).await;
            let why = result.err().map_or_else(String::new, |error| error.to_string());
            *ended.lock().unwrap_or_else(PoisonError::into_inner) = Some(why);
        });
        self.instance = Some(instance);
        Ok(())
    }

    /// Keeps the steps of the process for a finding.
    fn remember(&mut self) {
        self.past.extend(self.fate.steps());
    }

    async fn restart(&mut self) -> Done<()> {
        self.remember();
        self.past.push("(killed, and started anew)".to_owned());
        if let Some(instance) = self.instance.take() {
            instance.kill().await;
        }
        self.fate = Fate::new(None);
        self.begin().await
    }

    fn create(&self, name: &str, claims: usize) -> Done<()> {
        let entries: Vec<Value> = (0..claims)
            .map(|number| {
                json!({ "name": format!("entry-{number}"), "source": { "resourceClaimTemplateName": self.scene.template } })
            })
            .collect();
        let pod = json!({
            "metadata": { "name": name },
            "spec": {
                "containers": [{ "name": "main", "image": "none" }],
                "resourceClaims": entries, "terminationGracePeriodSeconds": 0,
            },
        });
        let made = self.scene.hand.create("pods", NAMESPACE, pod);
        made.map(drop)
            .map_err(|refusal| Stop::Setup(format!("pod {name}: {}", refusal.message)))
    }

    fn delete(&self, name: &str) {
        if let Some(pod) = self.scene.hand.get("pods", NAMESPACE, name) {
            // The pod may already be deleted.
            let _ = self.scene.hand.delete("pods", &pod, Some(0));
        }
    }

    async fn bound(&mut self, name: &str) -> Done<()> {
        let what = format!("pod {name} has a node, and its claims are allocated and reserved for it");
        self.wait(&what, |hand| {
            let pod = hand.get("pods", NAMESPACE, name).unwrap_or_default();
            !text(&pod, "/spec/nodeName").is_empty()
        })
        .await
    }

    async fn settled(&mut self, what: &str, claims: usize) -> Done<()> {
        self.wait(what, |hand| {
            let pending = hand.list("pods").iter().any(object::is_deleting);
            !pending && hand.list("resourceclaims").len() == claims
        })
        .await
    }

    async fn wait(&mut self, what: &str, holds: impl Fn(&Hand) -> bool) -> Done<()> {
        let until = Moment::now() + self.kit.patience;
        let mut changes = self.scene.stage.server().changes();
        loop {
            changes.borrow_and_update();
            if holds(&self.scene.hand) {
                return Ok(());
            }
            if self.fate.is_dead() {
                self.restart().await?;
            }
            let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(why) = ended {
                return Err(self.broken(what, format!("the controller has ended: {why}")));
            }
            let fate = self.fate.clone();
            tokio::select! {
                _ = changes.changed() => {}
                () = fate.died() => {}
                () = tokio::time::sleep_until(until) => {
                    let state = self.state();
                    return Err(self.broken(what, format!("not within {:?}; {state}", self.kit.patience)));
                }
            }
        }
    }

    /// Describes claims and events for a finding.
    fn state(&self) -> String {
        let hand = &self.scene.hand;
        let mut parts: Vec<String> = hand
            .list("resourceclaims")
            .iter()
            .map(|claim| {
                let allocated = claim.pointer("/status/allocation").is_some();
                let finalizers = list(claim, "/metadata/finalizers").len();
                let word = if allocated { "allocated" } else { "not allocated" };
                let going = if object::is_deleting(claim) {
                    ", being deleted"
                } else {
                    ""
                };
                format!(
                    "claim {}: {word}, {finalizers} finalizers{going}",
                    object::name(claim)
                )
            })
            .collect();
        parts.extend(self.scene.events());
        parts.join("; ")
    }

    fn broken(&self, expected: &str, found: impl Into<String>) -> Stop {
        let steps = self.past.iter().cloned().chain(self.fate.steps());
        self.scene.broken_after(steps, self.rule, expected, found)
    }

    /// Checks that recorded allocations never exceeded the capacity.
    fn check_history(&self, capacity: &Capacity) -> Done<()> {
        let Some(places) = capacity.places else {
            return Ok(());
        };
        let mut allocated: BTreeSet<String> = BTreeSet::new();
        let (changes, _) = self.scene.stage.server().changes_after(1);
        for change in changes
            .iter()
            .filter(|change| change.key.storage.starts_with("resourceclaims"))
        {
            match &change.after {
                Some(claim) if claim.pointer("/status/allocation").is_some() => {
                    allocated.insert(change.key.name.clone())
                }
                _ => allocated.remove(&change.key.name),
            };
            if allocated.len() > places {
                let expected = format!("{places} claims are allocated at most");
                return Err(self.broken(&expected, format!("{} are: {allocated:?}", allocated.len())));
            }
        }
        Ok(())
    }

    /// Checks that the driver's whole capacity is free at the end.
    async fn check_books(&mut self, capacity: &Capacity) -> Done<()> {
        let Some(places) = capacity.places else {
            return Ok(());
        };
        // The last observation may still be pending.
        let until = Moment::now() + self.kit.patience;
        loop {
            if self.fate.is_dead() {
                self.restart().await?;
            }
            let Some(instance) = &self.instance else {
                return Ok(());
            };
            let free = instance.free().await?;
            if free == places {
                return Ok(());
            }
            if Moment::now() > until {
                let expected = format!("in the end {places} claims fit, as at the start");
                return Err(self.broken(&expected, format!("{free} fit")));
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}
