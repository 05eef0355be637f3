//! What Python code finds in a kernel.

use std::fs;

use exuvia::sandbox::Mount;
use exuvia::sandbox::kernel::{Language, RunOptions};

use super::{Place, cell, finish, good};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn state_results_and_output() {
    let test = "kernel::python::state_results_and_output";
    let Some((place, kernel)) = Place::kernel(test, Language::Python).await else {
        return;
    };
    good(&kernel, "import os, sys, pickle\nx = 20\nclass P: pass").await;
    assert_eq!(good(&kernel, "x + 1").await.value().as_deref(), Some("21"));
    assert_eq!(good(&kernel, "x + 1;").await.value(), None);
    assert_eq!(good(&kernel, "None").await.value(), None);
    // Nothing of the driver's is in the user's namespace, and it is the real one.
    let names = good(&kernel, "sorted(n for n in globals() if not n.startswith('__'))").await;
    assert_eq!(names.value().as_deref(), Some("['P', 'os', 'pickle', 'sys', 'x']"));
    let pickled = good(&kernel, "type(pickle.loads(pickle.dumps(P()))) is P and __name__").await;
    assert_eq!(pickled.value().as_deref(), Some("'__main__'"));

    let code = "os.write(1, b'\\xff\\x00a'); print('\\udcfe'); os.system('echo sub; echo err >&2'); sys.stderr.write('e')\nNone";
    let did = good(&kernel, code).await;
    assert_eq!(did.stdout, b"\xff\x00a\xfe\nsub\n");
    assert_eq!(did.stderr, b"err\ne");

    let code = "class R:\n  def _repr_html_(self): return '<b>'\n  def _repr_png_(self): return b'\\x89P'\n  def _repr_json_(self): return {'a': 1}\n  def _repr_latex_(self): raise ValueError\nprint('1'); display(R()); print('2')\nR()";
    let did = good(&kernel, code).await;
    assert_eq!(did.out(), "1\n2\n");
    let [(shown, false), (value, true)] = did.results.as_slice() else {
        panic!("{did:?}");
    };
    for data in [shown, value] {
        let kinds: Vec<&str> = data.keys().map(String::as_str).collect();
        assert_eq!(kinds, ["application/json", "image/png", "text/html", "text/plain"]);
        assert_eq!(data["text/html"], b"<b>");
        assert_eq!(data["image/png"], b"\x89P");
        assert_eq!(data["application/json"], br#"{"a": 1}"#);
    }
    let large = good(&kernel, "'a' * 3_000_000").await.value().unwrap();
    assert!(
        large.len() < (1 << 20) + 100 && large.ends_with("bytes left out]"),
        "{}",
        large.len()
    );

    let options = RunOptions {
        env: [("ONCE".to_owned(), "it's".to_owned())].into(),
        ..RunOptions::default()
    };
    let did = finish(kernel.run("os.environ['ONCE']", options).unwrap()).await;
    assert_eq!(did.value().as_deref(), Some("\"it's\""));
    assert_eq!(
        good(&kernel, "'ONCE' in os.environ").await.value().as_deref(),
        Some("False")
    );
    assert_eq!(kernel.state().execution_count, 11);
    place.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_are_the_users_own() {
    let test = "kernel::python::errors_are_the_users_own";
    let Some((place, kernel)) = Place::kernel(test, Language::Python).await else {
        return;
    };
    let did = cell(&kernel, "def f():\n    raise ValueError('no é')\nf()").await;
    assert!(!did.ended().ok && did.ended().kernel.is_none());
    assert_eq!(did.error(), ("ValueError", "no é"));
    let trace: Vec<&str> = did.errors[0]
        .2
        .lines()
        .filter(|line| !line.trim().starts_with('^'))
        .collect();
    let want = [
        "Traceback (most recent call last):",
        "  File \"<cell 1>\", line 3, in <module>",
        "    f()",
        "  File \"<cell 1>\", line 2, in f",
        "    raise ValueError('no é')",
        "ValueError: no é",
    ];
    assert_eq!(trace, want);
    for (code, name, value) in [
        ("1 +", "SyntaxError", "invalid syntax (<cell 2>, line 1)"),
        ("import sys; sys.exit(4)", "SystemExit", "4"),
        ("exit()", "SystemExit", "None"),
        ("input()", "EOFError", "EOF when reading a line"),
        (
            "class B(Exception):\n  def __str__(self): raise KeyError\nraise B()",
            "B",
            "<its text cannot be made>",
        ),
        (
            "def f(): f()\nf()",
            "RecursionError",
            "maximum recursion depth exceeded",
        ),
    ] {
        let did = cell(&kernel, code).await;
        assert_eq!(did.error(), (name, value), "{code}");
        assert!(
            !did.errors[0].2.contains("<kernel>") && !did.errors[0].2.contains("ast.py"),
            "{did:?}"
        );
    }
    // Where this Python underlines (3.11 and later), below what it means, in a last line without an end too.
    let did = cell(&kernel, "x = 1\nx/0").await;
    let marks = did.errors[0].2.lines().find(|line| line.contains('^'));
    assert_eq!(marks.unwrap_or("    ~^~"), "    ~^~", "{did:?}");
    assert_eq!(
        good(&kernel, "'still here'").await.value().as_deref(),
        Some("'still here'")
    );
    place.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrency_of_all_kinds_works() {
    let test = "kernel::python::concurrency_of_all_kinds_works";
    let Some((place, kernel)) = Place::kernel(test, Language::Python).await else {
        return;
    };
    let did = good(
        &kernel,
        "import asyncio\nawait asyncio.sleep(0)\nawait asyncio.sleep(0, 'late')",
    )
    .await;
    assert_eq!(did.value().as_deref(), Some("'late'"));
    let code = "import multiprocessing as mp\ndef sq(x): return x * x\nwith mp.get_context('fork').Pool(2) as p: r = p.map(sq, [1, 2, 3])\nr";
    assert_eq!(good(&kernel, code).await.value().as_deref(), Some("[1, 4, 9]"));
    // A fork that runs on to the end of the code says nothing to the host.
    let code = "import os\nif (pid := os.fork()): os.waitpid(pid, 0)\nelse: display('child')\nprint('both')";
    assert_eq!(good(&kernel, code).await.out(), "'child'\nboth\nboth\n");
    // A thread that prints, at length and while results are sent, corrupts nothing.
    let code = "import threading, time\nstop = threading.Event()\ndef talk():\n  while not stop.is_set(): os.write(1, b'x' * 5000)\nt = threading.Thread(target=talk); t.start()\nfor n in range(20): display('r' * 50_000)\nstop.set(); t.join(); 5";
    let did = good(&kernel, code).await;
    assert_eq!((did.results.len(), did.value().as_deref()), (21, Some("5")));
    assert!(did.stdout.iter().all(|byte| *byte == b'x') && did.stdout.len() % 5000 == 0);
    // What comes after the end of a call is the next one's.
    good(
        &kernel,
        "go = threading.Event()\nthreading.Thread(target=lambda: (go.wait(), print('late'))).start()\ntime.sleep(0)",
    )
    .await;
    let did = good(&kernel, "go.set()\nfor t in threading.enumerate()[1:]: t.join()").await;
    assert_eq!(did.out(), "late\n");
    place.close().await;
}

/// As much of matplotlib as the driver touches.
const FAKE: &str = "
from matplotlib.figure import Figure
_open = {}
def figure(n=None):
    n = n or len(_open) + 1
    return _open.setdefault(n, Figure(n))
def plot(*_): figure(1)
def get_fignums(): return sorted(_open)
def close(which):
    for n in [n for n, f in _open.items() if which == 'all' or f is which]: del _open[n]
def show(): raise RuntimeError('no screen')
";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn figures_need_no_code() {
    let test = "kernel::python::figures_need_no_code";
    let lib = tempfile::tempdir().unwrap();
    let package = lib.path().join("matplotlib");
    fs::create_dir(&package).unwrap();
    fs::write(
        package.join("__init__.py"),
        "import os\nbackend = os.environ['MPLBACKEND']\n",
    )
    .unwrap();
    let figure = "class Figure:\n  def __init__(self, n): self.n = n\n  def savefig(self, f, format, **_): f.write(b'%d:%s' % (self.n, format.encode()))\n";
    fs::write(package.join("figure.py"), figure).unwrap();
    fs::write(package.join("pyplot.py"), FAKE).unwrap();
    let mount = Mount {
        source: lib.path().to_owned(),
        target: "/opt/lib".into(),
    };
    let Some(place) = Place::with_mounts(test, vec![mount]).await else {
        return;
    };
    let Some(kernel) = place.start(test, Language::Python).await else {
        return;
    };
    let not_imported = good(
        &kernel,
        "import sys; sys.path.append('/opt/lib'); 'matplotlib' in sys.modules",
    )
    .await;
    assert_eq!(not_imported.value().as_deref(), Some("False"));
    let png = |did: &super::Did| -> Vec<(String, bool)> {
        let text = |bytes: &Vec<u8>| String::from_utf8_lossy(bytes).into_owned();
        did.results
            .iter()
            .map(|(data, main)| (text(&data["image/png"]), *main))
            .collect()
    };
    // Open figures are shown at the end, and then closed; `show()` shows them where it stands.
    let did = good(
        &kernel,
        "import matplotlib.pyplot as plt\nplt.plot(1); f = plt.figure(2)",
    )
    .await;
    assert_eq!(png(&did), [("1:png".to_owned(), false), ("2:png".to_owned(), false)]);
    let did = good(&kernel, "plt.plot(1); plt.show(); plt.figure(7);").await;
    assert_eq!(png(&did), [("1:png".to_owned(), false), ("7:png".to_owned(), false)]);
    // As a value it is shown once.
    let did = good(&kernel, "plt.figure(3)").await;
    assert_eq!(png(&did), [("3:png".to_owned(), true)]);
    assert_eq!(good(&kernel, "plt.get_fignums(), plt.matplotlib.backend if hasattr(plt, 'matplotlib') else sys.modules['matplotlib'].backend").await.value().as_deref(), Some("([], 'agg')"));
    place.close().await;
}
