//! Frames between host and guest: the generated messages and the length-prefixed framing, used by both ends.
//!
//! Owns: the frame limit, the generation number, encoding and decoding. Knows nothing of sockets' owners, sandboxes or
//! policies. The messages themselves are documented in `proto/exuvia/guest/v1/guest.proto`. Where no socket reaches the guest,
//! `mux` carries all connections over one pair of pipes, and `pump` moves its bytes; `line` is for pipes whose far end can be
//! another one after a break.

pub mod line;
pub mod mux;
pub mod pump;

#[allow(clippy::all, missing_docs)]
mod proto {
    include!(env!("EXUVIA_WIRE_RS"));
}
pub use proto::*;

use std::io::{self, Read, Write};

use prost::Message;
use prost::bytes::{Buf, BytesMut};

/// The version of the conversation. Raised by every change that an older guest would misread.
pub const GENERATION: u32 = 2;

/// Largest frame in bytes, without its 4-byte length. A longer one is an error on either side.
pub const MAX_FRAME: usize = 1 << 20;

/// The same for a request, which the host alone sends: with room for all arguments and variables that a kernel takes by
/// default, 2 MiB.
pub const MAX_REQUEST: usize = 3 << 20;

/// Largest `Output.data` or `FileChunk.data` that either side sends, in bytes.
pub const CHUNK: usize = 64 << 10;

/// Appends `message` to `buffer` as one frame: big-endian u32 length, then protobuf.
///
/// # Errors
/// `InvalidInput` when the message is larger than [`MAX_FRAME`].
pub fn encode(message: &impl Message, buffer: &mut Vec<u8>) -> io::Result<()> {
    encode_up_to(MAX_FRAME, message, buffer)
}

/// As [`encode`], for the first frame of a connection.
///
/// # Errors
/// `InvalidInput` when the request is larger than [`MAX_REQUEST`].
pub fn encode_request(request: &Request, buffer: &mut Vec<u8>) -> io::Result<()> {
    encode_up_to(MAX_REQUEST, request, buffer)
}

fn encode_up_to(limit: usize, message: &impl Message, buffer: &mut Vec<u8>) -> io::Result<()> {
    let length = message.encoded_len();
    if length > limit {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("frame of {length} bytes"),
        ));
    }
    buffer.extend_from_slice(&(length as u32).to_be_bytes());
    message.encode(buffer).expect("a Vec grows as needed");
    Ok(())
}

/// Takes one whole frame off the front of `buffer`; `None` when more bytes are needed.
///
/// # Errors
/// `InvalidData` for an oversized length or bytes that are not a `M`; the stream is useless afterwards.
pub fn decode<M: Message + Default>(buffer: &mut Vec<u8>) -> io::Result<Option<M>> {
    decode_up_to(MAX_FRAME, buffer)
}

/// As [`decode`], for the first frame of a connection.
///
/// # Errors
/// As [`decode`].
pub fn decode_request(buffer: &mut Vec<u8>) -> io::Result<Option<Request>> {
    decode_up_to(MAX_REQUEST, buffer)
}

fn decode_up_to<M: Message + Default>(limit: usize, buffer: &mut Vec<u8>) -> io::Result<Option<M>> {
    let Some(head) = buffer.first_chunk::<4>() else {
        return Ok(None);
    };
    let length = checked(limit, u32::from_be_bytes(*head))?;
    if buffer.len() < 4 + length {
        return Ok(None);
    }
    let message = M::decode(&buffer[4..4 + length]).map_err(invalid)?;
    buffer.drain(..4 + length);
    Ok(Some(message))
}

/// As [`decode`], and what the message holds as `Bytes` shares the buffer's memory.
///
/// # Errors
/// As [`decode`].
pub fn take<M: Message + Default>(buffer: &mut BytesMut) -> io::Result<Option<M>> {
    let Some(head) = buffer.first_chunk::<4>() else {
        return Ok(None);
    };
    let length = checked(MAX_FRAME, u32::from_be_bytes(*head))?;
    if buffer.len() < 4 + length {
        return Ok(None);
    }
    let mut frame = buffer.split_to(4 + length);
    frame.advance(4);
    M::decode(frame.freeze()).map(Some).map_err(invalid)
}

/// Bytes of each stream of a detachable exec that the guest keeps for an attach.
pub const RING: usize = 6 << 20;

/// Of these, bytes that were taken already: whoever lost them on the way further on can still have them again. More than is on
/// its way between the guest and a client of the server: a window of HTTP/2 (2 MiB by default in Rust), and buffers.
pub const REPLAY: usize = 4 << 20;

/// Most bytes of stdin that the host may have sent and the guest not yet have credited.
pub const STDIN_WINDOW: usize = 256 << 10;

/// Writes one frame.
pub fn write(to: &mut impl Write, message: &impl Message) -> io::Result<()> {
    let mut buffer = Vec::with_capacity(message.encoded_len() + 4);
    encode(message, &mut buffer)?;
    to.write_all(&buffer)
}

/// Reads one frame; `None` at a clean end of the stream.
pub fn read<M: Message + Default>(from: &mut impl Read) -> io::Result<Option<M>> {
    read_up_to(MAX_FRAME, from)
}

/// As [`read`], for the first frame of a connection.
pub fn read_request(from: &mut impl Read) -> io::Result<Option<Request>> {
    read_up_to(MAX_REQUEST, from)
}

fn read_up_to<M: Message + Default>(limit: usize, from: &mut impl Read) -> io::Result<Option<M>> {
    let mut head = [0; 4];
    match from.read(&mut head)? {
        0 => return Ok(None),
        got => from.read_exact(&mut head[got..])?,
    }
    let mut body = vec![0; checked(limit, u32::from_be_bytes(head))?];
    from.read_exact(&mut body)?;
    M::decode(body.as_slice()).map(Some).map_err(invalid)
}

fn checked(limit: usize, length: u32) -> io::Result<usize> {
    match length as usize {
        length if length <= limit => Ok(length),
        length => Err(invalid(format!("frame of {length} bytes"))),
    }
}

fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_round_trip_however_they_are_cut() {
        let sent = [
            Event {
                kind: Some(event::Kind::Started(Started {
                    pid: 7,
                    ..Started::default()
                })),
            },
            Event {
                kind: Some(event::Kind::Output(Output {
                    stream: Stream::Stdout as i32,
                    data: vec![0, 255, 10].into(),
                    offset: 3,
                })),
            },
        ];
        let mut bytes = Vec::new();
        sent.iter().for_each(|event| encode(event, &mut bytes).unwrap());
        let (mut buffer, mut received) = (Vec::new(), Vec::new());
        let (mut shared, mut taken) = (BytesMut::new(), Vec::new());
        for byte in bytes {
            buffer.push(byte);
            received.extend(decode::<Event>(&mut buffer).unwrap());
            shared.extend_from_slice(&[byte]);
            taken.extend(take::<Event>(&mut shared).unwrap());
        }
        assert_eq!(
            (received.as_slice(), taken.as_slice()),
            (sent.as_slice(), sent.as_slice())
        );
        assert!(buffer.is_empty() && shared.is_empty());
    }

    #[test]
    fn an_oversized_length_is_refused_before_any_allocation() {
        let mut bytes = u32::MAX.to_be_bytes().to_vec();
        assert_eq!(
            decode::<Event>(&mut bytes).unwrap_err().kind(),
            io::ErrorKind::InvalidData
        );
        assert_eq!(
            read::<Event>(&mut bytes.as_slice()).unwrap_err().kind(),
            io::ErrorKind::InvalidData
        );
    }

    #[test]
    fn a_request_alone_may_be_larger_than_a_frame() {
        let exec = |bytes: usize| Request {
            generation: GENERATION,
            kind: Some(request::Kind::Exec(Exec {
                argv: vec![vec![7; bytes]],
                ..Exec::default()
            })),
        };
        let (mut frame, large) = (Vec::new(), exec(2 << 20));
        encode(&large, &mut frame).unwrap_err();
        encode_request(&large, &mut frame).unwrap();
        assert_eq!(read_request(&mut frame.as_slice()).unwrap(), Some(large.clone()));
        read::<Request>(&mut frame.as_slice()).unwrap_err();
        assert_eq!(decode_request(&mut frame).unwrap(), Some(large));
        encode_request(&exec(MAX_REQUEST), &mut frame).unwrap_err();
    }

    #[test]
    fn a_cut_frame_is_an_error_and_a_clean_end_is_not() {
        assert!(read::<Event>(&mut [].as_slice()).unwrap().is_none());
        assert_eq!(
            read::<Event>(&mut [0, 0].as_slice()).unwrap_err().kind(),
            io::ErrorKind::UnexpectedEof
        );
    }
}
