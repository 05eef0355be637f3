//! The caller's end of one run: what it gets, in order, within the caps.

use std::collections::{BTreeMap, VecDeque};

use tokio::sync::mpsc::error::SendError;
use tokio::sync::mpsc::{self, Permit};

use super::frame::Nonsense;
use super::message::unpack;
use super::{Event, Run, RunEnded, RunOptions};

/// Events that may wait for whoever takes them. Output comes in pieces of at most 64 KiB.
const QUEUE: usize = 16;
/// Results of one run.
pub(super) const MAX_RESULTS: usize = 256;
/// All results of one run together.
pub(super) const MAX_RESULT_BYTES: usize = 64 << 20;
/// Errors of one run: code that fails in several places at once has several.
const MAX_ERRORS: usize = 16;

/// A piece of code that waits to be run.
#[derive(Debug)]
pub(super) struct Job {
    pub code: String,
    pub options: RunOptions,
    pub outlet: Outlet,
}

impl Job {
    pub(super) fn new(code: &str, options: RunOptions) -> (Self, Run) {
        let (sender, events) = mpsc::channel(QUEUE);
        let outlet = Outlet {
            events: sender,
            pending: VecDeque::new(),
            abandoned: false,
            results: 0,
            result_bytes: 0,
            errors: 0,
            dropped: 0,
        };
        let code = code.to_owned();
        (Self { code, options, outlet }, Run { events })
    }
}

#[derive(Debug)]
pub(super) struct Outlet {
    events: mpsc::Sender<Event>,
    /// What was said and not yet handed over: a few events at most, as nothing more is heard meanwhile.
    pending: VecDeque<Event>,
    /// Nobody takes events any more.
    abandoned: bool,
    results: usize,
    result_bytes: usize,
    errors: usize,
    pub(super) dropped: u64,
}

impl Outlet {
    pub(super) fn push(&mut self, event: Event) {
        if !self.abandoned {
            self.pending.push_back(event);
        }
    }

    pub(super) fn result(&mut self, data: BTreeMap<String, String>, is_main: bool) -> Result<(), Nonsense> {
        let bytes: usize = data.values().map(String::len).sum();
        if self.results >= MAX_RESULTS || self.result_bytes + bytes > MAX_RESULT_BYTES {
            self.dropped += 1;
            return Ok(());
        }
        self.results += 1;
        self.result_bytes += bytes;
        let data = unpack(data)?;
        self.push(Event::Result { data, is_main });
        Ok(())
    }

    pub(super) fn error(&mut self, name: String, value: String, traceback: String) {
        self.errors += 1;
        if self.errors <= MAX_ERRORS {
            self.push(Event::Error { name, value, traceback });
        }
    }

    pub(super) fn is_waiting(&self) -> bool {
        !self.pending.is_empty()
    }

    pub(super) fn is_abandoned(&self) -> bool {
        self.abandoned
    }

    /// Room for one event. Cancellation-safe.
    pub(super) async fn room(events: &mpsc::Sender<Event>) -> Result<Permit<'_, Event>, SendError<()>> {
        events.reserve().await
    }

    pub(super) fn events(&self) -> mpsc::Sender<Event> {
        self.events.clone()
    }

    /// Hands over the next event.
    pub(super) fn hand_over(&mut self, room: Permit<'_, Event>) {
        if let Some(event) = self.pending.pop_front() {
            room.send(event);
        }
    }

    pub(super) fn abandon(&mut self) {
        self.abandoned = true;
        self.pending.clear();
    }

    /// The last word. Waits until everything before it was taken, or nobody wants it.
    pub(super) async fn end(mut self, mut ended: RunEnded) {
        ended.dropped_results = self.dropped;
        self.push(Event::Ended(ended));
        while let Some(event) = self.pending.pop_front() {
            if self.events.send(event).await.is_err() {
                return;
            }
        }
    }
}
