//! `exuvia task …`: the tasks of a server.

pub(super) mod fork;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};
use tokio_stream::{Stream, StreamExt};
use tonic::transport::Channel;
use tonic::{Code, Response, Status};

use super::progress::Progress;
use super::run::Ask;
use super::{Context, Error, Exit, remote, report};
use crate::api::proto::task_service_client::TaskServiceClient;
use crate::api::{convert, json as proto_json, proto};
use crate::error::Kind;
use crate::task::TaskFile;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The server.
    #[arg(long, global = true, env = "EXUVIA_SERVER", default_value = remote::DEFAULT, value_name = "URL")]
    server: String,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Submit a task.
    Submit(Box<Submit>),
    /// Show a run as it stands.
    Get { id: String },
    /// List runs, newest first.
    List {
        /// Only runs in this state; may be repeated: FINISHED, WAITING_APPROVAL, …
        #[arg(long = "state", value_name = "STATE")]
        states: Vec<String>,
        /// Only runs with this label, KEY=VALUE; may be repeated.
        #[arg(long = "label", value_name = "KEY=VALUE")]
        labels: Vec<String>,
        #[arg(long, default_value_t = 50)]
        limit: u32,
        #[arg(long, default_value = "", value_name = "TOKEN")]
        page_token: String,
    },
    /// Follow a run's events until it ends; with --json one event a line, then the run.
    Watch {
        id: String,
        /// Only events after this one.
        #[arg(long, default_value_t = 0, value_name = "SEQ")]
        after: u64,
    },
    /// Stop a run for good.
    Cancel(Control),
    /// Hold a run at its next safe point.
    Pause {
        #[command(flatten)]
        control: Control,
        /// Stop what is going on, too; it is begun again when the run goes on.
        #[arg(long)]
        now: bool,
    },
    /// Let a paused run go on.
    Resume {
        #[command(flatten)]
        control: Control,
        /// What may be different from what the run stands on: task, policy, profile, capabilities, image, inputs, tools. The run keeps
        /// the policy that it started with; `task fork` takes today's.
        #[arg(long, value_delimiter = ',', value_name = "WHAT,…")]
        accept: Vec<String>,
    },
    /// Begin a child run at a checkpoint of another run.
    Fork(fork::Args),
    /// Write a run to one file: journal and checkpoints, no credentials.
    Export {
        id: String,
        /// The workspace of each checkpoint, too, so that the run can be forked where it is taken in.
        #[arg(long)]
        with_workspace: bool,
        /// Where to; `-` = stdout.
        #[arg(long, short, default_value = "-", value_name = "FILE")]
        output: PathBuf,
    },
    /// Take an exported run in, under new ids.
    Import { file: PathBuf },
    /// The conversation, one message a line with --json.
    Transcript { id: String },
    /// What the run changed, as a unified diff.
    Diff {
        id: String,
        #[arg(long, value_name = "REVISION")]
        from: Option<u64>,
        #[arg(long, value_name = "REVISION")]
        to: Option<u64>,
    },
    /// Fetch the workspace as a tar file.
    Pull {
        id: String,
        /// Where to; `-` = stdout.
        #[arg(long, short, default_value = "-", value_name = "FILE")]
        output: PathBuf,
        #[arg(long, value_name = "REVISION")]
        revision: Option<u64>,
    },
    /// Fetch an output that was too long for a tool result.
    Artifact { id: String, artifact: String },
}

#[derive(Debug, clap::Args)]
struct Submit {
    /// A task file; flags override what it says.
    task: Option<PathBuf>,
    #[command(flatten)]
    ask: Ask,
    /// The same key and the same task give the same run again.
    #[arg(long, default_value = "", value_name = "KEY")]
    key: String,
    /// Follow it until it ends.
    #[arg(long)]
    watch: bool,
}

#[derive(Debug, clap::Args)]
struct Control {
    id: String,
    #[arg(long, default_value = "", value_name = "TEXT")]
    reason: String,
    /// Who asks [default: the user].
    #[arg(long, value_name = "NAME")]
    by: Option<String>,
}

impl Control {
    fn request(self) -> proto::ControlRequest {
        proto::ControlRequest {
            id: self.id,
            by: self.by.unwrap_or_else(super::person),
            reason: self.reason,
            now: false,
            accept: Vec::new(),
        }
    }
}

type Client = TaskServiceClient<Channel>;

pub async fn run(args: Args, context: &Context) -> Result<Exit, Error> {
    let mut client = remote::connect(&args.server).await?;
    match args.command {
        Command::Submit(submit) => self::submit(client, *submit, context).await,
        Command::Get { id } => Ok(show(&client.get(proto::GetRequest { id }).await?.into_inner(), context)),
        Command::List {
            states,
            labels,
            limit,
            page_token,
        } => list(client, states, labels, limit, page_token, context).await,
        Command::Watch { id, after } => watch(client, id, after, context).await,
        Command::Cancel(control) => Ok(show(&client.cancel(control.request()).await?.into_inner(), context)),
        Command::Pause { control, now } => {
            let request = proto::ControlRequest {
                now,
                ..control.request()
            };
            Ok(show(&client.pause(request).await?.into_inner(), context))
        }
        Command::Fork(fork) => fork::fork(client, fork, context).await,
        Command::Export {
            id,
            with_workspace,
            output,
        } => {
            let request = proto::ExportRequest { id, with_workspace };
            fork::export(client, request, &output, context).await
        }
        Command::Import { file } => fork::import(client, &file, context).await,
        Command::Resume { control, accept } => {
            let request = proto::ControlRequest {
                accept,
                ..control.request()
            };
            Ok(show(&client.resume(request).await?.into_inner(), context))
        }
        Command::Transcript { id } => transcript(client, id, context).await,
        Command::Diff { id, from, to } => {
            let request = proto::DiffWorkspaceRequest {
                id,
                from_revision: from,
                to_revision: to,
            };
            let answer = client.diff_workspace(request).await?.into_inner();
            let diff = String::from_utf8_lossy(&answer.diff).into_owned();
            let object = json!({ "diff": diff, "from_tree": answer.from_tree, "to_tree": answer.to_tree });
            context.finish(&object, &report::clean(&diff));
            Ok(Exit::Ok)
        }
        Command::Pull { id, output, revision } => pull(client, id, &output, revision, context).await,
        Command::Artifact { id, artifact } => {
            let mut chunks = client
                .get_artifact(proto::GetArtifactRequest { id, artifact })
                .await?
                .into_inner();
            while let Some(chunk) = chunks.next().await {
                std::io::stdout()
                    .write_all(&chunk?.data)
                    .map_err(|error| Error::of(Kind::Unavailable, &error))?;
            }
            Ok(Exit::Ok)
        }
    }
}

fn show(run: &proto::Run, context: &Context) -> Exit {
    context.finish(&report::run(run), &report::ending(run));
    Exit::Ok
}

async fn submit(mut client: Client, submit: Submit, context: &Context) -> Result<Exit, Error> {
    let file = submit
        .task
        .as_deref()
        .map(TaskFile::load)
        .transpose()?
        .unwrap_or_default();
    let (ask, budgets) = submit.ask.over(file);
    let workspace = ask.workspace.clone();
    let submission = ask.submission(budgets, None)?;
    let files = match &workspace {
        Some(directory) => upload(&mut client, directory).await?,
        None => proto::UploadWorkspaceResponse::default(),
    };
    let task = proto::Task {
        tree: files.tree,
        times: files.times,
        ..convert::submission_to_proto(submission)
    };
    let run = client
        .submit(proto::SubmitRequest {
            idempotency_key: submit.key,
            task: Some(task),
        })
        .await?
        .into_inner();
    if submit.watch {
        return watch(client, run.run_id, 0, context).await;
    }
    Ok(show(&run, context))
}

/// Sends a directory as a tar stream; gives its address.
pub(super) async fn upload(client: &mut Client, directory: &Path) -> Result<proto::UploadWorkspaceResponse, Error> {
    let failed = Arc::new(Mutex::new(None));
    let failure = Arc::clone(&failed);
    let parts = crate::workspace::pack(directory)
        .await?
        .map_while(move |piece| match piece {
            Ok(data) => Some(proto::UploadWorkspaceRequest { data }),
            Err(error) => {
                *failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                None
            }
        });
    let answer = client.upload_workspace(parts).await;
    // A stream that we broke ourselves tells less than why.
    match failed.lock().unwrap_or_else(PoisonError::into_inner).take() {
        Some(error) => Err(error.into()),
        None => Ok(answer?.into_inner()),
    }
}

async fn list(
    mut client: Client,
    states: Vec<String>,
    labels: Vec<String>,
    limit: u32,
    page_token: String,
    context: &Context,
) -> Result<Exit, Error> {
    let state = |name: String| {
        proto::RunState::from_str_name(&format!("RUN_STATE_{}", name.to_uppercase()))
            .map(i32::from)
            .ok_or_else(|| Error::new(Kind::Invalid, format!("`{name}` is no state of a run")))
    };
    let label = |text: String| {
        let pair = text
            .split_once('=')
            .map(|(key, value)| (key.to_owned(), value.to_owned()));
        pair.ok_or_else(|| Error::new(Kind::Invalid, format!("`{text}` is not KEY=VALUE")))
    };
    let request = proto::ListRequest {
        page_size: limit,
        page_token,
        states: states.into_iter().map(state).collect::<Result<_, _>>()?,
        labels: labels.into_iter().map(label).collect::<Result<_, _>>()?,
    };
    let answer = client.list(request).await?.into_inner();
    let runs: Vec<Value> = answer.runs.iter().map(report::run).collect();
    let lines: Vec<String> = answer
        .runs
        .iter()
        .map(|run| {
            format!(
                "{}  {:<16}  {}",
                run.run_id,
                convert::state_name(run.state()),
                run.task_id
            )
        })
        .collect();
    context.finish(
        &json!({ "runs": runs, "next_page_token": answer.next_page_token }),
        &lines.join("\n"),
    );
    Ok(Exit::Ok)
}

/// How often a watch that broke is asked for again, and after how long: a server may be starting anew.
const AGAIN: (u32, Duration) = (120, Duration::from_millis(500));

async fn watch(mut client: Client, id: String, mut after: u64, context: &Context) -> Result<Exit, Error> {
    let mut progress = Progress::new();
    let mut failures = 0;
    // Asked for again from the last event: no gap, no duplicate.
    let run = loop {
        let broken = match follow(&mut client, &id, &mut after, &mut progress, context).await {
            Ok(()) => match client
                .get(proto::GetRequest { id: id.clone() })
                .await
                .map(Response::into_inner)
            {
                Ok(run) if run.outcome.is_some() => break run,
                // The server ended the stream, not the run.
                Ok(_) => Status::unavailable("the server ended the stream"),
                Err(status) => status,
            },
            Err((status, heard)) => {
                failures = if heard { 0 } else { failures };
                status
            }
        };
        failures += 1;
        if !matches!(broken.code(), Code::Unavailable | Code::Unknown | Code::Cancelled) || failures > AGAIN.0 {
            return Err(broken.into());
        }
        tokio::time::sleep(AGAIN.1).await;
    };
    progress.done();
    context.finish(&report::run(&run), &report::ending(&run));
    Ok(report::exit(&run))
}

/// Shows events until the stream ends; when it breaks, why, and whether anything came before.
async fn follow(
    client: &mut Client,
    id: &str,
    after: &mut u64,
    progress: &mut Progress,
    context: &Context,
) -> Result<(), (Status, bool)> {
    let request = proto::WatchRequest {
        id: id.to_owned(),
        after_seq: *after,
    };
    let mut events = client
        .watch(request)
        .await
        .map_err(|status| (status, false))?
        .into_inner();
    let begun = *after;
    while let Some(event) = events.next().await {
        let event = event.map_err(|status| (status, *after > begun))?;
        *after = event.seq;
        match context.json {
            true => out!("{}", proto_json::event(&event)),
            false => progress.event(&event),
        }
    }
    Ok(())
}

async fn transcript(mut client: Client, id: String, context: &Context) -> Result<Exit, Error> {
    let answer = client
        .get_transcript(proto::GetTranscriptRequest { id })
        .await?
        .into_inner();
    let messages: Vec<Value> = answer.messages.iter().map(convert::struct_from_proto).collect();
    let text: Vec<String> = messages.iter().map(report::message).collect();
    context.finish(
        &json!({ "run_id": answer.run_id, "messages": messages }),
        &text.join("\n"),
    );
    Ok(Exit::Ok)
}

async fn pull(
    mut client: Client,
    id: String,
    output: &Path,
    revision: Option<u64>,
    context: &Context,
) -> Result<Exit, Error> {
    let chunks = client
        .get_workspace(proto::GetWorkspaceRequest { id, revision })
        .await?
        .into_inner();
    save(chunks.map(|chunk| Ok(chunk?.data)), output, context).await
}

/// Writes a stream of bytes to a file, or to stdout for `-`. A file is there whole or not at all.
async fn save(
    pieces: impl Stream<Item = Result<Vec<u8>, Status>> + Unpin,
    output: &Path,
    context: &Context,
) -> Result<Exit, Error> {
    let is_stdout = output == Path::new("-");
    let fail = |error: std::io::Error| Error::local(&format!("cannot write `{}`", output.display()), &error);
    let bytes = match is_stdout {
        true => pour(pieces, std::io::stdout(), fail).await?,
        false => {
            let file = std::fs::File::create(output).map_err(fail)?;
            let is_file = file.metadata().is_ok_and(|found| found.is_file());
            let poured = pour(pieces, file, fail).await;
            if poured.is_err() && is_file {
                // Half of it is worth nothing; where it cannot be removed, the failure is told all the same.
                let _ = std::fs::remove_file(output);
            }
            poured?
        }
    };
    if !is_stdout {
        context.finish(
            &json!({ "file": output, "bytes": bytes }),
            &format!("{bytes} bytes in {}", output.display()),
        );
    }
    Ok(Exit::Ok)
}

/// Writes all of a stream; how many bytes it was.
async fn pour(
    mut pieces: impl Stream<Item = Result<Vec<u8>, Status>> + Unpin,
    mut to: impl Write,
    fail: impl Fn(std::io::Error) -> Error,
) -> Result<usize, Error> {
    let mut bytes = 0;
    while let Some(piece) = pieces.next().await {
        let data = piece?;
        bytes += data.len();
        to.write_all(&data).map_err(&fail)?;
    }
    to.flush().map_err(&fail)?;
    Ok(bytes)
}
