use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::json;

use super::*;
use crate::sandbox::image::testing::{self, Files, Image, Tar, archived};
use crate::sandbox::image::{Removed, hold, resolve};
use crate::sandbox::{Error as SandboxError, ImageRef};

const NOW: Timestamp = Timestamp(4_000_000_000_000);

struct Bed {
    data: tempfile::TempDir,
    store: Store,
    /// Where sources are put.
    sources: tempfile::TempDir,
}

impl Bed {
    fn new() -> Self {
        let data = tempfile::tempdir().unwrap();
        Self {
            store: Store::open(data.path()).unwrap(),
            data,
            sources: tempfile::tempdir().unwrap(),
        }
    }

    fn layout(&self, image: &Image) -> Source {
        testing::write(self.sources.path(), &image.layout("v1"));
        Source::Layout {
            path: self.sources.path().to_owned(),
            tag: None,
        }
    }

    fn archive(&self, bytes: &[u8], tag: Option<&str>) -> Source {
        let path = self.sources.path().join("image.tar");
        fs::write(&path, bytes).unwrap();
        Source::Archive {
            path,
            tag: tag.map(str::to_owned),
        }
    }

    fn import(&self, source: &Source, name: &str) -> Result<Stored, Error> {
        let name = name.parse().unwrap();
        self.store
            .import(source, &Options::default(), &name, NOW, &Job::default())
    }

    fn root(&self, image: &str) -> PathBuf {
        self.store.root(&image.parse().unwrap()).unwrap()
    }

    /// Everything below `images` but locks.
    fn left(&self) -> Vec<String> {
        let mut names = crate::sandbox::image::names(&self.data.path().join("images")).unwrap();
        names.retain(|name| name != "lock" && name != "locks" && name != "records");
        names
    }
}

fn two_layers() -> Image {
    Image::new(&[
        Tar::new().file("etc/motd", "old").file("bin/sh", "#!").bytes(),
        Tar::new().file("etc/.wh.motd", "").file("etc/new", "new").bytes(),
    ])
}

#[test]
fn a_layout_and_its_archives_are_one_image() {
    let bed = Bed::new();
    let image = two_layers();
    let from_layout = bed.import(&bed.layout(&image), "a").unwrap();
    assert_eq!(
        from_layout,
        Stored {
            format_version: 1,
            digest: image.digest(),
            chain: from_layout.chain.clone(),
            layers: 2,
            entries: 4,
            bytes: 8,
            config: Config {
                os: "linux".to_owned(),
                architecture: Platform::default().architecture,
                env: BTreeMap::from([("PATH".to_owned(), "/opt/bin:/bin".to_owned())]),
                env_left_out: vec!["TOKEN".to_owned()],
                cmd: vec!["sh".to_owned()],
                ..Config::default()
            },
            source: format!("layout:{}", bed.sources.path().display()),
            created_at: NOW,
        }
    );
    let root = bed.root("a");
    assert_eq!(fs::read_to_string(root.join("etc/new")).unwrap(), "new");
    assert!(!root.join("etc/motd").exists());
    // Plain, gzip, xz and zstd archives of it: nothing is unpacked again.
    let tar = archived(&image.layout("v1"));
    let forms = [
        tar.clone(),
        testing::gzip(&tar),
        zstd::encode_all(tar.as_slice(), 1).unwrap(),
    ];
    for (form, name) in forms.iter().zip(["b", "c", "d"]) {
        assert_eq!(
            bed.import(&bed.archive(form, None), name).unwrap().digest,
            image.digest()
        );
        assert_eq!(bed.root(name), root);
    }
    let names: Vec<String> = bed
        .store
        .list()
        .unwrap()
        .iter()
        .map(|(name, _)| name.to_string())
        .collect();
    assert_eq!(names, ["a", "b", "c", "d"]);
    assert_eq!(bed.left().len(), 2, "one root and the names");
}

/// What `docker save` wrote in its first form, with a link where two layers are the same.
fn saved(image: &Image, layers: &[Vec<u8>], tags: &[&str]) -> Files {
    let config = format!("{}.json", Digest::of(&image.config).hex());
    let names: Vec<String> = (0..layers.len()).map(|number| format!("{number}/layer.tar")).collect();
    let manifest = json!([{ "Config": config, "RepoTags": tags, "Layers": names }]);
    let mut files = vec![
        (config, image.config.clone()),
        ("manifest.json".to_owned(), manifest.to_string().into_bytes()),
    ];
    files.extend(names.into_iter().zip(layers.iter().cloned()));
    files
}

#[test]
fn a_docker_save_archive_of_the_first_form_is_read() {
    let bed = Bed::new();
    let layers = [Tar::new().file("a", "1").bytes(), Tar::new().file("b", "2").bytes()];
    let image = Image::new(&layers);
    let archive = archived(&saved(&image, &layers, &["registry.example/team/app:1.2"]));
    for tag in [
        None,
        Some("registry.example/team/app:1.2"),
        Some("app:1.2"),
        Some("1.2"),
    ] {
        let stored = bed.import(&bed.archive(&archive, tag), "app").unwrap();
        assert_eq!(stored.digest, Digest::of(&image.config));
    }
    assert_eq!(fs::read_to_string(bed.root("app").join("b")).unwrap(), "2");
    let refused = bed.import(&bed.archive(&archive, Some("2")), "app").unwrap_err();
    assert_eq!(
        refused.to_string(),
        "it has no image `2`, only `registry.example/team/app:1.2`"
    );
    // A changed configuration, and a changed layer.
    let mut files = saved(&image, &layers, &[]);
    files[0].1.push(b' ');
    let refused = bed.import(&bed.archive(&archived(&files), None), "x").unwrap_err();
    assert!(matches!(refused, Error::Digest { .. }), "{refused}");
    let mut files = saved(&image, &layers, &[]);
    files[3].1 = Tar::new().file("b", "evil").bytes();
    // Where the content is known already, the layers are not even read.
    assert_eq!(
        bed.import(&bed.archive(&archived(&files), None), "x").unwrap().chain,
        bed.store.list().unwrap()[0].1.chain
    );
    let bed = Bed::new();
    let refused = bed.import(&bed.archive(&archived(&files), None), "x").unwrap_err();
    assert!(
        refused
            .to_string()
            .starts_with("layer 2, unpacked, is not what its digest says"),
        "{refused}"
    );
}

#[test]
fn links_in_an_archive_are_names_of_the_archive() {
    let bed = Bed::new();
    let layer = Tar::new().file("a", "1").bytes();
    let image = Image::new(&[layer.clone(), layer.clone()]);
    let files = saved(&image, &[layer.clone(), layer.clone()], &["x:1"]);
    let with_link = |to: &str| {
        let tar = files[..3].iter().fold(Tar::new(), |tar, (name, bytes)| {
            tar.add(name, tar::EntryType::Regular, "", 0o644, bytes)
        });
        tar.symlink("1/layer.tar", to).bytes()
    };
    bed.import(&bed.archive(&with_link("../0/layer.tar"), None), "x")
        .unwrap();
    // A file of the host is none of the archive.
    let host = tempfile::NamedTempFile::new().unwrap();
    fs::write(host.path(), &layer).unwrap();
    let other = Bed::new();
    for to in [
        host.path().to_str().unwrap(),
        "../../../../../etc/passwd",
        "../1/layer.tar",
    ] {
        let refused = other.import(&other.archive(&with_link(to), None), "x").unwrap_err();
        let is_named = matches!(refused, Error::Format { .. } | Error::Entry { .. });
        assert!(is_named, "{to}: {refused}");
    }
    assert_eq!(other.left(), Vec::<String>::new());
}

#[test]
fn links_in_a_layout_directory_are_not_followed() {
    let bed = Bed::new();
    let image = two_layers();
    let source = bed.layout(&image);
    let blob = bed
        .sources
        .path()
        .join("blobs/sha256")
        .join(Digest::of(&image.layers[0]).hex());
    let elsewhere = bed.data.path().join("elsewhere");
    fs::rename(&blob, &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &blob).unwrap();
    assert!(matches!(bed.import(&source, "x"), Err(Error::Read { .. })));
}

#[test]
fn lies_about_digests_and_sizes_are_found_and_leave_nothing() {
    let image = two_layers();
    let change = |change: &dyn Fn(&mut Files)| {
        let bed = Bed::new();
        let mut files = image.layout("v1");
        change(&mut files);
        let refused = bed.import(&bed.archive(&archived(&files), None), "x").unwrap_err();
        assert_eq!((bed.left(), bed.store.list().unwrap()), (vec![], vec![]));
        refused.to_string()
    };
    // In the order of `Image::layout`: header, index, manifest, configuration, layers.
    assert!(change(&|files| files[2].1.push(b' ')).starts_with("the manifest is not what its digest says"));
    assert!(
        change(&|files| files[3].1.push(b' ')).starts_with("the image's configuration is not what its digest says")
    );
    let swapped = |files: &mut Files| {
        let other = testing::gzip(&Tar::new().file("etc/motd", "evil").file("bin/sh", "#!").bytes());
        files[4].1 = other;
    };
    let refused = change(&swapped);
    assert!(refused.starts_with("layer 1 "), "{refused}");
    let flipped = |files: &mut Files| {
        let middle = files[5].1.len() / 2;
        files[5].1[middle] ^= 1;
    };
    assert!(change(&flipped).starts_with("layer 2 is not what its digest says"));
    assert!(change(&|files| drop(files.remove(5))).starts_with("the image makes no sense: layer 2"));
}

#[test]
fn a_layer_that_unpacks_to_something_else_is_refused() {
    // Manifest and layer agree; the configuration promises another content.
    let bed = Bed::new();
    let mut image = Image::new(&[Tar::new().file("a", "1").bytes()]);
    let other = Image::new(&[Tar::new().file("a", "2").bytes()]);
    let manifest = String::from_utf8(image.manifest.clone()).unwrap();
    let manifest = manifest.replace(Digest::of(&image.config).hex(), Digest::of(&other.config).hex());
    let manifest = manifest.replace(
        &format!("\"size\":{}}},\"layers\"", image.config.len()),
        &format!("\"size\":{}}},\"layers\"", other.config.len()),
    );
    image.manifest = manifest.into_bytes();
    image.config = other.config;
    let refused = bed.import(&bed.layout(&image), "x").unwrap_err();
    assert!(
        refused
            .to_string()
            .starts_with("layer 1, unpacked, is not what its digest says"),
        "{refused}"
    );
    assert_eq!(bed.left(), Vec::<String>::new());
}

#[test]
fn unknown_media_types_are_refused_by_name() {
    let image = two_layers();
    for (from, to) in [
        (Image::GZIP, "application/vnd.oci.image.layer.v1.tar+bzip2"),
        (
            Image::GZIP,
            "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip",
        ),
        (
            "application/vnd.oci.image.config.v1+json",
            "application/vnd.cncf.helm.config.v1+json",
        ),
        ("application/vnd.oci.image.manifest.v1+json", "application/vnd.example"),
    ] {
        let bed = Bed::new();
        let changed = Image {
            manifest: String::from_utf8(image.manifest.clone())
                .unwrap()
                .replace(from, to)
                .into_bytes(),
            config: image.config.clone(),
            layers: image.layers.clone(),
        };
        let refused = bed.import(&bed.layout(&changed), "x").unwrap_err();
        assert_eq!(
            refused.to_string(),
            format!("media type `{to}` is not one of images that run here")
        );
    }
}

#[test]
fn the_platform_and_the_tag_choose_among_several() {
    let bed = Bed::new();
    let own = two_layers();
    let foreign = Image::new(&[Tar::new().file("foreign", "").bytes()]);
    let entry = |image: &Image, architecture: &str, tag: &str| {
        json!({ "mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": image.digest(),
            "size": image.manifest.len(), "platform": { "os": "linux", "architecture": architecture },
            "annotations": { "org.opencontainers.image.ref.name": tag } })
    };
    let files = |entries: Vec<serde_json::Value>| {
        let mut files = [own.layout("v1"), foreign.layout("v1")].concat();
        let index = json!({ "schemaVersion": 2, "manifests": entries }).to_string();
        files.retain(|(name, _)| name != "index.json");
        files.push(("index.json".to_owned(), index.into_bytes()));
        archived(&files)
    };
    let architecture = Platform::default().architecture;
    let both = files(vec![entry(&foreign, "s390x", "v1"), entry(&own, &architecture, "v1")]);
    assert_eq!(bed.import(&bed.archive(&both, None), "x").unwrap().digest, own.digest());
    let only = files(vec![entry(&foreign, "s390x", "v1"), entry(&foreign, "riscv64", "v1")]);
    let refused = bed.import(&bed.archive(&only, None), "x").unwrap_err();
    assert_eq!(
        refused.to_string(),
        format!("it has no image for `linux/{architecture}`, only for `linux/s390x`, `linux/riscv64`")
    );
    let tagged = files(vec![
        entry(&foreign, &architecture, "v1"),
        entry(&own, &architecture, "v2"),
    ]);
    let refused = bed.import(&bed.archive(&tagged, None), "x").unwrap_err();
    assert_eq!(refused.to_string(), "it holds several images: `v1`, `v2`");
    assert_eq!(
        bed.import(&bed.archive(&tagged, Some("v2")), "x").unwrap().digest,
        own.digest()
    );
}

#[test]
fn a_directory_and_its_tar_are_unpacked_like_a_hostile_image() {
    let bed = Bed::new();
    let root = bed.sources.path().join("root");
    fs::create_dir_all(root.join("usr/bin")).unwrap();
    fs::write(root.join("usr/bin/x"), "1").unwrap();
    std::os::unix::fs::symlink("usr/bin", root.join("bin")).unwrap();
    let fifo = root.join("pipe");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let options = Options {
        config: json!({ "Env": ["LANG=C.UTF-8"] }).as_object().unwrap().clone(),
        ..Options::default()
    };
    let name: Name = "a".parse().unwrap();
    let source = Source::Rootfs(root.clone());
    let stored = bed
        .store
        .import(&source, &options, &name, NOW, &Job::default())
        .unwrap();
    let again = bed
        .store
        .import(&source, &options, &name, NOW, &Job::default())
        .unwrap();
    assert_eq!(stored, again);
    let made = bed.root("a");
    assert_eq!(fs::read_to_string(made.join("bin/x")).unwrap(), "1");
    assert!(!made.join("pipe").exists());
    assert_eq!(stored.config.env, [("LANG".to_owned(), "C.UTF-8".to_owned())].into());
}

#[test]
fn imports_of_the_same_at_once_do_the_work_once() {
    let bed = Bed::new();
    let files: Vec<Vec<u8>> = (0..200)
        .map(|number| Tar::new().file(&format!("f{number}"), &"x".repeat(2000)).bytes())
        .collect();
    let source = bed.layout(&Image::new(&files));
    let unpacked = Arc::new(AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for name in ["a", "b", "c", "d"] {
            let (store, source, unpacked) = (bed.store.clone(), source.clone(), Arc::clone(&unpacked));
            scope.spawn(move || {
                let job = Job::default().watched(move |progress| {
                    if matches!(progress, Progress::Unpacking { layer: 1, .. }) {
                        unpacked.fetch_add(1, Ordering::SeqCst);
                    }
                });
                let name = name.parse().unwrap();
                store.import(&source, &Options::default(), &name, NOW, &job).unwrap();
            });
        }
    });
    assert_eq!(unpacked.load(Ordering::SeqCst), 1);
    assert_eq!(bed.store.list().unwrap().len(), 4);
    assert_eq!(bed.left().len(), 2, "one root and the names");
}

#[test]
fn what_a_killed_import_left_is_swept_and_what_a_live_one_has_is_not() {
    let bed = Bed::new();
    let images = bed.data.path().join("images");
    for dead in [".scratch-dead", ".unpacking-old"] {
        fs::create_dir_all(images.join(dead).join("root/etc")).unwrap();
    }
    let alive = bed.store.scratch().unwrap();
    assert_eq!(bed.left(), [alive.path().file_name().unwrap().to_str().unwrap()]);
    bed.import(&bed.layout(&two_layers()), "a").unwrap();
    assert!(alive.path().is_dir());
    drop(alive);
    assert_eq!(bed.left().len(), 2, "one root and the names");
}

#[test]
fn cancelling_an_import_leaves_nothing() {
    let bed = Bed::new();
    let job = Job::default();
    let cancel = job.cancel.clone();
    let job = job.watched(move |progress| {
        if matches!(progress, Progress::Unpacking { layer: 2, .. }) {
            cancel.cancel();
        }
    });
    let name = "a".parse().unwrap();
    let result = bed
        .store
        .import(&bed.layout(&two_layers()), &Options::default(), &name, NOW, &job);
    assert!(matches!(result, Err(Error::Cancelled)));
    assert_eq!((bed.left(), bed.store.list().unwrap()), (vec![], vec![]));
}

#[test]
fn a_pinned_digest_outlives_its_name() {
    let bed = Bed::new();
    let first = bed.import(&bed.layout(&two_layers()), "a").unwrap();
    let image: ImageRef = "image:a".parse().unwrap();
    let pinned = crate::sandbox::image::pinned(image, bed.data.path()).unwrap();
    assert_eq!(pinned.to_string(), format!("image:a@{}", first.digest));
    bed.import(&bed.layout(&Image::new(&[Tar::new().file("other", "").bytes()])), "a")
        .unwrap();
    let root = resolve(&pinned, bed.data.path()).unwrap().lower.unwrap();
    assert!(root.join("etc/new").exists());
    assert!(bed.root("a").join("other").exists());
    // What nobody has is told, with what to do.
    let missing: ImageRef = "nothing:1".parse().unwrap();
    let Err(SandboxError::Image { image, reason }) = resolve(&missing, bed.data.path()) else {
        panic!("it was found");
    };
    assert_eq!(image, "image:nothing:1");
    assert!(
        reason.starts_with("the store has no image `nothing:1` (`exuvia image list`"),
        "{reason}"
    );
}

#[test]
fn an_image_that_a_sandbox_stands_on_is_not_removed() {
    let bed = Bed::new();
    bed.import(&bed.layout(&two_layers()), "a").unwrap();
    let sandbox = bed.data.path().join("sandboxes/sbx_1");
    fs::create_dir_all(&sandbox).unwrap();
    let root = resolve(&"a".parse().unwrap(), bed.data.path()).unwrap();
    hold(&root, &sandbox).unwrap();
    let name: Name = "a".parse().unwrap();
    let refused = bed.store.remove(&name, NOW).unwrap_err();
    assert_eq!(refused.to_string(), "`a` is used by `sbx_1`");
    assert_eq!(bed.store.collect(NOW).unwrap(), Collected::default());
    assert!(root.lower.as_ref().unwrap().join("etc/new").exists());
    fs::remove_dir_all(sandbox).unwrap();
    assert_eq!(bed.store.remove(&name, NOW).unwrap(), Removed::Files);
    assert_eq!(bed.left(), ["names.json"]);
    assert!(matches!(bed.store.remove(&name, NOW), Err(Error::NotStored(_))));
}

#[test]
fn a_root_that_was_just_looked_up_outlives_its_name_for_a_moment() {
    let bed = Bed::new();
    bed.import(&bed.layout(&two_layers()), "a").unwrap();
    let root = bed.root("a");
    // By the store's clock the look-up is at most a second ago.
    let just_now = fs::metadata(bed.data.path().join("images/locks").join(root.file_name().unwrap())).unwrap();
    let just_now = just_now
        .modified()
        .unwrap()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap();
    let just_now = Timestamp(just_now.as_millis() as i64);
    assert_eq!(
        bed.store.remove(&"a".parse().unwrap(), just_now).unwrap(),
        Removed::NameOnly
    );
    assert!(root.is_dir());
    let later = just_now.plus(std::time::Duration::from_secs(61));
    let collected = bed.store.collect(later).unwrap();
    assert_eq!((collected.roots, collected.bytes), (1, 5));
    assert!(!root.exists());
}

#[test]
fn gc_removes_what_no_name_needs_and_keeps_the_rest() {
    let bed = Bed::new();
    let kept = bed.import(&bed.layout(&two_layers()), "kept").unwrap();
    bed.import(
        &bed.layout(&Image::new(&[Tar::new().file("x", "123").bytes()])),
        "moved",
    )
    .unwrap();
    // The name goes to another image; two images share the layers of one root.
    let shared = Image::with(&[Tar::new().file("y", "").bytes()], json!({ "Cmd": ["a"] }));
    bed.import(&bed.layout(&shared), "moved").unwrap();
    let twin = Image::with(&[Tar::new().file("y", "").bytes()], json!({ "Cmd": ["b"] }));
    bed.import(&bed.layout(&twin), "twin").unwrap();
    assert_eq!(
        bed.store.remove(&"twin".parse().unwrap(), NOW).unwrap(),
        Removed::NameOnly
    );
    let collected = bed.store.collect(NOW).unwrap();
    assert_eq!(
        collected,
        Collected {
            records: 1,
            roots: 1,
            bytes: 3
        }
    );
    assert_eq!(bed.store.collect(NOW).unwrap(), Collected::default());
    let digests: Vec<Digest> = bed
        .store
        .list()
        .unwrap()
        .into_iter()
        .map(|(_, stored)| stored.digest)
        .collect();
    assert_eq!(digests, [kept.digest, shared.digest()]);
    assert!(bed.root("kept").is_dir() && bed.root("moved").is_dir());
}

/// Run again as a process of its own by the test below; does nothing by itself.
#[test]
fn import_until_killed() {
    let Some(at) = std::env::var_os("EXUVIA_TEST_IMPORT") else {
        return;
    };
    let at = PathBuf::from(at);
    let store = Store::open(&at.join("data")).unwrap();
    let source = Source::Layout {
        path: at.join("layout"),
        tag: None,
    };
    let said = at.join("unpacking");
    let job = Job::default().watched(move |progress| {
        if matches!(progress, Progress::Unpacking { layer: 2, .. }) {
            fs::write(&said, "").unwrap();
            std::thread::park();
        }
    });
    let result = store.import(&source, &Options::default(), &"a".parse().unwrap(), NOW, &job);
    panic!("it ended: {result:?}");
}

#[test]
fn kill_9_in_the_middle_of_unpacking_leaves_nothing_half_used() {
    let at = tempfile::tempdir().unwrap();
    testing::write(&at.path().join("layout"), &two_layers().layout("v1"));
    let mut child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "sandbox::image::store::tests::import_until_killed"])
        .env("EXUVIA_TEST_IMPORT", at.path())
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    while !at.path().join("unpacking").exists() {
        assert!(child.try_wait().unwrap().is_none(), "it ended early");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let store = Store::open(&at.path().join("data")).unwrap();
    assert_eq!(store.list().unwrap(), []);
    let images = at.path().join("data/images");
    let scratch = || {
        let names = crate::sandbox::image::names(&images).unwrap();
        names.iter().filter(|name| name.starts_with(".scratch-")).count()
    };
    // That of the import, and the unfinished root.
    assert_eq!(scratch(), 2);
    // The lock went with the process; what it left goes with the next import, which does the work anew.
    let source = Source::Layout {
        path: at.path().join("layout"),
        tag: None,
    };
    store
        .import(
            &source,
            &Options::default(),
            &"a".parse().unwrap(),
            NOW,
            &Job::default(),
        )
        .unwrap();
    assert_eq!(scratch(), 0);
    assert!(store.root(&"a".parse().unwrap()).unwrap().join("etc/new").exists());
}
