//! Client layer that honours `Retry-After` on 429.
//!
//! API Priority and Fairness sends the delay only in this header, with a body that is not a Status (`tooManyRequests` in apiserver's
//! `priority-and-fairness.go`), so it must be read in this layer. A write waits before the fence is checked, so its wait is over
//! when it is sent; for all other requests the wait here counts towards their time limit.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::header::RETRY_AFTER;
use http::{Method, Request, Response, StatusCode, Uri};
use kube::client::Body;
use tokio::time::Instant;

/// Upper limit of a pause, even if the server requests a longer one, so that requests soon resume after a fault.
const LONGEST: Duration = Duration::from_secs(30);

/// The time until which nothing is sent. Clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct Pause(Arc<Mutex<Option<Instant>>>);

impl Pause {
    fn until(&self) -> Option<Instant> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns when requests may be sent.
    pub(super) async fn over(&self) {
        // The pause may be extended meanwhile.
        while let Some(until) = self.until().filter(|until| *until > Instant::now()) {
            tokio::time::sleep_until(until).await;
        }
    }

    fn note<B>(&self, response: &Response<B>) {
        if let Some(pause) = asked(response) {
            self.begin(pause);
        }
    }

    /// Sends nothing for `pause`.
    pub(super) fn begin(&self, pause: Duration) {
        let until = Instant::now() + pause;
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *known = Some(known.map_or(until, |known| known.max(until)));
        tracing::debug!("the API server has too much to do: nothing is sent to it for {pause:?}");
    }
}

/// The delay that the server requests.
fn asked<B>(response: &Response<B>) -> Option<Duration> {
    if response.status() != StatusCode::TOO_MANY_REQUESTS {
        return None;
    }
    let seconds = response.headers().get(RETRY_AFTER)?.to_str().ok()?;
    let seconds = seconds.trim().parse().ok()?;
    Some(Duration::from_secs(seconds).min(LONGEST))
}

/// Limits the time in which the server may store a write to less than our own limit (`timeout` in apiserver's `request_deadline.go`).
///
/// Without it the server's own limit applies: a write could still be stored one minute after its sender has ended.
fn limit(request: &mut Request<Body>, timeout: Duration) -> Result<(), http::Error> {
    if request.method() != Method::PATCH {
        return Ok(());
    }
    let millis = (timeout * 9 / 10).as_millis();
    let mut parts = std::mem::take(request.uri_mut()).into_parts();
    let path = parts.path_and_query.as_ref().map_or("/", |path| path.as_str());
    let separator = if path.contains('?') { '&' } else { '?' };
    parts.path_and_query = Some(format!("{path}{separator}timeout={millis}ms").parse()?);
    *request.uri_mut() = Uri::from_parts(parts)?;
    Ok(())
}

/// Wraps the client so that it respects pauses and the server abandons writes before `timeout`. Returns the client and its pause. Must
/// be called within a runtime.
pub(super) fn considerate(client: &kube::Client, timeout: Duration) -> (kube::Client, Pause) {
    let namespace = client.default_namespace().to_owned();
    let (client, pauses) = (client.clone(), Pause::default());
    let pause = pauses.clone();
    let service = tower::service_fn(move |mut request: Request<Body>| {
        let (client, pause) = (client.clone(), pause.clone());
        async move {
            limit(&mut request, timeout).map_err(kube::Error::HttpError)?;
            pause.over().await;
            let response = client.send(request).await?;
            pause.note(&response);
            Ok::<_, kube::Error>(response)
        }
    });
    (kube::Client::new(service, namespace), pauses)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(code: u16, header: Option<&str>) -> Response<()> {
        let mut response = Response::builder().status(code);
        if let Some(value) = header {
            response = response.header(RETRY_AFTER, value);
        }
        response.body(()).unwrap()
    }

    #[test]
    fn only_a_429_with_seconds_asks_for_a_pause_and_never_for_a_long_one() {
        assert_eq!(asked(&answer(429, Some("2"))), Some(Duration::from_secs(2)));
        assert_eq!(asked(&answer(429, Some("86400"))), Some(LONGEST));
        for (code, header) in [
            (429, None),
            (429, Some("Wed, 21 Oct 2026 07:28:00 GMT")),
            (429, Some("-1")),
            (503, Some("2")),
            (200, Some("2")),
        ] {
            assert_eq!(asked(&answer(code, header)), None, "{code} {header:?}");
        }
    }

    #[test]
    fn the_server_gives_a_write_up_before_we_do() {
        let limited = |method: Method, uri: &str| {
            let request = Request::builder().method(method).uri(uri);
            let mut request = request.body(Body::empty()).unwrap();
            limit(&mut request, Duration::from_secs(5)).unwrap();
            request.uri().to_string()
        };
        let claim = "/apis/resource.k8s.io/v1alpha2/namespaces/a/resourceclaims/b/status";
        assert_eq!(limited(Method::PATCH, claim), format!("{claim}?timeout=4500ms"));
        let apply = format!("{claim}?fieldManager=c");
        assert_eq!(limited(Method::PATCH, &apply), format!("{apply}&timeout=4500ms"));
        assert_eq!(limited(Method::GET, claim), claim);
    }

    #[tokio::test(start_paused = true)]
    async fn the_longest_pause_counts_and_ends() {
        let (pause, start) = (Pause::default(), Instant::now());
        pause.over().await;
        assert_eq!(start.elapsed(), Duration::ZERO);
        pause.note(&answer(429, Some("3")));
        pause.note(&answer(429, Some("1")));
        pause.over().await;
        assert_eq!(start.elapsed(), Duration::from_secs(3));
        pause.over().await;
        assert_eq!(start.elapsed(), Duration::from_secs(3));
    }
}
