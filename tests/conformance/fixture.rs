//! The shared cluster, and the namespace, class, driver and user of each test.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::ops::RangeBounds;
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use drayman::api::resource::{PodSchedulingContext, ResourceClaim};
use drayman::controller::{Builder, Controller};
use futures::{FutureExt as _, TryStreamExt as _};
use http::Request;
use http::header::CONTENT_TYPE;
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::api::rbac::v1::PolicyRule;
use kube::api::{Api, ListParams, PostParams, WatchEvent, WatchParams};
use kube::client::Body;
use serde::de::DeserializeOwned;
use serde_json::json;
use tokio::runtime::Runtime;
use tokio::sync::OnceCell;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::AbortOnDropHandle;
use tower::service_fn;

use crate::call::{Call, summaries};
use crate::fake_driver::FakeDriver;
use crate::harness::{Cluster, Entry, TIMEOUT, rule};
use crate::objects::ClaimSource;

/// All tests run on one runtime because they share the connections of the cluster.
static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| Runtime::new().expect("a runtime"));
static CLUSTER: OnceCell<Cluster> = OnceCell::const_new();
static NEXT: AtomicU64 = AtomicU64::new(0);

/// The part of the cluster that belongs to one test.
pub(crate) struct Fixture {
    pub(crate) cluster: &'static Cluster,
    /// Name of the namespace and of the class, and first label of the driver name.
    pub(crate) name: String,
    /// The driver of the class.
    pub(crate) driver: FakeDriver,
    pub(crate) history: History,
    _recorders: [AbortOnDropHandle<()>; 2],
}

/// Every version of the namespace's claims and contexts, in order.
#[derive(Clone, Default)]
pub(crate) struct History {
    pub(crate) claims: Arc<Mutex<Vec<ResourceClaim>>>,
    pub(crate) contexts: Arc<Mutex<Vec<PodSchedulingContext>>>,
}

/// A running controller. Stops on drop.
pub(crate) struct RunningController {
    /// The user of its kubeconfig.
    pub(crate) user: String,
    task: JoinHandle<Result<(), drayman::controller::ControllerError>>,
    stop: DropGuard,
}

/// Runs a test with its own fixture of this name. Prints the objects of the namespace on failure.
pub(crate) fn with_fixture(
    name: &str,
    test: impl AsyncFnOnce(&Fixture) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    RUNTIME.block_on(async {
        let fixture = Fixture::new(name).await?;
        let result = AssertUnwindSafe(Box::pin(test(&fixture))).catch_unwind().await;
        if !matches!(result, Ok(Ok(()))) {
            fixture.dump().await;
        }
        result.unwrap_or_else(|panic| resume_unwind(panic))
    })
}

/// The permissions that a controller needs according to its documentation.
pub(crate) fn rules() -> Vec<PolicyRule> {
    let group = &["resource.k8s.io"];
    let read = ["get", "list", "watch"];
    vec![
        rule(group, &["resourceclasses"], &read),
        rule(group, &["podschedulingcontexts"], &read),
        rule(group, &["resourceclaims"], &read),
        rule(group, &["resourceclaims"], &["patch"]),
        rule(group, &["resourceclaims/status"], &["patch"]),
        rule(group, &["podschedulingcontexts/status"], &["patch"]),
        rule(&[""], &["pods"], &["get"]),
        rule(&["events.k8s.io"], &["events"], &["create"]),
    ]
}

/// [`rules`] without a verb on a resource.
pub(crate) fn rules_without(resource: &str, verb: &str) -> Vec<PolicyRule> {
    let mut rules = rules();
    for rule in &mut rules {
        if rule
            .resources
            .as_ref()
            .is_some_and(|all| all.iter().any(|one| one == resource))
        {
            rule.verbs.retain(|one| one != verb);
        }
    }
    rules.retain(|rule| !rule.verbs.is_empty());
    rules
}

impl Fixture {
    async fn new(name: &str) -> anyhow::Result<Self> {
        let cluster = CLUSTER
            .get_or_try_init(|| {
                // Fake nodes have no heartbeats.
                let builder = Cluster::builder().flag("controller-manager", "--node-monitor-grace-period=1h");
                builder.share("conformance", async |_| Ok(()))
            })
            .await?;
        let namespace = json!({ "metadata": { "name": name } });
        let namespaces = Api::<Namespace>::all(cluster.client());
        namespaces
            .create(&PostParams::default(), &serde_json::from_value(namespace)?)
            .await?;
        let history = History::default();
        let client = cluster.client();
        let recorders = [
            record(Api::namespaced(client.clone(), name), history.claims.clone()).await?,
            record(Api::namespaced(client, name), history.contexts.clone()).await?,
        ];
        let driver = FakeDriver::new(&format!("{name}.example.com"));
        let fixture = Self {
            cluster,
            name: name.to_owned(),
            driver,
            history,
            _recorders: recorders,
        };
        fixture.make_class(name, json!({})).await?;
        fixture.make_class(&format!("fence-{name}"), json!({})).await?;
        Ok(fixture)
    }

    pub(crate) fn driver_name(&self) -> String {
        format!("{}.example.com", self.name)
    }

    pub(crate) fn finalizer(&self) -> String {
        format!("{}/deletion-protection", self.driver_name())
    }

    // === the controller ===

    /// Starts a controller of the driver of the fixture.
    pub(crate) async fn start(&self) -> anyhow::Result<RunningController> {
        self.start_with(&rules()).await
    }

    /// Starts a controller of the driver of the fixture with these permissions.
    pub(crate) async fn start_with(&self, rules: &[PolicyRule]) -> anyhow::Result<RunningController> {
        self.start_as("", &self.driver, rules, |builder| builder).await
    }

    /// Starts a controller of `driver` with these permissions and options. Its user is the fixture name followed by `name`.
    pub(crate) async fn start_as(
        &self,
        name: &str,
        driver: &FakeDriver,
        rules: &[PolicyRule],
        options: impl FnOnce(Builder<FakeDriver>) -> Builder<FakeDriver>,
    ) -> anyhow::Result<RunningController> {
        let user = format!("{}{name}", self.name);
        let kubeconfig = self.cluster.user(&user, rules).await?;
        let client = self.cluster.client_of(&kubeconfig).await?;
        run(user, client, driver, options)
    }

    /// Starts a controller of the driver of the fixture that awaits `before` before each of its requests.
    pub(crate) async fn start_intercepted<F>(
        &self,
        rules: &[PolicyRule],
        before: impl Fn(String) -> F + Clone + Send + 'static,
    ) -> anyhow::Result<RunningController>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let kubeconfig = self.cluster.user(&self.name, rules).await?;
        let client = self.cluster.client_of(&kubeconfig).await?;
        let intercepted = service_fn(move |request: Request<Body>| {
            let (client, before) = (client.clone(), before.clone());
            async move {
                before(describe(&request)).await;
                client.send(request).await
            }
        });
        let client = kube::Client::new(intercepted, "default");
        run(self.name.clone(), client, &self.driver, |builder| builder)
    }

    /// Removes a permission of a controller and waits until the API server enforces that.
    pub(crate) async fn forbid(
        &self,
        controller: &RunningController,
        resource: &str,
        verb: &str,
    ) -> anyhow::Result<()> {
        self.cluster
            .user(&controller.user, &rules_without(resource, verb))
            .await?;
        let (resource, subresource) = match resource.split_once('/') {
            Some((resource, subresource)) => (resource, Some(subresource.to_owned())),
            None => (resource, None),
        };
        let group = if resource == "pods" { "" } else { "resource.k8s.io" };
        let review = SubjectAccessReview {
            spec: SubjectAccessReviewSpec {
                user: Some(controller.user.clone()),
                resource_attributes: Some(ResourceAttributes {
                    group: Some(group.to_owned()),
                    resource: Some(resource.to_owned()),
                    subresource,
                    verb: Some(verb.to_owned()),
                    ..ResourceAttributes::default()
                }),
                ..SubjectAccessReviewSpec::default()
            },
            ..SubjectAccessReview::default()
        };
        let api = Api::all(self.cluster.client());
        let forbidden = async {
            while api
                .create(&PostParams::default(), &review)
                .await?
                .status
                .is_some_and(|status| status.allowed)
            {
                sleep(Duration::from_millis(10)).await;
            }
            anyhow::Ok(())
        };
        timeout(TIMEOUT, forbidden).await?
    }

    /// Restores all permissions of a controller.
    pub(crate) async fn allow(&self, controller: &RunningController) -> anyhow::Result<()> {
        self.cluster.user(&controller.user, &rules()).await.map(drop)
    }

    /// Requests of a controller for objects of this test, except Events, as `verb resource/subresource code`.
    pub(crate) async fn requests(&self, controller: &RunningController) -> anyhow::Result<Vec<String>> {
        let entries = self.audit_entries(controller).await?;
        let own = entries.into_iter().filter(|entry| {
            entry.namespace == self.name && entry.resource != "events" && !entry.name.starts_with("fence-")
        });
        Ok(own.map(|entry| request(&entry)).collect())
    }

    /// All audit log entries of a controller.
    pub(crate) async fn audit_entries(&self, controller: &RunningController) -> anyhow::Result<Vec<Entry>> {
        self.cluster.audit().of_user(&controller.user).await
    }

    /// Asserts that no request of a controller has failed.
    pub(crate) async fn assert_none_failed(&self, controller: &RunningController) -> anyhow::Result<()> {
        let mut failed = self.audit_entries(controller).await?;
        failed.retain(|entry| entry.code >= 400);
        assert_eq!(failed, []);
        Ok(())
    }

    /// Waits until the audit log entries of a controller meet a condition.
    pub(crate) async fn wait_for_entries(
        &self,
        controller: &RunningController,
        what: &str,
        condition: impl Fn(&[Entry]) -> bool,
    ) -> anyhow::Result<()> {
        let met = async {
            while !condition(&self.audit_entries(controller).await?) {}
            anyhow::Ok(())
        };
        timeout(TIMEOUT, met)
            .await
            .with_context(|| format!("the API server never {what}"))?
    }

    /// Waits until the number of driver calls whose summary begins so is in `numbers`.
    pub(crate) async fn wait_for_calls(
        &self,
        start: &str,
        numbers: impl RangeBounds<usize> + Debug,
    ) -> anyhow::Result<Vec<Call>> {
        let is_met = |calls: &[Call]| {
            let summaries = summaries(calls);
            let these = summaries.iter().filter(|summary| summary.starts_with(start));
            numbers.contains(&these.count())
        };
        let expected = format!("{start} {numbers:?} times");
        self.driver.wait_for(&expected, is_met).await
    }

    /// Waits until the controller has processed every earlier event: until a claim created now is allocated.
    pub(crate) async fn fence(&self) -> anyhow::Result<()> {
        self.fence_in(&format!("fence-{}", self.name)).await
    }

    /// Like [`Self::fence`] for another class, whose name begins with `fence-`.
    pub(crate) async fn fence_in(&self, class: &str) -> anyhow::Result<()> {
        let name = format!("fence-{}", NEXT.fetch_add(1, Ordering::Relaxed));
        self.claim_of(&name, json!({ "resourceClassName": class }))
            .await?;
        let pod = self.pod(&name, &[("fence", ClaimSource::Claim(&name))]).await?;
        self.context(&pod, "fence", &[]).await?;
        self.wait_for_claim(&name, "allocated", is_allocated)
            .await
            .map(drop)
    }

    async fn dump(&self) {
        let contexts = self
            .history
            .contexts
            .lock()
            .expect("the lock is not poisoned")
            .clone();
        for context in contexts {
            let name = context.metadata.name.as_deref().unwrap_or_default();
            let unsuitable: Vec<usize> = unsuitable_nodes(&context).values().map(Vec::len).collect();
            let (selected, potential) = (&context.spec.selected_node, context.spec.potential_nodes.len());
            eprintln!("--- context {name}: selected {selected:?} of {potential}, unsuitable {unsuitable:?}");
        }
        for entry in self.cluster.audit().of_user(&self.name).await.unwrap_or_default() {
            eprintln!("--- {} {}", request(&entry), entry.name);
        }
        eprintln!("--- driver calls: {:#?}", self.driver.call_summaries());
        let kinds = "pods,resourceclaims,podschedulingcontexts,events";
        let text = self
            .cluster
            .kubectl(&["get", kinds, "--namespace", &self.name, "--output=wide"])
            .await;
        eprintln!("--- {}:\n{}", self.name, text.unwrap_or_default());
        let kinds = "resourceclaims,podschedulingcontexts";
        let text = self
            .cluster
            .kubectl(&["get", kinds, "--namespace", &self.name, "--output=yaml"])
            .await;
        eprintln!("{}", text.unwrap_or_default());
    }
}

impl RunningController {
    /// Stops the controller and waits for its task.
    pub(crate) async fn stop(self) -> anyhow::Result<()> {
        drop(self.stop);
        Ok(timeout(TIMEOUT, self.task).await???)
    }
}

fn run(
    user: String,
    client: kube::Client,
    driver: &FakeDriver,
    options: impl FnOnce(Builder<FakeDriver>) -> Builder<FakeDriver>,
) -> anyhow::Result<RunningController> {
    let controller = options(Controller::builder(driver.clone())).build(client)?;
    let stop = CancellationToken::new();
    let task = tokio::spawn(controller.run(stop.clone()));
    Ok(RunningController {
        user,
        task,
        stop: stop.drop_guard(),
    })
}

/// Asserts that less than this time has passed.
#[track_caller]
pub(crate) fn assert_within(since: Instant, seconds: u64) {
    let elapsed = since.elapsed();
    assert!(elapsed < Duration::from_secs(seconds), "{elapsed:?}");
}

pub(crate) fn finalizers(claim: &ResourceClaim) -> Vec<&str> {
    claim
        .metadata
        .finalizers
        .iter()
        .flatten()
        .map(String::as_str)
        .collect()
}

pub(crate) fn is_allocated(claim: &ResourceClaim) -> bool {
    claim.status.allocation.is_some()
}

/// The unsuitable nodes of a context by entry.
pub(crate) fn unsuitable_nodes(context: &PodSchedulingContext) -> BTreeMap<String, Vec<String>> {
    let entries = context.status.resource_claims.iter();
    entries
        .map(|entry| (entry.name.clone(), entry.unsuitable_nodes.clone()))
        .collect()
}

pub(crate) fn names<const N: usize>(names: [&str; N]) -> [String; N] {
    names.map(str::to_owned)
}

/// Method, path and content type of a request.
fn describe(request: &Request<Body>) -> String {
    let header = request.headers().get(CONTENT_TYPE);
    let kind = header.and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    format!("{} {} {kind}", request.method(), request.uri().path())
}

fn request(entry: &Entry) -> String {
    let slash = if entry.subresource.is_empty() { "" } else { "/" };
    format!(
        "{} {}{slash}{} {}",
        entry.verb, entry.resource, entry.subresource, entry.code
    )
}

/// Records every version from now on.
async fn record<K>(api: Api<K>, into: Arc<Mutex<Vec<K>>>) -> anyhow::Result<AbortOnDropHandle<()>>
where
    K: kube::Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let now = api
        .list(&ListParams::default())
        .await?
        .metadata
        .resource_version
        .unwrap_or_default();
    let events = api.watch(&WatchParams::default(), &now).await?;
    Ok(AbortOnDropHandle::new(tokio::spawn(async move {
        let mut events = pin!(events);
        while let Ok(Some(event)) = events.try_next().await {
            if let WatchEvent::Added(object) | WatchEvent::Modified(object) | WatchEvent::Deleted(object) =
                event
            {
                into.lock().expect("the lock is not poisoned").push(object);
            }
        }
    })))
}
