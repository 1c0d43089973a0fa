//! Creates, updates, patches, bindings and deletions: an object is deleted at once, or after the grace period once all finalizers are gone.

use std::sync::Arc;

use serde_json::{Value, json};

use super::apply;
use super::configuration;
use super::custom;
use super::decode::decode;
use super::deletion::Deletion;
use super::field_error::FieldError;
use super::kinds::{EXTENSIONS, ResourceKind, ResourcePath};
use super::object::{self, is_deleting, number, set_metadata, text};
use super::patch::Patch;
use super::query::ListQuery;
use super::restrict::{begin, content, restrict};
use super::rules;
use super::server::{ApiResponse, ApiServer, ServerState, WriteOptions, converted, list_of};
use super::status_error::{self, StatusError};
use super::store::StorageKey;
use super::structured;

/// Number of attempts for a generated name that already exists.
const NAME_ATTEMPTS: usize = 8;
/// Maximum size of an object in bytes: etcd's request limit (`--max-request-bytes`).
const OBJECT_MAX: usize = 3 << 19;

impl ApiServer {
    pub(crate) fn create(
        &self,
        target: &ResourcePath,
        value: Value,
        options: &WriteOptions,
    ) -> Result<ApiResponse, StatusError> {
        if !target.subresource.is_empty() {
            return match (target.subresource.as_str(), target.kind.is("", "pods")) {
                ("binding", true) => self.bind(target, &value, options),
                _ => Err(StatusError::method_not_allowed()),
            };
        }
        let object = decode(&target.kind, value, options)?;
        self.change_or_try(options.dry_run, |state| {
            self.create_in(state, target, object, options)
        })
    }

    fn create_in(
        &self,
        state: &mut ServerState,
        target: &ResourcePath,
        mut object: Value,
        options: &WriteOptions,
    ) -> Result<ApiResponse, StatusError> {
        let created = state.create(self, target, &mut object, options)?;
        Ok((201, converted(&target.kind, &created)))
    }

    pub(crate) fn replace(
        &self,
        target: &ResourcePath,
        mut value: Value,
        options: &WriteOptions,
    ) -> Result<ApiResponse, StatusError> {
        let kind = &target.kind;
        match text(&value, "/metadata/name") {
            // Decoding errors take precedence.
            "" => {
                return Err(decode(kind, value, options)
                    .map_or_else(|why| why, |_| StatusError::nameless(&target.name)));
            }
            name if name != target.name => return Err(StatusError::misnamed(name, &target.name)),
            _ => {}
        }
        let namespace = object::namespace(&value);
        if kind.namespaced && !namespace.is_empty() && namespace != target.namespace {
            return Err(StatusError::misplaced());
        }
        let uid = text(&value, "/metadata/uid").to_owned();
        self.change_or_try(options.dry_run, |state| {
            let missing = state.store.get(&target.key()).is_none();
            if !missing {
                return self.update(state, target, options, |before| {
                    same_uid(target, &uid, object::uid(before))?;
                    Ok(value)
                });
            }
            if !kind.created_by_update || !target.subresource.is_empty() {
                return Err(StatusError::not_found(kind, &target.name));
            }
            same_uid(target, &uid, "")?;
            set_metadata(&mut value, "resourceVersion", None);
            let object = decode(kind, value, options)?;
            self.create_in(state, &target.collection(), object, options)
        })
    }

    pub(crate) fn patch(
        &self,
        target: &ResourcePath,
        patch: &Patch,
        options: &WriteOptions,
    ) -> Result<ApiResponse, StatusError> {
        let now = self.now();
        let options = &WriteOptions {
            applies: matches!(patch, Patch::Apply(_)),
            ..options.clone()
        };
        self.change_or_try(options.dry_run, |state| {
            if let Patch::Apply(configuration) = patch {
                let missing = state.store.get(&target.key()).is_none();
                if missing && !target.subresource.is_empty() {
                    return Err(StatusError::not_found(&target.kind, &target.name));
                }
                configuration::check(target, configuration, missing)?;
                if missing {
                    return self.create_by_apply(state, target, configuration, options);
                }
            }
            self.update(state, target, options, |before| {
                let converted = converted(&target.kind, before);
                let manager = options.field_manager(&target.subresource, &now);
                patch.apply_to(&target.kind, &converted, &manager, options.force)
            })
        })
    }

    fn create_by_apply(
        &self,
        state: &mut ServerState,
        target: &ResourcePath,
        configuration: &Value,
        options: &WriteOptions,
    ) -> Result<ApiResponse, StatusError> {
        if !text(configuration, "/metadata/uid").is_empty() {
            let why = format!(
                "uid mismatch: the provided object specified uid {}, and no existing object was found",
                text(configuration, "/metadata/uid")
            );
            return Err(StatusError::conflict(&target.kind, &target.name, &why));
        }
        let now = self.now();
        let manager = options.field_manager("", &now);
        let mut empty = json!({ "metadata": { "name": target.name } });
        if target.kind.namespaced {
            set_metadata(&mut empty, "namespace", Some(target.namespace.clone().into()));
        }
        let mut applied = apply::apply(&target.kind, &empty, configuration, &manager, options.force)?;
        set_metadata(&mut applied, "resourceVersion", None);
        let object = decode(&target.kind, applied, options)?;
        self.create_in(state, &target.collection(), object, options)
    }

    /// Updates an object. Silently keeps fields that the request may not change.
    fn update(
        &self,
        state: &mut ServerState,
        target: &ResourcePath,
        options: &WriteOptions,
        make: impl FnOnce(&Value) -> Result<Value, StatusError>,
    ) -> Result<ApiResponse, StatusError> {
        let kind = &target.kind;
        if !kind.has(&target.subresource) || target.subresource == "binding" {
            return Err(StatusError::no_path());
        }
        let now = self.now();
        let before = state.existing(target)?.clone();
        let value = make(&before)?;
        let mut after = decode(kind, value, options).map_err(|refusal| {
            if options.patches {
                StatusError::invalid_patch(&refusal.message)
            } else {
                refusal
            }
        })?;
        match text(&after, "/metadata/resourceVersion") {
            "" | "0" if kind.unconditional => {}
            "" | "0" => return Err(StatusError::version_required(kind, &target.name)),
            version if version.parse::<u64>().is_err() => {
                let why = format!("strconv.ParseUint: parsing {version:?}: invalid syntax");
                return Err(StatusError::internal(why));
            }
            version if version != text(&before, "/metadata/resourceVersion") => {
                return Err(StatusError::modified(kind, &target.name));
            }
            _ => {}
        }
        restrict(target, &before, &mut after);
        structured::drop_deallocated(kind, &before, &mut after);
        structured::stamp_taints(kind, &mut after, &now);
        let mut errors = rules::metadata_update(&before, &after);
        let namespace = state.namespace(&target.namespace).cloned().unwrap_or_default();
        errors.extend(structured::admin_access(kind, Some(&before), &after, &namespace));
        errors.extend(rules::metadata(&after));
        errors.extend(validate(kind, &target.subresource, Some(&before), &after));
        if kind.is("", "pods") && target.subresource.is_empty() {
            errors.extend(rules::pod_update(&before, &after));
        }
        if !errors.is_empty() {
            return Err(StatusError::invalid(kind, &target.name, &errors));
        }
        // An apply has already set the ownership.
        if !options.applies {
            let manager = options.field_manager(&target.subresource, &now);
            apply::track_update(kind, &before, &mut after, &manager);
        }
        if after == *before {
            return Ok((200, converted(kind, &before)));
        }
        if kind.generation && content(&before) != content(&after) {
            raise_generation(&mut after);
        }
        fits(&after)?;
        if kind.is(EXTENSIONS, "customresourcedefinitions") && target.subresource.is_empty() {
            custom::establish(&mut after, &now);
            state.define(Some(&before), &after)?;
        }
        let stored = if may_go(kind, &after) {
            state.remove(&target.key());
            Arc::new(after)
        } else {
            state.store.put(target.key(), after)
        };
        Ok((200, converted(kind, &stored)))
    }

    /// Binds a pod to a node, as requested by the scheduler.
    fn bind(
        &self,
        target: &ResourcePath,
        binding: &Value,
        options: &WriteOptions,
    ) -> Result<ApiResponse, StatusError> {
        let node = text(binding, "/target/name");
        if node.is_empty() {
            return Err(StatusError::bad_request("target.name is required"));
        }
        let now = self.now();
        let condition = json!({
            "type": "PodScheduled", "status": "True", "lastProbeTime": null, "lastTransitionTime": now,
        });
        self.change_or_try(options.dry_run, |state| {
            let mut pod = (**state.existing(target)?).clone();
            let known = text(&pod, "/spec/nodeName");
            if !known.is_empty() {
                let why = format!("pod {} is already assigned to node {known:?}", target.name);
                return Err(StatusError::binding_conflict(&target.name, &why));
            }
            if is_deleting(&pod) {
                let why = format!(
                    "pod {} is being deleted, cannot be assigned to a host",
                    target.name
                );
                return Err(StatusError::binding_conflict(&target.name, &why));
            }
            pod["spec"]["nodeName"] = node.into();
            pod["status"]["conditions"] = object::with_condition(&pod, condition).into();
            state.store.put(target.key(), pod);
            Ok(())
        })?;
        Ok((
            201,
            json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201 }),
        ))
    }
}

impl ServerState {
    fn create(
        &mut self,
        server: &ApiServer,
        target: &ResourcePath,
        object: &mut Value,
        options: &WriteOptions,
    ) -> Result<Arc<Value>, StatusError> {
        let kind = &target.kind;
        if kind.namespaced {
            let given = object::namespace(object).to_owned();
            if !given.is_empty() && given != target.namespace {
                return Err(StatusError::misplaced());
            }
            set_metadata(object, "namespace", Some(target.namespace.clone().into()));
        } else if !object::namespace(object).is_empty() {
            return Err(StatusError::bad_request("namespace is not allowed on this type"));
        }
        if !text(object, "/metadata/resourceVersion").is_empty() {
            return Err(StatusError::internal(
                "resourceVersion should not be set on objects to be created",
            ));
        }
        let prefix = text(object, "/metadata/generateName").to_owned();
        let generated = object::name(object).is_empty() && !prefix.is_empty();
        let mut key = target.key();
        for _ in 0..NAME_ATTEMPTS {
            if generated {
                let base = prefix.get(..prefix.len().min(58)).unwrap_or(&prefix);
                set_metadata(
                    object,
                    "name",
                    Some(format!("{base}{}", server.source.suffix()).into()),
                );
            }
            object::name(object).clone_into(&mut key.name);
            if !generated || self.store.get(&key).is_none() {
                break;
            }
        }
        if kind.namespaced {
            self.check_namespace(target, &key.name)?;
        }
        let now = server.now();
        set_metadata(object, "uid", Some(server.source.uid().into()));
        set_metadata(object, "creationTimestamp", Some(now.clone().into()));
        for field in ["deletionTimestamp", "deletionGracePeriodSeconds", "selfLink"] {
            set_metadata(object, field, None);
        }
        set_metadata(object, "generation", kind.generation.then(|| 1.into()));
        begin(kind, object);
        structured::stamp_taints(kind, object, &now);
        let mut errors = rules::metadata(object);
        let namespace = self.namespace(&target.namespace).cloned().unwrap_or_default();
        errors.extend(structured::admin_access(kind, None, object, &namespace));
        errors.extend(validate(kind, "", None, object));
        if !errors.is_empty() {
            return Err(StatusError::invalid(kind, &key.name, &errors));
        }
        if self.store.get(&key).is_some() {
            return Err(StatusError::already_exists(kind, &key.name));
        }
        if object::list(object, "/metadata/managedFields").is_empty() {
            apply::track_update(kind, &json!({}), object, &options.field_manager("", &now));
        }
        fits(object)?;
        if kind.is(EXTENSIONS, "customresourcedefinitions") {
            custom::establish(object, &now);
            self.define(None, object)?;
        }
        Ok(self.store.put(key, object.take()))
    }

    fn namespace(&self, name: &str) -> Option<&Arc<Value>> {
        self.store.get(&StorageKey {
            storage: "namespaces".to_owned(),
            namespace: String::new(),
            name: name.to_owned(),
        })
    }

    fn check_namespace(&self, target: &ResourcePath, name: &str) -> Result<(), StatusError> {
        let Some(namespaces) = self.kinds.iter().find(|kind| kind.is("", "namespaces")) else {
            return Ok(());
        };
        match self.namespace(&target.namespace) {
            None => Err(StatusError::not_found(namespaces, &target.namespace)),
            Some(namespace) if is_deleting(namespace) => {
                let why = format!(
                    "unable to create new content in namespace {} because it is being terminated",
                    target.namespace
                );
                Err(StatusError::forbidden(&target.kind, name, &why))
            }
            Some(_) => Ok(()),
        }
    }

    /// Serves the kinds of a CRD.
    fn define(&mut self, before: Option<&Value>, after: &Value) -> Result<(), StatusError> {
        let new = custom::kinds_of(after)?;
        if let Some(before) = before {
            self.undefine(before);
        }
        self.kinds.extend(new);
        Ok(())
    }

    fn undefine(&mut self, definition: &Value) {
        let group = text(definition, "/spec/group");
        let plural = text(definition, "/spec/names/plural");
        self.kinds
            .retain(|kind| kind.definition.is_none() || kind.group != group || kind.plural != plural);
    }
}

fn raise_generation(object: &mut Value) {
    let generation = number(object, "/metadata/generation").unwrap_or(0);
    set_metadata(object, "generation", Some((generation + 1).into()));
}

/// Checks etcd's size limit.
fn fits(object: &Value) -> Result<(), StatusError> {
    if object::json_size(object) > OBJECT_MAX {
        return Err(StatusError::too_large_for_etcd());
    }
    Ok(())
}

/// Checks the uid precondition of an update.
fn same_uid(target: &ResourcePath, wanted: &str, found: &str) -> Result<(), StatusError> {
    if wanted.is_empty() || wanted == found {
        return Ok(());
    }
    let why = format!(
        "StorageError: invalid object, Code: 4, Key: {}, ResourceVersion: 0, AdditionalErrorMsg: Precondition failed: UID in precondition: {wanted}, UID in object meta: {found}",
        target.kind.registry(&target.namespace, &target.name)
    );
    Err(StatusError::conflict(&target.kind, &target.name, &why))
}

impl ApiServer {
    pub(crate) fn delete(&self, target: &ResourcePath, asked: &Deletion) -> Result<ApiResponse, StatusError> {
        self.change_or_try(asked.dry_run, |state| self.delete_in(state, target, asked))
    }

    fn delete_in(
        &self,
        state: &mut ServerState,
        target: &ResourcePath,
        asked: &Deletion,
    ) -> Result<ApiResponse, StatusError> {
        let kind = &target.kind;
        let before = state.existing(target)?.clone();
        let version = text(&before, "/metadata/resourceVersion");
        for (word, wanted, found, hint) in [
            (
                "UID",
                &asked.uid,
                object::uid(&before),
                "deleted and then recreated",
            ),
            ("ResourceVersion", &asked.version, version, "modified"),
        ] {
            if !wanted.is_empty() && *wanted != found {
                let why = format!(
                    "the {word} in the precondition ({wanted}) does not match the {word} in record ({found}). The object might have been {hint}"
                );
                return Err(StatusError::precondition(kind, &target.name, &why));
            }
        }
        let grace = grace_of(kind, &before, asked);
        let mut after = (*before).clone();
        let fresh = !is_deleting(&before);
        let known = number(&before, "/metadata/deletionGracePeriodSeconds");
        let shorter = grace.is_some_and(|grace| known.is_none_or(|known| grace < known));
        if fresh || shorter {
            let seconds = grace.unwrap_or(0);
            set_metadata(
                &mut after,
                "deletionTimestamp",
                Some(self.time_in(seconds).into()),
            );
            set_metadata(&mut after, "deletionGracePeriodSeconds", Some(seconds.into()));
        }
        if kind.is("", "namespaces") {
            after["status"]["phase"] = "Terminating".into();
        }
        let answer = if may_go(kind, &after) {
            if grace.is_some() && (fresh || shorter) {
                // Stores a pod as terminating first, even if it is removed immediately.
                state.store.put(target.key(), after.clone());
            }
            state.remove(&target.key());
            if kind.returns_deleted {
                // A deleted object has the resource version of its deletion; only a pod has a deletion timestamp.
                let mut gone = if grace.is_some() { after } else { (*before).clone() };
                if !asked.dry_run {
                    let version = state.store.version().to_string();
                    set_metadata(&mut gone, "resourceVersion", Some(version.into()));
                }
                converted(kind, &gone)
            } else {
                deleted_status(kind, &before)
            }
        } else if after == *before {
            converted(kind, &before)
        } else {
            if kind.generation && fresh {
                raise_generation(&mut after);
            }
            converted(kind, &state.store.put(target.key(), after))
        };
        Ok((200, answer))
    }

    pub(crate) fn delete_collection(
        &self,
        target: &ResourcePath,
        query: &ListQuery,
        asked: &Deletion,
    ) -> Result<ApiResponse, StatusError> {
        let (metadata, items) = self.list(target, query)?;
        for item in &items {
            let one = ResourcePath {
                namespace: object::namespace(item).to_owned(),
                name: object::name(item).to_owned(),
                ..target.clone()
            };
            match self.delete(&one, asked) {
                Err(refusal) if refusal.code != 404 => return Err(refusal),
                _ => {}
            }
        }
        Ok((200, list_of(&target.kind, metadata, items)))
    }
}

impl ServerState {
    /// Removes an object; for a CRD, also its custom objects.
    pub(crate) fn remove(&mut self, key: &StorageKey) {
        let Some(gone) = self.store.remove(key) else {
            return;
        };
        if key.storage == format!("customresourcedefinitions.{EXTENSIONS}") {
            self.undefine(&gone);
            let (group, plural) = (text(&gone, "/spec/group"), text(&gone, "/spec/names/plural"));
            let storage = format!("{plural}.{group}");
            let orphans: Vec<StorageKey> = self
                .store
                .all()
                .map(|(key, _)| key)
                .filter(|key| key.storage == storage)
                .cloned()
                .collect();
            for orphan in orphans {
                self.store.remove(&orphan);
            }
        }
    }
}

/// Returns whether a terminating object can be removed.
pub(crate) fn may_go(kind: &ResourceKind, object: &Value) -> bool {
    let waits = number(object, "/metadata/deletionGracePeriodSeconds").is_some_and(|seconds| seconds > 0);
    let finalized = !kind.is("", "namespaces") || object::list(object, "/spec/finalizers").is_empty();
    is_deleting(object) && object::list(object, "/metadata/finalizers").is_empty() && !waits && finalized
}

/// Validates a new object, or an update of `before`, by the rules of its kind.
fn validate(
    kind: &ResourceKind,
    subresource: &str,
    before: Option<&Value>,
    after: &Value,
) -> Vec<FieldError> {
    match &kind.definition {
        Some(definition) => custom::validate(definition, after, before),
        None if kind.is_structured() => structured::validate(kind, subresource, before, after),
        None => rules::object(&kind.group, &kind.kind, subresource, before, after),
    }
}

/// Returns the grace period; only pods have one.
fn grace_of(kind: &ResourceKind, object: &Value, asked: &Deletion) -> Option<i64> {
    if !kind.is("", "pods") {
        return None;
    }
    let own = number(object, "/spec/terminationGracePeriodSeconds");
    let unscheduled = text(object, "/spec/nodeName").is_empty();
    let ended = matches!(text(object, "/status/phase"), "Succeeded" | "Failed");
    match asked.grace.or(own) {
        _ if unscheduled || ended => Some(0),
        Some(seconds) => Some(seconds.max(0)),
        None => Some(30),
    }
}

fn deleted_status(kind: &ResourceKind, object: &Value) -> Value {
    let mut details = status_error::details(kind, &kind.plural, object::name(object));
    details["uid"] = object::uid(object).into();
    json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details })
}
