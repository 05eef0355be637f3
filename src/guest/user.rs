//! Which user a program is to be: a name or a number of the sandbox's own `/etc/passwd`.

use std::fs::File;
use std::io::Read;

use super::child::fault;
use crate::wire::Fault;

/// A file that is longer is not one of users.
const MAX_PASSWD: u64 = 1 << 20;
/// Users that may be asked for, from 1 above the base on.
const RANGE: u32 = 1 << 16;

/// uid and gid of `user`, which may be any of the 65,535 above `base`: never root, and nobody of another sandbox.
pub fn resolve(user: &str, base: u32) -> Result<(u32, u32), Fault> {
    let mut text = Vec::new();
    // Without the file there are just numbers.
    if let Ok(file) = File::open("/etc/passwd") {
        let _ = file.take(MAX_PASSWD).read_to_end(&mut text);
    }
    within(find(user, &text)?, user, base)
}

fn find(user: &str, passwd: &[u8]) -> Result<(u32, u32), Fault> {
    let number = user.parse::<u32>().ok();
    for line in passwd.split(|byte| *byte == b'\n') {
        let Some((name, uid, gid)) = parse(line) else {
            continue;
        };
        if name == user.as_bytes() || number == Some(uid) {
            return Ok((uid, gid));
        }
    }
    match number {
        // A user without a name has a group of its own.
        Some(number) => Ok((number, number)),
        None => Err(fault(
            "user_not_found",
            format!("no user `{user}` in the sandbox"),
            None,
        )),
    }
}

fn parse(line: &[u8]) -> Option<(&[u8], u32, u32)> {
    let mut fields = line.split(|byte| *byte == b':');
    let number = |fields: &mut dyn Iterator<Item = &[u8]>| std::str::from_utf8(fields.next()?).ok()?.parse().ok();
    let name = fields.next()?;
    fields.next()?;
    Some((name, number(&mut fields)?, number(&mut fields)?))
}

fn within((uid, gid): (u32, u32), user: &str, base: u32) -> Result<(u32, u32), Fault> {
    let refused = |why: &str| {
        Err(fault(
            "user_refused",
            format!("a program may not be user `{user}`: {why}"),
            None,
        ))
    };
    let inside = |id: u32| id > base && id - base < RANGE;
    match (uid, gid) {
        (0, _) => refused("it is root"),
        (_, 0) => refused("its group is root's"),
        (uid, gid) if inside(uid) && inside(gid) => Ok((uid, gid)),
        _ => refused("it is none of this sandbox's own"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &[u8] =
        b"root:x:0:0::/:/bin/sh\nbroken\nsandbox:x:1000:1000::/tmp:/bin/sh\nstaff:x:7:0::/:\nweb:x:33:34::/:";

    fn of(user: &str, base: u32) -> Result<(u32, u32), String> {
        let found = find(user, PASSWD).and_then(|ids| within(ids, user, base));
        found.map_err(|fault| fault.code)
    }

    #[test]
    fn names_and_numbers_are_found_and_root_is_refused() {
        assert_eq!(of("sandbox", 0), Ok((1000, 1000)));
        assert_eq!(of("web", 0), Ok((33, 34)));
        assert_eq!(of("33", 0), Ok((33, 34)));
        assert_eq!(of("5000", 0), Ok((5000, 5000)));
        for refused in ["root", "0", "staff", "65536", "4294967295"] {
            assert_eq!(of(refused, 0), Err("user_refused".to_owned()), "{refused}");
        }
        for missing in ["nobody", "", "sand", "-1", "broken"] {
            assert_eq!(of(missing, 0), Err("user_not_found".to_owned()), "{missing}");
        }
        // Without a user namespace the ids are the host's.
        assert_eq!(of("web", 0x2000_0000), Err("user_refused".to_owned()));
        assert_eq!(of("536871912", 0x2000_0000), Ok((536_871_912, 536_871_912)));
    }
}
