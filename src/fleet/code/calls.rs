//! What the faces ask of the code in a sandbox.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use super::contexts::{Context, ContextView};
use super::fresh::Places;
use super::run::{Recorder, Running};
use crate::fleet::ask::check_variable;
use crate::fleet::execs::How;
use crate::fleet::member::Member;
use crate::fleet::state::Denied;
use crate::fleet::trail::{Ids, actor};
use crate::fleet::{Error, Fleet};
use crate::sandbox::Cause;
use crate::sandbox::kernel::{Kernel, Language, Options, RunOptions};

/// A piece of code as a client gives it.
#[derive(Debug, Clone, PartialEq)]
pub struct Code {
    /// `None` = Python, or that of the context.
    pub language: Option<Language>,
    pub text: String,
    /// `None` = in a fresh process.
    pub context: Option<String>,
    pub timeout: Option<Duration>,
    pub env: BTreeMap<String, String>,
    pub by: String,
}

/// A context as a client wants it.
#[derive(Debug, Clone, PartialEq)]
pub struct NewContext {
    pub language: Language,
    pub cwd: Option<Vec<u8>>,
    pub env: BTreeMap<String, String>,
    pub by: String,
}

impl Fleet {
    /// Runs code in a context, or in a fresh process.
    ///
    /// # Errors
    /// What keeps it from being run at all. How it ends is never one.
    pub async fn run_code(&self, id: &str, code: Code) -> Result<Running, Error> {
        let inner = self.inner();
        inner.check()?;
        for name in code.env.keys() {
            check_variable(name)?;
        }
        let member = inner.registry.find(id)?;
        let (sandbox, busy) = member.enter()?;
        let context = match &code.context {
            Some(context) => Some(member.codes.contexts.find(&member.id, context)?),
            None => None,
        };
        let language = match (&context, code.language) {
            (Some(context), Some(language)) if language != context.language => {
                return Err(Error::Invalid(format!(
                    "`language`: the context `{}` runs {}, not {language}",
                    context.id, context.language
                )));
            }
            (Some(context), _) => context.language,
            (None, language) => language.unwrap_or(Language::Python),
        };
        let record = Recorder {
            trail: inner.trail.clone(),
            tasks: inner.tasks.clone(),
            sandbox: member.id.clone(),
            actor: actor(&code.by),
            number: member.codes.next_number(),
        };
        let asked = json!({ "language": language.to_string(), "context": context.as_ref().map(|context| &context.id),
            "code_bytes": code.text.len(), "code_blake3": blake3::hash(code.text.as_bytes()).to_hex().as_str(),
            "timeout_ms": code.timeout.map(|timeout| timeout.as_millis() as u64),
            "env": code.env.keys().collect::<Vec<_>>() });
        record.put("code.started", "ok", asked).await;
        let mut options = RunOptions {
            timeout: code.timeout,
            ..RunOptions::default()
        };
        let run = match &context {
            Some(context) => {
                options.env = code.env;
                match context.kernel() {
                    Some(kernel) => kernel.run(&code.text, options).map_err(Error::from),
                    None => Err(gone(&member, context)),
                }
            }
            None => {
                options.env = member.facts.env.clone();
                options.env.extend(code.env);
                let fresh = &member.codes.fresh;
                let cell = fresh.of(language);
                let places = Places {
                    nursery: &inner.nursery,
                    backend: member.facts.backend,
                    data_dir: inner.maker.data_dir(),
                };
                let warm = fresh.started(&cell, &sandbox, language, &places).await;
                warm.and_then(|warm| warm.run(&code.text, options))
                    .map_err(|error| told(&member, error.into()))
            }
        };
        match run {
            Ok(run) => {
                let over = context.as_ref().map_or(&member.codes.over, |context| &context.over);
                Ok(Running::new(run, over.subscribe(), record, busy))
            }
            Err(error) => {
                let reason = json!({ "reason": crate::error::chain(&error) });
                record.put("code.ended", "not_started", reason).await;
                Err(error)
            }
        }
    }

    /// Starts a kernel, and answers once it takes code.
    ///
    /// # Errors
    /// [`Error::TooManyContexts`]; [`Error::Code`] when the sandbox has no such language.
    pub async fn create_context(&self, id: &str, wish: NewContext) -> Result<ContextView, Error> {
        let inner = self.inner();
        inner.check()?;
        for name in wish.env.keys() {
            check_variable(name)?;
        }
        let member = inner.registry.find(id)?;
        let (sandbox, _busy) = member.enter()?;
        let slot = member.codes.contexts.slot(&member.id)?;
        let variables: Vec<String> = wish.env.keys().cloned().collect();
        let mut env = member.facts.env.clone();
        env.extend(wish.env);
        let options = Options {
            cwd: wish.cwd.clone(),
            env,
            ..Options::default()
        };
        let started = Kernel::start(&sandbox, wish.language, options).await;
        let (outcome, context) = match started {
            Ok(kernel) => ("ok", Ok(Context::new(slot, kernel, wish.cwd))),
            Err(error) => ("failed", Err(told(&member, error.into()))),
        };
        let mut details = json!({ "language": wish.language.to_string(), "env": variables });
        match &context {
            Ok(context) => details["context"] = context.id.as_str().into(),
            Err(error) => details["reason"] = crate::error::chain(error).into(),
        }
        self.record_code(&member, &wish.by, "context.created", outcome, details)
            .await;
        let context = context?;
        member.codes.contexts.add(&context);
        Ok(context.view())
    }

    /// Contexts, oldest first; those of a sandbox that has ended tell how.
    pub fn contexts(&self, id: &str) -> Result<Vec<ContextView>, Error> {
        Ok(self.inner().registry.find(id)?.codes.contexts.list())
    }

    /// Interrupts the code that runs, as Ctrl-C would; the answer tells whether it still does.
    pub async fn interrupt_context(&self, id: &str, context: &str, by: &str) -> Result<ContextView, Error> {
        let (member, context) = self.context(id, context)?;
        let (_sandbox, _busy) = member.enter()?;
        let kernel = context.kernel().ok_or_else(|| gone(&member, &context))?;
        let came = until_over(&member, &context, kernel.interrupt()).await;
        let outcome = if came.is_ok() { "ok" } else { "failed" };
        let details = json!({ "context": context.id });
        self.record_code(&member, by, "context.interrupted", outcome, details)
            .await;
        came.map(|_| context.view())
    }

    /// Gives it a fresh kernel; all state is lost.
    pub async fn restart_context(&self, id: &str, context: &str, by: &str) -> Result<ContextView, Error> {
        self.inner().check()?;
        let (member, context) = self.context(id, context)?;
        let (_sandbox, _busy) = member.enter()?;
        let kernel = context.kernel().ok_or_else(|| gone(&member, &context))?;
        let came = until_over(&member, &context, kernel.restart()).await;
        let outcome = if came.is_ok() { "ok" } else { "failed" };
        let details = json!({ "context": context.id });
        self.record_code(&member, by, "context.restarted", outcome, details)
            .await;
        came.map(|()| context.view())
    }

    /// Ends a context with all that runs in it, and forgets it.
    pub async fn delete_context(&self, id: &str, context: &str, by: &str) -> Result<ContextView, Error> {
        let member = self.inner().registry.find(id)?;
        let context = member.codes.contexts.remove(&member.id, context)?;
        context.end(How::Itself(Cause::Killed { by: by.to_owned() }));
        member.activity.touch();
        let details = json!({ "context": context.id });
        self.record_code(&member, by, "context.deleted", "ok", details).await;
        Ok(context.view())
    }

    fn context(&self, id: &str, context: &str) -> Result<(Arc<Member>, Arc<Context>), Error> {
        let member = self.inner().registry.find(id)?;
        let context = member.codes.contexts.find(&member.id, context)?;
        Ok((member, context))
    }

    async fn record_code(&self, member: &Member, by: &str, action: &str, outcome: &str, details: Value) {
        let ids = Ids {
            sandbox: &member.id,
            exec: None,
        };
        self.inner().trail.put(&actor(by), action, outcome, ids, details).await;
    }
}

/// What is done to a kernel, for as long as there is one.
async fn until_over<T>(
    member: &Member,
    context: &Context,
    work: impl Future<Output = Result<T, crate::sandbox::kernel::Error>>,
) -> Result<T, Error> {
    let mut over = context.over.subscribe();
    tokio::select! {
        done = work => done.map_err(|error| told(member, error.into())),
        _ = over.wait_for(Option::is_some) => Err(gone(member, context)),
    }
}

/// Why there is no kernel.
fn gone(member: &Member, context: &Context) -> Error {
    told(
        member,
        Error::NoContext {
            sandbox: member.id.clone(),
            context: context.id.to_string(),
        },
    )
}

/// An error, unless it is that the sandbox has ended.
fn told(member: &Member, error: Error) -> Error {
    match member.view.borrow().state.end() {
        Some(end) => member.denied(Denied::Over(end.clone())),
        None => error,
    }
}
