//! Mutations of valid inputs: most parser faults are close to valid input.

/// Tokens with a meaning in some input format.
const TOKENS: [&[u8]; 40] = [
    b"\0",
    b"\xff",
    b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
    b"\n",
    b" ",
    b"\t",
    b"\"",
    b"'",
    b"\\",
    b"/",
    b"../",
    b"..",
    b".",
    b",",
    b":",
    b": ",
    b"- ",
    b"{",
    b"}",
    b"[",
    b"]",
    b"{}",
    b"[]",
    b"null",
    b"true",
    b"-1",
    b"0",
    b"18446744073709551616",
    b"1e999",
    b"&a ",
    b"*a",
    b"<<: ",
    b"!!binary ",
    b"%YAML 9\n",
    b"\xef\xbb\xbf",
    b"\xe2\x80\xae",
    b"*",
    b"?",
    b"[!a]",
    b"**",
];
/// Maximum size of an input.
const MAX_INPUT_BYTES: usize = 20_000;

/// Creates inputs by mutation of seeds.
pub(crate) struct Mutator {
    seeds: Vec<Vec<u8>>,
    state: u64,
}

impl Mutator {
    pub(crate) fn new(seeds: Vec<Vec<u8>>, seed: u64) -> Self {
        Self {
            seeds,
            // Never zero, which is a fixed point of this generator.
            state: seed | 1 << 63,
        }
    }

    pub(crate) fn next(&mut self) -> Vec<u8> {
        let mut bytes = self.seed();
        for _ in 0..=self.below(6) {
            self.change(&mut bytes);
        }
        bytes.truncate(MAX_INPUT_BYTES);
        bytes
    }

    fn seed(&mut self) -> Vec<u8> {
        let index = self.below(self.seeds.len());
        self.seeds[index].clone()
    }

    fn change(&mut self, bytes: &mut Vec<u8>) {
        let at = self.below(bytes.len() + 1);
        let end = (at + self.below(33)).min(bytes.len());
        match self.below(9) {
            0 if at < bytes.len() => bytes[at] ^= 1 << self.below(8),
            1 if at < bytes.len() => bytes[at] = self.byte(),
            2 => drop(bytes.splice(at..at, [self.byte()])),
            3 => drop(bytes.drain(at..end)),
            4 => {
                let piece = bytes[at..end].to_vec();
                let most = if self.below(20) == 0 { 300 } else { 3 };
                let times = 1 + self.below(most);
                bytes.splice(at..at, piece.repeat(times));
            }
            5 | 6 => {
                let token = TOKENS[self.below(TOKENS.len())];
                bytes.splice(at..at, token.iter().copied());
            }
            7 => {
                let other = self.seed();
                let from = self.below(other.len() + 1);
                let to = (from + self.below(200)).min(other.len());
                bytes.splice(at..end, other[from..to].iter().copied());
            }
            _ => bytes.truncate(at),
        }
    }

    fn byte(&mut self) -> u8 {
        u8::try_from(self.below(256)).unwrap()
    }

    /// A number below `limit`; 0 if `limit` is 0.
    fn below(&mut self, limit: usize) -> usize {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        usize::try_from(self.state % u64::try_from(limit.max(1)).unwrap()).unwrap()
    }
}
