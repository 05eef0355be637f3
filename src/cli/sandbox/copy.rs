//! `cp`: files into a sandbox and out of it.
//!
//! What comes out is hostile: names, targets of links, how much there is. `land` writes it by descriptors, one component at
//! a time, so that nothing lands outside of the target whatever the other side says; `down` and `up` walk.

mod down;
mod land;
mod up;

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use serde_json::json;

use super::show;
use crate::cli::{Context, Error, Exit, remote};
use crate::error::Kind;
use crate::workspace::Name;

pub(super) const NOTES: &str = "\
One of the two is SANDBOX:PATH, where PATH is absolute or relative to /workspace; the other is a path
here (begin it with `./` if it looks like the first), or `-` for standard input or output.

A directory is copied with all that is in it: links as links, modes without set-id bits, no owners and
times. Into a directory that exists it is copied under its own name, as by `cp -r`; a source that ends
in `/.` gives its content alone. A file appears whole or not at all. Pipes, sockets and devices are
left out, and named.

  exuvia sandbox cp project sbx_…:/workspace
  exuvia sandbox cp sbx_…:out/report.html .
  tar c src | exuvia sandbox cp - sbx_…:src.tar";

#[derive(Debug, clap::Args)]
pub(super) struct Copy {
    /// A path here, `-`, or SANDBOX:PATH.
    #[arg(value_name = "FROM")]
    from: OsString,
    /// A path here, `-`, or SANDBOX:PATH.
    #[arg(value_name = "TO")]
    to: OsString,
    /// Copy no more than this out of a sandbox: `500MiB`.
    #[arg(long, default_value = "16GiB", value_name = "SIZE", value_parser = crate::policy::quantity::parse_size)]
    limit: u64,
}

/// One side of a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Side {
    Here(PathBuf),
    /// Standard input or output.
    Stream,
    Inside {
        sandbox: String,
        path: Vec<u8>,
    },
}

fn side(text: &OsString) -> Side {
    let bytes = text.as_bytes();
    if bytes == b"-" {
        return Side::Stream;
    }
    if bytes.starts_with(b"sbx_")
        && let Some(at) = bytes.iter().position(|byte| *byte == b':')
        && let Ok(sandbox) = std::str::from_utf8(&bytes[..at])
        && !sandbox.contains('/')
    {
        let path = match &bytes[at + 1..] {
            b"" => b".".to_vec(),
            path => path.to_vec(),
        };
        let sandbox = sandbox.to_owned();
        return Side::Inside { sandbox, path };
    }
    Side::Here(PathBuf::from(OsString::from_vec(bytes.to_vec())))
}

/// What was copied.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Done {
    files: u64,
    directories: u64,
    links: u64,
    bytes: u64,
    /// What is neither file, directory nor link, by path.
    left_out: Vec<Vec<u8>>,
}

impl Done {
    fn entries(&self) -> u64 {
        self.files + self.directories + self.links
    }
}

pub(super) async fn copy(args: Copy, server: &str, context: &Context) -> Result<Exit, Error> {
    let usage = |message: &str| {
        Err(Error::new(Kind::Invalid, message).hint("one of the two is SANDBOX:PATH, as in `sbx_…:/workspace`"))
    };
    let (from, to) = (side(&args.from), side(&args.to));
    let done = match (from, to) {
        (Side::Inside { sandbox, path }, Side::Here(target)) => {
            let client = remote::sandboxes(server).await?;
            down::Down::new(client, sandbox, args.limit).copy(path, &target).await?
        }
        (Side::Inside { sandbox, path }, Side::Stream) => {
            let client = remote::sandboxes(server).await?;
            // The bytes are what is on standard output; nothing else may be.
            down::Down::new(client, sandbox, args.limit).print(path).await?;
            return Ok(Exit::Ok);
        }
        (Side::Here(source), Side::Inside { sandbox, path }) => {
            let client = remote::sandboxes(server).await?;
            up::Up::new(client, sandbox).copy(&source, path).await?
        }
        (Side::Stream, Side::Inside { sandbox, path }) => {
            let client = remote::sandboxes(server).await?;
            up::Up::new(client, sandbox).stdin(path).await?
        }
        (Side::Inside { .. }, Side::Inside { .. }) => {
            return usage("both are in a sandbox: copy to here, and from here");
        }
        (Side::Here(_) | Side::Stream, Side::Here(_) | Side::Stream) => return usage("neither is in a sandbox"),
    };
    for path in &done.left_out {
        err!("left out, being no file, directory or link: {}", show::name(path));
    }
    let left_out: Vec<String> = done
        .left_out
        .iter()
        .map(|path| String::from_utf8_lossy(path).into_owned())
        .collect();
    let object = json!({ "files": done.files, "directories": done.directories, "links": done.links,
        "bytes": done.bytes, "left_out": left_out });
    if context.json {
        context.finish(&object, "");
    } else {
        let count = |n: u64, one: &str, many: &str| format!("{n} {}", if n == 1 { one } else { many });
        err!(
            "{}, {}, {}: {}",
            count(done.files, "file", "files"),
            count(done.directories, "directory", "directories"),
            count(done.links, "link", "links"),
            show::size(done.bytes)
        );
    }
    Ok(if done.left_out.is_empty() {
        Exit::Ok
    } else {
        Exit::Failed
    })
}

/// Whether a path names what is in a directory, rather than the directory: it ends in `/.`, or is `.`.
fn is_content(path: &[u8]) -> bool {
    path == b"." || path.ends_with(b"/.")
}

/// The name of what a path names; none for `/`, `..` and the like.
fn base(path: &[u8]) -> Option<Name> {
    let path = path.strip_suffix(b"/.").unwrap_or(path);
    let end = path.iter().rposition(|byte| *byte != b'/')? + 1;
    let last = path[..end].rsplit(|byte| *byte == b'/').next()?;
    Name::new(last).ok()
}

fn joined(path: &[u8], name: &[u8]) -> Vec<u8> {
    let mut joined = path.to_vec();
    if !joined.is_empty() && !joined.ends_with(b"/") {
        joined.push(b'/');
    }
    joined.extend_from_slice(name);
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides_are_told_apart() {
        let of = |text: &str| side(&text.into());
        let inside = |sandbox: &str, path: &str| Side::Inside {
            sandbox: sandbox.into(),
            path: path.into(),
        };
        assert_eq!(of("sbx_a:/x:y"), inside("sbx_a", "/x:y"));
        assert_eq!(of("sbx_a:"), inside("sbx_a", "."));
        assert_eq!(of("-"), Side::Stream);
        for here in ["./sbx_a:x", "a:b", "sbx_a", "sbx_a/b:c", "/sbx_a:x"] {
            assert_eq!(of(here), Side::Here(here.into()));
        }
    }

    #[test]
    fn names_come_from_the_path_that_the_person_gave() {
        let of = |path: &str| base(path.as_bytes()).map(|name| String::from_utf8(name.to_vec()).unwrap());
        assert_eq!(of("a/b"), Some("b".into()));
        assert_eq!(of("/a/b//"), Some("b".into()));
        assert_eq!(of("/a/."), Some("a".into()));
        for none in ["/", "", ".", "..", "a/..", "../"] {
            assert_eq!(of(none), None, "{none}");
        }
        assert!(is_content(b"a/.") && is_content(b".") && !is_content(b"a.") && !is_content(b"a/"));
        assert_eq!(joined(b"/", b"a"), b"/a");
        assert_eq!(joined(b"a", b"b"), b"a/b");
    }
}
