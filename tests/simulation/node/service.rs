//! Runs companions: starts, calls and kills them, and schedules orphan checks.

use std::collections::{BTreeMap, BTreeSet};

use drayman::api::crd::Mode;
use drayman::core::names::ClaimUid;
use drayman::core::prepare::kubelet_state::KubeletView;
use drayman::core::prepare::orphans::ApiView;
use drayman::core::prepare::plan::of_results;
use drayman::core::prepare::prepared_claims::HeldDevice;

use super::companion::{Companion, Failure, NodeAccess};
use super::disk::{OperationFault, Stop};
use super::{Node, NodeAction, claim_uid};
use crate::cluster::{Cluster, MILLISECOND, SECOND};
use crate::driver::{Hold, recorded_hold, uid_of};
use crate::faults::Fault;
use crate::structured::results_of;

/// More disk steps than any plan has: a kill at such a step happens after the last step, before the answer.
const STEPS: u64 = 16;

impl Node {
    /// The companion and its access to the node.
    pub(super) fn access(&mut self) -> (Option<&mut Companion>, NodeAccess<'_>) {
        let access = NodeAccess {
            disk: &self.disk,
            driver_claims: &mut self.driver_claims,
        };
        (self.companion.as_mut(), access)
    }
}

impl Cluster {
    fn found(&self, name: &str) -> BTreeSet<String> {
        self.environment.nodes.get(name).cloned().unwrap_or_default()
    }

    /// Whether this random fault occurs now; never without nodes.
    pub(crate) fn occurs_on_node(&mut self, fault: Fault) -> bool {
        let Some(rng) = self.nodes.rng.as_mut() else {
            return false;
        };
        self.faults.occurs(fault, rng)
    }

    /// The fault of the next operation, and whether the node loses power.
    fn next_operation_fault(&mut self) -> (Option<OperationFault>, bool) {
        self.nodes.operations += 1;
        if let Some((fault, power)) = self.nodes.plan.remove(&self.nodes.operations) {
            return (Some(fault), power);
        }
        let step = self.nodes.rng().between(0, STEPS) as u32;
        if self.occurs_on_node(Fault::CompanionKilled) {
            return (Some(OperationFault::Kill(step)), false);
        }
        if self.occurs_on_node(Fault::PowerLost) {
            return (Some(OperationFault::Kill(step)), true);
        }
        if self.occurs_on_node(Fault::DiskFails) {
            let steps = self.nodes.rng().between(1, 4) as u32;
            return (Some(OperationFault::Fail { from: step, steps }), false);
        }
        (None, false)
    }

    /// Runs an operation of the companion with its fault. `None` if the companion is not running or is killed.
    pub(super) fn ask_companion<T>(
        &mut self,
        name: &str,
        ask: impl FnOnce(&mut Companion, &mut NodeAccess<'_>) -> Result<T, Failure>,
    ) -> Option<Result<T, Failure>> {
        self.nodes.all.get(name)?.companion.as_ref()?;
        let (found, now) = (self.found(name), self.time());
        let (fault, power) = self.next_operation_fault();
        let node = self.nodes.all.get_mut(name)?;
        node.disk.begin(fault);
        let (companion, mut access) = node.access();
        let companion = companion?;
        companion.now = now;
        let refreshed = companion.refresh(&mut access, &found);
        let result = refreshed
            .map_err(Failure::from)
            .and_then(|()| ask(companion, &mut access));
        let killed = fault.is_some_and(OperationFault::kills);
        node.disk.begin(None);
        if killed {
            self.trace(|| format!("{name}: the companion is killed, with the node: {power}, by {fault:?}"));
            if power {
                self.lose_power(name);
            } else {
                self.kill_companion(name);
            }
            return None;
        }
        if let Some(node) = self.nodes.all.get(name)
            && node
                .companion
                .as_ref()
                .is_some_and(|companion| companion.orphan_check_due)
        {
            self.on_node(name, 0, 100 * MILLISECOND, NodeAction::CheckOrphans);
        }
        self.retry_later(name);
        Some(result)
    }

    /// Schedules a retry of failed writes. If several are scheduled, all but the first find nothing.
    fn retry_later(&mut self, name: &str) {
        let companion = self.nodes.all.get(name).and_then(|node| node.companion.as_ref());
        if let Some(due) = companion.and_then(|companion| companion.retries.next()) {
            let delay = due.saturating_sub(self.time()).as_micros() as u64;
            self.on_node(name, delay, delay, NodeAction::Retry);
        }
    }

    pub(super) fn retry(&mut self, name: &str) {
        let now = self.time();
        let node = self.nodes.all.get(name);
        let companion = node.and_then(|node| node.companion.as_ref());
        let due = companion.map_or(0, |companion| companion.retries.due(now).len());
        if due > 0 {
            self.nodes.retried += due;
            self.ask_companion(name, |companion, access| Ok(companion.retry(access)?));
        }
    }

    pub(super) fn kill_companion(&mut self, name: &str) {
        if let Some(node) = self.nodes.all.get_mut(name) {
            node.companion = None;
            node.manager.disconnect();
            self.on_node(name, 10 * MILLISECOND, 5 * SECOND, NodeAction::StartCompanion);
        }
    }

    fn lose_power(&mut self, name: &str) {
        let mut rng = self.nodes.rng().clone();
        if let Some(node) = self.nodes.all.get_mut(name) {
            node.boots += 1;
            node.companion = None;
            node.disk.lose_power(&mut rng);
            node.driver_claims.clear();
            node.kubelet.lose_power();
            node.manager.stop();
            node.manager.lose_power();
            self.nodes.rng = Some(rng);
            self.on_node(name, SECOND, 20 * SECOND, NodeAction::StartCompanion);
            self.on_node(name, SECOND, 20 * SECOND, NodeAction::StartKubelet);
        }
    }

    pub(super) fn start_companion(&mut self, name: &str) {
        if self
            .nodes
            .all
            .get(name)
            .is_none_or(|node| node.companion.is_some())
        {
            return;
        }
        let (found, (fault, power)) = (self.found(name), self.next_operation_fault());
        let (now, structured) = (self.time(), self.structured);
        let damaged = self.occurs_on_node(Fault::CheckpointDamaged);
        let kubelet = self.kubelet_list(name);
        let Some(node) = self.nodes.all.get_mut(name) else {
            return;
        };
        // Without checkpoint and kubelet list, only CDI files remain, and a claim with a missing device has none:
        // docs/operator/troubleshoot.md.
        let files = node.disk.cdi_names();
        let all_have_files = node.kubelet.in_use().is_subset(&files);
        let kubelet = if damaged && !all_have_files {
            node.kubelet.view()
        } else {
            kubelet
        };
        if damaged {
            node.disk.damage();
            // Intents of a driver are in the checkpoint only.
            node.driver_claims
                .retain(|uid| files.contains(uid) || kubelet.lists(uid) == Some(true));
        }
        node.disk.begin(fault);
        let boots = node.boots;
        let mode = if node.both { Mode::Both } else { Mode::Claims };
        let (_, mut access) = node.access();
        let started = Companion::start(
            &mut access,
            (name, boots),
            (mode, structured, now),
            &found,
            &kubelet,
        );
        node.disk.begin(None);
        self.trace(|| format!("{name}: the companion starts: {:?}", started.as_ref().map(|_| ())));
        match (fault.is_some_and(OperationFault::kills), started) {
            (true, _) | (_, Err(Stop::Killed)) if power => self.lose_power(name),
            (true, _) | (_, Err(_)) => self.kill_companion(name),
            (false, Ok(companion)) => {
                if let Some(node) = self.nodes.all.get_mut(name) {
                    node.companion = Some(companion);
                }
                self.on_node(name, 0, 100 * MILLISECOND, NodeAction::CheckOrphans);
                self.retry_later(name);
                self.observe_claims_later(name);
            }
        }
    }

    /// The state of a claim in the API server, by UID.
    fn api_view(&self, uid: &ClaimUid, node: &str) -> ApiView {
        let claim = self
            .store
            .claims
            .values()
            .find(|claim| claim_uid(&uid_of(claim)) == *uid);
        let Some(claim) = claim else {
            return ApiView::Gone;
        };
        let hold = recorded_hold(claim).filter(|hold| hold.node == node);
        ApiView::Present {
            devices: hold.map(|hold| self.held_devices(hold)),
        }
    }

    fn held_devices(&self, hold: Hold) -> Vec<HeldDevice> {
        if self.structured {
            return of_results(&results_of(&hold), &hold.node).unwrap();
        }
        hold.devices.into_iter().map(HeldDevice::named).collect()
    }

    /// The claim list of kubelet, if readable.
    fn kubelet_list(&mut self, name: &str) -> KubeletView {
        if self.occurs_on_node(Fault::KubeletListUnreadable) {
            return KubeletView::Unknown("not a list".to_owned());
        }
        let node = self.nodes.all.get(name);
        node.map_or_else(
            || KubeletView::Unknown("no node".to_owned()),
            |node| node.kubelet.view(),
        )
    }

    /// Finds claims that kubelet no longer lists, and schedules the next check.
    pub(super) fn check_orphans(&mut self, name: &str) {
        let now = self.time();
        let silent = self.occurs_on_node(Fault::ApiSilent);
        let kubelet = self.kubelet_list(name);
        let Some(node) = self.nodes.all.get_mut(name) else {
            return;
        };
        let Some(companion) = node.companion.as_mut() else {
            return;
        };
        let questions = companion.find_orphans(&kubelet, now);
        let answers: BTreeMap<ClaimUid, ApiView> = questions
            .into_iter()
            .map(|question| {
                let answer = if silent {
                    ApiView::Unknown("no answer in time".to_owned())
                } else {
                    self.api_view(&question.uid, name)
                };
                (question.uid, answer)
            })
            .collect();
        let resolved = self.ask_companion(name, |companion, access| {
            companion.clear(access, &BTreeSet::new())?;
            Ok(companion.resolve_orphans(access, &kubelet, &answers, now)?)
        });
        if resolved.is_none() {
            return;
        }
        if let Some(node) = self.nodes.all.get_mut(name)
            && let Some(companion) = &node.companion
        {
            let next = companion.orphans.next_check(now).as_micros() as u64;
            let at = self.now + next.max(SECOND);
            // The earliest of several scheduled checks counts.
            if node.orphan_check_at <= self.now || at < node.orphan_check_at {
                node.orphan_check_at = at;
                self.on_node(name, next.max(SECOND), next.max(SECOND), NodeAction::CheckOrphans);
            }
        }
    }

    /// A user releases quarantined claims.
    pub(super) fn user_releases(&mut self, name: &str, forgotten: bool) {
        let Some(node) = self.nodes.all.get_mut(name) else {
            return;
        };
        let kubelet: KubeletView = node.kubelet.view();
        let in_use = node.kubelet.in_use();
        let listed: BTreeSet<ClaimUid> = node.kubelet.listed.iter().map(|(uid, _)| uid.clone()).collect();
        let (companion, mut access) = node.access();
        let Some(companion) = companion else { return };
        let mut over: BTreeSet<ClaimUid> = companion.orphans.quarantine().into_keys().collect();
        if forgotten {
            let held = companion.prepared_claims.entries().keys();
            over.extend(held.filter(|uid| listed.contains(*uid)).cloned());
        }
        for uid in over.difference(&in_use) {
            let released = companion.release(&mut access, &kubelet, uid);
            assert_eq!(released, Ok(()), "faults have stopped");
        }
    }
}
