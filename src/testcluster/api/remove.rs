//! Deletion: immediately, or after the grace period once all finalizers are gone.

use serde_json::{Value, json};

use super::deletion::Deletion;
use super::kinds::{EXTENSIONS, Kind};
use super::object::{self, is_deleting, set_metadata, text};
use super::refusal::Refusal;
use super::server::{Answer, ApiServer, ListQuery, State, Target, list_of, shown};
use super::store::Key;

impl ApiServer {
    pub(crate) fn delete(&self, target: &Target, asked: &Deletion) -> Result<Answer, Refusal> {
        self.change_or_try(asked.pretends, |state| self.delete_in(state, target, asked))
    }

    fn delete_in(&self, state: &mut State, target: &Target, asked: &Deletion) -> Result<Answer, Refusal> {
        let kind = &target.kind;
        let before = state.existing(target)?.clone();
        for (key, word, wanted) in [
            ("uid", "UID", &asked.uid),
            ("resourceVersion", "ResourceVersion", &asked.version),
        ] {
            let found = text(&before, &format!("/metadata/{key}"));
            if !wanted.is_empty() && *wanted != found {
                let hint = if key == "uid" {
                    "deleted and then recreated"
                } else {
                    "modified"
                };
                let why = format!(
                    "the {word} in the precondition ({wanted}) does not match the {word} in record ({found}). The object might have been {hint}"
                );
                return Err(Refusal::conflict(kind, &target.name, &why));
            }
        }
        let grace = grace_of(kind, &before, asked);
        let mut after = (*before).clone();
        let deadline = self
            .source
            .now()
            .saturating_add(jiff::SignedDuration::from_secs(grace.unwrap_or(0)))
            .unwrap_or(jiff::Timestamp::MAX)
            .strftime("%Y-%m-%dT%H:%M:%SZ")
            .to_string();
        let fresh = !is_deleting(&before);
        let shorter = grace.is_some_and(|grace| {
            before
                .pointer("/metadata/deletionGracePeriodSeconds")
                .and_then(Value::as_i64)
                .is_none_or(|known| grace < known)
        });
        if fresh || shorter {
            set_metadata(&mut after, "deletionTimestamp", Some(deadline.into()));
            set_metadata(
                &mut after,
                "deletionGracePeriodSeconds",
                Some(grace.unwrap_or(0).into()),
            );
        }
        if kind.is("", "namespaces") {
            after["status"]["phase"] = "Terminating".into();
        }
        let answer = if may_go(kind, &after) {
            if grace.is_some() && (fresh || shorter) {
                // Stores a pod as terminating first, even if it is removed immediately.
                state.store.put(target.key(), after.clone());
            }
            state.remove(&target.key());
            if kind.returns_deleted {
                // A deleted object has the resource version of its deletion; only a pod has a deletion timestamp.
                let mut gone = if grace.is_some() { after } else { (*before).clone() };
                if !asked.pretends {
                    let version = state.store.version().to_string();
                    set_metadata(&mut gone, "resourceVersion", Some(version.into()));
                }
                shown(kind, &gone)
            } else {
                deleted_status(kind, &before)
            }
        } else if after == *before {
            shown(kind, &before)
        } else {
            if kind.generation && fresh {
                let generation = before
                    .pointer("/metadata/generation")
                    .and_then(Value::as_i64)
                    .unwrap_or(0);
                set_metadata(&mut after, "generation", Some((generation + 1).into()));
            }
            shown(kind, &state.store.put(target.key(), after))
        };
        Ok((200, answer))
    }

    pub(crate) fn delete_collection(
        &self,
        target: &Target,
        query: &ListQuery,
        asked: &Deletion,
    ) -> Result<Answer, Refusal> {
        let (metadata, items) = self.list(target, query)?;
        for item in &items {
            let one = Target {
                namespace: object::namespace(item).to_owned(),
                name: object::name(item).to_owned(),
                ..target.clone()
            };
            match self.delete(&one, asked) {
                Err(refusal) if refusal.code != 404 => return Err(refusal),
                _ => {}
            }
        }
        Ok((200, list_of(&target.kind, metadata, items)))
    }
}

impl State {
    /// Removes an object; for a CRD, also its custom objects.
    pub(crate) fn remove(&mut self, key: &Key) {
        let Some(gone) = self.store.remove(key) else {
            return;
        };
        if key.storage == format!("customresourcedefinitions.{EXTENSIONS}") {
            let group = text(&gone, "/spec/group").to_owned();
            let plural = text(&gone, "/spec/names/plural").to_owned();
            self.kinds
                .retain(|kind| kind.definition.is_none() || kind.group != group || kind.plural != plural);
            let storage = format!("{plural}.{group}");
            let orphans: Vec<Key> = self
                .store
                .all()
                .map(|(key, _)| key)
                .filter(|key| key.storage == storage)
                .cloned()
                .collect();
            for orphan in orphans {
                self.store.remove(&orphan);
            }
        }
    }
}

/// Returns whether a terminating object can be removed.
pub(crate) fn may_go(kind: &Kind, object: &Value) -> bool {
    let waits = object
        .pointer("/metadata/deletionGracePeriodSeconds")
        .and_then(Value::as_i64)
        .is_some_and(|seconds| seconds > 0);
    let finalized = !kind.is("", "namespaces") || object::list(object, "/spec/finalizers").is_empty();
    is_deleting(object) && object::list(object, "/metadata/finalizers").is_empty() && !waits && finalized
}

/// Returns the grace period; only pods have one.
fn grace_of(kind: &Kind, object: &Value, asked: &Deletion) -> Option<i64> {
    if !kind.is("", "pods") {
        return None;
    }
    let own = object
        .pointer("/spec/terminationGracePeriodSeconds")
        .and_then(Value::as_i64);
    let unscheduled = text(object, "/spec/nodeName").is_empty();
    let ended = matches!(text(object, "/status/phase"), "Succeeded" | "Failed");
    match asked.grace.or(own) {
        _ if unscheduled || ended => Some(0),
        Some(seconds) => Some(seconds.max(0)),
        None => Some(30),
    }
}

fn deleted_status(kind: &Kind, object: &Value) -> Value {
    let mut details =
        json!({ "name": object::name(object), "kind": kind.plural, "uid": object::uid(object) });
    if !kind.group.is_empty() {
        details["group"] = kind.group.clone().into();
    }
    json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details })
}
