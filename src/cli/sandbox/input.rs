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

/// Finds the way out in what is typed: Ctrl-] and then a full stop. In raw mode no other key is ours.
#[derive(Debug, Default)]
pub(super) struct Keys {
    /// Ctrl-] has been typed, and not passed on yet.
    held: bool,
}

/// What to pass on, and whether to leave after it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Typed {
    pub bytes: Vec<u8>,
    pub leaves: bool,
}

impl Keys {
    const ESCAPE: u8 = 0x1d;

    pub fn typed(&mut self, chunk: &[u8]) -> Typed {
        let mut bytes = Vec::with_capacity(chunk.len() + 1);
        for key in chunk {
            if std::mem::take(&mut self.held) {
                if *key == b'.' {
                    return Typed { bytes, leaves: true };
                }
                bytes.push(Self::ESCAPE);
            }
            match *key {
                Self::ESCAPE => self.held = true,
                key => bytes.push(key),
            }
        }
        Typed { bytes, leaves: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ctrl_bracket_and_a_full_stop_leave_and_nothing_else_does() {
        let all = |chunks: &[&[u8]]| {
            let mut keys = Keys::default();
            let mut bytes = Vec::new();
            for chunk in chunks {
                let typed = keys.typed(chunk);
                bytes.extend(typed.bytes);
                if typed.leaves {
                    return (bytes, true);
                }
            }
            (bytes, false)
        };
        assert_eq!(all(&[b"ls\r", b"\x03."]), (b"ls\r\x03.".to_vec(), false));
        assert_eq!(all(&[b"a\x1d.b"]), (b"a".to_vec(), true));
        assert_eq!(all(&[b"a\x1d", b"."]), (b"a".to_vec(), true));
        assert_eq!(all(&[b"\x1d", b"x."]), (b"\x1dx.".to_vec(), false));
        assert_eq!(all(&[b"\x1d\x1d\x1d."]), (b"\x1d\x1d".to_vec(), true));
    }
}
