//! A driver that does what a test says and remembers what it was asked.
//!
//! By itself it behaves as the test driver of upstream's end-to-end tests does: so many claims per node, idempotent by uid.

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

use crate::call::{Asked, Call, What, is_fence, name, story};
use crate::harness::PATIENCE;

/// What the driver shall do.
pub(crate) enum Act {
    /// What it was asked.
    Go,
    /// What it was asked, when the script is opened.
    Wait,
    /// Nothing, ever.
    Hang,
    Panic,
    Fail(DriverError),
    /// Allocate all but the claim of this name.
    FailOne(&'static str, DriverError),
    /// Find these nodes unsuitable for the claims of these names.
    Unsuitable(Vec<(&'static str, Vec<String>)>),
    /// Answer for no claim at all.
    Short,
    /// Allocate with this as the data of the handle of the claim of this name.
    Data(&'static str, String),
}

type Rule = Arc<dyn Fn(&What) -> Act + Send + Sync>;

/// The driver. Clones are the same driver.
#[derive(Clone)]
pub(crate) struct Script(Arc<Inner>);

struct Inner {
    name: String,
    state: Mutex<State>,
    changed: watch::Sender<()>,
    open: watch::Sender<bool>,
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
    /// Whether it counts: fences do not.
    counts: bool,
}

impl Script {
    /// A driver for which every node suits and nothing is ever full.
    pub(crate) fn new(name: &str) -> Self {
        Self(Arc::new(Inner {
            name: name.to_owned(),
            state: Mutex::default(),
            changed: watch::Sender::default(),
            open: watch::Sender::new(false),
            ready: watch::Sender::new(true),
            capacity: watch::Sender::new(CapacityCause::Freed),
        }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().expect("no test panics with it")
    }

    /// From now on, so many claims fit on these nodes and none on others.
    pub(crate) fn nodes(&self, nodes: impl IntoIterator<Item = (impl Into<String>, usize)>) {
        let nodes = nodes.into_iter().map(|(name, count)| (name.into(), count));
        self.state().nodes = Some(nodes.collect());
    }

    /// What is allocated from now on can be used by several pods at once.
    pub(crate) fn shareable(&self) {
        self.state().shareable = true;
    }

    /// What to do from now on.
    pub(crate) fn rule(&self, rule: impl Fn(&What) -> Act + Send + Sync + 'static) {
        self.state().rule = Some(Arc::new(rule));
    }

    /// Back to doing what is asked.
    pub(crate) fn behave(&self) {
        self.state().rule = None;
    }

    /// Lets the calls go on that wait.
    pub(crate) fn open(&self) {
        self.0.open.send_replace(true);
    }

    /// Makes later calls wait again.
    pub(crate) fn close(&self) {
        self.0.open.send_replace(false);
    }

    /// From now on it is not ready.
    pub(crate) fn start_unready(&self) {
        self.0.ready.send_replace(false);
    }

    /// It is ready.
    pub(crate) fn get_ready(&self) {
        self.0.ready.send_replace(true);
    }

    /// The nodes for which it still holds something, fences aside.
    pub(crate) fn held(&self) -> Vec<String> {
        let state = self.state();
        let held = state.held.values().filter(|held| held.counts);
        held.map(|held| held.node.clone()).collect()
    }

    /// Says that something has become possible.
    pub(crate) fn announce(&self, cause: CapacityCause) {
        self.0.capacity.send_replace(cause);
    }

    /// The calls so far.
    pub(crate) fn calls(&self) -> Vec<Call> {
        self.state().calls.clone()
    }

    /// What it was asked so far: one word and the names of the claims for each call, without questions about parameters.
    pub(crate) fn story(&self) -> Vec<String> {
        story(&self.state().calls)
    }

    /// What it was told so far.
    pub(crate) fn observed(&self) -> Vec<Observation> {
        self.state().observed.clone()
    }

    /// How many claims were really allocated and really given back.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let state = self.state();
        (state.allocations, state.deallocations)
    }

    /// Waits until so many claims were really allocated and really given back.
    pub(crate) async fn until_counts(&self, counts: (usize, usize)) -> anyhow::Result<()> {
        let what = format!("allocate and give back {counts:?} claims");
        self.until(&what, |_| self.counts() == counts).await.map(drop)
    }

    /// Waits until the calls meet a condition.
    pub(crate) async fn until(
        &self,
        what: &str,
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
        match timeout(PATIENCE, met).await {
            Ok(calls) => Ok(calls),
            Err(_) => bail!("the driver was not asked to {what}, but: {:#?}", self.story()),
        }
    }

    /// Waits until this is the end of the story.
    pub(crate) async fn until_story(&self, end: &[&str]) -> anyhow::Result<Vec<Call>> {
        self.until(&format!("{end:?}"), |calls| {
            let story = story(calls);
            story.len() >= end.len() && story[story.len() - end.len()..] == *end
        })
        .await
    }

    #[expect(clippy::panic, reason = "a driver that panics is what is tested")]
    async fn begin(&self, what: What) -> Result<(Ended, Act), DriverError> {
        if what.is_fence() {
            return Ok((Ended(None), Act::Go));
        }
        let (act, number) = {
            let mut state = self.state();
            let act = state.rule.as_ref().map_or(Act::Go, |rule| rule(&what));
            state.calls.push(Call {
                what,
                began: Instant::now(),
                ended: None,
            });
            // Before another call can begin.
            (act, state.calls.len() - 1)
        };
        let ended = Ended(Some((self.clone(), number)));
        self.0.changed.send_replace(());
        match act {
            Act::Fail(error) => Err(error),
            Act::Hang => std::future::pending().await,
            Act::Panic => panic!("as the script says"),
            Act::Wait => {
                let mut open = self.0.open.subscribe();
                let _ = open.wait_for(|open| *open).await;
                Ok((ended, Act::Go))
            }
            act => Ok((ended, act)),
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
            self.announce(CapacityCause::Freed);
            self.0.changed.send_replace(());
        }
    }
}

/// Notes the end of a call when it is dropped.
struct Ended(Option<(Script, usize)>);

impl Drop for Ended {
    fn drop(&mut self) {
        if let Some((script, index)) = &self.0 {
            if let Some(call) = script.state().calls.get_mut(*index) {
                call.ended = Some(Instant::now());
            }
            script.0.changed.send_replace(());
        }
    }
}

fn asked(claims: &[ClaimRequest<Script>]) -> Vec<Asked> {
    claims
        .iter()
        .map(|request| Asked {
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

impl Driver for Script {
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
        self.begin(What::Class(Arc::new(class.clone()))).await.map(drop)
    }

    async fn claim_parameters(
        &self,
        claim: &ResourceClaim,
        _: &ResourceClass,
        (): &(),
    ) -> Result<(), DriverError> {
        self.begin(What::Claim(Arc::new(claim.clone()))).await.map(drop)
    }

    async fn unsuitable_nodes(
        &self,
        pod: &Pod,
        claims: &[ClaimRequest<Self>],
        nodes: &[String],
    ) -> Result<Vec<UnsuitableNodes>, DriverError> {
        let what = What::Judge {
            pod: pod.metadata.name.clone().unwrap_or_default(),
            claims: asked(claims),
            nodes: nodes.to_vec(),
        };
        let (_ended, act) = self.begin(what).await?;
        let bad: Vec<(&str, Vec<String>)> = match act {
            Act::Short => return Ok(Vec::new()),
            Act::Unsuitable(bad) => bad,
            _ => {
                let state = self.state();
                let bad = nodes.iter().filter(|node| !state.has_room(node, claims.len()));
                let bad: Vec<String> = bad.cloned().collect();
                claims
                    .iter()
                    .map(|request| (name(&request.claim), bad.clone()))
                    .collect()
            }
        };
        let unsuitable = |request: &ClaimRequest<Self>| {
            let of_claim = bad.iter().filter(|(claim, _)| *claim == name(&request.claim));
            let nodes = of_claim.flat_map(|(_, nodes)| nodes);
            nodes.map(|node| (node.clone(), "full".to_owned())).collect()
        };
        Ok(claims.iter().map(unsuitable).collect())
    }

    async fn allocate(
        &self,
        claims: &[ClaimRequest<Self>],
        node: Option<&str>,
    ) -> Result<Vec<AllocationResult>, DriverError> {
        let what = What::Allocate {
            claims: asked(claims),
            node: node.map(str::to_owned),
        };
        let (_ended, act) = self.begin(what).await?;
        let mut state = self.state();
        let allocate = |request: &ClaimRequest<Self>| {
            let claim = &request.claim;
            match &act {
                Act::FailOne(which, error) if *which == name(claim) => {
                    return Err(error.clone().for_claim(request.uid()));
                }
                _ => {}
            }
            let mut allocation = state.allocate(&self.0.name, claim, node)?;
            if let Act::Data(which, data) = &act
                && *which == name(claim)
            {
                allocation.resource_handles[0].data = Some(data.clone());
            }
            Ok(allocation)
        };
        match &act {
            Act::Short => Ok(Vec::new()),
            _ => claims.iter().map(allocate).collect(),
        }
    }

    async fn deallocate(&self, deallocation: Deallocation<'_>) -> Result<(), DriverError> {
        let claim = deallocation.claim;
        let what = What::Deallocate {
            claim: Arc::new(claim.clone()),
            allocation: deallocation.allocation.cloned(),
        };
        let (_ended, _) = self.begin(what).await?;
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
