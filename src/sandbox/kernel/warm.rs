//! A fresh process for each piece of code, ready before the code comes.
//!
//! A *lane* is one exec of the sandbox that waits for one piece of code: for Python a zygote that has forked one child ahead,
//! for the others an interpreter of its own that is used once. A piece of code takes a lane that waits; where none does, an
//! interpreter is started for it. With [`Fresh::Executed`] that is always so: forks of one zygote share the layout of its
//! memory and its hash seed, which a strict policy may not want.
//!
//! The zygote is started in the sandbox as any other program is and runs no code of the user's; the child reads the request
//! itself, so that nothing stands between, and tells the end before it exits. After each piece the zygote kills what the code
//! left behind and only then forks the next child. When it goes on too long, or its caller has gone, the whole lane is killed.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, oneshot};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::carry::{Carried, Heard, Over, Stop, carry, nonsense_by};
use super::context::lost;
use super::language::{Language, Mode};
use super::link::{Link, Said, Setting, check};
use super::message::{End, Gone, How, Message};
use super::outlet::Job;
use super::{Error, Run, RunEnded, RunOptions, exec};
use crate::sandbox::exec::{Pressure, Used};
use crate::sandbox::mould::Mould;
use crate::sandbox::{Cause, Losses, Sandbox};

/// How long a used lane may take to wait again, or a used interpreter to end.
const COOL: Duration = Duration::from_secs(10);
/// Interpreters started because no lane waited, at once.
const MAX_COLD: usize = 32;
/// A sandbox that has run one piece is likely to end: so long nothing is cast for a second one, which is cast when it comes.
const LULL: Duration = Duration::from_secs(2);
/// Who has run so many pieces will run more: an interpreter of the sandbox's own, which forks each next process, takes more
/// memory than one that is cast, and is ready again sooner.
const MANY: u64 = 2;
/// Between two tries to start a lane, and how often in a row it may fail.
const RETRY: Duration = Duration::from_secs(1);
const TRIES: u32 = 5;

/// How a fresh process comes about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fresh {
    /// By a fork of an interpreter that waits, where the language has that.
    Forked,
    /// By an interpreter of its own.
    Executed,
}

#[derive(Debug, Clone)]
pub struct WarmOptions {
    pub fresh: Fresh,
    /// Of [`super::mould`]: processes are cast from it, where the language has that and `fresh` does not forbid it. Where it
    /// turns out not to fit, interpreters are started as if it were not there.
    pub mould: Option<Arc<Mould>>,
    /// Processes that wait: how many pieces of code can start at once without delay. 0 = none waits.
    pub lanes: usize,
    /// Whether everything is loaded before there is any code. Without it the first lane is an interpreter of its own, which takes its
    /// one piece sooner; what waits for the next is made after that.
    pub ahead: bool,
    /// As in [`crate::sandbox::Command`].
    pub cwd: Option<Vec<u8>>,
    pub env: BTreeMap<String, String>,
}

impl Default for WarmOptions {
    fn default() -> Self {
        Self {
            fresh: Fresh::Forked,
            mould: None,
            lanes: 1,
            ahead: true,
            cwd: None,
            env: BTreeMap::new(),
        }
    }
}

/// Runs pieces of code in a sandbox, each in a process of its own. Dropping it ends them all.
#[derive(Debug)]
pub struct Warm {
    shared: Arc<Shared>,
    _lanes: JoinSet<()>,
    cold: Mutex<JoinSet<()>>,
}

#[derive(Debug)]
struct Shared {
    sandbox: Arc<Sandbox>,
    language: Language,
    fresh: Fresh,
    setting: Setting,
    /// Until it turns out not to fit.
    mould: Mutex<Option<Arc<Mould>>>,
    /// Lanes that wait.
    parked: Mutex<Vec<oneshot::Sender<Job>>>,
    /// Pieces of code that came.
    came: AtomicU64,
    /// One ended for which no lane had waited.
    ended_cold: Notify,
}

impl Warm {
    /// Starts the lanes, and waits for the first.
    ///
    /// # Errors
    /// [`Error::NoInterpreter`], [`Error::Unfit`], and those of the sandbox.
    pub async fn start(sandbox: &Arc<Sandbox>, language: Language, options: WarmOptions) -> Result<Self, Error> {
        let shared = Arc::new(Shared {
            sandbox: Arc::clone(sandbox),
            language,
            fresh: options.fresh,
            setting: Setting {
                cwd: options.cwd,
                env: options.env,
            },
            mould: Mutex::new(
                options
                    .mould
                    .filter(|_| language == Language::Python && options.fresh == Fresh::Forked),
            ),
            parked: Mutex::default(),
            came: AtomicU64::new(0),
            ended_cold: Notify::new(),
        });
        let mut lanes = JoinSet::new();
        if options.lanes == 0 {
            language.find(sandbox).await?;
        } else {
            let mode = if options.ahead { shared.lane_mode() } else { Mode::Once };
            let first = shared.link(mode).await?;
            let mut first = Some(first);
            let (ready, is_ready) = oneshot::channel();
            let mut ready = Some(ready);
            for _ in 0..options.lanes {
                lanes.spawn(lane(Arc::clone(&shared), first.take(), ready.take()));
            }
            // A lane that could not even wait has said why in the log; the code will find no lane, and start one.
            let _ = is_ready.await;
        }
        Ok(Self {
            shared,
            _lanes: lanes,
            cold: Mutex::default(),
        })
    }

    pub fn language(&self) -> Language {
        self.shared.language
    }

    /// Lanes that wait.
    pub fn parked(&self) -> usize {
        locked(&self.shared.parked).len()
    }

    /// Runs code at once, in a process of its own.
    ///
    /// # Errors
    /// [`Error::Busy`] when very many run already; what is wrong with the code or the variables.
    pub fn run(&self, code: &str, options: RunOptions) -> Result<Run, Error> {
        check(self.shared.language, code, &options.env)?;
        let (mut job, run) = Job::new(code, options);
        self.shared.came.fetch_add(1, Ordering::Relaxed);
        loop {
            let lane = locked(&self.shared.parked).pop();
            let Some(lane) = lane else { break };
            match lane.send(job) {
                Ok(()) => return Ok(run),
                // It has just ended.
                Err(back) => job = back,
            }
        }
        let mut cold = locked(&self.cold);
        while cold.try_join_next().is_some() {}
        if cold.len() >= MAX_COLD {
            return Err(Error::Busy { waiting: cold.len() });
        }
        cold.spawn(start_and_serve(Arc::clone(&self.shared), job));
        Ok(run)
    }
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // Nothing in it is ever half done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// What a lane is.
    fn lane_mode(&self) -> Mode {
        match (self.language, self.fresh) {
            (Language::Python, Fresh::Forked) => Mode::Zygote,
            (Language::Python, Fresh::Executed) | (Language::Bash | Language::Node, _) => Mode::Once,
        }
    }

    async fn link(&self, mode: Mode) -> Result<Link, Error> {
        let mould = locked(&self.mould).clone();
        if let Some(mould) = mould {
            match Link::cast(&self.sandbox, self.language, &self.setting, &mould).await {
                Err(Error::NotCast(reason)) => {
                    tracing::warn!(sandbox = %self.sandbox.id(), reason, "no interpreter could be cast; one is started");
                    *locked(&self.mould) = None;
                }
                other => return other,
            }
        }
        Ok(Link::start(&self.sandbox, self.language, mode, &self.setting).await?.0)
    }

    /// What waits for the next piece.
    async fn lane_link(&self) -> Result<Link, Error> {
        let mode = self.lane_mode();
        match mode == Mode::Zygote && self.came.load(Ordering::Relaxed) >= MANY {
            true => Ok(Link::start(&self.sandbox, self.language, mode, &self.setting).await?.0),
            false => self.link(mode).await,
        }
    }

    async fn losses(&self) -> Option<Losses> {
        Some(self.sandbox.usage().await.ok()?.into())
    }
}

/// Keeps one lane waiting, and runs what comes.
async fn lane(shared: Arc<Shared>, mut first: Option<Link>, mut ready: Option<oneshot::Sender<()>>) {
    let mut failed = 0;
    let mut number = 0;
    loop {
        let mut link = match first.take() {
            Some(link) => link,
            None => match shared.lane_link().await {
                Ok(link) => link,
                Err(error) => {
                    failed += 1;
                    tracing::debug!(sandbox = %shared.sandbox.id(), %error, failed, "a lane did not start");
                    if failed >= TRIES {
                        return;
                    }
                    sleep(RETRY).await;
                    continue;
                }
            },
        };
        failed = 0;
        // As long as this link serves.
        loop {
            let before = shared.losses().await;
            let (park, mut parked) = oneshot::channel();
            locked(&shared.parked).push(park);
            if let Some(ready) = ready.take() {
                let _ = ready.send(());
            }
            let job = tokio::select! {
                biased;
                job = &mut parked => job.ok(),
                said = link.next() => match said {
                    // Nothing that waits says anything.
                    Ok(Said::Output(..)) => None,
                    Ok(Said::Message(..) | Said::Closed) | Err(_) => None,
                },
            };
            let job = match job {
                Some(job) => job,
                None => {
                    parked.close();
                    match parked.try_recv() {
                        // Promised in this very moment.
                        Ok(job) => job,
                        Err(_) => break,
                    }
                }
            };
            number += 1;
            let is_first_cast = number == 1 && link.mode() == Mode::Cast;
            match serve(&shared, link, job, number, before).await {
                Some(again) => link = again,
                None if is_first_cast => {
                    // Lapsed, or a second one has come and gone.
                    let _ = timeout(LULL, shared.ended_cold.notified()).await;
                    break;
                }
                None => break,
            }
        }
    }
}

async fn start_and_serve(shared: Arc<Shared>, job: Job) {
    let before = shared.losses().await;
    match shared.link(Mode::Once).await {
        Ok(link) => {
            serve(&shared, link, job, 1, before).await;
            shared.ended_cold.notify_one();
        }
        Err(error) => {
            let kernel = lost(crate::error::chain(&error));
            job.outlet.end(RunEnded::without_a_kernel(kernel)).await;
        }
    }
}

/// Runs one piece; the link, when it waits for another.
async fn serve(shared: &Shared, mut link: Link, mut job: Job, number: u64, before: Option<Losses>) -> Option<Link> {
    let carried = carry(&mut link, &mut job, number, Stop::Kill, None).await;
    let timed_out = carried.timed_out && matches!(carried.over, Over::Kill(_));
    let limit = job.options.timeout.filter(|_| timed_out);
    let told = |ok, kernel| RunEnded {
        ok,
        timed_out,
        interrupted: false,
        kernel: Some(kernel),
        duration: carried.duration,
        execution_count: 1,
        dropped_results: 0,
    };
    match (&carried.over, link.mode()) {
        (Over::Ended(end), Mode::Zygote) => {
            let kernel = shared.judge(&carried, end, before).await;
            let ended = told(end.ok && kernel.is_success(), kernel);
            // The answer first; then the lane is made ready again.
            let (again, ()) = tokio::join!(cool(link, carried.heard), job.outlet.end(ended));
            again
        }
        (Over::Gone(gone), Mode::Zygote) => {
            let kernel = shared.judge_gone(&carried, gone, before).await;
            let ended = told(kernel.is_success(), kernel);
            let (again, ()) = tokio::join!(cool(link, carried.heard), job.outlet.end(ended));
            again
        }
        (Over::Ended(end), Mode::Cast) => {
            let kernel = shared.judge(&carried, end, before).await;
            let ended = told(end.ok && kernel.is_success(), kernel);
            // The answer first, as it will say nothing more; then what it left behind is awaited.
            tokio::join!(link.ended(COOL), job.outlet.end(ended));
            None
        }
        (Over::Ended(end), _) => {
            let ok = end.ok;
            let kernel = link.ended(COOL).await;
            job.outlet.end(told(ok && kernel.is_success(), kernel)).await;
            None
        }
        (Over::Closed, _) => {
            let kernel = link.ended(COOL).await;
            job.outlet.end(told(kernel.is_success(), kernel)).await;
            None
        }
        (Over::Kill(by), _) => {
            let is_forked = link.mode() == Mode::Zygote;
            let mut kernel = link.kill(by).await;
            if is_forked {
                // The piece's own: the zygote had others before it, and was not waiting for them any more.
                let Used { cpu, max_rss_bytes } = kernel.others;
                (kernel.cpu, kernel.max_rss_bytes) = (cpu, max_rss_bytes);
            }
            if let (Some(limit), Cause::Killed { .. }) = (limit, &kernel.cause) {
                kernel.cause = Cause::TimedOut {
                    after_ms: limit.as_millis() as u64,
                };
            }
            job.outlet.end(told(false, kernel)).await;
            None
        }
        (Over::Gone(_) | Over::Restart(_), _) => {
            let kernel = link
                .kill("the host: the kernel made no sense: a message out of place")
                .await;
            job.outlet.end(told(false, kernel)).await;
            None
        }
    }
}

impl Shared {
    /// The end of a child that told it itself.
    async fn judge(&self, carried: &Carried, end: &End, before: Option<Losses>) -> exec::Ended {
        let code = i32::from(end.status.unwrap_or_default());
        let cause = Cause::Exited { code };
        let mut ended = self.ended(carried, cause, code != 0, before).await;
        ended.cpu = Duration::from_micros(end.cpu_us).min(carried.duration * 64);
        ended.max_rss_bytes = end.max_rss_bytes;
        ended
    }

    /// The end of a child that its zygote tells.
    async fn judge_gone(&self, carried: &Carried, gone: &Gone, before: Option<Losses>) -> exec::Ended {
        let (cause, suspect) = match gone.how {
            How::Status(code) => (Cause::Exited { code: i32::from(code) }, code != 0),
            How::Signal(signal) => {
                let signal = i32::from(signal);
                (Cause::Signalled { signal }, signal == libc::SIGKILL)
            }
        };
        let mut ended = self.ended(carried, cause, suspect, before).await;
        ended.cpu = Duration::from_micros(gone.cpu_us).min(carried.duration * 64);
        ended.max_rss_bytes = gone.max_rss_bytes;
        ended
    }

    /// `cause`, unless memory ran out meanwhile: the promise of every exec.
    async fn ended(&self, carried: &Carried, cause: Cause, suspect: bool, before: Option<Losses>) -> exec::Ended {
        let mut ended = exec::Ended {
            duration: carried.duration,
            ..exec::Ended::new(cause)
        };
        if suspect {
            match (self.sandbox.usage().await, before) {
                (Ok(usage), Some(before)) => {
                    let now = Losses::from(usage);
                    ended.pressure = Pressure {
                        oom_kills: now.oom_kills.saturating_sub(before.oom_kills),
                        forks_refused: now.pids_refused.saturating_sub(before.pids_refused),
                        pids_limit: self.sandbox.limits().pids.into(),
                        ..Pressure::default()
                    };
                    if ended.pressure.oom_kills > 0 {
                        ended.cause = Cause::OutOfMemory {
                            limit_bytes: self.sandbox.limits().memory_bytes,
                            peak_bytes: usage.memory_peak_bytes,
                        };
                    }
                }
                (Err(_), _) | (_, None) => ended.unknown = Some("whether memory ran out".to_owned()),
            }
        }
        ended
    }
}

/// Waits until a zygote has cleaned up and forked again. What comes meanwhile is from what it kills.
async fn cool(mut link: Link, heard: Heard) -> Option<Link> {
    let mut left = 2_u8.saturating_sub(heard.gone);
    let mut is_ready = heard.is_ready;
    let ready = async {
        while left > 0 || !is_ready {
            match link.next().await {
                Ok(Said::Output(..)) => {}
                Ok(Said::Message(_, Message::Gone(_))) if left > 0 => left -= 1,
                Ok(Said::Message(_, Message::Ready { .. })) if !is_ready => is_ready = true,
                Ok(Said::Message(..)) => {
                    return Err("the host: the kernel made no sense: a message after the end".to_owned());
                }
                Ok(Said::Closed) => return Err("the host: a zygote that has ended".to_owned()),
                Err(nonsense) => return Err(nonsense_by(&nonsense)),
            }
        }
        Ok(())
    };
    let by = match timeout(COOL, ready).await {
        Ok(Ok(())) => return Some(link),
        Ok(Err(by)) => by,
        Err(_) => format!("the host: a zygote that was not ready within {COOL:?}"),
    };
    link.kill(&by).await;
    None
}
