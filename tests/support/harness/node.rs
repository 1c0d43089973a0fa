//! A node of a test cluster.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use tokio::process::Command;

use super::Cluster;
use super::supervisor::{Answer, NodeDescription, Request};

/// A real kubelet with containerd and CDI. It has its own network, PID and mount namespaces, the latter with its own `/var/lib/kubelet`,
/// `/run/cdi`, `/var/log` and `/dev`.
#[derive(Clone, Copy)]
#[allow(missing_debug_implementations, reason = "a kube::Client has none")]
pub struct Node<'a> {
    cluster: &'a Cluster,
    number: usize,
}

impl<'a> Node<'a> {
    pub(super) fn new(cluster: &'a Cluster, number: usize) -> Self {
        Self { cluster, number }
    }

    fn description(&self) -> &'a NodeDescription {
        &self.cluster.description.nodes[self.number]
    }

    /// The name of the Node object.
    pub fn name(&self) -> &'a str {
        &self.description().name
    }

    /// The pid of the node's first process, and the host side of its network link: for tests of the harness itself.
    pub fn init(&self) -> (u32, &'a str) {
        (self.description().init, &self.description().link)
    }

    /// The machine's address for the node and its pods.
    pub fn gateway(&self) -> &'a str {
        &self.description().gateway
    }

    /// A command in the node's mount namespace, as for a companion: it sees the node's `/dev`, kubelet's sockets and the CDI directory. It
    /// uses the machine's network and processes, so [`Cluster::kubeconfig`] and [`Cluster::user`] work, and a signal to the child reaches
    /// the program itself (nsenter replaces itself by it). The process is killed when dropped, at the latest with the cluster. The working
    /// directory is the root.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = self.cluster.command("nsenter");
        command
            .arg(format!("--mount=/proc/{}/ns/mnt", self.description().init))
            .arg("--")
            .arg(program);
        command
    }

    /// Path of a configuration file of kubelet (`kubelet.yaml`) or containerd (`containerd.toml`), the same inside and outside of the node.
    pub fn configuration(&self, name: &str) -> PathBuf {
        let directory = &self.cluster.description.directory;
        directory.join(self.name()).join(name)
    }

    /// The path of a node's file outside of the node. Use `/run` instead of `/var/run`: a symbolic link with an absolute target would leave
    /// the node.
    pub fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        let inside = match path.strip_prefix("/var/run") {
            Ok(rest) => Path::new("run").join(rest),
            Err(_) => path.strip_prefix("/").unwrap_or(path).to_owned(),
        };
        Path::new("/proc")
            .join(self.description().init.to_string())
            .join("root")
            .join(inside)
    }

    /// Reads a file of the node.
    pub fn read(&self, path: impl AsRef<Path>) -> anyhow::Result<String> {
        let path = path.as_ref();
        fs::read_to_string(self.path(path))
            .with_context(|| format!("reading {} of {}", path.display(), self.name()))
    }

    /// The names in a directory of the node, sorted.
    pub fn list(&self, path: impl AsRef<Path>) -> anyhow::Result<Vec<String>> {
        let path = path.as_ref();
        let entries = fs::read_dir(self.path(path))
            .with_context(|| format!("listing {} of {}", path.display(), self.name()))?;
        let mut names = entries
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
            .collect::<anyhow::Result<Vec<_>>>()?;
        names.sort();
        Ok(names)
    }

    /// Creates a character device in the node's `/dev`. 1:3 is null, 1:5 zero, 1:7 full, 1:8 random, 1:9 urandom.
    pub fn make_device(&self, path: impl AsRef<Path>, major: u32, minor: u32) -> anyhow::Result<()> {
        let path = path.as_ref();
        mknodat(
            CWD,
            self.path(path),
            FileType::CharacterDevice,
            Mode::from_raw_mode(0o666),
            makedev(major, minor),
        )
        .with_context(|| format!("making the device {} on {}", path.display(), self.name()))
    }

    /// Removes a device node or any file of the node.
    pub fn remove(&self, path: impl AsRef<Path>) -> anyhow::Result<()> {
        let path = path.as_ref();
        fs::remove_file(self.path(path))
            .with_context(|| format!("removing {} of {}", path.display(), self.name()))
    }

    /// Restarts kubelet and waits until the new one has reported the node as ready.
    pub async fn restart_kubelet(&self) -> anyhow::Result<()> {
        self.stop("kubelet", 15).await?;
        self.start("kubelet").await
    }

    /// Stops `kubelet`, `containerd` or `proxy` by a signal (SIGTERM: 15, SIGKILL: 9) and waits for its end. Containers keep running.
    pub async fn stop(&self, process: &str, signal: i32) -> anyhow::Result<()> {
        self.ask("stop", process, Some(signal)).await.map(drop)
    }

    /// Starts a stopped process. For kubelet, waits until it has reported the node as ready.
    pub async fn start(&self, process: &str) -> anyhow::Result<()> {
        self.ask("start", process, None).await.map(drop)
    }

    /// Runs `ctr` on the node's containerd, in the namespace of kubelet's containers, and returns its output.
    pub async fn ctr(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let output = self
            .command(&self.description().ctr)
            .args(["-n", "k8s.io"])
            .args(arguments)
            .output()
            .await?;
        anyhow::ensure!(
            output.status.success(),
            "ctr: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    async fn ask(&self, r#do: &'static str, process: &str, signal: Option<i32>) -> anyhow::Result<Answer> {
        let (process, node) = (Some(process.to_owned()), Some(self.number));
        self.cluster
            .ask(Request {
                r#do,
                node,
                process,
                signal,
                ..Request::default()
            })
            .await
    }
}
