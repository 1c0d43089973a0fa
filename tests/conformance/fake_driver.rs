//! A configurable driver that records its calls.
//!
//! By default it behaves like the test driver of the upstream e2e tests: a number of claims per node, idempotent by UID.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use anyhow::bail;
use drayman::api::resource::{AllocationResult, Pod, ResourceClaim, ResourceClass, ResourceHandle};
use drayman::driver::{
    CapacityCause, CapacityChange, ClaimRequest, Deallocation, Driver, DriverError, Finding, Observation,
    UnsuitableNodes,
};
use futures::{Stream, StreamExt as _};
use serde_json::json;
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_stream::wrappers::WatchStream;

use crate::call::{Call, Request, RequestedClaim, is_fence, name, summaries};
use crate::harness::TIMEOUT;

/// The reaction of the driver to a call.
#[derive(Clone)]
pub(crate) enum Action {
    /// Performs the request.
    Proceed,
    /// Performs the request after [`FakeDriver::resume_calls`].
    Wait,
    /// Never answers.
    Hang,
    Panic,
    Fail(DriverError),
    /// Allocates all claims except the one of this name.
    FailOne(&'static str, DriverError),
    /// Reports these nodes as unsuitable for the claims of these names.
    Unsuitable(Vec<(&'static str, Vec<String>)>),
    /// Returns no results.
    AnswerForNone,
    /// Uses this handle data for the claim of this name.
    HandleData(&'static str, String),
}

type Rule = Arc<dyn Fn(&Request) -> Action + Send + Sync>;

/// A driver under test control. Clones share their state.
#[derive(Clone)]
pub(crate) struct FakeDriver(Arc<Inner>);

struct Inner {
    name: String,
    state: Mutex<State>,
    changed: watch::Sender<()>,
    resumed: watch::Sender<bool>,
    ready: watch::Sender<bool>,
    capacity: watch::Sender<CapacityCause>,
}

#[derive(Default)]
struct State {
    calls: Vec<Call>,
    observed: Vec<Observation>,
    rule: Option<Rule>,
    nodes: Option<BTreeMap<String, usize>>,
    shareable: bool,
    held: BTreeMap<String, Held>,
    allocations: usize,
    deallocations: usize,
}

struct Held {
    node: String,
    recorded: bool,
    /// False for claims of [`Fixture::fence`](crate::fixture::Fixture::fence).
    counts: bool,
}

impl FakeDriver {
    /// A driver without node limits.
    pub(crate) fn new(name: &str) -> Self {
        Self(Arc::new(Inner {
            name: name.to_owned(),
            state: Mutex::default(),
            changed: watch::Sender::default(),
            resumed: watch::Sender::new(false),
            ready: watch::Sender::new(true),
            capacity: watch::Sender::new(CapacityCause::Freed),
        }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().expect("the lock is not poisoned")
    }

    /// Limits the number of claims per node; other nodes have no capacity.
    pub(crate) fn nodes(&self, nodes: impl IntoIterator<Item = (impl Into<String>, usize)>) {
        let nodes = nodes.into_iter().map(|(name, count)| (name.into(), count));
        self.state().nodes = Some(nodes.collect());
    }

    /// Makes later allocations shareable.
    pub(crate) fn shareable(&self) {
        self.state().shareable = true;
    }

    /// Sets the reaction to later calls.
    pub(crate) fn rule(&self, rule: impl Fn(&Request) -> Action + Send + Sync + 'static) {
        self.state().rule = Some(Arc::new(rule));
    }

    /// Sets the reaction to later calls of one kind; others proceed.
    pub(crate) fn on(&self, which: impl Fn(&Request) -> bool + Send + Sync + 'static, action: Action) {
        self.rule(move |request| {
            if which(request) {
                action.clone()
            } else {
                Action::Proceed
            }
        });
    }

    /// Restores the default behaviour.
    pub(crate) fn clear_rule(&self) {
        self.state().rule = None;
    }

    /// Lets calls in [`Action::Wait`] continue.
    pub(crate) fn resume_calls(&self) {
        self.0.resumed.send_replace(true);
    }

    /// Makes later calls in [`Action::Wait`] wait again.
    pub(crate) fn hold_calls(&self) {
        self.0.resumed.send_replace(false);
    }

    /// Makes the driver unready.
    pub(crate) fn set_unready(&self) {
        self.0.ready.send_replace(false);
    }

    /// Makes the driver ready.
    pub(crate) fn set_ready(&self) {
        self.0.ready.send_replace(true);
    }

    /// The node of each allocation that the driver holds, without fences.
    pub(crate) fn held(&self) -> Vec<String> {
        let state = self.state();
        let held = state.held.values().filter(|held| held.counts);
        held.map(|held| held.node.clone()).collect()
    }

    /// Sends a capacity change.
    pub(crate) fn report_capacity(&self, cause: CapacityCause) {
        self.0.capacity.send_replace(cause);
    }

    pub(crate) fn calls(&self) -> Vec<Call> {
        self.state().calls.clone()
    }

    /// The calls so far as verb and claim names, without parameter calls.
    pub(crate) fn call_summaries(&self) -> Vec<String> {
        summaries(&self.state().calls)
    }

    pub(crate) fn observed(&self) -> Vec<Observation> {
        self.state().observed.clone()
    }

    /// The numbers of allocations and deallocations that had an effect.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let state = self.state();
        (state.allocations, state.deallocations)
    }

    /// Waits for these numbers of allocations and deallocations.
    pub(crate) async fn wait_for_counts(&self, counts: (usize, usize)) -> anyhow::Result<()> {
        let expected = format!("allocate and release {counts:?} claims");
        self.wait_for(&expected, |_| self.counts() == counts)
            .await
            .map(drop)
    }

    pub(crate) async fn wait_for(
        &self,
        expected: &str,
        condition: impl Fn(&[Call]) -> bool,
    ) -> anyhow::Result<Vec<Call>> {
        let mut changed = self.0.changed.subscribe();
        let met = async {
            loop {
                changed.borrow_and_update();
                let calls = self.calls();
                if condition(&calls) {
                    return calls;
                }
                if changed.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            }
        };
        match timeout(TIMEOUT, met).await {
            Ok(calls) => Ok(calls),
            Err(_) => bail!(
                "expected the driver to be asked to {expected}, found: {:#?}",
                self.call_summaries()
            ),
        }
    }

    /// Waits until the call summaries end with these.
    pub(crate) async fn wait_for_last_calls(&self, end: &[&str]) -> anyhow::Result<Vec<Call>> {
        self.wait_for(&format!("{end:?}"), |calls| {
            let summaries = summaries(calls);
            summaries.len() >= end.len() && summaries[summaries.len() - end.len()..] == *end
        })
        .await
    }

    #[expect(clippy::panic, reason = "tests need a panicking driver")]
    async fn begin(&self, request: Request) -> Result<(Ended, Action), DriverError> {
        if request.is_fence() {
            return Ok((Ended(None), Action::Proceed));
        }
        let (action, number) = {
            let mut state = self.state();
            let action = state.rule.as_ref().map_or(Action::Proceed, |rule| rule(&request));
            state.calls.push(Call {
                request,
                began: Instant::now(),
                ended: None,
            });
            // Under the same lock, so that no other call begins in between.
            (action, state.calls.len() - 1)
        };
        let ended = Ended(Some((self.clone(), number)));
        self.0.changed.send_replace(());
        match action {
            Action::Fail(error) => Err(error),
            Action::Hang => std::future::pending().await,
            Action::Panic => panic!("requested by the test"),
            Action::Wait => {
                let mut resumed = self.0.resumed.subscribe();
                let _ = resumed.wait_for(|resumed| *resumed).await;
                Ok((ended, Action::Proceed))
            }
            action => Ok((ended, action)),
        }
    }

    fn free(&self, uid: &str) {
        let freed = {
            let mut state = self.state();
            let freed = state.held.remove(uid);
            state.deallocations += usize::from(freed.as_ref().is_some_and(|held| held.counts));
            freed.is_some()
        };
        if freed {
            self.report_capacity(CapacityCause::Freed);
            self.0.changed.send_replace(());
        }
    }
}

/// Records the end of a call on drop.
struct Ended(Option<(FakeDriver, usize)>);

impl Drop for Ended {
    fn drop(&mut self) {
        if let Some((driver, index)) = &self.0 {
            if let Some(call) = driver.state().calls.get_mut(*index) {
                call.ended = Some(Instant::now());
            }
            driver.0.changed.send_replace(());
        }
    }
}

fn requested(claims: &[ClaimRequest<FakeDriver>]) -> Vec<RequestedClaim> {
    claims
        .iter()
        .map(|request| RequestedClaim {
            entry: request.pod_claim_name.clone(),
            claim: request.claim.clone(),
            class: request.class.clone(),
        })
        .collect()
}

fn uid(claim: &ResourceClaim) -> String {
    claim.metadata.uid.clone().unwrap_or_default()
}

impl State {
    fn used(&self, node: &str) -> usize {
        self.held.values().filter(|held| held.node == node).count()
    }

    fn has_room(&self, node: &str, count: usize) -> bool {
        let fits = |nodes: &BTreeMap<String, usize>| {
            nodes
                .get(node)
                .is_some_and(|most| self.used(node) + count <= *most)
        };
        node == "fence" || self.nodes.as_ref().is_none_or(fits)
    }

    fn allocate(
        &mut self,
        driver: &str,
        claim: &ResourceClaim,
        node: Option<&str>,
    ) -> Result<AllocationResult, DriverError> {
        let uid = uid(claim);
        let node = match (self.held.get(&uid), node) {
            (Some(held), _) => held.node.clone(),
            (None, Some(node)) => node.to_owned(),
            (None, None) => {
                let nodes = self.nodes.iter().flat_map(BTreeMap::keys);
                let free = nodes.into_iter().find(|node| self.has_room(node, 1));
                free.cloned().unwrap_or_default()
            }
        };
        if !self.held.contains_key(&uid) {
            if !self.has_room(&node, 1) {
                return Err(DriverError::retry(
                    "Exhausted",
                    format!("resources exhausted on node {node:?}"),
                ));
            }
            let counts = !is_fence(claim);
            self.allocations += usize::from(counts);
            let held = Held {
                node: node.clone(),
                recorded: false,
                counts,
            };
            self.held.insert(uid, held);
        }
        let available = json!({ "nodeSelectorTerms": [{ "matchFields": [
            { "key": "metadata.name", "operator": "In", "values": [node] }] }] });
        let available_on_nodes = serde_json::from_value(available)
            .ok()
            .filter(|_| !node.is_empty());
        Ok(AllocationResult {
            resource_handles: vec![ResourceHandle {
                driver_name: Some(driver.to_owned()),
                data: Some(node),
                structured_data: None,
            }],
            available_on_nodes,
            shareable: self.shareable,
        })
    }
}

impl Driver for FakeDriver {
    type ClassParameters = ();
    type ClaimParameters = ();

    fn name(&self) -> &str {
        &self.0.name
    }

    async fn ready(&self) -> Result<(), DriverError> {
        let mut ready = self.0.ready.subscribe();
        let _ = ready.wait_for(|ready| *ready).await;
        Ok(())
    }

    async fn class_parameters(&self, class: &ResourceClass) -> Result<(), DriverError> {
        self.begin(Request::Class(Arc::new(class.clone())))
            .await
            .map(drop)
    }

    async fn claim_parameters(
        &self,
        claim: &ResourceClaim,
        _: &ResourceClass,
        (): &(),
    ) -> Result<(), DriverError> {
        self.begin(Request::Claim(Arc::new(claim.clone())))
            .await
            .map(drop)
    }

    async fn unsuitable_nodes(
        &self,
        pod: &Pod,
        claims: &[ClaimRequest<Self>],
        nodes: &[String],
    ) -> Result<Vec<UnsuitableNodes>, DriverError> {
        let request = Request::Evaluate {
            pod: pod.metadata.name.clone().unwrap_or_default(),
            claims: requested(claims),
            nodes: nodes.to_vec(),
        };
        let (_ended, action) = self.begin(request).await?;
        let unsuitable: Vec<(&str, Vec<String>)> = match action {
            Action::AnswerForNone => return Ok(Vec::new()),
            Action::Unsuitable(unsuitable) => unsuitable,
            _ => {
                let state = self.state();
                let unsuitable = nodes.iter().filter(|node| !state.has_room(node, claims.len()));
                let unsuitable: Vec<String> = unsuitable.cloned().collect();
                claims
                    .iter()
                    .map(|request| (name(&request.claim), unsuitable.clone()))
                    .collect()
            }
        };
        let of_request = |request: &ClaimRequest<Self>| {
            let of_claim = unsuitable
                .iter()
                .filter(|(claim, _)| *claim == name(&request.claim));
            let nodes = of_claim.flat_map(|(_, nodes)| nodes);
            nodes.map(|node| (node.clone(), "full".to_owned())).collect()
        };
        Ok(claims.iter().map(of_request).collect())
    }

    async fn allocate(
        &self,
        claims: &[ClaimRequest<Self>],
        node: Option<&str>,
    ) -> Result<Vec<AllocationResult>, DriverError> {
        let request = Request::Allocate {
            claims: requested(claims),
            node: node.map(str::to_owned),
        };
        let (_ended, action) = self.begin(request).await?;
        let mut state = self.state();
        let allocate = |request: &ClaimRequest<Self>| {
            let claim = &request.claim;
            match &action {
                Action::FailOne(which, error) if *which == name(claim) => {
                    return Err(error.clone().for_claim(request.uid()));
                }
                _ => {}
            }
            let mut allocation = state.allocate(&self.0.name, claim, node)?;
            if let Action::HandleData(which, data) = &action
                && *which == name(claim)
            {
                allocation.resource_handles[0].data = Some(data.clone());
            }
            Ok(allocation)
        };
        match &action {
            Action::AnswerForNone => Ok(Vec::new()),
            _ => claims.iter().map(allocate).collect(),
        }
    }

    async fn deallocate(&self, deallocation: Deallocation<'_>) -> Result<(), DriverError> {
        let claim = deallocation.claim;
        let request = Request::Deallocate {
            claim: Arc::new(claim.clone()),
            allocation: deallocation.allocation.cloned(),
        };
        let (_ended, _) = self.begin(request).await?;
        let recorded = self
            .state()
            .held
            .get(&uid(claim))
            .is_some_and(|held| held.recorded);
        if !recorded {
            self.free(&uid(claim));
        }
        Ok(())
    }

    async fn observe(&self, observation: &Observation) -> Vec<Finding> {
        self.state().observed.push(observation.clone());
        self.0.changed.send_replace(());
        if let Observation::Gone { uid } = observation {
            self.free(uid);
        }
        for holding in observation.holdings() {
            let node = holding.allocation(&self.0.name).map(|allocation| {
                allocation
                    .resource_handles
                    .first()
                    .and_then(|handle| handle.data.clone())
            });
            if let Some(node) = node {
                let held = Held {
                    node: node.unwrap_or_default(),
                    recorded: true,
                    counts: !is_fence(&holding.claim),
                };
                self.state().held.insert(holding.uid().to_owned(), held);
                continue;
            }
            let recorded = self
                .state()
                .held
                .get(holding.uid())
                .is_some_and(|held| held.recorded);
            if recorded {
                self.free(holding.uid());
            }
        }
        Vec::new()
    }

    fn capacity_changes(&self) -> impl Stream<Item = CapacityChange> + Send + 'static {
        WatchStream::from_changes(self.0.capacity.subscribe()).map(CapacityChange::new)
    }
}
