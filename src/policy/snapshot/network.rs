//! The network and its secrets in a snapshot. A policy without either looks as it did before there were any.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::millis;
use crate::egress::budget::Budgets;
use crate::egress::rules::{Action, Rule, RuleId, Rules, Target, Tls};
use crate::policy::network::{Credential, Inject, Mode, Network, Place};
use crate::secret::Source;

#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum NetworkForm {
    Closed(Closed),
    Open(OpenForm),
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Closed {
    None,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct OpenForm {
    mode: OpenMode,
    rules: BTreeMap<String, NetworkRuleForm>,
    budgets: NetworkBudgetsForm,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum OpenMode {
    Proxy,
    Learn,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct NetworkRuleForm {
    action: Action,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    host: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cidr: Option<String>,
    ports: BTreeSet<u16>,
    methods: BTreeSet<String>,
    paths: BTreeSet<String>,
    tls: Tls,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct NetworkBudgetsForm {
    connections: Option<u64>,
    concurrent: u64,
    bytes_up: Option<u64>,
    bytes_down: Option<u64>,
    requests_per_second: Option<u32>,
    queries_per_second: Option<u32>,
    time_ms: Option<u64>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct CredentialForm {
    name: String,
    from: Source,
    variable: Option<String>,
    exposed: bool,
    inject: Option<InjectForm>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct InjectForm {
    host: String,
    port: u16,
    place: PlaceForm,
    methods: BTreeSet<String>,
    paths: BTreeSet<String>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum PlaceForm {
    Bearer,
    Basic {
        user: String,
    },
    Header {
        name: String,
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

impl NetworkForm {
    pub fn of(network: &Network) -> Self {
        let mode = match network.mode {
            Mode::None => return Self::Closed(Closed::None),
            Mode::Proxy => OpenMode::Proxy,
            Mode::Learn => OpenMode::Learn,
        };
        let budgets = &network.budgets;
        let rules = network.rules.iter();
        Self::Open(OpenForm {
            mode,
            rules: rules
                .map(|rule| (rule.id.to_string(), NetworkRuleForm::of(rule)))
                .collect(),
            budgets: NetworkBudgetsForm {
                connections: budgets.connections,
                concurrent: budgets.concurrent as u64,
                bytes_up: budgets.sent,
                bytes_down: budgets.received,
                requests_per_second: budgets.requests_per_second,
                queries_per_second: budgets.queries_per_second,
                time_ms: budgets.time.map(millis),
            },
        })
    }

    pub fn network(self, sources: BTreeMap<String, String>) -> Result<Network, String> {
        let open = match self {
            Self::Closed(Closed::None) => return Ok(Network::default()),
            Self::Open(open) => open,
        };
        let rules = open.rules.into_iter().map(|(id, form)| form.rule(&id));
        let rules = rules.collect::<Result<Vec<_>, _>>()?;
        Rules::compile(rules.clone()).map_err(|problems| {
            let problems: Vec<String> = problems.iter().map(ToString::to_string).collect();
            problems.join(", ")
        })?;
        let budgets = open.budgets;
        Ok(Network {
            mode: match open.mode {
                OpenMode::Proxy => Mode::Proxy,
                OpenMode::Learn => Mode::Learn,
            },
            rules,
            budgets: Budgets {
                connections: budgets.connections,
                concurrent: usize::try_from(budgets.concurrent).unwrap_or(usize::MAX),
                sent: budgets.bytes_up,
                received: budgets.bytes_down,
                requests_per_second: budgets.requests_per_second,
                queries_per_second: budgets.queries_per_second,
                time: budgets.time_ms.map(Duration::from_millis),
            },
            sources,
        })
    }
}

impl NetworkRuleForm {
    fn of(rule: &Rule) -> Self {
        let (host, cidr) = match &rule.target {
            Target::Host(pattern) => (Some(pattern.to_string()), None),
            Target::Cidr(net) => (None, Some(net.to_string())),
        };
        Self {
            action: rule.action,
            host,
            cidr,
            ports: rule.ports.iter().copied().collect(),
            methods: rule.methods.iter().cloned().collect(),
            paths: rule.paths.iter().map(|path| path.as_str().to_owned()).collect(),
            tls: rule.tls,
        }
    }

    fn rule(self, id: &str) -> Result<Rule, String> {
        let target = match (self.host, self.cidr) {
            (Some(host), None) => Target::Host(host.parse().map_err(|error| format!("{error}"))?),
            (None, Some(net)) => Target::Cidr(net.parse().map_err(|error| format!("{error}"))?),
            (Some(_), Some(_)) | (None, None) => return Err(format!("rule `{id}` has no one target")),
        };
        Ok(Rule {
            id: RuleId::from(id),
            action: self.action,
            target,
            ports: self.ports.into_iter().collect(),
            methods: self.methods.into_iter().collect(),
            paths: paths(&self.paths)?,
            tls: self.tls,
        })
    }
}

fn paths(texts: &BTreeSet<String>) -> Result<Vec<crate::egress::rules::PathPattern>, String> {
    let paths = texts.iter().map(|text| text.parse());
    paths.collect::<Result<_, _>>().map_err(|error| format!("{error}"))
}

impl CredentialForm {
    pub fn of(credential: &Credential) -> Self {
        Self {
            name: credential.name.clone(),
            from: credential.from.clone(),
            variable: credential.variable.clone(),
            exposed: credential.exposed,
            inject: credential.inject.as_ref().map(InjectForm::of),
        }
    }

    pub fn credential(self, sources: &BTreeMap<String, String>) -> Result<Credential, String> {
        Ok(Credential {
            source: sources.get(&self.name).cloned().unwrap_or_default(),
            name: self.name,
            from: self.from,
            variable: self.variable,
            exposed: self.exposed,
            inject: self.inject.map(InjectForm::inject).transpose()?,
        })
    }
}

impl InjectForm {
    fn of(inject: &Inject) -> Self {
        Self {
            host: inject.host.to_string(),
            port: inject.port,
            place: match inject.place.clone() {
                Place::Bearer => PlaceForm::Bearer,
                Place::Basic { user } => PlaceForm::Basic { user },
                Place::Header { name, format } => PlaceForm::Header {
                    name: name.to_string(),
                    format,
                },
                Place::Query { name } => PlaceForm::Query { name },
                Place::SigV4 {
                    access_key,
                    session_token,
                    region,
                    service,
                } => PlaceForm::SigV4 {
                    access_key,
                    session_token,
                    region,
                    service,
                },
            },
            methods: inject.methods.iter().cloned().collect(),
            paths: inject.paths.iter().map(|path| path.as_str().to_owned()).collect(),
        }
    }

    fn inject(self) -> Result<Inject, String> {
        Ok(Inject {
            host: self.host.parse().map_err(|error| format!("{error}"))?,
            port: self.port,
            place: match self.place {
                PlaceForm::Bearer => Place::Bearer,
                PlaceForm::Basic { user } => Place::Basic { user },
                PlaceForm::Header { name, format } => Place::Header {
                    name: name.parse().map_err(|error| format!("{error}"))?,
                    format,
                },
                PlaceForm::Query { name } => Place::Query { name },
                PlaceForm::SigV4 {
                    access_key,
                    session_token,
                    region,
                    service,
                } => Place::SigV4 {
                    access_key,
                    session_token,
                    region,
                    service,
                },
            },
            methods: self.methods.into_iter().collect(),
            paths: paths(&self.paths)?,
        })
    }
}
