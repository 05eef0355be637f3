//! `/proc/PID/maps`: what a process has mapped (proc_pid_maps(5)).

use std::io;
use std::ops::Range;

/// One mapping.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    pub range: Range<u64>,
    /// `PROT_*`
    pub protection: u32,
    pub is_shared: bool,
    /// A path, `[stack]` and the like, or empty.
    pub name: String,
}

/// All mappings, by address.
///
/// # Errors
/// `InvalidData` for what is no such text.
pub fn parse(text: &str) -> io::Result<Vec<Mapping>> {
    let line = |line| mapping(line).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "not a list of mappings"));
    text.lines().map(line).collect()
}

fn mapping(line: &str) -> Option<Mapping> {
    let mut fields = line.splitn(6, ' ');
    let (start, end) = fields.next()?.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    let flags = fields.next()?.as_bytes();
    let name = fields.nth(3).unwrap_or_default().trim_start();
    let bits = [
        (b'r', libc::PROT_READ),
        (b'w', libc::PROT_WRITE),
        (b'x', libc::PROT_EXEC),
    ];
    let protection = bits.iter().enumerate().try_fold(0, |all, (at, (letter, bit))| {
        Some(if flags.get(at)? == letter {
            all | *bit as u32
        } else {
            all
        })
    })?;
    Some(Mapping {
        range: number(start)?..number(end)?,
        protection,
        is_shared: *flags.get(3)? == b's',
        name: name.to_owned(),
    })
}

/// Mappings that are the kernel's own, and in each process.
pub fn is_of_the_kernel(name: &str) -> bool {
    name.starts_with("[vvar") || name == "[vdso]"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_with_and_without_a_name() {
        let text = "55e0-55f0 r-xp 00001000 fe:00 12                       /usr/bin/a b\n7f00-7f10 rw-s 00000000 00:00 0 \n7ff0-7ff1 ---p 00000000 00:00 0                          [vvar]\n";
        let mapping = |range, protection, is_shared, name: &str| Mapping {
            range,
            protection: protection as u32,
            is_shared,
            name: name.to_owned(),
        };
        let want = vec![
            mapping(0x55e0..0x55f0, libc::PROT_READ | libc::PROT_EXEC, false, "/usr/bin/a b"),
            mapping(0x7f00..0x7f10, libc::PROT_READ | libc::PROT_WRITE, true, ""),
            mapping(0x7ff0..0x7ff1, 0, false, "[vvar]"),
        ];
        assert_eq!(parse(text).unwrap(), want);
        for bad in ["x", "1-2", "1-2 rw", "1-z rw-p 0 0 0"] {
            parse(bad).unwrap_err();
        }
        assert!(
            parse(&std::fs::read_to_string("/proc/self/maps").unwrap())
                .unwrap()
                .iter()
                .any(|one| is_of_the_kernel(&one.name))
        );
    }
}
