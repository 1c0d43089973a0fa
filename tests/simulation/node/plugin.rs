//! Kubelet's device manager (`pkg/kubelet/cm/devicemanager` of 1.30) for a kind that leaves through both APIs: lists that come late
//! or end with either process, grants that are noted after the answer and forgotten with their pod, a file that outlives all of it,
//! and what of that the PodResources API shows.

use std::collections::{BTreeMap, BTreeSet};

use drayman::api::resource::{AllocationResult, ResourceClaim, ResourceHandle};
use drayman::core::claims::ObjectKey;
use drayman::core::prepare::allocate::{End, Preference, preferred};
use drayman::core::prepare::containers::{Container, Shown};
use drayman::core::prepare::plan::{Allocation, Refusal};

use super::companion::{Companion, Failure};
use super::kubelet_apis::Look;
use super::{Doing, request};
use crate::driver::{DRIVER, recorded_hold};
use crate::faults::Fault;
use crate::pods::uid_of_pod;
use crate::stage::{MILLISECOND, SECOND, Stage};

/// How long after its start kubelet may not know its pods yet.
const EARLY: u64 = 5 * SECOND;
/// How often the companion asks kubelet again (`src/node/state/resources.rs`).
const LOOK_AGAIN: u64 = 2 * SECOND;

/// How long a container may take to end when it is told to. Kubelet gives it 30 s, unless the pod says otherwise.
const GRACE: u64 = 20 * SECOND;

/// How long the admission of a pod may take after our answer.
const ADMISSION: u64 = 20 * SECOND;

/// A pod whose container wants devices as an extended resource.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plug {
    count: usize,
    /// An init container has them: PodResources does not show it.
    hidden: bool,
}

impl Stage {
    pub(super) fn is_both(&self, name: &str) -> bool {
        self.nodes.all.get(name).is_some_and(|node| node.both)
    }

    /// Gives the devices of all nodes two APIs.
    pub(crate) fn open_both_apis(&mut self) {
        for node in self.nodes.all.values_mut() {
            node.both = true;
        }
        for name in self.nodes.all.keys().cloned().collect::<Vec<_>>() {
            self.on_node(&name, 0, 10 * SECOND, Doing::Plug);
        }
    }

    /// Makes a pod that wants devices of a node as an extended resource.
    pub(crate) fn plug_pod(&mut self, key: &ObjectKey, node: &str, count: usize, hidden: bool) {
        let uid = self.create_pod(key, &[], Some(node));
        self.nodes.plugging.insert(uid, Plug { count, hidden });
        self.wake_kubelets();
    }

    /// People make, end and delete such pods.
    pub(super) fn plug(&mut self, name: &str) {
        if self.user_actions == 0 {
            return;
        }
        let plugged: Vec<(ObjectKey, String)> = self
            .pods_on(name)
            .into_iter()
            .map(|(key, pod)| (key, uid_of_pod(&pod)))
            .filter(|(_, uid)| self.nodes.plugging.contains_key(uid))
            .collect();
        let (what, of) = (self.nodes.rng().below(10), self.nodes.rng().pick(&plugged));
        match (what, of) {
            (7 | 8, Some((key, uid))) => {
                self.note(|| format!("{name}: the plugged pod {key} ends"));
                self.nodes.ending.insert(uid);
                self.wake_kubelets();
            }
            (9, Some((key, _))) => {
                self.note(|| format!("{name}: the plugged pod {key} is deleted"));
                if self.strikes_node(Fault::ForcedDeletion) {
                    self.store.remove_pod(&key);
                }
                self.store.delete_pod(&key);
            }
            _ => {
                let rng = self.nodes.rng();
                let key = ObjectKey::new("default", format!("p{}", rng.below(8)));
                let (count, hidden) = (1 + usize::from(rng.chance(200)), rng.chance(200));
                // The scheduler sends few pods to a node that has nothing for them.
                let manager = self.nodes.all.get(name).map(|node| node.manager.free().len());
                let fits = manager >= Some(count) || self.nodes.rng().chance(100);
                if fits && !self.store.pods.contains_key(&key) {
                    self.note(|| format!("{name}: the pod {key} is plugged"));
                    self.plug_pod(&key, name, count, hidden);
                }
            }
        }
        self.on_node(name, 0, 4 * SECOND, Doing::Plug);
    }

    fn active(&self, name: &str) -> BTreeSet<String> {
        let pods = self.pods_on(name).into_iter();
        pods.map(|(_, pod)| uid_of_pod(&pod)).collect()
    }

    // === what the companion tells ===

    /// Sends the list to kubelet, if there is news.
    pub(super) fn offer(&mut self, name: &str) {
        let Some(node) = self
            .nodes
            .all
            .get_mut(name)
            .filter(|node| node.both && node.kubelet.up)
        else {
            return;
        };
        let Some(companion) = &node.companion else { return };
        let offers = companion.offers();
        let manager = &mut node.manager;
        if manager.on_its_way || manager.sent.as_ref() == Some(&offers) {
            return;
        }
        manager.sent = Some(offers);
        manager.on_its_way = true;
        let late = self.strikes_node(Fault::OfferLate);
        let (from, to) = if late {
            (SECOND, 30 * SECOND)
        } else {
            (0, 50 * MILLISECOND)
        };
        self.on_node(name, from, to, Doing::Offer);
    }

    /// The list has come. If the stream has ended meanwhile, nothing has.
    pub(super) fn take_offer(&mut self, name: &str) {
        if let Some(node) = self.nodes.all.get_mut(name) {
            node.manager.on_its_way = false;
            if let Some(offers) = &node.manager.sent {
                let offered = offers.iter().map(|device| (device.id.clone(), device.healthy));
                node.manager.offered = offered.collect();
            }
        }
    }

    // === what kubelet shows ===

    /// What the PodResources API and the file show now, if somebody asks for it.
    pub(super) fn show(&mut self, name: &str) -> Option<Look> {
        if !self.is_both(name) {
            return None;
        }
        let silent = self.strikes_node(Fault::PodResourcesSilent);
        let node = self.nodes.all.get(name)?;
        if silent || !node.kubelet.up {
            return Some(Err("kubelet does not answer".to_owned()));
        }
        let early = self.now < node.manager.since + EARLY && self.strikes_node(Fault::PodResourcesEarly);
        let pods = if early { Vec::new() } else { self.pods_on(name) };
        let active = self.active(name);
        let mut shown = Shown::default();
        let plugging = &self.nodes.plugging;
        let manager = &mut self.nodes.all.get_mut(name)?.manager;
        if !early {
            manager.forget_others(&active);
        }
        for (key, pod) in pods {
            let uid = uid_of_pod(&pod);
            shown.pods.insert((key.namespace.clone(), key.name.clone()));
            if plugging.get(&uid).is_some_and(|plug| plug.hidden) {
                continue;
            }
            for device in manager.granted.get(&uid).into_iter().flatten() {
                let container = Container {
                    namespace: key.namespace.clone(),
                    pod: key.name.clone(),
                    container: "main".to_owned(),
                };
                shown.listed.insert(device.clone(), container);
            }
        }
        let file = manager.file.iter();
        let there = file.filter(|(pod, _)| manager.directories.contains(*pod));
        shown.recorded = there.flat_map(|(_, devices)| devices).cloned().collect();
        Some(Ok(shown))
    }

    /// The companion asks kubelet again.
    pub(super) fn see(&mut self, name: &str) {
        let (now, look) = (self.time(), self.show(name));
        if let Some(node) = self.nodes.all.get_mut(name) {
            node.see_due = false;
            if let (Some(companion), Some(look)) = (&mut node.companion, &look) {
                // It asks again.
                let _ = companion.see(look, now);
            }
        }
    }

    pub(super) fn look_again(&mut self, name: &str) {
        let Some(node) = self.nodes.all.get_mut(name).filter(|node| node.both) else {
            return;
        };
        let wanted = node.companion.as_ref().is_some_and(Companion::looks_again);
        if wanted && !node.see_due {
            node.see_due = true;
            self.on_node(name, LOOK_AGAIN / 2, LOOK_AGAIN, Doing::See);
        }
    }

    // === what the API server announces ===

    pub(super) fn hear_later(&mut self, name: &str) {
        let Some(node) = self
            .nodes
            .all
            .get_mut(name)
            .filter(|node| node.both && !node.hear_due)
        else {
            return;
        };
        node.hear_due = true;
        let late = self.strikes_node(Fault::AnnouncementLate);
        let (from, to) = if late {
            (SECOND, 60 * SECOND)
        } else {
            (0, 100 * MILLISECOND)
        };
        self.on_node(name, from, to, Doing::Hear);
    }

    /// The companion hears of the claims as they are.
    pub(super) fn hear(&mut self, name: &str) {
        let claims: Vec<ResourceClaim> = self
            .store
            .claims
            .values()
            .filter_map(|claim| told(claim, name))
            .collect();
        let Some(node) = self.nodes.all.get_mut(name) else {
            return;
        };
        node.hear_due = false;
        let Some(companion) = node.companion.as_mut() else {
            return;
        };
        if companion.hear(&claims, name) {
            self.see(name);
            if let Some(node) = self.nodes.all.get_mut(name)
                && let Some(companion) = node.companion.as_mut()
            {
                companion.contest();
            }
        }
    }

    /// Tells a container to end. The answer is whether it has.
    pub(super) fn tell_to_end(&mut self, name: &str, pod: &str) -> bool {
        let now = self.now;
        let known = self.nodes.all.get(name).map(|node| &node.manager);
        if known.is_none_or(|manager| !manager.running.contains_key(pod) || manager.ends.contains_key(pod)) {
            return true;
        }
        let takes = if self.nodes.rng().chance(400) {
            self.nodes.rng().between(0, GRACE)
        } else {
            0
        };
        if let Some(node) = self.nodes.all.get_mut(name) {
            node.manager.ends.insert(pod.to_owned(), now + takes);
        }
        if takes > 0 {
            self.on_node(name, takes, takes, Doing::Sync);
        }
        takes == 0
    }

    // === what kubelet grants ===

    /// Lets a pod in that wants devices, or starts its container.
    pub(super) fn start_plugged(&mut self, name: &str, key: &ObjectKey, pod: &str, plug: Plug) -> bool {
        let active = self.active(name);
        let Some(node) = self.nodes.all.get_mut(name) else {
            return false;
        };
        let manager = &mut node.manager;
        if let Some(grant) = manager.granted.get(pod).cloned() {
            // After a restart of kubelet it is let in anew, by what it has.
            let healthy = |device: &String| manager.offered.get(device) == Some(&true);
            if !manager.admitted.contains(pod) && !grant.iter().all(healthy) {
                self.fail_pod(name, key, pod);
                return true;
            }
            manager.admitted.insert(pod.to_owned());
            manager.directories.insert(pod.to_owned());
            manager.running.insert(pod.to_owned(), grant);
            return true;
        }
        manager.forget_others(&active);
        let available = manager.free();
        let wish = Preference {
            available,
            must_include: Vec::new(),
            size: plug.count,
        };
        let ids = preferred(&wish, &BTreeMap::new(), End::Back);
        if ids.len() < plug.count {
            self.fail_pod(name, key, pod);
            return true;
        }
        let now = self.time();
        let answer = self.ask_companion(name, |companion, _| companion.allocate(&ids, now));
        if let Some(Err(Failure::Refused(Refusal::Held { .. } | Refusal::Allocated { .. }))) = &answer {
            self.faults.hit(Fault::GrantOfClaim);
        }
        if !matches!(answer, Some(Ok(()))) {
            self.fail_pod(name, key, pod);
            return true;
        }
        self.nodes.granted += 1;
        if self.strikes_node(Fault::GrantForgotten) {
            self.kill_kubelet(name);
            return false;
        }
        if let Some(node) = self.nodes.all.get_mut(name) {
            node.manager
                .asked
                .insert(pod.to_owned(), ids.into_iter().collect());
        }
        let (from, to) = if self.strikes_node(Fault::GrantLate) {
            (SECOND, ADMISSION)
        } else {
            (0, 5 * MILLISECOND)
        };
        self.on_node(name, from, to, Doing::Record);
        true
    }

    /// Kubelet notes what it was answered, in memory and in its file, and makes the pods' directories.
    pub(super) fn record_grants(&mut self, name: &str) {
        let Some(node) = self.nodes.all.get_mut(name).filter(|node| node.kubelet.up) else {
            return;
        };
        let manager = &mut node.manager;
        for (pod, devices) in std::mem::take(&mut manager.asked) {
            manager.directories.insert(pod.clone());
            manager.admitted.insert(pod.clone());
            manager.granted.insert(pod, devices);
        }
        manager.file = manager.granted.clone();
        self.sync_later(name, 50 * MILLISECOND);
    }

    /// `UnexpectedAdmissionError`: for good.
    fn fail_pod(&mut self, name: &str, key: &ObjectKey, pod: &str) {
        if let Some(node) = self.nodes.all.get_mut(name) {
            node.kubelet.forget(pod);
            node.manager.let_go(pod);
        }
        self.store
            .update_pod(key, |pod| pod.status.phase = Some("Failed".to_owned()));
    }

    // === promises ===

    /// Why the devices of a container may be taken for free. Windows that remain: `docs/operator/devices.md`.
    pub(super) fn excuse(&self, name: &str, pod: &str) -> Option<Fault> {
        let manager = self.nodes.all.get(name).map(|node| &node.manager);
        let is_noted = manager.is_some_and(|manager| manager.file.contains_key(pod));
        if !self.active(name).contains(pod) && !is_noted {
            // Kubelet itself has it nowhere any more: its pod was deleted by force, and a later grant has replaced the file.
            return Some(Fault::LeftOver);
        }
        let is_missed = manager.is_some_and(|manager| manager.missed.contains(pod));
        is_missed.then_some(Fault::GrantMissed)
    }
}

/// A claim with devices of a node as the API server would show it to the companion.
fn told(claim: &ResourceClaim, node: &str) -> Option<ResourceClaim> {
    let hold = recorded_hold(claim).filter(|hold| hold.node == node)?;
    let mut told = claim.clone();
    let Allocation::Handle(data) = request(claim, &hold).allocation else {
        return None;
    };
    let handle = ResourceHandle {
        driver_name: Some(DRIVER.to_owned()),
        data: Some(data),
        ..ResourceHandle::default()
    };
    told.status.allocation = Some(AllocationResult {
        resource_handles: vec![handle],
        ..AllocationResult::default()
    });
    Some(told)
}
