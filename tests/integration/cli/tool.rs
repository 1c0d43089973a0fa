//! What a person types, as far as it needs no cluster.

use std::fs::Permissions;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use crate::cli::program::{assert_refused, drayman, kubeconfig, run, text};
use crate::not_run::is_root;

/// An API server that knows its version and nothing else.
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
fn a_server_without_classic_dynamic_resource_allocation_is_told_so_with_the_fix() {
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
    assert!(answer.contains("Kubernetes 1.33 does not have"), "{answer}");
    assert!(
        answer.contains("device plugin"),
        "what still works is said: {answer}"
    );
}

#[test]
fn a_command_without_an_api_server_says_how_to_give_one() {
    for command in ["devices", "doctor", "drain"] {
        assert_refused(&mut drayman_with(&[command]), &["--kubeconfig", "KUBECONFIG"]);
    }
    assert_refused(&mut drayman_with(&["explain", "node/a"]), &["pod/NAME"]);
    assert_refused(
        &mut drayman_with(&["devices", "--output", "xml"]),
        &["xml", "json", "yaml"],
    );
    assert_refused(&mut drayman_with(&["who"]), &["<DEVICE>"]);
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
    let said = |no_color: Option<&str>| {
        // `script` of util-linux gives the command a terminal.
        let mut command = Command::new("script");
        let words = format!("{} doctor --kubeconfig {file}", env!("CARGO_BIN_EXE_drayman"));
        command.args(["--quiet", "--return", "--command", &words, "/dev/null"]);
        command.env_remove("NO_COLOR").env("LC_ALL", "C");
        if let Some(value) = no_color {
            command.env("NO_COLOR", value);
        }
        let output = command.output().expect("script, of util-linux");
        let said = text(&output.stdout);
        assert!(said.contains("problem"), "{said} {}", text(&output.stderr));
        said
    };
    assert!(said(None).contains("\u{1b}[31mproblem\u{1b}[0m"));
    assert!(said(Some("")).contains('\u{1b}'), "an empty value is none");
    assert!(!said(Some("1")).contains('\u{1b}'));
    let piped = text(&run(&["doctor", "--kubeconfig", &file]).stdout);
    assert!(piped.contains("problem") && !piped.contains('\u{1b}'), "{piped}");
}

#[test]
fn each_shell_gets_a_script_that_knows_the_commands() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = run(&["completion", shell]);
        let script = text(&output.stdout);
        assert!(output.status.success(), "{shell}");
        assert!(script.contains("explain") && script.contains("doctor"), "{shell}");
    }
    // bash is what runs this project's own scripts, so it is there to judge its script.
    let mut bash = Command::new("bash");
    let script = text(&run(&["completion", "bash"]).stdout);
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("completion");
    std::fs::write(&file, script).expect("written");
    let output = bash.arg("-n").arg(&file).output().expect("bash runs");
    assert!(output.status.success(), "{}", text(&output.stderr));
}

#[test]
fn under_the_name_of_kubectl_s_plugin_the_help_speaks_of_kubectl() {
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
fn kubectl_is_told_what_could_stand_where_tab_is_pressed() {
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
        let said = text(&output.stdout);
        assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
        assert!(
            said.lines().any(|line| line.starts_with(expected)),
            "{words:?}: {said}"
        );
        assert_eq!(said.lines().last(), Some(directive), "{words:?}: {said}");
    }
}

/// What the doctor says of a machine whose kubelet never ran, with a containerd in the `PATH` that does this, and its configuration.
fn said_of_this_node(containerd: Option<&str>, configuration: &str) -> (Option<i32>, String) {
    let directory = tempfile::tempdir().expect("a directory");
    let root = directory.path().join("kubelet");
    let programs = directory.path().join("programs");
    for made in [&root, &programs] {
        std::fs::create_dir(made).expect("a directory");
    }
    if let Some(does) = containerd {
        // Written by another process: what this one has open for writing, even in a child that is not yet another program, cannot be run.
        let script = format!("#!/bin/sh\n{does}\n");
        let status = Command::new("sh")
            .args(["-c", "printf %s \"$1\" > \"$0\" && chmod +x \"$0\""])
            .arg(programs.join("containerd"))
            .arg(script)
            .status();
        assert!(status.expect("a shell").success());
    }
    let file = directory.path().join("config.toml");
    std::fs::write(&file, configuration).expect("written");
    let mut command = drayman_with(&["doctor", "--this-node", "--kubelet-root-dir"]);
    command.arg(root).arg("--containerd-config").arg(file);
    let output = command.env("PATH", programs).output().expect("it runs");
    (output.status.code(), text(&output.stdout))
}

#[test]
fn the_doctor_looks_at_this_machine_without_any_cluster() {
    let (code, answer) = said_of_this_node(None, "version = 2\n");
    assert_eq!(code, Some(1), "{answer}");
    assert!(answer.contains("plugins_registry"), "{answer}");
    assert!(answer.contains("enable_cdi = true"), "{answer}");
    assert!(answer.ends_with("problems\n"), "{answer}");
}

#[test]
fn the_doctor_asks_containerd_for_its_version_where_that_matters() {
    let (one, two) = (
        "echo containerd github.com/containerd/containerd v1.7.27 0123456",
        "echo containerd github.com/containerd/containerd/v2 v2.0.0 0123456",
    );
    for (version, configuration, expected) in [
        (
            Some(one),
            "version = 2\n",
            "problem  cdi: containerd 1 does not read",
        ),
        (
            Some(two),
            "version = 2\n",
            "ok       cdi: containerd 2 and later read",
        ),
        (
            None,
            "version = 2\n",
            "warning  cdi: `containerd --version` does not tell",
        ),
        // Longer than it is waited for.
        (
            Some("exec /bin/sleep 8"),
            "version = 2\n",
            "warning  cdi: `containerd --version` does not tell",
        ),
        (
            None,
            "version = 4 # new\n",
            "ok       cdi: containerd 2 and later read",
        ),
        (Some(two), "version = 2\n]\n", "config.toml, line 2: not TOML"),
    ] {
        let (_, answer) = said_of_this_node(version, configuration);
        assert!(
            answer.contains(expected),
            "{version:?} {configuration:?}: {answer}"
        );
    }
}

/// Whoever is not root may be kept from files that containerd reads, and must not be told what would be so without them.
#[test]
fn the_doctor_says_what_it_may_not_read_of_containerd_s_configuration() {
    if !is_root() {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let mode = |path: &Path, mode: u32| {
        std::fs::set_permissions(path, Permissions::from_mode(mode)).expect("of our own");
    };
    mode(directory.path(), 0o755);
    let program = directory.path().join("drayman");
    // By another process: what this one has open for writing, even in a child that is not yet another program, cannot be run.
    let copied = Command::new("cp")
        .arg(env!("CARGO_BIN_EXE_drayman"))
        .arg(&program)
        .status();
    assert!(copied.expect("cp").success());
    let (closed, file) = (
        directory.path().join("conf.d"),
        directory.path().join("config.toml"),
    );
    std::fs::create_dir(&closed).expect("a directory");
    std::fs::write(closed.join("cdi.toml"), "version = 2\n").expect("written");
    mode(&closed, 0o700);
    let said = |import: &str| {
        std::fs::write(&file, format!("version = 2\nimports = ['{import}']\n")).expect("written");
        let output = Command::new(&program)
            .args(["doctor", "--this-node", "--containerd-config"])
            .arg(&file)
            .uid(65_534)
            .output()
            .expect("it runs");
        text(&output.stdout)
    };
    for import in ["conf.d/*.toml", "conf.d/cdi.toml"] {
        let answer = said(import);
        assert!(
            answer.contains("warning  cdi: ")
                && answer.contains("ermission denied")
                && answer.contains("ask as root"),
            "{answer}"
        );
    }
    mode(&closed, 0o755);
    let answer = said("conf.d/*.toml");
    assert!(!answer.contains("ask as root"), "{answer}");
}
