use loona_hpack::{Decoder, Encoder};
use proptest::prelude::*;
use tokio::io::AsyncReadExt;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::*;

/// Builds a client's frames.
struct Client {
    encoder: Encoder<'static>,
    bytes: Vec<u8>,
}

impl Client {
    fn new() -> Self {
        Self {
            encoder: Encoder::new(),
            bytes: PREFACE.to_vec(),
        }
    }

    fn frame(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        self.bytes.extend_from_slice(&length[1..]);
        self.bytes.extend_from_slice(&[kind, flags]);
        self.bytes.extend_from_slice(&stream.to_be_bytes());
        self.bytes.extend_from_slice(payload);
    }

    /// A request with a unique field, so that the dynamic table fills. Split into `parts` frames, with optional padding and
    /// priority.
    fn request(
        &mut self,
        stream: u32,
        authority: &[u8],
        note: &[u8],
        parts: usize,
        padding: Option<u8>,
        priority: bool,
    ) {
        let block = self.encoder.encode([
            (&b":method"[..], &b"POST"[..]),
            (b":path", b"/v1alpha3.Node/NodePrepareResources"),
            (b":authority", authority),
            (b"note", note),
        ]);
        let mut fragments = block
            .chunks(block.len().div_ceil(parts).max(1))
            .collect::<Vec<_>>();
        let mut first = Vec::new();
        let mut flags = 0;
        if let Some(padding) = padding {
            flags |= PADDED;
            first.push(padding);
        }
        if priority {
            flags |= PRIORITY;
            first.extend_from_slice(&[0, 0, 0, 0, 7]);
        }
        first.extend_from_slice(fragments.remove(0));
        first.extend(std::iter::repeat_n(0, padding.unwrap_or_default().into()));
        if fragments.is_empty() {
            flags |= END_HEADERS;
        }
        self.frame(HEADERS, flags, stream, &first);
        let last = fragments.len();
        for (index, fragment) in fragments.into_iter().enumerate() {
            self.frame(
                CONTINUATION,
                if index + 1 == last { END_HEADERS } else { 0 },
                stream,
                fragment,
            );
        }
    }
}

/// Feeds the bytes in chunks of the given sizes, cyclically, and drains the output like a reader.
fn rewritten(bytes: &[u8], sizes: &[usize]) -> Result<Vec<u8>, AuthorityError> {
    let (mut rewriter, mut all, mut rest) = (Rewriter::default(), Vec::new(), bytes);
    for size in sizes.iter().cycle() {
        if rest.is_empty() {
            break;
        }
        let mut chunk = split(rest, *size).0;
        rest = split(rest, *size).1;
        while !chunk.is_empty() {
            let mut output = Vec::new();
            let used = rewriter.advance(chunk, &mut output)?;
            assert!(used > 0, "progress");
            assert!(output.len() <= OUTPUT_MARK + MAX_FRAME + HEAD, "bounded output");
            assert!(rewriter.payload.capacity() <= 2 * MAX_FRAME, "bounded memory");
            all.extend_from_slice(&output);
            chunk = split(chunk, used).1;
        }
    }
    Ok(all)
}

/// Frames after the preface: kind, flags, stream, payload.
fn frames(bytes: &[u8]) -> Vec<(u8, u8, u32, Vec<u8>)> {
    let mut rest = bytes.strip_prefix(PREFACE).unwrap();
    let mut frames = Vec::new();
    while !rest.is_empty() {
        let length = usize::from(rest[0]) << 16 | usize::from(rest[1]) << 8 | usize::from(rest[2]);
        let stream = u32::from_be_bytes(rest[5..9].try_into().unwrap());
        frames.push((rest[3], rest[4], stream, rest[9..9 + length].to_vec()));
        rest = &rest[9 + length..];
    }
    frames
}

#[test]
fn a_request_of_kubelet_gets_a_valid_authority() {
    let mut client = Client::new();
    client.frame(4, 0, 0, &[]);
    client.request(
        1,
        b"%2Fvar%2Flib%2Fkubelet%2Fplugins_registry%2Fx-reg.sock",
        b"1",
        1,
        None,
        false,
    );
    client.frame(0, END_STREAM, 1, b"body");
    let frames = frames(&rewritten(&client.bytes, &[usize::MAX]).unwrap());
    assert_eq!(frames[0], (4, 0, 0, vec![]));
    assert_eq!((frames[1].0, frames[1].1, frames[1].2), (HEADERS, END_HEADERS, 1));
    let fields = Decoder::new().decode(&frames[1].3).unwrap();
    assert!(fields.contains(&(b":authority".to_vec(), b"localhost".to_vec())));
    assert!(fields.contains(&(b":path".to_vec(), b"/v1alpha3.Node/NodePrepareResources".to_vec())));
    assert_eq!(frames[2], (0, END_STREAM, 1, b"body".to_vec()));
}

#[test]
fn fields_survive_evictions_from_the_dynamic_table() {
    let mut client = Client::new();
    for index in 0..500_u32 {
        client.request(
            2 * index + 1,
            b"/a/b",
            format!("{index:-<100}").as_bytes(),
            1,
            None,
            false,
        );
    }
    let frames = frames(&rewritten(&client.bytes, &[1000]).unwrap());
    assert_eq!(frames.len(), 500);
    // One decoder for all frames, so that any use of the dynamic table would cause an error.
    let mut decoder = Decoder::new();
    for (index, frame) in frames.iter().enumerate() {
        let fields = decoder.decode(&frame.3).unwrap();
        assert_eq!(
            fields[3],
            (b"note".to_vec(), format!("{index:-<100}").into_bytes())
        );
    }
}

#[test]
fn trailers_keep_the_end_of_the_stream() {
    let mut client = Client::new();
    let block = client.encoder.encode([(&b"grpc-status"[..], &b"0"[..])]);
    client.frame(HEADERS, END_HEADERS | END_STREAM, 3, &block);
    let frames = frames(&rewritten(&client.bytes, &[3]).unwrap());
    assert_eq!(
        (frames[0].0, frames[0].1, frames[0].2),
        (HEADERS, END_HEADERS | END_STREAM, 3)
    );
}

#[test]
fn other_protocols_are_refused_at_their_first_byte() {
    assert_eq!(
        rewritten(b"GET / HTTP/1.1\r\n", &[1]),
        Err(AuthorityError::Preface)
    );
}

#[test]
fn a_frame_above_the_limit_is_refused_by_its_head() {
    let mut client = Client::new();
    client.bytes.extend_from_slice(&[0, 0x40, 1, 0, 0, 0, 0, 0, 1]);
    assert_eq!(
        rewritten(&client.bytes, &[5]),
        Err(AuthorityError::FrameTooLarge(16_385))
    );
}

#[test]
fn a_header_block_is_not_interrupted() {
    for (kind, stream) in [(0, 1), (HEADERS, 3), (CONTINUATION, 3), (6, 0)] {
        let mut client = Client::new();
        client.frame(HEADERS, 0, 1, &[]);
        client.frame(kind, 0, stream, &[]);
        assert_eq!(
            rewritten(&client.bytes, &[7]),
            Err(AuthorityError::BrokenBlock),
            "{kind} on {stream}"
        );
    }
    let mut client = Client::new();
    client.frame(CONTINUATION, END_HEADERS, 1, &[]);
    assert_eq!(rewritten(&client.bytes, &[7]), Err(AuthorityError::BrokenBlock));
}

#[test]
fn a_flood_of_continuations_ends() {
    for payload in [&[][..], &[0x82; 1000]] {
        let mut client = Client::new();
        client.frame(HEADERS, 0, 1, &[]);
        for _ in 0..5000 {
            client.frame(CONTINUATION, 0, 1, payload);
        }
        assert_eq!(
            rewritten(&client.bytes, &[4096]),
            Err(AuthorityError::BlockTooLarge)
        );
    }
}

#[test]
fn padding_and_priority_that_do_not_fit_are_refused() {
    for (flags, payload) in [
        (PADDED, &[][..]),
        (PADDED, &[1]),
        (PRIORITY, &[0; 4]),
        (PADDED | PRIORITY, &[3, 0, 0, 0, 0, 0, 0, 0]),
    ] {
        let mut client = Client::new();
        client.frame(HEADERS, END_HEADERS | flags, 1, payload);
        assert_eq!(
            rewritten(&client.bytes, &[100]),
            Err(AuthorityError::Padding),
            "{flags:x} {payload:?}"
        );
    }
}

#[test]
fn the_awaited_part_changes_when_a_part_is_complete() {
    let mut rewriter = Rewriter::default();
    let mut output = Vec::new();
    let start = rewriter.owed();
    assert!(start.is_some());
    rewriter.advance(&PREFACE[..10], &mut output).unwrap();
    assert_eq!(rewriter.owed(), start);
    rewriter.advance(&PREFACE[10..], &mut output).unwrap();
    assert_eq!(rewriter.owed(), None);
    rewriter
        .advance(&[0, 0, 0, HEADERS, 0, 0, 0, 0, 1], &mut output)
        .unwrap();
    let block = rewriter.owed();
    assert!(block.is_some() && block != start);
    rewriter
        .advance(&[0, 0, 0, CONTINUATION, END_HEADERS, 0, 0, 0, 1], &mut output)
        .unwrap();
    assert_eq!(rewriter.owed(), None);
}

prop_compose! {
    fn requests()(requests in prop::collection::vec(
        (prop::collection::vec(any::<u8>(), 0..200), prop::collection::vec(any::<u8>(), 0..2000), 1..5_usize, any::<Option<u8>>(), any::<bool>()),
        1..12,
    )) -> Vec<(Vec<u8>, Vec<u8>, usize, Option<u8>, bool)> { requests }
}

proptest! {
    #[test]
    fn chunks_of_any_size_give_the_same_output(requests in requests(), sizes in prop::collection::vec(1..700_usize, 1..9)) {
        let mut client = Client::new();
        for (index, (authority, note, parts, padding, priority)) in requests.iter().enumerate() {
            let stream = 2 * u32::try_from(index).unwrap() + 1;
            client.request(stream, authority, note, *parts, *padding, *priority);
            client.frame(0, END_STREAM, stream, note);
        }
        let whole = rewritten(&client.bytes, &[usize::MAX]).unwrap();
        prop_assert_eq!(&whole, &rewritten(&client.bytes, &sizes).unwrap());
        let frames = frames(&whole);
        prop_assert_eq!(frames.len(), 2 * requests.len());
        let mut decoder = Decoder::new();
        for (request, pair) in requests.iter().zip(frames.chunks(2)) {
            let fields = decoder.decode(&pair[0].3).unwrap();
            prop_assert_eq!(&fields[2], &(b":authority".to_vec(), b"localhost".to_vec()));
            prop_assert_eq!(&fields[3].1, &request.1);
            prop_assert_eq!(&pair[1].3, &request.1);
        }
    }

    #[test]
    fn no_bytes_make_it_panic_or_grow(bytes in prop::collection::vec(any::<u8>(), 0..5000), preface: bool, sizes in prop::collection::vec(1..700_usize, 1..5)) {
        let bytes = if preface { [PREFACE, &bytes].concat() } else { bytes };
        let _ = rewritten(&bytes, &sizes);
    }

    #[test]
    fn no_header_blocks_make_it_panic_or_grow(blocks in prop::collection::vec((prop::collection::vec(any::<u8>(), 0..300), any::<u8>()), 0..20)) {
        let mut client = Client::new();
        for (block, flags) in blocks {
            client.frame(HEADERS, flags | END_HEADERS, 1, &block);
        }
        let _ = rewritten(&client.bytes, &[4096]);
    }
}

/// The indexed field 62: the newest entry of the dynamic table.
const NEWEST: u8 = 0xbe;

fn rewritten_block(fields: &[(&[u8], &[u8])]) -> Vec<(Vec<u8>, Vec<u8>)> {
    let block = Encoder::new().encode(fields.iter().copied());
    let output = rewrite_block(&mut Decoder::new(), &block).unwrap();
    Decoder::new().decode(&output).unwrap()
}

#[test]
fn every_authority_becomes_localhost() {
    for authority in [
        "/var/lib/kubelet/x.sock",
        "%2Fvar%2Flib%2Fx.sock",
        "",
        "localhost",
        "a b",
        "\u{7f}é",
    ] {
        let fields = rewritten_block(&[
            (b":path", b"/a/b"),
            (b":authority", authority.as_bytes()),
            (b"te", b"trailers"),
        ]);
        assert_eq!(
            fields,
            [
                (b":path".to_vec(), b"/a/b".to_vec()),
                (b":authority".to_vec(), b"localhost".to_vec()),
                (b"te".to_vec(), b"trailers".to_vec()),
            ]
        );
    }
}

#[test]
fn trailers_get_no_authority() {
    assert_eq!(
        rewritten_block(&[(b"grpc-status", b"0")]),
        [(b"grpc-status".to_vec(), b"0".to_vec())]
    );
}

#[test]
fn a_string_of_any_length_reads_back() {
    for length in [0, 1, 126, 127, 128, 254, 255, 16_000] {
        let value = vec![b'v'; length];
        assert_eq!(rewritten_block(&[(b"x", &value)]), [(b"x".to_vec(), value)]);
    }
}

#[test]
fn a_header_block_at_the_limit_fits_into_one_frame() {
    let at_limit = vec![b'v'; MAX_DECODED_BLOCK - FIELD_OVERHEAD - 1];
    let block = Encoder::new().encode([(&b"x"[..], at_limit.as_slice())]);
    assert!(rewrite_block(&mut Decoder::new(), &block).unwrap().len() <= MAX_FRAME);
    let above = [at_limit, vec![b'v']].concat();
    let block = Encoder::new().encode([(&b"x"[..], above.as_slice())]);
    assert_eq!(
        rewrite_block(&mut Decoder::new(), &block),
        Err(AuthorityError::BlockTooLarge)
    );
}

#[test]
fn a_bomb_of_references_to_one_large_field_is_refused() {
    let mut decoder = Decoder::new();
    let large = vec![b'v'; 4000];
    rewrite_block(
        &mut decoder,
        &Encoder::new().encode([(&b"x"[..], large.as_slice())]),
    )
    .unwrap();
    assert_eq!(
        rewrite_block(&mut decoder, &[NEWEST; 5]),
        Err(AuthorityError::BlockTooLarge)
    );
    assert!(rewrite_block(&mut decoder, &[NEWEST; 4]).is_ok());
}

#[test]
fn a_table_size_update_beyond_the_setting_is_refused() {
    let mut decoder = Decoder::new();
    decoder.set_max_allowed_table_size(4096);
    // 001xxxxx with 4097 = 31 + 4066.
    let update = [0x3f, 0xe2, 0x1f, 0x82];
    assert!(matches!(
        rewrite_block(&mut decoder, &update),
        Err(AuthorityError::Hpack(_))
    ));
    rewrite_block(&mut decoder, &Encoder::new().encode([(&b"x"[..], &b"y"[..])])).unwrap();
    assert!(rewrite_block(&mut decoder, &[NEWEST]).is_ok());
    rewrite_block(&mut decoder, &[0x20, 0x82]).unwrap();
    assert!(matches!(
        rewrite_block(&mut decoder, &[NEWEST]),
        Err(AuthorityError::Hpack(_))
    ));
}

#[test]
fn index_zero_and_a_cut_string_are_refused() {
    for block in [
        &[0x80][..],
        &[0x00, 5, b'a'],
        &[0x7f, 0xff, 0xff, 0xff, 0xff, 0xff],
    ] {
        assert!(
            matches!(
                rewrite_block(&mut Decoder::new(), block),
                Err(AuthorityError::Hpack(_))
            ),
            "{block:x?}"
        );
    }
}

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
