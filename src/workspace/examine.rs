//! Examining a store: which blobs are damaged or missing, and which revisions that hurts.

use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use super::error::Error;
use super::id::{BlobId, TreeId};
use super::name::shown;
use super::tree::Node;
use super::trees::{Revision, Trees};

/// What an examination found. `N` is how the caller calls what it asked about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Examined<N> {
    /// Blobs that were read, and the bytes of their contents.
    pub blobs: u64,
    pub bytes: u64,
    /// Blobs that are there and cannot be read, whether something needs them or not.
    pub damaged: Vec<(BlobId, String)>,
    pub hurt: Vec<Hurt<N>>,
}

/// Something that cannot be brought back whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hurt<N> {
    pub name: N,
    /// The first [`MOST_FAULTS`] of them.
    pub faults: Vec<Fault>,
}

/// A blob that is needed and cannot be had.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    pub blob: BlobId,
    /// Where in the workspace, on one line; empty for the root and for what is no workspace.
    pub path: String,
    /// `missing`, or how it is damaged.
    pub reason: String,
}

/// How many faults of one directory are told.
const MOST_FAULTS: usize = 20;

impl Trees {
    /// Reads every blob in the store, and then finds what each revision and each single blob lacks.
    ///
    /// # Errors
    /// [`Error::Io`] when the store itself cannot be listed or read.
    pub fn examine<N>(&self, revisions: Vec<(N, Revision)>, single: Vec<(N, BlobId)>) -> Result<Examined<N>, Error> {
        let mut found = Examined {
            blobs: 0,
            bytes: 0,
            damaged: Vec::new(),
            hurt: Vec::new(),
        };
        let mut stored: HashSet<BlobId> = self.blobs.loose()?.into_iter().map(|(id, _)| id).collect();
        for (_, places) in self.blobs.packs().all()? {
            stored.extend(places.into_iter().map(|(id, _)| id));
        }
        let mut order: Vec<BlobId> = stored.iter().copied().collect();
        order.sort_unstable();
        let mut buffer = vec![0; 256 << 10];
        for id in order {
            match self.read_through(id, &mut buffer) {
                Ok(bytes) => {
                    found.blobs += 1;
                    found.bytes += bytes;
                }
                Err(error) => found.damaged.push((id, reason(&error)?)),
            }
        }
        let mut look = Look {
            trees: self,
            stored,
            damaged: found.damaged.iter().cloned().collect(),
            seen: HashMap::new(),
        };
        for (name, revision) in revisions {
            let faults = look.revision(revision)?.to_vec();
            if !faults.is_empty() {
                found.hurt.push(Hurt { name, faults });
            }
        }
        for (name, blob) in single {
            if let Some(fault) = look.blob(blob, b"") {
                let faults = vec![fault];
                found.hurt.push(Hurt { name, faults });
            }
        }
        Ok(found)
    }

    fn read_through(&self, id: BlobId, buffer: &mut [u8]) -> Result<u64, Error> {
        let mut reader = self.blobs.reader(id)?;
        let size = reader.left();
        while reader.left() > 0 {
            reader.next(buffer)?;
        }
        Ok(size)
    }
}

struct Look<'a> {
    trees: &'a Trees,
    stored: HashSet<BlobId>,
    damaged: HashMap<BlobId, String>,
    /// What each directory lacks, by paths from there.
    seen: HashMap<(TreeId, Option<BlobId>), Rc<[Fault]>>,
}

impl Look<'_> {
    fn blob(&self, blob: BlobId, path: &[u8]) -> Option<Fault> {
        let reason = match self.damaged.get(&blob) {
            Some(reason) => reason.clone(),
            None if self.stored.contains(&blob) => return None,
            None => "missing".to_owned(),
        };
        let path = shown(path);
        Some(Fault { blob, path, reason })
    }

    fn revision(&mut self, revision: Revision) -> Result<Rc<[Fault]>, Error> {
        let key = (revision.tree, revision.times);
        if let Some(known) = self.seen.get(&key) {
            return Ok(Rc::clone(known));
        }
        let faults: Rc<[Fault]> = self.faults(revision)?.into();
        self.seen.insert(key, Rc::clone(&faults));
        Ok(faults)
    }

    fn faults(&mut self, Revision { tree, times }: Revision) -> Result<Vec<Fault>, Error> {
        let mut faults: Vec<Fault> = [Some(tree.blob()), times]
            .into_iter()
            .flatten()
            .filter_map(|blob| self.blob(blob, b""))
            .collect();
        if self.blob(tree.blob(), b"").is_some() {
            return Ok(faults);
        }
        let content = match self.trees.tree(tree) {
            Ok(content) => content,
            Err(error) => return Ok(vec![fault(tree.blob(), &error)?]),
        };
        faults.extend(content.links().and_then(|links| self.blob(links, b"")));
        // Without its times, what is below is still looked at.
        let recorded = match self.trees.times(times, &content) {
            Ok(recorded) => recorded,
            Err(_) => self.trees.times(None, &content)?,
        };
        for (entry, time) in content.entries().iter().zip(&recorded.0) {
            if faults.len() >= MOST_FAULTS {
                break;
            }
            match &entry.node {
                Node::File { blob, attributes, .. } => {
                    let needed = [Some(*blob), *attributes].into_iter().flatten();
                    faults.extend(needed.filter_map(|blob| self.blob(blob, &entry.name)));
                }
                Node::Directory { tree, attributes, .. } => {
                    faults.extend(attributes.and_then(|attributes| self.blob(attributes, &entry.name)));
                    let (tree, times) = (*tree, time.inner);
                    let below = self.revision(Revision { tree, times })?;
                    faults.extend(below.iter().map(|fault| Fault {
                        path: match fault.path.is_empty() {
                            true => shown(&entry.name),
                            false => format!("{}/{}", shown(&entry.name), fault.path),
                        },
                        ..fault.clone()
                    }));
                }
                Node::Symlink { .. } => {}
            }
        }
        faults.truncate(MOST_FAULTS);
        Ok(faults)
    }
}

fn fault(blob: BlobId, error: &Error) -> Result<Fault, Error> {
    let (path, reason) = (String::new(), reason(error)?);
    Ok(Fault { blob, path, reason })
}

/// How a blob is bad; an error that says nothing about the blob is one of the examination.
fn reason(error: &Error) -> Result<String, Error> {
    match error {
        Error::Missing(_) => Ok("missing".to_owned()),
        Error::Damaged { reason, .. } => Ok(reason.clone()),
        Error::UnknownVersion { .. } => Ok(error.to_string()),
        other => Err(Error::Sink(std::io::Error::other(other.to_string()))),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::testing::{Bench, snapshot};
    use super::*;

    #[test]
    fn what_is_bad_is_told_with_what_it_hurts() {
        let bench = Bench::new();
        let take = |name: &str, inner: &str| {
            let dir = bench.made(name, &[].into());
            fs::create_dir(dir.join("d")).unwrap();
            fs::write(dir.join("d/inner"), inner).unwrap();
            fs::write(dir.join("same"), "same").unwrap();
            snapshot(&bench.trees, &dir, None).revision
        };
        let (good, hurt, lost) = (take("good", "fine"), take("hurt", "spoilt"), take("lost", "absent"));
        let asked = || vec![("good", good), ("hurt", hurt), ("lost", lost)];
        let id = |content: &str| BlobId::from_bytes(*blake3::hash(content.as_bytes()).as_bytes());
        let before = bench.trees.examine(asked(), vec![("single", id("same"))]).unwrap();
        assert_eq!((before.damaged, before.hurt), (Vec::new(), Vec::new()));

        let path = bench.trees.blobs.path(&id("spoilt"));
        let mut bytes = fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&path, bytes).unwrap();
        fs::remove_file(bench.trees.blobs.path(&id("absent"))).unwrap();
        let after = bench.trees.examine(asked(), vec![("single", id("absent"))]).unwrap();
        let spoilt = "its content has another hash".to_owned();
        let fault = |blob: &str, path: &str, reason: &str| Fault {
            blob: id(blob),
            path: path.to_owned(),
            reason: reason.to_owned(),
        };
        let expected = [
            ("hurt", fault("spoilt", "d/inner", &spoilt)),
            ("lost", fault("absent", "d/inner", "missing")),
            ("single", fault("absent", "", "missing")),
        ];
        let expected = expected.map(|(name, fault)| Hurt {
            name,
            faults: vec![fault],
        });
        assert_eq!(after.damaged, [(id("spoilt"), spoilt)]);
        assert_eq!(after.hurt, expected);
        assert_eq!(after.blobs, before.blobs - 2);
    }
}
