//! Counts gRPC calls in a layer around the services of a socket.
//!
//! The status code is in the trailers, so the response body is followed to its end. A body that is dropped earlier, because the
//! client has disconnected or the deadline has passed, counts as canceled.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body::{Body as HttpBody, Frame, SizeHint};
use tonic::body::Body;
use tonic::{Code, Status};
use tower::{Layer, Service};

use crate::core::distribution::Distribution;

/// A gRPC method of this program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct GrpcMethod {
    /// Package and service.
    pub service: &'static str,
    /// The method.
    pub method: &'static str,
    /// `unary` or `server_stream`.
    pub sort: &'static str,
}

const fn unary(service: &'static str, method: &'static str) -> GrpcMethod {
    GrpcMethod {
        service,
        method,
        sort: "unary",
    }
}

const fn stream(service: &'static str, method: &'static str) -> GrpcMethod {
    GrpcMethod {
        service,
        method,
        sort: "server_stream",
    }
}

/// Any method that is not in [`GrpcCalls::METHODS`].
const OTHER: GrpcMethod = unary("other", "other");

/// Metrics of one method.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MethodMetrics {
    /// Calls started.
    pub started: u64,
    /// Calls ended, by code name.
    pub handled: BTreeMap<&'static str, u64>,
    /// Durations of the ended calls.
    pub handling: Distribution,
}

/// Metrics of all methods.
#[derive(Debug)]
pub struct GrpcCalls(Mutex<BTreeMap<GrpcMethod, MethodMetrics>>);

impl Default for GrpcCalls {
    fn default() -> Self {
        let all = Self::METHODS.into_iter().map(|method| {
            let handled = Self::CODES.into_iter().map(|code| (code, 0)).collect();
            let metrics = MethodMetrics {
                handled,
                ..MethodMetrics::default()
            };
            (method, metrics)
        });
        Self(Mutex::new(all.collect()))
    }
}

impl GrpcCalls {
    /// Methods of kubelet's endpoints, of the admin socket and of the health service. Any other path counts as the last entry.
    pub const METHODS: [GrpcMethod; 23] = [
        unary("v1alpha2.Node", "NodePrepareResource"),
        unary("v1alpha2.Node", "NodeUnprepareResource"),
        unary("v1alpha3.Node", "NodePrepareResources"),
        unary("v1alpha3.Node", "NodeUnprepareResources"),
        unary(
            "k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin",
            "NodePrepareResources",
        ),
        unary(
            "k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin",
            "NodeUnprepareResources",
        ),
        unary("k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin", "NodePrepareResources"),
        unary(
            "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin",
            "NodeUnprepareResources",
        ),
        stream("v1alpha1.DRAResourceHealth", "NodeWatchResources"),
        stream("v1.DRAResourceHealth", "NodeWatchResources"),
        unary("pluginregistration.Registration", "GetInfo"),
        unary("pluginregistration.Registration", "NotifyRegistrationStatus"),
        unary("v1beta1.DevicePlugin", "GetDevicePluginOptions"),
        stream("v1beta1.DevicePlugin", "ListAndWatch"),
        unary("v1beta1.DevicePlugin", "GetPreferredAllocation"),
        unary("v1beta1.DevicePlugin", "Allocate"),
        unary("v1beta1.DevicePlugin", "PreStartContainer"),
        unary("drayman.node.v1alpha1.Records", "Holdings"),
        unary("drayman.node.v1alpha1.Records", "Release"),
        stream("drayman.node.v1alpha1.Records", "HandOver"),
        unary("grpc.health.v1.Health", "Check"),
        stream("grpc.health.v1.Health", "Watch"),
        OTHER,
    ];

    /// Codes that are present from the start: the usual ones. Other codes appear with their first call.
    pub const CODES: [&'static str; 4] = ["Canceled", "FailedPrecondition", "InvalidArgument", "OK"];

    /// A copy of the metrics so far.
    pub fn counted(&self) -> BTreeMap<GrpcMethod, MethodMetrics> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn change(&self, method: GrpcMethod, change: impl FnOnce(&mut MethodMetrics)) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        change(all.entry(method).or_default());
    }
}

/// Name of a code as in gRPC's Go libraries, and therefore in existing dashboards.
fn name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "Canceled",
        Code::Unknown => "Unknown",
        Code::InvalidArgument => "InvalidArgument",
        Code::DeadlineExceeded => "DeadlineExceeded",
        Code::NotFound => "NotFound",
        Code::AlreadyExists => "AlreadyExists",
        Code::PermissionDenied => "PermissionDenied",
        Code::ResourceExhausted => "ResourceExhausted",
        Code::FailedPrecondition => "FailedPrecondition",
        Code::Aborted => "Aborted",
        Code::OutOfRange => "OutOfRange",
        Code::Unimplemented => "Unimplemented",
        Code::Internal => "Internal",
        Code::Unavailable => "Unavailable",
        Code::DataLoss => "DataLoss",
        Code::Unauthenticated => "Unauthenticated",
    }
}

/// The method for a request path.
fn method(path: &str) -> GrpcMethod {
    let parts = path.strip_prefix('/').and_then(|path| path.split_once('/'));
    let mut known = GrpcCalls::METHODS.into_iter();
    let known = known.find(|known| Some((known.service, known.method)) == parts);
    known.unwrap_or(OTHER)
}

/// The `tower` layer.
#[derive(Clone, Debug)]
pub(super) struct CountLayer(pub(super) Arc<GrpcCalls>);

impl<S> Layer<S> for CountLayer {
    type Service = Counting<S>;

    fn layer(&self, inner: S) -> Counting<S> {
        Counting {
            inner,
            calls: self.0.clone(),
        }
    }
}

/// A service whose calls are counted.
#[derive(Clone, Debug)]
pub(super) struct Counting<S> {
    inner: S,
    calls: Arc<GrpcCalls>,
}

impl<S> Service<Request<Body>> for Counting<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let mut call = Call::begin(self.calls.clone(), method(request.uri().path()));
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer = answer.await?;
            // An error response has its code in the head, and no body.
            call.see(answer.headers());
            Ok(answer.map(|inner| Body::new(Followed { inner, call })))
        })
    }
}

/// A call in progress; dropping it records the end.
#[derive(Debug)]
struct Call {
    calls: Arc<GrpcCalls>,
    method: GrpcMethod,
    since: Instant,
    code: Code,
}

impl Call {
    fn begin(calls: Arc<GrpcCalls>, method: GrpcMethod) -> Self {
        calls.change(method, |metrics| metrics.started += 1);
        Self {
            calls,
            method,
            since: Instant::now(),
            code: Code::Cancelled,
        }
    }

    fn see(&mut self, headers: &HeaderMap) {
        if let Some(status) = Status::from_header_map(headers) {
            self.code = status.code();
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let (code, took) = (name(self.code), self.since.elapsed());
        self.calls.change(self.method, |metrics| {
            *metrics.handled.entry(code).or_default() += 1;
            metrics.handling.observe(took);
        });
    }
}

/// A response body that is followed to its end.
#[derive(Debug)]
struct Followed {
    inner: Body,
    call: Call,
}

impl HttpBody for Followed {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let frame = std::task::ready!(Pin::new(&mut self.inner).poll_frame(context));
        match &frame {
            Some(Ok(frame)) => {
                if let Some(trailers) = frame.trailers_ref() {
                    self.call.see(trailers);
                }
            }
            Some(Err(status)) => self.call.code = status.code(),
            None => {}
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Trailers with a code, as tonic's services send them.
    struct Trailers(Option<HeaderMap>);

    impl HttpBody for Trailers {
        type Data = Bytes;
        type Error = Status;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
            Poll::Ready(self.0.take().map(|trailers| Ok(Frame::trailers(trailers))))
        }
    }

    async fn answered(
        calls: &Arc<GrpcCalls>,
        path: &str,
        answer: fn() -> Response<Body>,
    ) -> Result<Response<Body>, std::convert::Infallible> {
        let inner = tower::service_fn(move |_: Request<Body>| async move { Ok(answer()) });
        let request = Request::post(path).body(Body::empty()).unwrap();
        CountLayer(calls.clone()).layer(inner).call(request).await
    }

    async fn read(answer: Response<Body>) {
        let mut body = answer.into_body();
        while std::future::poll_fn(|context| Pin::new(&mut body).poll_frame(context))
            .await
            .is_some()
        {}
    }

    fn well() -> Response<Body> {
        let trailers = HeaderMap::from_iter([("grpc-status".parse().unwrap(), "0".parse().unwrap())]);
        Response::new(Body::new(Trailers(Some(trailers))))
    }

    fn refused() -> Response<Body> {
        Status::failed_precondition("held").into_http()
    }

    fn handled(calls: &GrpcCalls, path: &str) -> Vec<(&'static str, u64)> {
        let all = calls.counted();
        let metrics = &all[&method(path)];
        assert_eq!(metrics.handling.count(), metrics.handled.values().sum::<u64>());
        let some = metrics.handled.iter().filter(|(_, count)| **count > 0);
        some.map(|(code, count)| (*code, *count)).collect()
    }

    #[tokio::test]
    async fn a_call_is_counted_by_the_code_of_its_head_or_of_its_trailers() {
        let calls = Arc::new(GrpcCalls::default());
        let path = "/v1alpha3.Node/NodePrepareResources";
        read(answered(&calls, path, well).await.unwrap()).await;
        read(answered(&calls, path, refused).await.unwrap()).await;
        assert_eq!(handled(&calls, path), [("FailedPrecondition", 1), ("OK", 1)]);
        assert_eq!(calls.counted()[&method(path)].started, 2);
    }

    #[tokio::test]
    async fn a_stream_ends_when_it_is_given_up_and_not_before() {
        let calls = Arc::new(GrpcCalls::default());
        let path = "/v1beta1.DevicePlugin/ListAndWatch";
        let answer = answered(&calls, path, well).await.unwrap();
        assert_eq!(calls.counted()[&method(path)].started, 1);
        assert_eq!(handled(&calls, path), []);
        drop(answer);
        assert_eq!(handled(&calls, path), [("Canceled", 1)]);
    }

    #[tokio::test]
    async fn unknown_methods_have_no_series_of_their_own() {
        let calls = Arc::new(GrpcCalls::default());
        for path in ["/", "/a/b", "/v1alpha3.Node/NodePrepareResources/x"] {
            read(answered(&calls, path, refused).await.unwrap()).await;
        }
        assert_eq!(handled(&calls, "/other/other"), [("FailedPrecondition", 3)]);
        assert_eq!(calls.counted().len(), GrpcCalls::METHODS.len());
    }

    #[test]
    fn every_method_of_the_protocols_is_known() {
        use crate::api::proto::device_plugin_v1beta1::device_plugin_server::SERVICE_NAME as PLUGIN;
        use crate::api::proto::dra_v1alpha2::node_server::SERVICE_NAME as OLD;
        use crate::api::proto::dra_v1alpha3::node_server::SERVICE_NAME as NEW;
        use crate::api::proto::node_records::records_server::SERVICE_NAME as RECORDS;
        use crate::api::proto::plugin_registration::registration_server::SERVICE_NAME as REGISTRATION;
        for (service, methods) in [(OLD, 2), (NEW, 2), (REGISTRATION, 2), (PLUGIN, 5), (RECORDS, 3)] {
            let known = GrpcCalls::METHODS.iter().filter(|known| known.service == service);
            assert_eq!(known.count(), methods, "{service}");
        }
    }
}
