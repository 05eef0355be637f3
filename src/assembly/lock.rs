//! Holds a data directory for one server, and says who holds it. Nothing of what lies in the directory is known here.

use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use super::{Error, data_dir_error, secure_dir};
use crate::process::Process;

/// How long the lock of a dead server may be held on by a child that it was just making: fork(2) copies descriptors, and
/// close-on-exec closes them no earlier than execve(2).
const INHERITED: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(5);

/// flock(2) on `server.lock`; released with the process, however it ends.
#[derive(Debug)]
pub struct ServerLock {
    file: File,
}

/// What the file tells: a line for people, and who that is.
#[derive(Debug, Default)]
struct Holder {
    text: String,
    process: Option<Process>,
}

impl ServerLock {
    /// Takes it; where its last holder is dead, as soon as nothing that this holder forked has it any more.
    ///
    /// # Errors
    /// [`Error::InUse`], naming the holder, when another server has it.
    pub async fn take(data_dir: &Path) -> Result<Self, Error> {
        secure_dir(data_dir)?;
        let fail = |source| data_dir_error(data_dir, source);
        let mut file = fs::OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(data_dir.join("server.lock"))
            .map_err(fail)?;
        let mut waited = Duration::ZERO;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Self { file }),
                Err(fs::TryLockError::WouldBlock) => {
                    let holder = Holder::read(&mut file).map_err(fail)?;
                    if holder.lives() || waited >= INHERITED {
                        return Err(Error::InUse {
                            path: data_dir.to_owned(),
                            holder: holder.text,
                        });
                    }
                }
                Err(fs::TryLockError::Error(source)) => return Err(fail(source)),
            }
            tokio::time::sleep(PAUSE).await;
            waited += PAUSE;
        }
    }

    /// Writes down who holds it, for whoever is refused.
    ///
    /// # Errors
    /// When the file cannot be written, or `/proc` cannot be read.
    pub fn describe(&mut self, address: SocketAddr) -> io::Result<()> {
        let process = Process::current()?;
        let holder = format!(
            "pid {}, listening on {address}\n{}\n",
            process.pid,
            serde_json::to_string(&process)?
        );
        self.file.set_len(0)?;
        self.file.rewind()?;
        self.file.write_all(holder.as_bytes())
    }
}

impl Holder {
    /// A server that has the lock and has not described itself yet leaves what the one before it wrote, or nothing.
    fn read(file: &mut File) -> io::Result<Self> {
        let mut text = String::new();
        file.rewind()?;
        file.read_to_string(&mut text)?;
        let mut lines = text.lines();
        Ok(Self {
            text: lines.next().unwrap_or_default().to_owned(),
            process: lines.next().and_then(|line| serde_json::from_str(line).ok()),
        })
    }

    fn lives(&self) -> bool {
        self.process.as_ref().is_some_and(Process::is_alive)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(data: &Path, process: &Process) -> File {
        let path = data.join("server.lock");
        let text = format!(
            "pid {}, listening on nothing\n{}\n",
            process.pid,
            serde_json::to_string(process).unwrap()
        );
        fs::write(&path, text).unwrap();
        let file = fs::File::open(path).unwrap();
        file.try_lock().unwrap();
        file
    }

    #[tokio::test]
    async fn a_server_that_lives_is_named() {
        let data = tempfile::tempdir().unwrap();
        let mut lock = ServerLock::take(data.path()).await.unwrap();
        lock.describe("127.0.0.1:7070".parse().unwrap()).unwrap();
        let refused = ServerLock::take(data.path()).await.unwrap_err();
        let Error::InUse { holder, .. } = refused else {
            panic!("{refused:?}")
        };
        assert_eq!(
            holder,
            format!("pid {}, listening on 127.0.0.1:7070", std::process::id())
        );
        drop(lock);
        ServerLock::take(data.path()).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn what_a_dead_server_was_forking_is_waited_for_and_not_for_ever() {
        let data = tempfile::tempdir().unwrap();
        let mut dead = Process::current().unwrap();
        dead.started += 1;
        let file = held(data.path(), &dead);
        let (taken, ()) = tokio::join!(ServerLock::take(data.path()), async {
            tokio::time::sleep(INHERITED / 2).await;
            drop(file);
        });
        taken.unwrap();

        let _file = held(data.path(), &dead);
        let refused = ServerLock::take(data.path()).await.unwrap_err();
        assert!(matches!(refused, Error::InUse { .. }), "{refused:?}");
    }
}
