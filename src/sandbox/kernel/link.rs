//! A running driver: how it is started, how it is asked, what it says.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write;
use std::time::Duration;

use tokio::time::timeout;

use super::frame::{Decoder, Nonsense, Piece};
use super::language::{Language, Mode, is_missing};
use super::message::Message;
use super::{Error, MAX_CODE, exec};
use crate::sandbox::mould::Mould;
use crate::sandbox::{Command, Control, Exec, Output, Sandbox, Stdin};

/// How long an interpreter may take until it waits for code.
const START: Duration = Duration::from_secs(30);
/// The same for one that is cast, which loads nothing.
const CAST: Duration = Duration::from_secs(10);
/// How long a driver that waits for code may take to take it.
const TAKE: Duration = Duration::from_secs(10);
/// Between a kill and the end.
const KILL: Duration = Duration::from_secs(10);

/// Which pipe something came over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pipe {
    Out,
    Err,
}

#[derive(Debug)]
pub(super) enum Said {
    Output(Pipe, Vec<u8>),
    Message(Pipe, Message),
    /// Nothing more will come.
    Closed,
}

/// Where and with what a driver is started.
#[derive(Debug, Clone, Default)]
pub(super) struct Setting {
    pub cwd: Option<Vec<u8>>,
    pub env: BTreeMap<String, String>,
}

#[derive(Debug)]
pub(super) struct Link {
    language: Language,
    mode: Mode,
    exec: Exec,
    out: Decoder,
    err: Decoder,
    pieces: VecDeque<(Pipe, Piece)>,
    closed: bool,
}

impl Link {
    /// A driver that is cast from a mould of [`Mode::Nursery`], ready.
    ///
    /// # Errors
    /// [`Error::NotCast`] when that does not work here, and those of the sandbox.
    pub(super) async fn cast(
        sandbox: &Sandbox,
        language: Language,
        setting: &Setting,
        mould: &Mould,
    ) -> Result<Self, Error> {
        let (word, settings) = (word(), settings(language, &setting.env));
        // What a guest runs that an earlier server left, and that has never heard of moulds.
        let words = [
            language.programs()[0],
            "-c",
            "raise SystemExit('this guest casts no process')",
        ];
        let mut command = Command::new(words).stdin(Stdin::Open);
        command.cwd.clone_from(&setting.cwd);
        let exec = match sandbox.cast(command, mould).await {
            Ok(exec) => exec,
            Err(crate::sandbox::Error::NotStarted { code, message }) if code == "not_cast" => {
                return Err(Error::NotCast(message));
            }
            Err(error) => return Err(error.into()),
        };
        let mut link = Self::new(language, Mode::Cast, exec, &word);
        let hello = format!("{} {word} cast\n{settings}", settings.len());
        match timeout(CAST, link.first_word(hello.as_bytes())).await {
            Ok(Ok(_)) => Ok(link),
            Ok(Err(reason)) => Err(not_cast(link.unfit(reason).await)),
            Err(_) => Err(not_cast(link.unfit(format!("it was not ready within {CAST:?}")).await)),
        }
    }

    fn new(language: Language, mode: Mode, exec: Exec, word: &str) -> Self {
        Self {
            language,
            mode,
            exec,
            out: Decoder::new(word),
            err: Decoder::new(word),
            pieces: VecDeque::new(),
            closed: false,
        }
    }

    /// The number of its process inside the sandbox.
    pub(super) fn pid(&self) -> u32 {
        self.exec.pid()
    }

    /// Gives it bytes that are no request.
    pub(super) async fn tell(&self, bytes: &[u8]) -> Result<(), exec::Closed> {
        self.exec.input(bytes).await
    }

    /// Starts a driver and waits until it is ready; also says the interpreter's version.
    pub(super) async fn start(
        sandbox: &Sandbox,
        language: Language,
        mode: Mode,
        setting: &Setting,
    ) -> Result<(Self, String), Error> {
        let word = word();
        for program in language.programs() {
            let (words, hello) = language.start(program, &word, mode);
            let mut command = Command::new(words).stdin(Stdin::Open);
            command.cwd.clone_from(&setting.cwd);
            command.env.clone_from(&setting.env);
            let exec = match sandbox.exec(command).await {
                Ok(exec) => exec,
                Err(error) if is_missing(&error) => continue,
                Err(error) => return Err(error.into()),
            };
            let mut link = Self::new(language, mode, exec, &word);
            return match timeout(START, link.first_word(&hello)).await {
                Ok(Ok(version)) => Ok((link, version)),
                Ok(Err(reason)) => Err(link.unfit(reason).await),
                Err(_) => Err(link.unfit(format!("it was not ready within {START:?}")).await),
            };
        }
        Err(language.missing())
    }

    pub(super) fn language(&self) -> Language {
        self.language
    }

    pub(super) fn mode(&self) -> Mode {
        self.mode
    }

    async fn first_word(&mut self, hello: &[u8]) -> Result<String, String> {
        // When it has ended already, what it says tells why.
        let _ = self.exec.input(hello).await;
        let mut noise = Vec::new();
        loop {
            match self.next().await {
                Ok(Said::Message(Pipe::Out, Message::Ready { version })) => return Ok(version),
                Ok(Said::Output(_, bytes)) if noise.len() < 4096 => noise.extend(bytes),
                Ok(Said::Output(..)) => {}
                Ok(Said::Message(..)) => return Err("its first word was out of place".to_owned()),
                Ok(Said::Closed) => return Err(String::from_utf8_lossy(&noise).trim().to_owned()),
                Err(nonsense) => return Err(nonsense.to_string()),
            }
        }
    }

    async fn unfit(self, mut reason: String) -> Error {
        let language = self.language;
        let ended = self.kill("the host: it did not become ready").await;
        if reason.is_empty() {
            reason = format!("it ended at once: {:?}", ended.cause);
        }
        Error::Unfit { language, reason }
    }

    /// The next thing it says. Cancellation-safe.
    pub(super) async fn next(&mut self) -> Result<Said, Nonsense> {
        loop {
            if let Some((pipe, piece)) = self.pieces.pop_front() {
                return match piece {
                    Piece::Output(bytes) => Ok(Said::Output(pipe, bytes)),
                    Piece::Message(bytes) => Ok(Said::Message(pipe, Message::parse(&bytes)?)),
                };
            }
            if self.closed {
                return Ok(Said::Closed);
            }
            let mut found = VecDeque::new();
            let pipe = match self.exec.output.recv().await {
                // It was given no terminal.
                Some(Output::Stdout(bytes) | Output::Pty(bytes)) => {
                    self.out.push(bytes.to_vec(), &mut found).map(|()| Pipe::Out)?
                }
                Some(Output::Stderr(bytes)) => self.err.push(bytes.to_vec(), &mut found).map(|()| Pipe::Err)?,
                None => {
                    self.closed = true;
                    self.out.finish(&mut found);
                    self.pieces.extend(found.drain(..).map(|piece| (Pipe::Out, piece)));
                    self.err.finish(&mut found);
                    Pipe::Err
                }
            };
            self.pieces.extend(found.into_iter().map(|piece| (pipe, piece)));
        }
    }

    /// Gives it code to run.
    pub(super) async fn request(
        &self,
        number: u64,
        code: &str,
        env: &BTreeMap<String, String>,
    ) -> Result<(), Nonsense> {
        let settings = settings(self.language, env);
        let mut request = format!("run {number} {} {}\n", code.len(), settings.len()).into_bytes();
        request.extend_from_slice(code.as_bytes());
        request.extend_from_slice(settings.as_bytes());
        match timeout(TAKE, self.exec.input(&request)).await {
            // What it says next tells of its end.
            Ok(Ok(()) | Err(exec::Closed)) => Ok(()),
            Err(_) => Err(Nonsense::new(format!("it did not take the code within {TAKE:?}"))),
        }
    }

    pub(super) fn control(&self) -> Control {
        self.exec.control()
    }

    /// Kills everything in it and says how it ended. Also right when it has ended by itself.
    pub(super) async fn kill(self, by: &str) -> exec::Ended {
        let _ = self.exec.kill(by).await;
        self.ended(KILL).await
    }

    /// Waits for the end of a driver that ends by itself.
    pub(super) async fn ended(self, within: Duration) -> exec::Ended {
        let control = self.exec.control();
        let mut end = std::pin::pin!(self.exec.ended());
        match timeout(within, &mut end).await {
            Ok(ended) => ended,
            Err(_) => {
                let _ = control
                    .kill(format!("the host: it did not end within {within:?}"))
                    .await;
                end.await
            }
        }
    }
}

fn not_cast(error: Error) -> Error {
    match error {
        Error::Unfit { reason, .. } => Error::NotCast(reason),
        error => error,
    }
}

/// Says what is wrong with a call, if anything is.
pub(super) fn check(language: Language, code: &str, env: &BTreeMap<String, String>) -> Result<(), Error> {
    if code.len() > MAX_CODE {
        return Err(Error::TooLong(code.len()));
    }
    if code.contains('\0') && language == Language::Bash {
        return Err(Error::Nul(language));
    }
    let is_name = |name: &str| match language {
        Language::Bash => {
            !name.starts_with(|first: char| first.is_ascii_digit())
                && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
        }
        Language::Python | Language::Node => !name.contains(['=', '\0']),
    };
    let bad = |(name, value): &(&String, &String)| name.is_empty() || !is_name(name) || value.contains('\0');
    match env.iter().find(bad) {
        Some((name, _)) => Err(Error::Variable(name.clone())),
        None => Ok(()),
    }
}

/// The variables of one call, in the form that the driver takes.
fn settings(language: Language, env: &BTreeMap<String, String>) -> String {
    match language {
        Language::Python | Language::Node => serde_json::json!({ "env": env }).to_string(),
        // Text to evaluate; what it leaves in `__exuvia_before` undoes it.
        Language::Bash => env.iter().fold(String::new(), |mut text, (name, value)| {
            let value = value.replace('\'', r"'\''");
            let _ = writeln!(
                text,
                "if [ -n \"${{{name}+x}}\" ]; then __exuvia_before+=\"{name}=${{{name}@Q}};\"; \
                 else __exuvia_before+='unset {name};'; fi; export {name}='{value}'"
            );
            text
        }),
    }
}

/// The random part of a mark.
fn word() -> String {
    format!("{:032x}", crate::ids::random_bits())
}
