//! The end of a sandbox, from whatever state it is in and whoever made it.
//!
//! Its first process is known by number and start time, and awaited by descriptor: when it has ended, so has everything in
//! its PID namespace. The control group finds what is left, as a process that was still on its way in.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;
use rustix::process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::{Shared, record};
use crate::ids::SandboxId;
use crate::process::Process;
use crate::sandbox::backend::Doomed;
use crate::sandbox::cgroup::Group;
use crate::sandbox::{Error, identity};

/// How long a process may take from SIGKILL to its end.
const LAST_BREATH: Duration = Duration::from_secs(10);

/// Ends every process and removes every trace. Fine when there is none.
pub(super) fn destroy(shared: &Shared, id: &SandboxId) -> Result<(), Error> {
    let caused = |error: &dyn std::error::Error| Error::caused("destroy", id, error);
    let dir = shared.dir(id);
    let record = record::read(&dir);
    let group = shared.group(id);
    if let Some(init) = record.as_ref().and_then(|record| record.init.as_ref()) {
        // What does not end in time makes the removal of the group fail.
        kill(init, &group).map_err(|error| caused(&error))?;
    }
    group.remove().map_err(|error| caused(&error))?;
    if let Some(record) = &record {
        identity::release(&shared.data_dir, record.identity);
    }
    // Out of sight in one step, so that nobody finds half of it; the record goes with it.
    match fs::remove_dir_all(&dir) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(Error::failed("destroy", id, error)),
    }
}

/// SIGKILL to all of it. Returns when nothing runs on, which is before all have ended.
pub(super) fn doom(shared: &Shared, id: &SandboxId) -> Result<Doomed, Error> {
    let record = shared.record(id)?;
    let first = record.init.as_ref().and_then(open);
    if let Some(process) = &first {
        // Its end takes the others along; they need not wait for it.
        let _ = pidfd_send_signal(process, Signal::KILL);
    }
    shared
        .group(id)
        .doom()
        .map_err(|error| Error::caused("stop", id, &error))?;
    Ok(Doomed::Dying)
}

/// SIGTERM to the guest, then after `grace` SIGKILL to all. Returns when nothing runs any more.
pub(super) fn stop(shared: &Shared, id: &SandboxId, grace: Duration) -> Result<(), Error> {
    let record = shared.record(id)?;
    let group = shared.group(id);
    let caused = |error: &dyn std::error::Error| Error::caused("stop", id, error);
    if let Some(init) = &record.init {
        if !grace.is_zero()
            && let Some(process) = open(init)
        {
            let _ = pidfd_send_signal(&process, Signal::TERM);
            await_end(&process, grace);
        }
        kill(init, &group).map_err(|error| caused(&error))?;
    }
    let started = Instant::now();
    let mut nap = Duration::from_micros(200);
    while !group.pids().map_err(|error| caused(&error))?.is_empty() {
        if started.elapsed() > LAST_BREATH {
            return Err(Error::failed("stop", id, "processes stay after SIGKILL"));
        }
        group.kill().map_err(|error| caused(&error))?;
        thread::sleep(nap);
        nap = (nap * 2).min(Duration::from_millis(20));
    }
    Ok(())
}

/// Kills the sandbox's first process, and with it all in its PID namespace, and waits for their end.
fn kill(init: &Process, group: &Group) -> Result<(), crate::sandbox::cgroup::Error> {
    if let Some(process) = open(init) {
        // It may be gone already, which is what was wanted.
        let _ = pidfd_send_signal(&process, Signal::KILL);
        group.thaw()?;
        await_end(&process, LAST_BREATH);
    }
    // Where it has become a child of ours: of a server that is PID 1 or a subreaper. Anyone else's child is awaited by its own
    // parent.
    let _ = waitpid(Pid::from_raw(init.pid as i32), Some(WaitPidFlag::WNOHANG));
    Ok(())
}

/// `None` when it has ended.
fn open(init: &Process) -> Option<OwnedFd> {
    let pid = rustix::process::Pid::from_raw(init.pid as i32)?;
    let process = pidfd_open(pid, PidfdFlags::empty()).ok()?;
    // Asked after the descriptor was opened: the number is not another's.
    init.is_alive().then_some(process)
}

/// Waits for its end, but not longer than `most`.
fn await_end(process: &OwnedFd, most: Duration) {
    let started = Instant::now();
    loop {
        let left = most.saturating_sub(started.elapsed());
        let mut ready = [PollFd::new(process.as_fd(), PollFlags::POLLIN)];
        match poll(&mut ready, PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)) {
            Err(nix::Error::EINTR) => {}
            Ok(0) if started.elapsed() < most => {}
            Ok(_) | Err(_) => return,
        }
    }
}
