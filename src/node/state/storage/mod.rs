//! The companion's files on the node: the checkpoint and the CDI files.

pub mod cdi;
pub mod checkpoint;
pub mod disk;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use tracing::{error, warn};

use crate::api::cdi::Spec;
use crate::core::prepare::checkpoint::{Checkpoint, CheckpointError, ClusterFacts};
use crate::core::prepare::container_edits::ContainerEdits;
use crate::core::prepare::kubelet_state::{self, KubeletClaims, KubeletView};
use crate::core::prepare::names::{ClaimUid, DriverName};
use crate::core::prepare::plan::Records;
use crate::core::prepare::prepared_claims::{Entry, PreparedClaims};
use crate::core::prepare::recovery::{Start, with_running};
use crate::node::kubelet::transport::Identity;
use cdi::CdiDirectory;
use checkpoint::{CheckpointFile, Loaded, Unusable};
use disk::{Disk, Lock};

/// Name of the lock file.
const LOCK: &str = "lock";
/// Maximum size of kubelet's list of claims, in bytes.
const KUBELET_STATE_MAX: u64 = 16 * 1024 * 1024;

/// Why state could not be stored or loaded.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// An I/O operation failed.
    #[error("cannot {action} {path:?}: {source}")]
    Io {
        /// The operation.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// Another companion of the same driver runs on this node.
    #[error("another companion of this driver runs on this node and holds {0:?}: stop it first")]
    Locked(PathBuf),
    /// The checkpoint could not be serialized.
    #[error("cannot write the prepared claims as a checkpoint: {0}")]
    Encode(CheckpointError),
}

impl StoreError {
    /// CamelCase reason from a small fixed set, for the event and the metric label.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Io { .. } => "StorageFailed",
            Self::Locked(_) => "AlreadyRunning",
            Self::Encode(_) => "CheckpointFailed",
        }
    }

    /// Whether reading failed, for instance due to too many open files or a failing disk. The content may be intact.
    pub fn is_of_a_read(&self) -> bool {
        matches!(
            self,
            Self::Io {
                action: "read" | "list",
                ..
            }
        )
    }

    fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { action, path, source }
    }
}

/// The checkpoint and the CDI files of one driver on this node, locked by one process at a time.
#[derive(Debug)]
pub struct Store {
    checkpoint: CheckpointFile,
    cdi: CdiDirectory,
    written: Mutex<Written>,
    state: PathBuf,
}

/// The known content of the checkpoint.
#[derive(Debug, Default)]
struct Written {
    cluster: ClusterFacts,
    /// The durable text and the identity of its file; `None` while uncertain.
    text: Option<(String, Option<Identity>)>,
    /// Excludes other processes. Always set in an opened store.
    lock: Option<Lock>,
}

/// The paths of a driver's files and of kubelet's.
#[derive(Clone, Debug)]
pub struct Paths {
    /// The driver name.
    pub driver: DriverName,
    /// The directory of the checkpoint.
    pub state: PathBuf,
    /// The directory of the CDI files.
    pub cdi: PathBuf,
    /// Kubelet's list of claims.
    pub kubelet_state: PathBuf,
}

impl Paths {
    /// The default paths below kubelet's root directory, and a CDI directory.
    pub fn new(driver: DriverName, kubelet_root: &Path, cdi: &Path) -> Self {
        Self {
            state: kubelet_root.join("plugins").join(driver.as_str()),
            cdi: cdi.to_owned(),
            kubelet_state: kubelet_root.join(kubelet_state::FILE),
            driver,
        }
    }

    /// Reads kubelet's list of claims.
    pub fn kubelet(&self) -> KubeletView {
        let path = self.kubelet_state.display();
        match disk::read(&self.kubelet_state, KUBELET_STATE_MAX) {
            Ok(Some(text)) => match kubelet_state::parse(&text, &self.driver) {
                Ok(claims) => KubeletView::Lists(claims),
                Err(error) => KubeletView::Unknown(error.to_string()),
            },
            Ok(None) => KubeletView::Unknown(format!("there is no {path}")),
            Err(error) => KubeletView::Unknown(format!("cannot read {path}: {error}")),
        }
    }
}

/// The state found on the node.
#[derive(Debug)]
pub struct Opened {
    /// The storage for changes.
    pub store: Store,
    /// The prepared claims when the last process ended.
    pub prepared_claims: PreparedClaims,
    /// The cluster facts that the last process stored.
    pub cluster: ClusterFacts,
    /// The claims with a CDI file.
    pub files: BTreeSet<ClaimUid>,
    /// Why the claims were rebuilt from other sources instead of the checkpoint; normally `None`.
    pub rebuilt: Option<String>,
    /// Whether a checkpoint was found and no other source shows that it is incomplete.
    pub complete: bool,
}

impl Opened {
    /// Adds claims that kubelet shows in containers, if a rebuilt state lacks them.
    pub fn add_running(&mut self, running: &KubeletClaims) {
        if let Some(prepared_claims) = with_running(&self.prepared_claims, running) {
            self.prepared_claims = prepared_claims;
            let why = "containers have claims that it did not have".to_owned();
            report(&self.prepared_claims, self.rebuilt.get_or_insert(why));
        }
    }
}

/// The files on disk, read without changing them.
struct OnDisk {
    file: CheckpointFile,
    cdi: CdiDirectory,
    start: Start,
    cluster: ClusterFacts,
    /// The text of the checkpoint, if usable.
    text: Option<String>,
    unusable: Option<Unusable>,
    files: BTreeSet<ClaimUid>,
    traces: BTreeMap<ClaimUid, Option<Spec>>,
}

impl OnDisk {
    fn read(disk: &Disk, paths: &Paths) -> Result<Self, StoreError> {
        let file = CheckpointFile::new(&paths.state).on(disk.clone());
        let cdi = CdiDirectory::new(paths.driver.clone(), &paths.cdi).on(disk.clone());
        let files = cdi.claims()?;
        let (start, cluster, text, unusable) = match file.load()? {
            Loaded::Read(checkpoint, text) => {
                let start = Start::Checkpoint(checkpoint.entries);
                (start, checkpoint.cluster, Some(text), None)
            }
            Loaded::Nothing => (Start::Nothing, ClusterFacts::default(), None, None),
            Loaded::Unusable(unusable) => (Start::Nothing, ClusterFacts::default(), None, Some(unusable)),
        };
        let traces = read_all(&cdi, start.unexplained(&files))?;
        Ok(Self {
            file,
            cdi,
            start,
            cluster,
            text,
            unusable,
            files,
            traces,
        })
    }
}

impl Store {
    #[cfg(test)]
    pub(crate) fn open(paths: &Paths, boot_id: &str) -> Result<Opened, StoreError> {
        Self::open_on(&Disk::default(), paths, boot_id)
    }

    /// Opens a driver's files for exclusive use by this process.
    ///
    /// An unusable checkpoint is renamed. If the checkpoint is unusable, or missing although claims have left CDI files or are in kubelet's
    /// list, the claims are rebuilt from these sources. A directory or lock that cannot be acquired is an error, and so is a failed read,
    /// because the content may be intact.
    pub fn open_on(disk: &Disk, paths: &Paths, boot_id: &str) -> Result<Opened, StoreError> {
        disk::make_directory(&paths.state, 0o750)?;
        disk::make_directory(&paths.cdi, 0o755)?;
        let lock = disk::lock(&paths.state.join(LOCK))?;
        // Everything is read before any change: after a failure here, the next attempt finds the same state.
        let found = OnDisk::read(disk, paths)?;
        let mut text = None;
        if let Some(read) = found.text {
            // The last process may have been killed between its rename and its flush.
            match found.file.make_durable() {
                Ok(()) => text = Some((read, found.file.identity())),
                Err(error) => warn!(reason = error.reason(), "{error}"),
            }
        }
        let unusable = found.unusable.as_ref().map(|unusable| {
            let kept_as = found.file.put_aside(unusable);
            let kept_as = kept_as.map(|path| format!("; it was kept as {}", path.display()));
            format!("{}{}", unusable.error, kept_as.unwrap_or_default())
        });
        found.cdi.remove_half_written()?;
        let (cluster, start) = (found.cluster, found.start);
        let (prepared_claims, rebuilt, complete) = rebuild(start, unusable, &found.traces, paths, boot_id);
        found.cdi.keep_metadata(prepared_claims.entries());
        let written = Mutex::new(Written {
            cluster: cluster.clone(),
            text,
            lock: Some(lock),
        });
        Ok(Opened {
            store: Self {
                checkpoint: found.file,
                cdi: found.cdi,
                written,
                state: paths.state.clone(),
            },
            prepared_claims,
            cluster,
            files: found.files,
            complete,
            rebuilt,
        })
    }

    /// Reads the prepared claims without changing the disk. A running companion is an error.
    pub fn look(paths: &Paths, boot_id: &str) -> Result<PreparedClaims, StoreError> {
        let _lock = disk::lock_if_there(&paths.state.join(LOCK))?;
        let found = OnDisk::read(&Disk::default(), paths)?;
        let unusable = found.unusable.map(|unusable| unusable.error);
        Ok(rebuild(found.start, unusable, &found.traces, paths, boot_id).0)
    }

    /// Ensures that the directory and the lock file are still those that were opened. A cleanup of kubelet's root directory removes both,
    /// and a second companion could then start beside this one.
    fn keep_place(&self, written: &mut Written) -> Result<(), StoreError> {
        if written.lock.as_ref().is_some_and(Lock::is_in_place) {
            return Ok(());
        }
        disk::make_directory(&self.state, 0o750)?;
        written.lock = Some(disk::lock(&self.state.join(LOCK))?);
        warn!(directory = %self.state.display(), "somebody has removed the lock of this companion; it is made again");
        Ok(())
    }

    /// Sets the cluster facts; the next [`Records::save`] stores them.
    pub fn set_cluster(&self, cluster: ClusterFacts) {
        self.written
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .cluster = cluster;
    }

    /// Updates the CDI file of a device that is passed by name.
    pub fn write_cdi_of_device(
        &self,
        device: &str,
        container_edits: &ContainerEdits,
    ) -> Result<(), StoreError> {
        self.cdi.write_device(device, container_edits)
    }

    /// Removes the CDI files of all other devices.
    pub fn keep_cdi_of_devices(&self, devices: &BTreeSet<String>) -> Result<(), StoreError> {
        self.cdi.keep_devices(devices)
    }
}

/// Builds the claims. Returns them, the reason if they do not come from a checkpoint, and whether they are known to be complete.
fn rebuild(
    start: Start,
    unusable: Option<String>,
    traces: &BTreeMap<ClaimUid, Option<Spec>>,
    paths: &Paths,
    boot_id: &str,
) -> (PreparedClaims, Option<String>, bool) {
    let read = matches!(start, Start::Checkpoint(_));
    let is_older = read && !traces.is_empty();
    let entries = start.entries(&paths.driver, boot_id, traces, || paths.kubelet());
    let rebuilt = match unusable {
        None if is_older => Some("it does not have claims that have a CDI file".to_owned()),
        None if !read && !entries.is_empty() => Some("it is gone".to_owned()),
        unusable => unusable,
    };
    let prepared_claims = PreparedClaims::new(boot_id, entries);
    if let Some(why) = &rebuilt {
        report(&prepared_claims, why);
    }
    let complete = read && rebuilt.is_none();
    (prepared_claims, rebuilt, complete)
}

/// Reads the CDI files of these claims; `None` for a damaged file.
fn read_all(
    cdi: &CdiDirectory,
    uids: BTreeSet<ClaimUid>,
) -> Result<BTreeMap<ClaimUid, Option<Spec>>, StoreError> {
    uids.into_iter()
        .map(|uid| cdi.read(&uid).map(|spec| (uid, spec)))
        .collect()
}

fn report(prepared_claims: &PreparedClaims, why: &str) {
    error!(
        reason = "CheckpointLost",
        claims = prepared_claims.entries().len(),
        "the checkpoint cannot be relied on, and what claims hold was put together from the CDI files, kubelet's list and what it shows of its containers: {why}"
    );
    for (uid, entry) in prepared_claims.entries() {
        if entry.is_unaccounted() {
            error!(claim_uid = %uid, "which devices {} holds is not known; nothing is prepared until that is", entry.describe(uid));
        } else {
            warn!(claim_uid = %uid, devices = ?entry.devices, "{} holds these devices", entry.describe(uid));
        }
    }
}

impl Records for Store {
    type Error = StoreError;

    fn save(&self, prepared_claims: &PreparedClaims) -> Result<(), StoreError> {
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        let text = Checkpoint::of(prepared_claims, &written.cluster)
            .encode()
            .map_err(StoreError::Encode)?;
        self.keep_place(&mut written)?;
        let in_place = (text, self.checkpoint.identity());
        if written.text.as_ref() != Some(&in_place) {
            let (text, _) = in_place;
            // A failed write changes nothing: the last checkpoint stays durable, and needs no disk space to be so.
            self.checkpoint.replace(&text)?;
            written.text = None;
            self.checkpoint.make_durable()?;
            written.text = Some((text, self.checkpoint.identity()));
        }
        Ok(())
    }

    fn write_cdi(&self, uid: &ClaimUid, entry: &Entry) -> Result<(), StoreError> {
        self.cdi.write(uid, entry)
    }

    fn remove_cdi(&self, uid: &ClaimUid) -> Result<(), StoreError> {
        self.cdi.remove(uid)
    }
}

#[cfg(test)]
mod tests;
