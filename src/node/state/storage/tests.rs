mod cdi;

use super::*;
use crate::core::prepare::container_edits::DeviceNode;
use crate::core::prepare::prepared_claims::{ClaimChange, Entry, HeldDevice, Progress};
use crate::core::prepare::tests::{Disk, Node, operations};
use proptest::prelude::*;

impl Store {
    pub(crate) fn open(paths: &Paths, boot_id: &str) -> Result<Opened, StoreError> {
        Self::open_on(&disk::Disk::default(), paths, boot_id)
    }
}

/// Uses an in-memory directory if possible: the model flushes thousands of files.
fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm")
        .or_else(|_| tempfile::tempdir())
        .unwrap()
}

fn driver() -> DriverName {
    DriverName::parse("drayman.dev").unwrap()
}

fn paths(root: &Path) -> Paths {
    Paths::new(driver(), root, &root.join("cdi"))
}

fn open(root: &Path, boot_id: &str) -> Result<Opened, StoreError> {
    Store::open(&paths(root), boot_id)
}

fn uid() -> ClaimUid {
    ClaimUid::parse("7d0a2f5e-0c5b-4f0e-9a53-6c3b1f1f2a10").unwrap()
}

fn container_edits() -> ContainerEdits {
    let node = DeviceNode {
        host_path: "/dev/kvm".into(),
        container_path: "/dev/kvm".into(),
        permissions: "rw".into(),
    };
    ContainerEdits::of_device_node("kvm", node)
}

fn prepared(root: &Path) -> PreparedClaims {
    let Opened {
        store,
        mut prepared_claims,
        ..
    } = open(root, "boot").unwrap();
    let entry = Entry {
        namespace: "default".into(),
        name: "camera".into(),
        boot_id: "boot".into(),
        devices: vec![HeldDevice {
            device: "kvm".into(),
            kind: "test".into(),
            ..HeldDevice::default()
        }],
        progress: Progress::Started {
            container_edits: Some(container_edits()),
        },
    };
    prepared_claims.apply(&ClaimChange::Start(uid(), entry));
    prepared_claims.apply(&ClaimChange::Finish(uid()));
    store.set_cluster(ClusterFacts {
        node_uid: Some("n-1".into()),
        claims: Some(crate::core::prepare::claims_api::ClaimsApi::Classic),
        minor: None,
    });
    store
        .write_cdi(&uid(), prepared_claims.entry(&uid()).unwrap())
        .unwrap();
    store.save(&prepared_claims).unwrap();
    prepared_claims
}

#[test]
fn a_checkpoint_that_no_start_could_read_is_not_written() {
    let root = directory();
    let before = prepared(root.path());
    let Opened { store, .. } = open(root.path(), "boot").unwrap();
    let mut entries = before.entries().clone();
    for entry in entries.values_mut() {
        entry.name = "x".repeat(CHECKPOINT_MAX);
    }
    let error = store.save(&PreparedClaims::new("boot", entries)).unwrap_err();
    assert_eq!(error.reason(), "CheckpointFailed");
    drop(store);
    assert_eq!(open(root.path(), "boot").unwrap().prepared_claims, before);
}

#[test]
fn the_next_process_finds_the_stored_claims() {
    let root = directory();
    let prepared_claims = prepared(root.path());
    let opened = open(root.path(), "boot").unwrap();
    assert_eq!(opened.prepared_claims, prepared_claims);
    assert_eq!(opened.files, BTreeSet::from([uid()]));
    assert_eq!(opened.cluster.node_uid.as_deref(), Some("n-1"));
}

#[test]
fn a_second_process_is_refused_by_name() {
    let root = directory();
    let _first = open(root.path(), "boot").unwrap();
    let error = open(root.path(), "boot").unwrap_err();
    assert_eq!(error.reason(), "AlreadyRunning");
    assert!(error.to_string().contains("lock"), "{error}");
}

#[test]
fn a_damaged_checkpoint_is_rebuilt_from_the_cdi_files() {
    let root = directory();
    prepared(root.path());
    let path = root.path().join("plugins/drayman.dev/checkpoint.json");
    let good = std::fs::read(&path).unwrap();
    for damaged in [
        Vec::new(),
        good[..good.len() / 2].to_vec(),
        vec![0; 4096],
        b"{\"version\":1}".to_vec(),
    ] {
        std::fs::write(&path, &damaged).unwrap();
        let opened = open(root.path(), "boot").unwrap();
        let entry = opened.prepared_claims.entry(&uid()).unwrap();
        assert!(opened.prepared_claims.may_be_in_use(entry));
        assert_eq!(
            opened.prepared_claims.holder("kvm").map(|(holder, _)| holder),
            Some(&uid())
        );
        assert_eq!(entry.container_edits(), Some(&container_edits()));
        opened.store.save(&opened.prepared_claims).unwrap();
    }
}

#[test]
fn a_damaged_checkpoint_and_cdi_file_leave_devices_unknown() {
    let root = directory();
    prepared(root.path());
    std::fs::write(root.path().join("plugins/drayman.dev/checkpoint.json"), "x").unwrap();
    let file = root.path().join(format!("cdi/drayman.dev-claim_{}.json", uid()));
    std::fs::write(&file, "y").unwrap();
    let opened = open(root.path(), "boot").unwrap();
    assert!(
        opened
            .prepared_claims
            .entry(&uid())
            .unwrap()
            .has_unknown_devices()
    );
    assert!(opened.rebuilt.unwrap().contains("kept as"));
    drop(opened.store);
    // Kubelet's list provides the devices and the name of the claim.
    let handle = format!(
        r#"{{\"version\":1,\"claimUid\":\"{}\",\"nodeName\":\"a\",\"nodeUid\":\"b\",\"devices\":[{{\"request\":\"r\",\"device\":\"kvm\"}}]}}"#,
        uid()
    );
    let list = format!(
        r#"{{"version":"v1","entries":[{{"DriverName":"drayman.dev","ClaimUID":"{}","ClaimName":"camera","Namespace":"default","ResourceHandles":[{{"data":"{handle}"}}]}}],"checksum":1}}"#,
        uid()
    );
    std::fs::write(root.path().join("dra_manager_state"), list).unwrap();
    let opened = open(root.path(), "boot").unwrap();
    assert_eq!(
        opened
            .prepared_claims
            .holder("kvm")
            .map(|(_, entry)| entry.name.as_str()),
        Some("camera")
    );
}

/// The names and contents of all files below a directory.
fn everything(root: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut directories = vec![root.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                directories.push(path);
            } else {
                found.insert(path.clone(), std::fs::read(&path).unwrap());
            }
        }
    }
    found
}

#[test]
fn reading_the_state_changes_nothing_on_the_disk() {
    let root = directory();
    let paths = paths(root.path());
    prepared(root.path());
    let path = root.path().join("plugins/drayman.dev/checkpoint.json");
    let good = std::fs::read(&path).unwrap();
    let half = format!("cdi/drayman.dev-claim_{}.json.tmp", uid());
    std::fs::write(root.path().join(half), "half").unwrap();
    // Version 3 with its checksum, as a newer release writes it.
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&3_u32.to_le_bytes());
    hasher.update(b"{}");
    let newer = format!(r#"{{"version":3,"checksum":{},"data":{{}}}}"#, hasher.finalize());
    for content in [good, b"damaged".to_vec(), newer.into_bytes()] {
        std::fs::write(&path, &content).unwrap();
        let before = everything(root.path());
        let prepared_claims = Store::read(&paths, "boot").unwrap();
        assert_eq!(
            prepared_claims.holder("kvm").map(|(holder, _)| holder),
            Some(&uid())
        );
        assert_eq!(everything(root.path()), before);
    }
}

#[test]
fn reading_beside_a_running_companion_is_refused() {
    let root = directory();
    let _companion = open(root.path(), "boot").unwrap();
    let error = Store::read(&paths(root.path()), "boot").unwrap_err();
    assert!(matches!(error, StoreError::Locked(_)), "{error}");
}

#[test]
fn an_unreadable_file_does_not_count_as_damaged() {
    let root = directory();
    prepared(root.path());
    let before = everything(root.path());
    // A file in place of the CDI directory simulates a failing disk.
    let paths = Paths {
        cdi: root.path().join("plugins/drayman.dev/checkpoint.json/cdi"),
        ..paths(root.path())
    };
    let error = Store::read(&paths, "boot").unwrap_err();
    assert!(matches!(error, StoreError::Io { .. }), "{error}");
    assert_eq!(everything(root.path()), before);
}

#[test]
fn a_missing_checkpoint_is_rebuilt_and_a_new_node_is_empty() {
    let root = directory();
    assert_eq!(open(root.path(), "boot").unwrap().rebuilt, None);
    prepared(root.path());
    std::fs::remove_dir_all(root.path().join("plugins")).unwrap();
    let opened = open(root.path(), "boot").unwrap();
    assert_eq!(
        opened.prepared_claims.holder("kvm").map(|(holder, _)| holder),
        Some(&uid())
    );
    assert_eq!(opened.rebuilt.as_deref(), Some("it is gone"));
}

#[test]
fn an_older_checkpoint_costs_no_claim_its_device() {
    let root = directory();
    let path = root.path().join("plugins/drayman.dev/checkpoint.json");
    let Opened {
        store,
        prepared_claims,
        ..
    } = open(root.path(), "boot").unwrap();
    store.save(&prepared_claims).unwrap();
    drop(store);
    let old = std::fs::read(&path).unwrap();
    prepared(root.path());
    std::fs::write(&path, old).unwrap();
    let opened = open(root.path(), "boot").unwrap();
    assert_eq!(
        opened.prepared_claims.holder("kvm").map(|(holder, _)| holder),
        Some(&uid())
    );
    assert!(opened.rebuilt.is_some());
}

#[test]
fn an_unreadable_kubelet_list_is_reported_as_unknown() {
    let root = directory();
    let path = root.path().join("dra_manager_state");
    let reason = || match paths(root.path()).kubelet() {
        KubeletView::Unknown(why) => why,
        KubeletView::Lists(claims) => panic!("{claims:?}"),
    };
    assert!(reason().contains("there is no"));
    std::fs::write(&path, "{").unwrap();
    assert!(reason().contains("does not have the format of kubelet"));
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    assert!(reason().contains("cannot read"));
}

#[test]
fn storage_that_cannot_write_reports_it_and_recovers() {
    let root = directory();
    let prepared_claims = prepared(root.path());
    let Opened { store, .. } = open(root.path(), "boot").unwrap();
    // A directory in place of the temporary file also blocks root, unlike permissions.
    let obstacle = root.path().join("plugins/drayman.dev/checkpoint.json.tmp");
    std::fs::create_dir(&obstacle).unwrap();
    store
        .save(&prepared_claims)
        .expect("a durable state needs no write");
    store.set_cluster(ClusterFacts::default());
    let error = store.save(&prepared_claims).unwrap_err();
    assert_eq!(error.reason(), "StorageFailed");
    assert!(error.to_string().contains("checkpoint.json.tmp"), "{error}");
    std::fs::remove_dir(&obstacle).unwrap();
    store.save(&prepared_claims).unwrap();
}

#[test]
fn a_removed_state_directory_is_restored_with_its_lock() {
    let root = directory();
    let prepared_claims = prepared(root.path());
    let Opened { store, .. } = open(root.path(), "boot").unwrap();
    store.save(&prepared_claims).unwrap();
    std::fs::remove_dir_all(root.path().join("plugins")).unwrap();
    store.save(&prepared_claims).unwrap();
    assert_eq!(open(root.path(), "boot").unwrap_err().reason(), "AlreadyRunning");
    drop(store);
    let opened = open(root.path(), "boot").unwrap();
    assert_eq!((opened.prepared_claims, opened.rebuilt), (prepared_claims, None));
}

/// The real storage, for the model. It is reopened for each access, like in a new process.
struct Real {
    root: tempfile::TempDir,
    store: std::cell::RefCell<Option<Store>>,
}

impl Real {
    fn new() -> Self {
        Self {
            root: directory(),
            store: std::cell::RefCell::default(),
        }
    }

    fn with<T>(&self, use_it: impl FnOnce(&Store) -> T) -> T {
        let mut store = self.store.borrow_mut();
        use_it(store.get_or_insert_with(|| open(self.root.path(), "unused").unwrap().store))
    }
}

impl Storage for Real {
    type Error = StoreError;

    fn save(&self, prepared_claims: &PreparedClaims) -> Result<(), StoreError> {
        self.with(|store| store.save(prepared_claims))
    }

    fn write_cdi(&self, uid: &ClaimUid, entry: &Entry) -> Result<(), StoreError> {
        self.with(|store| store.write_cdi(uid, entry))
    }

    fn remove_cdi(&self, uid: &ClaimUid) -> Result<(), StoreError> {
        self.with(|store| store.remove_cdi(uid))
    }
}

impl Disk for Real {
    fn found(&self) -> (BTreeMap<ClaimUid, Entry>, BTreeSet<ClaimUid>) {
        *self.store.borrow_mut() = None;
        // The remains of a process that was killed during a write.
        std::fs::write(
            self.root.path().join("plugins/drayman.dev/checkpoint.json.tmp"),
            "half",
        )
        .unwrap_or_default();
        std::fs::write(
            self.root
                .path()
                .join(format!("cdi/drayman.dev-claim_{}.json.tmp", uid())),
            "half",
        )
        .unwrap_or_default();
        let opened = open(self.root.path(), "unused").unwrap();
        let found = (opened.prepared_claims.entries().clone(), opened.files);
        *self.store.borrow_mut() = Some(opened.store);
        found
    }

    fn booted(&self) {
        *self.store.borrow_mut() = None;
        std::fs::remove_dir_all(self.root.path().join("cdi")).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn a_kill_at_any_step_on_a_real_disk_is_survived(operations in operations()) {
        Node::new(Real::new()).live(&operations);
    }
}

/// Loads the checkpoint and renames it, like a starting companion.
fn put_aside(file: &CheckpointFile) -> (String, Option<PathBuf>) {
    let Loaded::Unusable(unusable) = file.load().unwrap() else {
        panic!("it was taken")
    };
    let kept_as = file.put_aside(&unusable);
    (unusable.error, kept_as)
}

#[test]
fn a_checkpoint_is_read_back() {
    let directory = tempfile::tempdir().unwrap();
    let file = CheckpointFile::new(&disk::Disk::default(), directory.path());
    assert!(matches!(file.load().unwrap(), Loaded::Nothing));
    file.replace(&Checkpoint::default().encode().unwrap()).unwrap();
    file.make_durable().unwrap();
    assert!(
        matches!(file.load().unwrap(), Loaded::Read(checkpoint, _) if checkpoint == Checkpoint::default())
    );
}

#[test]
fn damaged_checkpoints_are_put_aside_each_under_its_own_name() {
    let directory = tempfile::tempdir().unwrap();
    let file = CheckpointFile::new(&disk::Disk::default(), directory.path());
    for content in ["", "{}", "\0\0\0", "{\"version\":1"] {
        std::fs::write(&file.path, content).unwrap();
        let kept_as = put_aside(&file).1.unwrap();
        assert_eq!(std::fs::read_to_string(kept_as).unwrap(), content);
        assert!(matches!(file.load().unwrap(), Loaded::Nothing));
    }
}

#[test]
fn damaged_checkpoints_do_not_pile_up_for_ever() {
    let directory = tempfile::tempdir().unwrap();
    let file = CheckpointFile::new(&disk::Disk::default(), directory.path());
    for _ in 0..40 {
        std::fs::write(&file.path, "x").unwrap();
        put_aside(&file);
    }
    assert_eq!(
        std::fs::read_dir(directory.path()).unwrap().count(),
        KEPT_MAX as usize
    );
}

#[test]
fn a_newer_checkpoint_is_kept_under_a_descriptive_name() {
    let directory = tempfile::tempdir().unwrap();
    let file = CheckpointFile::new(&disk::Disk::default(), directory.path());
    // The checksum of version 3 over "{}", as a later release would write it.
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&3_u32.to_le_bytes());
    hasher.update(b"{}");
    let text = format!(r#"{{"version":3,"checksum":{},"data":{{}}}}"#, hasher.finalize());
    std::fs::write(&file.path, &text).unwrap();
    let (error, kept_as) = put_aside(&file);
    let kept_as = kept_as.unwrap();
    assert!(error.contains("version 3"), "{error}");
    assert!(kept_as.ends_with("checkpoint.json.newer-1"), "{kept_as:?}");
    assert_eq!(std::fs::read_to_string(kept_as).unwrap(), text);
}

#[test]
fn loading_a_checkpoint_changes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let file = CheckpointFile::new(&disk::Disk::default(), directory.path());
    std::fs::write(&file.path, "damaged").unwrap();
    for _ in 0..2 {
        assert!(matches!(file.load().unwrap(), Loaded::Unusable(_)));
    }
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    assert_eq!(std::fs::read_to_string(&file.path).unwrap(), "damaged");
}

#[test]
fn a_failed_read_does_not_count_as_damage() {
    // A name too long for the file system simulates EMFILE and EIO: the content was never read.
    let directory = tempfile::tempdir().unwrap();
    let file = CheckpointFile::new(&disk::Disk::default(), &directory.path().join("n".repeat(300)));
    let error = file.load().unwrap_err();
    assert!(matches!(error, StoreError::Io { action: "read", .. }), "{error}");
    assert!(error.to_string().contains("checkpoint.json"), "{error}");
}

#[test]
fn a_checkpoint_that_cannot_be_read_does_not_stop_the_companion() {
    let directory = tempfile::tempdir().unwrap();
    let file = CheckpointFile::new(&disk::Disk::default(), directory.path());
    std::os::unix::fs::symlink("/etc/passwd", &file.path).unwrap();
    put_aside(&file);
    std::fs::create_dir(&file.path).unwrap();
    put_aside(&file);
    file.replace(&Checkpoint::default().encode().unwrap()).unwrap();
}
