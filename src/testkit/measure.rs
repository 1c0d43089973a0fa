//! Measures a driver's capacity by allocation; most checks start and end with it.

use std::sync::Arc;

use super::fixture::{CheckFailure, CheckResult, Fixture};
use super::instance::{ClaimAllocation, Instance, Kit, shown_error};
use super::report::ConformanceReport;
use super::rule::Rule;
use crate::api::resource::{AllocationResult, ResourceClaim};
use crate::driver::{Driver, Holding, Observation};

/// A node that does not exist in any cluster of the kit.
const UNKNOWN_NODE: &str = "conformance-nowhere";

/// Capacity of a driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Capacity {
    /// Number of claims that fit at the same time; `None` if the kit found no limit.
    pub(super) places: Option<usize>,
    /// A node, and the number of claims of one pod that it can serve.
    pub(super) node: String,
    pub(super) together: usize,
}

impl<D: Driver> Instance<'_, D> {
    /// Allocates a claim on a suitable node; `None` if no node is suitable.
    pub(super) async fn allocate_one(&self) -> CheckResult<Option<ClaimAllocation>> {
        let claim = [self.fixture.claim()?];
        let unsuitable = self.unsuitable_nodes(&claim, &self.fixture.nodes).await?;
        let rejects = |node: &&String| {
            unsuitable
                .first()
                .is_some_and(|unsuitable| unsuitable.contains_key(*node))
        };
        let Some(node) = self.fixture.nodes.iter().find(|node| !rejects(node)) else {
            return Ok(None);
        };
        let [claim] = claim;
        let allocation = self.take(std::slice::from_ref(&claim), node).await?;
        Ok(allocation.into_iter().next().map(|allocation| ClaimAllocation {
            claim,
            allocation,
            node: node.clone(),
        }))
    }

    /// Allocates claims on a node that the driver considers suitable.
    pub(super) async fn take(
        &self,
        claims: &[Arc<ResourceClaim>],
        node: &str,
    ) -> CheckResult<Vec<AllocationResult>> {
        self.allocate(claims, Some(node)).await?.map_err(|error| {
            let tried = format!("allocate on {node}, which unsuitable_nodes did not reject");
            self.broken(
                Rule::SuitableIsAllocatable,
                &tried,
                "an allocation for each claim",
                shown_error(&error),
            )
        })
    }

    pub(super) async fn some(&self, count: usize) -> CheckResult<Vec<ClaimAllocation>> {
        let mut held = Vec::new();
        while held.len() < count {
            let Some(one) = self.allocate_one().await? else {
                break;
            };
            held.push(one);
        }
        Ok(held)
    }

    /// Deallocates claims that were never recorded.
    pub(super) async fn deallocate_all(&self, held: &[ClaimAllocation]) -> CheckResult<()> {
        for (number, one) in held.iter().enumerate() {
            // With and without the allocation, because a restarted controller does not know it.
            let allocation = (number % 2 == 0).then_some(&one.allocation);
            self.deallocate(&one.unrecorded(), allocation).await?;
        }
        Ok(())
    }

    /// Counts the claims that fit now, and deallocates all of them.
    pub(super) async fn free(&self) -> CheckResult<usize> {
        self.fixture.note("(count the claims that fit)");
        let held = self.some(self.fixture.max_claims).await?;
        self.deallocate_all(&held).await?;
        self.fixture.note(format!("({} claims fit)", held.len()));
        Ok(held.len())
    }

    /// Checks that all but `held` of the `places` are free.
    pub(super) async fn expect_free(
        &self,
        rule: Rule,
        tried: &str,
        places: Option<usize>,
        held: usize,
    ) -> CheckResult<()> {
        let Some(places) = places else { return Ok(()) };
        let expected = places.saturating_sub(held);
        let free = self.free().await?;
        if free == expected {
            return Ok(());
        }
        let expected = format!("{expected} more claims fit, of {places} in all");
        Err(self.broken(rule, tried, expected, format!("{free} more claims fit")))
    }

    pub(super) async fn record(&self, held: &ClaimAllocation) -> CheckResult<()> {
        let holding = held.recorded(self.fixture.driver_name());
        self.observe(Observation::Changed(holding)).await
    }

    pub(super) fn recorded(&self, held: &[ClaimAllocation]) -> Vec<Holding> {
        held.iter()
            .map(|held| held.recorded(self.fixture.driver_name()))
            .collect()
    }
}

/// Checks name, start, parameters and unsuitable, and measures the capacity for the other checks.
pub(super) async fn basics<D: Driver>(
    kit: &Kit<D>,
    fixture: &Fixture,
    report: &mut ConformanceReport,
) -> CheckResult<Capacity> {
    let instance = kit.instance(fixture).await?;
    instance.begin(Vec::new()).await?;
    report.tried(Rule::BecomesReady);
    let claims = fixture.claims(2)?;
    for _ in 0..2 {
        instance.requests(&claims).await?;
    }
    report.tried(Rule::ParametersAreRead);
    let nowhere = [UNKNOWN_NODE.to_owned()];
    instance.unsuitable_nodes(&claims, &nowhere).await?;
    instance.unsuitable_nodes(&claims, &[]).await?;
    instance.unsuitable_nodes(&[], &fixture.nodes).await?;
    let first = instance.unsuitable_nodes(&claims, &fixture.nodes).await?;
    report.tried(Rule::OneEntryPerClaim);
    for _ in 0..3 {
        let next = instance.unsuitable_nodes(&claims, &fixture.nodes).await?;
        if next != first {
            let expected = format!("{first:?}, as before");
            let found = format!("{next:?}");
            return Err(instance.broken(
                Rule::EvaluationReservesNothing,
                "unsuitable_nodes again",
                expected,
                found,
            ));
        }
    }
    let fit = instance.free().await?;
    report.tried(Rule::EvaluationReservesNothing);
    for rule in [
        Rule::SuitableIsAllocatable,
        Rule::OneAllocationPerClaim,
        Rule::RecordableAllocation,
        Rule::ReachableAllocation,
        Rule::NoPanic,
        Rule::ReturnsInTime,
    ] {
        report.tried(rule);
    }
    if fit == 0 {
        return Err(CheckFailure::Setup(
            "no claim fits on any node: configure objects and nodes so that at least one claim fits"
                .to_owned(),
        ));
    }
    let (mut node, mut together) = (fixture.nodes.first().cloned().unwrap_or_default(), 1);
    for candidate in &fixture.nodes {
        for count in (together..=fit.min(instance.fixture.max_claims)).rev() {
            let claims = fixture.claims(count)?;
            let unsuitable = instance
                .unsuitable_nodes(&claims, std::slice::from_ref(candidate))
                .await?;
            if !unsuitable
                .iter()
                .any(|unsuitable| unsuitable.contains_key(candidate))
            {
                if count > together || candidate == &node {
                    (node, together) = (candidate.clone(), count);
                }
                break;
            }
        }
    }
    let places = (fit < instance.fixture.max_claims).then_some(fit);
    Ok(Capacity {
        places,
        node,
        together,
    })
}
