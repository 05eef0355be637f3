//! Extended attributes: the `user.*` ones of a file or directory, as one object that its entry names.
//!
//! Format version 1, little-endian: `"EXX" version:u8 count:u16`, then for each, ascending by name,
//! `name_len:u8 name value_len:u32 value`. Other namespaces (`security.*`, `trusted.*`, `system.*`) are the host's and
//! are neither read nor written.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd;

use rustix::fs::{XattrFlags, fgetxattr, flistxattr, flistxattr_query, fremovexattr, fsetxattr};
use rustix::io::Errno;

use super::tree::{Input, Undecodable};

pub(super) const FORMAT_VERSION: u8 = 1;
const MAGIC: &[u8; 3] = b"EXX";
const SPACE: &[u8] = b"user.";
/// XATTR_LIST_MAX and XATTR_SIZE_MAX of Linux.
const LARGEST: usize = 64 << 10;

/// Attributes by name, each name beginning with `user.`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Attributes(pub BTreeMap<Vec<u8>, Vec<u8>>);

impl Attributes {
    /// Adds one that came from outside; `false` for one that no file of Linux can have, or that is not for us.
    pub fn insert(&mut self, name: &[u8], value: &[u8]) -> bool {
        let fits = is_ours(name) && value.len() <= LARGEST;
        if fits {
            self.0.insert(name.to_vec(), value.to_vec());
        }
        fits
    }

    /// Those of an open file or directory. A file system that has none gives none.
    pub fn of(file: impl AsFd) -> io::Result<Self> {
        let mut found = Self::default();
        for name in names(&file)? {
            let mut value = vec![0; LARGEST];
            match fgetxattr(&file, name.as_slice(), &mut value[..]) {
                Ok(length) => value.truncate(length),
                // Taken away since it was listed.
                Err(Errno::NODATA) => continue,
                Err(error) => return Err(error.into()),
            }
            value.shrink_to_fit();
            found.0.insert(name, value);
        }
        Ok(found)
    }

    /// Makes an open file or directory have these and no others.
    pub fn set(&self, file: impl AsFd) -> io::Result<()> {
        for name in names(&file)? {
            if !self.0.contains_key(&name) {
                fremovexattr(&file, name.as_slice())?;
            }
        }
        for (name, value) in &self.0 {
            fsetxattr(&file, name.as_slice(), value, XattrFlags::empty())?;
        }
        Ok(())
    }

    /// As an object of the store; none is no object.
    pub fn encoded(&self) -> Option<Vec<u8>> {
        (!self.0.is_empty()).then(|| self.encode())
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend_from_slice(MAGIC);
        out.push(FORMAT_VERSION);
        out.extend_from_slice(&(self.0.len() as u16).to_le_bytes());
        for (name, value) in &self.0 {
            out.push(name.len() as u8);
            out.extend_from_slice(name);
            out.extend_from_slice(&(value.len() as u32).to_le_bytes());
            out.extend_from_slice(value);
        }
        out
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, Undecodable> {
        let mut input = Input(bytes);
        input.header(MAGIC, FORMAT_VERSION)?;
        let count = u16::from_le_bytes(input.array()?);
        let mut found: BTreeMap<Vec<u8>, Vec<u8>> = BTreeMap::new();
        for _ in 0..count {
            let length = usize::from(input.array::<1>()?[0]);
            let name = input.take(length)?;
            let length = input.u32()? as usize;
            let value = input.take(length)?;
            let ascends = found.last_key_value().is_none_or(|(last, _)| last.as_slice() < name);
            if !(ascends && is_ours(name) && value.len() <= LARGEST) {
                return Err(Undecodable::Malformed("an attribute that is none, or out of order"));
            }
            found.insert(name.to_vec(), value.to_vec());
        }
        input.end()?;
        if found.is_empty() {
            return Err(Undecodable::Malformed("no attributes"));
        }
        Ok(Self(found))
    }
}

fn is_ours(name: &[u8]) -> bool {
    name.starts_with(SPACE) && (SPACE.len() + 1..=255).contains(&name.len()) && !name.contains(&0)
}

fn names(file: impl AsFd) -> io::Result<Vec<Vec<u8>>> {
    let length = match flistxattr_query(&file) {
        Ok(0) | Err(Errno::OPNOTSUPP) => return Ok(Vec::new()),
        Ok(length) => length,
        Err(error) => return Err(error.into()),
    };
    // Some more, for what is added in between.
    let mut list = vec![0; length.max(LARGEST)];
    let length = flistxattr(&file, &mut list[..])?;
    let all = list[..length].split(|byte| *byte == 0);
    Ok(all.filter(|name| is_ours(name)).map(<[u8]>::to_vec).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Attributes {
        let mut sample = Attributes::default();
        assert!(sample.insert(b"user.b", b""));
        assert!(sample.insert(b"user.a", b"\0\xff"));
        sample
    }

    #[test]
    fn one_set_has_one_encoding() {
        let bytes = sample().encode();
        assert_eq!(Attributes::decode(&bytes).unwrap(), sample());
        for cut in 0..bytes.len() {
            assert!(Attributes::decode(&bytes[..cut]).is_err(), "cut at {cut}");
        }
        assert!(Attributes::decode(&Attributes::default().encode()).is_err());
    }

    #[test]
    fn only_those_of_users_are_taken() {
        let mut none = Attributes::default();
        for name in [
            &b"security.capability"[..],
            b"trusted.overlay.opaque",
            b"user.",
            b"user.a\0b",
            b"",
        ] {
            assert!(!none.insert(name, b"x"));
        }
        assert_eq!(none, Attributes::default());
    }

    #[test]
    fn a_file_is_made_to_have_these_and_no_others() {
        let file = tempfile::tempfile_in(std::env::current_dir().unwrap()).unwrap();
        let mut before = Attributes::default();
        before.insert(b"user.old", b"x");
        before.insert(b"user.a", b"other");
        before.set(&file).unwrap();
        assert_eq!(Attributes::of(&file).unwrap(), before);
        sample().set(&file).unwrap();
        assert_eq!(Attributes::of(&file).unwrap(), sample());
    }
}
