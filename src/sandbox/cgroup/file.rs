//! The files of control groups: read, written, and read back.

use std::path::Path;
use std::{fs, io};

use super::Error;

pub(super) fn read(path: &Path) -> Result<String, Error> {
    crate::process::read_made(path).map_err(|source| Error::file(path, source))
}

pub(super) fn write(path: &Path, value: &str) -> Result<(), Error> {
    // Opened without O_CREAT: on a removed group this must fail.
    let file = fs::OpenOptions::new().write(true).open(path);
    file.and_then(|mut file| io::Write::write_all(&mut file, value.as_bytes()))
        .map_err(|source| Error::file(path, source))
}

/// Writes and reads back.
pub(super) fn set(path: &Path, value: &str) -> Result<(), Error> {
    write(path, value)?;
    match read(path)?.trim() {
        found if found == value => Ok(()),
        found => Err(Error::NotTaken {
            path: path.to_owned(),
            wanted: value.to_owned(),
            found: found.to_owned(),
        }),
    }
}

/// A file that holds one number.
pub(super) fn number(path: &Path) -> Result<u64, Error> {
    parse(path, &read(path)?)
}

/// The value of `key` in a file of `key value` lines; 0 when it has none.
pub(super) fn entry(path: &Path, key: &str) -> Result<u64, Error> {
    let text = read(path)?;
    let value = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' '));
    value.map_or(Ok(0), |value| parse(path, value))
}

/// A cap. `max`, `-1`, and the huge number by which version 1 says "none" are none.
pub(super) fn cap(path: &Path) -> Result<Option<u64>, Error> {
    let value: Option<u64> = read(path)?.trim().parse().ok();
    Ok(value.filter(|value| *value < 1 << 62))
}

/// `None` where the kernel has no such file.
pub(super) fn optional<T>(read: Result<T, Error>) -> Result<Option<T>, Error> {
    match read {
        Ok(value) => Ok(Some(value)),
        Err(Error::File { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn parse(path: &Path, text: &str) -> Result<u64, Error> {
    let number = text.trim().parse();
    number.map_err(|_| Error::file(path, io::Error::other(format!("`{}` is no number", text.trim()))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_that_does_not_take_is_an_error() {
        let error = set(Path::new("/dev/null"), "5").unwrap_err();
        assert_eq!(error.to_string(), "`/dev/null` holds `` where `5` was set");
        let dir = tempfile::tempdir().unwrap();
        // A file that is not there is not made.
        assert!(write(&dir.path().join("pids.max"), "5").is_err());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn numbers_caps_and_entries_are_told_from_what_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let file = |text: &str| {
            let path = dir.path().join("file");
            fs::write(&path, text).unwrap();
            path
        };
        assert_eq!(number(&file("5\n")).unwrap(), 5);
        assert!(number(&file("max\n")).is_err());
        let caps = ["7\n", "max\n", "-1\n", "9223372036854771712\n"].map(|text| cap(&file(text)).unwrap());
        assert_eq!(caps, [Some(7), None, None, None]);
        let keys = ["oom", "oom_kill", "none"].map(|key| entry(&file("oom 3\noom_kill 2\n"), key).unwrap());
        assert_eq!(keys, [3, 2, 0]);
        assert_eq!(optional(number(&dir.path().join("absent"))).unwrap(), None);
    }
}
