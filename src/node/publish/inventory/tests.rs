use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Mutex;

use kube::client::Body;
use serde_json::{Value, json};

use super::*;
use crate::api::crd::Device;
use crate::core::names::ClaimUid;
use crate::core::prepare::claims_api::ClaimsApi;
use crate::node::service::Quarantined;

/// An API server with scripted responses for the claims API.
#[derive(Clone, Default)]
struct InventoryServer {
    /// The responses, the next one last; the final one repeats.
    answers: Arc<Mutex<Vec<bool>>>,
    asked: Arc<Mutex<Vec<Instant>>>,
    events: Arc<Mutex<Vec<String>>>,
    /// Whether `resource.k8s.io/v1` is served.
    is_structured: bool,
    /// Whether the Node may not be read.
    forbids_nodes: bool,
    /// Whether requests for a NodeInventory are forbidden.
    forbids_inventories: bool,
    /// Requests for a path that ends like this get no answer.
    unanswered: Option<&'static str>,
    /// Requests for NodeInventories.
    inventories: Arc<Mutex<Vec<String>>>,
    /// The writes of the NodeInventory: `spec`, and the condition types of each status.
    writes: Arc<Mutex<Vec<String>>>,
    quarantine: watch::Sender<Quarantine>,
    /// A claim that is put in quarantine during a write of the devices.
    quarantined: Option<Quarantine>,
    /// A device that another writer has added, which server-side apply keeps.
    foreign_device: Arc<Mutex<Option<Value>>>,
    /// The answers to lists and watches of NodeInventories; there is no answer after the last.
    observed: Arc<Mutex<VecDeque<String>>>,
}

impl InventoryServer {
    fn client(&self) -> kube::Client {
        let server = self.clone();
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let server = server.clone();
            async move {
                let (head, body) = request.into_parts();
                if head.method == http::Method::GET && head.uri.path().ends_with("/nodeinventories") {
                    server.inventories.lock().unwrap().push("WATCH".to_owned());
                    let answer = server.observed.lock().unwrap().pop_front();
                    if let Some(answer) = answer {
                        return Ok(http::Response::new(Body::from(answer.into_bytes())));
                    }
                    std::future::pending::<()>().await;
                }
                if let Some(end) = server.unanswered
                    && head.uri.path().ends_with(end)
                {
                    std::future::pending::<()>().await;
                }
                let body = body.collect_bytes().await.unwrap_or_default();
                let body = serde_json::from_slice(&body).unwrap_or_default();
                Ok::<_, Infallible>(server.answer(head.method.as_str(), head.uri.path(), body))
            }
        });
        kube::Client::new(service, "default")
    }

    fn answer(&self, method: &str, path: &str, mut body: Value) -> http::Response<Body> {
        if path.contains("nodeinventories") {
            self.inventories.lock().unwrap().push(method.to_owned());
        }
        let mut code = 200;
        let answer = match (method, path) {
            (_, path)
                if (self.forbids_inventories && path.contains("nodeinventories"))
                    || (self.forbids_nodes && path.contains("/nodes/")) =>
            {
                code = 403;
                json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 403, "reason": "Forbidden", "message": "no"})
            }
            ("GET", "/api/v1/nodes/node-a") => {
                json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-a", "uid": "n-1"}})
            }
            ("GET", "/apis/resource.k8s.io") if self.is_structured => {
                let version = json!({"groupVersion": "resource.k8s.io/v1", "version": "v1"});
                json!({"kind": "APIGroup", "apiVersion": "v1", "name": "resource.k8s.io", "versions": [version]})
            }
            ("GET", "/version") => {
                json!({"major": "1", "minor": "36+", "gitVersion": "", "gitCommit": "", "gitTreeState": "",
                "buildDate": "", "goVersion": "", "compiler": "", "platform": ""})
            }
            ("GET", "/apis/resource.k8s.io") if self.serves_claims() => {
                let version = json!({"groupVersion": "resource.k8s.io/v1alpha2", "version": "v1alpha2"});
                json!({"kind": "APIGroup", "apiVersion": "v1", "name": "resource.k8s.io", "versions": [version]})
            }
            ("PATCH", _) => {
                let is_merge = body["kind"].is_null();
                let types = body["status"]["conditions"].as_array().into_iter().flatten();
                let types: Vec<&str> = types.filter_map(|condition| condition["type"].as_str()).collect();
                let write = if is_merge {
                    types.join(" ")
                } else {
                    "spec".to_owned()
                };
                self.writes.lock().unwrap().push(write);
                if let (false, Some(quarantined)) = (is_merge, &self.quarantined) {
                    self.quarantine.send_replace(quarantined.clone());
                }
                let mut foreign = self.foreign_device.lock().unwrap();
                if is_merge && body["spec"]["devices"].is_array() {
                    *foreign = None;
                }
                let devices: Vec<&Value> = foreign.iter().collect();
                body["metadata"] =
                    json!({"name": "node-a.drayman.dev", "generation": 1, "resourceVersion": "5"});
                body["spec"] = json!({"driverName": "drayman.dev", "nodeName": "node-a", "nodeUid": "n-1", "devices": devices});
                body
            }
            ("POST", _) => {
                let reason = body["reason"].as_str().unwrap_or_default().to_owned();
                self.events.lock().unwrap().push(reason);
                body
            }
            _ => {
                code = 404;
                json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404, "reason": "NotFound", "message": "none"})
            }
        };
        http::Response::builder()
            .status(code)
            .body(Body::from(answer.to_string().into_bytes()))
            .unwrap()
    }

    fn serves_claims(&self) -> bool {
        self.asked.lock().unwrap().push(Instant::now());
        let mut answers = self.answers.lock().unwrap();
        if answers.len() > 1 {
            answers.pop().unwrap()
        } else {
            answers[0]
        }
    }
}

/// The facts of a process that served classic claims.
fn in_classic_mode() -> ClusterFacts {
    ClusterFacts {
        node_uid: Some("n-1".into()),
        claims: Some(ClaimsApi::Classic),
        minor: None,
    }
}

/// Devices that are unhealthy.
fn unplugged(count: usize) -> Devices {
    let device = |index: usize| {
        let device = Device {
            name: format!("d{index}"),
            kind: "ports".into(),
            unhealthy: Some("unplugged".into()),
            ..Device::default()
        };
        (device.name.clone(), device)
    };
    (0..count).map(device).collect()
}

/// A running publisher without devices, and the cluster facts it publishes.
fn publish(
    server: &InventoryServer,
    cluster: ClusterFacts,
) -> (watch::Receiver<ClusterFacts>, CancellationToken) {
    publish_devices(server, cluster, &watch::Sender::default())
}

fn publish_devices(
    server: &InventoryServer,
    cluster: ClusterFacts,
    devices: &watch::Sender<Arc<Devices>>,
) -> (watch::Receiver<ClusterFacts>, CancellationToken) {
    let (cluster, known) = watch::channel(cluster);
    let (registration_status, _) = watch::channel(RegistrationStatus::starting());
    let publisher = InventoryPublisher {
        context: NodeContext::for_tests(server.client()),
        devices: devices.subscribe(),
        cluster,
        prepared_by: Some(ClaimsApi::Classic),
        registration_status: registration_status.subscribe(),
        quarantine: server.quarantine.subscribe(),
        node_in_doubt: Arc::default(),
        notices: None,
    };
    let end = CancellationToken::new();
    tokio::spawn(publisher.run(end.clone()));
    (known, end)
}

#[tokio::test(start_paused = true)]
async fn claims_that_are_switched_on_later_are_noticed() {
    let server = InventoryServer::default();
    *server.answers.lock().unwrap() = vec![true, false, false, false];
    let (mut cluster, end) = publish(&server, ClusterFacts::default());
    cluster
        .wait_for(|facts| facts.serves(ClaimsApi::None))
        .await
        .unwrap();
    cluster
        .wait_for(|facts| facts.serves(ClaimsApi::Classic))
        .await
        .unwrap();
    while server.events.lock().unwrap().is_empty() {
        sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(*server.events.lock().unwrap(), ["ClaimsServed"]);
    let asked = server.asked.lock().unwrap().clone();
    assert_eq!(asked.len(), 4);
    for pair in asked.windows(2) {
        let pause = pair[1] - pair[0];
        assert!(
            pause >= Duration::from_secs(60) && pause <= Duration::from_secs(90),
            "{pause:?}"
        );
    }
    end.cancel();
}

#[tokio::test(start_paused = true)]
async fn three_denials_in_a_row_end_classic_mode() {
    let server = InventoryServer::default();
    *server.answers.lock().unwrap() = vec![false, true, false, false];
    let before = in_classic_mode();
    let (mut cluster, end) = publish(&server, before);
    let not_served = cluster.wait_for(|facts| facts.serves(ClaimsApi::None));
    not_served.await.unwrap();
    // Two denials, a confirmation, and three denials in a row.
    assert_eq!(server.asked.lock().unwrap().len(), 6);
    while server.events.lock().unwrap().is_empty() {
        sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(*server.events.lock().unwrap(), ["ClaimsNotServed"]);
    end.cancel();
}

#[tokio::test(start_paused = true)]
async fn a_forbidden_inventory_does_not_delay_structured_mode() {
    let server = InventoryServer {
        is_structured: true,
        forbids_inventories: true,
        ..InventoryServer::default()
    };
    let before = in_classic_mode();
    let (mut cluster, end) = publish(&server, before);
    let structured = cluster.wait_for(|facts| facts.serves(ClaimsApi::Structured));
    timeout(Duration::from_secs(60), structured)
        .await
        .expect("the API for claims is read again")
        .unwrap();
    end.cancel();
}

#[tokio::test(start_paused = true)]
async fn events_do_not_depend_on_the_inventory() {
    let server = InventoryServer {
        forbids_inventories: true,
        ..InventoryServer::default()
    };
    *server.answers.lock().unwrap() = vec![false];
    let before = in_classic_mode();
    let devices = watch::Sender::new(Arc::new(unplugged(1)));
    let (_, end) = publish_devices(&server, before, &devices);
    sleep(Duration::from_secs(600)).await;
    // Whether a previous process has reported the device is not known.
    assert_eq!(*server.events.lock().unwrap(), ["ClaimsNotServed"]);
    end.cancel();
}

#[tokio::test(start_paused = true)]
async fn events_without_an_answer_delay_the_inventory_once() {
    let server = InventoryServer {
        unanswered: Some("/events"),
        ..InventoryServer::default()
    };
    *server.answers.lock().unwrap() = vec![true];
    let devices = watch::Sender::new(Arc::new(unplugged(10)));
    let (_, end) = publish_devices(&server, ClusterFacts::default(), &devices);
    sleep(Duration::from_secs(1)).await;
    devices.send_replace(Arc::new(unplugged(11)));
    // One deadline of a call.
    sleep(Duration::from_secs(11)).await;
    let writes = server.writes.lock().unwrap().clone();
    let of_devices = writes.iter().filter(|write| *write == "spec");
    assert_eq!(of_devices.count(), 2, "{writes:?}");
    end.cancel();
}

#[tokio::test(start_paused = true)]
async fn a_foreign_write_is_repaired_once() {
    let server = InventoryServer::default();
    *server.answers.lock().unwrap() = vec![true];
    let object = |version: &str| {
        let metadata = json!({"name": "node-a.drayman.dev", "resourceVersion": version, "generation": 1});
        json!({"apiVersion": "drayman.dev/v1alpha1", "kind": "NodeInventory", "metadata": metadata, "spec": {"devices": []}})
    };
    let list = json!({"apiVersion": "drayman.dev/v1alpha1", "kind": "NodeInventoryList",
        "metadata": {"resourceVersion": "5"}, "items": [object("5")]});
    let event = format!("{}\n", json!({"type": "MODIFIED", "object": object("6")}));
    *server.observed.lock().unwrap() = VecDeque::from([list.to_string(), event]);
    let (_, end) = publish(&server, ClusterFacts::default());
    for seconds in [10, 300] {
        sleep(Duration::from_secs(seconds)).await;
        let requests = server.inventories.lock().unwrap().clone();
        let writes = requests.iter().filter(|request| *request == "PATCH");
        // Spec and status, and both again.
        assert_eq!(writes.count(), 4, "{requests:?}");
    }
    end.cancel();
}

#[tokio::test(start_paused = true)]
async fn a_device_added_by_another_writer_is_removed() {
    let server = InventoryServer::default();
    *server.answers.lock().unwrap() = vec![true];
    *server.foreign_device.lock().unwrap() = Some(json!({"name": "foreign", "kind": "k"}));
    let (_, end) = publish(&server, ClusterFacts::default());
    sleep(Duration::from_secs(10)).await;
    assert_eq!(*server.foreign_device.lock().unwrap(), None);
    end.cancel();
}

#[tokio::test(start_paused = true)]
async fn a_quarantine_is_published_after_the_devices() {
    let quarantined = Quarantined {
        claim: "claim default/camera".into(),
        why: "kubelet no longer lists it".into(),
    };
    let uid = ClaimUid::parse("7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0a").unwrap();
    let server = InventoryServer {
        quarantined: Some([(uid, quarantined)].into()),
        ..InventoryServer::default()
    };
    *server.answers.lock().unwrap() = vec![true];
    let (_, end) = publish(&server, ClusterFacts::default());
    sleep(Duration::from_secs(10)).await;
    // The devices that the claim withholds could be published with the next write.
    assert_eq!(
        *server.writes.lock().unwrap(),
        ["spec", "Ready", "Ready Quarantined"]
    );
    end.cancel();
}

#[tokio::test(start_paused = true)]
async fn without_an_answer_claims_are_served_as_prepared() {
    let server = InventoryServer {
        forbids_nodes: true,
        ..InventoryServer::default()
    };
    let (mut cluster, end) = publish(&server, ClusterFacts::default());
    let classic = cluster.wait_for(|facts| facts.serves(ClaimsApi::Classic));
    timeout(Duration::from_secs(60), classic).await.unwrap().unwrap();
    end.cancel();
}

#[tokio::test(start_paused = true)]
async fn an_interrupted_wait_keeps_the_doubt() {
    let (doubt, asked) = (Notify::new(), Instant::now());
    doubt.notify_one();
    let interrupted = timeout(Duration::from_secs(1), in_doubt(&doubt, asked)).await;
    assert!(interrupted.is_err());
    timeout(DOUBT_PAUSE, in_doubt(&doubt, asked))
        .await
        .expect("the Node is read again");
}

#[tokio::test(start_paused = true)]
async fn structured_mode_has_no_inventory() {
    let server = InventoryServer {
        is_structured: true,
        ..InventoryServer::default()
    };
    let (mut cluster, end) = publish(&server, ClusterFacts::default());
    cluster
        .wait_for(|facts| facts.serves(ClaimsApi::Structured) && facts.minor == Some(36))
        .await
        .unwrap();
    sleep(Duration::from_secs(10)).await;
    end.cancel();
    sleep(Duration::from_secs(10)).await;
    assert_eq!(*server.inventories.lock().unwrap(), Vec::<String>::new());
}
