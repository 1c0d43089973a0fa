//! HTTP connections with bounds: on their number, their lifetime and their buffers.
//!
//! Each connection serves one request and closes. Kubelet never reuses the connection of a probe, and a scraper opens one per interval.
//! Thus each connection has one deadline, for the request, the response and a client that reads it slowly.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::time::Duration;

use axum::Router;
use axum::serve::Listener;
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};
use tokio_util::sync::CancellationToken;

use super::secure::Certificate;

/// Maximum number of connections per listen address. Kubelet and each scraper need one each. With [`BUFFER`] and one
/// task per connection, two addresses need less than 2 MB of memory, and up to 4 MB more for unfinished handshakes over TLS.
const CONNECTIONS_MAX: usize = 64;
/// Maximum lifetime of a connection: the default `scrape_timeout` of Prometheus. The chart's probes wait for 5 s at
/// most.
const LIFETIME: Duration = Duration::from_secs(10);
/// Maximum size of a request line and its headers in bytes. This is hyper's minimum, and ten times the headers of
/// Prometheus.
const BUFFER: usize = 8 * 1024;

/// Serves the connections of a listener, over TLS if there is a certificate, until the token is cancelled, then waits for the open ones.
pub(super) async fn serve(
    mut listener: TcpListener,
    certificate: Option<Certificate>,
    router: Router,
    shutdown: CancellationToken,
) {
    let mut tasks = JoinSet::new();
    let mut open: VecDeque<(IpAddr, AbortHandle)> = VecDeque::new();
    loop {
        let (stream, peer) = tokio::select! {
            () = shutdown.cancelled() => break,
            accepted = Listener::accept(&mut listener) => accepted,
        };
        while tasks.try_join_next().is_some() {}
        open.retain(|(_, task)| !task.is_finished());
        if open.len() >= CONNECTIONS_MAX
            && let Some((evicted, task)) = open.remove(victim(open.iter().map(|(peer, _)| *peer)))
        {
            tracing::debug!(peer = %evicted, "a connection is closed in favor of a newer one");
            task.abort();
        }
        let task = tasks.spawn(one_connection(stream, certificate.clone(), router.clone()));
        open.push_back((peer.ip().to_canonical(), task));
        // Accepted connections get their turn before the next one is accepted, so that a burst cannot evict them unserved.
        tokio::task::yield_now().await;
    }
    drop(listener);
    while tasks.join_next().await.is_some() {}
}

/// Serves one request within the lifetime of a connection.
async fn one_connection(stream: TcpStream, certificate: Option<Certificate>, router: Router) {
    let connection = async {
        match certificate {
            None => one_request(stream, router).await,
            Some(certificate) => one_request(certificate.acceptor().accept(stream).await?, router).await,
        }
    };
    match tokio::time::timeout(LIFETIME, connection).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "a connection of metrics or probes failed"),
        Err(_) => tracing::debug!(
            "a connection of metrics or probes is closed: it is unfinished after {LIFETIME:?}"
        ),
    }
}

/// Serves one request. Errors are caused by the client: invalid HTTP, an oversized request, or a closed connection.
async fn one_request(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    router: Router,
) -> Result<(), anyhow::Error> {
    let connection = http1::Builder::new()
        .keep_alive(false)
        .max_buf_size(BUFFER)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    Ok(connection.await?)
}

/// Selects the connection to close: the oldest one of the peer with the most connections. `peers` lists the peers of
/// all connections, oldest first. A peer with many connections thus evicts its own, never kubelet's.
fn victim(peers: impl Iterator<Item = IpAddr> + Clone) -> usize {
    let mut counts: BTreeMap<IpAddr, usize> = BTreeMap::new();
    for peer in peers.clone() {
        *counts.entry(peer).or_default() += 1;
    }
    let most = counts.values().copied().max().unwrap_or_default();
    peers
        .into_iter()
        .position(|peer| counts.get(&peer) == Some(&most))
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::time::Instant;

    use super::*;

    /// Starts a server.
    async fn server() -> (
        std::net::SocketAddr,
        tokio::task::JoinHandle<()>,
        CancellationToken,
    ) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, shutdown) = (listener.local_addr().unwrap(), CancellationToken::new());
        let router = Router::new().route("/", get(|| async { "ok" }));
        let task = tokio::spawn(serve(listener, None, router, shutdown.clone()));
        (address, task, shutdown)
    }

    /// Sends the bytes, and reads until the server closes the connection.
    async fn ask(address: std::net::SocketAddr, bytes: &[u8]) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        let mut answer = Vec::new();
        // A reset follows if the server leaves bytes unread.
        let _ = stream.read_to_end(&mut answer).await;
        String::from_utf8(answer).unwrap()
    }

    #[test]
    fn the_busiest_peer_loses_its_oldest_connection() {
        let of = |last: u8| IpAddr::from([10, 0, 0, last]);
        for (peers, expected) in [
            (vec![of(1)], 0),
            (vec![of(1), of(2), of(3)], 0),
            (vec![of(1), of(2), of(3), of(2)], 1),
            (vec![of(2), of(1), of(1), of(2), of(1)], 1),
        ] {
            assert_eq!(victim(peers.iter().copied()), expected, "{peers:?}");
        }
    }

    #[tokio::test]
    async fn an_unfinished_header_ends_with_the_lifetime() {
        let (address, _task, _shutdown) = server().await;
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nx: ").await.unwrap();
        assert!(
            ask(address, b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
                .await
                .ends_with("ok")
        );
        tokio::time::pause();
        let start = Instant::now();
        let mut answer = Vec::new();
        assert_eq!(stream.read_to_end(&mut answer).await.unwrap(), 0);
        assert!(
            start.elapsed() <= LIFETIME + Duration::from_secs(1),
            "{:?}",
            start.elapsed()
        );
    }

    #[tokio::test]
    async fn a_header_above_the_bound_is_refused() {
        let (address, _task, _shutdown) = server().await;
        let request = format!("GET / HTTP/1.1\r\nhost: a\r\nx: {}\r\n\r\n", "a".repeat(BUFFER));
        let answer = ask(address, request.as_bytes()).await;
        assert!(
            answer.is_empty() || answer.starts_with("HTTP/1.1 431"),
            "{answer}"
        );
    }

    #[tokio::test]
    async fn a_connection_serves_one_request() {
        let (address, _task, _shutdown) = server().await;
        let request = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n";
        let answer = ask(address, &[request.as_slice(), request.as_slice()].concat()).await;
        assert_eq!(answer.matches("HTTP/1.1 200").count(), 1, "{answer}");
        assert!(answer.contains("connection: close"), "{answer}");
    }

    #[tokio::test]
    async fn a_new_connection_evicts_the_oldest_idle_one() {
        let (address, task, shutdown) = server().await;
        let start = Instant::now();
        let mut idle = Vec::new();
        for _ in 0..=CONNECTIONS_MAX {
            idle.push(TcpStream::connect(address).await.unwrap());
        }
        assert!(
            ask(address, b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
                .await
                .ends_with("ok")
        );
        for evicted in idle.drain(..2) {
            let mut evicted = evicted;
            assert_eq!(evicted.read(&mut [0]).await.unwrap(), 0);
        }
        assert!(
            start.elapsed() < LIFETIME,
            "they are closed before their lifetime ends"
        );
        shutdown.cancel();
        drop(idle);
        task.await.unwrap();
    }
}
