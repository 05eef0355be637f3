//! Out of a sandbox.

use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use super::land::{Folder, There};
use super::{Done, base, is_content, joined};
use crate::api::proto;
use crate::api::proto::file_info::Type;
use crate::cli::Error;
use crate::cli::sandbox::{Client, files, show};
use crate::error::Kind;
use crate::workspace::Name;

/// Entries that are copied; the other side could go on for ever.
const MOST_ENTRIES: u64 = 1_000_000;
/// How deep a directory may lie.
const DEEPEST: usize = 256;

/// A copy out of one sandbox.
pub(super) struct Down {
    client: Client,
    sandbox: String,
    limit: u64,
    done: Done,
}

/// What is still to be copied: an entry, and where it goes.
struct Todo {
    info: proto::FileInfo,
    /// As it is asked for: never what the other side calls it, but for the last component.
    path: Vec<u8>,
    into: Arc<Folder>,
    name: Name,
    depth: usize,
}

impl Down {
    pub fn new(client: Client, sandbox: String, limit: u64) -> Self {
        Self {
            client,
            sandbox,
            limit,
            done: Done::default(),
        }
    }

    /// Copies a file, or a directory with all that is in it.
    pub async fn copy(mut self, path: Vec<u8>, target: &Path) -> Result<Done, Error> {
        let info = files::stat(&mut self.client, &self.sandbox, &path).await?;
        let mut todo = Vec::new();
        if is_content(&path) && info.r#type() == Type::Directory && target.is_dir() {
            let into = Arc::new(Folder::open(target).map_err(|error| failed(target.as_os_str().as_bytes(), error))?);
            self.enter(&path, into, 0, &mut todo).await?;
        } else {
            let (into, name) = place(&path, target)?;
            todo.push(Todo {
                info,
                path,
                into: Arc::new(into),
                name,
                depth: 0,
            });
        }
        while let Some(next) = todo.pop() {
            if self.done.entries() >= MOST_ENTRIES {
                return Err(Error::new(
                    Kind::Exhausted,
                    format!("there are more than {MOST_ENTRIES} entries"),
                ));
            }
            self.one(next, &mut todo).await?;
        }
        Ok(self.done)
    }

    /// A file to standard output.
    pub async fn print(mut self, path: Vec<u8>) -> Result<(), Error> {
        let mut chunks = self.read(&path).await?;
        let mut stdout = std::io::stdout();
        while let Some(data) = self.next(&mut chunks).await? {
            match stdout.write_all(&data).and_then(|()| stdout.flush()) {
                Ok(()) => {}
                // Nobody reads any more.
                Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => return Ok(()),
                Err(error) => return Err(Error::local("cannot write to standard output", &error)),
            }
        }
        Ok(())
    }

    async fn one(&mut self, next: Todo, todo: &mut Vec<Todo>) -> Result<(), Error> {
        let Todo {
            info,
            path,
            into,
            name,
            depth,
        } = next;
        let fail = |error| failed(&path, error);
        match info.r#type() {
            Type::Directory => {
                let folder = into.folder(&name, info.mode).map_err(fail)?;
                self.done.directories += 1;
                self.enter(&path, Arc::new(folder), depth + 1, todo).await?;
            }
            Type::Regular => {
                let mut chunks = self.read(&path).await?;
                let mut draft = into.draft(info.mode).map_err(fail)?;
                while let Some(data) = self.next(&mut chunks).await? {
                    draft.file.write_all(&data).map_err(fail)?;
                }
                draft.finish(&name).map_err(fail)?;
                self.done.files += 1;
            }
            Type::Symlink => {
                into.link(&name, &info.link_target).map_err(fail)?;
                self.done.links += 1;
            }
            Type::Other | Type::Unspecified => self.done.left_out.push(path),
        }
        Ok(())
    }

    /// Lists a directory, and puts what is in it on the list.
    async fn enter(&mut self, path: &[u8], into: Arc<Folder>, depth: usize, todo: &mut Vec<Todo>) -> Result<(), Error> {
        if depth > DEEPEST {
            let message = format!("`{}` lies more than {DEEPEST} levels deep", show::name(path));
            return Err(Error::new(Kind::Exhausted, message));
        }
        for info in files::list(&mut self.client, &self.sandbox, path, 1).await? {
            // One component, and no more, whatever stands before it.
            let last = info.path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
            let name = Name::new(last).map_err(|error| Error::of(Kind::Denied, &error))?;
            todo.push(Todo {
                path: joined(path, &name),
                info,
                into: Arc::clone(&into),
                name,
                depth,
            });
        }
        Ok(())
    }

    async fn read(&mut self, path: &[u8]) -> Result<tonic::Streaming<proto::FileChunk>, Error> {
        let request = proto::ReadFileRequest {
            sandbox_id: self.sandbox.clone(),
            path: path.to_vec(),
            offset: 0,
            length: 0,
        };
        Ok(self.client.read_file(request).await?.into_inner())
    }

    async fn next(&mut self, chunks: &mut tonic::Streaming<proto::FileChunk>) -> Result<Option<bytes::Bytes>, Error> {
        let Some(chunk) = chunks.message().await? else {
            return Ok(None);
        };
        self.done.bytes += chunk.data.len() as u64;
        if self.done.bytes > self.limit {
            let message = format!("there are more than {}", show::size(self.limit));
            return Err(Error::new(Kind::Exhausted, message).hint("raise --limit"));
        }
        Ok(Some(chunk.data))
    }
}

/// Where it goes: under its own name into a directory that is there, else under the name that was asked for.
fn place(path: &[u8], target: &Path) -> Result<(Folder, Name), Error> {
    let shown = target.as_os_str().as_bytes();
    let into = |folder: &Path, name: Option<Name>| {
        let name = name.ok_or_else(|| {
            Error::new(
                Kind::Invalid,
                format!("`{}` has no name to copy it under", show::name(path)),
            )
            .hint("name a target that does not exist yet, or end the source in `/.` to copy what is in it")
        })?;
        let folder = Folder::open(folder).map_err(|error| failed(folder.as_os_str().as_bytes(), error))?;
        Ok((folder, name))
    };
    if target.is_dir() {
        return into(target, base(path));
    }
    if shown.ends_with(b"/") {
        let message = format!("there is no directory `{}`", show::name(shown));
        return Err(Error::new(Kind::Invalid, message));
    }
    let parent = target.parent().filter(|parent| !parent.as_os_str().is_empty());
    let (folder, name) = into(parent.unwrap_or(Path::new(".")), base(shown))?;
    match folder.there(&name).map_err(|error| failed(shown, error))? {
        There::Nothing | There::Else => Ok((folder, name)),
        There::Directory => into(target, base(path)),
    }
}

fn failed(path: &[u8], error: std::io::Error) -> Error {
    Error::local(&format!("cannot copy `{}`", show::name(path)), &error)
}
