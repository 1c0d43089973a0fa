//! Extended resources in the state task: Allocate, the check before a container starts, CDI files of devices, and queries of kubelet's
//! containers.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tracing::warn;

use super::NodeState;
use super::resources::{FinishedQuery, QueryGap, WaitingRequest};
use crate::api::crd::{Device, DeviceNumber, Devices};
use crate::core::names::device_of_plugin_id;
use crate::core::prepare::container_edits::ContainerEdits;
use crate::core::prepare::device_manager::numbers_value;
use crate::core::prepare::device_plugin::{check_allocate, evicted};
use crate::core::prepare::plan::{Missing, Refusal};
use crate::core::prepare::prepared_claims::are_among;
use crate::core::prepare::recovery::plan_free;
use crate::core::prepare::runtime_containers::NewUser;
use crate::node::driver::NodeDriver;
use crate::node::service::{ListedContainers, ServiceError};

impl<D: NodeDriver> NodeState<D> {
    pub(super) async fn allocate(
        &mut self,
        resource: &str,
        containers: &[Vec<String>],
    ) -> Result<Vec<ContainerEdits>, ServiceError> {
        let Some(config) = self.resources.get(resource).cloned() else {
            return Err(Refusal::NoResource(resource.to_owned()).into());
        };
        let handed_out = self.resources.handed_out(&self.prepared_claims);
        check_allocate(handed_out, &self.inventory, resource, &config.kind, containers)?;
        for uid in evicted(&self.prepared_claims, &self.inventory, containers) {
            self.perform(&plan_free(&uid)).await?;
        }
        let mut container_edits_of = Vec::with_capacity(containers.len());
        let mut numbers_of: BTreeMap<&str, Vec<DeviceNumber>> = BTreeMap::new();
        for container in containers {
            let devices: BTreeSet<&str> = container.iter().map(|id| device_of_plugin_id(id)).collect();
            let (mut whole, mut apart) = (ContainerEdits::default(), Vec::new());
            for device in devices {
                self.driver.check_unused(device).await?;
                let (made, numbers) = self.edits_of(device).await?;
                numbers_of.insert(device, numbers);
                if config.cdi_devices {
                    apart.push((device, made.clone()));
                }
                whole.extend(made);
            }
            whole.check_paths().map_err(Refusal::from)?;
            if config.cdi_devices {
                whole = ContainerEdits::default();
                for (device, made) in apart {
                    whole.extend(self.by_name(device, made).await?);
                }
            }
            for device in container.iter().map(|id| device_of_plugin_id(id)) {
                if let Some(numbers) = numbers_of.get(device).filter(|numbers| !numbers.is_empty()) {
                    let name = self.paths.driver.numbers_annotation(device);
                    whole.annotations.insert(name, numbers_value(numbers));
                }
            }
            container_edits_of.push(whole);
        }
        let devices = numbers_of
            .iter()
            .map(|(device, numbers)| (*device, numbers.as_slice()));
        self.resources.allocate(resource, devices, self.started.elapsed());
        Ok(container_edits_of)
    }

    /// The container edits for a device, with its device numbers. Refuses a device node that another holder may have: the driver may have found
    /// other nodes since the request was checked.
    async fn edits_of(&self, name: &str) -> Result<(ContainerEdits, Vec<DeviceNumber>), ServiceError> {
        let numbers = |devices: &Devices| devices.get(name).map(|device| device.device_numbers.clone());
        let mut found = self.found.borrow().clone();
        loop {
            let made = self.driver.container_edits(name).await?;
            let before = std::mem::replace(&mut found, self.found.borrow().clone());
            // Otherwise the device has moved, and the edits may have its earlier nodes.
            if numbers(&before) == numbers(&found) {
                let Some(device) = found.get(name).or_else(|| self.inventory.get(name)) else {
                    return Ok((made, Vec::new()));
                };
                self.check_nodes(device, None)?;
                return Ok((made, device.device_numbers.to_vec()));
            }
        }
    }

    /// Checks whether containers with these devices may start: each device exists, has the device nodes that the container gets, and is healthy.
    /// Without a health check, only that no other container has it.
    pub(super) async fn check_start(
        &mut self,
        resource: &str,
        devices: &[String],
        containers: Option<&ListedContainers>,
    ) -> Result<(), ServiceError> {
        let Some(config) = self.resources.get(resource) else {
            return Err(Refusal::NoResource(resource.to_owned()).into());
        };
        let (is_health_checked, passes_nodes) = (config.pre_start_check, !config.cdi_devices);
        let names: BTreeSet<&str> = devices.iter().map(|id| device_of_plugin_id(id)).collect();
        self.check_containers_lack(names.iter().copied(), NewUser::Container, containers)
            .await?;
        if !is_health_checked {
            return Ok(());
        }
        for name in names {
            // A device that the resource has lost is withheld from others, not from its own container, and may have another name now.
            let is_lost = self.resources.has_lost(resource, name);
            let device = if is_lost {
                self.device(name)
            } else {
                self.inventory.get(name)
            };
            let Some(device) = device else {
                if is_lost {
                    self.driver.container_edits(name).await?;
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
            // Kubelet gives the container the device nodes of its Allocate, which may be another device's now.
            let granted = self.resources.lost_numbers(resource, name);
            if passes_nodes && !are_among(&granted, &device.device_numbers) {
                return Err(Refusal::Unhealthy {
                    device: name.to_owned(),
                    reason: "it has another device node since the container got it: delete the pod so that its replacement gets that one"
                        .to_owned(),
                }
                .into());
            }
            self.driver.container_edits(name).await?;
        }
        Ok(())
    }

    /// The edits to pass a device by CDI name: the CDI device, whose file contains the driver's edits, and only those edits that CDI does
    /// not support. The file is written before kubelet gets the response.
    async fn by_name(&self, device: &str, mut made: ContainerEdits) -> Result<ContainerEdits, ServiceError> {
        let id = self.paths.driver.cdi_device_id(device);
        let (annotations, mut cdi_devices) = (
            std::mem::take(&mut made.annotations),
            std::mem::take(&mut made.cdi_devices),
        );
        let (store, name) = (self.store.clone(), device.to_owned());
        spawn_blocking(move || store.cdi.write_device(&name, &made))
            .await
            .map_err(|_| ServiceError::Stopping)??;
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
        let store = self.store.clone();
        let written = match spawn_blocking(move || store.cdi.devices()).await {
            Ok(Ok(written)) => written,
            Ok(Err(error)) => {
                // The failure of a retry has already been logged.
                if !self.retries.has(&Missing::OfDevices) {
                    warn!(
                        reason = error.reason(),
                        "CDI files of devices are not updated: {error}"
                    );
                }
                return self.retries.failed(Missing::OfDevices, self.started.elapsed());
            }
            Err(_) => return,
        };
        let named = self
            .resources
            .all()
            .filter(|resource| resource.config.cdi_devices);
        let kinds: BTreeSet<&str> = named.map(|resource| resource.config.kind.as_str()).collect();
        self.named_devices.extend(written);
        // A container keeps the name when the configuration no longer has it.
        let is_named = |device: &Device| {
            (device.mode.serves_extended_resource() && kinds.contains(device.kind.as_str()))
                || (self.named_devices.contains(&device.name) && self.devices.contains_key(&device.name))
        };
        let devices: Vec<String> = self
            .inventory
            .values()
            .filter(|device| is_named(device))
            .map(|device| device.name.clone())
            .collect();
        self.named_devices.extend(devices.iter().cloned());
        let (mut kept, mut complete) = (BTreeSet::new(), true);
        for device in devices {
            let written = match self.edits_of(&device).await {
                Ok((made, _)) => self.by_name(&device, made).await.map(drop),
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
                            "containers cannot get this device by name now; retrying: {failure}"
                        );
                    }
                }
            }
        }
        // A file that cannot be updated also goes: the node that it names may be another device's by now.
        let store = self.store.clone();
        match spawn_blocking(move || store.cdi.keep_devices(&kept)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                complete = false;
                warn!(
                    reason = error.reason(),
                    "CDI files of missing devices remain: {error}"
                );
            }
            Err(error) => {
                complete = false;
                warn!("CDI files of missing devices remain: {error}");
            }
        }
        if complete {
            self.retries.done(&Missing::OfDevices);
        } else {
            self.retries.failed(Missing::OfDevices, self.started.elapsed());
        }
    }

    /// Applies a change of the configured extended resources.
    pub(super) fn configure(&mut self) {
        let configured = self.configured.borrow_and_update().clone();
        let served = self.resources.configure(&configured, &self.inventory);
        self.backend.resources.send_replace(std::sync::Arc::new(served));
    }

    /// Whether a kind has mode `both` and kubelet can be queried for its containers.
    pub(super) fn has_both(&self) -> bool {
        self.query.is_possible() && self.resources.has_both()
    }

    /// Whether kubelet must be queried again without a new claim.
    pub(super) fn must_query_again(&self) -> bool {
        self.has_both()
            && !self.query.is_running()
            && (!self.resources.containers.known() || !self.resources.conflicting.devices().is_empty())
    }

    /// Starts a query of kubelet's containers, or schedules another one after the query in progress.
    pub(super) fn query_kubelet(&mut self) {
        self.query.start(self.resources.names_to_query());
    }

    /// Queries kubelet, and waits for the answer for this time at most.
    pub(super) async fn query_and_wait(&mut self, limit: Duration) {
        self.resources.settle_withdrawn(&self.devices);
        self.query_kubelet();
        if self.query.is_running()
            && let Ok(finished) = timeout(limit, self.query.finished()).await
        {
            self.finish_query(finished).await;
        }
    }

    /// Queues a request for the next query to begin.
    pub(super) fn wait_for_query(&mut self, request: WaitingRequest) {
        if self.query.wait(request) {
            self.query_kubelet();
        }
    }

    /// Processes the result of a query and serves the requests that waited for it.
    pub(super) async fn finish_query(&mut self, finished: FinishedQuery) {
        let FinishedQuery {
            view,
            waiting,
            mut again,
        } = finished;
        let now = self.started.elapsed();
        let updated = self
            .resources
            .update(&view, &self.devices, !waiting.is_empty(), now);
        again |= matches!(updated, Err(QueryGap::Added(_)));
        let updated = updated.map_err(|gap| gap.to_string());
        self.query.schedule_withdrawn(self.resources.knows_withdrawn());
        let problem = updated.as_ref().err().map(String::as_str);
        self.query
            .report(problem, self.has_both(), self.resources.has_withdrawn());
        self.rebuild_inventory();
        for request in waiting {
            match request {
                WaitingRequest::Prepare {
                    claims,
                    withdrawn,
                    containers,
                    answer,
                } => {
                    let containers = containers.as_ref();
                    self.prepare_all(&claims, &withdrawn, Some(&updated), containers, answer)
                        .await;
                }
                WaitingRequest::InContainers(answer) => {
                    let containers = &self.resources.containers;
                    let holder = |device: &String| Some((device.clone(), containers.holder(device)?));
                    let _ = answer.send(self.inventory.keys().filter_map(holder).collect());
                }
            }
        }
        if again {
            self.query_kubelet();
        }
    }
}
