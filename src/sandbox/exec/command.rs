//! What is asked for: a program, and how it is to be run.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::ids::ExecId;

/// Between SIGTERM and SIGKILL when a command's time is up, unless it asks for another.
pub const GRACE: Duration = Duration::from_millis(500);
/// Longest that a command can ask for. A server that takes a command over is not told its grace, and waits for so long.
pub const MAX_GRACE: Duration = Duration::from_secs(60);

/// One command to run.
#[derive(Debug, Clone, PartialEq)]
pub struct Command {
    /// `None` = a random one.
    pub id: Option<ExecId>,
    pub argv: Vec<Vec<u8>>,
    /// On top of the sandbox's own minimal environment.
    pub env: BTreeMap<String, String>,
    /// Absolute, or relative to the default: `/workspace`, or `/tmp` in a sandbox without one.
    pub cwd: Option<Vec<u8>>,
    pub timeout: Option<Duration>,
    pub stdin: Stdin,
    /// Run it on a pseudo-terminal of this size: all output is [`Output::Pty`](super::Output::Pty) then, and input can be
    /// sent whatever `stdin` says.
    pub terminal: Option<TerminalSize>,
    pub background: Background,
    pub overflow: Overflow,
    /// A name or a number from the sandbox's `/etc/passwd`; `None` = the sandbox's user. Never root.
    pub user: Option<String>,
    /// Between SIGTERM and SIGKILL; [`MAX_GRACE`] at most.
    pub grace: Duration,
    /// It outlives the loss of its connection, and dropping its [`Exec`](super::Exec): `Sandbox::attach` goes on with it.
    pub detachable: bool,
}

impl Command {
    /// `argv` with nothing else asked for.
    pub fn new<A: Into<Vec<u8>>>(argv: impl IntoIterator<Item = A>) -> Self {
        Self {
            id: None,
            argv: argv.into_iter().map(Into::into).collect(),
            env: BTreeMap::new(),
            cwd: None,
            timeout: None,
            stdin: Stdin::Null,
            terminal: None,
            background: Background::Kill,
            overflow: Overflow::Wait,
            user: None,
            grace: GRACE,
            detachable: false,
        }
    }

    /// `text` run by `sh -c`.
    pub fn shell(text: &str) -> Self {
        Self::new(["sh", "-c", text])
    }

    pub fn id(mut self, id: ExecId) -> Self {
        self.id = Some(id);
        self
    }

    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    pub fn stdin(mut self, stdin: Stdin) -> Self {
        self.stdin = stdin;
        self
    }

    pub fn cwd(mut self, cwd: impl Into<Vec<u8>>) -> Self {
        self.cwd = Some(cwd.into());
        self
    }

    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.insert(name.to_owned(), value.to_owned());
        self
    }

    pub fn terminal(mut self, size: TerminalSize) -> Self {
        self.terminal = Some(size);
        self
    }

    pub fn background(mut self, background: Background) -> Self {
        self.background = background;
        self
    }

    pub fn overflow(mut self, overflow: Overflow) -> Self {
        self.overflow = overflow;
        self
    }

    pub fn user(mut self, user: impl Into<String>) -> Self {
        self.user = Some(user.into());
        self
    }

    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    pub fn detachable(mut self) -> Self {
        self.detachable = true;
        self
    }
}

/// What the command reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stdin {
    /// `/dev/null`.
    Null,
    Bytes(Vec<u8>),
    /// Sent later through [`Exec::input`](super::Exec::input).
    Open,
}

/// Of a pseudo-terminal, in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TerminalSize {
    pub rows: u16,
    pub columns: u16,
}

/// What becomes of processes that outlive the command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Background {
    /// They are killed at its end.
    #[default]
    Kill,
    /// They live on, as long as the sandbox does; what they still write is thrown away.
    Keep,
}

/// What happens when output is made faster than it is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Overflow {
    /// The command waits.
    #[default]
    Wait,
    /// The oldest is thrown away, and counted in [`Ended`](super::Ended).
    Drop,
}
