//! The node driver's interface to the state task: device lists, and calls with a timeout.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures::StreamExt as _;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::core::prepare::container_edits::ContainerEdits;
use crate::core::prepare::inventory::Devices;
use crate::core::prepare::prepared_claims::ClaimEdits;
use crate::node::driver::{self, NodeDriver, NodeDriverError, PreparedClaim};
use crate::node::service::{DRIVER_TIMEOUT, ServiceError};

/// The node driver, each call with a timeout.
#[derive(Debug)]
pub(super) struct DriverClient<D>(pub(super) Arc<D>);

impl<D: NodeDriver> DriverClient<D> {
    /// Waits for the driver's first list and keeps receiving updates.
    pub(super) async fn devices(&self) -> watch::Receiver<Arc<Devices>> {
        let mut lists = Box::pin(self.0.devices());
        let mut reported = BTreeSet::new();
        let mut take = move |list| {
            let (devices, problems) = driver::served(list);
            driver::report(problems, &mut reported);
            Arc::new(devices)
        };
        let (sender, found) = watch::channel(lists.next().await.map(&mut take).unwrap_or_default());
        tokio::spawn(async move {
            while let Some(list) = lists.next().await {
                let devices = take(list);
                if sender.is_closed() {
                    return;
                }
                sender.send_if_modified(|found| {
                    let changed = *found != devices;
                    *found = devices;
                    changed
                });
            }
            // The last list stays valid: if the sender were dropped, the receiver would report a change forever.
            sender.closed().await;
        });
        found
    }

    /// The container edits for a claim, with a variable for each device; in structured mode also those for each device alone.
    pub(super) async fn prepare(
        &self,
        claim: &PreparedClaim,
        structured: bool,
    ) -> Result<ClaimEdits, ServiceError> {
        let made = in_time(format!("claim {}", claim.uid), self.0.prepare(claim)).await?;
        // A driver that implements `prepare` itself may return one node twice.
        let mut container_edits = ContainerEdits::default();
        container_edits.extend(made);
        container_edits.name_devices(claim.devices.iter().map(String::as_str));
        container_edits.check_paths()?;
        let devices = if structured {
            self.of_each_device(claim, &container_edits).await?
        } else {
            BTreeMap::new()
        };
        Ok(ClaimEdits {
            all: container_edits,
            devices,
        })
    }

    /// Splits the edits for a claim, so that a container gets only the devices of the requests that it names.
    async fn of_each_device(
        &self,
        claim: &PreparedClaim,
        all: &ContainerEdits,
    ) -> Result<BTreeMap<String, ContainerEdits>, ServiceError> {
        if let [device] = claim.devices.as_slice() {
            return Ok(BTreeMap::from([(device.clone(), all.clone())]));
        }
        let mut own = BTreeMap::new();
        for device in &claim.devices {
            own.insert(device.clone(), self.container_edits(device).await?);
        }
        Ok(all.of_each(&own))
    }

    pub(super) async fn unprepare(&self, claim: &PreparedClaim) -> Result<(), ServiceError> {
        in_time(format!("claim {}", claim.uid), self.0.unprepare(claim)).await
    }

    pub(super) async fn check_unused(&self, device: &str) -> Result<(), ServiceError> {
        in_time(format!("device {device:?}"), self.0.check_unused(device)).await
    }

    /// The container edits for a device, with its variable.
    pub(super) async fn container_edits(&self, device: &str) -> Result<ContainerEdits, ServiceError> {
        let what = format!("device {device:?}");
        let mut container_edits = in_time(what, self.0.container_edits(device)).await?;
        container_edits.name_devices([device]);
        Ok(container_edits)
    }
}

/// Calls the driver with a timeout.
async fn in_time<T>(
    what: String,
    call: impl Future<Output = Result<T, NodeDriverError>>,
) -> Result<T, ServiceError> {
    match timeout(DRIVER_TIMEOUT, call).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(ServiceError::Slow { what }),
    }
}
