//! The policy layer as a whole: files in, decisions out.

mod decisions;
mod files;
mod network;
mod properties;
mod snapshots;

use std::path::Path;

use serde_json::{Value, json};

use super::*;

const HEAD: &str = "format_version = 1\nname = \"t\"\n";

fn parse(text: &str, parent: Option<&Policy>) -> Result<Policy, Vec<Violation>> {
    Document::parse("t.toml", text).and_then(|document| check(&document, parent, &Presets::default()))
}

fn policy(body: &str) -> Policy {
    parse(&format!("{HEAD}{body}"), None).unwrap_or_else(|violations| panic!("{}", violation::lines(&violations)))
}

fn child(body: &str, parent: &Policy) -> Result<Policy, Vec<String>> {
    let text = format!("format_version = 1\nname = \"child\"\nextends = \"t\"\n{body}");
    parse(&text, Some(parent)).map_err(|violations| violations.iter().map(Violation::to_string).collect())
}

fn verdict(policy: &Policy, tool: &str, arguments: Value) -> (Verdict, String) {
    let decision = decide(
        policy,
        &Request {
            tool,
            arguments: &arguments,
        },
    );
    (decision.verdict, decision.rule)
}

fn built_in(name: &str) -> Policy {
    Policies::named(name, Path::new("/nonexistent")).unwrap()
}
