//! A driver instance under test, with the controller's calls.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use tokio::sync::mpsc;

use super::process::{Fate, Process, polled};
use super::rule::Rule;
use super::scene::{Done, Place, Scene, Stop, names};
use crate::api::resource::{AllocationResult, Pod, ResourceClaim, ResourceClaimStatus};
use crate::driver::{
    CapacityChange, ClaimRequest, Deallocation, Driver, DriverError, DriverErrorKind, Holding, Observation,
    UnsuitableNodes,
};

/// Maximum length of an event reason.
const REASON_MAX: usize = 128;

/// Creates a driver.
pub(super) type Make<D> = Arc<dyn Fn(Place) -> D + Send + Sync>;

/// A claim and its allocation.
#[derive(Clone, Debug)]
pub(super) struct Held {
    pub(super) claim: Arc<ResourceClaim>,
    pub(super) allocation: AllocationResult,
    pub(super) node: String,
}

impl Held {
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

/// A driver instance in its own simulated process.
pub(super) struct Instance<'a, D> {
    pub(super) driver: Arc<D>,
    pub(super) scene: &'a Scene,
    process: Process,
    /// Limit for a call.
    limit: Duration,
    pub(super) most: usize,
}

impl<'a, D: Driver> Instance<'a, D> {
    /// Starts an instance without any observation.
    pub(super) async fn start(
        make: &Make<D>,
        scene: &'a Scene,
        fate: Fate,
        limit: Duration,
        most: usize,
    ) -> Done<Instance<'a, D>> {
        let process = Process::start(fate)?;
        let place = Place {
            client: process.client(scene.stage.server()),
            directory: scene.directory.own(),
            node_name: scene.nodes.first().cloned().unwrap_or_default(),
        };
        let make = make.clone();
        let making = process.run(async move { Arc::new(make(place)) });
        let driver = match tokio::time::timeout(limit, making).await {
            Ok(Ok(driver)) => driver,
            Ok(Err(failure)) => {
                let panic = format!("a panic: {failure}");
                return Err(scene.broken(Rule::NoPanic, "the driver is made", "a driver", panic));
            }
            Err(_) => {
                let limit = format!("nothing within {limit:?}");
                return Err(scene.broken(Rule::ReturnsInTime, "the driver is made", "a driver", limit));
            }
        };
        scene.note("(a new instance)");
        Ok(Self {
            driver,
            scene,
            process,
            limit,
            most,
        })
    }

    /// Returns a client whose writes are steps of the instance's process.
    pub(super) fn client(&self) -> kube::Client {
        self.process.client(self.scene.stage.server())
    }

    /// Spawns a task in the instance's process.
    pub(super) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.process.spawn(work);
    }

    /// Kills the instance; its tasks never finish pending work.
    pub(super) async fn kill(self) {
        self.scene.note("(killed)");
        self.process.kill().await;
    }

    /// Runs a call with the limit and catches panics.
    async fn call<T: Send + 'static>(
        &self,
        what: &str,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Done<T> {
        match tokio::time::timeout(self.limit, self.process.run(work)).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(failure)) => {
                let panic = format!("a panic: {failure}");
                Err(self
                    .scene
                    .broken(Rule::NoPanic, what, "an answer or an error", panic))
            }
            Err(_) => {
                let late = format!("nothing within {:?}", self.limit);
                Err(self
                    .scene
                    .broken(Rule::ReturnsInTime, what, "an answer or an error", late))
            }
        }
    }

    /// Sends an observation and checks that the driver reports no findings.
    pub(super) async fn observe(&self, observation: Observation) -> Done<()> {
        let shown = match &observation {
            Observation::All(all) => format!("observe(All({}))", holdings(all, self.scene)),
            Observation::Changed(one) => {
                format!(
                    "observe(Changed({}))",
                    holdings(std::slice::from_ref(one), self.scene)
                )
            }
            Observation::Gone { .. } => "observe(Gone)".to_owned(),
        };
        let driver = self.driver.clone();
        let findings = self
            .call(&shown, async move { driver.observe(&observation).await })
            .await?;
        self.scene.note(format!("{shown} -> {} findings", findings.len()));
        match findings.first() {
            None => Ok(()),
            Some(finding) => Err(self.scene.broken(
                Rule::NoFalseFinding,
                &shown,
                "no finding: each claim has what it was allocated",
                format!("{}: {}", finding.reason, finding.message),
            )),
        }
    }

    /// Starts the driver in the controller's order.
    pub(super) async fn begin(&self, all: Vec<Holding>) -> Done<()> {
        self.observe(Observation::All(all)).await?;
        let driver = self.driver.clone();
        let ready = self.process.run(async move { driver.ready().await });
        match tokio::time::timeout(self.limit, ready).await {
            Ok(Ok(Ok(()))) => {
                self.scene.note("ready()");
                Ok(())
            }
            Ok(Ok(Err(error))) => Err(self.scene.broken(
                Rule::BecomesReady,
                "ready",
                "Ok: the objects of the test are there",
                shown_error(&error),
            )),
            Ok(Err(failure)) => {
                let panic = format!("a panic: {failure}");
                Err(self.scene.broken(Rule::NoPanic, "ready", "it returns", panic))
            }
            Err(_) => Err(self.scene.broken(
                Rule::BecomesReady,
                "ready",
                "it returns: the objects of the test are there",
                format!("it has not within {:?}", self.limit),
            )),
        }
    }

    /// Parses the parameters of claims, as the controller does before each call.
    pub(super) async fn requests(&self, claims: &[Arc<ResourceClaim>]) -> Done<Vec<ClaimRequest<D>>> {
        let (driver, class, list) = (self.driver.clone(), self.scene.class(), claims.to_vec());
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
            self.scene.broken(
                Rule::ParametersAreRead,
                &tried,
                "parameters: those of the test are in order",
                shown_error(&error),
            )
        })
    }

    /// Calls `unsuitable_nodes` for the claims.
    pub(super) async fn unsuitable_nodes(
        &self,
        claims: &[Arc<ResourceClaim>],
        nodes: &[String],
    ) -> Done<Vec<UnsuitableNodes>> {
        let requests = self.requests(claims).await?;
        let (driver, asked) = (self.driver.clone(), nodes.to_vec());
        let what = format!("unsuitable_nodes({}, [{}])", names(claims), nodes.join(", "));
        let answer = self
            .call(&what, async move {
                driver.unsuitable_nodes(&Pod::default(), &requests, &asked).await
            })
            .await?;
        let verdicts = match answer {
            Ok(verdicts) => verdicts,
            Err(error) => {
                self.readable(&what, &error)?;
                let expected = "no error: a full or unknown node is unsuitable";
                return Err(self.scene.broken(
                    Rule::OneVerdictPerClaim,
                    &what,
                    expected,
                    shown_error(&error),
                ));
            }
        };
        let shown: Vec<String> = verdicts
            .iter()
            .map(|unsuitable| format!("{unsuitable:?}"))
            .collect();
        self.scene.note(format!("{what} -> [{}]", shown.join(", ")));
        if verdicts.len() == claims.len() {
            return Ok(verdicts);
        }
        let expected = format!("{} verdicts, one for each claim in their order", claims.len());
        let found = format!("{} verdicts", verdicts.len());
        Err(self
            .scene
            .broken(Rule::OneVerdictPerClaim, &what, expected, found))
    }

    /// Calls `allocate`.
    pub(super) async fn allocate(
        &self,
        claims: &[Arc<ResourceClaim>],
        node: Option<&str>,
    ) -> Done<Result<Vec<AllocationResult>, DriverError>> {
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
                self.scene.note(format!("{what} -> {}", shown_error(&error)));
                self.readable(&what, &error)?;
                return Ok(Err(error));
            }
        };
        let shown: Vec<String> = allocations.iter().map(shown_allocation).collect();
        self.scene.note(format!("{what} -> [{}]", shown.join(", ")));
        for allocation in &allocations {
            self.check(&what, allocation, node)?;
        }
        if allocations.len() == claims.len() {
            return Ok(Ok(allocations));
        }
        let expected = format!("{} allocations, one for each claim in their order", claims.len());
        let found = format!("{} allocations", allocations.len());
        Err(self.scene.broken(Rule::OneResultPerClaim, &what, expected, found))
    }

    /// Starts an allocation and drops the call after `polls` waits. Returns whether the call finished before.
    pub(super) async fn allocate_and_drop(
        &self,
        claim: &Arc<ResourceClaim>,
        node: &str,
        polls: usize,
    ) -> Done<bool> {
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
        self.scene.note(format!("{what} -> ({how}, {polls} waits)"));
        Ok(answer)
    }

    /// Calls `deallocate`.
    pub(super) async fn deallocate(
        &self,
        holding: &Holding,
        allocation: Option<&AllocationResult>,
    ) -> Done<()> {
        let (driver, claim, allocation) = (self.driver.clone(), holding.claim.clone(), allocation.cloned());
        let what = format!(
            "deallocate({})",
            holdings(std::slice::from_ref(holding), self.scene)
        );
        let answer = self
            .call(&what, async move {
                driver
                    .deallocate(Deallocation::new(&claim).allocation(allocation.as_ref()))
                    .await
            })
            .await?;
        let Err(error) = answer else {
            self.scene.note(format!("{what} -> Ok"));
            return Ok(());
        };
        self.readable(&what, &error)?;
        Err(self.scene.broken(
            Rule::DeallocateNothingDoesNothing,
            &what,
            "Ok: nothing stands in the way, and to hold nothing is no error",
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
    ) -> Done<Vec<Result<Held, DriverError>>> {
        let nodes = self.scene.nodes.iter().cycle();
        let mut prepared = Vec::new();
        for (claim, node) in claims.iter().zip(nodes) {
            prepared.push((claim, node, self.requests(std::slice::from_ref(claim)).await?));
        }
        let calls = prepared.into_iter().map(|(claim, node, requests)| {
            let (driver, to) = (self.driver.clone(), node.clone());
            let call = self.call("allocate, several at once", async move {
                driver.allocate(&requests, Some(&to)).await
            });
            async move {
                let mut allocations = match call.await? {
                    Ok(allocations) => allocations,
                    Err(error) => return Ok(Err(error)),
                };
                let Some(allocation) = allocations.pop() else {
                    let expected = "one allocation, for the one claim";
                    return Err(self
                        .scene
                        .broken(Rule::OneResultPerClaim, "allocate", expected, "none"));
                };
                Ok(Ok(Held {
                    claim: claim.clone(),
                    allocation,
                    node: node.clone(),
                }))
            }
        });
        futures::future::join_all(calls).await.into_iter().collect()
    }

    fn readable(&self, what: &str, error: &DriverError) -> Done<()> {
        let camel = error.reason.starts_with(|c: char| c.is_ascii_uppercase())
            && error.reason.chars().all(|c| c.is_ascii_alphanumeric())
            && error.reason.len() <= REASON_MAX;
        if camel && !error.message.trim().is_empty() {
            return Ok(());
        }
        let expected = "a reason such as NoSuitableDevice, and a message";
        Err(self
            .scene
            .broken(Rule::ReadableErrors, what, expected, shown_error(error)))
    }

    fn check(&self, what: &str, allocation: &AllocationResult, node: Option<&str>) -> Done<()> {
        if let Err(problem) = allocation.check() {
            let expected = "an allocation that the API server takes";
            return Err(self
                .scene
                .broken(Rule::RecordableAllocation, what, expected, problem));
        }
        let Some(node) = node else { return Ok(()) };
        let value = serde_json::to_value(allocation).map_err(|error| Stop::Setup(error.to_string()))?;
        if crate::testcluster::scheduler::reaches(&value, node) {
            return Ok(());
        }
        let expected = format!("availableOnNodes has {node}, or is left out");
        let found = format!("availableOnNodes {}", value["availableOnNodes"]);
        Err(self
            .scene
            .broken(Rule::ReachableAllocation, what, expected, found))
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

fn holdings(all: &[Holding], scene: &Scene) -> String {
    let shown: Vec<String> = all
        .iter()
        .map(|holding| {
            let name = holding.claim.metadata.name.as_deref().unwrap_or_default();
            match holding.allocation(scene.driver_name()) {
                Some(_) => format!("{name} with allocation"),
                None => format!("{name} without allocation"),
            }
        })
        .collect();
    format!("[{}]", shown.join(", "))
}
