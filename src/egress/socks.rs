//! SOCKS5 (RFC 1928) as far as it is served: no authentication, `CONNECT`, names looked up on this side.

use std::net::{Ipv4Addr, Ipv6Addr};

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::stream::Stream;

const VERSION: u8 = 5;

/// What a client asks for; the host is as it was sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asked {
    pub host: Vec<u8>,
    pub port: u16,
}

/// The code of a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reply {
    Done = 0,
    Refused = 2,
    Unreachable = 4,
    Command = 7,
    Address = 8,
}

/// Why it goes no further.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bad {
    /// It does not speak SOCKS5, or broke off.
    Speech,
    /// It wants a login.
    Method,
    /// It wants to bind, or UDP.
    Command,
    Address,
}

/// Reads a request from the front of `bytes`; nothing when more is needed.
///
/// # Errors
/// More bytes would not make it better.
pub fn request(bytes: &[u8]) -> Result<Option<(Asked, usize)>, Bad> {
    let [version, command, reserved, kind, rest @ ..] = bytes else {
        return match bytes.first() {
            Some(&VERSION) | None => Ok(None),
            Some(_) => Err(Bad::Speech),
        };
    };
    if (*version, *reserved) != (VERSION, 0) {
        return Err(Bad::Speech);
    }
    if *command != 1 {
        return Err(Bad::Command);
    }
    let (skipped, length) = match (kind, rest) {
        (1, _) => (0, 4),
        (4, _) => (0, 16),
        (3, [0, ..]) => return Err(Bad::Address),
        (3, [length, ..]) => (1, usize::from(*length)),
        (3, []) => return Ok(None),
        _ => return Err(Bad::Address),
    };
    let (Some(host), Some([high, low])) = (
        rest.get(skipped..skipped + length),
        rest.get(skipped + length..skipped + length + 2),
    ) else {
        return Ok(None);
    };
    let host = match kind {
        1 => <[u8; 4]>::try_from(host).map(|octets| Ipv4Addr::from(octets).to_string().into_bytes()),
        4 => <[u8; 16]>::try_from(host).map(|octets| Ipv6Addr::from(octets).to_string().into_bytes()),
        _ => Ok(host.to_vec()),
    };
    let host = host.map_err(|_| Bad::Address)?;
    let port = u16::from_be_bytes([*high, *low]);
    Ok(Some((Asked { host, port }, 4 + skipped + length + 2)))
}

/// Greets and reads the request. What follows it stays in the stream.
pub(super) async fn greet<S: Stream>(stream: &mut S) -> Result<Asked, Bad> {
    let mut start = [0; 2];
    stream.read_exact(&mut start).await.map_err(|_| Bad::Speech)?;
    let [VERSION, count] = start else {
        return Err(Bad::Speech);
    };
    let mut methods = vec![0; usize::from(count)];
    stream.read_exact(&mut methods).await.map_err(|_| Bad::Speech)?;
    if !methods.contains(&0) {
        let _ = stream.write_all(&[VERSION, 0xff]).await;
        return Err(Bad::Method);
    }
    stream.write_all(&[VERSION, 0]).await.map_err(|_| Bad::Speech)?;
    let mut bytes = Vec::new();
    loop {
        // Byte by byte at its end: what follows belongs to the tunnel.
        let mut byte = [0];
        stream.read_exact(&mut byte).await.map_err(|_| Bad::Speech)?;
        bytes.extend(byte);
        if let Some((asked, _)) = request(&bytes)? {
            return Ok(asked);
        }
    }
}

pub(super) async fn reply<S: Stream>(stream: &mut S, reply: Reply) -> std::io::Result<()> {
    stream
        .write_all(&[VERSION, reply as u8, 0, 1, 0, 0, 0, 0, 0, 0])
        .await?;
    stream.flush().await
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_and_addresses_are_read() {
        let asked = |host: &[u8], port: u16, length: usize| {
            Ok(Some((
                Asked {
                    host: host.to_vec(),
                    port,
                },
                length,
            )))
        };
        assert_eq!(
            request(b"\x05\x01\0\x03\x09a.example\x01\xbbmore"),
            asked(b"a.example", 443, 16)
        );
        assert_eq!(
            request(b"\x05\x01\0\x01\x7f\0\0\x01\0\x50"),
            asked(b"127.0.0.1", 80, 10)
        );
        let six = [&b"\x05\x01\0\x04"[..], &[0; 15], &[1, 0, 80]].concat();
        assert_eq!(request(&six), asked(b"::1", 80, 22));
        // T20: the NUL goes on to be judged, and fails there.
        assert_eq!(request(b"\x05\x01\0\x03\x03a\0b\0\x50"), asked(b"a\0b", 80, 10));
        for (bytes, bad) in [
            (&b"\x04\x01\0\x50\x7f\0\0\x01"[..], Bad::Speech),
            (b"\x05\x02\0\x01", Bad::Command),
            (b"\x05\x03\0\x01", Bad::Command),
            (b"\x05\x01\x01\x01", Bad::Speech),
            (b"\x05\x01\0\x02", Bad::Address),
            (b"\x05\x01\0\x03\0", Bad::Address),
            (b"GET / HTTP", Bad::Speech),
        ] {
            assert_eq!(request(bytes), Err(bad), "{bytes:?}");
        }
    }

    proptest! {
        #[test]
        fn noise_never_breaks_it(kind in 0u8..6, rest in proptest::collection::vec(any::<u8>(), 0..300)) {
            let bytes = [&[VERSION, 1, 0, kind][..], &rest].concat();
            if let Ok(Some((asked, length))) = request(&bytes) {
                prop_assert!(length <= bytes.len());
                prop_assert_eq!(&bytes[length - 2..length], &asked.port.to_be_bytes());
                prop_assert_eq!(request(&bytes[..length - 1]), Ok(None));
            }
        }
    }
}
