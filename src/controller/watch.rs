//! Turns watches into events, and removes unused parts of the objects before they are cached.
//!
//! Each kind keeps its own order; a list replaces the known objects. There may be ten thousand objects, kept for as long as they exist, so
//! unused fields of watched objects are not even decoded: `managedFields` is most of an object, a tree of small allocations, and the gaps
//! they leave in the heap are lost to larger allocations. An object also comes from a read, or as the answer to a write of our own; the
//! answer is the copy that stays if no other client changes the object later.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;

use futures::stream::{self, BoxStream, StreamExt as _};
use k8s_openapi::api::core::v1::NodeSelector;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use kube::api::Api;
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Resource, ResourceExt as _};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use crate::api::resource::{
    FINALIZER_SUFFIX, NODE_LABEL, POD_CLAIM_NAME_ANNOTATION, Pod, PodResourceClaim, PodSchedulingContext,
    PodSchedulingContextSpec, PodSchedulingContextStatus, PodSpec, PodStatus, ResourceClaim,
    ResourceClaimParametersReference, ResourceClaimSpec, ResourceClaimStatus, ResourceClass,
    partial_resource,
};
use crate::core::claims::{Event, ObjectKey};

/// The annotation in which `kubectl apply` stores a copy of the whole object.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// Number of objects in a page of a list. A page is in memory as a whole, twice, and users can store two megabytes in each object.
const PAGE: u32 = 50;

/// Maximum memory of the labels of a user's object, of its annotations, and of its owner references. Of larger ones only those are kept that
/// the controller reads: a user can store a megabyte in each object, which takes up to forty times the size in memory.
const METADATA_MAX: usize = 16 * 1024;
/// Memory of a label, an annotation or an owner reference besides its text.
const METADATA_ENTRY: usize = 128;
/// Maximum number of finalizers of a user's object that are kept.
const FINALIZERS_MAX: usize = 32;

/// Maximum number of characters of a text in a claim's `parametersRef`. The API server accepts any number, but no object has a longer name.
const REFERENCE_MAX: usize = 256;

/// Maximum estimated memory of a pod's spec. If it takes more, `other` is dropped.
const POD_SPEC_MAX: usize = 256 * 1024;
/// Memory of an object within `other`, and of any other value, besides its text.
const OBJECT: usize = 600;
const VALUE: usize = 64;

/// The events of one kind's watch.
struct WatchEvents<K> {
    all: fn(Vec<Arc<K>>) -> Event,
    one: fn(Arc<K>) -> Event,
    gone: fn(&K) -> Event,
}

/// Watches. They never end; errors are logged and retried with a growing delay.
pub(super) type Watches = stream::SelectAll<BoxStream<'static, Event>>;

/// The watches that a controller starts before it leads, and keeps afterwards.
pub(super) struct Standby {
    pub(super) watches: Watches,
    known: StandbyCache,
}

impl Standby {
    pub(super) fn new(client: &kube::Client) -> Self {
        let watches = stream::select_all([
            events(
                Api::all(client.clone()),
                &WatchEvents {
                    all: Event::Classes,
                    one: Event::Class,
                    gone: |class: &ResourceClass| Event::ClassGone(class.name_any()),
                },
            ),
            events(
                Api::all(client.clone()),
                &WatchEvents {
                    all: Event::Contexts,
                    one: Event::Context,
                    gone: |context: &PodSchedulingContext| Event::ContextGone {
                        key: ObjectKey::of(&context.metadata),
                        uid: context.metadata.uid.clone().unwrap_or_default(),
                    },
                },
            ),
        ]);
        Self {
            watches,
            known: StandbyCache::default(),
        }
    }

    /// Keeps the caches current while another process leads. Never returns.
    pub(super) async fn keep(&mut self) {
        while let Some(event) = self.watches.next().await {
            self.known.see(event);
        }
    }

    /// Returns the watches, and the known objects as events.
    pub(super) fn begin(self) -> (Watches, Vec<Event>) {
        (self.watches, self.known.into_events())
    }
}

/// The claims, listed when the stream is first polled. Allocations are the only record of allocated devices, so a standby keeps no copy
/// of them: a watch may lag behind, and only a list requested after the previous leader's last write shows all of its allocations.
pub(super) fn claims(client: &kube::Client) -> BoxStream<'static, Event> {
    events(
        Api::all(client.clone()),
        &WatchEvents {
            all: Event::Claims,
            one: Event::Claim,
            gone: |claim: &ResourceClaim| Event::ClaimGone {
                key: ObjectKey::of(&claim.metadata),
                uid: claim.metadata.uid.clone().unwrap_or_default(),
            },
        },
    )
}

/// The last state of each object that a standby watches. A kind is `None` until its first list is complete.
#[derive(Debug, Default)]
struct StandbyCache {
    classes: Option<BTreeMap<String, Arc<ResourceClass>>>,
    contexts: Option<BTreeMap<ObjectKey, Arc<PodSchedulingContext>>>,
}

impl StandbyCache {
    fn see(&mut self, event: Event) {
        let class_key = |class: &Arc<ResourceClass>| class.name_any();
        let context_key = |context: &Arc<PodSchedulingContext>| ObjectKey::of(&context.metadata);
        match event {
            Event::Classes(all) => {
                self.classes = Some(all.into_iter().map(|class| (class_key(&class), class)).collect());
            }
            Event::Class(class) => set(&mut self.classes, class_key(&class), Some(class)),
            Event::ClassGone(name) => set(&mut self.classes, name, None),
            Event::Contexts(all) => {
                let all = all.into_iter();
                self.contexts = Some(all.map(|context| (context_key(&context), context)).collect());
            }
            Event::Context(context) => set(&mut self.contexts, context_key(&context), Some(context)),
            Event::ContextGone { key, .. } => set(&mut self.contexts, key, None),
            // A standby watches no other kinds.
            _ => {}
        }
    }

    fn into_events(self) -> Vec<Event> {
        let classes = self
            .classes
            .map(|all| Event::Classes(all.into_values().collect()));
        let contexts = self
            .contexts
            .map(|all| Event::Contexts(all.into_values().collect()));
        classes.into_iter().chain(contexts).collect()
    }
}

/// Replaces an object, or removes it if `None`, once the first list is complete.
fn set<K: Ord, V>(known: &mut Option<BTreeMap<K, V>>, key: K, object: Option<V>) {
    let Some(known) = known else {
        return;
    };
    match object {
        Some(object) => drop(known.insert(key, object)),
        None => drop(known.remove(&key)),
    }
}

fn events<K>(api: Api<Kept<K>>, kind: &'static WatchEvents<K>) -> BoxStream<'static, Event>
where
    K: Watched + Debug + Send + Sync + 'static,
{
    let mut listed = None;
    watcher(api, watcher::Config::default().page_size(PAGE))
        .default_backoff()
        .filter_map(move |result| {
            let event = match result {
                Ok(watcher::Event::Init) => {
                    listed = Some(Vec::new());
                    None
                }
                Ok(watcher::Event::InitApply(object)) => {
                    if let Some(listed) = &mut listed {
                        listed.push(object.0);
                    }
                    None
                }
                Ok(watcher::Event::InitDone) => listed.take().map(kind.all),
                Ok(watcher::Event::Apply(object)) => Some((kind.one)(object.0)),
                Ok(watcher::Event::Delete(object)) => Some((kind.gone)(&object.0)),
                Err(error) => {
                    tracing::warn!(kind = %K::kind(&()), %error, "watch failed; it is retried");
                    None
                }
            };
            std::future::ready(event)
        })
        .boxed()
}

/// A cached object.
pub(super) trait Prune {
    /// Removes unused fields, and frees memory that decoding reserved and did not use.
    fn trim(&mut self);
}

pub(super) fn trimmed<T: Prune>(mut object: T) -> Arc<T> {
    object.trim();
    Arc::new(object)
}

pub(super) trait Watched: Prune + Resource<DynamicType = ()> + Clone {
    /// The fields that are decoded.
    type Decoded: for<'de> Deserialize<'de> + Into<Self>;
}

/// A watched object, or one that was read, in its trimmed form.
#[derive(Clone, Debug)]
pub(super) struct Kept<K>(pub(super) Arc<K>);

impl<'de, K: Watched> Deserialize<'de> for Kept<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Self(trimmed(K::Decoded::deserialize(deserializer)?.into())))
    }
}

partial_resource!([K: Watched] Kept<K>, K, self => self.0.meta(), Arc::make_mut(&mut self.0).meta_mut());

/// The metadata used by the controller or by a driver.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct DecodedMetadata {
    name: Option<String>,
    namespace: Option<String>,
    uid: Option<String>,
    resource_version: Option<String>,
    generation: Option<i64>,
    creation_timestamp: Option<Time>,
    deletion_timestamp: Option<Time>,
    labels: Option<BTreeMap<String, String>>,
    annotations: Option<BTreeMap<String, String>>,
    owner_references: Option<Vec<OwnerReference>>,
    finalizers: Option<Vec<String>>,
}

impl From<DecodedMetadata> for ObjectMeta {
    fn from(parts: DecodedMetadata) -> Self {
        Self {
            name: parts.name,
            namespace: parts.namespace,
            uid: parts.uid,
            resource_version: parts.resource_version,
            generation: parts.generation,
            creation_timestamp: parts.creation_timestamp,
            deletion_timestamp: parts.deletion_timestamp,
            labels: parts.labels,
            annotations: parts.annotations,
            owner_references: parts.owner_references,
            finalizers: parts.finalizers,
            ..Self::default()
        }
    }
}

/// An object as decoded: part of its metadata, and all other fields.
#[derive(Deserialize)]
pub(super) struct DecodedObject<S, T: Default> {
    metadata: DecodedMetadata,
    spec: S,
    #[serde(default)]
    status: T,
}

impl From<DecodedObject<ResourceClaimSpec, ResourceClaimStatus>> for ResourceClaim {
    fn from(parts: DecodedObject<ResourceClaimSpec, ResourceClaimStatus>) -> Self {
        Self {
            metadata: parts.metadata.into(),
            spec: parts.spec,
            status: parts.status,
            pod_claim_name: None,
        }
    }
}

impl Watched for ResourceClaim {
    type Decoded = DecodedObject<ResourceClaimSpec, ResourceClaimStatus>;
}

impl From<DecodedObject<PodSchedulingContextSpec, PodSchedulingContextStatus>> for PodSchedulingContext {
    fn from(parts: DecodedObject<PodSchedulingContextSpec, PodSchedulingContextStatus>) -> Self {
        Self {
            metadata: parts.metadata.into(),
            spec: parts.spec,
            status: parts.status,
        }
    }
}

impl Watched for PodSchedulingContext {
    type Decoded = DecodedObject<PodSchedulingContextSpec, PodSchedulingContextStatus>;
}

// Decoded whole: there are few classes.
impl Watched for ResourceClass {
    type Decoded = Self;
}

/// The fields of a pod's spec that the controller reads.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodSpecWithoutOther {
    node_name: Option<String>,
    priority: Option<i32>,
    #[serde(default)]
    resource_claims: Vec<PodResourceClaim>,
}

/// Estimates the memory of a JSON text that is decoded to a [`serde_json::Value`].
fn decoded_size(text: &str) -> usize {
    let (mut size, mut in_string, mut escaped) = (text.len(), false, false);
    for byte in text.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => in_string = !in_string,
            b'{' if !in_string => size += OBJECT,
            b',' if !in_string => size += VALUE,
            _ => {}
        }
    }
    size
}

/// A pod's spec, without `other` if it exceeds [`POD_SPEC_MAX`].
pub(super) struct BoundedPodSpec(PodSpec);

impl<'de> Deserialize<'de> for BoundedPodSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = Box::<RawValue>::deserialize(deserializer)?;
        let spec = if decoded_size(raw.get()) <= POD_SPEC_MAX {
            serde_json::from_str(raw.get())
        } else {
            serde_json::from_str::<PodSpecWithoutOther>(raw.get()).map(|parts| PodSpec {
                node_name: parts.node_name,
                priority: parts.priority,
                resource_claims: parts.resource_claims,
                other: BTreeMap::new(),
            })
        };
        spec.map(Self).map_err(D::Error::custom)
    }
}

impl From<DecodedObject<BoundedPodSpec, PodStatus>> for Pod {
    fn from(parts: DecodedObject<BoundedPodSpec, PodStatus>) -> Self {
        Self {
            metadata: parts.metadata.into(),
            spec: parts.spec.0,
            status: parts.status,
        }
    }
}

// Pods are read, not watched.
impl Watched for Pod {
    type Decoded = DecodedObject<BoundedPodSpec, PodStatus>;
}

/// `managedFields` is most of an object. A list is decoded with capacity for four elements, however short it is.
fn trim_metadata(metadata: &mut ObjectMeta) {
    metadata.managed_fields = None;
    if let Some(annotations) = &mut metadata.annotations {
        annotations.remove(LAST_APPLIED);
        if annotations.is_empty() {
            metadata.annotations = None;
        }
    }
    if let Some(owners) = &mut metadata.owner_references {
        owners.shrink_to_fit();
    }
    if let Some(finalizers) = &mut metadata.finalizers {
        finalizers.shrink_to_fit();
    }
}

/// Drops metadata beyond [`METADATA_MAX`] and [`FINALIZERS_MAX`], except the entries that the controller reads.
fn bound_metadata(metadata: &mut ObjectMeta) {
    let large_finalizers = metadata.finalizers.as_ref().map_or(0, Vec::len) > FINALIZERS_MAX;
    if large_finalizers && let Some(finalizers) = &mut metadata.finalizers {
        // Those of drivers come first. Some others are kept, because a claim with another finalizer stays when ours is removed.
        finalizers.sort_by_key(|finalizer| !finalizer.ends_with(FINALIZER_SUFFIX));
        finalizers.truncate(FINALIZERS_MAX);
        finalizers.shrink_to_fit();
    }
    let size = |owner: &OwnerReference| {
        METADATA_ENTRY + owner.api_version.len() + owner.kind.len() + owner.name.len() + owner.uid.len()
    };
    let owners = metadata.owner_references.iter().flatten();
    let large_owners = owners.map(size).sum::<usize>() > METADATA_MAX;
    if large_owners && let Some(owners) = &mut metadata.owner_references {
        owners.retain(|owner| owner.controller == Some(true) && size(owner) <= METADATA_MAX);
        owners.shrink_to_fit();
    }
    let is_large = |map: &Option<BTreeMap<String, String>>| {
        let entries = map.iter().flatten();
        let sizes = entries.map(|(key, value)| METADATA_ENTRY + key.len() + value.len());
        sizes.sum::<usize>() > METADATA_MAX
    };
    let (large_labels, large_annotations) = (is_large(&metadata.labels), is_large(&metadata.annotations));
    if large_labels {
        let kept: Vec<String> = node_labels(metadata).collect();
        if let Some(labels) = &mut metadata.labels {
            labels.retain(|key, _| kept.contains(key));
        }
    }
    if large_annotations && let Some(annotations) = &mut metadata.annotations {
        annotations.retain(|key, value| key == POD_CLAIM_NAME_ANNOTATION && value.len() <= METADATA_MAX);
    }
    if large_finalizers || large_owners || large_labels || large_annotations {
        tracing::debug!(
            name = metadata.name.as_deref().unwrap_or_default(),
            "an object has more metadata than the controller keeps; the rest is ignored"
        );
    }
}

/// Cuts texts that are longer than the name of any object. The rest is still too long for a name.
fn bound_reference(reference: &mut ResourceClaimParametersReference) {
    let texts = [&mut reference.kind, &mut reference.name];
    for text in texts.into_iter().chain(&mut reference.api_group) {
        if text.len() > REFERENCE_MAX {
            *text = text.chars().take(REFERENCE_MAX).collect();
        }
    }
}

/// The node labels of the drivers whose finalizers the claim has.
fn node_labels(metadata: &ObjectMeta) -> impl Iterator<Item = String> {
    let finalizers = metadata.finalizers.iter().flatten();
    finalizers
        .filter_map(|finalizer| finalizer.strip_suffix(FINALIZER_SUFFIX))
        .map(|driver| format!("{driver}/{NODE_LABEL}"))
}

/// Our node label is read only until the claim is allocated, unless the allocation names no node; a map costs half a kilobyte. The
/// label belongs to the driver whose finalizer the claim has.
fn trim_node_label(metadata: &mut ObjectMeta) {
    let node_labels: Vec<String> = node_labels(metadata).collect();
    let Some(labels) = &mut metadata.labels else {
        return;
    };
    for label in node_labels {
        labels.remove(&label);
    }
    if labels.is_empty() {
        metadata.labels = None;
    }
}

/// Nearly every claim is made from a template, and so has exactly this annotation. It is needed for as long as the pod exists; stored
/// as a string of its own it takes a tenth of its size in a map.
fn trim_pod_claim_name(claim: &mut ResourceClaim) {
    let annotations = &mut claim.metadata.annotations;
    if let Some(only) = annotations.as_mut().filter(|all| all.len() == 1)
        && let Some(entry) = only.remove(POD_CLAIM_NAME_ANNOTATION)
    {
        claim.pod_claim_name = Some(entry.into_boxed_str());
        *annotations = None;
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

impl Prune for ResourceClass {
    fn trim(&mut self) {
        trim_metadata(&mut self.metadata);
    }
}

impl Prune for ResourceClaim {
    fn trim(&mut self) {
        trim_metadata(&mut self.metadata);
        bound_metadata(&mut self.metadata);
        if let Some(reference) = &mut self.spec.parameters_ref {
            bound_reference(reference);
        }
        // A driver is called for claims without an allocation, and may read any of their labels and annotations.
        if let Some(allocation) = &self.status.allocation {
            // Keep the label if the allocation names no node: the label is then the only record of the node.
            if allocation.available_on_nodes.is_some() {
                trim_node_label(&mut self.metadata);
            }
            trim_pod_claim_name(self);
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

impl Prune for PodSchedulingContext {
    fn trim(&mut self) {
        trim_metadata(&mut self.metadata);
        bound_metadata(&mut self.metadata);
        self.spec.potential_nodes.shrink_to_fit();
        self.status.resource_claims.shrink_to_fit();
        for entry in &mut self.status.resource_claims {
            entry.unsuitable_nodes.shrink_to_fit();
        }
    }
}

impl Prune for Pod {
    fn trim(&mut self) {
        trim_metadata(&mut self.metadata);
        bound_metadata(&mut self.metadata);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::core::claims::is_made_for;

    fn context(name: &str, version: &str) -> Arc<PodSchedulingContext> {
        let metadata = json!({ "namespace": "ns", "name": name, "uid": name, "resourceVersion": version });
        Arc::new(serde_json::from_value(json!({ "metadata": metadata, "spec": {} })).unwrap())
    }

    fn class(name: &str) -> Arc<ResourceClass> {
        Arc::new(serde_json::from_value(json!({ "metadata": { "name": name }, "driverName": "d" })).unwrap())
    }

    fn after(events: impl IntoIterator<Item = Event>) -> Vec<Event> {
        let mut known = StandbyCache::default();
        events.into_iter().for_each(|event| known.see(event));
        known.into_events()
    }

    #[test]
    fn a_standby_keeps_the_last_state_of_each_existing_object() {
        let gone = |name: &str| Event::ContextGone {
            key: ObjectKey::new("ns", name),
            uid: name.to_owned(),
        };
        let events = after([
            Event::Contexts(vec![context("a", "1"), context("b", "2")]),
            Event::Context(context("a", "3")),
            Event::Context(context("c", "4")),
            gone("b"),
            Event::Classes(vec![class("x")]),
            Event::Class(class("y")),
            Event::ClassGone("x".to_owned()),
        ]);
        let expected = [
            Event::Classes(vec![class("y")]),
            Event::Contexts(vec![context("a", "3"), context("c", "4")]),
        ];
        assert_eq!(events, expected);
        // After a gap all objects are listed again; a deleted object only shows by its absence.
        let events = after([
            Event::Contexts(vec![context("a", "1"), context("b", "2")]),
            Event::Contexts(vec![context("b", "2")]),
        ]);
        assert_eq!(events, [Event::Contexts(vec![context("b", "2")])]);
    }

    #[test]
    fn an_incomplete_list_is_not_used() {
        assert_eq!(after([]), []);
        assert_eq!(
            after([Event::Context(context("a", "1")), Event::Class(class("x"))]),
            [],
            "a part"
        );
        assert_eq!(after([Event::Contexts(vec![])]), [Event::Contexts(vec![])]);
    }

    #[test]
    fn a_claim_loses_managed_fields_and_nothing_else() {
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
        let watched = serde_json::from_str::<Kept<ResourceClaim>>(text).unwrap().0;
        let mut expected = decode();
        expected.metadata.managed_fields = None;
        for kept in [trimmed(decode()), watched] {
            assert_eq!(*kept, expected);
            let allocation = kept.status.allocation.as_ref().unwrap();
            assert_eq!(allocation.resource_handles.capacity(), 1);
        }
    }

    #[test]
    fn a_watch_decodes_each_metadata_field_that_is_read() {
        let text = r#"{
            "metadata": { "name": "c", "namespace": "n", "uid": "1", "resourceVersion": "7", "generation": 2,
                "creationTimestamp": "2026-01-01T00:00:00Z", "deletionTimestamp": "2026-01-02T00:00:00Z",
                "labels": { "l": "m" }, "annotations": { "kubectl.kubernetes.io/last-applied-configuration": "{}" },
                "finalizers": ["f"] },
            "spec": { "selectedNode": "a", "potentialNodes": ["a", "b"] },
            "status": { "resourceClaims": [{ "name": "d", "unsuitableNodes": ["b"] }] }
        }"#;
        let kept = serde_json::from_str::<Kept<PodSchedulingContext>>(text)
            .unwrap()
            .0;
        let mut expected = serde_json::from_str::<PodSchedulingContext>(text).unwrap();
        expected.metadata.annotations = None;
        assert_eq!(*kept, expected);
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
        let allocated =
            r#"{ "allocation": { "resourceHandles": [], "availableOnNodes": { "nodeSelectorTerms": [] } } }"#;
        assert_eq!(kept(r#"{ "d.dev/node": "n" }"#, allocated), None);
        let nowhere = r#"{ "allocation": { "resourceHandles": [] } }"#;
        let labels = kept(r#"{ "d.dev/node": "n" }"#, nowhere);
        assert!(labels.is_some(), "no other record has the node");
        assert_eq!(kept(r#"{ "d.dev/node": "n" }"#, "{}").unwrap().len(), 1);
        let others = kept(
            r#"{ "d.dev/node": "n", "e.dev/node": "n", "app": "x" }"#,
            allocated,
        )
        .unwrap();
        assert!(others.keys().eq(["app", "e.dev/node"]));
    }

    #[test]
    fn the_pod_claim_name_is_kept_without_the_annotation() {
        let kept = |annotations: &str, status: &str| {
            let text = format!(
                r#"{{ "metadata": {{ "name": "c", "annotations": {annotations} }},
                    "spec": {{ "resourceClassName": "test" }}, "status": {status} }}"#
            );
            serde_json::from_str::<Kept<ResourceClaim>>(&text).unwrap().0
        };
        let (alone, beside) = (
            r#"{ "resource.kubernetes.io/pod-claim-name": "gpu" }"#,
            r#"{ "a": "b", "resource.kubernetes.io/pod-claim-name": "gpu" }"#,
        );
        let allocated = r#"{ "allocation": { "resourceHandles": [] } }"#;
        for (annotations, status, stay) in [
            (alone, allocated, 0),
            (alone, "{}", 1),
            (beside, allocated, 2),
            (r#"{ "a": "b" }"#, allocated, 1),
        ] {
            let claim = kept(annotations, status);
            let left = claim.metadata.annotations.as_ref().map_or(0, BTreeMap::len);
            assert_eq!(left, stay, "{annotations} with {status}");
            assert_eq!(is_made_for(&claim, "gpu"), annotations.contains("gpu"));
            assert!(!is_made_for(&claim, "b"));
        }
    }

    #[test]
    fn large_labels_and_annotations_are_dropped_unless_read() {
        let kept = |value: &str| {
            let claim = json!({
                "metadata": {
                    "name": "c", "finalizers": ["d.dev/deletion-protection"],
                    "labels": { "d.dev/node": "n", "other.dev/node": "n", "app": value },
                    "annotations": { POD_CLAIM_NAME_ANNOTATION: "gpu", "a": value },
                },
                "spec": { "resourceClassName": "test" },
            });
            let claim = serde_json::from_str::<Kept<ResourceClaim>>(&claim.to_string()).unwrap();
            let metadata = claim.0.metadata.clone();
            (metadata.labels.unwrap(), metadata.annotations.unwrap())
        };
        let (labels, annotations) = kept("x");
        assert_eq!((labels.len(), annotations.len()), (3, 2));
        let (labels, annotations) = kept(&"x".repeat(METADATA_MAX));
        assert!(labels.keys().eq(["d.dev/node"]));
        assert!(annotations.keys().eq([POD_CLAIM_NAME_ANNOTATION]));
    }

    #[test]
    fn many_small_labels_are_large() {
        let labels: BTreeMap<String, String> = (0..200).map(|n| (n.to_string(), String::new())).collect();
        let claim =
            json!({ "metadata": { "name": "c", "labels": labels }, "spec": { "resourceClassName": "test" } });
        let claim = serde_json::from_str::<Kept<ResourceClaim>>(&claim.to_string()).unwrap();
        assert_eq!(claim.0.metadata.labels, Some(BTreeMap::new()));
    }

    #[test]
    fn unread_finalizers_and_owners_are_dropped() {
        let kept = |number: usize, uid: &str| {
            let owner = |uid: &str, controller: bool| json!({ "apiVersion": "v1", "kind": "Pod", "name": "p", "uid": uid, "controller": controller });
            let mut owners = vec![owner("other", false); number];
            owners.push(owner(uid, true));
            let mut finalizers = vec!["example.com/other"; number];
            finalizers.push("d.dev/deletion-protection");
            let claim = json!({
                "metadata": { "name": "c", "finalizers": finalizers, "ownerReferences": owners },
                "spec": { "resourceClassName": "test" },
            });
            let claim = serde_json::from_str::<Kept<ResourceClaim>>(&claim.to_string()).unwrap();
            let metadata = claim.0.metadata.clone();
            (metadata.finalizers.unwrap(), metadata.owner_references.unwrap())
        };
        let (finalizers, owners) = kept(2, "1");
        assert_eq!((finalizers.len(), owners.len()), (3, 3));
        let (finalizers, owners) = kept(1000, "1");
        assert_eq!(finalizers.len(), FINALIZERS_MAX);
        assert_eq!(
            finalizers[..2],
            ["d.dev/deletion-protection", "example.com/other"]
        );
        assert!(
            matches!(owners.as_slice(), [owner] if owner.uid == "1"),
            "{owners:?}"
        );
        let (_, owners) = kept(1, &"1".repeat(METADATA_MAX));
        assert_eq!(owners, []);
    }

    #[test]
    fn long_texts_of_a_parameters_reference_are_cut() {
        let kept = |name: &str| {
            let reference = json!({ "apiGroup": name, "kind": name, "name": name });
            let claim = json!({
                "metadata": { "name": "c" },
                "spec": { "resourceClassName": "test", "parametersRef": reference },
            });
            let claim = serde_json::from_str::<Kept<ResourceClaim>>(&claim.to_string()).unwrap();
            let reference = claim.0.spec.parameters_ref.clone().unwrap();
            [reference.api_group.unwrap(), reference.kind, reference.name]
        };
        assert_eq!(kept("name"), ["name"; 3]);
        assert_eq!(kept(&"ü".repeat(100_000)), [&*"ü".repeat(REFERENCE_MAX); 3]);
    }

    #[test]
    fn a_large_pod_keeps_only_the_fields_that_are_read() {
        let kept = |containers: Value| {
            let pod = json!({
                "metadata": { "name": "p" },
                "spec": {
                    "nodeName": "n", "priority": 3, "containers": containers,
                    "resourceClaims": [{ "name": "device", "source": { "resourceClaimName": "c" } }],
                },
                "status": { "phase": "Pending" },
            });
            let pod = serde_json::from_str::<Kept<Pod>>(&pod.to_string()).unwrap();
            (*pod.0).clone()
        };
        let mut small = kept(json!([{ "name": "main" }]));
        assert!(small.spec.other.contains_key("containers"));
        small.spec.other.clear();
        assert_eq!(small.spec.resource_claims.len(), 1);
        let script = kept(json!([{ "args": ["{,\"".repeat(1000)] }]));
        assert!(script.spec.other.contains_key("containers"));
        for large in [
            json!([{ "name": "x".repeat(POD_SPEC_MAX) }]),
            json!([{ "env": vec![json!({ "name": "A" }); 1000] }]),
            json!([{ "args": vec![""; 5000] }]),
        ] {
            assert_eq!(kept(large), small);
        }
    }
}
