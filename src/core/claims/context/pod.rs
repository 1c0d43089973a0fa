//! Reads a context's pod once: when a claim generated for the pod appears, or else when the context appears.

use std::sync::Arc;
use std::time::Duration;

use crate::api::resource::{Pod, pod_owner_of};
use crate::core::claims::event::{Answer, CallId, Command, Moment, ObjectKey};
use crate::core::claims::resolve::{Resolved, is_generated};
use crate::core::claims::state::{ControllerState, PendingCall};

use super::{ContextPhase, PodKnown};

/// How long a pod that was read before its context existed need not be read again. The scheduler writes the context some milliseconds after
/// the claim; after a longer time the pod may have changed.
const FRESH: Duration = Duration::from_secs(10);

/// A pod that is read before its context exists.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::core::claims) enum EarlyPod {
    Reading(CallId),
    /// The pod, and when it was read.
    Read(Arc<Pod>, Moment),
}

impl ControllerState {
    /// Reads the owner pod of a generated claim before the context needs it.
    pub(in crate::core::claims) fn read_pod_early(&mut self, claim: &ObjectKey) {
        let object = self.claims.get(claim).map(|claim| &claim.object);
        let object = object.filter(|object| is_generated(object));
        let Some(owner) = object.and_then(|object| pod_owner_of(&object.metadata)) else {
            return;
        };
        let key = ObjectKey::new(claim.namespace.clone(), owner.name.clone());
        if !self.is_ready() || self.contexts.contains_key(&key) || self.early_pods.contains_key(&owner.uid) {
            return;
        }
        let uid = owner.uid.clone();
        let pending_call = PendingCall::EarlyPod { uid: uid.clone() };
        let id = self.send(pending_call, |id| Command::ReadPod { id, key });
        self.early_pods.insert(uid, EarlyPod::Reading(id));
    }

    /// Keeps a pod that was read before its context exists.
    pub(in crate::core::claims) fn early_pod_read(&mut self, uid: &str, answer: Answer, now: Moment) {
        let Some(early) = self.early_pods.get_mut(uid) else {
            return;
        };
        match answer {
            Answer::PodRead(Ok(Some(pod))) if pod.metadata.uid.as_deref() == Some(uid) => {
                *early = EarlyPod::Read(pod, now);
            }
            // After any error the context reads the pod itself.
            _ => {
                self.early_pods.remove(uid);
            }
        }
    }

    /// Reads the pod if it may need this driver: contexts of other drivers cost no request.
    pub(super) fn read_pod(&mut self, key: &ObjectKey, now: Moment) {
        let Some(context) = self.contexts.get(key) else {
            return;
        };
        let Some(owner) = context.owner_uid().map(str::to_owned) else {
            return;
        };
        let mut made_for_it = self.claims_by_owner.get(&owner).into_iter().flatten();
        let first = ObjectKey::new(key.namespace.clone(), "");
        let anybodys = self.open_candidates.range(first..).next();
        if !made_for_it.any(|claim| self.candidates.contains(claim))
            && anybodys.is_none_or(|claim| claim.namespace != key.namespace)
        {
            return;
        }
        let uid = context.uid().to_owned();
        match self.early_pods.remove(&owner) {
            Some(EarlyPod::Reading(id)) => {
                self.set_stage(key, ContextPhase::Reading);
                let context = key.clone();
                let early = true;
                self.pending_calls
                    .insert(id, PendingCall::Pod { context, uid, early });
            }
            Some(EarlyPod::Read(pod, at)) if at.after(FRESH) > now => {
                self.pod_read(key, &uid, true, Answer::PodRead(Ok(Some(pod))), now);
            }
            Some(EarlyPod::Read(..)) | None => self.send_read_pod(key),
        }
    }

    pub(super) fn send_read_pod(&mut self, key: &ObjectKey) {
        let Some(context) = self.contexts.get(key) else {
            return;
        };
        let uid = context.uid().to_owned();
        self.set_stage(key, ContextPhase::Reading);
        let pending_call = PendingCall::Pod {
            context: key.clone(),
            uid,
            early: false,
        };
        self.send(pending_call, |id| Command::ReadPod { id, key: key.clone() });
    }

    /// Handles the pod of a context. `early` means that the read was sent before the context existed.
    pub(in crate::core::claims) fn pod_read(
        &mut self,
        key: &ObjectKey,
        uid: &str,
        early: bool,
        answer: Answer,
        now: Moment,
    ) {
        let Answer::PodRead(answer) = answer else { return };
        // The claim names in the pod's status may have been missing at the time of an early read. The scheduler has seen them, so read
        // again.
        if early
            && let Ok(Some(pod)) = &answer
            && self
                .resolve_claims(&key.namespace, pod)
                .iter()
                .any(|(_, resolved)| *resolved == Resolved::Awaited)
        {
            if self.contexts.get(key).is_some_and(|context| context.uid() == uid) {
                self.send_read_pod(key);
            }
            return;
        }
        let Some(context) = self.take_pending(key, uid) else {
            return;
        };
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
}
