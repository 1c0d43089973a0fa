//! Environment of a check: its own cluster and directory, and the log of calls.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::{Value, json};

use super::report::{Broken, BrokenRule};
use super::rule::Rule;
use crate::api::resource::{ResourceClaim, ResourceClass};
use crate::testcluster::api::ClusterMode;
use crate::testcluster::api::object::{self, text};
use crate::testcluster::client::ApiClient;
use crate::testcluster::clock_and_rng::ClockAndRng;
use crate::testcluster::cluster::{TestCluster, TestClusterError};
use crate::testcluster::temporary_directory::TemporaryDirectory;

/// Name of the class and the template that the kit creates by default.
pub(super) const OWN: &str = "conformance";
/// Namespace of all pods and claims.
pub(super) const NAMESPACE: &str = "default";

/// Name of the directory of the driver, below that of the fixture.
const OWN_DIRECTORY: &str = "own";
/// Number of directories made by this process.
static DIRECTORIES: AtomicUsize = AtomicUsize::new(0);

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
        f.debug_struct("Environment")
            .field("directory", &self.directory)
            .field("node_name", &self.node_name)
            .finish_non_exhaustive()
    }
}

/// Why a check ends early.
#[derive(Debug)]
pub(super) enum CheckFailure {
    /// The driver breaks a rule.
    Rule(Box<BrokenRule>),
    /// The settings of the test are invalid, or the machine prevents it.
    Setup(String),
}

impl From<TestClusterError> for CheckFailure {
    fn from(error: TestClusterError) -> Self {
        Self::Setup(error.to_string())
    }
}

impl From<std::io::Error> for CheckFailure {
    fn from(error: std::io::Error) -> Self {
        Self::Setup(error.to_string())
    }
}

impl From<CheckFailure> for Broken {
    fn from(stop: CheckFailure) -> Self {
        match stop {
            CheckFailure::Rule(finding) => Self::Rules(vec![*finding]),
            CheckFailure::Setup(problem) => Self::Setup(problem),
        }
    }
}

pub(super) type CheckResult<T> = Result<T, CheckFailure>;

/// The vendor's settings of a test.
#[derive(Clone, Debug, Default)]
pub(super) struct Setup {
    pub(super) mode: ClusterMode,
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
    pub(super) cluster: TestCluster,
    pub(super) client: ApiClient,
    pub(super) directory: TemporaryDirectory,
    pub(super) nodes: Vec<String>,
    pub(super) max_claims: usize,
    driver_name: String,
    /// Class of the claims; only in classic mode.
    class: Option<Arc<ResourceClass>>,
    /// Spec of the claims.
    claim_spec: Value,
    /// Template of the pods' claims.
    template: String,
    check: String,
    calls: Arc<Mutex<Vec<String>>>,
    claims: AtomicUsize,
}

impl Fixture {
    /// Creates a cluster with the nodes and objects of the test. Must be called within a runtime.
    pub(super) fn open(setup: &Setup, check: &str) -> CheckResult<Self> {
        let cluster = TestCluster::with_mode(ClockAndRng::system(), setup.mode);
        let client = ApiClient::new(cluster.server(), OWN);
        for name in &setup.nodes {
            let node = json!({
                "metadata": { "name": name, "labels": { "kubernetes.io/hostname": name } },
                "status": { "conditions": [{ "type": "Ready", "status": "True" }], "allocatable": { "pods": "110" } },
            });
            client
                .create("nodes", "", node)
                .map_err(|refusal| CheckFailure::Setup(format!("node {name}: {}", refusal.message)))?;
        }
        apply(&cluster, &client, &setup.objects)?;
        let class = match setup.mode {
            ClusterMode::Classic => Some(resource_class(&client, &setup.driver_name)?),
            ClusterMode::Structured => None,
        };
        let template = template(&client, class.as_ref())?;
        if object::namespace(&template) != NAMESPACE {
            return Err(CheckFailure::Setup(format!(
                "ResourceClaimTemplate {} must be in namespace {NAMESPACE}, where the pods of the test are",
                object::name(&template)
            )));
        }
        let class = class.map(serde_json::from_value::<ResourceClass>).transpose();
        let class = class.map_err(|error| CheckFailure::Setup(error.to_string()))?;
        let number = DIRECTORIES.fetch_add(1, Ordering::Relaxed);
        let directory = TemporaryDirectory::create(&format!("conform-{}-{number}", std::process::id()))?;
        std::fs::create_dir(directory.path().join(OWN_DIRECTORY))?;
        Ok(Self {
            client,
            directory,
            nodes: setup.nodes.clone(),
            max_claims: setup.max_claims,
            driver_name: setup.driver_name.clone(),
            class: class.map(Arc::new),
            claim_spec: template["spec"]["spec"].clone(),
            template: object::name(&template).to_owned(),
            check: check.to_owned(),
            calls: Arc::default(),
            claims: AtomicUsize::new(0),
            cluster,
        })
    }

    /// The driver's own directory.
    pub(super) fn driver_directory(&self) -> PathBuf {
        self.directory.path().join(OWN_DIRECTORY)
    }

    pub(super) fn driver_name(&self) -> &str {
        &self.driver_name
    }

    pub(super) fn mode(&self) -> ClusterMode {
        self.cluster.server().mode()
    }

    pub(super) fn class(&self) -> CheckResult<Arc<ResourceClass>> {
        let class = self.class.clone();
        class.ok_or_else(|| CheckFailure::Setup("structured mode has no ResourceClass".to_owned()))
    }

    /// Returns an entry of a pod's `resourceClaims`, with the template.
    pub(super) fn pod_claim(&self, entry: &str) -> Value {
        match self.mode() {
            ClusterMode::Classic => {
                json!({ "name": entry, "source": { "resourceClaimTemplateName": self.template } })
            }
            ClusterMode::Structured => json!({ "name": entry, "resourceClaimTemplateName": self.template }),
        }
    }

    pub(super) fn create_pod(&self, name: &str, spec: &Value) -> CheckResult<()> {
        let pod = json!({ "metadata": { "name": name }, "spec": spec });
        let made = self.client.create("pods", NAMESPACE, pod);
        made.map(drop)
            .map_err(|refusal| CheckFailure::Setup(format!("pod {name}: {}", refusal.message)))
    }

    pub(super) fn delete_pod(&self, name: &str) {
        if let Some(pod) = self.client.get("pods", NAMESPACE, name) {
            // The pod may already be deleted.
            let _ = self.client.delete("pods", &pod, None);
        }
    }

    /// Creates a claim with our finalizer, which the controller adds before an allocation.
    pub(super) fn claim(&self) -> CheckResult<Arc<ResourceClaim>> {
        let number = self.claims.fetch_add(1, Ordering::Relaxed) + 1;
        let claim = json!({
            "metadata": {
                "name": format!("claim-{number}"), "namespace": NAMESPACE, "uid": self.cluster.server().source.uid(),
                "finalizers": [format!("{}/deletion-protection", self.driver_name)],
                "creationTimestamp": self.cluster.server().now(), "resourceVersion": number.to_string(),
            },
            "spec": self.claim_spec,
        });
        let claim = serde_json::from_value(claim).map_err(|error| CheckFailure::Setup(error.to_string()))?;
        Ok(Arc::new(claim))
    }

    pub(super) fn claims(&self, count: usize) -> CheckResult<Vec<Arc<ResourceClaim>>> {
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
        let line =
            |event: &Arc<Value>| format!("event: {} {}", text(event, "/reason"), text(event, "/message"));
        events.iter().map(line).collect()
    }

    /// Returns a broken rule, with the steps of a program as calls.
    pub(super) fn broken_after(
        &self,
        steps: impl IntoIterator<Item = String>,
        rule: Rule,
        expected: &str,
        found: impl Into<String>,
    ) -> CheckFailure {
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
    ) -> CheckFailure {
        let tried = match tried {
            "" => self.check.clone(),
            tried => format!("{}: {tried}", self.check),
        };
        CheckFailure::Rule(Box::new(BrokenRule {
            rule,
            tried,
            expected: expected.into(),
            found: found.into(),
            calls: self.calls.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }))
    }
}

/// Returns the class of the driver; creates one if there is none.
fn resource_class(client: &ApiClient, driver_name: &str) -> CheckResult<Value> {
    let mut classes = client.list("resourceclasses").into_iter();
    if let Some(class) = classes.find(|class| text(class, "/driverName") == driver_name) {
        return Ok(Arc::unwrap_or_clone(class));
    }
    let class = json!({ "metadata": { "name": OWN }, "driverName": driver_name });
    let made = client.create("resourceclasses", "", class);
    made.map_err(|refusal| CheckFailure::Setup(format!("class {OWN}: {}", refusal.message)))
}

/// Returns the template of the class; creates one if there is none. In structured mode, creates one for the DeviceClass
/// [`OWN`].
fn template(client: &ApiClient, class: Option<&Value>) -> CheckResult<Value> {
    let spec = if let Some(class) = class.map(object::name) {
        let mut templates = client.list("resourceclaimtemplates").into_iter();
        let is_of_class = |template: &Arc<Value>| text(template, "/spec/spec/resourceClassName") == class;
        if let Some(template) = templates.find(is_of_class) {
            return Ok(Arc::unwrap_or_clone(template));
        }
        json!({ "resourceClassName": class })
    } else {
        let request = json!({ "name": "device", "exactly": { "deviceClassName": OWN } });
        json!({ "devices": { "requests": [request] } })
    };
    let template = json!({ "metadata": { "name": OWN }, "spec": { "spec": spec } });
    let made = client.create("resourceclaimtemplates", NAMESPACE, template);
    made.map_err(|refusal| CheckFailure::Setup(format!("template {OWN}: {}", refusal.message)))
}

/// Applies objects including their status, such as the inventory of a companion that does not run here.
fn apply(cluster: &TestCluster, client: &ApiClient, yaml: &str) -> CheckResult<()> {
    let documents: Vec<Value> =
        serde_saphyr::from_multiple(yaml).map_err(|error| TestClusterError::Yaml(error.to_string()))?;
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
                CheckFailure::Setup(format!(
                    "the status of {}: {}",
                    object::name(object),
                    refusal.message
                ))
            })?;
    }
    Ok(())
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
