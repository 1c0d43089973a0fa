//! The two grounds on which a promise is tried, and the words in which both are asked.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use drayman::sim::api::ApiServer;
use drayman::sim::source::Source;
use futures::{AsyncBufReadExt as _, TryStreamExt as _};
use http::{Method, Request};
use kube::client::Body;
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio::sync::OnceCell;

use crate::answers::same_form;
use crate::harness::Cluster;

pub(crate) const CLAIMS: &str = "/apis/resource.k8s.io/v1alpha2/namespaces/{ns}/resourceclaims";
pub(crate) const CONTEXTS: &str = "/apis/resource.k8s.io/v1alpha2/namespaces/{ns}/podschedulingcontexts";
pub(crate) const PODS: &str = "/api/v1/namespaces/{ns}/pods";

pub(crate) const JSON: &str = "application/json";
pub(crate) const MERGE: &str = "application/merge-patch+json";
pub(crate) const STRATEGIC: &str = "application/strategic-merge-patch+json";
pub(crate) const JSON_PATCH: &str = "application/json-patch+json";
pub(crate) const APPLY: &str = "application/apply-patch+yaml";

static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| Runtime::new().expect("a runtime"));
/// Ends with this process.
static CLUSTER: OnceCell<Cluster> = OnceCell::const_new();

/// An API server, and what was said.
pub(crate) struct Ground {
    client: kube::Client,
    namespace: String,
    transcript: Vec<Value>,
}

/// Holds a conversation with both and compares what they said.
pub(crate) fn both(namespace: &str, conversation: impl AsyncFn(&mut Ground) -> anyhow::Result<()>) {
    RUNTIME.block_on(async {
        let stage = ApiServer::new(Arc::new(Source::system()));
        let played = converse(stage.client(), namespace, &conversation).await;
        let cluster = CLUSTER
            .get_or_try_init(|| {
                // The claim controller changes claims by itself. On the stage it is a program of its own, too.
                Cluster::builder()
                    .flag("controller-manager", "--controllers=*,-resourceclaim-controller")
                    .start()
            })
            .await
            .expect("a real control plane");
        let real = converse(cluster.client(), namespace, &conversation).await;
        for (number, (played, real)) in played.iter().zip(&real).enumerate() {
            assert_eq!(
                format!("{played:#}"),
                format!("{real:#}"),
                "answer {number}: the stage (left) is not as the real server (right)"
            );
        }
        assert_eq!(played.len(), real.len());
    });
}

async fn converse(
    client: kube::Client,
    namespace: &str,
    conversation: &impl AsyncFn(&mut Ground) -> anyhow::Result<()>,
) -> Vec<Value> {
    let mut ground = Ground {
        client,
        namespace: namespace.to_owned(),
        transcript: Vec::new(),
    };
    let made = ground
        .ask(
            "POST",
            "/api/v1/namespaces",
            JSON,
            &json!({ "metadata": { "name": namespace } }),
        )
        .await
        .expect("an answer");
    assert_eq!(made.0, 201, "{}", made.1);
    conversation(&mut ground)
        .await
        .expect("the conversation goes to its end");
    same_form(ground.transcript)
}

impl Ground {
    /// Asks, and has the answer compared. `{ns}` in the path is the promise's namespace.
    pub(crate) async fn ask(
        &mut self,
        method: &str,
        path: &str,
        content_type: &str,
        body: &Value,
    ) -> anyhow::Result<(u16, Value)> {
        let body = if body.is_null() {
            Vec::new()
        } else {
            body.to_string().into_bytes()
        };
        let (code, answer) = self.send(method, path, content_type, body).await?;
        self.transcript
            .push(json!({ "asked": format!("{method} {path}"), "code": code, "answer": answer }));
        Ok((code, answer))
    }

    /// Asks with any bytes, and has nothing compared.
    pub(crate) async fn send(
        &self,
        method: &str,
        path: &str,
        content_type: &str,
        body: Vec<u8>,
    ) -> anyhow::Result<(u16, Value)> {
        let request = Request::builder()
            .method(Method::from_bytes(method.as_bytes())?)
            .uri(path.replace("{ns}", &self.namespace))
            .header("content-type", content_type)
            .header("user-agent", "promises/1")
            .body(Body::from(body))?;
        let response = self.client.send(request).await?;
        let code = response.status().as_u16();
        let bytes = response.into_body().collect_bytes().await?;
        let answer = serde_json::from_slice(&bytes)
            .unwrap_or_else(|_| Value::String(String::from_utf8_lossy(&bytes).trim().to_owned()));
        Ok((code, answer))
    }

    /// Has something compared that was seen otherwise.
    pub(crate) fn note(&mut self, what: Value) {
        self.transcript.push(what);
    }

    pub(crate) async fn get(&mut self, path: &str) -> anyhow::Result<Value> {
        Ok(self.ask("GET", path, JSON, &Value::Null).await?.1)
    }

    pub(crate) async fn create(&mut self, path: &str, object: &Value) -> anyhow::Result<Value> {
        Ok(self.ask("POST", path, JSON, object).await?.1)
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

    /// The first events of a watch, compared.
    pub(crate) async fn watch(&mut self, path: &str, count: usize) -> anyhow::Result<Vec<Value>> {
        let request = Request::get(path.replace("{ns}", &self.namespace)).body(Vec::new())?;
        let mut lines = self.client.request_stream(request).await?.lines();
        let mut events = Vec::new();
        while events.len() < count {
            let line = tokio::time::timeout(Duration::from_secs(20), lines.try_next()).await??;
            let Some(line) = line else { break };
            events.push(serde_json::from_str(&line)?);
        }
        self.transcript
            .push(json!({ "watched": path.split('?').next(), "events": events }));
        Ok(events)
    }
}

/// The version of an object.
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
