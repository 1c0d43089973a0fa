//! Administrative requests to the state task: the check for orphaned claims, and a user's queries and manual releases.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::task::spawn_blocking;
use tracing::{info, warn};

use super::handle::{Failure, Request};
use super::pod_resources::Waiting;
use super::{DRIVER_TIMEOUT, NodeState};
use crate::core::prepare::claim_uid::ClaimUid;
use crate::core::prepare::kubelet_state::KubeletView;
use crate::core::prepare::orphans::{ApiView, Question, Verdict};
use crate::core::prepare::recovery::plan_explained;
use crate::core::prepare::release::{Holding, ReleaseRefusal, holdings, plan_free, plan_release};
use crate::node::driver::NodeDriver;
use crate::node::state::storage::StoreError;

/// A claim in quarantine, for the event and the inventory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::node) struct Quarantined {
    /// Description of the claim.
    pub(in crate::node) claim: String,
    /// The reason for the quarantine.
    pub(in crate::node) why: String,
}

/// The claims in quarantine.
pub(in crate::node) type Quarantine = BTreeMap<ClaimUid, Quarantined>;

/// The result of comparing the claims with kubelet's list.
#[derive(Debug, Default)]
pub(in crate::node) struct Look {
    /// The claims to look up at the API server.
    pub(in crate::node) questions: Vec<Question>,
    /// Time until the next check.
    pub(in crate::node) next: Duration,
}

/// The result of a check.
#[derive(Debug, Default)]
pub(in crate::node) struct Judged {
    /// The claims in quarantine.
    pub(in crate::node) quarantine: Quarantine,
    /// Time until the next check, if a decision is pending.
    pub(in crate::node) again: Option<Duration>,
}

#[derive(Debug)]
pub(in crate::node) enum RecordsRequest {
    Look(Duration, oneshot::Sender<Look>),
    Judge(Duration, BTreeMap<ClaimUid, ApiView>, oneshot::Sender<Judged>),
    Holdings(oneshot::Sender<Vec<Holding>>),
    InContainers(oneshot::Sender<BTreeMap<String, String>>),
    Release(String, bool, oneshot::Sender<Result<Holding, ReleaseError>>),
}

/// Why a claim was not released.
#[derive(Debug, thiserror::Error)]
pub enum ReleaseError {
    /// The release is refused.
    #[error(transparent)]
    Refused(#[from] ReleaseRefusal),
    /// The change cannot be stored.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The driver has not undone its work for the claim.
    #[error(
        "nothing was released, because the driver has not undone what it did for the claim: {problem}. See to the device or the driver, and ask again"
    )]
    NotUndone {
        /// CamelCase reason from a small fixed set.
        reason: &'static str,
        /// The driver's error.
        problem: String,
    },
    /// The companion is shutting down.
    #[error("the companion is stopping: ask again")]
    Stopping,
}

impl From<Failure> for ReleaseError {
    fn from(failure: Failure) -> Self {
        let reason = failure.reason();
        match failure {
            Failure::Store(error) => Self::Store(error),
            Failure::Stopping => Self::Stopping,
            Failure::Slow { .. } => Self::NotUndone {
                reason,
                problem: format!("it took more than {} s", DRIVER_TIMEOUT.as_secs()),
            },
            Failure::Driver(_) | Failure::Refused(_) => Self::NotUndone {
                reason,
                problem: failure.to_string(),
            },
        }
    }
}

/// A handle to the state task for administrative requests.
#[derive(Clone, Debug)]
pub struct RecordsHandle {
    pub(super) requests: mpsc::Sender<Request>,
    pub(super) held: watch::Receiver<usize>,
    pub(super) look_due: Arc<Notify>,
}

impl RecordsHandle {
    /// Lists the prepared claims. `None` if the state task has ended.
    pub async fn holdings(&self) -> Option<Vec<Holding>> {
        self.ask(RecordsRequest::Holdings).await
    }

    /// Lists the devices of mode `both` that containers hold as extended resources, each with a description of its container, after a query
    /// of kubelet. `None` if the state task has ended.
    pub async fn in_containers(&self) -> Option<BTreeMap<String, String>> {
        self.ask(RecordsRequest::InContainers).await
    }

    /// Releases a claim manually and returns its record.
    pub async fn release(&self, uid: String, force: bool) -> Result<Holding, ReleaseError> {
        let answer = self
            .ask(|sender| RecordsRequest::Release(uid, force, sender))
            .await;
        answer.unwrap_or(Err(ReleaseError::Stopping))
    }

    /// Compares the prepared claims with kubelet's list. `now` is the time since any fixed moment.
    pub(in crate::node) async fn look(&self, now: Duration) -> Option<Look> {
        self.ask(|sender| RecordsRequest::Look(now, sender)).await
    }

    /// Decides from the API server's answers, and returns the resulting quarantine.
    pub(in crate::node) async fn judge(
        &self,
        now: Duration,
        answers: BTreeMap<ClaimUid, ApiView>,
    ) -> Option<Judged> {
        self.ask(|sender| RecordsRequest::Judge(now, answers, sender))
            .await
    }

    /// The number of prepared claims, updated on each change.
    pub(in crate::node) fn held(&self) -> watch::Receiver<usize> {
        self.held.clone()
    }

    /// Waits until a claim must be checked.
    pub(in crate::node) async fn look_due(&self) {
        self.look_due.notified().await;
    }

    async fn ask<T>(&self, request: impl FnOnce(oneshot::Sender<T>) -> RecordsRequest) -> Option<T> {
        let (sender, answer) = oneshot::channel();
        self.requests.send(Request::Records(request(sender))).await.ok()?;
        answer.await.ok()
    }
}

impl<D: NodeDriver> NodeState<D> {
    pub(super) async fn records(&mut self, request: RecordsRequest) {
        match request {
            RecordsRequest::Look(now, answer) => {
                // No Prepare is running, so every unfinished attempt has failed, and its rollback as well.
                self.clear(&BTreeSet::new()).await;
                let kubelet = self.kubelet().await;
                let questions = self.orphans.change().look(&self.prepared_claims, &kubelet, now);
                let next = self.orphans.next_look(now);
                let _ = answer.send(Look { questions, next });
            }
            RecordsRequest::Judge(now, answers, answer) => {
                let again = self.ask_witness(&answers).await;
                self.judge(now, &answers).await;
                if again.is_none() {
                    self.decided.send_modify(|count| *count = count.wrapping_add(1));
                }
                let quarantine = self.quarantine();
                let _ = answer.send(Judged { quarantine, again });
            }
            RecordsRequest::Holdings(answer) => {
                let _ = answer.send(holdings(&self.prepared_claims, &self.orphans.quarantine()));
            }
            RecordsRequest::InContainers(answer) => {
                if self.has_both() {
                    self.wait_for_look(Waiting::InContainers(answer));
                } else {
                    let _ = answer.send(BTreeMap::new());
                }
            }
            RecordsRequest::Release(uid, force, answer) => {
                let _ = answer.send(self.release(&uid, force).await);
            }
        }
    }

    async fn judge(&mut self, now: Duration, answers: &BTreeMap<ClaimUid, ApiView>) {
        // The list is read again after the API server's answers: a freed claim must still be missing at the end of the wait.
        let kubelet = self.kubelet().await;
        for verdict in self
            .orphans
            .change()
            .judge(&self.prepared_claims, &kubelet, answers, now)
        {
            let (uid, steps) = match verdict {
                Verdict::Free(uid) => {
                    info!(claim_uid = %uid, reason = "OrphanFreed", "the API server no longer knows the claim as a holder, and kubelet or the container runtime shows that no container has its devices: they are free");
                    let steps = plan_free(&uid);
                    (uid, steps)
                }
                Verdict::Explain(uid, devices) => {
                    info!(claim_uid = %uid, ?devices, reason = "HoldingExplained", "the API server tells which devices the claim has");
                    let steps = plan_explained(&self.prepared_claims, &self.inventory, &uid, &devices);
                    (uid, steps)
                }
            };
            if let Err(failure) = self.carry_out(&steps).await {
                warn!(claim_uid = %uid, reason = failure.reason(), "not done yet, it is tried again: {failure}");
                self.try_later(&uid);
            }
        }
    }

    async fn release(&mut self, uid: &str, force: bool) -> Result<Holding, ReleaseError> {
        let kubelet = self.kubelet().await;
        let before = holdings(&self.prepared_claims, &self.orphans.quarantine());
        let (uid, steps) = plan_release(&self.prepared_claims, &kubelet, uid, force)?;
        if let Err(failure) = self.carry_out(&steps).await {
            warn!(claim_uid = %uid, reason = failure.reason(), force, "not released, though a person asks: {failure}");
            // The claim is still held, so containers can still use it.
            self.try_later(&uid);
            return Err(failure.into());
        }
        self.orphans.change().forget(&uid);
        let held = before.into_iter().find(|holding| holding.uid == uid.as_str());
        let held = held.unwrap_or_default();
        warn!(claim_uid = %uid, devices = ?held.devices, force, reason = "Released", "a person has released what the claim held");
        Ok(held)
    }

    fn quarantine(&self) -> Quarantine {
        let describe = |(uid, why): (ClaimUid, String)| {
            let claim = self.prepared_claims.entry(&uid)?.describe(&uid);
            Some((uid, Quarantined { claim, why }))
        };
        self.orphans
            .quarantine()
            .into_iter()
            .filter_map(describe)
            .collect()
    }

    async fn kubelet(&self) -> KubeletView {
        let places = self.places.clone();
        spawn_blocking(move || places.kubelet())
            .await
            .unwrap_or_else(|error| KubeletView::Unknown(error.to_string()))
    }
}
