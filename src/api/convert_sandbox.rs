//! Sandboxes of the fleet, proto <-> domain.
#![warn(clippy::wildcard_enum_match_arm)]

use std::time::Duration;

use tonic::Status;

use super::convert::{backend, duration, duration_in, image, person, time, workspace};
use super::proto;
use super::status::invalid;
use crate::clock::Timestamp;
use crate::fleet::state::{Cause, End, State};
use crate::fleet::{Ask, Info, SnapshotInfo};
use crate::ids;
use crate::sandbox::disk::Holds;
use crate::sandbox::{Limits, Usage};

/// Between two looks at a sandbox's counters, by default and at least.
const INTERVAL: Duration = Duration::from_secs(1);
const LEAST_INTERVAL: Duration = Duration::from_millis(100);

/// A request for a sandbox, checked for shape and reach; what it means is the fleet's to check.
pub fn ask(request: proto::CreateSandboxRequest) -> Result<Ask, Status> {
    let some = |text: String| (!text.is_empty()).then_some(text);
    if request.policy.contains(['/', '.']) {
        return Err(invalid(
            "`policy` is the name of a policy that the server knows, not a path",
        ));
    }
    let parsed = |field: &str, error: String| invalid(format!("`{field}`: {error}"));
    let (tree, times, snapshot) = match request.workspace {
        None if !request.times.is_empty() => return Err(invalid("`times` belongs to a `tree`")),
        None => (None, None, None),
        Some(proto::create_sandbox_request::Workspace::Tree(tree)) => (some(tree), some(request.times), None),
        Some(proto::create_sandbox_request::Workspace::Snapshot(id)) => {
            let id = id
                .parse()
                .map_err(|error: ids::Invalid| parsed("snapshot", error.to_string()))?;
            (None, None, Some(id))
        }
    };
    let labels = request.labels.into_iter().collect();
    crate::task::check_labels(&labels).map_err(|error| parsed("labels", error))?;
    Ok(Ask {
        policy: some(request.policy).unwrap_or_else(|| match snapshot {
            None => "default".into(),
            Some(_) => String::new(),
        }),
        image: some(request.image).map(|text| image("image", &text)).transpose()?,
        backend: some(request.backend)
            .map(|name| backend("backend", &name))
            .transpose()?,
        env: request.env.into_iter().collect(),
        labels,
        ttl: duration_in(request.ttl, "ttl")?,
        idle_timeout: duration_in(request.idle_timeout, "idle_timeout")?,
        workspace: workspace(tree, times).map_err(|error| parsed("tree", error.to_string()))?,
        snapshot,
        queue_timeout: duration_in(request.queue_timeout, "queue_timeout")?.unwrap_or_default(),
        by: person(request.by)?,
    })
}

/// A duration that must be there.
pub fn required(value: Option<prost_types::Duration>, field: &str) -> Result<Duration, Status> {
    duration_in(value, field)?.ok_or_else(|| invalid(format!("`{field}` is missing")))
}

/// How often to look.
pub fn interval(value: Option<prost_types::Duration>) -> Result<Duration, Status> {
    let interval = duration_in(value, "interval")?.unwrap_or(INTERVAL);
    match interval < LEAST_INTERVAL {
        true => Err(invalid("`interval` is at least 0.1 s")),
        false => Ok(interval),
    }
}

/// A sandbox as it stands.
pub fn sandbox(info: &Info) -> proto::Sandbox {
    let Info { id, facts, view } = info;
    proto::Sandbox {
        sandbox_id: id.to_string(),
        state: state(&view.state).into(),
        policy: facts.policy_name.clone(),
        policy_hash: facts.policy_hash.clone(),
        image: facts.image.to_string(),
        backend: facts.backend.to_string(),
        isolation: facts.isolation.to_string(),
        labels: facts.labels.clone().into_iter().collect(),
        created_at: time(facts.created_at),
        expires_at: time(view.expires_at),
        idle_timeout: facts.idle_timeout.and_then(duration),
        end: match &view.state {
            State::Ended(how) => Some(end(how)),
            State::Creating | State::Running | State::Paused | State::Ending(_) => None,
        },
        from_pool: facts.from_pool,
        lacks: facts.lacks.clone(),
    }
}

/// A snapshot with memory.
pub fn snapshot(info: &SnapshotInfo) -> proto::Snapshot {
    proto::Snapshot {
        snapshot: info.id.to_string(),
        sandbox_id: info.sandbox.to_string(),
        policy: info.policy.clone(),
        created_at: time(info.created_at),
        tree: info.workspace.tree.to_string(),
        times: info.workspace.times.map(|times| times.to_string()).unwrap_or_default(),
        bytes: info.bytes,
    }
}

fn state(state: &State) -> proto::SandboxState {
    match state {
        State::Creating => proto::SandboxState::Creating,
        State::Running => proto::SandboxState::Running,
        State::Paused => proto::SandboxState::Paused,
        State::Ending(_) => proto::SandboxState::Ending,
        State::Ended(_) => proto::SandboxState::Ended,
    }
}

/// The fleet's name of a state as a request numbers it.
pub fn state_in(number: i32) -> Result<&'static str, Status> {
    match proto::SandboxState::try_from(number) {
        Ok(proto::SandboxState::Creating) => Ok("creating"),
        Ok(proto::SandboxState::Running) => Ok("running"),
        Ok(proto::SandboxState::Paused) => Ok("paused"),
        Ok(proto::SandboxState::Ending) => Ok("ending"),
        Ok(proto::SandboxState::Ended) => Ok("ended"),
        Ok(proto::SandboxState::Unspecified) | Err(_) => {
            Err(invalid(format!("`states`: {number} is no state of a sandbox")))
        }
    }
}

fn end(end: &End) -> proto::SandboxEnd {
    use proto::sandbox_end::Cause as Pb;
    let cause = match end.cause {
        Cause::Killed => Pb::Killed,
        Cause::Expired => Pb::Expired,
        Cause::Idle => Pb::Idle,
        Cause::OutOfMemory => Pb::OutOfMemory,
        Cause::Lost => Pb::Lost,
        Cause::Shutdown => Pb::Shutdown,
        Cause::CreateFailed => Pb::CreateFailed,
    };
    proto::SandboxEnd {
        cause: cause.into(),
        by: end.by.clone(),
        reason: end.reason.clone(),
        at: time(end.at),
    }
}

/// What was counted, beside the limits.
pub fn stats(at: Timestamp, usage: &Usage, holds: Option<Holds>, limits: &Limits) -> proto::SandboxStats {
    proto::SandboxStats {
        at: time(at),
        memory_bytes: usage.memory_bytes,
        memory_peak_bytes: usage.memory_peak_bytes,
        memory_limit_bytes: limits.memory_bytes,
        cpu_us: usage.cpu_us,
        cpus_limit: limits.cpus,
        pids: usage.pids,
        pids_limit: u64::from(limits.pids),
        oom_kills: usage.oom_kills,
        forks_refused: usage.pids_refused,
        disk_bytes: holds.map_or(0, |holds| holds.used.bytes),
        disk_limit_bytes: limits.disk.map_or(0, |disk| disk.bytes),
    }
}
