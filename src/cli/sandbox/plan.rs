//! What is to be made and run: decided from the flags and the policy before anything is.

use std::collections::BTreeMap;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use super::embedded::Run;
use crate::cli::Error;
use crate::error::Kind;
use crate::ids::SandboxId;
use crate::policy::{Policies, Policy};
use crate::sandbox::{BackendName, Capabilities, Command, Identity, ImageRef, Mount, Spec, Stdin, image};

/// One command, and the sandbox that it gets.
#[derive(Debug)]
pub(super) struct Plan {
    pub policy: Policy,
    pub backend: BackendName,
    pub image: ImageRef,
    pub mounts: Vec<Mount>,
    pub command: Command,
    /// The variables that the caller sets.
    asked: BTreeMap<String, String>,
    /// Whether standard input is passed on.
    pub stdin: bool,
    /// The system-call filter.
    pub filter: Vec<u8>,
}

impl Plan {
    pub fn new(run: Run, data_dir: &Path) -> Result<Self, Error> {
        let policy = Policies::load(&run.policy, data_dir)?;
        let image = image::pinned(run.image.unwrap_or_else(|| policy.image().clone()), data_dir)?;
        // What the image sets lies below what the caller does.
        let mut env = image::environment(&image, data_dir)?;
        let asked: BTreeMap<String, String> = run.env.into_iter().collect();
        env.extend(asked.clone());
        let backend = backend(&policy, run.backend, &image)?;
        let filter = policy
            .seccomp()
            .filter()
            .map_err(|error| Error::of(Kind::WrongState, &error))?;
        let most = policy.limits().wall_time;
        let command = Command {
            env,
            cwd: run.workdir.map(|dir| dir.into_os_string().into_vec()),
            timeout: Some(run.timeout.map_or(most, |asked| asked.min(most))),
            stdin: if run.stdin { Stdin::Open } else { Stdin::Null },
            ..Command::new(run.command.into_iter().map(OsStringExt::into_vec))
        };
        let mounts = policy.mounts().iter().cloned().chain(run.mount_ro).collect();
        Ok(Self {
            policy,
            backend,
            image,
            mounts,
            command,
            asked,
            stdin: run.stdin,
            filter,
        })
    }

    /// Adds variables of the sandbox's own: above what the image sets, below what the caller does.
    pub fn surround(&mut self, variables: &BTreeMap<String, String>) {
        let env = &mut self.command.env;
        env.extend(variables.clone());
        env.extend(self.asked.clone());
    }

    /// Refuses what the backend cannot give on this host: never something weaker.
    pub fn check(&self, able: &Capabilities) -> Result<(), Error> {
        let wanted = self.policy.isolation();
        if able.isolations.contains(&wanted) {
            return Ok(());
        }
        let given: Vec<String> = able.isolations.iter().map(ToString::to_string).collect();
        let given = if given.is_empty() {
            "none".to_owned()
        } else {
            given.join(", ")
        };
        Err(Error::new(
            Kind::WrongState,
            format!(
                "policy `{}` demands isolation `{wanted}`; the `{}` backend gives {given} on this host (see `exuvia doctor`)",
                self.policy.name(),
                self.backend
            ),
        ))
    }

    pub fn spec(&self, id: SandboxId, identity: Identity, workspace: PathBuf) -> Spec {
        Spec {
            id,
            image: self.image.clone(),
            isolation: self.policy.isolation(),
            limits: self.policy.limits().clone(),
            identity,
            workspace: Some(workspace),
            mounts: self.mounts.clone(),
            labels: std::collections::BTreeMap::new(),
        }
    }
}

/// The policy's backend binds; without one the flag chooses, then the image.
fn backend(policy: &Policy, asked: Option<BackendName>, image: &ImageRef) -> Result<BackendName, Error> {
    match (policy.backend(), asked) {
        (Some(named), Some(asked)) if named != asked => Err(Error::new(
            Kind::Denied,
            format!(
                "policy `{}` demands the backend `{named}`, not `{asked}`",
                policy.name()
            ),
        )),
        (Some(name), _) | (None, Some(name)) => Ok(name),
        (None, None) => Ok(match image {
            ImageRef::Docker(_) => BackendName::Docker,
            ImageRef::Host | ImageRef::Stored(_) | ImageRef::Rootfs(_) | ImageRef::Tar(_) => BackendName::Oci,
        }),
    }
}

/// `DIR` or `DIR:TARGET`, where a target begins with `/`.
pub(super) fn mount(text: &str) -> Result<Mount, String> {
    let (source, target) = match text.rsplit_once(':') {
        Some((source, target)) if !source.is_empty() && target.starts_with('/') => {
            (source, Some(PathBuf::from(target)))
        }
        Some(_) | None => (text, None),
    };
    let source = std::path::absolute(source).map_err(|error| error.to_string())?;
    std::fs::metadata(&source).map_err(|error| format!("it cannot be read: {error}"))?;
    let target = match target {
        Some(target) => target,
        // Links resolved: a path inside has no `.` and `..`.
        None => std::fs::canonicalize(&source).map_err(|error| error.to_string())?,
    };
    Ok(Mount { source, target })
}

/// `NAME=VALUE`.
pub(super) fn variable(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        Some(_) | None => Err(format!("`{text}` is not NAME=VALUE")),
    }
}

/// For the record: what was run, as text.
pub(super) fn shown(bytes: &[u8]) -> String {
    std::ffi::OsStr::from_bytes(bytes).to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        run: Run,
    }

    fn plan(policy: &str, flags: &[&str]) -> Result<Plan, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.toml");
        std::fs::write(&path, format!("format_version = 1\nname = \"x\"\n{policy}")).unwrap();
        let path = path.to_str().unwrap();
        let words = ["run", "--policy", path].into_iter().chain(flags.iter().copied());
        let words = words.chain(["--", "true", "-x"]);
        let cli = Cli::try_parse_from(words).map_err(|error| error.to_string())?;
        Plan::new(cli.run, dir.path()).map_err(|error| error.message)
    }

    const EXTENDS: &str = "extends = \"default\"\n";

    #[test]
    fn the_policy_gives_what_flags_do_not() {
        let policy = format!("{EXTENDS}[limits]\nmemory = \"64MiB\"\nwall_time = \"20s\"\n");
        let made = plan(&policy, &["--env", "A=b=c", "--workdir", "sub"]).unwrap();
        let spec = made.spec(SandboxId::random(), Identity { base: 1 << 20 }, "/w".into());
        assert_eq!((spec.limits.memory_bytes, made.backend), (64 << 20, BackendName::Oci));
        let wanted = Command::new(["true", "-x"])
            .env("A", "b=c")
            .cwd("sub")
            .timeout(std::time::Duration::from_secs(20));
        assert_eq!(made.command, wanted);
        // More time than the policy gives is not to be had; less is.
        for (asked, given) in [("1h", 20), ("3s", 3)] {
            let timeout = plan(&policy, &["--timeout", asked]).unwrap().command.timeout;
            assert_eq!(timeout, Some(std::time::Duration::from_secs(given)));
        }
    }

    #[test]
    fn the_backend_is_the_policys_then_the_flags_then_the_images() {
        let chosen = |policy: &str, flags: &[&str]| plan(&format!("{EXTENDS}{policy}"), flags).map(|plan| plan.backend);
        assert_eq!(chosen("", &[]), Ok(BackendName::Oci));
        assert_eq!(chosen("", &["--image", "docker:x"]), Ok(BackendName::Docker));
        assert_eq!(chosen("", &["--backend", "docker"]), Ok(BackendName::Docker));
        assert_eq!(chosen("backend = \"docker\"\n", &[]), Ok(BackendName::Docker));
        assert_eq!(
            chosen("backend = \"docker\"\n", &["--backend", "oci"]),
            Err("policy `x` demands the backend `docker`, not `oci`".to_owned())
        );
    }

    #[test]
    fn isolation_that_is_not_there_is_refused() {
        let plan = plan(&format!("{EXTENDS}isolation = \"gvisor\"\n"), &[]).unwrap();
        let able = |isolations: &[crate::sandbox::Isolation]| Capabilities {
            name: BackendName::Oci,
            isolations: isolations.to_vec(),
            user_namespace: true,
            freeze: true,
            memory_snapshot: Vec::new(),
            moulds: Vec::new(),
            borders: Vec::new(),
            lacks: Vec::new(),
        };
        use crate::sandbox::Isolation::{Container, Gvisor};
        assert!(plan.check(&able(&[Container, Gvisor])).is_ok());
        assert_eq!(
            plan.check(&able(&[Container])).unwrap_err().message,
            "policy `x` demands isolation `gvisor`; the `oci` backend gives container on this host (see `exuvia doctor`)"
        );
        assert!(plan.check(&able(&[])).unwrap_err().message.contains("gives none"));
    }

    #[test]
    fn mounts_and_variables_parse() {
        let at = |source: &str, target: &str| {
            Ok(Mount {
                source: source.into(),
                target: target.into(),
            })
        };
        assert_eq!(mount("/usr/bin"), at("/usr/bin", "/usr/bin"));
        assert_eq!(mount("/usr/bin:/data"), at("/usr/bin", "/data"));
        let odd = tempfile::Builder::new().prefix("a:b").tempdir().unwrap();
        let odd = odd.path().to_str().unwrap();
        assert_eq!(mount(odd), at(odd, odd));
        assert!(mount("/nowhere:/data").unwrap_err().starts_with("it cannot be read: "));
        assert!(variable("=x").is_err() && variable("x").is_err());
    }
}
