//! What a run stands on, and whether it still does when it is to go on (requirement E4).
//!
//! The first driver of a run writes down what it finds; whoever goes on with the run compares. A difference is not guessed about:
//! the run is withheld, which says what was recorded and what is there now, until somebody accepts it. What is accepted is the
//! difference, not another policy: the run keeps the snapshot that it started with, and a fork is what takes today's.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::decide::Rules;
use super::effects::Shop;
use crate::policy::Policies;

/// One of the things that a run stands on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ground {
    /// The frozen request and its version.
    Task,
    /// The policy that has the name.
    Policy,
    /// System-call filter, isolation, backend.
    Profile,
    /// What the backend can do on this host.
    Capabilities,
    Image,
    /// The workspace that it was given, and the one that it has.
    Inputs,
    /// The tools' schemas, as the model was told them.
    Tools,
}

impl Ground {
    pub const ALL: [Self; 7] = [
        Self::Task,
        Self::Policy,
        Self::Profile,
        Self::Capabilities,
        Self::Image,
        Self::Inputs,
        Self::Tools,
    ];

    /// As `--accept` takes it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Task => "task",
            Self::Policy => "policy",
            Self::Profile => "profile",
            Self::Capabilities => "capabilities",
            Self::Image => "image",
            Self::Inputs => "inputs",
            Self::Tools => "tools",
        }
    }

    /// Stable, for clients.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Task => "TASK_CHANGED",
            Self::Policy => "POLICY_CHANGED",
            Self::Profile => "PROFILE_CHANGED",
            Self::Capabilities => "CAPABILITIES_CHANGED",
            Self::Image => "IMAGE_CHANGED",
            Self::Inputs => "INPUTS_CHANGED",
            Self::Tools => "TOOLS_CHANGED",
        }
    }

    /// Reads names as clients give them.
    ///
    /// # Errors
    /// The first that is none.
    pub fn parse(names: &[String]) -> Result<Vec<Self>, String> {
        let find = |name: &String| {
            let found = Self::ALL.into_iter().find(|ground| ground.name() == name);
            let all = Self::ALL.map(Self::name).join(", ");
            found.ok_or_else(|| format!("`{}` cannot be accepted; there are: {all}", crate::ids::shown(name)))
        };
        names.iter().map(find).collect()
    }
}

impl fmt::Display for Ground {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a run stands on: a digest, or a name that says the same.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grounds {
    pub task: String,
    pub policy: String,
    pub profile: String,
    pub capabilities: String,
    pub image: String,
    pub inputs: String,
    pub tools: String,
}

/// Something that is no longer what it was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mismatch {
    pub ground: Ground,
    pub recorded: String,
    pub found: String,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            ground,
            recorded,
            found,
        } = self;
        write!(f, "{ground}: {found} now, {recorded} then")
    }
}

impl Grounds {
    pub fn get(&self, ground: Ground) -> &str {
        match ground {
            Ground::Task => &self.task,
            Ground::Policy => &self.policy,
            Ground::Profile => &self.profile,
            Ground::Capabilities => &self.capabilities,
            Ground::Image => &self.image,
            Ground::Inputs => &self.inputs,
            Ground::Tools => &self.tools,
        }
    }

    /// From now on what was found is what is recorded.
    pub fn accept(&mut self, mismatch: &Mismatch) {
        let recorded = match mismatch.ground {
            Ground::Task => &mut self.task,
            Ground::Policy => &mut self.policy,
            Ground::Profile => &mut self.profile,
            Ground::Capabilities => &mut self.capabilities,
            Ground::Image => &mut self.image,
            Ground::Inputs => &mut self.inputs,
            Ground::Tools => &mut self.tools,
        };
        recorded.clone_from(&mismatch.found);
    }

    /// Everything in which `found` is not this.
    pub fn mismatches(&self, found: &Self) -> Vec<Mismatch> {
        let differs = |ground: &Ground| self.get(*ground) != found.get(*ground);
        let mismatch = |ground: Ground| Mismatch {
            ground,
            recorded: self.get(ground).to_owned(),
            found: found.get(ground).to_owned(),
        };
        Ground::ALL.into_iter().filter(differs).map(mismatch).collect()
    }
}

impl Shop {
    /// What a run of these rules stands on here and now.
    pub async fn grounds(&self, rules: &Rules) -> Grounds {
        let task = &rules.task;
        let policy = match Policies::load(&task.policy_name, self.benches.data_dir()) {
            Ok(policy) => policy.hash().to_owned(),
            Err(crate::policy::Error::NotFound { .. } | crate::policy::Error::NoFile(_)) => "none".to_owned(),
            Err(error) => format!("not usable: {error}"),
        };
        let profile = [
            task.backend.to_string().into_bytes(),
            rules.policy.isolation().to_string().into_bytes(),
            self.benches.filter(&rules.policy),
        ];
        let tools = serde_json::to_vec(&rules.registry.definitions()).expect("schemas are plain data");
        let workspace = task.workspace;
        Grounds {
            task: format!(
                "v{} {}",
                task.format_version,
                digest(&[task.to_value().to_string().into_bytes()])
            ),
            policy,
            profile: digest(&profile),
            capabilities: digest(&[self.benches.capabilities(task.backend).await.into_bytes()]),
            image: self.benches.image(&task.image),
            inputs: self.benches.inputs(workspace).await,
            tools: digest(&[tools]),
        }
    }
}

/// Of all parts in order; short enough to stand in each checkpoint.
fn digest(parts: &[Vec<u8>]) -> String {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher.update(&(part.len() as u64).to_be_bytes());
        hasher.update(part);
    }
    hasher.finalize().to_hex()[..32].to_owned()
}
