//! The life of a kernel: queue, interrupts, time limits, restart, ends.

use std::time::Duration;

use exuvia::sandbox::Cause;
use exuvia::sandbox::kernel::{Error, Interrupted, Kernel, Language, Options, RunOptions};

use super::{Place, cell, finish, good, until};

fn limit(millis: u64, grace: u64) -> RunOptions {
    RunOptions {
        timeout: Some(Duration::from_millis(millis)),
        grace: Duration::from_millis(grace),
        ..RunOptions::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn interrupts_time_limits_and_restarts() {
    let test = "kernel::life::interrupts_time_limits_and_restarts";
    let Some((place, kernel)) = Place::kernel(test, Language::Python).await else {
        return;
    };
    assert_eq!(kernel.interrupt().await.unwrap(), Interrupted::Idle);
    good(&kernel, "x = 1").await;
    for code in [
        "while True: pass",
        "import time; time.sleep(1000)",
        "import asyncio; await asyncio.sleep(1000)",
        "import subprocess; subprocess.run(['sleep', '1000'])",
    ] {
        let mut run = kernel
            .run(&format!("print('go')\n{code}"), RunOptions::default())
            .unwrap();
        until(&mut run, "go").await;
        assert_eq!(kernel.interrupt().await.unwrap(), Interrupted::Stopped, "{code}");
        let did = finish(run).await;
        assert!(did.ended().interrupted && !did.ended().timed_out, "{did:?}");
        assert_eq!(did.error().0, "KeyboardInterrupt");
    }
    let did = finish(kernel.run("while True: pass", limit(100, 5000)).unwrap()).await;
    assert!(
        did.ended().timed_out && !did.ended().interrupted && did.ended().kernel.is_none(),
        "{did:?}"
    );
    assert_eq!(
        good(&kernel, "x").await.value().as_deref(),
        Some("1"),
        "the state outlives a time limit"
    );

    // Code that ignores it is told of, and goes on; with its time up, the kernel is ended.
    let stubborn =
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); print('go', flush=True)\nwhile True: pass";
    let mut run = kernel.run(stubborn, limit(60_000, 100)).unwrap();
    until(&mut run, "go").await;
    assert_eq!(kernel.interrupt().await.unwrap(), Interrupted::Ignored);
    kernel.restart().await.unwrap();
    let did = finish(run).await;
    let killed = |by: &str| Some(Cause::Killed { by: by.to_owned() });
    assert_eq!(
        did.ended().kernel.as_ref().map(|ended| ended.cause.clone()),
        killed("the host: restarted")
    );
    let state = kernel.state();
    assert_eq!((state.execution_count, state.ended, state.is_busy), (0, None, false));
    assert_eq!(
        cell(&kernel, "x").await.error().0,
        "NameError",
        "a restart keeps nothing"
    );

    let did = finish(kernel.run(stubborn, limit(300, 100)).unwrap()).await;
    assert!(did.ended().timed_out);
    let by = killed("the host: time limit, and the code ignored the interrupt");
    assert_eq!(did.ended().kernel.as_ref().map(|ended| ended.cause.clone()), by);
    let Err(Error::Ended(ended)) = kernel.run("1", RunOptions::default()) else {
        panic!("it has ended");
    };
    assert_eq!(Some(ended.cause), by);
    kernel.restart().await.unwrap();
    assert_eq!(good(&kernel, "1").await.ended().execution_count, 1);
    place.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_wait_in_a_bounded_queue_and_a_dropped_one_is_interrupted() {
    let test = "kernel::life::calls_wait_in_a_bounded_queue_and_a_dropped_one_is_interrupted";
    let Some(place) = Place::open(test).await else {
        return;
    };
    let options = Options {
        queue: 2,
        cwd: Some(b"/usr/lib".to_vec()),
        env: [("OF_KERNEL".to_owned(), "yes".to_owned())].into(),
    };
    let kernel = Kernel::start(&place.sandbox, Language::Python, options).await.unwrap();
    let where_ = good(&kernel, "import os; os.getcwd(), os.environ['OF_KERNEL']").await;
    assert_eq!(where_.value().as_deref(), Some("('/usr/lib', 'yes')"));
    let mut first = kernel
        .run("n = 1; print('go')\nwhile True: pass", RunOptions::default())
        .unwrap();
    until(&mut first, "go").await;
    assert!(kernel.state().is_busy);
    let second = kernel.run("n += 1; n", RunOptions::default()).unwrap();
    let third = kernel.run("n += 1; n", RunOptions::default()).unwrap();
    let Err(Error::Busy { waiting: 2 }) = kernel.run("4", RunOptions::default()) else {
        panic!("two wait already");
    };
    drop(first);
    assert_eq!(finish(second).await.value().as_deref(), Some("2"));
    assert_eq!(finish(third).await.value().as_deref(), Some("3"));
    // Another kernel knows nothing of it.
    let other = Kernel::start(&place.sandbox, Language::Python, Options::default())
        .await
        .unwrap();
    assert_eq!(cell(&other, "n").await.error().0, "NameError");
    place.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_end_says_why() {
    let test = "kernel::life::an_end_says_why";
    let Some((place, kernel)) = Place::kernel(test, Language::Python).await else {
        return;
    };
    for (code, cause) in [
        ("import os; os._exit(7)", Cause::Exited { code: 7 }),
        ("import os; os.kill(os.getpid(), 11)", Cause::Signalled { signal: 11 }),
        ("import os; os.kill(os.getpid(), 9)", Cause::Signalled { signal: 9 }),
    ] {
        let did = cell(&kernel, &format!("print('before')\n{code}")).await;
        assert_eq!(did.out(), "before\n");
        assert_eq!(
            did.ended().kernel.as_ref().map(|ended| &ended.cause),
            Some(&cause),
            "{code}"
        );
        kernel.restart().await.unwrap();
    }
    let mut run = kernel
        .run("print('go'); import time; time.sleep(1000)", RunOptions::default())
        .unwrap();
    until(&mut run, "go").await;
    let waits = kernel.run("1", RunOptions::default()).unwrap();
    place.close().await;
    for run in [run, waits] {
        let did = finish(run).await;
        let cause = did.ended().kernel.as_ref().map(|ended| &ended.cause);
        assert!(matches!(cause, Some(Cause::SandboxLost { .. })), "{cause:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_that_runs_out_is_named() {
    let test = "kernel::life::memory_that_runs_out_is_named";
    let Some((place, kernel)) = Place::kernel(test, Language::Python).await else {
        return;
    };
    let did = cell(&kernel, "hog = []\nwhile True: hog.append(bytearray(1 << 20))").await;
    let Some(Cause::OutOfMemory {
        limit_bytes,
        peak_bytes,
    }) = did.ended().kernel.as_ref().map(|ended| ended.cause.clone())
    else {
        panic!("{did:?}");
    };
    assert_eq!(limit_bytes, 128 << 20);
    assert!(peak_bytes > 64 << 20, "{peak_bytes}");
    kernel.restart().await.unwrap();
    good(&kernel, "1").await;
    place.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_missing_or_wrong_is_named() {
    let test = "kernel::life::what_is_missing_or_wrong_is_named";
    let Some((place, kernel)) = Place::kernel(test, Language::Bash).await else {
        return;
    };
    assert!(matches!(
        kernel.run("a\0b", RunOptions::default()),
        Err(Error::Nul(Language::Bash))
    ));
    let env = RunOptions {
        env: [("a;b".to_owned(), String::new())].into(),
        ..RunOptions::default()
    };
    assert!(matches!(kernel.run("1", env), Err(Error::Variable(name)) if name == "a;b"));
    assert!(matches!(
        kernel.run(&"x".repeat(5 << 20), RunOptions::default()),
        Err(Error::TooLong(_))
    ));
    // An environment whose PATH leads nowhere has no interpreter.
    let options = Options {
        env: [("PATH".to_owned(), "/nowhere".to_owned())].into(),
        ..Options::default()
    };
    let error = Kernel::start(&place.sandbox, Language::Node, options)
        .await
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "the sandbox has no node: no program `node`, `nodejs`"
    );
    let found = Language::Python.find(&place.sandbox).await.unwrap();
    assert!(
        found.program == "python3" && found.version.starts_with("Python 3"),
        "{found:?}"
    );
    place.close().await;
}
