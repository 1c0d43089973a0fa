//! The API server: objects with versions and UIDs, and the event history for watches. The test cluster's API server applies patches and
//! validates updates.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use drayman::api::resource::{Pod, PodSchedulingContext, ResourceClaim, ResourceClass, controller_of};
use drayman::core::claims::{ClaimPatch, Event, ObjectKey};
use drayman::testcluster::api::patch;
use drayman::testcluster::api::rules;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::core::Status;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, from_value, json, to_value};

use crate::driver::DRIVER;

/// The kinds that the controller watches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Class,
    Claim,
    Context,
}

pub(crate) const KINDS: [Kind; 3] = [Kind::Class, Kind::Claim, Kind::Context];

/// Why a request failed.
pub(crate) type ApiError = Box<Status>;

fn refused(code: u16, message: impl Into<String>) -> ApiError {
    Box::new(Status {
        code,
        message: message.into(),
        ..Status::default()
    })
}

pub(crate) fn conflict(message: impl Into<String>) -> ApiError {
    refused(409, message)
}

/// The endpoint of a claim update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    Main,
    Status,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Store {
    version: u64,
    uids: u64,
    pub(crate) classes: BTreeMap<String, Arc<ResourceClass>>,
    pub(crate) claims: BTreeMap<ObjectKey, Arc<ResourceClaim>>,
    pub(crate) contexts: BTreeMap<ObjectKey, Arc<PodSchedulingContext>>,
    pub(crate) pods: BTreeMap<ObjectKey, Arc<Pod>>,
    /// The watch events by kind.
    history: [Vec<Event>; 3],
    /// By context UID, every node that was ever selected.
    pub(crate) selected_ever: BTreeMap<String, BTreeSet<String>>,
    /// By class name, every driver that it ever named.
    pub(crate) drivers_ever: BTreeMap<String, BTreeSet<String>>,
    /// UIDs of pods that ever had a context.
    pub(crate) context_owners_ever: BTreeSet<String>,
    /// UIDs of all pods that ever existed, by key.
    pub(crate) pods_ever: BTreeMap<ObjectKey, BTreeSet<String>>,
}

fn check_update(
    kind: &str,
    subresource: &str,
    before: &impl Serialize,
    after: &impl Serialize,
) -> Result<(), ApiError> {
    let (before, after) = (to_value(before).unwrap(), to_value(after).unwrap());
    rules::check_update(kind, subresource, &before, &after).map_err(|message| {
        let status = json!({ "code": 422, "message": message, "details": { "kind": kind } });
        from_value(status).unwrap()
    })
}

/// Applies the body of a patch by our driver.
fn apply_patch<T: Serialize + DeserializeOwned>(
    kind: &str,
    subresource: &str,
    content_type: &str,
    object: &mut T,
    body: &Value,
) -> Result<(), ApiError> {
    let before = to_value(&*object).unwrap();
    let after = patch::patched(kind, subresource, content_type, DRIVER, &before, body)
        .map_err(|refusal| from_value::<ApiError>(refusal).unwrap())?;
    *object = from_value(after).map_err(|error| refused(422, error.to_string()))?;
    Ok(())
}

fn deletion_time() -> Time {
    Time(jiff::Timestamp::UNIX_EPOCH)
}

impl Store {
    /// The number of stored changes.
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    pub(crate) fn history(&self, kind: Kind) -> &Vec<Event> {
        &self.history[kind as usize]
    }

    fn next_version(&mut self) -> String {
        self.version += 1;
        self.version.to_string()
    }

    fn stamp_new(&mut self, metadata: &mut ObjectMeta) {
        self.uids += 1;
        metadata.uid = Some(format!("uid-{:04}", self.uids));
        metadata.resource_version = Some(self.next_version());
    }

    fn record(&mut self, kind: Kind, event: Event) {
        self.history[kind as usize].push(event);
    }

    /// The list event of a kind.
    pub(crate) fn list(&self, kind: Kind) -> Event {
        match kind {
            Kind::Class => Event::Classes(self.classes.values().cloned().collect()),
            Kind::Claim => Event::Claims(self.claims.values().cloned().collect()),
            Kind::Context => Event::Contexts(self.contexts.values().cloned().collect()),
        }
    }

    // === classes ===

    pub(crate) fn put_class(&mut self, mut class: ResourceClass) {
        let name = class.metadata.name.clone().unwrap();
        match self.classes.get(&name) {
            Some(known) => {
                class.metadata.uid.clone_from(&known.metadata.uid);
                class.metadata.resource_version = Some(self.next_version());
            }
            None => self.stamp_new(&mut class.metadata),
        }
        self.drivers_ever
            .entry(name.clone())
            .or_default()
            .insert(class.driver_name.clone());
        let class = Arc::new(class);
        self.record(Kind::Class, Event::Class(class.clone()));
        self.classes.insert(name, class);
    }

    pub(crate) fn delete_class(&mut self, name: &str) {
        if self.classes.remove(name).is_some() {
            self.next_version();
            self.record(Kind::Class, Event::ClassGone(name.to_owned()));
        }
    }

    // === pods ===

    pub(crate) fn create_pod(&mut self, mut pod: Pod) -> Arc<Pod> {
        let key = ObjectKey::of(&pod.metadata);
        assert!(!self.pods.contains_key(&key), "{key} exists");
        self.stamp_new(&mut pod.metadata);
        let uid = pod.metadata.uid.clone().unwrap();
        self.pods_ever.entry(key.clone()).or_default().insert(uid);
        let pod = Arc::new(pod);
        self.pods.insert(key, pod.clone());
        pod
    }

    pub(crate) fn update_pod(&mut self, key: &ObjectKey, change: impl FnOnce(&mut Pod)) {
        if let Some(known) = self.pods.get(key) {
            let mut pod = (**known).clone();
            change(&mut pod);
            if pod != **known {
                pod.metadata.resource_version = Some(self.next_version());
                self.pods.insert(key.clone(), Arc::new(pod));
            }
        }
    }

    /// A running pod is removed after the kubelet has stopped it, any other pod immediately.
    pub(crate) fn delete_pod(&mut self, key: &ObjectKey) {
        let runs = self
            .pods
            .get(key)
            .is_some_and(|pod| pod.spec.node_name.is_some() && pod.status.phase.is_none());
        if runs {
            self.update_pod(key, |pod| {
                pod.metadata.deletion_timestamp.get_or_insert_with(deletion_time);
            });
        } else {
            self.remove_pod(key);
        }
    }

    pub(crate) fn remove_pod(&mut self, key: &ObjectKey) {
        if self.pods.remove(key).is_some() {
            self.next_version();
        }
    }

    // === claims ===

    pub(crate) fn create_claim(&mut self, mut claim: ResourceClaim) -> Result<Arc<ResourceClaim>, ApiError> {
        let key = ObjectKey::of(&claim.metadata);
        if self.claims.contains_key(&key) {
            return Err(conflict(format!("{key} already exists")));
        }
        claim.status = drayman::api::resource::ResourceClaimStatus::default();
        self.stamp_new(&mut claim.metadata);
        let claim = Arc::new(claim);
        self.record(Kind::Claim, Event::Claim(claim.clone()));
        self.claims.insert(key, claim.clone());
        Ok(claim)
    }

    /// Updates a claim through an endpoint; changes by `change` to fields of the other endpoint are ignored.
    pub(crate) fn update_claim(
        &mut self,
        key: &ObjectKey,
        uid: Option<&str>,
        endpoint: Endpoint,
        change: impl FnOnce(&mut ResourceClaim) -> Result<(), ApiError>,
    ) -> Result<Arc<ResourceClaim>, ApiError> {
        let known = self
            .claims
            .get(key)
            .cloned()
            .ok_or_else(|| refused(404, format!("{key} not found")))?;
        if uid.is_some() && uid != known.metadata.uid.as_deref() {
            return Err(conflict(format!("{key} has another uid")));
        }
        let mut claim = (*known).clone();
        change(&mut claim)?;
        if claim.metadata.resource_version != known.metadata.resource_version {
            return Err(conflict(format!("{key} has been modified")));
        }
        match endpoint {
            Endpoint::Main => claim.status = known.status.clone(),
            Endpoint::Status => claim.metadata = known.metadata.clone(),
        }
        claim.spec = known.spec.clone();
        if claim.metadata.finalizers.as_ref().is_some_and(Vec::is_empty) {
            claim.metadata.finalizers = None;
        }
        if claim == *known {
            return Ok(known);
        }
        let subresource = match endpoint {
            Endpoint::Main => "",
            Endpoint::Status => "status",
        };
        check_update("ResourceClaim", subresource, &*known, &claim)?;
        Ok(self.store_claim(key, claim))
    }

    /// Patches a claim through an endpoint, as our driver.
    pub(crate) fn patch_claim(
        &mut self,
        key: &ObjectKey,
        body: &ClaimPatch,
    ) -> Result<Arc<ResourceClaim>, ApiError> {
        let (endpoint, subresource, content_type, body) = match body {
            ClaimPatch::Main(body) => (Endpoint::Main, "", "application/strategic-merge-patch+json", body),
            ClaimPatch::StatusJson(body) => (Endpoint::Status, "status", "application/json-patch+json", body),
        };
        self.update_claim(key, None, endpoint, |claim| {
            apply_patch("ResourceClaim", subresource, content_type, claim, body)
        })
    }

    fn store_claim(&mut self, key: &ObjectKey, mut claim: ResourceClaim) -> Arc<ResourceClaim> {
        if claim.metadata.deletion_timestamp.is_some() && claim.metadata.finalizers.is_none() {
            self.remove_claim(key);
            // The response has the object of the request with its old version.
            return Arc::new(claim);
        }
        claim.metadata.resource_version = Some(self.next_version());
        let claim = Arc::new(claim);
        self.record(Kind::Claim, Event::Claim(claim.clone()));
        self.claims.insert(key.clone(), claim.clone());
        claim
    }

    pub(crate) fn delete_claim(&mut self, key: &ObjectKey) {
        let Some(known) = self.claims.get(key) else { return };
        if known.metadata.finalizers.is_none() {
            self.remove_claim(key);
        } else if known.metadata.deletion_timestamp.is_none() {
            let mut claim = (**known).clone();
            claim.metadata.deletion_timestamp = Some(deletion_time());
            self.store_claim(key, claim);
        }
    }

    fn remove_claim(&mut self, key: &ObjectKey) {
        if let Some(claim) = self.claims.remove(key) {
            self.next_version();
            let uid = claim.metadata.uid.clone().unwrap();
            self.record(
                Kind::Claim,
                Event::ClaimGone {
                    key: key.clone(),
                    uid,
                },
            );
        }
    }

    // === contexts ===

    pub(crate) fn create_context(&mut self, mut context: PodSchedulingContext) -> Result<(), ApiError> {
        let key = ObjectKey::of(&context.metadata);
        if self.contexts.contains_key(&key) {
            return Err(conflict(format!("{key} already exists")));
        }
        context.status = drayman::api::resource::PodSchedulingContextStatus::default();
        check_update("PodSchedulingContext", "", &context, &context)?;
        self.stamp_new(&mut context.metadata);
        self.store_context(&key, context);
        Ok(())
    }

    pub(crate) fn update_context(
        &mut self,
        key: &ObjectKey,
        change: impl FnOnce(&mut PodSchedulingContext),
    ) -> Result<Arc<PodSchedulingContext>, ApiError> {
        self.try_update_context(key, |context| {
            change(context);
            Ok(())
        })
    }

    fn try_update_context(
        &mut self,
        key: &ObjectKey,
        change: impl FnOnce(&mut PodSchedulingContext) -> Result<(), ApiError>,
    ) -> Result<Arc<PodSchedulingContext>, ApiError> {
        let known = self
            .contexts
            .get(key)
            .cloned()
            .ok_or_else(|| refused(404, format!("{key} not found")))?;
        let mut context = (*known).clone();
        change(&mut context)?;
        if context == *known {
            return Ok(known);
        }
        if context.spec != known.spec || context.metadata != known.metadata {
            check_update("PodSchedulingContext", "", &*known, &context)?;
        }
        if context.status != known.status {
            check_update("PodSchedulingContext", "status", &*known, &context)?;
        }
        context.metadata.resource_version = Some(self.next_version());
        Ok(self.store_context(key, context))
    }

    /// Applies a configuration to the status of a context, as our driver.
    pub(crate) fn apply_to_context(
        &mut self,
        key: &ObjectKey,
        configuration: &Value,
    ) -> Result<Arc<PodSchedulingContext>, ApiError> {
        self.try_update_context(key, |context| {
            apply_patch(
                "PodSchedulingContext",
                "status",
                "application/apply-patch+yaml",
                context,
                configuration,
            )
        })
    }

    fn store_context(&mut self, key: &ObjectKey, context: PodSchedulingContext) -> Arc<PodSchedulingContext> {
        let uid = context.metadata.uid.clone().unwrap();
        if let Some(owner) = controller_of(&context.metadata) {
            self.context_owners_ever.insert(owner.uid.clone());
        }
        if !context.spec.selected_node.is_empty() {
            self.selected_ever
                .entry(uid)
                .or_default()
                .insert(context.spec.selected_node.clone());
        }
        let context = Arc::new(context);
        self.record(Kind::Context, Event::Context(context.clone()));
        self.contexts.insert(key.clone(), context.clone());
        context
    }

    pub(crate) fn delete_context(&mut self, key: &ObjectKey) {
        if let Some(context) = self.contexts.remove(key) {
            self.next_version();
            let uid = context.metadata.uid.clone().unwrap();
            self.record(
                Kind::Context,
                Event::ContextGone {
                    key: key.clone(),
                    uid,
                },
            );
        }
    }
}
