//! The border of one sandbox, with its doors: it stands until it is closed or dropped.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use nix::sys::resource::{Resource, getrlimit};
use tokio::net::{TcpListener, UdpSocket};
use tokio::task::JoinSet;

use super::credential::credentials;
use super::log::{Denied, Entered, Log, Mark, Steps, Whose};
use super::namespace::{self, Doors, Trust};
use super::spent::Spent;
use super::{Borders, Error, OnAudit, Placeholders};
use crate::egress::ask::Nobody;
use crate::egress::budget::Budgets;
use crate::egress::journal::Journal;
use crate::egress::{Border, Door, Limits, Settings};
use crate::ids::RunId;
use crate::policy::Policy;
use crate::policy::network::Mode;
use crate::sandbox::Doorway;

/// How long the certificates of a border hold after its sandbox's time is over.
const MARGIN: Duration = Duration::from_secs(60 * 60);
/// The end of each denial.
pub const HOW_TO_ASK: &str = "the policy of this sandbox does not open it; whoever is responsible can add a rule to the policy \
                          (`[[network.allow]]`, see docs/network.md)";

/// The border of one sandbox.
#[derive(Debug)]
pub struct Post {
    border: Border,
    log: Arc<Log>,
    records: Arc<OnAudit>,
    steps: Steps,
    /// Whose budget it is on, until that has been told what was used.
    run: Mutex<Option<RunId>>,
    spent: Spent,
    /// Who serves the doors.
    serving: Mutex<JoinSet<()>>,
}

impl Borders {
    /// Opens the doors of a sandbox. Also one that had a border before, of a server that is dead: its programs find the same doors and
    /// a certificate that is new.
    ///
    /// # Errors
    /// Nothing is left open then.
    pub async fn open(
        &self,
        policy: &Policy,
        placeholders: &Placeholders,
        doorway: Doorway,
        whose: &Whose,
    ) -> Result<Post, Error> {
        let borders = self.clone();
        // Reads the roots and the addresses of this host.
        let outside = tokio::task::spawn_blocking(move || {
            let outside = borders.outside()?;
            let off_limits = outside.off_limits().map_err(Error::Doors)?;
            let parts = (
                Arc::clone(&outside.resolver),
                Arc::clone(&outside.dialer),
                Arc::clone(&outside.roots),
            );
            Ok::<_, Error>((parts, outside.bundle.clone(), off_limits))
        });
        let ((resolver, dialer, roots), bundle, off_limits) = outside.await.map_err(broken)??;
        let log = Arc::new(Log::new(self.records.of(whose)));
        let border = Border::new(Settings {
            rules: policy.network().compiled(),
            credentials: credentials(policy, placeholders),
            resolver,
            dialer,
            roots,
            budgets: Budgets {
                concurrent: policy
                    .network()
                    .budgets()
                    .concurrent
                    .min(share().map_err(Error::Doors)?),
                ..self.spent.left(whose.run.as_ref(), policy.network().budgets())
            },
            limits: Limits {
                authority_time: policy.limits().wall_time + MARGIN,
                ..Limits::default()
            },
            journal: Arc::clone(&log) as Arc<dyn Journal>,
            asker: Arc::new(Nobody),
            clock: Arc::clone(&self.clock),
            learn: policy.network().mode() == Mode::Learn,
            off_limits,
            how_to_ask: HOW_TO_ASK.to_owned(),
        })
        .map_err(Error::Border)?;
        let trust = Trust {
            certificate: border.certificate().to_owned(),
            roots: bundle,
        };
        let doors = tokio::task::spawn_blocking(move || namespace::furnish(doorway, trust));
        let doors = doors.await.map_err(broken)?.map_err(Error::Doors)?;
        let serving = serve(&border, doors).map_err(Error::Doors)?;
        Ok(Post {
            border,
            log,
            records: Arc::clone(&self.records),
            steps: whose.steps.clone(),
            run: Mutex::new(whose.run.clone()),
            spent: self.spent.clone(),
            serving: Mutex::new(serving),
        })
    }
}

/// Connections that one border may have: each takes two descriptors of the server, and one sandbox gets no more than an eighth of all.
fn share() -> std::io::Result<usize> {
    let (most, _) = getrlimit(Resource::RLIMIT_NOFILE)?;
    Ok(usize::try_from(most / 16).unwrap_or(usize::MAX))
}

fn broken(error: tokio::task::JoinError) -> Error {
    match error.try_into_panic() {
        Ok(panic) => std::panic::resume_unwind(panic),
        Err(error) => Error::Doors(std::io::Error::other(error)),
    }
}

fn serve(border: &Border, doors: Doors) -> std::io::Result<JoinSet<()>> {
    let (http, socks) = (TcpListener::from_std(doors.http)?, TcpListener::from_std(doors.socks)?);
    let (dns, stream) = (
        Arc::new(UdpSocket::from_std(doors.dns)?),
        TcpListener::from_std(doors.dns_stream)?,
    );
    let mut serving = JoinSet::new();
    let of = || border.clone();
    let (one, two, three, four) = (of(), of(), of(), of());
    serving.spawn(async move { one.serve_listener(Door::Http, http).await });
    serving.spawn(async move { two.serve_listener(Door::Socks, socks).await });
    serving.spawn(async move { three.serve_dns_udp(dns).await });
    serving.spawn(async move { four.serve_dns_listener(stream).await });
    Ok(serving)
}

impl Post {
    /// A step begins in the sandbox; what is decided until the end of this is its.
    pub fn enter(&self, step: u32) -> Entered {
        self.steps.enter(step)
    }

    pub fn mark(&self) -> Mark {
        self.log.mark()
    }

    /// What was refused since, each thing once.
    pub fn refused_since(&self, mark: Mark) -> Vec<Denied> {
        self.log.since(mark)
    }

    /// Closes the doors and cuts what is open; on return every decision is with the record.
    pub async fn close(&self) {
        let mut serving = std::mem::take(&mut *self.serving.lock().unwrap_or_else(PoisonError::into_inner));
        let serving = async { while serving.join_next().await.is_some() {} };
        tokio::join!(self.border.close(), serving);
        self.settle();
        self.records.settle().await;
    }

    /// Tells what was used, once.
    fn settle(&self) {
        let run = self.run.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(run) = run {
            self.spent.add(run, self.border.usage());
        }
    }
}

impl Drop for Post {
    fn drop(&mut self) {
        // Polled once it has told everything to end, which is all that can be done here.
        let _ = self.border.close().now_or_never();
        self.settle();
    }
}
