use std::sync::atomic::Ordering;
use std::time::Duration;

use super::fixture::*;
use crate::node::service::ReleaseError;

/// A claim whose Prepare failed with a driver that cannot undo its work.
async fn half_done(life: &Life, driver: &FakeDriver) {
    driver.stuck.store(true, Ordering::SeqCst);
    driver.gone.lock().unwrap().insert("x".into());
    assert_eq!(life.prepare(A, &["x"]).await.unwrap_err().reason(), "DeviceGone");
    driver.gone.lock().unwrap().clear();
}

async fn held(life: &Life) -> Vec<String> {
    let holdings = life.handle.clone().holdings().await.unwrap();
    holdings.into_iter().map(|holding| holding.claim_uid).collect()
}

#[tokio::test]
async fn a_device_the_driver_cannot_undo_is_withheld_until_undone() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&["x"]));
    let life = live_and_know(root.path(), "boot", &driver).await;
    half_done(&life, &driver).await;
    assert_eq!(held(&life).await, [A]);
    assert_eq!(
        life.prepare(B, &["x"]).await.unwrap_err().reason(),
        "DeviceFailed"
    );
    driver.stuck.store(false, Ordering::SeqCst);
    life.prepare(B, &["x"]).await.unwrap();
    assert_eq!(held(&life).await, [B]);
    assert!(driver.undone.lock().unwrap().contains(A));
    life.end().await;
}

#[tokio::test]
async fn a_failed_undo_is_retried_at_the_next_resync() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&["x"]));
    let life = live_and_know(root.path(), "boot", &driver).await;
    half_done(&life, &driver).await;
    let records = life.handle.clone();
    records.find_orphans(Duration::from_secs(1)).await.unwrap();
    assert_eq!(held(&life).await, [A]);
    driver.stuck.store(false, Ordering::SeqCst);
    records.find_orphans(Duration::from_secs(2)).await.unwrap();
    assert!(held(&life).await.is_empty());
    drop(records);
    life.end().await;
}

#[tokio::test]
async fn what_a_driver_cannot_undo_at_a_start_is_undone_at_the_next() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&["x"]));
    let life = live_and_know(root.path(), "boot", &driver).await;
    half_done(&life, &driver).await;
    life.end().await;
    let life = live_and_know(root.path(), "boot", &driver).await;
    assert_eq!(held(&life).await, [A], "it is not forgotten");
    life.end().await;
    driver.stuck.store(false, Ordering::SeqCst);
    let life = live_and_know(root.path(), "boot", &driver).await;
    assert!(held(&life).await.is_empty());
    assert!(driver.undone.lock().unwrap().contains(A));
    life.end().await;
}

#[tokio::test]
async fn a_release_reports_what_the_driver_cannot_undo() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&["x"]));
    let life = live_and_know(root.path(), "boot", &driver).await;
    life.prepare(A, &["x"]).await.unwrap();
    driver.stuck.store(true, Ordering::SeqCst);
    let records = life.handle.clone();
    for _ in 0..2 {
        let refused = records.release(A.into(), true).await.unwrap_err();
        assert!(matches!(
            refused,
            ReleaseError::NotUndone {
                reason: "DeviceFailed",
                ..
            }
        ));
        let said = refused.to_string();
        assert!(
            said.contains("does not answer") && !said.contains("stopping"),
            "{said}"
        );
        assert_eq!(held(&life).await, [A]);
    }
    until_files(root.path(), &[file(A)]).await;
    driver.stuck.store(false, Ordering::SeqCst);
    records.release(A.into(), true).await.unwrap();
    assert!(held(&life).await.is_empty() && driver.undone.lock().unwrap().contains(A));
    drop(records);
    life.end().await;
}

#[tokio::test]
async fn a_claim_that_cannot_be_unprepared_keeps_its_file() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&["x"]));
    let life = live_and_know(root.path(), "boot", &driver).await;
    life.prepare(A, &["x"]).await.unwrap();
    driver.stuck.store(true, Ordering::SeqCst);
    let refused = life.unprepare(A).await.unwrap_err();
    assert_eq!(refused.reason(), "DeviceFailed");
    assert_eq!(held(&life).await, [A]);
    // Kubelet drops the Unprepare if another pod uses the claim by then, and starts its containers without a Prepare.
    until_files(root.path(), &[file(A)]).await;
    driver.stuck.store(false, Ordering::SeqCst);
    life.unprepare(A).await.unwrap();
    assert!(files(root.path()).is_empty() && held(&life).await.is_empty());
    life.end().await;
}
