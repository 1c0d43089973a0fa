//! Invariants of a node after every step, and of the whole cluster at the end.

use std::collections::{BTreeMap, BTreeSet};

use drayman::core::names::ClaimUid;
use drayman::core::prepare::plan::of_results;
use drayman::core::prepare::prepared_claims::{Entry, HeldDevice};

use super::companion::Companion;
use super::{Node, NodeAction, claim_uid};
use crate::cluster::{Cluster, SECOND};
use crate::driver::{Hold, recorded_hold, uid_of};
use crate::pods::uid_of_pod;
use crate::structured::{devices_of, have_room, results_of, shares_taken};

impl Cluster {
    /// N1: no device is in containers of two claims, of a claim and an extended resource pod, or of two such pods.
    ///
    /// N2: claims and devices of containers survive every restart.
    pub(super) fn check_node(&mut self, name: &str) {
        let Some(node) = self.nodes.all.get(name) else {
            return;
        };
        let mut users = BTreeMap::new();
        let (mut broken, mut races) = (None, Vec::new());
        if self.structured {
            let running: BTreeMap<&ClaimUid, &BTreeSet<String>> =
                node.kubelet.running.values().flatten().collect();
            if !have_room(&shares_taken(running.values().copied().flatten())) {
                broken = Some(format!(
                    "N1: containers on {name} exceed the available shares: {running:?}"
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
        let extended = node.manager.running.iter();
        let extended =
            extended.map(|(uid, devices)| (format!("pod {uid}"), devices, self.known_race(name, uid)));
        let mut all: Vec<_> = claims.chain(extended).collect();
        // Users with a known race come last.
        all.sort_by_key(|(_, _, race)| *race);
        for (user, devices, race) in all {
            for device in devices {
                match (users.get(device), race) {
                    (Some(other), Some(window)) if *other != user => races.push(window),
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
                broken = Some(format!("N2: {name} lost claim {uid}, which is in use"));
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
                    "N2: {name} would lose claim {uid} in a kill, which is in use"
                ));
            }
            if let Some(uid) = node.driver_claims.iter().find(|uid| !next.contains_key(*uid)) {
                broken = Some(format!(
                    "N2: what the driver of {name} did for claim {uid} would never be reverted"
                ));
            }
        }
        for window in races {
            self.faults.hit(window);
        }
        if let Some(text) = broken {
            self.violate(|| text);
        }
    }

    /// Final checks of nodes: every pod that can run does, and after the deletion of all pods and claims every device is free.
    pub(crate) fn conclude_nodes(&mut self) {
        if self.nodes.is_empty() || self.violation.is_some() {
            return;
        }
        // A refusal names one device: a claim may conflict with several quarantined claims.
        for _ in 0..3 {
            self.users_release(false);
            self.run_for(300 * SECOND);
        }
        // Refreshes the inventories.
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
        self.users_release(true);
        self.run_for(60 * SECOND);
        // PodResources is read on demand only.
        for name in self.nodes.all.keys().cloned().collect::<Vec<_>>() {
            self.act_on_node(&name, NodeAction::ReadPodResources);
        }
        self.run_for(60 * SECOND);
        self.check_all_is_free();
    }

    /// Users release quarantined claims, and at the end also claims that a kubelet lists forever because it was down when their pod was
    /// force-deleted.
    fn users_release(&mut self, forgotten: bool) {
        let names: Vec<String> = self.nodes.all.keys().cloned().collect();
        for name in names {
            self.user_releases(&name, forgotten);
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
                if self.nodes.extended_resource_pods.contains_key(&uid) {
                    if !node.manager.running.contains_key(&uid) {
                        broken = Some(format!(
                            "N3: pod {key} on {name} was neither admitted nor rejected"
                        ));
                    }
                    continue;
                }
                let Some(needs) = self.needs(&key, &uid) else {
                    continue;
                };
                wanted.extend(needs.iter().map(|(claim, _)| claim_uid(&uid_of(claim))));
                let of_pod: Vec<(ClaimUid, &Hold)> = needs
                    .iter()
                    .map(|(claim, hold)| (claim_uid(&uid_of(claim)), hold))
                    .collect();
                let could = needs.iter().all(|(claim, hold)| {
                    let own = claim_uid(&uid_of(claim));
                    if self.structured {
                        return self.could_be_prepared(node, companion, &own, hold, &of_pod);
                    }
                    let there = self
                        .environment
                        .nodes
                        .get(name)
                        .is_some_and(|all| hold.devices.is_subset(all));
                    let taken = node
                        .kubelet
                        .running
                        .values()
                        .flatten()
                        .any(|(other, devices)| *other != own && !devices.is_disjoint(&hold.devices));
                    // Of two claims with one device, the other one is prepared, and its pod waits for something else.
                    let listed = |other| node.kubelet.listed.get(other).is_some();
                    let mut entries = companion.prepared_claims.entries().iter();
                    let taken = taken
                        || entries.any(|(other, entry)| {
                            let mut held = entry.devices.iter().map(|held| &held.device);
                            *other != own
                                && entry.is_done()
                                && listed(other)
                                && held.any(|device| hold.devices.contains(device))
                        });
                    let mut extended = node.manager.running.values();
                    let taken = taken || extended.any(|devices| !devices.is_disjoint(&hold.devices));
                    hold.node == *name && there && !taken
                });
                if could && !node.kubelet.running.contains_key(&uid) {
                    broken = Some(format!("N3: pod {key} can run on {name} but does not"));
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
            if let Some(device) = allocated.find(|device| node.manager.advertises(device)) {
                broken = Some(format!(
                    "N5: device {device} of {name} is allocated to a claim and advertised to containers"
                ));
            }
            let prepared_claims = &companion.prepared_claims;
            let in_use = node.kubelet.in_use();
            let listed = &node.kubelet.listed;
            broken = self.check_files(name, node).or(broken);
            // Claims prepared before a boot give way to other claims.
            let is_in_the_way = |entry: &Entry| prepared_claims.may_be_in_use(entry) || !entry.is_done();
            let unused = prepared_claims.entries().iter().find(|(uid, entry)| {
                let is_unused = !wanted.contains(*uid) && !in_use.contains(*uid) && listed.get(uid).is_none();
                is_unused && is_in_the_way(entry)
            });
            if let Some((uid, _)) = unused {
                broken = Some(format!("N3: {name} holds devices for claim {uid} without a pod"));
            }
        }
        if let Some(text) = broken {
            self.violate(|| text);
        }
    }

    /// Whether a claim of structured mode can be prepared.
    fn could_be_prepared(
        &self,
        node: &Node,
        companion: &Companion,
        own: &ClaimUid,
        hold: &Hold,
        of_pod: &[(ClaimUid, &Hold)],
    ) -> bool {
        let devices = devices_of(hold);
        let there = self.environment.nodes.get(&node.name);
        // A claim that changed since it was prepared waits for its Unprepare.
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
        // A claim that changed since it was prepared keeps its devices until it is unprepared.
        let entries = companion.prepared_claims.entries().iter();
        let prepared: BTreeMap<&ClaimUid, BTreeSet<String>> = entries
            .filter(|(uid, entry)| entry.is_done() && node.kubelet.listed.get(uid).is_some())
            .map(|(uid, entry)| (uid, entry.devices.iter().flat_map(taken_by).collect()))
            .collect();
        let listed = node.kubelet.listed.iter();
        let mut others: BTreeMap<&ClaimUid, &BTreeSet<String>> =
            prepared.iter().map(|(uid, devices)| (*uid, devices)).collect();
        let listed = listed.filter_map(|(uid, listed)| Some((uid, &listed.claim.hold.as_ref()?.devices)));
        others.extend(listed);
        others.extend(node.kubelet.running.values().flatten());
        // The scheduler may have allocated more shares than there are, to claims of one pod.
        others.extend(of_pod.iter().map(|(uid, hold)| (uid, &hold.devices)));
        others.remove(own);
        let all = others.values().copied().flatten().chain(&hold.devices);
        hold.node == node.name
            && there.is_some_and(|there| devices.is_subset(there))
            && have_room(&shares_taken(all))
            && !changed
    }

    /// N6: every claim in use has a CDI file while its devices exist, and no other claim has one.
    fn check_files(&self, name: &str, node: &Node) -> Option<String> {
        let prepared_claims = &node.companion.as_ref()?.prepared_claims;
        let there = self.environment.nodes.get(name);
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
            left.push("the driver of the controller still holds devices".to_owned());
        }
        for (name, node) in &self.nodes.all {
            let prepared_claims = node
                .companion
                .as_ref()
                .map(|companion| companion.prepared_claims.entries().len());
            // Incomplete entries are removed at the next start.
            let durable = node.disk.entries().into_iter().flatten();
            let durable = durable.filter(|(_, entry)| entry.is_done()).count();
            let (files, running) = (node.disk.cdi_names().len(), node.kubelet.running.len());
            if (prepared_claims, durable, files, running, node.driver_claims.len()) != (Some(0), 0, 0, 0, 0) {
                left.push(format!(
                    "{name}: {prepared_claims:?} entries, {durable} in the checkpoint, {files} files, {running} pods with containers, {:?} not reverted",
                    node.driver_claims
                ));
            }
        }
        for (name, node) in self.nodes.all.iter().filter(|(_, node)| node.both) {
            let withheld = node
                .companion
                .as_ref()
                .map(Companion::withheld)
                .unwrap_or_default();
            // Missing devices do not count.
            let there = self.environment.nodes.get(name);
            let withheld: Vec<String> = withheld
                .into_iter()
                .filter(|device| there.is_some_and(|there| there.contains(device)))
                .collect();
            if !node.manager.is_empty(&BTreeSet::new()) || !withheld.is_empty() {
                let known = node.companion.as_ref().map(Companion::known);
                left.push(format!(
                    "{name}: {withheld:?} withheld from kubelet, {known:?}, {:?}",
                    node.manager
                ));
            }
        }
        if !left.is_empty() {
            let left = left.join("; ");
            self.violate(|| format!("N4: not free after everything is deleted: {left}"));
        }
    }
}

/// A held device, or its shares, as the scheduler's results name them.
fn taken_by(held: &HeldDevice) -> Vec<String> {
    let name = &held.device;
    let shares = held.structured.as_ref().map(|structured| &structured.share_ids);
    match shares {
        _ if held.has_admin_access() => vec![format!("{name}!")],
        Some(ids) if !ids.is_empty() => ids.iter().map(|id| format!("{name}#{id}")).collect(),
        _ => vec![name.clone()],
    }
}
