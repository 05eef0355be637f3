//! Credentials put in where they belong, and everything that the client sent in their place taken out.

use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::header::AUTHORIZATION;
use http::{HeaderValue, Request, Uri};
use secrecy::zeroize::Zeroizing;
use secrecy::{ExposeSecret, SecretString};

use super::forward;
use super::sigv4;
use crate::egress::border::Inner;
use crate::egress::credential::{Credential, Place};
use crate::egress::name::Host;
use crate::egress::reach::Passage;
use crate::egress::rules::Path;

/// What was put in, for the record.
#[derive(Default)]
pub(super) struct Injection {
    pub names: Option<String>,
    pub version: Option<String>,
}

fn about<'a>(inner: &'a Inner, passage: &'a Passage) -> impl Iterator<Item = &'a Credential> {
    let name = passage.host.name();
    inner
        .credentials
        .iter()
        .filter(move |one| name.is_some_and(|name| one.is_about(name, passage.port)))
}

/// The credentials that go into this request: one for each place, the first that is written.
pub(super) fn covering<'a>(inner: &'a Inner, passage: &'a Passage, method: &str, path: &Path) -> Vec<&'a Credential> {
    let mut found: Vec<&Credential> = Vec::new();
    for one in about(inner, passage).filter(|one| one.covers(method, path)) {
        let same_place = |other: &&Credential| match (&one.place, &other.place) {
            (Place::Query { name }, Place::Query { name: other }) => name == other,
            (one, other) => one.header().is_some() && one.header() == other.header(),
        };
        if !found.iter().any(same_place) {
            found.push(one);
        }
    }
    found
}

/// The credential whose placeholder stands somewhere else than in its own place of a request that it covers.
pub(super) fn leak<B>(inner: &Inner, request: &Request<B>, target: &str, covering: &[&Credential]) -> Option<String> {
    let leaks = &inner.leaks;
    if leaks.is_empty() {
        return None;
    }
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let in_path = leaks
        .find(path.as_bytes())
        .or_else(|| leaks.find(&unescaped(path)))
        .map(str::to_owned);
    let in_query = || {
        query.split('&').find_map(|pair| {
            let name = pair.split('=').next().unwrap_or_default();
            let own = covering
                .iter()
                .find(|one| matches!(&one.place, Place::Query { name: own } if own == name));
            leaks
                .find_other(&unescaped(pair), own.map(|one| one.name.as_str()))
                .map(str::to_owned)
        })
    };
    let in_headers = || {
        request.headers().iter().find_map(|(name, value)| {
            let own = covering.iter().find(|one| one.place.header().as_ref() == Some(name));
            leaks
                .find_other(value.as_bytes(), own.map(|one| one.name.as_str()))
                .map(str::to_owned)
        })
    };
    in_path.or_else(in_query).or_else(in_headers)
}

fn unescaped(text: &str) -> Vec<u8> {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while let Some(byte) = bytes.get(at) {
        let digits = bytes
            .get(at + 1..at + 3)
            .and_then(|digits| std::str::from_utf8(digits).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(value) if *byte == b'%' => {
                out.push(value);
                at += 3;
            }
            Some(_) | None => {
                out.push(*byte);
                at += 1;
            }
        }
    }
    out
}

/// Takes the client's own values out of every place that a credential has on this host; true where there is such a
/// credential, so that the answer has to be looked through.
pub(super) fn strip<B>(inner: &Inner, passage: &Passage, request: &mut Request<B>) -> bool {
    let mut secretive = false;
    for one in about(inner, passage) {
        secretive = true;
        if let Some(name) = one.place.header() {
            request.headers_mut().remove(name);
        }
        match &one.place {
            Place::Query { name } => set_query(request, name, None),
            Place::SigV4 { .. } => {
                request.headers_mut().remove("x-amz-security-token");
            }
            Place::Bearer | Place::Basic { .. } | Place::Header { .. } => {}
        }
    }
    if secretive {
        forward::ask_for_plain(request.headers_mut());
    }
    secretive
}

/// Puts the values in.
///
/// # Errors
/// One is not to be had, or does not fit: a sentence without the value.
pub(super) async fn put<B>(
    inner: &Arc<Inner>,
    covering: &[&Credential],
    passage: &Passage,
    request: &mut Request<B>,
) -> Result<Injection, String> {
    let mut injection = Injection::default();
    for one in covering {
        let fetched = one.source.fetch().await.map_err(|error| {
            tracing::warn!(credential = one.name, error = %crate::error::chain(&error), "a credential is not to be had");
            format!("credential `{}` is not to be had", one.name)
        })?;
        inner.mask.learn(&fetched.value);
        let misfit = || format!("credential `{}` does not fit into its place", one.name);
        let value = fetched.value.expose_secret();
        match &one.place {
            Place::Bearer => {
                set_header(request, AUTHORIZATION, &format_secret("Bearer ", value, "")).ok_or_else(misfit)?
            }
            Place::Basic { user } => {
                let pair = Zeroizing::new(format!("{user}:{value}"));
                let encoded = SecretString::from(STANDARD.encode(pair.as_bytes()));
                inner.mask.learn(&encoded);
                let text = format_secret("Basic ", encoded.expose_secret(), "");
                set_header(request, AUTHORIZATION, &text).ok_or_else(misfit)?;
            }
            Place::Header { name, format } => {
                let (before, after) = format.split_once("{}").unwrap_or((format, ""));
                set_header(request, name.clone(), &format_secret(before, value, after)).ok_or_else(misfit)?;
            }
            Place::Query { name } => set_query(request, name, Some(value)),
            Place::SigV4 {
                access_key,
                session_token,
                region,
                service,
            } => {
                let token = match session_token {
                    Some(token) => Some(token.0.fetch().await.map_err(|_| misfit())?.value),
                    None => None,
                };
                if let Some(token) = &token {
                    inner.mask.learn(token);
                }
                let Host::Name(host) = &passage.host else {
                    return Err(misfit());
                };
                let signer = sigv4::Signer {
                    access_key,
                    secret: value,
                    token: token.as_ref().map(ExposeSecret::expose_secret),
                    region,
                    service,
                };
                let authority = match passage.port {
                    443 => host.to_string(),
                    port => format!("{host}:{port}"),
                };
                signer
                    .sign(request, &authority, inner.clock.now())
                    .map_err(|reason| format!("credential `{}`: {reason}", one.name))?;
            }
        }
        let names = injection.names.get_or_insert_default();
        if !names.is_empty() {
            names.push_str(", ");
        }
        names.push_str(&one.name);
        injection.version = fetched.version.or(injection.version);
    }
    Ok(injection)
}

fn format_secret(before: &str, value: &str, after: &str) -> Zeroizing<String> {
    Zeroizing::new([before, value, after].concat())
}

fn set_header<B>(request: &mut Request<B>, name: http::HeaderName, text: &str) -> Option<()> {
    let mut value = HeaderValue::from_str(text).ok()?;
    // Not in logs, and not in the compression tables of HTTP/2.
    value.set_sensitive(true);
    request.headers_mut().insert(name, value);
    Some(())
}

/// Removes all parameters of this name, and sets one.
fn set_query<B>(request: &mut Request<B>, name: &str, value: Option<&str>) {
    let (path, query) = (
        request.uri().path().to_owned(),
        request.uri().query().unwrap_or_default().to_owned(),
    );
    let is_other = |pair: &&str| {
        let own = pair.split('=').next().unwrap_or_default();
        !pair.is_empty() && unescaped(own) != name.as_bytes() && own != name
    };
    let mut pairs: Vec<String> = query.split('&').filter(is_other).map(str::to_owned).collect();
    if let Some(value) = value {
        pairs.push(format!(
            "{}={}",
            sigv4::escaped(name, false),
            sigv4::escaped(value, false)
        ));
    }
    let target = match pairs.is_empty() {
        true => path,
        false => format!("{path}?{}", pairs.join("&")),
    };
    let mut parts = request.uri().clone().into_parts();
    parts.path_and_query = target.parse().ok();
    if let Ok(uri) = Uri::from_parts(parts) {
        *request.uri_mut() = uri;
    }
}
