//! Which devices a sandbox has, and what stands in for what it must not see. What that is, the server says.

use std::ffi::CStr;

/// Shown in place of the host's, which would tell which sandboxes share it over all their lives.
pub(super) const BOOT_ID: &CStr = c"/proc/sys/kernel/random/boot_id";

/// The devices of `/dev`: name, major and minor number.
pub const DEVICES: [(&CStr, u64, u64); 6] = [
    (c"null", 1, 3),
    (c"zero", 1, 5),
    (c"full", 1, 7),
    (c"random", 1, 8),
    (c"urandom", 1, 9),
    (c"tty", 5, 0),
];

/// Links in `/dev`: name, and what they hold.
pub(super) const LINKS: [(&CStr, &CStr); 5] = [
    (c"fd", c"/proc/self/fd"),
    (c"stdin", c"/proc/self/fd/0"),
    (c"stdout", c"/proc/self/fd/1"),
    (c"stderr", c"/proc/self/fd/2"),
    (c"ptmx", c"pts/ptmx"),
];

/// Of a template's root, below where `/dev` will be mounted: what hides a file and what hides a directory. The root is
/// read-only, and so are they.
pub(super) const EMPTY_FILE: &CStr = c"/dev/empty";
pub(super) const EMPTY_DIRECTORY: &CStr = c"/dev/void";
