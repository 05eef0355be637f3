//! Where each controller lives on this host, and which group a process is in.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::file::read;
use super::{Controller, Error, Group, Version};

/// The group that holds the groups of all sandboxes.
pub(super) const PARENT: &str = "exuvia";

/// The hierarchies of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hierarchies {
    version: Version,
    mounts: BTreeMap<Controller, Mount>,
}

/// Where a hierarchy is seen.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Mount {
    point: PathBuf,
    /// The group that is seen there; `/` but in a container.
    root: PathBuf,
}

impl Hierarchies {
    /// Finds them in this process's mount table. Version 1 is used where it has all controllers, else version 2.
    ///
    /// # Errors
    /// [`Error::Missing`] when neither version has all that a sandbox needs.
    pub fn detect() -> Result<Self, Error> {
        Self::of(&read(Path::new("/proc/self/mountinfo"))?, &|point| {
            fs::read_to_string(point.join("cgroup.controllers")).unwrap_or_default()
        })
    }

    /// `mounts` as in proc_pid_mountinfo(5); `controllers` tells those of a version 2 mount.
    fn of(mounts: &str, controllers: &dyn Fn(&Path) -> String) -> Result<Self, Error> {
        let mut v1 = BTreeMap::new();
        let mut v2 = BTreeMap::new();
        for line in mounts.lines() {
            let Some((mount, kind, options)) = parse(line) else {
                continue;
            };
            let (wanted, found, names): (&[Controller], _, Vec<String>) = match kind {
                "cgroup" => (
                    &Controller::V1,
                    &mut v1,
                    options.split(',').map(str::to_owned).collect(),
                ),
                "cgroup2" => {
                    let names = controllers(&mount.point);
                    let names = names.split_whitespace().map(str::to_owned).collect();
                    (&Controller::V2, &mut v2, names)
                }
                _ => continue,
            };
            for controller in wanted {
                if names.contains(&controller.to_string()) {
                    found.entry(*controller).or_insert_with(|| mount.clone());
                }
            }
        }
        let lacks = |wanted: &[Controller], found: &BTreeMap<Controller, Mount>| {
            let missing = wanted.iter().filter(|controller| !found.contains_key(controller));
            missing.map(ToString::to_string).collect::<Vec<_>>().join(", ")
        };
        let (no_v1, no_v2) = (lacks(&Controller::V1, &v1), lacks(&Controller::V2, &v2));
        if no_v1.is_empty() {
            Ok(Self {
                version: Version::V1,
                mounts: v1,
            })
        } else if no_v2.is_empty() {
            Ok(Self {
                version: Version::V2,
                mounts: v2,
            })
        } else {
            Err(Error::Missing { v1: no_v1, v2: no_v2 })
        }
    }

    pub fn version(&self) -> Version {
        self.version
    }

    /// Where each controller is mounted.
    pub fn roots(&self) -> impl Iterator<Item = (Controller, &Path)> {
        self.mounts
            .iter()
            .map(|(controller, mount)| (*controller, mount.point.as_path()))
    }

    /// The group of the sandbox `name`, whether it exists or not.
    pub fn group(&self, name: &str) -> Group {
        let dir = |mount: &Mount| mount.point.join(PARENT).join(name);
        let dirs = self.mounts.iter();
        Group::new(
            self.version,
            dirs.map(|(controller, mount)| (*controller, dir(mount))).collect(),
        )
    }

    /// The names of all sandboxes that have a group, of whatever data directory.
    pub fn names(&self) -> Vec<String> {
        let parents = self.mounts.values().map(|mount| mount.point.join(PARENT));
        let entries = parents.flat_map(|parent| fs::read_dir(parent).into_iter().flatten().flatten());
        // Files of the hierarchy stand beside them.
        let dirs = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        let mut names: Vec<String> = dirs.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// The group that the process `pid` is in, whoever made it.
    ///
    /// # Errors
    /// When there is no such process, or its group is not seen from here.
    pub fn group_of(&self, pid: i32) -> Result<Group, Error> {
        let path = PathBuf::from(format!("/proc/{pid}/cgroup"));
        let table = read(&path)?;
        let mut dirs = BTreeMap::new();
        for (controller, mount) in &self.mounts {
            let dir = self.place(&table, *controller, mount);
            let dir =
                dir.ok_or_else(|| Error::file(&path, io::Error::other(format!("no group counts {controller}"))))?;
            dirs.insert(*controller, dir);
        }
        Ok(Group::new(self.version, dirs))
    }

    /// A line of `table` is `NUMBER:CONTROLLERS:PATH`, cgroups(7).
    fn place(&self, table: &str, controller: Controller, mount: &Mount) -> Option<PathBuf> {
        let path = table.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':');
            let (number, names, path) = (parts.next()?, parts.next()?, parts.next()?);
            let is_it = match self.version {
                Version::V1 => names.split(',').any(|name| name == controller.to_string()),
                Version::V2 => number == "0" && names.is_empty(),
            };
            is_it.then_some(path)
        })?;
        Some(mount.point.join(Path::new(path).strip_prefix(&mount.root).ok()?))
    }
}

/// The mount, its kind, and the options of its file system.
fn parse(line: &str) -> Option<(Mount, &str, &str)> {
    let (left, right) = line.split_once(" - ")?;
    let mut left = left.split(' ').skip(3);
    let (root, point) = (left.next()?.into(), left.next()?.into());
    let mut right = right.split(' ');
    let (kind, options) = (right.next()?, right.nth(1)?);
    Some((Mount { point, root }, kind, options))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detect(mounts: &str, v2: &str) -> Result<Hierarchies, Error> {
        Hierarchies::of(mounts, &|_| v2.to_owned())
    }

    const V1: &str = "25 30 0:22 / /sys rw - sysfs sysfs rw\n\
        30 25 0:26 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:8 - cgroup cgroup rw,cpu,cpuacct\n\
        31 25 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
        32 25 0:28 / /sys/fs/cgroup/devices rw - cgroup cgroup rw,devices\n\
        33 25 0:29 / /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer\n\
        34 25 0:30 /outer /mnt/pids rw - cgroup cgroup rw,pids\n\
        35 25 0:31 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n\
        36 25 0:32 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
    const V2: &str = "36 25 0:32 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n";

    #[test]
    fn each_controller_is_found_where_it_is_mounted() {
        let hybrid = detect(V1, "hugetlb").unwrap();
        assert_eq!(hybrid.version(), Version::V1);
        let group = hybrid.group("sbx_1");
        assert_eq!(
            group.file(Controller::Cpuacct, "tasks"),
            Path::new("/sys/fs/cgroup/cpu,cpuacct/exuvia/sbx_1/tasks")
        );
        // cpu and cpuacct are one hierarchy here: one door.
        assert_eq!(group.doors().len(), 5);

        let unified = detect(V2, "cpuset cpu io memory pids").unwrap();
        assert_eq!(unified.version(), Version::V2);
        let group = unified.group("sbx_1");
        assert_eq!(group.cradle(), Some(Path::new("/sys/fs/cgroup/exuvia/sbx_1")));
        assert_eq!((group.doors(), hybrid.group("sbx_1").cradle()), (Vec::new(), None));
    }

    #[test]
    fn the_group_of_a_process_is_found_in_either_version() {
        let table = "9:memory:/docker/abc\n5:pids:/outer/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/docker/abc\n";
        let hybrid = detect(V1, "").unwrap();
        let place = |controller| hybrid.place(table, controller, &hybrid.mounts[&controller]);
        let found = [
            Controller::Memory,
            Controller::Pids,
            Controller::Cpuacct,
            Controller::Freezer,
        ]
        .map(place);
        let expected = [
            Some("/sys/fs/cgroup/memory/docker/abc"),
            Some("/mnt/pids/docker/abc"),
            Some("/sys/fs/cgroup/cpu,cpuacct/docker/abc"),
            None,
        ];
        assert_eq!(found, expected.map(|dir| dir.map(PathBuf::from)));

        let unified = detect(V2, "cpu memory pids").unwrap();
        let mount = &unified.mounts[&Controller::Memory];
        let found = unified.place("0::/system.slice/docker-abc.scope\n", Controller::Memory, mount);
        assert_eq!(found, Some("/sys/fs/cgroup/system.slice/docker-abc.scope".into()));
        assert!(matches!(unified.group_of(i32::MAX), Err(Error::File { .. })));
    }

    #[test]
    fn what_is_missing_is_named() {
        let mounts = V1.replace("rw,pids", "rw,other").replace("rw,memory", "rw,other");
        assert_eq!(
            detect(&mounts, "cpu").unwrap_err().to_string(),
            "this host has no usable control groups: version 1 lacks memory, pids, version 2 lacks memory, pids"
        );
    }
}
