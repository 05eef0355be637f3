//! An internet in a network namespace: names, web servers, metadata, and a record of every packet that arrives, for whomever it is.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, mpsc};
use std::thread;

use nix::sched::{CloneFlags, unshare};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, socket};
use rustls::pki_types::PrivateKeyDer;

/// Whoever serves the web, IPv4 and IPv6.
pub const WEB: &str = "93.184.216.34";
pub const WEB6: &str = "2606:2800:220:1::34";
/// The name server of the operator.
pub const RESOLVER: &str = "93.184.216.53";
/// A name server of a stranger.
pub const STRANGER: &str = "8.8.8.8";
pub const METADATA: &str = "169.254.169.254";
/// Of the host that the server runs on.
pub const HOST: &str = "151.101.10.2";

const NAMES: [(&str, &[&str]); 7] = [
    ("api.example.com", &[WEB, WEB6]),
    ("other.example.com", &[WEB]),
    ("plain.example.com", &[WEB]),
    ("rebound.example.com", &[WEB, "127.0.0.1"]),
    ("metadata.example.com", &[METADATA]),
    ("host.example.com", &[HOST]),
    ("mapped.example.com", &["::ffff:169.254.169.254"]),
];

/// One packet that arrived: protocol, where it wanted to go, and the port where it has one.
pub type Packet = (u8, IpAddr, u16);

#[derive(Debug, Default)]
struct Seen {
    packets: Mutex<BTreeSet<Packet>>,
    /// Heads of requests, as they came.
    requests: Mutex<Vec<String>>,
    /// Names that were asked for, by which server.
    questions: Mutex<Vec<(String, String)>>,
}

/// It lasts as long as the process of its test.
#[derive(Debug)]
pub struct Internet {
    seen: Arc<Seen>,
    /// The certificate of its servers.
    pub roots: PathBuf,
}

fn run(words: &str) {
    let mut words = words.split(' ');
    let status = Command::new(words.next().unwrap()).args(words).status().unwrap();
    assert!(status.success(), "{status}");
}

impl Internet {
    /// Makes one, and puts this thread and all that it starts into a host that is on it and nowhere else.
    ///
    /// # Errors
    /// When this machine cannot: why.
    pub fn new(directory: &Path) -> Result<Self, String> {
        if !nix::unistd::geteuid().is_root() {
            return Err("network namespaces need root".to_owned());
        }
        if Command::new("ip").arg("-V").output().is_err() {
            return Err("there is no `ip`".to_owned());
        }
        unshare(CloneFlags::CLONE_NEWNET).map_err(|error| format!("no network namespace: {error}"))?;
        let names: Vec<String> = NAMES.iter().map(|(name, _)| (*name).to_owned()).collect();
        let made = rcgen::generate_simple_self_signed(names).unwrap();
        let roots = directory.join("internet.pem");
        std::fs::write(&roots, made.cert.pem()).unwrap();
        let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
        let tls = rustls::ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![made.cert.der().clone()], key)
            .unwrap();
        let seen = Arc::new(Seen::default());
        let (tell, hear) = mpsc::channel();
        let (go, wait) = mpsc::channel();
        let (of_servers, tls) = (Arc::clone(&seen), Arc::new(tls));
        thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            tell.send(nix::unistd::gettid()).unwrap();
            wait.recv().unwrap();
            outside(&of_servers, &tls);
            tell.send(nix::unistd::gettid()).unwrap();
            // The namespace is this thread's.
            loop {
                thread::park();
            }
        });
        let other = hear.recv().unwrap();
        run("ip link set lo up");
        run("ip link add out type veth peer name in");
        run(&format!("ip link set in netns {other}"));
        run(&format!("ip addr add {HOST}/24 dev out"));
        run("ip -6 addr add 2606:2800:220:2::2/64 dev out nodad");
        run("ip link set out up");
        go.send(()).unwrap();
        hear.recv().unwrap();
        run("ip route add default via 151.101.10.1");
        run("ip -6 route add default via 2606:2800:220:2::1");
        Ok(Self { seen, roots })
    }

    /// What has arrived since this was last asked. Who asks has waited until it must have.
    pub fn packets(&self) -> BTreeSet<Packet> {
        std::mem::take(&mut *self.seen.packets.lock().unwrap())
    }

    pub fn requests(&self) -> Vec<String> {
        std::mem::take(&mut *self.seen.requests.lock().unwrap())
    }

    /// Server and name.
    pub fn questions(&self) -> Vec<(String, String)> {
        std::mem::take(&mut *self.seen.questions.lock().unwrap())
    }
}

/// In the namespace of the outside.
fn outside(seen: &Arc<Seen>, tls: &Arc<rustls::ServerConfig>) {
    run("ip link set lo up");
    run("ip addr add 151.101.10.1/24 dev in");
    run("ip -6 addr add 2606:2800:220:2::1/64 dev in nodad");
    for address in [WEB, RESOLVER, STRANGER, METADATA] {
        run(&format!("ip addr add {address}/32 dev lo"));
    }
    run(&format!("ip -6 addr add {WEB6}/128 dev lo nodad"));
    run("ip link set in up");
    let sniffer = socket(
        AddressFamily::Packet,
        SockType::Datagram,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::EthAll,
    )
    .unwrap();
    let of = || Arc::clone(seen);
    let all = of();
    thread::spawn(move || {
        let mut bytes = [0; 2048];
        loop {
            let length = recv(sniffer.as_raw_fd(), &mut bytes, MsgFlags::empty()).unwrap();
            if let Some(packet) = packet(&bytes[..length]) {
                all.packets.lock().unwrap().insert(packet);
            }
        }
    });
    for address in [RESOLVER, STRANGER] {
        let (socket, seen) = (UdpSocket::bind((address, 53)).unwrap(), of());
        thread::spawn(move || names(&socket, address, &seen));
    }
    for address in [WEB, METADATA, WEB6] {
        let address: IpAddr = address.parse().unwrap();
        for port in [80, 443] {
            let listener = TcpListener::bind(SocketAddr::new(address, port)).unwrap();
            let (seen, tls) = (of(), (port == 443).then(|| Arc::clone(tls)));
            thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let (seen, tls) = (Arc::clone(&seen), tls.clone());
                    thread::spawn(move || {
                        let served = match tls {
                            None => web(stream, &seen),
                            Some(tls) => rustls::ServerConnection::new(tls)
                                .map_err(io::Error::other)
                                .and_then(|tls| web(rustls::StreamOwned::new(tls, stream), &seen)),
                        };
                        // Whoever breaks off has seen enough.
                        drop(served);
                    });
                }
            });
        }
    }
}

/// Protocol, destination and port of what came to us; not what we say ourselves, nor what links say to each other.
fn packet(bytes: &[u8]) -> Option<Packet> {
    let (protocol, from, to, rest) = match bytes.first()? >> 4 {
        4 => {
            let header = usize::from(bytes[0] & 15) * 4;
            let at = |n: usize| IpAddr::from(<[u8; 4]>::try_from(&bytes[n..n + 4]).unwrap());
            (bytes[9], at(12), at(16), bytes.get(header..)?)
        }
        6 => {
            let at = |n: usize| IpAddr::from(<[u8; 16]>::try_from(&bytes[n..n + 16]).unwrap());
            (bytes[6], at(8), at(24), bytes.get(40..)?)
        }
        _ => return None,
    };
    let ours = [
        "151.101.10.1",
        WEB,
        RESOLVER,
        STRANGER,
        METADATA,
        WEB6,
        "2606:2800:220:2::1",
    ];
    let is_ours = ours.iter().any(|address| from == address.parse::<IpAddr>().unwrap());
    let is_of_links = match to {
        IpAddr::V4(to) => to.is_multicast(),
        // Neighbours are looked for, too.
        IpAddr::V6(to) => to.is_multicast() || protocol == 58 && rest.first().is_some_and(|kind| *kind >= 130),
    };
    let port = match protocol {
        6 | 17 => u16::from_be_bytes([*rest.get(2)?, *rest.get(3)?]),
        _ => 0,
    };
    (!is_ours && !is_of_links && !from.is_unspecified()).then_some((protocol, to, port))
}

/// Answers for [`NAMES`] (RFC 1035), and takes down what was asked.
fn names(socket: &UdpSocket, address: &str, seen: &Seen) {
    let known: BTreeMap<&str, &[&str]> = NAMES.into_iter().collect();
    let mut bytes = [0; 1500];
    loop {
        let (length, from) = socket.recv_from(&mut bytes).unwrap();
        let (mut at, mut labels) = (12, Vec::new());
        while bytes[at] != 0 && at < length {
            let end = at + 1 + usize::from(bytes[at]);
            labels.push(String::from_utf8_lossy(&bytes[at + 1..end]).into_owned());
            at = end;
        }
        let name = labels.join(".");
        let (kind, question) = (bytes[at + 2], bytes[12..at + 5].to_vec());
        let addresses = known.get(name.as_str()).copied().unwrap_or_default();
        let addresses = addresses.iter().map(|address| address.parse::<IpAddr>().unwrap());
        let fitting: Vec<Vec<u8>> = addresses
            .filter_map(|address| match (kind, address) {
                (1, IpAddr::V4(address)) => Some(address.octets().to_vec()),
                (28, IpAddr::V6(address)) => Some(address.octets().to_vec()),
                _ => None,
            })
            .collect();
        let code = if known.contains_key(name.as_str()) { 0 } else { 3 };
        let mut answer = [
            &bytes[..2],
            &[0x81, 0x80 | code, 0, 1, 0, fitting.len() as u8, 0, 0, 0, 0],
            &question,
        ]
        .concat();
        for address in fitting {
            answer.extend([0xc0, 12, 0, kind, 0, 1, 0, 0, 0, 60, 0, address.len() as u8]);
            answer.extend(address);
        }
        seen.questions.lock().unwrap().push((address.to_owned(), name));
        socket.send_to(&answer, from).unwrap();
    }
}

/// One request, whose head comes back as the body.
fn web(mut stream: impl Read + Write, seen: &Seen) -> io::Result<()> {
    let mut head = Vec::new();
    while !head.windows(4).any(|four| four == b"\r\n\r\n") {
        let mut byte = [0];
        if stream.read(&mut byte)? == 0 || head.len() > 16 << 10 {
            return Ok(());
        }
        head.push(byte[0]);
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    seen.requests.lock().unwrap().push(head.clone());
    let answer = format!(
        "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{head}",
        head.len()
    );
    stream.write_all(answer.as_bytes())?;
    stream.flush()
}
