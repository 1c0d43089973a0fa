//! A driver instance under test, with the controller's calls.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use futures::future::BoxFuture;
use serde_json::json;
use tokio::sync::mpsc;
use tokio::task::JoinError;

use super::fixture::{CheckFailure, CheckResult, Environment, Fixture, names};
use super::process::{FaultPlan, Process, polled};
use super::rule::Rule;
use crate::api::resource::{AllocationResult, Pod, ResourceClaim, ResourceClaimStatus};
use crate::driver::{
    CapacityChange, ClaimRequest, Deallocation, Driver, DriverError, DriverErrorKind, Holding, Observation,
    UnsuitableNodes,
};
use crate::testcluster::scheduler::reaches;

/// Node name of a node driver.
pub(super) const NODE: &str = "node-a";
/// Maximum length of an event reason.
const REASON_MAX: usize = 128;

/// Creates a driver.
pub(super) type Make<D> = Arc<dyn Fn(Environment) -> BoxFuture<'static, D> + Send + Sync>;

/// A claim and its allocation.
#[derive(Clone, Debug)]
pub(super) struct ClaimAllocation {
    pub(super) claim: Arc<ResourceClaim>,
    pub(super) allocation: AllocationResult,
    pub(super) node: String,
}

impl ClaimAllocation {
    /// Returns the claim with its allocation recorded.
    pub(super) fn recorded(&self, driver: &str) -> Holding {
        let mut claim = (*self.claim).clone();
        claim.status = ResourceClaimStatus {
            driver_name: Some(driver.to_owned()),
            allocation: Some(self.allocation.clone()),
            ..ResourceClaimStatus::default()
        };
        Holding::new(claim)
    }

    /// Returns the claim without an allocation; it still has our finalizer.
    pub(super) fn unrecorded(&self) -> Holding {
        Holding::new(self.claim.clone())
    }

    pub(super) fn uid(&self) -> String {
        self.claim.metadata.uid.clone().unwrap_or_default()
    }
}

/// How a test creates instances, and its limits.
pub(super) struct Kit<D> {
    pub(super) make: Make<D>,
    /// Limit for a call.
    pub(super) limit: Duration,
    /// Limit for one step of a scenario.
    pub(super) timeout: Duration,
}

impl<D: Send + Sync + 'static> Kit<D> {
    /// Starts an instance, without any call.
    pub(super) async fn instance<'a>(&self, fixture: &'a Fixture) -> CheckResult<Instance<'a, D>> {
        self.with_faults(fixture, FaultPlan::new(None)).await
    }

    /// Starts an instance with a fault plan.
    pub(super) async fn with_faults<'a>(
        &self,
        fixture: &'a Fixture,
        fault_plan: FaultPlan,
    ) -> CheckResult<Instance<'a, D>> {
        let process = Process::start(fault_plan)?;
        let environment = Environment {
            client: process.client(fixture.cluster.server()),
            directory: fixture.driver_directory(),
            node_name: fixture.nodes.first().map_or(NODE, String::as_str).to_owned(),
        };
        let make = self.make.clone();
        let making = process.run(async move { Arc::new(make(environment).await) });
        let driver = limited(fixture, self.limit, "creation of the driver", making).await?;
        fixture.note("(a new instance)");
        Ok(Instance {
            driver,
            fixture,
            process,
            limit: self.limit,
        })
    }
}

impl<D: Driver> Kit<D> {
    /// Starts an instance that has observed an empty list of claims.
    pub(super) async fn started<'a>(&self, fixture: &'a Fixture) -> CheckResult<Instance<'a, D>> {
        let instance = self.instance(fixture).await?;
        instance.begin(Vec::new()).await?;
        Ok(instance)
    }
}

/// An instance of a driver or a node driver in its own simulated process.
pub(super) struct Instance<'a, D> {
    pub(super) driver: Arc<D>,
    pub(super) fixture: &'a Fixture,
    pub(super) process: Process,
    /// Limit for a call.
    pub(super) limit: Duration,
}

impl<D: Send + Sync + 'static> Instance<'_, D> {
    /// Returns a client whose writes are steps of the instance's process.
    pub(super) fn client(&self) -> kube::Client {
        self.process.client(self.fixture.cluster.server())
    }

    /// Spawns a task in the instance's process.
    pub(super) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.process.spawn(work);
    }

    /// Kills the instance; its tasks never finish pending work.
    pub(super) async fn kill(self) {
        self.fixture.note("(killed)");
        self.process.kill().await;
    }

    /// Runs a call with the limit and catches panics.
    pub(super) async fn call<T: Send + 'static>(
        &self,
        what: &str,
        work: impl Future<Output = T> + Send + 'static,
    ) -> CheckResult<T> {
        limited(self.fixture, self.limit, what, self.process.run(work)).await
    }

    pub(super) fn broken(
        &self,
        rule: Rule,
        tried: &str,
        expected: impl Into<String>,
        found: impl Into<String>,
    ) -> CheckFailure {
        self.fixture.broken(rule, tried, expected, found)
    }
}

/// Waits for a call at most `limit`. A late answer or a panic breaks a rule.
async fn limited<T>(
    fixture: &Fixture,
    limit: Duration,
    what: &str,
    call: impl Future<Output = Result<T, JoinError>>,
) -> CheckResult<T> {
    let expected = "a result or an error";
    match tokio::time::timeout(limit, call).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(failure)) => Err(fixture.broken(Rule::NoPanic, what, expected, format!("a panic: {failure}"))),
        Err(_) => {
            let late = format!("nothing within {limit:?}");
            Err(fixture.broken(Rule::ReturnsInTime, what, expected, late))
        }
    }
}

impl<D: Driver> Instance<'_, D> {
    /// Sends an observation and checks that the driver reports no findings.
    pub(super) async fn observe(&self, observation: Observation) -> CheckResult<()> {
        let shown = match &observation {
            Observation::All(all) => format!("observe(All({}))", holdings(all, self.fixture)),
            Observation::Changed(one) => {
                format!(
                    "observe(Changed({}))",
                    holdings(std::slice::from_ref(one), self.fixture)
                )
            }
            Observation::Gone { .. } => "observe(Gone)".to_owned(),
        };
        let driver = self.driver.clone();
        let findings = self
            .call(&shown, async move { driver.observe(&observation).await })
            .await?;
        self.fixture
            .note(format!("{shown} -> {} findings", findings.len()));
        match findings.first() {
            None => Ok(()),
            Some(finding) => Err(self.broken(
                Rule::NoFalseFinding,
                &shown,
                "no finding, because each claim has its allocation",
                format!("{}: {}", finding.reason, finding.message),
            )),
        }
    }

    /// Starts the driver in the controller's order.
    pub(super) async fn begin(&self, all: Vec<Holding>) -> CheckResult<()> {
        self.observe(Observation::All(all)).await?;
        let driver = self.driver.clone();
        let ready = self.process.run(async move { driver.ready().await });
        let found = match tokio::time::timeout(self.limit, ready).await {
            Ok(Ok(Ok(()))) => {
                self.fixture.note("ready()");
                return Ok(());
            }
            Ok(Ok(Err(error))) => shown_error(&error),
            Ok(Err(failure)) => {
                let panic = format!("a panic: {failure}");
                return Err(self.broken(Rule::NoPanic, "ready", "Ok", panic));
            }
            Err(_) => format!("nothing within {:?}", self.limit),
        };
        let expected = "Ok, because the objects of the test exist";
        Err(self.broken(Rule::BecomesReady, "ready", expected, found))
    }

    /// Parses the parameters of claims, as the controller does before each call.
    pub(super) async fn requests(&self, claims: &[Arc<ResourceClaim>]) -> CheckResult<Vec<ClaimRequest<D>>> {
        let (driver, class, list) = (self.driver.clone(), self.fixture.class()?, claims.to_vec());
        let read = self
            .call("class_parameters, claim_parameters", async move {
                let mut requests = Vec::new();
                for (number, claim) in list.into_iter().enumerate() {
                    let class_parameters = driver.class_parameters(&class).await?;
                    let claim_parameters = driver.claim_parameters(&claim, &class, &class_parameters).await?;
                    let request = ClaimRequest::new(claim, class.clone(), class_parameters, claim_parameters);
                    requests.push(request.pod_claim_name(format!("entry-{number}")));
                }
                Ok(requests)
            })
            .await?;
        read.map_err(|error: DriverError| {
            let tried = format!("class_parameters and claim_parameters for {}", names(claims));
            self.broken(
                Rule::ParametersAreRead,
                &tried,
                "parameters, because the objects of the test are valid",
                shown_error(&error),
            )
        })
    }

    /// Calls `unsuitable_nodes` for the claims.
    pub(super) async fn unsuitable_nodes(
        &self,
        claims: &[Arc<ResourceClaim>],
        nodes: &[String],
    ) -> CheckResult<Vec<UnsuitableNodes>> {
        let requests = self.requests(claims).await?;
        let (driver, asked) = (self.driver.clone(), nodes.to_vec());
        let what = format!("unsuitable_nodes({}, [{}])", names(claims), nodes.join(", "));
        let answer = self
            .call(&what, async move {
                driver.unsuitable_nodes(&Pod::default(), &requests, &asked).await
            })
            .await?;
        let unsuitable = match answer {
            Ok(unsuitable) => unsuitable,
            Err(error) => {
                self.readable(&what, &error)?;
                let expected = "a full or unknown node is unsuitable, and not an error";
                return Err(self.broken(Rule::OneEntryPerClaim, &what, expected, shown_error(&error)));
            }
        };
        let shown: Vec<String> = unsuitable
            .iter()
            .map(|unsuitable| format!("{unsuitable:?}"))
            .collect();
        self.fixture.note(format!("{what} -> [{}]", shown.join(", ")));
        if unsuitable.len() == claims.len() {
            return Ok(unsuitable);
        }
        let expected = format!("{} entries, one for each claim in their order", claims.len());
        let found = format!("{} entries", unsuitable.len());
        Err(self.broken(Rule::OneEntryPerClaim, &what, expected, found))
    }

    /// Calls `allocate`.
    pub(super) async fn allocate(
        &self,
        claims: &[Arc<ResourceClaim>],
        node: Option<&str>,
    ) -> CheckResult<Result<Vec<AllocationResult>, DriverError>> {
        let requests = self.requests(claims).await?;
        let (driver, to) = (self.driver.clone(), node.map(str::to_owned));
        let what = format!("allocate({}, {})", names(claims), node.unwrap_or("anywhere"));
        let answer = self
            .call(
                &what,
                async move { driver.allocate(&requests, to.as_deref()).await },
            )
            .await?;
        let allocations = match answer {
            Ok(allocations) => allocations,
            Err(error) => {
                self.fixture.note(format!("{what} -> {}", shown_error(&error)));
                self.readable(&what, &error)?;
                return Ok(Err(error));
            }
        };
        let shown: Vec<String> = allocations.iter().map(shown_allocation).collect();
        self.fixture.note(format!("{what} -> [{}]", shown.join(", ")));
        for allocation in &allocations {
            self.check(&what, allocation, node)?;
        }
        if allocations.len() == claims.len() {
            return Ok(Ok(allocations));
        }
        let expected = format!("{} allocations, one for each claim in their order", claims.len());
        let found = format!("{} allocations", allocations.len());
        Err(self.broken(Rule::OneAllocationPerClaim, &what, expected, found))
    }

    /// Starts an allocation and drops the call after `polls` waits. Returns whether the call finished before.
    pub(super) async fn allocate_and_drop(
        &self,
        claim: &Arc<ResourceClaim>,
        node: &str,
        polls: usize,
    ) -> CheckResult<bool> {
        let requests = self.requests(std::slice::from_ref(claim)).await?;
        let (driver, to) = (self.driver.clone(), node.to_owned());
        let what = format!("allocate({}, {node})", names(std::slice::from_ref(claim)));
        let answer = self
            .call(&what, async move {
                let call = driver.allocate(&requests, Some(&to));
                polled(call, polls).await.is_some()
            })
            .await?;
        let how = if answer { "the answer is lost" } else { "dropped" };
        self.fixture.note(format!("{what} -> ({how}, {polls} waits)"));
        Ok(answer)
    }

    /// Calls `deallocate`.
    pub(super) async fn deallocate(
        &self,
        holding: &Holding,
        allocation: Option<&AllocationResult>,
    ) -> CheckResult<()> {
        let (driver, claim, allocation) = (self.driver.clone(), holding.claim.clone(), allocation.cloned());
        let what = format!(
            "deallocate({})",
            holdings(std::slice::from_ref(holding), self.fixture)
        );
        let answer = self
            .call(&what, async move {
                driver
                    .deallocate(Deallocation::new(&claim).allocation(allocation.as_ref()))
                    .await
            })
            .await?;
        let Err(error) = answer else {
            self.fixture.note(format!("{what} -> Ok"));
            return Ok(());
        };
        self.readable(&what, &error)?;
        Err(self.broken(
            Rule::DeallocateIsIdempotent,
            &what,
            "Ok, also for a claim that holds nothing",
            shown_error(&error),
        ))
    }

    /// Subscribes to the driver's capacity changes.
    pub(super) fn capacity_changes(&self) -> mpsc::UnboundedReceiver<CapacityChange> {
        let (sender, receiver) = mpsc::unbounded_channel();
        let driver = self.driver.clone();
        self.process.spawn(async move {
            let mut changes = Box::pin(driver.capacity_changes());
            while let Some(change) = changes.next().await {
                if sender.send(change).is_err() {
                    return;
                }
            }
        });
        receiver
    }

    /// Allocates the claims in concurrent calls.
    pub(super) async fn at_once(
        &self,
        claims: &[Arc<ResourceClaim>],
    ) -> CheckResult<Vec<Result<ClaimAllocation, DriverError>>> {
        let nodes = self.fixture.nodes.iter().cycle();
        let mut prepared = Vec::new();
        for (claim, node) in claims.iter().zip(nodes) {
            prepared.push((claim, node, self.requests(std::slice::from_ref(claim)).await?));
        }
        let calls = prepared.into_iter().map(|(claim, node, requests)| {
            let (driver, to) = (self.driver.clone(), node.clone());
            let call = self.call("concurrent allocate calls", async move {
                driver.allocate(&requests, Some(&to)).await
            });
            async move {
                let mut allocations = match call.await? {
                    Ok(allocations) => allocations,
                    Err(error) => return Ok(Err(error)),
                };
                let Some(allocation) = allocations.pop() else {
                    let expected = "one allocation, for the one claim";
                    return Err(self.broken(Rule::OneAllocationPerClaim, "allocate", expected, "none"));
                };
                Ok(Ok(ClaimAllocation {
                    claim: claim.clone(),
                    allocation,
                    node: node.clone(),
                }))
            }
        });
        futures::future::join_all(calls).await.into_iter().collect()
    }

    fn readable(&self, what: &str, error: &DriverError) -> CheckResult<()> {
        let camel = error.reason.starts_with(|c: char| c.is_ascii_uppercase())
            && error.reason.chars().all(|c| c.is_ascii_alphanumeric())
            && error.reason.len() <= REASON_MAX;
        if camel && !error.message.trim().is_empty() {
            return Ok(());
        }
        let expected = "a reason such as NoSuitableDevice, and a message";
        Err(self.broken(Rule::ReadableErrors, what, expected, shown_error(error)))
    }

    fn check(&self, what: &str, allocation: &AllocationResult, node: Option<&str>) -> CheckResult<()> {
        if let Err(problem) = allocation.check() {
            let expected = "an allocation that the API server accepts";
            return Err(self.broken(Rule::RecordableAllocation, what, expected, problem));
        }
        let Some(node) = node else { return Ok(()) };
        if reaches(allocation, node) {
            return Ok(());
        }
        let expected = format!("availableOnNodes has {node}, or is absent");
        let found = format!("availableOnNodes {}", json!(allocation.available_on_nodes));
        Err(self.broken(Rule::ReachableAllocation, what, expected, found))
    }
}

pub(super) fn shown_error(error: &DriverError) -> String {
    let kind = match error.kind {
        DriverErrorKind::Invalid => "Invalid",
        DriverErrorKind::Retry => "Retry",
    };
    format!("error {:?} ({kind}): {:?}", error.reason, error.message)
}

fn shown_allocation(allocation: &AllocationResult) -> String {
    let handle = allocation.resource_handles.first();
    let data = handle.and_then(|handle| handle.data.as_deref());
    let data: String = data.unwrap_or_default().chars().take(60).collect();
    format!("ok {data:?}")
}

fn holdings(all: &[Holding], fixture: &Fixture) -> String {
    let shown: Vec<String> = all
        .iter()
        .map(|holding| {
            let name = holding.claim.metadata.name.as_deref().unwrap_or_default();
            match holding.allocation(fixture.driver_name()) {
                Some(_) => format!("{name} with allocation"),
                None => format!("{name} without allocation"),
            }
        })
        .collect();
    format!("[{}]", shown.join(", "))
}
