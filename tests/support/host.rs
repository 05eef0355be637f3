//! The host from outside: what sandboxes, working directories, mounts, control groups and processes there are.

use std::fs;
use std::path::{Path, PathBuf};

/// The names in a directory of the data directory; none where it is missing.
pub fn names(data: &Path, folder: &str) -> Vec<String> {
    let entries = fs::read_dir(data.join(folder)).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// The sandboxes of a data directory, whole or in the making.
pub fn sandboxes(data: &Path) -> Vec<String> {
    names(data, "sandboxes")
}

/// The control groups of a sandbox that exist.
fn groups(sandbox: &str) -> Vec<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let roots = mounts.lines().filter_map(|line| {
        let mut words = line.split(' ').skip(1);
        let (target, kind) = (words.next()?, words.next()?);
        kind.starts_with("cgroup")
            .then(|| Path::new(target).join("exuvia").join(sandbox))
    });
    roots.filter(|group| group.exists()).collect()
}

/// The processes in a sandbox's control groups.
pub fn processes(sandbox: &str) -> Vec<i32> {
    let lists = groups(sandbox).into_iter().map(|group| group.join("cgroup.procs"));
    let texts = lists.filter_map(|list| fs::read_to_string(list).ok());
    let mut pids: Vec<i32> = texts
        .flat_map(|text| text.lines().filter_map(|line| line.parse().ok()).collect::<Vec<_>>())
        .collect();
    pids.sort_unstable();
    pids.dedup();
    pids
}

/// The process that is number 1 inside the sandbox.
pub fn init_of(sandbox: &str) -> Option<i32> {
    processes(sandbox).into_iter().find(|pid| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
        numbers.is_some_and(|numbers| numbers.split_whitespace().nth(1) == Some("1"))
    })
}

/// The processes that a process has for children.
pub fn children(pid: i32) -> Vec<i32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten()
        .flatten();
    let lists = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    lists
        .flat_map(|list| {
            list.split_whitespace()
                .filter_map(|pid| pid.parse().ok())
                .collect::<Vec<_>>()
        })
        .collect()
}

/// The images of volumes of a data directory that loop devices hold. The kernel lets go of one some time after its mount is gone.
pub fn images(data: &Path) -> Vec<String> {
    let devices = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let held = devices.filter_map(|device| fs::read_to_string(device.path().join("loop/backing_file")).ok());
    held.filter(|file| Path::new(file).starts_with(data)).collect()
}

/// Whatever there is on this host that belongs to a data directory or one of its sandboxes (promise 7).
pub fn traces(data: &Path, sandboxes: &[String]) -> Vec<String> {
    let data = data.to_str().unwrap();
    let mut traces: Vec<String> = Vec::new();
    for folder in ["sandboxes", "work"] {
        traces.extend(
            names(Path::new(data), folder)
                .into_iter()
                .map(|name| format!("{folder}/{name}")),
        );
    }
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let ours = |text: &str| text.contains(data) || sandboxes.iter().any(|name| text.contains(name.as_str()));
    traces.extend(
        mounts
            .lines()
            .filter(|line| ours(line))
            .map(|line| format!("mount {line}")),
    );
    let groups = sandboxes.iter().flat_map(|name| groups(name));
    traces.extend(groups.map(|group| format!("control group {}", group.display())));
    for process in fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path()) {
        let command = fs::read(process.join("cmdline")).unwrap_or_default();
        let group = fs::read_to_string(process.join("cgroup")).unwrap_or_default();
        if ours(&String::from_utf8_lossy(&command)) || ours(&group) {
            traces.push(format!("process {}", process.display()));
        }
    }
    traces
}
