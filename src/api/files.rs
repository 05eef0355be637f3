//! File calls: each enters the sandbox, makes one call and puts on the record what it changed.

use futures::StreamExt;
use serde_json::json;
use tonic::{Response, Status, Streaming};

use super::convert::person;
use super::proto::{self, file_info, write_file_request};
use super::status::{self, invalid};
use super::{Answer, Out};
use crate::fleet::{Fleet, Visit};
use crate::sandbox;
use crate::sandbox::files::{Change, ChangeKind, Entry, Kind, Range};

/// Most entries of one listing, and how deep it may go.
const MOST_ENTRIES: u32 = 100_000;
const MOST_DEPTH: u32 = 64;
/// Largest piece of a file in one message of a client's.
const MAX_DATA: usize = 1 << 20;

/// What came of a call, or why nothing did.
async fn done<T>(visit: &Visit, result: Result<T, sandbox::Error>) -> Result<T, Status> {
    match result {
        Ok(done) => Ok(done),
        Err(error) => Err(status::of_fleet(&visit.failed(error).await)),
    }
}

fn visit(fleet: &Fleet, sandbox: &str, by: &str) -> Result<Visit, Status> {
    let by = person(by.to_owned())?;
    fleet.visit(sandbox, &by).map_err(|error| status::of_fleet(&error))
}

fn shown(path: &[u8]) -> String {
    String::from_utf8_lossy(path).into_owned()
}

pub async fn stat(fleet: &Fleet, request: proto::FileRequest) -> Answer<proto::FileInfo> {
    let visit = visit(fleet, &request.sandbox_id, "")?;
    told(&visit, &request.path).await
}

async fn told(visit: &Visit, path: &[u8]) -> Answer<proto::FileInfo> {
    let entry = done(visit, visit.sandbox().files().stat(path).await).await?;
    Ok(Response::new(info(entry)))
}

pub async fn list(fleet: &Fleet, request: proto::ListFilesRequest) -> Answer<Out<proto::FileInfo>> {
    let visit = visit(fleet, &request.sandbox_id, "")?;
    if request.depth > MOST_DEPTH {
        return Err(invalid(format!("`depth` is at most {MOST_DEPTH}")));
    }
    let files = visit.sandbox().files();
    let listing = files.list(&request.path, request.depth.max(1), MOST_ENTRIES).await;
    let listing = done(&visit, listing).await?;
    let cut = listing.truncated.then(|| {
        Err(Status::resource_exhausted(format!(
            "there are more than {MOST_ENTRIES} entries"
        )))
    });
    let entries = listing.entries.into_iter().map(|entry| Ok(info(entry)));
    Ok(Response::new(Box::pin(futures::stream::iter(entries.chain(cut)))))
}

pub async fn read(fleet: &Fleet, request: proto::ReadFileRequest) -> Answer<Out<proto::FileChunk>> {
    let visit = visit(fleet, &request.sandbox_id, "")?;
    let range = Range {
        offset: request.offset,
        length: (request.length != 0).then_some(request.length),
    };
    let reading = visit.sandbox().files().read_stream(&request.path, range).await;
    let mut reading = done(&visit, reading).await?;
    let chunks = async_stream::try_stream! {
        while let Some(data) = done(&visit, reading.next().await).await? {
            yield proto::FileChunk { data };
        }
    };
    Ok(Response::new(Box::pin(chunks)))
}

pub async fn write(fleet: &Fleet, mut parts: Streaming<proto::WriteFileRequest>) -> Answer<proto::FileInfo> {
    let first = parts.message().await?.and_then(|request| request.kind);
    let Some(write_file_request::Kind::Start(start)) = first else {
        return Err(invalid("the first message has `start`"));
    };
    let visit = visit(fleet, &start.sandbox_id, &start.by)?;
    if start.mode > 0o7777 {
        return Err(invalid("`mode` is at most 07777"));
    }
    let mode = (start.mode != 0).then_some(start.mode);
    let mut bytes = 0_u64;
    let writing = async {
        let writing = visit.sandbox().files().write_stream(&start.path, mode).await;
        let mut writing = done(&visit, writing).await?;
        // A stream that breaks off leaves everything as it was.
        while let Some(part) = parts.message().await? {
            match part.kind {
                Some(write_file_request::Kind::Data(data)) if data.len() > MAX_DATA => {
                    return Err(invalid(format!("`data` is at most {MAX_DATA} bytes a message")));
                }
                Some(write_file_request::Kind::Data(data)) => {
                    bytes += data.len() as u64;
                    done(&visit, writing.write(&data).await).await?;
                }
                Some(write_file_request::Kind::Start(_)) | None => {
                    return Err(invalid("only the first message has `start`"));
                }
            }
        }
        done(&visit, writing.finish().await).await
    };
    let written = writing.await;
    let details = json!({ "path": shown(&start.path), "bytes": bytes,
        "reason": written.as_ref().err().map(Status::message) });
    let outcome = if written.is_ok() { "ok" } else { "failed" };
    visit.record("file.written", outcome, details).await;
    Ok(Response::new(info(written?)))
}

pub async fn watch(fleet: &Fleet, request: proto::WatchFilesRequest) -> Answer<Out<proto::FileChange>> {
    let visit = visit(fleet, &request.sandbox_id, "")?;
    let watch = visit.sandbox().files().watch(&request.path, request.recursive).await;
    let mut watch = done(&visit, watch).await?;
    let changes = async_stream::try_stream! {
        // It is on.
        yield proto::FileChange::default();
        loop {
            yield change(done(&visit, watch.next().await).await?);
        }
    };
    let stop = fleet.stopping();
    let changes = changes.take_until(async move { stop.cancelled().await });
    Ok(Response::new(Box::pin(changes)))
}

fn change(change: Change) -> proto::FileChange {
    use proto::file_change::Type;
    let kind = match change.kind {
        ChangeKind::Created => Type::Created,
        ChangeKind::Modified => Type::Modified,
        ChangeKind::Removed => Type::Removed,
        ChangeKind::MovedFrom => Type::MovedFrom,
        ChangeKind::MovedTo => Type::MovedTo,
        ChangeKind::Attributes => Type::Attributes,
        ChangeKind::Lost => Type::Lost,
    };
    proto::FileChange {
        r#type: kind.into(),
        path: change.path,
        directory: change.directory,
    }
}

async fn on_record<T>(visit: &Visit, action: &str, result: &Result<T, sandbox::Error>, mut details: serde_json::Value) {
    let outcome = match result {
        Ok(_) => "ok",
        Err(error) => {
            details["reason"] = crate::error::chain(error).into();
            "failed"
        }
    };
    visit.record(action, outcome, details).await;
}

pub async fn make_directory(fleet: &Fleet, request: proto::MakeDirectoryRequest) -> Answer<proto::FileInfo> {
    let visit = visit(fleet, &request.sandbox_id, &request.by)?;
    let files = visit.sandbox().files();
    let made = match request.parents {
        true => files.mkdir_all(&request.path).await,
        false => files.mkdir(&request.path).await,
    };
    on_record(
        &visit,
        "file.directory_made",
        &made,
        json!({ "path": shown(&request.path) }),
    )
    .await;
    done(&visit, made).await?;
    told(&visit, &request.path).await
}

pub async fn rename(fleet: &Fleet, request: proto::MoveFileRequest) -> Answer<proto::FileInfo> {
    let visit = visit(fleet, &request.sandbox_id, &request.by)?;
    let moved = visit.sandbox().files().rename(&request.from, &request.to).await;
    let details = json!({ "from": shown(&request.from), "to": shown(&request.to) });
    on_record(&visit, "file.moved", &moved, details).await;
    done(&visit, moved).await?;
    told(&visit, &request.to).await
}

pub async fn remove(fleet: &Fleet, request: proto::RemoveFileRequest) -> Answer<proto::RemoveFileResponse> {
    let visit = visit(fleet, &request.sandbox_id, &request.by)?;
    let files = visit.sandbox().files();
    let removed = match request.recursive {
        true => files.remove_all(&request.path).await,
        false => files.remove(&request.path).await,
    };
    let details = json!({ "path": shown(&request.path), "recursive": request.recursive });
    on_record(&visit, "file.removed", &removed, details).await;
    done(&visit, removed).await?;
    Ok(Response::new(proto::RemoveFileResponse {}))
}

fn info(entry: Entry) -> proto::FileInfo {
    let kind = match entry.kind {
        Kind::Regular => file_info::Type::Regular,
        Kind::Directory => file_info::Type::Directory,
        Kind::Symlink => file_info::Type::Symlink,
        Kind::Other => file_info::Type::Other,
    };
    proto::FileInfo {
        path: entry.path,
        r#type: kind.into(),
        size: entry.size,
        mode: entry.mode,
        modified_at: Some(prost_types::Timestamp {
            seconds: entry.modified_ns.div_euclid(1_000_000_000),
            nanos: entry.modified_ns.rem_euclid(1_000_000_000) as i32,
        }),
        link_target: entry.link_target.unwrap_or_default(),
    }
}
