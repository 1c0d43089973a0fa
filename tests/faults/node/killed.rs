//! SIGKILL after every change on disk, and at random times.

use std::time::Duration;

use futures::StreamExt as _;
use inotify::{Inotify, WatchMask};

use super::fixture::{Kubelet, Node, StructuredKubelet};
use super::process::Process;
use super::structured::structured_node;

const A: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0a";
const B: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0b";
const C: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0c";

/// A kubelet client of either mode.
enum Caller {
    Classic(Kubelet),
    Structured(StructuredKubelet),
}

impl Caller {
    async fn of(node: &Node, structured: bool) -> Self {
        if structured {
            Self::Structured(node.structured_kubelet().await)
        } else {
            Self::Classic(node.kubelet().await)
        }
    }

    /// In structured mode, stores the claim with these devices first.
    async fn prepare(&mut self, uid: &str, devices: &[&str]) -> Result<Vec<String>, String> {
        match self {
            Self::Classic(kubelet) => kubelet.prepare(uid, devices).await,
            Self::Structured(kubelet) => kubelet.prepare(uid, uid).await,
        }
    }

    async fn unprepare(&mut self, uid: &str) -> Result<(), String> {
        match self {
            Self::Classic(kubelet) => kubelet.unprepare(uid).await,
            Self::Structured(kubelet) => kubelet.unprepare(uid, uid).await,
        }
    }
}

/// Waits for the n-th file change below the checkpoint and CDI directories.
async fn changes(node: &Node, n: usize) {
    let inotify = Inotify::init().unwrap();
    let mask = WatchMask::CREATE
        | WatchMask::MODIFY
        | WatchMask::ATTRIB
        | WatchMask::CLOSE_WRITE
        | WatchMask::MOVE
        | WatchMask::DELETE;
    for directory in ["kubelet/plugins/drayman.dev", "cdi"] {
        inotify.watches().add(node.path(directory), mask).unwrap();
    }
    let events = inotify.into_event_stream([0; 4096]).unwrap();
    events.take(n).for_each(|_| async {}).await;
}

/// Asserts that the next process is consistent: kubelet's next calls succeed, no claim is lost and nothing is left.
async fn check(node: &Node, structured: bool, answered: bool) {
    let process = Process::start(node).await;
    let mut kubelet = Caller::of(node, structured).await;
    if answered {
        let refusal = kubelet.prepare(B, &["test-0"]).await.unwrap_err();
        assert!(refusal.contains("held"), "a successful call is kept: {refusal}");
    }
    let ids = kubelet.prepare(A, &["test-0", "test-1"]).await.unwrap();
    let id = format!("drayman.dev/claim={A}");
    let expected = if structured {
        vec![format!("{id}-test-0"), format!("{id}-test-1")]
    } else {
        vec![id]
    };
    assert_eq!(ids, expected);
    assert_eq!(node.cdi_files(), [format!("drayman.dev-claim_{A}.json")]);
    let described = if structured { vec![A] } else { Vec::new() };
    assert_eq!(node.claims_with_metadata(), described);
    kubelet.unprepare(A).await.unwrap();
    assert_eq!(node.cdi_files(), Vec::<String>::new());
    assert_eq!(node.claims_with_metadata(), Vec::<String>::new());
    kubelet.prepare(B, &["test-0"]).await.unwrap();
    kubelet.unprepare(B).await.unwrap();
    let log = process.log();
    assert!(
        !log.contains("CheckpointLost"),
        "no kill damages a checkpoint: {log}"
    );
    process.kill();
}

/// The call during which the companion is killed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Call {
    Prepare,
    Unprepare,
}

/// Kills a companion at the n-th change on disk during a call, for each n, and checks the next one. Returns the number of changes.
async fn kill_at_every_change_of(call: Call, structured: bool) -> usize {
    let node = if structured {
        structured_node()
    } else {
        Node::new()
    };
    let Some(node) = node else {
        return usize::MAX;
    };
    if structured {
        node.allocate(A, A, &["test-0", "test-1"]);
        node.allocate(B, B, &["test-0"]);
    }
    let mut kills = 0;
    for n in 1.. {
        let process = Process::start(&node).await;
        let mut kubelet = Caller::of(&node, structured).await;
        // The directories exist and no write is in progress.
        if structured {
            node.until_checkpoint(|text| text.contains("nodeUid") && text.contains("servesStructuredClaims"))
                .await;
        } else {
            node.api.until_ready("True", "Serving").await;
            node.until_checkpoint(|text| text.contains("\"servesClaims\":true"))
                .await;
        }
        if call == Call::Unprepare {
            kubelet.prepare(A, &["test-0", "test-1"]).await.unwrap();
        }
        let asked = tokio::spawn(async move {
            match call {
                Call::Prepare => kubelet.prepare(A, &["test-0", "test-1"]).await.is_ok(),
                Call::Unprepare => kubelet.unprepare(A).await.is_ok(),
            }
        });
        let changes = changes(&node, n);
        let mut asked = asked;
        tokio::pin!(changes);
        // Changes of the call are reported before its answer or a moment later.
        let (reached, answered) = tokio::select! {
            biased;
            () = &mut changes => {
                process.kill();
                (true, asked.await)
            }
            answered = &mut asked => {
                let late = tokio::time::timeout(Duration::from_millis(200), changes);
                let reached = late.await.is_ok();
                process.kill();
                (reached, answered)
            }
        };
        let answered = answered.unwrap();
        check(&node, structured, answered && call == Call::Prepare).await;
        if !reached {
            break;
        }
        kills = n;
    }
    println!("killed at {kills} points");
    kills
}

#[tokio::test]
async fn a_kill_after_each_disk_change_of_a_prepare_loses_nothing() {
    let kills = kill_at_every_change_of(Call::Prepare, false).await;
    assert!(kills >= 6, "two checkpoints and a CDI file: {kills}");
}

#[tokio::test]
async fn a_kill_after_each_disk_change_of_an_unprepare_loses_nothing() {
    let kills = kill_at_every_change_of(Call::Unprepare, false).await;
    assert!(kills >= 3, "a CDI file and a checkpoint: {kills}");
}

#[tokio::test]
async fn a_kill_after_each_disk_change_loses_no_structured_claim() {
    let kills = kill_at_every_change_of(Call::Prepare, true).await;
    assert!(kills >= 6, "two checkpoints and a CDI file: {kills}");
    let kills = kill_at_every_change_of(Call::Unprepare, true).await;
    assert!(kills >= 3, "a CDI file and a checkpoint: {kills}");
}

#[tokio::test]
async fn kills_at_random_times_during_many_calls_lose_nothing() {
    let Some(node) = Node::new() else { return };
    let process = Process::start(&node).await;
    node.kubelet().await.prepare(C, &["test-2"]).await.unwrap();
    process.kill();
    // A fixed random generator, so that failures are reproducible.
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    let mut answered = 0;
    // Runs longer on a machine that is too slow to answer any call in that time.
    for round in 1_u64.. {
        if round > 12 && answered > 0 {
            break;
        }
        assert!(round < 60, "no call is answered");
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let process = Process::start(&node).await;
        let mut kubelet = node.kubelet().await;
        let calls = tokio::spawn(async move {
            let mut answered = 0;
            while kubelet.prepare(A, &["test-0", "test-1"]).await.is_ok()
                && kubelet.unprepare(A).await.is_ok()
            {
                answered += 1;
            }
            answered
        });
        tokio::time::sleep(Duration::from_micros(random % (5_000 * round.max(12)))).await;
        process.kill();
        answered += calls.await.unwrap();
        let process = Process::start(&node).await;
        let refusal = node.kubelet().await.prepare(B, &["test-2"]).await.unwrap_err();
        assert!(
            refusal.contains("held"),
            "the held claim is still held: {refusal}"
        );
        node.kubelet().await.unprepare(A).await.unwrap();
        process.kill();
    }
    println!("{answered} claims completed between the kills");
    let process = Process::start(&node).await;
    node.kubelet().await.unprepare(C).await.unwrap();
    assert_eq!(node.cdi_files(), Vec::<String>::new());
    process.kill();
}
