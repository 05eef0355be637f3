//! The system-call filter of programs in a sandbox: a profile (data, `policies/seccomp/`) compiled to classic BPF.
//!
//! Owns: the profile's format and its compilation. Must not know: who installs the result (the guest does, just before
//! `execve`). Calls that need no look at their arguments are decided by a binary search over ranges of numbers, written
//! here, because the kernel runs the filter once for every number when it is installed; the others by `seccompiler`.
//!
//! Other ABIs are killed: 32-bit calls (another audit architecture) and x32 (bit 30 of the number).

mod table;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use schemars::JsonSchema;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, sock_filter,
};
use serde::{Deserialize, Serialize};

/// The profile of every sandbox whose policy names no other.
pub const DEFAULT: &str = include_str!("../../../policies/seccomp/default.json");
/// A narrower one.
pub const STRICT: &str = include_str!("../../../policies/seccomp/strict.json");

/// The built-in profiles, from wide to narrow: each allows nothing that an earlier one does not.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Profile {
    #[default]
    Default,
    Strict,
}

impl Profile {
    /// Its text.
    pub fn text(self) -> &'static str {
        match self {
            Self::Default => DEFAULT,
            Self::Strict => STRICT,
        }
    }

    /// # Errors
    /// Only on an architecture that profiles are not written for.
    pub fn filter(self) -> Result<Vec<u8>, Error> {
        compile(self.text())
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Default => "default",
            Self::Strict => "strict",
        })
    }
}

/// All built-in profiles, compiled.
#[derive(Debug, Clone)]
pub struct Filters {
    default: Arc<[u8]>,
    strict: Arc<[u8]>,
}

impl Filters {
    /// # Errors
    /// Only on an architecture that profiles are not written for.
    pub fn compile() -> Result<Self, Error> {
        Ok(Self {
            default: Profile::Default.filter()?.into(),
            strict: Profile::Strict.filter()?.into(),
        })
    }

    pub fn of(&self, profile: Profile) -> &[u8] {
        match profile {
            Profile::Default => &self.default,
            Profile::Strict => &self.strict,
        }
    }
}

/// What is wrong with a profile.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the system-call profile does not parse")]
    Parse(#[from] serde_json::Error),
    #[error("the system-call profile names `{0}`, which is no system call")]
    UnknownCall(String),
    #[error("the system-call profile names `{0}`, which is no error it can give: use EPERM, EACCES or ENOSYS")]
    UnknownErrno(String),
    #[error("the system-call profile decides `{0}` twice")]
    Twice(String),
    #[error("the system-call profile gives `{0}`, which is no number of the form `0x1f`")]
    Number(String),
    #[error("the system-call profile makes too large a program")]
    TooLarge,
    #[error("the system-call profile does not compile")]
    Compile(#[from] seccompiler::BackendError),
    #[error("system-call filters are written for x86-64 only, not for `{0}`")]
    Architecture(&'static str),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    #[serde(default, rename = "comment")]
    _comment: String,
    default: String,
    errno: BTreeMap<String, Vec<String>>,
    allow: Vec<String>,
    allow_when: Vec<Conditional>,
}

/// Allowed when all of `when` hold. One call may be named by several of these.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Conditional {
    #[serde(default, rename = "comment")]
    _comment: String,
    call: String,
    when: Vec<Condition>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, deny_unknown_fields)]
enum Condition {
    /// `argument & mask == equals`, unsigned 64 bits.
    Equals { argument: u8, mask: String, equals: String },
    /// The lower half of `argument` is not this: for what the kernel takes as an int.
    Differs { argument: u8, differs: String },
}

/// What becomes of one system call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Allow,
    Errno(u32),
    Kill,
    /// Left to the rest of the program, which looks at arguments.
    Look,
}

/// Compiles a profile into an array of `struct sock_filter`, native endian, as `seccomp(2)` takes it.
///
/// # Errors
/// Any mistake in the profile: nothing is skipped.
pub fn compile(profile: &str) -> Result<Vec<u8>, Error> {
    let program = assemble(&serde_json::from_str(profile)?)?;
    let bytes = program.iter().flat_map(|step| {
        let [a, b] = step.code.to_ne_bytes();
        let [c, d, e, f] = step.k.to_ne_bytes();
        [a, b, step.jt, step.jf, c, d, e, f]
    });
    Ok(bytes.collect())
}

/// The filter of the built-in profile.
///
/// # Errors
/// Only on an architecture that the profile does not know.
pub fn default_filter() -> Result<Vec<u8>, Error> {
    compile(DEFAULT)
}

fn assemble(profile: &Written) -> Result<BpfProgram, Error> {
    if !cfg!(target_arch = "x86_64") {
        return Err(Error::Architecture(std::env::consts::ARCH));
    }
    let default = Verdict::Errno(errno(&profile.default)?);
    let mut verdicts = BTreeMap::new();
    let mut decide = |name: &str, verdict: Verdict| match verdicts.insert(number(name)?, verdict) {
        Some(earlier) if earlier != Verdict::Look || verdict != Verdict::Look => Err(Error::Twice(name.to_owned())),
        Some(_) | None => Ok(()),
    };
    for name in &profile.allow {
        decide(name, Verdict::Allow)?;
    }
    for (code, names) in &profile.errno {
        for name in names {
            decide(name, Verdict::Errno(errno(code)?))?;
        }
    }
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    for conditional in &profile.allow_when {
        decide(&conditional.call, Verdict::Look)?;
        let conditions = conditional.when.iter().map(condition).collect::<Result<_, _>>()?;
        rules
            .entry(number(&conditional.call)?)
            .or_default()
            .push(SeccompRule::new(conditions)?);
    }

    let mut program = vec![
        load(ARCHITECTURE),
        jump(JEQ, AUDIT_ARCH_X86_64, 1, 0),
        answer(Verdict::Kill),
        load(NUMBER),
    ];
    let mut open_ends = Vec::new();
    search(&ranges(&verdicts, default), &mut program, &mut open_ends)?;
    let end = program.len();
    for at in open_ends {
        program[at].k = (end - at - 1) as u32;
    }
    let mismatch = SeccompAction::Errno(errno(&profile.default)?);
    let rest = SeccompFilter::new(rules, mismatch, SeccompAction::Allow, TargetArch::x86_64)?;
    program.extend(BpfProgram::try_from(rest)?);
    // BPF_MAXINSNS
    if program.len() > 4096 {
        Err(Error::TooLarge)
    } else {
        Ok(program)
    }
}

/// Verdicts as ranges: each holds from its number up to the next one's. Starts at 0 and covers all.
fn ranges(verdicts: &BTreeMap<i64, Verdict>, default: Verdict) -> Vec<(u32, Verdict)> {
    const X32_BIT: u32 = 0x4000_0000;
    let mut ranges: Vec<(u32, Verdict)> = Vec::new();
    let known = (0..=table::highest()).map(|n| (n as u32, verdicts.get(&n).copied().unwrap_or(default)));
    let beyond = [
        (table::highest() as u32 + 1, Verdict::Errno(libc::ENOSYS as u32)),
        (X32_BIT, Verdict::Kill),
    ];
    for (number, verdict) in known.chain(beyond) {
        if ranges.last().is_none_or(|(_, last)| *last != verdict) {
            ranges.push((number, verdict));
        }
    }
    ranges
}

/// Emits a binary search over `ranges`; `open_ends` are the jumps that must lead behind it.
fn search(ranges: &[(u32, Verdict)], program: &mut BpfProgram, open_ends: &mut Vec<usize>) -> Result<(), Error> {
    if let [(_, verdict)] = ranges {
        if *verdict == Verdict::Look {
            open_ends.push(program.len());
        }
        program.push(answer(*verdict));
        return Ok(());
    }
    let (low, high) = ranges.split_at(ranges.len() / 2);
    let branch = program.len();
    program.push(jump(JGE, high[0].0, 0, 0));
    search(low, program, open_ends)?;
    program[branch].jt = u8::try_from(program.len() - branch - 1).map_err(|_| Error::TooLarge)?;
    search(high, program, open_ends)
}

const ARCHITECTURE: u32 = 4;
const NUMBER: u32 = 0;
const AUDIT_ARCH_X86_64: u32 = 0xc000_003e;
const JEQ: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const JGE: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;

/// Loads a word of `struct seccomp_data`.
fn load(offset: u32) -> sock_filter {
    step((libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16, offset)
}

fn jump(code: u16, k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code, jt, jf, k }
}

fn step(code: u16, k: u32) -> sock_filter {
    jump(code, k, 0, 0)
}

fn answer(verdict: Verdict) -> sock_filter {
    let ret = |k| step((libc::BPF_RET | libc::BPF_K) as u16, k);
    match verdict {
        Verdict::Allow => ret(libc::SECCOMP_RET_ALLOW),
        Verdict::Errno(errno) => ret(libc::SECCOMP_RET_ERRNO | errno),
        Verdict::Kill => ret(libc::SECCOMP_RET_KILL_PROCESS),
        Verdict::Look => step((libc::BPF_JMP | libc::BPF_JA) as u16, 0),
    }
}

fn number(name: &str) -> Result<i64, Error> {
    table::number(name).ok_or_else(|| Error::UnknownCall(name.to_owned()))
}

fn errno(name: &str) -> Result<u32, Error> {
    match name {
        "EPERM" => Ok(libc::EPERM as u32),
        "EACCES" => Ok(libc::EACCES as u32),
        "ENOSYS" => Ok(libc::ENOSYS as u32),
        _ => Err(Error::UnknownErrno(name.to_owned())),
    }
}

fn condition(condition: &Condition) -> Result<SeccompCondition, Error> {
    let (argument, length, operation, value) = match condition {
        Condition::Equals { argument, mask, equals } => {
            let masked = SeccompCmpOp::MaskedEq(hex(mask)?);
            (*argument, SeccompCmpArgLen::Qword, masked, hex(equals)?)
        }
        Condition::Differs { argument, differs } => {
            (*argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, hex(differs)?)
        }
    };
    Ok(SeccompCondition::new(argument, length, operation, value)?)
}

fn hex(text: &str) -> Result<u64, Error> {
    let digits = text.strip_prefix("0x");
    digits
        .and_then(|digits| u64::from_str_radix(digits, 16).ok())
        .ok_or_else(|| Error::Number(text.to_owned()))
}

#[cfg(test)]
mod tests;
