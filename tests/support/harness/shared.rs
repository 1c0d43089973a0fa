//! Clusters shared by the tests of several processes.

use std::fs::{self, File};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use kube::config::Kubeconfig;
use rustix::fs::{FlockOperation, flock};

use super::supervisor::Description;
use super::{Builder, Cluster, TIMEOUT};

/// The directory of `hack/test` for shared clusters. They end when its pipe `hold` is closed, at the end of the run.
const DIRECTORY: &str = "DRAYMAN_TEST_SHARED_CLUSTERS";

/// The number of the attempt, from 1, which cargo-nextest sets.
const ATTEMPT: &str = "NEXTEST_ATTEMPT";

const POLL_INTERVAL: Duration = Duration::from_millis(50);

impl Builder {
    /// Joins the cluster of this name, or starts and prepares it if this test is the first. The cluster belongs to this process without
    /// `hack/test`, and if the test is retried: its first attempt has left objects in the shared one.
    pub async fn share(
        self,
        name: &str,
        prepare: impl AsyncFnOnce(&Cluster) -> anyhow::Result<()>,
    ) -> anyhow::Result<Cluster> {
        let is_retry = std::env::var(ATTEMPT).is_ok_and(|attempt| attempt != "1");
        let directory = std::env::var_os(DIRECTORY).filter(|_| !is_retry);
        let Some(directory) = directory.map(PathBuf::from) else {
            let cluster = self.start().await?;
            prepare(&cluster).await?;
            return Ok(cluster);
        };
        let file = |what: &str| directory.join(format!("{name}.{what}"));
        let _lock = lock(&file("lock"), FlockOperation::LockExclusive).await?;
        let (description, ready) = (file("json"), file("ready"));
        if ready.exists() {
            return Cluster::connect(read(&description)?.context("a description")?).await;
        }
        let mut command = self.command().await?;
        let log = file("log");
        // In its own process group, because it outlives the test that starts it.
        let child = command
            .process_group(0)
            .stdin(File::open(directory.join("hold"))?)
            .stdout(File::create(&description)?)
            .stderr(File::create(&log)?)
            .spawn()?;
        let cluster = Cluster::connect(until_described(child, &description, &log).await?).await?;
        prepare(&cluster).await?;
        File::create(ready)?;
        Ok(cluster)
    }
}

/// Locks a file, across processes, until the result is dropped.
pub async fn lock(path: &Path, operation: FlockOperation) -> anyhow::Result<File> {
    let file = File::create(path).with_context(|| format!("opening {}", path.display()))?;
    tokio::task::spawn_blocking(move || {
        flock(&file, operation)?;
        Ok(file)
    })
    .await?
}

/// An administrator's kubeconfig that impersonates a user: a shared cluster issues no certificates for tests.
pub(super) fn impersonate(cluster: &Cluster, user: &str) -> anyhow::Result<PathBuf> {
    let mut kubeconfig = Kubeconfig::read_from(cluster.kubeconfig())?;
    for named in &mut kubeconfig.auth_infos {
        if let Some(info) = &mut named.auth_info {
            info.impersonate = Some(user.to_owned());
        }
    }
    let path = cluster.directory().join(format!("kubeconfig/as-{user}.yaml"));
    fs::write(&path, serde_json::to_string(&kubeconfig)?)?;
    Ok(path)
}

/// The supervisor's first line of standard output, once it is complete.
fn read(description: &Path) -> anyhow::Result<Option<Description>> {
    let text = fs::read_to_string(description)?;
    let line = text.split_once('\n').map(|(line, _)| line);
    Ok(line.map(serde_json::from_str).transpose()?)
}

async fn until_described(mut child: Child, description: &Path, log: &Path) -> anyhow::Result<Description> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if let Some(description) = read(description)? {
            return Ok(description);
        }
        if child.try_wait()?.is_some() || Instant::now() > deadline {
            let _ = child.kill();
            bail!("a shared cluster does not start: {}", fs::read_to_string(log)?);
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}
