//! The test cluster and the real control plane under comparison, and the requests sent to both.

use std::collections::BTreeSet;
use std::fs::File;
use std::future::Future;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use drayman::testcluster::api::{ApiServer, ClusterMode};
use drayman::testcluster::clock_and_rng::ClockAndRng;
use futures::{AsyncBufReadExt as _, TryStreamExt as _};
use http::{Method, Request};
use kube::client::Body;
use kube::config::{Config, KubeConfigOptions, Kubeconfig};
use rustix::fs::FlockOperation;
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio::sync::OnceCell;

use crate::harness::{Cluster, lock};
use crate::parity::answers::same_form;

pub(crate) const CLAIMS: &str = "/apis/resource.k8s.io/v1alpha2/namespaces/{ns}/resourceclaims";
pub(crate) const CONTEXTS: &str = "/apis/resource.k8s.io/v1alpha2/namespaces/{ns}/podschedulingcontexts";
pub(crate) const STRUCTURED_CLAIMS: &str = "/apis/resource.k8s.io/v1/namespaces/{ns}/resourceclaims";
pub(crate) const PODS: &str = "/api/v1/namespaces/{ns}/pods";
pub(crate) const MAPS: &str = "/api/v1/namespaces/{ns}/configmaps";
pub(crate) const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/{ns}/leases";

pub(crate) const JSON: &str = "application/json";
pub(crate) const MERGE: &str = "application/merge-patch+json";
pub(crate) const STRATEGIC: &str = "application/strategic-merge-patch+json";
pub(crate) const JSON_PATCH: &str = "application/json-patch+json";
pub(crate) const APPLY: &str = "application/apply-patch+yaml";

static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| Runtime::new().expect("a runtime"));
static CLASSIC: OnceCell<Cluster> = OnceCell::const_new();
static STRUCTURED: OnceCell<Cluster> = OnceCell::const_new();

/// Maximum number of watches per connection; the real server allows 250 concurrent requests on one.
const STREAMS: usize = 100;

/// One of the two API servers, with a transcript of requests and answers.
pub(crate) struct Server {
    client: kube::Client,
    namespace: String,
    transcript: Vec<Value>,
    /// The test cluster's API server; `None` for the real one.
    embedded: Option<ApiServer>,
    mode: ClusterMode,
}

/// The real control plane of a mode, shared by all tests.
pub(crate) async fn real(mode: ClusterMode) -> &'static Cluster {
    let (cluster, name, builder) = match mode {
        ClusterMode::Classic => (&CLASSIC, "parity", Cluster::builder()),
        ClusterMode::Structured => (&STRUCTURED, "parity-structured", Cluster::structured()),
    };
    cluster
        .get_or_try_init(|| {
            // The real claim controller would change claims. In the test cluster, it is a separate component.
            builder
                .flag("controller-manager", "--controllers=*,-resourceclaim-controller")
                // Nodes that exist only in the API have no heartbeats.
                .flag("controller-manager", "--node-monitor-grace-period=24h")
                .share(name, async |_| Ok(()))
        })
        .await
        .expect("a real control plane")
}

/// Locks the history of the real server: shared by tests that need an older version, exclusive to compact it.
async fn history(mode: ClusterMode, operation: FlockOperation) -> anyhow::Result<File> {
    lock(&real(mode).await.directory().join("history.lock"), operation).await
}

/// A client with its own connection and without retries: a 504 is an expected answer.
async fn client(mode: ClusterMode) -> kube::Client {
    let cluster = real(mode).await;
    let client = async {
        let file = Kubeconfig::read_from(cluster.kubeconfig())?;
        let mut config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?;
        config.default_retry = false;
        anyhow::Ok(kube::Client::try_from(config)?)
    };
    client.await.expect("a client")
}

/// Runs a future in the runtime of the real control plane.
pub(crate) fn run<T>(work: impl Future<Output = T>) -> T {
    RUNTIME.block_on(work)
}

/// Sends the same requests to both servers and compares the answers, including managed fields.
pub(crate) fn both(namespace: &str, conversation: impl AsyncFn(&mut Server) -> anyhow::Result<()>) {
    run_both(ClusterMode::Classic, namespace, true, conversation);
}

/// As [`both`], in structured mode.
pub(crate) fn both_structured(
    namespace: &str,
    conversation: impl AsyncFn(&mut Server) -> anyhow::Result<()>,
) {
    run_both(ClusterMode::Structured, namespace, true, conversation);
}

/// As [`both_structured`], without managed fields.
pub(crate) fn both_structured_but_managers(
    namespace: &str,
    conversation: impl AsyncFn(&mut Server) -> anyhow::Result<()>,
) {
    run_both(ClusterMode::Structured, namespace, false, conversation);
}

/// As [`both`], without managed fields.
pub(crate) fn both_but_managers(
    namespace: &str,
    conversation: impl AsyncFn(&mut Server) -> anyhow::Result<()>,
) {
    run_both(ClusterMode::Classic, namespace, false, conversation);
}

fn run_both(
    mode: ClusterMode,
    namespace: &str,
    managed: bool,
    conversation: impl AsyncFn(&mut Server) -> anyhow::Result<()>,
) {
    RUNTIME.block_on(async {
        let server = ApiServer::with_mode(Arc::new(ClockAndRng::system()), mode);
        let actual = run_one(
            server.client(),
            Some(server),
            mode,
            namespace,
            managed,
            &conversation,
        )
        .await;
        let expected = run_one(client(mode).await, None, mode, namespace, managed, &conversation).await;
        compare(&actual, &expected);
    });
}

/// Panics with every answer of the test cluster that differs from the real server's.
pub(crate) fn compare(actual: &[Value], expected: &[Value]) {
    let pairs = actual.iter().zip(expected).enumerate();
    let differing = pairs.filter(|(_, (actual, expected))| actual != expected);
    let shown: Vec<String> = differing
        .map(|(number, (actual, expected))| {
            format!("answer {number} of the test cluster:\n{actual:#}\nof the real server:\n{expected:#}")
        })
        .collect();
    assert!(shown.is_empty(), "{}", shown.join("\n"));
    assert_eq!(actual.len(), expected.len());
}

async fn run_one(
    client: kube::Client,
    embedded: Option<ApiServer>,
    mode: ClusterMode,
    namespace: &str,
    managed: bool,
    conversation: &impl AsyncFn(&mut Server) -> anyhow::Result<()>,
) -> Vec<Value> {
    let mut server = Server {
        client,
        namespace: namespace.to_owned(),
        transcript: Vec::new(),
        embedded,
        mode,
    };
    let made = server
        .ask(
            "POST",
            "/api/v1/namespaces",
            JSON,
            &json!({ "metadata": { "name": namespace } }),
        )
        .await
        .expect("an answer");
    assert_eq!(made.0, 201, "{}", made.1);
    conversation(&mut server)
        .await
        .expect("the conversation succeeds");
    same_form(server.transcript, managed)
}

impl Server {
    /// Sends a request and adds the answer to the transcript. `{ns}` in the path stands for the test's namespace.
    pub(crate) async fn ask(
        &mut self,
        method: &str,
        path: &str,
        content_type: &str,
        body: &Value,
    ) -> anyhow::Result<(u16, Value)> {
        let (code, answer) = self.send(method, path, content_type, body).await?;
        self.transcript
            .push(json!({ "asked": format!("{method} {path}"), "code": code, "answer": answer }));
        Ok((code, answer))
    }

    /// As [`Server::ask`]; for an error, only the reasons and fields of its causes are compared.
    pub(crate) async fn ask_causes(
        &mut self,
        method: &str,
        path: &str,
        content_type: &str,
        body: &Value,
    ) -> anyhow::Result<(u16, Value)> {
        let (code, answer) = self.send(method, path, content_type, body).await?;
        let causes = answer["details"]["causes"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        let causes: BTreeSet<String> = causes
            .iter()
            .map(|cause| format!("{} {}", cause["reason"], cause["field"]))
            .collect();
        let compared = if code == 422 {
            json!(causes)
        } else {
            answer.clone()
        };
        self.transcript
            .push(json!({ "asked": format!("{method} {path} {body}"), "code": code, "answer": compared }));
        Ok((code, answer))
    }

    /// Sends a request without comparison, and without a body if it is null.
    pub(crate) async fn send(
        &self,
        method: &str,
        path: &str,
        content_type: &str,
        body: &Value,
    ) -> anyhow::Result<(u16, Value)> {
        let (code, answer, _) = self.warned(method, path, content_type, body).await?;
        Ok((code, answer))
    }

    /// As [`Server::send`], with the server's warnings.
    pub(crate) async fn warned(
        &self,
        method: &str,
        path: &str,
        content_type: &str,
        body: &Value,
    ) -> anyhow::Result<(u16, Value, Vec<String>)> {
        let text = if body.is_null() {
            String::new()
        } else {
            body.to_string()
        };
        self.request(method, path, content_type, text).await
    }

    /// Sends a request with any text as its body, without comparison.
    pub(crate) async fn send_text(
        &self,
        method: &str,
        path: &str,
        content_type: &str,
        text: &str,
    ) -> anyhow::Result<(u16, Value)> {
        let (code, answer, _) = self.request(method, path, content_type, text.to_owned()).await?;
        Ok((code, answer))
    }

    async fn request(
        &self,
        method: &str,
        path: &str,
        content_type: &str,
        body: String,
    ) -> anyhow::Result<(u16, Value, Vec<String>)> {
        let request = Request::builder()
            .method(Method::from_bytes(method.as_bytes())?)
            .uri(path.replace("{ns}", &self.namespace))
            .header("content-type", content_type)
            .header("user-agent", "promises/1")
            .body(Body::from(body.into_bytes()))?;
        let response = self.client.send(request).await?;
        let code = response.status().as_u16();
        let warnings = response.headers().get_all("warning").iter();
        let warnings = warnings
            .map(|warning| String::from_utf8_lossy(warning.as_bytes()).into_owned())
            .collect();
        let bytes = response.into_body().collect_bytes().await?;
        let answer = serde_json::from_slice(&bytes)
            .unwrap_or_else(|_| Value::String(String::from_utf8_lossy(&bytes).trim().to_owned()));
        Ok((code, answer, warnings))
    }

    pub(crate) fn is_real(&self) -> bool {
        self.embedded.is_none()
    }

    /// Adds another observation to the transcript.
    pub(crate) fn note(&mut self, what: Value) {
        self.transcript.push(what);
    }

    /// Deletes an object without comparison.
    pub(crate) async fn remove(&self, path: &str) -> anyhow::Result<(u16, Value)> {
        self.send("DELETE", path, JSON, &Value::Null).await
    }

    /// Gets an object or a list without comparison.
    pub(crate) async fn peek(&self, path: &str) -> anyhow::Result<(u16, Value)> {
        self.send("GET", path, JSON, &Value::Null).await
    }

    pub(crate) async fn get(&mut self, path: &str) -> anyhow::Result<Value> {
        Ok(self.ask("GET", path, JSON, &Value::Null).await?.1)
    }

    pub(crate) async fn create(&mut self, path: &str, object: &Value) -> anyhow::Result<Value> {
        Ok(self.ask("POST", path, JSON, object).await?.1)
    }

    pub(crate) async fn put(&mut self, path: &str, object: &Value) -> anyhow::Result<Value> {
        Ok(self.ask("PUT", path, JSON, object).await?.1)
    }

    /// Sends these patches one after the other.
    pub(crate) async fn patch_each(
        &mut self,
        path: &str,
        content_type: &str,
        patches: impl IntoIterator<Item = Value>,
    ) -> anyhow::Result<()> {
        for patch in patches {
            self.patch(path, content_type, &patch).await?;
        }
        Ok(())
    }

    pub(crate) async fn patch(
        &mut self,
        path: &str,
        content_type: &str,
        patch: &Value,
    ) -> anyhow::Result<Value> {
        Ok(self.ask("PATCH", path, content_type, patch).await?.1)
    }

    pub(crate) async fn delete(&mut self, path: &str) -> anyhow::Result<Value> {
        Ok(self.ask("DELETE", path, JSON, &Value::Null).await?.1)
    }

    /// Prevents other tests from compacting the shared server's history.
    pub(crate) async fn lock_history(&self) -> anyhow::Result<File> {
        history(self.mode, FlockOperation::LockShared).await
    }

    /// Compacts the server's history, as it does itself every few minutes.
    pub(crate) async fn compact_history(&self) -> anyhow::Result<()> {
        if let Some(server) = &self.embedded {
            server.compact();
            return Ok(());
        }
        let _alone = history(self.mode, FlockOperation::LockExclusive).await?;
        real(self.mode).await.compact().await
    }

    /// As many clients as this number of concurrent watches requires; returns one for each watch.
    pub(crate) async fn clients(&self, watches: usize) -> anyhow::Result<Vec<kube::Client>> {
        let mut clients = Vec::new();
        while clients.len() < watches {
            let client = match &self.embedded {
                Some(server) => server.client(),
                None => client(self.mode).await,
            };
            clients.extend(std::iter::repeat_n(client, STREAMS.min(watches - clients.len())));
        }
        Ok(clients)
    }

    /// The first events of a watch, compared.
    pub(crate) async fn watch(&mut self, path: &str, count: usize) -> anyhow::Result<Vec<Value>> {
        let events = self.read_events(path, count).await?;
        self.transcript
            .push(json!({ "watched": path.split('?').next(), "events": events }));
        Ok(events)
    }

    /// The first events of a watch, without comparison.
    pub(crate) async fn read_events(&self, path: &str, count: usize) -> anyhow::Result<Vec<Value>> {
        self.read_events_by(&self.client, path, count).await
    }

    /// As [`Server::read_events`], by another client.
    pub(crate) async fn read_events_by(
        &self,
        client: &kube::Client,
        path: &str,
        count: usize,
    ) -> anyhow::Result<Vec<Value>> {
        let request = Request::get(path.replace("{ns}", &self.namespace)).body(Vec::new())?;
        let mut lines = client.request_stream(request).await?.lines();
        let mut events = Vec::new();
        while events.len() < count {
            let line = tokio::time::timeout(Duration::from_secs(30), lines.try_next()).await??;
            let Some(line) = line else { break };
            events.push(serde_json::from_str(&line)?);
        }
        Ok(events)
    }
}

/// Code and reason of an answer whose message comes from a parser.
pub(crate) fn code_and_reason(answer: &(u16, Value)) -> Value {
    json!([answer.0, answer.1["reason"], answer.1["status"]])
}

/// The names in a list.
pub(crate) fn names(list: &Value) -> Vec<&Value> {
    let items = list["items"].as_array().into_iter().flatten();
    items.map(|item| &item["metadata"]["name"]).collect()
}

/// An object with these fields besides, or instead of, its own.
pub(crate) fn merged(mut object: Value, fields: &Value) -> Value {
    for (key, value) in fields.as_object().into_iter().flatten() {
        object[key] = value.clone();
    }
    object
}

/// The resource version of an object.
pub(crate) fn version(object: &Value) -> String {
    object["metadata"]["resourceVersion"]
        .as_str()
        .unwrap_or_default()
        .to_owned()
}

/// The uid of an object.
pub(crate) fn uid(object: &Value) -> String {
    object["metadata"]["uid"].as_str().unwrap_or_default().to_owned()
}
