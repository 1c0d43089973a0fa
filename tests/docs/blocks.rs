//! Every block of the documentation declares how it is tested.
//!
//! | block | test |
//! |---|---|
//! | `sh run` | runs here, in the root of the repository, and must succeed |
//! | `sh embedded` | the same, on the embedded cluster |
//! | `sh demo` | `tests/e2e/docs` runs it on the embedded cluster that its first line starts, with a real kubectl |
//! | `sh cluster` | `tests/e2e/docs` runs it on a real cluster, as started by `make cluster` |
//! | `sh chart` | `tests/e2e/docs` runs it on real clusters with Helm |
//! | `sh terminal` | `tests/e2e/docs` runs it in a terminal, and ends the last line by Ctrl-C |
//! | `sh vendor` | `tests/e2e/examples` starts the vendor's programs with it |
//! | `sh release` | `tests/e2e/docs` runs it with a registry on a real cluster |
//! | `sh checked` | is not run, but its commands are checked, as in all other blocks |
//! | `yaml config` | `drayman config check` accepts it |
//! | `yaml object` | objects: ours match their schema here; `tests/e2e/docs` validates all on a real API server |
//! | `yaml v1` | the same, for a cluster with `resource.k8s.io/v1` |
//! | `yaml values` | matches the schema of the chart's values |
//! | `yaml <kind>` | the `spec` of one of our kinds; matches its schema |
//! | `rust <file>` | the file contains these lines, and is built |
//! | `console` | commands and output in the READMEs of the examples: `tests/e2e/examples` runs them |
//! | `text`, `mermaid` | output and diagrams: none |
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use crate::page::{Block, pages, repository};
use crate::schema;
use crate::shell;

const PROGRAM: &str = env!("CARGO_BIN_EXE_drayman");

fn blocks(language: &str, mark: &str) -> Vec<Block> {
    let all = pages().into_iter().flat_map(|page| page.blocks);
    all.filter(|block| block.language == language && block.mark == mark)
        .collect()
}

fn run(text: &str, directory: &Path, environment: &[(&str, &str)]) -> Output {
    Command::new("bash")
        .args(["-c", &shell::script(text)])
        .current_dir(directory)
        .stdin(Stdio::null())
        .env("PATH", shell::path_with(&[Path::new(PROGRAM)]))
        .env_remove("KUBECONFIG")
        .envs(environment.iter().copied())
        .output()
        .expect("bash")
}

fn assert_succeeds(block: &Block, environment: &[(&str, &str)]) {
    let output = run(&block.text, &repository(""), environment);
    assert!(
        output.status.success(),
        "{}:\n{}{}",
        block.place,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn every_block_has_a_mark_for_its_test() {
    let mut unmarked = Vec::new();
    for block in pages().into_iter().flat_map(|page| page.blocks) {
        let is_marked = match (block.language.as_str(), block.mark.as_str()) {
            ("sh", mark) => [
                "run", "embedded", "demo", "cluster", "chart", "terminal", "vendor", "release", "checked",
            ]
            .contains(&mark),
            ("yaml", mark) => {
                ["config", "object", "v1", "values"].contains(&mark) || schema::of_kind(mark).is_some()
            }
            ("rust", file) => !file.is_empty() && repository(file).is_file(),
            ("text" | "mermaid", "") => true,
            ("console", "") => block.place.starts_with("examples/"),
            _ => false,
        };
        if !is_marked {
            unmarked.push(format!("{}: `{} {}`", block.place, block.language, block.mark));
        }
    }
    assert!(
        unmarked.is_empty(),
        "blocks without a known mark (see tests/docs/blocks.rs):\n  {}",
        unmarked.join("\n  ")
    );
}

#[test]
fn scripts_that_need_no_cluster_succeed() {
    let blocks = blocks("sh", "run");
    assert!(!blocks.is_empty());
    for block in blocks {
        assert_succeeds(&block, &[]);
    }
}

/// The embedded cluster, stopped on drop.
#[cfg(feature = "testcluster")]
struct EmbeddedCluster {
    child: Child,
    kubeconfig: String,
}

#[cfg(feature = "testcluster")]
impl EmbeddedCluster {
    fn start() -> Self {
        let mut child = Command::new(PROGRAM)
            .args(["demo", "--scenario", "structured", "--keep"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let mut lines = BufReader::new(child.stdout.take().expect("piped"))
            .lines()
            .map_while(Result::ok);
        let kubeconfig =
            lines.find_map(|line| Some(line.trim().strip_prefix("export KUBECONFIG=")?.to_owned()));
        // The pipe must be drained, or the program would block.
        std::thread::spawn(move || lines.for_each(drop));
        Self {
            child,
            kubeconfig: kubeconfig.expect("the demo prints the path of its kubeconfig"),
        }
    }
}

#[cfg(feature = "testcluster")]
impl Drop for EmbeddedCluster {
    fn drop(&mut self) {
        let pid = i32::try_from(self.child.id())
            .ok()
            .and_then(rustix::process::Pid::from_raw);
        // SIGINT, so that the demo removes its directory.
        if let Some(pid) = pid {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::INT);
        }
        let _ = self.child.wait();
    }
}

#[cfg(feature = "testcluster")]
#[test]
fn scripts_for_the_embedded_cluster_succeed_on_it() {
    let cluster = EmbeddedCluster::start();
    let blocks = blocks("sh", "embedded");
    assert!(!blocks.is_empty());
    for block in blocks {
        assert_succeeds(&block, &[("KUBECONFIG", &cluster.kubeconfig)]);
    }
}

#[test]
fn configurations_of_nodes_are_right() {
    let blocks = blocks("yaml", "config");
    assert!(!blocks.is_empty());
    for block in blocks {
        let directory = tempfile::tempdir().expect("a directory");
        std::fs::write(directory.path().join("node.yaml"), &block.text).expect("written");
        let output = run("drayman config check node.yaml", directory.path(), &[]);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {stderr}", block.place);
    }
}

#[test]
fn lines_of_examples_are_those_of_the_file() {
    for block in pages().into_iter().flat_map(|page| page.blocks) {
        if block.language == "rust" {
            let file = std::fs::read_to_string(repository(&block.mark)).expect("UTF-8");
            assert!(
                file.contains(&block.text),
                "{}: not in {}:\n{}",
                block.place,
                block.mark,
                block.text
            );
        }
    }
}
