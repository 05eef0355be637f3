//! `search`: lines that match a pattern.

use std::collections::BTreeSet;

use schemars::JsonSchema;
use serde::Deserialize;

use super::path;
use super::result::{Body, Draft, count};
use super::run::Stop;
use super::world::World;

const MAX_MATCHES: u32 = 500;

#[derive(Debug, Clone, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Arguments {
    /// A regular expression for one line, without look-around or back-references.
    #[schemars(length(min = 1))]
    pub pattern: String,
    /// A directory or file, relative to the workspace or absolute; default: the workspace.
    #[schemars(length(min = 1))]
    pub path: Option<String>,
    /// Only files whose path below `path` fits, such as `**/*.py`.
    #[schemars(length(min = 1))]
    pub glob: Option<String>,
}

pub(super) async fn run(arguments: Arguments, world: &dyn World) -> Result<Draft, Stop> {
    let path = arguments.path.unwrap_or_else(|| ".".to_owned());
    let target = path::absolute(&path)?;
    let found = world
        .search(&target, &arguments.pattern, arguments.glob.as_deref(), MAX_MATCHES)
        .await
        .map_err(|error| error.about(&path))?;
    let files: BTreeSet<&str> = found.matches.iter().map(|found| found.path.as_str()).collect();
    let read = count(found.files_read, "file");
    let summary = match found.matches.len() as u64 {
        0 => format!("no match in {read}"),
        matches => {
            let at_least = if found.truncated { "at least " } else { "" };
            format!(
                "{at_least}{} in {}, {read} read",
                count(matches, "match"),
                count(files.len() as u64, "file")
            )
        }
    };
    let mut draft = Draft::ok(summary)
        .with("matches", found.matches.len())
        .with("files", files.len())
        .with("files_read", found.files_read);
    if found.truncated {
        draft = draft
            .with(
                "more",
                "the search ended here; narrow the pattern, the path or the glob",
            )
            .incomplete();
    }
    let lines = found
        .matches
        .iter()
        .map(|found| format!("{}:{}:{}\n", found.path, found.line, found.text));
    Ok(draft.body(Body::new("lines", lines.collect())))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::tool::memory::MemoryWorld;
    use crate::tool::{Status, ToolResult};

    fn world() -> MemoryWorld {
        MemoryWorld::default()
            .with_file("/workspace/a.py", b"import os\nx = 1\nimport re\n")
            .with_file("/workspace/sub/b.py", b"import sys\n")
            .with_file("/workspace/c.txt", b"import no\n")
    }

    #[tokio::test]
    async fn matches_come_with_file_and_line() {
        let result = world()
            .call("search", r#"{"pattern": "^import (os|re|sys)", "glob": "**/*.py"}"#)
            .await;
        let lines = "a.py:1:import os\na.py:3:import re\nsub/b.py:1:import sys\n";
        let expected = json!({"matches": 3, "files": 2, "files_read": 2, "lines": lines});
        assert_eq!(result, ToolResult::ok("3 matches in 2 files, 2 files read", expected));
        let one = world().call("search", r#"{"pattern": "x = ", "path": "a.py"}"#).await;
        assert_eq!(one.summary, "1 match in 1 file, 1 file read");
        let none = world().call("search", r#"{"pattern": "zebra"}"#).await;
        assert_eq!(none.summary, "no match in 3 files");
    }

    #[tokio::test]
    async fn a_bad_pattern_or_path_is_told() {
        let pattern = world().call("search", r#"{"pattern": "("}"#).await;
        assert_eq!(pattern.error.unwrap().r#type, "invalid_pattern");
        let path = world().call("search", r#"{"pattern": "x", "path": "nope"}"#).await;
        assert_eq!(path.error.unwrap().r#type, "not_found");
    }

    #[tokio::test]
    async fn h3_too_many_matches_are_bounded_and_counted() {
        let world = MemoryWorld::default().with_file("/workspace/f", "x\n".repeat(MAX_MATCHES as usize + 1).as_bytes());
        let result = world.call("search", r#"{"pattern": "x"}"#).await;
        assert_eq!(result.summary, "at least 500 matches in 1 file, 1 file read");
        assert!(result.data["more"].is_string());
        assert_eq!(result.status, Status::Truncated);
    }
}
