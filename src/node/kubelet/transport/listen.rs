//! A gRPC server on a Unix socket that is recreated whenever the socket or its directory is removed.

use std::path::Path;
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::net::UnixStream;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::transport::Server;

use super::authority::{MAX_DECODED_BLOCK, MAX_FRAME};
use super::calls::Activity;
use super::connection::{Clock, Connection};
use super::count::{Count, GrpcCalls};
use super::directory::DirectoryWatch;
use super::socket::{Socket, SocketError, SocketPath, check_path};

/// Connections to one socket at a time. Kubelet opens one or two. A further connection replaces an idle one.
pub const MAX_CONNECTIONS: usize = 64;
/// Concurrent calls on one connection.
pub const MAX_STREAMS: u32 = 100;
/// Deadline for a response, or for the first message of a stream. Kubelet's longest deadline is 45 s, and Allocate has none, so
/// nothing else would end such a call.
const CALL_LIMIT: Duration = Duration::from_secs(60);
/// HTTP/2 flow control windows in bytes, per call and per connection.
const STREAM_WINDOW: u32 = 65_535;
const CONNECTION_WINDOW: u32 = 262_144;
/// Grace period for calls in flight after a shutdown.
const DRAIN: Duration = Duration::from_secs(5);
/// How long to wait for a closed idle connection to release its slot.
const GIVE_WAY: Duration = Duration::from_secs(1);
/// First and longest delay before a lost socket is recreated.
const RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));

/// A running server.
#[derive(Debug)]
pub struct Listening {
    /// How often the socket was published: 1 at first, then once more for each recreation.
    pub published: watch::Receiver<u64>,
    /// Changes whenever the socket's directory may have changed, and on each resync, every minute.
    pub directory: watch::Receiver<u64>,
    renew: Arc<Notify>,
    task: JoinHandle<()>,
}

impl Listening {
    /// Removes and recreates the socket, so that watchers of the directory see a new one.
    pub fn renew(&self) {
        self.renew.notify_one();
    }

    /// Waits until the server has stopped. After the shutdown, calls in flight have a grace period of a few seconds.
    pub async fn closed(self) {
        if let Err(error) = self.task.await {
            tracing::error!(%error, "the task of a socket failed");
        }
    }
}

/// Serves `routes` on a socket until the shutdown and counts the calls. On return, the socket is published and accepts connections.
pub async fn listen(
    place: SocketPath,
    routes: Routes,
    calls: Arc<GrpcCalls>,
    shutdown: CancellationToken,
) -> Result<Listening, SocketError> {
    check_path(&place)?;
    let socket = Socket::bind(&place).await?;
    let directory = place.path.parent().unwrap_or_else(|| Path::new("/"));
    let watch = DirectoryWatch::new(directory);
    let cut = CancellationToken::new();
    let (connections, incoming) = mpsc::channel(1);
    let server = Server::builder()
        .max_concurrent_streams(MAX_STREAMS)
        .max_frame_size(u32::try_from(MAX_FRAME).ok())
        .http2_max_header_list_size(u32::try_from(MAX_DECODED_BLOCK).ok())
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .timeout(CALL_LIMIT)
        .layer(Count(calls))
        .add_routes(routes)
        .serve_with_incoming_shutdown(ReceiverStream::new(incoming), shutdown.clone().cancelled_owned());
    let mut keeper = Keeper {
        place,
        socket: None,
        slots: Arc::new(Semaphore::new(MAX_CONNECTIONS)),
        open: Vec::new(),
        clock: Clock::start(),
        connections,
        cut: cut.clone(),
        published: watch::Sender::new(0),
        directory: watch::Sender::new(0),
        renew: Arc::new(Notify::new()),
    };
    // Published before the server is spawned, so that an error ends everything; an early client waits in the backlog.
    keeper.publish(socket)?;
    let (published, directory) = (keeper.published.subscribe(), keeper.directory.subscribe());
    let renew = Arc::clone(&keeper.renew);
    let task = tokio::spawn(async move {
        let serve = async {
            let mut server = pin!(server);
            let overdue = async {
                shutdown.cancelled().await;
                sleep(DRAIN).await;
            };
            let ended = tokio::select! {
                ended = &mut server => ended,
                () = overdue => {
                    cut.cancel();
                    server.await
                }
            };
            if let Err(error) = ended {
                tracing::error!(%error, "a gRPC server failed");
            }
        };
        tokio::join!(keeper.keep(watch, shutdown.clone()), serve);
    });
    Ok(Listening {
        published,
        directory,
        renew,
        task,
    })
}

/// Owns the socket and accepts its connections.
struct Keeper {
    place: SocketPath,
    socket: Option<Socket>,
    slots: Arc<Semaphore>,
    /// Open connections; closed ones are pruned when the next one arrives.
    open: Vec<Weak<Activity>>,
    clock: Clock,
    connections: mpsc::Sender<std::io::Result<Connection<UnixStream>>>,
    cut: CancellationToken,
    published: watch::Sender<u64>,
    directory: watch::Sender<u64>,
    renew: Arc<Notify>,
}

impl Keeper {
    fn publish(&mut self, socket: Socket) -> Result<(), SocketError> {
        if let Err(error) = socket.publish() {
            socket.remove();
            return Err(error);
        }
        self.socket = Some(socket);
        self.published.send_modify(|count| *count += 1);
        Ok(())
    }

    async fn keep(mut self, mut watch: DirectoryWatch, shutdown: CancellationToken) {
        let (mut pause, mut complaint) = (RETRY.0, None);
        let renew = Arc::clone(&self.renew);
        loop {
            tokio::select! {
                () = shutdown.cancelled() => break,
                accepted = accept(self.socket.as_ref()) => self.admit(accepted).await,
                () = watch.changed() => self.directory.send_modify(|count| *count += 1),
                () = renew.notified() => self.forget(),
                () = sleep(pause), if self.socket.is_none() => pause = RETRY.1.min(pause * 2),
            }
            if self.socket.as_ref().is_some_and(Socket::is_published) {
                continue;
            }
            let path = self.place.path.display().to_string();
            self.forget();
            match self.again().await {
                Ok(()) => {
                    tracing::info!(path, "the socket was gone and is made again");
                    (pause, complaint) = (RETRY.0, None);
                }
                Err(error) => {
                    let text = error.to_string();
                    if complaint.as_ref() != Some(&text) {
                        tracing::error!(reason = error.reason(), %error, "the socket is gone and cannot be made again yet");
                    }
                    complaint = Some(text);
                }
            }
        }
        self.forget();
    }

    async fn again(&mut self) -> Result<(), SocketError> {
        let socket = Socket::bind(&self.place).await?;
        self.publish(socket)
    }

    /// Removes the socket if its path still names ours. It must still be listening, so that its inode number cannot be reused.
    fn forget(&mut self) {
        if let Some(socket) = self.socket.take() {
            socket.remove();
        }
    }

    async fn admit(&mut self, accepted: std::io::Result<UnixStream>) {
        let path = self.place.path.display();
        let stream = match accepted {
            Ok(stream) => stream,
            Err(error) => {
                tracing::warn!(%path, %error, "a connection cannot be accepted");
                // The likely cause is that no file descriptors are left.
                return sleep(RETRY.0).await;
            }
        };
        let peer = stream.peer_cred().map(|peer| peer.uid());
        if !matches!(peer, Ok(uid) if may_connect(uid, rustix::process::geteuid().as_raw())) {
            tracing::warn!(%path, ?peer, reason = "PeerRefused", "a connection is refused: its user is neither root nor ours");
            return;
        }
        let Some(slot) = self.slot().await else {
            let path = self.place.path.display();
            tracing::warn!(%path, reason = "TooManyConnections", "a connection is refused: {MAX_CONNECTIONS} are open, each with a call");
            return;
        };
        let activity = Arc::new(Activity::new(self.cut.child_token(), self.clock.now()));
        self.open.retain(|other| other.strong_count() > 0);
        self.open.push(Arc::downgrade(&activity));
        let connection = Connection::new(stream, slot, activity, self.clock);
        // Fails only after the shutdown.
        let _ = self.connections.send(Ok(connection)).await;
    }

    /// Acquires a connection slot, if necessary by closing the connection that has been idle for longest.
    async fn slot(&self) -> Option<OwnedSemaphorePermit> {
        if let Ok(slot) = Arc::clone(&self.slots).try_acquire_owned() {
            return Some(slot);
        }
        let idle = self.open.iter().filter_map(Weak::upgrade);
        let longest = idle
            .filter_map(|activity| Some((activity.idle_since()?, activity)))
            .min_by_key(|(since, _)| *since)?;
        let path = self.place.path.display();
        tracing::debug!(%path, reason = "TooManyConnections", "the connection that was idle for longest is closed for another");
        longest.1.cut.cancel();
        timeout(GIVE_WAY, Arc::clone(&self.slots).acquire_owned())
            .await
            .ok()?
            .ok()
    }
}

async fn accept(socket: Option<&Socket>) -> std::io::Result<UnixStream> {
    match socket {
        Some(socket) => socket.accept().await,
        None => std::future::pending().await,
    }
}

/// Kubelet runs as root. Our own user gains nothing by connecting: it already has the privileges of this process.
const fn may_connect(uid: u32, own: u32) -> bool {
    uid == 0 || uid == own
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_and_our_own_user_may_connect_and_nobody_else() {
        assert!(may_connect(0, 0) && may_connect(0, 1000) && may_connect(1000, 1000));
        assert!(!may_connect(1000, 0) && !may_connect(65534, 1000));
    }
}
