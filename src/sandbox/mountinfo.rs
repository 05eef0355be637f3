//! Mount tables as the kernel writes them: proc_pid_mountinfo(5). Knows nothing of what a table should hold.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// One mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub id: u64,
    pub parent: u64,
    /// What of its file system is shown.
    pub root: PathBuf,
    pub point: PathBuf,
    /// Of this mount: `ro`, `nosuid`, …
    pub options: Vec<String>,
    /// `shared:7`, `master:1`, …; none for a private mount.
    pub propagation: Vec<String>,
    pub kind: String,
    pub source: String,
    /// Of the file system.
    pub super_options: Vec<String>,
}

impl Entry {
    pub fn has(&self, option: &str) -> bool {
        self.options.iter().any(|own| own == option)
    }

    /// The value of an option of the file system, `size=…`.
    pub fn value(&self, option: &str) -> Option<&str> {
        let mut options = self.super_options.iter();
        options.find_map(|own| own.strip_prefix(option)?.strip_prefix('='))
    }
}

/// Reads a table. Lines that make no sense are left out: the kernel writes none.
pub fn parse(table: &str) -> Vec<Entry> {
    table.lines().filter_map(line).collect()
}

fn line(line: &str) -> Option<Entry> {
    let (left, right) = line.split_once(" - ")?;
    let mut left = left.split(' ');
    let (id, parent) = (left.next()?.parse().ok()?, left.next()?.parse().ok()?);
    let (root, point) = (unescape(left.nth(1)?), unescape(left.next()?));
    let options = words(left.next()?);
    let propagation = left.map(str::to_owned).collect();
    let mut right = right.split(' ');
    Some(Entry {
        id,
        parent,
        root,
        point,
        options,
        propagation,
        kind: right.next()?.to_owned(),
        source: right.next()?.to_owned(),
        super_options: words(right.next().unwrap_or_default()),
    })
}

fn words(text: &str) -> Vec<String> {
    text.split(',').map(str::to_owned).collect()
}

/// Space, tab, line break and backslash are written in octal.
fn unescape(text: &str) -> PathBuf {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let octal = (*first == b'\\').then(|| after.get(..3)).flatten();
        let octal = octal.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        match octal {
            Some(byte) => {
                bytes.push(byte);
                rest = &after[3..];
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read_whole() {
        let table = "36 35 98:0 /mnt1 /with\\040space rw,nosuid shared:1 master:2 - ext4 /dev/root rw,size=4k\n\
                     41 36 0:30 / /proc ro - proc proc\nnonsense\n";
        let expected = Entry {
            id: 36,
            parent: 35,
            root: "/mnt1".into(),
            point: "/with space".into(),
            options: ["rw", "nosuid"].map(str::to_owned).into(),
            propagation: ["shared:1", "master:2"].map(str::to_owned).into(),
            kind: "ext4".to_owned(),
            source: "/dev/root".to_owned(),
            super_options: ["rw", "size=4k"].map(str::to_owned).into(),
        };
        let found = parse(table);
        assert_eq!((found.len(), &found[0]), (2, &expected));
        assert_eq!((found[0].value("size"), found[0].has("nosuid")), (Some("4k"), true));
        assert_eq!(found[1].propagation, Vec::<String>::new());
    }
}
