//! `exec`, `attach`, `ps`, `signal`: the commands of a sandbox.

use std::ffi::OsString;
use std::io::Write;
use std::os::unix::ffi::OsStringExt;
use std::time::Duration;

use serde_json::{Value, json};

use super::input::Sequence;
use super::life::span;
use super::screen::Places;
use super::stream::{End, Link, Passed, Passing, Session};
use super::verdict::{self, Verdict};
use super::{plan, show, terminal};
use crate::api::proto;
use crate::cli::report::{clean, clean_line};
use crate::cli::{Context, Error, Exit, remote};
use crate::clock::{self, Clock};

pub(super) const NOTES: &str = "\
Output and exit code are the command's own; what else ended it is said on stderr:
  124  its time was up                 126  it cannot be executed (or --workdir cannot be entered)
  125  no answer from a sandbox        127  there is no such program
  137  out of memory, or killed        128+N  it died of signal N
  130  you left it (Ctrl-P Ctrl-Q, or Ctrl-] and then `.`, with -it; the fourth Ctrl-C without)

Ctrl-C goes to the command: as a key with -it, else as SIGINT; the second one sends SIGTERM and the
third SIGKILL to all its processes. When the connection breaks it is taken up again where it broke:
with `--on-disconnect keep` the command goes on meanwhile, and when you leave it by --detach-keys.

  exuvia sandbox exec sbx_… -- make test
  exuvia sandbox exec -it sbx_… -- bash
  exuvia sandbox exec -d sbx_… -- python3 server.py        prints the command's id, for `attach`";

#[derive(Debug, clap::Args)]
pub(super) struct Exec {
    /// The sandbox (`sbx_…`).
    id: String,
    /// Give it a pseudo-terminal.
    #[arg(long, short = 't', conflicts_with = "detach")]
    tty: bool,
    /// Pass standard input on; without it the command reads nothing.
    #[arg(long, short = 'i', conflicts_with = "detach")]
    stdin: bool,
    /// Start it, print its id and leave it running.
    #[arg(long, short = 'd')]
    detach: bool,
    /// Kill it after this long: `30s`, `5m` [default: the sandbox's own time].
    #[arg(long, value_name = "TIME", value_parser = crate::cli::duration)]
    timeout: Option<Duration>,
    /// How long it has between SIGTERM and SIGKILL [default: 500ms].
    #[arg(long, value_name = "TIME", value_parser = crate::cli::duration)]
    grace: Option<Duration>,
    /// Where it starts [default: /workspace].
    #[arg(long, short = 'w', value_name = "DIR")]
    workdir: Option<OsString>,
    /// Set a variable; may be repeated. Nothing else of your environment goes in, but TERM with --tty.
    #[arg(long, short = 'e', value_name = "NAME=VALUE", value_parser = plan::variable)]
    env: Vec<(String, String)>,
    /// Run as this user of the sandbox, never root [default: the sandbox's].
    #[arg(
        long,
        short = 'u',
        default_value = "",
        hide_default_value = true,
        value_name = "NAME|UID"
    )]
    user: String,
    /// Let processes live on that outlive the command.
    #[arg(long)]
    keep_background: bool,
    /// What becomes of it when the connection ends [default: kill; keep with --detach].
    #[arg(long, value_name = "WHAT")]
    on_disconnect: Option<OnDisconnect>,
    /// Leave it by these keys, with -it; empty: by none [default: `ctrl-p,ctrl-q`, and `ctrl-],.`].
    #[arg(long, value_name = "KEYS")]
    detach_keys: Option<Sequence>,
    /// The command and its arguments.
    #[arg(trailing_var_arg = true, required = true)]
    command: Vec<OsString>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum OnDisconnect {
    Keep,
    Kill,
}

impl From<OnDisconnect> for proto::OnDisconnect {
    fn from(given: OnDisconnect) -> Self {
        match given {
            OnDisconnect::Keep => Self::Keep,
            OnDisconnect::Kill => Self::Kill,
        }
    }
}

pub(super) const ATTACH_NOTES: &str = "\
Output, exit code and keys are as with `exec`: a Ctrl-C or SIGTERM goes on to the command. To leave it
running, press Ctrl-P Ctrl-Q, or Ctrl-] and then `.`, with -it (or what --detach-keys says), or end this
process by SIGHUP (close its terminal).

  exuvia sandbox attach sbx_… exe_…                        all that is kept of its output, then what comes
  exuvia sandbox attach --from 4096 sbx_… exe_…            without the first 4096 bytes of standard output";

#[derive(Debug, clap::Args)]
pub(super) struct Attach {
    /// The sandbox (`sbx_…`).
    id: String,
    /// The command, as `exec --detach` and `ps` print it.
    exec: String,
    /// The first byte wanted of its standard output, or of its terminal.
    #[arg(long, default_value_t = 0, value_name = "OFFSET")]
    from: u64,
    /// The first byte wanted of its standard error.
    #[arg(long, default_value_t = 0, value_name = "OFFSET")]
    from_stderr: u64,
    /// Pass standard input on.
    #[arg(long, short = 'i')]
    stdin: bool,
    /// It has a pseudo-terminal: use this one raw, and tell it its size.
    #[arg(long, short = 't')]
    tty: bool,
    /// Leave it by these keys, with -it; empty: by none [default: `ctrl-p,ctrl-q`, and `ctrl-],.`].
    #[arg(long, value_name = "KEYS")]
    detach_keys: Option<Sequence>,
}

#[derive(Debug, clap::Args)]
pub(super) struct Ps {
    /// The sandbox (`sbx_…`).
    id: String,
}

#[derive(Debug, clap::Args)]
pub(super) struct Signal {
    /// The sandbox (`sbx_…`).
    id: String,
    /// The command, as `exec --detach` and `ps` print it.
    exec: String,
    /// By name or number; 0 sends none, but tells whether it runs.
    #[arg(default_value = "TERM", value_parser = signal_number)]
    signal: i32,
    /// To every process of the command, not its process group alone.
    #[arg(long)]
    tree: bool,
}

fn signal_number(text: &str) -> Result<i32, String> {
    use nix::sys::signal::Signal;
    if let Ok(number) = text.parse() {
        return match number {
            0..=64 => Ok(number),
            _ => Err("signals go from 1 to 64".to_owned()),
        };
    }
    let upper = text.to_uppercase();
    let name = if upper.starts_with("SIG") {
        upper
    } else {
        format!("SIG{upper}")
    };
    let signal: Result<Signal, _> = name.parse();
    signal
        .map(|signal| signal as i32)
        .map_err(|_| "no such signal".to_owned())
}

impl Exec {
    fn start(self) -> Result<proto::ExecStart, Error> {
        let mut env: std::collections::HashMap<String, String> = self.env.into_iter().collect();
        if self.tty
            && let (false, Ok(term)) = (env.contains_key("TERM"), std::env::var("TERM"))
        {
            env.insert("TERM".to_owned(), term);
        }
        let on_disconnect = match (self.on_disconnect, self.detach) {
            (Some(given), _) => given.into(),
            (None, true) => proto::OnDisconnect::Keep,
            (None, false) => proto::OnDisconnect::Kill,
        };
        let background = match self.keep_background {
            true => proto::Background::Keep,
            false => proto::Background::Kill,
        };
        Ok(proto::ExecStart {
            sandbox_id: self.id,
            argv: self.command.into_iter().map(OsString::into_vec).collect(),
            env,
            cwd: self.workdir.map(OsString::into_vec).unwrap_or_default(),
            timeout: self.timeout.map(span).transpose()?,
            stdin: self.stdin,
            terminal: self.tty.then(terminal::size),
            on_disconnect: on_disconnect.into(),
            background: background.into(),
            overflow: proto::Overflow::Wait.into(),
            user: self.user,
            grace: self.grace.map(span).transpose()?,
            by: crate::cli::person(),
        })
    }
}

pub(super) async fn exec(args: Exec, server: &str, context: &Context) -> Result<Exit, Error> {
    let passing = Passing {
        stdin: args.stdin,
        terminal: args.tty,
    };
    if args.detach {
        return detach(args, server, context).await;
    }
    let keeps = args.on_disconnect.unwrap_or(OnDisconnect::Kill);
    let detach_keys = args.detach_keys.clone().map_or_else(Sequence::usual, |keys| vec![keys]);
    let sandbox = args.id.clone();
    let started = async {
        let start = args.start()?;
        let mut client = remote::sandboxes(server).await?;
        let (link, started) = Link::exec(&mut client, start).await?;
        Ok((client, link, started.exec_id))
    };
    let (client, link, exec) = match started.await {
        Ok(started) => started,
        Err(error) => return Ok(Report::not_started(error).give(context)),
    };
    let session = Session {
        client,
        sandbox,
        exec,
        places: Places::default(),
        passing,
        detach_keys,
    };
    Ok(follow(session, link, Some(keeps)).await.give(context))
}

/// What started is there for others: its exit code is not ours to pass on.
async fn detach(args: Exec, server: &str, context: &Context) -> Result<Exit, Error> {
    let sandbox = args.id.clone();
    let mut client = remote::sandboxes(server).await?;
    let (link, started) = Link::exec(&mut client, args.start()?).await?;
    drop(link);
    let object = json!({ "sandbox_id": sandbox, "exec_id": started.exec_id, "pid": started.pid });
    context.finish(&object, &clean_line(&started.exec_id));
    Ok(Exit::Ok)
}

pub(super) async fn attach(args: Attach, server: &str, context: &Context) -> Result<Exit, Error> {
    let attached = async {
        let mut client = remote::sandboxes(server).await?;
        let start = proto::AttachStart {
            sandbox_id: args.id.clone(),
            exec_id: args.exec.clone(),
            stdout_offset: args.from,
            stderr_offset: args.from_stderr,
            pty_offset: args.from,
        };
        let link = Link::attach(&mut client, start).await?;
        Ok::<_, Error>((client, link))
    };
    let (client, link) = match attached.await {
        Ok(attached) => attached,
        Err(error) => return Ok(Report::not_started(error).give(context)),
    };
    let session = Session {
        client,
        sandbox: args.id,
        exec: args.exec,
        places: Places {
            stdout: args.from,
            stderr: args.from_stderr,
            pty: args.from,
        },
        passing: Passing {
            stdin: args.stdin,
            terminal: args.tty,
        },
        detach_keys: args.detach_keys.map_or_else(Sequence::usual, |keys| vec![keys]),
    };
    Ok(follow(session, link, None).await.give(context))
}

/// `keeps`: what becomes of it when somebody leaves, as far as that is known here.
async fn follow(session: Session, link: Link, keeps: Option<OnDisconnect>) -> Report {
    let (sandbox, exec) = (session.sandbox.clone(), session.exec.clone());
    let mut object = json!({ "sandbox_id": sandbox, "exec_id": exec });
    let Passed { end, is_mid_line } = session.follow(link).await;
    let (verdict, notes) = match end {
        End::Ended(ended) => {
            if let (Value::Object(object), Value::Object(more)) = (&mut object, show::ended(&ended)) {
                object.extend(more);
            }
            (Verdict::ended(&ended), verdict::pressure(&ended))
        }
        End::NobodyReads => (Verdict::output_closed(), Vec::new()),
        End::Unwritten(error) => (Verdict::unwritten(&error), Vec::new()),
        End::Left => {
            object["cause"] = json!({ "type": "left" });
            let note = match keeps {
                Some(OnDisconnect::Keep) => format!("it goes on: exuvia sandbox attach {sandbox} {exec}"),
                Some(OnDisconnect::Kill) => "it ends with the connection".to_owned(),
                None => format!(
                    "it goes on, unless it was started to end with its connection: exuvia sandbox attach {sandbox} {exec}"
                ),
            };
            (Verdict::left(), vec![note])
        }
        End::Failed(error) => {
            object["error"] = error_object(&error);
            (Verdict::no_answer(&error), Vec::new())
        }
    };
    Report {
        verdict,
        notes,
        object,
        is_mid_line,
    }
}

fn error_object(error: &Error) -> Value {
    json!({ "kind": error.kind, "message": error.message, "hint": error.hint })
}

/// What is said and given at the end.
struct Report {
    verdict: Verdict,
    notes: Vec<String>,
    object: Value,
    is_mid_line: bool,
}

impl Report {
    fn not_started(error: Error) -> Self {
        Self {
            object: json!({ "error": error_object(&error) }),
            verdict: Verdict::refused(&error),
            notes: Vec::new(),
            is_mid_line: false,
        }
    }

    /// Says it, and gives the exit code.
    fn give(mut self, context: &Context) -> Exit {
        for text in self.verdict.said.iter().chain(&self.notes) {
            err!("exuvia: {}", clean(text));
        }
        if context.json {
            self.object["exit_code"] = self.verdict.code.into();
            let separator = if self.is_mid_line { "\n" } else { "" };
            // Nobody may be reading any more: nothing here can fail for that.
            let _ = writeln!(std::io::stdout(), "{separator}{}", self.object);
        }
        Exit::Passed(self.verdict.code)
    }
}

pub(super) async fn signal(args: Signal, server: &str, context: &Context) -> Result<Exit, Error> {
    let request = proto::SignalRequest {
        sandbox_id: args.id,
        exec_id: args.exec,
        signal: args.signal,
        tree: args.tree,
        by: crate::cli::person(),
    };
    remote::sandboxes(server).await?.signal(request).await?;
    context.finish(&json!({ "signal": args.signal }), "");
    Ok(Exit::Ok)
}

pub(super) async fn ps(args: Ps, server: &str, context: &Context) -> Result<Exit, Error> {
    let request = proto::ListExecsRequest { sandbox_id: args.id };
    let answer = remote::sandboxes(server).await?.list_execs(request).await?.into_inner();
    let objects: Vec<Value> = answer.execs.iter().map(exec_object).collect();
    let now = clock::System.now();
    context.finish(&json!({ "execs": objects }), &clean(&listing(&answer.execs, now)));
    Ok(Exit::Ok)
}

fn exec_object(exec: &proto::ExecInfo) -> Value {
    let argv: Vec<String> = exec
        .argv
        .iter()
        .map(|word| String::from_utf8_lossy(word).into_owned())
        .collect();
    json!({ "exec_id": exec.exec_id, "argv": argv, "pid": exec.pid, "attached": exec.attached,
        "started_at": exec.started_at.as_ref().map(|at| show::millis(at).to_string()),
        "ended": exec.ended.as_ref().map(show::ended) })
}

fn listing(execs: &[proto::ExecInfo], now: clock::Timestamp) -> String {
    let rows: Vec<Vec<String>> = execs
        .iter()
        .map(|exec| {
            let state = match &exec.ended {
                None if exec.attached => "running, attached".to_owned(),
                None => "running".to_owned(),
                Some(ended) => {
                    let verdict = Verdict::ended(ended);
                    verdict.said.unwrap_or_else(|| format!("exited {}", verdict.code))
                }
            };
            let age = exec.started_at.as_ref().map(|at| show::span(show::since(at, now)));
            let words: Vec<String> = exec
                .argv
                .iter()
                .map(|word| crate::cli::quoted(&show::name(word)))
                .collect();
            vec![
                exec.exec_id.clone(),
                exec.pid.to_string(),
                age.unwrap_or_else(|| "-".to_owned()),
                state,
                words.join(" "),
            ]
        })
        .collect();
    show::table(&["EXEC", "PID", "AGE", "STATE", "COMMAND"], &rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_listed_with_how_they_ended() {
        let exec = |id: &str, words: &[&str], ended: Option<proto::ExecEnded>| proto::ExecInfo {
            exec_id: id.into(),
            argv: words.iter().map(|word| word.as_bytes().to_vec()).collect(),
            pid: 7,
            started_at: Some(prost_types::Timestamp { seconds: 0, nanos: 0 }),
            attached: ended.is_none(),
            ended,
        };
        let ended = |cause: proto::exec_ended::Cause, code| proto::ExecEnded {
            cause: cause.into(),
            exit_code: code,
            limit: Some(1_500),
            ..Default::default()
        };
        use proto::exec_ended::Cause;
        let all = [
            exec("exe_a", &["sh", "-c", "echo 'a b'"], None),
            exec("exe_b", &["true"], Some(ended(Cause::Exited, Some(0)))),
            exec("exe_c", &["sleep", "9\u{1b}"], Some(ended(Cause::TimedOut, None))),
        ];
        insta::assert_snapshot!(listing(&all, clock::Timestamp(61_000)));
    }

    #[test]
    fn signals_have_names_and_numbers() {
        assert_eq!(signal_number("int"), Ok(2));
        assert_eq!(signal_number("SIGKILL"), Ok(9));
        assert_eq!(signal_number("0"), Ok(0));
        assert!(signal_number("65").is_err() && signal_number("-1").is_err() && signal_number("SIGX").is_err());
    }

    #[test]
    fn a_command_may_stand_without_a_dash_and_keeps_its_own_flags() {
        use clap::Parser;

        #[derive(Parser)]
        struct Cli {
            #[command(flatten)]
            exec: Exec,
        }
        for line in [
            "exec sbx_a ls -la --tty /",
            "exec sbx_a -- ls -la --tty /",
            "exec sbx_a --timeout 1s ls -la --tty /",
            "exec --timeout 1s sbx_a -- ls -la --tty /",
        ] {
            let exec = Cli::try_parse_from(line.split(' ')).unwrap().exec;
            assert_eq!(exec.command, ["ls", "-la", "--tty", "/"], "{line}");
            assert_eq!((exec.id.as_str(), exec.tty), ("sbx_a", false), "{line}");
        }
        let tty = Cli::try_parse_from("exec sbx_a -t -- -x".split(' ')).unwrap().exec;
        assert_eq!((tty.tty, tty.command), (true, vec!["-x".into()]));
        // A flag of ours that is mistyped is still told, and is not the command.
        assert!(Cli::try_parse_from("exec sbx_a --tyt ls".split(' ')).is_err());
    }
}
