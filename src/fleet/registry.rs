//! All members: those that live, and for a while those that ended.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::OnceCell;

use super::Error;
use super::lease::Key;
use super::member::Member;
use super::state::State;
use crate::clock::Timestamp;
use crate::ids::SandboxId;

/// Ended members that are kept, and for how long.
const MOST_ENDED: usize = 1000;
const ENDED_AGE: Duration = Duration::from_secs(3600);

/// Those that ended are looked through once for so many that ended since.
const LOOKED_THROUGH: u32 = 64;

/// Which members are asked for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Query {
    /// Names of states, as [`state_name`] gives them; empty = all but ended ones.
    pub states: Vec<&'static str>,
    /// All must fit.
    pub labels: BTreeMap<String, String>,
    /// The last one of the page before.
    pub after: Option<(Timestamp, SandboxId)>,
    pub limit: usize,
}

/// What a state is called in queries.
pub(super) fn state_name(state: &State) -> &'static str {
    match state {
        State::Creating => "creating",
        State::Running => "running",
        State::Paused => "paused",
        State::Ending(_) => "ending",
        State::Ended(_) => "ended",
    }
}

#[derive(Debug, Default)]
pub(super) struct Registry {
    all: Mutex<All>,
}

#[derive(Debug, Default)]
struct All {
    members: HashMap<SandboxId, Arc<Member>>,
    keys: HashMap<String, Keyed>,
    ended_since: u32,
}

/// What an idempotency key stands for.
#[derive(Debug, Clone)]
pub(super) struct Keyed {
    body_hash: String,
    /// Filled once: who comes with the same key meanwhile waits for the first.
    pub made: Arc<OnceCell<SandboxId>>,
}

impl Registry {
    fn all(&self) -> MutexGuard<'_, All> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn add(&self, member: Arc<Member>) {
        self.all().members.insert(member.id.clone(), member);
    }

    /// # Errors
    /// [`Error::NotFound`].
    pub fn find(&self, id: &str) -> Result<Arc<Member>, Error> {
        let missing = || Error::NotFound(id.to_owned());
        let parsed: SandboxId = id.parse().map_err(|_| missing())?;
        self.all().members.get(&parsed).cloned().ok_or_else(missing)
    }

    /// What stands behind a key.
    ///
    /// # Errors
    /// [`Error::KeyReused`].
    pub fn keyed(&self, key: &Key) -> Result<Keyed, Error> {
        let mut all = self.all();
        let keyed = all.keys.entry(key.key.clone()).or_insert_with(|| Keyed {
            body_hash: key.body_hash.clone(),
            made: Arc::default(),
        });
        match keyed.body_hash == key.body_hash {
            true => Ok(keyed.clone()),
            false => Err(Error::KeyReused { key: key.key.clone() }),
        }
    }

    /// A key that an earlier server had given a sandbox for.
    pub fn remember(&self, key: &Key, id: &SandboxId) {
        let keyed = Keyed {
            body_hash: key.body_hash.clone(),
            made: Arc::new(OnceCell::new_with(Some(id.clone()))),
        };
        self.all().keys.insert(key.key.clone(), keyed);
    }

    /// Lets go of a key that came to nothing and that nobody waits for.
    pub fn forget_unused(&self, key: &Key) {
        let mut all = self.all();
        let is_unused = |keyed: &Keyed| keyed.made.get().is_none() && Arc::strong_count(&keyed.made) <= 2;
        if all.keys.get(&key.key).is_some_and(is_unused) {
            all.keys.remove(&key.key);
        }
    }

    pub fn members(&self) -> Vec<Arc<Member>> {
        self.all().members.values().cloned().collect()
    }

    /// Members that fit, newest first.
    pub fn list(&self, query: &Query) -> Vec<Arc<Member>> {
        let mut found = self.members();
        found.retain(|member| {
            let view = member.view.borrow();
            let fits_state = match query.states.is_empty() {
                true => !matches!(view.state, State::Ended(_)),
                false => query.states.contains(&state_name(&view.state)),
            };
            let has = |(name, value): (&String, &String)| member.facts.labels.get(name) == Some(value);
            let is_after = query.after.as_ref().is_none_or(|(at, id)| {
                let place = (member.facts.created_at, &member.id);
                place < (*at, id)
            });
            fits_state && is_after && query.labels.iter().all(has)
        });
        found.sort_by(|a, b| (b.facts.created_at, &b.id).cmp(&(a.facts.created_at, &a.id)));
        found.truncate(query.limit);
        found
    }

    /// One has ended: lets go, now and then, of members that ended long ago, and of their keys.
    pub fn prune(&self, now: Timestamp) {
        let mut all = self.all();
        all.ended_since += 1;
        if all.ended_since < LOOKED_THROUGH {
            return;
        }
        all.ended_since = 0;
        let mut ended: Vec<(Timestamp, SandboxId)> = Vec::new();
        for member in all.members.values() {
            if let State::Ended(end) = &member.view.borrow().state {
                ended.push((end.at, member.id.clone()));
            }
        }
        if ended.len() <= MOST_ENDED && ended.iter().all(|(at, _)| now.since(*at) < ENDED_AGE) {
            return;
        }
        ended.sort_by(|a, b| b.cmp(a));
        let old = |(n, (at, _)): &(usize, (Timestamp, SandboxId))| *n >= MOST_ENDED || now.since(*at) >= ENDED_AGE;
        for (_, (_, id)) in ended.into_iter().enumerate().filter(old) {
            all.members.remove(&id);
            all.keys.retain(|_, keyed| keyed.made.get() != Some(&id));
        }
    }
}
