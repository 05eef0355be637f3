//! `write_file`: a whole file at once.

use schemars::JsonSchema;
use serde::Deserialize;

use super::path;
use super::result::{Draft, brief, count};
use super::run::Stop;
use super::world::{Error, FileKind, Refusal, World};

#[derive(Debug, Clone, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Arguments {
    /// Relative to the workspace, or absolute.
    #[schemars(length(min = 1))]
    pub path: String,
    /// All of the file.
    pub content: String,
}

pub(super) async fn run(arguments: Arguments, world: &dyn World) -> Result<Draft, Stop> {
    let Arguments { path, content } = arguments;
    let target = path::absolute(&path)?;
    let existed = match world.stat(&target).await {
        Ok(stat) if stat.kind == FileKind::Directory => {
            return Err(Error::refused(Refusal::IsDirectory, "it is a directory")
                .about(&path)
                .into());
        }
        Ok(_) => true,
        Err(Error::Refused {
            code: Refusal::NotFound,
            ..
        }) => false,
        Err(error) => return Err(error.about(&path).into()),
    };
    world
        .write(&target, content.as_bytes())
        .await
        .map_err(|error| error.about(&path))?;
    let what = if existed { "replaced" } else { "created" };
    let lines = count(content.lines().count() as u64, "line");
    let summary = format!(
        "{what} `{}`: {lines}, {}",
        brief(&path),
        count(content.len() as u64, "byte")
    );
    Ok(Draft::ok(summary)
        .with("created", !existed)
        .with("bytes", content.len() as u64))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::tool::memory::MemoryWorld;
    use crate::tool::{Status, ToolResult};

    async fn call(world: &MemoryWorld, arguments: serde_json::Value) -> ToolResult {
        world.call("write_file", &arguments.to_string()).await
    }

    #[tokio::test]
    async fn a_file_is_created_then_replaced() {
        let world = MemoryWorld::default();
        let created = call(&world, json!({"path": "a/b.txt", "content": "é\nx"})).await;
        assert_eq!(
            created,
            ToolResult::ok(
                "created `a/b.txt`: 2 lines, 4 bytes",
                json!({"created": true, "bytes": 4})
            )
        );
        let replaced = call(&world, json!({"path": "/workspace/a/b.txt", "content": ""})).await;
        assert_eq!(replaced.summary, "replaced `/workspace/a/b.txt`: 0 lines, 0 bytes");
        assert_eq!(world.file("/workspace/a/b.txt").unwrap(), b"");
    }

    #[tokio::test]
    async fn what_cannot_be_written_changes_nothing() {
        let world = MemoryWorld::default().with_file("/workspace/dir/f", b"x");
        let directory = call(&world, json!({"path": "dir", "content": "y"})).await;
        assert_eq!(
            (directory.status, directory.error.unwrap().r#type.as_str()),
            (Status::Error, "is_directory")
        );
        let below_a_file = call(&world, json!({"path": "dir/f/g", "content": "y"})).await;
        assert_eq!(below_a_file.error.unwrap().r#type, "not_directory");
        let missing = call(&world, json!({"path": ""})).await;
        assert_eq!(missing.data["problems"].as_array().unwrap().len(), 2);
        assert_eq!(world.file("/workspace/dir/f").unwrap(), b"x");
    }
}
