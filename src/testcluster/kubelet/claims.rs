//! Prepares and unprepares claims like kubelet (`pkg/kubelet/cm/dra/manager.go`): one call per driver for all claims of a
//! pod, and one for all claims that no other pod uses.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prost::Message;
use serde_json::Value;

use super::grpc_client::{GrpcClient, GrpcError};
use super::plugins::{Plugin, Registry};
use crate::api::proto::{dra_v1, dra_v1alpha3};
use crate::testcluster::api::ClusterMode;
use crate::testcluster::api::object::{self, list, text};
use crate::testcluster::claim_records::ClaimRecords;
use crate::testcluster::client::{ApiClient, claims_of, is_reserved_for};

/// Deadline of a DRA call.
const PREPARE: Duration = Duration::from_secs(45);

/// A claim that a pod uses on this node, with one driver.
#[derive(Clone, Debug)]
pub(crate) struct ClaimInfo {
    driver: String,
    namespace: String,
    name: String,
    uid: String,
    /// The driver's resource handle, in classic mode.
    handle: String,
    devices: Vec<PreparedDevice>,
}

/// The driver and the uid of a claim.
type Key = (String, String);

impl ClaimInfo {
    fn key(&self) -> Key {
        (self.driver.clone(), self.uid.clone())
    }
}

/// Devices of a prepared claim.
#[derive(Clone, Debug, Default)]
struct PreparedDevice {
    /// The requests of the claim; empty for all.
    requests: Vec<String>,
    /// CDI device ids.
    ids: Vec<String>,
}

/// The claims of a pod, by the pod's entry.
pub(super) struct PodClaims(Vec<(String, ClaimInfo)>);

impl PodClaims {
    /// Returns the CDI device ids of a claim's request, or of all its requests if `request` is empty.
    pub(super) fn ids<'a>(&'a self, entry: &'a str, request: &'a str) -> impl Iterator<Item = &'a String> {
        let of_entry = self.0.iter().filter(move |(name, _)| name == entry);
        let devices = of_entry.flat_map(|(_, claim)| &claim.devices);
        let named = devices.filter(move |device| {
            request.is_empty()
                || device.requests.is_empty()
                || device.requests.iter().any(|name| name == request)
        });
        named.flat_map(|device| &device.ids)
    }
}

/// The devices of each prepared claim by its uid, or an error.
type Answers = BTreeMap<String, Result<Vec<PreparedDevice>, String>>;

/// Kubelet's record of the claims that pods use, and its calls to their drivers. Clones share the record.
#[derive(Clone, Debug)]
pub(crate) struct ClaimManager {
    client: ApiClient,
    registry: Registry,
    grpc: GrpcClient,
    records: Arc<Mutex<ClaimRecords<Key, ClaimInfo>>>,
}

impl ClaimManager {
    pub(super) fn new(client: ApiClient, registry: Registry, grpc: GrpcClient) -> Self {
        Self {
            client,
            registry,
            grpc,
            records: Arc::default(),
        }
    }

    /// Returns the uids of the pods with claims.
    pub(super) fn pods(&self) -> Vec<String> {
        let records = self.records();
        let pods: BTreeSet<&String> = records.iter().flat_map(|(_, record)| &record.pods).collect();
        pods.into_iter().cloned().collect()
    }

    fn records(&self) -> MutexGuard<'_, ClaimRecords<Key, ClaimInfo>> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn plugin(&self, driver: &str) -> Result<Plugin, String> {
        self.registry
            .with(|plugins| plugins.driver(driver).cloned())
            .ok_or_else(|| match self.client.server.mode() {
                ClusterMode::Classic => {
                    format!("plugin name {driver} not found in the list of registered DRA plugins")
                }
                ClusterMode::Structured => format!("DRA driver {driver} is not registered"),
            })
    }

    /// Records that a claim of a pod is prepared.
    fn record(&self, pod: &str, claim: ClaimInfo) {
        let (mut records, key) = (self.records(), claim.key());
        records.add(key.clone(), claim.clone(), pod);
        if let Some(known) = records.set_prepared(&key) {
            *known = claim;
        }
    }

    /// Prepares the pod's claims.
    pub(super) async fn prepare_claims(&self, pod: &Value) -> Result<PodClaims, String> {
        let used = match self.client.server.mode() {
            ClusterMode::Classic => self.classic_claims(pod),
            ClusterMode::Structured => self.structured_claims(pod),
        }?;
        let pod = object::uid(pod);
        let mut batches: BTreeMap<&str, Vec<ClaimInfo>> = BTreeMap::new();
        for (_, claim) in &used {
            if !self.records().share(&claim.key(), pod) {
                let batch = batches.entry(&claim.driver).or_default();
                if batch.iter().all(|other| other.uid != claim.uid) {
                    batch.push(claim.clone());
                }
            }
        }
        if self.client.server.mode() == ClusterMode::Structured {
            // Unprepared at the end of the pod, even if a call fails.
            for claim in batches.values().flatten() {
                self.records().add(claim.key(), claim.clone(), pod);
            }
        }
        let mut ready = Vec::new();
        for (driver, claims) in batches {
            let (prepared, failure) = self.prepare(driver, claims).await?;
            match self.client.server.mode() {
                // Claims without an error count as prepared, even if others failed.
                ClusterMode::Classic => {
                    for claim in prepared {
                        self.record(pod, claim);
                    }
                }
                // No claim counts as prepared before all are.
                ClusterMode::Structured => ready.extend(prepared),
            }
            if let Some(failure) = failure {
                return Err(failure);
            }
        }
        for claim in ready {
            self.record(pod, claim);
        }
        let records = self.records();
        let prepared = used.into_iter().filter_map(|(entry, claim)| {
            let claim = records.prepared(&claim.key())?;
            Some((entry, claim.clone()))
        });
        Ok(PodClaims(prepared.collect()))
    }

    /// Returns the claims that the pod's containers use, once per driver and entry.
    fn classic_claims(&self, pod: &Value) -> Result<Vec<(String, ClaimInfo)>, String> {
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
                let mut info = claim_info(text(handle, "/driverName"), &claim);
                text(handle, "/data").clone_into(&mut info.handle);
                used.push((entry.clone(), info));
            }
        }
        Ok(used)
    }

    /// Returns the claims of the pod, once per driver and entry. All their drivers must be registered.
    fn structured_claims(&self, pod: &Value) -> Result<Vec<(String, ClaimInfo)>, String> {
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
                used.push((entry.clone(), claim_info(driver, &claim)));
            }
        }
        Ok(used)
    }

    /// Calls NodePrepareResources. Returns the prepared claims, and the first failure of a claim.
    async fn prepare(
        &self,
        driver: &str,
        claims: Vec<ClaimInfo>,
    ) -> Result<(Vec<ClaimInfo>, Option<String>), String> {
        let plugin = self.plugin(driver)?;
        let answers = self.call_prepare(&plugin, &claims).await;
        let mut answers = answers.map_err(|error| format!("NodePrepareResources failed: {error}"))?;
        let mut failure = None;
        let mut ready = Vec::new();
        let mut left_out = 0;
        for mut claim in claims {
            match answers.remove(&claim.uid) {
                None => left_out += 1,
                Some(Ok(devices)) => {
                    claim.devices = devices;
                    ready.push(claim);
                }
                Some(Err(error)) => {
                    failure.get_or_insert_with(|| {
                        let ClaimInfo { namespace, name, .. } = &claim;
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

    /// Sends claims to a plugin. The requests of both methods are the same in both versions of the API, except for the handle of v1alpha3.
    async fn call<A: Message + Default>(
        &self,
        plugin: &Plugin,
        method: &str,
        claims: &[ClaimInfo],
    ) -> Result<A, GrpcError> {
        let claims = claims.iter().map(|claim| dra_v1alpha3::Claim {
            namespace: claim.namespace.clone(),
            uid: claim.uid.clone(),
            name: claim.name.clone(),
            resource_handle: claim.handle.clone(),
            ..dra_v1alpha3::Claim::default()
        });
        let request = dra_v1alpha3::NodePrepareResourcesRequest {
            claims: claims.collect(),
        };
        let service = match self.client.server.mode() {
            ClusterMode::Classic => "v1alpha3.Node",
            ClusterMode::Structured => "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin",
        };
        let method = format!("/{service}/{method}");
        self.grpc.call(&plugin.endpoint, &method, &request, PREPARE).await
    }

    async fn call_prepare(&self, plugin: &Plugin, claims: &[ClaimInfo]) -> Result<Answers, GrpcError> {
        const METHOD: &str = "NodePrepareResources";
        if self.client.server.mode() == ClusterMode::Classic {
            let answer: dra_v1alpha3::NodePrepareResourcesResponse =
                self.call(plugin, METHOD, claims).await?;
            let entries = answer.claims.into_iter().map(|entry| {
                let value = entry.value.unwrap_or_default();
                let device = PreparedDevice {
                    ids: value.cdi_devices,
                    ..PreparedDevice::default()
                };
                (entry.key, or_error(vec![device], value.error))
            });
            return Ok(entries.collect());
        }
        let answer: dra_v1::NodePrepareResourcesResponse = self.call(plugin, METHOD, claims).await?;
        let entries = answer.claims.into_iter().map(|entry| {
            let value = entry.value.unwrap_or_default();
            let devices = value.devices.into_iter().map(|device| PreparedDevice {
                requests: device.request_names,
                ids: device.cdi_device_ids,
            });
            (entry.key, or_error(devices.collect(), value.error))
        });
        Ok(entries.collect())
    }

    /// Unprepares the claims that no other pod uses. Returns whether all calls succeeded.
    pub(super) async fn release(&self, uid: &str) -> bool {
        let mut batches: BTreeMap<String, Vec<ClaimInfo>> = BTreeMap::new();
        for (_, claim, _) in self.records().of_pod(uid).filter(|(.., last)| *last) {
            let batch = batches.entry(claim.driver.clone()).or_default();
            batch.push(claim.clone());
        }
        for (driver, claims) in batches {
            if !self.unprepare(uid, &driver, claims).await {
                return false;
            }
        }
        self.records().release_all(uid);
        true
    }

    /// Calls NodeUnprepareResources for a pod's claims. Returns whether all succeeded; successful ones are not
    /// repeated.
    async fn unprepare(&self, uid: &str, driver: &str, claims: Vec<ClaimInfo>) -> bool {
        let Ok(plugin) = self.plugin(driver) else {
            return false;
        };
        let Ok(done) = self.unprepared(&plugin, &claims).await else {
            return false;
        };
        let mut records = self.records();
        for claim in claims.iter().filter(|claim| done.contains(&claim.uid)) {
            records.release(&claim.key(), uid);
        }
        claims.iter().all(|claim| done.contains(&claim.uid))
    }

    /// Returns the uids of the claims that a plugin has unprepared.
    async fn unprepared(&self, plugin: &Plugin, claims: &[ClaimInfo]) -> Result<BTreeSet<String>, GrpcError> {
        // The answer is the same in both versions of the API.
        let answer: dra_v1::NodeUnprepareResourcesResponse =
            self.call(plugin, "NodeUnprepareResources", claims).await?;
        let done = answer
            .claims
            .into_iter()
            .filter(|each| each.value.as_ref().is_none_or(|value| value.error.is_empty()));
        Ok(done.map(|each| each.key).collect())
    }
}

fn claim_info(driver: &str, claim: &Value) -> ClaimInfo {
    ClaimInfo {
        driver: driver.to_owned(),
        namespace: object::namespace(claim).to_owned(),
        name: object::name(claim).to_owned(),
        uid: object::uid(claim).to_owned(),
        handle: String::new(),
        devices: Vec::new(),
    }
}

fn or_error(devices: Vec<PreparedDevice>, error: String) -> Result<Vec<PreparedDevice>, String> {
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
        let device = |requests: &[&str], id: &str| PreparedDevice {
            requests: requests.iter().map(|request| (*request).to_owned()).collect(),
            ids: vec![id.to_owned()],
        };
        let devices = vec![
            device(&["camera"], "camera-1"),
            device(&["lens", "either/lens"], "lens-1"),
            device(&[], "all-1"),
        ];
        let claim = ClaimInfo {
            devices,
            ..claim_info("x.dev", &Value::Null)
        };
        let prepared = PodClaims(vec![("entry".to_owned(), claim)]);
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
