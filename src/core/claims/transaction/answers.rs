//! Handles the answers to a transaction's calls and writes, and ends the transaction.

use crate::api::resource::{AllocationResult, ResourceClaim};
use crate::core::claims::claim::ClaimPhase;
use crate::core::claims::event::{Answer, CallError, CallErrorKind, Moment, ObjectKey, Outcome, Subject};
use crate::core::claims::retry::WRITES_BEFORE_REPORT;
use crate::core::claims::state::{ControllerState, Work};

use super::{Failure, Item, Stage, Step, Transaction, TransactionId, misbehaved};

impl ControllerState {
    /// Handles the driver's answer for the whole transaction.
    pub(in crate::core::claims) fn transaction_answered(&mut self, id: TransactionId, answer: Answer) {
        let Some(mut transaction) = self.transactions.remove(&id) else {
            return;
        };
        if let Answer::Allocated(result) = answer
            && transaction.stage == Stage::Allocating
        {
            self.allocated(id, &mut transaction, result);
        }
        self.transactions.insert(id, transaction);
        self.work_queue.insert(Work::Transaction(id));
    }

    pub(super) fn allocated(
        &mut self,
        id: TransactionId,
        transaction: &mut Transaction,
        result: Result<Vec<Result<AllocationResult, CallError>>, CallError>,
    ) {
        let count = transaction.items.len();
        let results = match result {
            Ok(results) if results.len() == count => results,
            Ok(results) => {
                let message = format!("the driver answered for {} of {count} claims", results.len());
                transaction.failure = Some(misbehaved(message));
                self.begin_to_give_back(id, transaction, |_| true);
                return;
            }
            Err(error) => {
                transaction.failure = Some(Failure::Driver(error));
                self.begin_to_give_back(id, transaction, |_| true);
                return;
            }
        };
        for (item, result) in transaction.items.iter_mut().zip(results) {
            match result {
                Ok(allocation) => {
                    // Check before the first write: a claim that the server refuses would leave the others allocated in vain.
                    if let Err(message) = allocation.check() {
                        let message = format!("the driver's allocation for claim {}: {message}", item.key);
                        transaction.failure.get_or_insert_with(|| misbehaved(message));
                    }
                    item.allocation = Some(allocation);
                }
                Err(error) => {
                    transaction.failure.get_or_insert(Failure::Driver(error));
                }
            }
        }
        if transaction.failure.is_none() && !self.is_wanted(transaction) {
            transaction.failure = Some(Failure::Withdrawn);
        }
        if transaction.failure.is_some() {
            self.begin_to_give_back(id, transaction, |item| item.allocation.is_some());
        } else {
            transaction.restart_items(Stage::Recording);
        }
    }

    /// Handles an answer for one claim of a transaction.
    pub(in crate::core::claims) fn item_answered(
        &mut self,
        id: TransactionId,
        uid: &str,
        answer: Answer,
        now: Moment,
    ) {
        let Some(mut transaction) = self.transactions.remove(&id) else {
            return;
        };
        let stage = transaction.stage;
        let (mut refused, mut unclear) = (None, None);
        let item = transaction.items.iter_mut().find(|item| item.uid == uid);
        if let Some(item) = item {
            match answer {
                answer if stage == Stage::Undoing => self.undo_answered(item, answer, now),
                Answer::ClaimWritten(Outcome::Done(_)) => item.step = Step::Done,
                Answer::Deallocated(Ok(())) => {
                    item.step = Step::Done;
                    if let Some(claim) = self.claims.get_mut(&item.key).filter(|claim| claim.uid() == uid) {
                        claim.clear_uncertain();
                    }
                }
                Answer::ClaimWritten(Outcome::Refused(message)) => {
                    item.step = Step::ToRead;
                    item.refusal = Some(message);
                }
                Answer::ClaimWritten(Outcome::Conflict(_)) => item.step = Step::ToRead,
                Answer::ClaimWritten(Outcome::Unknown(message)) => {
                    item.step = Step::ToRead;
                    item.unclear += 1;
                    if item.unclear > WRITES_BEFORE_REPORT {
                        unclear = Some((item.key.clone(), message));
                    }
                    let is_allocation = stage == Stage::Recording;
                    item.may_be_recorded |= is_allocation;
                    if let Some(claim) = self.claims.get_mut(&item.key).filter(|claim| claim.uid() == uid) {
                        if is_allocation {
                            claim.unsettle_allocation(item.needed_version.take(), now);
                        } else {
                            claim.mark_write_uncertain(now);
                        }
                    }
                }
                Answer::ClaimRead(Err(_)) => {
                    item.step = Step::ToRead;
                    item.retry.failed(now);
                }
                Answer::ClaimRead(Ok(object)) => {
                    let object = object.filter(|object| object.metadata.uid.as_deref() == Some(uid));
                    match &object {
                        Some(object) => self.see_written_claim(object.clone(), now),
                        None => self.claim_vanished(&item.key, uid),
                    }
                    item.step = self.step_after_read(stage, item, object.as_deref());
                    item.retry.failed(now);
                    // After two writes with an unknown outcome, the other one may still be stored.
                    if item.step == Step::Done
                        && item.unclear < 2
                        && let Some(claim) = self.claims.get_mut(&item.key).filter(|claim| claim.uid() == uid)
                    {
                        claim.settle();
                    }
                    let refusal = item.refusal.take();
                    if item.step == Step::Waiting && refusal.is_some() {
                        item.step = Step::Failed;
                    }
                    if item.step == Step::Failed {
                        if let Some(claim) = self.claims.get_mut(&item.key).filter(|claim| claim.uid() == uid)
                            && stage == Stage::Recording
                        {
                            claim.allocation_refused = true;
                        }
                        let by_others = || "it has been deleted or allocated by somebody else".to_owned();
                        refused = Some(refusal.unwrap_or_else(by_others));
                    }
                }
                Answer::Deallocated(Err(_)) => {
                    item.step = Step::Waiting;
                    item.retry.failed(now);
                }
                Answer::PodRead(_) | Answer::ContextWritten(_) | Answer::Judged(_) | Answer::Allocated(_) => {
                }
            }
            if stage == Stage::Recording && item.step == Step::Done {
                let known = self.claims.get_mut(&item.key);
                if let Some(known) = known.filter(|known| known.uid() == uid && !known.is_gone()) {
                    known.allocation_refused = false;
                    self.statistics.allocations += 1;
                } else {
                    // The driver learned that the claim is gone before it could learn of the recorded allocation: deallocate.
                    item.step = Step::Failed;
                    refused = Some("it is gone".to_owned());
                }
            }
        }
        if let Some(message) = refused {
            transaction.failure.get_or_insert(Failure::Refused(message));
        }
        if let Some((key, message)) = unclear {
            self.report_unclear(&transaction, &key, &message);
        }
        self.transactions.insert(id, transaction);
        self.work_queue.insert(Work::Transaction(id));
    }

    /// Reports a write that keeps failing without being refused.
    fn report_unclear(&mut self, transaction: &Transaction, key: &ObjectKey, message: &str) {
        if !self.is_wanted(transaction) {
            return;
        }
        let message = format!("the allocation could not be recorded yet: {message}");
        match &transaction.consumer {
            Some(consumer) => self.report_pod(&consumer.context, "AllocationNotRecorded", message),
            None => self.report_claim(key, "AllocationNotRecorded", message),
        };
    }

    pub(super) fn step_after_read(&self, stage: Stage, item: &Item, object: Option<&ResourceClaim>) -> Step {
        if stage == Stage::GivingBack {
            return Step::Waiting;
        }
        let Some(object) = object else { return Step::Failed };
        match (stage, &object.status.allocation) {
            (Stage::Recording, Some(allocation)) => {
                let ours = object.status.driver_name.as_deref() == Some(&self.settings.driver_name)
                    && Some(allocation) == item.allocation.as_ref();
                if ours { Step::Done } else { Step::Failed }
            }
            // The server stores no allocation in a claim that is being deleted.
            (Stage::Recording, None) if object.metadata.deletion_timestamp.is_some() => Step::Failed,
            _ => Step::Waiting,
        }
    }

    pub(super) fn end_transaction(&mut self, transaction: &Transaction, now: Moment) {
        // A refusal for a deleted claim needs no report: the allocation is no longer wanted.
        let deleted = transaction.items.iter().any(|item| {
            let claim = self.claims.get(&item.key);
            claim.is_none_or(|claim| claim.uid() != item.uid || claim.is_deleting())
        });
        let failure = match &transaction.failure {
            Some(Failure::Refused(_)) if deleted => Some(&Failure::Withdrawn),
            other => other.as_ref(),
        };
        self.statistics.attempted(failure);
        for item in &transaction.items {
            if let Some(claim) = self
                .claims
                .get_mut(&item.key)
                .filter(|claim| claim.uid() == item.uid)
            {
                claim.stage = ClaimPhase::Resting;
                self.work_queue.insert(Work::Claim(item.key.clone()));
                self.touch_users(&item.key);
            }
        }
        match &transaction.consumer {
            Some(consumer) => {
                self.context_transaction_ended(consumer, transaction.node.as_deref(), failure, now);
            }
            None => {
                for item in &transaction.items {
                    self.immediate_ended(item, transaction.asked, failure, now);
                }
            }
        }
    }

    pub(super) fn immediate_ended(
        &mut self,
        item: &Item,
        asked: u64,
        failure: Option<&Failure>,
        now: Moment,
    ) {
        let capacity_generation = self.capacity_generation;
        let (key, class_name) = (&item.key, &item.claim.spec.resource_class_name);
        // A change since the driver was called may have removed the cause.
        let changed = asked < capacity_generation || self.classes.get(class_name) != Some(&item.class);
        let Some(claim) = self.claims.get_mut(key).filter(|claim| claim.uid() == item.uid) else {
            return;
        };
        match failure {
            None => {
                claim.retry.succeeded();
                claim.reported = None;
            }
            Some(Failure::Withdrawn) => {}
            Some(Failure::Refused(message)) => {
                claim.retry.failed(now);
                let message = format!("the allocation could not be recorded: {message}");
                self.report_claim(key, "AllocationNotRecorded", message);
            }
            Some(Failure::Driver(error)) => {
                if error.kind == CallErrorKind::Invalid && !changed {
                    claim.refused_at = Some(capacity_generation);
                } else {
                    claim.retry.failed(now);
                }
                let (reason, message) = (error.reason, error.message.clone());
                let is_new = self.report_claim(key, reason, message.clone());
                if let Subject::Class(name) = &error.subject
                    && is_new
                {
                    self.report_class(name, reason, message);
                }
            }
        }
    }
}
