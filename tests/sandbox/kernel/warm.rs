//! Fresh processes, ready ahead.

use std::sync::Arc;
use std::time::Duration;

use exuvia::sandbox::Cause;
use exuvia::sandbox::kernel::{Error, Fresh, Language, RunOptions, Warm, WarmOptions};

use super::{Did, LIMIT, Place, finish};
use crate::support::skip;

async fn start(test: &str, place: &Place, language: Language, fresh: Fresh) -> Option<Warm> {
    let options = WarmOptions {
        fresh,
        ..WarmOptions::default()
    };
    match Warm::start(&place.sandbox, language, options).await {
        Ok(warm) => Some(warm),
        Err(Error::NoInterpreter { language, tried }) => {
            skip(test, &format!("no {language} on this host: {tried}"));
            place.close().await;
            None
        }
        Err(error) => panic!("{error}"),
    }
}

pub(super) async fn run(warm: &Warm, code: &str) -> Did {
    finish(warm.run(code, RunOptions::default()).unwrap()).await
}

pub(super) fn cause(did: &Did) -> Cause {
    did.ended()
        .kernel
        .as_ref()
        .expect("the process has ended")
        .cause
        .clone()
}

/// Waits until a lane waits.
pub(super) async fn parked(warm: &Warm) {
    let wait = async {
        while warm.parked() == 0 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(LIMIT, wait).await.expect("a lane is ready again");
}

/// Whatever its processes come from, they do what `python3 -c` does.
pub(super) async fn is_like_python_c(next: impl AsyncFn() -> Arc<Warm>, what: &str) {
    for (code, stdout, stderr, want) in LIKE_PYTHON_C {
        let warm = next().await;
        parked(&warm).await;
        let did = run(&warm, code).await;
        let said = String::from_utf8_lossy(&did.stderr);
        assert_eq!(
            (did.out().as_str(), said.as_ref(), cause(&did)),
            (stdout, stderr, want.clone()),
            "{what}: {code}"
        );
        assert_eq!(did.ended().ok, want == Cause::Exited { code: 0 }, "{what}: {code}");
    }
    let warm = next().await;
    parked(&warm).await;
    let did = run(&warm, "def f(): return nope\nf()").await;
    assert_eq!(did.error(), ("NameError", "name 'nope' is not defined"), "{what}");
    assert!(
        did.errors[0].2.contains("    def f(): return nope\n"),
        "{what}: {did:?}"
    );
}

/// (code, standard output, standard error, cause)
const LIKE_PYTHON_C: [(&str, &str, &str, Cause); 11] = [
    ("print(6 * 7)", "42\n", "", Cause::Exited { code: 0 }),
    (
        "import sys; print(sys.argv, __name__); sys.exit(7)",
        "['-c'] __main__\n",
        "",
        Cause::Exited { code: 7 },
    ),
    ("raise SystemExit('bye')", "", "bye\n", Cause::Exited { code: 1 }),
    ("1 / 0", "", "", Cause::Exited { code: 1 }),
    (
        "import os; print('x'); os._exit(300 % 256)",
        "x\n",
        "",
        Cause::Exited { code: 44 },
    ),
    (
        "import os; os.kill(os.getpid(), 11)",
        "",
        "",
        Cause::Signalled { signal: 11 },
    ),
    (
        "import os; os.kill(os.getpid(), 9)",
        "",
        "",
        Cause::Signalled { signal: 9 },
    ),
    (
        "import atexit; atexit.register(print, 'at'); print('end')",
        "end\nat\n",
        "",
        Cause::Exited { code: 0 },
    ),
    (
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()",
        "thread\n",
        "",
        Cause::Exited { code: 0 },
    ),
    (
        "class D:\n  def __del__(self): print('del')\nd = D()",
        "del\n",
        "",
        Cause::Exited { code: 0 },
    ),
    (
        "import sys; sys.stdout.write('no newline'); print('err', file=sys.stderr); import os; os.system('echo sub')",
        "sub\nno newline",
        "err\n",
        Cause::Exited { code: 0 },
    ),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forked_and_executed_are_alike() {
    let test = "kernel::warm::forked_and_executed_are_alike";
    let Some(place) = Place::open(test).await else {
        return;
    };
    for fresh in [Fresh::Forked, Fresh::Executed] {
        let Some(warm) = start(test, &place, Language::Python, fresh).await else {
            return;
        };
        let warm = Arc::new(warm);
        is_like_python_c(async || Arc::clone(&warm), &format!("{fresh:?}")).await;
        parked(&warm).await;
        assert_eq!(run(&warm, "x = 5; x + 1").await.value().as_deref(), Some("6"));
    }
    place.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_process_is_fresh() {
    let test = "kernel::warm::each_process_is_fresh";
    let Some(place) = Place::open(test).await else {
        return;
    };
    let Some(warm) = start(test, &place, Language::Python, Fresh::Forked).await else {
        return;
    };
    let look = "import random, uuid, os, ssl; print(random.random(), uuid.uuid4(), uuid.uuid1(), os.urandom(4).hex(), os.getpid(), ssl.RAND_bytes(8).hex())";
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..5 {
        parked(&warm).await;
        let did = run(&warm, look).await;
        let words: Vec<String> = did.out().split_whitespace().map(str::to_owned).collect();
        assert_eq!(words.len(), 6, "{did:?}");
        for word in words {
            assert!(seen.insert(word.clone()), "{word} twice");
        }
    }
    // What code leaves behind does not reach the next piece.
    parked(&warm).await;
    run(&warm, "import builtins, sys, subprocess, os\nbuiltins.x = 1; sys.y = 1; os.environ['Z'] = '1'\nsubprocess.Popen('(setsid sleep 777 &) ; setsid sleep 778 & while true; do echo noise; done', shell=True)").await;
    parked(&warm).await;
    let look = "import builtins, sys, os\nprint(hasattr(builtins, 'x'), hasattr(sys, 'y'), 'Z' in os.environ, sorted(n for n in globals() if n[:2] != '__'))\nfor p in os.listdir('/proc'):\n  if p.isdigit() and b'sleep' in open('/proc/' + p + '/cmdline', 'rb').read(): print(p)\nprint(sorted(map(int, os.listdir('/proc/self/fd'))))";
    assert_eq!(
        run(&warm, look).await.out(),
        "False False False ['builtins', 'os', 'sys']\n[0, 1, 2, 3, 121, 122]\n"
    );
    // Its environment and directory are those that were asked for.
    parked(&warm).await;
    let options = RunOptions {
        env: [("ONCE".to_owned(), "1".to_owned())].into(),
        ..RunOptions::default()
    };
    let did = finish(
        warm.run("import os; print(os.environ['ONCE'], os.getcwd())", options)
            .unwrap(),
    )
    .await;
    assert_eq!(did.out(), "1 /tmp\n");
    place.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_at_once_time_limits_and_memory() {
    let test = "kernel::warm::many_at_once_time_limits_and_memory";
    let Some(place) = Place::open(test).await else {
        return;
    };
    let Some(warm) = start(test, &place, Language::Python, Fresh::Forked).await else {
        return;
    };
    let runs: Vec<_> = (0..4)
        .map(|n| {
            warm.run(&format!("import time; time.sleep(0.1); {n}"), RunOptions::default())
                .unwrap()
        })
        .collect();
    for (n, run) in runs.into_iter().enumerate() {
        assert_eq!(finish(run).await.value(), Some(n.to_string()));
    }
    parked(&warm).await;
    let options = RunOptions {
        timeout: Some(Duration::from_millis(100)),
        ..RunOptions::default()
    };
    let did = finish(warm.run("print('a')\nwhile True: pass", options).unwrap()).await;
    assert_eq!(
        (did.out().as_str(), cause(&did)),
        ("a\n", Cause::TimedOut { after_ms: 100 })
    );
    assert!(did.ended().timed_out);
    parked(&warm).await;
    let did = run(&warm, "hog = []\nwhile True: hog.append(bytearray(1 << 20))").await;
    assert!(
        matches!(cause(&did), Cause::OutOfMemory { limit_bytes, .. } if limit_bytes == 128 << 20),
        "{did:?}"
    );
    // A process whose caller has gone does not go on.
    parked(&warm).await;
    let mut gone = warm
        .run("print('go', flush=True)\nwhile True: pass", RunOptions::default())
        .unwrap();
    super::until(&mut gone, "go").await;
    drop(gone);
    parked(&warm).await;
    let look = "import os; print(sum(os.stat('/proc/' + p).st_uid == os.getuid() for p in os.listdir('/proc') if p.isdigit()))";
    assert_eq!(run(&warm, look).await.out(), "2\n", "the zygote and this one");
    place.close().await;
}

/// What a piece used is told however it ended, and is its own: the one before used more of everything. So whether it was
/// forked, cast or started.
pub(super) async fn what_a_killed_piece_used_is_told(next: impl AsyncFn() -> Arc<Warm>) {
    const BURN: &str = "import os, time\ndef burn(seconds, mib):\n  x = bytearray(mib << 20); end = time.process_time() + seconds\n  while time.process_time() < end: pass\n  return x\n";
    let many = Duration::from_secs(60);
    // (code, its time, milliseconds and MiB at least, and less than that: what the first used, or thereabouts)
    let pieces = [
        ("x = burn(2.5, 64)", many, (2_500, 64), (60_000, 100)),
        (
            "x = burn(0.2, 24); os.kill(os.getpid(), 9)",
            many,
            (200, 24),
            (2_400, 60),
        ),
        ("x = burn(0.2, 24); os._exit(3)", many, (200, 24), (2_400, 60)),
        (
            "x = burn(0.1, 24)\nwhile True: pass",
            Duration::from_secs(2),
            (80, 24),
            (60_000, 60),
        ),
    ];
    for (code, timeout, (cpu, rss), (less_cpu, less_rss)) in pieces {
        let warm = next().await;
        parked(&warm).await;
        let options = RunOptions {
            timeout: Some(timeout),
            ..RunOptions::default()
        };
        let did = finish(warm.run(&format!("{BURN}{code}"), options).unwrap()).await;
        let kernel = did.ended().kernel.as_ref().unwrap();
        let used = (kernel.cpu.as_millis(), kernel.max_rss_bytes >> 20);
        assert!((cpu..less_cpu).contains(&used.0), "{code}: {kernel:?}");
        assert!((rss..less_rss).contains(&used.1), "{code}: {kernel:?}");
    }
    let warm = next().await;
    parked(&warm).await;
    let did = run(&warm, "hog = []\nwhile True: hog.append(bytearray(1 << 20))").await;
    let kernel = did.ended().kernel.as_ref().unwrap();
    let Cause::OutOfMemory {
        limit_bytes,
        peak_bytes,
    } = kernel.cause
    else {
        panic!("{kernel:?}")
    };
    assert_eq!(limit_bytes, 128 << 20);
    assert!(peak_bytes > 100 << 20 && kernel.max_rss_bytes > 64 << 20, "{kernel:?}");
    assert!(
        kernel.pressure.oom_kills > 0 && kernel.pressure.pids_limit > 0,
        "{kernel:?}"
    );
    assert!(!kernel.cpu.is_zero(), "{kernel:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_killed_piece_used_is_told_forked_or_started() {
    let test = "kernel::warm::what_a_killed_piece_used_is_told_forked_or_started";
    let Some(place) = Place::open(test).await else {
        return;
    };
    for fresh in [Fresh::Forked, Fresh::Executed] {
        let Some(warm) = start(test, &place, Language::Python, fresh).await else {
            return;
        };
        let warm = Arc::new(warm);
        what_a_killed_piece_used_is_told(async || Arc::clone(&warm)).await;
    }
    place.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_languages_have_fresh_processes_too() {
    let test = "kernel::warm::other_languages_have_fresh_processes_too";
    let Some(place) = Place::open(test).await else {
        return;
    };
    let Some(bash) = start(test, &place, Language::Bash, Fresh::Forked).await else {
        return;
    };
    for (code, out, code_) in [
        ("echo $((6*7))", "42\n", 0),
        ("echo a; exit 3", "a\n", 3),
        ("set -e; false; echo no", "", 1),
        ("exec sh -c 'exit 4'", "", 4),
    ] {
        parked(&bash).await;
        let did = run(&bash, code).await;
        assert_eq!(
            (did.out().as_str(), cause(&did)),
            (out, Cause::Exited { code: code_ }),
            "{code}"
        );
    }
    let Some(node) = start(test, &place, Language::Node, Fresh::Forked).await else {
        return;
    };
    for (code, out, code_) in [
        (
            "setTimeout(() => console.log('later'), 20); console.log('now')",
            "now\nlater\n",
            0,
        ),
        ("console.log(1); process.exit(5)", "1\n", 5),
        ("throw new Error('x')", "", 1),
        ("setTimeout(() => { throw new Error('x') }, 1); undefined", "", 1),
    ] {
        parked(&node).await;
        let did = run(&node, code).await;
        assert_eq!(
            (did.out().as_str(), cause(&did)),
            (out, Cause::Exited { code: code_ }),
            "{code}"
        );
    }
    place.close().await;
}
