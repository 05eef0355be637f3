//! A policy file as TOML: its value as JSON, and where each key is written.

use std::collections::HashMap;

use serde_json::{Map, Number, Value};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::violation::{Position, Violation};

/// Larger files are refused unread.
pub(super) const MAX_BYTES: u64 = 256 << 10;

/// Syntax is fine; nothing else is known yet.
#[derive(Debug, Clone, PartialEq)]
pub struct Document {
    file: String,
    value: Value,
    /// By JSON pointer.
    places: HashMap<String, Place>,
}

#[derive(Debug, Clone, PartialEq)]
struct Place {
    /// As people write it, `tools.rules[2].match`.
    path: String,
    position: Position,
}

impl Document {
    /// Parses `text`, which was read from `file`.
    ///
    /// # Errors
    /// All syntax errors, double keys and values without a JSON counterpart (dates, infinities).
    pub fn parse(file: &str, text: &str) -> Result<Self, Vec<Violation>> {
        let lines = Lines::of(text);
        let violation = |span: Option<std::ops::Range<usize>>, path: &str, message: String| Violation {
            file: Some(file.to_owned()),
            position: span.map(|span| lines.position(text, span.start)),
            path: path.to_owned(),
            message,
        };
        if text.len() as u64 > MAX_BYTES {
            let message = format!("the file has {} bytes, at most {MAX_BYTES} are read", text.len());
            return Err(vec![violation(None, "", message)]);
        }
        let (table, errors) = DeTable::parse_recoverable(text);
        if !errors.is_empty() {
            let not_toml = |error: &toml::de::Error| format!("not TOML: {}", error.message().replace('\n', ", "));
            let all = errors.iter().map(|error| violation(error.span(), "", not_toml(error)));
            let mut all: Vec<Violation> = all.collect();
            all.sort_by_key(|violation| violation.position);
            return Err(all);
        }
        let mut reader = Reader::default();
        let value = reader.table(table.get_ref(), "", "");
        if !reader.refused.is_empty() {
            let all = reader.refused.into_iter();
            return Err(all
                .map(|(at, path, message)| violation(Some(at), &path, message))
                .collect());
        }
        let places = reader.places.into_iter().map(|(pointer, (path, start))| {
            let position = lines.position(text, start);
            (pointer, Place { path, position })
        });
        Ok(Self {
            file: file.to_owned(),
            value,
            places: places.collect(),
        })
    }

    pub fn file(&self) -> &str {
        &self.file
    }

    pub fn value(&self) -> &Value {
        &self.value
    }

    pub fn name(&self) -> Option<&str> {
        self.value.get("name").and_then(Value::as_str)
    }

    /// The policy that this one says it extends.
    pub fn extends(&self) -> Option<&str> {
        self.value.get("extends").and_then(Value::as_str)
    }

    /// A problem with what `pointer` points to. Where that is missing, the position is the nearest thing around it.
    pub(super) fn violation(&self, pointer: &str, message: impl Into<String>) -> Violation {
        Violation {
            file: Some(self.file.clone()),
            position: self.position(pointer),
            path: self.path(pointer),
            message: message.into(),
        }
    }

    /// `file:line` of what `pointer` points to, or of the nearest thing around it.
    pub(super) fn source(&self, pointer: &str) -> String {
        let line = self.position(pointer).map_or(1, |position| position.line);
        format!("{}:{line}", self.file)
    }

    fn position(&self, pointer: &str) -> Option<Position> {
        let mut around = std::iter::successors(Some(pointer), |inner| Some(&inner[..inner.rfind('/')?]));
        around
            .find_map(|pointer| self.places.get(pointer))
            .map(|place| place.position)
    }

    fn path(&self, pointer: &str) -> String {
        if let Some(place) = self.places.get(pointer) {
            return place.path.clone();
        }
        match pointer.rsplit_once('/') {
            Some((around, key)) => join(&self.path(around), &unescape(key)),
            None => String::new(),
        }
    }
}

/// Collects places while it turns TOML into JSON.
#[derive(Debug, Default)]
struct Reader {
    /// Path and byte offset by pointer.
    places: HashMap<String, (String, usize)>,
    refused: Vec<(std::ops::Range<usize>, String, String)>,
}

impl Reader {
    fn table(&mut self, table: &DeTable<'_>, pointer: &str, path: &str) -> Value {
        let mut entries: Vec<_> = table.iter().collect();
        entries.sort_by_key(|(key, _)| key.span().start);
        let mut object = Map::new();
        for (key, value) in entries {
            let pointer = format!("{pointer}/{}", escape(key.get_ref()));
            let path = join(path, key.get_ref());
            self.places.insert(pointer.clone(), (path.clone(), key.span().start));
            object.insert(key.get_ref().to_string(), self.value(value, &pointer, &path));
        }
        Value::Object(object)
    }

    fn value(&mut self, value: &Spanned<DeValue<'_>>, pointer: &str, path: &str) -> Value {
        match value.get_ref() {
            DeValue::String(text) => Value::String(text.to_string()),
            DeValue::Boolean(truth) => Value::Bool(*truth),
            DeValue::Integer(integer) => match i64::from_str_radix(integer.as_str(), integer.radix()) {
                Ok(number) => Value::Number(number.into()),
                Err(_) => self.refuse(value, path, format!("`{integer}` does not fit into 64 bits")),
            },
            DeValue::Float(float) => match float.as_str().parse().ok().and_then(Number::from_f64) {
                Some(number) => Value::Number(number),
                None => self.refuse(value, path, format!("`{float}` is not a finite number")),
            },
            DeValue::Datetime(_) => self.refuse(value, path, "a date has no meaning in a policy".to_owned()),
            DeValue::Array(array) => {
                let mut items = Vec::new();
                for (n, item) in array.iter().enumerate() {
                    let (pointer, path) = (format!("{pointer}/{n}"), format!("{path}[{n}]"));
                    self.places.insert(pointer.clone(), (path.clone(), item.span().start));
                    items.push(self.value(item, &pointer, &path));
                }
                Value::Array(items)
            }
            DeValue::Table(table) => self.table(table, pointer, path),
        }
    }

    fn refuse(&mut self, value: &Spanned<DeValue<'_>>, path: &str, message: String) -> Value {
        self.refused.push((value.span(), path.to_owned(), message));
        Value::Null
    }
}

/// Byte offsets at which lines start.
struct Lines(Vec<usize>);

impl Lines {
    fn of(text: &str) -> Self {
        Self(
            std::iter::once(0)
                .chain(text.match_indices('\n').map(|(at, _)| at + 1))
                .collect(),
        )
    }

    fn position(&self, text: &str, offset: usize) -> Position {
        let line = self.0.partition_point(|start| *start <= offset);
        let start = self.0[line - 1];
        let before = text.get(start..offset).unwrap_or_default();
        Position {
            line,
            column: before.chars().count() + 1,
        }
    }
}

fn join(path: &str, key: &str) -> String {
    let is_bare = !key.is_empty()
        && key
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-'));
    let key = if is_bare { key.to_owned() } else { format!("{key:?}") };
    if path.is_empty() { key } else { format!("{path}.{key}") }
}

/// RFC 6901, section 3.
pub(super) fn escape(key: &str) -> String {
    key.replace('~', "~0").replace('/', "~1")
}

pub(super) fn unescape(token: &str) -> String {
    token.replace("~1", "/").replace("~0", "~")
}
