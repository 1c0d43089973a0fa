//! An allocation transaction: allocates all claims of a transaction or none.
//!
//! Finalizers are added first, then the driver allocates, then each claim gets one status write. A transaction outlives its context and its
//! claims: each allocation of the driver is either recorded in its claim or deallocated, even if objects are deleted meanwhile. If one
//! claim cannot be recorded, the allocations already recorded are rolled back.

mod answers;
mod undo;

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::api::resource::label::{LABEL_OF_ANY_NODE, label_of_node};
use crate::api::resource::{AllocationResult, ResourceClaim, ResourceClaimConsumerReference, ResourceClass};

use super::claim::{ClaimPhase, ClaimState};
use super::event::{
    CallError, CallErrorKind, ClaimToAllocate, ClaimWrite, Command, DriverRequest, Moment, ObjectKey, Subject,
};
use super::retry::Retry;
use super::state::{ControllerState, PendingCall, Work};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct TransactionId(u64);

/// The pod that a transaction is allocated for, and its PodSchedulingContext.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Consumer {
    pub(super) context: ObjectKey,
    pub(super) context_uid: String,
    /// Uid of the pod. Pod and context have the same name.
    pub(super) pod_uid: String,
}

/// Phases of a transaction. The last two follow a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Adding our finalizer and the node label to each claim.
    Securing,
    /// Waiting for the driver's allocations.
    Allocating,
    /// Writing each claim's allocation.
    Recording,
    /// Rolling back recorded allocations because one claim could not be recorded.
    Undoing,
    /// Waiting for the driver to deallocate the claims that are not recorded.
    GivingBack,
}

/// Progress of one claim within the stage of its transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Not started, or due for a retry.
    Waiting,
    InFlight,
    /// The last write was refused or had an unknown outcome: read the claim before anything else.
    ToRead,
    Done,
    /// Cannot succeed in this stage.
    Failed,
}

#[derive(Clone, Debug)]
struct Item {
    key: ObjectKey,
    uid: String,
    pod_claim_name: String,
    claim: Arc<ResourceClaim>,
    class: Arc<ResourceClass>,
    allocation: Option<AllocationResult>,
    step: Step,
    /// Why the last write was refused. An earlier write with an unknown outcome may still have been stored.
    refusal: Option<String>,
    /// Number of writes with an unknown outcome.
    unclear: u32,
    /// Set when an allocation write had an unknown outcome. Cleared when that write can no longer be stored and the claim is read again.
    may_be_recorded: bool,
    /// The resource version that the last allocation write requires.
    needed_version: Option<String>,
    /// Its allocation was refused in an earlier transaction, so it is recorded before the other claims.
    goes_first: bool,
    retry: Retry,
}

/// Why a transaction failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// The driver returned an error or an unusable answer.
    Driver(CallError),
    /// The API server refused a write, or the claim is gone or was allocated by another writer.
    Refused(String),
    /// The transaction is no longer wanted: the node, the pod or a claim has changed.
    Withdrawn,
}

#[derive(Clone, Debug)]
pub(super) struct Transaction {
    consumer: Option<Consumer>,
    node: Option<String>,
    stage: Stage,
    items: Vec<Item>,
    failure: Option<Failure>,
    /// `ControllerState::capacity_generation` at the start: the driver's answer may predate later changes.
    asked: u64,
}

impl Transaction {
    fn restart_items(&mut self, stage: Stage) {
        self.stage = stage;
        for item in &mut self.items {
            item.step = Step::Waiting;
            item.retry.succeeded();
        }
    }
}

impl ControllerState {
    /// Starts to allocate `claims` (pod claim name, key) on `node`, or on any node if `None`. All claims must be `Resting`.
    pub(super) fn start_transaction(
        &mut self,
        consumer: Option<Consumer>,
        node: Option<String>,
        claims: &[(String, ObjectKey)],
    ) -> Option<TransactionId> {
        let id = TransactionId(self.next_number());
        let mut items: Vec<Item> = Vec::new();
        let mut uids = BTreeSet::new();
        for (pod_claim_name, key) in claims {
            let claim = self.claims.get_mut(key)?;
            let class = self.classes.get(&claim.object.spec.resource_class_name)?.clone();
            // A pod may name one claim twice.
            if !uids.insert(claim.uid().to_owned()) {
                continue;
            }
            claim.stage = ClaimPhase::InBatch(id);
            claim.finalizer_to_go = false;
            claim.forget_problems();
            items.push(Item {
                key: key.clone(),
                uid: claim.uid().to_owned(),
                pod_claim_name: pod_claim_name.clone(),
                claim: claim.object.clone(),
                class,
                allocation: None,
                step: Step::Waiting,
                refusal: None,
                unclear: 0,
                may_be_recorded: false,
                needed_version: None,
                goes_first: claim.allocation_refused,
                retry: Retry::default(),
            });
        }
        self.transactions.insert(
            id,
            Transaction {
                consumer,
                node,
                stage: Stage::Securing,
                items,
                failure: None,
                asked: self.capacity_generation,
            },
        );
        self.work_queue.insert(Work::Transaction(id));
        Some(id)
    }

    /// Advances a transaction, and ends it when it is finished.
    pub(super) fn step_transaction(&mut self, id: TransactionId, now: Moment) {
        let Some(mut transaction) = self.transactions.remove(&id) else {
            return;
        };
        self.refresh(&mut transaction);
        self.read_unclear(id, &mut transaction, now);
        let over = match transaction.stage {
            Stage::Securing => self.secure(id, &mut transaction, now),
            Stage::Allocating => false,
            Stage::Recording => self.record(id, &mut transaction, now),
            Stage::Undoing => {
                if self.undo(id, &mut transaction, now) {
                    self.begin_to_give_back(id, &mut transaction, |item| item.step == Step::Failed);
                }
                false
            }
            Stage::GivingBack => self.give_back(id, &mut transaction, now),
        };
        if over {
            self.end_transaction(&transaction, now);
        } else {
            self.transactions.insert(id, transaction);
        }
    }

    /// Updates each item to the latest known claim.
    fn refresh(&self, transaction: &mut Transaction) {
        for item in &mut transaction.items {
            if let Some(known) = self.claims.get(&item.key).filter(|known| known.uid() == item.uid) {
                item.claim = known.object.clone();
            }
        }
    }

    /// Reads each claim whose last write was not confirmed.
    fn read_unclear(&mut self, id: TransactionId, transaction: &mut Transaction, now: Moment) {
        for item in transaction
            .items
            .iter_mut()
            .filter(|item| item.step == Step::ToRead)
        {
            if let Some(moment) = item.retry.wait_until(now) {
                self.wake_at(moment, Work::Transaction(id));
                continue;
            }
            item.step = Step::InFlight;
            let (key, uid) = (item.key.clone(), item.uid.clone());
            self.send(PendingCall::Item { transaction: id, uid }, |id| {
                Command::ReadClaim { id, key }
            });
        }
    }

    /// Whether the transaction is still wanted: the context still selects its node, and no claim is gone, being deleted or allocated.
    fn is_wanted(&self, transaction: &Transaction) -> bool {
        let context_stands = transaction.consumer.as_ref().is_none_or(|consumer| {
            self.contexts.get(&consumer.context).is_some_and(|context| {
                context.uid() == consumer.context_uid
                    && !context.is_deleting()
                    && Some(&context.object.spec.selected_node) == transaction.node.as_ref()
            })
        });
        context_stands
            && transaction.items.iter().all(|item| {
                self.claims.get(&item.key).is_some_and(|claim| {
                    claim.uid() == item.uid && !claim.is_deleting() && !claim.is_allocated()
                })
            })
    }

    /// Returns whether the transaction is over.
    fn secure(&mut self, id: TransactionId, transaction: &mut Transaction, now: Moment) -> bool {
        let wanted = self.is_wanted(transaction);
        let label = self.settings.node_label();
        let node = transaction
            .node
            .as_deref()
            .map_or_else(|| LABEL_OF_ANY_NODE.to_owned(), label_of_node);
        let is_secured = |known: &ClaimState| {
            let labels = known.object.metadata.labels.as_ref();
            known.has_finalizer() && labels.and_then(|labels| labels.get(&label)) == Some(&node)
        };
        for item in &mut transaction.items {
            let known = self.claims.get(&item.key).filter(|known| known.uid() == item.uid);
            if item.step == Step::Waiting && known.is_some_and(|known| is_secured(known)) {
                item.step = Step::Done;
            }
            if item.step == Step::Waiting && wanted && transaction.failure.is_none() {
                self.write_item(id, item, ClaimWrite::AddFinalizer { node: node.clone() }, now);
            }
        }
        if transaction
            .items
            .iter()
            .any(|item| matches!(item.step, Step::InFlight | Step::ToRead))
        {
            return false;
        }
        if !wanted {
            transaction.failure.get_or_insert(Failure::Withdrawn);
        }
        if transaction.failure.is_some() {
            return true;
        }
        if transaction.items.iter().all(|item| item.step == Step::Done) {
            transaction.stage = Stage::Allocating;
            let claims = transaction.items.iter().map(Item::to_allocate).collect();
            let node = transaction.node.clone();
            self.send(PendingCall::Transaction { transaction: id }, |id| {
                Command::CallDriver {
                    id,
                    request: DriverRequest::Allocate { claims, node },
                }
            });
        }
        false
    }

    fn record(&mut self, id: TransactionId, transaction: &mut Transaction, now: Moment) -> bool {
        let reserved_for = transaction
            .consumer
            .as_ref()
            .filter(|_| self.settings.reserve_for_pod)
            .map(|consumer| ResourceClaimConsumerReference::pod(&consumer.context.name, &consumer.pod_uid));
        let is_open = |item: &Item| !matches!(item.step, Step::Done | Step::Failed);
        let hopeless = transaction
            .items
            .iter()
            .any(|item| item.goes_first && item.step == Step::Failed);
        // If a `goes_first` claim has failed, nothing more is recorded, so no claim waits for the others that go first.
        let first_only = !hopeless
            && transaction
                .items
                .iter()
                .any(|item| item.goes_first && is_open(item));
        for item in &mut transaction.items {
            if item.step != Step::Waiting || (first_only && !item.goes_first) {
                continue;
            }
            match item.allocation.clone() {
                Some(allocation) if !hopeless => {
                    // After an allocation write with an unknown outcome, the retry requires the version last seen: it fails if the claim
                    // has changed.
                    let seen = item.claim.metadata.resource_version.clone();
                    item.needed_version = seen.filter(|_| item.may_be_recorded);
                    let write = ClaimWrite::Allocate {
                        allocation,
                        reserved_for: reserved_for.clone(),
                        version: item.needed_version.clone(),
                    };
                    self.write_item(id, item, write, now);
                }
                _ => item.step = Step::Failed,
            }
        }
        if transaction.items.iter().any(is_open) {
            return false;
        }
        if transaction.items.iter().all(|item| item.step == Step::Done) {
            return true;
        }
        if !self.begin_to_undo(id, transaction) {
            self.begin_to_give_back(id, transaction, |item| item.step == Step::Failed);
        }
        false
    }

    /// Deallocates the claims that `which` selects; the others count as done.
    fn begin_to_give_back(
        &mut self,
        id: TransactionId,
        transaction: &mut Transaction,
        which: impl Fn(&Item) -> bool,
    ) {
        let picked: Vec<bool> = transaction.items.iter().map(which).collect();
        transaction.restart_items(Stage::GivingBack);
        for (item, picked) in transaction.items.iter_mut().zip(picked) {
            if !picked {
                item.step = Step::Done;
            }
        }
        self.work_queue.insert(Work::Transaction(id));
    }

    fn give_back(&mut self, id: TransactionId, transaction: &mut Transaction, now: Moment) -> bool {
        for item in &mut transaction.items {
            if item.step != Step::Waiting {
                continue;
            }
            // An earlier leader's write may have recorded the allocation after all: it is in use, so keep it.
            let known = self.claims.get(&item.key).filter(|known| known.uid() == item.uid);
            if known.is_some_and(|known| known.is_ours()) {
                item.step = Step::Done;
                continue;
            }
            // Our own write may still be stored: wait until it no longer can, then read the claim once more.
            if item.may_be_recorded
                && let Some(known) = known
            {
                if let Some(moment) = known.unsettled_until(now) {
                    self.wake_at(moment, Work::Transaction(id));
                } else {
                    item.may_be_recorded = false;
                    item.step = Step::ToRead;
                    self.work_queue.insert(Work::Transaction(id));
                }
                continue;
            }
            if let Some(moment) = item.retry.wait_until(now) {
                self.wake_at(moment, Work::Transaction(id));
                continue;
            }
            item.step = Step::InFlight;
            let (claim, allocation) = (item.claim.clone(), item.allocation.clone());
            self.send(
                PendingCall::Item {
                    transaction: id,
                    uid: item.uid.clone(),
                },
                |id| Command::CallDriver {
                    id,
                    request: DriverRequest::Deallocate { claim, allocation },
                },
            );
        }
        transaction.items.iter().all(|item| item.step == Step::Done)
    }

    fn write_item(&mut self, id: TransactionId, item: &mut Item, write: ClaimWrite, now: Moment) {
        if let Some(moment) = item.retry.wait_until(now) {
            self.wake_at(moment, Work::Transaction(id));
            return;
        }
        item.step = Step::InFlight;
        let (key, uid) = (item.key.clone(), item.uid.clone());
        self.send(
            PendingCall::Item {
                transaction: id,
                uid: uid.clone(),
            },
            |id| Command::WriteClaim { id, key, uid, write },
        );
    }
}

/// The failure for an unusable answer of the driver. A retry may succeed.
fn misbehaved(message: String) -> Failure {
    Failure::Driver(CallError {
        kind: CallErrorKind::Retry,
        subject: Subject::Call,
        reason: "DriverMisbehaved",
        message,
    })
}

impl Item {
    fn to_allocate(&self) -> ClaimToAllocate {
        ClaimToAllocate {
            pod_claim_name: self.pod_claim_name.clone(),
            claim: self.claim.clone(),
            class: self.class.clone(),
        }
    }
}
