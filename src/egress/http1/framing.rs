//! Where one request on a connection ends and the next begins. Strict, so that nobody behind it can see another border.

use super::head::{self, Body, Head, Violation};

/// A chunk's size line, and all trailers together, have at most so many bytes.
const MAX_LINE: usize = 64;
const MAX_TRAILERS: usize = 8 << 10;

/// The place in the stream of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Framing {
    /// At a head, or within one.
    Head,
    /// So many bytes of a body are still to come.
    Body(u64),
    ChunkSize,
    Chunk(u64),
    ChunkEnd,
    /// So many bytes of trailers have gone by.
    Trailers(usize),
}

/// What stands at the beginning of the bytes that were looked at.
#[derive(Debug, PartialEq, Eq)]
pub enum Piece {
    /// More bytes are needed.
    More,
    Head(Head),
    /// Bytes of the message that can go on.
    Part(usize),
}

impl Framing {
    /// Looks at what comes next and moves behind it, a head apart: that is left to [`Framing::begin`].
    ///
    /// # Errors
    /// It could be read in two ways.
    pub fn next(&mut self, bytes: &[u8]) -> Result<Piece, Violation> {
        if bytes.is_empty() {
            return Ok(Piece::More);
        }
        match *self {
            Self::Head => Ok(head::parse(bytes)?.map_or(Piece::More, Piece::Head)),
            Self::Body(left) => {
                let taken = left.min(bytes.len() as u64);
                *self = if taken == left {
                    Self::Head
                } else {
                    Self::Body(left - taken)
                };
                Ok(Piece::Part(taken as usize))
            }
            Self::ChunkSize => {
                let Some(line) = line(bytes, MAX_LINE, Violation::ChunkSize)? else {
                    return Ok(Piece::More);
                };
                *self = match chunk_size(line).ok_or(Violation::ChunkSize)? {
                    0 => Self::Trailers(0),
                    size => Self::Chunk(size),
                };
                Ok(Piece::Part(line.len() + 2))
            }
            Self::Chunk(left) => {
                let taken = left.min(bytes.len() as u64);
                *self = if taken == left {
                    Self::ChunkEnd
                } else {
                    Self::Chunk(left - taken)
                };
                Ok(Piece::Part(taken as usize))
            }
            Self::ChunkEnd => match bytes {
                [b'\r', b'\n', ..] => {
                    *self = Self::ChunkSize;
                    Ok(Piece::Part(2))
                }
                [b'\r'] => Ok(Piece::More),
                _ => Err(Violation::LineEnd),
            },
            Self::Trailers(before) => {
                let Some(line) = line(bytes, MAX_TRAILERS - before, Violation::TooLong)? else {
                    return Ok(Piece::More);
                };
                *self = Self::Head;
                if !line.is_empty() {
                    let (name, _) = head::field(line)?;
                    // RFC 9110, 6.5.1: what frames or routes a message may not come after it.
                    if [
                        "content-length",
                        "transfer-encoding",
                        "host",
                        "trailer",
                        "authorization",
                    ]
                    .contains(&name.as_str())
                    {
                        return Err(Violation::Trailer);
                    }
                    *self = Self::Trailers((before + line.len() + 2).min(MAX_TRAILERS));
                }
                Ok(Piece::Part(line.len() + 2))
            }
        }
    }

    /// Moves behind a head.
    pub fn begin(&mut self, head: &Head) {
        *self = match head.body {
            Body::None | Body::Length(0) => Self::Head,
            Body::Length(length) => Self::Body(length),
            Body::Chunked => Self::ChunkSize,
        };
    }

    /// How many bytes of content come next, whatever they are.
    pub fn content(&self) -> u64 {
        match *self {
            Self::Body(left) | Self::Chunk(left) => left,
            Self::Head | Self::ChunkSize | Self::ChunkEnd | Self::Trailers(_) => 0,
        }
    }

    /// Moves behind `taken` bytes of content.
    pub fn skip(&mut self, taken: u64) {
        debug_assert!(taken <= self.content());
        *self = match *self {
            Self::Body(left) if taken == left => Self::Head,
            Self::Body(left) => Self::Body(left - taken),
            Self::Chunk(left) if taken == left => Self::ChunkEnd,
            Self::Chunk(left) => Self::Chunk(left - taken),
            at @ (Self::Head | Self::ChunkSize | Self::ChunkEnd | Self::Trailers(_)) => at,
        };
    }
}

fn line(bytes: &[u8], most: usize, too_long: Violation) -> Result<Option<&[u8]>, Violation> {
    let end = bytes.iter().position(|b| matches!(b, b'\r' | b'\n'));
    if end.unwrap_or(bytes.len()) >= most {
        return Err(too_long);
    }
    match end.map(|end| (&bytes[..end], &bytes[end..])) {
        None | Some((_, [b'\r'])) => Ok(None),
        Some((line, [b'\r', b'\n', ..])) => Ok(Some(line)),
        Some(_) => Err(Violation::LineEnd),
    }
}

/// Hexadecimal digits and nothing else: no sign, no space, no extension.
fn chunk_size(line: &[u8]) -> Option<u64> {
    let plain = (1..=15).contains(&line.len()) && line.iter().all(u8::is_ascii_hexdigit);
    let text = std::str::from_utf8(line).ok()?;
    if plain {
        u64::from_str_radix(text, 16).ok()
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The targets of the requests in `bytes`, which come in pieces of `step`.
    fn targets(bytes: &[u8], step: usize) -> Result<Vec<String>, Violation> {
        let (mut framing, mut held, mut found) = (Framing::Head, Vec::new(), Vec::new());
        for piece in bytes.chunks(step) {
            held.extend_from_slice(piece);
            loop {
                let length = match framing.next(&held)? {
                    Piece::More => break,
                    Piece::Part(length) => length,
                    Piece::Head(head) => {
                        framing.begin(&head);
                        found.push(head.target.clone());
                        head.length
                    }
                };
                held.drain(..length);
            }
        }
        Ok(found)
    }

    #[test]
    fn requests_follow_each_other() {
        let text = "POST /1 HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nGET /\r\nA\r\n0123456789\r\n0\r\nX: y\r\n\r\n\
            POST /2 HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nGET GET /3 HTTP/1.1\r\nHost: a\r\n\r\n";
        for step in [1, 2, 3, 7, 1000] {
            assert_eq!(
                targets(text.as_bytes(), step),
                Ok(vec!["/1".into(), "/2".into(), "/3".into()]),
                "{step}"
            );
        }
    }

    #[test]
    fn chunks_are_read_strictly() {
        let with = |chunks: &str| {
            let text = format!("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n{chunks}");
            targets(text.as_bytes(), 1000).err()
        };
        for (chunks, violation) in [
            ("5;x=y\r\nhello\r\n0\r\n\r\n", Violation::ChunkSize),
            ("0x5\r\n", Violation::ChunkSize),
            ("+5\r\n", Violation::ChunkSize),
            (" 5\r\n", Violation::ChunkSize),
            ("5 \r\n", Violation::ChunkSize),
            ("\r\n", Violation::ChunkSize),
            ("FFFFFFFFFFFFFFFF\r\n", Violation::ChunkSize),
            ("5\nhello", Violation::LineEnd),
            ("5\r\nhello0\r\n\r\n", Violation::LineEnd),
            ("5\r\nhello\n", Violation::LineEnd),
            ("0\r\nContent-Length: 5\r\n\r\n", Violation::Trailer),
            ("0\r\nAuthorization: x\r\n\r\n", Violation::Trailer),
            ("0\r\n folded\r\n\r\n", Violation::Folded),
        ] {
            assert_eq!(with(chunks), Some(violation), "{chunks:?}");
        }
        assert_eq!(with(&"0".repeat(MAX_LINE + 1)), Some(Violation::ChunkSize));
        assert_eq!(
            with(&format!("0\r\n{}", "X: y\r\n".repeat(MAX_TRAILERS / 5))),
            Some(Violation::TooLong)
        );
        assert_eq!(with("5\r\nhello\r\n0\r\n\r\n"), None);
    }

    proptest! {
        #[test]
        fn noise_never_breaks_it(bytes in "[ -~\r\n0]{0,60}", step in 1usize..9) {
            for front in ["", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"] {
                let _ = targets(format!("{front}{bytes}").as_bytes(), step);
            }
        }

        /// How the bytes are cut never changes what they say.
        #[test]
        fn cuts_do_not_matter(bodies in proptest::collection::vec("[a\r\n]{0,9}", 0..4), step in 1usize..30) {
            let mut text = String::new();
            for (n, body) in bodies.iter().enumerate() {
                text += &match n % 2 {
                    0 => format!("POST /{n} HTTP/1.1\r\nHost: a\r\nContent-Length: {}\r\n\r\n{body}", body.len()),
                    _ if body.is_empty() => format!("GET /{n} HTTP/1.1\r\nHost: a\r\n\r\n"),
                    _ => format!(
                        "PUT /{n} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n{:x}\r\n{body}\r\n0\r\n\r\n", body.len()),
                };
            }
            let expected: Vec<String> = (0..bodies.len()).map(|n| format!("/{n}")).collect();
            prop_assert_eq!(targets(text.as_bytes(), step), Ok(expected));
        }
    }
}
