//! A tar stream or a zip file becomes a tree: uploads from people and from guests.
//!
//! The tree is put together in memory and the contents go to the store, so no name from an archive ever touches a path of
//! the host. Plain, gzip and zstd streams and zip files (`unzip.rs`) are told apart by their first bytes. What is refused is a [`Refusal`]; the rules:
//!
//! - names are relative, without `..`; `.` and empty components fall away; missing directories are made (0755);
//! - nothing is placed below a name that is not a directory, so nothing is written through a link;
//! - a symlink's target is data and may be anything, for nothing here follows it; a hard link must name a file that came
//!   before it in the archive, and is kept as one;
//! - of two entries with one name the later counts (as tar itself has it), but a directory and another thing contradict;
//! - modes keep the permission bits alone, owners are dropped, of extended attributes those of `user.*` are kept;
//! - devices, FIFOs, sparse and unknown entries are refused, and so is a stream that unpacks to more than `RATIO` times
//!   its size (see `unpack.rs`).

use std::collections::HashMap;
use std::io::{self, Read};

use tar::{Archive, EntryType};

use super::attributes::Attributes;
use super::draft::{Draft, DraftFile, Leaf, PlaceError};
use super::error::Error;
use super::limits::{Limits, Meter};
use super::links::Links;
use super::name::{Name, shown};
use super::tree::LONGEST_TARGET;
use super::trees::{Revision, Trees};
use super::unpack::{RATIO, Upstream, unpacked};

/// Why an archive is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("the name is absolute")]
    Absolute,
    #[error("the name leads out by `..`")]
    Parent,
    #[error("the name is none that a file can have")]
    NoName,
    #[error("the name or link target is too long")]
    TooLong,
    #[error("it lies below something that is not a directory")]
    ThroughFile,
    #[error("it is both a directory and something else")]
    Contradiction,
    #[error("a hard link to `{0}`, which is no file that came before it")]
    HardLink(String),
    #[error("a symlink without a target")]
    NoTarget,
    #[error("a device or FIFO")]
    Device,
    #[error("an entry of the unsupported type `{0}`")]
    Unsupported(String),
    #[error("it unpacks to more than {RATIO} times its size")]
    Ratio,
    #[error("more bytes around its files than the limits allow")]
    Endless,
    #[error("it is no tar archive (plain, gzip or zstd) and no zip file: {0}")]
    Malformed(String),
}

/// The longest long name that is read, and the longest extended header: that may have attributes.
const LONGEST_NAME: u64 = 64 << 10;
const LONGEST_EXTENSION: u64 = 1 << 20;

impl Trees {
    /// Stores what a tar stream holds, durably before it returns. Memory use follows the number of entries, not their size.
    ///
    /// # Errors
    /// [`Error::Archive`] with the [`Refusal`]; [`Error::Limit`] for an archive beyond `limits`; [`Error::Source`] when the
    /// stream itself fails; [`Error::Io`].
    pub fn read_tar(&self, stream: &mut dyn Read, limits: Limits) -> Result<Revision, Error> {
        let most = limits.total_bytes.saturating_add(limits.entries.saturating_mul(2048));
        let mut upload = Upload::new(self.blobs.batch(), limits);
        upload.entries(unpacked(stream, most)?)?;
        upload.store()
    }

    /// Stores what a tar stream or a zip file holds, whichever it is.
    ///
    /// # Errors
    /// As [`Trees::read_tar`].
    pub fn read_archive(&self, stream: &mut dyn Read, limits: Limits) -> Result<Revision, Error> {
        let mut magic = Vec::new();
        stream.take(4).read_to_end(&mut magic).map_err(Error::Source)?;
        let is_zip = magic.starts_with(b"PK\x03\x04") || magic.starts_with(b"PK\x05\x06");
        let mut whole = io::Cursor::new(magic).chain(stream);
        if is_zip {
            self.read_zip(&mut whole, limits)
        } else {
            self.read_tar(&mut whole, limits)
        }
    }
}

/// An archive on its way into the store.
pub(super) struct Upload {
    pub batch: super::batch::Batch,
    pub meter: Meter,
    draft: Draft,
    /// The group of each path that shares its inode with others.
    groups: HashMap<Vec<u8>, usize>,
    made_groups: usize,
}

/// What extension entries say of the entry that follows.
#[derive(Default)]
struct Ahead {
    path: Option<Vec<u8>>,
    target: Option<Vec<u8>>,
    mtime: Option<i64>,
    attributes: Attributes,
}

impl Upload {
    pub fn new(batch: super::batch::Batch, limits: Limits) -> Self {
        Self {
            batch,
            meter: Meter::new(limits),
            draft: Draft::new(0o755, 0),
            groups: HashMap::new(),
            made_groups: 0,
        }
    }

    pub fn store(self) -> Result<Revision, Error> {
        let Self {
            mut batch,
            draft,
            groups,
            ..
        } = self;
        let mut links: HashMap<usize, Vec<Vec<u8>>> = HashMap::new();
        for (path, group) in groups {
            links.entry(group).or_default().push(path);
        }
        let revision = draft.store(&Links::new(links.into_values()), &mut batch)?;
        batch.commit()?;
        Ok(revision)
    }

    /// Puts a leaf at the path that an entry has.
    pub fn place(&mut self, path: &[u8], names: &[Name], leaf: Leaf) -> Result<(), Error> {
        let placed = self.draft.place(names, leaf, &mut self.meter);
        placed.map_err(|e| match e {
            PlaceError::Refused(refusal) => refused(path, refusal),
            PlaceError::Limit(error) => error.at(path),
        })?;
        self.groups.remove(&joined(names));
        Ok(())
    }

    fn entries(&mut self, stream: impl Read) -> Result<(), Error> {
        let mut archive = Archive::new(stream);
        let mut ahead = Ahead::default();
        let mut any = false;
        // Raw: long names and extended headers are read here, with a bound.
        let entries = archive.entries().map_err(|e| broken(&[], e))?.raw(true);
        for entry in entries {
            let mut entry = entry.map_err(|e| broken(&[], e))?;
            any = true;
            let name = entry.path_bytes().into_owned();
            match entry.header().entry_type() {
                EntryType::GNULongName => ahead.path = Some(text(&mut entry, &name)?),
                EntryType::GNULongLink => ahead.target = Some(text(&mut entry, &name)?),
                EntryType::XHeader => extend(&mut ahead, &extension(&mut entry, &name, LONGEST_EXTENSION)?, &name)?,
                EntryType::XGlobalHeader => {
                    extension(&mut entry, &name, LONGEST_EXTENSION)?;
                }
                kind => {
                    let ahead = std::mem::take(&mut ahead);
                    let path = ahead.path.clone().unwrap_or(name);
                    self.entry(&mut entry, kind, &path, ahead)?;
                }
            }
        }
        if any {
            Ok(())
        } else {
            Err(refused(&[], Refusal::Malformed("it is empty".to_owned())))
        }
    }

    fn entry(
        &mut self,
        entry: &mut tar::Entry<'_, impl Read>,
        kind: EntryType,
        path: &[u8],
        ahead: Ahead,
    ) -> Result<(), Error> {
        let names = names(path).map_err(|refusal| refused(path, refusal))?;
        self.meter.depth(names.len() as u32, path)?;
        let header = entry.header();
        let malformed = |e: io::Error| refused(path, Refusal::Malformed(e.to_string()));
        let mode = (header.mode().map_err(malformed)? & 0o777) as u16;
        let seconds = i64::try_from(header.mtime().map_err(malformed)?).unwrap_or(i64::MAX);
        let mtime = ahead.mtime.unwrap_or(seconds.saturating_mul(1_000_000_000));
        let attributes = match ahead.attributes.encoded() {
            None => None,
            Some(bytes) => {
                self.meter.file(bytes.len() as u64, path)?;
                Some(self.batch.put(&bytes)?)
            }
        };
        let link = || {
            ahead
                .target
                .clone()
                .or_else(|| entry.link_name_bytes().map(|t| t.into_owned()))
        };
        let leaf = match kind {
            EntryType::Regular | EntryType::Continuous if path.ends_with(b"/") => {
                Leaf::Directory(Draft::new(mode, mtime).with_attributes(attributes))
            }
            EntryType::Directory => Leaf::Directory(Draft::new(mode, mtime).with_attributes(attributes)),
            EntryType::Regular | EntryType::Continuous => {
                let size = entry.size();
                self.meter.file(size, path)?;
                let stored = self.batch.put_reader(entry, size);
                let (blob, stored) = stored.map_err(|e| unreadable(path, e))?;
                if stored != size {
                    return Err(refused(path, Refusal::Malformed("it ends early".to_owned())));
                }
                Leaf::File(DraftFile {
                    mode,
                    size,
                    blob,
                    attributes,
                    mtime,
                })
            }
            EntryType::Link => {
                let target = link().unwrap_or_default();
                let found = self::names(&target)
                    .ok()
                    .and_then(|names| Some((joined(&names), self.draft.file(&names)?)));
                let (target, file) = found.ok_or_else(|| refused(path, Refusal::HardLink(shown(&target))))?;
                self.meter.file(file.size, path)?;
                if target != joined(&names) {
                    self.place(path, &names, Leaf::File(file))?;
                    self.made_groups += 1;
                    let fresh = self.made_groups;
                    let group = *self.groups.entry(target).or_insert(fresh);
                    self.groups.insert(joined(&names), group);
                }
                return Ok(());
            }
            EntryType::Symlink => {
                let target = link().filter(|target| !target.is_empty() && !target.contains(&0));
                let target = target.ok_or_else(|| refused(path, Refusal::NoTarget))?;
                if target.len() > LONGEST_TARGET {
                    return Err(refused(path, Refusal::TooLong));
                }
                Leaf::Symlink { target, mtime }
            }
            EntryType::Char | EntryType::Block | EntryType::Fifo => return Err(refused(path, Refusal::Device)),
            other => {
                let name = char::from(other.as_byte()).escape_default().to_string();
                return Err(refused(path, Refusal::Unsupported(name)));
            }
        };
        self.place(path, &names, leaf)
    }
}

fn joined(names: &[Name]) -> Vec<u8> {
    names.iter().map(|name| &**name).collect::<Vec<&[u8]>>().join(&b'/')
}

/// The components of an entry's name.
pub(super) fn names(path: &[u8]) -> Result<Vec<Name>, Refusal> {
    if path.starts_with(b"/") {
        return Err(Refusal::Absolute);
    }
    let components = path.split(|byte| *byte == b'/');
    components
        .filter(|name| !matches!(*name, b"" | b"."))
        .map(|name| match name {
            b".." => Err(Refusal::Parent),
            name if name.len() > 255 => Err(Refusal::TooLong),
            name => Name::new(name).map_err(|_| Refusal::NoName),
        })
        .collect()
}

/// Takes from an extended header what counts here; what would change how the content is to be read is refused.
fn extend(ahead: &mut Ahead, bytes: &[u8], name: &[u8]) -> Result<(), Error> {
    let mut left = bytes;
    while !left.is_empty() {
        let malformed = || refused(name, Refusal::Malformed("an extended header that is none".to_owned()));
        let (key, value, rest) = record(left).ok_or_else(malformed)?;
        left = rest;
        let value = value.to_vec();
        match key {
            b"path" => ahead.path = Some(value),
            b"linkpath" => ahead.target = Some(value),
            b"mtime" => ahead.mtime = nanoseconds(&value),
            key if key == b"size" || key.starts_with(b"GNU.sparse.") => {
                return Err(refused(name, Refusal::Unsupported(format!("pax {}", shown(key)))));
            }
            key => {
                // Owners, comments, and attributes that are not for us, fall away.
                if let Some(key) = key.strip_prefix(b"SCHILY.xattr.") {
                    ahead.attributes.insert(key, &value);
                }
            }
        }
    }
    Ok(())
}

/// The first record of an extended header, `length key=value\n`, and what comes after it. A value may have line breaks.
fn record(bytes: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let space = bytes.iter().position(|byte| *byte == b' ')?;
    let length: usize = std::str::from_utf8(&bytes[..space]).ok()?.parse().ok()?;
    let (whole, rest) = bytes.split_at_checked(length)?;
    let body = whole.get(space + 1..)?.strip_suffix(b"\n")?;
    let equals = body.iter().position(|byte| *byte == b'=')?;
    Some((&body[..equals], &body[equals + 1..], rest))
}

/// A decimal number of seconds as pax has it, `-?digits[.digits]`.
fn nanoseconds(text: &[u8]) -> Option<i64> {
    let text = std::str::from_utf8(text).ok()?;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let seconds: i64 = whole.parse().ok()?;
    let digits = format!("{fraction:0<9}");
    let part: i64 = digits.get(..9)?.parse().ok()?;
    let signed = if text.starts_with('-') { -part } else { part };
    Some(seconds.saturating_mul(1_000_000_000).saturating_add(signed))
}

fn extension(entry: &mut tar::Entry<'_, impl Read>, name: &[u8], most: u64) -> Result<Vec<u8>, Error> {
    if entry.size() > most {
        return Err(refused(name, Refusal::TooLong));
    }
    let mut bytes = Vec::new();
    entry.read_to_end(&mut bytes).map_err(|e| broken(name, e))?;
    Ok(bytes)
}

/// A long name: up to its first NUL.
fn text(entry: &mut tar::Entry<'_, impl Read>, name: &[u8]) -> Result<Vec<u8>, Error> {
    let mut bytes = extension(entry, name, LONGEST_NAME)?;
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    bytes.truncate(end);
    Ok(bytes)
}

pub(super) fn refused(entry: &[u8], refusal: Refusal) -> Error {
    let entry = shown(entry);
    Error::Archive { entry, refusal }
}

/// What it means that reading the archive failed.
pub(super) fn broken(entry: &[u8], error: io::Error) -> Error {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    while let Some(at) = cause {
        if let Some(refusal) = at.downcast_ref::<Refusal>() {
            return refused(entry, refusal.clone());
        }
        if at.is::<Upstream>() {
            return Error::Source(error);
        }
        // An io::Error's source is the source of what it holds: look at that itself first.
        cause = match at.downcast_ref::<io::Error>() {
            Some(held) => held.get_ref().map(|held| held as &(dyn std::error::Error + 'static)),
            None => at.source(),
        };
    }
    refused(entry, Refusal::Malformed(error.to_string()))
}

pub(super) fn unreadable(entry: &[u8], error: Error) -> Error {
    match error {
        Error::Source(error) => broken(entry, error),
        other => other.at(entry),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::super::id::BlobId;
    use super::super::testing::{Bench, snapshot};
    use super::*;

    /// One hostile entry: names are set raw, for a builder would refuse them.
    fn entry(kind: EntryType, name: &[u8], target: &[u8], content: &[u8]) -> Vec<u8> {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(0o644);
        header.set_mtime(1);
        header.set_uid(0);
        header.set_gid(0);
        header.set_size(content.len() as u64);
        let gnu = header.as_gnu_mut().unwrap();
        gnu.name[..name.len()].copy_from_slice(name);
        gnu.linkname[..target.len()].copy_from_slice(target);
        header.set_cksum();
        let mut bytes = header.as_bytes().to_vec();
        bytes.extend_from_slice(content);
        bytes.resize(bytes.len().next_multiple_of(512), 0);
        bytes
    }

    fn file(name: &[u8]) -> Vec<u8> {
        entry(EntryType::Regular, name, b"", b"x")
    }

    fn read(entries: &[Vec<u8>]) -> Result<(Bench, Revision), Error> {
        let bench = Bench::new();
        let bytes = [entries.concat(), vec![0; 1024]].concat();
        let limits = Limits {
            entries: 50,
            depth: 8,
            file_bytes: 1 << 30,
            total_bytes: 1 << 30,
        };
        let revision = bench.trees.read_tar(&mut bytes.as_slice(), limits)?;
        Ok((bench, revision))
    }

    fn refusal(entries: &[Vec<u8>]) -> Refusal {
        match read(entries).map(|(_, revision)| revision) {
            Err(Error::Archive { refusal, .. }) => refusal,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn hostile_archives_are_refused() {
        assert_eq!(refusal(&[file(b"../out")]), Refusal::Parent);
        assert_eq!(refusal(&[file(b"a/../../out")]), Refusal::Parent);
        assert_eq!(refusal(&[file(b"/etc/passwd")]), Refusal::Absolute);
        assert_eq!(refusal(&[file(b".")]), Refusal::NoName);
        for kind in [EntryType::Char, EntryType::Block, EntryType::Fifo] {
            assert_eq!(refusal(&[entry(kind, b"dev", b"", b"")]), Refusal::Device);
        }
        let link = entry(EntryType::Symlink, b"out", b"/tmp", b"");
        assert_eq!(refusal(&[link.clone(), file(b"out/file")]), Refusal::ThroughFile);
        assert_eq!(refusal(&[file(b"f"), file(b"f/inside")]), Refusal::ThroughFile);
        let folder = entry(EntryType::Directory, b"out", b"", b"");
        assert_eq!(refusal(&[link.clone(), folder.clone()]), Refusal::Contradiction);
        assert_eq!(refusal(&[folder, link]), Refusal::Contradiction);
        for target in [&b"/etc/passwd"[..], b"../up", b"later", b""] {
            let hard = entry(EntryType::Link, b"hard", target, b"");
            assert_eq!(refusal(&[hard, file(b"later")]), Refusal::HardLink(shown(target)));
        }
        let soft = entry(EntryType::Symlink, b"soft", b"/etc/passwd", b"");
        let hard = entry(EntryType::Link, b"hard", b"soft", b"");
        assert_eq!(refusal(&[soft, hard]), Refusal::HardLink("soft".to_owned()));
        assert_eq!(refusal(&[entry(EntryType::Symlink, b"l", b"", b"")]), Refusal::NoTarget);
        let sparse = entry(EntryType::GNUSparse, b"s", b"", b"");
        assert_eq!(refusal(&[sparse]), Refusal::Unsupported("S".to_owned()));
        let resize = entry(EntryType::XHeader, b"x", b"", b"10 size=9\n");
        assert_eq!(
            refusal(&[resize, file(b"f")]),
            Refusal::Unsupported("pax size".to_owned())
        );
        let pax = entry(EntryType::XHeader, b"x", b"", b"15 path=../out\n");
        assert_eq!(refusal(&[pax, file(b"f")]), Refusal::Parent);
        let long = entry(EntryType::GNULongName, b"x", b"", &vec![b'n'; 70_000]);
        assert_eq!(refusal(&[long, file(b"f")]), Refusal::TooLong);
        let long = entry(EntryType::GNULongName, b"x", b"", &[b'n'; 256]);
        assert_eq!(refusal(&[long, file(b"f")]), Refusal::TooLong);
        assert!(matches!(refusal(&[vec![7; 512]]), Refusal::Malformed(_)));
        assert!(matches!(refusal(&[]), Refusal::Malformed(_)));
    }

    #[test]
    fn a_cut_archive_is_refused_and_stores_nothing() {
        let bench = Bench::new();
        let whole = entry(EntryType::Regular, b"f", b"", &[b'x'; 5000]);
        let error = bench
            .trees
            .read_tar(&mut &whole[..3000], Limits::default())
            .unwrap_err();
        assert!(
            matches!(
                error,
                Error::Archive {
                    refusal: Refusal::Malformed(_),
                    ..
                }
            ),
            "{error:?}"
        );
        assert!(
            !bench
                .trees
                .blobs
                .contains(BlobId::from_bytes(*blake3::hash(&[b'x'; 5000]).as_bytes()))
                .unwrap()
        );
    }

    #[test]
    fn bombs_are_refused_by_count_depth_size_and_ratio() {
        let many: Vec<Vec<u8>> = (0..51).map(|n| file(n.to_string().as_bytes())).collect();
        assert!(matches!(read(&many), Err(Error::Limit { what: "entries", .. })));
        let implied: Vec<Vec<u8>> = (0..9).map(|n| file(format!("{n}/a/b/c/d/e/f").as_bytes())).collect();
        assert!(matches!(read(&implied), Err(Error::Limit { what: "entries", .. })));
        assert!(matches!(
            read(&[file(b"1/2/3/4/5/6/7/8/9")]),
            Err(Error::Limit {
                what: "nested directories",
                ..
            })
        ));
        let mut header = tar::Header::new_gnu();
        header.set_path("big").unwrap();
        header.set_size(1 << 40);
        header.set_mode(0o644);
        header.set_mtime(0);
        header.set_cksum();
        assert!(matches!(
            read(&[header.as_bytes().to_vec()]),
            Err(Error::Limit {
                what: "bytes a file",
                ..
            })
        ));

        let bench = Bench::new();
        let zeros = entry(EntryType::Regular, b"zeros", b"", &vec![0; 80 << 20]);
        let bomb = zstd::encode_all(zeros.as_slice(), 1).unwrap();
        let error = bench
            .trees
            .read_tar(&mut bomb.as_slice(), Limits::default())
            .unwrap_err();
        assert!(
            matches!(
                error,
                Error::Archive {
                    refusal: Refusal::Ratio,
                    ..
                }
            ),
            "{error:?}"
        );
    }

    #[test]
    fn later_entries_count_and_links_are_data() {
        let first = entry(EntryType::Regular, b"./dir//f", b"", b"first");
        let second = entry(EntryType::Regular, b"dir/f", b"", b"second");
        let hard = entry(EntryType::Link, b"h", b"./dir/f", b"");
        let soft = entry(EntryType::Symlink, b"s", b"/etc/../x//y", b"");
        let (bench, revision) = read(&[first, second, hard, soft]).unwrap();
        let dir = bench.made("like", &[].into());
        std::fs::create_dir(dir.join("dir")).unwrap();
        std::fs::write(dir.join("dir/f"), "second").unwrap();
        std::fs::hard_link(dir.join("dir/f"), dir.join("h")).unwrap();
        std::os::unix::fs::symlink("/etc/../x//y", dir.join("s")).unwrap();
        assert_eq!(snapshot(&bench.trees, &dir, None).revision.tree, revision.tree);
    }

    #[test]
    fn what_the_tar_program_packs_is_read() {
        let bench = Bench::new();
        let dir = bench.made("dir", &[].into());
        std::fs::create_dir_all(dir.join("a".repeat(150)).join("b".repeat(150))).unwrap();
        std::fs::write(dir.join("a".repeat(150)).join("b".repeat(150)).join("雪"), "deep").unwrap();
        std::fs::write(dir.join("f"), "x".repeat(3 << 20)).unwrap();
        std::fs::hard_link(dir.join("f"), dir.join("g")).unwrap();
        std::os::unix::fs::symlink("l".repeat(150), dir.join("l")).unwrap();
        let taken = snapshot(&bench.trees, &dir, None).revision;
        for (packing, format) in [
            ("--no-auto-compress", "gnu"),
            ("-z", "pax"),
            ("--zstd", "gnu"),
            ("-z", "gnu"),
        ] {
            if packing == "--zstd" && Command::new("zstd").arg("-V").output().is_err() {
                eprintln!("SKIPPED what_the_tar_program_packs_is_read (zstd): no zstd program");
                assert!(std::env::var_os("EXUVIA_REQUIRE_ALL").is_none());
                continue;
            }
            let tar = bench.dir.path().join("it.tar");
            let mut command = Command::new("tar");
            command
                .arg("-c")
                .arg(packing)
                .arg(format!("--format={format}"))
                .arg("-f")
                .arg(&tar)
                .arg("-C")
                .arg(&dir);
            assert!(command.arg(".").status().unwrap().success());
            let mut stream = std::fs::File::open(&tar).unwrap();
            let read = bench.trees.read_tar(&mut stream, Limits::default()).unwrap();
            assert_eq!(read.tree, taken.tree, "{packing} {format}");
            if format == "pax" {
                // Nanoseconds survive.
                assert_eq!(read.times, taken.times);
            }
        }
    }

    #[test]
    fn a_stream_that_fails_is_not_the_archives_fault() {
        struct Broken;
        impl Read for Broken {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                Err(io::ErrorKind::ConnectionReset.into())
            }
        }
        let bench = Bench::new();
        let start = entry(EntryType::Regular, b"f", b"", &[b'x'; 5000]);
        let mut stream = start[..2000].chain(Broken);
        let error = bench.trees.read_tar(&mut stream, Limits::default()).unwrap_err();
        assert!(matches!(error, Error::Source(_)), "{error:?}");
    }

    #[test]
    fn times_of_pax_are_read() {
        assert_eq!(nanoseconds(b"1.5"), Some(1_500_000_000));
        assert_eq!(nanoseconds(b"-1.5"), Some(-1_500_000_000));
        assert_eq!(nanoseconds(b"12.1234567899"), Some(12_123_456_789));
        assert_eq!(nanoseconds(b"x"), None);
    }
}
