//! A zip file becomes a tree, by the rules of `unarchive.rs`.
//!
//! A zip file's index is at its end, so the stream is spooled to an unnamed file first, of at most what the limits allow.
//! Only the index counts: what lies between the entries is never read, so two readers cannot see two archives.

use std::io::{Read, Seek, SeekFrom, Write};

use zip::ZipArchive;
use zip::read::Config;

use super::draft::{Draft, DraftFile, Leaf};
use super::error::Error;
use super::limits::Limits;
use super::times::UNRECORDED;
use super::tree::LONGEST_TARGET;
use super::trees::{Revision, Trees};
use super::unarchive::{Refusal, Upload, broken, names, refused, unreadable};
use super::unpack::{FREE, RATIO};

const KIND: u32 = 0o170_000;
const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_000;

impl Trees {
    /// Stores what a zip file holds, durably before it returns.
    pub(super) fn read_zip(&self, stream: &mut dyn Read, limits: Limits) -> Result<Revision, Error> {
        let most = limits.total_bytes.saturating_add(limits.entries.saturating_mul(1024));
        let mut file = tempfile::tempfile().map_err(Error::Sink)?;
        let spooled = spool(stream, &mut file, most)?;
        let mut archive = ZipArchive::with_config(Config::default(), file).map_err(|e| malformed(&[], &e))?;
        let mut upload = Upload::new(self.blobs.batch(), limits);
        // Before anything is read of them: bombs by count, and by what the index says of sizes.
        if archive.len() as u64 > limits.entries {
            return Err(Error::Limit {
                what: "entries",
                limit: limits.entries,
                path: String::new(),
            });
        }
        let mut unpacked = 0_u64;
        for number in 0..archive.len() {
            let mut entry = archive.by_index(number).map_err(|e| malformed(&[], &e))?;
            let path = entry.name_raw().to_vec();
            let names = names(&path).map_err(|refusal| refused(&path, refusal))?;
            upload.meter.depth(names.len() as u32, &path)?;
            let said = entry.unix_mode();
            let kind = match said.map_or(0, |mode| mode & KIND) {
                0 if path.ends_with(b"/") => DIRECTORY,
                0 => REGULAR,
                kind => kind,
            };
            let mode = |default: u16| said.map_or(default, |mode| (mode & 0o777) as u16);
            let size = entry.size();
            let leaf = match kind {
                DIRECTORY => Leaf::Directory(Draft::new(mode(0o755), UNRECORDED)),
                REGULAR => {
                    upload.meter.file(size, &path)?;
                    unpacked = unpacked.saturating_add(size);
                    if unpacked > FREE && unpacked / RATIO > spooled {
                        return Err(refused(&path, Refusal::Ratio));
                    }
                    let stored = upload.batch.put_reader(&mut entry, size);
                    let (blob, stored) = stored.map_err(|e| unreadable(&path, e))?;
                    if stored != size {
                        return Err(refused(&path, Refusal::Malformed("it ends early".to_owned())));
                    }
                    Leaf::File(DraftFile {
                        mode: mode(0o644),
                        size,
                        blob,
                        attributes: None,
                        mtime: UNRECORDED,
                    })
                }
                SYMLINK => {
                    let mut target = Vec::new();
                    let read = entry.by_ref().take(LONGEST_TARGET as u64 + 1).read_to_end(&mut target);
                    read.map_err(|e| broken(&path, e))?;
                    if target.is_empty() || target.contains(&0) {
                        return Err(refused(&path, Refusal::NoTarget));
                    }
                    if target.len() > LONGEST_TARGET {
                        return Err(refused(&path, Refusal::TooLong));
                    }
                    Leaf::Symlink {
                        target,
                        mtime: UNRECORDED,
                    }
                }
                _ => return Err(refused(&path, Refusal::Device)),
            };
            upload.place(&path, &names, leaf)?;
        }
        upload.store()
    }
}

fn spool(stream: &mut dyn Read, file: &mut std::fs::File, most: u64) -> Result<u64, Error> {
    let mut chunk = vec![0; 128 << 10];
    let mut spooled = 0;
    loop {
        let read = stream.read(&mut chunk).map_err(Error::Source)?;
        if read == 0 {
            break;
        }
        spooled += read as u64;
        if spooled > most {
            return Err(refused(&[], Refusal::Endless));
        }
        file.write_all(&chunk[..read]).map_err(Error::Sink)?;
    }
    file.seek(SeekFrom::Start(0)).map_err(Error::Sink)?;
    Ok(spooled)
}

fn malformed(path: &[u8], error: &zip::result::ZipError) -> Error {
    refused(path, Refusal::Malformed(error.to_string()))
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use zip::ZipWriter;
    use zip::write::SimpleFileOptions;

    use super::super::testing::{Bench, timeless};
    use super::*;

    fn archive(fill: impl FnOnce(&mut ZipWriter<Cursor<Vec<u8>>>)) -> Vec<u8> {
        let mut writer = ZipWriter::new(Cursor::new(Vec::new()));
        fill(&mut writer);
        writer.finish().unwrap().into_inner()
    }

    fn refusal(bytes: &[u8]) -> Refusal {
        let bench = Bench::new();
        match bench.trees.read_archive(&mut &bytes[..], Limits::default()) {
            Err(Error::Archive { refusal, .. }) => refusal,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn files_directories_and_links_come_out() {
        let bytes = archive(|zip| {
            let options = SimpleFileOptions::default();
            zip.add_directory("d", options.unix_permissions(0o700)).unwrap();
            zip.start_file("d/run", options.unix_permissions(0o755)).unwrap();
            zip.write_all(&b"content ".repeat(1000)).unwrap();
            zip.add_symlink("link", "/etc/passwd", options).unwrap();
        });
        let bench = Bench::new();
        let revision = bench.trees.read_archive(&mut &bytes[..], Limits::default()).unwrap();
        let copy = bench.dir.path().join("copy");
        bench.trees.materialise(revision, &copy, None).unwrap();
        let found = timeless(&copy);
        let expected = [
            (b"d".to_vec(), (0o040_700, 0, Vec::new())),
            (b"d/run".to_vec(), (0o100_755, 8000, b"content ".repeat(1000))),
            (b"link".to_vec(), (0o120_777, 11, b"/etc/passwd".to_vec())),
        ];
        assert_eq!(found, expected.into());
    }

    #[test]
    fn hostile_ones_are_refused() {
        let named = |name: &str| {
            archive(|zip| {
                zip.start_file(name, SimpleFileOptions::default()).unwrap();
            })
        };
        assert_eq!(refusal(&named("/etc/passwd")), Refusal::Absolute);
        assert_eq!(refusal(&named("a/../../b")), Refusal::Parent);
        let through = archive(|zip| {
            zip.add_symlink("out", "/tmp", SimpleFileOptions::default()).unwrap();
            zip.start_file("out/x", SimpleFileOptions::default()).unwrap();
        });
        assert_eq!(refusal(&through), Refusal::ThroughFile);
        let bomb = archive(|zip| {
            zip.start_file("zeros", SimpleFileOptions::default()).unwrap();
            std::io::copy(&mut std::io::repeat(0).take(80 << 20), zip).unwrap();
        });
        assert_eq!(refusal(&bomb), Refusal::Ratio);
        assert!(matches!(refusal(b"PK\x03\x04 and no more"), Refusal::Malformed(_)));

        let many = archive(|zip| {
            for n in 0..11 {
                zip.start_file(format!("{n}"), SimpleFileOptions::default()).unwrap();
            }
        });
        let limits = Limits {
            entries: 10,
            ..Limits::default()
        };
        let error = Bench::new().trees.read_archive(&mut &many[..], limits).unwrap_err();
        assert_eq!(error.to_string(), "`` is beyond the limit of 10 entries");
    }

    #[test]
    fn an_entry_that_says_a_smaller_size_is_refused() {
        let mut bytes = archive(|zip| {
            let stored = SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
            zip.start_file("f", stored).unwrap();
            zip.write_all(b"0123456789").unwrap();
        });
        let at = bytes.windows(4).rposition(|four| four == b"PK\x01\x02").unwrap();
        // The unpacked size in the index.
        bytes[at + 24] = 3;
        let error = Bench::new().trees.read_archive(&mut &bytes[..], Limits::default());
        assert!(error.is_err(), "{error:?}");
    }
}
