//! A driver for network-attached devices: licence dongles, capture boxes, storage heads that several nodes can reach.
//!
//! A class names a pool by a ConfigMap (`nodes`: who can reach it, by name, separated by spaces; `devices`: how many there are):
//!
//! ```yaml
//! apiVersion: resource.k8s.io/v1alpha2
//! kind: ResourceClass
//! metadata: { name: dongle }
//! driverName: network.example.com
//! parametersRef: { kind: ConfigMap, namespace: default, name: dongles }
//! ```
//!
//! Run it with `cargo run --example network_attached`; the kubeconfig is found as kubectl finds it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

use drayman::api::resource::{AllocationResult, Pod, ResourceClaim, ResourceClass, ResourceHandle};
use drayman::controller::Controller;
use drayman::driver::{
    CapacityCause, CapacityChange, ClaimRequest, Deallocation, Driver, DriverError, Observation, Verdict,
};
use futures::{Stream, StreamExt as _};
use k8s_openapi::api::core::v1::{ConfigMap, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm};
use kube::api::Api;
use tokio::sync::watch;
use tokio_stream::wrappers::WatchStream;
use tokio_util::sync::CancellationToken;

/// A pool of equal devices that some nodes can reach.
#[derive(Clone, Debug)]
struct Pool {
    name: String,
    nodes: BTreeSet<String>,
    devices: usize,
}

/// A device that a claim holds.
struct Held {
    pool: String,
    /// Whether the claim says so already.
    recorded: bool,
}

/// The driver: which claim holds a device of which pool. The claims are the only record; [`Driver::observe`] rebuilds it.
struct NetworkAttached {
    client: kube::Client,
    held: Mutex<BTreeMap<String, Held>>,
    freed: watch::Sender<usize>,
}

impl NetworkAttached {
    fn new(client: kube::Client) -> Self {
        Self {
            client,
            held: Mutex::default(),
            freed: watch::Sender::new(0),
        }
    }

    fn books(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Held>> {
        self.held
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn free(&self, uid: &str) {
        if self.books().remove(uid).is_some() {
            self.freed.send_modify(|count| *count += 1);
        }
    }
}

impl Driver for NetworkAttached {
    type ClassParameters = Pool;
    type ClaimParameters = ();

    fn name(&self) -> &'static str {
        "network.example.com"
    }

    async fn class_parameters(&self, class: &ResourceClass) -> Result<Pool, DriverError> {
        let invalid = |message: String| DriverError::invalid("ParametersInvalid", message);
        let (namespace, name) = class
            .parameters_ref
            .as_ref()
            .filter(|reference| reference.kind == "ConfigMap")
            .and_then(|reference| Some((reference.namespace.as_ref()?, &reference.name)))
            .ok_or_else(|| invalid("parametersRef must name a ConfigMap and its namespace".to_owned()))?;
        let map = Api::<ConfigMap>::namespaced(self.client.clone(), namespace)
            .get_opt(name)
            .await
            .map_err(|error| DriverError::retry("ParametersUnreadable", error.to_string()))?
            .ok_or_else(|| invalid(format!("ConfigMap {namespace}/{name} does not exist: create it")))?;
        let data = map.data.unwrap_or_default();
        let devices = data
            .get("devices")
            .and_then(|text| text.parse().ok())
            .ok_or_else(|| {
                invalid(format!(
                    "ConfigMap {namespace}/{name}: \"devices\" must be a whole number"
                ))
            })?;
        let nodes = data
            .get("nodes")
            .map(|text| text.split_whitespace().map(str::to_owned).collect());
        Ok(Pool {
            name: format!("{namespace}/{name}"),
            nodes: nodes.unwrap_or_default(),
            devices,
        })
    }

    async fn claim_parameters(
        &self,
        _: &ResourceClaim,
        _: &ResourceClass,
        _: &Pool,
    ) -> Result<(), DriverError> {
        Ok(())
    }

    async fn unsuitable_nodes(
        &self,
        _: &Pod,
        claims: &[ClaimRequest<Self>],
        nodes: &[String],
    ) -> Result<Vec<Verdict>, DriverError> {
        let held = self.books();
        let mut wanted: BTreeMap<&str, usize> = BTreeMap::new();
        let verdicts = claims.iter().map(|request| {
            let pool = &request.class_parameters;
            let used = held.values().filter(|held| held.pool == pool.name).count();
            let wanted = wanted.entry(&pool.name).or_default();
            *wanted += 1;
            let full = used + *wanted > pool.devices;
            let unsuitable_nodes = nodes
                .iter()
                .filter_map(|node| {
                    let reason = if !pool.nodes.contains(node) {
                        format!("pool {} is not reached from here", pool.name)
                    } else if full {
                        format!("{used} of {} held", pool.devices)
                    } else {
                        return None;
                    };
                    Some((node.clone(), reason))
                })
                .collect();
            Verdict { unsuitable_nodes }
        });
        Ok(verdicts.collect())
    }

    async fn allocate(
        &self,
        claims: &[ClaimRequest<Self>],
        _: Option<&str>,
    ) -> Result<Vec<Result<AllocationResult, DriverError>>, DriverError> {
        let mut held = self.books();
        let results = claims.iter().map(|request| {
            let pool = &request.class_parameters;
            let uid = request.claim.metadata.uid.clone().unwrap_or_default();
            let used = held.values().filter(|held| held.pool == pool.name).count();
            if !held.contains_key(&uid) && used >= pool.devices {
                let message = format!("pool {}: {used} of {} held", pool.name, pool.devices);
                return Err(DriverError::retry("NoSuitableDevice", message));
            }
            held.entry(uid).or_insert_with(|| Held {
                pool: pool.name.clone(),
                recorded: false,
            });
            Ok(pool.allocation(self.name()))
        });
        Ok(results.collect())
    }

    async fn deallocate(&self, deallocation: Deallocation<'_>) -> Result<(), DriverError> {
        // What is recorded is freed when it is seen to be gone.
        if deallocation.claim.status.allocation.is_none() {
            self.free(deallocation.claim.metadata.uid.as_deref().unwrap_or_default());
        }
        Ok(())
    }

    fn observe(&self, observation: &Observation) {
        let holdings = match observation {
            Observation::All(holdings) => holdings.as_slice(),
            Observation::Changed(holding) => std::slice::from_ref(holding),
            Observation::Gone { uid } => return self.free(uid),
        };
        for holding in holdings {
            let uid = holding.uid();
            match holding
                .allocation(self.name())
                .and_then(|allocation| allocation.resource_handles.first())
            {
                Some(handle) => {
                    let pool = handle.data.clone().unwrap_or_default();
                    self.books().insert(uid.to_owned(), Held { pool, recorded: true });
                }
                // What was never recorded is given back by deallocate; this was, and is not any more.
                None if self.books().get(uid).is_some_and(|held| held.recorded) => self.free(uid),
                None => {}
            }
        }
    }

    fn capacity_changes(&self) -> impl Stream<Item = CapacityChange> + Send + 'static {
        let change = |_| CapacityChange {
            cause: CapacityCause::Freed,
            pods: None,
        };
        WatchStream::from_changes(self.freed.subscribe()).map(change)
    }
}

impl Pool {
    fn allocation(&self, driver_name: &str) -> AllocationResult {
        // One term per node: the API server takes one name per field selector.
        let reached = |node: &String| NodeSelectorTerm {
            match_fields: Some(vec![NodeSelectorRequirement {
                key: "metadata.name".to_owned(),
                operator: "In".to_owned(),
                values: Some(vec![node.clone()]),
            }]),
            ..NodeSelectorTerm::default()
        };
        AllocationResult {
            resource_handles: vec![ResourceHandle {
                driver_name: Some(driver_name.to_owned()),
                data: Some(self.name.clone()),
                structured_data: None,
            }],
            available_on_nodes: Some(NodeSelector {
                node_selector_terms: self.nodes.iter().map(reached).collect(),
            }),
            shareable: false,
        }
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    tracing_subscriber::fmt().init();
    // Whichever providers other crates bring along, this is the one.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = kube::Client::try_default().await?;
    let shutdown = CancellationToken::new();
    let controller = Controller::builder(NetworkAttached::new(client.clone())).build(client)?;
    let stop = shutdown.clone();
    tokio::spawn(async move { tokio::signal::ctrl_c().await.map(|()| stop.cancel()) });
    Ok(controller.run(shutdown).await?)
}
