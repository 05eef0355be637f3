//! A process that goes on as another that was taken before: its mould.
//!
//! Everything is prepared while this is still the guest's program: a list of system calls in memory of its own (the *script*),
//! and a few instructions that do them one after the other. Then there is no way back: they unmap the guest, map the mould's
//! pages where they were, move the kernel's own pages to where the mould knows them, install the filter, and let
//! rt_sigreturn(2) set the registers. One page stays mapped, which holds those instructions.
//!
//! The pages are mapped privately: what this process writes is its own, what it only reads is shared with all others of its
//! mould. Its rights, limits and filter are those of any program of the sandbox: none comes from the mould.
#![expect(unsafe_code, reason = "replaces the memory of this process")]

use std::fs;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;

use super::maps;
use crate::wire::{Mould, Region};

const PAGE: u64 = 4096;
/// Above all that a process can map.
const TOP: u64 = 0x7fff_ffff_f000;
/// Where the script may lie: between what programs and what libraries are mapped at.
const PLACES: [u64; 4] = [0x2000_0000_0000, 0x2800_0000_0000, 0x3000_0000_0000, 0x3800_0000_0000];
/// Most regions: more than the kernel lets a process have are a mistake.
const MOST_REGIONS: usize = 32 << 10;
const RSEQ_LENGTH: u32 = 32;
const RSEQ_UNREGISTER: u32 = 1;
const PR_SET_MM: u64 = 35;
const PR_SET_MM_MAP: u64 = 14;
const ARCH_SET_GS: u64 = 0x1001;
const ARCH_SET_FS: u64 = 0x1002;

/// Why a process cannot be cast here.
#[derive(Debug)]
pub struct Unfit(pub String, pub Option<Errno>);

impl Unfit {
    fn new(why: &str) -> Self {
        Self(why.to_owned(), None)
    }
}

/// One system call. The instructions below know this layout.
#[repr(C)]
#[derive(Clone, Copy)]
struct Call {
    number: u64,
    arguments: [u64; 6],
    /// Not 0: its failure is the end of the process.
    must: u64,
    /// Where the low half of its result is written; 0 = nowhere.
    store: u64,
}

/// The number that ends the list.
const LAST: u64 = u64::MAX;

/// A process that is about to be cast.
pub struct Cast {
    /// The instructions, then the script.
    place: u64,
    length: u64,
    first: u64,
    frame: u64,
}

impl Cast {
    /// Prepares everything that can fail.
    pub fn prepare(mould: &Mould, memory: &OwnedFd, filter: &[libc::sock_filter]) -> Result<Self, Unfit> {
        if !cfg!(target_arch = "x86_64") {
            return Err(Unfit::new("this is no processor for it"));
        }
        no_sequences()?;
        let text = fs::read_to_string("/proc/self/maps").map_err(|error| Unfit(error.to_string(), None))?;
        let own = maps::parse(&text).map_err(|error| Unfit(error.to_string(), None))?;
        let own: Vec<Region> = own
            .into_iter()
            .filter(|one| maps::is_of_the_kernel(&one.name))
            .map(|one| Region {
                start: one.range.start,
                length: one.range.end - one.range.start,
                protection: one.protection,
                name: one.name,
                ..Region::default()
            })
            .collect();
        check(mould, &own)?;
        let mut script = Script::default();
        script.calls(mould, memory, filter, &own)
    }

    /// Goes on as the mould's process.
    pub fn go(self) -> ! {
        // SAFETY: `place` holds a copy of the instructions, which need no stack and read the script alone. What they do to the
        // memory of this process is what this function is for: it does not return.
        #[cfg(target_arch = "x86_64")]
        unsafe {
            std::arch::asm!(
                "jmp {place}",
                place = in(reg) self.place,
                in("r12") self.first,
                in("r13") self.frame,
                in("r14") self.place + PAGE,
                in("r15") self.length - PAGE,
                options(noreturn)
            )
        }
        #[cfg(not(target_arch = "x86_64"))]
        super::sys::exit(127)
    }
}

/// Refuses where the C library of this program uses restartable sequences: the kernel would go on writing to their place.
fn no_sequences() -> Result<(), Unfit> {
    #[repr(C, align(32))]
    struct Area([u8; RSEQ_LENGTH as usize]);
    let mut area = Area([0; RSEQ_LENGTH as usize]);
    const SIGNATURE: u32 = 0x5305_3053;
    // SAFETY: the area outlives its registration, which ends with the second call.
    let registered = unsafe {
        let address = area.0.as_mut_ptr();
        let register = |flags: u32| libc::syscall(libc::SYS_rseq, address, RSEQ_LENGTH, flags, SIGNATURE);
        Errno::result(register(0)).and_then(|_| Errno::result(register(RSEQ_UNREGISTER)))
    };
    match registered {
        Ok(_) | Err(Errno::ENOSYS) => Ok(()),
        Err(errno) => Err(Unfit("the guest has restartable sequences".to_owned(), Some(errno))),
    }
}

fn range(region: &Region) -> Range<u64> {
    region.start..region.start.saturating_add(region.length)
}

fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

/// Whether all of it can be where it must be.
fn check(mould: &Mould, own: &[Region]) -> Result<(), Unfit> {
    let is_sound = |region: &Region| {
        region.start.is_multiple_of(PAGE)
            && region.length.is_multiple_of(PAGE)
            && region.length > 0
            && range(region).end <= TOP
    };
    let all = mould.regions.iter().chain(&mould.kernel_regions);
    if !all.clone().all(is_sound) || mould.regions.len() + mould.hot.len() > MOST_REGIONS {
        return Err(Unfit::new("the mould makes no sense"));
    }
    let same = |(one, other): (&Region, &Region)| one.name == other.name && one.length == other.length;
    if own.len() != mould.kernel_regions.len() || !own.iter().zip(&mould.kernel_regions).all(same) {
        return Err(Unfit::new("the kernel's own pages are others here"));
    }
    for target in &mould.kernel_regions {
        let taken = |other: &Region| overlap(&range(target), &range(other)) && range(target) != range(other);
        if own.iter().any(taken)
            || mould
                .regions
                .iter()
                .any(|region| overlap(&range(target), &range(region)))
        {
            return Err(Unfit::new("the kernel's own pages are in the way"));
        }
    }
    match own
        .iter()
        .any(|own| mould.regions.iter().any(|region| overlap(&range(own), &range(region))))
    {
        true => Err(Unfit::new("the kernel's own pages are in the way")),
        false => Ok(()),
    }
}

/// The script as it is written: texts and tables first, the calls after them.
#[derive(Default)]
struct Script {
    calls: Vec<Call>,
    data: Vec<u8>,
}

/// A place in the script's data; its address is known once it is mapped.
#[derive(Clone, Copy)]
struct At(u64);

impl Script {
    fn put(&mut self, bytes: &[u8]) -> At {
        self.data.resize(self.data.len().next_multiple_of(16), 0);
        let at = At(self.data.len() as u64);
        self.data.extend_from_slice(bytes);
        at
    }

    fn call<const N: usize>(&mut self, number: libc::c_long, arguments: [u64; N], must: bool) -> &mut Call {
        let mut all = [0; 6];
        all[..N].copy_from_slice(&arguments);
        let at = self.calls.len();
        self.calls.push(Call {
            number: number as u64,
            arguments: all,
            must: u64::from(must),
            store: 0,
        });
        &mut self.calls[at]
    }

    fn must<const N: usize>(&mut self, number: libc::c_long, arguments: [u64; N]) {
        self.call(number, arguments, true);
    }

    fn calls(
        &mut self,
        mould: &Mould,
        memory: &OwnedFd,
        filter: &[libc::sock_filter],
        own: &[Region],
    ) -> Result<Cast, Unfit> {
        let layout = self.layout(mould)?;
        let name = self.put(&[&mould.name[..mould.name.len().min(15)], &[0]].concat());
        let instructions: Vec<u8> = filter
            .iter()
            .flat_map(|step| {
                let ([a, b], [c, d, e, f]) = (step.code.to_ne_bytes(), step.k.to_ne_bytes());
                [a, b, step.jt, step.jf, c, d, e, f]
            })
            .collect();
        let instructions = self.put(&instructions);
        let program = self.put(&[0; 16]);

        // More than enough for what is written below.
        let room = self.data.len() + (mould.regions.len() + mould.hot.len() + own.len() + 64) * size_of::<Call>();
        let length = (PAGE + room as u64).next_multiple_of(PAGE);
        let place = place(mould, own, length)?;
        let base = place + PAGE;
        let at = |At(offset): At| base + offset;
        let length_of_filter = (filter.len() as u16).to_ne_bytes();
        self.data[program.0 as usize..][..2].copy_from_slice(&length_of_filter);
        self.data[program.0 as usize + 8..][..8].copy_from_slice(&at(instructions).to_ne_bytes());

        // Everything but the script and the kernel's own pages goes.
        let mut kept: Vec<Range<u64>> = own
            .iter()
            .map(range)
            .chain(std::iter::once(place..place + length))
            .collect();
        kept.sort_by_key(|range| range.start);
        let mut from = 0;
        for range in kept {
            if range.start > from {
                self.must(libc::SYS_munmap, [from, range.start - from]);
            }
            from = range.end;
        }
        self.must(libc::SYS_munmap, [from, TOP - from]);
        for (own, target) in own.iter().zip(&mould.kernel_regions) {
            if own.start != target.start {
                let flags = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as u64;
                self.must(
                    libc::SYS_mremap,
                    [own.start, own.length, own.length, flags, target.start],
                );
            }
        }
        for region in &mould.regions {
            if let Some(offset) = region.offset.filter(|_| region.copied) {
                let memory = memory.as_raw_fd() as u64;
                self.must(libc::SYS_pread64, [memory, region.start, region.length, offset]);
                continue;
            }
            let flags = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE;
            let (flags, descriptor) = match region.offset {
                Some(_) => (flags, memory.as_raw_fd()),
                None => (flags | libc::MAP_ANONYMOUS, -1),
            };
            let (start, length, protection) = (region.start, region.length, u64::from(region.protection));
            let (flags, descriptor) = (flags as u64, descriptor as u64);
            self.must(
                libc::SYS_mmap,
                [
                    start,
                    length,
                    protection,
                    flags,
                    descriptor,
                    region.offset.unwrap_or_default(),
                ],
            );
        }
        for region in &mould.hot {
            let advice = match region.protection & libc::PROT_WRITE as u32 {
                0 => libc::MADV_POPULATE_READ,
                _ => libc::MADV_POPULATE_WRITE,
            };
            // Each page that is not brought in now is when it is touched.
            self.call(libc::SYS_madvise, [region.start, region.length, advice as u64], false);
        }
        // Where the heap ends, for the most part. The kernel may be without this call, and then casts nobody.
        self.must(
            libc::SYS_prctl,
            [PR_SET_MM, PR_SET_MM_MAP, at(layout), size_of::<Layout>() as u64],
        );
        self.call(libc::SYS_prctl, [libc::PR_SET_NAME as u64, at(name)], false);
        self.must(libc::SYS_arch_prctl, [ARCH_SET_FS, mould.fs_base]);
        self.must(libc::SYS_arch_prctl, [ARCH_SET_GS, mould.gs_base]);
        if mould.thread_id_address != 0 {
            self.call(libc::SYS_set_tid_address, [mould.thread_id_address], true)
                .store = mould.thread_id_address;
        }
        if let Some(rseq) = &mould.rseq {
            let (length, signature) = (rseq.length.into(), rseq.signature.into());
            self.must(libc::SYS_rseq, [rseq.address, length, 0, signature]);
        }
        // As after an execve: nothing of the guest is in this memory any more.
        self.must(libc::SYS_prctl, [libc::PR_SET_DUMPABLE as u64, 1]);
        self.must(libc::SYS_close_range, [3, u64::from(u32::MAX), 0]);
        self.must(
            libc::SYS_seccomp,
            [u64::from(libc::SECCOMP_SET_MODE_FILTER), 0, at(program)],
        );
        self.call(LAST as libc::c_long, [], false);
        let calls = self.write(place, length)?;
        Ok(Cast {
            place,
            length,
            first: base + calls,
            frame: mould.frame,
        })
    }

    /// struct prctl_mm_map
    fn layout(&mut self, mould: &Mould) -> Result<At, Unfit> {
        let layout = mould
            .layout
            .as_ref()
            .ok_or_else(|| Unfit::new("the mould makes no sense"))?;
        let map: Layout = [
            layout.start_code,
            layout.end_code,
            layout.start_data,
            layout.end_data,
            layout.start_brk,
            layout.brk,
            layout.start_stack,
            layout.arg_start,
            layout.arg_end,
            layout.env_start,
            layout.env_end,
            // No auxiliary vector, and (upper half) no other program: exe_fd is -1.
            0,
            u64::from(u32::MAX) << 32,
        ];
        Ok(self.put(&map.map(u64::to_ne_bytes).concat()))
    }

    /// Writes instructions and script to their place; where in the data the calls begin.
    fn write(&mut self, place: u64, length: u64) -> Result<u64, Unfit> {
        let calls = self.data.len().next_multiple_of(16);
        debug_assert!(calls + self.calls.len() * size_of::<Call>() <= (length - PAGE) as usize);
        let code = code();
        debug_assert!(code.len() <= PAGE as usize);
        // SAFETY: the range was just mapped, for nobody else, and holds all three parts, as checked above; a `Call` may be
        // written at any multiple of 16.
        unsafe {
            std::ptr::copy_nonoverlapping(code.as_ptr(), place as *mut u8, code.len());
            let data = (place + PAGE) as *mut u8;
            std::ptr::copy_nonoverlapping(self.data.as_ptr(), data, self.data.len());
            let to = data.add(calls).cast::<Call>();
            std::ptr::copy_nonoverlapping(self.calls.as_ptr(), to, self.calls.len());
            let protection = libc::PROT_READ | libc::PROT_EXEC;
            Errno::result(libc::mprotect(place as *mut libc::c_void, PAGE as usize, protection))
                .map_err(|errno| Unfit("could not make the script".to_owned(), Some(errno)))?;
        }
        Ok(calls as u64)
    }
}

type Layout = [u64; 13];

/// Maps room for the script, away from all that the mould needs.
fn place(mould: &Mould, own: &[Region], length: u64) -> Result<u64, Unfit> {
    let all = mould.regions.iter().chain(&mould.kernel_regions).chain(own).map(range);
    for place in PLACES {
        let wanted = place..place + length;
        if all.clone().any(|taken| overlap(&taken, &wanted)) {
            continue;
        }
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: an anonymous mapping that takes the place of no other.
        let mapped = unsafe { libc::mmap(place as *mut libc::c_void, length as usize, protection, flags, -1, 0) };
        if mapped as u64 == place {
            return Ok(place);
        }
    }
    Err(Unfit::new("there is no place for the script"))
}

/// The instructions that do a script.
#[cfg(target_arch = "x86_64")]
fn code() -> &'static [u8] {
    unsafe extern "C" {
        static exuvia_cast_begin: u8;
        static exuvia_cast_end: u8;
    }
    // SAFETY: both stand around the same instructions below, which are never written.
    unsafe {
        let (begin, end) = (&raw const exuvia_cast_begin, &raw const exuvia_cast_end);
        std::slice::from_raw_parts(begin, end as usize - begin as usize)
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn code() -> &'static [u8] {
    &[]
}

// r12: the next call; r13: the frame; r14, r15: where the script is, and its length. The kernel keeps all of them.
#[cfg(target_arch = "x86_64")]
std::arch::global_asm!(
    ".globl exuvia_cast_begin",
    ".hidden exuvia_cast_begin",
    ".globl exuvia_cast_end",
    ".hidden exuvia_cast_end",
    "exuvia_cast_begin:",
    "2:",
    "mov rax, [r12]",
    "cmp rax, -1",
    "je 5f",
    "mov rdi, [r12 + 8]",
    "mov rsi, [r12 + 16]",
    "mov rdx, [r12 + 24]",
    "mov r10, [r12 + 32]",
    "mov r8, [r12 + 40]",
    "mov r9, [r12 + 48]",
    "syscall",
    "cmp qword ptr [r12 + 56], 0",
    "je 3f",
    "cmp rax, -4095",
    "jae 6f",
    "3:",
    "mov rcx, [r12 + 64]",
    "test rcx, rcx",
    "jz 4f",
    "mov dword ptr [rcx], eax",
    "4:",
    "add r12, 72",
    "jmp 2b",
    // munmap(script), rt_sigreturn
    "5:",
    "mov rdi, r14",
    "mov rsi, r15",
    "mov eax, 11",
    "syscall",
    "mov rsp, r13",
    "mov eax, 15",
    "syscall",
    // exit_group(127)
    "6:",
    "mov edi, 127",
    "mov eax, 231",
    "syscall",
    "ud2",
    "exuvia_cast_end:",
);

#[cfg(test)]
mod tests {
    use super::*;

    fn region(start: u64, length: u64, name: &str) -> Region {
        Region {
            start,
            length,
            name: name.to_owned(),
            ..Region::default()
        }
    }

    #[test]
    fn what_would_lie_over_the_kernels_own_pages_or_outside_is_refused() {
        let own = [
            region(0x7000_0000, 0x4000, "[vvar]"),
            region(0x7000_4000, 0x2000, "[vdso]"),
        ];
        let of = |kernel: &[Region], regions: &[Region]| Mould {
            kernel_regions: kernel.to_vec(),
            regions: regions.to_vec(),
            ..Mould::default()
        };
        let verdict = |mould: &Mould| check(mould, &own).map_err(|Unfit(why, _)| why);
        let moved = [
            region(0x6000_0000, 0x4000, "[vvar]"),
            region(0x6000_4000, 0x2000, "[vdso]"),
        ];
        assert_eq!(verdict(&of(&own, &[region(0x40_0000, PAGE, "")])), Ok(()));
        assert_eq!(verdict(&of(&moved, &[region(0x40_0000, PAGE, "")])), Ok(()));
        let near = [
            region(0x6fff_f000, 0x4000, "[vvar]"),
            region(0x7000_3000, 0x2000, "[vdso]"),
        ];
        let way = Err("the kernel's own pages are in the way".to_owned());
        assert_eq!(verdict(&of(&near, &[])), way, "a move onto itself");
        for at in [0x7000_0000, 0x6fff_f000, 0x7000_5000] {
            assert_eq!(verdict(&of(&moved, &[region(at, 2 * PAGE, "")])), way, "{at:x}");
        }
        assert_eq!(verdict(&of(&moved, &[region(0x6000_1000, PAGE, "")])), way);
        let others = Err("the kernel's own pages are others here".to_owned());
        assert_eq!(verdict(&of(&own[..1], &[])), others);
        assert_eq!(
            verdict(&of(&[region(0x7000_0000, 0x5000, "[vvar]"), own[1].clone()], &[])),
            others
        );
        let nonsense = Err("the mould makes no sense".to_owned());
        for bad in [
            region(1, PAGE, ""),
            region(PAGE, 1, ""),
            region(PAGE, 0, ""),
            region(TOP, PAGE, ""),
            region(!0xfff, PAGE, ""),
        ] {
            assert_eq!(verdict(&of(&own, &[bad])), nonsense);
        }
    }
}
