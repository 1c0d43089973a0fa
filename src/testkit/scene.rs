//! Where an exercise takes place: a cluster of its own, a directory of its own, and what was called.

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

/// The name of the class and the template that the kit makes where the test brings none.
pub(super) const OWN: &str = "conformance";
/// The namespace of all pods and claims.
pub(super) const NAMESPACE: &str = "default";

/// What a driver under test gets to start with.
#[derive(Clone)]
pub struct Place {
    pub(super) client: kube::Client,
    pub(super) directory: PathBuf,
    pub(super) node_name: String,
}

impl Place {
    /// A client of the exercise's API server. It ends with the instance that it was made for.
    pub fn client(&self) -> kube::Client {
        self.client.clone()
    }

    /// A directory that is empty at the start of an exercise and is left alone when an instance is killed: what a driver keeps
    /// outside of its memory (a database, a switch, the devices themselves) belongs there.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The name of the node, for a [`NodeDriver`](crate::node::driver::NodeDriver); the first node's otherwise.
    pub fn node_name(&self) -> &str {
        &self.node_name
    }
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Place")
            .field("directory", &self.directory)
            .field("node_name", &self.node_name)
            .finish_non_exhaustive()
    }
}

/// Why an exercise ends early.
#[derive(Debug)]
pub(super) enum Stop {
    /// A rule is broken.
    Rule(Box<Finding>),
    /// The kit was told something that makes no sense, or this machine does not let it.
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

/// What the test brings along.
#[derive(Clone, Debug, Default)]
pub(super) struct Setup {
    /// YAML of the objects.
    pub(super) objects: String,
    /// Names of the nodes.
    pub(super) nodes: Vec<String>,
    /// The driver's name.
    pub(super) driver_name: String,
}

/// A cluster and a directory for one exercise. Both go with it.
#[derive(Debug)]
pub(super) struct Scene {
    pub(super) stage: Stage,
    pub(super) hand: Hand,
    pub(super) directory: Directory,
    pub(super) nodes: Vec<String>,
    driver_name: String,
    /// The class of the claims.
    class: Arc<ResourceClass>,
    /// The spec of the claims.
    claim_spec: Value,
    /// The template that the claims of pods are made from.
    pub(super) template: String,
    exercise: String,
    calls: Arc<Mutex<Vec<String>>>,
    claims: AtomicUsize,
}

impl Scene {
    /// Makes a cluster with the nodes and objects of the test. Must be called within a runtime.
    pub(super) fn open(setup: &Setup, exercise: &str) -> Done<Self> {
        let stage = Stage::start(Source::system());
        let hand = Hand::new(stage.server(), OWN);
        for name in &setup.nodes {
            let node = json!({
                "metadata": { "name": name, "labels": { "kubernetes.io/hostname": name } },
                "status": { "conditions": [{ "type": "Ready", "status": "True" }], "allocatable": { "pods": "110" } },
            });
            hand.create("nodes", "", node)
                .map_err(|refusal| Stop::Setup(format!("node {name}: {}", refusal.message)))?;
        }
        apply(&stage, &hand, &setup.objects)?;
        let classes = hand.list("resourceclasses");
        let ours = classes
            .into_iter()
            .find(|class| text(class, "/driverName") == setup.driver_name);
        let class = if let Some(class) = ours {
            class
        } else {
            let class = json!({ "metadata": { "name": OWN }, "driverName": setup.driver_name });
            let made = hand.create("resourceclasses", "", class);
            made.map_err(|refusal| Stop::Setup(format!("class {OWN}: {}", refusal.message)))?
        };
        let class_name = object::name(&class).to_owned();
        let template = hand
            .list("resourceclaimtemplates")
            .into_iter()
            .find(|template| text(template, "/spec/spec/resourceClassName") == class_name);
        let template = if let Some(template) = template {
            template
        } else {
            let template = json!({ "metadata": { "name": OWN }, "spec": { "spec": { "resourceClassName": class_name } } });
            let made = hand.create("resourceclaimtemplates", NAMESPACE, template);
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
            hand,
            directory: Directory::make()?,
            nodes: setup.nodes.clone(),
            driver_name: setup.driver_name.clone(),
            class: Arc::new(class),
            claim_spec: template["spec"]["spec"].clone(),
            template: object::name(&template).to_owned(),
            exercise: exercise.to_owned(),
            calls: Arc::default(),
            claims: AtomicUsize::new(0),
            stage,
        })
    }

    pub(super) fn driver_name(&self) -> &str {
        &self.driver_name
    }

    pub(super) fn class(&self) -> Arc<ResourceClass> {
        self.class.clone()
    }

    /// Another claim, which has our finalizer, as each has that a driver is asked to allocate.
    pub(super) fn claim(&self) -> Done<Arc<ResourceClaim>> {
        let number = self.claims.fetch_add(1, Ordering::Relaxed) + 1;
        let claim = json!({
            "metadata": {
                "name": format!("claim-{number}"), "namespace": NAMESPACE, "uid": self.stage.server().source.uid(),
                "finalizers": [format!("{}/deletion-protection", self.driver_name)],
                "creationTimestamp": self.stage.server().now(), "resourceVersion": number.to_string(),
            },
            "spec": self.claim_spec,
        });
        let claim = serde_json::from_value(claim).map_err(|error| Stop::Setup(error.to_string()))?;
        Ok(Arc::new(claim))
    }

    pub(super) fn claims(&self, count: usize) -> Done<Vec<Arc<ResourceClaim>>> {
        (0..count).map(|_| self.claim()).collect()
    }

    /// Notes what was called.
    pub(super) fn note(&self, call: impl Into<String>) {
        self.calls
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(call.into());
    }

    /// The events on the stage, for a finding.
    pub(super) fn events(&self) -> Vec<String> {
        let events = self.hand.list("events");
        let line = |event: &Value| format!("event: {} {}", text(event, "/reason"), text(event, "/message"));
        events.iter().map(line).collect()
    }

    /// A rule is broken by a program that has taken these steps.
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

    /// A rule is broken.
    pub(super) fn broken(
        &self,
        rule: Rule,
        tried: &str,
        expected: impl Into<String>,
        found: impl Into<String>,
    ) -> Stop {
        let tried = match tried {
            "" => self.exercise.clone(),
            tried => format!("{}: {tried}", self.exercise),
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

/// Applies objects, with the status that they have: a class of devices may stand in an inventory that somebody else reports.
fn apply(stage: &Stage, hand: &Hand, yaml: &str) -> Done<()> {
    let documents: Vec<Value> =
        serde_saphyr::from_multiple(yaml).map_err(|error| StageError::Yaml(error.to_string()))?;
    for mut document in documents.into_iter().filter(Value::is_object) {
        let status = document.as_object_mut().and_then(|map| map.remove("status"));
        let applied = stage.apply(&document.to_string())?;
        let (Some(status), [object]) = (status, applied.as_slice()) else {
            continue;
        };
        let kind = stage
            .server()
            .kind_named(text(object, "/apiVersion"), text(object, "/kind"));
        let Some(kind) = kind else { continue };
        hand.merge(&kind.plural, object, "status", json!({ "status": status }))
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

/// A directory that is removed in the end. Its path is short, because those of sockets are.
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

    /// The part of it that is the driver's.
    pub(super) fn own(&self) -> PathBuf {
        self.0.join("own")
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        // What cannot be removed is left to whoever cleans the directory of temporary files.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// What a list of names shows in a finding.
pub(super) fn names(claims: &[Arc<ResourceClaim>]) -> String {
    let names: Vec<&str> = claims
        .iter()
        .map(|claim| claim.metadata.name.as_deref().unwrap_or_default())
        .collect();
    format!("[{}]", names.join(", "))
}

/// Counts equal texts, for findings that tell of many.
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
