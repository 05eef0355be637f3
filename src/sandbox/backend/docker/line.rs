//! The way to the guest of a gVisor sandbox: the container's standard input and output, over the engine's attach call.
//!
//! gVisor lets in no socket of the host. So the mux (`wire::mux`) goes over the attach stream, and this is the host's end of it:
//! a thread that moves its bytes, and two tasks between it and the engine. The container's streams stay open when
//! the server dies; the next one attaches anew and begins with a hail (`wire::line`).
//!
//! What the guest sends is hostile: [`Mux`](crate::wire::mux::Mux) judges it, and what breaks the rules ends the line.

use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, TrySendError, sync_channel};

use bollard::container::{AttachContainerResults, LogOutput};
use futures::{Stream, StreamExt};
use nix::poll::PollTimeout;
use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::task::JoinSet;

use super::engine::{Engine, Failure};
use crate::wire::line::{Answer, PACKET, WORD, Word, hail, pack};
use crate::wire::mux::{News, Side};
use crate::wire::pump::Pump;

/// In a sandbox's directory: what only its servers and its guest know.
const SECRET: &str = "line";
/// Connections that may wait to be opened.
const QUEUE: usize = 128;

/// One host's end of a sandbox's line. Dropping it hangs up; the sandbox goes on.
#[derive(Debug)]
pub struct Line {
    asks: SyncSender<UnixStream>,
    /// A byte wakes the thread; its end ends it.
    wake: UnixStream,
    is_lost: Arc<AtomicBool>,
    _engine: JoinSet<()>,
}

/// Makes a sandbox's secret.
pub fn make_secret(directory: &Path) -> io::Result<()> {
    let mut file = fs::File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(directory.join(SECRET))?;
    file.write_all(&random()?.map(|byte| byte.max(1)))
}

pub fn secret(directory: &Path) -> io::Result<Word> {
    let bytes = fs::read(directory.join(SECRET))?;
    <Word>::try_from(bytes).map_err(|_| io::Error::other("the secret of its line is damaged"))
}

fn random() -> io::Result<Word> {
    let random = ring::rand::SystemRandom::new();
    let made = ring::rand::generate::<[u8; WORD]>(&random);
    Ok(made
        .map_err(|_| io::Error::other("the kernel gives no random bytes"))?
        .expose())
}

impl Line {
    /// Takes the line of a container up. The guest may be slow to hear of it, or be frozen: this does not wait for it.
    pub async fn take_up(engine: &Engine, container: &str, secret: &Word) -> Result<Self, Failure> {
        let broken = |error: io::Error| Failure::Broken(error.to_string());
        let word = random().map_err(broken)?;
        let AttachContainerResults { output, input } = engine.attach(container).await?;
        let (ends, theirs) = pairs().map_err(broken)?;
        let (reader, writer) = theirs.into_split();
        let mut tasks = JoinSet::new();
        tasks.spawn(from_guest(output, Answer::to(word), writer));
        tasks.spawn(to_guest(hail(secret, &word), reader, input));
        let (asks, queue) = sync_channel(QUEUE);
        let (wake, woken) = UnixStream::pair().map_err(broken)?;
        for end in [&wake, &woken] {
            end.set_nonblocking(true).map_err(broken)?;
        }
        let is_lost = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&is_lost);
        std::thread::Builder::new()
            .name("docker-line".to_owned())
            .spawn(move || {
                // What was open is closed with the pump: whoever waits there hears of it.
                let _ = carry(ends, &queue, &woken);
                told.store(true, Ordering::Release);
            })
            .map_err(broken)?;
        Ok(Self {
            asks,
            wake,
            is_lost,
            _engine: tasks,
        })
    }

    /// Whether nothing more comes of it: it is to be taken up anew.
    pub fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Acquire)
    }

    /// A connection to the guest.
    ///
    /// # Errors
    /// `WouldBlock` when too many wait already; never waits.
    pub fn open(&self) -> io::Result<tokio::net::UnixStream> {
        let (ours, theirs) = UnixStream::pair()?;
        self.asks.try_send(theirs).map_err(|error| match error {
            TrySendError::Full(_) => io::ErrorKind::WouldBlock,
            TrySendError::Disconnected(_) => io::ErrorKind::NotConnected,
        })?;
        // When it takes no more, it is about to wake.
        let _ = (&self.wake).write(&[0]);
        ours.set_nonblocking(true)?;
        tokio::net::UnixStream::from_std(ours)
    }
}

/// The pump, and where the tasks meet it.
fn pairs() -> io::Result<(Pump, tokio::net::UnixStream)> {
    let (ours, theirs) = UnixStream::pair()?;
    theirs.set_nonblocking(true)?;
    let pump = Pump::new(Side::Host, ours.try_clone()?.into(), ours.into())?;
    Ok((pump, tokio::net::UnixStream::from_std(theirs)?))
}

/// Runs until the guest is gone, the line is, or nobody wants it any more.
fn carry(mut pump: Pump, queue: &Receiver<UnixStream>, woken: &UnixStream) -> io::Result<()> {
    while !pump.is_lost() {
        let turn = pump.turn(&[woken.as_fd()], PollTimeout::NONE)?;
        if turn.ready.first() == Some(&true) {
            let mut bytes = [0; QUEUE];
            let _ = (&mut &*woken).read(&mut bytes);
        }
        if turn.news.contains(&News::Deaf) {
            return Ok(());
        }
        while pump.mux.can_open() {
            match queue.try_recv() {
                Ok(client) => {
                    let id = pump.mux.open();
                    if pump.attach(id, client).is_err() {
                        pump.mux.close(id);
                    }
                }
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return Ok(()),
            }
        }
    }
    Ok(())
}

type Output = Pin<Box<dyn Stream<Item = Result<LogOutput, bollard::errors::Error>> + Send>>;

async fn from_guest(mut output: Output, mut answer: Answer, mut to: OwnedWriteHalf) {
    while let Some(Ok(said)) = output.next().await {
        match said {
            LogOutput::StdOut { message } => {
                if to.write_all(answer.take(&message)).await.is_err() {
                    return;
                }
            }
            // Of gVisor itself, should it have something to say.
            LogOutput::StdErr { .. } | LogOutput::StdIn { .. } => {}
            // Not the engine's framing: nothing after it can be told apart.
            LogOutput::Console { .. } => return,
        }
    }
}

async fn to_guest(hail: [u8; 2 * WORD], mut from: OwnedReadHalf, mut input: Pin<Box<dyn AsyncWrite + Send>>) {
    let mut bytes = vec![0; PACKET];
    let mut packet = hail.to_vec();
    loop {
        if input.write_all(&packet).await.is_err() || input.flush().await.is_err() {
            return;
        }
        packet.clear();
        match from.read(&mut bytes).await {
            Ok(0) | Err(_) => return,
            Ok(got) => pack(&bytes[..got], &mut packet),
        }
    }
}
