//! Writing a file with holes where its content is zeros.
//!
//! A hole and zeros read the same, so they have one identity, and whichever a file had before it comes back with holes for
//! whole blocks of zeros. So a file that was sparse takes no more room than it did.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// What file systems allocate by.
const BLOCK: u64 = 4096;
const ZEROS: [u8; BLOCK as usize] = [0; BLOCK as usize];

/// Writes to a fresh, empty file from its beginning.
pub(super) struct Sparse<'a> {
    file: &'a File,
    at: u64,
    /// Where the last byte that was written ends.
    end: u64,
}

impl<'a> Sparse<'a> {
    pub fn new(file: &'a File) -> Self {
        Self { file, at: 0, end: 0 }
    }

    pub fn write(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let zeros = self.blocks(bytes, true);
            self.at += zeros as u64;
            bytes = &bytes[zeros..];
            let data = self.blocks(bytes, false);
            self.file.write_all_at(&bytes[..data], self.at)?;
            self.at += data as u64;
            if data > 0 {
                self.end = self.at;
            }
            bytes = &bytes[data..];
        }
        Ok(())
    }

    /// Gives the file its length, should it end in a hole.
    pub fn finish(self) -> io::Result<()> {
        if self.end < self.at {
            self.file.set_len(self.at)?;
        }
        Ok(())
    }

    /// How many bytes from the front are whole blocks of zeros, or are not.
    fn blocks(&self, bytes: &[u8], zeros: bool) -> usize {
        let mut length = 0;
        while length < bytes.len() {
            let to_border = (BLOCK - (self.at + length as u64) % BLOCK) as usize;
            let block = &bytes[length..][..to_border.min(bytes.len() - length)];
            let is_hole = block == ZEROS;
            if is_hole != zeros {
                break;
            }
            length += block.len();
        }
        length
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::fs::MetadataExt;

    use proptest::prelude::*;

    use super::super::testing::cases;
    use super::*;

    proptest! {
        #![proptest_config(cases(64))]

        #[test]
        fn whatever_is_written_is_read(
            runs in prop::collection::vec((any::<bool>(), 0_usize..20_000), 0..8),
            piece in 1_usize..9000,
        ) {
            let content: Vec<u8> = runs.iter().flat_map(|(zero, n)| vec![u8::from(!zero); *n]).collect();
            let mut file = tempfile::tempfile().unwrap();
            let mut sparse = Sparse::new(&file);
            for piece in content.chunks(piece) {
                sparse.write(piece).unwrap();
            }
            sparse.finish().unwrap();
            let mut read = Vec::new();
            file.read_to_end(&mut read).unwrap();
            prop_assert!(read == content);
        }
    }

    #[test]
    fn zeros_take_no_room() {
        let file = tempfile::tempfile_in(std::env::current_dir().unwrap()).unwrap();
        let mut sparse = Sparse::new(&file);
        sparse.write(&[0; 1 << 20]).unwrap();
        sparse.write(b"x").unwrap();
        sparse.write(&[0; 1 << 20]).unwrap();
        sparse.finish().unwrap();
        let meta = file.metadata().unwrap();
        assert_eq!(meta.len(), (2 << 20) + 1);
        assert!(meta.blocks() <= 32, "{} blocks", meta.blocks());
    }
}
