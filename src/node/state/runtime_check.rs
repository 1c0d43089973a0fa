//! Checks with the container runtime whether containers still have devices.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tracing::{debug, warn};

use crate::api::crd::{Device, DeviceNumber};
use crate::core::prepare::inventory::Devices;
use crate::core::prepare::names::{ClaimUid, DriverName};
use crate::core::prepare::plan::Refusal;
use crate::core::prepare::prepared_claims::{Entry, PreparedClaims};
use crate::core::prepare::runtime_containers::{Given, RuntimeContainers};
use crate::node::container_runtime::ContainerRuntime;

/// How long after the removal of a CDI file the runtime may not yet list a container created with it: the runtime reads the file during the
/// create call, shortly before it lists the container.
const SETTLE: Duration = Duration::from_secs(2);

/// The result of a check whether containers use the devices of claims.
#[derive(Debug)]
pub(super) enum ClaimUse {
    /// The runtime does not answer or is not known.
    Unknown,
    /// It is too early to decide; repeat the check after this time.
    TooEarly(Duration),
    /// The claims whose devices no container has, and the others.
    Known {
        unused: BTreeSet<ClaimUid>,
        in_use: BTreeSet<ClaimUid>,
    },
}

/// The container runtime, and the claims that no further container can start with.
#[derive(Debug)]
pub(super) struct RuntimeCheck {
    /// `None` if no runtime reports the devices of its containers.
    runtime: Option<Arc<dyn ContainerRuntime>>,
    driver_name: DriverName,
    /// When the CDI files of claims that the API server no longer shows as holders were removed.
    cdi_removed: BTreeMap<ClaimUid, Instant>,
}

impl RuntimeCheck {
    pub(super) fn new(runtime: Option<Arc<dyn ContainerRuntime>>, driver_name: DriverName) -> Self {
        Self {
            runtime,
            driver_name,
            cdi_removed: BTreeMap::new(),
        }
    }

    /// Whether a runtime reports the devices of its containers.
    pub(super) fn is_possible(&self) -> bool {
        self.runtime.is_some()
    }

    async fn containers(&self) -> Option<Result<Arc<RuntimeContainers>, String>> {
        match &self.runtime {
            Some(runtime) => Some(runtime.look().await),
            None => None,
        }
    }

    /// Adds the container that has the device to the error, if the runtime shows it.
    pub(super) async fn name_container(&self, refusal: Refusal, inventory: &Devices) -> Refusal {
        let (Refusal::Held { device, .. } | Refusal::InContainer { device, .. }) = &refusal else {
            return refusal;
        };
        let Some(Ok(containers)) = self.containers().await else {
            return refusal;
        };
        let numbers = inventory.get(device).map(|device| &*device.device_numbers);
        let numbers = numbers.unwrap_or_default();
        let has =
            |given: &Given| given.has_one_of(numbers) && !given.has_admin_access(&self.driver_name, device);
        let Some(user) = containers.user(has) else {
            return refusal;
        };
        match refusal {
            Refusal::Held { device, holder } => Refusal::Held {
                device,
                holder: format!("{holder}, and {user} has it,"),
            },
            Refusal::InContainer { device, .. } => Refusal::InContainer {
                device,
                holder: user.to_string(),
            },
            other => other,
        }
    }

    /// Refuses a starting container or a claim a device that another container still has: kubelet forgets pods deleted by force while their
    /// containers are ending. A runtime failure does not block: kubelet needs the runtime to start the container, too. `listed` are the
    /// containers, if the caller has listed them.
    pub(super) async fn check_unused(
        &self,
        devices: &[&Device],
        listed: Option<Result<Arc<RuntimeContainers>, String>>,
    ) -> Result<(), Refusal> {
        let containers = match listed {
            Some(listed) => Some(listed),
            None => self.containers().await,
        };
        let containers = match containers {
            None => return Ok(()),
            Some(Ok(containers)) => containers,
            Some(Err(problem)) => {
                warn!(
                    reason = "ContainerRuntimeUnavailable",
                    "whether another container has a device is not checked: {problem}"
                );
                return Ok(());
            }
        };
        for device in devices {
            if device.shares.is_some_and(|shares| shares > 1) {
                continue;
            }
            let cdi_device = self.driver_name.cdi_device_id(&device.name);
            let has = |given: &Given| {
                let has_it =
                    given.has_one_of(&device.device_numbers) || given.cdi_devices.contains(&cdi_device);
                has_it && !given.has_admin_access(&self.driver_name, &device.name)
            };
            if let Some(user) = containers.user(has) {
                return Err(Refusal::StillUsed {
                    device: device.name.clone(),
                    holder: user.to_string(),
                });
            }
        }
        Ok(())
    }

    /// Restricts the check to these claims, and returns those whose CDI files must be removed first, so that no further container starts
    /// with them.
    pub(super) fn begin(&mut self, uids: &[ClaimUid]) -> Vec<ClaimUid> {
        self.cdi_removed.retain(|uid, _| uids.contains(uid));
        let present = uids.iter().filter(|uid| !self.cdi_removed.contains_key(uid));
        present.cloned().collect()
    }

    /// Records that the CDI file of a claim was removed.
    pub(super) fn cdi_removed(&mut self, uid: ClaimUid) {
        self.cdi_removed.insert(uid, Instant::now());
    }

    /// Asks the runtime whether containers use the devices of these claims.
    pub(super) async fn claim_use(&self, uids: Vec<ClaimUid>, prepared_claims: &PreparedClaims) -> ClaimUse {
        if uids.is_empty() {
            return ClaimUse::Unknown;
        }
        if self.cdi_removed.values().any(|since| since.elapsed() < SETTLE) {
            return ClaimUse::TooEarly(SETTLE);
        }
        let containers = match self.containers().await {
            None => return ClaimUse::Unknown,
            Some(Ok(containers)) => containers,
            Some(Err(problem)) => {
                warn!(
                    reason = "ContainerRuntimeUnavailable",
                    "whether containers use the devices of claims is not checked: {problem}"
                );
                return ClaimUse::Unknown;
            }
        };
        let (unused, in_use) = uids.into_iter().partition(|uid| {
            self.cdi_removed.contains_key(uid) && !self.is_used(uid, prepared_claims, &containers)
        });
        ClaimUse::Known { unused, in_use }
    }

    /// Whether a container uses a claim's devices. Without known device numbers, only the CDI device identifies it.
    fn is_used(
        &self,
        uid: &ClaimUid,
        prepared_claims: &PreparedClaims,
        containers: &RuntimeContainers,
    ) -> bool {
        let held = prepared_claims
            .entry(uid)
            .into_iter()
            .flat_map(Entry::held_devices);
        let numbers: Vec<DeviceNumber> = held.flat_map(|held| held.numbers.iter().copied()).collect();
        let driver = &self.driver_name;
        let is_of_claim = |id: &String| driver.claim_of_cdi_id(id).as_ref() == Some(uid);
        let has = |given: &Given| given.has_one_of(&numbers) || given.cdi_devices.iter().any(is_of_claim);
        match containers.user(has) {
            Some(user) => {
                debug!(claim_uid = %uid, holder = %user, "a container uses the devices of the claim");
                true
            }
            None => false,
        }
    }
}
