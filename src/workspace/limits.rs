//! How much of a tree is walked, unpacked or taken in before the answer is no.

use super::error::Error;
use super::name::shown;

/// Bounds on a tree that somebody else made. Reaching one is [`Error::Limit`], never a cut tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Files, directories and links together.
    pub entries: u64,
    /// Directories below the root. Each level holds one descriptor open.
    pub depth: u32,
    /// Bytes of one file. A sparse file counts with its holes.
    pub file_bytes: u64,
    /// Bytes of all files together.
    pub total_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        const GIB: u64 = 1 << 30;
        Self {
            entries: 500_000,
            depth: 128,
            file_bytes: 8 * GIB,
            total_bytes: 16 * GIB,
        }
    }
}

/// Counts what has been taken in against [`Limits`].
#[derive(Debug)]
pub(super) struct Meter {
    limits: Limits,
    entries: u64,
    bytes: u64,
}

impl Meter {
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            entries: 0,
            bytes: 0,
        }
    }

    pub fn entry(&mut self, path: &[u8]) -> Result<(), Error> {
        self.entries += 1;
        check(self.entries, self.limits.entries, "entries", path)
    }

    pub fn depth(&self, depth: u32, path: &[u8]) -> Result<(), Error> {
        check(
            u64::from(depth),
            u64::from(self.limits.depth),
            "nested directories",
            path,
        )
    }

    /// Takes a file of a size that is known in advance.
    pub fn file(&mut self, bytes: u64, path: &[u8]) -> Result<(), Error> {
        check(bytes, self.limits.file_bytes, "bytes a file", path)?;
        self.bytes = self.bytes.saturating_add(bytes);
        check(self.bytes, self.limits.total_bytes, "bytes in all", path)
    }

    /// What a file may still have, whatever it said before about its size.
    pub fn file_allowance(&self) -> u64 {
        let left = self.limits.total_bytes.saturating_sub(self.bytes);
        left.min(self.limits.file_bytes)
    }
}

fn check(value: u64, limit: u64, what: &'static str, path: &[u8]) -> Result<(), Error> {
    if value > limit {
        let path = shown(path);
        return Err(Error::Limit { what, limit, path });
    }
    Ok(())
}
