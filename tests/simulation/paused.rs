//! A leader that is paused between its last look at the clock and its write: what it sends arrives when another one leads.
//!
//! No lease can prevent that (`lease.rs` shows what a lease does prevent), so a device may end up in two claims. The older
//! allocation stands; the younger is taken back, unless its pod has a node.

use std::collections::{BTreeMap, BTreeSet};

use drayman::core::claims::{Answer, ClaimWrite, Command, Event, ObjectKey};
use drayman::driver::Finding;

use crate::describe::describe_command;
use crate::driver::{recorded_hold, uid_of};
use crate::faults::Fault;
use crate::stage::{Action, SECOND, Stage};

impl Stage {
    /// The controller stops just before this write, loses its lease, and comes back only to send it.
    pub(crate) fn pause_before(&mut self, command: Command) {
        self.note(|| "the leader is paused".to_owned());
        self.crash();
        let delay = self.rng.between(SECOND, 60 * SECOND);
        self.after(delay, Action::Ghost(command));
    }

    pub(crate) fn ghost_writes(&mut self, command: &Command) {
        self.note(|| format!("the old leader wakes up: {}", describe_command(command)));
        if let Command::WriteClaim {
            uid,
            write: ClaimWrite::Allocate { .. },
            ..
        } = command
        {
            self.ghosts.insert(uid.clone());
        }
        self.carry_out_late(command);
    }

    /// Carries out what its sender no longer waits for.
    pub(crate) fn carry_out_late(&mut self, command: &Command) -> Answer {
        if let Command::WriteClaim {
            uid,
            write: ClaimWrite::AddFinalizer { .. },
            ..
        } = command
        {
            self.late_labels.insert(uid.clone());
        }
        self.late = true;
        let answer = self.carry_out(command);
        self.late = false;
        answer
    }

    /// What the driver has noticed on its own reaches the controller.
    pub(crate) fn tell_problems(&mut self) {
        for (uid, message) in std::mem::take(&mut self.driver.problems) {
            let mut claims = self.store.claims.values();
            let Some(claim) = claims.find(|claim| uid_of(claim) == uid) else {
                continue;
            };
            let finding = Finding::new(claim, "DeviceHeldTwice", message).take_back(true);
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

    /// A device in two claims, one of which an old leader has written, is not the controller's doing.
    pub(crate) fn excuse_double(&mut self, one: &str, other: &str) -> bool {
        let excused = self.ghosts.contains(one) || self.ghosts.contains(other);
        if excused && self.doubles.insert((one.to_owned(), other.to_owned())) {
            self.note(|| format!("claims {one} and {other} have the same device"));
            self.faults.hit(Fault::DoubleAllocation);
        }
        excused
    }

    /// I1 at rest: of two claims with one device the younger has a pod with a node, where it is not prepared.
    pub(crate) fn check_doubles(&mut self) {
        let mut holders: BTreeMap<(String, String), BTreeSet<(String, ObjectKey)>> = BTreeMap::new();
        for (key, claim) in &self.store.claims {
            let Some(hold) = recorded_hold(claim) else {
                continue;
            };
            for device in hold.devices {
                let place = (hold.node.clone(), device);
                let holder = (uid_of(claim), key.clone());
                holders.entry(place).or_default().insert(holder);
            }
        }
        for (place, holders) in holders {
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
                    self.violate(|| format!("I1: {place:?} is still in claim {uid}, whose pod has no node"));
                }
            }
        }
    }
}
