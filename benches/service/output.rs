//! How fast the output of a command comes to its client.

use std::time::Instant;

use exuvia::api::proto::ExecStart;

use crate::peers::Result;
use crate::server::Server;

const BYTES: usize = 512 << 20;
const TRIES: usize = 3;

pub async fn measure() -> Result<String> {
    let server = Server::start(&[]).await?;
    let id = server.create().await?;
    let mut rates = Vec::new();
    for _ in 0..TRIES {
        rates.push(once(&server, &id).await? / 1e6);
    }
    server.kill(&id).await?;
    server.stop().await?;
    rates.sort_by(f64::total_cmp);
    Ok(format!(
        "output of one command, {} MiB, to the client: {:.0} MB/s (least {:.0}, most {:.0})\n",
        BYTES >> 20,
        rates[TRIES / 2],
        rates[0],
        rates[TRIES - 1],
    ))
}

async fn once(server: &Server, id: &str) -> Result<f64> {
    let start = ExecStart {
        sandbox_id: id.to_owned(),
        argv: ["head", "-c", &BYTES.to_string(), "/dev/zero"]
            .map(|word| word.as_bytes().to_vec())
            .into(),
        ..ExecStart::default()
    };
    let begun = Instant::now();
    let mut got = 0;
    server.exec(start, |data| got += data.len()).await?;
    let took = begun.elapsed();
    if got != BYTES {
        return Err(format!("{got} bytes came of {BYTES}").into());
    }
    Ok(BYTES as f64 / took.as_secs_f64())
}
