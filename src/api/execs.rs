//! The streams of commands: what a client sends goes in, what the command's log has comes out. Each way goes on when the
//! other waits.

use std::sync::Arc;

use futures::{Stream, StreamExt};
use tonic::{Response, Status, Streaming};

use super::convert::person;
use super::proto::{self, attach_request, exec_request};
use super::status::{self, invalid};
use super::{Answer, Out, convert_exec as convert};
use crate::fleet::execs::{Attached, Entry};
use crate::fleet::{Aim, Fleet};

/// What a client says to a command that runs.
enum Word {
    Stdin(Vec<u8>),
    Eof,
    Resize(proto::TerminalSize),
    Signal(i32),
    Kill,
}

pub async fn exec(fleet: &Fleet, mut words: Streaming<proto::ExecRequest>) -> Answer<Out<proto::ExecEvent>> {
    let first = words.message().await?.and_then(|request| request.kind);
    let Some(exec_request::Kind::Start(start)) = first else {
        return Err(invalid("the first message has `start`"));
    };
    let (sandbox, has_stdin) = (start.sandbox_id.clone(), start.stdin);
    let start = convert::start(start)?;
    let by = start.by.clone();
    let attached = fleet.exec(&sandbox, start).await;
    let attached = attached.map_err(|error| status::of_fleet(&error))?;
    let words = words.map(|word| {
        Ok(match word?.kind {
            Some(exec_request::Kind::Stdin(bytes)) => Word::Stdin(bytes),
            Some(exec_request::Kind::StdinEof(_)) => Word::Eof,
            Some(exec_request::Kind::Resize(size)) => Word::Resize(size),
            Some(exec_request::Kind::Signal(signal)) => Word::Signal(signal),
            Some(exec_request::Kind::Kill(_)) => Word::Kill,
            Some(exec_request::Kind::Start(_)) | None => return Err(invalid("only the first message has `start`")),
        })
    });
    let ends_stdin = if has_stdin {
        AtHalfClose::EndStdin
    } else {
        AtHalfClose::Nothing
    };
    Ok(respond(fleet, sandbox, attached, words, ends_stdin, by))
}

pub async fn attach(fleet: &Fleet, mut words: Streaming<proto::AttachRequest>) -> Answer<Out<proto::ExecEvent>> {
    let first = words.message().await?.and_then(|request| request.kind);
    let Some(attach_request::Kind::Start(start)) = first else {
        return Err(invalid("the first message has `start`"));
    };
    let attached = fleet.attach(&start.sandbox_id, &start.exec_id, convert::offsets(&start));
    let attached = attached.map_err(|error| status::of_fleet(&error))?;
    let words = words.map(|word| {
        Ok(match word?.kind {
            Some(attach_request::Kind::Stdin(bytes)) => Word::Stdin(bytes),
            Some(attach_request::Kind::StdinEof(_)) => Word::Eof,
            Some(attach_request::Kind::Resize(size)) => Word::Resize(size),
            Some(attach_request::Kind::Signal(signal)) => Word::Signal(signal),
            Some(attach_request::Kind::Kill(_)) => Word::Kill,
            Some(attach_request::Kind::Start(_)) | None => return Err(invalid("only the first message has `start`")),
        })
    });
    let sandbox = start.sandbox_id;
    Ok(respond(
        fleet,
        sandbox,
        attached,
        words,
        AtHalfClose::Nothing,
        String::new(),
    ))
}

/// What it means that a client says no more.
#[derive(PartialEq)]
enum AtHalfClose {
    EndStdin,
    Nothing,
}

fn respond(
    fleet: &Fleet,
    sandbox: String,
    attached: Attached,
    words: impl Stream<Item = Result<Word, Status>> + Send + Unpin + 'static,
    at_half_close: AtHalfClose,
    by: String,
) -> Response<Out<proto::ExecEvent>> {
    let entry = Arc::clone(&attached.entry);
    let (failed, failure) = tokio::sync::oneshot::channel();
    let passer = {
        let (entry, fleet) = (Arc::clone(&entry), fleet.clone());
        async move {
            let passed = tokio::select! {
                passed = pass(&fleet, &sandbox, &entry, words, at_half_close, by) => passed,
                _ = entry.log.ended() => Ok(()),
            };
            if let Err(status) = passed {
                // The other way may have ended.
                let _ = failed.send(status);
            }
        }
    };
    // Ends with the client's words, with the command, or with the server.
    fleet.spawn("input of a command", move |stop| async move {
        tokio::select! {
            () = passer => {}
            () = stop.cancelled() => {}
        }
    });
    let stop = fleet.stopping();
    let events = async_stream::stream! {
        let mut attached = attached;
        let mut failure = std::pin::pin!(failure);
        let mut may_fail = true;
        yield Ok(convert::started(entry.id.as_str(), entry.pid));
        loop {
            tokio::select! {
                biased;
                item = attached.next() => match item {
                    Some(item) => yield Ok(convert::item(item)),
                    None => return,
                },
                failed = &mut failure, if may_fail => match failed {
                    Ok(status) => {
                        yield Err(status);
                        return;
                    }
                    Err(_) => may_fail = false,
                },
                () = stop.cancelled() => {
                    yield Err(status::of_fleet(&crate::fleet::Error::Stopping));
                    return;
                }
            }
        }
    };
    Response::new(Box::pin(events))
}

/// Passes a client's words on, in order; an error ends the call.
async fn pass(
    fleet: &Fleet,
    sandbox: &str,
    entry: &Entry,
    mut words: impl Stream<Item = Result<Word, Status>> + Send + Unpin,
    at_half_close: AtHalfClose,
    by: String,
) -> Result<(), Status> {
    let control = entry.control();
    // A command that takes no more has ended, which its log tells.
    while let Some(word) = words.next().await {
        let _ = match word {
            // The client is gone: that is told by its other half.
            Err(status) if status.code() == tonic::Code::Cancelled || status.code() == tonic::Code::Unknown => {
                return Ok(());
            }
            Err(status) => return Err(status),
            Ok(Word::Stdin(bytes)) if bytes.len() > convert::MAX_STDIN => {
                return Err(invalid(format!(
                    "`stdin` is at most {} bytes a message",
                    convert::MAX_STDIN
                )));
            }
            Ok(Word::Stdin(bytes)) => control.input(&bytes).await,
            Ok(Word::Eof) => control.close_input().await,
            Ok(Word::Signal(signal)) if (1..=64).contains(&signal) => {
                // One that has ended, which its log tells.
                let _ = fleet.signal_entry(sandbox, entry, signal, Aim::Group, &by).await;
                Ok(())
            }
            Ok(Word::Signal(signal)) => return Err(invalid(format!("`signal`: there is no signal {signal}"))),
            Ok(Word::Resize(size)) => control.resize(convert::terminal(size)?).await,
            Ok(Word::Kill) => {
                entry.kill(&by).await;
                Ok(())
            }
        };
    }
    if at_half_close == AtHalfClose::EndStdin {
        let _ = control.close_input().await;
    }
    Ok(())
}

pub async fn signal(fleet: &Fleet, request: proto::SignalRequest) -> Answer<proto::SignalResponse> {
    let proto::SignalRequest {
        sandbox_id,
        exec_id,
        signal,
        tree,
        by,
    } = request;
    let to = if tree { Aim::Tree } else { Aim::Group };
    let sent = fleet.signal(&sandbox_id, &exec_id, signal, to, &person(by)?).await;
    sent.map_err(|error| status::of_fleet(&error))?;
    Ok(Response::new(proto::SignalResponse {}))
}
