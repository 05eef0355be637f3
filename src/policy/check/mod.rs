//! From a file as written to a [`Policy`]: everything that a schema cannot say, every problem at once.
//!
//! This file: identity, sandbox and budgets. `tools.rs`: rules. `mounts.rs`: mounts. `network.rs`: the way out.

mod mounts;
mod network;
mod tools;

use std::time::Duration;

use super::budgets::{BudgetOverrides, Budgets, widening};
use super::document::Document;
use super::input::{BudgetsInput, Input, LimitsInput};
use super::quantity::{parse_duration, parse_size, show_duration, show_size};
use super::violation::Violation;
use super::{Policy, Presets, schema, snapshot};
use crate::sandbox::disk::{Quota, Rates};
use crate::sandbox::seccomp::Profile;
use crate::sandbox::{BackendName, ImageRef, Isolation, Limits};

/// More problems than these are only counted.
const MAX_VIOLATIONS: usize = 100;

const SECOND: Duration = Duration::from_secs(1);
const DAY: Duration = Duration::from_secs(24 * 3600);
const MIB: u64 = 1 << 20;
const TIB: u64 = 1 << 40;

/// Checks a policy file. `parent` is the policy that it [extends](Document::extends); `presets` are where it names them from.
///
/// # Errors
/// Every problem, in the order of the file.
pub fn check(document: &Document, parent: Option<&Policy>, presets: &Presets) -> Result<Policy, Vec<Violation>> {
    let (value, violations) = schema::shape(document);
    let mut checker = Checker {
        document,
        parent,
        presets,
        violations,
    };
    let policy = match serde_json::from_value::<Input>(value) {
        Ok(input) => checker.policy(&input),
        Err(error) => {
            checker.problem("", format!("the file cannot be read as a policy: {error}"));
            None
        }
    };
    let mut violations = checker.violations;
    match policy {
        Some(policy) if violations.is_empty() => Ok(policy),
        Some(_) | None => {
            violations.sort_by_key(|violation| violation.position);
            if let Some(more) = violations.len().checked_sub(MAX_VIOLATIONS).filter(|more| *more > 0) {
                violations.truncate(MAX_VIOLATIONS);
                violations.push(document.violation("", format!("and {more} more problems")));
            }
            Err(violations)
        }
    }
}

struct Checker<'a> {
    document: &'a Document,
    parent: Option<&'a Policy>,
    presets: &'a Presets,
    violations: Vec<Violation>,
}

impl Checker<'_> {
    fn problem(&mut self, pointer: &str, message: impl Into<String>) {
        self.violations.push(self.document.violation(pointer, message));
    }

    /// `None` where a required field is missing, which the schema has reported.
    fn policy(&mut self, input: &Input) -> Option<Policy> {
        let name = input.name.clone().unwrap_or_default();
        let isolation = self.isolation(input.isolation);
        let backend = self.backend(input.backend);
        let image = self.image(input.image.as_deref());
        let seccomp = self.seccomp(input.seccomp);
        let limits = self.limits(&input.limits);
        let budgets = self.budgets(&input.budgets);
        let mounts = self.mounts(input.mounts.as_deref());
        let network = self.network(&input.network);
        let credentials = self.credentials(input.credentials.as_deref(), &network);
        let approvals_expire = self.approvals(input.approvals.expires.as_deref());
        let layers = self.layers(&name, &input.tools);
        input.format_version?;
        input.name.as_ref()?;
        let mut policy = Policy {
            name,
            description: input.description.clone(),
            isolation,
            backend,
            image,
            seccomp,
            limits,
            budgets,
            mounts,
            network,
            credentials,
            approvals_expire,
            layers,
            hash: String::new(),
        };
        policy.hash = snapshot::hash(&policy);
        Some(policy)
    }

    fn isolation(&mut self, written: Option<Isolation>) -> Isolation {
        match (written, self.parent) {
            (Some(own), Some(parent)) if own < parent.isolation => {
                let message = widening(&own.to_string(), &parent.isolation.to_string(), &parent.name);
                self.problem("/isolation", message);
                own
            }
            (Some(own), _) => own,
            (None, Some(parent)) => parent.isolation,
            (None, None) => Isolation::Container,
        }
    }

    fn seccomp(&mut self, written: Option<Profile>) -> Profile {
        match (written, self.parent) {
            (Some(own), Some(parent)) if own < parent.seccomp => {
                let message = widening(&own.to_string(), &parent.seccomp.to_string(), &parent.name);
                self.problem("/seccomp", message);
                own
            }
            (Some(own), _) => own,
            (None, Some(parent)) => parent.seccomp,
            (None, None) => Profile::Default,
        }
    }

    fn backend(&mut self, written: Option<BackendName>) -> Option<BackendName> {
        let inherited = self.parent.and_then(|parent| parent.backend);
        self.named_once("/backend", written, inherited)
    }

    /// A choice that a child may make where its parent has left it open.
    fn named_once<T: PartialEq + ToString>(
        &mut self,
        pointer: &str,
        written: Option<T>,
        inherited: Option<T>,
    ) -> Option<T> {
        match (written, inherited) {
            (Some(own), Some(inherited)) if own != inherited => {
                self.not_the_same(pointer, &own.to_string(), &inherited.to_string());
                Some(own)
            }
            (own, inherited) => own.or(inherited),
        }
    }

    fn image(&mut self, written: Option<&str>) -> ImageRef {
        let inherited = self.parent.map(|parent| parent.image.clone());
        let own = match written {
            None => return inherited.unwrap_or(ImageRef::Host),
            Some(text) => match image(text) {
                Ok(own) => own,
                Err(message) => {
                    self.problem("/image", message);
                    return inherited.unwrap_or(ImageRef::Host);
                }
            },
        };
        if let Some(inherited) = inherited.filter(|inherited| *inherited != own) {
            self.not_the_same("/image", &own.to_string(), &inherited.to_string());
        }
        own
    }

    /// Where neither of two values is the narrower one.
    fn not_the_same(&mut self, pointer: &str, own: &str, inherited: &str) {
        let owner = self.parent.map(|parent| parent.name.as_str()).unwrap_or_default();
        let message = format!("`{own}` is not the `{inherited}` of policy `{owner}`, and cannot differ from it");
        self.problem(pointer, message);
    }

    fn limits(&mut self, written: &LimitsInput) -> Limits {
        let inherited = self.parent.map(|parent| parent.limits.clone()).unwrap_or_default();
        let size = |checker: &mut Self, pointer: &str, text: &Option<String>, range, limit| {
            let own = text
                .as_deref()
                .and_then(|text| checker.quantity(pointer, text, parse_size, range, show_size));
            checker.capped(pointer, own, limit, show_size)
        };
        Limits {
            cpus: self.capped("/limits/cpus", written.cpus, inherited.cpus, |n| n.to_string()),
            memory_bytes: size(
                self,
                "/limits/memory",
                &written.memory,
                (16 * MIB, 4 * TIB),
                inherited.memory_bytes,
            ),
            swap_bytes: size(self, "/limits/swap", &written.swap, (0, 4 * TIB), inherited.swap_bytes),
            pids: self.capped("/limits/pids", written.pids, inherited.pids, |n| n.to_string()),
            open_files: self.capped("/limits/open_files", written.open_files, inherited.open_files, |n| {
                n.to_string()
            }),
            tmp_bytes: size(self, "/limits/tmp", &written.tmp, (MIB, TIB), inherited.tmp_bytes),
            tmp_inodes: self.capped("/limits/tmp_inodes", written.tmp_inodes, inherited.tmp_inodes, |n| {
                n.to_string()
            }),
            shm_bytes: size(self, "/limits/shm", &written.shm, (MIB, TIB), inherited.shm_bytes),
            disk: {
                let inherited = inherited.disk.unwrap_or_default();
                let range = (16 * MIB, 16 * TIB);
                Some(Quota {
                    bytes: size(self, "/limits/disk", &written.disk, range, inherited.bytes),
                    inodes: self.capped("/limits/disk_inodes", written.disk_inodes, inherited.inodes, |n| {
                        n.to_string()
                    }),
                })
            },
            disk_kind: self.named_once("/limits/disk_kind", written.disk_kind, inherited.disk_kind),
            disk_rates: {
                let mut rate = |pointer: &str, text: &Option<String>, inherited: Option<u64>| {
                    let rate = size(self, pointer, text, (64 << 10, TIB), inherited.unwrap_or(u64::MAX));
                    (rate != u64::MAX).then_some(rate)
                };
                Rates {
                    read: rate("/limits/disk_read", &written.disk_read, inherited.disk_rates.read),
                    write: rate("/limits/disk_write", &written.disk_write, inherited.disk_rates.write),
                }
            },
            file_bytes: size(
                self,
                "/limits/file_size",
                &written.file_size,
                (MIB, 16 * TIB),
                inherited.file_bytes,
            ),
            wall_time: {
                let own = self.duration("/limits/wall_time", written.wall_time.as_deref(), (SECOND, 7 * DAY));
                self.capped("/limits/wall_time", own, inherited.wall_time, show_duration)
            },
        }
    }

    fn budgets(&mut self, written: &BudgetsInput) -> Budgets {
        let own = BudgetOverrides {
            steps: written.steps,
            model_calls: written.model_calls,
            step_time: self.duration("/budgets/step_time", written.step_time.as_deref(), (SECOND, DAY)),
            total_time: self.duration("/budgets/total_time", written.total_time.as_deref(), (SECOND, 30 * DAY)),
            tokens: written.tokens,
            cost_micros: written.cost_usd.map(|usd| (usd * 1e6).round() as u64),
            parallel_tools: written.parallel_tools,
        };
        match self.parent {
            Some(parent) => {
                let (budgets, refusals) = parent.budgets.narrowed(&own, &parent.name);
                for refusal in refusals {
                    self.problem(&format!("/budgets/{}", refusal.field), refusal.message);
                }
                budgets
            }
            None => {
                let default = Budgets::default();
                Budgets {
                    steps: own.steps.or(default.steps),
                    model_calls: own.model_calls.or(default.model_calls),
                    step_time: own.step_time.unwrap_or(default.step_time),
                    total_time: own.total_time.unwrap_or(default.total_time),
                    tokens: own.tokens.or(default.tokens),
                    cost_micros: own.cost_micros.or(default.cost_micros),
                    parallel_tools: own.parallel_tools.unwrap_or(default.parallel_tools),
                }
            }
        }
    }

    fn approvals(&mut self, written: Option<&str>) -> Duration {
        let inherited = self
            .parent
            .map_or(Duration::from_secs(3600), |parent| parent.approvals_expire);
        let own = self.duration("/approvals/expires", written, (60 * SECOND, 30 * DAY));
        self.capped("/approvals/expires", own, inherited, show_duration)
    }

    fn duration(&mut self, pointer: &str, text: Option<&str>, range: (Duration, Duration)) -> Option<Duration> {
        self.quantity(pointer, text?, parse_duration, range, show_duration)
    }

    fn quantity<T: PartialOrd + Copy>(
        &mut self,
        pointer: &str,
        text: &str,
        parse: impl Fn(&str) -> Result<T, String>,
        (least, most): (T, T),
        show: impl Fn(T) -> String,
    ) -> Option<T> {
        let message = match parse(text) {
            Ok(value) if value >= least && value <= most => return Some(value),
            Ok(_) => format!("`{text}` is out of range: it must be {} to {}", show(least), show(most)),
            Err(message) => message,
        };
        self.problem(pointer, message);
        None
    }

    /// The own value, else the inherited one; with a parent the own one may not be larger.
    fn capped<T: PartialOrd + Copy>(
        &mut self,
        pointer: &str,
        own: Option<T>,
        inherited: T,
        show: impl Fn(T) -> String,
    ) -> T {
        if let (Some(own), Some(parent)) = (own, self.parent)
            && own > inherited
        {
            self.problem(pointer, widening(&show(own), &show(inherited), &parent.name));
        }
        own.unwrap_or(inherited)
    }
}

/// An image that is the same wherever the file is read: nothing is looked up on disk.
fn image(text: &str) -> Result<ImageRef, String> {
    let image = match text.split_once(':') {
        None if text == "host" => return Ok(ImageRef::Host),
        Some(("rootfs", path)) if path.starts_with('/') => ImageRef::Rootfs(path.into()),
        Some(("tar", path)) if path.starts_with('/') => ImageRef::Tar(path.into()),
        Some(("docker", name)) if !name.is_empty() => ImageRef::Docker(name.to_owned()),
        stored => {
            let name = match stored {
                Some(("image", name)) => name,
                Some(_) | None => text,
            };
            let named = name.parse().map(ImageRef::Stored);
            return named.map_err(|_| {
                format!(
                    "`{text}` names no image: write `host`, `image:NAME`, `rootfs:/DIR`, `tar:/FILE` or `docker:NAME`"
                )
            });
        }
    };
    Ok(image)
}
