//! The DNS responder: knows allowed names alone, and asks nobody. `A` of an allowed name is an address of its own
//! ([`Names`]), `AAAA` is empty; a refused name does not exist, and every other kind of question is refused, so no label
//! carries anything out.

mod message;
mod names;

use std::io;
use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UdpSocket;

use self::message::{A, AAAA, Answer, Bad};
pub(super) use self::names::Names;
use super::border::{Border, Inner};
use super::case::Case;
use super::journal::{Channel, Outcome};
use super::name::{Host, HostName};
use super::rules::{Reach, RuleId, builtin};
use super::stream::Stream;

/// Short, so that a name's address does not outlive the border in some cache.
const TTL: u32 = 30;
/// The longest message over UDP that is looked at.
const MOST: usize = 1232;

impl Border {
    /// Answers one message; nothing where it deserves none.
    pub fn answer_dns(&self, message: &[u8]) -> Option<Vec<u8>> {
        let query = match message::parse(message) {
            Ok(query) => query,
            Err(Bad::Silence) => return None,
            Err(Bad::Format(error)) => return Some(error.to_vec()),
        };
        let mut case = Case::new(&self.0, Channel::Dns, &query.name, 0);
        case.decision.method = Some(kind_name(query.kind));
        let deny = |case: &mut Case, rule: RuleId, reason: String| {
            let denial = case.deny(rule, reason);
            match query.kind {
                A | AAAA => query.answer(&Answer::NoName(denial.rule.as_str()), TTL),
                _ => query.answer(&Answer::Refused(denial.rule.as_str()), TTL),
            }
        };
        if let Err(rule) = self.0.meter.query() {
            return Some(deny(&mut case, rule, String::new()));
        }
        if let Some(leak) = self.0.leaks.find(&query.name) {
            case.decision.credential = Some(leak.to_owned());
            return Some(deny(
                &mut case,
                builtin::PLACEHOLDER_LEAK,
                "a placeholder stands in the name".to_owned(),
            ));
        }
        let name = match HostName::parse(&query.name) {
            Ok(name) => name,
            Err(bad) => return Some(deny(&mut case, builtin::HOST_FORM, bad.to_string())),
        };
        case.decision.host = name.to_string();
        let rule = match self.0.known(&name) {
            Ok(rule) => rule,
            Err(rule) => return Some(deny(&mut case, rule, String::new())),
        };
        if !matches!(query.kind, A | AAAA) {
            return Some(deny(&mut case, builtin::DNS_KIND, String::new()));
        }
        (case.decision.rule, case.decision.outcome) = (rule, Outcome::Allowed);
        let address = self.0.names.address_of(&name);
        Some(match query.kind {
            A => query.answer(&Answer::Address(address), TTL),
            _ => query.answer(&Answer::Nothing, TTL),
        })
    }

    /// Answers what comes to a socket until the border closes.
    pub async fn serve_dns_udp(&self, socket: Arc<UdpSocket>) {
        let mut bytes = [0; MOST];
        loop {
            let received = tokio::select! {
                received = socket.recv_from(&mut bytes) => received,
                () = self.0.stop.cancelled() => return,
            };
            match received {
                Ok((length, from)) => {
                    if let Some(answer) = self.answer_dns(&bytes[..length])
                        && let Err(error) = socket.send_to(&answer, from).await
                    {
                        tracing::debug!(%error, "a dns answer could not be sent");
                    }
                }
                // A client that is gone already makes the next read fail.
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
                Err(error) => {
                    tracing::warn!(%error, "the dns socket broke");
                    return;
                }
            }
        }
    }

    /// Answers what comes on a stream (DNS over TCP), one question after the other.
    pub async fn serve_dns_stream(&self, mut stream: impl Stream) {
        let Ok(_open) = self.0.meter.open() else {
            return;
        };
        let serve = async {
            loop {
                let question = async {
                    let mut bytes = vec![0; usize::from(stream.read_u16().await?)];
                    stream.read_exact(&mut bytes).await.map(|_| bytes)
                };
                let Ok(Ok(bytes)) = tokio::time::timeout(self.0.limits.head_time, question).await else {
                    return;
                };
                let Some(answer) = self.answer_dns(&bytes) else {
                    return;
                };
                let framed = [&(answer.len() as u16).to_be_bytes()[..], &answer].concat();
                if stream.write_all(&framed).await.is_err() {
                    return;
                }
            }
        };
        tokio::select! {
            () = serve => {}
            () = self.0.stop.cancelled() => {}
        }
    }
}

impl Inner {
    /// Whether some connection to the name could be allowed, on any port, and by which rule.
    fn known(&self, name: &HostName) -> Result<RuleId, RuleId> {
        let host = Host::Name(name.clone());
        let mut refusal = builtin::DEFAULT_DENY;
        let ports: std::collections::BTreeSet<u16> = self.rules.iter().flat_map(|rule| rule.ports.clone()).collect();
        for port in ports {
            match self.rules.reach(&host, port, false) {
                Reach::Whole { verdict, .. } => return Ok(verdict.rule),
                Reach::EachRequest { rule, .. } => return Ok(rule),
                Reach::Closed(rule) if refusal == builtin::DEFAULT_DENY => refusal = rule,
                Reach::Closed(_) => {}
            }
        }
        Err(refusal)
    }
}

fn kind_name(kind: u16) -> String {
    match kind {
        A => "A".to_owned(),
        AAAA => "AAAA".to_owned(),
        16 => "TXT".to_owned(),
        other => format!("TYPE{other}"),
    }
}
