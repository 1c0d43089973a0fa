//! The companion as a separate process that can be killed and stopped, with disks of the test's choice.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::fixture::Node;

/// Timeout of all waits.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Another build of the program, for the benchmarks.
pub(crate) static PROGRAM: OnceLock<PathBuf> = OnceLock::new();

/// A running `drayman node` in its own mount namespace, where `/dev` is the node's.
pub(crate) struct Process {
    child: Child,
    log: PathBuf,
}

/// A mount namespace that outlives its companions, for the disks of a node.
pub(crate) struct Mounts(Child);

impl Mounts {
    /// Creates a namespace with the mounts of shell commands; `$NODE` is the node's directory.
    pub(crate) fn new(node: &Node, commands: &str) -> Self {
        let script = format!("set -e; {commands}\ntouch $NODE/mounted && exec sleep infinity");
        let child = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "--", "sh", "-c", &script])
            .env("NODE", node.path(""))
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let mut mounts = Self(child);
        let start = Instant::now();
        while !node.path("mounted").exists() {
            assert!(
                start.elapsed() < TIMEOUT && mounts.0.try_wait().unwrap().is_none(),
                "{commands}"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        mounts
    }

    /// The path of the namespace's file from outside.
    pub(crate) fn sees(&self, path: &Path) -> PathBuf {
        let root = PathBuf::from(format!("/proc/{}/root", self.0.id()));
        root.join(path.strip_prefix("/").unwrap())
    }

    /// Runs a shell command in the namespace.
    pub(crate) fn shell(&self, node: &Node, command: &str) {
        let status = Command::new("nsenter")
            .arg(format!("--mount=/proc/{}/ns/mnt", self.0.id()))
            .args(["--", "sh", "-c", command])
            .env("NODE", node.path(""))
            .status()
            .unwrap();
        assert!(status.success(), "{command}: {status}");
    }
}

impl Drop for Mounts {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Options to start a process.
pub(crate) struct Start {
    /// An existing namespace to start in.
    within: Option<u32>,
    /// Shell commands that set up the mounts. `$NODE` is the node's directory.
    mounts: String,
    arguments: Vec<String>,
    namespaces: &'static [&'static str],
}

impl Start {
    pub(crate) fn new() -> Self {
        Self {
            within: None,
            mounts: "mount --bind $NODE/dev /dev".into(),
            arguments: Vec::new(),
            namespaces: &[],
        }
    }

    /// Simulates a system whose inotify instances are used up. The limit is per user namespace, so this creates one.
    pub(crate) fn without_inotify(mut self) -> Self {
        self.namespaces = &["--user", "--map-root-user"];
        self.mount("echo 0 > /proc/sys/user/max_inotify_instances")
    }

    /// Starts in an existing mount namespace.
    pub(crate) fn within(mut self, mounts: &Mounts) -> Self {
        self.within = Some(mounts.0.id());
        self
    }

    /// Adds a mount.
    pub(crate) fn mount(mut self, command: &str) -> Self {
        self.mounts = format!("{command} && {}", self.mounts);
        self
    }

    /// Simulates another boot id.
    pub(crate) fn boot(self, node: &Node, id: &str) -> Self {
        std::fs::write(node.path("boot_id"), format!("{id}\n")).unwrap();
        self.mount("mount --bind $NODE/boot_id /proc/sys/kernel/random/boot_id")
    }

    pub(crate) fn argument(mut self, argument: &str) -> Self {
        self.arguments.push(argument.into());
        self
    }

    /// Starts the process.
    pub(crate) async fn run(self, node: &Node) -> Process {
        let url = node.url().await;
        let kubeconfig = node.path("kubeconfig");
        let text = format!(
            "apiVersion: v1\nkind: Config\nclusters: [{{name: c, cluster: {{server: \"{url}\"}}}}]\n\
             users: [{{name: u, user: {{}}}}]\ncontexts: [{{name: c, context: {{cluster: c, user: u}}}}]\ncurrent-context: c\n"
        );
        std::fs::write(&kubeconfig, text).unwrap();
        let log = (0..1000)
            .map(|number| node.path(format!("log-{number}")))
            .find(|log| !log.exists())
            .unwrap();
        let file = std::fs::File::create_new(&log).unwrap();
        let script = format!("set -e; {} && exec \"$@\"", self.mounts);
        let mut command = Command::new("nsenter");
        let outer = self.within.map_or_else(|| "self".to_owned(), |id| id.to_string());
        command
            .arg(format!("--mount=/proc/{outer}/ns/mnt"))
            .args(["--", "unshare"])
            .args(self.namespaces);
        command.args([
            "--mount",
            "--propagation",
            "private",
            "--",
            "sh",
            "-c",
            &script,
            "sh",
        ]);
        command
            .arg(
                PROGRAM
                    .get()
                    .map_or_else(|| Path::new(env!("CARGO_BIN_EXE_drayman")), PathBuf::as_path),
            )
            .args(["node", "--node-name", "node-a", "--v=4", "--kubeconfig"])
            .arg(&kubeconfig)
            .arg("--config")
            .arg(node.path("node.yaml"))
            .args(node.directories())
            .args(&self.arguments)
            .env("NODE", node.path(""))
            // As in the image.
            .env("MALLOC_ARENA_MAX", "1")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(file);
        let child = command.spawn().unwrap();
        Process { child, log }
    }
}

impl Process {
    pub(crate) async fn start(node: &Node) -> Self {
        Start::new().run(node).await
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let id = i32::try_from(self.child.id()).unwrap();
        kill_process(Pid::from_raw(id).unwrap(), signal).unwrap();
    }

    /// The process id.
    #[allow(dead_code, reason = "for the benchmarks")]
    pub(crate) fn id(&self) -> String {
        self.child.id().to_string()
    }

    /// Sends SIGKILL.
    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Sends SIGTERM and waits for the exit.
    pub(crate) async fn stop(mut self) -> ExitStatus {
        self.signal(Signal::TERM);
        self.ended().await
    }

    pub(crate) async fn ended(&mut self) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(start.elapsed() < TIMEOUT, "it does not end:\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Waits until the log contains a text.
    pub(crate) async fn logged(&self, text: &str) {
        let start = Instant::now();
        while !self.log().contains(text) {
            assert!(
                start.elapsed() < TIMEOUT,
                "{text:?} is not logged:\n{}",
                self.log()
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- the log of the companion:\n{}", self.log());
        }
    }
}

/// Runs a `drayman node` subcommand. Returns success and output.
pub(crate) fn node_command(node: &Node, arguments: &[&str]) -> (bool, String) {
    let directories = node.directories();
    // The root and CDI directories are common options; the others belong to the companion.
    let output = Command::new(env!("CARGO_BIN_EXE_drayman"))
        .arg("node")
        .args(arguments)
        .args(
            directories
                .iter()
                .filter(|argument| !argument.starts_with("--device-plugin-dir")),
        )
        .output()
        .unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(text).unwrap())
}
