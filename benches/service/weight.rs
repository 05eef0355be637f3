//! What a sandbox that does nothing costs: `EXUVIA_BENCH_IDLE` (1000) of them at once, and `EXUVIA_BENCH_IDLE_PYTHON` (200) in
//! which Python waits.

use std::collections::HashSet;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use futures::{StreamExt, TryStreamExt};

use crate::peers::{self, Result};
use crate::server::Server;

pub async fn measure() -> Result<String> {
    let agents = agents(peers::setting("EXUVIA_BENCH_IDLE", 1000)?).await?;
    let pythons = pythons(peers::setting("EXUVIA_BENCH_IDLE_PYTHON", 200)?).await?;
    Ok(format!("{agents}\n{pythons}"))
}

/// With nothing in them but the guest.
async fn agents(count: usize) -> Result<String> {
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
    let own = own_memory(&server)? / (count + 1) as f64;
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
         made in                                          {:8.2} s\n\
         killed in                                        {:8.2} s\n\
         own memory of each (proportional set)            {own:8.3} MiB\n\
         MemAvailable fell by, for each (kernel included) {:8.3} MiB\n\
         processor time of the server in 5 idle seconds   {:8} ms\n",
        made.as_secs_f64(),
        ended.as_secs_f64(),
        fell as f64 / 1024.0 / count as f64,
        idle * 10,
    ))
}

/// Parked, with an interpreter that waits for code.
async fn pythons(count: usize) -> Result<String> {
    let before = available()?;
    let server = Server::start(&["--pool", &format!("default={count}..{count}")]).await?;
    let begun = Instant::now();
    server.fill().await?;
    let made = begun.elapsed();
    let fell = before.saturating_sub(available()?);
    let own = own_memory(&server)? / count as f64;
    server.stop().await?;
    Ok(format!(
        "{count} parked sandboxes in which Python waits\n\n\
         made in                                          {:8.2} s\n\
         own memory of each (proportional set)            {own:8.3} MiB\n\
         MemAvailable fell by, for each (with the server) {:8.3} MiB\n",
        made.as_secs_f64(),
        fell as f64 / 1024.0 / count as f64,
    ))
}

/// MiB that the processes in all sandboxes of a server have, what they share divided among them.
fn own_memory(server: &Server) -> Result<f64> {
    let mut kib = 0;
    for process in processes(server)? {
        // One that has just ended has none.
        let memory = fs::read_to_string(process.join("smaps_rollup")).unwrap_or_default();
        let pss = memory.lines().find_map(|line| line.strip_prefix("Pss:"));
        kib += pss.map_or(Ok(0), |text| text.trim().trim_end_matches(" kB").trim().parse::<u64>())?;
    }
    Ok(kib as f64 / 1024.0)
}

/// Processor time that all that runs in a server's sandboxes has used so far.
pub fn cpu_of_sandboxes(server: &Server) -> Result<Duration> {
    let mut ticks = 0;
    for process in processes(server)? {
        ticks += cpu_of(
            process
                .file_name()
                .and_then(|name| name.to_str()?.parse().ok())
                .ok_or("no number")?,
        )?;
    }
    Ok(Duration::from_millis(ticks * 10))
}

/// The directories in `/proc` of the processes in all sandboxes of a server.
fn processes(server: &Server) -> Result<Vec<PathBuf>> {
    let ids: HashSet<String> = server.sandboxes()?.into_iter().collect();
    let is_ours = |process: &PathBuf| {
        let groups = fs::read_to_string(process.join("cgroup")).unwrap_or_default();
        let mut groups = groups.lines().filter_map(|line| line.rsplit('/').next());
        groups.any(|group| ids.contains(group))
    };
    let all = fs::read_dir("/proc")?.flatten().map(|entry| entry.path());
    Ok(all.filter(is_ours).collect())
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
