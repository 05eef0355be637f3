//! A mould: what a process was when it had just been forked, to be cast into any number of others (`guest::cast`).
//!
//! It is taken of a process in a sandbox, from outside: the process is traced, forks, and the child is read before it has run
//! a single instruction. So whoever is cast goes on as a child of a fork does: with the C library's and the language's own
//! code for that case, which forgets locks, threads and random states.
//!
//! Owns: which processes can be taken, their pages and registers. Must not know: languages. What is read here was written by
//! a program of an image: it is copied, bounded and never followed.

mod trace;

use std::fs::{self, File};
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

use self::trace::{FLOATS, Traced};
use crate::guest::maps::{self, Mapping};
use crate::wire;

const PAGE: u64 = 4096;
/// Most bytes of one mould.
const MOST_BYTES: u64 = 512 << 20;
/// Most mappings of a process that is taken.
const MOST_MAPPINGS: usize = 4096;
/// Zeros that are not kept but mapped as such, where there are as many in a row: each piece of a mapping costs a call.
const ZEROS: u64 = 8 * PAGE;
/// What a stack may grow to: the usual limit.
const STACK: u64 = 8 << 20;
/// What the x86-64 ABI lets a function use below its stack pointer.
const RED_ZONE: u64 = 128;
/// Read at once.
const CHUNK: u64 = 1 << 20;

/// Why there is no mould.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("could not {step} the process")]
    Trace {
        step: &'static str,
        #[source]
        source: Errno,
    },
    #[error("could not {step}")]
    Io {
        step: &'static str,
        #[source]
        source: std::io::Error,
    },
    /// It has what no mould can hold.
    #[error("a process that {0} cannot be taken")]
    Unfit(String),
}

/// A process as it stood; its pages are sealed.
#[derive(Debug)]
pub struct Mould {
    memory: OwnedFd,
    plan: wire::Mould,
}

impl Mould {
    /// Takes the next child that `pid` forks, and ends both. `seized` is called once that can be told to fork. Blocks until it
    /// has forked or ended.
    ///
    /// # Errors
    /// When it ends instead, or its child is not one that can be cast.
    pub fn take(pid: i32, seized: impl FnOnce()) -> Result<Self, Error> {
        let traced = |step| move |source| Error::Trace { step, source };
        let parent = Traced::seize(pid).map_err(traced("trace"))?;
        seized();
        let child = parent.forked().map_err(traced("await a fork of"))?;
        let taken = Taking::of(&child)?.all();
        drop(child);
        taken
    }

    /// Learns of a process that was cast, and has done what all will do, which pages that takes: those are brought in in one go
    /// from now on, as a fault for each is dear. What cannot be learnt makes it no worse.
    pub fn learn(&mut self, pid: i32) {
        if let Ok(pages) = File::open(format!("/proc/{pid}/pagemap")) {
            let runs = self
                .plan
                .regions
                .iter()
                .filter(|region| region.offset.is_some() && !region.copied);
            self.plan.hot = runs.flat_map(|region| hot(region, &pages)).collect();
        }
    }

    pub(super) fn plan(&self) -> &wire::Mould {
        &self.plan
    }

    /// Bytes of its pages.
    pub fn bytes(&self) -> u64 {
        let ends = self
            .plan
            .regions
            .iter()
            .filter_map(|region| Some(region.offset? + region.length));
        ends.max().unwrap_or_default()
    }
}

impl AsFd for Mould {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }
}

/// A process that stands still and is being read.
struct Taking<'a> {
    process: &'a Traced,
    pages: File,
    /// What is written where the process goes on from: the address, and the bytes.
    frame: (u64, Vec<u8>),
    to: File,
    end: u64,
    regions: Vec<wire::Region>,
}

impl<'a> Taking<'a> {
    fn of(process: &'a Traced) -> Result<Self, Error> {
        let io = |step| move |source| Error::Io { step, source };
        let memory = memfd_create(c"exuvia-mould", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)
            .map_err(|errno| io("make a memory file")(errno.into()))?;
        Ok(Self {
            process,
            pages: File::open(format!("/proc/{}/mem", process.0)).map_err(io("open the memory of the process"))?,
            frame: (0, Vec::new()),
            to: memory.into(),
            end: 0,
            regions: Vec::new(),
        })
    }

    fn all(mut self) -> Result<Mould, Error> {
        let traced = |source| Error::Trace { step: "read", source };
        let registers = self.process.registers().map_err(traced)?;
        let blocked = self.process.blocked().map_err(traced)?;
        let floats = self.process.floats().map_err(traced)?;
        let rseq = self.process.rseq().map_err(traced)?;
        self.is_alone()?;
        let thread_id_address = thread_id_address(&registers)?;
        self.frame = frame(&registers, &floats, blocked);

        let mappings = maps::parse(&self.text("maps")?).map_err(|source| Error::Io {
            step: "read the mappings of the process",
            source,
        })?;
        if mappings.len() > MOST_MAPPINGS {
            return Err(Error::Unfit(format!("has {} mappings", mappings.len())));
        }
        let mut kernel_regions = Vec::new();
        for mapping in &mappings {
            if maps::is_of_the_kernel(&mapping.name) {
                kernel_regions.push(region(mapping.range.start, mapping.range.end, mapping, None));
            } else if mapping.name != "[vsyscall]" {
                self.mapping(mapping)?;
            }
        }
        let layout = self.layout(&mappings)?;
        let mut name = self.text("comm")?;
        name.truncate(name.trim_end_matches('\n').len());
        let memory = self.to.into();
        let seals = SealFlag::F_SEAL_WRITE | SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
        fcntl(&memory, FcntlArg::F_ADD_SEALS(seals)).map_err(|errno| Error::Io {
            step: "seal a memory file",
            source: errno.into(),
        })?;
        Ok(Mould {
            memory,
            plan: wire::Mould {
                regions: self.regions,
                hot: Vec::new(),
                kernel_regions,
                frame: self.frame.0 + FLOATS as u64,
                fs_base: registers.fs_base,
                gs_base: registers.gs_base,
                thread_id_address,
                rseq: (rseq.address != 0).then_some(wire::RestartableSequences {
                    address: rseq.address,
                    length: rseq.length,
                    signature: rseq.signature,
                }),
                layout: Some(layout),
                name: name.into_bytes(),
            },
        })
    }

    fn text(&self, file: &'static str) -> Result<String, Error> {
        /// Longest text about a process.
        const MOST: u64 = 4 << 20;
        let read = || {
            let mut text = Vec::new();
            let file = File::open(format!("/proc/{}/{file}", self.process.0))?;
            file.take(MOST).read_to_end(&mut text)?;
            Ok(String::from_utf8_lossy(&text).into_owned())
        };
        read().map_err(|source| Error::Io {
            step: "read about the process",
            source,
        })
    }

    /// One thread, and no descriptor but the three that every program has: others cannot be cast.
    fn is_alone(&self) -> Result<(), Error> {
        let names = |directory: &str| -> Result<Vec<String>, Error> {
            let entries = fs::read_dir(format!("/proc/{}/{directory}", self.process.0));
            let entries = entries.map_err(|source| Error::Io {
                step: "read about the process",
                source,
            })?;
            let mut names: Vec<String> = entries
                .flatten()
                .filter_map(|entry| entry.file_name().into_string().ok())
                .collect();
            names.sort();
            Ok(names)
        };
        let threads = names("task")?.len();
        if threads != 1 {
            return Err(Error::Unfit(format!("has {threads} threads")));
        }
        let descriptors = names("fd")?;
        match descriptors == ["0", "1", "2"] {
            true => Ok(()),
            false => Err(Error::Unfit(format!("has the descriptors {}", descriptors.join(", ")))),
        }
    }

    /// Copies what a mapping holds.
    fn mapping(&mut self, mapping: &Mapping) -> Result<(), Error> {
        let may_write = mapping.protection & libc::PROT_WRITE as u32 != 0;
        if mapping.is_shared && may_write {
            return Err(Error::Unfit(format!(
                "shares memory that it can write to (`{}`)",
                mapping.name
            )));
        }
        let (start, end) = (mapping.range.start, mapping.range.end);
        if mapping.name == "[stack]" {
            self.regions
                .push(region(end.saturating_sub(STACK).min(start), end, mapping, None));
        }
        if mapping.protection == 0 {
            self.regions.push(region(start, end, mapping, None));
            return Ok(());
        }
        // Pieces that follow each other in memory and in the file are one.
        let mut piece: Option<(u64, u64)> = None;
        let mut at = start;
        let mut zeros = start;
        let mut buffer = vec![0; CHUNK as usize];
        while at < end {
            let length = CHUNK.min(end - at);
            let pages = &mut buffer[..length as usize];
            self.read(at, pages);
            self.lay_frame(at, pages);
            for (number, page) in pages.chunks(PAGE as usize).enumerate() {
                let here = at + number as u64 * PAGE;
                if may_write && page.iter().all(|byte| *byte == 0) {
                    continue;
                }
                // `zeros` is where the page after the last one that was kept is.
                if may_write && here - zeros >= ZEROS || (piece.is_none() && here > zeros) {
                    if let Some((from, offset)) = piece.take() {
                        self.regions.push(region(from, zeros, mapping, Some(offset)));
                    }
                    self.hole(zeros, here, mapping);
                }
                let (from, offset) = *piece.get_or_insert((here, self.end));
                self.write(offset + (here - from), page)?;
                zeros = here + PAGE;
            }
            at += length;
        }
        if let Some((from, offset)) = piece {
            self.regions.push(region(from, zeros, mapping, Some(offset)));
        }
        self.hole(zeros, end, mapping);
        Ok(())
    }

    /// Zeros, unless there are some below already, as for the stack.
    fn hole(&mut self, start: u64, end: u64, mapping: &Mapping) {
        if start < end && mapping.name != "[stack]" {
            self.regions.push(region(start, end, mapping, None));
        }
    }

    /// What cannot be read, as a page behind the end of its file, is zeros.
    fn read(&self, at: u64, pages: &mut [u8]) {
        pages.fill(0);
        if self.pages.read_exact_at(pages, at).is_ok() {
            return;
        }
        for (number, page) in pages.chunks_mut(PAGE as usize).enumerate() {
            if self.pages.read_exact_at(page, at + number as u64 * PAGE).is_err() {
                page.fill(0);
            }
        }
    }

    /// Puts what the process goes on from where its stack has it.
    fn lay_frame(&self, at: u64, pages: &mut [u8]) {
        let (start, bytes) = &self.frame;
        for (number, byte) in bytes.iter().enumerate() {
            let place = start + number as u64;
            if let Some(place) = place.checked_sub(at)
                && let Some(to) = pages.get_mut(place as usize)
            {
                *to = *byte;
            }
        }
    }

    fn write(&mut self, offset: u64, page: &[u8]) -> Result<(), Error> {
        if offset > MOST_BYTES {
            return Err(Error::Unfit(format!("has more than {MOST_BYTES} bytes of memory")));
        }
        self.end = self.end.max(offset + PAGE);
        self.to.write_all_at(page, offset).map_err(|source| Error::Io {
            step: "write a memory file",
            source,
        })
    }

    /// Where the kernel has it that things are.
    fn layout(&self, mappings: &[Mapping]) -> Result<wire::MemoryLayout, Error> {
        let stat = self.text("stat")?;
        // The name, field 2, may hold anything but a bracket that is the last.
        let rest = stat.rsplit_once(") ").map(|(_, rest)| rest).unwrap_or_default();
        let fields: Vec<u64> = rest
            .split_whitespace()
            .map(|field| field.parse().unwrap_or_default())
            .collect();
        // By its number in proc_pid_stat(5).
        let field = |number: usize| fields.get(number - 3).copied().unwrap_or_default();
        let start_brk = field(47);
        let heap = mappings.iter().find(|mapping| mapping.name == "[heap]");
        Ok(wire::MemoryLayout {
            start_code: field(26),
            end_code: field(27),
            start_data: field(45),
            end_data: field(46),
            start_brk,
            brk: heap.map_or(start_brk, |heap| heap.range.end),
            start_stack: field(28),
            arg_start: field(48),
            arg_end: field(49),
            env_start: field(50),
            env_end: field(51),
        })
    }
}

/// Which pages of a region a process has, by proc_pid_pagemap(5); as one where but few lie between.
fn hot(region: &wire::Region, pages: &File) -> Vec<wire::Region> {
    const PRESENT: u64 = 1 << 63;
    const SHARED: u64 = 1 << 61;
    let may_write = region.protection & libc::PROT_WRITE as u32 != 0;
    // Pages that nobody asked for: of its own they are memory, shared ones an entry in a table.
    let gap = if may_write { 1 } else { 16 };
    let mut entries = vec![0; (region.length / PAGE * 8) as usize];
    if pages.read_exact_at(&mut entries, region.start / PAGE * 8).is_err() {
        return Vec::new();
    }
    let mut runs: Vec<wire::Region> = Vec::new();
    for (number, entry) in entries.as_chunks::<8>().0.iter().enumerate() {
        let entry = u64::from_ne_bytes(*entry);
        let is_own = entry & SHARED == 0;
        if entry & PRESENT == 0 || (may_write && !is_own) {
            continue;
        }
        let start = region.start + number as u64 * PAGE;
        match runs.last_mut() {
            Some(run) if start <= run.start + run.length + gap * PAGE => run.length = start + PAGE - run.start,
            Some(_) | None => runs.push(wire::Region {
                start,
                length: PAGE,
                protection: region.protection,
                ..wire::Region::default()
            }),
        }
    }
    runs
}

fn region(start: u64, end: u64, mapping: &Mapping, offset: Option<u64>) -> wire::Region {
    wire::Region {
        start,
        length: end - start,
        protection: mapping.protection,
        offset,
        // Most of it will be written at once, and the kernel shows the arguments only where they are the process's own.
        copied: offset.is_some() && mapping.name == "[stack]",
        name: if maps::is_of_the_kernel(&mapping.name) {
            mapping.name.clone()
        } else {
            String::new()
        },
    }
}

/// Where the C library keeps the number of the thread, as it told fork: clone(2), whose arguments are still in the registers.
fn thread_id_address(registers: &libc::user_regs_struct) -> Result<u64, Error> {
    let both = (libc::CLONE_CHILD_SETTID | libc::CLONE_CHILD_CLEARTID) as u64;
    match registers.orig_rax as libc::c_long {
        libc::SYS_fork => Ok(0),
        libc::SYS_clone => match registers.rdi & both {
            0 => Ok(0),
            flags if flags == both => Ok(registers.r10),
            _ => Err(Error::Unfit("forked in a way that is not known".to_owned())),
        },
        _ => Err(Error::Unfit("forked in a way that is not known".to_owned())),
    }
}

/// What rt_sigreturn(2) goes on from (struct rt_sigframe of the kernel, without what it does not read), and where it lies: floating
/// point registers, then `ucontext`.
fn frame(registers: &libc::user_regs_struct, floats: &[u8; FLOATS], blocked: u64) -> (u64, Vec<u8>) {
    /// The segment of stacks is told.
    const UC_SIGCONTEXT_SS: u64 = 2;
    const UC_STRICT_RESTORE_SS: u64 = 4;
    const SS_DISABLE: u64 = 2;
    /// More than the kernel checks that it can read: a `siginfo` follows what is used.
    const ROOM: u64 = 1024;
    let start = (registers.rsp - RED_ZONE - FLOATS as u64 - ROOM) & !63;
    let words = [
        UC_SIGCONTEXT_SS | UC_STRICT_RESTORE_SS,
        0,
        // No stack of its own for signals.
        0,
        SS_DISABLE,
        0,
        registers.r8,
        registers.r9,
        registers.r10,
        registers.r11,
        registers.r12,
        registers.r13,
        registers.r14,
        registers.r15,
        registers.rdi,
        registers.rsi,
        registers.rbp,
        registers.rbx,
        registers.rdx,
        registers.rax,
        registers.rcx,
        registers.rsp,
        registers.rip,
        registers.eflags,
        // Segments: code, gs, fs, stack.
        registers.cs | registers.ss << 48,
        0,
        0,
        0,
        0,
        start,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        blocked,
    ];
    let mut floats = *floats;
    // Tells the kernel that nothing follows that part.
    floats[464..].fill(0);
    let words = words.iter().flat_map(|word: &u64| word.to_ne_bytes());
    (start, floats.into_iter().chain(words).collect())
}
