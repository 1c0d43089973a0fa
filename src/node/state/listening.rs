//! The driver as the owner sees it: lists of devices, and calls that take so long at most.

use std::collections::BTreeSet;
use std::sync::Arc;

use futures::StreamExt as _;
use tokio::sync::watch;
use tokio::time::timeout;

use super::DRIVER_TIMEOUT;
use super::handle::Failure;
use crate::core::prepare::inventory::Devices;
use crate::node::driver::{self, NodeDriver, NodeDriverError};

/// Waits for the driver's first list, and goes on listening to it.
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
        // The last list stands: without a sender the owner would take it for a change for ever.
        sender.closed().await;
    });
    found
}

/// Calls the driver, for so long.
pub(super) async fn in_time<T>(
    what: String,
    call: impl Future<Output = Result<T, NodeDriverError>>,
) -> Result<T, Failure> {
    match timeout(DRIVER_TIMEOUT, call).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(Failure::Slow { what }),
    }
}
