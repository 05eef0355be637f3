//! One conversation with a registry: requests with retries, answers within bounds.

use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use futures::StreamExt;
use oci_spec::distribution::Reference;
use reqwest::header::{ACCEPT, HeaderMap, RANGE, RETRY_AFTER, WWW_AUTHENTICATE};
use reqwest::redirect::Policy;
use reqwest::{Response, StatusCode, Url};
use tokio::io::{AsyncSeekExt, AsyncWriteExt};
use tokio::sync::Mutex;

use super::auth::{self, Credentials, Grant};
use super::{Error, Options};
use crate::sandbox::image::digest::Hasher;
use crate::sandbox::image::manifest::{self, Place};
use crate::sandbox::image::{self, Bounds, Digest, Job, Progress};

/// Longest wait that a registry can ask for.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
const REDIRECTS: usize = 5;
/// An answer of a token service, in bytes.
const TOKEN: u64 = 64 << 10;

pub(super) struct Session<'a> {
    http: reqwest::Client,
    /// As it is written in the reference.
    registry: String,
    /// Of the repository, `…/v2/REPOSITORY/`.
    base: Url,
    scope: String,
    credentials: Option<Credentials>,
    grant: Mutex<Grant>,
    options: &'a Options,
    job: &'a Job,
}

/// What one try came to.
enum Failure {
    /// May go better next time; the registry may say when.
    Again(Error, Option<Duration>),
    Final(image::Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Final(error.into())
    }
}

impl<'a> Session<'a> {
    pub async fn open(reference: &Reference, options: &'a Options, job: &'a Job) -> Result<Self, Error> {
        let registry = reference.registry().to_owned();
        let address = match reference.resolve_registry() {
            "index.docker.io" => "registry-1.docker.io",
            other => other,
        };
        let scheme = if options.plain_http { "http" } else { "https" };
        let base = format!("{scheme}://{address}/v2/{}/", reference.repository());
        let base = Url::parse(&base).map_err(|error| Error::Reference {
            text: reference.to_string(),
            why: error.to_string(),
        })?;
        if options.plain_http && !is_loopback(&base) {
            return Err(Error::PlainHttp(registry));
        }
        // Once for the whole process; whoever comes second finds it in place.
        if rustls::crypto::CryptoProvider::get_default().is_none() {
            let _ = rustls::crypto::ring::default_provider().install_default();
        }
        let plain = options.plain_http;
        let mut builder = reqwest::Client::builder()
            .user_agent(concat!("exuvia/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(options.patience.connect)
            .redirect(Policy::custom(move |attempt| {
                if attempt.previous().len() > REDIRECTS {
                    attempt.error("it redirects in a circle")
                } else if is_fit(attempt.url(), plain) {
                    attempt.follow()
                } else {
                    attempt.error("it redirects to where there is no TLS")
                }
            }));
        if plain {
            // No TLS will be spoken.
            builder = builder.tls_certs_only([]);
        } else if let Some(path) = &options.authorities {
            builder = builder.tls_certs_merge(authorities(path)?);
        }
        if is_loopback(&base) {
            // No proxy is asked for what is on this host.
            builder = builder.no_proxy();
        }
        let http = builder.build().map_err(|error| Error::Transport {
            registry: registry.clone(),
            what: "a client".to_owned(),
            reason: crate::error::chain(&error),
        })?;
        Ok(Self {
            credentials: options.login.credentials(&registry)?,
            scope: format!("repository:{}:pull", reference.repository()),
            http,
            registry,
            base,
            grant: Mutex::default(),
            options,
            job,
        })
    }

    /// A manifest or index by tag or digest, and the digest of what came.
    pub async fn manifest(&self, name: &str) -> Result<(Vec<u8>, Digest), image::Error> {
        let what = format!("manifest `{name}`");
        let url = self.url(&format!("manifests/{name}"))?;
        let (bytes, headers) = self.document(&url, &what, Bounds::DOCUMENT).await?;
        let digest = Digest::of(&bytes);
        if let Some(told) = headers.get("docker-content-digest").and_then(|told| told.to_str().ok())
            && let Ok(told) = told.parse::<Digest>()
        {
            told.check("the manifest", digest.clone())?;
        }
        Ok((bytes, digest))
    }

    /// A configuration; its address is checked by who knows what it is for.
    pub async fn config(&self, place: &Place) -> Result<Vec<u8>, image::Error> {
        let url = self.url(&format!("blobs/{}", place.digest))?;
        Ok(self.document(&url, "the image's configuration", place.size).await?.0)
    }

    fn url(&self, path: &str) -> Result<Url, Error> {
        self.base.join(path).map_err(|error| Error::Reference {
            text: path.to_owned(),
            why: error.to_string(),
        })
    }

    async fn document(&self, url: &Url, what: &str, most: u64) -> Result<(Vec<u8>, HeaderMap), image::Error> {
        self.persistently(what, async || {
            let response = self.get(url, what, 0).await?;
            let headers = response.headers().clone();
            let mut bytes = Vec::new();
            let mut pieces = response.bytes_stream();
            while let Some(piece) = self.next(&mut pieces, what).await? {
                if bytes.len() as u64 + piece.len() as u64 > most {
                    return Err(self.too_much(what, most).into());
                }
                bytes.extend_from_slice(&piece);
            }
            Ok((bytes, headers))
        })
        .await
    }

    /// Fetches a layer into a file. What came before a break is kept, and the rest asked for.
    pub async fn layer(&self, layer: usize, layers: usize, place: &Place, into: &Path) -> Result<(), image::Error> {
        let what = format!("layer `{}`", place.digest);
        let url = self.url(&format!("blobs/{}", place.digest))?;
        let failed = image::Error::store("write a layer");
        let mut file = match tokio::fs::File::create_new(into).await {
            Ok(file) => file,
            Err(error) => return Err(failed(error)),
        };
        let state = Mutex::new((Hasher::new(), 0_u64));
        let file = Mutex::new(&mut file);
        let result: Result<(), image::Error> = self
            .persistently(&what, async || {
                let mut state = state.lock().await;
                let mut file = file.lock().await;
                let (hasher, got) = &mut *state;
                let failed = |error| Failure::Final(image::Error::store("write a layer")(error));
                if *got < place.size || place.size == 0 {
                    let response = self.get(&url, &what, *got).await?;
                    if *got > 0 && response.status() != StatusCode::PARTIAL_CONTENT {
                        // It begins anew, and so do we.
                        (*hasher, *got) = (Hasher::new(), 0);
                        file.set_len(0).await.map_err(failed)?;
                        file.rewind().await.map_err(failed)?;
                    }
                    let mut pieces = response.bytes_stream();
                    while let Some(piece) = self.next(&mut pieces, &what).await? {
                        if *got + piece.len() as u64 > place.size {
                            return Err(self.too_much(&what, place.size).into());
                        }
                        file.write_all(&piece).await.map_err(failed)?;
                        hasher.update(&piece);
                        *got += piece.len() as u64;
                        self.job.tell(Progress::Fetching {
                            layer,
                            layers,
                            bytes: *got,
                            of: place.size,
                        });
                    }
                }
                if *got < place.size {
                    return Err(Failure::Again(self.transport(&what, "it breaks off".to_owned()), None));
                }
                file.flush().await.map_err(failed)?;
                Ok(())
            })
            .await;
        result?;
        let (hasher, _) = state.into_inner();
        place.digest.check(what, hasher.finish())
    }

    /// Tries again what may go better next time.
    async fn persistently<T>(
        &self,
        what: &str,
        attempt: impl AsyncFn() -> Result<T, Failure>,
    ) -> Result<T, image::Error> {
        let patience = &self.options.patience;
        let mut pause = patience.pause;
        for left in (0..patience.attempts).rev() {
            match attempt().await {
                Ok(got) => return Ok(got),
                Err(Failure::Final(error)) => return Err(error),
                Err(Failure::Again(error, _)) if left == 0 => return Err(error.into()),
                Err(Failure::Again(error, asked)) => {
                    self.job.tell(Progress::Retrying {
                        what: what.to_owned(),
                        why: error.to_string(),
                    });
                    tokio::time::sleep(asked.map_or(pause, |asked| asked.min(LONGEST_PAUSE))).await;
                    pause = pause.saturating_mul(2).min(LONGEST_PAUSE);
                }
            }
        }
        Err(self.transport(what, "no try is allowed".to_owned()).into())
    }

    /// A good answer, from the byte `from` on; asks for a way in at most once.
    async fn get(&self, url: &Url, what: &str, from: u64) -> Result<Response, Failure> {
        let granted = self.grant.lock().await.clone();
        let response = self.send(url, what, from, &granted).await?;
        if response.status() != StatusCode::UNAUTHORIZED {
            return self.judged(response, what);
        }
        let mut grant = self.grant.lock().await;
        // Another layer may have asked meanwhile.
        if *grant == granted {
            *grant = self.ask_in(&response, what).await?;
        }
        let granted = grant.clone();
        drop(grant);
        let response = self.send(url, what, from, &granted).await?;
        self.judged(response, what)
    }

    async fn send(&self, url: &Url, what: &str, from: u64, grant: &Grant) -> Result<Response, Failure> {
        let mut request = self.http.get(url.clone()).header(ACCEPT, manifest::accepted());
        if from > 0 {
            request = request.header(RANGE, format!("bytes={from}-"));
        }
        self.timely(what, grant.apply(request).send()).await
    }

    /// An answer's head, or the next piece of it, in time.
    async fn timely<T>(&self, what: &str, wait: impl Future<Output = reqwest::Result<T>>) -> Result<T, Failure> {
        let after = self.options.patience.idle;
        match tokio::time::timeout(after, wait).await {
            Ok(Ok(got)) => Ok(got),
            Ok(Err(error)) if let Some(reason) = distrust(&error) => {
                let registry = self.registry.clone();
                Err(Error::Certificate { registry, reason }.into())
            }
            Ok(Err(error)) if error.is_redirect() || error.is_builder() => {
                Err(self.transport(what, crate::error::chain(&error)).into())
            }
            Ok(Err(error)) => Err(Failure::Again(self.transport(what, crate::error::chain(&error)), None)),
            Err(_) => {
                let stalled = Error::Stalled {
                    registry: self.registry.clone(),
                    what: what.to_owned(),
                    after,
                };
                Err(Failure::Again(stalled, None))
            }
        }
    }

    async fn next(
        &self,
        pieces: &mut (impl futures::Stream<Item = reqwest::Result<bytes::Bytes>> + Unpin),
        what: &str,
    ) -> Result<Option<bytes::Bytes>, Failure> {
        self.timely(what, async { pieces.next().await.transpose() }).await
    }

    fn judged(&self, response: Response, what: &str) -> Result<Response, Failure> {
        let (registry, what) = (self.registry.clone(), what.to_owned());
        let status = response.status();
        match status.as_u16() {
            200 | 206 => Ok(response),
            401 | 403 => Err(Error::Denied {
                registry,
                what,
                status: status.as_u16(),
            }
            .into()),
            404 => Err(Error::NotFound { registry, what }.into()),
            code => {
                let error = Error::Status {
                    registry,
                    what,
                    status: code,
                };
                if matches!(code, 408 | 429 | 500 | 502 | 503 | 504) {
                    let wait = response
                        .headers()
                        .get(RETRY_AFTER)
                        .and_then(|wait| wait.to_str().ok()?.parse().ok());
                    Err(Failure::Again(error, wait.map(Duration::from_secs)))
                } else {
                    Err(error.into())
                }
            }
        }
    }

    /// What the registry's challenge asks for.
    async fn ask_in(&self, response: &Response, what: &str) -> Result<Grant, Failure> {
        let challenges = response.headers().get_all(WWW_AUTHENTICATE).iter();
        let challenges: Vec<&str> = challenges.filter_map(|challenge| challenge.to_str().ok()).collect();
        let nonsense = |why: String| Error::Challenge {
            registry: self.registry.clone(),
            why,
        };
        let wanted = auth::wanted(&challenges).map_err(nonsense)?;
        let service = match (wanted, &self.credentials) {
            (_, Some(Credentials::Token(token))) => return Ok(Grant::Bearer(token.clone())),
            (auth::Wanted::Basic, Some(Credentials::Password(name, password))) => {
                return Ok(Grant::Basic(name.clone(), password.clone()));
            }
            (auth::Wanted::Basic, None) => {
                let denied = Error::Denied {
                    registry: self.registry.clone(),
                    what: what.to_owned(),
                    status: 401,
                };
                return Err(denied.into());
            }
            (auth::Wanted::Bearer(service), _) => service,
        };
        let mut url = Url::parse(&service.realm).map_err(|error| nonsense(error.to_string()))?;
        if !is_fit(&url, self.options.plain_http) {
            return Err(nonsense(format!("its token service `{}` has no TLS", service.realm)).into());
        }
        url.query_pairs_mut().append_pair("scope", &self.scope);
        if let Some(name) = &service.service {
            url.query_pairs_mut().append_pair("service", name);
        }
        let mut request = self.http.get(url);
        if let Some(Credentials::Password(name, password)) = &self.credentials {
            request = Grant::Basic(name.clone(), password.clone()).apply(request);
        }
        let what = format!("a token for {what}");
        let response = self.timely(&what, request.send()).await?;
        let response = self.judged(response, &what)?;
        let mut bytes = Vec::new();
        let mut pieces = response.bytes_stream();
        while let Some(piece) = self.next(&mut pieces, &what).await? {
            if bytes.len() as u64 + piece.len() as u64 > TOKEN {
                return Err(self.too_much(&what, TOKEN).into());
            }
            bytes.extend_from_slice(&piece);
        }
        Ok(auth::token(&bytes).map_err(nonsense)?)
    }

    fn transport(&self, what: &str, reason: String) -> Error {
        Error::Transport {
            registry: self.registry.clone(),
            what: what.to_owned(),
            reason,
        }
    }

    fn too_much(&self, what: &str, limit: u64) -> Error {
        Error::TooMuch {
            registry: self.registry.clone(),
            what: what.to_owned(),
            limit,
        }
    }
}

/// The certificates in a file of PEM.
fn authorities(path: &Path) -> Result<Vec<reqwest::Certificate>, Error> {
    let useless = |why: String| Error::Authority {
        path: path.to_owned(),
        why,
    };
    let bytes = std::fs::read(path).map_err(|error| useless(error.to_string()))?;
    let found = reqwest::Certificate::from_pem_bundle(&bytes).map_err(|error| useless(crate::error::chain(&error)))?;
    match found.is_empty() {
        true => Err(useless("there is none in it".to_owned())),
        false => Ok(found),
    }
}

/// Why the other side's certificate was refused, if that is what went wrong: it goes no better next time.
fn distrust(error: &(dyn std::error::Error + 'static)) -> Option<String> {
    if let Some(rustls::Error::InvalidCertificate(why)) = error.downcast_ref() {
        return Some(why.to_string());
    }
    // What an I/O error was made of is no source of it.
    let held = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
    match held {
        Some(held) => distrust(held),
        None => error.source().and_then(distrust),
    }
}

/// TLS, or loopback where that was allowed.
fn is_fit(url: &Url, plain_http: bool) -> bool {
    url.scheme() == "https" || plain_http && is_loopback(url)
}

fn is_loopback(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default();
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || bare.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}
