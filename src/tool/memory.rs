//! A world in memory, for tests of tools and of what calls them. Commands do what the test says; files behave as in a sandbox.
//!
//! Stricter than a real one: relative paths and empty commands are a bug of the caller, and panic.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use globset::Glob;
use regex::Regex;

use super::world::{Command, Entry, Error, FileKind, Found, Listing, Lost, Match, Outcome, Refusal, Stat, World};
use crate::sandbox::{Captured, Cause};

type OnExec = Box<dyn Fn(&Command) -> Result<Outcome, Error> + Send + Sync>;

/// See the module.
pub struct MemoryWorld {
    state: Mutex<State>,
    on_exec: OnExec,
}

#[derive(Debug, Default)]
struct State {
    files: BTreeMap<String, Vec<u8>>,
    artifacts: BTreeMap<String, Vec<u8>>,
    executed: Vec<Command>,
    next: Option<Trouble>,
}

#[derive(Debug)]
enum Trouble {
    Fail(Error),
    Stall,
}

impl Default for MemoryWorld {
    /// No files; each command ends with exit code 0 and no output.
    fn default() -> Self {
        let outcome = Outcome {
            stdout: Captured::default(),
            stderr: Captured::default(),
            cause: Cause::Exited { code: 0 },
        };
        Self {
            state: Mutex::default(),
            on_exec: Box::new(move |_| Ok(outcome.clone())),
        }
    }
}

impl fmt::Debug for MemoryWorld {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryWorld")
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

impl MemoryWorld {
    /// Adds a file by its absolute path; its directories come with it.
    pub fn with_file(self, path: &str, content: &[u8]) -> Self {
        self.state().files.insert(normal(path), content.to_vec());
        self
    }

    /// Says what commands do.
    pub fn on_exec(mut self, answer: impl Fn(&Command) -> Result<Outcome, Error> + Send + Sync + 'static) -> Self {
        self.on_exec = Box::new(answer);
        self
    }

    /// The next call fails.
    pub fn fail_next(&self, error: Error) {
        self.state().next = Some(Trouble::Fail(error));
    }

    /// The next call never ends.
    pub fn stall_next(&self) {
        self.state().next = Some(Trouble::Stall);
    }

    pub fn file(&self, path: &str) -> Option<Vec<u8>> {
        self.state().files.get(&normal(path)).cloned()
    }

    pub fn executed(&self) -> Vec<Command> {
        self.state().executed.clone()
    }

    /// How many different artifacts are stored.
    pub fn artifacts(&self) -> usize {
        self.state().artifacts.len()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn trouble(&self) -> Result<(), Error> {
        let next = self.state().next.take();
        match next {
            Some(Trouble::Fail(error)) => Err(error),
            Some(Trouble::Stall) => std::future::pending().await,
            None => Ok(()),
        }
    }
}

/// `path` without `.`, `..` and double slashes; no leading slash.
fn normal(path: &str) -> String {
    assert!(path.starts_with('/'), "`{path}` is not absolute");
    let mut parts = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

impl State {
    fn is_directory(&self, path: &str) -> bool {
        path.is_empty() || path == "workspace" || self.files.keys().any(|file| below(file, path).is_some())
    }

    fn get(&self, path: &str) -> Result<&Vec<u8>, Error> {
        match self.files.get(path) {
            Some(content) => Ok(content),
            None if self.is_directory(path) => Err(Error::refused(Refusal::IsDirectory, "it is a directory")),
            None => Err(Error::refused(Refusal::NotFound, "no such file")),
        }
    }
}

/// The rest of `file` when it lies below `directory`.
fn below<'a>(file: &'a str, directory: &str) -> Option<&'a str> {
    match directory {
        "" => Some(file),
        _ => file.strip_prefix(directory)?.strip_prefix('/'),
    }
}

#[async_trait]
impl World for MemoryWorld {
    async fn exec(&self, command: &Command) -> Result<Outcome, Error> {
        assert!(!command.argv.is_empty() && command.cwd.starts_with('/'), "{command:?}");
        self.trouble().await?;
        self.state().executed.push(command.clone());
        (self.on_exec)(command)
    }

    async fn read(&self, path: &str) -> Result<Vec<u8>, Error> {
        self.trouble().await?;
        self.state().get(&normal(path)).cloned()
    }

    async fn write(&self, path: &str, content: &[u8]) -> Result<(), Error> {
        self.trouble().await?;
        let path = normal(path);
        let mut state = self.state();
        if state.is_directory(&path) {
            return Err(Error::refused(Refusal::IsDirectory, "it is a directory"));
        }
        if state.files.keys().any(|file| below(&path, file).is_some()) {
            return Err(Error::refused(Refusal::NotDirectory, "a part of the path is a file"));
        }
        state.files.insert(path, content.to_vec());
        Ok(())
    }

    async fn stat(&self, path: &str) -> Result<Stat, Error> {
        self.trouble().await?;
        let path = normal(path);
        let state = self.state();
        if state.is_directory(&path) {
            return Ok(Stat {
                kind: FileKind::Directory,
                size: 0,
            });
        }
        let content = state.get(&path)?;
        Ok(Stat {
            kind: FileKind::Regular,
            size: content.len() as u64,
        })
    }

    async fn list(&self, path: &str, depth: u32, max_entries: u32) -> Result<Listing, Error> {
        self.trouble().await?;
        let path = normal(path);
        let state = self.state();
        if state.files.contains_key(&path) {
            return Err(Error::refused(Refusal::NotDirectory, "it is a file"));
        }
        if !state.is_directory(&path) {
            return Err(Error::refused(Refusal::NotFound, "no such directory"));
        }
        let mut found = BTreeSet::new();
        for file in state.files.keys().filter_map(|file| below(file, &path)) {
            let parts: Vec<&str> = file.split('/').collect();
            found.extend((1..=parts.len().min(depth as usize)).map(|n| (parts[..n].join("/"), n == parts.len())));
        }
        let all = found.len();
        let entries = found.into_iter().take(max_entries as usize).map(|(entry, is_file)| {
            let content = state.files.get(&normal(&format!("/{path}/{entry}")));
            Entry {
                stat: Stat {
                    kind: if is_file {
                        FileKind::Regular
                    } else {
                        FileKind::Directory
                    },
                    size: content.map_or(0, |content| content.len() as u64),
                },
                path: entry,
                link_target: None,
            }
        });
        Ok(Listing {
            entries: entries.collect(),
            truncated: all > max_entries as usize,
        })
    }

    async fn search(&self, path: &str, pattern: &str, glob: Option<&str>, max_matches: u32) -> Result<Found, Error> {
        self.trouble().await?;
        let invalid = |error: &dyn fmt::Display| Error::refused(Refusal::InvalidPattern, error.to_string());
        let pattern = Regex::new(pattern).map_err(|error| invalid(&error))?;
        let glob = glob
            .map(Glob::new)
            .transpose()
            .map_err(|error| invalid(&error))?
            .map(|glob| glob.compile_matcher());
        let path = normal(path);
        let state = self.state();
        let mut found = Found::default();
        let mut files: Vec<(&str, &Vec<u8>)> = state
            .files
            .iter()
            .filter_map(|(file, content)| Some((below(file, &path)?, content)))
            .collect();
        if let Some(content) = state.files.get(&path) {
            files.push((path.rsplit('/').next().unwrap_or(&path), content));
        } else if !state.is_directory(&path) {
            return Err(Error::refused(Refusal::NotFound, "no such file or directory"));
        }
        for (file, content) in files {
            if super::read_file::is_binary(content) || glob.as_ref().is_some_and(|glob| !glob.is_match(file)) {
                continue;
            }
            found.files_read += 1;
            for (text, line) in String::from_utf8_lossy(content).lines().zip(1..) {
                if !pattern.is_match(text) {
                    continue;
                }
                if found.matches.len() == max_matches as usize {
                    found.truncated = true;
                    return Ok(found);
                }
                found.matches.push(Match {
                    path: file.to_owned(),
                    line,
                    text: text.to_owned(),
                });
            }
        }
        Ok(found)
    }

    async fn put_artifact(&self, content: &[u8]) -> Result<String, Lost> {
        let id = blake3::hash(content).to_hex().to_string();
        self.state().artifacts.insert(id.clone(), content.to_vec());
        Ok(id)
    }

    async fn get_artifact(&self, id: &str) -> Result<Option<Vec<u8>>, Lost> {
        Ok(self.state().artifacts.get(id).cloned())
    }
}

#[cfg(test)]
impl MemoryWorld {
    /// Calls a tool as a run would, with 30 s.
    pub(super) async fn call(&self, name: &str, arguments: &str) -> super::ToolResult {
        let limits = super::Limits {
            timeout: std::time::Duration::from_secs(30),
        };
        let registry = super::registry::Registry::all();
        super::run(&registry, name, arguments, self, &limits)
            .await
            .expect("the world stands")
    }
}
