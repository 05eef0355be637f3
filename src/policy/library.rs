//! Policies by name or path: built-in ones, those of the data directory, and files.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use super::document::{Document, MAX_BYTES};
use super::violation::Violation;
use super::{Error, Policy, Presets, check};

/// Embedded, by name.
const BUILT_IN: &[(&str, &str)] = &[
    ("default", include_str!("../../policies/default.toml")),
    ("gvisor", include_str!("../../policies/gvisor.toml")),
    ("network-build", include_str!("../../policies/network-build.toml")),
    ("offline-build", include_str!("../../policies/offline-build.toml")),
    ("strict", include_str!("../../policies/strict.toml")),
];

/// A longer chain of `extends` is refused.
const MAX_DEPTH: usize = 8;

/// Finds policies.
#[derive(Debug)]
pub struct Policies;

/// A policy that can be named.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    pub name: String,
    pub origin: Origin,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    BuiltIn,
    File(PathBuf),
}

/// The text of a policy and where it is from.
struct Text {
    /// For messages and sources.
    label: String,
    text: String,
    /// Where a relative `extends` starts; `None` for built-in ones, which extend names alone.
    directory: Option<PathBuf>,
    /// What it has to be called, where it was asked for by name.
    name: Option<String>,
}

impl Policies {
    /// Loads by name or, where `name_or_path` holds a `/` or ends in `.toml`, by path. For people at their own machine.
    ///
    /// # Errors
    /// It is not there, cannot be read, or is not valid ([`Error::Invalid`] with every problem).
    pub fn load(name_or_path: &str, data_dir: &Path) -> Result<Policy, Error> {
        if is_path(name_or_path) {
            Self::file(Path::new(name_or_path), data_dir)
        } else {
            Self::named(name_or_path, data_dir)
        }
    }

    /// Loads by name alone: for requests from outside, which may not make the server read files.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn named(name: &str, data_dir: &Path) -> Result<Policy, Error> {
        /// The built-in ones: they do not change, and one is asked for with every sandbox.
        static BUILT: Mutex<BTreeMap<String, Policy>> = Mutex::new(BTreeMap::new());
        let built = || BUILT.lock().unwrap_or_else(PoisonError::into_inner);
        let text = by_name(name, data_dir)?;
        let is_built_in = text.directory.is_none();
        if is_built_in && let Some(known) = built().get(name) {
            return Ok(known.clone());
        }
        let policy = valid(name, build(&text, data_dir, &mut Vec::new()))?;
        if is_built_in {
            built().insert(name.to_owned(), policy.clone());
        }
        Ok(policy)
    }

    /// Loads the policy in a file.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn file(path: &Path, data_dir: &Path) -> Result<Policy, Error> {
        let text = read(path)?;
        valid(&text.label, build(&text, data_dir, &mut Vec::new()))
    }

    /// All policies that have a name, by name. Those in the data directory may be invalid.
    ///
    /// # Errors
    /// The data directory cannot be read.
    pub fn list(data_dir: &Path) -> Result<Vec<Listed>, Error> {
        let built_in = BUILT_IN.iter().map(|(name, _)| Listed {
            name: (*name).to_owned(),
            origin: Origin::BuiltIn,
        });
        let mut all: Vec<Listed> = built_in.collect();
        let directory = data_dir.join("policies");
        let failed = |source| Error::Read {
            path: directory.clone(),
            source,
        };
        let entries = match std::fs::read_dir(&directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(all),
            Err(error) => return Err(failed(error)),
        };
        for entry in entries {
            let path = entry.map_err(failed)?.path();
            let name = path
                .file_name()
                .and_then(|name| name.to_str())
                .and_then(|name| name.strip_suffix(".toml"));
            if let Some(name) = name.filter(|name| is_name(name)) {
                all.push(Listed {
                    name: name.to_owned(),
                    origin: Origin::File(path.clone()),
                });
            }
        }
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }
}

fn valid(policy: &str, built: Result<Policy, Vec<Violation>>) -> Result<Policy, Error> {
    built.map_err(|violations| Error::Invalid {
        policy: policy.to_owned(),
        violations,
    })
}

fn is_path(text: &str) -> bool {
    text.contains('/') || text.ends_with(".toml")
}

fn is_name(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-'))
}

fn by_name(name: &str, data_dir: &Path) -> Result<Text, Error> {
    let path = data_dir.join("policies").join(format!("{name}.toml"));
    let built_in = BUILT_IN.iter().find(|(other, _)| *other == name);
    // A name that is no name would be a path: `../../etc/x`.
    match (built_in, is_name(name) && path.exists()) {
        (Some(_), true) => Err(Error::Ambiguous(name.to_owned())),
        (Some((name, text)), false) => Ok(Text {
            label: format!("policies/{name}.toml"),
            text: (*text).to_owned(),
            directory: None,
            name: Some((*name).to_owned()),
        }),
        (None, true) => Ok(Text {
            name: Some(name.to_owned()),
            ..read(&path)?
        }),
        (None, false) => {
            let known: BTreeSet<String> = Policies::list(data_dir)?
                .into_iter()
                .map(|listed| listed.name)
                .collect();
            Err(Error::NotFound {
                name: name.to_owned(),
                known: known.into_iter().collect::<Vec<_>>().join(", "),
            })
        }
    }
}

fn read(path: &Path) -> Result<Text, Error> {
    let failed = |source| Error::Read {
        path: path.to_owned(),
        source,
    };
    let kind = match std::fs::metadata(path) {
        Ok(kind) => kind,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Err(Error::NoFile(path.to_owned())),
        Err(error) => return Err(failed(error)),
    };
    if !kind.is_file() {
        return Err(failed(std::io::Error::other("not a regular file")));
    }
    let mut text = String::new();
    // One more than is allowed, so that `Document::parse` sees that there is more.
    let file = std::fs::File::open(path).map_err(failed)?;
    file.take(MAX_BYTES + 1).read_to_string(&mut text).map_err(failed)?;
    Ok(Text {
        label: path.display().to_string(),
        text,
        directory: path.parent().map(Path::to_owned),
        name: None,
    })
}

/// Checks a text, after the policy that it extends. `above` holds the labels of those that led here.
fn build(text: &Text, data_dir: &Path, above: &mut Vec<String>) -> Result<Policy, Vec<Violation>> {
    let document = Document::parse(&text.label, &text.text)?;
    above.push(text.label.clone());
    let mut violations = Vec::new();
    if let (Some(wanted), Some(own)) = (&text.name, document.name())
        && wanted != own
    {
        let message = format!("`{own}` is in the file of policy `{wanted}`: both must be the same");
        violations.push(document.violation("/name", message));
    }
    let parent = match document.extends() {
        Some(reference) => match extended(reference, text, data_dir, above) {
            Ok(Ok(parent)) => Some(parent),
            Ok(Err(of_parent)) => {
                violations.extend(of_parent);
                None
            }
            Err(message) => {
                violations.push(document.violation("/extends", message));
                None
            }
        },
        None => None,
    };
    match check(&document, parent.as_ref(), &Presets::of(data_dir)) {
        Ok(policy) if violations.is_empty() => return Ok(policy),
        Ok(_) => {}
        Err(own) => violations.extend(own),
    }
    Err(violations)
}

/// The policy that `reference` in `child` means: the outer error is the child's, the inner ones are its own.
fn extended(
    reference: &str,
    child: &Text,
    data_dir: &Path,
    above: &mut Vec<String>,
) -> Result<Result<Policy, Vec<Violation>>, String> {
    let text = match (&child.directory, is_path(reference)) {
        (Some(directory), true) => read(&directory.join(reference)),
        (None, true) => return Err("a built-in policy extends a name".to_owned()),
        (_, false) => by_name(reference, data_dir),
    };
    let text = text.map_err(|error| crate::error::chain(&error))?;
    if above.contains(&text.label) {
        return Err(format!("a circle: {} -> {}", above.join(" -> "), text.label));
    }
    if above.len() >= MAX_DEPTH {
        return Err(format!("more than {MAX_DEPTH} policies extend one another"));
    }
    Ok(build(&text, data_dir, above))
}
