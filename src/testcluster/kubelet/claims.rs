//! Prepares and unprepares claims like kubelet 1.30 (`pkg/kubelet/cm/dra/manager.go`): one call per driver for all
//! unprepared claims of a pod, and one for all claims that no other pod uses.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::PoisonError;
use std::time::Duration;

use serde_json::Value;

use super::Kubelet;
use super::containers::Trouble;
use super::wire::CallError;
use crate::api::proto::dra_v1alpha3::{
    Claim, NodePrepareResourcesRequest, NodePrepareResourcesResponse, NodeUnprepareResourcesRequest,
    NodeUnprepareResourcesResponse,
};
use crate::testcluster::api::object::{self, list, text};
use crate::testcluster::hand::{claims_of, is_reserved_for};

/// Deadline of a DRA call.
const PREPARE: Duration = Duration::from_secs(45);
/// Event reason.
const REASON: &str = "FailedPrepareDynamicResources";

/// A claim that a driver has prepared for a pod.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    driver: String,
    claim: Claim,
    /// CDI device ids.
    ids: Vec<String>,
}

fn later(message: String) -> Trouble {
    Trouble::Later(REASON, message)
}

impl Kubelet {
    fn driver(&self, name: &str) -> Result<PathBuf, String> {
        self.registry
            .with(|plugins| plugins.drivers.get(name).cloned())
            .ok_or_else(|| format!("plugin name {name} not found in the list of registered DRA plugins"))
    }

    /// Returns a prepared claim of a driver, for any pod.
    fn prepared(&self, driver: &str, uid: &str) -> Option<Held> {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let mut held = running.values().flat_map(|running| &running.claims);
        held.find(|held| held.driver == driver && held.claim.uid == uid)
            .cloned()
    }

    /// Records that a pod uses a prepared claim.
    fn hold(&self, pod: &Value, new: Held) {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let held = &mut running.entry(object::uid(pod).to_owned()).or_default().claims;
        if !held
            .iter()
            .any(|held| held.driver == new.driver && held.claim.uid == new.claim.uid)
        {
            held.push(new);
        }
    }

    /// Prepares the pod's claims. Returns the CDI device ids by entry of the pod.
    pub(super) async fn prepare_claims(&self, pod: &Value) -> Result<BTreeMap<String, Vec<String>>, Trouble> {
        let mut batches: BTreeMap<String, Vec<Claim>> = BTreeMap::new();
        let mut entries: Vec<(String, String, String)> = Vec::new();
        for (entry, claim) in claims_of(&self.hand, pod) {
            let claim =
                claim.ok_or_else(|| later(format!("the resource claim of entry {entry} does not exist")))?;
            let name = object::name(&claim).to_owned();
            if !is_reserved_for(&claim, pod) {
                return Err(later(format!(
                    "resource claim {name} is not reserved for the pod"
                )));
            }
            if !is_used(pod, &entry) {
                continue;
            }
            for handle in list(&claim, "/status/allocation/resourceHandles") {
                let driver = text(handle, "/driverName").to_owned();
                let uid = object::uid(&claim).to_owned();
                entries.push((entry.clone(), driver.clone(), uid.clone()));
                if let Some(held) = self.prepared(&driver, &uid) {
                    self.hold(pod, held);
                    continue;
                }
                batches.entry(driver).or_default().push(Claim {
                    namespace: object::namespace(&claim).to_owned(),
                    uid,
                    name: name.clone(),
                    resource_handle: text(handle, "/data").to_owned(),
                    ..Claim::default()
                });
            }
        }
        for (driver, claims) in batches {
            self.prepare(pod, &driver, claims).await.map_err(later)?;
        }
        let mut ids: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (entry, driver, uid) in entries {
            let held = self.prepared(&driver, &uid);
            let of_entry = ids.entry(entry).or_default();
            of_entry.extend(held.into_iter().flat_map(|held| held.ids));
        }
        Ok(ids)
    }

    /// Calls NodePrepareResources. Claims without an error count as prepared, even if others failed.
    async fn prepare(&self, pod: &Value, driver: &str, claims: Vec<Claim>) -> Result<(), String> {
        let socket = self.driver(driver)?;
        let answer: Result<NodePrepareResourcesResponse, CallError> = self
            .calls
            .call(
                &socket,
                "/v1alpha3.Node/NodePrepareResources",
                &NodePrepareResourcesRequest {
                    claims: claims.clone(),
                },
                PREPARE,
            )
            .await;
        let answer = answer.map_err(|error| format!("NodePrepareResources failed: {error}"))?;
        let mut trouble = None;
        let mut left_out = 0;
        for claim in claims {
            let Some(result) = answer.claims.iter().find(|each| each.key == claim.uid) else {
                left_out += 1;
                continue;
            };
            let result = result.value.clone().unwrap_or_default();
            if result.error.is_empty() {
                let held = Held {
                    driver: driver.to_owned(),
                    claim,
                    ids: result.cdi_devices,
                };
                self.hold(pod, held);
            } else {
                trouble.get_or_insert_with(|| {
                    format!(
                        "NodePrepareResources failed for claim {}/{}: {}",
                        claim.namespace, claim.name, result.error
                    )
                });
            }
        }
        match trouble {
            Some(trouble) => Err(trouble),
            None if left_out > 0 => Err(format!("NodePrepareResources left out {left_out} claims")),
            None => Ok(()),
        }
    }

    /// Unprepares the claims that no other pod uses. Returns whether all calls succeeded.
    pub(super) async fn release(&self, uid: &str) -> bool {
        let mut batches: BTreeMap<String, Vec<Claim>> = BTreeMap::new();
        {
            let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(mine) = running.get(uid) else {
                return true;
            };
            let others: BTreeSet<&str> = running
                .iter()
                .filter(|(other, _)| *other != uid)
                .flat_map(|(_, running)| running.claims.iter().map(|held| held.claim.uid.as_str()))
                .collect();
            for held in &mine.claims {
                if !others.contains(held.claim.uid.as_str()) {
                    let batch = batches.entry(held.driver.clone()).or_default();
                    batch.push(held.claim.clone());
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
    async fn unprepare(&self, uid: &str, driver: &str, claims: Vec<Claim>) -> bool {
        let Ok(socket) = self.driver(driver) else {
            return false;
        };
        let answer: Result<NodeUnprepareResourcesResponse, CallError> = self
            .calls
            .call(
                &socket,
                "/v1alpha3.Node/NodeUnprepareResources",
                &NodeUnprepareResourcesRequest {
                    claims: claims.clone(),
                },
                PREPARE,
            )
            .await;
        let Ok(answer) = answer else { return false };
        let done: BTreeSet<&str> = answer
            .claims
            .iter()
            .filter(|each| each.value.as_ref().is_none_or(|value| value.error.is_empty()))
            .map(|each| each.key.as_str())
            .collect();
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(mine) = running.get_mut(uid) {
            mine.claims
                .retain(|held| held.driver != driver || !done.contains(held.claim.uid.as_str()));
        }
        claims.iter().all(|claim| done.contains(claim.uid.as_str()))
    }
}

/// Returns whether a container uses the entry; unused entries are not prepared.
fn is_used(pod: &Value, entry: &str) -> bool {
    let containers = list(pod, "/spec/initContainers")
        .iter()
        .chain(list(pod, "/spec/containers"));
    let mut named = containers.flat_map(|container| list(container, "/resources/claims"));
    named.any(|claim| claim["name"] == entry)
}
