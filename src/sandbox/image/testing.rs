//! Tars and images made for tests, hostile ones above all.

use std::io::Write;

use serde_json::json;
use tar::EntryType;

use super::{Digest, Platform};

/// A tar whose entries have exactly the names that are given, which a well-behaved writer would refuse.
pub struct Tar(tar::Builder<Vec<u8>>);

impl Tar {
    pub fn new() -> Self {
        Self(tar::Builder::new(Vec::new()))
    }

    pub fn add(mut self, name: &str, kind: EntryType, link: &str, mode: u32, data: &[u8]) -> Self {
        let mut header = tar::Header::new_ustar();
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        header.as_old_mut().linkname[..link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_mtime(1_000_000_000);
        header.set_size(data.len() as u64);
        header.set_cksum();
        self.0.append(&header, data).unwrap();
        self
    }

    pub fn file(self, name: &str, data: &str) -> Self {
        self.add(name, EntryType::Regular, "", 0o644, data.as_bytes())
    }

    pub fn dir(self, name: &str) -> Self {
        self.add(name, EntryType::Directory, "", 0o755, b"")
    }

    pub fn symlink(self, name: &str, to: &str) -> Self {
        self.add(name, EntryType::Symlink, to, 0o777, b"")
    }

    pub fn link(self, name: &str, to: &str) -> Self {
        self.add(name, EntryType::Link, to, 0o644, b"")
    }

    pub fn bytes(self) -> Vec<u8> {
        self.0.into_inner().unwrap()
    }
}

pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(bytes).unwrap();
    gzip.finish().unwrap()
}

/// Names and contents.
pub type Files = Vec<(String, Vec<u8>)>;

/// A whole image in memory: documents and layers by digest.
pub struct Image {
    pub manifest: Vec<u8>,
    pub config: Vec<u8>,
    /// As packed, lowest first.
    pub layers: Vec<Vec<u8>>,
}

impl Image {
    pub const GZIP: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

    /// Of tars, which are packed with gzip.
    pub fn new(layers: &[Vec<u8>]) -> Self {
        Self::with(
            layers,
            json!({ "Env": ["PATH=/opt/bin:/bin", "TOKEN=hunter2"], "Cmd": ["sh"] }),
        )
    }

    pub fn with(layers: &[Vec<u8>], config: serde_json::Value) -> Self {
        let packed: Vec<Vec<u8>> = layers.iter().map(|layer| gzip(layer)).collect();
        let platform = Platform::default();
        let diff_ids: Vec<Digest> = layers.iter().map(|layer| Digest::of(layer)).collect();
        let config = json!({ "architecture": platform.architecture, "os": "linux", "config": config,
            "rootfs": { "type": "layers", "diff_ids": diff_ids } });
        let config = config.to_string().into_bytes();
        let place = |media_type: &str, bytes: &[u8]| json!({ "mediaType": media_type, "digest": Digest::of(bytes), "size": bytes.len() });
        let manifest = json!({
            "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": place("application/vnd.oci.image.config.v1+json", &config),
            "layers": packed.iter().map(|layer| place(Self::GZIP, layer)).collect::<Vec<_>>(),
        });
        Self {
            manifest: manifest.to_string().into_bytes(),
            config,
            layers: packed,
        }
    }

    pub fn digest(&self) -> Digest {
        Digest::of(&self.manifest)
    }

    pub fn blobs(&self) -> impl Iterator<Item = &Vec<u8>> {
        [&self.manifest, &self.config].into_iter().chain(&self.layers)
    }

    /// The files of a layout with this image under `tag`.
    pub fn layout(&self, tag: &str) -> Files {
        let index = json!({ "schemaVersion": 2, "manifests": [{
            "mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": self.digest(),
            "size": self.manifest.len(), "annotations": { "org.opencontainers.image.ref.name": tag } }] });
        let mut files = vec![
            ("oci-layout".to_owned(), br#"{"imageLayoutVersion":"1.0.0"}"#.to_vec()),
            ("index.json".to_owned(), index.to_string().into_bytes()),
        ];
        let blob = |bytes: &Vec<u8>| (format!("blobs/sha256/{}", Digest::of(bytes).hex()), bytes.clone());
        files.extend(self.blobs().map(blob));
        files
    }
}

/// Writes files below a directory.
pub fn write(directory: &std::path::Path, files: &[(String, Vec<u8>)]) {
    for (name, bytes) in files {
        let path = directory.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
}

/// Files as a tar.
pub fn archived(files: &[(String, Vec<u8>)]) -> Vec<u8> {
    let all = files.iter().fold(Tar::new(), |tar, (name, bytes)| {
        tar.add(name, EntryType::Regular, "", 0o644, bytes)
    });
    all.bytes()
}
