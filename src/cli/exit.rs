//! Exit codes, and the one place that turns an error's kind into one.

use crate::error::Kind;

/// Shown by `--help`.
pub const HELP: &str = "\
Exit codes:
  0  done; for a run: FINISHED
  1  it failed: run FAILED, audit log broken, host lacks something
  2  the call is wrong: unknown flag, missing file, value out of range, policy not valid
  3  the run is EXHAUSTED (a budget)         4  the run is CANCELLED
  5  the run waits: WAITING_APPROVAL, PAUSED
  6  refused: wrong state, no such thing, already there, not allowed
  7  something needed is not there: server, model endpoint, engine, host feature
  8  a disk is full: the sandbox's own, or one here
 70  a bug of ours                         130  interrupted; a run can be resumed
  `sandbox run`, `exec` and `attach` pass the command's own code; else 124 timed out, 125 no sandbox, 126 not
  executable, 127 not found, 130 left, 137 out of memory or killed (said on stderr)";

/// The stable reason of a disk that is full, as a server gives it.
pub const DISK_FULL: &str = "DISK_FULL";

/// The reason of work that an interrupt ended, and that left nothing.
pub const INTERRUPTED: &str = "INTERRUPTED";

/// How a command ended, as its exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// 0: done; for a run: FINISHED.
    Ok,
    /// 1: the thing itself failed (run FAILED, audit chain broken, host lacks something).
    Failed,
    /// 2: the call is wrong: unknown flag, missing file, invalid value; a policy that is not valid, checked or used.
    Usage,
    /// 3: the run reached a limit (EXHAUSTED).
    Exhausted,
    /// 4: the run was cancelled.
    Cancelled,
    /// 5: the run is parked (WAITING_APPROVAL, PAUSED).
    Parked,
    /// 6: refused: policy, wrong state, no such thing, already there.
    Refused,
    /// 7: something needed is not there: server, model endpoint, engine, host feature.
    Unavailable,
    /// 8: a disk is full.
    DiskFull,
    /// 70: a bug of ours.
    Internal,
    /// Of `sandbox run`, `exec`, `attach` and `run-code`: the command's own.
    Passed(u8),
}

impl Exit {
    pub fn code(self) -> u8 {
        match self {
            Self::Ok => 0,
            Self::Failed => 1,
            Self::Usage => 2,
            Self::Exhausted => 3,
            Self::Cancelled => 4,
            Self::Parked => 5,
            Self::Refused => 6,
            Self::Unavailable => 7,
            Self::DiskFull => 8,
            Self::Internal => 70,
            Self::Passed(code) => code,
        }
    }
}

impl From<Exit> for std::process::ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}

/// An error as a person at a terminal needs it.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    pub kind: Kind,
    pub message: String,
    /// What to do about it.
    pub hint: Option<String>,
    /// The stable reason that a server gave.
    pub reason: Option<String>,
}

impl Error {
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            hint: None,
            reason: None,
        }
    }

    /// From a module's error, with its chain of causes.
    pub fn of(kind: Kind, error: &dyn std::error::Error) -> Self {
        Self::new(kind, crate::error::chain(error))
    }

    /// Something here that could not be written: a disk that is full, a place where nobody may, or one that is not there.
    pub fn local(doing: &str, error: &std::io::Error) -> Self {
        use std::io::ErrorKind as Io;
        let (kind, reason) = match error.kind() {
            Io::StorageFull | Io::QuotaExceeded => (Kind::Exhausted, Some(DISK_FULL.to_owned())),
            Io::PermissionDenied | Io::ReadOnlyFilesystem => (Kind::Denied, None),
            Io::AlreadyExists | Io::NotADirectory | Io::IsADirectory => (Kind::Exists, None),
            Io::NotFound => (Kind::Invalid, None),
            _ => (Kind::Unavailable, None),
        };
        Self {
            reason,
            ..Self::new(kind, format!("{doing}: {error}"))
        }
    }

    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    pub fn exit(&self) -> Exit {
        if self.reason.as_deref() == Some(DISK_FULL) {
            return Exit::DiskFull;
        }
        if self.reason.as_deref() == Some(INTERRUPTED) {
            return Exit::Passed(130);
        }
        match self.kind {
            Kind::Invalid => Exit::Usage,
            Kind::Denied | Kind::NotFound | Kind::Exists | Kind::WrongState | Kind::Conflict => Exit::Refused,
            Kind::Exhausted | Kind::Deadline | Kind::Unavailable => Exit::Unavailable,
            Kind::Internal => Exit::Internal,
        }
    }
}

macro_rules! from_module {
    ($($error:path),*) => {
        $(impl From<$error> for Error {
            fn from(error: $error) -> Self {
                Self::of(error.kind(), &error)
            }
        })*
    };
}
from_module!(
    crate::store::Error,
    crate::sandbox::Error,
    crate::model::Error,
    crate::policy::Error,
    crate::secret::Error,
    crate::workspace::Error,
    crate::run::Error,
    crate::workdir::Error,
    crate::assembly::Error,
    crate::border::Error,
    crate::audit::Error,
    crate::task::FileError
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_has_a_code_of_its_own() {
        let mut error = Error::new(Kind::Exhausted, "no space left on device");
        assert_eq!(error.exit(), Exit::Unavailable);
        error.reason = Some(DISK_FULL.to_owned());
        assert_eq!(error.exit(), Exit::DiskFull);
        let of = |errno| Error::local("cannot copy `a`", &std::io::Error::from_raw_os_error(errno));
        for (errno, exit) in [
            (nix::libc::ENOSPC, Exit::DiskFull),
            (nix::libc::EDQUOT, Exit::DiskFull),
            (nix::libc::EACCES, Exit::Refused),
            (nix::libc::EROFS, Exit::Refused),
            (nix::libc::ENOENT, Exit::Usage),
            (nix::libc::EIO, Exit::Unavailable),
        ] {
            assert_eq!(of(errno).exit(), exit, "{errno}");
        }
        assert_eq!(
            of(nix::libc::ENOSPC).message,
            "cannot copy `a`: No space left on device (os error 28)"
        );
    }
}
