//! The companion's files on the node: the checkpoint (`Store::save`), in the format of [`crate::core::prepare::checkpoint`], and the CDI
//! files.

pub mod disk;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::DirEntry;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use tracing::{error, warn};

use crate::api::cdi::Spec;
use crate::core::names::{ClaimUid, DriverName};
use crate::core::prepare::checkpoint::{Checkpoint, CheckpointError, ClusterFacts};
use crate::core::prepare::container_edits::{ContainerEdits, cdi_spec_of_device};
use crate::core::prepare::kubelet_state::{self, KubeletClaims, KubeletView};
use crate::core::prepare::plan::Storage;
use crate::core::prepare::prepared_claims::{Entry, PreparedClaims};
use crate::core::prepare::recovery::{initial_entries, unexplained, with_running};
use crate::core::prepare::runtime_containers::UnknownContainers;
pub use disk::StoreError;
use disk::{CHECKPOINT_MAX, Disk, DiskStep, Identity, Lock};

/// File with the boot id (`random(4)`).
pub const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// Name of the lock file.
const LOCK: &str = "lock";
/// Number of damaged checkpoints kept for inspection; from then on, the last is overwritten.
const KEPT_MAX: u32 = 16;
/// Maximum size of a CDI file, in bytes.
const CDI_FILE_MAX: u64 = 1024 * 1024;
/// Maximum size of kubelet's list of claims, in bytes.
const KUBELET_STATE_MAX: u64 = 16 * 1024 * 1024;

/// The checkpoint and the CDI files of one driver on this node, locked by one process at a time.
#[derive(Debug)]
pub struct Store {
    checkpoint: CheckpointFile,
    pub(super) cdi: CdiDirectory,
    inner: Mutex<StoreState>,
}

/// The known content of the checkpoint, and its lock.
#[derive(Debug)]
struct StoreState {
    cluster: ClusterFacts,
    unknown_containers: UnknownContainers,
    /// The durable text and the identity of its file; `None` while uncertain.
    text: Option<(String, Option<Identity>)>,
    /// Excludes other processes.
    lock: Lock,
}

/// The boot id of the kernel, which changes when the node boots.
pub fn boot_id() -> io::Result<String> {
    std::fs::read_to_string(BOOT_ID).map(|id| id.trim().to_owned())
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
    /// The containers of unknown status that the last process stored.
    pub unknown_containers: UnknownContainers,
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
            // Devices of other claims may have been released.
            self.unknown_containers = UnknownContainers::default();
            let why = "it lacks claims that containers have".to_owned();
            report(&self.prepared_claims, self.rebuilt.get_or_insert(why));
        }
    }
}

/// The checkpoint in the state directory of a driver, `checkpoint.json`.
#[derive(Debug)]
struct CheckpointFile {
    directory: PathBuf,
    path: PathBuf,
    disk: Disk,
}

/// The result of loading the checkpoint.
#[derive(Debug)]
enum Loaded {
    /// No file: this driver has not run on this node before.
    Nothing,
    /// A valid checkpoint and its text.
    Read(Checkpoint, String),
    /// A checkpoint that this release cannot use, left in place.
    Unusable(Unusable),
}

/// A checkpoint that is damaged, or written by a newer release.
#[derive(Debug)]
struct Unusable {
    /// Why it is unusable.
    error: String,
    /// The part of the file name under which it is kept.
    label: &'static str,
}

impl CheckpointFile {
    /// The checkpoint in an existing directory.
    fn new(disk: &Disk, directory: &Path) -> Self {
        Self {
            directory: directory.to_owned(),
            path: directory.join("checkpoint.json"),
            disk: disk.clone(),
        }
    }

    /// Reads the checkpoint without changing anything.
    ///
    /// Only its content can make it unusable. An I/O error, for instance too many open files or a failing disk, is returned as an error,
    /// because a retry may succeed.
    fn load(&self) -> Result<Loaded, StoreError> {
        let unusable = |error: String, label| Ok(Loaded::Unusable(Unusable { error, label }));
        match disk::read(&self.path, CHECKPOINT_MAX as u64) {
            Ok(None) => Ok(Loaded::Nothing),
            Ok(Some(text)) => match Checkpoint::decode(&text) {
                Ok(checkpoint) => Ok(Loaded::Read(
                    checkpoint,
                    String::from_utf8_lossy(&text).into_owned(),
                )),
                Err(error @ CheckpointError::Newer(_)) => unusable(error.to_string(), "newer"),
                Err(error) => unusable(error.to_string(), "damaged"),
            },
            Err(error) if disk::is_no_file_of_ours(&error) => unusable(error.to_string(), "damaged"),
            Err(error) => Err(StoreError::io("read", &self.path)(error)),
        }
    }

    /// Renames an unusable checkpoint to keep it for inspection, and returns its new name. Returns `None` if renaming fails; the next save
    /// then replaces the file.
    fn put_aside(&self, unusable: &Unusable) -> Option<PathBuf> {
        let kept_as = self.free_name(unusable.label);
        let rename = || std::fs::rename(&self.path, &kept_as);
        let kept_as = match self.disk.step(DiskStep::Rename, &kept_as, rename) {
            Ok(()) => Some(kept_as),
            Err(error) => {
                error!(path = %self.path.display(), %error, "the checkpoint cannot be put aside");
                None
            }
        };
        if let Err(error) = disk::sync_directory(&self.disk, &self.directory) {
            warn!(reason = error.reason(), "{error}");
        }
        kept_as
    }

    /// Replaces the checkpoint. On failure, the last checkpoint is still in place and as durable as before. On success, the new one is in
    /// place, and [`CheckpointFile::make_durable`] makes it survive a power loss.
    fn replace(&self, text: &str) -> Result<(), StoreError> {
        disk::replace(&self.disk, &self.path, text.as_bytes(), 0o600)
    }

    /// Makes the checkpoint in place survive a power loss.
    fn make_durable(&self) -> Result<(), StoreError> {
        disk::sync_directory(&self.disk, &self.directory)
    }

    fn free_name(&self, label: &str) -> PathBuf {
        let name = |number: u32| self.directory.join(format!("checkpoint.json.{label}-{number}"));
        (1..KEPT_MAX)
            .map(name)
            .find(|path| path.symlink_metadata().is_err())
            .unwrap_or_else(|| name(KEPT_MAX))
    }
}

/// The CDI files of one driver: those of claims, and those of devices that the device plugin API passes by name, one for each device as long as
/// the device exists. Kubelet restarts a container with its original CDI names, so such a file outlives every container.
///
/// Other files in the directory are never touched.
#[derive(Debug)]
pub(super) struct CdiDirectory {
    driver: DriverName,
    directory: PathBuf,
    disk: Disk,
}

/// A CDI file of the driver.
struct CdiFile {
    path: PathBuf,
    /// The claim's uid or the device's name.
    name: String,
    /// Whether it has a temporary name.
    is_incomplete: bool,
}

impl CdiDirectory {
    /// The files of a driver in a directory.
    fn new(disk: &Disk, driver: DriverName, directory: &Path) -> Self {
        Self {
            driver,
            directory: directory.to_owned(),
            disk: disk.clone(),
        }
    }

    /// The claims with a CDI file; none if the directory is missing.
    fn claims(&self) -> Result<BTreeSet<ClaimUid>, StoreError> {
        let files = self.files(&self.driver.cdi_file_prefix())?.into_iter();
        let complete = files.filter(|file| !file.is_incomplete);
        Ok(complete
            .filter_map(|file| ClaimUid::parse(&file.name).ok())
            .collect())
    }

    /// Removes incomplete files of an earlier process, as far as possible.
    fn remove_half_written(&self) -> Result<(), StoreError> {
        for file in self.files(&self.driver.cdi_file_prefix())? {
            if file.is_incomplete
                && ClaimUid::parse(&file.name).is_ok()
                && let Err(error) = disk::remove(&self.disk, &file.path)
            {
                warn!(reason = error.reason(), "{error}");
            }
        }
        Ok(())
    }

    /// The files with this prefix; none if the directory is missing.
    fn files(&self, prefix: &str) -> Result<Vec<CdiFile>, StoreError> {
        let list = StoreError::io("list", &self.directory);
        let entries = match std::fs::read_dir(&self.directory) {
            Ok(entries) => entries.collect::<io::Result<Vec<_>>>().map_err(list)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(list(error)),
        };
        let file = |entry: &DirEntry| {
            let name = entry.file_name();
            let rest = name.to_str()?.strip_prefix(prefix)?;
            let complete = rest.strip_suffix(disk::TEMPORARY);
            Some(CdiFile {
                path: entry.path(),
                name: complete.unwrap_or(rest).strip_suffix(".json")?.to_owned(),
                is_incomplete: complete.is_some(),
            })
        };
        Ok(entries.iter().filter_map(file).collect())
    }

    /// Updates the file of a claim, and before it the metadata files that it mounts. Writes nothing if they are up to date.
    fn write(&self, uid: &ClaimUid, entry: &Entry) -> Result<(), StoreError> {
        let directory = self.metadata_directory(uid);
        let Some((spec, metadata)) = entry.files(&self.driver, uid, &directory) else {
            return Ok(());
        };
        for file in metadata {
            self.write_file(&directory.join(&file.name), file.content.as_bytes())?;
        }
        self.write_spec(&self.path(uid), &spec)
    }

    /// Updates a CDI file. Writes nothing if it is up to date.
    fn write_spec(&self, path: &Path, spec: &Spec) -> Result<(), StoreError> {
        let text = serde_json::to_vec(spec).map_err(|error| StoreError::io("write", path)(error.into()))?;
        self.write_file(path, &text)
    }

    fn write_file(&self, path: &Path, text: &[u8]) -> Result<(), StoreError> {
        if disk::read(path, CDI_FILE_MAX).is_ok_and(|found| found.as_deref() == Some(text)) {
            return Ok(());
        }
        // The directory may have been removed together with the rest of /var/run.
        disk::make_directory(path.parent().unwrap_or(&self.directory), 0o755)?;
        disk::replace(&self.disk, path, text, 0o644)
    }

    /// Reads the file of a claim. Returns `None` if it is missing or not a valid CDI file. An error is an I/O error; a retry may succeed.
    fn read(&self, uid: &ClaimUid) -> Result<Option<Spec>, StoreError> {
        let path = self.path(uid);
        let text = match disk::read(&path, CDI_FILE_MAX) {
            Err(error) if disk::is_no_file_of_ours(&error) => None,
            read => read.map_err(StoreError::io("read", &path))?,
        };
        Ok(text.and_then(|text| serde_json::from_slice(&text).ok()))
    }

    /// Removes the file of a claim, if it exists. The removal survives a power loss, because a stale file would indicate a prepared claim.
    /// Then removes the metadata files of the claim.
    fn remove(&self, uid: &ClaimUid) -> Result<(), StoreError> {
        let path = self.path(uid);
        let exists = path.symlink_metadata().is_ok();
        disk::remove(&self.disk, &path)?;
        if exists {
            disk::sync_directory(&self.disk, &self.directory)?;
        }
        self.remove_metadata(uid)
    }

    /// Removes the metadata files of claims that are not prepared, as far as possible: a process may have been killed before it removed them.
    fn keep_metadata(&self, claims: &BTreeMap<ClaimUid, Entry>) {
        let directory = self.directory.join(self.driver.metadata_directory());
        let Ok(entries) = std::fs::read_dir(directory) else {
            return;
        };
        let uids = entries
            .flatten()
            .filter_map(|entry| ClaimUid::parse(entry.file_name().to_str()?).ok());
        for uid in uids.filter(|uid| !claims.contains_key(uid)) {
            if let Err(error) = self.remove_metadata(&uid) {
                warn!(reason = error.reason(), "{error}");
            }
        }
    }

    fn remove_metadata(&self, uid: &ClaimUid) -> Result<(), StoreError> {
        let directory = self.metadata_directory(uid);
        if directory.symlink_metadata().is_err() {
            return Ok(());
        }
        self.disk
            .step(DiskStep::Remove, &directory, || {
                std::fs::remove_dir_all(&directory)
            })
            .map_err(StoreError::io("remove", &directory))
    }

    /// The devices with a CDI file.
    pub(super) fn devices(&self) -> Result<BTreeSet<String>, StoreError> {
        let files = self.files(&self.driver.cdi_device_file_prefix())?;
        let complete = files.into_iter().filter(|file| !file.is_incomplete);
        Ok(complete.map(|file| file.name).collect())
    }

    /// Updates the file of a device, whose name is a DNS label.
    pub(super) fn write_device(
        &self,
        device: &str,
        container_edits: &ContainerEdits,
    ) -> Result<(), StoreError> {
        let path = self.directory.join(self.driver.cdi_device_file(device));
        self.write_spec(&path, &cdi_spec_of_device(&self.driver, device, container_edits))
    }

    /// Removes the files of all other devices, and incomplete files of an earlier process.
    pub(super) fn keep_devices(&self, devices: &BTreeSet<String>) -> Result<(), StoreError> {
        for file in self.files(&self.driver.cdi_device_file_prefix())? {
            if file.is_incomplete || !devices.contains(&file.name) {
                disk::remove(&self.disk, &file.path)?;
            }
        }
        Ok(())
    }

    fn metadata_directory(&self, uid: &ClaimUid) -> PathBuf {
        self.directory
            .join(self.driver.metadata_directory())
            .join(uid.as_str())
    }

    fn path(&self, uid: &ClaimUid) -> PathBuf {
        self.directory.join(self.driver.cdi_file(uid))
    }
}

/// The files on disk, read without changing them.
struct OnDisk {
    file: CheckpointFile,
    cdi: CdiDirectory,
    /// The entries of the checkpoint, if usable.
    entries: Option<BTreeMap<ClaimUid, Entry>>,
    cluster: ClusterFacts,
    unknown_containers: UnknownContainers,
    /// The text of the checkpoint, if usable.
    text: Option<String>,
    unusable: Option<Unusable>,
    files: BTreeSet<ClaimUid>,
    /// The CDI files of claims that the checkpoint lacks; `None` for a damaged file.
    traces: BTreeMap<ClaimUid, Option<Spec>>,
}

impl OnDisk {
    fn read(disk: &Disk, paths: &Paths) -> Result<Self, StoreError> {
        let file = CheckpointFile::new(disk, &paths.state);
        let cdi = CdiDirectory::new(disk, paths.driver.clone(), &paths.cdi);
        let files = cdi.claims()?;
        let (checkpoint, text, unusable) = match file.load()? {
            Loaded::Read(checkpoint, text) => (Some(checkpoint), Some(text), None),
            Loaded::Nothing => (None, None, None),
            Loaded::Unusable(unusable) => (None, None, Some(unusable)),
        };
        let is_usable = checkpoint.is_some();
        let checkpoint = checkpoint.unwrap_or_default();
        let entries = is_usable.then_some(checkpoint.entries);
        let unexplained = unexplained(entries.as_ref(), &files).into_iter();
        let read = |uid: ClaimUid| cdi.read(&uid).map(|spec| (uid, spec));
        let traces = unexplained.map(read).collect::<Result<_, _>>()?;
        Ok(Self {
            file,
            cdi,
            entries,
            cluster: checkpoint.cluster,
            unknown_containers: checkpoint.unknown_containers,
            text,
            unusable,
            files,
            traces,
        })
    }
}

impl Store {
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
                Ok(()) => text = Some((read, Identity::of(&found.file.path))),
                Err(error) => warn!(reason = error.reason(), "{error}"),
            }
        }
        let unusable = found.unusable.as_ref().map(|unusable| {
            let kept_as = found.file.put_aside(unusable);
            let kept_as = kept_as.map(|path| format!("; it was kept as {}", path.display()));
            format!("{}{}", unusable.error, kept_as.unwrap_or_default())
        });
        found.cdi.remove_half_written()?;
        let is_first = text.is_none() && unusable.is_none() && found.entries.is_none();
        let (cluster, entries) = (found.cluster, found.entries);
        let (prepared_claims, rebuilt, complete) = rebuild(entries, unusable, &found.traces, paths, boot_id);
        found.cdi.keep_metadata(prepared_claims.entries());
        let unknown_containers = match rebuilt {
            // Devices of other claims may have been released.
            Some(_) => UnknownContainers::default(),
            None if is_first => UnknownContainers::of_boot(boot_id),
            None => found.unknown_containers,
        };
        let inner = Mutex::new(StoreState {
            cluster: cluster.clone(),
            unknown_containers: unknown_containers.clone(),
            text,
            lock,
        });
        Ok(Opened {
            store: Self {
                checkpoint: found.file,
                cdi: found.cdi,
                inner,
            },
            prepared_claims,
            cluster,
            unknown_containers,
            files: found.files,
            complete,
            rebuilt,
        })
    }

    /// Reads the prepared claims without changing the disk. A running companion is an error.
    pub fn read(paths: &Paths, boot_id: &str) -> Result<PreparedClaims, StoreError> {
        let _lock = disk::lock_if_there(&paths.state.join(LOCK))?;
        let found = OnDisk::read(&Disk::default(), paths)?;
        let unusable = found.unusable.map(|unusable| unusable.error);
        Ok(rebuild(found.entries, unusable, &found.traces, paths, boot_id).0)
    }

    /// Ensures that the directory and the lock file are still those that were opened. A cleanup of kubelet's root directory removes both,
    /// and a second companion could then start beside this one.
    fn keep_lock(&self, state: &mut StoreState) -> Result<(), StoreError> {
        if state.lock.is_in_place() {
            return Ok(());
        }
        let directory = &self.checkpoint.directory;
        disk::make_directory(directory, 0o750)?;
        state.lock = disk::lock(&directory.join(LOCK))?;
        warn!(directory = %directory.display(), "the lock of this companion was removed; recreating it");
        Ok(())
    }

    /// Sets the cluster facts; the next [`Storage::save`] stores them.
    pub fn set_cluster(&self, cluster: ClusterFacts) {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).cluster = cluster;
    }

    /// Sets the containers of unknown status; the next [`Storage::save`] stores them.
    pub fn set_unknown_containers(&self, containers: UnknownContainers) {
        let mut state = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        state.unknown_containers = containers;
    }
}

/// Builds the claims. Returns them, the reason if they do not come from a checkpoint, and whether they are known to be complete.
fn rebuild(
    checkpoint: Option<BTreeMap<ClaimUid, Entry>>,
    unusable: Option<String>,
    traces: &BTreeMap<ClaimUid, Option<Spec>>,
    paths: &Paths,
    boot_id: &str,
) -> (PreparedClaims, Option<String>, bool) {
    let read = checkpoint.is_some();
    let is_older = read && !traces.is_empty();
    let entries = initial_entries(checkpoint, &paths.driver, boot_id, traces, || paths.kubelet());
    let rebuilt = match unusable {
        None if is_older => Some("it lacks claims that have a CDI file".to_owned()),
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

fn report(prepared_claims: &PreparedClaims, why: &str) {
    error!(
        reason = "CheckpointLost",
        claims = prepared_claims.entries().len(),
        "the checkpoint is unusable; prepared claims were rebuilt from the CDI files, kubelet's list and its containers: {why}"
    );
    for (uid, entry) in prepared_claims.entries() {
        if entry.has_unknown_devices() {
            error!(claim_uid = %uid, "the devices that {} holds are unknown; nothing is prepared until they are known", entry.describe(uid));
        } else {
            warn!(claim_uid = %uid, devices = ?entry.devices, "{} holds these devices", entry.describe(uid));
        }
    }
}

impl Storage for Store {
    type Error = StoreError;

    fn save(&self, prepared_claims: &PreparedClaims) -> Result<(), StoreError> {
        let mut state = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let text = Checkpoint::of(prepared_claims, &state.cluster, &state.unknown_containers)
            .encode()
            .map_err(StoreError::Encode)?;
        if text.len() > CHECKPOINT_MAX {
            return Err(StoreError::TooLarge(text.len()));
        }
        self.keep_lock(&mut state)?;
        let in_place = (text, Identity::of(&self.checkpoint.path));
        if state.text.as_ref() != Some(&in_place) {
            let (text, _) = in_place;
            // A failed write changes nothing: the last checkpoint stays durable, and needs no disk space to be so.
            self.checkpoint.replace(&text)?;
            state.text = None;
            self.checkpoint.make_durable()?;
            state.text = Some((text, Identity::of(&self.checkpoint.path)));
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
