//! A tunnel: judged by where it goes, then by its first bytes, then passed through or opened.

use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::border::Inner;
use super::case::{Case, Stopped};
use super::door::Speech;
use super::hello::{self, BadHello, Hello};
use super::inspect;
use super::journal::Channel;
use super::name::Host;
use super::relay::relay;
use super::rules::{RuleId, Wire, builtin};
use super::stream::{Rewind, Stream};

/// Serves a tunnel to `host`, as the client sent it.
pub(super) async fn run<S: Stream>(
    inner: &Arc<Inner>,
    channel: Channel,
    host: &[u8],
    port: u16,
    mut client: Rewind<S>,
    speech: Speech,
) {
    let mut case = Case::new(inner, channel, host, port);
    let opened = async {
        let passage = inner.judge(&mut case, host, port).await?;
        let outside = inner.reach_out(&mut case, &passage.host, port).await?;
        Ok::<_, Stopped>((passage, outside))
    };
    let (passage, outside) = match opened.await {
        Ok(opened) => opened,
        Err(stopped) => {
            drop(case);
            return speech.refuse(&mut client, &stopped).await;
        }
    };
    if speech.accept(&mut client).await.is_err() {
        case.fail("the client went away");
        return;
    }
    if passage.wire == Wire::Tls {
        let hello = match tokio::time::timeout(inner.limits.head_time, peek(&mut client)).await {
            Ok(Some(read)) => read.map_err(|bad| (refusal(bad), bad.to_string())),
            Ok(None) | Err(_) => {
                case.fail("the client said nothing");
                return;
            }
        };
        match hello.and_then(|hello| agree(&passage.host, &hello).map(|()| hello)) {
            Ok(hello) if passage.each => return inspect::serve_tls(inner, case, passage, hello, outside, client).await,
            Ok(_) => {}
            Err((rule, reason)) => {
                case.deny(rule, reason);
                drop(case);
                // Fatal, `access_denied`: the only word that a TLS client understands here.
                let _ = client.write_all(&[21, 3, 3, 0, 2, 2, 49]).await;
                let _ = client.shutdown().await;
                return;
            }
        }
    }
    if passage.each {
        return inspect::serve_plain(inner, case, passage, outside, client).await;
    }
    if let Err(error) = relay(client, outside, inner.limits.idle_time).await {
        case.decision.reason = error.to_string();
    }
}

/// Reads a hello and leaves it in the stream; nothing where the client says nothing.
async fn peek<S: Stream>(client: &mut Rewind<S>) -> Option<Result<Hello, BadHello>> {
    let mut held = Vec::new();
    let read = loop {
        match hello::parse(&held) {
            Ok(None) => {}
            Ok(Some(hello)) => break Some(Ok(hello)),
            Err(bad) => break Some(Err(bad)),
        }
        if client.read_buf(&mut held).await.ok()? == 0 {
            break if held.is_empty() {
                None
            } else {
                Some(Err(BadHello::Broken))
            };
        }
    };
    client.put_back(&held);
    read
}

fn refusal(bad: BadHello) -> RuleId {
    match bad {
        BadHello::NotTls | BadHello::Broken | BadHello::TooLong => builtin::TLS_EXPECTED,
        BadHello::Names | BadHello::Name(_) => builtin::SAME_NAME,
        BadHello::Encrypted => builtin::HIDDEN_NAME,
    }
}

/// The name inside is the name outside. An address has no name inside (RFC 6066, 3).
fn agree(host: &Host, hello: &Hello) -> Result<(), (RuleId, String)> {
    match (host, &hello.name) {
        (Host::Name(name), Some(inside)) if name == inside => Ok(()),
        (Host::Address(_), None) => Ok(()),
        (Host::Name(_), None) => Err((builtin::HIDDEN_NAME, "the TLS hello names nobody".to_owned())),
        (Host::Name(_) | Host::Address(_), Some(inside)) => {
            Err((builtin::SAME_NAME, format!("the TLS hello asks for `{inside}`")))
        }
    }
}
