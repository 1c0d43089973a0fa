//! An allocation transaction: allocates all claims of a pod, or one immediate claim, or nothing.
//!
//! ```text
//! add finalizers ─▶ allocate (driver) ─▶ write status ─▶ end
//!                     │ refused             │ refused ─▶ roll back written status
//!                     └──▶ deallocate ◀─────┴──────────────────┘
//! ```
//!
//! A transaction outlives its context and its claims: each allocation of the driver is either recorded in its claim or deallocated, even if
//! objects are deleted meanwhile. A failure to report becomes an Event on the pod (`Context::transaction_ended`) or on the immediate claim
//! (`end_immediate`, which also reports a call that the driver asks to repeat). [`Transaction::step`] returns [`TransactionAction`]s, which
//! [`ControllerState`](super::ControllerState) executes in order.

use std::sync::Arc;

use crate::api::resource::{
    AllocationResult, LABEL_OF_ANY_NODE, ResourceClaim, ResourceClaimConsumerReference, ResourceClass,
    label_of_node,
};

use super::claim::{Claim, ClaimAction, ClaimMap};
use super::event::{
    Answer, CallError, CallErrorKind, CallErrorSubject, ClaimToAllocate, ClaimWrite, Moment, ObjectKey,
    Outcome, Settings,
};
use super::queue::{Backoff, WRITES_BEFORE_REPORT};

/// The pod that a transaction allocates for, and its PodSchedulingContext.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Consumer {
    pub(super) context: ObjectKey,
    pub(super) context_uid: String,
    /// Uid of the pod. Pod and context have the same name.
    pub(super) pod_uid: String,
}

/// The state of a consumer's context. Both are false if the context is gone or being deleted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ConsumerState {
    /// Whether it selects the transaction's node.
    pub(super) selects_node: bool,
    /// Whether the pod still waits for a node. A pod whose user has set its node cannot go elsewhere, and the claim controller releases the
    /// claims of a pod that is being deleted.
    pub(super) awaits_node: bool,
}

/// The input of a step, apart from the transaction itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct TransactionInput<'a> {
    pub(super) settings: &'a Settings,
    pub(super) claims: &'a ClaimMap,
    /// `None` for an immediate claim.
    pub(super) consumer: Option<ConsumerState>,
}

impl<'a> TransactionInput<'a> {
    /// The claim of an item, unless it is gone.
    fn claim(&self, item: &Item) -> Option<&'a Claim> {
        let claim = self.claims.get(&item.key)?;
        (claim.uid() == item.uid && !claim.is_gone()).then_some(&**claim)
    }
}

/// Phases of a transaction. The last two follow a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TransactionPhase {
    /// Adding our finalizer and the node label to each claim.
    AddingFinalizers,
    /// Waiting for the driver's allocations.
    Allocating,
    /// Writing each claim's allocation.
    WritingStatus,
    /// Rolling back recorded allocations because one claim could not be recorded. `Failed` marks a claim without an allocation, and `Done` a
    /// claim that keeps its allocation.
    ///
    /// No container can be using them: one of the pod's claims was just read without an allocation. The scheduler does not bind such a pod.
    /// From 1.28 on, kubelet prepares nothing for a pod before all its claims are allocated and reserved for it (`PrepareResources` in
    /// kubelet's `cm/dra/manager.go`); 1.27 may prepare one claim, but starts no container. One write removes the allocation and our own
    /// reservation; it is refused if the claim has changed since it was read.
    RollingBack,
    /// Waiting for the driver to deallocate the claims that are not recorded.
    Deallocating,
}

/// The phase of one claim within the current phase of its transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
enum ItemPhase {
    /// Not started, or due for a retry.
    Waiting,
    /// A write or a call is pending.
    Pending,
    /// The last write was not stored, or its outcome is unknown: read the claim before anything else.
    Unconfirmed {
        /// Why the write was refused. An earlier write with an unknown outcome may still have been stored.
        refusal: Option<String>,
    },
    /// Reading the claim after such a write.
    Reading {
        refusal: Option<String>,
    },
    Done,
    /// Cannot succeed in this phase.
    Failed,
}

impl ItemPhase {
    fn is_in_progress(&self) -> bool {
        matches!(
            self,
            Self::Pending | Self::Unconfirmed { .. } | Self::Reading { .. }
        )
    }

    fn take_refusal(&mut self) -> Option<String> {
        match self {
            Self::Unconfirmed { refusal } | Self::Reading { refusal } => refusal.take(),
            Self::Waiting | Self::Pending | Self::Done | Self::Failed => None,
        }
    }
}

/// One claim of a transaction.
#[derive(Clone, Debug)]
struct Item {
    key: ObjectKey,
    uid: String,
    /// The claim as last seen, and its class at the start.
    to_allocate: ClaimToAllocate,
    allocation: Option<AllocationResult>,
    phase: ItemPhase,
    /// Number of writes with an unknown outcome.
    unclear: u32,
    /// Set when an allocation write had an unknown outcome. Cleared when that write can no longer be stored and the claim is read again.
    may_be_recorded: bool,
    /// The resource version that the last allocation write requires.
    needed_version: Option<String>,
    /// Its allocation was refused in an earlier transaction, so it is recorded before the other claims.
    goes_first: bool,
    backoff: Backoff,
}

/// Why a transaction failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum TransactionFailure {
    /// The driver returned an error or an unusable answer.
    Driver(CallError),
    /// The API server refused a write, or the claim is gone or was allocated by another writer.
    Refused(String),
    /// The transaction is no longer active: the node, the pod or a claim has changed.
    Withdrawn,
}

impl TransactionFailure {
    /// Its name in [`Statistics::ATTEMPTS`](super::Statistics::ATTEMPTS).
    pub(super) fn as_str(&self) -> &'static str {
        match self {
            Self::Driver(error) => error.kind.as_str(),
            Self::Refused(_) => "NotRecorded",
            Self::Withdrawn => "Withdrawn",
        }
    }
}

/// What happens next in a transaction.
#[derive(Debug)]
pub(super) enum TransactionAction {
    /// Step again.
    Step,
    StepAt(Moment),
    Read {
        key: ObjectKey,
        uid: String,
    },
    Write {
        key: ObjectKey,
        uid: String,
        write: ClaimWrite,
    },
    Allocate {
        claims: Vec<ClaimToAllocate>,
        node: Option<String>,
    },
    Deallocate {
        uid: String,
        claim: Arc<ResourceClaim>,
        allocation: Option<AllocationResult>,
    },
    End,
}

/// The meaning of an answer for one claim.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ItemResult {
    /// The transaction goes on.
    Continues,
    /// The allocation is recorded.
    Recorded,
    /// The recorded allocation is rolled back.
    RolledBack,
    /// Writes keep failing without being refused.
    Unclear(String),
    /// The driver cannot deallocate the claim yet.
    NotDeallocated(CallError),
}

#[derive(Clone, Debug)]
pub(super) struct Transaction {
    pub(super) consumer: Option<Consumer>,
    pub(super) node: Option<String>,
    phase: TransactionPhase,
    items: Vec<Item>,
    failure: Option<TransactionFailure>,
    /// The capacity generation at the start: the driver's answer may predate later changes.
    started_at: u64,
}

impl Transaction {
    /// A transaction without claims.
    pub(super) fn new(consumer: Option<Consumer>, node: Option<String>, capacity_generation: u64) -> Self {
        Self {
            consumer,
            node,
            phase: TransactionPhase::AddingFinalizers,
            items: Vec::new(),
            failure: None,
            started_at: capacity_generation,
        }
    }

    /// Adds a claim, unless it is already added: a pod may name one claim twice. Returns whether it was added.
    pub(super) fn add(&mut self, key: ObjectKey, to_allocate: ClaimToAllocate, claim: &Claim) -> bool {
        if self.items.iter().any(|item| item.uid == claim.uid()) {
            return false;
        }
        self.items.push(Item {
            key,
            uid: claim.uid().to_owned(),
            to_allocate,
            allocation: None,
            phase: ItemPhase::Waiting,
            unclear: 0,
            may_be_recorded: false,
            needed_version: None,
            goes_first: claim.allocation_refused,
            backoff: Backoff::default(),
        });
        true
    }

    /// The claims, by key and uid.
    pub(super) fn claims(&self) -> impl Iterator<Item = (&ObjectKey, &str)> {
        self.items.iter().map(|item| (&item.key, &*item.uid))
    }

    /// Whether the transaction is still active: the context still selects its node, and no claim is gone, being deleted or allocated.
    pub(super) fn is_active(&self, input: &TransactionInput<'_>) -> bool {
        let is_active = |claim: &Claim| !claim.is_deleting() && !claim.is_allocated();
        input.consumer.is_none_or(|consumer| consumer.selects_node)
            && self
                .items
                .iter()
                .all(|item| input.claim(item).is_some_and(is_active))
    }

    /// Takes the next steps.
    pub(super) fn step(&mut self, input: &TransactionInput<'_>, now: Moment) -> Vec<TransactionAction> {
        let mut actions = Vec::new();
        for item in &mut self.items {
            if let Some(known) = input.claim(item) {
                item.to_allocate.claim = known.object.clone();
            }
            item.read_unconfirmed(&mut actions, now);
        }
        match self.phase {
            TransactionPhase::AddingFinalizers => self.add_finalizers(input, &mut actions, now),
            TransactionPhase::Allocating => {}
            TransactionPhase::WritingStatus => self.write_status(input, &mut actions, now),
            TransactionPhase::RollingBack => self.roll_back(input, &mut actions, now),
            TransactionPhase::Deallocating => self.deallocate(input, &mut actions, now),
        }
        actions
    }

    fn add_finalizers(
        &mut self,
        input: &TransactionInput<'_>,
        actions: &mut Vec<TransactionAction>,
        now: Moment,
    ) {
        let is_active = self.is_active(input);
        let label = input.settings.node_label();
        let node = self
            .node
            .as_deref()
            .map_or_else(|| LABEL_OF_ANY_NODE.to_owned(), label_of_node);
        let has_finalizer = |claim: &Claim| {
            let labels = claim.object.metadata.labels.as_ref();
            claim.has_finalizer() && labels.and_then(|labels| labels.get(&label)) == Some(&node)
        };
        for item in &mut self.items {
            if item.phase == ItemPhase::Waiting && input.claim(item).is_some_and(has_finalizer) {
                item.phase = ItemPhase::Done;
            }
            if item.phase == ItemPhase::Waiting && is_active && self.failure.is_none() {
                item.write(ClaimWrite::AddFinalizer { node: node.clone() }, actions, now);
            }
        }
        if self.items.iter().any(|item| item.phase.is_in_progress()) {
            return;
        }
        if !is_active {
            self.failure.get_or_insert(TransactionFailure::Withdrawn);
        }
        if self.failure.is_some() {
            actions.push(TransactionAction::End);
        } else if self.items.iter().all(|item| item.phase == ItemPhase::Done) {
            self.phase = TransactionPhase::Allocating;
            actions.push(TransactionAction::Allocate {
                claims: self.items.iter().map(|item| item.to_allocate.clone()).collect(),
                node: self.node.clone(),
            });
        }
    }

    /// Handles the driver's answer for the whole transaction.
    pub(super) fn allocated(
        &mut self,
        result: Result<Vec<AllocationResult>, CallError>,
        input: &TransactionInput<'_>,
    ) {
        if self.phase != TransactionPhase::Allocating {
            return;
        }
        match result {
            Ok(allocations) if allocations.len() == self.items.len() => {
                for (item, allocation) in self.items.iter_mut().zip(allocations) {
                    // Check before the first write: a claim that the server refuses would leave the others allocated in vain.
                    if let Err(message) = allocation.check() {
                        let message = format!("the driver's allocation for claim {}: {message}", item.key);
                        self.failure.get_or_insert_with(|| misbehaved(message));
                    }
                    item.allocation = Some(allocation);
                }
            }
            Ok(allocations) => {
                let (number, count) = (allocations.len(), self.items.len());
                let message = format!("the driver answered for {number} of {count} claims");
                self.failure = Some(misbehaved(message));
            }
            Err(error) => self.failure = Some(TransactionFailure::Driver(error)),
        }
        if self.failure.is_none() && !self.is_active(input) {
            self.failure = Some(TransactionFailure::Withdrawn);
        }
        if self.failure.is_some() {
            self.begin(TransactionPhase::Deallocating, &ItemPhase::Done);
        } else {
            self.begin(TransactionPhase::WritingStatus, &ItemPhase::Done);
        }
    }

    /// Begins a phase for the claims with this result of the previous phase. The others keep theirs.
    fn begin(&mut self, phase: TransactionPhase, result: &ItemPhase) {
        self.phase = phase;
        for item in self.items.iter_mut().filter(|item| item.phase == *result) {
            item.phase = ItemPhase::Waiting;
            item.backoff.succeeded();
        }
    }

    fn write_status(
        &mut self,
        input: &TransactionInput<'_>,
        actions: &mut Vec<TransactionAction>,
        now: Moment,
    ) {
        let reserved_for = self
            .consumer
            .as_ref()
            .filter(|_| input.settings.reserve_for_pod)
            .map(|consumer| ResourceClaimConsumerReference::pod(&consumer.context.name, &consumer.pod_uid));
        let is_open = |item: &Item| !matches!(item.phase, ItemPhase::Done | ItemPhase::Failed);
        let hopeless = self
            .items
            .iter()
            .any(|item| item.goes_first && item.phase == ItemPhase::Failed);
        // If a `goes_first` claim has failed, nothing more is recorded, so no claim waits for the others that go first.
        let first_only = !hopeless && self.items.iter().any(|item| item.goes_first && is_open(item));
        for item in &mut self.items {
            if item.phase != ItemPhase::Waiting || (first_only && !item.goes_first) {
                continue;
            }
            match item.allocation.clone() {
                Some(allocation) if !hopeless => {
                    // After an allocation write with an unknown outcome, the retry requires the version last seen: it fails if the claim
                    // has changed.
                    let seen = item.to_allocate.claim.metadata.resource_version.clone();
                    item.needed_version = seen.filter(|_| item.may_be_recorded);
                    let write = ClaimWrite::Allocate {
                        allocation,
                        reserved_for: reserved_for.clone(),
                        version: item.needed_version.clone(),
                    };
                    item.write(write, actions, now);
                }
                _ => item.phase = ItemPhase::Failed,
            }
        }
        if self.items.iter().any(is_open) {
            return;
        }
        if self.items.iter().all(|item| item.phase == ItemPhase::Done) {
            actions.push(TransactionAction::End);
            return;
        }
        self.begin(TransactionPhase::RollingBack, &ItemPhase::Done);
        self.roll_back(input, actions, now);
    }

    fn roll_back(&mut self, input: &TransactionInput<'_>, actions: &mut Vec<TransactionAction>, now: Moment) {
        // If another writer has allocated the claim that we could not record, the pod may be starting with all its claims. A write with an
        // unknown outcome is repeated seconds later, so this may also happen meanwhile, for example after the claim's class changed.
        let lacks_a_claim = self
            .items
            .iter()
            .any(|item| input.claim(item).is_none_or(|claim| !claim.is_allocated()));
        let awaits_node = input.consumer.is_some_and(|consumer| consumer.awaits_node);
        let is_right = lacks_a_claim && awaits_node;
        let pod_uid = self.consumer.as_ref().map(|consumer| &*consumer.pod_uid);
        for item in self
            .items
            .iter_mut()
            .filter(|item| item.phase == ItemPhase::Waiting)
        {
            let known = input.claim(item).filter(|_| is_right);
            // A late allocation write must find the claim allocated: wait until none can be stored any more.
            if let Some(moment) = known.and_then(|known| known.late_write_until(now)) {
                actions.push(TransactionAction::StepAt(moment));
                continue;
            }
            match known.and_then(|known| item.rollback(known, pod_uid)) {
                Some(write) => item.write(write, actions, now),
                None => item.phase = ItemPhase::Done,
            }
        }
        if self
            .items
            .iter()
            .all(|item| matches!(item.phase, ItemPhase::Done | ItemPhase::Failed))
        {
            self.begin(TransactionPhase::Deallocating, &ItemPhase::Failed);
            actions.push(TransactionAction::Step);
        }
    }

    fn deallocate(
        &mut self,
        input: &TransactionInput<'_>,
        actions: &mut Vec<TransactionAction>,
        now: Moment,
    ) {
        for item in &mut self.items {
            if item.phase != ItemPhase::Waiting {
                continue;
            }
            // An earlier leader's write may have recorded the allocation after all: it is in use, so keep it.
            let known = input.claim(item);
            if known.is_some_and(Claim::is_ours) {
                item.phase = ItemPhase::Done;
                continue;
            }
            // Our own write may still be stored: wait until it no longer can, then read the claim once more.
            if item.may_be_recorded
                && let Some(known) = known
            {
                if let Some(moment) = known.late_write_until(now) {
                    actions.push(TransactionAction::StepAt(moment));
                } else {
                    item.may_be_recorded = false;
                    item.phase = ItemPhase::Unconfirmed { refusal: None };
                    actions.push(TransactionAction::Step);
                }
                continue;
            }
            if let Some(moment) = item.backoff.wait_until(now) {
                actions.push(TransactionAction::StepAt(moment));
                continue;
            }
            item.phase = ItemPhase::Pending;
            actions.push(TransactionAction::Deallocate {
                uid: item.uid.clone(),
                claim: item.to_allocate.claim.clone(),
                allocation: item.allocation.clone(),
            });
        }
        if self.items.iter().all(|item| item.phase == ItemPhase::Done) {
            actions.push(TransactionAction::End);
        }
    }

    /// Handles an answer for the claim with this uid. `known` is the claim, unless it is gone; the object that was read is already applied to
    /// it.
    pub(super) fn item_answered(
        &mut self,
        uid: &str,
        answer: Answer,
        known: Option<&mut Claim>,
        driver_name: &str,
        now: Moment,
    ) -> ItemResult {
        let phase = self.phase;
        let Some(item) = self.items.iter_mut().find(|item| item.uid == uid) else {
            return ItemResult::Continues;
        };
        let is_status = phase == TransactionPhase::WritingStatus;
        let is_rollback = phase == TransactionPhase::RollingBack;
        let mut known = known;
        let mut refused = None;
        let mut result = ItemResult::Continues;
        match answer {
            Answer::ClaimWritten(Outcome::Done(_)) if is_rollback => {
                item.phase = ItemPhase::Failed;
                result = ItemResult::RolledBack;
            }
            Answer::ClaimWritten(Outcome::Done(_)) => item.phase = ItemPhase::Done,
            Answer::Deallocated(Ok(())) => {
                item.phase = ItemPhase::Done;
                if let Some(claim) = &mut known {
                    claim.clear_uncertain();
                }
            }
            Answer::ClaimWritten(Outcome::Refused(message)) => {
                item.phase = ItemPhase::Unconfirmed {
                    refusal: Some(message),
                };
            }
            Answer::ClaimWritten(Outcome::Conflict(_)) => {
                item.phase = ItemPhase::Unconfirmed { refusal: None };
            }
            Answer::ClaimWritten(Outcome::Busy(message)) => {
                item.phase = ItemPhase::Unconfirmed { refusal: None };
                if item.backoff.failures() >= WRITES_BEFORE_REPORT && !is_rollback {
                    result = ItemResult::Unclear(message);
                }
            }
            Answer::ClaimWritten(Outcome::Unknown(message)) => {
                item.phase = ItemPhase::Unconfirmed { refusal: None };
                item.unclear += 1;
                if item.unclear > WRITES_BEFORE_REPORT && !is_rollback {
                    result = ItemResult::Unclear(message);
                }
                item.may_be_recorded |= is_status;
                if let Some(claim) = &mut known {
                    if is_status {
                        claim.mark_allocation_uncertain(item.needed_version.take(), now);
                    } else {
                        claim.mark_write_uncertain(now);
                    }
                    // If a rollback is stored later after all, the driver must deallocate.
                    if is_rollback {
                        claim.mark_uncertain();
                    }
                }
            }
            Answer::ClaimRead(Err(_)) => item.read_failed(now),
            Answer::ClaimRead(Ok(object)) => {
                let object = object.filter(|object| object.metadata.uid.as_deref() == Some(uid));
                let refusal = item.phase.take_refusal();
                item.phase = item.phase_after_read(phase, object.as_deref(), driver_name);
                item.backoff.failed(now);
                // After two writes with an unknown outcome, the other one may still be stored.
                if item.phase == ItemPhase::Done
                    && item.unclear < 2
                    && let Some(claim) = &mut known
                {
                    claim.clear_late_writes();
                }
                if item.phase == ItemPhase::Waiting && refusal.is_some() {
                    // If the server refuses a rollback, the allocation stays. The scheduler requests its deallocation if the pod fits
                    // nowhere.
                    item.phase = if is_rollback {
                        ItemPhase::Done
                    } else {
                        ItemPhase::Failed
                    };
                }
                if item.phase == ItemPhase::Failed {
                    if is_status && let Some(claim) = &mut known {
                        claim.allocation_refused = true;
                    }
                    let by_others = || "the claim was deleted, or allocated by another controller".to_owned();
                    refused = Some(refusal.unwrap_or_else(by_others));
                }
            }
            Answer::Deallocated(Err(error)) => {
                item.phase = ItemPhase::Waiting;
                item.backoff.failed(now);
                result = ItemResult::NotDeallocated(error);
            }
            Answer::PodRead(_) | Answer::ContextWritten(_) | Answer::Evaluated(_) | Answer::Allocated(_) => {}
        }
        if is_status && item.phase == ItemPhase::Done {
            if let Some(claim) = known {
                claim.allocation_refused = false;
                result = ItemResult::Recorded;
            } else {
                // The driver learned that the claim is gone before it could learn of the recorded allocation: deallocate.
                item.phase = ItemPhase::Failed;
                refused = Some("the claim was deleted".to_owned());
            }
        }
        if let Some(message) = refused {
            self.failure.get_or_insert(TransactionFailure::Refused(message));
        }
        result
    }

    /// Why it failed, once it has ended. `None` if all claims are allocated.
    pub(super) fn failure(&self, input: &TransactionInput<'_>) -> Option<TransactionFailure> {
        // A refusal for a deleted claim needs no report: the transaction is withdrawn.
        let deleted = || {
            self.items
                .iter()
                .any(|item| input.claim(item).is_none_or(Claim::is_deleting))
        };
        match &self.failure {
            Some(TransactionFailure::Refused(_)) if deleted() => Some(TransactionFailure::Withdrawn),
            other => other.clone(),
        }
    }

    /// Records the end of an immediate claim's transaction in the claim. `class` is the claim's class as it is now.
    pub(super) fn end_immediate(
        &self,
        claim: &mut Claim,
        class: Option<&Arc<ResourceClass>>,
        failure: Option<TransactionFailure>,
        capacity_generation: u64,
        now: Moment,
    ) -> Option<ClaimAction> {
        let item = self.items.iter().find(|item| item.uid == claim.uid())?;
        match failure {
            None => {
                claim.backoff.succeeded();
                claim.forget_reports();
                None
            }
            Some(TransactionFailure::Withdrawn) => None,
            Some(TransactionFailure::Refused(message)) => {
                claim.backoff.failed(now);
                let message = format!("the allocation could not be recorded: {message}");
                Some(ClaimAction::Report("AllocationNotRecorded", message))
            }
            Some(TransactionFailure::Driver(error)) => {
                claim.allocation_refused = false;
                // A change since the driver was called may have removed the cause.
                let changed = self.started_at < capacity_generation || class != Some(&item.to_allocate.class);
                if error.kind == CallErrorKind::Invalid && !changed {
                    claim.invalid_at = Some(capacity_generation);
                } else {
                    claim.backoff.failed(now);
                }
                if !claim.should_report(&error, now) {
                    return None;
                }
                Some(match error.subject {
                    CallErrorSubject::Class(class) => ClaimAction::ReportWithClass {
                        class,
                        reason: error.reason,
                        message: error.message,
                    },
                    CallErrorSubject::Claim(_) | CallErrorSubject::Call => {
                        ClaimAction::Report(error.reason, error.message)
                    }
                })
            }
        }
    }
}

impl Item {
    fn write(&mut self, write: ClaimWrite, actions: &mut Vec<TransactionAction>, now: Moment) {
        if let Some(moment) = self.backoff.wait_until(now) {
            actions.push(TransactionAction::StepAt(moment));
            return;
        }
        self.phase = ItemPhase::Pending;
        let (key, uid) = (self.key.clone(), self.uid.clone());
        actions.push(TransactionAction::Write { key, uid, write });
    }

    /// Reads the claim if its last write was not confirmed.
    fn read_unconfirmed(&mut self, actions: &mut Vec<TransactionAction>, now: Moment) {
        let ItemPhase::Unconfirmed { refusal } = &mut self.phase else {
            return;
        };
        if let Some(moment) = self.backoff.wait_until(now) {
            actions.push(TransactionAction::StepAt(moment));
            return;
        }
        let refusal = refusal.take();
        self.phase = ItemPhase::Reading { refusal };
        let (key, uid) = (self.key.clone(), self.uid.clone());
        actions.push(TransactionAction::Read { key, uid });
    }

    fn read_failed(&mut self, now: Moment) {
        let refusal = self.phase.take_refusal();
        self.phase = ItemPhase::Unconfirmed { refusal };
        self.backoff.failed(now);
    }

    fn phase_after_read(
        &self,
        phase: TransactionPhase,
        object: Option<&ResourceClaim>,
        driver_name: &str,
    ) -> ItemPhase {
        if phase == TransactionPhase::Deallocating {
            return ItemPhase::Waiting;
        }
        let Some(object) = object else {
            return ItemPhase::Failed;
        };
        match (phase, &object.status.allocation) {
            (TransactionPhase::RollingBack, allocation) if *allocation != self.allocation => {
                ItemPhase::Failed
            }
            (TransactionPhase::WritingStatus, Some(allocation)) => {
                let ours = object.status.driver_name.as_deref() == Some(driver_name)
                    && Some(allocation) == self.allocation.as_ref();
                if ours { ItemPhase::Done } else { ItemPhase::Failed }
            }
            // The server stores no allocation in a claim that is being deleted.
            (TransactionPhase::WritingStatus, None) if object.metadata.deletion_timestamp.is_some() => {
                ItemPhase::Failed
            }
            _ => ItemPhase::Waiting,
        }
    }

    /// The write that rolls back the claim. `None` if the claim must stay as it is: it also serves another pod, or it is being released
    /// anyway.
    fn rollback(&self, known: &Claim, pod_uid: Option<&str>) -> Option<ClaimWrite> {
        let status = &known.object.status;
        let is_ours_alone = status.allocation == self.allocation
            && !known.is_release_requested()
            && known.has_no_other_user(pod_uid);
        let version = known.object.metadata.resource_version.clone()?;
        is_ours_alone.then_some(ClaimWrite::RollBackAllocation {
            version,
            reserved: !status.reserved_for.is_empty(),
        })
    }
}

/// The failure for an unusable answer of the driver. A retry may succeed.
fn misbehaved(message: String) -> TransactionFailure {
    TransactionFailure::Driver(CallError {
        kind: CallErrorKind::Retry,
        subject: CallErrorSubject::Call,
        reason: "DriverMisbehaved",
        message,
    })
}
