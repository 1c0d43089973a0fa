//! Claims: the DRA services of kubelet 1.27 to 1.30, and their registration.

pub(crate) mod allocated_claims;
mod service;

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use super::registration::RegistrationService;
use super::{KubeletApiError, KubeletApiState, KubeletPaths, health, is_served};
use crate::api::proto::plugin_registration::PluginInfo;
use crate::api::proto::plugin_registration::registration_server::RegistrationServer;
use crate::core::prepare::name::check_driver;
use crate::node::kubelet::transport::{MAX_MESSAGE, listen};
use crate::node::service::NodeService;

/// The version announced in the plugin registration. Kubelet up to 1.31 accepts any 1.x, but while a plugin of this name is
/// registered at another socket, only a higher version. Releases that announced 1.0.0 had their registration socket outside the
/// driver's folder: if such a companion is killed, its socket stays and the next companion cannot remove it.
const SUPPORTED_VERSION: &str = "1.0.1";
/// First and longest delay before a rejected registration is offered again.
const RETRY: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(600));

/// Serves the DRA API until the shutdown.
///
/// The DRA service (`<root>/plugins/<driver>/dra.sock`) is served first, as `v1alpha2.Node` and `v1alpha3.Node` of kubelet 1.27 to
/// 1.30; then the registration service (`<root>/plugins_registry/<driver>/reg.sock`). Both sockets are recreated whenever they are
/// removed. A restarted kubelet walks its plugin directory and finds the registration again.
///
/// `state` follows the registration; it is [`KubeletApiState::Waiting`] once both sockets are served. Dropping the future stops the
/// endpoint like the shutdown does, without waiting for calls in flight. Errors are returned only before the endpoint is served.
pub async fn serve(
    node: NodeService,
    paths: KubeletPaths,
    driver_name: String,
    state: watch::Sender<KubeletApiState>,
    shutdown: CancellationToken,
) -> Result<(), KubeletApiError> {
    check_driver(&driver_name)?;
    let ours = shutdown.child_token();
    let _end_with_this = ours.clone().drop_guard();

    let service_place = paths.service_socket(&driver_name);
    let endpoint = service_place.path.display().to_string();
    let health = health::service(service::SERVICES, state.subscribe()).await;
    let service = listen(
        service_place,
        service::routes(&node).add_service(health),
        node.grpc_calls(),
        ours.clone(),
    )
    .await?;
    let mut verdicts = state.subscribe();
    let info = PluginInfo {
        r#type: "DRAPlugin".into(),
        name: driver_name.clone(),
        endpoint,
        supported_versions: vec![SUPPORTED_VERSION.into()],
    };
    let registration = RegistrationService {
        info,
        state: state.clone(),
    };
    let registration =
        Routes::new(RegistrationServer::new(registration).max_decoding_message_size(MAX_MESSAGE));
    let registration = match listen(
        paths.registration_socket(&driver_name),
        registration,
        node.grpc_calls(),
        ours.clone(),
    )
    .await
    {
        Ok(registration) => registration,
        Err(error) => {
            ours.cancel();
            service.closed().await;
            state.send_replace(KubeletApiState::Closed);
            return Err(error.into());
        }
    };
    is_served(&state);
    tracing::info!(driver = driver_name, "the door for claims is open");

    let mut published = registration.published.clone();
    published.mark_unchanged();
    let mut pause = RETRY.0;
    loop {
        let rejected = matches!(*verdicts.borrow_and_update(), KubeletApiState::Rejected { .. });
        tokio::select! {
            () = ours.cancelled() => break,
            Ok(()) = published.changed() => {
                // Kubelet registers the new socket.
                state.send_replace(KubeletApiState::Waiting);
            }
            Ok(()) = verdicts.changed() => {
                if *verdicts.borrow() == KubeletApiState::Registered {
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
    registration.closed().await;
    service.closed().await;
    state.send_replace(KubeletApiState::Closed);
    Ok(())
}
