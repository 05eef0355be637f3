//! Progress of a run on stderr: a spinner on a terminal, plain lines elsewhere.

use std::collections::HashMap;
use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use super::report::{clean, result};
use crate::api::{convert, proto};

/// One changing line, where stderr is a terminal.
pub(super) fn spinner() -> Option<ProgressBar> {
    std::io::stderr().is_terminal().then(|| {
        let bar = ProgressBar::new_spinner();
        bar.set_style(ProgressStyle::with_template("{spinner} {elapsed} {wide_msg}").expect("a fixed template"));
        bar.enable_steady_tick(Duration::from_millis(120));
        bar
    })
}

/// Shows events as they come.
#[derive(Debug)]
pub struct Progress {
    spinner: Option<ProgressBar>,
    tools: HashMap<u32, String>,
}

impl Progress {
    pub fn new() -> Self {
        Self {
            spinner: spinner(),
            tools: HashMap::new(),
        }
    }

    /// One event, as one line at most.
    pub fn event(&mut self, event: &proto::Event) {
        use proto::event::Kind;
        let line = match &event.kind {
            Some(Kind::ModelReplied(reply)) => {
                self.tools
                    .extend(reply.calls.iter().map(|call| (call.step, call.tool.clone())));
                let calls: Vec<&str> = reply.calls.iter().map(|call| call.tool.as_str()).collect();
                Some(format!(
                    "step {}: the model answered; calls: {}",
                    reply.step,
                    or_dash(&calls.join(", "))
                ))
            }
            Some(Kind::ModelFailed(failed)) => {
                let why = failed.fault.as_ref().map_or("", |fault| &fault.message);
                Some(format!(
                    "step {}: model call {} failed: {why}",
                    failed.step, failed.attempt
                ))
            }
            Some(Kind::ToolFinished(done)) => Some(line(done, self.tool(done.step))),
            Some(Kind::ToolRefused(refused)) => Some(format!(
                "step {}: {} refused by rule `{}`",
                refused.step,
                self.tool(refused.step),
                refused.rule
            )),
            Some(Kind::ApprovalRequested(ask)) => Some(format!(
                "step {}: {} waits for approval (rule `{}`)",
                ask.step,
                self.tool(ask.step),
                ask.rule
            )),
            Some(Kind::ToolLost(lost) | Kind::CheckLost(lost)) => {
                let why = lost.fault.as_ref().map_or("", |fault| &fault.message);
                let next = match (lost.retry, &lost.retry_in) {
                    (false, _) => String::new(),
                    (true, Some(wait)) if wait.seconds > 0 => format!("; again in {} s", wait.seconds),
                    (true, _) => "; again".to_owned(),
                };
                Some(format!("step {}: sandbox lost: {why}{next}", lost.step))
            }
            Some(Kind::CheckFinished(done)) => Some(format!(
                "completion check {}",
                if done.passed { "passed" } else { "failed" }
            )),
            Some(Kind::Withheld(withheld)) => {
                let what: Vec<&str> = withheld
                    .mismatches
                    .iter()
                    .map(|mismatch| mismatch.what.as_str())
                    .collect();
                Some(format!(
                    "withheld: {} changed since; see `exuvia task resume --accept`",
                    what.join(", ")
                ))
            }
            Some(Kind::Ended(_)) => Some(convert::state_name(event.state()).to_owned()),
            _ => None,
        };
        let line = line.map(|line| clean(&line).replace('\n', " "));
        match (&self.spinner, line) {
            (Some(spinner), Some(line)) => spinner.set_message(line),
            (Some(spinner), None) => spinner.set_message(convert::state_name(event.state())),
            (None, Some(line)) => err!("{line}"),
            (None, None) => {}
        }
    }

    /// Takes the spinner off the screen.
    pub fn done(&self) {
        if let Some(spinner) = &self.spinner {
            spinner.finish_and_clear();
        }
    }

    fn tool(&self, step: u32) -> &str {
        self.tools.get(&step).map_or("call", String::as_str)
    }
}

fn line(done: &proto::ToolFinished, tool: &str) -> String {
    let (status, summary) = result(done.result.as_ref());
    match status.as_str() {
        "ok" | "truncated" => format!("step {}: {tool} done", done.step),
        _ => format!("step {}: {tool} failed: {summary}", done.step),
    }
}

fn or_dash(text: &str) -> &str {
    if text.is_empty() { "-" } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tool_that_failed_is_not_called_done() {
        let finished = |status: &str, summary: &str| {
            let text = |text: &str| prost_types::Value {
                kind: Some(prost_types::value::Kind::StringValue(text.to_owned())),
            };
            let result = prost_types::Struct {
                fields: [
                    ("status".to_owned(), text(status)),
                    ("summary".to_owned(), text(summary)),
                ]
                .into(),
            };
            let done = proto::ToolFinished {
                step: 2,
                result: Some(result),
                ..Default::default()
            };
            line(&done, "shell")
        };
        assert_eq!(finished("ok", "exit code 0"), "step 2: shell done");
        assert_eq!(finished("truncated", "long"), "step 2: shell done");
        assert_eq!(finished("error", "exit code 1"), "step 2: shell failed: exit code 1");
    }
}
