//! `shell`: one command with `sh -c`. Always `sh`, though an image may have bash: the same script then means the same in every
//! image, and a command can say `bash -c` itself.

use std::collections::BTreeMap;
use std::time::Duration;

use nix::sys::signal::Signal;
use schemars::JsonSchema;
use serde::Deserialize;

use super::path;
use super::result::{Body, Draft};
use super::run::{Limits, Stop, seconds};
use super::world::{Command, Error, Lost, Refusal, World};
use crate::sandbox::exec::Cause;

#[derive(Debug, Clone, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Arguments {
    /// A POSIX shell command line.
    #[schemars(length(min = 1))]
    pub command: String,
    /// Directory to run in; default: the workspace.
    #[schemars(length(min = 1))]
    pub cwd: Option<String>,
    /// Seconds until it is killed; the step's own limit may be shorter.
    #[schemars(range(min = 1))]
    pub timeout_s: Option<u64>,
}

pub(super) async fn run(arguments: Arguments, world: &dyn World, limits: &Limits) -> Result<Draft, Stop> {
    let asked = arguments.timeout_s.map(Duration::from_secs);
    // D2: the shorter of what was asked for and what is left.
    let timeout = asked.map_or(limits.timeout, |asked| asked.min(limits.timeout));
    if arguments.command.contains('\0') {
        let draft = Draft::error(
            "invalid_arguments",
            "a command cannot hold a NUL character",
            "write the file with `write_file`",
        );
        return Ok(draft);
    }
    let cwd = path::absolute(arguments.cwd.as_deref().unwrap_or("."))?;
    let command = Command {
        argv: vec!["sh".to_owned(), "-c".to_owned(), arguments.command],
        env: BTreeMap::new(),
        cwd: cwd.clone(),
        timeout,
    };
    let outcome = world.exec(&command).await.map_err(|error| about(error, &cwd))?;
    let draft = match outcome.cause {
        Cause::Exited { code: 0 } => Draft::ok("exit code 0").with("exit_code", 0),
        Cause::Exited { code } => exited(code),
        Cause::Signalled { signal } => signalled(signal),
        Cause::TimedOut { after_ms } => timed_out(Duration::from_millis(after_ms), asked, limits.timeout),
        Cause::OutOfMemory {
            limit_bytes,
            peak_bytes,
        } => Draft::error(
            "out_of_memory",
            format!("the command needed more memory than the sandbox has: the limit is {limit_bytes} bytes, the peak was {peak_bytes}"),
            "do it in smaller parts, with fewer processes at once, or as a stream",
        )
        .with("limit_bytes", limit_bytes)
        .with("peak_bytes", peak_bytes),
        Cause::Killed { by } => Draft::error("killed", format!("the command was killed by {by}"), "see why before calling again"),
        Cause::Disconnected | Cause::Superseded => {
            Draft::error("killed", "the command was ended with its connection", "see why before calling again")
        }
        cause @ (Cause::SandboxKilled { .. }
        | Cause::SandboxExpired
        | Cause::SandboxIdle
        | Cause::SandboxShutdown
        | Cause::SandboxOutOfMemory { .. }
        | Cause::SandboxLost { .. }) => return Err(Lost::new(cause.sandbox_gone().unwrap_or_default()).into()),
    };
    let streams = [("stdout", outcome.stdout), ("stderr", outcome.stderr)];
    Ok(streams.into_iter().fold(draft, |draft, (name, stream)| {
        draft.body(Body {
            total_bytes: stream.total_bytes(),
            total_lines: stream.total_lines(),
            ..Body::new(name, stream.text())
        })
    }))
}

/// A command that never began: the directory or `sh` itself is to blame.
fn about(error: Error, cwd: &str) -> Error {
    match error {
        Error::Refused {
            code: Refusal::CwdNotFound,
            ..
        } => error.about(cwd),
        Error::Refused { .. } => error.about("sh"),
        Error::Lost(_) => error,
    }
}

fn exited(code: i32) -> Draft {
    let (cause, suggestion) = match code {
        126 => (
            "the command ended with exit code 126, by which a shell says that a program could not be executed"
                .to_owned(),
            "see stderr; make it executable or run it with its interpreter",
        ),
        127 => (
            "the command ended with exit code 127, by which a shell says that a program was not found".to_owned(),
            "see stderr; use a program that the image has, `command -v NAME` tells",
        ),
        _ => (
            format!("the command ended with exit code {code}"),
            "read stderr and stdout for the reason; the same call will likely fail again",
        ),
    };
    Draft::error("exit_status", cause, suggestion).with("exit_code", code)
}

fn signalled(signal: i32) -> Draft {
    let name =
        Signal::try_from(signal).map_or_else(|_| format!("signal {signal}"), |signal| signal.as_str().to_owned());
    let cause = format!("the command died of {name}");
    Draft::error(
        "signal",
        cause,
        "see stderr; the program crashed or was killed by another one",
    )
    .with("signal", name)
}

fn timed_out(after: Duration, asked: Option<Duration>, limit: Duration) -> Draft {
    let suggestion = match asked {
        Some(asked) if asked < limit => format!("call again with a larger `timeout_s` (at most {})", limit.as_secs()),
        Some(_) | None => {
            "this is the limit of the step: do less at a time, or start it in a way that ends sooner".to_owned()
        }
    };
    let cause = format!(
        "the command did not end within {} and was killed with all its children; what it did so far stays",
        seconds(after)
    );
    Draft::error("timeout", cause, suggestion).with("after_ms", after.as_millis() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::Captured;
    use crate::tool::memory::MemoryWorld;
    use crate::tool::registry::Registry;
    use crate::tool::world::Outcome;
    use crate::tool::{Status, ToolResult};

    async fn call(world: &MemoryWorld, arguments: &str) -> Result<ToolResult, Lost> {
        let limits = Limits {
            timeout: Duration::from_secs(30),
        };
        crate::tool::run(&Registry::all(), "shell", arguments, world, &limits).await
    }

    fn ending(cause: Cause) -> MemoryWorld {
        let outcome = Outcome {
            stdout: Captured::whole(b"out\n"),
            stderr: Captured::whole(b"caf\xC3"),
            cause,
        };
        MemoryWorld::default().on_exec(move |_| Ok(outcome.clone()))
    }

    #[tokio::test]
    async fn h2_each_way_to_end_has_its_own_result() {
        let mut told = Vec::new();
        for cause in [
            Cause::Exited { code: 0 },
            Cause::Exited { code: 3 },
            Cause::Exited { code: 127 },
            Cause::Signalled { signal: 11 },
            Cause::Signalled { signal: 40 },
            Cause::TimedOut { after_ms: 30_000 },
            Cause::OutOfMemory {
                limit_bytes: 1024,
                peak_bytes: 1020,
            },
            Cause::Killed {
                by: "the run's end".to_owned(),
            },
        ] {
            told.push(call(&ending(cause), r#"{"command": "x"}"#).await.unwrap());
        }
        insta::assert_json_snapshot!(told);
        let lost = ending(Cause::SandboxLost {
            reason: "host gone".to_owned(),
        });
        assert_eq!(call(&lost, r#"{"command": "x"}"#).await, Err(Lost::new("host gone")));
    }

    #[tokio::test]
    async fn d2_the_shorter_timeout_counts_and_the_model_cannot_ask_for_none() {
        for (asked, expected) in [("5", 5), ("3600", 30), ("null", 30)] {
            let world = ending(Cause::Exited { code: 0 });
            call(&world, &format!(r#"{{"command": "x", "timeout_s": {asked}}}"#))
                .await
                .unwrap();
            assert_eq!(world.executed()[0].timeout, Duration::from_secs(expected));
        }
        for bad in ["0", "-1", "1.5", "\"5\""] {
            let world = ending(Cause::Exited { code: 0 });
            let result = call(&world, &format!(r#"{{"command": "x", "timeout_s": {bad}}}"#))
                .await
                .unwrap();
            assert_eq!((result.status, world.executed().len()), (Status::Error, 0), "{bad}");
        }
        let short = call(
            &ending(Cause::TimedOut { after_ms: 2000 }),
            r#"{"command": "x", "timeout_s": 2}"#,
        )
        .await
        .unwrap();
        assert_eq!(
            short.error.unwrap().suggestion,
            "call again with a larger `timeout_s` (at most 30)"
        );
    }

    #[tokio::test]
    async fn the_command_is_run_by_sh_where_it_was_asked_to() {
        let world = ending(Cause::Exited { code: 0 });
        call(&world, r#"{"command": "ls 'a b'", "cwd": "sub"}"#).await.unwrap();
        let expected = Command {
            argv: vec!["sh".to_owned(), "-c".to_owned(), "ls 'a b'".to_owned()],
            env: BTreeMap::new(),
            cwd: "/workspace/sub".to_owned(),
            timeout: Duration::from_secs(30),
        };
        assert_eq!(world.executed(), [expected]);
        world.fail_next(Error::refused(Refusal::CwdNotFound, "no such directory"));
        let result = call(&world, r#"{"command": "ls", "cwd": "nowhere"}"#).await.unwrap();
        assert_eq!(result.summary, "`/workspace/nowhere`: no such directory");
        assert_eq!(result.error.unwrap().r#type, "cwd_not_found");
        world.fail_next(Error::refused(Refusal::ProgramNotFound, "no such program"));
        let result = call(&world, r#"{"command": "ls"}"#).await.unwrap();
        assert_eq!(result.summary, "`sh`: no such program");
    }

    #[tokio::test]
    async fn h3_h4_t7_a_flood_of_output_is_bounded_and_counted() {
        let mut capture = Captured::new(20_000);
        for n in 0..100_000 {
            capture.push(format!("{n}\n").as_bytes());
        }
        let world = MemoryWorld::default().on_exec(move |_| {
            Ok(Outcome {
                stdout: capture.clone(),
                stderr: Captured::default(),
                cause: Cause::Exited { code: 0 },
            })
        });
        let result = call(&world, r#"{"command": "seq"}"#).await.unwrap();
        assert_eq!(result.status, Status::Truncated);
        let gap = &result.data["truncated"]["stdout"];
        assert_eq!(
            (gap["total_bytes"].as_u64(), gap["total_lines"].as_u64()),
            (Some(588_890), Some(100_000))
        );
        let shown = result.data["stdout"].as_str().unwrap();
        assert!(shown.starts_with("0\n1\n") && shown.ends_with("99998\n99999\n"));
    }
}
