//! Code that turns against its own driver: the host stays bounded and typed, and the kernel's end is told.

use exuvia::sandbox::Cause;
use exuvia::sandbox::kernel::{Event, Language, RunOptions};

use super::{Did, LIMIT, Place, cell, finish, good};

/// How code finds the mark: it reads its own process.
const FIND: &str = "import sys, os, gc\nc = next(o for o in gc.get_objects() if type(o).__name__ == 'Channel')\nm = next(v for v in (f.__globals__['MARK'] for f in [type(c).send]))\ndef say(text, flags=3, fd=1):\n  b = text.encode()\n  os.write(fd, m + b'%d%04x' % (flags, len(b)) + b)\n";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forged_messages_hurt_only_their_own_kernel() {
    let test = "kernel::hostile::forged_messages_hurt_only_their_own_kernel";
    let Some((place, kernel)) = Place::kernel(test, Language::Python).await else {
        return;
    };
    for (code, reason) in [
        (
            "say('nonsense')",
            "a message that is none: expected value at line 1 column 1",
        ),
        ("say('{\"sync\":1}')", "a message out of place"),
        ("say('{\"ready\":{\"version\":\"x\"}}')", "a message out of place"),
        (
            "say('{\"gone\":{\"status\":0}}'); say('{\"gone\":{\"status\":0}}', fd=2)\nwhile True: pass",
            "a message out of place",
        ),
        ("say('x', flags=2)", "a message went on that had not begun"),
        ("os.write(1, m + b'9zzzz')", "a message with a head that is none"),
        (
            "say('', flags=1)\nwhile True: say('x' * 4000, flags=0)",
            "a message of more than 16777216 bytes",
        ),
        (
            "say('{\"result\":{\"main\":true,\"data\":{\"a\":\"?\"}}}')",
            "a result that is no base64: Invalid symbol 63, offset 0.",
        ),
        (
            "say('{\"end\":{\"number\":1,\"ok\":true,\"interrupted\":false}}'); say('{\"end\":{\"number\":1,\"ok\":true,\"interrupted\":false}}')",
            "a message out of place",
        ),
    ] {
        let did = cell(&kernel, &format!("{FIND}{code}")).await;
        let by = format!("the host: the kernel made no sense: {reason}");
        assert_eq!(
            did.ended().kernel.as_ref().map(|ended| &ended.cause),
            Some(&Cause::Killed { by }),
            "{code}"
        );
        kernel.restart().await.unwrap();
    }
    // A forged end is believed, for that call; what follows it is not.
    let forged = "say('{\"sync\":1}', fd=2); say('{\"end\":{\"number\":1,\"ok\":true,\"interrupted\":false}}')\nimport time; time.sleep(1000)";
    assert!(cell(&kernel, &format!("{FIND}{forged}")).await.ended().ok);
    kernel.restart().await.unwrap();
    let did = good(&kernel, "for n in range(1000): display(n)").await;
    assert_eq!((did.results.len(), did.ended().dropped_results), (256, 744));
    place.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn descriptors_and_parents_may_be_attacked() {
    let test = "kernel::hostile::descriptors_and_parents_may_be_attacked";
    let Some((place, kernel)) = Place::kernel(test, Language::Python).await else {
        return;
    };
    let did = cell(&kernel, "import os; os.closerange(3, 256)").await;
    assert_eq!(
        did.ended().kernel.as_ref().map(|ended| &ended.cause),
        Some(&Cause::Exited { code: 70 })
    );
    kernel.restart().await.unwrap();
    good(&kernel, "import os\nfor fd in (0, 1, 2): os.close(fd)").await;
    assert_eq!(
        good(
            &kernel,
            "import sys; print('again'); sys.stderr.write('e'); open('/dev/null').fileno() > 2"
        )
        .await
        .out(),
        "again\n"
    );
    good(
        &kernel,
        "sys.stdout = None; sys.stderr = 5; import json; json.dumps = None",
    )
    .await;
    kernel.restart().await.unwrap();
    good(
        &kernel,
        "import os, fcntl\nfor fd in (1, 2): fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK)\ndisplay('x' * 300_000)",
    )
    .await;
    // Its parent is the agent, under another user.
    let did = cell(&kernel, "os.kill(os.getppid(), 9)").await;
    assert_eq!(did.error().0, "PermissionError");
    // Endless forks are counted, and die with the kernel.
    let did = cell(
        &kernel,
        "while True:\n  if os.fork() == 0:\n    import time; time.sleep(1000)",
    )
    .await;
    assert_eq!(did.error().0, "BlockingIOError");
    kernel.restart().await.unwrap();
    let did = good(
        &kernel,
        "import os; sum(1 for p in os.listdir('/proc') if p.isdigit() and os.stat('/proc/' + p).st_uid == os.getuid())",
    )
    .await;
    assert_eq!(did.value().as_deref(), Some("1"));
    place.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn much_output_is_whole_and_a_slow_reader_slows_it() {
    let test = "kernel::hostile::much_output_is_whole_and_a_slow_reader_slows_it";
    let Some((place, kernel)) = Place::kernel(test, Language::Python).await else {
        return;
    };
    const BYTES: usize = 100 << 20;
    let mut run = kernel
        .run(
            &format!("import sys\nfor n in range({BYTES} // 65536): _ = sys.stdout.write('y' * 65535 + '\\n')\n7"),
            RunOptions::default(),
        )
        .unwrap();
    let (mut total, mut did) = (0, Did::default());
    while let Some(event) = tokio::time::timeout(LIMIT, run.events.recv()).await.unwrap() {
        match event {
            Event::Stdout(bytes) => total += bytes.len(),
            other => did.note(other),
        }
    }
    assert_eq!((total, did.value().as_deref()), (BYTES, Some("7")));

    // Nobody reads: the code stands still, an interrupt is heard all the same, and the end comes last.
    let run = kernel
        .run("n = 0\nwhile True: print('z' * 1000); n += 1", RunOptions::default())
        .unwrap();
    while run.events.len() < 16 {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    let (interrupted, did) = tokio::join!(kernel.interrupt(), finish(run));
    assert_eq!(interrupted.unwrap(), exuvia::sandbox::kernel::Interrupted::Stopped);
    assert!(did.ended().interrupted);
    assert!(did.stdout.len() < 4 << 20, "{}", did.stdout.len());
    place.close().await;
}
