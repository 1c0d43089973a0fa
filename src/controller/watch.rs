//! Watches become events. Each kind keeps its own order; lists replace what was known.

use std::fmt::Debug;
use std::sync::Arc;

use futures::stream::{self, BoxStream, StreamExt as _};
use kube::ResourceExt as _;
use kube::api::Api;
use kube::runtime::{WatchStreamExt as _, watcher};

use crate::api::resource::{PodSchedulingContext, ResourceClaim, ResourceClass};
use crate::core::protocol::{Event, ObjectKey};

use super::trim::{Kept, Watched};

/// How one kind's watch becomes events.
struct Kind<K> {
    all: fn(Vec<Arc<K>>) -> Event,
    one: fn(Arc<K>) -> Event,
    gone: fn(&K) -> Event,
}

/// Everything that the controller watches. Never ends; errors are logged and tried again with a growing delay.
pub(super) fn all(client: &kube::Client) -> stream::SelectAll<BoxStream<'static, Event>> {
    stream::select_all([
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
                all: Event::Claims,
                one: Event::Claim,
                gone: |claim: &ResourceClaim| Event::ClaimGone {
                    key: ObjectKey::of(&claim.metadata),
                    uid: claim.metadata.uid.clone().unwrap_or_default(),
                },
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
    ])
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
