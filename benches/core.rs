//! Cost of decisions without an API server: `cargo bench --bench core -- [SCENARIO]...`.
//!
//! Prints each figure with its goal. Times are per operation: the median and the 99th percentile.

#![expect(clippy::unwrap_used, reason = "a benchmark exits on any error")]

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use drayman::api::crd::{DeviceClaimParametersSpec, DeviceClassParametersSpec, NodeInventory};
use drayman::api::resource::{AllocationResult, Pod, PodSchedulingContext, ResourceClaim, ResourceClass};
use drayman::core::allocation::allocator::{AllocateOutcome, DeviceAllocator};
use drayman::core::allocation::evaluate::RequestedClaim;
use drayman::core::allocation::inventory::NodeInfo;
use drayman::core::allocation::parameters::{ClaimParameters, ClassParameters, DeviceRequests};
use drayman::core::allocation::search::{CALL_WORK_MAX, WorkBudget};
use drayman::core::claims::{
    Answer, ClaimWrite, Command, ControllerState, DriverRequest, Event, Moment, ObjectKey, Outcome, Settings,
};
use drayman::driver::{CapacityCause, CapacityChange, UnsuitableNodes};
use serde_json::{Value, json};

#[path = "figures/mod.rs"]
mod figures;
#[path = "core/hostile.rs"]
mod hostile;
#[path = "core/selectors.rs"]
mod selectors;

use figures::{Goal, Times, figure, heading, resident_kib};

const DRIVER: &str = "drayman.dev";

fn main() {
    // Memory first, so that no freed memory is reused.
    let scenarios: [(&str, fn()); 8] = [
        ("memory", memory),
        ("expressions", selectors::memory),
        ("evaluations", unsuitable),
        ("selectors", selectors::run),
        ("hostile", hostile::run),
        ("fits", fits),
        ("events", events),
        ("burst", burst),
    ];
    // Cargo passes `--bench` to every benchmark.
    let asked: Vec<String> = std::env::args()
        .skip(1)
        .filter(|word| word != "--bench")
        .collect();
    let known = |word: &String| scenarios.iter().any(|(name, _)| name == word);
    if !asked.iter().all(known) {
        let names = scenarios.map(|(name, _)| name).join("|");
        eprintln!("usage: cargo bench --bench core -- [{names}]...");
        std::process::exit(2);
    }
    heading("decisions");
    for (name, run) in scenarios {
        if asked.is_empty() || asked.iter().any(|word| word == name) {
            run();
        }
    }
}

// === devices ===

fn inventory(node: usize, devices: usize) -> NodeInfo {
    let devices: Vec<Value> = (0..devices)
        .map(|device| json!({ "name": format!("device-{device:03}"), "kind": "test", "mode": "claims" }))
        .collect();
    let inventory: NodeInventory = serde_json::from_value(json!({
        "apiVersion": "drayman.dev/v1alpha1", "kind": "NodeInventory",
        "metadata": { "name": format!("node-{node:05}.{DRIVER}") },
        "spec": {
            "driverName": DRIVER, "nodeName": node_name(node), "nodeUid": format!("uid-{node:05}"), "devices": devices,
        },
        "status": { "devices": 0, "unhealthy": 0, "conditions": [{ "type": "Ready", "status": "True",
            "reason": "Serving", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z" }] },
    }))
    .unwrap();
    NodeInfo::read(&inventory)
}

fn node_name(node: usize) -> String {
    format!("node-{node:05}")
}

fn allocator(nodes: usize, devices: usize) -> DeviceAllocator {
    let mut allocator = DeviceAllocator::new(DRIVER);
    allocator.replace_inventories(
        (0..nodes)
            .map(|node| (format!("{}.{DRIVER}", node_name(node)), inventory(node, devices)))
            .collect(),
    );
    allocator
}

fn device_requests(counts: &[u32]) -> DeviceRequests {
    let class = ClassParameters::check(
        "test",
        Ok(DeviceClassParametersSpec {
            kind: "test".to_owned(),
            ..DeviceClassParametersSpec::default()
        }),
    )
    .unwrap();
    let requests: Vec<Value> = counts
        .iter()
        .enumerate()
        .map(|(number, count)| json!({ "name": format!("r{number}"), "count": count }))
        .collect();
    let spec: DeviceClaimParametersSpec = serde_json::from_value(json!({ "requests": requests })).unwrap();
    let claim = ClaimParameters::check("default", "test", Ok(spec)).unwrap();
    DeviceRequests::new(&class, claim)
}

fn allocate(
    allocator: &mut DeviceAllocator,
    request: RequestedClaim<'_>,
    node: &str,
) -> Option<AllocateOutcome> {
    allocator.allocate_within(&[request], Some(node), &mut WorkBudget::new(CALL_WORK_MAX))
}

/// Unsuitable nodes for 1 device among 15,000 nodes, for the 128 nodes that the scheduler asks about at most.
fn unsuitable() {
    const NODES: usize = 15_000;
    for (what, held) in [("all free", 0), ("all but one node full", 8)] {
        let mut allocator = allocator(NODES, 8);
        let requests = device_requests(&[1]);
        // The potential nodes are spread over the inventory.
        let asked: Vec<String> = (0..128).map(|node| node_name(node * 117)).collect();
        for node in asked.iter().skip(1) {
            for device in 0..held {
                let claim = claim(&format!("{node}-{device}"));
                let request = RequestedClaim {
                    claim: &claim,
                    device_requests: &requests,
                    suitable_nodes: None,
                };
                allocate(&mut allocator, request, node).unwrap();
            }
        }
        let claim = claim("asked");
        let request = RequestedClaim {
            claim: &claim,
            device_requests: &requests,
            suitable_nodes: None,
        };
        let mut times = Times::default();
        for _ in 0..1000 {
            times.time(|| {
                let mut unsuitable = vec![BTreeMap::new()];
                let mut work = WorkBudget::new(CALL_WORK_MAX);
                allocator.unsuitable(&[request], &asked, &mut unsuitable, &mut work);
                unsuitable
            });
        }
        figure(
            &format!("unsuitable_nodes, 128 nodes of {NODES} with 8 devices each, {what}"),
            &times.to_string(),
            Goal::at_most(times.median(), Duration::from_millis(1)),
        );
    }
}

/// Requests that compete for the same devices are the worst case of the search.
fn fits() {
    for (what, counts) in [("one request", &[8][..]), ("eight requests", &[1; 8])] {
        let allocator = allocator(1, 64);
        let requests = device_requests(counts);
        let claim = claim("asked");
        let request = RequestedClaim {
            claim: &claim,
            device_requests: &requests,
            suitable_nodes: None,
        };
        let mut times = Times::default();
        for _ in 0..1000 {
            let mut allocator = allocator.clone();
            times.time(|| allocate(&mut allocator, request, "node-00000"));
        }
        figure(
            &format!("allocate 8 devices out of 64, {what}"),
            &times.to_string(),
            Goal::at_most(times.median(), Duration::from_millis(1)),
        );
    }
}

// === protocol ===

fn metadata(kind: &str, name: &str, version: u64) -> Value {
    json!({ "namespace": "default", "name": name, "uid": format!("{kind}-{name}"), "resourceVersion": version.to_string() })
}

fn owned(mut metadata: Value, pod: &str) -> Value {
    metadata["ownerReferences"] = json!([{ "apiVersion": "v1", "kind": "Pod", "name": pod,
        "uid": format!("pod-{pod}"), "controller": true, "blockOwnerDeletion": true }]);
    metadata
}

fn claim(name: &str) -> ResourceClaim {
    serde_json::from_value(json!({
        "metadata": metadata("claim", name, 1), "spec": { "resourceClassName": "test" },
    }))
    .unwrap()
}

/// A claim from a template, allocated and reserved. As in the controller's cache, without managed fields, without a map for one annotation,
/// and without spare capacity.
fn allocated(number: usize, version: u64) -> Arc<ResourceClaim> {
    let name = format!("bound-{number:05}");
    let mut metadata = owned(metadata("claim", &format!("{name}-device-abcde"), version), &name);
    metadata["finalizers"] = json!([format!("{DRIVER}/deletion-protection")]);
    metadata["creationTimestamp"] = json!("2026-01-01T00:00:00Z");
    let mut claim: ResourceClaim = serde_json::from_value(json!({
        "metadata": metadata,
        "spec": { "resourceClassName": "test", "allocationMode": "WaitForFirstConsumer" },
        "status": { "driverName": DRIVER, "reservedFor": [{ "resource": "pods", "name": name, "uid": format!("pod-{name}") }] },
    }))
    .unwrap();
    claim.status.allocation = Some(allocation(number));
    claim.pod_claim_name = Some("device".into());
    Arc::new(claim)
}

fn allocation(number: usize) -> AllocationResult {
    let (node, device) = (number / 8, number % 8);
    let handle = json!({ "version": 1, "claimUid": format!("claim-{number}"), "nodeName": node_name(node),
        "nodeUid": format!("uid-{node:05}"), "devices": [{ "request": "device", "device": format!("device-{device:03}") }] });
    serde_json::from_value(json!({
        "resourceHandles": [{ "driverName": DRIVER, "data": handle.to_string() }],
        "availableOnNodes": { "nodeSelectorTerms": [{ "matchFields": [
            { "key": "metadata.name", "operator": "In", "values": [node_name(node)] }] }] },
    }))
    .unwrap()
}

fn class() -> Arc<ResourceClass> {
    let class = json!({ "metadata": { "name": "test", "uid": "class", "resourceVersion": "1" }, "driverName": DRIVER });
    Arc::new(serde_json::from_value(class).unwrap())
}

fn pod(name: &str) -> Arc<Pod> {
    let pod = json!({
        "metadata": metadata("pod", name, 1),
        "spec": { "resourceClaims": [{ "name": "device", "source": { "resourceClaimName": name } }] },
    });
    Arc::new(serde_json::from_value(pod).unwrap())
}

fn context(name: &str, version: u64) -> Arc<PodSchedulingContext> {
    let nodes: Vec<String> = (0..128).map(node_name).collect();
    let context = json!({
        "metadata": owned(metadata("context", name, version), name),
        "spec": { "selectedNode": nodes[0], "potentialNodes": nodes },
    });
    Arc::new(serde_json::from_value(context).unwrap())
}

/// A runtime that answers every command from memory, to measure `core::claims` alone.
struct Runtime {
    world: ControllerState,
    answers: VecDeque<Event>,
    claims: BTreeMap<ObjectKey, ResourceClaim>,
    version: u64,
    /// Whether the driver finds all nodes unsuitable.
    full: bool,
    times: Times,
}

impl Runtime {
    /// A state with this many allocated claims, after its start.
    fn new(claims: usize) -> Self {
        let mut runtime = Self {
            world: ControllerState::new(Settings::new(DRIVER)),
            answers: VecDeque::new(),
            claims: BTreeMap::new(),
            version: 10,
            full: false,
            times: Times::default(),
        };
        runtime.apply(Event::Classes(vec![class()]));
        runtime.apply(Event::Claims(
            (0..claims).map(|number| allocated(number, 1)).collect(),
        ));
        runtime.apply(Event::Contexts(Vec::new()));
        runtime.run();
        assert!(runtime.world.is_ready());
        runtime.times = Times::default();
        runtime
    }

    fn next_version(&mut self) -> u64 {
        self.version += 1;
        self.version
    }

    /// Applies one event and decides, as the controller does.
    fn apply(&mut self, event: Event) {
        let now = Moment::default();
        let world = &mut self.world;
        let commands = self.times.time(|| {
            world.apply(event, now);
            world.decide(now)
        });
        for command in commands {
            self.answer(command);
        }
    }

    /// Answers commands until there are none.
    fn run(&mut self) {
        while let Some(event) = self.answers.pop_front() {
            self.apply(event);
        }
    }

    /// Queues the answers to a command.
    fn answer(&mut self, command: Command) {
        let (id, answer) = match command {
            Command::AwaitDriver => return self.answers.push_back(Event::DriverReady),
            Command::Observe(_) | Command::Report(_) => return,
            Command::ReadPod { id, key } => (id, Answer::PodRead(Ok(Some(pod(&key.name))))),
            Command::ReadClaim { id, key } => (
                id,
                Answer::ClaimRead(Ok(self.claims.get(&key).cloned().map(Arc::new))),
            ),
            Command::WriteClaim { id, key, write, .. } => {
                let version = self.next_version().to_string();
                let claim = self.claims.get_mut(&key).unwrap();
                claim.metadata.resource_version = Some(version);
                match write {
                    ClaimWrite::AddFinalizer { node } => {
                        claim.metadata.labels = Some([(format!("{DRIVER}/node"), node)].into());
                        claim.metadata.finalizers = Some(vec![format!("{DRIVER}/deletion-protection")]);
                    }
                    ClaimWrite::Allocate {
                        allocation,
                        reserved_for,
                        ..
                    } => {
                        claim.status.allocation = Some(allocation);
                        claim.status.driver_name = Some(DRIVER.to_owned());
                        claim.status.reserved_for = reserved_for.into_iter().collect();
                    }
                    ClaimWrite::ClearAllocation { .. }
                    | ClaimWrite::RollBackAllocation { .. }
                    | ClaimWrite::RemoveFinalizer { .. } => {
                        unreachable!("nothing is released here")
                    }
                }
                let claim = Arc::new(claim.clone());
                // The watch reports it too.
                self.answers.push_back(Event::Claim(claim.clone()));
                (id, Answer::ClaimWritten(Outcome::Done(claim)))
            }
            Command::WriteContext { id, key, entries, .. } => {
                let version = self.next_version();
                let mut context = context(&key.name, version);
                Arc::make_mut(&mut context).status.resource_claims = entries;
                self.answers.push_back(Event::Context(context.clone()));
                (id, Answer::ContextWritten(Outcome::Done(context)))
            }
            Command::CallDriver { id, request } => (id, self.drive(&request)),
        };
        self.answers.push_back(Event::Answer { id, answer });
    }

    fn drive(&self, request: &DriverRequest) -> Answer {
        match request {
            DriverRequest::UnsuitableNodes { claims, nodes, .. } => {
                let reasons = nodes
                    .iter()
                    .filter(|_| self.full)
                    .map(|node| (node.clone(), "8 of 8 held".to_owned()));
                let unsuitable: UnsuitableNodes = reasons.collect();
                Answer::Evaluated(Ok(vec![unsuitable; claims.len()]))
            }
            DriverRequest::Allocate { claims, .. } => {
                Answer::Allocated(Ok(vec![allocation(0); claims.len()]))
            }
            DriverRequest::Deallocate { .. } => Answer::Deallocated(Ok(())),
        }
    }

    /// Adds a pod with one claim and a context with a selected node.
    fn add_pod(&mut self, name: &str) {
        let claim = claim(name);
        self.claims.insert(ObjectKey::of(&claim.metadata), claim.clone());
        self.apply(Event::Claim(Arc::new(claim)));
        self.apply(Event::Context(context(name, 1)));
    }

    /// Adds waiting pods.
    fn add_waiting(&mut self, number: usize) {
        self.full = true;
        for number in 0..number {
            self.add_pod(&format!("waiting-{number:05}"));
        }
        self.run();
    }
}

/// Memory per claim of the claims cache and the device allocator.
fn memory() {
    const CLAIMS: usize = 10_000;
    const CONTEXTS: usize = 1_000;
    let before = resident_kib();
    let runtime = Runtime::new(CLAIMS);
    let protocol = resident_kib().saturating_sub(before) * 1024 / CLAIMS as u64;
    let mut allocator = DeviceAllocator::new(DRIVER);
    let claims: Vec<_> = (0..CLAIMS).map(|number| allocated(number, 1)).collect();
    let before = resident_kib();
    allocator.observe_all(
        claims
            .iter()
            .map(|claim| (&**claim, claim.status.allocation.as_ref())),
    );
    let held = resident_kib().saturating_sub(before) * 1024 / CLAIMS as u64;
    figure(
        "memory of an allocated claim among 10,000",
        &format!("{protocol} bytes in the protocol, {held} bytes in the books"),
        // The goal applies to the whole program: see `load restart`.
        Goal::none(),
    );
    drop(runtime);
    let before = resident_kib();
    let contexts: Vec<_> = (0..CONTEXTS)
        .map(|number| context(&format!("waiting-{number:04}"), 1))
        .collect();
    let each = resident_kib().saturating_sub(before) * 1024 / CONTEXTS as u64;
    figure(
        "memory of a context with 128 potential nodes, as a standby keeps it",
        &format!("{each} bytes"),
        Goal::none(),
    );
    drop(contexts);
}

fn events() {
    const CLAIMS: usize = 10_000;
    const WAITING: usize = 500;
    let goal = Duration::from_millis(1);
    let mut runtime = Runtime::new(CLAIMS);
    runtime.add_waiting(WAITING);
    let about = format!("{CLAIMS} allocated claims, {WAITING} waiting contexts");

    runtime.times = Times::default();
    for number in 0..1000 {
        let version = runtime.next_version();
        runtime.apply(Event::Claim(allocated(number, version)));
        runtime.run();
    }
    figure(
        &format!("event of an allocated claim ({about})"),
        &runtime.times.to_string(),
        Goal::at_most(runtime.times.median(), goal),
    );

    runtime.times = Times::default();
    for number in 0..WAITING {
        let name = format!("waiting-{number:05}");
        let version = runtime.next_version();
        let mut changed = context(&name, version);
        let entries =
            json!([{ "name": "device", "unsuitableNodes": (0..128).map(node_name).collect::<Vec<_>>() }]);
        Arc::make_mut(&mut changed).status.resource_claims = serde_json::from_value(entries).unwrap();
        runtime.apply(Event::Context(changed));
        runtime.run();
    }
    figure(
        &format!("event of a waiting context ({about})"),
        &runtime.times.to_string(),
        Goal::at_most(runtime.times.median(), goal),
    );

    // One device is freed, but does not help any waiting pod: the most expensive case.
    runtime.times = Times::default();
    let start = Instant::now();
    runtime.apply(Event::Capacity(
        CapacityChange::new(CapacityCause::Freed).for_pods(1),
    ));
    runtime.run();
    figure(
        &format!("one device freed that helps none of {WAITING} waiting pods"),
        &format!(
            "{:?} until all were evaluated again, {} events",
            start.elapsed(),
            runtime.times.len()
        ),
        Goal::at_most(start.elapsed(), Duration::from_millis(200)),
    );

    runtime.times = Times::default();
    for number in 0..WAITING {
        let key = ObjectKey::new("default", format!("waiting-{number:05}"));
        let uid = format!("context-{}", key.name);
        runtime.apply(Event::ContextGone { key, uid });
        runtime.run();
    }
    figure(
        &format!("end of a waiting context ({about})"),
        &runtime.times.to_string(),
        Goal::at_most(runtime.times.median(), goal),
    );
}

/// All pods at once, so that all are processed concurrently.
fn burst() {
    const CLAIMS: usize = 10_000;
    const PODS: usize = 500;
    let mut runtime = Runtime::new(CLAIMS);
    let start = Instant::now();
    for number in 0..PODS {
        runtime.add_pod(&format!("pod-{number:05}"));
    }
    runtime.run();
    let elapsed = start.elapsed();
    assert_eq!(runtime.world.statistics().allocations, PODS as u64);
    figure(
        &format!("{PODS} pods under way at once beside {CLAIMS} allocated claims"),
        &format!(
            "{:?} of decisions per pod in {} events, {}",
            runtime.times.sum() / u32::try_from(PODS).unwrap(),
            runtime.times.len(),
            runtime.times
        ),
        Goal::at_most(elapsed, Duration::from_secs(1)),
    );
}
