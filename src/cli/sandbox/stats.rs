//! `stats`: what a sandbox uses, line by line.

use std::time::Duration;

use super::files::line_out;
use super::life::span;
use super::show;
use crate::api::json::Unset;
use crate::api::{json as proto_json, proto};
use crate::cli::{Context, Error, Exit, remote};

#[derive(Debug, clap::Args)]
pub(super) struct Stats {
    /// The sandbox (`sbx_…`).
    id: String,
    /// Tell it once.
    #[arg(long)]
    once: bool,
    /// Between two lines; at least 100ms.
    #[arg(long, default_value = "1s", value_name = "TIME", value_parser = crate::cli::duration)]
    interval: Duration,
}

/// One line for each sample, until the sandbox ends; with --json one object a line.
pub(super) async fn stats(args: Stats, server: &str, context: &Context) -> Result<Exit, Error> {
    let request = proto::StatsRequest {
        sandbox_id: args.id,
        interval: Some(span(args.interval)?),
        once: args.once,
    };
    let mut samples = remote::sandboxes(server).await?.stats(request).await?.into_inner();
    let mut before = None;
    if !context.json && line_out(HEAD).is_err() {
        return Ok(Exit::Ok);
    }
    while let Some(sample) = samples.message().await? {
        let line = match context.json {
            true => proto_json::message("SandboxStats", &sample, Unset::Shown).to_string(),
            false => line(&sample, before.as_ref()),
        };
        if line_out(&line).is_err() {
            // Nobody reads any more.
            return Ok(Exit::Ok);
        }
        before = Some(sample);
    }
    Ok(Exit::Ok)
}

const HEAD: &str =
    "   CPU   CPU TIME  MEMORY / LIMIT           PEAK        PIDS / LIMIT  DISK / LIMIT             OOM  FORKS REFUSED";

fn line(now: &proto::SandboxStats, before: Option<&proto::SandboxStats>) -> String {
    let percent = before
        .and_then(|before| cpu_percent(now, before))
        .map_or("-".to_owned(), |percent| format!("{percent:.0}%"));
    let of = |used: u64, limit: u64| match limit {
        0 => show::size(used),
        limit => format!("{} / {}", show::size(used), show::size(limit)),
    };
    format!(
        "{percent:>6}  {:>9}  {:<23}  {:<10}  {:<12}  {:<23}  {:<3}  {}",
        format!("{:.2}s", now.cpu_us as f64 / 1e6),
        of(now.memory_bytes, now.memory_limit_bytes),
        show::size(now.memory_peak_bytes),
        format!("{} / {}", now.pids, now.pids_limit),
        of(now.disk_bytes, now.disk_limit_bytes),
        now.oom_kills,
        now.forks_refused,
    )
}

/// Of one processor; `None` when no time has gone by.
fn cpu_percent(now: &proto::SandboxStats, before: &proto::SandboxStats) -> Option<f64> {
    let (Some(at), Some(then)) = (&now.at, &before.at) else {
        return None;
    };
    let millis = show::millis(at).0.saturating_sub(show::millis(then).0);
    (millis > 0).then(|| now.cpu_us.saturating_sub(before.cpu_us) as f64 / (millis as f64 * 1000.0) * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_a_line_of_the_table() {
        let sample = |seconds: i64, cpu_us: u64| proto::SandboxStats {
            at: Some(prost_types::Timestamp { seconds, nanos: 0 }),
            memory_bytes: 12 << 20,
            memory_peak_bytes: 1_600_000,
            memory_limit_bytes: 512 << 20,
            cpu_us,
            cpus_limit: 1.0,
            pids: 3,
            pids_limit: 256,
            oom_kills: 1,
            forks_refused: 12,
            disk_bytes: 4096,
            disk_limit_bytes: 0,
        };
        let (first, second) = (sample(0, 1_000_000), sample(2, 2_500_000));
        insta::assert_snapshot!(format!(
            "{HEAD}\n{}\n{}",
            line(&first, None),
            line(&second, Some(&first))
        ));
    }
}
