//! Scripts for the embedded cluster with a real kubectl: the first line starts the cluster, the other lines run in a second terminal.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use crate::page::{repository, script};
use crate::shell;

const PROGRAM: &str = env!("CARGO_BIN_EXE_drayman");
const TIMEOUT: Duration = Duration::from_secs(120);

/// The demo process; dropping it sends SIGINT.
struct Demo(Child);

impl Drop for Demo {
    fn drop(&mut self) {
        let pid = i32::try_from(self.0.id())
            .ok()
            .and_then(rustix::process::Pid::from_raw);
        if let Some(pid) = pid {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::INT);
        }
        let _ = self.0.wait();
    }
}

/// Runs a page's script until the pod has its device.
pub(super) fn run_script(page: &str, kubectl: &Path) -> anyhow::Result<()> {
    let text = script(page, "sh", "demo");
    let (first, rest) = text.split_once('\n').context("more than a line")?;
    let command = first.split(" #").next().unwrap_or_default();
    let arguments = command
        .strip_prefix("cargo run -- ")
        .context("the first line runs the program")?;
    let mut child = Command::new(PROGRAM)
        .args(arguments.split_whitespace())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut lines = BufReader::new(child.stdout.take().context("piped")?)
        .lines()
        .map_while(Result::ok);
    let _demo = Demo(child);
    let kubeconfig = lines.find_map(|line| Some(line.trim().strip_prefix("export KUBECONFIG=")?.to_owned()));
    let kubeconfig = kubeconfig.context("the demo prints the line for the second terminal")?;
    // The pipe must be drained, or the demo would block.
    std::thread::spawn(move || lines.for_each(drop));
    let begun = Instant::now();
    loop {
        let output = Command::new("bash")
            .args(["-c", &shell::script(rest)])
            .current_dir(repository(""))
            .stdin(Stdio::null())
            .env("PATH", shell::path_with(&[kubectl, Path::new(PROGRAM)]))
            .env("KUBECONFIG", &kubeconfig)
            .output()?;
        let printed = String::from_utf8_lossy(&output.stdout);
        let message = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{page}: {printed}{message}");
        if printed.contains("InUse") {
            println!("{printed}");
            return Ok(());
        }
        ensure!(begun.elapsed() < TIMEOUT, "{page}: {printed}");
        std::thread::sleep(Duration::from_millis(200));
    }
}
