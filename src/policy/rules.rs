//! One rule, and which calls it matches.

use std::collections::BTreeSet;

use regex::{Regex, RegexBuilder};
use serde_json::Value;

use super::tools::{Argument, Tool, WORKSPACE};
use super::violation::suggestion;
use super::{Outside, Verdict};

/// Longer patterns are refused.
const MAX_PATTERN: usize = 1000;
/// A pattern may not compile to more, nor its matcher cache more.
const MAX_COMPILED: usize = 256 << 10;
/// Longer arguments are not searched: rules that allow do not match them, rules that ask or deny do.
const MAX_SEARCHED: usize = 1 << 20;

/// The rules of one policy file.
#[derive(Debug, Clone, PartialEq)]
pub struct Layer {
    /// The policy that wrote them.
    pub policy: String,
    /// For calls that none of them matches. `None`: the layers below decide alone.
    pub default: Option<Verdict>,
    /// Where that is written.
    pub default_source: String,
    /// As written; the order means nothing.
    pub rules: Vec<Rule>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Rule {
    pub name: String,
    pub tools: Tools,
    pub verdict: Verdict,
    /// What such a call can do outside the sandbox.
    pub effect: Option<Outside>,
    pub reason: Option<String>,
    /// All of them must fit. By key.
    pub matchers: Vec<Matcher>,
    /// `policies/strict.toml:12`.
    pub source: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tools {
    /// Written `*`.
    All,
    These(BTreeSet<&'static str>),
}

/// One condition on the arguments of a call.
#[derive(Debug, Clone)]
pub enum Matcher {
    /// The whole of an argument fits a pattern.
    Argument { name: &'static str, pattern: Regex },
    /// `path` is this directory or below, by name: `..` is resolved, links are not (the sandbox does that).
    PathWithin(String),
}

impl PartialEq for Matcher {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key() && self.text() == other.text()
    }
}

/// What a matcher says to a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fit {
    Yes,
    No,
    /// It cannot be told.
    Unknown,
}

impl Tools {
    pub fn include(&self, tool: &Tool) -> bool {
        match self {
            Self::All => true,
            Self::These(names) => names.contains(tool.name),
        }
    }

    /// Reads names as written.
    ///
    /// # Errors
    /// What is wrong with each wrong name, by its index.
    pub(super) fn parse<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<Self, Vec<(usize, String)>> {
        let (mut these, mut all, mut wrong) = (BTreeSet::new(), false, Vec::new());
        for (n, name) in names.into_iter().enumerate() {
            match Tool::named(name) {
                Some(tool) => {
                    these.insert(tool.name);
                }
                None if name == "*" => all = true,
                None => wrong.push((n, format!("no tool `{name}`; {}", suggestion(name, &tool_names())))),
            }
        }
        match (wrong.is_empty(), all) {
            (false, _) => Err(wrong),
            (true, true) => Ok(Self::All),
            (true, false) => Ok(Self::These(these)),
        }
    }

    /// As written, sorted.
    pub fn names(&self) -> Vec<&'static str> {
        match self {
            Self::All => vec!["*"],
            Self::These(names) => names.iter().copied().collect(),
        }
    }
}

pub(super) fn tool_names() -> Vec<&'static str> {
    super::tools::ALL.iter().map(|tool| tool.name).collect()
}

impl Matcher {
    /// Reads one entry of `match`, for a rule on `tools`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(super) fn parse(key: &str, text: &str, tools: &Tools) -> Result<Self, String> {
        let is_within = key == "path_within";
        let wanted = if is_within { "path" } else { key };
        let concerned = super::tools::ALL.iter().filter(|tool| tools.include(tool));
        let mut argument: Option<&'static Argument> = None;
        for tool in concerned {
            match (tool.argument(wanted), tools) {
                (Some(found), _) => argument = Some(found),
                (None, Tools::All) => {}
                (None, Tools::These(_)) => {
                    let mut known: Vec<&str> = tool.arguments.iter().map(|argument| argument.name).collect();
                    if known.contains(&"path") {
                        known.push("path_within");
                    }
                    return Err(format!(
                        "tool `{}` has no `{wanted}`; {}",
                        tool.name,
                        suggestion(key, &known)
                    ));
                }
            }
        }
        let Some(argument) = argument else {
            return Err(format!("no tool has an argument `{wanted}`"));
        };
        if is_within {
            return directory(text).map(Self::PathWithin);
        }
        let pattern = whole(text)?;
        Ok(Self::Argument {
            name: argument.name,
            pattern,
        })
    }

    /// `command`, `path_within`: as written.
    pub fn key(&self) -> &str {
        match self {
            Self::Argument { name, .. } => name,
            Self::PathWithin(_) => "path_within",
        }
    }

    /// The pattern or directory: as written.
    pub fn text(&self) -> &str {
        match self {
            Self::Argument { pattern, .. } => pattern
                .as_str()
                .strip_prefix(WHOLE.0)
                .and_then(|rest| rest.strip_suffix(WHOLE.1))
                .expect("`whole` made it"),
            Self::PathWithin(directory) => directory,
        }
    }

    /// For people: `` `command` is `git status` ``.
    pub(super) fn describe(&self) -> String {
        match self {
            Self::Argument { name, .. } => format!("`{name}` fits `{}`", self.text()),
            Self::PathWithin(directory) => format!("`path` is within `{directory}`"),
        }
    }

    fn fit(&self, tool: &Tool, arguments: &Value) -> Fit {
        let name = match self {
            Self::Argument { name, .. } => name,
            Self::PathWithin(_) => "path",
        };
        let Some(argument) = tool.argument(name) else {
            return Fit::No;
        };
        let text = match (arguments.get(name), argument.default) {
            (Some(Value::String(text)), _) => text.clone(),
            (None | Some(Value::Null), Some(default)) => default.to_owned(),
            (None | Some(Value::Null), None) => return Fit::No,
            // Not what the tool takes. Its JSON text is searched, and a path it is not.
            (Some(other), _) => match self {
                Self::Argument { .. } => other.to_string(),
                Self::PathWithin(_) => return Fit::Unknown,
            },
        };
        if text.len() > MAX_SEARCHED {
            return Fit::Unknown;
        }
        let fits = match self {
            Self::Argument { pattern, .. } => pattern.is_match(&text),
            Self::PathWithin(_) if text.contains('\0') => return Fit::Unknown,
            Self::PathWithin(directory) => is_within(&normalise(&text), directory),
        };
        if fits { Fit::Yes } else { Fit::No }
    }
}

impl Rule {
    /// Whether it speaks about this call. What cannot be told counts against the call: see `MAX_SEARCHED`.
    pub(super) fn matches(&self, tool: &Tool, arguments: &Value) -> bool {
        let unknown_fits = match self.verdict {
            Verdict::Allow => false,
            Verdict::Ask | Verdict::Deny => true,
        };
        self.fits(tool, arguments, unknown_fits)
    }

    /// Whether such a call may do outside what the rule says; for what cannot be told, that it may.
    pub(super) fn reaches(&self, tool: &Tool, arguments: &Value) -> bool {
        self.effect.is_some() && self.fits(tool, arguments, true)
    }

    fn fits(&self, tool: &Tool, arguments: &Value, unknown_fits: bool) -> bool {
        self.tools.include(tool)
            && self.matchers.iter().all(|matcher| match matcher.fit(tool, arguments) {
                Fit::Yes => true,
                Fit::No => false,
                Fit::Unknown => unknown_fits,
            })
    }
}

const WHOLE: (&str, &str) = (r"\A(?s:", r")\z");

/// A pattern that must fit all of a text; within it `.` stands for line breaks too.
fn whole(text: &str) -> Result<Regex, String> {
    if text.len() > MAX_PATTERN {
        return Err(format!(
            "the pattern has {} bytes, at most {MAX_PATTERN} are allowed",
            text.len()
        ));
    }
    // Alone first: `a)|(b` is a pattern only inside brackets.
    let build = |pattern: &str| {
        RegexBuilder::new(pattern)
            .size_limit(MAX_COMPILED)
            .dfa_size_limit(MAX_COMPILED)
            .nest_limit(50)
            .build()
    };
    let wrapped = format!("{}{text}{}", WHOLE.0, WHOLE.1);
    build(text).and_then(|_| build(&wrapped)).map_err(|error| match error {
        regex::Error::CompiledTooBig(limit) => {
            format!("the pattern compiles to more than {limit} bytes: use smaller repetitions")
        }
        error => {
            let text = error.to_string();
            let last = text.lines().last().unwrap_or_default();
            format!("not a regular expression: {}", last.trim_start_matches("error: "))
        }
    })
}

/// An absolute directory with nothing to resolve in it.
pub(super) fn directory(text: &str) -> Result<String, String> {
    if !text.starts_with('/') || text.contains('\0') {
        return Err(format!("`{text}` is not an absolute path"));
    }
    let normal = normalise(text);
    if text != "/" && normal != text.trim_end_matches('/') {
        return Err(format!("`{text}` is not in its shortest form: write `{normal}`"));
    }
    Ok(normal)
}

/// The absolute path that `text` names by its letters alone, from the workspace; `..` at the root stays there, as in POSIX.
pub(super) fn normalise(text: &str) -> String {
    let absolute = if text.starts_with('/') {
        text.to_owned()
    } else {
        format!("{WORKSPACE}/{text}")
    };
    let mut parts: Vec<&str> = Vec::new();
    for part in absolute.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            name => parts.push(name),
        }
    }
    format!("/{}", parts.join("/"))
}

/// Whether the normal path `path` is `directory` or below it.
pub(super) fn is_within(path: &str, directory: &str) -> bool {
    match path.strip_prefix(directory.trim_end_matches('/')) {
        Some(rest) => rest.is_empty() || rest.starts_with('/'),
        None => false,
    }
}
