//! Secrets: references to them, their values for the moment of use, and keeping them out of all that goes out.
//!
//! Owns: [`CredentialRef`], [`Source`] and how they are resolved, the [`Redactor`]. Must not know: what a secret is for. What is stored,
//! logged or sent is a reference; a value lives in a [`SecretString`], which prints as nothing and is wiped when dropped.

mod redact;
mod source;

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use secrecy::SecretString;
use secrecy::zeroize::Zeroizing;
use serde::{Deserialize, Serialize};

pub use redact::{Redacting, Redactor};
pub use source::Source;

use crate::error::Kind;

/// Larger credential files are refused.
const MAX_BYTES: u64 = 64 << 10;

/// Where a secret is. Written `env:NAME` or `file:/PATH`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum CredentialRef {
    /// A variable of our own environment.
    Env(String),
    /// A file of ours that the rest of the world cannot read; line breaks at its end are not part of the secret.
    File(PathBuf),
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Does not show the text: it may be the secret itself, put in the wrong place.
    #[error("this is no credential reference: write `env:NAME` or `file:/PATH`, never the secret itself")]
    NotAReference,
    /// As [`Self::NotAReference`], in a policy.
    #[error(
        "this says not where a secret is: write `env:NAME`, `file:/PATH` or `command:/PROGRAM …`, never the secret itself"
    )]
    NotASource,
    #[error("credential program `{}`: {reason}", program.display())]
    Command { program: PathBuf, reason: String },
    #[error("credential `{0}` is not set")]
    NotSet(CredentialRef),
    #[error("credential `{0}` is empty or no text")]
    NotText(CredentialRef),
    #[error("could not read credential `{reference}`")]
    Read {
        reference: CredentialRef,
        #[source]
        source: std::io::Error,
    },
    #[error("credential `{reference}` cannot be trusted: {reason}")]
    Exposed { reference: CredentialRef, reason: String },
}

impl Error {
    pub fn kind(&self) -> Kind {
        match self {
            Self::NotASource
            | Self::Command { .. }
            | Self::NotAReference
            | Self::NotSet(_)
            | Self::NotText(_)
            | Self::Read { .. } => Kind::Invalid,
            Self::Exposed { .. } => Kind::Denied,
        }
    }
}

impl CredentialRef {
    /// Fetches the value, for use now: it is not kept.
    ///
    /// # Errors
    /// It is not there, empty, or in a file that others could read or have written.
    pub fn resolve(&self) -> Result<SecretString, Error> {
        let text = match self {
            Self::Env(name) => match std::env::var_os(name) {
                Some(value) => Zeroizing::new(value.into_string().map_err(|_| Error::NotText(self.clone()))?),
                None => return Err(Error::NotSet(self.clone())),
            },
            Self::File(path) => self.read(path)?,
        };
        let secret = text.trim_end_matches(['\n', '\r']);
        if secret.trim().is_empty() {
            return Err(Error::NotText(self.clone()));
        }
        Ok(SecretString::from(secret))
    }

    fn read(&self, path: &Path) -> Result<Zeroizing<String>, Error> {
        let failed = |source| Error::Read {
            reference: self.clone(),
            source,
        };
        // Not blocking: a named pipe would keep us for ever. What is opened is what is checked.
        let mut options = File::options();
        let file = options
            .read(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
            .open(path)
            .map_err(failed)?;
        let about = file.metadata().map_err(failed)?;
        if let Some(reason) = exposure(
            about.is_file(),
            about.uid(),
            about.mode(),
            nix::unistd::geteuid().as_raw(),
        ) {
            let reference = self.clone();
            return Err(Error::Exposed { reference, reason });
        }
        let mut text = Zeroizing::new(String::with_capacity(about.len().min(MAX_BYTES) as usize + 1));
        file.take(MAX_BYTES + 1).read_to_string(&mut text).map_err(failed)?;
        if text.len() as u64 > MAX_BYTES {
            let reason = format!("it has more than {MAX_BYTES} bytes");
            let reference = self.clone();
            return Err(Error::Exposed { reference, reason });
        }
        Ok(text)
    }
}

/// Why a file is no place for a secret of `own_uid`.
fn exposure(is_file: bool, uid: u32, mode: u32, own_uid: u32) -> Option<String> {
    match mode & 0o7777 {
        _ if !is_file => Some("it is not a regular file".to_owned()),
        _ if uid != own_uid => Some(format!("it belongs to uid {uid}, not to us (uid {own_uid})")),
        mode if mode & 0o027 != 0 => Some(format!("its mode is {mode:03o}; use 600 (or 640)")),
        _ => None,
    }
}

impl fmt::Display for CredentialRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Env(name) => write!(f, "env:{name}"),
            Self::File(path) => write!(f, "file:{}", path.display()),
        }
    }
}

impl FromStr for CredentialRef {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let is_variable = |name: &str| {
            let mut bytes = name.bytes();
            bytes.next().is_some_and(|b| b.is_ascii_alphabetic() || b == b'_')
                && bytes.all(|b| b.is_ascii_alphanumeric() || b == b'_')
        };
        match text.split_once(':') {
            Some(("env", name)) if is_variable(name) => Ok(Self::Env(name.to_owned())),
            Some(("file", path)) if path.starts_with('/') && !path.contains('\0') => Ok(Self::File(path.into())),
            _ => Err(Error::NotAReference),
        }
    }
}

impl TryFrom<String> for CredentialRef {
    type Error = Error;

    fn try_from(text: String) -> Result<Self, Error> {
        text.parse()
    }
}

impl From<CredentialRef> for String {
    fn from(reference: CredentialRef) -> String {
        reference.to_string()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use secrecy::ExposeSecret;

    use super::*;

    #[test]
    fn a_reference_parses_and_prints_one_way() {
        for text in ["env:OPENAI_API_KEY", "file:/run/secrets/key"] {
            assert_eq!(text.parse::<CredentialRef>().unwrap().to_string(), text);
        }
        for bad in [
            "",
            "sk-live-123",
            "env:",
            "env:A B",
            "env:1A",
            "file:key",
            "file:",
            "vault:x",
            "ENV:A",
        ] {
            let error = bad.parse::<CredentialRef>().unwrap_err();
            assert!(
                bad.is_empty() || !error.to_string().contains("sk-live-123"),
                "a misplaced secret is not shown"
            );
        }
    }

    fn file(content: &str, mode: u32) -> (tempfile::TempDir, CredentialRef) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        std::fs::write(&path, content).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        (directory, CredentialRef::File(path))
    }

    #[test]
    fn a_file_is_read_without_its_line_end_and_never_printed() {
        let (_directory, reference) = file("s3cret\r\n", 0o600);
        let secret = reference.resolve().unwrap();
        assert_eq!(secret.expose_secret(), "s3cret");
        assert!(!format!("{secret:?} {reference:?}").contains("s3cret"));
    }

    #[test]
    fn a_file_that_others_can_reach_is_refused() {
        for mode in [0o644, 0o604, 0o660, 0o602, 0o601] {
            let (_directory, reference) = file("s3cret", mode);
            assert!(matches!(reference.resolve(), Err(Error::Exposed { .. })), "{mode:o}");
        }
        let (_directory, reference) = file("s3cret", 0o640);
        assert!(reference.resolve().is_ok());
        assert_eq!(exposure(true, 1000, 0o600, 1000), None);
        assert!(exposure(true, 1001, 0o600, 1000).is_some());
        let directory = tempfile::tempdir().unwrap();
        let reference = CredentialRef::File(directory.path().to_owned());
        assert!(matches!(reference.resolve(), Err(Error::Exposed { .. })));
    }

    #[test]
    fn what_is_no_secret_is_refused() {
        let (_directory, empty) = file("\n", 0o600);
        assert!(matches!(empty.resolve(), Err(Error::NotText(_))));
        let (_directory, large) = file(&"x".repeat(MAX_BYTES as usize + 1), 0o600);
        assert!(matches!(large.resolve(), Err(Error::Exposed { .. })));
        let unset = CredentialRef::Env("EXUVIA_TEST_NEVER_SET".to_owned());
        assert!(matches!(unset.resolve(), Err(Error::NotSet(_))));
    }
}
