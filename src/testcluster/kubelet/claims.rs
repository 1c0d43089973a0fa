//! Prepares and unprepares claims like kubelet (`pkg/kubelet/cm/dra/manager.go`): one call per driver for all claims of a
//! pod, and one for all claims that no other pod uses.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::PoisonError;
use std::time::Duration;

use serde_json::Value;

use super::Kubelet;
use super::containers::Trouble;
use super::plugins::{DraApi, Plugin};
use super::wire::CallError;
use crate::api::proto::{dra_v1, dra_v1alpha3};
use crate::testcluster::api::Mode;
use crate::testcluster::api::object::{self, list, text};
use crate::testcluster::client::{claims_of, is_reserved_for};

/// Deadline of a DRA call.
const PREPARE: Duration = Duration::from_secs(45);
/// Event reason.
const REASON: &str = "FailedPrepareDynamicResources";

/// A claim that a pod uses on this node, with one driver.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    driver: String,
    namespace: String,
    name: String,
    uid: String,
    /// The driver's resource handle, in classic mode.
    handle: String,
    /// Whether the driver has prepared the claim.
    prepared: bool,
    devices: Vec<Device>,
}

/// Devices of a prepared claim.
#[derive(Clone, Debug, Default)]
struct Device {
    /// The requests of the claim; empty for all.
    requests: Vec<String>,
    /// CDI device ids.
    ids: Vec<String>,
}

/// The claims of a pod, by the pod's entry.
pub(super) struct Prepared(Vec<(String, Held)>);

impl Prepared {
    /// Returns the CDI device ids of a claim's request, or of all its requests if `request` is empty.
    pub(super) fn ids<'a>(&'a self, entry: &'a str, request: &'a str) -> impl Iterator<Item = &'a String> {
        let of_entry = self.0.iter().filter(move |(name, _)| name == entry);
        let devices = of_entry.flat_map(|(_, held)| &held.devices);
        let named = devices.filter(move |device| {
            request.is_empty()
                || device.requests.is_empty()
                || device.requests.iter().any(|name| name == request)
        });
        named.flat_map(|device| &device.ids)
    }
}

/// The devices of each prepared claim by its uid, or an error.
type Answers = BTreeMap<String, Result<Vec<Device>, String>>;

fn later(message: String) -> Trouble {
    Trouble::Later(REASON, message)
}

impl Kubelet {
    fn plugin(&self, driver: &str) -> Result<Plugin, String> {
        self.registry
            .with(|plugins| plugins.driver(driver).cloned())
            .ok_or_else(|| match self.client.server.mode() {
                Mode::Classic => {
                    format!("plugin name {driver} not found in the list of registered DRA plugins")
                }
                Mode::Structured => format!("DRA driver {driver} is not registered"),
            })
    }

    /// Returns a prepared claim of a driver, for any pod.
    fn prepared(&self, driver: &str, uid: &str) -> Option<Held> {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let mut held = running.values().flat_map(|running| &running.claims);
        held.find(|held| held.driver == driver && held.uid == uid && held.prepared)
            .cloned()
    }

    /// Records that a pod uses a claim.
    fn hold(&self, pod: &Value, new: Held) {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let held = &mut running.entry(object::uid(pod).to_owned()).or_default().claims;
        held.retain(|held| held.driver != new.driver || held.uid != new.uid);
        held.push(new);
    }

    /// Prepares the pod's claims.
    pub(super) async fn prepare_claims(&self, pod: &Value) -> Result<Prepared, Trouble> {
        let used = match self.client.server.mode() {
            Mode::Classic => self.classic_claims(pod),
            Mode::Structured => self.structured_claims(pod),
        };
        let used = used.map_err(later)?;
        let mut batches: BTreeMap<&str, Vec<Held>> = BTreeMap::new();
        for (_, held) in &used {
            if let Some(known) = self.prepared(&held.driver, &held.uid) {
                self.hold(pod, known);
            } else {
                let batch = batches.entry(&held.driver).or_default();
                if batch.iter().all(|other| other.uid != held.uid) {
                    batch.push(held.clone());
                }
            }
        }
        if self.client.server.mode() == Mode::Structured {
            // Unprepared at the end of the pod, even if a call fails.
            for held in batches.values().flatten() {
                self.hold(pod, held.clone());
            }
        }
        let mut ready = Vec::new();
        for (driver, claims) in batches {
            let (prepared, failure) = self.prepare(driver, claims).await.map_err(later)?;
            match self.client.server.mode() {
                // Claims without an error count as prepared, even if others failed.
                Mode::Classic => {
                    for held in prepared {
                        self.hold(pod, held);
                    }
                }
                // No claim counts as prepared before all are.
                Mode::Structured => ready.extend(prepared),
            }
            if let Some(failure) = failure {
                return Err(later(failure));
            }
        }
        for held in ready {
            self.hold(pod, held);
        }
        let prepared = used.into_iter().filter_map(|(entry, held)| {
            let held = self.prepared(&held.driver, &held.uid)?;
            Some((entry, held))
        });
        Ok(Prepared(prepared.collect()))
    }

    /// Returns the claims that the pod's containers use, once per driver and entry.
    fn classic_claims(&self, pod: &Value) -> Result<Vec<(String, Held)>, String> {
        let mut used = Vec::new();
        for (entry, claim) in claims_of(&self.client, pod) {
            let claim = claim.ok_or_else(|| format!("the resource claim of entry {entry} does not exist"))?;
            if !is_reserved_for(&claim, pod) {
                let name = object::name(&claim);
                return Err(format!("resource claim {name} is not reserved for the pod"));
            }
            if !is_used(pod, &entry) {
                continue;
            }
            for handle in list(&claim, "/status/allocation/resourceHandles") {
                let mut held = held(text(handle, "/driverName"), &claim);
                text(handle, "/data").clone_into(&mut held.handle);
                used.push((entry.clone(), held));
            }
        }
        Ok(used)
    }

    /// Returns the claims of the pod, once per driver and entry. All their drivers must be registered.
    fn structured_claims(&self, pod: &Value) -> Result<Vec<(String, Held)>, String> {
        let mut used = Vec::new();
        for (entry, claim) in claims_of(&self.client, pod) {
            let claim = claim.ok_or_else(|| format!("the ResourceClaim of entry {entry} does not exist"))?;
            let (name, uid) = (object::name(&claim), object::uid(&claim));
            if !is_reserved_for(&claim, pod) {
                return Err(format!(
                    "pod {} ({}) is not allowed to use ResourceClaim {name} ({uid})",
                    object::name(pod),
                    object::uid(pod)
                ));
            }
            if claim.pointer("/status/allocation").is_none() {
                return Err(format!("ResourceClaim {name}: not allocated"));
            }
            let results = list(&claim, "/status/allocation/devices/results");
            let drivers: BTreeSet<&str> = results.iter().map(|result| text(result, "/driver")).collect();
            for driver in drivers {
                self.plugin(driver)?;
                used.push((entry.clone(), held(driver, &claim)));
            }
        }
        Ok(used)
    }

    /// Calls NodePrepareResources. Returns the prepared claims, and the first failure of a claim.
    async fn prepare(&self, driver: &str, claims: Vec<Held>) -> Result<(Vec<Held>, Option<String>), String> {
        let plugin = self.plugin(driver)?;
        let answers = match plugin.api {
            DraApi::V1alpha3 => self.prepare_v1alpha3(&plugin, &claims).await,
            DraApi::V1 | DraApi::V1beta1 => self.prepare_v1(&plugin, &claims).await,
        };
        let mut answers = answers.map_err(|error| format!("NodePrepareResources failed: {error}"))?;
        let mut failure = None;
        let mut ready = Vec::new();
        let mut left_out = 0;
        for mut claim in claims {
            match answers.remove(&claim.uid) {
                None => left_out += 1,
                Some(Ok(devices)) => {
                    claim.prepared = true;
                    claim.devices = devices;
                    ready.push(claim);
                }
                Some(Err(error)) => {
                    failure.get_or_insert_with(|| {
                        let Held { namespace, name, .. } = &claim;
                        format!("NodePrepareResources failed for claim {namespace}/{name}: {error}")
                    });
                }
            }
        }
        if left_out > 0 {
            failure.get_or_insert_with(|| format!("NodePrepareResources left out {left_out} claims"));
        }
        Ok((ready, failure))
    }

    async fn prepare_v1alpha3(&self, plugin: &Plugin, claims: &[Held]) -> Result<Answers, CallError> {
        let request = dra_v1alpha3::NodePrepareResourcesRequest {
            claims: claims.iter().map(claim_v1alpha3).collect(),
        };
        let method = plugin.api.method("NodePrepareResources");
        let answer: dra_v1alpha3::NodePrepareResourcesResponse = self
            .calls
            .call(&plugin.endpoint, &method, &request, PREPARE)
            .await?;
        let entries = answer.claims.into_iter().map(|entry| {
            let value = entry.value.unwrap_or_default();
            let device = Device {
                ids: value.cdi_devices,
                ..Device::default()
            };
            (entry.key, or_error(vec![device], value.error))
        });
        Ok(entries.collect())
    }

    async fn prepare_v1(&self, plugin: &Plugin, claims: &[Held]) -> Result<Answers, CallError> {
        let request = dra_v1::NodePrepareResourcesRequest {
            claims: claims.iter().map(claim_v1).collect(),
        };
        let method = plugin.api.method("NodePrepareResources");
        let answer: dra_v1::NodePrepareResourcesResponse = self
            .calls
            .call(&plugin.endpoint, &method, &request, PREPARE)
            .await?;
        let entries = answer.claims.into_iter().map(|entry| {
            let value = entry.value.unwrap_or_default();
            let devices = value.devices.into_iter().map(|device| Device {
                requests: device.request_names,
                ids: device.cdi_device_ids,
            });
            (entry.key, or_error(devices.collect(), value.error))
        });
        Ok(entries.collect())
    }

    /// Unprepares the claims that no other pod uses. Returns whether all calls succeeded.
    pub(super) async fn release(&self, uid: &str) -> bool {
        let mut batches: BTreeMap<String, Vec<Held>> = BTreeMap::new();
        {
            let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(mine) = running.get(uid) else {
                return true;
            };
            let others: BTreeSet<&str> = running
                .iter()
                .filter(|(other, _)| *other != uid)
                .flat_map(|(_, running)| running.claims.iter().map(|held| held.uid.as_str()))
                .collect();
            for held in &mine.claims {
                if !others.contains(held.uid.as_str()) {
                    let batch = batches.entry(held.driver.clone()).or_default();
                    batch.push(held.clone());
                }
            }
        }
        for (driver, claims) in batches {
            if !self.unprepare(uid, &driver, claims).await {
                return false;
            }
        }
        self.running
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(uid);
        true
    }

    /// Calls NodeUnprepareResources for a pod's claims. Returns whether all succeeded; successful ones are not
    /// repeated.
    async fn unprepare(&self, uid: &str, driver: &str, claims: Vec<Held>) -> bool {
        let Ok(plugin) = self.plugin(driver) else {
            return false;
        };
        let Ok(done) = self.unprepared(&plugin, &claims).await else {
            return false;
        };
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(mine) = running.get_mut(uid) {
            mine.claims
                .retain(|held| held.driver != driver || !done.contains(&held.uid));
        }
        claims.iter().all(|claim| done.contains(&claim.uid))
    }

    /// Returns the uids of the claims that a plugin has unprepared.
    async fn unprepared(&self, plugin: &Plugin, claims: &[Held]) -> Result<BTreeSet<String>, CallError> {
        let method = plugin.api.method("NodeUnprepareResources");
        if plugin.api == DraApi::V1alpha3 {
            let request = dra_v1alpha3::NodeUnprepareResourcesRequest {
                claims: claims.iter().map(claim_v1alpha3).collect(),
            };
            let answer: dra_v1alpha3::NodeUnprepareResourcesResponse = self
                .calls
                .call(&plugin.endpoint, &method, &request, PREPARE)
                .await?;
            let done = answer
                .claims
                .into_iter()
                .filter(|each| each.value.as_ref().is_none_or(|value| value.error.is_empty()));
            return Ok(done.map(|each| each.key).collect());
        }
        let request = dra_v1::NodeUnprepareResourcesRequest {
            claims: claims.iter().map(claim_v1).collect(),
        };
        let answer: dra_v1::NodeUnprepareResourcesResponse = self
            .calls
            .call(&plugin.endpoint, &method, &request, PREPARE)
            .await?;
        let done = answer
            .claims
            .into_iter()
            .filter(|each| each.value.as_ref().is_none_or(|value| value.error.is_empty()));
        Ok(done.map(|each| each.key).collect())
    }
}

fn held(driver: &str, claim: &Value) -> Held {
    Held {
        driver: driver.to_owned(),
        namespace: object::namespace(claim).to_owned(),
        name: object::name(claim).to_owned(),
        uid: object::uid(claim).to_owned(),
        handle: String::new(),
        prepared: false,
        devices: Vec::new(),
    }
}

fn claim_v1alpha3(held: &Held) -> dra_v1alpha3::Claim {
    dra_v1alpha3::Claim {
        namespace: held.namespace.clone(),
        uid: held.uid.clone(),
        name: held.name.clone(),
        resource_handle: held.handle.clone(),
        ..dra_v1alpha3::Claim::default()
    }
}

fn claim_v1(held: &Held) -> dra_v1::Claim {
    dra_v1::Claim {
        namespace: held.namespace.clone(),
        uid: held.uid.clone(),
        name: held.name.clone(),
    }
}

fn or_error(devices: Vec<Device>, error: String) -> Result<Vec<Device>, String> {
    if error.is_empty() { Ok(devices) } else { Err(error) }
}

/// Returns whether a container uses the entry; unused entries are not prepared in classic mode.
fn is_used(pod: &Value, entry: &str) -> bool {
    let containers = list(pod, "/spec/initContainers")
        .iter()
        .chain(list(pod, "/spec/containers"));
    let mut named = containers.flat_map(|container| list(container, "/resources/claims"));
    named.any(|claim| claim["name"] == entry)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_gets_the_devices_of_the_requests_it_names() {
        let device = |requests: &[&str], id: &str| Device {
            requests: requests.iter().map(|request| (*request).to_owned()).collect(),
            ids: vec![id.to_owned()],
        };
        let devices = vec![
            device(&["camera"], "camera-1"),
            device(&["lens", "either/lens"], "lens-1"),
            device(&[], "all-1"),
        ];
        let held = Held {
            devices,
            ..held("x.dev", &Value::Null)
        };
        let prepared = Prepared(vec![("entry".to_owned(), held)]);
        let ids = |entry: &str, request: &str| {
            let ids: Vec<&String> = prepared.ids(entry, request).collect();
            ids.into_iter().cloned().collect::<Vec<_>>().join(" ")
        };
        assert_eq!(ids("entry", "camera"), "camera-1 all-1");
        assert_eq!(ids("entry", "either/lens"), "lens-1 all-1");
        assert_eq!(ids("entry", ""), "camera-1 lens-1 all-1");
        assert_eq!(ids("other", ""), "");
    }
}
