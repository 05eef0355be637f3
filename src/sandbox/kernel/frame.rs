//! What goes over the wire, and how messages are taken out of output.
//!
//! The driver and the user's code write into the same two pipes, so that the order of what is printed and what is shown is
//! kept, nothing stands between the code and the host, and a slow reader slows the code. Messages are told from output by a
//! mark that is random for each kernel:
//!
//! ```text
//! host ─▶ driver   "run NUMBER CODE SETTINGS\n", code of CODE bytes, settings of SETTINGS bytes
//! driver ─▶ host   0x1e, 32 hex digits, ':', flags ('0'..'3': 1 = first part, 2 = last part), 4 hex digits of length, part
//! ```
//!
//! One part is one write of at most PIPE_BUF (4096) bytes: atomic (pipe(7)), whatever else writes there. The parts of one
//! message are JSON together (`message.rs`). An end is told on both pipes, as what is written before it must come before it.
//! The mark keeps output that only looks like a message from being one. It is no secret from the code, which may find it and
//! write messages of its own: about itself.

use std::collections::VecDeque;

/// Payload of one part, at most.
const MAX_PART: usize = 4000;
/// Largest message. The driver keeps what it shows below it.
pub(super) const MAX_MESSAGE: usize = 16 << 20;
const FIRST: u8 = 1;
const LAST: u8 = 2;

/// Why a driver is no longer listened to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(super) struct Nonsense(pub String);

impl Nonsense {
    pub(super) fn new(reason: impl Into<String>) -> Self {
        Self(reason.into())
    }
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Piece {
    /// What the code wrote. Never empty.
    Output(Vec<u8>),
    Message(Vec<u8>),
}

/// Takes one pipe apart.
#[derive(Debug)]
pub(super) struct Decoder {
    mark: Vec<u8>,
    /// The beginning of what may become a part: at most one part long.
    held: Vec<u8>,
    /// Parts so far of a message that is not whole.
    message: Option<Vec<u8>>,
}

impl Decoder {
    pub(super) fn new(word: &str) -> Self {
        Self {
            mark: format!("\x1e{word}:").into_bytes(),
            held: Vec::new(),
            message: None,
        }
    }

    /// Takes bytes as they came; whole pieces go to `pieces`.
    pub(super) fn push(&mut self, bytes: Vec<u8>, pieces: &mut VecDeque<Piece>) -> Result<(), Nonsense> {
        let data = if self.held.is_empty() {
            bytes
        } else {
            let mut data = std::mem::take(&mut self.held);
            data.extend_from_slice(&bytes);
            data
        };
        // Where output that was not yet passed on begins, and where to look next.
        let (mut from, mut at) = (0, 0);
        while let Some(found) = data[at..].iter().position(|byte| *byte == self.mark[0]) {
            at += found;
            let rest = &data[at..];
            let seen = rest.len().min(self.mark.len());
            if rest[..seen] != self.mark[..seen] {
                at += 1;
                continue;
            }
            let Some((flags, part)) = part(&rest[seen..])? else {
                break;
            };
            output(&data[from..at], pieces);
            self.take(flags, part, pieces)?;
            at += seen + HEAD + part.len();
            from = at;
        }
        // No mark begins before `at` if the loop broke off there; else all the rest is output.
        let end = match data[at..].first() {
            Some(byte) if *byte == self.mark[0] => at,
            Some(_) | None => data.len(),
        };
        output(&data[from..end], pieces);
        self.held = data[end..].to_vec();
        Ok(())
    }

    /// The pipe has ended: what was held is output after all.
    pub(super) fn finish(&mut self, pieces: &mut VecDeque<Piece>) {
        output(&std::mem::take(&mut self.held), pieces);
    }

    fn take(&mut self, flags: u8, part: &[u8], pieces: &mut VecDeque<Piece>) -> Result<(), Nonsense> {
        let mut message = match (flags & FIRST, self.message.take()) {
            // One that was broken off, as by an interrupt, is forgotten.
            (FIRST, _) => Vec::new(),
            (_, Some(message)) => message,
            (_, None) => return Err(Nonsense::new("a message went on that had not begun")),
        };
        if message.len() + part.len() > MAX_MESSAGE {
            return Err(Nonsense::new(format!("a message of more than {MAX_MESSAGE} bytes")));
        }
        message.extend_from_slice(part);
        if flags & LAST == 0 {
            self.message = Some(message);
        } else {
            pieces.push_back(Piece::Message(message));
        }
        Ok(())
    }
}

const HEAD: usize = 5;

/// Flags and payload of the part that follows a mark, if it is whole.
fn part(bytes: &[u8]) -> Result<Option<(u8, &[u8])>, Nonsense> {
    let Some(head) = bytes.first_chunk::<HEAD>() else {
        return Ok(None);
    };
    let flags = head[0].wrapping_sub(b'0');
    let length = head[1..].iter().try_fold(0, |length, digit| {
        Some(length * 16 + char::from(*digit).to_digit(16)? as usize)
    });
    match length {
        Some(length @ 0..=MAX_PART) if flags <= FIRST | LAST => {
            Ok(bytes.get(HEAD..HEAD + length).map(|part| (flags, part)))
        }
        Some(_) | None => Err(Nonsense::new("a message with a head that is none")),
    }
}

fn output(bytes: &[u8], pieces: &mut VecDeque<Piece>) {
    if !bytes.is_empty() {
        pieces.push_back(Piece::Output(bytes.to_vec()));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const WORD: &str = "00112233445566778899aabbccddeeff";

    fn sent(flags: u8, part: &[u8]) -> Vec<u8> {
        [format!("\x1e{WORD}:{flags}{:04x}", part.len()).as_bytes(), part].concat()
    }

    /// Pieces of the whole, with adjacent output joined.
    fn decode<'a>(chunks: impl IntoIterator<Item = &'a [u8]>) -> Result<Vec<Piece>, Nonsense> {
        let (mut decoder, mut pieces) = (Decoder::new(WORD), VecDeque::new());
        for chunk in chunks {
            decoder.push(chunk.to_vec(), &mut pieces)?;
            assert!(decoder.held.len() < decoder.mark.len() + HEAD + MAX_PART);
        }
        decoder.finish(&mut pieces);
        let mut joined: Vec<Piece> = Vec::new();
        for piece in pieces {
            match (joined.last_mut(), piece) {
                (Some(Piece::Output(before)), Piece::Output(bytes)) => before.extend(bytes),
                (_, piece) => joined.push(piece),
            }
        }
        Ok(joined)
    }

    proptest! {
        #[test]
        fn pieces_are_the_same_however_they_are_cut(
            steps in prop::collection::vec((any::<bool>(), prop::collection::vec(prop_oneof![Just(0x1e_u8), any::<u8>()], 0..60)), 0..6),
            cut in 1..50_usize,
        ) {
            let mut bytes = Vec::new();
            let mut want: Vec<Piece> = Vec::new();
            for (is_message, content) in steps {
                if is_message {
                    let middle = content.len() / 2;
                    bytes.extend(sent(FIRST, &content[..middle]));
                    bytes.extend(sent(LAST, &content[middle..]));
                    want.push(Piece::Message(content));
                } else if !content.is_empty() {
                    bytes.extend(&content);
                    match want.last_mut() {
                        Some(Piece::Output(before)) => before.extend(content),
                        _ => want.push(Piece::Output(content)),
                    }
                }
            }
            prop_assert_eq!(decode(bytes.chunks(cut)).unwrap(), want);
        }

        #[test]
        fn whatever_comes_is_borne(chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..8)) {
            let hostile: Vec<Vec<u8>> = chunks.into_iter().map(|chunk| [sent(0, &[]), chunk].concat()).collect();
            let _ = decode(hostile.iter().map(Vec::as_slice));
        }
    }

    #[test]
    fn output_may_lie_within_a_message_and_an_unfinished_one_is_forgotten() {
        let bytes = [
            &sent(1, b"lost"),
            b"x".as_slice(),
            &sent(1, b"a"),
            b"y",
            &sent(0, b"b"),
            &sent(2, b"c"),
        ]
        .concat();
        let want = [Piece::Output(b"xy".to_vec()), Piece::Message(b"abc".to_vec())];
        assert_eq!(decode([bytes.as_slice()]).unwrap(), want);
    }

    #[test]
    fn what_cannot_be_is_nonsense() {
        let mark = format!("\x1e{WORD}:");
        for head in ["40000", "3zzzz", "3ffff", "3+0fa", "/0000"] {
            assert!(
                decode([[mark.as_bytes(), head.as_bytes()].concat().as_slice()]).is_err(),
                "{head}"
            );
        }
        assert!(decode([sent(2, b"x").as_slice()]).is_err());
        let part = sent(0, &[b'x'; MAX_PART]);
        let endless = std::iter::once(sent(1, b"")).chain(std::iter::repeat_n(part, MAX_MESSAGE / MAX_PART + 1));
        let endless: Vec<Vec<u8>> = endless.collect();
        assert_eq!(
            decode(endless.iter().map(Vec::as_slice)),
            Err(Nonsense::new(format!("a message of more than {MAX_MESSAGE} bytes")))
        );
    }
}
