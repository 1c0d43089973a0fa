//! One cluster for all tests, and what each test has of it: a namespace, a class, a driver, a user.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

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

use crate::harness::{Cluster, Entry, PATIENCE, rule};
use crate::objects::From;
use crate::script::Script;

/// The tests of a process run on one runtime, since they share the cluster's connections.
static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| Runtime::new().expect("a runtime"));
static CLUSTER: OnceCell<Cluster> = OnceCell::const_new();
static NEXT: AtomicU64 = AtomicU64::new(0);

/// What a test has of the cluster.
pub(crate) struct Stage {
    pub(crate) cluster: &'static Cluster,
    /// The namespace; its name is also that of the class and the first label of the driver's name.
    pub(crate) name: String,
    /// The scripted driver of the class.
    pub(crate) driver: Script,
    pub(crate) history: History,
    _recorders: [AbortOnDropHandle<()>; 2],
}

/// Every version of the namespace's claims and contexts, in order.
#[derive(Clone, Default)]
pub(crate) struct History {
    pub(crate) claims: Arc<Mutex<Vec<ResourceClaim>>>,
    pub(crate) contexts: Arc<Mutex<Vec<PodSchedulingContext>>>,
}

/// A controller that runs. It is stopped when this is dropped.
pub(crate) struct Running {
    /// Its user.
    pub(crate) user: String,
    task: JoinHandle<Result<(), drayman::controller::ControllerError>>,
    stop: DropGuard,
}

/// Runs a test on a stage of its own, named after it. If it fails, what there is in the namespace is printed.
pub(crate) fn on_stage(
    name: &str,
    test: impl AsyncFnOnce(&Stage) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    RUNTIME.block_on(async {
        let stage = Stage::new(name).await?;
        let result = AssertUnwindSafe(Box::pin(test(&stage))).catch_unwind().await;
        if !matches!(result, Ok(Ok(()))) {
            stage.explain().await;
        }
        result.unwrap_or_else(|panic| resume_unwind(panic))
    })
}

/// What a controller needs to be allowed, as its documentation says.
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

/// The rights of a controller but for a verb on a resource.
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

impl Stage {
    async fn new(name: &str) -> anyhow::Result<Self> {
        let cluster = CLUSTER
            .get_or_try_init(|| {
                // Nodes that exist in the API alone have no heartbeats.
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
        let driver = Script::new(&format!("{name}.example.com"));
        let stage = Self {
            cluster,
            name: name.to_owned(),
            driver,
            history,
            _recorders: recorders,
        };
        stage.make_class(name, json!({})).await?;
        stage.make_class(&format!("fence-{name}"), json!({})).await?;
        Ok(stage)
    }

    /// The driver's name.
    pub(crate) fn driver_name(&self) -> String {
        format!("{}.example.com", self.name)
    }

    /// The finalizer of the driver's claims.
    pub(crate) fn finalizer(&self) -> String {
        format!("{}/deletion-protection", self.driver_name())
    }

    // === the controller ===

    /// Starts the controller of the stage's driver.
    pub(crate) async fn start(&self) -> anyhow::Result<Running> {
        self.start_as("", &self.driver, &rules(), |builder| builder).await
    }

    /// Starts a controller of a driver: as the stage's user, or another one by that name, with these rights and options.
    pub(crate) async fn start_as(
        &self,
        name: &str,
        driver: &Script,
        rules: &[PolicyRule],
        options: impl FnOnce(Builder<Script>) -> Builder<Script>,
    ) -> anyhow::Result<Running> {
        let user = format!("{}{name}", self.name);
        let kubeconfig = self.cluster.user(&user, rules).await?;
        let client = self.cluster.client_of(&kubeconfig).await?;
        run(user, client, driver, options)
    }

    /// The same for the stage's driver, and `before` is awaited before each of its requests goes out.
    pub(crate) async fn start_behind<F>(
        &self,
        rules: &[PolicyRule],
        before: impl Fn(String) -> F + Clone + Send + 'static,
    ) -> anyhow::Result<Running>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let kubeconfig = self.cluster.user(&self.name, rules).await?;
        let client = self.cluster.client_of(&kubeconfig).await?;
        let watched = service_fn(move |request: Request<Body>| {
            let (client, before) = (client.clone(), before.clone());
            async move {
                before(words(&request)).await;
                client.send(request).await
            }
        });
        let client = kube::Client::new(watched, "default");
        run(self.name.clone(), client, &self.driver, |builder| builder)
    }

    /// Takes a right away from a controller and returns when the server knows.
    pub(crate) async fn forbid(
        &self,
        controller: &Running,
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
        timeout(PATIENCE, forbidden).await?
    }

    /// Gives a controller all its rights back.
    pub(crate) async fn allow(&self, controller: &Running) -> anyhow::Result<()> {
        self.cluster.user(&controller.user, &rules()).await.map(drop)
    }

    /// What a controller has asked of the API server about this test's objects, but for Events: `verb resource/subresource code`.
    pub(crate) async fn requests(&self, controller: &Running) -> anyhow::Result<Vec<String>> {
        let entries = self.entries(controller).await?;
        let of_test = entries.into_iter().filter(|entry| {
            entry.namespace == self.name && entry.resource != "events" && !entry.name.starts_with("fence-")
        });
        Ok(of_test.map(|entry| request(&entry)).collect())
    }

    /// All that a controller has asked of the API server.
    pub(crate) async fn entries(&self, controller: &Running) -> anyhow::Result<Vec<Entry>> {
        self.cluster.audit().of_user(&controller.user).await
    }

    /// Returns when what a controller has asked of the API server shows something.
    pub(crate) async fn until_entries(
        &self,
        controller: &Running,
        what: &str,
        condition: impl Fn(&[Entry]) -> bool,
    ) -> anyhow::Result<()> {
        let met = async {
            while !condition(&self.entries(controller).await?) {}
            anyhow::Ok(())
        };
        timeout(PATIENCE, met)
            .await
            .with_context(|| format!("the API server never {what}"))?
    }

    /// Returns when the controller of the stage's driver has seen everything that was there before, and done what it could: it
    /// has served a pod that came last.
    pub(crate) async fn fence(&self) -> anyhow::Result<()> {
        self.fence_in(&format!("fence-{}", self.name)).await
    }

    /// The same for the driver of another class, whose name begins with `fence-`.
    pub(crate) async fn fence_in(&self, class: &str) -> anyhow::Result<()> {
        let name = format!("fence-{}", NEXT.fetch_add(1, Ordering::Relaxed));
        self.claim_of(&name, json!({ "resourceClassName": class }))
            .await?;
        let pod = self.pod(&name, &[("fence", From::Claim(&name))]).await?;
        self.context(&pod, "fence", &[]).await?;
        self.until_claim(&name, "allocated", is_allocated).await.map(drop)
    }

    async fn explain(&self) {
        let contexts = self.history.contexts.lock().expect("no panic with it").clone();
        for context in contexts {
            let name = context.metadata.name.as_deref().unwrap_or_default();
            let bad: Vec<usize> = verdicts(&context).values().map(Vec::len).collect();
            let (selected, potential) = (&context.spec.selected_node, context.spec.potential_nodes.len());
            eprintln!("--- context {name}: selected {selected:?} of {potential}, bad {bad:?}");
        }
        for entry in self.cluster.audit().of_user(&self.name).await.unwrap_or_default() {
            eprintln!("--- {} {}", request(&entry), entry.name);
        }
        eprintln!("--- the driver was asked: {:#?}", self.driver.story());
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

impl Running {
    /// Stops it and waits for its end.
    pub(crate) async fn end(self) -> anyhow::Result<()> {
        drop(self.stop);
        Ok(timeout(PATIENCE, self.task).await???)
    }
}

/// Starts a controller with a client of its own.
fn run(
    user: String,
    client: kube::Client,
    driver: &Script,
    options: impl FnOnce(Builder<Script>) -> Builder<Script>,
) -> anyhow::Result<Running> {
    let controller = options(Controller::builder(driver.clone())).build(client)?;
    let stop = CancellationToken::new();
    let task = tokio::spawn(controller.run(stop.clone()));
    Ok(Running {
        user,
        task,
        stop: stop.drop_guard(),
    })
}

/// What a claim's finalizers are.
pub(crate) fn finalizers(claim: &ResourceClaim) -> Vec<&str> {
    claim
        .metadata
        .finalizers
        .iter()
        .flatten()
        .map(String::as_str)
        .collect()
}

/// Whether a claim is allocated.
pub(crate) fn is_allocated(claim: &ResourceClaim) -> bool {
    claim.status.allocation.is_some()
}

/// The verdicts in a context, by entry.
pub(crate) fn verdicts(context: &PodSchedulingContext) -> BTreeMap<String, Vec<String>> {
    let entries = context.status.resource_claims.iter();
    entries
        .map(|entry| (entry.name.clone(), entry.unsuitable_nodes.clone()))
        .collect()
}

/// Owned names.
pub(crate) fn names<const N: usize>(names: [&str; N]) -> [String; N] {
    names.map(str::to_owned)
}

/// A request as words: method, path and, for a patch, of which kind it is.
fn words(request: &Request<Body>) -> String {
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

/// Keeps every version from now on.
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
                into.lock().expect("no panic with it").push(object);
            }
        }
    })))
}
