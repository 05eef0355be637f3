//! The last step out: a stream to exactly the address that was checked, straight or through the operator's own proxy.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use async_trait::async_trait;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use secrecy::{ExposeSecret, SecretString};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::name::Host;
use super::stream::{BoxStream, Rewind};

/// Opens streams to the outside. `to` has passed all checks and must not be looked up again.
#[async_trait]
pub trait Dial: Send + Sync + fmt::Debug {
    /// # Errors
    /// It cannot be reached.
    async fn dial(&self, host: &Host, to: SocketAddr) -> io::Result<BoxStream>;
}

/// Straight to the address.
#[derive(Debug, Clone)]
pub struct Direct {
    pub timeout: Duration,
}

impl Default for Direct {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(10),
        }
    }
}

#[async_trait]
impl Dial for Direct {
    async fn dial(&self, _host: &Host, to: SocketAddr) -> io::Result<BoxStream> {
        Ok(Box::new(connect(to, self.timeout).await?))
    }
}

async fn connect(to: SocketAddr, timeout: Duration) -> io::Result<TcpStream> {
    let stream = tokio::time::timeout(timeout, TcpStream::connect(to))
        .await
        .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// What the operator's proxy is told to connect to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Naming {
    /// The address that was checked: nothing is looked up again.
    Address,
    /// The name: the operator's proxy looks it up, and answers for where that leads.
    Name,
}

/// Through a proxy of the operator's, by `CONNECT`.
#[derive(Debug, Clone)]
pub struct Through {
    pub proxy: SocketAddr,
    /// `user:password`.
    pub basic: Option<SecretString>,
    pub naming: Naming,
    pub timeout: Duration,
}

/// Longer answers of the operator's proxy are refused.
const MAX_ANSWER: usize = 16 << 10;

#[async_trait]
impl Dial for Through {
    async fn dial(&self, host: &Host, to: SocketAddr) -> io::Result<BoxStream> {
        let stream = connect(self.proxy, self.timeout).await?;
        let stream = tokio::time::timeout(self.timeout, self.open(stream, host, to)).await;
        stream.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
    }
}

impl Through {
    async fn open(&self, mut stream: TcpStream, host: &Host, to: SocketAddr) -> io::Result<BoxStream> {
        let target = match (self.naming, host) {
            (Naming::Name, Host::Name(name)) => format!("{name}:{}", to.port()),
            (Naming::Name, Host::Address(_)) | (Naming::Address, _) => to.to_string(),
        };
        let mut head = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n");
        if let Some(basic) = &self.basic {
            head += &format!(
                "Proxy-Authorization: Basic {}\r\n",
                STANDARD.encode(basic.expose_secret())
            );
        }
        head += "\r\n";
        stream.write_all(head.as_bytes()).await?;
        let mut answer = Vec::new();
        let end = loop {
            if let Some(at) = answer.windows(4).position(|four| four == b"\r\n\r\n") {
                break at + 4;
            }
            if answer.len() > MAX_ANSWER || stream.read_buf(&mut answer).await? == 0 {
                return Err(io::Error::other("the operator's proxy gave no answer that can be read"));
            }
        };
        let mut headers = [httparse::EMPTY_HEADER; 64];
        let mut response = httparse::Response::new(&mut headers);
        let parsed = response.parse(&answer[..end]).map_err(io::Error::other)?;
        match (parsed, response.code) {
            (httparse::Status::Complete(_), Some(200..300)) => Ok(Box::new(Rewind::new(answer.split_off(end), stream))),
            (_, code) => Err(io::Error::other(format!(
                "the operator's proxy refused with status {}",
                code.unwrap_or_default()
            ))),
        }
    }
}
