//! Presets: files of network rules that policies name, so that ten policies do not list the same hosts in ten ways.
//!
//! They are looked up when a policy is checked, and what they say becomes part of the policy and of its hash: a run that has begun does
//! not change with the file.

use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::input::{AllowInput, DenyInput};

const BUILT_IN: &[(&str, &str)] = &[
    ("crates", include_str!("../../policies/presets/crates.toml")),
    ("debian", include_str!("../../policies/presets/debian.toml")),
    ("github", include_str!("../../policies/presets/github.toml")),
    ("npm", include_str!("../../policies/presets/npm.toml")),
    ("pypi", include_str!("../../policies/presets/pypi.toml")),
];

/// Where presets are found: the built-in ones, then `DATA/presets/NAME.toml`.
#[derive(Debug, Clone, Default)]
pub struct Presets {
    directory: Option<PathBuf>,
}

/// One of them as written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Preset {
    format_version: u32,
    name: String,
    #[serde(default)]
    #[expect(dead_code, reason = "for readers of the file")]
    description: Option<String>,
    #[serde(default)]
    pub allow: Vec<AllowInput>,
    #[serde(default)]
    pub deny: Vec<DenyInput>,
}

impl Presets {
    pub fn of(data_dir: &Path) -> Self {
        Self {
            directory: Some(data_dir.join("presets")),
        }
    }

    /// The preset, and where it is written.
    ///
    /// # Errors
    /// What is wrong, for the policy that names it.
    pub(super) fn find(&self, name: &str) -> Result<(Preset, String), String> {
        let built_in = BUILT_IN.iter().find(|(known, _)| *known == name);
        let (text, source) = match built_in {
            Some((name, text)) => ((*text).to_owned(), format!("presets/{name}.toml")),
            None => self.read(name)?,
        };
        let preset: Preset = toml::from_str(&text).map_err(|error| {
            let first = error.message().replace('\n', ", ");
            format!("preset `{name}` ({source}) cannot be read: {first}")
        })?;
        if preset.format_version != super::FORMAT_VERSION {
            let version = preset.format_version;
            return Err(format!("preset `{name}` ({source}) has format version {version}"));
        }
        if preset.name != name {
            return Err(format!(
                "`{}` is in the file of preset `{name}`: both must be the same",
                preset.name
            ));
        }
        Ok((preset, source))
    }

    fn read(&self, name: &str) -> Result<(String, String), String> {
        let known: Vec<&str> = BUILT_IN.iter().map(|(name, _)| *name).collect();
        let unknown = || format!("no preset `{name}`; {}", super::violation::suggestion(name, &known));
        let is_name = !name.is_empty()
            && name
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
        let Some(directory) = self.directory.as_ref().filter(|_| is_name) else {
            return Err(unknown());
        };
        let path = directory.join(format!("{name}.toml"));
        let mut text = String::new();
        let read =
            std::fs::File::open(&path).and_then(|file| file.take(super::document::MAX_BYTES).read_to_string(&mut text));
        match read {
            Ok(_) => Ok((text, path.display().to_string())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Err(unknown()),
            Err(error) => Err(format!("preset `{name}` ({}) cannot be read: {error}", path.display())),
        }
    }
}
