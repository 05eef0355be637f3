//! Output as bytes: each byte of a stream once and in order, whatever comes again after a broken connection.

use std::io;

use bytes::Buf;
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;

use crate::api::proto;

/// Where output goes here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum To {
    Stdout,
    Stderr,
}

/// One piece for this process's own output.
pub(super) type Piece = (To, bytes::Bytes);

/// The streams of one command, and how far each has been taken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Places {
    pub stdout: u64,
    pub stderr: u64,
    pub pty: u64,
}

/// What is new in one piece of output.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Fresh {
    pub bytes: bytes::Bytes,
    /// Bytes before it that never came.
    pub lost: u64,
}

/// Takes a piece at a place: drops what was there before, tells what is missing, and moves the place.
pub(super) fn take(place: &mut u64, output: proto::ExecOutput) -> Fresh {
    let known = place.saturating_sub(output.offset);
    let lost = output.offset.saturating_sub(*place);
    let mut bytes = output.data;
    let known = usize::try_from(known).unwrap_or(usize::MAX).min(bytes.len());
    bytes.advance(known);
    *place = place.saturating_add(lost).saturating_add(bytes.len() as u64);
    Fresh { bytes, lost }
}

/// What went to standard output, for a line that may follow it.
#[derive(Debug, Default)]
pub(super) struct Written {
    pub is_mid_line: bool,
    /// Why not all of it went, unless nobody reads any more.
    pub failed: Option<io::Error>,
}

/// Writes pieces until the channel closes. Ends early when nobody reads, or nothing can be written: the channel is closed then.
pub(super) async fn write(mut pieces: mpsc::Receiver<Piece>) -> Written {
    let (mut stdout, mut stderr) = (tokio::io::stdout(), tokio::io::stderr());
    let mut written = Written::default();
    while let Some((to, bytes)) = pieces.recv().await {
        let went = match to {
            To::Stdout => {
                written.is_mid_line = !bytes.ends_with(b"\n");
                all(&mut stdout, &bytes).await
            }
            To::Stderr => all(&mut stderr, &bytes).await,
        };
        if let Err(error) = went {
            written.failed = (error.kind() != io::ErrorKind::BrokenPipe).then_some(error);
            break;
        }
    }
    written
}

async fn all(to: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> io::Result<()> {
    to.write_all(bytes).await?;
    to.flush().await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_byte_is_taken_once_and_a_gap_is_counted() {
        let mut place = 0;
        let mut piece = |offset: u64, data: &[u8]| {
            let data = data.to_vec().into();
            let Fresh { bytes, lost } = take(&mut place, proto::ExecOutput { offset, data });
            (String::from_utf8(bytes.to_vec()).unwrap(), lost, place)
        };
        assert_eq!(piece(0, b"abc"), ("abc".into(), 0, 3));
        // Again from an earlier place, as after a broken connection.
        assert_eq!(piece(1, b"bcde"), ("de".into(), 0, 5));
        assert_eq!(piece(0, b"abc"), (String::new(), 0, 5));
        assert_eq!(piece(5, b""), (String::new(), 0, 5));
        assert_eq!(piece(9, b"jk"), ("jk".into(), 4, 11));
        assert_eq!(piece(u64::MAX, b"x").2, u64::MAX);
    }
}
