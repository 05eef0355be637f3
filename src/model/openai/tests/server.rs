//! A server that answers each connection with the next of its prepared responses, byte for byte.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

/// What is written to one connection.
#[derive(Debug, Clone)]
pub(super) enum Piece {
    Bytes(Vec<u8>),
    /// Says nothing more, and does not hang up.
    Hang,
}

pub(super) struct Server {
    address: std::net::SocketAddr,
    requests: Arc<Mutex<Vec<String>>>,
    _accepting: JoinSet<()>,
}

impl Server {
    pub(super) async fn start(responses: Vec<Vec<Piece>>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let seen = requests.clone();
        let mut accepting = JoinSet::new();
        accepting.spawn(async move {
            for response in responses {
                let (stream, _) = listener.accept().await.unwrap();
                serve(stream, response, &seen).await;
            }
        });
        Self {
            address,
            requests,
            _accepting: accepting,
        }
    }

    pub(super) fn base_url(&self) -> String {
        format!("http://{}/v1", self.address)
    }

    pub(super) fn requests(&self) -> Vec<String> {
        self.requests.lock().unwrap().clone()
    }
}

async fn serve(mut stream: TcpStream, response: Vec<Piece>, seen: &Mutex<Vec<String>>) {
    let request = read_request(&mut stream).await;
    seen.lock().unwrap().push(request);
    for piece in response {
        match piece {
            // The client may have hung up: it had all it wanted.
            Piece::Bytes(bytes) => drop(stream.write_all(&bytes).await),
            Piece::Hang => tokio::time::sleep(Duration::from_secs(3600)).await,
        }
    }
    drop(stream.shutdown().await);
}

async fn read_request(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    loop {
        let mut buffer = [0; 4096];
        let read = stream.read(&mut buffer).await.unwrap();
        bytes.extend_from_slice(&buffer[..read]);
        let text = String::from_utf8_lossy(&bytes);
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head
                .lines()
                .find_map(|line| line.to_lowercase().strip_prefix("content-length: ")?.parse().ok());
            if body.len() >= length.unwrap_or(0) || read == 0 {
                return text.into_owned();
            }
        }
        assert!(read > 0, "the client hung up");
    }
}

/// A response whose end is the end of the connection.
pub(super) fn response(head: &str, body: &str) -> Vec<Piece> {
    vec![Piece::Bytes(
        format!("HTTP/1.1 {head}\r\nconnection: close\r\n\r\n{body}").into_bytes(),
    )]
}

/// A stream of these events.
pub(super) fn events(events: &[&str]) -> Vec<Piece> {
    let body: String = events.iter().map(|event| format!("data: {event}\n\n")).collect();
    response("200 OK\r\ncontent-type: text/event-stream; charset=utf-8", &body)
}

/// The same, but the connection stays open in silence.
pub(super) fn hanging(events: &[&str]) -> Vec<Piece> {
    let mut pieces = self::events(events);
    pieces.push(Piece::Hang);
    pieces
}
