//! What a sandbox that does nothing costs. `EXUVIA_BENCH_IDLE` (1000) of them at once.

use std::fs;
use std::time::{Duration, Instant};

use futures::{StreamExt, TryStreamExt};

use crate::peers::{self, Result};
use crate::server::Server;

pub async fn measure() -> Result<String> {
    let count = peers::setting("EXUVIA_BENCH_IDLE", 1000)?;
    let server = Server::start(&[]).await?;
    // Whatever the server needs once, it has then.
    let first = server.create().await?;
    let before = available()?;
    let begun = Instant::now();
    let ids: Vec<String> = futures::stream::iter(0..count)
        .map(|_| server.create())
        .buffer_unordered(8)
        .try_collect()
        .await?;
    let made = begun.elapsed();
    let fell = before.saturating_sub(available()?);
    let cpu = cpu_of(server.pid())?;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let idle = cpu_of(server.pid())?.saturating_sub(cpu);
    let begun = Instant::now();
    futures::stream::iter(ids.iter().chain([&first]))
        .map(|id| server.kill(id))
        .buffer_unordered(8)
        .try_for_each(|()| async { Ok(()) })
        .await?;
    let ended = begun.elapsed();
    server.stop().await?;
    Ok(format!(
        "{count} idle sandboxes at once\n\n\
         made in                                      {:8.2} s\n\
         killed in                                    {:8.2} s\n\
         MemAvailable fell by, for each (host, kernel included) {:8.3} MiB\n\
         processor time of the server in 5 idle seconds {:8} ms\n",
        made.as_secs_f64(),
        ended.as_secs_f64(),
        fell as f64 / 1024.0 / count as f64,
        idle * 10,
    ))
}

/// KiB, from proc(5).
fn available() -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    Ok(line
        .ok_or("no MemAvailable")?
        .trim()
        .trim_end_matches(" kB")
        .trim()
        .parse()?)
}

/// Ticks of a hundredth of a second, from proc(5).
fn cpu_of(pid: u32) -> Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let rest = text.rsplit_once(')').ok_or("no name in stat")?.1;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    Ok(fields[11].parse::<u64>()? + fields[12].parse::<u64>()?)
}
