//! A batch: claims that are allocated together, all or none.
//!
//! Finalizers first, then the driver, then one status write per claim. A batch outlives its context and its claims: what the
//! driver holds for it is either recorded or given back, whatever is deleted meanwhile. If a claim cannot be recorded, those
//! that are recorded already are taken back.

mod answers;
mod undo;

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::api::resource::label::{LABEL_OF_ANY_NODE, label_of_node};
use crate::api::resource::{AllocationResult, ResourceClaim, ResourceClaimConsumerReference, ResourceClass};

use super::claim::{ClaimStage, ClaimState};
use super::event::{
    CallError, CallErrorKind, ClaimToAllocate, ClaimWrite, Command, DriverRequest, Moment, ObjectKey, Subject,
};
use super::retry::Retry;
use super::world::{Flight, Work, World};

/// Names a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct BatchId(u64);

/// For whom a batch is allocated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Consumer {
    /// The context.
    pub(super) context: ObjectKey,
    /// The context's uid.
    pub(super) context_uid: String,
    /// The pod's uid; its name is the context's.
    pub(super) pod_uid: String,
}

/// How far a batch is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Each claim gets our finalizer, and the label with the node.
    Securing,
    /// The driver has been asked.
    Allocating,
    /// Each claim gets its allocation.
    Recording,
    /// One claim could not be recorded: what the others record is taken back.
    Undoing,
    /// The driver is asked to take back what was not recorded.
    GivingBack,
}

/// How far a claim is within its batch's stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// To be done.
    Waiting,
    /// A write or a call is under way.
    InFlight,
    /// The write had no clear answer, or was refused: the claim is to be read before anything else.
    ToRead,
    /// Done.
    Done,
    /// It will not work.
    Failed,
}

/// A claim within a batch.
#[derive(Clone, Debug)]
struct Item {
    key: ObjectKey,
    uid: String,
    pod_claim_name: String,
    claim: Arc<ResourceClaim>,
    class: Arc<ResourceClass>,
    allocation: Option<AllocationResult>,
    step: Step,
    /// Why the last write was refused. An earlier one that had no clear answer may have been stored after all.
    refusal: Option<String>,
    /// Writes without a clear answer.
    unclear: u32,
    /// One of them was to record the allocation, and whether it has done so was not read since it can no longer come late.
    may_be_recorded: bool,
    /// The version that the last write of the allocation needs.
    needed_version: Option<String>,
    /// Its allocation was refused before: the others are not recorded before it is.
    goes_first: bool,
    retry: Retry,
}

/// Why a batch came to nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// The driver cannot.
    Driver(CallError),
    /// The API server will not.
    Refused(String),
    /// It is no longer wanted: the node, the pod or a claim has changed.
    Withdrawn,
}

/// Claims that are allocated together.
#[derive(Clone, Debug)]
pub(super) struct Batch {
    consumer: Option<Consumer>,
    node: Option<String>,
    stage: Stage,
    items: Vec<Item>,
    failure: Option<Failure>,
    /// The world's epoch when it was started: what the driver says may be older than what has happened since.
    asked: u64,
}

impl Batch {
    fn restart_items(&mut self, stage: Stage) {
        self.stage = stage;
        for item in &mut self.items {
            item.step = Step::Waiting;
            item.retry.succeeded();
        }
    }
}

impl World {
    /// Starts to allocate `claims` (entry of the pod, key), which must all be resting, on `node` or anywhere.
    pub(super) fn start_batch(
        &mut self,
        consumer: Option<Consumer>,
        node: Option<String>,
        claims: &[(String, ObjectKey)],
    ) -> Option<BatchId> {
        let id = BatchId(self.next_number());
        let mut items: Vec<Item> = Vec::new();
        let mut uids = BTreeSet::new();
        for (pod_claim_name, key) in claims {
            let claim = self.claims.get_mut(key)?;
            let class = self.classes.get(&claim.object.spec.resource_class_name)?.clone();
            // A pod may name one claim twice.
            if !uids.insert(claim.uid().to_owned()) {
                continue;
            }
            claim.stage = ClaimStage::InBatch(id);
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
        self.batches.insert(
            id,
            Batch {
                consumer,
                node,
                stage: Stage::Securing,
                items,
                failure: None,
                asked: self.epoch,
            },
        );
        self.dirty.insert(Work::Batch(id));
        Some(id)
    }

    /// Takes the next steps of a batch.
    pub(super) fn step_batch(&mut self, id: BatchId, now: Moment) {
        let Some(mut batch) = self.batches.remove(&id) else {
            return;
        };
        self.refresh(&mut batch);
        self.read_unclear(id, &mut batch, now);
        let over = match batch.stage {
            Stage::Securing => self.secure(id, &mut batch, now),
            Stage::Allocating => false,
            Stage::Recording => self.record(id, &mut batch, now),
            Stage::Undoing => {
                if self.undo(id, &mut batch, now) {
                    self.begin_to_give_back(id, &mut batch, |item| item.step == Step::Failed);
                }
                false
            }
            Stage::GivingBack => self.give_back(id, &mut batch, now),
        };
        if over {
            self.end_batch(&batch, now);
        } else {
            self.batches.insert(id, batch);
        }
    }

    /// Takes the latest state of each claim.
    fn refresh(&self, batch: &mut Batch) {
        for item in &mut batch.items {
            if let Some(known) = self.claims.get(&item.key).filter(|known| known.uid() == item.uid) {
                item.claim = known.object.clone();
            }
        }
    }

    /// Reads each claim whose write had no clear answer.
    fn read_unclear(&mut self, id: BatchId, batch: &mut Batch, now: Moment) {
        for item in batch.items.iter_mut().filter(|item| item.step == Step::ToRead) {
            if let Some(moment) = item.retry.wait_until(now) {
                self.wake_at(moment, Work::Batch(id));
                continue;
            }
            item.step = Step::InFlight;
            let (key, uid) = (item.key.clone(), item.uid.clone());
            self.send(Flight::Item { batch: id, uid }, |id| Command::ReadClaim {
                id,
                key,
            });
        }
    }

    /// Whether the batch is still wanted: the pod is on its way to this node, and no claim is gone, going or taken.
    fn is_wanted(&self, batch: &Batch) -> bool {
        let context_stands = batch.consumer.as_ref().is_none_or(|consumer| {
            self.contexts.get(&consumer.context).is_some_and(|context| {
                context.uid() == consumer.context_uid
                    && !context.is_deleting()
                    && Some(&context.object.spec.selected_node) == batch.node.as_ref()
            })
        });
        context_stands
            && batch.items.iter().all(|item| {
                self.claims.get(&item.key).is_some_and(|claim| {
                    claim.uid() == item.uid && !claim.is_deleting() && !claim.is_allocated()
                })
            })
    }

    /// The answer is whether the batch is over.
    fn secure(&mut self, id: BatchId, batch: &mut Batch, now: Moment) -> bool {
        let wanted = self.is_wanted(batch);
        let label = self.settings.node_label();
        let node = batch
            .node
            .as_deref()
            .map_or_else(|| LABEL_OF_ANY_NODE.to_owned(), label_of_node);
        let is_secured = |known: &ClaimState| {
            let labels = known.object.metadata.labels.as_ref();
            known.has_finalizer() && labels.and_then(|labels| labels.get(&label)) == Some(&node)
        };
        for item in &mut batch.items {
            let known = self.claims.get(&item.key).filter(|known| known.uid() == item.uid);
            if item.step == Step::Waiting && known.is_some_and(|known| is_secured(known)) {
                item.step = Step::Done;
            }
            if item.step == Step::Waiting && wanted && batch.failure.is_none() {
                self.write_item(id, item, ClaimWrite::AddFinalizer { node: node.clone() }, now);
            }
        }
        if batch
            .items
            .iter()
            .any(|item| matches!(item.step, Step::InFlight | Step::ToRead))
        {
            return false;
        }
        if !wanted {
            batch.failure.get_or_insert(Failure::Withdrawn);
        }
        if batch.failure.is_some() {
            return true;
        }
        if batch.items.iter().all(|item| item.step == Step::Done) {
            batch.stage = Stage::Allocating;
            let claims = batch.items.iter().map(Item::to_allocate).collect();
            let node = batch.node.clone();
            self.send(Flight::Batch { batch: id }, |id| Command::CallDriver {
                id,
                request: DriverRequest::Allocate { claims, node },
            });
        }
        false
    }

    fn record(&mut self, id: BatchId, batch: &mut Batch, now: Moment) -> bool {
        let reserved_for = batch
            .consumer
            .as_ref()
            .filter(|_| self.settings.reserve_for_pod)
            .map(|consumer| ResourceClaimConsumerReference::pod(&consumer.context.name, &consumer.pod_uid));
        let is_open = |item: &Item| !matches!(item.step, Step::Done | Step::Failed);
        let hopeless = batch
            .items
            .iter()
            .any(|item| item.goes_first && item.step == Step::Failed);
        // Where one has failed nothing more is recorded, and nothing waits for those that go first.
        let first_only = !hopeless && batch.items.iter().any(|item| item.goes_first && is_open(item));
        for item in &mut batch.items {
            if item.step != Step::Waiting || (first_only && !item.goes_first) {
                continue;
            }
            match item.allocation.clone() {
                Some(allocation) if !hopeless => {
                    // Once one may come late, no further one can: it is stored now, or the claim is at another version.
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
        if batch.items.iter().any(is_open) {
            return false;
        }
        if batch.items.iter().all(|item| item.step == Step::Done) {
            return true;
        }
        if !self.begin_to_undo(id, batch) {
            self.begin_to_give_back(id, batch, |item| item.step == Step::Failed);
        }
        false
    }

    /// Everything that `which` picks is given back; the rest counts as done.
    fn begin_to_give_back(&mut self, id: BatchId, batch: &mut Batch, which: impl Fn(&Item) -> bool) {
        let picked: Vec<bool> = batch.items.iter().map(which).collect();
        batch.restart_items(Stage::GivingBack);
        for (item, picked) in batch.items.iter_mut().zip(picked) {
            if !picked {
                item.step = Step::Done;
            }
        }
        self.dirty.insert(Work::Batch(id));
    }

    fn give_back(&mut self, id: BatchId, batch: &mut Batch, now: Moment) -> bool {
        for item in &mut batch.items {
            if item.step != Step::Waiting {
                continue;
            }
            // An earlier leader's write may have recorded it after all: it is in use then, and not to be given back.
            let known = self.claims.get(&item.key).filter(|known| known.uid() == item.uid);
            if known.is_some_and(|known| known.is_ours()) {
                item.step = Step::Done;
                continue;
            }
            // So may one of our own: it is waited for, and then the claim is read once more.
            if item.may_be_recorded
                && let Some(known) = known
            {
                if let Some(moment) = known.unsettled_until(now) {
                    self.wake_at(moment, Work::Batch(id));
                } else {
                    item.may_be_recorded = false;
                    item.step = Step::ToRead;
                    self.dirty.insert(Work::Batch(id));
                }
                continue;
            }
            if let Some(moment) = item.retry.wait_until(now) {
                self.wake_at(moment, Work::Batch(id));
                continue;
            }
            item.step = Step::InFlight;
            let (claim, allocation) = (item.claim.clone(), item.allocation.clone());
            self.send(
                Flight::Item {
                    batch: id,
                    uid: item.uid.clone(),
                },
                |id| Command::CallDriver {
                    id,
                    request: DriverRequest::Deallocate { claim, allocation },
                },
            );
        }
        batch.items.iter().all(|item| item.step == Step::Done)
    }

    fn write_item(&mut self, id: BatchId, item: &mut Item, write: ClaimWrite, now: Moment) {
        if let Some(moment) = item.retry.wait_until(now) {
            self.wake_at(moment, Work::Batch(id));
            return;
        }
        item.step = Step::InFlight;
        let (key, uid) = (item.key.clone(), item.uid.clone());
        self.send(
            Flight::Item {
                batch: id,
                uid: uid.clone(),
            },
            |id| Command::WriteClaim { id, key, uid, write },
        );
    }
}

/// The driver's answer cannot be used. Another answer may.
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
