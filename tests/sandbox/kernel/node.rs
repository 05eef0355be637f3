//! JavaScript kernels.

use exuvia::sandbox::kernel::{Interrupted, Language, RunOptions};

use super::{Place, cell, finish, good, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cells_share_one_global_scope() {
    let test = "kernel::node::cells_share_one_global_scope";
    let Some((place, kernel)) = Place::kernel(test, Language::Node).await else {
        return;
    };
    good(&kernel, "let x = 1; const y = 2; class A {}; undefined").await;
    for (code, value) in [
        ("let x = 3; const y = 4; class A {}; [x, y]", Some("[ 3, 4 ]")),
        (
            "await new Promise((resolve) => setTimeout(() => resolve(x), 5))",
            Some("3"),
        ),
        ("const z = await Promise.resolve({ a: [1n] }); z", Some("{ a: [ 1n ] }")),
        ("require('fs').existsSync('/usr')", Some("true")),
        ("(await import('path')).basename('/a/import(b)')", Some("'import(b)'")),
        ("undefined", None),
        ("10n", Some("10n")),
        (
            "Object.keys(globalThis).filter((name) => /exuvia|MARK|require/.test(name)).length",
            Some("0"),
        ),
    ] {
        assert_eq!(good(&kernel, code).await.value().as_deref(), value, "{code}");
    }
    let did = good(&kernel, "console.log('o'); require('child_process').execSync('echo sub; cat', { stdio: 'inherit' }); console.error('e')").await;
    assert_eq!(
        (did.out().as_str(), did.stderr.as_slice()),
        ("o\nsub\n", b"e\n".as_slice())
    );
    let did = good(
        &kernel,
        "display({ [Symbol.for('Jupyter.display')]: () => ({ 'text/html': '<b>' }) })",
    )
    .await;
    assert_eq!(did.results[0].0["text/html"], b"<b>");
    for (code, name, value) in [
        ("throw new TypeError('bad')", "TypeError", "bad"),
        ("throw 'text'", "Thrown", "text"),
        ("1 +", "SyntaxError", "Unexpected end of input"),
        ("Promise.reject(new RangeError('lost')); 5", "RangeError", "lost"),
        (
            "setTimeout(() => { throw new Error('timer') }, 1); await new Promise(() => {})",
            "Error",
            "timer",
        ),
        ("process.exit(4)", "ExitStatus", "4"),
    ] {
        let did = cell(&kernel, code).await;
        assert_eq!(did.error(), (name, value), "{code}");
        assert!(!did.errors[0].2.contains("<kernel>"), "{did:?}");
    }
    // Many times: an interrupt in the moment after the word must not be lost, nor leave the stream waiting.
    for code in [
        "console.log('go'); for (;;);",
        "console.log('go'); await new Promise(() => {})",
    ]
    .repeat(10)
    {
        let mut run = kernel.run(code, RunOptions::default()).unwrap();
        until(&mut run, "go").await;
        assert_eq!(kernel.interrupt().await.unwrap(), Interrupted::Stopped, "{code}");
        let did = finish(run).await;
        assert!(did.ended().interrupted, "{code}: {did:?}");
    }
    assert_eq!(good(&kernel, "x").await.value().as_deref(), Some("3"));
    place.close().await;
}
