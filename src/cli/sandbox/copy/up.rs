//! Into a sandbox.

use std::fs::{File, Metadata, OpenOptions};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use futures::StreamExt;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;

use super::{Done, base, is_content, joined};
use crate::api::proto;
use crate::api::proto::file_info::Type;
use crate::cli::sandbox::{Client, files, show};
use crate::cli::{Error, remote};
use crate::error::Kind;

/// Bytes of a file in one message.
const CHUNK: usize = 256 << 10;

/// A copy into one sandbox.
pub(super) struct Up {
    client: Client,
    sandbox: String,
    done: Done,
}

impl Up {
    pub fn new(client: Client, sandbox: String) -> Self {
        Self {
            client,
            sandbox,
            done: Done::default(),
        }
    }

    /// Copies a file, a link, or a directory with all that is in it.
    pub async fn copy(mut self, source: &Path, path: Vec<u8>) -> Result<Done, Error> {
        let shown = source.as_os_str().as_bytes();
        let metadata = source.symlink_metadata().map_err(|error| unreadable(source, &error))?;
        let there = self.there(&path).await?;
        let path = match there {
            Some(Type::Directory) if metadata.is_dir() && is_content(shown) => path,
            Some(Type::Directory) => {
                let real = || base(source.canonicalize().ok()?.as_os_str().as_bytes());
                let name = base(shown).or_else(real);
                let name = name.ok_or_else(|| Error::new(Kind::Invalid, "the source has no name to copy it under"))?;
                joined(&path, &name)
            }
            Some(_) | None if path.ends_with(b"/") => {
                let message = format!("there is no directory `{}` in the sandbox", show::name(&path));
                return Err(Error::new(Kind::NotFound, message));
            }
            Some(_) | None => path,
        };
        let mut todo = vec![(source.to_owned(), path)];
        while let Some((source, path)) = todo.pop() {
            self.one(source, path, &mut todo).await?;
        }
        Ok(self.done)
    }

    /// Standard input as a file.
    pub async fn stdin(mut self, path: Vec<u8>) -> Result<Done, Error> {
        self.write(Path::new("-"), std::io::stdin(), path, 0).await?;
        Ok(self.done)
    }

    async fn one(&mut self, source: PathBuf, path: Vec<u8>, todo: &mut Vec<(PathBuf, Vec<u8>)>) -> Result<(), Error> {
        let fail = |error: std::io::Error| unreadable(&source, &error);
        let metadata = source.symlink_metadata().map_err(fail)?;
        if metadata.is_dir() {
            self.make_directory(&path).await?;
            self.done.directories += 1;
            let mut entries: Vec<_> = source
                .read_dir()
                .map_err(fail)?
                .collect::<Result<_, _>>()
                .map_err(fail)?;
            // Popped from the end: in the order of the names.
            entries.sort_by_key(|entry| std::cmp::Reverse(entry.file_name()));
            for entry in entries {
                todo.push((entry.path(), joined(&path, entry.file_name().as_bytes())));
            }
        } else if metadata.is_symlink() {
            let target = source.read_link().map_err(fail)?;
            self.link(target.as_os_str().as_bytes(), &path).await?;
            self.done.links += 1;
        } else if metadata.is_file() {
            let (file, metadata) = open(&source).map_err(fail)?;
            // 0 would stand for the server's choice; a file that nobody may read is not what that says.
            let mode = (metadata.permissions().mode() & 0o777).max(0o400);
            self.write(&source, file, path, mode).await?;
        } else {
            self.done.left_out.push(source.as_os_str().as_bytes().to_vec());
        }
        Ok(())
    }

    /// What a path in the sandbox names, links followed; `None` = nothing.
    async fn there(&mut self, path: &[u8]) -> Result<Option<Type>, Error> {
        match files::stat(&mut self.client, &self.sandbox, path).await {
            Ok(info) if info.r#type() == Type::Symlink => {
                // A link to a directory is one, for whoever copies into it.
                let behind = files::stat(&mut self.client, &self.sandbox, &joined(path, b".")).await;
                Ok(Some(behind.map_or(Type::Symlink, |info| info.r#type())))
            }
            Ok(info) => Ok(Some(info.r#type())),
            Err(status) => {
                let reason = remote::reason(&status).unwrap_or_default();
                match reason == "FILE_NOT_FOUND" || (status.code() == Code::NotFound && reason.is_empty()) {
                    true => Ok(None),
                    false => Err(status.into()),
                }
            }
        }
    }

    async fn make_directory(&mut self, path: &[u8]) -> Result<(), Error> {
        let request = proto::MakeDirectoryRequest {
            sandbox_id: self.sandbox.clone(),
            path: path.to_vec(),
            // As by `mkdir -p`: one that is there is fine.
            parents: true,
            by: crate::cli::person(),
        };
        self.client.make_directory(request).await?;
        Ok(())
    }

    /// Streams one file. It appears only when all of it was read: a stream that just ended would be a whole file.
    async fn write(
        &mut self,
        source: &Path,
        mut from: impl Read + Send + 'static,
        path: Vec<u8>,
        mode: u32,
    ) -> Result<(), Error> {
        use proto::write_file_request::Kind as Sent;
        let start = proto::WriteFileStart {
            sandbox_id: self.sandbox.clone(),
            path,
            mode,
            by: crate::cli::person(),
        };
        let (sender, chunks) = mpsc::channel::<Vec<u8>>(4);
        let (failure, failed) = tokio::sync::oneshot::channel();
        let reading = tokio::task::spawn_blocking(move || {
            let mut bytes = 0;
            loop {
                let mut chunk = vec![0; CHUNK];
                match from.read(&mut chunk) {
                    Ok(0) => return bytes,
                    Ok(got) => {
                        chunk.truncate(got);
                        bytes += got as u64;
                        // The call is over.
                        if sender.blocking_send(chunk).is_err() {
                            return bytes;
                        }
                    }
                    Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                    Err(error) => {
                        let _ = failure.send(error);
                        // Held open until the call was given up: its end would be the file's.
                        while !sender.is_closed() {
                            std::thread::sleep(std::time::Duration::from_millis(5));
                        }
                        return bytes;
                    }
                }
            }
        });
        let first = futures::stream::iter([Sent::Start(start)]);
        let requests = first
            .chain(ReceiverStream::new(chunks).map(Sent::Data))
            .map(|kind| proto::WriteFileRequest { kind: Some(kind) });
        let broken = async {
            match failed.await {
                Ok(error) => error,
                // All was read.
                Err(_) => std::future::pending().await,
            }
        };
        let written = tokio::select! {
            written = self.client.write_file(requests) => written.map_err(Error::from).map(drop),
            error = broken => Err(unreadable(source, &error)),
        };
        written?;
        let bytes = reading
            .await
            .map_err(|error| Error::new(Kind::Internal, error.to_string()))?;
        self.done.files += 1;
        self.done.bytes += bytes;
        Ok(())
    }

    /// Makes a link by the sandbox's own `ln`; there is no call for it.
    async fn link(&mut self, target: &[u8], path: &[u8]) -> Result<(), Error> {
        let words: [&[u8]; 5] = [b"ln", b"-sfT", b"--", target, path];
        let start = proto::ExecStart {
            sandbox_id: self.sandbox.clone(),
            argv: words.iter().map(|word| word.to_vec()).collect(),
            by: crate::cli::person(),
            ..Default::default()
        };
        let first = proto::ExecRequest {
            kind: Some(proto::exec_request::Kind::Start(start)),
        };
        // Held open: the command ends with its stream.
        let requests = futures::stream::iter([first]).chain(futures::stream::pending());
        let mut events = self.client.exec(requests).await?.into_inner();
        let mut said = Vec::new();
        while let Some(event) = events.message().await? {
            use proto::exec_event::Kind as Event;
            match event.kind {
                Some(Event::Stderr(output)) if said.len() < 4096 => said.extend(output.data),
                Some(Event::Ended(ended)) if ended.exit_code == Some(0) => return Ok(()),
                Some(Event::Ended(_)) => break,
                Some(Event::Started(_) | Event::Stdout(_) | Event::Stderr(_) | Event::Pty(_)) | None => {}
            }
        }
        let message = format!(
            "cannot make the link `{}`: {}",
            show::name(path),
            show::name(said.trim_ascii())
        );
        Err(Error::new(Kind::Unavailable, message))
    }
}

/// Opens a file, and no link or pipe that has come in its place.
fn open(path: &Path) -> std::io::Result<(File, Metadata)> {
    let mut options = OpenOptions::new();
    options
        .read(true)
        .custom_flags(nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK);
    let file = options.open(path)?;
    let metadata = file.metadata()?;
    match metadata.is_file() {
        true => Ok((file, metadata)),
        false => Err(std::io::Error::other("it is no regular file any more")),
    }
}

fn unreadable(path: &Path, error: &std::io::Error) -> Error {
    Error::new(Kind::Invalid, format!("cannot read `{}`: {error}", path.display()))
}
