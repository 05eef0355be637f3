//! A host on the internet of the test, with a policy and the real program.

use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use crate::internet::{Internet, RESOLVER};
use crate::support::{self, EXUVIA, Scratch};

/// What the token of the operator is.
pub const SECRET: &str = "s3cret-of-the-operator";

pub const POLICY: &str = r#"
format_version = 1
name = "net"
[limits]
wall_time = "10m"
[network]
mode = "proxy"
[[network.allow]]
name = "api"
host = "api.example.com"
[[network.allow]]
name = "other"
host = "other.example.com"
methods = ["GET"]
path = "/open/"
[[network.allow]]
name = "plain"
host = "plain.example.com"
port = 80
[[network.allow]]
name = "inward"
host = "rebound.example.com"
port = [80, 443]
[[network.allow]]
name = "metadata"
host = "metadata.example.com"
port = [80, 443]
[[network.allow]]
name = "mapped"
host = "mapped.example.com"
port = [80, 443]
[[network.allow]]
name = "host"
host = "host.example.com"
port = [80, 443]
[[credentials]]
name = "token"
from = "file:TOKEN"
env = "API_TOKEN"
inject = { host = "api.example.com", path = "/v1/" }
[[tools.rules]]
name = "all"
tool = "*"
verdict = "allow"
"#;

pub struct Bed {
    pub internet: Internet,
    pub data: Scratch,
    pub policy: PathBuf,
    _keys: Scratch,
}

impl Bed {
    /// `None`, said by name, where there can be none.
    pub fn new(test: &str) -> Option<Self> {
        if !support::has_sandboxes(test) {
            return None;
        }
        let data = Scratch::new();
        let internet = match Internet::new(data.path()) {
            Ok(internet) => internet,
            Err(reason) => {
                support::skip(test, &reason);
                return None;
            }
        };
        std::fs::create_dir(data.path().join("policies")).unwrap();
        let policy = data.path().join("policies/net.toml");
        let keys = Scratch::new();
        let token = keys.path().join("token");
        let mut file = std::fs::File::options()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&token)
            .unwrap();
        file.write_all(SECRET.as_bytes()).unwrap();
        std::fs::write(
            &policy,
            POLICY.replace("file:TOKEN", &format!("file:{}", token.display())),
        )
        .unwrap();
        Some(Self {
            internet,
            data,
            policy,
            _keys: keys,
        })
    }

    /// The program, on this host, with what its operator says.
    pub fn exuvia(&self, words: &[&str]) -> Command {
        let mut command = Command::new(EXUVIA);
        command
            .arg("--data-dir")
            .arg(self.data.path())
            .args(words)
            .env("EXUVIA_EGRESS_RESOLVER", format!("{RESOLVER}:53"))
            .env("EXUVIA_EGRESS_ROOTS", &self.internet.roots)
            .stdin(Stdio::null());
        command
    }

    /// A shell command in a sandbox of its own under the policy.
    pub fn shell(&self, script: &str) -> Output {
        self.shell_on("oci", script)
    }

    /// The same, made by this backend.
    pub fn shell_on(&self, backend: &str, script: &str) -> Output {
        let policy = self.policy.to_str().unwrap();
        let words = [
            "sandbox",
            "run",
            "--policy",
            policy,
            "--backend",
            backend,
            "--timeout",
            "60s",
            "--",
            "sh",
            "-c",
            script,
        ];
        self.exuvia(&words).output().unwrap()
    }

    /// The decisions on the record so far.
    pub fn decisions(&self) -> Vec<Value> {
        let output = self.exuvia(&["audit", "query", "--json"]).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let object: Value = serde_json::from_str(&text).unwrap();
        let entries = object["entries"].as_array().unwrap().iter();
        entries
            .filter(|entry| entry["action"] == "network.decided")
            .cloned()
            .collect()
    }

    /// Outcome, rule and host of each decision about something else than a name.
    pub fn verdicts(&self) -> Vec<(String, String, String)> {
        let decisions = self
            .decisions()
            .into_iter()
            .filter(|one| one["details"]["channel"] != "dns");
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        decisions
            .map(|one| {
                (
                    text(&one["outcome"]),
                    text(&one["details"]["rule"]),
                    text(&one["details"]["host"]),
                )
            })
            .collect()
    }
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// For messages.
pub fn said(output: &Output) -> String {
    format!(
        "{} {}\n{}",
        output.status,
        stdout(output),
        String::from_utf8_lossy(&output.stderr)
    )
}
