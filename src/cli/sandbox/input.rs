//! Standard input, read by a thread of its own, and the keys that leave a command.

use std::io::Read;

use tokio::sync::mpsc;

const CHUNK: usize = 64 << 10;

/// Chunks of standard input as they come; the channel closes at its end. Nothing waits for the thread: a read from a
/// terminal may never end.
pub(super) fn stdin() -> mpsc::Receiver<Vec<u8>> {
    let (sender, chunks) = mpsc::channel(2);
    let read = move || {
        let mut stdin = std::io::stdin().lock();
        let mut chunk = vec![0; CHUNK];
        loop {
            match stdin.read(&mut chunk) {
                Ok(0) => return,
                Ok(got) => {
                    if sender.blocking_send(chunk[..got].to_vec()).is_err() {
                        return;
                    }
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    };
    // Without a thread the channel is closed, which is as no input.
    let _ = std::thread::Builder::new().name("stdin".to_owned()).spawn(read);
    chunks
}

/// Keys that leave a command when they are typed one after the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Sequence(Vec<u8>);

/// The longest sequence: it is held back while it may be one.
const LONGEST: usize = 16;

impl std::str::FromStr for Sequence {
    type Err = String;

    /// Keys with commas in between: a character, or `ctrl-` and a letter or one of `@[\]^_`. An empty text is no way out.
    fn from_str(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Ok(Self(Vec::new()));
        }
        let keys: Vec<u8> = text.split(',').map(key).collect::<Option<_>>().ok_or_else(|| {
            "keys have commas in between, each a character, or `ctrl-` and one of a-z @ [ \\ ] ^ _: `ctrl-p,ctrl-q`"
                .to_owned()
        })?;
        match keys.len() <= LONGEST {
            true => Ok(Self(keys)),
            false => Err(format!("no more than {LONGEST} keys")),
        }
    }
}

fn key(text: &str) -> Option<u8> {
    match text.as_bytes() {
        [plain @ b' '..=b'~'] => Some(*plain),
        [b'c', b't', b'r', b'l', b'-', letter] => match letter.to_ascii_uppercase() {
            control @ b'@'..=b'_' => Some(control - b'@'),
            _ => None,
        },
        _ => None,
    }
}

impl Sequence {
    /// What leaves where nobody said otherwise: Ctrl-P Ctrl-Q, and Ctrl-] with a full stop.
    pub fn usual() -> Vec<Self> {
        vec![Self(vec![0x10, 0x11]), Self(vec![0x1d, b'.'])]
    }
}

/// Finds the way out in what is typed. In raw mode no other key is ours.
#[derive(Debug)]
pub(super) struct Keys {
    sequences: Vec<Sequence>,
    /// What has been typed of one, and was not passed on yet.
    held: Vec<u8>,
}

/// What to pass on, and whether to leave after it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Typed {
    pub bytes: Vec<u8>,
    pub leaves: bool,
}

impl Keys {
    pub fn leaving_by(sequences: Vec<Sequence>) -> Self {
        let sequences = sequences.into_iter().filter(|sequence| !sequence.0.is_empty());
        Self {
            sequences: sequences.collect(),
            held: Vec::new(),
        }
    }

    pub fn typed(&mut self, chunk: &[u8]) -> Typed {
        let mut bytes = Vec::with_capacity(chunk.len() + self.held.len());
        for key in chunk {
            self.held.push(*key);
            if self.sequences.iter().any(|sequence| sequence.0 == self.held) {
                self.held.clear();
                return Typed { bytes, leaves: true };
            }
            while !self.held.is_empty() && !self.sequences.iter().any(|sequence| sequence.0.starts_with(&self.held)) {
                bytes.push(self.held.remove(0));
            }
        }
        Typed { bytes, leaves: false }
    }

    /// Nothing more is typed: what was held back is input like any other.
    pub fn end(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(sequences: &[&str], chunks: &[&[u8]]) -> (Vec<u8>, bool) {
        let sequences = match sequences {
            [] => Sequence::usual(),
            some => some.iter().map(|text| text.parse().unwrap()).collect(),
        };
        let mut keys = Keys::leaving_by(sequences);
        let mut bytes = Vec::new();
        for chunk in chunks {
            let typed = keys.typed(chunk);
            bytes.extend(typed.bytes);
            if typed.leaves {
                return (bytes, true);
            }
        }
        bytes.extend(keys.end());
        (bytes, false)
    }

    #[test]
    fn the_usual_keys_leave_and_nothing_else_does() {
        assert_eq!(all(&[], &[b"ls\r", b"\x03."]), (b"ls\r\x03.".to_vec(), false));
        assert_eq!(all(&[], &[b"a\x1d.b"]), (b"a".to_vec(), true));
        assert_eq!(all(&[], &[b"a\x1d", b"."]), (b"a".to_vec(), true));
        assert_eq!(all(&[], &[b"\x1d", b"x."]), (b"\x1dx.".to_vec(), false));
        assert_eq!(all(&[], &[b"\x1d\x1d\x1d."]), (b"\x1d\x1d".to_vec(), true));
        assert_eq!(all(&[], &[b"a\x10\x11b"]), (b"a".to_vec(), true));
        assert_eq!(all(&[], &[b"\x10", b"\x1d\x11"]), (b"\x10\x1d\x11".to_vec(), false));
        assert_eq!(
            all(&[], &[b"ls\x10"]),
            (b"ls\x10".to_vec(), false),
            "the end lets go of what was held"
        );
    }

    #[test]
    fn keys_are_named_as_docker_names_them() {
        assert_eq!(
            all(&["ctrl-x,d"], &[b"\x10\x11\x1d.\x18\x18d"]),
            (b"\x10\x11\x1d.\x18".to_vec(), true)
        );
        assert_eq!(all(&["a,a,b"], &[b"aaab"]), (b"a".to_vec(), true));
        assert_eq!(all(&[""], &[b"\x10\x11"]), (b"\x10\x11".to_vec(), false));
        let of = |text: &str| text.parse::<Sequence>().map(|sequence| sequence.0);
        assert_eq!(of("ctrl-@,ctrl-_,ctrl-\\,~"), Ok(vec![0, 0x1f, 0x1c, b'~']));
        for bad in ["ctrl-", "ctrl-p,", ",", "ctrl-1", "alt-x", "ä", "ab"] {
            assert!(of(bad).is_err(), "{bad}");
        }
        assert!(of(&["a"; 17].join(",")).is_err());
    }
}
