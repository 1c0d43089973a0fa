//! The test cluster's program, built and used in a terminal as in its README.

use std::io::{Read as _, Write as _};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};

use crate::harness;
use crate::page::{repository, script};

/// A copy of the repository's layout with the cached builds.
fn working_directory() -> anyhow::Result<tempfile::TempDir> {
    let place = tempfile::tempdir()?;
    let cache = place.path().join("target/cluster");
    std::fs::create_dir_all(&cache)?;
    std::fs::create_dir(place.path().join("tests"))?;
    let copied = Command::new("cp")
        .arg("-r")
        .args([repository("tests/cluster"), place.path().join("tests/cluster")])
        .status()?;
    ensure!(copied.success(), "cp ended with {copied}");
    for entry in std::fs::read_dir(harness::target().join("cluster"))? {
        let entry = entry?;
        if entry.file_name() != "cluster" {
            symlink(entry.path(), cache.join(entry.file_name()))?;
        }
    }
    Ok(place)
}

fn shell(place: &Path, program: &str) -> Command {
    let mut command = Command::new(program);
    command
        .current_dir(place)
        .env("GOTOOLCHAIN", "local")
        .env("GOWORK", "off")
        .env("TERM", "xterm");
    command
}

#[test]
fn the_cluster_shows_progress_on_a_terminal_only() -> anyhow::Result<()> {
    harness::build_go("tests/cluster", "cluster")?;
    let place = working_directory()?;
    let text = script("tests/cluster/README.md", "sh", "terminal");
    let (before, last) = text.trim_end().rsplit_once('\n').context("more than a line")?;
    let piped = shell(place.path(), "bash").args(["-ec", before]).output()?;
    let (printed, stderr) = (
        String::from_utf8_lossy(&piped.stdout),
        String::from_utf8_lossy(&piped.stderr),
    );
    ensure!(
        piped.status.success() && printed.contains("node-0"),
        "{printed}{stderr}"
    );
    ensure!(!printed.contains('\r') && stderr.is_empty(), "{stderr:?}");

    // `script` of util-linux provides a terminal and forwards Ctrl-C. It runs the command with $SHELL or sh, and only bash returns the
    // command's own status after Ctrl-C.
    let mut terminal = shell(place.path(), "script")
        .args(["--quiet", "--return", "--command", last, "/dev/null"])
        .env("SHELL", "/bin/bash")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("script, of util-linux")?;
    let mut keys = terminal.stdin.take().context("piped")?;
    let mut output = terminal.stdout.take().context("piped")?;
    let (mut shown, mut part) = (String::new(), [0; 4096]);
    let mut is_asked_to_end = false;
    loop {
        let read = output.read(&mut part)?;
        if read == 0 {
            break;
        }
        shown += &String::from_utf8_lossy(part.get(..read).unwrap_or_default());
        if !is_asked_to_end && shown.contains("export KUBECONFIG=") && shown.contains("Ctrl-C ends it") {
            keys.write_all(b"\x03")?;
            is_asked_to_end = true;
        }
    }
    let ended = terminal.wait()?;
    ensure!(ended.success() && is_asked_to_end, "{ended}: {shown}");
    ensure!(
        shown.contains("starting Kubernetes ") && shown.contains("s\x1b[K\r"),
        "{shown:?}"
    );
    Ok(())
}
