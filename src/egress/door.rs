//! The doors: what a client speaks until it is known where it wants to go, and how it hears the answer.

use std::io;
use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use super::border::{Border, Door, Inner};
use super::case::{Case, Denial, Stopped};
use super::http1::{self, Head, Stop, Violation};
use super::inspect::{self, Site};
use super::journal::{Channel, recorded_path};
use super::name::split_authority;
use super::rules::builtin;
use super::socks::{self, Bad, Reply};
use super::stream::{Rewind, Stream};
use super::tunnel;

impl Border {
    /// Serves one client until it is done. Dropping the future cuts it.
    pub async fn serve_stream(&self, door: Door, stream: impl Stream) {
        let inner = &self.0;
        let Ok(_open) = inner.meter.open() else {
            // Too many at once: nothing is read, the record says it.
            let mut case = Case::new(inner, door.channel(), b"", 0);
            case.deny(builtin::BUDGET_CONCURRENCY, "");
            return;
        };
        let serve = async {
            match door {
                Door::Http => http(inner, stream).await,
                Door::Socks => socks_door(inner, stream).await,
                Door::Transparent(original) => transparent(inner, original, stream).await,
            }
        };
        let out_of_time = async {
            match inner.meter.time_left() {
                Some(left) => tokio::time::sleep(left).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = serve => {}
            () = out_of_time => {}
            () = inner.stop.cancelled() => {}
        }
    }

    /// Serves all that connect, until the border closes.
    pub async fn serve_listener(&self, door: Door, listener: TcpListener) {
        let mut clients = JoinSet::new();
        loop {
            tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => {
                        if let Err(error) = stream.set_nodelay(true) {
                            tracing::debug!(%error, "a client is gone already");
                        }
                        let border = self.clone();
                        clients.spawn(async move { border.serve_stream(door, stream).await });
                    }
                    Err(error) => {
                        tracing::warn!(%error, "a client could not be let in");
                        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                    }
                },
                Some(_) = clients.join_next() => {}
                () = self.0.stop.cancelled() => break,
            }
        }
        while clients.join_next().await.is_some() {}
    }

    /// The same for DNS over TCP.
    pub async fn serve_dns_listener(&self, listener: TcpListener) {
        let mut clients = JoinSet::new();
        loop {
            tokio::select! {
                Ok((stream, _)) = listener.accept() => {
                    let border = self.clone();
                    clients.spawn(async move { border.serve_dns_stream(stream).await });
                }
                Some(_) = clients.join_next() => {}
                () = self.0.stop.cancelled() => return,
            }
        }
    }
}

impl Door {
    fn channel(self) -> Channel {
        match self {
            Self::Http => Channel::Http,
            Self::Socks => Channel::Socks,
            Self::Transparent(_) => Channel::Transparent,
        }
    }
}

/// How a client hears what became of its wish for a tunnel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Speech {
    Http,
    Socks,
    /// It does not know that it is heard.
    None,
}

impl Speech {
    pub async fn accept<S: Stream>(self, stream: &mut S) -> io::Result<()> {
        match self {
            Self::Http => {
                stream.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n").await?;
                stream.flush().await
            }
            Self::Socks => socks::reply(stream, Reply::Done).await,
            Self::None => Ok(()),
        }
    }

    pub async fn refuse<S: Stream>(self, stream: &mut S, stopped: &Stopped) {
        let said = match (self, stopped) {
            (Self::Http, Stopped::Denied(denial)) => refuse_http(stream, "403 Forbidden", denial).await,
            (Self::Http, Stopped::Unreachable(reason)) => {
                let body = format!("{}\n", serde_json::json!({ "error": "unreachable", "reason": reason }));
                answer(stream, "502 Bad Gateway", "", &body).await
            }
            (Self::Socks, Stopped::Denied(_)) => socks::reply(stream, Reply::Refused).await,
            (Self::Socks, Stopped::Unreachable(_)) => socks::reply(stream, Reply::Unreachable).await,
            (Self::None, _) => Ok(()),
        };
        if said.is_ok() {
            // Unread bytes would make the kernel throw the answer away.
            let _ = stream.shutdown().await;
            let mut rest = (&mut *stream).take(256 << 10);
            let mut nowhere = tokio::io::sink();
            let drain = tokio::io::copy(&mut rest, &mut nowhere);
            let _ = tokio::time::timeout(std::time::Duration::from_secs(2), drain).await;
        }
    }
}

async fn refuse_http<S: Stream>(stream: &mut S, status: &str, denial: &Denial) -> io::Result<()> {
    let rule = format!("x-exuvia-rule: {}\r\n", denial.rule);
    answer(stream, status, &rule, &denial.body()).await
}

async fn answer<S: Stream>(stream: &mut S, status: &str, headers: &str, body: &str) -> io::Result<()> {
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\nconnection: close\r\n{headers}\r\n"
    );
    stream.write_all(format!("{head}{body}").as_bytes()).await?;
    stream.flush().await
}

/// Answers a request that could not be read, and records it.
pub(super) async fn refuse_framing<S: Stream>(
    inner: &std::sync::Arc<Inner>,
    channel: Channel,
    host: &[u8],
    stream: &mut S,
    bad: Violation,
) {
    let mut case = Case::new(inner, channel, host, 0);
    let rule = match bad {
        Violation::Tls => builtin::NESTED_TUNNEL,
        _ => builtin::FRAMING,
    };
    let denial = case.deny(rule, bad.to_string());
    drop(case);
    if refuse_http(stream, "400 Bad Request", &denial).await.is_ok() {
        let _ = stream.shutdown().await;
    }
}

/// What comes next on a proxy connection.
enum Next {
    Tunnel(Head),
    Request,
    Bad(Violation),
    End,
}

async fn next<S: Stream>(stream: &mut Rewind<S>) -> io::Result<Next> {
    let mut held = Vec::new();
    loop {
        match http1::parse(&held) {
            Ok(Some(head)) if head.method == "CONNECT" => {
                stream.put_back(&held[head.length..]);
                return Ok(Next::Tunnel(head));
            }
            Ok(Some(_)) => {
                stream.put_back(&held);
                return Ok(Next::Request);
            }
            Ok(None) => {}
            Err(bad) => return Ok(Next::Bad(bad)),
        }
        if stream.read_buf(&mut held).await? == 0 {
            return Ok(if held.is_empty() {
                Next::End
            } else {
                Next::Bad(Violation::Cut)
            });
        }
    }
}

async fn http(inner: &std::sync::Arc<Inner>, stream: impl Stream) {
    let mut stream = Rewind::new(Vec::new(), stream);
    loop {
        match tokio::time::timeout(inner.limits.head_time, next(&mut stream)).await {
            Err(_) | Ok(Err(_) | Ok(Next::End)) => return,
            Ok(Ok(Next::Bad(bad))) => return refuse_framing(inner, Channel::Http, b"", &mut stream, bad).await,
            Ok(Ok(Next::Tunnel(head))) => return connect(inner, &head, stream).await,
            Ok(Ok(Next::Request)) => {}
        }
        let (held, raw) = stream.into_parts();
        match inspect::serve_http1(Site::open(inner), held, raw).await {
            Some((Stop::Tunnel, held, raw)) => stream = Rewind::new(held, raw),
            Some((Stop::BadHead(bad), held, raw)) => {
                let mut stream = Rewind::new(held, raw);
                return refuse_framing(inner, Channel::Http, b"", &mut stream, bad).await;
            }
            Some((Stop::End | Stop::BadBody(_), ..)) | None => return,
        }
    }
}

async fn connect<S: Stream>(inner: &std::sync::Arc<Inner>, head: &Head, mut stream: Rewind<S>) {
    let target = head.target.as_bytes();
    let split = split_authority(target);
    let agrees = match (&split, head.host.as_deref().map(split_authority)) {
        (Ok((_, Some(_))), None) => Ok(()),
        // Some clients leave the port out of `Host`.
        (Ok((host, port @ Some(_))), Some(Ok((said, said_port))))
            if *host == said && (said_port.is_none() || said_port == *port) =>
        {
            Ok(())
        }
        (Ok((_, None)), _) => Err((builtin::HOST_FORM, "the tunnel has no port".to_owned())),
        (Ok(_), Some(_)) => Err((builtin::SAME_NAME, "`Host` is another than the tunnel's".to_owned())),
        (Err(bad), _) => Err((builtin::HOST_FORM, bad.to_string())),
    };
    let colon = target.iter().rposition(|b| *b == b':').unwrap_or(target.len());
    match (agrees, split) {
        (Ok(()), Ok((_, Some(port)))) => {
            tunnel::run(inner, Channel::Connect, &target[..colon], port, stream, Speech::Http).await;
        }
        (agrees, split) => {
            let port = split.ok().and_then(|(_, port)| port).unwrap_or(0);
            let mut case = Case::new(inner, Channel::Connect, target, port);
            case.decision.path = Some(recorded_path(""));
            if let Some(leak) = inner.leaks.find(target) {
                case.decision.credential = Some(leak.to_owned());
            }
            let (rule, reason) = agrees.err().unwrap_or((builtin::HOST_FORM, String::new()));
            let denial = Stopped::Denied(case.deny(rule, reason));
            drop(case);
            Speech::Http.refuse(&mut stream, &denial).await;
        }
    }
}

async fn socks_door(inner: &std::sync::Arc<Inner>, stream: impl Stream) {
    let mut stream = Rewind::new(Vec::new(), stream);
    match tokio::time::timeout(inner.limits.head_time, socks::greet(&mut stream)).await {
        Ok(Ok(asked)) => tunnel::run(inner, Channel::Socks, &asked.host, asked.port, stream, Speech::Socks).await,
        Ok(Err(bad)) => {
            let reply = match bad {
                Bad::Speech | Bad::Method => None,
                Bad::Command => Some(Reply::Command),
                Bad::Address => Some(Reply::Address),
            };
            let mut case = Case::new(inner, Channel::Socks, b"", 0);
            case.deny(builtin::FRAMING, format!("no SOCKS5 request that is served ({bad:?})"));
            drop(case);
            if let Some(reply) = reply {
                let _ = socks::reply(&mut stream, reply).await;
            }
        }
        Err(_) => {}
    }
}

async fn transparent(inner: &std::sync::Arc<Inner>, original: SocketAddr, stream: impl Stream) {
    let host = original.ip().to_string();
    let stream = Rewind::new(Vec::new(), stream);
    tunnel::run(
        inner,
        Channel::Transparent,
        host.as_bytes(),
        original.port(),
        stream,
        Speech::None,
    )
    .await;
}
