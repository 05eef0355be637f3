//! The server's side of making a sandbox. Blocking, and run to its end.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use super::record::{self, Record};
use super::{Shared, ruin, socket};
use crate::forge::{Bind, Link, Make, Rlimit, Shape, Text};
use crate::process::Process;
use crate::sandbox::backend::{Handle, gvisor};
use crate::sandbox::cgroup::{self, Group};
use crate::sandbox::verify::{self, Expected, Mounts, Writable};
use crate::sandbox::{Error, Identity, Isolation, Limits, Mount, Spec, image, walls};

/// When memory runs out a sandbox goes before the server, and its programs (500, the guest sees to that) before it.
const OOM_SCORE_ADJ: i32 = 200;
/// Places inside that are ours; nothing may be mounted at, above or below them.
const OURS: [&str; 4] = ["/proc", "/dev", "/sys", "/.exuvia"];

/// Makes the sandbox; `memory` is a snapshot that it goes on from.
pub(super) fn create(shared: &Shared, spec: &Spec, memory: Option<&Path>) -> Result<Handle, Error> {
    check(shared, spec)?;
    let handle = Handle {
        id: spec.id.clone(),
        identity: spec.identity,
        user: Identity::USER,
    };
    let dir = shared.dir(&spec.id);
    // Resolved first: an image that is no good leaves no trace.
    let root = image::resolve(&spec.image, &shared.data_dir)?;
    let record = Record::new(spec.identity).map_err(|error| Error::failed("create", &spec.id, error))?;
    match record::found(&dir, &record) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return existing(shared, handle),
        Err(error) => return Err(Error::failed("create", &spec.id, error)),
    }
    match build(shared, spec, &root, memory, record) {
        Ok(()) => Ok(handle),
        Err(cause) => Err(cause.after(ruin::destroy(shared, &spec.id))),
    }
}

/// `create` was called before with this id.
fn existing(shared: &Shared, handle: Handle) -> Result<Handle, Error> {
    let record = shared.record(&handle.id)?;
    match record.init {
        Some(init) if init.is_alive() && record.identity == handle.identity => Ok(handle),
        Some(_) => Err(Error::failed(
            "create",
            &handle.id,
            "there is one with this id, which has ended or is another's",
        )),
        None => Err(Error::failed("create", &handle.id, "it is being created already")),
    }
}

fn check(shared: &Shared, spec: &Spec) -> Result<(), Error> {
    let refuse = |wanted: String, missing: &str| {
        Err(Error::Unsupported {
            wanted,
            missing: missing.to_owned(),
        })
    };
    match spec.isolation {
        Isolation::Container => {}
        Isolation::Gvisor => {
            if let Err(missing) = &shared.runsc {
                return refuse("isolation `gvisor`".to_owned(), missing);
            }
        }
        Isolation::Microvm => {
            let wanted = format!("isolation `{}`", spec.isolation);
            return refuse(wanted, "the `oci` backend shares the host's kernel with its containers");
        }
    }
    let base = spec.identity.base;
    if base < Identity::RANGE || base.checked_add(Identity::RANGE).is_none() {
        return refuse(
            format!("user ids from {base}"),
            "ids that overlap the host's own are never given to a sandbox",
        );
    }
    for mount in &spec.mounts {
        let target = &mount.target;
        let clean = target
            .components()
            .all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
        let free = |ours: &&str| !target.starts_with(ours) && !Path::new(ours).starts_with(target);
        if !target.is_absolute() || !clean || !OURS.iter().all(free) {
            return refuse(
                format!("a mount at `{}`", target.display()),
                "that place belongs to the sandbox itself",
            );
        }
    }
    Ok(())
}

fn build(
    shared: &Shared,
    spec: &Spec,
    root: &image::Root,
    memory: Option<&Path>,
    mut record: Record,
) -> Result<(), Error> {
    let id = &spec.id;
    let dir = shared.dir(id);
    let io = |error: io::Error| Error::failed("create", id, error);
    image::hold(root, &dir).map_err(io)?;
    let group = shared.group(id);
    let runsc = shared
        .runsc
        .as_ref()
        .ok()
        .filter(|_| spec.isolation == Isolation::Gvisor);
    let limits = match runsc {
        Some(_) => gvisor::host_limits(&spec.limits),
        None => spec.limits.clone(),
    };
    let held = group.create(&limits).and_then(|()| match &spec.workspace {
        Some(workspace) => group.limit_rates(limits.disk_rates, workspace),
        None => Ok(()),
    });
    held.map_err(|error| match error {
        cgroup::Error::NotTaken { .. } | cgroup::Error::NoRates(_) => Error::Unsupported {
            wanted: "the limits of the sandbox".to_owned(),
            missing: crate::error::chain(&error),
        },
        cgroup::Error::Missing { .. } | cgroup::Error::File { .. } | cgroup::Error::Late { .. } => {
            Error::caused("create", id, &error)
        }
    })?;
    let listener = socket::bind(&dir, socket::GUEST).map_err(io)?;
    let mut request = request(shared, spec, root, &group);
    let made = match runsc {
        None => shared.forge.make(&request, &[listener.as_fd()]),
        Some(runsc) => {
            let control = socket::bind(&dir, socket::CONTROL).map_err(io)?;
            gvisor::ask_for(
                &mut request,
                &gvisor::Wanted {
                    spec,
                    runsc,
                    guest: &shared.guest,
                    dir: &dir,
                    memory,
                },
            )
            .map_err(io)?;
            shared.forge.make(&request, &[listener.as_fd(), control.as_fd()])
        }
    };
    let pid = made.map_err(|error| Error::caused("create", id, &error))?;
    let init = Process::find(pid as u32).map_err(io)?.filter(|_| group.holds(pid));
    let init = init.ok_or_else(|| Error::failed("create", id, "the guest ended at once"))?;
    let read_back = match runsc {
        None => verify::sandbox(pid, &shared.hierarchies, &expected(shared, spec)),
        Some(_) => {
            let expected = gvisor::expected(spec, group.clone());
            match verify::sandbox(pid, &shared.hierarchies, &expected) {
                Ok(()) => gvisor::verify_inside(&group, pid, spec.identity).map_err(io)?,
                breached => breached,
            }
        }
    };
    match read_back {
        Ok(()) => {}
        // Nothing can be read of one that has ended meanwhile: that is no wall that did not take.
        Err(_) if !init.is_alive() => {
            return Err(Error::failed("create", id, "it ended while its walls were read back"));
        }
        Err(breaches) => return Err(Error::Breached(breaches)),
    }
    record.init = Some(init);
    record.write(&dir).map_err(io)
}

/// What is read back once the guest runs.
pub(super) fn expected(shared: &Shared, spec: &Spec) -> Expected {
    // CAP_KILL, CAP_SETGID, CAP_SETUID, and CAP_SETPCAP, which the guest gives up first thing.
    const POWERS: u64 = 0b1_1110_0000;
    let limits = &spec.limits;
    let place = |point, flags: &[&'static str], bytes: Option<u64>| Writable {
        point,
        flags: [&["nosuid", "nodev"], flags].concat(),
        tmpfs: bytes.map(|bytes| (bytes, limits.tmp_inodes)),
    };
    let mut writable = vec![
        place("/tmp", &[], Some(limits.tmp_bytes)),
        place("/var/tmp", &[], Some(limits.tmp_bytes)),
        place("/dev/shm", &["noexec"], Some(limits.shm_bytes)),
    ];
    writable.extend(spec.workspace.is_some().then(|| place("/workspace", &[], None)));
    Expected {
        user_namespace: Some(spec.identity),
        uid: spec.identity.base,
        groups: Vec::new(),
        namespaces: vec!["cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts"],
        capabilities: [0, POWERS, POWERS, POWERS, 0],
        filtered: false,
        oom_score_adj: 200,
        rlimits: vec![
            ("Max core file size", 0),
            ("Max file size", limits.file_bytes),
            ("Max locked memory", 8 << 20),
            ("Max open files", limits.open_files),
            ("Max pending signals", 4096),
            ("Max msgqueue size", 64 << 10),
            ("Max nice priority", 0),
            ("Max realtime priority", 0),
        ],
        hostname: Some(image::HOSTNAME),
        mounts: Some(Mounts {
            root: vec!["nosuid", "nodev"],
            may_follow: false,
            writable,
            system: vec!["/proc", "/dev", "/dev/pts"],
            masked: &walls::MASKED,
            read_only: &walls::READ_ONLY,
            secret: Some(shared.data_dir.clone()),
        }),
        group: shared.group(&spec.id),
        limits: limits.clone(),
    }
}

fn request(shared: &Shared, spec: &Spec, root: &image::Root, group: &Group) -> Make {
    let bytes = |path: &Path| path.as_os_str().as_bytes().to_vec();
    let bind = |mount: &Mount| Bind {
        source: bytes(&mount.source),
        target: bytes(&mount.target),
    };
    let link = |(path, holds): &(PathBuf, PathBuf)| Link {
        path: bytes(path),
        holds: bytes(holds),
    };
    let text = |(path, text): &(PathBuf, String)| Text {
        path: bytes(path),
        text: text.clone().into_bytes(),
    };
    Make {
        shape: Some(Shape {
            stage: bytes(&shared.sandboxes()),
            lower: root.lower.as_deref().map(bytes).unwrap_or_default(),
            binds: root.binds.iter().chain(&spec.mounts).map(bind).collect(),
            links: root.links.iter().map(link).collect(),
            texts: root.files.iter().map(text).collect(),
            workspace: spec.workspace.is_some(),
        }),
        doors: group.doors().iter().map(|door| bytes(door)).collect(),
        group: group.cradle().map(bytes).unwrap_or_default(),
        base: spec.identity.base,
        range: Identity::RANGE,
        workspace: spec.workspace.as_deref().map(bytes).unwrap_or_default(),
        tmp_bytes: spec.limits.tmp_bytes,
        tmp_inodes: spec.limits.tmp_inodes,
        shm_bytes: spec.limits.shm_bytes,
        masked: hidden(&walls::MASKED),
        read_only: hidden(&walls::READ_ONLY),
        rlimits: rlimits(&spec.limits),
        hostname: image::HOSTNAME.as_bytes().to_vec(),
        oom_score_adj: OOM_SCORE_ADJ,
        runsc: None,
    }
}

/// A sandbox of this backend has no `/sys`.
fn hidden(paths: &[&str]) -> Vec<Vec<u8>> {
    let of_proc = paths.iter().filter(|path| path.starts_with("/proc/"));
    of_proc.map(|path| path.as_bytes().to_vec()).collect()
}

fn rlimits(limits: &Limits) -> Vec<Rlimit> {
    let limit = |(resource, value): (libc::__rlimit_resource_t, u64)| Rlimit { resource, value };
    let wanted = [
        (libc::RLIMIT_NOFILE, limits.open_files),
        (libc::RLIMIT_FSIZE, limits.file_bytes),
        (libc::RLIMIT_CORE, 0),
        (libc::RLIMIT_MEMLOCK, 8 << 20),
        (libc::RLIMIT_SIGPENDING, 4096),
        (libc::RLIMIT_MSGQUEUE, 64 << 10),
        (libc::RLIMIT_RTPRIO, 0),
        (libc::RLIMIT_NICE, 0),
    ];
    wanted.map(limit).into()
}
