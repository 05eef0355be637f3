//! `exuvia policy`: check files, explain decisions, show what is in force.

mod propose;
mod reach;

use std::fmt::Write as _;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::{Context, Error, Exit};
use crate::error::Kind;
use crate::policy::quantity::{show_duration, show_size, show_usd};
use crate::policy::tools::{self, Tool};
use crate::policy::{self, Decision, Origin, Policies, Policy, Request};

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Check policy files, and report every problem of all of them.
    ///
    /// Exit code: 0 all are valid, 2 one is not valid or cannot be read, 6 there is no policy of that name.
    Check {
        /// Files (or names).
        #[arg(required = true, value_name = "FILE")]
        files: Vec<String>,
    },
    /// Say what a policy decides about a tool call or a connection, by which rule, and where that is written.
    #[command(group = clap::ArgGroup::new("what").required(true).args(["tool", "connect"]))]
    Explain {
        /// Name or file.
        policy: String,
        /// The tool, like `shell`.
        #[arg(long)]
        tool: Option<String>,
        /// A host that a program connects to. Default port: 443.
        #[arg(long, value_name = "HOST[:PORT]")]
        connect: Option<String>,
        /// A request to that host, like `GET /simple/`; without one: the connection.
        #[arg(long, value_name = "METHOD PATH", requires = "connect")]
        request: Option<String>,
        /// An argument of the call: NAME=VALUE, or the value alone for the tool's first one.
        #[arg(
            long = "arg",
            value_name = "[NAME=]VALUE",
            allow_hyphen_values = true,
            requires = "tool"
        )]
        arguments: Vec<String>,
    },
    /// Print the smallest network rules that would have served what a run or a sandbox wanted; most is seen with `mode = "learn"`.
    Propose {
        /// A run (`run_…`) or a sandbox (`sbx_…`).
        #[arg(value_name = "RUN|SANDBOX")]
        of: String,
    },
    /// Show a policy as it is in force, with what it inherits, and its hash.
    Show {
        /// Name or file.
        policy: String,
    },
    /// List the policies that have a name: built-in ones and those in the data directory.
    List,
    /// Print the JSON Schema of policy files.
    Schema,
}

/// Runs one sub-command.
///
/// # Errors
/// The call is wrong, or a policy cannot be had.
pub async fn run(args: Args, context: &Context) -> Result<Exit, Error> {
    let (exit, object, text) = match args.command {
        Command::Check { files } => check(&files, &context.data_dir),
        Command::Explain {
            policy,
            tool,
            connect,
            request,
            arguments,
        } => match (tool, connect) {
            (Some(tool), _) => explain(&policy, &tool, &arguments, &context.data_dir)?,
            (None, Some(host)) => reach::explain(&policy, &host, request.as_deref(), &context.data_dir)?,
            (None, None) => return Err(Error::new(Kind::Invalid, "give --tool or --connect")),
        },
        Command::Propose { of } => propose::propose_for(&of, context).await?,
        Command::Show { policy } => {
            let policy = Policies::load(&policy, &context.data_dir)?;
            (Exit::Ok, policy.snapshot(), show(&policy))
        }
        Command::List => list(&context.data_dir)?,
        Command::Schema => {
            let schema = policy::schema();
            let text = format!("{schema:#}");
            (Exit::Ok, schema, text)
        }
    };
    context.finish(&object, &text);
    Ok(exit)
}

type Answer = (Exit, Value, String);

fn check(files: &[String], data_dir: &Path) -> Answer {
    let (mut invalid, mut missing) = (false, false);
    let (mut objects, mut text) = (Vec::new(), String::new());
    for file in files {
        match Policies::load(file, data_dir) {
            Ok(policy) => {
                let _ = writeln!(text, "{file}: valid, policy {} {}", policy.name(), policy.hash());
                objects.push(json!({"file": file, "valid": true, "name": policy.name(), "hash": policy.hash()}));
            }
            Err(policy::Error::Invalid { violations, .. }) => {
                invalid = true;
                for violation in &violations {
                    let _ = writeln!(text, "{violation}");
                }
                let _ = writeln!(text, "{file}: not valid, {}", problems(violations.len()));
                objects.push(json!({"file": file, "valid": false, "violations": violations}));
            }
            Err(error) => {
                match error.kind() {
                    Kind::NotFound => missing = true,
                    _ => invalid = true,
                }
                let message = crate::error::chain(&error);
                let _ = match message.contains(file.as_str()) {
                    true => writeln!(text, "{message}"),
                    false => writeln!(text, "{file}: {message}"),
                };
                objects.push(json!({"file": file, "valid": false, "error": message}));
            }
        }
    }
    // As everywhere else that such a policy is named.
    let exit = match (invalid, missing) {
        (true, _) => Exit::Usage,
        (false, true) => Exit::Refused,
        (false, false) => Exit::Ok,
    };
    (exit, json!({"valid": !missing && !invalid, "files": objects}), text)
}

fn explain(policy: &str, tool: &str, written: &[String], data_dir: &Path) -> Result<Answer, Error> {
    let policy = Policies::load(policy, data_dir)?;
    let Some(tool) = Tool::named(tool) else {
        let known: Vec<&str> = tools::ALL.iter().map(|tool| tool.name).collect();
        return Err(Error::new(Kind::Invalid, format!("no tool `{tool}`")).hint(format!("tools: {}", known.join(", "))));
    };
    let arguments = arguments(tool, written)?;
    let request = Request {
        tool: tool.name,
        arguments: &arguments,
    };
    let Decision {
        verdict,
        rule,
        source,
        reason,
    } = policy::decide(&policy, &request);
    let text = format!(
        "verdict  {verdict}\nrule     {rule}\nwritten  {source}\nreason   {reason}\ncall     {} {arguments}\npolicy   {} {}",
        tool.name,
        policy.name(),
        policy.hash()
    );
    let object = json!({
        "policy": policy.name(), "hash": policy.hash(), "tool": tool.name, "arguments": arguments,
        "verdict": verdict, "rule": rule, "source": source, "reason": reason,
    });
    Ok((Exit::Ok, object, text))
}

/// `path=x` where the tool has a `path`; anything else is the tool's first argument.
fn arguments(tool: &Tool, written: &[String]) -> Result<Value, Error> {
    let first = tool.arguments.first().map(|argument| argument.name).unwrap_or_default();
    let mut arguments = Map::new();
    for text in written {
        let named = text.split_once('=').filter(|(name, _)| tool.argument(name).is_some());
        let (name, value) = named.unwrap_or((first, text));
        if arguments.insert(name.to_owned(), Value::from(value)).is_some() {
            return Err(Error::new(
                Kind::Invalid,
                format!("argument `{name}` of `{}` is given twice", tool.name),
            ));
        }
    }
    Ok(Value::Object(arguments))
}

fn show(policy: &Policy) -> String {
    let (limits, budgets) = (policy.limits(), policy.budgets());
    let backend = policy.backend().map_or("any".to_owned(), |backend| backend.to_string());
    let mut text = format!("policy     {}\n", policy.name());
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "{name:<10} {value}");
    };
    if let Some(description) = policy.description() {
        line("for", description.to_owned());
    }
    line("hash", policy.hash().to_owned());
    let chain: Vec<&str> = policy
        .layers()
        .iter()
        .rev()
        .map(|layer| layer.policy.as_str())
        .collect();
    if let [_, inherited @ ..] = chain.as_slice()
        && !inherited.is_empty()
    {
        line("extends", inherited.join(", which extends "));
    }
    line(
        "sandbox",
        format!(
            "isolation {}, backend {backend}, image {}, seccomp {}, network {}",
            policy.isolation(),
            policy.image(),
            policy.seccomp(),
            policy.network().mode()
        ),
    );
    line(
        "limits",
        format!(
            "cpus {}, memory {}, swap {}, pids {}, open files {}, /tmp {}, /dev/shm {}, {} files in each, file size {}, \
             wall time {}",
            limits.cpus,
            show_size(limits.memory_bytes),
            show_size(limits.swap_bytes),
            limits.pids,
            limits.open_files,
            show_size(limits.tmp_bytes),
            show_size(limits.shm_bytes),
            limits.tmp_inodes,
            show_size(limits.file_bytes),
            show_duration(limits.wall_time)
        ),
    );
    let disk = limits.disk.map_or("no limit".to_owned(), |quota| {
        format!("{}, {} files", show_size(quota.bytes), quota.inodes)
    });
    let kind = limits.disk_kind.map_or("any".to_owned(), |kind| kind.to_string());
    let rate =
        |what: &str, rate: Option<u64>| rate.map_or(String::new(), |rate| format!(", {what} {}/s", show_size(rate)));
    let (read, write) = (limits.disk_rates.read, limits.disk_rates.write);
    line(
        "disk",
        format!("{disk}, kind {kind}{}{}", rate("reads", read), rate("writes", write)),
    );
    let count = |n: Option<u64>| n.map_or("no limit".to_owned(), |n| n.to_string());
    line(
        "budgets",
        format!(
            "steps {}, model calls {}, tokens {}, cost {}, one step {}, in all {}, side by side {}",
            count(budgets.steps.map(u64::from)),
            count(budgets.model_calls.map(u64::from)),
            count(budgets.tokens),
            budgets.cost_micros.map_or("no limit".to_owned(), show_usd),
            show_duration(budgets.step_time),
            show_duration(budgets.total_time),
            budgets.parallel_tools
        ),
    );
    line(
        "approvals",
        format!("open for {}", show_duration(policy.approvals_expire())),
    );
    for mount in policy.mounts() {
        line(
            "mount",
            format!("{} at {}, read-only", mount.source.display(), mount.target.display()),
        );
    }
    for (name, value) in reach::shown(policy) {
        line(name, value);
    }
    for layer in policy.layers() {
        if let Some(default) = layer.default {
            line("default", format!("{default}  ({})", layer.default_source));
        }
        for rule in &layer.rules {
            let matchers: Vec<String> = rule
                .matchers
                .iter()
                .map(|matcher| format!("\n{:16}{} = {}", "", matcher.key(), matcher.text()))
                .collect();
            let (verdict, tools) = (rule.verdict.to_string(), rule.tools.names().join(", "));
            let head = format!("{verdict:<5} {} on {tools}  ({})", rule.name, rule.source);
            line("rule", head + &matchers.concat());
        }
    }
    text
}

fn problems(count: usize) -> String {
    match count {
        1 => "1 problem".to_owned(),
        more => format!("{more} problems"),
    }
}

fn list(data_dir: &Path) -> Result<Answer, Error> {
    let (mut objects, mut text) = (Vec::new(), String::new());
    for listed in Policies::list(data_dir)? {
        let (origin, loaded) = match &listed.origin {
            Origin::BuiltIn => ("built-in".to_owned(), Policies::named(&listed.name, data_dir)),
            Origin::File(path) => (path.display().to_string(), Policies::named(&listed.name, data_dir)),
        };
        let (hash, about) = match &loaded {
            Ok(policy) => (Some(policy.hash()), policy.description().unwrap_or_default().to_owned()),
            Err(policy::Error::Invalid { violations, .. }) => {
                (None, format!("not valid: {}", problems(violations.len())))
            }
            Err(error) => (None, crate::error::chain(error)),
        };
        let _ = writeln!(text, "{:<16} {origin}: {about}", listed.name);
        objects.push(
            json!({"name": listed.name, "origin": origin, "valid": hash.is_some(), "hash": hash, "about": about}),
        );
    }
    Ok((Exit::Ok, json!({"policies": objects}), text))
}

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
