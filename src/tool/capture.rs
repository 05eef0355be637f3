//! Output kept in bounded memory: the head, the tail, and what was in all.

use std::collections::VecDeque;

/// Takes output as it comes, however much.
#[derive(Debug)]
pub struct Capture {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    half: usize,
    bytes: u64,
    newlines: u64,
    last: Option<u8>,
}

/// What was kept of a stream. Without a gap, `head` and `tail` together are all of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Captured {
    pub head: Vec<u8>,
    pub tail: Vec<u8>,
    /// Of the whole stream.
    pub total_bytes: u64,
    /// Of the whole stream; a last line without its end counts.
    pub total_lines: u64,
}

impl Capture {
    /// Keeps at most `max_bytes`, half of it from the end.
    pub fn new(max_bytes: usize) -> Self {
        Self {
            head: Vec::new(),
            tail: VecDeque::new(),
            half: max_bytes / 2,
            bytes: 0,
            newlines: 0,
            last: None,
        }
    }

    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        self.newlines += bytes.iter().filter(|byte| **byte == b'\n').count() as u64;
        self.last = bytes.last().copied().or(self.last);
        let (first, rest) = bytes.split_at(bytes.len().min(self.half - self.head.len()));
        self.head.extend_from_slice(first);
        let rest = &rest[rest.len().saturating_sub(self.half)..];
        let over = (self.tail.len() + rest.len()).saturating_sub(self.half);
        self.tail.drain(..over);
        self.tail.extend(rest);
    }

    pub fn finish(self) -> Captured {
        Captured {
            head: self.head,
            tail: self.tail.into(),
            total_bytes: self.bytes,
            total_lines: self.newlines + u64::from(self.last.is_some_and(|last| last != b'\n')),
        }
    }
}

impl Captured {
    /// A stream that was kept whole.
    pub fn whole(bytes: &[u8]) -> Self {
        let mut capture = Capture::new(bytes.len() * 2);
        capture.push(bytes);
        capture.finish()
    }

    /// Bytes of the middle that nobody kept.
    pub fn lost_bytes(&self) -> u64 {
        self.total_bytes
            .saturating_sub((self.head.len() + self.tail.len()) as u64)
    }

    /// As text, with a note in place of what nobody kept. Bytes that are no UTF-8 become `U+FFFD`.
    pub fn to_text(&self) -> String {
        match self.lost_bytes() {
            0 => String::from_utf8_lossy(&[self.head.as_slice(), &self.tail].concat()).into_owned(),
            lost => format!(
                "{}\n[{lost} bytes were not kept: too much output]\n{}",
                String::from_utf8_lossy(&self.head),
                String::from_utf8_lossy(&self.tail)
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn head_tail_and_totals_are_kept_in_bounded_memory() {
        let mut capture = Capture::new(10);
        for chunk in [&b"ab\n"[..], b"", b"cdefghij\nklm", b"\nxyz"] {
            capture.push(chunk);
            assert!(capture.head.len() <= 5 && capture.tail.len() <= 5);
        }
        let captured = capture.finish();
        let expected = Captured {
            head: b"ab\ncd".to_vec(),
            tail: b"m\nxyz".to_vec(),
            total_bytes: 19,
            total_lines: 4,
        };
        assert_eq!(captured, expected);
        assert_eq!(
            captured.to_text(),
            "ab\ncd\n[9 bytes were not kept: too much output]\nm\nxyz"
        );
    }

    #[test]
    fn what_fits_is_whole_even_when_a_character_lies_on_the_border() {
        let mut capture = Capture::new(8);
        capture.push("abcé".as_bytes());
        capture.push(b"f\n");
        let captured = capture.finish();
        assert_eq!(
            (captured.to_text().as_str(), captured.lost_bytes(), captured.total_lines),
            ("abcéf\n", 0, 1)
        );
        assert_eq!(Captured::whole(b""), Captured::default());
    }
}
