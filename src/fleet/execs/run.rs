//! Starts a command, or goes on with one of an earlier server, and takes its output to its end.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::json;

use super::{Channel, Entry, Error, Finish, Item, Log, Offsets, Overflow, Reader, cut};
use crate::fleet::activity::Busy;
use crate::fleet::member::Member;
use crate::fleet::service::OnShutdown;
use crate::fleet::trail::{Ids, Trail, actor};
use crate::ids::ExecId;
use crate::sandbox::{self, Background, Cause, Command, Exec, Output, Sandbox, Stdin, TerminalSize};
use crate::tasks::Tasks;

/// Longest argument text that goes on the record, in bytes.
const ARGUMENTS: usize = 4096;
/// How long the end of a sandbox may take to be understood.
const VERDICT: Duration = Duration::from_secs(1);
/// Tries to attach to output that is being dropped meanwhile.
const TRIES: usize = 5;

/// What becomes of a command whose client goes away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnDisconnect {
    Kill,
    /// It goes on, over the end of the server too.
    Keep,
}

/// A command as a client asks for it.
#[derive(Debug, Clone, PartialEq)]
pub struct Start {
    pub argv: Vec<Vec<u8>>,
    pub env: BTreeMap<String, String>,
    pub cwd: Option<Vec<u8>>,
    pub timeout: Option<Duration>,
    pub stdin: bool,
    pub terminal: Option<TerminalSize>,
    pub on_disconnect: OnDisconnect,
    pub background: Background,
    pub overflow: Overflow,
    pub user: Option<String>,
    pub grace: Duration,
    pub by: String,
}

/// A reader of a command's output. Dropped before the end, it ends the command where that was asked for.
#[derive(Debug)]
pub struct Attached {
    pub entry: Arc<Entry>,
    reader: Reader,
    /// Kills the command when this is dropped early.
    _leash: Option<Leash>,
}

#[derive(Debug)]
struct Leash {
    entry: Arc<Entry>,
    tasks: Tasks,
}

impl Drop for Leash {
    fn drop(&mut self) {
        if self.entry.log.finish().is_none() {
            let entry = Arc::clone(&self.entry);
            let kill = move |_| async move { entry.disconnected().await };
            self.tasks.spawn("end of a command without a client", kill);
        }
    }
}

impl Attached {
    /// The reader of a command that has just begun.
    fn first(entry: &Arc<Entry>, tasks: &Tasks) -> Result<Self, Error> {
        let leash = || Leash {
            entry: Arc::clone(entry),
            tasks: tasks.clone(),
        };
        Ok(Self {
            entry: Arc::clone(entry),
            reader: entry.read_from([0; 3])?,
            _leash: (entry.on_disconnect == OnDisconnect::Kill).then(leash),
        })
    }

    /// One more reader of a command. It may go away without harm.
    ///
    /// # Errors
    /// [`Error::OutputDropped`].
    pub fn also(entry: &Arc<Entry>, at: Offsets) -> Result<Self, Error> {
        Ok(Self {
            entry: Arc::clone(entry),
            reader: entry.read_from(at)?,
            _leash: None,
        })
    }

    /// The next piece; `None` after the end. Cancellation-safe.
    pub async fn next(&mut self) -> Option<Item> {
        self.reader.next().await
    }
}

/// What starting needs.
#[derive(Debug)]
pub(in crate::fleet) struct Launch<'a> {
    pub member: &'a Arc<Member>,
    pub sandbox: &'a Sandbox,
    pub busy: Busy,
    pub trail: &'a Trail,
    pub tasks: &'a Tasks,
}

impl Launch<'_> {
    /// Starts `start`, and takes its output from then on.
    ///
    /// # Errors
    /// [`Error::Sandbox`] when it does not start.
    pub async fn run(self, start: Start) -> Result<Attached, Error> {
        let member = self.member;
        let _starting = member.execs.begin(&member.id)?;
        let id = ExecId::random();
        let asked = json!({ "argv": shown(&start.argv), "cwd": start.cwd.as_deref().map(lossy), "user": start.user,
            "timeout_ms": start.timeout.map(|timeout| timeout.as_millis() as u64),
            "env": start.env.keys().collect::<Vec<_>>() });
        let actor = actor(&start.by);
        let ids = Ids {
            sandbox: &member.id,
            exec: Some(id.as_str()),
        };
        self.trail.put(&actor, "exec.started", "ok", ids, asked).await;
        let argv = cut(&start.argv);
        let mut env = member.facts.env.clone();
        env.extend(start.env);
        let command = Command {
            id: Some(id.clone()),
            argv: start.argv,
            env,
            cwd: start.cwd,
            timeout: start.timeout,
            stdin: if start.stdin { Stdin::Open } else { Stdin::Null },
            terminal: start.terminal,
            background: start.background,
            overflow: match start.overflow {
                Overflow::Wait => sandbox::Overflow::Wait,
                Overflow::Drop => sandbox::Overflow::Drop,
            },
            user: start.user,
            grace: start.grace,
            detachable: start.on_disconnect == OnDisconnect::Keep,
        };
        let exec = match self.sandbox.exec(command).await {
            Ok(exec) => exec,
            Err(error) => {
                let reason = json!({ "reason": crate::error::chain(&error) });
                self.trail.put(&actor, "exec.ended", "not_started", ids, reason).await;
                return Err(error.into());
            }
        };
        let entry = Arc::new(Entry {
            id,
            argv,
            pid: exec.pid(),
            started_at: member.clock.now(),
            log: Log::new(start.overflow),
            on_disconnect: start.on_disconnect,
            timeout: start.timeout,
            control: exec.control(),
            ended_at: Mutex::default(),
        });
        let attached = Attached::first(&entry, self.tasks)?;
        let pump = Pump {
            member: Arc::clone(member),
            entry,
            actor,
            trail: self.trail.clone(),
            _busy: self.busy,
        };
        pump.begin(exec, self.tasks);
        Ok(attached)
    }
}

/// Goes on with the commands that an earlier server kept in this sandbox; gives how many there were.
///
/// # Errors
/// When the guest does not tell. A command that cannot be attached to is passed over.
pub(in crate::fleet) async fn take_over(
    member: &Arc<Member>,
    sandbox: &Sandbox,
    trail: &Trail,
    tasks: &Tasks,
) -> Result<usize, Error> {
    let mut count = 0;
    for found in sandbox.list_execs().await? {
        let (exec, from) = match attach(sandbox, &found.id).await {
            Ok(attached) => attached,
            Err(error) => {
                let error = crate::error::chain(&error);
                tracing::warn!(sandbox = %member.id, exec = %found.id, error, "a command is not taken over");
                continue;
            }
        };
        let entry = Arc::new(Entry {
            id: found.id,
            argv: found.argv,
            pid: found.pid,
            started_at: member.clock.now().minus(found.age),
            // Where the guest drops, it goes on to: this one only has to take.
            log: Log::resumed(Overflow::Wait, from),
            on_disconnect: OnDisconnect::Keep,
            timeout: None,
            control: exec.control(),
            ended_at: Mutex::default(),
        });
        let pump = Pump {
            member: Arc::clone(member),
            entry,
            actor: "server".to_owned(),
            trail: trail.clone(),
            _busy: member.activity.begin(),
        };
        pump.begin(exec, tasks);
        count += 1;
    }
    Ok(count)
}

/// Attaches to the first bytes that its guest still keeps.
async fn attach(sandbox: &Sandbox, id: &ExecId) -> Result<(Exec, Offsets), sandbox::Error> {
    let mut from = sandbox::Offsets::default();
    for _ in 1..TRIES {
        match sandbox.attach(id, from).await {
            Ok(exec) => return Ok((exec, [from.stdout, from.stderr, from.pty])),
            Err(sandbox::Error::OutputDropped { kept, .. }) => from = kept,
            Err(error) => return Err(error),
        }
    }
    let exec = sandbox.attach(id, from).await?;
    Ok((exec, [from.stdout, from.stderr, from.pty]))
}

/// Takes a command's output until it ends.
struct Pump {
    member: Arc<Member>,
    entry: Arc<Entry>,
    actor: String,
    trail: Trail,
    _busy: Busy,
}

impl Pump {
    fn begin(self, exec: Exec, tasks: &Tasks) {
        self.member.execs.add(&self.entry);
        tasks.spawn("output of a command", move |stop| async move {
            tokio::select! {
                biased;
                () = self.run(exec) => {}
                // What is to outlive the server goes on in the sandbox.
                () = stop.cancelled(), if self.member.on_shutdown == OnShutdown::Keep => {}
            }
        });
    }

    async fn run(&self, exec: Exec) {
        let log = &self.entry.log;
        let finish = tokio::select! {
            finish = self.take(exec) => finish,
            // Its sandbox ends, and what it still has to say with it.
            finish = log.ended() => (*finish).clone(),
        };
        let outcome = finish.word();
        let made = log.made();
        let details = json!({ "duration_ms": finish.duration.as_millis() as u64,
            "exit": finish.ended.as_ref().map(|ended| &ended.cause), "stdout_bytes": made[0], "stderr_bytes": made[1],
            "pty_bytes": made[2] });
        log.end(finish);
        self.member.execs.ended(&self.entry);
        let ids = Ids {
            sandbox: &self.member.id,
            exec: Some(self.entry.id.as_str()),
        };
        self.trail.put(&self.actor, "exec.ended", outcome, ids, details).await;
    }

    async fn take(&self, mut exec: Exec) -> Finish {
        while let Some(output) = exec.output.recv().await {
            let (channel, piece) = match output {
                Output::Stdout(piece) => (Channel::Stdout, piece),
                Output::Stderr(piece) => (Channel::Stderr, piece),
                Output::Pty(piece) => (Channel::Pty, piece),
            };
            self.entry.log.push(channel, piece.offset, piece.bytes).await;
        }
        let ended = exec.ended().await;
        if let Cause::SandboxLost { .. } | Cause::SandboxOutOfMemory { .. } = ended.cause {
            // It may be the first to hear that its sandbox has ended; why, its driver knows in a moment.
            let _ = tokio::time::timeout(VERDICT, self.entry.log.ended()).await;
        }
        Finish::of(ended, self.entry.timeout, self.member.execs.over().as_ref())
    }
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Arguments for the record, cut at [`ARGUMENTS`] bytes.
fn shown(argv: &[Vec<u8>]) -> Vec<String> {
    let mut left = ARGUMENTS;
    let mut shown = Vec::new();
    for argument in argv {
        let text = lossy(&argument[..argument.len().min(left)]);
        left -= argument.len().min(left);
        shown.push(text);
        if left == 0 {
            break;
        }
    }
    shown
}
