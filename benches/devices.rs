//! Duration of the built-in driver's decisions at the size of the largest clusters: `cargo bench --bench devices`.
//!
//! Prints the median and the maximum of each operation, and fails if a median exceeds its limit.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use drayman::api::crd::{
    AttributeValue, Device, DeviceClaimParametersSpec, DeviceClassParametersSpec, DeviceConstraint,
    DeviceRequest, DeviceSelector, NodeInventory, NodeInventorySpec, NodeInventoryStatus, READY,
};
use drayman::api::resource::{AllocationResult, ResourceClaim};
use drayman::core::allocation::allocator::{AllocateOutcome, DeviceAllocator};
use drayman::core::allocation::evaluate::RequestedClaim;
use drayman::core::allocation::inventory::{Match, NodeInfo};
use drayman::core::allocation::parameters::{ClaimParameters, ClassParameters, DeviceRequests};
use drayman::core::allocation::search::Fit;
use drayman::core::allocation::search::{CALL_WORK_MAX, NODE_WORK_MAX, WorkBudget};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

const DRIVER: &str = "drayman.dev";
const NODES: usize = 15_000;
const DEVICES: usize = 8;
const CLAIMS: usize = 10_000;
const SELECTOR: &str = "true";

fn node_name(number: usize) -> String {
    format!("node-{number:05}.example.internal")
}

fn node(number: usize) -> NodeInfo {
    NodeInfo::read(&inventory(number))
}

fn inventory(number: usize) -> NodeInventory {
    let device = |index| Device {
        name: format!("pci-0000-{index:02}-00-0"),
        kind: "gpu".into(),
        ..Device::default()
    };
    let spec = NodeInventorySpec {
        driver_name: DRIVER.into(),
        node_name: node_name(number),
        node_uid: format!("00000000-0000-4000-8000-{number:012}"),
        devices: (0..DEVICES).map(device).collect(),
    };
    let mut inventory = NodeInventory::new(&spec.node_name.clone(), spec);
    let ready = Condition {
        type_: READY.into(),
        status: "True".into(),
        reason: "Serving".into(),
        message: String::new(),
        last_transition_time: Time(jiff::Timestamp::UNIX_EPOCH),
        observed_generation: None,
    };
    inventory.status = Some(NodeInventoryStatus {
        conditions: vec![ready],
        ..NodeInventoryStatus::default()
    });
    inventory
}

fn claim(number: usize, allocation: Option<AllocationResult>) -> ResourceClaim {
    let mut claim = ResourceClaim::default();
    claim.metadata.namespace = Some("default".into());
    claim.metadata.name = Some(format!("pod-{number}-device"));
    claim.metadata.uid = Some(format!("00000000-0000-4000-9000-{number:012}"));
    claim.status.driver_name = Some(DRIVER.into());
    claim.status.allocation = allocation;
    claim
}

fn device_requests(count: u32) -> Option<DeviceRequests> {
    let class = ClassParameters::check(
        "gpu",
        Ok(DeviceClassParametersSpec {
            kind: "gpu".into(),
            ..DeviceClassParametersSpec::default()
        }),
    )
    .ok()?;
    let requests = vec![DeviceRequest {
        name: "device".into(),
        count: Some(count),
        ..DeviceRequest::default()
    }];
    let spec = DeviceClaimParametersSpec {
        requests,
        constraints: Vec::new(),
    };
    let claim = ClaimParameters::check("default", "p", Ok(spec)).ok()?;
    Some(DeviceRequests::new(&class, claim))
}

/// 64 devices of 2 generations on 4 NUMA nodes.
fn large_node() -> NodeInfo {
    let device = |number: i64| Device {
        name: format!("pci-0000-{number:02}-00-0"),
        kind: "gpu".into(),
        attributes: [
            ("drayman.dev/generation".into(), AttributeValue::int(number % 2)),
            ("drayman.dev/numaNode".into(), AttributeValue::int(number / 16)),
        ]
        .into_iter()
        .collect(),
        ..Device::default()
    };
    let mut inventory = inventory(0);
    inventory.spec.devices = (0..64).map(device).collect();
    NodeInfo::read(&inventory)
}

/// Eight devices by a selector, with two matchAttribute constraints.
fn constrained() -> Option<DeviceRequests> {
    let class = DeviceClassParametersSpec {
        kind: "gpu".into(),
        selectors: vec![DeviceSelector::cel(SELECTOR)],
        ..DeviceClassParametersSpec::default()
    };
    let equal = |attribute: &str| DeviceConstraint {
        match_attribute: attribute.into(),
        ..DeviceConstraint::default()
    };
    let spec = DeviceClaimParametersSpec {
        requests: vec![DeviceRequest {
            name: "device".into(),
            count: Some(8),
            ..DeviceRequest::default()
        }],
        constraints: vec![equal("drayman.dev/generation"), equal("drayman.dev/numaNode")],
    };
    let class = ClassParameters::check("gpu", Ok(class)).ok()?;
    let claim = ClaimParameters::check("default", "p", Ok(spec)).ok()?;
    Some(DeviceRequests::new(&class, claim))
}

/// An allocator with only [`large_node`], all of whose devices match.
fn large() -> DeviceAllocator {
    let mut allocator = DeviceAllocator::new(DRIVER);
    allocator.set_inventory("large", Some(large_node()));
    let selector = SELECTOR.into();
    allocator.activate("gpu", &selector);
    let pending = allocator.pending("gpu", &selector).cloned();
    let results = pending.map(|attributes| (attributes, Match::Yes)).collect();
    allocator.evaluated(&selector, results);
    allocator
}

fn measure(what: &str, tries: usize, limit: Duration, mut run: impl FnMut()) -> bool {
    let mut times: Vec<Duration> = (0..tries)
        .map(|_| {
            let start = Instant::now();
            run();
            start.elapsed()
        })
        .collect();
    times.sort_unstable();
    let at = |index: usize| times.get(index).copied().unwrap_or_default();
    let (median, slowest) = (at(tries / 2), at(tries.saturating_sub(1)));
    let fine = median <= limit;
    let mark = if fine { "" } else { "  BEYOND THE LIMIT" };
    println!("{what:<62} {median:>10.1?} {slowest:>10.1?}  (limit {limit:?}){mark}");
    fine
}

fn allocate(
    allocator: &mut DeviceAllocator,
    request: RequestedClaim<'_>,
    node: Option<&str>,
) -> Option<AllocateOutcome> {
    allocator.allocate_within(&[request], node, &mut WorkBudget::new(CALL_WORK_MAX))
}

fn evaluate(allocator: &DeviceAllocator, request: RequestedClaim<'_>, nodes: &[String]) {
    let mut unsuitable = vec![BTreeMap::new()];
    let mut work = WorkBudget::new(CALL_WORK_MAX);
    allocator.unsuitable(&[request], nodes, &mut unsuitable, &mut work);
    black_box(unsuitable);
}

/// An allocator in which each of [`CLAIMS`] holds a device, and the claims. Nodes are filled one after the other.
fn filled(one: &DeviceRequests) -> Option<(DeviceAllocator, Vec<ResourceClaim>)> {
    let mut allocator = DeviceAllocator::new(DRIVER);
    allocator.replace_inventories(
        (0..NODES)
            .map(node)
            .map(|node| (node.name().to_owned(), node))
            .collect(),
    );
    let mut claims = Vec::with_capacity(CLAIMS);
    for number in 0..CLAIMS {
        let (asking, target) = (claim(number, None), node_name(number / DEVICES));
        let request = RequestedClaim {
            claim: &asking,
            device_requests: one,
            suitable_nodes: None,
        };
        let allocation = allocate(&mut allocator, request, Some(&target))?
            .answer
            .ok()?
            .pop()?;
        claims.push(claim(number, Some(allocation)));
    }
    allocator.observe_all(observed(&claims));
    Some((allocator, claims))
}

fn observed(claims: &[ResourceClaim]) -> impl Iterator<Item = (&ResourceClaim, Option<&AllocationResult>)> {
    claims
        .iter()
        .map(|claim| (claim, claim.status.allocation.as_ref()))
}

fn main() -> ExitCode {
    let (Some(one), Some(eight), Some(constrained)) = (device_requests(1), device_requests(8), constrained())
    else {
        return ExitCode::FAILURE;
    };
    let Some((mut allocator, claims)) = filled(&one) else {
        return ExitCode::FAILURE;
    };
    let mut large = large();
    let asking = claim(CLAIMS, None);
    let request = |device_requests| RequestedClaim {
        claim: &asking,
        device_requests,
        suitable_nodes: None,
    };
    // The boundary between full and free nodes is in the middle.
    let border = CLAIMS / DEVICES - 64;
    let names: Vec<String> = (border..border + 128).map(node_name).collect();
    let last = node_name(NODES - 1);
    let title = format!("{NODES} nodes with {DEVICES} devices each, {CLAIMS} claims");
    println!("{title:<62} {:>10} {:>10}", "median", "slowest");

    let millis = Duration::from_millis;
    let fine = [
        measure(
            "unsuitable_nodes, 128 nodes of which 64 are full, 1 device",
            1000,
            millis(1),
            || evaluate(&allocator, request(&one), &names),
        ),
        measure(
            "unsuitable_nodes, 128 nodes of which 64 are full, 8 devices",
            1000,
            millis(1),
            || evaluate(&allocator, request(&eight), &names),
        ),
        measure(
            "fit, 8 out of 64 devices",
            1000,
            Duration::from_micros(50),
            || {
                let mut fit = Fit::new([1; 64]);
                let _ = black_box(fit.add(0, (0..64).collect(), 8, &mut WorkBudget::new(NODE_WORK_MAX)));
                black_box(fit.answers());
            },
        ),
        measure(
            "allocate and deallocate, 8 out of 64, selector, 2 constraints",
            1000,
            millis(1),
            || {
                let allocated = allocate(&mut large, request(&constrained), Some(&node_name(0)));
                let is_ok = |allocated: &AllocateOutcome| allocated.answer.is_ok();
                assert!(allocated.as_ref().is_some_and(is_ok), "{allocated:?}");
                large.deallocate(&asking);
            },
        ),
        measure("allocate and deallocate, on a node", 1000, millis(1), || {
            black_box(allocate(&mut allocator, request(&one), Some(&last)));
            allocator.deallocate(&asking);
        }),
        measure("allocate and deallocate, anywhere", 50, millis(100), || {
            black_box(allocate(&mut allocator, request(&one), None));
            allocator.deallocate(&asking);
        }),
        measure("observe, all claims at once", 20, millis(200), || {
            black_box(DeviceAllocator::new(DRIVER).observe_all(observed(&claims)));
        }),
    ];
    if fine.contains(&false) {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}
