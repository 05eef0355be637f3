//! The network and its secrets: every rule in the border's own form, or what is wrong with it.

use std::collections::BTreeMap;
use std::time::Duration;

use super::super::input::{
    AllowInput, CredentialInput, DenyInput, InjectInput, Methods, NetworkBudgetsInput, NetworkInput, NetworkMode,
    OpeningVerdict, Ports, Texts, TlsInput,
};
use super::super::network::{Credential, Inject, Mode, Network, Place, covers};
use super::super::quantity::{parse_size, show_duration, show_size};
use super::{Checker, DAY, SECOND, TIB};
use crate::egress::budget::Budgets;
use crate::egress::rules::{Action, HostPattern, PathPattern, Problem, Rule, RuleId, Rules, Target, Tls};

/// What opens or closes, whichever list it is of.
struct Written<'a> {
    name: Option<&'a str>,
    host: Option<&'a str>,
    cidr: Option<&'a str>,
    ports: Vec<u16>,
    methods: Option<&'a Methods>,
    path: Option<&'a Texts>,
    tls: Tls,
    action: Action,
}

/// A rule, and where to point when something is wrong with it.
struct Found {
    rule: Rule,
    pointer: String,
    source: String,
}

impl Checker<'_> {
    pub(super) fn network(&mut self, written: &NetworkInput) -> Network {
        let inherited = self.parent.map(|parent| parent.network.clone()).unwrap_or_default();
        let mode = match written.mode {
            None => inherited.mode,
            Some(NetworkMode::None) => Mode::None,
            Some(NetworkMode::Proxy) => Mode::Proxy,
            Some(NetworkMode::Learn) => Mode::Learn,
        };
        if let Some(parent) = self
            .parent
            .filter(|_| mode != Mode::None && inherited.mode == Mode::None)
        {
            let message = format!("`{mode}` is wider than the `none` of policy `{}`", parent.name);
            self.problem("/network/mode", message);
        }
        for (n, _) in written
            .allow
            .iter()
            .flatten()
            .enumerate()
            .filter(|(_, entry)| matches!(entry.verdict, Some(OpeningVerdict::Ask)))
        {
            self.problem(&format!("/network/allow/{n}/verdict"), not_yet("`ask`"));
        }
        let found = self.net_rules(written);
        let budgets = self.network_budgets(&written.budgets, &inherited.budgets);
        if mode == Mode::None {
            if !found.is_empty() {
                self.problem(
                    "/network",
                    "there are rules, and `mode` is `none`: nothing would follow from them",
                );
            }
            return Network::default();
        }
        self.narrows(&found, &inherited);
        let opens = found.iter().any(|found| found.rule.action != Action::Deny);
        // With openings of its own a child has no others of its parent, but for those that ask: what its parent asks about, it
        // cannot allow.
        let kept = inherited.rules.iter().filter(|rule| match rule.action {
            Action::Deny | Action::Ask => true,
            Action::Allow => !opens,
        });
        let mut rules: Vec<Rule> = kept.cloned().collect();
        let mut sources: BTreeMap<String, String> = rules
            .iter()
            .filter_map(|rule| Some((rule.id.to_string(), inherited.source(&rule.id)?.to_owned())))
            .collect();
        let mut pointers = BTreeMap::new();
        for Found { rule, pointer, source } in found {
            pointers.entry(rule.id.clone()).or_insert(pointer);
            sources.insert(rule.id.to_string(), source);
            rules.push(rule);
        }
        if let Err(problems) = Rules::compile(rules.clone()) {
            for problem in problems {
                let pointer = pointers
                    .get(rule_of(&problem))
                    .map_or("/network", String::as_str)
                    .to_owned();
                self.problem(&pointer, shown(&problem));
            }
        }
        // In the order of the canonical form: it means nothing.
        rules.sort_by(|a, b| a.id.as_str().cmp(b.id.as_str()));
        Network {
            mode,
            rules,
            budgets,
            sources,
        }
    }

    fn net_rules(&mut self, written: &NetworkInput) -> Vec<Found> {
        let mut found = Vec::new();
        for (n, name) in written.presets.iter().flatten().enumerate() {
            let pointer = format!("/network/presets/{n}");
            match self.presets.find(name) {
                Ok((preset, source)) => {
                    let allow = preset.allow.iter().map(allowed);
                    for written in allow.chain(preset.deny.iter().map(denied)) {
                        let mut made = self.net_rule(&pointer, &written, &|_| String::new());
                        if let Some(rule) = &mut made {
                            rule.id = RuleId::from(format!("{name}/{}", rule.id));
                        }
                        found.extend(made.map(|rule| Found {
                            rule,
                            pointer: pointer.clone(),
                            source: source.clone(),
                        }));
                    }
                }
                Err(message) => self.problem(&pointer, message),
            }
        }
        let allow = written.allow.iter().flatten().enumerate();
        let allow = allow.map(|(n, entry)| (format!("/network/allow/{n}"), allowed(entry)));
        let deny = written.deny.iter().flatten().enumerate();
        let deny = deny.map(|(n, entry)| (format!("/network/deny/{n}"), denied(entry)));
        for (pointer, written) in allow.chain(deny) {
            let rule = self.net_rule(&pointer, &written, &|field| format!("/{field}"));
            let source = self.document.source(&pointer);
            found.extend(rule.map(|rule| Found { rule, pointer, source }));
        }
        found
    }

    /// `None` with what is wrong reported. `field` says what is behind the pointer for one of its fields.
    fn net_rule(&mut self, pointer: &str, written: &Written<'_>, field: &dyn Fn(&str) -> String) -> Option<Rule> {
        let at = |name: &str| format!("{pointer}{}", field(name));
        let target = match (written.host, written.cidr) {
            (Some(host), None) => self.host(&at("host"), host).map(Target::Host),
            (None, Some(text)) => match text.parse::<ipnet::IpNet>() {
                Ok(net) if net.trunc() == net => Some(Target::Cidr(net)),
                Ok(net) => {
                    self.problem(
                        &at("cidr"),
                        format!("`{text}` has bits behind its prefix: write `{}`", net.trunc()),
                    );
                    None
                }
                Err(_) => {
                    self.problem(
                        &at("cidr"),
                        format!("`{text}` is no range of addresses: write it like `10.1.2.0/24`"),
                    );
                    None
                }
            },
            (Some(_), Some(_)) => {
                self.problem(pointer, "`host` and `cidr` are two rules");
                None
            }
            (None, None) => {
                self.problem(pointer, "it says neither `host` nor `cidr`");
                None
            }
        };
        let methods = self.methods(&at("methods"), written.methods);
        let paths = self.paths(&at("path"), written.path);
        let id = match written.name {
            Some(name) => RuleId::from(name),
            None => RuleId::from(by_target(written)),
        };
        Some(Rule {
            id,
            action: written.action,
            target: target?,
            ports: sorted(written.ports.clone()),
            methods,
            paths,
            tls: written.tls,
        })
    }

    fn host(&mut self, pointer: &str, text: &str) -> Option<HostPattern> {
        match text.parse::<HostPattern>() {
            Ok(pattern) => Some(pattern),
            Err(error) => {
                let hint = match text.parse::<std::net::IpAddr>() {
                    Ok(_) => "; an address is a `cidr`",
                    Err(_) if text.contains([':', '/']) => "; write the name alone, and the port as `port`",
                    Err(_) => "",
                };
                self.problem(pointer, format!("{}{hint}", crate::error::chain(&error)));
                None
            }
        }
    }

    fn methods(&mut self, pointer: &str, written: Option<&Methods>) -> Vec<String> {
        let methods: Vec<String> = written.iter().flat_map(|methods| &methods.0).cloned().collect();
        for method in &methods {
            if method.is_empty() || !method.bytes().all(|b| b.is_ascii_uppercase()) {
                self.problem(pointer, format!("`{method}` is no method: write it like `GET`"));
            }
        }
        let methods = methods.into_iter();
        sorted(
            methods
                .filter(|method| method.bytes().all(|b| b.is_ascii_uppercase()))
                .collect(),
        )
    }

    fn paths(&mut self, pointer: &str, written: Option<&Texts>) -> Vec<PathPattern> {
        let texts: Vec<&String> = match written {
            None => Vec::new(),
            Some(Texts::One(text)) => vec![text],
            Some(Texts::Many(texts)) => texts.iter().collect(),
        };
        let mut paths = Vec::new();
        for text in texts {
            match text.parse::<PathPattern>() {
                Ok(pattern) => paths.push(pattern),
                Err(error) => self.problem(pointer, crate::error::chain(&error)),
            }
        }
        paths.sort_by(|a: &PathPattern, b| a.as_str().cmp(b.as_str()));
        paths.dedup();
        paths
    }

    /// With a parent: each opening is within one of its own, and what it asks about is asked about.
    fn narrows(&mut self, found: &[Found], inherited: &Network) {
        let Some(parent) = self.parent else { return };
        let owner = &parent.name;
        let mut problems = Vec::new();
        for Found { rule, pointer, .. } in found.iter().filter(|found| found.rule.action != Action::Deny) {
            let mut openings = inherited.rules.iter().filter(|rule| rule.action != Action::Deny);
            if !openings.any(|opening| is_within(rule, opening)) {
                let message = format!("rule `{}` opens what no one rule of policy `{owner}` opens", rule.id);
                problems.push((pointer.clone(), message));
                continue;
            }
            let asked = inherited.rules.iter().find(|other| {
                other.action == Action::Ask && rule.action == Action::Allow && touch(&other.target, &rule.target)
                    && other.ports.iter().any(|port| rule.ports.contains(port))
                    // The one that asks is kept, and speaks wherever it is the more specific.
                    && !is_broader(&rule.target, &other.target)
            });
            if let Some(asked) = asked {
                let message = format!(
                    "rule `{}` allows what rule `{}` of policy `{owner}` asks about",
                    rule.id, asked.id
                );
                problems.push((pointer.clone(), message));
            }
        }
        for (pointer, message) in problems {
            self.problem(&pointer, message);
        }
    }

    fn network_budgets(&mut self, written: &NetworkBudgetsInput, inherited: &Budgets) -> Budgets {
        let size = |checker: &mut Self, field: &str, text: Option<&str>| {
            checker.quantity(
                &format!("/network/budgets/{field}"),
                text?,
                parse_size,
                (1, 1024 * TIB),
                show_size,
            )
        };
        let up = size(self, "bytes_up", written.bytes_up.as_deref());
        let down = size(self, "bytes_down", written.bytes_down.as_deref());
        let time: Option<Duration> =
            self.duration("/network/budgets/time", written.time.as_deref(), (SECOND, 30 * DAY));
        Budgets {
            connections: self.open_cap("connections", written.connections, inherited.connections, |n| {
                n.to_string()
            }),
            concurrent: {
                let own = written.concurrent.map(|n| n as usize);
                self.capped("/network/budgets/concurrent", own, inherited.concurrent, |n| {
                    n.to_string()
                })
            },
            sent: self.open_cap("bytes_up", up, inherited.sent, show_size),
            received: self.open_cap("bytes_down", down, inherited.received, show_size),
            requests_per_second: self.open_cap(
                "requests_per_second",
                written.requests_per_second,
                inherited.requests_per_second,
                |n| n.to_string(),
            ),
            queries_per_second: self.open_cap(
                "queries_per_second",
                written.queries_per_second,
                inherited.queries_per_second,
                |n| n.to_string(),
            ),
            time: self.open_cap("time", time, inherited.time, show_duration),
        }
    }

    /// A cap that may be missing, which is the widest.
    fn open_cap<T: PartialOrd + Copy>(
        &mut self,
        field: &str,
        own: Option<T>,
        inherited: Option<T>,
        show: impl Fn(T) -> String,
    ) -> Option<T> {
        match inherited {
            Some(inherited) => {
                // The widest that a root has by default is no parent's word.
                let pointer = format!("/network/budgets/{field}");
                Some(self.capped(&pointer, own, inherited, show))
            }
            None => own,
        }
    }

    /// By name. With a parent: its credentials, or some of them.
    pub(super) fn credentials(&mut self, written: Option<&[CredentialInput]>, network: &Network) -> Vec<Credential> {
        let Some(written) = written else {
            let inherited = self.parent.map(|parent| parent.credentials.clone()).unwrap_or_default();
            // Without a way to its place a secret is not carried along.
            let is_usable = |credential: &Credential| credential.exposed || network.mode() != Mode::None;
            return inherited.into_iter().filter(is_usable).collect();
        };
        let mut credentials: Vec<Credential> = Vec::new();
        for (n, input) in written.iter().enumerate() {
            let pointer = format!("/credentials/{n}");
            let Some(credential) = self.credential(&pointer, input, network) else {
                continue;
            };
            if credentials.iter().any(|other| other.name == credential.name) {
                self.problem(
                    &format!("{pointer}/name"),
                    format!("`{}` is the name of two credentials", credential.name),
                );
            }
            let twice = |other: &Credential| other.variable.is_some() && other.variable == credential.variable;
            if credentials.iter().any(twice) {
                self.problem(&format!("{pointer}/env"), "another credential has the same variable");
            }
            if let Some(parent) = self.parent {
                let same = |other: &Credential| {
                    Credential {
                        source: credential.source.clone(),
                        ..other.clone()
                    } == credential
                };
                if !parent.credentials.iter().any(same) {
                    let message = format!(
                        "credential `{}` is not one of policy `{}`",
                        credential.name, parent.name
                    );
                    self.problem(&pointer, message);
                }
            }
            credentials.push(credential);
        }
        credentials.sort_by(|a, b| a.name.cmp(&b.name));
        credentials
    }

    fn credential(&mut self, pointer: &str, input: &CredentialInput, network: &Network) -> Option<Credential> {
        let from = match input.from.as_deref().map(str::parse) {
            Some(Ok(from)) => Some(from),
            Some(Err(error)) => {
                self.problem(&format!("{pointer}/from"), crate::error::chain(&error));
                None
            }
            None => None,
        };
        if let Some(variable) = &input.env {
            let is_variable = |name: &str| {
                !name.starts_with(|c: char| c.is_ascii_digit())
                    && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
            };
            if !is_variable(variable) {
                self.problem(
                    &format!("{pointer}/env"),
                    format!("`{variable}` is no name of a variable"),
                );
            }
        }
        let inject = match &input.inject {
            Some(inject) => Some(self.inject(&format!("{pointer}/inject"), inject, network)?),
            None => None,
        };
        let exposed = input.expose.is_some();
        if exposed {
            self.problem(&format!("{pointer}/expose"), not_yet("`expose`"));
        }
        match (exposed, &inject, &input.env) {
            (true, Some(_), _) => {
                self.problem(pointer, "it is exposed or injected, not both");
            }
            (true, None, None) => self.problem(pointer, "`expose` needs `env`, the variable that holds it"),
            (false, None, _) => {
                self.problem(
                    pointer,
                    "it goes nowhere: write `inject`, or `expose = \"env\"` to give it away",
                );
            }
            (true, None, Some(_)) | (false, Some(_), _) => {}
        }
        Some(Credential {
            name: input.name.clone()?,
            from: from?,
            variable: input.env.clone(),
            exposed,
            inject,
            source: self.document.source(pointer),
        })
    }

    fn inject(&mut self, pointer: &str, input: &InjectInput, network: &Network) -> Option<Inject> {
        let host = self.host(&format!("{pointer}/host"), input.host.as_deref()?);
        let port = input.port.unwrap_or(443);
        let place = self.place_of(pointer, input);
        let methods = self.methods(&format!("{pointer}/methods"), input.methods.as_ref());
        let paths = self.paths(&format!("{pointer}/path"), input.path.as_ref());
        let host = host?;
        if network.mode() != Mode::None && network.opening(&host, port).is_none() {
            self.problem(
                &format!("{pointer}/host"),
                format!("no rule opens `{host}` on port {port}"),
            );
        } else if network.mode() == Mode::None {
            self.problem(pointer, "the network has `mode` `none`: it would never be put in");
        }
        Some(Inject {
            host,
            port,
            place: place?,
            methods,
            paths,
        })
    }

    fn place_of(&mut self, pointer: &str, input: &InjectInput) -> Option<Place> {
        let named = [
            input.header.is_some(),
            input.basic.is_some(),
            input.query.is_some(),
            input.sigv4.is_some(),
        ];
        if named.iter().filter(|named| **named).count() > 1 {
            self.problem(
                pointer,
                "`header`, `basic`, `query` and `sigv4` are different places: one of them",
            );
            return None;
        }
        if input.format.is_some() && input.header.is_none() {
            self.problem(
                &format!("{pointer}/format"),
                "it is the form of a `header`, which is missing",
            );
        }
        if let Some(user) = &input.basic {
            return Some(Place::Basic { user: user.clone() });
        }
        if let Some(name) = &input.query {
            return Some(Place::Query { name: name.clone() });
        }
        if let Some(sigv4) = &input.sigv4 {
            let session_token = match sigv4.session_token.as_deref().map(str::parse) {
                Some(Err(error)) => {
                    self.problem(&format!("{pointer}/sigv4/session_token"), crate::error::chain(&error));
                    None
                }
                Some(Ok(token)) => Some(token),
                None => None,
            };
            return Some(Place::SigV4 {
                access_key: sigv4.access_key.clone()?,
                session_token,
                region: sigv4.region.clone()?,
                service: sigv4.service.clone()?,
            });
        }
        let Some(header) = &input.header else {
            return Some(Place::Bearer);
        };
        let format = input.format.clone().unwrap_or_else(|| "{}".to_owned());
        if format.matches("{}").count() != 1 || format.chars().any(char::is_control) {
            self.problem(
                &format!("{pointer}/format"),
                "it holds `{}` once, for the secret, and no control characters",
            );
        }
        match http::HeaderName::from_bytes(header.to_ascii_lowercase().as_bytes()) {
            Ok(name) => Some(Place::Header { name, format }),
            Err(_) => {
                self.problem(
                    &format!("{pointer}/header"),
                    format!("`{header}` is no name of a header"),
                );
                None
            }
        }
    }
}

/// Each once; the order means nothing.
fn sorted<T: Ord>(mut all: Vec<T>) -> Vec<T> {
    all.sort();
    all.dedup();
    all
}

/// What the language has, and nothing enforces: a policy that says it is not taken for one that is followed.
fn not_yet(what: &str) -> String {
    format!("{what} is not enforced by this version")
}

fn allowed(entry: &AllowInput) -> Written<'_> {
    Written {
        name: entry.name.as_deref(),
        host: entry.host.as_deref(),
        cidr: entry.cidr.as_deref(),
        ports: ports(entry.port.as_ref(), &[443]),
        methods: entry.methods.as_ref(),
        path: entry.path.as_ref(),
        tls: match entry.tls {
            None | Some(TlsInput::Auto) => Tls::Auto,
            Some(TlsInput::Open) => Tls::Open,
            Some(TlsInput::Off) => Tls::Off,
        },
        action: match entry.verdict {
            None | Some(OpeningVerdict::Allow) => Action::Allow,
            Some(OpeningVerdict::Ask) => Action::Ask,
        },
    }
}

fn denied(entry: &DenyInput) -> Written<'_> {
    Written {
        name: entry.name.as_deref(),
        host: entry.host.as_deref(),
        cidr: entry.cidr.as_deref(),
        ports: ports(entry.port.as_ref(), &[80, 443]),
        methods: entry.methods.as_ref(),
        path: entry.path.as_ref(),
        tls: match entry.cidr {
            // Nothing is opened to be denied.
            Some(_) => Tls::Off,
            None => Tls::Auto,
        },
        action: Action::Deny,
    }
}

fn ports(written: Option<&Ports>, default: &[u16]) -> Vec<u16> {
    match written {
        None => default.to_vec(),
        Some(Ports::One(port)) => vec![*port],
        Some(Ports::Many(ports)) => ports.clone(),
    }
}

/// How a rule without a name is called.
fn by_target(written: &Written<'_>) -> String {
    let target = written.host.or(written.cidr).unwrap_or_default();
    let ports = match (written.ports.as_slice(), written.action) {
        ([443], Action::Allow | Action::Ask) => String::new(),
        (ports, _) => format!(":{}", ports.iter().map(u16::to_string).collect::<Vec<_>>().join(",")),
    };
    let prefix = match written.action {
        Action::Deny => "deny ",
        Action::Allow | Action::Ask => "",
    };
    format!("{prefix}{target}{ports}")
}

/// Whether everything that `rule` lets out, `opening` does too, and no more easily.
fn is_within(rule: &Rule, opening: &Rule) -> bool {
    let target = is_broader(&opening.target, &rule.target);
    let ports = rule.ports.iter().all(|port| opening.ports.contains(port));
    let methods = opening.methods.is_empty()
        || (!rule.methods.is_empty() && rule.methods.iter().all(|method| opening.methods.contains(method)));
    let is_below = |path: &PathPattern| {
        opening.paths.iter().any(|wide| {
            let (wide, own) = (wide.as_str(), path.as_str());
            let below = wide.ends_with('/') && !wide.contains('*') && own.starts_with(wide);
            wide == own || below
        })
    };
    let paths = opening.paths.is_empty() || (!rule.paths.is_empty() && rule.paths.iter().all(is_below));
    let wire = opening.tls == rule.tls || (opening.tls == Tls::Auto && rule.tls == Tls::Open);
    let action = opening.action == Action::Allow || rule.action == Action::Ask;
    target && ports && methods && paths && wire && action
}

/// Whether `wide` has all of `narrow`.
fn is_broader(wide: &Target, narrow: &Target) -> bool {
    match (wide, narrow) {
        (Target::Host(wide), Target::Host(narrow)) => covers(wide, narrow),
        (Target::Cidr(wide), Target::Cidr(narrow)) => wide.contains(narrow),
        (Target::Host(_), Target::Cidr(_)) | (Target::Cidr(_), Target::Host(_)) => false,
    }
}

fn touch(one: &Target, other: &Target) -> bool {
    is_broader(one, other) || is_broader(other, one)
}

fn rule_of(problem: &Problem) -> &RuleId {
    match problem {
        Problem::Twice(rule) | Problem::Reserved(rule) | Problem::Port(rule) | Problem::OpenAddress(rule) => rule,
        Problem::Method { rule, .. } => rule,
    }
}

fn shown(problem: &Problem) -> String {
    match problem {
        Problem::Twice(rule) => format!("rule `{rule}` stands twice: give one a `name` of its own"),
        Problem::OpenAddress(rule) => {
            format!("rule `{rule}`: TLS to an address is not opened, so methods and paths need `tls = \"off\"` there")
        }
        Problem::Reserved(_) | Problem::Port(_) | Problem::Method { .. } => problem.to_string(),
    }
}
