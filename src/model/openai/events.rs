//! Bytes → server-sent events, with bounds that the parser itself lacks.

use std::fmt::Display;

use eventsource_stream::{Event, EventStreamError, Eventsource};
use futures::{Stream, StreamExt};

/// The parser looks at an unfinished line anew for each read, which is quadratic in its length: it is given whole lines.
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
        // The line that has no end yet.
        let mut line = Vec::new();
        let mut total = 0;
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
            if total > max_bytes {
                yield Err(format!("it is longer than {max_bytes} bytes"));
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
            let rest = match read.iter().rposition(|byte| matches!(byte, b'\n' | b'\r')) {
                Some(end) => read.split_off(end + 1),
                None => std::mem::take(&mut read),
            };
            if line.len() + read.len().max(rest.len()) > MAX_LINE {
                yield Err(format!("a line of it is longer than {MAX_LINE} bytes"));
                return;
            }
            if !read.is_empty() {
                line.append(&mut read);
                yield Ok(std::mem::take(&mut line));
            }
            line.extend(rest);
        }
        line.extend(start.unwrap_or_default());
        yield Ok(line);
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
        let too_long = Err(format!("a line of it is longer than {MAX_LINE} bytes"));
        assert_eq!(run(&[&line], usize::MAX).await, std::slice::from_ref(&too_long));
        // Also in small reads, of which none is looked at twice.
        let reads: Vec<&[u8]> = line.chunks(64).collect();
        assert_eq!(run(&reads, usize::MAX).await, [too_long]);
        assert_eq!(
            run(&[b"data: \xFF\n\n"], 100).await,
            vec![Err("it is not UTF-8".to_owned())]
        );
    }
}
