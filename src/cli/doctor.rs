//! `exuvia doctor`: what this host can enforce, each gap with what to do about it.
//!
//! Exit 0 when the default policy can be enforced, 1 when not. Looks and tries, changes nothing. The checks are in `checks`,
//! the host's sysctls in `sysctls`.

mod checks;
mod sysctls;

use serde::Serialize;

use super::{Context, Error, Exit};

#[derive(Debug, clap::Args)]
pub struct Args {}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Finding {
    name: &'static str,
    state: State,
    /// What was found.
    detail: String,
    /// What to do about it; empty where nothing is to be done.
    #[serde(skip_serializing_if = "String::is_empty")]
    remedy: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum State {
    Ok,
    /// Not there, and nothing by default needs it.
    Absent,
    /// The wall stands without it, but is thinner than it could be.
    Weak,
    /// The default policy cannot be enforced.
    Missing,
}

impl State {
    fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Absent => "-",
            Self::Weak => "weak",
            Self::Missing => "MISSING",
        }
    }
}

impl Finding {
    fn new(name: &'static str, state: State, detail: impl Into<String>, remedy: &str) -> Self {
        // Where all is well there is nothing to do.
        let remedy = if state == State::Ok {
            String::new()
        } else {
            remedy.to_owned()
        };
        Self {
            name,
            state,
            detail: detail.into(),
            remedy,
        }
    }
}

pub async fn run(_: Args, context: &Context) -> Result<Exit, Error> {
    let program = std::env::current_exe().ok();
    let mut findings = checks::host();
    findings.push(checks::sandbox(&context.data_dir, program).await);
    findings.extend(checks::others());
    findings.extend(sysctls::all());
    let able = enforces(&findings);
    let report = serde_json::json!({ "able": able, "findings": findings });
    context.finish(&report, &text(&findings, able));
    Ok(if able { Exit::Ok } else { Exit::Failed })
}

fn enforces(findings: &[Finding]) -> bool {
    findings.iter().all(|finding| finding.state != State::Missing)
}

fn text(findings: &[Finding], able: bool) -> String {
    let mut text = String::new();
    for finding in findings {
        text += &format!("{:8} {:28} {}\n", finding.state.word(), finding.name, finding.detail);
        if !finding.remedy.is_empty() {
            text += &format!("{:38}-> {}\n", "", finding.remedy);
        }
    }
    text += if able {
        "\nThe default policy can be enforced here.\n"
    } else {
        "\nThe default policy can NOT be enforced here: see MISSING.\n"
    };
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_missing_piece_is_enough() {
        let finding = |state| Finding::new("x", state, "found", "do this");
        assert!(enforces(&[
            finding(State::Ok),
            finding(State::Weak),
            finding(State::Absent)
        ]));
        assert!(!enforces(&[finding(State::Ok), finding(State::Missing)]));
        let shown = text(&[finding(State::Ok), finding(State::Missing)], false);
        assert_eq!(shown.matches("do this").count(), 1, "{shown}");
    }
}
