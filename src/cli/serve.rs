//! `exuvia serve`: the gRPC server.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use super::{Context, Error, Exit};
use crate::api::server;
use crate::assembly::{self, Config, ServerLock};
use crate::border;
use crate::error::Kind;
use crate::fleet::{self, OnShutdown, Stock};
use crate::sandbox::BackendName;

/// How long running steps may take to stop.
const DRAIN: Duration = Duration::from_secs(20);

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Loopback address to listen on; port 0 lets the kernel choose.
    #[arg(long, default_value = "127.0.0.1:7070", env = "EXUVIA_LISTEN")]
    listen: SocketAddr,
    /// Runs driven side by side; more wait as QUEUED.
    #[arg(long, default_value_t = 8, value_name = "N")]
    parallel_runs: usize,
    /// A run that stood still for longer has its model told to look again before it goes on.
    #[arg(long, value_parser = super::duration, default_value = "6h", env = "EXUVIA_STALE_AFTER", value_name = "TIME")]
    stale_after: Duration,
    /// How long another process on the same data may stand still (SIGSTOP) before its runs are taken over.
    #[arg(long, value_parser = super::duration, default_value = "5m", value_name = "TIME")]
    lease: Duration,
    /// Sandboxes for direct use that there may be at once; more wait for a place, or are refused.
    #[arg(long, default_value_t = 100, value_name = "N")]
    max_sandboxes: usize,
    /// Sandboxes to be made ahead, at least and at most; may be repeated.
    #[arg(long = "pool", value_name = "POLICY[:IMAGE]=MIN..MAX")]
    pools: Vec<Stock>,
    /// What becomes of sandboxes for direct use at SIGTERM: the next server goes on with them, or they end.
    #[arg(long, value_enum, default_value_t = OnShutdown::Keep)]
    on_shutdown: OnShutdown,
    #[command(flatten)]
    egress: border::Operator,
}

pub async fn run(args: Args, context: &Context) -> Result<Exit, Error> {
    // Address and directory first: when one is taken, nothing has been touched.
    let listener = server::bind(args.listen).await.map_err(|error| {
        Error::of(error.kind(), &error).hint("choose another with --listen 127.0.0.1:PORT (0 = any free one)")
    })?;
    let address = listener
        .local_addr()
        .map_err(|error| Error::of(Kind::Internal, &error))?;
    let mut lock = ServerLock::take(&context.data_dir)
        .await
        .map_err(|error| Error::of(error.kind(), &error).hint("use that server, or give another --data-dir"))?;
    lock.describe(address)
        .map_err(|error| Error::of(Kind::Internal, &error))?;
    let mut terminate = signal(SignalKind::terminate()).map_err(|error| Error::of(Kind::Internal, &error))?;
    let config = Config {
        data_dir: context.data_dir.clone(),
        parallel_runs: args.parallel_runs,
        stale_after: args.stale_after,
        lease: args.lease,
        egress: args.egress,
    };
    let fleet = fleet::Config {
        max_sandboxes: args.max_sandboxes,
        on_shutdown: args.on_shutdown,
        stocks: args.pools,
    };
    let (service, parts) = assembly::open(&config).await?;
    let fleet = parts.fleet(service.workspaces().clone(), fleet).await?;
    let recovered = fleet.recover().await;
    let reaped = parts.reap(&[BackendName::Oci, BackendName::Docker]).await;
    let resumed = service.recover().await?;
    fleet.fill_pool();
    let all_reaped = [recovered.reaped, reaped].concat();
    let text = format!(
        "listening on {address}; data in {}; resumed {} runs, took over {} sandboxes, removed {} stray sandboxes",
        context.data_dir.display(),
        resumed.len(),
        recovered.adopted.len(),
        all_reaped.len()
    );
    context.finish(
        &json!({ "listening": address.to_string(), "data_dir": context.data_dir, "resumed": resumed,
            "adopted": recovered.adopted, "reaped": all_reaped }),
        &text,
    );
    let stop = service.stopping();
    let serving = server::serve(service.clone(), fleet.clone(), listener, stop.clone());
    tokio::pin!(serving);
    let ended = tokio::select! {
        result = &mut serving => Some(result),
        _ = terminate.recv() => None,
        _ = tokio::signal::ctrl_c() => None,
    };
    stop.cancel();
    // Calls that are being answered get their answers; streams end.
    let drained = async {
        match ended {
            Some(result) => result,
            None => tokio::time::timeout(DRAIN, serving).await.unwrap_or(Ok(())),
        }
    };
    // The fleet first: its last records are brought to the audit file by the service's end.
    let ending = async {
        let mut still = fleet.shut_down(DRAIN).await;
        still.extend(service.shut_down(DRAIN).await);
        still
    };
    let (ended, still) = tokio::join!(drained, ending);
    if !still.is_empty() {
        tracing::warn!(?still, "did not stop in time; their runs go on at the next start");
    }
    ended.map_err(|error| Error::of(error.kind(), &error))?;
    Ok(Exit::Ok)
}
