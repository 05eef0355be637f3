//! `read_file`: lines of a text file, numbered from 1.

use schemars::JsonSchema;
use serde::Deserialize;

use super::path;
use super::result::{Body, Draft, brief, count};
use super::run::Stop;
use super::world::World;

#[derive(Debug, Clone, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Arguments {
    /// Relative to the workspace, or absolute.
    #[schemars(length(min = 1))]
    pub path: String,
    /// First line to read, from 1.
    #[schemars(range(min = 1))]
    pub offset: Option<u64>,
    /// How many lines.
    #[schemars(range(min = 1))]
    pub limit: Option<u64>,
}

pub(super) async fn run(arguments: Arguments, world: &dyn World) -> Result<Draft, Stop> {
    let Arguments { path, offset, limit } = arguments;
    let target = path::absolute(&path)?;
    let bytes = world.read(&target).await.map_err(|error| error.about(&path))?;
    let shown = brief(&path);
    if is_binary(&bytes) {
        let cause = format!("`{shown}` is a binary file of {}", count(bytes.len() as u64, "byte"));
        return Ok(Draft::error(
            "binary_file",
            cause,
            "use `shell` with a program that knows the format, such as file, xxd or strings",
        ));
    }
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.split_inclusive('\n').collect();
    let total = lines.len() as u64;
    let first = offset.unwrap_or(1);
    if first > total.max(1) {
        let cause = format!("line {first} is past the end: `{shown}` has {}", count(total, "line"));
        return Ok(Draft::error("out_of_range", cause, "give a smaller `offset`").with("total_lines", total));
    }
    let last = limit.map_or(total, |limit| total.min((first - 1).saturating_add(limit)));
    let summary = match total {
        0 => format!("`{shown}` is empty"),
        _ => format!("lines {first} to {last} of {total} of `{shown}`"),
    };
    let mut draft = Draft::ok(summary).with("total_lines", total);
    if last < total {
        draft = draft.with("next_offset", last + 1);
    }
    // Lines are shown without their ends, so what cannot be seen is said.
    if lines.iter().any(|line| line.ends_with("\r\n")) {
        draft = draft.with("line_ends", "crlf");
    }
    if total > 0 && last == total && !text.ends_with('\n') {
        draft = draft.with("final_newline", false);
    }
    if matches!(text, std::borrow::Cow::Owned(_)) {
        draft = draft.with("not_utf8", true);
    }
    let selected = lines
        .iter()
        .zip(1u64..)
        .skip(first as usize - 1)
        .take((last + 1 - first) as usize);
    let content = selected
        .map(|(line, number)| format!("{number}\t{}\n", without_end(line)))
        .collect();
    Ok(draft.body(Body::new("content", content)))
}

/// Whether the first 8 KiB hold a NUL.
pub(super) fn is_binary(bytes: &[u8]) -> bool {
    bytes[..bytes.len().min(8192)].contains(&0)
}

fn without_end(line: &str) -> &str {
    let line = line.strip_suffix('\n').unwrap_or(line);
    line.strip_suffix('\r').unwrap_or(line)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::tool::memory::MemoryWorld;
    use crate::tool::{Status, ToolResult};

    async fn call(world: &MemoryWorld, arguments: serde_json::Value) -> ToolResult {
        world.call("read_file", &arguments.to_string()).await
    }

    #[tokio::test]
    async fn lines_are_numbered_from_1_and_counted() {
        let world = MemoryWorld::default().with_file("/workspace/a", b"one\ntwo\nthree\n");
        let expected = json!({"total_lines": 3, "content": "1\tone\n2\ttwo\n3\tthree\n"});
        assert_eq!(
            call(&world, json!({"path": "a"})).await,
            ToolResult::ok("lines 1 to 3 of 3 of `a`", expected)
        );
        let expected = json!({"total_lines": 3, "next_offset": 3, "content": "2\ttwo\n"});
        let part = call(&world, json!({"path": "a", "offset": 2, "limit": 1})).await;
        assert_eq!(part, ToolResult::ok("lines 2 to 2 of 3 of `a`", expected));
        let rest = call(&world, json!({"path": "a", "offset": 3, "limit": 99})).await;
        assert_eq!(rest.data["content"], "3\tthree\n");
        let past = call(&world, json!({"path": "a", "offset": 4})).await;
        assert_eq!(
            (past.summary.as_str(), past.error.unwrap().r#type.as_str()),
            ("line 4 is past the end: `a` has 3 lines", "out_of_range")
        );
    }

    #[tokio::test]
    async fn what_cannot_be_seen_is_said() {
        let world = MemoryWorld::default()
            .with_file("/workspace/crlf", b"a\r\nb")
            .with_file("/workspace/latin", b"caf\xE9\n")
            .with_file("/workspace/empty", b"")
            .with_file("/workspace/binary", b"\x7fELF\0");
        let crlf = json!({"total_lines": 2, "line_ends": "crlf", "final_newline": false, "content": "1\ta\n2\tb\n"});
        assert_eq!(call(&world, json!({"path": "crlf"})).await.data, crlf);
        let latin = json!({"total_lines": 1, "not_utf8": true, "content": "1\tcaf\u{fffd}\n"});
        assert_eq!(call(&world, json!({"path": "latin"})).await.data, latin);
        assert_eq!(call(&world, json!({"path": "empty"})).await.summary, "`empty` is empty");
        assert_eq!(
            call(&world, json!({"path": "binary"})).await.error.unwrap().r#type,
            "binary_file"
        );
        assert_eq!(
            call(&world, json!({"path": "nope"})).await.error.unwrap().r#type,
            "not_found"
        );
    }

    #[tokio::test]
    async fn h3_a_long_file_is_cut_in_the_middle_and_kept_whole() {
        let text: String = (1..=2000).map(|n| format!("line {n}\n")).collect();
        let world = MemoryWorld::default().with_file("/workspace/a", text.as_bytes());
        let result = call(&world, json!({"path": "a"})).await;
        assert_eq!(
            (result.status, result.data["total_lines"].as_u64()),
            (Status::Truncated, Some(2000))
        );
        let shown = result.data["content"].as_str().unwrap();
        assert!(
            shown.starts_with("1\tline 1\n") && shown.ends_with("2000\tline 2000\n"),
            "{shown}"
        );
        assert!(result.to_message().chars().count() <= 3000);
        assert_eq!(world.artifacts(), 1);
    }
}
