//! A small conforming driver that can break one rule.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use drayman::api::resource::{AllocationResult, Pod, ResourceClaim, ResourceClass};
use drayman::driver::{
    CapacityCause, CapacityChange, ClaimRequest, Deallocation, Driver, DriverError, Finding, Observation,
    UnsuitableNodes,
};
use drayman::testkit::{Environment, Rule};
use futures::{Stream, StreamExt as _};
use tokio::sync::watch;
use tokio_stream::wrappers::WatchStream;

/// Number of devices on each node.
const DEVICES: usize = 2;

pub(crate) struct TestDriver {
    broken: Option<Rule>,
    /// A directory that survives the process.
    directory: PathBuf,
    number: usize,
    state: Mutex<State>,
    freed: watch::Sender<()>,
}

#[derive(Default)]
struct State {
    held: BTreeMap<String, Held>,
    /// Number of devices leaked by defects.
    leaked: usize,
    read: usize,
    released: BTreeSet<String>,
}

struct Held {
    node: String,
    recorded: bool,
}

type Request = ClaimRequest<TestDriver>;

impl TestDriver {
    pub(crate) fn new(environment: &Environment, broken: Option<Rule>) -> Self {
        let directory = environment.directory().to_owned();
        let number = std::fs::read_dir(&directory).map_or(0, Iterator::count);
        if broken == Some(Rule::StableName) {
            std::fs::write(directory.join(format!("instance-{number}")), "").expect("a file");
        }
        let mut state = State::default();
        if broken == Some(Rule::LostAllocationIsReleased) {
            for uid in files(&directory) {
                let (node, recorded) = ("node-a".to_owned(), false);
                state.held.insert(uid, Held { node, recorded });
            }
        }
        Self {
            broken,
            directory,
            number,
            state: Mutex::new(state),
            freed: watch::Sender::default(),
        }
    }

    fn breaks(&self, rule: Rule) -> bool {
        self.broken == Some(rule)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn keeps_files(&self) -> bool {
        matches!(
            self.broken,
            Some(Rule::LostAllocationIsReleased | Rule::SurvivesCrash)
        )
    }

    fn allocate_one(
        &self,
        state: &mut State,
        request: &Request,
        node: Option<&str>,
    ) -> Result<AllocationResult, DriverError> {
        let uid = request.uid();
        let devices = DEVICES - usize::from(self.breaks(Rule::SuitableIsAllocatable));
        if self.breaks(Rule::SurvivesSlowCall) && state.released.contains(uid) {
            return Err(DriverError::invalid("Deallocated", "this claim was deallocated"));
        }
        if self.breaks(Rule::SurvivesCrash)
            && !state.held.contains_key(uid)
            && files(&self.directory).contains(uid)
        {
            return Err(DriverError::invalid(
                "AllocatedAlready",
                "another process has allocated it",
            ));
        }
        if !state.held.contains_key(uid) {
            let candidates = node.map_or_else(|| vec!["node-a", "node-b"], |node| vec![node]);
            let free = candidates.into_iter().find(|node| state.on(node) < devices);
            let Some(node) = free else {
                if self.breaks(Rule::FailedAllocateIsReleased) {
                    state.leaked += 1;
                }
                let reason = if self.breaks(Rule::ReadableErrors) {
                    "it is full"
                } else {
                    "NoSuitableDevice"
                };
                let make = if self.breaks(Rule::FullIsUnsuitable) {
                    DriverError::invalid
                } else {
                    DriverError::retry
                };
                return Err(make(reason, "all devices are held".to_owned()));
            };
            let (node, recorded) = (node.to_owned(), false);
            state.held.insert(uid.to_owned(), Held { node, recorded });
            if self.keeps_files() {
                std::fs::write(self.directory.join(uid), "").expect("a file");
            }
        }
        state.read += 1;
        let node = state
            .held
            .get(uid)
            .map(|held| held.node.clone())
            .unwrap_or_default();
        let data = match self.broken {
            Some(Rule::RecordableAllocation) => "x".repeat(17 << 10),
            Some(Rule::AllocateIsIdempotent) => state.read.to_string(),
            _ => uid.to_owned(),
        };
        let node = if self.breaks(Rule::ReachableAllocation) {
            "elsewhere".to_owned()
        } else {
            node
        };
        Ok(AllocationResult::new(self.name(), data).on_nodes([node]))
    }
}

impl State {
    fn on(&self, node: &str) -> usize {
        let held = self.held.values().filter(|held| held.node == node).count();
        // Leaked devices are on the first node.
        held + if node == "node-a" { self.leaked } else { 0 }
    }
}

fn files(directory: &PathBuf) -> BTreeSet<String> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect()
}

impl Driver for TestDriver {
    type ClassParameters = ();
    type ClaimParameters = ();

    fn name(&self) -> &'static str {
        if self.breaks(Rule::StableName) && self.number % 2 == 1 {
            "renamed.example.com"
        } else {
            "driver.example.com"
        }
    }

    async fn ready(&self) -> Result<(), DriverError> {
        if self.breaks(Rule::BecomesReady) {
            std::future::pending::<()>().await;
        }
        Ok(())
    }

    async fn class_parameters(&self, _: &ResourceClass) -> Result<(), DriverError> {
        let mut state = self.state();
        state.read += 1;
        if self.breaks(Rule::ParametersAreRead) && state.read > 2 {
            return Err(DriverError::retry(
                "ReadAlready",
                "the parameters were read before",
            ));
        }
        Ok(())
    }

    async fn claim_parameters(
        &self,
        claim: &ResourceClaim,
        _: &ResourceClass,
        (): &(),
    ) -> Result<(), DriverError> {
        if self.breaks(Rule::ServesPods) && claim.metadata.owner_references.is_some() {
            return Err(DriverError::invalid(
                "OfATemplate",
                "template claims are not supported",
            ));
        }
        Ok(())
    }

    async fn unsuitable_nodes(
        &self,
        _: &Pod,
        claims: &[Request],
        nodes: &[String],
    ) -> Result<Vec<UnsuitableNodes>, DriverError> {
        let mut state = self.state();
        if self.breaks(Rule::EvaluationReservesNothing) {
            state.leaked += 1;
        }
        let mut unsuitable = UnsuitableNodes::new();
        for node in nodes {
            let held = state.on(node);
            if held + claims.len() > DEVICES || !node.starts_with("node-") {
                let reason = format!("{held} of {DEVICES} held");
                let reason = if self.breaks(Rule::FullIsUnsuitable) {
                    String::new()
                } else {
                    reason
                };
                unsuitable.insert(node.clone(), reason);
            }
        }
        let count = if self.breaks(Rule::OneEntryPerClaim) {
            1
        } else {
            claims.len()
        };
        Ok(vec![unsuitable; count])
    }

    async fn allocate(
        &self,
        claims: &[Request],
        node: Option<&str>,
    ) -> Result<Vec<AllocationResult>, DriverError> {
        match self.broken {
            Some(Rule::ReturnsInTime) => std::future::pending().await,
            Some(Rule::NoPanic) => panic!("injected defect"),
            Some(Rule::CapacityIsKept) => {
                let free = node.is_some_and(|node| self.state().on(node) < DEVICES);
                // Concurrent calls read the state meanwhile.
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
                if let (true, Some(node), [request]) = (free, node, claims) {
                    let (node, recorded) = (node.to_owned(), false);
                    self.state()
                        .held
                        .insert(request.uid().to_owned(), Held { node, recorded });
                }
            }
            Some(Rule::DroppedAllocateIsReleased) => {
                self.state().leaked += 1;
                tokio::task::yield_now().await;
                self.state().leaked -= 1;
            }
            _ => {}
        }
        let mut state = self.state();
        let mut results: Vec<_> = claims
            .iter()
            .map(|request| self.allocate_one(&mut state, request, node))
            .collect::<Result<_, _>>()?;
        if self.breaks(Rule::OneAllocationPerClaim) && results.len() > 1 {
            results.pop();
        }
        Ok(results)
    }

    async fn deallocate(&self, deallocation: Deallocation<'_>) -> Result<(), DriverError> {
        let mut state = self.state();
        let uid = deallocation.uid();
        let recorded = state.held.get(uid).map(|held| held.recorded);
        if self.breaks(Rule::DeallocateIsIdempotent) && recorded.is_none() {
            return Err(DriverError::retry("NeverAllocated", "this claim holds nothing"));
        }
        if self.breaks(Rule::SurvivesFailedCall) && !state.released.insert(uid.to_owned()) {
            return Err(DriverError::retry(
                "AlreadyDeallocated",
                "it was already deallocated",
            ));
        }
        if self.breaks(Rule::LostAllocationIsReleased) && self.number > 0 {
            return Ok(());
        }
        let keeps = self.breaks(Rule::UnrecordedIsReleased) && deallocation.allocation.is_none();
        if (recorded == Some(false) && !keeps)
            || (recorded == Some(true) && self.breaks(Rule::RecordedIsHeld))
        {
            state.held.remove(uid);
            state.released.insert(uid.to_owned());
            if self.keeps_files() {
                let _ = std::fs::remove_file(self.directory.join(uid));
            }
            self.freed.send_replace(());
        }
        Ok(())
    }

    async fn observe(&self, observation: &Observation) -> Vec<Finding> {
        let mut state = self.state();
        if let Observation::All(all) = observation {
            let known: BTreeSet<&str> = all.iter().map(drayman::driver::Holding::uid).collect();
            state.held.retain(|uid, _| known.contains(uid.as_str()));
            if self.breaks(Rule::StateFromClaims) {
                return Vec::new();
            }
        }
        let mut findings = Vec::new();
        for holding in observation.holdings() {
            let uid = holding.uid();
            match holding.allocation(self.name()) {
                Some(allocation) => {
                    let nodes = serde_json::to_value(&allocation.available_on_nodes).unwrap_or_default();
                    let node = nodes["nodeSelectorTerms"][0]["matchFields"][0]["values"][0].as_str();
                    let (node, recorded) = (node.unwrap_or_default().to_owned(), true);
                    state.held.insert(uid.to_owned(), Held { node, recorded });
                    if self.breaks(Rule::NoFalseFinding) {
                        findings.push(Finding::new(&holding.claim, "HoldingUnreadable", "unknown"));
                    }
                }
                None if state.held.get(uid).is_some_and(|held| held.recorded)
                    && !self.breaks(Rule::ObservedIsReleased) =>
                {
                    state.held.remove(uid);
                    self.freed.send_replace(());
                }
                None => {}
            }
        }
        if let Observation::Gone { uid } = observation {
            state.held.remove(uid);
            self.freed.send_replace(());
        }
        findings
    }

    fn capacity_changes(&self) -> impl Stream<Item = CapacityChange> + Send + 'static {
        let ends = self.breaks(Rule::FreedWakes);
        WatchStream::from_changes(self.freed.subscribe())
            .map(|()| CapacityChange::new(CapacityCause::Freed))
            .take(if ends { 0 } else { usize::MAX })
    }
}
