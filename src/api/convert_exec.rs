//! Commands of the fleet, proto <-> domain.
#![warn(clippy::wildcard_enum_match_arm)]

use tonic::Status;

use super::convert::{duration, duration_in, person, time};
use super::proto::{self, exec_ended::Cause as Pb, exec_event::Kind};
use super::status::invalid;
use crate::fleet::execs::{Channel, Counts, ExecView, Finish, How, Item, Offsets, OnDisconnect, Overflow, Start};
use crate::fleet::state::Cause as Over;
use crate::sandbox::exec::{GRACE, MAX_GRACE, Pressure};
use crate::sandbox::{Background, Cause, TerminalSize};

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
    let background = match proto::Background::try_from(start.background) {
        Ok(proto::Background::Unspecified | proto::Background::Kill) => Background::Kill,
        Ok(proto::Background::Keep) => Background::Keep,
        Err(_) => return Err(no_enum("background", start.background)),
    };
    let grace = duration_in(start.grace, "grace")?.unwrap_or(GRACE);
    if grace > MAX_GRACE {
        return Err(invalid(format!("`grace` is at most {} s", MAX_GRACE.as_secs())));
    }
    Ok(Start {
        argv: start.argv,
        env: start.env.into_iter().collect(),
        cwd: (!start.cwd.is_empty()).then_some(start.cwd),
        timeout: duration_in(start.timeout, "timeout")?,
        stdin: start.stdin,
        terminal: start.terminal.map(terminal).transpose()?,
        on_disconnect,
        background,
        overflow,
        user: (!start.user.is_empty()).then_some(start.user),
        grace,
        by: person(start.by)?,
    })
}

/// A piece of what a reader gets.
pub fn item(item: Item) -> proto::ExecEvent {
    let kind = match item {
        Item::Output { channel, offset, bytes } => {
            let output = proto::ExecOutput { offset, data: bytes };
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

/// The end of a process whose output was not kept.
pub fn finish(finish: &Finish) -> proto::ExecEnded {
    proto::ExecEnded {
        stdout: None,
        stderr: None,
        pty: None,
        ..ended(finish, Default::default())
    }
}

fn ended(finish: &Finish, by_channel: [Counts; 3]) -> proto::ExecEnded {
    let known = finish.ended.as_ref();
    let [stdout, stderr, pty] = by_channel;
    let base = proto::ExecEnded {
        duration: duration(finish.duration),
        cpu: known.and_then(|ended| duration(ended.cpu)),
        max_rss_bytes: known.map_or(0, |ended| ended.max_rss_bytes),
        killed_descendants: known.map_or(0, |ended| ended.killed_descendants),
        kept_descendants: known.map_or(0, |ended| ended.kept_descendants),
        pressure: known.map(|ended| pressure(&ended.pressure)),
        stdout: counts(stdout),
        stderr: counts(stderr),
        pty: counts(pty),
        ..Default::default()
    };
    let with = |cause: Pb| proto::ExecEnded {
        cause: cause.into(),
        ..base.clone()
    };
    let of = |cause: Pb, by: &str, reason: &str| proto::ExecEnded {
        by: by.to_owned(),
        reason: reason.to_owned(),
        ..with(cause)
    };
    let memory = |cause: Pb, limit: u64, peak: u64| proto::ExecEnded {
        limit: Some(limit),
        peak: Some(peak),
        ..with(cause)
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
        }) => memory(Pb::OutOfMemory, *limit_bytes, *peak_bytes),
        How::Itself(Cause::Killed { by }) => of(Pb::Killed, by, ""),
        How::Itself(Cause::Disconnected) => with(Pb::Disconnected),
        How::Itself(Cause::SandboxKilled { by, reason }) => of(Pb::SandboxKilled, by, reason),
        How::Itself(Cause::SandboxExpired) => with(Pb::SandboxExpired),
        How::Itself(Cause::SandboxIdle) => with(Pb::SandboxIdle),
        How::Itself(Cause::SandboxShutdown) => with(Pb::SandboxShutdown),
        How::Itself(Cause::SandboxOutOfMemory {
            limit_bytes,
            peak_bytes,
        }) => memory(Pb::SandboxOutOfMemory, *limit_bytes, *peak_bytes),
        How::Itself(Cause::SandboxLost { reason }) => of(Pb::SandboxLost, "", reason),
        // One server has a data directory, so nobody else can have attached.
        How::Itself(Cause::Superseded) => of(Pb::SandboxLost, "", "another process has attached to it"),
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
            of(cause, &end.by, &end.reason)
        }
    }
}

fn pressure(pressure: &Pressure) -> proto::ExecPressure {
    proto::ExecPressure {
        oom_kills: pressure.oom_kills,
        forks_refused: pressure.forks_refused,
        pids_limit: pressure.pids_limit,
        disk_full: pressure.disk_full,
        disk_limit_bytes: pressure.disk_limit_bytes,
    }
}

/// A size that a terminal can have.
pub fn terminal(size: proto::TerminalSize) -> Result<TerminalSize, Status> {
    let side = |count: u32| u16::try_from(count).ok().filter(|count| *count > 0);
    match (side(size.rows), side(size.columns)) {
        (Some(rows), Some(columns)) => Ok(TerminalSize { rows, columns }),
        (_, _) => Err(invalid("a terminal has 1 to 65535 rows and columns")),
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
