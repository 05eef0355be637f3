//! One piece of code, from its caller's side: what it does, and how it ended, whatever ended it.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::fleet::activity::Busy;
use crate::fleet::execs::{Finish, How};
use crate::fleet::trail::{Ids, Trail};
use crate::ids::SandboxId;
use crate::sandbox::Cause;
use crate::sandbox::kernel::{Event, Run, RunEnded};
use crate::tasks::Tasks;

/// How long the end of a sandbox may take to be understood.
const VERDICT: Duration = Duration::from_secs(1);

/// What code does, in the order it does it.
#[derive(Debug, Clone, PartialEq)]
pub enum Item {
    Stdout {
        offset: u64,
        bytes: Vec<u8>,
    },
    Stderr {
        offset: u64,
        bytes: Vec<u8>,
    },
    Result {
        data: BTreeMap<String, Vec<u8>>,
        is_main: bool,
    },
    Error {
        name: String,
        value: String,
        traceback: String,
    },
    /// The last, exactly once.
    Ended(Box<RunEnd>),
}

/// How it ended.
#[derive(Debug, Clone, PartialEq)]
pub struct RunEnd {
    pub ok: bool,
    pub timed_out: bool,
    pub interrupted: bool,
    /// Set when the process that ran it has ended: always, for a fresh one.
    pub kernel: Option<Finish>,
    pub duration: Duration,
    pub execution_count: u64,
    pub dropped_results: u64,
}

/// A piece of code that runs, or waits for its turn. Dropped before its end, it ends the code.
#[derive(Debug)]
pub struct Running {
    run: Run,
    over: watch::Receiver<Option<How>>,
    begun: Instant,
    stdout: u64,
    stderr: u64,
    is_done: bool,
    record: Recorder,
    _busy: Busy,
}

/// Puts its end on the record.
#[derive(Debug, Clone)]
pub(super) struct Recorder {
    pub trail: Trail,
    pub tasks: Tasks,
    pub sandbox: SandboxId,
    pub actor: String,
    pub number: u64,
}

impl Recorder {
    pub async fn put(&self, action: &str, outcome: &str, mut details: Value) {
        details["number"] = self.number.into();
        let ids = Ids {
            sandbox: &self.sandbox,
            exec: None,
        };
        self.trail.put(&self.actor, action, outcome, ids, details).await;
    }
}

impl Running {
    pub(super) fn new(run: Run, over: watch::Receiver<Option<How>>, record: Recorder, busy: Busy) -> Self {
        Self {
            run,
            over,
            begun: Instant::now(),
            stdout: 0,
            stderr: 0,
            is_done: false,
            record,
            _busy: busy,
        }
    }

    /// The next piece; `None` after the end.
    pub async fn next(&mut self) -> Option<Item> {
        if self.is_done {
            return None;
        }
        let event = tokio::select! {
            biased;
            how = over(&mut self.over) => match self.run.events.try_recv() {
                // It was said before.
                Ok(event) => self.judged(event, Some(how)).await,
                Err(_) => Err(self.cut_off(how)),
            },
            event = self.run.events.recv() => match event {
                Some(event) => self.judged(event, None).await,
                None => Err(self.lost().await),
            },
        };
        let end = match event {
            Ok(item) => return Some(item),
            Err(end) => end,
        };
        self.is_done = true;
        let details = json!({ "duration_ms": end.duration.as_millis() as u64, "stdout_bytes": self.stdout,
            "stderr_bytes": self.stderr });
        self.record.put("code.ended", word(&end), details).await;
        Some(Item::Ended(Box::new(end)))
    }

    async fn judged(&mut self, event: Event, how: Option<How>) -> Result<Item, RunEnd> {
        let next = |offset: &mut u64, bytes: &[u8]| {
            let at = *offset;
            *offset += bytes.len() as u64;
            at
        };
        Ok(match event {
            Event::Stdout(bytes) => Item::Stdout {
                offset: next(&mut self.stdout, &bytes),
                bytes,
            },
            Event::Stderr(bytes) => Item::Stderr {
                offset: next(&mut self.stderr, &bytes),
                bytes,
            },
            Event::Result { data, is_main } => Item::Result { data, is_main },
            Event::Error { name, value, traceback } => Item::Error { name, value, traceback },
            Event::Ended(ended) => return Err(self.end(ended, how).await),
        })
    }

    /// What `ended` means, given what the server knows.
    async fn end(&mut self, ended: RunEnded, mut how: Option<How>) -> RunEnd {
        let cause = ended.kernel.as_ref().map(|kernel| &kernel.cause);
        if let (None, Some(Cause::SandboxLost { .. } | Cause::SandboxOutOfMemory { .. })) = (&how, cause) {
            // This may be the first to hear that the sandbox has ended; why, its driver knows in a moment.
            how = tokio::time::timeout(VERDICT, over(&mut self.over)).await.ok();
        }
        let kernel = match (how, ended.kernel) {
            // It had come to its end before.
            (_, kernel) if ended.ok => kernel.map(|kernel| Finish::of(kernel, None, None)),
            (Some(how), kernel) => Some(Finish {
                how,
                duration: ended.duration,
                ended: kernel,
            }),
            (None, kernel) => kernel.map(|kernel| Finish::of(kernel, None, None)),
        };
        RunEnd {
            ok: ended.ok,
            timed_out: ended.timed_out,
            interrupted: ended.interrupted,
            kernel,
            duration: ended.duration,
            execution_count: ended.execution_count,
            dropped_results: ended.dropped_results,
        }
    }

    fn cut_off(&self, how: How) -> RunEnd {
        let duration = self.begun.elapsed();
        RunEnd {
            ok: false,
            timed_out: false,
            interrupted: false,
            kernel: Some(Finish {
                how,
                ended: None,
                duration,
            }),
            duration,
            execution_count: 0,
            dropped_results: 0,
        }
    }

    /// Its kernel went away without a word.
    async fn lost(&mut self) -> RunEnd {
        let how = tokio::time::timeout(VERDICT, over(&mut self.over)).await;
        let reason = "the kernel broke off".to_owned();
        self.cut_off(how.unwrap_or(How::Itself(Cause::SandboxLost { reason })))
    }
}

/// Waits until it is over.
async fn over(receiver: &mut watch::Receiver<Option<How>>) -> How {
    match receiver.wait_for(Option::is_some).await.map(|how| how.clone()) {
        Ok(Some(how)) => how,
        // Who would tell is gone: its events tell.
        Ok(None) | Err(_) => std::future::pending().await,
    }
}

/// For the audit record.
fn word(end: &RunEnd) -> &'static str {
    match (&end.kernel, end) {
        (_, RunEnd { ok: true, .. }) => "ok",
        (_, RunEnd { timed_out: true, .. }) => "timed_out",
        (_, RunEnd { interrupted: true, .. }) => "interrupted",
        (Some(kernel), _) if kernel.word() != "ok" => kernel.word(),
        (Some(_) | None, _) => "failed",
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.is_done {
            let (record, tasks) = (self.record.clone(), self.record.tasks.clone());
            let details = json!({ "duration_ms": self.begun.elapsed().as_millis() as u64,
                "stdout_bytes": self.stdout, "stderr_bytes": self.stderr });
            tasks.spawn("record of code without a client", move |_| async move {
                record.put("code.ended", "disconnected", details).await;
            });
        }
    }
}
