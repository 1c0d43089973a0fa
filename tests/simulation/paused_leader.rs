//! A leader that is paused between the lease check and its write, which then arrives under another leader.
//!
//! A lease cannot prevent that (see `lease.rs`), so a device may be allocated to two claims. The older allocation stands; the younger one
//! is rolled back unless its pod has a node.

use std::collections::{BTreeMap, BTreeSet};

use drayman::core::claims::{Answer, ClaimWrite, Command, Event, ObjectKey};
use drayman::driver::Finding;

use crate::cluster::{Action, Cluster, SECOND};
use crate::describe::describe_command;
use crate::driver::{recorded_hold, uid_of};
use crate::faults::Fault;

impl Cluster {
    /// Pauses the controller before this write. It loses its lease and later sends only this write.
    pub(crate) fn pause_before(&mut self, command: Command) {
        self.trace(|| "the leader is paused".to_owned());
        self.crash();
        let delay = self.rng.between(SECOND, 60 * SECOND);
        self.after(delay, Action::LateWrite(command));
    }

    pub(crate) fn send_late_write(&mut self, command: &Command) {
        self.trace(|| format!("late write of a previous leader: {}", describe_command(command)));
        if let Command::WriteClaim {
            uid,
            write: ClaimWrite::Allocate { .. },
            ..
        } = command
        {
            self.late_allocations.insert(uid.clone());
        }
        self.serve_late(command);
    }

    /// Serves a request whose sender has timed out or lost the lease.
    pub(crate) fn serve_late(&mut self, command: &Command) -> Answer {
        if let Command::WriteClaim {
            uid,
            write: ClaimWrite::AddFinalizer { .. },
            ..
        } = command
        {
            self.late_labels.insert(uid.clone());
        }
        self.late = true;
        let answer = self.serve(command);
        self.late = false;
        answer
    }

    /// Delivers double allocations found by the driver to the controller.
    pub(crate) fn report_problems(&mut self) {
        for (uid, message) in std::mem::take(&mut self.driver.problems) {
            let mut claims = self.store.claims.values();
            let Some(claim) = claims.find(|claim| uid_of(claim) == uid) else {
                continue;
            };
            let finding = Finding::new(claim, "DeviceHeldTwice", message).roll_back(true);
            let event = Event::Found(vec![finding]);
            let (delay, generation) = (self.delay(), self.generation);
            self.after(
                delay,
                Action::Deliver {
                    generation,
                    event,
                    from: None,
                },
            );
        }
    }

    /// Whether a double allocation is the effect of a late write by a previous leader.
    pub(crate) fn is_expected_double(&mut self, one: &str, other: &str) -> bool {
        let excused = self.late_allocations.contains(one) || self.late_allocations.contains(other);
        if excused && self.double_allocations.insert((one.to_owned(), other.to_owned())) {
            self.trace(|| format!("claims {one} and {other} have the same device"));
            self.faults.hit(Fault::DoubleAllocation);
        }
        excused
    }

    /// I1 when idle: of two claims with one device, the younger one has a pod with a node, which does not prepare it.
    pub(crate) fn check_double_allocations(&mut self) {
        let mut holders: BTreeMap<(String, String), BTreeSet<(String, ObjectKey)>> = BTreeMap::new();
        for (key, claim) in &self.store.claims {
            let Some(hold) = recorded_hold(claim) else {
                continue;
            };
            for device in hold.devices {
                let device = (hold.node.clone(), device);
                let holder = (uid_of(claim), key.clone());
                holders.entry(device).or_default().insert(holder);
            }
        }
        for (device, holders) in holders {
            for (uid, key) in holders.into_iter().skip(1) {
                let users = self.store.claims[&key].status.reserved_for.clone();
                let has_node = users.iter().any(|user| {
                    let pod = self
                        .store
                        .pods
                        .get(&ObjectKey::new(key.namespace.clone(), user.name.clone()));
                    pod.is_some_and(|pod| {
                        pod.metadata.uid.as_ref() == Some(&user.uid) && pod.spec.node_name.is_some()
                    })
                });
                if !has_node && users.len() < 2 {
                    self.violate(|| format!("I1: {device:?} is still in claim {uid}, whose pod has no node"));
                }
            }
        }
    }
}
