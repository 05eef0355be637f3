//! Exit codes of `sandbox run`, and what is said about an end that was not the command's own.

use crate::cli::Error;
use crate::policy::quantity::show_duration;
use crate::sandbox::Cause;

const TIMED_OUT: u8 = 124;
pub(super) const NO_SANDBOX: u8 = 125;
const NOT_EXECUTABLE: u8 = 126;
const NOT_FOUND: u8 = 127;
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

    pub fn of(cause: &Cause) -> Self {
        match cause {
            Cause::Exited { code } => Self {
                code: (*code & 0xff) as u8,
                said: None,
            },
            Cause::Signalled { signal } => {
                let code = 128 + (*signal & 0x7f) as u8;
                Self::said(code, format!("died of signal {signal}{}", name(*signal)))
            }
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
                    size(*limit_bytes),
                    size(*peak_bytes)
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

fn size(bytes: u64) -> String {
    const MIB: u64 = 1 << 20;
    if bytes.is_multiple_of(MIB) {
        format!("{} MiB", bytes / MIB)
    } else {
        format!("{:.1} MiB", bytes as f64 / MIB as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_end_has_its_code_and_its_words() {
        let of = |cause: Cause| {
            let verdict = Verdict::of(&cause);
            (verdict.code, verdict.said.unwrap_or_default())
        };
        let words = |code: u8, text: &str| (code, text.to_owned());
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
