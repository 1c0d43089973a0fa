//! Conversion between the devices of a claim and the `allocation` in its status.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{NodeSelector, NodeSelectorRequirement};

use crate::api::handle::{DeviceHandle, HandleError, VERSION};
use crate::api::resource::label::{LABEL_OF_ANY_NODE, NODE_LABEL};
use crate::api::resource::{AllocationResult, NODE_NAME_FIELD, ResourceClaim, ResourceHandle};
use crate::core::allocation::index::{Grant, State};

/// The content of a claim's allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The devices that the claim holds, or why they cannot be read.
    pub state: State,
    /// Uid of the claim for which the allocation was made, if that is another claim.
    pub made_for: Option<String>,
}

/// Reads the allocation by `driver` in the claim with uid `claim_uid`.
pub fn read(driver: &str, claim_uid: &str, allocation: &AllocationResult) -> Record {
    match handle(driver, allocation) {
        Ok(handle) => {
            let (node_name, node_uid) = (handle.node_name.into(), handle.node_uid.into());
            let state = State::Recorded(Grant {
                node_name,
                node_uid,
                devices: handle.devices,
            });
            Record {
                state,
                made_for: Some(handle.claim_uid).filter(|uid| uid != claim_uid),
            }
        }
        Err(error) => {
            let nodes = node_names(allocation.available_on_nodes.as_ref());
            Record {
                state: State::Unreadable {
                    nodes,
                    error: error.into(),
                },
                made_for: None,
            }
        }
    }
}

/// The only handle of `driver`. A handle without a name belongs to the driver that the claim's status names.
fn handle(driver: &str, allocation: &AllocationResult) -> Result<DeviceHandle, String> {
    let ours = |handle: &&ResourceHandle| handle.driver_name.as_deref().is_none_or(|name| name == driver);
    let mut handles = allocation.resource_handles.iter().filter(ours);
    let (Some(handle), None) = (handles.next(), handles.next()) else {
        let number = allocation.resource_handles.iter().filter(ours).count();
        return Err(format!(
            "the allocation has {number} resource handles of driver {driver} instead of one"
        ));
    };
    let data = handle.data.as_deref().ok_or("the resource handle has no data")?;
    DeviceHandle::parse(data).map_err(|error| error.to_string())
}

/// The allocation that records `grant` in the claim with uid `claim_uid`.
pub fn write(driver: &str, claim_uid: &str, grant: &Grant) -> Result<AllocationResult, HandleError> {
    let handle = DeviceHandle {
        version: VERSION,
        claim_uid: claim_uid.to_owned(),
        node_name: grant.node_name.to_string(),
        node_uid: grant.node_uid.to_string(),
        devices: grant.devices.clone(),
    };
    // The claim is the holder: every pod that names it may use its devices, as may a second container of one pod. A claim generated from a
    // template is named only by its own pod.
    let allocation = AllocationResult::new(driver, handle.to_data()?).on_nodes([&*grant.node_name]);
    Ok(allocation.shareable())
}

/// `namespace/name` of a claim.
pub fn claim_name(claim: &ResourceClaim) -> String {
    let metadata = &claim.metadata;
    let namespace = metadata.namespace.as_deref().unwrap_or_default();
    format!("{namespace}/{}", metadata.name.as_deref().unwrap_or_default())
}

/// The value of a claim's node label: the node for which the claim was labelled before its allocation. `None` for any node.
pub fn labelled_node(driver: &str, claim: &ResourceClaim) -> Option<Box<str>> {
    let labels = claim.metadata.labels.as_ref()?;
    let node = labels.get(&format!("{driver}/{NODE_LABEL}"))?;
    (node != LABEL_OF_ANY_NODE && !node.is_empty()).then(|| node.as_str().into())
}

/// The node names in a selector.
fn node_names(selector: Option<&NodeSelector>) -> BTreeSet<Box<str>> {
    let terms = selector
        .map(|selector| selector.node_selector_terms.as_slice())
        .unwrap_or_default();
    let fields = terms.iter().flat_map(|term| term.match_fields.iter().flatten());
    let names = fields.filter(|field| field.key == NODE_NAME_FIELD && field.operator == "In");
    names
        .flat_map(|field| field.values.iter().flatten())
        .map(|name| name.as_str().into())
        .collect()
}

/// Whether a class's `suitableNodes` allows a node with this name; `None` if that depends on more than the name.
///
/// Terms are ORed and the requirements of a term are ANDed; an empty term matches no node
/// (`k8s.io/component-helpers/scheduling/corev1/nodeaffinity`).
pub fn suits(selector: &NodeSelector, node: &str) -> Option<bool> {
    let mut unsure = false;
    for term in &selector.node_selector_terms {
        let fields = term.match_fields.as_deref().unwrap_or_default();
        let labels = !term.match_expressions.as_deref().unwrap_or_default().is_empty();
        if fields.is_empty() && !labels {
            continue;
        }
        let met = fields
            .iter()
            .map(|field| meets(field, node))
            .try_fold(true, |all, met| Some(all && met?));
        match met {
            Some(false) => {}
            Some(true) if !labels => return Some(true),
            _ => unsure = true,
        }
    }
    (!unsure).then_some(false)
}

fn meets(field: &NodeSelectorRequirement, node: &str) -> Option<bool> {
    let listed = field.values.iter().flatten().any(|name| name == node);
    match (field.key.as_str(), field.operator.as_str()) {
        (NODE_NAME_FIELD, "In") => Some(listed),
        (NODE_NAME_FIELD, "NotIn") => Some(!listed),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::NodeSelectorTerm;

    use super::*;
    use crate::api::crd::CLAIM_DEVICES_MAX;
    use crate::api::handle::HandleDevice;

    fn grant(devices: usize) -> Grant {
        let device = |index| HandleDevice {
            request: "r".repeat(63),
            device: format!("{index:0>63}"),
        };
        Grant {
            node_name: "n".repeat(253).into(),
            node_uid: "u".repeat(64).into(),
            devices: (0..devices).map(device).collect(),
        }
    }

    #[test]
    fn an_allocation_reads_back_as_what_was_granted() {
        let allocation = write("d.example", "uid", &grant(2)).unwrap();
        let state = State::Recorded(grant(2));
        assert_eq!(
            read("d.example", "uid", &allocation),
            Record {
                state: state.clone(),
                made_for: None
            }
        );
        let copied = read("d.example", "another", &allocation);
        assert_eq!(
            copied,
            Record {
                state,
                made_for: Some("uid".into())
            }
        );
        assert!(
            allocation.shareable,
            "every pod that names the claim has its devices"
        );
        let selector = allocation.available_on_nodes.unwrap();
        assert_eq!(suits(&selector, &grant(0).node_name), Some(true));
        assert_eq!(suits(&selector, "another"), Some(false));
    }

    #[test]
    fn the_largest_claim_with_the_longest_names_fits_into_a_handle() {
        assert!(write("d.example", &"u".repeat(36), &grant(CLAIM_DEVICES_MAX)).is_ok());
    }

    #[test]
    fn what_cannot_be_read_says_why_and_where_it_is() {
        let good = write("d.example", "uid", &grant(1)).unwrap();
        let state = |change: &dyn Fn(&mut AllocationResult)| {
            let mut allocation = good.clone();
            change(&mut allocation);
            match read("d.example", "uid", &allocation).state {
                State::Unreadable { nodes, error } => (nodes.len(), error.to_string()),
                state => panic!("{state:?}"),
            }
        };
        let set = |data: Option<&str>| {
            let data = data.map(str::to_owned);
            move |allocation: &mut AllocationResult| allocation.resource_handles[0].data.clone_from(&data)
        };
        assert!(state(&set(Some("{}"))).1.contains("cannot be read"));
        assert!(state(&set(Some(r#"{"version":9}"#))).1.contains("version 9"));
        assert_eq!(state(&set(None)), (1, "the resource handle has no data".into()));
        let (nodes, error) = state(&|allocation| {
            let other = Some("other.example".to_owned());
            allocation.resource_handles[0].driver_name = other;
            allocation.available_on_nodes = None;
        });
        assert_eq!((nodes, error.contains("0 resource handles")), (0, true));
        let (_, error) =
            state(&|allocation| allocation.resource_handles.extend(good.resource_handles.clone()));
        assert!(error.contains("2 resource handles"));
    }

    #[test]
    fn suitable_nodes_are_checked_by_name_and_uncertain_by_label() {
        let term = |fields: Option<Vec<NodeSelectorRequirement>>, labels: bool| NodeSelectorTerm {
            match_fields: fields,
            match_expressions: labels.then(|| {
                vec![NodeSelectorRequirement {
                    key: "gpu".into(),
                    operator: "Exists".into(),
                    values: None,
                }]
            }),
        };
        let only_a = AllocationResult::default()
            .on_nodes(["a"])
            .available_on_nodes
            .unwrap();
        let named = only_a.node_selector_terms[0].match_fields.clone();
        let not_named = named.clone().map(|mut fields| {
            fields[0].operator = "NotIn".into();
            fields
        });
        let judge = |terms: &[NodeSelectorTerm], node| {
            suits(
                &NodeSelector {
                    node_selector_terms: terms.to_vec(),
                },
                node,
            )
        };
        assert_eq!(judge(&[term(named.clone(), false)], "a"), Some(true));
        assert_eq!(judge(&[term(not_named, false)], "a"), Some(false));
        assert_eq!(judge(&[term(None, false)], "a"), Some(false));
        assert_eq!(judge(&[term(None, true)], "a"), None);
        assert_eq!(
            judge(&[term(named.clone(), true)], "b"),
            Some(false),
            "the name alone rules it out"
        );
        assert_eq!(judge(&[term(None, true), term(named, false)], "a"), Some(true));
    }
}
