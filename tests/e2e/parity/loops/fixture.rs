//! The two clusters whose loops are compared, and the actions of the driver.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Context as _;
use drayman::testcluster::clock_and_rng::ClockAndRng;
use drayman::testcluster::cluster::TestCluster;
use http::Request;
use serde_json::{Value, json};
use tokio::sync::OnceCell;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::states::{States, label, marker_namespace, ordered, shown, watch};
use crate::harness::Cluster;
use crate::parity::server::{JSON, MERGE, run};

const DRIVER: &str = "loops.example.com";
const RESOURCE: &str = "/apis/resource.k8s.io/v1alpha2";
/// Timeout of all waits.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(120);
/// Nodes and their label values, by which pods select them; the first value has only one node.
const NODES: [(&str, &str); 3] = [("loop-a", "one"), ("loop-b", "two"), ("loop-c", "two")];
const WATCHED: [&str; 3] = ["resourceclaims", "podschedulingcontexts", "pods"];

/// A real control plane with all controllers, separate from the one of the request tests.
static CLUSTER: OnceCell<Cluster> = OnceCell::const_new();

async fn real() -> kube::Client {
    let cluster = CLUSTER
        .get_or_try_init(|| {
            // Nodes that exist only in the API have no heartbeats.
            Cluster::builder()
                .flag("controller-manager", "--node-monitor-grace-period=24h")
                .share("loops", async |cluster| make_nodes(&cluster.client()).await)
        })
        .await
        .expect("a real control plane");
    cluster.client()
}

pub(crate) async fn send(
    client: &kube::Client,
    method: &str,
    path: &str,
    content_type: &str,
    body: &Value,
) -> anyhow::Result<Value> {
    let body = if body.is_null() {
        Vec::new()
    } else {
        body.to_string().into_bytes()
    };
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("content-type", content_type)
        .body(body)?;
    client
        .request(request)
        .await
        .with_context(|| format!("{method} {path}"))
}

async fn make_nodes(client: &kube::Client) -> anyhow::Result<()> {
    for (name, place) in NODES {
        make_node(client, name, place).await?;
    }
    Ok(())
}

/// Creates a node that exists only in the API, and waits until pods can be bound to it.
pub(crate) async fn make_node(client: &kube::Client, name: &str, place: &str) -> anyhow::Result<()> {
    let node = json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": { "name": name, "labels": { "place": place, "kubernetes.io/hostname": name } },
    });
    send(client, "POST", "/api/v1/nodes", JSON, &node).await?;
    let amounts = json!({ "cpu": "2", "memory": "4Gi", "pods": "110" });
    let now = jiff::Timestamp::now().to_string();
    let ready = json!({
        "type": "Ready", "status": "True", "reason": "R", "message": "m", "lastHeartbeatTime": now, "lastTransitionTime": now,
    });
    let status = json!({ "status": { "capacity": amounts, "allocatable": amounts, "conditions": [ready] } });
    let path = format!("/api/v1/nodes/{name}");
    send(client, "PATCH", &format!("{path}/status"), MERGE, &status).await?;
    // The real server's taint stays until a controller sees that the node is ready.
    loop {
        let node = send(client, "GET", &path, JSON, &Value::Null).await?;
        if !node["spec"]["taints"].is_array() {
            return Ok(());
        }
        sleep(Duration::from_millis(100)).await;
    }
}

/// A control plane, and the observed states of a namespace's objects.
pub(crate) struct Fixture {
    pub(crate) client: kube::Client,
    pub(crate) namespace: String,
    states: Arc<Mutex<States>>,
    watching: JoinSet<()>,
}

/// Runs a scenario on both clusters and compares the sequences of states.
pub(crate) fn both(namespace: &str, scenario: impl AsyncFn(&Fixture) -> anyhow::Result<()>) {
    run(async {
        let stage = TestCluster::start(ClockAndRng::system());
        let client = stage.server().client();
        make_nodes(&client).await.expect("nodes");
        let actual = ordered(run_scenario(client, namespace, &scenario).await);
        stage.stop().await;
        let expected = ordered(run_scenario(real().await, namespace, &scenario).await);
        assert!(
            actual == expected,
            "on the test cluster:\n{}\nin a real cluster:\n{}",
            shown(&actual),
            shown(&expected)
        );
    });
}

async fn run_scenario(
    client: kube::Client,
    namespace: &str,
    scenario: &impl AsyncFn(&Fixture) -> anyhow::Result<()>,
) -> States {
    let mut fixture = Fixture::new(client, namespace).await.expect("a namespace");
    let ended = scenario(&fixture).await;
    let observed = fixture.end_watches().await;
    let states = fixture.states.lock().expect("no panic").clone();
    if ended.is_err() {
        println!("{}", shown(&states));
    }
    ended.expect("the scenario succeeds");
    observed.expect("all states are observed");
    states
}

impl Fixture {
    async fn new(client: kube::Client, namespace: &str) -> anyhow::Result<Self> {
        let class = json!({
            "apiVersion": "resource.k8s.io/v1alpha2", "kind": "ResourceClass", "metadata": { "name": namespace }, "driverName": DRIVER,
        });
        let classes = format!("{RESOURCE}/resourceclasses");
        send(&client, "POST", &classes, JSON, &class).await?;
        let space = json!({ "metadata": { "name": namespace } });
        let space = send(&client, "POST", "/api/v1/namespaces", JSON, &space).await?;
        let version = space["metadata"]["resourceVersion"].as_str().unwrap_or_default();
        let states: Arc<Mutex<States>> = Arc::default();
        let mut watching = JoinSet::new();
        for plural in WATCHED {
            // Of all namespaces, because the marker cannot be in a deleted one.
            let path = format!("{}/{plural}?watch=true&resourceVersion={version}", group(plural));
            let (client, namespace, states) = (client.clone(), namespace.to_owned(), states.clone());
            watching.spawn(async move {
                watch(&client, &path, plural, &namespace, &states)
                    .await
                    .expect("a watch until the marker");
            });
        }
        let fixture = Self {
            client,
            namespace: namespace.to_owned(),
            states,
            watching,
        };
        let template = json!({
            "metadata": { "name": "template" }, "spec": { "spec": { "resourceClassName": namespace } },
        });
        fixture.create("resourceclaimtemplates", &template).await?;
        Ok(fixture)
    }

    /// Waits until all states stored so far were observed: each watch ends at a marker, an object created now.
    async fn end_watches(&mut self) -> anyhow::Result<()> {
        let namespace = marker_namespace(&self.namespace);
        let space = json!({ "metadata": { "name": namespace } });
        send(&self.client, "POST", "/api/v1/namespaces", JSON, &space).await?;
        for plural in WATCHED {
            let spec = match plural {
                "pods" => {
                    json!({ "schedulerName": "none", "containers": [{ "name": "main", "image": "none" }] })
                }
                "resourceclaims" => json!({ "resourceClassName": self.namespace }),
                _ => json!({}),
            };
            let marker = json!({ "metadata": { "name": "marker" }, "spec": spec });
            self.create_in(&namespace, plural, &marker).await?;
        }
        let ended = async {
            while let Some(watch) = self.watching.join_next().await {
                watch?;
            }
            anyhow::Ok(())
        };
        timeout(Duration::from_secs(30), ended)
            .await
            .context("timeout: the watches do not show the marker")?
    }

    pub(crate) async fn create(&self, plural: &str, object: &Value) -> anyhow::Result<Value> {
        self.create_in(&self.namespace, plural, object).await
    }

    async fn create_in(&self, namespace: &str, plural: &str, object: &Value) -> anyhow::Result<Value> {
        let mut object = object.clone();
        let (version, kind) = match plural {
            "pods" => ("v1", "Pod"),
            "resourceclaims" => ("resource.k8s.io/v1alpha2", "ResourceClaim"),
            "podschedulingcontexts" => ("resource.k8s.io/v1alpha2", "PodSchedulingContext"),
            _ => ("resource.k8s.io/v1alpha2", "ResourceClaimTemplate"),
        };
        object["apiVersion"] = version.into();
        object["kind"] = kind.into();
        send(&self.client, "POST", &path(plural, namespace, ""), JSON, &object).await
    }

    pub(crate) async fn list(&self, plural: &str) -> anyhow::Result<Vec<Value>> {
        let path = path(plural, &self.namespace, "");
        let list = send(&self.client, "GET", &path, JSON, &Value::Null).await?;
        Ok(list["items"].as_array().cloned().unwrap_or_default())
    }

    pub(crate) async fn patch(&self, plural: &str, name: &str, patch: &Value) -> anyhow::Result<()> {
        let path = path(plural, &self.namespace, name);
        send(&self.client, "PATCH", &path, MERGE, patch).await.map(drop)
    }

    /// Creates a pod with these entries: a claim from the template, or an existing claim.
    pub(crate) async fn pod(&self, place: &str, entries: &[(&str, Option<&str>)]) -> anyhow::Result<()> {
        let claims: Vec<Value> = entries
            .iter()
            .map(|(entry, claim)| {
                let source = claim.map_or_else(
                    || json!({ "resourceClaimTemplateName": "template" }),
                    |claim| json!({ "resourceClaimName": claim }),
                );
                json!({ "name": entry, "source": source })
            })
            .collect();
        let pod = json!({
            "metadata": { "name": "pod" },
            "spec": {
                "nodeSelector": { "place": place },
                "containers": [{ "name": "main", "image": "none" }],
                "resourceClaims": claims,
            },
        });
        self.create("pods", &pod).await.map(drop)
    }

    pub(crate) async fn delete(&self, plural: &str, name: &str) -> anyhow::Result<()> {
        let path = path(plural, &self.namespace, name);
        let options = json!({ "gracePeriodSeconds": 0 });
        send(&self.client, "DELETE", &path, JSON, &options)
            .await
            .map(drop)
    }

    /// Waits until the only object of a kind, or that of an entry, meets a condition.
    pub(crate) async fn until(
        &self,
        what: &str,
        plural: &str,
        holds: impl Fn(&[Value]) -> bool,
    ) -> anyhow::Result<Vec<Value>> {
        let waiting = async {
            loop {
                let found = self.list(plural).await?;
                if holds(&found) {
                    return anyhow::Ok(found);
                }
                sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(TIMEOUT, waiting)
            .await
            .with_context(|| format!("timeout: {what}"))?
    }

    pub(crate) async fn until_selected(&self, node: &str) -> anyhow::Result<()> {
        let selects = |context: &Value| context["spec"]["selectedNode"] == node;
        let is_selected = |found: &[Value]| found.iter().any(selects);
        let what = format!("{node} is selected");
        self.until(&what, "podschedulingcontexts", is_selected)
            .await
            .map(drop)
    }

    pub(crate) async fn until_offered(&self, nodes: &[&str]) -> anyhow::Result<()> {
        let is_offered = |found: &[Value]| {
            let context = found.first();
            context.is_some_and(|context| context["spec"]["potentialNodes"] == json!(nodes))
        };
        let what = format!("{nodes:?} are offered");
        self.until(&what, "podschedulingcontexts", is_offered)
            .await
            .map(drop)
    }

    pub(crate) async fn until_bound(&self) -> anyhow::Result<()> {
        let is_bound = |found: &[Value]| found.iter().any(|pod| pod["spec"]["nodeName"].is_string());
        self.until("the pod is bound", "pods", is_bound).await?;
        self.until_none("podschedulingcontexts").await
    }

    pub(crate) async fn until_none(&self, plural: &str) -> anyhow::Result<()> {
        let what = format!("no {plural} are left");
        self.until(&what, plural, <[Value]>::is_empty).await.map(drop)
    }

    /// The claim name of an entry.
    async fn claim(&self, entry: &str) -> anyhow::Result<String> {
        let is_there = |found: &[Value]| found.iter().any(|claim| label(claim) == entry);
        let claims = self.until("the claim exists", "resourceclaims", is_there).await?;
        let claim = claims.iter().find(|claim| label(claim) == entry);
        let name = claim.and_then(|claim| claim["metadata"]["name"].as_str());
        name.map(str::to_owned).context("a name")
    }

    /// Acts as a driver's controller: allocates the claim on this node.
    pub(crate) async fn allocate(&self, entry: &str, node: &str) -> anyhow::Result<()> {
        let claim = self.claim(entry).await?;
        let finalizers = json!({ "metadata": { "finalizers": [format!("{DRIVER}/protection")] } });
        self.patch("resourceclaims", &claim, &finalizers).await?;
        let field = json!({ "key": "metadata.name", "operator": "In", "values": [node] });
        let allocation = json!({
            "availableOnNodes": { "nodeSelectorTerms": [{ "matchFields": [field] }] },
            "resourceHandles": [{ "driverName": DRIVER, "data": "" }],
        });
        let status = json!({ "status": { "driverName": DRIVER, "allocation": allocation } });
        self.patch("resourceclaims", &format!("{claim}/status"), &status)
            .await
    }

    /// Acts as a driver's controller: removes the allocation.
    pub(crate) async fn clear(&self, entry: &str) -> anyhow::Result<()> {
        let claim = self.claim(entry).await?;
        let status =
            json!({ "status": { "driverName": null, "allocation": null, "deallocationRequested": null } });
        self.patch("resourceclaims", &format!("{claim}/status"), &status)
            .await
    }

    /// Acts as a driver's controller: removes the finalizer.
    pub(crate) async fn remove_finalizer(&self, entry: &str) -> anyhow::Result<()> {
        let claim = self.claim(entry).await?;
        let finalizers = json!({ "metadata": { "finalizers": null } });
        self.patch("resourceclaims", &claim, &finalizers).await
    }

    /// Removes the allocation, then the finalizer.
    pub(crate) async fn deallocate(&self, entry: &str) -> anyhow::Result<()> {
        self.clear(entry).await?;
        self.remove_finalizer(entry).await
    }

    /// Acts as the drivers: sets the unsuitable nodes by entry.
    pub(crate) async fn set_unsuitable(&self, entries: &[(&str, &[&str])]) -> anyhow::Result<()> {
        let entries: Vec<Value> = entries
            .iter()
            .map(|(entry, nodes)| json!({ "name": entry, "unsuitableNodes": nodes }))
            .collect();
        let status = json!({ "status": { "resourceClaims": entries } });
        self.patch("podschedulingcontexts", "pod/status", &status).await
    }

    /// Waits until so many claims are being deleted, and no pod has reserved them: a driver deallocates them only then.
    pub(crate) async fn until_deleting(&self, count: usize) -> anyhow::Result<()> {
        let all = |found: &[Value]| {
            let going = |claim: &&Value| {
                let reserved = claim["status"]["reservedFor"].as_array();
                claim["metadata"]["deletionTimestamp"].is_string() && reserved.is_none_or(Vec::is_empty)
            };
            found.iter().filter(going).count() == count
        };
        self.until("claims are being deleted", "resourceclaims", all)
            .await
            .map(drop)
    }
}

fn group(plural: &str) -> &'static str {
    if plural == "pods" { "/api/v1" } else { RESOURCE }
}

fn path(plural: &str, namespace: &str, name: &str) -> String {
    let name = if name.is_empty() {
        String::new()
    } else {
        format!("/{name}")
    };
    format!("{}/namespaces/{namespace}/{plural}{name}", group(plural))
}
