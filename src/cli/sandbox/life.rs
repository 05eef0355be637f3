//! `create`, `get`, `list`, `renew`, `pause`, `resume`, `snapshot`, `kill`: the sandbox as a whole.

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use super::{plan, show};
use crate::api::{json as proto_json, proto};
use crate::cli::{Context, Error, Exit, remote, task};
use crate::clock::{self, Clock};
use crate::error::Kind;

#[derive(Debug, clap::Args)]
pub(super) struct Create {
    /// Name of a policy that the server knows [default: default].
    #[arg(long, default_value = "", hide_default_value = true, value_name = "NAME")]
    policy: String,
    /// `host`, `image:NAME` (or its NAME alone) or `docker:NAME` [default: the policy's].
    #[arg(long, default_value = "", hide_default_value = true, value_name = "IMG")]
    image: String,
    /// `oci` or `docker` [default: the policy's].
    #[arg(long, default_value = "", hide_default_value = true)]
    backend: String,
    /// Set a variable for every command; may be repeated.
    #[arg(long, value_name = "NAME=VALUE", value_parser = plan::variable)]
    env: Vec<(String, String)>,
    /// Label; may be repeated.
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = plan::variable)]
    labels: Vec<(String, String)>,
    /// End it after this long: `1h` [default: the policy's `wall_time`, which is also the most].
    #[arg(long, value_name = "TIME", value_parser = crate::cli::duration)]
    ttl: Option<Duration>,
    /// End it after this long without a command, a file call or a connection [default: never].
    #[arg(long, value_name = "TIME", value_parser = crate::cli::duration)]
    idle: Option<Duration>,
    /// Files to begin with: a directory here, or a tree that the server has (from `snapshot`) [default: none].
    #[arg(long, value_name = "DIR|TREE")]
    workspace: Option<String>,
    /// Modification times that belong to the tree (from `snapshot`).
    #[arg(
        long,
        default_value = "",
        hide_default_value = true,
        requires = "workspace",
        value_name = "ID"
    )]
    times: String,
    /// Processes to begin with (from `snapshot --memory`).
    #[arg(long, conflicts_with = "workspace", value_name = "ID")]
    snapshot: Option<String>,
    /// Wait this long for a free place when the server is full [default: do not wait].
    #[arg(long, value_name = "TIME", value_parser = crate::cli::duration)]
    queue: Option<Duration>,
    /// The same key and the same request give the same sandbox again.
    #[arg(long, default_value = "", hide_default_value = true, value_name = "KEY")]
    key: String,
}

#[derive(Debug, clap::Args)]
pub(super) struct One {
    /// The sandbox (`sbx_…`).
    id: String,
}

#[derive(Debug, clap::Args)]
pub(super) struct List {
    /// Only those in this state; may be repeated: running, paused, ended, … [default: all but ended].
    #[arg(long = "state", value_name = "STATE", value_parser = state)]
    states: Vec<proto::SandboxState>,
    /// Those that have ended too.
    #[arg(long, short, conflicts_with = "states")]
    all: bool,
    /// Only those with this label; may be repeated.
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = plan::variable)]
    labels: Vec<(String, String)>,
    /// Print ids alone.
    #[arg(long, short)]
    quiet: bool,
    #[arg(long, default_value_t = 50)]
    limit: u32,
    #[arg(long, default_value = "", hide_default_value = true, value_name = "TOKEN")]
    page_token: String,
}

#[derive(Debug, clap::Args)]
pub(super) struct Renew {
    /// The sandbox (`sbx_…`).
    id: String,
    /// From now: `1h`; at most what is left of the policy's `wall_time`, which counts from `create`.
    #[arg(long, value_name = "TIME", value_parser = crate::cli::duration)]
    ttl: Duration,
}

#[derive(Debug, clap::Args)]
pub(super) struct Snapshot {
    /// The sandbox (`sbx_…`).
    id: String,
    /// Keep its processes too, where the backend can.
    #[arg(long)]
    memory: bool,
}

#[derive(Debug, clap::Args)]
pub(super) struct Kill {
    /// The sandboxes (`sbx_…`).
    #[arg(required = true)]
    ids: Vec<String>,
    /// Why, for the record.
    #[arg(long, default_value = "", hide_default_value = true, value_name = "TEXT")]
    reason: String,
}

fn state(text: &str) -> Result<proto::SandboxState, String> {
    match proto::SandboxState::from_str_name(&format!("SANDBOX_STATE_{}", text.to_uppercase())) {
        Some(proto::SandboxState::Unspecified) | None => {
            Err("states are creating, running, paused, ending, ended".to_owned())
        }
        Some(state) => Ok(state),
    }
}

/// A duration of a message.
pub(super) fn span(duration: Duration) -> Result<prost_types::Duration, Error> {
    duration
        .try_into()
        .map_err(|_| Error::new(Kind::Invalid, "that time is too long"))
}

pub(super) async fn create(args: Create, server: &str, context: &Context) -> Result<Exit, Error> {
    let (workspace, times) = match (args.workspace, args.snapshot) {
        (None, None) => (None, String::new()),
        (None, Some(snapshot)) => {
            let workspace = proto::create_sandbox_request::Workspace::Snapshot(snapshot);
            (Some(workspace), String::new())
        }
        (Some(named), _) => {
            let (tree, times) = match named.parse::<crate::workspace::TreeId>() {
                Ok(tree) => (tree.to_string(), args.times),
                Err(_) => upload(server, Path::new(&named)).await?,
            };
            (Some(proto::create_sandbox_request::Workspace::Tree(tree)), times)
        }
    };
    let request = proto::CreateSandboxRequest {
        idempotency_key: args.key,
        policy: args.policy,
        image: args.image,
        backend: args.backend,
        env: args.env.into_iter().collect(),
        labels: args.labels.into_iter().collect(),
        ttl: args.ttl.map(span).transpose()?,
        idle_timeout: args.idle.map(span).transpose()?,
        workspace,
        times,
        queue_timeout: args.queue.map(span).transpose()?,
        by: crate::cli::person(),
    };
    let sandbox = remote::sandboxes(server).await?.create(request).await?.into_inner();
    context.finish(
        &proto_json::sandbox(&sandbox),
        &crate::cli::report::clean_line(&sandbox.sandbox_id),
    );
    Ok(Exit::Ok)
}

async fn upload(server: &str, directory: &Path) -> Result<(String, String), Error> {
    if !directory.is_dir() {
        let message = format!("`{}` is neither a directory nor a tree", directory.display());
        return Err(Error::new(Kind::Invalid, message)
            .hint("--workspace takes a directory with files, or the address that `sandbox snapshot` prints"));
    }
    let sent = task::upload(&mut remote::connect(server).await?, directory).await?;
    Ok((sent.tree, sent.times))
}

fn shown(sandbox: &proto::Sandbox, context: &Context) -> Exit {
    context.finish(
        &proto_json::sandbox(sandbox),
        &show::sandbox(sandbox, clock::System.now()),
    );
    Exit::Ok
}

pub(super) async fn get(args: One, server: &str, context: &Context) -> Result<Exit, Error> {
    let request = proto::GetSandboxRequest { sandbox_id: args.id };
    let sandbox = remote::sandboxes(server).await?.get(request).await?.into_inner();
    Ok(shown(&sandbox, context))
}

fn named(id: String) -> proto::SandboxRequest {
    proto::SandboxRequest {
        sandbox_id: id,
        by: crate::cli::person(),
    }
}

pub(super) async fn pause(args: One, server: &str, context: &Context) -> Result<Exit, Error> {
    let sandbox = remote::sandboxes(server).await?.pause(named(args.id)).await?;
    Ok(shown(&sandbox.into_inner(), context))
}

pub(super) async fn resume(args: One, server: &str, context: &Context) -> Result<Exit, Error> {
    let sandbox = remote::sandboxes(server).await?.resume(named(args.id)).await?;
    Ok(shown(&sandbox.into_inner(), context))
}

/// What is said where the policy gives less than was asked for.
fn shorter_than(asked: Duration, sandbox: &proto::Sandbox, now: clock::Timestamp) -> Option<String> {
    // The way to the server and back.
    const SLACK_MS: i64 = 5000;
    let ends = sandbox.expires_at?;
    let granted = ends.seconds * 1000 + i64::from(ends.nanos) / 1_000_000 - now.0;
    let wanted = i64::try_from(asked.as_millis()).unwrap_or(i64::MAX);
    (granted.saturating_add(SLACK_MS) < wanted).then(|| {
        let granted = Duration::from_secs(u64::try_from(granted / 1000).unwrap_or_default());
        format!("it has {granted:?} from now, which is all that the policy's `wall_time` leaves, in place of {asked:?}")
    })
}

pub(super) async fn renew(args: Renew, server: &str, context: &Context) -> Result<Exit, Error> {
    let request = proto::RenewRequest {
        sandbox_id: args.id,
        ttl: Some(span(args.ttl)?),
        by: crate::cli::person(),
    };
    let mut client = remote::sandboxes(server).await?;
    let sandbox = client.renew(request).await?.into_inner();
    if let Some(said) = shorter_than(args.ttl, &sandbox, clock::System.now()) {
        eprintln!("exuvia: {said}");
    }
    Ok(shown(&sandbox, context))
}

pub(super) async fn snapshot(args: Snapshot, server: &str, context: &Context) -> Result<Exit, Error> {
    let request = proto::SnapshotRequest {
        sandbox_id: args.id,
        memory: args.memory,
        by: crate::cli::person(),
    };
    let kept = remote::sandboxes(server).await?.snapshot(request).await?.into_inner();
    let object = json!({ "tree": kept.tree, "times": kept.times, "snapshot": kept.snapshot });
    let text = match kept.snapshot.as_str() {
        "" => kept.tree,
        snapshot => format!("{}\nsnapshot {snapshot}", kept.tree),
    };
    context.finish(&object, &crate::cli::report::clean(&text));
    Ok(Exit::Ok)
}

/// Ends each; the first refusal is told when all were asked.
pub(super) async fn kill(args: Kill, server: &str, context: &Context) -> Result<Exit, Error> {
    let mut client = remote::sandboxes(server).await?;
    let (mut killed, mut refused) = (Vec::new(), None);
    for sandbox_id in args.ids {
        let request = proto::KillRequest {
            sandbox_id: sandbox_id.clone(),
            by: crate::cli::person(),
            reason: args.reason.clone(),
        };
        match client.kill(request).await {
            Ok(sandbox) => killed.push(sandbox.into_inner()),
            Err(status) => match refused {
                None => refused = Some(Error::from(status)),
                Some(_) => err!("error: {}", Error::from(status)),
            },
        }
    }
    let ids: Vec<String> = killed
        .iter()
        .map(|sandbox| crate::cli::report::clean_line(&sandbox.sandbox_id))
        .collect();
    match refused {
        None => {
            let all: Vec<Value> = killed.iter().map(proto_json::sandbox).collect();
            context.finish(&json!({ "killed": all }), &ids.join("\n"));
            Ok(Exit::Ok)
        }
        Some(error) => {
            ids.iter().for_each(|id| err!("killed {id}"));
            Err(error)
        }
    }
}

pub(super) async fn list(args: List, server: &str, context: &Context) -> Result<Exit, Error> {
    use proto::SandboxState::{Creating, Ended, Ending, Paused, Running};
    let states = match args.all {
        true => vec![Creating, Running, Paused, Ending, Ended],
        false => args.states,
    };
    let request = proto::ListSandboxesRequest {
        page_size: args.limit,
        page_token: args.page_token,
        states: states.into_iter().map(i32::from).collect(),
        labels: args.labels.into_iter().collect::<HashMap<_, _>>(),
    };
    let answer = remote::sandboxes(server).await?.list(request).await?.into_inner();
    let objects: Vec<Value> = answer.sandboxes.iter().map(proto_json::sandbox).collect();
    let mut text = match args.quiet {
        true => answer
            .sandboxes
            .iter()
            .map(|sandbox| format!("{}\n", sandbox.sandbox_id))
            .collect(),
        false => listing(&answer.sandboxes, clock::System.now()),
    };
    if !answer.next_page_token.is_empty() && !args.quiet {
        text += &format!("(more: --page-token {})\n", answer.next_page_token);
    }
    context.finish(
        &json!({ "sandboxes": objects, "next_page_token": answer.next_page_token }),
        &crate::cli::report::clean(&text),
    );
    Ok(Exit::Ok)
}

fn listing(sandboxes: &[proto::Sandbox], now: clock::Timestamp) -> String {
    let rows: Vec<Vec<String>> = sandboxes
        .iter()
        .map(|sandbox| {
            let age = sandbox.created_at.as_ref().map(|at| show::span(show::since(at, now)));
            let left = match (&sandbox.end, &sandbox.expires_at) {
                (Some(end), _) => show::end(end),
                (None, Some(at)) => format!("in {}", show::span(show::until(at, now))),
                (None, None) => "-".to_owned(),
            };
            vec![
                sandbox.sandbox_id.clone(),
                show::state(sandbox).to_owned(),
                sandbox.policy.clone(),
                sandbox.image.clone(),
                age.unwrap_or_else(|| "-".to_owned()),
                left,
                show::labels(sandbox),
            ]
        })
        .collect();
    show::table(&["SANDBOX", "STATE", "POLICY", "IMAGE", "AGE", "ENDS", "LABELS"], &rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn less_than_was_asked_for_is_said() {
        let sandbox = proto::Sandbox {
            expires_at: Some(prost_types::Timestamp {
                seconds: 1060,
                nanos: 0,
            }),
            ..proto::Sandbox::default()
        };
        let now = clock::Timestamp(1_000_000);
        assert_eq!(shorter_than(Duration::from_secs(62), &sandbox, now), None);
        assert_eq!(
            shorter_than(Duration::from_secs(3600), &sandbox, now).as_deref(),
            Some("it has 60s from now, which is all that the policy's `wall_time` leaves, in place of 3600s")
        );
    }

    #[test]
    fn a_listing_is_a_table() {
        let at = |seconds| Some(prost_types::Timestamp { seconds, nanos: 0 });
        let sandbox = |id: &str, state: proto::SandboxState| proto::Sandbox {
            sandbox_id: id.into(),
            state: state.into(),
            policy: "default".into(),
            image: "host".into(),
            created_at: at(0),
            expires_at: at(7_200),
            ..Default::default()
        };
        let ended = proto::Sandbox {
            end: Some(proto::SandboxEnd {
                cause: proto::sandbox_end::Cause::Expired.into(),
                ..Default::default()
            }),
            labels: [("team".to_owned(), "x".to_owned())].into(),
            ..sandbox("sbx_b", proto::SandboxState::Ended)
        };
        let all = [sandbox("sbx_a", proto::SandboxState::Running), ended];
        insta::assert_snapshot!(listing(&all, clock::Timestamp(95_000)));
    }

    #[test]
    fn states_are_asked_for_by_name() {
        assert_eq!(state("Paused"), Ok(proto::SandboxState::Paused));
        assert!(state("unspecified").is_err() && state("asleep").is_err());
    }
}
