//! A kernel: state kept from call to call, one call at a time.
//!
//! ```text
//! Waiting ─run─▶ Running ─end─▶ Waiting        interrupt: a signal to the driver's process group
//!    │              │ time limit: interrupt, after the grace ─▶ Ended
//!    └─ its exec ends, it talks nonsense ─▶ Ended ─restart─▶ Waiting (a new process, nothing kept)
//! ```
//! One task owns the exec. Calls wait in a bounded queue; what waits when the kernel ends is answered with that end.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;

use super::carry::{Ask, Over, Stop, carry, nonsense_by};
use super::frame::Nonsense;
use super::language::{Language, Mode};
use super::link::{Link, Pipe, Said, Setting, check};
use super::message::Message;
use super::outlet::Job;
use super::{Error, Event, Run, RunEnded, RunOptions, exec};
use crate::sandbox::{Cause, Sandbox};

/// Output of threads and background processes between two calls that is kept for the next one, of each stream.
const EARLY: usize = 64 << 10;
/// Interrupts and restarts that may wait.
const ASKS: usize = 16;

/// How a kernel is made.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// As in [`crate::sandbox::Command`].
    pub cwd: Option<Vec<u8>>,
    pub env: BTreeMap<String, String>,
    /// Calls that may wait while one runs.
    pub queue: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            cwd: None,
            env: BTreeMap::new(),
            queue: 16,
        }
    }
}

/// What became of an interrupt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interrupted {
    /// No code ran.
    Idle,
    /// The code has ended.
    Stopped,
    /// The code goes on: only a restart, or its time limit, will end it.
    Ignored,
    /// The kernel was ended meanwhile.
    Ended,
}

/// What a kernel is doing.
#[derive(Debug, Clone, PartialEq)]
pub struct State {
    pub is_busy: bool,
    /// Calls since its start.
    pub execution_count: u64,
    /// Of the interpreter.
    pub version: String,
    /// Set when it runs no more, until a restart.
    pub ended: Option<exec::Ended>,
}

/// A kernel in a sandbox. Dropping it ends it.
#[derive(Debug)]
pub struct Kernel {
    language: Language,
    jobs: mpsc::Sender<Job>,
    asks: mpsc::Sender<Ask>,
    state: watch::Receiver<State>,
    _task: JoinSet<()>,
}

impl Kernel {
    /// Starts one and waits until it takes code.
    ///
    /// # Errors
    /// [`Error::NoInterpreter`], [`Error::Unfit`], and those of the sandbox.
    pub async fn start(sandbox: &Arc<Sandbox>, language: Language, options: Options) -> Result<Self, Error> {
        let setting = Setting {
            cwd: options.cwd,
            env: options.env,
        };
        let (link, version) = Link::start(sandbox, language, Mode::Kernel, &setting).await?;
        let (jobs, jobs_receiver) = mpsc::channel(options.queue.max(1));
        let (asks, asks_receiver) = mpsc::channel(ASKS);
        let (state, state_receiver) = watch::channel(State {
            is_busy: false,
            execution_count: 0,
            version,
            ended: None,
        });
        let owner = Owner {
            sandbox: Arc::clone(sandbox),
            language,
            setting,
            link: Some(link),
            early: Early::default(),
            jobs: jobs_receiver,
            asks: asks_receiver,
            state,
            tails: JoinSet::new(),
        };
        let mut task = JoinSet::new();
        task.spawn(owner.live());
        Ok(Self {
            language,
            jobs,
            asks,
            state: state_receiver,
            _task: task,
        })
    }

    pub fn language(&self) -> Language {
        self.language
    }

    pub fn state(&self) -> State {
        self.state.borrow().clone()
    }

    /// Runs code when those before it have ended.
    ///
    /// # Errors
    /// [`Error::Ended`] when the kernel has; [`Error::Busy`] when too many wait; what is wrong with the code or the variables.
    pub fn run(&self, code: &str, options: RunOptions) -> Result<Run, Error> {
        check(self.language, code, &options.env)?;
        if let Some(ended) = &self.state.borrow().ended {
            return Err(Error::Ended(Box::new(ended.clone())));
        }
        let (job, run) = Job::new(code, options);
        match self.jobs.try_send(job) {
            Ok(()) => Ok(run),
            Err(TrySendError::Full(_)) => Err(Error::Busy {
                waiting: self.jobs.max_capacity(),
            }),
            Err(TrySendError::Closed(_)) => Err(Error::Ended(Box::new(broke_off()))),
        }
    }

    /// Interrupts the code that runs, as Ctrl-C would, and waits for at most its grace to see what becomes of it.
    pub async fn interrupt(&self) -> Result<Interrupted, Error> {
        let (answer, answered) = oneshot::channel();
        let gone = |()| Error::Ended(Box::new(broke_off()));
        self.asks.send(Ask::Interrupt(answer)).await.map_err(|_| gone(()))?;
        answered.await.map_err(|_| gone(()))
    }

    /// Ends the process, with the code that runs, and starts a new one. Calls that wait are run by the new one.
    ///
    /// # Errors
    /// Those of a start; the kernel then stays ended.
    pub async fn restart(&self) -> Result<(), Error> {
        let (answer, answered) = oneshot::channel();
        let gone = |()| Error::Ended(Box::new(broke_off()));
        self.asks.send(Ask::Restart(answer)).await.map_err(|_| gone(()))?;
        answered.await.map_err(|_| gone(()))?
    }
}

/// The end of a kernel whose task is gone.
fn broke_off() -> exec::Ended {
    lost("the task that drove the kernel broke off")
}

pub(super) fn lost(reason: impl Into<String>) -> exec::Ended {
    exec::Ended::new(Cause::SandboxLost { reason: reason.into() })
}

/// What was said while no code ran.
#[derive(Debug, Default)]
struct Early {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    results: u64,
}

impl Early {
    fn keep(&mut self, pipe: Pipe, bytes: &[u8]) {
        let kept = match pipe {
            Pipe::Out => &mut self.stdout,
            Pipe::Err => &mut self.stderr,
        };
        kept.extend_from_slice(bytes);
        let excess = kept.len().saturating_sub(EARLY);
        kept.drain(..excess);
    }

    fn give(&mut self, job: &mut Job) {
        for (bytes, event) in [
            (std::mem::take(&mut self.stdout), Event::Stdout as fn(Vec<u8>) -> Event),
            (std::mem::take(&mut self.stderr), Event::Stderr),
        ] {
            if !bytes.is_empty() {
                job.outlet.push(event(bytes));
            }
        }
        job.outlet.dropped = std::mem::take(&mut self.results);
    }
}

struct Owner {
    sandbox: Arc<Sandbox>,
    language: Language,
    setting: Setting,
    link: Option<Link>,
    early: Early,
    jobs: mpsc::Receiver<Job>,
    asks: mpsc::Receiver<Ask>,
    state: watch::Sender<State>,
    tails: JoinSet<()>,
}

/// What the owner has to do next.
enum Next {
    Ask(Option<Ask>),
    Job(Option<Job>),
    Said(Result<Said, Nonsense>),
}

impl Owner {
    async fn live(mut self) {
        loop {
            let next = match &mut self.link {
                Some(link) => tokio::select! {
                    biased;
                    ask = self.asks.recv() => Next::Ask(ask),
                    job = self.jobs.recv() => Next::Job(job),
                    said = link.next() => Next::Said(said),
                },
                None => tokio::select! {
                    biased;
                    ask = self.asks.recv() => Next::Ask(ask),
                    job = self.jobs.recv() => Next::Job(job),
                },
            };
            match next {
                Next::Ask(None) | Next::Job(None) => return,
                Next::Ask(Some(Ask::Interrupt(answer))) => {
                    let _ = answer.send(Interrupted::Idle);
                }
                Next::Ask(Some(Ask::Restart(answer))) => {
                    let _ = answer.send(self.restart().await);
                }
                Next::Job(Some(job)) => self.run(job).await,
                Next::Said(said) => self.overhear(said).await,
            }
        }
    }

    /// Something was said while no code ran.
    async fn overhear(&mut self, said: Result<Said, Nonsense>) {
        match said {
            Ok(Said::Output(pipe, bytes)) => self.early.keep(pipe, &bytes),
            // By a thread that outlived its call.
            Ok(Said::Message(Pipe::Out, Message::Result { .. })) => self.early.results += 1,
            Ok(Said::Message(..)) => {
                let by = "the host: the kernel made no sense: a message while no code ran";
                self.kill(by).await;
            }
            Ok(Said::Closed) => self.conclude().await,
            Err(nonsense) => self.kill(&nonsense_by(&nonsense)).await,
        }
    }

    async fn run(&mut self, mut job: Job) {
        let Some(link) = &mut self.link else {
            let refusal = refuse(job, self.ended());
            return self.tail(refusal);
        };
        if job.outlet.events().is_closed() {
            // Nobody waits for it any more: it is not run at all.
            return;
        }
        let mut count = 0;
        self.state.send_modify(|state| {
            state.is_busy = true;
            state.execution_count += 1;
            count = state.execution_count;
        });
        self.early.give(&mut job);
        let carried = carry(link, &mut job, count, Stop::Interrupt, Some(&mut self.asks)).await;
        let is_interrupted = carried.is_interrupted();
        let mut restart = None;
        let ok = match carried.over {
            Over::Ended(end) => end.ok,
            Over::Closed => {
                self.conclude().await;
                false
            }
            Over::Gone(_) => {
                self.kill("the host: the kernel made no sense: a message out of place")
                    .await;
                false
            }
            Over::Kill(by) => {
                self.kill(&by).await;
                false
            }
            Over::Restart(answer) => {
                self.kill("the host: restarted").await;
                restart = Some(answer);
                false
            }
        };
        self.state.send_modify(|state| state.is_busy = false);
        let ended = RunEnded {
            ok,
            timed_out: carried.timed_out && !ok,
            interrupted: is_interrupted,
            kernel: self.state.borrow().ended.clone(),
            duration: carried.duration,
            execution_count: count,
            dropped_results: 0,
        };
        self.tail(job.outlet.end(ended));
        if let Some(answer) = restart {
            let _ = answer.send(self.restart().await);
        }
    }

    /// Lets the last events be taken in their own time: no other call waits for a slow taker.
    fn tail(&mut self, end: impl Future<Output = ()> + Send + 'static) {
        while self.tails.try_join_next().is_some() {}
        self.tails.spawn(end);
    }

    fn ended(&self) -> exec::Ended {
        let ended = self.state.borrow().ended.clone();
        ended.unwrap_or_else(|| lost("the kernel was not started"))
    }

    async fn kill(&mut self, by: &str) {
        if let Some(link) = self.link.take() {
            self.note_end(link.kill(by).await);
        }
    }

    /// The driver has closed its pipes: it has ended, or does so now.
    async fn conclude(&mut self) {
        if let Some(link) = self.link.take() {
            self.note_end(link.ended(Duration::from_secs(10)).await);
        }
    }

    fn note_end(&self, ended: exec::Ended) {
        tracing::debug!(sandbox = %self.sandbox.id(), language = %self.language, cause = ?ended.cause, "kernel ended");
        self.state.send_modify(|state| state.ended = Some(ended));
    }

    async fn restart(&mut self) -> Result<(), Error> {
        self.kill("the host: restarted").await;
        self.early = Early::default();
        let (link, version) = Link::start(&self.sandbox, self.language, Mode::Kernel, &self.setting).await?;
        self.link = Some(link);
        self.state.send_modify(|state| {
            state.version = version;
            state.execution_count = 0;
            state.ended = None;
        });
        Ok(())
    }
}

/// Tells a call that its kernel ended before its turn.
async fn refuse(job: Job, kernel: exec::Ended) {
    job.outlet.end(RunEnded::without_a_kernel(kernel)).await;
}
