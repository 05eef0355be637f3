//! SandboxService: each method converts, makes one call and converts back. The streams of commands are in `execs.rs`, code in
//! `code.rs`, files in `files.rs`, ports in `ports.rs`.

use futures::StreamExt;
use tonic::{Request, Response, Streaming};

use super::convert::person;
use super::proto::sandbox_service_server::SandboxService;
use super::{
    Answer, Out, code, convert_exec, convert_sandbox as convert, execs, files, page_token, ports, proto, status,
};
use crate::fleet::{Error, Fleet, Query, Taken, What};

const PAGE: usize = 50;
const MAX_PAGE: usize = 500;
const MAX_KEY: usize = 256;
const MAX_REASON: usize = 4096;

#[derive(Debug, Clone)]
pub struct Sandboxes {
    fleet: Fleet,
}

impl Sandboxes {
    pub fn new(fleet: Fleet) -> Self {
        Self { fleet }
    }
}

#[tonic::async_trait]
impl SandboxService for Sandboxes {
    type ExecStream = Out<proto::ExecEvent>;
    type AttachStream = Out<proto::ExecEvent>;
    type RunCodeStream = Out<proto::CodeEvent>;
    type ListFilesStream = Out<proto::FileInfo>;
    type ReadFileStream = Out<proto::FileChunk>;
    type WatchFilesStream = Out<proto::FileChange>;
    type StatsStream = Out<proto::SandboxStats>;
    type DialStream = Out<proto::DialResponse>;

    async fn create(&self, request: Request<proto::CreateSandboxRequest>) -> Answer<proto::Sandbox> {
        let mut request = request.into_inner();
        let key = std::mem::take(&mut request.idempotency_key);
        if key.len() > MAX_KEY {
            return Err(status::invalid(format!(
                "`idempotency_key` is longer than {MAX_KEY} bytes"
            )));
        }
        let ask = convert::ask(request)?;
        let key = (!key.is_empty()).then_some(key);
        let made = self
            .fleet
            .create(ask, key)
            .await
            .map_err(|error| status::of_fleet(&error))?;
        Ok(Response::new(convert::sandbox(&made)))
    }

    async fn get(&self, request: Request<proto::GetSandboxRequest>) -> Answer<proto::Sandbox> {
        let found = self.fleet.get(&request.into_inner().sandbox_id);
        answer(found)
    }

    async fn list(&self, request: Request<proto::ListSandboxesRequest>) -> Answer<proto::ListSandboxesResponse> {
        let request = request.into_inner();
        let limit = match request.page_size as usize {
            0 => PAGE,
            size => size.min(MAX_PAGE),
        };
        let states = request.states.iter().map(|state| convert::state_in(*state));
        let query = Query {
            states: states.collect::<Result<_, _>>()?,
            labels: request.labels.into_iter().collect(),
            after: page_token(&request.page_token)?,
            limit: limit + 1,
        };
        let mut found = self.fleet.list(&query);
        let has_more = found.len() > limit;
        found.truncate(limit);
        let next = found
            .last()
            .filter(|_| has_more)
            .map(|last| format!("{}.{}", last.facts.created_at.0, last.id));
        Ok(Response::new(proto::ListSandboxesResponse {
            sandboxes: found.iter().map(convert::sandbox).collect(),
            next_page_token: next.unwrap_or_default(),
        }))
    }

    async fn exec(&self, request: Request<Streaming<proto::ExecRequest>>) -> Answer<Self::ExecStream> {
        execs::exec(&self.fleet, request.into_inner()).await
    }

    async fn attach(&self, request: Request<Streaming<proto::AttachRequest>>) -> Answer<Self::AttachStream> {
        execs::attach(&self.fleet, request.into_inner()).await
    }

    async fn list_execs(&self, request: Request<proto::ListExecsRequest>) -> Answer<proto::ListExecsResponse> {
        let found = self.fleet.execs(&request.into_inner().sandbox_id);
        let found = found.map_err(|error| status::of_fleet(&error))?;
        Ok(Response::new(proto::ListExecsResponse {
            execs: found.iter().map(convert_exec::info).collect(),
        }))
    }

    async fn signal(&self, request: Request<proto::SignalRequest>) -> Answer<proto::SignalResponse> {
        let request = request.into_inner();
        execs::signal(&self.fleet, request).await
    }

    async fn run_code(&self, request: Request<proto::RunCodeRequest>) -> Answer<Self::RunCodeStream> {
        code::run(&self.fleet, request.into_inner()).await
    }

    async fn create_context(&self, request: Request<proto::CreateContextRequest>) -> Answer<proto::CodeContext> {
        code::create(&self.fleet, request.into_inner()).await
    }

    async fn list_contexts(&self, request: Request<proto::ListContextsRequest>) -> Answer<proto::ListContextsResponse> {
        code::list(&self.fleet, &request.into_inner().sandbox_id)
    }

    async fn interrupt_context(&self, request: Request<proto::ContextRequest>) -> Answer<proto::CodeContext> {
        let proto::ContextRequest {
            sandbox_id,
            context_id,
            by,
        } = request.into_inner();
        code::answer(
            self.fleet
                .interrupt_context(&sandbox_id, &context_id, &person(by)?)
                .await,
        )
    }

    async fn restart_context(&self, request: Request<proto::ContextRequest>) -> Answer<proto::CodeContext> {
        let proto::ContextRequest {
            sandbox_id,
            context_id,
            by,
        } = request.into_inner();
        code::answer(self.fleet.restart_context(&sandbox_id, &context_id, &person(by)?).await)
    }

    async fn delete_context(&self, request: Request<proto::ContextRequest>) -> Answer<proto::CodeContext> {
        let proto::ContextRequest {
            sandbox_id,
            context_id,
            by,
        } = request.into_inner();
        code::answer(self.fleet.delete_context(&sandbox_id, &context_id, &person(by)?).await)
    }

    async fn stat_file(&self, request: Request<proto::FileRequest>) -> Answer<proto::FileInfo> {
        files::stat(&self.fleet, request.into_inner()).await
    }

    async fn list_files(&self, request: Request<proto::ListFilesRequest>) -> Answer<Self::ListFilesStream> {
        files::list(&self.fleet, request.into_inner()).await
    }

    async fn read_file(&self, request: Request<proto::ReadFileRequest>) -> Answer<Self::ReadFileStream> {
        files::read(&self.fleet, request.into_inner()).await
    }

    async fn write_file(&self, request: Request<Streaming<proto::WriteFileRequest>>) -> Answer<proto::FileInfo> {
        files::write(&self.fleet, request.into_inner()).await
    }

    async fn make_directory(&self, request: Request<proto::MakeDirectoryRequest>) -> Answer<proto::FileInfo> {
        files::make_directory(&self.fleet, request.into_inner()).await
    }

    async fn move_file(&self, request: Request<proto::MoveFileRequest>) -> Answer<proto::FileInfo> {
        files::rename(&self.fleet, request.into_inner()).await
    }

    async fn remove_file(&self, request: Request<proto::RemoveFileRequest>) -> Answer<proto::RemoveFileResponse> {
        files::remove(&self.fleet, request.into_inner()).await
    }

    async fn watch_files(&self, request: Request<proto::WatchFilesRequest>) -> Answer<Self::WatchFilesStream> {
        files::watch(&self.fleet, request.into_inner()).await
    }

    async fn stats(&self, request: Request<proto::StatsRequest>) -> Answer<Self::StatsStream> {
        let proto::StatsRequest {
            sandbox_id,
            interval,
            once,
        } = request.into_inner();
        let interval = convert::interval(interval)?;
        let fleet = self.fleet.clone();
        let limits = fleet
            .get(&sandbox_id)
            .map_err(|error| status::of_fleet(&error))?
            .facts
            .limits;
        let stop = self.fleet.stopping();
        let stats = async_stream::stream! {
            loop {
                let usage = fleet.usage(&sandbox_id).await;
                let is_last = once || usage.is_err();
                yield match usage {
                    Ok((usage, holds)) => Ok(convert::stats(fleet.now(), &usage, holds, &limits)),
                    Err(error) => Err(status::of_fleet(&error)),
                };
                if is_last {
                    return;
                }
                tokio::time::sleep(interval).await;
            }
        };
        let stats = stats.take_until(async move { stop.cancelled().await });
        Ok(Response::new(Box::pin(stats)))
    }

    async fn pause(&self, request: Request<proto::SandboxRequest>) -> Answer<proto::Sandbox> {
        let proto::SandboxRequest { sandbox_id, by } = request.into_inner();
        answer(self.fleet.pause(&sandbox_id, person(by)?).await)
    }

    async fn resume(&self, request: Request<proto::SandboxRequest>) -> Answer<proto::Sandbox> {
        let proto::SandboxRequest { sandbox_id, by } = request.into_inner();
        answer(self.fleet.resume(&sandbox_id, person(by)?).await)
    }

    async fn snapshot(&self, request: Request<proto::SnapshotRequest>) -> Answer<proto::SnapshotResponse> {
        let proto::SnapshotRequest { sandbox_id, memory, by } = request.into_inner();
        let what = if memory { What::Memory } else { What::Files };
        let taken = self.fleet.snapshot(&sandbox_id, what, person(by)?).await;
        let Taken { revision, memory } = taken.map_err(|error| status::of_fleet(&error))?;
        Ok(Response::new(proto::SnapshotResponse {
            tree: revision.tree.to_string(),
            times: revision.times.map(|times| times.to_string()).unwrap_or_default(),
            snapshot: memory.map(|id| id.to_string()).unwrap_or_default(),
        }))
    }

    async fn list_snapshots(
        &self,
        _request: Request<proto::ListSnapshotsRequest>,
    ) -> Answer<proto::ListSnapshotsResponse> {
        let found = self.fleet.snapshots().await;
        let found = found.map_err(|error| status::of_fleet(&error))?;
        Ok(Response::new(proto::ListSnapshotsResponse {
            snapshots: found.iter().map(convert::snapshot).collect(),
        }))
    }

    async fn delete_snapshot(
        &self,
        request: Request<proto::DeleteSnapshotRequest>,
    ) -> Answer<proto::DeleteSnapshotResponse> {
        let proto::DeleteSnapshotRequest { snapshot, by } = request.into_inner();
        let id = snapshot
            .parse()
            .map_err(|_| status::of_fleet(&Error::NoSnapshot(crate::ids::shown(&snapshot))))?;
        let deleted = self.fleet.delete_snapshot(&id, &by).await;
        deleted.map_err(|error| status::of_fleet(&error))?;
        Ok(Response::new(proto::DeleteSnapshotResponse {}))
    }

    async fn renew(&self, request: Request<proto::RenewRequest>) -> Answer<proto::Sandbox> {
        let proto::RenewRequest { sandbox_id, ttl, by } = request.into_inner();
        let ttl = convert::required(ttl, "ttl")?;
        answer(self.fleet.renew(&sandbox_id, ttl, person(by)?).await)
    }

    async fn kill(&self, request: Request<proto::KillRequest>) -> Answer<proto::Sandbox> {
        let proto::KillRequest { sandbox_id, by, reason } = request.into_inner();
        if reason.len() > MAX_REASON {
            return Err(status::invalid(format!("`reason` is longer than {MAX_REASON} bytes")));
        }
        answer(self.fleet.kill(&sandbox_id, person(by)?, reason).await)
    }

    async fn dial(&self, request: Request<Streaming<proto::DialRequest>>) -> Answer<Self::DialStream> {
        ports::dial(&self.fleet, request.into_inner()).await
    }
}

fn answer(result: Result<crate::fleet::Info, crate::fleet::Error>) -> Answer<proto::Sandbox> {
    match result {
        Ok(info) => Ok(Response::new(convert::sandbox(&info))),
        Err(error) => Err(status::of_fleet(&error)),
    }
}
