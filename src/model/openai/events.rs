//! Bytes → server-sent events, with bounds that the parser itself lacks.

use std::fmt::Display;

use eventsource_stream::{Event, EventStreamError, Eventsource};
use futures::{Stream, StreamExt};

/// The parser keeps an unfinished line in memory and looks at all of it again for each read.
const MAX_LINE: usize = 4 << 20;

/// Cuts `bytes` into events; an error is the reason why the stream is broken, and the last item.
///
/// An event that the end of the stream cuts off before its blank line still counts: some servers end like that. A byte
/// order mark is dropped here, because the parser panics on one.
pub(super) fn events<B, E>(
    bytes: impl Stream<Item = Result<B, E>>,
    max_bytes: usize,
) -> impl Stream<Item = Result<Event, String>>
where
    B: AsRef<[u8]>,
    E: std::error::Error,
{
    let bounded = async_stream::stream! {
        let mut bytes = std::pin::pin!(bytes);
        let mut start = Some(Vec::new());
        let (mut total, mut line) = (0, 0);
        while let Some(read) = bytes.next().await {
            let read = match read {
                Ok(read) => read,
                Err(error) => {
                    yield Err(crate::error::chain(&error));
                    return;
                }
            };
            let mut read = read.as_ref().to_vec();
            total += read.len();
            line = match read.iter().rposition(|byte| matches!(byte, b'\n' | b'\r')) {
                Some(end) => read.len() - end,
                None => line + read.len(),
            };
            if total > max_bytes || line > MAX_LINE {
                yield Err(format!("it is longer than {max_bytes} bytes, or a line of it than {MAX_LINE}"));
                return;
            }
            if let Some(mut first) = start.take() {
                first.append(&mut read);
                if first.len() < BOM.len() && BOM.starts_with(&first) {
                    start = Some(first);
                    continue;
                }
                read = first.strip_prefix(BOM).map(<[u8]>::to_vec).unwrap_or(first);
            }
            yield Ok(read);
        }
        yield Ok(start.unwrap_or_default());
        yield Ok(b"\n\n".to_vec());
    };
    bounded.eventsource().map(|event| event.map_err(reason))
}

const BOM: &[u8] = b"\xEF\xBB\xBF";

fn reason(error: EventStreamError<impl Display>) -> String {
    match error {
        EventStreamError::Utf8(_) => "it is not UTF-8".to_owned(),
        EventStreamError::Parser(_) => "it is no stream of server-sent events".to_owned(),
        EventStreamError::Transport(error) => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn run(chunks: &[&[u8]], max_bytes: usize) -> Vec<Result<String, String>> {
        let chunks: Vec<_> = chunks
            .iter()
            .map(|chunk| Ok::<_, std::io::Error>(chunk.to_vec()))
            .collect();
        let events = events(futures::stream::iter(chunks), max_bytes);
        events.map(|event| event.map(|event| event.data)).collect().await
    }

    fn ok(texts: &[&str]) -> Vec<Result<String, String>> {
        texts.iter().map(|text| Ok((*text).to_owned())).collect()
    }

    #[tokio::test]
    async fn byte_order_marks_comments_and_missing_blank_lines_are_borne() {
        assert_eq!(
            run(&[b"\xEF\xBB", b"\xBFdata: a\r", b"\n\r\n: hello\n\ndata:b\n"], 100).await,
            ok(&["a", "b"])
        );
        assert_eq!(run(&[b"\xEF\xBB\xBFdata: a"], 100).await, ok(&["a"]));
        assert_eq!(run(&[b"data: \xC3", b"\xA9\n\n"], 100).await, ok(&["é"]));
        assert_eq!(run(&[], 100).await, ok(&[]));
    }

    #[tokio::test]
    async fn a_stream_too_long_or_not_text_is_broken() {
        let long = run(&[b"data: a\n\n", b"data: b\n\n"], 10).await;
        assert_eq!(long[0], Ok("a".to_owned()));
        assert!(
            long[1].as_ref().unwrap_err().contains("longer than 10 bytes"),
            "{long:?}"
        );
        let line = vec![b'x'; MAX_LINE + 1];
        assert!(run(&[&line], usize::MAX).await[0].is_err());
        assert_eq!(
            run(&[b"data: \xFF\n\n"], 100).await,
            vec![Err("it is not UTF-8".to_owned())]
        );
    }
}
