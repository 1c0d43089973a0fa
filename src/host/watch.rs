//! The three watches of the built-in driver, from the API server to [`WatchUpdate`]s.

use std::fmt::Debug;
use std::pin::pin;

use futures::{Stream, StreamExt};
use kube::core::DeserializeGuard;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio_util::sync::CancellationToken;

/// A change of the objects of one kind.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum WatchUpdate<K, V> {
    /// The complete list of objects.
    All(Vec<(K, V)>),
    /// An object is new or has changed.
    Set(K, V),
    /// An object is deleted.
    Gone(K),
}

/// An object, or the error of decoding it. An unreadable object must not stop the watch of all others.
pub(crate) type Guarded<K> = DeserializeGuard<K>;

/// Endless events of all objects that `api` covers, with `page` objects per request in the initial list.
pub(crate) fn events<K>(
    api: Api<Guarded<K>>,
    page: u32,
) -> impl Stream<Item = watcher::Result<watcher::Event<Guarded<K>>>> + Send
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
{
    watcher(api, watcher::Config::default().page_size(page)).default_backoff()
}

/// Passes the events to `apply` until `shutdown`. `read` makes the compact form of an object; an object without one counts as
/// deleted. After a gap the objects are listed again and passed on all at once, since a deletion meanwhile shows only as
/// absence.
pub(crate) async fn follow<K, T, V>(
    events: impl Stream<Item = watcher::Result<watcher::Event<Guarded<K>>>>,
    shutdown: CancellationToken,
    read: impl Fn(Guarded<K>) -> (T, Option<V>),
    mut apply: impl FnMut(WatchUpdate<T, V>),
) where
    K: Resource<DynamicType = ()>,
{
    let kind = K::kind(&());
    let mut events = pin!(events);
    let mut listed = Vec::new();
    let mut last_error = None;
    loop {
        let event = tokio::select! {
            biased;
            () = shutdown.cancelled() => return,
            event = events.next() => event,
        };
        match event {
            Some(Ok(event)) => {
                // `Init` only starts a list, which may fail like the one before.
                if !matches!(event, watcher::Event::Init) && last_error.take().is_some() {
                    tracing::info!(kind = %kind, "the watch works again");
                }
                match event {
                    watcher::Event::Init => listed.clear(),
                    watcher::Event::InitApply(object) => {
                        let (key, value) = read(object);
                        listed.extend(value.map(|value| (key, value)));
                    }
                    watcher::Event::InitDone => apply(WatchUpdate::All(std::mem::take(&mut listed))),
                    watcher::Event::Apply(object) => match read(object) {
                        (key, Some(value)) => apply(WatchUpdate::Set(key, value)),
                        (key, None) => apply(WatchUpdate::Gone(key)),
                    },
                    watcher::Event::Delete(object) => apply(WatchUpdate::Gone(read(object).0)),
                }
            }
            Some(Err(error)) => {
                let text = explain::<K>(&error);
                // The watch is retried for ever; a repeated error is logged once.
                if last_error.as_ref() != Some(&text) {
                    tracing::warn!(kind = %kind, "{text}");
                    last_error = Some(text);
                }
            }
            None => return,
        }
    }
}

/// The error, with a fix if one is known.
fn explain<K: Resource<DynamicType = ()>>(error: &watcher::Error) -> String {
    let (plural, group) = (K::plural(&()), K::group(&()));
    let status = match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status)) => Some(status),
        _ => None,
    };
    match status {
        // Checked by code: for an unknown resource the server answers with plain text and no Status.
        Some(status) if status.code == 404 => format!(
            "the server does not know {plural}.{group}: install the definitions with `drayman crds | kubectl apply -f -`"
        ),
        Some(status) if status.is_forbidden() => {
            format!("the controller's role must allow it to list and watch {plural}.{group}: {error}")
        }
        _ => format!("cannot watch {plural}.{group}: {error}"),
    }
}

pub(crate) fn name<K: Resource<DynamicType = ()>>(object: &Guarded<K>) -> String {
    object.name_any()
}

pub(crate) fn namespaced_name<K: Resource<DynamicType = ()>>(object: &Guarded<K>) -> (String, String) {
    (object.namespace().unwrap_or_default(), object.name_any())
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;
    use crate::api::crd::{DeviceClassParameters, DeviceClassParametersSpec, NodeInventory};

    fn object(name: &str, kind: Option<&str>) -> Guarded<DeviceClassParameters> {
        let spec = kind.map_or_else(
            || serde_json::json!({"kind": "x", "knid": 1}),
            |kind| serde_json::json!({"kind": kind}),
        );
        serde_json::from_value(serde_json::json!({"metadata": {"name": name}, "spec": spec})).unwrap()
    }

    async fn changes(
        events: Vec<watcher::Result<watcher::Event<Guarded<DeviceClassParameters>>>>,
    ) -> Vec<WatchUpdate<String, Result<String, String>>> {
        let mut changes = Vec::new();
        let read = |object: Guarded<DeviceClassParameters>| {
            let key = name(&object);
            let value = object
                .0
                .map(|object| object.spec.kind)
                .map_err(|error| error.to_string());
            (key, (value != Ok("foreign".into())).then_some(value))
        };
        follow(
            futures::stream::iter(events),
            CancellationToken::new(),
            read,
            |change| changes.push(change),
        )
        .await;
        changes
    }

    fn failure(code: u16, reason: &str) -> watcher::Error {
        watcher::Error::InitialListFailed(kube::Error::Api(Box::new(
            Status::failure("x", reason).with_code(code),
        )))
    }

    #[tokio::test]
    async fn a_list_is_passed_on_at_once_and_only_when_it_is_complete() {
        use watcher::Event::{Apply, Delete, Init, InitApply, InitDone};
        let ok = |kind: &str| Ok::<String, String>(kind.into());
        let changes = changes(vec![
            Ok(Init),
            Ok(InitApply(object("lost", Some("x")))),
            Err(failure(500, "InternalError")),
            Ok(Init),
            Ok(InitApply(object("a", Some("x")))),
            Ok(InitApply(object("f", Some("foreign")))),
            Ok(InitDone),
            Ok(Apply(object("b", Some("y")))),
            Ok(Apply(object("f", Some("foreign")))),
            Ok(Delete(object("a", Some("x")))),
        ])
        .await;
        let expected = [
            WatchUpdate::All(vec![("a".into(), ok("x"))]),
            WatchUpdate::Set("b".into(), ok("y")),
            WatchUpdate::Gone("f".into()),
            WatchUpdate::Gone("a".into()),
        ];
        assert_eq!(changes, expected);
    }

    #[tokio::test]
    async fn a_list_keeps_readable_objects_beside_unreadable_ones() {
        use watcher::Event::{Init, InitApply, InitDone};
        let events = vec![
            Ok(Init),
            Ok(InitApply(object("bad", None))),
            Ok(InitApply(object("good", Some("x")))),
            Ok(InitDone),
        ];
        let changes = changes(events).await;
        let [WatchUpdate::All(objects)] = changes.as_slice() else {
            panic!("{changes:?}")
        };
        let [(bad, Err(error)), (good, Ok(_))] = objects.as_slice() else {
            panic!("{objects:?}")
        };
        assert_eq!((bad.as_str(), good.as_str()), ("bad", "good"));
        assert!(error.contains("knid"), "{error}");
    }

    #[tokio::test]
    async fn shutdown_ends_a_watch_that_never_ends_by_itself() {
        let shutdown = CancellationToken::new();
        shutdown.cancel();
        let read =
            |object: Guarded<DeviceClassParameters>| (name(&object), None::<DeviceClassParametersSpec>);
        follow(futures::stream::pending(), shutdown, read, |_| {}).await;
    }

    #[test]
    fn a_watch_error_says_how_to_fix_it() {
        let text = |error| explain::<NodeInventory>(&error);
        assert!(text(failure(404, "NotFound")).contains("drayman crds | kubectl apply"));
        assert!(text(failure(404, "Failed to parse error data")).contains("drayman crds | kubectl apply"));
        assert!(text(failure(403, "Forbidden")).contains("list and watch nodeinventories.drayman.dev"));
        assert!(text(failure(500, "InternalError")).starts_with("cannot watch nodeinventories.drayman.dev"));
    }
}
