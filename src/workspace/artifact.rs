//! Artifacts: kept outputs. An artifact is one blob and its name is the blob's address.

use std::ops::Range;

use super::error::Error;
use super::id::BlobId;
use super::trees::Trees;

impl Trees {
    /// Keeps bytes, durably before it returns; the same bytes have the same name.
    ///
    /// # Errors
    /// [`Error::Io`] when the disk refuses.
    pub fn put_artifact(&self, bytes: &[u8]) -> Result<BlobId, Error> {
        self.blobs.put(bytes)
    }

    /// Reads the bytes of `range`, cut to what is there. The whole is verified, so the cost is that of the whole; the memory
    /// is that of the range.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::Damaged`], [`Error::UnknownVersion`].
    pub fn artifact(&self, id: BlobId, range: Range<u64>) -> Result<Vec<u8>, Error> {
        let mut reader = self.blobs.reader(id)?;
        let mut found = Vec::new();
        let mut chunk = vec![0; 64 << 10];
        let mut at = 0;
        while reader.left() > 0 {
            let read = reader.next(&mut chunk)?;
            let clip = |edge: u64| edge.clamp(at, at + read as u64) - at;
            let (from, to) = (clip(range.start) as usize, clip(range.end) as usize);
            found.extend_from_slice(chunk.get(from..to).unwrap_or_default());
            at += read as u64;
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_of_an_artifact_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let trees = Trees::open(dir.path()).unwrap();
        let bytes: Vec<u8> = (0..200_000_u32).flat_map(u32::to_le_bytes).collect();
        let id = trees.put_artifact(&bytes).unwrap();
        assert_eq!(trees.put_artifact(&bytes).unwrap(), id);
        let all = bytes.len() as u64;
        #[expect(clippy::reversed_empty_ranges, reason = "what a caller may ask")]
        let ranges = [
            0..all,
            0..10,
            65_530..65_550,
            all - 3..all + 9,
            all + 1..all + 2,
            9..9,
            9..3,
            0..u64::MAX,
        ];
        for range in ranges {
            let end = range.end.min(all) as usize;
            let start = (range.start as usize).min(end);
            assert!(
                trees.artifact(id, range.clone()).unwrap() == bytes[start..end],
                "{range:?}"
            );
        }
    }
}
