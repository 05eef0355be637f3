//! From a name to addresses, on the host, after a rule has matched. All answers are checked and kept for their time; what is
//! dialled is one of them, and nobody asks twice.

mod hickory;

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;

pub use hickory::{BadServers, Hickory};

use super::name::HostName;

/// Looks names up.
#[async_trait]
pub trait Resolve: Send + Sync + fmt::Debug {
    /// Follows aliases. No address at all is an error.
    ///
    /// # Errors
    /// There is no such name, or nobody answered.
    async fn resolve(&self, name: &HostName) -> Result<Resolved, Unresolved>;
}

/// All addresses of a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resolved {
    /// At least one.
    pub addresses: Vec<IpAddr>,
    /// How long they may be used.
    pub ttl: Duration,
}

#[derive(Debug, thiserror::Error)]
pub enum Unresolved {
    #[error("`{0}` has no address")]
    NoAddress(HostName),
    #[error("could not look up `{name}`")]
    Failed {
        name: HostName,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// Bounds of what is remembered.
const MOST_NAMES: usize = 4096;
const LONGEST: Duration = Duration::from_secs(300);
const SHORTEST: Duration = Duration::from_secs(1);
/// More answers than this are not looked at: all of them have to be checked.
const MOST_ADDRESSES: usize = 64;

/// Addresses, and until when they hold.
type Known = (Arc<[IpAddr]>, Instant);

/// A run's own memory of answers.
#[derive(Debug)]
pub(super) struct Cache {
    resolver: Arc<dyn Resolve>,
    known: Mutex<HashMap<HostName, Known>>,
}

impl Cache {
    pub fn new(resolver: Arc<dyn Resolve>) -> Self {
        let known = Mutex::default();
        Self { resolver, known }
    }

    pub async fn resolve(&self, name: &HostName) -> Result<Arc<[IpAddr]>, Unresolved> {
        if let Some((addresses, until)) = self.known.lock().unwrap_or_else(PoisonError::into_inner).get(name)
            && Instant::now() < *until
        {
            return Ok(Arc::clone(addresses));
        }
        let Resolved { addresses, ttl } = self.resolver.resolve(name).await?;
        if addresses.is_empty() {
            return Err(Unresolved::NoAddress(name.clone()));
        }
        if addresses.len() > MOST_ADDRESSES {
            let source = format!("it has {} addresses, more than {MOST_ADDRESSES}", addresses.len()).into();
            let name = name.clone();
            return Err(Unresolved::Failed { name, source });
        }
        let addresses: Arc<[IpAddr]> = addresses.into();
        let now = Instant::now();
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= MOST_NAMES {
            known.retain(|_, (_, until)| now < *until);
            // All of them alive: whichever comes first makes room.
            if known.len() >= MOST_NAMES
                && let Some(any) = known.keys().next().cloned()
            {
                known.remove(&any);
            }
        }
        known.insert(
            name.clone(),
            (Arc::clone(&addresses), now + ttl.clamp(SHORTEST, LONGEST)),
        );
        Ok(addresses)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[derive(Debug, Default)]
    struct Counting(AtomicUsize);

    #[async_trait]
    impl Resolve for Counting {
        async fn resolve(&self, name: &HostName) -> Result<Resolved, Unresolved> {
            let asked = self.0.fetch_add(1, Ordering::SeqCst);
            match name.as_str() {
                "none.example" => Err(Unresolved::NoAddress(name.clone())),
                "many.example" => Ok(Resolved {
                    addresses: vec![IpAddr::from([1, 1, 1, 1]); MOST_ADDRESSES + 1],
                    ttl: LONGEST,
                }),
                _ => Ok(Resolved {
                    addresses: vec![IpAddr::from([1, 1, 1, asked as u8])],
                    ttl: Duration::from_secs(60),
                }),
            }
        }
    }

    /// T20: a name that changes its mind is not asked again within its time.
    #[tokio::test(start_paused = true)]
    async fn an_answer_holds_for_its_time() {
        let resolver = Arc::new(Counting::default());
        let cache = Cache::new(Arc::clone(&resolver) as Arc<dyn Resolve>);
        let name = HostName::parse(b"a.example").unwrap();
        let first = cache.resolve(&name).await.unwrap();
        tokio::time::advance(Duration::from_secs(59)).await;
        assert_eq!(cache.resolve(&name).await.unwrap(), first);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_ne!(cache.resolve(&name).await.unwrap(), first);
        assert_eq!(resolver.0.load(Ordering::SeqCst), 2);
        for bad in ["none.example", "many.example"] {
            assert!(
                cache.resolve(&HostName::parse(bad.as_bytes()).unwrap()).await.is_err(),
                "{bad}"
            );
        }
        for n in 0..MOST_NAMES + 10 {
            let name = HostName::parse(format!("n{n}.example").as_bytes()).unwrap();
            cache.resolve(&name).await.unwrap();
        }
        assert_eq!(cache.known.lock().unwrap().len(), MOST_NAMES);
    }
}
