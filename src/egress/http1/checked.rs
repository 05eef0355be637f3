//! A client's stream as an HTTP library may see it: whole heads that passed the strict reader, bodies that end where they say.
//!
//! At a violation, and at a `CONNECT`, the library sees the end of the stream; what comes next is for the owner, who gets
//! the stream back. After a request that asks for an upgrade nothing is shown until the answer is known.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use futures::task::AtomicWaker;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::framing::{Framing, Piece};
use super::head::Violation;

const READ: usize = 16 << 10;

/// Why the library sees the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// The client closed, between two requests.
    End,
    /// The next request is a `CONNECT`.
    Tunnel,
    /// At a head: an answer can be given.
    BadHead(Violation),
    /// Within a body.
    BadBody(Violation),
}

/// Opens the stream again after a request for an upgrade was declined.
#[derive(Debug, Clone, Default)]
pub struct Gate(Arc<(AtomicBool, AtomicWaker)>);

impl Gate {
    /// The upgrade will not be: HTTP goes on.
    pub fn decline(&self) {
        self.0.0.store(false, Ordering::Release);
        self.0.1.wake();
    }

    fn close(&self) {
        self.0.0.store(true, Ordering::Release);
    }

    fn is_closed(&self, cx: &Context<'_>) -> bool {
        self.0.1.register(cx.waker());
        self.0.0.load(Ordering::Acquire)
    }
}

#[derive(Debug)]
pub struct Checked<S> {
    inner: S,
    framing: Framing,
    /// Read and not looked at, or not whole.
    held: Vec<u8>,
    /// How much of `held` may be shown.
    shown: usize,
    stop: Option<Stop>,
    gate: Gate,
}

impl<S> Checked<S> {
    /// `held` is what was read of the stream before.
    pub fn new(held: Vec<u8>, inner: S) -> Self {
        Self {
            inner,
            framing: Framing::Head,
            held,
            shown: 0,
            stop: None,
            gate: Gate::default(),
        }
    }

    pub fn gate(&self) -> Gate {
        self.gate.clone()
    }

    /// Why it ended, what was read and not shown, and the stream.
    pub fn into_parts(mut self) -> (Option<Stop>, Vec<u8>, S) {
        self.held.drain(..self.shown);
        (self.stop, self.held, self.inner)
    }

    /// Looks at what is held until something can be shown; true when more bytes are needed.
    fn look(&mut self) -> bool {
        let at_head = self.framing == Framing::Head;
        match self.framing.next(&self.held) {
            Ok(Piece::More) => return true,
            Ok(Piece::Part(length)) => self.shown = length,
            Ok(Piece::Head(head)) if head.method == "CONNECT" => self.stop = Some(Stop::Tunnel),
            Ok(Piece::Head(head)) => {
                self.framing.begin(&head);
                self.shown = head.length;
                if head.upgrades {
                    self.gate.close();
                }
            }
            Err(violation) if at_head => self.stop = Some(Stop::BadHead(violation)),
            Err(violation) => self.stop = Some(Stop::BadBody(violation)),
        }
        false
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Checked<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            if this.shown > 0 {
                let piece = this.shown.min(buf.remaining());
                buf.put_slice(&this.held[..piece]);
                this.held.drain(..piece);
                this.shown -= piece;
                return Poll::Ready(Ok(()));
            }
            if this.stop.is_some() {
                return Poll::Ready(Ok(()));
            }
            if this.gate.is_closed(cx) {
                return Poll::Pending;
            }
            // Content goes straight through.
            if this.held.is_empty() && this.framing.content() > 0 {
                let most = buf
                    .remaining()
                    .min(usize::try_from(this.framing.content()).unwrap_or(usize::MAX));
                let mut part = ReadBuf::new(buf.initialize_unfilled_to(most));
                ready!(Pin::new(&mut this.inner).poll_read(cx, &mut part))?;
                let taken = part.filled().len();
                buf.advance(taken);
                match taken {
                    0 => this.stop = Some(Stop::BadBody(Violation::Cut)),
                    taken => this.framing.skip(taken as u64),
                }
                return Poll::Ready(Ok(()));
            }
            if !this.look() {
                continue;
            }
            let before = this.held.len();
            this.held.resize(before + READ, 0);
            let mut part = ReadBuf::new(&mut this.held[before..]);
            let read = Pin::new(&mut this.inner).poll_read(cx, &mut part);
            let taken = part.filled().len();
            this.held.truncate(before + taken);
            if this.held.is_empty() {
                this.held = Vec::new();
            }
            ready!(read)?;
            if taken == 0 {
                this.stop = Some(match (this.framing, before) {
                    (Framing::Head, 0) => Stop::End,
                    (Framing::Head, _) => Stop::BadHead(Violation::Cut),
                    _ => Stop::BadBody(Violation::Cut),
                });
            }
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Checked<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;

    use super::*;

    async fn shown(text: &str) -> (String, Option<Stop>, String) {
        let mut checked = Checked::new(Vec::new(), io::Cursor::new(text.as_bytes().to_vec()));
        let mut out = String::new();
        checked.read_to_string(&mut out).await.unwrap();
        let (stop, held, _) = checked.into_parts();
        (out, stop, String::from_utf8(held).unwrap())
    }

    #[tokio::test]
    async fn a_library_sees_nothing_of_what_is_refused() {
        let good = "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc";
        assert_eq!(shown(good).await, (good.to_owned(), Some(Stop::End), String::new()));
        let tunnel = "CONNECT a:443 HTTP/1.1\r\n\r\n";
        let then = shown(&format!("{good}{tunnel}")).await;
        assert_eq!(then, (good.to_owned(), Some(Stop::Tunnel), tunnel.to_owned()));
        let bad = "GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n";
        let then = shown(&format!("{good}{bad}")).await;
        assert_eq!(
            then,
            (good.to_owned(), Some(Stop::BadHead(Violation::Host)), bad.to_owned())
        );
        let chunked = "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";
        let then = shown(&format!("{chunked}3\r\nabc\r\n3;x\r\n")).await;
        let sent = format!("{chunked}3\r\nabc\r\n");
        assert_eq!(
            then,
            (sent, Some(Stop::BadBody(Violation::ChunkSize)), "3;x\r\n".to_owned())
        );
        assert_eq!(
            shown(&good[..good.len() - 1]).await.1,
            Some(Stop::BadBody(Violation::Cut))
        );
        assert_eq!(
            shown(&good[..9]).await,
            (String::new(), Some(Stop::BadHead(Violation::Cut)), good[..9].to_owned())
        );
    }

    #[tokio::test]
    async fn after_an_upgrade_nothing_is_shown_until_it_is_declined() {
        let upgrade = "GET / HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\n\r\n";
        let next = "GET /2 HTTP/1.1\r\nHost: a\r\n\r\n";
        let mut checked = Checked::new(format!("{upgrade}{next}").into_bytes(), io::Cursor::new(Vec::new()));
        let mut first = vec![0; upgrade.len()];
        checked.read_exact(&mut first).await.unwrap();
        let mut rest = String::new();
        let gate = checked.gate();
        assert!(futures::poll!(std::pin::pin!(checked.read_to_string(&mut rest))).is_pending());
        gate.decline();
        checked.read_to_string(&mut rest).await.unwrap();
        assert_eq!(rest, next);
    }
}
