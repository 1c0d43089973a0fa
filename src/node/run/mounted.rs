//! Detects host directories that are mounted into the companion's pod and have since been replaced on the host.
//!
//! A bind mount refers to a directory, not to a path. If the host removes and recreates a directory, the pod's mount stays on the
//! removed one: files written there are invisible outside, and no new ones can be created. Only a new mount helps, and a container
//! gets one when it starts.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{Mode, OFlags, StatVfsMountFlags, fstatvfs, open, statvfs};
use tokio::time::sleep;

use crate::node::kubelet::KubeletPaths;
use crate::node::state::storage::Paths;

/// Check interval. A check costs a few system calls and no disk access.
const EVERY: Duration = Duration::from_secs(5);

/// A directory held open, so that its removal is noticed even if another one now has its path.
#[derive(Debug)]
struct MountedDirectory {
    path: PathBuf,
    directory: Option<OpenDirectory>,
}

#[derive(Debug)]
struct OpenDirectory {
    file: File,
    writable: bool,
}

/// The directories that a pod mounts individually.
pub(super) fn mounted(paths: &Paths, kubelet: &KubeletPaths) -> Vec<PathBuf> {
    let sockets = [
        kubelet.registration_socket(paths.driver.as_str()).path,
        kubelet.pod_resources_socket(),
        kubelet.kubelet_socket(),
    ];
    let directories = sockets.iter().filter_map(|socket| socket.parent());
    [paths.state.as_path(), paths.cdi.as_path()]
        .into_iter()
        .chain(directories)
        .map(Path::to_path_buf)
        .collect()
}

/// Waits until the host has removed one of the directories so that its path no longer reaches the host's current one, and returns
/// that path. A directory that does not exist yet, or that can be recreated by its path, does not count.
pub(super) async fn cut_off(directories: Vec<PathBuf>) -> PathBuf {
    let mut held: Vec<MountedDirectory> = directories
        .into_iter()
        .map(|path| MountedDirectory {
            directory: OpenDirectory::open(&path),
            path,
        })
        .collect();
    loop {
        if let Some(lost) = held
            .iter_mut()
            .find_map(|held| held.is_cut_off().then(|| held.path.clone()))
        {
            return lost;
        }
        sleep(EVERY).await;
    }
}

impl MountedDirectory {
    fn is_cut_off(&mut self) -> bool {
        if let Some(directory) = &self.directory {
            if !directory.is_removed() {
                return false;
            }
            if leads_to_removed(&self.path) || (directory.writable && !may_be_written(&self.path)) {
                return true;
            }
        }
        self.directory = OpenDirectory::open(&self.path);
        false
    }
}

impl OpenDirectory {
    fn open(path: &Path) -> Option<Self> {
        let file = open(
            path,
            OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .ok()?;
        let writable = fstatvfs(&file).is_ok_and(|found| !found.f_flag.contains(StatVfsMountFlags::RDONLY));
        // A directory that is already removed is accepted too.
        Some(Self {
            file: file.into(),
            writable,
        })
    }

    fn is_removed(&self) -> bool {
        self.file.metadata().is_ok_and(|found| found.nlink() == 0)
    }
}

/// Whether the path still refers to a removed directory, as a bind mount of it does.
fn leads_to_removed(path: &Path) -> bool {
    path.metadata().is_ok_and(|found| found.nlink() == 0)
}

/// Whether the path, or its closest existing ancestor, is writable. If the removed directory was itself a mount point, the kernel
/// unmounts it and reveals the file system below: a read-only mount or the container's own.
fn may_be_written(path: &Path) -> bool {
    path.ancestors()
        .find_map(|path| statvfs(path).ok())
        .is_some_and(|found| !found.f_flag.contains(StatVfsMountFlags::RDONLY))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use tokio::time::{Instant, timeout};

    use super::*;

    /// Whether the loss is detected within two checks.
    async fn is_noticed(path: &Path, change: impl FnOnce()) -> bool {
        let directories = vec![path.to_owned()];
        let watch = tokio::spawn(cut_off(directories));
        tokio::task::yield_now().await;
        change();
        timeout(EVERY * 2 + EVERY / 2, watch).await.is_ok()
    }

    #[tokio::test(start_paused = true)]
    async fn a_mount_of_a_removed_directory_is_noticed() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("d");
        std::fs::create_dir(&path).unwrap();
        let mounted = File::open(&path).unwrap();
        // A magic link of the kernel refers to the directory itself, like a mount.
        let at = PathBuf::from(format!("/proc/self/fd/{}", mounted.as_raw_fd()));
        let start = Instant::now();
        assert!(
            is_noticed(&at, || {
                std::fs::remove_dir(&path).unwrap();
                std::fs::create_dir(&path).unwrap();
            })
            .await
        );
        assert!(start.elapsed() <= EVERY * 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_directory_that_can_be_recreated_is_not_reported() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("d");
        assert!(!is_noticed(&path, || std::fs::create_dir(&path).unwrap()).await);
        assert!(!is_noticed(&path, || std::fs::remove_dir(&path).unwrap()).await);
        let again = || {
            std::fs::create_dir(&path).unwrap();
            std::fs::remove_dir(&path).unwrap();
            std::fs::create_dir(&path).unwrap();
        };
        assert!(!is_noticed(&path, again).await);
    }
}
