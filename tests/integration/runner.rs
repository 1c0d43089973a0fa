//! Runs `hack/test` on a small package whose tests pass, fail, are killed or skip themselves.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a failing helper fails the test"
)]

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::not_run;

const MANIFEST: &str =
    "[package]\nname = \"fixture\"\nversion = \"0.0.0\"\nedition = \"2024\"\n[workspace]\n";
const LOCK: &str = "version = 4\n[[package]]\nname = \"fixture\"\nversion = \"0.0.0\"\n";
const PASSES: &str = "#[test] fn passes() {}\n";
/// Kills its process with SIGKILL.
const DIES: &str = "#[test] fn dies() {
    let pid = std::process::id().to_string();
    std::process::Command::new(\"kill\").args([\"-KILL\", &pid]).status().unwrap();
    std::thread::park();
}\n";
/// Fails in its first run.
const FLAKY: &str = "#[test] fn flaky() {
    let seen = concat!(env!(\"CARGO_TARGET_TMPDIR\"), \"/seen\");
    let before = std::path::Path::new(seen).exists();
    std::fs::write(seen, \"\").unwrap();
    assert!(before);
}\n";
const SKIPS: &str = "#[test] fn skips() { not_run::not_run(\"it lacks something\"); }\n";
const NOT_RUN: &str = include_str!("../support/not_run.rs");

/// A package with these test programs, run by `hack/test`.
struct Package(tempfile::TempDir);

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// The cargo-nextest that `make` installed.
fn nextest() -> Option<PathBuf> {
    let named = std::env::var_os("CARGO_NEXTEST").map(PathBuf::from);
    let found = named.filter(|program| program.exists());
    if found.is_none() {
        not_run::not_run("CARGO_NEXTEST names no program; make check sets it");
    }
    found
}

impl Package {
    fn new(programs: &[(&str, &str)]) -> Self {
        let package = Self(tempfile::tempdir().unwrap());
        package.write("Cargo.toml", MANIFEST);
        package.write("Cargo.lock", LOCK);
        package.write("src/lib.rs", PASSES);
        // The package has no dependencies.
        let not_run = NOT_RUN.replace("rustix::process::geteuid().is_root()", "true");
        package.write("tests/support/not_run.rs", &not_run);
        for (name, tests) in programs {
            let text = format!("#[path = \"support/not_run.rs\"] mod not_run;\n{tests}");
            package.write(&format!("tests/{name}.rs"), &text);
        }
        // nextest rejects sections for test programs that the package does not have.
        let configuration = std::fs::read_to_string(repository(".config/nextest.toml")).unwrap();
        let sections = configuration.split("\n[");
        let general: Vec<_> = sections.filter(|section| !section.contains("binary(=")).collect();
        package.write(".config/nextest.toml", &general.join("\n["));
        package.write("hack/test", "");
        std::fs::copy(repository("hack/test"), package.path("hack/test")).unwrap();
        package
    }

    fn path(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.path(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    /// Runs all tests. Returns whether the run succeeds, and its output.
    fn run(&self, nextest: &Path) -> (bool, String) {
        let mut command = Command::new(self.path("hack/test"));
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if ["NEXTEST", "DRAYMAN", "RUST_TEST", "CARGO_TARGET"]
                .iter()
                .any(|start| text.starts_with(start))
            {
                command.env_remove(&name);
            }
        }
        let output = command.arg("all").env("CARGO_NEXTEST", nextest).output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        (
            output.status.success(),
            String::from_utf8_lossy(&text).into_owned(),
        )
    }
}

/// Runs the test programs and checks the result, the last line of the summary, and other parts of it.
#[track_caller]
fn check(programs: &[(&str, &str)], success: bool, last: &str, named: &[&str]) {
    let Some(nextest) = nextest() else { return };
    let package = Package::new(programs);
    let (succeeded, printed) = package.run(&nextest);
    let summary = std::fs::read_to_string(package.path("target/test-summary")).unwrap_or_default();
    assert_eq!(succeeded, success, "{printed}");
    assert_eq!(summary.lines().last(), Some(last), "{printed}");
    for text in named {
        assert!(summary.contains(text), "{text} is not in:\n{summary}");
    }
}

#[test]
fn a_killed_program_beside_a_flaky_test_fails_the_run() {
    check(
        &[("e2e", &[DIES, PASSES, FLAKY].concat())],
        false,
        "3 passed, 1 failed",
        &["flaky", "fixture::e2e flaky"],
    );
}

#[test]
fn a_flaky_test_passes_and_is_named() {
    check(
        &[("e2e", FLAKY)],
        true,
        "2 passed, 0 failed",
        &["fixture::e2e flaky"],
    );
}

#[test]
fn a_test_that_skips_itself_is_not_counted_as_passed() {
    check(
        &[("e2e", &[SKIPS, PASSES].concat())],
        true,
        "2 passed, 0 failed, 1 skipped",
        &["skips: it lacks something"],
    );
}

#[test]
fn a_package_that_does_not_compile_fails_the_run() {
    check(&[("e2e", "nonsense")], false, "1 passed, 1 failed", &[]);
}

#[test]
fn the_soak_shows_progress_on_a_terminal_only() {
    use std::os::unix::fs::PermissionsExt as _;

    let directory = tempfile::tempdir().unwrap();
    let simulation = directory.path().join("simulation");
    let built = format!(
        "echo '{{\"name\":\"simulation\",\"executable\":\"{}\"}}'",
        simulation.display()
    );
    for (name, line) in [
        ("cargo", built.as_str()),
        ("simulation", "echo \"$SEEDS seeds, fine\""),
    ] {
        let program = directory.path().join(name);
        std::fs::write(&program, format!("#!/bin/sh\n{line}\n")).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let path = std::env::var("PATH").unwrap();
    let soak = repository("hack/soak").display().to_string();
    let shown = |program: &str, arguments: &[&str], terminal: &str| {
        let target = tempfile::tempdir().unwrap();
        let output = Command::new(program)
            .args(arguments)
            .env("PATH", format!("{}:{path}", directory.path().display()))
            .env("CARGO_TARGET_DIR", target.path())
            .env("SEEDS", "3000")
            .env("TERM", terminal)
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(
            output.status.success() && text.contains("3000 of 3000 seeds"),
            "{text}"
        );
        text
    };
    // `script` of util-linux provides a terminal.
    let on_terminal = ["--quiet", "--return", "--command", &soak, "/dev/null"];
    assert!(shown("script", &on_terminal, "xterm").contains("1000 of 3000 seeds"));
    assert_eq!(shown("script", &on_terminal, "dumb").lines().count(), 1);
    assert_eq!(shown("bash", &[&soak], "xterm").lines().count(), 1);
}
