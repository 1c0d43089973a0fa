//! A gRPC server on a Unix socket that is recreated whenever the socket or its directory is removed.

use std::io;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::DuplexStream;
use tokio::net::UnixStream;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::service::Routes;
use tonic::transport::Server;

use super::count::{CountLayer, GrpcCalls};
use super::relay::{CHUNK, MAX_DECODED_BLOCK, MAX_FRAME, relay};
use super::socket::{DirectoryWatch, Socket, SocketError, SocketPath, check_path};

/// Connections to one socket at a time; further ones are closed at once. Kubelet opens one or two, so the rest is for health checks
/// and tools of root. 64 bound the file descriptors and the memory (about 30 KiB each) of a process with a dozen sockets.
pub const MAX_CONNECTIONS: usize = 64;
/// Concurrent calls on one connection.
const MAX_STREAMS: u32 = 100;
/// Deadline for a response, or for the first message of a stream. Kubelet's longest deadline is 45 s, and Allocate has none, so
/// nothing else would end such a call.
const CALL_LIMIT: Duration = Duration::from_secs(60);
/// HTTP/2 flow control windows in bytes, per call and per connection.
const STREAM_WINDOW: u32 = 65_535;
const CONNECTION_WINDOW: u32 = 262_144;
/// Grace period for calls in flight after a shutdown.
const DRAIN: Duration = Duration::from_secs(5);
/// Interval of pings on a connection on which nothing arrives: kubelet may be silent on that of a ListAndWatch for months. Each ping
/// wakes an idle node.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(300);
/// How long a client may take to answer a ping. A node whose kubelet is silent for 40 s is not ready; when a ListAndWatch ends
/// earlier, kubelet marks its devices unhealthy for no reason.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(60);
/// Shortest time between two log lines about refused connections.
const REFUSAL_LOG_INTERVAL: Duration = Duration::from_secs(60);
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
    location: SocketPath,
    routes: Routes,
    calls: Arc<GrpcCalls>,
    shutdown: CancellationToken,
) -> Result<Listening, SocketError> {
    check_path(&location)?;
    let socket = Socket::bind(&location).await?;
    let directory = location.path.parent().unwrap_or_else(|| Path::new("/"));
    let watch = DirectoryWatch::new(directory);
    let cut = CancellationToken::new();
    let (connections, incoming) = mpsc::channel(1);
    let server = Server::builder()
        .max_concurrent_streams(MAX_STREAMS)
        .max_frame_size(u32::try_from(MAX_FRAME).ok())
        .http2_max_header_list_size(u32::try_from(MAX_DECODED_BLOCK).ok())
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
        .timeout(CALL_LIMIT)
        .layer(CountLayer(calls))
        .add_routes(routes)
        .serve_with_incoming_shutdown(ReceiverStream::new(incoming), shutdown.clone().cancelled_owned());
    let mut keeper = Keeper {
        location,
        socket: None,
        relays: TaskTracker::new(),
        refusals: Refusals::default(),
        connections,
        cut: cut.clone(),
        published: watch::Sender::new(0),
        directory: watch::Sender::new(0),
        renew: Arc::new(Notify::new()),
    };
    // Published before the server is spawned, so that an error ends everything; an early client waits in the backlog.
    keeper.publish(socket)?;
    let (published, directory) = (keeper.published.subscribe(), keeper.directory.subscribe());
    let (renew, relays) = (Arc::clone(&keeper.renew), keeper.relays.clone());
    let task = tokio::spawn(async move {
        let serve = async {
            // The relays end after the server: they pass on its last bytes.
            let mut server = pin!(async {
                let ended = server.await;
                relays.close();
                relays.wait().await;
                ended
            });
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
    location: SocketPath,
    socket: Option<Socket>,
    /// A task per open connection.
    relays: TaskTracker,
    refusals: Refusals,
    connections: mpsc::Sender<io::Result<DuplexStream>>,
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
            let path = self.location.path.display().to_string();
            self.forget();
            match self.again().await {
                Ok(()) => {
                    tracing::info!(path, "the socket was removed and has been recreated");
                    (pause, complaint) = (RETRY.0, None);
                }
                Err(error) => {
                    let text = error.to_string();
                    if complaint.as_ref() != Some(&text) {
                        tracing::error!(reason = error.reason(), %error, "the socket was removed and cannot be recreated yet");
                    }
                    complaint = Some(text);
                }
            }
        }
        self.forget();
    }

    async fn again(&mut self) -> Result<(), SocketError> {
        let socket = Socket::bind(&self.location).await?;
        self.publish(socket)
    }

    /// Removes the socket if its path still names ours. It must still be listening, so that its inode number cannot be reused.
    fn forget(&mut self) {
        if let Some(socket) = self.socket.take() {
            socket.remove();
        }
    }

    async fn admit(&mut self, accepted: io::Result<UnixStream>) {
        let path = self.location.path.display();
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
            tracing::warn!(%path, ?peer, reason = "PeerRefused", "a connection is refused: its user is neither root nor the companion's");
            return;
        }
        if self.relays.len() >= MAX_CONNECTIONS {
            if let Some(refused) = self.refusals.count(Instant::now()) {
                tracing::warn!(%path, reason = "TooManyConnections", "{refused} connections are refused: {MAX_CONNECTIONS} are open, the limit of a socket");
            }
            return;
        }
        let (relayed, served) = tokio::io::duplex(CHUNK);
        self.relays.spawn(relay(stream, relayed, self.cut.clone()));
        // Fails only after the shutdown.
        let _ = self.connections.send(Ok(served)).await;
    }
}

/// Counts refused connections for a log line per [`REFUSAL_LOG_INTERVAL`].
#[derive(Debug, Default)]
struct Refusals {
    unlogged: u64,
    logged: Option<Instant>,
}

impl Refusals {
    /// Counts one. Returns how many there were since the last log line if the next one is due.
    fn count(&mut self, now: Instant) -> Option<u64> {
        self.unlogged += 1;
        let waits = self
            .logged
            .is_some_and(|logged| now.duration_since(logged) < REFUSAL_LOG_INTERVAL);
        if waits {
            return None;
        }
        self.logged = Some(now);
        Some(std::mem::take(&mut self.unlogged))
    }
}

async fn accept(socket: Option<&Socket>) -> io::Result<UnixStream> {
    match socket {
        Some(socket) => socket.listener.accept().await.map(|(stream, _)| stream),
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
    fn only_root_and_our_own_user_may_connect() {
        assert!(may_connect(0, 0) && may_connect(0, 1000) && may_connect(1000, 1000));
        assert!(!may_connect(1000, 0) && !may_connect(65534, 1000));
    }

    #[test]
    fn refused_connections_are_logged_once_a_minute() {
        let (mut refusals, start) = (Refusals::default(), Instant::now());
        let counts =
            [0, 1, 59, 60, 61, 200].map(|second| refusals.count(start + Duration::from_secs(second)));
        assert_eq!(counts, [Some(1), None, None, Some(3), None, Some(2)]);
    }
}
