//! What an image says about how it is to be run. It is shown; of it, only a part of the environment has an effect.

use std::collections::BTreeMap;

use oci_spec::image::ImageConfiguration;
use serde::{Deserialize, Serialize};

use super::{Bounds, Digest, Error};

/// Variables that commands get from the image, below what the caller sets: where the image's own programs are, and in what
/// language they speak. Never others: what a builder left in an image's environment may be a secret.
const APPLIED: [&str; 16] = [
    "CARGO_HOME",
    "CONDA_PREFIX",
    "GEM_HOME",
    "GOPATH",
    "GOROOT",
    "JAVA_HOME",
    "LANG",
    "LANGUAGE",
    "LD_LIBRARY_PATH",
    "NODE_PATH",
    "NVM_DIR",
    "PATH",
    "PYTHONPATH",
    "RUSTUP_HOME",
    "TZ",
    "VIRTUAL_ENV",
];
/// With one of these before.
const APPLIED_PREFIX: &str = "LC_";
const LONGEST_VALUE: usize = 4096;

/// The part of an image's configuration that is kept.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Config {
    pub os: String,
    pub architecture: String,
    /// Variables that commands in the sandbox get.
    pub env: BTreeMap<String, String>,
    /// Names of the variables that the image has besides; their values are not kept.
    pub env_left_out: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub working_dir: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub entrypoint: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cmd: Vec<String>,
}

/// A whole configuration: what is kept of it, and its layers.
#[derive(Debug)]
pub(super) struct Whole {
    pub config: Config,
    /// Of each layer when unpacked, lowest first.
    pub diff_ids: Vec<Digest>,
}

impl Whole {
    pub fn read(bytes: &[u8]) -> Result<Self, Error> {
        const WHAT: &str = "the image's configuration";
        let whole: ImageConfiguration = serde_json::from_slice(bytes).map_err(|error| Error::format(WHAT, error))?;
        let diff_ids = whole.rootfs().diff_ids();
        if diff_ids.len() > Bounds::LAYERS {
            return Err(Error::TooLarge {
                what: "layers",
                limit: Bounds::LAYERS as u64,
            });
        }
        let diff_ids = diff_ids.iter().map(|id| id.parse()).collect::<Result<_, _>>()?;
        let inner = whole.config().clone().unwrap_or_default();
        let (env, env_left_out) = environment(inner.env().as_deref().unwrap_or_default());
        Ok(Self {
            config: Config {
                os: whole.os().to_string(),
                architecture: whole.architecture().to_string(),
                env,
                env_left_out,
                working_dir: inner.working_dir().clone(),
                user: inner.user().clone().filter(|user| !user.is_empty()),
                entrypoint: inner.entrypoint().clone().unwrap_or_default(),
                cmd: inner.cmd().clone().unwrap_or_default(),
            },
            diff_ids,
        })
    }

    /// The address of the layers, one over the other: of the unpacked root.
    pub fn chain(&self) -> Digest {
        let mut ids = self.diff_ids.iter();
        let first = ids.next().cloned().unwrap_or_else(|| Digest::of(b""));
        ids.fold(first, |chain, id| Digest::of(format!("{chain} {id}").as_bytes()))
    }
}

fn environment(written: &[String]) -> (BTreeMap<String, String>, Vec<String>) {
    let (mut applied, mut left_out) = (BTreeMap::new(), Vec::new());
    for (name, value) in written.iter().filter_map(|variable| variable.split_once('=')) {
        let is_known = APPLIED.contains(&name) || name.starts_with(APPLIED_PREFIX);
        if is_known && value.len() <= LONGEST_VALUE && !value.contains('\0') {
            applied.insert(name.to_owned(), value.to_owned());
        } else {
            left_out.push(name.to_owned());
        }
    }
    (applied, left_out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_known_variables_are_kept_and_never_the_value_of_others() {
        let written = [
            "PATH=/opt/bin:/bin",
            "LC_ALL=C",
            "API_KEY=hunter2",
            "HOME=/root",
            "LD_PRELOAD=/x",
            "odd",
        ];
        let (env, left_out) = environment(&written.map(str::to_owned));
        let kept = [("LC_ALL", "C"), ("PATH", "/opt/bin:/bin")];
        assert_eq!(
            env,
            kept.map(|(name, value)| (name.to_owned(), value.to_owned())).into()
        );
        assert_eq!(left_out, ["API_KEY", "HOME", "LD_PRELOAD"]);
    }

    #[test]
    fn a_chain_is_that_of_the_image_format() {
        let whole = |ids: &[&Digest]| {
            let text = serde_json::json!({ "architecture": "amd64", "os": "linux",
                "rootfs": { "type": "layers", "diff_ids": ids } });
            Whole::read(text.to_string().as_bytes()).unwrap()
        };
        let (a, b) = (Digest::of(b"a"), Digest::of(b"b"));
        assert_eq!(whole(&[&a]).chain(), a);
        assert_eq!(whole(&[&a, &b]).chain(), Digest::of(format!("{a} {b}").as_bytes()));
        assert_ne!(whole(&[&b, &a]).chain(), whole(&[&a, &b]).chain());
    }
}
