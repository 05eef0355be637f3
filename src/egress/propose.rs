//! From what was wanted to the smallest rules that would have served it.

use std::collections::{BTreeMap, BTreeSet};

use super::journal::{Channel, Decision};
use super::name::Host;
use super::rules::{Action, PathPattern, Rule, Target, Tls};

/// More single paths of a host than this become one pattern for what they have in common.
const MOST_PATHS: usize = 8;

/// What is wanted of one host and port.
#[derive(Default)]
struct Wanted {
    methods: BTreeSet<String>,
    paths: BTreeSet<String>,
    /// It was asked for as a whole: nothing is known of its requests.
    whole: bool,
    plain: bool,
}

/// Exact names, ports, methods and paths; no star for a host. What was no host, or is a question to DNS alone, needs no rule.
pub fn propose(decisions: &[Decision]) -> Vec<Rule> {
    let mut hosts: BTreeMap<(Host, u16), Wanted> = BTreeMap::new();
    for decision in decisions
        .iter()
        .filter(|decision| decision.channel != Channel::Dns && decision.port != 0)
    {
        let Ok(host) = Host::parse(decision.host.as_bytes()) else {
            continue;
        };
        let wanted = hosts.entry((host, decision.port)).or_default();
        match (&decision.method, &decision.path) {
            (Some(method), Some(path)) => {
                wanted.methods.insert(method.clone());
                wanted
                    .paths
                    .insert(path.split('?').next().unwrap_or_default().to_owned());
                wanted.plain |= decision.channel == Channel::Http;
            }
            _ => wanted.whole = true,
        }
    }
    hosts
        .into_iter()
        .map(|((host, port), wanted)| rule(host, port, wanted))
        .collect()
}

fn rule(host: Host, port: u16, wanted: Wanted) -> Rule {
    let id = format!("{host}:{port}");
    let is_name = host.name().is_some();
    let target = match host {
        Host::Name(name) => Target::Host(super::rules::HostPattern::Exact(name)),
        Host::Address(address) => Target::Cidr(address.into()),
    };
    let mut rule = Rule::new(id, Action::Allow, target);
    rule.ports = vec![port];
    rule.tls = if wanted.plain { Tls::Off } else { Tls::Auto };
    // Requests were seen, so the refusal of the whole was only that of the connection before them.
    if !wanted.methods.is_empty() && (is_name || wanted.plain) {
        rule.methods = wanted.methods.into_iter().collect();
        rule.paths = patterns(&wanted.paths);
    }
    debug_assert!(wanted.whole || !rule.methods.is_empty() || !is_name);
    rule
}

/// None where a path cannot stand in a rule: then the rule is about all paths.
fn patterns(paths: &BTreeSet<String>) -> Vec<PathPattern> {
    let literal: Option<Vec<PathPattern>> = paths
        .iter()
        .map(|path| path.parse().ok().filter(|_| !path.contains(['*', '[', '{', '\\'])))
        .collect();
    match literal {
        Some(patterns) if paths.len() <= MOST_PATHS => patterns,
        Some(_) => {
            let common = paths
                .iter()
                .skip(1)
                .fold(paths.first().map_or("", String::as_str), |common, path| {
                    let same = common.bytes().zip(path.bytes()).take_while(|(a, b)| a == b).count();
                    &common[..(0..=same).rev().find(|at| common.is_char_boundary(*at)).unwrap_or(0)]
                });
            let folder = &common[..common.rfind('/').map_or(0, |at| at + 1)];
            folder.parse().into_iter().collect()
        }
        None => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Timestamp;
    use crate::egress::journal::Outcome;
    use crate::egress::rules::{Http, Path, Request, Rules};

    fn wanted(channel: Channel, host: &str, port: u16, request: Option<(&str, &str)>) -> Decision {
        Decision {
            method: request.map(|(method, _)| method.to_owned()),
            path: request.map(|(_, path)| path.to_owned()),
            outcome: Outcome::Denied,
            ..Decision::undecided(1, Timestamp(0), channel, host.to_owned(), port)
        }
    }

    #[test]
    fn the_smallest_rules_allow_what_was_wanted_and_no_more() {
        let mut decisions = vec![
            wanted(Channel::Connect, "a.example", 443, None),
            wanted(Channel::Connect, "b.example", 443, Some(("GET", "/x?[redacted]"))),
            wanted(Channel::Connect, "b.example", 443, Some(("POST", "/y"))),
            wanted(Channel::Http, "c.example", 80, Some(("GET", "/z"))),
            wanted(Channel::Socks, "1.2.3.4", 22, None),
            wanted(Channel::Dns, "d.example", 0, Some(("A", ""))),
            wanted(Channel::Connect, "not\\x00host", 443, None),
        ];
        decisions.extend((0..20).map(|n| {
            wanted(
                Channel::Connect,
                "e.example",
                443,
                Some(("GET", &format!("/simple/p{n}/"))),
            )
        }));
        let rules = propose(&decisions);
        let ids: Vec<&str> = rules.iter().map(|rule| rule.id.as_str()).collect();
        assert_eq!(
            ids,
            [
                "a.example:443",
                "b.example:443",
                "c.example:80",
                "e.example:443",
                "1.2.3.4:22"
            ]
        );
        let rules = Rules::compile(rules).unwrap();
        let allows = |host: &str, port: u16, method: &str, path: &str| {
            let host = Host::parse(host.as_bytes()).unwrap();
            let path = Path::of(path);
            let http = Some(Http { method, path: &path });
            rules
                .decide(Request {
                    host: &host,
                    port,
                    http,
                })
                .action
                == Action::Allow
        };
        assert!(allows("a.example", 443, "PUT", "/any") && allows("b.example", 443, "POST", "/x"));
        assert!(!allows("b.example", 443, "DELETE", "/x") && !allows("b.example", 443, "GET", "/z"));
        assert!(allows("e.example", 443, "GET", "/simple/other/") && !allows("e.example", 443, "GET", "/admin"));
    }
}
