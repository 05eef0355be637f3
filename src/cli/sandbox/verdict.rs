//! Exit codes of `sandbox run`, and what is said about an end that was not the command's own.

use super::show;
use crate::api::proto;
use crate::cli::Error;
use crate::cli::report::clean_line;
use crate::policy::quantity::show_duration;
use crate::sandbox::Cause;

const TIMED_OUT: u8 = 124;
pub(super) const NO_SANDBOX: u8 = 125;
const NOT_EXECUTABLE: u8 = 126;
const NOT_FOUND: u8 = 127;
/// As by Ctrl-C.
const LEFT: u8 = 130;
const KILLED: u8 = 137;
/// As a program has that wrote to a closed pipe.
const OUTPUT_CLOSED: u8 = 141;

/// An exit code, and what a person is told beside it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Verdict {
    pub code: u8,
    pub said: Option<String>,
}

impl Verdict {
    fn said(code: u8, text: impl Into<String>) -> Self {
        Self {
            code,
            said: Some(text.into()),
        }
    }

    pub fn no_sandbox(error: &Error) -> Self {
        let hint = error.hint.as_ref().map(|hint| format!(" ({hint})")).unwrap_or_default();
        Self::said(NO_SANDBOX, format!("no sandbox: {}{hint}", error.message))
    }

    /// A command that a server did not start.
    pub fn refused(error: &Error) -> Self {
        match error.reason.as_deref() {
            Some("PROGRAM_NOT_FOUND") => Self::said(NOT_FOUND, error.message.clone()),
            // The command was not run, though the sandbox is there.
            Some(
                "PROGRAM_NOT_EXECUTABLE"
                | "CWD_NOT_FOUND"
                | "USER_NOT_FOUND"
                | "USER_REFUSED"
                | "NO_TERMINAL"
                | "EXEC_TOO_LARGE"
                | "LIMIT"
                | "EXEC_NOT_STARTED",
            ) => Self::said(NOT_EXECUTABLE, error.message.clone()),
            Some(_) | None => Self::no_answer(error),
        }
    }

    /// The server, or the way to it, failed.
    pub fn no_answer(error: &Error) -> Self {
        let hint = error.hint.as_ref().map(|hint| format!(" ({hint})")).unwrap_or_default();
        Self::said(NO_SANDBOX, format!("{}{hint}", error.message))
    }

    /// Code that was run by a kernel.
    pub fn code(code: u8, said: Option<&str>) -> Self {
        Self {
            code,
            said: said.map(str::to_owned),
        }
    }

    /// A kernel that ended, which is never what was asked of it.
    pub fn kernel(ended: &proto::ExecEnded) -> Self {
        let Self { code, said } = Self::ended(ended);
        let said = said.unwrap_or_else(|| format!("it exited with {code}"));
        Self::said(if code == 0 { 1 } else { code }, format!("the kernel ended: {said}"))
    }

    /// The person left it.
    pub fn left() -> Self {
        Self::said(LEFT, "left the command")
    }

    /// `code` as in guest.proto.
    pub fn not_started(code: &str, message: &str) -> Self {
        match code {
            "program_not_found" => Self::said(NOT_FOUND, message),
            // A program or directory that cannot be entered, a limit: the command was not run.
            _ => Self::said(NOT_EXECUTABLE, message),
        }
    }

    /// Whoever read the output has gone: as quiet as any program in a pipeline.
    pub fn output_closed() -> Self {
        Self {
            code: OUTPUT_CLOSED,
            said: None,
        }
    }

    /// The output could not be written here, though somebody wants it.
    pub fn unwritten(error: &std::io::Error) -> Self {
        let error = Error::local("cannot write the output", error);
        Self::said(error.exit().code(), error.message)
    }

    /// How a command on a server ended.
    pub fn ended(ended: &proto::ExecEnded) -> Self {
        use proto::exec_ended::Cause;
        let gone = |what: &str| Self::said(NO_SANDBOX, format!("the sandbox is gone: {what}{}", why(ended)));
        let sizes = || {
            let size = |bytes: Option<u64>| bytes.map_or("unknown".to_owned(), show::size);
            format!("limit {}, peak {}", size(ended.limit), size(ended.peak))
        };
        match ended.cause() {
            Cause::Exited => Self {
                code: (ended.exit_code() & 0xff) as u8,
                said: None,
            },
            Cause::Signalled => Self::signalled(ended.signal()),
            Cause::TimedOut => {
                let after = std::time::Duration::from_millis(ended.limit());
                Self::said(TIMED_OUT, format!("timed out after {}", show_duration(after)))
            }
            Cause::OutOfMemory => Self::said(KILLED, format!("out of memory: {}", sizes())),
            Cause::Killed => Self::said(KILLED, format!("killed{}", why(ended))),
            Cause::Disconnected => Self::said(KILLED, "ended with the connection that it was started over"),
            Cause::SandboxKilled => gone("killed"),
            Cause::SandboxExpired => gone("its time to live was up"),
            Cause::SandboxIdle => gone("it was idle for too long"),
            Cause::SandboxOutOfMemory => gone(&format!("out of memory, {}", sizes())),
            Cause::SandboxLost => gone("lost"),
            Cause::SandboxShutdown => gone("the server shut down"),
            Cause::Unspecified => Self::said(NO_SANDBOX, "it ended in a way that this program does not know"),
        }
    }

    fn signalled(signal: i32) -> Self {
        let code = 128 + (signal & 0x7f) as u8;
        Self::said(code, format!("died of signal {signal}{}", name(signal)))
    }

    pub fn of(cause: &Cause) -> Self {
        match cause {
            Cause::Exited { code } => Self {
                code: (*code & 0xff) as u8,
                said: None,
            },
            Cause::Signalled { signal } => Self::signalled(*signal),
            Cause::TimedOut { after_ms } => {
                let after = std::time::Duration::from_millis(*after_ms);
                Self::said(TIMED_OUT, format!("timed out after {}", show_duration(after)))
            }
            Cause::OutOfMemory {
                limit_bytes,
                peak_bytes,
            } => {
                let text = format!(
                    "out of memory: limit {}, peak {}",
                    show::size(*limit_bytes),
                    show::size(*peak_bytes)
                );
                Self::said(KILLED, text)
            }
            Cause::Killed { by } => Self::said(KILLED, format!("killed by {by}")),
            Cause::Disconnected | Cause::Superseded => Self::said(KILLED, "ended with its connection"),
            Cause::SandboxKilled { .. }
            | Cause::SandboxExpired
            | Cause::SandboxIdle
            | Cause::SandboxShutdown
            | Cause::SandboxOutOfMemory { .. }
            | Cause::SandboxLost { .. } => {
                let reason = cause.sandbox_gone().unwrap_or_default();
                Self::said(NO_SANDBOX, format!("the sandbox is lost: {reason}"))
            }
        }
    }
}

fn name(signal: i32) -> String {
    nix::sys::signal::Signal::try_from(signal)
        .map(|signal| format!(" ({signal})"))
        .unwrap_or_default()
}

/// By whom and why, where that is told.
fn why(ended: &proto::ExecEnded) -> String {
    let by = if ended.by.is_empty() {
        String::new()
    } else {
        format!(" by {}", ended.by)
    };
    let reason = if ended.reason.is_empty() {
        String::new()
    } else {
        format!(": {}", ended.reason)
    };
    clean_line(&(by + &reason))
}

/// What the kernel refused meanwhile: the command itself may have said nothing of it.
pub(super) fn pressure(ended: &proto::ExecEnded) -> Vec<String> {
    use proto::exec_ended::Cause;
    let proto::ExecPressure {
        oom_kills,
        forks_refused,
        pids_limit,
        disk_full,
        disk_limit_bytes,
    } = ended.pressure.unwrap_or_default();
    let mut said = Vec::new();
    let is_told = matches!(ended.cause(), Cause::OutOfMemory | Cause::SandboxOutOfMemory);
    if oom_kills > 0 && !is_told {
        said.push(format!("{oom_kills} of its processes ended for lack of memory"));
    }
    if forks_refused > 0 {
        let refused = match forks_refused {
            1 => "1 new process was refused".to_owned(),
            more => format!("{more} new processes were refused"),
        };
        said.push(format!("{refused}: the limit is {pids_limit}"));
    }
    if disk_full {
        said.push(match disk_limit_bytes {
            0 => "the workspace is full".to_owned(),
            limit => format!("the workspace is full: the limit is {}", show::size(limit)),
        });
    }
    said
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_end_on_a_server_has_its_code_and_its_words() {
        use proto::exec_ended::Cause as C;
        let of = |cause: C, edit: fn(&mut proto::ExecEnded)| {
            let mut ended = proto::ExecEnded {
                cause: cause.into(),
                ..Default::default()
            };
            edit(&mut ended);
            let verdict = Verdict::ended(&ended);
            (verdict.code, verdict.said.unwrap_or_default())
        };
        let memory = |ended: &mut proto::ExecEnded| {
            (ended.limit, ended.peak) = (Some(64 << 20), Some(64 << 20));
        };
        let by = |ended: &mut proto::ExecEnded| (ended.by, ended.reason) = ("ada".into(), "en\u{1b}ough".into());
        for (told, code, said) in [
            (of(C::Exited, |ended| ended.exit_code = Some(255)), 255, ""),
            (
                of(C::Signalled, |ended| ended.signal = Some(11)),
                139,
                "died of signal 11 (SIGSEGV)",
            ),
            (
                of(C::TimedOut, |ended| ended.limit = Some(5_000)),
                124,
                "timed out after 5s",
            ),
            (
                of(C::OutOfMemory, memory),
                137,
                "out of memory: limit 64 MiB, peak 64 MiB",
            ),
            (of(C::Killed, by), 137, "killed by ada: en\u{fffd}ough"),
            (
                of(C::Disconnected, |_| {}),
                137,
                "ended with the connection that it was started over",
            ),
            (
                of(C::SandboxKilled, by),
                125,
                "the sandbox is gone: killed by ada: en\u{fffd}ough",
            ),
            (
                of(C::SandboxExpired, |_| {}),
                125,
                "the sandbox is gone: its time to live was up",
            ),
            (
                of(C::SandboxOutOfMemory, memory),
                125,
                "the sandbox is gone: out of memory, limit 64 MiB, peak 64 MiB",
            ),
        ] {
            assert_eq!(told, words(code, said));
        }
    }

    #[test]
    fn what_the_kernel_refused_is_told() {
        let pressed = proto::ExecPressure {
            oom_kills: 1,
            forks_refused: 12,
            pids_limit: 64,
            disk_full: true,
            disk_limit_bytes: 1 << 30,
        };
        let mut ended = proto::ExecEnded {
            cause: proto::exec_ended::Cause::Exited.into(),
            pressure: Some(pressed),
            ..Default::default()
        };
        let all = [
            "1 of its processes ended for lack of memory",
            "12 new processes were refused: the limit is 64",
            "the workspace is full: the limit is 1 GiB",
        ];
        assert_eq!(pressure(&ended), all);
        let single = proto::ExecPressure {
            forks_refused: 1,
            pids_limit: 64,
            ..Default::default()
        };
        let one = proto::ExecEnded {
            pressure: Some(single),
            ..ended.clone()
        };
        assert_eq!(pressure(&one), ["1 new process was refused: the limit is 64"]);
        // Told already by how it ended.
        ended.cause = proto::exec_ended::Cause::OutOfMemory.into();
        assert_eq!(pressure(&ended), all[1..]);
        assert_eq!(pressure(&proto::ExecEnded::default()), [""; 0]);
    }

    fn words(code: u8, text: &str) -> (u8, String) {
        (code, text.to_owned())
    }

    #[test]
    fn each_end_has_its_code_and_its_words() {
        let of = |cause: Cause| {
            let verdict = Verdict::of(&cause);
            (verdict.code, verdict.said.unwrap_or_default())
        };
        assert_eq!(of(Cause::Exited { code: 0 }), words(0, ""));
        assert_eq!(of(Cause::Exited { code: 255 }), words(255, ""));
        assert_eq!(
            of(Cause::Signalled { signal: 11 }),
            words(139, "died of signal 11 (SIGSEGV)")
        );
        assert_eq!(
            of(Cause::TimedOut { after_ms: 30_000 }),
            words(124, "timed out after 30s")
        );
        let cause = Cause::OutOfMemory {
            limit_bytes: 512 << 20,
            peak_bytes: (511 << 20) + (1 << 19),
        };
        assert_eq!(of(cause), words(137, "out of memory: limit 512 MiB, peak 511.5 MiB"));
        let by = "SIGTERM".to_owned();
        assert_eq!(of(Cause::Killed { by }), words(137, "killed by SIGTERM"));
        let reason = "gone".to_owned();
        assert_eq!(
            of(Cause::SandboxLost { reason }),
            words(125, "the sandbox is lost: gone")
        );
        assert_eq!(Verdict::not_started("program_not_found", "x").code, 127);
        assert_eq!(Verdict::not_started("cwd_not_found", "x").code, 126);
        assert_eq!(Verdict::output_closed(), Verdict { code: 141, said: None });
    }
}
