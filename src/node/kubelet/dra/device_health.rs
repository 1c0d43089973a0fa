//! Health of devices for kubelet, which shows it in the status of pods (KEP-4680): `v1.DRAResourceHealth` of kubelet 1.37, and `v1alpha1` of
//! earlier ones.

use std::pin::Pin;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use futures::{Stream, StreamExt as _, stream};
use tokio::sync::watch;
use tokio::time::sleep_until;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::{Request, Response, Status};

use crate::api::crd::{Device, Devices};
use crate::api::proto::MAX_REQUEST;
use crate::api::proto::{dra_health_v1 as v1, dra_health_v1alpha1 as v1alpha1};
use crate::node::kubelet::recoded;
use crate::node::resync;

/// How long kubelet may rely on a health, in seconds. It is sent again at each resync, so that two resyncs may be missed.
const VALID: i64 = 150;
/// Maximum length of a message, in characters; kubelet truncates longer ones.
const MESSAGE_MAX: usize = 1024;

/// Names of the services.
pub(super) const SERVICES: [&str; 2] = [
    v1::dra_resource_health_server::SERVICE_NAME,
    v1alpha1::dra_resource_health_server::SERVICE_NAME,
];

/// The devices of this node, whose health is sent.
#[derive(Clone, Debug)]
pub struct DeviceHealth {
    /// Name of the pool: that of the node.
    pub node_name: String,
    /// The inventory.
    pub devices: watch::Receiver<Arc<Devices>>,
}

impl DeviceHealth {
    /// Adds the services. Their streams end at the shutdown.
    pub(super) fn add_to(&self, routes: Routes, shutdown: &CancellationToken) -> Routes {
        let service = DeviceHealthService {
            health: self.clone(),
            shutdown: shutdown.clone(),
        };
        let new = v1::dra_resource_health_server::DraResourceHealthServer::new(service.clone());
        let old = v1alpha1::dra_resource_health_server::DraResourceHealthServer::new(service);
        routes
            .add_service(new.max_decoding_message_size(MAX_REQUEST))
            .add_service(old.max_decoding_message_size(MAX_REQUEST))
    }
}

#[derive(Clone)]
struct DeviceHealthService {
    health: DeviceHealth,
    shutdown: CancellationToken,
}

impl DeviceHealthService {
    /// The health of all devices: once they are known, after each change, and again before it expires.
    fn responses(&self) -> impl Stream<Item = v1::NodeWatchResourcesResponse> + Send + use<> {
        let DeviceHealth { node_name, devices } = self.health.clone();
        let shutdown = self.shutdown.clone();
        let responses = stream::unfold((devices, true), move |(mut devices, first)| {
            let node_name = node_name.clone();
            async move {
                if first {
                    // They are unknown until this companion has the node's state.
                    devices.wait_for(|devices| !devices.is_empty()).await.ok()?;
                } else {
                    tokio::select! {
                        changed = devices.changed() => changed.ok()?,
                        () = sleep_until(resync::next()) => {}
                    }
                }
                let response = response(&node_name, &devices.borrow_and_update(), now());
                Some((response, (devices, false)))
            }
        });
        responses.take_until(shutdown.cancelled_owned())
    }
}

fn response(node_name: &str, devices: &Devices, now: i64) -> v1::NodeWatchResourcesResponse {
    let devices = devices.values().filter(|device| device.mode.serves_claims());
    v1::NodeWatchResourcesResponse {
        devices: devices.map(|device| health(node_name, device, now)).collect(),
    }
}

fn health(node_name: &str, device: &Device, now: i64) -> v1::DeviceHealth {
    let (health, message) = match &device.unhealthy {
        None => (v1::HealthStatus::Healthy, String::new()),
        Some(why) => (
            v1::HealthStatus::Unhealthy,
            why.chars().take(MESSAGE_MAX).collect(),
        ),
    };
    v1::DeviceHealth {
        device: Some(v1::DeviceIdentifier {
            pool_name: node_name.to_owned(),
            device_name: device.name.clone(),
        }),
        health: health.into(),
        last_updated_time: now,
        health_check_timeout_seconds: VALID,
        message,
    }
}

/// Seconds since 1970.
fn now() -> i64 {
    let elapsed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(elapsed.as_secs()).unwrap_or(i64::MAX)
}

#[tonic::async_trait]
impl v1::dra_resource_health_server::DraResourceHealth for DeviceHealthService {
    type NodeWatchResourcesStream =
        Pin<Box<dyn Stream<Item = Result<v1::NodeWatchResourcesResponse, Status>> + Send>>;

    async fn node_watch_resources(
        &self,
        _: Request<v1::NodeWatchResourcesRequest>,
    ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
        Ok(Response::new(Box::pin(self.responses().map(Ok))))
    }
}

/// `v1alpha1` is `v1` in another package.
#[tonic::async_trait]
impl v1alpha1::dra_resource_health_server::DraResourceHealth for DeviceHealthService {
    type NodeWatchResourcesStream =
        Pin<Box<dyn Stream<Item = Result<v1alpha1::NodeWatchResourcesResponse, Status>> + Send>>;

    async fn node_watch_resources(
        &self,
        _: Request<v1alpha1::NodeWatchResourcesRequest>,
    ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
        let responses = self.responses();
        let responses = responses.map(|response| recoded::<v1alpha1::NodeWatchResourcesResponse>(&response));
        Ok(Response::new(Box::pin(responses)))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::Instant;

    use super::*;
    use crate::api::crd::Mode;

    fn devices(unhealthy: Option<&str>) -> Arc<Devices> {
        let device = |name: &str, mode, unhealthy: Option<&str>| {
            let device = Device {
                name: name.into(),
                kind: "test".into(),
                mode,
                unhealthy: unhealthy.map(str::to_owned),
                ..Device::default()
            };
            (name.to_owned(), device)
        };
        Arc::new(Devices::from([
            device("camera", Mode::Claims, unhealthy),
            device("plug", Mode::ExtendedResource, None),
        ]))
    }

    #[tokio::test(start_paused = true)]
    async fn the_health_of_devices_is_sent_at_each_change_and_resync() {
        let (sender, receiver) = watch::channel(devices(None));
        let service = DeviceHealthService {
            health: DeviceHealth {
                node_name: "node-a".into(),
                devices: receiver,
            },
            shutdown: CancellationToken::new(),
        };
        let mut responses = Box::pin(service.responses());
        let first = responses.next().await.unwrap();
        assert_eq!(first.devices.len(), 1, "devices of claims only");
        assert_eq!(first.devices[0].health(), v1::HealthStatus::Healthy);

        sender.send_replace(devices(Some("it smokes")));
        let begin = Instant::now();
        let changed = responses.next().await.unwrap();
        assert_eq!(begin.elapsed(), Duration::ZERO);
        assert_eq!(changed.devices[0].health(), v1::HealthStatus::Unhealthy);
        assert_eq!(changed.devices[0].message, "it smokes");

        let again = responses.next().await.unwrap();
        assert!(begin.elapsed() <= resync::EVERY, "{:?}", begin.elapsed());
        assert_eq!(again.devices[0].message, "it smokes");

        service.shutdown.cancel();
        assert_eq!(responses.next().await, None);
    }
}
