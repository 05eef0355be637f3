//! Exuvia runs AI agents that nobody trusts, durably, in sandboxes: what an agent knows and has done lives outside them.
//!
//! This is the map: the way of one request, one paragraph a module, who may depend on whom, and the words. Each module's own
//! note says what it owns, what it must not know and where to read on. Why things are as they are: `docs/adr/`.
//!
//! # The way of one request
//!
//! ```text
//!  exuvia run ───────────────┐ the same service, embedded
//!  exuvia task ─ gRPC ─ api ─┤
//!                            ▼
//!  submit   run::service     checks everything that can be known to be wrong; nothing is stored when it refuses
//!             │ store.create    task + run + entry 1 + checkpoint 0 + audit record, one transaction ─▶ QUEUED
//!             ▼
//!  claim    run::driver      fence + 1: from here an older writer is refused
//!             │ fold the journal ─▶ State;  due(State) ─▶ what should be going on
//!             ▼
//!  model    run::effects     model.complete(conversation) ─▶ ModelReplied, committed whole or not at all
//!             ▼
//!  decide   run::decide      policy::decide(tool, arguments)
//!             │                deny ─▶ ToolRefused: the model reads the rule and what else it could do
//!             │                ask  ─▶ ApprovalRequested: parked, sandbox given back, no worker held
//!             │                allow ▼
//!  tool     ToolStarted committed ─▶ tool::run ─▶ run::world ─▶ run::bench
//!             ▼
//!  sandbox  sandbox::Sandbox one container, one guest (PID 1); each exec is one connection to it
//!             │                 control groups say how it ended, not the guest alone
//!             ▼
//!  snapshot workspace        frozen; changed files become blobs and a tree, durable; thawed
//!             ▼
//!  commit   store.commit     ToolFinished + checkpoint (tree, state) + audit records, one transaction, fenced
//!             │                 then audit::Mirror: JSONL line, signed head
//!             ▼
//!  watch    run::hub         wakes who watches; they read the journal from where they were: no gap, no double
//!             └──▶ due(State) again, until `finish` and the completion check ─▶ FINISHED
//! ```
//!
//! A process that dies anywhere in this leaves the last committed entry; the next claim raises the attempt numbers of what
//! was going on and starts it again from the last committed tree (`run/driver.rs`). Signals (pause, cancel, a decision) go
//! into the run's inbox in the store and become entries there.
//!
//! # Modules
//!
//! - [`cli`]: one file a sub-command; parses, calls the domain, prints. `cli/exit.rs` is the list of exit codes.
//! - [`api`]: the gRPC face (`proto/exuvia/v1`): convert, one domain call, convert back. The only place that knows
//!   `tonic::Status`, and the place that says what a client may not name (`api/convert.rs`).
//! - [`assembly`]: puts the parts together over one data directory, and guards that directory.
//! - [`fleet`]: sandboxes that clients use directly, without an agent loop: one driver task each, a quota, leases by which the next
//!   server goes on with them, the warm pool, the nursery of interpreters, snapshots with memory, and the output of their commands. Knows no runs.
//! - [`run`]: durable runs. A pure core (`state.rs`: entries in, state out, no IO) and a shell that commits first and acts
//!   second (`driver.rs`). `service.rs` is what every face calls; forks, recordings and their replay have a file each.
//! - [`task`]: what is asked: the frozen request that a run starts from, and the task file that a person writes.
//! - [`tool`]: what a model can call: schemas, argument checks, results and their size cap, one file a tool. It acts through
//!   `tool::world::World` and knows no sandbox.
//! - [`model`]: the [`model::ModelClient`] seam, the Chat Completions adapter and the scripted model.
//! - [`sandbox`]: the [`sandbox::Backend`] seam with `oci` and `docker` behind it, images, control groups, disk quotas, the
//!   system-call filter, reading every wall back, moulds of processes, and the host's half of the guest protocol. Knows no runs.
//! - [`guest`]: PID 1 of every sandbox, static, with a supply chain of its own (feature `guest`). Knows `wire` and nothing else.
//! - [`forge`]: a second life of the guest's program: the long-lived, single-threaded process of the host's root that makes
//!   the sandboxes of the `oci` backend (feature `guest`). Knows `wire`, and no image.
//! - [`wire`]: the frames between the two, used by both ends.
//! - [`workdir`]: `DATA/work/NAME`, the directory of one sandbox with the volume that its workspace is on; swept by its owner's name.
//! - [`workspace`]: files that outlive a sandbox, as content-addressed trees; snapshots, restore, diff, archives, apply.
//! - [`egress`]: the only way out of a sandbox: rules, doors (HTTP, SOCKS5, DNS), TLS opening, credentials, budgets, one record
//!   for each decision. It is handed open streams; knows no sandboxes and no runs.
//! - [`border`]: the glue: what of a policy's network can be enforced, the doors that the host opens in a sandbox's network
//!   namespace, its variables, certificates and placeholders.
//! - [`policy`]: the file format, its checks, its canonical form and hash, and [`policy::decide()`]. Deny is the default.
//! - [`audit`]: the hash chain, its canonical bytes, signed heads, verification, queries.
//! - [`secret`]: credential references and their values for the moment of use; the redactor.
//! - [`store`]: the [`store::Store`] seam: tasks, runs, journals, checkpoints, inboxes, the chain. SQLite behind it, and a
//!   strict fake in memory.
//! - [`tasks`], [`clock`], [`ids`], [`error`], [`process`]: background work with an owner; time and identities as values; what
//!   all errors share; which process is which. [`chaos`]: switches for proving durability on a real process.
//!   `mount_attr`: a call to the kernel that the forge and workspaces make. `scratch`, `skip`: for tests alone, those in `tests/` too.
//!
//! # Who depends on whom
//!
//! ```text
//!  bin ─▶ cli ─▶ api ─────▶ run ─▶ tool, model, sandbox, workspace, task ─▶ policy, audit, secret ─▶ store ─▶ ids, clock, error
//!          │      └───────▶ fleet ─▶ sandbox, workdir, workspace ──────────▶ policy, audit, store
//!          └──▶ assembly ──▶ both               └─▶ wire ◀─ guest, forge
//!               run, fleet ─▶ border ─▶ egress, policy, sandbox, audit
//! ```
//!
//! Down only, with one agreed exception: `store` keeps the journal entries, tree ids and audit records of the modules above it
//! as plain data, and decides nothing about them. `dyn` stands at three seams that are chosen at start-up (`Backend`, `Store`,
//! `ModelClient`), and where a test has to hold the world still (`Clock`, `World`).
//!
//! # Words
//!
//! | word | what it is | where it lives |
//! |---|---|---|
//! | task | what is asked: prompt, model, policy snapshot, workspace, budgets, check (`task_…`) | `task/mod.rs` |
//! | run | one attempt at a task (`run_…`); resuming keeps the id | `run/service.rs`, `store/mod.rs` (`RunRecord`) |
//! | session | the conversation of a run (`ses_…`), a projection of its journal apart from its state | `run/session.rs` |
//! | step | one model call, one tool call or one check, numbered from 1 in a run | `run/state.rs` |
//! | attempt | one try of a step, numbered from 1; raised by a claim and by a retry | `run/state.rs` |
//! | event | one thing that happened to a run; an *entry* is an event with its number and time | `run/event.rs` |
//! | journal | a run's entries in order, append-only: the only truth about it | `run/event.rs`, table `entries` |
//! | checkpoint | journal position + state + tree + policy hash after a step; its number is the *revision* | `store/mod.rs` |
//! | fence | number raised by each claim; a commit with an older one is refused | `store/rules.rs` |
//! | signal | what the outside wants of a run; waits in its *inbox* | `store/mod.rs` |
//! | sandbox | one ephemeral container with limits and a guest inside (`sbx_…`) | `sandbox/session.rs` |
//! | bench | a run's sandbox together with its working directory | `run/bench.rs` |
//! | exec | one command in a sandbox (`exe_…`) | `sandbox/exec.rs` |
//! | context | a language kernel that keeps its state between calls (`ctx_…`) | `fleet/code/`, `sandbox/kernel/` |
//! | lease | a directly used sandbox on disk, for the next server | `fleet/lease.rs` |
//! | place | what the quota of sandboxes counts | `fleet/quota.rs` |
//! | mould | a process as it stood, from which others are *cast* without starting | `sandbox/mould`, `guest/cast.rs` |
//! | guest | the agent of ours that is PID 1 of a sandbox; *not* the AI agent | `guest/mod.rs` |
//! | workspace | the files that outlive the sandbox; a *tree* is their content address | `workspace/tree.rs` |
//! | artifact | a kept output, named by the address of its content | `workspace/artifact.rs` |
//! | policy | what a run may do; a run keeps the *snapshot* that it started with | `policy/mod.rs`, `policy/snapshot.rs` |
//! | verdict | allow, ask or deny, with its rule and where that is written | `policy/decide.rs` |
//! | approval | a person's decision about one exact call (`apr_…`) | `run/decide.rs` |
//! | credential | a reference to a secret (`env:NAME`, `file:/PATH`), never its value | `secret/mod.rs` |
//! | record | one entry of the audit chain; a *head* is a signed count and hash of the chain | `audit/mod.rs`, `audit/head.rs` |
//! | fault | the one error contract: code, message, retryable, details | `error.rs` |

pub mod forge;
pub mod guest;
mod mount_attr;
pub mod wire;

#[cfg(feature = "host")]
pub mod api;
#[cfg(feature = "host")]
pub mod assembly;
#[cfg(feature = "host")]
pub mod audit;
#[cfg(feature = "host")]
pub mod border;
#[cfg(feature = "host")]
pub mod chaos;
#[cfg(feature = "host")]
pub mod cli;
#[cfg(feature = "host")]
pub mod clock;
#[cfg(feature = "host")]
pub mod egress;
#[cfg(feature = "host")]
pub mod error;
#[cfg(feature = "host")]
pub mod fleet;
#[cfg(feature = "host")]
pub mod ids;
#[cfg(feature = "host")]
pub mod model;
#[cfg(feature = "host")]
pub mod policy;
#[cfg(feature = "host")]
pub mod process;
#[cfg(feature = "host")]
pub mod run;
#[cfg(feature = "host")]
pub mod sandbox;
#[cfg(all(test, feature = "host"))]
mod scratch;
#[cfg(feature = "host")]
pub mod secret;
#[cfg(all(test, feature = "host"))]
mod skip;
#[cfg(feature = "host")]
pub mod store;
#[cfg(feature = "host")]
pub mod task;
#[cfg(feature = "host")]
pub mod tasks;
#[cfg(feature = "host")]
pub mod tool;
#[cfg(feature = "host")]
pub mod workdir;
#[cfg(feature = "host")]
pub mod workspace;
