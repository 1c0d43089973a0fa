//! Scripts for the cluster of `make cluster`.

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};

use crate::harness;
use crate::page::{pages, repository, script};
use crate::shell;

/// Its blocks form a script of their own.
const QUICKSTART: &str = "docs/user/quickstart.md";

/// Waits until drayman runs, runs the script, and writes its exit code and output to files.
const HOOK: &str = r#"
hack/run-in-cluster "$PROGRAM" >"$OUT/drayman" 2>&1 &
runner=$!
until grep -q 'drayman runs in it' "$OUT/drayman" || ! kill -0 "$runner"; do sleep 0.1; done
bash "$OUT/script" >"$OUT/printed" 2>&1
echo $? >"$OUT/status"
kill "$runner"
wait "$runner"
"#;

/// Starts a cluster of this version with drayman, as `make cluster` does, and runs a script there. Returns its output.
fn on_a_cluster(version: &str, text: &str) -> anyhow::Result<String> {
    let out = tempfile::tempdir()?;
    let program = Path::new(env!("CARGO_BIN_EXE_drayman"));
    std::fs::write(out.path().join("script"), shell::script(text))?;
    std::fs::write(out.path().join("hook"), HOOK)?;
    let mut cluster = Command::new(harness::build_go("tests/cluster", "cluster")?)
        .args(["up", "--requests", "--nodes", "1", "--version", version, "--target"])
        .arg(harness::target())
        .args(["--hook", "exec bash \"$OUT/hook\""])
        .current_dir(repository(""))
        .env("PATH", shell::path_with(&[program]))
        .env("PROGRAM", program)
        .env("OUT", out.path())
        // The cluster ends when its stdin closes, so also if this test is killed.
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .context("starting the cluster")?;
    // Taken, because waiting for a child closes its stdin.
    let mut held = cluster.stdin.take().context("piped")?;
    let ended = cluster.wait()?;
    let _ = held.flush();
    let read = |name: &str| std::fs::read_to_string(out.path().join(name)).unwrap_or_default();
    ensure!(
        ended.success() && read("status").trim() == "0",
        "{ended}, {:?}\n{}\n--- output of drayman:\n{}",
        read("status"),
        read("printed"),
        read("drayman")
    );
    Ok(read("printed"))
}

#[test]
fn the_quickstart_shows_one_device_of_three_in_the_pod() -> anyhow::Result<()> {
    let printed = on_a_cluster(harness::STRUCTURED_VERSION, &script(QUICKSTART, "sh", "cluster"))?;
    println!("{printed}");
    let seen = printed
        .lines()
        .filter(|line| line.starts_with("/dev/drayman-test-"))
        .count();
    ensure!(seen == 1, "one device is in the container:\n{printed}");
    let named = printed
        .lines()
        .filter(|line| line.starts_with("DRAYMAN_DEVICE_"))
        .count();
    ensure!(named == 1, "and the environment names it:\n{printed}");
    for part in ["allocated,reserved", "Held", "InUse"] {
        ensure!(printed.contains(part), "{part} is not in:\n{printed}");
    }
    Ok(())
}

#[test]
fn other_scripts_for_the_same_cluster_succeed_there() -> anyhow::Result<()> {
    let blocks: Vec<String> = pages()
        .into_iter()
        .filter(|page| page.path != Path::new(QUICKSTART))
        .flat_map(|page| page.blocks)
        .filter(|block| block.language == "sh" && block.mark == "cluster")
        .map(|block| block.text)
        .collect();
    ensure!(!blocks.is_empty(), "no other page has a script");
    println!("{}", on_a_cluster(harness::VERSION, &blocks.concat())?);
    Ok(())
}
