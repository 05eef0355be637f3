//! Which devices may be opened in a group: a list in version 1, a program of the kernel's (BPF) in version 2.
//!
//! Owns the one list of devices, and both ways to hold a group to it. The program is so small that it is written here by hand,
//! from the list; bpf(2) has no safe binding among the crates that are used.

#![expect(unsafe_code, reason = "bpf(2) has no binding in nix or rustix")]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use super::file::{read, write};
use super::{Controller, Error, Group, Version};

/// A character device that may be read and written; all of a driver's where there is no minor number.
#[derive(Debug, Clone, Copy)]
struct Device {
    major: i32,
    minor: Option<i32>,
}

const fn device(major: i32, minor: i32) -> Device {
    Device {
        major,
        minor: Some(minor),
    }
}

/// null, zero, full, random, urandom, tty, ptmx, and pseudo terminals.
const DEVICES: [Device; 8] = [
    device(1, 3),
    device(1, 5),
    device(1, 7),
    device(1, 8),
    device(1, 9),
    device(5, 0),
    device(5, 2),
    Device {
        major: 136,
        minor: None,
    },
];

/// What holds a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Devices {
    /// Version 1: the kernel's list, a line each.
    List(String),
    /// Version 2: so many programs judge, and each must agree.
    Programs(usize),
}

impl Group {
    /// Nothing but the usual eight can be opened from here on. None can be made in version 1; in version 2 these can, as the forge's
    /// child is born in the group and makes the sandbox's `/dev` there (programs have no power to).
    ///
    /// # Errors
    /// When that cannot be set, or did not take.
    pub fn limit_devices(&self) -> Result<(), Error> {
        match self.version() {
            Version::V1 => self.limit_by_list(),
            Version::V2 => self.limit_by_program(),
        }
    }

    /// What holds it, as the kernel has it.
    pub fn devices(&self) -> Result<Devices, Error> {
        match self.version() {
            Version::V1 => read(&self.file(Controller::Devices, "devices.list")).map(Devices::List),
            Version::V2 => self.programs().map(|programs| Devices::Programs(programs.len())),
        }
    }

    fn limit_by_list(&self) -> Result<(), Error> {
        let lines = DEVICES.map(|Device { major, minor }| {
            let minor = minor.map_or("*".to_owned(), |minor| minor.to_string());
            format!("c {major}:{minor} rw")
        });
        write(&self.file(Controller::Devices, "devices.deny"), "a")?;
        for line in &lines {
            write(&self.file(Controller::Devices, "devices.allow"), line)?;
        }
        let list = self.file(Controller::Devices, "devices.list");
        let found = read(&list)?;
        if found.lines().eq(lines.iter()) {
            Ok(())
        } else {
            Err(Error::NotTaken {
                path: list,
                wanted: lines.join(", "),
                found,
            })
        }
    }

    fn limit_by_program(&self) -> Result<(), Error> {
        let dir = self.file(Controller::Memory, "");
        let held = || -> io::Result<u32> {
            let group = File::open(&dir)?;
            let program = load(&program())?;
            attach(&group, &program)?;
            id(&program)
        };
        let id = held().map_err(|source| Error::file(&dir, source))?;
        let found = self.programs()?;
        if found.contains(&id) {
            Ok(())
        } else {
            Err(Error::NotTaken {
                path: dir,
                wanted: format!("the device program {id}"),
                found: format!("{found:?}"),
            })
        }
    }

    /// Version 2: the ids of the programs that judge.
    fn programs(&self) -> Result<Vec<u32>, Error> {
        let dir = self.file(Controller::Memory, "");
        let found = File::open(&dir).and_then(|group| attached(&group));
        found.map_err(|source| Error::file(dir, source))
    }
}

/// One instruction, `struct bpf_insn`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
struct Instruction {
    code: u8,
    /// Destination in the lower half, source in the upper.
    registers: u8,
    offset: i16,
    number: i32,
}

/// A block device is 1, a character device 2; linux/bpf.h.
const CHARACTER: i32 = 2;

/// Called with a `struct bpf_cgroup_dev_ctx` in register 1: what is to be done (upper half) to which kind (lower half), major,
/// minor. What is to be done does not count. Its answer is 1 for yes.
fn program() -> Vec<Instruction> {
    const LOAD: u8 = 0x61;
    const AND: u8 = 0x57;
    const UNLESS_EQUAL: u8 = 0x55;
    const SET: u8 = 0xb7;
    const RETURN: u8 = 0x95;
    let code = |code, to: u8, from: u8, offset, number| Instruction {
        code,
        registers: to | from << 4,
        offset,
        number,
    };
    let answer = |number| [code(SET, 0, 0, 0, number), code(RETURN, 0, 0, 0, 0)];
    let mut allow = Vec::new();
    for Device { major, minor } in DEVICES {
        let rest: Vec<_> = minor
            .map(|minor| code(UNLESS_EQUAL, 5, 0, 2, minor))
            .into_iter()
            .chain(answer(1))
            .collect();
        allow.push(code(UNLESS_EQUAL, 4, 0, rest.len() as i16, major));
        allow.extend(rest);
    }
    let to_the_end = allow.len() as i16;
    let mut program = vec![
        code(LOAD, 2, 1, 0, 0),
        code(AND, 2, 0, 0, 0xffff),
        code(LOAD, 4, 1, 4, 0),
        code(LOAD, 5, 1, 8, 0),
        code(UNLESS_EQUAL, 2, 0, to_the_end, CHARACTER),
    ];
    program.extend(allow);
    program.extend(answer(0));
    program
}

/// `union bpf_attr` as far as it is used; what a call does not know must be zero.
#[repr(C, align(8))]
#[derive(Default)]
struct Attributes([u32; 32]);

impl Attributes {
    fn set(&mut self, at: usize, value: u32) {
        self.0[at] = value;
    }

    fn point(&mut self, at: usize, to: *const u8) {
        let address = to as u64;
        self.0[at] = address as u32;
        self.0[at + 1] = (address >> 32) as u32;
    }
}

const PROG_LOAD: libc::c_int = 5;
const PROG_ATTACH: libc::c_int = 8;
const OBJ_GET_INFO_BY_FD: libc::c_int = 15;
const PROG_QUERY: libc::c_int = 16;
const TYPE_CGROUP_DEVICE: u32 = 15;
const CGROUP_DEVICE: u32 = 6;
const ALLOW_MULTI: u32 = 2;

fn bpf(call: libc::c_int, attributes: &mut Attributes) -> io::Result<libc::c_long> {
    // SAFETY: the kernel reads and writes within the attributes' own size, and what they point to outlives the call: each
    // caller keeps it in a local of its own.
    let result = unsafe { libc::syscall(libc::SYS_bpf, call, attributes, size_of::<Attributes>()) };
    match result {
        ..0 => Err(io::Error::last_os_error()),
        result => Ok(result),
    }
}

fn load(program: &[Instruction]) -> io::Result<OwnedFd> {
    let license = c"MIT";
    let mut attributes = Attributes::default();
    attributes.set(0, TYPE_CGROUP_DEVICE);
    attributes.set(1, program.len() as u32);
    attributes.point(2, program.as_ptr().cast());
    attributes.point(4, license.as_ptr().cast());
    let fd = bpf(PROG_LOAD, &mut attributes)?;
    let fd = i32::try_from(fd).map_err(io::Error::other)?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// It stays for as long as the group does.
fn attach(group: &File, program: &OwnedFd) -> io::Result<()> {
    let mut attributes = Attributes::default();
    attributes.set(0, group.as_raw_fd() as u32);
    attributes.set(1, program.as_raw_fd() as u32);
    attributes.set(2, CGROUP_DEVICE);
    attributes.set(3, ALLOW_MULTI);
    bpf(PROG_ATTACH, &mut attributes).map(drop)
}

fn attached(group: &File) -> io::Result<Vec<u32>> {
    let mut ids = [0_u32; 64];
    let mut attributes = Attributes::default();
    attributes.set(0, group.as_raw_fd() as u32);
    attributes.set(1, CGROUP_DEVICE);
    attributes.point(4, ids.as_mut_ptr().cast::<u8>().cast_const());
    attributes.set(6, ids.len() as u32);
    bpf(PROG_QUERY, &mut attributes)?;
    let count = attributes.0[6] as usize;
    Ok(ids.into_iter().take(count).collect())
}

fn id(program: &OwnedFd) -> io::Result<u32> {
    // `struct bpf_prog_info` begins with the type and the id.
    let mut info = [0_u32; 2];
    let mut attributes = Attributes::default();
    attributes.set(0, program.as_raw_fd() as u32);
    attributes.set(1, size_of_val(&info) as u32);
    attributes.point(2, info.as_mut_ptr().cast::<u8>().cast_const());
    bpf(OBJ_GET_INFO_BY_FD, &mut attributes)?;
    Ok(info[1])
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};
    use std::process::Command;

    use super::*;

    /// Where version 2 is mounted, beside version 1 or alone.
    fn version_2() -> Option<PathBuf> {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let line = mounts.lines().find(|line| line.contains(" - cgroup2 "))?;
        Some(line.split(' ').nth(4)?.into())
    }

    struct Removed(PathBuf);

    impl Drop for Removed {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir(&self.0);
        }
    }

    /// H, T4: in a group of version 2 the eight open, and nothing else can be opened or made.
    #[test]
    fn a_program_of_the_kernels_holds_devices() {
        let Some(root) = version_2() else {
            return crate::skip::skipped(
                "a_program_of_the_kernels_holds_devices",
                "no cgroup version 2 is mounted",
            );
        };
        let dir = root.join(format!("exuvia-devices-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let dir = Removed(dir);
        let group = Group::new(Version::V2, [(Controller::Memory, dir.0.clone())].into());
        assert_eq!(group.devices().unwrap(), Devices::Programs(0));
        let inside = |script: &str| {
            let enter = format!("echo $$ > {}/cgroup.procs; {script}", dir.0.display());
            let output = Command::new("sh").args(["-c", &enter]).output().unwrap();
            String::from_utf8(output.stdout).unwrap()
        };
        let temp = tempfile::tempdir().unwrap();
        let opens = "for n in null zero full random urandom kmsg mem fuse net/tun; do \
            [ -e /dev/$n ] && { (: < /dev/$n) 2>/dev/null && echo $n; }; done; true";
        let make = |name: &str| {
            format!(
                "mknod {}/{name} c 1 11 2>/dev/null && echo made; true",
                temp.path().display()
            )
        };
        assert_eq!(inside(&make("before")), "made\n");
        assert!(
            !Path::new("/dev/kmsg").exists() || inside(opens).contains("kmsg"),
            "it opens without"
        );
        group.limit_devices().unwrap();
        assert_eq!(group.devices().unwrap(), Devices::Programs(1));
        assert_eq!(inside(opens), "null\nzero\nfull\nrandom\nurandom\n");
        assert_eq!(inside(&make("after")), "");
        // A terminal, by its driver's number alone.
        assert_eq!(
            inside("script -qc 'echo on a terminal' /dev/null </dev/null 2>&1 | tr -d '\\r'"),
            "on a terminal\n"
        );
    }
}
