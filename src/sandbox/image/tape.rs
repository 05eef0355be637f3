//! Reading a tar entry by entry, with bounds that the library has not: names come from headers of any length otherwise, and
//! two sizes for one file are the ground of smuggling.

use std::io::Read;

use tar::EntryType;

use super::{Bounds, Error, Job};

/// Longest extended header (names, and what we do not read), in bytes.
const LONGEST_EXTENSION: u64 = 1 << 20;

/// The header of one entry.
#[derive(Debug)]
pub(super) struct Head {
    pub path: Vec<u8>,
    /// What a link holds.
    pub link: Option<Vec<u8>>,
    pub kind: EntryType,
    /// Permissions, without set-id and sticky bits.
    pub mode: u32,
    /// Seconds since the Unix epoch.
    pub modified: u64,
    /// Bytes of the file that follows.
    pub size: u64,
    /// Where those begin in the tar.
    pub offset: u64,
}

impl Head {
    pub fn name(&self) -> String {
        String::from_utf8_lossy(&self.path).into_owned()
    }
}

/// Counts what all tars of one image hold.
#[derive(Debug)]
pub(super) struct Tally {
    bounds: Bounds,
    pub entries: u64,
    pub bytes: u64,
}

impl Tally {
    pub fn new(bounds: Bounds) -> Self {
        Self {
            bounds,
            entries: 0,
            bytes: 0,
        }
    }

    fn add(&mut self, bytes: u64) -> Result<(), Error> {
        self.entries += 1;
        self.bytes = self.bytes.saturating_add(bytes);
        let too_large = |what, limit| Err(Error::TooLarge { what, limit });
        if self.entries > self.bounds.entries {
            return too_large("entries", self.bounds.entries);
        }
        if self.bytes > self.bounds.bytes {
            return too_large("bytes", self.bounds.bytes);
        }
        Ok(())
    }
}

/// What extended headers say of the entry after them.
#[derive(Default)]
struct Extended {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    pax: Option<Vec<u8>>,
}

/// Gives each entry of a tar to `with`, in order, with the bytes of its file.
pub(super) fn each(
    from: impl Read,
    tally: &mut Tally,
    job: &Job,
    mut with: impl FnMut(Head, &mut dyn Read) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut archive = tar::Archive::new(job.reader(from));
    let mut extended = Extended::default();
    for entry in archive.entries().map_err(Error::tar)?.raw(true) {
        let mut entry = entry.map_err(Error::tar)?;
        tally.add(entry.size())?;
        let kind = entry.header().entry_type();
        match kind {
            EntryType::GNULongName => extended.path = Some(text(&mut entry)?),
            EntryType::GNULongLink => extended.link = Some(text(&mut entry)?),
            EntryType::XHeader => extended.pax = Some(extension(&mut entry)?),
            // Says nothing about single files that we would believe.
            EntryType::XGlobalHeader => {}
            _ => {
                let head = head(&entry, kind, std::mem::take(&mut extended))?;
                with(head, &mut entry)?;
            }
        }
    }
    Ok(())
}

fn head<R: Read>(entry: &tar::Entry<'_, R>, kind: EntryType, extended: Extended) -> Result<Head, Error> {
    let header = entry.header();
    let mut head = Head {
        path: extended.path.unwrap_or_else(|| header.path_bytes().into_owned()),
        link: extended
            .link
            .or_else(|| header.link_name_bytes().map(|name| name.into_owned())),
        kind,
        mode: header.mode().unwrap_or(0o644) & 0o777,
        modified: header.mtime().unwrap_or_default(),
        size: entry.size(),
        offset: entry.raw_file_position(),
    };
    if let Some(pax) = extended.pax {
        let mut rest = pax.as_slice();
        while !rest.is_empty() {
            let (key, value, after) = record(rest).ok_or_else(|| refused(&head, "has a broken extended header"))?;
            rest = after;
            match key {
                b"path" => head.path = value.to_vec(),
                b"linkpath" => head.link = Some(value.to_vec()),
                b"mtime" => head.modified = seconds(value).unwrap_or(head.modified),
                b"size" if value != head.size.to_string().as_bytes() => return Err(refused(&head, "has two sizes")),
                key if key.starts_with(b"GNU.sparse.") => return Err(refused(&head, SPARSE)),
                // Owners, extended attributes, file capabilities: dropped.
                _ => {}
            }
        }
    }
    if kind.is_gnu_sparse() {
        return Err(refused(&head, SPARSE));
    }
    Ok(head)
}

const SPARSE: &str = "is a sparse file: make the tar without `--sparse`";

fn refused(head: &Head, why: &'static str) -> Error {
    Error::Entry { name: head.name(), why }
}

fn extension<R: Read>(entry: &mut tar::Entry<'_, R>) -> Result<Vec<u8>, Error> {
    if entry.size() > LONGEST_EXTENSION {
        return Err(Error::TooLarge {
            what: "bytes in one extended header",
            limit: LONGEST_EXTENSION,
        });
    }
    let mut bytes = Vec::new();
    entry.read_to_end(&mut bytes).map_err(Error::tar)?;
    Ok(bytes)
}

/// A GNU long name, without the zero at its end.
fn text<R: Read>(entry: &mut tar::Entry<'_, R>) -> Result<Vec<u8>, Error> {
    let mut bytes = extension(entry)?;
    while bytes.last() == Some(&0) {
        bytes.pop();
    }
    Ok(bytes)
}

/// The first record of a pax header, `LENGTH KEY=VALUE\n`, and the rest. By its length: values may hold line breaks.
fn record(text: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let digits = text.iter().position(|&byte| byte == b' ')?;
    let length: usize = std::str::from_utf8(&text[..digits]).ok()?.parse().ok()?;
    let pair = text.get(digits + 1..length)?.strip_suffix(b"\n")?;
    let equals = pair.iter().position(|&byte| byte == b'=')?;
    Some((&pair[..equals], &pair[equals + 1..], &text[length..]))
}

/// Of a decimal number of seconds with a fraction.
fn seconds(text: &[u8]) -> Option<u64> {
    std::str::from_utf8(text).ok()?.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pax_record_is_as_long_as_it_says() {
        let two = b"12 path=a\nb\n11 mtime=5\n";
        let (key, value, rest) = record(two).unwrap();
        assert_eq!((key, value), (b"path".as_slice(), b"a\nb".as_slice()));
        assert_eq!(rest, b"11 mtime=5\n".as_slice());
        for bad in [
            "",
            "x",
            "5 a=b\n",
            "999 a=b\n",
            "0 a=b\n",
            "6 a=b ",
            "6 abc\n",
            "-6 a=b\n",
        ] {
            assert!(record(bad.as_bytes()).is_none(), "{bad}");
        }
        assert_eq!(seconds(b"1700000000.25"), Some(1_700_000_000));
    }
}
