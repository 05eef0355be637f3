//! File calls and snapshots.

use exuvia::api::proto::{self, file_info::Type, write_file_request};
use futures::TryStreamExt;
use tonic::Code;

use crate::bed::{Bed, why};
use crate::support::Sandboxes;
use crate::support::hand::{create, plain, run};

/// Writes a file in pieces.
pub async fn write(client: &mut Sandboxes, id: &str, path: &[u8], bytes: &[u8]) -> proto::FileInfo {
    let start = proto::WriteFileStart {
        sandbox_id: id.into(),
        path: path.to_vec(),
        mode: 0o640,
        by: "tester".into(),
    };
    let pieces = bytes
        .chunks(1 << 18)
        .map(|piece| write_file_request::Kind::Data(piece.to_vec()));
    let parts: Vec<_> = std::iter::once(write_file_request::Kind::Start(start))
        .chain(pieces)
        .map(|kind| proto::WriteFileRequest { kind: Some(kind) })
        .collect();
    client.write_file(tokio_stream::iter(parts)).await.unwrap().into_inner()
}

async fn read(client: &mut Sandboxes, id: &str, path: &[u8], range: (u64, u64)) -> Vec<u8> {
    let request = proto::ReadFileRequest {
        sandbox_id: id.into(),
        path: path.to_vec(),
        offset: range.0,
        length: range.1,
    };
    let chunks = client.read_file(request).await.unwrap().into_inner();
    let chunks: Vec<_> = chunks.map_ok(|chunk| chunk.data).try_collect().await.unwrap();
    chunks.concat()
}

#[tokio::test]
async fn files_go_in_and_out_and_changes_are_on_the_record() {
    let bed = Bed::new().await;
    let mut client = bed.sandboxes().await;
    let id = create(&mut client, plain()).await.sandbox_id;
    let whole: Vec<u8> = (0..3_000_000_u32).map(|n| (n / 3) as u8).collect();
    // T17: any name.
    let name = "dir/\u{1f980} -\n".as_bytes();
    let written = write(&mut client, &id, name, &whole).await;
    assert_eq!(
        (written.size, written.r#type(), written.mode),
        (3_000_000, Type::Regular, 0o640)
    );
    assert!(read(&mut client, &id, name, (0, 0)).await == whole);
    assert!(read(&mut client, &id, name, (1_500_000, 1_200_000)).await == whole[1_500_000..2_700_000]);
    assert_eq!(read(&mut client, &id, name, (3_000_000, 0)).await, b"");

    let moved = proto::MoveFileRequest {
        sandbox_id: id.clone(),
        from: name.to_vec(),
        to: b"plain".to_vec(),
        by: "tester".into(),
    };
    assert_eq!(client.move_file(moved).await.unwrap().into_inner().size, 3_000_000);
    let made = proto::MakeDirectoryRequest {
        sandbox_id: id.clone(),
        path: b"a/b".to_vec(),
        parents: true,
        by: "tester".into(),
    };
    assert_eq!(
        client.make_directory(made).await.unwrap().into_inner().r#type(),
        Type::Directory
    );
    let listed = proto::ListFilesRequest {
        sandbox_id: id.clone(),
        path: b"/workspace".to_vec(),
        depth: 2,
    };
    let found = client.list_files(listed).await.unwrap().into_inner();
    let mut names: Vec<_> = found.map_ok(|info| info.path).try_collect().await.unwrap();
    names.sort();
    assert_eq!(names.len(), 4, "{names:?}");

    let gone = proto::RemoveFileRequest {
        sandbox_id: id.clone(),
        path: b"plain".to_vec(),
        recursive: false,
        by: "tester".into(),
    };
    client.remove_file(gone.clone()).await.unwrap();
    let refused = client.remove_file(gone).await.unwrap_err();
    assert_eq!(why(&refused), (Code::NotFound, "FILE_NOT_FOUND".into()));

    let trail = bed.trail(&id).await;
    let changes: Vec<_> = trail
        .iter()
        .filter(|record| record.action.starts_with("file."))
        .map(|record| (record.actor.as_str(), record.action.as_str(), record.outcome.as_str()))
        .collect();
    assert_eq!(
        changes,
        [
            ("user:tester", "file.written", "ok"),
            ("user:tester", "file.moved", "ok"),
            ("user:tester", "file.directory_made", "ok"),
            ("user:tester", "file.removed", "ok"),
            ("user:tester", "file.removed", "failed"),
        ]
    );
}

#[tokio::test]
async fn a_write_with_too_large_a_piece_leaves_everything_as_it_was() {
    let bed = Bed::new().await;
    let mut client = bed.sandboxes().await;
    let id = create(&mut client, plain()).await.sandbox_id;
    write(&mut client, &id, b"file", b"before").await;
    let start = proto::WriteFileStart {
        sandbox_id: id.clone(),
        path: b"file".to_vec(),
        mode: 0,
        by: "tester".into(),
    };
    let parts = [
        write_file_request::Kind::Start(start),
        write_file_request::Kind::Data(vec![0; 1 << 20]),
        write_file_request::Kind::Data(vec![0; (1 << 20) + 1]),
    ];
    let parts = parts.map(|kind| proto::WriteFileRequest { kind: Some(kind) });
    let refused = client.write_file(tokio_stream::iter(parts)).await.unwrap_err();
    assert_eq!(why(&refused), (Code::InvalidArgument, "INVALID".into()));
    assert_eq!(read(&mut client, &id, b"file", (0, 0)).await, b"before");
}

#[tokio::test]
async fn a_snapshot_is_a_workspace_to_begin_with() {
    let bed = Bed::new().await;
    let mut client = bed.sandboxes().await;
    let id = create(&mut client, plain()).await.sandbox_id;
    run(&mut client, &id, "mkdir d; echo first > d/file").await;
    let snapshot = proto::SnapshotRequest {
        sandbox_id: id.clone(),
        memory: false,
        by: "tester".into(),
    };
    let taken = client.snapshot(snapshot.clone()).await.unwrap().into_inner();
    run(&mut client, &id, "echo second > d/file").await;
    let again = client.snapshot(snapshot).await.unwrap().into_inner();
    assert_ne!(taken.tree, again.tree);
    let request = proto::CreateSandboxRequest {
        workspace: Some(proto::create_sandbox_request::Workspace::Tree(taken.tree)),
        times: taken.times,
        ..plain()
    };
    let other = create(&mut client, request.clone()).await.sandbox_id;
    assert_eq!(run(&mut client, &other, "cat d/file").await.stdout, b"first\n");
    assert_eq!(run(&mut client, &id, "cat d/file").await.stdout, b"second\n");

    let unknown = proto::CreateSandboxRequest {
        workspace: Some(proto::create_sandbox_request::Workspace::Tree("0".repeat(64))),
        times: String::new(),
        ..request
    };
    let refused = client.create(unknown).await.unwrap_err();
    assert_eq!(refused.code(), Code::NotFound, "{refused:?}");
}
