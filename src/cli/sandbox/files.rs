//! `ls` and `watch`.

use serde_json::{Value, json};

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

use super::{Client, show};
use crate::api::proto;
use crate::cli::{Context, Error, Exit, remote};
use crate::error::Kind;

#[derive(Debug, clap::Args)]
pub(super) struct Ls {
    /// The sandbox (`sbx_…`).
    id: String,
    /// Absolute, or relative to /workspace.
    #[arg(default_value = ".")]
    path: OsString,
    /// Mode, size and time too.
    #[arg(long, short)]
    long: bool,
    /// So many levels deep.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    depth: u32,
}

#[derive(Debug, clap::Args)]
pub(super) struct Watch {
    /// The sandbox (`sbx_…`).
    id: String,
    /// A directory, absolute or relative to /workspace.
    #[arg(default_value = ".")]
    path: OsString,
    /// What lies deeper, too.
    #[arg(long, short)]
    recursive: bool,
}

/// Entries that one listing may have: the server could go on for ever.
const MOST_ENTRIES: usize = 1_000_000;

/// What lies below a directory, sorted by path.
pub(super) async fn list(
    client: &mut Client,
    id: &str,
    path: &[u8],
    depth: u32,
) -> Result<Vec<proto::FileInfo>, Error> {
    let request = proto::ListFilesRequest {
        sandbox_id: id.to_owned(),
        path: path.to_vec(),
        depth,
    };
    let mut stream = client.list_files(request).await?.into_inner();
    let mut files = Vec::new();
    while let Some(file) = stream.message().await? {
        if files.len() >= MOST_ENTRIES {
            let message = format!("`{}` holds more than {MOST_ENTRIES} entries", show::name(path));
            return Err(Error::new(Kind::Exhausted, message));
        }
        files.push(file);
    }
    files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(files)
}

pub(super) async fn stat(client: &mut Client, id: &str, path: &[u8]) -> Result<proto::FileInfo, tonic::Status> {
    let request = proto::FileRequest {
        sandbox_id: id.to_owned(),
        path: path.to_vec(),
    };
    Ok(client.stat_file(request).await?.into_inner())
}

pub(super) async fn ls(args: Ls, server: &str, context: &Context) -> Result<Exit, Error> {
    let mut client = remote::sandboxes(server).await?;
    let path = args.path.into_vec();
    let found = stat(&mut client, &args.id, &path).await?;
    let files = match found.r#type() {
        proto::file_info::Type::Directory => list(&mut client, &args.id, &path, args.depth).await?,
        proto::file_info::Type::Regular
        | proto::file_info::Type::Symlink
        | proto::file_info::Type::Other
        | proto::file_info::Type::Unspecified => vec![found],
    };
    let objects: Vec<Value> = files.iter().map(object).collect();
    let text = match args.long {
        true => long(&files),
        false => files
            .iter()
            .map(|file| show::name(&file.path) + mark(file) + "\n")
            .collect(),
    };
    context.finish(&json!({ "files": objects }), &text);
    Ok(Exit::Ok)
}

fn object(file: &proto::FileInfo) -> Value {
    use proto::file_info::Type;
    let kind = match file.r#type() {
        Type::Regular => "file",
        Type::Directory => "directory",
        Type::Symlink => "symlink",
        Type::Other | Type::Unspecified => "other",
    };
    let mut object = json!({ "type": kind, "size": file.size, "mode": format!("{:04o}", file.mode & 0o7777),
        "modified_at": file.modified_at.as_ref().map(|at| show::millis(at).to_string()) });
    show::named(&mut object, "path", &file.path);
    if file.r#type() == Type::Symlink {
        show::named(&mut object, "link_target", &file.link_target);
    }
    object
}

/// What tells a directory from a file.
fn mark(file: &proto::FileInfo) -> &'static str {
    use proto::file_info::Type;
    match file.r#type() {
        Type::Directory => "/",
        Type::Symlink => "@",
        Type::Regular | Type::Other | Type::Unspecified => "",
    }
}

/// As `ls -l`, without owners: there is one user.
fn long(files: &[proto::FileInfo]) -> String {
    use proto::file_info::Type;
    let rows: Vec<Vec<String>> = files
        .iter()
        .map(|file| {
            let kind = match file.r#type() {
                Type::Regular => '-',
                Type::Directory => 'd',
                Type::Symlink => 'l',
                Type::Other | Type::Unspecified => '?',
            };
            let target = match file.r#type() {
                Type::Symlink => format!(" -> {}", show::name(&file.link_target)),
                Type::Regular | Type::Directory | Type::Other | Type::Unspecified => String::new(),
            };
            let time = file.modified_at.as_ref().map(|at| show::millis(at).to_string());
            // To the second, as the next column begins.
            let time = time.map_or("-".to_owned(), |time| {
                time.chars().take(19).collect::<String>().replace('T', " ")
            });
            vec![
                format!("{kind}{}", permissions(file.mode)),
                file.size.to_string(),
                time,
                show::name(&file.path) + &target,
            ]
        })
        .collect();
    let widest = rows.iter().map(|row| row[1].len()).max().unwrap_or(0);
    rows.iter()
        .map(|row| format!("{}  {:>widest$}  {}  {}\n", row[0], row[1], row[2], row[3]))
        .collect()
}

fn permissions(mode: u32) -> String {
    let bit = |bit: u32, mark: char| if mode & bit == bit { mark } else { '-' };
    [
        bit(0o400, 'r'),
        bit(0o200, 'w'),
        bit(0o100, 'x'),
        bit(0o040, 'r'),
        bit(0o020, 'w'),
        bit(0o010, 'x'),
        bit(0o004, 'r'),
        bit(0o002, 'w'),
        bit(0o001, 'x'),
    ]
    .iter()
    .collect()
}

/// Until the sandbox ends, or whoever watches has enough.
pub(super) async fn watch(args: Watch, server: &str, context: &Context) -> Result<Exit, Error> {
    let mut client = remote::sandboxes(server).await?;
    let request = proto::WatchFilesRequest {
        sandbox_id: args.id,
        path: args.path.into_vec(),
        recursive: args.recursive,
    };
    let mut changes = client.watch_files(request).await?.into_inner();
    while let Some(change) = changes.message().await? {
        let Some(name) = change_name(&change) else {
            // The first message: from here on nothing is missed.
            err!("watching");
            continue;
        };
        let mut object = json!({ "change": name, "directory": change.directory });
        show::named(&mut object, "path", &change.path);
        let mark = if change.directory { "/" } else { "" };
        let line = format!("{name:<10} {}{mark}", show::name(&change.path));
        let written = match context.json {
            true => line_out(&object.to_string()),
            false => line_out(line.trim_end()),
        };
        if written.is_err() {
            // Nobody reads any more.
            return Ok(Exit::Ok);
        }
    }
    Ok(Exit::Ok)
}

fn change_name(change: &proto::FileChange) -> Option<&'static str> {
    use proto::file_change::Type;
    match change.r#type() {
        Type::Unspecified => None,
        Type::Created => Some("created"),
        Type::Modified => Some("modified"),
        Type::Removed => Some("removed"),
        Type::MovedFrom => Some("moved_from"),
        Type::MovedTo => Some("moved_to"),
        Type::Attributes => Some("attributes"),
        Type::Lost => Some("lost"),
    }
}

/// A line at once, for whoever reads along.
pub(super) fn line_out(line: &str) -> std::io::Result<()> {
    use std::io::Write as _;
    let mut stdout = std::io::stdout();
    writeln!(stdout, "{line}")?;
    stdout.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_listed_short_and_long() {
        use proto::file_info::Type;
        let file = |path: &[u8], kind: Type, size: u64, mode: u32| proto::FileInfo {
            path: path.to_vec(),
            r#type: kind.into(),
            size,
            mode,
            modified_at: Some(prost_types::Timestamp { seconds: 0, nanos: 0 }),
            ..Default::default()
        };
        let link = proto::FileInfo {
            link_target: b"../etc\x1b".to_vec(),
            ..file(b"z", Type::Symlink, 6, 0o777)
        };
        let all = [
            file(b"a\nb", Type::Regular, 1_234_567, 0o754),
            file(b"dir", Type::Directory, 4096, 0o1755),
            link,
        ];
        insta::assert_snapshot!(long(&all));
        assert_eq!(
            object(&all[2]),
            json!({ "type": "symlink", "size": 6, "mode": "0777", "modified_at": "1970-01-01T00:00:00.000Z",
                "path": "z", "link_target": "../etc\u{1b}" })
        );
    }
}
