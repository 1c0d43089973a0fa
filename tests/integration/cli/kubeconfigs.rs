//! Unusable kubeconfigs and API servers that refuse: each error names the file or server, and the fix.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::path::Path;
use std::process::Output;

use crate::cli::program::{drayman, kubeconfig, run, text};

const LARGE: u64 = 100 << 20;

/// Runs `drayman devices` with a kubeconfig from the flag, `KUBECONFIG` or the home directory.
fn devices(file: &Path, how: &str) -> Output {
    let mut command = drayman();
    command.arg("devices");
    match how {
        "--kubeconfig" => command.arg(how).arg(file),
        _ => command.env(how, file),
    };
    command.output().expect("the program starts")
}

fn assert_refused(file: &Path, parts: &[&str]) {
    for how in ["--kubeconfig", "KUBECONFIG"] {
        let output = devices(file, how);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{how}: {error}");
        assert!(error.starts_with("error: "), "{how}: {error}");
        for part in parts {
            assert!(error.contains(part), "{how} does not print {part:?}: {error}");
        }
    }
}

#[test]
fn an_invalid_kubeconfig_is_refused_by_name() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("file");
    let path = file.to_str().expect("UTF-8");
    assert_refused(&file, &[path, "No such file"]);
    assert_refused(
        directory.path(),
        &[directory.path().to_str().expect("UTF-8"), "Is a directory"],
    );
    let not_text: [&[u8]; 3] = [b"\xff\xfe\x00", b"\xfe\xff\x00", b"\x7fELF\xff"];
    for content in not_text {
        fs::write(&file, content).expect("written");
        assert_refused(&file, &[path, "not UTF-8"]);
    }
    for (content, part) in [("", "kubectl config use-context"), ("clusters: 7\n", "line 1")] {
        fs::write(&file, content).expect("written");
        assert_refused(&file, &[path, part]);
    }
    let large = fs::File::create(&file).expect("created");
    large.set_len(LARGE).expect("a sparse file");
    assert_refused(&file, &[path, "more than 16777216 bytes"]);
}

#[test]
fn a_wrong_part_of_a_kubeconfig_is_refused_by_name() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = kubeconfig(directory.path(), "http://127.0.0.1:1");
    let good = fs::read_to_string(&file).expect("UTF-8");
    for (from, to, part) in [
        ("user: me", "user: nobody", "no user nobody"),
        ("cluster: here, user", "cluster: gone, user", "gone"),
        ("current-context: here", "current-context: there", "there"),
        ("http://127.0.0.1:1", "127.0.0.1:6443", "https://"),
        ("http://127.0.0.1:1", "localhost", "https://"),
        ("token: secret", "tokenFile: /nowhere/token", "/nowhere/token"),
        (
            "token: secret",
            "client-certificate: /nowhere/tls.crt, client-key: /nowhere/tls.key",
            "/nowhere/tls.crt",
        ),
        (
            "token: secret",
            "exec: {apiVersion: client.authentication.k8s.io/v1, command: no-such-plugin, interactiveMode: Never}",
            "no-such-plugin",
        ),
    ] {
        fs::write(&file, good.replace(from, to)).expect("written");
        assert_refused(Path::new(&file), &[part]);
    }
}

#[test]
fn a_context_may_have_no_user() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = kubeconfig(directory.path(), "http://127.0.0.1:1");
    let good = fs::read_to_string(&file).expect("UTF-8");
    assert!(good.contains("user: me"));
    fs::write(&file, good.replace("user: me", "user: \"\"")).expect("written");
    let output = devices(Path::new(&file), "KUBECONFIG");
    // The server cannot be reached.
    assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("127.0.0.1:1"));
}

#[test]
fn only_a_proxy_in_the_kubeconfig_is_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = kubeconfig(directory.path(), "http://127.0.0.1:1");
    let good = fs::read_to_string(&file).expect("UTF-8");
    let empty = good.replace("cluster: {server:", "cluster: {proxy-url: '', server:");
    for (content, variable) in [
        (&good, "http://proxy.example:3128"),
        (&good, "not a URL"),
        (&empty, "http://proxy.example:3128"),
    ] {
        fs::write(&file, content).expect("written");
        let with_variable = drayman()
            .args(["devices", "--kubeconfig", &file])
            .env("HTTPS_PROXY", variable)
            .output()
            .expect("the program starts");
        let error = text(&with_variable.stderr);
        // The server cannot be reached.
        assert_eq!(with_variable.status.code(), Some(3), "{error}");
        assert!(error.contains("no answer from http://127.0.0.1:1"), "{error}");
    }

    let with_proxy = good.replace(
        "cluster: {server:",
        "cluster: {proxy-url: 'http://proxy.example:3128', server:",
    );
    assert_ne!(with_proxy, good);
    fs::write(&file, with_proxy).expect("written");
    assert_refused(Path::new(&file), &["proxy.example", "proxy-url"]);
}

#[test]
fn a_missing_file_in_a_list_is_skipped_and_a_pipe_is_read() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = kubeconfig(directory.path(), "http://127.0.0.1:1");
    let files = std::env::join_paths(["/nowhere/kubeconfig", &file]).expect("paths");
    let listed = devices(Path::new(&files), "KUBECONFIG");
    assert_eq!(listed.status.code(), Some(3), "{}", text(&listed.stderr));

    let home = directory.path().join(".kube");
    fs::create_dir(&home).expect("a directory");
    fs::copy(&file, home.join("config")).expect("copied");
    let of_home = devices(directory.path(), "HOME");
    assert_eq!(of_home.status.code(), Some(3), "{}", text(&of_home.stderr));

    let mut bash = std::process::Command::new("bash");
    let words = format!(
        "{} devices --kubeconfig <(cat {file})",
        env!("CARGO_BIN_EXE_drayman")
    );
    let piped = bash.args(["-c", &words]).output().expect("bash runs");
    assert_eq!(piped.status.code(), Some(3), "{}", text(&piped.stderr));
}

/// Starts an API server that answers each request with this status.
fn refusing_server(code: u16, reason: &'static str, message: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let lines = BufReader::new(stream.try_clone().expect("a stream")).lines();
            // Reads the request header.
            lines
                .map_while(Result::ok)
                .take_while(|line| !line.is_empty())
                .for_each(drop);
            let status = serde_json::json!({
                "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
                "code": code, "reason": reason, "message": message,
            })
            .to_string();
            let _ = write!(
                stream,
                "HTTP/1.1 {code} {reason}\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{status}",
                status.len()
            );
        }
    });
    url
}

#[test]
fn a_refusal_of_the_api_server_is_one_short_line() {
    const FORBIDDEN: &str = "resourceclaims.resource.k8s.io is forbidden: User \"me\" cannot list resource \"resourceclaims\" in API \
                             group \"resource.k8s.io\" at the cluster scope";
    let directory = tempfile::tempdir().expect("a directory");
    for (code, reason, message, expected) in [
        (
            401,
            "Unauthorized",
            "Unauthorized",
            "does not accept the credentials",
        ),
        (403, "Forbidden", FORBIDDEN, FORBIDDEN),
        (503, "ServiceUnavailable", "", "503 ServiceUnavailable"),
    ] {
        let file = kubeconfig(directory.path(), &refusing_server(code, reason, message));
        for command in [
            &["devices"][..],
            &["who", "a"],
            &["explain", "pod/a"],
            &["doctor"],
            &["leftovers"],
            &["crds", "--apply"],
        ] {
            let output = run(&[command, &["--kubeconfig", &file]].concat());
            let error = text(&output.stderr);
            assert_eq!(output.status.code(), Some(3), "{command:?}: {error}");
            assert!(error.contains(expected), "{command:?}: {error}");
            assert!(
                error.lines().count() == 1 && !error.contains("ListMeta"),
                "{command:?}: {error}"
            );
        }
    }
}
