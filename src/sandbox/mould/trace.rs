//! Holding a process still and reading it: ptrace(2), as far as a mould needs it.
#![expect(unsafe_code, reason = "ptrace, which nix 0.32 has in parts only")]

use std::mem::MaybeUninit;

use nix::errno::Errno;

/// `PTRACE_EVENT_STOP` in the upper half of a stop's status.
const EVENT_STOP: i32 = 128;
const GET_RSEQ_CONFIGURATION: libc::c_uint = 0x420f;
/// Of the note `NT_PRFPREG`: what FXSAVE writes.
pub const FLOATS: usize = 512;

/// A process that this thread traces. It dies with the thread.
#[derive(Debug)]
pub struct Traced(pub i32);

/// `struct ptrace_rseq_configuration`
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Rseq {
    pub address: u64,
    pub length: u32,
    pub signature: u32,
    flags: u32,
    pad: u32,
}

fn ptrace(request: libc::c_uint, pid: i32, address: usize, data: usize) -> nix::Result<libc::c_long> {
    // SAFETY: each caller says what `address` and `data` mean to the request, and that they outlive the call.
    Errno::result(unsafe { libc::ptrace(request, pid, address, data) })
}

impl Traced {
    /// Traces a process, which goes on until it forks.
    pub fn seize(pid: i32) -> nix::Result<Self> {
        let options = libc::PTRACE_O_TRACEFORK | libc::PTRACE_O_EXITKILL;
        ptrace(libc::PTRACE_SEIZE, pid, 0, options as usize)?;
        Ok(Self(pid))
    }

    /// Waits until it has forked; the child, which has not run yet.
    ///
    /// # Errors
    /// `ESRCH` when it ended.
    pub fn forked(&self) -> nix::Result<Self> {
        loop {
            let status = wait(self.0)?;
            match status >> 16 {
                libc::PTRACE_EVENT_FORK => break,
                0 => {
                    // A signal, which it gets.
                    ptrace(libc::PTRACE_CONT, self.0, 0, libc::WSTOPSIG(status) as usize)?;
                }
                _ => {
                    ptrace(libc::PTRACE_CONT, self.0, 0, 0)?;
                }
            }
        }
        let mut child: libc::c_ulong = 0;
        // The kernel writes one long.
        ptrace(libc::PTRACE_GETEVENTMSG, self.0, 0, &raw mut child as usize)?;
        let child = Self(child as i32);
        match wait(child.0)? >> 16 {
            EVENT_STOP => Ok(child),
            _ => Err(Errno::EPROTO),
        }
    }

    /// Its registers.
    pub fn registers(&self) -> nix::Result<libc::user_regs_struct> {
        let mut registers = MaybeUninit::<libc::user_regs_struct>::zeroed();
        self.note(
            libc::NT_PRSTATUS as usize,
            registers.as_mut_ptr().cast(),
            size_of::<libc::user_regs_struct>(),
        )?;
        // SAFETY: any bits are a valid value, and the kernel has filled them.
        Ok(unsafe { registers.assume_init() })
    }

    /// Its floating-point registers.
    pub fn floats(&self) -> nix::Result<[u8; FLOATS]> {
        let mut floats = [0; FLOATS];
        self.note(libc::NT_PRFPREG as usize, floats.as_mut_ptr().cast(), FLOATS)?;
        Ok(floats)
    }

    fn note(&self, kind: usize, to: *mut libc::c_void, length: usize) -> nix::Result<()> {
        let mut part = libc::iovec {
            iov_base: to,
            iov_len: length,
        };
        // The kernel writes up to `length` bytes, and how many they were.
        ptrace(
            libc::PTRACE_GETREGSET as libc::c_uint,
            self.0,
            kind,
            &raw mut part as usize,
        )?;
        match part.iov_len == length {
            true => Ok(()),
            false => Err(Errno::EPROTO),
        }
    }

    /// The signals that it has blocked.
    pub fn blocked(&self) -> nix::Result<u64> {
        let mut mask = 0_u64;
        // The kernel writes a mask of eight bytes.
        ptrace(
            libc::PTRACE_GETSIGMASK as libc::c_uint,
            self.0,
            size_of::<u64>(),
            &raw mut mask as usize,
        )?;
        Ok(mask)
    }

    /// Its restartable sequences; an address of 0 = none.
    pub fn rseq(&self) -> nix::Result<Rseq> {
        let mut rseq = Rseq::default();
        match ptrace(
            GET_RSEQ_CONFIGURATION,
            self.0,
            size_of::<Rseq>(),
            &raw mut rseq as usize,
        ) {
            Ok(_) => Ok(rseq),
            // A kernel without them.
            Err(Errno::EIO) => Ok(Rseq::default()),
            Err(errno) => Err(errno),
        }
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        // Nothing more of it is wanted. Fails only when it is gone.
        // SAFETY: no memory is passed.
        unsafe { libc::kill(self.0, libc::SIGKILL) };
        // Its parent hears of its end only after whoever traces it, and that is this thread, for as long as the thread is there.
        while wait(self.0).is_ok() {}
    }
}

/// The next stop of one traced process.
fn wait(pid: i32) -> nix::Result<i32> {
    let mut status = 0;
    loop {
        // SAFETY: the kernel writes one int.
        match Errno::result(unsafe { libc::waitpid(pid, &raw mut status, libc::__WALL) }) {
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno),
            Ok(_) if libc::WIFSTOPPED(status) => return Ok(status),
            Ok(_) => return Err(Errno::ESRCH),
        }
    }
}
