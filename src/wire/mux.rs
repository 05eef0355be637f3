//! Many connections over one pair of byte streams, for a guest that no socket reaches (gVisor).
//!
//! Owns: the frames, what each side may send when, and what is held meanwhile. No IO: [`super::pump`] moves the bytes. Both
//! ends are the same code; what differs is the [`Side`].
//!
//! A frame is a kind (1 byte), a connection (u32), a number (u32), big-endian, and for `data` as many bytes as the number says.
//!
//! | kind | who | number | meaning |
//! |---|---|---|---|
//! | open | host | – | a connection; its numbers only grow, none is used twice |
//! | data | both | length, 1 to [`CHUNK`] | only within the window |
//! | credit | both | bytes | so much was taken: the window grows by it |
//! | eof | both | – | no more data from here |
//! | close | both | – | nothing more from here, nothing more taken |
//! | pause | host | – | stop at a frame's end, for a memory snapshot |
//! | paused | guest | – | the last frame until `resume` |
//! | resume | host | 0 or 1 | go on; 1 = the host is another: its predecessor's connections have no peer any more |
//! | end | host | – | end the sandbox |
//! | deaf | guest | – | nothing is understood until a new host begins (only over a [`super::line`]) |
//!
//! **No deadlock**: what comes in is always taken, as each connection holds at most [`WINDOW`] bytes of it; it waits for its own
//! reader alone. **Bounded**: by [`CONNECTIONS`] times [`WINDOW`], and [`OUTBOX`] for what waits to go out.
//!
//! To the host everything that comes is hostile: what breaks these rules is a [`Violation`], and the end of all connections.

use std::collections::{BTreeMap, VecDeque};

/// Most bytes of data in one frame.
pub const CHUNK: usize = 32 << 10;
/// Most bytes that a connection may have sent and the other side not yet have taken.
pub const WINDOW: usize = 128 << 10;
/// Connections at a time.
pub const CONNECTIONS: usize = 256;
/// Bytes that may wait to go out before no more are taken in from connections.
pub const OUTBOX: usize = 128 << 10;
const HEADER: usize = 9;

/// Which end this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Opens connections. When a client hangs up, the guest hears of it at once.
    Host,
    /// Serves them. When a server hangs up, the host hears its last words first.
    Guest,
}

/// What the other end must not do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Violation(pub &'static str);

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the other end broke the rules: {}", self.0)
    }
}

impl std::error::Error for Violation {}

/// What came in that is not about the data of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum News {
    Opened(u32),
    Pause,
    Paused,
    Resume { is_new_host: bool },
    End,
    Deaf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Kind {
    Open = 1,
    Data,
    Credit,
    Eof,
    Close,
    Pause,
    Paused,
    Resume,
    End,
    Resumed,
    Deaf,
}

impl Kind {
    fn of(byte: u8) -> Option<Self> {
        const ALL: [Kind; 11] = [
            Kind::Open,
            Kind::Data,
            Kind::Credit,
            Kind::Eof,
            Kind::Close,
            Kind::Pause,
            Kind::Paused,
            Kind::Resume,
            Kind::End,
            Kind::Resumed,
            Kind::Deaf,
        ];
        ALL.into_iter().find(|kind| *kind as u8 == byte)
    }
}

/// How far the other end is with its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Incoming {
    Open,
    Ended,
    Closed,
}

#[derive(Debug)]
struct Connection {
    /// Data for the local peer.
    waiting: VecDeque<u8>,
    incoming: Incoming,
    /// Taken by the local peer and not yet credited.
    taken: usize,
    /// Bytes that may still be sent.
    window: usize,
    has_ended: bool,
}

/// The state of one end.
#[derive(Debug)]
pub struct Mux {
    side: Side,
    connections: BTreeMap<u32, Connection>,
    /// The newest connection's number.
    last: u32,
    inbox: Vec<u8>,
    outbox: VecDeque<u8>,
    is_paused: bool,
    /// Host: the guest has not said yet that it has let go of its earlier connections, whose numbers are used again.
    awaits_resumed: bool,
}

impl Mux {
    pub fn new(side: Side) -> Self {
        Self {
            side,
            connections: BTreeMap::new(),
            last: 0,
            inbox: Vec::new(),
            outbox: VecDeque::new(),
            is_paused: false,
            awaits_resumed: false,
        }
    }

    pub fn side(&self) -> Side {
        self.side
    }

    /// Whether there is to be quiet.
    pub fn is_paused(&self) -> bool {
        self.is_paused
    }

    /// Whether one more connection may be opened now.
    pub fn can_open(&self) -> bool {
        let is_quiet = self.is_paused || self.awaits_resumed;
        !is_quiet && self.connections.len() < CONNECTIONS && self.outbox.len() < OUTBOX && self.last < u32::MAX
    }

    /// Opens a connection; see [`Self::can_open`].
    pub fn open(&mut self) -> u32 {
        self.last += 1;
        self.add(self.last);
        self.put(Kind::Open, self.last, 0);
        self.last
    }

    fn add(&mut self, id: u32) {
        let fresh = Connection {
            waiting: VecDeque::new(),
            incoming: Incoming::Open,
            taken: 0,
            window: WINDOW,
            has_ended: false,
        };
        self.connections.insert(id, fresh);
    }

    /// How many bytes the local peer of a connection may be asked for now.
    pub fn room(&self, id: u32) -> usize {
        match self.connections.get(&id) {
            Some(connection) if !connection.has_ended && !self.is_paused => {
                let outbox = OUTBOX.saturating_sub(self.outbox.len());
                connection.window.min(CHUNK).min(outbox)
            }
            Some(_) | None => 0,
        }
    }

    /// Sends what the local peer said, at most [`Self::room`].
    pub fn send(&mut self, id: u32, data: &[u8]) {
        debug_assert!(data.len() <= self.room(id));
        if let Some(connection) = self.connections.get_mut(&id)
            && !data.is_empty()
        {
            connection.window = connection.window.saturating_sub(data.len());
            self.put(Kind::Data, id, data.len() as u32);
            self.outbox.extend(data);
        }
    }

    /// The local peer says no more.
    pub fn end(&mut self, id: u32) {
        if let Some(connection) = self.connections.get_mut(&id)
            && !std::mem::replace(&mut connection.has_ended, true)
        {
            self.put(Kind::Eof, id, 0);
        }
    }

    /// Whether the local peer has said its last.
    pub fn has_ended(&self, id: u32) -> bool {
        self.connections.get(&id).is_none_or(|connection| connection.has_ended)
    }

    /// The local peer is gone.
    pub fn close(&mut self, id: u32) {
        if self.connections.remove(&id).is_some() {
            self.put(Kind::Close, id, 0);
        }
    }

    /// Drops a connection that both ends are done with, or know to be closed.
    pub fn forget(&mut self, id: u32) {
        self.connections.remove(&id);
    }

    /// What the local peer has not taken yet, the first part of it.
    pub fn waiting(&self, id: u32) -> &[u8] {
        self.connections
            .get(&id)
            .map_or(&[], |connection| connection.waiting.as_slices().0)
    }

    /// The local peer took so much of [`Self::waiting`].
    pub fn took(&mut self, id: u32, bytes: usize) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.waiting.drain(..bytes);
            connection.taken += bytes;
        }
    }

    /// How far the other end is; `Closed` for none.
    pub fn incoming(&self, id: u32) -> Incoming {
        self.connections
            .get(&id)
            .map_or(Incoming::Closed, |connection| connection.incoming)
    }

    /// Gives credit for what was taken, as far as there is room for saying so.
    pub fn credit(&mut self) {
        if self.is_paused {
            return;
        }
        let mut due = Vec::new();
        for (id, connection) in &mut self.connections {
            // Not for every byte.
            if connection.taken >= WINDOW / 4
                && connection.incoming == Incoming::Open
                && self.outbox.len() + due.len() * HEADER < OUTBOX
            {
                due.push((*id, std::mem::take(&mut connection.taken)));
            }
        }
        for (id, bytes) in due {
            self.put(Kind::Credit, id, bytes as u32);
        }
    }

    /// Host: asks for quiet. Nothing more is sent until [`Self::resume`].
    pub fn pause(&mut self) {
        self.put(Kind::Pause, 0, 0);
        self.is_paused = true;
    }

    /// Guest: adds nothing more to the outbox.
    pub fn hold(&mut self) {
        self.is_paused = true;
    }

    /// Guest: there is quiet, once the outbox is empty.
    pub fn paused(&mut self) {
        self.put(Kind::Paused, 0, 0);
        self.is_paused = true;
    }

    /// Host: goes on, with the guest of another host where `is_new_host`.
    pub fn resume(&mut self, is_new_host: bool) {
        self.is_paused = false;
        self.awaits_resumed = is_new_host;
        self.put(Kind::Resume, 0, u32::from(is_new_host));
    }

    /// Guest: goes on; for a new host with no connection. Returns those that it had.
    pub fn resumed(&mut self, is_new_host: bool) -> Vec<u32> {
        self.is_paused = false;
        if !is_new_host {
            return Vec::new();
        }
        self.last = 0;
        self.put(Kind::Resumed, 0, 0);
        std::mem::take(&mut self.connections).into_keys().collect()
    }

    /// Guest: another host has begun, without a word from the one before, and awaits this. All that was before is gone;
    /// returns the connections that there were.
    pub fn begin(&mut self, word: &[u8]) -> Vec<u32> {
        self.inbox.clear();
        self.outbox.clear();
        self.is_paused = false;
        self.last = 0;
        self.outbox.extend(word);
        std::mem::take(&mut self.connections).into_keys().collect()
    }

    /// Guest: nothing of what comes is understood.
    pub fn deaf(&mut self) {
        self.put(Kind::Deaf, 0, 0);
    }

    /// Host: the sandbox is to end.
    pub fn end_all(&mut self) {
        self.put(Kind::End, 0, 0);
    }

    /// Both streams are gone: every connection counts as closed by the other end.
    pub fn lost(&mut self) {
        self.inbox.clear();
        self.outbox.clear();
        self.is_paused = false;
        self.awaits_resumed = false;
        for connection in self.connections.values_mut() {
            connection.incoming = Incoming::Closed;
        }
    }

    /// What is to go out, the first part of it.
    pub fn outbox(&self) -> &[u8] {
        self.outbox.as_slices().0
    }

    /// So much of [`Self::outbox`] went out.
    pub fn went(&mut self, bytes: usize) {
        self.outbox.drain(..bytes);
    }

    fn put(&mut self, kind: Kind, id: u32, number: u32) {
        self.outbox.extend([kind as u8]);
        self.outbox.extend(id.to_be_bytes());
        self.outbox.extend(number.to_be_bytes());
    }

    /// Takes bytes from the other end, however they are cut.
    ///
    /// # Errors
    /// [`Violation`]; nothing that comes later makes sense.
    pub fn receive(&mut self, bytes: &[u8]) -> Result<Vec<News>, Violation> {
        self.inbox.extend_from_slice(bytes);
        let inbox = std::mem::take(&mut self.inbox);
        let mut rest = inbox.as_slice();
        let mut news = Vec::new();
        while let Some((head, body)) = rest.split_first_chunk::<HEADER>() {
            let kind = Kind::of(head[0]).ok_or(Violation("an unknown kind of frame"))?;
            let number = |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
            let (id, number) = (number(1), number(5));
            let length = match kind {
                Kind::Data => number as usize,
                _ => 0,
            };
            if length > CHUNK {
                return Err(Violation("a frame that is too long"));
            }
            let Some((data, after)) = body.split_at_checked(length) else {
                break;
            };
            news.extend(self.frame(kind, id, number, data)?);
            rest = after;
        }
        self.inbox = rest.to_vec();
        Ok(news)
    }

    fn frame(&mut self, kind: Kind, id: u32, number: u32, data: &[u8]) -> Result<Option<News>, Violation> {
        let is_guest = self.side == Side::Guest;
        match kind {
            Kind::Open | Kind::Pause | Kind::Resume | Kind::End if !is_guest => {
                return Err(Violation("a frame that only the host may send"));
            }
            Kind::Paused | Kind::Resumed | Kind::Deaf if is_guest => {
                return Err(Violation("a frame that only the guest may send"));
            }
            Kind::Open if id <= self.last => return Err(Violation("a connection's number used twice")),
            Kind::Open => {
                self.last = id;
                if self.connections.len() < CONNECTIONS {
                    self.add(id);
                    return Ok(Some(News::Opened(id)));
                }
                self.put(Kind::Close, id, 0);
            }
            Kind::Pause => return Ok(Some(News::Pause)),
            Kind::Paused => return Ok(Some(News::Paused)),
            Kind::Deaf => return Ok(Some(News::Deaf)),
            Kind::Resumed => self.awaits_resumed = false,
            Kind::Resume => {
                return Ok(Some(News::Resume {
                    is_new_host: number != 0,
                }));
            }
            Kind::End => return Ok(Some(News::End)),
            Kind::Data | Kind::Credit | Kind::Eof | Kind::Close => self.about(kind, id, number, data)?,
        }
        Ok(None)
    }

    fn about(&mut self, kind: Kind, id: u32, number: u32, data: &[u8]) -> Result<(), Violation> {
        if id == 0 || id > self.last {
            return Err(Violation("a connection that never was"));
        }
        // Closed here, and the other end does not know yet.
        let Some(connection) = self.connections.get_mut(&id) else {
            return Ok(());
        };
        if connection.incoming == Incoming::Closed {
            return Err(Violation("a word after the last"));
        }
        match kind {
            Kind::Data if connection.incoming == Incoming::Ended => return Err(Violation("data after its end")),
            Kind::Data if data.is_empty() => return Err(Violation("empty data")),
            Kind::Data if connection.waiting.len() + connection.taken + data.len() > WINDOW => {
                return Err(Violation("data beyond the window"));
            }
            Kind::Data => connection.waiting.extend(data),
            Kind::Credit => {
                let window = connection.window + number as usize;
                if window > WINDOW {
                    return Err(Violation("credit for what was not sent"));
                }
                connection.window = window;
            }
            Kind::Eof => connection.incoming = Incoming::Ended,
            Kind::Close => connection.incoming = Incoming::Closed,
            Kind::Open | Kind::Pause | Kind::Paused | Kind::Resume | Kind::Resumed | Kind::End | Kind::Deaf => {}
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "mux_tests.rs"]
mod tests;
