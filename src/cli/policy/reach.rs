//! The network of a policy, in words: what is decided about a host, and all that is open.

use std::path::Path;

use serde_json::json;

use super::Answer;
use crate::cli::{Error, Exit};
use crate::egress::name::Host;
use crate::egress::rules::{Action, PathPattern, Rule, Target, Tls};
use crate::error::Kind;
use crate::policy::network::{self, Credential, Inject, Mode, Place, Wish};
use crate::policy::quantity::{show_duration, show_size};
use crate::policy::{Decision, Policies, Policy};

/// What is decided about a connection, or one request in it.
pub(super) fn explain(policy: &str, target: &str, request: Option<&str>, data_dir: &Path) -> Result<Answer, Error> {
    let policy = Policies::load(policy, data_dir)?;
    let usage = |message: String| Error::new(Kind::Invalid, message);
    let (host, port) = match target.rsplit_once(':') {
        Some((host, port)) if !host.contains(':') || host.ends_with(']') => {
            let port = port.parse::<u16>().map_err(|_| usage(format!("`{port}` is no port")))?;
            (host, port)
        }
        Some(_) | None => (target, 443),
    };
    let host = Host::parse(host.as_bytes()).map_err(|error| usage(format!("`{host}`: {error}")))?;
    let http = match request {
        None => None,
        Some(request) => match request.split_once(' ') {
            Some((method, path)) if path.starts_with('/') => Some((method, path)),
            Some(_) | None => return Err(usage(format!("`{request}` is not like `GET /path`"))),
        },
    };
    let wish = Wish {
        host: &host,
        port,
        http,
    };
    let Decision {
        verdict,
        rule,
        source,
        reason,
    } = network::decide(&policy, &wish);
    let used: Vec<&str> = policy
        .credentials()
        .iter()
        .filter(|one| goes_to(one, &wish))
        .map(|one| one.name.as_str())
        .collect();
    let credentials = match used.as_slice() {
        [] => "none".to_owned(),
        names => names.join(", "),
    };
    let text = format!(
        "verdict     {verdict}\nrule        {rule}\nwritten     {source}\nreason      {reason}\ncredential  {credentials}\n\
         policy      {} {}\nWhat a name leads to is judged when it is looked up.",
        policy.name(),
        policy.hash()
    );
    let object = json!({
        "policy": policy.name(), "hash": policy.hash(), "host": host.to_string(), "port": port, "request": request,
        "verdict": verdict, "rule": rule, "source": source, "reason": reason, "credentials": used,
    });
    Ok((Exit::Ok, object, text))
}

/// Whether a secret is put into what is wished.
fn goes_to(credential: &Credential, wish: &Wish<'_>) -> bool {
    let Some(inject) = &credential.inject else { return false };
    let is_host = match wish.host {
        Host::Name(name) => inject.host.matches(name) && inject.port == wish.port,
        Host::Address(_) => false,
    };
    let is_request = wish.http.is_none_or(|(method, path)| {
        let path = crate::egress::rules::Path::of(path);
        (inject.methods.is_empty() || inject.methods.iter().any(|known| known == method))
            && (inject.paths.is_empty() || inject.paths.iter().any(|pattern| pattern.allows(&path)))
    });
    is_host && is_request
}

/// Lines of what is open, for `policy show`.
pub(super) fn shown(policy: &Policy) -> Vec<(&'static str, String)> {
    let network = policy.network();
    let mut lines = Vec::new();
    if network.mode() != Mode::None {
        let budgets = network.budgets();
        let count = |n: Option<u64>| n.map_or("no limit".to_owned(), |n| n.to_string());
        let size = |n: Option<u64>| n.map_or("no limit".to_owned(), show_size);
        let text = format!(
            "connections {}, at one time {}, up {}, down {}, requests a second {}, questions a second {}, time {}",
            count(budgets.connections),
            budgets.concurrent,
            size(budgets.sent),
            size(budgets.received),
            count(budgets.requests_per_second.map(u64::from)),
            count(budgets.queries_per_second.map(u64::from)),
            budgets.time.map_or("no limit".to_owned(), show_duration)
        );
        lines.push(("traffic", text));
    }
    for one in network.rules() {
        let source = network.source(&one.id).unwrap_or_default();
        lines.push(("network", format!("{}  ({source})", rule(one))));
    }
    for credential in policy.credentials() {
        let held = match &credential.variable {
            Some(variable) => format!("a placeholder in {variable}"),
            None => "no variable".to_owned(),
        };
        let place = credential.inject.as_ref().map_or("nowhere".to_owned(), inject);
        let text = format!(
            "{} from {}, {held}, put in as {place}  ({})",
            credential.name, credential.from, credential.source
        );
        lines.push(("secret", text));
    }
    lines
}

fn rule(rule: &Rule) -> String {
    let action = match rule.action {
        Action::Allow => "allow",
        Action::Ask => "ask",
        Action::Deny => "deny",
    };
    let target = match &rule.target {
        Target::Host(pattern) => pattern.to_string(),
        Target::Cidr(net) => net.to_string(),
    };
    let ports: Vec<String> = rule.ports.iter().map(u16::to_string).collect();
    let tls = match rule.tls {
        Tls::Auto => "",
        Tls::Open => ", TLS opened",
        Tls::Off => ", no TLS",
    };
    let only = only(", only ", &rule.methods, &rule.paths);
    format!(
        "{action:<5} {} on {target} port {}{only}{tls}",
        rule.id,
        ports.join(",")
    )
}

fn inject(inject: &Inject) -> String {
    let what = match &inject.place {
        Place::Bearer => "a bearer token".to_owned(),
        Place::Basic { user } => format!("the password of `{user}`"),
        Place::Header { name, .. } => format!("the header `{name}`"),
        Place::Query { name } => format!("`{name}` in the query"),
        Place::SigV4 { region, service, .. } => format!("an AWS signature for {service} in {region}"),
    };
    let only = only(" ", &inject.methods, &inject.paths);
    format!("{what} to {}:{}{only}", inject.host, inject.port)
}

/// To which requests it is restricted, after `word`; empty for none.
fn only(word: &str, methods: &[String], paths: &[PathPattern]) -> String {
    let paths = paths.iter().map(PathPattern::as_str);
    let only: Vec<&str> = methods.iter().map(String::as_str).chain(paths).collect();
    match only.is_empty() {
        true => String::new(),
        false => format!("{word}{}", only.join(" ")),
    }
}
