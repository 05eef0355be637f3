//! What every backend must do, as one suite of tests.
//!
//! A backend's test module says which groups it stands up to:
//!
//! ```ignore
//! suite::backend_suite!(portable, setup); // all, the fake too
//! suite::backend_suite!(real, setup);     // those that run real programs
//! suite::backend_suite!(limits, setup);   // those that cap memory and processes
//! suite::backend_suite!(walls, setup);    // those whose sandboxes hold
//! ```
//! `setup` is an `async fn() -> Result<Subject, String>`; the error is why it cannot run here. Each case is a test of its own,
//! in a sandbox of its own that is closed whatever comes, and must then be gone without a trace.

mod bare;
mod files;
mod lasting;
mod portable;
mod real;
mod streams;
mod terminal;
mod walls;

use std::os::unix::fs::chown;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use futures::FutureExt;
use tempfile::TempDir;

pub use files::*;
pub use lasting::*;
pub use portable::*;
pub use real::*;
pub use streams::*;
pub use terminal::*;
pub use walls::*;

use super::{Backend, Lack};
use crate::ids::SandboxId;
use crate::sandbox::exec::Finished;
use crate::sandbox::{Command, Identity, ImageRef, Isolation, Limits, Sandbox, Spec};

/// Whether the cases are to have the sizes that the behaviours name (`EXUVIA_FULL=1`), in place of some that fit into minutes.
pub fn is_full() -> bool {
    std::env::var("EXUVIA_FULL").as_deref() == Ok("1")
}

/// Of this process, so of the test alone where each has one of its own.
fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// A backend under test, and what its sandboxes are made of.
#[derive(Debug, Clone)]
pub struct Subject {
    pub backend: Arc<dyn Backend>,
    pub image: ImageRef,
    pub isolation: Isolation,
    /// Compiled seccomp filter.
    pub filter: Vec<u8>,
}

/// The shortest filter: allows everything. For tests of all but the filter itself.
pub fn allow_all() -> Vec<u8> {
    const RET_ALLOW: (u16, u32) = (libc::BPF_RET as u16, libc::SECCOMP_RET_ALLOW);
    let mut filter = RET_ALLOW.0.to_ne_bytes().to_vec();
    filter.extend([0, 0]);
    filter.extend(RET_ALLOW.1.to_ne_bytes());
    filter
}

impl Subject {
    /// A spec with small limits, an identity of its own, and `workspace`.
    pub fn spec(&self, workspace: &TempDir) -> Spec {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        // Far from ranges that anything else on the machine uses; two test processes at once are told apart by pid.
        let slot = (std::process::id() % 64) * 64 + NEXT.fetch_add(1, Ordering::Relaxed) % 64;
        let identity = Identity {
            base: 0x2000_0000 + slot * Identity::RANGE,
        };
        // Only root can; a backend that is not root's (the fake) runs nobody else.
        if nix::unistd::geteuid().is_root() {
            let uid = Some(identity.host_uid());
            chown(workspace.path(), uid, uid).expect("root may give a directory away");
        }
        Spec {
            id: SandboxId::random(),
            image: self.image.clone(),
            isolation: self.isolation,
            limits: Limits {
                memory_bytes: match (self.isolation, is_full()) {
                    // What its kernel keeps of a thousand commands is some 200 MiB.
                    (Isolation::Gvisor, true) => 384 << 20,
                    (_, true | false) => 96 << 20,
                },
                pids: 64,
                open_files: 256,
                tmp_bytes: 16 << 20,
                file_bytes: 4 << 30,
                ..Limits::default()
            },
            identity,
            workspace: Some(workspace.path().to_owned()),
            mounts: Vec::new(),
            labels: Default::default(),
        }
    }

    pub async fn open(&self, workspace: &TempDir) -> Sandbox {
        let spec = self.spec(workspace);
        Sandbox::open(self.backend.clone(), spec, self.filter.clone())
            .await
            .expect("the sandbox opens")
    }
}

/// A sandbox for one case.
pub struct Case {
    pub subject: Subject,
    pub sandbox: Sandbox,
    pub workspace: TempDir,
}

/// Enough for what the cases write.
pub const MAX_OUTPUT: usize = 4 << 20;

impl Case {
    /// Whether the backend says that its sandboxes do not give this; then it is told by name, and not asked for.
    pub fn lacks(&self, lack: Lack) -> bool {
        let is_lacking = self
            .subject
            .backend
            .capabilities()
            .lacks
            .contains(&(self.subject.isolation, lack));
        if is_lacking {
            eprintln!("NOT GIVEN by isolation `{}`: {lack:?}", self.subject.isolation);
        }
        is_lacking
    }

    /// Runs `text` in a shell, for ten seconds at most.
    pub async fn sh(&self, text: &str) -> Finished {
        self.run(Command::shell(text)).await
    }

    pub async fn run(&self, command: Command) -> Finished {
        let timeout = command.timeout.unwrap_or(Duration::from_secs(10));
        self.sandbox
            .run(command.timeout(timeout), MAX_OUTPUT)
            .await
            .expect("the command starts")
    }

    /// Standard output of a command that must succeed.
    pub async fn output(&self, text: &str) -> String {
        let finished = self.sh(text).await;
        assert!(
            finished.ended.is_success(),
            "`{text}`: {:?} {}",
            finished.ended,
            finished.stderr.text()
        );
        finished.stdout.text()
    }
}

/// Runs one case, unless `setup` says why it cannot.
pub async fn run(name: &str, setup: Result<Subject, String>, case: impl AsyncFnOnce(&Case)) {
    let subject = match setup {
        Ok(subject) => subject,
        Err(reason) => {
            crate::skip::skipped(name, reason);
            return;
        }
    };
    let workspace = TempDir::new().expect("a temporary directory");
    let sandbox = subject.open(&workspace).await;
    let case_data = Case {
        subject,
        sandbox,
        workspace,
    };
    let result = std::panic::AssertUnwindSafe(case(&case_data)).catch_unwind().await;
    let closed = case_data.sandbox.close(Duration::from_millis(200)).await;
    if let Err(panic) = result {
        std::panic::resume_unwind(panic);
    }
    closed.expect("the sandbox closes");
    let owned = case_data.subject.backend.list_owned().await.expect("listing works");
    let ours: Vec<_> = owned
        .iter()
        .filter(|owned| owned.id == *case_data.sandbox.id())
        .collect();
    assert!(ours.is_empty(), "left behind: {ours:?}");
}

/// Makes one test of each case of a group. See the module note.
macro_rules! backend_suite {
    (portable, $setup:path) => {
        $crate::sandbox::backend::suite::backend_suite!(@ $setup;
            life_cycle, exits_are_results, t8_output_is_bytes, t5_what_is_missing_is_named, fast_exits_lose_nothing,
            defaults_of_a_program, input_reaches_the_program, time_up_is_typed, killed_is_typed, a_destroyed_sandbox_is_lost,
            t12_a_sandbox_that_is_ended_says_why, t13_frozen_and_thawed, files_round_trip, t17_file_names_are_bytes,
            file_errors_are_typed, listing_and_searching);
    };
    (real, $setup:path) => {
        $crate::sandbox::backend::suite::backend_suite!(@ $setup;
            t1_timeout_takes_every_descendant, t2_a_background_child_is_killed_or_kept, t3_timed_out_execs_leave_nothing,
            t4_fast_exits_lose_nothing, t5_a_user_is_found_or_named, hanging_up_kills_the_tree, a_fork_bomb_ends,
            t7_large_output_and_slow_consumers, t9_large_input, arguments_up_to_the_kernels_limit, unread_input_does_not_hold_a_kill,
            a_flood_holds_up_neither_kill_nor_time, signals_reach_the_group, signals_reach_the_tree, nothing_is_inherited,
            programs_have_no_power, garbage_does_not_hurt_the_guest, many_at_once, t12_a_good_end_is_no_excuse,
            t10_an_exec_goes_on_from_an_exact_offset, an_exec_is_found_and_told, output_that_nobody_takes_waits_or_is_dropped,
            a_terminal_is_one, a_terminal_has_job_control, a_terminal_has_an_end_of_input, a_raw_terminal_has_an_end_of_input,
            a_port_inside_can_be_dialled,
            t16_magic_links_lead_nowhere, a_file_that_may_not_be_written_stays, t18_large_files_are_streams, t18_an_aborted_write_leaves_nothing, changes_are_told,
            devices_do_not_block, stop_ends_everything);
    };
    (limits, $setup:path) => {
        $crate::sandbox::backend::suite::backend_suite!(@ $setup; t6_memory_is_capped, t6_memory_ends_the_one_that_took_it, processes_are_capped, files_are_capped);
    };
    (walls, $setup:path) => {
        $crate::sandbox::backend::suite::backend_suite!(@ $setup; the_root_is_read_only, there_is_no_network, the_agent_is_out_of_reach);
    };
    (@ $setup:path; $($case:ident),* $(,)?) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() {
                let name = concat!(module_path!(), "::", stringify!($case));
                $crate::sandbox::backend::suite::run(name, $setup().await, $crate::sandbox::backend::suite::$case).await;
            }
        )*
    };
}
pub(crate) use backend_suite;
