//! Rolls back recorded allocations when another claim of the pod cannot be recorded.
//!
//! No container can be using them. kubelet prepares nothing for a pod before all its claims are allocated and reserved for it
//! (`PrepareResources` in kubelet's `cm/dra/manager.go`), the scheduler does not bind such a pod, and one of this pod's claims was just
//! read without an allocation. One write removes the allocation and our own reservation; it is refused if the claim has changed since it
//! was read.

use std::sync::Arc;

use crate::api::resource::ResourceClaim;
use crate::core::claims::claim::ClaimState;
use crate::core::claims::event::{Answer, ClaimWrite, Moment, Outcome};
use crate::core::claims::state::{ControllerState, Work};

use super::{Consumer, Item, Stage, Step, Transaction, TransactionId};

impl ControllerState {
    /// Starts the rollback if it is safe, and returns whether it started. In this stage `Failed` marks a claim without an allocation, and
    /// `Done` a claim that keeps its allocation.
    pub(super) fn begin_to_undo(&mut self, id: TransactionId, transaction: &mut Transaction) -> bool {
        let Some(consumer) = &transaction.consumer else {
            return false;
        };
        let any_recorded = transaction.items.iter().any(|item| item.step == Step::Done);
        // If another writer has allocated the claim that we could not record, the pod may be starting with all its claims.
        let pod_cannot_run = transaction.items.iter().all(|item| {
            let known = self.claims.get(&item.key).filter(|known| known.uid() == item.uid);
            item.step == Step::Done || known.is_none_or(|known| !known.is_allocated())
        });
        if !any_recorded || !pod_cannot_run || !self.awaits_a_node(consumer) {
            return false;
        }
        transaction.stage = Stage::Undoing;
        for item in transaction
            .items
            .iter_mut()
            .filter(|item| item.step == Step::Done)
        {
            item.step = Step::Waiting;
            item.retry.succeeded();
        }
        self.work_queue.insert(Work::Transaction(id));
        true
    }

    /// Whether the pod still waits for a node. A pod whose user has set its node cannot go elsewhere, and the claim controller releases the
    /// claims of a pod that is being deleted.
    fn awaits_a_node(&self, consumer: &Consumer) -> bool {
        self.contexts.get(&consumer.context).is_some_and(|context| {
            context.uid() == consumer.context_uid && !context.is_deleting() && !context.pod_has_a_node()
        })
    }

    /// Whether the pod still lacks one of its claims. A write with an unknown outcome is repeated seconds later; meanwhile another driver
    /// may have allocated the missing claim, for example after its class changed.
    fn lacks_a_claim(&self, transaction: &Transaction) -> bool {
        transaction.items.iter().any(|item| {
            let known = self.claims.get(&item.key).filter(|known| known.uid() == item.uid);
            known.is_none_or(|known| !known.is_allocated())
        })
    }

    /// Returns whether the rollback is finished.
    pub(super) fn undo(&mut self, id: TransactionId, transaction: &mut Transaction, now: Moment) -> bool {
        let consumer = transaction.consumer.clone();
        let is_right = self.lacks_a_claim(transaction)
            && consumer
                .as_ref()
                .is_some_and(|consumer| self.awaits_a_node(consumer));
        for item in transaction
            .items
            .iter_mut()
            .filter(|item| item.step == Step::Waiting)
        {
            let known = self.claims.get(&item.key).filter(|known| known.uid() == item.uid);
            // A late allocation write must find the claim allocated: wait until none can be stored any more.
            if let Some(moment) = known.and_then(|known| known.unsettled_until(now)) {
                self.wake_at(moment, Work::Transaction(id));
                continue;
            }
            let write = known
                .filter(|_| is_right)
                .and_then(|known| undoing_write(known, item, consumer.as_ref()));
            match write {
                Some(write) => self.write_item(id, item, write, now),
                None => item.step = Step::Done,
            }
        }
        transaction
            .items
            .iter()
            .all(|item| matches!(item.step, Step::Done | Step::Failed))
    }

    /// Handles an answer for a claim that is being rolled back.
    pub(super) fn undo_answered(&mut self, item: &mut Item, answer: Answer, now: Moment) {
        match answer {
            Answer::ClaimWritten(Outcome::Done(_)) => {
                item.step = Step::Failed;
                self.statistics.deallocations += 1;
            }
            Answer::ClaimWritten(Outcome::Refused(message)) => {
                item.step = Step::ToRead;
                item.refusal = Some(message);
            }
            Answer::ClaimWritten(Outcome::Conflict(_)) => item.step = Step::ToRead,
            Answer::ClaimWritten(Outcome::Unknown(_)) => {
                item.step = Step::ToRead;
                if let Some(claim) = self
                    .claims
                    .get_mut(&item.key)
                    .filter(|known| known.uid() == item.uid)
                {
                    claim.mark_write_uncertain(now);
                    // If this write is stored later after all, the driver must deallocate.
                    claim.mark_uncertain();
                }
            }
            Answer::ClaimRead(Ok(object)) => self.undone_claim_read(item, object, now),
            Answer::ClaimRead(Err(_)) => {
                item.step = Step::ToRead;
                item.retry.failed(now);
            }
            _ => {}
        }
    }

    fn undone_claim_read(&mut self, item: &mut Item, object: Option<Arc<ResourceClaim>>, now: Moment) {
        item.retry.failed(now);
        let refused = item.refusal.take().is_some();
        let Some(object) = object.filter(|object| object.metadata.uid.as_deref() == Some(&item.uid)) else {
            self.claim_vanished(&item.key, &item.uid);
            item.step = Step::Failed;
            return;
        };
        let is_recorded = object.status.allocation.is_some() && object.status.allocation == item.allocation;
        self.see_written_claim(object, now);
        item.step = match (is_recorded, refused) {
            (true, false) => Step::Waiting,
            // The server refuses the rollback: the allocation stays. The scheduler requests its deallocation if the pod fits nowhere.
            (true, true) => Step::Done,
            (false, _) => Step::Failed,
        };
    }
}

/// The write that rolls back a claim. `None` if the claim must stay as it is: it also serves another pod, or it is being released anyway.
fn undoing_write(known: &ClaimState, item: &Item, consumer: Option<&Consumer>) -> Option<ClaimWrite> {
    let status = &known.object.status;
    let pod_uid = consumer.map(|consumer| consumer.pod_uid.as_str());
    let is_ours_alone = status.allocation == item.allocation
        && !known.is_asked_back()
        && status
            .reserved_for
            .iter()
            .all(|user| Some(user.uid.as_str()) == pod_uid);
    let version = known.object.metadata.resource_version.clone()?;
    is_ours_alone.then_some(ClaimWrite::UndoAllocation {
        version,
        reserved: !status.reserved_for.is_empty(),
    })
}
