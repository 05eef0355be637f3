//! What commands find in their environment: where the doors are, whom to trust, and the placeholders.

use std::collections::BTreeMap;

use super::namespace::{BUNDLE, CERTIFICATE};
use super::{HTTP, Placeholders};
use crate::policy::Policy;
use crate::policy::network::Mode;

/// Tools read one, the other, or either first.
const PROXY: [&str; 3] = ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"];
/// What stays within the sandbox.
const NEAR: &str = "localhost,127.0.0.1,::1";
/// Variables that hold a bundle of roots to trust in place of the tool's own: openssl and what is built on it; requests and
/// pip; git; cargo; curl; the AWS tools; Deno.
const BUNDLES: [&str; 8] = [
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "PIP_CERT",
    "GIT_SSL_CAINFO",
    "CARGO_HTTP_CAINFO",
    "CURL_CA_BUNDLE",
    "AWS_CA_BUNDLE",
    "DENO_CERT",
];

/// The variables of a sandbox with this policy; none where it has no network.
pub fn variables(policy: &Policy, placeholders: &Placeholders) -> BTreeMap<String, String> {
    match policy.network().mode() {
        Mode::None => return BTreeMap::new(),
        Mode::Proxy | Mode::Learn => {}
    }
    let mut all = BTreeMap::new();
    for name in PROXY {
        for name in [name.to_owned(), name.to_ascii_lowercase()] {
            all.insert(name, format!("http://{HTTP}"));
        }
    }
    for name in ["NO_PROXY", "no_proxy"] {
        all.insert(name.to_owned(), NEAR.to_owned());
    }
    for name in BUNDLES {
        all.insert(name.to_owned(), BUNDLE.to_owned());
    }
    // In addition to its own.
    all.insert("NODE_EXTRA_CA_CERTS".to_owned(), CERTIFICATE.to_owned());
    // Node's `fetch` takes no notice of a proxy without.
    all.insert("NODE_USE_ENV_PROXY".to_owned(), "1".to_owned());
    for credential in policy.credentials() {
        if let (Some(variable), Some(placeholder)) = (&credential.variable, placeholders.of(&credential.name)) {
            all.insert(variable.clone(), placeholder.to_owned());
        }
    }
    all
}
