use std::sync::atomic::Ordering;
use std::time::Duration;

use super::fixture::*;
use crate::api::crd::Mode;
use crate::node::service::{DRIVER_TIMEOUT, ReleaseError};

/// A claim whose Prepare failed with a driver that cannot roll it back.
async fn half_done(run: &Run, driver: &FakeDriver) {
    driver.stuck.store(true, Ordering::SeqCst);
    driver.gone.lock().unwrap().insert("x".into());
    assert_eq!(run.prepare(A, &["x"]).await.unwrap_err().reason(), "DeviceGone");
    driver.gone.lock().unwrap().clear();
}

async fn held(run: &Run) -> Vec<String> {
    let holdings = run.handle.clone().holdings().await.unwrap();
    holdings.into_iter().map(|holding| holding.claim_uid).collect()
}

#[tokio::test]
async fn a_device_is_withheld_until_its_roll_back_succeeds() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&["x"]));
    let run = live_and_know(root.path(), "boot", &driver).await;
    half_done(&run, &driver).await;
    assert_eq!(held(&run).await, [A]);
    assert_eq!(run.prepare(B, &["x"]).await.unwrap_err().reason(), "DeviceFailed");
    driver.stuck.store(false, Ordering::SeqCst);
    run.prepare(B, &["x"]).await.unwrap();
    assert_eq!(held(&run).await, [B]);
    assert!(driver.unprepared.lock().unwrap().contains(A));
    run.end().await;
}

#[tokio::test]
async fn a_failed_roll_back_is_retried_at_the_next_resync() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&["x"]));
    let run = live_and_know(root.path(), "boot", &driver).await;
    half_done(&run, &driver).await;
    let records = run.handle.clone();
    records.find_orphans(Duration::from_secs(1)).await.unwrap();
    assert_eq!(held(&run).await, [A]);
    driver.stuck.store(false, Ordering::SeqCst);
    records.find_orphans(Duration::from_secs(2)).await.unwrap();
    assert!(held(&run).await.is_empty());
    drop(records);
    run.end().await;
}

#[tokio::test]
async fn a_roll_back_that_fails_at_a_start_is_retried_at_the_next() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&["x"]));
    let run = live_and_know(root.path(), "boot", &driver).await;
    half_done(&run, &driver).await;
    run.end().await;
    let run = live_and_know(root.path(), "boot", &driver).await;
    assert_eq!(held(&run).await, [A], "it is not forgotten");
    run.end().await;
    driver.stuck.store(false, Ordering::SeqCst);
    let run = live_and_know(root.path(), "boot", &driver).await;
    assert!(held(&run).await.is_empty());
    assert!(driver.unprepared.lock().unwrap().contains(A));
    run.end().await;
}

#[tokio::test]
async fn a_release_reports_a_failed_roll_back() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&["x"]));
    let run = live_and_know(root.path(), "boot", &driver).await;
    run.prepare(A, &["x"]).await.unwrap();
    driver.stuck.store(true, Ordering::SeqCst);
    let records = run.handle.clone();
    for _ in 0..2 {
        let refused = records.release(A.into(), true).await.unwrap_err();
        assert!(matches!(
            refused,
            ReleaseError::NotRolledBack {
                reason: "DeviceFailed",
                ..
            }
        ));
        let said = refused.to_string();
        assert!(
            said.contains("does not answer") && !said.contains("stopping"),
            "{said}"
        );
        assert_eq!(held(&run).await, [A]);
    }
    until_files(root.path(), &[file(A)]).await;
    driver.stuck.store(false, Ordering::SeqCst);
    records.release(A.into(), true).await.unwrap();
    assert!(held(&run).await.is_empty() && driver.unprepared.lock().unwrap().contains(A));
    drop(records);
    run.end().await;
}

#[tokio::test]
async fn a_claim_that_cannot_be_unprepared_keeps_its_file() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&["x"]));
    let run = live_and_know(root.path(), "boot", &driver).await;
    run.prepare(A, &["x"]).await.unwrap();
    driver.stuck.store(true, Ordering::SeqCst);
    let refused = run.unprepare(A).await.unwrap_err();
    assert_eq!(refused.reason(), "DeviceFailed");
    assert_eq!(held(&run).await, [A]);
    // Kubelet drops the Unprepare if another pod uses the claim by then, and starts its containers without a Prepare.
    until_files(root.path(), &[file(A)]).await;
    driver.stuck.store(false, Ordering::SeqCst);
    run.unprepare(A).await.unwrap();
    assert!(files(root.path()).is_empty() && held(&run).await.is_empty());
    run.end().await;
}

#[tokio::test(start_paused = true)]
async fn requests_are_served_between_retries() {
    const C: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0c";
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&["x", "y", "z"]));
    let run = live_and_know(root.path(), "boot", &driver).await;
    for (uid, device) in [(A, "x"), (B, "y"), (C, "z")] {
        run.prepare(uid, &[device]).await.unwrap();
    }
    driver
        .gone
        .lock()
        .unwrap()
        .extend(["x".to_owned(), "y".to_owned()]);
    driver.say(&["z"], "test", Mode::Claims);
    while files(root.path()) != [file(C)] {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    // The release makes both retries due, and the driver does not answer.
    let closed = driver.gate.acquire().await.unwrap();
    run.unprepare(C).await.unwrap();
    tokio::time::sleep(Duration::from_millis(1)).await;
    let begin = tokio::time::Instant::now();
    run.unprepare(C).await.unwrap();
    assert!(begin.elapsed() <= DRIVER_TIMEOUT, "{:?}", begin.elapsed());
    drop(closed);
    run.end().await;
}
