//! Objects of the claim controller: template claims, and contexts for pods with a node name.

use drayman::api::resource::{
    AllocationMode, POD_CLAIM_NAME_ANNOTATION, PodSchedulingContext, PodSchedulingContextSpec, ResourceClaim,
    ResourceClaimParametersReference, ResourceClaimSpec,
};
use drayman::core::claims::ObjectKey;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::cluster::Cluster;
use crate::pods::owned_by;

/// The name of a template encodes its spec: the class, then optional parameters after a dot.
pub(crate) fn template_spec(name: &str) -> ResourceClaimSpec {
    let (class, parameters) = name
        .split_once('.')
        .map_or((name, None), |(class, rest)| (class, Some(rest)));
    ResourceClaimSpec {
        resource_class_name: class.to_owned(),
        parameters_ref: parameters.map(|name| ResourceClaimParametersReference {
            api_group: None,
            kind: "Parameters".to_owned(),
            name: name.to_owned(),
        }),
        allocation_mode: Some(AllocationMode::WaitForFirstConsumer),
    }
}

impl Cluster {
    pub(crate) fn create_claim_for(&mut self, key: &ObjectKey, entry: &str, suffix: u64) {
        let Some(pod) = self.store.pods.get(key).cloned() else {
            return;
        };
        let template = pod.spec.resource_claims.iter().find(|known| known.name == entry);
        let Some(template) = template.and_then(|entry| entry.source.resource_claim_template_name.clone())
        else {
            return;
        };
        let annotations = [(POD_CLAIM_NAME_ANNOTATION.to_owned(), entry.to_owned())];
        let _ = self.store.create_claim(ResourceClaim {
            metadata: ObjectMeta {
                namespace: Some(key.namespace.clone()),
                name: Some(format!("{}-{entry}-{suffix:05}", key.name)),
                annotations: Some(annotations.into()),
                owner_references: Some(vec![owned_by(&pod)]),
                ..ObjectMeta::default()
            },
            spec: template_spec(&template),
            ..ResourceClaim::default()
        });
    }

    pub(crate) fn select_node(&mut self, key: &ObjectKey) {
        let Some(pod) = self.store.pods.get(key).cloned() else {
            return;
        };
        let node = pod.spec.node_name.clone().unwrap_or_default();
        if self.store.contexts.contains_key(key) {
            let _ = self
                .store
                .update_context(key, |context| context.spec.selected_node = node);
        } else {
            let _ = self.store.create_context(PodSchedulingContext {
                metadata: ObjectMeta {
                    namespace: Some(key.namespace.clone()),
                    name: Some(key.name.clone()),
                    owner_references: Some(vec![owned_by(&pod)]),
                    ..ObjectMeta::default()
                },
                spec: PodSchedulingContextSpec {
                    selected_node: node,
                    potential_nodes: Vec::new(),
                },
                ..PodSchedulingContext::default()
            });
        }
    }
}
