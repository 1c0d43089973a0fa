//! A Unix socket in a directory that kubelet watches: bound under a hidden name, then renamed, and removed only if it is ours. And
//! a watch of that directory, which may be emptied, removed, replaced, or not exist yet.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use inotify::WatchMask;
use thiserror::Error;
use tokio::net::{UnixListener, UnixStream};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::node::directory_watch::DirectoryWatches;
use crate::node::resync;
use crate::node::state::storage::disk::Identity;

/// Longest socket path in bytes: `sun_path` has 108, the last of which is a NUL.
pub const MAX_PATH: usize = 107;
/// How long to wait for a connection to an existing socket before it counts as in use.
const PROBE: Duration = Duration::from_secs(1);
/// Mode of created directories, the same as kubelet's own device plugin directory.
const DIRECTORY_MODE: u32 = 0o750;

/// Poll interval while the directory is missing or inotify is unavailable.
const MISSING: Duration = Duration::from_millis(500);

/// Path of a socket, with the directory that must exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketPath {
    /// Absolute path of the socket.
    pub path: PathBuf,
    /// An ancestor directory that must exist; directories in between are created. A wrong option is thus an error instead of a new
    /// directory that kubelet never reads.
    pub root: PathBuf,
    /// The command-line option that sets the path, for errors.
    pub option: &'static str,
}

/// Why a socket cannot be served.
#[derive(Debug, Error)]
pub enum SocketError {
    /// The path does not fit into a socket address.
    #[error(
        "the socket path {path} needs {length} bytes during creation; at most {MAX_PATH} are possible: choose a shorter {option}"
    )]
    PathTooLong {
        /// The path.
        path: PathBuf,
        /// Bytes of the longer of its two names, the hidden one.
        length: usize,
        /// The option to change.
        option: &'static str,
    },
    /// The path is not absolute or has no file name.
    #[error("{path} is not an absolute path of a socket: correct {option}")]
    NotAbsolute {
        /// The path.
        path: PathBuf,
        /// The option to change.
        option: &'static str,
    },
    /// The directory that must exist is missing.
    #[error("the directory {root} does not exist: start kubelet, or correct {option}")]
    NoRoot {
        /// The directory.
        root: PathBuf,
        /// The option to change.
        option: &'static str,
    },
    /// The path exists and is not a socket. It is not removed.
    #[error("{path} exists and is not a socket: remove it, or change {option}")]
    NotASocket {
        /// The path.
        path: PathBuf,
        /// The option to change.
        option: &'static str,
    },
    /// Another process accepts connections there.
    #[error("another process serves {path}: stop it first")]
    InUse {
        /// The path.
        path: PathBuf,
    },
    /// A system call failed.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// The failed operation.
        action: &'static str,
        /// Its file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

impl SocketError {
    /// CamelCase name of the reason, for logs and metrics.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::PathTooLong { .. } => "SocketPathTooLong",
            Self::NotAbsolute { .. } => "SocketPathNotAbsolute",
            Self::NoRoot { .. } => "KubeletDirectoryMissing",
            Self::NotASocket { .. } => "SocketPathTaken",
            Self::InUse { .. } => "SocketInUse",
            Self::Io { .. } => "SocketFailed",
        }
    }

    fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io {
            action,
            path: path.to_owned(),
            source,
        }
    }
}

/// A listening socket, under its hidden name until [`Socket::publish`].
#[derive(Debug)]
pub(super) struct Socket {
    location: SocketPath,
    hidden: PathBuf,
    pub(super) listener: UnixListener,
    /// Device and inode. The listener keeps the inode alive, so its number cannot be reused while this value exists.
    file: (u64, u64),
}

impl Socket {
    /// Binds under the hidden name: kubelet ignores names that begin with a dot. It may log a failed stat of that name if the
    /// rename comes first.
    pub(super) async fn bind(location: &SocketPath) -> Result<Self, SocketError> {
        let hidden = check_path(location)?;
        make_directory(location)?;
        clear(&location.path, location).await?;
        clear(&hidden, location).await?;
        unlink_stale(&hidden)?;
        let listener = UnixListener::bind(&hidden).map_err(SocketError::io("bind", &hidden))?;
        fs::set_permissions(&hidden, fs::Permissions::from_mode(0o600))
            .map_err(SocketError::io("set the mode of", &hidden))?;
        let file = Identity::of(&hidden)
            .map(|identity| identity.file)
            .ok_or_else(|| SocketError::Io {
                action: "find again",
                path: hidden.clone(),
                source: io::ErrorKind::NotFound.into(),
            })?;
        Ok(Self {
            location: location.clone(),
            hidden,
            listener,
            file,
        })
    }

    /// Renames to the visible name, replacing a stale socket. Kubelet sees the complete socket or none.
    pub(super) fn publish(&self) -> Result<(), SocketError> {
        fs::rename(&self.hidden, &self.location.path)
            .map_err(SocketError::io("rename to", &self.location.path))
    }

    /// Whether the visible name still refers to this socket.
    pub(super) fn is_published(&self) -> bool {
        Identity::of(&self.location.path).is_some_and(|found| found.file == self.file)
    }

    /// Removes its names if they still refer to this socket.
    pub(super) fn remove(&self) {
        for path in [&self.location.path, &self.hidden] {
            if Identity::of(path).is_some_and(|found| found.file == self.file)
                && let Err(error) = fs::remove_file(path)
            {
                tracing::warn!(path = %path.display(), %error, "the socket cannot be removed");
            }
        }
    }
}

/// Validates the socket path and returns its hidden name.
pub(crate) fn check_path(location: &SocketPath) -> Result<PathBuf, SocketError> {
    let (path, option) = (location.path.clone(), location.option);
    let name = path.file_name().filter(|_| path.is_absolute());
    let Some(name) = name else {
        return Err(SocketError::NotAbsolute { path, option });
    };
    let mut hidden_name = std::ffi::OsString::from(".");
    hidden_name.push(name);
    let hidden = path.with_file_name(hidden_name);
    let length = hidden.as_os_str().len();
    if length > MAX_PATH {
        Err(SocketError::PathTooLong { path, length, option })
    } else {
        Ok(hidden)
    }
}

fn make_directory(location: &SocketPath) -> Result<(), SocketError> {
    if !location.root.is_dir() {
        return Err(SocketError::NoRoot {
            root: location.root.clone(),
            option: location.option,
        });
    }
    let Some(directory) = location.path.parent() else {
        return Ok(());
    };
    fs::DirBuilder::new()
        .recursive(true)
        .mode(DIRECTORY_MODE)
        .create(directory)
        .map_err(SocketError::io("create the directory", directory))
}

/// Checks that the path is free or a stale socket, which nothing serves.
async fn clear(path: &Path, location: &SocketPath) -> Result<(), SocketError> {
    let found = match fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(SocketError::io("look at", path)(error)),
    };
    if !found.file_type().is_socket() {
        return Err(SocketError::NotASocket {
            path: path.to_owned(),
            option: location.option,
        });
    }
    match timeout(PROBE, UnixStream::connect(path)).await {
        Ok(Err(error))
            if matches!(
                error.kind(),
                io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound
            ) =>
        {
            Ok(())
        }
        _ => Err(SocketError::InUse {
            path: path.to_owned(),
        }),
    }
}

/// Removes a socket that a killed process has left. A socket on which a process listens stays.
pub(crate) async fn remove_stale(location: &SocketPath) -> Result<(), SocketError> {
    clear(&location.path, location).await?;
    unlink_stale(&location.path)
}

fn unlink_stale(path: &Path) -> Result<(), SocketError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(SocketError::io("remove the stale socket", path)(error))
        }
        _ => Ok(()),
    }
}

/// Reports when sockets are created in or removed from a directory.
pub(super) struct DirectoryWatch {
    path: PathBuf,
    watches: DirectoryWatches,
}

impl DirectoryWatch {
    /// Starts watching; the directory may be missing.
    pub(super) fn new(path: &Path) -> Self {
        let fallback = format!("{} is polled", path.display());
        let mut watch = Self {
            path: path.to_owned(),
            watches: DirectoryWatches::new(WatchMask::DELETE_SELF | WatchMask::MOVE_SELF, fallback),
        };
        watch.follow();
        watch
    }

    /// Waits until a socket may have changed. The caller must then check: one event may stand for several changes, or for none.
    pub(super) async fn changed(&mut self) {
        // A rename of a parent directory, or a mount over the path, causes no event, so a resync checks the path periodically.
        let next = if self.watches.is_watching() {
            resync::next()
        } else {
            Instant::now() + MISSING
        };
        tokio::select! {
            // The directory also has our checkpoint, which changes with each claim.
            is_complete = self.watches.changed(is_socket) => {
                if !is_complete {
                    tracing::warn!(path = %self.path.display(), "events of a directory are lost");
                    sleep(MISSING).await;
                }
            }
            () = sleep_until(next) => {}
        }
        self.follow();
    }

    /// Watches the directory that the path refers to now.
    fn follow(&mut self) {
        let directory = self.path.exists().then(|| self.path.clone());
        self.watches.watch(&directory.into_iter().collect());
    }
}

/// Whether an entry can be a socket, ours or kubelet's.
fn is_socket(name: &OsStr) -> bool {
    Path::new(name)
        .extension()
        .is_some_and(|extension| extension == "sock")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn location(directory: &tempfile::TempDir, name: &str) -> SocketPath {
        SocketPath {
            path: directory.path().join(name),
            root: directory.path().into(),
            option: "--root-dir",
        }
    }

    #[tokio::test]
    async fn a_socket_is_hidden_until_published_and_then_removable() {
        let directory = tempfile::tempdir().unwrap();
        let location = location(&directory, "a/b/x.sock");
        let socket = Socket::bind(&location).await.unwrap();
        assert!(!location.path.exists() && !socket.is_published());
        let hidden = fs::metadata(location.path.with_file_name(".x.sock")).unwrap();
        assert_eq!(hidden.permissions().mode() & 0o777, 0o600);
        socket.publish().unwrap();
        assert!(socket.is_published());
        UnixStream::connect(&location.path).await.unwrap();
        socket.remove();
        assert_eq!(fs::read_dir(location.path.parent().unwrap()).unwrap().count(), 0);
    }

    #[tokio::test]
    async fn a_stale_socket_is_replaced_and_a_served_one_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let location = location(&directory, "x.sock");
        drop(UnixListener::bind(&location.path).unwrap());
        drop(UnixListener::bind(directory.path().join(".x.sock")).unwrap());
        let first = Socket::bind(&location).await.unwrap();
        first.publish().unwrap();
        let refused = Socket::bind(&location).await.unwrap_err();
        assert!(matches!(refused, SocketError::InUse { .. }), "{refused}");
        assert!(first.is_published());
    }

    #[tokio::test]
    async fn nothing_but_a_socket_is_ever_removed() {
        let directory = tempfile::tempdir().unwrap();
        for name in ["file", ".hidden", "link", "directory"] {
            let visible = name.trim_start_matches('.');
            let (location, other) = (location(&directory, visible), directory.path().join(name));
            match name {
                "link" => std::os::unix::fs::symlink("/dev/null", &other).unwrap(),
                "directory" => fs::create_dir(&other).unwrap(),
                _ => fs::write(&other, "precious").unwrap(),
            }
            let refused = Socket::bind(&location).await.unwrap_err();
            assert_eq!(
                refused.to_string(),
                format!(
                    "{} exists and is not a socket: remove it, or change --root-dir",
                    other.display()
                )
            );
            assert!(fs::symlink_metadata(&other).is_ok());
        }
    }

    #[tokio::test]
    async fn the_socket_of_another_is_not_removed() {
        let directory = tempfile::tempdir().unwrap();
        let location = location(&directory, "x.sock");
        let socket = Socket::bind(&location).await.unwrap();
        socket.publish().unwrap();
        fs::remove_file(&location.path).unwrap();
        let _other = UnixListener::bind(&location.path).unwrap();
        assert!(!socket.is_published());
        socket.remove();
        assert!(location.path.exists());
    }

    #[test]
    fn the_length_of_a_path_is_checked_with_its_hidden_name() {
        let location = |length: usize| SocketPath {
            path: format!("/d/{}", "n".repeat(length - 3)).into(),
            root: "/d".into(),
            option: "--root-dir",
        };
        assert_eq!(check_path(&location(106)).unwrap().as_os_str().len(), MAX_PATH);
        let refused = check_path(&location(107)).unwrap_err().to_string();
        assert!(
            refused.contains("/d/nnn") && refused.contains("108 bytes") && refused.contains("--root-dir"),
            "{refused}"
        );
    }

    #[tokio::test]
    async fn a_relative_path_and_a_missing_root_are_refused() {
        let relative = SocketPath {
            path: "x.sock".into(),
            root: "/".into(),
            option: "--root-dir",
        };
        assert!(matches!(
            Socket::bind(&relative).await,
            Err(SocketError::NotAbsolute { .. })
        ));
        let missing = SocketPath {
            path: "/nowhere/a/x.sock".into(),
            root: "/nowhere".into(),
            option: "--root-dir",
        };
        let refused = Socket::bind(&missing).await.unwrap_err();
        assert_eq!(
            refused.to_string(),
            "the directory /nowhere does not exist: start kubelet, or correct --root-dir"
        );
    }

    /// Waits for changes until the condition holds.
    async fn until(watch: &mut DirectoryWatch, condition: impl Fn() -> bool) {
        timeout(Duration::from_secs(5), async {
            while !condition() {
                watch.changed().await;
            }
        })
        .await
        .expect("an event");
    }

    #[tokio::test]
    async fn names_that_come_and_go_are_seen_at_once() {
        let directory = tempfile::tempdir().unwrap();
        let mut watch = DirectoryWatch::new(directory.path());
        let file = directory.path().join("x.sock");
        let start = Instant::now();
        let task = tokio::spawn(async move {
            watch.changed().await;
            watch
        });
        tokio::task::yield_now().await;
        std::fs::write(&file, "").unwrap();
        let mut watch = task.await.unwrap();
        std::fs::remove_file(&file).unwrap();
        watch.changed().await;
        assert!(
            start.elapsed() < resync::EVERY / 2,
            "by events, not by the safety net"
        );
    }

    #[tokio::test]
    async fn other_files_are_not_reported() {
        let directory = tempfile::tempdir().unwrap();
        let mut watch = DirectoryWatch::new(directory.path());
        let write = |name: &str| std::fs::write(directory.path().join(name), "").unwrap();
        write("checkpoint.json");
        write("x.sock.tmp");
        timeout(Duration::from_millis(100), watch.changed())
            .await
            .expect_err("no report");
        write(".x.sock");
        timeout(resync::EVERY / 2, watch.changed())
            .await
            .expect("a report");
    }

    #[tokio::test(start_paused = true)]
    async fn an_unwatched_directory_is_checked_twice_a_second() {
        let parent = tempfile::tempdir().unwrap();
        let mut watch = DirectoryWatch::new(parent.path());
        watch.watches.stop();
        let start = Instant::now();
        for _ in 0..4 {
            watch.changed().await;
        }
        assert_eq!(start.elapsed(), 4 * MISSING);
    }

    #[tokio::test]
    async fn a_directory_that_is_replaced_is_watched_again() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("d");
        let mut watch = DirectoryWatch::new(&path);
        assert!(!watch.watches.is_watching());
        std::fs::create_dir(&path).unwrap();
        until(&mut watch, || path.exists()).await;
        watch.changed().await;
        assert!(watch.watches.is_watching());
        // Renamed instead of removed, so that its inode number is not reused.
        std::fs::rename(&path, parent.path().join("old")).unwrap();
        std::fs::create_dir(&path).unwrap();
        watch.changed().await;
        // The removed watch is an event, too.
        while timeout(Duration::from_millis(200), watch.changed()).await.is_ok() {}
        assert!(watch.watches.is_watching());
        std::fs::write(path.join("x.sock"), "").unwrap();
        let start = Instant::now();
        watch.changed().await;
        assert!(start.elapsed() < resync::EVERY / 2);
    }
}
