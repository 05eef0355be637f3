//! The fake's guest: one task a connection, the real protocol, no process.

use std::io;
use std::path::PathBuf;
use std::sync::mpsc as blocking;
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::shell::{self, Shell};
use crate::guest::files::{Plane, directory};
use crate::wire::{
    self, Ended, Event, FileChunk, FileReply, FileRequest, Input, Stream, ended, event, file_request, input, request,
};

/// Keeps paused time from moving on by itself: tokio counts a running blocking task as work.
struct Awake {
    _held: blocking::Sender<()>,
}

impl Awake {
    fn new() -> Self {
        let (held, released) = blocking::channel();
        // Ends when the other side is dropped, at the latest with the task that holds it.
        tokio::task::spawn_blocking(move || {
            let _ = released.recv();
        });
        Self { _held: held }
    }
}

/// What a running program can do to the world outside of it.
pub(super) struct Io {
    output: mpsc::Sender<(Stream, Vec<u8>)>,
    stdin: Option<mpsc::UnboundedReceiver<Vec<u8>>>,
    frozen: watch::Receiver<bool>,
    awake: Option<Awake>,
}

impl Io {
    pub async fn write(&mut self, stream: Stream, bytes: &[u8]) {
        for chunk in bytes.chunks(wire::CHUNK) {
            // A closed channel means that the exec is over, and this future with it.
            let _ = self.output.send((stream, chunk.to_vec())).await;
        }
    }

    /// The next piece of standard input; `None` at its end.
    pub async fn read(&mut self) -> Option<Vec<u8>> {
        let stdin = self.stdin.as_mut()?;
        if let Ok(ready) = stdin.try_recv() {
            return Some(ready);
        }
        self.awake = None;
        let piece = stdin.recv().await;
        self.awake = Some(Awake::new());
        piece
    }

    pub async fn sleep(&mut self, time: Duration) {
        self.awake = None;
        tokio::time::sleep(time).await;
        self.awake = Some(Awake::new());
    }

    /// Waits while the sandbox is frozen.
    pub async fn thawed(&mut self) {
        if *self.frozen.borrow() {
            self.awake = None;
            // The sender lives as long as the sandbox, and this task no longer than that.
            let _ = self.frozen.wait_for(|frozen| !frozen).await;
            self.awake = Some(Awake::new());
        }
    }
}

pub(super) struct Guest {
    workspace: Option<PathBuf>,
    frozen: watch::Receiver<bool>,
    awake: Option<Awake>,
}

impl Guest {
    pub fn new(workspace: Option<PathBuf>, frozen: watch::Receiver<bool>) -> Self {
        Self {
            workspace,
            frozen,
            awake: Some(Awake::new()),
        }
    }

    /// Serves one connection; a broken one just ends.
    pub async fn serve(mut self, mut stream: UnixStream, script: Option<Vec<Event>>) {
        let mut buffer = Vec::new();
        let result = match script {
            Some(events) => play(&mut stream, &mut buffer, events).await,
            None => self.answer(&mut stream, &mut buffer).await,
        };
        if result.is_ok() {
            let _ = stream.shutdown().await;
            // Awake until the peer is done too.
            while read::<Input>(&mut stream, &mut buffer)
                .await
                .is_ok_and(|input| input.is_some())
            {}
        }
    }

    async fn answer(&mut self, stream: &mut UnixStream, buffer: &mut Vec<u8>) -> io::Result<()> {
        let Some(request) = request(stream, buffer).await? else {
            return Ok(());
        };
        if request.generation != wire::GENERATION {
            return say(stream, fault("generation", "another generation")).await;
        }
        match request.kind {
            None => say(stream, fault("bad_request", "an empty request")).await,
            Some(request::Kind::List(wire::List {})) => {
                say(stream, event::Kind::Told(wire::Told { running: false })).await
            }
            Some(request::Kind::Attach(_) | request::Kind::Tell(_)) => {
                say(stream, fault("no_such_exec", "the fake keeps no exec")).await
            }
            Some(request::Kind::Dial(_)) => say(stream, fault("refused", "the fake has no ports")).await,
            Some(request::Kind::Ping(wire::Ping {})) => {
                let generation = wire::GENERATION;
                say(stream, event::Kind::Pong(wire::Pong { generation })).await
            }
            Some(request::Kind::Exec(exec)) if exec.seccomp.is_empty() || exec.uid == 0 || exec.gid == 0 => {
                say(stream, fault("bad_request", "no filter, or no user")).await
            }
            Some(request::Kind::Exec(exec)) if exec.files => self.files(stream, buffer).await,
            Some(request::Kind::Exec(exec)) => match Shell::new(&exec, self.workspace.clone()) {
                Err((code, message)) => say(stream, fault(code, &message)).await,
                Ok(shell) => self.program(shell, exec, stream, buffer).await,
            },
        }
    }

    async fn program(
        &mut self,
        mut shell: Shell,
        exec: wire::Exec,
        stream: &mut UnixStream,
        buffer: &mut Vec<u8>,
    ) -> io::Result<()> {
        let begun = Instant::now();
        let (output, mut outputs) = mpsc::channel(1);
        let (stdin_sender, stdin) = mpsc::unbounded_channel();
        let mut stdin_sender = exec.stdin.then_some(stdin_sender);
        let mut io = Io {
            output,
            stdin: exec.stdin.then_some(stdin),
            frozen: self.frozen.clone(),
            awake: self.awake.take(),
        };
        say(stream, event::Kind::Started(started())).await?;
        let (mut timed_out, mut killed, mut made) = (false, false, Made::default());
        let mut argv = exec.argv;
        let status = {
            let mut program = std::pin::pin!(async move {
                let code = shell.run(std::mem::take(&mut argv), &mut io).await;
                (code, io)
            });
            let mut time_up = std::pin::pin!(tokio::time::sleep(Duration::from_millis(exec.timeout_ms)));
            loop {
                tokio::select! {
                    biased;
                    input = read::<Input>(stream, buffer) => match input?.ok_or(io::ErrorKind::ConnectionAborted)?.kind {
                        Some(input::Kind::Stdin(bytes)) => {
                            let credit = bytes.len() as u32;
                            // A program that has ended, or reads nothing, takes nothing.
                            if let Some(sender) = &stdin_sender {
                                let _ = sender.send(bytes.to_vec());
                            }
                            say(stream, event::Kind::Credit(credit)).await?;
                        }
                        Some(input::Kind::StdinEof(_)) => stdin_sender = None,
                        Some(input::Kind::Signal(signal)) => break ended::Status::Signal(signal),
                        Some(input::Kind::SignalTree(signal)) => break ended::Status::Signal(signal),
                        Some(input::Kind::Kill(_)) => {
                            killed = true;
                            break ended::Status::Signal(libc::SIGKILL);
                        }
                        Some(input::Kind::Terminate(_)) => {
                            killed = true;
                            break ended::Status::Signal(libc::SIGTERM);
                        }
                        Some(input::Kind::Resize(_) | input::Kind::Taken(_) | input::Kind::Note(_)) | None => {}
                    },
                    Some((which, data)) = outputs.recv() => {
                        say(stream, made.piece(which, data)).await?;
                    }
                    () = &mut time_up, if exec.timeout_ms > 0 => {
                        timed_out = true;
                        break ended::Status::Signal(libc::SIGTERM);
                    }
                    (code, io) = &mut program => {
                        self.awake = io.awake;
                        break ended::Status::ExitCode(code);
                    }
                }
            }
        };
        self.awake.get_or_insert_with(Awake::new);
        while let Ok((which, data)) = outputs.try_recv() {
            say(stream, made.piece(which, data)).await?;
        }
        let ended = Ended {
            status: Some(status),
            timed_out,
            killed,
            made: Some(made.0),
            duration_us: begun.elapsed().as_micros() as u64,
            ..Ended::default()
        };
        say(stream, event::Kind::Ended(ended)).await
    }

    /// The file plane, on the workspace alone.
    async fn files(&mut self, stream: &mut UnixStream, buffer: &mut Vec<u8>) -> io::Result<()> {
        say(stream, event::Kind::Started(started())).await?;
        let (mut stdin, mut request, mut content) = (Vec::new(), None::<FileRequest>, Vec::new());
        loop {
            let Some(input) = read::<Input>(stream, buffer).await? else {
                return Ok(());
            };
            match input.kind {
                Some(input::Kind::Stdin(bytes)) => {
                    stdin.extend_from_slice(&bytes);
                    say(stream, event::Kind::Credit(bytes.len() as u32)).await?;
                }
                Some(input::Kind::StdinEof(_)) => break,
                Some(
                    input::Kind::Signal(_)
                    | input::Kind::SignalTree(_)
                    | input::Kind::Kill(_)
                    | input::Kind::Terminate(_)
                    | input::Kind::Resize(_)
                    | input::Kind::Taken(_)
                    | input::Kind::Note(_),
                )
                | None => return Ok(()),
            }
            if request.is_none() {
                request = wire::decode(&mut stdin)?;
            }
            while request.is_some()
                && let Some(FileChunk { data }) = wire::decode(&mut stdin)?
            {
                content.push(data);
            }
        }
        let workspace = self.workspace.clone();
        let work = move || serve_files(workspace, request.unwrap_or_default(), content);
        let replies = tokio::task::spawn_blocking(work).await.map_err(io::Error::other)??;
        let mut made = Made::default();
        for chunk in replies.chunks(wire::CHUNK) {
            say(stream, made.piece(Stream::Stdout, chunk.to_vec())).await?;
        }
        let ended = Ended {
            status: Some(ended::Status::ExitCode(0)),
            made: Some(made.0),
            ..Ended::default()
        };
        say(stream, event::Kind::Ended(ended)).await
    }
}

/// Bytes of each stream so far.
#[derive(Default)]
struct Made(wire::Offsets);

impl Made {
    /// The next piece of a stream.
    fn piece(&mut self, stream: Stream, data: Vec<u8>) -> event::Kind {
        let place = match stream {
            Stream::Stderr => &mut self.0.stderr,
            Stream::Pty => &mut self.0.pty,
            Stream::Stdout | Stream::Unspecified => &mut self.0.stdout,
        };
        let offset = *place;
        *place += data.len() as u64;
        event::Kind::Output(wire::Output {
            stream: stream as i32,
            data: data.into(),
            offset,
        })
    }
}

fn started() -> wire::Started {
    wire::Started {
        pid: 2,
        ..wire::Started::default()
    }
}

fn serve_files(workspace: Option<PathBuf>, mut request: FileRequest, content: Vec<Bytes>) -> io::Result<Vec<u8>> {
    let workspace = workspace.ok_or_else(|| io::Error::other("the fake has files in a workspace alone"))?;
    let plane = Plane::confined(directory(&workspace)?);
    use file_request::Kind;
    match &mut request.kind {
        Some(Kind::Stat(stat)) => shell::inside(&mut stat.path),
        Some(Kind::Read(read)) => shell::inside(&mut read.path),
        Some(Kind::Write(write)) => shell::inside(&mut write.path),
        Some(Kind::List(list)) => shell::inside(&mut list.path),
        Some(Kind::Search(search)) => shell::inside(&mut search.path),
        Some(Kind::Mkdir(mkdir)) => shell::inside(&mut mkdir.path),
        Some(Kind::Remove(remove)) => shell::inside(&mut remove.path),
        Some(Kind::Watch(watch)) => shell::inside(&mut watch.path),
        Some(Kind::Rename(rename)) => {
            shell::inside(&mut rename.from);
            shell::inside(&mut rename.to);
        }
        None => {}
    }
    let (mut content, mut replies) = (content.into_iter(), Vec::new());
    plane.serve(
        request,
        &mut || content.next().ok_or_else(|| io::ErrorKind::UnexpectedEof.into()),
        &mut |reply: FileReply| wire::encode(&reply, &mut replies),
    )?;
    Ok(replies)
}

/// Says what it was told to say, once it was asked.
async fn play(stream: &mut UnixStream, buffer: &mut Vec<u8>, events: Vec<Event>) -> io::Result<()> {
    request(stream, buffer).await?;
    let mut frames = Vec::new();
    for event in events {
        wire::encode(&event, &mut frames)?;
    }
    stream.write_all(&frames).await?;
    Err(io::ErrorKind::ConnectionAborted.into())
}

fn fault(code: &str, message: &str) -> event::Kind {
    event::Kind::Fault(wire::Fault {
        code: code.to_owned(),
        message: message.to_owned(),
        errno: 0,
        kept: None,
    })
}

async fn say(stream: &mut UnixStream, kind: event::Kind) -> io::Result<()> {
    let mut frame = Vec::new();
    wire::encode(&Event { kind: Some(kind) }, &mut frame)?;
    stream.write_all(&frame).await
}

async fn request(stream: &mut UnixStream, buffer: &mut Vec<u8>) -> io::Result<Option<wire::Request>> {
    read_with(wire::decode_request, stream, buffer).await
}

/// The next frame; cancellation-safe, as what was read is in `buffer`.
async fn read<M: prost::Message + Default>(stream: &mut UnixStream, buffer: &mut Vec<u8>) -> io::Result<Option<M>> {
    read_with(wire::decode, stream, buffer).await
}

async fn read_with<M>(
    decode: impl Fn(&mut Vec<u8>) -> io::Result<Option<M>>,
    stream: &mut UnixStream,
    buffer: &mut Vec<u8>,
) -> io::Result<Option<M>> {
    loop {
        if let Some(message) = decode(buffer)? {
            return Ok(Some(message));
        }
        if stream.read_buf(buffer).await? == 0 {
            return Ok(None);
        }
    }
}
