//! A line to a guest that can break and be taken up again: both ends find the beginning of a frame after a break.
//!
//! For a guest behind an engine's attach stream: the streams stay open inside, while the host's end dies with the server, in
//! the middle of a frame. What was on its way is lost then, in both directions, so the mux begins anew ([`super::mux`], as for a
//! restored sandbox). Owns how that beginning is told; moves no bytes.
//!
//! Host to guest: *packets*, a length (u16, big-endian), so many bytes of the mux, and a zero. Before the first of each host a
//! *hail*: the sandbox's secret and a word of this host, 16 bytes each. The first 16 bytes ever are the secret, sent before there
//! is a program inside. It holds no zero byte, so no packet that was cut off can be completed by a part of it, and no client
//! can say it, as none knows it.
//!
//! Guest to host: the word, once it has let go of all that was before; then frames of the mux. The host throws away what
//! comes before its word. A packet that makes no sense (of a host that died, come late) is answered with a frame `deaf`: nothing
//! is heard until the next hail.

/// Bytes of the secret, and of a host's word.
pub const WORD: usize = 16;
/// Most bytes of the mux in one packet.
pub const PACKET: usize = 32 << 10;

/// A secret, or a host's word.
pub type Word = [u8; WORD];

/// What a host says first. `secret` holds no zero byte.
pub fn hail(secret: &Word, word: &Word) -> [u8; 2 * WORD] {
    let mut hail = [0; 2 * WORD];
    hail[..WORD].copy_from_slice(secret);
    hail[WORD..].copy_from_slice(word);
    hail
}

/// Appends `bytes`, 1 to [`PACKET`], as a packet.
pub fn pack(bytes: &[u8], into: &mut Vec<u8>) {
    debug_assert!(!bytes.is_empty() && bytes.len() <= PACKET);
    into.extend((bytes.len() as u16).to_be_bytes());
    into.extend(bytes);
    into.push(0);
}

/// What the guest's end hears.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Heard {
    /// For the mux.
    Bytes(Vec<u8>),
    /// A host begins; this is its word.
    Hail(Word),
    /// Nothing makes sense until the next hail.
    Garbled,
}

/// The guest's end.
#[derive(Debug, Default)]
pub struct Packets {
    secret: Option<Word>,
    /// What is not understood yet.
    raw: Vec<u8>,
    is_deaf: bool,
}

impl Packets {
    /// Takes bytes, however they are cut.
    pub fn take(&mut self, bytes: &[u8]) -> Vec<Heard> {
        self.raw.extend_from_slice(bytes);
        let mut heard = Vec::new();
        loop {
            let Some(secret) = self.secret else {
                let Some(first) = self.raw.first_chunk::<WORD>() else {
                    return heard;
                };
                self.secret = Some(*first);
                continue;
            };
            let hailed = self.raw.windows(WORD).position(|window| *window == secret);
            let packets = hailed.unwrap_or(self.raw.len());
            let understood = self.understand(packets, &mut heard);
            let Some(at) = hailed else {
                self.raw.drain(..understood);
                return heard;
            };
            let Some(word) = self.raw[at + WORD..].first_chunk::<WORD>().copied() else {
                // What was cut off by the hail is of no use.
                self.raw.drain(..at);
                return heard;
            };
            self.is_deaf = false;
            heard.push(Heard::Hail(word));
            self.raw.drain(..at + 2 * WORD);
        }
    }

    /// From here on only a hail is heard.
    pub fn stop_listening(&mut self) {
        self.is_deaf = true;
    }

    /// Takes whole packets out of the first `length` bytes; how many are of no more use.
    fn understand(&mut self, length: usize, heard: &mut Vec<Heard>) -> usize {
        let mut rest = &self.raw[..length];
        while !self.is_deaf {
            let Some((head, body)) = rest.split_first_chunk::<2>() else {
                break;
            };
            let size = usize::from(u16::from_be_bytes(*head));
            if size == 0 || size > PACKET || body.get(size).is_some_and(|end| *end != 0) {
                self.is_deaf = true;
                heard.push(Heard::Garbled);
            } else if body.len() > size {
                heard.push(Heard::Bytes(body[..size].to_vec()));
                rest = &body[size + 1..];
            } else {
                break;
            }
        }
        match self.is_deaf {
            // The secret may have begun.
            true => length.saturating_sub(WORD - 1),
            false => length - rest.len(),
        }
    }
}

/// The host's end: what comes before its word is not for it.
#[derive(Debug)]
pub struct Answer {
    word: Word,
    /// The last bytes that came, while the word has not; none once it has.
    before: Option<Vec<u8>>,
}

impl Answer {
    pub fn to(word: Word) -> Self {
        Self {
            word,
            before: Some(Vec::new()),
        }
    }

    /// Those of `bytes` that are for the mux.
    pub fn take<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        let Some(before) = &mut self.before else {
            return bytes;
        };
        let held = before.len();
        before.extend_from_slice(bytes);
        match before.windows(WORD).position(|window| *window == self.word) {
            Some(at) => {
                self.before = None;
                // It ends in these bytes, or it had been found before.
                &bytes[at + WORD - held..]
            }
            None => {
                let old = before.len().saturating_sub(WORD - 1);
                before.drain(..old);
                &[]
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: Word = *b"a secret of 16 b";
    const ONE: Word = *b"the first host's";
    const TWO: Word = [0; WORD];

    fn packed(parts: &[&[u8]]) -> Vec<u8> {
        let mut all = Vec::new();
        for part in parts {
            pack(part, &mut all);
        }
        all
    }

    /// All that is heard, bytes joined, when `said` comes in pieces of `size`.
    fn heard(said: &[u8], size: usize) -> Vec<Heard> {
        let mut packets = Packets::default();
        let mut all: Vec<Heard> = Vec::new();
        for piece in said.chunks(size) {
            for one in packets.take(piece) {
                match (all.last_mut(), one) {
                    (Some(Heard::Bytes(before)), Heard::Bytes(more)) => before.extend(more),
                    (_, one) => all.push(one),
                }
            }
        }
        all
    }

    #[test]
    fn packets_arrive_however_they_are_cut() {
        let long = vec![7; PACKET];
        let said = [
            hail(&SECRET, &ONE).to_vec(),
            packed(&[b"\0", b"more", &long, &SECRET[..15]]),
        ]
        .concat();
        let bytes = [b"\0more".as_slice(), &long, &SECRET[..15]].concat();
        for size in [1, 2, 3, 17, 1000, said.len()] {
            assert_eq!(
                heard(&said, size),
                [Heard::Hail(ONE), Heard::Bytes(bytes.clone())],
                "{size}"
            );
        }
    }

    /// Whatever a host was saying when it died, the next one is understood from its first byte on, and nothing of a packet
    /// that was cut off is taken for data.
    #[test]
    fn a_hail_ends_what_was_cut_off_anywhere() {
        let first = packed(&[b"whole", b"\0\0\0 cut somewhere, by a death \0\0"]);
        let whole = packed(&[b"whole"]).len();
        for cut in 0..=first.len() {
            let said = [
                hail(&SECRET, &ONE).as_slice(),
                &first[..cut],
                &hail(&SECRET, &TWO),
                &packed(&[b"again"]),
            ]
            .concat();
            for size in [1, 5, 16, said.len()] {
                let mut all = heard(&said, size);
                all.retain(|one| *one != Heard::Garbled);
                let mut expected = vec![Heard::Hail(ONE)];
                if cut >= whole {
                    let rest = if cut == first.len() {
                        &first[whole + 2..cut - 1]
                    } else {
                        b""
                    };
                    expected.push(Heard::Bytes([b"whole", rest].concat()));
                }
                expected.extend([Heard::Hail(TWO), Heard::Bytes(b"again".to_vec())]);
                assert_eq!(all, expected, "cut at {cut}, in pieces of {size}");
            }
        }
    }

    #[test]
    fn what_makes_no_sense_is_told_once_and_nothing_is_heard_until_a_hail() {
        let late = b"\0\x02xy! left by one that died";
        let said = [
            hail(&SECRET, &ONE).as_slice(),
            late,
            &packed(&[b"lost"]),
            &hail(&SECRET, &TWO),
            &packed(&[b"heard"]),
        ]
        .concat();
        for size in [1, 4, said.len()] {
            assert_eq!(
                heard(&said, size),
                [
                    Heard::Hail(ONE),
                    Heard::Garbled,
                    Heard::Hail(TWO),
                    Heard::Bytes(b"heard".to_vec())
                ],
                "{size}"
            );
        }
    }

    #[test]
    fn a_host_hears_what_comes_after_its_word() {
        let said = [b"of another host".as_slice(), &ONE[..9], &ONE, &ONE, b"mine"].concat();
        for size in [1, 2, 15, 16, 17, said.len()] {
            let mut answer = Answer::to(ONE);
            let taken: Vec<u8> = said
                .chunks(size)
                .flat_map(|piece| answer.take(piece).to_vec())
                .collect();
            assert_eq!(taken, [&ONE[..], b"mine"].concat(), "{size}");
        }
    }
}
