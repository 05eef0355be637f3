//! On a real engine.

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;
use crate::sandbox::{Limits, Spec};
use crate::wire;

/// The backend, or `None` with a line on stderr where this machine has no engine and need not have one.
async fn backend(test: &str, data: &Path) -> Option<Docker> {
    match Docker::open(data, None).await {
        Ok(docker) => Some(docker),
        Err(error) => {
            crate::skip::skipped(test, error);
            None
        }
    }
}

/// What every backend promises.
mod suite_of_all_backends {
    use std::sync::Arc;

    use super::*;
    use crate::sandbox::backend::suite::{self, Subject};

    async fn setup() -> Result<Subject, String> {
        // One for all cases, and for all runs: it holds nothing but the guest when they are over.
        let data = Path::new(concat!(env!("OUT_DIR"), "/docker-suite"));
        let docker = Docker::open(data, None).await.map_err(|error| error.to_string())?;
        Ok(Subject {
            backend: Arc::new(docker),
            image: ImageRef::Host,
            isolation: Isolation::Container,
            filter: suite::allow_all(),
        })
    }

    suite::backend_suite!(portable, setup);
    suite::backend_suite!(real, setup);
    suite::backend_suite!(limits, setup);
    suite::backend_suite!(walls, setup);
}

/// The same with the engine's runtime `runsc`, and with the real system-call filter.
mod suite_under_gvisor {
    use std::sync::Arc;

    use super::*;
    use crate::sandbox::backend::suite::{self, Subject};
    use crate::sandbox::exec::{Cause, Offsets, Stdin};
    use crate::sandbox::{Command, Output, Sandbox, seccomp};

    async fn open() -> Result<(Arc<Docker>, Subject), String> {
        let data = Path::new(concat!(env!("OUT_DIR"), "/docker-gvisor-suite"));
        let docker = Docker::open(data, None).await.map_err(|error| error.to_string())?;
        docker.gvisor.clone()?;
        let docker = Arc::new(docker);
        let subject = Subject {
            backend: docker.clone(),
            image: ImageRef::Host,
            isolation: Isolation::Gvisor,
            filter: seccomp::default_filter().map_err(|error| error.to_string())?,
        };
        Ok((docker, subject))
    }

    async fn setup() -> Result<Subject, String> {
        Ok(open().await?.1)
    }

    suite::backend_suite!(portable, setup);
    suite::backend_suite!(real, setup);
    suite::backend_suite!(limits, setup);
    suite::backend_suite!(walls, setup);

    /// T10, promise 7: a server that dies takes its end of the line along, in the middle of frames in both directions. The next
    /// one finds the guest, and what ran for the first goes on: its output is had from an exact offset.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn another_server_takes_the_line_up() {
        let (docker, subject) = match open().await {
            Ok(opened) => opened,
            Err(reason) => return crate::skip::skipped("another_server_takes_the_line_up", reason),
        };
        let workspace = tempfile::tempdir().unwrap();
        let spec = subject.spec(&workspace);
        let sandbox = Sandbox::open(docker.clone(), spec.clone(), subject.filter.clone())
            .await
            .unwrap();
        let script = "n=0; while [ $n -lt 300 ]; do echo $n; n=$((n + 1)); sleep 0.02; done";
        let mut counting = sandbox.exec(Command::shell(script).detachable()).await.unwrap();
        let exec = counting.id().clone();
        let Some(Output::Stdout(seen)) = counting.output.recv().await else {
            panic!("it says nothing");
        };
        // Both ways are full when it dies.
        let _flood = sandbox.exec(Command::shell("cat /dev/zero")).await.unwrap();
        let sink = Command::shell("cat >/dev/null").stdin(Stdin::Open);
        let sink = sandbox.exec(sink).await.unwrap();
        let _ = tokio::time::timeout(Duration::from_millis(300), async {
            while sink.input(&[0x5a; 50_000]).await.is_ok() {}
        })
        .await;
        docker.lines().clear();

        for _ in 0..2 {
            let (docker, _) = open().await.unwrap();
            let handle = docker.adopt(&spec.id).await.unwrap();
            let next = Sandbox::adopt(docker.clone(), handle, spec.clone(), subject.filter.clone())
                .await
                .unwrap();
            let ran = next.run(Command::shell("echo $((6 * 7))"), 100).await.unwrap();
            assert_eq!(ran.stdout.text(), "42\n");
            docker.lines().clear();
        }
        let from = Offsets {
            stdout: seen.len() as u64,
            ..Offsets::default()
        };
        // The same backend takes it up again too.
        let finished = sandbox.attach(&exec, from).await.unwrap().finish(1 << 20).await;
        assert_eq!(finished.ended.cause, Cause::Exited { code: 0 });
        let all: String = (0..300).map(|n| format!("{n}\n")).collect();
        assert_eq!([&seen[..], &finished.stdout.bytes()].concat(), all.as_bytes());
        sandbox.close(Duration::ZERO).await.unwrap();
    }

    /// Promise 3: a sandbox whose kernel the engine starts otherwise than asked is none.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_wall_that_is_missing_is_seen() {
        let (docker, subject) = match open().await {
            Ok(opened) => opened,
            Err(reason) => return crate::skip::skipped("a_wall_that_is_missing_is_seen", reason),
        };
        let workspace = tempfile::tempdir().unwrap();
        let spec = subject.spec(&workspace);
        let handle = docker.create(&spec).await.unwrap();
        docker.start(&handle).await.unwrap();
        docker.verify(&spec.id).await.unwrap();
        let directory = docker.directory(&spec.id);
        let mut record = record::read(&directory).unwrap();
        record.limits.pids += 1;
        record.write(&directory).unwrap();
        let breached = docker.verify(&spec.id).await.unwrap_err();
        let Error::Breached(breaches) = breached else {
            panic!("{breached}");
        };
        let walls: Vec<_> = breaches.into_iter().map(|breach| breach.wall).collect();
        assert_eq!(walls, ["processes"]);
        docker.destroy(&spec.id).await.unwrap();
    }
}

fn spec(image: ImageRef) -> Spec {
    Spec {
        id: SandboxId::random(),
        image,
        isolation: Isolation::Container,
        limits: Limits {
            memory_bytes: 64 << 20,
            pids: 32,
            cpus: 0.5,
            tmp_bytes: 8 << 20,
            shm_bytes: 8 << 20,
            ..Limits::default()
        },
        identity: Identity { base: 1_000_000_000 },
        workspace: None,
        mounts: Vec::new(),
        labels: BTreeMap::new(),
    }
}

async fn traces(docker: &Docker, id: &SandboxId) -> (usize, bool) {
    (
        docker.containers(id).await.unwrap().len(),
        docker.directory(id).exists(),
    )
}

#[tokio::test]
async fn a_missing_engine_is_named_with_what_to_do() {
    let data = tempfile::tempdir().unwrap();
    let error = Docker::open(data.path(), Some(Path::new("/nowhere/docker.sock")))
        .await
        .unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::Unsupported { .. }), "{text}");
    assert!(
        text.contains("/nowhere/docker.sock") && text.contains("make setup"),
        "{text}"
    );
}

#[tokio::test]
async fn a_missing_image_is_an_image_error_and_leaves_nothing() {
    let data = tempfile::tempdir().unwrap();
    let Some(docker) = backend("a_missing_image_is_an_image_error_and_leaves_nothing", data.path()).await else {
        return;
    };
    let spec = spec(ImageRef::Docker("exuvia-no-such-image:x".into()));
    let error = docker.create(&spec).await.unwrap_err();
    assert!(
        matches!(&error, Error::Image { reason, .. } if reason.contains("docker pull")),
        "{error}"
    );
    assert_eq!(traces(&docker, &spec.id).await, (0, false));
}

#[tokio::test]
async fn create_is_idempotent_and_refuses_another_spec_under_the_same_id() {
    let data = tempfile::tempdir().unwrap();
    let Some(docker) = backend("create_is_idempotent", data.path()).await else {
        return;
    };
    let first = spec(ImageRef::Host);
    let handle = docker.create(&first).await.unwrap();
    assert_eq!(docker.create(&first).await.unwrap(), handle);
    assert_eq!(traces(&docker, &first.id).await, (1, true));
    let other = Spec {
        limits: Limits::default(),
        ..first.clone()
    };
    assert!(matches!(docker.create(&other).await, Err(Error::Backend { .. })));

    let owned = Owned {
        id: first.id.clone(),
        owner_alive: true,
        identity: first.identity,
    };
    assert_eq!(docker.list_owned().await.unwrap(), [owned]);
    let elsewhere = tempfile::tempdir().unwrap();
    let stranger = Docker::open(elsewhere.path(), None).await.unwrap();
    assert_eq!(stranger.list_owned().await.unwrap(), []);
    stranger.destroy(&first.id).await.unwrap();
    assert_eq!(
        traces(&docker, &first.id).await,
        (1, true),
        "another data directory's sandbox is not touched"
    );

    docker.destroy(&first.id).await.unwrap();
    docker.destroy(&first.id).await.unwrap();
    assert_eq!(traces(&docker, &first.id).await, (0, false));
}

#[tokio::test]
async fn a_failed_create_leaves_nothing() {
    let data = tempfile::tempdir().unwrap();
    let Some(docker) = backend("a_failed_create_leaves_nothing", data.path()).await else {
        return;
    };
    let spec = Spec {
        workspace: Some("/nowhere/at/all".into()),
        ..spec(ImageRef::Host)
    };
    let error = docker.create(&spec).await.unwrap_err();
    assert!(matches!(error, Error::Backend { doing: "create", .. }), "{error}");
    assert_eq!(traces(&docker, &spec.id).await, (0, false));
}

#[tokio::test]
async fn isolation_that_it_lacks_is_refused() {
    let data = tempfile::tempdir().unwrap();
    let Some(docker) = backend("isolation_that_it_lacks_is_refused", data.path()).await else {
        return;
    };
    let spec = Spec {
        isolation: Isolation::Microvm,
        ..spec(ImageRef::Host)
    };
    assert!(matches!(docker.create(&spec).await, Err(Error::Unsupported { .. })));
}

#[test]
fn the_range_of_a_remapping_engine_is_read_from_its_root() {
    assert_eq!(remapped_base(Some("/var/lib/docker/100000.100000")), Some(100_000));
    assert_eq!(remapped_base(Some("/var/lib/docker")), None);
    assert_eq!(remapped_base(None), None);
}

/// One exec as root's guest runs it for a user; what it wrote, and how it ended.
async fn exec(docker: &Docker, handle: &Handle, script: &str) -> (String, wire::Ended) {
    let mut stream = docker.connect(handle).await.unwrap();
    // Lets everything through: what is tested here is the wall of the engine.
    const RET_ALLOW: [u8; 8] = [0x06, 0, 0, 0, 0, 0, 0xff, 0x7f];
    let request = wire::Request {
        generation: wire::GENERATION,
        kind: Some(wire::request::Kind::Exec(wire::Exec {
            argv: ["/bin/sh", "-c", script].map(|word| word.as_bytes().to_vec()).into(),
            env: vec![wire::EnvVar {
                name: b"PATH".to_vec(),
                value: b"/usr/bin:/bin".to_vec(),
            }],
            cwd: b"/workspace".to_vec(),
            uid: handle.user,
            gid: handle.user,
            timeout_ms: 20_000,
            seccomp: RET_ALLOW.to_vec(),
            ..wire::Exec::default()
        })),
    };
    let mut buffer = Vec::new();
    wire::encode(&request, &mut buffer).unwrap();
    stream.write_all(&buffer).await.unwrap();
    buffer.clear();
    let mut output = Vec::new();
    loop {
        while let Some(event) = wire::decode::<wire::Event>(&mut buffer).unwrap() {
            match event.kind.unwrap() {
                wire::event::Kind::Output(chunk) => output.extend(chunk.data),
                wire::event::Kind::Ended(ended) => return (String::from_utf8(output).unwrap(), ended),
                wire::event::Kind::Fault(fault) => panic!("{fault:?}"),
                _ => {}
            }
        }
        assert_ne!(stream.read_buf(&mut buffer).await.unwrap(), 0, "the guest hung up");
    }
}

async fn up(docker: &Docker, spec: &Spec) -> Handle {
    let handle = docker.create(spec).await.unwrap();
    docker.start(&handle).await.unwrap();
    handle
}

/// H2: the wall as a program inside finds it.
#[tokio::test]
async fn a_program_finds_the_wall_that_was_asked_for() {
    let data = tempfile::tempdir().unwrap();
    let Some(docker) = backend("a_program_finds_the_wall_that_was_asked_for", data.path()).await else {
        return;
    };
    let workspace = tempfile::tempdir().unwrap();
    let secret = tempfile::tempdir().unwrap();
    fs::write(secret.path().join("given"), "given\n").unwrap();
    fs::set_permissions(secret.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let spec = Spec {
        workspace: Some(workspace.path().into()),
        mounts: vec![Mount {
            source: secret.path().into(),
            target: "/mnt/given".into(),
        }],
        ..spec(ImageRef::Host)
    };
    let uid = spec.identity.host_uid();
    chown(workspace.path(), Some(uid), Some(uid)).unwrap();
    let handle = up(&docker, &spec).await;

    let says = async |script: &str| exec(&docker, &handle, script).await.0;
    assert_eq!(says("id -u; id -G").await, format!("{uid}\n{uid}\n"));
    let status = "grep -E '^(CapInh|CapPrm|CapEff|CapBnd|CapAmb|NoNewPrivs)' /proc/self/status | tr -d '\\t\\n'";
    let none = "0000000000000000";
    assert_eq!(
        says(status).await,
        format!("CapInh:{none}CapPrm:{none}CapEff:{none}CapBnd:{none}CapAmb:{none}NoNewPrivs:1")
    );
    assert_eq!(
        says("cat /mnt/given/given; echo x 2>/dev/null >/mnt/given/given || echo refused").await,
        "given\nrefused\n"
    );
    assert_eq!(
        says("echo kept >/workspace/file && cat /workspace/file").await,
        "kept\n"
    );
    assert_eq!(fs::read_to_string(workspace.path().join("file")).unwrap(), "kept\n");
    for place in [
        "/x",
        "/usr/x",
        "/etc/x",
        "/etc/passwd",
        "/.exuvia/ctl/x",
        "/sys/x",
        "/proc/sys/kernel/hostname",
    ] {
        let script = format!("(echo x >{place}) 2>/dev/null || echo refused");
        assert_eq!(says(&script).await, "refused\n", "{place}");
    }
    assert_eq!(says("cp /usr/bin/true /tmp/t && /tmp/t && echo runs").await, "runs\n");
    // The tmpfs takes no more than its size (8 MiB), /dev/shm neither.
    for place in ["/tmp", "/dev/shm"] {
        let script = format!("head -c 9000000 /dev/zero 2>/dev/null >{place}/big || echo full; rm {place}/big");
        assert_eq!(says(&script).await, "full\n", "{place}");
    }
    assert_eq!(
        says("ls /sys/class/net; grep ^nameserver /etc/resolv.conf; head -n 1 /etc/hosts").await,
        "lo\nnameserver 127.0.0.1\n127.0.0.1\tlocalhost\n"
    );
    assert_eq!(
        says(
            "cat /proc/keys /proc/cmdline /proc/kcore 2>/dev/null | wc -c; ls /root /home /var /opt 2>/dev/null | wc -l"
        )
        .await,
        "0\n0\n"
    );
    assert_eq!(says("cat /proc/self/cgroup | cut -d: -f3 | sort -u").await, "/\n");
    // Nothing that is written in it fills a log of the host.
    let inspected = docker.engine.inspect(&name(&spec.id)).await.unwrap();
    let driver = inspected.host_config.and_then(|host| host.log_config?.typ);
    assert_eq!(
        (driver.as_deref(), inspected.log_path.as_deref()),
        (Some("none"), Some(""))
    );
    assert_eq!(says("cat /proc/1/environ /proc/1/mem 2>/dev/null | wc -c").await, "0\n");
    docker.destroy(&spec.id).await.unwrap();
    assert_eq!(traces(&docker, &spec.id).await, (0, false));
}

#[tokio::test]
async fn counters_come_from_the_kernel_and_a_freeze_stops_them() {
    let data = tempfile::tempdir().unwrap();
    let Some(docker) = backend("counters_come_from_the_kernel_and_a_freeze_stops_them", data.path()).await else {
        return;
    };
    let spec = spec(ImageRef::Host);
    let handle = up(&docker, &spec).await;
    let before = docker.usage(&handle).await.unwrap();
    // The guest, and the shim of its that waits.
    assert_eq!((before.pids, before.oom_kills, before.pids_refused), (2, 0, 0));

    // The limit is 64 MiB: a child dies of it, and the shell goes on to say so.
    let (said, ended) = exec(
        &docker,
        &handle,
        "(head -c 200000000 /dev/zero | tail >/dev/null; echo $?) 2>/dev/null",
    )
    .await;
    assert_eq!(
        (said.as_str(), ended.status),
        ("137\n", Some(wire::ended::Status::ExitCode(0)))
    );
    let after = docker.usage(&handle).await.unwrap();
    assert_eq!(after.oom_kills, 1);
    assert!(
        after.memory_peak_bytes > 60 << 20 && after.memory_peak_bytes <= 64 << 20,
        "{after:?}"
    );
    assert!(after.cpu_us > before.cpu_us);

    exec(
        &docker,
        &handle,
        "for n in $(seq 100); do sleep 1 & done 2>/dev/null; true",
    )
    .await;
    assert!(docker.usage(&handle).await.unwrap().pids_refused > 0);

    for frozen in [true, true, false, false] {
        docker.freeze(&handle, frozen).await.unwrap();
    }
    docker.freeze(&handle, true).await.unwrap();
    let still = docker.usage(&handle).await.unwrap().cpu_us;
    assert_eq!(docker.usage(&handle).await.unwrap().cpu_us, still);
    docker.destroy(&spec.id).await.unwrap();
    assert_eq!(traces(&docker, &spec.id).await, (0, false));
    assert!(matches!(docker.usage(&handle).await, Err(Error::NotFound(_))));
    assert!(matches!(docker.connect(&handle).await, Err(Error::NotFound(_))));
    assert!(matches!(docker.start(&handle).await, Err(Error::NotFound(_))));
}

/// A root file system that is a folder or a tar, with links that try to leave it.
#[tokio::test]
async fn a_folder_and_a_tar_are_the_same_image() {
    let data = tempfile::tempdir().unwrap();
    let Some(docker) = backend("a_folder_and_a_tar_are_the_same_image", data.path()).await else {
        return;
    };
    let root = tempfile::tempdir().unwrap();
    let path = |name: &str| root.path().join(name);
    fs::set_permissions(root.path(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::create_dir(path("etc")).unwrap();
    fs::write(path("etc/motd"), "hello\n").unwrap();
    std::os::unix::fs::symlink("/proc/self/root/etc/shadow", path("etc/hostname")).unwrap();
    let file = data.path().join("image.tar.zst");
    let mut tar = tar::Builder::new(zstd::Encoder::new(fs::File::create(&file).unwrap(), 1).unwrap());
    tar.follow_symlinks(false);
    // The same bytes, so the same image, in every run of this test.
    tar.mode(tar::HeaderMode::Deterministic);
    tar.append_dir_all("", root.path()).unwrap();
    tar.into_inner().unwrap().finish().unwrap();

    let mut seen = Vec::new();
    for image in [ImageRef::Rootfs(root.path().into()), ImageRef::Tar(file.clone())] {
        let spec = spec(image);
        let handle = up(&docker, &spec).await;
        let (_, pid) = docker.group("look into", &handle.id).await.unwrap();
        seen.push(fs::read_to_string(format!("/proc/{pid}/root/etc/motd")).unwrap());
        docker.destroy(&spec.id).await.unwrap();
    }
    assert_eq!(seen, ["hello\n", "hello\n"]);
}

/// What `kill -9` leaves: a container, or only the directory of one that was about to be made.
#[tokio::test]
async fn what_a_dead_process_left_is_found_and_told_apart() {
    let data = tempfile::tempdir().unwrap();
    let Some(mut docker) = backend("what_a_dead_process_left_is_found_and_told_apart", data.path()).await else {
        return;
    };
    let living = spec(ImageRef::Host);
    docker.create(&living).await.unwrap();
    docker.owner.started += 1;
    let (whole, begun) = (spec(ImageRef::Host), spec(ImageRef::Host));
    docker.create(&whole).await.unwrap();
    let handle = Handle {
        id: begun.id.clone(),
        identity: begun.identity,
        user: begun.identity.host_uid(),
    };
    let record = Record {
        owner: docker.owner.clone(),
        identity: begun.identity,
        limits: begun.limits.clone(),
        has_workspace: false,
        isolation: Isolation::Container,
    };
    docker.lay_out(&begun, &handle, &record).unwrap();

    let mut expected = [(&living, true), (&whole, false), (&begun, false)].map(|(spec, owner_alive)| Owned {
        id: spec.id.clone(),
        owner_alive,
        identity: spec.identity,
    });
    expected.sort_by(|left, right| left.id.cmp(&right.id));
    let later = Docker::open(data.path(), None).await.unwrap();
    assert_eq!(later.list_owned().await.unwrap(), expected);
    for owned in expected {
        later.destroy(&owned.id).await.unwrap();
        assert_eq!(traces(&later, &owned.id).await, (0, false));
    }
    assert_eq!(later.list_owned().await.unwrap(), []);
}

/// An engine that takes the connection and says nothing: the clock is paused, so only a deadline can end this.
#[tokio::test(start_paused = true)]
async fn an_engine_that_hangs_is_given_up() {
    let data = tempfile::tempdir().unwrap();
    let socket = data.path().join("engine.sock");
    let _silent = tokio::net::UnixListener::bind(&socket).unwrap();
    let error = Docker::open(data.path(), Some(&socket)).await.unwrap_err().to_string();
    assert!(error.contains("did not answer within 30 s"), "{error}");
}
