//! The attacks, and what layers are to each other.
#![expect(unsafe_code, reason = "extended attributes are read with libc")]

use std::os::unix::fs::MetadataExt;

use super::*;
use crate::sandbox::image::Bounds;
use crate::sandbox::image::testing::Tar;

/// A directory around the root, in which nothing may ever appear.
#[derive(Debug)]
struct Around(tempfile::TempDir);

impl Around {
    fn root(&self) -> PathBuf {
        self.0.path().join("root")
    }

    /// Every file and link below the root, sorted, with what it holds.
    fn tree(&self) -> Vec<String> {
        let mut all = Vec::new();
        let mut waiting = vec![self.root()];
        while let Some(directory) = waiting.pop() {
            for entry in fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                let name = path.strip_prefix(self.root()).unwrap().to_str().unwrap().to_owned();
                let kind = fs::symlink_metadata(&path).unwrap().file_type();
                if kind.is_dir() {
                    all.push(format!("{name}/"));
                    waiting.push(path);
                } else if kind.is_symlink() {
                    all.push(format!("{name} -> {}", fs::read_link(&path).unwrap().display()));
                } else {
                    all.push(format!("{name} = {}", fs::read_to_string(&path).unwrap()));
                }
            }
        }
        all.sort();
        all
    }
}

fn applied(layers: impl IntoIterator<Item = Tar>) -> (Around, Result<(), Error>) {
    let around = Around(tempfile::tempdir().unwrap());
    fs::create_dir(around.root()).unwrap();
    let mut unpacking = Unpacking::new(&around.root(), &Job::default()).unwrap();
    let mut all = layers.into_iter().map(Tar::bytes);
    let result = all.try_for_each(|layer| unpacking.layer(layer.as_slice(), Whiteouts::Apply));
    let others = fs::read_dir(around.0.path()).unwrap().count();
    assert_eq!(others, 1, "something was made beside the root");
    (around, result)
}

fn tree(layers: impl IntoIterator<Item = Tar>) -> Vec<String> {
    let (around, result) = applied(layers);
    result.unwrap();
    around.tree()
}

fn refusal(layers: impl IntoIterator<Item = Tar>) -> String {
    let error = applied(layers).1.unwrap_err();
    crate::error::chain(&error)
}

#[test]
fn names_that_climb_are_refused() {
    for name in ["../escaped", "a/../../escaped", "/../escaped"] {
        assert_eq!(
            refusal([Tar::new().file(name, "x")]),
            format!("entry `{name}` leads out of the image")
        );
    }
}

#[test]
fn absolute_names_are_names_of_the_image() {
    assert_eq!(tree([Tar::new().file("/etc/x", "1")]), ["etc/", "etc/x = 1"]);
}

#[test]
fn symlinks_cannot_lead_out_within_a_layer_or_from_an_earlier_one() {
    let outside = tempfile::tempdir().unwrap();
    let out = outside.path().to_str().unwrap();
    let link = || Tar::new().symlink("out", out);
    // Taken as a path of the image, where it leads nowhere.
    assert!(refusal([link().file("out/planted", "x")]).starts_with("cannot unpack `out/planted`"));
    assert!(refusal([link(), Tar::new().file("out/planted", "x")]).starts_with("cannot unpack `out/planted`"));
    assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0);
    // The root's parent is the root.
    let up = || Tar::new().symlink("up", "../../..");
    assert_eq!(tree([up(), Tar::new().file("up/x", "y")]), ["up -> ../../..", "x = y"]);
}

#[test]
fn a_chain_of_links_and_a_circle_stay_inside() {
    let chain = Tar::new()
        .symlink("a", "b")
        .symlink("b", "/c")
        .dir("c")
        .file("a/x", "1");
    assert_eq!(tree([chain]), ["a -> b", "b -> /c", "c/", "c/x = 1"]);
    let circle = Tar::new().symlink("a", "b").symlink("b", "a").file("a/x", "1");
    assert!(refusal([circle]).contains("symbolic links"));
}

#[test]
fn proc_self_root_leads_nowhere() {
    let sly = Tar::new().symlink("p", "/proc/self/root/tmp").file("p/x", "1");
    assert!(refusal([sly]).starts_with("cannot unpack `p/x`"));
}

#[test]
fn hard_links_reach_earlier_layers_and_never_the_host() {
    let both = tree([Tar::new().file("a", "1"), Tar::new().link("b", "a").link("c/d", "./b")]);
    assert_eq!(both, ["a = 1", "b = 1", "c/", "c/d = 1"]);
    assert!(refusal([Tar::new().link("stolen", "/etc/passwd")]).starts_with("cannot unpack `stolen`"));
    assert_eq!(
        refusal([Tar::new().link("stolen", "../../etc/passwd")]),
        "entry `stolen` is a hard link out of the image"
    );
    // Through a link: a path of the image again.
    let sly = Tar::new().symlink("etc", "/../../../etc").link("stolen", "etc/passwd");
    assert!(refusal([sly]).starts_with("cannot unpack `stolen`"));
    assert!(refusal([Tar::new().file("a", "1").link("a", "a")]).starts_with("cannot unpack `a`"));
}

#[test]
fn writing_through_a_hard_link_to_a_symlink_replaces_it() {
    let victim = tempfile::NamedTempFile::new().unwrap();
    let path = victim.path().to_str().unwrap();
    let sly = Tar::new().symlink("a", path).link("b", "a").file("b", "mine");
    assert_eq!(tree([sly]), [format!("a -> {path}"), "b = mine".to_owned()]);
    assert_eq!(fs::read_to_string(victim.path()).unwrap(), "");
}

#[test]
fn devices_set_id_bits_owners_and_capabilities_are_dropped() {
    // A record whose value holds line breaks and zeros, as a file capability does, and then a name.
    let record = |key: &str, value: &[u8]| {
        let body = [key.as_bytes(), b"=", value, b"\n"].concat();
        let length = body.len() + 3;
        [format!("{length} ").into_bytes(), body].concat()
    };
    let capability = [
        record("SCHILY.xattr.security.capability", b"\x01\0\0\x02\n\n\0\x20\0\0"),
        record("path", b"bin/renamed"),
    ]
    .concat();
    let tar = Tar::new()
        .add("dev/sda", EntryType::Block, "", 0o666, b"")
        .add("dev/cuse", EntryType::Char, "", 0o666, b"")
        .add("pipe", EntryType::Fifo, "", 0o666, b"")
        .add("bin/su", EntryType::Regular, "", 0o6755, b"elf")
        .add("ext", EntryType::XHeader, "", 0o644, &capability)
        .add("bin/ping", EntryType::Regular, "", 0o1755, b"elf");
    let (around, result) = applied([tar]);
    result.unwrap();
    assert_eq!(around.tree(), ["bin/", "bin/renamed = elf", "bin/su = elf"]);
    for name in ["bin/su", "bin/renamed"] {
        let path = around.root().join(name);
        let found = fs::metadata(&path).unwrap();
        let own = nix::unistd::geteuid().as_raw();
        assert_eq!(
            (found.mode() & 0o7777, found.uid(), found.mtime()),
            (0o755, own, 1_000_000_000)
        );
        assert_eq!(attributes(&path), 0);
    }
}

/// Bytes of the names of a file's extended attributes; the host's own labels are no part of this.
fn attributes(path: &Path) -> isize {
    let path = std::ffi::CString::new(path.as_os_str().as_bytes()).unwrap();
    let name = c"security.capability";
    // SAFETY: both strings end in zero, and no bytes are asked for.
    let size = unsafe { libc::lgetxattr(path.as_ptr(), name.as_ptr(), std::ptr::null_mut(), 0) };
    size.max(0)
}

#[test]
fn a_whiteout_hides_what_lower_layers_have() {
    let lower = || {
        Tar::new()
            .file("a/x", "1")
            .file("a/y", "2")
            .file("b", "3")
            .symlink("c", "b")
    };
    let upper = Tar::new()
        .file("a/.wh.x", "")
        .file(".wh.c", "")
        .file(".wh.missing", "")
        .file("gone/.wh.x", "");
    assert_eq!(tree([lower(), upper]), ["a/", "a/y = 2", "b = 3"]);
    // A whole directory; the link itself, not what it leads to.
    assert_eq!(tree([lower(), Tar::new().file(".wh.a", "")]), ["b = 3", "c -> b"]);
}

#[test]
fn a_whiteout_hides_nothing_of_its_own_layer_wherever_it_stands() {
    let lower = || Tar::new().file("a/old", "1").file("a/b/old", "1").file("f", "old");
    let wanted = ["a/", "a/b/", "a/b/new = 2", "f = new"];
    let before = Tar::new()
        .file("a/.wh..wh..opq", "")
        .file("a/b/new", "2")
        .file(".wh.f", "")
        .file("f", "new");
    let after = Tar::new()
        .file("a/b/new", "2")
        .file("a/.wh..wh..opq", "")
        .file("f", "new")
        .file(".wh.f", "");
    assert_eq!(tree([lower(), before]), wanted);
    assert_eq!(tree([lower(), after]), wanted);
    // The whole directory hidden, and made anew in the same layer.
    let anew = Tar::new()
        .dir("a")
        .file("a/new", "2")
        .file(".wh.a", "")
        .file(".wh.f", "");
    assert_eq!(tree([lower(), anew]), ["a/", "a/new = 2"]);
}

#[test]
fn a_hard_link_of_the_layer_does_not_keep_what_is_hidden() {
    let upper = Tar::new().link("new", "old").file(".wh.old", "");
    assert_eq!(tree([Tar::new().file("old", "1"), upper]), ["new = 1"]);
}

#[test]
fn an_opaque_root_hides_everything_below() {
    let upper = Tar::new().file("b", "2").file(".wh..wh..opq", "");
    assert_eq!(tree([Tar::new().file("a/x", "1"), upper]), ["b = 2"]);
}

#[test]
fn whiteouts_of_no_name_and_in_odd_places_are_refused_or_do_nothing() {
    for name in [".wh.", ".wh..", ".wh...", "a/.wh.."] {
        assert_eq!(
            refusal([Tar::new().file(name, "")]),
            format!("entry `{name}` is a whiteout of no name")
        );
    }
    assert_eq!(
        refusal([Tar::new().file(".wh.a/b", "")]),
        "entry `.wh.a/b` lies below a whiteout"
    );
    // Notes of an old union file system.
    let notes = Tar::new()
        .file(".wh..wh.aufs", "")
        .dir(".wh..wh.plnk")
        .file(".wh..wh.plnk/1.2", "")
        .file("a", "1");
    assert_eq!(tree([notes]), ["a = 1"]);
    // Through a link: only what lies in the image.
    let lower = Tar::new().symlink("out", "/").file("kept", "1").file("hit", "2");
    assert_eq!(
        tree([lower, Tar::new().file("out/.wh.hit", "")]),
        ["kept = 1", "out -> /"]
    );
}

#[test]
fn a_whiteout_through_a_link_touches_nothing_of_the_host() {
    let outside = tempfile::tempdir().unwrap();
    fs::write(outside.path().join("precious"), "x").unwrap();
    let link = Tar::new().symlink("out", outside.path().to_str().unwrap());
    let upper = Tar::new().file("out/.wh.precious", "").file("out/.wh..wh..opq", "");
    applied([link, upper]).1.unwrap();
    assert_eq!(fs::read_to_string(outside.path().join("precious")).unwrap(), "x");
}

#[test]
fn files_and_directories_give_way_to_each_other() {
    let file_over_dir = tree([Tar::new().file("a/x", "1"), Tar::new().file("a", "2")]);
    assert_eq!(file_over_dir, ["a = 2"]);
    let dir_over_file = tree([Tar::new().file("a", "1"), Tar::new().dir("a").file("a/x", "2")]);
    assert_eq!(dir_over_file, ["a/", "a/x = 2"]);
    let dir_over_dir = tree([Tar::new().file("a/x", "1"), Tar::new().dir("a").file("a/y", "2")]);
    assert_eq!(dir_over_dir, ["a/", "a/x = 1", "a/y = 2"]);
    let dir_over_link = tree([
        Tar::new().symlink("a", "b").file("b/x", "1"),
        Tar::new().dir("a").file("a/y", "2"),
    ]);
    assert_eq!(dir_over_link, ["a/", "a/y = 2", "b/", "b/x = 1"]);
    let link_over_dir = tree([Tar::new().file("a/x", "1"), Tar::new().symlink("a", "b")]);
    assert_eq!(link_over_dir, ["a -> b"]);
}

#[test]
fn a_whole_root_file_system_keeps_names_that_look_like_whiteouts() {
    let around = Around(tempfile::tempdir().unwrap());
    fs::create_dir(around.root()).unwrap();
    let mut unpacking = Unpacking::new(&around.root(), &Job::default()).unwrap();
    let tar = Tar::new().file("a", "1").file(".wh.a", "2").bytes();
    unpacking.layer(tar.as_slice(), Whiteouts::Keep).unwrap();
    assert_eq!(around.tree(), [".wh.a = 2", "a = 1"]);
}

/// A tar with a name from an extended header.
fn long(name: &[u8]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(EntryType::GNULongName);
    header.set_size(name.len() as u64);
    header.set_cksum();
    builder.append(&header, name).unwrap();
    header.set_entry_type(EntryType::Regular);
    header.set_size(0);
    header.set_cksum();
    builder.append(&header, io::empty()).unwrap();
    builder.into_inner().unwrap()
}

fn unpacked(tar: &[u8], bounds: Bounds) -> Result<Around, Error> {
    let around = Around(tempfile::tempdir().unwrap());
    fs::create_dir(around.root()).unwrap();
    let job = Job {
        bounds,
        ..Job::default()
    };
    let mut unpacking = Unpacking::new(&around.root(), &job)?;
    unpacking.layer(tar, Whiteouts::Apply)?;
    Ok(around)
}

#[test]
fn names_over_the_limits_are_refused() {
    let refused = |name: &[u8]| unpacked(&long(name), Bounds::default()).unwrap_err().to_string();
    assert!(refused(&[b'a'; 256]).ends_with("has a name that is too long"));
    assert!(refused(&[[b'a'; 200].as_slice(), b"/"].concat().repeat(30)).ends_with("has a name that is too long"));
    assert!(refused(&b"a/".repeat(300)).ends_with("lies too deep"));
    // An extended header of its own is bounded before it is read.
    assert_eq!(
        refused(&vec![b'a'; (1 << 20) + 1]),
        "it holds more than 1048576 bytes in one extended header"
    );
    // The longest that are fine, and bytes that are no text.
    let around = unpacked(&long(&[b'a'; 255]), Bounds::default()).unwrap();
    assert!(around.root().join("a".repeat(255)).is_file());
    let around = unpacked(&long(b"\xff\xfe\n"), Bounds::default()).unwrap();
    assert!(around.root().join(OsStr::from_bytes(b"\xff\xfe\n")).is_file());
}

#[test]
fn a_file_with_two_sizes_and_sparse_files_are_refused() {
    let sized = Tar::new()
        .add("ext", EntryType::XHeader, "", 0o644, b"12 size=999\n")
        .file("a", "1");
    assert_eq!(refusal([sized]), "entry `a` has two sizes");
    let sparse = Tar::new()
        .add("ext", EntryType::XHeader, "", 0o644, b"22 GNU.sparse.major=1\n")
        .file("a", "1");
    assert!(refusal([sparse]).starts_with("entry `a` is a sparse file"));
    // One that says it has much and holds little.
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(EntryType::GNUSparse);
    header.set_path("huge").unwrap();
    header.set_size(0);
    header.set_cksum();
    let mut builder = tar::Builder::new(Vec::new());
    builder.append(&header, io::empty()).unwrap();
    let refused = unpacked(&builder.into_inner().unwrap(), Bounds::default()).unwrap_err();
    assert!(refused.to_string().starts_with("entry `huge` is a sparse file"));
}

#[test]
fn count_and_size_are_bounded_over_all_layers() {
    let around = Around(tempfile::tempdir().unwrap());
    fs::create_dir(around.root()).unwrap();
    let bounds = |entries, bytes| Job {
        bounds: Bounds {
            entries,
            bytes,
            ..Bounds::default()
        },
        ..Job::default()
    };
    let one = |name: &str| Tar::new().file(name, "123").bytes();
    let mut unpacking = Unpacking::new(&around.root(), &bounds(2, 100)).unwrap();
    unpacking.layer(one("a").as_slice(), Whiteouts::Apply).unwrap();
    unpacking.layer(one("b").as_slice(), Whiteouts::Apply).unwrap();
    let refused = unpacking.layer(one("c").as_slice(), Whiteouts::Apply).unwrap_err();
    assert_eq!(refused.to_string(), "it holds more than 2 entries");
    let mut unpacking = Unpacking::new(&around.root(), &bounds(9, 5)).unwrap();
    unpacking.layer(one("a").as_slice(), Whiteouts::Apply).unwrap();
    let refused = unpacking.layer(one("b").as_slice(), Whiteouts::Apply).unwrap_err();
    assert_eq!(refused.to_string(), "it holds more than 5 bytes");
}

#[test]
fn a_tar_that_breaks_off_is_refused() {
    let whole = Tar::new().file("a", &"x".repeat(2000)).bytes();
    let refused = unpacked(&whole[..1500], Bounds::default()).unwrap_err();
    assert!(matches!(refused, Error::Entry { why: "breaks off", .. }), "{refused}");
    assert!(matches!(unpacked(&whole[..300], Bounds::default()), Err(Error::Tar(_))));
    assert!(matches!(unpacked(&[7; 2048], Bounds::default()), Err(Error::Tar(_))));
}

#[test]
fn a_cancelled_job_stops_within_a_layer() {
    let around = Around(tempfile::tempdir().unwrap());
    fs::create_dir(around.root()).unwrap();
    let job = Job::default();
    let mut unpacking = Unpacking::new(&around.root(), &job).unwrap();
    job.cancel.cancel();
    let tar = Tar::new().file("a", "1").bytes();
    assert!(matches!(
        unpacking.layer(tar.as_slice(), Whiteouts::Apply),
        Err(Error::Cancelled)
    ));
}
