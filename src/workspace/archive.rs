//! A tree as a tar stream.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io::{self, Write};

use tar::{Builder, EntryType, Header};

use super::error::Error;
use super::id::{BlobId, TreeId};
use super::name::push;
use super::tree::Node;
use super::trees::{Revision, Trees};

/// The bytes that a header has for a name and for a link's target.
const FIELD: usize = 100;

impl Trees {
    /// Writes a revision as a GNU tar: parents first, names in byte order, owner 0, times in whole seconds. One revision
    /// gives one stream, byte for byte. Extended attributes are written as pax headers of the usual kind
    /// (`SCHILY.xattr.`), further names of one file as hard links.
    ///
    /// # Errors
    /// [`Error::Sink`] when `out` fails; [`Error::Missing`] or [`Error::Damaged`], with a stream that is cut.
    pub fn write_tar(&self, revision: impl Into<Revision>, out: &mut dyn Write) -> Result<(), Error> {
        let revision = revision.into();
        let mut builder = Builder::new(out);
        let links = self.links(self.tree(revision.tree)?.links())?;
        let mut firsts = Firsts {
            groups: links.by_path(),
            first: HashMap::new(),
        };
        self.tar_folder(
            &mut builder,
            &mut Vec::new(),
            revision.tree,
            revision.times,
            &mut firsts,
        )?;
        builder.finish().map_err(Error::Sink)
    }

    fn tar_folder(
        &self,
        tar: &mut Builder<&mut dyn Write>,
        path: &mut Vec<u8>,
        tree: TreeId,
        times: Option<BlobId>,
        firsts: &mut Firsts<'_>,
    ) -> Result<(), Error> {
        let tree = self.tree(tree)?;
        let times = self.times(times, &tree)?;
        for (entry, time) in tree.entries().iter().zip(&times.0) {
            let before = path.len();
            push(path, &entry.name);
            let mut header = Header::new_gnu();
            header.set_uid(0);
            header.set_gid(0);
            header.set_size(0);
            header.set_mtime(u64::try_from(time.mtime / 1_000_000_000).unwrap_or(0));
            match &entry.node {
                Node::File {
                    mode,
                    size,
                    blob,
                    attributes,
                } => {
                    header.set_mode(u32::from(*mode));
                    if let Some(first) = firsts.meet(path, &entry.node) {
                        header.set_entry_type(EntryType::Link);
                        set_target(tar, &mut header, &first)?;
                        append(tar, &mut header, path, io::empty())?;
                        path.truncate(before);
                        continue;
                    }
                    self.tar_attributes(tar, *attributes)?;
                    header.set_entry_type(EntryType::Regular);
                    header.set_size(*size);
                    let reader = self.blobs.reader(*blob)?;
                    append(tar, &mut header, path, reader)?;
                }
                Node::Directory { mode, tree, attributes } => {
                    header.set_mode(u32::from(*mode));
                    self.tar_attributes(tar, *attributes)?;
                    header.set_entry_type(EntryType::Directory);
                    append(tar, &mut header, path, io::empty())?;
                    self.tar_folder(tar, path, *tree, time.inner, firsts)?;
                }
                Node::Symlink { target } => {
                    header.set_mode(0o777);
                    header.set_entry_type(EntryType::Symlink);
                    set_target(tar, &mut header, target)?;
                    append(tar, &mut header, path, io::empty())?;
                }
            }
            path.truncate(before);
        }
        Ok(())
    }

    /// Says the extended attributes of the entry that follows.
    fn tar_attributes(&self, tar: &mut Builder<&mut dyn Write>, attributes: Option<BlobId>) -> Result<(), Error> {
        let attributes = self.attributes(attributes)?;
        let mut records = Vec::new();
        for (name, value) in &attributes.0 {
            let body = [b" SCHILY.xattr.", name.as_slice(), b"=", value, b"\n"].concat();
            // The record's length counts its own digits.
            let mut length = body.len() + 1;
            while length != body.len() + length.to_string().len() {
                length = body.len() + length.to_string().len();
            }
            records.extend_from_slice(length.to_string().as_bytes());
            records.extend_from_slice(&body);
        }
        if records.is_empty() {
            return Ok(());
        }
        let mut header = Header::new_ustar();
        header.set_path("pax").map_err(Error::Sink)?;
        header.set_entry_type(EntryType::XHeader);
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        header.set_size(records.len() as u64);
        header.set_cksum();
        tar.append(&header, records.as_slice()).map_err(Error::Sink)
    }
}

/// Which of the names of one file was written first.
struct Firsts<'a> {
    groups: HashMap<&'a [u8], usize>,
    first: HashMap<usize, (Vec<u8>, Node)>,
}

impl Firsts<'_> {
    /// The name under which this very file was written before.
    fn meet(&mut self, path: &[u8], node: &Node) -> Option<Vec<u8>> {
        let group = *self.groups.get(path)?;
        match self.first.entry(group) {
            Entry::Occupied(first) => (first.get().1 == *node).then(|| first.get().0.clone()),
            Entry::Vacant(place) => {
                place.insert((path.to_vec(), node.clone()));
                None
            }
        }
    }
}

/// Adds an entry with its name as it is. (The builder's own way tidies names up, and fails for long ones that are not
/// UTF-8.)
fn append(
    tar: &mut Builder<&mut dyn Write>,
    header: &mut Header,
    path: &[u8],
    content: impl io::Read,
) -> Result<(), Error> {
    let field = set_text(tar, EntryType::GNULongName, path)?;
    if let Some(gnu) = header.as_gnu_mut() {
        gnu.name[..field.len()].copy_from_slice(field);
    }
    header.set_cksum();
    tar.append(header, content).map_err(sink)
}

/// Sets a link's target as it is.
fn set_target(tar: &mut Builder<&mut dyn Write>, header: &mut Header, target: &[u8]) -> Result<(), Error> {
    let field = set_text(tar, EntryType::GNULongLink, target)?;
    header.set_link_name_literal(field).map_err(Error::Sink)
}

/// Gives what of `text` stands in the header's own field, after writing an entry for the whole where that is too short.
fn set_text<'a>(tar: &mut Builder<&mut dyn Write>, kind: EntryType, text: &'a [u8]) -> Result<&'a [u8], Error> {
    if text.len() <= FIELD {
        return Ok(text);
    }
    let mut long = Header::new_gnu();
    long.set_path("././@LongLink").map_err(Error::Sink)?;
    long.set_entry_type(kind);
    long.set_mode(0o644);
    long.set_uid(0);
    long.set_gid(0);
    long.set_mtime(0);
    long.set_size(text.len() as u64 + 1);
    long.set_cksum();
    let whole = [text, b"\0"].concat();
    tar.append(&long, whole.as_slice()).map_err(Error::Sink)?;
    Ok(&text[..FIELD])
}

/// Finds the store's own error in what the builder says.
fn sink(error: io::Error) -> Error {
    match error.downcast::<Error>() {
        Ok(own) => own,
        Err(error) => Error::Sink(error),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use proptest::prelude::*;

    use super::super::limits::Limits;
    use super::super::testing::{Bench, Plan, Thing, cases, plan, snapshot, timeless};

    proptest! {
        #![proptest_config(cases(24))]

        #[test]
        fn a_tree_survives_a_tar(plan in plan()) {
            let bench = Bench::new();
            let revision = snapshot(&bench.trees, &bench.made("dir", &plan), None).revision;
            let (mut one, mut two) = (Vec::new(), Vec::new());
            bench.trees.write_tar(revision, &mut one).unwrap();
            bench.trees.write_tar(revision, &mut two).unwrap();
            prop_assert!(one == two);
            if !plan.is_empty() {
                let back = bench.trees.read_tar(&mut one.as_slice(), Limits::default()).unwrap();
                prop_assert_eq!(back.tree, revision.tree);
            }
        }
    }

    #[test]
    fn the_tar_program_unpacks_it() {
        let bench = Bench::new();
        let long = vec![b'l'; 200];
        let file = Thing::File {
            content: b"text".to_vec(),
            mode: 0o750,
        };
        let inner: Plan = [(vec![b'n'; 255], file.clone()), (b"to".to_vec(), Thing::Link(long))].into();
        let middle: Plan = [(
            vec![b'm'; 200],
            Thing::Directory {
                mode: 0o700,
                content: inner,
            },
        )]
        .into();
        let plan = [
            (
                b"top".to_vec(),
                Thing::Directory {
                    mode: 0o755,
                    content: middle,
                },
            ),
            (b"f".to_vec(), file),
        ]
        .into();
        let dir = bench.made("dir", &plan);
        let revision = snapshot(&bench.trees, &dir, None).revision;
        let tar = bench.dir.path().join("it.tar");
        bench
            .trees
            .write_tar(revision, &mut std::fs::File::create(&tar).unwrap())
            .unwrap();
        let out = bench.made("out", &[].into());
        let status = Command::new("tar")
            .arg("-xpf")
            .arg(&tar)
            .arg("-C")
            .arg(&out)
            .status()
            .unwrap();
        assert!(status.success());
        assert_eq!(timeless(&out), timeless(&dir));
    }
}
