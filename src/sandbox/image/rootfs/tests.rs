use super::*;
use crate::sandbox::image::testing::{Tar, gzip};

#[test]
fn every_compression_is_unpacked_once_by_content() {
    let data = tempfile::tempdir().unwrap();
    let plain = Tar::new().file("./hello", "world").bytes();
    let forms = [gzip(&plain), zstd::encode_all(plain.as_slice(), 1).unwrap(), plain];
    for form in &forms {
        let tar = data.path().join("image.tar");
        fs::write(&tar, form).unwrap();
        let home = unpacked(&tar, data.path()).unwrap();
        assert_eq!(fs::read_to_string(home.join("hello")).unwrap(), "world");
        assert_eq!(unpacked(&tar, data.path()).unwrap(), home);
    }
    assert_eq!(Roots::open(data.path()).unwrap().keys().unwrap().len(), forms.len());
}

#[test]
fn a_hostile_tar_leaves_nothing_behind() {
    let data = tempfile::tempdir().unwrap();
    let tar = data.path().join("image.tar");
    fs::write(&tar, Tar::new().file("good", "x").file("../bad", "x").bytes()).unwrap();
    assert!(unpacked(&tar, data.path()).is_err());
    assert_eq!(
        super::super::names(&data.path().join("images")).unwrap(),
        ["lock", "locks"]
    );
}
