//! Fault injection for the connection to the API server: requests, responses and watch events.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::http::header::RETRY_AFTER;
use axum::http::request::Parts;
use axum::http::{Request, Response, StatusCode};
use futures::StreamExt as _;
use futures::stream::BoxStream;
use serde_json::json;
use tokio::time::sleep;
use tower::ServiceExt as _;

use super::{Fault, Operation, ProgramProcess};
use crate::testcluster::api::ApiServer;

/// Time after which a silent connection breaks. Longer than all time limits of the programs under test.
const SILENCE: Duration = Duration::from_secs(3);
/// Delay of a late operation.
const LATE: Duration = Duration::from_millis(1200);
/// Maximum size of a request body in bytes; larger than the server's limit.
const BODY_MAX: usize = 8 * 1024 * 1024;

impl ProgramProcess {
    /// Returns an API client of this process.
    pub fn client(&self, server: &ApiServer) -> kube::Client {
        let connection = FaultyConnection {
            process: self.clone(),
            router: server.router(),
        };
        kube::Client::new(connection, "default")
    }
}

#[derive(Clone)]
struct FaultyConnection {
    process: ProgramProcess,
    router: Router,
}

type Answering = Pin<Box<dyn Future<Output = io::Result<Response<Body>>> + Send>>;

impl tower::Service<Request<kube::client::Body>> for FaultyConnection {
    type Response = Response<Body>;
    type Error = io::Error;
    type Future = Answering;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<kube::client::Body>) -> Answering {
        Box::pin(self.clone().send(request))
    }
}

impl FaultyConnection {
    async fn send(self, request: Request<kube::client::Body>) -> io::Result<Response<Body>> {
        let (parts, body) = request.into_parts();
        let body = to_bytes(Body::new(body), BODY_MAX)
            .await
            .map_err(io::Error::other)?;
        let what = format!("{} {}", parts.method, parts.uri);
        let is_lease = parts.uri.path().contains("/leases");
        let operation = if is_lease {
            Operation::Lease
        } else {
            Operation::Request
        };
        let Ok(fault) = self.process.start_operation(operation, &what) else {
            return std::future::pending().await;
        };
        let silent = || io::Error::from(io::ErrorKind::TimedOut);
        match fault {
            Some(Fault::Lost) => {
                sleep(SILENCE).await;
                return Err(silent());
            }
            Some(Fault::Refused) => return Ok(refusal(StatusCode::INTERNAL_SERVER_ERROR, "InternalError")),
            Some(Fault::Forgotten) => return Ok(refusal(StatusCode::GONE, "Expired")),
            Some(Fault::Busy) => return Ok(refusal(StatusCode::TOO_MANY_REQUESTS, "TooManyRequests")),
            Some(Fault::Late) => sleep(LATE).await,
            _ => {}
        }
        if self.process.is_killed() {
            return std::future::pending().await;
        }
        self.process.notify(operation, &what);
        let answer = self.deliver(&parts, body.clone()).await;
        match fault {
            Some(Fault::KilledAfter) => {
                self.process.kill();
                std::future::pending().await
            }
            Some(Fault::ReplyLost) => {
                sleep(SILENCE).await;
                Err(silent())
            }
            Some(Fault::Broken) => Err(io::ErrorKind::ConnectionReset.into()),
            Some(Fault::Twice) => {
                // Simulates a proxy that resends the request; the program receives one response.
                drop(self.deliver(&parts, body).await);
                Ok(answer)
            }
            _ => Ok(answer),
        }
    }

    async fn deliver(&self, parts: &Parts, body: Bytes) -> Response<Body> {
        let request = Request::from_parts(parts.clone(), Body::from(body));
        let answer = match self.router.clone().oneshot(request).await {
            Ok(answer) => answer,
            Err(never) => match never {},
        };
        let watches = parts
            .uri
            .query()
            .is_some_and(|query| query.contains("watch=true"));
        if !watches || !answer.status().is_success() {
            return answer;
        }
        let (head, body) = answer.into_parts();
        let path = parts.uri.path().to_owned();
        Response::from_parts(
            head,
            Body::from_stream(faulty_watch(self.process.clone(), path, body)),
        )
    }
}

fn status(code: StatusCode, reason: &str, message: &str) -> serde_json::Value {
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "code": code.as_u16(), "reason": reason, "message": message,
    })
}

fn refusal(code: StatusCode, reason: &str) -> Response<Body> {
    let status = status(code, reason, "an injected fault");
    let mut response = Response::new(Body::from(status.to_string()));
    *response.status_mut() = code;
    if code == StatusCode::TOO_MANY_REQUESTS {
        response.headers_mut().insert(RETRY_AFTER, 1.into());
    }
    response
}

/// A watch with fault injection. The server sends one event per chunk.
struct FaultyWatch {
    process: ProgramProcess,
    path: String,
    events: BoxStream<'static, io::Result<Bytes>>,
    /// Chunk to repeat before new ones.
    again: Option<Bytes>,
    ended: bool,
}

fn faulty_watch(process: ProgramProcess, path: String, body: Body) -> BoxStream<'static, io::Result<Bytes>> {
    let faulty_watch = FaultyWatch {
        process,
        path,
        events: body
            .into_data_stream()
            .map(|event| event.map_err(io::Error::other))
            .boxed(),
        again: None,
        ended: false,
    };
    futures::stream::unfold(faulty_watch, |mut faulty_watch| async move {
        let event = faulty_watch.next().await?;
        Some((event, faulty_watch))
    })
    .boxed()
}

impl FaultyWatch {
    async fn next(&mut self) -> Option<io::Result<Bytes>> {
        if let Some(event) = self.again.take() {
            return Some(Ok(event));
        }
        if self.ended {
            return None;
        }
        let event = match self.events.next().await? {
            Ok(event) => event,
            failed => return Some(failed),
        };
        let Ok(fault) = self
            .process
            .start_operation(Operation::Event, &self.describe(&event))
        else {
            return std::future::pending().await;
        };
        match fault {
            Some(Fault::Broken) => None,
            // Blocks this and all later events; the connection stays open.
            Some(Fault::Lost) => std::future::pending().await,
            Some(Fault::Forgotten) => {
                self.ended = true;
                let status = status(StatusCode::GONE, "Expired", "too old resource version");
                let error = json!({ "type": "ERROR", "object": status });
                Some(Ok(Bytes::from(format!("{error}\n"))))
            }
            Some(Fault::Late) => {
                sleep(LATE).await;
                Some(Ok(event))
            }
            Some(Fault::Twice) => {
                self.again = Some(event.clone());
                Some(Ok(event))
            }
            Some(Fault::KilledAfter) => {
                // Delivers the event, but kills the process before it can do more than one poll.
                let process = self.process.clone();
                tokio::spawn(async move { process.kill() });
                Some(Ok(event))
            }
            _ => Some(Ok(event)),
        }
    }

    fn describe(&self, event: &[u8]) -> String {
        let event: serde_json::Value = serde_json::from_slice(event).unwrap_or_default();
        let text = |pointer| {
            event
                .pointer(pointer)
                .and_then(serde_json::Value::as_str)
                .unwrap_or_default()
        };
        let (sort, name) = (text("/type"), text("/object/metadata/name"));
        format!("{sort} {name} of {}", self.path)
    }
}
