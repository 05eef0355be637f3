//! The first words of a TLS client, read without answering: which name it asks for, and whether it hides one.
//!
//! Bounded, allocation only for what is kept. Its reading of the name agrees with rustls (a property test below), so what was
//! judged is what a server sees.

use super::name::{BadHost, HostName};

/// A hello that needs more bytes than this is refused.
pub(super) const MAX_HELLO: usize = 64 << 10;

const HANDSHAKE: u8 = 22;
const CLIENT_HELLO: u8 = 1;
const SERVER_NAME: u16 = 0;
const ALPN: u16 = 16;
/// Encrypted Client Hello (RFC 9849), also where it is only pretended.
const ENCRYPTED_CLIENT_HELLO: u16 = 0xfe0d;
/// Its forerunner, encrypted SNI.
const ENCRYPTED_SERVER_NAME: u16 = 0xffce;

/// What a client said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    pub name: Option<HostName>,
    pub alpn: Vec<Vec<u8>>,
}

/// Why it is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadHello {
    #[error("the first bytes are no TLS")]
    NotTls,
    #[error("the TLS hello is broken")]
    Broken,
    #[error("the TLS hello has more than {MAX_HELLO} bytes")]
    TooLong,
    #[error("the TLS hello asks for more or less than one name")]
    Names,
    #[error("the name in the TLS hello cannot be used")]
    Name(#[source] BadHost),
    #[error("the TLS hello hides a name (ECH)")]
    Encrypted,
}

/// Reads what has come so far; nothing when more is needed.
///
/// # Errors
/// More bytes would not make it better.
pub fn parse(bytes: &[u8]) -> Result<Option<Hello>, BadHello> {
    let mut message = Vec::new();
    let mut rest = bytes;
    loop {
        match rest {
            [] => return more(bytes),
            [kind, ..] if *kind != HANDSHAKE => return Err(BadHello::NotTls),
            [_, major, ..] if *major != 3 => return Err(BadHello::NotTls),
            [_, _, minor, ..] if *minor > 4 => return Err(BadHello::NotTls),
            [_, _, _, high, low, after @ ..] => {
                let length = usize::from(u16::from_be_bytes([*high, *low]));
                if length == 0 || length > 1 << 14 {
                    return Err(BadHello::Broken);
                }
                message.extend_from_slice(&after[..length.min(after.len())]);
                rest = after.get(length..).unwrap_or_default();
            }
            [..] => return more(bytes),
        }
        match message[..] {
            [] => {}
            [kind, ..] if kind != CLIENT_HELLO => return Err(BadHello::Broken),
            [_, a, b, c, ..] => {
                let length = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
                if length > MAX_HELLO {
                    return Err(BadHello::TooLong);
                }
                if let Some(body) = message.get(4..4 + length) {
                    return read(&mut Reader(body)).map(Some);
                }
            }
            [..] => {}
        }
    }
}

fn more(bytes: &[u8]) -> Result<Option<Hello>, BadHello> {
    if bytes.len() > MAX_HELLO {
        Err(BadHello::TooLong)
    } else {
        Ok(None)
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], BadHello> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or(BadHello::Broken)?;
        self.0 = rest;
        Ok(taken)
    }

    fn number(&mut self, width: usize) -> Result<usize, BadHello> {
        Ok(self
            .take(width)?
            .iter()
            .fold(0, |sum, byte| sum << 8 | usize::from(*byte)))
    }

    /// A vector with its length in front.
    fn vector(&mut self, width: usize) -> Result<Reader<'a>, BadHello> {
        let length = self.number(width)?;
        self.take(length).map(Reader)
    }
}

/// The body of a ClientHello (RFC 8446, 4.1.2).
fn read(body: &mut Reader<'_>) -> Result<Hello, BadHello> {
    body.take(2 + 32)?;
    let session = body.vector(1)?;
    let ciphers = body.vector(2)?;
    let compressions = body.vector(1)?;
    if session.0.len() > 32 || ciphers.0.is_empty() || ciphers.0.len() % 2 != 0 || compressions.0.is_empty() {
        return Err(BadHello::Broken);
    }
    let mut hello = Hello {
        name: None,
        alpn: Vec::new(),
    };
    if body.0.is_empty() {
        return Ok(hello);
    }
    let mut extensions = body.vector(2)?;
    if !body.0.is_empty() {
        return Err(BadHello::Broken);
    }
    let mut seen = Vec::new();
    while !extensions.0.is_empty() {
        let kind = extensions.number(2)? as u16;
        let mut content = extensions.vector(2)?;
        if seen.contains(&kind) {
            return Err(BadHello::Broken);
        }
        seen.push(kind);
        match kind {
            SERVER_NAME => hello.name = Some(name(&mut content)?),
            ALPN => {
                let mut list = content.vector(2)?;
                while !list.0.is_empty() {
                    hello.alpn.push(list.vector(1)?.0.to_vec());
                }
            }
            ENCRYPTED_CLIENT_HELLO | ENCRYPTED_SERVER_NAME => return Err(BadHello::Encrypted),
            _ => {}
        }
    }
    Ok(hello)
}

/// One name, of the only kind that there is (RFC 6066, 3).
fn name(content: &mut Reader<'_>) -> Result<HostName, BadHello> {
    let mut list = content.vector(2)?;
    let kind = list.number(1)?;
    let name = list.vector(2)?;
    if kind != 0 || !list.0.is_empty() || !content.0.is_empty() {
        return Err(BadHello::Names);
    }
    HostName::parse(name.0).map_err(BadHello::Name)
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;

    /// What rustls says first.
    pub fn hello_of(name: &str, alpn: &[&str]) -> Vec<u8> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(rustls::RootCertStore::empty())
            .with_no_client_auth();
        config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
        let name = rustls::pki_types::ServerName::try_from(name.to_owned()).unwrap();
        let mut connection = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
        let mut bytes = Vec::new();
        connection.write_tls(&mut bytes).unwrap();
        bytes
    }

    /// The same handshake in records of `size` bytes.
    fn in_records_of(hello: &[u8], size: usize) -> Vec<u8> {
        let pieces = hello[5..].chunks(size);
        pieces
            .flat_map(|piece| [&[22, 3, 1, 0, piece.len() as u8][..], piece].concat())
            .collect()
    }

    /// The hello with one more extension, or with its name list changed.
    pub fn with_extension(hello: &[u8], kind: u16, content: &[u8]) -> Vec<u8> {
        let mut body = hello[9..].to_vec();
        let session = usize::from(body[34]);
        let ciphers = 35 + session;
        let cipher_bytes = usize::from(u16::from_be_bytes([body[ciphers], body[ciphers + 1]]));
        let at = ciphers + 2 + cipher_bytes + 2;
        let mut extension = kind.to_be_bytes().to_vec();
        extension.extend((content.len() as u16).to_be_bytes());
        extension.extend(content);
        let length = u16::from_be_bytes([body[at], body[at + 1]]) + extension.len() as u16;
        body[at..at + 2].copy_from_slice(&length.to_be_bytes());
        body.splice(at + 2..at + 2, extension);
        let mut message = vec![CLIENT_HELLO, 0];
        message.extend((body.len() as u16).to_be_bytes());
        message.extend(body);
        let mut record = vec![22, 3, 1];
        record.extend((message.len() as u16).to_be_bytes());
        [record, message].concat()
    }

    fn seen(bytes: &[u8]) -> Option<(Option<String>, Vec<Vec<u8>>)> {
        let hello = parse(bytes).unwrap()?;
        Some((hello.name.map(|name| name.to_string()), hello.alpn))
    }

    #[test]
    fn the_name_is_found_however_it_is_cut() {
        let hello = hello_of("api.example.com", &["h2", "http/1.1"]);
        let expected = Some((
            Some("api.example.com".to_owned()),
            vec![b"h2".to_vec(), b"http/1.1".to_vec()],
        ));
        assert_eq!(seen(&hello), expected);
        for size in [1, 7, 100, 255] {
            assert_eq!(seen(&in_records_of(&hello, size)), expected, "{size}");
        }
        for cut in 0..hello.len() {
            assert_eq!(parse(&hello[..cut]), Ok(None), "{cut}");
        }
        assert_eq!(
            seen(&hello_of("10.0.0.1", &[])),
            Some((None, vec![])),
            "an address is no server name"
        );
    }

    /// T20: hidden names, several names, and no TLS at all.
    #[test]
    fn what_hides_or_doubles_the_name_is_refused() {
        let hello = hello_of("api.example.com", &[]);
        let plain = hello_of("10.0.0.1", &[]);
        assert_eq!(
            parse(&with_extension(&hello, 0xfe0d, &[0; 40])),
            Err(BadHello::Encrypted)
        );
        assert_eq!(
            parse(&with_extension(&hello, 0xffce, &[0; 40])),
            Err(BadHello::Encrypted)
        );
        assert_eq!(
            parse(&with_extension(&hello, 0, b"\0\x04\0\0\x01a")),
            Err(BadHello::Broken),
            "twice"
        );
        assert_eq!(
            parse(&with_extension(&plain, 0, b"\0\x08\0\0\x01a\0\0\x01b")),
            Err(BadHello::Names)
        );
        assert_eq!(
            parse(&with_extension(&plain, 0, b"\0\x06\0\0\x03a\0b")),
            Err(BadHello::Name(BadHost::Byte(0)))
        );
        for other in [
            &b"GET / HTTP/1.1\r\n"[..],
            b"SSH-2.0-x",
            b"\x15\x03\x01\0\x02",
            b"\x16\x02\0",
            &[0],
        ] {
            assert_eq!(parse(other), Err(BadHello::NotTls), "{other:?}");
        }
        assert_eq!(parse(&[22, 3, 1, 0, 0]), Err(BadHello::Broken));
        assert_eq!(parse(&[22, 3, 1, 0, 4, 1, 255, 255, 255]), Err(BadHello::TooLong));
    }

    fn rustls_sees(bytes: &[u8]) -> Option<Option<String>> {
        let mut acceptor = rustls::server::Acceptor::default();
        let mut rest = bytes;
        while !rest.is_empty() {
            acceptor.read_tls(&mut rest).ok()?;
            if let Some(accepted) = acceptor.accept().ok()? {
                return Some(accepted.client_hello().server_name().map(str::to_owned));
            }
        }
        None
    }

    proptest! {
        #[test]
        fn noise_never_breaks_it(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            let _ = parse(&bytes);
            let _ = parse(&[&[22, 3, 1, 2, 0, 1, 0, 1, 200][..], &bytes].concat());
        }

        /// Where both read a damaged hello, both read the same name.
        #[test]
        fn it_agrees_with_rustls(name in "[a-z]{1,9}\\.example", at in 0usize..220, byte: u8, size in 1usize..250) {
            let mut hello = hello_of(&name, &["h2"]);
            let at = at.min(hello.len() - 1);
            hello[at] = byte;
            for bytes in [in_records_of(&hello, size), hello] {
                if let (Ok(Some(ours)), Some(theirs)) = (parse(&bytes), rustls_sees(&bytes)) {
                    let theirs = theirs.map(|name| name.to_ascii_lowercase());
                    prop_assert_eq!(ours.name.map(|name| name.to_string()), theirs);
                }
            }
        }
    }
}
