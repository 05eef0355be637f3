//! What a policy says about the network: openings and closings in the border's own rules, and secrets with their one place.
//!
//! Which rule speaks is decided in `egress::rules`, here and at the border by the same code. How the border is made of
//! this: `border/`.

use std::collections::BTreeMap;

use super::{Decision, Policy, Verdict};
use crate::egress::budget::Budgets;
use crate::egress::name::Host;
use crate::egress::rules::{Action, HostPattern, Http, Path, PathPattern, Reach, Request, Rule, RuleId, Rules};
use crate::secret::Source;

/// How the sandbox gets out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Not at all.
    None,
    /// Through a proxy on its own loopback.
    Proxy,
    /// The same, and TLS is opened everywhere to see what is wanted.
    Learn,
}

impl std::fmt::Display for Mode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Proxy => "proxy",
            Self::Learn => "learn",
        })
    }
}

/// What a sandbox can reach. With [`Mode::None`] there are no rules.
#[derive(Debug, Clone, PartialEq)]
pub struct Network {
    pub(super) mode: Mode,
    /// They compile. As written; the order means nothing.
    pub(super) rules: Vec<Rule>,
    pub(super) budgets: Budgets,
    /// Where each rule is written, by its id.
    pub(super) sources: BTreeMap<String, String>,
}

impl Default for Network {
    fn default() -> Self {
        Self {
            mode: Mode::None,
            rules: Vec::new(),
            budgets: Budgets::default(),
            sources: BTreeMap::new(),
        }
    }
}

impl Network {
    pub fn mode(&self) -> Mode {
        self.mode
    }

    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    pub fn budgets(&self) -> &Budgets {
        &self.budgets
    }

    /// Where a rule is written; `None` for those of the border itself.
    pub fn source(&self, rule: &RuleId) -> Option<&str> {
        self.sources.get(rule.as_str()).map(String::as_str)
    }

    /// The rules as the border takes them.
    pub fn compiled(&self) -> Rules {
        Rules::compile(self.rules.clone()).expect("they were compiled when the policy was checked")
    }

    /// Whether some rule waits for a person.
    pub fn asks(&self) -> bool {
        self.rules.iter().any(|rule| rule.action == Action::Ask)
    }

    /// The rule, if any, under which something at this host could be reached.
    pub(super) fn opening(&self, host: &HostPattern, port: u16) -> Option<&Rule> {
        self.rules.iter().find(|rule| {
            rule.action != Action::Deny
                && rule.ports.contains(&port)
                && match &rule.target {
                    crate::egress::rules::Target::Host(pattern) => covers(pattern, host) || covers(host, pattern),
                    crate::egress::rules::Target::Cidr(_) => false,
                }
        })
    }
}

/// Whether every name that fits `inner` fits `outer`.
pub(super) fn covers(outer: &HostPattern, inner: &HostPattern) -> bool {
    match (outer, inner) {
        (HostPattern::Exact(a), HostPattern::Exact(b)) => a == b,
        (HostPattern::Exact(_), HostPattern::Under(_)) => false,
        (HostPattern::Under(_), HostPattern::Exact(name)) => outer.matches(name),
        (HostPattern::Under(a), HostPattern::Under(b)) => a == b || outer.matches(b),
    }
}

/// A secret, by reference.
#[derive(Debug, Clone, PartialEq)]
pub struct Credential {
    pub name: String,
    pub from: Source,
    /// The variable that holds the placeholder, or with [`Self::exposed`] the secret.
    pub variable: Option<String>,
    /// Whoever is in the sandbox can read it.
    pub exposed: bool,
    pub inject: Option<Inject>,
    pub source: String,
}

/// Where a secret is put in.
#[derive(Debug, Clone, PartialEq)]
pub struct Inject {
    pub host: HostPattern,
    pub port: u16,
    pub place: Place,
    /// Empty means all.
    pub methods: Vec<String>,
    /// Empty means all.
    pub paths: Vec<PathPattern>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    Bearer,
    Basic {
        user: String,
    },
    Header {
        name: http::HeaderName,
        format: String,
    },
    Query {
        name: String,
    },
    SigV4 {
        access_key: String,
        session_token: Option<Source>,
        region: String,
        service: String,
    },
}

/// Something that a program in the sandbox would like to reach.
#[derive(Debug, Clone, Copy)]
pub struct Wish<'a> {
    pub host: &'a Host,
    pub port: u16,
    /// Without: the connection as a whole.
    pub http: Option<(&'a str, &'a str)>,
}

/// Decides about one connection or request, as the border does. What a name leads to is judged there only.
pub fn decide(policy: &Policy, wish: &Wish<'_>) -> Decision {
    let network = &policy.network;
    if network.mode == Mode::None {
        return Decision {
            verdict: Verdict::Deny,
            rule: "network.mode".to_owned(),
            source: policy.name.clone(),
            reason: format!("policy `{}` has no network", policy.name),
        };
    }
    let rules = network.compiled();
    let (action, rule) = match wish.http {
        Some((method, target)) => {
            let path = Path::of(target);
            let http = Http { method, path: &path };
            let verdict = rules.decide(Request {
                host: wish.host,
                port: wish.port,
                http: Some(http),
            });
            (verdict.action, verdict.rule)
        }
        None => match rules.reach(wish.host, wish.port, false) {
            Reach::Closed(rule) => (Action::Deny, rule),
            Reach::Whole { verdict, .. } => (verdict.action, verdict.rule),
            Reach::EachRequest { rule, .. } => (Action::Allow, rule),
        },
    };
    let source = network.source(&rule).unwrap_or("the border itself").to_owned();
    let what = match wish.http {
        Some((method, path)) => format!("{method} {path} at {} port {}", wish.host, wish.port),
        None => format!("a connection to {} port {}", wish.host, wish.port),
    };
    let reason = match action {
        Action::Allow if wish.http.is_none() => {
            format!("rule `{rule}` allows {what}; where it speaks of methods or paths each request is judged")
        }
        Action::Allow => format!("rule `{rule}` allows {what}"),
        Action::Ask => format!("rule `{rule}` asks a person about {what}"),
        Action::Deny if rule.is_builtin() => format!("no rule of policy `{}` allows {what}", policy.name),
        Action::Deny => format!("rule `{rule}` denies {what}"),
    };
    Decision {
        verdict: match action {
            Action::Allow => Verdict::Allow,
            Action::Ask => Verdict::Ask,
            Action::Deny => Verdict::Deny,
        },
        rule: rule.to_string(),
        source,
        reason,
    }
}
