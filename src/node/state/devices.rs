//! The node driver's interface to the state task: device lists, and calls with a timeout.

use std::collections::BTreeSet;
use std::sync::Arc;

use futures::StreamExt as _;
use tokio::sync::watch;
use tokio::time::timeout;

use super::DRIVER_TIMEOUT;
use super::handle::Failure;
use crate::core::prepare::inventory::Devices;
use crate::node::driver::{self, NodeDriver, NodeDriverError};

/// Waits for the driver's first list and keeps receiving updates.
pub(super) async fn listen_to<D: NodeDriver>(driver: &D) -> watch::Receiver<Arc<Devices>> {
    let mut lists = Box::pin(driver.devices());
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

/// Calls the driver with a timeout.
pub(super) async fn in_time<T>(
    what: String,
    call: impl Future<Output = Result<T, NodeDriverError>>,
) -> Result<T, Failure> {
    match timeout(DRIVER_TIMEOUT, call).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(Failure::Slow { what }),
    }
}
