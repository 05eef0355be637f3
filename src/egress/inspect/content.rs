//! Bodies on their way: counted, searched for placeholders going out, masked coming in, never gathered.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::HeaderMap;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Frame, Incoming, SizeHint};

use super::mask::masked;
use crate::egress::border::Inner;
use crate::egress::case::{Case, Tally};
use crate::egress::leak::Search;
use crate::egress::rules::builtin;
use crate::secret::{Redacting, Redactor};

pub(super) type BoxError = Box<dyn std::error::Error + Send + Sync>;
pub(super) type Content = UnsyncBoxBody<Bytes, BoxError>;

pub(super) fn full(text: impl Into<Bytes>) -> Content {
    Full::new(text.into()).map_err(|never| match never {}).boxed_unsync()
}

/// A request's body.
pub(super) struct Outgoing<B = Incoming> {
    pub body: B,
    pub search: Search,
    pub inner: Arc<Inner>,
    pub tally: Arc<Tally>,
}

impl<B> Outgoing<B> {
    fn leak(&self, name: &str) -> BoxError {
        let _ = self.tally.leaked.set(name.to_owned());
        let _ = self.tally.cut.set(builtin::PLACEHOLDER_LEAK);
        "a placeholder stands in the body".into()
    }
}

impl<B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin> Body for Outgoing<B> {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = &mut *self;
        let frame = match ready!(Pin::new(&mut this.body).poll_frame(cx)) {
            Some(Ok(frame)) => frame,
            Some(Err(error)) => return Poll::Ready(Some(Err(error.into()))),
            None => return Poll::Ready(None),
        };
        if let Some(data) = frame.data_ref() {
            this.tally.sent.fetch_add(data.len() as u64, Ordering::AcqRel);
            if let Some(name) = this.search.push(&this.inner.leaks, data) {
                return Poll::Ready(Some(Err(this.leak(name))));
            }
        }
        let trailers = frame.trailers_ref();
        if let Some(name) = trailers.and_then(|trailers| {
            trailers
                .values()
                .find_map(|value| this.inner.leaks.find(value.as_bytes()))
        }) {
            return Poll::Ready(Some(Err(this.leak(name))));
        }
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// An answer's body. It holds the case: when it is over, so is the case.
pub(super) struct Returning {
    body: Incoming,
    mask: Option<(Redactor, Redacting)>,
    trailers: Option<HeaderMap>,
    tally: Arc<Tally>,
    /// Of the connection that it comes by.
    link: Arc<Tally>,
    case: Option<Case>,
    started: bool,
}

impl Returning {
    pub fn new(body: Incoming, redactor: Option<Redactor>, tally: Arc<Tally>, link: Arc<Tally>, case: Case) -> Self {
        Self {
            body,
            mask: redactor.map(|redactor| (redactor.clone(), redactor.stream())),
            trailers: None,
            tally,
            link,
            case: Some(case),
            started: false,
        }
    }
}

impl Body for Returning {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = &mut *self;
        this.started = true;
        loop {
            if let Some(trailers) = this.trailers.take() {
                this.case = None;
                return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
            }
            if this.case.is_none() {
                return Poll::Ready(None);
            }
            let rest = |mask: &mut Option<(Redactor, Redacting)>| mask.take().map(|(_, stream)| stream.finish());
            match ready!(Pin::new(&mut this.body).poll_frame(cx)) {
                None => {
                    this.case = None;
                    match rest(&mut this.mask) {
                        Some(rest) if !rest.is_empty() => return Poll::Ready(Some(Ok(Frame::data(rest.into())))),
                        Some(_) | None => return Poll::Ready(None),
                    }
                }
                // What was held back is not given out: it may be the beginning of a secret.
                Some(Err(error)) => {
                    if let Some(rule) = this.link.cut.get() {
                        let _ = this.tally.cut.set(rule.clone());
                    }
                    if let Some(mut case) = this.case.take() {
                        case.fail(crate::error::chain(&error));
                    }
                    return Poll::Ready(Some(Err(error.into())));
                }
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => {
                        this.tally.received.fetch_add(data.len() as u64, Ordering::AcqRel);
                        let data = match &mut this.mask {
                            Some((_, stream)) => Bytes::from(stream.push(&data)),
                            None => data,
                        };
                        if !data.is_empty() {
                            return Poll::Ready(Some(Ok(Frame::data(data))));
                        }
                    }
                    Err(frame) => {
                        let Ok(mut trailers) = frame.into_trailers() else {
                            continue;
                        };
                        if let Some((redactor, _)) = &this.mask {
                            for value in trailers.values_mut() {
                                *value = masked(redactor, value);
                            }
                        }
                        this.trailers = Some(trailers);
                        if let Some(rest) = rest(&mut this.mask)
                            && !rest.is_empty()
                        {
                            return Poll::Ready(Some(Ok(Frame::data(rest.into()))));
                        }
                    }
                },
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.case.is_none() && self.trailers.is_none() || (!self.started && self.body.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        if self.started {
            SizeHint::default()
        } else {
            self.body.size_hint()
        }
    }
}
