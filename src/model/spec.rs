//! The one-line name of a model, as flags, task files and outputs write it.
//!
//! `scripted:FILE`, `openai:MODEL` or `openai:MODEL@BASE_URL`. A base URL begins at the last `@http://` or `@https://`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use super::openai;

/// Which model to ask, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelSpec {
    /// Answers from a JSONL file.
    Scripted { path: PathBuf },
    /// An OpenAI-compatible Chat Completions endpoint.
    OpenAi { model: String, base_url: Option<String> },
}

/// Text that names no model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` names no model: {reason}")]
pub struct Invalid {
    text: String,
    reason: String,
}

impl ModelSpec {
    /// The reference of the key to use when the task names none, for the credential resolver.
    ///
    /// `EXUVIA_MODEL_KEY` serves any endpoint. `OPENAI_API_KEY` goes to the default endpoint alone: who names another
    /// host has not said that this host may have that key.
    pub fn default_key(&self, is_set: impl Fn(&str) -> bool) -> Option<&'static str> {
        match self {
            Self::Scripted { .. } => None,
            Self::OpenAi { .. } if is_set("EXUVIA_MODEL_KEY") => Some("env:EXUVIA_MODEL_KEY"),
            Self::OpenAi { base_url: None, .. } if is_set("OPENAI_API_KEY") => Some("env:OPENAI_API_KEY"),
            Self::OpenAi { .. } => None,
        }
    }
}

impl FromStr for ModelSpec {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let invalid = |reason: &str| Invalid {
            text: text.to_owned(),
            reason: reason.to_owned(),
        };
        let (provider, rest) = text
            .split_once(':')
            .ok_or_else(|| invalid("write `scripted:FILE`, `openai:MODEL` or `openai:MODEL@BASE_URL`"))?;
        match provider {
            "scripted" if rest.is_empty() => Err(invalid("the file is missing")),
            "scripted" => Ok(Self::Scripted { path: rest.into() }),
            "openai" => openai_spec(rest).map_err(|reason| invalid(&reason)),
            other => Err(invalid(&format!(
                "there is no provider `{other}`, only `scripted` and `openai`"
            ))),
        }
    }
}

fn openai_spec(rest: &str) -> Result<ModelSpec, String> {
    let at = rest.rfind("@http://").max(rest.rfind("@https://"));
    let (model, base_url) = match at {
        Some(at) => (&rest[..at], Some(&rest[at + 1..])),
        None => (rest, None),
    };
    if model.is_empty() || model.chars().any(char::is_whitespace) {
        return Err("the model's name is missing or holds white space".to_owned());
    }
    if base_url.is_none() && model.contains('@') {
        return Err("a base URL begins with `http://` or `https://`".to_owned());
    }
    if let Some(url) = base_url {
        openai::check_base_url(url)?;
    }
    Ok(ModelSpec::OpenAi {
        model: model.to_owned(),
        base_url: base_url.map(|url| url.trim_end_matches('/').to_owned()),
    })
}

impl fmt::Display for ModelSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Scripted { path } => write!(f, "scripted:{}", path.display()),
            Self::OpenAi { model, base_url: None } => write!(f, "openai:{model}"),
            Self::OpenAi {
                model,
                base_url: Some(url),
            } => write!(f, "openai:{model}@{url}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn openai(model: &str, base_url: Option<&str>) -> ModelSpec {
        ModelSpec::OpenAi {
            model: model.to_owned(),
            base_url: base_url.map(str::to_owned),
        }
    }

    #[test]
    fn specs_parse_and_print_one_way() {
        for (text, spec) in [
            (
                "scripted:a b/c:d.jsonl",
                ModelSpec::Scripted {
                    path: "a b/c:d.jsonl".into(),
                },
            ),
            ("openai:gpt-x", openai("gpt-x", None)),
            (
                "openai:llama3:8b@http://[::1]:80/v1",
                openai("llama3:8b", Some("http://[::1]:80/v1")),
            ),
            ("openai:m@v2@https://h/v1", openai("m@v2", Some("https://h/v1"))),
        ] {
            assert_eq!(text.parse(), Ok(spec.clone()));
            assert_eq!(spec.to_string(), text);
        }
        assert_eq!("openai:m@https://h/v1//".parse(), Ok(openai("m", Some("https://h/v1"))));
    }

    #[test]
    fn what_names_no_model_is_refused_with_a_reason() {
        for text in [
            "gpt-x",
            "scripted:",
            "openai:",
            "openai:@http://h",
            "openai:a b",
            "anthropic:x",
            // Would else send the conversation to the default endpoint.
            "openai:m@localhost:8000/v1",
            "openai:m@https://user:pass@h/v1",
            "openai:m@https://h/v1?key=x",
            "openai:m@http://",
        ] {
            assert!(text.parse::<ModelSpec>().is_err(), "{text}");
        }
        assert_eq!(
            "openai:m@localhost/v1".parse::<ModelSpec>().unwrap_err().to_string(),
            "`openai:m@localhost/v1` names no model: a base URL begins with `http://` or `https://`"
        );
    }

    #[test]
    fn the_vendors_key_goes_to_the_vendor_alone() {
        let own = |name: &str| name == "EXUVIA_MODEL_KEY";
        let vendor = |name: &str| name == "OPENAI_API_KEY";
        let elsewhere = openai("m", Some("http://h"));
        assert_eq!(openai("m", None).default_key(vendor), Some("env:OPENAI_API_KEY"));
        assert_eq!(elsewhere.default_key(vendor), None);
        assert_eq!(elsewhere.default_key(own), Some("env:EXUVIA_MODEL_KEY"));
        assert_eq!(openai("m", None).default_key(|_| true), Some("env:EXUVIA_MODEL_KEY"));
        assert_eq!(openai("m", None).default_key(|_| false), None);
    }
}
