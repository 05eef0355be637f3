//! Rules of the border, compiled: who may go where. Pure: no IO, no clock.
//!
//! A rule is about a host pattern or a range of addresses, about ports, and perhaps about methods and paths. Any matching
//! `deny` wins; else the most specific of the matching `allow` and `ask` (exact name before `*.`, more labels before fewer,
//! then paths, then methods; of equals `ask`); else nothing is allowed. A connection is judged first ([`Rules::reach`]);
//! where some rule about it speaks of methods or paths, each request is judged as well ([`Rules::decide`]).

mod id;
mod path;
mod pattern;

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

pub use id::{RuleId, builtin};
pub use path::{BadPath, Path, PathPattern};
pub use pattern::{BadPattern, HostPattern};

use super::address::{self, Block};
use super::name::Host;

/// What a rule does with what it matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    Allow,
    /// A person is asked.
    Ask,
    Deny,
}

/// What a rule is about.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    Host(HostPattern),
    /// Addresses that are asked for as such, and closed blocks that names may lead into.
    Cidr(IpNet),
}

/// What must be spoken on a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tls {
    /// TLS, passed through unopened unless a credential, a path or a method asks for more; plain HTTP on port 80.
    #[default]
    Auto,
    /// TLS, opened always: the only way to see that the request inside is for the same host.
    Open,
    /// No TLS: HTTP where methods or paths are given or the port is 80, else any bytes.
    Off,
}

/// One rule, as it is written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rule {
    pub id: RuleId,
    pub action: Action,
    pub target: Target,
    /// At least one.
    pub ports: Vec<u16>,
    /// Upper case; empty means all.
    #[serde(default)]
    pub methods: Vec<String>,
    /// Empty means all.
    #[serde(default)]
    pub paths: Vec<PathPattern>,
    #[serde(default)]
    pub tls: Tls,
}

impl Rule {
    /// A rule for all requests to `target` on port 443.
    pub fn new(id: impl Into<RuleId>, action: Action, target: Target) -> Self {
        Self {
            id: id.into(),
            action,
            target,
            ports: vec![443],
            methods: Vec::new(),
            paths: Vec::new(),
            tls: Tls::Auto,
        }
    }

    /// Whether it speaks of single requests.
    fn is_about_requests(&self) -> bool {
        !self.methods.is_empty() || !self.paths.is_empty()
    }

    fn is_about(&self, host: &Host, port: u16) -> bool {
        let host = match (&self.target, host) {
            (Target::Host(pattern), Host::Name(name)) => pattern.matches(name),
            (Target::Cidr(net), Host::Address(address)) => net.contains(address),
            (Target::Host(_), Host::Address(_)) | (Target::Cidr(_), Host::Name(_)) => false,
        };
        host && self.ports.contains(&port)
    }

    fn covers(&self, http: Option<&Http<'_>>) -> bool {
        let Some(Http { method, path }) = http else {
            return !self.is_about_requests();
        };
        let path = self.paths.is_empty()
            || match self.action {
                Action::Deny => self.paths.iter().any(|pattern| pattern.touches(path)),
                Action::Allow | Action::Ask => self.paths.iter().any(|pattern| pattern.allows(path)),
            };
        path && (self.methods.is_empty() || self.methods.iter().any(|known| known == method))
    }

    /// Compared as a whole: the greater, the more specific.
    fn specificity(&self) -> ((bool, usize), usize, bool, bool) {
        let target = match &self.target {
            Target::Host(pattern) => pattern.specificity(),
            Target::Cidr(net) => (true, usize::from(net.prefix_len())),
        };
        let paths = self.paths.iter().map(PathPattern::fixed).min().unwrap_or(0);
        (target, paths, !self.methods.is_empty(), self.action == Action::Ask)
    }

    fn wire(&self, port: u16) -> Wire {
        match self.tls {
            Tls::Off if self.is_about_requests() || port == 80 => Wire::Http,
            Tls::Off => Wire::Raw,
            Tls::Auto if port == 80 => Wire::Http,
            Tls::Auto | Tls::Open => Wire::Tls,
        }
    }
}

/// A request as far as it is known: without `http` a connection.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    pub host: &'a Host,
    pub port: u16,
    pub http: Option<Http<'a>>,
}

#[derive(Debug, Clone, Copy)]
pub struct Http<'a> {
    pub method: &'a str,
    pub path: &'a Path,
}

/// What follows, and from which rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    pub action: Action,
    pub rule: RuleId,
}

/// What a connection must carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wire {
    Tls,
    Http,
    Raw,
}

/// What becomes of a connection before anything was said on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reach {
    /// No request on it could be allowed.
    Closed(RuleId),
    /// Goes as it is, once the verdict (allow or ask) is met.
    Whole { verdict: Verdict, wire: Wire },
    /// Each request on it is judged. The rule is the most specific one that may let some through.
    EachRequest { rule: RuleId, wire: Wire },
}

/// A set of rules that has passed its checks.
#[derive(Debug, Clone, Default)]
pub struct Rules {
    rules: Vec<Rule>,
}

/// What is wrong with a rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    #[error("rule `{0}` stands twice")]
    Twice(RuleId),
    #[error("rule `{0}` has a name that is kept for the border itself")]
    Reserved(RuleId),
    #[error("rule `{0}` has no port, or port 0")]
    Port(RuleId),
    #[error("rule `{rule}`: `{method}` is no method in upper case")]
    Method { rule: RuleId, method: String },
    #[error("rule `{0}` cannot open TLS to an address: methods and paths need `tls = false` there")]
    OpenAddress(RuleId),
}

impl Rules {
    /// # Errors
    /// All problems at once.
    pub fn compile(rules: Vec<Rule>) -> Result<Self, Vec<Problem>> {
        let mut seen = BTreeSet::new();
        let mut problems = Vec::new();
        for rule in &rules {
            if !seen.insert(&rule.id) {
                problems.push(Problem::Twice(rule.id.clone()));
            }
            if rule.id.is_builtin() || rule.id.as_str().is_empty() {
                problems.push(Problem::Reserved(rule.id.clone()));
            }
            if rule.ports.is_empty() || rule.ports.contains(&0) {
                problems.push(Problem::Port(rule.id.clone()));
            }
            let is_method = |method: &&String| method.is_empty() || !method.bytes().all(|b| b.is_ascii_uppercase());
            problems.extend(rule.methods.iter().filter(is_method).map(|method| Problem::Method {
                rule: rule.id.clone(),
                method: method.clone(),
            }));
            let opens = rule.tls == Tls::Open || (rule.is_about_requests() && rule.tls != Tls::Off);
            if matches!(rule.target, Target::Cidr(_)) && opens {
                problems.push(Problem::OpenAddress(rule.id.clone()));
            }
        }
        if problems.is_empty() {
            Ok(Self { rules })
        } else {
            Err(problems)
        }
    }

    /// Judges one request, or a connection as a whole.
    pub fn decide(&self, request: Request<'_>) -> Verdict {
        let matching = || {
            self.rules
                .iter()
                .filter(move |rule| rule.is_about(request.host, request.port) && rule.covers(request.http.as_ref()))
        };
        let denied = matching().find(|rule| rule.action == Action::Deny);
        // The first of equals: `max_by_key` would give the last.
        let best = denied.or_else(|| matching().rev().max_by_key(|rule| rule.specificity()));
        match best {
            Some(rule) => Verdict {
                action: rule.action,
                rule: rule.id.clone(),
            },
            None => Verdict {
                action: Action::Deny,
                rule: builtin::DEFAULT_DENY,
            },
        }
    }

    /// Judges a connection by its destination. `opens` is true where something else than a rule needs to see its requests.
    pub fn reach(&self, host: &Host, port: u16, opens: bool) -> Reach {
        let whole = self.decide(Request { host, port, http: None });
        let about = || self.rules.iter().filter(|rule| rule.is_about(host, port));
        if about().any(|rule| rule.action == Action::Deny && !rule.is_about_requests()) {
            return Reach::Closed(whole.rule);
        }
        let opening = || about().filter(|rule| rule.action != Action::Deny);
        let Some(best) = opening().rev().max_by_key(|rule| rule.specificity()) else {
            return Reach::Closed(builtin::DEFAULT_DENY);
        };
        // The strictest of all that is asked for.
        let wires: Vec<Wire> = opening().map(|rule| rule.wire(port)).collect();
        let each = opens || about().any(|rule| rule.is_about_requests() || rule.tls == Tls::Open);
        let wire = match () {
            () if wires.contains(&Wire::Tls) => Wire::Tls,
            () if each || wires.contains(&Wire::Http) => Wire::Http,
            () => Wire::Raw,
        };
        if each || wire == Wire::Http {
            let rule = best.id.clone();
            return Reach::EachRequest { rule, wire };
        }
        Reach::Whole { verdict: whole, wire }
    }

    /// Judges an address that a name led to, or that was asked for as such.
    ///
    /// # Errors
    /// A rule denies it, or it is in a closed block that no rule names.
    pub fn check_address(&self, address: IpAddr, port: u16) -> Result<(), BadAddress> {
        let cidrs = |action: Action| {
            self.rules.iter().filter_map(move |rule| match rule.target {
                Target::Cidr(net) if rule.action == action && rule.ports.contains(&port) => Some((net, &rule.id)),
                Target::Cidr(_) | Target::Host(_) => None,
            })
        };
        let unmapped = address.to_canonical();
        if let Some((_, rule)) = cidrs(Action::Deny).find(|(net, _)| net.contains(&address) || net.contains(&unmapped))
        {
            return Err(BadAddress::Denied(rule.clone()));
        }
        address::check(address, |subject, block| {
            cidrs(Action::Allow)
                .chain(cidrs(Action::Ask))
                .any(|(net, _)| net.contains(&subject) && block.net.contains(&net))
        })
        .map_err(BadAddress::Closed)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Rule> {
        self.rules.iter()
    }
}

/// Why an address is not dialled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BadAddress {
    Denied(RuleId),
    Closed(Block),
}

#[cfg(test)]
mod tests;
