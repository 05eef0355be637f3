//! Where interpreters grow up from which others are cast: a sandbox like any other, in which nobody's code runs.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::timeout;

use super::language::{Language, Mode};
use super::link::{Link, Said, Setting};
use super::{Error, exec};
use crate::sandbox::Sandbox;
use crate::sandbox::mould::{self, Mould};

/// How long it may take to read an interpreter that is ready.
const TAKE: Duration = Duration::from_secs(20);

/// What any piece of code does, and then nothing.
const TRIAL: &str = "\
import os, sys
def f(x):
    return [x * i for i in range(20)]
print(f(3), sum(f(4)), os.getpid(), len(sys.argv))
import time
time.sleep(60)
";

/// Loads Python in this sandbox, as it is with these variables, and takes it. The sandbox has done its service then: close it.
///
/// # Errors
/// [`Error::NoInterpreter`], [`Error::Unfit`]; [`Error::NotCast`] when it cannot be taken; those of the sandbox.
pub async fn mould(sandbox: &Sandbox, env: BTreeMap<String, String>) -> Result<Mould, Error> {
    let setting = Setting { cwd: None, env };
    let (link, _) = Link::start(sandbox, Language::Python, Mode::Nursery, &setting).await?;
    let pid = sandbox.process(link.pid()).await?;
    let (seized, is_seized) = oneshot::channel();
    // Who traces a process is one thread.
    let taking = tokio::task::spawn_blocking(move || {
        Mould::take(pid, || {
            let _ = seized.send(());
        })
    });
    let taken = timeout(TAKE, async {
        if is_seized.await.is_ok() {
            // When it has ended, whoever traces it knows.
            let _: Result<(), exec::Closed> = link.tell(b"f").await;
        }
        taking.await
    });
    let taken = taken.await;
    // Ends the thread, should it still wait.
    link.kill("the host: it was taken").await;
    let mut mould = match taken {
        Ok(Ok(taken)) => taken.map_err(|error: mould::Error| Error::NotCast(crate::error::chain(&error)))?,
        Ok(Err(error)) => return Err(Error::NotCast(error.to_string())),
        Err(_) => return Err(Error::NotCast(format!("it was not taken within {TAKE:?}"))),
    };
    // One that this kernel, or this interpreter, does not go on from is none.
    let mut trial = Link::cast(sandbox, Language::Python, &setting, &mould).await?;
    let pid = sandbox.process(trial.pid()).await?;
    let said = timeout(TAKE, async {
        let asked = trial.request(1, TRIAL, &BTreeMap::new()).await;
        asked.and(trial.next().await)
    });
    let said = said.await;
    let is_fit = matches!(&said, Ok(Ok(Said::Output(..))));
    if is_fit {
        mould.learn(pid);
    }
    trial.kill("the host: it was a trial").await;
    match is_fit {
        true => Ok(mould),
        false => Err(Error::NotCast(format!("a trial went wrong: {said:?}"))),
    }
}
