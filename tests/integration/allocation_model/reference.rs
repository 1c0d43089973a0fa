//! The reference model in sets and maps, and the comparison with the allocator.

use std::collections::{BTreeMap, BTreeSet};

use drayman::api::crd::{DeviceClaimParametersSpec, DeviceClassParametersSpec, DeviceRequest};
use drayman::api::handle::DeviceHandle;
use drayman::api::resource::{AllocationResult, ResourceClaim};
use drayman::core::allocation::allocator::DeviceAllocator;
use drayman::core::allocation::evaluate::RequestedClaim;
use drayman::core::allocation::parameters::{ClaimParameters, ClassParameters, DeviceRequests};
use drayman::core::allocation::search::{CALL_WORK_MAX, WorkBudget};

use super::{CLAIMS, DRIVER, KINDS, NODES, Step};
use crate::allocation_model::inventory::{KnownDevices, name, read};

type DeviceKey = (String, String, String);

/// A node of the reference model: UID, readiness, and kind and health of each device.
type ReferenceNode = (String, bool, KnownDevices);

/// A claim of the reference model.
#[derive(Clone, Debug)]
struct ReferenceClaim {
    generation: usize,
    kind: &'static str,
    counts: Vec<u32>,
    granted: Option<AllocationResult>,
    recorded: Option<AllocationResult>,
}

impl ReferenceClaim {
    fn object(&self, number: usize) -> ResourceClaim {
        let mut claim = ResourceClaim::default();
        claim.metadata.name = Some(format!("claim-{number}"));
        claim.metadata.namespace = Some("ns".into());
        claim.metadata.uid = Some(format!("uid-{number}-{}", self.generation));
        claim.status.allocation.clone_from(&self.recorded);
        claim.status.driver_name = self.recorded.as_ref().map(|_| DRIVER.to_owned());
        claim
    }

    fn device_requests(&self) -> DeviceRequests {
        let spec = DeviceClassParametersSpec {
            kind: self.kind.into(),
            ..DeviceClassParametersSpec::default()
        };
        let class = ClassParameters::check("class", Ok(spec)).unwrap();
        let request = |(index, &count)| DeviceRequest {
            name: format!("r{index}"),
            count: Some(count),
            ..DeviceRequest::default()
        };
        let requests = self.counts.iter().enumerate().map(request).collect();
        let spec = DeviceClaimParametersSpec {
            requests,
            constraints: Vec::new(),
        };
        let claim = ClaimParameters::check("ns", "p", Ok(spec)).unwrap();
        DeviceRequests::new(&class, claim)
    }

    fn holds(&self) -> Option<&AllocationResult> {
        self.recorded.as_ref().or(self.granted.as_ref())
    }

    fn wanted(&self) -> usize {
        usize::try_from(self.counts.iter().sum::<u32>()).unwrap()
    }
}

fn handle(allocation: &AllocationResult) -> DeviceHandle {
    DeviceHandle::parse(allocation.resource_handles[0].data.as_deref().unwrap()).unwrap()
}

fn device_keys(allocation: &AllocationResult) -> Vec<DeviceKey> {
    let DeviceHandle {
        node_name,
        node_uid,
        devices,
        ..
    } = handle(allocation);
    devices
        .into_iter()
        .map(|device| (node_name.clone(), node_uid.clone(), device.device))
        .collect()
}

/// The reference model and the allocator.
pub(crate) struct Comparison {
    pub(crate) allocator: DeviceAllocator,
    nodes: BTreeMap<String, ReferenceNode>,
    claims: Vec<ReferenceClaim>,
}

impl Comparison {
    pub(crate) fn new() -> Self {
        let shapes: [(usize, &[u32]); CLAIMS] = [
            (0, &[1]),
            (0, &[1]),
            (0, &[2]),
            (0, &[1, 1]),
            (1, &[1]),
            (1, &[2]),
        ];
        let claim = |(kind, counts): (usize, &[u32])| ReferenceClaim {
            generation: 0,
            kind: KINDS[kind],
            counts: counts.to_vec(),
            granted: None,
            recorded: None,
        };
        Self {
            allocator: DeviceAllocator::new(DRIVER),
            nodes: BTreeMap::new(),
            claims: shapes.into_iter().map(claim).collect(),
        }
    }

    fn held(&self, except: &BTreeSet<usize>) -> BTreeSet<DeviceKey> {
        let others = self.claims.iter().enumerate().filter(|(number, claim)| {
            // Unrecorded allocations of these claims may be replaced; recorded ones are final.
            !except.contains(number) || claim.recorded.is_some()
        });
        others
            .filter_map(|(_, claim)| claim.holds())
            .flat_map(device_keys)
            .collect()
    }

    /// Devices that can be allocated now.
    fn available(&self, except: &BTreeSet<usize>) -> BTreeSet<(DeviceKey, &'static str)> {
        let held = self.held(except);
        let mut available = BTreeSet::new();
        for (name, (uid, ready, devices)) in &self.nodes {
            for (device, &(kind, healthy)) in devices {
                let key = (name.clone(), uid.clone(), device.clone());
                if *ready && healthy && !held.contains(&key) {
                    available.insert((key, kind));
                }
            }
        }
        available
    }

    /// Whether these claims can be allocated together on a node.
    fn fits(&self, claims: &BTreeSet<usize>, node: &str) -> bool {
        let available = self.available(claims);
        let mut wanted: BTreeMap<&str, usize> = BTreeMap::new();
        let uid = self.nodes.get(node).map(|(uid, ..)| uid);
        for claim in claims.iter().map(|&number| &self.claims[number]) {
            if let Some(recorded) = &claim.recorded {
                if uid != Some(&handle(recorded).node_uid) || !self.nodes[node].1 {
                    return false;
                }
            } else {
                *wanted.entry(claim.kind).or_default() += claim.wanted();
            }
        }
        let here = |kind: &str| {
            available
                .iter()
                .filter(|((name, ..), of)| name == node && *of == kind)
                .count()
        };
        self.nodes.get(node).is_some_and(|(_, ready, _)| *ready)
            && wanted.iter().all(|(kind, number)| here(kind) >= *number)
    }

    pub(crate) fn run(&mut self, step: &Step) {
        let none = BTreeSet::new();
        let before = self.available(&none);
        let freed = match step {
            Step::Inventory {
                node,
                uid,
                ready,
                devices,
            } => self.inventory(*node, *uid, *ready, devices),
            Step::NoInventory { node } => {
                self.nodes.remove(&name(*node));
                self.allocator.set_inventory(&name(*node), None)
            }
            Step::Allocate { claims, node } => return self.allocate(claims, *node),
            Step::Record { claim } => {
                if let Some(granted) = self.claims[*claim].granted.take() {
                    self.claims[*claim].recorded.get_or_insert(granted);
                }
                self.observe(*claim)
            }
            Step::Observe { claim } => self.observe(*claim),
            Step::Deallocate { claim } => {
                self.claims[*claim].granted = None;
                let object = self.claims[*claim].object(*claim);
                self.allocator.deallocate(&object)
            }
            Step::Clear { claim } => {
                if self.claims[*claim].recorded.take().is_none() {
                    return;
                }
                self.observe(*claim)
            }
            Step::Delete { claim } => {
                let uid = self.claims[*claim].object(*claim).metadata.uid.unwrap();
                let claim = &mut self.claims[*claim];
                (claim.granted, claim.recorded) = (None, None);
                claim.generation += 1;
                self.allocator.gone(&uid)
            }
            Step::Restart => return self.restart(),
        };
        let now = self.available(&none);
        let new = now.difference(&before).count();
        // A device that becomes unhealthy and changes its kind at once counts as changed.
        assert!(
            freed >= new,
            "{step:?}: {new} devices became available, {freed} were reported"
        );
        assert!(
            new > 0 || freed == 0 || matches!(step, Step::Inventory { .. }),
            "{step:?}: freed devices reported without cause"
        );
    }

    fn inventory(&mut self, node: usize, uid: u8, ready: bool, devices: &[Option<(usize, bool)>]) -> usize {
        let name = name(node);
        let uid = format!("{name}-{uid}");
        let known = devices
            .iter()
            .enumerate()
            .filter_map(|(index, device)| Some((index, (*device)?)));
        let devices: KnownDevices = known
            .map(|(index, (kind, healthy))| (format!("d{index}"), (KINDS[kind], healthy)))
            .collect();
        let available = self.available(&BTreeSet::new());
        let before = self
            .nodes
            .insert(name.clone(), (uid.clone(), ready, devices.clone()));
        let freed = self
            .allocator
            .set_inventory(&name, Some(read(&name, &uid, ready, &devices)));
        let now = self.available(&BTreeSet::new());
        let mut helpful: BTreeSet<&str> = now
            .difference(&available)
            .map(|((.., device), _)| device.as_str())
            .collect();
        // A request for all devices may have waited for one that is gone or has another kind.
        let before = before.filter(|(old_uid, was_ready, _)| *was_ready && ready && *old_uid == uid);
        for (device, (kind, _)) in before.iter().flat_map(|(.., devices)| devices) {
            if devices.get(device).is_none_or(|(now, _)| now != kind) {
                helpful.insert(device);
            }
        }
        assert_eq!(freed, helpful.len(), "devices that may help");
        freed
    }

    fn observe(&mut self, number: usize) -> usize {
        let claim = self.claims[number].object(number);
        let observed = self.allocator.observe(&claim, claim.status.allocation.as_ref());
        assert_eq!(observed.findings, []);
        observed.freed
    }

    fn allocate(&mut self, numbers: &BTreeSet<usize>, node: Option<usize>) {
        let owned: Vec<_> = numbers
            .iter()
            .map(|&number| {
                (
                    self.claims[number].object(number),
                    self.claims[number].device_requests(),
                )
            })
            .collect();
        let requested: Vec<_> = owned
            .iter()
            .map(|(claim, device_requests)| RequestedClaim {
                claim,
                device_requests,
                suitable_nodes: None,
            })
            .collect();
        let all: Vec<String> = (0..NODES).map(name).collect();
        let mut unsuitable = vec![BTreeMap::new(); requested.len()];
        let work = || WorkBudget::new(CALL_WORK_MAX);
        self.allocator
            .unsuitable(&requested, &all, &mut unsuitable, &mut work());
        for node in &all {
            let suitable = unsuitable.iter().all(|reasons| !reasons.contains_key(node));
            assert_eq!(
                suitable,
                self.fits(numbers, node),
                "{numbers:?} on {node}: {unsuitable:?}"
            );
        }
        let node = node.map(name);
        let possible = match &node {
            Some(node) => self.fits(numbers, node),
            None => all.iter().any(|node| self.fits(numbers, node)),
        };
        let allocated = self
            .allocator
            .allocate_within(&requested, node.as_deref(), &mut work());
        let answer = allocated.unwrap().answer;
        assert_eq!(answer.is_ok(), possible, "{answer:?}");
        let allocations: Vec<_> = match answer {
            Ok(all) => all.into_iter().map(Some).collect(),
            Err(_) => vec![None; numbers.len()],
        };

        let available = self.available(numbers);
        for (&number, allocation) in numbers.iter().zip(allocations) {
            let claim = &mut self.claims[number];
            let Some(allocation) = allocation else {
                claim.granted = None;
                continue;
            };
            let handle = handle(&allocation);
            if let Some(recorded) = &claim.recorded {
                assert_eq!(recorded, &allocation, "a recorded allocation is never changed");
                continue;
            }
            assert_eq!(
                Some(handle.claim_uid.as_str()),
                claim.object(number).metadata.uid.as_deref()
            );
            assert!(node.as_ref().is_none_or(|node| *node == handle.node_name));
            for key in device_keys(&allocation) {
                assert!(
                    available.contains(&(key, claim.kind)),
                    "{handle:?} is not available"
                );
            }
            for (index, &count) in claim.counts.iter().enumerate() {
                let request = format!("r{index}");
                let given = handle
                    .devices
                    .iter()
                    .filter(|device| device.request == request)
                    .count();
                assert_eq!(given, usize::try_from(count).unwrap());
            }
            claim.granted = Some(allocation);
        }
    }

    fn restart(&mut self) {
        self.allocator = DeviceAllocator::new(DRIVER);
        let mut objects = Vec::new();
        for (number, claim) in self.claims.iter_mut().enumerate() {
            claim.granted = None;
            objects.push(claim.object(number));
        }
        let claims = objects
            .iter()
            .map(|claim| (claim, claim.status.allocation.as_ref()));
        assert_eq!(self.allocator.observe_all(claims).findings, []);
        let nodes = self.nodes.iter();
        let read =
            nodes.map(|(name, (uid, ready, devices))| (name.clone(), read(name, uid, *ready, devices)));
        let available = self.allocator.replace_inventories(read.collect());
        assert_eq!(available, self.available(&BTreeSet::new()).len());
    }

    /// No exclusive device is in two claims, and the allocator holds exactly the devices of the claims.
    pub(crate) fn check(&self) {
        let mut held = BTreeSet::new();
        for key in self
            .claims
            .iter()
            .filter_map(ReferenceClaim::holds)
            .flat_map(device_keys)
        {
            assert!(held.insert(key.clone()), "{key:?} is held twice");
        }
        let known: BTreeSet<String> = self.allocator.holdings().uids().map(str::to_owned).collect();
        let claims = self
            .claims
            .iter()
            .enumerate()
            .filter(|(_, claim)| claim.holds().is_some());
        let expected = claims
            .map(|(number, claim)| claim.object(number).metadata.uid.unwrap())
            .collect();
        assert_eq!(known, expected, "a leaked or lost allocation");
        for (name, uid, device) in &held {
            let holders = self
                .allocator
                .holdings()
                .on_node(uid)
                .and_then(|node| node.get(device.as_str()));
            assert_eq!(holders.map(Vec::len), Some(1), "{device} of {name}");
        }
    }
}
