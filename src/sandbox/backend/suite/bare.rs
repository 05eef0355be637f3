//! The least that makes the real guest PID 1 of something like a sandbox: `unshare`, a root of bind mounts, a socket.
//!
//! A test fixture, to run the suite's exec and file cases against the guest alone. It caps nothing, needs root, and keeps
//! its sandboxes only as long as this process.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;
use tokio::net::UnixStream;
use tokio::process::{Child, Command};
use tokio::sync::Mutex;

use super::{Subject, allow_all};
use crate::ids::SandboxId;
use crate::process::Process;
use crate::sandbox::backend::{Backend, Capabilities, Handle, Owned};
use crate::sandbox::{BackendName, Error, ImageRef, Isolation, Life, Spec, Usage};

const GUEST: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/exuvia-guest"));

/// Makes the root in a mount namespace of its own and becomes the guest. $1 = our directory, $2 = the workspace.
const SETUP: &str = r#"
set -e
root=$1/root
mount -t tmpfs -o mode=755 none $root
cd $root
mkdir usr proc tmp workspace dev dev/pts run etc
mount --rbind /usr usr
for link in bin sbin lib lib64; do ln -s usr/$link $link; done
mount -t proc none proc
mount -t devpts -o newinstance,ptmxmode=0666,mode=0620,max=64 none dev/pts
ln -s pts/ptmx dev/ptmx
printf 'root:x:0:0::/:/bin/sh\nsandbox:x:%s:%s::/tmp:/bin/sh\nother:x:%s:%s::/tmp:/bin/sh\n' $3 $3 $4 $4 > etc/passwd
ip link set lo up
mount -t tmpfs -o mode=1777 none tmp
mount --bind $2 workspace
mount --bind $1/run run
for device in null zero; do : > dev/$device; mount --bind /dev/$device dev/$device; done
cp $1/guest guest
mount -o remount,ro,bind usr
mount -o remount,ro $root
exec chroot $root /guest --listen-path /run/socket
"#;

#[derive(Debug, Default)]
pub struct Bare {
    made: Mutex<HashMap<SandboxId, Made>>,
}

#[derive(Debug)]
struct Made {
    spec: Spec,
    directory: TempDir,
    /// `unshare`, whose child is the guest.
    running: Option<Child>,
}

impl Made {
    fn socket(&self) -> PathBuf {
        self.directory.path().join("run/socket")
    }

    /// The guest's pid in our own namespace.
    fn guest(&self) -> Option<Pid> {
        let outer = self.running.as_ref()?.id()?;
        let children = fs::read_to_string(format!("/proc/{outer}/task/{outer}/children")).ok()?;
        children.trim().parse().ok().map(Pid::from_raw)
    }
}

fn broken(doing: &'static str, sandbox: &SandboxId, reason: impl ToString) -> Error {
    Error::Backend {
        doing,
        sandbox: sandbox.clone(),
        reason: reason.to_string(),
    }
}

fn handle(spec: &Spec) -> Handle {
    Handle {
        id: spec.id.clone(),
        identity: spec.identity,
        user: spec.identity.host_uid(),
    }
}

#[async_trait]
impl Backend for Bare {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            name: BackendName::Oci,
            isolations: vec![Isolation::Container],
            user_namespace: false,
            freeze: false,
            memory_snapshot: Vec::new(),
            moulds: Vec::new(),
            borders: Vec::new(),
            lacks: Vec::new(),
        }
    }

    async fn create(&self, spec: &Spec) -> Result<Handle, Error> {
        let mut made = self.made.lock().await;
        if !made.contains_key(&spec.id) {
            let failed = |error: std::io::Error| broken("create", &spec.id, error);
            let directory = TempDir::new().map_err(failed)?;
            let path = directory.path();
            for name in ["root", "run"] {
                fs::create_dir(path.join(name)).map_err(failed)?;
            }
            fs::write(path.join("guest"), GUEST).map_err(failed)?;
            fs::set_permissions(path.join("guest"), fs::Permissions::from_mode(0o755)).map_err(failed)?;
            let fresh = Made {
                spec: spec.clone(),
                directory,
                running: None,
            };
            made.insert(spec.id.clone(), fresh);
        }
        Ok(handle(spec))
    }

    async fn start(&self, sandbox: &Handle) -> Result<(), Error> {
        let mut made = self.made.lock().await;
        let made = made
            .get_mut(&sandbox.id)
            .ok_or_else(|| Error::NotFound(sandbox.id.clone()))?;
        let failed = |error: std::io::Error| broken("start", &sandbox.id, error);
        let mut command = Command::new("unshare");
        command
            .args([
                "--mount",
                "--pid",
                "--net",
                "--ipc",
                "--uts",
                "--fork",
                "--kill-child",
                "--propagation",
                "private",
            ])
            .args(["sh", "-c", SETUP, "sh"])
            .arg(made.directory.path())
            .arg(made.spec.workspace.as_ref().expect("the suite gives one"))
            .args([made.spec.identity.host_uid(), made.spec.identity.host_uid() + 1].map(|uid| uid.to_string()))
            .stdin(Stdio::null())
            .kill_on_drop(true);
        made.running = Some(command.spawn().map_err(failed)?);
        // Waits for the level, with a deadline.
        for _ in 0..1000 {
            if UnixStream::connect(made.socket()).await.is_ok() {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Err(broken("start", &sandbox.id, "its socket does not come up"))
    }

    async fn connect(&self, sandbox: &Handle) -> Result<UnixStream, Error> {
        let made = self.made.lock().await;
        let made = made
            .get(&sandbox.id)
            .ok_or_else(|| Error::NotFound(sandbox.id.clone()))?;
        let connected = UnixStream::connect(made.socket()).await;
        connected.map_err(|error| broken("connect to", &sandbox.id, error))
    }

    async fn freeze(&self, sandbox: &Handle, _frozen: bool) -> Result<(), Error> {
        Err(broken("freeze", &sandbox.id, "it cannot"))
    }

    async fn usage(&self, _sandbox: &Handle) -> Result<Usage, Error> {
        Ok(Usage::default())
    }

    async fn stop(&self, sandbox: &Handle, grace: Duration) -> Result<(), Error> {
        let mut made = self.made.lock().await;
        let Some(made) = made.get_mut(&sandbox.id) else {
            return Ok(());
        };
        if let Some(guest) = made.guest() {
            let _ = kill(guest, Signal::SIGTERM);
        }
        if let Some(mut running) = made.running.take()
            && tokio::time::timeout(grace, running.wait()).await.is_err()
        {
            running
                .kill()
                .await
                .map_err(|error| broken("stop", &sandbox.id, error))?;
        }
        Ok(())
    }

    async fn destroy(&self, sandbox: &SandboxId) -> Result<(), Error> {
        let made = self.made.lock().await.remove(sandbox);
        if let Some(mut running) = made.and_then(|made| made.running) {
            running
                .kill()
                .await
                .map_err(|error| broken("destroy", sandbox, error))?;
        }
        Ok(())
    }

    async fn list_owned(&self) -> Result<Vec<Owned>, Error> {
        let owned = |made: &Made| Owned {
            id: made.spec.id.clone(),
            owner_alive: true,
            identity: made.spec.identity,
        };
        Ok(self.made.lock().await.values().map(owned).collect())
    }

    async fn adopt(&self, sandbox: &SandboxId) -> Result<Handle, Error> {
        Err(broken("take over", sandbox, "its processes end with their maker"))
    }

    async fn life(&self, sandbox: &Handle) -> Result<Life, Error> {
        let made = self.made.lock().await;
        let guest = made.get(&sandbox.id).and_then(Made::guest);
        let process = guest.and_then(|guest| Process::find(guest.as_raw().unsigned_abs()).ok().flatten());
        let process = process.ok_or_else(|| broken("watch", &sandbox.id, "it does not run"))?;
        Life::of(&process).map_err(|error| broken("watch", &sandbox.id, error))
    }
}

async fn setup() -> Result<Subject, String> {
    if !nix::unistd::geteuid().is_root() {
        return Err("needs root".to_owned());
    }
    Ok(Subject {
        backend: Arc::new(Bare::default()),
        image: ImageRef::Host,
        isolation: Isolation::Container,
        filter: allow_all(),
    })
}

/// A workspace without room: the command may swallow that, its end still shows it.
#[tokio::test]
async fn a_full_workspace_shows_at_the_end() {
    const NAME: &str = "a_full_workspace_shows_at_the_end";
    super::run(NAME, setup().await, async |case| {
        let small = TempDir::new().unwrap();
        let flags = nix::mount::MsFlags::empty();
        nix::mount::mount(
            Some("none"),
            small.path(),
            Some("tmpfs"),
            flags,
            Some("size=1m,mode=777"),
        )
        .unwrap();
        let sandbox = case.subject.open(&small).await;
        let full = "head -c 4m /dev/zero > big 2>/dev/null; exit 0";
        let (full, roomy) = (
            sandbox.run(crate::sandbox::Command::shell(full), 100).await.unwrap(),
            sandbox
                .run(crate::sandbox::Command::shell("rm big"), 100)
                .await
                .unwrap(),
        );
        sandbox.close(Duration::ZERO).await.unwrap();
        nix::mount::umount2(small.path(), nix::mount::MntFlags::MNT_DETACH).unwrap();
        let seen = |finished: &crate::sandbox::Finished| {
            let pressure = finished.ended.pressure;
            (
                finished.ended.is_success(),
                pressure.disk_full,
                pressure.disk_limit_bytes,
            )
        };
        assert_eq!(seen(&full), (true, true, 1 << 20));
        assert_eq!(seen(&roomy), (true, false, 1 << 20));
    })
    .await;
}

super::backend_suite!(portable, setup);
super::backend_suite!(real, setup);
super::backend_suite!(walls, setup);
