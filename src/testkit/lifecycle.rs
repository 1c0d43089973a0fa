//! Scenario of pods with the real controller and the driver under test on the test cluster. A fault hits one step of
//! the controller; the final state must be as without it.

use std::collections::BTreeSet;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::Stream;
use serde_json::{Value, json};
use tokio::time::Instant as Moment;
use tokio_util::sync::CancellationToken;

use super::fixture::{CheckFailure, CheckResult, Fixture, NAMESPACE, names};
use super::instance::{Instance, Kit};
use super::measure::Capacity;
use super::process::{FaultPlan, StepFault};
use super::rule::Rule;
use crate::api::resource::{AllocationResult, Pod, ResourceClaim, ResourceClass};
use crate::controller::Controller;
use crate::driver::{
    CapacityChange, ClaimRequest, Deallocation, Driver, DriverError, Finding, Observation, UnsuitableNodes,
};
use crate::testcluster::api::object::{self, list, text};
use crate::testcluster::client::ApiClient;

/// Name prefix of steps that only send an observation.
pub(super) const OBSERVE: &str = "observe";
/// Limit for a driver call.
const CALL: Duration = Duration::from_millis(500);
/// Limit for a request. A busy machine must not exceed it: after writes of unknown outcome, the controller may wait for a
/// minute, which looks like a defect of the driver.
const REQUEST: Duration = Duration::from_secs(5);

/// Driver that injects faults between the real controller and the driver under test.
struct FaultyDriver<D> {
    driver: Arc<D>,
    fault_plan: FaultPlan,
}

/// Parameters read by the driver under test, moved into the call that uses them.
type Once<T> = Mutex<Option<T>>;

fn lost() -> DriverError {
    DriverError::retry("ConformanceFault", "injected by the conformance test")
}

impl<D: Driver> FaultyDriver<D> {
    fn inner(claims: &[ClaimRequest<Self>]) -> Result<Vec<ClaimRequest<D>>, DriverError> {
        claims
            .iter()
            .map(|request| {
                let parameters = request
                    .claim_parameters
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .take();
                let (claim, class) = (request.claim.clone(), request.class.clone());
                let class_parameters = (*request.class_parameters).clone();
                let inner = ClaimRequest::new(claim, class, class_parameters, parameters.ok_or_else(lost)?);
                Ok(inner.pod_claim_name(&request.pod_claim_name))
            })
            .collect()
    }

    async fn step<T>(
        &self,
        what: String,
        work: impl Future<Output = Result<T, DriverError>>,
    ) -> Result<T, DriverError> {
        self.fault_plan.step(what, work, || Err(lost())).await
    }
}

fn claims_of<D: Driver>(requests: &[ClaimRequest<D>]) -> String {
    let claims: Vec<Arc<ResourceClaim>> = requests.iter().map(|request| request.claim.clone()).collect();
    names(&claims)
}

impl<D: Driver> Driver for FaultyDriver<D> {
    type ClassParameters = Arc<D::ClassParameters>;
    type ClaimParameters = Once<D::ClaimParameters>;

    fn name(&self) -> &str {
        self.driver.name()
    }

    async fn ready(&self) -> Result<(), DriverError> {
        self.driver.ready().await
    }

    async fn class_parameters(&self, class: &ResourceClass) -> Result<Arc<D::ClassParameters>, DriverError> {
        self.driver.class_parameters(class).await.map(Arc::new)
    }

    async fn claim_parameters(
        &self,
        claim: &ResourceClaim,
        class: &ResourceClass,
        class_parameters: &Arc<D::ClassParameters>,
    ) -> Result<Once<D::ClaimParameters>, DriverError> {
        let read = self
            .driver
            .claim_parameters(claim, class, class_parameters)
            .await?;
        Ok(Mutex::new(Some(read)))
    }

    async fn unsuitable_nodes(
        &self,
        pod: &Pod,
        claims: &[ClaimRequest<Self>],
        nodes: &[String],
    ) -> Result<Vec<UnsuitableNodes>, DriverError> {
        let inner = Self::inner(claims)?;
        let what = format!("unsuitable_nodes({}, [{}])", claims_of(&inner), nodes.join(", "));
        self.step(what, self.driver.unsuitable_nodes(pod, &inner, nodes))
            .await
    }

    async fn allocate(
        &self,
        claims: &[ClaimRequest<Self>],
        node: Option<&str>,
    ) -> Result<Vec<AllocationResult>, DriverError> {
        let inner = Self::inner(claims)?;
        let what = format!("allocate({}, {})", claims_of(&inner), node.unwrap_or("anywhere"));
        self.step(what, self.driver.allocate(&inner, node)).await
    }

    async fn deallocate(&self, deallocation: Deallocation<'_>) -> Result<(), DriverError> {
        let name = deallocation.claim.metadata.name.as_deref().unwrap_or_default();
        let what = format!("deallocate({name})");
        self.step(what, self.driver.deallocate(deallocation)).await
    }

    async fn observe(&self, observation: &Observation) -> Vec<Finding> {
        let what = match observation {
            Observation::All(all) => format!("{OBSERVE}(All of {} claims)", all.len()),
            Observation::Changed(holding) => {
                let claim = &holding.claim;
                let name = claim.metadata.name.as_deref().unwrap_or_default();
                let with = if claim.status.allocation.is_some() {
                    "with"
                } else {
                    "without"
                };
                format!("{OBSERVE}({name} {with} allocation)")
            }
            Observation::Gone { .. } => format!("{OBSERVE}(Gone)"),
        };
        if self.fault_plan.count(what) {
            self.driver.observe(observation).await
        } else {
            Vec::new()
        }
    }

    fn capacity_changes(&self) -> impl Stream<Item = CapacityChange> + Send + 'static {
        self.driver.capacity_changes()
    }

    fn findings(&self) -> impl Stream<Item = Finding> + Send + 'static {
        self.driver.findings()
    }
}

struct Lifecycle<'a, D> {
    kit: &'a Kit<D>,
    fixture: &'a Fixture,
    rule: Rule,
    instance: Option<Instance<'a, D>>,
    fault_plan: FaultPlan,
    /// Why the controller has ended unexpectedly.
    ended: Arc<Mutex<Option<String>>>,
    /// Steps of earlier processes.
    past: Vec<String>,
}

/// Runs the scenario and returns the controller's steps.
pub(super) async fn run<D: Driver>(
    kit: &Kit<D>,
    fixture: &Fixture,
    capacity: &Capacity,
    fault: Option<StepFault>,
    rule: Rule,
) -> CheckResult<Vec<String>> {
    let mut lifecycle = Lifecycle {
        kit,
        fixture,
        rule,
        instance: None,
        fault_plan: FaultPlan::new(fault),
        ended: Arc::default(),
        past: Vec::new(),
    };
    lifecycle.begin().await?;
    let pair = capacity.together >= 2 && capacity.places.is_none_or(|places| places >= 3);
    // The pair comes first: no other claim may take its place on the only node where it fits.
    if pair {
        lifecycle.create("pair", 2)?;
        lifecycle.bound("pair").await?;
    }
    lifecycle.create("one", 1)?;
    lifecycle.bound("one").await?;
    fixture.delete_pod("one");
    lifecycle
        .settled("the claim of pod one is gone", usize::from(pair) * 2)
        .await?;
    lifecycle.create("later", 1)?;
    lifecycle.bound("later").await?;
    for pod in ["pair", "later"] {
        fixture.delete_pod(pod);
    }
    lifecycle
        .settled("all pods are deleted; their claims are gone", 0)
        .await?;
    lifecycle.check_history(capacity)?;
    lifecycle.check_capacity(capacity).await?;
    lifecycle.remember();
    if let Some(instance) = lifecycle.instance.take() {
        instance.kill().await;
    }
    Ok(lifecycle.past)
}

impl<D: Driver> Lifecycle<'_, D> {
    /// Starts the controller with the driver.
    async fn begin(&mut self) -> CheckResult<()> {
        let instance = self
            .kit
            .with_faults(self.fixture, self.fault_plan.clone())
            .await?;
        let wrapped = FaultyDriver {
            driver: instance.driver.clone(),
            fault_plan: self.fault_plan.clone(),
        };
        let controller = Controller::builder(wrapped)
            .call_timeout(CALL)
            .request_timeout(REQUEST)
            .build(instance.client())
            .map_err(|error| CheckFailure::Setup(error.to_string()))?;
        let ended = self.ended.clone();
        instance.spawn(async move {
            // Never cancelled: the process is killed.
            let result = controller.run(CancellationToken::new()).await;
            let why = result.err().map_or_else(String::new, |error| error.to_string());
            *ended.lock().unwrap_or_else(PoisonError::into_inner) = Some(why);
        });
        self.instance = Some(instance);
        Ok(())
    }

    /// Keeps the steps of the process for a finding.
    fn remember(&mut self) {
        self.past.extend(self.fault_plan.steps());
    }

    async fn restart(&mut self) -> CheckResult<()> {
        self.remember();
        self.past.push("(killed and restarted)".to_owned());
        if let Some(instance) = self.instance.take() {
            instance.kill().await;
        }
        self.fault_plan = FaultPlan::new(None);
        self.begin().await
    }

    fn create(&self, name: &str, claims: usize) -> CheckResult<()> {
        let entries: Vec<Value> = (0..claims)
            .map(|number| self.fixture.pod_claim(&format!("entry-{number}")))
            .collect();
        let spec = json!({
            "containers": [{ "name": "main", "image": "none" }],
            "resourceClaims": entries, "terminationGracePeriodSeconds": 0,
        });
        self.fixture.create_pod(name, &spec)
    }

    async fn bound(&mut self, name: &str) -> CheckResult<()> {
        let what = format!("pod {name} has a node, and its claims are allocated and reserved for it");
        self.wait(&what, |client| {
            let pod = client.get("pods", NAMESPACE, name).unwrap_or_default();
            !text(&pod, "/spec/nodeName").is_empty()
        })
        .await
    }

    async fn settled(&mut self, what: &str, claims: usize) -> CheckResult<()> {
        self.wait(what, |client| {
            let pending = client.list("pods").iter().any(|pod| object::is_deleting(pod));
            !pending && client.list("resourceclaims").len() == claims
        })
        .await
    }

    async fn wait(&mut self, what: &str, holds: impl Fn(&ApiClient) -> bool) -> CheckResult<()> {
        let until = Moment::now() + self.kit.timeout;
        let mut changes = self.fixture.cluster.server().changes();
        loop {
            changes.borrow_and_update();
            if holds(&self.fixture.client) {
                return Ok(());
            }
            if self.fault_plan.is_dead() {
                self.restart().await?;
            }
            let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(why) = ended {
                return Err(self.broken(what, format!("the controller has ended: {why}")));
            }
            let fault_plan = self.fault_plan.clone();
            tokio::select! {
                _ = changes.changed() => {}
                () = fault_plan.died() => {}
                () = tokio::time::sleep_until(until) => {
                    let state = self.state();
                    return Err(self.broken(what, format!("not within {:?}; {state}", self.kit.timeout)));
                }
            }
        }
    }

    /// Describes claims and events for a finding.
    fn state(&self) -> String {
        let client = &self.fixture.client;
        let mut parts: Vec<String> = client
            .list("resourceclaims")
            .iter()
            .map(|claim| {
                let allocated = claim.pointer("/status/allocation").is_some();
                let finalizers = list(claim, "/metadata/finalizers").len();
                let word = if allocated { "allocated" } else { "not allocated" };
                let going = if object::is_deleting(claim) {
                    ", being deleted"
                } else {
                    ""
                };
                format!(
                    "claim {}: {word}, {finalizers} finalizers{going}",
                    object::name(claim)
                )
            })
            .collect();
        parts.extend(self.fixture.events());
        parts.join("; ")
    }

    fn broken(&self, expected: &str, found: impl Into<String>) -> CheckFailure {
        let steps = self.past.iter().cloned().chain(self.fault_plan.steps());
        self.fixture.broken_after(steps, self.rule, expected, found)
    }

    /// Checks that recorded allocations never exceeded the capacity.
    fn check_history(&self, capacity: &Capacity) -> CheckResult<()> {
        let Some(places) = capacity.places else {
            return Ok(());
        };
        let mut allocated: BTreeSet<String> = BTreeSet::new();
        let (changes, _) = self.fixture.cluster.server().changes_after(1);
        for change in changes
            .iter()
            .filter(|change| change.key.storage.starts_with("resourceclaims"))
        {
            match &change.after {
                Some(claim) if claim.pointer("/status/allocation").is_some() => {
                    allocated.insert(change.key.name.clone())
                }
                _ => allocated.remove(&change.key.name),
            };
            if allocated.len() > places {
                let expected = format!("at most {places} claims are allocated");
                return Err(self.broken(
                    &expected,
                    format!("{} are allocated: {allocated:?}", allocated.len()),
                ));
            }
        }
        Ok(())
    }

    /// Checks that the driver's whole capacity is free at the end.
    async fn check_capacity(&mut self, capacity: &Capacity) -> CheckResult<()> {
        let Some(places) = capacity.places else {
            return Ok(());
        };
        // The last observation may still be pending.
        let until = Moment::now() + self.kit.timeout;
        loop {
            if self.fault_plan.is_dead() {
                self.restart().await?;
            }
            let Some(instance) = &self.instance else {
                return Ok(());
            };
            let free = instance.free().await?;
            if free == places {
                return Ok(());
            }
            if Moment::now() > until {
                let expected = format!("in the end {places} claims fit, as at the start");
                return Err(self.broken(&expected, format!("{free} fit")));
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::crd::definitions;
    use crate::host::HostDriver;
    use crate::testkit::{Environment, conformance};

    fn inventory(node: &str, devices: &[&str]) -> Value {
        let device = |name: &&str| json!({ "name": name, "kind": "test" });
        let devices: Vec<Value> = devices.iter().map(device).collect();
        let ready = json!({
            "type": "Ready", "status": "True", "reason": "Serving", "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        });
        json!({
            "apiVersion": "drayman.dev/v1alpha1", "kind": "NodeInventory",
            "metadata": { "name": format!("{node}.drayman.dev") },
            "spec": {
                "driverName": "drayman.dev", "nodeName": node, "nodeUid": format!("uid-of-{node}"), "devices": devices,
            },
            "status": { "conditions": [ready] },
        })
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn nodes_may_have_different_numbers_of_devices() {
        let mut objects: Vec<Value> = definitions()
            .into_iter()
            .map(|definition| serde_json::to_value(definition).unwrap())
            .collect();
        objects.extend([
            inventory("node-a", &["one", "two"]),
            inventory("node-b", &["one"]),
            json!({
                "apiVersion": "drayman.dev/v1alpha1", "kind": "DeviceClassParameters", "metadata": { "name": "test" },
                "spec": { "kind": "test" },
            }),
            json!({
                "apiVersion": "resource.k8s.io/v1alpha2", "kind": "ResourceClass", "metadata": { "name": "test" },
                "driverName": "drayman.dev",
                "parametersRef": { "apiGroup": "drayman.dev", "kind": "DeviceClassParameters", "name": "test" },
            }),
        ]);
        let objects: Vec<String> = objects.iter().map(ToString::to_string).collect();
        let make = |environment: Environment| {
            HostDriver::start(environment.client(), "drayman.dev", CancellationToken::new())
        };
        let test = conformance(make).objects(&objects.join("\n---\n"));
        let test = test.only([Rule::ServesPods]).timeout(Duration::from_secs(20));
        test.run().await.unwrap();
    }
}
