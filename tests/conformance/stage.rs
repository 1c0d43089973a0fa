//! One cluster for all tests, and what each test has of it: a namespace, a class, a driver, a user.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, Weak};
use std::time::Duration;

use anyhow::{Context as _, bail};
use drayman::api::resource::{Pod, PodSchedulingContext, ResourceClaim, ResourceClass};
use drayman::controller::{Builder, Controller};
use futures::{FutureExt as _, TryStreamExt as _};
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use k8s_openapi::api::core::v1::{Event, Namespace, Node};
use k8s_openapi::api::rbac::v1::PolicyRule;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams};
use kube::runtime::wait::{Condition, await_condition};
use kube::runtime::{WatchStreamExt as _, watcher};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::AbortOnDropHandle;

use crate::harness::{Cluster, Entry, IMAGE, PATIENCE, rule};
use crate::script::Script;

/// All tests run on one runtime, since they share the cluster's connections.
static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| Runtime::new().expect("a runtime"));
/// The cluster, as long as a test uses it.
static CLUSTER: tokio::sync::Mutex<Weak<Cluster>> = tokio::sync::Mutex::const_new(Weak::new());
static NEXT: AtomicU64 = AtomicU64::new(0);

/// The name of a scheduler that does not exist: pods that name it are scheduled by the test.
const TEST_SCHEDULER: &str = "the-test";

/// What a test has of the cluster.
pub(crate) struct Stage {
    pub(crate) cluster: Arc<Cluster>,
    /// The namespace; its name is also that of the class and the first label of the driver's name.
    pub(crate) name: String,
    /// The scripted driver of the class.
    pub(crate) driver: Script,
    history: History,
    _recorders: [AbortOnDropHandle<()>; 2],
}

/// Every version of the namespace's claims and contexts, in order.
#[derive(Clone, Default)]
struct History {
    claims: Arc<Mutex<Vec<ResourceClaim>>>,
    contexts: Arc<Mutex<Vec<PodSchedulingContext>>>,
}

/// A controller that runs. It is stopped when this is dropped.
pub(crate) struct Running {
    /// Its user.
    pub(crate) user: String,
    task: JoinHandle<Result<(), drayman::controller::ControllerError>>,
    stop: DropGuard,
}

/// Where a pod's claim comes from.
#[derive(Clone, Copy)]
pub(crate) enum From<'a> {
    Claim(&'a str),
    Template(&'a str),
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
        // The last one ends the cluster.
        if let Ok(Ok(())) = result
            && let Some(cluster) = Arc::into_inner(stage.cluster)
        {
            cluster.stop().await?;
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
        let cluster = {
            let mut shared = CLUSTER.lock().await;
            match shared.upgrade() {
                Some(cluster) => cluster,
                None => {
                    // Nobody says for pretended nodes that they are alive.
                    let builder =
                        Cluster::builder().flag("controller-manager", "--node-monitor-grace-period=1h");
                    let cluster = Arc::new(builder.start().await?);
                    *shared = Arc::downgrade(&cluster);
                    cluster
                }
            }
        };
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
        let controller = options(Controller::builder(driver.clone())).build(client)?;
        let stop = CancellationToken::new();
        let task = tokio::spawn(controller.run(stop.clone()));
        Ok(Running {
            user,
            task,
            stop: stop.drop_guard(),
        })
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

    // === objects ===

    pub(crate) fn claims(&self) -> Api<ResourceClaim> {
        Api::namespaced(self.cluster.client(), &self.name)
    }

    pub(crate) fn classes(&self) -> Api<ResourceClass> {
        Api::all(self.cluster.client())
    }

    pub(crate) fn contexts(&self) -> Api<PodSchedulingContext> {
        Api::namespaced(self.cluster.client(), &self.name)
    }

    pub(crate) fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.cluster.client(), &self.name)
    }

    /// Makes a class of the stage's driver; `fields` wins.
    pub(crate) async fn make_class(&self, name: &str, fields: Value) -> anyhow::Result<ResourceClass> {
        let mut class = json!({ "metadata": { "name": name }, "driverName": self.driver_name() });
        merge(&mut class, fields);
        let class = serde_json::from_value(class)?;
        Ok(self.classes().create(&PostParams::default(), &class).await?)
    }

    /// Changes a class.
    pub(crate) async fn patch_class(&self, name: &str, fields: Value) -> anyhow::Result<()> {
        let patch = Patch::Merge(fields);
        self.classes()
            .patch(name, &PatchParams::default(), &patch)
            .await
            .map(drop)?;
        Ok(())
    }

    /// Makes a claim of the stage's class that waits for a pod.
    pub(crate) async fn claim(&self, name: &str) -> anyhow::Result<ResourceClaim> {
        self.claim_of(name, json!({ "resourceClassName": self.name }))
            .await
    }

    /// Makes a claim of the stage's class that is to be allocated at once.
    pub(crate) async fn immediate(&self, name: &str) -> anyhow::Result<ResourceClaim> {
        let spec = json!({ "resourceClassName": self.name, "allocationMode": "Immediate" });
        self.claim_of(name, spec).await
    }

    /// Makes a claim.
    pub(crate) async fn claim_of(&self, name: &str, spec: Value) -> anyhow::Result<ResourceClaim> {
        self.create_claim(json!({ "metadata": { "name": name }, "spec": spec }))
            .await
    }

    /// Makes a claim of the stage's class unless it says otherwise.
    pub(crate) async fn create_claim(&self, claim: Value) -> anyhow::Result<ResourceClaim> {
        let mut whole = json!({ "spec": { "resourceClassName": self.name } });
        merge(&mut whole, claim);
        Ok(self
            .claims()
            .create(&PostParams::default(), &serde_json::from_value(whole)?)
            .await?)
    }

    /// Makes a template of claims of a class.
    pub(crate) async fn template(&self, name: &str, class: &str) -> anyhow::Result<()> {
        let api = Api::<drayman::api::resource::ResourceClaimTemplate>::namespaced(
            self.cluster.client(),
            &self.name,
        );
        let template =
            json!({ "metadata": { "name": name }, "spec": { "spec": { "resourceClassName": class } } });
        api.create(&PostParams::default(), &serde_json::from_value(template)?)
            .await?;
        Ok(())
    }

    /// Makes a pod that the test schedules itself.
    pub(crate) async fn pod(&self, name: &str, claims: &[(&str, From<'_>)]) -> anyhow::Result<Pod> {
        self.pod_with(name, claims, json!({ "schedulerName": TEST_SCHEDULER }))
            .await
    }

    /// Makes a pod that the scheduler places on one of the stage's nodes.
    pub(crate) async fn scheduled_pod(&self, name: &str, claims: &[(&str, From<'_>)]) -> anyhow::Result<Pod> {
        self.pod_with(name, claims, json!({ "nodeSelector": { "stage": self.name } }))
            .await
    }

    /// Makes a pod with these fields in its spec.
    pub(crate) async fn pod_with(
        &self,
        name: &str,
        claims: &[(&str, From<'_>)],
        fields: Value,
    ) -> anyhow::Result<Pod> {
        let source = |from: From<'_>| match from {
            From::Claim(name) => json!({ "resourceClaimName": name }),
            From::Template(name) => json!({ "resourceClaimTemplateName": name }),
        };
        let claims: Vec<Value> = claims
            .iter()
            .map(|(entry, from)| json!({ "name": entry, "source": source(*from) }))
            .collect();
        let mut pod = json!({ "metadata": { "name": name }, "spec": {
            "resourceClaims": claims,
            "containers": [{ "name": "main", "image": IMAGE }],
            "terminationGracePeriodSeconds": 1,
        } });
        merge(&mut pod["spec"], fields);
        Ok(self
            .pods()
            .create(&PostParams::default(), &serde_json::from_value(pod)?)
            .await?)
    }

    /// Deletes a pod at once, as a kubelet does at the end.
    pub(crate) async fn remove_pod(&self, name: &str) -> anyhow::Result<()> {
        self.pods()
            .delete(name, &DeleteParams::default().grace_period(0))
            .await
            .map(drop)?;
        Ok(())
    }

    /// Makes the context of a pod, as the scheduler does.
    pub(crate) async fn context(
        &self,
        pod: &Pod,
        selected: &str,
        potential: &[String],
    ) -> anyhow::Result<PodSchedulingContext> {
        let metadata = json!({ "ownerReferences": [{
            "apiVersion": "v1", "kind": "Pod", "name": pod.metadata.name, "uid": pod.metadata.uid,
            "controller": true, "blockOwnerDeletion": true,
        }] });
        self.context_with(pod, metadata, selected, potential).await
    }

    /// Makes a context by the name of a pod with other metadata.
    pub(crate) async fn context_with(
        &self,
        pod: &Pod,
        metadata: Value,
        selected: &str,
        potential: &[String],
    ) -> anyhow::Result<PodSchedulingContext> {
        let mut context = json!({
            "metadata": { "name": pod.metadata.name },
            "spec": { "selectedNode": selected, "potentialNodes": potential },
        });
        merge(&mut context["metadata"], metadata);
        let context = serde_json::from_value(context)?;
        Ok(self.contexts().create(&PostParams::default(), &context).await?)
    }

    /// Changes what the scheduler says.
    pub(crate) async fn reschedule(&self, pod: &str, spec: Value) -> anyhow::Result<()> {
        let patch = Patch::Merge(json!({ "spec": spec }));
        self.contexts()
            .patch(pod, &PatchParams::default(), &patch)
            .await
            .map(drop)?;
        Ok(())
    }

    /// Makes a node that exists in the API only, with the stage's label. The scheduler binds pods to it; nothing runs there.
    pub(crate) async fn node(&self, name: &str) -> anyhow::Result<String> {
        let name = format!("{}-{name}", self.name);
        let api = Api::<Node>::all(self.cluster.client());
        let node = json!({ "metadata": { "name": name, "labels": { "stage": self.name } } });
        api.create(&PostParams::default(), &serde_json::from_value(node)?)
            .await?;
        let resources = json!({ "cpu": "64", "memory": "64Gi", "pods": "1000" });
        let status = json!({ "status": {
            "capacity": resources, "allocatable": resources,
            "conditions": [{ "type": "Ready", "status": "True", "reason": "Pretended", "message": "",
                "lastHeartbeatTime": "2026-01-01T00:00:00Z", "lastTransitionTime": "2026-01-01T00:00:00Z" }],
        } });
        api.patch_status(&name, &PatchParams::default(), &Patch::Merge(status))
            .await?;
        Ok(name)
    }

    // === what comes of it ===

    /// Waits for a condition; the error says what was waited for and how the object is.
    pub(crate) async fn until<K>(
        &self,
        api: Api<K>,
        name: &str,
        what: &str,
        condition: impl Condition<K>,
    ) -> anyhow::Result<Option<K>>
    where
        K: kube::Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
    {
        match timeout(PATIENCE, await_condition(api.clone(), name, condition)).await {
            Ok(found) => Ok(found?),
            Err(_) => bail!(
                "{} {name} is not {what}, but {:?}",
                K::kind(&()),
                api.get_opt(name).await
            ),
        }
    }

    /// Waits until a claim meets a condition.
    pub(crate) async fn until_claim(
        &self,
        name: &str,
        what: &str,
        met: impl Fn(&ResourceClaim) -> bool,
    ) -> anyhow::Result<ResourceClaim> {
        let met = |claim: Option<&ResourceClaim>| claim.is_some_and(&met);
        self.until(self.claims(), name, what, met)
            .await?
            .context("the claim is there")
    }

    /// Waits until a context meets a condition.
    pub(crate) async fn until_context(
        &self,
        name: &str,
        what: &str,
        met: impl Fn(&PodSchedulingContext) -> bool,
    ) -> anyhow::Result<PodSchedulingContext> {
        let met = |context: Option<&PodSchedulingContext>| context.is_some_and(&met);
        self.until(self.contexts(), name, what, met)
            .await?
            .context("the context is there")
    }

    /// Waits until a pod is bound, and returns its node.
    pub(crate) async fn until_bound(&self, name: &str) -> anyhow::Result<String> {
        let met = |pod: Option<&Pod>| pod.is_some_and(|pod| pod.spec.node_name.is_some());
        let pod = self.until(self.pods(), name, "bound", met).await?;
        pod.and_then(|pod| pod.spec.node_name)
            .context("a bound pod has a node")
    }

    /// Waits until a claim is gone.
    pub(crate) async fn until_gone(&self, name: &str) -> anyhow::Result<()> {
        let met = |claim: Option<&ResourceClaim>| claim.is_none();
        self.until(self.claims(), name, "gone", met).await.map(drop)
    }

    /// Deletes a claim.
    pub(crate) async fn delete_claim(&self, name: &str) -> anyhow::Result<()> {
        self.claims()
            .delete(name, &DeleteParams::default())
            .await
            .map(drop)?;
        Ok(())
    }

    /// Changes a claim by hand.
    pub(crate) async fn patch_claim(&self, name: &str, change: Value) -> anyhow::Result<ResourceClaim> {
        Ok(self
            .claims()
            .patch(name, &PatchParams::default(), &Patch::Merge(change))
            .await?)
    }

    /// Changes the status of a claim by hand.
    pub(crate) async fn patch_claim_status(
        &self,
        name: &str,
        status: Value,
    ) -> anyhow::Result<ResourceClaim> {
        let patch = Patch::Merge(json!({ "status": status }));
        Ok(self
            .claims()
            .patch_status(name, &PatchParams::default(), &patch)
            .await?)
    }

    /// Every version of a claim so far.
    pub(crate) async fn versions(&self, name: &str) -> anyhow::Result<Vec<ResourceClaim>> {
        versions(&self.history.claims, self.claims(), name).await
    }

    /// Every version of a context so far.
    pub(crate) async fn context_versions(&self, name: &str) -> anyhow::Result<Vec<PodSchedulingContext>> {
        versions(&self.history.contexts, self.contexts(), name).await
    }

    /// The Events of the stage's driver about objects by this name: reason and text.
    pub(crate) async fn events(&self, name: &str) -> anyhow::Result<Vec<(String, String)>> {
        let events = Api::<Event>::all(self.cluster.client());
        let about = ListParams::default().fields(&format!("involvedObject.name={name}"));
        let events = events.list(&about).await?.items.into_iter();
        let ours = events.filter(|event| event.reporting_component.as_deref() == Some(&self.driver_name()));
        Ok(ours
            .map(|event| {
                (
                    event.reason.unwrap_or_default(),
                    event.message.unwrap_or_default(),
                )
            })
            .collect())
    }

    /// Waits for an Event about an object with this reason and this in its text.
    pub(crate) async fn event(&self, name: &str, reason: &str, text: &str) -> anyhow::Result<Event> {
        let api = Api::<Event>::all(self.cluster.client());
        let about = watcher::Config::default().fields(&format!("involvedObject.name={name},reason={reason}"));
        let found = async {
            let mut events = pin!(watcher(api, about).applied_objects());
            while let Some(event) = events.try_next().await? {
                let message = event.message.as_deref().unwrap_or_default();
                let by_us = event
                    .reporting_component
                    .as_deref()
                    .is_some_and(|by| by.ends_with(&self.driver_name()) || by == "default-scheduler");
                if by_us && message.contains(text) {
                    return Ok(event);
                }
            }
            bail!("the watch of events ended")
        };
        match timeout(PATIENCE, found).await {
            Ok(found) => found,
            Err(_) => bail!(
                "no event {reason} on {name} with {text:?}, but {:#?}",
                self.events(name).await?
            ),
        }
    }

    async fn explain(&self) {
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

fn request(entry: &Entry) -> String {
    let slash = if entry.subresource.is_empty() { "" } else { "/" };
    format!(
        "{} {}{slash}{} {}",
        entry.verb, entry.resource, entry.subresource, entry.code
    )
}

fn merge(into: &mut Value, from: Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, from) => *into = from,
    }
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

async fn versions<K>(history: &Mutex<Vec<K>>, api: Api<K>, name: &str) -> anyhow::Result<Vec<K>>
where
    K: kube::Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let last = api.get_opt(name).await?;
    let seen = async {
        loop {
            let versions: Vec<K> = {
                let all = history.lock().expect("no panic with it");
                all.iter()
                    .filter(|object| object.meta().name.as_deref() == Some(name))
                    .cloned()
                    .collect()
            };
            let version = |object: &K| object.meta().resource_version.clone();
            if last
                .as_ref()
                .is_none_or(|last| versions.iter().any(|seen| version(seen) == version(last)))
            {
                return versions;
            }
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, seen).await.context("every version is seen")
}
