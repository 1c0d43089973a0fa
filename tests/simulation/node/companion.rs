//! The companion of a node: executes the plans of `core::prepare` sequentially, like `src/node/state.rs`.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use drayman::api::crd::{Device, Devices, Mode};
use drayman::core::names::ClaimUid;
use drayman::core::prepare::container_edits::{ContainerEdits, DeviceNode};
use drayman::core::prepare::containers::{AllocatedClaims, Conflicting, Containers};
use drayman::core::prepare::inventory::inventory;
use drayman::core::prepare::kubelet_state::KubeletView;
use drayman::core::prepare::orphans::{ApiView, Decision, GRACE, Orphans, Question, RuntimeView};
use drayman::core::prepare::plan::{
    ClaimToPrepare, ClaimToUnprepare, Missing, NodeIdentity, PlanStep, Refusal, Retries, plan_unprepare,
};
use drayman::core::prepare::prepared_claims::{ClaimEdits, Entry, PreparedClaims};
use drayman::core::prepare::recovery::{
    initial_entries, plan_clearing, plan_explained, plan_free, plan_refresh, plan_release, plan_restoring,
    plan_restoring_one, plan_roll_back, unexplained,
};

use super::disk::{Disk, Stop, driver_name};
use super::kubelet_apis::PodResources;
use crate::structured::shares_of;

/// The kind of all devices.
pub(super) const KIND: &str = "test";

/// Why a call failed.
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

/// A companion process.
#[derive(Clone, Debug)]
pub(crate) struct Companion {
    pub(crate) prepared_claims: PreparedClaims,
    pub(crate) orphans: Orphans,
    pub(super) identity: NodeIdentity,
    /// Found devices, and missing devices that claims hold.
    pub(super) inventory: Devices,
    mode: Mode,
    /// Structured mode.
    structured: bool,
    /// State of the device plugin API since the start of the process.
    pub(super) containers: Containers,
    pub(super) allocated_claims: AllocatedClaims,
    pub(super) conflicting: Conflicting,
    pub(super) since: Duration,
    /// An orphan check is due immediately.
    pub(crate) orphan_check_due: bool,
    /// Failed CDI writes.
    pub(super) retries: Retries,
    /// The time of the current operation.
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

/// Access to the node: the disk, and the claims for which the driver did work.
pub(crate) struct NodeAccess<'a> {
    pub(crate) disk: &'a Disk,
    pub(crate) driver_claims: &'a mut BTreeSet<ClaimUid>,
}

impl Companion {
    /// The initial entries of a process.
    pub(crate) fn begin(
        disk: &Disk,
        checkpoint: Option<BTreeMap<ClaimUid, Entry>>,
        boot: &str,
        kubelet: &KubeletView,
    ) -> BTreeMap<ClaimUid, Entry> {
        let unexplained = unexplained(checkpoint.as_ref(), &disk.cdi_names());
        let read = unexplained.into_iter().map(|uid| {
            let spec = disk.cdi(&uid);
            (uid, spec)
        });
        initial_entries(checkpoint, &driver_name(), boot, &read.collect(), || {
            kubelet.clone()
        })
    }

    /// Starts a process and repairs the state that the previous process left.
    pub(crate) fn start(
        access: &mut NodeAccess<'_>,
        (node, boot): (&str, u32),
        (mode, structured, since): (Mode, bool, Duration),
        found: &BTreeSet<String>,
        kubelet: &KubeletView,
    ) -> Result<Self, Stop> {
        let boot = format!("boot-{boot}");
        let entries = Self::begin(access.disk, access.disk.load(), &boot, kubelet);
        let files = access.disk.cdi_names();
        let mut companion = Self {
            prepared_claims: PreparedClaims::new(boot, entries),
            orphans: Orphans::new(GRACE, false),
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
            orphan_check_due: true,
            retries: Retries::default(),
            now: since,
        };
        companion.clear(access, &files)?;
        for (uid, steps) in plan_restoring(&companion.prepared_claims) {
            companion.execute_or_roll_back(access, &uid, &steps)?;
        }
        companion.try_execute(access, &[PlanStep::Save(Vec::new())])?;
        companion.rebuild_inventory(found);
        Ok(companion)
    }

    fn rebuild_inventory(&mut self, found: &BTreeSet<String>) {
        self.inventory = inventory(
            &devices(found, self.mode, self.structured),
            &self.inventory,
            &self.prepared_claims,
        );
    }

    /// Updates the inventory.
    pub(crate) fn refresh(
        &mut self,
        access: &mut NodeAccess<'_>,
        found: &BTreeSet<String>,
    ) -> Result<(), Stop> {
        let before = self.inventory.clone();
        self.rebuild_inventory(found);
        let found = devices(found, self.mode, self.structured);
        for (uid, steps) in plan_refresh(&self.prepared_claims, &before, &self.inventory, &found) {
            self.execute_or_roll_back(access, &uid, &steps)?;
        }
        Ok(())
    }

    pub(crate) fn prepare(
        &mut self,
        access: &mut NodeAccess<'_>,
        claim: &ClaimToPrepare,
        pod_resources: Option<&PodResources>,
        now: Duration,
    ) -> Result<ClaimUid, Failure> {
        let planned = self.plan(claim, pod_resources, now);
        if let Err(Refusal::Held { device, .. }) = &planned
            && let Some((uid, _)) = self.prepared_claims.holder(device)
        {
            let uid = uid.clone();
            self.orphan_check_due |= self.orphans.mark_conflicting(&uid);
        }
        let (uid, steps) = planned.map_err(Failure::Refused)?;
        self.orphans.forget(&uid);
        if let Err(stop) = self.execute(access, &steps) {
            if stop == Stop::Failed {
                self.roll_back(access, &uid)?;
            }
            return Err(stop.into());
        }
        self.retries.done(&Missing::OfClaim(uid.clone()));
        Ok(uid)
    }

    pub(crate) fn unprepare(&mut self, access: &mut NodeAccess<'_>, uid: &ClaimUid) -> Result<(), Failure> {
        let request = ClaimToUnprepare {
            uid: uid.to_string(),
            ..ClaimToUnprepare::default()
        };
        let steps = plan_unprepare(&self.prepared_claims, &request).map_err(Failure::Refused)?;
        Ok(self.execute(access, &steps)?)
    }

    /// Cleans up after failed attempts.
    pub(crate) fn clear(
        &mut self,
        access: &mut NodeAccess<'_>,
        files: &BTreeSet<ClaimUid>,
    ) -> Result<(), Stop> {
        for steps in plan_clearing(&self.prepared_claims, files) {
            self.try_execute(access, &steps)?;
        }
        Ok(())
    }

    /// Finds claims that kubelet no longer lists.
    pub(crate) fn find_orphans(&mut self, kubelet: &KubeletView, now: Duration) -> Vec<Question> {
        self.orphan_check_due = false;
        self.orphans.find(&self.prepared_claims, kubelet, now)
    }

    pub(crate) fn resolve_orphans(
        &mut self,
        access: &mut NodeAccess<'_>,
        kubelet: &KubeletView,
        answers: &BTreeMap<ClaimUid, ApiView>,
        now: Duration,
    ) -> Result<(), Stop> {
        let runtime = RuntimeView::default();
        let decisions = self
            .orphans
            .decide(&self.prepared_claims, kubelet, answers, &runtime, now);
        for decision in decisions {
            let steps = match decision {
                Decision::Free(uid) => plan_free(&uid),
                Decision::Explain(uid, devices) => {
                    plan_explained(&self.prepared_claims, &self.inventory, &uid, &devices)
                }
            };
            self.try_execute(access, &steps)?;
        }
        Ok(())
    }

    /// A user releases a quarantined claim that no container uses.
    pub(crate) fn release(
        &mut self,
        access: &mut NodeAccess<'_>,
        kubelet: &KubeletView,
        uid: &ClaimUid,
    ) -> Result<(), Stop> {
        let force = kubelet.lists(uid) != Some(false);
        let (uid, steps) = plan_release(&self.prepared_claims, kubelet, uid.as_str(), force).unwrap();
        self.try_execute(access, &steps)?;
        self.orphans.forget(&uid);
        Ok(())
    }

    fn execute(&mut self, access: &mut NodeAccess<'_>, steps: &[PlanStep]) -> Result<(), Stop> {
        for step in steps {
            match step {
                PlanStep::Prepare(uid) => {
                    access.disk.external_step()?;
                    let container_edits = self.container_edits(uid)?;
                    self.prepared_claims
                        .set_container_edits(uid, container_edits, &self.inventory);
                    access.driver_claims.insert(uid.clone());
                }
                PlanStep::Unprepare(uid) => {
                    access.disk.external_step()?;
                    access.driver_claims.remove(uid);
                }
                PlanStep::Save(_) | PlanStep::WriteCdi(_) | PlanStep::RemoveCdi(_) => {
                    if let Some(changed) = step.perform(&self.prepared_claims, access.disk)? {
                        self.prepared_claims = changed;
                    }
                }
            }
        }
        Ok(())
    }

    /// The container edits of a claim. Fails if a device is missing.
    fn container_edits(&self, uid: &ClaimUid) -> Result<ClaimEdits, Stop> {
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

    /// Retries failed writes.
    pub(crate) fn retry(&mut self, access: &mut NodeAccess<'_>) -> Result<(), Stop> {
        for missing in self.retries.due(self.now) {
            let Missing::OfClaim(uid) = &missing else { continue };
            match plan_restoring_one(&self.prepared_claims, uid) {
                Some(steps) => self.execute_or_roll_back(access, uid, &steps)?,
                None => drop(self.retries.done(&missing)),
            }
        }
        Ok(())
    }

    fn roll_back(&mut self, access: &mut NodeAccess<'_>, uid: &ClaimUid) -> Result<(), Stop> {
        if plan_restoring_one(&self.prepared_claims, uid).is_some() {
            self.retries.failed(Missing::OfClaim(uid.clone()), self.now);
        }
        let steps = plan_roll_back(&self.prepared_claims, uid);
        self.try_execute(access, &steps)
    }

    fn execute_or_roll_back(
        &mut self,
        access: &mut NodeAccess<'_>,
        uid: &ClaimUid,
        steps: &[PlanStep],
    ) -> Result<(), Stop> {
        match self.execute(access, steps) {
            Err(Stop::Failed) => self.roll_back(access, uid),
            Err(Stop::Killed) => Err(Stop::Killed),
            Ok(()) => {
                self.retries.done(&Missing::OfClaim(uid.clone()));
                Ok(())
            }
        }
    }

    /// Executes steps; a failure is repaired later.
    fn try_execute(&mut self, access: &mut NodeAccess<'_>, steps: &[PlanStep]) -> Result<(), Stop> {
        match self.execute(access, steps) {
            Err(Stop::Failed) => Ok(()),
            other => other,
        }
    }
}
