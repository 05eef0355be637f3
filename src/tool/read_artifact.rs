//! `read_artifact`: what did not fit into a result (H4).
//!
//! In bytes, not lines: so each byte of a text with one long line can be reached too. A page is cut to what fits, never
//! stored again.

use schemars::JsonSchema;
use serde::Deserialize;

use super::result::{Body, Draft, brief, page};
use super::run::Stop;
use super::world::World;

#[derive(Debug, Clone, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Arguments {
    /// The id from `data.artifact`.
    #[schemars(length(min = 1))]
    pub artifact: String,
    /// First byte to read, from 0.
    pub offset: Option<u64>,
    /// How many bytes at most; a result holds about 2,500.
    #[schemars(range(min = 1))]
    pub limit: Option<u64>,
}

pub(super) async fn run(arguments: Arguments, world: &dyn World) -> Result<Draft, Stop> {
    let Some(bytes) = world.get_artifact(&arguments.artifact).await? else {
        let cause = format!("this run has no artifact `{}`", brief(&arguments.artifact));
        return Ok(Draft::error(
            "not_found",
            cause,
            "copy the id from `data.artifact` of the result that was cut",
        ));
    };
    let total = bytes.len();
    let start = usize::try_from(arguments.offset.unwrap_or(0)).unwrap_or(usize::MAX);
    if start > total {
        let cause = format!("byte {start} is past the end: the artifact has {total} bytes");
        return Ok(Draft::error("out_of_range", cause, "give a smaller `offset`").with("total_bytes", total));
    }
    let limit = arguments
        .limit
        .map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX));
    let end = start.saturating_add(limit).min(total);
    let (text, read) = page(&bytes[start..end]);
    let end = start + read;
    Ok(Draft::ok(format!("bytes {start} to {end} of {total}"))
        .with("total_bytes", total)
        .with("next_offset", (end < total).then_some(end))
        .body(Body::new("content", text)))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::tool::memory::MemoryWorld;
    use crate::tool::world::World;
    use crate::tool::{Status, ToolResult};

    async fn call(world: &MemoryWorld, arguments: Value) -> ToolResult {
        world.call("read_artifact", &arguments.to_string()).await
    }

    #[tokio::test]
    async fn h4_all_of_an_artifact_can_be_read_page_by_page() {
        let text: String = (0..3000)
            .map(|n| ["\"", "\n", "🦀", "long words ", "\u{1}"][n % 5])
            .collect();
        let world = MemoryWorld::default();
        let id = world.put_artifact(text.as_bytes()).await.unwrap();
        let (mut offset, mut read, mut pages) = (json!(0), String::new(), 0);
        while !offset.is_null() {
            let page = call(&world, json!({"artifact": id, "offset": offset})).await;
            assert_eq!(page.status, Status::Ok);
            assert!(page.to_message().chars().count() <= 3000);
            read.push_str(page.data["content"].as_str().unwrap());
            offset = page.data["next_offset"].clone();
            pages += 1;
        }
        assert_eq!(read, text);
        assert!(pages > 3 && world.artifacts() == 1, "{pages}");
        let part = call(&world, json!({"artifact": id, "offset": 1, "limit": 5})).await;
        assert_eq!(
            part,
            ToolResult::ok(
                "bytes 1 to 6 of 10800",
                json!({"total_bytes": 10800, "next_offset": 6, "content": "\n🦀"})
            )
        );
    }

    #[tokio::test]
    async fn bytes_that_are_no_text_and_cuts_inside_a_character_get_on() {
        let world = MemoryWorld::default();
        let id = world.put_artifact("a🦀".as_bytes()).await.unwrap();
        let inside = call(&world, json!({"artifact": id, "offset": 0, "limit": 3})).await;
        assert_eq!(
            (inside.data["content"].as_str(), inside.data["next_offset"].as_u64()),
            (Some("a"), Some(1))
        );
        let stuck = call(&world, json!({"artifact": id, "offset": 1, "limit": 2})).await;
        assert_eq!(
            (stuck.data["content"].as_str(), stuck.data["next_offset"].as_u64()),
            (Some("\u{fffd}"), Some(3))
        );
        let end = call(&world, json!({"artifact": id, "offset": 5})).await;
        assert_eq!(
            (end.data["content"].as_str(), &end.data["next_offset"]),
            (Some(""), &Value::Null)
        );
    }

    #[tokio::test]
    async fn what_is_not_there_is_said() {
        let world = MemoryWorld::default();
        assert_eq!(
            call(&world, json!({"artifact": "x"})).await.error.unwrap().r#type,
            "not_found"
        );
        let id = world.put_artifact(b"abc").await.unwrap();
        assert_eq!(
            call(&world, json!({"artifact": id, "offset": 4}))
                .await
                .error
                .unwrap()
                .r#type,
            "out_of_range"
        );
    }
}
