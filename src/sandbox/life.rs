//! Whether a sandbox's first process still lives: asked at once, or waited for.

#![expect(unsafe_code, reason = "the safe way to register a descriptor is deprecated")]

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;

use crate::process::Process;

/// The life of one process, held by a descriptor of it: its number may be another's later, this may not.
#[derive(Debug)]
pub struct Life(Told);

#[derive(Debug)]
enum Told {
    /// By the kernel: readable once the process has ended, pidfd_open(2).
    Kernel(AsyncFd<OwnedFd>),
    /// By whoever holds the other end; `true`, or its end, is the end.
    Channel(watch::Receiver<bool>),
    Over,
}

impl Life {
    /// Follows a process, which may have ended already.
    ///
    /// # Errors
    /// When no descriptor can be had.
    pub fn of(process: &Process) -> io::Result<Self> {
        let pid = i32::try_from(process.pid).ok().and_then(rustix::process::Pid::from_raw);
        let pid = pid.ok_or(io::ErrorKind::InvalidInput)?;
        let opened = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty());
        match opened {
            // Asked after the descriptor was opened: it is of that very process.
            Ok(descriptor) if process.is_alive() => {
                // SAFETY: the descriptor is owned, so it stays open and the same for as long as the `AsyncFd` has it, and
                // nobody takes it out of it.
                let watched = unsafe { AsyncFd::register_with_interest(descriptor, Interest::READABLE) };
                Ok(Self(Told::Kernel(watched?)))
            }
            Ok(_) | Err(rustix::io::Errno::SRCH) => Ok(Self(Told::Over)),
            Err(error) => Err(error.into()),
        }
    }

    /// Follows what a channel says.
    pub fn told(over: watch::Receiver<bool>) -> Self {
        Self(Told::Channel(over))
    }

    /// Whether it has ended by now; does not wait.
    pub fn is_over(&self) -> bool {
        match &self.0 {
            Told::Kernel(descriptor) => {
                let mut ready = [PollFd::new(descriptor.get_ref().as_fd(), PollFlags::POLLIN)];
                poll(&mut ready, PollTimeout::ZERO).is_ok_and(|count| count > 0)
            }
            Told::Channel(over) => *over.borrow() || over.has_changed().is_err(),
            Told::Over => true,
        }
    }

    /// Waits for the end. Cancellation-safe.
    pub async fn over(&self) {
        match &self.0 {
            Told::Kernel(descriptor) => {
                while !self.is_over() {
                    match descriptor.readable().await {
                        // Never cleared: an ended process stays ended.
                        Ok(_) => return,
                        // The runtime ends; nobody waits any more.
                        Err(_) => std::future::pending().await,
                    }
                }
            }
            Told::Channel(over) => {
                let _ = over.clone().wait_for(|over| *over).await;
            }
            Told::Over => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_end_of_a_process_is_told_once_and_for_ever() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let process = Process::find(child.id()).unwrap().unwrap();
        let life = Life::of(&process).unwrap();
        assert!(!life.is_over());
        child.kill().unwrap();
        life.over().await;
        life.over().await;
        assert!(life.is_over());
        child.wait().unwrap();
        assert!(Life::of(&process).unwrap().is_over());
    }

    #[tokio::test]
    async fn a_channel_tells_by_its_word_or_its_end() {
        let (say, hear) = watch::channel(false);
        let life = Life::told(hear.clone());
        assert!(!life.is_over());
        say.send_replace(true);
        life.over().await;
        let other = watch::channel(false);
        let life_of_other = Life::told(other.1);
        drop(other.0);
        life_of_other.over().await;
        assert!(life.is_over() && life_of_other.is_over());
    }
}
