use std::sync::Arc;

use super::fixture::*;
use crate::api::crd::Mode;

/// The CDI file of device `x` for containers that have it by name.
const NAMED: &str = "drayman.dev-device_x.json";

#[tokio::test]
async fn a_file_that_could_not_be_restored_is_restored_later() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&["x", "y"]));
    let run = live_and_know(root.path(), "boot", &driver).await;
    run.prepare(A, &["x"]).await.unwrap();
    run.prepare(B, &["y"]).await.unwrap();
    run.end().await;
    std::fs::remove_dir_all(root.path().join("cdi")).unwrap();
    let obstacle = root.path().join(format!("cdi/{}.tmp", file(A)));
    std::fs::create_dir_all(&obstacle).unwrap();

    let run = live_and_know(root.path(), "boot", &driver).await;
    let left = format!("{}.tmp", file(A));
    assert_eq!(files(root.path()), [left, file(B)]);
    std::fs::remove_dir(&obstacle).unwrap();
    until_files(root.path(), &[file(A), file(B)]).await;
    run.end().await;
}

#[tokio::test]
async fn a_file_of_an_unreadable_device_is_restored_later() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&["x"]));
    let run = live_and_know(root.path(), "boot", &driver).await;
    run.prepare(A, &["x"]).await.unwrap();
    driver.gone.lock().unwrap().insert("x".into());
    driver.say(&["x"], "other", Mode::Claims);
    until_files(root.path(), &[]).await;
    driver.gone.lock().unwrap().clear();
    until_files(root.path(), &[file(A)]).await;

    // A failed call also removes the CDI file of a claim in use.
    driver.gone.lock().unwrap().insert("x".into());
    assert_eq!(run.prepare(A, &["x"]).await.unwrap_err().reason(), "DeviceGone");
    assert_eq!(files(root.path()), Vec::<String>::new());
    driver.gone.lock().unwrap().clear();
    until_files(root.path(), &[file(A)]).await;
    run.unprepare(A).await.unwrap();
    run.end().await;
}

#[tokio::test]
async fn a_file_that_could_not_be_written_is_written_later() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&[]));
    driver.say(&["x"], "camera", Mode::ExtendedResource);
    driver.gone.lock().unwrap().insert("x".into());
    let run = live(root.path(), "boot", &driver).await;
    assert_eq!(files(root.path()), Vec::<String>::new());
    driver.gone.lock().unwrap().clear();
    until_files(root.path(), &[NAMED.to_owned()]).await;
    run.end().await;
}

#[tokio::test]
async fn a_name_that_is_no_longer_configured_is_restored_later() {
    for had_file in [true, false] {
        let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&[]));
        driver.say(&["x"], "camera", Mode::ExtendedResource);
        if !had_file {
            // As after a boot, when the files are missing.
            driver.gone.lock().unwrap().insert("x".into());
        }
        let run = live(root.path(), "boot", &driver).await;
        assert_eq!(files(root.path()).is_empty(), !had_file);
        // From here on, only containers have the name, and the update of its file fails.
        driver.gone.lock().unwrap().insert("x".into());
        run.configured.send_replace(Arc::default());
        driver.say(&["x"], "camera", Mode::Claims);
        until_files(root.path(), &[]).await;
        driver.gone.lock().unwrap().clear();
        until_files(root.path(), &[NAMED.to_owned()]).await;
        run.end().await;
    }
}

#[tokio::test]
async fn a_name_that_is_no_longer_configured_returns_with_its_device() {
    let (root, driver) = (tempfile::tempdir().unwrap(), FakeDriver::new(&[]));
    driver.say(&["x"], "camera", Mode::ExtendedResource);
    let run = live(root.path(), "boot", &driver).await;
    run.configured.send_replace(Arc::default());
    driver.say(&[], "camera", Mode::Claims);
    until_files(root.path(), &[]).await;
    driver.say(&["x"], "camera", Mode::Claims);
    until_files(root.path(), &[NAMED.to_owned()]).await;
    run.end().await;
}
