//! Start and shutdown of controller and companion.

use std::io::{Read as _, Write as _};

use crate::cli::program::{RunningProgram, companion, drayman, kubeconfig, run, silent_server, text};

#[test]
fn the_controller_ends_cleanly_on_sigterm_and_sigint() {
    for signal in [rustix::process::Signal::TERM, rustix::process::Signal::INT] {
        let directory = tempfile::tempdir().expect("a directory");
        let (_server, url) = silent_server();
        let file = kubeconfig(directory.path(), &url);
        let mut controller = RunningProgram::start(
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
            "no colours without a terminal: {configuration}"
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
fn the_companion_ends_cleanly_although_the_server_is_silent() {
    let directory = tempfile::tempdir().expect("a directory");
    let (_server, url) = silent_server();
    let mut arguments = companion(
        directory.path(),
        &url,
        "\n- {name: a, paths: [/dev/drayman-none-*]}",
    );
    arguments.extend(["--driver-name", "test.example", "--logging-format", "json"].map(str::to_owned));
    let mut companion = RunningProgram::start(drayman().args(&arguments));

    let configuration: serde_json::Value =
        serde_json::from_str(&companion.line("drayman node starts")).expect("JSON");
    for (key, value) in [
        ("driver_name", "test.example"),
        ("node_name", "n1"),
        ("cdi_root", &arguments[12]),
    ] {
        assert_eq!(configuration[key], value, "{configuration}");
    }
    companion.signal(rustix::process::Signal::TERM);

    companion.line("drayman node has ended");
    assert_eq!(companion.end(), Some(0), "{:#?}", companion.seen);
}

#[test]
fn a_missing_claims_api_ends_the_controller_with_a_failure() {
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
        stderr.contains("--runtime-config=resource.k8s.io/v1alpha2=true")
            && stderr.contains("extended resources (controller.enabled=false"),
        "{stderr}"
    );
}

#[test]
fn a_second_signal_ends_a_program_that_hangs() {
    let directory = tempfile::tempdir().expect("a directory");
    let fifo = directory.path().join("kubeconfig");
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).expect("a FIFO");
    let mut controller = RunningProgram::start(drayman().args(["controller", "--kubeconfig"]).arg(&fifo));
    // Opening blocks until the program opens the FIFO; it then waits for content.
    let _content = std::fs::OpenOptions::new()
        .write(true)
        .open(&fifo)
        .expect("opened");

    controller.signal(rustix::process::Signal::TERM);
    controller.await_delivery();
    assert_eq!(
        controller.child.try_wait().expect("our child"),
        None,
        "the first signal does not force an exit"
    );
    // A delivered signal may not be handled yet: two signals in quick succession count as one.
    assert_eq!(
        controller.end_by(rustix::process::Signal::TERM),
        Some(1),
        "the program exits by itself"
    );
}

#[test]
fn each_line_of_the_json_log_is_an_object_with_common_keys() {
    let directory = tempfile::tempdir().expect("a directory");
    let (_server, url) = silent_server();
    let file = kubeconfig(directory.path(), &url);
    let mut controller = RunningProgram::start(drayman().args([
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

#[test]
fn a_configuration_at_a_relative_path_is_followed() {
    let directory = tempfile::tempdir().expect("a directory");
    let (_server, url) = silent_server();
    let mut arguments = companion(
        directory.path(),
        &url,
        "\n- {name: a, paths: [/dev/drayman-none-*]}",
    );
    let config = arguments.get_mut(4).expect("the value of --config");
    let file = std::mem::replace(config, "node.yaml".to_owned());
    let mut companion = RunningProgram::start(
        drayman()
            .current_dir(directory.path())
            .args(&arguments)
            .args(["--driver-name", "test.example"]),
    );
    companion.line("drayman node starts");
    // Writes repeatedly, because the first write may precede the watch.
    let text = std::fs::read_to_string(&file).expect("the configuration");
    let deadline = std::time::Instant::now() + crate::cli::program::TIMEOUT;
    for number in 0.. {
        assert!(std::time::Instant::now() < deadline, "{:#?}", companion.seen);
        std::fs::write(&file, text.replace("name: a", &format!("name: a{number}"))).expect("written");
        if companion
            .line_within("the configuration has changed", std::time::Duration::from_secs(1))
            .is_some()
        {
            break;
        }
    }
    assert!(
        !companion
            .seen
            .iter()
            .any(|line| line.contains("cannot be watched")),
        "{:#?}",
        companion.seen
    );
}
