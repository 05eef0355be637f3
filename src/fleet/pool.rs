//! Sandboxes made ahead: handed out once, never taken back.
//!
//! One task makes them, [`MAKERS`] at a time: at once while there are fewer than half of `min`, and up to `max` in quiet
//! moments, so that whoever has just taken one does not share the processor with the making of the next. A shape is what a
//! policy and an image make; who asks for just that gets a parked one, all others get a fresh one. Where the
//! image has Python, a process that waits for code is made ahead with the sandbox, and handed out with it.

use std::collections::{BTreeMap, VecDeque};
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Error;
use super::ask::Shape;
use super::code::{Ahead, fresh_by, warm};
use super::maker::{Made, Maker, blocking};
use super::nursery::Nursery;
use crate::ids::SandboxId;
use crate::policy::Policies;
use crate::sandbox::kernel::{self, Language, Warm};
use crate::sandbox::{ImageRef, Isolation, image};

/// Nothing was taken for so long: a quiet moment.
const QUIET: Duration = Duration::from_millis(50);
/// Made at a time: the making of one waits for the kernel about as long as it works.
const MAKERS: usize = 2;
/// After a sandbox that could not be made.
const PAUSE: Duration = Duration::from_secs(2);
/// Most sandboxes of one shape that may be kept.
const MOST: usize = 10_000;

/// How many sandboxes of a shape are kept: `POLICY[:IMAGE]=MIN..MAX`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stock {
    pub policy: String,
    /// `None` = the policy's.
    pub image: Option<ImageRef>,
    pub count: RangeInclusive<usize>,
}

/// Text that is no stock.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not of the form `POLICY[:IMAGE]=MIN..MAX` with MIN <= MAX, 1 <= MAX <= 10000")]
pub struct StockError(String);

impl FromStr for Stock {
    type Err = StockError;

    fn from_str(text: &str) -> Result<Self, StockError> {
        let parse = || {
            let (shape, count) = text.rsplit_once('=')?;
            let (policy, image) = match shape.split_once(':') {
                Some((policy, image)) => (policy, Some(image.parse().ok()?)),
                None => (shape, None),
            };
            let (min, max) = count.split_once("..").unwrap_or((count, count));
            let (min, max): (usize, usize) = (min.parse().ok()?, max.parse().ok()?);
            let is_fine = !policy.is_empty() && min <= max && (1..=MOST).contains(&max);
            is_fine.then(|| Self {
                policy: policy.to_owned(),
                image,
                count: min..=max,
            })
        };
        parse().ok_or_else(|| StockError(text.to_owned()))
    }
}

/// The parked sandboxes; clones share them.
#[derive(Debug, Clone)]
pub(super) struct WarmPool(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    shelves: Vec<Shelf>,
    taken: Notify,
}

/// The parked sandboxes of one shape, oldest first.
#[derive(Debug)]
struct Shelf {
    shape: Shape,
    count: RangeInclusive<usize>,
    state: Mutex<ShelfState>,
}

#[derive(Debug, Default)]
struct ShelfState {
    parked: VecDeque<Made>,
    in_making: usize,
    /// After one that could not be made.
    paused_until: Option<Instant>,
    last_taken: Option<Instant>,
    is_closed: bool,
}

impl Shelf {
    fn state(&self) -> MutexGuard<'_, ShelfState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WarmPool {
    /// A pool for these shapes, with nothing in it yet.
    ///
    /// # Errors
    /// For a policy that is not known, or that this host cannot keep.
    pub async fn new(stocks: &[Stock], maker: &Maker) -> Result<Self, Error> {
        let mut shelves: Vec<Shelf> = Vec::new();
        for stock in stocks {
            let policy = Policies::named(&stock.policy, maker.data_dir())?;
            let shape = Shape::of(&policy, stock.image.as_ref(), None, maker.backends(), maker.data_dir()).await?;
            if shelves.iter().any(|shelf| shelf.shape == shape) {
                return Err(Error::Invalid(format!(
                    "the pool of `{}` is one that was named before",
                    stock.policy
                )));
            }
            // What is taken in one go is to be made in one go.
            maker.work_dirs().expect(&shape.limits, stock.count.end() / 4)?;
            shelves.push(Shelf {
                shape,
                count: stock.count.clone(),
                state: Mutex::default(),
            });
        }
        let taken = Notify::new();
        Ok(Self(Arc::new(Inner { shelves, taken })))
    }

    /// A parked sandbox of this shape that lives, if there is one. The dead ones found on the way come back too, to be cleared.
    pub async fn take(&self, shape: &Shape) -> (Option<Made>, Vec<Made>) {
        let mut dead = Vec::new();
        let Some(shelf) = self.0.shelves.iter().find(|shelf| shelf.shape == *shape) else {
            return (None, dead);
        };
        loop {
            let parked = {
                let mut state = shelf.state();
                state.last_taken = Some(Instant::now());
                state.parked.pop_front()
            };
            self.0.taken.notify_one();
            match parked {
                None => return (None, dead),
                Some(made) if made.life.is_over() || wake(&made).await.is_err() => dead.push(made),
                Some(made) => return (Some(made), dead),
            }
        }
    }

    /// Keeps the pool filled until `stop`, then removes all that is parked.
    pub async fn keep(self, maker: Maker, nursery: Nursery, stop: CancellationToken) {
        let mut making = JoinSet::new();
        while !stop.is_cancelled() {
            let wait = loop {
                match self.next_wanted() {
                    Wanted::Now(at) if making.len() < MAKERS => {
                        let begun = self.begin(at);
                        let (maker, nursery) = (maker.clone(), nursery.clone());
                        making.spawn(async move { begun.run(&maker, &nursery).await });
                    }
                    // Goes on when one is made.
                    Wanted::Now(_) | Wanted::Nothing => break Duration::from_secs(86_400),
                    Wanted::In(time) => break time,
                }
            };
            tokio::select! {
                () = stop.cancelled() => {}
                () = self.0.taken.notified() => {}
                Some(_) = making.join_next() => {}
                () = tokio::time::sleep(wait) => {}
            }
        }
        // Each runs to its end: nothing is left half made.
        while making.join_next().await.is_some() {}
        self.empty().await;
    }

    fn next_wanted(&self) -> Wanted {
        let mut soonest: Option<Duration> = None;
        for (at, shelf) in self.0.shelves.iter().enumerate() {
            let state = shelf.state();
            let there = state.parked.len() + state.in_making;
            let quiet = state.last_taken.map_or(QUIET, |at| at.elapsed());
            let sooner = |left: Duration| Some(soonest.map_or(left, |soonest| soonest.min(left)));
            // One shape that cannot be made holds up no other.
            if let Some(pause) = state
                .paused_until
                .and_then(|end| end.checked_duration_since(Instant::now()))
                && !pause.is_zero()
            {
                if there < *shelf.count.end() {
                    soonest = sooner(pause);
                }
                continue;
            }
            if 2 * there < *shelf.count.start() || (there < *shelf.count.end() && quiet >= QUIET) {
                return Wanted::Now(at);
            }
            if there < *shelf.count.end() {
                let left = QUIET.saturating_sub(quiet).max(Duration::from_millis(1));
                soonest = sooner(left);
            }
        }
        soonest.map_or(Wanted::Nothing, Wanted::In)
    }

    fn begin(&self, at: usize) -> Begun {
        self.0.shelves[at].state().in_making += 1;
        Begun {
            pool: Arc::clone(&self.0),
            at,
        }
    }

    async fn empty(&self) {
        for shelf in &self.0.shelves {
            let parked = {
                let mut state = shelf.state();
                state.is_closed = true;
                std::mem::take(&mut state.parked)
            };
            futures::future::join_all(parked.into_iter().map(clear)).await;
        }
    }

    /// How many are parked, by shape in the order in which they were named.
    pub fn parked(&self) -> Vec<usize> {
        let shelves = self.0.shelves.iter();
        shelves.map(|shelf| shelf.state().parked.len()).collect()
    }
}

enum Wanted {
    /// One of this shelf.
    Now(usize),
    In(Duration),
    Nothing,
}

/// A sandbox that is being made; counted until it is on its shelf, or has failed.
struct Begun {
    pool: Arc<Inner>,
    at: usize,
}

impl Begun {
    async fn run(self, maker: &Maker, nursery: &Nursery) {
        let made = self.make(maker, nursery).await;
        let shelf = &self.pool.shelves[self.at];
        shelf.state().paused_until = made.is_err().then(|| Instant::now() + PAUSE);
        if let Err(error) = made {
            let error = crate::error::chain(&error);
            tracing::warn!(image = %shelf.shape.image, error, "no sandbox could be made ahead");
        }
    }

    async fn make(&self, maker: &Maker, nursery: &Nursery) -> Result<(), Error> {
        let shelf = &self.pool.shelves[self.at];
        let mut made = maker.make(SandboxId::random(), &shelf.shape, None).await?;
        let ready = async {
            made.warm = warm_up(&made, &shelf.shape, maker, nursery).await?;
            park(&made).await
        };
        if let Err(error) = ready.await {
            clear(made).await;
            return Err(error.into());
        }
        let late = {
            let mut state = shelf.state();
            match state.is_closed {
                false => {
                    state.parked.push_back(made);
                    None
                }
                true => Some(made),
            }
        };
        if let Some(made) = late {
            clear(made).await;
        }
        Ok(())
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        self.pool.shelves[self.at].state().in_making -= 1;
    }
}

/// A process that waits for code, where the image has Python.
async fn warm_up(
    made: &Made,
    shape: &Shape,
    maker: &Maker,
    nursery: &Nursery,
) -> Result<Option<(Warm, BTreeMap<String, String>)>, crate::sandbox::Error> {
    let fresh = fresh_by(shape.seccomp);
    let (image, data_dir) = (shape.image.clone(), maker.data_dir().to_owned());
    let env = blocking(move || image::environment(&image, &data_dir)).await?;
    let mould = match nursery.seed(made.sandbox.spec(), shape.backend, fresh).await {
        Some(seed) => nursery.wait_for(seed).await,
        None => None,
    };
    match warm(&made.sandbox, Language::Python, fresh, env.clone(), Ahead::Yes, mould).await {
        Ok(warm) => Ok(Some((warm, env))),
        Err(kernel::Error::Sandbox(error)) => Err(error),
        Err(error) => {
            tracing::debug!(image = %shape.image, %error, "a sandbox is made ahead without Python");
            Ok(None)
        }
    }
}

/// Whether a parked sandbox stands still: one with a kernel of its own takes processor time while it idles.
fn is_frozen_when_parked(made: &Made) -> bool {
    match made.sandbox.spec().isolation {
        Isolation::Container => false,
        Isolation::Gvisor | Isolation::Microvm => true,
    }
}

async fn park(made: &Made) -> Result<(), crate::sandbox::Error> {
    match is_frozen_when_parked(made) {
        true => made.sandbox.freeze().await,
        false => Ok(()),
    }
}

async fn wake(made: &Made) -> Result<(), crate::sandbox::Error> {
    match is_frozen_when_parked(made) {
        true => made.sandbox.thaw().await,
        false => Ok(()),
    }
}

pub(super) async fn clear(made: Made) {
    if let Err(error) = made.clear().await {
        let error = crate::error::chain(&error);
        tracing::error!(sandbox = %made.sandbox.id(), error, "a parked sandbox was not removed; the next start does it");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stock_is_read_as_it_is_written() {
        let stock = |policy: &str, image: Option<&str>, count| Stock {
            policy: policy.into(),
            image: image.map(|image| image.parse().unwrap()),
            count,
        };
        let good = [
            ("default=2..8", stock("default", None, 2..=8)),
            ("strict=3", stock("strict", None, 3..=3)),
            (
                "default:docker:python:3.13=0..1",
                stock("default", Some("docker:python:3.13"), 0..=1),
            ),
        ];
        for (text, stock) in good {
            assert_eq!(text.parse::<Stock>(), Ok(stock), "{text}");
        }
        for bad in [
            "",
            "default",
            "=1..2",
            "default=2..1",
            "default=0..0",
            "default=1..x",
            "default=1..10001",
        ] {
            assert_eq!(bad.parse::<Stock>(), Err(StockError(bad.to_owned())), "{bad}");
        }
    }
}
