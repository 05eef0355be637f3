//! `exuvia sandbox run`: one command in a sandbox of its own.
//!
//! The command's output and exit code pass through unchanged. What else can end it is named on stderr and has a code of its
//! own (`verdict`). What was made, run and removed is on the audit record, each before or as soon as it happens (`trail`);
//! where that cannot be written nothing runs.
//!
//! ```text
//! plan ─► open, reap ─► on record: created, started ─► exec ─► pass ─► close, on record: ended ─► destroyed
//! ```

use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use super::pass::{self, Interrupts, Passed};
use super::plan::{self, Plan};
use super::trail::Trail;
use super::verdict::{self, Verdict};
use crate::assembly::Parts;
use crate::border::{Guard, Operator, Post, Whose};
use crate::cli::{Context, Error, Exit};
use crate::ids::SandboxId;
use crate::sandbox::disk::Volumes;
use crate::sandbox::{BackendName, Cause, Ended, Error as SandboxError, ImageRef, Mount, Sandbox, identity};
use crate::workdir::WorkDir;

pub(super) const NOTES: &str = "\
Output and exit code are the command's own; what else ended it is said on stderr:
  124  its time was up                 126  it cannot be executed (or --workdir cannot be entered)
  125  there is no sandbox             127  there is no such program
  137  out of memory, or killed        128+N  it died of signal N

The policy gives the isolation, limits, image and mounts. Its [tools] rules are for models: they
do not apply here, where a person runs a command. What was run is on the audit record: `exuvia
audit query`. With --json the last line of stdout, after the command's own output, is one JSON
object.

  exuvia sandbox run -- python3 -c 'print(6 * 7)'
  exuvia sandbox run --policy strict --timeout 30s --stdin -- sh -s < untrusted.sh
  exuvia sandbox run --mount-ro .:/src --workdir /src -- ls";

#[derive(Debug, clap::Args)]
pub(super) struct Run {
    /// Name or path of the policy.
    #[arg(long, default_value = "default", value_name = "NAME|PATH")]
    pub(super) policy: String,
    /// [default: the policy's; else `docker` for a `docker:` image, `oci` for others]
    #[arg(long)]
    pub(super) backend: Option<BackendName>,
    /// `host`, `image:NAME`, `rootfs:DIR`, `tar:FILE`, `docker:NAME`, or a path [default: the policy's].
    #[arg(long, value_name = "IMG")]
    pub(super) image: Option<ImageRef>,
    /// Show a directory or file read-only, at its own path or at TARGET; may be repeated.
    #[arg(long, value_name = "DIR[:TARGET]", value_parser = plan::mount)]
    pub(super) mount_ro: Vec<Mount>,
    /// Pass standard input on; without it the command reads nothing.
    #[arg(long)]
    pub(super) stdin: bool,
    /// Kill the command after this long: `30s`, `5m` [default: the policy's `wall_time`, which is also the most].
    #[arg(long, value_name = "TIME", value_parser = crate::cli::duration)]
    pub(super) timeout: Option<Duration>,
    /// Set a variable; may be repeated. Nothing else of your environment goes in.
    #[arg(long, value_name = "NAME=VALUE", value_parser = plan::variable)]
    pub(super) env: Vec<(String, String)>,
    /// Where the command starts [default: /workspace, which is empty].
    #[arg(long, value_name = "DIR")]
    pub(super) workdir: Option<PathBuf>,
    #[command(flatten)]
    pub(super) egress: Operator,
    /// The command and its arguments.
    #[arg(trailing_var_arg = true, required = true)]
    pub(super) command: Vec<OsString>,
}

/// How long the sandbox may take to end by itself once its command has.
const GRACE: Duration = Duration::ZERO;

pub(super) async fn run(run: Run, context: &Context) -> Result<Exit, Error> {
    let report = match Session::open(run, context).await {
        Ok(session) => session.run().await,
        Err(error) => Report::none(&error),
    };
    Ok(report.give(context.json))
}

/// A sandbox that is up, and what is to be run in it.
struct Session {
    plan: Plan,
    trail: Trail,
    sandbox: Sandbox,
    directory: WorkDir,
    /// The sandbox's way out, where the policy has one.
    post: Option<Post>,
    /// Given back when the sandbox is gone.
    _claim: identity::Claim,
    interrupts: Interrupts,
}

impl Session {
    async fn open(run: Run, context: &Context) -> Result<Self, Error> {
        // First of all: a signal that comes while the sandbox is being made must not leave it behind.
        let interrupts = Interrupts::listen()?;
        let parts = Parts::open(&context.data_dir, run.egress.clone()).await?;
        let mut plan = Plan::new(run, &context.data_dir)?;
        let backend = parts.backends.get(plan.backend).await?;
        plan.check(&backend.capabilities())?;
        let guard = Guard::of(&plan.policy, &backend.capabilities(), Some(&parts.borders))?;
        plan.surround(guard.variables());
        let claim = identity::Claim::take(&context.data_dir)?;
        let id = SandboxId::random();
        let trail = Trail::new(&parts, &id);
        let directory = tokio::task::block_in_place(|| {
            let (volumes, owner) = (Volumes::new(&context.data_dir), claim.identity().host_uid());
            WorkDir::open(&context.data_dir, id.as_str(), &volumes, plan.policy.limits(), owner)
        })?;
        let whose = Whose::sandbox(&id);
        let spec = plan.spec(id, claim.identity(), directory.workspace());
        // What killed ones left goes meanwhile; only this backend is looked at.
        let reaped = [plan.backend];
        let (opened, _) = tokio::join!(
            Sandbox::open(Arc::clone(&backend), spec, plan.filter.clone()),
            parts.reap(&reaped)
        );
        let sandbox = match opened {
            Ok(sandbox) => sandbox,
            Err(error) => {
                directory.remove();
                return Err(error.into());
            }
        };
        let post = match guard.stand(&*backend, sandbox.handle(), &whose).await {
            Ok(post) => post,
            Err(error) => {
                sandbox.destroy().await?;
                directory.remove();
                return Err(error.into());
            }
        };
        Ok(Self {
            sandbox,
            directory,
            post,
            plan,
            trail,
            _claim: claim,
            interrupts,
        })
    }

    async fn run(self) -> Report {
        let Self {
            plan,
            trail,
            sandbox,
            directory,
            post,
            _claim,
            interrupts,
        } = self;
        let recorded = trail.starting(&plan, sandbox.handle()).await;
        let (end, details) = match recorded {
            Err(error) => (End::none(&error), json!({ "reason": error.message })),
            Ok(()) => in_sandbox(&plan, &sandbox, interrupts).await,
        };
        if let Some(post) = post {
            post.close().await;
        }
        let (closed, ended) = tokio::join!(sandbox.close(GRACE), trail.ended(&plan, end.outcome, details.clone()));
        // One that could not be removed may still write there: the next start sweeps both.
        if closed.is_ok() {
            directory.remove();
        }
        let destroyed = trail.destroyed(closed.as_ref().err()).await;
        let failures = [closed.map_err(Error::from).err(), ended.err(), destroyed.err()];
        let object = json!({ "sandbox_id": sandbox.id(), "backend": plan.backend, "policy": plan.policy.name(),
            "policy_hash": plan.policy.hash() });
        Report {
            verdict: end.verdict,
            failures: failures.into_iter().flatten().collect(),
            object: merged(object, details),
            passed: end.passed,
        }
    }
}

/// How it went with the command.
struct End {
    verdict: Verdict,
    /// For the record.
    outcome: &'static str,
    passed: Passed,
}

impl End {
    fn none(error: &Error) -> Self {
        Self {
            verdict: Verdict::no_sandbox(error),
            outcome: "not_started",
            passed: Passed::default(),
        }
    }
}

/// Runs the command to its end.
async fn in_sandbox(plan: &Plan, sandbox: &Sandbox, interrupts: Interrupts) -> (End, Value) {
    let mut exec = match sandbox.exec(plan.command.clone()).await {
        Ok(exec) => exec,
        Err(error) => {
            let verdict = match &error {
                SandboxError::NotStarted { code, message } => Verdict::not_started(code, message),
                _ => Verdict::no_sandbox(&Error::from(error)),
            };
            let details = json!({ "cause": { "type": "not_started" }, "reason": verdict.said });
            let end = End {
                verdict,
                outcome: "not_started",
                passed: Passed::default(),
            };
            return (end, details);
        }
    };
    let passed = pass::pass(&mut exec, plan.stdin, interrupts).await;
    let ended = exec.ended().await;
    let peak = sandbox.usage().await.ok().map(|usage| usage.memory_peak_bytes);
    let verdict = match &ended.cause {
        Cause::Killed { by } if by != pass::READER_GONE => Verdict::of(&ended.cause),
        _ if passed.is_cut => passed
            .unwritten
            .as_ref()
            .map_or_else(Verdict::output_closed, Verdict::unwritten),
        cause => Verdict::of(cause),
    };
    let details = details(&ended, peak, &passed);
    let end = End {
        verdict,
        outcome: "ok",
        passed,
    };
    (end, details)
}

fn details(ended: &Ended, peak: Option<u64>, passed: &Passed) -> Value {
    let mut details = json!({ "cause": ended.cause, "duration_ms": ended.duration.as_millis() as u64,
        "cpu_ms": ended.cpu.as_millis() as u64, "max_rss_bytes": ended.max_rss_bytes, "memory_peak_bytes": peak,
        "killed_descendants": ended.killed_descendants, "stdout_bytes": passed.stdout_bytes,
        "stderr_bytes": passed.stderr_bytes });
    if let Some(unknown) = &ended.unknown {
        details["unknown"] = unknown.as_str().into();
    }
    details
}

/// What is said and given at the end.
struct Report {
    verdict: Verdict,
    /// What went wrong around the command, as with its clean-up.
    failures: Vec<Error>,
    object: Value,
    passed: Passed,
}

impl Report {
    fn none(error: &Error) -> Self {
        Self {
            verdict: Verdict::no_sandbox(error),
            failures: Vec::new(),
            object: json!({ "error": { "kind": error.kind, "message": error.message, "hint": error.hint } }),
            passed: Passed::default(),
        }
    }

    /// Says it, and gives the exit code.
    fn give(self, as_json: bool) -> Exit {
        // Nobody may be reading any more: nothing here can fail for that.
        let mut stderr = std::io::stderr();
        let said = self.verdict.said.iter().cloned();
        for text in said.chain(self.failures.iter().map(|error| error.message.clone())) {
            let _ = writeln!(stderr, "exuvia: {text}");
        }
        let code = match (self.verdict.code, self.failures.is_empty()) {
            // The command went well, but what was around it did not.
            (0, false) => verdict::NO_SANDBOX,
            (code, _) => code,
        };
        if as_json {
            let object = merged(self.object, json!({ "exit_code": code }));
            let separator = if self.passed.is_mid_line { "\n" } else { "" };
            let _ = writeln!(std::io::stdout(), "{separator}{object}");
        }
        Exit::Passed(code)
    }
}

fn merged(mut object: Value, more: Value) -> Value {
    if let (Value::Object(object), Value::Object(more)) = (&mut object, more) {
        object.extend(more);
    }
    object
}
