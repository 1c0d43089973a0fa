//! Tracks the open calls of a connection by parsing its frames: a connection without open calls may be closed to free its slot, one
//! with a ListAndWatch never.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use tokio_util::sync::CancellationToken;

/// Bytes of a frame header.
const HEAD: usize = 9;
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const END_STREAM: u8 = 0x1;

/// Activity of a connection, as seen by the listener.
#[derive(Debug)]
pub(super) struct Activity {
    /// Cancelling this token closes the connection.
    pub(super) cut: CancellationToken,
    open: AtomicUsize,
    /// When the last frame passed, on the listener's [`Clock`](super::connection::Clock).
    last: AtomicU64,
}

impl Activity {
    pub(super) fn new(cut: CancellationToken, now: u64) -> Self {
        Self {
            cut,
            open: AtomicUsize::new(0),
            last: AtomicU64::new(now),
        }
    }

    /// When the last frame passed, if no call is open.
    pub(super) fn idle_since(&self) -> Option<u64> {
        (self.open.load(Ordering::Relaxed) == 0).then(|| self.last.load(Ordering::Relaxed))
    }
}

/// The open calls of one connection.
#[derive(Debug)]
pub(super) struct Calls {
    from_client: Frames,
    from_server: Frames,
    open: BTreeSet<u32>,
    newest: u32,
}

impl Calls {
    /// `preface` is the number of bytes that the client sends before its first frame.
    pub(super) fn new(preface: usize) -> Self {
        Self {
            from_client: Frames {
                skip: preface,
                ..Frames::default()
            },
            from_server: Frames::default(),
            open: BTreeSet::new(),
            newest: 0,
        }
    }

    /// Parses bytes from the client.
    pub(super) fn sent(&mut self, bytes: &[u8], activity: &Activity, now: u64) {
        let (open, newest) = (&mut self.open, &mut self.newest);
        self.from_client.read(bytes, |kind, _, stream| match kind {
            // Further HEADERS of the same stream are trailers.
            HEADERS if stream > *newest => {
                *newest = stream;
                open.insert(stream);
            }
            RST_STREAM => {
                open.remove(&stream);
            }
            _ => {}
        });
        self.note(activity, now);
    }

    /// Parses bytes from the server.
    pub(super) fn answered(&mut self, bytes: &[u8], activity: &Activity, now: u64) {
        let open = &mut self.open;
        self.from_server.read(bytes, |kind, flags, stream| {
            if kind == RST_STREAM || (matches!(kind, DATA | HEADERS) && flags & END_STREAM != 0) {
                open.remove(&stream);
            }
        });
        self.note(activity, now);
    }

    fn note(&self, activity: &Activity, now: u64) {
        activity.open.store(self.open.len(), Ordering::Relaxed);
        activity.last.store(now, Ordering::Relaxed);
    }
}

/// Parses frame headers from bytes that arrive in arbitrary pieces.
#[derive(Debug, Default)]
struct Frames {
    /// Remaining bytes of a payload or of the preface.
    skip: usize,
    head: [u8; HEAD],
    filled: usize,
}

impl Frames {
    fn read(&mut self, mut bytes: &[u8], mut frame: impl FnMut(u8, u8, u32)) {
        while !bytes.is_empty() {
            let skipped = self.skip.min(bytes.len());
            self.skip -= skipped;
            bytes = bytes.get(skipped..).unwrap_or_default();
            let wanted = HEAD.saturating_sub(self.filled).min(bytes.len());
            let (part, rest) = bytes.split_at_checked(wanted).unwrap_or((bytes, &[]));
            for (target, byte) in self.head.iter_mut().skip(self.filled).zip(part) {
                *target = *byte;
            }
            self.filled += part.len();
            bytes = rest;
            if self.filled == HEAD {
                let [l0, l1, l2, kind, flags, s0, s1, s2, s3] = self.head;
                self.skip = usize::from(l0) << 16 | usize::from(l1) << 8 | usize::from(l2);
                self.filled = 0;
                frame(kind, flags, u32::from_be_bytes([s0 & 0x7f, s1, s2, s3]));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn activity() -> Activity {
        Activity::new(CancellationToken::new(), 0)
    }

    fn frame(kind: u8, flags: u8, stream: u32, length: usize) -> Vec<u8> {
        let size = u32::try_from(length).unwrap().to_be_bytes();
        [
            &size[1..],
            &[kind, flags],
            &stream.to_be_bytes(),
            &vec![7; length],
        ]
        .concat()
    }

    #[test]
    fn a_call_is_open_from_its_headers_until_the_server_ends_it_or_one_of_them_resets_it() {
        for (by_server, end) in [
            (true, frame(HEADERS, END_STREAM, 1, 3)),
            (true, frame(DATA, END_STREAM, 1, 0)),
            (true, frame(RST_STREAM, 0, 1, 4)),
            (false, frame(RST_STREAM, 0, 1, 4)),
        ] {
            let (mut calls, activity) = (Calls::new(0), activity());
            assert_eq!(activity.idle_since(), Some(0));
            calls.sent(&frame(HEADERS, 4, 1, 20), &activity, 1);
            calls.sent(&frame(DATA, END_STREAM, 1, 500), &activity, 2);
            calls.answered(&frame(HEADERS, 4, 1, 9), &activity, 3);
            calls.answered(&frame(DATA, 0, 1, 70_000), &activity, 4);
            assert_eq!(
                activity.idle_since(),
                None,
                "what the client has ended is still to be answered"
            );
            if by_server {
                calls.answered(&end, &activity, 5);
            } else {
                calls.sent(&end, &activity, 5);
            }
            assert_eq!(activity.idle_since(), Some(5));
        }
    }

    #[test]
    fn trailers_and_late_frames_open_nothing_again() {
        let (mut calls, activity) = (Calls::new(3), activity());
        calls.sent(b"PRI", &activity, 1);
        calls.sent(&frame(HEADERS, 4, 1, 0), &activity, 1);
        calls.answered(&frame(HEADERS, END_STREAM, 1, 0), &activity, 1);
        calls.sent(&frame(HEADERS, END_STREAM, 1, 0), &activity, 2);
        assert_eq!(activity.idle_since(), Some(2));
    }

    proptest! {
        #[test]
        fn bytes_in_any_pieces_tell_the_same(lengths in prop::collection::vec(0..300_usize, 1..20), sizes in prop::collection::vec(1..50_usize, 1..5)) {
            let bytes: Vec<u8> = lengths.iter().enumerate().flat_map(|(index, length)| {
                frame(HEADERS, 4, 2 * u32::try_from(index).unwrap() + 1, *length)
            }).collect();
            let (mut calls, activity) = (Calls::new(0), activity());
            let mut rest = bytes.as_slice();
            for size in sizes.iter().cycle() {
                if rest.is_empty() { break }
                let (piece, after) = rest.split_at((*size).min(rest.len()));
                calls.sent(piece, &activity, 1);
                rest = after;
            }
            prop_assert_eq!(calls.open.len(), lengths.len());
        }
    }
}
