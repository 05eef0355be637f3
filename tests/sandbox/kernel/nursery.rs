//! Interpreters that are cast from a mould, beside such as are started.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use exuvia::sandbox::kernel::{Error, Fresh, Language, RunOptions, Warm, WarmOptions, mould};
use exuvia::sandbox::mould::Mould;
use exuvia::sandbox::{Cause, Sandbox, Usage};

use super::warm::{cause, is_like_python_c, parked, run, what_a_killed_piece_used_is_told};
use super::{Did, LIMIT, Place, finish};
use crate::support::{sh, skip};

/// What only a process that was cast has mapped.
const IS_CAST: &str = "print('exuvia-mould' in open('/proc/self/maps').read())";

/// A mould, and a sandbox that is not the one that it was taken in.
struct Bed {
    mould: Arc<Mould>,
    place: Place,
}

impl Bed {
    /// `None`, said on stderr, where the machine cannot do it.
    async fn open(test: &str) -> Option<Self> {
        let nursery = Place::open(test).await?;
        let grown = mould(&nursery.sandbox, BTreeMap::new()).await;
        nursery.close().await;
        match grown {
            Ok(mould) => Some(Self {
                mould: Arc::new(mould),
                place: Place::open(test).await?,
            }),
            Err(Error::NoInterpreter { tried, .. }) => {
                skip(test, &format!("no Python on this host: {tried}"));
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    async fn cast_in(&self, sandbox: &Arc<Sandbox>) -> Warm {
        let options = WarmOptions {
            mould: Some(Arc::clone(&self.mould)),
            ..WarmOptions::default()
        };
        Warm::start(sandbox, Language::Python, options).await.unwrap()
    }

    async fn cast(&self) -> Warm {
        self.cast_in(&self.place.sandbox).await
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_is_cast_does_what_python_c_does() {
    let Some(bed) = Bed::open("kernel::nursery::one_that_is_cast_does_what_python_c_does").await else {
        return;
    };
    // One of its own for each piece: who has run a few gets an interpreter that forks.
    is_like_python_c(async || Arc::new(bed.cast().await), "cast").await;
    // (code, what it prints): memory, stack, threads, signals, other processes and modules that none has loaded.
    let more = [
        (IS_CAST, "True\n"),
        (
            "x = bytearray(60 << 20); y = [str(i) for i in range(200000)]; print(len(x), len(y)); del x, y; import gc; gc.collect()",
            "62914560 200000\n",
        ),
        (
            "def f(n): return n and 1 + f(n - 1)\ntry: f(10 ** 6)\nexcept RecursionError: print('deep', f(900))",
            "deep 900\n",
        ),
        (
            "import threading\nlock, seen = threading.RLock(), []\ndef work(n):\n  with lock: seen.append(n)\nall = [threading.Thread(target=work, args=(n,)) for n in range(8)]\n[t.start() for t in all]; [t.join() for t in all]; print(sorted(seen), threading.get_native_id() == __import__('os').getpid())",
            "[0, 1, 2, 3, 4, 5, 6, 7] True\n",
        ),
        (
            "import subprocess; print(subprocess.run(['echo', 'sub'], capture_output=True, text=True).stdout, end='')",
            "sub\n",
        ),
        (
            "import multiprocessing as m\nc = m.get_context('fork')\nq = c.SimpleQueue(); p = c.Process(target=q.put, args=(7,)); p.start(); print(q.get()); p.join(); print(p.exitcode)",
            "7\n0\n",
        ),
        (
            "import signal\ntry: signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt: print('interrupted')",
            "interrupted\n",
        ),
        (
            "import signal, time\nsignal.signal(signal.SIGALRM, lambda *a: print('alarm')); signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(0.2)",
            "alarm\n",
        ),
        (
            "import ctypes, sqlite3, hashlib, zlib, asyncio\nprint(ctypes.CDLL(None).getpid() == __import__('os').getpid(), sqlite3.connect(':memory:').execute('select 6*7').fetchone()[0], hashlib.sha256(b'').hexdigest()[:8], asyncio.run(asyncio.sleep(0, 'loop')))",
            "True 42 e3b0c442 loop\n",
        ),
        (
            "import time; a = time.time(); time.sleep(0.01); print(0 < time.time() - a < 10, time.monotonic() > 0)",
            "True True\n",
        ),
        (
            "import math; print(math.sqrt(2.0), 0.1 + 0.2, 1e308 * 10)",
            "1.4142135623730951 0.30000000000000004 inf\n",
        ),
    ];
    for (code, want) in more {
        let did = run(&bed.cast().await, code).await;
        assert_eq!((did.out().as_str(), did.ended().ok), (want, true), "{code}: {did:?}");
    }
    bed.place.close().await;
}

/// Everything that code can ask of its interpreter and process, but for numbers of processes and addresses.
const LOOK: &str = r#"
import locale, os, resource, signal, sys
print(sorted(os.environ.items()))
print(os.getcwd(), oct(os.umask(0)), os.getpgrp() == os.getpid() == os.getsid(0), os.getppid() > 0)
print(sys.path, sys.argv, sys.flags, sys.executable, sys.prefix, sys.stdin, sys.stdout, sys.stderr, __name__)
print(locale.getpreferredencoding(), sys.getfilesystemencoding(), sys.getrecursionlimit(), sys.byteorder)
print([resource.getrlimit(n) for n in range(16)])
print([(n, str(signal.getsignal(n))) for n in range(1, 65)])
kept = ('Umask', 'State', 'Uid', 'Gid', 'Groups', 'Threads', 'SigBlk', 'SigIgn', 'SigCgt', 'CapInh', 'CapPrm', 'CapEff', 'CapBnd', 'CapAmb', 'NoNewPrivs', 'Seccomp', 'Seccomp_filters')
print([line.split() for line in open('/proc/self/status') if line.split(':')[0] in kept])
print([(name, os.readlink('/proc/self/ns/' + name)) for name in sorted(os.listdir('/proc/self/ns'))])
print(open('/proc/self/cmdline').read().split('\0')[0], open('/proc/self/comm').read(), os.stat('/proc/self/environ').st_uid)
print(open('/proc/self/cgroup').read(), open('/proc/self/oom_score_adj').read())
print(sorted(int(name) for name in os.listdir('/proc/self/fd') if os.path.exists('/proc/self/fd/' + name)))
print(open('/proc/self/mountinfo').read())
"#;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_is_cast_finds_what_one_that_is_started_finds() {
    let Some(bed) = Bed::open("kernel::nursery::one_that_is_cast_finds_what_one_that_is_started_finds").await else {
        return;
    };
    let options = WarmOptions {
        fresh: Fresh::Executed,
        // Which it does not take.
        mould: Some(Arc::clone(&bed.mould)),
        ..WarmOptions::default()
    };
    let started = Warm::start(&bed.place.sandbox, Language::Python, options)
        .await
        .unwrap();
    assert_eq!(run(&started, IS_CAST).await.out(), "False\n");
    parked(&started).await;
    let (started, cast) = (run(&started, LOOK).await, run(&bed.cast().await, LOOK).await);
    let lines = |did: &Did| did.out().lines().map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(lines(&cast), lines(&started));
    let text = cast.out();
    let user = "['Uid:', '1000', '1000', '1000', '1000'], ['Gid:', '1000', '1000', '1000', '1000'], ['Groups:']";
    assert!(text.contains(user), "{text}");
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert!(text.contains(&format!("['{set}:', '0000000000000000']")), "{text}");
    }
    assert!(
        text.contains("['NoNewPrivs:', '1'], ['Seccomp:', '2'], ['Seccomp_filters:', '1']"),
        "{text}"
    );
    bed.place.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_of_one_mould_share_nothing_that_is_random_and_see_nothing_of_each_other() {
    let test = "kernel::nursery::two_of_one_mould_share_nothing_that_is_random_and_see_nothing_of_each_other";
    let Some(bed) = Bed::open(test).await else {
        return;
    };
    let other = Place::open(test).await.unwrap();
    let look = "import random, uuid, os, ssl, secrets, tempfile\nprint(random.random(), random.getrandbits(64), uuid.uuid4(), uuid.uuid1(), os.urandom(8).hex(), ssl.RAND_bytes(8).hex(), secrets.token_hex(), next(tempfile._get_candidate_names()))";
    let mut seen = BTreeSet::new();
    for _ in 0..3 {
        for place in [&bed.place, &other] {
            let did = run(&bed.cast_in(&place.sandbox).await, look).await;
            let words: Vec<String> = did.out().split_whitespace().map(str::to_owned).collect();
            assert_eq!(words.len(), 8, "{did:?}");
            for word in words {
                assert!(seen.insert(word.clone()), "{word} twice");
            }
        }
    }
    // What one writes, in memory that both have from the mould, the other does not read.
    let write = "import builtins, os, sys, json\njson.mine = builtins.mine = os.mine = sys.mine = 'mine'; os.environ['MINE'] = '1'";
    let writes = bed.cast().await;
    run(&writes, write).await;
    let read = "import builtins, os, sys, json\nprint([hasattr(m, 'mine') for m in (json, builtins, os, sys)], 'MINE' in os.environ)";
    assert_eq!(
        run(&bed.cast_in(&other.sandbox).await, read).await.out(),
        "[False, False, False, False] False\n"
    );
    // The mould cannot be got at: it is no descriptor, and has no name.
    let reach = "import os\nfor n in os.listdir('/proc/self/map_files') if os.path.exists('/proc/self/map_files') else []:\n  try: os.open('/proc/self/map_files/' + n, os.O_RDWR); print('opened', n)\n  except OSError: pass\nprint([os.readlink('/proc/self/fd/' + n).split(':')[0] for n in ('0', '1', '2')], sum(os.stat('/proc/' + p).st_uid == os.getuid() for p in os.listdir('/proc') if p.isdigit()))";
    parked(&writes).await;
    assert_eq!(run(&writes, reach).await.out(), "['/dev/null', 'pipe', 'pipe'] 1\n");
    other.close().await;
    bed.place.close().await;
}

/// What a sandbox uses once it has so many processes.
async fn at_rest(sandbox: &Sandbox, pids: u64) -> Usage {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
    loop {
        let usage = sandbox.usage().await.unwrap();
        if usage.pids == pids {
            return usage;
        }
        assert!(
            tokio::time::Instant::now() < deadline,
            "not {pids} processes: {usage:?}"
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_waits_is_charged_to_its_sandbox_and_ends_with_it() {
    let test = "kernel::nursery::one_that_waits_is_charged_to_its_sandbox_and_ends_with_it";
    let Some(bed) = Bed::open(test).await else {
        return;
    };
    let sandbox = &bed.place.sandbox;
    // Init, and the agent that waits for the next command.
    let before = at_rest(sandbox, 2).await;
    let warm = bed.cast().await;
    // The exec's own agent, which that one became, the interpreter, and another that waits.
    let after = at_rest(sandbox, 4).await;
    let grown = after.memory_bytes.saturating_sub(before.memory_bytes);
    // Its own pages; those that it shares with others of its mould are the server's.
    assert!((512 << 10..4 << 20).contains(&grown), "{grown} bytes");
    // Its limit is the sandbox's.
    let did = run(&warm, "hog = []\nwhile True: hog.append(bytearray(1 << 20))").await;
    assert!(
        matches!(cause(&did), Cause::OutOfMemory { limit_bytes, .. } if limit_bytes == 128 << 20),
        "{did:?}"
    );
    // Its time, too; and what it leaves behind goes with it.
    parked(&warm).await;
    let options = RunOptions {
        timeout: Some(Duration::from_millis(200)),
        ..RunOptions::default()
    };
    let code =
        "import subprocess\nsubprocess.Popen(['setsid', 'sleep', '777'])\nprint('a', flush=True)\nwhile True: pass";
    let did = finish(warm.run(code, options).unwrap()).await;
    assert_eq!(
        (did.out().as_str(), cause(&did)),
        ("a\n", Cause::TimedOut { after_ms: 200 })
    );
    assert_eq!(sh(sandbox, "cat /proc/*/comm | grep -c sleep || true").await, "0\n");
    parked(&warm).await;
    bed.place.close().await;
    assert_eq!(bed.place.bench.traces(sandbox.id()), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_killed_one_used_is_told() {
    let Some(bed) = Bed::open("kernel::nursery::what_a_killed_one_used_is_told").await else {
        return;
    };
    what_a_killed_piece_used_is_told(async || Arc::new(bed.cast().await)).await;
    bed.place.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_taken_is_refused_with_its_reason() {
    let test = "kernel::nursery::what_cannot_be_taken_is_refused_with_its_reason";
    let Some(place) = Place::open(test).await else {
        return;
    };
    // What an image can have its interpreters do at their start.
    let cases = [
        (
            "import os\nkept = os.open('/dev/null', 0)",
            "the descriptors 0, 1, 2, 3",
        ),
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
            // Only the thread that forks is in the child: what else it had is not known to it.
            "",
        ),
        ("import mmap\nkept = mmap.mmap(-1, 4096)", "shares memory"),
        ("import os\nos.fork = lambda: os._exit(3)", "await a fork"),
        ("import os\nos._exit(3)", "ended"),
    ];
    for (text, reason) in cases {
        let text = text.replace('\'', "'\\''");
        sh(
            &place.sandbox,
            &format!("mkdir -p /tmp/own; printf '%s' '{text}' > /tmp/own/sitecustomize.py"),
        )
        .await;
        let env = BTreeMap::from([("PYTHONPATH".to_owned(), "/tmp/own".to_owned())]);
        let taken = tokio::time::timeout(LIMIT, mould(&place.sandbox, env))
            .await
            .expect("it ends");
        match taken {
            Err(error) if error.to_string().contains("no `python`") => {
                skip(test, &error);
                break;
            }
            Ok(_) => assert_eq!(reason, "", "{text}"),
            Err(error) => assert!(
                !reason.is_empty() && error.to_string().contains(reason),
                "{text}: {error}"
            ),
        }
    }
    // None of them is left.
    assert_eq!(
        sh(&place.sandbox, "cat /proc/*/comm | grep -c python || true").await,
        "0\n"
    );
    place.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_nursery_that_dies_is_an_error_and_the_next_is_none_the_worse() {
    let test = "kernel::nursery::a_nursery_that_dies_is_an_error_and_the_next_is_none_the_worse";
    for delay in [0, 20, 60, 120, 250] {
        let Some(place) = Place::open(test).await else {
            return;
        };
        let sandbox = Arc::clone(&place.sandbox);
        let growing = async { mould(&sandbox, BTreeMap::new()).await };
        let dying = async {
            tokio::time::sleep(Duration::from_millis(delay)).await;
            place.close().await;
        };
        let both = async { tokio::join!(growing, dying) };
        // Which of the two was first is not said here: only that both end, and leave nothing.
        drop(tokio::time::timeout(LIMIT, both).await.expect("it ends"));
        assert_eq!(place.bench.traces(sandbox.id()), Vec::<String>::new(), "{delay}");
    }
    let Some(bed) = Bed::open(test).await else {
        return;
    };
    assert_eq!(run(&bed.cast().await, IS_CAST).await.out(), "True\n");
    bed.place.close().await;
}
