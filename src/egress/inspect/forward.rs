//! Which headers go on. What belongs to one connection stays there, by this list and by nothing that the client nominates:
//! a `Connection: authorization` takes nothing away.

use http::header::{ACCEPT_ENCODING, CONNECTION, CONTENT_ENCODING, HOST, TE, UPGRADE};
use http::uri::{Authority, Scheme};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Uri, Version};

use crate::egress::name::Host;

const OF_THE_CONNECTION: [&str; 9] = [
    "connection",
    "keep-alive",
    "proxy-connection",
    "proxy-authorization",
    "proxy-authenticate",
    "http2-settings",
    "transfer-encoding",
    "upgrade",
    "expect",
];

pub(super) fn wants_websocket(headers: &HeaderMap) -> bool {
    headers
        .get(UPGRADE)
        .is_some_and(|to| to.as_bytes().eq_ignore_ascii_case(b"websocket"))
}

/// Of a request.
pub(super) fn strip(headers: &mut HeaderMap, version: Version) {
    let trailers = version == Version::HTTP_2 && headers.get(TE).is_some_and(|te| te == "trailers");
    for name in OF_THE_CONNECTION {
        headers.remove(name);
    }
    headers.remove(TE);
    // gRPC needs it, and HTTP/2 allows this one value.
    if trailers {
        headers.insert(TE, HeaderValue::from_static("trailers"));
    }
}

/// Of an answer; `Alt-Svc` would only send the client to where there is no way.
pub(super) fn strip_answer(headers: &mut HeaderMap) {
    for name in OF_THE_CONNECTION.into_iter().chain(["alt-svc"]) {
        headers.remove(name);
    }
}

/// Asks for an answer in which a secret could be seen: unencoded, whole.
pub(super) fn ask_for_plain(headers: &mut HeaderMap) {
    headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    for name in ["range", "if-range", "sec-websocket-extensions", "grpc-accept-encoding"] {
        headers.remove(name);
    }
}

/// The encoding of an answer that nobody can look into.
pub(super) fn hiding_encoding(headers: &HeaderMap) -> Option<String> {
    let names = [
        CONTENT_ENCODING,
        HeaderName::from_static("grpc-encoding"),
        HeaderName::from_static("sec-websocket-extensions"),
    ];
    let mut values = names.iter().flat_map(|name| headers.get_all(name));
    values
        .find(|value| !value.as_bytes().eq_ignore_ascii_case(b"identity") && !value.is_empty())
        .map(|value| crate::egress::journal::shown(value.as_bytes(), 40))
}

/// Puts the one name that was judged where the next server looks for it.
pub(super) fn address<B>(request: &mut Request<B>, host: &Host, port: u16, tls: bool, h2: bool, websocket: bool) {
    let name = match host {
        Host::Address(std::net::IpAddr::V6(address)) => format!("[{address}]"),
        Host::Address(_) | Host::Name(_) => host.to_string(),
    };
    let name = match (port, tls) {
        (443, true) | (80, false) => name,
        (port, _) => format!("{name}:{port}"),
    };
    let target = request.uri().path_and_query().cloned();
    request.headers_mut().remove(HOST);
    if h2 {
        let mut parts = http::uri::Parts::default();
        parts.scheme = Some(if tls { Scheme::HTTPS } else { Scheme::HTTP });
        parts.authority = name.parse::<Authority>().ok();
        parts.path_and_query = target.or_else(|| "/".parse().ok());
        *request.uri_mut() = Uri::from_parts(parts).unwrap_or_default();
        *request.version_mut() = Version::HTTP_2;
        return;
    }
    *request.uri_mut() = target.map_or_else(Uri::default, Uri::from);
    *request.version_mut() = Version::HTTP_11;
    if let Ok(value) = HeaderValue::from_str(&name) {
        request.headers_mut().insert(HOST, value);
    }
    if websocket {
        request
            .headers_mut()
            .insert(CONNECTION, HeaderValue::from_static("Upgrade"));
        request
            .headers_mut()
            .insert(UPGRADE, HeaderValue::from_static("websocket"));
    }
}
