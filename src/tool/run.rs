//! One tool call, from its text to its result.

use std::time::Duration;

use tokio::time::timeout;

use super::registry::{Builtin, Registry};
use super::result::{Draft, count};
use super::world::{Error, Lost, Refusal, World};
use super::{ToolResult, edit_file, finish, list_files, read_artifact, read_file, search, shell, write_file};

/// How much longer than a command's own timeout its world may take to say how it ended.
const GRACE: Duration = Duration::from_secs(30);

/// What bounds one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// What the policy and the rest of the run's time leave for this step (D2); a call can only ask for less.
    pub timeout: Duration,
}

/// Runs the tool `name` with `arguments` as the model wrote them.
///
/// # Errors
/// [`Lost`] when the world failed, so that the call can be made again in another. All else is a [`ToolResult`] (C5).
pub async fn run(
    registry: &Registry,
    name: &str,
    arguments: &str,
    world: &dyn World,
    limits: &Limits,
) -> Result<ToolResult, Lost> {
    let tool = match registry.find(name) {
        Ok(tool) => tool,
        Err(unknown) => return unknown.fit(world).await,
    };
    let acting = act(tool, arguments, world, limits);
    let time = match tool {
        Builtin::Shell => limits.timeout.saturating_add(GRACE),
        Builtin::EditFile
        | Builtin::Finish
        | Builtin::ListFiles
        | Builtin::ReadArtifact
        | Builtin::ReadFile
        | Builtin::Search
        | Builtin::WriteFile => limits.timeout,
    };
    let draft = match (timeout(time, acting).await, tool) {
        (Ok(Ok(draft)), _) => draft,
        (Ok(Err(Stop::Answer(draft))), _) => *draft,
        (Ok(Err(Stop::World(Error::Refused { code, message }))), _) => refused(code, message),
        (Ok(Err(Stop::World(Error::Lost(lost)))), _) => return Err(lost),
        (Err(_), Builtin::Shell) => return Err(Lost::new("it did not say how the command ended")),
        (Err(_), tool) => Draft::error(
            "timeout",
            format!("`{}` did not end within {}", tool.name(), seconds(time)),
            "ask for less: a smaller directory, a narrower pattern or glob",
        ),
    };
    draft.fit(world).await
}

async fn act(tool: Builtin, arguments: &str, world: &dyn World, limits: &Limits) -> Result<Draft, Stop> {
    let name = tool.name();
    match tool {
        Builtin::EditFile => edit_file::run(super::arguments::parse(name, arguments)?, world).await,
        Builtin::Finish => Ok(finish::run(super::arguments::parse(name, arguments)?)),
        Builtin::ListFiles => list_files::run(super::arguments::parse(name, arguments)?, world).await,
        Builtin::ReadArtifact => read_artifact::run(super::arguments::parse(name, arguments)?, world).await,
        Builtin::ReadFile => read_file::run(super::arguments::parse(name, arguments)?, world).await,
        Builtin::Search => search::run(super::arguments::parse(name, arguments)?, world).await,
        Builtin::Shell => shell::run(super::arguments::parse(name, arguments)?, world, limits).await,
        Builtin::WriteFile => write_file::run(super::arguments::parse(name, arguments)?, world).await,
    }
}

/// Why a tool went no further.
#[derive(Debug)]
pub(super) enum Stop {
    /// It has an answer for the model already.
    Answer(Box<Draft>),
    World(Error),
}

impl From<Box<Draft>> for Stop {
    fn from(draft: Box<Draft>) -> Self {
        Self::Answer(draft)
    }
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::World(error)
    }
}

impl From<Lost> for Stop {
    fn from(lost: Lost) -> Self {
        Self::World(Error::Lost(lost))
    }
}

/// `1 second`, `2.5 seconds`.
pub(super) fn seconds(duration: Duration) -> String {
    match duration.subsec_millis() {
        0 => count(duration.as_secs(), "second"),
        _ => format!("{} seconds", duration.as_secs_f64()),
    }
}

/// What the model is told of a refusal.
fn refused(code: Refusal, message: String) -> Draft {
    let (kind, suggestion) = match code {
        Refusal::NotFound => ("not_found", "look with `list_files` or `search` for the right path"),
        Refusal::IsDirectory => ("is_directory", "use `list_files`, or name a file in it"),
        Refusal::NotDirectory => ("not_directory", "name a directory; a part of the path is a file"),
        Refusal::Permission => (
            "permission_denied",
            "work below `/workspace` or `/tmp`; other places are read-only",
        ),
        Refusal::Exists => ("exists", "choose another path"),
        Refusal::NoSpace => ("no_space", "remove files that are not needed, or write less"),
        Refusal::InvalidPattern => (
            "invalid_pattern",
            "write a regular expression without look-around; escape `( ) [ ] { } . * + ? | ^ $ \\`",
        ),
        Refusal::TooLarge => (
            "too_large",
            "use `shell` with head, tail, sed or grep to get the part that matters",
        ),
        Refusal::ProgramNotFound => ("program_not_found", "this image has no shell; use the file tools"),
        Refusal::ProgramNotExecutable => (
            "program_not_executable",
            "this image's shell cannot be run; use the file tools",
        ),
        Refusal::CwdNotFound => (
            "cwd_not_found",
            "give a `cwd` that exists, or leave it out to start in `/workspace`",
        ),
        Refusal::Limit => ("limit", "end processes that are not needed and call again"),
        Refusal::Other => ("failed", "look at the cause and try another way"),
    };
    let draft = Draft::error(kind, message, suggestion);
    match code {
        Refusal::Limit => draft.retryable(),
        Refusal::NotFound
        | Refusal::IsDirectory
        | Refusal::NotDirectory
        | Refusal::Permission
        | Refusal::Exists
        | Refusal::NoSpace
        | Refusal::InvalidPattern
        | Refusal::TooLarge
        | Refusal::ProgramNotFound
        | Refusal::ProgramNotExecutable
        | Refusal::CwdNotFound
        | Refusal::Other => draft,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tool::memory::MemoryWorld;

    async fn call(world: &MemoryWorld, name: &str, arguments: &str) -> Result<ToolResult, Lost> {
        let limits = Limits {
            timeout: Duration::from_secs(30),
        };
        run(&Registry::all(), name, arguments, world, &limits).await
    }

    #[tokio::test]
    async fn h1_an_unknown_tool_is_a_result_with_the_nearest_name() {
        let result = call(&MemoryWorld::default(), "read_fil", "{}").await.unwrap();
        insta::assert_json_snapshot!(result);
    }

    #[tokio::test]
    async fn c5_c6_each_refusal_of_the_world_is_a_result_to_act_on() {
        let world = MemoryWorld::default();
        let codes = [
            "not_found",
            "is_directory",
            "not_directory",
            "permission",
            "exists",
            "no_space",
            "invalid_pattern",
            "too_large",
            "program_not_found",
            "program_not_executable",
            "cwd_not_found",
            "limit",
            "anything",
        ];
        let mut told = Vec::new();
        for code in codes {
            world.fail_next(Error::refused(Refusal::from_code(code), format!("{code}!")));
            let error = call(&world, "read_file", r#"{"path": "x"}"#)
                .await
                .unwrap()
                .error
                .unwrap();
            told.push(format!(
                "{}: {} | {} | {}",
                error.r#type, error.possible_cause, error.suggestion, error.retryable
            ));
        }
        insta::assert_snapshot!(told.join("\n"));
    }

    #[tokio::test]
    async fn a_lost_world_is_the_only_error() {
        let world = MemoryWorld::default();
        world.fail_next(Error::Lost(Lost::new("gone")));
        assert_eq!(call(&world, "list_files", "").await, Err(Lost::new("gone")));
    }

    #[tokio::test(start_paused = true)]
    async fn c2_a_file_call_that_hangs_is_a_timeout() {
        let world = MemoryWorld::default();
        world.stall_next();
        let result = call(&world, "search", r#"{"pattern": "x"}"#).await.unwrap();
        assert_eq!(result.summary, "`search` did not end within 30 seconds");
        assert_eq!(result.error.unwrap().r#type, "timeout");
        // A world that does not even kill a command is lost.
        world.stall_next();
        assert!(call(&world, "shell", r#"{"command": "x"}"#).await.is_err());
    }
}
