//! Allocation of claims by the scheduler: the plugin `dynamicresources` of 1.37.

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{AllocationResult, DeviceClass, ResourceClaim, ResourceSlice};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::{Wait, assign, selects, suitable};
use crate::core::structured::{ClusterState, DeviceHoldings, allocate as allocate_claims};
use crate::host::selectors::with_selectors;
use crate::testcluster::api::object::{self, list, text};
use crate::testcluster::api::structured::FINALIZER;
use crate::testcluster::claims::{consumer, may_reserve, versioned};
use crate::testcluster::client::{ApiClient, is_reserved_for};

/// Allocates and reserves the claims of a pod on a node, and binds the pod. If no node fits, deallocates a claim that no
/// other pod uses.
pub(super) fn allocate(client: &ApiClient, pod: &Value, claims: Vec<Value>) -> Result<(), Wait> {
    for claim in &claims {
        if is_allocated(claim) {
            if !may_reserve(client, claim) && !is_reserved_for(claim, pod) {
                return Err(Wait::Unschedulable("resourceclaim in use".to_owned()));
            }
        } else if let Some(message) = missing_class(client, claim) {
            return Err(Wait::Unschedulable(message));
        }
    }
    let devices = Devices::read(client, &claims).map_err(Wait::Unschedulable)?;
    let mut unavailable: Vec<&Value> = Vec::new();
    let passing = suitable(client, pod, |node| {
        let elsewhere = claims.iter().filter(|claim| !reaches(claim, node));
        let elsewhere: Vec<&Value> = elsewhere.collect();
        if !elsewhere.is_empty() {
            unavailable.extend(elsewhere);
            return Err("resourceclaim not available on the node".to_owned());
        }
        devices.allocate(client, node)
    });
    match passing {
        Ok(passing) => {
            let Some((node, allocations)) = passing.into_iter().next() else {
                return Err(Wait::Pending);
            };
            bind(client, pod, claims, allocations, &node)
        }
        Err(message) => {
            // PostFilter.
            let unused = |claim: &&Value| {
                list(claim, "/status/reservedFor")
                    .iter()
                    .all(|consumer| consumer["uid"] == pod["metadata"]["uid"])
            };
            if let Some(claim) = unavailable.into_iter().find(unused) {
                let status =
                    json!({ "status": { "allocation": null, "reservedFor": null, "devices": null } });
                // A conflict means a concurrent change, which triggers another cycle.
                let _ = client.merge("resourceclaims", claim, "status", versioned(claim, status));
            }
            Err(Wait::Unschedulable(message))
        }
    }
}

fn is_allocated(claim: &Value) -> bool {
    claim.pointer("/status/allocation").is_some()
}

fn missing_class(client: &ApiClient, claim: &Value) -> Option<String> {
    list(claim, "/spec/devices/requests").iter().find_map(|request| {
        let exactly = request.get("exactly").into_iter();
        let mut requests = exactly.chain(list(request, "/firstAvailable"));
        requests.find_map(|one| {
            let class = text(one, "/deviceClassName");
            let name = match text(one, "/name") {
                "" => text(request, "/name").to_owned(),
                alternative => format!("{}/{alternative}", text(request, "/name")),
            };
            let exists = client.get("deviceclasses", "", class).is_some();
            (!exists).then(|| format!("request {name}: device class {class} does not exist"))
        })
    })
}

/// Returns whether the allocation of a claim, if any, is available on a node.
fn reaches(claim: &Value, node: &Value) -> bool {
    claim
        .pointer("/status/allocation/nodeSelector")
        .is_none_or(|selector| selects(selector, node))
}

/// The objects that decide the allocation of a pod's claims.
struct Devices {
    slices: Vec<ResourceSlice>,
    classes: Vec<DeviceClass>,
    /// All claims of the cluster.
    claims: Vec<ResourceClaim>,
    /// The unallocated claims of the pod.
    wanted: Vec<ResourceClaim>,
}

impl Devices {
    fn read(client: &ApiClient, claims: &[Value]) -> Result<Self, String> {
        let wanted = claims.iter().filter(|claim| !is_allocated(claim));
        Ok(Self {
            slices: typed(client.list("resourceslices"))?,
            classes: typed(client.list("deviceclasses"))?,
            claims: typed(client.list("resourceclaims"))?,
            wanted: typed(wanted.cloned())?,
        })
    }

    /// Allocates the claims on a node.
    fn allocate(&self, client: &ApiClient, node: &Value) -> Result<Vec<AllocationResult>, String> {
        if self.wanted.is_empty() {
            return Ok(Vec::new());
        }
        let node: Node = serde_json::from_value(node.clone()).map_err(|error| error.to_string())?;
        let holdings = DeviceHoldings::read(&self.claims);
        let cluster = ClusterState {
            slices: &self.slices,
            classes: &self.classes,
            holdings: &holdings,
        };
        let wanted: Vec<&ResourceClaim> = self.wanted.iter().collect();
        let allocated = with_selectors(|selectors| {
            allocate_claims(
                cluster,
                &node,
                &wanted,
                &mut |expression, driver, device| selectors.evaluate(expression, driver, device),
                &mut || client.server.source.uid(),
            )
        })?;
        allocated.map_err(|refusal| refusal.to_string())
    }
}

fn typed<T: DeserializeOwned>(objects: impl IntoIterator<Item = Value>) -> Result<Vec<T>, String> {
    objects
        .into_iter()
        .map(|object| serde_json::from_value(object).map_err(|error| error.to_string()))
        .collect()
}

/// Writes the allocation and the reservation of each claim in one request, and binds the pod.
fn bind(
    client: &ApiClient,
    pod: &Value,
    claims: Vec<Value>,
    allocations: Vec<AllocationResult>,
    node: &str,
) -> Result<(), Wait> {
    let mut allocations = allocations.into_iter();
    for mut claim in claims {
        let mut status = json!({});
        if !is_allocated(&claim) {
            let mut finalizers = object::texts(&claim, "/metadata/finalizers");
            if !finalizers.contains(&FINALIZER) {
                finalizers.push(FINALIZER);
                let patch = versioned(&claim, json!({ "metadata": { "finalizers": finalizers } }));
                claim = client
                    .merge("resourceclaims", &claim, "", patch)
                    .map_err(|_| Wait::Pending)?;
            }
            let allocation = allocations.next().ok_or(Wait::Pending)?;
            status["allocation"] = serde_json::to_value(allocation).map_err(|_| Wait::Pending)?;
            status["allocation"]["allocationTimestamp"] = client.server.now().into();
        }
        if !is_reserved_for(&claim, pod) {
            let mut consumers = list(&claim, "/status/reservedFor").to_vec();
            consumers.push(consumer(pod));
            status["reservedFor"] = consumers.into();
        }
        if status != json!({}) {
            let patch = versioned(&claim, json!({ "status": status }));
            // A conflict means a concurrent change, which triggers another cycle.
            client
                .merge("resourceclaims", &claim, "status", patch)
                .map_err(|_| Wait::Pending)?;
        }
    }
    assign(client, pod, node)
}
