//! What programs must not see or change in `/proc` and `/sys`: one list for all backends. A path that a kernel or a sandbox does
//! not have is no loss; whoever hides them passes over it.

/// Shown empty: they tell of the host or of its other users, or let someone watch or work on it.
pub const MASKED: [&str; 51] = [
    "/proc/acpi",
    "/proc/allocinfo",
    "/proc/asound",
    "/proc/buddyinfo",
    "/proc/bus",
    "/proc/cmdline",
    "/proc/config.gz",
    "/proc/consoles",
    "/proc/diskstats",
    "/proc/dma",
    "/proc/driver",
    "/proc/fs",
    "/proc/interrupts",
    "/proc/iomem",
    "/proc/ioports",
    "/proc/irq",
    "/proc/kallsyms",
    "/proc/kcore",
    "/proc/key-users",
    "/proc/keys",
    "/proc/kmsg",
    "/proc/kpagecgroup",
    "/proc/kpagecount",
    "/proc/kpageflags",
    "/proc/latency_stats",
    "/proc/modules",
    "/proc/mtrr",
    "/proc/pagetypeinfo",
    "/proc/partitions",
    // Whoever may write there makes the kernel watch for them.
    "/proc/pressure",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/slabinfo",
    "/proc/softirqs",
    "/proc/swaps",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/vmallocinfo",
    "/proc/zoneinfo",
    // A sandbox without sysfs has none of these.
    "/sys/block",
    "/sys/class/block",
    "/sys/class/dmi",
    "/sys/dev/block",
    "/sys/devices/virtual/dmi",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
    "/sys/fs/bpf",
    "/sys/fs/pstore",
    "/sys/kernel/debug",
    "/sys/kernel/security",
    "/sys/kernel/tracing",
];

/// Can be read, not written.
pub const READ_ONLY: [&str; 2] = ["/proc/sys", "/proc/sysrq-trigger"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lists_are_sorted_and_apart() {
        assert!(MASKED.is_sorted() && READ_ONLY.is_sorted());
        assert!(READ_ONLY.iter().all(|path| !MASKED.contains(path)));
    }
}
