//! `port-forward`: connections here become connections inside, one Dial stream each.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use futures::StreamExt;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;

use super::Client;
use super::life::span;
use crate::api::proto;
use crate::cli::{Context, Error, Exit, remote};
use crate::error::Kind;

#[derive(Debug, clap::Args)]
pub(super) struct Forward {
    /// The sandbox (`sbx_…`).
    id: String,
    /// LOCAL:REMOTE, or one number for both; LOCAL 0 = any free port. May be repeated.
    #[arg(required = true, value_name = "LOCAL:REMOTE", value_parser = ports)]
    ports: Vec<Ports>,
    /// Wait this long for something to listen inside, for each connection [default: do not wait].
    #[arg(long, value_name = "TIME", value_parser = crate::cli::duration)]
    wait: Option<Duration>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Ports {
    local: u16,
    inside: u16,
}

fn ports(text: &str) -> Result<Ports, String> {
    let (local, inside) = text.split_once(':').unwrap_or((text, text));
    let number = |text: &str| text.parse::<u16>().map_err(|_| format!("`{text}` is no port"));
    let ports = Ports {
        local: number(local)?,
        inside: number(inside)?,
    };
    match ports.inside {
        0 => Err("a port inside is from 1 to 65535".to_owned()),
        _ => Ok(ports),
    }
}

/// Bytes read at a time.
const CHUNK: usize = 64 << 10;
/// Connections side by side, over all ports.
const MOST: usize = 512;

/// Until Ctrl-C, or until the sandbox is gone.
pub(super) async fn forward(args: Forward, server: &str, context: &Context) -> Result<Exit, Error> {
    let mut client = remote::sandboxes(server).await?;
    // A sandbox that is not there is told now, not at the first connection.
    let request = proto::GetSandboxRequest {
        sandbox_id: args.id.clone(),
    };
    client.get(request).await?;
    let mut stop = Stop::listen()?;
    let start = proto::DialStart {
        sandbox_id: args.id,
        port: 0,
        timeout: args.wait.map(span).transpose()?,
        by: crate::cli::person(),
    };
    let mut listeners = JoinSet::new();
    let mut told = Vec::new();
    for Ports { local, inside } in args.ports {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, local)).await.map_err(|error| {
            Error::new(
                Kind::Unavailable,
                format!("cannot listen on 127.0.0.1:{local}: {error}"),
            )
            .hint("choose another LOCAL port (0 = any free one)")
        })?;
        let address = listener
            .local_addr()
            .map_err(|error| Error::of(Kind::Internal, &error))?;
        told.push((address, inside));
        let start = proto::DialStart {
            port: inside.into(),
            ..start.clone()
        };
        listeners.spawn(accept(listener, client.clone(), start));
    }
    tell(&told, context);
    tokio::select! {
        () = stop.asked() => Ok(Exit::Ok),
        Some(ended) = listeners.join_next() => match ended {
            Ok(error) => Err(error),
            Err(error) => Err(Error::new(Kind::Internal, error.to_string())),
        },
    }
}

/// With --json that one object is on a line of its own, and first: it tells the ports that were chosen.
fn tell(told: &[(SocketAddr, u16)], context: &Context) {
    let objects: Vec<Value> = told
        .iter()
        .map(|(address, inside)| json!({ "listening": address.to_string(), "port": inside }))
        .collect();
    let lines: Vec<String> = told
        .iter()
        .map(|(address, inside)| format!("{address} -> port {inside} of the sandbox"))
        .collect();
    context.finish(&json!({ "forwarding": objects }), &lines.join("\n"));
}

struct Stop {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

impl Stop {
    fn listen() -> Result<Self, Error> {
        let listen = |kind| signal(kind).map_err(|error| Error::of(Kind::Internal, &error));
        Ok(Self {
            interrupt: listen(SignalKind::interrupt())?,
            terminate: listen(SignalKind::terminate())?,
        })
    }

    async fn asked(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

/// Takes connections; ends when the sandbox is gone.
async fn accept(listener: TcpListener, client: Client, start: proto::DialStart) -> Error {
    let mut connections: JoinSet<Result<(), Error>> = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept(), if connections.len() < MOST => match accepted {
                Ok((stream, _)) => {
                    connections.spawn(dial(client.clone(), start.clone(), stream));
                }
                Err(error) => {
                    // As with too many open files: it may pass.
                    err!("cannot take a connection: {error}");
                    tokio::time::sleep(Duration::from_millis(200)).await;
                }
            },
            Some(ended) = connections.join_next() => match ended {
                Ok(Ok(())) => {}
                Ok(Err(error)) if is_final(&error) => return error,
                Ok(Err(error)) => err!("connection to port {}: {error}", start.port),
                Err(error) => err!("connection to port {}: {error}", start.port),
            },
        }
    }
}

/// Whether no further connection can do better: the sandbox is gone.
fn is_final(error: &Error) -> bool {
    match error.kind {
        Kind::NotFound => true,
        Kind::WrongState => error.reason.as_deref().is_some_and(|reason| {
            reason.starts_with("SANDBOX_") && !matches!(reason, "SANDBOX_PAUSED" | "SANDBOX_NOT_READY")
        }),
        Kind::Invalid
        | Kind::Denied
        | Kind::Exists
        | Kind::Conflict
        | Kind::Exhausted
        | Kind::Deadline
        | Kind::Unavailable
        | Kind::Internal => false,
    }
}

/// One connection, with an end of its own in each direction.
async fn dial(mut client: Client, start: proto::DialStart, stream: TcpStream) -> Result<(), Error> {
    use proto::dial_request::Kind as Sent;
    let (queue, requests) = mpsc::channel(2);
    let first = proto::DialRequest {
        kind: Some(Sent::Start(start)),
    };
    let requests = futures::stream::iter([first])
        .chain(ReceiverStream::new(requests).map(|kind| proto::DialRequest { kind: Some(kind) }));
    let answers = client.dial(requests).await?.into_inner();
    let (from, to) = stream.into_split();
    let (up, down) = tokio::join!(send(from, queue), receive(answers, to));
    down.and(up)
}

async fn send(mut from: OwnedReadHalf, queue: mpsc::Sender<proto::dial_request::Kind>) -> Result<(), Error> {
    use proto::dial_request::Kind as Sent;
    let mut chunk = vec![0; CHUNK];
    loop {
        // The other direction has ended when the queue is closed: nobody inside reads any more.
        let read = tokio::select! {
            read = from.read(&mut chunk) => read,
            () = queue.closed() => return Ok(()),
        };
        let sent = match read {
            Ok(0) => {
                let _ = queue.send(Sent::Eof(true)).await;
                return Ok(());
            }
            Ok(got) => queue.send(Sent::Data(chunk[..got].to_vec())).await,
            // A client that went away; the queue closes, and with it the stream.
            Err(_) => return Ok(()),
        };
        if sent.is_err() {
            return Ok(());
        }
    }
}

async fn receive(mut answers: tonic::Streaming<proto::DialResponse>, mut to: OwnedWriteHalf) -> Result<(), Error> {
    use proto::dial_response::Kind as Got;
    while let Some(answer) = answers.message().await? {
        let written = match answer.kind {
            Some(Got::Data(data)) => to.write_all(&data).await,
            Some(Got::Eof(_)) => to.shutdown().await,
            Some(Got::Connected(_)) | None => Ok(()),
        };
        if written.is_err() {
            // The client here went away.
            return Ok(());
        }
    }
    let _ = to.shutdown().await;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_pairs_or_one_number() {
        let pair = |local, inside| Ok(Ports { local, inside });
        assert_eq!(ports("8080:80"), pair(8080, 80));
        assert_eq!(ports("3000"), pair(3000, 3000));
        assert_eq!(ports("0:80"), pair(0, 80));
        for bad in ["", "x", "80:", ":80", "80:0", "70000", "1:2:3"] {
            assert!(ports(bad).is_err(), "{bad}");
        }
    }
}
