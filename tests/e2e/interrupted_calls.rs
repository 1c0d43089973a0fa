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
use crate::harness::{Node, TIMEOUT};
use crate::pods::{
    CONFIGURATION, MINORS, assert_prepared, assert_unprepared, claim_files, look_inside, make_devices,
    wait_for_inventory,
};
use crate::setup::{Program, REGISTERED, Setup};

/// Directories that the companion writes to for claims, with its sockets.
const STATE: &str = "/var/lib/kubelet/plugins/drayman.dev";
const CDI: &str = "/run/cdi";
const FAILED: &str = "FailedPrepareDynamicResources";
/// Set by `make test-all`: ends the companion after each change instead of every fourth.
const EVERY_CHANGE: &str = "DRAYMAN_TEST_EVERY_CHANGE";

/// A node with this many devices for claims, without a controller.
async fn start(devices: usize) -> anyhow::Result<(Setup, Program)> {
    let setup = Setup::start(1).await?;
    make_devices(setup.cluster.node(0), "drayman-test-", &MINORS[..devices])?;
    setup.make_template(None).await?;
    let controller = setup.controller()?;
    Ok((setup, controller))
}

/// Waits until a companion serves kubelet and has finished its own writes.
async fn until_idle(setup: &Setup, companion: &Program, devices: usize) -> anyhow::Result<()> {
    wait_for_inventory(setup, u32::try_from(devices)?).await?;
    companion.logged(REGISTERED).await?;
    let checkpoint = format!("{STATE}/checkpoint.json");
    let until = Instant::now() + TIMEOUT;
    let written = || setup.cluster.node(0).read(&checkpoint);
    while !written().is_ok_and(|text| text.contains("\"servesClaims\":true")) {
        ensure!(Instant::now() < until, "{:?}", written());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // The previous companion's checkpoint may look the same, so this waits until nothing was written for a second.
    let node = setup.cluster.node(0);
    let mut changes = Written::expect([node.path(STATE), node.path(CDI)])?;
    while timeout(Duration::from_secs(1), changes.0.next()).await.is_ok() {
        ensure!(Instant::now() < until, "the companion does not come to rest");
    }
    Ok(())
}

/// Prepare failures that kubelet reports, except those because it may not read the claim yet: the API server's node authorizer
/// (`plugin/pkg/auth/authorizer/node`) may learn of a pod after the node does.
async fn failed_prepares(setup: &Setup, pod: &str) -> anyhow::Result<Vec<String>> {
    let mut messages = setup.event_messages(pod, FAILED).await?;
    messages.retain(|text| {
        !text.contains("failed to fetch ResourceClaim") || !text.contains("no relationship found")
    });
    Ok(messages)
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
        let mut limit = TIMEOUT;
        for seen in 0..n {
            match timeout(limit, self.0.next()).await {
                Ok(change) => drop(change.transpose()?),
                Err(_) if seen > 0 => return Ok(false),
                Err(_) => anyhow::bail!("kubelet asks for nothing"),
            }
            limit = Duration::from_secs(5);
        }
        Ok(true)
    }
}

#[tokio::test]
async fn a_sigterm_within_a_call_fails_no_call_and_loses_nothing() -> anyhow::Result<()> {
    let (setup, controller) = start(1).await?;
    let node = setup.cluster.node(0);
    let written = || Written::expect([node.path(STATE), node.path(CDI)]);
    let mut companion = setup.companion(0, CONFIGURATION)?;
    let mut moments = [0, 0];
    // `tests/faults` sends SIGTERM at every change; with a real kubelet, a few suffice by default.
    let every = std::env::var_os(EVERY_CHANGE).is_some();
    until_idle(&setup, &companion, 1).await?;
    for n in (1..).step_by(if every { 1 } else { 4 }) {
        let pod = format!("pod-{n}");
        let mut changes = written()?;
        setup.make_pod(&pod).await?;
        let within_prepare = changes.reaches(n).await?;
        companion.end().await?;
        assert_eq!(
            sockets(node),
            Vec::<String>::new(),
            "after change {n} of a Prepare"
        );
        companion = setup.companion(0, CONFIGURATION)?;
        until_idle(&setup, &companion, 1).await?;
        look_inside(&setup, &pod).await?.only_device();
        // The call in progress was answered.
        assert_eq!(
            failed_prepares(&setup, &pod).await?,
            Vec::<String>::new(),
            "after change {n}"
        );
        let (uid, name) = setup.claim_ids(&pod).await?;
        assert_prepared(node, &uid)?;

        let mut changes = written()?;
        let delete = ["delete", "pod", &pod, "--wait=false"];
        setup.cluster.kubectl(&delete).await?;
        let within_unprepare = changes.reaches(n).await?;
        companion.end().await?;
        assert_eq!(
            sockets(node),
            Vec::<String>::new(),
            "after change {n} of an Unprepare"
        );
        companion = setup.companion(0, CONFIGURATION)?;
        setup.until_claim_gone(&name).await?;
        assert_unprepared(node, &uid)?;
        // A companion can be ended only after its start.
        until_idle(&setup, &companion, 1).await?;
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
    setup.end([companion, controller]).await
}

/// Waits until a companion reports that another one runs.
async fn until_waiting(second: &Program) -> anyhow::Result<()> {
    second.logged("another companion runs on this node").await
}

/// The same companion or, if it has timed out meanwhile, a restarted one.
async fn until_still_waiting(setup: &Setup, mut second: Program) -> anyhow::Result<Program> {
    if second.has_ended()? {
        second = setup.companion(0, CONFIGURATION)?;
        until_waiting(&second).await?;
    }
    Ok(second)
}

#[tokio::test]
async fn of_two_companions_one_serves_and_the_other_takes_over() -> anyhow::Result<()> {
    let (setup, controller) = start(4).await?;
    let node = setup.cluster.node(0);
    let first = setup.companion(0, CONFIGURATION)?;
    until_idle(&setup, &first, 4).await?;
    let mut devices = BTreeSet::new();
    let mut serve = async |pod: &str| {
        devices.insert(look_inside(&setup, pod).await?.only_device().to_owned());
        anyhow::Ok(())
    };
    setup.make_pod("before").await?;
    serve("before").await?;

    // As in an update with maxSurge, where the next one starts before the last has ended.
    let mut second = setup.companion(0, CONFIGURATION)?;
    until_waiting(&second).await?;
    setup.make_pod("between").await?;
    serve("between").await?;
    let (between, _) = setup.claim_ids("between").await?;
    assert!(!second.log()?.contains(&between) && !second.log()?.contains(REGISTERED));
    // It waits for 30 s at most, of which the pod may have taken all but an instant. A new one is still there when the first has ended.
    second.kill().await?;
    second = setup.companion(0, CONFIGURATION)?;
    until_waiting(&second).await?;
    first.end().await?;
    until_idle(&setup, &second, 4).await?;
    setup.make_pod("after").await?;
    serve("after").await?;

    // The serving companion dies during a Prepare while the other one waits.
    let third = setup.companion(0, CONFIGURATION)?;
    until_waiting(&third).await?;
    let change = Change::expect(node.path(STATE))?;
    setup.make_pod("within").await?;
    change.seen().await?;
    let third = until_still_waiting(&setup, third).await?;
    second.kill().await?;
    until_idle(&setup, &third, 4).await?;
    serve("within").await?;
    assert_eq!(devices.len(), 4, "{devices:?}");
    setup.make_pod("late").await?;
    setup
        .wait_for_event("late", "NoSuitableDevice", "4 of 4 held")
        .await?;
    for pod in ["before", "between", "after", "within"] {
        let (uid, _) = setup.claim_ids(pod).await?;
        assert_eq!(claim_files(node, &uid)?.len(), 2, "{pod}");
        setup.cluster.kubectl(&["delete", "pod", pod]).await?;
        assert_eq!(claim_files(node, &uid)?, Vec::<String>::new(), "{pod}");
    }
    look_inside(&setup, "late").await?.only_device();
    setup.end([third, controller]).await
}

/// Number of pods that kubelet has synced once, with any result. Kubelet 1.27 reports a failed Prepare neither in its log nor as an event,
/// and retries the pod a minute later.
async fn first_tries(setup: &Setup) -> anyhow::Result<u64> {
    let path = format!("/api/v1/nodes/{}/proxy/metrics", setup.cluster.node(0).name());
    let metrics = setup.cluster.kubectl(&["get", "--raw", &path]).await?;
    let series = r#"kubelet_pod_worker_duration_seconds_count{operation_type="create"} "#;
    let count = metrics.lines().find_map(|line| line.strip_prefix(series));
    Ok(count.map_or(Ok(0), str::parse)?)
}

/// Waits until `count` files of a claim are left.
pub(crate) async fn until_claim_files(node: Node<'_>, uid: &str, count: usize) -> anyhow::Result<()> {
    let until = Instant::now() + TIMEOUT;
    while claim_files(node, uid)?.len() != count {
        ensure!(Instant::now() < until, "{:?}", claim_files(node, uid)?);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

/// Sends SIGSTOP to a companion at its first change in a directory. Runs in its own thread because the call takes only milliseconds.
pub(crate) fn stop_at_first_change(
    companion: &Program,
    directory: PathBuf,
) -> anyhow::Result<oneshot::Receiver<()>> {
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

/// Attempts to stop a companion during its call.
const ATTEMPTS: usize = 20;

/// Creates a pod and stops the companion during its Prepare. Returns the pod and the uid of its claim.
async fn stopped_within_prepare(setup: &Setup, companion: &Program) -> anyhow::Result<(String, String)> {
    let node = setup.cluster.node(0);
    for attempt in 0..ATTEMPTS {
        let stopped = stop_at_first_change(companion, node.path(STATE))?;
        let pod = format!("pod-{attempt}");
        setup.make_pod(&pod).await?;
        timeout(TIMEOUT, stopped).await??;
        let (uid, name) = setup.claim_ids(&pod).await?;
        if claim_files(node, &uid)?.len() < 2 {
            return Ok((pod, uid));
        }
        companion.signal(Signal::CONT)?;
        look_inside(setup, &pod).await?;
        setup.cluster.kubectl(&["delete", "pod", &pod]).await?;
        setup.until_claim_gone(&name).await?;
    }
    anyhow::bail!("the companion was always faster")
}

#[tokio::test]
async fn an_abandoned_call_is_done_and_found_done_later() -> anyhow::Result<()> {
    let (setup, controller) = start(1).await?;
    let node = setup.cluster.node(0);
    let companion = setup.companion(0, CONFIGURATION)?;
    until_idle(&setup, &companion, 1).await?;
    // The companion is stopped until kubelet gives up, after 45 s (10 s before 1.28).
    let (mut pod, mut uid) = stopped_within_prepare(&setup, &companion).await?;
    let began = Instant::now();
    let is_reported = setup.cluster.minor() >= 28;
    if is_reported {
        setup.wait_for_event(&pod, FAILED, "DeadlineExceeded").await?;
    } else {
        let before = first_tries(&setup).await?;
        while first_tries(&setup).await? == before {
            ensure!(began.elapsed() < TIMEOUT, "kubelet still waits");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
    println!("kubelet gave up after {:?}", began.elapsed());
    // The rest comes from the abandoned call: no kubelet runs to make another one.
    node.stop("kubelet", 9).await?;
    companion.signal(Signal::CONT)?;
    until_claim_files(node, &uid, 2).await?;
    node.start("kubelet").await?;
    let device = look_inside(&setup, &pod).await?.only_device().to_owned();
    let mut failed = failed_prepares(&setup, &pod).await?;
    // The restarted kubelet may try before it has found the companion again.
    failed.retain(|text| !text.contains("not found in the list of registered"));
    assert_eq!(failed.len(), usize::from(is_reported), "{failed:?}");

    // The companion is stopped during an Unprepare until kubelet is dead. The next kubelet requests the same Unprepare again.
    let mut within = false;
    for attempt in 0..ATTEMPTS {
        let stopped = stop_at_first_change(&companion, node.path(CDI))?;
        let delete = ["delete", "pod", &pod, "--wait=false"];
        setup.cluster.kubectl(&delete).await?;
        timeout(TIMEOUT, stopped).await??;
        within = !claim_files(node, &uid)?.is_empty();
        if within {
            break;
        }
        companion.signal(Signal::CONT)?;
        pod = format!("again-{attempt}");
        setup.make_pod(&pod).await?;
        look_inside(&setup, &pod).await?;
        uid = setup.claim_ids(&pod).await?.0;
    }
    assert!(within, "the companion was always faster");
    let (_, name) = setup.claim_ids(&pod).await?;
    node.stop("kubelet", 9).await?;
    companion.signal(Signal::CONT)?;
    until_claim_files(node, &uid, 0).await?;
    let list = node.read("/var/lib/kubelet/dra_manager_state")?;
    assert!(list.contains(&uid), "kubelet has not heard it: {list}");
    node.start("kubelet").await?;
    setup.until_claim_gone(&name).await?;
    setup.make_pod("next").await?;
    assert_eq!(look_inside(&setup, "next").await?.only_device(), device);
    setup.end([companion, controller]).await
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
    let (setup, controller) = start(2).await?;
    let node = setup.cluster.node(0);
    let companion = setup.companion(0, CONFIGURATION)?;
    until_idle(&setup, &companion, 2).await?;
    setup.make_pod("before").await?;
    let before = look_inside(&setup, "before").await?;
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
            let sent = match number % 3 {
                0 => Ok(()),
                1 => caller.write_all(&[PREFACE, HEADERS, &[0; 100]].concat()).await,
                _ => caller.write_all(&[0xff; 500]).await,
            };
            refused += usize::from(sent.is_err());
            callers.push(caller);
        }
    }
    // Connections are accepted in order. Kubelet connects after all of them, not in between.
    for last in callers.iter_mut().skip(CALLERS - 1).step_by(CALLERS) {
        timeout(TIMEOUT, last.read_u8())
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
    setup.make_pod("among-them").await?;
    let among = look_inside(&setup, "among-them").await?;
    assert_ne!(among.only_device(), before.only_device());
    // Up to 1.28, kubelet connects for each call.
    if setup.cluster.minor() >= 29 {
        assert_eq!(failed_prepares(&setup, "among-them").await?, Vec::<String>::new());
    }
    let open = std::fs::read_dir(format!("/proc/{}/fd", companion.id()?))?.count();
    let limit = sockets(node).len() * CONNECTIONS + OTHER_FILES;
    assert!(open <= limit, "{open} files are open, of {limit}");
    setup.cluster.kubectl(&["delete", "pod", "before"]).await?;
    setup.make_pod("after").await?;
    assert_eq!(look_inside(&setup, "after").await?, before);
    // A restarted kubelet connects once the others are closed, after ten seconds.
    node.restart_kubelet().await?;
    let limit = format!("--timeout={}s", TIMEOUT.as_secs());
    for pod in ["among-them", "after"] {
        setup.cluster.kubectl(&["delete", "pod", pod, &limit]).await?;
    }
    setup.make_pod("last").await?;
    look_inside(&setup, "last").await?.only_device();
    drop(callers);
    setup.end([companion, controller]).await
}
