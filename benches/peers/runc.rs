//! `runc`, as a process.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Result, succeeds};

/// `runc` with its own default configuration over a read-only view of the host, as the `host` image is.
pub struct Runc {
    dir: PathBuf,
    /// A container that stays.
    pub warm: String,
}

impl Runc {
    pub fn open(data: &Path) -> Result<Self> {
        let dir = data.join("runc");
        let root = dir.join("bundle/rootfs");
        fs::create_dir_all(root.join("usr"))?;
        for name in ["bin", "lib", "lib64"] {
            std::os::unix::fs::symlink(Path::new("usr").join(name), root.join(name))?;
        }
        for name in ["proc", "dev", "sys", "tmp"] {
            fs::create_dir(root.join(name))?;
        }
        let runc = Self {
            warm: format!("exuvia-bench-{}-warm", std::process::id()),
            dir,
        };
        succeeds(runc.command().arg("spec").arg("--bundle").arg(runc.dir.join("bundle")))?;
        runc.configure(&["sleep", "100000"])?;
        // The container keeps its streams open: none of them may be a pipe that is read to its end.
        let mut detached = runc.command();
        detached.args(["run", "--detach", &runc.warm]);
        let status = detached
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()?;
        if !status.success() {
            return Err(format!("{detached:?}: {status}").into());
        }
        Ok(runc)
    }

    pub fn command(&self) -> Command {
        let mut command = Command::new("runc");
        command
            .arg("--root")
            .arg(self.dir.join("state"))
            .current_dir(self.dir.join("bundle").canonicalize().unwrap_or_default());
        command
    }

    fn configure(&self, words: &[&str]) -> Result<()> {
        let path = self.dir.join("bundle/config.json");
        let mut config: serde_json::Value = serde_json::from_slice(&fs::read(&path)?)?;
        config["process"]["terminal"] = false.into();
        config["process"]["args"] = words.into();
        let usr =
            serde_json::json!({ "destination": "/usr", "type": "bind", "source": "/usr", "options": ["bind", "ro"] });
        let mounts = config["mounts"]
            .as_array_mut()
            .ok_or("runc's configuration has no mounts")?;
        if !mounts.contains(&usr) {
            mounts.push(usr);
        }
        Ok(fs::write(path, config.to_string())?)
    }

    /// One container from its making to its end.
    pub fn run(&self, words: &[&str]) -> Result<()> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        self.configure(words)?;
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("exuvia-bench-{}-{number:06}", std::process::id());
        succeeds(self.command().args(["run", &name]))
    }

    pub fn exec(&self, words: &[&str]) -> Result<()> {
        succeeds(self.command().args(["exec", &self.warm]).args(words))
    }
}

impl Drop for Runc {
    fn drop(&mut self) {
        if let Err(error) = succeeds(self.command().args(["delete", "--force", &self.warm])) {
            eprintln!("runc: the container {} stays: {error}", self.warm);
        }
    }
}
