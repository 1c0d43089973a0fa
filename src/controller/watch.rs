//! Turns watches into events. Each kind keeps its own order; a list replaces the known objects.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;

use futures::stream::{self, BoxStream, StreamExt as _};
use kube::ResourceExt as _;
use kube::api::Api;
use kube::runtime::{WatchStreamExt as _, watcher};

use crate::api::resource::{PodSchedulingContext, ResourceClaim, ResourceClass};
use crate::core::claims::{Event, ObjectKey};

use super::prune::{Kept, Watched};

/// The events of one kind's watch.
struct Kind<K> {
    all: fn(Vec<Arc<K>>) -> Event,
    one: fn(Arc<K>) -> Event,
    gone: fn(&K) -> Event,
}

/// Watches. They never end; errors are logged and retried with a growing delay.
pub(super) type Watches = stream::SelectAll<BoxStream<'static, Event>>;

/// The watches that a controller starts before it leads, and keeps afterwards.
pub(super) struct Standby {
    pub(super) watches: Watches,
    known: Known,
}

impl Standby {
    pub(super) fn new(client: &kube::Client) -> Self {
        let watches = stream::select_all([
            events(
                Api::all(client.clone()),
                &Kind {
                    all: Event::Classes,
                    one: Event::Class,
                    gone: |class: &ResourceClass| Event::ClassGone(class.name_any()),
                },
            ),
            events(
                Api::all(client.clone()),
                &Kind {
                    all: Event::Contexts,
                    one: Event::Context,
                    gone: |context: &PodSchedulingContext| Event::ContextGone {
                        key: ObjectKey::of(&context.metadata),
                        uid: context.metadata.uid.clone().unwrap_or_default(),
                    },
                },
            ),
        ]);
        Self {
            watches,
            known: Known::default(),
        }
    }

    /// Keeps the caches current while another process leads. Never returns.
    pub(super) async fn keep(&mut self) {
        while let Some(event) = self.watches.next().await {
            self.known.see(event);
        }
    }

    /// Returns the watches, and the known objects as events.
    pub(super) fn begin(self) -> (Watches, Vec<Event>) {
        (self.watches, self.known.into_events())
    }
}

/// The claims, listed when the stream is first polled. Allocations are the only record of allocated devices, so a standby keeps no copy
/// of them: a watch may lag behind, and only a list requested after the previous leader's last write shows all of its allocations.
pub(super) fn claims(client: &kube::Client) -> BoxStream<'static, Event> {
    events(
        Api::all(client.clone()),
        &Kind {
            all: Event::Claims,
            one: Event::Claim,
            gone: |claim: &ResourceClaim| Event::ClaimGone {
                key: ObjectKey::of(&claim.metadata),
                uid: claim.metadata.uid.clone().unwrap_or_default(),
            },
        },
    )
}

/// The last state of each object that a standby watches. A kind is `None` until its first list is complete.
#[derive(Debug, Default)]
struct Known {
    classes: Option<BTreeMap<String, Arc<ResourceClass>>>,
    contexts: Option<BTreeMap<ObjectKey, Arc<PodSchedulingContext>>>,
}

impl Known {
    fn see(&mut self, event: Event) {
        let class_key = |class: &Arc<ResourceClass>| class.name_any();
        let context_key = |context: &Arc<PodSchedulingContext>| ObjectKey::of(&context.metadata);
        match event {
            Event::Classes(all) => {
                self.classes = Some(all.into_iter().map(|class| (class_key(&class), class)).collect());
            }
            Event::Class(class) => {
                if let Some(classes) = &mut self.classes {
                    classes.insert(class_key(&class), class);
                }
            }
            Event::ClassGone(name) => {
                if let Some(classes) = &mut self.classes {
                    classes.remove(&name);
                }
            }
            Event::Contexts(all) => {
                let all = all.into_iter();
                self.contexts = Some(all.map(|context| (context_key(&context), context)).collect());
            }
            Event::Context(context) => {
                if let Some(contexts) = &mut self.contexts {
                    contexts.insert(context_key(&context), context);
                }
            }
            Event::ContextGone { key, .. } => {
                if let Some(contexts) = &mut self.contexts {
                    contexts.remove(&key);
                }
            }
            // A standby watches no other kinds.
            _ => {}
        }
    }

    fn into_events(self) -> Vec<Event> {
        let classes = self
            .classes
            .map(|all| Event::Classes(all.into_values().collect()));
        let contexts = self
            .contexts
            .map(|all| Event::Contexts(all.into_values().collect()));
        classes.into_iter().chain(contexts).collect()
    }
}

fn events<K>(api: Api<Kept<K>>, kind: &'static Kind<K>) -> BoxStream<'static, Event>
where
    K: Watched + Debug + Send + Sync + 'static,
{
    let mut listed = None;
    watcher(api, watcher::Config::default())
        .default_backoff()
        .filter_map(move |result| {
            let event = match result {
                Ok(watcher::Event::Init) => {
                    listed = Some(Vec::new());
                    None
                }
                Ok(watcher::Event::InitApply(object)) => {
                    if let Some(listed) = &mut listed {
                        listed.push(object.0);
                    }
                    None
                }
                Ok(watcher::Event::InitDone) => listed.take().map(kind.all),
                Ok(watcher::Event::Apply(object)) => Some((kind.one)(object.0)),
                Ok(watcher::Event::Delete(object)) => Some((kind.gone)(&object.0)),
                Err(error) => {
                    tracing::warn!(kind = %K::kind(&()), %error, "watch failed, trying again");
                    None
                }
            };
            std::future::ready(event)
        })
        .boxed()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn context(name: &str, version: &str) -> Arc<PodSchedulingContext> {
        let metadata = json!({ "namespace": "ns", "name": name, "uid": name, "resourceVersion": version });
        Arc::new(serde_json::from_value(json!({ "metadata": metadata, "spec": {} })).unwrap())
    }

    fn class(name: &str) -> Arc<ResourceClass> {
        Arc::new(serde_json::from_value(json!({ "metadata": { "name": name }, "driverName": "d" })).unwrap())
    }

    fn after(events: impl IntoIterator<Item = Event>) -> Vec<Event> {
        let mut known = Known::default();
        events.into_iter().for_each(|event| known.see(event));
        known.into_events()
    }

    #[test]
    fn a_standby_keeps_the_last_state_of_each_object_and_nothing_of_those_that_are_gone() {
        let gone = |name: &str| Event::ContextGone {
            key: ObjectKey::new("ns", name),
            uid: name.to_owned(),
        };
        let events = after([
            Event::Contexts(vec![context("a", "1"), context("b", "2")]),
            Event::Context(context("a", "3")),
            Event::Context(context("c", "4")),
            gone("b"),
            Event::Classes(vec![class("x")]),
            Event::Class(class("y")),
            Event::ClassGone("x".to_owned()),
        ]);
        let expected = [
            Event::Classes(vec![class("y")]),
            Event::Contexts(vec![context("a", "3"), context("c", "4")]),
        ];
        assert_eq!(events, expected);
        // After a gap all objects are listed again; a deleted object only shows by its absence.
        let events = after([
            Event::Contexts(vec![context("a", "1"), context("b", "2")]),
            Event::Contexts(vec![context("b", "2")]),
        ]);
        assert_eq!(events, [Event::Contexts(vec![context("b", "2")])]);
    }

    #[test]
    fn what_was_not_listed_yet_is_not_taken_for_all_there_is() {
        assert_eq!(after([]), []);
        assert_eq!(
            after([Event::Context(context("a", "1")), Event::Class(class("x"))]),
            [],
            "a part"
        );
        assert_eq!(after([Event::Contexts(vec![])]), [Event::Contexts(vec![])]);
    }
}
