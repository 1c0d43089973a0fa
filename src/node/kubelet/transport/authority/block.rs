//! Rewrites one header block: decodes HPACK and encodes the same fields with another `:authority`.

use loona_hpack::Decoder;

use super::{AuthorityError, MAX_FRAME};

/// Largest encoded header block: bytes of all its frames, including frame headers.
pub(super) const MAX_ENCODED_BLOCK: usize = 2 * MAX_FRAME;
/// Largest decoded header block: names, values and 32 bytes per field, as RFC 9113 counts SETTINGS_MAX_HEADER_LIST_SIZE. This
/// bounds memory, because a few bytes can repeat a large field many times.
pub const MAX_DECODED_BLOCK: usize = MAX_FRAME;
/// Bytes counted per field in addition to its name and value.
const FIELD_OVERHEAD: usize = 32;

/// Decodes a block, replaces `:authority`, and encodes it as literals that neither use nor change the dynamic table.
pub(super) fn rewrite(decoder: &mut Decoder<'static>, block: &[u8]) -> Result<Vec<u8>, AuthorityError> {
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

#[cfg(test)]
mod tests {
    use loona_hpack::Encoder;

    use super::*;

    /// The indexed field 62: the newest entry of the dynamic table.
    const NEWEST: u8 = 0xbe;

    fn rewritten(fields: &[(&[u8], &[u8])]) -> Vec<(Vec<u8>, Vec<u8>)> {
        let block = Encoder::new().encode(fields.iter().copied());
        let output = rewrite(&mut Decoder::new(), &block).unwrap();
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
            let fields = rewritten(&[
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
            rewritten(&[(b"grpc-status", b"0")]),
            [(b"grpc-status".to_vec(), b"0".to_vec())]
        );
    }

    #[test]
    fn a_string_of_any_length_reads_back() {
        for length in [0, 1, 126, 127, 128, 254, 255, 16_000] {
            let value = vec![b'v'; length];
            assert_eq!(rewritten(&[(b"x", &value)]), [(b"x".to_vec(), value)]);
        }
    }

    #[test]
    fn a_block_at_the_limit_fits_into_one_frame_and_one_byte_more_is_refused() {
        let at_limit = vec![b'v'; MAX_DECODED_BLOCK - FIELD_OVERHEAD - 1];
        let block = Encoder::new().encode([(&b"x"[..], at_limit.as_slice())]);
        assert!(rewrite(&mut Decoder::new(), &block).unwrap().len() <= MAX_FRAME);
        let above = [at_limit, vec![b'v']].concat();
        let block = Encoder::new().encode([(&b"x"[..], above.as_slice())]);
        assert_eq!(
            rewrite(&mut Decoder::new(), &block),
            Err(AuthorityError::BlockTooLarge)
        );
    }

    #[test]
    fn a_bomb_of_references_to_one_large_field_is_refused() {
        let mut decoder = Decoder::new();
        let large = vec![b'v'; 4000];
        rewrite(
            &mut decoder,
            &Encoder::new().encode([(&b"x"[..], large.as_slice())]),
        )
        .unwrap();
        assert_eq!(
            rewrite(&mut decoder, &[NEWEST; 5]),
            Err(AuthorityError::BlockTooLarge)
        );
        assert!(rewrite(&mut decoder, &[NEWEST; 4]).is_ok());
    }

    #[test]
    fn a_table_size_update_beyond_the_setting_is_refused_and_a_smaller_one_evicts() {
        let mut decoder = Decoder::new();
        decoder.set_max_allowed_table_size(4096);
        // 001xxxxx with 4097 = 31 + 4066.
        let update = [0x3f, 0xe2, 0x1f, 0x82];
        assert!(matches!(
            rewrite(&mut decoder, &update),
            Err(AuthorityError::Hpack(_))
        ));
        rewrite(&mut decoder, &Encoder::new().encode([(&b"x"[..], &b"y"[..])])).unwrap();
        assert!(rewrite(&mut decoder, &[NEWEST]).is_ok());
        rewrite(&mut decoder, &[0x20, 0x82]).unwrap();
        assert!(matches!(
            rewrite(&mut decoder, &[NEWEST]),
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
                matches!(rewrite(&mut Decoder::new(), block), Err(AuthorityError::Hpack(_))),
                "{block:x?}"
            );
        }
    }
}
