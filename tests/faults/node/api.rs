//! A fake API server for the few requests of a companion, with faults that a real one cannot produce on demand.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use bytes::Bytes;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tonic::codegen::http::{Request, Response, StatusCode};
use tonic::codegen::{Body as HttpBody, Service};

const SLICES: &str = "/apis/resource.k8s.io/v1/resourceslices";
const INVENTORIES: &str = "/apis/drayman.dev/v1alpha1/nodeinventories";

const CLAIMS: &str = "/apis/resource.k8s.io/v1alpha2/resourceclaims";
const V1_CLAIMS: &str = "/apis/resource.k8s.io/v1/resourceclaims";
const NAMED_CLAIMS: &str = "/apis/resource.k8s.io/v1alpha2/namespaces/default/resourceclaims/";
const NAMED_V1_CLAIMS: &str = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/";

/// State and behaviour of the server.
#[derive(Debug)]
pub(crate) struct State {
    /// Answers all requests with 503.
    pub(crate) away: bool,
    /// Serves `resource.k8s.io/v1alpha2`.
    pub(crate) claims: bool,
    /// Serves `resource.k8s.io/v1` instead.
    pub(crate) structured: bool,
    /// A claim whose reads are never answered.
    pub(crate) unanswered: Option<&'static str>,
    /// ResourceSlices by name.
    pub(crate) slices: BTreeMap<String, Value>,
    /// The uid of `node-a`.
    pub(crate) node_uid: String,
    pub(crate) inventory: Option<Value>,
    /// Claims of the namespace `default` by name.
    pub(crate) stored_claims: BTreeMap<String, Value>,
    /// All Events written.
    pub(crate) events: Vec<Value>,
    /// All answered requests except watches.
    pub(crate) requests: VecDeque<String>,
    /// Status writes that did not change anything.
    pub(crate) idle_writes: Vec<Value>,
    watchers: Vec<mpsc::UnboundedSender<Bytes>>,
    /// Deletions, for watches that start at a list's version: the n-th has revision n.
    deletions: Vec<Bytes>,
}

/// The fake API server.
#[derive(Clone, Debug)]
pub(crate) struct Api {
    pub(crate) state: Arc<Mutex<State>>,
    changed: watch::Sender<()>,
}

impl Api {
    pub(crate) fn new() -> Self {
        let state = State {
            away: false,
            claims: true,
            structured: false,
            unanswered: None,
            slices: BTreeMap::new(),
            node_uid: "n-1".into(),
            inventory: None,
            stored_claims: BTreeMap::new(),
            events: Vec::new(),
            requests: VecDeque::new(),
            idle_writes: Vec::new(),
            watchers: Vec::new(),
            deletions: Vec::new(),
        };
        Self {
            state: Arc::new(Mutex::new(state)),
            changed: watch::Sender::new(()),
        }
    }

    pub(crate) fn client(&self) -> kube::Client {
        kube::Client::new(self.clone(), "default")
    }

    /// Serves on a local port for companions in other processes, and returns the URL.
    pub(crate) async fn listen(&self) -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let api = self.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let service = hyper_util::service::TowerToHyperService::new(api.clone());
                let io = hyper_util::rt::TokioIo::new(stream);
                tokio::spawn(hyper::server::conn::http1::Builder::new().serve_connection(io, service));
            }
        });
        url
    }

    pub(crate) fn set(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap());
    }

    /// Waits until the state meets a condition.
    pub(crate) async fn until<T>(&self, wanted: impl Fn(&State) -> Option<T>) -> T {
        let mut changed = self.changed.subscribe();
        let wait = async {
            loop {
                if let Some(found) = wanted(&self.state.lock().unwrap()) {
                    return found;
                }
                changed.changed().await.unwrap();
            }
        };
        let found = tokio::time::timeout(std::time::Duration::from_secs(30), wait).await;
        found.unwrap_or_else(|_| panic!("not in time: {:#?}", self.state.lock().unwrap()))
    }

    /// Waits until the inventory's Ready condition has this status and reason.
    pub(crate) async fn until_ready(&self, status: &str, reason: &str) -> Value {
        self.until(|state| {
            let inventory = state.inventory.as_ref()?;
            let ready = &inventory["status"]["conditions"][0];
            (ready["type"] == "Ready" && ready["status"] == status && ready["reason"] == reason)
                .then(|| inventory.clone())
        })
        .await
    }

    pub(crate) fn delete_inventory(&self) {
        let mut state = self.state.lock().unwrap();
        let Some(mut gone) = state.inventory.take() else {
            return;
        };
        gone["metadata"]["resourceVersion"] = json!((state.deletions.len() + 1).to_string());
        let event = Bytes::from(json!({"type": "DELETED", "object": gone}).to_string() + "\n");
        state.deletions.push(event.clone());
        state
            .watchers
            .retain(|watcher| watcher.send(event.clone()).is_ok());
    }
}

impl State {
    fn answer(&mut self, method: &str, path: &str, query: &str, body: &[u8]) -> (StatusCode, Answer) {
        let not_found = || (StatusCode::NOT_FOUND, Answer::Json(status(404, "NotFound")));
        if self.away {
            return (
                StatusCode::SERVICE_UNAVAILABLE,
                Answer::Json(status(503, "ServiceUnavailable")),
            );
        }
        if method == "GET" && path == INVENTORIES {
            if query.contains("watch=true") {
                let (sender, receiver) = mpsc::unbounded_channel();
                let since = query
                    .split('&')
                    .find_map(|part| part.strip_prefix("resourceVersion="));
                for event in self.deletions.iter().skip(since.unwrap().parse().unwrap()) {
                    sender.send(event.clone()).unwrap();
                }
                self.watchers.push(sender);
                return (StatusCode::OK, Answer::Watch(receiver));
            }
            let items: Vec<&Value> = self.inventory.iter().collect();
            let list = json!({
                "apiVersion": "drayman.dev/v1alpha1", "kind": "NodeInventoryList",
                "metadata": {"resourceVersion": self.deletions.len().to_string()}, "items": items
            });
            return (StatusCode::OK, Answer::Json(list));
        }
        self.requests.push_back(format!("{method} {path}"));
        match (method, path) {
            ("GET", "/api/v1/nodes/node-a") => {
                let metadata = json!({"name": "node-a", "uid": self.node_uid});
                (
                    StatusCode::OK,
                    Answer::Json(json!({"apiVersion": "v1", "kind": "Node", "metadata": metadata})),
                )
            }
            ("GET", "/version") => {
                let version = json!({
                    "major": "1", "minor": "37", "gitVersion": "v1.37.2", "gitCommit": "", "gitTreeState": "",
                    "buildDate": "", "goVersion": "", "compiler": "", "platform": "",
                });
                (StatusCode::OK, Answer::Json(version))
            }
            (_, path) if path.starts_with(SLICES) && self.structured => {
                self.slices(method, path, query, body)
            }
            ("GET", "/apis/resource.k8s.io") if self.claims => {
                let version = if self.structured { "v1" } else { "v1alpha2" };
                let version =
                    json!({"groupVersion": format!("resource.k8s.io/{version}"), "version": version});
                let group = json!({
                    "kind": "APIGroup", "apiVersion": "v1", "name": "resource.k8s.io", "versions": [version]
                });
                (StatusCode::OK, Answer::Json(group))
            }
            ("GET", CLAIMS | V1_CLAIMS) => {
                let items: Vec<&Value> = self.stored_claims.values().collect();
                let version = if path == CLAIMS { "v1alpha2" } else { "v1" };
                let list = json!({
                    "apiVersion": format!("resource.k8s.io/{version}"), "kind": "ResourceClaimList",
                    "metadata": {"resourceVersion": "1"}, "items": items
                });
                (StatusCode::OK, Answer::Json(list))
            }
            ("GET", path) if path.starts_with(NAMED_CLAIMS) || path.starts_with(NAMED_V1_CLAIMS) => {
                let name = path.rsplit('/').next().unwrap();
                if let Some(claim) = self.stored_claims.get(name) {
                    (StatusCode::OK, Answer::Json(claim.clone()))
                } else {
                    let mut gone = status(404, "NotFound");
                    gone["details"] =
                        json!({"name": name, "group": "resource.k8s.io", "kind": "resourceclaims"});
                    (StatusCode::NOT_FOUND, Answer::Json(gone))
                }
            }
            ("POST", "/apis/events.k8s.io/v1/namespaces/default/events") => {
                let event: Value = serde_json::from_slice(body).unwrap();
                self.events.push(event.clone());
                (StatusCode::CREATED, Answer::Json(event))
            }
            ("GET", path) if path.starts_with(INVENTORIES) => match &self.inventory {
                Some(inventory) => (StatusCode::OK, Answer::Json(inventory.clone())),
                None => not_found(),
            },
            ("PATCH", path) if path.starts_with(INVENTORIES) => self
                .patch(path, query, body)
                .map_or_else(not_found, |inventory| (StatusCode::OK, Answer::Json(inventory))),
            _ => not_found(),
        }
    }

    fn slices(&mut self, method: &str, path: &str, query: &str, body: &[u8]) -> (StatusCode, Answer) {
        let body: Value = serde_json::from_slice(body).unwrap_or_default();
        let name = path.trim_start_matches(SLICES).trim_start_matches('/');
        let name = body["metadata"]["name"].as_str().unwrap_or(name).to_owned();
        let stored = |mut slice: Value, version: usize| {
            slice["metadata"]["resourceVersion"] = json!(version.to_string());
            slice["metadata"]["uid"] = json!(format!("s-{version}"));
            slice
        };
        let version = self.requests.len();
        match (method, self.slices.contains_key(&name)) {
            ("GET", _) if query.contains("watch=true") => {
                let (sender, receiver) = mpsc::unbounded_channel();
                self.watchers.push(sender);
                (StatusCode::OK, Answer::Watch(receiver))
            }
            ("GET", _) if path == SLICES => {
                let items: Vec<&Value> = self.slices.values().collect();
                let list = json!({"metadata": {"resourceVersion": "1"}, "items": items});
                (StatusCode::OK, Answer::Json(list))
            }
            ("POST", false) | ("PUT", true) => {
                let slice = stored(body, version);
                self.slices.insert(name, slice.clone());
                (StatusCode::CREATED, Answer::Json(slice))
            }
            ("DELETE", true) => {
                self.slices.remove(&name);
                (
                    StatusCode::OK,
                    Answer::Json(json!({"kind": "Status", "status": "Success"})),
                )
            }
            _ => (StatusCode::NOT_FOUND, Answer::Json(status(404, "NotFound"))),
        }
    }

    fn patch(&mut self, path: &str, query: &str, body: &[u8]) -> Option<Value> {
        let sent: Value = serde_json::from_slice(body).unwrap();
        assert!(path.contains("/node-a.drayman.dev"), "{path}");
        if path.ends_with("/status") {
            let inventory = self.inventory.as_mut()?;
            if inventory["status"] == sent["status"] {
                self.idle_writes.push(sent["status"].clone());
            }
            inventory["status"] = sent["status"].clone();
            return Some(inventory.clone());
        }
        assert!(
            query.contains("fieldManager=drayman-node") && query.contains("force=true"),
            "{query}"
        );
        let before = self
            .inventory
            .take()
            .unwrap_or_else(|| json!({"metadata": {"generation": 0}}));
        let mut inventory = sent;
        let generation = before["metadata"]["generation"].as_u64().unwrap()
            + u64::from(before["spec"] != inventory["spec"]);
        inventory["metadata"]["generation"] = json!(generation);
        if let Some(status) = before.get("status") {
            inventory["status"] = status.clone();
        }
        self.inventory = Some(inventory.clone());
        Some(inventory)
    }
}

fn status(code: u16, reason: &str) -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": reason})
}

enum Answer {
    Json(Value),
    Watch(mpsc::UnboundedReceiver<Bytes>),
}

impl<B> Service<Request<B>> for Api
where
    B: HttpBody<Data = Bytes> + Send + 'static,
    B::Error: std::error::Error + Send + Sync + 'static,
{
    type Response = Response<Answered>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let api = self.clone();
        Box::pin(async move {
            let (head, body) = request.into_parts();
            let body = collect(body).await;
            let query = head.uri.query().unwrap_or_default();
            let unanswered = api.state.lock().unwrap().unanswered;
            if unanswered.is_some_and(|claim| head.uri.path() == format!("{NAMED_V1_CLAIMS}{claim}")) {
                std::future::pending::<()>().await;
            }
            let (code, answer) =
                api.state
                    .lock()
                    .unwrap()
                    .answer(head.method.as_str(), head.uri.path(), query, &body);
            api.changed.send_replace(());
            let body = match answer {
                Answer::Json(value) => Answered::Once(Some(value.to_string().into())),
                Answer::Watch(events) => Answered::Stream(events),
            };
            Ok(Response::builder().status(code).body(body).unwrap())
        })
    }
}

async fn collect<B: HttpBody<Data = Bytes>>(body: B) -> Vec<u8> {
    let mut body = std::pin::pin!(body);
    let mut bytes = Vec::new();
    // A client that disconnects during a request is ignored.
    while let Some(Ok(frame)) = std::future::poll_fn(|context| body.as_mut().poll_frame(context)).await {
        bytes.extend(frame.into_data().unwrap_or_default());
    }
    bytes
}

pub(crate) enum Answered {
    Once(Option<Bytes>),
    Stream(mpsc::UnboundedReceiver<Bytes>),
}

impl HttpBody for Answered {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, Infallible>>> {
        let bytes = match self.get_mut() {
            Self::Once(bytes) => Poll::Ready(bytes.take()),
            Self::Stream(events) => events.poll_recv(context),
        };
        bytes.map(|bytes| bytes.map(|bytes| Ok(http_body::Frame::data(bytes))))
    }
}
