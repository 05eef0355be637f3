//! `exuvia sandbox run`: one command in a sandbox of its own.
//!
//! The command's output and exit code pass through unchanged. What else can end it is named on stderr and has a code of its
//! own: 124 its time was up, 125 there is no sandbox, 126 and 127 it cannot be executed or is not there, 137 it was killed.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::{Subcommand, ValueEnum};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;

use super::{Context, Error, Exit};
use crate::error::Kind;
use crate::ids::SandboxId;
use crate::sandbox::backend::oci::{self, Oci};
use crate::sandbox::{
    Backend, BackendName, Cause, Command, Control, Exec, ImageRef, Isolation, Limits, Mount, Output, Sandbox, Spec,
    Stdin, reconcile, seccomp,
};

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Runs one command in a fresh sandbox.
    Run(Run),
}

#[derive(Debug, clap::Args)]
struct Run {
    /// What the sandbox may do.
    #[arg(long, default_value = "strict")]
    policy: Builtin,
    /// Pass standard input on; else the command reads nothing.
    #[arg(long)]
    stdin: bool,
    /// How long the command may run.
    #[arg(long, value_parser = humantime::parse_duration)]
    timeout: Option<Duration>,
    /// `host`, `rootfs:DIR`, `tar:FILE`, or a path.
    #[arg(long, default_value = "host")]
    image: ImageRef,
    #[arg(long, default_value = "oci")]
    backend: BackendName,
    /// A directory or file to show read-only, under its own path.
    #[arg(long, value_name = "DIR")]
    mount_ro: Vec<PathBuf>,
    /// The command.
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

/// The policies that are built in. They do not differ in what a single command gets: no network, default limits.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Builtin {
    Strict,
    Default,
}

const TIMED_OUT: u8 = 124;
const NO_SANDBOX: u8 = 125;
const NOT_EXECUTABLE: u8 = 126;
const NOT_FOUND: u8 = 127;
const KILLED: u8 = 137;
/// How long the sandbox may take to end by itself.
const GRACE: Duration = Duration::ZERO;

pub async fn run(args: Args, context: &Context) -> Result<Exit, Error> {
    let Action::Run(run) = args.action;
    let sandbox = match open(&run, context).await {
        Ok(sandbox) => sandbox,
        Err(error) => {
            say(&format!("no sandbox: {}", crate::error::chain(&error)));
            return Ok(Exit::Passed(NO_SANDBOX));
        }
    };
    let code = in_sandbox(&sandbox, &run).await;
    let closed = sandbox.close(GRACE).await;
    let code = code?;
    closed?;
    Ok(Exit::Passed(code))
}

async fn open(run: &Run, context: &Context) -> Result<Sandbox, crate::sandbox::Error> {
    let unsupported = |wanted: String, missing: String| crate::sandbox::Error::Unsupported { wanted, missing };
    match run.backend {
        BackendName::Oci => {}
        BackendName::Docker => {
            return Err(unsupported(
                "backend `docker`".to_owned(),
                "`sandbox run` is wired to `oci` only".to_owned(),
            ));
        }
    }
    match run.policy {
        Builtin::Strict | Builtin::Default => {}
    }
    let program = std::env::current_exe()
        .map_err(|error| unsupported("a sandbox".to_owned(), format!("the program's own file: {error}")))?;
    let filter = seccomp::compile(seccomp::DEFAULT)
        .map_err(|error| unsupported("a system-call filter".to_owned(), crate::error::chain(&error)))?;
    let backend: Arc<dyn Backend> = Arc::new(Oci::new(&context.data_dir, program)?);
    reconcile::reap(backend.as_ref()).await?;
    let identity = oci::allocate(&context.data_dir)?;
    let mount = |path: &PathBuf| {
        let source = std::path::absolute(path).unwrap_or_else(|_| path.clone());
        Mount {
            target: source.clone(),
            source,
        }
    };
    let spec = Spec {
        id: SandboxId::random(),
        image: run.image.clone(),
        isolation: Isolation::Container,
        limits: Limits::default(),
        identity,
        workspace: None,
        mounts: run.mount_ro.iter().map(mount).collect(),
        labels: BTreeMap::new(),
    };
    let opened = Sandbox::open(backend, spec, filter).await;
    if opened.is_err() {
        oci::release(&context.data_dir, identity);
    }
    opened
}

/// Runs the command to its end and gives its exit code.
async fn in_sandbox(sandbox: &Sandbox, run: &Run) -> Result<u8, Error> {
    let mut command = Command::new(run.command.iter().map(String::as_str));
    command.timeout = run.timeout;
    command.stdin = if run.stdin { Stdin::Open } else { Stdin::Null };
    let mut exec = match sandbox.exec(command).await {
        Ok(exec) => exec,
        Err(crate::sandbox::Error::NotStarted { code, message }) => {
            say(&message);
            return Ok(if code == "program_not_found" {
                NOT_FOUND
            } else {
                NOT_EXECUTABLE
            });
        }
        Err(error) => return Err(error.into()),
    };
    // Dropped, and with it ended, at the end of this function.
    let mut helpers = JoinSet::new();
    if run.stdin {
        helpers.spawn(feed(exec.control()));
    }
    helpers.spawn(interrupted(exec.control()));
    pass_on(&mut exec).await?;
    Ok(code_of(&exec.ended().await.cause))
}

async fn pass_on(exec: &mut Exec) -> Result<(), Error> {
    let (mut stdout, mut stderr) = (tokio::io::stdout(), tokio::io::stderr());
    while let Some(output) = exec.output.recv().await {
        let written = match &output {
            Output::Stdout(bytes) => stdout.write_all(bytes).await,
            Output::Stderr(bytes) => stderr.write_all(bytes).await,
        };
        if written.is_err() {
            // Nobody reads any more; dropping the command ends it.
            return Err(Error::new(Kind::Unavailable, "the output is closed"));
        }
    }
    let flushed = stdout.flush().await.and(stderr.flush().await);
    flushed.map_err(|error| Error::new(Kind::Unavailable, format!("the output is closed: {error}")))
}

async fn feed(command: Control) {
    let mut stdin = tokio::io::stdin();
    let mut chunk = vec![0; 64 << 10];
    loop {
        match stdin.read(&mut chunk).await {
            Ok(0) | Err(_) => break,
            Ok(got) => {
                if command.input(&chunk[..got]).await.is_err() {
                    return;
                }
            }
        }
    }
    // It may have ended by now, which is as good.
    let _ = command.close_input().await;
}

async fn interrupted(command: Control) {
    use tokio::signal::unix::{SignalKind, signal};
    let Ok(mut terminate) = signal(SignalKind::terminate()) else {
        return;
    };
    tokio::select! {
        // Both only wait; neither loses anything when the other is first.
        _ = tokio::signal::ctrl_c() => {}
        _ = terminate.recv() => {}
    }
    let _ = command.kill("a signal to `exuvia sandbox run`").await;
}

fn code_of(cause: &Cause) -> u8 {
    match cause {
        Cause::Exited { code } => (*code & 0xff) as u8,
        Cause::Signalled { signal } => {
            say(&format!("the command died of signal {signal}"));
            128 + (*signal & 0x7f) as u8
        }
        Cause::TimedOut { after_ms } => {
            say(&format!(
                "the command was killed: it ran longer than {:?}",
                Duration::from_millis(*after_ms)
            ));
            TIMED_OUT
        }
        Cause::OutOfMemory {
            limit_bytes,
            peak_bytes,
        } => {
            say(&format!(
                "the command was killed: out of memory (limit {limit_bytes} bytes, peak {peak_bytes})"
            ));
            KILLED
        }
        Cause::Killed { by } => {
            say(&format!("the command was killed by {by}"));
            KILLED
        }
        Cause::SandboxLost { reason } => {
            say(&format!("the sandbox is lost: {reason}"));
            KILLED
        }
    }
}

fn say(text: &str) {
    eprintln!("exuvia: {text}");
}
