//! How much a machine gets done: sandboxes and steps a second, and how soon a pool is full again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;

use crate::STEP;
use crate::peers::{Engine, Result, told};
use crate::server::Server;

/// In flight at a time.
const WIDTH: usize = 8;
/// How long a sustained rate is measured.
const TIME: Duration = Duration::from_secs(10);
/// Made ahead for a burst.
const BURST: usize = 400;

pub async fn measure() -> Result<String> {
    let mut text = format!("per second, {WIDTH} in flight\n\n");
    let mut row = |name: &str, rate: f64| text += &format!("{name:58} {rate:10.1}\n");

    let bare = Arc::new(Server::start(&[]).await?);
    let server = Arc::clone(&bare);
    row(
        "new sandbox, pool empty, true, killed",
        sustained(move || {
            let server = Arc::clone(&server);
            async move { server.create_true_kill().await.map(drop) }
        })
        .await?,
    );
    let probe = bare.create().await?;
    let can_code = bare.can_code(&probe, STEP).await?;
    bare.kill(&probe).await?;
    if can_code {
        let server = Arc::clone(&bare);
        row(
            "new sandbox, pool empty, python, killed",
            sustained(move || {
                let server = Arc::clone(&server);
                async move { server.create_code_kill(STEP).await }
            })
            .await?,
        );
    }
    let pooled = Arc::new(Server::start(&["--pool", &format!("default={BURST}..{BURST}")]).await?);
    pooled.fill().await?;
    let server = Arc::clone(&pooled);
    row(
        "sandboxes from the pool, refilled, true, killed",
        sustained(move || {
            let server = Arc::clone(&server);
            async move { server.create_true_kill().await.map(drop) }
        })
        .await?,
    );
    if can_code {
        row("python in sandboxes from the pool, a burst of 400", burst().await?);
        pooled.fill().await?;
        let server = Arc::clone(&pooled);
        row(
            "python in sandboxes from the pool, refilled, sustained",
            sustained(move || {
                let server = Arc::clone(&server);
                async move { server.create_code_kill(STEP).await }
            })
            .await?,
        );
    }
    if let Some(docker) = told("docker", Engine::open().await) {
        let docker = Arc::new(docker);
        let engine = Arc::clone(&docker);
        row(
            "docker: create, start, wait, logs, delete; true",
            sustained(move || {
                let engine = Arc::clone(&engine);
                async move { engine.cold(&["true"]).await }
            })
            .await?,
        );
        docker.close().await?;
    }

    stop(bare).await?;
    stop(pooled).await?;
    Ok(text)
}

/// Python steps a second, each in a sandbox of its own, from a stock that is filled again in quiet moments only.
pub async fn burst() -> Result<f64> {
    let server = Arc::new(Server::start(&["--pool", &format!("default=1..{BURST}")]).await?);
    server.fill().await?;
    let begun = Instant::now();
    let steps = futures::stream::iter(0..BURST).map(|_| {
        let server = Arc::clone(&server);
        async move { server.create_and_code(STEP).await }
    });
    let ids: Vec<Result<String>> = steps.buffer_unordered(WIDTH).collect().await;
    let took = begun.elapsed();
    for id in ids {
        server.kill(&id?).await?;
    }
    stop(server).await?;
    Ok(BURST as f64 / took.as_secs_f64())
}

async fn stop(server: Arc<Server>) -> Result<()> {
    Arc::into_inner(server).ok_or("a server is still in use")?.stop().await
}

/// How often `work` is done in a second.
async fn sustained<F>(work: impl Fn() -> F) -> Result<f64>
where
    F: Future<Output = Result<()>>,
{
    let begun = Instant::now();
    let mut done = futures::stream::repeat_with(&work)
        .take_while(|_| futures::future::ready(begun.elapsed() < TIME))
        .buffer_unordered(WIDTH);
    let mut count = 0_usize;
    while let Some(result) = done.next().await {
        result?;
        count += 1;
    }
    Ok(count as f64 / begun.elapsed().as_secs_f64())
}

/// How soon a pool that was emptied is full again, and what that costs.
pub async fn refill() -> Result<String> {
    let server = Arc::new(Server::start(&["--pool", &format!("default={BURST}..{BURST}")]).await?);
    server.fill().await?;
    let ids: Vec<Result<String>> = futures::stream::iter(0..BURST)
        .map(|_| server.create())
        .buffer_unordered(WIDTH)
        .collect()
        .await;
    let (begun, busy) = (Instant::now(), busy()?);
    server.fill().await?;
    let (took, busy) = (begun.elapsed(), self::busy()? - busy);
    for id in ids {
        server.kill(&id?).await?;
    }
    stop(server).await?;
    Ok(format!(
        "a pool of {BURST}, emptied, filled again\n\n\
         sandboxes with Python that waits, a second    {:8.1}\n\
         processor time of the whole machine for each  {:8.1} ms\n",
        BURST as f64 / took.as_secs_f64(),
        busy.as_secs_f64() * 1e3 / BURST as f64,
    ))
}

/// Processor time of the whole machine that was not idle, from proc(5): other work is in it.
fn busy() -> Result<Duration> {
    let text = std::fs::read_to_string("/proc/stat")?;
    let all = text.lines().next().unwrap_or_default().split_whitespace().skip(1);
    let ticks: Vec<u64> = all.map(str::parse).collect::<std::result::Result<_, _>>()?;
    // user, nice, system, idle, iowait, irq, softirq; what follows is in those, or not ours.
    let used = ticks.iter().take(7).sum::<u64>() - ticks.iter().skip(3).take(2).sum::<u64>();
    Ok(Duration::from_millis(used * 10))
}
