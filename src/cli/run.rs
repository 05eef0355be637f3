//! `exuvia run`: one task, with a service embedded in this process.

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures::StreamExt;

use super::progress::Progress;
use super::{Context, Error, Exit, report};
use crate::api::{convert, proto};
use crate::assembly::{self, Config};
use crate::border;
use crate::error::Kind;
use crate::ids::RunId;
use crate::policy::BudgetOverrides;
use crate::run::Service;
use crate::run::grounds::Ground;
use crate::run::service::{Submission, View};
use crate::sandbox::{BackendName, ImageRef};
use crate::store::Signal;
use crate::task::TaskFile;
use crate::workspace::{self, Revision};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// A task file; flags override what it says.
    task: Option<PathBuf>,
    #[command(flatten)]
    pub ask: Ask,
    /// Write the result into the workspace directory; without it the directory is left untouched.
    #[arg(long)]
    apply: bool,
    /// Go on with a run of this data directory that was interrupted.
    #[arg(long, value_name = "RUN", conflicts_with_all = ["task", "prompt"])]
    resume: Option<String>,
    /// With --resume: what may be different from what the run stands on (see `exuvia task resume --help`).
    #[arg(long, value_delimiter = ',', value_name = "WHAT,…", requires = "resume")]
    accept: Vec<String>,
    /// While a call waits for approval, stay and wait for `exuvia approve` or `exuvia deny`.
    #[arg(long)]
    wait: bool,
    #[command(flatten)]
    egress: border::Operator,
}

/// What a task is made of; shared with `task submit`.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Ask {
    /// What is to be done.
    #[arg(long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// The files to work on [default: none, which a task with a check must confirm by --empty-workspace].
    #[arg(long, value_name = "DIR")]
    pub workspace: Option<PathBuf>,
    /// Start from nothing, and mean it.
    #[arg(long, conflicts_with = "workspace")]
    pub empty_workspace: bool,
    /// Name or path of the policy [default: default].
    #[arg(long, value_name = "NAME")]
    pub policy: Option<String>,
    /// `scripted:FILE`, `openai:MODEL` or `openai:MODEL@BASE_URL`.
    #[arg(long, env = "EXUVIA_MODEL", value_name = "SPEC")]
    pub model: Option<String>,
    /// Where the model's key is: `env:NAME` or `file:PATH` [default: env:EXUVIA_MODEL_KEY, else env:OPENAI_API_KEY].
    #[arg(long, value_name = "REF")]
    pub credential: Option<String>,
    /// Command that must exit 0 in the sandbox before the run counts as FINISHED.
    #[arg(long, value_name = "CMD")]
    pub check: Option<String>,
    /// `host`, `image:NAME`, `rootfs:DIR`, `tar:FILE` or `docker:NAME` [default: the policy's].
    #[arg(long, value_name = "IMG")]
    pub image: Option<String>,
    /// [default: the policy's]
    #[arg(long)]
    pub backend: Option<BackendName>,
    /// Label, `KEY=VALUE`; may be repeated.
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = label)]
    pub labels: Vec<(String, String)>,
    /// At most this many model calls and tool calls together.
    #[arg(long, value_name = "N")]
    pub max_steps: Option<u32>,
    /// At most this long, without the time in which it waits for a person: `10m`.
    #[arg(long, value_name = "TIME", value_parser = super::duration)]
    pub max_time: Option<Duration>,
    /// At most this many tokens, input and output together.
    #[arg(long, value_name = "N")]
    pub max_tokens: Option<u64>,
}

fn label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err(format!("`{text}` is not KEY=VALUE")),
    }
}

impl Ask {
    /// Flags over the task file.
    pub fn over(mut self, file: TaskFile) -> (Self, BudgetOverrides) {
        let mut labels: BTreeMap<String, String> = file.labels;
        labels.extend(self.labels);
        self.labels = labels.into_iter().collect();
        self.prompt = self.prompt.or(file.prompt);
        match (&self.workspace, self.empty_workspace) {
            (Some(_), _) | (None, true) => {}
            (None, false) => {
                self.workspace = file.workspace;
                self.empty_workspace = file.empty_workspace && self.workspace.is_none();
            }
        }
        self.policy = self.policy.or(file.policy);
        self.model = self.model.or(file.model);
        self.credential = self.credential.or(file.credential);
        self.check = self.check.or(file.check);
        self.image = self.image.or(file.image);
        self.backend = self.backend.or(file.backend);
        let budgets = BudgetOverrides {
            steps: self.max_steps.or(file.budgets.steps),
            total_time: self.max_time.or(file.budgets.total_time),
            tokens: self.max_tokens.or(file.budgets.tokens),
            ..file.budgets
        };
        (self, budgets)
    }

    /// The submission, with scripts read in and images parsed.
    pub fn submission(self, budgets: BudgetOverrides, workspace: Option<Revision>) -> Result<Submission, Error> {
        let usage = |message: &str, hint: &str| Error::new(Kind::Invalid, message).hint(hint);
        let prompt = self
            .prompt
            .ok_or_else(|| usage("there is no prompt", "give --prompt TEXT or a task file"))?;
        let spec = self.model.ok_or_else(|| {
            usage(
                "there is no model",
                "give --model openai:MODEL or --model scripted:FILE, or set EXUVIA_MODEL",
            )
        })?;
        if self.check.is_some() && self.workspace.is_none() && !self.empty_workspace {
            return Err(usage(
                "there is a completion check and no workspace for it to judge",
                "give --workspace DIR, or --empty-workspace where that is meant: a check may well pass on no files at all",
            ));
        }
        let image = self.image.map(|image| image.parse::<ImageRef>()).transpose();
        Ok(Submission {
            prompt,
            model: crate::task::Model::from_spec(&spec, self.credential)?,
            policy: self.policy.unwrap_or_else(|| "default".into()),
            workspace,
            empty_workspace: self.empty_workspace,
            check: self.check,
            budgets,
            labels: self.labels.into_iter().collect(),
            image: image.map_err(|error| Error::of(Kind::Invalid, &error))?,
            backend: self.backend,
            trace: None,
        })
    }
}

pub async fn run(args: Args, context: &Context) -> Result<Exit, Error> {
    let file = args.task.as_deref().map(TaskFile::load).transpose()?;
    let (ask, budgets) = args.ask.over(file.unwrap_or_default());
    let workspace = ask.workspace.clone();
    if args.apply && workspace.is_none() {
        return Err(Error::new(Kind::Invalid, "--apply needs --workspace"));
    }
    if let Some(directory) = &workspace {
        check_apart(directory, &context.data_dir)?;
    }
    let config = Config {
        egress: args.egress,
        ..Config::of(&context.data_dir, 1)
    };
    let (service, parts) = assembly::open(&config).await?;
    parts.reap(&[BackendName::Oci]).await;
    let run = match &args.resume {
        Some(id) => resume(&service, id, &args.accept).await?,
        None => {
            let revision = match &workspace {
                Some(directory) => Some(import(&service, directory).await?),
                None => None,
            };
            service.submit(ask.submission(budgets, revision)?, None).await?.run
        }
    };
    let patience = if args.wait { Patience::Wait } else { Patience::Ask };
    let exit = follow(
        &service,
        &run,
        patience,
        context,
        args.apply.then_some(workspace).flatten().as_deref(),
    )
    .await;
    service.shut_down(Duration::from_secs(10)).await;
    exit
}

/// Refuses a workspace that holds the data directory: the agent would be given the audit key and all other runs.
fn check_apart(workspace: &Path, data_dir: &Path) -> Result<(), Error> {
    let whole = |path: &Path| {
        let known = path
            .ancestors()
            .find_map(|part| Some((part, part.canonicalize().ok()?)));
        known.map_or(path.to_owned(), |(part, real)| {
            real.join(path.strip_prefix(part).unwrap_or(Path::new("")))
        })
    };
    if whole(data_dir).starts_with(whole(workspace)) {
        let message = format!("the data directory `{}` lies in the workspace", data_dir.display());
        return Err(
            Error::new(Kind::Invalid, message).hint("choose a --workspace or a --data-dir that is apart from it")
        );
    }
    Ok(())
}

/// Takes in the workspace directory; one that is not there is a wrong call.
async fn import(service: &Service, directory: &Path) -> Result<Revision, Error> {
    match service.workspaces().import(directory).await {
        Ok(snapshot) => Ok(snapshot.revision),
        Err(error @ (workspace::Error::NoDirectory(_) | workspace::Error::NotADirectory(_))) => {
            Err(Error::of(Kind::Invalid, &error).hint("--workspace names the directory with the files to work on"))
        }
        Err(error) => Err(error.into()),
    }
}

/// Takes up an unfinished run of this data directory.
async fn resume(service: &Service, id: &str, accept: &[String]) -> Result<RunId, Error> {
    let accept = Ground::parse(accept).map_err(|message| Error::new(Kind::Invalid, message))?;
    let record = service.find(id).await?;
    if service.is_elsewhere(&record) {
        return Err(Error::new(
            Kind::WrongState,
            format!("{} is driven by another process", record.run),
        ));
    }
    // One that is held, or withheld, wants a word; any other is taken up.
    if !record.is_terminal && record.state == "PAUSED" {
        let by = super::person();
        service
            .signal(record.run.as_str(), Signal::Resume { by, accept })
            .await?;
    } else if !record.is_terminal {
        service.drive(&record.run);
    }
    Ok(record.run)
}

/// What to do when the run waits for a person.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Patience {
    /// Ask at the terminal; without one, leave it parked.
    Ask,
    /// Stay until somebody decides elsewhere.
    Wait,
}

/// Shows a run until it ends or is left parked, then reports. `apply` writes the result into a directory.
pub async fn follow(
    service: &Service,
    run: &RunId,
    patience: Patience,
    context: &Context,
    apply: Option<&Path>,
) -> Result<Exit, Error> {
    let mut progress = Progress::new();
    let mut events = Box::pin(service.watch(run.clone(), 0));
    let view = loop {
        let rested = tokio::select! {
            biased;
            event = events.next() => match event {
                Some(Ok((entry, public))) => {
                    progress.event(&convert::event(run, &entry, public));
                    continue;
                }
                Some(Err(error)) => return Err(error.into()),
                None => service.settled(run).await?,
            },
            view = rest(service, run) => view?,
            () = interrupted() => {
                progress.done();
                err!("interrupted; go on with: exuvia run --resume {run}{}", context.data_flag());
                service.shut_down(Duration::from_secs(10)).await;
                return Ok(Exit::Passed(130));
            }
        };
        if rested.record.is_terminal || !waits(&rested) {
            break rested;
        }
        match patience {
            Patience::Ask if std::io::stdin().is_terminal() && std::io::stderr().is_terminal() && !context.json => {
                progress.done();
                ask_here(service, run, &rested).await?;
            }
            Patience::Ask => break rested,
            Patience::Wait => tokio::time::sleep(Duration::from_millis(200)).await,
        }
    };
    progress.done();
    if !view.record.is_terminal && !waits(&view) {
        let message = format!(
            "run {run} stands at {} and cannot be driven; the log above says why",
            view.state.public()
        );
        return Err(
            Error::new(Kind::Unavailable, message).hint(format!("exuvia run --resume {run}{}", context.data_flag()))
        );
    }
    finish(service, &view, context, apply).await
}

/// Ctrl-C, a closed terminal, or a polite end from outside. A run is let go of then, and can be resumed.
pub(super) async fn interrupted() {
    use tokio::signal::unix::{SignalKind, signal};
    let wait = |kind| async move {
        match signal(kind) {
            Ok(mut signal) => drop(signal.recv().await),
            Err(_) => std::future::pending().await,
        }
    };
    tokio::select! {
        () = wait(SignalKind::interrupt()) => {}
        () = wait(SignalKind::terminate()) => {}
        () = wait(SignalKind::hangup()) => {}
    }
}

/// Waits until nobody here drives the run and it is at rest.
async fn rest(service: &Service, run: &RunId) -> Result<View, crate::run::Error> {
    loop {
        let view = service.settled(run).await?;
        if view.record.is_terminal || waits(&view) || !service.is_elsewhere(&view.record) {
            return Ok(view);
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

fn waits(view: &View) -> bool {
    view.state.is_parked()
}

/// Asks the person at the terminal about each open approval.
async fn ask_here(service: &Service, run: &RunId, view: &View) -> Result<(), Error> {
    for (step, approval) in view.state.open_approvals() {
        let Some(call) = view.session.call(step) else { continue };
        eprint!(
            "allow step {step}: {} {} ? [y/N] ",
            report::clean_line(&call.tool),
            report::clean_line(&call.arguments)
        );
        std::io::stderr().flush().ok();
        let answer = tokio::task::spawn_blocking(|| {
            let mut line = String::new();
            std::io::stdin().read_line(&mut line).map(|_| line)
        });
        let line = answer
            .await
            .map_err(|error| Error::new(Kind::Internal, error.to_string()))?;
        let approved = line.is_ok_and(|line| matches!(line.trim(), "y" | "Y" | "yes"));
        let (by, reason) = (super::person(), "answered at the terminal".to_owned());
        let signal = Signal::Decide {
            approval: Some(approval.clone()),
            approved,
            by,
            reason,
        };
        service.signal(run.as_str(), signal).await?;
    }
    Ok(())
}

async fn finish(service: &Service, view: &View, context: &Context, apply: Option<&Path>) -> Result<Exit, Error> {
    let run = convert::run(view);
    let id = view.record.run.as_str();
    let (base, tree) = (view.submitted.workspace.tree, view.state.workspace.tree);
    let diff = service.workspaces().patch(base, tree).await?.text;
    let events = events_of(view)?;
    let steps = report::steps(&events);
    let audit = context.data_dir.join("audit/audit.jsonl");
    let mut object = report::whole(&run, &steps, &diff);
    object["audit_log"] = audit.display().to_string().into();
    object["data_dir"] = context.data_dir.display().to_string().into();
    let mut text = format!("\n{}\n{}", report::table(&steps), report::ending(&run));
    if let (Some(directory), proto::RunState::Finished) = (apply, run.state()) {
        let applied = service.workspaces().apply(directory, base, tree).await?;
        object["applied"] = applied.changes.len().into();
        if !applied.left_out.is_empty() {
            text += &format!(
                "left out, since they belong to git itself: {} file(s)\n",
                applied.left_out.len()
            );
        }
        let count = applied.changes.len();
        let changes = if count == 1 { "change" } else { "changes" };
        text += &format!("applied {count} {changes} to {}\n", directory.display());
    }
    if !diff.is_empty() {
        text += &format!("\n{}\n", report::clean(&String::from_utf8_lossy(&diff)));
    }
    text += &format!(
        "audit log: {} (exuvia audit query --run {id}{})\n",
        audit.display(),
        context.data_flag()
    );
    context.finish(&object, &text);
    Ok(report::exit(&run))
}

/// The run's journal as public events.
fn events_of(view: &View) -> Result<Vec<proto::Event>, Error> {
    let mut state = None;
    let mut events = Vec::new();
    for entry in &view.entries {
        let next = crate::run::state::next(state.as_ref(), entry).map_err(|error| Error::of(Kind::Internal, &error))?;
        events.push(convert::event(&view.record.run, entry, next.public()));
        state = Some(next);
    }
    Ok(events)
}
