//! The end of a sandbox, from whatever state it is in and whoever made it.

use std::fs;
use std::io;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;
use rustix::process::{PidfdFlags, pidfd_open, pidfd_send_signal};

use super::{Shared, record};
use crate::ids::SandboxId;
use crate::process::Process;
use crate::sandbox::{Error, identity};

/// How long a process may take from SIGKILL to its end.
const LAST_BREATH: Duration = Duration::from_secs(10);

/// Ends every process and removes every trace. Fine when there is none.
pub(super) fn destroy(shared: &Shared, id: &SandboxId) -> Result<(), Error> {
    let dir = shared.dir(id);
    let record = record::read(&dir);
    shared
        .group(id)
        .remove()
        .map_err(|error| Error::caused("destroy", id, &error))?;
    if let Some(record) = &record {
        if let Some(init) = &record.init {
            // It has left its group, but its namespaces end with the rest of it.
            let started = Instant::now();
            while init.is_alive() && started.elapsed() < LAST_BREATH {
                thread::sleep(Duration::from_micros(100));
            }
            bury(init);
        }
        identity::release(&shared.data_dir, record.identity);
    }
    // Out of sight in one step, so that nobody finds half of it; the record goes with it.
    match fs::remove_dir_all(&dir) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(Error::failed("destroy", id, error)),
    }
}

/// Awaits the sandbox's first process where it has become a child of ours: of a server that is PID 1 or a subreaper.
fn bury(init: &Process) {
    // Anyone else's child is awaited by its own parent.
    let _ = waitpid(Pid::from_raw(init.pid as i32), Some(WaitPidFlag::WNOHANG));
}

/// SIGTERM to the guest, then after `grace` SIGKILL to all. Returns when nothing runs any more.
pub(super) fn stop(shared: &Shared, id: &SandboxId, grace: Duration) -> Result<(), Error> {
    let record = shared.record(id)?;
    let group = shared.group(id);
    let pids = || group.pids().map_err(|error| Error::caused("stop", id, &error));
    if let Some(init) = &record.init {
        terminate(init);
    }
    let started = Instant::now();
    let mut nap = Duration::from_micros(500);
    while !pids()?.is_empty() || record.init.as_ref().is_some_and(Process::is_alive) {
        if started.elapsed() >= grace {
            group.kill().map_err(|error| Error::caused("stop", id, &error))?;
        }
        if started.elapsed() > grace + LAST_BREATH {
            return Err(Error::failed("stop", id, "processes stay after SIGKILL"));
        }
        thread::sleep(nap);
        nap = (nap * 2).min(Duration::from_millis(20));
    }
    if let Some(init) = &record.init {
        bury(init);
    }
    Ok(())
}

fn terminate(init: &Process) {
    let pid = rustix::process::Pid::from_raw(init.pid as i32);
    let Some(Ok(process)) = pid.map(|pid| pidfd_open(pid, PidfdFlags::empty())) else {
        return;
    };
    // Asked after the descriptor was opened: the number is not another's.
    if init.is_alive() {
        let _ = pidfd_send_signal(process, rustix::process::Signal::TERM);
    }
}
