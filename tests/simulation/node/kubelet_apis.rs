//! The device plugin API of the companion: devices of a kind in mode `both`, like `src/node/state/resources.rs`.

use std::collections::BTreeSet;
use std::time::Duration;

use drayman::api::resource::ResourceClaim;
use drayman::core::names::{ClaimUid, device_of_plugin_id};
use drayman::core::prepare::containers::{AllocatedClaims, ResourceSnapshot};
use drayman::core::prepare::device_plugin::check_allocate;
use drayman::core::prepare::inventory::{HandedOut, PluginDevice, plugin_devices};
use drayman::core::prepare::plan::{ClaimToPrepare, PlanStep, Refusal, plan_prepare, takes_from_both};

use super::companion::{Companion, Failure, KIND};
use crate::driver::DRIVER;

const RESOURCE: &str = "example.com/test";

/// The container devices according to kubelet, or an error.
pub(super) type PodResources = Result<ResourceSnapshot, String>;

impl Companion {
    fn handed_out(&self) -> HandedOut<'_> {
        HandedOut {
            prepared_claims: &self.prepared_claims,
            allocated_claims: &self.allocated_claims,
            containers: &self.containers,
        }
    }

    /// The devices of the ListAndWatch response.
    pub(super) fn plugin_devices(&self) -> Vec<PluginDevice> {
        plugin_devices(&self.inventory, self.handed_out(), KIND)
    }

    /// Serves an Allocate call.
    pub(super) fn allocate(&mut self, ids: &[String], now: Duration) -> Result<(), Failure> {
        check_allocate(
            self.handed_out(),
            &self.inventory,
            RESOURCE,
            KIND,
            &[ids.to_vec()],
        )
        .map_err(Failure::Refused)?;
        let devices = ids.iter().map(|id| (device_of_plugin_id(id), &[][..]));
        self.containers.allocated(devices, now.saturating_sub(self.since));
        Ok(())
    }

    /// Plans a Prepare. If a device may be in a container, PodResources is read first.
    pub(super) fn plan(
        &mut self,
        claim: &ClaimToPrepare,
        pod_resources: Option<&PodResources>,
        now: Duration,
    ) -> Result<(ClaimUid, Vec<PlanStep>), Refusal> {
        let planned = self.plan_from_known_state(claim);
        let Some(pod_resources) = pod_resources else {
            return planned;
        };
        let device = match &planned {
            Ok((_, steps)) => takes_from_both(steps, &self.inventory),
            Err(Refusal::InContainer { device, .. } | Refusal::ContainersUnknown { device, .. }) => {
                Some(device.clone())
            }
            Err(_) => None,
        };
        let Some(device) = device else { return planned };
        if let Err(problem) = self.read_pod_resources(pod_resources, now) {
            return Err(Refusal::ContainersUnknown { device, problem });
        }
        let planned = self.plan_from_known_state(claim);
        if let Err(Refusal::InContainer { device, .. }) = &planned {
            self.conflicting.claimed(device, &self.containers);
        }
        planned
    }

    fn plan_from_known_state(&self, claim: &ClaimToPrepare) -> Result<(ClaimUid, Vec<PlanStep>), Refusal> {
        plan_prepare(
            &self.prepared_claims,
            &self.containers,
            &self.inventory,
            &self.identity,
            claim,
        )
    }

    /// Updates the container state from PodResources.
    pub(super) fn read_pod_resources(
        &mut self,
        pod_resources: &PodResources,
        now: Duration,
    ) -> Result<(), String> {
        let shown = pod_resources.as_ref().map_err(Clone::clone)?;
        self.containers.seen(shown, now.saturating_sub(self.since));
        self.conflicting.settle(&self.containers);
        Ok(())
    }

    /// Updates the allocated claims from the API server. Returns whether a container has one of their devices.
    pub(super) fn observe_claims(&mut self, claims: &[ResourceClaim], node: &str) -> bool {
        self.allocated_claims = AllocatedClaims::none();
        for claim in claims {
            self.allocated_claims.set(claim, DRIVER, node);
        }
        !self.claimed_in_containers().is_empty()
    }

    /// Records devices that both a claim and a container have.
    pub(super) fn record_conflicts(&mut self) {
        for device in self.claimed_in_containers() {
            self.conflicting.claimed(&device, &self.containers);
        }
    }

    fn claimed_in_containers(&self) -> BTreeSet<String> {
        let devices = self.allocated_claims.devices();
        devices
            .filter(|device| self.containers.hold(device))
            .map(str::to_owned)
            .collect()
    }

    /// Whether a periodic read of PodResources is needed.
    pub(super) fn needs_recheck(&self) -> bool {
        !self.containers.known() || !self.conflicting.devices().is_empty()
    }

    /// The device users known to this companion.
    pub(super) fn known(&self) -> String {
        format!(
            "{:?}, allocated {:?}, conflicting {:?}",
            self.containers,
            self.allocated_claims,
            self.conflicting.devices()
        )
    }

    /// Devices not available through the device plugin API.
    pub(super) fn withheld(&self) -> Vec<String> {
        let unhealthy = self.plugin_devices().into_iter().filter(|device| !device.healthy);
        let conflicting = self.conflicting.devices().iter().cloned();
        let all = self
            .inventory
            .keys()
            .filter(|device| self.containers.hold(device));
        unhealthy
            .map(|device| device.id)
            .chain(conflicting)
            .chain(all.cloned())
            .collect()
    }
}
