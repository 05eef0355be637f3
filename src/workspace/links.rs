//! Hard links: which names of a workspace are one file.
//!
//! A root names one object with all groups of its workspace. So that a directory has the same tree wherever it lies, no
//! tree below knows of them; each name has the content in its own entry too, and who does not care for links needs
//! nothing of this.
//!
//! Format version 1, little-endian: `"EXL" version:u8 groups:u32`, for each group `paths:u32` (at least two) and for each
//! path `length:u32 bytes`. Paths ascend as a walk meets them (by components), groups by their first path, and no path
//! occurs twice. A name whose other names are outside of the workspace is in no group.

use std::collections::{HashMap, HashSet};

use super::batch::Batch;
use super::error::Error;
use super::id::BlobId;
use super::tree::{Input, Undecodable};

pub(super) const FORMAT_VERSION: u8 = 1;
const MAGIC: &[u8; 3] = b"EXL";

/// Groups of paths that are one file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Links(Vec<Vec<Vec<u8>>>);

impl Links {
    /// Puts groups in order; those of one path fall away.
    pub fn new(groups: impl IntoIterator<Item = Vec<Vec<u8>>>) -> Self {
        let mut groups: Vec<_> = groups.into_iter().filter(|paths| paths.len() > 1).collect();
        for paths in &mut groups {
            paths.sort_unstable_by(|a, b| met(a).cmp(met(b)));
        }
        groups.sort_unstable_by(|a, b| met(&a[0]).cmp(met(&b[0])));
        Self(groups)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds them to a batch; none is no object.
    pub fn store(&self, batch: &mut Batch) -> Result<Option<BlobId>, Error> {
        match self.0.is_empty() {
            true => Ok(None),
            false => batch.put(&self.encode()).map(Some),
        }
    }

    /// All paths in groups.
    pub fn into_paths(self) -> HashSet<Vec<u8>> {
        self.0.into_iter().flatten().collect()
    }

    /// The number of each path's group.
    pub fn by_path(&self) -> HashMap<&[u8], usize> {
        let groups = self.0.iter().enumerate();
        groups
            .flat_map(|(number, paths)| paths.iter().map(move |path| (path.as_slice(), number)))
            .collect()
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend_from_slice(MAGIC);
        out.push(FORMAT_VERSION);
        out.extend_from_slice(&(self.0.len() as u32).to_le_bytes());
        for paths in &self.0 {
            out.extend_from_slice(&(paths.len() as u32).to_le_bytes());
            for path in paths {
                out.extend_from_slice(&(path.len() as u32).to_le_bytes());
                out.extend_from_slice(path);
            }
        }
        out
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, Undecodable> {
        let mut input = Input(bytes);
        input.header(MAGIC, FORMAT_VERSION)?;
        let count = input.u32()?;
        let mut groups = Vec::new();
        for _ in 0..count {
            let count = input.u32()?;
            let mut paths = Vec::new();
            for _ in 0..count {
                let length = input.u32()? as usize;
                paths.push(input.take(length)?.to_vec());
            }
            groups.push(paths);
        }
        input.end()?;
        let links = Self::new(groups.iter().cloned());
        if links.is_empty() || links.0 != groups || links.by_path().len() != groups.iter().map(Vec::len).sum::<usize>()
        {
            return Err(Undecodable::Malformed("links out of order"));
        }
        Ok(links)
    }
}

/// The order in which a walk meets paths.
fn met(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    path.split(|byte| *byte == b'/')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(paths: &[&str]) -> Vec<Vec<u8>> {
        paths.iter().map(|path| path.as_bytes().to_vec()).collect()
    }

    #[test]
    fn the_same_links_have_one_encoding() {
        let one = Links::new([group(&["b", "c/d"]), group(&["a-b", "a/b"]), group(&["alone"])]);
        let other = Links::new([group(&["a/b", "a-b"]), group(&["c/d", "b"])]);
        assert_eq!(one, other);
        let bytes = one.encode();
        assert_eq!(Links::decode(&bytes).unwrap(), one);
        assert_eq!(one.by_path()[&b"a-b"[..]], 0);
        for cut in 0..bytes.len() {
            assert!(Links::decode(&bytes[..cut]).is_err(), "cut at {cut}");
        }
        let twice = Links(vec![group(&["a", "b"]), group(&["a", "c"])]);
        assert!(Links::decode(&twice.encode()).is_err());
        assert!(Links::decode(&Links::default().encode()).is_err());
    }
}
