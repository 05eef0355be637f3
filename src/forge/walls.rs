//! What of `/proc` is hidden or read-only in every sandbox, and which devices there are.

use std::ffi::CStr;

/// Shown empty: they tell of the host, or of its other users. Those that a kernel lacks are passed over.
pub const HIDDEN: [&CStr; 37] = [
    c"/proc/acpi",
    c"/proc/asound",
    c"/proc/buddyinfo",
    c"/proc/bus",
    c"/proc/cmdline",
    c"/proc/consoles",
    c"/proc/diskstats",
    c"/proc/dma",
    c"/proc/driver",
    c"/proc/fs",
    c"/proc/interrupts",
    c"/proc/iomem",
    c"/proc/ioports",
    c"/proc/irq",
    c"/proc/kcore",
    c"/proc/keys",
    c"/proc/key-users",
    c"/proc/kpagecount",
    c"/proc/kpageflags",
    c"/proc/kpagecgroup",
    c"/proc/latency_stats",
    c"/proc/mtrr",
    c"/proc/pagetypeinfo",
    c"/proc/partitions",
    // Whoever may write there makes the kernel watch for them.
    c"/proc/pressure",
    c"/proc/sched_debug",
    c"/proc/scsi",
    c"/proc/slabinfo",
    c"/proc/softirqs",
    c"/proc/timer_list",
    c"/proc/timer_stats",
    c"/proc/vmallocinfo",
    c"/proc/zoneinfo",
    c"/proc/kallsyms",
    c"/proc/modules",
    c"/proc/kmsg",
    c"/proc/config.gz",
];

/// Can be read, and not written.
pub const READ_ONLY: [&CStr; 2] = [c"/proc/sys", c"/proc/sysrq-trigger"];

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

/// Files that one tmpfs can hold: each costs kernel memory.
pub(super) const INODES: &CStr = c"10000";

/// Of a template's root, below where `/dev` will be mounted: what hides a file and what hides a directory. The root is
/// read-only, and so are they.
pub(super) const EMPTY_FILE: &CStr = c"/dev/empty";
pub(super) const EMPTY_DIRECTORY: &CStr = c"/dev/void";
