//! TaskService: each method converts, makes one call and converts back.

use futures::{StreamExt, TryStreamExt};
use tonic::{Request, Response, Streaming};

use super::proto::task_service_server::TaskService;
use super::{Answer, Out, convert, page_token, proto, status};
use crate::run::fork::Fork;
use crate::run::grounds::Ground;
use crate::run::recording::{self, Recording};
use crate::run::{self, Service};
use crate::store::{Query, Signal};

/// Bytes of file content in one streamed message.
const CHUNK: usize = 256 << 10;
const PAGE: usize = 50;
const MAX_PAGE: usize = 500;
const MAX_KEY: usize = 256;

#[derive(Debug, Clone)]
pub struct Tasks {
    service: Service,
}

impl Tasks {
    pub fn new(service: Service) -> Self {
        Self { service }
    }
}

#[tonic::async_trait]
impl TaskService for Tasks {
    type WatchStream = Out<proto::Event>;
    type GetWorkspaceStream = Out<proto::WorkspaceChunk>;
    type ExportStream = Out<proto::RecordingChunk>;
    type GetArtifactStream = Out<proto::ArtifactChunk>;

    async fn upload_workspace(
        &self,
        request: Request<Streaming<proto::UploadWorkspaceRequest>>,
    ) -> Answer<proto::UploadWorkspaceResponse> {
        let chunks = request
            .into_inner()
            .map_ok(|part| part.data)
            .map_err(std::io::Error::other);
        let taken = self
            .service
            .workspaces()
            .take_archive(chunks)
            .await
            .map_err(|error| status::of(&error.into()))?;
        Ok(Response::new(proto::UploadWorkspaceResponse {
            tree: taken.tree.to_string(),
            times: taken.times.map(|times| times.to_string()).unwrap_or_default(),
        }))
    }

    async fn submit(&self, request: Request<proto::SubmitRequest>) -> Answer<proto::Run> {
        let proto::SubmitRequest {
            idempotency_key: key,
            task,
        } = request.into_inner();
        if key.len() > MAX_KEY {
            return Err(status::invalid(format!(
                "`idempotency_key` is longer than {MAX_KEY} bytes"
            )));
        }
        let submission = convert::submission(task.ok_or_else(|| status::invalid("`task` is missing"))?)?;
        let key = (!key.is_empty()).then_some(key);
        let record = self
            .service
            .submit(submission, key)
            .await
            .map_err(|error| status::of(&error))?;
        self.answer(record.run.as_str()).await
    }

    async fn get(&self, request: Request<proto::GetRequest>) -> Answer<proto::Run> {
        self.answer(&request.into_inner().id).await
    }

    async fn list(&self, request: Request<proto::ListRequest>) -> Answer<proto::ListResponse> {
        let request = request.into_inner();
        let limit = match request.page_size as usize {
            0 => PAGE,
            size => size.min(MAX_PAGE),
        };
        let query = Query {
            states: request
                .states
                .iter()
                .map(|state| convert::state_in(*state))
                .collect::<Result<_, _>>()?,
            after: page_token(&request.page_token)?,
            labels: request.labels.into_iter().collect(),
            limit: limit + 1,
        };
        let mut records = self.service.list(&query).await.map_err(|error| status::of(&error))?;
        let has_more = records.len() > limit;
        records.truncate(limit);
        let next = records
            .last()
            .filter(|_| has_more)
            .map(|last| format!("{}.{}", last.created_at.0, last.run));
        Ok(Response::new(proto::ListResponse {
            runs: records.iter().map(convert::run_record).collect(),
            next_page_token: next.unwrap_or_default(),
        }))
    }

    async fn watch(&self, request: Request<proto::WatchRequest>) -> Answer<Self::WatchStream> {
        let proto::WatchRequest { id, after_seq } = request.into_inner();
        let run = self.service.find(&id).await.map_err(|error| status::of(&error))?.run;
        let events = self.service.watch(run.clone(), after_seq).map(move |item| match item {
            Ok((entry, public)) => Ok(convert::event(&run, &entry, public)),
            Err(error) => Err(status::of(&error)),
        });
        // A stopping server ends its streams; the client asks again from where it was.
        let stop = self.service.stopping();
        Ok(Response::new(Box::pin(
            events.take_until(async move { stop.cancelled().await }),
        )))
    }

    async fn cancel(&self, request: Request<proto::ControlRequest>) -> Answer<proto::Run> {
        let proto::ControlRequest { id, by, reason, .. } = request.into_inner();
        self.signal(&id, Signal::Cancel { by, reason }).await
    }

    async fn pause(&self, request: Request<proto::ControlRequest>) -> Answer<proto::Run> {
        let proto::ControlRequest {
            id, by, reason, now, ..
        } = request.into_inner();
        self.signal(&id, Signal::Pause { by, reason, now }).await
    }

    async fn fork(&self, request: Request<proto::ForkRequest>) -> Answer<proto::Run> {
        let proto::ForkRequest {
            id,
            revision,
            message,
            by,
            accept,
        } = request.into_inner();
        let fork = Fork {
            revision,
            message: (!message.is_empty()).then_some(message),
            by,
            accept_policy: match accept.as_slice() {
                [] => false,
                [one] if one == "policy" => true,
                _ => return Err(status::invalid("`accept` takes `policy` alone".to_owned())),
            },
        };
        let child = self.service.fork(&id, fork).await.map_err(|error| status::of(&error))?;
        self.answer(child.run.as_str()).await
    }

    async fn export(&self, request: Request<proto::ExportRequest>) -> Answer<Self::ExportStream> {
        let proto::ExportRequest { id, with_workspace } = request.into_inner();
        let recording = self.service.record_of(&id, with_workspace).await;
        let text = recording.map_err(|error| status::of(&error))?.to_text();
        let chunks: Vec<_> = text
            .as_bytes()
            .chunks(CHUNK)
            .map(|data| Ok(proto::RecordingChunk { data: data.to_vec() }))
            .collect();
        Ok(Response::new(Box::pin(futures::stream::iter(chunks))))
    }

    async fn import(&self, request: Request<Streaming<proto::RecordingChunk>>) -> Answer<proto::Run> {
        let mut chunks = request.into_inner();
        let mut bytes = Vec::new();
        while let Some(chunk) = chunks.next().await {
            bytes.extend(chunk?.data);
            if bytes.len() > recording::MAX_BYTES {
                return Err(status::invalid(format!(
                    "a recording has at most {} bytes",
                    recording::MAX_BYTES
                )));
            }
        }
        let text = String::from_utf8(bytes).map_err(|_| status::invalid("a recording is text".to_owned()))?;
        let recording = Recording::parse(&text).map_err(|error| status::of(&error.into()))?;
        let record = self
            .service
            .import(recording)
            .await
            .map_err(|error| status::of(&error))?;
        self.answer(record.run.as_str()).await
    }

    async fn resume(&self, request: Request<proto::ControlRequest>) -> Answer<proto::Run> {
        let proto::ControlRequest { id, by, accept, .. } = request.into_inner();
        let accept = Ground::parse(&accept).map_err(status::invalid)?;
        self.signal(&id, Signal::Resume { by, accept }).await
    }

    async fn decide(&self, request: Request<proto::DecideRequest>) -> Answer<proto::Run> {
        let proto::DecideRequest {
            id,
            approval,
            approved,
            by,
            reason,
        } = request.into_inner();
        let approval = match approval.as_str() {
            "" => None,
            text => Some(
                text.parse()
                    .map_err(|error: crate::ids::Invalid| status::invalid(error.to_string()))?,
            ),
        };
        self.signal(
            &id,
            Signal::Decide {
                approval,
                approved,
                by,
                reason,
            },
        )
        .await
    }

    async fn get_transcript(&self, request: Request<proto::GetTranscriptRequest>) -> Answer<proto::Transcript> {
        let found = self.service.transcript(&request.into_inner().id).await;
        let (run, messages) = found.map_err(|error| status::of(&error))?;
        let messages = messages
            .iter()
            .map(|message| convert::object(&crate::model::chat::message(message, "")))
            .collect();
        Ok(Response::new(proto::Transcript {
            run_id: run.to_string(),
            messages,
        }))
    }

    async fn get_workspace(&self, request: Request<proto::GetWorkspaceRequest>) -> Answer<Self::GetWorkspaceStream> {
        let proto::GetWorkspaceRequest { id, revision } = request.into_inner();
        let workspace = self
            .service
            .workspace_at(&id, revision)
            .await
            .map_err(|error| status::of(&error))?;
        let tar = self.service.workspaces().archive(workspace).map(|chunk| match chunk {
            Ok(data) => Ok(proto::WorkspaceChunk { data }),
            Err(error) => Err(status::of(&error.into())),
        });
        Ok(Response::new(Box::pin(tar)))
    }

    async fn diff_workspace(
        &self,
        request: Request<proto::DiffWorkspaceRequest>,
    ) -> Answer<proto::DiffWorkspaceResponse> {
        let proto::DiffWorkspaceRequest {
            id,
            from_revision,
            to_revision,
        } = request.into_inner();
        let diff = async {
            let from = self
                .service
                .workspace_at(&id, Some(from_revision.unwrap_or(0)))
                .await?
                .tree;
            let to = self.service.workspace_at(&id, to_revision).await?.tree;
            let patch = self.service.workspaces().patch(from, to).await?;
            Ok::<_, run::Error>((from, to, patch.text))
        };
        let (from, to, diff) = diff.await.map_err(|error| status::of(&error))?;
        Ok(Response::new(proto::DiffWorkspaceResponse {
            diff,
            from_tree: from.to_string(),
            to_tree: to.to_string(),
        }))
    }

    async fn get_artifact(&self, request: Request<proto::GetArtifactRequest>) -> Answer<Self::GetArtifactStream> {
        let proto::GetArtifactRequest { id, artifact } = request.into_inner();
        let bytes = self
            .service
            .artifact(&id, &artifact)
            .await
            .map_err(|error| status::of(&error))?;
        let chunks: Vec<_> = bytes
            .chunks(CHUNK)
            .map(|data| Ok(proto::ArtifactChunk { data: data.to_vec() }))
            .collect();
        Ok(Response::new(Box::pin(futures::stream::iter(chunks))))
    }
}

impl Tasks {
    async fn answer(&self, id: &str) -> Answer<proto::Run> {
        let view = self.service.view(id).await.map_err(|error| status::of(&error))?;
        Ok(Response::new(convert::run(&view)))
    }

    async fn signal(&self, id: &str, signal: Signal) -> Answer<proto::Run> {
        let view = self
            .service
            .signal(id, signal)
            .await
            .map_err(|error| status::of(&error))?;
        Ok(Response::new(convert::run(&view)))
    }
}
