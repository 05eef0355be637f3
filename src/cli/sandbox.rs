//! `exuvia sandbox …`: sandboxes without an agent.
//!
//! `run` makes one here for a single command (`embedded`, with `plan`, `pass` and `trail`). All others ask a server for
//! sandboxes that stay: `life` (create … kill), `snapshots`, `exec` (over `stream`, `terminal`, `screen` and `input`), `copy`, `files`,
//! `stats`, `forward`, `code`. How a command ended becomes an exit code in `verdict`, for both ways.

mod code;
mod copy;
mod embedded;
mod exec;
mod files;
mod forward;
mod input;
mod life;
mod pass;
mod plan;
mod screen;
mod show;
mod snapshots;
mod stats;
mod stream;
mod terminal;
mod trail;
mod verdict;

use tonic::transport::Channel;

use super::{Context, Error, Exit, remote};
use crate::api::proto::sandbox_service_client::SandboxServiceClient;

type Client = SandboxServiceClient<Channel>;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

/// What is asked of a server.
#[derive(Debug, clap::Args)]
struct At<T: clap::Args> {
    #[command(flatten)]
    what: T,
    /// The server.
    #[arg(long, env = "EXUVIA_SERVER", default_value = remote::DEFAULT, value_name = "URL")]
    server: String,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    /// Run one command in a fresh sandbox, which ends with it; needs no server.
    #[command(after_help = embedded::NOTES)]
    Run(Box<embedded::Run>),
    /// Make a sandbox on a server; prints its id.
    Create(Box<At<life::Create>>),
    /// Show a sandbox.
    Get(At<life::One>),
    /// List sandboxes, newest first.
    List(At<life::List>),
    /// Set when it expires: so long from now.
    Renew(At<life::Renew>),
    /// Freeze its processes; time limits go on.
    Pause(At<life::One>),
    /// Let its processes go on.
    Resume(At<life::One>),
    /// Keep its workspace as it is now; prints the tree, which `create --workspace` takes.
    Snapshot(At<life::Snapshot>),
    /// List the snapshots with memory, newest first, or delete some.
    Snapshots(At<snapshots::Snapshots>),
    /// End sandboxes; one that has ended already is no error.
    Kill(At<life::Kill>),
    /// Run a command in a sandbox.
    #[command(after_help = exec::NOTES)]
    Exec(Box<At<exec::Exec>>),
    /// Go on with a command that runs or has ended lately: its output from an offset, then what it does.
    #[command(after_help = exec::ATTACH_NOTES)]
    Attach(At<exec::Attach>),
    /// List the commands of a sandbox: those that run, and those that ended lately.
    Ps(At<exec::Ps>),
    /// Send a signal to a command.
    Signal(At<exec::Signal>),
    /// Copy files into a sandbox or out of it.
    #[command(after_help = copy::NOTES)]
    Cp(At<copy::Copy>),
    /// List files.
    Ls(At<files::Ls>),
    /// Tell changes below a directory as they happen.
    Watch(At<files::Watch>),
    /// What it uses, and of how much.
    Stats(At<stats::Stats>),
    /// Listen here, and pass connections on to a port inside.
    PortForward(At<forward::Forward>),
    /// Run code in a language kernel.
    RunCode(At<code::RunCode>),
    /// The language kernels that keep state between `run-code` calls.
    #[command(subcommand)]
    Context(code::Contexts),
}

pub async fn run(args: Args, context: &Context) -> Result<Exit, Error> {
    match args.action {
        Action::Run(run) => embedded::run(*run, context).await,
        Action::Create(at) => life::create(at.what, &at.server, context).await,
        Action::Get(at) => life::get(at.what, &at.server, context).await,
        Action::List(at) => life::list(at.what, &at.server, context).await,
        Action::Renew(at) => life::renew(at.what, &at.server, context).await,
        Action::Pause(at) => life::pause(at.what, &at.server, context).await,
        Action::Resume(at) => life::resume(at.what, &at.server, context).await,
        Action::Snapshot(at) => life::snapshot(at.what, &at.server, context).await,
        Action::Snapshots(at) => snapshots::snapshots(at.what, &at.server, context).await,
        Action::Kill(at) => life::kill(at.what, &at.server, context).await,
        Action::Exec(at) => exec::exec(at.what, &at.server, context).await,
        Action::Attach(at) => exec::attach(at.what, &at.server, context).await,
        Action::Ps(at) => exec::ps(at.what, &at.server, context).await,
        Action::Signal(at) => exec::signal(at.what, &at.server, context).await,
        Action::Cp(at) => copy::copy(at.what, &at.server, context).await,
        Action::Ls(at) => files::ls(at.what, &at.server, context).await,
        Action::Watch(at) => files::watch(at.what, &at.server, context).await,
        Action::Stats(at) => stats::stats(at.what, &at.server, context).await,
        Action::PortForward(at) => forward::forward(at.what, &at.server, context).await,
        Action::RunCode(at) => code::run_code(at.what, &at.server, context).await,
        Action::Context(contexts) => code::contexts(contexts, context).await,
    }
}
