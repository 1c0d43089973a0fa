//! Publishes the inventory and the device lists of extended resources.
//!
//! A node may have a thousand devices, and an Allocate takes about a millisecond. Both are therefore rebuilt only when one of their inputs
//! may have changed, and share the found devices for as long as they equal them.

use std::ops::Deref;
use std::sync::Arc;

use super::NodeState;
use crate::core::prepare::device_counts::device_counts;
use crate::core::prepare::inventory::{Devices, inventory, is_as_found, plugin_devices, published, withhold};
use crate::node::driver::NodeDriver;

/// A value with a count of its possible changes.
#[derive(Debug, Default)]
pub(super) struct Noted<T> {
    value: T,
    changes: u64,
}

impl<T> Noted<T> {
    pub(super) fn new(value: T) -> Self {
        Self { value, changes: 0 }
    }

    /// Mutable access; counts as a change.
    pub(super) fn change(&mut self) -> &mut T {
        self.changes = self.changes.wrapping_add(1);
        &mut self.value
    }
}

impl<T> Deref for Noted<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

/// The inputs of the current inventory and lists: the devices, and the change counts of everything else.
#[derive(Debug, Default)]
pub(super) struct Told {
    inventory: Option<(Arc<Devices>, [u64; 4])>,
    lists: Option<(Arc<Devices>, [u64; 6])>,
}

fn is_made_of<const N: usize>(
    made: Option<&(Arc<Devices>, [u64; N])>,
    devices: &Arc<Devices>,
    changes: [u64; N],
) -> bool {
    made.is_some_and(|(before, counted)| Arc::ptr_eq(before, devices) && *counted == changes)
}

impl<D: NodeDriver> NodeState<D> {
    /// Rebuilds the inventory from the found and the held devices, if an input may have changed. Returns whether it was rebuilt.
    pub(super) fn take_stock(&mut self) -> bool {
        let changes = [
            self.prepared_claims.changes,
            self.orphans.changes,
            self.former.changes,
            self.resources.changes,
        ];
        if is_made_of(self.told.inventory.as_ref(), &self.devices, changes) {
            return false;
        }
        let quarantine = self.orphans.quarantine();
        let as_found = quarantine.is_empty()
            && self.former.is_empty()
            && is_as_found(&self.devices, &self.prepared_claims);
        let all = if as_found {
            self.devices.clone()
        } else {
            let mut all = inventory(&self.devices, &self.inventory, &self.prepared_claims);
            withhold(&mut all, &self.prepared_claims, &quarantine);
            self.withhold_former(&mut all);
            Arc::new(all)
        };
        if !is_the_same(&self.inventory, &all) {
            self.inventory = all;
        }
        self.told.inventory = Some((self.devices.clone(), changes));
        true
    }

    /// Publishes changes. Returns whether an input may have changed.
    pub(super) fn publish(&mut self) -> bool {
        let changes = [
            self.prepared_claims.changes,
            self.allocated_claims.changes,
            self.containers.changes,
            self.conflicting.changes,
            self.resources.changes,
            // The metrics count quarantined claims.
            self.orphans.changes,
        ];
        if is_made_of(self.told.lists.as_ref(), &self.inventory, changes) {
            return false;
        }
        let count = self.prepared_claims.entries().len();
        self.held
            .send_if_modified(|held| std::mem::replace(held, count) != count);
        let devices = device_counts(&self.inventory, self.handed_out());
        self.figures
            .stock(devices, count, self.orphans.quarantine().len());
        for resource in self.resources.values() {
            let devices = plugin_devices(&self.inventory, self.handed_out(), &resource.offered.kind);
            resource.devices.send_if_modified(|before| {
                let is_news = *before != devices;
                *before = devices;
                is_news
            });
        }
        let all = if self.conflicting.devices().is_empty() {
            self.inventory.clone()
        } else {
            Arc::new(published(&self.inventory, &self.conflicting))
        };
        self.published.send_if_modified(|before| {
            let is_news = !is_the_same(before, &all);
            if is_news {
                *before = all;
            }
            is_news
        });
        self.told.lists = Some((self.inventory.clone(), changes));
        true
    }
}

/// Compares the devices only if the pointers differ.
fn is_the_same(one: &Arc<Devices>, other: &Arc<Devices>) -> bool {
    Arc::ptr_eq(one, other) || one == other
}

#[cfg(test)]
mod tests;
