//! Helpers for pods: create, wait, exec.

use std::fmt::Write as _;

use anyhow::{Context, bail};
use k8s_openapi::api::core::v1::{Event, Pod};
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use kube::runtime::conditions::{is_deleted, is_pod_running};
use kube::runtime::wait::{Condition, await_condition};
use serde_json::json;
use tokio::time::timeout;

use super::{Cluster, IMAGE, TIMEOUT};

/// A pod with one container `main` that waits until it is deleted.
pub fn pod(name: &str) -> Pod {
    let manifest = json!({
        "metadata": {"name": name},
        "spec": {
            "containers": [{"name": "main", "image": IMAGE, "imagePullPolicy": "Never"}],
            "dnsPolicy": "Default",
            "terminationGracePeriodSeconds": 5,
        },
    });
    serde_json::from_value(manifest).expect("a constant manifest")
}

impl Cluster {
    /// Creates a pod (in the namespace `default` unless the manifest names another) and waits until it runs.
    pub async fn run_pod(&self, pod: &Pod) -> anyhow::Result<Pod> {
        let api = self.pods(pod.metadata.namespace.as_deref());
        let created = api
            .create(&PostParams::default(), pod)
            .await
            .context("creating a pod")?;
        self.wait_for_pod(&created, is_pod_running(), "run")
            .await?
            .context("the pod is gone")
    }

    /// Deletes a pod and waits until it is gone.
    pub async fn delete_pod(&self, pod: &Pod) -> anyhow::Result<()> {
        let (name, uid) = names(pod)?;
        self.pods(pod.metadata.namespace.as_deref())
            .delete(name, &DeleteParams::default())
            .await?;
        self.wait_for_pod(pod, is_deleted(uid), "go").await.map(drop)
    }

    /// Waits until a pod meets a condition. The error contains the pod's state and events.
    pub async fn wait_for_pod(
        &self,
        pod: &Pod,
        condition: impl Condition<Pod>,
        verb: &str,
    ) -> anyhow::Result<Option<Pod>> {
        let (name, _) = names(pod)?;
        let namespace = pod.metadata.namespace.as_deref();
        match timeout(TIMEOUT, await_condition(self.pods(namespace), name, condition)).await {
            Ok(found) => found.with_context(|| format!("waiting for pod {name} to {verb}")),
            Err(_) => bail!(
                "pod {name} does not {verb}: {}",
                self.explain(namespace, name).await
            ),
        }
    }

    /// Runs a command in the pod's first container and returns its output.
    pub async fn exec(&self, pod: &Pod, command: &[&str]) -> anyhow::Result<String> {
        let (name, _) = names(pod)?;
        let namespace = pod.metadata.namespace.as_deref().unwrap_or("default");
        self.kubectl(&[&["exec", "--namespace", namespace, name, "--"], command].concat())
            .await
    }

    fn pods(&self, namespace: Option<&str>) -> Api<Pod> {
        Api::namespaced(self.client(), namespace.unwrap_or("default"))
    }

    async fn explain(&self, namespace: Option<&str>, name: &str) -> String {
        let mut text = match self.pods(namespace).get_opt(name).await {
            Ok(Some(pod)) => serde_json::to_string(&pod.status).unwrap_or_default(),
            Ok(None) => "it does not exist".to_owned(),
            Err(error) => error.to_string(),
        };
        let events = Api::<Event>::namespaced(self.client(), namespace.unwrap_or("default"));
        let about = ListParams::default().fields(&format!("involvedObject.name={name}"));
        for event in events
            .list(&about)
            .await
            .map(|list| list.items)
            .unwrap_or_default()
        {
            let (reason, message) = (
                event.reason.unwrap_or_default(),
                event.message.unwrap_or_default(),
            );
            // Writing to a string does not fail.
            let _ = write!(text, "\n{reason}: {message}");
        }
        text
    }
}

fn names(pod: &Pod) -> anyhow::Result<(&str, &str)> {
    let name = pod.metadata.name.as_deref().context("the pod has no name")?;
    Ok((name, pod.metadata.uid.as_deref().unwrap_or_default()))
}
