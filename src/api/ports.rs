//! Connections to ports inside: bytes both ways, each half closed by itself.

use std::time::Duration;

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tonic::{Response, Streaming};

use super::convert::{duration_in, person};
use super::proto::{self, dial_request, dial_response};
use super::status::{self, invalid};
use super::{Answer, Out};
use crate::fleet::{Error, Fleet};

/// Bytes of a connection in one message.
const CHUNK: usize = 64 << 10;
/// Longest wait for something to listen.
const LONGEST_WAIT: Duration = Duration::from_secs(300);

pub async fn dial(fleet: &Fleet, mut words: Streaming<proto::DialRequest>) -> Answer<Out<proto::DialResponse>> {
    let first = words.message().await?.and_then(|request| request.kind);
    let Some(dial_request::Kind::Start(start)) = first else {
        return Err(invalid("the first message has `start`"));
    };
    let port = u16::try_from(start.port).ok().filter(|port| *port > 0);
    let port = port.ok_or_else(|| invalid("`port` is 1 to 65535"))?;
    let wait = duration_in(start.timeout, "timeout")?
        .unwrap_or_default()
        .min(LONGEST_WAIT);
    let failed = |error: Error| status::of_fleet(&error);
    let visit = fleet.visit(&start.sandbox_id, &person(start.by)?).map_err(failed)?;
    let dialled = visit.sandbox().dial(port, wait).await;
    let outcome = if dialled.is_ok() { "ok" } else { "failed" };
    visit.record("port.dialled", outcome, json!({ "port": port })).await;
    let dialled = match dialled {
        Ok(dialled) => dialled,
        Err(error) => return Err(failed(visit.failed(error).await)),
    };
    let (mut from, mut to) = dialled.into_split();
    let inward = async move {
        // Whatever ends it, the program inside sees the end of what it reads.
        while let Ok(Some(word)) = words.message().await {
            match word.kind {
                Some(dial_request::Kind::Data(data)) if to.write_all(&data).await.is_ok() => {}
                Some(dial_request::Kind::Data(_) | dial_request::Kind::Eof(_) | dial_request::Kind::Start(_))
                | None => {
                    break;
                }
            }
        }
        let _ = to.shutdown().await;
    };
    let (ended, end) = tokio::sync::oneshot::channel();
    fleet.spawn("inward half of a connection", move |stop| async move {
        tokio::select! {
            () = inward => {}
            () = stop.cancelled() => {}
            // The client went away. What it said last may wait for a program that does not read.
            Err(_) = end => {}
        }
    });
    let outward = async_stream::stream! {
        // Dropped with the stream, which is how that half hears of a client that went away.
        let mut ended = Some(ended);
        yield word(dial_response::Kind::Connected(true));
        let mut buffer = vec![0; CHUNK];
        loop {
            match from.read(&mut buffer).await {
                Ok(0) => {
                    // This half alone.
                    let _ = ended.take().map(|ended| ended.send(()));
                    // What ends with its sandbox has not said all that it had to.
                    yield match visit.over() {
                        Some(over) => Err(failed(over)),
                        None => word(dial_response::Kind::Eof(true)),
                    };
                    return;
                }
                Ok(length) => yield word(dial_response::Kind::Data(buffer[..length].to_vec())),
                Err(error) => {
                    if let Some(over) = visit.over() {
                        yield Err(failed(over));
                        return;
                    }
                    yield Err(tonic::Status::unavailable(format!("the connection broke: {error}")));
                    return;
                }
            }
        }
    };
    let stop = fleet.stopping();
    let outward = futures::StreamExt::take_until(outward, async move { stop.cancelled().await });
    Ok(Response::new(Box::pin(outward)))
}

fn word(kind: dial_response::Kind) -> Result<proto::DialResponse, tonic::Status> {
    Ok(proto::DialResponse { kind: Some(kind) })
}
