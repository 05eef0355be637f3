//! Overlays against plain directories and plain copies, and what a guest, a neighbour and `kill -9` may do to them.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use proptest::prelude::*;

use super::super::error::Error;
use super::super::history_test::{act, copied, deed};
use super::super::materialise::Owner;
use super::super::testing::{Bench, cases, everything, links_and_attributes, past_this_tick, snapshot};
use super::super::trees::Revision;
use super::bases::Bases;
use super::look::Reading;
use super::mount::{Ground, clear};
use super::site::{Kept, Site};

const OWNER: Owner = Owner {
    uid: 70_000,
    gid: 70_000,
};

/// A data directory with bases; says so where there can be none.
struct Yard {
    bench: Bench,
    bases: Bases,
    grounds: std::cell::RefCell<Vec<PathBuf>>,
}

impl Yard {
    fn open(test: &str) -> Option<Self> {
        let bench = Bench::new();
        let bases = Bases::new(&bench.dir.path().join("data"));
        match bases.support() {
            Ok(()) => Some(Self {
                bench,
                bases,
                grounds: Default::default(),
            }),
            Err(lack) => {
                crate::skip::skipped(test, lack);
                None
            }
        }
    }

    fn ground(&self) -> Ground {
        let number = self.grounds.borrow().len();
        let dir = self.bench.dir.path().join(format!("data/work/{number}"));
        let upper = dir.join("disk/workspace");
        fs::create_dir_all(&upper).unwrap();
        std::os::unix::fs::chown(&upper, Some(OWNER.uid), Some(OWNER.gid)).unwrap();
        self.grounds.borrow_mut().push(dir.clone());
        Ground::new(dir, upper)
    }

    /// Over a base, however small it is.
    fn over(&self, revision: Revision) -> Site {
        let over = Site::over(&self.bench.trees, &self.bases, &self.ground(), revision, OWNER);
        over.unwrap().expect("nobody removes the base")
    }

    fn plain(&self, revision: Revision) -> Site {
        Site::lay(&self.bench.trees, None, self.ground(), revision, Some(OWNER)).unwrap()
    }

    fn kept(&self, site: &Site, reading: Reading) -> Kept {
        let look = site.look(&self.bench.trees, reading).unwrap();
        site.keep(&self.bench.trees, look).unwrap()
    }

    fn mounts(&self) -> Vec<PathBuf> {
        crate::sandbox::disk::mounts_below(&fs::canonicalize(self.bench.dir.path()).unwrap()).unwrap()
    }
}

impl Drop for Yard {
    fn drop(&mut self) {
        for dir in self.grounds.take() {
            clear(&dir).unwrap();
        }
    }
}

/// As the sandbox's own user.
fn as_guest(dir: &Path, script: &str) -> bool {
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(script).current_dir(dir).stderr(Stdio::null());
    shell.uid(OWNER.uid).gid(OWNER.gid).status().unwrap().success()
}

proptest! {
    #![proptest_config(cases(24))]

    /// A history on an overlay gives the trees that it gives on a plain directory, whenever the files are read, and each of
    /// them comes back as the plain copy of it has it, be it over its own base, a near one, or none.
    #[test]
    fn an_overlay_is_a_plain_directory(
        before in prop::collection::vec(deed(), 0..40),
        steps in prop::collection::vec(prop::collection::vec(deed(), 1..25), 1..4),
    ) {
        let Some(yard) = Yard::open("an_overlay_is_a_plain_directory") else { return Ok(()) };
        let trees = &yard.bench.trees;
        let start = yard.bench.made("start", &[].into());
        before.iter().for_each(|deed| act(&start, deed));
        let begin = snapshot(trees, &start, None).revision;
        let (over, plain) = (yard.over(begin), yard.plain(begin));
        prop_assert_eq!(everything(&over.path()), everything(&start));
        prop_assert_eq!(links_and_attributes(&over.path()), links_and_attributes(&start));
        prop_assert_eq!(yard.kept(&over, Reading::Now).revision, begin);
        for (number, deeds) in steps.iter().enumerate() {
            let reading = if number % 2 == 0 { Reading::Later } else { Reading::Now };
            deeds.iter().for_each(|deed| act(&over.path(), deed));
            deeds.iter().for_each(|deed| act(&plain.path(), deed));
            past_this_tick();
            let copy = yard.bench.dir.path().join(format!("copy-{number}"));
            copied(&over.path(), &copy);
            let kept = yard.kept(&over, reading).revision;
            prop_assert_eq!(yard.kept(&plain, reading).revision.tree, kept.tree);
            prop_assert_eq!(snapshot(trees, &copy, None).revision, kept);
            let near = yard.over(kept);
            if number == 0 {
                yard.bases.make(trees, kept, yard.bases.near(trees, begin).unwrap().map(|(base, _)| base).as_ref()).unwrap();
            }
            let exact = yard.over(kept);
            for site in [&near, &exact, &yard.plain(kept)] {
                prop_assert_eq!(everything(&site.path()), everything(&copy));
                prop_assert_eq!(links_and_attributes(&site.path()), links_and_attributes(&copy));
                prop_assert_eq!(yard.kept(site, reading).revision, kept);
            }
        }
    }
}

/// What overlayfs does in its own words: each is read back.
#[test]
fn the_words_of_overlayfs_are_understood() {
    let Some(yard) = Yard::open("the_words_of_overlayfs_are_understood") else {
        return;
    };
    let start = yard.bench.made("start", &[].into());
    for dir in ["a/b/c", "moved/inner/deep", "replaced", "emptied", "gone", "swapped"] {
        fs::create_dir_all(start.join(dir)).unwrap();
        fs::write(start.join(dir).join("file"), dir).unwrap();
    }
    fs::write(start.join("to-dir"), "").unwrap();
    fs::write(start.join(OsStr::from_bytes(b"\xff\xfe")), "not UTF-8").unwrap();
    let begin = snapshot(&yard.bench.trees, &start, None).revision;
    let site = yard.over(begin);
    let at = site.path();
    let deeds = |at: &Path| {
        // A directory of the base, within its parent and out of it, with a change in it, twice.
        fs::rename(at.join("moved"), at.join("now-here")).unwrap();
        fs::rename(at.join("now-here/inner"), at.join("a/inner")).unwrap();
        fs::write(at.join("a/inner/deep/new"), "new").unwrap();
        fs::rename(at.join("a"), at.join("z")).unwrap();
        fs::rename(at.join("z/inner"), at.join("z/b/again")).unwrap();
        // Removed and made again: nothing of before shows through.
        fs::remove_dir_all(at.join("replaced")).unwrap();
        fs::create_dir(at.join("replaced")).unwrap();
        fs::write(at.join("replaced/other"), "other").unwrap();
        fs::remove_file(at.join("emptied/file")).unwrap();
        fs::remove_dir_all(at.join("gone")).unwrap();
        fs::remove_dir_all(at.join("swapped")).unwrap();
        fs::write(at.join("swapped"), "a file now").unwrap();
        fs::remove_file(at.join("to-dir")).unwrap();
        fs::create_dir(at.join("to-dir")).unwrap();
        fs::create_dir(at.join("moved")).unwrap();
        symlink("../../etc", at.join("moved/link")).unwrap();
    };
    deeds(&at);
    deeds(&start);
    let kept = yard.kept(&site, Reading::Now);
    assert_eq!(
        kept.revision.tree,
        snapshot(&yard.bench.trees, &start, None).revision.tree
    );
    // What was only moved is not looked at.
    assert_eq!(kept.report.read_files, 3, "{:?}", kept.report);
    let again = yard.kept(&yard.over(kept.revision), Reading::Now);
    assert_eq!(again.revision, kept.revision);
    assert_eq!(yard.kept(&site, Reading::Later).revision, kept.revision);
}

#[test]
fn only_what_changed_is_walked_and_read() {
    let Some(yard) = Yard::open("only_what_changed_is_walked_and_read") else {
        return;
    };
    let start = yard.bench.made("start", &[].into());
    for n in 0..2000 {
        let dir = start.join((n % 50).to_string());
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join(n.to_string()), n.to_string()).unwrap();
    }
    let site = yard.over(snapshot(&yard.bench.trees, &start, None).revision);
    for n in 0..10 {
        fs::write(site.path().join(format!("{n}/{n}")), "changed").unwrap();
    }
    past_this_tick();
    let first = yard.kept(&site, Reading::Later).report;
    assert_eq!((first.entries, first.read_files, first.read_bytes), (20, 10, 70));
    fs::write(site.path().join("3/3"), "again").unwrap();
    let second = yard.kept(&site, Reading::Now).report;
    assert_eq!((second.entries, second.read_files), (20, 1));
    let third = yard.kept(&yard.over(yard.kept(&site, Reading::Now).revision), Reading::Now);
    // Laid just now: what was made in this tick is not trusted yet.
    assert_eq!(third.report.entries, 20);
}

#[test]
fn what_changes_between_look_and_keep_is_found_out() {
    let Some(yard) = Yard::open("what_changes_between_look_and_keep_is_found_out") else {
        return;
    };
    let start = yard.bench.made("start", &[].into());
    fs::create_dir(start.join("d")).unwrap();
    let site = yard.over(snapshot(&yard.bench.trees, &start, None).revision);
    let (at, trees) = (site.path(), &yard.bench.trees);
    let changes: [&dyn Fn(); 5] = [
        &|| fs::write(at.join("d/file"), "CONTENT").unwrap(),
        &|| fs::remove_file(at.join("d/file")).unwrap(),
        &|| fs::rename(at.join("d"), at.join("e")).unwrap(),
        &|| fs::set_permissions(at.join("d/file"), std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap(),
        &|| {
            fs::remove_file(at.join("d/file")).unwrap();
            symlink("/etc/shadow", at.join("d/file")).unwrap();
        },
    ];
    for change in changes {
        fs::write(at.join("d/file"), "content").unwrap();
        past_this_tick();
        let look = site.look(trees, Reading::Later).unwrap();
        change();
        match site.keep(trees, look) {
            Err(Error::Changed(path)) => assert!(["d", "d/file"].contains(&path.as_str()), "{path}"),
            other => panic!("{other:?}"),
        }
        let _ = fs::rename(at.join("e"), at.join("d"));
        let _ = fs::remove_file(at.join("d/file"));
    }
    // What changed too short a time ago is read at once, so that it is as it was.
    fs::write(at.join("d/file"), "as it was").unwrap();
    let look = site.look(trees, Reading::Now).unwrap();
    fs::write(at.join("d/file"), "later on").unwrap();
    let kept = site.keep(trees, look).unwrap();
    let copy = yard.bench.dir.path().join("copy");
    trees.materialise(kept.revision, &copy, None).unwrap();
    assert_eq!(fs::read_to_string(copy.join("d/file")).unwrap(), "as it was");
}

#[test]
fn neighbours_on_one_base_do_not_see_each_other_and_the_base_stays() {
    let Some(yard) = Yard::open("neighbours_on_one_base_do_not_see_each_other_and_the_base_stays") else {
        return;
    };
    let start = yard.bench.made("start", &[].into());
    fs::write(start.join("file"), "shared").unwrap();
    fs::write(start.join("secret"), "").unwrap();
    let begin = snapshot(&yard.bench.trees, &start, None).revision;
    let (one, other) = (yard.over(begin), yard.over(begin));
    let base = yard.bases.near(&yard.bench.trees, begin).unwrap().unwrap().0;
    let before = everything(&base.layers[0]);
    assert!(as_guest(
        &one.path(),
        "echo mine > file; rm secret; mkdir d; echo x > d/x; chmod 600 d/x"
    ));
    assert_eq!(everything(&other.path()), everything(&start));
    assert_eq!(everything(&base.layers[0]), before);
    let found = fs::metadata(other.path().join("file")).unwrap();
    assert_eq!((found.uid(), found.gid()), (OWNER.uid, OWNER.gid));
    let kept = fs::metadata(base.layers[0].join("file")).unwrap();
    assert_eq!((kept.uid(), kept.gid()), (0, 0));
    let flags = nix::sys::statvfs::statvfs(&one.path()).unwrap().flags();
    let hard = nix::sys::statvfs::FsFlags::ST_NOSUID | nix::sys::statvfs::FsFlags::ST_NODEV;
    assert!(flags.contains(hard), "{flags:?}");
    assert_eq!(yard.kept(&other, Reading::Now).revision, begin);
}

#[test]
fn a_guest_cannot_speak_for_overlayfs() {
    let Some(yard) = Yard::open("a_guest_cannot_speak_for_overlayfs") else {
        return;
    };
    let start = yard.bench.made("start", &[].into());
    fs::create_dir(start.join("d")).unwrap();
    fs::write(start.join("d/file"), "x").unwrap();
    let begin = snapshot(&yard.bench.trees, &start, None).revision;
    let site = yard.over(begin);
    assert!(as_guest(&site.path(), "touch probe && rm probe"), "the guest can write");
    assert!(!as_guest(&site.path(), "mknod d/white c 0 0"));
    assert!(!as_guest(&site.path(), "setfattr -n trusted.overlay.opaque -v y d"));
    // On a plain directory it can, and there a whiteout is a device like others.
    let plain = yard.plain(begin);
    let could = as_guest(&plain.path(), "mknod d/file2 c 0 0");
    let kept = yard.kept(&plain, Reading::Now);
    assert_eq!(
        (kept.revision.tree, kept.report.skipped_total),
        (begin.tree, u64::from(could))
    );
    // Sockets and FIFOs hide what is below, and are no part of a tree.
    assert!(as_guest(&site.path(), "rm d/file && mkfifo d/file"));
    let kept = yard.kept(&site, Reading::Later);
    assert_eq!(kept.report.skipped_total, 1);
    fs::remove_file(start.join("d/file")).unwrap();
    assert_eq!(
        kept.revision.tree,
        snapshot(&yard.bench.trees, &start, None).revision.tree
    );
}

#[test]
fn a_file_with_several_names_stays_one_file() {
    let Some(yard) = Yard::open("a_file_with_several_names_stays_one_file") else {
        return;
    };
    let start = yard.bench.made("start", &[].into());
    fs::create_dir(start.join("d")).unwrap();
    fs::write(start.join("d/one"), "one file").unwrap();
    fs::hard_link(start.join("d/one"), start.join("two")).unwrap();
    fs::write(start.join("alone"), "").unwrap();
    let site = yard.over(snapshot(&yard.bench.trees, &start, None).revision);
    for at in [&site.path(), &start] {
        fs::File::options()
            .write(true)
            .open(at.join("two"))
            .unwrap()
            .write_all_at(b"ONE", 0)
            .unwrap();
        fs::hard_link(at.join("alone"), at.join("d/not-alone")).unwrap();
        fs::rename(at.join("d"), at.join("e")).unwrap();
        assert_eq!(fs::read_to_string(at.join("e/one")).unwrap(), "ONE file");
    }
    let kept = yard.kept(&site, Reading::Now).revision;
    assert_eq!(kept.tree, snapshot(&yard.bench.trees, &start, None).revision.tree);
    assert_eq!(
        links_and_attributes(&yard.over(kept).path()),
        links_and_attributes(&start)
    );
}

#[test]
fn the_next_server_knows_what_a_workspace_is_laid_over() {
    let Some(yard) = Yard::open("the_next_server_knows_what_a_workspace_is_laid_over") else {
        return;
    };
    let start = yard.bench.made("start", &[].into());
    fs::write(start.join("kept"), "kept").unwrap();
    fs::write(start.join("changed"), "x").unwrap();
    let ground = yard.ground();
    let begin = snapshot(&yard.bench.trees, &start, None).revision;
    let site = Site::over(&yard.bench.trees, &yard.bases, &ground, begin, OWNER)
        .unwrap()
        .unwrap();
    fs::write(site.path().join("changed"), "y").unwrap();
    let expected = yard.kept(&site, Reading::Now).revision;
    let adopted = Site::adopt(&yard.bench.trees, ground).unwrap();
    assert_eq!(adopted.path(), site.path());
    assert_eq!(yard.kept(&adopted, Reading::Now).revision, expected);
    assert!(!Site::adopt(&yard.bench.trees, yard.ground()).unwrap().is_overlay());
}

#[test]
fn bases_over_the_bound_go_unless_they_are_in_use() {
    let Some(yard) = Yard::open("bases_over_the_bound_go_unless_they_are_in_use") else {
        return;
    };
    let data = yard.bench.dir.path().join("data");
    let bases = Bases::within(&data, 100 << 10);
    let revision = |n: u32| {
        let dir = yard.bench.made(&n.to_string(), &[].into());
        fs::write(dir.join("file"), vec![n as u8; 40 << 10]).unwrap();
        snapshot(&yard.bench.trees, &dir, None).revision
    };
    let revisions: Vec<Revision> = (0..5).map(revision).collect();
    let ground = yard.ground();
    let site = Site::over(&yard.bench.trees, &bases, &ground, revisions[0], OWNER)
        .unwrap()
        .unwrap();
    for revision in &revisions[1..] {
        bases.make(&yard.bench.trees, *revision, None).unwrap();
        past_this_tick();
    }
    let there = |revision: &Revision| matches!(bases.near(&yard.bench.trees, *revision), Ok(Some((_, 0))));
    // The one in use, the newest, and nothing else that fits.
    let left: Vec<bool> = revisions.iter().map(there).collect();
    assert_eq!(left, [true, false, false, false, true]);
    assert_eq!(fs::read(site.path().join("file")).unwrap(), vec![0; 40 << 10]);
    assert_eq!(bases.left_behind().unwrap(), Vec::<PathBuf>::new());
    // Without its sandbox it goes like the others.
    clear(&data.join("work/0")).unwrap();
    fs::remove_dir_all(data.join("work/0")).unwrap();
    bases.make(&yard.bench.trees, revisions[1], None).unwrap();
    assert!(!there(&revisions[0]));
}

/// Makes bases for ever, as a child of the test below.
#[test]
fn child_that_makes_bases() {
    let Some(data) = std::env::var_os("EXUVIA_TEST_BASES_OF") else {
        return;
    };
    let data = PathBuf::from(data);
    let trees = super::super::Trees::open(&data).unwrap();
    let text = fs::read_to_string(data.join("revision.json")).unwrap();
    let revision: Revision = serde_json::from_str(&text).unwrap();
    let bases = Bases::new(&data);
    loop {
        bases.make(&trees, revision, None).unwrap();
        fs::write(data.join("made"), "").unwrap();
        for entry in fs::read_dir(data.join("bases")).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() && path.join("about.json").exists() {
                fs::remove_dir_all(path).unwrap();
            }
        }
    }
}

/// Promise 7: `kill -9` in the midst of making a base.
#[test]
fn a_base_is_whole_or_not_there() {
    let Some(yard) = Yard::open("a_base_is_whole_or_not_there") else {
        return;
    };
    let start = yard.bench.made("start", &[].into());
    for n in 0..3000 {
        fs::write(start.join(n.to_string()), n.to_string()).unwrap();
    }
    let revision = snapshot(&yard.bench.trees, &start, None).revision;
    let data = yard.bench.dir.path().join("data");
    fs::write(data.join("revision.json"), serde_json::to_vec(&revision).unwrap()).unwrap();
    let unfinished = || {
        let all = fs::read_dir(data.join("bases")).unwrap();
        all.filter(|entry| {
            entry
                .as_ref()
                .is_ok_and(|e| e.file_name().as_bytes().starts_with(b".new-"))
        })
        .count()
    };
    for round in 0..4 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "workspace::overlay::tests::child_that_makes_bases"])
            .env("EXUVIA_TEST_BASES_OF", &data)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        while unfinished() == 0 {
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_millis(7 * round));
        // While it lives, nothing of it is taken from it.
        assert_eq!(yard.bases.left_behind().unwrap(), Vec::<PathBuf>::new());
        child.kill().unwrap();
        child.wait().unwrap();
        yard.bases.sweep().unwrap();
        assert_eq!(unfinished(), 0);
        let site = yard.over(revision);
        assert_eq!(everything(&site.path()), everything(&start));
        clear(yard.grounds.borrow().last().unwrap()).unwrap();
        assert_eq!(yard.mounts(), Vec::<PathBuf>::new());
    }
}
