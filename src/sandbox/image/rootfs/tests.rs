use std::os::unix::fs::{FileTypeExt, MetadataExt};

use super::*;

struct Tar(tar::Builder<Vec<u8>>);

impl Tar {
    fn new() -> Self {
        Self(tar::Builder::new(Vec::new()))
    }

    /// Adds an entry under exactly this name, which `tar::Builder` itself would refuse for hostile ones.
    fn add(mut self, name: &str, kind: EntryType, link: &str, mode: u32, data: &str) -> Self {
        let mut header = tar::Header::new_ustar();
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        header.as_old_mut().linkname[..link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_size(data.len() as u64);
        header.set_cksum();
        self.0.append(&header, data.as_bytes()).unwrap();
        self
    }

    fn file(self, name: &str, data: &str) -> Self {
        self.add(name, EntryType::Regular, "", 0o644, data)
    }

    fn bytes(self) -> Vec<u8> {
        self.0.into_inner().unwrap()
    }

    fn unpack(self) -> (tempfile::TempDir, Result<(), Refused>) {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("root")).unwrap();
        let result = unpack(self.bytes().as_slice(), &dir.path().join("root"), &BOUNDS);
        (dir, result)
    }
}

#[test]
fn names_that_climb_are_refused() {
    for name in ["../escaped", "a/../../escaped"] {
        let (dir, result) = Tar::new().file(name, "x").unpack();
        assert_eq!(
            result.unwrap_err().to_string(),
            format!("entry `{name}` leads out of the image")
        );
        assert!(!dir.path().join("escaped").exists());
    }
}

#[test]
fn links_in_the_tar_cannot_lead_out() {
    let outside = tempfile::tempdir().unwrap();
    let out = outside.path().to_str().unwrap();
    // Taken as a path of the image, where it leads nowhere.
    let (_dir, result) = Tar::new()
        .add("out", EntryType::Symlink, out, 0o777, "")
        .file("out/planted", "x")
        .unpack();
    assert!(matches!(result, Err(Refused::Unpack { .. })));
    assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0);
    // The root's parent is the root.
    let (dir, result) = Tar::new()
        .add("up", EntryType::Symlink, "../..", 0o777, "")
        .file("up/planted", "y")
        .unpack();
    result.unwrap();
    assert!(!dir.path().join("planted").exists());
    assert_eq!(fs::read_to_string(dir.path().join("root/planted")).unwrap(), "y");
}

#[test]
fn a_hard_link_cannot_take_a_file_of_the_host() {
    let secret = tempfile::NamedTempFile::new().unwrap();
    let path = secret.path().to_str().unwrap();
    let (_dir, result) = Tar::new().add("stolen", EntryType::Link, path, 0o644, "").unpack();
    assert!(matches!(result, Err(Refused::Unpack { .. })));
    let (_dir, result) = Tar::new().add("stolen", EntryType::Link, "../x", 0o644, "").unpack();
    assert_eq!(
        result.unwrap_err().to_string(),
        "entry `stolen` is a hard link out of the image"
    );
}

#[test]
fn writing_through_a_link_replaces_the_link() {
    let victim = tempfile::NamedTempFile::new().unwrap();
    let (dir, result) = Tar::new()
        .add(
            "etc/passwd",
            EntryType::Symlink,
            victim.path().to_str().unwrap(),
            0o777,
            "",
        )
        .file("etc/passwd", "mine")
        .unpack();
    result.unwrap();
    assert_eq!(fs::read_to_string(victim.path()).unwrap(), "");
    assert_eq!(fs::read_to_string(dir.path().join("root/etc/passwd")).unwrap(), "mine");
}

#[test]
fn devices_and_set_id_bits_are_dropped() {
    let (dir, result) = Tar::new()
        .add("dev/sda", EntryType::Block, "", 0o666, "")
        .add("dev/cuse", EntryType::Char, "", 0o666, "")
        .add("pipe", EntryType::Fifo, "", 0o666, "")
        .add("bin/su", EntryType::Regular, "", 0o6755, "elf")
        .add("bin/su2", EntryType::Link, "bin/su", 0o6755, "")
        .unpack();
    result.unwrap();
    let root = dir.path().join("root");
    assert_eq!(fs::read_dir(root.join("dev")).unwrap().count(), 0);
    assert!(!root.join("pipe").exists());
    let found = fs::metadata(root.join("bin/su2")).unwrap();
    assert_eq!(
        (found.mode() & 0o7777, found.nlink(), found.file_type().is_socket()),
        (0o755, 2, false)
    );
}

#[test]
fn count_and_size_are_bounded() {
    let bounds = Bounds { entries: 1, bytes: 5 };
    let dir = tempfile::tempdir().unwrap();
    let two = Tar::new().file("a", "").file("b", "").bytes();
    let refused = unpack(two.as_slice(), dir.path(), &bounds).unwrap_err();
    assert_eq!(refused.to_string(), "it holds more than 1 entries");
    let large = Tar::new().file("c", "123456").bytes();
    let refused = unpack(large.as_slice(), dir.path(), &bounds).unwrap_err();
    assert_eq!(refused.to_string(), "it holds more than 5 bytes");
}

#[test]
fn every_compression_is_unpacked_once_by_content() {
    let data = tempfile::tempdir().unwrap();
    let plain = Tar::new().file("./hello", "world").bytes();
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    io::Write::write_all(&mut gzip, &plain).unwrap();
    let forms = [
        gzip.finish().unwrap(),
        zstd::encode_all(plain.as_slice(), 1).unwrap(),
        plain,
    ];
    for form in &forms {
        let tar = data.path().join("image.tar");
        fs::write(&tar, form).unwrap();
        let home = unpacked(&tar, data.path()).unwrap();
        assert_eq!(fs::read_to_string(home.join("hello")).unwrap(), "world");
        assert_eq!(unpacked(&tar, data.path()).unwrap(), home);
    }
    assert_eq!(fs::read_dir(data.path().join("images")).unwrap().count(), forms.len());
}

#[test]
fn a_hostile_tar_leaves_nothing_behind() {
    let data = tempfile::tempdir().unwrap();
    let tar = data.path().join("image.tar");
    fs::write(&tar, Tar::new().file("good", "x").file("../bad", "x").bytes()).unwrap();
    assert!(unpacked(&tar, data.path()).is_err());
    assert_eq!(fs::read_dir(data.path().join("images")).unwrap().count(), 0);
}
