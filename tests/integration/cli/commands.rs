//! Commands for users that need no cluster.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::os::unix::fs::symlink;
use std::process::Command;
use std::time::Instant;

use drayman::api::proto::cri_v1::runtime_service_server::{RuntimeService, RuntimeServiceServer};
use drayman::api::proto::cri_v1::{
    ContainerStatusRequest, ContainerStatusResponse, ListContainersRequest, ListContainersResponse,
    StatusRequest, StatusResponse, VersionRequest, VersionResponse,
};
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use crate::cli::program::{TIMEOUT, assert_refused, drayman, kubeconfig, run, text};

/// Starts an API server that serves only its version.
fn server_without_the_api(version: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let mut lines = BufReader::new(stream.try_clone().expect("a stream")).lines();
            let request = lines.next().and_then(Result::ok).unwrap_or_default();
            while lines
                .next()
                .and_then(Result::ok)
                .is_some_and(|line| !line.is_empty())
            {}
            let (code, body) = if request.starts_with("GET /version") {
                let minor = version.split_once('.').map_or("", |(_, minor)| minor);
                let body = format!(
                    r#"{{"major":"1","minor":"{minor}","gitVersion":"v{version}.0","gitCommit":"","gitTreeState":"",
                        "buildDate":"","goVersion":"","compiler":"","platform":""}}"#
                );
                ("200 OK", body)
            } else {
                let body = r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"not found","reason":"NotFound","code":404}"#;
                ("404 Not Found", body.to_owned())
            };
            let length = body.len();
            let _ = write!(
                stream,
                "HTTP/1.1 {code}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
            );
        }
    });
    url
}

#[test]
fn a_server_without_classic_dra_is_reported_with_a_fix() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = kubeconfig(directory.path(), &server_without_the_api("1.30"));
    let output = run(&["doctor", "--kubeconfig", &file]);
    let answer = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{answer}");
    assert!(
        answer.contains("--runtime-config=resource.k8s.io/v1alpha2=true"),
        "{answer}"
    );

    let file = kubeconfig(directory.path(), &server_without_the_api("1.33"));
    let answer = text(&run(&["doctor", "--kubeconfig", &file]).stdout);
    assert!(answer.contains("Kubernetes 1.33 serves neither"), "{answer}");
    assert!(!answer.contains("--runtime-config"), "{answer}");
    assert!(
        answer.contains("device plugin"),
        "the remaining features are named: {answer}"
    );
}

#[test]
fn a_command_without_an_api_server_names_the_flags() {
    for command in ["devices", "doctor", "leftovers"] {
        assert_refused(&mut drayman_with(&[command]), &["--kubeconfig", "KUBECONFIG"]);
    }
    assert_refused(
        &mut drayman_with(&["drain", "--this-driver"]),
        &["`drayman leftovers`"],
    );
    for (object, part) in [
        ("node/a", "pod/NAME"),
        ("pod/", "DNS subdomain"),
        ("../nodes", "pod/NAME"),
    ] {
        assert_refused(
            &mut drayman_with(&["explain", object]),
            &[object.trim_end_matches('/'), part],
        );
    }
    assert_refused(
        &mut drayman_with(&["devices", "--output", "xml"]),
        &["xml", "json", "yaml"],
    );
    assert_refused(&mut drayman_with(&["who"]), &["<DEVICE>"]);
    assert_refused(&mut drayman_with(&["who", ""]), &["<DEVICE>"]);
    assert_refused(
        &mut drayman_with(&["devices", "--state", "Fre"]),
        &["'Fre'", "--state", "Free", "NotForClaims", "Unknown"],
    );
}

fn drayman_with(arguments: &[&str]) -> Command {
    let mut command = drayman();
    command.args(arguments);
    command
}

#[test]
fn colours_are_for_terminals_and_no_color_switches_them_off() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = kubeconfig(directory.path(), &server_without_the_api("1.30"));
    let output_with = |no_color: Option<&str>| {
        // `script` of util-linux provides a terminal.
        let mut command = Command::new("script");
        let words = format!("{} doctor --kubeconfig {file}", env!("CARGO_BIN_EXE_drayman"));
        command.args(["--quiet", "--return", "--command", &words, "/dev/null"]);
        command.env_remove("NO_COLOR").env("LC_ALL", "C");
        if let Some(value) = no_color {
            command.env("NO_COLOR", value);
        }
        let output = command.output().expect("script, of util-linux");
        let stdout = text(&output.stdout);
        assert!(stdout.contains("problem"), "{stdout} {}", text(&output.stderr));
        stdout
    };
    assert!(output_with(None).contains("\u{1b}[31mproblem\u{1b}[0m"));
    assert!(
        output_with(Some("")).contains('\u{1b}'),
        "an empty value does not count"
    );
    assert!(!output_with(Some("1")).contains('\u{1b}'));
    let piped = text(&run(&["doctor", "--kubeconfig", &file]).stdout);
    assert!(piped.contains("problem") && !piped.contains('\u{1b}'), "{piped}");
}

#[test]
fn each_shell_gets_a_script_that_asks_the_program() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = run(&["completion", shell]);
        let script = text(&output.stdout);
        assert!(output.status.success(), "{shell}");
        assert!(
            script.contains("drayman") && script.contains("COMPLETE"),
            "{shell}"
        );
    }
    // bash is always available because the scripts of this project need it.
    let mut bash = Command::new("bash");
    let script = text(&run(&["completion", "bash"]).stdout);
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("completion");
    std::fs::write(&file, script).expect("written");
    let output = bash.arg("-n").arg(&file).output().expect("bash runs");
    assert!(output.status.success(), "{}", text(&output.stderr));
    // The call of the script when Tab is pressed after "drayman ex".
    let mut program = drayman_with(&["--", "drayman", "ex"]);
    program.env("COMPLETE", "bash").env("_CLAP_COMPLETE_INDEX", "1");
    let output = program.output().expect("it runs");
    assert_eq!(text(&output.stdout).trim(), "explain", "{}", text(&output.stderr));
}

#[test]
fn the_help_of_the_kubectl_plugin_names_kubectl() {
    let directory = tempfile::tempdir().expect("a directory");
    let plugin = directory.path().join("kubectl-drayman");
    symlink(env!("CARGO_BIN_EXE_drayman"), &plugin).expect("a link");
    let output = Command::new(&plugin)
        .args(["devices", "--help"])
        .output()
        .expect("it runs");
    let help = text(&output.stdout);
    assert!(output.status.success());
    assert!(
        help.contains("Usage: kubectl drayman devices") || help.contains("Usage: kubectl-drayman devices"),
        "{help}"
    );
}

#[test]
fn kubectl_completes_the_arguments_of_the_plugin() {
    let directory = tempfile::tempdir().expect("a directory");
    let program = directory.path().join("kubectl_complete-drayman");
    symlink(env!("CARGO_BIN_EXE_drayman"), &program).expect("a link");
    std::fs::create_dir(directory.path().join("files")).expect("a directory");
    for (words, expected, directive) in [
        (&["ex"][..], "explain\t", ":4"),
        (&["devices", "--out"], "--output\t", ":4"),
        (&["devices", "--output", "y"], "yaml", ":4"),
        (&["config", ""], "check\t", ":4"),
        (&["doctor", "--kubeconfig", "fi"], "files/", ":6"),
        (&["nonsense", "--no-such"], ":4", ":4"),
    ] {
        let output = Command::new(&program)
            .args(words)
            .current_dir(directory.path())
            .output()
            .expect("it runs");
        let stdout = text(&output.stdout);
        assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
        assert!(
            stdout.lines().any(|line| line.starts_with(expected)),
            "{words:?}: {stdout}"
        );
        assert_eq!(stdout.lines().last(), Some(directive), "{words:?}: {stdout}");
    }
}

/// An API server that accepts connections and never answers.
fn silent_server() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    (listener, url)
}

#[test]
fn a_cluster_that_cannot_be_asked_ends_with_3() {
    let directory = tempfile::tempdir().expect("a directory");
    let (silent, url) = silent_server();
    let file = kubeconfig(directory.path(), &url);
    for command in [
        &["devices"][..],
        &["who", "a"],
        &["explain", "pod/a"],
        &["doctor"],
        &["leftovers"],
    ] {
        let flags = ["--kubeconfig", &file, "--request-timeout", "1s"];
        let began = Instant::now();
        let output = run(&[command, &flags].concat());
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{command:?}: {error}");
        assert!(
            error.contains(&url) && error.contains("timed out"),
            "{command:?}: {error}"
        );
        assert!(began.elapsed() < TIMEOUT, "{command:?}: {:?}", began.elapsed());
    }
    drop(silent);
    for command in [&["devices"][..], &["crds", "--apply"]] {
        let output = run(&[command, &["--kubeconfig", &file]].concat());
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{command:?}: {error}");
        assert!(
            error.contains(&url) && error.contains("Connection refused"),
            "{command:?}: {error}"
        );
    }
}

#[test]
fn the_server_and_user_flags_win_over_the_kubeconfig() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = kubeconfig(directory.path(), "http://127.0.0.1:1");
    let url = server_without_the_api("1.30");
    let output = run(&["doctor", "--kubeconfig", &file, "-s", &url]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    for (flags, words) in [
        (&["--cluster", "nowhere"][..], "nowhere"),
        (&["--user", "nobody"], "nobody"),
        (&["--server", "localhost"], "https://"),
        (&["--as-group", "admins"], "--as"),
        (&["--as", "a\nb"], "control characters"),
        (&["--request-timeout", "0"], "100ms to 10m"),
        (&["-v", "10"], "10"),
    ] {
        let mut command = drayman_with(&["doctor", "--kubeconfig", &file]);
        assert_refused(command.args(flags), &[words]);
    }
}

#[test]
fn every_answer_is_an_object_with_kind_and_version() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = kubeconfig(directory.path(), &server_without_the_api("1.30"));
    let output = run(&["doctor", "--kubeconfig", &file, "-o", "json"]);
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(answer["apiVersion"], "cli.drayman.dev/v1alpha1");
    assert_eq!(answer["kind"], "FindingList");
    assert!(answer["items"].as_array().is_some_and(|items| !items.is_empty()));
    let names = text(&run(&["doctor", "--kubeconfig", &file, "-o", "name"]).stdout);
    assert!(names.lines().any(|name| name == "api"), "{names}");
}

/// A container runtime with this name, version and configuration.
struct Runtime(&'static str, &'static str, &'static str);

#[tonic::async_trait]
impl RuntimeService for Runtime {
    async fn version(&self, _: Request<VersionRequest>) -> Result<Response<VersionResponse>, Status> {
        Ok(Response::new(VersionResponse {
            runtime_name: self.0.into(),
            runtime_version: self.1.into(),
        }))
    }

    async fn status(&self, request: Request<StatusRequest>) -> Result<Response<StatusResponse>, Status> {
        assert!(request.into_inner().verbose);
        let info = [("config".to_owned(), self.2.to_owned())].into();
        Ok(Response::new(StatusResponse { info }))
    }

    async fn list_containers(
        &self,
        _: Request<ListContainersRequest>,
    ) -> Result<Response<ListContainersResponse>, Status> {
        Err(Status::unimplemented("not used"))
    }

    async fn container_status(
        &self,
        _: Request<ContainerStatusRequest>,
    ) -> Result<Response<ContainerStatusResponse>, Status> {
        Err(Status::unimplemented("not used"))
    }
}

/// The output of `doctor` on a node whose kubelet never ran, with this container runtime.
fn this_node(runtime: Option<Runtime>) -> (Option<i32>, String) {
    let directory = tempfile::tempdir().expect("a directory");
    let (root, socket) = (
        directory.path().join("kubelet"),
        directory.path().join("cri.sock"),
    );
    std::fs::create_dir(&root).expect("a directory");
    let tokio = tokio::runtime::Runtime::new().expect("a runtime");
    if let Some(runtime) = runtime {
        let _entered = tokio.enter();
        let listener = UnixListenerStream::new(UnixListener::bind(&socket).expect("a socket"));
        let server = Server::builder().add_service(RuntimeServiceServer::new(runtime));
        tokio.spawn(server.serve_with_incoming(listener));
    }
    let mut command = drayman_with(&["doctor", "--this-node", "--kubelet-root-dir"]);
    command.arg(root).arg("--container-runtime-socket").arg(socket);
    let output = command.output().expect("it runs");
    (output.status.code(), text(&output.stdout))
}

#[test]
fn doctor_checks_this_node_without_a_cluster() {
    let (code, answer) = this_node(None);
    assert_eq!(code, Some(1), "{answer}");
    assert!(answer.contains("plugins_registry"), "{answer}");
    assert!(
        answer.contains("warning  cdi: whether the container runtime reads CDI files is not known: ")
            && answer.contains("cri.sock: No such file"),
        "{answer}"
    );
    assert!(answer.ends_with("problems\n"), "{answer}");
}

#[test]
fn doctor_asks_the_container_runtime_for_its_cdi_settings() {
    let on = r#"{"enableCDI":true,"cdiSpecDirs":["/etc/cdi","/var/run/cdi"],"enableSelinux":false}"#;
    for (name, version, configuration, expected) in [
        (
            "containerd",
            "v1.7.27",
            on,
            "ok       cdi: containerd 1.7.27 reads CDI files in /var/run/cdi",
        ),
        (
            "containerd",
            "2.1.0",
            r#"{"enableCDI":false}"#,
            "problem  cdi: containerd 2.1.0 does not read",
        ),
        (
            "cri-o",
            "1.30.1",
            r#"{"sandboxImage":"pause"}"#,
            "note     cdi: cri-o 1.30.1 does not report",
        ),
    ] {
        let (_, answer) = this_node(Some(Runtime(name, version, configuration)));
        assert!(answer.contains(expected), "{expected}: {answer}");
    }
}

#[test]
fn a_removed_flag_of_doctor_names_its_successor() {
    let output = drayman_with(&[
        "doctor",
        "--this-node",
        "--containerd-config=/etc/containerd/config.toml",
    ])
    .output()
    .expect("it runs");
    assert_eq!(output.status.code(), Some(2));
    let error = text(&output.stderr);
    assert!(error.contains("--container-runtime-socket"), "{error}");
}
