//! Pools of devices that a node can use, read from ResourceSlices.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use k8s_openapi::api::core::v1::{Node, NodeSelector, NodeSelectorRequirement};
use k8s_openapi::api::resource::v1::{Device, ResourceSlice};

/// Whether devices of a pool are allocated.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PoolState {
    /// The pool is usable.
    Complete,
    /// Slices of the highest generation are missing, or there are too many.
    Incomplete {
        /// Slices of this generation.
        found: usize,
        /// Number of slices by their own account.
        expected: i64,
    },
    /// The pool contradicts itself, for this reason.
    Invalid(String),
}

impl fmt::Display for PoolState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Complete => f.write_str("complete"),
            Self::Incomplete { found, expected } => {
                write!(f, "incomplete, with {found} of {expected} slices")
            }
            Self::Invalid(reason) => write!(f, "invalid: {reason}"),
        }
    }
}

/// A pool as the scheduler sees it from one node.
#[derive(Clone, Debug)]
pub struct Pool<'a> {
    pub driver: &'a str,
    pub name: &'a str,
    /// Highest generation of the slices.
    pub generation: i64,
    pub state: PoolState,
    /// Slices with devices for the node, by name.
    pub slices: Vec<&'a ResourceSlice>,
}

impl<'a> Pool<'a> {
    /// The devices for the node in the scheduler's order, with their slices.
    pub(super) fn devices(&self, node: &Node) -> Result<Vec<(&'a ResourceSlice, &'a Device)>, String> {
        let mut devices = Vec::new();
        for &slice in &self.slices {
            for device in slice.spec.devices.iter().flatten() {
                if slice.spec.per_device_node_selection != Some(true) || device_is_for(device, node)? {
                    devices.push((slice, device));
                }
            }
        }
        Ok(devices)
    }
}

/// Identity of a device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceId {
    pub driver: String,
    pub pool: String,
    /// Name of the device, unique in its pool.
    pub device: String,
}

impl DeviceId {
    pub fn new(driver: &str, pool: &str, device: &str) -> Self {
        Self {
            driver: driver.to_owned(),
            pool: pool.to_owned(),
            device: device.to_owned(),
        }
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.driver, self.pool, self.device)
    }
}

/// Returns the pools with devices for a node, in the order in which the scheduler tries them: by driver and name, pools with binding
/// conditions last.
///
/// Slices of an older generation do not count. A pool whose newest generation has no device for the node is left out.
pub fn pools<'a>(slices: &'a [ResourceSlice], node: &Node) -> Result<Vec<Pool<'a>>, String> {
    PoolIndex::new(slices).pools(node)
}

/// Returns the pools of all nodes. The scheduler uses a pool of one node as described here.
pub fn all_pools(slices: &[ResourceSlice]) -> Vec<Pool<'_>> {
    let index = PoolIndex::new(slices);
    let all = index.slices.iter().map(|(id, slices)| (*id, slices.as_slice()));
    gather(all, |_| Ok(true)).unwrap_or_default()
}

/// Driver and name of a pool.
type PoolId<'a> = (&'a str, &'a str);

/// The slices of all pools, grouped once for the evaluation of many nodes.
#[derive(Clone, Debug, Default)]
pub struct PoolIndex<'a> {
    slices: BTreeMap<PoolId<'a>, Vec<&'a ResourceSlice>>,
    /// The pools with slices for one node, by its name.
    of_one_node: BTreeMap<&'a str, BTreeSet<PoolId<'a>>>,
    /// The pools with other slices.
    of_several_nodes: BTreeSet<PoolId<'a>>,
}

impl<'a> PoolIndex<'a> {
    /// Groups the slices of a cluster.
    pub fn new(slices: &'a [ResourceSlice]) -> Self {
        let mut index = Self::default();
        for slice in slices {
            let spec = &slice.spec;
            let id = (spec.driver.as_str(), spec.pool.name.as_str());
            index.slices.entry(id).or_default().push(slice);
            let node = spec.node_name.as_deref().filter(|name| !name.is_empty());
            match node.filter(|_| spec.per_device_node_selection != Some(true)) {
                Some(node) => index.of_one_node.entry(node).or_default().insert(id),
                None => index.of_several_nodes.insert(id),
            };
        }
        index
    }

    /// Returns the pools of a node as [`pools`] does.
    pub fn pools(&self, node: &Node) -> Result<Vec<Pool<'a>>, String> {
        gather(self.candidates(node), |slice| {
            let name = slice.metadata.name.as_deref().unwrap_or_default();
            slice_is_for(slice, node).map_err(|error| format!("ResourceSlice {name}: {error}"))
        })
    }

    /// All pools except those with slices for other nodes only, ordered by driver and name.
    pub(super) fn candidates(&self, node: &Node) -> impl Iterator<Item = (PoolId<'a>, &[&'a ResourceSlice])> {
        let name = node.metadata.name.as_deref().unwrap_or_default();
        let of_node = self.of_one_node.get(name).into_iter().flatten();
        let ids: BTreeSet<PoolId<'a>> = of_node.chain(&self.of_several_nodes).copied().collect();
        ids.into_iter()
            .filter_map(move |id| Some((id, self.slices.get(&id)?.as_slice())))
    }
}

fn gather<'p, 'a: 'p>(
    candidates: impl Iterator<Item = (PoolId<'a>, &'p [&'a ResourceSlice])>,
    is_usable: impl Fn(&ResourceSlice) -> Result<bool, String>,
) -> Result<Vec<Pool<'a>>, String> {
    let mut pools = Vec::new();
    for ((driver, name), all) in candidates {
        let mut usable = Vec::new();
        for &slice in all {
            if is_usable(slice)? {
                usable.push(slice);
            }
        }
        let Some(generation) = usable.iter().map(|slice| slice.spec.pool.generation).max() else {
            continue;
        };
        usable.retain(|slice| slice.spec.pool.generation == generation);
        usable.sort_by_key(|slice| slice.metadata.name.as_deref());
        if let Some(state) = state(&usable, all, generation) {
            pools.push(Pool {
                driver,
                name,
                generation,
                state,
                slices: usable,
            });
        }
    }
    let has_conditions = |pool: &Pool<'_>| {
        let mut devices = pool
            .slices
            .iter()
            .flat_map(|slice| slice.spec.devices.iter().flatten());
        pool.state == PoolState::Complete
            && devices.any(|device| device.binding_conditions.iter().flatten().next().is_some())
    };
    pools.sort_by_key(has_conditions);
    Ok(pools)
}

/// The state of a pool; `None` if a newer generation without devices for the node replaces these slices.
fn state(usable: &[&ResourceSlice], all: &[&ResourceSlice], generation: i64) -> Option<PoolState> {
    let expected = usable.first()?.spec.pool.resource_slice_count;
    let is_expected = |found: usize| i64::try_from(found) == Ok(expected);
    if !is_expected(usable.len()) {
        if all.iter().any(|slice| slice.spec.pool.generation > generation) {
            return None;
        }
        let current = all
            .iter()
            .filter(|slice| slice.spec.pool.generation == generation);
        let found = current.count();
        if !is_expected(found) {
            return Some(PoolState::Incomplete { found, expected });
        }
    }
    Some(match duplicate_device(usable) {
        Some(name) => PoolState::Invalid(format!("duplicate device name {name}")),
        None => PoolState::Complete,
    })
}

fn duplicate_device<'a>(slices: &[&'a ResourceSlice]) -> Option<&'a str> {
    let mut names = BTreeSet::new();
    let mut devices = slices
        .iter()
        .flat_map(|slice| slice.spec.devices.iter().flatten());
    devices
        .find(|device| !names.insert(device.name.as_str()))
        .map(|device| device.name.as_str())
}

fn slice_is_for(slice: &ResourceSlice, node: &Node) -> Result<bool, String> {
    let spec = &slice.spec;
    if spec.per_device_node_selection == Some(true) {
        for device in spec.devices.iter().flatten() {
            if device_is_for(device, node)? {
                return Ok(true);
            }
        }
        return Ok(false);
    }
    is_for(
        spec.node_name.as_deref(),
        spec.all_nodes,
        spec.node_selector.as_ref(),
        node,
    )
}

fn device_is_for(device: &Device, node: &Node) -> Result<bool, String> {
    is_for(
        device.node_name.as_deref(),
        device.all_nodes,
        device.node_selector.as_ref(),
        node,
    )
}

fn is_for(
    node_name: Option<&str>,
    all_nodes: Option<bool>,
    selector: Option<&NodeSelector>,
    node: &Node,
) -> Result<bool, String> {
    if let Some(name) = node_name.filter(|name| !name.is_empty()) {
        return Ok(node.metadata.name.as_deref() == Some(name));
    }
    if all_nodes == Some(true) {
        return Ok(true);
    }
    selector.map_or(Ok(false), |selector| node_matches(selector, node))
}

/// Whether a node selector selects a node.
pub fn node_matches(selector: &NodeSelector, node: &Node) -> Result<bool, String> {
    for term in &selector.node_selector_terms {
        let labels = term.match_expressions.iter().flatten();
        let fields = term.match_fields.iter().flatten();
        let mut requirements = 0;
        let mut all = true;
        for (requirement, is_field) in labels
            .map(|one| (one, false))
            .chain(fields.map(|one| (one, true)))
        {
            requirements += 1;
            all &= meets(requirement, is_field, node)?;
        }
        // A term without requirements matches no node.
        if all && requirements > 0 {
            return Ok(true);
        }
    }
    Ok(false)
}

fn meets(requirement: &NodeSelectorRequirement, is_field: bool, node: &Node) -> Result<bool, String> {
    let value = if !is_field {
        node.metadata
            .labels
            .as_ref()
            .and_then(|labels| labels.get(&requirement.key))
    } else if requirement.key == "metadata.name" {
        node.metadata.name.as_ref()
    } else {
        return Err(format!(
            "a node selector names the unknown field {:?}",
            requirement.key
        ));
    };
    let values = requirement.values.as_deref().unwrap_or_default();
    let number = |text: Option<&String>| text.and_then(|text| text.parse::<i64>().ok());
    let compared = || number(value).zip(number(values.first()));
    Ok(match requirement.operator.as_str() {
        "In" => value.is_some_and(|value| values.contains(value)),
        "NotIn" => value.is_none_or(|value| !values.contains(value)),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => compared().is_some_and(|(value, bound)| value > bound),
        "Lt" => compared().is_some_and(|(value, bound)| value < bound),
        other => return Err(format!("a node selector has the unknown operator {other:?}")),
    })
}
