//! Environment of a check: its own cluster and directory, and the log of calls.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::{Value, json};

use super::report::{Broken, Finding};
use super::rule::Rule;
use crate::api::resource::{ResourceClaim, ResourceClass};
use crate::testcluster::api::object::{self, text};
use crate::testcluster::hand::Hand;
use crate::testcluster::source::Source;
use crate::testcluster::stage::{Stage, StageError};

/// Name of the class and the template that the kit creates by default.
pub(super) const OWN: &str = "conformance";
/// Namespace of all pods and claims.
pub(super) const NAMESPACE: &str = "default";

/// Environment of a driver under test.
#[derive(Clone)]
pub struct Environment {
    pub(super) client: kube::Client,
    pub(super) directory: PathBuf,
    pub(super) node_name: String,
}

impl Environment {
    /// Client of the check's API server. It stops working when its instance is killed.
    pub fn client(&self) -> kube::Client {
        self.client.clone()
    }

    /// A directory that is empty at the start of a check and survives the kill of an instance. It holds all state that
    /// a driver keeps outside its memory: a database, a switch, the devices themselves.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Node name of a [`NodeDriver`](crate::node::driver::NodeDriver); otherwise the first node's name.
    pub fn node_name(&self) -> &str {
        &self.node_name
    }
}

impl fmt::Debug for Environment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Place")
            .field("directory", &self.directory)
            .field("node_name", &self.node_name)
            .finish_non_exhaustive()
    }
}

/// Why a check ends early.
#[derive(Debug)]
pub(super) enum Stop {
    /// The driver breaks a rule.
    Rule(Box<Finding>),
    /// The settings of the test are invalid, or the machine prevents it.
    Setup(String),
}

impl From<StageError> for Stop {
    fn from(error: StageError) -> Self {
        Self::Setup(error.to_string())
    }
}

impl From<std::io::Error> for Stop {
    fn from(error: std::io::Error) -> Self {
        Self::Setup(error.to_string())
    }
}

impl From<Stop> for Broken {
    fn from(stop: Stop) -> Self {
        match stop {
            Stop::Rule(finding) => Self::Rules(vec![*finding]),
            Stop::Setup(problem) => Self::Setup(problem),
        }
    }
}

pub(super) type Done<T> = Result<T, Stop>;

/// The vendor's settings of a test.
#[derive(Clone, Debug, Default)]
pub(super) struct Setup {
    /// The objects as YAML.
    pub(super) objects: String,
    pub(super) nodes: Vec<String>,
    pub(super) driver_name: String,
    /// Maximum number of concurrent claims.
    pub(super) max_claims: usize,
}

/// Cluster and directory of one check, removed on drop.
#[derive(Debug)]
pub(super) struct Fixture {
    pub(super) cluster: Stage,
    pub(super) client: Hand,
    pub(super) directory: Directory,
    pub(super) nodes: Vec<String>,
    pub(super) max_claims: usize,
    driver_name: String,
    /// Class of the claims.
    class: Arc<ResourceClass>,
    /// Spec of the claims.
    claim_spec: Value,
    /// Template of the pods' claims.
    pub(super) template: String,
    check: String,
    calls: Arc<Mutex<Vec<String>>>,
    claims: AtomicUsize,
}

impl Fixture {
    /// Creates a cluster with the nodes and objects of the test. Must be called within a runtime.
    pub(super) fn open(setup: &Setup, check: &str) -> Done<Self> {
        let cluster = Stage::start(Source::system());
        let client = Hand::new(cluster.server(), OWN);
        for name in &setup.nodes {
            let node = json!({
                "metadata": { "name": name, "labels": { "kubernetes.io/hostname": name } },
                "status": { "conditions": [{ "type": "Ready", "status": "True" }], "allocatable": { "pods": "110" } },
            });
            client
                .create("nodes", "", node)
                .map_err(|refusal| Stop::Setup(format!("node {name}: {}", refusal.message)))?;
        }
        apply(&cluster, &client, &setup.objects)?;
        let classes = client.list("resourceclasses");
        let ours = classes
            .into_iter()
            .find(|class| text(class, "/driverName") == setup.driver_name);
        let class = if let Some(class) = ours {
            class
        } else {
            let class = json!({ "metadata": { "name": OWN }, "driverName": setup.driver_name });
            let made = client.create("resourceclasses", "", class);
            made.map_err(|refusal| Stop::Setup(format!("class {OWN}: {}", refusal.message)))?
        };
        let class_name = object::name(&class).to_owned();
        let template = client
            .list("resourceclaimtemplates")
            .into_iter()
            .find(|template| text(template, "/spec/spec/resourceClassName") == class_name);
        let template = if let Some(template) = template {
            template
        } else {
            let template = json!({ "metadata": { "name": OWN }, "spec": { "spec": { "resourceClassName": class_name } } });
            let made = client.create("resourceclaimtemplates", NAMESPACE, template);
            made.map_err(|refusal| Stop::Setup(format!("template {OWN}: {}", refusal.message)))?
        };
        if object::namespace(&template) != NAMESPACE {
            return Err(Stop::Setup(format!(
                "ResourceClaimTemplate {} must be in namespace {NAMESPACE}, where the pods of the test are",
                object::name(&template)
            )));
        }
        let class = serde_json::from_value(class).map_err(|error| Stop::Setup(error.to_string()))?;
        Ok(Self {
            client,
            directory: Directory::make()?,
            nodes: setup.nodes.clone(),
            max_claims: setup.max_claims,
            driver_name: setup.driver_name.clone(),
            class: Arc::new(class),
            claim_spec: template["spec"]["spec"].clone(),
            template: object::name(&template).to_owned(),
            check: check.to_owned(),
            calls: Arc::default(),
            claims: AtomicUsize::new(0),
            cluster,
        })
    }

    pub(super) fn driver_name(&self) -> &str {
        &self.driver_name
    }

    pub(super) fn class(&self) -> Arc<ResourceClass> {
        self.class.clone()
    }

    /// Creates a claim with our finalizer, which the controller adds before an allocation.
    pub(super) fn claim(&self) -> Done<Arc<ResourceClaim>> {
        let number = self.claims.fetch_add(1, Ordering::Relaxed) + 1;
        let claim = json!({
            "metadata": {
                "name": format!("claim-{number}"), "namespace": NAMESPACE, "uid": self.cluster.server().source.uid(),
                "finalizers": [format!("{}/deletion-protection", self.driver_name)],
                "creationTimestamp": self.cluster.server().now(), "resourceVersion": number.to_string(),
            },
            "spec": self.claim_spec,
        });
        let claim = serde_json::from_value(claim).map_err(|error| Stop::Setup(error.to_string()))?;
        Ok(Arc::new(claim))
    }

    pub(super) fn claims(&self, count: usize) -> Done<Vec<Arc<ResourceClaim>>> {
        (0..count).map(|_| self.claim()).collect()
    }

    /// Records a call.
    pub(super) fn note(&self, call: impl Into<String>) {
        self.calls
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(call.into());
    }

    /// Lists the cluster's events for a finding.
    pub(super) fn events(&self) -> Vec<String> {
        let events = self.client.list("events");
        let line = |event: &Value| format!("event: {} {}", text(event, "/reason"), text(event, "/message"));
        events.iter().map(line).collect()
    }

    /// Returns a broken rule, with the steps of a program as calls.
    pub(super) fn broken_after(
        &self,
        steps: impl IntoIterator<Item = String>,
        rule: Rule,
        expected: &str,
        found: impl Into<String>,
    ) -> Stop {
        for step in steps {
            self.note(step);
        }
        self.broken(rule, "", expected, found)
    }

    /// Returns a broken rule.
    pub(super) fn broken(
        &self,
        rule: Rule,
        tried: &str,
        expected: impl Into<String>,
        found: impl Into<String>,
    ) -> Stop {
        let tried = match tried {
            "" => self.check.clone(),
            tried => format!("{}: {tried}", self.check),
        };
        Stop::Rule(Box::new(Finding {
            rule,
            tried,
            expected: expected.into(),
            found: found.into(),
            calls: self.calls.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }))
    }
}

/// Applies objects including their status, such as the inventory of a companion that does not run here.
fn apply(cluster: &Stage, client: &Hand, yaml: &str) -> Done<()> {
    let documents: Vec<Value> =
        serde_saphyr::from_multiple(yaml).map_err(|error| StageError::Yaml(error.to_string()))?;
    for mut document in documents.into_iter().filter(Value::is_object) {
        let status = document.as_object_mut().and_then(|map| map.remove("status"));
        let applied = cluster.apply(&document.to_string())?;
        let (Some(status), [object]) = (status, applied.as_slice()) else {
            continue;
        };
        let kind = cluster
            .server()
            .kind_named(text(object, "/apiVersion"), text(object, "/kind"));
        let Some(kind) = kind else { continue };
        client
            .merge(&kind.plural, object, "status", json!({ "status": status }))
            .map_err(|refusal| {
                Stop::Setup(format!(
                    "the status of {}: {}",
                    object::name(object),
                    refusal.message
                ))
            })?;
    }
    Ok(())
}

/// A directory removed on drop. Its path is short, because the length of a socket path is limited.
#[derive(Debug)]
pub(super) struct Directory(PathBuf);

static DIRECTORIES: AtomicUsize = AtomicUsize::new(0);

impl Directory {
    fn make() -> std::io::Result<Self> {
        use std::os::unix::fs::DirBuilderExt as _;
        let number = DIRECTORIES.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("conform-{}-{number}", std::process::id()));
        std::fs::DirBuilder::new().mode(0o700).create(&path)?;
        let made = Self(path);
        std::fs::create_dir(made.own())?;
        Ok(made)
    }

    /// The driver's subdirectory.
    pub(super) fn own(&self) -> PathBuf {
        self.0.join("own")
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        // Best effort: leftovers stay in the directory of temporary files.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Formats claim names for a finding.
pub(super) fn names(claims: &[Arc<ResourceClaim>]) -> String {
    let names: Vec<&str> = claims
        .iter()
        .map(|claim| claim.metadata.name.as_deref().unwrap_or_default())
        .collect();
    format!("[{}]", names.join(", "))
}

/// Counts equal texts for a compact finding.
pub(super) fn summed(texts: impl IntoIterator<Item = String>) -> String {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for text in texts {
        *counts.entry(text).or_default() += 1;
    }
    let shown: Vec<String> = counts
        .into_iter()
        .map(|(text, count)| match count {
            1 => text,
            count => format!("{count} x {text}"),
        })
        .collect();
    shown.join(", ")
}
