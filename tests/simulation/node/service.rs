//! How a companion is run: started, asked, killed, and sent to look for what kubelet has forgotten.

use std::collections::{BTreeMap, BTreeSet};

use drayman::api::crd::Mode;
use drayman::core::prepare::kubelet_state::KubeletView;
use drayman::core::prepare::names::ClaimUid;
use drayman::core::prepare::orphans::ApiView;
use drayman::core::prepare::plan::of_results;
use drayman::core::prepare::prepared_claims::HeldDevice;

use super::companion::{Companion, Failure, Place};
use super::disk::{Stop, Trouble};
use super::{Doing, Node, claim_uid};
use crate::driver::{Hold, recorded_hold, uid_of};
use crate::faults::Fault;
use crate::stage::{MILLISECOND, SECOND, Stage};
use crate::structured::results_of;

/// More steps than any plan has on the disk: a kill after so many is one after the last step, before the answer.
const STEPS: u64 = 16;

impl Node {
    /// The companion's hands on this node.
    pub(super) fn hands(&mut self) -> (Option<&mut Companion>, Place<'_>) {
        let place = Place {
            disk: &self.disk,
            driven: &mut self.driven,
        };
        (self.companion.as_mut(), place)
    }
}

impl Stage {
    fn found(&self, name: &str) -> BTreeSet<String> {
        self.facts.nodes.get(name).cloned().unwrap_or_default()
    }

    /// Whether this happens now, if there are nodes at all.
    pub(crate) fn strikes_node(&mut self, fault: Fault) -> bool {
        let Some(rng) = self.nodes.rng.as_mut() else {
            return false;
        };
        self.faults.strikes(fault, rng)
    }

    /// What goes wrong with the next operation of a companion, and whether the whole node goes with it.
    fn draw_trouble(&mut self) -> (Option<Trouble>, bool) {
        self.nodes.operations += 1;
        if let Some((trouble, power)) = self.nodes.plan.get(&self.nodes.operations) {
            return (Some(*trouble), *power);
        }
        let step = self.nodes.rng().between(0, STEPS) as u32;
        if self.strikes_node(Fault::CompanionKilled) {
            return (Some(Trouble::Kill(step)), false);
        }
        if self.strikes_node(Fault::PowerLost) {
            return (Some(Trouble::Kill(step)), true);
        }
        if self.strikes_node(Fault::DiskFails) {
            let steps = self.nodes.rng().between(1, 4) as u32;
            return (Some(Trouble::Fail { from: step, steps }), false);
        }
        (None, false)
    }

    /// Has the companion do something, with whatever goes wrong with it. `None` if it is not there, or not any more.
    pub(super) fn ask_companion<T>(
        &mut self,
        name: &str,
        ask: impl FnOnce(&mut Companion, &mut Place<'_>) -> Result<T, Failure>,
    ) -> Option<Result<T, Failure>> {
        let (found, now) = (self.found(name), self.time());
        let (trouble, power) = self.draw_trouble();
        let node = self.nodes.all.get_mut(name)?;
        node.companion.as_ref()?;
        node.disk.begin(trouble);
        let (companion, mut place) = node.hands();
        let companion = companion?;
        companion.now = now;
        let refreshed = companion.refresh(&mut place, &found);
        let result = refreshed
            .map_err(Failure::from)
            .and_then(|()| ask(companion, &mut place));
        let killed = trouble.is_some_and(Trouble::kills);
        node.disk.begin(None);
        if killed {
            self.note(|| format!("{name}: the companion is killed, with the node: {power}, by {trouble:?}"));
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
                .is_some_and(|companion| companion.look_due)
        {
            self.on_node(name, 0, 100 * MILLISECOND, Doing::Look);
        }
        self.try_again_later(name);
        Some(result)
    }

    /// What could not be written is tried again when that is due. Of several that are on their way all but the first find nothing.
    fn try_again_later(&mut self, name: &str) {
        let companion = self.nodes.all.get(name).and_then(|node| node.companion.as_ref());
        if let Some(due) = companion.and_then(|companion| companion.retries.next()) {
            let delay = due.saturating_sub(self.time()).as_micros() as u64;
            self.on_node(name, delay, delay, Doing::TryAgain);
        }
    }

    pub(super) fn try_again(&mut self, name: &str) {
        let now = self.time();
        let node = self.nodes.all.get(name);
        let companion = node.and_then(|node| node.companion.as_ref());
        let due = companion.map_or(0, |companion| companion.retries.due(now).len());
        if due > 0 {
            self.nodes.tried_again += due;
            self.ask_companion(name, |companion, place| Ok(companion.try_again(place)?));
        }
    }

    pub(super) fn kill_companion(&mut self, name: &str) {
        if let Some(node) = self.nodes.all.get_mut(name) {
            node.companion = None;
            node.manager.disconnect();
            self.on_node(name, 10 * MILLISECOND, 5 * SECOND, Doing::StartCompanion);
        }
    }

    fn lose_power(&mut self, name: &str) {
        let mut rng = self.nodes.rng().clone();
        if let Some(node) = self.nodes.all.get_mut(name) {
            node.boots += 1;
            node.companion = None;
            node.disk.lose_power(&mut rng);
            node.driven.clear();
            node.kubelet.lose_power();
            node.manager.stop();
            node.manager.lose_power();
            self.nodes.rng = Some(rng);
            self.on_node(name, SECOND, 20 * SECOND, Doing::StartCompanion);
            self.on_node(name, SECOND, 20 * SECOND, Doing::StartKubelet);
        }
    }

    pub(super) fn start_companion(&mut self, name: &str) {
        let (found, (trouble, power)) = (self.found(name), self.draw_trouble());
        let (now, structured) = (self.time(), self.structured);
        let damaged = self.strikes_node(Fault::CheckpointDamaged);
        let kubelet = self.kubelet_list(name);
        let Some(node) = self
            .nodes
            .all
            .get_mut(name)
            .filter(|node| node.companion.is_none())
        else {
            return;
        };
        // With neither checkpoint nor list, CDI files alone tell, and a claim whose device is unplugged has none: docs/operator/troubleshoot.md.
        let files = node.disk.cdi_names();
        let all_have_files = node.kubelet.in_use().is_subset(&files);
        let kubelet = if damaged && !all_have_files {
            node.kubelet.view()
        } else {
            kubelet
        };
        if damaged {
            node.disk.damage();
            // That a driver was about to begin is in the checkpoint alone.
            node.driven
                .retain(|uid| files.contains(uid) || kubelet.lists(uid) == Some(true));
        }
        node.disk.begin(trouble);
        let boots = node.boots;
        let mode = if node.both { Mode::Both } else { Mode::Claims };
        let (_, mut place) = node.hands();
        let started = Companion::start(
            &mut place,
            (name, boots),
            (mode, structured, now),
            &found,
            &kubelet,
        );
        node.disk.begin(None);
        self.note(|| format!("{name}: the companion starts: {:?}", started.as_ref().map(|_| ())));
        match (trouble.is_some_and(Trouble::kills), started) {
            (true, _) | (_, Err(Stop::Killed)) if power => self.lose_power(name),
            (true, _) | (_, Err(_)) => self.kill_companion(name),
            (false, Ok(companion)) => {
                if let Some(node) = self.nodes.all.get_mut(name) {
                    node.companion = Some(companion);
                }
                self.on_node(name, 0, 100 * MILLISECOND, Doing::Look);
                self.try_again_later(name);
                self.hear_later(name);
            }
        }
    }

    /// What the API server says of a claim, by its uid.
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

    /// Kubelet's list, as far as it can be read.
    fn kubelet_list(&mut self, name: &str) -> KubeletView {
        if self.strikes_node(Fault::KubeletListUnreadable) {
            return KubeletView::Unknown("it is no list".to_owned());
        }
        let node = self.nodes.all.get(name);
        node.map_or_else(
            || KubeletView::Unknown("no node".to_owned()),
            |node| node.kubelet.view(),
        )
    }

    /// Looks for claims that kubelet has forgotten, and comes again when that is due.
    pub(super) fn look_for_orphans(&mut self, name: &str) {
        let now = self.time();
        let silent = self.strikes_node(Fault::ApiSilent);
        let kubelet = self.kubelet_list(name);
        let Some(node) = self.nodes.all.get_mut(name) else {
            return;
        };
        let Some(companion) = node.companion.as_mut() else {
            return;
        };
        let questions = companion.look(&kubelet, now);
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
        let judged = self.ask_companion(name, |companion, place| {
            companion.clear(place, &BTreeSet::new())?;
            Ok(companion.judge(place, &kubelet, &answers, now)?)
        });
        if judged.is_none() {
            return;
        }
        if let Some(node) = self.nodes.all.get_mut(name)
            && let Some(companion) = &node.companion
        {
            let next = companion.orphans.next_check(now).as_micros() as u64;
            let at = self.now + next.max(SECOND);
            // Of several that are on their way the earliest counts.
            if node.look_at <= self.now || at < node.look_at {
                node.look_at = at;
                self.on_node(name, next.max(SECOND), next.max(SECOND), Doing::Look);
            }
        }
    }

    /// A person looks at what is in quarantine, and ends it.
    pub(super) fn person_releases(&mut self, name: &str, forgotten: bool) {
        let Some(node) = self.nodes.all.get_mut(name) else {
            return;
        };
        let kubelet: KubeletView = node.kubelet.view();
        let in_use = node.kubelet.in_use();
        let listed: BTreeSet<ClaimUid> = node.kubelet.listed.keys().cloned().collect();
        let (companion, mut place) = node.hands();
        let Some(companion) = companion else { return };
        let mut over: BTreeSet<ClaimUid> = companion.orphans.quarantine().into_keys().collect();
        if forgotten {
            let held = companion.prepared_claims.entries().keys();
            over.extend(held.filter(|uid| listed.contains(*uid)).cloned());
        }
        for uid in over.difference(&in_use) {
            let released = companion.release(&mut place, &kubelet, uid);
            assert_eq!(released, Ok(()), "faults have stopped");
        }
    }
}
