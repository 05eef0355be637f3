//! One conversation with the guest's file plane.

use std::convert::Infallible;
use std::future::{Future, pending};
use std::time::Duration;

use bytes::{Bytes, BytesMut};

use crate::ids::SandboxId;
use crate::sandbox::exec::{Cause, Control, Exec, Output};
use crate::sandbox::{Error, Sandbox};
use crate::wire::file_reply::Kind as Reply;
use crate::wire::file_request::Kind as Request;
use crate::wire::{self, FileChunk, FileReply, FileRequest};

/// A file call that was begun. Dropping it aborts it.
#[derive(Debug)]
pub(super) struct Call {
    exec: Option<Exec>,
    buffer: BytesMut,
    sandbox: SandboxId,
    limit: Option<Duration>,
}

impl Call {
    /// The call, and its request as a frame that is to be sent first.
    pub async fn open(sandbox: &Sandbox, request: Request, limit: Option<Duration>) -> Result<(Self, Vec<u8>), Error> {
        let mut frame = Vec::new();
        wire::encode(&FileRequest { kind: Some(request) }, &mut frame).map_err(|error| Error::File {
            code: "too_large".to_owned(),
            message: format!("the path or the pattern is too long: {error}"),
        })?;
        let call = Self {
            exec: Some(sandbox.file_exec(limit).await?),
            buffer: BytesMut::new(),
            sandbox: sandbox.id().clone(),
            limit,
        };
        Ok((call, frame))
    }

    pub fn control(&self) -> Option<Control> {
        self.exec.as_ref().map(Exec::control)
    }

    pub fn lost(&self, reason: impl Into<String>) -> Error {
        Error::GuestLost {
            sandbox: self.sandbox.clone(),
            reason: reason.into(),
        }
    }

    /// The next reply; `Done` is the last. Cancellation-safe.
    pub async fn reply(&mut self) -> Result<Reply, Error> {
        loop {
            match wire::take::<FileReply>(&mut self.buffer).map_err(|error| self.lost(error.to_string()))? {
                Some(FileReply {
                    kind: Some(Reply::Error(wire::FileError { code, message, .. })),
                }) => return Err(Error::File { code, message }),
                Some(FileReply { kind: Some(reply) }) => return Ok(reply),
                Some(FileReply { kind: None }) => return Err(self.lost("it gave an empty answer to a file call")),
                None => {}
            }
            let output = match &mut self.exec {
                Some(exec) => exec.output.recv().await,
                None => None,
            };
            match output {
                Some(Output::Stdout(piece)) => self.buffer.extend_from_slice(&piece),
                Some(Output::Stderr(_) | Output::Pty(_)) => {}
                None => return Err(self.broken_off().await),
            }
        }
    }

    /// Why there is no further reply.
    async fn broken_off(&mut self) -> Error {
        let cause = match self.exec.take() {
            Some(exec) => exec.ended().await.cause,
            None => return self.lost("a file call was over already"),
        };
        match (cause, self.limit) {
            (Cause::TimedOut { .. }, Some(limit)) => Error::File {
                code: "timeout".to_owned(),
                message: format!("the file call took more than {limit:?}"),
            },
            (cause, _) => self.lost(match cause.sandbox_gone() {
                Some(reason) => reason,
                None => format!("a file call ended without an answer ({cause:?})"),
            }),
        }
    }

    /// After an answer: waits for the end of the process, so that a freeze or a snapshot may follow.
    pub async fn close<T>(&mut self, answer: &Result<T, Error>) {
        if let Some(exec) = self.exec.take()
            && matches!(answer, Ok(_) | Err(Error::File { .. }))
        {
            exec.ended().await;
        }
    }
}

/// `work`, with `aside` going on beside it as long as it lasts.
pub(super) async fn beside<T>(work: impl Future<Output = T>, aside: impl Future<Output = ()>) -> T {
    let aside = async {
        aside.await;
        pending::<Infallible>().await
    };
    tokio::select! {
        biased;
        result = work => result,
        never = aside => match never {},
    }
}

/// A frame of content; an empty one is the end.
pub(super) fn chunk(data: &[u8], frame: &mut Vec<u8>) {
    let chunk = FileChunk {
        data: Bytes::copy_from_slice(data),
    };
    // No chunk is longer than a frame can be.
    let _ = wire::encode(&chunk, frame);
}

/// Sends a request, as a frame, and what is to be written. A guest that takes no more has answered, or is lost: the answer
/// tells.
pub(super) async fn send(control: Option<Control>, mut frame: Vec<u8>, content: Option<&[u8]>) {
    let Some(control) = control else {
        return;
    };
    let chunks = content.into_iter().flat_map(|content| content.chunks(wire::CHUNK));
    for data in chunks.chain(content.map(|_| [].as_slice())) {
        chunk(data, &mut frame);
        if control.input(&frame).await.is_err() {
            return;
        }
        frame.clear();
    }
    if !frame.is_empty() && control.input(&frame).await.is_err() {
        return;
    }
    let _ = control.close_input().await;
}
