//! Serves the requests of the controller and checks invariants of stored writes.

use drayman::api::resource::{ResourceClaim, controller_of};
use drayman::core::claims::{Answer, ClaimWrite, Command, ObjectKey, Outcome, context_patch};

use crate::cluster::Cluster;
use crate::driver::{DRIVER, FINALIZER, recorded_hold, uid_of};
use crate::store::Endpoint;

impl Cluster {
    /// Serves a request.
    pub(crate) fn serve(&mut self, command: &Command) -> Answer {
        match command {
            Command::ReadPod { key, .. } => {
                self.reads += 1;
                let pod = self.store.pods.get(key).cloned();
                if let Some(pod) = &pod {
                    let uid = pod.metadata.uid.clone().unwrap_or_default();
                    if pod.spec.node_name.is_none() {
                        self.read_without_node.insert(uid);
                    } else {
                        self.read_without_node.remove(&uid);
                    }
                }
                Answer::PodRead(Ok(pod))
            }
            Command::ReadClaim { key, .. } => {
                self.reads += 1;
                Answer::ClaimRead(Ok(self.store.claims.get(key).cloned()))
            }
            Command::WriteContext {
                key, uid, entries, ..
            } => {
                self.writes += 1;
                let applied = self
                    .store
                    .apply_to_context(key, &context_patch(key, uid, entries));
                let applied = applied.map_or_else(|status| Outcome::rejected(&status), Outcome::Done);
                Answer::ContextWritten(applied)
            }
            Command::WriteClaim { key, uid, write, .. } => {
                self.writes += 1;
                let before = self
                    .store
                    .claims
                    .get(key)
                    .filter(|claim| uid_of(claim) == *uid)
                    .cloned();
                let result = self.store.patch_claim(key, &write.patch(uid, DRIVER));
                if let (Some(before), Ok(_)) = (before, &result) {
                    self.check_stored(&before, write);
                }
                let outcome = result.map_or_else(|status| write.rejected(&status), Outcome::Done);
                Answer::ClaimWritten(outcome)
            }
            _ => unreachable!("not a request"),
        }
    }

    /// I3, I4 and I5 when a write is stored.
    fn check_stored(&mut self, before: &ResourceClaim, write: &ClaimWrite) {
        let uid = uid_of(before);
        let name = before.metadata.name.clone().unwrap_or_default();
        let finalizers = before.metadata.finalizers.clone().unwrap_or_default();
        let has_finalizer = finalizers.iter().any(|name| name == FINALIZER);
        let goes = before.metadata.deletion_timestamp.is_some() && finalizers.len() == 1;
        match write {
            ClaimWrite::Allocate { .. } => {
                if !has_finalizer && !self.late_allocations.contains(&uid) {
                    self.violate(|| format!("I3: {name} is allocated without our finalizer"));
                }
            }
            ClaimWrite::ClearAllocation { .. } => {
                if !before.status.reserved_for.is_empty() {
                    self.violate(|| format!("I5: {name} is cleared while it is reserved"));
                }
                if before.metadata.deletion_timestamp.is_none() && !before.status.deallocation_requested {
                    self.violate(|| format!("{name} is cleared without a request"));
                }
            }
            ClaimWrite::RollBackAllocation { .. } => self.check_rolled_back(before),
            ClaimWrite::RemoveFinalizer { .. } if has_finalizer => {
                if recorded_hold(before).is_some() && !goes {
                    self.violate(|| format!("I4: our finalizer leaves {name}, which records an allocation"));
                }
                if !before.status.reserved_for.is_empty() && recorded_hold(before).is_some() {
                    self.violate(|| format!("I5: our finalizer leaves {name}, which is reserved"));
                }
                if self.driver.pending.contains_key(&uid) {
                    self.violate(|| {
                        format!("I4: our finalizer leaves {name}, for which the driver holds a device")
                    });
                }
            }
            ClaimWrite::AddFinalizer { .. } | ClaimWrite::RemoveFinalizer { .. } => {}
        }
    }

    /// I5 for a rollback that clears the reservation: no pod can be using the claim.
    fn check_rolled_back(&mut self, before: &ResourceClaim) {
        // Another claim of the pod may have been recorded since, which the version of this claim does not reveal. The node keeps the
        // devices prepared for the pod.
        if self.late {
            return;
        }
        let name = before.metadata.name.clone().unwrap_or_default();
        if recorded_hold(before).is_none() {
            self.violate(|| format!("I6: the allocation of {name} is not ours to roll back"));
        }
        if before.status.reserved_for.len() > 1 {
            self.violate(|| format!("I5: {name} is rolled back from several pods"));
        }
        for consumer in &before.status.reserved_for {
            let key = ObjectKey::new(
                before.metadata.namespace.clone().unwrap_or_default(),
                consumer.name.clone(),
            );
            let pod = self.store.pods.get(&key);
            let is_bound = pod.is_some_and(|pod| {
                pod.metadata.uid.as_ref() == Some(&consumer.uid) && pod.spec.node_name.is_some()
            });
            let all = self.claims_of(&key);
            let can_run =
                all.is_some_and(|all| all.iter().all(|(_, claim)| claim.status.allocation.is_some()));
            // With a double allocation by a previous leader, the pod may get a node while the rollback is in flight. Its node does not give
            // the device to another claim while the pod runs. Each rollback needs its own read.
            let was_unbound = self.read_without_node.remove(&consumer.uid);
            let bound_meanwhile = was_unbound && self.late_allocations.contains(&uid_of(before));
            if (is_bound && !bound_meanwhile) || can_run {
                self.violate(|| format!("I5: {name} is rolled back from pod {key}, which can run"));
            }
        }
    }

    /// Another client changes the object of a command.
    pub(crate) fn write_concurrently(&mut self, command: &Command) {
        let tick = self.store.version().to_string();
        match command {
            Command::WriteClaim { key, .. } => {
                let _ = self.store.update_claim(key, None, Endpoint::Main, |claim| {
                    let annotations = claim.metadata.annotations.get_or_insert_default();
                    annotations.insert("example.com/tick".to_owned(), tick);
                    Ok(())
                });
            }
            Command::WriteContext { key, .. } => {
                let _ = self.store.update_context(key, |context| {
                    let annotations = context.metadata.annotations.get_or_insert_default();
                    annotations.insert("example.com/tick".to_owned(), tick);
                });
            }
            _ => {}
        }
    }

    /// The UID of the pod that owns a template claim.
    pub(crate) fn owner_of(claim: &ResourceClaim) -> Option<&str> {
        controller_of(&claim.metadata).map(|owner| owner.uid.as_str())
    }
}
