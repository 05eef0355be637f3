//! What a program in a sandbox can and cannot reach.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::time::Duration;

use exuvia::sandbox::{Backend, Error, ImageRef, Mount};

use crate::support::{Bench, run, sh};

#[tokio::test]
async fn the_first_process_has_three_powers_and_programs_none() {
    let Some(bench) = Bench::new("the_first_process_has_three_powers_and_programs_none") else {
        return;
    };
    let sandbox = bench.open(bench.spec()).await;
    let sets = |status: &str| {
        let lines = status.lines().filter(|line| line.starts_with("Cap"));
        lines
            .map(|line| {
                line.split_whitespace()
                    .nth(1)
                    .unwrap()
                    .trim_start_matches('0')
                    .to_owned()
            })
            .collect::<Vec<_>>()
    };
    // Inheritable, permitted, effective, bounding, ambient. CAP_KILL, CAP_SETGID, CAP_SETUID.
    let init = fs::read_to_string(format!("/proc/{}/status", bench.init(sandbox.id()))).unwrap();
    assert_eq!(sets(&init), ["", "e0", "e0", "", ""]);
    let program = sh(&sandbox, "cat /proc/self/status").await;
    assert_eq!(sets(&program), [""; 5]);
    for line in ["NoNewPrivs:\t1", "Seccomp:\t2", "Groups:\t"] {
        assert!(program.contains(line), "{line}: {program}");
    }
    sandbox.close(Duration::ZERO).await.unwrap();
}

#[tokio::test]
async fn namespaces_are_its_own_and_the_host_is_not_seen() {
    let Some(bench) = Bench::new("namespaces_are_its_own_and_the_host_is_not_seen") else {
        return;
    };
    let sandbox = bench.open(bench.spec()).await;
    let inside = sh(
        &sandbox,
        "for n in user pid net ipc uts cgroup mnt time; do readlink /proc/self/ns/$n; done",
    )
    .await;
    for (line, name) in inside
        .lines()
        .zip(["user", "pid", "net", "ipc", "uts", "cgroup", "mnt", "time"])
    {
        assert_ne!(
            Path::new(line),
            fs::read_link(format!("/proc/self/ns/{name}")).unwrap(),
            "{name}"
        );
    }
    assert_eq!(
        sh(&sandbox, "ls /sys /root /home 2>/dev/null | tr -d '\\n'").await,
        "/sys:"
    );
    assert_eq!(
        sh(&sandbox, "ls /dev | tr '\\n' ' '").await,
        "fd full null ptmx pts random shm stderr stdin stdout tty urandom zero "
    );
    assert_eq!(
        sh(
            &sandbox,
            "cat /proc/cmdline /proc/keys /proc/kallsyms /proc/interrupts | wc -c"
        )
        .await,
        "0\n"
    );
    assert_eq!(
        sh(
            &sandbox,
            "cut -d: -f2- /proc/self/cgroup | sort -u | grep -c exuvia || :"
        )
        .await,
        "0\n"
    );
    // Loopback works; nothing else is there.
    assert_eq!(
        sh(&sandbox, "ls /proc/sys/net/ipv4/conf | tr '\\n' ' '; hostname").await,
        "all default lo sandbox\n"
    );
    for text in [
        "echo x >/x",
        "echo x >/usr/x",
        "echo x >/dev/x",
        "echo 1 >/proc/sys/kernel/panic",
        "mkdir /workspace",
        "ls /proc/1/fd",
        "kill -9 1",
    ] {
        assert!(!run(&sandbox, text).await.ended.is_success(), "{text}");
    }
    sandbox.close(Duration::ZERO).await.unwrap();
}

#[tokio::test]
async fn an_image_with_traps_in_place_of_directories_is_harmless() {
    let Some(bench) = Bench::new("an_image_with_traps_in_place_of_directories_is_harmless") else {
        return;
    };
    let (image, victim) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::set_permissions(image.path(), PermissionsExt::from_mode(0o755)).unwrap();
    fs::write(image.path().join("of-the-image"), "seen").unwrap();
    for name in ["bin", "lib", "lib64"] {
        symlink(Path::new("usr").join(name), image.path().join(name)).unwrap();
    }
    for name in ["dev", "proc", "sys", "tmp", "workspace", ".exuvia", "etc", "var", "usr"] {
        symlink(victim.path(), image.path().join(name)).unwrap();
    }
    let mut spec = bench.spec();
    spec.image = ImageRef::Rootfs(image.path().to_owned());
    spec.mounts = vec![Mount {
        source: "/usr".into(),
        target: "/usr".into(),
    }];
    let sandbox = bench.open(spec).await;
    assert_eq!(
        sh(
            &sandbox,
            "ls /dev/null /proc/self/status; cat /of-the-image /etc/hostname"
        )
        .await,
        "/dev/null\n/proc/self/status\nseensandbox\n"
    );
    // No path of the host shows.
    let mounts = sh(&sandbox, "cat /proc/self/mountinfo").await;
    assert!(!mounts.contains(image.path().to_str().unwrap()), "{mounts}");
    sandbox.close(Duration::ZERO).await.unwrap();
    assert_eq!(fs::read_dir(victim.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn mounts_are_read_only_and_cannot_cover_the_walls() {
    let Some(bench) = Bench::new("mounts_are_read_only_and_cannot_cover_the_walls") else {
        return;
    };
    let shared = tempfile::tempdir().unwrap();
    fs::set_permissions(shared.path(), PermissionsExt::from_mode(0o777)).unwrap();
    fs::write(shared.path().join("file"), "shown").unwrap();
    let mount = |target: &str| Mount {
        source: shared.path().to_owned(),
        target: target.into(),
    };
    let mut spec = bench.spec();
    spec.mounts = vec![mount("/opt/shared"), mount("/data")];
    let sandbox = bench.open(spec).await;
    assert_eq!(sh(&sandbox, "cat /opt/shared/file /data/file").await, "shownshown");
    assert!(!run(&sandbox, "echo x >/data/file").await.ended.is_success());
    sandbox.close(Duration::ZERO).await.unwrap();

    for target in [
        "/proc",
        "/proc/self",
        "/dev/shm",
        "/sys",
        "/.exuvia/guest",
        "/",
        "relative",
        "/opt/../proc",
    ] {
        let mut spec = bench.spec();
        spec.mounts = vec![mount(target)];
        let error = bench.backend.create(&spec).await.unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{target}: {error}");
        assert_eq!(bench.traces(&spec.id), Vec::<String>::new());
    }
}

#[tokio::test]
async fn ordinary_work_works() {
    let Some(bench) = Bench::new("ordinary_work_works") else {
        return;
    };
    let sandbox = bench.open(bench.spec()).await;
    let python = "import sqlite3, threading, subprocess, socket, mmap, os, pty\n\
        sqlite3.connect('/tmp/d').execute('create table t(x)')\n\
        t = threading.Thread(target=print, args=('thread',)); t.start(); t.join()\n\
        print(subprocess.check_output(['git', '--version'])[:3].decode())\n\
        a, b = socket.socketpair(); s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname())\n\
        mmap.mmap(-1, 4096); m, s = pty.openpty(); print(os.ttyname(s))";
    assert_eq!(
        sh(&sandbox, &format!("python3 -c \"{python}\"")).await,
        "thread\ngit\n/dev/pts/0\n"
    );
    // Its standard streams can be opened again by name.
    assert_eq!(
        sh(&sandbox, "echo out >/dev/stdout; echo in | cat /dev/stdin").await,
        "out\nin\n"
    );
    sandbox.close(Duration::ZERO).await.unwrap();
}

#[tokio::test]
async fn a_tar_is_an_image_too() {
    let Some(bench) = Bench::new("a_tar_is_an_image_too") else {
        return;
    };
    let tar = bench.data.path().join("image.tar");
    let mut builder = tar::Builder::new(fs::File::create(&tar).unwrap());
    let mut header = tar::Header::new_gnu();
    header.set_size(4);
    header.set_mode(0o4644);
    builder
        .append_data(&mut header, "of-the-image", "seen".as_bytes())
        .unwrap();
    for name in ["bin", "lib", "lib64"] {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Symlink);
        header.set_size(0);
        builder
            .append_link(&mut header, name, Path::new("usr").join(name))
            .unwrap();
    }
    builder.into_inner().unwrap();
    let mut spec = bench.spec();
    spec.image = ImageRef::Tar(tar);
    spec.mounts = vec![Mount {
        source: "/usr".into(),
        target: "/usr".into(),
    }];
    let sandbox = bench.open(spec).await;
    assert_eq!(
        sh(&sandbox, "cat /of-the-image; stat -c :%a /of-the-image").await,
        "seen:644\n"
    );
    sandbox.close(Duration::ZERO).await.unwrap();
}

#[tokio::test]
async fn every_mount_is_hard_and_tells_nothing_of_the_host() {
    let Some(bench) = Bench::new("every_mount_is_hard_and_tells_nothing_of_the_host") else {
        return;
    };
    let sandbox = bench.open(bench.spec()).await;
    let mounts = sh(&sandbox, "cat /proc/self/mountinfo").await;
    for line in mounts.lines() {
        let fields: Vec<&str> = line.split(' ').collect();
        let (target, options): (&str, Vec<&str>) = (fields[4], fields[5].split(',').collect());
        let is_hard =
            options.contains(&"nosuid") && (options.contains(&"nodev") || ["/dev", "/dev/pts"].contains(&target));
        assert!(is_hard, "{line}");
        let writable = ["/proc", "/dev/pts", "/dev/shm", "/tmp", "/var/tmp"].contains(&target);
        assert_eq!(options.contains(&"rw"), writable, "{line}");
    }
    assert!(!mounts.contains(bench.data.path().to_str().unwrap()), "{mounts}");
    sandbox.close(Duration::ZERO).await.unwrap();
}

#[tokio::test]
async fn a_sandbox_has_a_boot_of_its_own() {
    let Some(bench) = Bench::new("a_sandbox_has_a_boot_of_its_own") else {
        return;
    };
    let mut seen = vec![fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap()];
    for _ in 0..2 {
        let sandbox = bench.open(bench.spec()).await;
        let id = sh(&sandbox, "cat /proc/sys/kernel/random/boot_id").await;
        assert_eq!((id.len(), seen.contains(&id)), (37, false), "{id}");
        assert!(
            !run(&sandbox, "echo x >/proc/sys/kernel/random/boot_id")
                .await
                .ended
                .is_success()
        );
        seen.push(id);
        sandbox.close(Duration::ZERO).await.unwrap();
    }
}

/// What all sandboxes of a host draw on: nobody can use it up, or leave word for another in it.
#[tokio::test]
async fn what_is_shared_with_the_host_is_out_of_reach() {
    let Some(bench) = Bench::new("what_is_shared_with_the_host_is_out_of_reach") else {
        return;
    };
    let sandbox = bench.open(bench.spec()).await;
    let python = r#"
import ctypes, errno, fcntl, mmap, os, socket
def refused(what, call, *wanted):
    try:
        call()
    except OSError as error:
        if error.errno in wanted:
            return
        raise SystemExit(f"{what}: {error}")
    raise SystemExit(f"{what}: allowed")
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
# The times of a device file are the host's; its content is nobody's.
open("/dev/null", "w").write("x")
refused("times of /dev/null", lambda: os.utime("/dev/null"), errno.EROFS)
refused("times of a mask", lambda: os.utime("/proc/iomem"), errno.EROFS)
# Asynchronous input and output, huge pages.
context = ctypes.c_ulong(0)
refused("io_setup", lambda: call(206, 1, ctypes.byref(context)), errno.ENOSYS)
refused("huge pages", lambda: mmap.mmap(-1, 2 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000), errno.EPERM)
refused("huge pages, memfd", lambda: os.memfd_create("x", 4), errno.EPERM)
# Terminals: 64 of the few thousand; nothing is typed into one.
ends = []
def terminals():
    while len(ends) < 1000:
        ends.extend(os.openpty())
refused("terminals", terminals, errno.ENOSPC)
assert len(ends) == 2 * 64, len(ends)
refused("TIOCSTI", lambda: fcntl.ioctl(ends[1], 0x5412, b"x"), errno.EPERM)
refused("TIOCSTI in disguise", lambda: call(16, ends[1], ctypes.c_ulong(0x5412 | 1 << 32), b"x"), errno.EPERM)
# Protocols beside TCP and UDP: ICMP, SCTP, MPTCP.
for protocol in (1, 132, 262):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        refused(f"protocol {protocol}", lambda: socket.socket(socket.AF_INET, kind, protocol), errno.EPERM)
print("held")
"#;
    assert_eq!(sh(&sandbox, &format!("python3 - <<'END'\n{python}END")).await, "held\n");
    sandbox.close(Duration::ZERO).await.unwrap();
}
