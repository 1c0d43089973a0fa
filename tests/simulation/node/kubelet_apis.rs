//! The companion's other API: devices of a kind in mode `both`, as `src/node/state/resources.rs` hands them out.

use std::collections::BTreeSet;
use std::time::Duration;

use drayman::api::resource::ResourceClaim;
use drayman::core::prepare::allocate::check_allocate;
use drayman::core::prepare::containers::Shown;
use drayman::core::prepare::inventory::{HandedOut, plugin_devices};
use drayman::core::prepare::names::{ClaimUid, device_of_plugin_id};
use drayman::core::prepare::plan::{
    ClaimToPrepare, PluginDevice, Refusal, Step, plan_prepare, takes_from_both,
};

use super::companion::{Companion, Failure, KIND};
use crate::driver::DRIVER;

const RESOURCE: &str = "example.com/test";

/// What kubelet has shown of its containers, or why it does not.
pub(super) type Look = Result<Shown, String>;

impl Companion {
    fn handed_out(&self) -> HandedOut<'_> {
        HandedOut {
            prepared_claims: &self.prepared_claims,
            allocated_claims: &self.allocated_claims,
            containers: &self.containers,
        }
    }

    /// The devices as kubelet is told of them.
    pub(super) fn offers(&self) -> Vec<PluginDevice> {
        plugin_devices(&self.inventory, self.handed_out(), KIND)
    }

    /// Kubelet wants these for a container.
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

    /// Plans a Prepare. If it is about a device that containers could have, kubelet is asked first.
    pub(super) fn plan(
        &mut self,
        claim: &ClaimToPrepare,
        look: Option<&Look>,
        now: Duration,
    ) -> Result<(ClaimUid, Vec<Step>), Refusal> {
        let planned = self.plan_from_what_is_known(claim);
        let Some(look) = look else { return planned };
        let device = match &planned {
            Ok((_, steps)) => takes_from_both(steps, &self.inventory),
            Err(Refusal::InContainer { device, .. } | Refusal::ContainersUnknown { device, .. }) => {
                Some(device.clone())
            }
            Err(_) => None,
        };
        let Some(device) = device else { return planned };
        if let Err(problem) = self.see(look, now) {
            return Err(Refusal::ContainersUnknown { device, problem });
        }
        let planned = self.plan_from_what_is_known(claim);
        if let Err(Refusal::InContainer { device, .. }) = &planned {
            self.conflicting.claimed(device, &self.containers);
        }
        planned
    }

    fn plan_from_what_is_known(&self, claim: &ClaimToPrepare) -> Result<(ClaimUid, Vec<Step>), Refusal> {
        plan_prepare(
            &self.prepared_claims,
            &self.containers,
            &self.inventory,
            &self.identity,
            claim,
        )
    }

    /// Takes up what kubelet shows.
    pub(super) fn see(&mut self, look: &Look, now: Duration) -> Result<(), String> {
        let shown = look.as_ref().map_err(Clone::clone)?;
        self.containers.seen(shown, now.saturating_sub(self.since));
        self.conflicting.settle(&self.containers);
        Ok(())
    }

    /// Takes up which claims the API server has. The answer is whether kubelet is to be asked for one of their devices.
    pub(super) fn hear(&mut self, claims: &[ResourceClaim], node: &str) -> bool {
        self.allocated_claims.replace(claims, DRIVER, node);
        !self.announced_in_containers().is_empty()
    }

    /// Notes which devices a claim and a container were both given.
    pub(super) fn contest(&mut self) {
        for device in self.announced_in_containers() {
            self.conflicting.claimed(&device, &self.containers);
        }
    }

    fn announced_in_containers(&self) -> BTreeSet<String> {
        let devices = self.allocated_claims.devices();
        devices
            .filter(|device| self.containers.hold(device))
            .map(str::to_owned)
            .collect()
    }

    /// Whether kubelet is to be asked again although nobody wants anything.
    pub(super) fn looks_again(&self) -> bool {
        !self.containers.known() || !self.conflicting.devices().is_empty()
    }

    /// Who has what, as far as this companion knows.
    pub(super) fn known(&self) -> String {
        format!(
            "{:?}, announced {:?}, contested {:?}",
            self.containers,
            self.allocated_claims,
            self.conflicting.devices()
        )
    }

    /// What of the other API is not free, though no container has anything.
    pub(super) fn withheld(&self) -> Vec<String> {
        let unhealthy = self.offers().into_iter().filter(|device| !device.healthy);
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
