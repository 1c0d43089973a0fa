//! An accepted connection with the `:authority` rewritten and calls tracked. It is closed if the client leaves a preface or header
//! block unfinished.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, Sleep, sleep};
use tokio_util::sync::WaitForCancellationFutureOwned;
use tonic::transport::server::Connected;

use super::authority::{OUTPUT_MARK, PREFACE, Rewriter};
use super::calls::{Activity, Calls};

/// How long a client may take to finish a preface or header block. There is no other time limit on a connection: kubelet may send
/// nothing on the connection of a ListAndWatch for months.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
/// Bytes per read.
const CHUNK: usize = 16_384;

/// Milliseconds since the socket was opened.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock(Instant);

impl Clock {
    pub(super) fn start() -> Self {
        Self(Instant::now())
    }

    pub(super) fn now(self) -> u64 {
        u64::try_from(self.0.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

/// An accepted connection.
#[derive(Debug)]
pub(super) struct Connection<S> {
    stream: S,
    rewriter: Rewriter,
    /// Bytes read but not rewritten yet.
    input: Vec<u8>,
    /// Rewritten bytes, of which the reader has consumed the first `taken`.
    output: Vec<u8>,
    taken: usize,
    ended: bool,
    /// The unfinished part that the client owes (see [`Rewriter::owed`]) and its deadline.
    deadline: Option<(u64, Pin<Box<Sleep>>)>,
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
    calls: Calls,
    activity: Arc<Activity>,
    clock: Clock,
    /// Held for its lifetime: one of [`MAX_CONNECTIONS`](super::MAX_CONNECTIONS).
    _slot: OwnedSemaphorePermit,
}

impl<S> Connection<S> {
    /// Cancelling the activity's token ends the connection at once, regardless of the client.
    pub(super) fn new(stream: S, slot: OwnedSemaphorePermit, activity: Arc<Activity>, clock: Clock) -> Self {
        let rewriter = Rewriter::default();
        let deadline = rewriter.owed().map(|owed| (owed, Box::pin(sleep(PATIENCE))));
        Self {
            stream,
            rewriter,
            input: Vec::new(),
            output: Vec::new(),
            taken: 0,
            ended: false,
            deadline,
            cut: Box::pin(activity.cut.clone().cancelled_owned()),
            calls: Calls::new(PREFACE.len()),
            activity,
            clock,
            _slot: slot,
        }
    }

    /// Passes rewritten bytes to the reader; false if there are none.
    fn give(&mut self, reader: &mut ReadBuf<'_>) -> bool {
        let Some(ready) = self.output.get(self.taken..).filter(|ready| !ready.is_empty()) else {
            return false;
        };
        let length = ready.len().min(reader.remaining());
        let given = ready.get(..length).unwrap_or_default();
        reader.put_slice(given);
        self.calls.sent(given, &self.activity, self.clock.now());
        self.taken += length;
        if self.taken == self.output.len() {
            self.taken = 0;
            // Drop the buffer: an idle connection keeps no memory.
            self.output = Vec::new();
        }
        true
    }

    /// Rewrites the input as far as the output has room.
    fn rewrite(&mut self) -> io::Result<()> {
        let used = self
            .rewriter
            .advance(&self.input, &mut self.output)
            .map_err(|error| {
                tracing::warn!(reason = error.reason(), %error, "a connection is closed");
                io::Error::new(io::ErrorKind::InvalidData, error)
            })?;
        if used == self.input.len() {
            self.input = Vec::new();
        } else {
            self.input.drain(..used);
        }
        match (self.rewriter.owed(), &self.deadline) {
            (None, _) => self.deadline = None,
            (Some(owed), Some((since, _))) if owed == *since => {}
            (Some(owed), _) => self.deadline = Some((owed, Box::pin(sleep(PATIENCE)))),
        }
        Ok(())
    }

    fn answered(&mut self, bytes: &[u8]) {
        self.calls.answered(bytes, &self.activity, self.clock.now());
    }

    /// Checked on reads and writes: a peer that does not read blocks the task in a write.
    fn check_cut(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        match self.cut.as_mut().poll(context) {
            Poll::Ready(()) => Err(io::Error::new(
                io::ErrorKind::ConnectionAborted,
                "the door is closed",
            )),
            Poll::Pending => Ok(()),
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Connection<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        reader: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        this.check_cut(context)?;
        loop {
            if reader.remaining() == 0 || this.give(reader) {
                return Poll::Ready(Ok(()));
            }
            if !this.input.is_empty() {
                this.rewrite()?;
                continue;
            }
            if this.ended {
                return Poll::Ready(Ok(()));
            }
            if let Some((_, deadline)) = &mut this.deadline
                && deadline.as_mut().poll(context).is_ready()
            {
                tracing::warn!(
                    reason = "UnfinishedRequest",
                    "a connection is closed: the client is silent within a header"
                );
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            let mut chunk = [0; CHUNK];
            let mut chunk = ReadBuf::new(&mut chunk);
            std::task::ready!(Pin::new(&mut this.stream).poll_read(context, &mut chunk))?;
            this.ended = chunk.filled().is_empty();
            this.input.extend_from_slice(chunk.filled());
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Connection<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check_cut(context)?;
        let written = std::task::ready!(Pin::new(&mut self.stream).poll_write(context, bytes))?;
        self.answered(bytes.get(..written).unwrap_or_default());
        Poll::Ready(Ok(written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check_cut(context)?;
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check_cut(context)?;
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.check_cut(context)?;
        let written = std::task::ready!(Pin::new(&mut self.stream).poll_write_vectored(context, bytes))?;
        let mut left = written;
        for bytes in bytes {
            let part = bytes.get(..left.min(bytes.len())).unwrap_or_default();
            self.answered(part);
            left -= part.len();
        }
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

impl<S: Connected> Connected for Connection<S> {
    type ConnectInfo = S::ConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.stream.connect_info()
    }
}

const _: () = assert!(
    CHUNK <= OUTPUT_MARK,
    "one chunk of copied frames goes through at once"
);

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
    use tokio::sync::Semaphore;
    use tokio_util::sync::CancellationToken;

    use super::*;

    const PING: &[u8] = &[0, 0, 8, 6, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];

    fn connection(cut: &CancellationToken) -> (DuplexStream, Connection<DuplexStream>, Arc<Semaphore>) {
        let (client, server) = duplex(100_000);
        let slots = Arc::new(Semaphore::new(1));
        let slot = Arc::clone(&slots).try_acquire_owned().unwrap();
        let activity = Arc::new(Activity::new(cut.clone(), 0));
        (
            client,
            Connection::new(server, slot, activity, Clock::start()),
            slots,
        )
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_says_nothing_is_cut_off_after_ten_seconds() {
        for sent in [&[][..], &PREFACE[..5]] {
            let (mut client, mut connection, slots) = connection(&CancellationToken::new());
            client.write_all(sent).await.unwrap();
            let start = Instant::now();
            let error = connection.read_to_end(&mut Vec::new()).await.unwrap_err();
            assert_eq!(
                (error.kind(), start.elapsed().as_secs()),
                (io::ErrorKind::TimedOut, 10)
            );
            assert_eq!(slots.available_permits(), 0);
            drop(connection);
            assert_eq!(slots.available_permits(), 1, "the slot is free again");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_header_block_that_trickles_in_is_cut_off_ten_seconds_after_it_began() {
        let (mut client, mut connection, _slots) = connection(&CancellationToken::new());
        client.write_all(PREFACE).await.unwrap();
        let begin = [&[0, 0, 200, 1, 0, 0, 0, 0, 1][..], &[0x82]].concat();
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_secs(100)).await;
            client.write_all(&begin).await.unwrap();
            for _ in 0..100 {
                tokio::time::sleep(Duration::from_secs(1)).await;
                if client.write_all(&[0x82]).await.is_err() {
                    return;
                }
            }
        });
        let start = Instant::now();
        let error = connection.read_to_end(&mut Vec::new()).await.unwrap_err();
        // The rest of the block is owed from the frame header on.
        assert_eq!(
            (error.kind(), start.elapsed().as_secs()),
            (io::ErrorKind::TimedOut, 110)
        );
    }

    #[tokio::test(start_paused = true)]
    async fn an_established_connection_may_be_silent_for_ever() {
        let (mut client, mut connection, _slots) = connection(&CancellationToken::new());
        client.write_all(PREFACE).await.unwrap();
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_secs(100 * 24 * 3600)).await;
            client.write_all(PING).await.unwrap();
            client.flush().await.unwrap();
        });
        let mut bytes = Vec::new();
        connection.read_to_end(&mut bytes).await.unwrap();
        assert_eq!(bytes, [PREFACE, PING].concat());
    }

    #[tokio::test]
    async fn a_cut_ends_a_read_that_waits() {
        let cut = CancellationToken::new();
        let (mut client, mut connection, _slots) = connection(&cut);
        client.write_all(PREFACE).await.unwrap();
        let reader = tokio::spawn(async move { connection.read_to_end(&mut Vec::new()).await });
        tokio::task::yield_now().await;
        cut.cancel();
        assert_eq!(
            reader.await.unwrap().unwrap_err().kind(),
            io::ErrorKind::ConnectionAborted
        );
    }

    #[tokio::test]
    async fn a_cut_ends_a_write_that_the_client_does_not_read() {
        let cut = CancellationToken::new();
        let (_client, mut connection, _slots) = connection(&cut);
        let writer = tokio::spawn(async move { connection.write_all(&vec![0; 200_000]).await });
        tokio::task::yield_now().await;
        cut.cancel();
        assert_eq!(
            writer.await.unwrap().unwrap_err().kind(),
            io::ErrorKind::ConnectionAborted
        );
    }

    #[tokio::test]
    async fn an_error_of_the_protocol_ends_the_connection() {
        let (mut client, mut connection, _slots) = connection(&CancellationToken::new());
        client.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
        let error = connection.read_to_end(&mut Vec::new()).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }

    #[tokio::test]
    async fn a_small_reader_gets_every_byte_of_a_large_stream() {
        let (mut client, mut connection, _slots) = connection(&CancellationToken::new());
        let data = [&[0, 0x40, 0, 0, 0, 0, 0, 0, 1][..], &[7; 16_384]].concat();
        let sent = [PREFACE.to_vec(), data.repeat(20)].concat();
        let copy = sent.clone();
        tokio::spawn(async move { client.write_all(&copy).await });
        let (mut received, mut small) = (Vec::new(), [0; 333]);
        loop {
            match connection.read(&mut small).await.unwrap() {
                0 => break,
                length => received.extend_from_slice(&small[..length]),
            }
        }
        assert_eq!(received, sent);
    }
}
