//! Argument text → typed arguments, or a result that names every problem at once (H1, C6).

use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, Schema, transform};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::result::{Draft, brief, cost, count};

/// What is wrong with one field.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Problem {
    pub field: String,
    pub expected: String,
    pub got: String,
}

/// The JSON Schema of `T`, as a model is told it: no title, no format, nothing outside itself.
pub fn schema<T: JsonSchema>() -> Value {
    let settings = SchemaSettings::draft2020_12().with(|settings| {
        settings.inline_subschemas = true;
        settings.meta_schema = None;
    });
    let mut schema = settings.into_generator().into_root_schema_for::<T>();
    fn strip(schema: &mut Schema) {
        schema.remove("title");
        schema.remove("format");
        transform::transform_subschemas(&mut (strip as fn(&mut Schema)), schema);
    }
    strip(&mut schema);
    schema.to_value()
}

/// Reads the arguments of `tool`. An empty text means `{}`.
pub fn parse<T: DeserializeOwned + JsonSchema>(tool: &str, text: &str) -> Result<T, Box<Draft>> {
    let text = if text.trim().is_empty() { "{}" } else { text };
    let value: Value = serde_json::from_str(text).map_err(|error| {
        let problem = Problem {
            field: String::new(),
            expected: "a JSON object".to_owned(),
            got: format!("text that is not JSON ({error}): {}", brief(text)),
        };
        invalid(tool, vec![problem])
    })?;
    let problems = problems(&schema::<T>(), &value);
    if !problems.is_empty() {
        return Err(invalid(tool, problems));
    }
    serde_json::from_value(value).map_err(|error| {
        let problem = Problem {
            field: String::new(),
            expected: "arguments that fit the schema".to_owned(),
            got: error.to_string(),
        };
        invalid(tool, vec![problem])
    })
}

/// The result for a call whose arguments do not fit.
pub fn invalid(tool: &str, problems: Vec<Problem>) -> Box<Draft> {
    let first = problems.first().map(|problem| {
        let field = match problem.field.as_str() {
            "" => "the arguments".to_owned(),
            field => format!("`{field}`"),
        };
        format!(": {field}: expected {}, got {}", problem.expected, problem.got)
    });
    let cause = format!(
        "the arguments of `{tool}` have {}{}",
        count(problems.len() as u64, "problem"),
        first.unwrap_or_default()
    );
    let draft = Draft::error(
        "invalid_arguments",
        cause,
        format!("call `{tool}` again with every problem put right"),
    );
    // As many as a result can hold; the count is in the cause.
    let mut room = NAMED_PROBLEMS;
    let named = problems.iter().take_while(|problem| {
        let size = cost(&json!(problem).to_string());
        room = room.saturating_sub(size);
        room > 0
    });
    let named = json!(named.collect::<Vec<_>>());
    Box::new(draft.with("problems", named))
}

/// Room for problems, in characters.
const NAMED_PROBLEMS: usize = 1_200;

fn problems(schema: &Value, value: &Value) -> Vec<Problem> {
    let validator = jsonschema::validator_for(schema).expect("our own schemas are valid");
    let known = || {
        let names = schema["properties"]
            .as_object()
            .into_iter()
            .flat_map(|properties| properties.keys());
        names.map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
    };
    let mut problems = Vec::new();
    for error in validator.iter_errors(value) {
        use jsonschema::error::ValidationErrorKind;
        let field = error.instance_path().to_string().trim_start_matches('/').to_owned();
        if let ValidationErrorKind::Required { property } = error.kind() {
            let field = property.as_str().unwrap_or_default().to_owned();
            problems.push(Problem {
                expected: expected(&schema["properties"][&field]),
                field,
                got: "nothing".to_owned(),
            });
        } else if let ValidationErrorKind::AdditionalProperties { unexpected } = error.kind() {
            problems.extend(unexpected.iter().map(|field| Problem {
                field: brief(field),
                expected: format!("one of {}", known()),
                got: "an unknown argument".to_owned(),
            }));
        } else {
            let wanted = if field.is_empty() {
                schema
            } else {
                &schema["properties"][&field]
            };
            problems.push(Problem {
                field,
                expected: expected(wanted),
                got: got(error.instance()),
            });
        }
    }
    problems.dedup();
    problems
}

/// A property's type and bounds, in words.
fn expected(schema: &Value) -> String {
    let kind = match &schema["type"] {
        Value::String(kind) => kind.clone(),
        Value::Array(kinds) => kinds
            .iter()
            .filter_map(Value::as_str)
            .filter(|kind| *kind != "null")
            .collect::<Vec<_>>()
            .join(" or "),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => "value".to_owned(),
    };
    let article = if kind.starts_with(['a', 'e', 'i', 'o', 'u']) {
        "an"
    } else {
        "a"
    };
    let bounds = [("minimum", "at least"), ("maximum", "at most")];
    let mut words: Vec<String> = bounds
        .iter()
        .filter_map(|(keyword, words)| Some(format!("{words} {}", schema[*keyword].as_u64()?)))
        .collect();
    if schema["minLength"].as_u64() == Some(1) {
        words.push("not empty".to_owned());
    }
    match words.is_empty() {
        true => format!("{article} {kind}"),
        false => format!("{article} {kind}, {}", words.join(" and ")),
    }
}

fn got(value: &Value) -> String {
    let kind = match value {
        Value::Null => return "null".to_owned(),
        Value::Bool(_) => "the boolean",
        Value::Number(_) => "the number",
        Value::String(text) if text.is_empty() => return "an empty string".to_owned(),
        Value::String(_) => "the string",
        Value::Array(_) => "the array",
        Value::Object(_) => "the object",
    };
    format!("{kind} {}", brief(&value.to_string()))
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;
    use crate::tool::shell;

    #[derive(Debug, PartialEq, Deserialize, JsonSchema)]
    #[serde(deny_unknown_fields)]
    struct Optional {
        depth: Option<u32>,
    }

    fn problems_of(text: &str) -> Value {
        parse::<shell::Arguments>("shell", text).unwrap_err().data["problems"].clone()
    }

    #[test]
    fn h1_every_problem_is_named_at_once() {
        assert_eq!(
            problems_of(r#"{"cwd": 7, "timeout_s": -1, "cmd": "ls"}"#),
            json!([
                {"field": "cwd", "expected": "a string, not empty", "got": "the number 7"},
                {"field": "timeout_s", "expected": "an integer, at least 1", "got": "the number -1"},
                {"field": "cmd", "expected": "one of `command`, `cwd`, `timeout_s`", "got": "an unknown argument"},
                {"field": "command", "expected": "a string, not empty", "got": "nothing"},
            ])
        );
        for (text, got) in [
            ("[1]", "the array [1]"),
            ("null", "null"),
            ("\"ls\"", "the string \"ls\""),
        ] {
            assert_eq!(
                problems_of(text),
                json!([{"field": "", "expected": "an object", "got": got}]),
                "{text}"
            );
        }
        let cut = problems_of(r#"{"command": "l"#);
        assert_eq!(cut[0]["expected"], "a JSON object");
        assert!(
            cut[0]["got"]
                .as_str()
                .unwrap()
                .starts_with("text that is not JSON (EOF"),
            "{cut}"
        );
    }

    #[test]
    fn c6_the_result_says_what_to_do() {
        let draft = parse::<shell::Arguments>("shell", "").unwrap_err();
        let error = draft.error.unwrap();
        assert_eq!(error.r#type, "invalid_arguments");
        assert_eq!(
            error.possible_cause,
            "the arguments of `shell` have 1 problem: `command`: expected a string, not empty, got nothing"
        );
        assert_eq!(error.suggestion, "call `shell` again with every problem put right");
    }

    #[test]
    fn h3_a_thousand_problems_are_counted_and_the_first_are_named() {
        let many: serde_json::Map<String, Value> = (0..1000).map(|n| (format!("\"{n}"), json!(1))).collect();
        let draft = parse::<shell::Arguments>("shell", &Value::Object(many).to_string()).unwrap_err();
        let result = draft.short();
        assert!(
            result
                .summary
                .starts_with("the arguments of `shell` have 1001 problems: "),
            "{}",
            result.summary
        );
        assert!(!result.data["problems"].as_array().unwrap().is_empty());
        assert!(result.to_message().chars().count() <= crate::tool::result::CAP);
    }

    #[test]
    fn an_empty_text_is_an_empty_object_and_null_is_no_value() {
        assert_eq!(parse::<Optional>("x", " \n").unwrap(), Optional { depth: None });
        assert_eq!(
            parse::<Optional>("x", r#"{"depth": null}"#).unwrap(),
            Optional { depth: None }
        );
        assert_eq!(
            parse::<Optional>("x", r#"{"depth": 2}"#).unwrap(),
            Optional { depth: Some(2) }
        );
    }
}
