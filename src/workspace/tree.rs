//! Trees: what a directory holds, in the one encoding whose hash is its identity.
//!
//! Integers are little-endian:
//!
//! ```text
//! "EXT" 1:u8 count:u32 entry*                  entries ascend strictly by the bytes of their names
//! "EXT" 2:u8 has_links:u8 [links:[32]] count:u32 entry*
//! entry     = kind:u8 name_len:u16 name …
//!   1 file      mode:u16 size:u64 blob:[32]
//!   2 directory mode:u16 tree:[32]
//!   3 symlink   target_len:u32 target
//!   4 file      mode:u16 size:u64 blob:[32] attributes:[32]      version 2 alone
//!   5 directory mode:u16 tree:[32] attributes:[32]               version 2 alone
//! ```
//!
//! Version 2 is for what version 1 cannot say: extended attributes (`attributes.rs`), and in a root which names share one
//! inode (`links.rs`). A tree without them has version 1, so what was stored before keeps its id.
//!
//! A mode has the nine permission bits. Owners and times are no part of it: equal content has an equal id on every machine
//! and in every run. Times are kept beside it, see `times.rs`. Holes of sparse files are no part of it either.

use super::id::{BlobId, TreeId};
use super::name::Name;

/// The newest version.
pub(super) const FORMAT_VERSION: u8 = 2;
const PLAIN: u8 = 1;
const MAGIC: &[u8; 3] = b"EXT";
const FILE: u8 = 1;
const DIRECTORY: u8 = 2;
const SYMLINK: u8 = 3;
const FILE_WITH_ATTRIBUTES: u8 = 4;
const DIRECTORY_WITH_ATTRIBUTES: u8 = 5;
/// PATH_MAX of Linux without its NUL.
pub(super) const LONGEST_TARGET: usize = 4095;

/// One directory: entries in ascending order of their names' bytes, each name once.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tree {
    entries: Vec<Entry>,
    links: Option<BlobId>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub name: Name,
    pub node: Node,
}

/// What a name stands for. Modes are the nine permission bits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Node {
    File {
        mode: u16,
        size: u64,
        blob: BlobId,
        /// Its extended attributes, where it has any.
        attributes: Option<BlobId>,
    },
    Directory {
        mode: u16,
        tree: TreeId,
        attributes: Option<BlobId>,
    },
    /// The target is data: nothing here ever follows it.
    Symlink { target: Vec<u8> },
}

impl Node {
    /// The same without extended attributes.
    pub(super) fn bare(&self) -> Self {
        let mut bare = self.clone();
        match &mut bare {
            Self::File { attributes, .. } | Self::Directory { attributes, .. } => *attributes = None,
            Self::Symlink { .. } => {}
        }
        bare
    }
}

/// Why bytes are no tree of ours.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Undecodable {
    #[error("unknown format version {0}")]
    Version(u8),
    #[error("{0}")]
    Malformed(&'static str),
}

impl Tree {
    /// Puts entries in order; `None` when a name occurs twice or a link's target is empty or too long.
    pub fn new(mut entries: Vec<Entry>) -> Option<Self> {
        entries.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        let unique = entries.windows(2).all(|pair| pair[0].name != pair[1].name);
        let sound = entries.iter().all(|entry| match &entry.node {
            Node::File { mode, .. } | Node::Directory { mode, .. } => *mode <= 0o777,
            Node::Symlink { target } => is_target(target),
        });
        (unique && sound).then_some(Self { entries, links: None })
    }

    /// The same as the root of a workspace in which some names share an inode.
    pub(super) fn with_links(self, links: Option<BlobId>) -> Self {
        Self { links, ..self }
    }

    /// Which names below share an inode; of a root alone.
    pub(super) fn links(&self) -> Option<BlobId> {
        self.links
    }

    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    pub fn get(&self, name: &[u8]) -> Option<&Node> {
        let at = self.entries.binary_search_by(|entry| (*entry.name).cmp(name)).ok()?;
        Some(&self.entries[at].node)
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(8 + self.entries.len() * 64);
        out.extend_from_slice(MAGIC);
        if self.is_plain() {
            out.push(PLAIN);
        } else {
            out.push(FORMAT_VERSION);
            out.push(u8::from(self.links.is_some()));
            out.extend_from_slice(self.links.as_ref().map_or(&[], |links| links.as_bytes()));
        }
        out.extend_from_slice(&(self.entries.len() as u32).to_le_bytes());
        for Entry { name, node } in &self.entries {
            out.push(match node {
                Node::File { attributes: None, .. } => FILE,
                Node::File { .. } => FILE_WITH_ATTRIBUTES,
                Node::Directory { attributes: None, .. } => DIRECTORY,
                Node::Directory { .. } => DIRECTORY_WITH_ATTRIBUTES,
                Node::Symlink { .. } => SYMLINK,
            });
            out.extend_from_slice(&(name.len() as u16).to_le_bytes());
            out.extend_from_slice(name);
            match node {
                Node::File {
                    mode,
                    size,
                    blob,
                    attributes,
                } => {
                    out.extend_from_slice(&mode.to_le_bytes());
                    out.extend_from_slice(&size.to_le_bytes());
                    out.extend_from_slice(blob.as_bytes());
                    out.extend_from_slice(attributes.as_ref().map_or(&[], |id| id.as_bytes()));
                }
                Node::Directory { mode, tree, attributes } => {
                    out.extend_from_slice(&mode.to_le_bytes());
                    out.extend_from_slice(tree.as_bytes());
                    out.extend_from_slice(attributes.as_ref().map_or(&[], |id| id.as_bytes()));
                }
                Node::Symlink { target } => {
                    out.extend_from_slice(&(target.len() as u32).to_le_bytes());
                    out.extend_from_slice(target);
                }
            }
        }
        out
    }

    /// Whether version 1 can say it.
    fn is_plain(&self) -> bool {
        let has_none = |entry: &Entry| match &entry.node {
            Node::File { attributes, .. } | Node::Directory { attributes, .. } => attributes.is_none(),
            Node::Symlink { .. } => true,
        };
        self.links.is_none() && self.entries.iter().all(has_none)
    }

    /// Reads what [`Tree::encode`] writes and nothing else: one tree has one encoding.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, Undecodable> {
        let mut input = Input(bytes);
        let version = input.begin(MAGIC)?;
        let links = match version {
            PLAIN => None,
            FORMAT_VERSION => match input.array::<1>()?[0] {
                0 => None,
                1 => Some(input.address()?),
                _ => return Err(Undecodable::Malformed("neither with nor without links")),
            },
            found => return Err(Undecodable::Version(found)),
        };
        let count = input.u32()?;
        let mut entries: Vec<Entry> = Vec::new();
        for _ in 0..count {
            let kind = input.array::<1>()?[0];
            let length = usize::from(u16::from_le_bytes(input.array()?));
            let name = Name::new(input.take(length)?).map_err(|_| Undecodable::Malformed("a name that is none"))?;
            if entries.last().is_some_and(|last| last.name >= name) {
                return Err(Undecodable::Malformed("names out of order"));
            }
            let node = match kind {
                FILE | FILE_WITH_ATTRIBUTES => Node::File {
                    mode: input.mode()?,
                    size: u64::from_le_bytes(input.array()?),
                    blob: input.address()?,
                    attributes: (kind != FILE).then(|| input.address()).transpose()?,
                },
                DIRECTORY | DIRECTORY_WITH_ATTRIBUTES => Node::Directory {
                    mode: input.mode()?,
                    tree: TreeId::from_bytes(input.array()?),
                    attributes: (kind != DIRECTORY).then(|| input.address()).transpose()?,
                },
                SYMLINK => {
                    let length = input.u32()? as usize;
                    let target = input.take(length)?.to_vec();
                    if !is_target(&target) {
                        return Err(Undecodable::Malformed("a link target that is none"));
                    }
                    Node::Symlink { target }
                }
                _ => return Err(Undecodable::Malformed("an unknown kind of entry")),
            };
            entries.push(Entry { name, node });
        }
        input.end()?;
        let tree = Self { entries, links };
        if tree.is_plain() != (version == PLAIN) {
            return Err(Undecodable::Malformed("not in the version that says it"));
        }
        Ok(tree)
    }
}

impl TreeId {
    /// The blob that holds the tree's encoding: the same hash.
    pub const fn blob(&self) -> BlobId {
        BlobId::from_bytes(*self.as_bytes())
    }
}

fn is_target(target: &[u8]) -> bool {
    (1..=LONGEST_TARGET).contains(&target.len()) && !target.contains(&0)
}

/// What is left of an encoding.
pub(super) struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    pub fn take(&mut self, length: usize) -> Result<&'a [u8], Undecodable> {
        let (head, rest) = self
            .0
            .split_at_checked(length)
            .ok_or(Undecodable::Malformed("it ends early"))?;
        self.0 = rest;
        Ok(head)
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Undecodable> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    pub fn u32(&mut self) -> Result<u32, Undecodable> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub fn address(&mut self) -> Result<BlobId, Undecodable> {
        Ok(BlobId::from_bytes(self.array()?))
    }

    /// Reads the magic and gives the version.
    pub fn begin(&mut self, magic: &[u8; 3]) -> Result<u8, Undecodable> {
        if self.array::<3>()? != *magic {
            return Err(Undecodable::Malformed("it does not begin like one"));
        }
        Ok(self.array::<1>()?[0])
    }

    pub fn header(&mut self, magic: &[u8; 3], version: u8) -> Result<(), Undecodable> {
        match self.begin(magic)? {
            found if found == version => Ok(()),
            found => Err(Undecodable::Version(found)),
        }
    }

    fn mode(&mut self) -> Result<u16, Undecodable> {
        let mode = u16::from_le_bytes(self.array()?);
        if mode > 0o777 {
            return Err(Undecodable::Malformed("a mode beyond the permission bits"));
        }
        Ok(mode)
    }

    pub fn end(&self) -> Result<(), Undecodable> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(Undecodable::Malformed("bytes after its end"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Tree {
        let name = |text: &[u8]| Name::new(text).unwrap();
        let entries = vec![
            Entry {
                name: name(b"\xff"),
                node: Node::Symlink {
                    target: b"/etc/passwd".to_vec(),
                },
            },
            Entry {
                name: name(b"b"),
                node: Node::Directory {
                    mode: 0o755,
                    tree: TreeId::from_bytes([7; 32]),
                    attributes: None,
                },
            },
            Entry {
                name: name(b"a"),
                node: Node::File {
                    mode: 0o640,
                    size: 3,
                    blob: BlobId::from_bytes([9; 32]),
                    attributes: None,
                },
            },
        ];
        Tree::new(entries).unwrap()
    }

    #[test]
    fn one_tree_has_one_encoding() {
        let bytes = sample().encode();
        assert_eq!(Tree::decode(&bytes).unwrap(), sample());
        assert_eq!(&bytes[..8], b"EXT\x01\x03\0\0\0");
        // Kept for ever: a change of this hash is a change of every stored workspace's identity.
        assert_eq!(
            blake3::hash(&bytes).to_hex().as_str(),
            "4b0fdd82e3393bdebf2e99fde61ded427821a713a5660c4ced1d3900d02c920f"
        );
    }

    #[test]
    fn version_2_says_attributes_and_links() {
        let mut tree = sample().with_links(Some(BlobId::from_bytes([5; 32])));
        let Node::File { attributes, .. } = &mut tree.entries[0].node else {
            panic!("not a file");
        };
        *attributes = Some(BlobId::from_bytes([4; 32]));
        let bytes = tree.encode();
        assert_eq!(&bytes[..5], b"EXT\x02\x01");
        assert_eq!(Tree::decode(&bytes).unwrap(), tree);
        for cut in 0..bytes.len() {
            assert!(Tree::decode(&bytes[..cut]).is_err(), "cut at {cut}");
        }
    }

    #[test]
    fn nothing_else_decodes() {
        let bytes = sample().encode();
        for cut in 0..bytes.len() {
            assert!(Tree::decode(&bytes[..cut]).is_err(), "cut at {cut}");
        }
        let mut longer = bytes.clone();
        longer.push(0);
        assert_eq!(
            Tree::decode(&longer),
            Err(Undecodable::Malformed("bytes after its end"))
        );
        let mut newer = bytes;
        newer[3] = 3;
        assert_eq!(Tree::decode(&newer), Err(Undecodable::Version(3)));
        // Version 2 without need.
        let mut padded = sample().encode();
        padded[3] = 2;
        padded.insert(4, 0);
        assert_eq!(
            Tree::decode(&padded),
            Err(Undecodable::Malformed("not in the version that says it"))
        );

        let mut swapped = sample();
        swapped.entries.swap(0, 1);
        assert_eq!(
            Tree::decode(&swapped.encode()),
            Err(Undecodable::Malformed("names out of order"))
        );
        let mut set_id = sample();
        set_id.entries[0].node = Node::Directory {
            mode: 0o4755,
            tree: TreeId::from_bytes([7; 32]),
            attributes: None,
        };
        assert_eq!(
            Tree::decode(&set_id.encode()),
            Err(Undecodable::Malformed("a mode beyond the permission bits"))
        );
    }
}
