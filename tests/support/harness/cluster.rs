//! A cluster: started by its builder, removed when dropped.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, bail};
use k8s_openapi::api::core::v1::Namespace;
use kube::api::{Api, ListParams};
use kube::config::{Config, KubeConfigOptions, Kubeconfig};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::process::Command;

use super::supervisor::{Answer, Description, Request, Supervisor};
use super::{Audit, Node, STRUCTURED_VERSION, VERSION, not_run, program};

/// Number of lines of each log that a failed test prints.
const LINES_OF_LOG: usize = 20;

/// Environment variable that marks processes which belong to a cluster, for the supervisor.
const MARKER: &str = "DRAYMAN_TEST_CLUSTER";

/// Environment variable with another version for the whole run.
const CHOSEN_VERSION: &str = "DRAYMAN_TEST_KUBERNETES";

/// The first minor version that serves `resource.k8s.io/v1` by default.
const FIRST_STRUCTURED_MINOR: u32 = 34;

/// Options of a cluster. The default is a control plane without nodes, which requires no root.
#[derive(Debug)]
#[must_use]
pub struct Builder {
    version: String,
    nodes: usize,
    service_accounts: bool,
    audit_bodies: bool,
    flags: Vec<String>,
    user: Option<u32>,
}

impl Builder {
    /// The Kubernetes version, 1.27 to 1.37 with a patch number.
    pub fn version(mut self, version: &str) -> Self {
        version.clone_into(&mut self.version);
        self
    }

    /// The minor version: 27 to 37.
    pub fn minor(&self) -> u32 {
        minor_of(&self.version)
    }

    /// Number of nodes; more than 0 requires root.
    pub fn nodes(mut self, nodes: usize) -> Self {
        self.nodes = nodes;
        self
    }

    /// Enables ServiceAccount admission: pods get tokens, and wait for their namespace's account.
    pub fn service_accounts(mut self) -> Self {
        self.service_accounts = true;
        self
    }

    /// Records the bodies of requests for claims, pods and our own resources in the audit log.
    pub fn audit_bodies(mut self) -> Self {
        self.audit_bodies = true;
        self
    }

    /// Adds a flag to a component (`etcd`, `apiserver`, `controller-manager`, `scheduler`, `kubelet`, `proxy`).
    pub fn flag(mut self, component: &str, flag: &str) -> Self {
        self.flags.push(format!("{component}={flag}"));
        self
    }

    /// Runs the cluster as another user, for tests of the harness itself.
    pub fn run_as(mut self, user: u32) -> Self {
        self.user = Some(user);
        self
    }

    /// Starts the cluster and waits until its API server and nodes are ready.
    pub async fn start(self) -> anyhow::Result<Cluster> {
        let (supervisor, description) = Supervisor::start(self.command().await?)
            .await
            .context("starting a test cluster")?;
        let mut cluster = Cluster::connect(description).await?;
        cluster.supervisor = Some(supervisor);
        Ok(cluster)
    }

    /// The supervisor's command line.
    pub(super) async fn command(&self) -> anyhow::Result<std::process::Command> {
        if self.nodes > 0 && !rustix::process::geteuid().is_root() {
            bail!(
                "a test node needs root (namespaces, mounts, containers): run this test as root; \
                 tests of the control plane alone run without"
            );
        }
        let program = tokio::task::spawn_blocking(program::build).await??;
        let mut command = std::process::Command::new(program);
        command.args([
            "up",
            "--requests",
            "--version",
            &self.version,
            "--nodes",
            &self.nodes.to_string(),
        ]);
        command.arg("--target").arg(program::target());
        if self.service_accounts {
            command.arg("--service-accounts");
        }
        if self.audit_bodies {
            command.arg("--audit-bodies");
        }
        for flag in &self.flags {
            command.args(["--flag", flag]);
        }
        if let Some(user) = self.user {
            command.uid(user).gid(user);
        }
        Ok(command)
    }
}

/// A running cluster. Dropping it stops it and waits until nothing is left. The ends of all logs are printed first, unless
/// [`Cluster::stop`] was called.
#[allow(missing_debug_implementations, reason = "a kube::Client has none")]
pub struct Cluster {
    pub(super) client: kube::Client,
    pub(super) description: Description,
    /// `None` if the cluster is shared with other processes.
    supervisor: Option<Supervisor>,
    succeeded: bool,
}

impl Cluster {
    /// A builder for [`VERSION`] or the version in the environment variable `DRAYMAN_TEST_KUBERNETES`.
    pub fn builder() -> Builder {
        Self::of_version(std::env::var(CHOSEN_VERSION).unwrap_or_else(|_| VERSION.to_owned()))
    }

    /// A builder for structured mode: [`STRUCTURED_VERSION`], or the version in the environment variable if that has structured mode.
    pub fn structured() -> Builder {
        let chosen = std::env::var(CHOSEN_VERSION)
            .ok()
            .filter(|version| minor_of(version) >= FIRST_STRUCTURED_MINOR);
        Self::of_version(chosen.unwrap_or_else(|| STRUCTURED_VERSION.to_owned()))
    }

    fn of_version(version: String) -> Builder {
        Builder {
            version,
            nodes: 0,
            service_accounts: false,
            audit_bodies: false,
            flags: Vec::new(),
            user: None,
        }
    }

    pub(super) async fn connect(description: Description) -> anyhow::Result<Self> {
        Ok(Self {
            client: client(&description.kubeconfig).await?,
            description,
            supervisor: None,
            succeeded: false,
        })
    }

    /// Whether other processes use the cluster too. Then no part of it may be stopped.
    pub(super) fn is_shared(&self) -> bool {
        self.supervisor.is_none()
    }

    pub(super) async fn ask(&self, request: Request) -> anyhow::Result<Answer> {
        let supervisor = self.supervisor.as_ref();
        supervisor
            .context("a shared cluster takes no requests")?
            .ask(request)
            .await
    }

    /// A client with administrator rights.
    pub fn client(&self) -> kube::Client {
        self.client.clone()
    }

    /// A client for a kubeconfig, such as one of [`Cluster::user`].
    pub async fn client_of(&self, kubeconfig: &Path) -> anyhow::Result<kube::Client> {
        client(kubeconfig).await
    }

    /// The administrator's kubeconfig, with this machine's loopback address.
    pub fn kubeconfig(&self) -> &Path {
        &self.description.kubeconfig
    }

    /// The cluster's directory, which tests can use for files. It is removed with the cluster.
    pub fn directory(&self) -> &Path {
        &self.description.directory
    }

    /// The URL of the API server.
    pub fn server(&self) -> &str {
        &self.description.server
    }

    /// The minor version of Kubernetes: 27 to 37.
    pub fn minor(&self) -> u32 {
        minor_of(&self.description.version)
    }

    /// Whether this version serves `resource.k8s.io/v1`.
    pub fn has_structured_mode(&self) -> bool {
        self.minor() >= FIRST_STRUCTURED_MINOR
    }

    /// Whether Kubernetes is too old for a test. If so, skips the test with this reason.
    pub fn is_before(&self, minor: u32, reason: &str) -> bool {
        let is_before = self.minor() < minor;
        if is_before {
            not_run::skipped(&format!("on Kubernetes {}", self.description.version), reason);
        }
        is_before
    }

    /// A node by index.
    ///
    /// # Panics
    /// If the cluster has fewer nodes.
    pub fn node(&self, number: usize) -> Node<'_> {
        assert!(
            number < self.description.nodes.len(),
            "the cluster has no node {number}"
        );
        Node::new(self, number)
    }

    /// The API server's audit log.
    pub fn audit(&self) -> Audit<'_> {
        Audit::new(self)
    }

    /// A command on this machine. The process is killed when dropped, at the latest with the cluster.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command
            .env(MARKER, &self.description.directory)
            .stdin(Stdio::null())
            .kill_on_drop(true);
        command
    }

    /// Path of kubectl.
    pub fn kubectl_program(&self) -> &Path {
        &self.description.kubectl
    }

    /// Runs kubectl as administrator and returns its output.
    pub async fn kubectl(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let mut command = self.command(&self.description.kubectl);
        // Otherwise kubectl would keep its discovery cache in the home directory.
        command
            .arg("--kubeconfig")
            .arg(&self.description.kubeconfig)
            .arg("--cache-dir");
        command
            .arg(self.description.directory.join("kubectl-cache"))
            .args(arguments);
        let output = command.output().await.context("running kubectl")?;
        if !output.status.success() {
            bail!(
                "kubectl {}: {}",
                arguments.join(" "),
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        String::from_utf8(output.stdout).context("the output of kubectl")
    }

    /// Stops a component of the control plane by a signal (SIGTERM: 15, SIGKILL: 9) and waits for its end.
    pub async fn stop_component(&self, component: &str, signal: i32) -> anyhow::Result<()> {
        let request = Request {
            r#do: "stop",
            process: Some(component.into()),
            signal: Some(signal),
            ..Request::default()
        };
        self.ask(request).await.map(drop)
    }

    /// Starts a stopped component and waits until the API server is ready.
    pub async fn start_component(&self, component: &str) -> anyhow::Result<()> {
        let request = Request {
            r#do: "start",
            process: Some(component.into()),
            ..Request::default()
        };
        self.ask(request).await.map(drop)
    }

    /// Replaces the control plane, except etcd, with another version. Kubelet and proxy have that version after their next start.
    pub async fn upgrade_control_plane(&mut self, version: &str) -> anyhow::Result<()> {
        let request = Request {
            r#do: "upgrade",
            version: Some(version.into()),
            ..Request::default()
        };
        self.ask(request).await?;
        let components = ["scheduler", "controller-manager", "apiserver"];
        for component in components {
            self.stop_component(component, 15).await?;
        }
        version.clone_into(&mut self.description.version);
        for component in components.into_iter().rev() {
            self.start_component(component).await?;
        }
        Ok(())
    }

    /// The process id of a control plane component.
    pub async fn component_pid(&self, component: &str) -> anyhow::Result<u32> {
        let request = Request {
            r#do: "pid",
            process: Some(component.into()),
            ..Request::default()
        };
        let pid = self.ask(request).await?.pid;
        anyhow::ensure!(pid != 0, "{component} does not run");
        Ok(pid)
    }

    /// Compacts etcd, as the API server does every few minutes.
    pub async fn compact(&self) -> anyhow::Result<()> {
        let namespaces = Api::<Namespace>::all(self.client());
        let list = namespaces.list(&ListParams::default()).await?;
        let revision = list.metadata.resource_version;
        let body = json!({ "revision": revision, "physical": true }).to_string();
        // The ports of a cluster are consecutive (`tests/cluster/supervisor/slot.go`).
        let server: http::Uri = self.server().parse()?;
        let etcd = ("127.0.0.1", server.port_u16().context("a port")? + 1);
        let mut connection = TcpStream::connect(etcd).await?;
        let request = format!(
            "POST /v3/kv/compaction HTTP/1.1\r\nhost: etcd\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        connection.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        connection.read_to_string(&mut answer).await?;
        // Another test of a shared cluster may have compacted a later revision in between.
        let compacted = answer.contains("required revision has been compacted");
        anyhow::ensure!(compacted || answer.starts_with("HTTP/1.1 200"), "{answer}");
        Ok(())
    }

    /// The log of a component: `apiserver`, `scheduler`, …, `node-0-kubelet`, `node-0-containerd`, ….
    pub fn log(&self, component: &str) -> anyhow::Result<String> {
        let path = self
            .description
            .logs
            .get(component)
            .with_context(|| format!("{component} has no log"))?;
        let bytes = fs::read(path).with_context(|| format!("reading {}", path.display()))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The supervisor's process id, for tests of the harness itself.
    pub fn supervisor_pid(&self) -> u32 {
        self.supervisor.as_ref().map_or(0, Supervisor::pid)
    }

    /// Stops the cluster; the last line of a successful test.
    pub async fn stop(mut self) -> anyhow::Result<()> {
        self.succeeded = true;
        Ok(tokio::task::spawn_blocking(move || drop(self)).await?)
    }

    fn print_logs(&self) {
        for component in self.description.logs.keys() {
            let Ok(log) = self.log(component) else { continue };
            let lines: Vec<_> = log.lines().collect();
            let last = &lines[lines.len().saturating_sub(LINES_OF_LOG)..];
            if !last.is_empty() {
                eprintln!("--- the last lines of {component}:\n{}", last.join("\n"));
            }
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // A test that fails by `?` does not panic. The test runner hides this output for passed tests.
        if !self.succeeded {
            self.print_logs();
        }
    }
}

fn minor_of(version: &str) -> u32 {
    let mut parts = version.split('.');
    parts.nth(1).and_then(|minor| minor.parse().ok()).unwrap_or(0)
}

async fn client(kubeconfig: &Path) -> anyhow::Result<kube::Client> {
    // Fails if another cluster of this process has done it.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let file =
        Kubeconfig::read_from(kubeconfig).with_context(|| format!("reading {}", kubeconfig.display()))?;
    let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?;
    Ok(kube::Client::try_from(config)?)
}
