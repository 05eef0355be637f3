//! Control groups: the caps of a sandbox, their read-back, and the kernel's counters. Version 1, version 2 and both at once.
//!
//! Owns: where each controller lives on this host (`detect`), the group `exuvia/ID` of a sandbox with its processes, freezing
//! and removal (`group`), its caps (`limits`, `devices`), and what the kernel counts and holds, also of a group that an engine made
//! (`counters`). Must not know: who runs in a group or why. Every limit is read back after it was written; one that did not
//! take is an error, so that a sandbox is never weaker than asked.
//!
//! A process enters a group by itself (see [`Group::doors`]): moving a whole process from outside waits for a grace period
//! of the kernel, a single thread that moves itself does not.

mod counters;
mod detect;
mod devices;
mod file;
mod group;
mod io;
mod limits;

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

pub use counters::Enforced;
pub use detect::Hierarchies;
pub use devices::Devices;
pub use group::Group;
pub use limits::{PERIOD_US, host_swaps, quota_us, within_a_page};

/// What a sandbox needs counted or capped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Controller {
    Memory,
    Pids,
    Cpu,
    /// Version 1 only; part of `cpu` in version 2.
    Cpuacct,
    /// Version 1 only; part of the core in version 2.
    Freezer,
    /// Version 1 only. Under version 2 a program of the kernel's, which needs no controller.
    Devices,
    /// Version 2 only, and only for sandboxes that ask for it.
    Io,
}

impl Controller {
    /// All that a host with version 1 must have.
    pub const V1: [Self; 6] = [
        Self::Memory,
        Self::Pids,
        Self::Cpu,
        Self::Cpuacct,
        Self::Freezer,
        Self::Devices,
    ];
    /// All that a host with version 2 must have.
    pub const V2: [Self; 3] = [Self::Memory, Self::Pids, Self::Cpu];
}

impl fmt::Display for Controller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Memory => "memory",
            Self::Pids => "pids",
            Self::Cpu => "cpu",
            Self::Cpuacct => "cpuacct",
            Self::Freezer => "freezer",
            Self::Devices => "devices",
            Self::Io => "io",
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    V1,
    V2,
}

/// What can go wrong with a control group.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("this host has no usable control groups: version 1 lacks {v1}, version 2 lacks {v2}")]
    Missing { v1: String, v2: String },
    #[error("`{}`", path.display())]
    File {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("{0}")]
    NoRates(String),
    #[error("`{}` holds `{found}` where `{wanted}` was set", path.display())]
    NotTaken {
        path: PathBuf,
        wanted: String,
        found: String,
    },
    #[error("`{}` did not {what} within {deadline:?}", path.display())]
    Late {
        path: PathBuf,
        what: &'static str,
        deadline: Duration,
    },
}

impl Error {
    fn file(path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        Self::File {
            path: path.into(),
            source,
        }
    }

    /// The group, or the process that was asked about, is no more.
    fn is_gone(&self) -> bool {
        match self {
            Self::File { source, .. } => {
                source.kind() == std::io::ErrorKind::NotFound || source.raw_os_error() == Some(libc::ENODEV)
            }
            Self::Missing { .. } | Self::NoRates(_) | Self::NotTaken { .. } | Self::Late { .. } => false,
        }
    }

    fn is_busy(&self) -> bool {
        match self {
            Self::File { source, .. } => source.raw_os_error() == Some(libc::EBUSY),
            Self::Missing { .. } | Self::NoRates(_) | Self::NotTaken { .. } | Self::Late { .. } => false,
        }
    }
}
