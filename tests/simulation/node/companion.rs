//! The companion of a node: the plans of `core::prepare`, carried out one after the other as `src/node/state.rs` does it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use drayman::api::crd::{Device, Mode};
use drayman::core::prepare::container_edits::{ContainerEdits, DeviceNode};
use drayman::core::prepare::containers::{AllocatedClaims, Conflicting, Containers};
use drayman::core::prepare::inventory::{Devices, inventory};
use drayman::core::prepare::kubelet_state::KubeletView;
use drayman::core::prepare::names::ClaimUid;
use drayman::core::prepare::orphans::{ApiView, Decision, GRACE, Orphans, Question};
use drayman::core::prepare::plan::{
    ClaimToPrepare, ClaimToUnprepare, NodeIdentity, Refusal, Step, plan_unprepare,
};
use drayman::core::prepare::prepared_claims::{ClaimEdits, Entry, PreparedClaims};
use drayman::core::prepare::recovery::{
    Missing, Retries, Start, plan_clearing, plan_explained, plan_free, plan_refresh, plan_release,
    plan_restoring, plan_restoring_one, plan_undo,
};

use super::disk::{Disk, Stop, driver_name};
use super::kubelet_apis::Look;
use crate::structured::shares_of;

/// What all devices are.
pub(super) const KIND: &str = "test";

/// Why a call was not answered with success.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    Refused(Refusal),
    Stopped(Stop),
}

impl From<Stop> for Failure {
    fn from(stop: Stop) -> Self {
        Self::Stopped(stop)
    }
}

/// A life of the companion.
#[derive(Clone, Debug)]
pub(crate) struct Companion {
    pub(crate) prepared_claims: PreparedClaims,
    pub(crate) orphans: Orphans,
    pub(super) identity: NodeIdentity,
    /// What was found on the node, and what is gone but held.
    pub(super) inventory: Devices,
    mode: Mode,
    /// Its cluster is in structured mode.
    structured: bool,
    /// What it knows of the other API, since when it runs.
    pub(super) containers: Containers,
    pub(super) allocated_claims: AllocatedClaims,
    pub(super) conflicting: Conflicting,
    pub(super) since: Duration,
    /// A claim is to be looked into at once.
    pub(crate) look_due: bool,
    /// CDI files that could not be written.
    pub(super) retries: Retries,
    /// The time of what it does now.
    pub(super) now: Duration,
}

fn container_edits_of_device(device: &str) -> ContainerEdits {
    let path = format!("/dev/{device}");
    let node = DeviceNode {
        host_path: path.clone(),
        container_path: path,
        permissions: "rw".to_owned(),
    };
    ContainerEdits::of_device_node(device, node)
}

fn devices(found: &BTreeSet<String>, mode: Mode, structured: bool) -> Devices {
    let device = |name: &String| {
        let device = Device {
            name: name.clone(),
            kind: KIND.to_owned(),
            mode,
            shares: structured.then(|| shares_of(name)),
            ..Device::default()
        };
        (name.clone(), device)
    };
    found.iter().map(device).collect()
}

/// Where the companion works: the disk, and what its driver has done on the node.
pub(crate) struct Place<'a> {
    pub(crate) disk: &'a Disk,
    pub(crate) driven: &'a mut BTreeSet<ClaimUid>,
}

impl Companion {
    /// What a process begins with, from what the last one left.
    pub(crate) fn begin(
        disk: &Disk,
        checkpoint: Option<BTreeMap<ClaimUid, Entry>>,
        boot: &str,
        kubelet: &KubeletView,
    ) -> BTreeMap<ClaimUid, Entry> {
        let begin = checkpoint.map_or(Start::Nothing, Start::Checkpoint);
        let unexplained = begin.unexplained(&disk.cdi_names());
        let read = unexplained.into_iter().map(|uid| {
            let spec = disk.cdi(&uid);
            (uid, spec)
        });
        begin.entries(&driver_name(), boot, &read.collect(), || kubelet.clone())
    }

    /// Puts the node right from what the last process left.
    pub(crate) fn start(
        place: &mut Place<'_>,
        (node, boot): (&str, u32),
        (mode, structured, since): (Mode, bool, Duration),
        found: &BTreeSet<String>,
        kubelet: &KubeletView,
    ) -> Result<Self, Stop> {
        let boot = format!("boot-{boot}");
        let entries = Self::begin(place.disk, place.disk.load(), &boot, kubelet);
        let files = place.disk.cdi_names();
        let mut companion = Self {
            prepared_claims: PreparedClaims::new(boot, entries),
            orphans: Orphans::new(GRACE),
            identity: NodeIdentity {
                name: node.to_owned(),
                uid: Some(format!("uid of {node}")),
            },
            inventory: devices(found, mode, structured),
            mode,
            structured,
            containers: Containers::default(),
            allocated_claims: AllocatedClaims::default(),
            conflicting: Conflicting::default(),
            since,
            look_due: true,
            retries: Retries::default(),
            now: since,
        };
        companion.clear(place, &files)?;
        for (uid, steps) in plan_restoring(&companion.prepared_claims) {
            companion.carry_out_or_undo(place, &uid, &steps)?;
        }
        companion.try_to(place, &[Step::Save(Vec::new())])?;
        companion.take_stock(found);
        Ok(companion)
    }

    fn take_stock(&mut self, found: &BTreeSet<String>) {
        self.inventory = inventory(
            &devices(found, self.mode, self.structured),
            &self.inventory,
            &self.prepared_claims,
        );
    }

    /// The devices may not be what they were.
    pub(crate) fn refresh(&mut self, place: &mut Place<'_>, found: &BTreeSet<String>) -> Result<(), Stop> {
        let before = self.inventory.clone();
        self.take_stock(found);
        for (uid, steps) in plan_refresh(&self.prepared_claims, &before, &self.inventory) {
            self.carry_out_or_undo(place, &uid, &steps)?;
        }
        Ok(())
    }

    pub(crate) fn prepare(
        &mut self,
        place: &mut Place<'_>,
        claim: &ClaimToPrepare,
        look: Option<&Look>,
        now: Duration,
    ) -> Result<ClaimUid, Failure> {
        let planned = self.plan(claim, look, now);
        if let Err(Refusal::Held { device, .. }) = &planned
            && let Some((uid, _)) = self.prepared_claims.holder(device)
        {
            let uid = uid.clone();
            self.look_due |= self.orphans.contest(&uid);
        }
        let (uid, steps) = planned.map_err(Failure::Refused)?;
        self.orphans.forget(&uid);
        if let Err(stop) = self.carry_out(place, &steps) {
            if stop == Stop::Failed {
                self.undo(place, &uid)?;
            }
            return Err(stop.into());
        }
        self.retries.done(&Missing::OfClaim(uid.clone()));
        Ok(uid)
    }

    pub(crate) fn unprepare(&mut self, place: &mut Place<'_>, uid: &ClaimUid) -> Result<(), Failure> {
        let request = ClaimToUnprepare {
            uid: uid.to_string(),
            ..ClaimToUnprepare::default()
        };
        let steps = plan_unprepare(&self.prepared_claims, &request).map_err(Failure::Refused)?;
        Ok(self.carry_out(place, &steps)?)
    }

    /// Clears away what attempts that failed have left.
    pub(crate) fn clear(&mut self, place: &mut Place<'_>, files: &BTreeSet<ClaimUid>) -> Result<(), Stop> {
        for steps in plan_clearing(&self.prepared_claims, files) {
            self.try_to(place, &steps)?;
        }
        Ok(())
    }

    /// Looks for claims that kubelet has forgotten.
    pub(crate) fn look(&mut self, kubelet: &KubeletView, now: Duration) -> Vec<Question> {
        self.look_due = false;
        self.orphans.find(&self.prepared_claims, kubelet, now)
    }

    pub(crate) fn judge(
        &mut self,
        place: &mut Place<'_>,
        kubelet: &KubeletView,
        answers: &BTreeMap<ClaimUid, ApiView>,
        now: Duration,
    ) -> Result<(), Stop> {
        for decision in self.orphans.decide(&self.prepared_claims, kubelet, answers, now) {
            let steps = match decision {
                Decision::Free(uid) => plan_free(&uid),
                Decision::Explain(uid, devices) => {
                    plan_explained(&self.prepared_claims, &self.inventory, &uid, &devices)
                }
            };
            self.try_to(place, &steps)?;
        }
        Ok(())
    }

    /// A person ends what is in quarantine, having seen that no container uses it.
    pub(crate) fn release(
        &mut self,
        place: &mut Place<'_>,
        kubelet: &KubeletView,
        uid: &ClaimUid,
    ) -> Result<(), Stop> {
        let force = kubelet.lists(uid) != Some(false);
        let (uid, steps) = plan_release(&self.prepared_claims, kubelet, uid.as_str(), force).unwrap();
        self.try_to(place, &steps)?;
        self.orphans.forget(&uid);
        Ok(())
    }

    fn carry_out(&mut self, place: &mut Place<'_>, steps: &[Step]) -> Result<(), Stop> {
        for step in steps {
            match step {
                Step::Prepare(uid) => {
                    place.disk.pass()?;
                    let container_edits = self.inject(uid)?;
                    self.prepared_claims
                        .set_container_edits(uid, container_edits, &self.inventory);
                    place.driven.insert(uid.clone());
                }
                Step::Unprepare(uid) => {
                    place.disk.pass()?;
                    place.driven.remove(uid);
                }
                Step::Save(_) | Step::WriteCdi(_) | Step::RemoveCdi(_) => {
                    if let Some(changed) = step.perform(&self.prepared_claims, place.disk)? {
                        self.prepared_claims = changed;
                    }
                }
            }
        }
        Ok(())
    }

    /// What the driver makes for a claim. A device that is not there cannot be had.
    fn inject(&self, uid: &ClaimUid) -> Result<ClaimEdits, Stop> {
        let mut made = ClaimEdits::default();
        for held in self
            .prepared_claims
            .entry(uid)
            .into_iter()
            .flat_map(|entry| &entry.devices)
        {
            let known = self.inventory.get(&held.device);
            if known.is_none_or(|device| device.unhealthy.is_some()) {
                return Err(Stop::Failed);
            }
            let container_edits = container_edits_of_device(&held.device);
            made.devices.insert(held.device.clone(), container_edits.clone());
            made.all.extend(container_edits);
        }
        Ok(made)
    }

    /// Writes what could not be written before.
    pub(crate) fn try_again(&mut self, place: &mut Place<'_>) -> Result<(), Stop> {
        for missing in self.retries.due(self.now) {
            let Missing::OfClaim(uid) = &missing else { continue };
            match plan_restoring_one(&self.prepared_claims, uid) {
                Some(steps) => self.carry_out_or_undo(place, uid, &steps)?,
                None => drop(self.retries.done(&missing)),
            }
        }
        Ok(())
    }

    fn undo(&mut self, place: &mut Place<'_>, uid: &ClaimUid) -> Result<(), Stop> {
        if plan_restoring_one(&self.prepared_claims, uid).is_some() {
            self.retries.failed(Missing::OfClaim(uid.clone()), self.now);
        }
        let steps = plan_undo(&self.prepared_claims, uid);
        self.try_to(place, &steps)
    }

    fn carry_out_or_undo(
        &mut self,
        place: &mut Place<'_>,
        uid: &ClaimUid,
        steps: &[Step],
    ) -> Result<(), Stop> {
        match self.carry_out(place, steps) {
            Err(Stop::Failed) => self.undo(place, uid),
            Err(Stop::Killed) => Err(Stop::Killed),
            Ok(()) => {
                self.retries.done(&Missing::OfClaim(uid.clone()));
                Ok(())
            }
        }
    }

    /// What fails now is done later.
    fn try_to(&mut self, place: &mut Place<'_>, steps: &[Step]) -> Result<(), Stop> {
        match self.carry_out(place, steps) {
            Err(Stop::Failed) => Ok(()),
            other => other,
        }
    }
}
