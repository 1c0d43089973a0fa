//! Queries of kubelet's containers, outside the state task.
//!
//! Kubelet may take seconds to answer, or never answer. Each query is therefore a separate task, one at a time, for all resources together.
//! Requests that need its result wait apart from those that do not.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
use tracing::{debug, info, warn};

use super::NodeState;
use super::handle::Failure;
use crate::core::prepare::containers::Shown;
use crate::core::prepare::refusal::Refusal;
use crate::core::prepare::request::ClaimToPrepare;
use crate::node::companion::CompanionError;
use crate::node::driver::NodeDriver;

/// Pauses between queries for containers that hold devices of withdrawn resources: until kubelet has answered, and from then on until these
/// containers have ended.
const FORMER_PAUSES: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(5)];
/// How long a change of configuration or devices waits for kubelet, which normally answers within milliseconds. Without the wait, free
/// devices would be unhealthy until the answer. A slower answer is processed when it arrives.
const BRIEFLY: Duration = Duration::from_millis(250);

/// Kubelet's view of each resource, or why it is unavailable.
pub(super) type Looked = Result<BTreeMap<String, Shown>, String>;
/// The response channel of a Prepare.
pub(super) type Prepared = oneshot::Sender<Vec<Result<Vec<String>, CompanionError>>>;

/// A request that waits for a query.
#[derive(Debug)]
pub(super) enum Waiting {
    /// Claims for devices that containers could hold, and those of them that kubelet has unprepared in the meantime.
    Prepare {
        claims: Vec<ClaimToPrepare>,
        withdrawn: BTreeSet<String>,
        answer: Prepared,
    },
    /// An administrative request for the devices that containers hold.
    InContainers(oneshot::Sender<BTreeMap<String, String>>),
}

/// The query in progress.
#[derive(Debug, Default)]
pub(super) struct Looking {
    task: Option<JoinHandle<Looked>>,
    /// Whether another query must follow.
    again: bool,
    waiting: Vec<Waiting>,
    /// Requests that arrived after the query had begun.
    next: Vec<Waiting>,
}

impl Looking {
    pub(super) fn is_under_way(&self) -> bool {
        self.task.is_some()
    }

    /// Waits for the query to end; forever if there is none.
    pub(super) async fn done(&mut self) -> Looked {
        let Some(task) = &mut self.task else {
            return std::future::pending().await;
        };
        let looked = task.await.unwrap_or_else(|error| Err(error.to_string()));
        self.task = None;
        looked
    }

    /// Marks a waiting claim as withdrawn, because kubelet has called Unprepare for it.
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

impl<D: NodeDriver> NodeState<D> {
    /// The resources to query: those that are also offered to claims, and the withdrawn ones.
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

    /// Starts a query, or schedules another one after the query in progress.
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

    /// Queries kubelet and waits for the answer, for at most the given time: used before serving, and after a change.
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

    /// Queues a request for the next query to begin.
    pub(super) fn wait_for_look(&mut self, waiting: Waiting) {
        if self.looking.is_under_way() {
            self.looking.next.push(waiting);
        } else {
            self.looking.waiting.push(waiting);
            self.ask_kubelet();
        }
    }

    /// Processes the result of a query and serves the requests that waited for it.
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

    /// Updates the holders of devices that are offered through both APIs.
    fn see_both(&mut self, shown: &BTreeMap<String, Shown>) -> Result<(), String> {
        let names = self.names_of_both();
        if names.is_empty() && self.looking.waiting.is_empty() {
            // The query covered no resource with mode `both`, so there is no news about such devices.
            return Ok(());
        }
        let mut all = Shown::default();
        for name in &names {
            let Some(shown) = shown.get(name) else {
                // The resource was added during the query.
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
        self.conflicting.change().settle(&self.containers);
        Ok(())
    }

    /// Prepares claims and answers for each. `looked` is the result of the query that they waited for.
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
        // If the caller is gone, the work is still done; only the response is dropped.
        let _ = answer.send(answers);
    }

    /// Logs once why kubelet does not show its containers, and the effects.
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
