//! The size cap on results (H3): head and tail stay, the rest becomes an artifact, and the numbers say what is missing.
//!
//! A tool makes a [`Draft`]: the envelope, and the long texts apart. [`Draft::fit`] puts them together so that what the
//! model reads is at most [`CAP`] characters. Reading on is `read_artifact`'s work (H4).

use serde_json::{Map, Value, json};

use super::world::{Lost, World};
use super::{Status, ToolError, ToolResult};

/// The longest message to the model, in characters of its JSON.
pub const CAP: usize = 3_000;

/// Longest value that is quoted inside a sentence.
const BRIEF: usize = 120;

/// Longest cause of an error; it stands in a result twice.
const CAUSE: usize = 500;

/// A text that may be too long, for the field `data.<name>`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Body {
    pub name: &'static str,
    pub text: String,
    /// Of what the text stands for.
    pub total_bytes: u64,
    pub total_lines: u64,
}

impl Body {
    pub fn new(name: &'static str, text: String) -> Self {
        Self {
            name,
            total_bytes: text.len() as u64,
            total_lines: text.lines().count() as u64,
            text,
        }
    }
}

/// A result before its texts are put in.
#[derive(Debug, Clone, PartialEq)]
pub struct Draft {
    pub status: Status,
    pub summary: String,
    pub data: Map<String, Value>,
    pub bodies: Vec<Body>,
    pub error: Option<ToolError>,
}

impl Draft {
    pub fn ok(summary: impl Into<String>) -> Self {
        Self {
            status: Status::Ok,
            summary: summary.into(),
            data: Map::new(),
            bodies: Vec::new(),
            error: None,
        }
    }

    /// A failure; the cause is the summary too.
    pub fn error(kind: &str, cause: impl Into<String>, suggestion: impl Into<String>) -> Self {
        let cause = clip(&cause.into(), CAUSE);
        Self {
            status: Status::Error,
            error: Some(ToolError {
                r#type: kind.to_owned(),
                possible_cause: cause.clone(),
                retryable: false,
                suggestion: suggestion.into(),
            }),
            ..Self::ok(cause)
        }
    }

    pub fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.data.insert(name.to_owned(), value.into());
        self
    }

    pub fn body(mut self, body: Body) -> Self {
        self.bodies.push(body);
        self
    }

    pub(super) fn retryable(mut self) -> Self {
        if let Some(error) = &mut self.error {
            error.retryable = true;
        }
        self
    }

    /// The result of a draft without long texts.
    pub(super) fn short(self) -> ToolResult {
        debug_assert!(self.bodies.is_empty(), "long texts go through `fit`");
        self.put_in([])
    }

    /// There was more than the tool looked at.
    pub(super) fn incomplete(mut self) -> Self {
        self.status = Status::Truncated;
        self
    }

    /// The result, cut to [`CAP`]; what was cut is stored first.
    pub async fn fit(mut self, world: &dyn World) -> Result<ToolResult, Lost> {
        if let Some((name, details)) = world.aside() {
            self.data.insert(name.to_owned(), details);
        }
        let whole = self.put_in(self.bodies.iter().map(|body| body.text.clone()));
        if length(&whole) <= CAP {
            return Ok(whole);
        }
        // Room is shared out before the artifact exists, so a name of the same length stands in.
        let shares = shares(&self.bodies, CAP.saturating_sub(self.overhead()));
        let long: Vec<&Body> = self
            .bodies
            .iter()
            .zip(&shares)
            .filter(|(body, share)| cost(&body.text) > **share)
            .map(|(body, _)| body)
            .collect();
        if long.is_empty() {
            return Ok(whole);
        }
        let (content, starts) = artifact(&long);
        let artifact = world.put_artifact(content.as_bytes()).await?;
        let mut starts = starts.into_iter();
        let mut cut = Map::new();
        let mut texts = Vec::new();
        for (body, share) in self.bodies.iter().zip(&shares) {
            if cost(&body.text) <= *share {
                texts.push(body.text.clone());
                continue;
            }
            let (text, gap) = shorten(body, *share, starts.next().unwrap_or_default());
            cut.insert(body.name.to_owned(), gap);
            texts.push(text);
        }
        let mut result = self.put_in(texts);
        result.data["truncated"] = Value::Object(cut);
        result.data["artifact"] = json!(artifact);
        result.data["read_more"] = json!(READ_MORE);
        if result.status == Status::Ok {
            result.status = Status::Truncated;
        }
        Ok(result)
    }

    fn put_in(&self, texts: impl IntoIterator<Item = String>) -> ToolResult {
        let mut data = self.data.clone();
        for (body, text) in self.bodies.iter().zip(texts) {
            data.insert(body.name.to_owned(), json!(text));
        }
        ToolResult {
            status: self.status,
            summary: self.summary.clone(),
            data: match data.is_empty() {
                true => Value::Null,
                false => Value::Object(data),
            },
            error: self.error.clone(),
        }
    }

    /// Characters that are not body text, when all bodies are cut.
    fn overhead(&self) -> usize {
        let mut result = self.put_in(self.bodies.iter().map(|_| String::new()));
        let widest = |body: &Body| (body.name.to_owned(), gap(u64::MAX, u64::MAX, body, u64::MAX));
        result.data["truncated"] = Value::Object(self.bodies.iter().map(widest).collect());
        result.data["artifact"] = json!("x".repeat(64));
        result.data["read_more"] = json!(READ_MORE);
        result.status = Status::Truncated;
        length(&result) + self.bodies.len() * MARKER_ROOM
    }
}

const READ_MORE: &str = "read_artifact {artifact, offset?, limit?}, in bytes";

/// The marker in the middle of a cut text, at its longest.
const MARKER_ROOM: usize = 100;

/// As much of `bytes` from their start as one result can hold: the text, and how many bytes it stands for.
///
/// A character that the end cuts is left for the next page, unless it is all there is.
pub fn page(bytes: &[u8]) -> (String, usize) {
    let (mut text, mut used, mut read) = (String::new(), 0, 0);
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            used += char_cost(c);
            if used > PAGE {
                return (text, read);
            }
            text.push(c);
            read += c.len_utf8();
        }
        let invalid = chunk.invalid();
        let is_cut = read + invalid.len() == bytes.len()
            && std::str::from_utf8(invalid).is_err_and(|error| error.error_len().is_none());
        if invalid.is_empty() || (is_cut && read > 0) {
            continue;
        }
        used += 1;
        if used > PAGE {
            return (text, read);
        }
        text.push(char::REPLACEMENT_CHARACTER);
        read += invalid.len();
    }
    (text, read)
}

/// Room for the text of a page, in characters of JSON.
const PAGE: usize = 2_600;

/// A short form of a value, for a sentence.
pub fn brief(text: &str) -> String {
    clip(text, BRIEF)
}

fn clip(text: &str, room: usize) -> String {
    let line: String = text
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(room)
        .collect();
    match text.chars().nth(room) {
        Some(_) => format!("{line}…"),
        None => line,
    }
}

/// `1 line`, `2 lines`.
pub fn count(number: u64, one: &str) -> String {
    match number {
        1 => format!("1 {one}"),
        _ if one.ends_with("ch") => format!("{number} {one}es"),
        _ => format!("{number} {one}s"),
    }
}

fn length(result: &ToolResult) -> usize {
    result.to_message().chars().count()
}

/// Characters of a text as a JSON string, without the quotes.
pub(super) fn cost(text: &str) -> usize {
    text.chars().map(char_cost).sum()
}

fn char_cost(c: char) -> usize {
    match c {
        '"' | '\\' | '\n' | '\r' | '\t' | '\u{8}' | '\u{c}' => 2,
        '\u{0}'..='\u{1f}' => 6,
        _ => 1,
    }
}

/// Shares `room` out: short texts get what they need, long ones the same part of what is left.
fn shares(bodies: &[Body], room: usize) -> Vec<usize> {
    let costs: Vec<usize> = bodies.iter().map(|body| cost(&body.text)).collect();
    let mut order: Vec<usize> = (0..costs.len()).collect();
    order.sort_by_key(|n| costs[*n]);
    let mut shares = vec![0; costs.len()];
    let mut left = room;
    for (done, n) in order.iter().enumerate() {
        shares[*n] = costs[*n].min(left / (costs.len() - done));
        left -= shares[*n];
    }
    shares
}

/// Keeps three fifths of `room` at the head and the rest at the tail, at line ends where there are some near. `start` is
/// where the text begins in the artifact.
fn shorten(body: &Body, room: usize, start: u64) -> (String, Value) {
    let head_room = room * 3 / 5;
    let head = prefix(&body.text, head_room);
    let head = match head.rfind('\n') {
        Some(end) if end + 1 > head.len() / 2 => &head[..=end],
        Some(_) | None => head,
    };
    let rest = &body.text[head.len()..];
    let tail = suffix(rest, room - head_room);
    let tail = match tail.find('\n') {
        Some(end) if end < tail.len() / 2 => &tail[end + 1..],
        Some(_) | None => tail,
    };
    let left_out = &rest[..rest.len() - tail.len()];
    // What the text stands for can be more than the text: the world may have kept less than there was.
    let bytes = body.total_bytes.saturating_sub((head.len() + tail.len()) as u64);
    let lines = left_out.matches('\n').count().max(1) as u64;
    let lines = lines.max(
        body.total_lines
            .saturating_sub((head.matches('\n').count() + tail.lines().count()) as u64),
    );
    let line_end = if head.ends_with('\n') { "" } else { "\n" };
    let text = format!(
        "{head}{line_end}[… {}, {} left out …]\n{tail}",
        count(bytes, "byte"),
        count(lines, "line")
    );
    (text, gap(bytes, lines, body, start + head.len() as u64))
}

fn gap(bytes: u64, lines: u64, body: &Body, offset: u64) -> Value {
    json!({
        "left_out_bytes": bytes,
        "left_out_lines": lines,
        "total_bytes": body.total_bytes,
        "total_lines": body.total_lines,
        "offset": offset,
    })
}

fn prefix(text: &str, room: usize) -> &str {
    let mut used = 0;
    let end = text.char_indices().find(|(_, c)| {
        used += char_cost(*c);
        used > room
    });
    end.map_or(text, |(at, _)| &text[..at])
}

fn suffix(text: &str, room: usize) -> &str {
    let mut used = 0;
    let end = text.char_indices().rev().find(|(_, c)| {
        used += char_cost(*c);
        used > room
    });
    end.map_or(text, |(at, c)| &text[at + c.len_utf8()..])
}

/// One text as it is, several under headings; and where each begins.
fn artifact(long: &[&Body]) -> (String, Vec<u64>) {
    if let [only] = long {
        return (only.text.clone(), vec![0]);
    }
    let mut content = String::new();
    let mut starts = Vec::new();
    for body in long {
        content.push_str(&format!("== {} ==\n", body.name));
        starts.push(content.len() as u64);
        content.push_str(&body.text);
        content.push('\n');
    }
    (content, starts)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tool::memory::MemoryWorld;

    async fn fit(draft: Draft) -> (ToolResult, MemoryWorld) {
        let world = MemoryWorld::default();
        let result = draft.fit(&world).await.unwrap();
        (result, world)
    }

    fn lines(count: usize) -> String {
        (1..=count).map(|n| format!("line {n}\n")).collect()
    }

    #[tokio::test]
    async fn h3_a_long_text_keeps_head_and_tail_and_says_what_is_missing() {
        let text = lines(1000);
        let (result, world) = fit(Draft::ok("ran")
            .with("exit_code", 0)
            .body(Body::new("stdout", text.clone())))
        .await;
        assert_eq!(result.status, Status::Truncated);
        assert!(
            length(&result) <= CAP && length(&result) > CAP * 8 / 10,
            "{}",
            length(&result)
        );
        let shown = result.data["stdout"].as_str().unwrap().to_owned();
        let (head, rest) = shown.split_once("[…").unwrap();
        let (marker, tail) = rest.split_once("…]\n").unwrap();
        let ends = |text: &str| format!("{:?} to {:?}", text.lines().next(), text.lines().last());
        let mut brief = result.clone();
        brief.data["stdout"] = json!(format!("{} [{marker}] {}", ends(head), ends(tail)));
        insta::assert_json_snapshot!(brief);
        // H4: all of it is there, and the gap begins where it is said to begin.
        let id = result.data["artifact"].as_str().unwrap();
        assert_eq!(world.get_artifact(id).await.unwrap().unwrap(), text.as_bytes());
        let offset = result.data["truncated"]["stdout"]["offset"].as_u64().unwrap() as usize;
        assert!(
            result.data["stdout"]
                .as_str()
                .unwrap()
                .starts_with(&format!("{}[…", &text[..offset]))
        );
    }

    #[tokio::test]
    async fn short_texts_stay_whole_beside_long_ones_and_errors_stay_errors() {
        let draft = Draft::error("exit_status", "it ended with status 1", "read stderr")
            .body(Body::new("stdout", "x".repeat(9000)))
            .body(Body::new("stderr", "boom\n".to_owned()));
        let (result, world) = fit(draft).await;
        assert_eq!(
            (result.status, result.data["stderr"].as_str()),
            (Status::Error, Some("boom\n"))
        );
        let id = result.data["artifact"].as_str().unwrap();
        assert_eq!(world.get_artifact(id).await.unwrap().unwrap().len(), 9000);

        let both = Draft::ok("ran")
            .body(Body::new("stdout", lines(900)))
            .body(Body::new("stderr", lines(800)));
        let (result, world) = fit(both).await;
        let kept = world
            .get_artifact(result.data["artifact"].as_str().unwrap())
            .await
            .unwrap()
            .unwrap();
        let kept_text = String::from_utf8(kept).unwrap();
        assert_eq!(
            kept_text,
            format!("== stdout ==\n{}\n== stderr ==\n{}\n", lines(900), lines(800))
        );
        let offset = result.data["truncated"]["stderr"]["offset"].as_u64().unwrap() as usize;
        let shown = result.data["stderr"].as_str().unwrap();
        assert!(shown.starts_with(&format!(
            "{}[…",
            &kept_text[kept_text.rfind("line 1\n").unwrap()..offset]
        )));
    }

    #[tokio::test]
    async fn what_fits_is_left_alone() {
        let (result, world) = fit(Draft::ok("ran").body(Body::new("stdout", lines(100)))).await;
        assert_eq!(
            (result.status, result.data.clone()),
            (Status::Ok, json!({"stdout": lines(100)}))
        );
        assert_eq!(world.artifacts(), 0);
        assert_eq!(
            fit(Draft::ok("nothing")).await.0,
            ToolResult::ok("nothing", Value::Null)
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn h3_no_result_is_longer_than_the_cap(
            unit in prop::collection::vec(prop::sample::select(vec!["a", "\n", "\"", "\u{1}", "🦀", "é", "\\", "words and words "]), 1..20),
            times in prop::collection::vec(0usize..2000, 1..4),
        ) {
            let names = ["stdout", "stderr", "more"];
            let mut draft = Draft::ok("ran");
            for (name, times) in names.iter().zip(&times) {
                draft = draft.body(Body::new(name, unit.concat().repeat(*times)));
            }
            let (result, _) = futures::executor::block_on(fit(draft));
            prop_assert!(length(&result) <= CAP, "{}", length(&result));
        }
    }
}
