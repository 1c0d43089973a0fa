//! Full, read-only and failing disks.

use std::time::{Duration, Instant};

use super::fixture::{Kubelet, Node};
use super::process::{Mounts, Process, Start};
use crate::not_run::not_run;

const A: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0a";
const B: &str = "7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a0b";

/// Separate small disks for the checkpoint and the CDI files.
const TWO_DISKS: &str = "mkdir -p $NODE/kubelet/plugins $NODE/cdi\n\
    mount -t tmpfs -o size=128k none $NODE/kubelet/plugins\n\
    mount -t tmpfs -o size=64k none $NODE/cdi\n\
    mount --make-rprivate /";

struct Fixture {
    node: Node,
    mounts: Mounts,
}

impl Fixture {
    fn new(commands: &str) -> Option<Self> {
        let node = Node::new()?;
        let mounts = Mounts::new(&node, commands);
        Some(Self { node, mounts })
    }

    async fn start(&self) -> (Process, Kubelet) {
        let process = Start::new().within(&self.mounts).run(&self.node).await;
        let socket = self.mounts.sees(&self.node.dra_socket());
        (process, self.node.kubelet_at(&socket).await)
    }

    fn shell(&self, command: &str) {
        self.mounts.shell(&self.node, command);
    }

    fn cdi_files(&self) -> usize {
        std::fs::read_dir(self.mounts.sees(&self.node.path("cdi")))
            .unwrap()
            .filter(|entry| {
                let name = entry.as_ref().unwrap().file_name();
                name.to_string_lossy().starts_with("drayman.dev-claim_")
            })
            .count()
    }

    /// A claim is held when the disk fails. It stays held, and other claims are refused with a reason, even after a restart. Once the disk
    /// works again, everything recovers.
    async fn survives(&self, breaks: &str, heals: &str, restart: bool) {
        let (mut process, mut kubelet) = self.start().await;
        kubelet.prepare(A, &["test-0"]).await.unwrap();
        self.shell(breaks);
        for _ in 0..2 {
            let refusal = kubelet.prepare(B, &["test-1"]).await.unwrap_err();
            assert!(refusal.contains("cannot keep its records"), "{refusal}");
            let refusal = kubelet.prepare(B, &["test-0"]).await.unwrap_err();
            assert!(
                refusal.contains("held") || refusal.contains("cannot keep"),
                "{refusal}"
            );
            assert_eq!(
                kubelet.prepare(A, &["test-0"]).await.unwrap().len(),
                1,
                "unprepare needs no space"
            );
            if restart {
                process.kill();
                (process, kubelet) = self.start().await;
            }
        }
        self.shell(heals);
        kubelet.prepare(B, &["test-1"]).await.unwrap();
        let refusal = kubelet.prepare(B, &["test-0"]).await.unwrap_err();
        assert!(refusal.contains("prepared with test-1"), "{refusal}");
        kubelet.unprepare(A).await.unwrap();
        kubelet.unprepare(B).await.unwrap();
        assert_eq!(self.cdi_files(), 0);
        kubelet.prepare(B, &["test-0", "test-1"]).await.unwrap();
        assert!(process.stop().await.success());
    }
}

/// Fills a disk completely.
fn fill(directory: &str) -> String {
    format!("cat /dev/zero > $NODE/{directory}/fill 2>/dev/null; test -s $NODE/{directory}/fill")
}

#[tokio::test]
async fn a_full_disk_under_the_checkpoint_keeps_the_old_claims() {
    let Some(fixture) = Fixture::new(TWO_DISKS) else {
        return;
    };
    fixture
        .survives(&fill("kubelet/plugins"), "rm $NODE/kubelet/plugins/fill", false)
        .await;
}

#[tokio::test]
async fn a_full_disk_under_cdi_files_keeps_the_old_claims() {
    let Some(fixture) = Fixture::new(TWO_DISKS) else {
        return;
    };
    fixture.survives(&fill("cdi"), "rm $NODE/cdi/fill", true).await;
}

#[tokio::test]
async fn a_disk_that_becomes_read_only_keeps_the_old_claims() {
    for disk in ["kubelet/plugins", "cdi"] {
        let Some(fixture) = Fixture::new(TWO_DISKS) else {
            return;
        };
        fixture
            .survives(
                &format!("mount -o remount,ro $NODE/{disk}"),
                &format!("mount -o remount,rw $NODE/{disk}"),
                false,
            )
            .await;
    }
}

#[tokio::test]
async fn an_unprepare_on_a_broken_disk_is_refused_and_frees_nothing() {
    let Some(fixture) = Fixture::new(TWO_DISKS) else {
        return;
    };
    let (process, mut kubelet) = fixture.start().await;
    kubelet.prepare(A, &["test-0"]).await.unwrap();
    fixture.shell("mount -o remount,ro $NODE/kubelet/plugins");
    let refusal = kubelet.unprepare(A).await.unwrap_err();
    assert!(refusal.contains("Read-only"), "{refusal}");
    assert!(kubelet.prepare(B, &["test-0"]).await.is_err());
    fixture.shell("mount -o remount,rw $NODE/kubelet/plugins");
    kubelet.unprepare(A).await.unwrap();
    kubelet.prepare(B, &["test-0"]).await.unwrap();
    assert!(process.stop().await.success());
}

#[tokio::test]
async fn a_disk_with_failing_writes_is_reported_and_claims_are_kept() {
    // A file system on a loop device whose backing disk is full: flushing new data fails with EIO.
    let broken = "mkdir -p $NODE/backing $NODE/kubelet/plugins\n\
        mount -t tmpfs -o size=6m none $NODE/backing\n\
        truncate -s 16m $NODE/backing/image\n\
        mkfs.ext4 -q -F -O ^has_journal -E lazy_itable_init=0,nodiscard $NODE/backing/image 2>$NODE/mkfs || exit 0\n\
        mount -o loop,errors=continue $NODE/backing/image $NODE/kubelet/plugins 2>$NODE/mkfs && touch $NODE/loop";
    let Some(node) = Node::new() else { return };
    let mounts = Mounts::new(&node, &format!("{{ {broken}\n}} || true"));
    if !node.path("loop").exists() {
        return not_run("there is no loop device or no mkfs.ext4");
    }
    let fixture = Fixture { node, mounts };
    let (process, mut kubelet) = fixture.start().await;
    kubelet.prepare(A, &["test-0"]).await.unwrap();
    fixture.shell("cat /dev/zero > $NODE/backing/fill 2>/dev/null; test -s $NODE/backing/fill");
    // Existing blocks can still be written, new ones fail. Sooner or later a claim hits one.
    let mut refused = None;
    for number in 0..400 {
        let uid = format!("7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f{number:04x}");
        if let Err(refusal) = kubelet.prepare(&uid, &["test-1"]).await {
            refused = Some(refusal);
            break;
        }
        if let Err(refusal) = kubelet.unprepare(&uid).await {
            refused = Some(refusal);
            break;
        }
        fixture.shell(&format!("cat /dev/zero | head -c 20000 > $NODE/kubelet/plugins/more-{number} 2>/dev/null || true; sync -f $NODE/kubelet/plugins 2>/dev/null || true"));
    }
    let refusal = refused.expect("the disk fails");
    assert!(refusal.contains("cannot keep its records"), "{refusal}");
    println!("{refusal}");
    assert!(
        kubelet.prepare(B, &["test-0"]).await.is_err(),
        "the claim A is still held"
    );
    let answer = kubelet.prepare(A, &["test-0"]).await;
    assert!(
        answer.is_ok() || answer.as_ref().is_err_and(|error| error.contains("records")),
        "{answer:?}"
    );
    process.kill();

    // The disk works again, and the next process knows the prepared claims.
    fixture.shell("rm $NODE/backing/fill && rm -f $NODE/kubelet/plugins/more-*");
    let (process, mut kubelet) = fixture.start().await;
    let refusal = kubelet.prepare(B, &["test-0"]).await.unwrap_err();
    assert!(
        refusal.contains("held by") && refusal.contains(A),
        "the claim A is still held: {refusal}"
    );
    kubelet.prepare(A, &["test-0"]).await.unwrap();
    process.kill();
}

#[tokio::test]
async fn a_file_refused_by_a_full_disk_is_written_when_there_is_room() {
    let Some(fixture) = Fixture::new(TWO_DISKS) else {
        return;
    };
    let (process, mut kubelet) = fixture.start().await;
    kubelet.prepare(A, &["test-0"]).await.unwrap();
    process.kill();
    fixture.shell("rm $NODE/cdi/*");
    fixture.shell(&fill("cdi"));
    let (process, mut kubelet) = fixture.start().await;
    assert_eq!(fixture.cdi_files(), 0);
    fixture.shell("rm $NODE/cdi/fill");
    let start = Instant::now();
    while fixture.cdi_files() == 0 {
        assert!(start.elapsed() < Duration::from_secs(40), "{}", process.log());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    process
        .logged("containers of this claim can be started again")
        .await;
    let refusal = kubelet.prepare(B, &["test-0"]).await.unwrap_err();
    assert!(refusal.contains("held by"), "{refusal}");
    kubelet.unprepare(A).await.unwrap();
    assert_eq!(fixture.cdi_files(), 0);
    assert!(process.stop().await.success());
}
