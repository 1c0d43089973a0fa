//! The companion on one node: `cargo bench --bench node -- [SCENARIO]...`, as root.
//!
//! Runs the program in its own process and mount namespace with real sockets and files. This process acts as the API server; `unplug` has a
//! real kubelet. Prints each figure with its goal.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a benchmark exits on any error")]

#[path = "../tests/faults/node/api.rs"]
#[allow(dead_code, reason = "shared with tests, which use another part of it")]
mod api;
mod figures;
#[path = "../tests/faults/node/fixture.rs"]
#[allow(dead_code, reason = "shared with tests, which use another part of it")]
mod fixture;
#[path = "../tests/support/harness/mod.rs"]
mod harness;
#[path = "../tests/e2e/pods.rs"]
#[allow(
    dead_code,
    unused_imports,
    reason = "shared with tests, which use another part of it"
)]
mod pods;
#[path = "../tests/faults/node/process.rs"]
#[allow(dead_code, reason = "shared with tests, which use another part of it")]
mod process;
#[path = "../tests/e2e/setup.rs"]
#[allow(
    dead_code,
    clippy::single_match_else,
    reason = "shared with tests, which use another part of it"
)]
mod setup;

use harness::not_run;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use drayman::api::proto::device_plugin_v1beta1::{AllocateRequest, ContainerAllocateRequest, Empty};
use figures::{Goal, Times, figure, resident_kib_of};
use fixture::Node;
use process::{Mounts, Process, Start};

const USAGE: &str =
    "usage: cargo bench --bench node -- [--program PATH] [prepare|allocate|restart|memory|rest|unplug]...
All scenarios are run if none is named. Another build than cargo's is measured with --program; unplug has cargo's.";
const SCENARIOS: [&str; 6] = ["prepare", "allocate", "restart", "memory", "rest", "unplug"];
/// Devices of a large node.
const MANY: u32 = 1_000;

fn main() -> anyhow::Result<()> {
    let mut named: Vec<String> = std::env::args()
        .skip(1)
        .filter(|argument| argument != "--bench")
        .collect();
    if let Some(flag) = named.iter().position(|argument| argument == "--program") {
        let flag: Vec<String> = named.drain(flag..(flag + 2).min(named.len())).collect();
        let [_, program] = flag.as_slice() else {
            anyhow::bail!("{USAGE}");
        };
        process::PROGRAM.get_or_init(|| program.into());
    }
    anyhow::ensure!(
        named.iter().all(|name| SCENARIOS.contains(&name.as_str())),
        "{USAGE}"
    );
    anyhow::ensure!(
        rustix::process::geteuid().is_root(),
        "only root can make device nodes: run this as root"
    );
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?;
    for scenario in SCENARIOS {
        if !named.is_empty() && !named.iter().any(|name| name == scenario) {
            continue;
        }
        figures::heading(scenario);
        runtime.block_on(async {
            match scenario {
                "prepare" => prepare().await,
                "allocate" => allocate().await,
                "restart" => restart().await,
                "memory" => memory().await,
                "rest" => rest().await,
                _ => return unplug().await,
            }
            Ok(())
        })?;
    }
    Ok(())
}

fn uid(number: u32) -> String {
    format!("7d0a2f5e-0c5b-4f0e-9a53-6c3b{number:08x}")
}

fn on_disk() -> Node {
    Node::within(tempfile::tempdir().unwrap())
}

/// A node with [`MANY`] more devices: `test-100` and up for claims, or `camera-100` and up for an extended resource.
fn with_devices(kind: &str) -> Node {
    let node = on_disk();
    for number in 0..MANY {
        node.device(&format!("{kind}-{}", 100 + number), 100 + number);
    }
    node
}

async fn prepare() {
    const TMPFS: &str = "mkdir -p $NODE/kubelet/plugins $NODE/cdi\n\
        mount -t tmpfs none $NODE/kubelet/plugins\nmount -t tmpfs none $NODE/cdi";
    for (name, mounts, limit) in [("on tmpfs", TMPFS, 5), ("on disk, with fsync", "true", 20)] {
        let node = on_disk();
        let mounts = Mounts::new(&node, mounts);
        let process = Start::new().within(&mounts).run(&node).await;
        let mut kubelet = node.kubelet_at(&mounts.sees(&node.dra_socket())).await;
        let (mut prepares, mut unprepares) = (Times::default(), Times::default());
        for number in 0..1_000 {
            let uid = uid(number);
            let start = Instant::now();
            kubelet.prepare(&uid, &["test-0"]).await.unwrap();
            prepares.push(start.elapsed());
            let start = Instant::now();
            kubelet.unprepare(&uid).await.unwrap();
            unprepares.push(start.elapsed());
        }
        let goal = Goal::at_most(prepares.quantile(99), Duration::from_millis(limit));
        figure(
            &format!("Prepare {name} (goal p99 {limit} ms)"),
            &prepares.to_string(),
            goal,
        );
        figure(
            &format!("Unprepare {name}"),
            &unprepares.to_string(),
            Goal::none(),
        );
        process.kill();
    }
}

async fn allocate() {
    let node = with_devices("camera");
    let process = Process::start(&node).await;
    let mut plugin = node.plugin("example.com/camera").await;
    let mut list = plugin.list_and_watch(Empty {}).await.unwrap().into_inner();
    let first = list.message().await.unwrap().unwrap();
    figure(
        "devices in ListAndWatch",
        &first.devices.len().to_string(),
        Goal::none(),
    );
    let mut times = Times::default();
    for number in 0..3_000 {
        let id = format!("camera-{}", 100 + number % MANY);
        let container = ContainerAllocateRequest {
            devices_ids: vec![id],
        };
        let request = AllocateRequest {
            container_requests: vec![container],
        };
        let start = Instant::now();
        plugin.allocate(request).await.unwrap();
        times.push(start.elapsed());
    }
    let goal = Goal::at_most(times.quantile(99), Duration::from_millis(1));
    figure(
        "Allocate with 1,000 devices (goal p99 1 ms)",
        &times.to_string(),
        goal,
    );
    process.kill();
}

async fn restart() {
    let node = with_devices("test");
    let process = Process::start(&node).await;
    let mut kubelet = node.kubelet().await;
    for number in 0..MANY {
        let device = format!("test-{}", 100 + number);
        kubelet.prepare(&uid(number), &[&device]).await.unwrap();
    }
    process.kill();
    let mut times = Times::default();
    for _ in 0..10 {
        let start = Instant::now();
        let process = Process::start(&node).await;
        let mut kubelet = node.kubelet().await;
        kubelet.prepare(&uid(7), &["test-107"]).await.unwrap();
        times.push(start.elapsed());
        assert!(
            kubelet.prepare(&uid(MANY), &["test-107"]).await.is_err(),
            "it is held"
        );
        process.kill();
    }
    let goal = Goal::at_most(times.quantile(99), Duration::from_secs(1));
    figure(
        "start with 1,000 prepared claims -> first Prepare answered (goal 1 s)",
        &times.to_string(),
        goal,
    );
}

async fn memory() {
    for (name, node, limit) in [
        ("at rest", on_disk(), 12),
        ("with 1,000 devices", with_devices("camera"), 20),
    ] {
        let process = Process::start(&node).await;
        node.api.until_ready("True", "Serving").await;
        tokio::time::sleep(Duration::from_secs(10)).await;
        let kib = resident_kib_of(&process.id(), "VmRSS:");
        let goal = Goal::below(kib, limit * 1_000_000 / 1024);
        figure(
            &format!("resident memory {name} (goal {limit} MB)"),
            &format!("{kib} KiB"),
            goal,
        );
        process.kill();
    }
}

async fn rest() {
    let node = on_disk();
    let process = Process::start(&node).await;
    node.api.until_ready("True", "Serving").await;
    let mut kubelet = node.kubelet().await;
    for claims in [0, 1] {
        if claims == 1 {
            kubelet.prepare(&uid(0), &["test-0"]).await.unwrap();
        }
        // The worker threads have ended, and the first check of the claim is over; the next follows after two minutes.
        tokio::time::sleep(Duration::from_secs(30)).await;
        let woken = wake_ups(&process.id(), Duration::from_secs(60)).await;
        figure(
            &format!(
                "wake-ups of all threads in 60 s at rest, {claims} claims (the search for devices is some of them)"
            ),
            &woken.to_string(),
            Goal::none(),
        );
    }
    process.kill();
}

/// Number of voluntary context switches of all threads of a process in this time, including threads that start or end meanwhile.
async fn wake_ups(process: &str, time: Duration) -> u64 {
    let before = switches(process);
    let mut last = before.clone();
    let until = Instant::now() + time;
    while Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(100)).await;
        last.extend(switches(process));
    }
    let since = |(thread, count): (&String, &u64)| count - before.get(thread).copied().unwrap_or_default();
    last.iter().map(since).sum()
}

/// Voluntary context switches so far by thread.
fn switches(process: &str) -> BTreeMap<String, u64> {
    let threads = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
    threads
        .filter_map(Result::ok)
        .filter_map(|thread| {
            let status = std::fs::read_to_string(thread.path().join("status")).ok()?;
            let count = status
                .lines()
                .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
            let thread = thread.file_name().into_string().ok()?;
            Some((thread, count.trim().parse().ok()?))
        })
        .collect()
}

/// A device is unplugged and plugged in on a real node.
async fn unplug() -> anyhow::Result<()> {
    let setup = setup::Setup::start(1).await?;
    let node = setup.cluster.node(0);
    pods::make_devices(node, "drayman-plugged-", &pods::MINORS[..2])?;
    let companion = setup.companion(0, pods::CONFIGURATION)?;
    setup.until_allocatable(pods::PLUGGED, "2").await?;
    let (mut gone, mut back) = (Times::default(), Times::default());
    for _ in 0..20 {
        let start = Instant::now();
        node.remove("/dev/drayman-plugged-1")?;
        setup.until_allocatable(pods::PLUGGED, "1").await?;
        gone.push(start.elapsed());
        let start = Instant::now();
        node.make_device("/dev/drayman-plugged-1", 1, pods::MINORS[1])?;
        setup.until_allocatable(pods::PLUGGED, "2").await?;
        back.push(start.elapsed());
    }
    let name = "in the node's allocatable (kubelet of the tests: status every 1 s)";
    figure(
        &format!("unplugged -> withdrawn {name}"),
        &gone.to_string(),
        Goal::none(),
    );
    figure(
        &format!("plugged in -> offered {name}"),
        &back.to_string(),
        Goal::none(),
    );
    companion.end().await?;
    setup.cluster.stop().await
}
