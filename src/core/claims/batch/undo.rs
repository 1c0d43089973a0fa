//! Undoing: a claim of the pod can finally not be recorded, so those that are recorded already are taken back.
//!
//! Nobody can be using them. kubelet prepares nothing for a pod before all its claims are allocated and reserved for it (`PrepareResources`
//! in kubelet's `cm/dra/manager.go`), and the scheduler binds none before; and one of this pod's was just read without an
//! allocation. Allocation and our own reservation go in one write, which is refused if the claim is not the one that was seen.

use std::sync::Arc;

use crate::api::resource::ResourceClaim;
use crate::core::claims::claim::ClaimState;
use crate::core::claims::event::{Answer, ClaimWrite, Moment, Outcome};
use crate::core::claims::world::{Work, World};

use super::{Batch, BatchId, Consumer, Item, Stage, Step};

impl World {
    /// Begins to take back what is recorded, if that is right. In this stage `Failed` is a claim that records nothing, and `Done`
    /// one that keeps what it records.
    pub(super) fn begin_to_undo(&mut self, id: BatchId, batch: &mut Batch) -> bool {
        let Some(consumer) = &batch.consumer else {
            return false;
        };
        let any_recorded = batch.items.iter().any(|item| item.step == Step::Done);
        // If somebody else has allocated the claim that we could not, the pod may be on its way with all its claims.
        let pod_cannot_run = batch.items.iter().all(|item| {
            let known = self.claims.get(&item.key).filter(|known| known.uid() == item.uid);
            item.step == Step::Done || known.is_none_or(|known| !known.is_allocated())
        });
        if !any_recorded || !pod_cannot_run || !self.awaits_a_node(consumer) {
            return false;
        }
        batch.stage = Stage::Undoing;
        for item in batch.items.iter_mut().filter(|item| item.step == Step::Done) {
            item.step = Step::Waiting;
            item.retry.succeeded();
        }
        self.dirty.insert(Work::Batch(id));
        true
    }

    /// Whether the pod still looks for a node. One that was given its node by its user cannot go elsewhere, and of one that is
    /// going the claim controller takes everything back.
    fn awaits_a_node(&self, consumer: &Consumer) -> bool {
        self.contexts.get(&consumer.context).is_some_and(|context| {
            context.uid() == consumer.context_uid && !context.is_deleting() && !context.pod_has_a_node()
        })
    }

    /// Whether the pod still lacks one of its claims. A write without a clear answer is repeated after seconds, and meanwhile another
    /// driver may have allocated what we could not, as after a change of its class.
    fn lacks_a_claim(&self, batch: &Batch) -> bool {
        batch.items.iter().any(|item| {
            let known = self.claims.get(&item.key).filter(|known| known.uid() == item.uid);
            known.is_none_or(|known| !known.is_allocated())
        })
    }

    /// The answer is whether the stage is over.
    pub(super) fn undo(&mut self, id: BatchId, batch: &mut Batch, now: Moment) -> bool {
        let consumer = batch.consumer.clone();
        let is_right = self.lacks_a_claim(batch)
            && consumer
                .as_ref()
                .is_some_and(|consumer| self.awaits_a_node(consumer));
        for item in batch.items.iter_mut().filter(|item| item.step == Step::Waiting) {
            let known = self.claims.get(&item.key).filter(|known| known.uid() == item.uid);
            // An allocation that is stored late must find the one before it.
            if let Some(moment) = known.and_then(|known| known.unsettled_until(now)) {
                self.wake_at(moment, Work::Batch(id));
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
        batch
            .items
            .iter()
            .all(|item| matches!(item.step, Step::Done | Step::Failed))
    }

    /// An answer for a claim that is being taken back.
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
                    claim.unsettle(now);
                    // Should the write be stored after all when it no longer counts, the driver is asked to give back.
                    claim.mistrust();
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
            // What the server refuses stays as it is; the scheduler asks for its return when the pod fits nowhere.
            (true, true) => Step::Done,
            (false, _) => Step::Failed,
        };
    }
}

/// The write that takes a claim back, unless it must stay: it serves another pod as well, or it is going anyway.
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
