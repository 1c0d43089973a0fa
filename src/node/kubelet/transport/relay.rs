//! One open connection: passes bytes between client and server, and cuts off unfinished headers.
//!
//! The `:authority` of requests is replaced, because h2 rejects kubelet's. grpc-go uses the dialled address as the authority, and
//! kubelet dials a socket path: raw or percent-encoded, for plugin registration in 1.27 to 1.36 and for DRA calls up to 1.33. RFC
//! 3986 allows neither form, so h2 resets the stream with PROTOCOL_ERROR (hyperium/h2#487). On a Unix socket the authority has no
//! meaning, so every authority becomes `localhost`.
//!
//! [`Rewriter`] does no I/O. It copies all frames except header blocks; it decodes these and encodes them without Huffman coding or
//! the dynamic table, so that the reader does not need the client's encoder state.

use std::io;
use std::time::Duration;

use loona_hpack::Decoder;
use thiserror::Error;
use tokio::io::{AsyncWrite, AsyncWriteExt, DuplexStream};
use tokio::net::UnixStream;
use tokio::net::unix::OwnedReadHalf;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

/// Bytes per read from a client, and in each direction of the pipe between a connection and its server.
pub(super) const CHUNK: usize = 8192;
/// How long a client may take to finish a preface or a header block. No well-behaved client pauses there.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);

/// The HTTP/2 client connection preface (RFC 9113 section 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Bytes of a frame header.
const HEAD: usize = 9;
/// Largest frame payload: SETTINGS_MAX_FRAME_SIZE keeps its default.
pub const MAX_FRAME: usize = 16_384;
/// Largest encoded header block: bytes of all its frames, including frame headers.
const MAX_ENCODED_BLOCK: usize = 2 * MAX_FRAME;
/// Largest decoded header block: names, values and 32 bytes per field, as RFC 9113 counts SETTINGS_MAX_HEADER_LIST_SIZE. This
/// bounds memory, because a few bytes can repeat a large field many times.
pub const MAX_DECODED_BLOCK: usize = MAX_FRAME;
/// Bytes counted per field in addition to its name and value.
const FIELD_OVERHEAD: usize = 32;
/// Largest dynamic table of the client: SETTINGS_HEADER_TABLE_SIZE keeps its default.
const HEADER_TABLE: usize = 4096;
/// [`Rewriter::advance`] stops once its output is this long, which bounds the output to this plus one frame.
pub const OUTPUT_MARK: usize = 16_384;

const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 0x1;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;

/// Passes bytes between a client and its server, with the `:authority` of requests replaced, until either closes or `cut` is
/// cancelled.
pub(super) async fn relay(client: UnixStream, server: DuplexStream, cut: CancellationToken) {
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

/// Why a connection is closed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum AuthorityError {
    #[error("the client does not speak HTTP/2")]
    Preface,
    #[error("a frame of {0} bytes is larger than the {MAX_FRAME} that are allowed")]
    FrameTooLarge(usize),
    #[error("a header block is interrupted by another frame, or a CONTINUATION has none to continue")]
    BrokenBlock,
    #[error("the padding or priority of a HEADERS frame is longer than the frame")]
    Padding,
    #[error(
        "a header block is larger than {MAX_ENCODED_BLOCK} bytes encoded or {MAX_DECODED_BLOCK} bytes decoded"
    )]
    BlockTooLarge,
    #[error("a header block cannot be decoded: {0}")]
    Hpack(String),
}

impl AuthorityError {
    /// CamelCase name of the reason, for logs and metrics.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Preface => "NoHttp2Preface",
            Self::FrameTooLarge(_) => "FrameTooLarge",
            Self::BrokenBlock => "BrokenHeaderBlock",
            Self::Padding => "BrokenPadding",
            Self::BlockTooLarge => "HeaderBlockTooLarge",
            Self::Hpack(_) => "BrokenHpack",
        }
    }
}

/// Position of the rewriter in the byte stream.
#[derive(Debug)]
enum StreamPosition {
    /// Within the preface, with the number of bytes seen.
    Preface(usize),
    /// Within a frame header.
    Head { bytes: [u8; HEAD], filled: usize },
    /// Within the payload of a copied frame, with the number of bytes left.
    Copy(usize),
    /// Within the payload of a header block fragment, with the number of bytes left.
    Collect { left: usize, flags: u8, first: bool },
}

const START_OF_FRAME: StreamPosition = StreamPosition::Head {
    bytes: [0; HEAD],
    filled: 0,
};

/// A header block whose frames have not all been received.
#[derive(Debug)]
struct OpenBlock {
    stream: [u8; 4],
    end_stream: bool,
    fragment: Vec<u8>,
    /// Bytes of its frames including headers, which also bounds a flood of empty CONTINUATION frames.
    on_the_wire: usize,
}

/// Rewrites the byte stream from one client on one connection.
pub struct Rewriter {
    position: StreamPosition,
    payload: Vec<u8>,
    open: Option<OpenBlock>,
    decoder: Decoder<'static>,
    finished: u64,
}

impl std::fmt::Debug for Rewriter {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Rewriter")
            .field("position", &self.position)
            .finish_non_exhaustive()
    }
}

impl Default for Rewriter {
    fn default() -> Self {
        let mut decoder = Decoder::new();
        decoder.set_max_allowed_table_size(HEADER_TABLE);
        Self {
            position: StreamPosition::Preface(0),
            payload: Vec::new(),
            open: None,
            decoder,
            finished: 0,
        }
    }
}

impl Rewriter {
    /// Reads from `input`, appends to `output`, and returns the number of input bytes used: all, unless the output has reached
    /// [`OUTPUT_MARK`]. After an error the caller must close the connection.
    pub fn advance(&mut self, input: &[u8], output: &mut Vec<u8>) -> Result<usize, AuthorityError> {
        let mut rest = input;
        while !rest.is_empty() && output.len() < OUTPUT_MARK {
            match &mut self.position {
                StreamPosition::Preface(seen) => {
                    let (byte, after) = split(rest, 1);
                    if PREFACE.get(*seen..*seen + 1) != Some(byte) {
                        return Err(AuthorityError::Preface);
                    }
                    output.extend_from_slice(byte);
                    rest = after;
                    *seen += 1;
                    if *seen == PREFACE.len() {
                        self.end_of_part(START_OF_FRAME);
                    }
                }
                StreamPosition::Head { bytes, filled } => {
                    let (part, after) = split(rest, HEAD - *filled);
                    for (target, byte) in bytes.iter_mut().skip(*filled).zip(part) {
                        *target = *byte;
                    }
                    rest = after;
                    *filled += part.len();
                    if *filled == HEAD {
                        let head = *bytes;
                        self.start_frame(head, output)?;
                    }
                }
                StreamPosition::Copy(left) => {
                    let (part, after) = split(rest, *left);
                    output.extend_from_slice(part);
                    rest = after;
                    *left -= part.len();
                    if *left == 0 {
                        self.position = START_OF_FRAME;
                    }
                }
                StreamPosition::Collect { left, flags, first } => {
                    let (part, after) = split(rest, *left);
                    self.payload.extend_from_slice(part);
                    rest = after;
                    *left -= part.len();
                    if *left == 0 {
                        let (flags, first) = (*flags, *first);
                        self.end_fragment(flags, first, output)?;
                    }
                }
            }
        }
        Ok(input.len() - rest.len())
    }

    /// Identifies the part of the preface or header block that the client has not finished; `None` if it has.
    ///
    /// A caller may close the connection if the number does not change in time: no well-behaved client pauses there.
    pub fn owed(&self) -> Option<u64> {
        (matches!(self.position, StreamPosition::Preface(_)) || self.open.is_some()).then_some(self.finished)
    }

    fn end_of_part(&mut self, next: StreamPosition) {
        self.position = next;
        self.finished = self.finished.wrapping_add(1);
    }

    fn start_frame(&mut self, head: [u8; HEAD], output: &mut Vec<u8>) -> Result<(), AuthorityError> {
        let [l0, l1, l2, kind, flags, s0, s1, s2, s3] = head;
        let (stream, length) = (
            [s0, s1, s2, s3],
            usize::from(l0) << 16 | usize::from(l1) << 8 | usize::from(l2),
        );
        if length > MAX_FRAME {
            return Err(AuthorityError::FrameTooLarge(length));
        }
        match (kind, &mut self.open) {
            (CONTINUATION, Some(block)) if block.stream == stream => block.on_the_wire += HEAD + length,
            (CONTINUATION, _) | (_, Some(_)) => return Err(AuthorityError::BrokenBlock),
            (HEADERS, none) => {
                *none = Some(OpenBlock {
                    stream,
                    end_stream: flags & END_STREAM != 0,
                    fragment: Vec::new(),
                    on_the_wire: HEAD + length,
                });
            }
            (_, None) => {
                output.extend_from_slice(&head);
                self.position = if length == 0 {
                    START_OF_FRAME
                } else {
                    StreamPosition::Copy(length)
                };
                return Ok(());
            }
        }
        if self
            .open
            .as_ref()
            .is_some_and(|block| block.on_the_wire > MAX_ENCODED_BLOCK)
        {
            return Err(AuthorityError::BlockTooLarge);
        }
        self.position = StreamPosition::Collect {
            left: length,
            flags,
            first: kind == HEADERS,
        };
        if length == 0 {
            self.end_fragment(flags, kind == HEADERS, output)
        } else {
            Ok(())
        }
    }

    fn end_fragment(&mut self, flags: u8, first: bool, output: &mut Vec<u8>) -> Result<(), AuthorityError> {
        let payload = std::mem::take(&mut self.payload);
        let fragment = if first {
            unpadded(&payload, flags)?
        } else {
            &payload
        };
        self.position = START_OF_FRAME;
        let Some(mut block) = self.open.take() else {
            return Err(AuthorityError::BrokenBlock);
        };
        block.fragment.extend_from_slice(fragment);
        if flags & END_HEADERS == 0 {
            self.open = Some(block);
            return Ok(());
        }
        let encoded = rewrite_block(&mut self.decoder, &block.fragment)?;
        // Always fits one frame: MAX_DECODED_BLOCK counts more bytes per field than the encoding needs.
        let length = u32::try_from(encoded.len()).unwrap_or(u32::MAX).to_be_bytes();
        output.extend_from_slice(length.get(1..).unwrap_or_default());
        output.extend_from_slice(&[
            HEADERS,
            END_HEADERS | if block.end_stream { END_STREAM } else { 0 },
        ]);
        output.extend_from_slice(&block.stream);
        output.extend_from_slice(&encoded);
        self.end_of_part(START_OF_FRAME);
        Ok(())
    }
}

/// The fragment of a HEADERS payload without padding and priority (RFC 9113 section 6.2). Both are dropped: h2 does not use them.
fn unpadded(payload: &[u8], flags: u8) -> Result<&[u8], AuthorityError> {
    let mut fragment = payload;
    if flags & PADDED != 0 {
        let (padding, rest) = fragment.split_first().ok_or(AuthorityError::Padding)?;
        let length = rest
            .len()
            .checked_sub(usize::from(*padding))
            .ok_or(AuthorityError::Padding)?;
        fragment = split(rest, length).0;
    }
    if flags & PRIORITY != 0 {
        fragment = fragment.get(5..).ok_or(AuthorityError::Padding)?;
    }
    Ok(fragment)
}

/// Decodes a block, replaces `:authority`, and encodes it as literals that neither use nor change the dynamic table.
fn rewrite_block(decoder: &mut Decoder<'static>, block: &[u8]) -> Result<Vec<u8>, AuthorityError> {
    let mut output = Vec::new();
    let mut size = 0_usize;
    decoder
        .decode_with_cb(block, |name, value| {
            let value: &[u8] = if *name == *b":authority" {
                b"localhost"
            } else {
                &value
            };
            size = size.saturating_add(name.len() + value.len() + FIELD_OVERHEAD);
            if size <= MAX_DECODED_BLOCK {
                literal(&name, value, &mut output);
            }
        })
        .map_err(|error| AuthorityError::Hpack(error.to_string()))?;
    if size > MAX_DECODED_BLOCK {
        Err(AuthorityError::BlockTooLarge)
    } else {
        Ok(output)
    }
}

/// Encodes a literal field without indexing, with a new name (RFC 7541 section 6.2.2).
fn literal(name: &[u8], value: &[u8], output: &mut Vec<u8>) {
    output.push(0);
    for string in [name, value] {
        string_length(string.len(), output);
        output.extend_from_slice(string);
    }
}

/// Encodes the length of a string without Huffman coding: an integer with a 7-bit prefix (RFC 7541 section 5.1).
fn string_length(length: usize, output: &mut Vec<u8>) {
    const PREFIX: usize = 0x7f;
    let byte = |value: usize| u8::try_from(value).unwrap_or(u8::MAX);
    if length < PREFIX {
        output.push(byte(length));
        return;
    }
    output.push(byte(PREFIX));
    let mut rest = length - PREFIX;
    while rest >= 0x80 {
        output.push(byte(rest & 0x7f | 0x80));
        rest >>= 7;
    }
    output.push(byte(rest));
}

/// The first `length` bytes, or all if there are fewer, and the rest.
fn split(bytes: &[u8], length: usize) -> (&[u8], &[u8]) {
    bytes.split_at_checked(length).unwrap_or((bytes, &[]))
}

#[cfg(test)]
mod tests;
