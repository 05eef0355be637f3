//! The terminal here: its size, and raw mode that ends on every way out.

use std::io::{self, IsTerminal};
use std::os::fd::OwnedFd;

use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

use crate::api::proto;

/// A size for output that goes to no terminal.
const ELSEWHERE: proto::TerminalSize = proto::TerminalSize { rows: 24, columns: 80 };

/// The size of the terminal that output goes to, or input comes from.
pub(super) fn size() -> proto::TerminalSize {
    let size = tcgetwinsize(io::stdout()).or_else(|_| tcgetwinsize(io::stdin()));
    match size {
        Ok(size) if size.ws_row > 0 && size.ws_col > 0 => proto::TerminalSize {
            rows: size.ws_row.into(),
            columns: size.ws_col.into(),
        },
        Ok(_) | Err(_) => ELSEWHERE,
    }
}

/// Standard input in raw mode: each key goes through as its bytes, Ctrl-C too. Dropping this gives the terminal back as
/// it was; whoever holds it listens for signals, so that they end it by a drop.
#[derive(Debug)]
pub(super) struct Raw {
    terminal: OwnedFd,
    before: Termios,
}

impl Raw {
    /// `None` when standard input is no terminal.
    ///
    /// # Errors
    /// The terminal does not let its mode be set; it is as it was.
    pub fn enter() -> io::Result<Option<Self>> {
        let stdin = io::stdin();
        if !stdin.is_terminal() {
            return Ok(None);
        }
        // Of its own: it can be given back also when standard input is closed by then.
        let terminal = rustix::io::fcntl_dupfd_cloexec(&stdin, 3)?;
        let before = tcgetattr(&terminal)?;
        let mut raw = before.clone();
        raw.make_raw();
        let held = Self { terminal, before };
        // From here on a failure gives it back, too.
        tcsetattr(&held.terminal, OptionalActions::Drain, &raw)?;
        Ok(Some(held))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // A terminal that has gone away needs nothing.
        let _ = tcsetattr(&self.terminal, OptionalActions::Drain, &self.before);
    }
}
