//! The whole border over streams in memory: a resolver, an Internet and a journal of the test's own.

mod opened;

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

use super::ask::Nobody;
use super::budget::Budgets;
use super::credential::{Credential, CredentialSource, Fetched, Place, Unavailable};
use super::dial::Dial;
use super::journal::{Decision, Journal, Outcome};
use super::name::{Host, HostName};
use super::resolve::{Resolve, Resolved, Unresolved};
use super::rules::{Action, Rule, Rules, Target};
use super::stream::BoxStream;
use super::{Border, Door, Limits, Settings};
use crate::clock::System;

const PUBLIC: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(93, 184, 216, 34));

#[derive(Debug, Default)]
struct World {
    names: HashMap<&'static str, Vec<IpAddr>>,
    asked: Mutex<Vec<String>>,
    dialled: Mutex<Vec<SocketAddr>>,
    /// The far ends of what was dialled.
    arrived: Mutex<Vec<DuplexStream>>,
    decisions: Mutex<Vec<Decision>>,
}

#[async_trait]
impl Resolve for World {
    async fn resolve(&self, name: &HostName) -> Result<Resolved, Unresolved> {
        self.asked.lock().unwrap().push(name.to_string());
        match self.names.get(name.as_str()) {
            Some(addresses) => Ok(Resolved {
                addresses: addresses.clone(),
                ttl: Duration::from_secs(60),
            }),
            None => Err(Unresolved::NoAddress(name.clone())),
        }
    }
}

#[async_trait]
impl Dial for World {
    async fn dial(&self, _host: &Host, to: SocketAddr) -> io::Result<BoxStream> {
        self.dialled.lock().unwrap().push(to);
        let (near, far) = tokio::io::duplex(64 << 10);
        self.arrived.lock().unwrap().push(far);
        Ok(Box::new(near))
    }
}

impl Journal for World {
    fn record(&self, decision: Decision) {
        self.decisions.lock().unwrap().push(decision);
    }
}

#[derive(Debug)]
struct Fixed(&'static str);

#[async_trait]
impl CredentialSource for Fixed {
    async fn fetch(&self) -> Result<Fetched, Unavailable> {
        Ok(Fetched {
            value: self.0.into(),
            version: Some("v1".to_owned()),
        })
    }
}

const PLACEHOLDER: &str = "exuvia-placeholder-0123456789";
const SECRET: &str = "s3cret-of-the-operator";

fn bed(change: impl FnOnce(&mut Settings)) -> (Arc<World>, Border) {
    let world = Arc::new(World {
        names: HashMap::from([
            ("api.example.com", vec![PUBLIC]),
            ("plain.example.com", vec![PUBLIC]),
            ("rebound.example.com", vec![PUBLIC, IpAddr::from([127, 0, 0, 1])]),
            ("metadata.example.com", vec!["::ffff:169.254.169.254".parse().unwrap()]),
        ]),
        ..World::default()
    });
    let allow = |id: &str, host: &str, port: u16| {
        let mut rule = Rule::new(id, Action::Allow, Target::Host(host.parse().unwrap()));
        rule.ports = vec![port];
        rule
    };
    let rules = vec![
        allow("api", "api.example.com", 443),
        allow("plain", "plain.example.com", 80),
        allow("rebound", "rebound.example.com", 443),
        allow("metadata", "metadata.example.com", 443),
    ];
    let mut settings = Settings {
        rules: Rules::compile(rules).unwrap(),
        credentials: Vec::new(),
        resolver: world.clone(),
        dialer: world.clone(),
        roots: Arc::new(rustls::RootCertStore::empty()),
        budgets: Budgets::default(),
        limits: Limits::default(),
        journal: world.clone(),
        asker: Arc::new(Nobody),
        clock: Arc::new(System),
        learn: false,
        off_limits: Vec::new(),
        how_to_ask: "ask".to_owned(),
    };
    change(&mut settings);
    let border = Border::new(settings).unwrap();
    (world, border)
}

fn with_credential(settings: &mut Settings) {
    settings.credentials.push(Credential {
        name: "token".to_owned(),
        placeholder: PLACEHOLDER.to_owned(),
        source: Arc::new(Fixed(SECRET)),
        place: Place::Bearer,
        host: "plain.example.com".parse().unwrap(),
        port: 80,
        methods: vec!["GET".to_owned()],
        paths: vec!["/api/**".parse().unwrap()],
    });
}

/// Sends `said`, ends, and gives what came back.
async fn talk(border: &Border, door: Door, said: &[u8]) -> Vec<u8> {
    let (mut client, inside) = tokio::io::duplex(64 << 10);
    let talk = async {
        client.write_all(said).await.unwrap();
        client.shutdown().await.unwrap();
        let mut got = Vec::new();
        client.read_to_end(&mut got).await.unwrap();
        got
    };
    tokio::time::timeout(Duration::from_secs(20), async {
        tokio::join!(border.serve_stream(door, inside), talk).1
    })
    .await
    .unwrap()
}

impl World {
    /// Outcome and rule of each decision.
    fn verdicts(&self) -> Vec<(Outcome, String)> {
        let decisions = self.decisions.lock().unwrap();
        decisions
            .iter()
            .map(|one| (one.outcome, one.rule.to_string()))
            .collect()
    }
}

fn denied(rule: &str) -> Vec<(Outcome, String)> {
    vec![(Outcome::Denied, rule.to_owned())]
}

/// T19, T20, T21: one refusal, recorded once, and nothing was looked up or dialled for it.
#[tokio::test]
async fn what_no_rule_allows_is_refused_by_each_door_with_one_rule() {
    for target in [
        "evil.example:443",
        "example.com:443",
        "api.example.com:8443",
        "1.1.1.1:443",
        "data.api.example.com:443",
    ] {
        let (world, border) = bed(|_| {});
        let got = talk(
            &border,
            Door::Http,
            format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n").as_bytes(),
        )
        .await;
        let got = String::from_utf8(got).unwrap();
        assert!(
            got.starts_with("HTTP/1.1 403 ") && got.contains(r#""rule":"builtin:default-deny""#),
            "{got}"
        );
        assert_eq!(world.verdicts(), denied("builtin:default-deny"), "{target}");
        assert!(world.asked.lock().unwrap().is_empty() && world.dialled.lock().unwrap().is_empty());
    }
    let (world, border) = bed(|_| {});
    let got = talk(
        &border,
        Door::Socks,
        b"\x05\x01\0\x05\x01\0\x03\x0cevil.example\x01\xbb",
    )
    .await;
    assert_eq!(got[..4], [5, 0, 5, 2]);
    assert_eq!(world.verdicts(), denied("builtin:default-deny"));
}

/// T20: rebinding and metadata, by all answers and in every form.
#[tokio::test]
async fn a_name_that_leads_inside_is_not_dialled() {
    for name in ["rebound.example.com", "metadata.example.com"] {
        let (world, border) = bed(|_| {});
        let got = talk(
            &border,
            Door::Http,
            format!("CONNECT {name}:443 HTTP/1.1\r\nHost: {name}:443\r\n\r\n").as_bytes(),
        )
        .await;
        assert!(got.starts_with(b"HTTP/1.1 403 "), "{name}");
        assert_eq!(world.verdicts(), denied("builtin:closed-address"));
        assert!(world.dialled.lock().unwrap().is_empty());
    }
}

/// T20: the name inside. Shown first with the right one, which passes byte for byte to the address that was checked.
#[tokio::test]
async fn a_tunnel_carries_tls_for_its_own_name_alone() {
    let hello = super::hello::tests::hello_of;
    let run = async |first: &[u8]| {
        let (world, border) = bed(|_| {});
        let connect = b"CONNECT api.example.com:443 HTTP/1.1\r\nHost: api.example.com:443\r\n\r\n";
        let said = [&connect[..], first].concat();
        let answer = async {
            // The far end says something and ends once it was dialled.
            loop {
                let far = world.arrived.lock().unwrap().pop();
                if let Some(mut far) = far {
                    let mut got = Vec::new();
                    far.read_to_end(&mut got).await.unwrap();
                    return got;
                }
                tokio::task::yield_now().await;
            }
        };
        let (_, arrived) = tokio::join!(talk(&border, Door::Http, &said), answer);
        (world.verdicts(), arrived, world.dialled.lock().unwrap().clone())
    };
    let good = hello("api.example.com", &["h2"]);
    let (verdicts, arrived, dialled) = run(&good).await;
    assert_eq!(
        (verdicts, dialled),
        (
            vec![(Outcome::Allowed, "api".to_owned())],
            vec![SocketAddr::new(PUBLIC, 443)]
        )
    );
    assert!(arrived == good);
    for (first, rule) in [
        (hello("evil.example.com", &[]), "builtin:same-name"),
        (hello("10.0.0.1", &[]), "builtin:hidden-name"),
        (
            super::hello::tests::with_extension(&good, 0xfe0d, &[0; 40]),
            "builtin:hidden-name",
        ),
        (
            b"GET / HTTP/1.1\r\nHost: api.example.com\r\n\r\n".to_vec(),
            "builtin:tls-expected",
        ),
        (b"SSH-2.0-client\r\n".to_vec(), "builtin:tls-expected"),
    ] {
        let (verdicts, arrived, _) = run(&first).await;
        assert_eq!(
            (verdicts, arrived),
            (denied(rule), Vec::new()),
            "nothing of it went out"
        );
    }
}

/// Plain HTTP through the border, with a server that answers `answer`; gives what it got and what the client got.
async fn exchange(change: impl FnOnce(&mut Settings), said: &str, answer: &str) -> (Arc<World>, String, String) {
    let (world, border) = bed(change);
    let serve = async {
        loop {
            let far = world.arrived.lock().unwrap().pop();
            if let Some(mut far) = far {
                let mut got = vec![0; 16 << 10];
                let length = far.read(&mut got).await.unwrap();
                got.truncate(length);
                if !got.is_empty() {
                    far.write_all(answer.as_bytes()).await.unwrap();
                }
                return String::from_utf8(got).unwrap();
            }
            tokio::task::yield_now().await;
        }
    };
    // A refusal ends without anybody having been dialled.
    let served = tokio::time::timeout(Duration::from_secs(1), serve);
    let (told, got) = tokio::join!(talk(&border, Door::Http, said.as_bytes()), served);
    (world, got.unwrap_or_default(), String::from_utf8(told).unwrap())
}

fn get(path: &str, headers: &str) -> String {
    format!("GET http://plain.example.com{path} HTTP/1.1\r\nHost: plain.example.com\r\n{headers}\r\n")
}

fn reply(body: &str) -> String {
    format!(
        "HTTP/1.1 200 OK\r\nX-Echo: {body}\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// U1, T22: the value goes in, the client's own does not, and what comes back is masked in place.
#[tokio::test]
async fn a_credential_goes_in_and_never_comes_back() {
    let own = "Connection: authorization\r\nAuthorization: Bearer attacker\r\nAuthorization: Bearer other\r\n";
    let (world, got, told) = exchange(with_credential, &get("/api/x", own), &reply(&format!("<{SECRET}>"))).await;
    assert_eq!(got.matches("authorization:").count(), 1, "{got}");
    assert!(
        got.contains(&format!("authorization: Bearer {SECRET}\r\n")) && !got.contains("attacker"),
        "{got}"
    );
    assert!(got.contains("accept-encoding: identity\r\n"), "{got}");
    let stars = format!("<{}>", "*".repeat(SECRET.len()));
    assert!(
        told.ends_with(&format!("\r\n\r\n{stars}")) && told.matches(&stars).count() == 2,
        "{told}"
    );
    assert!(!told.contains(SECRET));
    let decisions = world.decisions.lock().unwrap().clone();
    assert_eq!(decisions.len(), 1);
    let one = &decisions[0];
    assert_eq!(
        (one.outcome, one.credential.as_deref(), one.status),
        (Outcome::Allowed, Some("token"), Some(200))
    );
    assert_eq!((one.address, one.path.as_deref()), (Some(PUBLIC), Some("/api/x")));
    assert!(!format!("{one:?}").contains(SECRET));
}

/// T11 (threat): outside of its path there is no value, and the client's own header is gone as well.
#[tokio::test]
async fn a_credential_stays_within_its_path() {
    let (_, got, _) = exchange(
        with_credential,
        &get("/other", "Authorization: Bearer attacker\r\n"),
        &reply("x"),
    )
    .await;
    assert!(
        got.starts_with("GET /other ") && !got.contains("authorization"),
        "{got}"
    );
}

/// T11 (threat): masking fails closed.
#[tokio::test]
async fn an_answer_that_cannot_be_seen_through_is_refused() {
    let encoded = "HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc";
    let (world, _, told) = exchange(with_credential, &get("/api/x", ""), encoded).await;
    assert!(
        told.starts_with("HTTP/1.1 403 ") && told.contains("builtin:encoded-answer"),
        "{told}"
    );
    assert_eq!(
        world.verdicts(),
        vec![(Outcome::Cut, "builtin:encoded-answer".to_owned())]
    );
}

/// T22: a placeholder where it has no business.
#[tokio::test]
async fn a_placeholder_elsewhere_is_a_leak() {
    let base64 = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, format!("u:{PLACEHOLDER}"));
    for said in [
        get(&format!("/api/{PLACEHOLDER}"), ""),
        get(&format!("/api/x?y={}", PLACEHOLDER.replace('-', "%2D")), ""),
        get("/api/x", &format!("X-Other: {PLACEHOLDER}\r\n")),
        get("/other", &format!("Authorization: Bearer {PLACEHOLDER}\r\n")),
        get("/api/x", &format!("Cookie: {base64}\r\n")),
        format!("CONNECT {PLACEHOLDER}.evil.example:443 HTTP/1.1\r\n\r\n"),
    ] {
        let (world, got, told) = exchange(with_credential, &said, &reply("x")).await;
        assert!(told.starts_with("HTTP/1.1 403 ") && got.is_empty(), "{said} {told}");
        assert_eq!(world.verdicts(), denied("builtin:placeholder-leak"), "{said}");
        assert_eq!(world.decisions.lock().unwrap()[0].credential.as_deref(), Some("token"));
    }
}

/// T20 and request smuggling: shown first with a sound request that passes.
#[tokio::test]
async fn a_request_that_reads_in_two_ways_goes_nowhere() {
    let (_, got, told) = exchange(|_| {}, &get("/x", ""), &reply("hi")).await;
    assert!(
        got.starts_with("GET /x HTTP/1.1\r\n") && told.ends_with("hi"),
        "{got} {told}"
    );
    for (said, rule) in [
        (get("/x", "Host: plain.example.com\r\n"), "builtin:framing"),
        (
            get("/x", "Content-Length: 1\r\nTransfer-Encoding: chunked\r\n"),
            "builtin:framing",
        ),
        (get("/x", "A: b\n"), "builtin:framing"),
        (get("/x", "TE: a\r\n b\r\n"), "builtin:framing"),
        (
            get("/x", "").replacen("Host: plain", "Host: evil", 1),
            "builtin:same-name",
        ),
        (get("/x", "").replacen("GET", "TRACE", 1), "builtin:method"),
        (get("/x", "").replacen("http:", "https:", 1), "builtin:framing"),
        (
            get("/x", "").replace("plain.example.com", "0x7f.1"),
            "builtin:host-form",
        ),
    ] {
        let (world, got, _) = exchange(|_| {}, &said, &reply("hi")).await;
        assert_eq!((world.verdicts(), got.as_str()), (denied(rule), ""), "{said}");
    }
}

#[tokio::test]
async fn a_budget_ends_with_its_name() {
    let small = |settings: &mut Settings| settings.budgets.received = Some(10);
    let (world, _, _) = exchange(small, &get("/x", ""), &reply(&"x".repeat(100))).await;
    assert_eq!(
        world.verdicts(),
        vec![(Outcome::Cut, "builtin:budget:bytes-down".to_owned())]
    );
    let none = |settings: &mut Settings| settings.budgets.connections = Some(0);
    let (world, _, told) = exchange(none, &get("/x", ""), &reply("x")).await;
    assert!(told.contains("builtin:budget:connections"), "{told}");
    assert_eq!(world.verdicts(), denied("builtin:budget:connections"));
}
