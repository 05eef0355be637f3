//! `run-code`, and `context …`: language kernels.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine as _;
use serde_json::{Value, json};

use super::life::span;
use super::verdict::Verdict;
use super::{At, plan, screen, show};
use crate::api::proto;
use crate::cli::report::{clean, clean_line};
use crate::cli::{Context, Error, Exit, remote};
use crate::error::Kind;

#[derive(Debug, clap::Args)]
pub(super) struct RunCode {
    /// The sandbox (`sbx_…`).
    id: String,
    /// A file with the code; `-` or nothing = standard input.
    #[arg(default_value = "-", value_name = "FILE")]
    file: PathBuf,
    /// The code itself.
    #[arg(long, short, conflicts_with = "file", value_name = "TEXT")]
    code: Option<String>,
    /// `python`, `bash`, `node` [default: python, or the context's].
    #[arg(long, short, default_value = "", hide_default_value = true)]
    language: String,
    /// In this context, which keeps its state [default: in a fresh process].
    #[arg(long, default_value = "", hide_default_value = true, value_name = "ID")]
    context: String,
    /// Interrupt it after this long.
    #[arg(long, value_name = "TIME", value_parser = crate::cli::duration)]
    timeout: Option<Duration>,
    /// Set a variable; may be repeated.
    #[arg(long, short = 'e', value_name = "NAME=VALUE", value_parser = plan::variable)]
    env: Vec<(String, String)>,
    /// Write what is no text (images) into this directory, as `result-1.png`, …
    #[arg(long, value_name = "DIR")]
    save: Option<PathBuf>,
}

#[derive(Debug, clap::Subcommand)]
pub(super) enum Contexts {
    /// Start a kernel; prints its id.
    Create(At<Create>),
    /// List the kernels of a sandbox.
    List(At<Sandbox>),
    /// As Ctrl-C: the code ends with an error, the state stays.
    Interrupt(At<One>),
    /// A fresh kernel under the same id.
    Restart(At<One>),
    /// End a kernel.
    Delete(At<One>),
}

#[derive(Debug, clap::Args)]
pub(super) struct Create {
    /// The sandbox (`sbx_…`).
    id: String,
    /// `python`, `bash`, `node`.
    #[arg(long, short, default_value = "python")]
    language: String,
    /// Where it starts [default: /workspace].
    #[arg(long, short = 'w', value_name = "DIR")]
    workdir: Option<OsString>,
    /// Set a variable; may be repeated.
    #[arg(long, short = 'e', value_name = "NAME=VALUE", value_parser = plan::variable)]
    env: Vec<(String, String)>,
}

#[derive(Debug, clap::Args)]
pub(super) struct Sandbox {
    /// The sandbox (`sbx_…`).
    id: String,
}

#[derive(Debug, clap::Args)]
pub(super) struct One {
    /// The sandbox (`sbx_…`).
    id: String,
    /// The context (`ctx_…`).
    context: String,
}

/// Exit codes: 0 the code ran to its end, 1 it ended with an error, 124 its time was up, 130 it was interrupted; when the
/// kernel itself ended, as for `exec`. A fresh process ends with its own exit code.
pub(super) async fn run_code(args: RunCode, server: &str, context: &Context) -> Result<Exit, Error> {
    let code = match args.code {
        Some(code) => code,
        None => read(&args.file)?,
    };
    let is_fresh = args.context.is_empty();
    let request = proto::RunCodeRequest {
        sandbox_id: args.id,
        language: args.language,
        code,
        context_id: args.context,
        timeout: args.timeout.map(span).transpose()?,
        env: args.env.into_iter().collect(),
        by: crate::cli::person(),
    };
    let mut events = remote::sandboxes(server).await?.run_code(request).await?.into_inner();
    let mut shown = Shown {
        as_json: context.json,
        is_fresh,
        save: args.save,
        places: screen::Places::default(),
        saved: 0,
        is_mid_line: false,
    };
    while let Some(event) = events.message().await? {
        use proto::code_event::Kind as Event;
        match event.kind {
            Some(Event::Stdout(output)) => shown.stdout(output),
            Some(Event::Stderr(output)) => shown.stderr(output),
            Some(Event::Result(result)) => shown.result(result)?,
            Some(Event::Error(error)) => shown.error(&error),
            Some(Event::Ended(ended)) => return Ok(shown.ended(&ended)),
            None => {}
        }
    }
    Err(Error::new(
        Kind::Unavailable,
        "the server ended the stream before the code had ended",
    ))
}

fn read(file: &Path) -> Result<String, Error> {
    let mut code = String::new();
    let read = match file == Path::new("-") {
        true => std::io::stdin().read_to_string(&mut code),
        false => std::fs::File::open(file).and_then(|mut file| file.read_to_string(&mut code)),
    };
    read.map_err(|error| {
        Error::new(
            Kind::Invalid,
            format!("cannot read the code from `{}`: {error}", file.display()),
        )
    })?;
    Ok(code)
}

/// What was shown so far. With --json each thing is one object on a line.
struct Shown {
    as_json: bool,
    /// Whether the code has a process of its own.
    is_fresh: bool,
    save: Option<PathBuf>,
    places: screen::Places,
    saved: u32,
    is_mid_line: bool,
}

impl Shown {
    fn stdout(&mut self, output: proto::ExecOutput) {
        let bytes = screen::take(&mut self.places.stdout, output).bytes;
        if self.as_json {
            return out!("{}", json!({ "stdout": String::from_utf8_lossy(&bytes) }));
        }
        self.is_mid_line = !bytes.ends_with(b"\n");
        let mut stdout = std::io::stdout();
        // A reader that has gone away ends nothing.
        let _ = stdout.write_all(&bytes).and_then(|()| stdout.flush());
    }

    fn stderr(&mut self, output: proto::ExecOutput) {
        let bytes = screen::take(&mut self.places.stderr, output).bytes;
        if self.as_json {
            return out!("{}", json!({ "stderr": String::from_utf8_lossy(&bytes) }));
        }
        let _ = std::io::stderr().write_all(&bytes);
    }

    fn result(&mut self, result: proto::CodeResult) -> Result<(), Error> {
        let data: BTreeMap<String, Vec<u8>> = result.data.into_iter().collect();
        let mut files = Vec::new();
        if let Some(folder) = &self.save {
            for (kind, bytes) in data.iter().filter(|(kind, _)| !is_text(kind)) {
                self.saved += 1;
                let path = folder.join(format!("result-{}.{}", self.saved, ending(kind)));
                std::fs::write(&path, bytes).map_err(|error| {
                    // Half of it is worth nothing.
                    let _ = std::fs::remove_file(&path);
                    Error::local(&format!("cannot write `{}`", path.display()), &error)
                })?;
                files.push(path);
            }
        }
        if self.as_json {
            let data: BTreeMap<&str, Value> = data
                .iter()
                .map(|(kind, bytes)| (kind.as_str(), encoded(kind, bytes)))
                .collect();
            out!(
                "{}",
                json!({ "result": { "data": data, "is_main": result.is_main, "files": files } })
            );
            return Ok(());
        }
        self.end_line();
        if let Some(text) = data.get("text/plain") {
            out!("{}", clean(&String::from_utf8_lossy(text)));
        }
        for path in files {
            err!("{}", path.display());
        }
        let others: Vec<String> = data
            .iter()
            .filter(|(kind, _)| *kind != "text/plain")
            .map(|(kind, bytes)| format!("{} ({})", clean_line(kind), show::size(bytes.len() as u64)))
            .collect();
        if self.save.is_none() && !others.is_empty() {
            err!("also as {}: --save DIR, or --json", others.join(", "));
        }
        Ok(())
    }

    fn error(&mut self, error: &proto::CodeError) {
        if self.as_json {
            let object = json!({ "name": error.name, "value": error.value, "traceback": error.traceback });
            return out!("{}", json!({ "error": object }));
        }
        self.end_line();
        match error.traceback.is_empty() {
            true => err!("{}: {}", clean_line(&error.name), clean(&error.value)),
            false => err!("{}", clean(error.traceback.trim_end())),
        }
    }

    fn ended(&mut self, ended: &proto::CodeEnded) -> Exit {
        let verdict = verdict(ended, self.is_fresh);
        self.end_line();
        if let Some(text) = &verdict.said {
            err!("exuvia: {}", clean(text));
        }
        if self.as_json {
            let span = ended
                .duration
                .as_ref()
                .map(|span| show::duration(span).as_millis() as u64);
            let object = json!({ "ok": ended.ok, "timed_out": ended.timed_out, "interrupted": ended.interrupted,
                "duration_ms": span, "execution_count": ended.execution_count,
                "dropped_results": ended.dropped_results, "kernel": ended.kernel.as_ref().map(show::ended), "exit_code": verdict.code });
            out!("{}", json!({ "ended": object }));
        }
        Exit::Passed(verdict.code)
    }

    fn end_line(&mut self) {
        if std::mem::take(&mut self.is_mid_line) && !self.as_json {
            out!();
        }
    }
}

fn verdict(ended: &proto::CodeEnded, is_fresh: bool) -> Verdict {
    match ended {
        proto::CodeEnded { ok: true, .. } => Verdict::code(0, None),
        proto::CodeEnded {
            timed_out: true,
            kernel: None,
            ..
        } => Verdict::code(124, Some("timed out; the state stays")),
        proto::CodeEnded { timed_out: true, .. } => Verdict::code(124, Some("timed out")),
        // A process of its own: it ends as the code does.
        proto::CodeEnded {
            kernel: Some(kernel), ..
        } if is_fresh && kernel.cause() == proto::exec_ended::Cause::Exited => {
            Verdict::code(u8::try_from(kernel.exit_code()).unwrap_or(1).max(1), None)
        }
        proto::CodeEnded {
            kernel: Some(kernel), ..
        } => Verdict::kernel(kernel),
        proto::CodeEnded { interrupted: true, .. } => Verdict::code(130, Some("interrupted")),
        proto::CodeEnded { .. } => Verdict::code(1, None),
    }
}

fn is_text(kind: &str) -> bool {
    kind.starts_with("text/") || matches!(kind, "application/json" | "image/svg+xml")
}

fn encoded(kind: &str, bytes: &[u8]) -> Value {
    match std::str::from_utf8(bytes) {
        Ok(text) if is_text(kind) => text.into(),
        Ok(_) | Err(_) => base64::engine::general_purpose::STANDARD.encode(bytes).into(),
    }
}

/// Of a file with that content. What kernels say is not ours: nothing but letters and digits gets through.
fn ending(kind: &str) -> String {
    let kind = kind.rsplit('/').next().unwrap_or_default();
    let plain: String = kind.chars().filter(char::is_ascii_alphanumeric).take(12).collect();
    if plain.is_empty() { "bin".to_owned() } else { plain }
}

pub(super) async fn contexts(contexts: Contexts, context: &Context) -> Result<Exit, Error> {
    let asked = |one: One| proto::ContextRequest {
        sandbox_id: one.id,
        context_id: one.context,
        by: crate::cli::person(),
    };
    let kernel = match contexts {
        Contexts::Create(at) => {
            let request = proto::CreateContextRequest {
                sandbox_id: at.what.id,
                language: at.what.language,
                cwd: at.what.workdir.map(OsString::into_vec).unwrap_or_default(),
                env: at.what.env.into_iter().collect(),
                by: crate::cli::person(),
            };
            let made = remote::sandboxes(&at.server)
                .await?
                .create_context(request)
                .await?
                .into_inner();
            context.finish(&object(&made), &clean_line(&made.context_id));
            return Ok(Exit::Ok);
        }
        Contexts::List(at) => {
            let request = proto::ListContextsRequest { sandbox_id: at.what.id };
            let all = remote::sandboxes(&at.server)
                .await?
                .list_contexts(request)
                .await?
                .into_inner();
            let objects: Vec<Value> = all.contexts.iter().map(object).collect();
            context.finish(&json!({ "contexts": objects }), &listing(&all.contexts));
            return Ok(Exit::Ok);
        }
        Contexts::Interrupt(at) => {
            remote::sandboxes(&at.server)
                .await?
                .interrupt_context(asked(at.what))
                .await?
        }
        Contexts::Restart(at) => {
            remote::sandboxes(&at.server)
                .await?
                .restart_context(asked(at.what))
                .await?
        }
        Contexts::Delete(at) => {
            remote::sandboxes(&at.server)
                .await?
                .delete_context(asked(at.what))
                .await?
        }
    };
    let kernel = kernel.into_inner();
    context.finish(&object(&kernel), &listing(std::slice::from_ref(&kernel)));
    Ok(Exit::Ok)
}

fn object(kernel: &proto::CodeContext) -> Value {
    let mut object = json!({ "context_id": kernel.context_id, "language": kernel.language, "busy": kernel.busy,
        "ended": kernel.ended.as_ref().map(show::ended) });
    show::named(&mut object, "cwd", &kernel.cwd);
    object
}

fn listing(kernels: &[proto::CodeContext]) -> String {
    let rows: Vec<Vec<String>> = kernels
        .iter()
        .map(|kernel| {
            let state = match (&kernel.ended, kernel.busy) {
                (Some(ended), _) => Verdict::kernel(ended).said.unwrap_or_default(),
                (None, true) => "busy".to_owned(),
                (None, false) => "idle".to_owned(),
            };
            vec![
                kernel.context_id.clone(),
                kernel.language.clone(),
                state,
                show::name(&kernel.cwd),
            ]
        })
        .collect();
    clean(&show::table(&["CONTEXT", "LANGUAGE", "STATE", "DIRECTORY"], &rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_has_an_exit_code_for_each_way_to_end() {
        let of = |edit: fn(&mut proto::CodeEnded)| {
            let mut ended = proto::CodeEnded::default();
            edit(&mut ended);
            let verdict = verdict(&ended, false);
            (verdict.code, verdict.said.unwrap_or_default())
        };
        let oom = |ended: &mut proto::CodeEnded| {
            ended.kernel = Some(proto::ExecEnded {
                cause: proto::exec_ended::Cause::OutOfMemory.into(),
                limit: Some(64 << 20),
                peak: Some(64 << 20),
                ..Default::default()
            });
        };
        assert_eq!(of(|ended| ended.ok = true), (0, String::new()));
        assert_eq!(of(|_| {}), (1, String::new()));
        assert_eq!(of(|ended| ended.timed_out = true).0, 124);
        assert_eq!(of(|ended| ended.interrupted = true), (130, "interrupted".to_owned()));
        let said = "the kernel ended: out of memory: limit 64 MiB, peak 64 MiB".to_owned();
        assert_eq!(of(oom), (137, said));
    }

    #[test]
    fn a_kernel_does_not_choose_what_a_file_is_called() {
        assert_eq!(ending("image/png"), "png");
        assert_eq!(ending("image/../../x.sh"), "xsh");
        assert_eq!(ending("/../"), "bin");
        assert_eq!(encoded("image/png", b"\x89P"), json!("iVA="));
        assert_eq!(encoded("text/html", b"<b>"), json!("<b>"));
    }
}
