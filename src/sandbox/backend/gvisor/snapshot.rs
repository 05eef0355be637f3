//! Memory snapshots: a sandbox with all that runs in it as files, to go on from later, more than once.
//!
//! A snapshot is a directory: what `runsc checkpoint` wrote, and `snapshot.json`, which says what a sandbox must be like to go
//! on from it. It is as confidential as the memory that it holds, and is trusted: it must come from a checkpoint of this host.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Runsc;
use crate::forge::{Ask, Checkpoint, Fault, Ready, Said, ask, said};
use crate::ids::SandboxId;
use crate::sandbox::backend::Still;
use crate::sandbox::backend::oci::socket;
use crate::sandbox::{self, Isolation, Spec};
use crate::wire;

/// In a sandbox's directory: where a checkpoint is written.
pub(super) const MEMORY: &str = "memory";
/// In a sandbox's directory: what another must be like to go on from a checkpoint of this one.
pub(super) const SHAPE: &str = "shape";

const FACTS: &str = "snapshot.json";
const FORMAT: u32 = 1;
/// For a checkpoint: some milliseconds for each megabyte in use.
const DEADLINE: Duration = Duration::from_secs(300);

/// Why there is no snapshot, or why it is not used.
#[derive(Debug, thiserror::Error)]
pub(in crate::sandbox::backend) enum Error {
    #[error("{0}")]
    Unsupported(String),
    #[error("{doing}: {source}")]
    Io {
        doing: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("{0}")]
    Refused(String),
}

impl Error {
    pub fn of(self, id: &SandboxId) -> sandbox::Error {
        match self {
            Self::Unsupported(missing) => sandbox::Error::Unsupported {
                wanted: format!("a memory snapshot of sandbox `{id}`"),
                missing,
            },
            other @ (Self::Io { .. } | Self::Refused(_)) => sandbox::Error::failed("checkpoint or restore", id, other),
        }
    }
}

fn io(doing: &'static str) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Io { doing, source }
}

/// What a sandbox must be like.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Facts {
    format: u32,
    /// Its memory is laid out by this version.
    runsc: String,
    /// The hash of all that is mounted: restored memory holds open files in it.
    shape: String,
}

impl Facts {
    fn new(runsc: &Runsc, shape: String) -> Result<Self, Error> {
        Ok(Self {
            format: FORMAT,
            runsc: runsc.version().map_err(Error::Unsupported)?,
            shape,
        })
    }
}

/// Takes a snapshot of the sandbox in `home`.
pub(in crate::sandbox::backend) fn take(home: &Path, dir: &Path, runsc: Option<&Runsc>) -> Result<Still, Error> {
    let connected = fs::File::open(home).and_then(|home| socket::connect(&home, socket::CONTROL));
    let mut control = match connected {
        Ok(control) => control,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(Error::Unsupported("only isolation `gvisor` has one".to_owned()));
        }
        Err(error) => return Err(io("it does not answer")(error)),
    };
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(io("make the directory"))?;
    let runsc = runsc.ok_or_else(|| Error::Unsupported("`runsc` is not there any more".to_owned()))?;
    let shape = fs::read_to_string(home.join(SHAPE)).map_err(io("read its shape"))?;
    let facts = Facts::new(runsc, shape)?;
    // Of an earlier one that failed.
    for file in fs::read_dir(home.join(MEMORY))
        .map_err(io("list what is there"))?
        .flatten()
    {
        fs::remove_file(file.path()).map_err(io("remove what is there"))?;
    }
    let question = Ask {
        kind: Some(ask::Kind::Checkpoint(Checkpoint {})),
    };
    let answer = control
        .set_nonblocking(false)
        .and_then(|()| control.set_read_timeout(Some(DEADLINE)))
        .and_then(|()| wire::write(&mut control, &question))
        .and_then(|()| wire::read::<Said>(&mut control))
        .map_err(io("ask for it"))?;
    match answer.and_then(|said| said.kind) {
        Some(said::Kind::Ready(Ready {})) => {}
        Some(said::Kind::Fault(Fault { step, .. })) => return Err(Error::Refused(format!("it could not {step}"))),
        Some(said::Kind::Made(_)) | None => return Err(Error::Refused("its supervisor ended meanwhile".to_owned())),
    }
    let files = fs::read_dir(home.join(MEMORY)).map_err(io("list it"))?;
    for file in files.flatten() {
        carry(&file.path(), &dir.join(file.file_name())).map_err(io("move it"))?;
    }
    // Last: with it the snapshot is whole.
    let facts = serde_json::to_vec(&facts).map_err(|error| Error::Refused(error.to_string()))?;
    fs::write(dir.join(FACTS), facts).map_err(io("write what it is"))?;
    Ok(Still { _line: control })
}

/// Moves a file, to another file system too.
fn carry(from: &Path, to: &Path) -> io::Result<()> {
    match fs::rename(from, to) {
        Err(error) if error.kind() == io::ErrorKind::CrossesDevices => {
            fs::copy(from, to)?;
            fs::remove_file(from)
        }
        other => other,
    }
}

/// Whether a sandbox of this `spec` can go on from the snapshot.
pub(in crate::sandbox::backend) fn check(dir: &Path, spec: &Spec, runsc: Option<&Runsc>) -> Result<(), Error> {
    let (Isolation::Gvisor, Some(runsc)) = (spec.isolation, runsc) else {
        return Err(Error::Unsupported(
            "only isolation `gvisor` can go on from one".to_owned(),
        ));
    };
    let text = fs::read(dir.join(FACTS)).map_err(io("read the snapshot"))?;
    let found: Facts = serde_json::from_slice(&text)
        .map_err(|_| Error::Refused(format!("`{}` is not of this version", dir.join(FACTS).display())))?;
    let wanted = Facts::new(runsc, shape(spec))?;
    match found == wanted {
        true => Ok(()),
        false if found.runsc != wanted.runsc => Err(Error::Refused(format!(
            "the snapshot was made by runsc {}, and this host has {}",
            found.runsc, wanted.runsc
        ))),
        false => Err(Error::Refused(
            "the snapshot is of a sandbox with another image, other mounts or other limits of its files".to_owned(),
        )),
    }
}

/// What restored memory relies on.
pub(in crate::sandbox::backend) fn shape(spec: &Spec) -> String {
    let parts: (_, _, _, Vec<(&PathBuf, &PathBuf)>) = (
        spec.image.to_string(),
        spec.workspace.is_some(),
        (spec.limits.tmp_bytes, spec.limits.shm_bytes),
        spec.mounts.iter().map(|mount| (&mount.source, &mount.target)).collect(),
    );
    blake3::hash(format!("{parts:?}").as_bytes()).to_hex().to_string()
}
