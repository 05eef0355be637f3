//! What a program is and has when it starts: its user, its limits, its filter, its descriptors, and nothing else.
//!
//! The order matters: what needs the agent's capabilities comes first, what the program could otherwise undo comes last.

use std::ffi::{CString, OsStr};
use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::prctl;
use nix::sys::signal::Signal;
use nix::unistd::{self, ForkResult, Gid, Pid, Uid};
use prost::Message;

use super::cast::{Cast, Unfit};
use super::{files, sys, terminal, user};
use crate::wire::{Exec, Fault, Mould, Stream, TerminalSize};

/// What a program's output pipe holds, as far as the kernel allows it.
const PIPE: libc::c_int = 256 << 10;

/// A program that was forked, and this side's ends of its pipes.
pub struct Child {
    pub pid: Pid,
    /// Absent when it reads `/dev/null`.
    pub stdin: Option<OwnedFd>,
    /// One for each stream.
    pub outputs: Vec<(Stream, OwnedFd)>,
    /// Ends when the program runs; before that, one encoded [`Fault`] if it cannot.
    pub report: OwnedFd,
}

/// An [`Exec`] that was checked, in the form that the system calls take.
pub struct Plan {
    /// Empty for the file plane.
    argv: Vec<CString>,
    env: Vec<CString>,
    /// What to try in turn: `argv[0]` itself or its places along PATH.
    candidates: Vec<CString>,
    cwd: CString,
    uid: Uid,
    gid: Gid,
    rlimits: Vec<(u32, u64)>,
    filter: Vec<libc::sock_filter>,
    stdin: bool,
    terminal: Option<TerminalSize>,
    has_oom_score: bool,
    /// What the process is cast from in place of running a program, and its pages.
    mould: Option<(Mould, OwnedFd)>,
}

/// What a program gets as its standard input, output and error, and this side's ends of that.
struct Wiring {
    theirs: [Option<OwnedFd>; 3],
    stdin: Option<OwnedFd>,
    outputs: Vec<(Stream, OwnedFd)>,
}

pub fn fault(code: &str, message: impl Into<String>, errno: Option<Errno>) -> Fault {
    Fault {
        code: code.to_owned(),
        message: message.into(),
        errno: errno.map_or(0, |errno| errno as i32),
        kept: None,
    }
}

/// Most of a name that a fault shows.
const SHOWN: usize = 4096;

fn shown(bytes: &[u8]) -> String {
    match bytes.get(..SHOWN) {
        Some(beginning) => format!("{}…", String::from_utf8_lossy(beginning)),
        None => String::from_utf8_lossy(bytes).into_owned(),
    }
}

impl Plan {
    /// Checks what the host asks for; `came` is the descriptor that came with it.
    pub fn new(mut exec: Exec, came: Option<OwnedFd>) -> Result<Self, Fault> {
        let bad = |message: &str| fault("bad_request", message, None);
        let text = |bytes: Vec<u8>| CString::new(bytes).map_err(|_| bad("an argument, name or value holds a NUL"));
        let (uid, gid) = match exec.user.as_str() {
            "" => (exec.uid, exec.gid),
            user => user::resolve(user, exec.user_base)?,
        };
        if uid == 0 || gid == 0 {
            return Err(bad("a program may not be uid or gid 0"));
        }
        if exec.argv.is_empty() != exec.files {
            return Err(bad("an exec is either a program or the file plane"));
        }
        if !exec.cwd.starts_with(b"/") {
            return Err(bad("the working directory is not absolute"));
        }
        let mould = match (exec.mould.take(), came) {
            (Some(mould), Some(memory)) => Some((mould, memory)),
            (None, None) => None,
            (Some(_), None) | (None, Some(_)) => return Err(bad("a mould comes with its memory")),
        };
        let candidates = exec
            .argv
            .first()
            .map(|program| candidates(program, &exec))
            .unwrap_or_default();
        let mut env = Vec::with_capacity(exec.env.len());
        for var in exec.env {
            if var.name.is_empty() || var.name.contains(&b'=') {
                return Err(bad("a variable has no name, or one with `=`"));
            }
            env.push(text([var.name, var.value].join(&b'='))?);
        }
        Ok(Self {
            argv: exec.argv.into_iter().map(text).collect::<Result<_, _>>()?,
            env,
            candidates: candidates.into_iter().map(text).collect::<Result<_, _>>()?,
            cwd: text(exec.cwd)?,
            uid: Uid::from_raw(uid),
            gid: Gid::from_raw(gid),
            rlimits: exec.rlimits.iter().map(|limit| (limit.resource, limit.value)).collect(),
            filter: filter(&exec.seccomp).ok_or_else(|| bad("no seccomp filter, or not one"))?,
            stdin: exec.stdin,
            terminal: exec.terminal,
            has_oom_score: !exec.no_oom_score,
            mould,
        })
    }

    /// Forks the program.
    pub fn spawn(&self) -> Result<Child, Fault> {
        let limit = |errno: Errno| fault("limit", format!("could not start a process: {errno}"), Some(errno));
        let wiring = self.owning(|| match self.terminal {
            None => self.pipes().map_err(limit),
            Some(size) => terminals(size).map_err(|error| {
                let errno = error.raw_os_error().map(Errno::from_raw);
                fault("no_terminal", format!("could not make a terminal: {error}"), errno)
            }),
        })?;
        let report = unistd::pipe2(OFlag::O_CLOEXEC).map_err(limit)?;
        let shim = Pid::this();
        // Not by vfork(2): a program of the same user can stop a child that has not begun its own yet, and this process with it.
        match sys::fork().map_err(limit)? {
            ForkResult::Parent { child } => Ok(Child {
                pid: child,
                stdin: wiring.stdin,
                outputs: wiring.outputs,
                report: report.0,
            }),
            ForkResult::Child => {
                let fault = self.become_program(shim, wiring.theirs);
                // The shim may be gone: then nobody wants to know.
                let _ = File::from(report.1).write_all(&fault.encode_to_vec());
                sys::exit(127)
            }
        }
    }

    fn pipes(&self) -> nix::Result<Wiring> {
        let pipe = || unistd::pipe2(OFlag::O_CLOEXEC);
        let (output, error) = (pipe()?, pipe()?);
        sys::set_pipe_size(&output.0, PIPE);
        let (theirs, stdin) = match self.stdin {
            true => pipe().map(|(theirs, ours)| (Some(theirs), Some(ours)))?,
            false => (None, None),
        };
        Ok(Wiring {
            theirs: [theirs, Some(output.1), Some(error.1)],
            stdin,
            outputs: vec![(Stream::Stdout, output.0), (Stream::Stderr, error.0)],
        })
    }

    /// Does something as the program's user to the file system, as making pipes that the program may open again by their
    /// names: `/dev/stderr`.
    fn owning<T>(&self, make: impl FnOnce() -> Result<T, Fault>) -> Result<T, Fault> {
        unistd::setfsgid(self.gid);
        unistd::setfsuid(self.uid);
        let made = make();
        unistd::setfsuid(Uid::effective());
        unistd::setfsgid(Gid::effective());
        // A change of user resets this.
        prctl::set_dumpable(false).map_err(internal("stay closed to others"))?;
        made
    }

    /// Turns this process into the program; comes back only with the reason why it could not.
    fn become_program(&self, shim: Pid, wiring: [Option<OwnedFd>; 3]) -> Fault {
        match self.prepare(shim, wiring) {
            Err(fault) => fault,
            Ok(()) if self.argv.is_empty() => {
                // Not one descriptor of the agent's, the report included, reaches the file plane.
                let closed = sys::install_filter(&self.filter).and_then(|()| sys::close_range(3, u32::MAX, false));
                match closed {
                    Ok(()) => sys::exit(files::serve_stdio()),
                    Err(errno) => internal("close descriptors and install the filter")(errno),
                }
            }
            Ok(()) => match &self.mould {
                Some((mould, memory)) => self.cast(mould, memory),
                None => match sys::install_filter(&self.filter) {
                    Ok(()) => self.exec(),
                    Err(errno) => internal("install the seccomp filter")(errno),
                },
            },
        }
    }

    /// Goes on as the mould's process, which installs the filter last.
    fn cast(&self, mould: &Mould, memory: &OwnedFd) -> Fault {
        match Cast::prepare(mould, memory, &self.filter) {
            Ok(cast) => cast.go(),
            Err(Unfit(why, errno)) => fault("not_cast", format!("no process can be cast: {why}"), errno),
        }
    }

    fn prepare(&self, shim: Pid, wiring: [Option<OwnedFd>; 3]) -> Result<(), Fault> {
        // A worthy victim: when memory runs out the kernel should take programs, never the agent. May be forbidden.
        if self.has_oom_score {
            let _ = std::fs::write("/proc/self/oom_score_adj", "500");
        }
        unistd::setsid().map_err(internal("make a session"))?;
        if let (Some(_), Some(terminal)) = (self.terminal, &wiring[0]) {
            sys::control_terminal(terminal).map_err(internal("take the terminal"))?;
        }
        let null = match wiring.iter().all(Option::is_some) {
            true => None,
            false => Some(
                File::open("/dev/null")
                    .map_err(|_| internal("open /dev/null")(Errno::last()))?
                    .into(),
            ),
        };
        let [stdin, stdout, stderr] = wiring.each_ref().map(|end| end.as_ref().or(null.as_ref()));
        let (Some(stdin), Some(stdout), Some(stderr)) = (stdin, stdout, stderr) else {
            return Err(internal("set up standard input and output")(Errno::EBADF));
        };
        unistd::dup2_stdin(stdin)
            .and_then(|()| unistd::dup2_stdout(stdout))
            .and_then(|()| unistd::dup2_stderr(stderr))
            .map_err(internal("set up standard input and output"))?;
        for (resource, value) in &self.rlimits {
            sys::limit(*resource, *value).map_err(internal("set a resource limit"))?;
        }
        self.become_user(shim)?;
        unistd::chdir(self.cwd.as_c_str()).map_err(|errno| {
            let message = format!("working directory `{}`: {}", shown(self.cwd.as_bytes()), errno.desc());
            fault("cwd_not_found", message, Some(errno))
        })?;
        sys::close_range(3, u32::MAX, true).map_err(internal("close descriptors"))?;
        sys::hear_all_signals().map_err(internal("reset signals"))
    }

    fn become_user(&self, shim: Pid) -> Result<(), Fault> {
        match unistd::setgroups(&[]) {
            // A user namespace may forbid the call; that is fine when there is no group to leave.
            Err(Errno::EPERM) if unistd::getgroups().is_ok_and(|groups| groups.is_empty()) => {}
            result => result.map_err(internal("leave all groups"))?,
        }
        sys::drop_bounding_set();
        unistd::setresgid(self.gid, self.gid, self.gid).map_err(internal("set the group"))?;
        unistd::setresuid(self.uid, self.uid, self.uid).map_err(internal("set the user"))?;
        sys::limit_capabilities(0).map_err(internal("drop capabilities"))?;
        prctl::set_no_new_privs().map_err(internal("set no_new_privs"))?;
        // After the change of user, which clears it; then a look at whether it came too late.
        prctl::set_pdeathsig(Signal::SIGKILL).map_err(internal("bind to the shim"))?;
        if unistd::getppid() != shim {
            sys::exit(127);
        }
        Ok(())
    }

    fn exec(&self) -> Fault {
        let (mut denied, mut missing) = (None, Vec::new());
        for candidate in &self.candidates {
            match unistd::execve(candidate, &self.argv, &self.env) {
                Ok(never) => match never {},
                Err(Errno::ENOENT | Errno::ENOTDIR) => missing.push(candidate),
                Err(Errno::EACCES) => denied = Some(candidate),
                Err(errno) if says_too_large(errno, candidate.as_bytes()) => {
                    let message = "the command with its arguments and environment is too large";
                    return fault("too_large", message.to_owned(), Some(Errno::E2BIG));
                }
                Err(errno @ (Errno::ENOMEM | Errno::EAGAIN)) => {
                    let message = format!("could not execute `{}`: {}", shown(candidate.as_bytes()), errno.desc());
                    return fault("limit", message, Some(errno));
                }
                Err(errno) => {
                    let message = format!("could not execute `{}`: {}", shown(candidate.as_bytes()), errno.desc());
                    return fault("program_not_executable", message, Some(errno));
                }
            }
        }
        let is_there = |path: &&CString| std::path::Path::new(OsStr::from_bytes(path.as_bytes())).exists();
        if let Some(path) = missing.into_iter().find(is_there) {
            let message = format!("`{}` is there, its interpreter is not", shown(path.as_bytes()));
            return fault("program_not_executable", message, Some(Errno::ENOENT));
        }
        let name = self.argv.first().map(|name| shown(name.as_bytes())).unwrap_or_default();
        match denied {
            Some(path) => {
                let message = format!("`{}` may not be executed", shown(path.as_bytes()));
                fault("program_not_executable", message, Some(Errno::EACCES))
            }
            None => fault("program_not_found", format!("no program `{name}`"), Some(Errno::ENOENT)),
        }
    }
}

/// Whether the arguments are what was too large. gVisor says ENAMETOOLONG of them, as every kernel does of a path.
fn says_too_large(errno: Errno, path: &[u8]) -> bool {
    errno == Errno::E2BIG || (errno == Errno::ENAMETOOLONG && is_a_name(path))
}

/// Whether the kernel takes a path of this length.
fn is_a_name(path: &[u8]) -> bool {
    path.len() < libc::PATH_MAX as usize && path.split(|byte| *byte == b'/').all(|part| part.len() <= 255)
}

/// A terminal in place of all three.
fn terminals(size: TerminalSize) -> std::io::Result<Wiring> {
    let (master, slave) = terminal::make(size)?;
    Ok(Wiring {
        theirs: [Some(slave.try_clone()?), Some(slave.try_clone()?), Some(slave)],
        stdin: Some(master.try_clone()?),
        outputs: vec![(Stream::Pty, master)],
    })
}

fn internal(doing: &'static str) -> impl Fn(Errno) -> Fault {
    move |errno| fault("internal", format!("could not {doing}: {}", errno.desc()), Some(errno))
}

/// Where to look for `program`: as execvp(3) does, but with the PATH of the new environment.
fn candidates(program: &[u8], exec: &Exec) -> Vec<Vec<u8>> {
    if program.is_empty() || program.contains(&b'/') {
        return vec![program.to_vec()];
    }
    let path = exec.env.iter().rfind(|var| var.name == b"PATH");
    let path = path.map_or(b"/usr/bin:/bin".as_slice(), |var| &var.value);
    let in_directory = |directory: &[u8]| match directory {
        b"" => [b"./", program].concat(),
        directory => [directory, b"/", program].concat(),
    };
    path.split(|byte| *byte == b':').map(in_directory).collect()
}

/// The instructions of a compiled filter; `None` for no or half an instruction.
fn filter(bytes: &[u8]) -> Option<Vec<libc::sock_filter>> {
    const SIZE: usize = size_of::<libc::sock_filter>();
    let (instructions, rest) = bytes.as_chunks::<SIZE>();
    let parse = |raw: &[u8; SIZE]| {
        let [c0, c1, jt, jf, k0, k1, k2, k3] = *raw;
        libc::sock_filter {
            code: u16::from_ne_bytes([c0, c1]),
            jt,
            jf,
            k: u32::from_ne_bytes([k0, k1, k2, k3]),
        }
    };
    (rest.is_empty() && !instructions.is_empty()).then(|| instructions.iter().map(parse).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::EnvVar;

    fn exec() -> Exec {
        Exec {
            argv: vec![b"sh".to_vec()],
            cwd: b"/".to_vec(),
            uid: 1000,
            gid: 1000,
            seccomp: vec![0; 8],
            ..Exec::default()
        }
    }

    #[test]
    fn what_would_weaken_a_program_is_refused() {
        let refused = |change: fn(&mut Exec)| {
            let mut exec = exec();
            change(&mut exec);
            Plan::new(exec, None).err().map(|fault| fault.code)
        };
        assert_eq!(refused(|_| {}), None);
        let changes: [fn(&mut Exec); 9] = [
            |exec| exec.uid = 0,
            |exec| exec.gid = 0,
            |exec| exec.seccomp.clear(),
            |exec| exec.seccomp.truncate(7),
            |exec| exec.argv.clear(),
            |exec| exec.files = true,
            |exec| exec.cwd = b"tmp".to_vec(),
            |exec| exec.argv[0].push(0),
            |exec| {
                exec.env = vec![EnvVar {
                    name: b"A=B".to_vec(),
                    value: Vec::new(),
                }]
            },
        ];
        for (n, change) in changes.into_iter().enumerate() {
            assert_eq!(refused(change).as_deref(), Some("bad_request"), "change {n}");
        }
    }

    #[test]
    fn a_bare_name_is_looked_up_in_the_new_path() {
        let mut exec = exec();
        let path = EnvVar {
            name: b"PATH".to_vec(),
            value: b"/a::/b".to_vec(),
        };
        exec.env.push(path);
        assert_eq!(
            candidates(b"x", &exec),
            [b"/a/x".to_vec(), b"./x".to_vec(), b"/b/x".to_vec()]
        );
        assert_eq!(candidates(b"./x", &exec), [b"./x".to_vec()]);
    }
}
