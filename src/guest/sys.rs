//! System calls that nix does not wrap, each with its safety argument. Nothing here decides anything.
#![expect(unsafe_code, reason = "raw system calls that nix 0.32 lacks")]

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::unistd::{ForkResult, Pid};

/// Highest capability number that is tried; the kernel stops earlier.
const MAX_CAPABILITY: libc::c_ulong = 63;

/// Forks. Both sides may go on with any code.
pub fn fork() -> nix::Result<ForkResult> {
    // SAFETY: the agent never starts a thread, so the child inherits no lock in a held state.
    unsafe { nix::unistd::fork() }
}

/// Takes over a descriptor that the parent process left open for us.
pub fn adopt(fd: RawFd) -> nix::Result<OwnedFd> {
    // SAFETY: fcntl only inspects; the descriptor is checked to be open before it is owned, and each number is adopted once.
    unsafe {
        Errno::result(libc::fcntl(fd, libc::F_GETFD))?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// Closes all descriptors from `first` to `last`, or marks them close-on-exec. Callers hold none of them as an owned value.
pub fn close_range(first: RawFd, last: u32, on_exec: bool) -> nix::Result<()> {
    if (first as u32) > last {
        return Ok(());
    }
    let flags = if on_exec { libc::CLOSE_RANGE_CLOEXEC } else { 0 };
    // No descriptor is above; gVisor refuses such a number.
    let last = last.min(i32::MAX as u32);
    // SAFETY: no memory is passed.
    Errno::result(unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) }).map(drop)
}

/// Removes every capability from the bounding set; does nothing without `CAP_SETPCAP`.
pub fn drop_bounding_set() {
    for capability in 0..=MAX_CAPABILITY {
        // SAFETY: no memory is passed.
        if unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) } != 0 {
            break;
        }
    }
}

/// Sets the permitted and effective sets to `keep` (a bit mask) as far as they hold it, empties inheritable and ambient.
pub fn limit_capabilities(keep: u64) -> nix::Result<()> {
    #[repr(C)]
    struct Header {
        version: u32,
        pid: libc::c_int,
    }
    #[repr(C)]
    #[derive(Clone, Copy, Default)]
    struct Data {
        effective: u32,
        permitted: u32,
        inheritable: u32,
    }
    const VERSION_3: u32 = 0x2008_0522;
    let mut header = Header {
        version: VERSION_3,
        pid: 0,
    };
    let mut data = [Data::default(); 2];
    // SAFETY: header and data have the layout of linux/capability.h version 3 (one header, two data elements) and outlive the calls.
    unsafe {
        libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
        Errno::result(libc::syscall(libc::SYS_capget, &raw mut header, data.as_mut_ptr()))?;
        for (half, data) in data.iter_mut().enumerate() {
            data.permitted &= (keep >> (32 * half)) as u32;
            data.effective = data.permitted;
            data.inheritable = 0;
        }
        Errno::result(libc::syscall(libc::SYS_capset, &raw mut header, data.as_ptr())).map(drop)
    }
}

/// Installs a seccomp filter for good. `no_new_privs` must be set.
pub fn install_filter(filter: &[libc::sock_filter]) -> nix::Result<()> {
    let program = libc::sock_fprog {
        len: u16::try_from(filter.len()).map_err(|_| Errno::EINVAL)?,
        filter: filter.as_ptr().cast_mut(),
    };
    // SAFETY: the kernel copies `len` instructions from `filter`, which outlives the call, and writes to neither.
    let result = unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program) };
    Errno::result(result).map(drop)
}

/// Sets soft and hard limit to `value`, or to the present hard limit where that is lower.
pub fn limit(resource: u32, value: u64) -> nix::Result<()> {
    let mut now = MaybeUninit::<libc::rlimit>::uninit();
    // SAFETY: getrlimit fills `now` when it succeeds; setrlimit only reads.
    unsafe {
        Errno::result(libc::getrlimit(resource as _, now.as_mut_ptr()))?;
        let now = now.assume_init();
        let value = value.min(now.rlim_max);
        if (now.rlim_cur, now.rlim_max) == (value, value) {
            return Ok(());
        }
        let new = libc::rlimit {
            rlim_cur: value,
            rlim_max: value,
        };
        Errno::result(libc::setrlimit(resource as _, &raw const new)).map(drop)
    }
}

/// A child that ended.
pub struct Reaped {
    pub pid: Pid,
    /// As `waitpid` gives it.
    pub status: i32,
    pub user_us: u64,
    pub system_us: u64,
    pub max_rss_bytes: u64,
}

/// Whether [`reap`] waits.
#[derive(Clone, Copy, PartialEq)]
pub enum Wait {
    Now,
    UntilOneEnds,
}

/// Reaps one child, with what it used; `None` when there are children and none has ended.
///
/// # Errors
/// `ECHILD` when there is no child at all.
pub fn reap(wait: Wait) -> nix::Result<Option<Reaped>> {
    let flags = match wait {
        Wait::Now => libc::WNOHANG,
        Wait::UntilOneEnds => 0,
    };
    let (mut status, mut usage) = (0, MaybeUninit::<libc::rusage>::zeroed());
    loop {
        // SAFETY: both pointers are valid for the call; a zeroed rusage is a valid one.
        let pid = unsafe { libc::wait4(-1, &raw mut status, flags | libc::__WALL, usage.as_mut_ptr()) };
        match Errno::result(pid) {
            Ok(0) => return Ok(None),
            Ok(pid) => {
                // SAFETY: zeroed at first, filled by the kernel since.
                let usage = unsafe { usage.assume_init() };
                let micros = |time: libc::timeval| (time.tv_sec as u64) * 1_000_000 + time.tv_usec as u64;
                return Ok(Some(Reaped {
                    pid: Pid::from_raw(pid),
                    status,
                    user_us: micros(usage.ru_utime),
                    system_us: micros(usage.ru_stime),
                    max_rss_bytes: (usage.ru_maxrss as u64) * 1024,
                }));
            }
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error),
        }
    }
}

/// Bytes that wait in a pipe.
pub fn pending(pipe: &impl AsFd) -> usize {
    let mut bytes: libc::c_int = 0;
    // SAFETY: FIONREAD writes one int to a valid pointer.
    let result = unsafe { libc::ioctl(pipe.as_fd().as_raw_fd(), libc::FIONREAD, &raw mut bytes) };
    if result == 0 { bytes.max(0) as usize } else { 0 }
}

/// Makes a pipe hold up to `bytes`; the kernel may allow less.
pub fn set_pipe_size(pipe: &impl AsFd, bytes: libc::c_int) {
    // SAFETY: no memory is passed. A refusal leaves the pipe as it is.
    unsafe { libc::fcntl(pipe.as_fd().as_raw_fd(), libc::F_SETPIPE_SZ, bytes) };
}

/// Lets the other end of a new terminal be opened, and tells its number.
pub fn unlock_terminal(master: &impl AsFd) -> nix::Result<u32> {
    let master = master.as_fd().as_raw_fd();
    let (unlock, mut number): (libc::c_int, libc::c_uint) = (0, 0);
    // SAFETY: both calls take a pointer to an int that outlives them; the second writes it.
    unsafe {
        Errno::result(libc::ioctl(master, libc::TIOCSPTLCK, &raw const unlock))?;
        Errno::result(libc::ioctl(master, libc::TIOCGPTN, &raw mut number))?;
    }
    Ok(number)
}

/// Opens the other end of a terminal, without a name.
pub fn terminal_peer(master: &impl AsFd, flags: nix::fcntl::OFlag) -> nix::Result<OwnedFd> {
    // SAFETY: no memory is passed; the descriptor that comes back is new and ours alone.
    unsafe {
        let peer = libc::ioctl(master.as_fd().as_raw_fd(), libc::TIOCGPTPEER, flags.bits());
        Ok(OwnedFd::from_raw_fd(Errno::result(peer)?))
    }
}

/// Makes a terminal the controlling one of this process's session.
pub fn control_terminal(terminal: &impl AsFd) -> nix::Result<()> {
    // SAFETY: no memory is passed.
    Errno::result(unsafe { libc::ioctl(terminal.as_fd().as_raw_fd(), libc::TIOCSCTTY, 0) }).map(drop)
}

pub fn set_terminal_size(master: &impl AsFd, rows: u16, columns: u16) -> nix::Result<()> {
    let size = libc::winsize {
        ws_row: rows,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: the call reads a winsize that outlives it.
    Errno::result(unsafe { libc::ioctl(master.as_fd().as_raw_fd(), libc::TIOCSWINSZ, &raw const size) }).map(drop)
}

/// Milliseconds on the clock that all processes of the sandbox share.
pub fn monotonic_ms() -> u64 {
    let mut now = MaybeUninit::<libc::timespec>::zeroed();
    // SAFETY: the pointer is valid; a zeroed timespec is a valid one, and this clock always exists.
    let now = unsafe {
        libc::clock_gettime(libc::CLOCK_MONOTONIC, now.as_mut_ptr());
        now.assume_init()
    };
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

/// Sends a signal by its number, those for real time too, which nix has no names for; to a group where `to` is negative.
pub fn send_signal(to: Pid, number: i32) -> nix::Result<()> {
    // SAFETY: no memory is passed.
    Errno::result(unsafe { libc::kill(to.as_raw(), number) }).map(drop)
}

/// Leaves a signal without effect on this process.
pub fn ignore_signal(signal: nix::sys::signal::Signal) {
    // SAFETY: no handler of ours is installed.
    let _ = unsafe { nix::sys::signal::signal(signal, nix::sys::signal::SigHandler::SigIgn) };
}

/// Ends this process at once, without unwinding or flushing.
pub fn exit(code: i32) -> ! {
    // SAFETY: _exit has no preconditions.
    unsafe { libc::_exit(code) }
}

/// Gives every signal its default action and unblocks all: a program starts like from a shell.
pub fn reset_signals() -> io::Result<()> {
    // All zero = SIG_DFL, no flags, no mask; large enough for the kernel's struct sigaction on every architecture.
    let default = [0_u64; 4];
    for signal in 1..=64 {
        // By the raw call, as the C library's keeps two signals to itself that it leaves ignored when they were so before.
        // SAFETY: `default` outlives the call and installs no code of ours. Failure is expected for SIGKILL and SIGSTOP.
        unsafe {
            let none = std::ptr::null_mut::<u64>();
            libc::syscall(libc::SYS_rt_sigaction, signal, default.as_ptr(), none, size_of::<u64>());
        }
    }
    nix::sys::signal::SigSet::empty().thread_set_mask()?;
    Ok(())
}

/// What [`reset_signals`] does, in a process whose parent has called it and ignores nothing but SIGPIPE since.
pub fn hear_all_signals() -> nix::Result<()> {
    // SAFETY: no handler of ours is installed.
    unsafe { nix::sys::signal::signal(nix::sys::signal::Signal::SIGPIPE, nix::sys::signal::SigHandler::SigDfl)? };
    nix::sys::signal::SigSet::empty().thread_set_mask()
}
