//! Publishes the inventory and the device lists of extended resources.
//!
//! A node may have a thousand devices, and an Allocate takes about a millisecond. The lists are therefore rebuilt only when one of their inputs
//! may have changed, and share the inventory for as long as they equal it.

use std::sync::Arc;

use tokio::sync::watch;

use super::resources::{ExtendedResources, Versioned};
use crate::core::prepare::inventory::{Devices, device_counts, plugin_devices, published};
use crate::core::prepare::orphans::Orphans;
use crate::core::prepare::prepared_claims::PreparedClaims;
use crate::node::metrics::Metrics;

/// The published lists, and the inputs that they were built from.
#[derive(Debug)]
pub(super) struct Publisher {
    /// The inventory as published to the API server.
    published: watch::Sender<Arc<Devices>>,
    metrics: Arc<Metrics>,
    /// The inventory and the versions of the other inputs that the lists were built from.
    lists_from: Option<(Arc<Devices>, [u64; 6])>,
}

impl Publisher {
    pub(super) fn new(published: watch::Sender<Arc<Devices>>, metrics: Arc<Metrics>) -> Self {
        Self {
            published,
            metrics,
            lists_from: None,
        }
    }

    /// Publishes changes. Returns whether an input may have changed.
    pub(super) fn publish(
        &mut self,
        inventory: &Arc<Devices>,
        prepared_claims: &Versioned<Arc<PreparedClaims>>,
        orphans: &Versioned<Orphans>,
        resources: &ExtendedResources,
        prepared: &watch::Sender<usize>,
    ) -> bool {
        let [allocated, containers, conflicting] = resources.holder_versions();
        let versions = [
            prepared_claims.version(),
            allocated,
            containers,
            conflicting,
            resources.version(),
            // The metrics count quarantined claims.
            orphans.version(),
        ];
        if is_built_from(self.lists_from.as_ref(), inventory, versions) {
            return false;
        }
        let count = prepared_claims.entries().len();
        prepared.send_if_modified(|before| std::mem::replace(before, count) != count);
        let handed_out = resources.handed_out(prepared_claims);
        let devices = device_counts(inventory, handed_out);
        self.metrics
            .set_devices(devices, count, orphans.quarantine().len());
        for resource in resources.all() {
            let devices = plugin_devices(inventory, handed_out, &resource.config.kind);
            resource.devices.send_if_modified(|before| {
                let is_news = *before != devices;
                *before = devices;
                is_news
            });
        }
        let conflicting = resources.conflicting();
        let all = if conflicting.devices().is_empty() {
            inventory.clone()
        } else {
            Arc::new(published(inventory, conflicting))
        };
        self.published.send_if_modified(|before| {
            let is_news = !is_the_same(before, &all);
            if is_news {
                *before = all;
            }
            is_news
        });
        self.lists_from = Some((inventory.clone(), versions));
        true
    }
}

/// Whether something was built from these devices and these versions of the other inputs.
pub(super) fn is_built_from<const N: usize>(
    built: Option<&(Arc<Devices>, [u64; N])>,
    devices: &Arc<Devices>,
    versions: [u64; N],
) -> bool {
    built.is_some_and(|(before, counted)| Arc::ptr_eq(before, devices) && *counted == versions)
}

/// Compares the devices only if the pointers differ.
pub(super) fn is_the_same(one: &Arc<Devices>, other: &Arc<Devices>) -> bool {
    Arc::ptr_eq(one, other) || one == other
}

#[cfg(test)]
mod tests;
