//! Publishes the inventory and the device lists of extended resources.
//!
//! A node may have a thousand devices, and an Allocate takes about a millisecond. Both are therefore rebuilt only when one of their inputs
//! may have changed, and share the found devices for as long as they equal them.

use std::ops::Deref;
use std::sync::Arc;

use tokio::sync::watch;

use super::resources::ExtendedResources;
use crate::core::prepare::inventory::{
    Devices, device_counts, inventory, is_as_found, plugin_devices, published, withhold,
};
use crate::core::prepare::orphans::Orphans;
use crate::core::prepare::prepared_claims::PreparedClaims;
use crate::node::metrics::Metrics;

/// A value with a count of its possible changes.
#[derive(Debug, Default)]
pub(super) struct Versioned<T> {
    value: T,
    version: u64,
}

impl<T> Versioned<T> {
    pub(super) fn new(value: T) -> Self {
        Self { value, version: 0 }
    }

    /// Mutable access; counts as a change.
    pub(super) fn change(&mut self) -> &mut T {
        self.version = self.version.wrapping_add(1);
        &mut self.value
    }

    pub(super) fn version(&self) -> u64 {
        self.version
    }
}

impl<T> Deref for Versioned<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

/// The parts of the node's state that decide what is published.
#[derive(Clone, Copy)]
pub(super) struct Inputs<'a> {
    /// The found devices.
    pub(super) found: &'a Arc<Devices>,
    pub(super) prepared_claims: &'a Versioned<Arc<PreparedClaims>>,
    pub(super) orphans: &'a Versioned<Orphans>,
    pub(super) resources: &'a ExtendedResources,
}

/// The inventory, the published lists, and the versions of the inputs that they were built from.
#[derive(Debug)]
pub(super) struct Publisher {
    /// The found devices, and held devices that are gone.
    inventory: Arc<Devices>,
    /// The inventory as published to the API server.
    published: watch::Sender<Arc<Devices>>,
    metrics: Arc<Metrics>,
    inventory_from: Option<(Arc<Devices>, [u64; 4])>,
    lists_from: Option<(Arc<Devices>, [u64; 6])>,
}

impl Publisher {
    pub(super) fn new(published: watch::Sender<Arc<Devices>>, metrics: Arc<Metrics>) -> Self {
        Self {
            inventory: Arc::default(),
            published,
            metrics,
            inventory_from: None,
            lists_from: None,
        }
    }

    pub(super) fn inventory(&self) -> &Arc<Devices> {
        &self.inventory
    }

    /// Rebuilds the inventory, if an input may have changed. Returns whether it was rebuilt.
    pub(super) fn rebuild_inventory(&mut self, inputs: Inputs<'_>) -> bool {
        let Inputs {
            found,
            prepared_claims,
            orphans,
            resources,
        } = inputs;
        let versions = [
            prepared_claims.version,
            orphans.version,
            resources.withdrawn_version(),
            resources.version(),
        ];
        if is_built_from(self.inventory_from.as_ref(), found, versions) {
            return false;
        }
        let quarantine = orphans.quarantine();
        let as_found =
            quarantine.is_empty() && !resources.has_withdrawn() && is_as_found(found, prepared_claims);
        let all = if as_found {
            found.clone()
        } else {
            let mut all = inventory(found, &self.inventory, prepared_claims);
            withhold(&mut all, prepared_claims, &quarantine);
            resources.withhold_withdrawn(&mut all);
            Arc::new(all)
        };
        if !is_the_same(&self.inventory, &all) {
            self.inventory = all;
        }
        self.inventory_from = Some((found.clone(), versions));
        true
    }

    /// Publishes changes. Returns whether an input may have changed.
    pub(super) fn publish(&mut self, inputs: Inputs<'_>, prepared: &watch::Sender<usize>) -> bool {
        let Inputs {
            prepared_claims,
            orphans,
            resources,
            ..
        } = inputs;
        let [allocated, containers, conflicting] = resources.holder_versions();
        let versions = [
            prepared_claims.version,
            allocated,
            containers,
            conflicting,
            resources.version(),
            // The metrics count quarantined claims.
            orphans.version,
        ];
        if is_built_from(self.lists_from.as_ref(), &self.inventory, versions) {
            return false;
        }
        let count = prepared_claims.entries().len();
        prepared.send_if_modified(|before| std::mem::replace(before, count) != count);
        let handed_out = resources.handed_out(prepared_claims);
        let devices = device_counts(&self.inventory, handed_out);
        self.metrics.stock(devices, count, orphans.quarantine().len());
        for resource in resources.all() {
            let devices = plugin_devices(&self.inventory, handed_out, &resource.config.kind);
            resource.devices.send_if_modified(|before| {
                let is_news = *before != devices;
                *before = devices;
                is_news
            });
        }
        let conflicting = resources.conflicting();
        let all = if conflicting.devices().is_empty() {
            self.inventory.clone()
        } else {
            Arc::new(published(&self.inventory, conflicting))
        };
        self.published.send_if_modified(|before| {
            let is_news = !is_the_same(before, &all);
            if is_news {
                *before = all;
            }
            is_news
        });
        self.lists_from = Some((self.inventory.clone(), versions));
        true
    }
}

fn is_built_from<const N: usize>(
    built: Option<&(Arc<Devices>, [u64; N])>,
    devices: &Arc<Devices>,
    versions: [u64; N],
) -> bool {
    built.is_some_and(|(before, counted)| Arc::ptr_eq(before, devices) && *counted == versions)
}

/// Compares the devices only if the pointers differ.
fn is_the_same(one: &Arc<Devices>, other: &Arc<Devices>) -> bool {
    Arc::ptr_eq(one, other) || one == other
}

#[cfg(test)]
mod tests;
