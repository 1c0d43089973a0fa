//! What the companion keeps on the node: the checkpoint and the CDI files.

pub mod cdi;
mod cdi_devices;
pub mod checkpoint;
mod files;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use tracing::{error, warn};

use crate::core::node::checkpoint::{Checkpoint, CheckpointError, ClusterFacts};
use crate::core::node::claim_uid::ClaimUid;
use crate::core::node::driver_name::DriverName;
use crate::core::node::injection::Injection;
use crate::core::node::ledger::{Entry, Ledger};
use crate::core::node::rendering::entry_of_cdi_spec;
use crate::core::node::step::Records;
use cdi::CdiDirectory;
use checkpoint::{CheckpointFile, Loaded};

/// Why something could not be kept or found again.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The operating system refused.
    #[error("cannot {action} {path:?}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// With which file or directory.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Another companion of the same driver works on this node.
    #[error("another companion of this driver runs on this node and holds {0:?}: stop it first")]
    Locked(PathBuf),
    /// The checkpoint is a newer release's.
    #[error(
        "the checkpoint {path:?} is of a newer release ({error}): run that release, or drain the node, remove the file and start again"
    )]
    Newer {
        /// The file, which is left as it is.
        path: PathBuf,
        /// What was found.
        error: CheckpointError,
    },
    /// The ledger could not be written as text.
    #[error("cannot write the ledger as a checkpoint: {0}")]
    Encode(CheckpointError),
}

impl StoreError {
    /// CamelCase, from a small fixed set: the reason of the event, and a metric's label.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Io { .. } => "StorageFailed",
            Self::Locked(_) => "AlreadyRunning",
            Self::Newer { .. } => "NewerCheckpoint",
            Self::Encode(_) => "CheckpointFailed",
        }
    }

    fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { action, path, source }
    }
}

/// The checkpoint and the CDI files of one driver on this node. Only one process has them at a time.
#[derive(Debug)]
pub struct Store {
    checkpoint: CheckpointFile,
    cdi: CdiDirectory,
    written: Mutex<Written>,
    _lock: std::fs::File,
}

/// What is known to be in the checkpoint.
#[derive(Debug, Default)]
struct Written {
    cluster: ClusterFacts,
    /// The text that is durable; `None` while that is not certain.
    text: Option<String>,
}

/// What was found on the node.
#[derive(Debug)]
pub struct Opened {
    /// Where changes go.
    pub store: Store,
    /// What claims held when the last process ended.
    pub ledger: Ledger,
    /// What the API server had told the last process.
    pub cluster: ClusterFacts,
    /// The claims that have a CDI file.
    pub files: BTreeSet<ClaimUid>,
}

impl Store {
    /// Opens the records of a driver, for this process alone.
    ///
    /// A damaged checkpoint is put aside and rebuilt from the CDI files, which name the devices of each claim; a newer
    /// release's is refused and left as it is.
    pub fn open(driver: &DriverName, state: &Path, cdi: &Path, boot_id: &str) -> Result<Opened, StoreError> {
        files::make_directory(state, 0o750)?;
        files::make_directory(cdi, 0o755)?;
        let lock = files::lock(&state.join("lock"))?;
        let checkpoint = CheckpointFile::new(state);
        let cdi = CdiDirectory::new(driver.clone(), cdi);
        let files = cdi.claims()?;
        let loaded = match checkpoint.load()? {
            Loaded::Nothing => Checkpoint::default(),
            Loaded::Read(checkpoint) => checkpoint,
            Loaded::Damaged { error, kept_as } => {
                error!(%error, kept_as = %kept_as.display(), "the checkpoint is damaged; it was put aside and is rebuilt from the CDI files");
                Checkpoint {
                    entries: rebuild(driver, &cdi, &files, boot_id),
                    ..Checkpoint::default()
                }
            }
        };
        let written = Mutex::new(Written {
            cluster: loaded.cluster.clone(),
            text: None,
        });
        let ledger = Ledger::new(boot_id, loaded.entries);
        Ok(Opened {
            store: Self {
                checkpoint,
                cdi,
                written,
                _lock: lock,
            },
            ledger,
            cluster: loaded.cluster,
            files,
        })
    }

    /// Takes note of what the API server told; the next [`Records::save`] stores it.
    pub fn set_cluster(&self, cluster: ClusterFacts) {
        self.written
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .cluster = cluster;
    }

    /// Makes the CDI file of a device that leaves by name say what containers get.
    pub fn write_cdi_of_device(&self, device: &str, injection: &Injection) -> Result<(), StoreError> {
        self.cdi.write_device(device, injection)
    }

    /// Removes the CDI files of all other devices.
    pub fn keep_cdi_of_devices(&self, devices: &BTreeSet<String>) -> Result<(), StoreError> {
        self.cdi.keep_devices(devices)
    }
}

/// The entries that the CDI files tell of.
fn rebuild(
    driver: &DriverName,
    cdi: &CdiDirectory,
    files: &BTreeSet<ClaimUid>,
    boot_id: &str,
) -> BTreeMap<ClaimUid, Entry> {
    let mut entries = BTreeMap::new();
    for uid in files {
        match cdi
            .read(uid)
            .map(|spec| spec.and_then(|spec| entry_of_cdi_spec(driver, uid, boot_id, &spec)))
        {
            Ok(Some(entry)) => {
                warn!(claim_uid = %uid, devices = ?entry.devices, "a claim was rebuilt from its CDI file");
                entries.insert(uid.clone(), entry);
            }
            Ok(None) => {
                error!(claim_uid = %uid, "a CDI file is damaged as well; the devices of its claim are not known any more");
            }
            Err(error) => {
                error!(claim_uid = %uid, %error, "a CDI file cannot be read; the devices of its claim are not known any more");
            }
        }
    }
    entries
}

impl Records for Store {
    type Error = StoreError;

    fn save(&self, ledger: &Ledger) -> Result<(), StoreError> {
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        let text = Checkpoint::of(ledger, &written.cluster)
            .encode()
            .map_err(StoreError::Encode)?;
        if written.text.as_ref() != Some(&text) {
            written.text = None;
            self.checkpoint.save(&text)?;
            written.text = Some(text);
        }
        Ok(())
    }

    fn write_cdi(&self, uid: &ClaimUid, injection: &Injection) -> Result<(), StoreError> {
        self.cdi.write(uid, injection)
    }

    fn remove_cdi(&self, uid: &ClaimUid) -> Result<(), StoreError> {
        self.cdi.remove(uid)
    }
}

#[cfg(test)]
mod tests;
