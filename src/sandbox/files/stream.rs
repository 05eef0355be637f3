//! Files of any size, piece by piece, in flat memory.

use bytes::Bytes;

use super::call::{self, Call};
use super::{Entry, Range, entry};
use crate::sandbox::exec::Control;
use crate::sandbox::{Error, Sandbox};
use crate::wire;
use crate::wire::file_reply::Kind as Reply;
use crate::wire::file_request::{self, Kind as Request};

/// A file that is being read. What is not taken waits in the sandbox.
#[derive(Debug)]
pub struct Reading {
    call: Call,
    entry: Entry,
    /// What may still come; `None` = to the end.
    left: Option<u64>,
    done: bool,
}

impl Reading {
    pub(super) async fn open(sandbox: &Sandbox, path: &[u8], range: Range) -> Result<Self, Error> {
        let request = file_request::Read {
            path: path.to_vec(),
            offset: range.offset,
            // 0 means "to the end" on the wire.
            length: range.length.map_or(0, |length| length.max(1)),
        };
        let (mut call, frame) = Call::open(sandbox, Request::Read(request), None).await?;
        let sending = call::send(call.control(), frame, None);
        let entry = match call::beside(call.reply(), sending).await? {
            Reply::Info(info) => entry(info),
            Reply::Data(_) | Reply::Match(_) | Reply::Done(_) | Reply::Error(_) | Reply::Change(_) => {
                return Err(call.lost("its answer to a file call was out of place"));
            }
        };
        Ok(Self {
            call,
            entry,
            left: range.length,
            done: false,
        })
    }

    /// The file, as it was when it was opened.
    pub fn entry(&self) -> &Entry {
        &self.entry
    }

    /// The next bytes; `None` at the end. Cancellation-safe.
    pub async fn next(&mut self) -> Result<Option<Bytes>, Error> {
        if self.done || self.left == Some(0) {
            return Ok(None);
        }
        match self.call.reply().await? {
            Reply::Data(data) => {
                if let Some(left) = &mut self.left {
                    let rest = left.checked_sub(data.len() as u64);
                    *left = rest.ok_or_else(|| self.call.lost("it sent more of a file than was asked for"))?;
                }
                Ok(Some(data))
            }
            Reply::Done(_) => {
                self.done = true;
                self.call.close(&Ok(())).await;
                Ok(None)
            }
            Reply::Info(_) | Reply::Match(_) | Reply::Error(_) | Reply::Change(_) => {
                Err(self.call.lost("its answer to a file call was out of place"))
            }
        }
    }
}

/// A file that is being written. Dropping it before [`Writing::finish`] leaves everything as it was.
#[derive(Debug)]
pub struct Writing {
    call: Call,
    control: Option<Control>,
    frame: Vec<u8>,
}

impl Writing {
    pub(super) async fn open(sandbox: &Sandbox, path: &[u8], mode: Option<u32>) -> Result<Self, Error> {
        let request = file_request::Write {
            path: path.to_vec(),
            mode: mode.unwrap_or(0),
        };
        let (call, frame) = Call::open(sandbox, Request::Write(request), None).await?;
        Ok(Self {
            control: call.control(),
            call,
            frame,
        })
    }

    /// Adds bytes; waits while the sandbox does not take them. Not cancellation-safe: a part may have been sent.
    ///
    /// # Errors
    /// What went wrong inside: no such directory, no space, and the like. Nothing was written then.
    pub async fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        for data in bytes.chunks(wire::CHUNK) {
            call::chunk(data, &mut self.frame);
            self.send().await?;
        }
        Ok(())
    }

    /// Puts the file in its place.
    pub async fn finish(mut self) -> Result<Entry, Error> {
        call::chunk(&[], &mut self.frame);
        self.send().await?;
        if let Some(control) = &self.control {
            let _ = control.close_input().await;
        }
        let answer = self.answer().await;
        self.call.close(&answer).await;
        answer
    }

    async fn answer(&mut self) -> Result<Entry, Error> {
        let mut found = None;
        loop {
            match (self.call.reply().await?, found.take()) {
                (Reply::Info(info), None) => found = Some(entry(info)),
                (Reply::Done(_), Some(entry)) => return Ok(entry),
                (
                    Reply::Info(_)
                    | Reply::Done(_)
                    | Reply::Data(_)
                    | Reply::Match(_)
                    | Reply::Error(_)
                    | Reply::Change(_),
                    _,
                ) => return Err(self.call.lost("its answer to a file call was out of place")),
            }
        }
    }

    async fn send(&mut self) -> Result<(), Error> {
        let sent = match &self.control {
            Some(control) => control.input(&self.frame).await.is_ok(),
            None => false,
        };
        self.frame.clear();
        match sent {
            true => Ok(()),
            // It takes no more: it has said why.
            false => match self.answer().await {
                Ok(_) => Err(self.call.lost("a file was finished before its end")),
                Err(error) => Err(error),
            },
        }
    }
}
