//! Lasting faults, and faults of the environment instead of a program.

use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use drayman::api::crd::NodeInventory;
use drayman::controller::Controller;
use drayman::host::HostDriver;
use drayman::testcluster::api::{ApiServer, ClusterMode};
use drayman::testcluster::clock_and_rng::ClockAndRng;
use drayman::testcluster::cluster::TestCluster;
use drayman::testcluster::faults::{Fault, Faults, Operation, PlannedFault};
use jiff::{SignedDuration, Timestamp};
use kube::api::{Api, Patch, PatchParams};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::check::{DRIVER, is_allocated, text};
use crate::not_run::is_root;
use crate::objects::class;
use crate::program::{until, until_seen};
use crate::scenario::{CONTROLLER, run};

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Runtime::new().unwrap()
}

/// Alternates by an hour with each call.
fn jumping() -> Timestamp {
    static LOOKS: AtomicI64 = AtomicI64::new(0);
    let hours = LOOKS.fetch_add(1, Ordering::Relaxed) % 3 - 1;
    Timestamp::now() + SignedDuration::from_hours(hours)
}

#[test]
fn the_clock_of_the_api_server_may_jump_by_an_hour() {
    if !is_root() {
        return;
    }
    let result = runtime().block_on(run(ClusterMode::Classic, Vec::new(), jumping));
    assert_eq!(
        result.violations,
        Vec::<String>::new(),
        "{}",
        result.trace.join("\n")
    );
}

#[test]
fn the_first_lists_come_from_the_quorum_and_not_a_cache() {
    if !is_root() {
        return;
    }
    let result = runtime().block_on(run(ClusterMode::Classic, Vec::new(), Timestamp::now));
    assert_eq!(result.violations, Vec::<String>::new());
    let requests = result
        .trace
        .iter()
        .filter(|line| line.contains(CONTROLLER) && line.contains(": GET "));
    let lists: Vec<&String> = requests.filter(|line| line.contains("limit=")).collect();
    for plural in [
        "resourceclasses",
        "resourceclaims",
        "podschedulingcontexts",
        "nodeinventories",
    ] {
        let of_kind = lists.iter().filter(|line| line.contains(plural));
        assert!(of_kind.count() > 0, "{plural} is not listed: {lists:?}");
    }
    // `resourceVersion=0` is answered from the cache of any API server, which may be stale.
    let from_a_cache: Vec<_> = lists
        .iter()
        .filter(|line| line.contains("resourceVersion"))
        .collect();
    assert!(from_a_cache.is_empty(), "{from_a_cache:?}");
}

/// A control plane with the inventory of a node with this many devices, without the node itself.
pub(crate) async fn control_plane(devices: usize) -> TestCluster {
    let cluster = TestCluster::start(ClockAndRng::new(Box::new(Timestamp::now), 1));
    for definition in drayman::api::crd::definitions() {
        cluster
            .apply(&serde_json::to_string(&definition).unwrap())
            .unwrap();
    }
    cluster.apply(&class("test")).unwrap();
    let node = "apiVersion: v1\nkind: Node\nmetadata: {name: node-a}\n";
    let node = cluster.apply(node).unwrap();
    let devices: Vec<_> = (0..devices)
        .map(|number| json!({ "name": format!("test-{number}"), "kind": "test", "mode": "claims" }))
        .collect();
    let name = format!("node-a.{DRIVER}");
    let inventory = json!({
        "apiVersion": "drayman.dev/v1alpha1", "kind": "NodeInventory", "metadata": { "name": name },
        "spec": { "driverName": DRIVER, "nodeName": "node-a", "nodeUid": text(&node[0], "/metadata/uid"), "devices": devices },
    });
    cluster.apply(&inventory.to_string()).unwrap();
    let ready = json!({ "type": "Ready", "status": "True", "reason": "Serving", "message": "", "lastTransitionTime": Timestamp::now() });
    let status = json!({ "status": { "devices": devices.len(), "unhealthy": 0, "conditions": [ready] } });
    let inventories = Api::<NodeInventory>::all(cluster.server().client());
    inventories
        .patch_status(&name, &PatchParams::default(), &Patch::Merge(status))
        .await
        .unwrap();
    cluster
}

pub(crate) fn make_claim(cluster: &TestCluster, name: &str) {
    let claim = format!(
        "apiVersion: resource.k8s.io/v1alpha2\nkind: ResourceClaim\nmetadata: {{name: {name}, namespace: default}}\n\
         spec: {{resourceClassName: test, allocationMode: Immediate}}\n"
    );
    cluster.apply(&claim).unwrap();
}

pub(crate) fn has_device(server: &ApiServer, name: &str) -> bool {
    let claims = server.objects("resourceclaims");
    let mut found = claims
        .iter()
        .filter(|claim| text(claim, "/metadata/name") == name);
    found.any(is_allocated)
}

/// Resolves to whether the controller ended without an error.
pub(crate) fn serve(client: kube::Client, stop: CancellationToken) -> tokio::task::JoinHandle<bool> {
    let driver = HostDriver::start(client.clone(), DRIVER.to_owned(), stop.clone());
    let controller = Controller::builder(driver).build(client).unwrap();
    tokio::spawn(async move { controller.run(stop).await.is_ok() })
}

/// Five minutes without events pass at once, with the test's clock.
#[tokio::test(start_paused = true)]
async fn a_watch_that_hangs_is_restarted() {
    let hour = Duration::from_secs(3600);
    let (mut hung, mut events) = (0, 4);
    let mut number = 1;
    while number <= events {
        let faults = Faults::new(vec![PlannedFault {
            program: CONTROLLER,
            operation: Operation::Event,
            number,
            fault: Fault::Lost,
        }]);
        faults.count(true);
        let cluster = control_plane(2).await;
        let process = faults.begin(CONTROLLER);
        let serving = serve(process.client(cluster.server()), process.stop().clone());
        for name in ["first", "second"] {
            make_claim(&cluster, name);
            let look = Duration::from_secs(5);
            let came = until_seen(hour, look, || has_device(cluster.server(), name)).await;
            assert!(
                came,
                "event {number}: {name} is not allocated\n{}",
                faults.trace().join("\n")
            );
        }
        events = events.max(faults.counts()[&(CONTROLLER, Operation::Event)]);
        hung += faults.hits().len();
        process.stop().cancel();
        assert!(serving.await.unwrap());
        cluster.stop().await;
        number += 1;
    }
    println!("{hung} watches hung");
    assert!(hung >= 4);
}

/// Accepts one token at a time, as the API server does when a service account's token is replaced.
async fn guarded(
    server: &ApiServer,
    token: Arc<Mutex<String>>,
    refused: Arc<AtomicUsize>,
) -> std::net::SocketAddr {
    use axum::extract::Request;
    use axum::http::StatusCode;
    use axum::http::header::AUTHORIZATION;
    use axum::middleware::{Next, from_fn};
    use axum::response::IntoResponse as _;
    let router = server.router().layer(from_fn(move |request: Request, next: Next| {
        let (token, refused) = (token.clone(), refused.clone());
        async move {
            let wanted = format!("Bearer {}", token.lock().unwrap());
            let sent = request.headers().get(AUTHORIZATION);
            if sent.is_some_and(|sent| sent.as_bytes() == wanted.as_bytes()) {
                return next.run(request).await;
            }
            refused.fetch_add(1, Ordering::Relaxed);
            let status = json!({
                "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Unauthorized", "code": 401, "message": "Unauthorized",
            });
            (StatusCode::UNAUTHORIZED, status.to_string()).into_response()
        }
    }));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await });
    address
}

/// The client rereads the file about once a minute; until then its requests are rejected.
#[tokio::test]
async fn a_replaced_token_is_used_from_then_on() {
    // Fails if another test has done it.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let cluster = control_plane(2).await;
    let (token, refused) = (Arc::new(Mutex::new("one".to_owned())), Arc::default());
    let address = guarded(cluster.server(), token.clone(), Arc::clone(&refused)).await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("token");
    std::fs::write(&file, "one").unwrap();
    let mut config = kube::Config::new(format!("http://{address}").parse().unwrap());
    config.default_retry = false;
    config.auth_info.token_file = Some(file.display().to_string());
    let stop = CancellationToken::new();
    let serving = serve(kube::Client::try_from(config).unwrap(), stop.clone());
    make_claim(&cluster, "first");
    let limit = Duration::from_secs(300);
    assert!(until(limit, || has_device(cluster.server(), "first")).await);

    "two".clone_into(&mut token.lock().unwrap());
    make_claim(&cluster, "second");
    assert!(
        until(limit, || refused.load(Ordering::Relaxed) > 0).await,
        "the old token is still used"
    );
    std::fs::write(&file, "two").unwrap();
    assert!(until(limit, || has_device(cluster.server(), "second")).await);
    stop.cancel();
    assert!(serving.await.unwrap());
    cluster.stop().await;
}

/// Times of the controller's requests to the resource API in milliseconds, and whether each was throttled.
fn asked(trace: &[String]) -> Vec<(u64, bool)> {
    let own = trace
        .iter()
        .filter(|line| line.contains(" Request ") && line.contains("resource.k8s.io/v1alpha2/"));
    let moment = |line: &String| line.split_whitespace().next()?.parse().ok();
    own.filter_map(|line| Some((moment(line)?, line.contains("<-- Busy"))))
        .collect()
}

/// Answers with `Retry-After: 1` at each of the requests in turn.
#[tokio::test(start_paused = true)]
async fn a_busy_api_server_is_not_asked_before_retry_after() {
    let (mut refused, mut requests, mut number) = (0, 1, 1);
    while number <= requests {
        let faults = Faults::new(vec![PlannedFault {
            program: CONTROLLER,
            operation: Operation::Request,
            number,
            fault: Fault::Busy,
        }]);
        let cluster = control_plane(1).await;
        let process = faults.begin(CONTROLLER);
        let serving = serve(process.client(cluster.server()), process.stop().clone());
        faults.count(true);
        make_claim(&cluster, "first");
        let look = Duration::from_millis(50);
        // If the first discovery request fails, the controller exits and would be restarted.
        let ended = || serving.is_finished() || has_device(cluster.server(), "first");
        let came = until_seen(Duration::from_secs(3600), look, ended).await;
        let trace = faults.trace();
        assert!(came, "request {number}:\n{}", trace.join("\n"));
        let asked = asked(&trace);
        if let Some((throttled_at, _)) = asked.iter().find(|(_, busy)| *busy) {
            refused += 1;
            let early = asked
                .iter()
                .find(|(moment, _)| (throttled_at + 1..throttled_at + 1000).contains(moment));
            assert_eq!(early, None, "request {number}:\n{}", trace.join("\n"));
        }
        requests = requests.max(faults.counts()[&(CONTROLLER, Operation::Request)]);
        process.stop().cancel();
        let served = serving.await.unwrap();
        assert!(served || asked.is_empty());
        cluster.stop().await;
        number += 1;
    }
    println!("{refused} of {requests} requests were refused");
    assert!(refused > 4);
}
