//! A real cluster for releases, with the image on every node.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Output;

use anyhow::{Context as _, bail};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, ListParams};
use serde_json::Value;
use tokio::time::{Duration, Instant, sleep};

use crate::chart::helm::chart;
use crate::chart::image;
use crate::harness::{self, Builder, Cluster, TIMEOUT};

/// Minor numbers of memory devices that are always readable: zero, random, urandom.
const MINORS: [u32; 3] = [5, 8, 9];

/// A cluster and Helm.
#[allow(missing_debug_implementations, reason = "a kube::Client has none")]
pub(crate) struct ChartSetup {
    pub(crate) cluster: Cluster,
    home: PathBuf,
}

/// Identity of one run of a pod's container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) uid: String,
    pub(crate) container: String,
    pub(crate) restarts: i32,
}

impl ChartSetup {
    /// Starts a cluster with service accounts, the image on its nodes and three devices `/dev/drayman-test-*` on each.
    pub(crate) async fn start(nodes: usize) -> anyhow::Result<Self> {
        Self::start_with(Cluster::builder(), nodes).await
    }

    /// Starts a cluster from a customized builder.
    pub(crate) async fn start_with(builder: Builder, nodes: usize) -> anyhow::Result<Self> {
        let archive = tokio::task::spawn_blocking(image::archive).await?;
        let cluster = builder.nodes(nodes).service_accounts().start().await?;
        let archive = archive.to_str().context("the path is UTF-8")?;
        for number in 0..nodes {
            let node = cluster.node(number);
            node.ctr(&["images", "import", archive]).await?;
            for (index, minor) in MINORS.iter().enumerate() {
                node.make_device(format!("/dev/drayman-test-{index}"), 1, *minor)?;
            }
        }
        Self::prepare(cluster).await
    }

    /// Wraps a cluster as it is.
    pub(crate) async fn prepare(cluster: Cluster) -> anyhow::Result<Self> {
        tokio::task::spawn_blocking(harness::helm).await??;
        let home = cluster.directory().join("helm");
        let setup = Self { cluster, home };
        setup.namespace("drayman", "privileged").await?;
        Ok(setup)
    }

    /// Creates a namespace that enforces this Pod Security Standard.
    pub(crate) async fn namespace(&self, name: &str, standard: &str) -> anyhow::Result<()> {
        self.kubectl(&["create", "namespace", name]).await?;
        let label = format!("pod-security.kubernetes.io/enforce={standard}");
        self.kubectl(&["label", "namespace", name, &label])
            .await
            .map(drop)
    }

    pub(crate) async fn kubectl(&self, arguments: &[&str]) -> anyhow::Result<String> {
        self.cluster.kubectl(arguments).await
    }

    /// Runs Helm as administrator and returns its output.
    pub(crate) async fn helm(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let mut command = self.cluster.command(harness::helm()?);
        for variable in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
            command.env(variable, &self.home);
        }
        let output = command
            .arg("--kubeconfig")
            .arg(self.cluster.kubeconfig())
            .args(arguments)
            .output()
            .await
            .context("running Helm")?;
        if !output.status.success() {
            let message = String::from_utf8_lossy(&output.stderr);
            let all = self.kubectl(&["get", "pods,events", "--all-namespaces"]).await;
            bail!(
                "helm {}: {}\n{}",
                arguments.join(" "),
                message.trim(),
                all.unwrap_or_default()
            );
        }
        String::from_utf8(output.stdout).context("the output of Helm")
    }

    /// Installs the release `drayman` with a value file, of the chart unless the path is absolute, without waiting.
    pub(crate) async fn install(&self, values: Option<&str>, more: &[&str]) -> anyhow::Result<String> {
        self.release("install", "drayman", values, more).await
    }

    /// As [`ChartSetup::install`], with another verb and name of the release.
    pub(crate) async fn release(
        &self,
        verb: &str,
        release: &str,
        values: Option<&str>,
        more: &[&str],
    ) -> anyhow::Result<String> {
        let (directory, values) = (chart(""), values.map(chart));
        let directory = directory.to_str().context("UTF-8")?;
        let mut arguments = vec![verb, release, directory, "--namespace=drayman"];
        if let Some(values) = &values {
            arguments.extend(["--values", values.to_str().context("UTF-8")?]);
        }
        arguments.extend(more);
        self.helm(&arguments).await
    }

    /// Runs `drayman` as administrator.
    pub(crate) async fn ask(&self, words: &[&str]) -> anyhow::Result<Output> {
        let mut command = self.cluster.command(env!("CARGO_BIN_EXE_drayman"));
        let kubeconfig = self.cluster.kubeconfig();
        command.args(words).arg("--kubeconfig").arg(kubeconfig);
        command.output().await.context("running drayman")
    }

    /// Output of `drayman doctor`, which must find no problem.
    pub(crate) async fn doctor(&self) -> anyhow::Result<String> {
        let output = self.ask(&["doctor"]).await?;
        let message = String::from_utf8(output.stdout)?;
        anyhow::ensure!(output.status.success(), "{message}");
        Ok(message)
    }

    /// Installs or upgrades the release `drayman` in the namespace `drayman`, and waits until it is ready.
    pub(crate) async fn deploy(&self, verb: &str, values: &Path, more: &[&str]) -> anyhow::Result<()> {
        let values = values.to_str().context("UTF-8")?;
        self.release(verb, "drayman", Some(values), more).await?;
        self.rolled_out("drayman", "drayman").await
    }

    /// Waits for the rollout of a release's controller and companions.
    pub(crate) async fn rolled_out(&self, namespace: &str, fullname: &str) -> anyhow::Result<()> {
        let timeout = format!("--timeout={}s", TIMEOUT.as_secs());
        for object in [
            format!("deployment/{fullname}-controller"),
            format!("daemonset/{fullname}-node"),
        ] {
            let arguments = ["rollout", "status", &object, "--namespace", namespace, &timeout];
            if let Err(error) = self.kubectl(&arguments).await {
                let pods = self
                    .kubectl(&["describe", "pods", "--namespace", namespace])
                    .await;
                bail!("{error}\n{}", pods.unwrap_or_default());
            }
        }
        Ok(())
    }

    /// Waits until the inventory of a node is ready.
    pub(crate) async fn ready(&self, inventory: &str) -> anyhow::Result<()> {
        let timeout = format!("--timeout={}s", TIMEOUT.as_secs());
        let name = format!("nodeinventory/{inventory}");
        self.until(&format!("{name} exists"), async || {
            Ok(self.kubectl(&["get", &name]).await.is_ok())
        })
        .await?;
        self.kubectl(&["wait", "--for=condition=Ready", &name, &timeout])
            .await
            .map(drop)
    }

    /// Applies a manifest.
    pub(crate) async fn apply(&self, manifest: &Value) -> anyhow::Result<()> {
        let name = manifest["metadata"]["name"].as_str().unwrap_or("object");
        let file = self.cluster.directory().join(format!("{name}.json"));
        std::fs::write(&file, manifest.to_string())?;
        let file = file.to_str().context("UTF-8")?;
        self.kubectl(&["apply", "--server-side", "--filename", file])
            .await
            .map(drop)
    }

    /// Waits until a pod of the namespace `default` runs.
    pub(crate) async fn running(&self, name: &str) -> anyhow::Result<()> {
        let timeout = format!("--timeout={}s", TIMEOUT.as_secs());
        let pod = format!("pod/{name}");
        let waited = self
            .kubectl(&["wait", "--for=condition=Ready", &pod, &timeout])
            .await;
        if let Err(error) = waited {
            let all = self.kubectl(&["describe", "pods,resourceclaims"]).await;
            bail!("{error}\n{}", all.unwrap_or_default());
        }
        Ok(())
    }

    /// The devices of a running pod, which must be readable: paths by variable.
    pub(crate) async fn devices(&self, pod: &str) -> anyhow::Result<BTreeMap<String, String>> {
        let environment = self.kubectl(&["exec", pod, "--", "env"]).await?;
        let devices: BTreeMap<String, String> = environment
            .lines()
            .filter_map(|line| line.split_once('='))
            .filter(|(name, _)| name.starts_with("DRAYMAN_DEVICE_"))
            .map(|(name, path)| (name.to_owned(), path.to_owned()))
            .collect();
        for path in devices.values() {
            let read = format!("head -c 4 {path} | wc -c");
            let count = self.kubectl(&["exec", pod, "--", "sh", "-c", &read]).await?;
            anyhow::ensure!(count.trim() == "4", "{pod} reads {count} bytes of {path}");
        }
        Ok(devices)
    }

    /// The run of the only pod with these labels.
    pub(crate) async fn run_of(&self, namespace: &str, labels: &str) -> anyhow::Result<Run> {
        let pods = Api::<Pod>::namespaced(self.cluster.client(), namespace)
            .list(&ListParams::default().labels(labels))
            .await?
            .items;
        let mut living = pods
            .iter()
            .filter(|pod| pod.metadata.deletion_timestamp.is_none());
        let pod = living
            .next()
            .with_context(|| format!("no pod {labels} in {namespace}"))?;
        anyhow::ensure!(living.next().is_none(), "several pods {labels} in {namespace}");
        run(pod)
    }

    /// The run of a pod of the namespace `default`.
    pub(crate) async fn run_of_pod(&self, name: &str) -> anyhow::Result<Run> {
        run(&Api::<Pod>::namespaced(self.cluster.client(), "default")
            .get(name)
            .await?)
    }

    /// A field of an object by jsonpath.
    pub(crate) async fn field(&self, object: &[&str], path: &str) -> anyhow::Result<String> {
        let output = format!("--output=jsonpath={{{path}}}");
        self.kubectl(&[&["get"], object, &[output.as_str()]].concat())
            .await
    }

    /// Waits until no claim is left in any namespace.
    pub(crate) async fn until_no_claims(&self) -> anyhow::Result<()> {
        self.until("the claims are gone", async || {
            let claims = ["get", "resourceclaims", "--all-namespaces", "--output=name"];
            Ok(self.kubectl(&claims).await?.is_empty())
        })
        .await
    }

    /// Polls until a condition holds that need not be about one object.
    pub(crate) async fn until(
        &self,
        what: &str,
        holds: impl AsyncFn() -> anyhow::Result<bool>,
    ) -> anyhow::Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        while !holds().await? {
            if Instant::now() > deadline {
                let pods = self
                    .kubectl(&["get", "pods,resourceclaims", "--all-namespaces"])
                    .await;
                bail!("not seen: {what}\n{}", pods.unwrap_or_default());
            }
            sleep(Duration::from_millis(200)).await;
        }
        Ok(())
    }
}

fn run(pod: &Pod) -> anyhow::Result<Run> {
    let status = pod.status.as_ref().context("the pod has a status")?;
    let container = status
        .container_statuses
        .iter()
        .flatten()
        .next()
        .context("the pod has a container")?;
    Ok(Run {
        uid: pod.metadata.uid.clone().unwrap_or_default(),
        container: container.container_id.clone().unwrap_or_default(),
        restarts: container.restart_count,
    })
}
