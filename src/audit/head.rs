//! Signed heads: how long the chain was and what its last hash was, at a time, in a file apart from the store.
//!
//! The chain alone cannot show that its tail is gone. A head can, as long as whoever cut the tail could not also take back
//! the head: keep copies of heads elsewhere (`exuvia audit head` prints the newest).

use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use ring::signature::{ED25519, Ed25519KeyPair, KeyPair, UnparsedPublicKey};
use serde::{Deserialize, Serialize};

use super::canonical::Canonical;
use super::files::{self, Files};
use super::{Error, FORMAT_VERSION, Link};
use crate::clock::Timestamp;

/// A signed statement about the chain's length.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Head {
    pub format_version: u32,
    /// Entries in the chain.
    pub count: u64,
    /// Hash of the last of them.
    pub hash: String,
    pub at: Timestamp,
    /// Which key signed: see [`PublicKey::id`].
    pub key: String,
    /// Ed25519 over all of the above, base64.
    pub signature: String,
}

impl Head {
    pub fn link(&self) -> Link {
        Link {
            seq: self.count,
            hash: self.hash.clone(),
        }
    }

    fn message(&self) -> Canonical {
        let Self {
            format_version,
            count,
            hash,
            at,
            key,
            signature: _,
        } = self;
        let mut message = Canonical::new("exuvia audit head");
        message.count(u64::from(*format_version));
        message.count(*count);
        message.text(hash);
        message.signed(at.0);
        message.text(key);
        message
    }

    /// Reads one line of the heads file.
    pub(super) fn read(path: &Path, line: &str) -> Result<Self, Error> {
        let damaged = |error: serde_json::Error| Error::Damaged {
            path: path.to_owned(),
            reason: error.to_string(),
        };
        let value: serde_json::Value = serde_json::from_str(line).map_err(damaged)?;
        let found = value.get("format_version").and_then(serde_json::Value::as_u64);
        if let Some(found) = found.filter(|found| *found != u64::from(FORMAT_VERSION)) {
            return Err(Error::UnknownVersion {
                path: path.to_owned(),
                found,
                known: u64::from(FORMAT_VERSION),
            });
        }
        serde_json::from_value(value).map_err(damaged)
    }
}

/// The newest whole head of a data directory, its signature unchecked; `None` when there is none.
pub fn newest(files: &Files) -> Result<Option<Head>, Error> {
    let text = files::read(&files.heads)?.unwrap_or_default();
    let mut lines = text.split_inclusive(|byte| *byte == b'\n').rev();
    let line = lines.find_map(|line| line.strip_suffix(b"\n"));
    line.map(|line| Head::read(&files.heads, &String::from_utf8_lossy(line)))
        .transpose()
}

/// Signs heads with the data directory's own key.
pub struct Signer {
    pair: Ed25519KeyPair,
    public: PublicKey,
}

impl std::fmt::Debug for Signer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Signer")
            .field("public", &self.public)
            .finish_non_exhaustive()
    }
}

impl Signer {
    /// Reads the key pair, made at first use (0600; of several processes that make one, the first wins).
    pub fn open(files: &Files) -> Result<Self, Error> {
        files.make_directories()?;
        let path = &files.private_key;
        if files::read(path)?.is_none() {
            let rng = ring::rand::SystemRandom::new();
            let made = Ed25519KeyPair::generate_pkcs8(&rng).expect("the kernel gives random bytes");
            files::make_once(path, made.as_ref(), 0o600)?;
        }
        let signer = Self::read(path)?.ok_or_else(|| Error::Damaged {
            path: path.clone(),
            reason: "it was removed just now".to_owned(),
        })?;
        files::make_once(
            &files.public_key,
            format!("{}\n", signer.public.encode()).as_bytes(),
            0o644,
        )?;
        Ok(signer)
    }

    fn read(path: &Path) -> Result<Option<Self>, Error> {
        let Some(bytes) = files::read(path)? else {
            return Ok(None);
        };
        let pair = Ed25519KeyPair::from_pkcs8(&bytes).map_err(|error| Error::Damaged {
            path: path.to_owned(),
            reason: error.to_string(),
        })?;
        let public = pair
            .public_key()
            .as_ref()
            .try_into()
            .expect("an Ed25519 key has 32 bytes");
        Ok(Some(Self {
            pair,
            public: PublicKey(public),
        }))
    }

    pub fn public_key(&self) -> &PublicKey {
        &self.public
    }

    pub fn sign(&self, link: &Link, at: Timestamp) -> Head {
        let mut head = Head {
            format_version: FORMAT_VERSION,
            count: link.seq,
            hash: link.hash.clone(),
            at,
            key: self.public.id(),
            signature: String::new(),
        };
        head.signature = BASE64.encode(self.pair.sign(head.message().bytes()));
        head
    }
}

/// The public half: what verifying needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublicKey([u8; 32]);

impl PublicKey {
    /// The data directory's own, from the public file or else from the private one; `None` when there is neither.
    pub fn of(files: &Files) -> Result<Option<Self>, Error> {
        match Self::read(&files.public_key)? {
            Some(key) => Ok(Some(key)),
            None => Ok(Signer::read(&files.private_key)?.map(|signer| signer.public)),
        }
    }

    /// Reads a public key file; `None` when there is none.
    pub fn read(path: &Path) -> Result<Option<Self>, Error> {
        let Some(bytes) = files::read(path)? else {
            return Ok(None);
        };
        let key = BASE64
            .decode(bytes.trim_ascii())
            .ok()
            .and_then(|key| key.try_into().ok());
        let key = key.ok_or_else(|| Error::Damaged {
            path: path.to_owned(),
            reason: "it is not 32 bytes in base64".to_owned(),
        })?;
        Ok(Some(Self(key)))
    }

    /// The first 16 hex digits of the key's blake3 hash.
    pub fn id(&self) -> String {
        blake3::hash(&self.0).to_hex()[..16].to_owned()
    }

    /// As its file has it.
    pub fn encode(&self) -> String {
        BASE64.encode(self.0)
    }

    /// Whether this key signed `head` as it stands.
    pub fn has_signed(&self, head: &Head) -> bool {
        let Ok(signature) = BASE64.decode(&head.signature) else {
            return false;
        };
        let key = UnparsedPublicKey::new(&ED25519, &self.0);
        head.key == self.id() && key.verify(head.message().bytes(), &signature).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_signature_covers_every_field_and_outlives_the_process() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::of(dir.path());
        let head = Signer::open(&files).unwrap().sign(&Link::start(), Timestamp(5));
        let key = PublicKey::of(&files).unwrap().unwrap();
        assert!(key.has_signed(&head));
        assert_eq!(Signer::open(&files).unwrap().sign(&Link::start(), Timestamp(5)), head);
        let line = serde_json::to_string(&head).unwrap();
        assert_eq!(Head::read(&files.heads, &line).unwrap(), head);

        let edits: [fn(&mut Head); 6] = [
            |head| head.format_version += 1,
            |head| head.count += 1,
            |head| head.hash.replace_range(0..1, "1"),
            |head| head.at.0 += 1,
            |head| head.key.replace_range(0..1, "x"),
            |head| head.signature.insert(0, 'A'),
        ];
        for (n, edit) in edits.iter().enumerate() {
            let mut edited = head.clone();
            edit(&mut edited);
            assert!(!key.has_signed(&edited), "edit {n}");
        }
        std::fs::remove_file(&files.public_key).unwrap();
        assert_eq!(PublicKey::of(&files).unwrap(), Some(key));
    }

    #[test]
    fn the_private_key_is_for_its_owner_alone() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::of(&dir.path().join("data"));
        Signer::open(&files).unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&files.private_key), 0o600);
        assert_eq!(mode(files.private_key.parent().unwrap()), 0o700);
    }

    #[test]
    fn an_unknown_version_is_refused_by_name() {
        // F2
        let error = Head::read(Path::new("heads.jsonl"), r#"{"format_version":9}"#).unwrap_err();
        assert_eq!(
            error.to_string(),
            "a signed head in `heads.jsonl` has format version 9; this build reads up to 1"
        );
    }
}
