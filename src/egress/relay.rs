//! Bytes both ways until both sides are done. Buffers begin small, grow while the stream fills them, and are given back
//! when it rests, so that a thousand quiet tunnels cost next to nothing and a busy one is fast.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;

use super::stream::Stream;

const SMALL: usize = 4 << 10;
const LARGE: usize = 256 << 10;

/// One direction.
#[derive(Default)]
struct Half {
    buffer: Vec<u8>,
    from: usize,
    until: usize,
    grow: bool,
    unflushed: bool,
    ended: bool,
    moved: bool,
}

/// Copies both ways. A side that ends is passed on as an end to the other.
///
/// # Errors
/// A side broke, or nothing moved for `idle`.
pub(super) async fn relay(mut client: impl Stream, mut outside: impl Stream, idle: Duration) -> io::Result<()> {
    let (mut up, mut down) = (Half::default(), Half::default());
    let (mut up_done, mut down_done) = (false, false);
    // Looked at four times, so that it needs no timer of its own for each read.
    let mut quiet = 0;
    let mut look = Instant::now() + idle / 4;
    loop {
        let both = poll_fn(|cx| {
            if !up_done {
                up_done = up.poll(cx, &mut client, &mut outside)?.is_ready();
            }
            if !down_done {
                down_done = down.poll(cx, &mut outside, &mut client)?.is_ready();
            }
            if up_done && down_done {
                Poll::Ready(Ok::<_, io::Error>(()))
            } else {
                Poll::Pending
            }
        });
        tokio::select! {
            done = both => return done,
            () = tokio::time::sleep_until(look) => {}
        }
        look = Instant::now() + idle / 4;
        let moved = std::mem::take(&mut up.moved) | std::mem::take(&mut down.moved);
        quiet = if moved { 0 } else { quiet + 1 };
        if quiet >= 4 {
            return Err(io::ErrorKind::TimedOut.into());
        }
        up.rest();
        down.rest();
    }
}

impl Half {
    fn poll<R, W>(&mut self, cx: &mut Context<'_>, reader: &mut R, writer: &mut W) -> Poll<io::Result<()>>
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
    {
        loop {
            while self.from < self.until {
                let written = ready!(Pin::new(&mut *writer).poll_write(cx, &self.buffer[self.from..self.until]))?;
                if written == 0 {
                    return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
                }
                self.from += written;
                self.moved = true;
                self.unflushed = true;
            }
            if self.ended {
                return Pin::new(&mut *writer).poll_shutdown(cx);
            }
            if self.buffer.is_empty() || self.grow {
                self.buffer = vec![0; (self.buffer.len() * 4).clamp(SMALL, LARGE)];
                self.grow = false;
            }
            let mut part = ReadBuf::new(&mut self.buffer);
            match Pin::new(&mut *reader).poll_read(cx, &mut part) {
                Poll::Ready(read) => {
                    (self.from, self.until) = (0, part.filled().len());
                    read?;
                    self.ended = self.until == 0;
                    self.grow = self.until == self.buffer.len() && self.buffer.len() < LARGE;
                }
                Poll::Pending => {
                    (self.from, self.until) = (0, 0);
                    if self.unflushed {
                        ready!(Pin::new(&mut *writer).poll_flush(cx))?;
                        self.unflushed = false;
                    }
                    return Poll::Pending;
                }
            }
        }
    }

    fn rest(&mut self) {
        if !self.moved && self.from == self.until {
            self.buffer = Vec::new();
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn ends_are_passed_on_and_quiet_ones_are_closed() {
        let (mut client, inside) = tokio::io::duplex(1 << 16);
        let (mut server, outside) = tokio::io::duplex(1 << 16);
        let relayed = relay(inside, outside, Duration::from_secs(60));
        let talk = async {
            let question = vec![7; 3 << 20];
            let mut got = Vec::new();
            tokio::join!(
                async {
                    client.write_all(&question).await.unwrap();
                    client.shutdown().await.unwrap();
                },
                server.read_to_end(&mut got)
            )
            .1
            .unwrap();
            assert!(got == question);
            server.write_all(b"answer").await.unwrap();
            drop(server);
            let mut answer = String::new();
            client.read_to_string(&mut answer).await.unwrap();
            answer
        };
        let (relayed, answer) = tokio::join!(relayed, talk);
        assert_eq!((relayed.is_ok(), answer.as_str()), (true, "answer"));

        let (_client, inside) = tokio::io::duplex(64);
        let (_server, outside) = tokio::io::duplex(64);
        let started = Instant::now();
        let error = relay(inside, outside, Duration::from_secs(60)).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(started.elapsed(), Duration::from_secs(60));
    }
}
