//! Starts a command and takes its output, to its end.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::json;

use super::{Asked, Channel, Entry, Error, Finish, Item, Log, Offsets, Overflow, Reader, lock};
use crate::fleet::activity::Busy;
use crate::fleet::member::Member;
use crate::fleet::trail::{Ids, Trail, actor};
use crate::ids::ExecId;
use crate::sandbox::{Cause, Command, Exec, Output, Sandbox, Stdin};
use crate::tasks::Tasks;

/// Longest argument text that goes on the record, in bytes.
const ARGUMENTS: usize = 4096;

/// How long the end of a sandbox may take to be understood.
const VERDICT: Duration = Duration::from_secs(1);

/// What becomes of a command whose client goes away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnDisconnect {
    Kill,
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
    pub on_disconnect: OnDisconnect,
    pub overflow: Overflow,
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
            self.tasks
                .spawn("kill of a command without a client", move |_| async move {
                    entry.kill(Asked::Disconnect).await;
                });
        }
    }
}

impl Attached {
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
        let Self {
            member,
            sandbox,
            busy,
            trail,
            tasks,
        } = self;
        member.execs.check(&member.id)?;
        let (id, on_disconnect) = (ExecId::random(), start.on_disconnect);
        let asked = json!({ "argv": shown(&start.argv), "cwd": start.cwd.as_deref().map(lossy),
            "timeout_ms": start.timeout.map(|timeout| timeout.as_millis() as u64),
            "env": start.env.keys().collect::<Vec<_>>() });
        let actor = actor(&start.by);
        let ids = Ids {
            sandbox: &member.id,
            exec: Some(id.as_str()),
        };
        trail.put(&actor, "exec.started", "ok", ids, asked).await;
        let mut env = member.facts.env.clone();
        env.extend(start.env);
        let command = Command {
            argv: start.argv.clone(),
            env,
            cwd: start.cwd,
            timeout: start.timeout,
            stdin: if start.stdin { Stdin::Open } else { Stdin::Null },
        };
        let exec = match sandbox.exec(command).await {
            Ok(exec) => exec,
            Err(error) => {
                let reason = json!({ "reason": crate::error::chain(&error) });
                trail.put(&actor, "exec.ended", "not_started", ids, reason).await;
                return Err(error.into());
            }
        };
        let log = Log::new(start.overflow);
        let entry = Arc::new(Entry {
            id,
            argv: start.argv,
            pid: 0,
            started_at: member.clock.now(),
            log: Arc::clone(&log),
            on_disconnect,
            timeout: start.timeout,
            control: exec.control(),
            asked: Mutex::default(),
            ended_at: Mutex::default(),
        });
        let attached = attach(&entry, [0; 3], tasks)?;
        member.execs.add(&entry);
        let pump = Pump {
            member: Arc::clone(member),
            entry,
            actor,
            trail: trail.clone(),
            _busy: busy,
        };
        tasks.spawn("output of a command", move |_| pump.run(exec));
        Ok(attached)
    }
}

/// A reader from these offsets that holds the command on its leash, if it is on one.
fn attach(entry: &Arc<Entry>, at: Offsets, tasks: &Tasks) -> Result<Attached, Error> {
    let leash = (entry.on_disconnect == OnDisconnect::Kill).then(|| Leash {
        entry: Arc::clone(entry),
        tasks: tasks.clone(),
    });
    Ok(Attached {
        entry: Arc::clone(entry),
        reader: entry.read_from(at)?,
        _leash: leash,
    })
}

impl Attached {
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
    async fn run(self, exec: Exec) {
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
        let mut offsets = self.entry.log.made();
        while let Some(output) = exec.output.recv().await {
            let (channel, bytes) = match output {
                Output::Stdout(bytes) => (Channel::Stdout, bytes),
                Output::Stderr(bytes) => (Channel::Stderr, bytes),
            };
            let offset = &mut offsets[if channel == Channel::Stdout { 0 } else { 1 }];
            let length = bytes.len() as u64;
            self.entry.log.push(channel, *offset, bytes).await;
            *offset += length;
        }
        let ended = exec.ended().await;
        if let Cause::SandboxLost { .. } = ended.cause {
            // It may be the first to hear that its sandbox has ended; why, its driver knows in a moment.
            let _ = tokio::time::timeout(VERDICT, self.entry.log.ended()).await;
        }
        let asked = lock(&self.entry.asked).clone();
        Finish::of(
            ended,
            asked.as_ref(),
            self.entry.timeout,
            self.member.execs.over().as_ref(),
        )
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
