//! Why an image is not used, each with what to do about it.

use std::io;
use std::path::PathBuf;

use super::Digest;
use crate::error::Kind;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("`{}` is no directory", .0.display())]
    NoDirectory(PathBuf),
    #[error("cannot read `{}`", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The tar cannot be read on.
    #[error("cannot read the tar")]
    Tar(#[source] io::Error),
    #[error("entry `{name}` {why}")]
    Entry { name: String, why: &'static str },
    #[error("cannot unpack `{name}`")]
    Unpack {
        name: String,
        #[source]
        source: io::Error,
    },
    #[error("it holds more than {limit} {what}")]
    TooLarge { what: &'static str, limit: u64 },
    #[error("it unpacks to more than {ratio} times its size")]
    Bomb { ratio: u64 },
    #[error("{what} is not what its digest says: `{found}`, not `{expected}`")]
    Digest {
        what: String,
        expected: Digest,
        found: Digest,
    },
    #[error("{what} has {found} bytes, not {expected}")]
    Size { what: String, expected: u64, found: u64 },
    /// A media type, of a layer or of what was taken for an image.
    #[error("media type `{0}` is not one of images that run here")]
    MediaType(String),
    #[error("{what} makes no sense: {why}")]
    Format { what: String, why: String },
    #[error("it has no image for `{wanted}`, only for {}", listed(have))]
    Platform { wanted: String, have: Vec<String> },
    #[error("it holds several images: {}", listed(.0))]
    Several(Vec<String>),
    #[error("it has no image `{wanted}`, only {}", listed(have))]
    NoTag { wanted: String, have: Vec<String> },
    #[error("the store has no image `{0}`")]
    NotStored(String),
    #[error("`{image}` is used by {}", listed(sandboxes))]
    InUse { image: String, sandboxes: Vec<String> },
    #[error(
        "`{0}` is no name for an image: that is lower-case letters and digits, with `.`, `_`, `-` or `/` between, and `:TAG`; not a word like `host` or `docker`"
    )]
    Name(String),
    #[error("`{0}` is no digest: it is `sha256:` and 64 hexadecimal digits")]
    NoDigest(String),
    #[error("could not {doing} in the image store")]
    Store {
        doing: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("cancelled")]
    Cancelled,
    #[error(transparent)]
    Registry(#[from] super::registry::Error),
    #[error(transparent)]
    Build(#[from] super::build::Error),
}

fn listed(names: &[String]) -> String {
    match names {
        [] => "nothing".to_owned(),
        names => names
            .iter()
            .map(|name| format!("`{name}`"))
            .collect::<Vec<_>>()
            .join(", "),
    }
}

impl Error {
    /// From a failed read of a tar; what stopped it on our side comes out as itself.
    pub(super) fn tar(source: io::Error) -> Self {
        match source.downcast::<Self>() {
            Ok(ours) => ours,
            Err(source) => Self::Tar(source),
        }
    }

    pub(super) fn format(what: impl Into<String>, why: impl ToString) -> Self {
        Self::Format {
            what: what.into(),
            why: why.to_string(),
        }
    }

    pub(super) fn store(doing: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Store { doing, source }
    }

    pub fn kind(&self) -> Kind {
        match self {
            Self::NoDirectory(_)
            | Self::Read { .. }
            | Self::Tar(_)
            | Self::Entry { .. }
            | Self::Unpack { .. }
            | Self::TooLarge { .. }
            | Self::Bomb { .. }
            | Self::Digest { .. }
            | Self::Size { .. }
            | Self::MediaType(_)
            | Self::Format { .. }
            | Self::Platform { .. }
            | Self::Several(_)
            | Self::NoTag { .. }
            | Self::Name(_)
            | Self::NoDigest(_) => Kind::Invalid,
            Self::NotStored(_) => Kind::NotFound,
            Self::InUse { .. } => Kind::WrongState,
            Self::Store { .. } | Self::Cancelled => Kind::Unavailable,
            Self::Registry(error) => error.kind(),
            Self::Build(error) => error.kind(),
        }
    }

    /// What to do about it, where there is something.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::NotStored(_) => {
                Some("`exuvia image list` shows what there is; `image import`, `pull` or `build` add to it")
            }
            Self::InUse { .. } => Some("end the sandboxes first, or let `exuvia image gc` remove it later"),
            Self::Several(_) => Some("say which: `layout:DIR:TAG` or `archive:FILE:TAG`"),
            Self::Platform { .. } => {
                Some("another can be chosen with `--platform linux/ARCH`; it must run on this host")
            }
            Self::Digest { .. } | Self::Size { .. } => {
                Some("it was damaged or changed on the way: fetch it again, from a source you trust")
            }
            Self::TooLarge { .. } => Some("if you trust it, raise `--max-size`"),
            Self::Bomb { .. } => Some("no honest image packs like this; unpack it elsewhere and look"),
            Self::Name(_) => {
                Some("names are lower-case words with `.`, `_`, `-` between, parts apart by `/`, and perhaps a `:TAG`")
            }
            Self::MediaType(_) => Some("images are made of tar layers: plain, gzip or zstd"),
            Self::Registry(error) => error.hint(),
            Self::Build(error) => error.hint(),
            Self::NoDirectory(_)
            | Self::Read { .. }
            | Self::Tar(_)
            | Self::Entry { .. }
            | Self::Unpack { .. }
            | Self::Format { .. }
            | Self::NoTag { .. }
            | Self::NoDigest(_)
            | Self::Store { .. }
            | Self::Cancelled => None,
        }
    }
}
