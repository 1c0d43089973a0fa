//! A gRPC client for unary calls with an arbitrary `:authority`.
//!
//! kubelet sends the socket's path there, which is not a valid authority, so clients built on h2 cannot send it. This
//! client writes its own frames, with one connection per call like kubelet's plugin watcher.

use std::future::Future;
use std::path::Path;
use std::time::Duration;

use loona_hpack::{Decoder, Encoder};
use prost::Message;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::time::{sleep, timeout};

use crate::testcluster::api::percent_decoded;
use crate::testcluster::faults::{Fault, Faults, Operation};

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RESET: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GO_AWAY: u8 = 7;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
/// Default maximum payload of an HTTP/2 frame.
const FRAME_MAX: usize = 16_384;
/// Initial flow-control window of a stream. Kubelet's calls are shorter.
const WINDOW: usize = 65_535;

/// Why a call fails.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GrpcError {
    #[error("{0}")]
    Io(#[from] std::io::Error),
    #[error("no answer within {} s", .0.as_secs())]
    Late(Duration),
    #[error("rpc error: code = {code} desc = {message}")]
    Status { code: String, message: String },
    #[error("the answer cannot be read: {0}")]
    Unreadable(String),
}

/// Delay of a late call.
const LATE: Duration = Duration::from_millis(1200);

/// Connection from kubelet to a program, with optional fault injection.
#[derive(Clone, Debug, Default)]
pub(crate) struct GrpcClient(Option<(Faults, &'static str)>);

impl GrpcClient {
    /// Creates a connection with fault injection.
    pub(crate) fn new(faults: Faults, program: &'static str) -> Self {
        Self(Some((faults, program)))
    }

    /// Calls a method of the service behind a socket, with the socket's path as authority.
    pub(crate) async fn call<Q: Message, A: Message + Default>(
        &self,
        socket: &Path,
        method: &str,
        request: &Q,
        limit: Duration,
    ) -> Result<A, GrpcError> {
        self.with_fault(method, limit, || call(socket, method, request, limit))
            .await
    }

    /// Makes a call through `exchange`, with fault injection.
    pub(crate) async fn with_fault<A, F: Future<Output = Result<A, GrpcError>>>(
        &self,
        method: &str,
        limit: Duration,
        exchange: impl Fn() -> F,
    ) -> Result<A, GrpcError> {
        let Some(process) = self
            .0
            .as_ref()
            .and_then(|(faults, program)| faults.present(program))
        else {
            return exchange().await;
        };
        let gone = || GrpcError::Io(std::io::ErrorKind::ConnectionReset.into());
        let fault = process
            .start_operation(Operation::Call, method)
            .map_err(|_| gone())?;
        match fault {
            Some(Fault::Lost) => return Err(GrpcError::Late(limit)),
            Some(Fault::Late) => sleep(LATE).await,
            _ => {}
        }
        let answer = if fault == Some(Fault::Twice) {
            // The first response belongs to a call that kubelet has abandoned.
            tokio::join!(exchange(), exchange()).1
        } else {
            exchange().await
        };
        if answer.is_ok() && !process.is_killed() {
            process.notify(Operation::Call, method);
        }
        match fault {
            Some(Fault::KilledAfter) => process.kill(),
            Some(Fault::ReplyLost) => return Err(GrpcError::Late(limit)),
            _ => {}
        }
        // A killed process does not respond.
        if process.is_killed() { Err(gone()) } else { answer }
    }
}

/// Like [`GrpcClient::call`], without fault injection.
async fn call<Q: Message, A: Message + Default>(
    socket: &Path,
    method: &str,
    request: &Q,
    limit: Duration,
) -> Result<A, GrpcError> {
    timeout(limit, exchange(socket, method, &request.encode_to_vec()))
        .await
        .map_err(|_| GrpcError::Late(limit))?
        .and_then(|body| A::decode(body.as_slice()).map_err(|error| GrpcError::Unreadable(error.to_string())))
}

/// Opens a connection, reports it, and waits until it ends, like a gRPC client without calls.
pub(crate) async fn hold_connection(socket: &Path, connected: impl FnOnce()) {
    let Ok(mut stream) = UnixStream::connect(socket).await else {
        return;
    };
    if stream.write_all(&opening()).await.is_err() {
        return;
    }
    connected();
    while let Ok((kind, flags, payload)) = read_frame(&mut stream).await {
        if kind == GO_AWAY || stream.write_all(&reply(kind, flags, &payload)).await.is_err() {
            return;
        }
    }
}

async fn exchange(socket: &Path, method: &str, message: &[u8]) -> Result<Vec<u8>, GrpcError> {
    let mut stream = UnixStream::connect(socket).await?;
    let length = u32::try_from(message.len()).unwrap_or(u32::MAX).to_be_bytes();
    let body = [&[0][..], &length, message].concat();
    if body.len() > WINDOW {
        return Err(GrpcError::Unreadable(format!(
            "a request of {} bytes is not sent here",
            body.len()
        )));
    }
    let authority = socket.to_string_lossy();
    let block = Encoder::new().encode([
        (&b":method"[..], &b"POST"[..]),
        (b":scheme", b"http"),
        (b":path", method.as_bytes()),
        (b":authority", authority.as_bytes()),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
    ]);
    let mut bytes = opening();
    frame(&mut bytes, HEADERS, END_HEADERS, 1, &block);
    let mut chunks = body.chunks(FRAME_MAX).peekable();
    while let Some(chunk) = chunks.next() {
        let flags = if chunks.peek().is_none() { END_STREAM } else { 0 };
        frame(&mut bytes, DATA, flags, 1, chunk);
    }
    stream.write_all(&bytes).await?;
    answer(&mut stream).await
}

/// Returns the start of each connection.
fn opening() -> Vec<u8> {
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    frame(&mut bytes, SETTINGS, 0, 0, &[]);
    bytes
}

/// Returns the reply that a frame demands, or nothing.
fn reply(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    match kind {
        SETTINGS if flags == 0 => frame(&mut bytes, SETTINGS, 1, 0, &[]),
        PING if flags == 0 => frame(&mut bytes, PING, 1, 0, payload),
        _ => {}
    }
    bytes
}

/// Reads a frame: its type, flags and payload.
async fn read_frame(stream: &mut UnixStream) -> std::io::Result<(u8, u8, Vec<u8>)> {
    let mut head = [0; 9];
    stream.read_exact(&mut head).await?;
    let [high, middle, low, kind, flags, ..] = head;
    let mut payload = vec![0; usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low)];
    stream.read_exact(&mut payload).await?;
    Ok((kind, flags, payload))
}

fn frame(bytes: &mut Vec<u8>, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
    let length = u32::try_from(payload.len()).unwrap_or(u32::MAX).to_be_bytes();
    bytes.extend_from_slice(length.get(1..).unwrap_or_default());
    bytes.extend_from_slice(&[kind, flags]);
    bytes.extend_from_slice(&stream.to_be_bytes());
    bytes.extend_from_slice(payload);
}

async fn answer(stream: &mut UnixStream) -> Result<Vec<u8>, GrpcError> {
    let mut decoder = Decoder::new();
    let (mut body, mut code, mut message) = (Vec::new(), String::new(), String::new());
    loop {
        let (kind, flags, payload) = read_frame(stream).await?;
        match kind {
            DATA => body.extend_from_slice(&payload),
            HEADERS => {
                let headers = decoder
                    .decode(&payload)
                    .map_err(|error| GrpcError::Unreadable(format!("{error:?}")))?;
                for (name, value) in headers {
                    let value = String::from_utf8_lossy(&value).into_owned();
                    match name.as_slice() {
                        b"grpc-status" => code = value,
                        b"grpc-message" => message = percent_decoded(&value),
                        _ => {}
                    }
                }
            }
            RESET | GO_AWAY => {
                let code = format!("{kind}");
                let message = "the connection was reset".to_owned();
                return Err(GrpcError::Status { code, message });
            }
            _ => stream.write_all(&reply(kind, flags, &payload)).await?,
        }
        if matches!(kind, DATA | HEADERS) && flags & END_STREAM != 0 {
            break;
        }
    }
    if code == "0" {
        Ok(body.get(5..).unwrap_or_default().to_vec())
    } else {
        Err(GrpcError::Status { code, message })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_idle_connection_is_reported_and_kept_open() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("socket");
        let listener = tokio::net::UnixListener::bind(&socket).unwrap();
        let (connected, is_connected) = tokio::sync::oneshot::channel();
        let holding = tokio::spawn(async move {
            hold_connection(&socket, || connected.send(()).unwrap()).await;
        });
        let (mut stream, _) = listener.accept().await.unwrap();
        is_connected.await.unwrap();
        let mut ping = Vec::new();
        frame(&mut ping, PING, 0, 0, &[7; 8]);
        stream.write_all(&ping).await.unwrap();
        let mut received = vec![0; opening().len() + ping.len()];
        stream.read_exact(&mut received).await.unwrap();
        assert!(received.ends_with(&[7; 8]), "{received:?}");
        assert!(!holding.is_finished());
        drop(stream);
        holding.await.unwrap();
    }
}
