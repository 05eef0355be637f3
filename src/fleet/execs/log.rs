//! What a command has written, kept for readers that come, go and come again.
//!
//! One ring of chunks a channel, each with its offset. A reader names the first byte that it wants of each channel and gets
//! every byte from there once, in order; over all channels, in the order in which they came. Memory is bounded: where
//! output is made faster than it is taken, the writer waits ([`Overflow::Wait`]) or the oldest goes ([`Overflow::Drop`]).
//!
//! With `Wait`, what was taken is kept for a while after: what a server has sent is not yet what a client has, and a
//! client that comes again asks for what it missed.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::sync::Notify;

use super::Finish;

/// Bytes of a channel that nobody has taken yet before its writer waits. Together with what is on its way to a client, less
/// than what a guest keeps of taken output ([`wire::REPLAY`](crate::wire)): so a server may be killed at any time.
const UNTAKEN: u64 = 256 << 10;
/// Bytes of a channel that are kept at most, for clients that come again: more than can be on its way to one.
const KEPT: u64 = 4 << 20;
/// What a chunk counts for beside its bytes: about what it costs on its way to a client too.
const CHUNK_COST: u64 = 24;

/// Where output comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Channel {
    Stdout,
    Stderr,
    Pty,
}

impl Channel {
    pub const ALL: [Self; 3] = [Self::Stdout, Self::Stderr, Self::Pty];

    fn index(self) -> usize {
        match self {
            Self::Stdout => 0,
            Self::Stderr => 1,
            Self::Pty => 2,
        }
    }
}

impl fmt::Display for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stdout => "stdout",
            Self::Stderr => "stderr",
            Self::Pty => "pty",
        })
    }
}

/// What happens when output is made faster than it is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overflow {
    Wait,
    Drop,
}

/// First wanted byte of each channel, as in [`Channel::ALL`].
pub type Offsets = [u64; 3];

/// Bytes of a channel: made, and never given to this reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    pub bytes: u64,
    pub dropped_bytes: u64,
}

/// What a reader gets.
#[derive(Debug, Clone, PartialEq)]
pub enum Item {
    Output {
        channel: Channel,
        /// Of the first byte, in its channel.
        offset: u64,
        bytes: Bytes,
    },
    /// Always last, exactly once.
    Ended { finish: Arc<Finish>, counts: [Counts; 3] },
}

/// A byte that is not kept, or was never made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotKept {
    pub channel: Channel,
    pub wanted: u64,
    pub first: u64,
    pub end: u64,
}

#[derive(Debug)]
pub struct Log {
    state: Mutex<State>,
    /// Something came, or the end.
    more: Notify,
    /// Something was taken, or nobody takes any more.
    room: Notify,
}

#[derive(Debug)]
struct State {
    rings: [Ring; 3],
    /// Of the next chunk, over all channels.
    next: u64,
    overflow: Overflow,
    readers: HashMap<u64, Position>,
    next_reader: u64,
    finish: Option<Arc<Finish>>,
}

#[derive(Debug, Default)]
struct Ring {
    chunks: VecDeque<Chunk>,
    /// Bytes and [`CHUNK_COST`]s of `chunks`.
    cost: u64,
    /// Bytes made.
    end: u64,
    /// How far the readers that are gone have taken.
    taken: u64,
}

#[derive(Debug)]
struct Chunk {
    number: u64,
    offset: u64,
    bytes: Bytes,
}

impl Chunk {
    fn end(&self) -> u64 {
        self.offset + self.bytes.len() as u64
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Position {
    at: Offsets,
    dropped: [u64; 3],
}

impl Ring {
    fn first(&self) -> u64 {
        self.chunks.front().map_or(self.end, |chunk| chunk.offset)
    }

    /// Bytes between the end and `offset` were dropped before they came here.
    fn push(&mut self, number: u64, offset: u64, bytes: Bytes) {
        self.end = offset + bytes.len() as u64;
        self.cost += bytes.len() as u64 + CHUNK_COST;
        self.chunks.push_back(Chunk { number, offset, bytes });
        while self.cost > KEPT
            && self.chunks.len() > 1
            && let Some(oldest) = self.chunks.pop_front()
        {
            self.cost -= oldest.bytes.len() as u64 + CHUNK_COST;
        }
    }

    /// The first chunk that has a byte at `offset` or after it.
    fn find(&self, offset: u64) -> Option<&Chunk> {
        let before = self.chunks.partition_point(|chunk| chunk.end() <= offset);
        self.chunks.get(before)
    }

    /// What the chunks from `offset` on cost.
    fn cost_from(&self, offset: u64) -> u64 {
        let first = self.chunks.partition_point(|chunk| chunk.end() <= offset) as u64;
        let chunks = self.chunks.len() as u64 - first;
        self.end.saturating_sub(offset.max(self.first())) + chunks * CHUNK_COST
    }
}

impl State {
    /// Whether one more chunk has to wait until something is taken.
    fn is_full(&self, channel: usize) -> bool {
        let ring = &self.rings[channel];
        let slowest = self.readers.values().map(|reader| reader.at[channel]).min();
        self.overflow == Overflow::Wait && ring.cost_from(slowest.unwrap_or(ring.taken)) >= UNTAKEN
    }

    /// What is next for a reader, and its new position.
    fn next_for(&self, mut position: Position) -> Option<(Item, Position)> {
        let next = Channel::ALL.into_iter().filter_map(|channel| {
            let index = channel.index();
            Some((channel, self.rings[index].find(position.at[index])?))
        });
        let (channel, chunk) = next.min_by_key(|(_, chunk)| chunk.number)?;
        let (at, index) = (position.at[channel.index()], channel.index());
        let offset = at.max(chunk.offset);
        let bytes = chunk.bytes.slice((offset - chunk.offset) as usize..);
        position.dropped[index] += offset - at;
        position.at[index] = chunk.end();
        Some((Item::Output { channel, offset, bytes }, position))
    }
}

impl Log {
    pub fn new(overflow: Overflow) -> Arc<Self> {
        Self::resumed(overflow, [0; 3])
    }

    /// A log whose first bytes of each channel are those at `from`: earlier ones are not here.
    pub fn resumed(overflow: Overflow, from: Offsets) -> Arc<Self> {
        let ring = |from| Ring {
            end: from,
            taken: from,
            ..Ring::default()
        };
        Arc::new(Self {
            state: Mutex::new(State {
                rings: from.map(ring),
                next: 0,
                overflow,
                readers: HashMap::new(),
                next_reader: 0,
                finish: None,
            }),
            more: Notify::new(),
            room: Notify::new(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds output whose first byte is the one at `offset`; waits where it must. What comes after the end, or is here
    /// already, is thrown away. Cancellation-safe: it is added or not.
    pub async fn push(&self, channel: Channel, offset: u64, bytes: impl Into<Bytes>) {
        let mut bytes = bytes.into();
        loop {
            let room = self.room.notified();
            {
                let mut state = self.state();
                if state.finish.is_some() || bytes.is_empty() {
                    return;
                }
                if !state.is_full(channel.index()) {
                    let number = state.next;
                    state.next += 1;
                    let ring = &mut state.rings[channel.index()];
                    let known = ring.end.saturating_sub(offset).min(bytes.len() as u64);
                    if known < bytes.len() as u64 {
                        let fresh = bytes.split_off(known as usize);
                        ring.push(number, offset + known, fresh);
                    }
                    break;
                }
            }
            room.await;
        }
        self.more.notify_waiters();
    }

    /// Nobody waits for readers any more: a command that is being killed must be able to end.
    pub fn stop_waiting(&self) {
        let mut state = self.state();
        if state.readers.is_empty() {
            state.overflow = Overflow::Drop;
        }
        drop(state);
        self.room.notify_one();
    }

    /// Ends it; the first end is the end. Gives whether this was it.
    pub fn end(&self, finish: Finish) -> bool {
        let mut state = self.state();
        let is_first = state.finish.is_none();
        if is_first {
            state.finish = Some(Arc::new(finish));
        }
        drop(state);
        self.more.notify_waiters();
        self.room.notify_one();
        is_first
    }

    pub fn finish(&self) -> Option<Arc<Finish>> {
        self.state().finish.clone()
    }

    /// Waits for the end. Cancellation-safe.
    pub async fn ended(&self) -> Arc<Finish> {
        loop {
            let mut more = std::pin::pin!(self.more.notified());
            more.as_mut().enable();
            if let Some(finish) = self.finish() {
                return finish;
            }
            more.await;
        }
    }

    /// Bytes made, by channel.
    pub fn made(&self) -> Offsets {
        let state = self.state();
        std::array::from_fn(|channel| state.rings[channel].end)
    }

    /// What it costs to keep.
    pub fn cost(&self) -> u64 {
        self.state().rings.iter().map(|ring| ring.cost).sum()
    }

    pub fn readers(&self) -> usize {
        self.state().readers.len()
    }

    /// A reader that begins at these bytes. One that is not here yet may still come: a server that has taken a command over
    /// does not know yet how far it was.
    ///
    /// # Errors
    /// When one of them is not kept any more, or was not made by the end.
    pub fn read_from(self: &Arc<Self>, at: Offsets) -> Result<Reader, NotKept> {
        let mut state = self.state();
        for channel in Channel::ALL {
            let ring = &state.rings[channel.index()];
            let (wanted, first, end) = (at[channel.index()], ring.first(), ring.end);
            if wanted < first || (wanted > end && state.finish.is_some()) {
                return Err(NotKept {
                    channel,
                    wanted,
                    first,
                    end,
                });
            }
        }
        let key = state.next_reader;
        state.next_reader += 1;
        let position = Position { at, dropped: [0; 3] };
        state.readers.insert(key, position);
        drop(state);
        // One that is ahead wants what the writer holds back.
        self.room.notify_one();
        Ok(Reader {
            log: Arc::clone(self),
            key,
            is_done: false,
        })
    }
}

/// One who reads a log.
#[derive(Debug)]
pub struct Reader {
    log: Arc<Log>,
    key: u64,
    is_done: bool,
}

impl Reader {
    /// The next piece, waiting for it; `None` after the end. Cancellation-safe.
    pub async fn next(&mut self) -> Option<Item> {
        if self.is_done {
            return None;
        }
        let log = Arc::clone(&self.log);
        loop {
            let mut more = std::pin::pin!(log.more.notified());
            more.as_mut().enable();
            if let Some(item) = self.ready() {
                return Some(item);
            }
            more.await;
        }
    }

    fn ready(&mut self) -> Option<Item> {
        let mut state = self.log.state();
        let position = state.readers.get(&self.key).copied().unwrap_or_default();
        if let Some((item, position)) = state.next_for(position) {
            state.readers.insert(self.key, position);
            drop(state);
            self.log.room.notify_one();
            return Some(item);
        }
        let finish = state.finish.clone()?;
        let counts = |channel: usize| {
            let bytes = state.rings[channel].end;
            Counts {
                bytes,
                dropped_bytes: position.dropped[channel] + bytes.saturating_sub(position.at[channel]),
            }
        };
        self.is_done = true;
        Some(Item::Ended {
            finish,
            counts: std::array::from_fn(counts),
        })
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let mut state = self.log.state();
        if let Some(position) = state.readers.remove(&self.key) {
            for (ring, at) in state.rings.iter_mut().zip(position.at) {
                ring.taken = ring.taken.max(at);
            }
        }
        drop(state);
        self.log.room.notify_one();
    }
}
