//! `exuvia image`: the image store of this host's data directory.

mod add;
mod progress;
mod show;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args as Arguments, Subcommand};

use super::{Context, Error, Exit};
use crate::sandbox::image::build::Builder;
use crate::sandbox::image::{Name, Platform, Store, StoreError, StoredRef};
use crate::secret::CredentialRef;

/// Bring images in, look at them, take them out.
#[derive(Debug, Arguments)]
#[command(after_help = NOTES)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

const NOTES: &str = "\
An image is unpacked once, by its content, and shared read-only by all sandboxes. Use one by its
name: `exuvia sandbox run --image NAME`, `image = \"image:NAME\"` in a policy.

  exuvia image build images/python
  exuvia image pull registry.example/team/tools:1.2
  docker save app:1 | zstd > app.tar.zst && exuvia image import app.tar.zst --name app
  exuvia sandbox run --image python -- python3 -c 'print(6 * 7)'";

#[derive(Debug, Subcommand)]
enum Command {
    /// Add an image from this host: a root file system, an OCI layout, an archive of `docker save`.
    Import(Import),
    /// Add an image from a registry. Every digest is checked.
    Pull(Pull),
    /// Build an image from a folder with `build.sh` (mmdebstrap) or a `Dockerfile`, and add it.
    Build(Build),
    /// List the images by name.
    List,
    /// Show one image: digest, layers, configuration, and which of its variables commands get.
    Inspect {
        /// NAME or NAME@sha256:…
        image: StoredRef,
    },
    /// Take a name away, and the image's files when nothing else needs them.
    Rm {
        #[arg(required = true)]
        names: Vec<Name>,
    },
    /// Remove what no name and no sandbox needs, and what killed imports left.
    Gc,
}

/// What all that unpack are told.
#[derive(Debug, Arguments)]
struct Bounded {
    /// Most that the image may hold, unpacked or on the way.
    #[arg(long, value_name = "SIZE", default_value = "64GiB")]
    max_size: bytesize::ByteSize,
}

#[derive(Debug, Arguments)]
struct Import {
    /// `rootfs:DIR`, `tar:FILE`, `layout:DIR[:TAG]`, `archive:FILE[:TAG]`, or a path.
    source: String,
    /// What it is called [default: the file's or directory's own name]
    #[arg(long)]
    name: Option<Name>,
    /// Choose among several [default: this host's]
    #[arg(long, value_name = "linux/ARCH")]
    platform: Option<Platform>,
    /// For `rootfs:` and `tar:`: a JSON object with `Env`, `WorkingDir`, `User`, `Entrypoint`, `Cmd`.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    bounded: Bounded,
}

#[derive(Debug, Arguments)]
struct Pull {
    /// `REGISTRY/REPOSITORY[:TAG][@sha256:…]`
    reference: String,
    /// What it is called [default: REPOSITORY:TAG]
    #[arg(long)]
    name: Option<Name>,
    /// Choose among several [default: this host's]
    #[arg(long, value_name = "linux/ARCH")]
    platform: Option<Platform>,
    /// Take the login from a Docker configuration. Read now, never kept.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["username", "token_from"])]
    docker_config: Option<PathBuf>,
    #[arg(long, value_name = "NAME", requires = "password_from")]
    username: Option<String>,
    /// `env:NAME` or `file:/PATH`
    #[arg(long, value_name = "REF", requires = "username")]
    password_from: Option<CredentialRef>,
    /// A bearer token: `env:NAME` or `file:/PATH`
    #[arg(long, value_name = "REF", conflicts_with = "username")]
    token_from: Option<CredentialRef>,
    /// Speak HTTP without TLS; for a registry on this host's loopback only.
    #[arg(long)]
    plain_http: bool,
    /// Trust what is signed by the authorities in this file (PEM), besides those that this host trusts.
    #[arg(long, value_name = "FILE", conflicts_with = "plain_http")]
    registry_ca: Option<PathBuf>,
    /// Give up after this long.
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = humantime::parse_duration)]
    timeout: Duration,
    #[command(flatten)]
    bounded: Bounded,
}

#[derive(Debug, Arguments)]
struct Build {
    /// A folder like `images/python`. It is trusted: what is in it runs as you.
    folder: PathBuf,
    /// What it is called [default: the folder's own name]
    #[arg(long)]
    name: Option<Name>,
    /// [default: the first that is here and has what it needs]
    #[arg(long)]
    with: Option<Builder>,
    /// Debian packages besides those of the folder, as `gcc,make`; for `build.sh`.
    #[arg(long, value_delimiter = ',', value_name = "LIST")]
    packages: Vec<String>,
    #[command(flatten)]
    bounded: Bounded,
}

pub async fn run(args: Args, context: &Context) -> Result<Exit, Error> {
    let store = Store::open(&context.data_dir)?;
    match args.command {
        Command::Import(args) => add::import(args, &store, context).await,
        Command::Pull(args) => add::pull(args, &store, context).await,
        Command::Build(args) => add::build(args, &store, context).await,
        Command::List => show::list(&store, context),
        Command::Inspect { image } => show::inspect(&image, &store, context),
        Command::Rm { names } => show::remove(&names, &store, context),
        Command::Gc => show::collect(&store, context),
    }
}

impl From<StoreError> for Error {
    fn from(error: StoreError) -> Self {
        let hint = error.hint();
        let mut shown = Self::of(error.kind(), &error);
        if matches!(error, StoreError::Cancelled) {
            shown.reason = Some(super::exit::INTERRUPTED.to_owned());
        }
        match hint {
            Some(hint) => shown.hint(hint),
            None => shown,
        }
    }
}

impl From<crate::sandbox::image::registry::Error> for Error {
    fn from(error: crate::sandbox::image::registry::Error) -> Self {
        StoreError::from(error).into()
    }
}
