//! A policy file as it is written. The notes here are the descriptions of the published schema.
//!
//! Nothing here is trusted: `schema.rs` checks shape and plain ranges, `check/` all the rest. Every field is optional to
//! serde, so that one missing or wrong field does not hide the problems of the others; the schema says what is required.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Deserialize;

use super::{Outside, Verdict};
use crate::sandbox::disk::Kind as DiskKind;
use crate::sandbox::seccomp::Profile as Seccomp;
use crate::sandbox::{BackendName, Isolation};

/// What a run may do: its walls, its limits, its tools. Anything that is not named here is denied.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "Exuvia policy")]
pub struct Input {
    /// Version of this format.
    #[schemars(required, extend("const" = 1))]
    pub format_version: Option<u32>,
    /// Lower-case letters, digits and dashes. A file in the data directory is called `NAME.toml`.
    #[schemars(required, regex(pattern = r"^[a-z0-9][a-z0-9-]{0,62}$"))]
    pub name: Option<String>,
    /// What it is for, in a sentence. Not part of the hash.
    #[schemars(length(max = 1000))]
    pub description: Option<String>,
    /// The policy that this one narrows: a name, or a path relative to this file. What is not written here is as there;
    /// nothing can be wider than there.
    #[schemars(length(min = 1))]
    pub extends: Option<String>,
    /// The weakest wall that will do. A host that cannot give it refuses the run. Default: `container`.
    pub isolation: Option<Isolation>,
    /// The only backend that may make the sandbox. Default: any that can give the isolation.
    pub backend: Option<BackendName>,
    /// The root file system: `host` (a read-only view of the host's own `/usr`), `image:NAME` (of the image store, perhaps
    /// with `@sha256:…`), `rootfs:/DIR`, `tar:/FILE` or `docker:NAME`. Default: `host`.
    pub image: Option<String>,
    /// The system-call filter. `strict` leaves out what debuggers, databases and browsers need, and a smaller part of the kernel
    /// in reach. Default: `default`.
    pub seccomp: Option<Seccomp>,
    #[serde(default)]
    pub limits: LimitsInput,
    #[serde(default)]
    pub network: NetworkInput,
    /// Secrets that the sandbox may use, each in one place. Default: none.
    #[schemars(length(max = 64))]
    pub credentials: Option<Vec<CredentialInput>>,
    #[serde(default)]
    pub tools: ToolsInput,
    #[serde(default)]
    pub budgets: BudgetsInput,
    /// Host directories and files that the sandbox sees, read-only, beside its workspace. Default: none.
    #[schemars(length(max = 64))]
    pub mounts: Option<Vec<MountInput>>,
    #[serde(default)]
    pub approvals: ApprovalsInput,
}

/// Caps for the sandbox as a whole, enforced by the kernel.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LimitsInput {
    /// Processors' worth of time, `0.5` is half of one. Default: 1.
    #[schemars(range(min = 0.05, max = 256))]
    pub cpus: Option<f64>,
    /// Main memory, 16MiB to 4TiB. Default: `1GiB`.
    pub memory: Option<String>,
    /// Swap beyond memory, up to 4TiB. Default: `0`, none.
    pub swap: Option<String>,
    /// Processes and threads. Default: 256.
    #[schemars(range(min = 8, max = 65536))]
    pub pids: Option<u32>,
    /// Open files of one process. Default: 4096.
    #[schemars(range(min = 64, max = 1048576))]
    pub open_files: Option<u64>,
    /// Size of `/tmp`, which is memory. 1MiB to 1TiB. Default: `256MiB`.
    pub tmp: Option<String>,
    /// Files, directories and links that `/tmp` can hold, and `/dev/shm`. Default: 10000.
    #[schemars(range(min = 100, max = 10000000))]
    pub tmp_inodes: Option<u64>,
    /// Size of `/dev/shm`, which is memory. 1MiB to 1TiB. Default: `64MiB`.
    pub shm: Option<String>,
    /// What `/workspace` can hold, 16MiB to 16TiB. A host that cannot enforce it refuses the run. Default: `4GiB`.
    pub disk: Option<String>,
    /// Files, directories and links that `/workspace` can hold. Default: 200000.
    #[schemars(range(min = 1000, max = 100000000))]
    pub disk_inodes: Option<u64>,
    /// The only thing that may enforce `disk`: `project` (a project quota of the data directory's file system), `image` (a
    /// file system of its own in a file) or `tmpfs` (memory; at most half of `memory`). Default: the first of these that the host
    /// has.
    pub disk_kind: Option<DiskKind>,
    /// Most that is read from the disk of `/workspace` in a second, 64KiB to 1TiB. A host that cannot enforce it refuses the run:
    /// it takes control groups of version 2, and the backend `oci`. Default: no limit.
    pub disk_read: Option<String>,
    /// The same for what is written there.
    pub disk_write: Option<String>,
    /// Largest single file that can be written, 1MiB to 16TiB. Default: `2GiB`.
    pub file_size: Option<String>,
    /// Life of the sandbox, 1s to 7 days. Default: `1h`.
    pub wall_time: Option<String>,
}

/// What the sandbox can reach, and through what. Nothing that is not named here.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NetworkInput {
    /// `none`: its own loopback alone. `proxy`: what the rules allow, through a proxy on its loopback. `learn`: as `proxy`, with
    /// TLS opened everywhere, so that the record shows what was wanted; it allows nothing more. Default: `none`.
    pub mode: Option<NetworkMode>,
    /// Sets of rules that are files of their own, by name (`pypi`, `npm`, `crates`, `debian`, `github`, or one in `DATA/presets`).
    #[schemars(length(max = 32))]
    pub presets: Option<Vec<String>>,
    /// What may be reached. Nothing else is, and no name is looked up before a rule fits it.
    #[schemars(length(max = 500))]
    pub allow: Option<Vec<AllowInput>>,
    /// What may not, whatever is allowed.
    #[schemars(length(max = 500))]
    pub deny: Option<Vec<DenyInput>>,
    #[serde(default)]
    pub budgets: NetworkBudgetsInput,
}

#[derive(Debug, Clone, Copy, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum NetworkMode {
    None,
    Proxy,
    Learn,
}

/// One opening: a host or a range of addresses.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AllowInput {
    /// Denials and the record name it. Default: the host or the range, with the ports unless that is 443.
    #[schemars(regex(pattern = r"^[a-z0-9][a-z0-9-]{0,62}$"))]
    pub name: Option<String>,
    /// `api.example.com`, or `*.example.com` for all names under it, not itself.
    #[schemars(length(min = 1, max = 260))]
    pub host: Option<String>,
    /// Addresses, as `10.1.2.0/24`. Private ones are closed unless a range within theirs is named here.
    #[schemars(length(min = 1, max = 60))]
    pub cidr: Option<String>,
    /// A port or several. Default: 443.
    pub port: Option<Ports>,
    /// `["GET", "HEAD"]`. Default: all. Needs TLS to be opened.
    pub methods: Option<Methods>,
    /// `/simple/`, all below it; `/a/*/c`, any one name between. Default: all. Needs TLS to be opened.
    pub path: Option<Texts>,
    /// `auto`: TLS, opened where something has to look inside; plain HTTP on port 80. `open`: opened always. `off`: no TLS.
    /// Default: `auto`.
    pub tls: Option<TlsInput>,
    /// `ask`: each new one waits for a person. Default: `allow`.
    pub verdict: Option<OpeningVerdict>,
}

/// What is closed whatever else is written.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DenyInput {
    /// As in `allow`.
    #[schemars(regex(pattern = r"^[a-z0-9][a-z0-9-]{0,62}$"))]
    pub name: Option<String>,
    #[schemars(length(min = 1, max = 260))]
    pub host: Option<String>,
    #[schemars(length(min = 1, max = 60))]
    pub cidr: Option<String>,
    /// A port or several. Default: 80 and 443.
    pub port: Option<Ports>,
    /// Default: all.
    pub methods: Option<Methods>,
    /// Default: all.
    pub path: Option<Texts>,
}

#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Ports {
    One(#[schemars(range(min = 1, max = 65535))] u16),
    Many(#[schemars(length(min = 1))] Vec<u16>),
}

#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct Methods(#[schemars(length(min = 1, max = 20))] pub Vec<String>);

#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Texts {
    One(String),
    Many(#[schemars(length(min = 1))] Vec<String>),
}

#[derive(Debug, Clone, Copy, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TlsInput {
    Auto,
    Open,
    Off,
}

#[derive(Debug, Clone, Copy, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OpeningVerdict {
    Allow,
    Ask,
}

/// What may be used up on the way out, over the life of the run. Reaching one is a denial with its name.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NetworkBudgetsInput {
    /// Connections in all. Default: no limit.
    #[schemars(range(min = 1))]
    pub connections: Option<u64>,
    /// Connections at one time. Default: 2048.
    #[schemars(range(min = 1, max = 100000))]
    pub concurrent: Option<u32>,
    /// Bytes out, as `10MiB`. Default: no limit.
    pub bytes_up: Option<String>,
    /// Bytes in. Default: no limit.
    pub bytes_down: Option<String>,
    /// Default: no limit.
    #[schemars(range(min = 1, max = 1000000))]
    pub requests_per_second: Option<u32>,
    /// Questions to the name server. Default: 100.
    #[schemars(range(min = 1, max = 1000000))]
    pub queries_per_second: Option<u32>,
    /// The time in which something is open, 1s to 30 days. Default: no limit.
    pub time: Option<String>,
}

/// A secret that the sandbox may use, without having it: it holds a placeholder, which the proxy swaps in the one place where it
/// belongs.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CredentialInput {
    /// The record names it.
    #[schemars(required, regex(pattern = r"^[a-z0-9][a-z0-9-]{0,62}$"))]
    pub name: Option<String>,
    /// Where the host finds it, at each use: `env:NAME`, `file:/PATH` or `command:/PROGRAM ARGUMENTS`. Never the secret itself.
    #[schemars(required)]
    pub from: Option<String>,
    /// The variable that holds the placeholder. Default: none.
    #[schemars(length(min = 1, max = 100))]
    pub env: Option<String>,
    /// `env`: the variable holds the secret itself, and whatever runs in the sandbox can read it. Default: it does not.
    pub expose: Option<Expose>,
    /// Where it is put in.
    pub inject: Option<InjectInput>,
}

#[derive(Debug, Clone, Copy, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Expose {
    Env,
}

/// The one place: `Authorization: Bearer` of requests to this host, unless `header`, `basic`, `query` or `sigv4` says another.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct InjectInput {
    /// As in a rule; a rule must open it.
    #[schemars(required, length(min = 1, max = 260))]
    pub host: Option<String>,
    /// Default: 443.
    #[schemars(range(min = 1, max = 65535))]
    pub port: Option<u16>,
    /// A header.
    #[schemars(length(min = 1, max = 100))]
    pub header: Option<String>,
    /// What the header is, with `{}` for the secret. Default: `{}`.
    #[schemars(length(min = 2, max = 1000))]
    pub format: Option<String>,
    /// The user name of HTTP Basic; the secret is the password. Git over HTTPS wants this.
    #[schemars(length(max = 200))]
    pub basic: Option<String>,
    /// A parameter of the query.
    #[schemars(length(min = 1, max = 100))]
    pub query: Option<String>,
    /// The secret is an AWS secret key: requests are signed anew.
    pub sigv4: Option<SigV4Input>,
    /// Default: all.
    pub methods: Option<Methods>,
    /// Default: all.
    pub path: Option<Texts>,
}

/// What AWS Signature Version 4 needs beside the key.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SigV4Input {
    #[schemars(required)]
    pub access_key: Option<String>,
    #[schemars(required)]
    pub region: Option<String>,
    #[schemars(required)]
    pub service: Option<String>,
    /// Where the token of a temporary key is, as `from`.
    pub session_token: Option<String>,
}

/// Which tool calls are allowed. Of all rules that match a call the strictest speaks (deny, then ask, then allow), in
/// whatever order they are written; where none matches, the default does.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ToolsInput {
    /// For calls that no rule matches: `deny` or `ask`. Default: `deny`; in a policy that extends another: as there.
    pub default: Option<Verdict>,
    #[serde(default)]
    #[schemars(length(max = 200))]
    pub rules: Vec<RuleInput>,
}

/// A rule matches a call of one of its tools when all of its `match` fits.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RuleInput {
    /// Unique; decisions and the audit log name it. Lower-case letters, digits and dashes; `default` is taken.
    #[schemars(required, regex(pattern = r"^[a-z0-9][a-z0-9-]{0,62}$"))]
    pub name: Option<String>,
    /// A tool, a list of tools, or `"*"` for every built-in tool.
    #[schemars(required)]
    pub tool: Option<ToolNames>,
    #[schemars(required)]
    pub verdict: Option<Verdict>,
    /// What such a call can do outside the sandbox, where it can: `idempotent` (once for each key: the call finds it in
    /// `EXUVIA_IDEMPOTENCY_KEY`, and hands it on) or `external` (twice is not the same as once: one that was cut off is never
    /// tried again before a person has looked). Of several rules that match the strictest speaks. Default: nothing.
    pub effect: Option<Outside>,
    /// Told to the model, to the person who is asked, and to the audit log.
    #[schemars(length(min = 1, max = 500))]
    pub reason: Option<String>,
    /// Argument name to a regular expression that must match the *whole* argument (`.` matches line breaks too), or
    /// `path_within` to an absolute directory that `path` must be in.
    #[serde(rename = "match")]
    #[schemars(length(min = 1))]
    pub matches: Option<BTreeMap<String, String>>,
}

#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum ToolNames {
    One(String),
    Many(#[schemars(length(min = 1))] Vec<String>),
}

/// What a run may use up. Reaching one ends it as EXHAUSTED. A task can ask for less.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BudgetsInput {
    /// Model calls and tool calls together. Default: 100.
    #[schemars(range(min = 1, max = 1000000))]
    pub steps: Option<u32>,
    /// Default: no limit of its own.
    #[schemars(range(min = 1, max = 1000000))]
    pub model_calls: Option<u32>,
    /// One model call or one tool call, 1s to 1 day. Default: `2m`.
    pub step_time: Option<String>,
    /// The whole run, without the time in which it waited for a person. 1s to 30 days. Default: `1h`.
    pub total_time: Option<String>,
    /// Input and output tokens together. Default: no limit.
    #[schemars(range(min = 1))]
    pub tokens: Option<u64>,
    /// US dollars. Needs a price for the model. Default: no limit.
    #[schemars(range(min = 0.0001, max = 1000000))]
    pub cost_usd: Option<f64>,
    /// Tool calls of one turn that may run side by side. Default: 4.
    #[schemars(range(min = 1, max = 64))]
    pub parallel_tools: Option<u32>,
}

/// One read-only bind.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MountInput {
    /// Absolute path on the host.
    #[schemars(required)]
    pub source: Option<String>,
    /// Absolute path inside, not within `/workspace`, `/tmp`, `/proc`, `/sys` or `/dev`.
    #[schemars(required)]
    pub target: Option<String>,
    /// There is only `ro`. Default: `ro`.
    pub mode: Option<MountMode>,
}

#[derive(Debug, Clone, Copy, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MountMode {
    Ro,
}

/// Questions to a person, which `ask` rules raise.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ApprovalsInput {
    /// How long a question stays open, 1m to 30 days. Default: `1h`.
    pub expires: Option<String>,
}
