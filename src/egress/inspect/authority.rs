//! The border's own certificate authority: made for one run, good for hours, for the names that its rules can open and for
//! no other; its key is in memory alone.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, GeneralSubtree, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, NameConstraints, PKCS_ECDSA_P256_SHA256,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::sign::CertifiedKey;
use secrecy::zeroize::Zeroize;
use time::OffsetDateTime;

use crate::egress::border::Settings;
use crate::egress::name::HostName;
use crate::egress::rules::{Action, Target};

/// Leaves are remembered up to this many names.
const MOST_LEAVES: usize = 256;

pub(in crate::egress) struct Authority {
    issuer: Issuer<'static, Key>,
    pem: String,
    der: CertificateDer<'static>,
    /// All leaves share one key.
    leaf_key: Key,
    signer: Arc<dyn rustls::sign::SigningKey>,
    valid: (OffsetDateTime, OffsetDateTime),
    leaves: Mutex<HashMap<HostName, Arc<CertifiedKey>>>,
}

/// No certificate could be made.
#[derive(Debug, thiserror::Error)]
pub enum BadAuthority {
    #[error("a key or certificate could not be made")]
    Certificate(#[from] rcgen::Error),
    #[error("a TLS setting was refused")]
    Tls(#[from] rustls::Error),
}

/// A key that is wiped.
struct Key(KeyPair);

impl Drop for Key {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

impl rcgen::PublicKeyData for Key {
    fn der_bytes(&self) -> &[u8] {
        self.0.der_bytes()
    }

    fn algorithm(&self) -> &'static rcgen::SignatureAlgorithm {
        self.0.algorithm()
    }
}

impl rcgen::SigningKey for Key {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
        self.0.sign(message)
    }
}

impl Authority {
    pub fn new(settings: &Settings) -> Result<Self, BadAuthority> {
        let key = || KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map(Key);
        let (key, leaf_key) = (key()?, key()?);
        let now = settings.clock.now().0 / 1000;
        let at = |seconds: i64| OffsetDateTime::from_unix_timestamp(seconds).unwrap_or(OffsetDateTime::UNIX_EPOCH);
        // An hour of grace for clocks that are behind.
        let until = now.saturating_add_unsigned(settings.limits.authority_time.as_secs());
        let valid = (at(now - 3600), at(until));
        let mut params = CertificateParams::default();
        params.distinguished_name = named("exuvia egress, one run");
        (params.not_before, params.not_after) = valid;
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let allowed = settings.rules.iter().filter(|rule| rule.action != Action::Deny);
        let mut names: Vec<String> = allowed
            .filter_map(|rule| match &rule.target {
                Target::Host(pattern) => Some(pattern.base().to_string()),
                Target::Cidr(_) => None,
            })
            .collect();
        // Without any the constraint would be no constraint.
        names.push("none.invalid".to_owned());
        names.sort();
        names.dedup();
        params.name_constraints = Some(NameConstraints {
            permitted_subtrees: names.into_iter().map(GeneralSubtree::DnsName).collect(),
            excluded_subtrees: Vec::new(),
        });
        let certificate = params.self_signed(&key)?;
        let mut leaf_der = leaf_key.0.serialize_der();
        let signer = rustls::crypto::ring::sign::any_ecdsa_type(&PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(
            leaf_der.as_slice(),
        )));
        leaf_der.zeroize();
        Ok(Self {
            pem: certificate.pem(),
            der: certificate.der().clone(),
            issuer: Issuer::new(params, key),
            leaf_key,
            signer: signer?,
            valid,
            leaves: Mutex::default(),
        })
    }

    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// A certificate for this name and no other.
    pub fn leaf(&self, name: &HostName) -> Result<Arc<CertifiedKey>, BadAuthority> {
        let mut leaves = self.leaves.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = leaves.get(name) {
            return Ok(Arc::clone(known));
        }
        let mut params = CertificateParams::new(vec![name.to_string()])?;
        // A common name has at most 64 bytes; who looks at it finds the real name among the alternatives.
        params.distinguished_name = named("exuvia egress");
        (params.not_before, params.not_after) = self.valid;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        let certificate = params.signed_by(&self.leaf_key, &self.issuer)?;
        let chain = vec![certificate.der().clone(), self.der.clone()];
        let leaf = Arc::new(CertifiedKey::new(chain, Arc::clone(&self.signer)));
        if leaves.len() >= MOST_LEAVES {
            leaves.clear();
        }
        leaves.insert(name.clone(), Arc::clone(&leaf));
        Ok(leaf)
    }
}

fn named(text: &str) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, text);
    name
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authority").finish_non_exhaustive()
    }
}
