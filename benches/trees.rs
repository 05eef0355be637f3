//! Snapshot and restore of a workspace against `git`, `tar | zstd` and `restic` on the same changes.
//!
//! `cargo bench --bench trees`; `EXUVIA_TREES_FILES` (50000) and `EXUVIA_TREES_CHANGED` (10) set the size, the last argument
//! the directory to work in. All work on the same directory in turns, so that a busy machine is busy for all of them; the
//! median of five rounds is shown with its ratio to ours. Programs that are not installed are named.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use exuvia::workspace::{Folder, Limits, Trees};

const ROUNDS: usize = 5;

fn main() {
    let number = |name: &str, default: usize| {
        let said = std::env::var(name).ok().and_then(|text| text.parse().ok());
        said.unwrap_or(default)
    };
    let (files, changed) = (number("EXUVIA_TREES_FILES", 50_000), number("EXUVIA_TREES_CHANGED", 10));
    let scratch = tempfile::tempdir_in(std::env::current_dir().expect("a directory to work in")).expect("scratch");
    let tree = scratch.path().join("tree");
    make(&tree, files);
    let mut peers: Vec<Box<dyn Peer>> = vec![Box::new(Ours::new(scratch.path()))];
    for (program, peer) in [
        ("git", Box::new(Git(scratch.path().join("git"))) as Box<dyn Peer>),
        ("zstd", Box::new(Tar(scratch.path().join("tree.tar.zst")))),
        ("restic", Box::new(Restic(scratch.path().join("restic")))),
    ] {
        let asked = Command::new(program).arg("--version").stdout(Stdio::null()).status();
        match asked {
            Ok(_) => peers.push(peer),
            Err(_) => eprintln!("SKIPPED {program}: not installed"),
        }
    }
    println!("{files} files, {changed} changed a round, medians of {ROUNDS}");
    let first: Vec<Duration> = peers.iter_mut().map(|peer| timed(|| peer.snapshot(&tree))).collect();
    let mut again = vec![Vec::new(); peers.len()];
    let mut back = vec![Vec::new(); peers.len()];
    for round in 0..ROUNDS {
        for (n, peer) in peers.iter_mut().enumerate() {
            // A change of its own for each, or the second to look would find nothing new.
            change(&tree, files, changed, round * 10 + n);
            again[n].push(timed(|| peer.snapshot(&tree)));
        }
        for (n, peer) in peers.iter_mut().enumerate() {
            peer.snapshot(&tree);
            change(&tree, files, changed, 1000 + round * 10 + n);
            back[n].push(timed(|| peer.restore(&tree)));
        }
    }
    row(
        "",
        "first",
        "changed",
        "restore",
        [String::new(), String::new(), String::new()],
    );
    let medians: Vec<[Duration; 3]> = (0..peers.len())
        .map(|n| [first[n], median(&mut again[n]), median(&mut back[n])])
        .collect();
    for (peer, times) in peers.iter().zip(&medians) {
        let [a, b, c] = times.map(|time| format!("{:.1} ms", time.as_secs_f64() * 1000.0));
        let ratio = |n: usize| format!("x{:.1}", times[n].as_secs_f64() / medians[0][n].as_secs_f64());
        row(peer.name(), &a, &b, &c, [ratio(0), ratio(1), ratio(2)]);
    }
}

fn row(name: &str, first: &str, changed: &str, restore: &str, [a, b, c]: [String; 3]) {
    println!("{name:<24}{first:>12} {a:<8}{changed:>12} {b:<8}{restore:>12} {c:<8}");
}

fn timed(job: impl FnOnce()) -> Duration {
    let begun = Instant::now();
    job();
    begun.elapsed()
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn path(tree: &Path, n: usize) -> PathBuf {
    tree.join(format!("d{}/e{}/f{n}", n % 40, n % 23))
}

fn make(tree: &Path, files: usize) {
    for n in 0..files {
        let path = path(tree, n);
        fs::create_dir_all(path.parent().expect("it has a parent")).expect("made");
        fs::write(path, format!("line {n} of a file\n").repeat(10 + n % 300)).expect("written");
    }
}

fn change(tree: &Path, files: usize, changed: usize, round: usize) {
    for n in 0..changed {
        let path = path(tree, n * 4999 % files);
        fs::write(path, format!("round {round}, file {n}\n").repeat(200)).expect("written");
    }
}

fn run(command: &mut Command) {
    let done = command.stdout(Stdio::null()).stderr(Stdio::null()).status();
    assert!(done.is_ok_and(|status| status.success()), "{command:?}");
}

/// Keeps a directory and brings it back to what was kept last.
trait Peer {
    fn name(&self) -> &'static str;
    fn snapshot(&mut self, tree: &Path);
    fn restore(&mut self, tree: &Path);
}

struct Ours {
    trees: Trees,
    index: Option<exuvia::workspace::Index>,
}

impl Ours {
    fn new(scratch: &Path) -> Self {
        let trees = Trees::open(&scratch.join("ours")).expect("a store");
        Self { trees, index: None }
    }
}

impl Peer for Ours {
    fn name(&self) -> &'static str {
        "exuvia (durable)"
    }

    fn snapshot(&mut self, tree: &Path) {
        let folder = Folder::open(tree).expect("opened");
        let taken = self.trees.snapshot(&folder, self.index.as_ref(), Limits::default());
        self.index = Some(taken.expect("taken").index);
    }

    fn restore(&mut self, tree: &Path) {
        let folder = Folder::open(tree).expect("opened");
        let index = self.index.as_ref().expect("a snapshot before");
        let restored = self
            .trees
            .restore(&folder, index, index.revision(), None, Limits::default());
        self.index = Some(restored.expect("restored"));
    }
}

struct Git(PathBuf);

impl Git {
    fn git(&self, tree: &Path) -> Command {
        let mut git = Command::new("git");
        git.arg("--git-dir").arg(&self.0).arg("--work-tree").arg(tree);
        git.args([
            "-c",
            "user.name=bench",
            "-c",
            "user.email=bench@example.invalid",
            "-c",
            "gc.auto=0",
        ]);
        git
    }
}

impl Peer for Git {
    fn name(&self) -> &'static str {
        "git add -A && commit"
    }

    fn snapshot(&mut self, tree: &Path) {
        if !self.0.exists() {
            run(self.git(tree).arg("init"));
        }
        run(self.git(tree).args(["add", "-A"]));
        run(self.git(tree).args(["commit", "--allow-empty", "-m", "step"]));
    }

    fn restore(&mut self, tree: &Path) {
        run(self.git(tree).args(["reset", "--hard"]));
        run(self.git(tree).args(["clean", "-fd"]));
    }
}

struct Tar(PathBuf);

impl Peer for Tar {
    fn name(&self) -> &'static str {
        "tar | zstd"
    }

    fn snapshot(&mut self, tree: &Path) {
        run(Command::new("tar")
            .args(["--zstd", "-cf"])
            .arg(&self.0)
            .arg("-C")
            .arg(tree)
            .arg("."));
    }

    fn restore(&mut self, tree: &Path) {
        fs::remove_dir_all(tree).expect("removed");
        fs::create_dir(tree).expect("made");
        run(Command::new("tar")
            .args(["--zstd", "-xf"])
            .arg(&self.0)
            .arg("-C")
            .arg(tree));
    }
}

struct Restic(PathBuf);

impl Restic {
    fn restic(&self) -> Command {
        let mut restic = Command::new("restic");
        restic
            .arg("-r")
            .arg(&self.0)
            .arg("--no-cache")
            .env("RESTIC_PASSWORD", "bench");
        restic
    }
}

impl Peer for Restic {
    fn name(&self) -> &'static str {
        "restic backup"
    }

    fn snapshot(&mut self, tree: &Path) {
        if !self.0.exists() {
            run(self.restic().arg("init"));
        }
        run(self.restic().arg("backup").arg(tree));
    }

    fn restore(&mut self, tree: &Path) {
        run(self
            .restic()
            .args(["restore", "latest", "--target", "/"])
            .arg("--include")
            .arg(tree));
    }
}
