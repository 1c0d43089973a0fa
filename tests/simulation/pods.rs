//! Claims and nodes of a pod, as all components determine them.

use std::collections::BTreeSet;
use std::sync::Arc;

use drayman::api::resource::{Pod, ResourceClaim};
use drayman::core::claims::ObjectKey;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

use crate::cluster::Cluster;
use crate::driver::hold_of;

pub(crate) fn uid_of_pod(pod: &Pod) -> String {
    pod.metadata.uid.clone().unwrap_or_default()
}

/// The owner reference of objects of a pod.
pub(crate) fn owned_by(pod: &Pod) -> OwnerReference {
    OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Pod".to_owned(),
        name: pod.metadata.name.clone().unwrap_or_default(),
        uid: uid_of_pod(pod),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}

impl Cluster {
    /// The claim of a pod entry, if it exists and belongs to the pod.
    pub(crate) fn claim_of_entry(&self, key: &ObjectKey, entry: &str) -> Option<Arc<ResourceClaim>> {
        let pod = self.store.pods.get(key)?;
        let source = &pod
            .spec
            .resource_claims
            .iter()
            .find(|claim| claim.name == entry)?
            .source;
        if let Some(name) = &source.resource_claim_name {
            return self
                .store
                .claims
                .get(&ObjectKey::new(key.namespace.clone(), name.clone()))
                .cloned();
        }
        let statuses = &pod.status.resource_claim_statuses;
        let name = statuses
            .iter()
            .find(|status| status.name == entry)?
            .resource_claim_name
            .clone()?;
        let claim = self
            .store
            .claims
            .get(&ObjectKey::new(key.namespace.clone(), name))?;
        (Self::owner_of(claim) == pod.metadata.uid.as_deref()).then(|| claim.clone())
    }

    /// All claims of a pod by entry; `None` while one is missing or being deleted.
    pub(crate) fn claims_of(&self, key: &ObjectKey) -> Option<Vec<(String, Arc<ResourceClaim>)>> {
        let pod = self.store.pods.get(key)?;
        pod.spec
            .resource_claims
            .iter()
            .map(|entry| {
                let claim = self.claim_of_entry(key, &entry.name)?;
                claim
                    .metadata
                    .deletion_timestamp
                    .is_none()
                    .then_some((entry.name.clone(), claim))
            })
            .collect()
    }

    pub(crate) fn nodes_of(&self, uid: &str) -> BTreeSet<String> {
        let all: BTreeSet<String> = self.environment.nodes.keys().cloned().collect();
        match self.pod_nodes.get(uid) {
            Some(nodes) => nodes.intersection(&all).cloned().collect(),
            None => all,
        }
    }
}

/// Whether an allocation is usable on a node. Allocations of the other driver are usable on any node.
pub(crate) fn reaches(allocation: &drayman::api::resource::AllocationResult, node: &str) -> bool {
    let hold = hold_of(allocation);
    hold.node.is_empty() || hold.node == node
}
