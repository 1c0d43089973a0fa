//! Runs the program, in the foreground or background, with its inputs.

use std::io::{BufRead as _, BufReader};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Maximum duration of every wait, also on a loaded machine.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(20);

pub(crate) fn drayman() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_drayman"));
    command.env_clear().stdin(Stdio::null());
    command
}

pub(crate) fn run(arguments: &[&str]) -> Output {
    drayman().args(arguments).output().expect("the program starts")
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

/// Asserts that the program refuses to start: exit code 2, nothing on stdout, and each of `parts` on stderr.
pub(crate) fn assert_refused(command: &mut Command, parts: &[&str]) {
    let output = command.output().expect("the program starts");
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(2), "{command:?}: {stderr}");
    assert_eq!(stdout, "", "{command:?}");
    assert!(stderr.starts_with("error: "), "{command:?}: {stderr}");
    for part in parts {
        assert!(
            stderr.contains(part),
            "{command:?} does not print {part:?}: {stderr}"
        );
    }
}

/// Writes a kubeconfig for the API server `server`.
pub(crate) fn kubeconfig(directory: &Path, server: &str) -> String {
    let content = format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: here\n\
         contexts: [{{name: here, context: {{cluster: here, user: me}}}}]\n\
         clusters: [{{name: here, cluster: {{server: '{server}'}}}}]\n\
         users: [{{name: me, user: {{token: secret}}}}]\n"
    );
    let file = directory.join("kubeconfig");
    std::fs::write(&file, content).expect("written");
    file.to_str().expect("UTF-8").to_owned()
}

/// A program in the background whose stderr lines can be awaited. Killed on drop.
pub(crate) struct RunningProgram {
    pub(crate) child: Child,
    lines: mpsc::Receiver<String>,
    pub(crate) seen: Vec<String>,
}

impl RunningProgram {
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let stderr = child.stderr.take().expect("piped");
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Self {
            child,
            lines,
            seen: Vec::new(),
        }
    }

    /// Waits for a line that contains `part`.
    pub(crate) fn line(&mut self, part: &str) -> String {
        loop {
            match self.lines.recv_timeout(TIMEOUT) {
                Ok(line) => {
                    self.seen.push(line.clone());
                    if line.contains(part) {
                        return line;
                    }
                }
                Err(error) => panic!("no line with {part:?} ({error}) among {:#?}", self.seen),
            }
        }
    }

    /// Like [`Self::line`] with a timeout; `None` if it expires.
    pub(crate) fn line_within(&mut self, part: &str, timeout: Duration) -> Option<String> {
        let deadline = Instant::now() + timeout;
        while let Ok(line) = self
            .lines
            .recv_timeout(deadline.saturating_duration_since(Instant::now()))
        {
            self.seen.push(line.clone());
            if line.contains(part) {
                return Some(line);
            }
        }
        None
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let pid = i32::try_from(self.child.id())
            .ok()
            .and_then(rustix::process::Pid::from_raw)
            .expect("a pid");
        rustix::process::kill_process(pid, signal).expect("sent");
    }

    /// Waits until no signal is pending.
    pub(crate) fn await_delivery(&self) {
        let pending = || {
            let status =
                std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("it runs");
            status
                .lines()
                .filter(|line| line.starts_with("SigPnd") || line.starts_with("ShdPnd"))
                .any(|line| {
                    line.split_whitespace()
                        .nth(1)
                        .is_some_and(|mask| mask.bytes().any(|digit| digit != b'0'))
                })
        };
        let deadline = Instant::now() + TIMEOUT;
        while pending() {
            assert!(Instant::now() < deadline, "the signal stays pending");
            std::thread::yield_now();
        }
    }

    /// Sends a signal repeatedly until the program ends. Returns the exit code.
    pub(crate) fn end_by(&mut self, signal: rustix::process::Signal) -> Option<i32> {
        let deadline = Instant::now() + TIMEOUT;
        while Instant::now() < deadline && self.child.try_wait().expect("our child").is_none() {
            self.signal(signal);
            std::thread::sleep(Duration::from_millis(100));
        }
        self.end()
    }

    /// Waits for the program to end. Returns the exit code.
    pub(crate) fn end(&mut self) -> Option<i32> {
        let deadline = Instant::now() + TIMEOUT;
        while Instant::now() < deadline {
            if let Some(status) = self.child.try_wait().expect("our child") {
                return status.code();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("still running; output: {:#?}", self.seen);
    }
}

impl Drop for RunningProgram {
    fn drop(&mut self) {
        // Errors mean that the program has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An API server that accepts connections and never answers.
pub(crate) fn silent_server() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    (listener, url)
}

/// The arguments of a companion that uses only `/dev` of this machine.
pub(crate) fn companion(directory: &Path, server: &str, kinds: &str) -> Vec<String> {
    let path = |name: &str| directory.join(name).to_str().expect("UTF-8").to_owned();
    let config = path("node.yaml");
    let text = format!("apiVersion: drayman.dev/v1alpha1\nkind: NodeConfiguration\nkinds:{kinds}\n");
    std::fs::write(&config, text).expect("written");
    for name in ["kubelet", "kubelet/device-plugins", "cdi"] {
        std::fs::create_dir_all(directory.join(name)).expect("made");
    }
    let flags = [
        ("--node-name", "n1".to_owned()),
        ("--config", config),
        ("--kubeconfig", kubeconfig(directory, server)),
        ("--kubelet-root-dir", path("kubelet")),
        ("--device-plugin-dir", path("kubelet/device-plugins")),
        ("--cdi-root", path("cdi")),
    ];
    let flags = flags
        .into_iter()
        .flat_map(|(flag, value)| [flag.to_owned(), value]);
    ["node".to_owned()].into_iter().chain(flags).collect()
}
