//! In-process API client of the test cluster's control loops: the same requests as other clients, without HTTP.

use std::borrow::Borrow;
use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::api::resource::ResourceClaim;
use crate::testcluster::api::{
    ApiServer, Deletion, ListQuery, Patch, ResourcePath, StatusError, WriteOptions, object,
};

/// API client of one component.
#[derive(Clone, Debug)]
pub(crate) struct ApiClient {
    pub(crate) server: ApiServer,
    /// Component name in managed fields and events.
    pub(crate) component: String,
}

impl ApiClient {
    pub(crate) fn new(server: &ApiServer, component: impl Into<String>) -> Self {
        Self {
            server: server.clone(),
            component: component.into(),
        }
    }

    fn target(
        &self,
        plural: &str,
        namespace: &str,
        name: &str,
        subresource: &str,
    ) -> Result<ResourcePath, StatusError> {
        let kind = self.server.kind_of(plural).ok_or_else(StatusError::no_path)?;
        Ok(ResourcePath::new(kind, namespace, name, subresource))
    }

    fn options(&self) -> WriteOptions {
        WriteOptions {
            manager: self.component.clone(),
            force: true,
            ..WriteOptions::default()
        }
    }

    /// Lists all objects of a kind.
    pub(crate) fn list(&self, plural: &str) -> Vec<Arc<Value>> {
        self.target(plural, "", "", "")
            .and_then(|target| self.server.list(&target, &ListQuery::default()))
            .map(|(_, items)| items)
            .unwrap_or_default()
    }

    /// Returns an object, if it exists.
    pub(crate) fn get(&self, plural: &str, namespace: &str, name: &str) -> Option<Value> {
        let target = self.target(plural, namespace, name, "").ok()?;
        self.server.get(&target).ok().map(|(_, object)| object)
    }

    pub(crate) fn create(&self, plural: &str, namespace: &str, object: Value) -> Result<Value, StatusError> {
        let target = self.target(plural, namespace, "", "")?;
        Ok(self.server.create(&target, object, &self.options())?.1)
    }

    /// Sends a merge patch for an object or its status.
    pub(crate) fn merge(
        &self,
        plural: &str,
        object: &Value,
        subresource: &str,
        patch: Value,
    ) -> Result<Value, StatusError> {
        self.patch(plural, object, subresource, &Patch::Merge(patch))
    }

    pub(crate) fn patch(
        &self,
        plural: &str,
        object: &Value,
        subresource: &str,
        patch: &Patch,
    ) -> Result<Value, StatusError> {
        let target = self.target(
            plural,
            object::namespace(object),
            object::name(object),
            subresource,
        )?;
        Ok(self.server.patch(&target, patch, &self.options())?.1)
    }

    /// Binds a pod to a node.
    pub(crate) fn bind(&self, pod: &Value, node: &str) -> Result<(), StatusError> {
        let target = self.target("pods", object::namespace(pod), object::name(pod), "binding")?;
        let binding = json!({ "target": { "kind": "Node", "name": node } });
        self.server.create(&target, binding, &self.options()).map(drop)
    }

    /// Deletes an object with a uid precondition. `grace` applies to pods.
    pub(crate) fn delete(&self, plural: &str, object: &Value, grace: Option<i64>) -> Result<(), StatusError> {
        let target = self.target(plural, object::namespace(object), object::name(object), "")?;
        let asked = Deletion {
            grace,
            uid: object::uid(object).to_owned(),
            version: String::new(),
            dry_run: false,
        };
        self.server.delete(&target, &asked).map(drop)
    }

    /// Returns whether an event about an object has this message, so that repeated attempts report it only once.
    pub(crate) fn has_event(&self, about: &Value, message: &str) -> bool {
        self.list("events").iter().any(|event| {
            event["involvedObject"]["uid"] == about["metadata"]["uid"] && event["message"] == message
        })
    }

    /// Writes an event. A repeated event increments its count.
    pub(crate) fn event(&self, about: &Value, sort: &str, reason: &str, message: &str) {
        let namespace = match object::namespace(about) {
            "" => "default",
            namespace => namespace,
        };
        let existing = self.list("events").into_iter().find(|event| {
            event["involvedObject"]["uid"] == about["metadata"]["uid"]
                && event["reason"] == reason
                && event["message"] == message
        });
        let now = self.server.now();
        if let Some(existing) = existing {
            let count = existing["count"].as_i64().unwrap_or(1) + 1;
            // Events are best effort.
            let _ = self.merge(
                "events",
                &existing,
                "",
                json!({ "count": count, "lastTimestamp": now }),
            );
            return;
        }
        let event = json!({
            "metadata": { "generateName": format!("{}.", object::name(about)) },
            "involvedObject": {
                "apiVersion": about["apiVersion"], "kind": about["kind"], "namespace": about["metadata"]["namespace"],
                "name": about["metadata"]["name"], "uid": about["metadata"]["uid"],
            },
            "type": sort, "reason": reason, "message": message, "count": 1,
            "firstTimestamp": now, "lastTimestamp": now,
            "source": { "component": self.component }, "reportingComponent": self.component, "reportingInstance": "",
        });
        let _ = self.create("events", namespace, event);
    }
}

/// Returns whether a pod's containers have ended, or will never run.
pub(crate) fn is_done(pod: &Value) -> bool {
    let unscheduled = object::text(pod, "/spec/nodeName").is_empty();
    matches!(object::text(pod, "/status/phase"), "Succeeded" | "Failed")
        || (object::is_deleting(pod) && unscheduled)
}

/// Returns a field of an entry's source: `resourceClaimName` or `resourceClaimTemplateName`. They are below `source` up to
/// 1.30.
pub(crate) fn source_of<'a>(entry: &'a Value, field: &str) -> &'a str {
    let source = entry.get("source").unwrap_or(entry);
    source.get(field).and_then(Value::as_str).unwrap_or_default()
}

/// Returns the claims of a pod with their entry names; `None` if a claim does not exist. The name of a template's claim
/// is in the pod's status.
pub(crate) fn claims_of(client: &ApiClient, pod: &Value) -> Vec<(String, Option<Value>)> {
    object::list(pod, "/spec/resourceClaims")
        .iter()
        .map(|entry| {
            let entry_name = object::text(entry, "/name").to_owned();
            let named = source_of(entry, "resourceClaimName");
            let name = if named.is_empty() {
                let statuses = object::list(pod, "/status/resourceClaimStatuses");
                let status = statuses
                    .iter()
                    .find(|status| status["name"] == entry_name.as_str());
                status
                    .map(|status| object::text(status, "/resourceClaimName"))
                    .unwrap_or_default()
            } else {
                named
            };
            let claim = client.get("resourceclaims", object::namespace(pod), name);
            let ours = |claim: &Value| !named.is_empty() || owner_uid(claim) == object::uid(pod);
            (entry_name, claim.filter(ours))
        })
        .collect()
}

/// Returns the uid of an object's controller, or an empty string.
pub(crate) fn owner_uid(object: &Value) -> &str {
    object::list(object, "/metadata/ownerReferences")
        .iter()
        .find(|owner| owner["controller"] == true)
        .map(|owner| object::text(owner, "/uid"))
        .unwrap_or_default()
}

/// Returns owner references that make the pod an object's controller.
pub(crate) fn owned_by(pod: &Value) -> Value {
    json!([{
        "apiVersion": "v1", "kind": "Pod", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"],
        "controller": true, "blockOwnerDeletion": true,
    }])
}

pub(crate) fn is_reserved_for(claim: &Value, pod: &Value) -> bool {
    object::list(claim, "/status/reservedFor")
        .iter()
        .any(|consumer| consumer["uid"] == pod["metadata"]["uid"])
}

/// Reads objects as a type.
pub(crate) fn typed<T: DeserializeOwned>(
    objects: impl IntoIterator<Item = impl Borrow<Value>>,
) -> Result<Vec<T>, String> {
    objects
        .into_iter()
        .map(|object| T::deserialize(object.borrow()).map_err(|error| error.to_string()))
        .collect()
}

/// Reads the classic claims of a pod, by entry.
pub(crate) fn typed_claims(claims: &[(String, Value)]) -> Result<Vec<(String, Arc<ResourceClaim>)>, String> {
    let entries = claims.iter().map(|(entry, _)| entry.clone());
    let claims = typed(claims.iter().map(|(_, claim)| claim))?;
    Ok(entries.zip(claims.into_iter().map(Arc::new)).collect())
}

/// Writes fields of a pod's PodSchedulingContext, or creates it.
pub(crate) fn write_context(client: &ApiClient, pod: &Value, context: Option<&Value>, spec: Value) {
    // A conflict means a concurrent change, which triggers another pass.
    let _ = if let Some(context) = context {
        client.merge("podschedulingcontexts", context, "", json!({ "spec": spec }))
    } else {
        let context = json!({
            "metadata": { "name": pod["metadata"]["name"], "ownerReferences": owned_by(pod) },
            "spec": spec,
        });
        client.create("podschedulingcontexts", object::namespace(pod), context)
    };
}
