//! Building an image from a folder, with a builder of this host; the result is imported like any other.
//!
//! A folder has a `build.sh` (`build.sh DIRECTORY` leaves `rootfs.tar.zst` there; `mmdebstrap` does it for ours), a
//! `Dockerfile`, or both. Builders run with our rights, as they need to: a folder is trusted like a program. What comes out is
//! not: nothing of it is run, and it is unpacked as a hostile image is. A builder ends with this process, and what it has left by
//! then lies in a scratch directory of the store, which the next import, `image gc` or `doctor --fix` sweeps.

use std::fmt;
use std::fs;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::unix::pipe::Receiver;
use tokio::process::Command;
use tokio::task::JoinSet;

use super::source::Source;
use super::store::{self, Store, Stored};
use super::{Job, Name, Progress};
use crate::clock::Timestamp;
use crate::error::Kind;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("`{}` has neither `build.sh` nor `Dockerfile`", .0.display())]
    Nothing(PathBuf),
    #[error("`{}` has no `{file}`, which `{builder}` needs", folder.display())]
    NotFor {
        folder: PathBuf,
        builder: Builder,
        file: &'static str,
    },
    #[error("no builder is here for `{}`: {missing}", folder.display())]
    NoBuilder { folder: PathBuf, missing: String },
    #[error("`{program}` {how}")]
    Failed { program: String, how: String },
}

impl Error {
    pub fn kind(&self) -> Kind {
        match self {
            Self::Nothing(_) | Self::NotFor { .. } => Kind::Invalid,
            Self::NoBuilder { .. } => Kind::Unavailable,
            Self::Failed { .. } => Kind::Internal,
        }
    }

    pub(super) fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Nothing(_) => Some("`images/python` shows how such a folder looks"),
            Self::NotFor { .. } => Some("leave out `--with`, and what is there is used"),
            Self::NoBuilder { .. } => {
                Some("`apt-get install mmdebstrap zstd` is enough for the folders below `images/`")
            }
            Self::Failed { .. } => Some("what it said stands above"),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Builder {
    /// `build.sh`, which calls mmdebstrap.
    Mmdebstrap,
    /// `Dockerfile`, by the Docker engine.
    Docker,
    /// `Dockerfile`, by buildah.
    Buildah,
}

impl fmt::Display for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.program())
    }
}

impl Builder {
    const ALL: [Self; 3] = [Self::Mmdebstrap, Self::Docker, Self::Buildah];

    fn program(self) -> &'static str {
        match self {
            Self::Mmdebstrap => "mmdebstrap",
            Self::Docker => "docker",
            Self::Buildah => "buildah",
        }
    }

    fn file(self) -> &'static str {
        match self {
            Self::Mmdebstrap => "build.sh",
            Self::Docker | Self::Buildah => "Dockerfile",
        }
    }

    /// Whether it is installed; of an engine, whether it answers.
    async fn is_here(self) -> bool {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let is_installed = std::env::split_paths(&path).any(|place| place.join(self.program()).is_file());
        match self {
            Self::Mmdebstrap | Self::Buildah => is_installed,
            Self::Docker if !is_installed => false,
            Self::Docker => {
                let mut asked = Command::new("docker");
                let quiet = asked
                    .arg("version")
                    .stdin(Stdio::null())
                    .stdout(Stdio::null())
                    .stderr(Stdio::null());
                quiet.status().await.is_ok_and(|status| status.success())
            }
        }
    }
}

/// What is to be built.
#[derive(Debug, Clone)]
pub struct Plan {
    pub folder: PathBuf,
    /// The first that can, when not said.
    pub with: Option<Builder>,
    /// Debian packages besides those of the folder; for `build.sh`.
    pub packages: Vec<String>,
}

/// Builds and imports. A dropped future ends the builder and all that it started.
///
/// # Errors
/// [`Error`] of the builder, or what is wrong with what came out.
pub async fn build(store: &Store, plan: &Plan, name: &Name, now: Timestamp, job: &Job) -> Result<Stored, super::Error> {
    let builder = choose(plan).await?;
    let scratch = store.scratch()?;
    let out = scratch.path();
    let mut options = store::Options {
        origin: Some(format!("build:{} ({builder})", plan.folder.display())),
        ..store::Options::default()
    };
    let source = match builder {
        Builder::Mmdebstrap => {
            let mut script = Command::new(plan.folder.join("build.sh"));
            script.arg(out).env("EXUVIA_TAR_ONLY", "1");
            script.env("EXUVIA_EXTRA_PACKAGES", plan.packages.join(","));
            run(builder, script, out, job).await?;
            options.config = config(&plan.folder)?;
            Source::Tar(out.join("rootfs.tar.zst"))
        }
        Builder::Docker => {
            let id = out.join("id");
            let mut built = Command::new("docker");
            built.args(["build", "--iidfile"]).arg(&id).arg(&plan.folder);
            run(builder, built, out, job).await?;
            let archive = out.join("image.tar");
            let mut saved = Command::new("docker");
            saved.args(["save", "--output"]).arg(&archive).arg(image_id(&id)?);
            run(builder, saved, out, job).await?;
            Source::Archive {
                path: archive,
                tag: None,
            }
        }
        Builder::Buildah => {
            let id = out.join("id");
            let mut built = Command::new("buildah");
            built.args(["build", "--iidfile"]).arg(&id).arg(&plan.folder);
            run(builder, built, out, job).await?;
            let archive = out.join("image.tar");
            let mut saved = Command::new("buildah");
            saved
                .arg("push")
                .arg(image_id(&id)?)
                .arg(format!("oci-archive:{}", archive.display()));
            run(builder, saved, out, job).await?;
            Source::Archive {
                path: archive,
                tag: None,
            }
        }
    };
    let (store, name, job) = (store.clone(), name.clone(), job.clone());
    let _guard = job.cancel.clone().drop_guard();
    let imported = tokio::task::spawn_blocking(move || {
        // Until it is read.
        let _scratch = scratch;
        store.import(&source, &options, &name, now, &job)
    });
    imported
        .await
        .map_err(|error| super::Error::store("work")(std::io::Error::other(error)))?
}

async fn choose(plan: &Plan) -> Result<Builder, Error> {
    let folder = || plan.folder.clone();
    let has = |builder: Builder| plan.folder.join(builder.file()).is_file();
    let possible: Vec<Builder> = match plan.with {
        Some(builder) if !has(builder) => {
            return Err(Error::NotFor {
                folder: folder(),
                builder,
                file: builder.file(),
            });
        }
        Some(builder) => vec![builder],
        None => Builder::ALL.into_iter().filter(|&builder| has(builder)).collect(),
    };
    if possible.is_empty() {
        return Err(Error::Nothing(folder()));
    }
    for &builder in &possible {
        if builder.is_here().await {
            return Ok(builder);
        }
    }
    let names: Vec<String> = possible.iter().map(|builder| format!("`{builder}`")).collect();
    Err(Error::NoBuilder {
        folder: folder(),
        missing: format!("neither installed nor answering: {}", names.join(", ")),
    })
}

/// `config.json` beside `build.sh`: the `config` of the image.
fn config(folder: &Path) -> Result<serde_json::Map<String, serde_json::Value>, super::Error> {
    let path = folder.join("config.json");
    match fs::read(&path) {
        Ok(bytes) => {
            serde_json::from_slice(&bytes).map_err(|error| super::Error::format(format!("`{}`", path.display()), error))
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(serde_json::Map::new()),
        Err(source) => Err(super::Error::Read { path, source }),
    }
}

/// What an engine called the image that it built.
fn image_id(path: &Path) -> Result<String, super::Error> {
    let text = fs::read_to_string(path).map_err(|source| super::Error::Read {
        path: path.to_owned(),
        source,
    })?;
    Ok(text.trim().to_owned())
}

/// Ends a builder and all of its group, unless it has ended by itself.
struct Group(Option<Pid>);

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(leader) = self.0 {
            // Gone already, at worst.
            let _ = killpg(leader, Signal::SIGKILL);
        }
    }
}

/// How long what a builder said last may take to come, and its processes to go once it was ended.
const LAST_WORDS: Duration = Duration::from_secs(10);

/// The program as it is run: ended when this process ends, however that does. One that builds here, as root, has its own
/// processes and mounts besides, which the kernel takes away with it, so that nothing of theirs outlives an interrupt or a
/// SIGKILL. What an engine builds is the engine's, and ends with its client.
fn held(builder: Builder, program: &std::process::Command) -> Command {
    let mut command = Command::new("setpriv");
    // Of the thread that starts it: one that drives the runtime, and ends with it.
    command.args(["--pdeathsig", "KILL"]);
    let builds_here = match builder {
        Builder::Mmdebstrap | Builder::Buildah => nix::unistd::geteuid().is_root(),
        Builder::Docker => false,
    };
    if builds_here {
        command.args(["unshare", "--pid", "--mount-proc", "--kill-child"]);
    }
    command.arg(program.get_program()).args(program.get_args());
    for (name, value) in program.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command
}

/// Runs a builder to its end, with `scratch` for what it leaves lying about. What it says is told line by line.
async fn run(builder: Builder, command: Command, scratch: &Path, job: &Job) -> Result<(), super::Error> {
    let command = command.as_std();
    let program = command.get_program().to_string_lossy();
    let failed = |how: String| Error::Failed {
        program: program.clone().into_owned(),
        how,
    };
    let broken = |error: io::Error| failed(format!("cannot be started: {error}"));
    let temporary = scratch.join("tmp");
    fs::create_dir_all(&temporary).map_err(super::Error::store("make a directory"))?;
    let (ours, theirs) = io::pipe().map_err(broken)?;
    let said = Receiver::from_owned_fd(ours.into()).map_err(broken)?;
    let mut listener = JoinSet::new();
    listener.spawn(listen(said, job.clone()));
    let mut child = held(builder, command)
        .env("TMPDIR", &temporary)
        .stdin(Stdio::null())
        .stdout(theirs.try_clone().map_err(broken)?)
        .stderr(theirs)
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .map_err(broken)?;
    let mut group = Group(child.id().and_then(|id| i32::try_from(id).ok()).map(Pid::from_raw));
    let status = tokio::select! {
        status = child.wait() => Some(status.map_err(|error| failed(error.to_string()))?),
        () = job.cancel.cancelled() => None,
    };
    match status {
        Some(status) if status.success() => group.0 = None,
        Some(_) | None => drop(group),
    }
    // The pipe ends with the last process that has it: only then is nothing written to the scratch directory any more.
    let _ = tokio::time::timeout(LAST_WORDS, listener.join_next()).await;
    match status {
        Some(status) if status.success() => Ok(()),
        Some(status) => Err(failed(shown(status)).into()),
        None => Err(super::Error::Cancelled),
    }
}

/// Tells what a builder says, in lines; a line that is written over is one.
async fn listen(said: Receiver, job: Job) {
    let mut said = BufReader::new(said);
    let mut line = Vec::new();
    loop {
        let piece = match said.fill_buf().await {
            Ok([]) | Err(_) => break,
            Ok(piece) => piece,
        };
        let length = piece.len();
        for byte in piece {
            match byte {
                b'\n' | b'\r' => tell(&job, &mut line),
                byte => line.push(*byte),
            }
            if line.len() >= LINE {
                tell(&job, &mut line);
            }
        }
        said.consume(length);
    }
    tell(&job, &mut line);
}

/// The longest line that is told as one.
const LINE: usize = 4096;

fn tell(job: &Job, line: &mut Vec<u8>) {
    if !line.is_empty() {
        job.tell(Progress::Said(String::from_utf8_lossy(line).into_owned()));
        line.clear();
    }
}

fn shown(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("failed with exit code {code}"),
        (None, signal) => format!("was killed by signal {}", signal.unwrap_or_default()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::sandbox::image::StoredRef;

    fn folder(script: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("build.sh");
        fs::write(&path, format!("#!/bin/sh\nset -e\n{script}\n")).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
        folder
    }

    fn plan(folder: &Path) -> Plan {
        Plan {
            folder: folder.to_owned(),
            with: Some(Builder::Mmdebstrap),
            packages: vec!["gcc".to_owned(), "make".to_owned()],
        }
    }

    async fn built(plan: &Plan, job: &Job) -> (tempfile::TempDir, Result<Stored, super::super::Error>) {
        let data = tempfile::tempdir().unwrap();
        let store = Store::open(data.path()).unwrap();
        let result = build(&store, plan, &"x".parse().unwrap(), Timestamp(5), job).await;
        (data, result)
    }

    async fn is_missing(test: &str) -> bool {
        if Builder::Mmdebstrap.is_here().await {
            return false;
        }
        crate::skip::skipped(test, "no mmdebstrap");
        true
    }

    #[tokio::test]
    async fn a_folders_script_makes_an_image_with_its_configuration() {
        if is_missing("a_folders_script_makes_an_image_with_its_configuration").await {
            return;
        }
        let folder = folder(
            "mkdir \"$1/r\"; echo \"$EXUVIA_EXTRA_PACKAGES\" > \"$1/r/asked\"; tar -C \"$1/r\" -cf - . | zstd -q -o \"$1/rootfs.tar.zst\"",
        );
        fs::write(
            folder.path().join("config.json"),
            r#"{"Env":["LANG=C.UTF-8"],"Cmd":["sh"]}"#,
        )
        .unwrap();
        let (data, result) = built(&plan(folder.path()), &Job::default()).await;
        let stored = result.unwrap();
        assert_eq!(stored.config.cmd, ["sh"]);
        assert_eq!(stored.source, format!("build:{} (mmdebstrap)", folder.path().display()));
        assert_eq!(stored.config.env, [("LANG".to_owned(), "C.UTF-8".to_owned())].into());
        let image: StoredRef = "x".parse().unwrap();
        let root = Store::open(data.path()).unwrap().root(&image).unwrap();
        assert_eq!(fs::read_to_string(root.join("asked")).unwrap(), "gcc,make\n");
    }

    #[tokio::test]
    async fn a_builder_that_fails_leaves_nothing() {
        if is_missing("a_builder_that_fails_leaves_nothing").await {
            return;
        }
        let folder = folder("exit 3");
        let (data, result) = built(&plan(folder.path()), &Job::default()).await;
        assert!(result.unwrap_err().to_string().ends_with("failed with exit code 3"));
        let store = Store::open(data.path()).unwrap();
        assert_eq!(store.list().unwrap(), []);
        let left = super::super::names(&data.path().join("images")).unwrap();
        assert_eq!(left, ["lock", "locks", "records"]);
    }

    #[tokio::test]
    async fn cancelling_ends_the_builder_and_what_it_started() {
        if is_missing("cancelling_ends_the_builder_and_what_it_started").await {
            return;
        }
        let folder = folder("setsid sleep 98762 & touch \"$0.child\"; wait");
        let job = Job::default();
        let seen = folder.path().join("build.sh.child");
        let (plan, cancel) = (plan(folder.path()), job.cancel.clone());
        let wait = async {
            while !seen.exists() {
                tokio::time::sleep(std::time::Duration::from_millis(10)).await;
            }
            cancel.cancel();
        };
        let ((_data, result), ()) = tokio::join!(built(&plan, &job), wait);
        assert!(matches!(result, Err(super::super::Error::Cancelled)));
        let is_running = || {
            let processes = fs::read_dir("/proc").unwrap().flatten();
            let mut lines = processes.filter_map(|entry| fs::read_to_string(entry.path().join("cmdline")).ok());
            lines.any(|line| line == "sleep\098762\0")
        };
        while is_running() {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    }

    #[tokio::test]
    async fn a_folder_without_anything_to_build_is_told() {
        let empty = tempfile::tempdir().unwrap();
        let mut plan = plan(empty.path());
        let refused = choose(&plan).await.unwrap_err();
        assert!(matches!(refused, Error::NotFor { file: "build.sh", .. }));
        plan.with = None;
        assert!(matches!(choose(&plan).await.unwrap_err(), Error::Nothing(_)));
    }
}
