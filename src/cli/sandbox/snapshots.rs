//! `snapshots`: what `snapshot --memory` has kept.

use serde_json::{Value, json};

use super::show;
use crate::api::json::{Unset, message};
use crate::api::proto;
use crate::cli::{Context, Error, Exit, remote};
use crate::clock::{self, Clock};

#[derive(Debug, clap::Args)]
pub(super) struct Snapshots {
    /// Delete these (`snap_…`) in place of listing; sandboxes that were made from them stay.
    #[arg(long, num_args = 1.., value_name = "ID")]
    delete: Vec<String>,
}

pub(super) async fn snapshots(args: Snapshots, server: &str, context: &Context) -> Result<Exit, Error> {
    let mut client = remote::sandboxes(server).await?;
    if args.delete.is_empty() {
        let answer = client
            .list_snapshots(proto::ListSnapshotsRequest {})
            .await?
            .into_inner();
        let objects: Vec<Value> = answer
            .snapshots
            .iter()
            .map(|snapshot| message("Snapshot", snapshot, Unset::Shown))
            .collect();
        let text = listing(&answer.snapshots, clock::System.now());
        context.finish(&json!({ "snapshots": objects }), &crate::cli::report::clean(&text));
        return Ok(Exit::Ok);
    }
    for snapshot in &args.delete {
        let request = proto::DeleteSnapshotRequest {
            snapshot: snapshot.clone(),
            by: crate::cli::person(),
        };
        client.delete_snapshot(request).await?;
    }
    context.finish(&json!({ "deleted": args.delete }), &args.delete.join("\n"));
    Ok(Exit::Ok)
}

fn listing(snapshots: &[proto::Snapshot], now: clock::Timestamp) -> String {
    let rows: Vec<Vec<String>> = snapshots
        .iter()
        .map(|snapshot| {
            let age = snapshot.created_at.as_ref().map(|at| show::span(show::since(at, now)));
            vec![
                snapshot.snapshot.clone(),
                snapshot.sandbox_id.clone(),
                snapshot.policy.clone(),
                age.unwrap_or_else(|| "-".to_owned()),
                bytesize::ByteSize(snapshot.bytes).to_string(),
            ]
        })
        .collect();
    show::table(&["SNAPSHOT", "OF", "POLICY", "AGE", "SIZE"], &rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listing_is_a_table() {
        let snapshot = proto::Snapshot {
            snapshot: "snap_a".into(),
            sandbox_id: "sbx_b".into(),
            policy: "gvisor".into(),
            created_at: Some(prost_types::Timestamp { seconds: 5, nanos: 0 }),
            bytes: 5 << 20,
            ..Default::default()
        };
        insta::assert_snapshot!(listing(&[snapshot], clock::Timestamp(65_000)), @r"
        SNAPSHOT  OF     POLICY  AGE  SIZE
        snap_a    sbx_b  gvisor  1m   5.0 MiB
        ");
    }
}
