//! A node, as a test sees it.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use tokio::process::Command;

use super::Cluster;
use super::supervisor::{Answer, NodeDescription, Request};

/// A real kubelet with containerd and CDI. It has a mount namespace of its own, in which `/var/lib/kubelet`,
/// `/run/cdi`, `/var/log` and `/dev` are its own too, and namespaces for its network and its processes.
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

    /// The node's first process, and the machine's end of its link: for tests of the harness itself.
    pub fn init(&self) -> (u32, &'a str) {
        (self.description().init, &self.description().link)
    }

    /// The machine, as the node and its pods reach it.
    pub fn gateway(&self) -> &'a str {
        &self.description().gateway
    }

    /// A command that runs in the node's mount namespace, as a node companion does: it sees the node's `/dev`, kubelet's
    /// sockets and the CDI directory. Its network and its processes are the machine's, so [`Cluster::kubeconfig`] and
    /// [`Cluster::user`] work, and a signal to the child reaches the program itself (nsenter replaces itself by it).
    /// It is killed when dropped, and with the cluster at the latest. The working directory is the root.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = self.cluster.command("nsenter");
        command
            .arg(format!("--mount=/proc/{}/ns/mnt", self.description().init))
            .arg("--")
            .arg(program);
        command
    }

    /// What kubelet (`kubelet.yaml`) and containerd (`containerd.toml`) of the node are started with; the same path inside and outside.
    pub fn configuration(&self, name: &str) -> PathBuf {
        let directory = &self.cluster.description.directory;
        directory.join(self.name()).join(name)
    }

    /// Where a file of the node is found from outside. For `/var/run` say `/run`: a symbolic link with an absolute
    /// target would lead back out of the node.
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

    /// The names of the entries of a directory of the node, sorted.
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

    /// Makes a character device in the node's own `/dev`. 1:3 is null, 1:5 zero, 1:7 full, 1:8 random, 1:9 urandom.
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

    /// Unplugs a device, or removes any file of the node.
    pub fn remove(&self, path: impl AsRef<Path>) -> anyhow::Result<()> {
        let path = path.as_ref();
        fs::remove_file(self.path(path))
            .with_context(|| format!("removing {} of {}", path.display(), self.name()))
    }

    /// Ends the kubelet and starts it again; returns when the API server has heard from the new one that it is ready.
    pub async fn restart_kubelet(&self) -> anyhow::Result<()> {
        self.stop("kubelet", 15).await?;
        self.start("kubelet").await
    }

    /// Ends `kubelet`, `containerd` or `proxy` by a signal (SIGTERM: 15, SIGKILL: 9) and waits for its end. Containers
    /// keep running.
    pub async fn stop(&self, process: &str, signal: i32) -> anyhow::Result<()> {
        self.ask("stop", process, Some(signal)).await.map(drop)
    }

    /// Starts what was stopped. A kubelet is waited for until the API server has heard from it that it is ready.
    pub async fn start(&self, process: &str) -> anyhow::Result<()> {
        self.ask("start", process, None).await.map(drop)
    }

    /// Runs `ctr` on the node's containerd, in the namespace of kubelet's containers, and returns what it printed.
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
