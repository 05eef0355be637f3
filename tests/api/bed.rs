//! A whole service in this process: the real store, driver and gRPC server, over the fake backend and a clock of ours.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use exuvia::api::{proto, server};
use exuvia::audit::{Mirror, Record};
use exuvia::chaos::KillAt;
use exuvia::clock::{Clock, System, Timestamp};
use exuvia::fleet::{self, Fleet, OnShutdown, Recovered};
use exuvia::run::hub::Hub;
use exuvia::run::lease::LEASE;
use exuvia::run::{STALE_AFTER, Service, Shop, bench};
use exuvia::sandbox::backend::Backends;
use exuvia::sandbox::backend::fake::Fake;
use exuvia::sandbox::disk::Volumes;
use exuvia::store::Store;
use exuvia::store::sqlite::Sqlite;
use exuvia::tasks::Tasks;
use exuvia::workdir::WorkDirs;
use exuvia::workspace::{Pool, Trees};
use tonic::{Code, Status};
use tonic_types::StatusExt;

use crate::support::{Client, Sandboxes, Scratch, keyed};

/// A service and its server.
pub struct Bed {
    pub data: Scratch,
    pub fake: Arc<Fake>,
    pub clock: Later,
    pub store: Arc<dyn Store>,
    slots: usize,
    service: Service,
    pub fleet: Fleet,
    pub recovered: Recovered,
    config: fleet::Config,
    tasks: Tasks,
    url: String,
}

/// A data directory and its sandboxes, between two services.
pub struct Stopped {
    pub data: Scratch,
    pub clock: Later,
    pub fake: Arc<Fake>,
    slots: usize,
    config: fleet::Config,
}

impl Stopped {
    pub async fn started(self) -> Bed {
        Bed::over((self.data, self.fake), self.clock, self.slots, self.config).await
    }
}

/// The system's clock, and how far a test has moved it on.
#[derive(Debug, Clone, Default)]
pub struct Later(Arc<AtomicI64>);

impl Later {
    pub fn advance(&self, by: Duration) {
        self.0.fetch_add(by.as_millis() as i64, Ordering::SeqCst);
    }
}

impl Clock for Later {
    fn now(&self) -> Timestamp {
        Timestamp(System.now().0 + self.0.load(Ordering::SeqCst))
    }
}

impl Bed {
    pub async fn new() -> Self {
        Self::with_slots(8).await
    }

    /// One that drives so many runs side by side.
    pub async fn with_slots(slots: usize) -> Self {
        let made = (Scratch::new(), Fake::new());
        let config = fleet::Config {
            on_shutdown: OnShutdown::End,
            ..fleet::Config::default()
        };
        Self::over(made, Later::default(), slots, config).await
    }

    /// One whose fleet is so.
    pub async fn with_fleet(config: fleet::Config) -> Self {
        let made = (Scratch::new(), Fake::new());
        Self::over(made, Later::default(), 8, config).await
    }

    async fn over((data, fake): (Scratch, Arc<Fake>), clock: Later, slots: usize, config: fleet::Config) -> Self {
        let (service, store) = service(data.path(), &fake, &clock, slots);
        let parts = fleet::Parts {
            data_dir: data.path().to_owned(),
            backends: Backends::only(Arc::clone(&fake) as Arc<_>),
            trees: service.workspaces().clone(),
            work_dirs: WorkDirs::new(data.path(), Volumes::folders(data.path())),
            store: Arc::clone(&store),
            clock: Arc::new(clock.clone()),
            borders: None,
        };
        let fleet = Fleet::new(parts, config.clone()).await.unwrap();
        let recovered = fleet.recover().await;
        fleet.fill_pool();
        let listener = server::bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let tasks = Tasks::default();
        let (serving, served) = (service.clone(), fleet.clone());
        tasks.spawn("serve", |stop| async move {
            server::serve(serving, served, listener, stop).await.unwrap();
        });
        service.recover().await.unwrap();
        Self {
            data,
            fake,
            clock,
            store,
            slots,
            service,
            fleet,
            recovered,
            config,
            tasks,
            url,
        }
    }

    /// Stops all of it and opens the same data directory anew, as another process would.
    pub async fn restarted(self) -> Self {
        self.stopped().await.started().await
    }

    /// Stops all of it.
    pub async fn stopped(self) -> Stopped {
        self.tasks.stopping().cancel();
        let still = self.fleet.shut_down(Duration::from_secs(30)).await;
        assert!(still.is_empty(), "{still:?}");
        let still = self.service.shut_down(Duration::from_secs(30)).await;
        assert!(still.is_empty(), "{still:?}");
        let Self {
            data,
            clock,
            slots,
            fake,
            config,
            ..
        } = self;
        if config.on_shutdown == OnShutdown::End {
            assert_eq!(fake.living(), [], "a stopped service leaves no sandbox");
        }
        Stopped {
            data,
            clock,
            fake,
            slots,
            config,
        }
    }

    pub async fn sandboxes(&self) -> Sandboxes {
        Sandboxes::connect(self.url.clone()).await.unwrap()
    }

    /// What is on the audit record of a sandbox, in order, once all of it is.
    pub async fn trail(&self, sandbox: &str) -> Vec<Record> {
        self.fleet.flush().await;
        let all = self.store.audit_log(0, 100_000).await.unwrap().into_iter();
        all.map(|sealed| sealed.record)
            .filter(|record| record.ids.get("sandbox").is_some_and(|id| id == sandbox))
            .collect()
    }

    pub async fn client(&self) -> Client {
        Client::connect(self.url.clone()).await.unwrap()
    }

    /// Submits a task without a key.
    pub async fn submit(&self, task: &proto::Task) -> proto::Run {
        let mut client = self.client().await;
        client.submit(keyed("", task)).await.unwrap().into_inner()
    }

    /// Makes a policy known by its name.
    pub fn policy(&self, name: &str, rest: &str) {
        let folder = self.data.path().join("policies");
        std::fs::create_dir_all(&folder).unwrap();
        let head = format!("format_version = 1\nname = \"{name}\"\nextends = \"default\"\n");
        std::fs::write(folder.join(format!("{name}.toml")), head + rest).unwrap();
    }

    /// What is on the audit record of a run, in order.
    pub async fn audit(&self, run: &str) -> Vec<Record> {
        let all = self.store.audit_log(0, 10_000).await.unwrap().into_iter();
        all.map(|sealed| sealed.record)
            .filter(|record| record.ids.get("run").is_some_and(|id| id == run))
            .collect()
    }

    /// Waits until no sandbox is left; closing one comes after the run's last event.
    pub async fn empties(&self) {
        for _ in 0..1000 {
            if self.fake.living().is_empty() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("sandboxes stay: {:?}", self.fake.living());
    }
}

fn service(data: &Path, fake: &Arc<Fake>, clock: &Later, slots: usize) -> (Service, Arc<dyn Store>) {
    let clock: Arc<dyn Clock> = Arc::new(clock.clone());
    let store: Arc<dyn Store> = Arc::new(Sqlite::open(data, Arc::clone(&clock)).unwrap());
    let pool = Pool::new(Trees::open(data).unwrap());
    let backends = Backends::only(Arc::clone(fake) as Arc<_>);
    let work_dirs = WorkDirs::new(data, Volumes::folders(data));
    let benches = bench::Maker::new(
        data,
        pool.clone(),
        backends,
        Arc::clone(&clock),
        Arc::clone(&store),
        work_dirs,
    );
    let benches = benches.unwrap();
    let mirror = Arc::new(Mirror::open(data, Arc::clone(&clock)).unwrap());
    let shop = Shop {
        store: Arc::clone(&store),
        benches,
        clock,
        hub: Hub::default(),
        host: "bed".into(),
        kill_at: KillAt::Never,
        stale_after: STALE_AFTER,
        lease: LEASE,
    };
    let service = Service::new(Arc::new(shop), pool, mirror, data.to_owned(), slots).unwrap();
    (service, store)
}

/// Code and stable reason of a refusal; each carries google.rpc.ErrorInfo of our domain.
pub fn why(status: &Status) -> (Code, String) {
    let info = status.get_details_error_info().expect("a refusal carries ErrorInfo");
    assert_eq!(info.domain, "exuvia");
    (status.code(), info.reason)
}
