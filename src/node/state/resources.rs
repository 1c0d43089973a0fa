//! Extended resources in the state task: Allocate, the check before a container starts, and kubelet's view of its containers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tracing::warn;

use super::handle::{Failure, Offered};
use super::{NodeState, Resource};
use crate::api::crd::{DeviceNumber, Mode};
use crate::core::prepare::allocate::{check_allocate, evicted};
use crate::core::prepare::claim_uid::ClaimUid;
use crate::core::prepare::container_edits::ContainerEdits;
use crate::core::prepare::device_manager::numbers_value;
use crate::core::prepare::inventory::{Devices, HandedOut};
use crate::core::prepare::naming::device_of_plugin_id;
use crate::core::prepare::plan::{plan_prepare, takes_from_both};
use crate::core::prepare::refusal::Refusal;
use crate::core::prepare::release::plan_free;
use crate::core::prepare::request::ClaimToPrepare;
use crate::core::prepare::retries::Missing;
use crate::core::prepare::step::Step;
use crate::node::driver::NodeDriver;

/// Interval between queries of kubelet's containers until the first answer, and while a claim waits for a container's device. Otherwise,
/// kubelet is queried only when a claim needs a device.
pub(super) const LOOK_AGAIN: Duration = Duration::from_secs(2);

fn numbers_of<'a>(inventory: &'a Devices, device: &str) -> &'a [DeviceNumber] {
    inventory
        .get(device)
        .map(|device| &*device.device_numbers)
        .unwrap_or_default()
}

impl<D: NodeDriver> NodeState<D> {
    /// The devices in use or allocated, through either API.
    pub(super) fn handed_out(&self) -> HandedOut<'_> {
        HandedOut {
            prepared_claims: &self.prepared_claims,
            allocated_claims: &self.allocated_claims,
            containers: &self.containers,
        }
    }

    pub(super) async fn allocate(
        &mut self,
        resource: &str,
        containers: &[Vec<String>],
    ) -> Result<Vec<ContainerEdits>, Failure> {
        let Some(Resource { offered, .. }) = self.resources.get(resource) else {
            return Err(Refusal::NoResource(resource.to_owned()).into());
        };
        let offered = offered.clone();
        check_allocate(
            self.handed_out(),
            &self.inventory,
            resource,
            &offered.kind,
            containers,
        )?;
        for uid in evicted(&self.prepared_claims, &self.inventory, containers) {
            self.carry_out(&plan_free(&uid)).await?;
            self.orphans.change().forget(&uid);
        }
        let mut container_edits_of = Vec::with_capacity(containers.len());
        for container in containers {
            let devices: BTreeSet<&str> = container.iter().map(|id| device_of_plugin_id(id)).collect();
            let (mut whole, mut apart) = (ContainerEdits::default(), Vec::new());
            for device in devices {
                self.check_unused(device).await?;
                let made = self.container_edits_of_device(device).await?;
                if offered.cdi_devices {
                    apart.push((device, made.clone()));
                }
                whole.extend(made);
            }
            whole.check_paths()?;
            if offered.cdi_devices {
                whole = ContainerEdits::default();
                for (device, made) in apart {
                    whole.extend(self.by_name(device, made).await?);
                }
            }
            for device in container.iter().map(|id| device_of_plugin_id(id)) {
                let numbers = numbers_of(&self.inventory, device);
                if !numbers.is_empty() {
                    let name = self.driver_name.numbers_annotation(device);
                    whole.annotations.insert(name, numbers_value(numbers));
                }
            }
            container_edits_of.push(whole);
        }
        let inventory = self.inventory.clone();
        let devices = || {
            let devices = containers.iter().flatten().map(|id| device_of_plugin_id(id));
            devices.map(|device| (device, numbers_of(&inventory, device)))
        };
        let now = self.since.elapsed();
        let granted = self.granted.entry(resource.to_owned()).or_default();
        granted.allocated(devices(), now);
        if offered.also_by_claims {
            self.containers.change().allocated(devices(), now);
        }
        Ok(container_edits_of)
    }

    /// Checks whether containers with these devices may start: each device exists, is unchanged and is healthy.
    pub(super) async fn check_start(&mut self, resource: &str, devices: &[String]) -> Result<(), Failure> {
        let Some(Resource { offered, .. }) = self.resources.get(resource) else {
            return Err(Refusal::NoResource(resource.to_owned()).into());
        };
        let is_health_checked = offered.pre_start_check;
        let names: BTreeSet<&str> = devices.iter().map(|id| device_of_plugin_id(id)).collect();
        self.check_unwitnessed(&names).await?;
        if !is_health_checked {
            return Ok(());
        }
        for name in names {
            // A device that the resource has lost is withheld from others, not from its own container, and may have another name now.
            let is_former = self.former.has(resource, name);
            let device = if is_former {
                self.devices.get(name).or_else(|| self.inventory.get(name))
            } else {
                self.inventory.get(name)
            };
            let Some(device) = device else {
                if is_former {
                    self.container_edits_of_device(name).await?;
                    continue;
                }
                return Err(Refusal::Gone(name.chars().take(64).collect()).into());
            };
            if let Some(reason) = &device.unhealthy {
                return Err(Refusal::Unhealthy {
                    device: name.to_owned(),
                    reason: reason.clone(),
                }
                .into());
            }
            self.container_edits_of_device(name).await?;
        }
        Ok(())
    }

    /// The edits to pass a device by CDI name: the CDI device, whose file contains the driver's edits, and only those edits that CDI does
    /// not support. The file is written before kubelet gets the response.
    async fn by_name(&self, device: &str, mut made: ContainerEdits) -> Result<ContainerEdits, Failure> {
        let id = self.driver_name.cdi_device_id(device);
        let (annotations, mut cdi_devices) = (
            std::mem::take(&mut made.annotations),
            std::mem::take(&mut made.cdi_devices),
        );
        let (store, name) = (self.store.clone(), device.to_owned());
        spawn_blocking(move || store.write_cdi_of_device(&name, &made))
            .await
            .map_err(|_| Failure::Stopping)??;
        cdi_devices.push(id);
        Ok(ContainerEdits {
            annotations,
            cdi_devices,
            ..ContainerEdits::default()
        })
    }

    /// Updates the CDI files of devices that are passed by name. They must be restored after a boot, when kubelet restarts containers
    /// without another Allocate, and must not refer to another device's node.
    pub(super) async fn refresh_named_devices(&mut self) {
        let kinds: BTreeSet<&str> = self
            .resources
            .values()
            .filter(|resource| resource.offered.cdi_devices)
            .map(|resource| resource.offered.kind.as_str())
            .collect();
        let wanted: BTreeSet<String> = self
            .inventory
            .values()
            .filter(|device| device.mode.serves_extended_resource() && kinds.contains(device.kind.as_str()))
            .map(|device| device.name.clone())
            .collect();
        let (mut kept, mut complete) = (BTreeSet::new(), true);
        for device in wanted {
            let written = match self.container_edits_of_device(&device).await {
                Ok(made) => self.by_name(&device, made).await.map(drop),
                Err(failure) => Err(failure),
            };
            match written {
                Ok(()) => {
                    kept.insert(device);
                }
                Err(failure) => {
                    complete = false;
                    // The failure of a retry has already been logged.
                    if !self.retries.has(&Missing::OfDevices) {
                        warn!(
                            device,
                            reason = failure.reason(),
                            "containers cannot be given this device by name now, it is tried again: {failure}"
                        );
                    }
                }
            }
        }
        let store = self.store.clone();
        match spawn_blocking(move || store.keep_cdi_of_devices(&kept)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                complete = false;
                warn!(
                    reason = error.reason(),
                    "files of devices that have gone remain: {error}"
                );
            }
            Err(error) => {
                complete = false;
                warn!("files of devices that have gone remain: {error}");
            }
        }
        if complete {
            self.retries.done(&Missing::OfDevices);
        } else {
            self.retries.failed(Missing::OfDevices, self.since.elapsed());
        }
    }

    /// Whether a kind has mode `both` and kubelet can be queried for its containers.
    pub(super) fn has_both(&self) -> bool {
        self.grants.is_some()
            && self
                .resources
                .values()
                .any(|resource| resource.offered.also_by_claims)
    }

    /// Applies a change of the configured extended resources. A removed or redefined resource first publishes an empty device list, so that
    /// kubelet learns of it before the device plugin endpoint closes.
    pub(super) fn change_resources(&mut self) {
        let wanted = self.wanted.borrow_and_update().clone();
        let gone = self
            .resources
            .iter()
            .filter(|(name, resource)| wanted.get(*name) != Some(&resource.offered));
        let gone: Vec<String> = gone.map(|(name, _)| name.clone()).collect();
        for name in gone {
            self.leave(&name);
        }
        let resources = self.resources.change();
        resources.retain(|name, resource| {
            let stays = wanted.get(name) == Some(&resource.offered);
            if !stays {
                resource.devices.send_replace(Vec::new());
            }
            stays
        });
        for (name, resource) in wanted.iter() {
            resources.entry(name.clone()).or_insert_with(|| Resource {
                offered: resource.clone(),
                devices: watch::channel(Vec::new()).0,
            });
        }
        let offered = |(name, resource): (&String, &Resource)| {
            let offered = Offered {
                resource: resource.offered.clone(),
                devices: resource.devices.subscribe(),
            };
            (name.clone(), offered)
        };
        let offered: BTreeMap<String, Offered> = self.resources.iter().map(offered).collect();
        self.offered.send_replace(Arc::new(offered));
    }

    /// Whether kubelet must be queried before this claim is prepared. True if the claim takes a device that containers could hold, so that
    /// the decision uses current data.
    pub(super) fn waits_for_look(&self, claim: &ClaimToPrepare) -> bool {
        self.grants.is_some()
            && self
                .device_of_both(&self.plan_from_what_is_known(claim))
                .is_some()
    }

    fn device_of_both(&self, planned: &Result<(ClaimUid, Vec<Step>), Refusal>) -> Option<String> {
        match planned {
            Ok((_, steps)) => takes_from_both(steps, &self.inventory),
            Err(Refusal::InContainer { device, .. } | Refusal::ContainersUnknown { device, .. }) => {
                Some(device.clone())
            }
            Err(_) => None,
        }
    }

    /// Plans a Prepare. `looked` is the result of the query that the claim waited for.
    pub(super) fn plan(
        &mut self,
        claim: &ClaimToPrepare,
        looked: Option<&Result<(), String>>,
    ) -> Result<(ClaimUid, Vec<Step>), Refusal> {
        let planned = self.plan_from_what_is_known(claim);
        if self.grants.is_none() {
            return planned;
        }
        let Some(device) = self.device_of_both(&planned) else {
            return planned;
        };
        let problem = match looked {
            Some(Ok(())) => None,
            Some(Err(problem)) => Some(problem.clone()),
            // Another claim of the same call has changed which devices this claim takes.
            None => Some("it is asked when the claim is prepared again".to_owned()),
        };
        if let Some(problem) = problem {
            return Err(Refusal::ContainersUnknown { device, problem });
        }
        if let Err(Refusal::InContainer { device, .. }) = &planned {
            self.contest(device);
        }
        planned
    }

    fn plan_from_what_is_known(&self, claim: &ClaimToPrepare) -> Result<(ClaimUid, Vec<Step>), Refusal> {
        plan_prepare(
            &self.prepared_claims,
            &self.containers,
            &self.inventory,
            &self.node,
            claim,
        )
    }

    /// Whether kubelet must be queried again without a new claim.
    pub(super) fn looks_again(&self) -> bool {
        self.has_both()
            && !self.looking.is_under_way()
            && (!self.containers.known() || !self.conflicting.devices().is_empty())
    }

    /// Processes a change of the claims' allocations.
    pub(super) fn hear_of_claims(&mut self) {
        *self.allocated_claims.change() = self.announcements.borrow_and_update().as_ref().clone();
        self.contest_unannounced();
        if self.announced_in_containers().next().is_some() {
            // The known holders may be outdated: kubelet does not report the end of a container.
            self.ask_kubelet();
        }
    }

    fn announced_in_containers(&self) -> impl Iterator<Item = &str> {
        self.allocated_claims
            .devices()
            .filter(|device| self.containers.hold(device))
    }

    /// Records the devices that both a claim has allocated and a container holds.
    pub(super) fn contest_announced(&mut self) {
        let news = self
            .announced_in_containers()
            .filter(|device| !self.conflicting.devices().contains(*device));
        let news: Vec<String> = news.map(str::to_owned).collect();
        for device in news {
            self.contest(&device);
        }
    }

    /// Checks holders of `both` devices that the API server no longer shows, as if another claim needed their device: while a claim holds
    /// such a device, kubelet requests it for no container, so nothing else triggers the check.
    fn contest_unannounced(&mut self) {
        if self.witness.is_none() || !self.allocated_claims.known() {
            return;
        }
        let is_both = |device: &str| {
            let device = self.inventory.get(device);
            device.is_some_and(|device| device.mode == Mode::Both)
        };
        let lost = self.prepared_claims.entries().iter().filter(|(uid, entry)| {
            !self.allocated_claims.has(uid.as_str()) && entry.devices.iter().any(|held| is_both(&held.device))
        });
        let lost: Vec<ClaimUid> = lost.map(|(uid, _)| uid.clone()).collect();
        for uid in lost {
            if self.orphans.change().contest(&uid) {
                self.look_due.notify_one();
            }
        }
    }

    /// Records that a claim has, or needs, a device that a container holds.
    pub(super) fn contest(&mut self, device: &str) {
        self.conflicting.change().claimed(device, &self.containers);
        if let Some(holder) = self.containers.holder(device) {
            warn!(
                device,
                holder,
                reason = "DeviceHeld",
                "a claim was allocated a device that a container has; no other claim is, until the container has ended"
            );
        }
    }
}
