//! Bash kernels: the state outlives `exit`, `set -e` and interrupts.

use exuvia::sandbox::Cause;
use exuvia::sandbox::kernel::{Interrupted, Language, RunOptions};

use super::{Place, cell, finish, good, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn state_outlives_every_end_of_a_cell() {
    let test = "kernel::bash::state_outlives_every_end_of_a_cell";
    let Some((place, kernel)) = Place::kernel(test, Language::Bash).await else {
        return;
    };
    good(
        &kernel,
        "x='a  b'; f() { echo \"f $x\"; }; declare -A m=([k]=v); cd /usr",
    )
    .await;
    let check = "f; pwd; echo ${m[k]}";
    let want = "f a  b\n/usr\nv\n";
    assert_eq!(good(&kernel, check).await.out(), want);
    for (code, status, out) in [
        ("false", "1", ""),
        ("exit 3", "3", ""),
        ("set -e; echo one; false; echo two", "1", "one\n"),
        ("set +e; (exit 9)", "9", ""),
        ("set -u; echo $nope", "127", ""),
        ("set +u; ${nope:?it is not set}", "127", ""),
        ("if then", "2", ""),
        ("return 4", "2", ""),
    ] {
        let did = cell(&kernel, code).await;
        assert_eq!(did.error(), ("ExitStatus", status), "{code}");
        assert_eq!(did.out(), out, "{code}");
        assert!(!did.ended().ok && did.ended().kernel.is_none(), "{code}: {did:?}");
        assert_eq!(good(&kernel, check).await.out(), want, "after {code}");
    }
    let did = good(&kernel, "cat; printf '\\x00\\xff\\x1e'; echo e >&2; exec >&-").await;
    assert_eq!(
        (did.stdout.as_slice(), did.stderr.as_slice()),
        (b"\x00\xff\x1e".as_slice(), b"e\n".as_slice())
    );
    assert_eq!(good(&kernel, check).await.out(), want);
    let options = RunOptions {
        env: [("x".to_owned(), "it's".to_owned()), ("ONCE".to_owned(), "1".to_owned())].into(),
        ..RunOptions::default()
    };
    assert_eq!(
        finish(kernel.run("f; sh -c 'echo $ONCE'", options).unwrap())
            .await
            .out(),
        "f it's\n1\n"
    );
    assert_eq!(good(&kernel, "f; echo ${ONCE-unset}").await.out(), "f a  b\nunset\n");

    for code in ["echo go; while :; do :; done", "echo go; sleep 1000; echo no"] {
        let mut run = kernel.run(code, RunOptions::default()).unwrap();
        until(&mut run, "go").await;
        assert_eq!(kernel.interrupt().await.unwrap(), Interrupted::Stopped, "{code}");
        let did = finish(run).await;
        assert!(did.ended().interrupted && did.out().is_empty(), "{did:?}");
        assert_eq!(did.error().0, "Interrupted");
        assert_eq!(good(&kernel, check).await.out(), want);
    }
    // To become another program is the end of the kernel, and is told.
    let did = cell(&kernel, "exec sh -c 'echo other; exit 5'").await;
    assert_eq!(did.out(), "other\n");
    let ended = did.ended().kernel.as_ref().expect("the kernel has ended");
    assert_eq!(ended.cause, Cause::Exited { code: 5 });
    place.close().await;
}
