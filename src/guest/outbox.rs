//! What goes to the host: frames, one piece of output at a time, in one buffer that is used again and again.

use std::io::{self, ErrorKind, Read, Write};

use prost::encoding::{encode_varint, encoded_len_varint};

use crate::wire::{self, CHUNK, Event, Stream, event};

/// Room for all of an output frame but its data.
const HEAD: usize = 48;

/// Field keys of `Event.output`, `Output.stream`, `Output.offset`, `Output.data` (number << 3 | wire type).
const OUTPUT: u8 = 3 << 3 | 2;
const STREAM: u8 = 1 << 3;
const OFFSET: u8 = 3 << 3;
const DATA: u8 = 2 << 3 | 2;

#[derive(Debug, Default)]
pub struct Outbox {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl Outbox {
    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Adds a frame, after all that is there.
    pub fn push(&mut self, kind: event::Kind) -> io::Result<()> {
        self.bytes.truncate(self.end);
        wire::encode(&Event { kind: Some(kind) }, &mut self.bytes)?;
        self.end = self.bytes.len();
        Ok(())
    }

    /// Reads at most `most` bytes straight into an output frame; how many. Only when it is empty.
    pub fn fill(&mut self, stream: Stream, offset: u64, most: usize, from: &mut impl Read) -> io::Result<usize> {
        debug_assert!(self.is_empty());
        self.bytes.resize(HEAD + CHUNK, 0);
        let length = from.read(&mut self.bytes[HEAD..][..most.min(CHUNK)])?;
        if length > 0 {
            let head = head(stream, offset, length);
            self.start = HEAD - head.len();
            self.end = HEAD + length;
            self.bytes[self.start..HEAD].copy_from_slice(&head);
        }
        Ok(length)
    }

    /// Writes as much as the host takes now.
    pub fn flush(&mut self, to: &mut impl Write) -> io::Result<()> {
        while self.start < self.end {
            match to.write(&self.bytes[self.start..self.end]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(length) => self.start += length,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        (self.start, self.end) = (0, 0);
        Ok(())
    }
}

/// A frame up to its data.
fn head(stream: Stream, offset: u64, length: usize) -> Vec<u8> {
    let length = length as u64;
    let inner = 2 + 1 + encoded_len_varint(offset) + 1 + encoded_len_varint(length) + length as usize;
    let outer = 1 + encoded_len_varint(inner as u64) + inner;
    let mut head = Vec::with_capacity(HEAD);
    head.extend_from_slice(&(outer as u32).to_be_bytes());
    head.push(OUTPUT);
    encode_varint(inner as u64, &mut head);
    head.extend_from_slice(&[STREAM, stream as u8, OFFSET]);
    encode_varint(offset, &mut head);
    head.push(DATA);
    encode_varint(length, &mut head);
    head
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Output;

    #[test]
    fn a_frame_that_is_filled_reads_as_one_that_is_encoded() {
        for (offset, length) in [(0, 1), (127, 127), (128, 128), (u64::MAX, CHUNK), (1 << 40, 5)] {
            let (data, mut outbox, mut sent) = (vec![7; length], Outbox::default(), Vec::new());
            assert_eq!(
                outbox
                    .fill(Stream::Stderr, offset, CHUNK, &mut data.as_slice())
                    .unwrap(),
                length
            );
            outbox.push(event::Kind::Credit(9)).unwrap();
            outbox.flush(&mut sent).unwrap();
            assert!(outbox.is_empty());
            let output = Output {
                stream: Stream::Stderr as i32,
                data: data.into(),
                offset,
            };
            let wanted = [event::Kind::Output(output), event::Kind::Credit(9)].map(|kind| Event { kind: Some(kind) });
            let mut got = Vec::new();
            while let Some(event) = wire::decode::<Event>(&mut sent).unwrap() {
                got.push(event);
            }
            assert_eq!(got, wanted, "offset {offset}, length {length}");
        }
    }
}
