//! Client layer that counts requests to the API server.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Instant;

use http::{Method, Request, Response};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use tower::{Layer, Service};

use super::{encode, table};

/// Upper bounds in seconds, equal to client-go's.
const BUCKETS: [f64; 10] = [0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResponseLabels {
    code: String,
    method: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    verb: &'static str,
}

/// Counts requests and responses, under client-go's metric names.
#[derive(Clone)]
pub(crate) struct Requests {
    answers: Family<ResponseLabels, Counter>,
    durations: Family<RequestLabels, Histogram>,
    answered: Arc<AtomicBool>,
}

impl fmt::Debug for Requests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Requests")
            .field("answered", &self.answered)
            .finish_non_exhaustive()
    }
}

impl Requests {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let requests = Self {
            answers: Family::default(),
            durations: Family::new_with_constructor(|| Histogram::new(BUCKETS)),
            answered: Arc::default(),
        };
        // Present from the start, so that rates have a first sample.
        for method in table::METHODS {
            for code in table::HTTP_CODES {
                drop(requests.answers.get_or_create(&labels(method, code.to_owned())));
            }
            drop(requests.durations.get_or_create(&verb(method)));
        }
        let (answers, durations) = (&table::REQUESTS, &table::REQUEST_DURATION);
        registry.register(encode::base(answers), answers.help, requests.answers.clone());
        registry.register(
            encode::base(durations),
            durations.help,
            requests.durations.clone(),
        );
        requests
    }

    /// Returns whether the API server has granted a request since the start.
    pub(crate) fn granted(&self) -> bool {
        self.answered.load(Ordering::Relaxed)
    }

    fn note(&self, method: &Method, code: Option<u16>, since: Instant) {
        if code.is_some_and(|code| (200..300).contains(&code)) {
            self.answered.store(true, Ordering::Relaxed);
        }
        let code = code.map_or_else(|| "<error>".to_owned(), |code| code.to_string());
        let method = known(method);
        self.answers.get_or_create(&labels(method, code)).inc();
        self.durations
            .get_or_create(&verb(method))
            .observe(since.elapsed().as_secs_f64());
    }
}

/// Returns the method from the table; the client uses no others.
fn known(method: &Method) -> &'static str {
    let known = table::METHODS.into_iter().find(|known| *known == method.as_str());
    known.unwrap_or("GET")
}

fn labels(method: &'static str, code: String) -> ResponseLabels {
    ResponseLabels { code, method }
}

fn verb(method: &'static str) -> RequestLabels {
    RequestLabels { verb: method }
}

impl<S> Layer<S> for Requests {
    type Service = CountedClient<S>;

    fn layer(&self, inner: S) -> CountedClient<S> {
        CountedClient {
            inner,
            requests: self.clone(),
        }
    }
}

/// A client service that counts requests.
#[derive(Clone, Debug)]
pub(crate) struct CountedClient<S> {
    inner: S,
    requests: Requests,
}

/// A request. It is counted when it is dropped: with its answer, or without one if the caller gives up.
struct PendingRequest {
    requests: Requests,
    method: Method,
    since: Instant,
    code: Option<u16>,
}

impl Drop for PendingRequest {
    fn drop(&mut self) {
        self.requests.note(&self.method, self.code, self.since);
    }
}

impl<S, B, A> Service<Request<B>> for CountedClient<S>
where
    S: Service<Request<B>, Response = Response<A>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let pending = PendingRequest {
            requests: self.requests.clone(),
            method: request.method().clone(),
            since: Instant::now(),
            code: None,
        };
        let answer = self.inner.call(request);
        Box::pin(async move {
            // The future owns all of it, not only the field that it sets.
            let mut pending = pending;
            let answer = answer.await;
            pending.code = answer.as_ref().ok().map(|answer| answer.status().as_u16());
            answer
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use prometheus_client::encoding::text::encode;

    use super::*;

    #[tokio::test]
    async fn every_answer_is_counted_and_the_first_success_is_recorded() {
        let mut registry = Registry::default();
        let requests = Requests::register(&mut registry);
        let mut client = requests.layer(tower::service_fn(|request: Request<u16>| async move {
            match *request.body() {
                0 => Err("no connection"),
                code => Ok(Response::builder().status(code).body(()).unwrap()),
            }
        }));
        let text = |registry: &Registry| {
            let mut text = String::new();
            encode(&mut text, registry).unwrap();
            text
        };
        let before = text(&registry);
        assert!(
            before.contains("rest_client_requests_total{code=\"200\",method=\"PATCH\"} 0"),
            "{before}"
        );
        for body in [0, 403] {
            let request = Request::patch("/").body(body).unwrap();
            let _ = client.call(request).await;
            assert!(!requests.granted(), "{body}");
        }
        client.call(Request::patch("/").body(201).unwrap()).await.unwrap();
        assert!(requests.granted());
        let after = text(&registry);
        for line in [
            "rest_client_requests_total{code=\"<error>\",method=\"PATCH\"} 1",
            "rest_client_requests_total{code=\"403\",method=\"PATCH\"} 1",
            "rest_client_requests_total{code=\"201\",method=\"PATCH\"} 1",
            "rest_client_requests_total{code=\"200\",method=\"GET\"} 0",
            "rest_client_request_duration_seconds_count{verb=\"PATCH\"} 3",
        ] {
            assert!(after.contains(line), "{line} in {after}");
        }
    }

    #[tokio::test]
    async fn an_abandoned_request_is_counted_as_an_error() {
        let mut registry = Registry::default();
        let requests = Requests::register(&mut registry);
        let silent = tower::service_fn(|_: Request<()>| std::future::pending::<Result<Response<()>, ()>>());
        let mut client = requests.layer(silent);
        let answer = client.call(Request::put("/").body(()).unwrap());
        assert!(
            tokio::time::timeout(Duration::from_millis(1), answer)
                .await
                .is_err()
        );
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        let line = "rest_client_requests_total{code=\"<error>\",method=\"PUT\"} 1";
        assert!(text.contains(line), "{text}");
    }
}
