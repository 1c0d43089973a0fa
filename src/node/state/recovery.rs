//! Recovery after a start, a failed step or a device change.

use std::collections::BTreeSet;

use tracing::{debug, error, info, warn};

use super::NodeState;
use crate::core::prepare::claim_uid::ClaimUid;
use crate::core::prepare::recovery::{
    plan_clearing, plan_refresh, plan_restoring, plan_restoring_one, plan_undo,
};
use crate::core::prepare::retries::Missing;
use crate::core::prepare::step::Step;
use crate::node::driver::NodeDriver;

impl<D: NodeDriver> NodeState<D> {
    pub(super) async fn undo(&mut self, uid: &ClaimUid) {
        self.try_later(uid);
        let steps = plan_undo(&self.prepared_claims, uid);
        if let Err(failure) = self.carry_out(&steps).await {
            warn!(claim_uid = %uid, reason = failure.reason(), "cannot be undone now, and is later: {failure}");
        }
    }

    pub(super) async fn recover(&mut self, files: &BTreeSet<ClaimUid>) {
        self.clear(files).await;
        let plans = plan_restoring(&self.prepared_claims);
        self.carry_out_each(plans).await;
        if let Err(failure) = self.carry_out(&[Step::Save(Vec::new())]).await {
            error!(
                reason = failure.reason(),
                "what was restored cannot be stored now: {failure}"
            );
        }
        info!(
            claims = self.prepared_claims.entries().len(),
            "the ledger is complete"
        );
    }

    /// Cleans up after failed attempts of this or an earlier process.
    pub(super) async fn clear(&mut self, files: &BTreeSet<ClaimUid>) {
        for steps in plan_clearing(&self.prepared_claims, files) {
            if let Err(failure) = self.carry_out(&steps).await {
                error!(
                    reason = failure.reason(),
                    "what an earlier attempt left cannot be cleared away now: {failure}"
                );
            }
        }
    }

    /// Processes a change of the found devices. No CDI file may refer to a node that now belongs to another device.
    pub(super) async fn refresh(&mut self) {
        let before = self.inventory.clone();
        let found = self.found.borrow_and_update().clone();
        self.leave_resources(&found);
        self.devices = found;
        self.ask_kubelet_for_a_change().await;
        self.take_stock();
        let plans = plan_refresh(&self.prepared_claims, &before, &self.inventory);
        self.carry_out_each(plans).await;
        self.refresh_named_devices().await;
    }

    async fn carry_out_each(&mut self, plans: Vec<(ClaimUid, Vec<Step>)>) {
        for (uid, steps) in plans {
            if let Err(failure) = self.carry_out(&steps).await {
                let reason = failure.reason();
                warn!(claim_uid = %uid, reason, "containers of this claim cannot be started now, it is tried again: {failure}");
                self.undo(&uid).await;
            } else {
                self.retries.done(&Missing::OfClaim(uid));
            }
        }
    }

    /// Schedules the CDI file of a claim for a retry, if containers use the claim: kubelet may not call Prepare again.
    pub(super) fn try_later(&mut self, uid: &ClaimUid) {
        if plan_restoring_one(&self.prepared_claims, uid).is_some() {
            self.retries
                .failed(Missing::OfClaim(uid.clone()), self.since.elapsed());
        }
    }

    /// Retries the CDI files whose writing failed.
    pub(super) async fn try_again(&mut self) {
        for missing in self.retries.due(self.since.elapsed()) {
            let uid = match &missing {
                Missing::OfDevices => {
                    self.refresh_named_devices().await;
                    continue;
                }
                Missing::OfClaim(uid) => uid.clone(),
            };
            let Some(steps) = plan_restoring_one(&self.prepared_claims, &uid) else {
                self.retries.done(&missing);
                continue;
            };
            match self.carry_out(&steps).await {
                Ok(()) => {
                    self.retries.done(&missing);
                    info!(claim_uid = %uid, "containers of this claim can be started again");
                }
                Err(failure) => {
                    let reason = failure.reason();
                    debug!(claim_uid = %uid, reason, "containers of this claim still cannot be started: {failure}");
                    self.undo(&uid).await;
                }
            }
        }
    }
}
