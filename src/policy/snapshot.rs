//! The canonical form of a policy: what it means and nothing else, one spelling for one meaning. Its blake3 is the hash.
//!
//! A run stores the snapshot that it started with. It has its own types, so that a change of a struct elsewhere cannot
//! change a hash or make a stored run unreadable. Comments, order, spelling of numbers, the description and the places
//! where rules are written are not part of the meaning; the last two are kept beside it.

mod network;

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::budgets::Budgets;
use super::rules::{Layer, Matcher, Rule, Tools};
use super::{Error, FORMAT_VERSION, Outside, Policy, Verdict};
use crate::sandbox::disk::{Kind as DiskKind, Quota, Rates};
use crate::sandbox::seccomp::Profile;
use crate::sandbox::{BackendName, Isolation, Limits, Mount};
use network::{CredentialForm, NetworkForm};

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Snapshot {
    hash: String,
    meaning: Meaning,
    notes: Notes,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Meaning {
    format_version: u32,
    name: String,
    isolation: Isolation,
    backend: Option<BackendName>,
    image: String,
    seccomp: Seccomp,
    network: NetworkForm,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    credentials: Vec<CredentialForm>,
    limits: LimitsForm,
    budgets: BudgetsForm,
    mounts: Vec<Mount>,
    approvals_expire_ms: u64,
    layers: Vec<LayerForm>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Seccomp {
    Default,
    Strict,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LimitsForm {
    cpus: f64,
    memory_bytes: u64,
    swap_bytes: u64,
    pids: u32,
    open_files: u64,
    tmp_bytes: u64,
    file_bytes: u64,
    wall_time_ms: u64,
    // Added later: left out where they are as they were before, so that older snapshots keep their hash.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tmp_inodes: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    shm_bytes: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    disk: Option<Quota>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    disk_kind: Option<DiskKind>,
    #[serde(default, skip_serializing_if = "Rates::is_unlimited")]
    disk_rates: Rates,
}

/// What [`LimitsForm`] means where it says nothing.
const FIRST_TMP_INODES: u64 = 10_000;
const FIRST_SHM_BYTES: u64 = 64 << 20;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct BudgetsForm {
    steps: Option<u32>,
    model_calls: Option<u32>,
    step_time_ms: u64,
    total_time_ms: u64,
    tokens: Option<u64>,
    cost_micros: Option<u64>,
    parallel_tools: u32,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LayerForm {
    policy: String,
    default: Option<Verdict>,
    rules: BTreeMap<String, RuleForm>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleForm {
    tools: Vec<String>,
    verdict: Verdict,
    // Added later: left out where nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    effect: Option<Outside>,
    reason: Option<String>,
    r#match: BTreeMap<String, String>,
}

/// Kept for people; not part of the hash.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Notes {
    description: Option<String>,
    /// One for each layer.
    sources: Vec<Sources>,
    /// Where rules of the network and credentials are written, by id and name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    network: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    credentials: BTreeMap<String, String>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sources {
    default: String,
    /// In the order in which they were written.
    rules: Vec<(String, String)>,
}

/// The hash of what `policy` means; its own `hash` field is not looked at.
pub(super) fn hash(policy: &Policy) -> String {
    let meaning = serde_json::to_value(Meaning::of(policy)).expect("a policy is plain data");
    blake3::hash(canonical(&meaning).to_string().as_bytes())
        .to_hex()
        .to_string()
}

/// The same value with the keys of every object sorted.
fn canonical(value: &Value) -> Value {
    match value {
        Value::Object(object) => {
            let sorted: BTreeMap<&String, Value> = object.iter().map(|(key, value)| (key, canonical(value))).collect();
            Value::Object(sorted.into_iter().map(|(key, value)| (key.clone(), value)).collect())
        }
        Value::Array(items) => Value::Array(items.iter().map(canonical).collect()),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => value.clone(),
    }
}

impl Policy {
    /// What a run keeps of the policy it started with: canonical, versioned, complete.
    pub fn snapshot(&self) -> Value {
        let notes = Notes {
            description: self.description.clone(),
            sources: self.layers.iter().map(Sources::of).collect(),
            network: self.network.sources.clone(),
            credentials: {
                let credentials = self.credentials.iter();
                credentials.map(|one| (one.name.clone(), one.source.clone())).collect()
            },
        };
        let snapshot = Snapshot {
            hash: self.hash.clone(),
            meaning: Meaning::of(self),
            notes,
        };
        canonical(&serde_json::to_value(snapshot).expect("a policy is plain data"))
    }

    /// Loads what [`snapshot`](Self::snapshot) gave.
    ///
    /// # Errors
    /// [`Error::Snapshot`] where it is of another format version, was changed, or is no snapshot.
    pub fn from_snapshot(value: &Value) -> Result<Self, Error> {
        let refuse = |reason: String| Error::Snapshot(reason);
        let version = value.pointer("/meaning/format_version").and_then(Value::as_u64);
        match version {
            None => return Err(refuse("it has no format version".to_owned())),
            Some(version) if version != u64::from(FORMAT_VERSION) => {
                return Err(refuse(format!(
                    "it has format version {version}, this build reads {FORMAT_VERSION}"
                )));
            }
            Some(_) => {}
        }
        let snapshot = Snapshot::deserialize(value).map_err(|error| refuse(error.to_string()))?;
        let policy = snapshot.policy().map_err(refuse)?;
        let found = hash(&policy);
        if found != policy.hash {
            return Err(refuse(format!("it says hash {}, its content has {found}", policy.hash)));
        }
        Ok(policy)
    }
}

impl Serialize for Policy {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.snapshot().serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Policy {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::from_snapshot(&Value::deserialize(deserializer)?).map_err(serde::de::Error::custom)
    }
}

impl Meaning {
    fn of(policy: &Policy) -> Self {
        let (limits, budgets) = (&policy.limits, &policy.budgets);
        Self {
            format_version: FORMAT_VERSION,
            name: policy.name.clone(),
            isolation: policy.isolation,
            backend: policy.backend,
            image: policy.image.to_string(),
            seccomp: match policy.seccomp {
                Profile::Default => Seccomp::Default,
                Profile::Strict => Seccomp::Strict,
            },
            network: NetworkForm::of(&policy.network),
            credentials: policy.credentials.iter().map(CredentialForm::of).collect(),
            limits: LimitsForm {
                cpus: limits.cpus,
                memory_bytes: limits.memory_bytes,
                swap_bytes: limits.swap_bytes,
                pids: limits.pids,
                open_files: limits.open_files,
                tmp_bytes: limits.tmp_bytes,
                file_bytes: limits.file_bytes,
                wall_time_ms: millis(limits.wall_time),
                tmp_inodes: (limits.tmp_inodes != FIRST_TMP_INODES).then_some(limits.tmp_inodes),
                shm_bytes: (limits.shm_bytes != FIRST_SHM_BYTES).then_some(limits.shm_bytes),
                disk: limits.disk,
                disk_kind: limits.disk_kind,
                disk_rates: limits.disk_rates,
            },
            budgets: BudgetsForm {
                steps: budgets.steps,
                model_calls: budgets.model_calls,
                step_time_ms: millis(budgets.step_time),
                total_time_ms: millis(budgets.total_time),
                tokens: budgets.tokens,
                cost_micros: budgets.cost_micros,
                parallel_tools: budgets.parallel_tools,
            },
            mounts: policy.mounts.clone(),
            approvals_expire_ms: millis(policy.approvals_expire),
            layers: policy.layers.iter().map(LayerForm::of).collect(),
        }
    }
}

impl LayerForm {
    fn of(layer: &Layer) -> Self {
        let rules = layer.rules.iter().map(|rule| {
            let matchers = rule.matchers.iter();
            let form = RuleForm {
                tools: rule.tools.names().into_iter().map(str::to_owned).collect(),
                verdict: rule.verdict,
                effect: rule.effect,
                reason: rule.reason.clone(),
                r#match: matchers
                    .map(|matcher| (matcher.key().to_owned(), matcher.text().to_owned()))
                    .collect(),
            };
            (rule.name.clone(), form)
        });
        Self {
            policy: layer.policy.clone(),
            default: layer.default,
            rules: rules.collect(),
        }
    }
}

impl Sources {
    fn of(layer: &Layer) -> Self {
        Self {
            default: layer.default_source.clone(),
            rules: layer
                .rules
                .iter()
                .map(|rule| (rule.name.clone(), rule.source.clone()))
                .collect(),
        }
    }
}

impl Snapshot {
    fn policy(self) -> Result<Policy, String> {
        let (meaning, notes) = (self.meaning, self.notes);
        if meaning.layers.len() != notes.sources.len() || meaning.layers.is_empty() {
            return Err("its layers and their sources do not fit".to_owned());
        }
        let layers = meaning.layers.into_iter().zip(notes.sources);
        let (limits, budgets) = (meaning.limits, meaning.budgets);
        Ok(Policy {
            name: meaning.name,
            description: notes.description,
            isolation: meaning.isolation,
            backend: meaning.backend,
            image: meaning.image.parse().map_err(|error| format!("{error}"))?,
            seccomp: match meaning.seccomp {
                Seccomp::Default => Profile::Default,
                Seccomp::Strict => Profile::Strict,
            },
            limits: Limits {
                cpus: limits.cpus,
                memory_bytes: limits.memory_bytes,
                swap_bytes: limits.swap_bytes,
                pids: limits.pids,
                open_files: limits.open_files,
                tmp_bytes: limits.tmp_bytes,
                file_bytes: limits.file_bytes,
                wall_time: Duration::from_millis(limits.wall_time_ms),
                tmp_inodes: limits.tmp_inodes.unwrap_or(FIRST_TMP_INODES),
                shm_bytes: limits.shm_bytes.unwrap_or(FIRST_SHM_BYTES),
                disk: limits.disk,
                disk_kind: limits.disk_kind,
                disk_rates: limits.disk_rates,
            },
            budgets: Budgets {
                steps: budgets.steps,
                model_calls: budgets.model_calls,
                step_time: Duration::from_millis(budgets.step_time_ms),
                total_time: Duration::from_millis(budgets.total_time_ms),
                tokens: budgets.tokens,
                cost_micros: budgets.cost_micros,
                parallel_tools: budgets.parallel_tools,
            },
            mounts: meaning.mounts,
            network: meaning.network.network(notes.network)?,
            credentials: {
                let credentials = meaning.credentials.into_iter();
                credentials
                    .map(|one| one.credential(&notes.credentials))
                    .collect::<Result<_, _>>()?
            },
            approvals_expire: Duration::from_millis(meaning.approvals_expire_ms),
            layers: layers
                .map(|(layer, sources)| layer.layer(sources))
                .collect::<Result<_, _>>()?,
            hash: self.hash,
        })
    }
}

impl LayerForm {
    fn layer(mut self, sources: Sources) -> Result<Layer, String> {
        let mut rules = Vec::new();
        for (name, source) in sources.rules {
            let form = self.rules.remove(&name).ok_or(format!("there is no rule `{name}`"))?;
            rules.push(form.rule(name, source)?);
        }
        if let Some(name) = self.rules.keys().next() {
            return Err(format!("rule `{name}` has no source"));
        }
        Ok(Layer {
            policy: self.policy,
            default: self.default,
            default_source: sources.default,
            rules,
        })
    }
}

impl RuleForm {
    fn rule(self, name: String, source: String) -> Result<Rule, String> {
        let tools = Tools::parse(self.tools.iter().map(String::as_str));
        let tools = tools.map_err(|wrong| wrong.into_iter().map(|(_, message)| message).collect::<String>())?;
        let entries = self.r#match.iter();
        let matchers = entries
            .map(|(key, text)| Matcher::parse(key, text, &tools))
            .collect::<Result<_, _>>()?;
        Ok(Rule {
            name,
            tools,
            verdict: self.verdict,
            effect: self.effect,
            reason: self.reason,
            matchers,
            source,
        })
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
