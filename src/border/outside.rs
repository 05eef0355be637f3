//! The operator's side of the border: who is asked for names, whom it trusts, and through what it dials. No task can change any
//! of this.

use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ipnet::IpNet;
use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use secrecy::SecretString;

use crate::egress::dial::{Dial, Direct, Naming, Through};
use crate::egress::resolve::{BadServers, Hickory, Resolve};
use crate::egress::roots::{self, BadRoots};
use crate::secret::{self, CredentialRef};

/// What the operator says about the network that sandboxes may be let into.
#[derive(Debug, Clone, Default, PartialEq, clap::Args)]
pub struct Operator {
    /// Name server that is asked for the hosts that sandboxes may reach; may be repeated [default: this host's].
    #[arg(
        long = "egress-resolver",
        env = "EXUVIA_EGRESS_RESOLVER",
        value_delimiter = ',',
        value_name = "ADDRESS:PORT"
    )]
    pub resolvers: Vec<SocketAddr>,
    /// File of certificates (PEM) that are trusted besides this host's, by the border and in sandboxes; may be repeated.
    #[arg(
        long = "egress-roots",
        env = "EXUVIA_EGRESS_ROOTS",
        value_delimiter = ',',
        value_name = "FILE"
    )]
    pub roots: Vec<PathBuf>,
    /// Proxy (HTTP CONNECT) through which all that leaves goes.
    #[arg(long = "egress-proxy", env = "EXUVIA_EGRESS_PROXY", value_name = "ADDRESS:PORT")]
    pub proxy: Option<SocketAddr>,
    /// Where `USER:PASSWORD` for that proxy is: `env:NAME` or `file:/PATH`.
    #[arg(
        long = "egress-proxy-credential",
        env = "EXUVIA_EGRESS_PROXY_CREDENTIAL",
        requires = "proxy",
        value_name = "REF"
    )]
    pub proxy_credential: Option<String>,
    /// Give that proxy the name and not the address that was checked: it looks names up itself, and answers for where they lead.
    #[arg(long = "egress-proxy-names", env = "EXUVIA_EGRESS_PROXY_NAMES", requires = "proxy")]
    pub proxy_names: bool,
    /// Addresses that no policy opens; may be repeated. This host's own are always among them.
    #[arg(
        long = "egress-off-limits",
        env = "EXUVIA_EGRESS_OFF_LIMITS",
        value_delimiter = ',',
        value_name = "CIDR"
    )]
    pub off_limits: Vec<IpNet>,
}

/// What the operator said cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum BadOutside {
    #[error("no name server for the border")]
    Servers(#[from] BadServers),
    #[error(transparent)]
    Roots(#[from] BadRoots),
    #[error("the certificates in `{path}` cannot be used: {reason}")]
    File { path: PathBuf, reason: String },
    #[error("the credential of the egress proxy is not to be had")]
    Credential(#[from] secret::Error),
}

/// The outside as all borders of a server share it.
#[derive(Debug)]
pub(super) struct Outside {
    pub resolver: Arc<dyn Resolve>,
    pub dialer: Arc<dyn Dial>,
    pub roots: Arc<RootCertStore>,
    /// The same, as PEM.
    pub bundle: String,
    off_limits: Vec<IpNet>,
}

impl Outside {
    pub fn new(operator: &Operator) -> Result<Self, BadOutside> {
        let resolver = match operator.resolvers.as_slice() {
            [] => Hickory::system()?,
            servers => Hickory::with_servers(servers)?,
        };
        let dialer: Arc<dyn Dial> = match operator.proxy {
            None => Arc::new(Direct::default()),
            Some(proxy) => Arc::new(Through {
                proxy,
                basic: basic(operator.proxy_credential.as_deref())?,
                naming: match operator.proxy_names {
                    true => Naming::Name,
                    false => Naming::Address,
                },
                timeout: Direct::default().timeout,
            }),
        };
        let mut extra = Vec::new();
        for path in &operator.roots {
            let bad = |reason: String| BadOutside::File {
                path: path.clone(),
                reason,
            };
            let text = fs::read(path).map_err(|error| bad(error.to_string()))?;
            let found = CertificateDer::pem_slice_iter(&text).collect::<Result<Vec<_>, _>>();
            match found {
                Ok(found) if !found.is_empty() => extra.extend(found),
                Ok(_) => return Err(bad("there are none in it".to_owned())),
                Err(error) => return Err(bad(error.to_string())),
            }
        }
        let (roots, certificates) = roots::system(&extra)?;
        Ok(Self {
            resolver: Arc::new(resolver),
            dialer,
            roots: Arc::new(roots),
            bundle: certificates.iter().map(pem).collect(),
            off_limits: operator.off_limits.clone(),
        })
    }

    /// What is never dialled: what the operator says, and the addresses that this host has now.
    pub fn off_limits(&self) -> io::Result<Vec<IpNet>> {
        let own = nix::ifaddrs::getifaddrs()?.filter_map(|interface| {
            let address = interface.address?;
            let v4 = address.as_sockaddr_in().map(|found| IpAddr::from(found.ip()));
            let v6 = address.as_sockaddr_in6().map(|found| IpAddr::from(found.ip()));
            v4.or(v6).map(IpNet::from)
        });
        Ok(self.off_limits.iter().copied().chain(own).collect())
    }
}

fn basic(reference: Option<&str>) -> Result<Option<SecretString>, secret::Error> {
    let reference: Option<CredentialRef> = reference.map(str::parse).transpose()?;
    reference.map(|reference| reference.resolve()).transpose()
}

/// RFC 7468.
fn pem(certificate: &CertificateDer<'_>) -> String {
    let text = STANDARD.encode(certificate);
    let mut pem = "-----BEGIN CERTIFICATE-----\n".to_owned();
    for line in text.as_bytes().chunks(64) {
        pem.extend(line.iter().map(|byte| char::from(*byte)));
        pem.push('\n');
    }
    pem + "-----END CERTIFICATE-----\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_is_written_as_it_is_read() {
        let made = rcgen::generate_simple_self_signed(["a.example".to_owned()]).unwrap();
        let text = pem(made.cert.der());
        let read: Vec<CertificateDer<'_>> = CertificateDer::pem_slice_iter(text.as_bytes())
            .map(Result::unwrap)
            .collect();
        assert_eq!(read, [made.cert.der().clone()]);
    }

    #[test]
    fn what_cannot_be_used_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let empty = directory.path().join("empty.pem");
        fs::write(&empty, "").unwrap();
        let with = |roots: PathBuf| Operator {
            roots: vec![roots],
            resolvers: vec!["127.0.0.1:53".parse().unwrap()],
            ..Operator::default()
        };
        let error = Outside::new(&with(empty.clone())).unwrap_err().to_string();
        assert_eq!(
            error,
            format!(
                "the certificates in `{}` cannot be used: there are none in it",
                empty.display()
            )
        );
        assert!(Outside::new(&with("/no/such".into())).is_err());
    }

    /// The host's own addresses are no destination, whatever a rule says.
    #[test]
    fn the_host_itself_is_off_limits() {
        let operator = Operator {
            resolvers: vec!["127.0.0.1:53".parse().unwrap()],
            off_limits: vec!["192.0.2.0/24".parse().unwrap()],
            ..Operator::default()
        };
        let closed = Outside::new(&operator).unwrap().off_limits().unwrap();
        for address in ["127.0.0.1", "192.0.2.7"] {
            let address: IpAddr = address.parse().unwrap();
            assert!(closed.iter().any(|net| net.contains(&address)), "{address} {closed:?}");
        }
    }
}
