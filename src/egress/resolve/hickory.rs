//! The resolver of production: hickory, with the system's servers or named ones, no cache and no hosts file of its own.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use hickory_resolver::config::{
    ConnectionConfig, LookupIpStrategy, NameServerConfig, ResolveHosts, ResolverConfig, ResolverOpts,
};
use hickory_resolver::net::NetError;
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::{Resolver, TokioResolver};

use super::{Resolve, Resolved, Unresolved};
use crate::egress::name::HostName;

/// Asks DNS servers; follows `CNAME`s itself.
#[derive(Debug, Clone)]
pub struct Hickory(TokioResolver);

/// No resolver could be made.
#[derive(Debug, thiserror::Error)]
#[error("the DNS servers of this host could not be read")]
pub struct BadServers(#[source] NetError);

impl Hickory {
    /// With the servers of `/etc/resolv.conf`. The hosts file counts too: the operator wrote it.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn system() -> Result<Self, BadServers> {
        let mut builder = TokioResolver::builder_tokio().map_err(BadServers)?;
        set(builder.options_mut());
        builder.options_mut().use_hosts_file = ResolveHosts::Auto;
        Ok(Self(builder.build().map_err(BadServers)?))
    }

    /// With these servers alone.
    ///
    /// # Errors
    /// There is none.
    pub fn with_servers(servers: &[SocketAddr]) -> Result<Self, BadServers> {
        let servers = servers.iter().map(|server| {
            let mut connections = [ConnectionConfig::udp(), ConnectionConfig::tcp()];
            for connection in &mut connections {
                connection.port = server.port();
            }
            NameServerConfig::new(server.ip(), true, connections.to_vec())
        });
        let config = ResolverConfig::from_name_servers(servers.collect());
        let mut builder = Resolver::builder_with_config(config, TokioRuntimeProvider::default());
        set(builder.options_mut());
        Ok(Self(builder.build().map_err(BadServers)?))
    }
}

fn set(options: &mut ResolverOpts) {
    // A name is asked for as it is: no search list ever makes another one of it.
    options.ndots = 0;
    options.cache_size = 0;
    options.ip_strategy = LookupIpStrategy::Ipv4AndIpv6;
    options.use_hosts_file = ResolveHosts::Never;
    options.timeout = Duration::from_secs(3);
    options.attempts = 2;
    options.case_randomization = false;
}

#[async_trait]
impl Resolve for Hickory {
    async fn resolve(&self, name: &HostName) -> Result<Resolved, Unresolved> {
        // With a dot at its end it is complete.
        match self.0.lookup_ip(format!("{name}.")).await {
            Ok(found) => {
                let addresses: Vec<IpAddr> = found.iter().collect();
                let ttl = found.valid_until().saturating_duration_since(Instant::now());
                match addresses.is_empty() {
                    true => Err(Unresolved::NoAddress(name.clone())),
                    false => Ok(Resolved { addresses, ttl }),
                }
            }
            Err(error) if error.is_no_records_found() || error.is_nx_domain() => {
                Err(Unresolved::NoAddress(name.clone()))
            }
            Err(error) => Err(Unresolved::Failed {
                name: name.clone(),
                source: error.into(),
            }),
        }
    }
}
