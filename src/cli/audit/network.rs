//! `exuvia audit network`: the decisions at the border of one run or sandbox, a line each.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde_json::{Value, json};

use super::{known, open, printable};
use crate::audit::Sealed;
use crate::audit::query::{self, Filter, Found};
use crate::border::{DECIDED, UNCOUNTED};
use crate::cli::{Context, Error, Exit};
use crate::error::Kind;
use crate::policy::quantity::show_size;
use crate::store::sqlite::Sqlite;

#[derive(Debug, clap::Args)]
pub(super) struct Network {
    /// A run (`run_…`) or a sandbox (`sbx_…`).
    #[arg(value_name = "RUN|SANDBOX")]
    of: String,
    /// What was refused or cut alone.
    #[arg(long)]
    denied: bool,
    /// Name lookups, too, of what was allowed.
    #[arg(long)]
    names: bool,
    /// At most so many, the newest.
    #[arg(long, default_value_t = 10_000)]
    limit: usize,
}

pub(super) async fn network(args: Network, context: &Context) -> Result<Exit, Error> {
    let (store, found) = decided(&args.of, args.limit, context).await?;
    let uncounted = Filter {
        action: Some(UNCOUNTED.to_owned()),
        ..Filter::default()
    };
    let uncounted = query::find(&store, &uncounted, 1).await?;
    let shown = found.entries.iter().filter(|entry| {
        let outcome = entry.record.outcome.as_str();
        let is_denied = outcome == "denied" || outcome == "cut";
        let is_name = entry.record.details["channel"] == "dns";
        (is_denied || !args.denied) && (is_denied || !is_name || args.names)
    });
    let shown: Vec<&Sealed> = shown.collect();
    let summary = summary(&found.entries);
    let mut text: String = shown.iter().map(|entry| line(entry)).collect();
    text += &summary.text();
    if found.left_out > 0 {
        let _infallible = writeln!(text, "({} older decisions left out: raise --limit)", found.left_out);
    }
    if !uncounted.entries.is_empty() {
        text += "(at times the server recorded refusals as a count alone: `exuvia audit query --action network.uncounted`)\n";
    }
    let object = json!({ "decisions": shown, "summary": summary.object(), "left_out": found.left_out,
        "uncounted": !uncounted.entries.is_empty() });
    context.finish(&object, &text);
    Ok(Exit::Ok)
}

/// The decisions at the border of a run or a sandbox, the newest `limit`, and the store that has them.
pub(in crate::cli) async fn decided(of: &str, limit: usize, context: &Context) -> Result<(Sqlite, Found), Error> {
    let is = |prefix: &str| of.starts_with(prefix).then(|| of.to_owned());
    let filter = Filter {
        run: is("run_"),
        sandbox: is("sbx_"),
        action: Some(DECIDED.to_owned()),
        ..Filter::default()
    };
    if filter.run.is_none() && filter.sandbox.is_none() {
        let message = format!("`{}` is no run and no sandbox", crate::ids::shown(of));
        return Err(Error::new(Kind::Invalid, message).hint("ids begin with `run_` or `sbx_`"));
    }
    let store = open(context)?;
    let found = query::find(&store, &filter, limit).await?;
    if found.entries.is_empty() {
        known(&store, &filter).await?;
    }
    Ok((store, found))
}

/// Time, step, outcome, what was wanted, rule, and what else there is to say.
fn line(entry: &Sealed) -> String {
    let details = &entry.record.details;
    let word = |name: &str| details[name].as_str().unwrap_or_default().to_owned();
    let number = |name: &str| details[name].as_u64().unwrap_or_default();
    let steps: Vec<String> = details["steps"]
        .as_array()
        .into_iter()
        .flatten()
        .map(Value::to_string)
        .collect();
    let step = match steps.as_slice() {
        [] => "-".to_owned(),
        steps => steps.join("+"),
    };
    let mut what = match word("channel").as_str() {
        "dns" => format!("dns {} {}", word("method"), word("host")),
        channel => format!("{channel} {}:{}", word("host"), number("port")),
    };
    if word("channel") != "dns" && !word("method").is_empty() {
        let _infallible = write!(what, " {} {}", word("method"), word("path"));
    }
    let mut more = vec![format!("rule {}", word("rule"))];
    if let Some(address) = details["address"].as_str() {
        more.push(format!("at {address}"));
    }
    if let Some(status) = details["status"].as_u64() {
        more.push(format!("status {status}"));
    }
    let (up, down) = (number("bytes_up"), number("bytes_down"));
    if up + down > 0 {
        more.push(format!("up {} down {}", show_size(up), show_size(down)));
    }
    if let Some(credential) = details["credential"].as_str() {
        more.push(format!("credential {credential}"));
    }
    if !word("reason").is_empty() {
        more.push(word("reason"));
    }
    let line = format!(
        "{} step {step} {} {what}  ({})",
        entry.record.at,
        entry.record.outcome,
        more.join(", ")
    );
    format!("{}\n", printable(&line))
}

/// All of it in numbers.
#[derive(Debug, Default)]
struct Summary {
    outcomes: BTreeMap<String, u64>,
    /// Refusals by rule and host.
    refused: BTreeMap<(String, String), u64>,
    up: u64,
    down: u64,
}

fn summary(entries: &[Sealed]) -> Summary {
    let mut summary = Summary::default();
    for Sealed { record, .. } in entries {
        let number = |name: &str| record.details[name].as_u64().unwrap_or_default();
        let word = |name: &str| record.details[name].as_str().unwrap_or_default().to_owned();
        *summary.outcomes.entry(record.outcome.clone()).or_default() += 1;
        summary.up += number("bytes_up");
        summary.down += number("bytes_down");
        if record.outcome == "denied" || record.outcome == "cut" {
            *summary.refused.entry((word("rule"), word("host"))).or_default() += 1;
        }
    }
    summary
}

impl Summary {
    fn text(&self) -> String {
        if self.outcomes.is_empty() {
            return "nothing was wanted of the network\n".to_owned();
        }
        let outcomes: Vec<String> = self
            .outcomes
            .iter()
            .map(|(outcome, n)| format!("{n} {outcome}"))
            .collect();
        let mut text = format!(
            "in all: {}, up {}, down {}\n",
            outcomes.join(", "),
            show_size(self.up),
            show_size(self.down)
        );
        for ((rule, host), n) in &self.refused {
            let _infallible = writeln!(text, "refused {n} x {} by {rule}", printable(host));
        }
        text
    }

    fn object(&self) -> Value {
        let refused = self.refused.iter();
        let refused = refused.map(|((rule, host), n)| json!({ "rule": rule, "host": host, "times": n }));
        json!({ "outcomes": self.outcomes, "bytes_up": self.up, "bytes_down": self.down,
            "refused": refused.collect::<Vec<_>>() })
    }
}
