//! Where a policy finds a secret: a reference, or a program of the operator's that prints it.
//!
//! Only policies may name a program: they are files of the operator's. Whatever a client may write stays a [`CredentialRef`],
//! or a client could run programs on the host.

use std::fmt;
use std::path::PathBuf;
use std::process::Stdio;
use std::str::FromStr;
use std::time::Duration;

use secrecy::SecretString;
use secrecy::zeroize::Zeroizing;
use serde::{Deserialize, Serialize};
use tokio::io::AsyncReadExt;

use super::{CredentialRef, Error, MAX_BYTES};

/// How long a program may take.
const TIME: Duration = Duration::from_secs(10);

/// Written `env:NAME`, `file:/PATH` or `command:/PROGRAM ARGUMENT…`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Source {
    Reference(CredentialRef),
    /// Words are parted by spaces; no shell reads them. It gets `PATH` and `HOME` of ours, and no input.
    Command {
        program: PathBuf,
        arguments: Vec<String>,
    },
}

impl Source {
    /// Fetches the value, for use now.
    ///
    /// # Errors
    /// It is not to be had; what a program said is not told, as it may hold the secret.
    pub async fn resolve(&self) -> Result<SecretString, Error> {
        match self {
            Self::Reference(reference) => reference.resolve(),
            Self::Command { program, arguments } => {
                let failed = |reason: String| Error::Command {
                    program: program.clone(),
                    reason,
                };
                let ran = tokio::time::timeout(TIME, run(program, arguments)).await;
                let text = ran.map_err(|_| failed(format!("it took longer than {TIME:?}")))?;
                let text = text.map_err(failed)?;
                let secret = text.trim_end_matches(['\n', '\r']);
                match secret.trim().is_empty() {
                    true => Err(failed("it printed nothing".to_owned())),
                    false => Ok(SecretString::from(secret)),
                }
            }
        }
    }
}

async fn run(program: &PathBuf, arguments: &[String]) -> Result<Zeroizing<String>, String> {
    let ours = ["PATH", "HOME"].map(|name| (name, std::env::var_os(name)));
    let ours = ours.into_iter().filter_map(|(name, value)| Some((name, value?)));
    let mut child = tokio::process::Command::new(program)
        .args(arguments)
        .env_clear()
        .envs(ours)
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| format!("it cannot be started: {error}"))?;
    let mut text = Zeroizing::new(String::with_capacity(MAX_BYTES as usize + 1));
    if let Some(stdout) = child.stdout.take() {
        let read = stdout.take(MAX_BYTES + 1).read_to_string(&mut text).await;
        read.map_err(|error| format!("what it printed is no text: {error}"))?;
    }
    if text.len() as u64 > MAX_BYTES {
        return Err(format!("it printed more than {MAX_BYTES} bytes"));
    }
    let status = child.wait().await.map_err(|error| error.to_string())?;
    match status.success() {
        true => Ok(text),
        false => Err(format!("it ended with {status}")),
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Reference(reference) => reference.fmt(f),
            Self::Command { program, arguments } => {
                write!(f, "command:{}", program.display())?;
                arguments.iter().try_for_each(|word| write!(f, " {word}"))
            }
        }
    }
}

impl FromStr for Source {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let Some(line) = text.strip_prefix("command:") else {
            return text.parse().map(Self::Reference).map_err(|_: Error| Error::NotASource);
        };
        let mut words = line.split(' ').filter(|word| !word.is_empty()).map(str::to_owned);
        match words.next() {
            Some(program) if program.starts_with('/') && !line.contains(['\0', '\n']) => Ok(Self::Command {
                program: program.into(),
                arguments: words.collect(),
            }),
            Some(_) | None => Err(Error::NotASource),
        }
    }
}

impl TryFrom<String> for Source {
    type Error = Error;

    fn try_from(text: String) -> Result<Self, Error> {
        text.parse()
    }
}

impl From<Source> for String {
    fn from(source: Source) -> String {
        source.to_string()
    }
}

#[cfg(test)]
mod tests {
    use secrecy::ExposeSecret;

    use super::*;

    fn source(text: &str) -> Source {
        text.parse().unwrap()
    }

    #[test]
    fn a_source_parses_and_prints_one_way() {
        for text in ["env:TOKEN", "file:/run/secrets/key", "command:/usr/bin/pass show token"] {
            assert_eq!(source(text).to_string(), text);
        }
        for bad in [
            "",
            "sk-live-123",
            "command:",
            "command:pass show",
            "command: ",
            "command:/a\nb",
        ] {
            let error = bad.parse::<Source>().unwrap_err().to_string();
            assert!(
                bad.is_empty() || !error.contains("sk-live-123"),
                "a misplaced secret is not shown"
            );
        }
        // What a client may name never runs a program.
        assert!("command:/bin/true".parse::<CredentialRef>().is_err());
    }

    #[tokio::test]
    async fn a_program_is_run_without_a_shell_and_without_our_environment() {
        let value = source("command:/bin/echo $HOME a;b").resolve().await.unwrap();
        assert_eq!(value.expose_secret(), "$HOME a;b");
        let variables = source("command:/usr/bin/env").resolve().await.unwrap();
        let names = variables
            .expose_secret()
            .lines()
            .filter_map(|line| line.split_once('='));
        let names: Vec<&str> = names.map(|(name, _)| name).collect();
        assert!(
            !names.is_empty() && names.iter().all(|name| ["PATH", "HOME"].contains(name)),
            "{names:?}"
        );
    }

    #[tokio::test]
    async fn what_is_no_secret_is_refused_without_what_it_said() {
        for (text, reason) in [
            ("command:/bin/false", "it ended with"),
            ("command:/bin/true", "it printed nothing"),
            ("command:/no/such/program", "it cannot be started"),
            ("command:/usr/bin/head -c 70000 /dev/zero", "more than"),
        ] {
            let error = source(text).resolve().await.unwrap_err();
            assert!(error.to_string().contains(reason), "{error}");
        }
    }
}
