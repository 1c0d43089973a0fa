//! `grpc.health.v1` on the endpoints' sockets.
//!
//! A health check takes the same path as kubelet: the same socket, limits and header rewriting. It needs no port, and only root and
//! the companion's own user can connect. Kubelet's `grpc` probes support only ports, so the pod's probes use HTTP.

use tokio::sync::watch;
use tonic_health::ServingStatus;
use tonic_health::pb::health_server::{Health, HealthServer};
use tonic_health::server::{HealthReporter, health_reporter};

use super::KubeletApiState;
use crate::api::proto::MAX_REQUEST;

/// Health of these services and of the whole socket; both follow the endpoint's state.
pub(super) async fn service(
    services: &'static [&'static str],
    mut state: watch::Receiver<KubeletApiState>,
) -> HealthServer<impl Health> {
    let (reporter, server) = health_reporter();
    // Computed in its own statement: the borrow must end before the `await`.
    let now = status(&state.borrow_and_update());
    report(&reporter, services, now).await;
    tokio::spawn(async move {
        while state.changed().await.is_ok() {
            let now = status(&state.borrow_and_update());
            report(&reporter, services, now).await;
        }
    });
    server.max_decoding_message_size(MAX_REQUEST)
}

async fn report(reporter: &HealthReporter, services: &[&str], status: ServingStatus) {
    for service in [""].iter().chain(services) {
        reporter.set_service_status(service, status).await;
    }
}

/// An endpoint that kubelet has not registered yet is already serving.
fn status(state: &KubeletApiState) -> ServingStatus {
    match state {
        KubeletApiState::Waiting | KubeletApiState::Registered => ServingStatus::Serving,
        KubeletApiState::Starting
        | KubeletApiState::Rejected { .. }
        | KubeletApiState::Failed { .. }
        | KubeletApiState::Closed => ServingStatus::NotServing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_api_is_healthy_while_it_serves_and_is_not_refused() {
        let rejected = KubeletApiState::Rejected {
            message: String::new(),
        };
        for (now, expected) in [
            (KubeletApiState::Starting, ServingStatus::NotServing),
            (KubeletApiState::Waiting, ServingStatus::Serving),
            (KubeletApiState::Registered, ServingStatus::Serving),
            (rejected, ServingStatus::NotServing),
            (KubeletApiState::Closed, ServingStatus::NotServing),
        ] {
            assert_eq!(status(&now), expected, "{now:?}");
        }
    }
}
