//! The program as its users meet it: the real binary, its output and its exit codes.

#![expect(clippy::panic, reason = "a helper of a test fails the test")]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Nothing that is waited for here may take longer, on a loaded machine too.
const PATIENCE: Duration = Duration::from_secs(20);

fn drayman() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_drayman"));
    command.env_clear().stdin(Stdio::null());
    command
}

fn run(arguments: &[&str]) -> Output {
    drayman().args(arguments).output().expect("the program starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

/// Asserts that the program refuses to start: exit code 2, nothing on stdout, and each of `parts` on stderr.
fn assert_refused(command: &mut Command, parts: &[&str]) {
    let output = command.output().expect("the program starts");
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(2), "{command:?}: {stderr}");
    assert_eq!(stdout, "", "{command:?}");
    assert!(stderr.starts_with("error: "), "{command:?}: {stderr}");
    for part in parts {
        assert!(
            stderr.contains(part),
            "{command:?} does not say {part:?}: {stderr}"
        );
    }
}

/// A kubeconfig whose API server is `server`.
fn kubeconfig(directory: &Path, server: &str) -> String {
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

/// A started program, of which each line on stderr can be waited for. It is killed if the test fails.
struct Running {
    child: Child,
    lines: mpsc::Receiver<String>,
    seen: Vec<String>,
}

impl Running {
    fn start(command: &mut Command) -> Self {
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
    fn line(&mut self, part: &str) -> String {
        loop {
            match self.lines.recv_timeout(PATIENCE) {
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

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = i32::try_from(self.child.id())
            .ok()
            .and_then(rustix::process::Pid::from_raw)
            .expect("a pid");
        rustix::process::kill_process(pid, signal).expect("sent");
    }

    /// Waits until no signal is on its way to the program.
    fn await_delivery(&self) {
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
        let deadline = Instant::now() + PATIENCE;
        while pending() {
            assert!(Instant::now() < deadline, "the signal is never taken");
            std::thread::yield_now();
        }
    }

    /// Waits for the end and gives the exit code.
    fn end(&mut self) -> Option<i32> {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if let Some(status) = self.child.try_wait().expect("our child") {
                return status.code();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("still running; it said {:#?}", self.seen);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Errors mean that it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An API server that takes connections and never answers.
fn silent_server() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    (listener, url)
}

#[test]
fn help_lists_every_subcommand() {
    for arguments in [&["--help"][..], &["-h"]] {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(0));
        let help = text(&output.stdout);
        for name in ["controller", "node", "crds", "version"] {
            assert!(
                help.lines().any(|line| line.trim_start().starts_with(name)),
                "{name}: {help}"
            );
        }
    }
    assert_eq!(run(&[]).status.code(), Some(2), "no subcommand is no command");
}

#[test]
fn help_of_a_subcommand_lists_its_flags_by_section_with_their_variables() {
    let common = [
        "--kubeconfig",
        "--driver-name",
        "--logging-format",
        "--v",
        "DRAYMAN_KUBECONFIG",
        "DRAYMAN_V",
    ];
    let controller = ["Cluster:", "Driver:", "Logging:", "--driver-call-timeout"];
    let node = [
        "Cluster:",
        "Node:",
        "Directories:",
        "Logging:",
        "--node-name",
        "NODE_NAME",
        "--config",
        "--kubelet-root-dir",
        "--device-plugin-dir",
        "--cdi-root",
    ];
    for (name, own) in [("controller", &controller[..]), ("node", &node[..])] {
        // Secrets and accidents of the environment have no place in a help text.
        let output = drayman()
            .args([name, "--help"])
            .env("DRAYMAN_KUBECONFIG", "from-variable")
            .output();
        let help = text(&output.expect("the program starts").stdout);
        for part in common.iter().chain(own) {
            assert!(help.contains(part), "{name} --help does not say {part}: {help}");
        }
        assert!(!help.contains("from-variable"), "{help}");
    }
}

#[test]
fn a_wrong_argument_is_refused_by_name() {
    for (arguments, parts) in [
        (&["controler"][..], &["controler", "controller"][..]),
        (&["controller", "stray"], &["stray"]),
        (&["version", "stray"], &["stray"]),
        (
            &["controller", "--kubeconfg", "x"],
            &["--kubeconfg", "--kubeconfig"],
        ),
        (
            &["controller", "--driver-name", "Not_A_Name"],
            &["Not_A_Name", "--driver-name", "lowercase letter"],
        ),
        (&["controller", "--driver-name="], &["--driver-name"]),
        (&["controller", "--v", "10"], &["10", "--v", "0..=9"]),
        (&["controller", "-v=-1"], &["-1"]),
        (
            &["controller", "--logging-format", "xml"],
            &["xml", "--logging-format", "text", "json"],
        ),
        (
            &["controller", "--driver-call-timeout", "30"],
            &["--driver-call-timeout", "its unit"],
        ),
        (
            &["controller", "--driver-call-timeout", "1000000000h"],
            &["--driver-call-timeout", "100ms to 10m"],
        ),
        (
            &["controller", "--v", "1", "--v", "2"],
            &["--v", "multiple times"],
        ),
        (&["node", "--node-name", "n1"], &["--config"]),
        (&["node", "--config", "x"], &["--node-name"]),
        (
            &["node", "--node-name", "N1", "--config", "x"],
            &["N1", "--node-name"],
        ),
        (
            &["node", "--node-name", "n1", "--config", "x", "--cdi-root", "cdi"],
            &["--cdi-root", "absolute"],
        ),
        (&["crds", "--output-directory"], &["--output-directory"]),
    ] {
        assert_refused(drayman().args(arguments), parts);
    }
}

#[test]
fn a_wrong_variable_is_refused_like_its_flag_and_a_flag_wins_over_it() {
    assert_refused(
        drayman().arg("controller").env("DRAYMAN_V", "loud"),
        &["loud", "--v"],
    );
    assert_refused(
        drayman().arg("controller").env("DRAYMAN_DRIVER_NAME", "a/b"),
        &["a/b", "--driver-name"],
    );
    assert_refused(
        drayman().arg("node").env("NODE_NAME", "../x"),
        &["../x", "--node-name"],
    );
    // The flag is right, so that only the missing cluster is left to complain about.
    assert_refused(
        drayman()
            .args(["controller", "--driver-name", "a.example"])
            .env("DRAYMAN_DRIVER_NAME", "a/b"),
        &[
            "no API server",
            "--kubeconfig",
            "DRAYMAN_KUBECONFIG",
            "KUBERNETES_SERVICE_HOST",
        ],
    );
}

#[test]
fn a_cluster_that_cannot_be_reached_by_what_was_given_is_refused_by_name() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("kubeconfig");
    let path = file.to_str().expect("UTF-8");

    assert_refused(
        drayman().args(["controller", "--kubeconfig", path]),
        &["--kubeconfig", path, "No such file"],
    );
    std::fs::write(&file, "apiVersion: v1\nkind: Config\nclusters: nowhere\n").expect("written");
    assert_refused(
        drayman().args(["controller", "--kubeconfig", path]),
        &["--kubeconfig", path, "line 3"],
    );
    std::fs::write(&file, b"\xff\xfe\x00").expect("written");
    assert_refused(
        drayman().args(["controller", "--kubeconfig", path]),
        &["--kubeconfig", path],
    );
    assert_refused(
        drayman()
            .arg("controller")
            .env("KUBERNETES_SERVICE_HOST", "10.96.0.1")
            .env("KUBERNETES_SERVICE_PORT", "443"),
        &["no credentials", "service account"],
    );
}

#[test]
fn version_prints_the_package_version_first_and_alike_in_both_forms() {
    let command = run(&["version"]);
    assert_eq!(command.status.code(), Some(0));
    let first = concat!("drayman ", env!("CARGO_PKG_VERSION"));
    assert_eq!(text(&command.stdout).lines().next(), Some(first));

    assert_eq!(text(&run(&["--version"]).stdout).trim_end(), first);
}

#[test]
fn crds_prints_what_the_crds_directory_holds() {
    let directory = tempfile::tempdir().expect("a directory");
    let target = directory.path().join("made/on/the/way");
    let written = drayman()
        .args(["crds", "--output-directory"])
        .arg(&target)
        .output()
        .expect("the program starts");
    assert_eq!(written.status.code(), Some(0), "{}", text(&written.stderr));
    assert_eq!(text(&written.stdout), "");

    let kept = files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("crds"));
    let made = files(&target);
    let names = |files: &[(String, String)]| files.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&kept), names(&made), "run `make generate`");
    assert!(kept.len() >= 3);
    for ((name, kept), (_, made)) in kept.iter().zip(&made) {
        let mut lines = kept.lines().zip(made.lines()).zip(1..);
        let difference = lines.find(|((kept, made), _)| kept != made);
        assert_eq!(
            difference, None,
            "crds/{name} is not what the types say; run `make generate`"
        );
        assert_eq!(
            kept.len(),
            made.len(),
            "crds/{name} is not what the types say; run `make generate`"
        );
    }

    let printed = text(&run(&["crds"]).stdout);
    for (name, content) in kept {
        let body = content.trim_start_matches("---\n");
        assert!(printed.contains(body), "`drayman crds` does not print {name}");
    }
}

/// The files of a directory, by name.
fn files(directory: &Path) -> Vec<(String, String)> {
    let entries =
        std::fs::read_dir(directory).unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
    let mut files: Vec<_> = entries
        .map(|entry| {
            let entry = entry.expect("an entry");
            let name = entry.file_name().into_string().expect("UTF-8");
            (name, std::fs::read_to_string(entry.path()).expect("UTF-8"))
        })
        .collect();
    files.sort();
    files
}

#[test]
fn crds_that_cannot_be_written_are_a_failure_that_names_the_place() {
    let output = run(&["crds", "--output-directory", "/proc/nowhere"]);

    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output.stderr).starts_with("error: cannot make /proc/nowhere: "),
        "{}",
        text(&output.stderr)
    );
}

#[test]
fn the_controller_tells_its_configuration_first_and_ends_cleanly_on_sigterm_and_sigint() {
    for signal in [rustix::process::Signal::TERM, rustix::process::Signal::INT] {
        let directory = tempfile::tempdir().expect("a directory");
        let (_server, url) = silent_server();
        let file = kubeconfig(directory.path(), &url);
        let mut controller = Running::start(
            drayman()
                .args([
                    "controller",
                    "--driver-name",
                    "test.example",
                    "--kubeconfig",
                    &file,
                ])
                .env("DRAYMAN_V", "2"),
        );

        let configuration = controller.line("drayman controller starts");
        for part in [
            "driver_name=\"test.example\"",
            "driver_call_timeout=30s",
            "v=2",
            &file,
            &url,
        ] {
            assert!(
                configuration.contains(part),
                "{part:?} is missing in {configuration}"
            );
        }
        assert!(!configuration.contains("secret"), "{configuration}");
        assert!(
            !configuration.contains('\u{1b}'),
            "no colours where nobody looks: {configuration}"
        );
        controller.signal(signal);

        assert_eq!(controller.end(), Some(0), "{:#?}", controller.seen);
        let mut stdout = String::new();
        controller
            .child
            .stdout
            .take()
            .expect("piped")
            .read_to_string(&mut stdout)
            .expect("UTF-8");
        assert_eq!(stdout, "", "logs go to stderr");
    }
}

#[test]
fn an_api_server_that_is_not_there_or_does_not_serve_claims_ends_the_controller_as_a_failure() {
    let directory = tempfile::tempdir().expect("a directory");
    let (listener, url) = silent_server();
    drop(listener);
    let file = kubeconfig(directory.path(), &url);
    let output = run(&["controller", "--kubeconfig", &file]);
    assert_eq!(output.status.code(), Some(1));
    let last = text(&output.stderr).lines().last().unwrap_or_default().to_owned();
    for part in [
        "ERROR",
        "reason=\"Failed\"",
        "does not answer",
        "Connection refused",
    ] {
        assert!(last.contains(part), "{part:?} is missing in {last}");
    }

    let (listener, url) = silent_server();
    std::thread::spawn(move || {
        for mut connection in listener.incoming().map_while(Result::ok) {
            let mut request = [0; 4096];
            let _ = connection.read(&mut request);
            let status =
                r#"{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","code":404}"#;
            let head = "HTTP/1.1 404 Not Found\r\ncontent-type: application/json\r\nconnection: close";
            let _ = write!(
                connection,
                "{head}\r\ncontent-length: {}\r\n\r\n{status}",
                status.len()
            );
        }
    });
    let file = kubeconfig(directory.path(), &url);
    let output = run(&["controller", "--kubeconfig", &file]);
    assert_eq!(output.status.code(), Some(1));
    let stderr = text(&output.stderr);
    assert!(
        stderr.contains("--runtime-config=resource.k8s.io/v1alpha2=true"),
        "{stderr}"
    );
}

#[test]
fn a_second_signal_ends_a_program_that_hangs() {
    let directory = tempfile::tempdir().expect("a directory");
    let fifo = directory.path().join("kubeconfig");
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).expect("a FIFO");
    let mut controller = Running::start(drayman().args(["controller", "--kubeconfig"]).arg(&fifo));
    // Opening waits for the program to open its end; there it waits for a content that never comes.
    let _content = std::fs::OpenOptions::new()
        .write(true)
        .open(&fifo)
        .expect("opened");

    controller.signal(rustix::process::Signal::TERM);
    controller.await_delivery();
    assert_eq!(
        controller.child.try_wait().expect("our child"),
        None,
        "one signal asks, it does not force"
    );
    controller.signal(rustix::process::Signal::TERM);

    assert_eq!(controller.end(), Some(1));
}

#[test]
fn each_line_of_the_json_log_is_an_object_with_the_same_first_keys() {
    let directory = tempfile::tempdir().expect("a directory");
    let (_server, url) = silent_server();
    let file = kubeconfig(directory.path(), &url);
    let mut controller = Running::start(drayman().args([
        "controller",
        "--logging-format=json",
        "-v9",
        "--kubeconfig",
        &file,
    ]));
    controller.line("drayman controller starts");
    controller.signal(rustix::process::Signal::TERM);
    controller.line("drayman controller has ended");
    assert_eq!(controller.end(), Some(0));

    for line in &controller.seen {
        let object: serde_json::Value =
            serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        for key in ["ts", "level", "msg", "target"] {
            assert!(object[key].is_string(), "{key} is missing in {line}");
        }
        assert!(line.starts_with("{\"ts\":"), "{line}");
        assert!(!line.contains("secret"), "the token is logged: {line}");
    }
}
