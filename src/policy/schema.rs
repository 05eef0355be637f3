//! The JSON Schema of a policy file, and what a file breaks of it, in words for people.

use std::collections::HashSet;
use std::sync::LazyLock;

use jsonschema::error::ValidationErrorKind;
use jsonschema::{ValidationError, Validator};
use schemars::Schema;
use schemars::generate::SchemaSettings;
use schemars::transform::{Transform, transform_subschemas};
use serde_json::Value;

use super::document::{Document, escape};
use super::input::Input;
use super::violation::{Violation, listed, suggestion};

/// The schema that is published as `policies/schema.json` and that every file is checked against.
pub fn schema() -> Value {
    let settings = SchemaSettings::draft2020_12().with(|settings| settings.inline_subschemas = true);
    let schema = settings
        .with_transform(NoNull)
        .into_generator()
        .into_root_schema_for::<Input>();
    schema.to_value()
}

static SCHEMA: LazyLock<Value> = LazyLock::new(schema);
static VALIDATOR: LazyLock<Validator> =
    LazyLock::new(|| jsonschema::validator_for(&SCHEMA).expect("the generated schema is a schema"));

/// TOML has no null, and an absent field is no null either; what only serde's optional fields bring in goes.
#[derive(Debug, Clone)]
struct NoNull;

impl Transform for NoNull {
    fn transform(&mut self, schema: &mut Schema) {
        let null = Value::from("null");
        if let Some(Value::Array(types)) = schema.get_mut("type") {
            types.retain(|kind| *kind != null);
            if let [only] = types.as_slice() {
                let only = only.clone();
                schema.insert("type".to_owned(), only);
            }
        }
        if let Some(Value::Array(options)) = schema.get_mut("enum") {
            options.retain(|option| !option.is_null());
        }
        if let Some(Value::Array(branches)) = schema.get_mut("anyOf") {
            branches.retain(|branch| branch.get("type") != Some(&null));
            if let [Value::Object(only)] = branches.as_slice() {
                let only = only.clone();
                schema.remove("anyOf");
                for (keyword, value) in only {
                    schema.ensure_object().entry(keyword).or_insert(value);
                }
            }
        }
        if schema.get("default") == Some(&Value::Null) {
            schema.remove("default");
        }
        transform_subschemas(self, schema);
    }
}

/// Everything in `document` that breaks the schema, and its value without that, so that the rest can be checked too.
pub(super) fn shape(document: &Document) -> (Value, Vec<Violation>) {
    let mut rest = document.value().clone();
    let mut violations = Vec::new();
    let mut seen = HashSet::new();
    for error in VALIDATOR.iter_errors(document.value()) {
        let at = error.instance_path().as_str();
        if let ValidationErrorKind::AdditionalProperties { unexpected } = error.kind() {
            for key in unexpected {
                let pointer = format!("{at}/{}", escape(key));
                let message = format!("unknown field; {}{}", suggestion(key, &known_at(&error)), beside(at));
                violations.push(document.violation(&pointer, message));
                remove(&mut rest, &pointer);
            }
            continue;
        }
        // One problem a place: a wrong type is also an unknown value, and so on.
        if !seen.insert((at.to_owned(), required(&error))) {
            continue;
        }
        violations.push(document.violation(at, describe(&error) + beside(at)));
        if required(&error).is_none() {
            remove(&mut rest, at);
        }
    }
    (rest, violations)
}

fn required(error: &ValidationError<'_>) -> Option<String> {
    match error.kind() {
        ValidationErrorKind::Required { property } => property.as_str().map(str::to_owned),
        _ => None,
    }
}

/// What else there is to say about a place.
fn beside(pointer: &str) -> &'static str {
    if pointer == "/network/mode" {
        ". There is no mode that redirects programs which ignore proxy variables (`transparent`) yet"
    } else {
        ""
    }
}

/// Takes away what `pointer` points to. List items that others refer to by number become empty tables instead.
fn remove(value: &mut Value, pointer: &str) {
    let Some((around, key)) = pointer.rsplit_once('/') else {
        *value = Value::Object(serde_json::Map::new());
        return;
    };
    match value.pointer_mut(around) {
        Some(Value::Object(object)) => {
            object.remove(&super::document::unescape(key));
        }
        Some(Value::Array(_))
            if matches!(
                around,
                "/tools/rules" | "/mounts" | "/network/allow" | "/network/deny" | "/credentials"
            ) =>
        {
            let item = value
                .pointer_mut(pointer)
                .expect("the error is about an item that exists");
            *item = Value::Object(serde_json::Map::new());
        }
        Some(Value::Array(_)) => remove(value, around),
        // Gone already, with something around it.
        _ => {}
    }
}

/// The part of the schema whose keyword failed.
fn node<'a>(error: &ValidationError<'_>) -> Option<&'a Value> {
    let keyword = error.schema_path().as_str();
    SCHEMA.pointer(&keyword[..keyword.rfind('/')?])
}

fn known_at(error: &ValidationError<'_>) -> Vec<&'static str> {
    let properties = node(error)
        .and_then(|node| node.get("properties"))
        .and_then(Value::as_object);
    properties
        .into_iter()
        .flatten()
        .map(|(name, _)| name.as_str())
        .collect()
}

fn describe(error: &ValidationError<'_>) -> String {
    let found = show(error.instance());
    match error.kind() {
        ValidationErrorKind::Required { property } => format!("the field `{}` is missing", show(property)),
        ValidationErrorKind::Minimum { limit } => match range(error) {
            Some(range) => format!("`{found}` is out of range: it must be {range}"),
            None => format!("`{found}` is too small: it must be at least {limit}"),
        },
        ValidationErrorKind::Maximum { limit } => match range(error) {
            Some(range) => format!("`{found}` is out of range: it must be {range}"),
            None => format!("`{found}` is too large: it must be at most {limit}"),
        },
        ValidationErrorKind::MinLength { limit: 1 } => "it must not be empty".to_owned(),
        ValidationErrorKind::MinLength { limit } => format!("it must have at least {limit} characters"),
        ValidationErrorKind::MaxLength { limit } => format!("it must have at most {limit} characters"),
        ValidationErrorKind::MinItems { .. } | ValidationErrorKind::MinProperties { .. } => {
            "it must not be empty".to_owned()
        }
        ValidationErrorKind::MaxItems { limit } => format!("it must have at most {limit} entries"),
        ValidationErrorKind::Pattern { .. } => format!(
            "`{found}` cannot be used: it must have lower-case letters, digits and dashes only, not begin with a dash, \
             and be at most 63 long"
        ),
        // Types, constants and choices: all are told by what is allowed.
        _ => match node(error) {
            Some(node) => format!(
                "{} cannot be used: {}",
                kind(error.instance()),
                expected(node, error.instance())
            ),
            None => error.to_string(),
        },
    }
}

fn range(error: &ValidationError<'_>) -> Option<String> {
    let node = node(error)?;
    Some(format!("{} to {}", node.get("minimum")?, node.get("maximum")?))
}

/// What a part of the schema takes.
fn expected(node: &Value, found: &Value) -> String {
    let mut values = Vec::new();
    let mut types = Vec::new();
    collect(node, &mut values, &mut types);
    if values.is_empty() {
        return format!("it must be {}", types.join(" or "));
    }
    if let Value::String(text) = found
        && let Some(near) = super::violation::nearest(text, values.iter().map(String::as_str))
    {
        return format!(
            "did you mean `{near}`? it must be one of {}",
            listed(values.iter().map(String::as_str))
        );
    }
    match values.as_slice() {
        [only] => format!("it must be `{only}`"),
        several => format!("it must be one of {}", listed(several.iter().map(String::as_str))),
    }
}

fn collect(node: &Value, values: &mut Vec<String>, types: &mut Vec<String>) {
    if let Some(value) = node.get("const") {
        values.push(show(value));
    } else if let Some(Value::Array(options)) = node.get("enum") {
        values.extend(options.iter().map(show));
    } else if let Some(Value::Array(branches)) = node.get("anyOf").or(node.get("oneOf")) {
        branches.iter().for_each(|branch| collect(branch, values, types));
    } else if let Some(Value::String(name)) = node.get("type") {
        types.push(match name.as_str() {
            "string" => "text in quotes".to_owned(),
            "integer" => match (node.get("minimum"), node.get("maximum")) {
                (Some(least), Some(most)) => format!("a whole number from {least} to {most}"),
                (Some(_) | None, _) => "a whole number".to_owned(),
            },
            "number" => "a number".to_owned(),
            "boolean" => "`true` or `false`".to_owned(),
            "object" => "a table".to_owned(),
            "array" => {
                let items = node.pointer("/items/type").and_then(Value::as_str);
                let of = items.map_or("", |kind| match kind {
                    "object" => " of tables",
                    "integer" => " of whole numbers",
                    _ => " of texts in quotes",
                });
                let least = if node.get("minItems").is_some() {
                    ", not empty"
                } else {
                    ""
                };
                format!("a list{of}{least}")
            }
            other => other.to_owned(),
        });
    }
}

/// A value as a person would write it, cut short.
fn show(value: &Value) -> String {
    let text = match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    match text.char_indices().nth(60) {
        Some((cut, _)) => format!("{}…", &text[..cut]),
        None => text,
    }
}

fn kind(value: &Value) -> String {
    match value {
        Value::Object(_) => "a table".to_owned(),
        Value::Array(_) => "a list".to_owned(),
        Value::String(_) | Value::Number(_) | Value::Bool(_) | Value::Null => format!("`{}`", show(value)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regenerate with `EXUVIA_BLESS=1`.
    #[test]
    fn the_published_schema_is_the_one_that_is_used() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/policies/schema.json");
        let generated = format!("{:#}\n", schema());
        if std::env::var_os("EXUVIA_BLESS").is_some() {
            std::fs::write(path, &generated).unwrap();
        }
        let published = std::fs::read_to_string(path).unwrap();
        assert!(
            published == generated,
            "policies/schema.json is stale: run this test with EXUVIA_BLESS=1"
        );
    }

    /// A schema with references or nulls would lose the fields that messages name.
    #[test]
    fn the_schema_is_flat_and_closed() {
        let text = schema().to_string();
        assert!(!text.contains("$ref") && !text.contains("null"), "{text}");
        let tables = text.matches("\"properties\":").count();
        assert_eq!(text.matches("\"additionalProperties\":false").count(), tables);
    }

    #[test]
    fn the_schema_requires_what_the_checks_take_for_granted() {
        let schema = schema();
        let required = |pointer: &str| schema.pointer(pointer).cloned().unwrap_or_default();
        assert_eq!(required("/required"), serde_json::json!(["format_version", "name"]));
        assert_eq!(
            required("/properties/tools/properties/rules/items/required"),
            serde_json::json!(["name", "tool", "verdict"])
        );
        assert_eq!(
            required("/properties/mounts/items/required"),
            serde_json::json!(["source", "target"])
        );
    }
}
