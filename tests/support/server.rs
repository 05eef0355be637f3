//! `exuvia serve` as a process.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use super::{Client, EXUVIA, Sandboxes};

/// Longer than anything here takes on a slow and busy machine.
pub const LONG: Duration = Duration::from_secs(60);

/// A server over a data directory; killed, and awaited, when dropped.
#[derive(Debug)]
pub struct Server {
    child: Child,
    /// What it said when it was ready.
    pub hello: Value,
}

impl Server {
    /// Starts one that must come up.
    pub async fn start(data: &Path) -> Self {
        Self::start_with(data, &[]).await.expect("the server comes up")
    }

    /// Starts one with more environment; `Err` is how it ended without being ready.
    pub async fn start_with(data: &Path, env: &[(&str, &str)]) -> Result<Self, ExitStatus> {
        let mut server = Self::launch(data, env);
        server.ready().await?;
        Ok(server)
    }

    /// Starts one with more arguments; it must come up.
    pub async fn start_as(data: &Path, arguments: &[&str]) -> Self {
        let mut server = Self::spawn(data, &[], arguments);
        server.ready().await.expect("the server comes up");
        server
    }

    /// Starts one and does not wait until it is ready.
    pub fn launch(data: &Path, env: &[(&str, &str)]) -> Self {
        Self::spawn(data, env, &[])
    }

    fn spawn(data: &Path, env: &[(&str, &str)], arguments: &[&str]) -> Self {
        let child = Command::new(EXUVIA)
            .args(["serve", "--json", "--listen", "127.0.0.1:0", "--data-dir"])
            .arg(data)
            .args(arguments)
            .envs(env.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        Self {
            child,
            hello: Value::Null,
        }
    }

    /// Waits until it is ready; `Err` is how it ended before.
    pub async fn ready(&mut self) -> Result<(), ExitStatus> {
        let mut lines = BufReader::new(self.child.stdout.take().unwrap()).lines();
        let first = timeout(LONG, lines.next_line()).await.expect("it says something");
        let hello = first.unwrap().map(|line| serde_json::from_str::<Value>(&line).unwrap());
        match hello.filter(|hello| hello.get("listening").is_some()) {
            Some(hello) => {
                self.hello = hello;
                Ok(())
            }
            None => Err(self.child.wait().await.unwrap()),
        }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.hello["listening"].as_str().unwrap())
    }

    pub async fn client(&self) -> Client {
        Client::connect(self.url()).await.unwrap()
    }

    pub async fn sandboxes(&self) -> Sandboxes {
        Sandboxes::connect(self.url()).await.unwrap()
    }

    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().expect("it runs") as i32)
    }

    /// Waits until it has killed itself.
    pub async fn dies(mut self) {
        let status = timeout(LONG, self.child.wait()).await.expect("it dies").unwrap();
        assert_eq!(status.signal(), Some(Signal::SIGKILL as i32), "{status}");
    }

    /// As `kill -9` from outside.
    pub async fn kill(mut self) {
        self.child.start_kill().unwrap();
        self.child.wait().await.unwrap();
    }

    /// As a service manager stops it.
    pub async fn terminate(mut self) {
        kill(self.pid(), Signal::SIGTERM).unwrap();
        let status = timeout(LONG, self.child.wait()).await.expect("it stops").unwrap();
        assert!(status.success(), "{status}");
    }
}

impl Drop for Server {
    /// It writes to its data directory until it is dead.
    fn drop(&mut self) {
        let begun = Instant::now();
        let _ = self.child.start_kill();
        while matches!(self.child.try_wait(), Ok(None)) && begun.elapsed() < LONG {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
