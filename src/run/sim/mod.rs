//! The driver in a world of its own: a store in memory that fails around a commit, the fake backend, scripted models, and
//! time that moves only when nothing else can.

mod crashes;
mod forks;
mod grounds;
mod random;
mod recordings;
mod rows;
mod seeds;
mod steps;
mod weather;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::driver::{Rest, STALE_AFTER, drive};
use super::effects::Shop;
use super::event::{Entry, Event, Outcome};
use super::hub::Hub;
use super::lease::LEASE;
use super::service::{Service, Submission};
use super::session::Session;
use super::state::State;
use super::{Error, bench, fold};
use crate::audit::Mirror;
use crate::chaos::KillAt;
use crate::clock::{Clock, Timestamp};
use crate::ids::RunId;
use crate::model::Message;
use crate::policy::BudgetOverrides;
use crate::sandbox::backend::Backends;
use crate::sandbox::backend::fake::Fake;
use crate::sandbox::disk::Volumes;
use crate::scratch::Scratch;
use crate::store::memory::Memory;
use crate::store::{Created, Owner, Signal, Store};
use crate::task::Model;
use crate::workdir::WorkDirs;
use crate::workspace::{Pool, TreeId, Trees};

/// Tokio's time as a wall clock.
#[derive(Debug)]
struct Virtual(Instant);

impl Clock for Virtual {
    fn now(&self) -> Timestamp {
        Timestamp(0).plus(self.0.elapsed())
    }
}

/// One data directory, one store, and as many processes one after the other as a test wants.
struct World {
    data: Scratch,
    store: Memory,
    clock: Arc<dyn Clock>,
}

/// One process: what is in it is gone with it.
struct Process {
    shop: Arc<Shop>,
    fake: Arc<Fake>,
    owner: Owner,
}

/// What a run came to, apart from how it got there.
#[derive(Debug, PartialEq)]
struct Result {
    outcome: Outcome,
    tree: TreeId,
    messages: Vec<Message>,
    steps: u32,
}

impl World {
    fn new() -> Self {
        // Hundreds of worlds, each with dozens of fsyncs: in memory where the host has such a place.
        let memory = Path::new("/dev/shm");
        let folder = match memory.is_dir() {
            true => Scratch::new_in(memory),
            false => Scratch::new(),
        };
        let clock: Arc<dyn Clock> = Arc::new(Virtual(Instant::now()));
        Self {
            data: folder,
            store: Memory::new(Arc::clone(&clock)),
            clock,
        }
    }

    fn pool(&self) -> Pool {
        Pool::new(Trees::open(self.data.path()).unwrap())
    }

    fn process(&self) -> Process {
        self.process_of(Owner::current().unwrap())
    }

    /// One that another process takes for `owner`.
    fn process_of(&self, owner: Owner) -> Process {
        let fake = Fake::new();
        let store: Arc<dyn Store> = Arc::new(self.store.another());
        let benches = bench::Maker::new(
            self.data.path(),
            self.pool(),
            Backends::only(Arc::clone(&fake) as Arc<_>),
            Arc::clone(&self.clock),
            Arc::clone(&store),
            WorkDirs::new(self.data.path(), Volumes::folders(self.data.path())),
        );
        let benches = benches.unwrap();
        let shop = Shop {
            store,
            benches,
            clock: Arc::clone(&self.clock),
            hub: Hub::default(),
            host: "sim".into(),
            kill_at: KillAt::Never,
            stale_after: STALE_AFTER,
            lease: LEASE,
        };
        Process {
            shop: Arc::new(shop),
            fake,
            owner,
        }
    }

    /// Stores a task without driving it.
    async fn submit(&self, submission: Submission) -> RunId {
        let process = self.process();
        let mirror = Arc::new(Mirror::open(self.data.path(), Arc::clone(&self.clock)).unwrap());
        let service = Service::new(process.shop, self.pool(), mirror, self.data.path().to_owned(), 1).unwrap();
        let created = service.create(submission, None).await.unwrap();
        assert_eq!(service.shut_down(Duration::from_secs(10)).await, Vec::<String>::new());
        match created {
            Created::New(record) | Created::Known(record) => record.run,
        }
    }

    async fn entries(&self, run: &RunId) -> Vec<Entry> {
        self.store.journal(run, 0, usize::MAX).await.unwrap()
    }

    async fn state(&self, run: &RunId) -> State {
        fold(run, &self.entries(run).await).unwrap()
    }

    /// What a run that has ended came to; checks what holds for each.
    async fn result(&self, run: &RunId) -> Result {
        let entries = self.entries(run).await;
        let state = fold(run, &entries).unwrap();
        let Some(Event::Ended { outcome }) = entries.last().map(|entry| entry.event.clone()) else {
            panic!("not ended: {entries:#?}");
        };
        // F1: the newest checkpoint is the journal, folded.
        let checkpoint = self.store.checkpoint(run, None).await.unwrap();
        assert_eq!(super::state::of_checkpoint(run, &checkpoint).unwrap(), state);
        let record = self.store.run(run).await.unwrap();
        assert_eq!((record.seq, record.state.as_str()), (state.seq, state.public()));
        Result {
            outcome,
            tree: state.workspace.tree,
            messages: Session::of(&entries).messages(),
            steps: state.used.steps,
        }
    }
}

impl Process {
    /// Drives until the run rests, or this process "dies".
    async fn drive(&self, run: &RunId) -> std::result::Result<Rest, Error> {
        self.drive_with(run, Arc::default()).await
    }

    async fn drive_with(&self, run: &RunId, wake: Arc<Notify>) -> std::result::Result<Rest, Error> {
        let rest = drive(
            Arc::clone(&self.shop),
            run.clone(),
            &self.owner,
            wake,
            CancellationToken::new(),
        )
        .await;
        assert_eq!(self.fake.living(), [], "a driver that let go has no sandbox");
        rest
    }
}

fn submission(jsonl: String) -> Submission {
    Submission {
        prompt: "do it".into(),
        model: Model::Scripted {
            name: "sim.jsonl".into(),
            jsonl,
        },
        policy: "default".into(),
        workspace: None,
        empty_workspace: true,
        check: None,
        budgets: BudgetOverrides::default(),
        labels: Default::default(),
        image: None,
        backend: None,
        trace: None,
    }
}

/// Lines of a script, each a turn of calls.
fn script(turns: &[&[(&str, serde_json::Value)]]) -> String {
    let line = |turn: &&[(&str, serde_json::Value)]| {
        let calls = turn
            .iter()
            .map(|(name, arguments)| serde_json::json!({ "function": { "name": name, "arguments": arguments } }));
        serde_json::json!({ "tool_calls": calls.collect::<Vec<_>>() }).to_string() + "\n"
    };
    turns.iter().map(line).collect()
}

fn pause() -> Signal {
    Signal::Pause {
        now: false,
        by: "sim".into(),
        reason: String::new(),
    }
}

fn resume() -> Signal {
    Signal::Resume {
        by: "sim".into(),
        accept: Vec::new(),
    }
}
