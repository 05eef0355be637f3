//! Output kept in bounded memory: the head and the tail of each stream, and how much there was.

use super::{Ended, Exec, Output};

/// A command that ran to its end, with what it wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finished {
    pub ended: Ended,
    pub stdout: Captured,
    pub stderr: Captured,
}

/// What one stream carried: all of it, or its first and its last bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Captured {
    head: Vec<u8>,
    /// The last bytes after `head`, at most twice `tail_limit` while it is filled.
    tail: Vec<u8>,
    total: u64,
    newlines: u64,
    ends_in_newline: bool,
    head_limit: usize,
    tail_limit: usize,
}

impl Captured {
    /// Keeps at most `limit` bytes, half of them from each end.
    pub fn new(limit: usize) -> Self {
        Self {
            head_limit: limit.div_ceil(2),
            tail_limit: limit / 2,
            ..Self::default()
        }
    }

    /// A stream that was kept whole.
    pub fn whole(bytes: &[u8]) -> Self {
        let mut captured = Self::new(bytes.len() * 2);
        captured.push(bytes);
        captured
    }

    pub fn push(&mut self, bytes: &[u8]) {
        self.total += bytes.len() as u64;
        self.newlines += bytes.iter().filter(|byte| **byte == b'\n').count() as u64;
        self.ends_in_newline = bytes.last().map_or(self.ends_in_newline, |last| *last == b'\n');
        let (head, rest) = bytes.split_at(bytes.len().min(self.head_limit - self.head.len()));
        self.head.extend_from_slice(head);
        self.tail
            .extend_from_slice(&rest[rest.len().saturating_sub(self.tail_limit)..]);
        // Cut seldom: each cut moves what is kept.
        if self.tail.len() > 2 * self.tail_limit {
            self.trim();
        }
    }

    fn trim(&mut self) {
        let excess = self.tail.len().saturating_sub(self.tail_limit);
        self.tail.drain(..excess);
    }

    /// All bytes that the stream carried, kept or not.
    pub fn total_bytes(&self) -> u64 {
        self.total
    }

    /// All lines that the stream carried; a last one without its end counts.
    pub fn total_lines(&self) -> u64 {
        self.newlines + u64::from(self.total > 0 && !self.ends_in_newline)
    }

    pub fn is_complete(&self) -> bool {
        self.dropped_bytes() == 0
    }

    /// Bytes between head and tail that were not kept.
    pub fn dropped_bytes(&self) -> u64 {
        self.total - (self.head.len() + self.tail().len()) as u64
    }

    pub fn head(&self) -> &[u8] {
        &self.head
    }

    /// What follows the head, or its end.
    pub fn tail(&self) -> &[u8] {
        &self.tail[self.tail.len().saturating_sub(self.tail_limit)..]
    }

    /// Head and tail, joined. That is the whole when [`Captured::is_complete`].
    pub fn bytes(&self) -> Vec<u8> {
        [self.head(), self.tail()].concat()
    }

    /// For people and models: invalid UTF-8 replaced, a gap named.
    pub fn text(&self) -> String {
        match self.dropped_bytes() {
            0 => String::from_utf8_lossy(&self.bytes()).into_owned(),
            dropped => format!(
                "{}\n[… {dropped} of {} bytes left out …]\n{}",
                String::from_utf8_lossy(self.head()),
                self.total,
                String::from_utf8_lossy(self.tail())
            ),
        }
    }
}

impl Exec {
    /// Runs to the end and keeps at most `max_bytes` of each stream. What a pseudo-terminal shows counts as standard output.
    pub async fn finish(mut self, max_bytes: usize) -> Finished {
        let (mut stdout, mut stderr) = (Captured::new(max_bytes), Captured::new(max_bytes));
        while let Some(output) = self.output.recv().await {
            match output {
                Output::Stdout(bytes) | Output::Pty(bytes) => stdout.push(&bytes),
                Output::Stderr(bytes) => stderr.push(&bytes),
            }
        }
        stdout.trim();
        stderr.trim();
        let ended = self.ended().await;
        Finished { ended, stdout, stderr }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn head_and_tail_are_those_of_the_whole(chunks: Vec<Vec<u8>>, limit in 0..40_usize) {
            let whole = chunks.concat();
            let mut captured = Captured::new(limit);
            chunks.iter().for_each(|chunk| captured.push(chunk));
            prop_assert_eq!(captured.total_bytes(), whole.len() as u64);
            prop_assert!(captured.tail.len() <= 2 * limit);
            prop_assert!(whole.starts_with(captured.head()));
            prop_assert!(whole.ends_with(captured.tail()));
            prop_assert_eq!(captured.bytes().len(), whole.len().min(limit));
            prop_assert_eq!(captured.is_complete(), whole.len() <= limit);
        }
    }

    #[test]
    fn lines_are_counted_and_what_fits_is_whole() {
        let lines = ["", "a", "a\n", "a\nb", "\n\n"].map(|text| Captured::whole(text.as_bytes()).total_lines());
        assert_eq!(lines, [0, 1, 1, 2, 2]);
        let mut captured = Captured::new(8);
        captured.push("abcé".as_bytes());
        captured.push(b"f\n");
        assert_eq!(captured.text(), "abcéf\n", "a character lies on the border");
    }

    #[test]
    fn a_gap_is_named() {
        let mut captured = Captured::new(4);
        captured.push(b"abcdefgh");
        assert_eq!(captured.text(), "ab\n[… 4 of 8 bytes left out …]\ngh");
    }
}
