//! A gRPC server on a Unix socket that is recreated whenever the socket or its directory is removed.

use std::io;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncWrite, AsyncWriteExt, DuplexStream};
use tokio::net::UnixStream;
use tokio::net::unix::OwnedReadHalf;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::service::Routes;
use tonic::transport::Server;

use super::authority::{MAX_DECODED_BLOCK, MAX_FRAME, Rewriter};
use super::count::{CountLayer, GrpcCalls};
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
/// How long a client may take to finish a preface or a header block. No well-behaved client pauses there.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval of pings on a connection on which nothing arrives: kubelet may be silent on that of a ListAndWatch for months. Each ping
/// wakes an idle node.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(300);
/// How long a client may take to answer a ping. A node whose kubelet is silent for 40 s is not ready; when a ListAndWatch ends
/// earlier, kubelet marks its devices unhealthy for no reason.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes per read from a client, and in each direction of the pipe between a connection and its server.
const CHUNK: usize = 8192;
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

/// Passes bytes between a client and its server, with the `:authority` of requests replaced, until either closes or `cut` is
/// cancelled.
async fn relay(client: UnixStream, server: DuplexStream, cut: CancellationToken) {
    let (from_client, mut to_client) = client.into_split();
    let (mut from_server, to_server) = tokio::io::split(server);
    let requests = async {
        relay_requests(&from_client, to_server).await?;
        // The client sends no more. The server closes its end once it has answered.
        std::future::pending::<io::Result<()>>().await
    };
    let responses = async { tokio::io::copy(&mut from_server, &mut to_client).await.map(drop) };
    let ended = tokio::select! {
        () = cut.cancelled() => Ok(()),
        ended = requests => ended,
        ended = responses => ended,
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection is closed");
    }
}

/// Passes on requests until the client sends no more. Fails if it breaks HTTP/2 or does not finish a header in time.
async fn relay_requests(client: &OwnedReadHalf, mut server: impl AsyncWrite + Unpin) -> io::Result<()> {
    let mut rewriter = Rewriter::default();
    let mut deadline = None;
    loop {
        deadline = match (rewriter.owed(), deadline) {
            (None, _) => None,
            (Some(part), Some((since, at))) if part == since => Some((since, at)),
            (Some(part), _) => Some((part, Instant::now() + HEADER_TIMEOUT)),
        };
        let input = match deadline {
            None => read(client).await?,
            Some((_, at)) => timeout_at(at, read(client)).await.unwrap_or_else(|_| {
                tracing::warn!(
                    reason = "UnfinishedRequest",
                    "a connection is closed: the client does not finish a header within {HEADER_TIMEOUT:?}"
                );
                Err(io::ErrorKind::TimedOut.into())
            })?,
        };
        if input.is_empty() {
            return server.shutdown().await;
        }
        let mut rest = input.as_slice();
        while !rest.is_empty() {
            let mut output = Vec::new();
            let used = rewriter.advance(rest, &mut output).map_err(|error| {
                tracing::warn!(reason = error.reason(), %error, "a connection is closed");
                io::Error::new(io::ErrorKind::InvalidData, error)
            })?;
            rest = rest.get(used..).unwrap_or_default();
            server.write_all(&output).await?;
        }
    }
}

/// The next bytes, none at the end. The buffer is made when there are bytes, so that an idle connection has none.
async fn read(client: &OwnedReadHalf) -> io::Result<Vec<u8>> {
    loop {
        client.readable().await?;
        let mut input = Vec::with_capacity(CHUNK);
        match client.try_read_buf(&mut input) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
            Ok(_) => return Ok(input),
        }
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
    use tokio::io::AsyncReadExt;

    use super::*;

    const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    const PING: &[u8] = &[0, 0, 8, 6, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];

    /// The client's and the server's end of a relayed connection.
    fn relayed(cut: &CancellationToken) -> (UnixStream, DuplexStream, JoinHandle<()>) {
        let (client, accepted) = UnixStream::pair().unwrap();
        let (pipe, server) = tokio::io::duplex(CHUNK);
        (client, server, tokio::spawn(relay(accepted, pipe, cut.clone())))
    }

    /// The bytes that the server reads until the connection is closed.
    async fn received(server: &mut DuplexStream) -> Vec<u8> {
        let mut bytes = Vec::new();
        server.read_to_end(&mut bytes).await.unwrap();
        bytes
    }

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

    #[tokio::test(start_paused = true)]
    async fn a_client_without_a_whole_preface_is_closed_in_10_s() {
        for sent in [&[][..], &PREFACE[..5]] {
            let (mut client, mut server, relay) = relayed(&CancellationToken::new());
            client.write_all(sent).await.unwrap();
            let start = Instant::now();
            assert_eq!(received(&mut server).await, sent);
            relay.await.unwrap();
            assert_eq!(start.elapsed().as_secs(), 10);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_header_block_that_trickles_in_is_closed_in_10_s() {
        let (mut client, mut server, _relay) = relayed(&CancellationToken::new());
        client.write_all(PREFACE).await.unwrap();
        let begin = [&[0, 0, 200, 1, 0, 0, 0, 0, 1][..], &[0x82]].concat();
        tokio::spawn(async move {
            sleep(Duration::from_secs(100)).await;
            client.write_all(&begin).await.unwrap();
            for _ in 0..100 {
                sleep(Duration::from_secs(1)).await;
                if client.write_all(&[0x82]).await.is_err() {
                    return;
                }
            }
        });
        let start = Instant::now();
        assert_eq!(received(&mut server).await, PREFACE);
        assert_eq!(start.elapsed().as_secs(), 110);
    }

    #[tokio::test(start_paused = true)]
    async fn an_established_connection_may_be_silent_for_months() {
        let (mut client, mut server, _relay) = relayed(&CancellationToken::new());
        client.write_all(PREFACE).await.unwrap();
        tokio::spawn(async move {
            sleep(Duration::from_secs(100 * 24 * 3600)).await;
            client.write_all(PING).await.unwrap();
        });
        let mut bytes = [0; 41];
        server.read_exact(&mut bytes).await.unwrap();
        assert_eq!(bytes[24..], *PING);
    }

    #[tokio::test]
    async fn a_cut_ends_a_connection_that_neither_side_closes() {
        let cut = CancellationToken::new();
        let (mut client, mut server, relay) = relayed(&cut);
        client.write_all(PREFACE).await.unwrap();
        // More than the pipe and the socket take, so that the relay waits for the client to read.
        let writer = tokio::spawn(async move { server.write_all(&vec![0; 4_000_000]).await });
        tokio::task::yield_now().await;
        cut.cancel();
        relay.await.unwrap();
        assert_eq!(
            writer.await.unwrap().unwrap_err().kind(),
            io::ErrorKind::BrokenPipe
        );
    }

    #[tokio::test]
    async fn a_client_that_breaks_the_protocol_is_closed() {
        let (mut client, mut server, relay) = relayed(&CancellationToken::new());
        client.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
        assert!(received(&mut server).await.is_empty());
        relay.await.unwrap();
        assert_eq!(client.read(&mut [0; 1]).await.unwrap_or_default(), 0);
    }

    #[tokio::test]
    async fn every_byte_passes_in_both_directions() {
        let data = [&[0, 0x40, 0, 0, 0, 0, 0, 0, 1][..], &[7; 16_384]].concat();
        let requests = [PREFACE.to_vec(), data.repeat(20)].concat();
        let responses = vec![9; 300_000];
        let (client, server, relay) = relayed(&CancellationToken::new());
        let (mut from_server, mut to_server) = client.into_split();
        let (mut from_client, mut to_client) = tokio::io::split(server);
        let (mut got_requests, mut got_responses) = (vec![0; requests.len()], vec![0; responses.len()]);
        let results = tokio::join!(
            to_server.write_all(&requests),
            from_client.read_exact(&mut got_requests),
            to_client.write_all(&responses),
            from_server.read_exact(&mut got_responses),
        );
        results.0.and(results.2).unwrap();
        results.1.and(results.3).unwrap();
        assert!(got_requests == requests && got_responses == responses);
        // The client closes, then the server.
        drop((to_server, from_server));
        assert_eq!(from_client.read(&mut [0; 1]).await.unwrap(), 0);
        drop((from_client, to_client));
        relay.await.unwrap();
    }
}
