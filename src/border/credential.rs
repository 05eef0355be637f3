//! A policy's credentials as the border takes them, with values that are fetched when they are used.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::Placeholders;
use crate::egress::credential::{Credential, CredentialSource, Fetched, Place, SessionToken, Unavailable};
use crate::policy::{Policy, network};
use crate::secret::Source;

/// So long the word of a program holds: a new value is used after this at the latest.
const FRESH: Duration = Duration::from_secs(30);

/// Those that are put in, each with its placeholder.
pub(super) fn credentials(policy: &Policy, placeholders: &Placeholders) -> Vec<Credential> {
    let all = policy.credentials().iter();
    all.filter_map(|credential| {
        let inject = credential.inject.as_ref()?;
        Some(Credential {
            name: credential.name.clone(),
            placeholder: placeholders.of(&credential.name)?.to_owned(),
            source: source(&credential.from),
            place: place(&inject.place),
            host: inject.host.clone(),
            port: inject.port,
            methods: inject.methods.clone(),
            paths: inject.paths.clone(),
        })
    })
    .collect()
}

fn place(place: &network::Place) -> Place {
    match place.clone() {
        network::Place::Bearer => Place::Bearer,
        network::Place::Basic { user } => Place::Basic { user },
        network::Place::Header { name, format } => Place::Header { name, format },
        network::Place::Query { name } => Place::Query { name },
        network::Place::SigV4 {
            access_key,
            session_token,
            region,
            service,
        } => Place::SigV4 {
            access_key,
            session_token: session_token.map(|token| SessionToken(source(&token))),
            region,
            service,
        },
    }
}

fn source(source: &Source) -> Arc<dyn CredentialSource> {
    match source {
        Source::Reference(reference) => Arc::new(reference.clone()),
        Source::Command { .. } => Arc::new(Program {
            source: source.clone(),
            known: Mutex::default(),
        }),
    }
}

/// A program that is not asked anew for each request.
#[derive(Debug)]
struct Program {
    source: Source,
    known: Mutex<Option<(Fetched, Instant)>>,
}

#[async_trait]
impl CredentialSource for Program {
    /// One asks, the others wait for its answer.
    async fn fetch(&self) -> Result<Fetched, Unavailable> {
        let mut known = self.known.lock().await;
        if let Some((fetched, at)) = &*known
            && at.elapsed() < FRESH
        {
            return Ok(fetched.clone());
        }
        let value = self.source.resolve().await.map_err(|error| Unavailable(error.into()))?;
        let fetched = Fetched { value, version: None };
        *known = Some((fetched.clone(), Instant::now()));
        Ok(fetched)
    }
}

#[cfg(test)]
mod tests {
    use secrecy::ExposeSecret;

    use super::*;

    /// A new value is used without a restart, and a program is not run for each request.
    #[tokio::test(start_paused = true)]
    async fn a_program_is_asked_again_after_a_while() {
        let directory = tempfile::tempdir().unwrap();
        let count = directory.path().join("count");
        std::fs::write(&count, "").unwrap();
        let program = directory.path().join("program");
        let text = format!("#!/bin/sh\nprintf x >> {0}\nwc -c < {0}\n", count.display());
        std::fs::write(&program, text).unwrap();
        std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
        let source = source(&format!("command:{}", program.display()).parse().unwrap());
        let value = async || source.fetch().await.unwrap().value.expose_secret().to_owned();
        tokio::time::resume();
        let (first, second) = (value().await, value().await);
        tokio::time::pause();
        tokio::time::advance(FRESH).await;
        tokio::time::resume();
        assert_eq!([first, second, value().await], ["1", "1", "2"]);
    }
}
