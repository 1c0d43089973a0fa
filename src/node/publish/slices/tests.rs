use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::Method;
use http_body::Frame;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::sleep;

use super::*;
use crate::api::crd::Device;
use crate::node::metrics::Metrics;

const SLICES: &str = "/apis/resource.k8s.io/v1/resourceslices";
const FIRST: &str = "node-a.drayman.dev-00";
const SECOND: &str = "node-a.drayman.dev-01";

/// A response body: an object, or the events of a watch.
enum Reply {
    Once(Option<Bytes>),
    Watch(mpsc::UnboundedReceiver<Bytes>),
}

impl http_body::Body for Reply {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match &mut *self {
            Self::Once(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::Watch(events) => events
                .poll_recv(context)
                .map(|bytes| bytes.map(|bytes| Ok(Frame::data(bytes)))),
        }
    }
}

/// The server's response to the next write, which it does not execute.
#[derive(Clone)]
enum Fault {
    /// Answers with this code and message, and `Retry-After` for 429.
    Reject(u16, &'static str),
    /// Executes the write and never answers.
    LoseAnswer,
}

#[derive(Default)]
struct State {
    stored: BTreeMap<String, ResourceSlice>,
    version: u64,
    watches: Vec<mpsc::UnboundedSender<Bytes>>,
    /// Whether watch events are lost.
    muted: bool,
    drops_taints: bool,
    /// Changes each slice before it is stored.
    webhook: Option<fn(&mut ResourceSlice)>,
    /// Whether lists lack all slices, like a list that is older than them.
    has_old_lists: bool,
    /// The codes with which lists fail, the next one first; the last repeats.
    failing_lists: VecDeque<u16>,
    dry_runs: usize,
    node_uid: Option<&'static str>,
    faults: VecDeque<Fault>,
    /// Names of slices whose writes are rejected.
    rejected: Vec<&'static str>,
    writes: Vec<(Instant, String)>,
    reads: usize,
    events: Vec<(String, String)>,
}

impl State {
    fn report(&mut self, kind: &str, slice: &ResourceSlice) {
        if !self.muted {
            let event = format!("{}\n", json!({ "type": kind, "object": slice }));
            self.watches
                .retain(|watch| watch.send(event.clone().into()).is_ok());
        }
    }

    /// Changes a slice as the API server and its webhooks do before they store it.
    fn admit(&self, slice: &mut ResourceSlice) {
        for device in slice.spec.devices.iter_mut().flatten() {
            if self.drops_taints {
                device.taints = None;
            }
        }
        if let Some(change) = self.webhook {
            change(slice);
        }
    }

    fn store(&mut self, mut slice: ResourceSlice) -> ResourceSlice {
        self.version += 1;
        let name = slice.metadata.name.clone().unwrap();
        let is_new = !self.stored.contains_key(&name);
        if is_new {
            slice.metadata.uid = Some(format!("u-{}", self.version));
        }
        slice.metadata.resource_version = Some(self.version.to_string());
        self.admit(&mut slice);
        self.stored.insert(name, slice.clone());
        self.report(if is_new { "ADDED" } else { "MODIFIED" }, &slice);
        slice
    }

    fn delete(&mut self, name: &str) -> Option<ResourceSlice> {
        let mut slice = self.stored.remove(name)?;
        self.version += 1;
        slice.metadata.resource_version = Some(self.version.to_string());
        self.report("DELETED", &slice);
        Some(slice)
    }

    fn write(&mut self, method: &Method, name: &str, body: Value) -> Result<Value, u16> {
        let known = self.stored.get(name).map(|slice| slice.metadata.clone());
        match (method.as_str(), known) {
            ("POST", None) => Ok(json!(self.store(serde_json::from_value(body).unwrap()))),
            ("PUT", Some(known)) => {
                let slice: ResourceSlice = serde_json::from_value(body).unwrap();
                if slice.metadata.resource_version != known.resource_version {
                    return Err(409);
                }
                Ok(json!(self.store(slice)))
            }
            ("DELETE", Some(known)) => {
                let expected = &body["preconditions"];
                if expected["uid"] != json!(known.uid)
                    || expected["resourceVersion"] != json!(known.resource_version)
                {
                    return Err(409);
                }
                // For this kind the API server answers with the deleted object.
                Ok(json!(self.delete(name)))
            }
            ("POST", Some(_)) => Err(409),
            _ => Err(404),
        }
    }
}

/// An API server with the slices of a node.
#[derive(Clone)]
struct SliceServer(Arc<Mutex<State>>);

impl SliceServer {
    fn new() -> Self {
        Self(Arc::new(Mutex::new(State {
            node_uid: Some("n-1"),
            ..State::default()
        })))
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    fn client(&self) -> kube::Client {
        let server = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let server = server.clone();
            async move {
                let (head, body) = request.into_parts();
                let body = body.collect_bytes().await.unwrap_or_default();
                let body = serde_json::from_slice(&body).unwrap_or_default();
                Ok::<_, Infallible>(server.answer(&head, body).await)
            }
        });
        kube::Client::new(service, "default")
    }

    async fn answer(&self, head: &http::request::Parts, body: Value) -> Response<Reply> {
        let path = head.uri.path();
        if path.ends_with("/events") {
            let text = |field: &str| body[field].as_str().unwrap_or_default().to_owned();
            self.state().events.push((text("reason"), text("note")));
            return reply(200, &body);
        }
        if head.method == Method::GET {
            return self.read(head);
        }
        if head.uri.query().unwrap_or_default().contains("dryRun=All") {
            let mut slice: ResourceSlice = serde_json::from_value(body).unwrap();
            let mut state = self.state();
            state.dry_runs += 1;
            state.admit(&mut slice);
            return reply(200, &json!(slice));
        }
        let name = match path.strip_prefix(SLICES).unwrap().strip_prefix('/') {
            Some(name) => name.to_owned(),
            None => body["metadata"]["name"].as_str().unwrap().to_owned(),
        };
        let fault = {
            let mut state = self.state();
            state
                .writes
                .push((Instant::now(), format!("{} {name}", head.method)));
            if state.rejected.contains(&name.as_str()) {
                Some(Fault::Reject(422, "denied by policy"))
            } else {
                state.faults.pop_front()
            }
        };
        if let Some(Fault::Reject(code, message)) = fault {
            return failure(code, message);
        }
        let answer = self.state().write(&head.method, &name, body);
        if fault.is_some() {
            std::future::pending::<()>().await;
        }
        answer.map_or_else(|code| failure(code, "refused"), |object| reply(200, &object))
    }

    fn read(&self, head: &http::request::Parts) -> Response<Reply> {
        let mut state = self.state();
        let path = head.uri.path();
        let query = head.uri.query().unwrap_or_default();
        if query.contains("watch=true") {
            let (sender, events) = mpsc::unbounded_channel();
            state.watches.push(sender);
            return Response::new(Reply::Watch(events));
        }
        state.reads += 1;
        if path == "/api/v1/nodes/node-a" {
            return match state.node_uid {
                Some(uid) => reply(200, &json!({ "metadata": { "name": "node-a", "uid": uid } })),
                None => failure(404, "no such node"),
            };
        }
        if path == SLICES {
            let selector = "fieldSelector=spec.driver%3Ddrayman.dev%2Cspec.nodeName%3Dnode-a";
            assert!(query.contains(selector), "{query}");
            let failing = &mut state.failing_lists;
            if let Some(code) = failing.front().copied() {
                if failing.len() > 1 {
                    failing.pop_front();
                }
                return failure(code, "no list");
            }
            let items = state.stored.values().filter(|_| !state.has_old_lists);
            let items: Vec<&ResourceSlice> = items.collect();
            let version = json!({ "resourceVersion": state.version.to_string() });
            return reply(200, &json!({ "metadata": version, "items": items }));
        }
        let name = path.strip_prefix(SLICES).unwrap().trim_start_matches('/');
        match state.stored.get(name) {
            Some(slice) => reply(200, &json!(slice)),
            None => failure(404, "no such slice"),
        }
    }

    fn writes(&self) -> usize {
        self.state().writes.len()
    }

    fn reads(&self) -> usize {
        self.state().reads
    }

    fn count(&self, method: &str) -> usize {
        let state = self.state();
        let writes = state.writes.iter();
        writes.filter(|(_, write)| write.starts_with(method)).count()
    }

    fn devices(&self) -> Vec<String> {
        let state = self.state();
        let devices = state
            .stored
            .values()
            .flat_map(|slice| slice.spec.devices.iter().flatten());
        devices.map(|device| device.name.clone()).collect()
    }

    fn wipe(&self) {
        let mut state = self.state();
        for name in state.stored.keys().cloned().collect::<Vec<_>>() {
            state.delete(&name);
        }
    }

    fn reasons(&self) -> Vec<String> {
        let state = self.state();
        state.events.iter().map(|(reason, _)| reason.clone()).collect()
    }
}

fn reply(code: u16, object: &Value) -> Response<Reply> {
    let body = Reply::Once(Some(object.to_string().into()));
    Response::builder().status(code).body(body).unwrap()
}

fn failure(code: u16, message: &str) -> Response<Reply> {
    let status = json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": "", "message": message });
    let mut response = reply(code, &status);
    if code == 429 {
        response.headers_mut().insert(RETRY_AFTER, "30".parse().unwrap());
    }
    response
}

/// A running publisher.
struct Running {
    devices: watch::Sender<Arc<Devices>>,
    cluster: watch::Sender<ClusterFacts>,
    node_in_doubt: Arc<Notify>,
    metrics: Arc<Metrics>,
    end: CancellationToken,
}

impl Running {
    fn set(&self, devices: &[(&str, bool)]) {
        self.devices.send_replace(named(devices));
    }

    fn serve(&self, api: ClaimsApi) {
        self.cluster.send_modify(|facts| facts.claims = Some(api));
    }
}

fn named(devices: &[(&str, bool)]) -> Arc<Devices> {
    let device = |(name, is_healthy): &(&str, bool)| {
        let device = Device {
            name: (*name).into(),
            kind: "ports".into(),
            unhealthy: (!is_healthy).then(|| "unplugged".to_owned()),
            ..Device::default()
        };
        ((*name).to_owned(), device)
    };
    Arc::new(devices.iter().map(device).collect())
}

fn many(count: usize) -> Arc<Devices> {
    let names: Vec<String> = (0..count).map(|index| format!("d{index:04}")).collect();
    let devices: Vec<(&str, bool)> = names.iter().map(|name| (name.as_str(), true)).collect();
    named(&devices)
}

fn publish(server: &SliceServer, devices: Arc<Devices>) -> Running {
    let (devices, found) = watch::channel(devices);
    let (cluster, facts) = watch::channel(ClusterFacts {
        node_uid: Some("n-1".into()),
        claims: Some(ClaimsApi::Structured),
        minor: Some(36),
    });
    let context = NodeContext::for_tests(server.client());
    let running = Running {
        devices,
        cluster,
        node_in_doubt: Arc::default(),
        metrics: context.metrics.clone(),
        end: CancellationToken::new(),
    };
    let publisher = SlicePublisher {
        context,
        devices: found,
        cluster: facts,
        node_in_doubt: running.node_in_doubt.clone(),
    };
    tokio::spawn(publisher.run(running.end.clone()));
    running
}

async fn after(seconds: f64) {
    sleep(Duration::from_secs_f64(seconds)).await;
}

#[tokio::test(start_paused = true)]
async fn wiped_slices_are_back_within_a_second() {
    let server = SliceServer::new();
    let running = publish(&server, many(100));
    after(1.0).await;
    assert_eq!((server.count("POST"), server.devices().len()), (2, 100));
    server.wipe();
    after(1.0).await;
    assert_eq!((server.count("POST"), server.devices().len()), (4, 100));
    let counted = running.metrics.counted();
    assert_eq!((counted.slices.slices, counted.slices.devices), (2, 100));
    assert_eq!(counted.slice_writes["Done"], 4);
    assert_eq!(server.reasons(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn an_idle_node_neither_reads_nor_writes() {
    let server = SliceServer::new();
    let _running = publish(&server, named(&[("a", true)]));
    after(1.0).await;
    let before = (server.writes(), server.reads());
    after(250.0).await;
    assert_eq!((server.writes(), server.reads()), before);
}

#[tokio::test(start_paused = true)]
async fn a_restart_keeps_the_slices() {
    let server = SliceServer::new();
    let running = publish(&server, named(&[("a", true)]));
    after(1.0).await;
    running.end.cancel();
    after(1.0).await;
    let _next = publish(&server, named(&[("a", true)]));
    after(1.0).await;
    assert_eq!(server.writes(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_lost_answer_of_a_create_makes_one_slice() {
    let server = SliceServer::new();
    server.state().muted = true;
    server.state().faults = VecDeque::from([Fault::LoseAnswer]);
    let running = publish(&server, named(&[("a", true)]));
    after(30.0).await;
    assert_eq!((server.count("POST"), server.devices().len()), (1, 1));
    running.set(&[("a", true), ("b", true)]);
    after(1.0).await;
    assert_eq!((server.count("PUT"), server.devices().len()), (1, 2));
}

#[tokio::test(start_paused = true)]
async fn a_slice_that_an_old_list_lacks_is_read_first() {
    let server = SliceServer::new();
    let _running = publish(&server, named(&[("a", true)]));
    after(1.0).await;
    {
        let mut state = server.state();
        state.has_old_lists = true;
        let expired = json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 410, "reason": "Expired",
            "message": "too old resource version" });
        let event = format!("{}\n", json!({ "type": "ERROR", "object": expired }));
        state
            .watches
            .retain(|watch| watch.send(event.clone().into()).is_ok());
    }
    let reads = server.reads();
    after(10.0).await;
    assert!(server.reads() > reads, "the slices are listed again");
    assert_eq!((server.writes(), server.devices().len()), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_forbidden_watch_is_one_event_whatever_came_before() {
    let server = SliceServer::new();
    server.state().failing_lists = VecDeque::from([500, 403]);
    let _running = publish(&server, named(&[("a", true)]));
    after(120.0).await;
    assert_eq!(server.reasons(), ["ResourceSliceRejected"]);
    server.state().failing_lists.clear();
    after(60.0).await;
    assert_eq!(server.devices(), ["a"]);
    assert_eq!(server.reasons(), ["ResourceSliceRejected"]);
}

#[tokio::test(start_paused = true)]
async fn a_conflict_is_resolved_by_a_read() {
    let server = SliceServer::new();
    let running = publish(&server, named(&[("a", true)]));
    after(1.0).await;
    {
        let mut state = server.state();
        state.muted = true;
        let mut edited = state.stored[FIRST].clone();
        edited.spec.devices = None;
        state.store(edited);
    }
    running.set(&[("a", true), ("b", true)]);
    after(1.0).await;
    assert_eq!((server.count("PUT"), server.devices().len()), (2, 2));
    assert_eq!(running.metrics.counted().slice_writes["Conflict"], 1);
}

#[tokio::test(start_paused = true)]
async fn a_rejected_write_is_one_event_and_tried_again() {
    let server = SliceServer::new();
    server.state().faults = vec![Fault::Reject(403, "denied by policy"); 5].into();
    let running = publish(&server, named(&[("a", true)]));
    after(120.0).await;
    assert_eq!(server.devices(), ["a"]);
    assert_eq!(server.reasons(), ["ResourceSliceRejected"]);
    let note = server.state().events[0].1.clone();
    assert!(
        note.contains("denied by policy") && note.contains("grant the companion's service account"),
        "{note}"
    );
    let times: Vec<Instant> = server.state().writes.iter().map(|(time, _)| *time).collect();
    let pauses: Vec<Duration> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert_eq!(pauses.len(), 5);
    assert!(pauses.is_sorted_by(|a, b| a < b), "{pauses:?}");
    assert_eq!(running.metrics.counted().slice_writes["Forbidden"], 5);
}

#[tokio::test(start_paused = true)]
async fn a_webhook_that_prevents_writes_is_one_event() {
    for (code, message) in [
        (
            500,
            "Internal error occurred: failed calling webhook \"w.example\": connection refused",
        ),
        (
            400,
            "admission webhook \"w.example\" denied the request without explanation",
        ),
        (403, "admission webhook \"w.example\" denied the request: no"),
        (409, "admission webhook \"w.example\" denied the request: no"),
        (404, "admission webhook \"w.example\" denied the request: no"),
    ] {
        let server = SliceServer::new();
        let running = publish(&server, named(&[("a", true)]));
        after(1.0).await;
        let before = server.reads();
        server.state().faults = vec![Fault::Reject(code, message); 3].into();
        running.set(&[("a", true), ("b", true)]);
        after(60.0).await;
        assert_eq!(server.devices(), ["a", "b"], "{message}");
        assert_eq!(server.reasons(), ["ResourceSliceRejected"], "{message}");
        let note = server.state().events[0].1.clone();
        assert!(
            note.contains("w.example") && note.contains("repair the webhook"),
            "{note}"
        );
        assert_eq!(running.metrics.counted().slice_writes["Webhook"], 3);
        // The write was not executed, so nothing is read, and the pauses grow.
        assert_eq!(server.reads(), before, "{message}");
        let times: Vec<Instant> = server.state().writes.iter().map(|(time, _)| *time).collect();
        let pauses: Vec<Duration> = times[1..].windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(
            pauses.len() == 3 && pauses.is_sorted_by(|a, b| a < b),
            "{pauses:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_rejected_slice_delays_no_other_slice() {
    let server = SliceServer::new();
    let running = publish(&server, many(200));
    after(1.0).await;
    server.state().rejected = vec![FIRST, SECOND];
    let mut changed = (*many(200)).clone();
    changed.retain(|name, _| !["d0003", "d0070", "d0130"].contains(&name.as_str()));
    running.devices.send_replace(Arc::new(changed));
    after(0.5).await;
    assert_eq!((server.count("PUT"), server.devices().len()), (3, 199));
    // Both rejected slices are tried again after 1, 2, 4, 8 and 16 s, and up to half of that more.
    after(60.0).await;
    assert_eq!((server.count("PUT"), server.devices().len()), (13, 199));
    assert_eq!(server.reasons(), ["ResourceSliceRejected"; 2]);
    server.state().rejected.clear();
    after(60.0).await;
    assert_eq!((server.count("PUT"), server.devices().len()), (15, 197));
}

#[tokio::test(start_paused = true)]
async fn each_slice_is_deleted_once() {
    let server = SliceServer::new();
    let running = publish(&server, many(300));
    after(1.0).await;
    // The answers arrive before the events.
    server.state().muted = true;
    running.devices.send_replace(many(10));
    after(1.0).await;
    assert_eq!((server.count("DELETE"), server.devices().len()), (4, 10));
}

#[tokio::test(start_paused = true)]
async fn a_busy_api_server_is_given_the_time_it_asks_for() {
    let server = SliceServer::new();
    server.state().faults = VecDeque::from([Fault::Reject(429, "too many requests")]);
    let _running = publish(&server, named(&[("a", true)]));
    after(1.0).await;
    let reads = server.reads();
    // The watch begins anew.
    server.state().watches.clear();
    after(28.0).await;
    assert_eq!((server.writes(), server.reads()), (1, reads));
    assert!(server.state().watches.is_empty());
    after(20.0).await;
    assert!(!server.state().watches.is_empty());
    assert_eq!((server.writes(), server.devices().len()), (2, 1));
    assert_eq!(server.reasons(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn nothing_is_written_in_another_mode() {
    let server = SliceServer::new();
    let running = publish(&server, named(&[("a", true)]));
    after(1.0).await;
    running.serve(ClaimsApi::None);
    after(1.0).await;
    running.set(&[("a", true), ("b", true)]);
    server.wipe();
    after(10.0).await;
    assert_eq!(server.writes(), 1);
    assert_eq!(running.metrics.counted().slices, SliceCounts::default());
    running.serve(ClaimsApi::Structured);
    after(1.0).await;
    assert_eq!(server.devices(), ["a", "b"]);
}

#[tokio::test(start_paused = true)]
async fn a_flapping_device_does_not_exceed_the_budget() {
    let server = SliceServer::new();
    let running = publish(&server, named(&[("a", true)]));
    for round in 0..500 {
        running.set(&[("a", round % 2 == 0)]);
        after(0.1).await;
    }
    let writes = server.writes();
    // The burst, and one for each of 50 seconds.
    assert!((76..=87).contains(&writes), "{writes}");
    running.set(&[("a", true)]);
    after(2.0).await;
    let stored = server.state().stored[FIRST].clone();
    assert_eq!(
        stored.spec.devices.unwrap()[0].taints,
        None,
        "the last state is published"
    );
}

#[tokio::test(start_paused = true)]
async fn the_slices_of_a_recreated_node_have_its_uid() {
    let server = SliceServer::new();
    let running = publish(&server, named(&[("a", true)]));
    after(1.0).await;
    server.state().node_uid = None;
    server.wipe();
    after(10.0).await;
    assert_eq!(server.writes(), 1, "without a Node nothing is written");
    server.state().node_uid = Some("n-2");
    after(30.0).await;
    let owners = server.state().stored[FIRST].metadata.owner_references.clone();
    assert_eq!(owners.unwrap()[0].uid, "n-2");
    assert_eq!(server.count("POST"), 2);
    tokio::time::timeout(Duration::from_secs(1), running.node_in_doubt.notified())
        .await
        .expect("the Node is read again");
}

#[tokio::test(start_paused = true)]
async fn dropped_taints_are_one_event() {
    let server = SliceServer::new();
    server.state().drops_taints = true;
    let running = publish(&server, named(&[("a", true), ("b", false)]));
    after(1.0).await;
    running.set(&[("a", false), ("b", false)]);
    after(1.0).await;
    assert_eq!(server.devices(), Vec::<String>::new());
    assert_eq!(server.reasons(), ["ResourceSliceAltered"]);
    assert!(server.state().events[0].1.contains("DRADeviceTaints"));
    let counted = running.metrics.counted();
    assert_eq!(counted.slices.omitted[&Omission::Unhealthy], 2);
}

#[tokio::test(start_paused = true)]
async fn a_dropped_feature_is_tried_again_by_dry_runs() {
    let server = SliceServer::new();
    server.state().drops_taints = true;
    let _running = publish(&server, named(&[("a", true), ("b", false)]));
    after(1.0).await;
    let writes = server.writes();
    after(100.0).await;
    assert_eq!(server.state().dry_runs, 1, "soon after an upgrade");
    after(5.0 * 3600.0).await;
    assert_eq!((server.writes(), server.devices().len()), (writes, 1));
    let dry_runs = server.state().dry_runs;
    assert!(
        (8..=11).contains(&dry_runs),
        "once an hour in the end: {dry_runs}"
    );
    server.state().drops_taints = false;
    after(2.0 * 3600.0).await;
    assert_eq!(server.devices(), ["a", "b"]);
    assert_eq!(server.reasons(), ["ResourceSliceAltered"]);
}

#[tokio::test(start_paused = true)]
async fn a_kubelet_that_is_too_old_for_claims_offers_no_device() {
    let server = SliceServer::new();
    let running = publish(&server, many(1));
    for (minor, devices) in [(34, 1), (33, 0), (34, 1)] {
        running.cluster.send_modify(|facts| facts.minor = Some(minor));
        after(60.0).await;
        assert_eq!(server.devices().len(), devices, "kubelet 1.{minor}");
    }
    assert_eq!(server.reasons(), ["KubeletTooOld"]);
}

#[tokio::test(start_paused = true)]
async fn a_webhooks_change_delays_no_other_slice() {
    let server = SliceServer::new();
    server.state().webhook = Some(|slice| slice.metadata.owner_references = None);
    let _running = publish(&server, many(300));
    after(1.0).await;
    assert_eq!((server.count("POST"), server.devices().len()), (5, 300));
    after(60.0).await;
    assert_eq!(server.writes(), 5);
    assert_eq!(server.reasons(), ["ResourceSliceAltered"]);
}

#[tokio::test(start_paused = true)]
async fn a_webhook_that_reverts_each_write_gets_pauses() {
    let server = SliceServer::new();
    server.state().webhook = Some(|slice| slice.spec.pool.resource_slice_count = 7);
    let _running = publish(&server, named(&[("a", true)]));
    after(60.0).await;
    let writes = server.writes();
    assert!((3..=6).contains(&writes), "{writes}");
}

#[tokio::test(start_paused = true)]
async fn a_slice_of_another_driver_by_that_name_is_reported() {
    let server = SliceServer::new();
    let foreign = json!({ "metadata": { "name": FIRST }, "spec": { "driver": "b.drayman.dev", "nodeName": "other",
        "pool": { "name": "other", "generation": 1, "resourceSliceCount": 1 } } });
    {
        let mut state = server.state();
        state.store(serde_json::from_value(foreign).unwrap());
    }
    let _running = publish(&server, named(&[("a", true)]));
    after(20.0).await;
    assert_eq!(server.reasons(), ["ResourceSliceRejected"]);
    assert!(server.state().events[0].1.contains("b.drayman.dev"));
    assert_eq!(server.count("DELETE") + server.count("PUT"), 0);
}

#[tokio::test(start_paused = true)]
async fn a_stop_deletes_nothing() {
    let server = SliceServer::new();
    let running = publish(&server, named(&[("a", true)]));
    after(1.0).await;
    running.end.cancel();
    after(10.0).await;
    assert_eq!(server.writes(), 1);
    assert_eq!(server.devices(), ["a"]);
}
