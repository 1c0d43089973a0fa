//! Runs the commands of a README in their own namespace.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, bail};
use tokio::time::{Instant, sleep};

use crate::examples::folder::Step;
use crate::examples::pattern::{Names, matches};
use crate::harness::{Cluster, TIMEOUT};

/// Output of a command (stdout and stderr), and whether it succeeded.
struct Printed {
    text: String,
    success: bool,
}

/// A user with kubectl and drayman in the PATH.
#[allow(missing_debug_implementations, reason = "a kube::Client has none")]
pub(crate) struct User<'a> {
    cluster: &'a Cluster,
    programs: PathBuf,
    kubeconfig: PathBuf,
}

impl<'a> User<'a> {
    /// Creates a namespace and makes it the default.
    pub(crate) async fn new(cluster: &'a Cluster, namespace: &str) -> anyhow::Result<Self> {
        let directory = cluster.directory();
        let programs = directory.join("programs");
        if !programs.exists() {
            std::fs::create_dir(&programs)?;
            std::os::unix::fs::symlink(cluster.kubectl_program(), programs.join("kubectl"))?;
            std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_drayman"), programs.join("drayman"))?;
        }
        let kubeconfig = directory.join(format!("user-{namespace}.yaml"));
        std::fs::copy(cluster.kubeconfig(), &kubeconfig)?;
        cluster.kubectl(&["create", "namespace", namespace]).await?;
        let user = Self {
            cluster,
            programs,
            kubeconfig,
        };
        let namespace = format!("kubectl config set-context --current --namespace={namespace}");
        user.run_successfully(&namespace).await?;
        Ok(user)
    }

    async fn run(&self, command: &str) -> anyhow::Result<Printed> {
        let path = std::env::var("PATH").unwrap_or_default();
        let mut shell = self.cluster.command("bash");
        shell
            .args(["-o", "pipefail", "-c", &format!("exec 2>&1; {command}")])
            .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")))
            .env("PATH", format!("{}:{path}", self.programs.display()))
            .env("KUBECONFIG", &self.kubeconfig)
            // kubectl's discovery cache.
            .env("HOME", self.cluster.directory())
            .env("LC_ALL", "C")
            .stdout(Stdio::piped());
        let output = shell.output().await.context("running bash")?;
        Ok(Printed {
            text: String::from_utf8_lossy(&output.stdout).into_owned(),
            success: output.status.success(),
        })
    }

    /// Runs a command that must succeed, and returns its output.
    pub(crate) async fn run_successfully(&self, command: &str) -> anyhow::Result<String> {
        let printed = self.run(command).await?;
        if printed.success {
            Ok(printed.text)
        } else {
            bail!("{command}: {}", printed.text.trim())
        }
    }

    /// Repeats a command until its output meets a condition.
    pub(crate) async fn until(&self, command: &str, holds: impl Fn(&str) -> bool) -> anyhow::Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let printed = self.run(command).await?;
            if printed.success && holds(&printed.text) {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!("{command} still prints: {}", printed.text.trim());
            }
            sleep(Duration::from_millis(300)).await;
        }
    }

    /// Runs a step of a README; the error contains the actual output.
    pub(crate) async fn follow(&self, step: &Step, names: &mut Names) -> anyhow::Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let printed = self.run(&step.command).await?;
            let lines: Vec<&str> = printed.text.lines().collect();
            if let Some(learnt) = matches(&step.expected, &lines, names).filter(|_| printed.success) {
                *names = learnt;
                // For authors of an example: prints the actual output.
                if std::env::var_os("DRAYMAN_TEST_EXAMPLE").is_some() {
                    println!("$ {}\n{}", step.command, printed.text.trim_end());
                }
                return Ok(());
            }
            if !is_read_only(&step.command) || Instant::now() > deadline {
                bail!(
                    "line {}: {}\n--- expected\n{}\n--- printed{}\n{}\n--- where {names:?}",
                    step.line,
                    step.command,
                    step.expected.join("\n"),
                    if printed.success { "" } else { ", and failed" },
                    printed.text.trim_end()
                );
            }
            sleep(Duration::from_millis(300)).await;
        }
    }
}

/// Whether a command changes nothing and can be repeated.
fn is_read_only(command: &str) -> bool {
    [
        "kubectl get ",
        "kubectl wait ",
        "kubectl logs ",
        "kubectl exec ",
        "drayman ",
    ]
    .iter()
    .any(|start| command.starts_with(start))
        && !command.contains("/host/")
}
