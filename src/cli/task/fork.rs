//! `exuvia task fork`, `export`, `import`: children of runs, and runs as files.

use std::path::Path;

use tokio_stream::StreamExt;

use super::{Client, show};
use crate::api::proto;
use crate::cli::{Context, Error, Exit};
use crate::error::Kind;

/// Bytes of a file in one message.
const CHUNK: usize = 256 << 10;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// RUN, or RUN@REVISION; without a revision the newest.
    run: String,
    /// What the model is told; calls that were open are given up. Without it the child goes on as it stood.
    #[arg(long, short, default_value = "", value_name = "TEXT")]
    message: String,
    /// Take the policy as it is now, although it has changed.
    #[arg(long = "accept", value_name = "WHAT", value_parser = ["policy"])]
    accept: Vec<String>,
    /// Who asks [default: the user].
    #[arg(long, value_name = "NAME")]
    by: Option<String>,
}

impl Args {
    /// A child that goes on as it stood.
    pub fn at(run: &str, revision: u64, accept: Vec<String>) -> Self {
        Self {
            run: format!("{run}@{revision}"),
            message: String::new(),
            accept,
            by: None,
        }
    }
}

pub async fn fork(mut client: Client, args: Args, context: &Context) -> Result<Exit, Error> {
    let (id, revision) = match args.run.split_once('@') {
        None => (args.run.as_str(), None),
        Some((id, revision)) => {
            let number = revision.parse();
            let invalid = |_| Error::new(Kind::Invalid, format!("`{revision}` is no revision: write RUN@NUMBER"));
            (id, Some(number.map_err(invalid)?))
        }
    };
    let request = proto::ForkRequest {
        id: id.to_owned(),
        revision,
        message: args.message,
        by: args.by.unwrap_or_else(crate::cli::person),
        accept: args.accept,
    };
    Ok(show(&client.fork(request).await?.into_inner(), context))
}

pub async fn export(
    mut client: Client,
    request: proto::ExportRequest,
    output: &Path,
    context: &Context,
) -> Result<Exit, Error> {
    let chunks = client.export(request).await?.into_inner();
    super::save(chunks.map(|chunk| Ok(chunk?.data)), output, context).await
}

pub async fn import(mut client: Client, file: &Path, context: &Context) -> Result<Exit, Error> {
    let bytes = std::fs::read(file)
        .map_err(|error| Error::new(Kind::Invalid, format!("cannot read `{}`: {error}", file.display())))?;
    let chunks: Vec<_> = bytes
        .chunks(CHUNK)
        .map(|data| proto::RecordingChunk { data: data.to_vec() })
        .collect();
    let run = client.import(tokio_stream::iter(chunks)).await?.into_inner();
    Ok(show(&run, context))
}
