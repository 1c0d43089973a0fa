//! Looks at kubelet's containers, beside the owner's task.
//!
//! Kubelet may take seconds to answer, or not answer at all. So a look is a task of its own, one at a time, for all resources at once.
//! What waits for one waits apart from the requests that need none.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
use tracing::{debug, info, warn};

use super::Owner;
use super::handle::Failure;
use crate::core::prepare::containers::Shown;
use crate::core::prepare::refusal::Refusal;
use crate::core::prepare::request::ClaimToPrepare;
use crate::node::companion::CompanionError;
use crate::node::driver::NodeDriver;

/// How often kubelet is asked whether containers still have devices of resources that are no more: while it does not answer, and while
/// they do.
const FORMER_PAUSES: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(5)];
/// How long a change of the configuration or of the devices waits for kubelet, which answers within milliseconds: so that a device is not
/// unhealthy for that long only because nobody has looked. A slower answer is taken up when it comes.
const BRIEFLY: Duration = Duration::from_millis(250);

/// What kubelet shows of each resource, or why it does not.
pub(super) type Looked = Result<BTreeMap<String, Shown>, String>;
/// The answer to a Prepare.
pub(super) type Prepared = oneshot::Sender<Vec<Result<Vec<String>, CompanionError>>>;

/// What waits for a look.
#[derive(Debug)]
pub(super) enum Waiting {
    /// Claims that want devices which containers could have, and those that kubelet has asked to unprepare since.
    Prepare {
        claims: Vec<ClaimToPrepare>,
        withdrawn: BTreeSet<String>,
        answer: Prepared,
    },
    /// A person who wants to know what containers have.
    InContainers(oneshot::Sender<BTreeMap<String, String>>),
}

/// The look that is under way.
#[derive(Debug, Default)]
pub(super) struct Looking {
    task: Option<JoinHandle<Looked>>,
    /// Another one is to follow.
    again: bool,
    waiting: Vec<Waiting>,
    /// What came after the look had begun.
    next: Vec<Waiting>,
}

impl Looking {
    pub(super) fn is_under_way(&self) -> bool {
        self.task.is_some()
    }

    /// Waits for the end of the look; for ever if there is none.
    pub(super) async fn done(&mut self) -> Looked {
        let Some(task) = &mut self.task else {
            return std::future::pending().await;
        };
        let looked = task.await.unwrap_or_else(|error| Err(error.to_string()));
        self.task = None;
        looked
    }

    /// Kubelet does not want a claim any more whose Prepare still waits.
    pub(super) fn withdraw(&mut self, uid: &str) {
        for waiting in self.waiting.iter_mut().chain(&mut self.next) {
            if let Waiting::Prepare {
                claims, withdrawn, ..
            } = waiting
                && claims.iter().any(|claim| claim.uid == uid)
            {
                withdrawn.insert(uid.to_owned());
            }
        }
    }
}

impl<D: NodeDriver> Owner<D> {
    /// The resources that kubelet is to be asked for: those that also leave by claims, and those that are no more.
    fn names_to_ask(&self) -> BTreeSet<String> {
        let mut names = self.names_of_both();
        names.extend(self.former.names());
        names
    }

    pub(super) fn names_of_both(&self) -> BTreeSet<String> {
        let both = self
            .resources
            .iter()
            .filter(|(_, resource)| resource.offered.also_by_claims);
        both.map(|(name, _)| name.clone()).collect()
    }

    /// Begins a look, or another one after that which is under way.
    pub(super) fn ask_kubelet(&mut self) {
        let Some(grants) = self.grants.clone() else {
            return;
        };
        if self.looking.is_under_way() {
            self.looking.again = true;
            return;
        }
        let names = self.names_to_ask();
        if names.is_empty() && self.looking.waiting.is_empty() {
            return;
        }
        self.looking.task = Some(tokio::spawn(async move { grants.look(names).await }));
    }

    /// The same before the doors open, or for a change, where an answer that comes at once is taken up at once.
    pub(super) async fn ask_kubelet_and_wait(&mut self, at_most: Option<Duration>) {
        self.settle_former();
        self.ask_kubelet();
        if !self.looking.is_under_way() {
            return;
        }
        let looked = match at_most {
            None => self.looking.done().await,
            Some(limit) => match timeout(limit, self.looking.done()).await {
                Ok(looked) => looked,
                Err(_) => return,
            },
        };
        self.take_up(looked).await;
    }

    pub(super) async fn ask_kubelet_for_a_change(&mut self) {
        self.ask_kubelet_and_wait(Some(BRIEFLY)).await;
    }

    /// Serves something after the next look that begins.
    pub(super) fn wait_for_look(&mut self, waiting: Waiting) {
        if self.looking.is_under_way() {
            self.looking.next.push(waiting);
        } else {
            self.looking.waiting.push(waiting);
            self.ask_kubelet();
        }
    }

    /// Takes up what kubelet has shown, and serves what has waited for it.
    pub(super) async fn take_up(&mut self, looked: Looked) {
        let now = self.since.elapsed();
        let of_both = match &looked {
            Ok(shown) => self.see_both(shown),
            Err(problem) => Err(problem.clone()),
        };
        let was_known = self.former.is_known();
        if let Ok(shown) = &looked {
            for name in self.former.names() {
                if let Some(shown) = shown.get(&name) {
                    self.former.change().seen(&name, shown, now);
                }
            }
        }
        self.settle_former();
        if self.former.is_known() && !was_known && !self.former.is_empty() {
            info!(
                resource = ?self.former.names(),
                "containers have devices under names that the configuration no longer gives them; these are withheld until the containers have ended"
            );
        }
        let [unknown, known] = FORMER_PAUSES;
        let pause = if self.former.is_known() { known } else { unknown };
        self.former_due = Instant::now() + pause;
        self.contest_announced();
        self.tell_of_look(looked.err().or_else(|| of_both.clone().err()));
        self.take_stock();
        let waiting = std::mem::replace(&mut self.looking.waiting, std::mem::take(&mut self.looking.next));
        for waiting in waiting {
            match waiting {
                Waiting::Prepare {
                    claims,
                    withdrawn,
                    answer,
                } => {
                    self.prepare_all(&claims, &withdrawn, Some(&of_both), answer)
                        .await;
                }
                Waiting::InContainers(answer) => {
                    let holder = |device: &String| Some((device.clone(), self.containers.holder(device)?));
                    let _ = answer.send(self.inventory.keys().filter_map(holder).collect());
                }
            }
        }
        if std::mem::take(&mut self.looking.again) || !self.looking.waiting.is_empty() {
            self.ask_kubelet();
        }
    }

    /// Takes up what kubelet shows of the resources whose devices also leave by claims.
    fn see_both(&mut self, shown: &BTreeMap<String, Shown>) -> Result<(), String> {
        let names = self.names_of_both();
        if names.is_empty() && self.looking.waiting.is_empty() {
            // Nothing was asked for that could leave by claims: what containers have of such devices is as unknown as before.
            return Ok(());
        }
        let mut all = Shown::default();
        for name in &names {
            let Some(shown) = shown.get(name) else {
                // It came while kubelet was asked.
                self.looking.again = true;
                return Err(format!("it was not asked for {name} yet"));
            };
            if let Some(problem) = &shown.pods_unseen {
                return Err(problem.clone());
            }
            all.add(shown);
        }
        if !names.is_empty() && !self.containers.known() {
            info!(
                devices = ?all.listed.keys().chain(&all.recorded).collect::<BTreeSet<_>>(),
                "kubelet has shown which devices its containers hold"
            );
        }
        self.containers.change().seen(&all, self.since.elapsed());
        self.contested.change().settle(&self.containers);
        Ok(())
    }

    /// Prepares claims, or says of each why not. `looked` is what came of the look that they have waited for.
    pub(super) async fn prepare_all(
        &mut self,
        claims: &[ClaimToPrepare],
        withdrawn: &BTreeSet<String>,
        looked: Option<&Result<(), String>>,
        answer: Prepared,
    ) {
        let mut answers = Vec::with_capacity(claims.len());
        for claim in claims {
            let result = if withdrawn.contains(&claim.uid) {
                Err(Failure::Refused(Refusal::ContainersUnknown {
                    device: claim.name.clone(),
                    problem: "the claim was to be unprepared before kubelet had answered".to_owned(),
                }))
            } else {
                self.prepare(claim, looked).await
            };
            self.count("prepare", result.as_ref().err());
            super::report(
                "prepare",
                &claim.namespace,
                &claim.name,
                &claim.uid,
                result.as_ref().err(),
            );
            answers.push(result.map_err(CompanionError::from));
        }
        // A caller that is gone is no reason not to do the work; there is only nobody to tell.
        let _ = answer.send(answers);
    }

    /// Says once that kubelet does not show its containers, why, and what follows.
    fn tell_of_look(&mut self, problem: Option<String>) {
        let Some(problem) = problem else {
            self.complained = false;
            return;
        };
        if self.complained {
            debug!("kubelet still does not show its containers: {problem}");
            return;
        }
        self.complained = true;
        let mut effects = Vec::new();
        if self.has_both() {
            effects.push("devices of mode both are given to nobody new");
        }
        if !self.former.is_empty() {
            effects.push("what left by names of extended resources that are no more is given to nobody");
        }
        warn!(
            reason = "PodResourcesUnavailable",
            "kubelet does not show which devices its containers hold ({}): {problem}",
            effects.join(", and ")
        );
    }
}
