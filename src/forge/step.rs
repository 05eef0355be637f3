//! A step of the set-up that failed, and its name.

use std::ffi::{CString, OsStr};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use nix::errno::Errno;

use super::Fault;

/// Most bytes of a step's name that are told.
const LONGEST: usize = 1024;

/// Names the step that an error belongs to.
pub(super) trait During<T> {
    fn during(self, step: impl FnOnce() -> String) -> Result<T, Fault>;
}

impl<T, E: Into<io::Error>> During<T> for Result<T, E> {
    fn during(self, step: impl FnOnce() -> String) -> Result<T, Fault> {
        self.map_err(|error| {
            let error: io::Error = error.into();
            fault(step(), Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO)))
        })
    }
}

pub(super) fn fault(mut step: String, errno: Errno) -> Fault {
    let mut end = step.len().min(LONGEST);
    while !step.is_char_boundary(end) {
        end -= 1;
    }
    step.truncate(end);
    Fault {
        step,
        errno: errno as i32,
    }
}

pub(super) fn shown(path: &[u8]) -> String {
    format!("`{}`", String::from_utf8_lossy(path))
}

pub(super) fn path(bytes: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}

/// `bytes` as the kernel takes names.
pub(super) fn name(bytes: &[u8]) -> Result<CString, Fault> {
    CString::new(bytes).map_err(|_| fault(format!("use {}, which holds a NUL", shown(bytes)), Errno::EINVAL))
}
