//! Which process is which, for ever: pid, start time and boot id (proc(5), field 22 of `/proc/PID/stat`).

use std::io;

use crate::store::Owner;

impl Owner {
    /// This process.
    ///
    /// # Errors
    /// When `/proc` is not mounted.
    pub fn current() -> io::Result<Self> {
        let pid = std::process::id();
        let started = started(pid).ok_or_else(|| io::Error::other("cannot read /proc/self/stat"))?;
        Ok(Self {
            pid,
            started,
            boot: boot_id()?,
        })
    }

    /// Whether that very process still lives; a zombie does not.
    pub fn is_alive(&self) -> bool {
        boot_id().is_ok_and(|boot| boot == self.boot) && started(self.pid) == Some(self.started)
    }
}

/// `/proc/sys/kernel/random/boot_id`.
fn boot_id() -> io::Result<String> {
    Ok(std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?
        .trim()
        .to_owned())
}

/// Start time in clock ticks after boot; `None` when there is no such live process.
fn started(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may hold spaces and parentheses: count from the last one.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let is_dead = matches!(fields.next()?, "Z" | "X");
    let started = fields.nth(18)?.parse().ok()?;
    (!is_dead).then_some(started)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_lives_and_an_ended_one_does_not() {
        let me = Owner::current().unwrap();
        assert!(me.is_alive());
        assert!(
            !Owner {
                started: me.started + 1,
                ..me.clone()
            }
            .is_alive(),
            "another process with this pid"
        );
        assert!(
            !Owner {
                boot: "other".into(),
                ..me.clone()
            }
            .is_alive(),
            "another boot"
        );
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let other = Owner {
            pid: child.id(),
            started: started(child.id()).unwrap(),
            ..me
        };
        assert!(other.is_alive());
        child.kill().unwrap();
        while other.is_alive() {
            std::thread::yield_now();
        }
        child.wait().unwrap();
    }
}
