//! What must hold on a node after every step, and at the end over both halves.

use std::collections::{BTreeMap, BTreeSet};

use drayman::core::prepare::names::ClaimUid;
use drayman::core::prepare::plan::of_results;
use drayman::core::prepare::prepared_claims::{Entry, HeldDevice};

use super::companion::Companion;
use super::{Doing, Node, claim_uid};
use crate::driver::{Hold, recorded_hold, uid_of};
use crate::pods::uid_of_pod;
use crate::stage::{SECOND, Stage};
use crate::structured::{devices_of, have_room, results_of, shares_taken};

impl Stage {
    /// N1: no device in containers of two claims, or of a claim and of a pod that has it as an extended resource, or of two such. N2: nothing that containers have is forgotten, whatever comes next.
    pub(super) fn check_node(&mut self, name: &str) {
        let Some(node) = self.nodes.all.get(name) else {
            return;
        };
        let mut users = BTreeMap::new();
        let (mut broken, mut excused) = (None, Vec::new());
        if self.structured {
            let running: BTreeMap<&ClaimUid, &BTreeSet<String>> =
                node.kubelet.running.values().flatten().collect();
            if !have_room(&shares_taken(running.values().copied().flatten())) {
                broken = Some(format!(
                    "N1: containers on {name} have more than there is: {running:?}"
                ));
            }
        }
        let claims = node
            .kubelet
            .running
            .values()
            .flatten()
            .filter(|_| !self.structured);
        let claims = claims.map(|(uid, devices)| (format!("claim {uid}"), devices, None));
        let plugged = node.manager.running.iter();
        let plugged = plugged.map(|(uid, devices)| (format!("pod {uid}"), devices, self.excuse(name, uid)));
        let mut all: Vec<_> = claims.chain(plugged).collect();
        // Those with an excuse come last.
        all.sort_by_key(|(_, _, excuse)| *excuse);
        for (user, devices, excuse) in all {
            for device in devices {
                match (users.get(device), excuse) {
                    (Some(other), Some(window)) if *other != user => excused.push(window),
                    (Some(other), None) if *other != user => {
                        broken = Some(format!(
                            "N1: device {device} of {name} is in containers of {other} and {user}"
                        ));
                    }
                    _ => drop(users.insert(device, user.clone())),
                }
            }
        }
        let in_use = node.kubelet.in_use();
        if let Some(companion) = &node.companion {
            let prepared_claims = &companion.prepared_claims;
            let lacking = in_use.iter().find(|uid| {
                let entry = prepared_claims.entry(uid);
                entry.is_none_or(|entry| !prepared_claims.may_be_in_use(entry) || entry.devices.is_empty())
            });
            if let Some(uid) = lacking {
                broken = Some(format!(
                    "N2: {name} has forgotten claim {uid}, which containers have"
                ));
            }
            let next = Companion::begin(
                &node.disk,
                node.disk.entries(),
                prepared_claims.boot_id(),
                &node.kubelet.view(),
            );
            let lacking = in_use
                .iter()
                .find(|uid| !next.get(*uid).is_some_and(Entry::is_done));
            if let Some(uid) = lacking {
                broken = Some(format!(
                    "N2: {name} would forget claim {uid} with a kill, and containers have it"
                ));
            }
            if let Some(uid) = node.driven.iter().find(|uid| !next.contains_key(*uid)) {
                broken = Some(format!(
                    "N2: what the driver of {name} did for claim {uid} would never be undone"
                ));
            }
        }
        for window in excused {
            self.faults.hit(window);
        }
        if let Some(text) = broken {
            self.violate(|| text);
        }
    }

    /// The end of both halves: what can run runs, and when all pods and claims are gone, so is everything that was held for them.
    pub(crate) fn conclude_nodes(&mut self) {
        if self.nodes.is_empty() || self.violation.is_some() {
            return;
        }
        // A refusal names one device: a claim of several may be in the way of as many forgotten ones.
        for _ in 0..3 {
            self.people_release(false);
            self.run_for(300 * SECOND);
        }
        // What has come back since is seen.
        for name in self.nodes.all.keys().cloned().collect::<Vec<_>>() {
            self.ask_companion(&name, |_, _| Ok(()));
        }
        self.run_for(120 * SECOND);
        self.check_nodes_at_rest();
        let pods: Vec<_> = self.store.pods.keys().cloned().collect();
        for pod in pods {
            self.store.delete_pod(&pod);
        }
        let claims: Vec<_> = self.store.claims.keys().cloned().collect();
        for claim in claims {
            self.store.delete_claim(&claim);
        }
        self.last_change = self.now;
        self.run_until_quiet(60_000);
        self.run_for(900 * SECOND);
        self.people_release(true);
        self.run_for(60 * SECOND);
        // Nobody asks kubelet what its containers have before somebody wants something.
        for name in self.nodes.all.keys().cloned().collect::<Vec<_>>() {
            self.act_on_node(&name, Doing::See);
        }
        self.run_for(60 * SECOND);
        self.check_all_is_free();
    }

    /// A person sees what is in quarantine and ends it, and at the end also what a kubelet will list for ever: it was away when the pod
    /// was deleted by force.
    fn people_release(&mut self, forgotten: bool) {
        let names: Vec<String> = self.nodes.all.keys().cloned().collect();
        for name in names {
            self.person_releases(&name, forgotten);
            self.check_node(&name);
        }
    }

    fn check_nodes_at_rest(&mut self) {
        let mut broken = None;
        for (name, node) in &self.nodes.all {
            let Some(companion) = &node.companion else {
                broken = Some(format!("the companion of {name} does not run"));
                continue;
            };
            let mut wanted = BTreeSet::new();
            for (key, pod) in self.pods_on(name) {
                let uid = uid_of_pod(&pod);
                if self.nodes.plugging.contains_key(&uid) {
                    if !node.manager.running.contains_key(&uid) {
                        broken = Some(format!(
                            "N3: pod {key} on {name} was neither let in nor turned away"
                        ));
                    }
                    continue;
                }
                let Some(needs) = self.needs(&key, &uid) else {
                    continue;
                };
                wanted.extend(needs.iter().map(|(claim, _)| claim_uid(&uid_of(claim))));
                let could = needs.iter().all(|(claim, hold)| {
                    let own = claim_uid(&uid_of(claim));
                    if self.structured {
                        return self.could_be_prepared(node, companion, &own, hold);
                    }
                    let there = self
                        .facts
                        .nodes
                        .get(name)
                        .is_some_and(|all| hold.devices.is_subset(all));
                    let taken = node
                        .kubelet
                        .running
                        .values()
                        .flatten()
                        .any(|(other, devices)| *other != own && !devices.is_disjoint(&hold.devices));
                    // Two claims were given one device, and kubelet has had the other prepared: its pod waits for something else.
                    let listed = |other| node.kubelet.listed.contains_key(other);
                    let mut entries = companion.prepared_claims.entries().iter();
                    let taken = taken
                        || entries.any(|(other, entry)| {
                            let mut held = entry.devices.iter().map(|held| &held.device);
                            *other != own
                                && entry.is_done()
                                && listed(other)
                                && held.any(|device| hold.devices.contains(device))
                        });
                    let mut plugged = node.manager.running.values();
                    let taken = taken || plugged.any(|devices| !devices.is_disjoint(&hold.devices));
                    hold.node == *name && there && !taken
                });
                if could && !node.kubelet.running.contains_key(&uid) {
                    broken = Some(format!(
                        "N3: pod {key} has all that it needs on {name}, and does not run"
                    ));
                }
            }
            let holds = self
                .store
                .claims
                .values()
                .filter_map(|claim| recorded_hold(claim));
            let mut allocated = holds
                .filter(|hold| hold.node == *name)
                .flat_map(|hold| hold.devices);
            if let Some(device) = allocated.find(|device| node.manager.offers(device)) {
                broken = Some(format!(
                    "N5: device {device} of {name} was allocated to a claim, and is offered to containers"
                ));
            }
            let prepared_claims = &companion.prepared_claims;
            let in_use = node.kubelet.in_use();
            let listed = &node.kubelet.listed;
            broken = self.check_files(name, node).or(broken);
            // What was prepared before a boot gives way to whoever asks for the device.
            let is_in_the_way = |entry: &Entry| prepared_claims.may_be_in_use(entry) || !entry.is_done();
            let for_nobody = prepared_claims.entries().iter().find(|(uid, entry)| {
                let is_for_nobody =
                    !wanted.contains(*uid) && !in_use.contains(*uid) && !listed.contains_key(*uid);
                is_for_nobody && is_in_the_way(entry)
            });
            if let Some((uid, _)) = for_nobody {
                broken = Some(format!(
                    "N3: {name} holds devices for claim {uid}, which no pod on it has"
                ));
            }
        }
        if let Some(text) = broken {
            self.violate(|| text);
        }
    }

    /// Whether nothing is in the way of a claim of structured mode.
    fn could_be_prepared(&self, node: &Node, companion: &Companion, own: &ClaimUid, hold: &Hold) -> bool {
        let devices = devices_of(hold);
        let there = self.facts.nodes.get(&node.name);
        // A claim that was changed since it was prepared waits for its Unprepare.
        let own_entry = companion.prepared_claims.entry(own);
        let changed = own_entry.is_some_and(|entry| {
            let allocated = of_results(&results_of(hold), &hold.node).unwrap();
            let is_known = |held: &HeldDevice| {
                allocated.iter().any(|allocated| {
                    allocated.device == held.device
                        && allocated.has_admin_access() == held.has_admin_access()
                        && (allocated.structured.as_ref().map(|details| &details.share_ids)
                            == held.structured.as_ref().map(|details| &details.share_ids)
                            || held.has_lost_shares(allocated))
                })
            };
            entry.devices.len() != allocated.len() || !entry.devices.iter().all(is_known)
        });
        let listed = node.kubelet.listed.iter();
        let mut others: BTreeMap<&ClaimUid, &BTreeSet<String>> =
            listed.map(|(uid, listed)| (uid, &listed.hold.devices)).collect();
        others.extend(node.kubelet.running.values().flatten());
        others.remove(own);
        let all = others.values().copied().flatten().chain(&hold.devices);
        hold.node == node.name
            && there.is_some_and(|there| devices.is_subset(there))
            && have_room(&shares_taken(all))
            && !changed
    }

    /// N6: every claim that containers have has its CDI file, as long as its devices are there, and no other claim has one.
    fn check_files(&self, name: &str, node: &Node) -> Option<String> {
        let prepared_claims = &node.companion.as_ref()?.prepared_claims;
        let there = self.facts.nodes.get(name);
        let in_use = node.kubelet.in_use();
        let without_file = in_use.iter().find(|uid| {
            let devices = prepared_claims.entry(uid).map(|entry| &entry.devices);
            let mut devices = devices.into_iter().flatten();
            node.disk.cdi(uid).is_none()
                && devices.all(|held| there.is_some_and(|all| all.contains(&held.device)))
        });
        let mut files = node.disk.cdi_names().into_iter();
        let without_claim = files.find(|uid| !prepared_claims.entry(uid).is_some_and(Entry::is_done));
        match (without_file, without_claim) {
            (Some(uid), _) => Some(format!(
                "N6: {name} has no file for claim {uid}, so its containers cannot be started again"
            )),
            (None, Some(uid)) => Some(format!(
                "N6: {name} has a file for claim {uid}, which is not prepared"
            )),
            (None, None) => None,
        }
    }

    fn check_all_is_free(&mut self) {
        let mut left = Vec::new();
        if let Some(key) = self.store.claims.keys().next() {
            left.push(format!("claim {key} is not gone"));
        }
        if let Some(key) = self.store.pods.keys().next() {
            left.push(format!("pod {key} is not gone"));
        }
        if !self.driver.recorded.is_empty() || !self.driver.pending.is_empty() {
            left.push("the driver of the controller still holds something".to_owned());
        }
        for (name, node) in &self.nodes.all {
            let prepared_claims = node
                .companion
                .as_ref()
                .map(|companion| companion.prepared_claims.entries().len());
            // What was begun and never done, the next start clears away.
            let durable = node.disk.entries().into_iter().flatten();
            let durable = durable.filter(|(_, entry)| entry.is_done()).count();
            let (files, running) = (node.disk.cdi_names().len(), node.kubelet.running.len());
            if (prepared_claims, durable, files, running, node.driven.len()) != (Some(0), 0, 0, 0, 0) {
                left.push(format!(
                    "{name}: {prepared_claims:?} entries, {durable} in the checkpoint, {files} files, {running} pods with containers, {:?} not undone",
                    node.driven
                ));
            }
        }
        for (name, node) in self.nodes.all.iter().filter(|(_, node)| node.both) {
            let withheld = node
                .companion
                .as_ref()
                .map(Companion::withheld)
                .unwrap_or_default();
            // One that is not there is nobody's.
            let there = self.facts.nodes.get(name);
            let withheld: Vec<String> = withheld
                .into_iter()
                .filter(|device| there.is_some_and(|there| there.contains(device)))
                .collect();
            if !node.manager.is_empty(&BTreeSet::new()) || !withheld.is_empty() {
                let known = node.companion.as_ref().map(Companion::known);
                left.push(format!(
                    "{name}: {withheld:?} at the other API, {known:?}, {:?}",
                    node.manager
                ));
            }
        }
        if !left.is_empty() {
            let left = left.join("; ");
            self.violate(|| format!("N4: everything is deleted, and something is not free: {left}"));
        }
    }
}
