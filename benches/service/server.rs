//! A server as its own process, and the calls that are timed, each as a client makes them.

use std::ffi::{OsStr, OsString};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use exuvia::api::proto::sandbox_service_client::SandboxServiceClient;
use exuvia::api::proto::{
    CodeEnded, CreateSandboxRequest, ExecRequest, ExecStart, KillRequest, ListSandboxesRequest, RunCodeRequest,
    code_event, exec_ended, exec_event, exec_request,
};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tonic::transport::Channel;

use crate::peers::Result;

/// `EXUVIA_BENCH_PROGRAM` names another build, to be compared with this one.
fn program() -> OsString {
    std::env::var_os("EXUVIA_BENCH_PROGRAM").unwrap_or_else(|| env!("CARGO_BIN_EXE_exuvia").into())
}
/// Long enough for any pool on any machine.
const LONG: Duration = Duration::from_secs(120);

/// The parts of one sandbox's life.
pub struct Lap {
    pub create: Duration,
    pub run: Duration,
    pub kill: Duration,
}

pub struct Server {
    child: Child,
    client: SandboxServiceClient<Channel>,
    /// How many the pool holds when it is full.
    stock: usize,
    data: tempfile::TempDir,
}

impl Server {
    pub async fn start(arguments: &[&str]) -> Result<Self> {
        Self::of(&program(), arguments).await
    }

    /// One of another build.
    pub async fn of(program: &OsStr, arguments: &[&str]) -> Result<Self> {
        let data = tempfile::tempdir()?;
        let mut child = Command::new(program)
            .args([
                "serve",
                "--json",
                "--listen",
                "127.0.0.1:0",
                "--on-shutdown",
                "end",
                "--max-sandboxes",
                "20000",
            ])
            .arg("--data-dir")
            .arg(data.path())
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdout = child.stdout.take().ok_or("the server has no output")?;
        let mut hello = String::new();
        BufReader::new(stdout).read_line(&mut hello)?;
        let hello: serde_json::Value = serde_json::from_str(&hello)?;
        let address = hello["listening"]
            .as_str()
            .ok_or("the server does not say where it listens")?;
        let client = SandboxServiceClient::connect(format!("http://{address}")).await?;
        let stock = arguments.iter().find_map(|word| word.rsplit_once("..")?.1.parse().ok());
        Ok(Self {
            child,
            client,
            stock: stock.unwrap_or(0),
            data,
        })
    }

    pub fn client(&self) -> SandboxServiceClient<Channel> {
        self.client.clone()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The ids of all on this host, parked or not.
    pub fn sandboxes(&self) -> Result<Vec<String>> {
        let there = std::fs::read_dir(self.data.path().join("sandboxes"))?;
        Ok(there
            .flatten()
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect())
    }

    /// Waits until the pool is full: each sandbox on this host, parked or not, is a directory.
    pub async fn fill(&self) -> Result<()> {
        let begun = Instant::now();
        let in_use = self.in_use().await?;
        loop {
            let there = std::fs::read_dir(self.data.path().join("sandboxes")).map_or(0, Iterator::count);
            if there >= self.stock + in_use {
                // The last of them has a directory before it is parked.
                tokio::time::sleep(Duration::from_millis(100)).await;
                return Ok(());
            }
            if begun.elapsed() > LONG {
                return Err(format!("the pool holds {there}, not {}", self.stock).into());
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    async fn in_use(&self) -> Result<usize> {
        let request = ListSandboxesRequest {
            page_size: 500,
            ..ListSandboxesRequest::default()
        };
        Ok(self.client().list(request).await?.into_inner().sandboxes.len())
    }

    pub async fn create(&self) -> Result<String> {
        self.create_with("default").await
    }

    pub async fn create_with(&self, policy: &str) -> Result<String> {
        let request = CreateSandboxRequest {
            policy: policy.to_owned(),
            ..CreateSandboxRequest::default()
        };
        let made = self.client().create(request).await?;
        Ok(made.into_inner().sandbox_id)
    }

    pub async fn kill(&self, id: &str) -> Result<()> {
        let request = KillRequest {
            sandbox_id: id.to_owned(),
            ..KillRequest::default()
        };
        self.client().kill(request).await?;
        Ok(())
    }

    pub async fn create_true_kill(&self) -> Result<Lap> {
        let begun = Instant::now();
        let id = self.create().await?;
        let created = Instant::now();
        self.works(&id).await?;
        let ran = Instant::now();
        self.kill(&id).await?;
        Ok(Lap {
            create: created - begun,
            run: ran - created,
            kill: ran.elapsed(),
        })
    }

    pub async fn create_code_kill(&self, code: &str) -> Result<()> {
        let id = self.create_and_code(code).await?;
        self.kill(&id).await
    }

    pub async fn create_and_code(&self, code: &str) -> Result<String> {
        let id = self.create().await?;
        self.code(&id, code).await?;
        Ok(id)
    }

    /// `true`, to its end.
    pub async fn works(&self, id: &str) -> Result<()> {
        let start = ExecStart {
            sandbox_id: id.to_owned(),
            argv: vec![b"/bin/true".to_vec()],
            ..ExecStart::default()
        };
        match self.exec(start, |_| ()).await? {
            exec_ended::Cause::Exited => Ok(()),
            other => Err(format!("{other:?}").into()),
        }
    }

    /// A command to its end, which it answers; what it prints goes to `taken`.
    pub async fn exec(&self, start: ExecStart, mut taken: impl FnMut(&[u8])) -> Result<exec_ended::Cause> {
        let start = ExecRequest {
            kind: Some(exec_request::Kind::Start(start)),
        };
        let requests = futures::StreamExt::chain(futures::stream::iter([start]), futures::stream::pending());
        let mut events = self.client().exec(requests).await?.into_inner();
        while let Some(event) = events.message().await? {
            match event.kind {
                Some(exec_event::Kind::Stdout(output)) => taken(&output.data),
                Some(exec_event::Kind::Ended(ended)) if ended.exit_code.unwrap_or(0) == 0 => return Ok(ended.cause()),
                Some(exec_event::Kind::Ended(ended)) => return Err(format!("{ended:?}").into()),
                Some(exec_event::Kind::Started(_) | exec_event::Kind::Stderr(_) | exec_event::Kind::Pty(_)) | None => {}
            }
        }
        Err("the stream ended without an end".into())
    }

    /// Python code in a fresh process, to its result.
    pub async fn code(&self, id: &str, code: &str) -> Result<()> {
        let request = RunCodeRequest {
            sandbox_id: id.to_owned(),
            language: "python".to_owned(),
            code: code.to_owned(),
            ..RunCodeRequest::default()
        };
        let mut events = self.client().run_code(request).await?.into_inner();
        let mut printed = Vec::new();
        while let Some(event) = events.message().await? {
            match event.kind {
                Some(code_event::Kind::Stdout(output)) => printed.extend(output.data),
                Some(code_event::Kind::Ended(CodeEnded { ok: true, .. })) if printed == b"42\n" => return Ok(()),
                Some(code_event::Kind::Ended(ended)) => return Err(format!("{ended:?}, printed {printed:?}").into()),
                Some(code_event::Kind::Stderr(_) | code_event::Kind::Result(_) | code_event::Kind::Error(_)) | None => {
                }
            }
        }
        Err("the stream ended without an end".into())
    }

    /// Whether it runs code at all: an older server says that it cannot.
    pub async fn can_code(&self, id: &str, code: &str) -> Result<bool> {
        match self.code(id, code).await {
            Ok(()) => Ok(true),
            Err(error) => match error.downcast_ref::<tonic::Status>().map(tonic::Status::code) {
                Some(tonic::Code::Unimplemented) => {
                    eprintln!("SKIPPED python in our sandboxes: {error}");
                    Ok(false)
                }
                Some(_) | None => Err(error),
            },
        }
    }

    /// Asks it to end, with all its sandboxes, and waits for that.
    pub async fn stop(mut self) -> Result<()> {
        kill(Pid::from_raw(self.child.id() as i32), Signal::SIGTERM)?;
        let status = self.child.wait()?;
        if status.success() {
            return Ok(());
        }
        Err(format!("the server ended with {status}").into())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Where a case failed: it still ends its sandboxes, before its directory goes.
        let _ = kill(Pid::from_raw(self.child.id() as i32), Signal::SIGTERM);
        let _ = self.child.wait();
    }
}
