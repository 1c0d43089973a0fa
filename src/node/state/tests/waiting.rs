use std::sync::atomic::Ordering;

use tokio::task::JoinHandle;

use super::super::*;
use super::fixture::*;
use crate::api::crd::Mode;
use crate::core::prepare::containers::ResourceSnapshot;
use crate::node::service::ServiceError;

/// A node whose cameras have mode `both`, and a kubelet that shows no container.
async fn live_with_cameras() -> (tempfile::TempDir, Run, Arc<Kubelet>) {
    let root = tempfile::tempdir().unwrap();
    let (driver, kubelet) = (FakeDriver::new(&[]), Arc::new(Kubelet::default()));
    driver.say(&["x", "y"], "camera", Mode::Both);
    *kubelet.shown.lock().unwrap() = Some(ResourceSnapshot::default());
    let run = live_beside(root.path(), "boot", &driver, Some(kubelet.clone())).await;
    run.cluster.send_replace(ClusterFacts {
        node_uid: Some("n-1".into()),
        claims: Some(crate::core::prepare::claims_api::ClaimsApi::Classic),
        minor: None,
    });
    run.publisher.send_replace(Arc::new(AllocatedClaims::none()));
    (root, run, kubelet)
}

/// Kubelet stops answering, and a claim for a camera waits for it.
async fn waits(run: &Run, kubelet: &Kubelet) -> JoinHandle<Result<Vec<String>, ServiceError>> {
    kubelet.hangs.store(true, Ordering::SeqCst);
    let queries = kubelet.queries.load(Ordering::SeqCst);
    let handle = run.handle.clone();
    let prepared = tokio::spawn(async move { handle.prepare(vec![claim(A, &["x"])], None).await.remove(0) });
    soon(async {
        while kubelet.queries.load(Ordering::SeqCst) == queries {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    prepared
}

#[tokio::test]
async fn a_hanging_kubelet_delays_only_requests_that_need_it() {
    let (_root, run, kubelet) = live_with_cameras().await;
    let waiting = waits(&run, &kubelet).await;
    let containers = vec![vec!["y".to_owned()]];
    soon(run.handle.allocate("example.com/camera", containers))
        .await
        .unwrap();
    soon(run.unprepare(B)).await.unwrap();
    assert!(!waiting.is_finished());
    kubelet.hangs.store(false, Ordering::SeqCst);
    soon(waiting).await.unwrap().unwrap();
    run.end().await;
}

#[tokio::test]
async fn a_claim_unprepared_while_it_waits_is_not_prepared() {
    let (_root, run, kubelet) = live_with_cameras().await;
    let waiting = waits(&run, &kubelet).await;
    soon(run.unprepare(A)).await.unwrap();
    kubelet.hangs.store(false, Ordering::SeqCst);
    let refused = soon(waiting).await.unwrap().unwrap_err();
    assert!(refused.to_string().contains("called Unprepare"), "{refused}");
    run.prepare(B, &["x"]).await.unwrap();
    run.end().await;
}

#[tokio::test]
async fn kubelet_is_queried_once_for_all_withdrawn_names() {
    let (_root, run, kubelet) = live_with_cameras().await;
    let resources = |names: &[&str]| {
        let resource = |name: &&str| ((*name).to_owned(), ExtendedResource::of_kind("camera"));
        Arc::new(names.iter().map(resource).collect::<BTreeMap<_, _>>())
    };
    let before = ["example.com/a", "example.com/b", "example.com/c"];
    run.configured.send_replace(resources(&before));
    soon(async {
        while run.handle.plugin_devices("example.com/c").is_none() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    let queries = kubelet.queries.load(Ordering::SeqCst);
    run.configured.send_replace(resources(&["example.com/d"]));
    soon(async {
        while run.handle.plugin_devices("example.com/d").is_none() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    // All earlier queries are complete, because a request is served after the change.
    soon(run.unprepare(B)).await.unwrap();
    assert_eq!(kubelet.queries.load(Ordering::SeqCst), queries + 1);
    run.end().await;
}

#[tokio::test(start_paused = true)]
async fn frequent_requests_do_not_put_off_the_next_query() {
    let (_root, run, kubelet) = live_with_cameras().await;
    *kubelet.shown.lock().unwrap() = Some(super::granted("x"));
    let refused = run.prepare(A, &["x"]).await.unwrap_err();
    assert_eq!(refused.reason(), "DeviceHeld", "{refused}");
    let mut inventory = run.inventory.clone();
    let conflicting = inventory.wait_for(|all| all["x"].unhealthy.is_some());
    soon(conflicting).await.unwrap();
    *kubelet.shown.lock().unwrap() = Some(ResourceSnapshot::default());
    for _ in 0..4 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        run.handle.holdings().await.unwrap();
    }
    assert!(run.inventory.borrow()["x"].unhealthy.is_none());
    run.end().await;
}
