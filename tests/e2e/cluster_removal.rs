//! Nothing is left of a cluster, regardless of how its test ends.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::harness::{Cluster, pod};
use anyhow::{Context, bail, ensure};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use serde::{Deserialize, Serialize};

/// Set in the process that will be killed; names the test that runs as the victim.
const VICTIM: &str = "DRAYMAN_TEST_VICTIM";

/// Output of a victim about its cluster, for the search afterwards.
#[derive(Debug, Deserialize, Serialize)]
struct Traces {
    supervisor: u32,
    directory: PathBuf,
    link: String,
    /// PID, mount and network namespace of the node.
    namespaces: BTreeSet<String>,
    /// When the victim printed this, in clock ticks since boot. The kernel reuses namespace numbers, so younger processes do not count.
    printed_at: u64,
}

/// Not a test, but the victim of the tests below: starts a cluster, prints its traces, and waits.
#[tokio::test]
async fn victim() -> anyhow::Result<()> {
    if std::env::var_os(VICTIM).is_none() {
        return Ok(());
    }
    let cluster = Cluster::builder().nodes(1).start().await?;
    let node = cluster.node(0);
    cluster.run_pod(&pod("left-running")).await?;
    let outside = cluster.command("sleep").arg("1000").spawn()?;
    let inside = node.command("sleep").arg("1000").spawn()?;
    let (init, link) = node.init();
    // nsenter has joined the namespace once it has become the program.
    for pid in [outside.id(), inside.id()].into_iter().flatten() {
        while fs::read_to_string(format!("/proc/{pid}/comm"))? != "sleep\n" {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    let traces = Traces {
        supervisor: cluster.supervisor_pid(),
        directory: cluster.directory().to_owned(),
        link: link.to_owned(),
        namespaces: ["pid", "mnt", "net"]
            .map(|kind| {
                fs::read_link(format!("/proc/{init}/ns/{kind}")).map(|name| name.display().to_string())
            })
            .into_iter()
            .collect::<Result<_, _>>()?,
        printed_at: now()?,
    };
    println!("\n{}", serde_json::to_string(&traces)?);
    std::future::pending().await
}

/// Clock ticks since boot.
fn now() -> anyhow::Result<u64> {
    let uptime = fs::read_to_string("/proc/uptime")?;
    let (seconds, hundredths) = uptime
        .split_once(' ')
        .and_then(|(uptime, _)| uptime.split_once('.'))
        .context("seconds and hundredths")?;
    let hundredths = 100 * seconds.parse::<u64>()? + hundredths.parse::<u64>()?;
    Ok(hundredths * rustix::param::clock_ticks_per_second() / 100)
}

/// Start time of a process in clock ticks since boot: field 22 of `/proc/PID/stat` (proc(5)), counted from the end of the name.
fn start_time(process: &Path) -> Option<u64> {
    let stat = fs::read_to_string(process.join("stat")).ok()?;
    let (_, behind_name) = stat.rsplit_once(')')?;
    behind_name.split_whitespace().nth(19)?.parse().ok()
}

/// Starts a victim. Returns it with its traces once its cluster is complete.
fn start_victim() -> anyhow::Result<(Child, Traces)> {
    let mut child = Command::new(std::env::current_exe()?)
        .args(["--exact", "cluster_removal::victim", "--nocapture"])
        .env(VICTIM, "1")
        .stdout(Stdio::piped())
        .spawn()?;
    let stdout = child.stdout.take().context("a pipe")?;
    for line in BufReader::new(stdout).lines() {
        if let Ok(traces) = serde_json::from_str(&line?) {
            return Ok((child, traces));
        }
    }
    child.wait()?;
    bail!("the victim failed to start its cluster")
}

fn kill(pid: u32, signal: Signal) -> anyhow::Result<()> {
    let pid = i32::try_from(pid)
        .ok()
        .and_then(Pid::from_raw)
        .context("a process number")?;
    Ok(kill_process(pid, signal)?)
}

/// Waits for the end of a process that is not a child.
fn wait_for_end(pid: u32) -> anyhow::Result<()> {
    let pid = i32::try_from(pid)
        .ok()
        .and_then(Pid::from_raw)
        .context("a process number")?;
    let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else {
        return Ok(());
    };
    let mut polled = [rustix::event::PollFd::new(&process, rustix::event::PollFlags::IN)];
    let limit = rustix::time::Timespec {
        tv_sec: 120,
        tv_nsec: 0,
    };
    ensure!(
        rustix::event::poll(&mut polled, Some(&limit))? > 0,
        "process {pid:?} does not exit"
    );
    Ok(())
}

/// Remains of a cluster; empty if nothing is left.
fn remains(traces: &Traces) -> anyhow::Result<Vec<String>> {
    let mut found = processes(traces)?;
    if traces.directory.exists() {
        found.push(format!("directory {}", traces.directory.display()));
    }
    found.extend(cgroups(traces)?);
    if Path::new("/sys/class/net").join(&traces.link).exists() {
        found.push(format!("interface {}", traces.link));
    }
    Ok(found)
}

/// Processes of the cluster, by directory in the command line, namespace and cgroup; and mounts in any namespace.
fn processes(traces: &Traces) -> anyhow::Result<Vec<String>> {
    let directory = traces.directory.to_string_lossy();
    let name = traces.directory.file_name().context("a name")?.to_string_lossy();
    let mut found = Vec::new();
    for process in fs::read_dir("/proc")?.flatten().map(|entry| entry.path()) {
        let read = |file: &str| {
            let bytes = fs::read(process.join(file)).unwrap_or_default();
            String::from_utf8_lossy(&bytes).into_owned()
        };
        for (file, text) in [
            ("cmdline", &*directory),
            ("environ", &*directory),
            ("mountinfo", &*name),
            ("cgroup", &*name),
        ] {
            if read(file).contains(text) {
                found.push(format!(
                    "{}/{file} {}",
                    process.display(),
                    read("cmdline").replace('\0', " ")
                ));
            }
        }
        if start_time(&process).is_none_or(|birth| birth > traces.printed_at) {
            continue;
        }
        for kind in ["pid", "mnt", "net"] {
            let namespace = fs::read_link(process.join("ns").join(kind)).unwrap_or_default();
            if traces.namespaces.contains(&*namespace.to_string_lossy()) {
                found.push(format!("{} in {}", process.display(), namespace.display()));
            }
        }
    }
    Ok(found)
}

fn cgroups(traces: &Traces) -> anyhow::Result<Vec<String>> {
    let name = traces.directory.file_name().context("a name")?;
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    let cgroups = mounts.lines().filter_map(|line| {
        let fields: Vec<_> = line.split(' ').collect();
        fields[2]
            .starts_with("cgroup")
            .then(|| Path::new(fields[1]).join(name))
    });
    Ok(cgroups
        .filter(|path| path.exists())
        .map(|path| path.display().to_string())
        .collect())
}

/// Default directories of Kubernetes components that exist on this machine.
fn usual_places() -> Vec<&'static str> {
    let mut places = vec![
        "/etc/cni",
        "/opt/cni",
        "/opt/containerd",
        "/run/cdi",
        "/run/containerd",
        "/run/netns",
        "/usr/libexec/kubernetes",
        "/var/lib/cni",
        "/var/lib/containerd",
        "/var/lib/kubelet",
        "/var/log/containers",
        "/var/log/pods",
    ];
    places.retain(|place| Path::new(place).exists());
    places
}

#[test]
fn nothing_is_left_when_the_test_is_killed() -> anyhow::Result<()> {
    let places = usual_places();
    let (mut child, traces) = start_victim()?;
    let before = remains(&traces)?;
    ensure!(
        before.len() > 15,
        "the search finds a running cluster: {before:#?}"
    );
    for namespace in &traces.namespaces {
        ensure!(
            before
                .iter()
                .any(|found| found.ends_with(&format!("in {namespace}"))),
            "{namespace}: {before:#?}"
        );
    }
    kill(child.id(), Signal::KILL)?;
    child.wait()?;
    wait_for_end(traces.supervisor)?;
    assert_eq!(remains(&traces)?, Vec::<String>::new());
    assert_eq!(usual_places(), places);
    Ok(())
}

#[test]
fn nothing_is_left_when_the_test_is_interrupted() -> anyhow::Result<()> {
    let (mut child, traces) = start_victim()?;
    kill(child.id(), Signal::INT)?;
    child.wait()?;
    wait_for_end(traces.supervisor)?;
    assert_eq!(remains(&traces)?, Vec::<String>::new());
    Ok(())
}

#[tokio::test]
async fn a_killed_supervisor_leaves_nothing_after_the_next_start() -> anyhow::Result<()> {
    let (mut child, traces) = start_victim()?;
    // Kills test and supervisor together, as at the end of a container or a session.
    kill(traces.supervisor, Signal::KILL)?;
    kill(child.id(), Signal::KILL)?;
    child.wait()?;
    // The kernel ends the cluster's processes with some delay. The test's own programs are not among them.
    let of_cluster = || -> anyhow::Result<Vec<String>> {
        Ok(processes(&traces)?
            .into_iter()
            .filter(|found| !found.contains("sleep") && !found.contains("mnt:"))
            .collect())
    };
    let deadline = Instant::now() + Duration::from_secs(60);
    while !of_cluster()?.is_empty() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(of_cluster()?, Vec::<String>::new());
    assert!(traces.directory.exists(), "no process was left to remove it");
    Cluster::builder().start().await?.stop().await?;
    assert_eq!(remains(&traces)?, Vec::<String>::new());
    Ok(())
}

#[tokio::test]
async fn nothing_is_left_when_a_component_cannot_start() -> anyhow::Result<()> {
    let before = directories()?;
    let Err(error) = Cluster::builder()
        .nodes(1)
        .flag("apiserver", "--no-such-flag")
        .start()
        .await
    else {
        bail!("it started");
    };
    let text = format!("{error:#}");
    assert!(
        text.contains("apiserver") && text.contains("no-such-flag"),
        "the error names the component and the reason: {text}"
    );
    // Other tests run clusters at the same time, so only abandoned directories count.
    let after: Vec<_> = directories()?
        .difference(&before)
        .filter(|path| !in_use(path))
        .cloned()
        .collect();
    assert_eq!(after, Vec::<PathBuf>::new());
    Ok(())
}

fn directories() -> anyhow::Result<BTreeSet<PathBuf>> {
    let entries = fs::read_dir(std::env::temp_dir())?.map(|entry| Ok(entry?.path()));
    let paths = entries.collect::<anyhow::Result<BTreeSet<_>>>()?;
    Ok(paths
        .into_iter()
        .filter(|path| path.to_string_lossy().contains("/drayman-cluster-"))
        .collect())
}

/// A supervisor locks its directory.
fn in_use(directory: &Path) -> bool {
    let Ok(directory) = fs::File::open(directory) else {
        return true;
    };
    rustix::fs::flock(&directory, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_err()
}
