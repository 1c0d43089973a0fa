//! Served kinds: the built-in kinds that the project needs, and those defined by CRDs.

use std::sync::Arc;

use serde_json::Value;

use super::store::StorageKey;

/// Who allocates the claims of a cluster, and the Kubernetes version that the cluster imitates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ClusterMode {
    /// The drivers' controllers: `resource.k8s.io/v1alpha2` of 1.30.
    #[default]
    Classic,
    /// The scheduler: `resource.k8s.io/v1` of 1.37.
    Structured,
}

impl ClusterMode {
    /// Returns the Kubernetes version.
    pub(crate) fn kubernetes(self) -> &'static str {
        match self {
            Self::Classic => "v1.30.14",
            Self::Structured => "v1.37.2",
        }
    }
}

/// One version of a CRD.
#[derive(Debug)]
pub(crate) struct CustomResourceDefinitionVersion {
    pub(crate) schema: Value,
    pub(crate) columns: Vec<Value>,
    pub(crate) validator: jsonschema::Validator,
}

#[derive(Clone, Debug)]
pub(crate) struct ResourceKind {
    /// API group; empty for the core group.
    pub(crate) group: String,
    pub(crate) version: String,
    /// For example `ResourceClaim`.
    pub(crate) kind: String,
    /// For example `resourceclaims`, used in paths.
    pub(crate) plural: String,
    /// For example `resourceclaim`.
    pub(crate) singular: String,
    /// Short names for kubectl.
    pub(crate) short_names: Vec<String>,
    /// Categories for kubectl.
    pub(crate) categories: Vec<String>,
    pub(crate) namespaced: bool,
    /// Whether the kind has a `/status` endpoint; other writes then ignore the status.
    pub(crate) status: bool,
    /// Whether a deletion returns the object instead of a Status.
    pub(crate) returns_deleted: bool,
    /// Whether `metadata.generation` counts changes of the spec.
    pub(crate) generation: bool,
    /// Whether an update may omit the resource version (`AllowUnconditionalUpdate`).
    pub(crate) unconditional: bool,
    /// Whether an update creates a missing object (`AllowCreateOnUpdate`).
    pub(crate) created_by_update: bool,
    /// The mode of the cluster, which the fields of some kinds depend on.
    pub(crate) mode: ClusterMode,
    /// The CRD's definition; `None` for built-in kinds.
    pub(crate) definition: Option<Arc<CustomResourceDefinitionVersion>>,
}

impl ResourceKind {
    /// Returns `ResourceKind.group`, or the kind alone for the core group.
    pub(crate) fn qualified(&self) -> String {
        match self.group.as_str() {
            "" => self.kind.clone(),
            group => format!("{}.{group}", self.kind),
        }
    }

    /// Returns `group/version`, or the version alone for the core group.
    pub(crate) fn api_version(&self) -> String {
        match self.group.as_str() {
            "" => self.version.clone(),
            group => format!("{group}/{}", self.version),
        }
    }

    /// Returns the qualified resource, such as `resourceclaims.resource.k8s.io`, for messages.
    pub(crate) fn resource(&self) -> String {
        match self.group.as_str() {
            "" => self.plural.clone(),
            group => format!("{}.{group}", self.plural),
        }
    }

    /// Returns the storage key of the kind. Both event groups share their objects.
    pub(crate) fn storage(&self) -> String {
        match (self.group.as_str(), self.plural.as_str()) {
            ("events.k8s.io", "events") => "events".to_owned(),
            _ => self.resource(),
        }
    }

    /// Returns the real server's etcd key of an object, for messages.
    pub(crate) fn registry(&self, namespace: &str, name: &str) -> String {
        let place = match (self.group.as_str(), self.plural.as_str(), &self.definition) {
            ("", "nodes", _) => "minions".to_owned(),
            (EXTENSIONS, plural, _) | (_, plural, Some(_)) => format!("{}/{plural}", self.group),
            (_, plural, None) => plural.to_owned(),
        };
        let parts = ["/registry", &place, namespace, name];
        let parts: Vec<&str> = parts.into_iter().filter(|part| !part.is_empty()).collect();
        parts.join("/")
    }

    /// Returns whether the kind has the subresource.
    pub(crate) fn has(&self, subresource: &str) -> bool {
        match subresource {
            "" => true,
            "status" => self.status,
            "binding" => self.is("", "pods"),
            "finalize" => self.is("", "namespaces"),
            _ => false,
        }
    }

    /// Returns whether this is the given built-in kind.
    pub(crate) fn is(&self, group: &str, plural: &str) -> bool {
        self.definition.is_none() && self.group == group && self.plural == plural
    }

    /// Returns whether this kind belongs to `resource.k8s.io/v1`.
    pub(crate) fn is_structured(&self) -> bool {
        self.group == RESOURCE && self.mode == ClusterMode::Structured && self.definition.is_none()
    }

    /// Returns whether this kind belongs to `resource.k8s.io/v1alpha2`.
    pub(crate) fn is_classic(&self) -> bool {
        self.group == RESOURCE && self.mode == ClusterMode::Classic && self.definition.is_none()
    }

    fn of(group: &str, version: &str, kind: &str, plural: &str, namespaced: bool) -> Self {
        Self {
            group: group.to_owned(),
            version: version.to_owned(),
            kind: kind.to_owned(),
            plural: plural.to_owned(),
            singular: kind.to_lowercase(),
            short_names: Vec::new(),
            categories: Vec::new(),
            namespaced,
            status: false,
            returns_deleted: group == RESOURCE,
            generation: false,
            unconditional: !matches!(group, EXTENSIONS | COORDINATION),
            created_by_update: matches!(plural, "leases" | "events"),
            mode: ClusterMode::default(),
            definition: None,
        }
    }

    fn short(mut self, name: &str) -> Self {
        self.short_names = vec![name.to_owned()];
        self
    }

    fn with_status(mut self) -> Self {
        self.status = true;
        self
    }

    fn with_generation(mut self) -> Self {
        self.generation = true;
        self
    }

    fn returning_deleted(mut self) -> Self {
        self.returns_deleted = true;
        self
    }
}

/// Resource that a request refers to.
#[derive(Clone, Debug)]
pub(crate) struct ResourcePath {
    pub(crate) kind: Arc<ResourceKind>,
    /// Empty for cluster-scoped kinds, and for lists of all namespaces.
    pub(crate) namespace: String,
    /// Empty for a collection.
    pub(crate) name: String,
    /// `status`, `binding`, `finalize`, or empty.
    pub(crate) subresource: String,
}

impl ResourcePath {
    pub(crate) fn new(kind: Arc<ResourceKind>, namespace: &str, name: &str, subresource: &str) -> Self {
        Self {
            kind,
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            subresource: subresource.to_owned(),
        }
    }

    /// Returns the collection of this object.
    pub(crate) fn collection(&self) -> Self {
        Self::new(self.kind.clone(), &self.namespace, "", "")
    }

    pub(crate) fn key(&self) -> StorageKey {
        StorageKey {
            storage: self.kind.storage(),
            namespace: self.namespace.clone(),
            name: self.name.clone(),
        }
    }
}

pub(crate) const RESOURCE: &str = crate::api::resource::GROUP;
pub(crate) const COORDINATION: &str = "coordination.k8s.io";
pub(crate) const EXTENSIONS: &str = "apiextensions.k8s.io";

/// Returns the built-in kinds of a cluster.
pub(crate) fn built_in(mode: ClusterMode) -> Vec<Arc<ResourceKind>> {
    let resource = |kind, plural, namespaced| {
        let version = match mode {
            ClusterMode::Classic => crate::api::resource::VERSION,
            ClusterMode::Structured => "v1",
        };
        ResourceKind::of(RESOURCE, version, kind, plural, namespaced)
    };
    let definitions = ResourceKind::of(
        EXTENSIONS,
        "v1",
        "CustomResourceDefinition",
        "customresourcedefinitions",
        false,
    )
    .short("crd")
    .with_status()
    .with_generation();
    let (class, other) = match mode {
        ClusterMode::Classic => (
            resource("ResourceClass", "resourceclasses", false),
            resource("PodSchedulingContext", "podschedulingcontexts", true).with_status(),
        ),
        ClusterMode::Structured => (
            resource("DeviceClass", "deviceclasses", false).with_generation(),
            resource("ResourceSlice", "resourceslices", false).with_generation(),
        ),
    };
    [
        ResourceKind::of("", "v1", "Pod", "pods", true)
            .short("po")
            .with_status()
            .returning_deleted(),
        ResourceKind::of("", "v1", "Node", "nodes", false)
            .short("no")
            .with_status(),
        ResourceKind::of("", "v1", "Namespace", "namespaces", false)
            .short("ns")
            .with_status()
            .returning_deleted(),
        ResourceKind::of("", "v1", "Event", "events", true).short("ev"),
        ResourceKind::of("", "v1", "ConfigMap", "configmaps", true).short("cm"),
        ResourceKind::of("events.k8s.io", "v1", "Event", "events", true).short("ev"),
        ResourceKind::of(COORDINATION, "v1", "Lease", "leases", true),
        class,
        resource("ResourceClaim", "resourceclaims", true).with_status(),
        resource("ResourceClaimTemplate", "resourceclaimtemplates", true),
        other,
        definitions,
    ]
    .into_iter()
    .map(|kind| Arc::new(ResourceKind { mode, ..kind }))
    .collect()
}

/// Returns a built-in kind of classic mode.
#[cfg(test)]
pub(super) fn classic_kind(name: &str) -> Arc<ResourceKind> {
    let mut kinds = built_in(ClusterMode::Classic).into_iter();
    kinds.find(|kind| kind.kind == name).expect("a built-in kind")
}
