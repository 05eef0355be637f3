//! A server that says what a test wants, however wrong it is.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use exuvia::api::proto::sandbox_service_server::{SandboxService, SandboxServiceServer};
use exuvia::api::proto::*;
use futures::{Stream, StreamExt};
use tokio::sync::oneshot;
use tonic::{Request, Response, Status, Streaming};

use crate::desk::{Desk, Done};

pub type Events = Vec<Result<ExecEvent, Status>>;

/// What it says, and what it was asked.
#[derive(Debug, Default)]
pub struct Script {
    /// For each Exec call.
    pub execs: Vec<Events>,
    /// For each Attach call.
    pub attaches: Vec<Events>,
    /// By path.
    pub files: HashMap<Vec<u8>, FileInfo>,
    pub listings: HashMap<Vec<u8>, Vec<FileInfo>>,
    pub contents: HashMap<Vec<u8>, Vec<u8>>,
    pub started: Vec<ExecStart>,
    pub attached: Vec<AttachStart>,
    pub stdin: Vec<u8>,
    pub sizes: Vec<TerminalSize>,
    /// Events of an Exec call after which a signal is waited for.
    pub holds_after: Option<usize>,
    pub code: Vec<CodeEvent>,
    pub changes: Vec<FileChange>,
    pub dialled: Vec<DialStart>,
    pub signals: Vec<SignalRequest>,
}

#[derive(Debug, Clone)]
struct Service(Arc<Mutex<Script>>);

/// A double that listens; it ends with the test.
pub struct Double {
    pub script: Arc<Mutex<Script>>,
    url: String,
    _stop: oneshot::Sender<()>,
    _runtime: tokio::runtime::Runtime,
}

impl Double {
    pub fn start(script: Script) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let script = Arc::new(Mutex::new(script));
        let service = Service(Arc::clone(&script));
        let (stop, stopped) = oneshot::channel::<()>();
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
        runtime.spawn(async move {
            let serving = tonic::transport::Server::builder()
                .add_service(SandboxServiceServer::new(service))
                .serve_with_incoming_shutdown(incoming, async { drop(stopped.await) });
            serving.await.unwrap();
        });
        Self {
            script,
            url,
            _stop: stop,
            _runtime: runtime,
        }
    }

    /// `exuvia sandbox … --json` on it.
    pub fn command(&self, desk: &Desk, words: &[&str]) -> std::process::Command {
        let (first, rest) = words.split_at(2);
        let mut command = desk.plain(&[first, &["--json"], rest].concat());
        command.env("EXUVIA_SERVER", &self.url).env("TERM", "dumb");
        command
    }

    /// The same for people.
    pub fn plain(&self, desk: &Desk, words: &[&str]) -> std::process::Command {
        let mut command = desk.plain(words);
        command.env("EXUVIA_SERVER", &self.url).env("TERM", "dumb");
        command
    }

    pub fn call(&self, desk: &Desk, words: &[&str]) -> Done {
        self.command(desk, words).output().unwrap().into()
    }
}

type Out<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn out<T: Send + 'static>(items: Vec<Result<T, Status>>) -> Response<Out<T>> {
    Response::new(Box::pin(futures::stream::iter(items)))
}

fn unasked<T>() -> Result<T, Status> {
    Err(Status::unimplemented("not part of this test"))
}

impl Service {
    fn script(&self) -> std::sync::MutexGuard<'_, Script> {
        self.0.lock().unwrap()
    }
}

/// Methods that no test asks for.
macro_rules! unasked {
    ($($name:ident($request:ty) -> $response:ty;)*) => {
        $(
            fn $name<'a, 'b>(
                &'a self,
                _: Request<$request>,
            ) -> Pin<Box<dyn Future<Output = Result<Response<$response>, Status>> + Send + 'b>>
            where
                'a: 'b,
                Self: 'b,
            {
                Box::pin(async { unasked() })
            }
        )*
    };
}

#[tonic::async_trait]
impl SandboxService for Service {
    type ExecStream = Out<ExecEvent>;
    type AttachStream = Out<ExecEvent>;
    type RunCodeStream = Out<CodeEvent>;
    type ListFilesStream = Out<FileInfo>;
    type ReadFileStream = Out<FileChunk>;
    type WatchFilesStream = Out<FileChange>;
    type StatsStream = Out<SandboxStats>;
    type DialStream = Out<DialResponse>;

    async fn exec(&self, request: Request<Streaming<ExecRequest>>) -> Result<Response<Self::ExecStream>, Status> {
        let mut requests = request.into_inner();
        let first = requests.message().await?.and_then(|first| first.kind);
        let Some(exec_request::Kind::Start(start)) = first else {
            return Err(Status::invalid_argument("no start"));
        };
        let (takes_input, has_terminal) = (start.stdin, start.terminal.is_some());
        let (events, holds_after) = {
            let mut script = self.script();
            script.started.push(start);
            (script.execs.remove(0), script.holds_after)
        };
        let service = self.clone();
        let events = async_stream::stream! {
            let mut events = events.into_iter();
            // `started` comes before the client sends input.
            if let Some(first) = events.next() {
                yield first;
            }
            if takes_input {
                while let Some(Ok(request)) = requests.next().await {
                    match request.kind {
                        Some(exec_request::Kind::Stdin(bytes)) => {
                            // As a terminal's line discipline takes it.
                            let is_last = has_terminal && bytes.contains(&4);
                            service.script().stdin.extend(bytes);
                            if is_last {
                                break;
                            }
                        }
                        Some(exec_request::Kind::StdinEof(_)) => break,
                        Some(exec_request::Kind::Resize(size)) => service.script().sizes.push(size),
                        _ => {}
                    }
                }
            }
            for (n, event) in events.enumerate() {
                if holds_after == Some(n) {
                    while service.script().signals.is_empty() {
                        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
                    }
                }
                yield event;
            }
        };
        Ok(Response::new(Box::pin(events)))
    }

    async fn attach(&self, request: Request<Streaming<AttachRequest>>) -> Result<Response<Self::AttachStream>, Status> {
        let first = request.into_inner().message().await?.and_then(|first| first.kind);
        let Some(attach_request::Kind::Start(start)) = first else {
            return Err(Status::invalid_argument("no start"));
        };
        let mut script = self.script();
        script.attached.push(start);
        let events = script.attaches.remove(0);
        // One refusal and nothing else is the call's own.
        if let [Err(status)] = events.as_slice() {
            return Err(status.clone());
        }
        Ok(out(events))
    }

    async fn signal(&self, request: Request<SignalRequest>) -> Result<Response<SignalResponse>, Status> {
        self.script().signals.push(request.into_inner());
        Ok(Response::new(SignalResponse {}))
    }

    async fn stat_file(&self, request: Request<FileRequest>) -> Result<Response<FileInfo>, Status> {
        let found = self.script().files.get(&request.into_inner().path).cloned();
        found
            .map(Response::new)
            .ok_or_else(|| Status::not_found("no such file"))
    }

    async fn list_files(&self, request: Request<ListFilesRequest>) -> Result<Response<Self::ListFilesStream>, Status> {
        let found = self.script().listings.get(&request.into_inner().path).cloned();
        Ok(out(found.unwrap_or_default().into_iter().map(Ok).collect()))
    }

    async fn read_file(&self, request: Request<ReadFileRequest>) -> Result<Response<Self::ReadFileStream>, Status> {
        let found = self.script().contents.get(&request.into_inner().path).cloned();
        let data = found.ok_or_else(|| Status::not_found("no such file"))?;
        Ok(out(vec![Ok(FileChunk { data: data.into() })]))
    }

    async fn run_code(&self, _: Request<RunCodeRequest>) -> Result<Response<Self::RunCodeStream>, Status> {
        Ok(out(self.script().code.drain(..).map(Ok).collect()))
    }

    async fn watch_files(&self, _: Request<WatchFilesRequest>) -> Result<Response<Self::WatchFilesStream>, Status> {
        Ok(out(self.script().changes.drain(..).map(Ok).collect()))
    }

    async fn get(&self, request: Request<GetSandboxRequest>) -> Result<Response<Sandbox>, Status> {
        let sandbox_id = request.into_inner().sandbox_id;
        Ok(Response::new(Sandbox {
            sandbox_id,
            ..Default::default()
        }))
    }

    /// Gives back what comes, in capitals, until the client has ended its half.
    async fn dial(&self, request: Request<Streaming<DialRequest>>) -> Result<Response<Self::DialStream>, Status> {
        use dial_response::Kind as Said;
        let mut requests = request.into_inner();
        let service = self.clone();
        let answers = async_stream::stream! {
            let say = |kind| Ok(DialResponse { kind: Some(kind) });
            while let Some(Ok(request)) = requests.next().await {
                match request.kind {
                    Some(dial_request::Kind::Start(start)) => {
                        service.script().dialled.push(start);
                        yield say(Said::Connected(true));
                    }
                    Some(dial_request::Kind::Data(data)) => yield say(Said::Data(data.to_ascii_uppercase())),
                    Some(dial_request::Kind::Eof(_)) | None => break,
                }
            }
            yield say(Said::Data(b"!".to_vec()));
            yield say(Said::Eof(true));
        };
        Ok(Response::new(Box::pin(answers)))
    }

    unasked! {
        create(CreateSandboxRequest) -> Sandbox;
        list(ListSandboxesRequest) -> ListSandboxesResponse;
        list_execs(ListExecsRequest) -> ListExecsResponse;
        create_context(CreateContextRequest) -> CodeContext;
        list_contexts(ListContextsRequest) -> ListContextsResponse;
        interrupt_context(ContextRequest) -> CodeContext;
        restart_context(ContextRequest) -> CodeContext;
        delete_context(ContextRequest) -> CodeContext;
        write_file(Streaming<WriteFileRequest>) -> FileInfo;
        make_directory(MakeDirectoryRequest) -> FileInfo;
        move_file(MoveFileRequest) -> FileInfo;
        remove_file(RemoveFileRequest) -> RemoveFileResponse;
        stats(StatsRequest) -> Self::StatsStream;
        pause(SandboxRequest) -> Sandbox;
        resume(SandboxRequest) -> Sandbox;
        snapshot(SnapshotRequest) -> SnapshotResponse;
        list_snapshots(ListSnapshotsRequest) -> ListSnapshotsResponse;
        delete_snapshot(DeleteSnapshotRequest) -> DeleteSnapshotResponse;
        renew(RenewRequest) -> Sandbox;
        kill(KillRequest) -> Sandbox;
    }
}
