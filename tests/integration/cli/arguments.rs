//! Refused arguments and configurations.

use crate::cli::program::{assert_refused, companion, drayman, text};

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
        (&["node", "discver"], &["discover"]),
        (&["config", "chek"], &["check"]),
    ] {
        assert_refused(drayman().args(arguments), parts);
    }
}

#[test]
fn a_wrong_variable_is_refused_and_a_flag_wins_over_it() {
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
    // The flag is valid, so that the missing cluster is the only problem.
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
fn discover_ignores_the_configuration_variable_of_a_pod() {
    let empty = tempfile::tempdir().expect("a directory");
    let root = empty.path().to_str().expect("UTF-8");
    for instead in [&["--propose"][..], &["--preset", "kvm"]] {
        let discover = [
            &["node", "discover", "--dev-root", root, "--sysfs-root", root][..],
            instead,
        ]
        .concat();
        let output = drayman()
            .args(&discover)
            .env("DRAYMAN_CONFIG", "/nowhere/node.yaml")
            .output()
            .expect("the program starts");
        assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
        assert!(text(&output.stderr).contains("no device"), "{instead:?}");
        // Nor is a file on the command line ignored.
        assert_refused(
            drayman()
                .args(&discover)
                .args(["--config", "/other/node.yaml"])
                .env("DRAYMAN_CONFIG", "/nowhere/node.yaml"),
            &["--config", "--preset"],
        );
    }
}

#[test]
fn an_unreachable_cluster_is_refused_by_name() {
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
fn an_invalid_node_configuration_is_refused_with_its_line() {
    let directory = tempfile::tempdir().expect("a directory");
    for (kinds, parts) in [
        ("\n- name: a\n  path: [/dev/x]", ["node.yaml:5:", "path"]),
        (
            "\n- name: a\n  paths: [/etc/passwd]",
            ["node.yaml:5:", "kinds[0].paths[0]"],
        ),
        (
            "\n- name: a\n  mode: sometimes\n  paths: [/dev/x]",
            ["node.yaml:5:", "kinds[0].mode"],
        ),
        (" 7", ["node.yaml:3:", "sequence"]),
    ] {
        let mut arguments = companion(directory.path(), "http://127.0.0.1:1", kinds);
        assert_refused(drayman().args(&arguments), &parts);
        // A file can be checked without a cluster too.
        let kubeconfig = arguments
            .iter()
            .position(|argument| argument == "--kubeconfig")
            .expect("given");
        arguments.drain(kubeconfig..kubeconfig + 2);
        assert_refused(drayman().args(&arguments), &parts);
    }
    assert_refused(
        drayman().args(["node", "--node-name", "n1", "--config", "/nowhere/node.yaml"]),
        &["/nowhere/node.yaml", "No such file"],
    );
}

#[test]
fn a_path_too_long_for_a_socket_is_refused_with_its_flag() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut arguments = companion(directory.path(), "http://127.0.0.1:1", " []");
    let deep = directory.path().join("d".repeat(90));
    std::fs::create_dir(&deep).expect("made");
    let position = arguments
        .iter()
        .position(|argument| argument == "--device-plugin-dir")
        .expect("given");
    arguments[position + 1] = deep.to_str().expect("UTF-8").to_owned();
    std::fs::write(
        directory.path().join("node.yaml"),
        "apiVersion: drayman.dev/v1alpha1\nkind: NodeConfiguration\nkinds:\n\
         - {name: a, mode: extended-resource, resourceName: example.com/a, paths: [/dev/null]}\n",
    )
    .expect("written");
    let output = drayman().args(&arguments).output().expect("the program starts");

    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    assert!(
        text(&output.stderr).contains("choose a shorter --device-plugin-dir"),
        "{}",
        text(&output.stderr)
    );
}
