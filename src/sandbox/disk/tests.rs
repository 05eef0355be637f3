use std::io::Write;
use std::os::unix::fs::symlink;
use std::time::{Duration, Instant};

use super::*;

const MIB: u64 = 1 << 20;

fn limits(kind: Option<Kind>) -> Limits {
    Limits {
        disk: Some(Quota {
            bytes: 32 * MIB,
            inodes: 2000,
        }),
        disk_kind: kind,
        ..Limits::default()
    }
}

/// The kinds that can be tried here; says which cannot.
fn kinds(test: &str, volumes: &Volumes) -> Vec<Kind> {
    let mut able = Vec::new();
    for (kind, lack) in volumes.kinds() {
        match lack {
            Ok(()) => able.push(kind),
            Err(lack) => {
                // What a host lacks is refused by name, whatever else it has.
                let refused = volumes.choose(&limits(Some(kind))).unwrap_err();
                assert_eq!(
                    refused.to_string(),
                    format!("this host cannot give a disk quota: `{kind}`: {lack}")
                );
                eprintln!("{test}: not with `{kind}`: {lack}");
            }
        }
    }
    if able.is_empty() {
        crate::skip::skipped(test, "this process may not mount");
    }
    able
}

/// Writes until the kernel says no, and gives how much went in.
fn fill(dir: &Path) -> (u64, io::Error) {
    let mut file = File::create(dir.join("big")).unwrap();
    let block = vec![7; 1 << 20];
    let mut written = 0;
    loop {
        match file.write(&block) {
            Ok(count) => written += count as u64,
            Err(error) => return (written, error),
        }
        assert!(written < 1 << 30, "there is no quota");
    }
}

/// The loop devices in use whose image is one of ours and whose mount is below `dir`, and the mounts themselves.
fn left(dir: &Path) -> Vec<PathBuf> {
    mounts_below(dir).unwrap()
}

#[test]
fn a_volume_holds_no_more_than_its_quota_and_goes_whole() {
    let data = tempfile::tempdir().unwrap();
    let data = fs::canonicalize(data.path()).unwrap();
    let volumes = Volumes::new(&data);
    for kind in kinds("a_volume_holds_no_more_than_its_quota_and_goes_whole", &volumes) {
        let dir = data.join(kind.to_string());
        fs::create_dir(&dir).unwrap();
        let volume = volumes.make(&dir, &limits(Some(kind)), 70_000).unwrap();
        assert_eq!(volume.kind(), Some(kind));
        let files = volume.workspace();
        let found = fs::metadata(&files).unwrap();
        assert_eq!(
            (found.uid(), found.gid(), found.mode() & 0o7777),
            (70_000, 70_000, 0o755)
        );
        // No `lost+found` and the like.
        assert_eq!(fs::read_dir(&files).unwrap().count(), 0, "{kind}");

        let most = volume.holds().unwrap().most;
        assert!(most.bytes <= 32 * MIB && most.bytes > 28 * MIB, "{kind}: {most:?}");
        assert!(most.inodes <= 2000 && most.inodes > 1800, "{kind}: {most:?}");
        let (written, error) = fill(&files);
        assert!(
            matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT)),
            "{error}"
        );
        assert!(written <= 32 * MIB && written > 24 * MIB, "{kind}: {written}");
        assert!(volume.holds().unwrap().used.bytes >= written, "{kind}");
        fs::remove_file(files.join("big")).unwrap();

        let made = (0..3000)
            .take_while(|n| symlink("x", files.join(n.to_string())).is_ok())
            .count() as u64;
        assert!(made <= 2000 && made > 1800, "{kind}: {made}");

        clear(&dir).unwrap();
        clear(&dir).unwrap();
        assert_eq!(left(&data), Vec::<PathBuf>::new(), "{kind}");
        fs::remove_dir_all(&dir).unwrap();
    }
}

#[test]
fn a_volume_of_an_image_has_no_name_and_its_device_ends_with_it() {
    const NAME: &str = "a_volume_of_an_image_has_no_name_and_its_device_ends_with_it";
    let data = tempfile::tempdir().unwrap();
    let data = fs::canonicalize(data.path()).unwrap();
    let volumes = Volumes::new(&data);
    if !kinds(NAME, &volumes).contains(&Kind::Image) {
        return;
    }
    let dir = data.join("a");
    fs::create_dir(&dir).unwrap();
    let volume = volumes.make(&dir, &limits(Some(Kind::Image)), 70_000).unwrap();
    // Only the template that the next one is copied from.
    let images: Vec<String> = fs::read_dir(data.join("disks"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(images, ["ext4-1-33554432-2000"]);
    let table = mountinfo::parse(&fs::read_to_string("/proc/self/mountinfo").unwrap());
    let mount = table.into_iter().find(|entry| entry.point == dir.join("disk")).unwrap();
    assert!(mount.has("nosuid") && mount.has("nodev"), "{mount:?}");
    let backing = PathBuf::from(mount.source.replace("/dev/", "/sys/block/")).join("loop/backing_file");
    assert!(fs::read_to_string(&backing).is_ok_and(|file| file.contains("(deleted)")));
    drop(volume);
    clear(&dir).unwrap();
    let started = Instant::now();
    // Taken by another meanwhile, or free: not ours any more.
    while fs::read_to_string(&backing).is_ok_and(|file| file.contains(&*data.to_string_lossy())) {
        assert!(started.elapsed() < Duration::from_secs(20), "the loop device stays");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn what_fails_leaves_nothing() {
    let data = tempfile::tempdir().unwrap();
    let data = fs::canonicalize(data.path()).unwrap();
    let volumes = Volumes::new(&data);
    let able = kinds("what_fails_leaves_nothing", &volumes);
    if able.is_empty() {
        return;
    }
    let dir = data.join("a");
    fs::create_dir(&dir).unwrap();
    // A file where the templates should be.
    fs::write(data.join("disks"), "").unwrap();
    if able.contains(&Kind::Image) {
        let error = volumes.make(&dir, &limits(Some(Kind::Image)), 70_000).unwrap_err();
        assert!(matches!(error, Error::Step { .. }), "{error}");
    }
    // More than a tmpfs can be, and no room for a single file.
    let mut tiny = limits(Some(Kind::Tmpfs));
    tiny.disk = Some(Quota { bytes: 4096, inodes: 1 });
    volumes.make(&dir, &tiny, 70_000).unwrap_err();
    assert_eq!(left(&data), Vec::<PathBuf>::new());
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
    // What was there stays.
    fs::create_dir_all(workspace(&dir)).unwrap();
    fs::write(workspace(&dir).join("kept"), "").unwrap();
    volumes.make(&dir, &limits(None), 70_000).unwrap_err();
    assert!(workspace(&dir).join("kept").exists());
}

#[test]
fn a_tmpfs_leaves_half_of_the_memory() {
    let limits = Limits {
        memory_bytes: 100 * MIB,
        ..Limits::default()
    };
    let quota = limits.disk.unwrap();
    assert_eq!(effective(Kind::Tmpfs, quota, &limits).bytes, 50 * MIB);
    assert_eq!(effective(Kind::Project, quota, &limits), quota);
    let small = Quota {
        bytes: 16 * MIB,
        inodes: 200_000,
    };
    assert_eq!(effective(Kind::Image, small, &limits).inodes, 2048);
}
