//! Watches of objects in the API server.

use std::fmt::Debug;

use futures::{Stream, StreamExt as _, stream};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Config, Event, watcher};
use kube::{Api, Resource};
use serde::de::DeserializeOwned;

/// Endless events of the selected objects. After failures in a row, the delay grows up to 30 s.
///
/// An [`Event::Init`] comes with the first answer of its list. The watcher itself sends it before the request, and the backoff counts it as
/// a success: without the right to list, or while the API server is away, each node would ask once a second. Controllers are few, and watch
/// without this.
pub(super) fn watch_objects<K>(
    api: Api<K>,
    config: Config,
) -> impl Stream<Item = watcher::Result<Event<K>>> + Send
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let mut is_announced = false;
    watcher(api, config)
        .flat_map(move |event| {
            let announced = std::mem::replace(&mut is_announced, matches!(event, Ok(Event::Init)));
            let init = (announced && event.is_ok()).then_some(Ok(Event::Init));
            let event = Some(event).filter(|event| !matches!(event, Ok(Event::Init)));
            stream::iter([init, event].into_iter().flatten())
        })
        .default_backoff()
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::pin::pin;
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use http::{Request, Response};
    use k8s_openapi::api::core::v1::Node;
    use kube::client::Body;
    use serde_json::json;
    use tokio::time::{Instant, timeout};

    use super::*;

    /// A client whose server forbids everything until this time, and has then no objects; with the times of the requests.
    fn client(until: Duration) -> (kube::Client, Arc<Mutex<Vec<Duration>>>) {
        let (begin, requests) = (Instant::now(), Arc::<Mutex<Vec<Duration>>>::default());
        let seen = requests.clone();
        let serve = move |_: Request<Body>| {
            seen.lock().unwrap().push(begin.elapsed());
            let (code, answer) = if begin.elapsed() < until {
                let status =
                    json!({ "kind": "Status", "status": "Failure", "reason": "Forbidden", "code": 403 });
                (403, status)
            } else {
                let list = json!({ "kind": "NodeList", "apiVersion": "v1", "metadata": { "resourceVersion": "1" }, "items": [] });
                (200, list)
            };
            let answer = Response::builder()
                .status(code)
                .body(Body::from(answer.to_string().into_bytes()));
            async move { Ok::<_, Infallible>(answer.unwrap()) }
        };
        (kube::Client::new(tower::service_fn(serve), "default"), requests)
    }

    #[tokio::test(start_paused = true)]
    async fn a_refused_list_is_retried_with_growing_pauses() {
        let (client, requests) = client(Duration::from_secs(600));
        let mut events = pin!(watch_objects::<Node>(Api::all(client), Config::default()));
        let mut seen = Vec::new();
        let _ = timeout(Duration::from_secs(700), async {
            while !matches!(seen.last(), Some(Ok(Event::InitDone))) {
                seen.extend(events.next().await);
            }
        })
        .await;
        let refused = requests
            .lock()
            .unwrap()
            .iter()
            .filter(|at| at.as_secs() < 600)
            .count();
        assert!((10..=30).contains(&refused), "{refused} requests in ten minutes");
        let (errors, others): (Vec<_>, Vec<_>) = seen.iter().partition(|event| event.is_err());
        assert_eq!(errors.len(), refused);
        assert!(
            matches!(others[..], [Ok(Event::Init), Ok(Event::InitDone)]),
            "{others:?}"
        );
    }
}
