//! `list_files`: what is in a directory.

use schemars::JsonSchema;
use serde::Deserialize;

use super::path;
use super::result::{Body, Draft, brief};
use super::run::Stop;
use super::world::{Entry, FileKind, World};

const DEPTH: u32 = 2;
const MAX_ENTRIES: u32 = 2_000;

#[derive(Debug, Clone, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Arguments {
    /// A directory, relative to the workspace or absolute; default: the workspace.
    #[schemars(length(min = 1))]
    pub path: Option<String>,
    /// Levels to go down; 1 = the directory's own entries.
    #[schemars(range(min = 1, max = 64))]
    pub depth: Option<u32>,
}

pub(super) async fn run(arguments: Arguments, world: &dyn World) -> Result<Draft, Stop> {
    let path = arguments.path.unwrap_or_else(|| ".".to_owned());
    let target = path::absolute(&path)?;
    let listing = world
        .list(&target, arguments.depth.unwrap_or(DEPTH), MAX_ENTRIES)
        .await
        .map_err(|error| error.about(&path))?;
    let directories = listing
        .entries
        .iter()
        .filter(|entry| entry.stat.kind == FileKind::Directory)
        .count();
    let files = listing.entries.len() - directories;
    let at_least = if listing.truncated { "at least " } else { "" };
    let summary = format!(
        "{at_least}{files} files and {directories} directories below `{}`",
        brief(&path)
    );
    let mut draft = Draft::ok(summary).with("files", files).with("directories", directories);
    if listing.truncated {
        draft = draft
            .with(
                "more",
                "the listing ends here; list a directory further down, or less deep",
            )
            .incomplete();
    }
    Ok(draft.body(Body::new("entries", listing.entries.iter().map(line).collect())))
}

/// `dir/`, `file<TAB>size`, `link -> target`; a name with control characters is quoted, so that an entry is always one line.
fn line(entry: &Entry) -> String {
    let name = match entry.path.chars().any(char::is_control) {
        true => format!("{:?}", entry.path),
        false => entry.path.clone(),
    };
    match entry.stat.kind {
        FileKind::Directory => format!("{name}/\n"),
        FileKind::Regular => format!("{name}\t{}\n", entry.stat.size),
        FileKind::Symlink => format!("{name} -> {}\n", brief(entry.link_target.as_deref().unwrap_or("?"))),
        FileKind::Other => format!("{name}\tspecial\n"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::tool::memory::MemoryWorld;
    use crate::tool::world::Stat;
    use crate::tool::{Status, ToolResult};

    fn world() -> MemoryWorld {
        MemoryWorld::default()
            .with_file("/workspace/a.txt", b"abc")
            .with_file("/workspace/src/x/deep.rs", b"")
            .with_file("/workspace/src/lib.rs", b"fn")
    }

    #[tokio::test]
    async fn entries_are_sorted_and_as_deep_as_asked() {
        let two = world().call("list_files", "").await;
        let expected = json!({"files": 2, "directories": 2, "entries": "a.txt\t3\nsrc/\nsrc/lib.rs\t2\nsrc/x/\n"});
        assert_eq!(two, ToolResult::ok("2 files and 2 directories below `.`", expected));
        let one = world().call("list_files", r#"{"path": "src", "depth": 1}"#).await;
        assert_eq!(one.data["entries"], "lib.rs\t2\nx/\n");
        let missing = world().call("list_files", r#"{"path": "nope"}"#).await;
        assert_eq!(missing.error.unwrap().r#type, "not_found");
        let file = world().call("list_files", r#"{"path": "a.txt"}"#).await;
        assert_eq!(file.error.unwrap().r#type, "not_directory");
    }

    #[tokio::test]
    async fn h3_a_huge_directory_is_bounded_and_says_so() {
        let mut world = MemoryWorld::default();
        for n in 0..MAX_ENTRIES + 1 {
            world = world.with_file(&format!("/workspace/{n:05}"), b"");
        }
        let result = world.call("list_files", "").await;
        assert_eq!(result.status, Status::Truncated);
        assert_eq!(result.summary, "at least 2000 files and 0 directories below `.`");
        assert!(result.data["more"].is_string() && result.data["artifact"].is_string());
    }

    #[test]
    fn t17_an_odd_name_is_still_one_line() {
        let entry = |path: &str, kind, link_target: Option<&str>| Entry {
            path: path.to_owned(),
            stat: Stat { kind, size: 1 },
            link_target: link_target.map(str::to_owned),
        };
        assert_eq!(line(&entry("a\nb", FileKind::Regular, None)), "\"a\\nb\"\t1\n");
        assert_eq!(line(&entry("-🦀 字", FileKind::Directory, None)), "-🦀 字/\n");
        assert_eq!(line(&entry("l", FileKind::Symlink, Some("../x"))), "l -> ../x\n");
        assert_eq!(line(&entry("p", FileKind::Other, None)), "p\tspecial\n");
    }
}
