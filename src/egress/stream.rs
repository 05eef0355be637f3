//! Streams whose kind is no matter, and streams of which the beginning was already read.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Any two-way stream of bytes: a socket of a sandbox's namespace, a bridge, a TLS session.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin + 'static {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin + 'static> Stream for T {}

pub type BoxStream = Box<dyn Stream>;

/// A stream that first gives back what was read of it before.
pub struct Rewind<S> {
    before: Vec<u8>,
    at: usize,
    inner: S,
}

impl<S> Rewind<S> {
    pub fn new(before: Vec<u8>, inner: S) -> Self {
        Self { before, at: 0, inner }
    }

    /// What was not given back yet, and the stream.
    pub fn into_parts(mut self) -> (Vec<u8>, S) {
        (self.before.split_off(self.at), self.inner)
    }

    /// Puts `bytes` in front of everything.
    pub fn put_back(&mut self, bytes: &[u8]) {
        let rest = self.before.split_off(self.at);
        self.before = [bytes, &rest].concat();
        self.at = 0;
    }
}

impl<S> fmt::Debug for Rewind<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rewind")
            .field("before", &(self.before.len() - self.at))
            .finish()
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Rewind<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let left = &this.before[this.at..];
        if left.is_empty() {
            return Pin::new(&mut this.inner).poll_read(cx, buf);
        }
        let piece = &left[..left.len().min(buf.remaining())];
        buf.put_slice(piece);
        this.at += piece.len();
        if this.at == this.before.len() {
            (this.before, this.at) = (Vec::new(), 0);
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Rewind<S> {
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
