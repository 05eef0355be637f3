//! The bytes that are hashed and signed: every part is tagged or counted, so that no two values share an encoding.
//!
//! Integers are 8 bytes little-endian, texts and lists carry their length first, the keys of an object are sorted.

use serde_json::Value;

/// Collects the encoding of one thing.
pub(super) struct Canonical(Vec<u8>);

impl Canonical {
    /// `domain` names what is encoded, so that a hash or signature of one kind of thing fits no other.
    pub(super) fn new(domain: &str) -> Self {
        let mut this = Self(Vec::with_capacity(512));
        this.text(domain);
        this
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    pub(super) fn count(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }

    pub(super) fn signed(&mut self, value: i64) {
        self.0.extend(value.to_le_bytes());
    }

    pub(super) fn text(&mut self, text: &str) {
        self.count(text.len() as u64);
        self.0.extend(text.as_bytes());
    }

    pub(super) fn value(&mut self, value: &Value) {
        match value {
            Value::Null => self.0.push(b'n'),
            Value::Bool(false) => self.0.push(b'0'),
            Value::Bool(true) => self.0.push(b'1'),
            Value::Number(number) => {
                // A number keeps its kind and its bits through JSON text (feature `float_roundtrip`).
                if let Some(number) = number.as_u64() {
                    self.0.push(b'u');
                    self.count(number);
                } else if let Some(number) = number.as_i64() {
                    self.0.push(b'i');
                    self.signed(number);
                } else {
                    self.0.push(b'f');
                    self.count(number.as_f64().unwrap_or_default().to_bits());
                }
            }
            Value::String(text) => {
                self.0.push(b's');
                self.text(text);
            }
            Value::Array(items) => {
                self.0.push(b'a');
                self.count(items.len() as u64);
                items.iter().for_each(|item| self.value(item));
            }
            Value::Object(fields) => {
                self.0.push(b'o');
                self.count(fields.len() as u64);
                let mut sorted: Vec<_> = fields.iter().collect();
                sorted.sort_by_key(|(name, _)| *name);
                for (name, value) in sorted {
                    self.text(name);
                    self.value(value);
                }
            }
        }
    }
}

/// Nesting that is kept; JSON readers give up at 128.
const DEPTH: usize = 64;

/// The one form in which details are stored: keys sorted, and what is nested too deep as its JSON text, so that a hostile
/// value cannot make an entry that is written but never read again.
pub(super) fn settle(value: Value) -> Value {
    settle_at(value, 0)
}

fn settle_at(value: Value, depth: usize) -> Value {
    match value {
        Value::Array(_) | Value::Object(_) if depth == DEPTH => Value::String(value.to_string()),
        Value::Array(items) => items.into_iter().map(|item| settle_at(item, depth + 1)).collect(),
        Value::Object(fields) => {
            let mut sorted: Vec<_> = fields.into_iter().collect();
            sorted.sort_by(|(a, _), (b, _)| a.cmp(b));
            let settled = sorted
                .into_iter()
                .map(|(name, value)| (name, settle_at(value, depth + 1)));
            Value::Object(settled.collect())
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => value,
    }
}
