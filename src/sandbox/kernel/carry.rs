//! One piece of code from request to end, over one link.
//!
//! While an event waits for the caller nothing more is heard from the driver: so a slow caller slows the code. Time limits
//! and interrupts hold all the same.

use std::pin::pin;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until};

use super::frame::Nonsense;
use super::language::Interrupts;
use super::link::{Link, Pipe, Said};
use super::message::{End, Gone, Message};
use super::outlet::{Job, Outlet};
use super::{Error, Event, Interrupted};

/// What is asked of a kernel beside running code.
#[derive(Debug)]
pub(super) enum Ask {
    Interrupt(oneshot::Sender<Interrupted>),
    Restart(oneshot::Sender<Result<(), Error>>),
}

/// What ends code whose time is up or whose caller is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stop {
    /// An interrupt; the kernel's end if that does not help.
    Interrupt,
    Kill,
}

/// Why the conversation about one piece of code is over.
#[derive(Debug)]
pub(super) enum Over {
    Ended(End),
    Gone(Gone),
    /// The driver has ended.
    Closed,
    /// The driver must be killed, by whom and why.
    Kill(String),
    /// A restart was asked for.
    Restart(oneshot::Sender<Result<(), Error>>),
}

/// What a zygote has said already about what comes after the code: its two pipes are not heard in step.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Heard {
    /// On how many of them that the child is gone.
    pub gone: u8,
    pub is_ready: bool,
}

#[derive(Debug)]
pub(super) struct Carried {
    pub over: Over,
    pub heard: Heard,
    pub duration: Duration,
    pub timed_out: bool,
    /// Whether an interrupt was sent for any reason but time.
    pub interrupt_asked: bool,
}

impl Carried {
    pub(super) fn is_interrupted(&self) -> bool {
        self.interrupt_asked && matches!(&self.over, Over::Ended(End { interrupted: true, .. }))
    }
}

/// Runs `job` as request `number`.
pub(super) async fn carry(
    link: &mut Link,
    job: &mut Job,
    number: u64,
    stop: Stop,
    asks: Option<&mut mpsc::Receiver<Ask>>,
) -> Carried {
    let begun = Instant::now();
    let mut state = Carry {
        stop,
        number,
        grace: job.options.grace,
        control: link.control(),
        end: None,
        gone: None,
        synced: false,
        gone_synced: false,
        heard: Heard::default(),
        give_up: None,
        interrupts: link.language().interrupts(),
        again: None,
        fatal: false,
        waiters: Vec::new(),
        timed_out: false,
        interrupt_asked: false,
    };
    let over = match link.request(number, &job.code, &job.options.env).await {
        Err(nonsense) => Over::Kill(format!("the host: {nonsense}")),
        Ok(()) => state.converse(link, job, begun, asks).await,
    };
    let interrupted = match &over {
        Over::Ended(_) | Over::Gone(_) | Over::Closed => Interrupted::Stopped,
        Over::Kill(_) | Over::Restart(_) => Interrupted::Ended,
    };
    for waiter in state.waiters {
        // Whoever asked may have gone.
        let _ = waiter.send(interrupted);
    }
    Carried {
        over,
        heard: state.heard,
        duration: begun.elapsed(),
        timed_out: state.timed_out,
        interrupt_asked: state.interrupt_asked,
    }
}

struct Carry {
    stop: Stop,
    number: u64,
    grace: Duration,
    control: crate::sandbox::Control,
    end: Option<End>,
    gone: Option<Gone>,
    /// Standard error was heard to its end, too.
    synced: bool,
    gone_synced: bool,
    heard: Heard,
    /// When interrupted code counts as not to be interrupted.
    give_up: Option<Instant>,
    interrupts: Interrupts,
    /// When the interrupt is said once more.
    again: Option<Instant>,
    /// Whether the kernel is ended then.
    fatal: bool,
    waiters: Vec<oneshot::Sender<Interrupted>>,
    timed_out: bool,
    interrupt_asked: bool,
}

impl Carry {
    async fn converse(
        &mut self,
        link: &mut Link,
        job: &mut Job,
        begun: Instant,
        mut asks: Option<&mut mpsc::Receiver<Ask>>,
    ) -> Over {
        let events = job.outlet.events();
        let mut deadline = job.options.timeout.and_then(|limit| begun.checked_add(limit));
        let mut waits_since: Option<Instant> = None;
        let mut closed = pin!(events.closed());
        loop {
            let waits = job.outlet.is_waiting();
            match (waits, waits_since) {
                (true, None) => waits_since = Some(Instant::now()),
                (false, Some(since)) => {
                    // The code is not to blame for a slow taker.
                    self.give_up = self.give_up.map(|at| at + since.elapsed());
                    waits_since = None;
                }
                (true, Some(_)) | (false, None) => {}
            }
            let ask = async {
                match asks.as_mut() {
                    Some(asks) => asks.recv().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                room = Outlet::room(&events), if waits => match room {
                    Ok(room) => job.outlet.hand_over(room),
                    Err(_) => job.outlet.abandon(),
                },
                ask = ask => match ask {
                    Some(Ask::Interrupt(waiter)) => {
                        self.interrupt_asked = true;
                        self.waiters.push(waiter);
                        self.interrupt().await;
                    }
                    Some(Ask::Restart(waiter)) => return Over::Restart(waiter),
                    // The kernel's handle is gone, and with it soon this task.
                    None => asks = None,
                },
                () = &mut closed, if !job.outlet.is_abandoned() => {
                    job.outlet.abandon();
                    self.interrupt_asked = true;
                    if let Some(over) = self.stop("the host: nobody waits for the code any more").await {
                        return over;
                    }
                }
                () = sleep_until(deadline.unwrap_or(begun)), if deadline.is_some() => {
                    deadline = None;
                    self.timed_out = true;
                    if let Some(over) = self.stop("the host: time limit").await {
                        return over;
                    }
                }
                () = sleep_until(self.give_up.unwrap_or(begun)), if self.give_up.is_some() && !waits => {
                    self.give_up = None;
                    if self.fatal {
                        let why = if self.timed_out { "time limit" } else { "nobody waits for the code any more" };
                        return Over::Kill(format!("the host: {why}, and the code ignored the interrupt"));
                    }
                    for waiter in self.waiters.drain(..) {
                        let _ = waiter.send(Interrupted::Ignored);
                    }
                }
                () = sleep_until(self.again.unwrap_or(begun)), if self.again.is_some() => self.interrupt_again().await,
                said = link.next(), if !waits => match said {
                    Ok(Said::Closed) => return Over::Closed,
                    Ok(said) => match self.hear(said, job) {
                        Ok(None) => {}
                        Ok(Some(over)) => return over,
                        Err(nonsense) => return Over::Kill(nonsense_by(&nonsense)),
                    },
                    Err(nonsense) => return Over::Kill(nonsense_by(&nonsense)),
                },
            }
        }
    }

    /// Ends the code, at once or by an interrupt.
    async fn stop(&mut self, by: &str) -> Option<Over> {
        match self.stop {
            Stop::Kill => Some(Over::Kill(by.to_owned())),
            Stop::Interrupt => {
                self.fatal = true;
                self.interrupt().await;
                None
            }
        }
    }

    async fn interrupt(&mut self) {
        self.give_up = Some(Instant::now() + self.grace);
        // A driver that has ended says so itself.
        let _ = self.control.signal(self.interrupts.first).await;
        self.again = self.interrupts.then.map(|(after, _)| Instant::now() + after);
    }

    async fn interrupt_again(&mut self) {
        self.again = None;
        if let Some((_, signal)) = self.interrupts.then {
            let _ = self.control.signal(signal).await;
            let again = Instant::now() + self.grace / 8;
            self.again = self.give_up.is_some_and(|end| again < end).then_some(again);
        }
    }

    fn hear(&mut self, said: Said, job: &mut Job) -> Result<Option<Over>, Nonsense> {
        match said {
            Said::Output(Pipe::Out, bytes) => job.outlet.push(Event::Stdout(bytes)),
            Said::Output(Pipe::Err, bytes) => job.outlet.push(Event::Stderr(bytes)),
            Said::Message(Pipe::Out, Message::Result { data, main }) => job.outlet.result(data, main)?,
            Said::Message(Pipe::Out, Message::Error { name, value, traceback }) => {
                job.outlet.error(name, value, traceback);
            }
            Said::Message(Pipe::Out, Message::End(end)) if end.number == self.number && self.end.is_none() => {
                self.end = Some(end);
            }
            Said::Message(Pipe::Err, Message::Sync(number)) if number == self.number && !self.synced => {
                self.synced = true;
            }
            Said::Message(Pipe::Out, Message::Gone(gone)) if self.gone.is_none() => {
                self.gone = Some(gone);
                self.heard.gone += 1;
            }
            Said::Message(Pipe::Err, Message::Gone(_)) if !self.gone_synced => {
                self.gone_synced = true;
                self.heard.gone += 1;
            }
            Said::Message(Pipe::Out, Message::Ready { .. }) if self.gone.is_some() && !self.heard.is_ready => {
                self.heard.is_ready = true;
            }
            Said::Message(
                _,
                Message::Ready { .. }
                | Message::Result { .. }
                | Message::Error { .. }
                | Message::Sync(_)
                | Message::End(_)
                | Message::Gone(_),
            ) => return Err(Nonsense::new("a message out of place")),
            Said::Closed => {}
        }
        if self.synced
            && let Some(end) = self.end.take()
        {
            return Ok(Some(Over::Ended(end)));
        }
        if self.gone_synced
            && let Some(gone) = self.gone.take()
        {
            return Ok(Some(Over::Gone(gone)));
        }
        Ok(None)
    }
}

/// Who kills a driver that talks nonsense.
pub(super) fn nonsense_by(nonsense: &Nonsense) -> String {
    format!("the host: the kernel made no sense: {nonsense}")
}
