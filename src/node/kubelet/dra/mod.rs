//! Claims: the DRA services of kubelet 1.27 to 1.30, and their registration.

pub(crate) mod allocated_claims;
mod service;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use super::registration::RegistrationService;
use super::{DoorError, DoorState, KubeletPaths, health, is_served};
use crate::api::proto::plugin_registration::PluginInfo;
use crate::api::proto::plugin_registration::registration_server::RegistrationServer;
use crate::core::prepare::name::check_driver;
use crate::node::companion::Companion;
use crate::node::kubelet::transport::{MAX_MESSAGE, listen};

/// What kubelet up to 1.31 takes as the version of a DRA plugin: any 1.x. While it has a plugin of this name registered at another socket, it
/// takes a higher version only. Releases that said 1.0.0 had their registration beside the driver's folder. If such a companion is
/// killed, its socket stays, and the next companion cannot reach it.
const SUPPORTED_VERSION: &str = "1.0.1";
/// How soon a rejected registration is offered again, at first and at last.
const RETRY: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(600));

/// Opens the door for claims and keeps it open until the shutdown.
///
/// The DRA service (`<root>/plugins/<driver>/dra.sock`) is served first, as `v1alpha2.Node` and `v1alpha3.Node` of kubelet 1.27
/// to 1.30; then the registration (`<root>/plugins_registry/<driver>/reg.sock`). Both are made again whenever somebody removes
/// them. A kubelet that restarts finds the registration by itself: it walks its directory.
///
/// `state` follows the registration; it is [`DoorState::Waiting`] once both sockets are served. Dropping the future closes the
/// door as the shutdown does, without waiting for calls in flight. An error comes only before the door is open.
pub async fn serve<C: Companion>(
    companion: Arc<C>,
    paths: KubeletPaths,
    driver_name: String,
    state: watch::Sender<DoorState>,
    shutdown: CancellationToken,
) -> Result<(), DoorError> {
    check_driver(&driver_name)?;
    let ours = shutdown.child_token();
    let _end_with_this = ours.clone().drop_guard();

    let service_place = paths.service_socket(&driver_name);
    let endpoint = service_place.path.display().to_string();
    let health = health::service(service::SERVICES, state.subscribe()).await;
    let service = listen(
        service_place,
        service::routes(&companion).add_service(health),
        companion.grpc_calls(),
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
        companion.grpc_calls(),
        ours.clone(),
    )
    .await
    {
        Ok(registration) => registration,
        Err(error) => {
            ours.cancel();
            service.closed().await;
            state.send_replace(DoorState::Closed);
            return Err(error.into());
        }
    };
    is_served(&state);
    tracing::info!(driver = driver_name, "the door for claims is open");

    let mut published = registration.published.clone();
    published.mark_unchanged();
    let mut pause = RETRY.0;
    loop {
        let rejected = matches!(*verdicts.borrow_and_update(), DoorState::Rejected { .. });
        tokio::select! {
            () = ours.cancelled() => break,
            Ok(()) = published.changed() => {
                // Kubelet will ask the new socket.
                state.send_replace(DoorState::Waiting);
            }
            Ok(()) = verdicts.changed() => {
                if *verdicts.borrow() == DoorState::Registered {
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
    state.send_replace(DoorState::Closed);
    Ok(())
}
