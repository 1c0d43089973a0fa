//! Companions that exit during kubelet's calls, two companions on one node, abandoned calls, and other clients that block the sockets.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use futures::StreamExt as _;
use inotify::{Inotify, WatchMask};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::crash_during_call::Change;
use crate::harness::{Node, PATIENCE};
use crate::pods::{CONFIGURATION, MINORS, look_inside, make_devices, traces, wait_for_inventory};
use crate::stage::{Program, Stage, is_allocated, is_gone};

const REGISTERED: &str = "kubelet has registered the driver";
/// Directories that the companion writes to for claims, with its sockets.
const STATE: &str = "/var/lib/kubelet/plugins/drayman.dev";
const CDI: &str = "/run/cdi";
const FAILED: &str = "FailedPrepareDynamicResources";
/// Set by `make test-all`: ends the companion after each change instead of every fourth.
const EVERY_CHANGE: &str = "DRAYMAN_TEST_EVERY_CHANGE";

/// A node with this many devices for claims, without a controller.
async fn stage(devices: usize) -> anyhow::Result<(Stage, Program)> {
    let stage = Stage::start(1).await?;
    make_devices(stage.cluster.node(0), "drayman-test", &MINORS[..devices])?;
    stage.make_template(None).await?;
    let controller = stage.controller()?;
    Ok((stage, controller))
}

/// Waits until a companion serves kubelet and has finished its own writes.
async fn settled(stage: &Stage, companion: &Program, devices: usize) -> anyhow::Result<()> {
    wait_for_inventory(stage, 0, u32::try_from(devices)?).await?;
    companion.logged(REGISTERED).await?;
    let checkpoint = format!("{STATE}/checkpoint.json");
    let until = Instant::now() + PATIENCE;
    let written = || stage.cluster.node(0).read(&checkpoint);
    while !written().is_ok_and(|text| text.contains("\"servesClaims\":true")) {
        ensure!(Instant::now() < until, "{:?}", written());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // The previous companion's checkpoint may look the same, so this waits until nothing was written for a second.
    let node = stage.cluster.node(0);
    let mut changes = Written::expect([node.path(STATE), node.path(CDI)])?;
    while timeout(Duration::from_secs(1), changes.0.next()).await.is_ok() {
        ensure!(Instant::now() < until, "the companion does not come to rest");
    }
    Ok(())
}

/// Prepare failures that kubelet reports, except those because it may not read the claim yet: the API server's node authorizer
/// (`plugin/pkg/auth/authorizer/node`) may learn of a pod after the node does.
async fn failed_prepares(stage: &Stage, pod: &str) -> anyhow::Result<Vec<String>> {
    let mut said = stage.said(pod, FAILED).await?;
    said.retain(|text| {
        !text.contains("failed to fetch ResourceClaim") || !text.contains("no relationship found")
    });
    Ok(said)
}

/// Sockets left by a companion.
fn sockets(node: Node<'_>) -> Vec<String> {
    ["/var/lib/kubelet/plugins_registry/drayman.dev", STATE]
        .into_iter()
        .flat_map(|directory| node.list(directory).unwrap_or_default())
        .filter(|name| name.contains(".sock"))
        .collect()
}

/// Watches the companion's writes for claims.
struct Written(inotify::EventStream<[u8; 4096]>);

impl Written {
    fn expect(directories: [PathBuf; 2]) -> anyhow::Result<Self> {
        let inotify = Inotify::init()?;
        for directory in directories {
            let steps = WatchMask::CREATE | WatchMask::MODIFY | WatchMask::MOVED_TO | WatchMask::DELETE;
            inotify.watches().add(directory, steps)?;
        }
        Ok(Self(inotify.into_event_stream([0; 4096])?))
    }

    /// Waits for the n-th change. False if the writes end before it.
    async fn reaches(&mut self, n: usize) -> anyhow::Result<bool> {
        // Kubelet's first call comes after the scheduler's decision; the changes of one call follow immediately.
        let mut patience = PATIENCE;
        for seen in 0..n {
            match timeout(patience, self.0.next()).await {
                Ok(change) => drop(change.transpose()?),
                Err(_) if seen > 0 => return Ok(false),
                Err(_) => anyhow::bail!("kubelet asks for nothing"),
            }
            patience = Duration::from_secs(5);
        }
        Ok(true)
    }
}

#[tokio::test]
async fn a_sigterm_within_a_call_fails_no_call_and_loses_nothing() -> anyhow::Result<()> {
    let (stage, controller) = stage(1).await?;
    let node = stage.cluster.node(0);
    let written = || Written::expect([node.path(STATE), node.path(CDI)]);
    let mut companion = stage.companion(0, CONFIGURATION)?;
    let mut moments = [0, 0];
    // `tests/faults` sends SIGTERM at every change; with a real kubelet, a few suffice by default.
    let every = std::env::var_os(EVERY_CHANGE).is_some();
    settled(&stage, &companion, 1).await?;
    for n in (1..).step_by(if every { 1 } else { 4 }) {
        let pod = format!("pod-{n}");
        let mut changes = written()?;
        stage.make_pod(&pod).await?;
        let within_prepare = changes.reaches(n).await?;
        companion.end().await?;
        assert_eq!(
            sockets(node),
            Vec::<String>::new(),
            "after change {n} of a Prepare"
        );
        companion = stage.companion(0, CONFIGURATION)?;
        settled(&stage, &companion, 1).await?;
        look_inside(&stage, &pod).await?.only_device();
        // The call in progress was answered.
        assert_eq!(
            failed_prepares(&stage, &pod).await?,
            Vec::<String>::new(),
            "after change {n}"
        );
        let claim = stage.claim_of(&pod, "allocated", is_allocated).await?;
        let (uid, name) = (
            claim.metadata.uid.unwrap_or_default(),
            claim.metadata.name.unwrap_or_default(),
        );
        assert_eq!(traces(node, &uid)?.len(), 2, "{:?}", traces(node, &uid)?);

        let mut changes = written()?;
        let delete = ["delete", "pod", &pod, "--wait=false"];
        stage.cluster.kubectl(&delete).await?;
        let within_unprepare = changes.reaches(n).await?;
        companion.end().await?;
        assert_eq!(
            sockets(node),
            Vec::<String>::new(),
            "after change {n} of an Unprepare"
        );
        companion = stage.companion(0, CONFIGURATION)?;
        stage.wait(stage.claims(), &name, "gone", is_gone()).await?;
        assert_eq!(traces(node, &uid)?, Vec::<String>::new());
        // A companion can be ended only after its start.
        settled(&stage, &companion, 1).await?;
        for (moment, within) in moments.iter_mut().zip([within_prepare, within_unprepare]) {
            *moment += usize::from(within);
        }
        if !within_prepare && !within_unprepare {
            break;
        }
    }
    let [prepare, unprepare] = moments;
    println!("ended after each of {prepare} changes of a Prepare and {unprepare} of an Unprepare");
    let (of_prepare, of_unprepare) = if every { (6, 3) } else { (2, 1) };
    assert!(prepare >= of_prepare, "two checkpoints and a CDI file: {prepare}");
    assert!(
        unprepare >= of_unprepare,
        "a CDI file and a checkpoint: {unprepare}"
    );
    companion.end().await?;
    controller.end().await?;
    stage.cluster.stop().await
}

/// Waits until a companion reports that another one runs.
async fn waits(second: &Program) -> anyhow::Result<()> {
    second.logged("another companion runs on this node").await
}

/// The same companion or, if it has timed out meanwhile, a restarted one.
async fn still_waits(stage: &Stage, mut second: Program) -> anyhow::Result<Program> {
    if second.has_ended()? {
        second = stage.companion(0, CONFIGURATION)?;
        waits(&second).await?;
    }
    Ok(second)
}

#[tokio::test]
async fn of_two_companions_one_serves_and_the_other_takes_over() -> anyhow::Result<()> {
    let (stage, controller) = stage(4).await?;
    let node = stage.cluster.node(0);
    let first = stage.companion(0, CONFIGURATION)?;
    settled(&stage, &first, 4).await?;
    let mut devices = BTreeSet::new();
    let mut serve = async |pod: &str| {
        devices.insert(look_inside(&stage, pod).await?.only_device().to_owned());
        anyhow::Ok(())
    };
    stage.make_pod("before").await?;
    serve("before").await?;

    // As in an update with maxSurge, where the next one starts before the last has ended.
    let second = stage.companion(0, CONFIGURATION)?;
    waits(&second).await?;
    stage.make_pod("between").await?;
    serve("between").await?;
    let uid = async |pod: &str| {
        let claim = stage.claim_of(pod, "allocated", is_allocated).await?;
        anyhow::Ok(claim.metadata.uid.unwrap_or_default())
    };
    let between = uid("between").await?;
    assert!(!second.log()?.contains(&between) && !second.log()?.contains(REGISTERED));
    let second = still_waits(&stage, second).await?;
    first.end().await?;
    settled(&stage, &second, 4).await?;
    stage.make_pod("after").await?;
    serve("after").await?;

    // The serving companion dies during a Prepare while the other one waits.
    let mut second = second;
    let third = stage.companion(0, CONFIGURATION)?;
    waits(&third).await?;
    let change = Change::expect(node.path(STATE))?;
    stage.make_pod("within").await?;
    change.seen().await?;
    let third = still_waits(&stage, third).await?;
    second.kill().await?;
    settled(&stage, &third, 4).await?;
    serve("within").await?;
    assert_eq!(devices.len(), 4, "{devices:?}");
    stage.make_pod("late").await?;
    stage
        .wait_for_event("late", "NoSuitableDevice", "4 of 4 held")
        .await?;
    for pod in ["before", "between", "after", "within"] {
        let uid = uid(pod).await?;
        assert_eq!(traces(node, &uid)?.len(), 2, "{pod}: {:?}", traces(node, &uid)?);
        stage.cluster.kubectl(&["delete", "pod", pod]).await?;
        assert_eq!(traces(node, &uid)?, Vec::<String>::new(), "{pod}");
    }
    look_inside(&stage, "late").await?.only_device();
    third.end().await?;
    controller.end().await?;
    stage.cluster.stop().await
}

/// Number of pods that kubelet has synced once, with any result. Kubelet 1.27 reports a failed Prepare neither in its log nor as an event,
/// and retries the pod a minute later.
async fn first_tries(stage: &Stage) -> anyhow::Result<u64> {
    let path = format!("/api/v1/nodes/{}/proxy/metrics", stage.cluster.node(0).name());
    let metrics = stage.cluster.kubectl(&["get", "--raw", &path]).await?;
    let series = r#"kubelet_pod_worker_duration_seconds_count{operation_type="create"} "#;
    let count = metrics.lines().find_map(|line| line.strip_prefix(series));
    Ok(count.map_or(Ok(0), str::parse)?)
}

/// Waits until `count` files of a claim are left.
pub(crate) async fn until_traces(node: Node<'_>, uid: &str, count: usize) -> anyhow::Result<()> {
    let until = Instant::now() + PATIENCE;
    while traces(node, uid)?.len() != count {
        ensure!(Instant::now() < until, "{:?}", traces(node, uid)?);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

/// Sends SIGSTOP to a companion at its first change in a directory. Runs in its own thread because the call takes only milliseconds.
fn stop_at_first_change(companion: &Program, directory: PathBuf) -> anyhow::Result<oneshot::Receiver<()>> {
    let mut inotify = Inotify::init()?;
    inotify
        .watches()
        .add(directory, WatchMask::CREATE | WatchMask::DELETE)?;
    let process = Pid::from_raw(i32::try_from(companion.id()?)?).context("a pid")?;
    let (sender, stopped) = oneshot::channel();
    std::thread::spawn(move || {
        let stopped = inotify
            .read_events_blocking(&mut [0; 4096])
            .is_ok_and(|_| kill_process(process, Signal::STOP).is_ok());
        if stopped {
            let _ = sender.send(());
        }
    });
    Ok(stopped)
}

/// Uid and name of a pod's claim.
async fn claim_of(stage: &Stage, pod: &str) -> anyhow::Result<(String, String)> {
    let claim = stage.claim_of(pod, "allocated", is_allocated).await?;
    let (uid, name) = (claim.metadata.uid, claim.metadata.name);
    Ok((uid.unwrap_or_default(), name.unwrap_or_default()))
}

/// Attempts to stop a companion during its call.
const ATTEMPTS: usize = 20;

/// Creates a pod and stops the companion during its Prepare. Returns the pod and the uid of its claim.
async fn stopped_within_prepare(stage: &Stage, companion: &Program) -> anyhow::Result<(String, String)> {
    let node = stage.cluster.node(0);
    for attempt in 0..ATTEMPTS {
        let stopped = stop_at_first_change(companion, node.path(STATE))?;
        let pod = format!("pod-{attempt}");
        stage.make_pod(&pod).await?;
        timeout(PATIENCE, stopped).await??;
        let (uid, name) = claim_of(stage, &pod).await?;
        if traces(node, &uid)?.len() < 2 {
            return Ok((pod, uid));
        }
        companion.signal(Signal::CONT)?;
        look_inside(stage, &pod).await?;
        stage.cluster.kubectl(&["delete", "pod", &pod]).await?;
        stage.wait(stage.claims(), &name, "gone", is_gone()).await?;
    }
    anyhow::bail!("the companion was always faster")
}

#[tokio::test]
async fn an_abandoned_call_is_done_and_found_done_later() -> anyhow::Result<()> {
    let (stage, controller) = stage(1).await?;
    let node = stage.cluster.node(0);
    let companion = stage.companion(0, CONFIGURATION)?;
    settled(&stage, &companion, 1).await?;
    // The companion is stopped until kubelet gives up, after 45 s (10 s before 1.28).
    let (mut pod, mut uid) = stopped_within_prepare(&stage, &companion).await?;
    let began = Instant::now();
    let told = stage.cluster.minor() >= 28;
    if told {
        stage.wait_for_event(&pod, FAILED, "DeadlineExceeded").await?;
    } else {
        let before = first_tries(&stage).await?;
        while first_tries(&stage).await? == before {
            ensure!(began.elapsed() < PATIENCE, "kubelet still waits");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
    println!("kubelet gave up after {:?}", began.elapsed());
    // The rest comes from the abandoned call: no kubelet runs to make another one.
    node.stop("kubelet", 9).await?;
    companion.signal(Signal::CONT)?;
    until_traces(node, &uid, 2).await?;
    node.start("kubelet").await?;
    let device = look_inside(&stage, &pod).await?.only_device().to_owned();
    let failed = failed_prepares(&stage, &pod).await?;
    assert_eq!(failed.len(), usize::from(told), "{failed:?}");

    // The companion is stopped during an Unprepare until kubelet is dead. The next kubelet requests the same Unprepare again.
    let mut within = false;
    for attempt in 0..ATTEMPTS {
        let stopped = stop_at_first_change(&companion, node.path(CDI))?;
        let delete = ["delete", "pod", &pod, "--wait=false"];
        stage.cluster.kubectl(&delete).await?;
        timeout(PATIENCE, stopped).await??;
        within = !traces(node, &uid)?.is_empty();
        if within {
            break;
        }
        companion.signal(Signal::CONT)?;
        pod = format!("again-{attempt}");
        stage.make_pod(&pod).await?;
        look_inside(&stage, &pod).await?;
        uid = claim_of(&stage, &pod).await?.0;
    }
    assert!(within, "the companion was always faster");
    let (_, name) = claim_of(&stage, &pod).await?;
    node.stop("kubelet", 9).await?;
    companion.signal(Signal::CONT)?;
    until_traces(node, &uid, 0).await?;
    let list = node.read("/var/lib/kubelet/dra_manager_state")?;
    assert!(list.contains(&uid), "kubelet has not heard it: {list}");
    node.start("kubelet").await?;
    stage.wait(stage.claims(), &name, "gone", is_gone()).await?;
    stage.make_pod("next").await?;
    assert_eq!(look_inside(&stage, "next").await?.only_device(), device);
    companion.end().await?;
    controller.end().await?;
    stage.cluster.stop().await
}

/// Resident memory of a process in bytes.
fn memory(companion: &Program) -> anyhow::Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{}/statm", companion.id()?))?;
    let pages: u64 = status.split(' ').nth(1).unwrap_or_default().parse()?;
    Ok(pages * 4096)
}

#[tokio::test]
async fn silent_callers_and_garbage_do_not_keep_kubelet_out() -> anyhow::Result<()> {
    /// Connection preface of an HTTP/2 client.
    const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    /// A header block of 8 KiB that is never completed.
    const HEADERS: &[u8] = b"\0\x20\0\x01\0\0\0\0\x01";
    /// Per socket.
    const CALLERS: usize = 1000;
    /// Upper limits: connections per socket, and other open files of a companion.
    const CONNECTIONS: usize = 64;
    const OTHER_FILES: usize = 50;
    let (stage, controller) = stage(2).await?;
    let node = stage.cluster.node(0);
    let companion = stage.companion(0, CONFIGURATION)?;
    settled(&stage, &companion, 2).await?;
    stage.make_pod("before").await?;
    let before = look_inside(&stage, "before").await?;
    let rest = memory(&companion)?;
    let names: Vec<String> = node
        .list(STATE)?
        .into_iter()
        .filter(|name| name.contains(".sock"))
        .collect();
    assert!(names.len() >= 2, "{names:?}");
    let registrations: Vec<PathBuf> = node
        .list("/var/lib/kubelet/plugins_registry/drayman.dev")?
        .into_iter()
        .map(|name| node.path(format!("/var/lib/kubelet/plugins_registry/drayman.dev/{name}")))
        .collect();
    let mut callers = Vec::new();
    let mut refused = 0;
    for socket in names
        .iter()
        .map(|name| node.path(format!("{STATE}/{name}")))
        .chain(registrations)
    {
        for number in 0..CALLERS {
            let mut caller = UnixStream::connect(&socket).await?;
            let said = match number % 3 {
                0 => Ok(()),
                1 => caller.write_all(&[PREFACE, HEADERS, &[0; 100]].concat()).await,
                _ => caller.write_all(&[0xff; 500]).await,
            };
            refused += usize::from(said.is_err());
            callers.push(caller);
        }
    }
    // Connections are accepted in order. Kubelet connects after all of them, not in between.
    for last in callers.iter_mut().skip(CALLERS - 1).step_by(CALLERS) {
        timeout(PATIENCE, last.read_u8())
            .await
            .context("the last caller of a socket is not closed")?
            .unwrap_or_default();
    }
    println!(
        "{} callers, of which {refused} were cut off while they spoke; {} KiB more memory",
        callers.len(),
        memory(&companion)?.saturating_sub(rest) / 1024
    );
    // Kubelet's own connection is not closed in favour of others.
    stage.make_pod("among-them").await?;
    let among = look_inside(&stage, "among-them").await?;
    assert_ne!(among.only_device(), before.only_device());
    assert_eq!(failed_prepares(&stage, "among-them").await?, Vec::<String>::new());
    let open = std::fs::read_dir(format!("/proc/{}/fd", companion.id()?))?.count();
    let limit = sockets(node).len() * CONNECTIONS + OTHER_FILES;
    assert!(open <= limit, "{open} files are open, of {limit}");
    stage.cluster.kubectl(&["delete", "pod", "before"]).await?;
    stage.make_pod("after").await?;
    assert_eq!(look_inside(&stage, "after").await?, before);
    // A restarted kubelet connects once the others are closed, after ten seconds.
    node.restart_kubelet().await?;
    let patience = format!("--timeout={}s", PATIENCE.as_secs());
    for pod in ["among-them", "after"] {
        stage.cluster.kubectl(&["delete", "pod", pod, &patience]).await?;
    }
    stage.make_pod("last").await?;
    look_inside(&stage, "last").await?.only_device();
    drop(callers);
    companion.end().await?;
    controller.end().await?;
    stage.cluster.stop().await
}
