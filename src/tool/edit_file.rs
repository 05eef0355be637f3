//! `edit_file`: an exact piece of text replaced, or nothing changed and the reason told.
//!
//! Bytes outside the piece are never touched, whatever their encoding. In a file with CRLF line ends a piece that was written
//! with LF is taken as CRLF, and so is what replaces it.

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
    /// The text to replace, exactly as it stands in the file, without line numbers.
    #[schemars(length(min = 1))]
    pub old: String,
    /// The text to put in its place.
    pub new: String,
    /// Replace every occurrence; default false.
    pub replace_all: Option<bool>,
}

/// Lines that are looked at for a likeness; more would take long and help little.
const MAX_LINES: usize = 5_000;
const NAMED_LINES: usize = 10;

pub(super) async fn run(arguments: Arguments, world: &dyn World) -> Result<Draft, Stop> {
    let Arguments {
        path,
        old,
        new,
        replace_all,
    } = arguments;
    if old == new {
        return Ok(Draft::error(
            "invalid_arguments",
            "`old` and `new` are the same",
            "give the changed text in `new`",
        ));
    }
    let target = path::absolute(&path)?;
    let content = world.read(&target).await.map_err(|error| error.about(&path))?;
    let (old, new) = with_line_ends_of(&content, old, new);
    let found = occurrences(&content, old.as_bytes());
    let lines: Vec<u64> = found.iter().map(|at| line_of(&content, *at)).collect();
    let at = match found.as_slice() {
        [] => return Ok(absent(&path, &content, &old)),
        [one] => vec![*one],
        several if replace_all == Some(true) => apart(several, old.len()),
        several => {
            let cause = format!(
                "`old` occurs {} in `{}`",
                count(several.len() as u64, "time"),
                brief(&path)
            );
            let suggestion = "add lines around it to `old` until it is the only one, or set `replace_all`";
            return Ok(Draft::error("ambiguous", cause, suggestion).with("lines", named(&lines)));
        }
    };
    let edited = replace(&content, &at, old.len(), new.as_bytes());
    world
        .write(&target, &edited)
        .await
        .map_err(|error| error.about(&path))?;
    let lines: Vec<u64> = at.iter().map(|at| line_of(&content, *at)).collect();
    let replaced = at.len() as u64;
    let summary = format!("replaced {} in `{}`", count(replaced, "occurrence"), brief(&path));
    Ok(Draft::ok(summary)
        .with("replaced", replaced)
        .with("lines", named(&lines)))
}

/// The first few, so that a result stays short.
fn named(lines: &[u64]) -> Vec<u64> {
    lines.iter().copied().take(NAMED_LINES).collect()
}

/// Takes LF for CRLF where the file has it and the text as written is not there.
fn with_line_ends_of(content: &[u8], old: String, new: String) -> (String, String) {
    let is_crlf = content.windows(2).any(|pair| pair == b"\r\n");
    if !is_crlf || old.contains('\r') {
        return (old, new);
    }
    let has_multiline_as_written = old.contains('\n') && !occurrences(content, old.as_bytes()).is_empty();
    if has_multiline_as_written {
        return (old, new);
    }
    let to_crlf = |text: String| text.replace("\r\n", "\n").replace('\n', "\r\n");
    (to_crlf(old), to_crlf(new))
}

/// Where `piece` occurs, overlaps included.
fn occurrences(content: &[u8], piece: &[u8]) -> Vec<usize> {
    let windows = content.windows(piece.len()).enumerate();
    windows
        .filter(|(_, window)| *window == piece)
        .map(|(at, _)| at)
        .collect()
}

/// Those that do not overlap, from the left.
fn apart(found: &[usize], length: usize) -> Vec<usize> {
    let mut end = 0;
    let mut apart = Vec::new();
    for at in found {
        if *at >= end {
            apart.push(*at);
            end = at + length;
        }
    }
    apart
}

fn replace(content: &[u8], at: &[usize], length: usize, new: &[u8]) -> Vec<u8> {
    let mut edited = Vec::with_capacity(content.len());
    let mut done = 0;
    for at in at {
        edited.extend_from_slice(&content[done..*at]);
        edited.extend_from_slice(new);
        done = at + length;
    }
    edited.extend_from_slice(&content[done..]);
    edited
}

fn line_of(content: &[u8], at: usize) -> u64 {
    1 + content[..at].iter().filter(|byte| **byte == b'\n').count() as u64
}

/// The failure that happens most: says what is there instead.
fn absent(path: &str, content: &[u8], old: &str) -> Draft {
    let text = String::from_utf8_lossy(content);
    let lines: Vec<&str> = text.lines().take(MAX_LINES).collect();
    let cause = format!("`old` does not occur in `{}`", brief(path));
    let numbered = |range: std::ops::Range<usize>| -> String {
        range
            .map(|n| format!("{}\t{}\n", n + 1, lines[n].chars().take(200).collect::<String>()))
            .collect()
    };
    if let Some(start) = same_but_for_space(&lines, old) {
        let end = start + old.lines().count();
        let cause = format!(
            "{cause}, but lines {} to {end} differ from it only in white space",
            start + 1
        );
        let draft = Draft::error("no_match", cause, "copy the white space exactly from `data.nearest`");
        return draft.body(Body::new("nearest", numbered(start..end)));
    }
    let wanted = old
        .lines()
        .map(str::trim)
        .max_by_key(|line| line.len())
        .unwrap_or_default();
    let mut likely: Vec<&str> = lines
        .iter()
        .map(|line| line.trim())
        .filter(|line| line.len() <= 400 && !line.is_empty())
        .collect();
    likely.sort_unstable();
    likely.dedup();
    let nearest: String = similar::get_close_matches(wanted, &likely, 3, 0.5)
        .into_iter()
        .filter_map(|near| lines.iter().position(|line| line.trim() == near))
        .map(|n| numbered(n..n + 1))
        .collect();
    let draft = Draft::error(
        "no_match",
        cause,
        "read the file again and copy `old` from it exactly, without line numbers",
    );
    match nearest.is_empty() {
        true => draft,
        false => draft.body(Body::new("nearest", nearest)),
    }
}

/// The first line of the place where the lines of `old` stand with other white space around them.
fn same_but_for_space(lines: &[&str], old: &str) -> Option<usize> {
    let wanted: Vec<&str> = old.lines().map(str::trim).collect();
    if wanted.iter().all(|line| line.is_empty()) {
        return None;
    }
    let mut places = lines.windows(wanted.len());
    places.position(|place| place.iter().zip(&wanted).all(|(line, wanted)| line.trim() == *wanted))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::tool::memory::MemoryWorld;
    use crate::tool::{Status, ToolResult};

    async fn edit(content: &[u8], old: &str, new: &str, replace_all: bool) -> (ToolResult, Vec<u8>) {
        let world = MemoryWorld::default().with_file("/workspace/f", content);
        let arguments = json!({"path": "f", "old": old, "new": new, "replace_all": replace_all});
        let result = world.call("edit_file", &arguments.to_string()).await;
        (result, world.file("/workspace/f").unwrap())
    }

    #[tokio::test]
    async fn one_occurrence_is_replaced_and_nothing_else() {
        let (result, content) = edit(b"\xFFa\r\nx = 1\n\ty\n", "x = 1", "x = 2", false).await;
        assert_eq!(content, b"\xFFa\r\nx = 2\n\ty\n");
        let expected = ToolResult::ok("replaced 1 occurrence in `f`", json!({"replaced": 1, "lines": [2]}));
        assert_eq!(result, expected);
        assert_eq!(edit(b"abc", "b", "", false).await.1, b"ac");
    }

    #[tokio::test]
    async fn an_ambiguous_piece_changes_nothing_unless_all_are_meant() {
        let (result, content) = edit(b"a\nb\na\n", "a", "c", false).await;
        assert_eq!(content, b"a\nb\na\n");
        assert_eq!((result.status, result.data), (Status::Error, json!({"lines": [1, 3]})));
        assert_eq!(result.error.unwrap().possible_cause, "`old` occurs 2 times in `f`");
        let (result, content) = edit(b"a\nb\na\n", "a", "c", true).await;
        assert_eq!(
            (content.as_slice(), result.data),
            (&b"c\nb\nc\n"[..], json!({"replaced": 2, "lines": [1, 3]}))
        );
        // Overlaps are two places, of which only one can be replaced.
        assert_eq!(
            edit(b"aaa", "aa", "b", false).await.0.error.unwrap().r#type,
            "ambiguous"
        );
        assert_eq!(edit(b"aaa", "aa", "b", true).await.1, b"ba");
    }

    #[tokio::test]
    async fn line_ends_are_kept() {
        let (_, content) = edit(b"a\r\nb\r\nc\r\n", "a\nb\n", "x\ny\nz\n", false).await;
        assert_eq!(content, b"x\r\ny\r\nz\r\nc\r\n");
        let (_, content) = edit(b"a\r\nb\r\n", "b", "x\ny", false).await;
        assert_eq!(content, b"a\r\nx\r\ny\r\n");
        // Mixed ends: what is there as written is taken as written.
        let (_, content) = edit(b"a\r\nb\nc\n", "b\nc", "d\ne", false).await;
        assert_eq!(content, b"a\r\nd\ne\n");
        let (_, content) = edit(b"a\nb\n", "a\nb", "a\r\nb", false).await;
        assert_eq!(content, b"a\r\nb\n");
    }

    #[tokio::test]
    async fn c6_an_absent_piece_tells_what_is_there_instead() {
        let file = b"def parse(text):\n    value = int(text)\n    return value\n\ndef other():\n    pass\n";
        let mut told = Vec::new();
        for old in [
            "  value = int(text)\n  return value",
            "    value = int(txt)",
            "nothing like it at all ......",
        ] {
            let (result, content) = edit(file, old, "x", false).await;
            assert_eq!(content, file);
            told.push(result);
        }
        insta::assert_json_snapshot!(told);
    }

    #[tokio::test]
    async fn empty_and_equal_pieces_are_refused() {
        let empty = edit(b"abc", "", "x", true).await.0;
        assert_eq!(
            empty.data["problems"],
            json!([{"field": "old", "expected": "a string, not empty", "got": "an empty string"}])
        );
        assert_eq!(
            edit(b"abc", "b", "b", false).await.0.error.unwrap().possible_cause,
            "`old` and `new` are the same"
        );
        assert_eq!(edit(b"", "b", "c", false).await.0.error.unwrap().r#type, "no_match");
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

        /// Success means that the file is what the standard library's replacement makes of it; failure that it is unchanged.
        #[test]
        fn it_replaces_as_the_standard_library_does_or_not_at_all(
            text in "[ab\n]{0,12}", old in "[ab\n]{1,3}", new in "[abc\n]{0,3}", all in any::<bool>(),
        ) {
            prop_assume!(old != new);
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
            let (result, content) = runtime.block_on(edit(text.as_bytes(), &old, &new, all));
            let expected = match result.status {
                Status::Ok => text.replace(&old, &new),
                Status::Error | Status::Truncated => text.clone(),
            };
            prop_assert_eq!(content, expected.into_bytes());
            let is_unique = occurrences(text.as_bytes(), old.as_bytes()).len() == 1;
            prop_assert_eq!(result.status == Status::Ok, is_unique || (all && text.contains(&old)));
        }
    }
}
