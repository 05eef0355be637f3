//! Policies: what a run may do. As written ([`input`]) -> checked ([`check()`]) -> [`Policy`] -> [`decide()`].
//!
//! Owns: the file format, its checks, its canonical form and hash, decisions. Must not know: how anything is enforced.
//! Deny is the default, and every decision names its rule and where that is written.
//!
//! - `document.rs`: TOML with positions; `input.rs`: the file as written; `schema.rs`: its JSON Schema, and what a file
//!   breaks of it; `check/`: everything a schema cannot say; `quantity.rs`: sizes and durations;
//! - `rules.rs`: one rule and what it matches; `decide.rs`: the verdict over all of them; `tools.rs`: names and arguments;
//! - `network.rs`: what may be reached and which secrets are used there, in the rules of `egress`; `presets.rs`: files of such rules;
//! - `snapshot.rs`: the canonical form, its hash, and back; `library.rs`: policies by name or path; `budgets.rs`.
//!
//! A policy may extend one other and can only narrow it: numbers are compared when the file is checked, and the rules of
//! both are kept as [`Layer`]s of which the strictest speaks, so that a child cannot allow what its parent does not.

mod budgets;
mod check;
mod decide;
mod document;
pub mod input;
mod library;
pub mod network;
mod presets;
pub mod quantity;
mod rules;
mod schema;
mod snapshot;
pub mod tools;
mod violation;

use std::path::PathBuf;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use budgets::{BudgetOverrides, Budgets};
pub use check::check;
pub use decide::{Request, decide, outside};
pub use document::Document;
pub use library::{Listed, Origin, Policies};
pub use network::Network;
pub use presets::Presets;
pub use rules::{Layer, Matcher, Rule, Tools};
pub use schema::schema;
pub use violation::{Position, Violation};

use crate::error::Kind;
use crate::sandbox::seccomp::Profile;
use crate::sandbox::{BackendName, ImageRef, Isolation, Limits, Mount};

/// What policies of this build are written in, as files and as snapshots.
pub const FORMAT_VERSION: u32 = 1;

/// A checked policy. It cannot be wrong: it comes from [`check()`] or from a snapshot of one.
#[derive(Debug, Clone, PartialEq)]
pub struct Policy {
    name: String,
    description: Option<String>,
    isolation: Isolation,
    seccomp: Profile,
    backend: Option<BackendName>,
    image: ImageRef,
    limits: Limits,
    budgets: Budgets,
    /// By target.
    mounts: Vec<Mount>,
    network: Network,
    credentials: Vec<network::Credential>,
    approvals_expire: Duration,
    /// Root first; the last one is the policy's own. Never empty, and the root has a default.
    layers: Vec<Layer>,
    hash: String,
}

impl Policy {
    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn description(&self) -> Option<&str> {
        self.description.as_deref()
    }

    /// The weakest isolation that will do.
    pub fn isolation(&self) -> Isolation {
        self.isolation
    }

    /// The system-call filter of every program.
    pub fn seccomp(&self) -> Profile {
        self.seccomp
    }

    /// `None`: any backend that can give the isolation.
    pub fn backend(&self) -> Option<BackendName> {
        self.backend
    }

    pub fn image(&self) -> &ImageRef {
        &self.image
    }

    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    pub fn budgets(&self) -> &Budgets {
        &self.budgets
    }

    /// Read-only binds beside the workspace, by target.
    pub fn mounts(&self) -> &[Mount] {
        &self.mounts
    }

    /// What the sandbox can reach.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// Secrets that the sandbox may use, by name.
    pub fn credentials(&self) -> &[network::Credential] {
        &self.credentials
    }

    /// How long a question to a person stays open.
    pub fn approvals_expire(&self) -> Duration {
        self.approvals_expire
    }

    /// Rules by the policy that wrote them, root of `extends` first.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// blake3 of the canonical form, hex. Equal meaning gives an equal hash.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// Narrows the budgets by a task's own.
    ///
    /// # Errors
    /// One violation for each that asks for more than the policy gives.
    pub fn narrow_budgets(&self, overrides: &BudgetOverrides) -> Result<Budgets, Vec<Violation>> {
        self.budgets.narrow(overrides, &self.name)
    }
}

/// What a policy says to one action.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decision {
    pub verdict: Verdict,
    /// The rule's name; `default` where none fits.
    pub rule: String,
    /// Where it is written, `policies/strict.toml:12`.
    pub source: String,
    /// For a person and for the model.
    pub reason: String,
}

/// From lenient to strict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    Allow,
    Ask,
    Deny,
}

/// What a call can do outside the sandbox. From lenient to strict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Outside {
    Idempotent,
    External,
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Allow => "allow",
            Self::Ask => "ask",
            Self::Deny => "deny",
        })
    }
}

/// A policy that cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no policy `{name}`; there are: {known}")]
    NotFound { name: String, known: String },
    #[error("no policy file `{0}`")]
    NoFile(PathBuf),
    #[error("`{0}` is the name of a built-in policy and of a file in the data directory: rename the file")]
    Ambiguous(String),
    #[error("could not read policy `{path}`")]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("policy `{policy}` is not valid:\n{}", violation::lines(violations))]
    Invalid { policy: String, violations: Vec<Violation> },
    #[error("the policy snapshot cannot be used: {0}")]
    Snapshot(String),
}

impl Error {
    pub fn kind(&self) -> Kind {
        match self {
            Self::NotFound { .. } => Kind::NotFound,
            Self::NoFile(_) | Self::Ambiguous(_) | Self::Read { .. } | Self::Invalid { .. } => Kind::Invalid,
            Self::Snapshot(_) => Kind::WrongState,
        }
    }
}

#[cfg(test)]
mod tests;
