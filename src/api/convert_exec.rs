//! Commands of the fleet, proto <-> domain.
#![warn(clippy::wildcard_enum_match_arm)]

use tonic::Status;

use super::convert::{duration, duration_in, time};
use super::proto::{self, exec_ended::Cause as Pb, exec_event::Kind};
use super::status::invalid;
use crate::fleet::execs::{Channel, Counts, ExecView, Finish, How, Item, Offsets, OnDisconnect, Overflow, Start};
use crate::fleet::state::Cause as Over;
use crate::sandbox::Cause;

/// Largest piece of standard input in one message.
pub const MAX_STDIN: usize = 1 << 20;

/// A command, checked for shape.
pub fn start(start: proto::ExecStart) -> Result<Start, Status> {
    let no_enum = |field: &str, number| invalid(format!("`{field}`: there is no {number}"));
    let on_disconnect = match proto::OnDisconnect::try_from(start.on_disconnect) {
        Ok(proto::OnDisconnect::Unspecified | proto::OnDisconnect::Kill) => OnDisconnect::Kill,
        Ok(proto::OnDisconnect::Keep) => OnDisconnect::Keep,
        Err(_) => return Err(no_enum("on_disconnect", start.on_disconnect)),
    };
    let overflow = match proto::Overflow::try_from(start.overflow) {
        Ok(proto::Overflow::Unspecified | proto::Overflow::Wait) => Overflow::Wait,
        Ok(proto::Overflow::Drop) => Overflow::Drop,
        Err(_) => return Err(no_enum("overflow", start.overflow)),
    };
    Ok(Start {
        argv: start.argv,
        env: start.env.into_iter().collect(),
        cwd: (!start.cwd.is_empty()).then_some(start.cwd),
        timeout: duration_in(start.timeout, "timeout")?,
        stdin: start.stdin,
        on_disconnect,
        overflow,
        by: start.by,
    })
}

/// A piece of what a reader gets.
pub fn item(item: Item) -> proto::ExecEvent {
    let kind = match item {
        Item::Output { channel, offset, bytes } => {
            let output = proto::ExecOutput {
                offset,
                data: bytes.into(),
            };
            match channel {
                Channel::Stdout => Kind::Stdout(output),
                Channel::Stderr => Kind::Stderr(output),
                Channel::Pty => Kind::Pty(output),
            }
        }
        Item::Ended { finish, counts } => Kind::Ended(ended(&finish, counts)),
    };
    proto::ExecEvent { kind: Some(kind) }
}

/// The first word about a command.
pub fn started(exec_id: &str, pid: u32) -> proto::ExecEvent {
    let started = proto::ExecStarted {
        exec_id: exec_id.to_owned(),
        pid,
    };
    proto::ExecEvent {
        kind: Some(Kind::Started(started)),
    }
}

fn counts(counts: Counts) -> Option<proto::StreamCounts> {
    Some(proto::StreamCounts {
        bytes: counts.bytes,
        dropped_bytes: counts.dropped_bytes,
    })
}

fn ended(finish: &Finish, by_channel: [Counts; 3]) -> proto::ExecEnded {
    let known = finish.ended.as_ref();
    let [stdout, stderr, _] = by_channel;
    let base = proto::ExecEnded {
        duration: duration(finish.duration),
        cpu: known.and_then(|ended| duration(ended.cpu)),
        max_rss_bytes: known.map_or(0, |ended| ended.max_rss_bytes),
        killed_descendants: known.map_or(0, |ended| ended.killed_descendants),
        stdout: counts(stdout),
        stderr: counts(stderr),
        ..Default::default()
    };
    let with = |cause: Pb| proto::ExecEnded {
        cause: cause.into(),
        ..base.clone()
    };
    match &finish.how {
        How::Itself(Cause::Exited { code }) => proto::ExecEnded {
            exit_code: Some(*code),
            ..with(Pb::Exited)
        },
        How::Itself(Cause::Signalled { signal }) => proto::ExecEnded {
            signal: Some(*signal),
            ..with(Pb::Signalled)
        },
        How::Itself(Cause::TimedOut { after_ms }) => proto::ExecEnded {
            limit: Some(*after_ms),
            ..with(Pb::TimedOut)
        },
        How::Itself(Cause::OutOfMemory {
            limit_bytes,
            peak_bytes,
        }) => proto::ExecEnded {
            limit: Some(*limit_bytes),
            peak: Some(*peak_bytes),
            ..with(Pb::OutOfMemory)
        },
        How::Itself(Cause::Killed { by }) => proto::ExecEnded {
            by: by.clone(),
            ..with(Pb::Killed)
        },
        How::Killed { by, reason } => proto::ExecEnded {
            by: by.clone(),
            reason: reason.clone(),
            ..with(Pb::Killed)
        },
        How::Disconnected => with(Pb::Disconnected),
        How::Itself(Cause::SandboxLost { reason }) | How::Lost { reason } => proto::ExecEnded {
            reason: reason.clone(),
            ..with(Pb::SandboxLost)
        },
        How::Sandbox(end) => {
            let cause = match end.cause {
                Over::Killed => Pb::SandboxKilled,
                Over::Expired => Pb::SandboxExpired,
                Over::Idle => Pb::SandboxIdle,
                Over::OutOfMemory => Pb::SandboxOutOfMemory,
                // One that was never made runs no command.
                Over::Lost | Over::CreateFailed => Pb::SandboxLost,
                Over::Shutdown => Pb::SandboxShutdown,
            };
            proto::ExecEnded {
                by: end.by.clone(),
                reason: end.reason.clone(),
                ..with(cause)
            }
        }
    }
}

/// A command as lists show it.
pub fn info(view: &ExecView) -> proto::ExecInfo {
    let made = view.made.map(|bytes| Counts {
        bytes,
        dropped_bytes: 0,
    });
    proto::ExecInfo {
        exec_id: view.id.to_string(),
        argv: view.argv.clone(),
        pid: view.pid,
        started_at: time(view.started_at),
        ended: view.finish.as_ref().map(|finish| ended(finish, made)),
        attached: view.attached,
    }
}

/// The offsets that a client goes on from.
pub fn offsets(start: &proto::AttachStart) -> Offsets {
    [start.stdout_offset, start.stderr_offset, start.pty_offset]
}
