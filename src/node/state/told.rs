//! What the owner tells: the inventory, and the lists of extended resources.
//!
//! A node may have a thousand devices, and an Allocate a millisecond. So both are made anew only when something of what they are
//! made from may have changed, and the devices themselves are shared as long as nothing has to be said beside what was found.

use std::ops::Deref;
use std::sync::Arc;

use super::Owner;
use crate::core::prepare::census::census;
use crate::core::prepare::inventory::{Devices, inventory, is_as_found, plugin_devices, published, withhold};
use crate::node::driver::NodeDriver;

/// A value with the number of times that somebody may have changed it.
#[derive(Debug, Default)]
pub(super) struct Noted<T> {
    value: T,
    changes: u64,
}

impl<T> Noted<T> {
    pub(super) fn new(value: T) -> Self {
        Self { value, changes: 0 }
    }

    /// The value, to be changed.
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

/// What the present inventory and the present lists were made from: some devices, and how often everything else had changed.
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

impl<D: NodeDriver> Owner<D> {
    /// Joins what was found with what is held. Says whether there was anything to join anew.
    pub(super) fn take_stock(&mut self) -> bool {
        let changes = [
            self.ledger.changes,
            self.orphans.changes,
            self.former.changes,
            self.resources.changes,
        ];
        if is_made_of(self.told.inventory.as_ref(), &self.devices, changes) {
            return false;
        }
        let quarantine = self.orphans.quarantine();
        let as_found =
            quarantine.is_empty() && self.former.is_empty() && is_as_found(&self.devices, &self.ledger);
        let all = if as_found {
            self.devices.clone()
        } else {
            let mut all = inventory(&self.devices, &self.inventory, &self.ledger);
            withhold(&mut all, &self.ledger, &quarantine);
            self.withhold_former(&mut all);
            Arc::new(all)
        };
        if !is_the_same(&self.inventory, &all) {
            self.inventory = all;
        }
        self.told.inventory = Some((self.devices.clone(), changes));
        true
    }

    /// Tells what has changed. Says whether anything could have.
    pub(super) fn publish(&mut self) -> bool {
        let changes = [
            self.ledger.changes,
            self.announced.changes,
            self.containers.changes,
            self.contested.changes,
            self.resources.changes,
            // The figures count what is in quarantine.
            self.orphans.changes,
        ];
        if is_made_of(self.told.lists.as_ref(), &self.inventory, changes) {
            return false;
        }
        let count = self.ledger.entries().len();
        self.held
            .send_if_modified(|held| std::mem::replace(held, count) != count);
        let devices = census(&self.inventory, self.handed_out());
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
        let all = if self.contested.devices().is_empty() {
            self.inventory.clone()
        } else {
            Arc::new(published(&self.inventory, &self.contested))
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

/// Without a look at each device, if it is the very same.
fn is_the_same(one: &Arc<Devices>, other: &Arc<Devices>) -> bool {
    Arc::ptr_eq(one, other) || one == other
}

#[cfg(test)]
mod tests;
