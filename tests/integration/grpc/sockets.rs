use std::fs;
use std::time::Duration;

use drayman::api::proto::dra_v1alpha3::node_client::NodeClient;
use drayman::api::proto::dra_v1alpha3::{Claim, NodePrepareResourcesRequest, NodeUnprepareResourcesRequest};
use drayman::api::proto::plugin_registration::registration_client::RegistrationClient;
use drayman::api::proto::plugin_registration::{InfoRequest, RegistrationStatus};
use drayman::node::kubelet::{KubeletApiError, KubeletApiState, KubeletPaths, dra};
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::grpc::fixture::{
    DRIVER, DraEndpoint, FakeCompanion, channel, paths, soon, until_exists, until_state,
};

fn claims(name: &str) -> Vec<Claim> {
    vec![Claim {
        uid: "u".into(),
        name: name.into(),
        ..Claim::default()
    }]
}

#[tokio::test]
async fn removed_sockets_come_back_and_the_state_reports_it() {
    let mut dra = DraEndpoint::open().await;
    let mut kubelet = RegistrationClient::new(channel(&dra.registration()).await);
    let registered = RegistrationStatus {
        plugin_registered: true,
        error: String::new(),
    };
    kubelet
        .notify_registration_status(registered.clone())
        .await
        .unwrap();
    until_state(&mut dra.state, &KubeletApiState::Registered).await;

    fs::remove_file(dra.registration()).unwrap();
    until_state(&mut dra.state, &KubeletApiState::Waiting).await;
    let mut again = RegistrationClient::new(channel(&dra.registration()).await);
    again.notify_registration_status(registered).await.unwrap();
    until_state(&mut dra.state, &KubeletApiState::Registered).await;
    // The earlier connection still works.
    kubelet.get_info(InfoRequest {}).await.unwrap();

    // The whole directory is replaced.
    let registry = dra.registration().parent().unwrap().to_owned();
    fs::rename(&registry, dra.directory.path().join("away")).unwrap();
    until_state(&mut dra.state, &KubeletApiState::Waiting).await;
    until_exists(&dra.registration(), true).await;
    RegistrationClient::new(channel(&dra.registration()).await)
        .get_info(InfoRequest {})
        .await
        .unwrap();
    fs::remove_dir_all(&registry).unwrap();
    until_exists(&dra.registration(), true).await;

    fs::remove_dir_all(dra.directory.path().join("plugins")).unwrap();
    until_exists(&dra.service(), true).await;
    NodeClient::new(channel(&dra.service()).await)
        .node_unprepare_resources(NodeUnprepareResourcesRequest { claims: claims("a") })
        .await
        .unwrap();
    dra.close().await;
}

#[tokio::test]
async fn a_shutdown_removes_sockets_although_a_call_hangs() {
    let dra = DraEndpoint::open().await;
    let mut client = NodeClient::new(channel(&dra.service()).await);
    let request = NodePrepareResourcesRequest {
        claims: claims("slow"),
    };
    let hanging = tokio::spawn(async move { client.node_prepare_resources(request).await });
    while dra.companion.calls().is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let (registration, service) = (dra.registration(), dra.service());
    let mut state = dra.state.clone();
    let start = std::time::Instant::now();
    dra.shutdown.cancel();
    until_exists(&service, false).await;
    assert!(
        registration.exists(),
        "kubelet would close the connection of the call"
    );
    dra.close().await;
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    assert!(!registration.exists() && !service.exists());
    assert_eq!(*state.borrow_and_update(), KubeletApiState::Closed);
    assert!(soon(hanging).await.unwrap().is_err());
}

#[tokio::test]
async fn a_refused_socket_names_the_cause() {
    let refused = async |driver: &str, root: std::path::PathBuf| {
        let paths = KubeletPaths {
            root_dir: root,
            ..KubeletPaths::default()
        };
        let state = watch::Sender::new(KubeletApiState::Starting);
        soon(dra::serve(
            FakeCompanion::new().service.clone(),
            paths,
            driver.into(),
            dra::DraApi::Classic,
            state,
            CancellationToken::new(),
        ))
        .await
        .unwrap_err()
    };
    let directory = tempfile::tempdir().unwrap();
    let root = || directory.path().to_owned();
    let registration = paths(&directory).registration_socket(DRIVER).path;
    let service = paths(&directory).service_socket(DRIVER).path;

    assert_eq!(refused("../../etc", root()).await.reason(), "InvalidDriverName");
    assert_eq!(
        refused(DRIVER, root().join("none")).await.reason(),
        "KubeletDirectoryMissing"
    );
    let long = root().join("d".repeat(80));
    fs::create_dir(&long).unwrap();
    let error = refused(DRIVER, long.clone()).await;
    let text = error.to_string();
    assert!(
        text.contains("--kubelet-root-dir") && text.contains(long.to_str().unwrap()),
        "{text}"
    );

    fs::create_dir_all(registration.parent().unwrap()).unwrap();
    fs::write(&registration, "precious").unwrap();
    let error = refused(DRIVER, root()).await;
    assert!(
        matches!(error, KubeletApiError::Socket(_))
            && error.to_string().contains(registration.to_str().unwrap())
    );
    assert_eq!(fs::read(&registration).unwrap(), b"precious");
    assert!(!service.exists(), "the opened service is closed again");
    fs::remove_file(&registration).unwrap();

    let other = UnixListener::bind(&registration).unwrap();
    assert_eq!(refused(DRIVER, root()).await.reason(), "SocketInUse");
    drop(other);
    // A child process of another test may hold it open until exec.
    soon(async {
        while std::os::unix::net::UnixStream::connect(&registration).is_ok() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    // The socket is now stale, as after a crash.
    assert!(registration.exists());
    let (sender, mut state) = watch::channel(KubeletApiState::Starting);
    let shutdown = CancellationToken::new();
    let task = tokio::spawn(dra::serve(
        FakeCompanion::new().service.clone(),
        paths(&directory),
        DRIVER.into(),
        dra::DraApi::Classic,
        sender,
        shutdown.clone(),
    ));
    until_state(&mut state, &KubeletApiState::Waiting).await;
    soon(async {
        while tokio::net::UnixStream::connect(&registration).await.is_err() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    shutdown.cancel();
    soon(task).await.unwrap().unwrap();
}
