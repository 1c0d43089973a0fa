//! Claims: the DRA services that kubelet calls, and their registration.

mod classic;
pub(crate) mod device_health;
pub(crate) mod structured;

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use self::device_health::DeviceHealth;
use self::structured::ClaimReader;
use super::registration::RegistrationService;
use super::{KubeletApiError, KubeletApiState, KubeletPaths, health, is_served};
use crate::api::proto::MAX_REQUEST;
use crate::api::proto::plugin_registration::PluginInfo;
use crate::api::proto::plugin_registration::registration_server::RegistrationServer;
use crate::core::names::check_driver;
use crate::node::kubelet::transport::{SocketError, SocketPath, listen, remove_stale};
use crate::node::service::NodeService;

/// First and longest delay before a rejected registration is offered again.
const RETRY: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(600));

/// The services on the DRA socket.
#[derive(Clone, Debug)]
pub enum DraApi {
    /// `v1alpha2.Node` and `v1alpha3.Node` of kubelet 1.27 to 1.30.
    Classic,
    /// `v1.DRAPlugin` and `v1beta1.DRAPlugin` of kubelet 1.32 and later, and the health of devices.
    Structured {
        /// Reads the allocations of claims.
        claims: ClaimReader,
        /// Sends the health of devices.
        health: DeviceHealth,
    },
}

impl DraApi {
    fn services(&self) -> &'static [&'static str] {
        match self {
            Self::Classic => classic::SERVICES,
            Self::Structured { .. } => structured::SERVICES,
        }
    }

    fn supported_versions(&self) -> Vec<String> {
        match self {
            Self::Classic => classic::supported_versions(),
            Self::Structured { .. } => structured::supported_versions(),
        }
    }

    fn routes(&self, node: &NodeService, shutdown: &CancellationToken) -> Routes {
        match self {
            Self::Classic => classic::routes(node),
            Self::Structured { claims, health } => health.add_to(structured::routes(node, claims), shutdown),
        }
    }
}

/// The sockets of the DRA service and of its registration. Two companions of a node alternate between the pairs.
fn socket_pairs(paths: &KubeletPaths, driver_name: &str) -> [(SocketPath, SocketPath); 2] {
    [
        (
            paths.service_socket(driver_name),
            paths.registration_socket(driver_name),
        ),
        (
            paths.second_service_socket(driver_name),
            paths.second_registration_socket(driver_name),
        ),
    ]
}

/// Removes the sockets that killed companions have left, so that kubelet forgets them. Call it with the lock of the node's state.
pub(in crate::node) async fn remove_stale_sockets(paths: &KubeletPaths, driver_name: &str) {
    for (service, registration) in socket_pairs(paths, driver_name) {
        for location in [registration, service] {
            match remove_stale(&location).await {
                Ok(()) | Err(SocketError::InUse { .. }) => {}
                Err(error) => tracing::warn!(reason = error.reason(), "{error}"),
            }
        }
    }
}

/// Serves the DRA API until the shutdown.
///
/// The DRA service (`<root>/plugins/<driver>/dra.sock`) is served first; then the registration service
/// (`<root>/plugins_registry/<driver>/reg.sock`). Both sockets are recreated whenever they are removed. A restarted kubelet walks its plugin
/// directory and finds the registration again. At the end, the registration socket is removed last.
///
/// In structured mode, a companion that hands over to this one may still serve these sockets; this one then uses a second pair. Kubelet 1.33 and
/// later keeps both and calls the one that registered last.
///
/// `state` follows the registration; it is [`KubeletApiState::Waiting`] once both sockets are served. Dropping the future stops the
/// endpoint like the shutdown does, without waiting for calls in flight. Errors are returned only before the endpoint is served.
pub async fn serve(
    node: NodeService,
    paths: KubeletPaths,
    driver_name: String,
    api: DraApi,
    state: watch::Sender<KubeletApiState>,
    shutdown: CancellationToken,
) -> Result<(), KubeletApiError> {
    check_driver(&driver_name)?;
    let ours = shutdown.child_token();
    let _end_with_this = ours.clone().drop_guard();
    let drained = CancellationToken::new();
    let _end_of_registration = drained.clone().drop_guard();

    let health = health::service(api.services(), state.subscribe()).await;
    let serve = |location: &SocketPath| {
        let routes = api.routes(&node, &ours).add_service(health.clone());
        listen(location.clone(), routes, node.grpc_calls(), ours.clone())
    };
    let [first, second] = socket_pairs(&paths, &driver_name);
    let ((service_place, registration_place), service) = match serve(&first.0).await {
        Err(SocketError::InUse { .. }) if matches!(api, DraApi::Structured { .. }) => {
            let service = serve(&second.0).await?;
            (second, service)
        }
        served => (first, served?),
    };
    let mut states = state.subscribe();
    let info = PluginInfo {
        r#type: "DRAPlugin".into(),
        name: driver_name.clone(),
        endpoint: service_place.path.display().to_string(),
        supported_versions: api.supported_versions(),
    };
    let registration = RegistrationService {
        info,
        state: state.clone(),
    };
    let registration =
        Routes::new(RegistrationServer::new(registration).max_decoding_message_size(MAX_REQUEST));
    let registration = listen(
        registration_place,
        registration,
        node.grpc_calls(),
        drained.clone(),
    );
    let registration = match registration.await {
        Ok(registration) => registration,
        Err(error) => {
            ours.cancel();
            service.closed().await;
            state.send_replace(KubeletApiState::Closed);
            return Err(error.into());
        }
    };
    is_served(&state);
    tracing::info!(driver = driver_name, "the DRA service is ready");

    let mut published = registration.published.clone();
    published.mark_unchanged();
    let mut pause = RETRY.0;
    loop {
        let rejected = matches!(*states.borrow_and_update(), KubeletApiState::Rejected { .. });
        tokio::select! {
            () = ours.cancelled() => break,
            Ok(()) = published.changed() => {
                // Kubelet registers the new socket.
                state.send_replace(KubeletApiState::Waiting);
            }
            Ok(()) = states.changed() => {
                if *states.borrow() == KubeletApiState::Registered {
                    pause = RETRY.0;
                }
            }
            () = sleep(pause), if rejected => {
                // Kubelet up to 1.35 asks again only for a new socket.
                registration.renew();
                pause = RETRY.1.min(pause * 2);
            }
        }
    }
    service.closed().await;
    // When the registration socket is removed, kubelet 1.37 closes its connection to the service, which cancels the calls in flight.
    drained.cancel();
    registration.closed().await;
    state.send_replace(KubeletApiState::Closed);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::path::Path;
    use std::sync::Arc;

    use tokio::task::JoinHandle;

    use super::*;
    use crate::core::names::DriverName;

    const DRIVER: &str = "drayman.dev";

    /// Serves the API of structured mode, and waits until it does.
    async fn start(paths: &KubeletPaths) -> (CancellationToken, JoinHandle<Result<(), KubeletApiError>>) {
        let (node, _backend) = NodeService::new(None, Arc::default());
        let _ = rustls::crypto::ring::default_provider().install_default();
        let server = kube::Config::new("http://127.0.0.1:9".parse().unwrap());
        let client = kube::Client::try_from(server).unwrap();
        let api = DraApi::Structured {
            claims: ClaimReader::new(client, DriverName::parse(DRIVER).unwrap()),
            health: DeviceHealth {
                node_name: "node-a".into(),
                devices: watch::channel(Arc::default()).1,
            },
        };
        let (state, mut seen) = watch::channel(KubeletApiState::Starting);
        let shutdown = CancellationToken::new();
        let task = serve(node, paths.clone(), DRIVER.into(), api, state, shutdown.clone());
        let task = tokio::spawn(task);
        seen.wait_for(|state| *state == KubeletApiState::Waiting)
            .await
            .unwrap();
        (shutdown, task)
    }

    #[tokio::test]
    async fn a_removed_socket_of_the_second_pair_comes_back() {
        let root = tempfile::tempdir().unwrap();
        let paths = KubeletPaths {
            root_dir: root.path().to_owned(),
            ..KubeletPaths::default()
        };
        let (_first, _second) = (start(&paths).await, start(&paths).await);
        let [_, second] = socket_pairs(&paths, DRIVER);
        for path in [second.0.path, second.1.path] {
            std::fs::remove_file(&path).unwrap();
            let is_back = async {
                while !path.exists() {
                    sleep(Duration::from_millis(5)).await;
                }
            };
            // By an event, not by the next resync.
            let soon = Duration::from_secs(10);
            tokio::time::timeout(soon, is_back).await.unwrap();
        }
    }

    fn exist(paths: &KubeletPaths) -> [bool; 4] {
        let [(first, first_registration), (second, second_registration)] = socket_pairs(paths, DRIVER);
        [first, first_registration, second, second_registration].map(|location| location.path.exists())
    }

    #[tokio::test]
    async fn two_companions_alternate_between_the_sockets() {
        let root = tempfile::tempdir().unwrap();
        let paths = KubeletPaths {
            root_dir: root.path().to_owned(),
            ..KubeletPaths::default()
        };
        let (first, first_task) = start(&paths).await;
        assert_eq!(exist(&paths), [true, true, false, false]);
        let (second, second_task) = start(&paths).await;
        assert_eq!(exist(&paths), [true; 4]);
        remove_stale_sockets(&paths, DRIVER).await;
        assert_eq!(exist(&paths), [true; 4], "both are served");
        first.cancel();
        first_task.await.unwrap().unwrap();
        assert_eq!(exist(&paths), [false, false, true, true]);

        // A killed companion leaves its sockets.
        let leave = |path: &Path| drop(UnixListener::bind(path).unwrap());
        leave(&paths.service_socket(DRIVER).path);
        leave(&paths.registration_socket(DRIVER).path);
        remove_stale_sockets(&paths, DRIVER).await;
        assert_eq!(exist(&paths), [false, false, true, true]);
        second.cancel();
        second_task.await.unwrap().unwrap();
        assert_eq!(exist(&paths), [false; 4]);
    }
}
