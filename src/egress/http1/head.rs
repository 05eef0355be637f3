//! The head of an HTTP/1 request, read more strictly than any server reads it: what could be taken in two ways is refused
//! before a library sees it.

/// Longer heads, and more headers, are refused.
pub(crate) const MAX_HEAD: usize = 48 << 10;
const MAX_HEADERS: usize = 100;

/// What is needed of a head to know where the next one begins, and where it wants to go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    pub method: String,
    pub target: String,
    pub version: Version,
    pub host: Option<Vec<u8>>,
    pub body: Body,
    /// Asks to speak something else from here on.
    pub upgrades: bool,
    /// In bytes, with its empty line.
    pub length: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    Http10,
    Http11,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Body {
    None,
    Length(u64),
    Chunked,
}

/// What a strict reader does not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    #[error("a line does not end in CR LF")]
    LineEnd,
    #[error("a control byte stands where text belongs")]
    Control,
    #[error("the first line is no HTTP/1 request")]
    RequestLine,
    #[error("the first bytes are TLS where HTTP was expected")]
    Tls,
    #[error("a header has no name, or a space before its colon")]
    HeaderName,
    #[error("a header is folded over two lines")]
    Folded,
    #[error("the head has more than {MAX_HEAD} bytes or {MAX_HEADERS} headers")]
    TooLong,
    #[error("the length of the body is given twice")]
    TwoLengths,
    #[error("the length of the body is no number")]
    Length,
    #[error("the transfer encoding is another than `chunked`")]
    Encoding,
    #[error("there is no `Host`, or more than one")]
    Host,
    #[error("a tunnel cannot begin with a body")]
    TunnelBody,
    #[error("a chunk has a size that is no plain number")]
    ChunkSize,
    #[error("a trailer may not be sent")]
    Trailer,
    #[error("the request breaks off")]
    Cut,
}

/// Reads a head from the beginning of `bytes`; nothing when more is needed.
///
/// # Errors
/// More bytes would not make it better.
pub fn parse(bytes: &[u8]) -> Result<Option<Head>, Violation> {
    if bytes.first() == Some(&0x16) {
        return Err(Violation::Tls);
    }
    let mut lines = Lines { bytes, at: 0 };
    let Some(first) = lines.next()? else {
        return Ok(None);
    };
    let (method, target, version) = request_line(first)?;
    let mut fields = Fields::default();
    loop {
        match lines.next()? {
            None => return Ok(None),
            Some([]) => break,
            Some(line) => fields.take(line)?,
        }
    }
    let is_tunnel = method == "CONNECT";
    let body = match (fields.length, fields.chunked) {
        (Some(_), true) => return Err(Violation::TwoLengths),
        (None, true) if version == Version::Http10 => return Err(Violation::Encoding),
        (None, true) => Body::Chunked,
        (Some(length), false) => Body::Length(length),
        (None, false) => Body::None,
    };
    if is_tunnel && !matches!(body, Body::None | Body::Length(0)) {
        return Err(Violation::TunnelBody);
    }
    // Older clients open tunnels without it, and HTTP/1.0 has none of it.
    if fields.host.is_none() && version == Version::Http11 && !is_tunnel {
        return Err(Violation::Host);
    }
    Ok(Some(Head {
        method,
        target,
        version,
        host: fields.host,
        body,
        upgrades: fields.upgrades,
        length: lines.at,
    }))
}

/// Lines that end in CR LF, without it.
struct Lines<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Lines<'a> {
    fn next(&mut self) -> Result<Option<&'a [u8]>, Violation> {
        let rest = &self.bytes[self.at..];
        let end = rest.iter().position(|b| matches!(b, b'\r' | b'\n'));
        let seen = self.at + end.unwrap_or(rest.len());
        if seen > MAX_HEAD {
            return Err(Violation::TooLong);
        }
        let Some(end) = end else {
            return Ok(None);
        };
        match &rest[end..] {
            [b'\r', b'\n', ..] => {
                self.at += end + 2;
                Ok(Some(&rest[..end]))
            }
            [b'\r'] => Ok(None),
            _ => Err(Violation::LineEnd),
        }
    }
}

fn request_line(line: &[u8]) -> Result<(String, String, Version), Violation> {
    let mut parts = line.split(|b| *b == b' ');
    let (Some(method), Some(target), Some(version), None) = (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return Err(Violation::RequestLine);
    };
    let version = match version {
        b"HTTP/1.1" => Version::Http11,
        b"HTTP/1.0" => Version::Http10,
        _ => return Err(Violation::RequestLine),
    };
    let is_target = |b: &u8| b.is_ascii_graphic() && !matches!(b, b'#' | b'"' | b'<' | b'>');
    if method.is_empty() || !method.iter().all(|b| is_token(*b)) || target.is_empty() || !target.iter().all(is_target) {
        return Err(Violation::RequestLine);
    }
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok((text(method), text(target), version))
}

/// RFC 9110, 5.6.2.
fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// The fields that say where a message ends and where it goes.
#[derive(Default)]
struct Fields {
    count: usize,
    host: Option<Vec<u8>>,
    length: Option<u64>,
    chunked: bool,
    upgrades: bool,
}

/// Splits a field line.
///
/// # Errors
/// It is folded, or has no proper name, or control bytes.
pub(super) fn field(line: &[u8]) -> Result<(String, &[u8]), Violation> {
    if matches!(line.first(), Some(b' ' | b'\t')) {
        return Err(Violation::Folded);
    }
    let colon = line.iter().position(|b| *b == b':').ok_or(Violation::HeaderName)?;
    let (name, value) = (&line[..colon], &line[colon + 1..]);
    if name.is_empty() || !name.iter().all(|b| is_token(*b)) {
        return Err(Violation::HeaderName);
    }
    if value.iter().any(|b| (*b < 0x20 && *b != b'\t') || *b == 0x7f) {
        return Err(Violation::Control);
    }
    Ok((String::from_utf8_lossy(name).to_ascii_lowercase(), value.trim_ascii()))
}

impl Fields {
    fn take(&mut self, line: &[u8]) -> Result<(), Violation> {
        let (name, value) = field(line)?;
        self.count += 1;
        if self.count > MAX_HEADERS {
            return Err(Violation::TooLong);
        }
        match name.as_str() {
            "host" if self.host.is_some() => return Err(Violation::Host),
            "host" => self.host = Some(value.to_vec()),
            "content-length" if self.length.is_some() => return Err(Violation::TwoLengths),
            "content-length" => self.length = Some(length(value).ok_or(Violation::Length)?),
            "transfer-encoding" if self.chunked => return Err(Violation::TwoLengths),
            "transfer-encoding" if !value.eq_ignore_ascii_case(b"chunked") => return Err(Violation::Encoding),
            "transfer-encoding" => self.chunked = true,
            "upgrade" => self.upgrades = true,
            _ => {}
        }
        Ok(())
    }
}

fn length(digits: &[u8]) -> Option<u64> {
    let plain = (1..=18).contains(&digits.len()) && digits.iter().all(u8::is_ascii_digit);
    let text = std::str::from_utf8(digits).ok()?;
    if plain { text.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn refusal(text: &str) -> Option<Violation> {
        parse(text.as_bytes()).err()
    }

    #[test]
    fn a_head_is_read_whole() {
        let text =
            "POST http://a.example/x?y HTTP/1.1\r\nHost:  a.example \r\nContent-Length: 5\r\nX: \u{e9}\r\n\r\nhello";
        let head = Head {
            method: "POST".to_owned(),
            target: "http://a.example/x?y".to_owned(),
            version: Version::Http11,
            host: Some(b"a.example".to_vec()),
            body: Body::Length(5),
            upgrades: false,
            length: text.len() - 5,
        };
        assert_eq!(parse(text.as_bytes()), Ok(Some(head)));
        for cut in 0..text.len() - 5 {
            assert_eq!(parse(&text.as_bytes()[..cut]), Ok(None), "{cut}");
        }
        let tunnel = parse(b"CONNECT a.example:443 HTTP/1.0\r\n\r\n").unwrap().unwrap();
        assert_eq!((tunnel.host, tunnel.body), (None, Body::None));
    }

    /// Request smuggling: each of these reads as one request for some and as two for others.
    #[test]
    fn what_reads_in_two_ways_is_refused() {
        let with = |lines: &str| format!("POST / HTTP/1.1\r\nHost: a\r\n{lines}\r\n\r\n");
        for (lines, violation) in [
            ("Content-Length: 5\r\nTransfer-Encoding: chunked", Violation::TwoLengths),
            ("Transfer-Encoding: chunked\r\nContent-Length: 5", Violation::TwoLengths),
            ("Content-Length: 5\r\nContent-Length: 5", Violation::TwoLengths),
            ("Content-Length: 5, 5", Violation::Length),
            ("Content-Length: +5", Violation::Length),
            ("Content-Length: 0x5", Violation::Length),
            ("Content-Length:", Violation::Length),
            ("Content-Length: 99999999999999999999", Violation::Length),
            (
                "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
                Violation::TwoLengths,
            ),
            ("Transfer-Encoding: gzip, chunked", Violation::Encoding),
            ("Transfer-Encoding: xchunked", Violation::Encoding),
            ("Transfer-Encoding : chunked", Violation::HeaderName),
            (" Transfer-Encoding: chunked", Violation::Folded),
            ("X: a\r\n\tb", Violation::Folded),
            ("X: a\nY: b", Violation::LineEnd),
            ("X: a\rY: b", Violation::LineEnd),
            ("X: a\0b", Violation::Control),
            ("X\0: a", Violation::HeaderName),
            (": a", Violation::HeaderName),
            ("nothing", Violation::HeaderName),
            ("Host: a", Violation::Host),
            ("Host: b", Violation::Host),
        ] {
            assert_eq!(refusal(&with(lines)), Some(violation), "{lines:?}");
        }
        for (text, violation) in [
            ("GET / HTTP/1.1\r\n\r\n", Violation::Host),
            ("GET  / HTTP/1.1\r\nHost: a\r\n\r\n", Violation::RequestLine),
            ("GET / HTTP/1.1 \r\nHost: a\r\n\r\n", Violation::RequestLine),
            ("GET / HTTP/2.0\r\nHost: a\r\n\r\n", Violation::RequestLine),
            ("GET /\r\n\r\n", Violation::RequestLine),
            ("GET\t/ HTTP/1.1\r\n", Violation::RequestLine),
            ("\r\nGET / HTTP/1.1\r\n", Violation::RequestLine),
            ("GET / HTTP/1.1\nHost: a\n\n", Violation::LineEnd),
            ("GET /\u{e9} HTTP/1.1\r\n", Violation::RequestLine),
            ("GET /#x HTTP/1.1\r\n", Violation::RequestLine),
            (
                "POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n",
                Violation::Encoding,
            ),
            (
                "CONNECT a:443 HTTP/1.1\r\nContent-Length: 5\r\n\r\n",
                Violation::TunnelBody,
            ),
            (
                "CONNECT a:443 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
                Violation::TunnelBody,
            ),
            ("\u{16}\u{3}\u{1}", Violation::Tls),
        ] {
            assert_eq!(refusal(text), Some(violation), "{text:?}");
        }
        assert_eq!(
            refusal(&format!("GET /{} HTTP/1.1\r\n", "a".repeat(MAX_HEAD))),
            Some(Violation::TooLong)
        );
        assert_eq!(
            refusal(&with(&vec!["X: y"; MAX_HEADERS].join("\r\n"))),
            Some(Violation::TooLong)
        );
    }

    fn line() -> impl Strategy<Value = String> {
        prop_oneof![
            "(GET|POST|CONNECT) (/|\\*|http://a/|a:1) HTTP/1\\.[01]\r\n",
            "(Host|Content-Length|Transfer-Encoding|X|Connection|Upgrade): ?(a|5|chunked|upgrade|\t)\r\n",
            "[ -~\r\n\t]{0,12}",
            Just("\r\n".to_owned()),
        ]
    }

    proptest! {
        #[test]
        fn noise_never_breaks_it(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&bytes);
        }

        /// What passes here, the library behind reads in the same way.
        #[test]
        fn it_agrees_with_httparse(lines in proptest::collection::vec(line(), 1..6)) {
            let text = lines.concat() + "\r\n";
            if let Ok(Some(head)) = parse(text.as_bytes()) {
                let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
                let mut request = httparse::Request::new(&mut headers);
                prop_assert_eq!(request.parse(text.as_bytes()), Ok(httparse::Status::Complete(head.length)));
                prop_assert_eq!(request.method, Some(head.method.as_str()));
                prop_assert_eq!(request.path, Some(head.target.as_str()));
                let values = |name: &str| -> Vec<Vec<u8>> {
                    let all = request.headers.iter().filter(|header| header.name.eq_ignore_ascii_case(name));
                    all.map(|header| header.value.to_vec()).collect()
                };
                prop_assert_eq!(values("host"), Vec::from_iter(head.host));
                let chunked = head.body == Body::Chunked;
                prop_assert_eq!(values("transfer-encoding").len(), usize::from(chunked));
                let has_length = matches!(head.body, Body::Length(_));
                prop_assert_eq!(values("content-length").len(), usize::from(has_length));
            }
        }
    }
}
