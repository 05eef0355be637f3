//! Whom the border trusts outside: the roots of the system, and those that the operator adds.

use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;

/// No root could be found.
#[derive(Debug, thiserror::Error)]
pub enum BadRoots {
    #[error("this system has no trusted roots that can be read")]
    None,
    #[error("a root of the operator's is no certificate")]
    Extra(#[source] rustls::Error),
}

/// The roots that are trusted, and the certificates that they come from.
///
/// # Errors
/// There is none at all, or an extra one is broken.
pub fn system(extra: &[CertificateDer<'static>]) -> Result<(RootCertStore, Vec<CertificateDer<'static>>), BadRoots> {
    let mut roots = RootCertStore::empty();
    let found = rustls_native_certs::load_native_certs();
    for error in &found.errors {
        tracing::warn!(%error, "some of the system's roots cannot be read");
    }
    roots.add_parsable_certificates(found.certs.iter().cloned());
    for root in extra {
        roots.add(root.clone()).map_err(BadRoots::Extra)?;
    }
    match roots.is_empty() {
        true => Err(BadRoots::None),
        false => Ok((roots, [&found.certs, extra].concat())),
    }
}
