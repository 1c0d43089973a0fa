//! Help, version and CRDs.

use std::path::Path;

use crate::cli::program::{drayman, run, text};

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
    assert_eq!(run(&[]).status.code(), Some(2), "a subcommand is required");
}

#[test]
fn the_help_lists_flags_by_section_with_their_variables() {
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
        // The help does not show values of variables, which may be secret.
        let output = drayman()
            .args([name, "--help"])
            .env("DRAYMAN_KUBECONFIG", "from-variable")
            .output();
        let help = text(&output.expect("the program starts").stdout);
        for part in common.iter().chain(own) {
            assert!(help.contains(part), "{name} --help does not print {part}: {help}");
        }
        assert!(!help.contains("from-variable"), "{help}");
    }
}

#[test]
fn both_forms_of_version_print_the_package_version_first() {
    let command = run(&["version"]);
    assert_eq!(command.status.code(), Some(0));
    let first = concat!("drayman ", env!("CARGO_PKG_VERSION"));
    assert_eq!(text(&command.stdout).lines().next(), Some(first));

    assert_eq!(text(&run(&["--version"]).stdout).trim_end(), first);
}

#[test]
fn crds_prints_the_files_of_the_crds_directory() {
    let directory = tempfile::tempdir().expect("a directory");
    let target = directory.path().join("new/nested/directory");
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
            "crds/{name} differs from the types; run `make generate`"
        );
        assert_eq!(
            kept.len(),
            made.len(),
            "crds/{name} differs from the types; run `make generate`"
        );
    }

    let printed = text(&run(&["crds"]).stdout);
    for (name, content) in kept {
        let body = content.trim_start_matches("---\n");
        assert!(printed.contains(body), "`drayman crds` does not print {name}");
    }
}

/// The files of a directory, sorted by name.
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
fn crds_that_cannot_be_written_name_the_destination() {
    let output = run(&["crds", "--output-directory", "/proc/nowhere"]);

    assert_eq!(output.status.code(), Some(2));
    assert!(
        text(&output.stderr).starts_with("error: --output-directory /proc/nowhere: "),
        "{}",
        text(&output.stderr)
    );
}
