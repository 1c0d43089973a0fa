//! Driver that injects faults between the real controller and the driver under test.

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};

use futures::Stream;

use super::lifecycle::OBSERVE;
use super::process::FaultPlan;
use crate::api::resource::{AllocationResult, Pod, ResourceClaim, ResourceClass};
use crate::driver::{
    CapacityChange, ClaimRequest, Deallocation, Driver, DriverError, Finding, Observation, UnsuitableNodes,
};

pub(super) struct Wrapped<D> {
    pub(super) driver: Arc<D>,
    pub(super) fault_plan: FaultPlan,
}

/// Parameters read by the driver under test, moved into the call that uses them.
pub(super) type Once<T> = Mutex<Option<T>>;

fn lost() -> DriverError {
    DriverError::retry("ConformanceFault", "the conformance test lets this call fail")
}

fn names(claims: &[Arc<ResourceClaim>]) -> String {
    super::fixture::names(claims)
}

impl<D: Driver> Wrapped<D> {
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

impl<D: Driver> Driver for Wrapped<D> {
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
