//! `exuvia approve RUN` and `exuvia deny RUN`.

use std::time::Duration;

use super::run::{Patience, follow};
use super::{Context, Error, Exit, remote, report};
use crate::api::{convert, proto};
use crate::assembly::{self, Config};
use crate::border;
use crate::sandbox::BackendName;
use crate::store::Signal;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The run (`run_…`) or its task (`task_…`).
    run: String,
    /// Which approval, when several are open.
    #[arg(long, value_name = "ID")]
    approval: Option<String>,
    /// Why, for the record and (when denied) for the model.
    #[arg(long, default_value = "", value_name = "TEXT")]
    reason: String,
    /// Who decides [default: the user].
    #[arg(long, value_name = "NAME")]
    by: Option<String>,
    /// Ask this server instead of the data directory.
    #[arg(long, env = "EXUVIA_SERVER", value_name = "URL")]
    server: Option<String>,
    #[command(flatten)]
    egress: border::Operator,
}

/// Which of the two commands it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Approve,
    Deny,
}

pub async fn run(args: Args, verdict: Verdict, context: &Context) -> Result<Exit, Error> {
    let approved = verdict == Verdict::Approve;
    let by = args.by.unwrap_or_else(super::person);
    if let Some(server) = args.server {
        let request = proto::DecideRequest {
            id: args.run,
            approval: args.approval.unwrap_or_default(),
            approved,
            by,
            reason: args.reason,
        };
        let run = remote::connect(&server).await?.decide(request).await?.into_inner();
        context.finish(&report::run(&run), &report::ending(&run));
        return Ok(Exit::Ok);
    }
    let approval = args.approval.map(|id| id.parse()).transpose();
    let approval = approval.map_err(|error: crate::ids::Invalid| Error::of(crate::error::Kind::Invalid, &error))?;
    let config = Config {
        egress: args.egress,
        ..Config::of(&context.data_dir, 1)
    };
    let (service, parts) = assembly::open(&config).await?;
    parts.reap(&[BackendName::Oci]).await;
    let signal = Signal::Decide {
        approval,
        approved,
        by,
        reason: args.reason,
    };
    let view = service.signal(&args.run, signal).await?;
    // Whoever has the run goes on with it: a server, a waiting `exuvia run`, or this process.
    let exit = if service.is_elsewhere(&view.record) {
        let run = convert::run(&view);
        context.finish(&report::run(&run), &report::ending(&run));
        // To decide is what was asked; the run goes on elsewhere.
        Ok(Exit::Ok)
    } else {
        follow(&service, &view.record.run, Patience::Ask, context, None).await
    };
    service.shut_down(Duration::from_secs(10)).await;
    exit
}
