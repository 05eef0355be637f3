//! Names of files: any bytes that a Linux directory can hold, and how they are shown.

use std::ops::Deref;

/// One component of a path: 1 to 255 bytes, no `/`, no NUL, neither `.` nor `..`. Need not be UTF-8.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(Box<[u8]>);

/// Bytes that cannot name a file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` cannot name a file")]
pub struct InvalidName(String);

/// NAME_MAX of Linux.
const LONGEST: usize = 255;

impl Name {
    /// # Errors
    /// [`InvalidName`] for anything that no directory entry of Linux can be called.
    pub fn new(bytes: &[u8]) -> Result<Self, InvalidName> {
        let fits = (1..=LONGEST).contains(&bytes.len());
        if !fits || matches!(bytes, b"." | b"..") || bytes.iter().any(|b| matches!(b, b'/' | 0)) {
            return Err(InvalidName(shown(bytes)));
        }
        Ok(Self(bytes.into()))
    }
}

impl Deref for Name {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

/// `path/name`, where an empty path is the root.
pub(super) fn join(path: &[u8], name: &[u8]) -> Vec<u8> {
    let mut joined = path.to_vec();
    push(&mut joined, name);
    joined
}

/// Appends a component to `path`; undo with `path.truncate(the length before)`.
pub(super) fn push(path: &mut Vec<u8>, name: &[u8]) {
    if !path.is_empty() {
        path.push(b'/');
    }
    path.extend_from_slice(name);
}

/// `path` for people: control characters escaped, bytes that are not UTF-8 as `\xNN`, so it is one line and cannot
/// steer a terminal.
pub fn shown(path: &[u8]) -> String {
    let mut text = String::with_capacity(path.len());
    for chunk in path.utf8_chunks() {
        for c in chunk.valid().chars() {
            if c.is_control() {
                text.extend(c.escape_default());
            } else {
                text.push(c);
            }
        }
        for byte in chunk.invalid() {
            text.push_str(&format!("\\x{byte:02x}"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_what_linux_allows() {
        for good in [
            &b"a"[..],
            b"...",
            b"-rf",
            b"new\nline",
            b"\xff\xfe",
            "☃".as_bytes(),
            &[b'x'; 255],
        ] {
            assert_eq!(&*Name::new(good).unwrap(), good);
        }
        for bad in [&b""[..], b".", b"..", b"a/b", b"nul\0", &[b'x'; 256]] {
            assert!(Name::new(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_shown_path_is_one_harmless_line() {
        assert_eq!(shown(b"a b/\xc3\xa9\x1b[2J\n\xff"), "a b/é\\u{1b}[2J\\n\\xff");
    }
}
