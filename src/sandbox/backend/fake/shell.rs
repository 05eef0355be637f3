//! A shell that is just large enough for tests: a few commands on the workspace directory, no process.
//!
//! Lists with `;`, newline, `&&` and `||`, quotes, `$NAME` and `${NAME}`, `>` and `>>` into a file, `2>&1`, `>&2`.
//! Everything else is told on standard error with code 2, so that a test that needs more sees it.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::guest::Io;
use crate::wire::{Exec, Stream};

const COMMANDS: [&str; 16] = [
    "true", "false", "echo", "printf", "cat", "sleep", "exit", "pwd", "env", "sh", "cd", "test", "mkdir", "rm", "ls",
    ":",
];

/// The state of one running shell.
pub(super) struct Shell {
    workspace: Option<PathBuf>,
    /// As the program sees it.
    cwd: String,
    env: BTreeMap<String, String>,
}

/// Turns a path of the sandbox into one below the workspace; others stay what they are not: there.
pub(super) fn inside(path: &mut Vec<u8>) {
    match path.strip_prefix(b"/workspace") {
        Some(rest) if rest.is_empty() || rest.starts_with(b"/") => *path = rest.to_vec(),
        Some(_) | None if path.starts_with(b"/") => *path = b"/\xff outside of the workspace".to_vec(),
        Some(_) | None => {}
    }
    if path.is_empty() {
        path.push(b'/');
    }
}

#[derive(Debug, PartialEq)]
enum Token {
    Word(String),
    Operator(&'static str),
}

impl Shell {
    /// # Errors
    /// Code and message of the fault that a real guest would give.
    pub fn new(exec: &Exec, workspace: Option<PathBuf>) -> Result<Self, (&'static str, String)> {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let env = exec.env.iter().map(|var| (text(&var.name), text(&var.value)));
        let shell = Self {
            workspace,
            cwd: text(&exec.cwd),
            env: env.collect(),
        };
        let known = shell.host_path(&shell.cwd).is_some_and(|path| path.is_dir());
        if !known && !matches!(shell.cwd.as_str(), "/" | "/tmp") {
            let message = format!("working directory `{}`: No such file or directory", shell.cwd);
            return Err(("cwd_not_found", message));
        }
        let program = exec.argv.first().map(|name| text(name)).unwrap_or_default();
        let name = program.rsplit('/').next().unwrap_or_default();
        if !COMMANDS.contains(&name) {
            return Err(("program_not_found", format!("no program `{program}`")));
        }
        Ok(shell)
    }

    /// Where a path of the sandbox is on this host; `None` outside of the workspace.
    fn host_path(&self, path: &str) -> Option<PathBuf> {
        let joined = Path::new(&self.cwd).join(path);
        let below = joined.strip_prefix("/workspace").ok()?;
        let plain = below
            .components()
            .all(|part| matches!(part, std::path::Component::Normal(_)));
        plain
            .then(|| self.workspace.as_ref().map(|workspace| workspace.join(below)))
            .flatten()
    }

    /// Runs one program to its exit code.
    pub async fn run(&mut self, argv: Vec<Vec<u8>>, io: &mut Io) -> i32 {
        let words: Vec<_> = argv
            .iter()
            .map(|word| String::from_utf8_lossy(word).into_owned())
            .collect();
        let name = words[0].rsplit('/').next().unwrap_or_default();
        match name {
            "sh" if words.get(1).is_some_and(|option| option == "-c" || option == "-ec") && words.len() > 2 => {
                self.script(&words[2], io).await.unwrap_or_else(|code| code)
            }
            "sh" => complain(io, "sh: the fake runs `sh -c TEXT` alone").await,
            _ => {
                let words = words.iter().map(String::as_str).collect::<Vec<_>>();
                self.command(
                    name,
                    &words[1..],
                    &mut Target::Stream(Stream::Stdout),
                    Stream::Stderr,
                    io,
                )
                .await
                .unwrap_or_else(|code| code)
            }
        }
    }

    /// Runs a list; `Err` when `exit` ended it.
    async fn script(&mut self, text: &str, io: &mut Io) -> Result<i32, i32> {
        let tokens = match self.tokens(text) {
            Ok(tokens) => tokens,
            Err(problem) => return Ok(complain(io, &problem).await),
        };
        let (mut code, mut start, mut joined) = (0, 0, ";");
        for end in 0..=tokens.len() {
            let operator = match tokens.get(end) {
                Some(Token::Operator(operator @ (";" | "&&" | "||"))) => operator,
                Some(Token::Operator(_) | Token::Word(_)) => continue,
                None => ";",
            };
            let wanted = match joined {
                "&&" => code == 0,
                "||" => code != 0,
                _ => true,
            };
            if wanted && start < end {
                code = self.simple(&tokens[start..end], io).await?;
            }
            (start, joined) = (end + 1, operator);
        }
        Ok(code)
    }

    async fn simple(&mut self, tokens: &[Token], io: &mut Io) -> Result<i32, i32> {
        io.thawed().await;
        let (mut words, mut stdout, mut stderr) = (Vec::new(), Target::Stream(Stream::Stdout), Stream::Stderr);
        let mut tokens = tokens.iter();
        while let Some(token) = tokens.next() {
            match token {
                Token::Word(word) => words.push(self.expand(word)),
                Token::Operator("2>&1") => stderr = Stream::Stdout,
                Token::Operator(">&2") => stdout = Target::Stream(Stream::Stderr),
                Token::Operator(operator) => {
                    let Some(Token::Word(name)) = tokens.next() else {
                        return Ok(complain(io, "sh: a redirection without a file").await);
                    };
                    let name = self.expand(name);
                    let Some(path) = self.host_path(&name) else {
                        return Ok(complain(io, &format!("sh: {name}: outside of the workspace")).await);
                    };
                    let append = *operator == ">>";
                    let opened = fs::OpenOptions::new()
                        .create(true)
                        .write(true)
                        .append(append)
                        .truncate(!append)
                        .open(path);
                    match opened {
                        Ok(file) => stdout = Target::File(file),
                        Err(error) => return Ok(complain(io, &format!("sh: {name}: {error}")).await),
                    }
                }
            }
        }
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let Some((name, arguments)) = words.split_first() else {
            return Ok(0);
        };
        if let Some((name, value)) = name.split_once('=')
            && arguments.is_empty()
        {
            self.env.insert(name.to_owned(), value.to_owned());
            return Ok(0);
        }
        self.command(name, arguments, &mut stdout, stderr, io).await
    }

    async fn command(
        &mut self,
        name: &str,
        arguments: &[&str],
        stdout: &mut Target,
        stderr: Stream,
        io: &mut Io,
    ) -> Result<i32, i32> {
        let failed = |what: &str, error: std::io::Error| format!("{name}: {what}: {error}\n");
        let problem = match (name, arguments) {
            ("true" | ":", _) => return Ok(0),
            ("false", _) => return Ok(1),
            ("exit", []) => return Err(0),
            ("exit", [code, ..]) => return Err(code.parse::<u8>().map_or(2, i32::from)),
            ("echo", words) => return stdout.write(io, format!("{}\n", words.join(" ")).as_bytes()).await,
            ("printf", [format, words @ ..]) => return stdout.write(io, &printf(format, words)).await,
            ("pwd", []) => return stdout.write(io, format!("{}\n", self.cwd).as_bytes()).await,
            ("env", []) => {
                let lines = self.env.iter().map(|(name, value)| format!("{name}={value}\n"));
                return stdout.write(io, lines.collect::<String>().as_bytes()).await;
            }
            ("sleep", [time]) => match time.trim_end_matches('s').parse() {
                Ok(seconds) => {
                    io.sleep(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
                        .await;
                    return Ok(0);
                }
                Err(_) => format!("sleep: {time}: not a time\n"),
            },
            ("cat", []) => {
                while let Some(piece) = io.read().await {
                    stdout.write(io, &piece).await?;
                }
                return Ok(0);
            }
            ("cat" | "ls" | "cd" | "rm" | "mkdir" | "test", words) => {
                let (options, paths): (Vec<&str>, Vec<&str>) = words.iter().partition(|word| word.starts_with('-'));
                let paths = if paths.is_empty() { vec![""] } else { paths };
                let mut problem = String::new();
                for what in paths {
                    let Some(path) = self.host_path(what) else {
                        problem = format!("{name}: {what}: outside of the workspace\n");
                        break;
                    };
                    let result = match name {
                        "cat" => fs::read(&path),
                        "ls" => listing(&path),
                        "rm" if path.is_dir() && !options.is_empty() => fs::remove_dir_all(&path).map(|()| Vec::new()),
                        "rm" if !path.exists() && options.iter().any(|option| option.contains('f')) => Ok(Vec::new()),
                        "rm" => fs::remove_file(&path).map(|()| Vec::new()),
                        "mkdir" if options.is_empty() => fs::create_dir(&path).map(|()| Vec::new()),
                        "mkdir" => fs::create_dir_all(&path).map(|()| Vec::new()),
                        "test" => {
                            let holds = match options.as_slice() {
                                ["-f"] => path.is_file(),
                                ["-d"] => path.is_dir(),
                                _ => path.exists(),
                            };
                            return Ok(i32::from(!holds));
                        }
                        _ => path.read_dir().map(|_| {
                            self.cwd = Path::new(&self.cwd).join(what).to_string_lossy().into_owned();
                            Vec::new()
                        }),
                    };
                    match result {
                        Ok(bytes) => drop(stdout.write(io, &bytes).await?),
                        Err(error) => problem = failed(what, error),
                    }
                }
                if problem.is_empty() {
                    return Ok(0);
                }
                problem
            }
            ("sh", ["-c", text, ..]) => return Box::pin(self.script(text, io)).await.or_else(Ok),
            _ => {
                io.write(stderr, format!("sh: {name}: not found\n").as_bytes()).await;
                return Ok(127);
            }
        };
        io.write(stderr, problem.as_bytes()).await;
        Ok(1)
    }

    /// Splits a text. A variable's mark in a word is left for when the word is used.
    fn tokens(&self, text: &str) -> Result<Vec<Token>, String> {
        const OPERATORS: [&str; 7] = ["&&", "||", "2>&1", ">&2", ">>", ">", ";"];
        let (mut tokens, mut word, mut rest) = (Vec::new(), None::<String>, text);
        while let Some(next) = rest.chars().next() {
            let at_start = word.is_none();
            if let Some(operator) = OPERATORS.into_iter().find(|operator| rest.starts_with(operator))
                && (at_start || !operator.starts_with('2'))
            {
                tokens.extend(word.take().map(Token::Word));
                tokens.push(Token::Operator(operator));
                rest = &rest[operator.len()..];
                continue;
            }
            rest = &rest[next.len_utf8()..];
            match next {
                '\n' => {
                    tokens.extend(word.take().map(Token::Word));
                    tokens.push(Token::Operator(";"));
                }
                ' ' | '\t' => tokens.extend(word.take().map(Token::Word)),
                '\'' => {
                    let (quoted, after) = rest.split_once('\'').ok_or("sh: a quote is not closed")?;
                    // A dollar in it is only itself.
                    word.get_or_insert_default()
                        .push_str(&quoted.replace('$', LITERAL_DOLLAR));
                    rest = after;
                }
                '"' => {
                    let (quoted, after) = rest.split_once('"').ok_or("sh: a quote is not closed")?;
                    word.get_or_insert_default().push_str(quoted);
                    rest = after;
                }
                '\\' => {
                    let escaped = rest.chars().next().ok_or("sh: a backslash at the end")?;
                    word.get_or_insert_default().push(escaped);
                    rest = &rest[escaped.len_utf8()..];
                }
                '|' | '&' | '<' | '(' | ')' | '`' | '*' => return Err(format!("sh: the fake knows no `{next}`")),
                other => word.get_or_insert_default().push(other),
            }
        }
        tokens.extend(word.map(Token::Word));
        Ok(tokens)
    }

    fn expand(&self, word: &str) -> String {
        let mut expanded = String::new();
        let mut parts = word.split('$');
        expanded.push_str(parts.next().unwrap_or_default());
        for part in parts {
            let (name, rest) = match part.strip_prefix('{').and_then(|inner| inner.split_once('}')) {
                Some((name, rest)) => (name, rest),
                None => part.split_at(
                    part.find(|c: char| !c.is_ascii_alphanumeric() && c != '_')
                        .unwrap_or(part.len()),
                ),
            };
            expanded.push_str(self.env.get(name).map_or("", String::as_str));
            expanded.push_str(rest);
        }
        expanded.replace(LITERAL_DOLLAR, "$")
    }
}

/// Stands for a quoted dollar: a character of no meaning, from the private use area.
const LITERAL_DOLLAR: &str = "\u{e000}";

/// Where standard output goes.
enum Target {
    Stream(Stream),
    File(fs::File),
}

impl Target {
    async fn write(&mut self, io: &mut Io, bytes: &[u8]) -> Result<i32, i32> {
        match self {
            Self::Stream(stream) => io.write(*stream, bytes).await,
            Self::File(file) => {
                if let Err(error) = file.write_all(bytes) {
                    return Ok(complain(io, &error.to_string()).await);
                }
            }
        }
        Ok(0)
    }
}

async fn complain(io: &mut Io, problem: &str) -> i32 {
    io.write(Stream::Stderr, format!("{problem}\n").as_bytes()).await;
    2
}

fn listing(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut names = Vec::new();
    for entry in path.read_dir()? {
        names.push([entry?.file_name().as_bytes(), b"\n"].concat());
    }
    names.sort();
    Ok(names.concat())
}

/// `%s`, `%%`, `\n`, `\t`, `\\` and octal escapes.
fn printf(format: &str, words: &[&str]) -> Vec<u8> {
    let (mut words, mut bytes, mut rest) = (words.iter(), Vec::new(), format.as_bytes());
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        match (first, rest.first()) {
            (b'%', Some(b's')) => bytes.extend(words.next().unwrap_or(&"").as_bytes()),
            (b'%', Some(b'%')) => bytes.push(b'%'),
            (b'\\', Some(b'n')) => bytes.push(b'\n'),
            (b'\\', Some(b't')) => bytes.push(b'\t'),
            (b'\\', Some(b'\\')) => bytes.push(b'\\'),
            (b'\\', Some(b'0'..=b'7')) => {
                let digits = rest
                    .iter()
                    .take(3)
                    .take_while(|digit| matches!(digit, b'0'..=b'7'))
                    .count();
                bytes.push(
                    rest[..digits]
                        .iter()
                        .fold(0, |value: u8, digit| value.wrapping_mul(8).wrapping_add(digit - b'0')),
                );
                rest = &rest[digits..];
                continue;
            }
            (byte, _) => {
                bytes.push(*byte);
                continue;
            }
        }
        rest = &rest[1..];
    }
    bytes
}
