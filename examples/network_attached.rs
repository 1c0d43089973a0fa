//! A driver for network-attached devices such as licence dongles and capture boxes, which several nodes can reach.
//!
//! A class references a ConfigMap that describes a pool: the nodes that can reach it, separated by spaces, and its number of devices.
//!
//! ```yaml
//! apiVersion: v1
//! kind: ConfigMap
//! metadata: { name: dongles, namespace: default }
//! data: { nodes: "node-a node-b", devices: "3" }
//! ---
//! apiVersion: resource.k8s.io/v1alpha2
//! kind: ResourceClass
//! metadata: { name: dongle }
//! driverName: network.example.com
//! parametersRef: { kind: ConfigMap, namespace: default, name: dongles }
//! ```
//!
//! Run it with `cargo run --example network_attached`. It requires the rights of every controller ([`drayman::controller`]) and the right
//! to get ConfigMaps.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use drayman::api::resource::{AllocationResult, Pod, ResourceClaim, ResourceClass};
use drayman::controller::Controller;
use drayman::driver::{CapacityCause, CapacityChange, ClaimRequest, Deallocation, Driver};
use drayman::driver::{DriverError, Finding, Observation, Result, UnsuitableNodes as Nodes};
use futures::{Stream, StreamExt as _};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::Api;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio_stream::wrappers::WatchStream;
use tokio_util::sync::CancellationToken;

type Request = ClaimRequest<NetworkAttached>;
/// Held devices by claim uid.
type Given = BTreeMap<String, Held>;

/// A class: equal devices that some nodes can reach.
pub(crate) struct Pool {
    name: String,
    nodes: BTreeSet<String>,
    devices: usize,
}

/// A device held by a claim. `recorded` means that the claim's status contains the allocation.
struct Held {
    pool: String,
    recorded: bool,
}

pub(crate) struct NetworkAttached {
    client: kube::Client,
    given: Mutex<Given>,
    freed: watch::Sender<()>,
}

impl NetworkAttached {
    pub(crate) fn new(client: kube::Client) -> Self {
        let (given, freed) = Default::default();
        Self { client, given, freed }
    }

    fn given(&self) -> MutexGuard<'_, Given> {
        self.given.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Frees the device of a claim if `recorded` matches.
    fn free(&self, uid: &str, recorded: bool) {
        let mut given = self.given();
        if given.get(uid).is_some_and(|held| held.recorded == recorded) {
            given.remove(uid);
            self.freed.send_replace(());
        }
    }
}

fn used(given: &Given, pool: &Pool) -> usize {
    given.values().filter(|held| held.pool == pool.name).count()
}

impl Driver for NetworkAttached {
    type ClassParameters = Pool;
    type ClaimParameters = ();

    fn name(&self) -> &'static str {
        "network.example.com"
    }

    /// 1. Read the class. Errors that require a user's action are `invalid`; all others are retried.
    async fn class_parameters(&self, class: &ResourceClass) -> Result<Pool> {
        let invalid = |text: &str| DriverError::invalid("ParametersInvalid", text);
        let Some((Some(namespace), name)) = class.parameters_ref.as_ref().map(|to| (&to.namespace, &to.name))
        else {
            return Err(invalid("parametersRef must name a ConfigMap and its namespace"));
        };
        // A missing ConfigMap may be created later, and this driver does not watch ConfigMaps.
        let unread = |error: kube::Error| DriverError::retry("ParametersUnreadable", error.to_string());
        let maps = Api::<ConfigMap>::namespaced(self.client.clone(), namespace);
        let data = maps.get(name).await.map_err(unread)?.data.unwrap_or_default();
        let text = |key| data.get(key).map_or("", String::as_str);
        let wrong = |_| invalid("\"devices\" in the ConfigMap must be a whole number");
        Ok(Pool {
            name: format!("{namespace}/{name}"),
            nodes: text("nodes").split_whitespace().map(str::to_owned).collect(),
            devices: text("devices").parse().map_err(wrong)?,
        })
    }

    /// 2. Read the claim's own parameters; this driver has none.
    async fn claim_parameters(&self, _: &ResourceClaim, _: &ResourceClass, _: &Pool) -> Result<()> {
        Ok(())
    }

    /// 3. Return the nodes that cannot serve all claims of the pod. This reserves nothing.
    async fn unsuitable_nodes(&self, _: &Pod, claims: &[Request], nodes: &[String]) -> Result<Vec<Nodes>> {
        let given = self.given();
        let evaluate = |request: &Request| {
            let pool = &request.class_parameters;
            let same = |other: &&Request| other.class_parameters.name == pool.name;
            let (used, wanted) = (used(&given, pool), claims.iter().filter(same).count());
            let mut unsuitable = Nodes::new();
            for node in nodes {
                let reason = match pool.nodes.contains(node) {
                    true if used + wanted <= pool.devices => continue,
                    true => format!("{used} of {} held", pool.devices),
                    false => format!("pool {} cannot be reached", pool.name),
                };
                unsuitable.insert(node.clone(), reason);
            }
            unsuitable
        };
        Ok(claims.iter().map(evaluate).collect())
    }

    /// 4. Allocate the claims. Check and reservation share one lock; a repeated call returns the same allocation.
    async fn allocate(&self, claims: &[Request], _: Option<&str>) -> Result<Vec<AllocationResult>> {
        let mut given = self.given();
        let allocate = |request: &Request| {
            let pool = &request.class_parameters;
            if !given.contains_key(request.uid()) {
                if used(&given, pool) >= pool.devices {
                    let text = format!("all {} of pool {} are held", pool.devices, pool.name);
                    return Err(DriverError::retry("NoSuitableDevice", text).for_claim(request.uid()));
                }
                let (pool, recorded) = (pool.name.clone(), false);
                given.insert(request.uid().to_owned(), Held { pool, recorded });
            }
            // The handle is for the plugin on the node. The claim can be used on every node of the pool.
            Ok(AllocationResult::new(self.name(), &*pool.name).on_nodes(&pool.nodes))
        };
        claims.iter().map(allocate).collect()
    }

    /// 5. Free allocations that were never recorded. Recorded ones are freed by step 6.
    async fn deallocate(&self, deallocation: Deallocation<'_>) -> Result<()> {
        self.free(deallocation.uid(), false);
        Ok(())
    }

    /// 6. Keep track of allocations: all claims once at the start, then every change.
    async fn observe(&self, observation: &Observation) -> Vec<Finding> {
        if let Observation::Gone { uid } = observation {
            self.given().remove(uid);
            self.freed.send_replace(());
        }
        for holding in observation.holdings() {
            let Some(allocation) = holding.allocation(self.name()) else {
                self.free(holding.uid(), true);
                continue;
            };
            let handle = allocation.resource_handles.first();
            let pool = handle.and_then(|handle| handle.data.clone()).unwrap_or_default();
            let (uid, recorded) = (holding.uid().to_owned(), true);
            self.given().insert(uid, Held { pool, recorded });
        }
        Vec::new()
    }

    /// 7. Wake up waiting pods.
    fn capacity_changes(&self) -> impl Stream<Item = CapacityChange> + Send + 'static {
        let changes = WatchStream::from_changes(self.freed.subscribe());
        changes.map(|()| CapacityChange::new(CapacityCause::Freed))
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let _ = rustls::crypto::ring::default_provider().install_default(); // several providers are linked
    let mut config = kube::Config::infer().await?;
    config.default_retry = false; // the controller retries requests itself
    let (client, shutdown) = (kube::Client::try_from(config)?, CancellationToken::new());
    let driver = NetworkAttached::new(client.clone());
    let (mut terminate, stop) = (signal(SignalKind::terminate())?, shutdown.clone());
    tokio::spawn(async move { terminate.recv().await.map(|()| stop.cancel()) });
    Ok(Controller::builder(driver).build(client)?.run(shutdown).await?)
}
