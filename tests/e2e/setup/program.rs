//! A program under test with its own log.

use std::fs::File;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};

use anyhow::Context as _;
use futures::StreamExt as _;
use inotify::{Inotify, WatchMask};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use crate::harness::TIMEOUT;

/// A drayman process. Its log is printed if the test fails.
#[derive(Debug)]
pub(crate) struct Program {
    name: String,
    child: Child,
    log: PathBuf,
    quiet: bool,
}

impl Program {
    /// Starts the program. Its log goes to a file that must not exist.
    pub(super) fn start(name: &str, mut command: Command, log: PathBuf) -> anyhow::Result<Self> {
        let file = File::create_new(&log)?;
        command.stdout(Stdio::null()).stderr(file);
        let child = command.spawn().with_context(|| format!("starting {name}"))?;
        Ok(Self {
            name: name.to_owned(),
            child,
            log,
            quiet: false,
        })
    }

    /// Kills the process (SIGKILL).
    pub(crate) async fn kill(&mut self) -> anyhow::Result<()> {
        self.child
            .kill()
            .await
            .with_context(|| format!("killing {}", self.name))
    }

    /// The process id.
    pub(crate) fn id(&self) -> anyhow::Result<u32> {
        self.child.id().context("it runs")
    }

    /// Sends a signal.
    pub(crate) fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let id = i32::try_from(self.id()?)?;
        Ok(kill_process(Pid::from_raw(id).context("a pid")?, signal)?)
    }

    /// Sends SIGTERM and waits for a clean exit.
    pub(crate) async fn end(mut self) -> anyhow::Result<ExitStatus> {
        self.signal(Signal::TERM)?;
        let status = timeout(TIMEOUT, self.child.wait())
            .await
            .with_context(|| format!("{} ends", self.name))??;
        anyhow::ensure!(status.success(), "{} ended with {status}", self.name);
        self.quiet = true;
        Ok(status)
    }

    /// Waits until the log contains a text.
    pub(crate) async fn logged(&self, text: &str) -> anyhow::Result<()> {
        let inotify = Inotify::init()?;
        inotify.watches().add(&self.log, WatchMask::MODIFY)?;
        let mut changes = inotify.into_event_stream([0; 4096])?;
        while !self.log()?.contains(text) {
            timeout(TIMEOUT, changes.next())
                .await
                .with_context(|| format!("{} logs {text:?}", self.name))?;
        }
        Ok(())
    }

    /// Whether the process has exited by itself.
    pub(crate) fn has_ended(&mut self) -> anyhow::Result<bool> {
        Ok(self.child.try_wait()?.is_some())
    }

    /// Waits until the process exits by itself.
    pub(crate) async fn ended(mut self) -> anyhow::Result<ExitStatus> {
        let status = timeout(TIMEOUT, self.child.wait())
            .await
            .with_context(|| format!("{} ends", self.name))??;
        self.quiet = true;
        Ok(status)
    }

    pub(crate) fn log(&self) -> anyhow::Result<String> {
        Ok(std::fs::read_to_string(&self.log)?)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // The test runner shows this only if the test fails.
        if !self.quiet
            && let Ok(log) = self.log()
        {
            let lines: Vec<&str> = log.lines().collect();
            eprintln!(
                "--- the last lines of {}:\n{}",
                self.name,
                lines[lines.len().saturating_sub(60)..].join("\n")
            );
        }
    }
}
