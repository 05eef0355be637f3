//! What goes to the host: frames, one piece of output at a time, in one buffer that is used again and again.

use std::io::{self, ErrorKind, Read, Write};

use prost::encoding::{encode_varint, encoded_len_varint};

use crate::wire::{self, CHUNK, Event, Stream, event};

/// Room for all of an output frame but its data.
const HEAD: usize = 48;
/// Bytes that may wait for more, to be sent in one go.
const SMALL: usize = 4 << 10;

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

    /// Whether another frame may go with what is there.
    pub fn has_room(&self) -> bool {
        self.end - self.start <= SMALL
    }

    /// Adds a frame, after all that is there.
    pub fn push(&mut self, kind: event::Kind) -> io::Result<()> {
        self.bytes.truncate(self.end);
        wire::encode(&Event { kind: Some(kind) }, &mut self.bytes)?;
        self.end = self.bytes.len();
        Ok(())
    }

    /// Reads at most `most` bytes straight into an output frame; how many. Only when it has room.
    pub fn fill(&mut self, stream: Stream, offset: u64, most: usize, from: &mut impl Read) -> io::Result<usize> {
        debug_assert!(self.has_room());
        let data = self.end + HEAD;
        if self.bytes.len() < data + CHUNK {
            self.bytes.resize(data + CHUNK, 0);
        }
        let length = from.read(&mut self.bytes[data..][..most.min(CHUNK)])?;
        if length > 0 {
            let head = head(stream, offset, length);
            let first = data - head.len();
            if self.is_empty() {
                self.start = first;
                self.end = data + length;
                self.bytes[first..data].copy_from_slice(&head);
            } else {
                // Behind what is there, without a gap.
                self.bytes.copy_within(data..data + length, self.end + head.len());
                self.bytes[self.end..][..head.len()].copy_from_slice(&head);
                self.end += head.len() + length;
            }
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
            if outbox.has_room() {
                let more = outbox.fill(Stream::Stdout, 3, CHUNK, &mut b"more".as_slice());
                assert_eq!(more.unwrap(), 4);
            }
            let is_followed = length < SMALL;
            outbox.flush(&mut sent).unwrap();
            assert!(outbox.is_empty());
            let output = Output {
                stream: Stream::Stderr as i32,
                data: data.into(),
                offset,
            };
            let more = Output {
                stream: Stream::Stdout as i32,
                data: "more".into(),
                offset: 3,
            };
            let mut wanted = vec![event::Kind::Output(output), event::Kind::Credit(9)];
            wanted.extend(is_followed.then_some(event::Kind::Output(more)));
            let wanted: Vec<Event> = wanted.into_iter().map(|kind| Event { kind: Some(kind) }).collect();
            let mut got = Vec::new();
            while let Some(event) = wire::decode::<Event>(&mut sent).unwrap() {
                got.push(event);
            }
            assert_eq!(got, wanted, "offset {offset}, length {length}");
        }
    }
}
