//! Code kernels in real sandboxes of the image `host`.

mod bash;
mod hostile;
mod life;
mod node;
mod nursery;
mod python;
mod warm;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use exuvia::sandbox::kernel::{Event, Kernel, Language, Options, Run, RunEnded, RunOptions};
use exuvia::sandbox::{Mount, Sandbox};

use crate::support::{Bench, skip};

/// Nothing in these tests takes this long.
const LIMIT: Duration = Duration::from_secs(60);

/// A sandbox for kernels, and what keeps it.
struct Place {
    bench: Bench,
    sandbox: Arc<Sandbox>,
}

impl Place {
    /// `None`, said on stderr, where the machine cannot do it.
    async fn open(test: &str) -> Option<Self> {
        Self::with_mounts(test, Vec::new()).await
    }

    async fn with_mounts(test: &str, mounts: Vec<Mount>) -> Option<Self> {
        let bench = Bench::new(test)?;
        let mut spec = bench.spec();
        spec.limits.cpus = 2.0;
        spec.mounts = mounts;
        let sandbox = Arc::new(bench.open(spec).await);
        Some(Self { bench, sandbox })
    }

    /// The same, and a kernel in it.
    async fn kernel(test: &str, language: Language) -> Option<(Self, Kernel)> {
        let place = Self::open(test).await?;
        let kernel = place.start(test, language).await?;
        Some((place, kernel))
    }

    async fn start(&self, test: &str, language: Language) -> Option<Kernel> {
        match Kernel::start(&self.sandbox, language, Options::default()).await {
            Ok(kernel) => Some(kernel),
            Err(exuvia::sandbox::kernel::Error::NoInterpreter { language, tried }) => {
                skip(test, &format!("no {language} on this host: {tried}"));
                self.close().await;
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    async fn close(&self) {
        self.sandbox.close(Duration::ZERO).await.unwrap();
    }
}

/// What one piece of code did, output joined.
#[derive(Debug, Default)]
struct Did {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    results: Vec<(BTreeMap<String, Vec<u8>>, bool)>,
    errors: Vec<(String, String, String)>,
    ended: Option<RunEnded>,
}

impl Did {
    fn out(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// The value of the last expression, as text.
    fn value(&self) -> Option<String> {
        let (data, _) = self.results.iter().find(|(_, is_main)| *is_main)?;
        Some(String::from_utf8_lossy(&data["text/plain"]).into_owned())
    }

    fn ended(&self) -> &RunEnded {
        self.ended.as_ref().expect("the last event says how it ended")
    }

    /// Name and value of the only error.
    fn error(&self) -> (&str, &str) {
        let [(name, value, _)] = self.errors.as_slice() else {
            panic!("not one error: {self:?}");
        };
        (name, value)
    }

    fn note(&mut self, event: Event) {
        assert!(self.ended.is_none(), "after the last event: {event:?}");
        match event {
            Event::Stdout(bytes) => self.stdout.extend(bytes),
            Event::Stderr(bytes) => self.stderr.extend(bytes),
            Event::Result { data, is_main } => self.results.push((data, is_main)),
            Event::Error { name, value, traceback } => self.errors.push((name, value, traceback)),
            Event::Ended(ended) => self.ended = Some(ended),
        }
    }
}

/// Takes everything to the end.
async fn finish(mut run: Run) -> Did {
    let mut did = Did::default();
    let all = async {
        while let Some(event) = run.events.recv().await {
            did.note(event);
        }
    };
    tokio::time::timeout(LIMIT, all).await.expect("the code ends");
    did
}

async fn cell(kernel: &Kernel, code: &str) -> Did {
    finish(kernel.run(code, RunOptions::default()).unwrap()).await
}

/// Runs code that must go well.
async fn good(kernel: &Kernel, code: &str) -> Did {
    let did = cell(kernel, code).await;
    assert!(did.ended().ok, "{code}: {did:?}");
    did
}

/// Waits until the code has written `what`.
async fn until(run: &mut Run, what: &str) {
    let mut did = Did::default();
    let seen = async {
        while !did.out().contains(what) {
            did.note(run.events.recv().await.expect("it says so before its end"));
        }
    };
    tokio::time::timeout(LIMIT, seen).await.expect("the code says so");
}
