//! Code and contexts of the fleet, proto <-> domain.
#![warn(clippy::wildcard_enum_match_arm)]

use tonic::{Response, Status};

use super::convert::{duration, duration_in, person};
use super::proto::{self, code_event::Kind};
use super::status::{self, invalid};
use super::{Answer, Out, convert_exec};
use crate::fleet::code::{Code, ContextView, Item, NewContext, RunEnd};
use crate::fleet::{self, Fleet};
use crate::sandbox::kernel::Language;

pub async fn run(fleet: &Fleet, request: proto::RunCodeRequest) -> Answer<Out<proto::CodeEvent>> {
    let code = Code {
        language: language(&request.language)?,
        text: request.code,
        context: (!request.context_id.is_empty()).then_some(request.context_id),
        timeout: duration_in(request.timeout, "timeout")?,
        env: request.env.into_iter().collect(),
        by: person(request.by)?,
    };
    let running = fleet.run_code(&request.sandbox_id, code).await;
    let mut running = running.map_err(|error| status::of_fleet(&error))?;
    let stop = fleet.stopping();
    let events = async_stream::stream! {
        loop {
            tokio::select! {
                biased;
                item = running.next() => match item {
                    Some(item) => yield Ok(event(item)),
                    None => return,
                },
                () = stop.cancelled() => {
                    yield Err(status::of_fleet(&fleet::Error::Stopping));
                    return;
                }
            }
        }
    };
    Ok(Response::new(Box::pin(events)))
}

pub async fn create(fleet: &Fleet, request: proto::CreateContextRequest) -> Answer<proto::CodeContext> {
    let wish = NewContext {
        language: language(&request.language)?.unwrap_or(Language::Python),
        cwd: (!request.cwd.is_empty()).then_some(request.cwd),
        env: request.env.into_iter().collect(),
        by: person(request.by)?,
    };
    answer(fleet.create_context(&request.sandbox_id, wish).await)
}

pub fn list(fleet: &Fleet, sandbox: &str) -> Answer<proto::ListContextsResponse> {
    let found = fleet.contexts(sandbox).map_err(|error| status::of_fleet(&error))?;
    Ok(Response::new(proto::ListContextsResponse {
        contexts: found.iter().map(context).collect(),
    }))
}

pub fn answer(result: Result<ContextView, fleet::Error>) -> Answer<proto::CodeContext> {
    match result {
        Ok(view) => Ok(Response::new(context(&view))),
        Err(error) => Err(status::of_fleet(&error)),
    }
}

fn language(text: &str) -> Result<Option<Language>, Status> {
    match text {
        "" => Ok(None),
        text => text.parse().map(Some).map_err(|_| {
            invalid(format!(
                "`language`: `{}` is none of `python`, `bash`, `node`",
                crate::ids::shown(text)
            ))
        }),
    }
}

fn context(view: &ContextView) -> proto::CodeContext {
    proto::CodeContext {
        context_id: view.id.to_string(),
        language: view.language.to_string(),
        cwd: view.cwd.clone().unwrap_or_else(|| b"/workspace".to_vec()),
        busy: view.is_busy,
        ended: view.ended.as_ref().map(convert_exec::finish),
    }
}

fn event(item: Item) -> proto::CodeEvent {
    let output = |offset, bytes: Vec<u8>| proto::ExecOutput {
        offset,
        data: bytes.into(),
    };
    let kind = match item {
        Item::Stdout { offset, bytes } => Kind::Stdout(output(offset, bytes)),
        Item::Stderr { offset, bytes } => Kind::Stderr(output(offset, bytes)),
        Item::Result { data, is_main } => Kind::Result(proto::CodeResult {
            data: data.into_iter().collect(),
            is_main,
        }),
        Item::Error { name, value, traceback } => Kind::Error(proto::CodeError { name, value, traceback }),
        Item::Ended(end) => Kind::Ended(ended(&end)),
    };
    proto::CodeEvent { kind: Some(kind) }
}

fn ended(end: &RunEnd) -> proto::CodeEnded {
    proto::CodeEnded {
        ok: end.ok,
        kernel: end.kernel.as_ref().map(convert_exec::finish),
        timed_out: end.timed_out,
        interrupted: end.interrupted,
        duration: duration(end.duration),
        execution_count: end.execution_count,
        dropped_results: end.dropped_results,
    }
}
