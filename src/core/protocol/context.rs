//! One PodSchedulingContext: is the pod ours to serve, where can it not go, and is it time to allocate?

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use crate::api::resource::{
    NODE_LIST_MAX, Pod, PodSchedulingContext, ResourceClaimSchedulingStatus, controller_of,
};
use crate::driver::Verdict;

use super::batch::{Consumer, Failure};
use super::claim::ClaimStage;
use super::event::{
    Answer, CallErrorKind, ClaimToAllocate, Command, DriverRequest, Moment, ObjectKey, Outcome, Regarding,
    Subject, summary,
};
use super::resolve::Resolved;
use super::retry::Retry;
use super::wake::Waiting;
use super::world::{Flight, Work, World, newer, spread};

/// The slow recheck of a waiting pod: a net under the wake-ups, which count as lost if it ever catches one.
const RECHECK: Duration = Duration::from_secs(300);
/// Rechecks are spread over this time.
const RECHECK_SPREAD: Duration = Duration::from_secs(120);

/// Failed attempts to write an answer before the pod's user is told.
const WRITES_BEFORE_REPORT: u32 = 3;

/// What is known of a context's pod. Read once per context.
#[derive(Clone, Debug, Default, PartialEq)]
enum PodKnown {
    /// Nothing.
    #[default]
    Unread,
    /// As it was read.
    Read(Arc<Pod>),
    /// It does not exist, or is another pod than the one that owns the context.
    Gone,
}

/// What is under way for a context. At most one thing at a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ContextStage {
    #[default]
    Resting,
    Reading,
    Judging,
    Publishing,
    Allocating,
}

/// What a verdict was made from. As long as it stands, the verdict stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Basis {
    nodes: Vec<String>,
    /// Uid of each claim with the version of its class.
    claims: Vec<(String, Option<String>)>,
    epoch: u64,
}

/// A context.
#[derive(Clone, Debug)]
pub(super) struct ContextState {
    /// As last seen: by the watch or as the answer of our own write, whichever is later.
    pub(super) object: Arc<PodSchedulingContext>,
    pod: PodKnown,
    /// The pod has been served since it was read. If its claims are to be allocated once more, it may have ended meanwhile.
    served: bool,
    stage: ContextStage,
    /// The last verdict, in the order of the basis' claims.
    verdict: Option<(Basis, Vec<Verdict>)>,
    /// The driver cannot judge, or cannot allocate, as long as this stands.
    stuck: Option<Basis>,
    /// Nodes on which the driver refused to allocate although it had found nothing against them, until something changes or
    /// `refusals` says that it may be tried again.
    refused: BTreeMap<String, String>,
    refusals: Retry,
    /// Set while the pod lacks a node.
    pub(super) waiting: Option<Waiting>,
    /// The world's epoch when it was last offered what had become free.
    epoch: u64,
    /// The world's epoch when the driver was last asked: what it says may be older than what has happened since.
    asked: u64,
    retry: Retry,
    reported: Option<String>,
    /// The verdict under way was asked for by the slow recheck alone.
    by_recheck: bool,
}

/// One of the pod's claims that is ours and still to be allocated.
struct Pending {
    pod_claim_name: String,
    key: ObjectKey,
    /// Where its verdict stands: a pod may name one claim in several entries, and the driver is asked about it once.
    position: usize,
    to_allocate: ClaimToAllocate,
}

/// What the claims of a pod ask of us.
enum Standing {
    /// Nothing, now: something that will be seen is awaited, or all is done.
    Rest,
    /// These are to be allocated; `all` counts those of other drivers too.
    Pending { own: Vec<Pending>, all: usize },
}

impl ContextState {
    fn new(object: Arc<PodSchedulingContext>) -> Self {
        Self {
            object,
            pod: PodKnown::Unread,
            served: false,
            stage: ContextStage::Resting,
            verdict: None,
            stuck: None,
            refused: BTreeMap::new(),
            refusals: Retry::default(),
            waiting: None,
            epoch: 0,
            asked: 0,
            retry: Retry::default(),
            reported: None,
            by_recheck: false,
        }
    }

    pub(super) fn uid(&self) -> &str {
        self.object.metadata.uid.as_deref().unwrap_or_default()
    }

    pub(super) fn is_deleting(&self) -> bool {
        self.object.metadata.deletion_timestamp.is_some()
    }

    /// Something has become possible, and it is this pod's turn.
    pub(super) fn offered(&mut self, epoch: u64) {
        self.epoch = epoch;
        self.refused.clear();
        self.refusals.succeeded();
        self.retry.succeeded();
    }

    /// Something is not what it was when the driver failed: it is asked again without delay.
    pub(super) fn hurry(&mut self) {
        self.retry.succeeded();
    }

    /// Lets refused nodes be tried again when their time has come.
    fn forgive(&mut self, now: Moment) {
        if !self.refused.is_empty() && self.refusals.wait_until(now).is_none() {
            self.refused.clear();
            self.verdict = None;
        }
    }

    fn owner_uid(&self) -> Option<&str> {
        controller_of(&self.object.metadata).map(|owner| owner.uid.as_str())
    }

    /// The nodes in question, without repetition: the scheduler's, and those that were found unsuitable before, since the
    /// scheduler lists only nodes that passed.
    fn nodes(&self, own: &[Pending]) -> Vec<String> {
        let spec = &self.object.spec;
        let entries = &self.object.status.resource_claims;
        let before = entries
            .iter()
            .filter(|entry| own.iter().any(|claim| claim.pod_claim_name == entry.name))
            .flat_map(|entry| &entry.unsuitable_nodes);
        let selected = Some(&spec.selected_node).filter(|node| !node.is_empty());
        let mut seen = BTreeSet::new();
        selected
            .into_iter()
            .chain(&spec.potential_nodes)
            .chain(before)
            .filter(|node| seen.insert((*node).clone()))
            .cloned()
            .collect()
    }
}

impl World {
    pub(super) fn see_context(&mut self, object: Arc<PodSchedulingContext>, _now: Moment) {
        let key = ObjectKey::of(&object.metadata);
        let uid = object.metadata.uid.clone().unwrap_or_default();
        if let Some(known) = self.contexts.get(&key) {
            let known_uid = known.uid().to_owned();
            if known_uid != uid {
                self.context_gone(&key, &known_uid);
            } else if !newer(
                known.object.metadata.resource_version.as_deref(),
                object.metadata.resource_version.as_deref(),
            ) {
                return;
            }
        }
        if let Some(context) = self.contexts.get_mut(&key) {
            // Another question need not wait for what has failed.
            if context.object.spec != object.spec {
                context.hurry();
            }
            context.object = object;
        } else {
            let mut context = ContextState::new(object);
            context.epoch = self.epoch;
            self.contexts.insert(key.clone(), context);
        }
        self.dirty.insert(Work::Context(key.clone()));
        self.touch_batches();
    }

    pub(super) fn context_gone(&mut self, key: &ObjectKey, uid: &str) {
        if self.contexts.get(key).is_none_or(|context| context.uid() != uid) {
            return;
        }
        self.contexts.remove(key);
        self.wake.remove(key);
        self.users.retain(|_, contexts| {
            contexts.remove(key);
            !contexts.is_empty()
        });
        self.touch_batches();
    }

    /// A batch ends early if its pod is no longer on the way to its node.
    fn touch_batches(&mut self) {
        self.dirty.extend(self.batches.keys().copied().map(Work::Batch));
    }

    /// Looks again at the contexts of a namespace whose pods have not been read, since one may now be ours.
    pub(super) fn touch_unread_contexts(&mut self, namespace: &str) {
        let first = ObjectKey::new(namespace, "");
        let keys = self
            .contexts
            .range(first..)
            .take_while(|(key, _)| key.namespace == namespace)
            .filter(|(_, context)| context.pod == PodKnown::Unread)
            .map(|(key, _)| Work::Context(key.clone()));
        self.dirty.extend(keys);
    }

    /// Takes the next step for a context.
    pub(super) fn step_context(&mut self, key: &ObjectKey, now: Moment) {
        let Some(context) = self.contexts.get_mut(key) else {
            return;
        };
        let spec = &context.object.spec;
        if context.stage != ContextStage::Resting
            || context.is_deleting()
            || (spec.selected_node.is_empty() && spec.potential_nodes.is_empty())
        {
            return;
        }
        if let Some(moment) = context.retry.wait_until(now) {
            self.wake_at(moment, Work::Context(key.clone()));
            return;
        }
        context.forgive(now);
        let pod = match &context.pod {
            PodKnown::Gone => return,
            PodKnown::Read(pod) => pod.clone(),
            PodKnown::Unread => {
                self.read_pod(key);
                return;
            }
        };
        match self.standing(key, &pod, now) {
            Standing::Rest => {
                if let Some(context) = self.contexts.get_mut(key) {
                    context.waiting = None;
                }
                self.wake.remove(key);
            }
            Standing::Pending { .. } if self.contexts.get(key).is_some_and(|context| context.served) => {
                self.send_read_pod(key);
            }
            Standing::Pending { own, all } => self.judge_or_act(key, &pod, &own, all, now),
        }
    }

    /// Reads the pod, if it may be ours at all: contexts of other drivers cost nothing.
    fn read_pod(&mut self, key: &ObjectKey) {
        let Some(context) = self.contexts.get(key) else {
            return;
        };
        let Some(owner) = context.owner_uid() else { return };
        let first = ObjectKey::new(key.namespace.clone(), "");
        let concerns = self
            .candidates
            .range(first..)
            .take_while(|claim| claim.namespace == key.namespace)
            .any(|claim| {
                self.claims.get(claim).is_some_and(|claim| {
                    controller_of(&claim.object.metadata).is_none_or(|of| of.uid == owner)
                })
            });
        if !concerns {
            return;
        }
        self.send_read_pod(key);
    }

    fn send_read_pod(&mut self, key: &ObjectKey) {
        let Some(context) = self.contexts.get(key) else {
            return;
        };
        let uid = context.uid().to_owned();
        self.set_stage(key, ContextStage::Reading);
        self.send(
            Flight::Pod {
                context: key.clone(),
                uid,
            },
            |id| Command::ReadPod { id, key: key.clone() },
        );
    }

    fn set_stage(&mut self, key: &ObjectKey, stage: ContextStage) {
        if let Some(context) = self.contexts.get_mut(key) {
            context.stage = stage;
        }
    }

    /// The driver is about to be asked.
    fn ask(&mut self, key: &ObjectKey, stage: ContextStage) {
        let epoch = self.epoch;
        if let Some(context) = self.contexts.get_mut(key) {
            context.asked = epoch;
        }
        self.set_stage(key, stage);
    }

    /// The context that an answer belongs to, resting again; `None` if it is gone.
    fn landed(&mut self, key: &ObjectKey, uid: &str) -> Option<&mut ContextState> {
        let context = self
            .contexts
            .get_mut(key)
            .filter(|context| context.uid() == uid)?;
        context.stage = ContextStage::Resting;
        self.dirty.insert(Work::Context(key.clone()));
        Some(context)
    }

    pub(super) fn pod_read(&mut self, key: &ObjectKey, uid: &str, answer: Answer, now: Moment) {
        let Some(context) = self.landed(key, uid) else {
            return;
        };
        let Answer::PodRead(answer) = answer else { return };
        match answer {
            Ok(Some(pod)) => {
                context.served = false;
                context.retry.succeeded();
                let is_owner =
                    pod.metadata.uid.is_some() && pod.metadata.uid.as_deref() == context.owner_uid();
                let is_over = matches!(pod.status.phase.as_deref(), Some("Succeeded" | "Failed"));
                let serves = is_owner && !is_over && pod.metadata.deletion_timestamp.is_none();
                context.pod = if serves {
                    PodKnown::Read(pod)
                } else {
                    PodKnown::Gone
                };
            }
            Ok(None) => context.pod = PodKnown::Gone,
            Err(_) => context.retry.failed(now),
        }
    }

    /// Sorts the pod's claims.
    fn standing(&mut self, key: &ObjectKey, pod: &Pod, now: Moment) -> Standing {
        let resolved = self.resolve_claims(&key.namespace, pod);
        for (_, resolved) in &resolved {
            if let Resolved::Claim(claim) | Resolved::NotOwned(claim) = resolved {
                self.users.entry(claim.clone()).or_default().insert(key.clone());
            }
        }
        for entry in &pod.spec.resource_claims {
            if let Some(name) = &entry.source.resource_claim_name {
                let claim = ObjectKey::new(key.namespace.clone(), name.clone());
                self.users.entry(claim).or_default().insert(key.clone());
            }
        }
        let mut own: Vec<Pending> = Vec::new();
        let mut distinct = 0;
        let mut all = 0;
        let mut rest = false;
        let mut problems: Vec<(&'static str, String)> = Vec::new();
        for (pod_claim_name, resolved) in resolved {
            let claim_key = match resolved {
                Resolved::NotNeeded => continue,
                Resolved::Awaited => {
                    rest = true;
                    continue;
                }
                Resolved::NotOwned(claim) => {
                    let message = format!(
                        "ResourceClaim {claim} was not made for this pod although it has the name of its claim \"{pod_claim_name}\": delete it, or rename the pod"
                    );
                    problems.push(("ClaimNotOwned", message));
                    rest = true;
                    continue;
                }
                Resolved::Claim(claim) => claim,
            };
            let Some(claim) = self.claims.get(&claim_key) else {
                continue;
            };
            if !claim.is_delayed() || (claim.is_allocated() && !claim.is_asked_back()) {
                continue;
            }
            all += 1;
            let class_name = claim.object.spec.resource_class_name.clone();
            let Some(class) = self.classes.get(&class_name).cloned() else {
                let message = format!(
                    "resource class \"{class_name}\" of claim {claim_key} does not exist: create the class, or let the claim name another"
                );
                problems.push(("ResourceClassMissing", message));
                rest = true;
                continue;
            };
            if !self.is_own_class(&class_name) {
                continue;
            }
            // All of a pod's claims are allocated together: one that is under way or going holds up the others.
            let unsettled = claim.unsettled_until(now);
            if claim.is_asked_back() || claim.stage != ClaimStage::Resting || unsettled.is_some() {
                rest = true;
                if let Some(moment) = unsettled {
                    self.wake_at(moment, Work::Context(key.clone()));
                }
                continue;
            }
            let to_allocate = ClaimToAllocate {
                pod_claim_name: pod_claim_name.clone(),
                claim: claim.object.clone(),
                class,
            };
            let before = own.iter().find(|pending| pending.key == claim_key);
            let position = before.map_or(distinct, |pending| pending.position);
            distinct = distinct.max(position + 1);
            own.push(Pending {
                pod_claim_name,
                key: claim_key,
                position,
                to_allocate,
            });
        }
        // In one report, since only the last one is known not to be repeated.
        if let Some((reason, _)) = problems.first() {
            let messages: Vec<&str> = problems.iter().map(|(_, message)| message.as_str()).collect();
            self.report_pod(key, reason, messages.join("; "));
        }
        if rest || own.is_empty() {
            Standing::Rest
        } else {
            Standing::Pending { own, all }
        }
    }

    fn judge_or_act(&mut self, key: &ObjectKey, pod: &Arc<Pod>, own: &[Pending], all: usize, now: Moment) {
        let Some(context) = self.contexts.get(key) else {
            return;
        };
        let asked = distinct(own);
        let basis = Basis {
            nodes: context.nodes(own),
            claims: asked
                .iter()
                .map(|claim| {
                    let uid = claim.to_allocate.claim.metadata.uid.clone().unwrap_or_default();
                    (uid, claim.to_allocate.class.metadata.resource_version.clone())
                })
                .collect(),
            epoch: context.epoch,
        };
        if context.stuck.as_ref() == Some(&basis) {
            self.wake.end(key);
            self.begin_to_wait(key, now);
            return;
        }
        match &context.verdict {
            Some((judged, verdict)) if *judged == basis => {
                let verdict = verdict.clone();
                self.act(key, pod, own, all, &basis, &verdict, now);
            }
            _ => {
                let uid = context.uid().to_owned();
                let claims = asked.iter().map(|claim| claim.to_allocate.clone()).collect();
                let nodes = basis.nodes.clone();
                let pod = pod.clone();
                self.ask(key, ContextStage::Judging);
                self.send(
                    Flight::Judge {
                        context: key.clone(),
                        uid,
                        basis,
                    },
                    |id| Command::CallDriver {
                        id,
                        request: DriverRequest::UnsuitableNodes { pod, claims, nodes },
                    },
                );
            }
        }
    }

    pub(super) fn judged(&mut self, key: &ObjectKey, uid: &str, basis: Basis, answer: Answer, now: Moment) {
        let Some(context) = self.landed(key, uid) else {
            return;
        };
        let Answer::Judged(answer) = answer else { return };
        let by_recheck = std::mem::take(&mut context.by_recheck);
        match answer {
            Ok(verdict) if verdict.len() == basis.claims.len() => {
                context.retry.succeeded();
                context.stuck = None;
                // A basis with other nodes or a new offer lets the refused nodes be tried again.
                if context
                    .verdict
                    .as_ref()
                    .is_some_and(|(before, _)| before.claims != basis.claims)
                {
                    context.refused.clear();
                }
                let helped = context.verdict.as_ref().is_some_and(|(before, old)| {
                    before.nodes == basis.nodes && bad_nodes(old) > bad_nodes(&verdict)
                });
                context.verdict = Some((basis, verdict));
                self.statistics.caught_by_recheck += u64::from(by_recheck && helped);
            }
            Ok(verdict) => {
                context.retry.failed(now);
                let message = format!(
                    "the driver answered for {} of {} claims",
                    verdict.len(),
                    basis.claims.len()
                );
                self.report_pod(key, "DriverMisbehaved", message);
            }
            Err(error) => {
                if error.kind == CallErrorKind::Invalid {
                    context.stuck = Some(basis);
                    self.begin_to_wait(key, now);
                } else {
                    context.retry.failed(now);
                }
                self.report_call(key, &error.subject, error.reason, error.message);
            }
        }
    }

    /// The verdict stands: allocate, or say where the pod cannot go.
    #[expect(
        clippy::too_many_arguments,
        reason = "one step of one decision, called from one place"
    )]
    fn act(
        &mut self,
        key: &ObjectKey,
        pod: &Arc<Pod>,
        own: &[Pending],
        all: usize,
        basis: &Basis,
        verdict: &[Verdict],
        now: Moment,
    ) {
        let Some(context) = self.contexts.get(key) else {
            return;
        };
        let mut reasons: Vec<BTreeMap<String, String>> = own
            .iter()
            .filter_map(|claim| verdict.get(claim.position))
            .map(|verdict| verdict.unsuitable_nodes.clone())
            .collect();
        for reasons in &mut reasons {
            reasons.retain(|node, _| basis.nodes.contains(node));
            for (node, reason) in &context.refused {
                if basis.nodes.contains(node) {
                    reasons.entry(node.clone()).or_insert_with(|| reason.clone());
                }
            }
        }
        let object = context.object.clone();
        let selected = &object.spec.selected_node;
        let selected_fits =
            !selected.is_empty() && reasons.iter().all(|reasons| !reasons.contains_key(selected));
        if selected_fits {
            let consumer = Consumer {
                context: key.clone(),
                context_uid: context.uid().to_owned(),
                pod_uid: pod.metadata.uid.clone().unwrap_or_default(),
            };
            let claims: Vec<_> = own
                .iter()
                .map(|claim| (claim.pod_claim_name.clone(), claim.key.clone()))
                .collect();
            self.ask(key, ContextStage::Allocating);
            if self
                .start_batch(Some(consumer), Some(selected.clone()), &claims)
                .is_none()
            {
                self.set_stage(key, ContextStage::Resting);
            }
            return;
        }
        let any_unsuitable = reasons.iter().any(|reasons| !reasons.is_empty());
        let without_place = !basis.nodes.is_empty()
            && basis
                .nodes
                .iter()
                .all(|node| reasons.iter().any(|reasons| reasons.contains_key(node)));
        if any_unsuitable {
            self.begin_to_wait(key, now);
        }
        if without_place {
            self.wake.end(key);
            self.report_no_place(key, own, &reasons);
        }
        let must_write = any_unsuitable || selected.is_empty() || all > 1;
        let entries: Vec<ResourceClaimSchedulingStatus> = own
            .iter()
            .zip(&reasons)
            .map(|(claim, reasons)| ResourceClaimSchedulingStatus {
                name: claim.pod_claim_name.clone(),
                unsuitable_nodes: listed(&object, reasons),
            })
            .collect();
        if must_write && entries.iter().any(|entry| !stands(&object, entry)) {
            let uid = object.metadata.uid.clone().unwrap_or_default();
            self.set_stage(key, ContextStage::Publishing);
            self.send(
                Flight::Publish {
                    context: key.clone(),
                    uid: uid.clone(),
                },
                |id| Command::WriteContext {
                    id,
                    key: key.clone(),
                    uid,
                    entries,
                },
            );
        }
    }

    pub(super) fn published(&mut self, key: &ObjectKey, uid: &str, answer: Answer, now: Moment) {
        let Some(context) = self.landed(key, uid) else {
            return;
        };
        match answer {
            Answer::ContextWritten(Outcome::Done(object)) => {
                context.retry.succeeded();
                if newer(
                    context.object.metadata.resource_version.as_deref(),
                    object.metadata.resource_version.as_deref(),
                ) && object.metadata.uid.as_deref() == Some(uid)
                {
                    context.object = object;
                }
            }
            // Gone, most often: the pod has been bound or deleted. What fails on and on is there, and somebody must know.
            Answer::ContextWritten(Outcome::Refused(message) | Outcome::Unknown(message)) => {
                context.retry.failed(now);
                if context.retry.failures() > WRITES_BEFORE_REPORT {
                    let message = format!("the scheduler cannot be answered: {message}");
                    self.report_pod(key, "AnswerRefused", message);
                }
            }
            Answer::ContextWritten(Outcome::Conflict(_)) => context.retry.failed(now),
            _ => {}
        }
    }

    /// A batch for this context is over.
    pub(super) fn context_batch_ended(
        &mut self,
        consumer: &Consumer,
        node: Option<&str>,
        failure: Option<&Failure>,
        now: Moment,
    ) {
        let key = &consumer.context;
        let epoch = self.epoch;
        self.wake.end(key);
        let Some(context) = self.landed(key, &consumer.context_uid) else {
            return;
        };
        match failure {
            None => {
                context.retry.succeeded();
                context.refusals.succeeded();
                context.served = true;
                context.waiting = None;
                context.verdict = None;
                context.reported = None;
            }
            Some(Failure::Withdrawn) => context.verdict = None,
            Some(Failure::Refused(message)) => {
                context.retry.failed(now);
                let message = format!("the allocation could not be recorded: {message}");
                self.report_pod(key, "AllocationNotRecorded", message);
            }
            Some(Failure::Driver(error)) => {
                let mut again = None;
                match error.kind {
                    // What has changed while the driver was asked may have put it right.
                    CallErrorKind::Invalid | CallErrorKind::Retry if context.asked < epoch => {
                        context.epoch = epoch;
                        context.retry.failed(now);
                    }
                    CallErrorKind::Invalid => {
                        context.stuck = context.verdict.as_ref().map(|(basis, _)| basis.clone())
                    }
                    // The node is told to the scheduler as unsuitable, so that the pod can go elsewhere.
                    CallErrorKind::Retry => {
                        if let Some(node) = node {
                            context.refused.insert(node.to_owned(), error.message.clone());
                        }
                        context.refusals.failed(now);
                        again = context.refusals.wait_until(now);
                    }
                    CallErrorKind::TimedOut => context.retry.failed(now),
                }
                if let Some(moment) = again {
                    self.wake_at(moment, Work::Context(key.clone()));
                }
                self.begin_to_wait(key, now);
                if error.kind != CallErrorKind::Retry {
                    self.report_call(key, &error.subject, error.reason, error.message.clone());
                }
            }
        }
    }

    fn begin_to_wait(&mut self, key: &ObjectKey, now: Moment) {
        let Some(context) = self.contexts.get_mut(key) else {
            return;
        };
        if context.waiting.is_none() {
            let priority = match &context.pod {
                PodKnown::Read(pod) => pod.spec.priority.unwrap_or_default(),
                PodKnown::Unread | PodKnown::Gone => 0,
            };
            let recheck = now.after(spread(context.uid(), RECHECK, RECHECK_SPREAD));
            context.waiting = Some(Waiting {
                priority,
                since: now,
                recheck,
            });
            // What has changed since the driver was asked went to those who waited already.
            if context.asked < self.epoch {
                self.wake.join(key.clone());
            }
            self.wake_at(recheck, Work::Recheck(key.clone()));
        }
    }

    /// Judges a waiting pod again although nothing is known to have changed.
    pub(super) fn recheck_context(&mut self, key: &ObjectKey, now: Moment) {
        let Some(context) = self.contexts.get_mut(key) else {
            return;
        };
        let next = now.after(spread(context.uid(), RECHECK, RECHECK_SPREAD));
        // It may have stopped waiting and begun again since this was set.
        let Some(waiting) = context.waiting.as_mut().filter(|waiting| waiting.recheck <= now) else {
            return;
        };
        waiting.recheck = next;
        context.by_recheck = context.stage == ContextStage::Resting;
        self.epoch += 1;
        context.offered(self.epoch);
        self.wake_at(next, Work::Recheck(key.clone()));
        self.dirty.insert(Work::Context(key.clone()));
    }

    fn report_no_place(&mut self, key: &ObjectKey, own: &[Pending], reasons: &[BTreeMap<String, String>]) {
        let sentences: Vec<String> = own
            .iter()
            .zip(reasons)
            .filter(|(_, reasons)| !reasons.is_empty())
            .map(|(claim, reasons)| {
                format!(
                    "claim \"{}\" fits on no node: {}",
                    claim.pod_claim_name,
                    summary(reasons)
                )
            })
            .collect();
        self.report_pod(key, "NoSuitableDevice", sentences.join("; "));
    }

    /// Reports a driver's error to everyone who can act on it: the pod's user, and whoever owns the object at fault.
    fn report_call(&mut self, key: &ObjectKey, subject: &Subject, reason: &str, message: String) {
        match subject {
            Subject::Class(name) => {
                let text = format!("resource class \"{name}\": {message}");
                if self.report_pod(key, reason, text) {
                    self.report_class(name, reason, message);
                }
            }
            Subject::Claim(claim) => {
                self.report_pod(key, reason, format!("claim {claim}: {message}"));
                self.report_claim(claim, reason, message);
            }
            Subject::Call => {
                self.report_pod(key, reason, message);
            }
        }
    }

    /// Reports something about a context's pod, unless it was the last thing reported. The answer is whether it was new.
    fn report_pod(&mut self, key: &ObjectKey, reason: &str, message: String) -> bool {
        let Some(context) = self.contexts.get_mut(key) else {
            return false;
        };
        if context.reported.as_deref() == Some(&message) {
            return false;
        }
        let Some(uid) = context.owner_uid().map(str::to_owned) else {
            return false;
        };
        context.reported = Some(message.clone());
        self.report(
            Regarding::Pod {
                key: key.clone(),
                uid,
            },
            reason,
            message,
        );
        true
    }
}

/// Each claim once, in the order of their positions.
fn distinct(own: &[Pending]) -> Vec<&Pending> {
    let mut known = BTreeSet::new();
    own.iter().filter(|claim| known.insert(claim.position)).collect()
}

fn bad_nodes(verdict: &[Verdict]) -> usize {
    verdict.iter().map(|verdict| verdict.unsuitable_nodes.len()).sum()
}

/// The nodes for an entry, cut to what the API takes: the selected node first, then the scheduler's, then earlier ones.
fn listed(object: &PodSchedulingContext, reasons: &BTreeMap<String, String>) -> Vec<String> {
    let rank = |node: &String| {
        if *node == object.spec.selected_node {
            0
        } else if object.spec.potential_nodes.contains(node) {
            1
        } else {
            2
        }
    };
    // What is no name of a node, the server does not take: `selectedNode` it takes as it comes.
    let mut nodes: Vec<&String> = reasons.keys().filter(|node| is_node_name(node)).collect();
    nodes.sort_by_key(|node| (rank(node), *node));
    let mut nodes: Vec<String> = nodes.into_iter().take(NODE_LIST_MAX).cloned().collect();
    nodes.sort();
    nodes
}

/// Whether the server takes it for the name of a node: a DNS subdomain.
fn is_node_name(name: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let is_label = |label: &str| {
        !label.is_empty() && label.bytes().all(is_inner) && !label.starts_with('-') && !label.ends_with('-')
    };
    name.len() <= 253 && name.split('.').all(is_label)
}

/// Whether the context says this already, in whatever order.
fn stands(object: &PodSchedulingContext, entry: &ResourceClaimSchedulingStatus) -> bool {
    object.status.resource_claims.iter().any(|known| {
        let set = |nodes: &[String]| nodes.iter().cloned().collect::<BTreeSet<_>>();
        known.name == entry.name && set(&known.unsuitable_nodes) == set(&entry.unsuitable_nodes)
    })
}
