//! Evaluates nodes for a pod, then publishes the unsuitable ones or allocates.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use crate::api::resource::{NODE_LIST_MAX, Pod, PodSchedulingContext, ResourceClaimSchedulingStatus};
use crate::core::claims::event::{
    Answer, CallErrorKind, Command, DriverRequest, Moment, ObjectKey, Outcome, summary,
};
use crate::core::claims::retry::WRITES_BEFORE_REPORT;
use crate::core::claims::state::{ControllerState, PendingCall, Work, newer};
use crate::core::claims::statistics::Statistics;
use crate::core::claims::transaction::{Consumer, Failure};
use crate::driver::Verdict;

use super::standing::distinct;
use super::{ContextPhase, EvaluationInput, Pending};

/// Minimum time between two reports that a pod fits nowhere. The counts in the message change with every allocation for other pods.
/// client-go's event recorder is as slow.
const NO_PLACE_AGAIN: Duration = Duration::from_secs(300);

impl ControllerState {
    /// Reports that a pod fits nowhere and why, but not with every change of the counts.
    fn report_no_place(
        &mut self,
        key: &ObjectKey,
        own: &[Pending],
        reasons: &[BTreeMap<String, String>],
        now: Moment,
    ) {
        let told = self.contexts.get(key).and_then(|context| context.told_no_place);
        if told.is_some_and(|told| told.after(NO_PLACE_AGAIN) > now) {
            return;
        }
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
        if self.report_pod(key, "NoSuitableDevice", sentences.join("; "))
            && let Some(context) = self.contexts.get_mut(key)
        {
            context.told_no_place = Some(now);
        }
    }

    pub(super) fn evaluate_or_act(
        &mut self,
        key: &ObjectKey,
        pod: &Arc<Pod>,
        own: &[Pending],
        all: usize,
        now: Moment,
    ) {
        let Some(context) = self.contexts.get(key) else {
            return;
        };
        let asked = distinct(own);
        let input = EvaluationInput {
            nodes: context.nodes(own),
            claims: asked
                .iter()
                .map(|claim| {
                    let uid = claim.to_allocate.claim.metadata.uid.clone().unwrap_or_default();
                    (uid, claim.to_allocate.class.metadata.resource_version.clone())
                })
                .collect(),
            capacity_generation: context.capacity_generation,
            rechecks: context.rechecks,
        };
        if context.stuck.as_ref() == Some(&input) {
            self.wake.end(key);
            self.begin_to_wait(key, now);
            return;
        }
        match &context.verdict {
            Some((judged, verdict)) if *judged == input => {
                let verdict = verdict.clone();
                self.act(key, pod, own, all, &input, &verdict, now);
            }
            // The driver is evaluating a shared claim for another pod.
            _ if self.is_any_judged(own) => {}
            _ => {
                let uid = context.uid().to_owned();
                let keys: Vec<ObjectKey> = asked.iter().map(|claim| claim.key.clone()).collect();
                for key in &keys {
                    if let Some(claim) = self.claims.get_mut(key) {
                        claim.judged_now = true;
                    }
                }
                let claims = asked.iter().map(|claim| claim.to_allocate.clone()).collect();
                let nodes = input.nodes.clone();
                let pod = pod.clone();
                self.ask(key, ContextPhase::Judging);
                self.send(
                    PendingCall::Judge {
                        context: key.clone(),
                        uid,
                        claims: keys,
                        input,
                    },
                    |id| Command::CallDriver {
                        id,
                        request: DriverRequest::UnsuitableNodes { pod, claims, nodes },
                    },
                );
            }
        }
    }

    /// Whether the driver is evaluating one of these claims for another pod.
    fn is_any_judged(&self, own: &[Pending]) -> bool {
        own.iter()
            .any(|claim| self.claims.get(&claim.key).is_some_and(|claim| claim.judged_now))
    }

    /// Ends the evaluation of these claims. Contexts that waited for it proceed.
    pub(in crate::core::claims) fn end_judging(&mut self, claims: &[ObjectKey], input: &EvaluationInput) {
        for (key, (uid, _)) in claims.iter().zip(&input.claims) {
            let Some(claim) = self.claims.get_mut(key).filter(|claim| claim.uid() == uid) else {
                continue;
            };
            claim.judged_now = false;
            self.work_queue.insert(Work::Claim(key.clone()));
            self.touch_users(key);
        }
    }

    pub(in crate::core::claims) fn judged(
        &mut self,
        key: &ObjectKey,
        uid: &str,
        input: EvaluationInput,
        answer: Answer,
        now: Moment,
    ) {
        let Some(context) = self.take_pending(key, uid) else {
            return;
        };
        let Answer::Judged(answer) = answer else { return };
        let by_recheck = std::mem::take(&mut context.by_recheck);
        match answer {
            Ok(verdict) if verdict.len() == input.claims.len() => {
                context.retry.succeeded();
                context.stuck = None;
                // Other claims or classes: the refused nodes may be tried again.
                if context
                    .verdict
                    .as_ref()
                    .is_some_and(|(before, _)| before.claims != input.claims)
                {
                    context.refused.clear();
                }
                let helped = context.verdict.as_ref().is_some_and(|(before, old)| {
                    before.nodes == input.nodes && bad_nodes(old) > bad_nodes(&verdict)
                });
                context.verdict = Some((input, verdict));
                self.statistics.caught_by_recheck += u64::from(by_recheck && helped);
            }
            Ok(verdict) => {
                context.retry.failed(now);
                let message = format!(
                    "the driver answered for {} of {} claims",
                    verdict.len(),
                    input.claims.len()
                );
                self.report_pod(key, "DriverMisbehaved", message);
            }
            Err(error) => {
                if error.kind == CallErrorKind::Invalid {
                    context.stuck = Some(input);
                    let pod = context.known_pod();
                    self.begin_to_wait(key, now);
                    if let Some(pod) = pod {
                        self.give_up_the_rest(key, &pod);
                    }
                } else {
                    context.retry.failed(now);
                }
                self.report_call(key, &error.subject, error.reason, error.message);
            }
        }
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "one step of one decision, called from one place"
    )]
    pub(super) fn act(
        &mut self,
        key: &ObjectKey,
        pod: &Arc<Pod>,
        own: &[Pending],
        all: usize,
        input: &EvaluationInput,
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
        let asked: BTreeSet<&String> = input.nodes.iter().collect();
        for reasons in &mut reasons {
            reasons.retain(|node, _| asked.contains(node));
            for (node, reason) in &context.refused {
                if asked.contains(node) {
                    reasons.entry(node.clone()).or_insert_with(|| reason.clone());
                }
            }
        }
        let object = context.object.clone();
        let selected = &object.spec.selected_node;
        let mine: BTreeSet<&str> = own.iter().map(|claim| claim.pod_claim_name.as_str()).collect();
        let selected_fits = !selected.is_empty()
            && reasons.iter().all(|reasons| !reasons.contains_key(selected))
            && !self.is_refused_by_others(&object, pod, &mine);
        if selected_fits && self.is_any_judged(own) {
            return;
        }
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
            self.ask(key, ContextPhase::Allocating);
            self.note_awake(key, now);
            let transaction = self.start_transaction(Some(consumer), Some(selected.clone()), &claims);
            if let Some(context) = self.contexts.get_mut(key) {
                context.transaction = transaction;
                if transaction.is_none() {
                    context.stage = ContextPhase::Resting;
                }
            }
            return;
        }
        let any_unsuitable = reasons.iter().any(|reasons| !reasons.is_empty());
        let without_place = !input.nodes.is_empty()
            && input
                .nodes
                .iter()
                .all(|node| reasons.iter().any(|reasons| reasons.contains_key(node)));
        self.set_trouble(key, any_unsuitable.then_some(Statistics::SOME_NODES));
        if any_unsuitable {
            self.begin_to_wait(key, now);
        }
        // First roll back the pod's own allocations: that may free the devices it needs.
        if without_place && self.give_up_the_rest(key, pod) {
            return;
        }
        if without_place {
            self.set_trouble(key, Some("NoSuitableDevice"));
            self.stays_asleep(key);
            self.wake.end(key);
            self.report_no_place(key, own, &reasons, now);
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
            self.set_stage(key, ContextPhase::Publishing);
            self.send(
                PendingCall::Publish {
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
        } else {
            // The wake-up changed nothing for this pod.
            self.stays_asleep(key);
        }
    }

    pub(in crate::core::claims) fn published(
        &mut self,
        key: &ObjectKey,
        uid: &str,
        answer: Answer,
        now: Moment,
    ) {
        let Some(context) = self.take_pending(key, uid) else {
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
                self.note_awake(key, now);
            }
            // Most often the context is gone because the pod was bound or deleted. If writes keep failing, it exists: report that.
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

    /// Handles the end of a context's transaction.
    pub(in crate::core::claims) fn context_transaction_ended(
        &mut self,
        consumer: &Consumer,
        node: Option<&str>,
        failure: Option<&Failure>,
        now: Moment,
    ) {
        let key = &consumer.context;
        let capacity_generation = self.capacity_generation;
        match failure {
            None => self.wake.succeeded(key),
            Some(_) => self.wake.end(key),
        }
        let Some(context) = self.take_pending(key, &consumer.context_uid) else {
            return;
        };
        context.transaction = None;
        match failure {
            None => {
                context.retry.succeeded();
                context.refusals.succeeded();
                context.served = true;
                context.waiting = None;
                context.verdict = None;
                context.reported = None;
                context.told_no_place = None;
                self.set_trouble(key, None);
            }
            Some(Failure::Withdrawn) => context.verdict = None,
            Some(Failure::Refused(message)) => {
                context.retry.failed(now);
                let message = format!("the allocation could not be recorded: {message}");
                self.report_pod(key, "AllocationNotRecorded", message);
            }
            Some(Failure::Driver(error)) => {
                let mut again = None;
                // A change since the driver was called may have removed the cause.
                let changed = context.asked < capacity_generation && error.kind != CallErrorKind::TimedOut;
                if changed {
                    context.capacity_generation = capacity_generation;
                }
                match error.kind {
                    CallErrorKind::Invalid if changed => context.retry.failed(now),
                    CallErrorKind::Invalid => {
                        context.stuck = context.verdict.as_ref().map(|(input, _)| input.clone());
                    }
                    // The node is published as unsuitable, so that the scheduler can select another.
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
                self.set_trouble(key, Some(error.reason));
                if error.kind != CallErrorKind::Retry {
                    self.report_call(key, &error.subject, error.reason, error.message.clone());
                }
            }
        }
    }
}

fn bad_nodes(verdict: &[Verdict]) -> usize {
    verdict.iter().map(|verdict| verdict.unsuitable_nodes.len()).sum()
}

/// The unsuitable nodes for an entry, at most as many as the API accepts: the selected node first, then potential nodes, then earlier ones.
fn listed(object: &PodSchedulingContext, reasons: &BTreeMap<String, String>) -> Vec<String> {
    // The server rejects invalid node names in an entry, but accepts any `selectedNode`.
    let names = reasons.keys().filter(|node| is_node_name(node));
    if reasons.len() <= NODE_LIST_MAX {
        return names.cloned().collect();
    }
    let potential: BTreeSet<&String> = object.spec.potential_nodes.iter().collect();
    let rank = |node: &String| {
        if *node == object.spec.selected_node {
            0
        } else if potential.contains(node) {
            1
        } else {
            2
        }
    };
    let mut nodes: Vec<&String> = names.collect();
    nodes.sort_by_cached_key(|node| (rank(node), *node));
    let mut nodes: Vec<String> = nodes.into_iter().take(NODE_LIST_MAX).cloned().collect();
    nodes.sort();
    nodes
}

/// Whether the server accepts `name` as a node name: a DNS subdomain.
fn is_node_name(name: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let is_label = |label: &str| {
        !label.is_empty() && label.bytes().all(is_inner) && !label.starts_with('-') && !label.ends_with('-')
    };
    name.len() <= 253 && name.split('.').all(is_label)
}

/// Whether the context already has this entry, in any order of nodes.
fn stands(object: &PodSchedulingContext, entry: &ResourceClaimSchedulingStatus) -> bool {
    object.status.resource_claims.iter().any(|known| {
        let (known_nodes, nodes) = (&known.unsuitable_nodes, &entry.unsuitable_nodes);
        let same = || known_nodes.iter().collect::<BTreeSet<_>>() == nodes.iter().collect::<BTreeSet<_>>();
        known.name == entry.name && (known_nodes == nodes || same())
    })
}
