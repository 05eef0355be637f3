//! Content addresses, and hashing what goes by.

use std::cell::RefCell;
use std::fmt;
use std::io::{self, Read};
use std::rc::Rc;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::Error;

/// The SHA-256 of something, written `sha256:` and 64 lower-case hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest(String);

impl Digest {
    const PREFIX: &str = "sha256:";

    pub fn of(bytes: &[u8]) -> Self {
        Self::shown(ring::digest::digest(&ring::digest::SHA256, bytes))
    }

    fn shown(hash: ring::digest::Digest) -> Self {
        let hex: String = hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        Self(format!("{}{hex}", Self::PREFIX))
    }

    /// The digits alone.
    pub fn hex(&self) -> &str {
        &self.0[Self::PREFIX.len()..]
    }

    /// # Errors
    /// [`Error::Digest`] when it is another's.
    pub(super) fn check(&self, what: impl Into<String>, found: Self) -> Result<(), Error> {
        if *self == found {
            return Ok(());
        }
        Err(Error::Digest {
            what: what.into(),
            expected: self.clone(),
            found,
        })
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for Digest {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text.strip_prefix(Self::PREFIX) {
            Some(hex) if hex.len() == 64 && hex.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')) => {
                Ok(Self(text.to_owned()))
            }
            Some(_) | None => Err(Error::NoDigest(text.to_owned())),
        }
    }
}

impl TryFrom<String> for Digest {
    type Error = Error;

    fn try_from(text: String) -> Result<Self, Error> {
        text.parse()
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> String {
        digest.0
    }
}

/// A SHA-256 in the making.
#[derive(Clone)]
pub(super) struct Hasher(ring::digest::Context);

impl Hasher {
    pub fn new() -> Self {
        Self(ring::digest::Context::new(&ring::digest::SHA256))
    }

    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub fn finish(self) -> Digest {
        Digest::shown(self.0.finish())
    }
}

/// Hashes and counts what is read through it. Clones share the reader, so that it can be read out when another has taken it.
pub(super) struct Hashing<R>(Rc<RefCell<Inner<R>>>);

impl<R> Clone for Hashing<R> {
    fn clone(&self) -> Self {
        Self(Rc::clone(&self.0))
    }
}

struct Inner<R> {
    from: R,
    hasher: Hasher,
    bytes: u64,
}

impl<R: Read> Hashing<R> {
    pub fn new(from: R) -> Self {
        Self(Rc::new(RefCell::new(Inner {
            from,
            hasher: Hasher::new(),
            bytes: 0,
        })))
    }

    /// Bytes read so far.
    pub fn count(&self) -> u64 {
        self.0.borrow().bytes
    }

    /// Reads to the end: the digest of everything and how much that was.
    pub fn finish(mut self) -> io::Result<(Digest, u64)> {
        io::copy(&mut self, &mut io::sink())?;
        let inner = self.0.borrow();
        Ok((inner.hasher.clone().finish(), inner.bytes))
    }
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let mut inner = self.0.borrow_mut();
        let got = inner.from.read(into)?;
        inner.hasher.update(&into[..got]);
        inner.bytes += got as u64;
        Ok(got)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_sha256_and_nothing_else() {
        let empty = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(Digest::of(b"").to_string(), empty);
        assert_eq!(empty.parse::<Digest>().unwrap(), Digest::of(b""));
        for bad in [
            "",
            "sha256:",
            &empty.to_uppercase(),
            &empty[..70],
            "sha512:00",
            "sha256:../../etc",
        ] {
            assert!(bad.parse::<Digest>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_reader_that_was_taken_is_read_out() {
        let whole = Hashing::new(b"abcdef".as_slice());
        let mut part = [0; 2];
        whole.clone().read_exact(&mut part).unwrap();
        assert_eq!(whole.count(), 2);
        assert_eq!(whole.finish().unwrap(), (Digest::of(b"abcdef"), 6));
    }
}
