//! Objects are kept for as long as they exist, and there may be ten thousand of them: nothing is kept that nobody reads.
//!
//! An object comes from a watch, from a read, or as the answer to a write of our own; the last is what stays if nobody changes the
//! object after us.

use std::sync::Arc;

use k8s_openapi::api::core::v1::NodeSelector;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::api::resource::{Pod, PodSchedulingContext, ResourceClaim, ResourceClass};
use crate::core::node::naming::NODE_LABEL;

/// An object that is kept.
pub(super) trait Trim {
    /// Leaves out what nobody reads, and gives back memory that decoding has reserved and not used.
    fn trim(&mut self);
}

/// The object as it is kept.
pub(super) fn trimmed<T: Trim>(mut object: T) -> Arc<T> {
    object.trim();
    Arc::new(object)
}

/// `managedFields` is most of an object. A list is decoded into room for four, however short it is.
fn trim_metadata(metadata: &mut ObjectMeta) {
    metadata.managed_fields = None;
    if let Some(owners) = &mut metadata.owner_references {
        owners.shrink_to_fit();
    }
    if let Some(finalizers) = &mut metadata.finalizers {
        finalizers.shrink_to_fit();
    }
}

/// Our label with the node is read only until the claim is allocated, and a map costs half a kilobyte. Ours is the label of the driver
/// whose finalizer the claim has.
fn trim_node_label(metadata: &mut ObjectMeta) {
    let Some(labels) = &mut metadata.labels else {
        return;
    };
    for finalizer in metadata.finalizers.iter().flatten() {
        if let Some(driver) = finalizer.strip_suffix("/deletion-protection") {
            labels.remove(&format!("{driver}/{NODE_LABEL}"));
        }
    }
    if labels.is_empty() {
        metadata.labels = None;
    }
}

fn trim_selector(selector: &mut NodeSelector) {
    selector.node_selector_terms.shrink_to_fit();
    for term in &mut selector.node_selector_terms {
        let lists = [&mut term.match_fields, &mut term.match_expressions];
        for requirements in lists.into_iter().flatten() {
            requirements.shrink_to_fit();
            for values in requirements.iter_mut().filter_map(|each| each.values.as_mut()) {
                values.shrink_to_fit();
            }
        }
    }
}

impl Trim for ResourceClass {
    fn trim(&mut self) {
        trim_metadata(&mut self.metadata);
    }
}

impl Trim for ResourceClaim {
    fn trim(&mut self) {
        trim_metadata(&mut self.metadata);
        if self.status.allocation.is_some() {
            trim_node_label(&mut self.metadata);
        }
        self.status.reserved_for.shrink_to_fit();
        if let Some(allocation) = &mut self.status.allocation {
            allocation.resource_handles.shrink_to_fit();
            if let Some(selector) = &mut allocation.available_on_nodes {
                trim_selector(selector);
            }
        }
    }
}

impl Trim for PodSchedulingContext {
    fn trim(&mut self) {
        trim_metadata(&mut self.metadata);
        self.spec.potential_nodes.shrink_to_fit();
        self.status.resource_claims.shrink_to_fit();
        for entry in &mut self.status.resource_claims {
            entry.unsuitable_nodes.shrink_to_fit();
        }
    }
}

impl Trim for Pod {
    fn trim(&mut self) {
        trim_metadata(&mut self.metadata);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_is_kept_without_managed_fields_and_with_everything_else() {
        let text = r#"{
            "metadata": { "name": "c", "uid": "1", "finalizers": ["f"], "annotations": { "a": "b" },
                "ownerReferences": [{ "apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "2", "controller": true }],
                "managedFields": [{ "manager": "m", "fieldsV1": { "f:status": {} } }] },
            "spec": { "resourceClassName": "test" },
            "status": {
                "allocation": {
                    "resourceHandles": [{ "driverName": "d", "data": "{}" }],
                    "availableOnNodes": { "nodeSelectorTerms": [{ "matchFields": [
                        { "key": "metadata.name", "operator": "In", "values": ["n"] }] }] } },
                "reservedFor": [{ "resource": "pods", "name": "p", "uid": "2" }] }
        }"#;
        let decode = || serde_json::from_str::<ResourceClaim>(text).unwrap();
        let (kept, mut expected) = (trimmed(decode()), decode());
        expected.metadata.managed_fields = None;
        assert_eq!(*kept, expected);
        let allocation = kept.status.allocation.as_ref().unwrap();
        assert_eq!(allocation.resource_handles.capacity(), 1);
    }

    #[test]
    fn our_label_goes_with_the_allocation_and_all_others_stay() {
        let kept = |labels: &str, status: &str| {
            let text = format!(
                r#"{{ "metadata": {{ "name": "c", "finalizers": ["d.dev/deletion-protection"], "labels": {labels} }},
                    "spec": {{ "resourceClassName": "test" }}, "status": {status} }}"#
            );
            trimmed(serde_json::from_str::<ResourceClaim>(&text).unwrap())
                .metadata
                .labels
                .clone()
        };
        let allocated = r#"{ "allocation": { "resourceHandles": [] } }"#;
        assert_eq!(kept(r#"{ "d.dev/node": "n" }"#, allocated), None);
        assert_eq!(kept(r#"{ "d.dev/node": "n" }"#, "{}").unwrap().len(), 1);
        let others = kept(
            r#"{ "d.dev/node": "n", "e.dev/node": "n", "app": "x" }"#,
            allocated,
        )
        .unwrap();
        assert!(others.keys().eq(["app", "e.dev/node"]));
    }
}
